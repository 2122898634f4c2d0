"""Reading a topic: several partitions in one process."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.consumer.consumer import Consumer
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
from opendata_buffer.messages import (
    ACK_TXN,
    CONTINUE_TXN,
    FINAL,
    OUTSIDE_TXN,
    build_uuid,
)
from opendata_buffer.queue.consumer_info import read_consumer_info
from opendata_buffer.stores.base import Blob, NotModified
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.consumer import (
    MAX_PREFETCH,
    TopicArrowBatch,
    TopicBatch,
    TopicConsumer,
    round_robin,
)
from opendata_buffer.topic.description import name_of
from opendata_buffer.topic.topic import Topic
from tests.unit.broker.local import Overtaken
from tests.unit.topic.world import URL, append, consuming, manifest_of


class Store(MemoryStore):
    """Some keys cannot be read."""

    silent: str = ""

    def get(self, key: str, **options: Any) -> Blob | NotModified:
        if self.silent and key.startswith(self.silent):
            raise TransientStorageError(f"no answer for {key}")
        return super().get(key, **options)


class World:
    def __init__(self, partitions: int) -> None:
        self.runtime = ManualRuntime()
        self.store = Store(now_ms=self.runtime.now_ms)
        self.topic = Topic.create(URL, partitions, store=self.store, runtime=self.runtime)
        self.saved: dict[str, str] = {}

    def append(self, number: int, *records: bytes, message: Any = None) -> str:
        name = name_of(number, number)
        identity = None if message is None else build_uuid(*message)
        return append(self.store, self.runtime, name, *records, message=identity)

    def consumer(self, positions: Any = None, **settings: Any) -> TopicConsumer:
        settings = {"refresh_s": 0.0} | settings
        return TopicConsumer(
            consuming(ack_interval=1, cas_deadline_ms=100),
            positions,
            store=self.store,
            runtime=self.runtime,
            **settings,
        )

    def queued(self, number: int) -> int:
        return manifest_of(self.store, name_of(number, number)).entry_count


def drained(consumer: TopicConsumer, *, ack: bool = True) -> list[bytes]:
    found: list[bytes] = []
    while (batch := consumer.next_batch()) is not None:
        found += batch.entries
        if ack:
            consumer.ack(batch)
    return found


def test_all_partitions_are_read_each_in_its_order() -> None:
    world = World(3)
    for number in range(30):
        world.append(number % 3, b"%d" % number)
    consumer = world.consumer()
    assert consumer.partitions == ["p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"]
    found = drained(consumer)
    for number in range(3):
        assert [int(each) for each in found if int(each) % 3 == number] == list(
            range(number, 30, 3)
        )
    assert len(found) == 30
    assert [world.queued(number) for number in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_flush_and_close_write_out_what_was_acknowledged_and_no_more(end: str) -> None:
    world = World(2)
    for number in range(6):
        world.append(number % 2, b"%d" % number)
    with TopicConsumer(consuming(), store=world.store, runtime=world.runtime) as consumer:
        for _ in range(5):
            batch = consumer.next_batch()
            assert batch is not None
            consumer.ack(batch)
        assert [world.queued(number) for number in range(2)] == [3, 3]
        getattr(consumer, end)()
        assert sorted(world.queued(number) for number in range(2)) == [0, 1]


def test_arrow_batches_are_the_same_batches_without_an_object_for_each_record() -> None:
    world = World(2)
    for number in range(2):
        world.append(number, b"%d" % number, b"", message=(b"writer", 1, CONTINUE_TXN))
        world.append(number, message=(b"writer", 2, ACK_TXN))
    world.append(0, b"undecided", message=(b"absent", 1, CONTINUE_TXN))
    consumer = world.consumer(program="a test")
    found = {}
    while (batch := consumer.next_arrow_batch()) is not None:
        found[batch.partition] = batch.values.to_pylist()
        consumer.ack(batch)
    assert found == {"p-00000-04pn": [b"0", b""], "p-00001-05mv": [b"1", b""]}
    # Of each what is undecided stays, and the acknowledgement that releases nothing more goes.
    assert [world.queued(number) for number in range(2)] == [1, 0]
    holder = read_consumer_info(
        world.store, Topic.config_of("p-00000-04pn", consuming()), world.runtime
    )
    assert holder is not None
    assert holder.program == "a test"


def test_both_forms_of_batches_may_be_taken_alternately() -> None:
    world = World(2)
    for number in range(20):
        world.append(number % 2, b"%d" % number)
    consumer = world.consumer()
    found: list[bytes] = []
    for number in range(20):
        batch: Any = consumer.next_arrow_batch() if number % 3 else consumer.next_batch()
        assert batch is not None
        found += batch.values.to_pylist() if number % 3 else batch.entries
        consumer.ack(batch)
    assert found == [b"%d" % number for number in range(20)]
    assert consumer.next_batch() is None
    assert consumer.next_arrow_batch() is None


def test_an_arrow_batch_that_cannot_be_read_is_an_error_and_may_be_skipped() -> None:
    world = World(1)
    world.store.put(world.append(0, b"a"), b"no batch")
    world.append(0, b"b")
    consumer = world.consumer()
    with pytest.raises(BatchUnreadable):
        consumer.next_arrow_batch()
    consumer.skip("p-00000-04pn", 0)
    batch = consumer.next_arrow_batch()
    assert batch is not None
    assert batch.values.to_pylist() == [b"b"]


def test_a_backlog_in_one_partition_does_not_starve_the_others() -> None:
    world = World(3)
    for _ in range(2 * MAX_PREFETCH):
        world.append(0, b"much")
    consumer = world.consumer()
    taken = [consumer.next_batch() for _ in range(MAX_PREFETCH // 2)]
    assert all(batch is not None and batch.partition == "p-00000-04pn" for batch in taken)
    world.append(1, b"one")
    world.append(2, b"two")
    following = [consumer.next_batch() for _ in range(MAX_PREFETCH // 2 + 2)]
    names = {batch.partition for batch in following if batch is not None}
    assert names == {"p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"}


def test_partitions_with_equal_backlogs_are_read_equally_often() -> None:
    world = World(4)
    for number in range(4):
        for _ in range(MAX_PREFETCH):
            world.append(number, b"x")
    consumer = world.consumer()
    for rounds in range(1, 11):
        delivered: Counter[str] = Counter()
        for _ in range(4 * rounds):
            batch = consumer.next_batch()
            assert batch is not None
            delivered[batch.partition] += 1
        assert len(delivered) == 4
        assert max(delivered.values()) - min(delivered.values()) <= 1


def test_a_position_saved_with_each_batch_resumes_exactly_behind_it() -> None:
    world = World(3)
    for number in range(30):
        world.append(number % 3, b"%d" % number)
    saved: dict[str, str] = {}
    found: list[bytes] = []
    for _ in range(40):
        # Nothing is acknowledged: the target alone knows, as after a crash.
        consumer = world.consumer(dict(saved))
        batch = consumer.next_batch()
        if batch is None:
            break
        found += batch.entries
        saved[batch.partition] = str(consumer.position_of(batch))
        consumer.close()
    assert sorted(map(int, found)) == list(range(30))
    assert set(saved) == {"p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"}


def test_a_transaction_over_partitions_is_delivered_when_it_is_committed() -> None:
    world = World(2)
    me = b"\x07" * 6
    world.append(0, b"t0", message=(me, 2, CONTINUE_TXN))
    world.append(1, b"t1", message=(me, 2, CONTINUE_TXN))
    world.append(0, b"plain")
    consumer = world.consumer()
    assert drained(consumer) == [b"plain"]
    assert [world.queued(0), world.queued(1)] == [2, 1]
    again = world.consumer({name: str(each) for name, each in consumer.positions.items()})
    assert drained(again) == []
    for number in (0, 1):
        world.append(number, message=(me, 3, ACK_TXN))
    assert sorted(drained(again)) == [b"t0", b"t1"]
    assert [world.queued(0), world.queued(1)] == [0, 0]


def test_read_uncommitted_shows_everything() -> None:
    world = World(1)
    world.append(0, b"t0", message=(b"\x07" * 6, 2, CONTINUE_TXN))
    assert drained(world.consumer(isolation="read_uncommitted")) == [b"t0"]
    with pytest.raises(InvalidInput, match="isolation is 'serializable'"):
        world.consumer(isolation="serializable")


def test_processes_share_a_topic_by_static_assignment() -> None:
    world = World(3)
    for number in range(9):
        world.append(number % 3, b"%d" % number)
    one = world.consumer(partitions=["p-00000-04pn", "p-00002-0bvb"])
    two = world.consumer(partitions=["1"])
    world.topic.expand(4)
    assert sorted(drained(one)) == [b"0", b"2", b"3", b"5", b"6", b"8"]
    assert sorted(drained(two)) == [b"1", b"4", b"7"]
    assert one.partitions == ["p-00000-04pn", "p-00002-0bvb"]
    with pytest.raises(InvalidInput, match="'p-00009-04v2': the topic has p-00000-04pn"):
        world.consumer(partitions=["p-00009-04v2"])
    for wrong in ([], "p-00000-04pn"):
        with pytest.raises(InvalidInput, match="give a list of names"):
            world.consumer(partitions=wrong)


def test_added_partitions_are_read() -> None:
    world = World(1)
    consumer = world.consumer()
    assert drained(consumer) == []
    world.topic.expand(3)
    world.append(2, b"new")
    assert drained(consumer) == [b"new"]
    assert consumer.partitions == ["p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"]


def test_a_drained_partition_leaves_once_it_is_read() -> None:
    world = World(2)
    world.append(1, b"last")
    consumer = world.consumer()
    world.topic.drain("p-00001-05mv")
    world.runtime.advance(3_600)
    batch = consumer.next_batch()
    assert batch is not None
    assert consumer.next_batch() is None
    assert consumer.partitions == [
        "p-00000-04pn",
        "p-00001-05mv",
    ]  # its last batch is not processed
    consumer.ack(batch)
    assert consumer.next_batch() is None
    assert consumer.partitions == ["p-00000-04pn"]
    assert world.topic.read().names == ["p-00000-04pn"]
    world.append(0, b"more")
    assert drained(consumer) == [b"more"]
    assert list(consumer.positions) == ["p-00000-04pn"]
    assert drained(world.consumer({"p-00001-05mv": '{"queue":"","sequence":0}'})) == []


def test_a_partition_that_drains_is_kept_for_producers_that_do_not_know_yet() -> None:
    world = World(2)
    consumer = world.consumer()
    world.topic.drain("p-00001-05mv")
    world.runtime.advance(10)
    assert drained(consumer) == []
    world.append(1, b"late")
    assert drained(consumer) == [b"late"]


def test_a_partition_that_another_process_removed_is_no_error() -> None:
    world = World(2)
    consumer = world.consumer(refresh_s=1e9)
    world.topic.drain("p-00001-05mv")
    world.topic.remove_drained(0)
    assert drained(consumer) == []
    assert consumer.partitions == ["p-00000-04pn"]
    consumer.close()


def test_f25_a_bad_batch_does_not_keep_the_others_from_being_read() -> None:
    world = World(3)
    world.store.delete_many([world.append(1, b"bad")])
    for number in (0, 1, 2):
        world.append(number, b"%d" % number)
    consumer = world.consumer()
    found: list[bytes] = []
    errors = []
    for _ in range(8):
        try:
            batch = consumer.next_batch()
        except BatchMissing as error:
            errors.append(error.sequence)
            continue
        if batch is not None:
            found += batch.entries
            consumer.ack(batch)
    assert sorted(found) == [b"0", b"2"]
    assert errors == [0] * 6
    consumer.skip("p-00001-05mv", 0)
    assert drained(consumer) == [b"1"]
    assert world.queued(1) == 0
    with pytest.raises(
        InvalidInput, match="this consumer reads p-00000-04pn, p-00001-05mv, p-00002-0bvb"
    ):
        consumer.skip("p-00007-0mn4", 0)


def test_a_partition_that_does_not_answer_is_an_error_after_the_others_are_read() -> None:
    world = World(3)
    consumer = world.consumer()
    world.append(0, b"0")
    world.append(2, b"2")
    world.store.silent = "p-00001-05mv/manifest"
    found = []
    for _ in range(2):
        batch = consumer.next_batch()
        assert batch is not None
        found += batch.entries
        consumer.ack(batch)
    assert sorted(found) == [b"0", b"2"]
    with pytest.raises(TransientStorageError, match="p-00001-05mv"):
        consumer.next_batch()
    world.store.silent = ""
    world.append(1, b"1")
    assert drained(consumer) == [b"1"]


def test_each_partition_is_fenced_for_itself() -> None:
    world = World(2)
    first = world.consumer()
    world.append(0, b"0")
    world.append(1, b"1")
    other = world.consumer(partitions=["p-00001-05mv"])
    batch = first.next_batch()
    assert batch is not None
    assert batch.partition == "p-00000-04pn"
    first.ack(batch)
    with pytest.raises(Fenced):
        first.next_batch()
    assert drained(other) == [b"1"]


def test_a_consumer_goes_on_after_an_acknowledgement_that_is_refused() -> None:
    world = World(1)
    world.append(0, b"a")
    world.append(0, b"b")
    consumer = world.consumer()
    one, two = consumer.next_batch(), consumer.next_batch()
    assert one is not None
    assert two is not None
    with pytest.raises(InvalidInput, match="0 comes first"):
        consumer.ack(two)
    consumer.ack(one)
    consumer.ack(two)
    assert world.queued(0) == 0


def test_it_stops_when_it_is_closed() -> None:
    world = World(2)
    world.append(0, b"a")
    with world.consumer() as consumer:
        batch = consumer.next_batch()
    consumer.close()
    assert isinstance(batch, TopicBatch)
    for call in (
        consumer.next_batch,
        consumer.next_arrow_batch,
        consumer.flush,
        lambda: consumer.ack(batch),
    ):
        with pytest.raises(Closed):
            call()


def test_a_position_of_another_topic_is_refused_and_nothing_stays_open() -> None:
    world = World(2)
    with pytest.raises(QueueReset):
        world.consumer({"p-00001-05mv": '{"queue":"01J5T4R3KXBMZ7QV9N2WG8Y000","sequence":0}'})
    with pytest.raises(InvalidInput, match="position is"):
        world.consumer({"p-00001-05mv": "41"})
    with pytest.raises(InvalidInput, match="topic create"):
        TopicConsumer(consuming(), store=MemoryStore())


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_partition_that_was_sealed_and_not_removed_leaves(begun: str) -> None:
    """A consumer may be killed after it sealed the partition and before it removed it."""
    world = World(2)
    consumer = world.consumer()
    world.topic.drain("p-00001-05mv")
    assert world.topic.seal("p-00001-05mv")
    if begun == "after":
        consumer = world.consumer()
    world.runtime.advance(100)
    assert drained(consumer) == []
    assert world.topic.read().names == ["p-00000-04pn"]
    assert consumer.partitions == ["p-00000-04pn"]


def test_a_partition_whose_consumer_loses_a_race_looks_for_its_broker() -> None:
    store, runtime = Overtaken(), ManualRuntime()
    Topic.create(URL, 2, store=store, runtime=runtime)
    config = Topic.config_of(name_of(1, 1), consuming())
    store.announce(config)
    store.overtaken_at = config.manifest_path
    with TopicConsumer(
        consuming(), store=store, runtime=runtime, open_pause=store.open_pause
    ) as consumer:
        assert consumer.next_batch() is None
    assert store.overtaken_at == ""
    assert store.asked == ["somewhere:1"]


FINAL_MESSAGE = [(b"writer", 2, ACK_TXN | FINAL)]
ROLLED_BACK = [(b"other!", 2, CONTINUE_TXN), (b"other!", 1, ACK_TXN | FINAL)]


def read_and_saved(world: World, behind: list[tuple[bytes, int, int]]) -> TopicConsumer:
    """A consumer of one batch, that has seen what came behind it, and the position it saved."""
    world.append(0, b"first", message=(b"writer", 1, OUTSIDE_TXN))
    consumer = world.consumer()
    batch = consumer.next_batch()
    assert batch is not None
    world.saved = {batch.partition: str(consumer.position_of(batch))}
    for message in behind:
        world.append(0, message=message)
    assert consumer.next_batch() is None
    consumer.ack(batch)
    return consumer


@pytest.mark.parametrize("behind", [FINAL_MESSAGE, ROLLED_BACK])
def test_what_delivers_nothing_behind_a_saved_position_is_no_loss_after_a_restart(
    behind: list[tuple[bytes, int, int]],
) -> None:
    world = World(1)
    consumer = read_and_saved(world, behind)
    consumer.flush()
    consumer.close()
    again = world.consumer(world.saved)
    assert drained(again) == []
    world.append(0, b"next")
    assert drained(again) == [b"next"]
    again.close()
    assert world.queued(0) == 0


@pytest.mark.parametrize("behind", [FINAL_MESSAGE, ROLLED_BACK])
def test_where_no_position_is_saved_nothing_is_left_in_the_queue(
    behind: list[tuple[bytes, int, int]],
) -> None:
    world = World(1)
    world.append(0, b"first", message=(b"writer", 1, OUTSIDE_TXN))
    for message in behind:
        world.append(0, message=message)
    with world.consumer() as consumer:
        assert drained(consumer) == [b"first"]
    assert world.queued(0) == 0


def test_a_drained_partition_leaves_also_with_what_delivers_nothing_at_its_end() -> None:
    world = World(2)
    consumer = read_and_saved(world, ROLLED_BACK)
    world.topic.drain("p-00000-04pn")
    assert drained(consumer) == []
    assert world.queued(0) == 2
    world.runtime.advance(100)
    assert drained(consumer) == []
    assert world.topic.read().names == ["p-00001-05mv"]


def test_a_partition_that_was_emptied_to_be_sealed_leaves_when_its_reader_restarts() -> None:
    world = World(2)
    consumer = read_and_saved(world, FINAL_MESSAGE)
    world.topic.drain("p-00000-04pn")
    consumer._readers["p-00000-04pn"].flush_all()
    with pytest.raises(DataLoss):
        world.consumer(world.saved)
    world.runtime.advance(100)
    assert drained(world.consumer(world.saved)) == []
    assert world.topic.read().names == ["p-00001-05mv"]


def test_a_loss_behind_a_position_that_needs_sequence_0_is_an_error() -> None:
    """A consumer cannot be opened behind an entry before the first, so nothing else tells it."""
    world = World(1)
    world.append(0, b"undecided", message=(b"writer", 2, CONTINUE_TXN))
    world.append(0, b"other")
    consumer = world.consumer()
    batch = consumer.next_batch()
    assert batch is not None
    saved = {batch.partition: str(consumer.position_of(batch))}
    consumer.ack(batch)
    consumer.close()
    assert drained(world.consumer(saved)) == []
    careless = world.consumer(isolation="read_uncommitted")
    assert drained(careless) == [b"undecided", b"other"]
    with pytest.raises(DataLoss, match=r"sequence 0 is needed but .* starts at 2"):
        world.consumer(saved)
    world.append(0, b"next")
    assert drained(world.consumer(saved, allow_data_loss=True)) == [b"next"]


@pytest.mark.parametrize(
    "window", ["next_descriptors", "ack_through"], ids=["looking", "acknowledging"]
)
def test_an_interrupt_between_two_steps_loses_no_batch(
    monkeypatch: pytest.MonkeyPatch, window: str
) -> None:
    world = World(1)
    world.append(0, b"1")
    consumer = world.consumer()
    first = consumer.next_batch()
    assert first is not None
    world.append(0, b"2")
    inner = getattr(Consumer, window)

    def interrupted(self: Consumer, *arguments: Any) -> None:
        inner(self, *arguments)
        raise KeyboardInterrupt  # before its caller has noted what it returned

    def go_on() -> None:
        consumer.ack(first)
        consumer.next_batch()

    with monkeypatch.context() as patched:
        patched.setattr(Consumer, window, interrupted)
        with pytest.raises(KeyboardInterrupt):
            go_on()
    world.append(0, b"3")
    for going_on in (consumer.next_batch, lambda: consumer.ack(first), consumer.flush):
        with pytest.raises(Closed, match=r"was interrupted .* make a new one"):
            going_on()
    consumer.close()
    with world.consumer() as after:
        assert drained(after) == [b"2", b"3"]
    assert world.queued(0) == 0


def test_round_robin_takes_one_of_each_partition() -> None:
    waiting = {"a": "a" * 100, "b": "bb", "c": "", "d": "d"}
    found = "".join(item for _, item in round_robin(waiting, None, 8))
    assert found == "abdabaaa"


def test_round_robin_begins_behind_the_last_partition() -> None:
    waiting = {"a": "aa", "b": "bb", "c": "cc"}
    for last, order in (("a", "bca"), ("c", "abc"), ("gone", "abc"), (None, "abc")):
        assert "".join(item for _, item in round_robin(waiting, last, 3)) == order


def test_round_robin_returns_partitions_with_their_items() -> None:
    assert round_robin({"a": [1], "b": [2]}, None, 9) == [("a", 1), ("b", 2)]
    assert round_robin({}, None, 9) == []


def test_an_arrow_batch_of_a_partition_is_one_of_a_queue_that_names_its_partition() -> None:
    values = pa.array([b'{"a": 1}', b'{"a": 2}'], pa.binary())
    batch = TopicArrowBatch(values, 7, "p-00000-04pn/x.batch", (), partition="p-00000-04pn")
    assert batch.nbytes == values.nbytes
    table = batch.to_table(pa.schema([("_sequence", pa.int64()), ("a", pa.int64())]))
    assert table.to_pylist() == [{"_sequence": 7, "a": 1}, {"_sequence": 7, "a": 2}]
    assert pickle.loads(pickle.dumps(batch)) == batch
