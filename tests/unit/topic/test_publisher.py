"""Messages and transactions are published completely or not at all, even after a kill."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest

from opendata_buffer import Publisher, outcomes
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.transactions import list_open
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    Closed,
    FlushFailed,
    InvalidInput,
    PermanentStorageError,
    Superseded,
    TransientStorageError,
)
from opendata_buffer.formats.batch import Transaction, parse_location
from opendata_buffer.messages import ACK_TXN, FINAL, parse_uuid
from opendata_buffer.producer.batching import ProduceRequest
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.publisher import AckIntents, PublisherTransaction, TransactionBlock
from opendata_buffer.topic.topic import Topic
from tests.unit.topic.in_memory import NAMES as FIVE_NAMES
from tests.unit.topic.in_memory import (
    URL,
    WAIT_S,
    Faulty,
    delivered,
    manifest_of,
    producing,
    records,
    topic_in,
)

NAMES = FIVE_NAMES[:3]
ENTRIES = [b"%d" % number for number in range(60)]
KEYS = [b"key %d" % number for number in range(60)]


@pytest.fixture
def store() -> Faulty:
    made = Faulty()
    topic_in(made, 3)
    return made


def opened(store: MemoryStore, name: str | None = None, **settings: Any) -> Publisher:
    return Publisher(URL, name, config=producing(**settings), store=store)


def seen(store: MemoryStore) -> list[bytes]:
    names = [each.key.split("/")[0] for each in store.list("p-").objects if "manifest" in each.key]
    return sorted((each for name in names for each in delivered(store, name)), key=int)


def still_open(store: MemoryStore) -> list[str]:
    config = QueueConfig(store=URL)
    scope = Target(store, config, SystemRuntime(), Topic.open(config, store=store))
    return [each.partition for each in list_open(scope)]


def all_published(publisher: Publisher, entries: list[bytes] = ENTRIES) -> None:
    for begin in range(0, len(entries), 20):
        part = slice(begin, begin + 20)
        publisher.publish_uncommitted(entries[part], keys=KEYS[part])


def test_committed_messages_are_delivered_at_once_and_in_order(store: Faulty) -> None:
    with opened(store) as publisher:
        for number in range(10):
            handle = publisher.publish_committed([b"%d" % number], partition=NAMES[1])
        handle.result(WAIT_S)
        assert delivered(store, NAMES[1]) == [b"%d" % number for number in range(10)]
    assert delivered(store, NAMES[1]) == [b"%d" % number for number in range(10)]


def test_readers_forget_a_closed_publisher(store: Faulty) -> None:
    with opened(store) as publisher:
        publisher.publish_committed(ENTRIES, keys=KEYS)
    for name in NAMES:
        last: Any = parse_location(manifest_of(store, name).locations()[-1], name)
        assert parse_uuid(last.message).flags == ACK_TXN | FINAL


@pytest.mark.parametrize("name", [None, "billing"])
def test_no_message_of_a_transaction_is_delivered_before_it_is_applied(
    store: Faulty, name: str | None
) -> None:
    with opened(store, name) as publisher:
        all_published(publisher)
        intents = publisher.build_ack_intents(WAIT_S)
        assert sorted(intents.clocks) == NAMES
        assert publisher.build_ack_intents() == intents
        assert sorted(each for name in NAMES for each in records(store, name)) == sorted(ENTRIES)
        assert seen(store) == []
        publisher.apply(intents)
        assert seen(store) == ENTRIES
        assert still_open(store) == []


def test_a_transaction_without_messages_commits_nothing(store: Faulty) -> None:
    for name in (None, "billing"):
        with opened(store, name) as publisher:
            publisher.publish_uncommitted([])
            intents = publisher.build_ack_intents(WAIT_S)
            assert intents.clocks == {}
            publisher.apply(intents)
    assert not any("manifest" in each.key for each in store.list("p-").objects)


@pytest.mark.parametrize("name", [None, "billing"])
def test_a_transaction_that_is_rolled_back_is_never_delivered(
    store: Faulty, name: str | None
) -> None:
    with opened(store, name) as publisher:
        publisher.abort()
        all_published(publisher)
        publisher.abort()
        assert still_open(store) == []
        publisher.publish_uncommitted([b"7"])
        publisher.apply(publisher.build_ack_intents(WAIT_S))
    assert seen(store) == [b"7"]


def test_a_transaction_whose_abort_failed_is_aborted_before_the_next_one(store: Faulty) -> None:
    def fail(txn: TransactionBlock) -> None:
        txn.produce([b"1"], partition="0").result(WAIT_S)
        store.fail("put_if", f"{NAMES[0]}/manifest", PermanentStorageError("access denied"))
        raise ZeroDivisionError

    with opened(store, "billing") as publisher:
        with pytest.raises(ZeroDivisionError), publisher.transaction() as txn:
            fail(txn)
        assert still_open(store) == [NAMES[0]]
        with pytest.raises(PermanentStorageError), publisher.transaction():
            raise AssertionError("not reached")
        store.heal()
        with publisher.transaction() as txn:
            txn.produce([b"2"], partition="1")
        assert (seen(store), still_open(store)) == ([b"2"], [])
        publisher.publish_uncommitted([b"3"])
        with pytest.raises(InvalidInput, match="a transaction is open"), publisher.transaction():
            raise AssertionError("not reached")


def test_a_transaction_that_is_not_durable_in_time_is_aborted(store: Faulty) -> None:
    topic = Topic.open(URL, store=store)
    with Publisher(topic, "billing", config=producing(flush_interval_ms=100)) as publisher:
        with pytest.raises(TimeoutError), publisher.transaction(timeout=0.0) as txn:
            txn.produce([b"1"], partition="0")
        with publisher.transaction():
            pass
        assert publisher.build_ack_intents().clocks == {}
    assert (seen(store), still_open(store)) == ([], [])


def test_a_publisher_can_close_although_its_markers_are_refused(
    store: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = opened(store, "billing")
    for publish in (publisher.publish_committed, publisher.publish_uncommitted):
        publish([b"1"], partition="0").result(WAIT_S)
    store.fail("put_if", f"{NAMES[0]}/manifest", PermanentStorageError("access denied"))
    with caplog.at_level("INFO", logger="opendata_buffer"):
        publisher.close()
    assert "was not rolled back, and will be: access denied" in caplog.text
    assert "readers remember this publisher for some weeks: access denied" in caplog.text
    assert (seen(store), still_open(store)) == ([b"1"], [NAMES[0]])


@pytest.mark.parametrize("name", [None, "billing"])
def test_close_rolls_an_open_transaction_back(store: Faulty, name: str | None) -> None:
    with opened(store, name) as publisher:
        all_published(publisher)
    assert (seen(store), still_open(store)) == ([], [])
    with pytest.raises(Closed, match="open a new one"):
        publisher.publish_committed([b"x"])
    publisher.close()


def test_saved_intents_can_be_applied_repeatedly_by_the_next_instance(store: Faulty) -> None:
    with opened(store) as publisher:
        all_published(publisher)
        saved = publisher.build_ack_intents(WAIT_S).to_json()
    assert seen(store) == []  # the caller has the intents, so close does not touch the transaction
    for _ in range(2):
        with opened(store) as publisher:
            publisher.apply(AckIntents.from_json(saved))
        assert seen(store) == ENTRIES


def test_partly_applied_intents_can_be_applied_again_but_not_rolled_back(store: Faulty) -> None:
    with opened(store) as publisher:
        all_published(publisher)
        intents = publisher.build_ack_intents(WAIT_S)
        store.fail("put_if", f"{NAMES[1]}/manifest", PermanentStorageError("access denied"))
        with pytest.raises(PermanentStorageError):
            publisher.apply(intents)
        store.heal()
        assert 0 < len(seen(store)) < len(ENTRIES)
        with pytest.raises(InvalidInput, match="apply the intents again"):
            publisher.abort()
        assert still_open(store) == [NAMES[1]]
        publisher.apply(intents)
        publisher.abort()
        assert seen(store) == ENTRIES


@pytest.mark.parametrize("name", [None, "billing"])
def test_a_failed_batch_rolls_its_transaction_back(store: Faulty, name: str | None) -> None:
    publisher = opened(store, name)
    store.fail("put", f"{NAMES[1]}/", PermanentStorageError("access denied"))
    all_published(publisher)
    with pytest.raises(PermanentStorageError):
        publisher.build_ack_intents(WAIT_S)
    store.heal()
    assert (seen(store), still_open(store)) == ([], [])
    all_published(publisher)
    publisher.apply(publisher.build_ack_intents(WAIT_S))
    assert seen(store) == ENTRIES
    with pytest.raises(FlushFailed):
        publisher.close()


def test_without_a_name_intents_are_applied_before_the_next_transaction(store: Faulty) -> None:
    with opened(store) as publisher:
        all_published(publisher)
        with pytest.raises(InvalidInput, match="or give it a name"):
            publisher.commit()
        publisher.build_ack_intents(WAIT_S)
        with pytest.raises(InvalidInput, match=r"apply\(\) them, or abort\(\)"):
            publisher.publish_uncommitted([b"x"])


def test_intents_of_another_topic_or_publisher_are_refused(store: Faulty) -> None:
    other = MemoryStore()
    topic_in(other, 3)
    with opened(other) as publisher:
        all_published(publisher)
        intents = publisher.build_ack_intents(WAIT_S)
        with opened(store) as here, pytest.raises(InvalidInput, match="are of topic"):
            here.apply(intents)
        with opened(other, "x") as named, pytest.raises(InvalidInput, match="another publisher"):
            named.apply(intents)


def test_intents_of_a_named_publisher_are_not_applied_without_its_record(store: Faulty) -> None:
    publisher = opened(store, "billing")
    all_published(publisher)
    saved = publisher.build_ack_intents(WAIT_S).to_json()
    with opened(store) as nameless, pytest.raises(InvalidInput, match="of publisher 'billing'"):
        nameless.apply(AckIntents.from_json(saved))
    assert seen(store) == []
    publisher.commit()
    assert seen(store) == ENTRIES
    publisher.close()


def test_saved_intents_are_not_confused_with_another_transaction_of_the_same_number(
    store: Faulty,
) -> None:
    with opened(store, "billing") as publisher:
        publisher.publish_uncommitted([b"1"])
        lost = publisher.build_ack_intents(WAIT_S)
    with opened(store, "billing") as again:
        again.publish_uncommitted([b"2"])
        kept = again.commit(WAIT_S)
        assert kept.txn == lost.txn == Transaction("publisher.billing", 0)
        again.apply(kept)
        with pytest.raises(InvalidInput, match="was rolled back"):
            again.apply(lost)
    assert seen(store) == [b"2"]


@pytest.mark.parametrize("name", ["", "a/b", "a=b", "x" * 191, "Zürich"])
def test_a_name_that_is_not_valid_in_a_key_is_refused(store: Faulty, name: str) -> None:
    with pytest.raises(InvalidInput, match="use 1 to 190 characters"):
        opened(store, name)


class Killed(BaseException):
    """The process was killed, and none of its requests reaches the store."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", range(4))
def test_f39_the_next_instance_completes_or_rolls_back_a_transaction_that_was_killed_in_commit(
    store: Faulty, step: int, after: bool
) -> None:
    """The steps are the record, and the acknowledgements of three partitions."""
    publisher = opened(store, "billing")
    all_published(publisher)
    intents = publisher.build_ack_intents(WAIT_S)
    steps = ["_topic/app=publisher.billing/_commit.json", *(f"{n}/manifest" for n in NAMES)]
    dead = False

    def die(operation: str, key: str) -> None:
        nonlocal dead
        if operation == "put_if" and key == steps[step]:
            dead = True
        if dead:
            raise Killed

    setattr(store, "after" if after else "before", die)
    with pytest.raises(Killed):
        publisher.apply(intents)
    store.heal()
    with opened(store, "billing") as again:
        committed = step > 0 or after
        assert seen(store) == (ENTRIES if committed else [])
        assert still_open(store) == []
        if committed:
            again.apply(intents)  # it is committed, and another call changes nothing
        else:
            with pytest.raises(InvalidInput, match="was rolled back"):
                again.apply(intents)
        again.publish_uncommitted([b"99"])
        again.commit(WAIT_S)
    assert seen(store) == [*(ENTRIES if committed else []), b"99"]
    publisher.close()


@pytest.mark.parametrize("newer_commits", [False, True])
def test_the_older_of_two_live_instances_is_fenced_and_commits_nothing(
    store: Faulty, newer_commits: bool
) -> None:
    older = opened(store, "billing")
    all_published(older)
    newer = opened(store, "billing")
    older.publish_uncommitted([b"1000"])
    if newer_commits:
        all_published(newer)
        newer.commit(WAIT_S)
    with pytest.raises(Superseded, match="two publishers share one name"):
        older.commit(WAIT_S)
    for call in (older.commit, older.abort, lambda: older.publish_uncommitted([b"x"])):
        with pytest.raises(Closed, match="cannot go on since"):
            call()
    assert still_open(store) == []
    if not newer_commits:
        assert seen(store) == []
        all_published(newer)
        newer.commit(WAIT_S)
    older.close()
    newer.close()
    assert (seen(store), still_open(store)) == (ENTRIES, [])


class LosesOneAnswer(Faulty):
    """Applies one write of a commit record, and calls a hook before the answer is lost."""

    meanwhile: Any = None

    def put_if(self, key: str, data: bytes, condition: Any) -> Any:
        answer = super().put_if(key, data, condition)
        if self.meanwhile is None or not key.endswith("_commit.json"):
            return answer
        meanwhile, self.meanwhile = self.meanwhile, None
        meanwhile()
        return outcomes.Unknown("the answer was lost")


def test_f2_a_commit_whose_answer_was_lost_is_not_reported_as_superseded() -> None:
    """Otherwise its owner would publish the committed transaction again."""
    store = LosesOneAnswer()
    topic_in(store, 3)
    older = opened(store, "billing")
    all_published(older)

    def take_over() -> None:
        with opened(store, "billing") as newer:
            newer.publish_uncommitted([b"99"])
            newer.commit(WAIT_S)

    store.meanwhile = take_over
    with pytest.raises(TransientStorageError, match=r"not known whether .* was committed"):
        older.commit(WAIT_S)
    older.close()
    assert store.meanwhile is None
    assert seen(store) == [*ENTRIES, b"99"]
    assert still_open(store) == []


def test_a_publisher_cannot_be_used_in_a_forked_process(
    store: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store, "billing") as publisher:
        all_published(publisher)
        with monkeypatch.context() as forked:
            forked.setattr("opendata_buffer.topic.publisher.os.getpid", lambda: -1)
            publisher.close()
            with pytest.raises(Closed, match="after the fork"):
                publisher.commit(WAIT_S)
        publisher.commit(WAIT_S)
    assert seen(store) == ENTRIES


def test_calls_of_several_threads_run_one_after_the_other(store: Faulty) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold(operation: str, key: str) -> None:
        if operation == "put_if" and key.endswith("_commit.json"):
            began.set()
            assert go_on.wait(WAIT_S)

    with opened(store, "billing") as publisher:
        publisher.publish_uncommitted([b"1"])
        store.before = hold
        first = threading.Thread(target=publisher.commit)
        first.start()
        assert began.wait(WAIT_S)
        second = threading.Thread(target=publisher.publish_uncommitted, args=[[b"2"]])
        second.start()
        second.join(0.1)
        assert second.is_alive()
        go_on.set()
        for thread in (first, second):
            thread.join(WAIT_S)
        publisher.commit(WAIT_S)
    assert seen(store) == [b"1", b"2"]


A = b"\1AAAAA"


class Refuses:
    def _accept(self, call: ProduceRequest) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_call_that_fails_after_its_first_part_fails_its_transaction(accepted: int) -> None:
    current = PublisherTransaction(A, None, SystemRuntime())

    def call(text: str) -> None:
        with current.one_call():
            for _ in range(accepted):
                with suppress(KeyboardInterrupt):
                    current.accept("p-00000", Refuses(), ProduceRequest(b"", 0, b"", 0))
            raise TransientStorageError(text)

    for text in ("first", "second"):
        with pytest.raises(TransientStorageError, match=text):
            call(text)
    # The partition whose call was interrupted gets a marker.
    assert current.clocks == ({"p-00000": 1 + 2 * accepted} if accepted else {})
    assert str(current.wait(WAIT_S)) == ("first" if accepted else "None")


WHOLE = '{"version":1,"topic":"T","producer":"014141414141","clocks":{"p":5}'


@pytest.mark.parametrize("txn", [None, Transaction("publisher.x", 7)])
@pytest.mark.parametrize("clocks", [{}, {"p-00001": 2**64 - 1, "p-00000": 3}])
def test_intents_round_trip(clocks: dict[str, int], txn: Transaction | None) -> None:
    made = AckIntents("01J5T4R3KXBMZ7QV9N2WG8YDHP", A, clocks, txn)
    text = made.to_json()
    assert "\n" not in text
    assert AckIntents.from_json(text) == made
    assert AckIntents.from_json(text.encode()) == made


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
def test_invalid_intents_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        AckIntents.from_json(text)
