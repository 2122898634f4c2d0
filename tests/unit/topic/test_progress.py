"""What is delivered, processed and let go, in one partition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from uuid import UUID

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.messages.message_ids import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.partition_consumer import PartitionPosition, Progress

PREFIX = "p-00000"
RUNTIME = ManualRuntime()
ONE, TWO = b"\x01" * 6, b"\x02" * 6


def plain() -> str:
    return batch_key(PREFIX, RUNTIME.ulid())


def message(producer: bytes, clock: int, flags: int) -> str:
    identity: UUID = build_uuid(producer, clock, flags)
    return batch_key(PREFIX, RUNTIME.ulid(), message=identity)


class Log:
    """The entries of a manifest, and a reader of them."""

    def __init__(self, *locations: str) -> None:
        self.locations = list(locations)
        self.progress = Progress(PREFIX, "read_committed")

    def replay(self, begin: int, end: int) -> Iterator[tuple[int, str]]:
        assert self.progress.floor <= begin, "what lies before the floor may be gone"
        yield from [(each, self.locations[each]) for each in range(begin, end)]

    def read(self) -> list[int]:
        """Offer all there is; what is delivered."""
        found: list[int] = []
        for sequence in range(self.progress.next_offer, len(self.locations)):
            found += self.progress.offer(sequence, self.locations[sequence], self.replay)
        return found

    def ack(self, sequence: int) -> None:
        self.progress.ack(sequence, self.replay)

    def restart(self, position: PartitionPosition | None) -> None:
        """From the saved text, or at the beginning."""
        saved = None if position is None else PartitionPosition.parse(str(position))
        self.progress = Progress(PREFIX, "read_committed", 0, saved)


TRANSACTION = [
    plain(),  # 0
    message(ONE, 2, CONTINUE_TXN),  # 1
    plain(),  # 2
    message(ONE, 3, CONTINUE_TXN),  # 3
    message(TWO, 2, OUTSIDE_TXN),  # 4
    message(ONE, 4, ACK_TXN),  # 5
    plain(),  # 6
]


def test_plain_batches_are_delivered_and_let_go_in_order() -> None:
    log = Log(plain(), plain(), plain())
    assert log.read() == [0, 1, 2]
    assert (log.progress.floor, log.progress.idle) == (0, False)
    log.ack(0)
    assert log.progress.floor == 1
    log.ack(1)
    log.ack(2)
    assert (log.progress.floor, log.progress.idle) == (3, True)


def test_batches_of_a_partition_are_acknowledged_in_the_order_they_were_delivered_in() -> None:
    log = Log(*TRANSACTION)
    assert log.read() == [0, 2, 4, 1, 3, 6]
    for wrong in (1, 2, 5, 99):
        with pytest.raises(InvalidInput, match=f"cannot ack sequence {wrong} .*: 0 comes first"):
            log.ack(wrong)
    for right in (0, 2, 4, 1, 3, 6):
        log.ack(right)
    with pytest.raises(InvalidInput, match="everything that was delivered is acknowledged"):
        log.ack(6)


def test_what_an_open_transaction_needs_stays_in_the_manifest() -> None:
    log = Log(*TRANSACTION[:5])
    assert log.read() == [0, 2, 4]
    for each in (0, 2, 4):
        log.ack(each)
    assert (log.progress.floor, log.progress.idle) == (1, False)
    log.locations += TRANSACTION[5:]
    assert log.read() == [1, 3, 6]
    assert log.progress.floor == 1
    log.ack(1)
    assert log.progress.floor == 1  # 3 is not processed yet
    log.ack(3)
    assert log.progress.floor == 6
    log.ack(6)
    assert (log.progress.floor, log.progress.idle) == (7, True)


def test_what_is_never_delivered_needs_no_acknowledgement() -> None:
    log = Log(message(ONE, 2, CONTINUE_TXN), message(ONE, 1, ACK_TXN), message(ONE, 9, ACK_TXN))
    assert log.read() == []
    assert (log.progress.floor, log.progress.idle) == (3, True)


def test_a_position_after_a_batch_is_the_one_after_acknowledging_it() -> None:
    log = Log(*TRANSACTION)
    delivered = log.read()
    for sequence in delivered:
        announced = log.progress.position_after(sequence, "id", log.replay)
        log.ack(sequence)
        assert announced == log.progress.position("id")
    with pytest.raises(InvalidInput, match="was not delivered"):
        log.progress.position_after(6, "id", log.replay)


def test_the_position_in_a_plain_queue_is_a_number() -> None:
    log = Log(plain(), plain())
    assert log.progress.position("id") is None
    log.read()
    log.ack(0)
    assert log.progress.position("id") == PartitionPosition("id", 0)


@pytest.mark.parametrize("processed", range(7))
def test_a_reader_that_resumes_goes_on_with_exactly_the_next_batch(processed: int) -> None:
    log = Log(*TRANSACTION)
    delivered = log.read()
    for sequence in delivered[:processed]:
        log.ack(sequence)
    log.restart(log.progress.position("id"))
    assert log.read() == delivered[processed:]


def random_log(seed: int) -> Log:
    """Plain batches, messages, transactions that end, are rolled back or stay open, duplicates."""
    draw = random.Random(seed)
    clocks = dict.fromkeys((ONE, TWO, b"\x03" * 6), 1)
    locations: list[str] = []
    for _ in range(60):
        producer = draw.choice(list(clocks))
        clocks[producer] += 1
        match draw.randrange(6):
            case 0:
                locations.append(plain())
            case 1 | 2 | 3:
                locations.append(message(producer, clocks[producer], CONTINUE_TXN))
            case 4:
                clock = clocks[producer] if draw.random() < 0.7 else clocks[producer] - 2
                locations.append(message(producer, max(1, clock), ACK_TXN))
            case _:
                clock = max(1, clocks[producer] - draw.randrange(3))
                locations.append(message(producer, clock, OUTSIDE_TXN))
    return Log(*locations)


@pytest.mark.parametrize("seed", range(20))
def test_restarts_anywhere_deliver_each_batch_once_and_in_one_order(seed: int) -> None:
    log = random_log(seed)
    undisturbed = log.read()
    assert undisturbed
    log.restart(None)
    draw = random.Random(seed + 1000)
    everything, log.locations = log.locations, []
    found: list[int] = []
    waiting: list[int] = []
    saved: PartitionPosition | None = None
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
                # Where it was saved with its last batch, or later: what came since may be known.
                saved = saved if draw.random() < 0.5 else log.progress.position("id")
                log.restart(saved)
                waiting = []
                restarts += 1
        if len(log.locations) == len(everything) and found == undisturbed:
            break
        assert found == undisturbed[: len(found)]
        last = None if saved is None else PartitionPosition.parse(str(saved))
        needed = Progress(PREFIX, "read_committed", 0, last).floor
        assert log.progress.kept_from <= needed, "what a saved position asks for is gone"
        assert log.progress.kept_from <= log.progress.floor
    assert restarts
