"""The content of a queue or a topic, its consumer, and the state of its broker and workers.

Everything here reads manifests and the small objects next to them, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from opendata_buffer.admin.transactions import (
    STALE_AFTER_S,
    OpenTransaction,
    TransactionScope,
    open_among,
)
from opendata_buffer.broker.claims import claims_key, claims_kind, decode
from opendata_buffer.broker.client import ChannelClosed, Connection
from opendata_buffer.broker.discovery_record import DiscoveryRecord, Lease
from opendata_buffer.broker.secure_channel import ProtocolError
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import (
    CorruptData,
    CorruptManifest,
    ObjectNotFound,
    PermanentStorageError,
    PrefixConflict,
    QueueReset,
)
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.quarantine import count_quarantine, quarantined_names, read_reports
from opendata_buffer.queue.consumer_info import ConsumerInfo, read_consumer_info
from opendata_buffer.queue.ownership import check_owner, queue_hint, topic_hint
from opendata_buffer.queue.queue import fullness
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Listing, Store, read_sidecar
from opendata_buffer.topic.description import Partition
from opendata_buffer.topic.topic import Topic

T = TypeVar("T")

SHOWN = 20
"""Reports of skipped batches that are read; the others are counted."""

LISTED = 20_000
"""Objects that a status lists, 1,000 with each request: all of 200,000 would take ten seconds."""

STATS_S = 1.0
"""Seconds that a broker may take to answer; one that runs answers sooner."""


@dataclass(frozen=True, kw_only=True)
class BrokerStatus:
    """The broker that the queue's discovery record names.

    Counters are those of its term, and None where it gave no answer.
    """

    term: int
    id: str
    address: str  # where clients find it; empty when it has stopped and none has followed
    seen_ms: int  # when it last renewed the record, by its clock, since the Unix epoch
    alive: bool | None = None  # whether it answered; None when it was not asked
    reason: str = ""  # why it gave no answer
    clients: int | None = None  # connections, including the one that asked
    waiting: int | None = None  # entries that wait for the next write
    commits: int | None = None  # manifest writes that were applied
    appended: int | None = None  # entries appended by them
    conflicts: int | None = None  # writes that lost a race against a writer without the broker
    pauses: int | None = None  # for writers that append without it, such as Spark's sink
    serving_seconds: float | None = None
    group_size: float | None = None  # entries per write
    commit_rate: float | None = None  # writes per second


@dataclass(frozen=True, kw_only=True)
class ClaimsStatus:
    """Which batches workers hold."""

    frontier: int  # sequence of the first batch that is not done
    held: int
    done: int  # batches that are done and wait for an older one
    oldest_held: int | None  # sequence of the oldest held batch
    oldest_worker: str | None = None  # the worker that holds it
    oldest_deliveries: int | None = None  # how often it was delivered


def ask_broker(
    announced: DiscoveryRecord, connect: Callable[[DiscoveryRecord], Connection] | None
) -> BrokerStatus:
    """The statistics of the announced broker, within two seconds; ``connect`` None asks none."""
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
    counters: dict[str, Any] = {name: stats.get(name) for name in names}
    commits, appended, seconds = (
        stats.get(name) or 0 for name in ("commits", "appended", "serving_s")
    )
    if seconds:
        counters |= {"serving_seconds": seconds, "commit_rate": commits / seconds}
    if commits and appended:
        counters["group_size"] = appended / commits
    return replace(known, alive=True, **counters)


def read_claims(store: Store, config: QueueConfig) -> ClaimsStatus | None:
    """The claims of workers; None where the queue never had one. Raises CorruptData for an object
    that cannot be read, with the command that replaces it."""
    kind = claims_kind(queue_hint(store.url, config))
    key = claims_key(config.data_path_prefix)
    try:
        claims = read_sidecar(store, key, kind, lambda data: decode(data, kind))
    except ObjectNotFound:
        return None
    oldest = min(claims.held, default=None)
    known = ClaimsStatus(
        frontier=claims.frontier, held=len(claims.held), done=len(claims.done), oldest_held=oldest
    )
    if oldest is None:
        return known
    worker, deliveries = claims.held[oldest].worker, claims.deliveries.get(oldest)
    return replace(known, oldest_worker=worker, oldest_deliveries=deliveries)


@dataclass(frozen=True, kw_only=True)
class Status:
    """A queue at one moment.

    Ages are the time since a batch was produced, by its producer's clock and ours. ``notes`` are
    what an operator should check: a marker that makes producers and consumers fail, a transaction
    that is undecided for long, a damaged object next to the manifest.
    """

    store: str
    manifest: str
    data_path_prefix: str
    queue_length: int  # batches that wait for the consumer
    oldest_sequence: int | None  # None when the queue is empty, as for the next three
    newest_sequence: int | None
    oldest_age_seconds: float | None
    newest_age_seconds: float | None
    next_sequence: int
    epoch: int  # how often a consumer claimed the queue
    bytes_queued: int  # sizes of the waiting objects, as stored
    manifest_bytes: int
    missing: int  # waiting batches whose object is gone; fsck lists them
    orphans: int  # batch objects that no entry names: consumed, or being uploaded right now
    orphan_bytes: int
    listed_all: bool = True  # False: sizes, orphans and missing are of the first 20,000 objects
    consumer: ConsumerInfo | None = None  # of this epoch or, if it left no record, an earlier one
    broker: BrokerStatus | None = None
    claims: ClaimsStatus | None = None
    undecided: int = 0  # transactions that are neither committed nor aborted
    oldest_undecided_seconds: float | None = None
    transactions: tuple[OpenTransaction, ...] = ()  # these
    quarantined: int = 0  # batches that were skipped or trimmed, and kept
    quarantine: tuple[Mapping[str, Any], ...] = ()  # reports of the last SHOWN of them
    notes: tuple[str, ...] = ()
    refused: str = ""  # why producers and consumers fail: the marker, or a damaged manifest


def read_status(
    reader: ReadOnlyReader, connect: Callable[[DiscoveryRecord], Connection] | None = None
) -> Status:
    """Read the manifest, list the data prefix up to ``LISTED``, and ask the broker; see
    :func:`ask_broker`. What it costs does not rise with the length of the queue."""
    store, config, runtime = reader.store, reader.config, reader.runtime
    notes: list[str] = []

    def noted(read: Callable[[], T | None]) -> T | None:
        try:
            return read()
        except (CorruptData, PermanentStorageError) as error:
            # A damaged object next to the manifest, or one that this user may not read, hides no
            # queue.
            notes.append(str(error))
            return None

    # Before the manifest: the consumer's record must not be the newer one.
    consumer = noted(lambda: read_consumer_info(store, config, runtime))
    before = reader.manifest()
    listing = store.list(config.data_path_prefix + "/", limit=LISTED)
    # Read again (not transferred when unchanged): a batch enqueued while the listing ran is no
    # orphan, and one dequeued and collected meanwhile is not missing.
    after, refused = _checked(reader, reader.manifest)
    found = summarise(before, after, listing, store.url, config, runtime.now_ms())
    notes += [each for each in (refused, fullness(after.size, config.max_manifest_bytes)) if each]
    scope, prefix = TransactionScope(config, store, runtime), config.data_path_prefix
    transactions = open_among(scope, {prefix: after})
    notes += _stale(transactions, store.url, config)
    announced = noted(lambda: Lease(store, config, runtime).read())
    if announced is not None and announced.fault:
        notes.append(announced.fault)
        announced = None
    names = quarantined_names(store, prefix)
    reports = read_reports(
        store, prefix, names[-SHOWN:], runtime, unreadable=lambda error: notes.append(str(error))
    )
    return replace(
        found,
        consumer=consumer,
        broker=None if announced is None else ask_broker(announced, connect),
        claims=noted(lambda: read_claims(store, config)),
        undecided=len(transactions),
        oldest_undecided_seconds=max(
            (each.age_seconds or 0.0 for each in transactions), default=None
        ),
        transactions=tuple(transactions),
        quarantined=len(names),
        quarantine=tuple(each.as_json() for each in reports),
        notes=tuple(notes),
        refused=refused,
    )


def summarise(
    before: Manifest, after: Manifest, listing: Listing, url: str, config: QueueConfig, now_ms: int
) -> Status:
    """The status by a listing and the manifests read before and after it; pure."""
    sizes = Counter({found.key: found.size for found in listing.objects})
    # Only two entries are parsed whole: metadata can be most of a manifest. Sets, because a queue
    # may have a million entries.
    oldest, newest = None, None
    if after.entry_count:
        oldest, newest = after.first_sequence, after.next_sequence - 1
    locations = set(after.locations())
    known = locations if after is before else set(before.locations())
    unnamed = sizes.keys() - locations - known
    orphaned = [key for key in unnamed if parse_location(key, config.data_path_prefix) is not None]
    unlisted = listing.truncated and listing.objects[-1].key
    return Status(
        store=url,
        manifest=config.manifest_path,
        data_path_prefix=config.data_path_prefix,
        queue_length=after.entry_count,
        oldest_sequence=oldest,
        newest_sequence=newest,
        oldest_age_seconds=after.age_s(now_ms),
        newest_age_seconds=after.age_s(now_ms, newest),
        next_sequence=after.next_sequence,
        epoch=_epoch(after),
        bytes_queued=sum(sizes[each] for each in locations),
        manifest_bytes=after.size,
        missing=sum(
            not unlisted or each <= unlisted for each in (locations & known) - sizes.keys()
        ),
        listed_all=not unlisted,
        orphans=len(orphaned),
        orphan_bytes=sum(sizes[each] for each in orphaned),
    )


def _checked(reader: ReadOnlyReader, read: Callable[[], T]) -> tuple[T, str]:
    """A manifest, and why producers and consumers are refused although it can be read."""
    error: Exception | None = None
    try:
        # Before the manifest: a marker that was read later may be ahead of it.
        claim = check_owner(reader.store, reader.config, runtime=reader.runtime)
    except (CorruptData, PrefixConflict) as found:
        error, claim = found, None
    manifest = read()
    if isinstance(manifest, Manifest):
        try:
            if claim is not None:
                claim.check(manifest)
            manifest.check()
        except (CorruptManifest, QueueReset) as found:
            error = found
    return manifest, "" if error is None else f"producers and consumers are refused: {error}"


def _stale(undecided: Sequence[OpenTransaction], url: str, config: QueueConfig) -> tuple[str, ...]:
    """A warning about the first transaction that is open for too long (failure F40)."""
    for each in undecided:
        age_s = each.age_seconds or 0.0
        if age_s >= STALE_AFTER_S:
            hint = topic_hint(url, config)
            writer = "a publisher without a name" if each.app is None else f"app {each.app!r}"
            return (
                f"a transaction of {writer} (producer {each.producer}) is open for "
                f"{age_s / 60:,.0f} min: nothing behind sequence {each.first_sequence} leaves the "
                f"queue. Start its writer again, or end it with 'opendata-buffer abort {hint} "
                f"{each.producer}'.",
            )
    return ()


def _epoch(manifest: Manifest) -> int:
    return 0 if manifest.sealed else manifest.epoch  # A seal is an epoch above all others.


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """One partition at one moment; its fields are as those of :class:`Status`."""

    name: str
    state: str
    queue_length: int
    oldest_age_seconds: float | None
    next_sequence: int  # 0 for one that was never written
    epoch: int
    manifest_bytes: int
    undecided: int = 0
    quarantined: int = 0
    consumer: ConsumerInfo | None = None
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class TopicStatus:
    """A topic at one moment, its partitions in the order of their numbers."""

    store: str
    id: str
    partitions: tuple[PartitionStatus, ...]
    queue_length: int
    oldest_age_seconds: float | None
    undecided: int
    quarantined: int
    transactions: tuple[OpenTransaction, ...]  # a part for each partition that has batches of it
    notes: tuple[str, ...]


def read_topic(topic: Topic, config: QueueConfig, runtime: Runtime) -> TopicStatus:
    """Read the description, then all manifests and records of consumers in parallel."""
    description = topic.read()

    def read(partition: Partition) -> tuple[PartitionStatus, Manifest]:
        own = topic.config_of(partition.name, config)
        consumer = None
        with suppress(CorruptData):
            consumer = read_consumer_info(topic.store, own, runtime)
        reader = ReadOnlyReader(own, store=topic.store, runtime=runtime)
        found, refused = _checked(reader, reader.find)
        manifest, now_ms = found or Manifest.empty(), runtime.now_ms()
        status = PartitionStatus(
            name=partition.name,
            state=str(partition.state),
            queue_length=manifest.entry_count,
            oldest_age_seconds=manifest.age_s(now_ms),
            next_sequence=manifest.next_sequence,
            epoch=_epoch(manifest),
            manifest_bytes=manifest.size,
            quarantined=count_quarantine(topic.store, partition.name),
            consumer=consumer,
            refused=refused,
        )
        return status, manifest

    read_all = in_parallel(runtime, read, description.partitions)
    scope = TransactionScope(config, topic.store, runtime, topic)
    transactions = open_among(scope, {each.name: manifest for each, manifest in read_all})
    undecided = Counter(each.partition for each in transactions)
    found = tuple(replace(each, undecided=undecided[each.name]) for each, _ in read_all)
    ages = [each.oldest_age_seconds for each in found if each.oldest_age_seconds is not None]
    return TopicStatus(
        store=topic.url,
        id=description.topic_id,
        partitions=found,
        queue_length=sum(each.queue_length for each in found),
        oldest_age_seconds=max(ages, default=None),
        undecided=len({each.producer for each in transactions}),
        quarantined=sum(each.quarantined for each in found),
        transactions=tuple(transactions),
        notes=_stale(transactions, topic.url, config),
    )


def running_consumer(store: Store, config: QueueConfig, runtime: Runtime) -> str:
    """The consumer that owns a queue and may run, in words; empty where none is known."""
    with suppress(CorruptData):
        found = read_consumer_info(store, config, runtime)
        manifest = ReadOnlyReader(config, store=store, runtime=runtime).find()
        epoch = None if manifest is None else _epoch(manifest)
        if found is not None and found.epoch == epoch and found.may_run():
            return (
                f"the consumer of {config.data_path_prefix!r} ({found.program}, process "
                f"{found.process} on {found.host})"
            )
    return ""


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """What a probe asks for, of a queue or of all partitions of a topic."""

    batches: int  # that wait, in all
    oldest_s: float  # 0 when nothing waits
    largest: int  # bytes of the largest manifest
    refused: str  # why producers and consumers of one queue fail; empty where they do not


def read_backlog(
    store: Store, configs: Iterable[QueueConfig], runtime: Runtime, *, topic: bool = False
) -> Backlog:
    """Read manifests and owner markers, and nothing else: a probe asks every few seconds.

    The manifests of a ``topic`` need not have been written yet.
    """

    def read(config: QueueConfig) -> tuple[Manifest, str]:
        reader = ReadOnlyReader(config, store=store, runtime=runtime)
        found, refused = _checked(reader, reader.find if topic else reader.manifest)
        return found or Manifest.empty(), refused

    manifests, refused = zip(*in_parallel(runtime, read, configs), strict=True)
    now_ms = runtime.now_ms()
    return Backlog(
        batches=sum(each.entry_count for each in manifests),
        oldest_s=max(each.age_s(now_ms) or 0.0 for each in manifests),
        largest=max(each.size for each in manifests),
        refused=max(refused),
    )
