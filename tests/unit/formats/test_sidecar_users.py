"""Every small object beside a manifest is refused in the same way: object, field, value and fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer.broker import claims
from opendata_buffer.broker import discovery_record as announcement
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.gc import Place
from opendata_buffer.quarantine import QuarantineReport, read_report, write_report
from opendata_buffer.queue.consumer_info import ConsumerInfo
from opendata_buffer.queue.ownership import read_marker
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.transactions.commit_record import CommitRecord

CONFIG = QueueConfig(store="memory://", data_path_prefix="in")

REPORT = QuarantineReport(
    id="7-ab",
    sequence=7,
    location="in/a.batch",
    copied_bytes=3,
    error="torn",
    query="",
    time="2026-01-01T00:00:00.000+00:00",
    metadata=(Metadata(0, -5, b"payload"),),
)


def read_owner(data: bytes) -> object:
    store = MemoryStore()
    store.put("in/_owner.json", data)
    return read_marker(store, CONFIG, ManualRuntime())


def read_quarantine(data: bytes) -> object:
    store = MemoryStore()
    store.put("in/_quarantine/7-ab.json", data)
    return read_report(store, "in", "7-ab")


def written(report: QuarantineReport) -> bytes:
    store = MemoryStore()
    write_report(store, "in", report)
    return bytes(store.get("in/_quarantine/7-ab.json").data)  # type: ignore[union-attr]


OWNER = (
    b'{"version": 1, "manifest": "manifest", "id": "01J5", "next_sequence": 42, "epoch": 3, '
    b'"acked": 39, "acked_location": "in/a.batch"}\n'
)

# Bytes as they are written, and how they are read.
OBJECTS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "the owner marker": (OWNER, read_owner),
    "the note of the consumer": (
        ConsumerInfo(3, "host", 4711, "Spark", "", 1_767_225_600_000).to_json(),
        ConsumerInfo.from_json,
    ),
    "the commit record": (
        CommitRecord(3, 7, "q", {}, "run", "01" * 6, {"p-00000": 1}).to_json(),
        CommitRecord.from_json,
    ),
    "the garbage collector's place": (Place("in/a").to_json(), Place.from_json),
    "a broker's announcement": (
        announcement.encode(announcement.DiscoveryRecord(3, "01K9", "h:1", b"s" * 32, "ab", 4, 5)),
        announcement.decode,
    ),
    "the record of workers' claims": (
        claims.encode(
            claims.Claims(1, 2, 3, {3: claims.ClaimHolder("w", 4, 5)}, frozenset({7}), {3: 1}, "q")
        ),
        claims.decode,
    ),
    "the topic's description": (
        TopicDescription.new("01J5", 2).drained("0", 5).to_json(),
        TopicDescription.from_json,
    ),
    "the report of a batch in quarantine": (written(REPORT), read_quarantine),
}

FIELDS = [
    (name, field) for name, (data, _) in OBJECTS.items() for field in json.loads(data) if field
]


def with_field(data: bytes, field: str, value: Any) -> bytes:
    return json.dumps({**json.loads(data), field: value}).encode()


@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_written_is_read(name: str) -> None:
    data, read = OBJECTS[name]
    assert read(data) == read(with_field(data, "of_a_later_release", [1])) or name in (
        "the owner marker",  # these keep the field
        "the note of the consumer",
        "the commit record",
        "the topic's description",
    )


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_field_of_another_type_is_refused_by_name(name: str, field: str) -> None:
    data, read = OBJECTS[name]
    for value in (True, -(2**70), {"a": [7.5]} if field != "transactions" else [7.5]):
        with pytest.raises(CorruptData, match=f"{name} is not readable: field '{field}' is .*not "):
            read(with_field(data, field, value))


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 10_000, b"{}", b'{"version": 0}'])
def test_what_is_no_such_object_is_refused_by_name_with_the_fix(name: str, data: bytes) -> None:
    _, read = OBJECTS[name]
    with pytest.raises(CorruptData, match=rf"{name} is not readable: .*\. [A-Z].*\.$"):
        read(data)


@pytest.mark.parametrize("name", OBJECTS)
def test_one_of_a_later_version_is_refused_by_its_version(name: str) -> None:
    data, read = OBJECTS[name]
    with pytest.raises(CorruptData, match=f"{name} is not readable: it has version 2, and .* 1:"):
        read(with_field(data, "version", 2))
