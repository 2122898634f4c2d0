"""What is in a queue or a topic, who consumes it, and how its broker and workers are doing.

Everything here reads manifests and the small objects beside them, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import Any

from opendata_buffer.admin.transactions import STALE_AFTER_S, OpenTransaction, open_in
from opendata_buffer.broker.channel import ProtocolError
from opendata_buffer.broker.claims import CLAIMS, claims_key, decode
from opendata_buffer.broker.client import ChannelClosed, Connection
from opendata_buffer.broker.lease import DiscoveryRecord, Lease
from opendata_buffer.concurrency import together
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

__all__ = [
    "Backlog",
    "BrokerStatus",
    "ClaimsStatus",
    "Ownership",
    "PartitionStatus",
    "Status",
    "TopicStatus",
    "ask_broker",
    "read_backlog",
    "read_claims",
    "read_ownership",
    "read_status",
    "read_topic",
    "summarise",
]

STATS_S = 1.0
"""How long a broker may take to answer; one that runs answers sooner."""


# ---- a broker and its workers


@dataclass(frozen=True, kw_only=True)
class BrokerStatus:
    """The broker that the queue's discovery record names. Counters are those of its term.

    Attributes:
        term: Rises with each broker.
        id: Of the broker.
        address: Where clients find it; empty when it has stopped and none has followed.
        seen_ms: When it last renewed the record, by its clock, milliseconds since the Unix epoch.
        alive: Whether it answered; None when it was not asked, because it has stopped or the
            extra ``broker`` is not installed.
        reason: Why it gave no answer.
        clients: Connections, including the one that asked. None without an answer, as all below.
        waiting: Entries that wait for the next write.
        commits: Manifest writes that were applied.
        appended: Entries appended by them.
        conflicts: Writes that lost a race against a writer that does not use the broker.
        floors: How often it paused for a writer that appends beside it, such as Spark's sink.
        serving_seconds: How long it has served.
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
    floors: int | None = None
    serving_seconds: float | None = None

    @property
    def group_size(self) -> float | None:
        """Entries per write."""
        return self.appended / self.commits if self.commits and self.appended else None

    @property
    def commit_rate(self) -> float | None:
        """Writes per second, since it serves."""
        if self.commits is None or not self.serving_seconds:
            return None
        return self.commits / self.serving_seconds


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
    names = ("clients", "waiting", "commits", "appended", "conflicts", "floors")
    counters = {name: stats[name] for name in names if isinstance(stats.get(name), int)}
    seconds = stats.get("serving_s")
    if isinstance(seconds, int | float):
        counters["serving_seconds"] = float(seconds)
    return replace(known, alive=True, **counters)


def read_claims(store: Store, config: QueueConfig) -> ClaimsStatus | None:
    """The claims of workers; None where the queue never had one.

    Raises:
        CorruptData: The object holds no claims.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
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


# ---- a queue


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
        broker: The broker; None where there never was one.
        claims: What workers hold; None where there never was one.
        undecided: Transactions that are neither committed nor rolled back.
        oldest_undecided_seconds: Since the first batch of the oldest of them was produced.
        notes: What an operator should look at: a marker that makes producers and consumers fail, a
            transaction that is undecided for long, an object beside the manifest that is damaged.
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
    broker: BrokerStatus | None = None
    claims: ClaimsStatus | None = None
    undecided: int = 0
    oldest_undecided_seconds: float | None = None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All fields by name, and what is computed from them."""
        found = asdict(self)
        if self.broker is not None:
            found["broker"]["group_size"] = self.broker.group_size
            found["broker"]["commit_rate"] = self.broker.commit_rate
        return found


def read_status(
    reader: ReadOnlyReader, connect: Callable[[DiscoveryRecord], Connection] | None = None
) -> Status:
    """Read the manifest, list the data prefix once, and ask the broker if there is one.

    Args:
        reader: Of the queue.
        connect: Opens a connection to a broker; None asks none.

    Raises:
        InvalidInput: There is no manifest.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    store, config = reader.store, reader.config
    before = reader.manifest()
    listing = store.list(config.data_path_prefix + "/")
    # Read again (not transferred when unchanged): a batch enqueued while the listing ran is no
    # orphan, and one dequeued and collected meanwhile is not missing.
    after = reader.manifest()
    now_ms = reader.runtime.now_ms()
    found = summarise(before, after, listing, store=store.url, config=config, now_ms=now_ms)
    notes = [*_refusals(reader, after), *found.notes]
    broker, claims = None, None
    # A damaged object beside the manifest must not hide the queue.
    try:
        announced = Lease(store, config, reader.runtime).read()
        broker = None if announced is None else ask_broker(announced, connect)
    except CorruptData as error:
        notes.append(str(error))
    try:
        claims = read_claims(store, config)
    except CorruptData as error:
        notes.append(str(error))
    return replace(found, broker=broker, claims=claims, notes=tuple(notes))


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
        listing: The objects below the data prefix.
        store: URL of the store.
        config: Where the queue lives.
        now_ms: Wall clock, for ages.
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
        epoch=after.epoch,
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


# ---- a topic


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
    """

    name: str
    state: str
    queue_length: int
    oldest_age_seconds: float | None
    next_sequence: int
    epoch: int
    manifest_bytes: int
    undecided: int = 0


@dataclass(frozen=True, kw_only=True)
class TopicStatus:
    """A topic at one moment.

    Attributes:
        store: URL of its store.
        id: The topic's id.
        partitions: In the order of their numbers.
    """

    store: str
    id: str
    partitions: tuple[PartitionStatus, ...]

    @property
    def queue_length(self) -> int:
        """Batches that wait in all partitions."""
        return sum(each.queue_length for each in self.partitions)

    def as_json(self) -> dict[str, Any]:
        """All fields by name, and the sum."""
        return {**asdict(self), "queue_length": self.queue_length}


def read_topic(topic: Topic, config: QueueConfig, runtime: Runtime) -> TopicStatus:
    """Read the description, then all manifests in parallel.

    Raises:
        InvalidInput: There is no topic.
        QueueReset: A partition has lost its manifest.
        CorruptData: The description or a manifest cannot be read.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    description = topic.read()

    def read(partition: Partition) -> PartitionStatus:
        own = topic.config_of(partition.name, config)
        found = ReadOnlyReader(own, store=topic.store, runtime=runtime).find()
        manifest, now_ms = found or Manifest.empty(), runtime.now_ms()
        return PartitionStatus(
            name=partition.name,
            state=str(partition.state),
            queue_length=manifest.entry_count,
            oldest_age_seconds=manifest.age_s(now_ms),
            next_sequence=manifest.next_sequence,
            epoch=0 if manifest.sealed else manifest.epoch,
            manifest_bytes=manifest.size,
            undecided=len(open_in(manifest, partition.name, now_ms)),
        )

    found = together(runtime, read, description.partitions)
    return TopicStatus(store=topic.url, id=description.topic_id, partitions=tuple(found))


# ---- the backlog, for a probe


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in a queue, or in all partitions of a topic.

    Attributes:
        batches: How many.
        lag_seconds: Age of the oldest batch, by its producer's clock and ours; 0 when nothing
            waits.
    """

    batches: int
    lag_seconds: float

    def excess(self, max_lag: float | None, max_batches: int | None) -> list[str]:
        """Which limits are exceeded, in words; empty when none is."""
        found = []
        if max_lag is not None and self.lag_seconds > max_lag:
            found.append(f"the oldest waits {self.lag_seconds:.1f} s, more than {max_lag:g}")
        if max_batches is not None and self.batches > max_batches:
            found.append(f"{self.batches:,} wait, more than {max_batches:,}")
        return found


def read_backlog(
    store: Store, configs: Iterable[QueueConfig], runtime: Runtime, *, topic: bool = False
) -> Backlog:
    """Read the manifests in parallel, and nothing else: a probe asks every few seconds.

    Args:
        store: Where the queues are.
        configs: Of each queue.
        runtime: Clock and threads.
        topic: They are partitions, which need not have been written yet.

    Raises:
        InvalidInput: There is no such queue.
        QueueReset, CorruptManifest, StorageError: A manifest could not be read.
    """

    def read(config: QueueConfig) -> Manifest:
        reader = ReadOnlyReader(config, store=store, runtime=runtime)
        return reader.find() or Manifest.empty() if topic else reader.manifest()

    manifests = together(runtime, read, configs)
    now_ms = runtime.now_ms()
    oldest_s = max((each.age_s(now_ms) or 0.0 for each in manifests), default=0.0)
    return Backlog(sum(each.entry_count for each in manifests), oldest_s)


# ---- the consumer


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Which consumer reads a queue.

    Attributes:
        partition: The queue's data prefix.
        epoch: Of the last consumer; 0 before the first.
        holder: The consumer that claimed this epoch, or an earlier one; None without a record.
        since_seconds: How long ago it claimed the queue, by its clock and ours.
    """

    partition: str
    epoch: int
    holder: ConsumerInfo | None
    since_seconds: float | None

    @property
    def known(self) -> bool:
        """Whether the holder is the consumer of this epoch."""
        return self.holder is not None and self.holder.epoch == self.epoch

    def as_json(self) -> dict[str, Any]:
        """All fields by name, those of the holder beside them; ``known`` tells whose they are."""
        holder = self.holder
        return {
            "partition": self.partition,
            "epoch": self.epoch,
            "known": self.known,
            "holder_epoch": None if holder is None else holder.epoch,
            "host": None if holder is None else holder.host,
            "process": None if holder is None else holder.process,
            "program": None if holder is None else holder.program,
            "query": None if holder is None else holder.query or None,
            "since_ms": None if holder is None else holder.since_ms,
            "since_seconds": self.since_seconds,
        }


def read_ownership(reader: ReadOnlyReader) -> Ownership:
    """Read the consumer's record, then the manifest: the record must not be the newer one.

    Raises:
        InvalidInput: There is no queue.
        CorruptData: The record or the manifest cannot be read.
        StorageError: The store did not answer.
    """
    holder = read_consumer_info(reader.store, reader.config, reader.runtime)
    manifest = reader.manifest()
    since = None if holder is None else (reader.runtime.now_ms() - holder.since_ms) / 1000
    return Ownership(
        partition=reader.config.data_path_prefix,
        epoch=0 if manifest.sealed else manifest.epoch,
        holder=holder,
        since_seconds=since,
    )
