from __future__ import annotations

import pickle

import pytest

from buffer_sink.messages import FIRST_CLOCK, TopicWrite
from buffer_sink.writer import find_topic
from opendata_buffer.errors import CorruptData, PermanentStorageError, TransientStorageError
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.messages.message_ids import CONTINUE_TXN, parse_uuid
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.topic import Topic
from opendata_buffer.transactions.markers import ROLL_BACK

ULID = "01JD0000000000000000000001"


def write() -> TopicWrite:
    description = TopicDescription.new(ULID, 3).drained("p-00001-05mv", 0)
    return TopicWrite.planned(description, ManualRuntime())


def test_a_write_goes_to_the_active_partitions_and_knows_the_others() -> None:
    made = pickle.loads(pickle.dumps(write()))
    assert made.active == ("p-00000-04pn", "p-00002-0bvb")
    assert set(made.names) == {"p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"}


def test_each_attempt_has_a_producer_and_an_app_of_its_own() -> None:
    runtime = ManualRuntime()
    description = TopicDescription.new(ULID, 1)
    made = [TopicWrite.planned(description, runtime) for _ in range(50)]
    assert len({each.producer for each in made}) == 50
    assert len({each.app for each in made}) == 50
    assert all(len(each.producer) == 6 for each in made)
    assert made[0].transaction(None) == Transaction(made[0].app, 0)
    assert made[0].transaction(Transaction("q", 7)) == Transaction("q", 7)


def test_clocks_rise_in_the_order_in_which_a_partition_gets_the_batches() -> None:
    made = write()
    clocks = [made.clock(task, index) for task in (0, 1, 2**31 - 1) for index in (0, 1, 5_000)]
    assert clocks == sorted(set(clocks))
    assert clocks[0] == FIRST_CLOCK
    assert ROLL_BACK < FIRST_CLOCK
    assert clocks[-1] < 2**64 - 1


def test_the_name_of_a_batch_says_whose_it_is_and_that_it_is_undecided() -> None:
    made = write()
    named = parse_location(
        made.location("p-00002-0bvb", ULID, Transaction("q", 7), 9), "p-00002-0bvb"
    )
    assert named is not None
    assert named.txn == Transaction("q", 7)
    assert named.message is not None
    said = parse_uuid(named.message)
    assert (said.producer, said.clock, said.flags) == (made.producer, 9, CONTINUE_TXN)


def test_a_topic_is_found_by_one_read() -> None:
    store = MemoryStore()
    assert find_topic(store) is None
    topic = Topic.create("memory://x", 4, store=store, runtime=ManualRuntime())
    assert find_topic(store) == topic.description


def test_who_may_not_look_at_the_root_may_still_have_a_queue() -> None:
    class Forbidden(MemoryStore):
        def get(self, key: str, **options: object) -> object:  # type: ignore[override]
            raise PermanentStorageError("403")

    assert find_topic(Forbidden()) is None


def test_a_store_that_does_not_answer_is_not_taken_for_one_without_a_topic() -> None:
    class Silent(MemoryStore):
        def get(self, key: str, **options: object) -> object:  # type: ignore[override]
            raise TransientStorageError("503")

    with pytest.raises(TransientStorageError):
        find_topic(Silent())


def test_a_topic_that_cannot_be_read_is_named() -> None:
    store = MemoryStore()
    store.put("_topic.json", b"{}")
    with pytest.raises(CorruptData, match=r"'_topic\.json'"):
        find_topic(store)
