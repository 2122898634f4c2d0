"""What is in a topic: a line for each of its partitions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.transactions import open_in
from opendata_buffer.concurrency import together
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic.description import Partition
from opendata_buffer.topic.topic import Topic

__all__ = ["PartitionStatus", "TopicStatus", "read_topic"]


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """One partition at one moment.

    Attributes:
        name: Its data prefix.
        state: ``active`` or ``draining``.
        queue_length: Batches that wait for its consumer.
        oldest_age_seconds: Since the first of them was produced; None when there is none.
        next_sequence: What the next batch will get; 0 for one that was never written.
        epoch: How often a consumer took it over.
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
        """All fields, by name, and the sum."""
        return {**asdict(self), "queue_length": self.queue_length}


def read_topic(topic: Topic, config: QueueConfig, runtime: Runtime) -> TopicStatus:
    """Read the description and all manifests, these at once.

    Raises:
        InvalidInput: There is no topic.
        QueueReset: A partition has lost its manifest.
        CorruptData: The description or a manifest cannot be read.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    description = topic.read()

    def look(partition: Partition) -> PartitionStatus:
        own = topic.config_of(partition.name, config)
        manifest = Observer(topic.store, own, runtime).find()
        return _summarised(partition, manifest or Manifest.empty(), runtime.now_ms())

    found = together(runtime, look, description.partitions)
    return TopicStatus(store=topic.url, id=description.topic_id, partitions=tuple(found))


def _summarised(partition: Partition, manifest: Manifest, now_ms: int) -> PartitionStatus:
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
