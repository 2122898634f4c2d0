"""The driver's side of the source against a queue in memory, on a manual clock."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from buffer_source.micro_batch_stream import POLL_INTERVAL_S, MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import ONLY, PartitionOffset, SourceOffset
from opendata_buffer import Consumer, metrics
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.batch import Transaction, encode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.source_queue import World, batches_of, committed_before, report_of


@pytest.fixture
def world(runtime: ManualRuntime) -> World:
    return World(runtime)


def offset(
    following: int, base: int, transactions: dict[str, Any] | None = None, queue: str = ""
) -> SourceOffset:
    return SourceOffset({ONLY: PartitionOffset(following, base, transactions or {}, queue)})


def planned(driver: MicroBatchStream, start: SourceOffset | None, end: SourceOffset) -> list[int]:
    return [each.sequence for each in batches_of(driver, start, end)]


def batch(driver: MicroBatchStream, start: SourceOffset | None) -> tuple[SourceOffset, list[int]]:
    """One micro-batch as a normal query runs it."""
    end = committed_before(driver, start)
    return end, [] if end == start else planned(driver, start, end)


@pytest.mark.parametrize("first", [2**62, 2**63, 2**64 - 3])
def test_sequences_as_large_as_a_manifest_can_count_are_read(world: World, first: int) -> None:
    world.store.put("ingest/manifest", Manifest.starting_at(first, 0).raw)
    world.produce(2)
    end, read = batch(world.run(), None)
    assert (read, end.only.next) == ([first, first + 1], first + 2)
    assert SourceOffset.from_json(end.to_json()) == end


def test_a_queue_that_does_not_exist_is_named_and_not_made(world: World) -> None:
    for available_now in (False, True):
        driver = world.run()
        if available_now:
            driver.prepare_available_now()
        with pytest.raises(
            InvalidInput, match=r"no queue with manifest 'ingest/manifest' in .*createIfMissing"
        ):
            driver.latest_offset(None)
    assert world.store.list("").objects == ()


def test_a_replay_of_the_first_batch_makes_no_queue_where_it_was_deleted(world: World) -> None:
    world.produce(2)
    end = world.run().latest_offset(None)
    world.store.delete_many([each.key for each in world.store.list("").objects])
    for given in ({}, {"failOnDataLoss": "false"}, {"createIfMissing": "true"}):
        for call in (MicroBatchStream.latest_offset, MicroBatchStream.commit):
            with pytest.raises(InvalidInput, match="there is no queue"):
                call(world.run(**given), end)
        with pytest.raises(InvalidInput, match="there is no queue"):
            world.run(**given).plan_input_partitions(None, end)
    assert world.store.list("").objects == ()


@pytest.mark.parametrize("replay", [False, True])
def test_f4_an_allowed_loss_never_starts_a_lost_queue_over(world: World, replay: bool) -> None:
    world.produce(5)
    end, _ = batch(world.run(), None)
    world.store.delete_many(["ingest/manifest"])
    before = world.store.list("").objects
    for given in ({"failOnDataLoss": "false"}, {}):
        driver = world.run(**given)
        with pytest.raises(QueueReset, match=r"manifest 'ingest/manifest' is gone") as caught:
            driver.plan_input_partitions(None, end) if replay else driver.latest_offset(end)
        assert "set the option failOnDataLoss" not in str(caught.value), "it would not help"
    assert world.store.list("").objects == before


def test_commit_lets_batches_leave_the_queue_and_is_repeatable(world: World) -> None:
    world.produce(3)
    end, _ = batch(world.run(maxBatchesPerTrigger="2"), None)
    driver = world.run()
    driver.commit(end)  # The first call of a run may be this one.
    assert world.queued == [2]
    version = world.manifest()
    driver.commit(end)
    assert world.manifest() == version


def test_a_new_query_on_a_consumed_queue_is_told_what_is_gone_and_how_to_keep_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.produce(3)
    consume(world, 2)
    driver = world.run(startingOffsets="earliest")
    end, found = batch(driver, None)
    assert found == []
    world.produce(2)
    assert batch(driver, end)[1] == [3, 4]
    (message,) = caplog.messages
    assert "3 batches were read and removed before this query" in message
    assert "'opendata-buffer readers enable " in message
    assert "--retention 7d'" in message


def test_a_query_that_misses_nothing_is_not_warned(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.produce(3)
    end, found = batch(world.run(), None)
    assert found == [0, 1, 2]
    batch(world.run(), end)
    world.run().commit(end)
    assert world.queued == []
    batch(world.run(), end)  # the restart of a query that has read
    batch(world.run(startingOffsets="latest"), None)
    batch(world.run(startingOffsets="3"), None)
    assert caplog.messages == []


# Acknowledging from latestOffset


def test_an_idle_query_acknowledges_its_last_batch(world: World) -> None:
    driver = world.run()
    world.produce(1)
    first, _ = batch(driver, None)
    world.produce(1)
    second, _ = batch(driver, first)
    driver.latest_offset(second)
    assert world.queued == [1]
    world.produce(1)
    third, _ = batch(driver, second)
    driver.latest_offset(third)
    assert world.queued == []


# Restarts


@pytest.mark.parametrize(
    "start",
    [{"startingOffsets": "latest"}, {"startingOffsets": "5"}, {"startingTimestamp": str(1 << 46)}],
)
def test_a_start_removes_nothing_unread_and_fences_nobody(
    world: World, start: dict[str, str]
) -> None:
    world.produce(5)
    owner = world.run()
    before, _ = batch(owner, None)
    for available_now in (False, True):
        driver = world.run(**start)
        if available_now:
            driver.prepare_available_now()
        with pytest.raises(
            InvalidInput,
            match=rf"option {next(iter(start))} starts at sequence 5 .* 5 unread batches from 0 on "
            r"would leave .*acknowledge to false.*'opendata-buffer trim \S+ --to 5'",
        ):
            driver.latest_offset(None)
    assert world.queued == [0, 1, 2, 3, 4]
    owner.commit(before)  # it was not fenced
    assert batch(world.run(acknowledge="false", **start), None)[0].only.base == 5


def test_a_checkpoint_of_a_release_that_did_remove_them_goes_on(world: World) -> None:
    world.produce(4)
    queue = world.run().latest_offset(None).only.queue
    began_at_latest = offset(4, 4, {}, queue)
    driver = world.run(startingOffsets="latest")
    assert planned(driver, None, began_at_latest) == []
    world.produce(1)
    assert batch(driver, began_at_latest)[1] == [4]
    assert world.queued == [4]


def test_the_start_is_resolved_once(world: World) -> None:
    driver = world.run(startingOffsets="latest", createIfMissing="true")
    assert driver.latest_offset(None).only.base == 0
    world.produce(1)
    # The second call sees the new end, and the third must not begin there.
    assert [driver.latest_offset(None).only.base for _ in range(2)] == [0, 0]


# Data loss


def consume(world: World, through: int) -> None:
    config = SourceOptions.from_spark({"path": "/world", "gcEnabled": "false"}).consumer
    consumer = Consumer(config, store=world.store, runtime=world.runtime)
    consumer.next_descriptors(through + 1)
    consumer.ack_through(through)


def test_sequences_that_are_gone_name_both_positions(world: World) -> None:
    world.produce(2)
    driver = world.run()
    first, _ = batch(driver, None)
    world.produce(4)
    second = driver.latest_offset(first)
    consume(world, 3)
    with pytest.raises(DataLoss, match=r"sequence 2 is needed but .* starts at 4") as caught:
        world.run().latest_offset(first)
    assert (caught.value.needed, caught.value.oldest) == (2, 4)
    with pytest.raises(DataLoss, match="starts at 4"):
        world.run().plan_input_partitions(first, second)
    with pytest.raises(DataLoss, match=r"needs sequences 0 to 5 .* 2 are left"):
        world.run().plan_input_partitions(None, offset(6, 0))


@pytest.mark.parametrize("acknowledge", ["true", "false"])
def test_batches_that_are_gone_behind_an_empty_first_micro_batch_are_a_loss(
    world: World, acknowledge: str
) -> None:
    end, _ = batch(world.run(createIfMissing="true"), None)
    assert end.only.next == 0
    world.produce(3)
    consume(world, 1)
    with pytest.raises(DataLoss, match=r"sequence 0 is needed but .* starts at 2"):
        world.run(acknowledge=acknowledge).latest_offset(end)
    lenient = world.run(acknowledge=acknowledge, failOnDataLoss="false")
    assert batch(lenient, end)[1] == [2]


def test_losses_can_be_passed_by(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.produce(2)
    driver = world.run()
    first, _ = batch(driver, None)
    world.produce(4)
    planned_before = driver.latest_offset(first)
    consume(world, 3)
    with caplog.at_level(logging.WARNING):
        again = world.run(failOnDataLoss="false")
        assert planned(again, first, planned_before) == [4, 5]
        fresh = world.run(failOnDataLoss="false")
        end = fresh.latest_offset(first)
    assert (end.only.next, end.only.base) == (6, 4)
    assert planned(fresh, first, end) == [4, 5]
    # And so again in a replay, which knows only the offsets.
    assert planned(world.run(failOnDataLoss="false"), first, end) == [4, 5]
    assert "data loss allowed" in caplog.text


def test_a_micro_batch_ends_at_a_loss_that_is_passed_by(world: World) -> None:
    world.produce(2)
    driver = world.run(failOnDataLoss="false")
    assert driver.latest_offset(None).only.next == 2
    world.produce(4)
    # Another program takes entries without becoming the consumer.
    world.store.put("ingest/manifest", world.manifest().drop_through(3).raw)
    first = driver.latest_offset(None)
    assert (first.only.next, planned(driver, None, first)) == (2, [0, 1])
    second = driver.latest_offset(first)
    assert (second.only.next, second.only.base, planned(driver, first, second)) == (6, 4, [4, 5])


def test_f4_a_position_of_another_queue_is_refused_and_drops_nothing(world: World) -> None:
    world.produce(2)
    end, _ = batch(world.run(), None)
    after = offset(2, 0, {}, end.only.queue)
    world.delete_everything()
    # Longer than the position: by sequences alone it looks like the same queue, gone on.
    world.produce(5)
    for call in ("latest_offset", "commit"):
        with pytest.raises(QueueReset, match=f"is about queue {end.only.queue}, and manifest"):
            getattr(world.run(), call)(end)
    with pytest.raises(QueueReset, match=f"is about queue {end.only.queue}, and manifest"):
        world.run().plan_input_partitions(end, after)
    assert world.queued == [0, 1, 2, 3, 4]
    assert world.manifest().epoch == 0


def test_f4_another_queue_has_transactions_of_its_own(world: World) -> None:
    world.produce(1, txn=Transaction("app", 7))
    position, _ = batch(world.run(), None)
    world.delete_everything()
    world.produce(1, txn=Transaction("app", 0))
    world.produce(1, txn=Transaction("app", 1))
    driver = world.run(failOnDataLoss="false")
    read: list[int] = []
    for _ in range(2):
        position, part = batch(driver, position)
        # A commit of the old position that comes late drops nothing unread.
        driver.commit(offset(1, 0, {}, "another"))
        read += part
    assert (read, world.queued) == ([0, 1], [0, 1])


def test_a_checkpoint_of_version_1_goes_on_and_is_replayed_as_it_was(world: World) -> None:
    txn = Transaction("app", 7)
    world.produce(2, txn=txn)
    driver = world.run(maxBatchesPerTrigger="3")
    queue = driver.latest_offset(None).only.queue
    world.produce(1)
    world.produce(2, txn=txn)
    world.produce(2)
    # As release 0.1 recorded them: batch 0 read the transaction, batch 1 the three after it.
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
    assert planned(world.run(), None, first) == [0, 1]
    again = world.run()
    assert planned(again, first, second) == [2]
    assert world.queued == [2, 3, 4, 5, 6]
    assert batch(again, second)[1] == [5, 6]


def test_f4_a_queue_that_went_backwards_names_both_positions(world: World) -> None:
    world.produce(5)
    end, _ = batch(world.run(), None)
    world.replace_queue()
    world.produce(2)
    for start in (None, end):
        with pytest.raises(QueueReset, match="went backwards: next sequence 5 -> 2"):
            world.run().plan_input_partitions(start, end)
    with pytest.raises(QueueReset, match="went backwards: next sequence 5 -> 2"):
        world.run().latest_offset(end)
    # A marker of the version before, which did not remember how far the queue was.
    marker = {"version": 1, "manifest": "manifest", "id": end.only.queue}
    world.store.put("ingest/_owner.json", json.dumps(marker).encode())
    with pytest.raises(QueueReset, match=r"needs sequences 0 to 4 .* holds 0 to 1"):
        world.run().plan_input_partitions(None, end)
    assert world.queued == [0, 1]


def test_f4_a_commit_that_lags_lets_nothing_of_a_restored_queue_go(world: World) -> None:
    """The copy is younger than what the marker remembers, so that the queue keeps its id."""
    world.produce(4)
    driver = world.run()
    end, _ = batch(driver, None)
    copy = world.manifest().raw
    world.produce(2)
    old, _ = batch(driver, end)
    world.restore(copy)
    again = world.run(failOnDataLoss="false")
    # With asynchronous progress tracking commits come some batches later.
    start = again.latest_offset(old)
    assert (start.only.next, start.only.queue) == (0, old.only.queue)
    assert planned(again, old, start) == []
    world.produce(4)
    assert planned(again, start, again.latest_offset(start)) == [0, 1, 2, 3, 4, 5, 6, 7]
    again.commit(old)  # on record since the first micro-batch of the run is, and that is slow
    assert world.queued == [0, 1, 2, 3, 4, 5, 6, 7], "a crash here would lose 4 and 5"
    again.commit(start)
    assert world.queued == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("remove", [World.recreate, World.delete_everything])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("later", [0, 1, 6, 9])
@pytest.mark.parametrize("restarts", [False, True])
def test_f4_a_queue_that_replaced_another_is_read_whole(
    world: World, remove: Callable[[World], None], new: int, later: int, restarts: bool
) -> None:
    """However far it got by the time of the restart, and by the next poll."""
    world.produce(6)
    position, _ = batch(world.run(), None)
    remove(world)
    world.produce(new)
    driver = world.run(failOnDataLoss="false")
    taken: list[int] = []
    for step in range(5):
        end = driver.latest_offset(position)
        if end != position:
            driver.commit(position)
            read = planned(driver, position, end)
            if restarts:
                driver = world.run(failOnDataLoss="false")
                assert planned(driver, position, end) == read
            assert step > 0 or not read, "first a micro-batch without rows"
            taken += read
            position = end
        # Nothing that was not read has left the queue.
        assert world.manifest().first_sequence <= len(taken)
        if step == 0 and later:
            world.produce(later)
    assert taken == list(range(new + later))
    assert position.only.next == new + later


# Limits


# Transactions


def gone(world: World, sequence: int) -> None:
    """A batch's object is deleted; its entry stays."""
    (entry,) = world.manifest().entries(start=sequence, limit=1)
    world.store.delete_many([entry.location])


def test_f5_the_repeat_of_a_transaction_that_was_gone_is_read(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.produce(1)
    world.produce(1, txn=Transaction("app", 1))  # An append that landed too late: 1 is gone.
    world.produce(1, txn=Transaction("app", 2))
    gone(world, 1)
    driver = world.run(failOnDataLoss="false")
    first, read = batch(driver, None)
    assert read == [0, 2]
    assert first.only.missing == (1,)
    assert "batch 1 at 'ingest/app=app/batch=1/" in caplog.text
    # A replay reads what the first run read, also when the object is back.
    (entry,) = world.manifest().entries(start=1, limit=1)
    world.store.put(entry.location, encode_batch([b"x"]))
    driver = world.run(failOnDataLoss="false")
    assert planned(driver, None, first) == [0, 2]
    # The writer knows, and writes it again; and 2 again, because it may be gone, too.
    world.produce(1)
    world.produce(1, txn=Transaction("app", 1))
    world.produce(1, txn=Transaction("app", 2))
    second, read = batch(driver, first)
    assert read == [3, 4]
    assert planned(world.run(failOnDataLoss="false"), first, second) == [3, 4]


@pytest.mark.parametrize("while_it_runs", [False, True])
@pytest.mark.parametrize(
    "limit", [{"maxBatchesPerTrigger": "1"}, {"maxOffsetsPerTrigger": "1"}, {}]
)
def test_a_gap_wider_than_a_trigger_does_not_stop_the_query(
    world: World, while_it_runs: bool, limit: dict[str, str]
) -> None:
    world.produce(2)
    driver = world.run(failOnDataLoss="false", **limit)
    position: SourceOffset | None = None
    for _ in range(2):
        position, _ = batch(driver, position)
    assert position is not None
    assert position.only.next == 2
    world.produce(20)
    world.store.put("ingest/manifest", world.manifest().drop_through(17).raw)
    if not while_it_runs:
        driver = world.run(failOnDataLoss="false", **limit)
    read: list[int] = []
    for _ in range(6):
        position, part = batch(driver, position)
        read += part
    assert read == [18, 19, 20, 21]


# Polling and progress


def test_an_idle_queue_is_polled_once_in_an_interval(world: World) -> None:
    world.produce(1)
    driver = world.run()
    end, _ = batch(driver, None)
    world.store.gets.clear()
    began = world.runtime.monotonic()
    for _ in range(5):
        assert driver.latest_offset(end) is end
    assert [answer for _, answer in world.store.gets] == [None] * 5
    # The first poll follows data and does not wait.
    assert world.runtime.monotonic() - began == pytest.approx(4 * POLL_INTERVAL_S)


def test_progress_shows_backlog_and_lag(world: World) -> None:
    driver = world.run(maxBatchesPerTrigger="2")
    assert driver.report() is None
    world.produce(2)
    world.runtime.advance(3)
    world.produce(1)
    world.runtime.advance(2)
    world.produce(1)
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
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(metrics.repeats_dropped, "add", counted.append)
    driver = world.run()
    world.produce(2, txn=Transaction("app", 1))
    world.produce(1)
    world.produce(2, txn=Transaction("app", 1))
    end = driver.latest_offset(None)
    for _ in range(2):  # Spark plans once for each scan of the source.
        assert planned(driver, None, end) == [0, 1, 2]
    assert (report_of(driver)["droppedRepeats"], counted) == (2, [2])
    (warning,) = [each for each in caplog.records if "repeated" in each.message]
    assert warning.levelname == "WARNING"
    assert "left out 2 of 5 batches, sequences 3 to 4" in warning.message


# A store that does not answer


@pytest.mark.parametrize("method", ["get", "list"])
def test_transient_errors_do_not_end_the_query(world: World, method: str) -> None:
    world.produce(20)
    world.store.fail(method, 6)
    driver = world.run(maxBytesPerTrigger="100000")
    end, read = batch(driver, None)
    assert read == list(range(20))
    driver.commit(end)
    assert world.queued == []
    report = report_of(driver)
    assert report["retries"] >= (6 if method == "list" else 0)
    assert (report["batches"], report["bytes"]) == (20, 20 * len(encode_batch([b"x"])))


def test_an_acknowledgement_that_fails_is_made_up_for(world: World) -> None:
    world.produce(1)
    driver = world.run()
    first, _ = batch(driver, None)
    world.produce(1)
    second = driver.latest_offset(first)
    world.store.fail("get", 1_000_000)
    driver.commit(first)
    world.store.fail("get", 0)
    assert world.queued == [0, 1]
    driver.commit(second)
    assert world.queued == []


# Beside the consumer


def beside(world: World, **options: str) -> MicroBatchStream:
    return world.run(acknowledge="false", **options)


def test_a_reader_beside_the_owner_does_not_fence_it_and_writes_nothing(world: World) -> None:
    world.produce(3)
    owner = world.run(maxBatchesPerTrigger="1")
    position, _ = batch(owner, None)
    before = world.manifest(), world.store.list("").objects
    reader = beside(world)
    first, read = batch(reader, None)
    assert read == [0, 1, 2]
    reader.commit(first)
    assert reader.latest_offset(first) is first
    reader.stop()
    assert (world.manifest(), world.store.list("").objects) == before
    # The owner was not fenced.
    position, read = batch(owner, position)
    assert read == [1]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_owner_that_was_faster_is_a_loss_for_the_reader_beside_it(
    world: World, restarts: bool
) -> None:
    world.produce(2)
    readers = {loss: beside(world, failOnDataLoss=loss) for loss in ("true", "false")}
    ends = {loss: batch(reader, None)[0] for loss, reader in readers.items()}
    world.produce(4)
    consume(world, 3)
    if restarts:
        readers = {loss: beside(world, failOnDataLoss=loss) for loss in readers}
    with pytest.raises(DataLoss, match=r"sequence 2 is needed .* starts at 4: .*was faster"):
        readers["true"].latest_offset(ends["true"])
    end, read = batch(readers["false"], ends["false"])
    assert read == [4, 5]
    assert planned(beside(world, failOnDataLoss="false"), ends["false"], end) == [4, 5]
