"""What is in a queue or a topic, who consumes it, and how its broker and workers are doing.

Everything here reads manifests and the small objects next to them, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, TypeVar

from opendata_buffer.admin.transactions import STALE_AFTER_S, OpenTransaction, open_in
from opendata_buffer.broker.claims import CLAIMS, claims_key, decode
from opendata_buffer.broker.client import ChannelClosed, Connection
from opendata_buffer.broker.discovery_record import DiscoveryRecord, Lease
from opendata_buffer.broker.secure_channel import ProtocolError
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import CorruptData, ObjectNotFound, PrefixConflict, QueueReset
from opendata_buffer.formats.entries import QueueEntry
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.consumer_info import ConsumerInfo, read_consumer_info
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Listing, Store, read_sidecar
from opendata_buffer.topic.description import Partition
from opendata_buffer.topic.topic import Topic

T = TypeVar("T")

STATS_S = 1.0
"""How long a broker may take to answer; one that runs answers sooner."""


@dataclass(frozen=True, kw_only=True)
class BrokerStatus:
    """The broker that the queue's discovery record names. Counters are those of its term.

    Attributes:
        term: Rises with each broker.
        id: Of the broker.
        address: Where clients find it; empty when it has stopped and none has followed.
        seen_ms: When it last renewed the record, by its clock, milliseconds since the Unix epoch.
        alive: Whether it answered; None when it was not asked, because it has stopped.
        reason: Why it gave no answer.
        clients: Connections, including the one that asked. None without an answer, as all below.
        waiting: Entries that wait for the next write.
        commits: Manifest writes that were applied.
        appended: Entries appended by them.
        conflicts: Writes that lost a race against a writer that does not use the broker.
        pauses: How often it paused for a writer that appends without it, such as Spark's sink.
        serving_seconds: How long it has served.
        group_size: Entries per write.
        commit_rate: Writes per second.
    """

    term: int
    id: str
    address: str
    seen_ms: int
    alive: bool | None = None
    reason: str = ""
    clients: int | None = None
    waiting: int | None = None
    commits: int | None = None
    appended: int | None = None
    conflicts: int | None = None
    pauses: int | None = None
    serving_seconds: float | None = None
    group_size: float | None = None
    commit_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimsStatus:
    """Which batches workers hold.

    Attributes:
        frontier: Sequence of the first batch that is not done.
        held: Batches that a worker holds.
        done: Batches that are done and wait for an older one.
        oldest_held: Sequence of the oldest held batch.
        oldest_worker: The worker that holds it.
        oldest_deliveries: How often it was delivered.
    """

    frontier: int
    held: int
    done: int
    oldest_held: int | None
    oldest_worker: str | None
    oldest_deliveries: int | None


def ask_broker(
    announced: DiscoveryRecord, connect: Callable[[DiscoveryRecord], Connection] | None
) -> BrokerStatus:
    """The statistics of the announced broker. Takes two seconds at most.

    Args:
        announced: The queue's discovery record.
        connect: Opens a connection; None asks no broker.
    """
    known = BrokerStatus(
        term=announced.term, id=announced.id, address=announced.address, seen_ms=announced.seen_ms
    )
    if connect is None or not announced.serves:
        return known
    try:
        connection = connect(announced)
    except (ChannelClosed, ProtocolError) as error:
        return replace(known, alive=False, reason=str(error))
    try:
        stats = connection.stats(STATS_S)
    finally:
        connection.close()
    if stats is None:
        return replace(known, alive=False, reason=f"no answer within {STATS_S:g} s")
    names = ("clients", "waiting", "commits", "appended", "conflicts", "pauses")
    counters: dict[str, Any] = {
        name: stats[name] for name in names if isinstance(stats.get(name), int)
    }
    commits, appended, seconds = (
        stats.get(name) or 0 for name in ("commits", "appended", "serving_s")
    )
    if seconds:
        counters |= {"serving_seconds": seconds, "commit_rate": commits / seconds}
    if commits and appended:
        counters["group_size"] = appended / commits
    return replace(known, alive=True, **counters)


def read_claims(store: Store, config: QueueConfig) -> ClaimsStatus | None:
    """The claims of workers; None where the queue never had one."""
    try:
        claims = read_sidecar(store, claims_key(config.data_path_prefix), CLAIMS, decode)
    except ObjectNotFound:
        return None
    oldest = min(claims.held, default=None)
    return ClaimsStatus(
        frontier=claims.frontier,
        held=len(claims.held),
        done=len(claims.done),
        oldest_held=oldest,
        oldest_worker=None if oldest is None else claims.held[oldest].worker,
        oldest_deliveries=None if oldest is None else claims.deliveries.get(oldest),
    )


@dataclass(frozen=True, kw_only=True)
class Status:
    """A queue at one moment.

    Attributes:
        store: URL of the store.
        manifest: Key of the manifest.
        data_path_prefix: Where its batches are.
        queue_length: Batches that wait for the consumer.
        oldest_sequence: Sequence of the first of them; None when the queue is empty.
        newest_sequence: Sequence of the last of them.
        oldest_age_seconds: Time since it was produced, by its producer's clock and ours.
        newest_age_seconds: The same for the last one.
        next_sequence: The sequence of the next batch.
        epoch: How often a consumer claimed the queue.
        bytes_queued: Sizes of the waiting objects, as stored.
        manifest_bytes: Size of the manifest.
        missing: Waiting batches whose object is gone. ``fsck`` lists them.
        orphans: Batch objects that no entry names: consumed, or being uploaded right now. The
            garbage collector deletes them when they are old enough.
        orphan_bytes: Their sizes.
        consumer: The consumer that claimed this epoch or, if the last one left no record, an
            earlier one; None without a record.
        broker: The broker; None where there never was one.
        claims: What workers hold; None where there never was one.
        undecided: Transactions that are neither committed nor rolled back.
        oldest_undecided_seconds: Since the first batch of the oldest of them was produced.
        notes: What an operator should look at: a marker that makes producers and consumers fail, a
            transaction that is undecided for long, a damaged object next to the manifest.
    """

    store: str
    manifest: str
    data_path_prefix: str
    queue_length: int
    oldest_sequence: int | None
    newest_sequence: int | None
    oldest_age_seconds: float | None
    newest_age_seconds: float | None
    next_sequence: int
    epoch: int
    bytes_queued: int
    manifest_bytes: int
    missing: int
    orphans: int
    orphan_bytes: int
    consumer: ConsumerInfo | None = None
    broker: BrokerStatus | None = None
    claims: ClaimsStatus | None = None
    undecided: int = 0
    oldest_undecided_seconds: float | None = None
    notes: tuple[str, ...] = ()


def read_status(
    reader: ReadOnlyReader, connect: Callable[[DiscoveryRecord], Connection] | None = None
) -> Status:
    """Read the manifest, list the data prefix once, and ask the broker if there is one.

    Args:
        connect: Opens a connection to a broker; None asks none.
    """
    store, config, runtime = reader.store, reader.config, reader.runtime
    notes: list[str] = []

    def noted(read: Callable[[], T | None]) -> T | None:
        try:
            return read()
        except CorruptData as error:
            notes.append(str(error))  # A damaged object next to the manifest hides no queue.
            return None

    # Before the manifest: the consumer's record must not be the newer one.
    consumer = noted(lambda: read_consumer_info(store, config, runtime))
    before = reader.manifest()
    listing = store.list(config.data_path_prefix + "/")
    # Read again (not transferred when unchanged): a batch enqueued while the listing ran is no
    # orphan, and one dequeued and collected meanwhile is not missing.
    after = reader.manifest()
    found = summarise(
        before, after, listing, store=store.url, config=config, now_ms=runtime.now_ms()
    )
    notes += [*_refusals(reader, after), *found.notes]
    announced = noted(lambda: Lease(store, config, runtime).read())
    return replace(
        found,
        consumer=consumer,
        broker=None if announced is None else ask_broker(announced, connect),
        claims=noted(lambda: read_claims(store, config)),
        notes=tuple(notes),
    )


def summarise(
    before: Manifest,
    after: Manifest,
    listing: Listing,
    *,
    store: str,
    config: QueueConfig,
    now_ms: int,
) -> Status:
    """The sums over two manifests and a listing; pure.

    Args:
        before: The manifest read before the listing.
        after: The manifest read after it; this one is reported.
    """
    sizes = {found.key: found.size for found in listing.objects}
    # Only two entries are parsed whole: metadata can be most of a manifest. Sets, because a queue
    # may have a million entries.
    locations = set(after.locations())
    known = locations if after is before else set(before.locations())
    unnamed = sizes.keys() - locations - known
    orphaned = [key for key in unnamed if parse_location(key, config.data_path_prefix) is not None]
    oldest = next(iter(after.entries(limit=1)), None)
    newest = next(iter(after.entries(after.next_sequence - 1)), None)
    undecided = open_in(after, config.data_path_prefix, now_ms)
    return Status(
        store=store,
        manifest=config.manifest_path,
        data_path_prefix=config.data_path_prefix,
        queue_length=after.entry_count,
        oldest_sequence=None if oldest is None else oldest.sequence,
        newest_sequence=None if newest is None else newest.sequence,
        oldest_age_seconds=_age(oldest, config, now_ms),
        newest_age_seconds=_age(newest, config, now_ms),
        next_sequence=after.next_sequence,
        epoch=_epoch(after),
        bytes_queued=_total(sizes, locations),
        manifest_bytes=after.size,
        missing=len((locations & known) - sizes.keys()),
        orphans=len(orphaned),
        orphan_bytes=_total(sizes, orphaned),
        undecided=len(undecided),
        oldest_undecided_seconds=max((each.age_seconds or 0.0 for each in undecided), default=None),
        notes=_stale(undecided, store),
    )


def _refusals(reader: ReadOnlyReader, manifest: Manifest) -> Iterable[str]:
    """Why the owner marker makes producers and consumers fail, however sound the manifest is."""
    try:
        claim = check_owner(reader.store, reader.config, runtime=reader.runtime)
        if claim is not None:
            claim.check(manifest)
    except (CorruptData, PrefixConflict, QueueReset) as error:
        yield f"producers and consumers are refused: {error}"


def _stale(undecided: Sequence[OpenTransaction], store: str) -> tuple[str, ...]:
    """A warning about the first transaction that is undecided for too long (failure F40)."""
    for each in undecided:
        age_s = each.age_seconds or 0.0
        if age_s >= STALE_AFTER_S:
            writer = "a publisher without a name" if each.app is None else f"app {each.app!r}"
            return (
                f"a transaction of {writer} (producer {each.producer}) is undecided for "
                f"{age_s / 60:,.0f} min: nothing behind sequence {each.first_sequence} leaves the "
                "queue. Start its writer again, or see 'opendata-buffer transactions list "
                f"{store}' and end it with 'transactions abort'.",
            )
    return ()


def _epoch(manifest: Manifest) -> int:
    return 0 if manifest.sealed else manifest.epoch  # A seal is an epoch above all others.


def _total(sizes: dict[str, int], locations: Iterable[str]) -> int:
    return sum(map(sizes.get, locations, repeat(0)))


def _age(entry: QueueEntry | None, config: QueueConfig, now_ms: int) -> float | None:
    if entry is None:
        return None
    parsed = parse_location(entry.location, config.data_path_prefix)
    # The earliest record's time if there is one, else the object's: an entry may carry neither.
    times = [each.ingestion_time_ms for each in entry.metadata]
    if not times and parsed is not None:
        times = [parsed.timestamp_ms]
    return (now_ms - min(times)) / 1000 if times else None


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """One partition at one moment.

    Attributes:
        name: Its data prefix.
        state: ``active`` or ``draining``.
        queue_length: Batches that wait for its consumer.
        oldest_age_seconds: Since the first of them was produced; None when there is none.
        next_sequence: The sequence of the next batch; 0 for one that was never written.
        epoch: How often a consumer claimed it.
        manifest_bytes: Size of its manifest.
        undecided: Transactions in it that are neither committed nor rolled back.
        consumer: As in :class:`Status`.
    """

    name: str
    state: str
    queue_length: int
    oldest_age_seconds: float | None
    next_sequence: int
    epoch: int
    manifest_bytes: int
    undecided: int = 0
    consumer: ConsumerInfo | None = None


@dataclass(frozen=True, kw_only=True)
class TopicStatus:
    """A topic at one moment.

    Attributes:
        store: URL of its store.
        id: The topic's id.
        partitions: In the order of their numbers.
        queue_length: Batches that wait in all partitions.
    """

    store: str
    id: str
    partitions: tuple[PartitionStatus, ...]
    queue_length: int


def read_topic(topic: Topic, config: QueueConfig, runtime: Runtime) -> TopicStatus:
    """Read the description, then all manifests and records of consumers in parallel."""
    description = topic.read()

    def read(partition: Partition) -> PartitionStatus:
        own = topic.config_of(partition.name, config)
        consumer = None
        with suppress(CorruptData):
            consumer = read_consumer_info(topic.store, own, runtime)
        found = ReadOnlyReader(own, store=topic.store, runtime=runtime).find()
        manifest, now_ms = found or Manifest.empty(), runtime.now_ms()
        return PartitionStatus(
            name=partition.name,
            state=str(partition.state),
            queue_length=manifest.entry_count,
            oldest_age_seconds=manifest.age_s(now_ms),
            next_sequence=manifest.next_sequence,
            epoch=_epoch(manifest),
            manifest_bytes=manifest.size,
            undecided=len(open_in(manifest, partition.name, now_ms)),
            consumer=consumer,
        )

    found = tuple(in_parallel(runtime, read, description.partitions))
    return TopicStatus(
        store=topic.url,
        id=description.topic_id,
        partitions=found,
        queue_length=sum(each.queue_length for each in found),
    )


def read_backlog(
    store: Store, configs: Iterable[QueueConfig], runtime: Runtime, *, topic: bool = False
) -> tuple[int, float]:
    """Read the manifests in parallel, and nothing else: a probe asks every few seconds.

    Args:
        configs: Of each queue.
        topic: They are partitions, which need not have been written yet.

    Returns:
        How many batches wait, and the age of the oldest in seconds, by its producer's clock and
        ours; 0 when nothing waits.
    """

    def read(config: QueueConfig) -> Manifest:
        reader = ReadOnlyReader(config, store=store, runtime=runtime)
        return reader.find() or Manifest.empty() if topic else reader.manifest()

    manifests = in_parallel(runtime, read, configs)
    now_ms = runtime.now_ms()
    oldest_s = max((each.age_s(now_ms) or 0.0 for each in manifests), default=0.0)
    return sum(each.entry_count for each in manifests), oldest_s
