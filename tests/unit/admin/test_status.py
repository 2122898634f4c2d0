"""The status of a queue: sums over a manifest and a listing."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.status import Status, read_status, summarise
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats import manifest as manifest_module
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry, QueueEntry
from opendata_buffer.stores.base import Listing, ObjectInfo
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = QueueConfig(store="memory://status")
RUNTIME = ManualRuntime()
NOW = RUNTIME.now_ms()


def location(age_ms: int = 0, txn: Transaction | None = None) -> str:
    return batch_key("ingest", RUNTIME.ulid_at(NOW - age_ms), txn)


def listing(*sizes: tuple[str, int]) -> Listing:
    return Listing(tuple(ObjectInfo(key, size, NOW) for key, size in sizes), NOW)


def status_of(
    before: Manifest, found: Listing, after: Manifest | None = None, now_ms: int = NOW
) -> Status:
    return summarise(
        before, after or before, found, store="memory://status", config=CONFIG, now_ms=now_ms
    )


def test_empty_queue() -> None:
    status = status_of(Manifest.empty().with_epoch(3), listing())
    assert status.as_json() == {
        "store": "memory://status",
        "manifest": "ingest/manifest",
        "data_path_prefix": "ingest",
        "queue_length": 0,
        "oldest_sequence": None,
        "newest_sequence": None,
        "oldest_age_seconds": None,
        "newest_age_seconds": None,
        "next_sequence": 0,
        "epoch": 3,
        "bytes_queued": 0,
        "manifest_bytes": 22,
        "missing": 0,
        "orphans": 0,
        "orphan_bytes": 0,
        "broker": None,
        "claims": None,
        "undecided": 0,
        "oldest_undecided_seconds": None,
        "notes": (),
    }


def test_queued_consumed_and_missing_batches() -> None:
    gone, first, last = location(9000), location(3000), location(1000)
    manifest = Manifest.empty().append([NewEntry(each) for each in (gone, first, last)])
    manifest = manifest.drop_through(0)
    status = status_of(manifest, listing((gone, 5), (first, 70), ("ingest/_owner.json", 9)))
    assert (status.queue_length, status.next_sequence) == (2, 3)
    assert (status.oldest_sequence, status.newest_sequence) == (1, 2)
    assert (status.oldest_age_seconds, status.newest_age_seconds) == (3.0, 1.0)
    assert (status.bytes_queued, status.missing) == (70, 1)
    assert (status.orphans, status.orphan_bytes) == (1, 5)


def test_transactional_batches_count_like_others() -> None:
    queued = location(0, Transaction("app", 1))
    orphan = location(0, Transaction("app", 2))
    manifest = Manifest.empty().append([NewEntry(queued)])
    status = status_of(manifest, listing((queued, 3), (orphan, 4)))
    assert (status.bytes_queued, status.orphans, status.orphan_bytes) == (3, 1, 4)


def test_what_is_no_batch_is_no_orphan() -> None:
    found = listing(("ingest/notes.txt", 1), ("ingest/manifest", 2), ("ingest/x.batch", 3))
    assert status_of(Manifest.empty(), found).orphans == 0


def test_age_is_that_of_the_earliest_record() -> None:
    metadata = (Metadata(0, NOW - 7000, b""), Metadata(1, NOW - 8000, b""))
    manifest = Manifest.empty().append([NewEntry(location(1000), metadata)])
    assert status_of(manifest, listing()).oldest_age_seconds == 8.0


@pytest.mark.parametrize("time", [-(2**63), 2**63 - 1])
def test_extreme_times_are_reported(time: int) -> None:
    manifest = Manifest.empty().append([NewEntry(location(), (Metadata(0, time, b""),))])
    assert status_of(manifest, listing()).oldest_age_seconds == (NOW - time) / 1000


def test_a_foreign_entry_without_times_has_no_age() -> None:
    manifest = Manifest.empty().append([NewEntry("elsewhere/x.batch")])
    status = status_of(manifest, listing())
    assert status.oldest_age_seconds is None
    assert status.missing == 1


def test_a_batch_enqueued_while_the_listing_ran_is_neither_orphan_nor_missing() -> None:
    early, listed, late = location(), location(), location()
    before = Manifest.empty().append([NewEntry(early)])
    after = before.append([NewEntry(listed), NewEntry(late)])
    status = status_of(before, listing((early, 1), (listed, 1)), after)
    assert (status.queue_length, status.orphans, status.missing) == (3, 0, 0)


def test_a_batch_dequeued_while_the_listing_ran_is_neither_orphan_nor_missing() -> None:
    gone, collected = location(), location()
    before = Manifest.empty().append([NewEntry(gone), NewEntry(collected)])
    status = status_of(before, listing((gone, 1)), before.drop_through(1))
    assert (status.queue_length, status.orphans, status.missing) == (0, 0, 0)


def test_reading_lists_once_and_writes_nothing() -> None:
    store = MemoryStore("status-reads")
    key = location()
    store.put(key, b"12345")
    store.put("ingest/manifest", Manifest.empty().append([NewEntry(key)]).raw)
    before = {each.key: each for each in store.list("").objects}
    status = read_status(Observer(store, CONFIG, RUNTIME))
    assert (status.queue_length, status.bytes_queued, status.orphans) == (1, 5, 0)
    assert {each.key: each for each in store.list("").objects} == before


def test_no_entry_but_the_first_and_the_last_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    really = manifest_module.decode_entry

    def counting(raw: bytes, at: int, expected: int, body: int) -> tuple[QueueEntry, int]:
        decoded.append(expected)
        return really(raw, at, expected, body)

    entries = [NewEntry(location(), (Metadata(0, NOW, b""),)) for _ in range(500)]
    manifest = Manifest.parse(Manifest.empty().append(entries).raw)
    monkeypatch.setattr(manifest_module, "decode_entry", counting)
    assert status_of(manifest, listing()).queue_length == 500
    assert decoded == [0, 499]
