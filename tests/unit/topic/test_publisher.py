"""Messages and transactions: all of one or nothing, whenever its publisher is killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.admin.transactions import TransactionScope, list_open
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    Closed,
    FlushFailed,
    InvalidInput,
    OpenDataBufferError,
    PermanentStorageError,
    Superseded,
    TransientStorageError,
)
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.producer.batching import ProduceRequest
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.publisher import AckIntents, CallLock, Publisher, PublisherTransaction
from opendata_buffer.topic.topic import Topic
from tests.support.simulation import SimRuntime, SimTask, Simulation
from tests.unit.topic.world import (
    URL,
    WAIT_S,
    delivered,
    manifest_of,
    producing,
    records,
    topic_in,
)

NAMES = ["p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"]
ENTRIES = [b"%d" % number for number in range(60)]
KEYS = [b"key %d" % number for number in range(60)]


class Faulty(MemoryStore):
    """Requests may be refused before they are carried out, or lose their answer behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[str, str], None] = lambda operation, key: None
        self.after: Callable[[str, str], None] = lambda operation, key: None

    def put(self, key: str, data: Any) -> None:
        self.before("put", key)
        super().put(key, data)
        self.after("put", key)

    def put_if(self, key: str, data: Any, condition: Any) -> Any:
        self.before("put_if", key)
        outcome = super().put_if(key, data, condition)
        self.after("put_if", key)
        return outcome


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
    topic = Topic.open(config, store=store)
    return [
        each.partition
        for each in list_open(TransactionScope(config, store, SystemRuntime(), topic))
    ]


def all_published(publisher: Publisher, entries: list[bytes] = ENTRIES) -> None:
    for begin in range(0, len(entries), 20):
        part = slice(begin, begin + 20)
        publisher.publish_uncommitted(entries[part], keys=KEYS[part])


def test_committed_messages_are_delivered_at_once_and_in_order(store: Faulty) -> None:
    with opened(store) as publisher:
        for number in range(10):
            handle = publisher.publish_committed([b"%d" % number], partition="p-00001-05mv")
        handle.watcher.await_durable(WAIT_S)
        assert delivered(store, "p-00001-05mv") == [b"%d" % number for number in range(10)]
    assert delivered(store, "p-00001-05mv") == [b"%d" % number for number in range(10)]


def test_a_publisher_that_closes_is_forgotten_by_readers(store: Faulty) -> None:
    with opened(store) as publisher:
        publisher.publish_committed(ENTRIES, keys=KEYS)
    for name in NAMES:
        last = parse_location(manifest_of(store, name).locations()[-1], name)
        assert last is not None
        assert last.message is not None
        assert last.message.clock_seq & 0x3FF == 6


@pytest.mark.parametrize("name", [None, "billing"])
def test_nothing_of_a_transaction_is_delivered_before_it_is_applied(
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


def test_transactions_follow_each_other_beside_committed_messages(store: Faulty) -> None:
    with opened(store, "billing") as publisher:
        for number in range(4):
            publisher.publish_uncommitted([b"%d" % (10 * number)], partition="p-00000-04pn")
            publisher.publish_committed([b"%d" % (10 * number + 1)], partition="p-00000-04pn")
            publisher.publish_uncommitted([b"%d" % (10 * number + 2)], partition="p-00001-05mv")
            publisher.commit(WAIT_S)
    assert seen(store) == [b"%d" % (10 * n + k) for n in range(4) for k in range(3)]
    numbers = [
        parsed.txn.batch
        for location in manifest_of(store, "p-00001-05mv").locations()
        if (parsed := parse_location(location, "p-00001-05mv")) and parsed.txn
    ]
    assert numbers == [0, 0, 1, 1, 2, 2, 3, 3]


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
        publisher.roll_back()
        all_published(publisher)
        publisher.roll_back()
        assert still_open(store) == []
        publisher.publish_uncommitted([b"7"])
        publisher.apply(publisher.build_ack_intents(WAIT_S))
    assert seen(store) == [b"7"]


@pytest.mark.parametrize("name", [None, "billing"])
def test_closing_rolls_an_open_transaction_back(store: Faulty, name: str | None) -> None:
    with opened(store, name) as publisher:
        all_published(publisher)
    assert (seen(store), still_open(store)) == ([], [])
    with pytest.raises(Closed, match="open a new one"):
        publisher.publish_committed([b"x"])
    publisher.close()


def test_saved_intents_are_applied_by_the_next_instance_and_again(store: Faulty) -> None:
    with opened(store) as publisher:
        all_published(publisher)
        saved = publisher.build_ack_intents(WAIT_S).to_json()
    assert seen(store) == []  # the caller has the intents, so closing lets it be
    for _ in range(2):
        with opened(store) as publisher:
            publisher.apply(AckIntents.from_json(saved))
        assert seen(store) == ENTRIES


def test_intents_applied_in_part_can_be_applied_again_and_not_rolled_back(store: Faulty) -> None:
    with opened(store) as publisher:
        all_published(publisher)
        intents = publisher.build_ack_intents(WAIT_S)

        def fail(operation: str, key: str) -> None:
            if key == "p-00001-05mv/manifest" and operation == "put_if":
                raise PermanentStorageError("access denied")

        store.before = fail
        with pytest.raises(PermanentStorageError):
            publisher.apply(intents)
        store.before = lambda operation, key: None
        assert 0 < len(seen(store)) < len(ENTRIES)
        with pytest.raises(InvalidInput, match="apply the intents again"):
            publisher.roll_back()
        assert still_open(store) == ["p-00001-05mv"]
        publisher.apply(intents)
        publisher.roll_back()
        assert seen(store) == ENTRIES


@pytest.mark.parametrize("name", [None, "billing"])
def test_a_batch_that_fails_rolls_its_transaction_back(store: Faulty, name: str | None) -> None:
    publisher = opened(store, name)

    def fail(operation: str, key: str) -> None:
        if key.startswith("p-00001-05mv/") and key.endswith(".batch"):
            raise PermanentStorageError("access denied")

    store.before = fail
    all_published(publisher)
    with pytest.raises(PermanentStorageError):
        publisher.build_ack_intents(WAIT_S)
    store.before = lambda operation, key: None
    assert (seen(store), still_open(store)) == ([], [])
    all_published(publisher)
    publisher.apply(publisher.build_ack_intents(WAIT_S))
    assert seen(store) == ENTRIES
    with pytest.raises(FlushFailed):
        publisher.close()


def test_the_next_transaction_cannot_begin_before_intents_are_applied(store: Faulty) -> None:
    with opened(store) as publisher:
        all_published(publisher)
        publisher.build_ack_intents(WAIT_S)
        with pytest.raises(InvalidInput, match=r"apply\(\) them, or roll_back\(\)"):
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


def test_saved_intents_are_not_taken_for_those_of_another_transaction_with_their_number(
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


def test_a_nameless_publisher_does_not_commit_by_itself(store: Faulty) -> None:
    with opened(store) as publisher, pytest.raises(InvalidInput, match="or give it a name"):
        publisher.commit()


@pytest.mark.parametrize("name", ["", "a/b", "a=b", "x" * 191, "Zürich"])
def test_a_name_that_makes_no_key_is_refused(store: Faulty, name: str) -> None:
    with pytest.raises(InvalidInput, match="use 1 to 190 characters"):
        opened(store, name)


class Killed(BaseException):
    """The process is gone: nothing of it reaches the store any more."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", range(4))
def test_f39_killed_while_it_commits_the_next_instance_completes_it_or_rolls_it_back(
    store: Faulty, step: int, after: bool
) -> None:
    """Steps: the record, and the acknowledgements of three partitions."""
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

    if after:
        store.after = die
    else:
        store.before = die
    with pytest.raises(Killed):
        publisher.apply(intents)
    store.before = store.after = lambda operation, key: None
    with opened(store, "billing") as again:
        committed = step > 0 or after
        assert seen(store) == (ENTRIES if committed else [])
        assert still_open(store) == []
        if committed:
            again.apply(intents)  # it is, and again changes nothing
        else:
            with pytest.raises(InvalidInput, match="was rolled back"):
                again.apply(intents)
        again.publish_uncommitted([b"99"])
        again.commit(WAIT_S)
    assert seen(store) == [*(ENTRIES if committed else []), b"99"]
    publisher.close()


@pytest.mark.parametrize("newer_commits", [False, True])
def test_of_two_live_instances_the_older_one_is_fenced_and_commits_nothing(
    store: Faulty, newer_commits: bool
) -> None:
    older = opened(store, "billing")
    all_published(older)
    newer = opened(store, "billing")
    older.publish_uncommitted([b"1000"])
    if newer_commits:
        all_published(newer)
        newer.commit(WAIT_S)
    with pytest.raises(Superseded, match="two publishers one name"):
        older.commit(WAIT_S)
    for call in (older.commit, older.roll_back, lambda: older.publish_uncommitted([b"x"])):
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


def test_a_commit_whose_answer_is_lost_is_unknown_and_completed_by_the_next_instance(
    store: Faulty,
) -> None:
    class Deaf(Faulty):
        """Carries the record\'s write out, and answers nothing about it."""

        lost = False

        def put_if(self, key: str, data: Any, condition: Any) -> Any:
            outcome = super().put_if(key, data, condition)
            if self.lost and key.startswith("_topic/"):
                return outcomes.Unknown("no answer")
            return outcome

        def get(self, key: str, **options: Any) -> Any:
            if self.lost and key.startswith("_topic/"):
                raise TransientStorageError("no answer")
            return super().get(key, **options)

    deaf = Deaf()
    topic_in(deaf, 3)
    publisher = opened(deaf, "billing", cas_deadline_ms=2_000)
    all_published(publisher)
    publisher.build_ack_intents(WAIT_S)
    deaf.lost = True
    with pytest.raises(TransientStorageError, match="is not known"):
        publisher.commit(WAIT_S)
    assert seen(deaf) == []
    deaf.lost = False
    with pytest.raises(Closed):
        publisher.commit()
    opened(deaf, "billing").close()
    assert (seen(deaf), still_open(deaf)) == (ENTRIES, [])
    publisher.close()


def test_the_names_of_publishers_and_of_spark_queries_do_not_meet(store: Faulty) -> None:
    opened(store, "billing").close()
    record = store.get("_topic/app=publisher.billing/_commit.json")
    assert isinstance(record, Blob)
    assert b'"query": "publisher"' in record.data


def test_a_topic_object_may_be_given(store: Faulty) -> None:
    with Publisher(Topic.open(URL, store=store), config=producing()) as publisher:
        publisher.publish_committed([b"1"]).watcher.await_durable(WAIT_S)
    assert seen(store) == [b"1"]


def test_a_publisher_without_a_topic_is_refused() -> None:
    with pytest.raises(OpenDataBufferError, match="there is no topic"):
        opened(MemoryStore())


def test_a_publisher_is_not_used_in_a_forked_process(
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


class Calls:
    """Three that want the lock at once, each for a second."""

    def __init__(self, runtime: SimRuntime) -> None:
        self.lock = CallLock(runtime)
        self.runtime = runtime
        self.done: list[int] = []
        self.broken: list[int] = []
        self.tasks: list[SimTask] = [
            runtime.spawn(lambda n=n: self.call(n), "call")  # type: ignore[misc]
            for n in range(3)
        ]

    def call(self, number: int) -> None:
        try:
            with self.lock.taken():
                self.runtime.sleep(1)
                self.done.append(number)
        except KeyboardInterrupt:
            self.broken.append(number)

    def finish(self) -> None:
        for task in self.tasks:
            task.join()


@pytest.mark.parametrize("seed", range(5))
def test_one_call_at_a_time_has_the_lock(seed: int) -> None:
    simulation = Simulation(seed)

    def main() -> None:
        calls = Calls(simulation.process("one"))
        calls.finish()
        assert sorted(calls.done) == [0, 1, 2]
        assert simulation.now == pytest.approx(3, abs=0.01)
        with pytest.raises(ValueError, match="wrong"), calls.lock.taken():
            raise ValueError("wrong")
        with calls.lock.taken():
            pass

    simulation.run(main)


@pytest.mark.parametrize("seed", range(5))
def test_a_caller_that_is_interrupted_while_it_waits_does_not_keep_the_lock(seed: int) -> None:
    simulation = Simulation(seed)

    def main() -> None:
        process = simulation.process("one")
        calls = Calls(process)
        process.sleep(0.5)
        waiting = [task for task in calls.tasks if "notification" in task.waits_for]
        assert len(waiting) == 2
        simulation.interrupt(waiting[0])
        calls.finish()
        assert (len(calls.done), len(calls.broken)) == (2, 1)

    simulation.run(main)


A = b"\1AAAAA"


class Refuses:
    def accept(self, call: ProduceRequest) -> None:
        raise KeyboardInterrupt


def test_a_partition_whose_accept_was_interrupted_gets_a_marker() -> None:
    current = PublisherTransaction(A, None, SystemRuntime())
    with pytest.raises(KeyboardInterrupt):
        current.accept("p-00000", Refuses(), ProduceRequest(b"", 0, b"", 0))  # type: ignore[arg-type]
    assert current.clocks == {"p-00000": 2}


def fail_a_call(current: PublisherTransaction, error: Exception, *, accepted: int) -> None:
    def call() -> None:
        with current.one_call():
            for _ in range(accepted):
                with pytest.raises(KeyboardInterrupt):
                    current.accept("p-00000", Refuses(), ProduceRequest(b"", 0, b"", 0))  # type: ignore[arg-type]
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
