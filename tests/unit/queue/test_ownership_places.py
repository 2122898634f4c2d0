"""When a process probes the store, and when it believes the owner marker (failure F12)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import Conflict, QueueReset, UnsafeStore
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.marker import MOST_PROBED, PrefixOwner
from opendata_buffer.queue.ownership import QueueClaim, claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import PutOutcome, read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.probed import PROBE, TRUSTED_MS, Probed
from opendata_buffer.testing.faults import FaultPlan
from opendata_buffer.testing.runtime import ManualRuntime
from tests.races import ChecksThenWrites
from tests.support.probing import PLACE, ProbingStore

CONFIG = QueueConfig(store="memory://q")
OWNER = "ingest/_owner.json"
OTHER = "https://proxy.example.com/bucket"


class Ignoring(MemoryStore):
    """Accepts each conditional write while ``ignores`` is true, as some servers and proxies do."""

    ignores = True

    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        if self.ignores:
            found = self._objects.get(key)
            version = None if found is None else found.version
        return super().put_if(key, data, version)


def process(
    objects: MemoryStore, runtime: ManualRuntime, place: str = PLACE
) -> tuple[ProbingStore, QueueClaim]:
    """Claim the queue in a process that has just started."""
    store = ProbingStore(objects, runtime, FaultPlan(), place=place)
    return store, claim_for_writing(store, CONFIG, runtime=runtime)


def append(store: ProbingStore, claim: QueueClaim, runtime: ManualRuntime) -> None:
    queue = Queue(store, CONFIG, runtime=runtime, role="producer", claim=claim)
    queue.append([NewEntry(f"ingest/{runtime.ulid()}.batch")])


def marker(objects: MemoryStore) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(read_bytes(objects, OWNER))
    return fields


def change_marker(objects: MemoryStore, change: Callable[[dict[str, Any]], object]) -> None:
    fields = marker(objects)
    change(fields)
    objects.put(OWNER, json.dumps(fields).encode())


def test_f12_the_process_that_creates_a_queue_probes_the_store_and_notes_the_place(
    runtime: ManualRuntime,
) -> None:
    objects = MemoryStore()
    store, _ = process(objects, runtime)
    assert store.probes == 1
    assert marker(objects)["probed"] == [
        {"place": PLACE, "at_ms": runtime.now_ms(), "probe": PROBE}
    ]


def test_f12_a_later_process_only_checks_that_one_wrong_write_is_refused(
    runtime: ManualRuntime,
) -> None:
    objects = MemoryStore()
    append(*process(objects, runtime), runtime)
    before = objects.list("").objects
    store, _ = process(objects, runtime)
    assert (store.probes, store.refusals) == (0, 1)
    assert store.operations == {"get": 2, "put_if": 1}
    assert objects.list("").objects == before, "the wrong write left an object"


def nothing(fields: dict[str, Any]) -> None:
    del fields["probed"]


def older_probe(fields: dict[str, Any]) -> None:
    fields["probed"][0]["probe"] = PROBE - 1


def old(fields: dict[str, Any]) -> None:
    fields["probed"][0]["at_ms"] -= TRUSTED_MS


def far_ahead(fields: dict[str, Any]) -> None:
    fields["probed"][0]["at_ms"] += TRUSTED_MS


def another_bucket(fields: dict[str, Any]) -> None:
    fields["probed"][0]["place"] += "-copy"


def damaged(fields: dict[str, Any]) -> None:
    fields["probed"] = [None, {}, {"place": 5, "at_ms": 0, "probe": 1}]


def no_time(fields: dict[str, Any]) -> None:
    fields["probed"][0]["at_ms"] = "today"


@pytest.mark.parametrize(
    "change", [nothing, older_probe, old, far_ahead, another_bucket, damaged, no_time]
)
def test_f12_a_marker_that_does_not_name_this_place_is_not_believed_and_then_corrected(
    runtime: ManualRuntime, change: Callable[[dict[str, Any]], None]
) -> None:
    objects = MemoryStore()
    append(*process(objects, runtime), runtime)
    change_marker(objects, change)
    store, claim = process(objects, runtime)
    assert store.probes == 1
    append(store, claim, runtime)
    assert {"place": PLACE, "at_ms": runtime.now_ms(), "probe": PROBE} in marker(objects)["probed"]
    assert process(objects, runtime)[0].probes == 0


@pytest.mark.parametrize(
    "change", [nothing, older_probe, old, far_ahead, another_bucket, damaged, no_time]
)
def test_f12_no_marker_opens_a_store_where_two_writers_can_win(
    runtime: ManualRuntime, change: Callable[[dict[str, Any]], None]
) -> None:
    """Such a store refuses single wrong writes, so only the whole probe finds it."""
    objects = MemoryStore()
    append(*process(objects, runtime), runtime)
    change_marker(objects, change)
    unsafe = ChecksThenWrites(6, creating=False)
    for found in objects.list("").objects:
        unsafe.put(found.key, read_bytes(objects, found.key))
    with pytest.raises(UnsafeStore, match="one at a time"):
        process(unsafe, runtime)


def test_f12_another_endpoint_is_probed_once_and_both_places_are_noted(
    runtime: ManualRuntime,
) -> None:
    objects = MemoryStore()
    append(*process(objects, runtime), runtime)
    store, claim = process(objects, runtime, OTHER)
    assert store.probes == 1
    append(store, claim, runtime)
    assert [each["place"] for each in marker(objects)["probed"]] == [PLACE, OTHER]
    for place in (PLACE, OTHER):
        assert process(objects, runtime, place)[0].probes == 0


def test_f12_a_store_that_has_begun_to_ignore_conditions_is_refused_in_spite_of_the_marker(
    runtime: ManualRuntime,
) -> None:
    objects = Ignoring()
    objects.ignores = False
    append(*process(objects, runtime), runtime)
    before = objects.list("").objects
    objects.ignores = True
    with pytest.raises(UnsafeStore, match="If-Match on a missing object with success"):
        process(objects, runtime)
    assert objects.list("").objects == before, "the object of the wrong write was left"


def test_f12_a_manifest_that_went_back_is_explained_by_the_store_if_its_writers_can_both_win(
    runtime: ManualRuntime,
) -> None:
    objects = ChecksThenWrites(6, creating=False)
    objects.put("ingest/manifest", Manifest.empty().raw)
    owner = PrefixOwner("ingest/manifest", "01J5", probed=(Probed(PLACE, runtime.now_ms()),))
    objects.put(OWNER, owner.to_json("ingest"))
    process(objects, runtime)  # It is believed while nothing is wrong.
    change_marker(objects, lambda fields: fields.update(next_sequence=5, epoch=0))
    with pytest.raises(UnsafeStore, match="one at a time"):
        process(objects, runtime)


def test_a_manifest_that_went_back_on_a_sound_store_is_a_reset(runtime: ManualRuntime) -> None:
    objects = MemoryStore()
    append(*process(objects, runtime), runtime)
    objects.put("ingest/manifest", Manifest.empty().raw)
    with pytest.raises(QueueReset, match="went backwards"):
        process(objects, runtime)


def test_f12_a_writer_that_never_wins_learns_that_no_version_is_right(
    runtime: ManualRuntime,
) -> None:
    class Refusing(MemoryStore):
        refuses = False

        def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
            # Like a proxy that changes ETags: no condition ever holds.
            known = "another" if self.refuses and version is not None else version
            return super().put_if(key, data, known)

    objects = Refusing()
    append(*process(objects, runtime), runtime)
    store, claim = process(objects, runtime)
    objects.refuses = True
    with pytest.raises(UnsafeStore, match="the object's ETag with 'precondition failed'"):
        append(store, claim, runtime)


def test_a_writer_that_loses_all_races_on_a_sound_store_gets_a_conflict(
    runtime: ManualRuntime,
) -> None:
    class Busy(MemoryStore):
        rivals = False

        def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
            if self.rivals and key == "ingest/manifest":
                self.put(key, self._objects[key].data)
            return super().put_if(key, data, version)

    objects = Busy()
    append(*process(objects, runtime), runtime)
    store, claim = process(objects, runtime)
    objects.rivals = True
    with pytest.raises(Conflict):
        append(store, claim, runtime)
    assert store.probes == 1


def test_a_marker_keeps_the_last_places_and_unknown_fields() -> None:
    owner = PrefixOwner("ingest/manifest", "01J5", others={"later": True})
    for number in range(MOST_PROBED + 2):
        owner = owner.with_probe(Probed(f"place {number}", number))
    owner = owner.with_probe(Probed("place 5", 100))
    read = PrefixOwner.from_json(owner.to_json("ingest"), "ingest")
    assert read == owner
    assert [probed.place for probed in read.probed] == [
        *(f"place {number}" for number in (2, 3, 4, 6, 7, 8, 9)),
        "place 5",
    ]
    assert read.others["later"] is True


def test_a_manifest_that_is_older_than_the_marker_is_read_again(runtime: ManualRuntime) -> None:
    """Both are read at the same time, and another process may write them meanwhile."""

    class Late(MemoryStore):
        reads = 0

        def __init__(self) -> None:
            super().__init__()
            self.changed = threading.Event()

        def get(self, key: str, **options: Any) -> Any:
            if key == OWNER:
                assert self.changed.wait(60)
            found = super().get(key, **options)
            if key == "ingest/manifest":
                self.reads += 1
                if not self.changed.is_set():
                    longer = Manifest.parse(found.data).append([NewEntry("ingest/2.batch")])
                    self.put(key, longer.raw)
                    change_marker(objects, lambda fields: fields.update(next_sequence=2))
                    self.changed.set()
            return found

    objects, late = MemoryStore(), Late()
    append(*process(objects, runtime), runtime)
    late._objects = objects._objects
    _, claim = process(late, runtime)
    assert claim.watermark is not None
    assert claim.watermark.next_sequence == 2
    assert late.reads == 2
