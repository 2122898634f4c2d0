"""The progress in one partition: offers, acknowledgements, and saved positions."""

from __future__ import annotations

import random
from typing import Any

import pytest

from opendata_buffer import Consumer
from opendata_buffer.consumer.position import Position, QueueProgress
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.batch import batch_key
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.consumer import PartitionConsumer
from opendata_buffer.topic.topic import partition_config
from tests.unit.topic.in_memory import append, consuming, manifest_of

PREFIX = "p-00000"
RUNTIME = ManualRuntime()
ONE, TWO = b"\x01" * 6, b"\x02" * 6


def plain() -> str:
    return batch_key(PREFIX, RUNTIME.ulid())


def message(producer: bytes, clock: int, flags: int) -> str:
    return batch_key(PREFIX, RUNTIME.ulid(), message=build_uuid(producer, clock, flags))


class Log:
    """The entries of a manifest, and a reader of them."""

    def __init__(self, *locations: str) -> None:
        self.locations = list(locations)
        self.progress = QueueProgress(PREFIX, "read_committed")

    def replay(self, begin: int, end: int) -> list[tuple[int, str]]:
        assert self.progress.first_needed <= begin, "earlier entries may have been dequeued"
        return [(each, self.locations[each]) for each in range(begin, end)]

    def read(self) -> list[int]:
        """Offer all entries, and return the delivered sequences."""
        found: list[int] = []
        for sequence in range(self.progress.next_offer, len(self.locations)):
            found += self.progress.offer(sequence, self.locations[sequence], self.replay)
        return found

    def ack(self, sequence: int) -> None:
        self.progress.ack(sequence, self.replay)

    def restart(self, position: Position | None) -> None:
        """Restart from the text of a position, or at the beginning."""
        saved = None if position is None else Position.parse(str(position))
        self.progress = QueueProgress(PREFIX, "read_committed", 0, saved)


TRANSACTION = [
    plain(),  # 0
    message(ONE, 2, CONTINUE_TXN),  # 1
    plain(),  # 2
    message(ONE, 3, CONTINUE_TXN),  # 3
    message(TWO, 2, OUTSIDE_TXN),  # 4
    message(ONE, 4, ACK_TXN),  # 5
    plain(),  # 6
]


def test_batches_of_a_partition_are_acknowledged_in_the_order_of_their_delivery() -> None:
    log = Log(*TRANSACTION)
    assert log.read() == [0, 2, 4, 1, 3, 6]
    for wrong in (1, 2, 5, 99):
        with pytest.raises(InvalidInput, match=f"cannot ack sequence {wrong} .*: 0 comes first"):
            log.ack(wrong)
    for right in (0, 2, 4, 1, 3, 6):
        log.ack(right)
    with pytest.raises(InvalidInput, match="everything that was delivered is acknowledged"):
        log.ack(6)


def test_entries_that_an_open_transaction_needs_stay_in_the_manifest() -> None:
    log = Log(*TRANSACTION[:5])
    assert log.read() == [0, 2, 4]
    for each in (0, 2, 4):
        log.ack(each)
    assert (log.progress.first_needed, log.progress.idle) == (1, False)
    log.locations += TRANSACTION[5:]
    assert log.read() == [1, 3, 6]
    assert log.progress.first_needed == 1
    log.ack(1)
    assert log.progress.first_needed == 1  # 3 is not processed yet
    log.ack(3)
    assert log.progress.first_needed == 6
    log.ack(6)
    assert (log.progress.first_needed, log.progress.idle) == (7, True)


def test_entries_that_are_never_delivered_need_no_acknowledgement() -> None:
    log = Log(message(ONE, 2, CONTINUE_TXN), message(ONE, 1, ACK_TXN), message(ONE, 9, ACK_TXN))
    assert log.read() == []
    assert (log.progress.first_needed, log.progress.idle) == (3, True)


def test_the_position_of_a_batch_is_the_one_after_its_acknowledgement() -> None:
    log = Log(*TRANSACTION)
    assert log.progress.position("id") is None
    delivered = log.read()
    for sequence in delivered:
        announced = log.progress.position_after(sequence, "id", log.replay)
        log.ack(sequence)
        assert announced == log.progress.position("id")
    with pytest.raises(InvalidInput, match="was not delivered"):
        log.progress.position_after(6, "id", log.replay)


def random_log(seed: int) -> Log:
    """Return random plain batches, messages, duplicates, and transactions with any outcome."""
    draw = random.Random(seed)
    clocks = dict.fromkeys((ONE, TWO, b"\x03" * 6), 1)
    locations: list[str] = []
    for _ in range(60):
        producer = draw.choice(list(clocks))
        clocks[producer] += 1
        flags = draw.choice([None, *[CONTINUE_TXN] * 3, ACK_TXN, OUTSIDE_TXN])
        late = {ACK_TXN: draw.choice([0, 0, 2]), OUTSIDE_TXN: draw.randrange(3)}.get(flags, 0)
        clock = max(1, clocks[producer] - late)
        locations.append(plain() if flags is None else message(producer, clock, flags))
    return Log(*locations)


@pytest.mark.parametrize("seed", range(20))
def test_restarts_at_any_point_deliver_each_batch_once_and_in_the_same_order(seed: int) -> None:
    log = random_log(seed)
    undisturbed = log.read()
    assert undisturbed
    log.restart(None)
    draw = random.Random(seed + 1000)
    everything, log.locations = log.locations, []
    found: list[int] = []
    waiting: list[int] = []
    saved: Position | None = None
    restarts = 0
    while True:
        match draw.randrange(4):
            case 0 if len(log.locations) < len(everything):
                log.locations = everything[: len(log.locations) + draw.randrange(1, 9)]
            case 1:
                waiting += log.read()
            case 2 if waiting:
                found.append(waiting.pop(0))
                saved = log.progress.position_after(found[-1], "id", log.replay)
                log.ack(found[-1])
            case 3 if draw.random() < 0.2:
                # Restart from the position of the last batch or a later one.
                saved = saved if draw.random() < 0.5 else log.progress.position("id")
                log.restart(saved)
                waiting = []
                restarts += 1
        if len(log.locations) == len(everything) and found == undisturbed:
            break
        assert found == undisturbed[: len(found)]
        last = None if saved is None else Position.parse(str(saved))
        needed = QueueProgress(PREFIX, "read_committed", 0, last).first_needed
        assert log.progress.kept_from <= needed, "entries that a saved position needs were dequeued"
        assert log.progress.kept_from <= log.progress.first_needed
    assert restarts


class PartitionFixture:
    def __init__(self, *records: bytes) -> None:
        self.runtime = ManualRuntime()
        self.store = MemoryStore(now_ms=self.runtime.now_ms)
        for record in records:
            append(self.store, self.runtime, PREFIX, record)

    def manifest(self) -> Manifest:
        return manifest_of(self.store, PREFIX)

    def reader(
        self, position: Any = None, *, allow_data_loss: bool = False, **settings: Any
    ) -> PartitionConsumer:
        config = partition_config(PREFIX, consuming(**settings))
        reader = PartitionConsumer(
            config, position, isolation="read_committed", allow_data_loss=allow_data_loss,
            store=self.store, runtime=self.runtime,
        )  # fmt: skip
        reader.poll()
        return reader


def taken(reader: PartitionConsumer) -> list[bytes]:
    found: list[bytes] = []
    while reader.ready:
        found += reader.own_fetch_handle.fetch(reader.ready.popleft()).entries
    return found


def test_f28_reading_continues_after_a_gap_if_data_loss_is_allowed() -> None:
    fixture = PartitionFixture()
    reader = fixture.reader(allow_data_loss=True)
    for number in range(4):
        append(fixture.store, fixture.runtime, PREFIX, b"%d" % number)
    config = partition_config(PREFIX, consuming())
    queue = Queue(fixture.store, config, runtime=fixture.runtime, role="test")
    queue.dequeue(1, fixture.manifest().epoch)
    reader.poll()
    assert taken(reader) == [b"2", b"3"]
    saved = reader.position_of(2)
    reader.ack(2)
    assert reader.position == saved
    assert saved == Position(saved.queue_id, 2), "the position in a plain queue is a number"
    assert taken(fixture.reader(saved)) == [b"3"]


def test_f28_an_error_about_a_gap_names_the_transactions_that_are_open_there() -> None:
    fixture = PartitionFixture(b"plain")
    append(
        fixture.store, fixture.runtime, PREFIX, b"open", message=build_uuid(ONE, 2, CONTINUE_TXN)
    )
    reader = fixture.reader()
    assert taken(reader) == [b"plain"]
    append(fixture.store, fixture.runtime, PREFIX, b"lost")
    append(fixture.store, fixture.runtime, PREFIX, b"after")
    config = partition_config(PREFIX, consuming())
    queue = Queue(fixture.store, config, runtime=fixture.runtime, role="test")
    queue.dequeue(2, fixture.manifest().epoch)
    with pytest.raises(DataLoss, match="Transactions from sequence 1 on were still open") as lost:
        reader.poll()
    assert (lost.value.needed, lost.value.oldest, lost.value.open_from) == (2, 3, 1)


def test_a_skipped_batch_is_not_delivered() -> None:
    fixture = PartitionFixture(b"a", b"b", b"c")
    fixture.store.delete_many([fixture.manifest().entries()[1].location])
    reader = fixture.reader()
    reader.skip(1)
    assert taken(reader) == [b"a", b"c"]
    reader.ack(0)
    with pytest.raises(InvalidInput, match="was not delivered"):
        reader.skip(1)
    reader.ack(2)
    reader.flush()
    assert fixture.manifest().entry_count == 0


def test_f4_a_position_of_another_queue_is_refused() -> None:
    fixture = PartitionFixture()
    append(fixture.store, fixture.runtime, PREFIX, b"t", message=build_uuid(ONE, 2, CONTINUE_TXN))
    append(fixture.store, fixture.runtime, PREFIX, b"a")
    reader = fixture.reader()
    reader.ack(1)
    own: Any = reader.position
    for position in (
        Position("01J5T4R3KXBMZ7QV9N2WG8Y000", 1, 0, own.transactions),
        Position("01J5T4R3KXBMZ7QV9N2WG8Y000", 1),
    ):
        with pytest.raises(QueueReset):
            fixture.reader(position)
    with pytest.raises(QueueReset, match="the queue ends at 1"):
        fixture.reader(Position(own.queue_id, 7, 0, own.transactions))


def test_the_consumer_of_a_queue_delivers_committed_transactions() -> None:
    fixture = PartitionFixture()
    for clock, (record, flags) in enumerate(
        [(b"t1", CONTINUE_TXN), (b"plain", None), (b"t2", CONTINUE_TXN), (b"", ACK_TXN)], 2
    ):
        message = None if flags is None else build_uuid(ONE, clock, flags)
        append(fixture.store, fixture.runtime, PREFIX, record, message=message)
    append(
        fixture.store, fixture.runtime, PREFIX, b"open", message=build_uuid(TWO, 2, CONTINUE_TXN)
    )
    config = partition_config(PREFIX, consuming())
    saved = None
    for expected in (b"plain", b"t1", b"t2"):  # each by another consumer
        with Consumer(
            config, saved, isolation="read_committed", store=fixture.store, runtime=fixture.runtime
        ) as consumer:
            batch = consumer.next_batch()
            assert batch is not None
            assert batch.entries == [expected]
            saved = str(batch.position)
            batch.ack()
            with pytest.raises(InvalidInput, match="ack\\(\\) each"):
                consumer.ack_through(0)
    with Consumer(config, saved, isolation="read_committed", store=fixture.store) as consumer:
        assert consumer.next_batch() is None
    assert fixture.manifest().entry_count == 1  # the open transaction
    with Consumer(config, store=fixture.store) as consumer:
        assert [each.entries for each in iter(consumer.next_batch, None)] == [[b"open"]]
    with pytest.raises(InvalidInput, match="use read_committed or"):
        Consumer(config, isolation="serializable", store=fixture.store)
