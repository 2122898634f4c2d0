from __future__ import annotations

import pytest

from buffer_sink.queue_commit import (
    AlreadyDone,
    Append,
    Decision,
    Separate,
    decide,
    is_queued,
    transaction_prefix,
)
from opendata_buffer.consumer.isolation import TransactionFilter
from opendata_buffer.errors import QueueReset
from opendata_buffer.formats.keys import Transaction, batch_key, parse_location
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.transactions.commit_record import CommitRecord, record_key

PREFIX = "ingest"
ULIDS = [f"01JD0000000000000000000{number:03}" for number in range(100)]


def entry(number: int, batch: int | None = None, app: str = "q") -> NewEntry:
    txn = None if batch is None else Transaction(app, batch)
    return NewEntry(batch_key(PREFIX, ULIDS[number], txn), (Metadata(0, 5, b""),))


def decision(manifest: Manifest, record: CommitRecord | None, batch: int) -> Decision:
    return decide(manifest, record, Transaction("q", batch), prefix=PREFIX, key="m")


def test_the_first_batch_of_a_new_queue_is_appended() -> None:
    assert decision(Manifest.empty(), None, 0) == Append()


def test_a_batch_in_the_record_is_done() -> None:
    record = CommitRecord(batch=3, next_sequence=0)
    assert decision(Manifest.empty(), record, 3) == AlreadyDone()


def test_an_older_batch_than_the_record_s_is_done_too() -> None:
    record = CommitRecord(batch=3, next_sequence=0)
    assert decision(Manifest.empty(), record, 2) == AlreadyDone()
    assert decision(Manifest.empty(), record, 4) == Append()


def test_a_queued_batch_is_done_although_no_record_was_written() -> None:
    manifest = Manifest.empty().append([entry(0, batch=3)])
    assert decision(manifest, None, 3) == AlreadyDone((entry(0, batch=3).location,))
    assert decision(manifest, None, 2) == AlreadyDone(), "a later batch tells"
    assert decision(manifest, None, 4) == Append()


def test_other_apps_and_plain_batches_do_not_count() -> None:
    manifest = Manifest.empty().append(
        [entry(0), entry(1, batch=9, app="q2"), entry(2, batch=9, app="xq")]
    )
    assert decision(manifest, None, 0) == Append()


def test_a_half_dequeued_batch_is_still_seen() -> None:
    manifest = Manifest.empty().append([entry(0, batch=3), entry(1, batch=3)]).drop_through(0)
    assert decision(manifest, None, 3) == AlreadyDone((entry(1, batch=3).location,))


def test_a_separator_is_needed_only_when_our_entries_may_have_been_dequeued_unseen() -> None:
    full = Manifest.empty().append([entry(0, batch=0), entry(1), entry(2)])
    drained = full.drop_through(2)
    # Batch 0 ended at sequence 0; 1 and 2 came after, and one of them might be batch 1.
    assert decision(drained, CommitRecord(batch=0, next_sequence=1), 1) == Separate()
    # Nothing came after batch 0, so nothing is hidden.
    assert decision(drained, CommitRecord(batch=0, next_sequence=3), 1) == Append()
    # Without a record anything may be hidden.
    assert decision(drained, None, 1) == Separate()
    # An entry that is still queued stands in between already.
    assert decision(full.drop_through(1), None, 1) == Append()


def test_f4_a_queue_shorter_than_the_record_is_refused() -> None:
    record = CommitRecord(batch=3, next_sequence=7)
    with pytest.raises(QueueReset, match=r"up to sequence 6, but manifest 'm' ends at -1"):
        decision(Manifest.empty(), record, 4)


def test_a_payload_that_looks_like_a_location_is_not_one() -> None:
    forged = batch_key(PREFIX, ULIDS[1], Transaction("q", 99)).encode()
    # The two bytes before the text are its length, as before a location.
    payload = len(forged).to_bytes(2, "little") + forged
    real = batch_key(PREFIX, ULIDS[0], Transaction("q", 1))
    manifest = Manifest.empty().append([NewEntry(real, (Metadata(0, 0, payload),))])
    assert not is_queued(manifest, PREFIX, Transaction("q", 2))
    assert is_queued(manifest, PREFIX, Transaction("q", 1))


def test_a_prefix_with_any_characters_is_found() -> None:
    prefix = "töpfe/a b#%41"
    location = batch_key(prefix, ULIDS[0], Transaction("q", 5))
    manifest = Manifest.empty().append([NewEntry(location)])
    assert is_queued(manifest, prefix, Transaction("q", 5))
    assert not is_queued(manifest, prefix, Transaction("q", 6))


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("drained", [0, 1, 2, 3])
def test_whatever_was_dequeued_a_commit_repeated_without_record_reaches_the_reader_once(
    drained: int, others: int
) -> None:
    """The protocol and the reader's filter together, without a store."""
    before = CommitRecord(batch=6, next_sequence=1)
    first = [entry(1, batch=7), entry(2, batch=7)]
    manifest = Manifest.empty().append([entry(0, batch=6), *first])
    if others:
        manifest = manifest.append([entry(3)])
    queued = list(manifest.entries())
    if drained:
        manifest = manifest.drop_through(drained - 1)

    # The crash was before the record of batch 7 was written: the record is still batch 6's.
    match decision(manifest, before, 7):
        case AlreadyDone():
            again: list[NewEntry] = []
        case Separate():
            again = [entry(10), entry(11, batch=7), entry(12, batch=7)]
        case _:
            again = [entry(11, batch=7), entry(12, batch=7)]
    if again:
        queued += manifest.append(again).entries(start=manifest.next_sequence)

    passes = TransactionFilter(PREFIX)
    read = [each for each in queued if passes.offer(each.sequence, each.location)]
    numbers = [ULIDS.index(parsed.ulid) for each in read if (parsed := parse(each.location))]
    assert [number for number in numbers if number in (1, 2, 11, 12)] == [1, 2]


def parse(location: str):  # type: ignore[no-untyped-def]
    return parse_location(location, PREFIX)


def test_names() -> None:
    txn = Transaction("3f-a", 12)
    assert transaction_prefix("a/b", txn) == "a/b/app=3f-a/batch=12/"
    assert batch_key("a/b", ULIDS[0], txn).startswith(transaction_prefix("a/b", txn))
    assert record_key("a/b", "3f-a") == "a/b/app=3f-a/_commit.json"
    # The collector deletes what is named like a batch; the record is not.
    assert parse_location(record_key("a/b", "3f-a"), "a/b") is None


def test_a_claimed_app_id_without_batches_lets_batch_0_be_appended() -> None:
    assert decision(Manifest.empty(), CommitRecord(-1, 0, "one"), 0) == Append()
