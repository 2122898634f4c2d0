"""Every rule of the delivery model, broken once."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from tests.support.model import DeliveryModel, Record

A = "ingest/01JMTRJ8G00000000000000000.batch"
B = "ingest/01JMTRJ8G00000000000000001.batch"
C = "ingest/01JMTRJ8G00000000000000002.batch"
ONE = Record("p", 0)
TWO = Record("p", 1)


class Broken(Exception):
    """A rule fired."""


def fail(reason: str) -> None:
    raise Broken(reason)


class Model(DeliveryModel):
    def __init__(self) -> None:
        super().__init__(fail, "ingest", "ingest/manifest")

    def append(self, *locations: str) -> None:
        entries = [NewEntry(location) for location in locations]
        self.manifest_written("producer", self.manifest.append(entries).raw)

    def claim(self, process: str, epochs: int = 1) -> None:
        self.manifest_written(process, self.manifest.with_epoch(self.manifest.epoch + epochs).raw)

    def drop(self, process: str, through: int) -> None:
        self.manifest_written(process, self.manifest.drop_through(through).raw)

    def put(self, position: int, *records: Record) -> bool:
        """Into the sink, by its owner."""
        return self.write_sink(self.sink.position, position, records, None)


@pytest.fixture
def model() -> Model:
    return Model()


ELSEWHERE = Manifest.empty().append([NewEntry(B)])
RANGE = Metadata(0, 1, b"p:0+1")


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        ("wrote an illegal manifest", [("manifest_written", "x", b"nonsense")]),
        ("next_sequence falls", [("append", A), ("manifest_written", "x", Manifest.empty().raw)]),
        ("changed queued entries", [("append", A), ("manifest_written", "x", ELSEWHERE.raw)]),
        pytest.param("queued twice, at 0 and 1", [("append", A), ("append", A)], id="f1"),
        ("claimed", [("claim", "c", 2)]),
        pytest.param(
            "old dequeued, but new owns epoch 2",
            [
                ("append", A),
                ("claim", "old"),
                ("claim", "new"),
                ("drop", "old", 0),
            ],
            id="f8",
        ),
        (
            "dequeued through 1, but the sink holds only 0",
            [("append", A, B), ("claim", "c"), ("put", 0, ONE), ("drop", "c", 1)],
        ),
        ("which is no batch", [("object_deleted", "c", "ingest/manifest")]),
        pytest.param(
            "durable and not yet read",
            [("append", A), ("reported_durable", [ONE], 0, A), ("object_deleted", "c", A)],
            id="f5 read",
        ),
        pytest.param(
            "reported durable after it was deleted",
            [("object_deleted", "c", A), ("append", A), ("reported_durable", [ONE], 0, A)],
            id="f5 deleted",
        ),
        (
            "reported durable at 7, but it was put at 0",
            [("append", A), ("reported_durable", [ONE], 7, A)],
        ),
        ("holds", [("append", A), ("check_batch", 0, A, [b"p:0"] * 2, (RANGE,))]),
        (
            "holds",
            [("append", A), ("check_batch", 0, A, [b"p:0"] * 2, (RANGE, Metadata(1, 1, b"p:5+1")))],
        ),
        ("does not cover", [("append", A), ("check_batch", 0, A, [b"p:0"], ())]),
        ("queued elsewhere", [("append", A), ("check_batch", 1, A, [b"p:0"], (RANGE,))]),
        ("in the sink twice", [("put", 0, ONE), ("put", 1, ONE)]),
        ("comes after number 1", [("put", 0, TWO), ("put", 1, ONE)]),
        (
            r"durable batch 0 at .* cannot be read",
            [("append", A), ("reported_durable", [ONE], 0, A), ("poison", 0, A)],
        ),
        (
            "1 durable records are not in the sink",
            [("append", A), ("reported_durable", [ONE], 0, A), ("check_delivered",)],
        ),
        ("still holds", [("append", A), ("check_delivered",)]),
        (r"\[1\] are missing", [("put", 0, ONE, Record("p", 2)), ("check_complete", "p", 3)]),
    ],
)
def test_a_broken_rule_is_named(model: Model, rule: str, steps: list[Any]) -> None:
    *before, last = steps
    for name, *arguments in before:
        getattr(model, name)(*arguments)
    with pytest.raises(Broken, match=rule):
        getattr(model, last[0])(*last[1:])


def test_a_range_without_metadata_holds_records_produced_without(model: Model) -> None:
    model.append(A)
    model.produced_plain([ONE, TWO])
    entries = [b"p:0", b"p:1", b"p:2"]
    assert model.check_batch(
        0, A, entries, (Metadata(0, 1, b""), Metadata(1, 2, b""), Metadata(2, 2, b"p:2+1"))
    )
    with pytest.raises(Broken, match="holds"):
        model.check_batch(0, A, entries, (Metadata(0, 1, b""),))


def test_the_repeat_of_a_skipped_batch_may_come_late_and_only_once(model: Model) -> None:
    model.append(A, B)
    model.object_written(A, encode_batch([b"p:0"]))
    model.poison(0, A)
    model.put(1, TWO)
    model.put(2, ONE)
    with pytest.raises(Broken, match="in the sink twice"):
        model.put(3, ONE)


@pytest.mark.parametrize("torn", [True, False])
def test_repeat_of_a_batch_whose_append_was_passed_in_part_is_no_loss(
    model: Model, torn: bool
) -> None:
    first, second, again = (f"ingest/app=p/batch=0/{key[7:]}" for key in (A, B, C))
    model.object_written(first, encode_batch([b"p:0"]))
    # With another batch between them these are two appends, each passed or not as a whole.
    model.append(*((first, second) if torn else (first, A, second)))
    model.poison(0, first)
    model.put(model.sequences[second], TWO)
    model.append(again)
    model.reported_durable([ONE], model.sequences[again], again)
    model.put(model.sequences[again])
    model.claim("c")
    model.drop("c", model.sequences[again])
    if torn:
        model.check_delivered()
        model.check_complete("p", 2)
        assert model.counts["torn"] == 2
        return
    with pytest.raises(Broken, match="1 durable records are not in the sink"):
        model.check_delivered()
    with pytest.raises(Broken, match=r"\[0\] are missing"):
        model.check_complete("p", 2)
