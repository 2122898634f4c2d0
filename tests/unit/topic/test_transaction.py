"""The open transaction: identities in order, and what became of its batches."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.messages.message_ids import CONTINUE_TXN, MessageId, parse_uuid
from opendata_buffer.producer.append_buffer import ProduceRequest
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic
from opendata_buffer.topic.transaction import AckIntents, OpenTransaction
from tests.unit.topic.world import WAIT_S, producing

A = b"\1AAAAA"
TXN = Transaction("publisher.x", 3)


def test_batches_get_rising_clocks_over_all_partitions_and_intents_lie_beyond() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    current = OpenTransaction(A, TXN, runtime)
    handles = []
    for name in ("p-00000", "p-00001"):
        with Producer(Topic.config_of(name, producing()), store=store) as producer:
            handles += [current.accept(name, producer, producer.prepare([b"x"])) for _ in range(2)]
    assert current.wait(WAIT_S) is None
    found = []
    for handle in handles:
        location = handle.watcher.await_durable(WAIT_S).location
        parsed = parse_location(location, location.split("/")[0])
        assert parsed is not None
        assert parsed.message is not None
        assert parsed.txn == TXN
        found.append(parse_uuid(parsed.message))
    assert found == [MessageId(A, clock, CONTINUE_TXN) for clock in (2, 3, 4, 5)]
    assert current.since == {"p-00000": 0, "p-00001": 0}
    wanted = AckIntents("T", A, {"p-00000": 4, "p-00001": 6}, TXN)
    assert current.build("T") == wanted == current.intents


class Refuses:
    def accept(self, call: ProduceRequest) -> None:
        raise KeyboardInterrupt


def test_a_partition_that_may_have_got_a_batch_is_one_to_end_it_in() -> None:
    current = OpenTransaction(A, None, SystemRuntime())
    with pytest.raises(KeyboardInterrupt):
        current.accept("p-00000", Refuses(), ProduceRequest(b"", 0, b"", 0))  # type: ignore[arg-type]
    assert current.clocks == {"p-00000": 2}


def fail_a_call(current: OpenTransaction, error: Exception, *, accepted: int) -> None:
    def call() -> None:
        with current.one_call():
            for _ in range(accepted):
                with pytest.raises(KeyboardInterrupt):
                    current.accept("p-00000", Refuses(), ProduceRequest(b"", 0, b"", 0))  # type: ignore[arg-type]
            raise error

    with pytest.raises(type(error), match=str(error)):
        call()


def test_the_first_failure_is_told() -> None:
    current = OpenTransaction(A, None, SystemRuntime())
    first = TransientStorageError("first")
    fail_a_call(current, first, accepted=1)
    fail_a_call(current, TransientStorageError("second"), accepted=2)
    assert current.wait(WAIT_S) is first


def test_a_call_of_which_nothing_was_accepted_fails_alone() -> None:
    current = OpenTransaction(A, None, SystemRuntime())
    fail_a_call(current, TransientStorageError("refused"), accepted=0)
    assert current.wait(WAIT_S) is None
