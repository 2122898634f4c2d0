"""GCS when answers are lost or unusual; the sunny side is in the contract suite."""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.runtime import SystemRuntime, deadline
from opendata_buffer.stores import (
    ABSENT,
    Applied,
    Blob,
    IfVersion,
    NotModified,
    Unknown,
    Vanished,
    VersionConflict,
)
from opendata_buffer.stores.gcs import GcsStore
from opendata_buffer.stores.gcs_client import PUBLIC, connect
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer

LOST = Reply(0)
GONE = Reply(404, b'{"error": {"message": "No such object: bucket/key"}}')
NO_BUCKET = Reply(
    404,
    b'{"error": {"message": "The specified bucket does not exist.",'
    b' "errors": [{"reason": "notFound"}]}}',
)
SLOW_DOWN = Reply(429, b'{"error": {"message": "slow down"}}')
WRITTEN = Reply(200, b'{"generation": "7"}')
FOUND = Reply(200, b"bytes", {"x-goog-generation": "7"})

Script = Callable[..., tuple[GcsStore, ScriptedServer]]


@pytest.fixture
def script() -> Iterator[Script]:
    """Makes a store whose server gives these answers."""
    with ExitStack() as running:

        def make(*replies: Reply, **options: Any) -> tuple[GcsStore, ScriptedServer]:
            server = ScriptedServer(*replies)
            url = running.enter_context(server.running())
            settings = StoreOptions(endpoint_url=url, **{"max_attempts": 3, **options})
            return GcsStore("bucket", "root", settings, runtime=ManualRuntime()), server

        yield make


@pytest.mark.parametrize("condition", [ABSENT, IfVersion("5")])
@pytest.mark.parametrize("answer", [LOST, Reply(500), Reply(503), Reply(200, b"", {})])
def test_f1_a_lost_answer_to_a_conditional_write_is_unknown_after_one_request(
    script: Script, condition: Any, answer: Reply
) -> None:
    store, server = script(answer)
    if answer.status == 200:
        with pytest.raises(UnsafeStore, match="without a generation"):
            store.put_if("m", b"x", condition)
    else:
        assert isinstance(store.put_if("m", b"x", condition), Unknown)
    assert len(server.asked) == 1


def test_the_condition_is_the_generation_and_0_for_no_object(script: Script) -> None:
    store, server = script(WRITTEN)
    assert store.put_if("m", b"x", ABSENT) == Applied("7")
    assert store.put_if("m", b"x", IfVersion("5")) == Applied("7")
    store.put("m", b"x")
    # What is no generation must not become "no object", or no condition at all.
    store.put_if("m", b"x", IfVersion("0"))
    store.put_if("m", b"x", IfVersion('"etag"'))
    asked = [each.path.partition("ifGenerationMatch=")[2] for each in server.asked]
    assert asked == ["0", "5", "", "1", "1"]


def test_an_upload_carries_its_checksum_and_is_kept_by_no_cache(script: Script) -> None:
    store, server = script(WRITTEN)
    store.put("a#1/ü", b"--bytes\r\n")
    (asked,) = server.asked
    _, about, content, _ = asked.body.split(
        b"--" + asked.headers["content-type"].partition("boundary=")[2].encode()
    )
    assert json.loads(about.partition(b"\r\n\r\n")[2]) == {
        "name": "root/a#1/ü",
        "md5Hash": "kbOD4tDT/fY7NayaDqnr8g==",
        "cacheControl": "no-store",
    }
    assert content.partition(b"\r\n\r\n")[2] == b"--bytes\r\n\r\n"


@pytest.mark.parametrize(("second", "outcome"), [(GONE, Vanished()), (FOUND, VersionConflict())])
def test_f4_412_is_read_to_tell_whether_the_object_is_gone(
    script: Script, second: Reply, outcome: object
) -> None:
    store, server = script(Reply(412), second)
    assert store.put_if("m", b"x", IfVersion("5")) == outcome
    assert [each.method for each in server.asked] == ["POST", "GET"]


def test_a_creation_that_meets_an_object_is_a_conflict(script: Script) -> None:
    store, server = script(Reply(412))
    assert store.put_if("m", b"x", ABSENT) == VersionConflict()
    assert len(server.asked) == 1


def test_a_conditional_write_refused_for_its_rate_is_sent_again(script: Script) -> None:
    store, server = script(SLOW_DOWN, SLOW_DOWN, WRITTEN)
    assert store.put_if("m", b"x", IfVersion("5")) == Applied("7")
    assert len(server.asked) == 3


def test_one_that_is_refused_for_its_rate_for_long_is_given_up(script: Script) -> None:
    store, server = script(SLOW_DOWN)
    outcome = store.put_if("m", b"x", IfVersion("5"))
    assert isinstance(outcome, Unknown)
    assert "refused for their rate" in outcome.reason
    assert len(server.asked) > 3


@pytest.mark.parametrize("fault", [LOST, Reply(503), SLOW_DOWN])
def test_reads_and_plain_writes_are_repeated(script: Script, fault: Reply) -> None:
    store, server = script(fault, fault, FOUND)
    assert store.get("k") == Blob(b"bytes", "7", 0)
    assert len(server.asked) == 3
    store, server = script(fault, fault, WRITTEN)
    store.put("k", b"")
    assert len(server.asked) == 3
    assert len({each.body for each in server.asked}) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Reply(503), "503.*The store failed; try again later"),
        (SLOW_DOWN, "one write a second to one object.*broker or a topic"),
        (LOST, "Check the endpoint and the network"),
    ],
)
def test_faults_that_outlive_all_attempts_are_transient(
    script: Script, fault: Reply, message: str
) -> None:
    store, server = script(fault)
    with pytest.raises(TransientStorageError, match=message):
        store.get("k")
    assert len(server.asked) == 3


def test_a_body_that_is_garbled_or_breaks_off_is_read_again(script: Script) -> None:
    sums = {"x-goog-generation": "7", "x-goog-hash": "crc32c=x,md5=Sru+Srk+Sru+Srk+Sru+Sg=="}
    store, server = script(Reply(200, b"garbled", sums), FOUND)
    assert store.get("k") == Blob(b"bytes", "7", 0)
    assert len(server.asked) == 2


def test_a_server_that_ignores_conditions_and_ranges_of_reads_is_understood(
    script: Script,
) -> None:
    store, _ = script(FOUND)
    assert store.get("k", if_changed="7") == NotModified()
    assert store.get("k", if_changed="8") == Blob(b"bytes", "7", 0)
    assert store.get("k", byte_range=(1, 3)) == Blob(b"yt", "7", 0)


def test_a_read_without_a_generation_is_refused(script: Script) -> None:
    store, _ = script(Reply(200, b"bytes"))
    with pytest.raises(UnsafeStore, match="answers without a generation"):
        store.get("k")


def test_a_missing_bucket_is_permanent_for_every_operation(script: Script) -> None:
    store, _ = script(NO_BUCKET)
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b""),
        lambda: store.put_if("k", b"", ABSENT),
        lambda: store.put_if("k", b"", IfVersion("5")),
        lambda: store.list(""),
    ):
        with pytest.raises(PermanentStorageError, match="Create bucket 'bucket' or correct"):
            call()
    (failure,) = store.delete_many(["k"])
    assert "Create bucket 'bucket'" in failure.reason
    store, _ = script(GONE)
    with pytest.raises(ObjectNotFound, match="'k' does not exist in gs://bucket/root"):
        store.get("k")


def test_f6_without_a_date_nothing_looks_older_than_the_newest_object(script: Script) -> None:
    items = [
        {"name": f"root/{name}", "size": "1", "timeCreated": f"2026-01-01T00:00:{name}.9Z"}
        for name in ("10", "20")
    ]
    store, _ = script(Reply(200, json.dumps({"items": items}).encode()))
    listing = store.list("")
    assert [info.key for info in listing.objects] == ["10", "20"]
    assert listing.now_ms == listing.objects[1].last_modified_ms
    assert listing.now_ms % 60_000 == 20_000


def test_a_listing_follows_its_pages_and_asks_for_no_more_than_it_returns(script: Script) -> None:
    def page(*names: str, more: str = "") -> Reply:
        items = [
            {"name": f"root/{name}", "size": "1", "timeCreated": "2026-01-01T00:00:00Z"}
            for name in names
        ]
        return Reply(200, json.dumps({"items": items, "nextPageToken": more}).encode())

    store, server = script(page("a", "b", more="next"), page(more="last"), page("c", "d"))
    listing = store.list("", start_after="a", limit=2)
    assert [info.key for info in listing.objects] == ["b", "c"]
    assert listing.truncated
    assert ["maxResults=3" in each.path for each in server.asked] == [True, False, False]
    assert ["pageToken=" in each.path for each in server.asked] == [False, True, True]


def test_objects_that_cannot_be_deleted_are_returned(script: Script) -> None:
    store, _ = script(Reply(403, b'{"error": {"message": "no"}}'))
    failures = store.delete_many(["a", "b//c"])
    assert [each.key for each in failures] == ["a", "b//c"]
    assert "Allow these credentials to delete objects" in failures[0].reason


@pytest.mark.parametrize(("endpoint", "races"), [(None, 0), ("http://127.0.0.1:9", 3)])
def test_writers_race_anywhere_but_at_google(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, races: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "opendata_buffer.stores.gcs.probe_conditional_writes",
        lambda *_, races, **__: asked.append(races),
    )
    client = connect("", StoreOptions(endpoint_url="http://127.0.0.1:9"))
    client.endpoint = endpoint or PUBLIC
    store = GcsStore(f"bucket-{races}")
    monkeypatch.setattr(store._client, "get", lambda: client)
    store.check_conditional_writes("m")
    store.check_conditional_writes("m")
    assert asked == [races], "once per process"


def test_no_token_is_sent_in_the_clear(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    # Were they looked for, this would fail.
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    store, server = script(FOUND)
    store.get("k")
    assert "authorization" not in server.asked[0].headers


def test_every_call_on_a_silent_store_ends_at_its_deadline() -> None:
    runtime = SystemRuntime()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = StoreOptions(endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = GcsStore("bucket", options=options)
        for call in (
            lambda: store.get("k"),
            lambda: store.put("k", b""),
            lambda: store.list(""),
        ):
            began = time.monotonic()
            with deadline(runtime, 0.1), pytest.raises(TransientStorageError):
                call()
            assert time.monotonic() - began < 5
        with deadline(runtime, 0.1):
            assert isinstance(store.put_if("k", b"", ABSENT), Unknown)
            assert len(store.delete_many(["a", "b"])) == 2


def test_an_option_of_s3_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"region is 'eu'.*gs:// has none: remove it"):
        GcsStore("bucket", options=StoreOptions(region="eu"))


def test_a_key_too_long_with_its_root_is_refused() -> None:
    store = GcsStore("bucket", "r" * 100)
    with pytest.raises(InvalidInput, match="GCS names have at most 1024"):
        store.get("k" * 1_000)


def test_pickling_takes_the_options_and_no_secret(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_CLIENT_SECRET", "hunter2")
    made, _ = script(FOUND)
    store = GcsStore("bucket", "root", made._options)  # with a runtime that pickles
    assert store.get("k") == Blob(b"bytes", "7", 0)
    raw = pickle.dumps(store)
    assert b"hunter2" not in raw
    assert pickle.loads(raw).get("k") == Blob(b"bytes", "7", 0)


def test_a_forked_child_uses_no_connection_of_its_parent(script: Script) -> None:
    store, _ = script(FOUND)
    store.get("k")
    parents = store._client.get()
    child = os.fork()
    if child == 0:
        # _exit: the child must not run the rest of the test session.
        try:
            others = store._client.get() is not parents
            os._exit(0 if others and isinstance(store.get("k"), Blob) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert store._client.get() is parents
