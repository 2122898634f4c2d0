"""Reading several partitions of a topic in one process."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from opendata_buffer import TopicConsumer
from opendata_buffer.consumer.delivery import TransactionalDelivery
from opendata_buffer.consumer.owned_queue import OwnedQueue
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    Closed,
    DataLoss,
    Fenced,
    InvalidInput,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, FINAL, OUTSIDE_TXN, build_uuid
from opendata_buffer.queue.consumer_note import read_consumer_info
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.consumer import MAX_PREFETCH, round_robin
from opendata_buffer.topic.topic import Topic, partition_config, seal_partition
from tests.unit.topic.in_memory import NAMES, URL, Faulty, append, consuming, manifest_of


class TopicFixture:
    def __init__(self, partitions: int) -> None:
        self.runtime = ManualRuntime()
        self.store = Faulty(now_ms=self.runtime.now_ms)
        self.topic = Topic.create(URL, partitions, store=self.store, runtime=self.runtime)
        self.saved: dict[str, str] = {}

    def append(self, number: int, *records: bytes, message: Any = None) -> str:
        identity = None if message is None else build_uuid(*message)
        return append(self.store, self.runtime, NAMES[number], *records, message=identity)

    def append_all(self, count: int, partitions: int) -> None:
        """Append batches of one record, round robin over the partitions."""
        for number in range(count):
            self.append(number % partitions, b"%d" % number)

    def consumer(self, positions: Any = None, **settings: Any) -> TopicConsumer:
        options = {"store": self.store, "runtime": self.runtime, "refresh_s": 0.0} | settings
        config = consuming(ack_interval=1).with_timeout(100)
        return TopicConsumer(config, positions, **options)

    def queued(self, number: int) -> int:
        return manifest_of(self.store, NAMES[number]).entry_count


def drained(consumer: TopicConsumer) -> list[bytes]:
    found: list[bytes] = []
    while (batch := consumer.next_batch()) is not None:
        found += batch.entries
        consumer.ack(batch)
    return found


def test_all_partitions_are_read_and_each_in_its_order() -> None:
    fixture = TopicFixture(3)
    fixture.append_all(30, 3)
    consumer = fixture.consumer()
    assert consumer.partitions == NAMES[:3]
    found = list(map(int, drained(consumer)))
    for number in range(3):
        assert [each for each in found if each % 3 == number] == list(range(number, 30, 3))
    assert len(found) == 30
    assert [fixture.queued(number) for number in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_flush_and_close_write_exactly_the_acknowledged_batches(end: str) -> None:
    fixture = TopicFixture(2)
    fixture.append_all(6, 2)
    with TopicConsumer(consuming(), store=fixture.store, runtime=fixture.runtime) as consumer:
        batches = [consumer.next_batch() for _ in range(5)]
        with pytest.raises(InvalidInput, match="0 comes first"):
            consumer.ack(batches[-1])  # and the consumer continues
        for batch in batches:
            consumer.ack(batch)
        assert [fixture.queued(number) for number in range(2)] == [3, 3]
        getattr(consumer, end)()
        assert sorted(fixture.queued(number) for number in range(2)) == [0, 1]


def test_arrow_batches_have_the_same_records_as_other_batches() -> None:
    fixture = TopicFixture(2)
    for number in range(2):
        fixture.append(number, b"%d" % number, b"", message=(b"writer", 1, CONTINUE_TXN))
        fixture.append(number, message=(b"writer", 2, ACK_TXN))
    fixture.append(0, b"undecided", message=(b"absent", 1, CONTINUE_TXN))
    consumer = fixture.consumer(program="a test")
    found = {}
    while (batch := consumer.next_arrow_batch()) is not None:
        found[batch.partition] = batch.values.to_pylist()
        consumer.ack(batch)
    assert found == {NAMES[0]: [b"0", b""], NAMES[1]: [b"1", b""]}
    # The undecided batch stays. The acknowledgement that releases nothing more is dequeued.
    assert [fixture.queued(number) for number in range(2)] == [1, 0]
    holder = read_consumer_info(
        fixture.store, partition_config(NAMES[0], consuming()), fixture.runtime
    )
    assert holder.program == "a test"


def test_an_arrow_batch_that_cannot_be_read_is_an_error_and_may_be_skipped() -> None:
    fixture = TopicFixture(1)
    fixture.store.put(fixture.append(0, b"a"), b"no batch")
    fixture.append(0, b"b")
    consumer = fixture.consumer()
    with pytest.raises(BatchUnreadable):
        consumer.next_arrow_batch()
    consumer.skip(NAMES[0], 0)
    batch = consumer.next_arrow_batch()
    assert batch.values.to_pylist() == [b"b"]


def test_a_backlog_in_one_partition_does_not_starve_the_others() -> None:
    fixture = TopicFixture(3)
    for _ in range(2 * MAX_PREFETCH):
        fixture.append(0, b"much")
    consumer = fixture.consumer()
    taken = [consumer.next_batch().partition for _ in range(MAX_PREFETCH // 2)]
    assert set(taken) == {NAMES[0]}
    fixture.append(1, b"one")
    fixture.append(2, b"two")
    following = [consumer.next_batch().partition for _ in range(MAX_PREFETCH // 2 + 2)]
    assert set(following) == set(NAMES[:3])


def test_partitions_with_equal_backlogs_are_read_equally_often() -> None:
    fixture = TopicFixture(4)
    for number in range(4):
        for _ in range(MAX_PREFETCH):
            fixture.append(number, b"x")
    consumer = fixture.consumer()
    for rounds in range(1, 11):
        delivered = Counter(consumer.next_batch().partition for _ in range(4 * rounds))
        assert delivered == dict.fromkeys(NAMES[:4], rounds)


def test_a_position_that_is_saved_with_each_batch_resumes_right_after_it() -> None:
    fixture = TopicFixture(3)
    fixture.append_all(30, 3)
    saved: dict[str, str] = {}
    found: list[bytes] = []
    for _ in range(40):
        # Nothing is acknowledged, and only the target has the positions, as after a crash.
        consumer = fixture.consumer(dict(saved))
        batch = consumer.next_batch()
        if batch is None:
            break
        found += batch.entries
        saved[batch.partition] = str(consumer.position_of(batch))
        consumer.close()
    assert sorted(map(int, found)) == list(range(30))
    assert set(saved) == set(NAMES[:3])


def test_a_transaction_over_partitions_is_delivered_when_it_is_committed() -> None:
    fixture = TopicFixture(2)
    me = b"\x07" * 6
    fixture.append(0, b"t0", message=(me, 2, CONTINUE_TXN))
    fixture.append(1, b"t1", message=(me, 2, CONTINUE_TXN))
    fixture.append(0, b"plain")
    consumer = fixture.consumer()
    assert drained(consumer) == [b"plain"]
    assert [fixture.queued(0), fixture.queued(1)] == [2, 1]
    again = fixture.consumer({name: str(each) for name, each in consumer.positions.items()})
    assert drained(again) == []
    for number in (0, 1):
        fixture.append(number, message=(me, 3, ACK_TXN))
    assert sorted(drained(again)) == [b"t0", b"t1"]
    assert [fixture.queued(0), fixture.queued(1)] == [0, 0]


def test_read_uncommitted_delivers_everything() -> None:
    fixture = TopicFixture(1)
    fixture.append(0, b"t0", message=(b"\x07" * 6, 2, CONTINUE_TXN))
    assert drained(fixture.consumer(isolation="read_uncommitted")) == [b"t0"]
    with pytest.raises(InvalidInput, match="isolation is 'serializable'"):
        fixture.consumer(isolation="serializable")


def test_processes_share_a_topic_by_static_assignment() -> None:
    fixture = TopicFixture(3)
    fixture.append_all(9, 3)
    one = fixture.consumer(partitions=[NAMES[0], NAMES[2]])
    two = fixture.consumer(partitions=["1"])
    fixture.topic.expand(4)
    assert sorted(drained(one)) == [b"0", b"2", b"3", b"5", b"6", b"8"]
    assert sorted(drained(two)) == [b"1", b"4", b"7"]
    assert one.partitions == [NAMES[0], NAMES[2]]
    with pytest.raises(InvalidInput, match="'p-00009-04v2': the topic has p-00000-04pn"):
        fixture.consumer(partitions=["p-00009-04v2"])
    for wrong in ([], NAMES[0]):
        with pytest.raises(InvalidInput, match=r"partitions is .*: (use|give) a list"):
            fixture.consumer(partitions=wrong)


def test_a_drained_partition_is_removed_once_it_is_read() -> None:
    fixture = TopicFixture(2)
    fixture.append(1, b"last")
    consumer = fixture.consumer()
    fixture.topic.drain(NAMES[1])
    fixture.runtime.advance(3_600)
    batch = consumer.next_batch()
    assert consumer.next_batch() is None
    assert (
        consumer.partitions == NAMES[:2]
    )  # its last batch is not processed yet yet yet yet yet yet
    consumer.ack(batch)
    assert consumer.next_batch() is None
    assert consumer.partitions == [NAMES[0]]
    assert fixture.topic.read().names == [NAMES[0]]
    fixture.append(0, b"more")
    assert drained(consumer) == [b"more"]
    assert list(consumer.positions) == [NAMES[0]]
    assert drained(fixture.consumer({NAMES[1]: '{"queue":"","sequence":0}'})) == []


def test_a_draining_partition_is_kept_for_producers_that_do_not_know_yet() -> None:
    fixture = TopicFixture(2)
    consumer = fixture.consumer()
    fixture.topic.drain(NAMES[1])
    fixture.runtime.advance(10)
    assert drained(consumer) == []
    fixture.append(1, b"late")
    assert drained(consumer) == [b"late"]


def test_f25_a_bad_batch_does_not_block_the_other_partitions() -> None:
    fixture = TopicFixture(3)
    fixture.store.delete_many([fixture.append(1, b"bad")])
    fixture.append_all(3, 3)
    consumer = fixture.consumer()
    found: list[bytes] = []
    for _ in range(8):
        with suppress(BatchMissing):
            batch = consumer.next_batch()
            found += batch.entries
            consumer.ack(batch)
    assert found == [b"0", b"2"]
    with pytest.raises(BatchMissing, match=f"batch 0 at '{NAMES[1]}"):
        consumer.next_batch()
    consumer.skip(NAMES[1], 0)
    assert drained(consumer) == [b"1"]
    assert fixture.queued(1) == 0
    with pytest.raises(InvalidInput, match=f"this consumer reads {', '.join(NAMES[:3])}"):
        consumer.skip("p-00007-0mn4", 0)


def test_a_partition_that_does_not_answer_is_an_error_after_the_others_are_read() -> None:
    fixture = TopicFixture(3)
    consumer = fixture.consumer()
    fixture.append(0, b"0")
    fixture.append(2, b"2")
    fixture.store.fail("get", f"{NAMES[1]}/manifest", TransientStorageError(f"no {NAMES[1]}"))
    assert [consumer.next_batch().entries for _ in range(2)] == [[b"0"], [b"2"]]
    with pytest.raises(TransientStorageError, match=NAMES[1]):
        consumer.next_batch()
    fixture.store.heal()
    fixture.append(1, b"1")
    assert drained(consumer) == [b"1"]


def test_iteration_stops_when_the_consumer_is_closed() -> None:
    fixture = TopicFixture(2)
    fixture.append(0, b"a")
    with fixture.consumer() as consumer:
        ack = partial(consumer.ack, consumer.next_batch())
    consumer.close()
    for call in (consumer.next_batch, consumer.next_arrow_batch, consumer.flush, ack):
        with pytest.raises(Closed):
            call()


def test_a_position_of_another_topic_is_refused_and_all_consumers_are_closed() -> None:
    fixture = TopicFixture(2)
    with pytest.raises(QueueReset):
        fixture.consumer({NAMES[1]: '{"queue":"01J5T4R3KXBMZ7QV9N2WG8Y000","sequence":0}'})
    with pytest.raises(InvalidInput, match="position is"):
        fixture.consumer({NAMES[1]: "41:"})
    with pytest.raises(InvalidInput, match="topic create"):
        TopicConsumer(consuming(), store=MemoryStore())


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_partition_that_was_sealed_but_not_removed_is_removed(begun: str) -> None:
    """A consumer may be killed between sealing the partition and removing it."""
    fixture = TopicFixture(2)
    consumer = fixture.consumer()
    fixture.topic.drain(NAMES[1])
    assert seal_partition(fixture.topic, NAMES[1])
    if begun == "after":
        consumer = fixture.consumer()
    fixture.runtime.advance(100)
    assert drained(consumer) == []
    assert fixture.topic.read().names == [NAMES[0]]
    assert consumer.partitions == [NAMES[0]]


FINAL_MESSAGE = [(b"writer", 2, ACK_TXN | FINAL)]
ROLLED_BACK = [(b"other!", 2, CONTINUE_TXN), (b"other!", 1, ACK_TXN | FINAL)]


def read_and_saved(fixture: TopicFixture, later: list[tuple[bytes, int, int]]) -> TopicConsumer:
    """Return a consumer that has read one batch and later messages, and save its position."""
    fixture.append(0, b"first", message=(b"writer", 1, OUTSIDE_TXN))
    consumer = fixture.consumer()
    batch = consumer.next_batch()
    fixture.saved = {batch.partition: str(consumer.position_of(batch))}
    for message in later:
        fixture.append(0, message=message)
    assert consumer.next_batch() is None
    consumer.ack(batch)
    return consumer


@pytest.mark.parametrize("later", [FINAL_MESSAGE, ROLLED_BACK])
def test_entries_without_records_after_a_saved_position_are_not_a_loss_after_a_restart(
    later: list[tuple[bytes, int, int]],
) -> None:
    fixture = TopicFixture(1)
    consumer = read_and_saved(fixture, later)
    consumer.flush()
    consumer.close()
    again = fixture.consumer(fixture.saved)
    assert drained(again) == []
    fixture.append(0, b"next")
    assert drained(again) == [b"next"]
    again.close()
    assert fixture.queued(0) == 0


@pytest.mark.parametrize("later", [FINAL_MESSAGE, ROLLED_BACK])
@pytest.mark.parametrize("next_records", [[], [b"next"]], ids=["nothing", "one batch"])
def test_a_first_start_does_not_dequeue_batches_that_a_new_saved_position_needs(
    later: list[tuple[bytes, int, int]], next_records: list[bytes]
) -> None:
    fixture = TopicFixture(1)
    loaded = dict(fixture.saved)  # by a program that is suspended before it opens its consumer
    first = read_and_saved(fixture, later)
    for record in next_records:
        fixture.append(0, record)
    with fixture.consumer(loaded) as late:
        delivered = late.next_batch()
        assert ([] if delivered is None else delivered.entries) == next_records
        late.flush()
        # It acknowledges nothing, because its database shows that another instance started later.
    with pytest.raises(Fenced):
        first.next_batch()
    again = fixture.consumer(fixture.saved)
    assert drained(again) == next_records
    fixture.append(0, b"last")
    assert drained(again) == [b"last"]
    assert fixture.queued(0) == 0


@pytest.mark.parametrize("later", [FINAL_MESSAGE, ROLLED_BACK])
def test_a_caller_that_saves_no_positions_empties_the_queue(
    later: list[tuple[bytes, int, int]],
) -> None:
    fixture = TopicFixture(1)
    fixture.append(0, b"first", message=(b"writer", 1, OUTSIDE_TXN))
    consumer = fixture.consumer()
    assert drained(consumer) == [b"first"]
    for message in later:
        fixture.append(0, message=message)
    assert consumer.next_batch() is None
    assert fixture.queued(0) == len(later)
    consumer.flush()
    assert fixture.queued(0) == 0


def test_a_partition_that_was_emptied_for_sealing_is_removed_when_its_reader_restarts() -> None:
    fixture = TopicFixture(2)
    consumer = read_and_saved(fixture, FINAL_MESSAGE)
    fixture.topic.drain(NAMES[0])
    consumer._readers[NAMES[0]].flush_all()
    with pytest.raises(DataLoss):
        fixture.consumer(fixture.saved)
    fixture.runtime.advance(100)
    assert drained(fixture.consumer(fixture.saved)) == []
    assert fixture.topic.read().names == [NAMES[1]]


def test_a_loss_after_a_position_that_needs_sequence_0_is_an_error() -> None:
    """A consumer cannot be opened after an entry before the first, so no other check finds this."""
    fixture = TopicFixture(1)
    fixture.append(0, b"undecided", message=(b"writer", 2, CONTINUE_TXN))
    fixture.append(0, b"other")
    consumer = fixture.consumer()
    batch = consumer.next_batch()
    saved = {batch.partition: str(consumer.position_of(batch))}
    consumer.ack(batch)
    consumer.close()
    assert drained(fixture.consumer(saved)) == []
    careless = fixture.consumer(isolation="read_uncommitted")
    assert drained(careless) == [b"undecided", b"other"]
    with pytest.raises(DataLoss, match=r"sequence 0 is needed but .* starts at 2"):
        fixture.consumer(saved)
    fixture.append(0, b"next")
    assert drained(fixture.consumer(saved, allow_data_loss=True)) == [b"next"]


@pytest.mark.parametrize(
    ("owner", "method"),
    [(TransactionalDelivery, "_offer"), (OwnedQueue, "acknowledge")],
    ids=["looking", "acknowledging"],
)
def test_an_interrupt_between_two_steps_loses_no_batch(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    fixture = TopicFixture(1)
    fixture.append(0, b"1")
    consumer = fixture.consumer()
    first = consumer.next_batch()
    fixture.append(0, b"2")
    inner = getattr(owner, method)

    def interrupted(self: object, *arguments: Any, **options: Any) -> None:
        inner(self, *arguments, **options)
        raise KeyboardInterrupt  # before its caller has noted the result

    def go_on() -> None:
        consumer.ack(first)
        consumer.next_batch()

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            go_on()
    fixture.append(0, b"3")
    for going_on in (consumer.next_batch, lambda: consumer.ack(first), consumer.flush):
        with pytest.raises(Closed, match=r"was interrupted .* make a new one"):
            going_on()
    consumer.close()
    with fixture.consumer() as after:
        assert drained(after) == [b"2", b"3"]
    assert fixture.queued(0) == 0


def test_round_robin_takes_one_batch_per_partition_and_starts_after_the_last_one() -> None:
    waiting = {"a": "a" * 100, "b": "bb", "c": "", "d": "d"}
    for last, order in (("a", "bdabaaaa"), ("d", "abdabaaa"), ("gone", "abdabaaa")):
        found = round_robin(waiting, last, 8)
        assert found == [(each, each) for each in order]
    assert round_robin({}, None, 9) == []
