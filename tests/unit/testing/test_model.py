"""The simulation's rules: each one notices when it is broken, and sound histories pass."""

from __future__ import annotations

import pytest

from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.testing.model import DeliveryModel, Record, Sink

A, B, C = (f"ingest/01J5T4R3KXBMZ7QV9N2WG8YD{n}P.batch" for n in "HJK")


class Broken(Exception):
    """A rule was broken."""


def fail(message: str) -> None:
    raise Broken(message)


def model(*writes: Manifest) -> DeliveryModel:
    made = DeliveryModel(fail, "ingest", "ingest/manifest")
    for manifest in writes:
        made.manifest_written("writer", manifest.raw)
    return made


def queue(*locations: str) -> Manifest:
    return Manifest.empty().append([NewEntry(each) for each in locations])


def broken(part: str) -> pytest.RaisesExc[Broken]:
    return pytest.raises(Broken, match=part)


def test_a_sound_history_passes_every_rule() -> None:
    records = [Record("p", 0), Record("p", 1)]
    now = queue(A)
    rules = model(now)
    rules.reported_durable(records, 0, A)
    now = now.with_epoch(1)
    rules.manifest_written("reader", now.raw)
    metadata = (Metadata(0, 0, b"p:0+2"),)
    assert rules.check_batch(0, A, [each.encode() for each in records], metadata) == records
    assert rules.write_sink(None, 0, records, None)
    now = now.drop_through(0)
    rules.manifest_written("reader", now.raw)
    rules.object_deleted("reader", A)
    rules.check_delivered()
    rules.check_complete("p", 2)
    assert rules.counts == {
        "manifest writes": 3, "claims": 1, "dequeues": 1, "collected": 1, "lost unacknowledged": 0,
    }  # fmt: skip


def test_a_manifest_that_goes_backwards() -> None:
    rules = model(queue(A, B))
    with broken("illegal manifest"):
        rules.manifest_written("writer", queue(A).raw)


def test_bytes_that_are_no_manifest() -> None:
    with broken("illegal manifest"):
        model().manifest_written("writer", b"nonsense")


def test_a_queued_entry_that_changes() -> None:
    with broken("changed queued entries"):
        model(queue(A)).manifest_written("writer", queue(B, C).raw)


def test_f1_a_batch_that_is_queued_twice() -> None:
    with broken("queued twice"):
        model(queue(A)).manifest_written("writer", queue(A, A).raw)


def test_a_claim_that_skips_an_epoch() -> None:
    with broken("claimed"):
        model(queue(A)).manifest_written("reader", queue(A).with_epoch(2).raw)


def test_f8_a_dequeue_by_a_fenced_consumer() -> None:
    first, second = queue(A).with_epoch(1), queue(A).with_epoch(2)
    rules = model(queue(A))
    rules.manifest_written("zombie", first.raw)
    rules.manifest_written("owner", second.raw)
    rules.write_sink(None, 0, [], None)
    with broken("zombie dequeued, but owner owns"):
        rules.manifest_written("zombie", second.drop_through(0).raw)


def test_f26_a_dequeue_of_what_was_not_read() -> None:
    claimed = queue(A, B).with_epoch(1)
    rules = model(queue(A, B))
    rules.manifest_written("reader", claimed.raw)
    rules.write_sink(None, 0, [], None)
    with broken("the sink holds only 0"):
        rules.manifest_written("reader", claimed.drop_through(1).raw)


def test_f5_a_durable_batch_that_is_deleted_unread() -> None:
    rules = model(queue(A))
    rules.reported_durable([Record("p", 0)], 0, A)
    with broken("durable and not yet read"):
        rules.object_deleted("collector", A)


def test_f5_a_batch_that_becomes_durable_after_it_was_deleted() -> None:
    rules = model(queue(A))
    rules.object_deleted("collector", A)
    assert rules.counts["lost unacknowledged"] == 1
    with broken("after it was deleted unread"):
        rules.reported_durable([Record("p", 0)], 0, A)
    rules.object_written(A)  # uploaded again: nothing is lost any more
    rules.reported_durable([Record("p", 0)], 0, A)


def test_an_object_that_is_no_batch_is_deleted() -> None:
    with broken("which is no batch"):
        model().object_deleted("collector", "ingest/manifest")


def test_f2_a_batch_reported_durable_that_is_not_queued_there() -> None:
    with broken("put at None"):
        model().reported_durable([Record("p", 0)], 0, A)
    with broken("put at 0"):
        model(queue(A)).reported_durable([Record("p", 0)], 1, A)


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (Metadata(0, 0, b"p:0+1"),),
        (Metadata(0, 0, b"q:0+2"),),
        (Metadata(1, 0, b"p:1+1"),),
        (Metadata(0, 0, b"p:0+2"), Metadata(2, 0, b"p:2+0")),
    ],
)
def test_ranges_that_do_not_fit_the_records(metadata: tuple[Metadata, ...]) -> None:
    with pytest.raises(Broken):
        model(queue(A)).check_batch(0, A, [b"p:0", b"p:1"], metadata)


def test_a_batch_read_at_another_sequence() -> None:
    with broken("queued elsewhere"):
        model(queue(A)).check_batch(1, A, [], ())


def test_a_record_that_arrives_twice() -> None:
    rules = model()
    rules.write_sink(None, 0, [Record("p", 0)], None)
    with broken("in the sink twice"):
        rules.write_sink(0, 1, [Record("p", 0)], None)


def test_a_producers_order_that_is_lost() -> None:
    rules = model()
    rules.write_sink(None, 0, [Record("p", 1), Record("q", 0)], None)
    with broken("comes after number 1"):
        rules.write_sink(0, 1, [Record("p", 0)], None)


def test_f25_a_durable_batch_that_cannot_be_read_until_it_is_in_the_sink() -> None:
    rules = model(queue(A))
    rules.poison(0, A)  # never reported durable: its producer knows
    rules.reported_durable([Record("p", 0)], 0, A)
    with broken("cannot be read"):
        rules.poison(0, A)
    rules.write_sink(None, 0, [Record("p", 0)], None)
    rules.poison(0, A)


def test_a_durable_record_that_never_arrives() -> None:
    rules = model(queue(A))
    rules.reported_durable([Record("p", 0)], 0, A)
    with broken("1 durable records are not in the sink"):
        rules.check_delivered()


def test_a_queue_that_is_not_drained() -> None:
    with broken("still holds"):
        model(queue(A)).check_delivered()


def test_a_producer_whose_records_are_incomplete() -> None:
    rules = model()
    rules.write_sink(None, 0, [Record("p", 0), Record("p", 2)], None)
    with broken(r"\[1\] are missing"):
        rules.check_complete("p", 3)


def test_the_sink_refuses_who_did_not_see_the_last_write() -> None:
    sink = Sink()
    assert sink.write(None, 3, [Record("p", 0)], "state")
    assert not sink.write(None, 4, [Record("p", 1)], "zombie's")
    assert (sink.position, sink.state, sink.records) == (3, "state", [Record("p", 0)])
    assert [sink.holds(sequence) for sequence in (2, 3, 4)] == [True, True, False]


def test_records_round_trip_also_with_colons_in_the_name() -> None:
    assert Record("a:b", 7).encode() == b"a:b:7"
    assert Record.decode(b"a:b:7") == Record("a:b", 7)
