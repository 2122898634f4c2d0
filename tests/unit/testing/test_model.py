"""Every rule of the delivery model, broken once."""

from __future__ import annotations

import pytest

from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.entries import Metadata, NewEntry
from opendata_buffer.formats.manifest import Manifest
from tests.support.model import DeliveryModel, Record, Sink

A = "ingest/01JMTRJ8G00000000000000000.batch"
B = "ingest/01JMTRJ8G00000000000000001.batch"
C = "ingest/01JMTRJ8G00000000000000002.batch"
ONE = Record("p", 0)
TWO = Record("p", 1)


class Broken(Exception):
    """A rule fired."""


def fail(reason: str) -> None:
    raise Broken(reason)


@pytest.fixture
def model() -> DeliveryModel:
    return DeliveryModel(fail, "ingest", "ingest/manifest")


def append(model: DeliveryModel, *locations: str) -> None:
    entries = [NewEntry(location) for location in locations]
    model.manifest_written("producer", model.manifest.append(entries).raw)


def claim(model: DeliveryModel, process: str) -> None:
    model.manifest_written(process, model.manifest.with_epoch(model.manifest.epoch + 1).raw)


def drop(model: DeliveryModel, process: str, through: int) -> None:
    model.manifest_written(process, model.manifest.drop_through(through).raw)


def test_record_round_trip() -> None:
    assert ONE.encode() == b"p:0"
    assert Record.decode(b"a:b:12") == Record("a:b", 12)


def test_sink_writes_only_from_where_it_is() -> None:
    sink = Sink()
    assert sink.write(None, 3, [ONE], "{}")
    assert not sink.write(None, 3, [TWO], "{}")
    assert (sink.position, sink.records) == (3, [ONE])
    assert sink.holds(3)
    assert not sink.holds(4)


def test_a_whole_life_breaks_no_rule(model: DeliveryModel) -> None:
    append(model, A)
    model.object_written(A, encode_batch([b"p:0"]))
    model.reported_durable([ONE], 0, A)
    claim(model, "c")
    metadata = (Metadata(0, 1, b"p:0+1"),)
    assert model.check_batch(0, A, [b"p:0"], metadata) == [ONE]
    assert model.write_sink(None, 0, [ONE], None)
    drop(model, "c", 0)
    model.object_deleted("c", A)
    model.check_delivered()
    model.check_complete("p", 1)
    assert model.counts == {
        "manifest writes": 3,
        "claims": 1,
        "dequeues": 1,
        "collected": 1,
        "lost unacknowledged": 0,
        "torn": 0,
    }


def test_bytes_that_are_no_manifest(model: DeliveryModel) -> None:
    with pytest.raises(Broken, match="wrote an illegal manifest"):
        model.manifest_written("x", b"nonsense")


def test_sequence_that_falls(model: DeliveryModel) -> None:
    append(model, A)
    with pytest.raises(Broken, match="next_sequence falls"):
        model.manifest_written("x", Manifest.empty().raw)


def test_queued_entry_that_changes(model: DeliveryModel) -> None:
    append(model, A)
    other = Manifest.empty().append([NewEntry(B)])
    with pytest.raises(Broken, match="changed queued entries"):
        model.manifest_written("x", other.raw)


def test_f1_location_that_is_queued_twice(model: DeliveryModel) -> None:
    append(model, A)
    with pytest.raises(Broken, match="is queued twice, at 0 and 1"):
        append(model, A)


def test_claim_that_skips_an_epoch(model: DeliveryModel) -> None:
    with pytest.raises(Broken, match="claimed"):
        model.manifest_written("c", model.manifest.with_epoch(2).raw)


def test_f8_dequeue_by_a_fenced_consumer(model: DeliveryModel) -> None:
    append(model, A)
    claim(model, "old")
    claim(model, "new")
    model.write_sink(None, 0, [ONE], None)
    with pytest.raises(Broken, match="old dequeued, but new owns epoch 2"):
        drop(model, "old", 0)


def test_dequeue_of_what_the_sink_lacks(model: DeliveryModel) -> None:
    append(model, A, B)
    claim(model, "c")
    model.write_sink(None, 0, [ONE], None)
    with pytest.raises(Broken, match="dequeued through 1, but the sink holds only 0"):
        drop(model, "c", 1)


def test_deletion_of_what_is_no_batch(model: DeliveryModel) -> None:
    with pytest.raises(Broken, match="which is no batch"):
        model.object_deleted("c", "ingest/manifest")


def test_f5_deletion_of_a_durable_unread_batch(model: DeliveryModel) -> None:
    append(model, A)
    model.reported_durable([ONE], 0, A)
    with pytest.raises(Broken, match="durable and not yet read"):
        model.object_deleted("c", A)


def test_f5_durable_after_it_was_deleted(model: DeliveryModel) -> None:
    model.object_deleted("c", A)
    append(model, A)
    with pytest.raises(Broken, match="reported durable after it was deleted"):
        model.reported_durable([ONE], 0, A)


def test_deletion_of_a_batch_nobody_promised(model: DeliveryModel) -> None:
    append(model, A)
    model.object_deleted("c", A)
    assert model.counts["lost unacknowledged"] == 1
    model.poison(0, A)


def test_batch_that_was_deleted_and_written_again(model: DeliveryModel) -> None:
    append(model, A)
    model.object_deleted("c", A)
    model.object_written(A, encode_batch([b"p:0"]))
    model.reported_durable([ONE], 0, A)
    assert model.durable == {ONE: A}


def test_durable_at_a_sequence_it_does_not_have(model: DeliveryModel) -> None:
    append(model, A)
    with pytest.raises(Broken, match="reported durable at 7, but it was put at 0"):
        model.reported_durable([ONE], 7, A)


@pytest.mark.parametrize(
    ("entries", "metadata"),
    [
        ([b"p:0", b"p:1"], (Metadata(0, 1, b"p:0+1"),)),
        ([b"p:0", b"p:1"], (Metadata(0, 1, b"p:0+1"), Metadata(1, 1, b"p:5+1"))),
        ([b"p:0", b"p:1"], ()),
    ],
)
def test_ranges_that_are_not_those_of_the_calls(
    model: DeliveryModel, entries: list[bytes], metadata: tuple[Metadata, ...]
) -> None:
    append(model, A)
    with pytest.raises(Broken, match=r"holds|does not cover"):
        model.check_batch(0, A, entries, metadata)


def test_a_range_without_metadata_holds_what_was_produced_without(model: DeliveryModel) -> None:
    append(model, A)
    model.produced_plain([ONE, TWO])
    entries = [b"p:0", b"p:1", b"p:2"]
    assert model.check_batch(
        0, A, entries, (Metadata(0, 1, b""), Metadata(1, 2, b""), Metadata(2, 2, b"p:2+1"))
    )
    with pytest.raises(Broken, match="holds"):
        model.check_batch(0, A, entries, (Metadata(0, 1, b""),))


def test_batch_read_at_another_sequence(model: DeliveryModel) -> None:
    append(model, A)
    with pytest.raises(Broken, match="queued elsewhere"):
        model.check_batch(1, A, [b"p:0"], (Metadata(0, 1, b"p:0+1"),))


def test_record_twice_in_the_sink(model: DeliveryModel) -> None:
    model.write_sink(None, 0, [ONE], None)
    with pytest.raises(Broken, match="in the sink twice"):
        model.write_sink(0, 1, [ONE], None)


def test_records_out_of_order(model: DeliveryModel) -> None:
    model.write_sink(None, 0, [TWO], None)
    with pytest.raises(Broken, match="comes after number 1"):
        model.write_sink(0, 1, [ONE], None)


def test_repeat_of_a_skipped_batch_may_come_late(model: DeliveryModel) -> None:
    append(model, A, B)
    model.object_written(A, encode_batch([b"p:0"]))
    model.poison(0, A)
    model.write_sink(None, 1, [TWO], None)
    model.write_sink(1, 2, [ONE], None)
    with pytest.raises(Broken, match="in the sink twice"):
        model.write_sink(2, 3, [ONE], None)


def test_zombie_writes_nothing_into_the_sink(model: DeliveryModel) -> None:
    model.write_sink(None, 0, [ONE], None)
    assert not model.write_sink(None, 0, [ONE], None)


def test_durable_batch_that_cannot_be_read(model: DeliveryModel) -> None:
    append(model, A)
    model.reported_durable([ONE], 0, A)
    with pytest.raises(Broken, match=r"durable batch 0 at .* cannot be read"):
        model.poison(0, A)
    model.write_sink(None, 0, [ONE], None)
    model.poison(0, A)


def test_durable_record_that_never_arrives(model: DeliveryModel) -> None:
    append(model, A)
    model.reported_durable([ONE], 0, A)
    with pytest.raises(Broken, match="1 durable records are not in the sink"):
        model.check_delivered()


@pytest.mark.parametrize("torn", [True, False])
def test_repeat_of_a_batch_whose_append_was_passed_in_part_is_no_loss(
    model: DeliveryModel, torn: bool
) -> None:
    first, second, again = (f"ingest/app=p/batch=0/{key[7:]}" for key in (A, B, C))
    model.object_written(first, encode_batch([b"p:0"]))
    # With another batch between them these are two appends, each passed or not as a whole.
    append(model, *((first, second) if torn else (first, A, second)))
    model.poison(0, first)
    model.write_sink(None, model.sequences[second], [TWO], None)
    append(model, again)
    model.reported_durable([ONE], model.sequences[again], again)
    model.write_sink(model.sequences[second], model.sequences[again], [], None)
    claim(model, "c")
    drop(model, "c", model.sequences[again])
    if torn:
        model.check_delivered()
        model.check_complete("p", 2)
        assert model.counts["torn"] == 2
        return
    with pytest.raises(Broken, match="1 durable records are not in the sink"):
        model.check_delivered()
    with pytest.raises(Broken, match=r"\[0\] are missing"):
        model.check_complete("p", 2)


def test_queue_that_is_not_drained(model: DeliveryModel) -> None:
    append(model, A)
    with pytest.raises(Broken, match="still holds"):
        model.check_delivered()


def test_transaction_that_is_missing(model: DeliveryModel) -> None:
    model.write_sink(None, 0, [ONE, Record("p", 2)], None)
    with pytest.raises(Broken, match=r"\[1\] are missing"):
        model.check_complete("p", 3)
