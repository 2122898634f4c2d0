"""A batch that cannot be delivered is copied before it is skipped."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.errors import CorruptData, InvalidInput, ObjectNotFound, TransientStorageError
from opendata_buffer.formats.batch import batch_key
from opendata_buffer.formats.manifest import BatchDescriptor, Metadata
from opendata_buffer.quarantine import list_quarantine, quarantine, read_copy, read_report
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.cli.shell import bytes_of

NOW = 1_767_225_600_000
HOUR = 3_600_000
RUNTIME = ManualRuntime(NOW)
LOCATION = batch_key("ingest", RUNTIME.ulid_at(NOW - HOUR))
ENTRY = BatchDescriptor(3, LOCATION, (Metadata(0, NOW - HOUR, b"\x00\xff payload"),))


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore("quarantine")
    made.put(LOCATION, b"no batch")
    return made


def test_the_bytes_and_the_report_are_stored(store: MemoryStore) -> None:
    made = quarantine(store, "ingest", ENTRY, "it is torn", runtime=RUNTIME, query="q-1")
    assert read_copy(store, "ingest", made) == b"no batch"
    report = json.loads(bytes_of(store, f"ingest/_quarantine/{made.id}.json"))
    assert {key: report[key] for key in ("sequence", "location", "error", "query", "time")} == {
        "sequence": 3,
        "location": LOCATION,
        "error": "it is torn",
        "query": "q-1",
        "time": "2026-01-01T00:00:00.000+00:00",
    }
    assert read_report(store, "ingest", made.id) == made
    assert made.metadata == ENTRY.metadata
    assert made.copied_bytes == len(b"no batch")


def test_a_second_attempt_keeps_the_copy_of_the_first_one(store: MemoryStore) -> None:
    first = quarantine(store, "ingest", ENTRY, "it is torn", runtime=RUNTIME)
    store.delete_many([LOCATION])
    assert quarantine(store, "ingest", ENTRY, "it is gone", runtime=RUNTIME) == first
    assert read_copy(store, "ingest", first) == b"no batch"


def test_a_batch_without_an_object_has_a_report_and_no_copy(store: MemoryStore) -> None:
    store.delete_many([LOCATION])
    made = quarantine(store, "ingest", ENTRY, "it is gone", runtime=RUNTIME)
    assert made.copied_bytes is None
    assert list_quarantine(store, "ingest") == [made]
    with pytest.raises(ObjectNotFound):
        read_copy(store, "ingest", made)


def test_f23_an_object_outside_the_prefix_is_not_copied(store: MemoryStore) -> None:
    store.put("secrets/passwords", b"secret")
    foreign = BatchDescriptor(4, "secrets/passwords")
    assert quarantine(store, "ingest", foreign, "?", runtime=RUNTIME).copied_bytes is None


def test_reports_are_listed_by_sequence(store: MemoryStore) -> None:
    for sequence in (10, 9, 100):
        quarantine(store, "ingest", BatchDescriptor(sequence, LOCATION), "?", runtime=RUNTIME)
    assert [each.sequence for each in list_quarantine(store, "ingest")] == [9, 10, 100]


def test_an_unreadable_report_does_not_hide_the_others(store: MemoryStore) -> None:
    made = quarantine(store, "ingest", ENTRY, "?", runtime=RUNTIME)
    store.put("ingest/_quarantine/0-x.json", b"foreign")
    with pytest.raises(CorruptData, match=r"0-x\.json"):
        list_quarantine(store, "ingest")
    faults: list[CorruptData] = []
    assert list_quarantine(store, "ingest", unreadable=faults.append) == [made]
    assert [str(each).split(":")[0] for each in faults] == ["'ingest/_quarantine/0-x.json'"]


@pytest.mark.parametrize(
    "changed", [{"id": "../manifest"}, {"restored_location": "ingest/manifest"}], ids=str
)
def test_f23_a_report_does_not_lead_to_other_objects(
    store: MemoryStore, changed: dict[str, str]
) -> None:
    made = quarantine(store, "ingest", ENTRY, "?", runtime=RUNTIME)
    key = f"ingest/_quarantine/{made.id}.json"
    store.put(key, json.dumps({**made.as_json(), **changed}).encode())
    with pytest.raises(CorruptData, match="are not those of a batch of this queue"):
        read_report(store, "ingest", made.id)


def test_no_report_is_written_when_the_copy_was_not() -> None:
    class Unwilling(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            if key.endswith(".object"):
                raise TransientStorageError("down")
            super().put(key, data)

    store = Unwilling("unwilling")
    store.put(LOCATION, b"no batch")
    with pytest.raises(TransientStorageError):
        quarantine(store, "ingest", ENTRY, "?", runtime=RUNTIME)
    assert list_quarantine(store, "ingest") == []


def test_an_object_too_large_for_memory_is_not_copied_partly(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendata_buffer.quarantine.MAX_OBJECT_BYTES", 4)
    with pytest.raises(InvalidInput, match="too large to be copied"):
        quarantine(store, "ingest", ENTRY, "?", runtime=RUNTIME)
    assert list_quarantine(store, "ingest") == []
