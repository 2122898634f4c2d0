"""What a write to a topic has beyond one to a queue, as the driver planned it. Picklable."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from opendata_buffer.errors import ObjectNotFound, PermanentStorageError
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.messages.message_ids import CONTINUE_TXN, build_uuid, new_producer_id
from opendata_buffer.queue.ownership import TOPIC_KEY
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Get, read_sidecar
from opendata_buffer.topic.description import DESCRIPTION, TopicDescription

__all__ = ["FIRST_CLOCK", "TopicWrite", "find_topic"]

FIRST_CLOCK = 2
"""Of a write's messages; an acknowledgement with the clock before it rolls the write back."""

_TASK_BITS = 32


def find_topic(store: Get) -> TopicDescription | None:
    """The topic at a store's root, by one read; None when there is none.

    Raises:
        CorruptData: Its description cannot be read.
        TransientStorageError: The store did not answer.
    """
    try:
        return read_sidecar(store, TOPIC_KEY, DESCRIPTION, TopicDescription.from_json)
    except (ObjectNotFound, PermanentStorageError):
        # S3 refuses to say what is not there to somebody who may not list; who may only use one
        # prefix of a bucket may still have a queue there.
        return None


@dataclass(frozen=True, slots=True)
class TopicWrite:
    """One attempt at a write, with a producer of its own.

    All tasks of the attempt map rows to the partitions that the driver found: a topic that is
    expanded meanwhile is taken up by the next write.

    Attributes:
        active: Names of the partitions that are written, in the topic's order.
        draining: Names of those that are written no more.
        producer: The attempt's producer id, 6 bytes.
        app: App id for a write that was given none.
    """

    active: tuple[str, ...]
    draining: tuple[str, ...]
    producer: bytes
    app: str

    @classmethod
    def planned(cls, description: TopicDescription, runtime: Runtime) -> TopicWrite:
        """An attempt that writes to the topic as it is now."""
        chance = sha256(runtime.ulid().encode()).digest()  # 80 bits of a ULID are drawn
        producer = new_producer_id(lambda count: chance[:count])
        return cls(
            tuple(description.active),
            tuple(description.draining),
            producer,
            f"write-{runtime.ulid()}",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Of all partitions of the topic."""
        return (*self.active, *self.draining)

    def transaction(self, given: Transaction | None) -> Transaction:
        """The write's identity: the one it was given, or one that nobody repeats."""
        return given or Transaction(self.app, 0)

    def clock(self, task: int, index: int) -> int:
        """Clock of a batch, rising in the order in which a partition gets them.

        Tasks do not know how many batches the others make, so each has a range of its own.

        Args:
            task: Spark's number of the task, below 2^31.
            index: How many batches of the task go to the same partition before it.
        """
        return FIRST_CLOCK + (task << _TASK_BITS) + index

    def location(self, partition: str, ulid: str, txn: Transaction, clock: int) -> str:
        """Name of a batch of this attempt."""
        return batch_key(partition, ulid, txn, build_uuid(self.producer, clock, CONTINUE_TXN))
