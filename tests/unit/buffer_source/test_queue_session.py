"""A queue that a run of a query has opened: starts, losses, and other queues."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_source.options import SourceOptions
from buffer_source.partitions import PartitionOffset
from buffer_source.queue_session import EVERYTHING, QueueSession, open_session
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.source_queue import SourceQueue


def once(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


@pytest.fixture
def queue(runtime: ManualRuntime) -> SourceQueue:
    return SourceQueue(runtime)


def claim(
    queue: SourceQueue, start: PartitionOffset | None = None, queue_id: str = "", **options: str
) -> QueueSession:
    given = SourceOptions.from_spark({"path": "/queue", "gcEnabled": "false", **options})
    return open_session(given, queue.store, queue.runtime, once, start, queue_id)


@pytest.mark.parametrize(
    ("wanted", "run_end", "begin"),
    [
        ("earliest", EVERYTHING, 3),
        ("earliest", 5, 3),
        ("3", 3, 3),
        ("latest", EVERYTHING, 8),
        ("latest", 5, 5),
        ("latest", 1, 3),
        ("latest", 9, 8),
        ("6", 4, 6),
        ("8", EVERYTHING, 8),
    ],
)
def test_starting_offsets_are_resolved_in_a_queue_of_3_to_7(
    queue: SourceQueue, wanted: str, run_end: int, begin: int
) -> None:
    queue.produce(8)
    claim(queue, PartitionOffset(3, 0))
    session = claim(queue, startingOffsets=wanted, acknowledge="false")
    assert session.begin(run_end) == begin
    if begin == 3 and run_end > 3:
        taking = claim(queue, startingOffsets=wanted)
        assert taking.begin(run_end) == begin


def test_a_start_outside_the_queue_is_an_error_or_becomes_the_oldest_batch(
    queue: SourceQueue,
) -> None:
    queue.produce(4)
    with pytest.raises(DataLoss, match=r"sequence 0 is needed .* starts at 1"):
        claim(queue, PartitionOffset(1, 0), startingOffsets="0").begin(EVERYTHING)
    with pytest.raises(InvalidInput, match=r"ends at 3: use a sequence up to 4"):
        claim(queue, startingOffsets="5").begin(EVERYTHING)
    allowed = claim(queue, PartitionOffset(1, 0), startingOffsets="0", failOnDataLoss="false")
    assert allowed.begin(EVERYTHING) == 1
