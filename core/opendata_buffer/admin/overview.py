"""A queue, or all partitions of a topic, in one look: manifests and announcements, no listing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from opendata_buffer.admin.broker import BrokerStatus, ClaimsStatus, ask_broker, read_claims
from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.transactions import open_in
from opendata_buffer.broker.client import Connection
from opendata_buffer.broker.lease import DiscoveryRecord, Lease
from opendata_buffer.concurrency import together
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData
from opendata_buffer.formats.keys import location_tag, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages.message_ids import parse_uuid
from opendata_buffer.queue.consumer_info import ConsumerInfo, read_consumer_info
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.topic.description import Partition
from opendata_buffer.topic.topic import Topic

__all__ = ["Overseer", "Overview", "QueueLook"]

WRITERS_OF = 1_000
"""Newest entries whose writers are told apart, at most: names of more take time to read."""

ASIDE_S = 5.0
"""Between two looks at what stands beside the manifests, and at the broker."""


@dataclass(frozen=True, kw_only=True)
class QueueLook:
    """One queue at one moment.

    Attributes:
        name: Its data prefix.
        state: ``active`` or ``draining``; of a queue that is no partition, ``active``.
        backlog: Batches that wait for its consumer.
        oldest_age_seconds: Since the first of them was produced; None when there is none.
        first_sequence: Of the first of them: all before it are acknowledged.
        next_sequence: What the next batch will get.
        epoch: How often a consumer took it over.
        manifest_bytes: Size of its manifest.
        undecided: Transactions in it that are neither committed nor rolled back.
        writers: Who wrote the newest of what waits, and how many batches each. ``app NAME``,
            ``publisher ID``, or ``process TAG``: by the names of the batches, so one process of
            another library may appear as many.
        broker: The announced broker; None where there never was one.
        claims: What workers hold; None where there never was one.
        holder: Who claimed the epoch; None where it left no note.
        notes: What could not be read beside the manifest.
    """

    name: str
    state: str = "active"
    backlog: int = 0
    oldest_age_seconds: float | None = None
    first_sequence: int = 0
    next_sequence: int = 0
    epoch: int = 0
    manifest_bytes: int = 0
    undecided: int = 0
    writers: dict[str, int]
    broker: BrokerStatus | None = None
    claims: ClaimsStatus | None = None
    holder: ConsumerInfo | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A queue or a topic at one moment.

    Attributes:
        store: URL of the store.
        topic: The topic's id; empty for a queue.
        monotonic: When the look ended, by the clock for intervals.
        queues: The queue, or the partitions in the order of their numbers.
    """

    store: str
    topic: str
    monotonic: float
    queues: tuple[QueueLook, ...]

    @property
    def backlog(self) -> int:
        """Batches that wait in all of them."""
        return sum(each.backlog for each in self.queues)

    @property
    def oldest_age_seconds(self) -> float | None:
        """Since the oldest of them was produced; None when there is none."""
        ages = [each.oldest_age_seconds for each in self.queues]
        return max((age for age in ages if age is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """All fields but the clock's, by name, and the sums."""
        found = asdict(self)
        del found["monotonic"]
        return found | {"backlog": self.backlog, "oldest_age_seconds": self.oldest_age_seconds}


class Overseer:
    """Looks at a queue or a topic, again and again, and changes nothing. Not thread-safe.

    Args:
        store: Where it is.
        config: The queue; of a topic only its deadline counts. ``cas_deadline_ms`` bounds each
            read, retries included.
        runtime: Clock and threads.
        connect: Opens a connection to a broker; None asks none.
        topic: Whether the topic at the store's root is looked at, with all its partitions; else it
            is ``config``'s queue alone.
    """

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        runtime: Runtime,
        connect: Callable[[DiscoveryRecord], Connection] | None = None,
        *,
        topic: bool = False,
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._connect = connect
        self._is_topic = topic
        self._topic: Topic | None = None
        self._observer: Observer | None = None
        # Each remembers its manifest: one that did not change is not transferred again.
        self._observers: dict[str, Observer] = {}
        self._aside: dict[str, QueueLook] = {}
        self._aside_at: float | None = None

    def look(self) -> Overview:
        """Read what changed. After an error the next look begins anew.

        Raises:
            InvalidInput: There is no such queue or topic; nothing is created.
            QueueReset: A manifest vanished or went backwards since the last look.
            CorruptData: The topic's description or a manifest cannot be read.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """
        try:
            return self._look()
        except BaseException:
            self._topic = self._observer = None
            self._observers.clear()
            raise

    def _look(self) -> Overview:
        if self._topic is None and self._is_topic:
            self._topic = Topic.open(self._config, store=self._store, runtime=self._runtime)
        now = self._runtime.monotonic()
        is_due = self._aside_at is None or now - self._aside_at >= ASIDE_S
        if self._topic is None:
            found = [self._queue_alone(is_due)]
        else:
            found = self._partitions(self._topic, is_due)
        if is_due:
            self._aside_at = now
        self._aside = {each.name: each for each in found}
        return Overview(
            store=self._store.url,
            topic="" if self._topic is None else self._topic.description.topic_id,
            monotonic=self._runtime.monotonic(),
            queues=tuple(found),
        )

    def _queue_alone(self, is_due: bool) -> QueueLook:
        if self._observer is None:
            self._observer = Observer(self._store, self._config, self._runtime)
        name, manifest = self._config.data_path_prefix, self._observer.manifest()
        look = summarised(name, "active", manifest, self._runtime.now_ms())
        return self._with_aside(look, self._config, is_due)

    def _partitions(self, topic: Topic, is_due: bool) -> list[QueueLook]:
        partitions = topic.read().partitions
        for each in partitions:  # here, not in many threads at once
            if each.name not in self._observers:
                own = topic.config_of(each.name, self._config)
                self._observers[each.name] = Observer(self._store, own, self._runtime)

        def look_at(partition: Partition) -> QueueLook:
            manifest = self._observers[partition.name].find() or Manifest.empty()
            state, now_ms = str(partition.state), self._runtime.now_ms()
            look = summarised(partition.name, state, manifest, now_ms)
            return self._with_aside(look, topic.config_of(partition.name, self._config), is_due)

        return together(self._runtime, look_at, partitions)

    def _with_aside(self, look: QueueLook, config: QueueConfig, is_due: bool) -> QueueLook:
        """What stands beside the manifest. It must not hide the queue when it cannot be read."""
        known = self._aside.get(look.name)
        if not is_due and known is not None:
            return replace(
                look,
                broker=known.broker,
                claims=known.claims,
                holder=_current(known.holder, look),
                notes=known.notes,
            )
        notes = []
        try:
            announced = Lease(self._store, config, self._runtime).read()
            broker = None if announced is None else ask_broker(announced, self._connect)
            look = replace(look, broker=broker)
        except CorruptData as error:
            notes.append(str(error))
        try:
            look = replace(look, claims=read_claims(self._store, config))
        except CorruptData as error:
            notes.append(str(error))
        try:
            holder = read_consumer_info(self._store, config, self._runtime)
            look = replace(look, holder=_current(holder, look))
        except CorruptData as error:
            notes.append(str(error))
        return replace(look, notes=tuple(notes))


def _current(holder: ConsumerInfo | None, look: QueueLook) -> ConsumerInfo | None:
    """The holder, unless the note is of an epoch that has ended."""
    return holder if holder is not None and holder.epoch == look.epoch else None


def summarised(name: str, state: str, manifest: Manifest, now_ms: int) -> QueueLook:
    """What a manifest says; pure.

    Args:
        name: The queue's data prefix.
        state: Of the partition.
        manifest: The queue's.
        now_ms: Wall clock, for ages.
    """
    writers: dict[str, int] = {}
    for location in manifest.locations()[-WRITERS_OF:]:
        writer = writer_of(location, name)
        writers[writer] = writers.get(writer, 0) + 1
    return QueueLook(
        name=name,
        state=state,
        backlog=manifest.entry_count,
        oldest_age_seconds=manifest.age_s(now_ms),
        first_sequence=manifest.first_sequence,
        next_sequence=manifest.next_sequence,
        epoch=0 if manifest.sealed else manifest.epoch,
        manifest_bytes=manifest.size,
        undecided=len(open_in(manifest, name, now_ms)),
        writers=writers,
    )


def writer_of(location: str, data_path_prefix: str) -> str:
    """Who wrote a batch, as far as its name says."""
    parsed = parse_location(location, data_path_prefix)
    if parsed is not None and parsed.txn is not None:
        return f"app {parsed.txn.app}"
    if parsed is not None and parsed.message is not None:
        return f"publisher {parse_uuid(parsed.message).producer.hex()}"
    tag = location_tag(location)
    return "unknown" if tag is None else f"process {tag}"
