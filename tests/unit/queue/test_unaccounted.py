"""No queue is created over foreign batches, and no collector deletes them.

Foreign batches are batches that the manifest of this queue has never named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer import Consumer, Producer, metrics
from opendata_buffer import gc as module
from opendata_buffer.admin.queue_check import check_queue, plan_repair, repair
from opendata_buffer.admin.queue_status import read_status
from opendata_buffer.admin.rebuild import rebuild
from opendata_buffer.admin.target import Target
from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    QueueConfig,
    WorkerConfig,
)
from opendata_buffer.errors import InvalidInput, PermanentStorageError, PrefixConflict
from opendata_buffer.formats.batch import batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.not_found import require_queue
from opendata_buffer.queue.ownership import claim_for_writing, claim_queue
from opendata_buffer.queue.unaccounted import OtherManifests, well_known
from opendata_buffer.stores.base import Blob, Listing, read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.exporter import DATA, MANIFEST, RUN_MS, export, there

NO_GC = GarbageCollectorConfig(enabled=False)
DAY_MS = 86_400_000


def later() -> ManualRuntime:
    """Return a clock one day after the exporter wrote its batches."""
    return ManualRuntime(RUN_MS + DAY_MS)


def aged() -> MemoryStore:
    """Return a store whose objects are one day old."""
    store = MemoryStore(now_ms=lambda: RUN_MS)
    store._now_ms = lambda: RUN_MS
    return store


def config(prefix: str = DATA, manifest: str = "", **settings: Any) -> ConsumerConfig:
    return ConsumerConfig(
        store="memory://q", data_path_prefix=prefix, manifest_path=manifest, gc=NO_GC, **settings
    )


def consume(store: MemoryStore, settings: ConsumerConfig) -> list[bytes]:
    found: list[bytes] = []
    with Consumer(settings, store=store) as consumer:
        while (batch := consumer.next_batch()) is not None:
            found += batch.entries
            consumer.ack(batch.sequence)
    return found


def produce(store: MemoryStore, settings: QueueConfig) -> None:
    given = {
        "store": settings.store,
        "data_path_prefix": settings.data_path_prefix,
        "manifest_path": settings.manifest_path,
    }
    with Producer(ProducerConfig(**given, flush_interval_ms=1), store=store) as producer:
        producer.produce([b"x"]).result(20)


def keys(store: MemoryStore) -> list[str]:
    return [found.key for found in store.list("").objects]


USERS: dict[str, Callable[[MemoryStore, ConsumerConfig], object]] = {
    "consumer": lambda store, settings: consume(store, settings),
    "producer": lambda store, settings: produce(store, settings),
    "claim": lambda store, settings: claim_for_writing(store, settings),
    "worker": lambda store, settings: require_queue(
        store, WorkerConfig(store="memory://q", data_path_prefix=DATA), ManualRuntime()
    ),
    "fsck": lambda store, settings: check_queue(Target(store, settings, ManualRuntime())),
    "repair": lambda store, settings: rebuild(Target(store, settings, ManualRuntime())),
}


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("user", USERS)
def test_f51_no_queue_is_created_over_the_batches_of_an_exporter_and_its_manifest_is_named(
    user: str, create: bool
) -> None:
    store = MemoryStore()
    batches = export(store, b"a", b"b", b"c")
    before = keys(store)
    with pytest.raises(PrefixConflict) as caught:
        USERS[user](store, config(create_if_missing=create))
    assert caught.value.owner == MANIFEST
    assert f"manifest_path={MANIFEST!r}" in str(caught.value)
    assert "create_if_missing" not in str(caught.value)
    assert keys(store) == before
    assert consume(store, config(manifest=MANIFEST)) == [b"a", b"b", b"c"]
    assert there(store) == batches


def test_f51_the_error_has_the_number_of_batches_and_one_example() -> None:
    store = MemoryStore()
    first, *_ = export(store, b"a", b"b", b"c")
    with pytest.raises(InvalidInput, match=rf"3 batches lie .* '{DATA}', for example '{first}'"):
        consume(store, config(create_if_missing=True))


@pytest.mark.parametrize("user", ["consumer", "producer", "claim", "worker"])
def test_f51_the_error_asks_for_the_manifest_path_if_the_manifest_is_not_in_a_known_place(
    user: str,
) -> None:
    store = MemoryStore()
    export(store, b"a", b"b", manifest="elsewhere/queue")
    before = keys(store)
    with pytest.raises(
        InvalidInput, match=r"2 batches .* Name its manifest with manifest_path"
    ) as e:
        USERS[user](store, config(create_if_missing=True))
    assert "fsck memory://" in str(e.value)
    assert "--repair" in str(e.value)
    assert "create_if_missing" not in str(e.value)
    assert keys(store) == before


def test_f51_a_consumer_that_knows_only_the_prefix_of_a_rust_queue_is_refused() -> None:
    store = MemoryStore()
    batches = export(store, b"a", data="data", manifest="ingest/manifest")
    with pytest.raises(PrefixConflict, match="give manifest_path='ingest/manifest'"):
        consume(store, config("data", create_if_missing=True))
    with pytest.raises(PrefixConflict, match="give manifest_path='ingest/manifest'"):
        produce(store, config("data"))
    assert there(store, "data") == batches
    assert consume(store, config("data", "ingest/manifest")) == [b"a"]


def test_a_rust_queue_in_the_default_layout_is_opened_by_this_library_first() -> None:
    store = MemoryStore()
    export(store, b"a", b"b", data="ingest", manifest="ingest/manifest")
    assert consume(store, config("ingest")) == [b"a", b"b"]


def test_f51_a_manifest_without_a_marker_is_refused_if_another_manifest_names_batches() -> None:
    store = MemoryStore()
    export(store, b"a")
    store.put(f"{DATA}/manifest", Manifest.empty().raw)
    before = keys(store)
    with pytest.raises(PrefixConflict, match=f"give manifest_path='{MANIFEST}'"):
        consume(store, config())
    assert keys(store) == before


def test_a_producer_that_is_writing_its_first_batch_only_delays_a_consumer() -> None:
    store = MemoryStore()
    export(store, b"a", data="ingest", queued=False)
    with pytest.raises(InvalidInput, match="writing its first batch, try again"):
        consume(store, config("ingest", create_if_missing=True))
    export(store, b"a", data="ingest", manifest="ingest/manifest")
    assert consume(store, config("ingest", create_if_missing=True)) == [b"a"]


def test_a_queue_whose_producer_was_killed_before_its_first_append_is_used_again() -> None:
    store = MemoryStore()
    settings = config("ingest")
    claim_queue(store, settings)
    export(store, b"left", data="ingest", queued=False)
    produce(store, settings)
    assert consume(store, settings) == [b"x"]


def test_a_new_partition_of_a_topic_may_contain_uploads_that_are_not_queued_yet() -> None:
    store = MemoryStore()
    store.put("_topic.json", b'{"partitions": [{"name": "p-00000-04pn"}]}')
    export(store, b"a", data="p-00000-04pn", queued=False)
    claim_for_writing(store, config("p-00000-04pn"))
    assert "p-00000-04pn/_owner.json" in keys(store)


def test_a_topic_s_partition_has_no_manifest_of_its_own() -> None:
    store = MemoryStore()
    store.put("_topic.json", b'{"partitions": [{"name": "p-00000-04pn"}]}')
    with pytest.raises(InvalidInput, match=r"there is a topic at .* Leave out manifest_path='m'"):
        claim_for_writing(store, config("p-00000-04pn", "m"))
    assert keys(store) == ["_topic.json"]


@pytest.mark.parametrize("prefix", ["ingest", "data", "ingest/otel/logs/data", "a/b"])
def test_at_most_three_other_places_are_searched_for_a_manifest(prefix: str) -> None:
    own = config(prefix)
    places = well_known(own)
    assert own.manifest_path not in places
    assert len(places) <= 2
    assert len(well_known(config(prefix, "elsewhere"))) <= 3
    parent = prefix.rpartition("/")[0]
    assert f"{parent}/manifest".lstrip("/") in places


@pytest.mark.parametrize(
    "there", [b"", b"no manifest, but data/ is in it", Manifest.empty().raw, b"\0" * 100]
)
def test_a_manifest_without_batches_in_the_prefix_is_not_another_queue(there: bytes) -> None:
    store = MemoryStore()
    store.put("ingest/manifest", there)
    assert OtherManifests(store, config("data")).naming() is None
    claim_for_writing(store, config("data"))


def test_the_readable_part_of_a_damaged_manifest_counts() -> None:
    store = MemoryStore()
    export(store, b"a", b"b", data="data", manifest="ingest/manifest")
    store.put("ingest/manifest", read_bytes(store, "ingest/manifest")[:-5])
    assert OtherManifests(store, config("data")).naming() == "ingest/manifest"


def test_a_process_that_may_read_only_its_prefix_can_use_a_queue() -> None:
    class Walled(MemoryStore):
        def get(self, key: str, **options: Any) -> Blob | None:
            if not key.startswith("data/"):
                raise PermanentStorageError("403")
            return super().get(key, **options)

    assert OtherManifests(Walled(), config("data")).naming() is None


def test_an_unchanged_manifest_is_not_transferred_again() -> None:
    class Watched(MemoryStore):
        bodies = 0

        def get(self, key: str, **options: Any) -> Blob | None:
            found = super().get(key, **options)
            self.bodies += found is not None
            return found

    store = Watched()
    export(store, b"a", data="data", manifest="ingest/manifest")
    others = OtherManifests(store, config("data"))
    assert others.naming() == others.naming() == "ingest/manifest"
    assert store.bodies == 1
    store.put("ingest/manifest", Manifest.starting_at(1, 0).raw)
    assert others.naming() is None


# ---- the collector, where an earlier release has created the second queue


def wrong_queue(store: MemoryStore, manifest: Manifest | None = None) -> Target:
    """Return a store with a queue over the exporter's batches, as an earlier release created it."""
    settings = config()
    claim = claim_queue(store, settings)
    found = Manifest.empty().with_epoch(1) if manifest is None else manifest
    store.put(settings.manifest_path, found.raw)
    claim.note(found, now=True)
    return Target(store, settings, later())


def collect(queue: Target, *, dry_run: bool = False) -> Any:
    collector = GarbageCollector(queue.store, queue.config, runtime=queue.runtime)
    queue.store._now_ms = queue.runtime.now_ms  # type: ignore[attr-defined]
    return collector.run_once(dry_run=dry_run)


@pytest.mark.parametrize("dry_run", [False, True])
def test_f51_a_collector_keeps_batches_that_another_manifest_names(
    dry_run: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(metrics.gc_cycles_held, "add", held.append)
    store = aged()
    batches = export(store, b"a", b"b", b"c")
    report = collect(wrong_queue(store), dry_run=dry_run)
    assert there(store)[:3] == batches
    assert (report.deleted, report.plan.delete) == (0, ())
    assert f"manifest '{MANIFEST}' names batches in the data prefix '{DATA}'" in report.plan.held
    assert f"manifest_path='{MANIFEST}'" in report.plan.held
    assert f"nothing collected below {DATA}: {report.plan.held}" in caplog.text
    assert held == [1]


def test_f51_a_collector_deletes_nothing_if_its_manifest_never_named_a_batch() -> None:
    store = aged()
    batches = export(store, b"a", b"b", b"c", manifest="elsewhere/queue")
    report = collect(wrong_queue(store))
    assert there(store)[:3] == batches
    assert "has never named a batch, and there are 3 batches" in report.plan.held
    assert batches[0] in report.plan.held


def test_f51_a_collector_of_an_active_queue_keeps_batches_of_another_manifest() -> None:
    store = aged()
    batches = export(store, b"a", b"b", b"c")
    report = collect(wrong_queue(store, Manifest.starting_at(7, 1)))
    assert there(store)[:3] == batches
    assert report.plan.held is not None


def test_orphans_of_an_active_queue_are_deleted_also_with_a_manifest_elsewhere() -> None:
    store = aged()
    batches = export(store, b"a", b"b", b"c", manifest="elsewhere/queue")
    store.put(MANIFEST, Manifest.empty().append([NewEntry("other/x.batch")]).raw)
    report = collect(wrong_queue(store, Manifest.starting_at(7, 1)))
    assert (report.deleted, report.plan.held) == (len(batches), None)


def test_the_collector_looks_for_other_manifests_once_per_cycle_and_only_before_it_deletes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    looks: list[str] = []

    class Watched(MemoryStore):
        def get(self, key: str, **options: Any) -> Blob | None:
            if key in (MANIFEST, "ingest/manifest"):
                looks.append(key)
            return super().get(key, **options)

    store = Watched(now_ms=lambda: RUN_MS)
    queue = wrong_queue(store, Manifest.starting_at(7, 1))
    collect(queue)
    assert looks == []
    store._now_ms = lambda: RUN_MS
    export(store, *(b"%d" % number for number in range(9)), queued=False)
    assert collect(queue).deleted == 9
    assert sorted(looks) == sorted([MANIFEST, "ingest/manifest"])


def test_f51_status_explains_why_nothing_is_collected() -> None:
    store = aged()
    export(store, b"a", b"b", b"c")
    queue = wrong_queue(store)
    (note,) = read_status(queue.reader()).notes
    assert note.startswith(f"the garbage collector deletes nothing: manifest '{MANIFEST}' names")
    store.put(MANIFEST, Manifest.starting_at(3, 0).raw)
    (note,) = read_status(queue.reader()).notes
    assert "has never named a batch" in note
    store.put(queue.config.manifest_path, Manifest.starting_at(3, 1).raw)
    assert read_status(queue.reader()).notes == ()


def test_f51_status_of_a_sound_queue_next_to_a_young_upload_has_no_note() -> None:
    store = aged()
    runtime = later()
    settings = config("ingest")
    claim_queue(store, settings, runtime=runtime)
    store.put("ingest/manifest", Manifest.empty().raw)
    store._now_ms = runtime.now_ms
    store.put(batch_key("ingest", runtime.ulid()), b"")
    assert read_status(Target(store, settings, runtime).reader()).notes == ()


def test_f51_fsck_returns_the_prefix_of_a_queue_that_an_earlier_release_created() -> None:
    store = MemoryStore()
    batches = export(store, b"a", b"b", b"c")
    wrong_queue(store)
    with pytest.raises(PrefixConflict, match=r"fsck .* --repair' gives the prefix to this"):
        consume(store, config(manifest=MANIFEST))
    queue = Target(store, config(manifest=MANIFEST), ManualRuntime())
    plan, left = plan_repair(check_queue(queue))
    assert (len(plan), left) == (1, [])
    repair(queue, plan)
    assert consume(store, config(manifest=MANIFEST)) == [b"a", b"b", b"c"]
    assert there(store)[:3] == batches


def test_a_forbidden_listing_does_not_raise_an_error_of_its_own() -> None:
    class Blind(MemoryStore):
        def list(self, prefix: str, **options: Any) -> Listing:
            raise PermanentStorageError("403")

    with pytest.raises(InvalidInput, match="there is no queue"):
        consume(Blind(), config("ingest"))


@pytest.mark.parametrize("client", ["of this library", "of another one"])
def test_a_producer_that_creates_the_queue_at_the_same_moment_does_not_lock_others_out(
    client: str,
) -> None:
    class Racing(MemoryStore):
        raced = False

        def list(self, prefix: str, **options: Any) -> Listing:
            if not self.raced:
                self.raced = True
                if client == "of this library":
                    claim_queue(self, config("ingest"))
                    export(self, b"a", data="ingest", queued=False)
                else:
                    export(self, b"a", data="ingest", manifest="ingest/manifest")
            return super().list(prefix, **options)

    store = Racing()
    assert claim_for_writing(store, config("ingest")).queue_id
    assert store.raced
