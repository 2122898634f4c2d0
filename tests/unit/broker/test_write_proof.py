"""Who can read the queue, and reach its broker, cannot write by it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer.broker import protocol
from opendata_buffer.broker.broker import Broker
from opendata_buffer.broker.client import Appended
from opendata_buffer.broker.dispatcher import Dispatcher
from opendata_buffer.broker.protocol import ProtocolError, write_proof_folder
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import (
    CONFIG,
    NAME,
    Client,
    Hooked,
    connect,
    connected,
    entries,
    eventually,
    hosting,
    made,
    queued,
    serving,
    soon,
)

FOLDER = "ingest/manifest._clients/"


def keys_of(store: MemoryStore) -> list[str]:
    return [each.key for each in store.list(FOLDER).objects]


def test_a_client_that_writes_the_object_may_append_and_nothing_stays() -> None:
    store = MemoryStore()
    with serving(store) as (_, broker_record, _), connected(broker_record) as client:
        assert client.append(entries("a"), since=None, begin_by=soon()) == Appended(0)
        eventually(lambda: not keys_of(store))
    assert queued(store) == ["ingest/a.batch"]


REQUESTS: list[dict[str, Any]] = [
    {"op": "append", "n": 1, "valid_ms": 1, "clock": [0.0, 0], "entries": [["ingest/a", []]]},
    {"op": "renew", "n": [1], "clock": [0.0, 0]},
    {"op": "pause", "n": 1, "writes": 1},
    {"op": "claim", "n": 1, "max": 9, "wait_ms": 0, "worker": "w", "timeout_ms": 1},
    {"op": "finish", "n": 1, "how": "done", "sequence": 0, "token": 1, "reason": "", "rest_ms": 0},
    {"op": "beat", "n": 1, "tokens": []},
]


@pytest.mark.parametrize("request_", REQUESTS, ids=[str(each["op"]) for each in REQUESTS])
def test_who_can_only_read_appends_claims_and_finishes_nothing(request_: dict[str, Any]) -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    queue = Queue(store, CONFIG, runtime=runtime, role="broker")
    dispatcher = Dispatcher(store, ConsumerConfig(store="memory://unused"), runtime)
    broker = Broker(store, queue, runtime, "ingest", dispatcher=dispatcher)
    reader = Client(broker, may_write=False)
    with pytest.raises(ProtocolError, match="has not shown that it may write"):
        reader.send(request_)
    assert dispatcher._task is None  # The queue's epoch is as it was.
    assert (broker.entries_waiting, broker.pauses) == (0, 0)


def test_who_can_only_read_gets_the_counters() -> None:
    with serving() as (_, broker_record, _):
        reader = connect(broker_record)
        assert (reader.stats(30.0) or {})["clients"] == 1
        reader.close()


def test_a_client_that_may_not_write_is_told_so_by_its_store() -> None:
    def deny(key: str, data: bytes | memoryview) -> None:
        raise PermanentStorageError(f"403 for {key}")

    store = MemoryStore()
    store.put = deny  # type: ignore[method-assign]
    with serving() as (_, broker_record, _):
        reader = connect(broker_record)
        with pytest.raises(PermanentStorageError, match=f"403 for {FOLDER}"):
            reader.show_may_write(store, CONFIG.manifest_path)
        reader.close()


def told(store: MemoryStore, client: Client, data: bytes | None, name: str = NAME) -> str:
    """What the broker says to a client once these bytes are there."""
    if data is not None:
        store.put(FOLDER + name, data)
    client.send({"op": "written", "n": 1})
    (answer,) = client.answered()
    store.delete_many([FOLDER + name])
    assert client.session.may_write is (answer["op"] == "granted")
    return str(answer["op"] if client.session.may_write else answer["error"]["text"])


def test_only_the_bytes_for_this_connection_count_and_a_client_asks_once() -> None:
    store = MemoryStore()
    broker = made(store)
    clients = [Client(broker, may_write=False) for _ in range(8)]
    right = clients[0].end.write_proof()
    assert told(store, clients.pop(), right) == "granted"
    assert f"{FOLDER}{NAME}" in told(store, clients.pop(), None)
    assert f"{FOLDER}{NAME}" in told(store, clients.pop(), right, NAME[:-1] + "X")
    for wrong in (b"", right[:-1], right + b"0", b"x" * 1_000_000):
        assert FOLDER in told(store, clients[-1], wrong)
        with pytest.raises(ProtocolError, match="for the second time"):
            clients.pop().send({"op": "written", "n": 2})


def test_a_copy_of_another_client_s_object_proves_nothing() -> None:
    """A reader sees the objects of others; the keys, and with them the bytes, are not the same."""
    store = MemoryStore()
    broker = made(store)
    writer, reader = (Client(broker, may_write=False, nonce=each * 32) for each in (b"w", b"r"))
    assert "not written for this" in told(store, reader, writer.end.write_proof())
    assert told(store, writer, writer.end.write_proof()) == "granted"


class Failing(MemoryStore):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def list(self, prefix: str, **options: Any) -> Any:
        raise self.error

    def get(self, key: str, **options: Any) -> Any:
        if key.startswith(FOLDER):
            raise self.error
        return super().get(key, **options)


@pytest.mark.parametrize("error", [TransientStorageError("503"), ValueError("a bug")], ids=str)
def test_a_store_that_fails_grants_nothing_and_the_client_is_told(error: Exception) -> None:
    store = Failing(error)
    assert str(error) in told(store, Client(made(store), may_write=False), None)


def test_a_store_that_stalls_takes_no_more_threads_than_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "MAX_UNDER_WAY", 2)
    stalls = threading.Event()
    store = Hooked(NAME)
    store.on_read = lambda: stalls.wait(60)
    broker = made(store)
    clients = [Client(broker, may_write=False) for _ in range(3)]
    store.put(FOLDER + NAME, clients[0].end.write_proof())
    for client in clients[:2]:
        client.send({"op": "written", "n": 1})
    assert "too many clients" in told(store, clients[2], None)
    stalls.set()
    for client in clients[:2]:
        client.answered()
    late = Client(broker, may_write=False)
    assert told(store, late, late.end.write_proof()) == "granted"


def test_a_broker_deletes_what_clients_of_earlier_ones_left_and_begins_in_any_case() -> None:
    store = MemoryStore()
    for number in range(3):
        store.put(f"{FOLDER}{number}", b"left")
    with serving(store):
        assert keys_of(store) == []
    with serving(Failing(StorageError("503"))) as (broker, _, _):
        assert broker.stats()["commits"] == 0


@pytest.mark.parametrize(
    ("manifest", "folder"), [("ingest/manifest", FOLDER), ("é" * 512, "é" * 494 + "._clients/")]
)
def test_the_longest_manifest_path_leaves_room_for_a_name(manifest: str, folder: str) -> None:
    assert write_proof_folder(manifest) == folder
    assert len(f"{folder}{NAME}".encode()) <= 1024


def test_a_process_that_took_the_port_of_a_dead_broker_gets_no_append() -> None:
    """It knows the secret, as whoever reads; it has another key than the announced one."""
    store = MemoryStore()
    with hosting(store) as ours:
        announced = eventually(lambda: ours.serving)
        with serving(secret=announced.secret) as (_, squatting, _):
            record = replace(announced, address=squatting.address, term=squatting.term)
            with pytest.raises(ProtocolError, match="not the announced broker"):
                connect(record)
