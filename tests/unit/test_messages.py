"""Identities in v1 UUIDs, the sequencer, and undecided transactions of a manifest."""

from __future__ import annotations

import gzip
import json
import uuid
from pathlib import Path

import pytest

from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import Transaction, batch_key
from opendata_buffer.messages import (
    ACK_TXN,
    CONTINUE_TXN,
    FINAL,
    OUTSIDE_TXN,
    Clock,
    Message,
    MessageId,
    Outcome,
    ProducerState,
    Sequencer,
    Undecided,
    build_uuid,
    message_at,
    new_producer_id,
    parse_uuid,
    undecided,
)

VECTORS = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "golden/gazette/vectors.json.gz").read_bytes())
)
TRACES = VECTORS["sequencer"]


def test_every_uuid_of_gazette_is_built_and_parsed() -> None:
    assert len(VECTORS["uuid"]) == 300
    for vector in VECTORS["uuid"]:
        producer, clock = bytes.fromhex(vector["producer_hex"]), int(vector["clock"])
        built = build_uuid(producer, clock, vector["flags"])
        assert built.hex == vector["uuid_hex"]
        assert (built.version, built.variant) == (1, uuid.RFC_4122)
        assert parse_uuid(built) == MessageId(producer, clock, vector["flags"])


def test_the_largest_clock_and_all_flags_fit_into_a_uuid() -> None:
    largest = MessageId(b"\xff" * 6, 2**64 - 1, 2**10 - 1)
    built = build_uuid(largest.producer, largest.clock, largest.flags)
    assert parse_uuid(built) == largest


@pytest.mark.parametrize(
    ("producer", "clock", "flags", "says"),
    [
        (b"12345", 0, 0, "has 5 bytes: use 6"),
        (b"123456", -1, 0, "clock is -1"),
        (b"123456", 1 << 64, 0, "clock is 18446744073709551616"),
        (b"123456", 0, 1024, "flags are 1024"),
    ],
)
def test_values_that_do_not_fit_into_a_uuid_are_refused(
    producer: bytes, clock: int, flags: int, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        build_uuid(producer, clock, flags)


def test_a_uuid_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not a version 1 UUID"):
        parse_uuid(uuid.UUID("7d444840-9dc0-41d1-b245-5ffdce74fad2"))


def test_a_producer_id_is_never_the_address_of_a_network_card() -> None:
    assert new_producer_id(bytes) == b"\1\0\0\0\0\0"
    assert new_producer_id(lambda size: b"\xf2abcdefgh"[:size]) == b"\xf3abcde"


def test_the_clock_follows_the_wall_clock_and_never_goes_back() -> None:
    clock = Clock()
    clock.update(1_000_000)
    first = clock.tick()
    stamped = build_uuid(b"123456", first, 0)
    assert (stamped.time - 0x01B21DD213814000) // 10_000 == 1_000_000
    clock.update(999_000)
    assert clock.tick() == first + 1
    clock.update(1_000_001)
    assert clock.tick() > first + 2


@pytest.mark.parametrize("clock", [0, 1, 7])
def test_only_a_final_message_with_a_clock_ends_its_producer(clock: int) -> None:
    identity = build_uuid(b"123456", clock, ACK_TXN | FINAL)
    assert message_at(41, identity) == (Message(b"123456", clock, ACK_TXN, 41, 42), clock > 0)
    _, is_final = message_at(41, build_uuid(b"123456", clock, ACK_TXN))
    assert not is_final


def message(clock: int, flags: int, begin: int, producer: object = "a") -> Message:
    return Message(producer, clock, flags, begin, begin + 10)


def drained(sequencer: Sequencer) -> list[int]:
    return [each.begin for each in sequencer.dequeue_committed()]


@pytest.mark.parametrize("number", range(len(TRACES)))
def test_every_step_of_a_trace_has_the_same_result_as_in_gazette(number: int) -> None:
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


@pytest.mark.parametrize("flags", [OUTSIDE_TXN, 0x3F0, ACK_TXN | FINAL])
@pytest.mark.parametrize("clock", [0, 7])
def test_messages_without_a_clock_or_with_unknown_flags_are_outside_of_transactions(
    clock: int, flags: int
) -> None:
    sequencer = Sequencer()
    assert sequencer.queue_uncommitted(message(clock, flags, 0)) is Outcome.OUTSIDE_COMMIT
    assert drained(sequencer) == [0]
    again = sequencer.queue_uncommitted(message(clock, flags, 10))
    assert drained(sequencer) == ([] if clock else [10])
    assert again is (Outcome.OUTSIDE_ALREADY_ACKED if clock else Outcome.OUTSIDE_COMMIT)
    assert len(sequencer.checkpoint()) == bool(clock)


def test_nothing_is_queued_while_committed_messages_wait() -> None:
    sequencer = Sequencer()
    sequencer.queue_uncommitted(message(5, OUTSIDE_TXN, 0))
    with pytest.raises(InvalidInput, match=r"dequeue_committed\(\) first"):
        sequencer.queue_uncommitted(message(6, OUTSIDE_TXN, 10))
    assert drained(sequencer) == [0]
    assert drained(sequencer) == []


def test_a_checkpoint_within_a_transaction_lists_the_messages_still_to_be_read() -> None:
    sequencer = Sequencer()
    for clock, flags in ((5, CONTINUE_TXN), (6, CONTINUE_TXN), (7, ACK_TXN)):
        sequencer.queue_uncommitted(message(clock, flags, 10 * (clock - 5)))
    committed = sequencer.dequeue_committed()
    assert [next(committed).begin, next(committed).begin] == [0, 10]
    assert sequencer.checkpoint() == [ProducerState("a", 5, 10)]
    assert [each.begin for each in committed] == [20]
    assert sequencer.checkpoint() == [ProducerState("a", 7, -1)]


def test_a_needed_replay_must_be_started_with_its_own_range() -> None:
    sequencer = Sequencer([ProducerState("a", 4, 0)])
    assert sequencer.queue_uncommitted(message(7, ACK_TXN, 20)) is Outcome.ACK_COMMIT_REPLAY
    with pytest.raises(InvalidInput, match=r"from position 0 .* start_replay\(\)"):
        drained(sequencer)
    sequencer.start_replay([message(5, CONTINUE_TXN, 15)])
    with pytest.raises(InvalidInput, match="positions 0 to 20"):
        drained(sequencer)
    sequencer.start_replay([message(5, CONTINUE_TXN, 0), message(6, CONTINUE_TXN, 10, "b")])
    assert drained(sequencer) == [0, 20]


def test_every_transaction_that_needs_a_replay_asks_for_its_own() -> None:
    sequencer = Sequencer([ProducerState("a", 4, 0), ProducerState("b", 4, 10)])
    sequencer.queue_uncommitted(message(7, ACK_TXN, 20))
    sequencer.start_replay([message(5, CONTINUE_TXN, 0)])
    assert drained(sequencer) == [0, 20]
    sequencer.queue_uncommitted(message(7, ACK_TXN, 30, "b"))
    with pytest.raises(InvalidInput, match="from position 10 on are no longer buffered"):
        drained(sequencer)
    sequencer.start_replay([message(5, CONTINUE_TXN, 10, "b")])
    assert drained(sequencer) == [10, 30]


def test_a_copy_continues_independently_from_the_same_state() -> None:
    sequencer = Sequencer(buffer=2)
    sequencer.queue_uncommitted(message(5, CONTINUE_TXN, 0))
    copy = sequencer.copy()
    copy.queue_uncommitted(message(6, CONTINUE_TXN, 10))
    # The copy has the same buffer size, so the third message replaced the first.
    assert copy.queue_uncommitted(message(7, ACK_TXN, 20)) is Outcome.ACK_COMMIT_REPLAY
    assert copy.replay_range() == (0, 10)
    assert sequencer.queue_uncommitted(message(6, ACK_TXN, 10)) is Outcome.ACK_COMMIT_RING
    assert drained(sequencer) == [0, 10]
    assert sequencer.checkpoint() == [ProducerState("a", 6, -1)]


def test_only_transactions_that_started_before_a_loss_are_dropped() -> None:
    sequencer = Sequencer()
    sequencer.queue_uncommitted(message(5, CONTINUE_TXN, 0))
    sequencer.queue_uncommitted(message(5, CONTINUE_TXN, 30, "b"))
    sequencer.drop_before(30)
    assert sequencer.pending_from() == 30
    assert sequencer.queue_uncommitted(message(6, ACK_TXN, 40)) is Outcome.ACK_EMPTY
    assert drained(sequencer) == [40]
    assert sequencer.queue_uncommitted(message(6, ACK_TXN, 50, "b")) is Outcome.ACK_COMMIT_RING
    assert drained(sequencer) == [30, 50]
    assert sequencer.pending_from() is None


def test_a_forgotten_producer_starts_again_and_an_unknown_one_is_ignored() -> None:
    sequencer = Sequencer()
    sequencer.queue_uncommitted(message(5, CONTINUE_TXN, 0))
    sequencer.forget("b")
    assert sequencer.pending_from() == 0
    sequencer.forget("a")
    assert sequencer.pending_from() is None
    assert sequencer.queue_uncommitted(message(5, OUTSIDE_TXN, 10)) is Outcome.OUTSIDE_COMMIT
    assert drained(sequencer) == [10]


def test_a_replay_without_committed_messages_and_a_buffer_without_room_are_refused() -> None:
    with pytest.raises(InvalidInput, match="without committed messages"):
        Sequencer().replay_range()
    with pytest.raises(InvalidInput, match="buffer is 0"):
        Sequencer(buffer=0)


ULID = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
A, B = b"\1AAAAA", b"\1BBBBB"
TXN = Transaction("app", 4)

Written = tuple[bytes, int, int]


def located(each: Written | None, txn: Transaction | None = None, prefix: str = "ingest") -> str:
    return batch_key(prefix, ULID, txn, None if each is None else build_uuid(*each))


def of(*messages: Written | None, txn: Transaction | None = None) -> dict[bytes, Undecided]:
    return undecided(enumerate((located(each, txn) for each in messages), 100), "ingest")


def test_messages_without_an_acknowledgement_are_undecided() -> None:
    assert of(None, None, txn=TXN) == {}
    found = of(None, (A, 2, CONTINUE_TXN), (B, 7, CONTINUE_TXN), (A, 5, CONTINUE_TXN), txn=TXN)
    assert found == {A: Undecided(101, 5, 2, TXN), B: Undecided(102, 7, 1, TXN)}
    assert list(found) == [A, B]


def test_a_duplicate_is_not_counted_and_starts_no_transaction() -> None:
    twice = of((A, 2, CONTINUE_TXN), (A, 3, CONTINUE_TXN), (A, 2, CONTINUE_TXN))
    assert twice == {A: Undecided(100, 3, 2)}
    assert of((A, 2, CONTINUE_TXN), (A, 3, ACK_TXN), (A, 2, CONTINUE_TXN)) == {}


def test_an_acknowledgement_of_dequeued_messages_leaves_nothing_undecided() -> None:
    assert of((A, 3, ACK_TXN), (B, 2, CONTINUE_TXN)) == {B: Undecided(101, 2, 1)}


def test_f40_messages_after_a_final_one_are_undecided_like_for_readers() -> None:
    messages = [(A, 2, CONTINUE_TXN), (A, 3, ACK_TXN | FINAL), (A, 2, CONTINUE_TXN)]
    assert of(*messages) == {A: Undecided(102, 2, 1)}
    rule = ReadCommitted("ingest")
    for at, each in enumerate(messages):
        rule.offer(100 + at, located(each), lambda *_: [])
    assert rule.stable_end(103) == 102


def test_a_message_outside_of_transactions_drops_the_open_transaction() -> None:
    assert of((A, 2, CONTINUE_TXN), (A, 3, OUTSIDE_TXN)) == {}
    assert list(of((A, 2, CONTINUE_TXN), (A, 1, OUTSIDE_TXN))) == [A]  # an old duplicate


def test_a_message_without_a_clock_neither_decides_nor_waits() -> None:
    assert of((A, 0, CONTINUE_TXN)) == {}
    assert list(of((A, 2, CONTINUE_TXN), (A, 0, ACK_TXN))) == [A]


def test_entries_outside_of_the_prefix_are_not_messages() -> None:
    location = located((A, 2, CONTINUE_TXN), prefix="other")
    assert undecided([(0, location)], "ingest") == {}
    assert list(undecided([(0, location)], "other")) == [A]
