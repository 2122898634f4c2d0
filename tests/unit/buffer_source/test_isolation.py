"""The rule of what is delivered, taken up behind a position."""

from __future__ import annotations

import pytest

from buffer_source.offsets import Position
from buffer_source.options import SourceOptions
from buffer_source.partition_stream import (
    IsolationFilter,
    check_remembered,
    floor_of,
    rule_behind,
    vouched_for,
)
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.messages.message_ids import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.testing.runtime import ManualRuntime

PRODUCER = b"writer"


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/unused", **given})


class Entries:
    """A queue's entries, as they are appended."""

    def __init__(self, runtime: ManualRuntime) -> None:
        self._runtime = runtime
        self.all: list[BatchDescriptor] = []

    def add(self, clock: int = 0, flags: int = 0, txn: Transaction | None = None) -> None:
        message = build_uuid(PRODUCER, clock, flags) if clock else None
        location = batch_key("ingest", self._runtime.ulid(), txn, message)
        self.all.append(BatchDescriptor(len(self.all), location))

    def between(self, begin: int, end: int) -> list[BatchDescriptor]:
        return [each for each in self.all if begin <= each.sequence < end]


@pytest.fixture
def entries(runtime: ManualRuntime) -> Entries:
    return Entries(runtime)


def walk(
    entries: Entries, start: Position | None, end: int, **given: str
) -> tuple[list[int], Position]:
    """The sequences delivered, and the position behind them."""
    walking = IsolationFilter(start, options(**given), entries.between)
    begin = 0 if start is None else start.next
    for each in entries.between(begin, end):
        walking.step(each)
    delivered = [each.sequence for each in walking.delivered]
    return delivered, Position(end, 0, walking.rule.to_dict())


def test_a_transaction_is_delivered_at_its_acknowledgement_over_positions(
    entries: Entries,
) -> None:
    entries.add(2, CONTINUE_TXN)
    entries.add()
    entries.add(3, CONTINUE_TXN)
    entries.add(4, ACK_TXN)
    delivered, position = walk(entries, None, 2)
    assert delivered == [1]
    assert floor_of(position, options()) == 0
    delivered, position = walk(entries, position, 3)
    assert delivered == []
    delivered, position = walk(entries, position, 4)
    assert delivered == [0, 2]
    assert floor_of(position, options()) == 4


def test_read_uncommitted_delivers_what_is_undecided_and_never_an_acknowledgement(
    entries: Entries,
) -> None:
    entries.add(2, CONTINUE_TXN)
    entries.add(3, ACK_TXN)
    assert walk(entries, None, 2, isolationLevel="read_uncommitted")[0] == [0]


def test_what_is_held_back_would_be_lost_to_a_query_that_holds_nothing_back(
    entries: Entries,
) -> None:
    entries.add(2, CONTINUE_TXN)
    _, position = walk(entries, None, 1)
    with pytest.raises(InvalidInput, match=r"undecided at sequence 0 .* would never be read"):
        rule_behind(position, options(isolationLevel="read_uncommitted"))
    entries.add(3, ACK_TXN)
    _, position = walk(entries, position, 2)
    rule_behind(position, options(isolationLevel="read_uncommitted"))


def test_only_what_repeats_a_transaction_counts_as_a_repeat(entries: Entries) -> None:
    for _ in range(2):
        entries.add(txn=Transaction("app", 1))
        entries.add()
    entries.add(2, CONTINUE_TXN)
    entries.add(3, ACK_TXN)
    walking = IsolationFilter(None, options(), entries.between)
    for each in entries.all:
        walking.step(each)
    assert [each.sequence for each in walking.repeats] == [2]
    assert [each.sequence for each in walking.delivered] == [0, 1, 3, 4]


def test_writers_vouch_for_transactions_and_messages_and_acknowledgements_need_no_object(
    entries: Entries,
) -> None:
    entries.add()
    entries.add(txn=Transaction("app", 1))
    entries.add(2, CONTINUE_TXN)
    entries.add(3, ACK_TXN)
    assert [vouched_for(each, "ingest") for each in entries.all] == [False, True, True, False]


def test_what_a_position_does_not_remember_is_not_held_back_in_front_of_it(
    entries: Entries,
) -> None:
    entries.add(2, CONTINUE_TXN)
    end = walk(entries, None, 1, isolationLevel="read_uncommitted")[1]
    again = IsolationFilter(None, options(), entries.between)
    again.step(entries.all[0])
    with pytest.raises(InvalidInput, match="planned with read_uncommitted, up to sequence 0"):
        check_remembered(again.rule, end, options())
    check_remembered(again.rule, walk(entries, None, 1)[1], options())
