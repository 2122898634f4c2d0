"""Batches of several partitions that are ready: fetched ahead, and delivered in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.pace import Pace
from opendata_buffer.consumer.read_ahead import read_ahead
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic.reader import PartitionReader

__all__ = ["Group"]


class Group:
    """What is fetched between two looks at the partitions. Not thread-safe.

    Args:
        batches: At least one, each with the name of its partition, in the order of delivery;
            those of a partition are the first that wait in its reader.
        readers: By partition.
        arrow: Decode to Arrow arrays.
        runtime: Threads.
        pace: How long fetches of this store wait.
    """

    def __init__(
        self,
        batches: Sequence[tuple[str, BatchDescriptor]],
        readers: Mapping[str, PartitionReader],
        *,
        arrow: bool,
        runtime: Runtime,
        pace: Pace,
    ) -> None:
        self._left = deque((name, readers[name]) for name, _ in batches)
        owners = {id(descriptor): readers[name] for name, descriptor in batches}
        self._fetched = read_ahead(
            lambda descriptor: owners[id(descriptor)].read(descriptor),
            [descriptor for _, descriptor in batches],
            lambda descriptor, stored: owners[id(descriptor)].decode(stored, arrow=arrow),
            runtime=runtime,
            pace=pace,
        )

    @property
    def is_over(self) -> bool:
        """Whether all are taken."""
        return not self._left

    @property
    def partition(self) -> str:
        """Of the batch that comes next."""
        return self._left[0][0]

    def take(self) -> ConsumedBatch | ArrowBatch:
        """The next batch, which waits in its reader no more. After an error nothing more comes.

        Raises:
            OpenDataBufferError: It could not be fetched or decoded, and waits in its reader.
        """
        found = next(self._fetched)
        _, reader = self._left.popleft()
        reader.ready.popleft()
        return found

    def close(self) -> None:
        """End the fetching; what was not taken still waits in its reader."""
        self._fetched.close()
