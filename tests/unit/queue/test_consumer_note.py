"""The note that names the consumer of a queue."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest.mock import Mock

import pytest

from opendata_buffer import Consumer, Producer, outcomes
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from opendata_buffer.errors import CorruptData, PermanentStorageError
from opendata_buffer.queue.consumer_note import (
    amend_consumer_info,
    process_runs,
    read_consumer_info,
    write_consumer_info,
)
from opendata_buffer.stores.base import PutOutcome, read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

KEY = "ingest/_consumer.json"
CONFIG = ConsumerConfig(
    store="memory://q", gc=GarbageCollectorConfig(enabled=False), create_if_missing=True
)


def fields_of(store: MemoryStore) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_bytes(store, KEY))
    return found


def test_a_consumer_that_claims_a_queue_writes_its_name() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    with Consumer(CONFIG, store=store, runtime=runtime, program="a test"):
        named = fields_of(store)
    assert named == {
        "version": 1,
        "epoch": 1,
        "host": os.uname().nodename,
        "process": os.getpid(),
        "program": "a test",
        "query": "",
        "since_ms": runtime.now_ms(),
    }
    with Consumer(CONFIG, store=store, runtime=runtime):
        pass
    found = read_consumer_info(store, CONFIG, runtime)
    assert found is not None
    assert (found.epoch, found.program) == (2, "Python")


def test_close_is_noted_unless_the_consumer_was_fenced() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    first = Consumer(CONFIG, store=store, runtime=runtime)
    second = Consumer(CONFIG, store=store, runtime=runtime)
    first.close()
    found = read_consumer_info(store, CONFIG, runtime)
    assert found is not None
    assert not found.has_ended
    second.close()
    found = read_consumer_info(store, CONFIG, runtime)
    assert found is not None
    assert found.has_ended
    assert not found.may_run()
    # The next consumer, of any release, keeps the field but has another epoch.
    write_consumer_info(store, CONFIG, runtime, 3, program="next")
    found = read_consumer_info(store, CONFIG, runtime)
    assert found is not None
    assert not found.has_ended


def test_a_process_of_another_user_counts_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    assert process_runs(1)


def test_a_consumer_whose_last_acknowledgement_failed_is_not_noted_as_closed() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    with Producer(ProducerConfig(store="memory://q"), store=store) as producer:
        producer.produce([b"a"]).result(20)
    consumer = Consumer(CONFIG, store=store, runtime=runtime)
    batch = consumer.next_batch()
    assert batch is not None
    batch.ack()
    store.put("ingest/manifest", b"damaged")
    with pytest.raises(CorruptData):
        consumer.close()
    found = read_consumer_info(store, CONFIG, runtime)
    assert found is not None
    assert not found.has_ended


def test_a_late_fenced_consumer_does_not_overwrite_the_note_of_its_successor() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    write_consumer_info(store, CONFIG, runtime, 2, program="second")
    write_consumer_info(store, CONFIG, runtime, 1, program="first")
    amend_consumer_info(store, CONFIG, runtime, 1, query="a query of the first")
    assert (fields_of(store)["program"], fields_of(store)["query"]) == ("second", "")
    amend_consumer_info(store, CONFIG, runtime, 2, query="q")
    assert fields_of(store)["query"] == "q"


def test_an_unreadable_note_is_an_error_that_does_not_stop_a_consumer() -> None:
    data = b'{"version": 1, "epoch": "1"}'
    store, runtime = MemoryStore(), ManualRuntime()
    store.put(KEY, data)
    with pytest.raises(CorruptData, match="delete it, and the next consumer writes it again"):
        read_consumer_info(store, CONFIG, runtime)
    with Consumer(CONFIG, store=store, runtime=runtime) as consumer:
        assert consumer.epoch == 1
    assert store.get(KEY).data == data  # type: ignore[union-attr]


class Refusing(MemoryStore):
    """Refuses to store the note."""

    def __init__(self, answer: Exception | PutOutcome) -> None:
        super().__init__()
        self.answer = answer
        self.refused = 0

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if key != KEY:
            return super().put_if(key, data, condition)
        self.refused += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [PermanentStorageError("no"), outcomes.Unknown("lost")])
def test_a_consumer_can_read_although_its_note_cannot_be_written(
    answer: Exception | PutOutcome,
) -> None:
    store, runtime = Refusing(answer), ManualRuntime()
    began = runtime.monotonic()
    with Consumer(CONFIG, store=store, runtime=runtime) as consumer:
        assert consumer.epoch == 1
    assert store.refused
    assert runtime.monotonic() - began < 3
    assert read_consumer_info(store, CONFIG, runtime) is None
