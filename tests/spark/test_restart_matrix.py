"""Every row of the restart matrix: Spark's calls after each kind of end, and the expected result.

A sink that fails after its write leaves a batch in the offset log that is not in the commit log,
just like a crash at the same point.
"""

from __future__ import annotations

import pytest
from pyspark.errors import StreamingQueryException

from tests.spark.queues import LONG_S, TELLS, Query, logged, numbered, produce, queued


def crash_in(query: Query, batch_id: int, **options: str) -> None:
    query.sink.fail_in = batch_id
    with pytest.raises(StreamingQueryException, match="failing in batch"):
        query.available_now(**options)
    assert logged(query.checkpoint, "offsets")[-1] == batch_id
    assert batch_id not in logged(query.checkpoint, "commits")


def test_uncommitted_batch_in_the_middle_is_replayed_as_it_was(query: Query, store: str) -> None:
    produce(store, numbered(0, 2))
    query.available_now()
    query.available_now()  # a clean restart without new data creates no batch
    produce(store, numbered(2, 5))
    crash_in(query, 1)
    produce(store, numbered(5, 8))
    query.available_now()
    # The same batch id with the same records, and then later records.
    assert query.sink.batches == [(0, [0, 1]), (1, [2, 3, 4]), (1, [2, 3, 4]), (2, [5, 6, 7])]
    assert queued(store) == []


@pytest.mark.parametrize(
    ("starting", "first"), [("earliest", [0, 1, 2]), ("latest", []), ("1", [1, 2])]
)
def test_uncommitted_batch_0_is_replayed_as_it_was(
    query: Query, store: str, starting: str, first: list[int]
) -> None:
    query.options["acknowledge"] = str(starting == "earliest")
    produce(store, numbered(0, 3))
    crash_in(query, 0, startingOffsets=starting)
    produce(store, numbered(3, 5))
    # The option of a later run changes nothing.
    query.available_now(startingOffsets="earliest")
    assert query.sink.batches == [(0, first), (0, first), (1, [3, 4])]
    assert queued(store) == ([] if starting == "earliest" else [0, 1, 2, 3, 4])


def test_a_batch_fails_twice_and_then_limits_and_the_end_of_the_run_are_new(
    query: Query, store: str
) -> None:
    produce(store, numbered(0, 4))
    crash_in(query, 1, maxBatchesPerTrigger="2")
    crash_in(query, 1, maxBatchesPerTrigger="2")
    produce(store, numbered(4, 6))
    query.available_now(maxBatchesPerTrigger="1")
    assert query.sink.batches == [(0, [0, 1]), *[(1, [2, 3])] * 3, (2, [4]), (3, [5])]
    assert queued(store) == []


def test_trigger_once_reads_all_in_one_batch(query: Query, store: str) -> None:
    produce(store, numbered(0, 5))
    run = query.start(lambda writer: writer.trigger(once=True), maxBatchesPerTrigger="1")
    assert run.awaitTermination(LONG_S)
    # If Spark does not pass the trigger to a Python source, the limit applies.
    assert query.sink.batches == [(0, [0, 1, 2, 3, 4] if TELLS else [0])]
    # Once does not ask for a later offset, so nothing is acknowledged before the next run.
    assert queued(store) == [0, 1, 2, 3, 4]
    query.available_now()
    assert query.sink.values == [0, 1, 2, 3, 4]
    assert queued(store) == []


def test_a_query_started_before_there_is_a_queue(query: Query, store: str) -> None:
    with query.running(createIfMissing="true") as run:
        run.processAllAvailable()
        produce(store, numbered(0, 2))
        run.processAllAvailable()
    with query.running() as run:
        produce(store, numbered(2, 3))
        run.processAllAvailable()
    assert query.sink.values == [0, 1, 2]
