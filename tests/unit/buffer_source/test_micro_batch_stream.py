"""The driver's side of the source, with a queue in memory and a manual clock."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import ONLY, PartitionOffset, SourceOffset
from opendata_buffer import Consumer, metrics
from opendata_buffer.consumer.pace import FIRST_PAUSE_S
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.batch import Transaction, encode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.source_queue import (
    SourceQueue,
    batches_of,
    committed_before,
    report_of,
)


@pytest.fixture
def source(runtime: ManualRuntime) -> SourceQueue:
    return SourceQueue(runtime)


def offset(
    following: int, base: int, transactions: dict[str, Any] | None = None, queue: str = ""
) -> SourceOffset:
    return SourceOffset({ONLY: PartitionOffset(following, base, transactions or {}, queue)})


def planned(driver: MicroBatchStream, start: SourceOffset | None, end: SourceOffset) -> list[int]:
    return [each.sequence for each in batches_of(driver, start, end)]


def batch(driver: MicroBatchStream, start: SourceOffset | None) -> tuple[SourceOffset, list[int]]:
    """Run one micro-batch like a normal query."""
    end = committed_before(driver, start)
    return end, [] if end == start else planned(driver, start, end)


@pytest.mark.parametrize("first", [2**62, 2**63, 2**64 - 3])
def test_sequences_as_large_as_a_manifest_can_count_are_read(
    source: SourceQueue, first: int
) -> None:
    source.store.put("ingest/manifest", Manifest.starting_at(first, 0).raw)
    source.produce(2)
    end, read = batch(source.run(), None)
    assert (read, end.only.next) == ([first, first + 1], first + 2)
    assert SourceOffset.from_json(end.to_json()) == end


def test_a_missing_queue_is_an_error_and_is_not_created(source: SourceQueue) -> None:
    for available_now in (False, True):
        driver = source.run()
        if available_now:
            driver.prepare_available_now()
        with pytest.raises(
            InvalidInput, match=r"no queue with manifest 'ingest/manifest' in .*createIfMissing"
        ):
            driver.latest_offset(None)
    assert source.store.list("").objects == ()


def test_a_replay_of_the_first_batch_does_not_create_a_deleted_queue(source: SourceQueue) -> None:
    source.produce(2)
    end = source.run().latest_offset(None)
    source.store.delete_many([each.key for each in source.store.list("").objects])
    for given in ({}, {"failOnDataLoss": "false"}, {"createIfMissing": "true"}):
        for call in (MicroBatchStream.latest_offset, MicroBatchStream.commit):
            with pytest.raises(InvalidInput, match="there is no queue"):
                call(source.run(**given), end)
        with pytest.raises(InvalidInput, match="there is no queue"):
            source.run(**given).plan_input_partitions(None, end)
    assert source.store.list("").objects == ()


@pytest.mark.parametrize("replay", [False, True])
def test_f4_allowing_data_loss_never_recreates_a_lost_queue(
    source: SourceQueue, replay: bool
) -> None:
    source.produce(5)
    end, _ = batch(source.run(), None)
    source.store.delete_many(["ingest/manifest"])
    before = source.store.list("").objects
    for given in ({"failOnDataLoss": "false"}, {}):
        driver = source.run(**given)
        with pytest.raises(QueueReset, match=r"manifest 'ingest/manifest' is gone") as caught:
            driver.plan_input_partitions(None, end) if replay else driver.latest_offset(end)
        assert "set the option failOnDataLoss" not in str(caught.value), (
            "this option would not help"
        )
    assert source.store.list("").objects == before


def test_commit_dequeues_batches_and_is_repeatable(source: SourceQueue) -> None:
    source.produce(3)
    end, _ = batch(source.run(maxBatchesPerTrigger="2"), None)
    driver = source.run()
    driver.commit(end)  # The first call of a run may be this one.
    assert source.queued == [2]
    version = source.manifest()
    driver.commit(end)
    assert source.manifest() == version


def test_a_new_query_on_a_consumed_queue_gets_a_warning_about_the_gap_with_the_fix(
    source: SourceQueue, caplog: pytest.LogCaptureFixture
) -> None:
    source.produce(3)
    consume(source, 2)
    driver = source.run(startingOffsets="earliest")
    end, found = batch(driver, None)
    assert found == []
    source.produce(2)
    assert batch(driver, end)[1] == [3, 4]
    (message,) = caplog.messages
    assert "3 batches were read and removed before this query" in message
    assert "'opendata-buffer readers enable " in message
    assert "--retention 7d'" in message


def test_a_query_that_misses_nothing_is_not_warned(
    source: SourceQueue, caplog: pytest.LogCaptureFixture
) -> None:
    source.produce(3)
    end, found = batch(source.run(), None)
    assert found == [0, 1, 2]
    batch(source.run(), end)
    source.run().commit(end)
    assert source.queued == []
    batch(
        source.run(), end
    )  # the restart of a query that has read everything everything everything everything
    batch(source.run(startingOffsets="latest"), None)
    batch(source.run(startingOffsets="3"), None)
    assert caplog.messages == []


# Acknowledging from latestOffset


def test_an_idle_query_acknowledges_its_last_batch(source: SourceQueue) -> None:
    driver = source.run()
    source.produce(1)
    first, _ = batch(driver, None)
    source.produce(1)
    second, _ = batch(driver, first)
    driver.latest_offset(second)
    assert source.queued == [1]
    source.produce(1)
    third, _ = batch(driver, second)
    driver.latest_offset(third)
    assert source.queued == []


# Restarts


@pytest.mark.parametrize(
    "start",
    [{"startingOffsets": "latest"}, {"startingOffsets": "5"}, {"startingTimestamp": str(1 << 46)}],
)
def test_a_start_past_unread_batches_is_refused_without_fencing_the_owner(
    source: SourceQueue, start: dict[str, str]
) -> None:
    source.produce(5)
    owner = source.run()
    before, _ = batch(owner, None)
    for available_now in (False, True):
        driver = source.run(**start)
        if available_now:
            driver.prepare_available_now()
        with pytest.raises(
            InvalidInput,
            match=rf"option {next(iter(start))} starts at sequence 5 .* 5 unread batches from 0 on "
            r"would leave .*acknowledge to false.*'opendata-buffer trim \S+ --to 5'",
        ):
            driver.latest_offset(None)
    assert source.queued == [0, 1, 2, 3, 4]
    owner.commit(before)  # the owner was not fenced
    assert batch(source.run(acknowledge="false", **start), None)[0].only.base == 5


def test_a_checkpoint_of_a_release_that_removed_unread_batches_continues(
    source: SourceQueue,
) -> None:
    source.produce(4)
    queue = source.run().latest_offset(None).only.queue
    began_at_latest = offset(4, 4, {}, queue)
    driver = source.run(startingOffsets="latest")
    assert planned(driver, None, began_at_latest) == []
    source.produce(1)
    assert batch(driver, began_at_latest)[1] == [4]
    assert source.queued == [4]


def test_the_start_is_resolved_once(source: SourceQueue) -> None:
    driver = source.run(startingOffsets="latest", createIfMissing="true")
    assert driver.latest_offset(None).only.base == 0
    source.produce(1)
    # The second call sees the new end, but the start must not move to it.
    assert [driver.latest_offset(None).only.base for _ in range(2)] == [0, 0]


# Data loss


def consume(source: SourceQueue, through: int) -> None:
    config = SourceOptions.from_spark({"path": "/queue", "gcEnabled": "false"}).consumer
    consumer = Consumer(config, store=source.store, runtime=source.runtime)
    consumer.next_descriptors(through + 1)
    consumer.ack_through(through)


def test_the_error_about_missing_sequences_names_both_positions(source: SourceQueue) -> None:
    source.produce(2)
    driver = source.run()
    first, _ = batch(driver, None)
    source.produce(4)
    second = driver.latest_offset(first)
    consume(source, 3)
    with pytest.raises(DataLoss, match=r"sequence 2 is needed but .* starts at 4") as caught:
        source.run().latest_offset(first)
    assert (caught.value.needed, caught.value.oldest) == (2, 4)
    with pytest.raises(DataLoss, match="starts at 4"):
        source.run().plan_input_partitions(first, second)
    with pytest.raises(DataLoss, match=r"needs sequences 0 to 5 .* 2 are left"):
        source.run().plan_input_partitions(None, offset(6, 0))


@pytest.mark.parametrize("acknowledge", ["true", "false"])
def test_batches_that_are_missing_after_an_empty_first_micro_batch_are_a_loss(
    source: SourceQueue, acknowledge: str
) -> None:
    end, _ = batch(source.run(createIfMissing="true"), None)
    assert end.only.next == 0
    source.produce(3)
    consume(source, 1)
    with pytest.raises(DataLoss, match=r"sequence 0 is needed but .* starts at 2"):
        source.run(acknowledge=acknowledge).latest_offset(end)
    lenient = source.run(acknowledge=acknowledge, failOnDataLoss="false")
    assert batch(lenient, end)[1] == [2]


def test_losses_can_be_skipped(source: SourceQueue, caplog: pytest.LogCaptureFixture) -> None:
    source.produce(2)
    driver = source.run()
    first, _ = batch(driver, None)
    source.produce(4)
    planned_before = driver.latest_offset(first)
    consume(source, 3)
    with caplog.at_level(logging.WARNING):
        again = source.run(failOnDataLoss="false")
        assert planned(again, first, planned_before) == [4, 5]
        fresh = source.run(failOnDataLoss="false")
        end = fresh.latest_offset(first)
    assert (end.only.next, end.only.base) == (6, 4)
    assert planned(fresh, first, end) == [4, 5]
    # A replay, which knows only the offsets, plans the same.
    assert planned(source.run(failOnDataLoss="false"), first, end) == [4, 5]
    assert "data loss allowed" in caplog.text


def test_a_micro_batch_ends_at_a_skipped_loss(source: SourceQueue) -> None:
    source.produce(2)
    driver = source.run(failOnDataLoss="false")
    assert driver.latest_offset(None).only.next == 2
    source.produce(4)
    # Another program dequeues entries without becoming the consumer.
    source.store.put("ingest/manifest", source.manifest().drop_through(3).raw)
    first = driver.latest_offset(None)
    assert (first.only.next, planned(driver, None, first)) == (2, [0, 1])
    second = driver.latest_offset(first)
    assert (second.only.next, second.only.base, planned(driver, first, second)) == (6, 4, [4, 5])


def test_f4_a_position_of_another_queue_is_refused_and_nothing_is_dequeued(
    source: SourceQueue,
) -> None:
    source.produce(2)
    end, _ = batch(source.run(), None)
    after = offset(2, 0, {}, end.only.queue)
    source.delete_everything()
    # The new queue is longer than the position, so by sequences alone it looks like the same queue.
    source.produce(5)
    for call in ("latest_offset", "commit"):
        with pytest.raises(QueueReset, match=f"is about queue {end.only.queue}, and manifest"):
            getattr(source.run(), call)(end)
    with pytest.raises(QueueReset, match=f"is about queue {end.only.queue}, and manifest"):
        source.run().plan_input_partitions(end, after)
    assert source.queued == [0, 1, 2, 3, 4]
    assert source.manifest().epoch == 0


def test_f4_another_queue_has_its_own_transactions(source: SourceQueue) -> None:
    source.produce(1, txn=Transaction("app", 7))
    position, _ = batch(source.run(), None)
    source.delete_everything()
    source.produce(1, txn=Transaction("app", 0))
    source.produce(1, txn=Transaction("app", 1))
    driver = source.run(failOnDataLoss="false")
    read: list[int] = []
    for _ in range(2):
        position, part = batch(driver, position)
        # A late commit of the old position dequeues no unread batch.
        driver.commit(offset(1, 0, {}, "another"))
        read += part
    assert (read, source.queued) == ([0, 1], [0, 1])


def test_a_checkpoint_of_version_1_continues_and_is_replayed_unchanged(source: SourceQueue) -> None:
    txn = Transaction("app", 7)
    source.produce(2, txn=txn)
    driver = source.run(maxBatchesPerTrigger="3")
    queue = driver.latest_offset(None).only.queue
    source.produce(1)
    source.produce(2, txn=txn)
    source.produce(2)
    # Offsets as release 0.1 recorded them: batch 0 read the transaction, batch 1 the next three.
    first, second = (
        SourceOffset.from_json(json.loads(text.replace("QUEUE", queue)))
        for text in (
            '{"v":1,"queue":"QUEUE","next":2,"base":0,'
            '"txn":{"v":1,"apps":{"app":7},"tail":["app",1]}}',
            '{"v":1,"queue":"QUEUE","next":5,"base":0,"txn":{"v":1,"apps":{"app":7},"tail":null}}',
        )
    )
    assert first is not None
    assert second is not None
    assert planned(source.run(), None, first) == [0, 1]
    again = source.run()
    assert planned(again, first, second) == [2]
    assert source.queued == [2, 3, 4, 5, 6]
    assert batch(again, second)[1] == [5, 6]


def test_f4_the_error_about_a_queue_that_went_backwards_names_both_positions(
    source: SourceQueue,
) -> None:
    source.produce(5)
    end, _ = batch(source.run(), None)
    source.replace_queue()
    source.produce(2)
    for start in (None, end):
        with pytest.raises(QueueReset, match="went backwards: next sequence 5 -> 2"):
            source.run().plan_input_partitions(start, end)
    with pytest.raises(QueueReset, match="went backwards: next sequence 5 -> 2"):
        source.run().latest_offset(end)
    # A marker of an earlier release, which has no watermark.
    marker = {"version": 1, "manifest": "manifest", "id": end.only.queue}
    source.store.put("ingest/_owner.json", json.dumps(marker).encode())
    with pytest.raises(QueueReset, match=r"needs sequences 0 to 4 .* holds 0 to 1"):
        source.run().plan_input_partitions(None, end)
    assert source.queued == [0, 1]


def test_f4_a_late_commit_dequeues_nothing_from_a_restored_queue(source: SourceQueue) -> None:
    """The copy is newer than the watermark of the marker, so the queue keeps its ID."""
    source.produce(4)
    driver = source.run()
    end, _ = batch(driver, None)
    copy = source.manifest().raw
    source.produce(2)
    old, _ = batch(driver, end)
    source.restore(copy)
    again = source.run(failOnDataLoss="false")
    # With asynchronous progress tracking, commits come some batches later.
    start = again.latest_offset(old)
    assert (start.only.next, start.only.queue) == (0, old.only.queue)
    assert planned(again, old, start) == []
    source.produce(4)
    assert planned(again, start, again.latest_offset(start)) == [0, 1, 2, 3, 4, 5, 6, 7]
    again.commit(old)  # logged with the first micro-batch of the run, which is slow
    assert source.queued == [0, 1, 2, 3, 4, 5, 6, 7], "a crash here would lose 4 and 5"
    again.commit(start)
    assert source.queued == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("remove", [SourceQueue.recreate, SourceQueue.delete_everything])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("later", [0, 1, 6, 9])
@pytest.mark.parametrize("restarts", [False, True])
def test_f4_a_queue_that_replaced_another_is_read_completely(
    source: SourceQueue, remove: Callable[[SourceQueue], None], new: int, later: int, restarts: bool
) -> None:
    """It does not matter how many batches it has at the restart and at the next poll."""
    source.produce(6)
    position, _ = batch(source.run(), None)
    remove(source)
    source.produce(new)
    driver = source.run(failOnDataLoss="false")
    taken: list[int] = []
    for step in range(5):
        end = driver.latest_offset(position)
        if end != position:
            driver.commit(position)
            read = planned(driver, position, end)
            if restarts:
                driver = source.run(failOnDataLoss="false")
                assert planned(driver, position, end) == read
            assert step > 0 or not read, "the first micro-batch has no rows"
            taken += read
            position = end
        # No unread batch has been dequeued.
        assert source.manifest().first_sequence <= len(taken)
        if step == 0 and later:
            source.produce(later)
    assert taken == list(range(new + later))
    assert position.only.next == new + later


# Limits


# Transactions


def delete_object(source: SourceQueue, sequence: int) -> None:
    """Delete the object of a batch, but not its entry."""
    (entry,) = source.manifest().entries(start=sequence, limit=1)
    source.store.delete_many([entry.location])


def test_f5_the_repeat_of_a_transaction_with_missing_objects_is_read(
    source: SourceQueue, caplog: pytest.LogCaptureFixture
) -> None:
    source.produce(1)
    source.produce(
        1, txn=Transaction("app", 1)
    )  # This append landed too late, so the object of batch 1 is missing.
    source.produce(1, txn=Transaction("app", 2))
    delete_object(source, 1)
    driver = source.run(failOnDataLoss="false")
    first, read = batch(driver, None)
    assert read == [0, 2]
    assert first.only.missing == (1,)
    assert "batch 1 at 'ingest/app=app/batch=1/" in caplog.text
    # A replay reads the same batches as the first run, even when the object is back.
    (entry,) = source.manifest().entries(start=1, limit=1)
    source.store.put(entry.location, encode_batch([b"x"]))
    driver = source.run(failOnDataLoss="false")
    assert planned(driver, None, first) == [0, 2]
    # The writer knows, and writes batch 1 again. It repeats batch 2, which may be missing too.
    source.produce(1)
    source.produce(1, txn=Transaction("app", 1))
    source.produce(1, txn=Transaction("app", 2))
    second, read = batch(driver, first)
    assert read == [3, 4]
    assert planned(source.run(failOnDataLoss="false"), first, second) == [3, 4]


@pytest.mark.parametrize("while_it_runs", [False, True])
@pytest.mark.parametrize(
    "limit", [{"maxBatchesPerTrigger": "1"}, {"maxOffsetsPerTrigger": "1"}, {}]
)
def test_a_gap_wider_than_a_trigger_does_not_stop_the_query(
    source: SourceQueue, while_it_runs: bool, limit: dict[str, str]
) -> None:
    source.produce(2)
    driver = source.run(failOnDataLoss="false", **limit)
    position: SourceOffset | None = None
    for _ in range(2):
        position, _ = batch(driver, position)
    assert position is not None
    assert position.only.next == 2
    source.produce(20)
    source.store.put("ingest/manifest", source.manifest().drop_through(17).raw)
    if not while_it_runs:
        driver = source.run(failOnDataLoss="false", **limit)
    read: list[int] = []
    for _ in range(6):
        position, part = batch(driver, position)
        read += part
    assert read == [18, 19, 20, 21]


# Polling and progress


def idle(source: SourceQueue, driver: MicroBatchStream, end: SourceOffset, seconds: float) -> int:
    """Call the source as Spark does while nothing comes; return the number of calls."""
    calls, until = 0, source.runtime.monotonic() + seconds
    while source.runtime.monotonic() < until:
        assert driver.latest_offset(end) is end
        source.runtime.advance(0.01)
        calls += 1
    return calls


def waited(source: SourceQueue, driver: MicroBatchStream, end: SourceOffset) -> float:
    """Return the seconds that the next poll of an idle queue waits."""
    began = source.runtime.monotonic()
    assert driver.latest_offset(end) is end
    return source.runtime.monotonic() - began


def test_an_idle_queue_is_polled_often_at_first_and_then_more_and_more_rarely(
    source: SourceQueue,
) -> None:
    source.produce(1)
    driver = source.run()
    end, _ = batch(driver, None)
    assert waited(source, driver, end) == 0, "the first poll follows data"
    assert waited(source, driver, end) == pytest.approx(FIRST_PAUSE_S)
    assert idle(source, driver, end, 5) < 30
    assert 0.8 < waited(source, driver, end) < 1.2
    idle(source, driver, end, 60)
    assert 1.9 < waited(source, driver, end) <= 2.0
    source.produce(1)
    end, read = batch(driver, end)
    assert read == [1]
    assert waited(source, driver, end) == 0
    assert waited(source, driver, end) == pytest.approx(FIRST_PAUSE_S)


def test_each_call_of_an_idle_query_looks_at_the_queue(source: SourceQueue) -> None:
    """Otherwise processAllAvailable() would return before all available batches are read."""
    source.produce(1)
    driver = source.run()
    end, _ = batch(driver, None)
    for _ in range(100):
        source.store.gets.clear()
        waited(source, driver, end)
        assert "ingest/manifest" in [key for key, _ in source.store.gets]
    source.produce(1)
    assert driver.latest_offset(end) != end


def test_an_idle_queue_does_not_delay_the_other_sources_of_its_query(source: SourceQueue) -> None:
    source.produce(1)
    driver = source.run()
    end, _ = batch(driver, None)
    idle(source, driver, end, 60)
    driver.commit(end)  # Spark ran a micro-batch of another source.
    assert waited(source, driver, end) <= FIRST_PAUSE_S


def test_the_interval_of_a_trigger_does_not_become_longer(source: SourceQueue) -> None:
    source.produce(1)
    driver = source.run()
    end, _ = batch(driver, None)
    for _ in range(100):
        source.runtime.advance(1.0)  # processingTime="1 second"
        assert waited(source, driver, end) == 0


def test_a_run_with_available_now_does_not_wait(source: SourceQueue) -> None:
    source.produce(1)
    driver = source.run()
    driver.prepare_available_now()
    end, _ = batch(driver, None)
    for _ in range(3):
        assert waited(source, driver, end) == 0


def test_the_longest_pause_is_an_option(source: SourceQueue) -> None:
    source.produce(1)
    driver = source.run(idlePollMs="100")
    end, _ = batch(driver, None)
    idle(source, driver, end, 60)
    assert waited(source, driver, end) <= FIRST_PAUSE_S


def test_progress_shows_backlog_and_lag(source: SourceQueue) -> None:
    driver = source.run(maxBatchesPerTrigger="2")
    assert driver.report() is None
    source.produce(2)
    source.runtime.advance(3)
    source.produce(1)
    source.runtime.advance(2)
    source.produce(1)
    end, _ = batch(driver, None)
    assert driver.report() == {
        "v": 1,
        "source": "memory:///ingest/manifest",
        "next": 4,
        "backlogBatches": 2,
        "lagMs": 2000,
        "batches": 2,
        "bytes": None,
        "droppedRepeats": 0,
        "missing": 0,
        "retries": 0,
    }
    end, _ = batch(driver, end)
    report = report_of(driver)
    assert (report["next"], report["backlogBatches"], report["lagMs"]) == (4, 0, 0)
    assert report["batches"] == 4


def test_dropped_repeats_are_a_warning_with_a_count_and_a_metric(
    source: SourceQueue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(metrics.repeats_dropped, "add", counted.append)
    driver = source.run()
    source.produce(2, txn=Transaction("app", 1))
    source.produce(1)
    source.produce(2, txn=Transaction("app", 1))
    end = driver.latest_offset(None)
    for _ in range(2):  # Spark plans once per scan of the source.
        assert planned(driver, None, end) == [0, 1, 2]
    assert (report_of(driver)["droppedRepeats"], counted) == (2, [2])
    (warning,) = [each for each in caplog.records if "repeated" in each.message]
    assert warning.levelname == "WARNING"
    assert "left out 2 of 5 batches, sequences 3 to 4" in warning.message


# A store that does not answer


@pytest.mark.parametrize("method", ["get", "list"])
def test_transient_errors_do_not_end_the_query(source: SourceQueue, method: str) -> None:
    source.produce(20)
    source.store.fail(method, 6)
    driver = source.run(maxBytesPerTrigger="100000")
    end, read = batch(driver, None)
    assert read == list(range(20))
    driver.commit(end)
    assert source.queued == []
    report = report_of(driver)
    assert report["retries"] >= (6 if method == "list" else 0)
    assert (report["batches"], report["bytes"]) == (20, 20 * len(encode_batch([b"x"])))


def test_a_failed_acknowledgement_is_repeated_later(source: SourceQueue) -> None:
    source.produce(1)
    driver = source.run()
    first, _ = batch(driver, None)
    source.produce(1)
    second = driver.latest_offset(first)
    source.store.fail("get", 1_000_000)
    driver.commit(first)
    source.store.fail("get", 0)
    assert source.queued == [0, 1]
    driver.commit(second)
    assert source.queued == []


# Reading without consuming


def not_consuming(source: SourceQueue, **options: str) -> MicroBatchStream:
    return source.run(acknowledge="false", **options)


def test_a_query_that_does_not_consume_writes_nothing_and_does_not_fence_the_owner(
    source: SourceQueue,
) -> None:
    source.produce(3)
    owner = source.run(maxBatchesPerTrigger="1")
    position, _ = batch(owner, None)
    before = source.manifest(), source.store.list("").objects
    reader = not_consuming(source)
    first, read = batch(reader, None)
    assert read == [0, 1, 2]
    reader.commit(first)
    assert reader.latest_offset(first) is first
    reader.stop()
    assert (source.manifest(), source.store.list("").objects) == before
    # The owner was not fenced.
    position, read = batch(owner, position)
    assert read == [1]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_query_that_does_not_consume_reports_a_loss_when_the_owner_was_faster(
    source: SourceQueue, restarts: bool
) -> None:
    source.produce(2)
    readers = {loss: not_consuming(source, failOnDataLoss=loss) for loss in ("true", "false")}
    ends = {loss: batch(reader, None)[0] for loss, reader in readers.items()}
    source.produce(4)
    consume(source, 3)
    if restarts:
        readers = {loss: not_consuming(source, failOnDataLoss=loss) for loss in readers}
    with pytest.raises(DataLoss, match=r"sequence 2 is needed .* starts at 4: .*was faster"):
        readers["true"].latest_offset(ends["true"])
    end, read = batch(readers["false"], ends["false"])
    assert read == [4, 5]
    assert planned(not_consuming(source, failOnDataLoss="false"), ends["false"], end) == [4, 5]
