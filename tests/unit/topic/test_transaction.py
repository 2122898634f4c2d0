"""The open transaction of a publisher, and its intents."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.messages.message_ids import CONTINUE_TXN, MessageId, parse_uuid
from opendata_buffer.producer.append_buffer import Call
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic
from opendata_buffer.topic.transaction import AckIntents, PublisherTransaction
from tests.unit.topic.world import WAIT_S, producing

A = b"\1AAAAA"
TXN = Transaction("publisher.x", 3)


def test_batches_get_rising_clocks_over_all_partitions_and_intents_lie_beyond() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    current = PublisherTransaction(A, TXN, runtime)
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
    def accept(self, call: Call) -> None:
        raise KeyboardInterrupt


def test_a_partition_whose_accept_was_interrupted_gets_a_marker() -> None:
    current = PublisherTransaction(A, None, SystemRuntime())
    with pytest.raises(KeyboardInterrupt):
        current.accept("p-00000", Refuses(), Call(b"", 0, b"", 0))  # type: ignore[arg-type]
    assert current.clocks == {"p-00000": 2}


def fail_a_call(current: PublisherTransaction, error: Exception, *, accepted: int) -> None:
    def call() -> None:
        with current.one_call():
            for _ in range(accepted):
                with pytest.raises(KeyboardInterrupt):
                    current.accept("p-00000", Refuses(), Call(b"", 0, b"", 0))  # type: ignore[arg-type]
            raise error

    with pytest.raises(type(error), match=str(error)):
        call()


def test_the_first_failure_is_returned() -> None:
    current = PublisherTransaction(A, None, SystemRuntime())
    first = TransientStorageError("first")
    fail_a_call(current, first, accepted=1)
    fail_a_call(current, TransientStorageError("second"), accepted=2)
    assert current.wait(WAIT_S) is first


def test_a_call_of_which_nothing_was_accepted_fails_alone() -> None:
    current = PublisherTransaction(A, None, SystemRuntime())
    fail_a_call(current, TransientStorageError("refused"), accepted=0)
    assert current.wait(WAIT_S) is None


A = b"\1AAAAA"
WHOLE = '{"version":1,"topic":"T","producer":"014141414141","clocks":{"p":5}'


@pytest.mark.parametrize("txn", [None, Transaction("publisher.x", 7)])
@pytest.mark.parametrize("clocks", [{}, {"p-00001": 2**64 - 1, "p-00000": 3}])
def test_intents_round_trip(clocks: dict[str, int], txn: Transaction | None) -> None:
    made = AckIntents("01J5T4R3KXBMZ7QV9N2WG8YDHP", A, clocks, txn)
    text = made.to_json()
    assert "\n" not in text
    assert AckIntents.from_json(text) == made
    assert AckIntents.from_json(text.encode()) == made


def test_later_versions_may_add_to_them() -> None:
    assert AckIntents.from_json(WHOLE + ',"more":[]}') == AckIntents("T", A, {"p": 5})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        WHOLE,
        WHOLE.replace(":1,", ":2,") + "}",
        WHOLE.replace("0141", "01") + "}",
        WHOLE.replace("0141", "01zz") + "}",
        WHOLE.replace("5", "0") + "}",
        WHOLE.replace("5", "true") + "}",
        WHOLE.replace("5", "18446744073709551616") + "}",
        WHOLE + ',"app":"a/b","batch":1}',
        WHOLE + ',"app":3,"batch":1}',
        WHOLE + ',"app":"a"}',
    ],
)
def test_what_is_no_intents_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        AckIntents.from_json(text)
