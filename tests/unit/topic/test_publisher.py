"""Messages and transactions: all of one or nothing, whenever its publisher dies."""

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
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.publisher import Publisher
from opendata_buffer.topic.topic import Topic
from opendata_buffer.topic.transaction import AckIntents
from tests.unit.topic.world import URL, WAIT_S, delivered, producing, records, topic_in

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
        manifest = store.get(f"{name}/manifest")
        assert isinstance(manifest, Blob)
        last = parse_location(Manifest.parse(manifest.data).locations()[-1], name)
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
        for location in Manifest.parse(store.get("p-00001-05mv/manifest").data).locations()  # type: ignore[union-attr]
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


def test_a_fault_in_the_middle_of_applying_is_mended_by_applying_again(store: Faulty) -> None:
    with opened(store) as publisher:
        all_published(publisher)
        intents = publisher.build_ack_intents(WAIT_S)

        def fail(operation: str, key: str) -> None:
            if key == "p-00001-05mv/manifest" and operation == "put_if":
                raise PermanentStorageError("access denied")

        store.before = fail
        with pytest.raises(PermanentStorageError):
            publisher.apply(intents)
        assert still_open(store) == ["p-00001-05mv"]
        store.before = lambda operation, key: None
        publisher.apply(intents)
        assert seen(store) == ENTRIES


def test_what_is_applied_in_part_can_only_be_applied_and_not_rolled_back(store: Faulty) -> None:
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


def test_intents_are_not_overtaken_by_the_next_transaction(store: Faulty) -> None:
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


def test_intents_of_a_name_are_not_applied_past_its_record(store: Faulty) -> None:
    publisher = opened(store, "billing")
    all_published(publisher)
    saved = publisher.build_ack_intents(WAIT_S).to_json()
    with opened(store) as nameless, pytest.raises(InvalidInput, match="of publisher 'billing'"):
        nameless.apply(AckIntents.from_json(saved))
    assert seen(store) == []
    publisher.commit()
    assert seen(store) == ENTRIES
    publisher.close()


def test_a_nameless_publisher_does_not_commit_by_itself(store: Faulty) -> None:
    with opened(store) as publisher, pytest.raises(InvalidInput, match="or give it a name"):
        publisher.commit()


@pytest.mark.parametrize("name", ["", "a/b", "x" * 191])
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


def test_a_commit_whose_answer_is_lost_is_told_as_unknown_and_decided_by_the_next_instance(
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
    assert Transaction("publisher.billing", 0).app == "publisher.billing"


def test_a_topic_object_will_do(store: Faulty) -> None:
    with Publisher(Topic.open(URL, store=store), config=producing()) as publisher:
        publisher.publish_committed([b"1"]).watcher.await_durable(WAIT_S)
    assert seen(store) == [b"1"]


def test_a_topic_that_is_not_there_is_told() -> None:
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


def test_a_store_that_is_down_for_a_moment_ends_no_publisher(store: Faulty) -> None:
    with opened(store, "billing") as publisher:
        all_published(publisher)
        publisher.build_ack_intents(WAIT_S)
        failures = ["p-00001-05mv/"] * 3

        def fail(operation: str, key: str) -> None:
            if operation == "put" and failures and key.startswith(failures[-1]):
                failures.pop()
                raise TransientStorageError("503 SlowDown")

        store.before = fail
        publisher.commit(WAIT_S)
        assert failures == []
    assert seen(store) == ENTRIES
