"""The sequencer, and what a manifest leaves undecided."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.messages.message_ids import (
    ACK_TXN,
    CONTINUE_TXN,
    FINAL,
    OUTSIDE_TXN,
    build_uuid,
)
from opendata_buffer.messages.sequencer import (
    Message,
    Outcome,
    ProducerState,
    Sequencer,
    Undecided,
    undecided,
)

VECTORS = Path(__file__).parents[2] / "golden" / "gazette" / "vectors.json.gz"
TRACES = json.loads(gzip.decompress(VECTORS.read_bytes()))["sequencer"]


def message(clock: int, flags: int, begin: int, producer: object = "a") -> Message:
    return Message(producer, clock, flags, begin, begin + 10)


def drained(sequencer: Sequencer) -> list[int]:
    return [each.begin for each in sequencer.dequeue_committed()]


@pytest.mark.parametrize("number", range(len(TRACES)))
def test_every_step_of_a_trace_is_answered_as_gazette_does(number: int) -> None:
    trace = TRACES[number]
    sequencer = Sequencer(buffer=trace["ring"])
    log: list[Message] = []
    for step in trace["steps"]:
        each = message(step["clock"], step["flags"], step["begin"], step["producer"])
        log.append(each)
        assert sequencer.queue_uncommitted(each).value == step["outcome"]
        if step["outcome"] == Outcome.ACK_COMMIT_REPLAY.value:
            begin, end = sequencer.replay_range()
            assert [begin, end] == step["replay"]
            sequencer.start_replay([old for old in log if begin <= old.begin and old.end <= end])
        else:
            assert "replay" not in step
        assert drained(sequencer) == step["committed_begins"]
        if "checkpoint_then_restart" in step:
            states = sequencer.checkpoint()
            expected = [ProducerState(**each) for each in step["checkpoint_then_restart"]]
            assert set(states) == set(expected)
            assert len(states) == len(expected)
            sequencer = Sequencer(states, trace["ring"])


def test_the_traces_have_every_outcome_and_restarts() -> None:
    steps = [step for trace in TRACES for step in trace["steps"]]
    assert {step["outcome"] for step in steps} == {each.value for each in Outcome}
    assert any("checkpoint_then_restart" in step for step in steps)


def test_a_message_without_a_clock_always_counts() -> None:
    sequencer = Sequencer()
    for begin in (0, 10):
        assert sequencer.queue_uncommitted(message(0, OUTSIDE_TXN, begin)) is Outcome.OUTSIDE_COMMIT
        assert drained(sequencer) == [begin]
    assert sequencer.checkpoint() == []


def test_unknown_flags_are_read_as_outside_of_a_transaction() -> None:
    sequencer = Sequencer()
    assert sequencer.queue_uncommitted(message(7, 0x3F0, 0)) is Outcome.OUTSIDE_COMMIT
    assert drained(sequencer) == [0]


def test_nothing_is_queued_while_committed_messages_wait() -> None:
    sequencer = Sequencer()
    sequencer.queue_uncommitted(message(5, OUTSIDE_TXN, 0))
    with pytest.raises(InvalidInput, match=r"dequeue_committed\(\) first"):
        sequencer.queue_uncommitted(message(6, OUTSIDE_TXN, 10))
    assert drained(sequencer) == [0]
    assert drained(sequencer) == []


def test_a_checkpoint_in_the_middle_names_the_rest_as_still_to_be_read() -> None:
    sequencer = Sequencer()
    sequencer.queue_uncommitted(message(5, CONTINUE_TXN, 0))
    sequencer.queue_uncommitted(message(6, CONTINUE_TXN, 10))
    sequencer.queue_uncommitted(message(7, ACK_TXN, 20))
    committed = sequencer.dequeue_committed()
    assert next(committed).begin == 0
    assert next(committed).begin == 10
    assert sequencer.checkpoint() == [ProducerState("a", 5, 10)]
    assert [each.begin for each in committed] == [20]
    assert sequencer.checkpoint() == [ProducerState("a", 7, -1)]


def test_a_replay_that_is_needed_must_be_started_and_be_of_the_range() -> None:
    sequencer = Sequencer([ProducerState("a", 4, 0)])
    assert sequencer.queue_uncommitted(message(7, ACK_TXN, 20)) is Outcome.ACK_COMMIT_REPLAY
    with pytest.raises(InvalidInput, match=r"from position 0 .* start_replay\(\)"):
        drained(sequencer)
    sequencer.start_replay([message(5, CONTINUE_TXN, 15)])
    with pytest.raises(InvalidInput, match="positions 0 to 20"):
        drained(sequencer)
    sequencer.start_replay([message(5, CONTINUE_TXN, 0), message(6, CONTINUE_TXN, 10, "b")])
    assert drained(sequencer) == [0, 20]


@pytest.mark.parametrize("call", [Sequencer.replay_range, lambda each: each.start_replay([])])
def test_a_replay_without_committed_messages_is_refused(call: Any) -> None:
    with pytest.raises(InvalidInput, match="without committed messages"):
        call(Sequencer())


def test_a_buffer_without_room_is_refused() -> None:
    with pytest.raises(InvalidInput, match="buffer is 0"):
        Sequencer(buffer=0)


ULID = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
A, B = b"\1AAAAA", b"\1BBBBB"
TXN = Transaction("app", 4)

Written = tuple[bytes, int, int]


def of(*messages: Written | None, txn: Transaction | None = None) -> dict[bytes, Undecided]:
    entries = [
        (
            100 + at,
            batch_key(
                "ingest", ULID, txn, None if each is None else build_uuid(each[0], each[1], each[2])
            ),
        )
        for at, each in enumerate(messages)
    ]
    return undecided(entries, "ingest")


def test_a_queue_without_messages_has_nothing_to_decide() -> None:
    assert of() == {}
    assert of(None, None) == {}
    assert of(None, txn=TXN) == {}


def test_what_was_continued_and_never_acknowledged_is_undecided() -> None:
    found = of(None, (A, 2, CONTINUE_TXN), (B, 7, CONTINUE_TXN), (A, 5, CONTINUE_TXN), txn=TXN)
    assert found == {A: Undecided(101, 2, 5, 2, TXN), B: Undecided(102, 7, 7, 1, TXN)}
    assert list(found) == [A, B]


def test_a_duplicate_is_neither_counted_nor_a_new_transaction() -> None:
    twice = of((A, 2, CONTINUE_TXN), (A, 3, CONTINUE_TXN), (A, 2, CONTINUE_TXN))
    assert twice == {A: Undecided(100, 2, 3, 2)}
    assert of((A, 2, CONTINUE_TXN), (A, 3, ACK_TXN), (A, 2, CONTINUE_TXN)) == {}


def test_f40_what_follows_a_last_word_is_undecided_as_readers_hold_it_back() -> None:
    messages = [(A, 2, CONTINUE_TXN), (A, 3, ACK_TXN | FINAL), (A, 2, CONTINUE_TXN)]
    assert of(*messages) == {A: Undecided(102, 2, 2, 1)}
    rule = ReadCommitted("ingest")
    for at, each in enumerate(messages):
        rule.offer(100 + at, batch_key("ingest", ULID, None, build_uuid(*each)), lambda *_: [])
    assert rule.stable_end(103) == 102


def test_a_message_outside_of_transactions_gives_the_open_one_up() -> None:
    assert of((A, 2, CONTINUE_TXN), (A, 3, OUTSIDE_TXN)) == {}
    assert list(of((A, 2, CONTINUE_TXN), (A, 1, OUTSIDE_TXN))) == [A]  # a duplicate, and old


def test_a_message_without_a_clock_decides_nothing_and_waits_for_nothing() -> None:
    assert of((A, 0, CONTINUE_TXN)) == {}
    assert list(of((A, 2, CONTINUE_TXN), (A, 0, ACK_TXN))) == [A]


def test_entries_outside_of_the_prefix_are_no_messages() -> None:
    location = batch_key("other", ULID, None, build_uuid(A, 2, CONTINUE_TXN))
    assert undecided([(0, location)], "ingest") == {}
    assert list(undecided([(0, location)], "other")) == [A]
