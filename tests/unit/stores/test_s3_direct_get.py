"""Reads that go past boto3: that they do, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    CorruptData,
    ObjectNotFound,
)
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob, NotModified
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer
from tests.support.s3_server import Answer, Fault, S3Server

DATA = b"0123456789" * 1_000


@pytest.fixture
def store(s3_server: S3Server) -> S3Store:
    """A store that has read something: boto3 need not be asked again."""
    options = StoreOptions(endpoint_url=s3_server.endpoint, max_attempts=2)
    made = S3Store(s3_server.bucket, "root", options, runtime=ManualRuntime())
    made.put("warm", b"")
    made.get("warm")
    return made


class Boto:
    """Counts what boto3's own ``get_object`` is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: S3Store) -> None:
        self.asked = 0
        client = store._client.get()
        original = client.get_object

        def get_object(**arguments: Any) -> Any:
            self.asked += 1
            return original(**arguments)

        monkeypatch.setattr(client, "get_object", get_object)


@pytest.fixture
def boto(monkeypatch: pytest.MonkeyPatch, store: S3Store) -> Boto:
    return Boto(monkeypatch, store)


def data_of(blob: Blob | NotModified) -> bytes:
    assert isinstance(blob, Blob)
    return blob.data


def test_only_the_first_read_goes_through_boto3(store: S3Store, boto: Boto) -> None:
    store.put("a", DATA)
    blob = store.get("a")
    assert isinstance(blob, Blob)
    assert blob.data == DATA
    assert abs(blob.last_modified_ms - SystemRuntime().now_ms()) < 60_000
    assert store.get("a", if_changed=blob.version) == NotModified()
    assert data_of(store.get("a", byte_range=(3, 7))) == b"3456"
    with pytest.raises(ObjectNotFound):
        store.get("missing")
    with pytest.raises(CorruptData, match="10000 bytes to read, more than the limit of 99"):
        store.get("a", max_bytes=99)
    assert boto.asked == 0


@pytest.mark.parametrize("key", ["a b", "ü/%41", "a+b&c=d?e#f", "~x/-._!*'()", "雪 /;:@$,"])
def test_f24_keys_are_written_in_urls_as_boto3_does(store: S3Store, boto: Boto, key: str) -> None:
    store.put(key, key.encode())
    assert data_of(store.get(key)) == key.encode()
    assert boto.asked == 0


@pytest.mark.parametrize(
    "fault",
    [
        Fault(500),
        Fault(503, code="SlowDown"),
        Fault(403, code="ExpiredToken"),
        Fault(Answer.CLOSE),
        Fault(Answer.RESET),
    ],
    ids=lambda fault: str(fault.answer),
)
def test_what_fails_is_asked_again_by_boto3(
    s3_server: S3Server, store: S3Store, boto: Boto, fault: Fault
) -> None:
    store.put("a", DATA)
    s3_server.inject(fault, method="GET")
    assert data_of(store.get("a")) == DATA
    assert boto.asked == 1
    assert data_of(store.get("a")) == DATA
    assert boto.asked == 1


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunks"])
@pytest.mark.parametrize("kind", ["crc32", "sha1", "sha256"])
def test_f36_every_checksum_that_botocore_knows_is_compared(kind: str, length: bool) -> None:
    """Other clients choose other algorithms; AWS returns the one with which an object is stored."""
    headers = {"ETag": '"1"', f"x-amz-checksum-{kind}": "AAAA"}
    spoilt = Reply(200, b"x", headers)
    if not length:
        spoilt = Reply(200, b"1\r\nx\r\n0\r\n\r\n", headers | {"transfer-encoding": "chunked"})
    server = ScriptedServer(Reply(200, b"warm", {"ETag": '"1"'}), spoilt, spoilt)
    with server.running() as url:
        options = StoreOptions(endpoint_url=url, max_attempts=2)
        store = S3Store("bucket", options=options, runtime=ManualRuntime())
        store.get("warm")
        with pytest.raises(CorruptData, match="checksum"):
            store.get("a", max_bytes=100)
    assert len(server.asked) == 3


@pytest.mark.parametrize("answer", [Answer.TRUNCATE, Answer.CORRUPT])
def test_f36_a_body_that_breaks_off_or_is_garbled_is_read_again(
    s3_server: S3Server, store: S3Store, boto: Boto, answer: Answer
) -> None:
    store.put("a", DATA)
    s3_server.inject(Fault(answer), method="GET")
    before = s3_server.count("GET")
    assert data_of(store.get("a")) == DATA
    assert s3_server.count("GET") == before + 2
    assert boto.asked == 0


def test_connections_are_used_again(s3_server: S3Server, store: S3Store) -> None:
    store.put("a", DATA)
    store.get("a")
    session = store._client.get()._endpoint.http_session  # type: ignore[attr-defined]
    pools = session._manager.pools
    (pool,) = map(pools.get, list(pools.keys()))
    before = pool.num_connections
    for _ in range(10):
        store.get("a")
        store.get("a", byte_range=(0, 5))
        with pytest.raises(ObjectNotFound):
            store.get("missing")
    assert pool.num_connections == before


def test_many_threads_read_at_once(store: S3Store, boto: Boto) -> None:
    for n in range(8):
        store.put(f"k{n}", b"%d" % n * 1_000)
    wrong: list[object] = []

    def read(n: int) -> None:
        for _ in range(20):
            if data_of(store.get(f"k{n}")) != b"%d" % n * 1_000:
                wrong.append(n)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert boto.asked == 0


def test_a_copy_in_another_process_begins_with_boto3(s3_server: S3Server) -> None:
    store = S3Store("bucket", options=StoreOptions(endpoint_url=s3_server.endpoint))
    store.put("a", DATA)
    store.get("a")
    assert store._direct._route is not None
    for other in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):
        assert other._direct._route is None
        assert data_of(other.get("a")) == data_of(other.get("a")) == DATA
        assert other._direct._route is not None


def test_an_answer_without_a_checksum_or_a_length_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ScriptedServer(Reply(200, b"body", {"ETag": '"1"', "x-amz-checksum-crc32": "AAAA-2"}))
    with server.running() as url:
        store = S3Store("bucket", options=StoreOptions(endpoint_url=url))
        for _ in range(2):
            assert data_of(store.get("a")) == b"body"
    assert server.asked[1].headers["x-amz-checksum-mode"] == "ENABLED"
