"""On the driver: the small results of many tasks, written as few batches.

A micro-batch of many tasks with little each would make an object and a queue entry for each of
them. With the option ``gatherBytes`` such tasks store nothing: their rows travel in the commit
message, and are joined here, in the order in which the batches would have been.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from buffer_sink.blocks import Block
from buffer_sink.messages import SmallBatch, UploadedBatch
from buffer_sink.objects import BatchObjects
from buffer_sink.options import SinkOptions
from buffer_sink.uploads import UploadWindow
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.runtime import Runtime

__all__ = ["joined", "store_small"]


def store_small(
    batches: Sequence[UploadedBatch | SmallBatch],
    objects: BatchObjects,
    options: SinkOptions,
    runtime: Runtime,
) -> tuple[UploadedBatch, ...]:
    """Store what tasks did not, in batches of ``target_batch_bytes`` at most.

    Args:
        batches: Of a write, in the order of partitions and rows.
        objects: Stores them.
        options: The sink's options.
        runtime: Threads.

    Returns:
        Uploaded batches only, those of each of a topic's partitions in their order.

    Raises:
        StorageError: An upload failed for good, or for ``cas_deadline_ms``. Nothing is visible.
    """
    found: dict[int, UploadedBatch] = {}

    def upload(position: int, key: str, first: SmallBatch, block: Block) -> None:
        found[position] = objects.put(key, first.partition, first.clock, block)

    with UploadWindow(options.upload_concurrency, runtime) as window:
        for position, part in enumerate(_parts(batches, options.target_batch_bytes)):
            if isinstance(part, UploadedBatch):
                found[position] = part
                continue
            first = part[0]  # its clock serves: those of what follows in its partition are later
            key = objects.name(first.partition, first.clock)
            window.submit(partial(upload, position, key, first, joined(part)))
    return tuple(batch for _, batch in sorted(found.items()))


def _parts(
    batches: Sequence[UploadedBatch | SmallBatch], target: int
) -> list[UploadedBatch | list[SmallBatch]]:
    """Uploaded batches as they are, and small ones in groups, in order within each partition."""
    found: list[UploadedBatch | list[SmallBatch]] = []
    last: dict[str | None, list[SmallBatch]] = {}
    for each in batches:
        if isinstance(each, UploadedBatch):
            last.pop(each.partition, None)  # what follows must not come before it
            found.append(each)
            continue
        group = last.get(each.partition)
        if group is None or sum(len(small.data) for small in group) + len(each.data) > target:
            group = last[each.partition] = []
            found.append(group)
        group.append(each)
    return found


def joined(smalls: Sequence[SmallBatch]) -> Block:
    """The records of several batches as those of one; pure."""
    records = 0
    metadata: list[Metadata] = []
    for small in smalls:
        for each in small.metadata:
            # Clocks of executors differ; within a batch times never fall.
            time_ms = max([each.ingestion_time_ms, *(m.ingestion_time_ms for m in metadata[-1:])])
            if not metadata or metadata[-1].payload != each.payload:
                metadata.append(Metadata(records + each.start_index, time_ms, each.payload))
        records += small.records
    return Block(tuple(small.data for small in smalls), records, tuple(metadata))
