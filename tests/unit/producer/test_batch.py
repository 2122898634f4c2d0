"""The calls of one object: what they count, and what becomes of them when it is encoded."""

from __future__ import annotations

from uuid import UUID

from opendata_buffer.formats.batch import Compression, decode_batch
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.producer.append_buffer import CALL_BYTES, RECORD_HELD, Call, Run
from opendata_buffer.producer.batching import RANGE_BYTES, Batch
from opendata_buffer.producer.handle import Completion
from opendata_buffer.testing.runtime import ManualRuntime


def call(entry: bytes, metadata: bytes = b"", at: int = 1_700) -> Call:
    return Call(len(entry).to_bytes(4, "little") + entry, 1, metadata, at)


def batch(*calls: Call) -> Batch:
    made = Batch(Completion(ManualRuntime()), 0.0)
    for each in calls:
        made.add(each)
    return made


def ranges(made: Batch) -> tuple[Metadata, ...]:
    return made.encode(Compression.NONE, 3).metadata


def test_f35_a_thousand_single_record_calls_make_a_range_for_each_millisecond() -> None:
    # What the manifest carries for a batch is written again with each append.
    made = batch(*(call(b"x", b"topic", at=n // 100) for n in range(1_000)))
    assert ranges(made) == tuple(Metadata(n * 100, n, b"topic") for n in range(10))
    assert made.metadata_size == 10 * (RANGE_BYTES + len(b"topic"))


def test_calls_that_differ_in_time_or_payload_keep_a_range_of_their_own() -> None:
    given = ((b"a", 1), (b"a", 1), (b"b", 1), (b"a", 1), (b"a", 2), (b"a", 1))
    assert ranges(batch(*(call(b"", payload, at=at) for payload, at in given))) == (
        Metadata(0, 1, b"a"),
        Metadata(2, 1, b"b"),
        Metadata(3, 1, b"a"),
        Metadata(4, 2, b"a"),
        Metadata(5, 1, b"a"),
    )


def test_a_run_is_counted_when_it_is_closed_and_stands_in_its_place() -> None:
    made = batch(call(b"first", at=5))
    counted = (made.count, made.calls, made.size)
    run = Run(b"second", 5, None, 10_000, 1.0)
    made.open(run)
    run.append(b"third")
    run.left -= len(b"third") + RECORD_HELD
    assert (made.count, made.calls, made.size) == counted
    made.fold()
    made.fold()
    assert (made.count, made.calls) == (3, 3)
    made.add(call(b"last", at=6))
    encoded = made.encode(Compression.NONE, 3)
    assert decode_batch(encoded.data) == [b"first", b"second", b"third", b"last"]
    assert encoded.metadata == (Metadata(0, 5), Metadata(3, 6))
    assert (encoded.count, encoded.size) == (4, made.size)


def test_what_is_uploaded_says_whose_it_is_and_whether_its_failure_stops_others() -> None:
    shared = batch(call(b"a"), call(b"b")).upload(9.0)
    assert (shared.calls, shared.held, shared.deadline) == (2, 2 * (5 + CALL_BYTES), 9.0)
    assert (shared.transaction, shared.message, shared.ordered) == (None, None, False)

    txn, message = Transaction("app", 1), UUID("9a1b2c3d-4e5f-1678-8a02-010203040506")
    one = batch(Call(b"\1\0\0\0t", 1, b"", 0, txn)).upload(9.0)
    assert (one.transaction, one.message, one.ordered) == (txn, None, True)
    told = batch(Call(b"\1\0\0\0m", 1, b"", 0, txn, message)).upload(9.0)
    assert (told.transaction, told.message, told.ordered) == (txn, message, False)
    # The separator in front of a first transaction.
    assert batch().upload(9.0).ordered
