"""Who can read the queue, and reach its broker, cannot write by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer.broker.broker import Broker
from opendata_buffer.broker.client import Appended
from opendata_buffer.broker.dispatcher import Dispatcher
from opendata_buffer.broker.secure_channel import BrokerEnd, ClientEnd, KeyPair, ProtocolError
from opendata_buffer.broker.server import Session
from opendata_buffer.broker.write_proof import write_proof_folder
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import (
    CONFIG,
    connect,
    connected,
    entries,
    eventually,
    hosting,
    queued,
    serving,
    soon,
)
from tests.unit.broker.wired import KEYS, NAME, Client, made

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


class ReadOnly(MemoryStore):
    """A store whose policy denies this process to write."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        raise PermanentStorageError(f"403 for {key}")


def test_a_client_that_may_not_write_is_told_so_by_its_store() -> None:
    with serving() as (_, broker_record, _):
        reader = connect(broker_record)
        with pytest.raises(PermanentStorageError, match=f"403 for {FOLDER}"):
            reader.show_may_write(ReadOnly(), CONFIG.manifest_path)
        reader.close()


class Wired(Client):
    """A client that writes what it likes, and asks once."""

    def ask_for(self, store: MemoryStore, data: bytes | None, name: str = NAME) -> str:
        if data is not None:
            store.put(FOLDER + name, data)
        self.send({"op": "written", "n": 1})
        answer = self.answered()[0]
        return str(answer["op"] if answer["op"] == "granted" else answer["error"]["name"])


def test_of_what_is_found_only_the_bytes_for_this_connection_count() -> None:
    store = MemoryStore()

    def answered(data: bytes | None, name: str = NAME) -> tuple[str, bool]:
        client = Wired(made(store), may_write=False)
        found = client.ask_for(store, data, name), client.session.may_write
        store.delete_many([FOLDER + name])
        return found

    client = Wired(made(store), may_write=False)
    right = client.end.write_proof()
    assert answered(right) == ("granted", True)
    assert answered(None) == ("ObjectNotFound", False)
    assert answered(right, NAME[:-1] + "X") == ("ObjectNotFound", False)
    for wrong in (b"", right[:-1], right + b"0", b"x" * 1_000_000):
        assert answered(wrong)[1] is False


def test_a_copy_of_another_client_s_object_proves_nothing() -> None:
    """A reader sees the objects of others; the keys, and with them the bytes, are not the same."""
    store = MemoryStore()
    broker = made(store)
    writer = Wired(broker, may_write=False)
    end = BrokerEnd(b"s" * 32, 1, KEYS, b"b" * 32, NAME)
    reader = ClientEnd(b"s" * 32, 1, KeyPair.of(b"r" * 32), KEYS.share)
    answers: list[dict[str, Any]] = []
    session = Session(broker, end, answers.append)
    reader.finish(session.welcome(reader.prove(end.hello())))
    store.put(FOLDER + NAME, writer.end.write_proof())
    session.received(reader.seal({"op": "written", "n": 1}))
    assert eventually(lambda: answers)[0]["op"] == "failed"
    assert not session.may_write


def test_a_client_asks_once_and_many_at_once_are_all_answered() -> None:
    store = MemoryStore()
    broker = made(store)
    clients = [Wired(broker, may_write=False) for _ in range(40)]
    store.put(FOLDER + NAME, clients[0].end.write_proof())
    for client in clients:
        client.send({"op": "written", "n": 1})
    for client in clients:
        assert client.answered()[0]["op"] in ("granted", "failed")
    with pytest.raises(ProtocolError, match="for the second time"):
        clients[1].send({"op": "written", "n": 2})


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
    client = Wired(made(store), may_write=False)
    client.ask_for(store, client.end.write_proof())
    assert str(error) in client.answers[0]["error"]["text"]
    assert not client.session.may_write


def test_a_broker_deletes_what_clients_of_earlier_ones_left_and_begins_in_any_case() -> None:
    store = MemoryStore()
    for number in range(3):
        store.put(f"{FOLDER}{number}", b"left")
    with serving(store):
        assert keys_of(store) == []
    with serving(Failing(StorageError("503"))) as (broker, _, _):
        assert broker.stats()["commits"] == 0


@pytest.mark.parametrize(
    ("manifest", "folder"),
    [("ingest/manifest", FOLDER), ("é" * 512, "é" * 494 + "._clients/")],
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
