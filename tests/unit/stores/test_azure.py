"""Azure when answers are lost or unusual; the sunny side is in the contract suite."""

from __future__ import annotations

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
from opendata_buffer.stores.azure import AzureStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer

LOST = Reply(0)
DATE = "Thu, 01 Jan 2026 00:00:10 GMT"
WRITTEN = Reply(201, b"", {"etag": '"7"', "last-modified": DATE})
FOUND = Reply(
    206,
    b"bytes",
    {
        "etag": '"7"',
        "last-modified": DATE,
        "x-ms-blob-type": "BlockBlob",
        "content-type": "application/octet-stream",
        "content-range": "bytes 0-4/5",
    },
)
THERE = Reply(200, b"", {**FOUND.headers, "content-length": "5"})
THEN_MS = 1_767_225_610_000


def error(status: int, code: str) -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}!</Message></Error>"
    headers = {"x-ms-error-code": code, "content-type": "application/xml"}
    return Reply(status, body.encode(), headers)


GONE = error(404, "BlobNotFound")
NO_CONTAINER = error(404, "ContainerNotFound")
BUSY = error(503, "ServerBusy")

Script = Callable[..., tuple[AzureStore, ScriptedServer]]


@pytest.fixture
def script() -> Iterator[Script]:
    """Makes a store whose server gives these answers."""
    with ExitStack() as running:

        def make(*replies: Reply, **options: Any) -> tuple[AzureStore, ScriptedServer]:
            server = ScriptedServer(*replies)
            url = f"{running.enter_context(server.running())}/testing"
            settings = StoreOptions(endpoint_url=url, **{"max_attempts": 3, **options})
            return AzureStore("box", "root", settings, runtime=ManualRuntime()), server

        yield make


@pytest.mark.parametrize("condition", [ABSENT, IfVersion('"5"')])
@pytest.mark.parametrize("answer", [LOST, error(500, "InternalError"), BUSY])
def test_f1_a_lost_answer_to_a_conditional_write_is_unknown_after_one_request(
    script: Script, condition: Any, answer: Reply
) -> None:
    store, server = script(answer)
    assert isinstance(store.put_if("m", b"x", condition), Unknown)
    assert len(server.asked) == 1


def test_the_condition_is_a_header_and_the_content_has_its_checksum(script: Script) -> None:
    store, server = script(WRITTEN)
    assert store.put_if("m", b"x", ABSENT) == Applied('"7"')
    assert store.put_if("m", b"x", IfVersion('"5"')) == Applied('"7"')
    store.put("m", b"x")
    asked = [each.headers for each in server.asked]
    assert [each.get("if-none-match") for each in asked] == ["*", None, None]
    assert [each.get("if-match") for each in asked] == [None, '"5"', None]
    assert {each.get("content-md5") for each in asked} == {"ndTkYSaMgDT1yFZOFVxnpg=="}


def test_409_to_a_creation_is_a_conflict_and_no_other_409_is(script: Script) -> None:
    store, server = script(error(409, "BlobAlreadyExists"))
    assert store.put_if("m", b"x", ABSENT) == VersionConflict()
    assert len(server.asked) == 1
    store, _ = script(error(409, "BlobImmutableDueToPolicy"))
    with pytest.raises(PermanentStorageError, match="immutability"):
        store.put_if("m", b"x", ABSENT)
    store, _ = script(error(409, "ContainerBeingDeleted"))
    assert isinstance(store.put_if("m", b"x", ABSENT), Unknown)


@pytest.mark.parametrize(("second", "outcome"), [(GONE, Vanished()), (THERE, VersionConflict())])
def test_f4_412_is_read_to_tell_whether_the_object_is_gone(
    script: Script, second: Reply, outcome: object
) -> None:
    store, server = script(error(412, "ConditionNotMet"), second)
    assert store.put_if("m", b"x", IfVersion('"5"')) == outcome
    assert [each.method for each in server.asked] == ["PUT", "HEAD"]


def test_a_lease_is_no_conflict(script: Script) -> None:
    store, _ = script(error(412, "LeaseIdMissing"))
    with pytest.raises(PermanentStorageError, match="break the lease"):
        store.put_if("m", b"x", IfVersion('"5"'))


@pytest.mark.parametrize("fault", [LOST, BUSY])
def test_reads_and_plain_writes_are_repeated(script: Script, fault: Reply) -> None:
    store, server = script(fault, fault, FOUND)
    assert store.get("k") == Blob(b"bytes", '"7"', THEN_MS)
    assert len(server.asked) == 3
    store, server = script(fault, fault, WRITTEN)
    store.put("k", b"")
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [(BUSY, "503 ServerBusy.*try again later"), (LOST, "Check the endpoint and the network")],
)
def test_faults_that_outlive_all_attempts_are_transient(
    script: Script, fault: Reply, message: str
) -> None:
    store, server = script(fault)
    with pytest.raises(TransientStorageError, match=message):
        store.get("k")
    assert len(server.asked) == 3


def test_a_body_that_is_garbled_is_read_again(script: Script) -> None:
    sums = {**FOUND.headers, "x-ms-blob-content-md5": "SzpiGLs+OnMD6KFxpg/Pkg=="}
    store, server = script(Reply(206, b"bites", sums), Reply(206, b"bytes", sums))
    assert store.get("k") == Blob(b"bytes", '"7"', THEN_MS)
    assert len(server.asked) == 2


@pytest.mark.parametrize("etag", [{}, {"etag": 'W/"7"'}])
def test_a_read_without_a_strong_etag_is_refused(script: Script, etag: dict[str, str]) -> None:
    headers = {name: value for name, value in FOUND.headers.items() if name != "etag"}
    store, _ = script(Reply(206, b"bytes", {**headers, **etag}))
    with pytest.raises(UnsafeStore, match="ETag"):
        store.get("k")


def test_an_unchanged_object_is_not_read(script: Script) -> None:
    store, server = script(Reply(304))
    assert store.get("k", if_changed='"7"') == NotModified()
    assert server.asked[0].headers["if-none-match"] == '"7"'


def test_a_missing_container_is_permanent_for_every_operation(script: Script) -> None:
    store, _ = script(NO_CONTAINER)
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b""),
        lambda: store.put_if("k", b"", ABSENT),
        lambda: store.put_if("k", b"", IfVersion('"5"')),
        lambda: store.list(""),
    ):
        with pytest.raises(PermanentStorageError, match="Create container 'box' or correct"):
            call()
    (failure,) = store.delete_many(["k"])
    assert "Create container 'box'" in failure.reason
    store, _ = script(GONE)
    with pytest.raises(ObjectNotFound, match="'k' does not exist in az://box/root"):
        store.get("k")


def page(*names: str, more: str = "", folder: str = "", date: bool = True) -> Reply:
    blobs = "".join(
        f"<Blob><Name>root/{name}</Name><Properties><Last-Modified>{DATE}</Last-Modified>"
        f"<Content-Length>1</Content-Length><BlobType>BlockBlob</BlobType></Properties><Metadata>"
        f"{'<hdi_isfolder>true</hdi_isfolder>' if name == folder else ''}</Metadata></Blob>"
        for name in names
    )
    body = (
        "<?xml version='1.0'?><EnumerationResults ServiceEndpoint='x' ContainerName='box'>"
        f"<Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker></EnumerationResults>"
    )
    headers = {"content-type": "application/xml", **({"date": DATE} if date else {})}
    return Reply(200, body.encode(), headers)


def test_directories_are_no_objects(script: Script) -> None:
    store, server = script(page("in", "in/a", folder="in"))
    assert [info.key for info in store.list("").objects] == ["in/a"]
    assert "include=metadata" in server.asked[0].path


def test_a_listing_goes_on_where_the_one_before_ended(script: Script) -> None:
    store, server = script(page("a", "b", more="second"), page("c", "d", more="third"), page("e"))
    first = store.list("", limit=2)
    second = store.list("", start_after="b", limit=2)
    third = store.list("", start_after="d", limit=2)
    assert [info.key for info in (*first.objects, *second.objects, *third.objects)] == list("abcde")
    assert [each.truncated for each in (first, second, third)] == [True, True, False]
    markers = [each.path.partition("marker=")[2].partition("&")[0] for each in server.asked]
    assert markers == ["", "second", "third"]


def test_a_listing_that_begins_anywhere_passes_by_what_is_before(script: Script) -> None:
    store, server = script(page("a", "b", more="second"), page("c", "d"))
    listing = store.list("", start_after="b", limit=1)
    assert [info.key for info in listing.objects] == ["c"]
    assert listing.truncated
    assert len(server.asked) == 2


def test_f6_the_stores_clock_is_the_date_of_the_first_page(script: Script) -> None:
    store, _ = script(page("a"))
    assert store.list("").now_ms == THEN_MS
    store, _ = script(page("a", date=False))
    assert store.list("").now_ms == THEN_MS, "the newest object"


def test_every_call_on_a_silent_store_ends_at_its_deadline() -> None:
    runtime = SystemRuntime()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/testing"
        store = AzureStore("box", options=StoreOptions(endpoint_url=url))
        for call in (
            lambda: store.get("k"),
            lambda: store.put("k", b""),
            lambda: store.list(""),
        ):
            began = time.monotonic()
            with deadline(runtime, 0.2), pytest.raises(TransientStorageError):
                call()
            assert time.monotonic() - began < 5
        with deadline(runtime, 0.2):
            assert isinstance(store.put_if("k", b"", ABSENT), Unknown)
        with deadline(runtime, 0.2):
            assert len(store.delete_many(["a", "b//c"])) == 2


def test_an_option_of_s3_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"profile is 'p'.*az:// has none: remove it"):
        AzureStore("box", options=StoreOptions(profile="p"))


def test_a_key_too_long_with_its_root_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at most 1024"):
        AzureStore("box", "r" * 100).get("k" * 1_000)


def test_pickling_takes_the_options_and_no_secret(script: Script) -> None:
    made, _ = script(FOUND)
    store = AzureStore("box", "root", made._options)  # with a runtime that pickles
    assert store.get("k") == Blob(b"bytes", '"7"', THEN_MS)
    raw = pickle.dumps(store)
    assert os.environ["AZURE_STORAGE_KEY"].encode() not in raw
    assert pickle.loads(raw).get("k") == Blob(b"bytes", '"7"', THEN_MS)


def test_a_forked_child_uses_no_connection_of_its_parent(script: Script) -> None:
    store, _ = script(FOUND)
    store.get("k")
    parents = store._service.get()
    child = os.fork()
    if child == 0:
        # _exit: the child must not run the rest of the test session.
        try:
            others = store._service.get() is not parents
            os._exit(0 if others and isinstance(store.get("k"), Blob) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert store._service.get() is parents
