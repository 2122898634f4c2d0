"""Reading a queue once and in order, under faults."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opendata_buffer import Consumer, metrics
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.entries import COLLECT_AFTER_S
from opendata_buffer.consumer.position import Cursors, Position
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    Closed,
    DataLoss,
    Fenced,
    InvalidInput,
    QueueReset,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.internal_parts import internals
from opendata_buffer.outcomes import Unknown
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic
from tests.unit.broker.local import Overtaken
from tests.unit.consumer.local import LocalQueue


@pytest.fixture
def queue() -> Iterator[LocalQueue]:
    made = LocalQueue()
    yield made
    made.close()


# Starting


def test_starting_creates_the_queue_only_on_request(queue: LocalQueue) -> None:
    with pytest.raises(
        InvalidInput, match=r"no queue: .* or create it with create_if_missing=True"
    ):
        queue.consumer(create_if_missing=False)
    assert queue.store.list("").objects == ()
    consumer = queue.consumer()
    assert (consumer.epoch, queue.manifest().epoch) == (1, 1)
    assert (consumer.next_batch(), len(consumer), bool(consumer)) == (None, 0, True)
    assert consumer.last_acked_sequence is None


@pytest.mark.parametrize("form", [str, Position.of, lambda position: position.sequence])
def test_reading_starts_at_the_oldest_batch_or_after_a_position(
    queue: LocalQueue, form: Callable[[Position], Any]
) -> None:
    queue.produce(b"a", b"b", b"c")
    with queue.consumer() as consumer:
        first = consumer.next_batch()
        position = consumer.position_of(0)
    assert first is not None
    assert (first.sequence, first.entries) == (0, [b"a"])
    assert first.metadata == (Metadata(0, queue.runtime.now_ms(), b"m"),)
    resumed = queue.consumer(form(position))
    assert (resumed.position, resumed.epoch) == (position, 2)
    assert queue.queued() == [1, 2], "acknowledged batches are dequeued at the start"
    assert [batch.entries for batch in _drain(resumed)] == [[b"b"], [b"c"]]


def test_f4_f27_a_position_past_the_end_of_the_queue_changes_nothing(queue: LocalQueue) -> None:
    queue.produce(b"a", b"b")
    for position in (2, 3, 2**64 - 1):
        with pytest.raises(QueueReset, match=f"after sequence {position}: manifest .* ends at 1"):
            queue.consumer(position)
    assert (queue.queued(), queue.manifest().epoch) == ([0, 1], 0)


def test_a_position_before_the_queue_is_data_loss_that_can_be_allowed(
    queue: LocalQueue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.produce(b"a", b"b", b"c", b"d")
    queue.consumer(2)
    with pytest.raises(DataLoss, match=r"sequence 1 is needed but .* starts at 3") as caught:
        queue.consumer(0)
    assert (caught.value.needed, caught.value.oldest) == (1, 3)
    assert queue.manifest().epoch == 1, "the other consumer is not fenced"
    consumer = queue.consumer(0, allow_data_loss=True)
    assert [batch.sequence for batch in _drain(consumer)] == [3]
    assert "sequences 1 to 2 are gone unread" in caplog.text
    consumer.ack(3)


# Reading batches one by one


def _drain(consumer: Consumer) -> Iterator[Any]:
    while (batch := consumer.next_batch()) is not None:
        yield batch


def test_acknowledged_batches_are_dequeued_every_ack_interval(queue: LocalQueue) -> None:
    queue.produce(*(b"%d" % each for each in range(7)))
    consumer = queue.consumer(ack_interval=3)
    writes = queue.store.writes
    for batch in _drain(consumer):
        consumer.ack(batch.sequence)
    assert queue.store.writes - writes == 2
    assert (queue.queued(), len(consumer)) == ([6], 0)
    consumer.flush()
    assert queue.queued() == []
    writes = queue.store.writes
    consumer.flush()
    assert queue.store.writes == writes, "without a new acknowledgement nothing is written"


@pytest.mark.parametrize("method", ["ack", "ack_through"])
def test_a_failed_ack_changes_nothing_and_can_be_repeated(
    queue: LocalQueue, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(metrics.acks, "add", counted.append)
    queue.produce(b"a")
    consumer = queue.consumer(ack_interval=1)
    consumer.next_batch()
    queue.store.fail_next = [TransientStorageError("503")] * 50
    with pytest.raises(TransientStorageError):
        getattr(consumer, method)(0)
    queue.store.fail_next = []
    assert (consumer.last_acked_sequence, queue.queued(), counted) == (None, [0], [])
    getattr(consumer, method)(0)
    assert (consumer.last_acked_sequence, queue.queued(), counted) == (0, [], [1])


def test_f25_a_missing_batch_stays_at_the_head_until_it_is_back(queue: LocalQueue) -> None:
    location = queue.produce(b"a", b"b")[0]
    consumer = queue.consumer()
    queue.store.delete_many([location])
    for _ in range(3):
        with pytest.raises(BatchMissing, match="batch 0 at"):
            consumer.next_batch()
    queue.store.put(location, encode_batch([b"restored"]))
    assert [batch.entries for batch in _drain(consumer)] == [[b"restored"], [b"b"]]


def test_f25_a_poison_batch_can_be_skipped_with_an_audit_record(
    queue: LocalQueue, caplog: pytest.LogCaptureFixture
) -> None:
    locations = queue.produce(b"a", b"b", b"c")
    queue.store.put(locations[1], b"garbage")
    consumer = queue.consumer(ack_interval=1)
    assert consumer.next_batch() is not None
    consumer.ack(0)
    with pytest.raises(BatchUnreadable, match=r"skip\(1\)") as caught:
        consumer.next_batch()
    skipped = consumer.skip(caught.value.sequence)
    assert (skipped.sequence, skipped.location) == (1, locations[1])
    assert f"skipped batch 1 at '{locations[1]}'" in caplog.text
    assert queue.queued() == [1, 2], "a stored position of 0 still resumes"
    last = consumer.next_batch()
    assert last is not None
    assert last.sequence == 2
    consumer.ack(2)
    assert queue.queued() == []


def test_f25_skip_refuses_a_sequence_that_is_not_queued(queue: LocalQueue) -> None:
    queue.produce(b"a")
    consumer = queue.consumer()
    for sequence in (1, 5):
        with pytest.raises(InvalidInput, match="only sequence 0 can"):
            consumer.skip(sequence)
    consumer.skip(0)
    with pytest.raises(InvalidInput, match="cannot skip sequence 1: it is not queued"):
        consumer.skip(1)
    consumer.ack(0)


# Read-ahead


def test_descriptors_come_in_order_from_one_read_without_a_fetch(queue: LocalQueue) -> None:
    locations = queue.produce(b"a", b"b", b"c")
    queue.store.delete_many(locations)
    consumer = queue.consumer()
    found = [*consumer.next_descriptors(2), *consumer.next_descriptors(2)]
    assert [(each.sequence, each.location) for each in found] == list(enumerate(locations))
    assert consumer.next_descriptors(2) == consumer.next_descriptors(0) == []
    assert (consumer.last_handed_out_sequence, consumer.last_acked_sequence) == (2, None)
    with pytest.raises(InvalidInput, match="max is -1"):
        consumer.next_descriptors(-1)


def test_f4_a_position_of_a_queue_that_was_recreated_is_refused(queue: LocalQueue) -> None:
    queue.produce(*[b"old"] * 10)
    with queue.consumer() as consumer:
        assert consumer.position is None
        while (batch := consumer.next_batch()) is not None:
            consumer.ack(batch.sequence)
        saved = consumer.position
        assert saved == consumer.position_of(9)
    queue.store.delete_many([each.key for each in queue.store.list("").objects])
    # The new queue is longer than the position, so by sequences alone it looks like the same queue.
    queue.produce(*[b"new"] * 12)
    for position in (saved, str(saved)):
        with pytest.raises(QueueReset, match=rf"cannot resume after {saved}: .* belongs to queue"):
            queue.consumer(position)
    assert queue.queued() == list(range(12))
    with queue.consumer() as consumer:
        assert consumer.next_descriptors(100)[0].sequence == 0


def test_next_batch_and_descriptors_share_one_cursor(queue: LocalQueue) -> None:
    queue.produce(b"a", b"b", b"c")
    consumer = queue.consumer()
    (descriptor,) = consumer.next_descriptors(1)
    second = consumer.next_batch()
    assert second is not None
    assert (second.sequence, consumer.fetch_descriptor(descriptor).entries) == (1, [b"a"])


def test_the_error_about_a_topic_names_the_consumer_for_topics(runtime: ManualRuntime) -> None:
    store = MemoryStore()
    Topic.create("memory://x", 2, store=store, runtime=runtime)
    with pytest.raises(InvalidInput, match=r"Use TopicConsumer, or .*data_path_prefix") as caught:
        Consumer(ConsumerConfig(store="memory://x"), store=store, runtime=runtime)
    assert "--partition" not in str(caught.value)


# Fencing and damage


def test_f8_the_next_read_of_a_fenced_consumer_raises_an_error(queue: LocalQueue) -> None:
    queue.produce(b"a", b"b", b"c")
    zombie = queue.consumer(ack_interval=1)
    (descriptor,) = zombie.next_descriptors(1)
    queue.consumer()
    calls: list[Any] = [
        zombie.next_batch,
        lambda: zombie.next_descriptors(1),
        lambda: zombie.ack(0),
        lambda: zombie.ack_through(0),
        lambda: zombie.skip(1),
        lambda: len(zombie),
        zombie.check_fence,
    ]
    for call in calls:
        with pytest.raises(Fenced, match="epoch 1 was fenced by epoch 2") as caught:
            call()
        assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert queue.queued() == [0, 1, 2]
    # Delivered batches can still be fetched. The transaction of the target must refuse them.
    assert zombie.fetch_handle().fetch(descriptor).entries == [b"a"]
    zombie.close()


@pytest.mark.parametrize("earlier", [None, ZeroDivisionError])
def test_f8_a_zombie_does_not_write_its_pending_acknowledgements(
    queue: LocalQueue, caplog: pytest.LogCaptureFixture, earlier: type[Exception] | None
) -> None:
    queue.produce(b"a")
    zombie = queue.consumer()
    zombie.next_batch()
    zombie.ack(0)
    queue.consumer()

    def use() -> None:
        with zombie:
            if earlier is not None:
                raise earlier

    with pytest.raises(
        earlier or Fenced
    ):  # an error of close does not hide the error of the caller
        use()
    said = "closing the Consumer after an error failed, too: consumer with epoch 1"
    assert (said in caplog.text) == (earlier is not None)
    assert queue.queued() == [0]
    zombie.close()


@pytest.mark.parametrize("queued_first", [True, False])
def test_f28_a_gap_before_the_cursor_is_data_loss(queue: LocalQueue, queued_first: bool) -> None:
    if queued_first:
        queue.produce(b"a", b"b", b"c")
        consumer = queue.consumer()
    else:
        consumer = queue.consumer()
        queue.produce(b"a", b"b", b"c")
    queue.write(queue.manifest().drop_through(1))
    for call in (consumer.next_batch, lambda: consumer.next_descriptors(1)):
        with pytest.raises(DataLoss, match=r"sequence 0 is needed but .* starts at 2"):
            call()


# Closing


def test_close_writes_acknowledgements(queue: LocalQueue) -> None:
    queue.produce(b"a", b"b")
    with queue.consumer() as consumer:
        consumer.next_batch()
        consumer.ack(0)
    assert queue.queued() == [1]
    consumer.close()
    calls: list[Any] = [
        consumer.next_batch,
        consumer.flush,
        lambda: consumer.ack(1),
        lambda: consumer.next_descriptors(1),
        lambda: len(consumer),
    ]
    for call in calls:
        with pytest.raises(Closed, match=r"after='\w{26}:0'"):
            call()


def test_close_gives_up_after_its_timeout_and_the_batch_is_delivered_again(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.produce(b"a")
    config = ConsumerConfig(store="memory://x", gc=False)
    consumer = Consumer(config, **internals(store=queue.store, runtime=queue.runtime))
    consumer.next_batch()
    consumer.ack(0)
    monkeypatch.setattr(queue.store, "put_if", lambda *_: Unknown("no answer"))
    queue.store.fail_next = [TransientStorageError("down")] * 10_000
    began = queue.runtime.monotonic()
    with pytest.raises(StorageError):
        consumer.close(timeout=3)
    assert 2 < queue.runtime.monotonic() - began < 10
    monkeypatch.undo()
    queue.store.fail_next = []
    consumer.close(timeout=3)  # it is closed already
    assert queue.queued() == [0]


# Logs for operators


# The collector of a consumer


def _collectors() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "opendata-buffer-gc"}


def test_the_collector_runs_and_stops_with_the_consumer(queue: LocalQueue) -> None:
    queue.produce(b"a")
    queue.write(queue.manifest().drop_through(0))
    orphan = batch_key("ingest", queue.runtime.ulid_at(queue.runtime.now_ms() - 3_600_000))
    queue.store._now_ms = lambda: queue.runtime.now_ms() - 3_600_000
    queue.store.put(orphan, b"")
    queue.store._now_ms = queue.runtime.now_ms
    others = _collectors()
    with queue.consumer(gc=GarbageCollectorConfig()):
        queue.runtime.await_waits(1)
        queue.runtime.advance(COLLECT_AFTER_S)
        queue.runtime.await_waits(2)
        (ours,) = _collectors() - others
    assert not ours.is_alive()
    assert orphan not in {info.key for info in queue.store.list("").objects}


def test_close_writes_acknowledgements_before_it_waits_for_the_collector(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.produce(b"a")
    consumer = queue.consumer(gc=GarbageCollectorConfig())
    consumer.next_batch()
    consumer.ack(0)
    queued: list[list[int]] = []
    assert consumer._entries._gc is not None
    stop = consumer._entries._gc.stop
    monkeypatch.setattr(
        consumer._entries._gc, "stop", lambda: (queued.append(queue.queued()), stop())
    )
    consumer.close()
    assert queued == [[]]


def test_f9_the_collector_of_a_garbage_collected_consumer_stops() -> None:
    queue = LocalQueue()
    consumer = queue.consumer(gc=GarbageCollectorConfig())
    queue.runtime.await_waits(1)
    assert consumer._entries._gc is not None
    task = consumer._entries._gc._task
    assert task is not None
    queue._open.clear()
    del consumer
    gc.collect()
    queue.runtime.advance(300)
    task.join(30)
    assert not task.is_alive()


@pytest.mark.parametrize("moment", ["opens", "acknowledges"])
def test_a_consumer_that_loses_a_race_asks_a_broker_for_a_pause(moment: str) -> None:
    store, runtime = Overtaken(), ManualRuntime()
    config = ConsumerConfig(store="memory://unused", ack_interval=1)
    entry = NewEntry("ingest/a.batch")
    Queue(store, config, runtime=runtime, role="test").append([entry])
    store.announce(config)
    if moment == "opens":
        store.overtaken_at = "ingest/manifest"
    with Consumer(config, store=store, runtime=runtime, open_pause=store.open_pause) as consumer:
        consumer.next_descriptors(1)
        if moment == "acknowledges":
            assert store.asked == []
            store.overtaken_at = "ingest/manifest"
        consumer.ack(0)
        assert len(consumer) == 0
    assert store.asked == ["somewhere:1"]


# Cursors and positions


def test_f26_the_first_acknowledged_batch_must_have_been_delivered() -> None:
    with pytest.raises(InvalidInput, match=r"ack sequence 3: it was not handed out\. Nothing can"):
        Cursors.at(0).ack(3)


def test_f26_the_first_acknowledgement_must_be_contiguous() -> None:
    cursors = Cursors.at(0).hand_out(3)
    with pytest.raises(InvalidInput, match="cannot ack sequence 3: 0 comes first"):
        cursors.ack(3)
    assert cursors.ack(0).ack(1).last_acked == 1


@pytest.mark.parametrize("sequence", [4, 2**63, 2**64])
def test_f27_ack_through_refuses_a_batch_that_was_not_delivered(sequence: int) -> None:
    cursors = Cursors.at(0).hand_out(3)
    with pytest.raises(InvalidInput, match=r"was not handed out\. Sequences 0 to 3 can"):
        cursors.ack_through(sequence)
    assert cursors.ack_through(3).next_ack == 4


@pytest.mark.parametrize("sequence", [-1, 0, 2])
def test_f27_ack_through_refuses_an_acknowledged_batch(sequence: int) -> None:
    cursors = Cursors.at(0).hand_out(5).ack_through(2)
    with pytest.raises(InvalidInput, match="everything through 2 is acknowledged already"):
        cursors.ack_through(sequence)


def test_ack_through_acknowledges_all_earlier_batches() -> None:
    cursors = Cursors.at(7).hand_out(9).ack_through(9)
    assert (cursors.last_acked, cursors.undequeued) == (9, 3)
    assert cursors.dequeued().undequeued == 0
    assert cursors.hand_out(8).last_handed_out == 9, "the position does not move back"


def test_f25_an_acknowledgement_passes_skipped_sequences() -> None:
    cursors = Cursors.at(0).hand_out(0).skip(1).hand_out(2).ack(0)
    assert cursors.last_acked == 0, "a skipped entry is dequeued only with the next acknowledgement"
    assert cursors.ack(2).last_acked == 2
    assert cursors.ack(2).skipped == frozenset()


def test_f25_skip_accepts_the_next_or_a_delivered_sequence() -> None:
    cursors = Cursors.at(0).hand_out(4).ack(0)
    assert cursors.skip(3).last_handed_out == 4
    assert cursors.skip(5).last_handed_out == 5
    for sequence in (0, 6):
        with pytest.raises(InvalidInput, match=f"skip sequence {sequence}: only sequences 1 to 5"):
            cursors.skip(sequence)
    with pytest.raises(InvalidInput, match="only sequence 7 can"):
        Cursors.at(7).skip(8)


def test_a_jump_forgets_skipped_sequences_that_are_lost() -> None:
    cursors = Cursors.at(0).hand_out(1).skip(1).jump(10)
    assert cursors == Cursors.at(10)


ID = "01JD5T4R3KXBMZ7QV9N2WG8Y00"


STATE = {"version": 1, "producers": {"0102": [1, 2, 3]}}


@pytest.mark.parametrize(
    "position",
    [Position(ID, 0), Position(ID, 2**63), Position("", 41), Position(ID, 2**63, 3, STATE)],
)
def test_a_position_can_be_printed_parsed_and_pickled(position: Position) -> None:
    assert str(Position(ID, 41)) == f"{ID}:41"
    assert Position.of(41) == Position("", 41)
    old = f'{{"queue":"{ID}","sequence":41}}'  # as release 0.1 printed the position of a partition
    assert Position.parse(old) == Position(ID, 41)
    assert Position.parse(str(position)) == position
    assert pickle.loads(pickle.dumps(position)) == position
    assert Position.of(str(position)) == Position.of(position) == position


@pytest.mark.parametrize(
    "text",
    [
        "", ":", f"{ID}:", f"{ID}:-1", f"{ID}:1:2", "1.5", "٤١", " 1", "{}", "[1]", "[" * 100_000,
        '{"queue":"a"}', '{"queue":"a","sequence":-1}', '{"queue":"a","sequence":"1"}',
        '{"queue":"a","sequence":1,"delivered":-1}', '{"queue":"a","sequence":1,"transactions":[]}',
    ],
)  # fmt: skip
def test_a_text_that_is_not_a_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="what str"):
        Position.parse(text)


@pytest.mark.parametrize("given", [True, -1, 1.5, b"1"])
def test_a_value_that_is_not_a_sequence_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match="position is"):
        Position.of(given)  # type: ignore[arg-type]
