"""The commit records: claimed before the first append, raised after each, never lowered."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_sink.records import CommitRecords
from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, InvalidInput, TransientStorageError
from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.transactions.commit_record import CommitRecord, record_key
from tests.unit.scripted import ScriptedStore, applied_answer_lost, before

CONFIG = QueueConfig(store="memory://x", data_path_prefix="p")
KEY = record_key("p", "job")


def records(store: Any) -> CommitRecords:
    return CommitRecords(store, CONFIG, ManualRuntime())


def stored(store: MemoryStore) -> CommitRecord:
    return CommitRecord.from_json(store.get(KEY).data)


def test_a_claim_is_on_storage_before_anything_is_appended() -> None:
    store = MemoryStore()
    records(store).claim("job", "one")
    assert stored(store) == CommitRecord(-1, 0, "one")


def test_without_a_query_nothing_is_written() -> None:
    store = MemoryStore()
    assert records(store).claim("job", None) is None
    assert store.list("").objects == ()


def test_a_record_rises_and_keeps_its_query() -> None:
    store = MemoryStore()
    mine = records(store)
    mine.claim("job", "one")
    mine.raise_to("job", 0, 3, "one")
    mine.claim("job", "one")
    mine.raise_to("job", 1, 5, "one")
    assert stored(store) == CommitRecord(1, 5, "one")


def test_of_two_queries_that_begin_at_once_one_is_refused() -> None:
    store = ScriptedStore()
    late = records(store)
    # It has read that there is no record; before its claim lands, the other one's does.
    store.script = [before(applied_first, lambda _: records(store).claim("job", "one"))]
    with pytest.raises(InvalidInput, match=r"belongs to query one.*this is query two"):
        late.claim("job", "two")
    assert stored(store).query == "one"


def applied_first(
    store: ScriptedStore, key: str, data: bytes, when: Absent | IfVersion
) -> PutOutcome:
    return store.really_put_if(key, data, when)


def test_a_claim_whose_answer_was_lost_is_found() -> None:
    store = ScriptedStore(applied_answer_lost)
    assert records(store).claim("job", "one") == CommitRecord(-1, 0, "one")


def test_a_claim_that_cannot_be_written_stops_the_append() -> None:
    class Down(MemoryStore):
        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            return outcomes.Unknown("no answer")

    with pytest.raises(TransientStorageError, match="Nothing was appended"):
        records(Down()).claim("job", "one")


def test_an_unreadable_record_is_refused_with_its_key() -> None:
    store = MemoryStore()
    store.put(KEY, b"{}")
    with pytest.raises(CorruptData, match=r"'p/app=job/_commit.json'.*not readable"):
        records(store).claim("job", "one")


def test_a_record_that_its_operator_deleted_is_made_anew() -> None:
    store = MemoryStore()
    mine = records(store)
    mine.claim("job", "one")
    mine.raise_to("job", 7, 9, "one")
    store.delete_many([KEY])
    assert mine.claim("job", "one") == CommitRecord(-1, 0, "one")


def test_a_record_that_cannot_be_raised_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    mine = records(store)
    mine.claim("job", "one")
    store.put_if = lambda *_: outcomes.Unknown("no answer")  # type: ignore[method-assign,assignment]
    mine.raise_to("job", 0, 3, "one")
    assert "commit record p/app=job/_commit.json was not written" in caplog.text
