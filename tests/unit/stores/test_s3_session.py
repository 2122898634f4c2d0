"""What boto3 is given to see of S3's answers, and of those that are not S3's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.stores.base import (
    ABSENT,
    Blob,
    IfVersion,
    NotModified,
)
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer

Script = Callable[..., tuple[S3Store, ScriptedServer]]
FOUND = Reply(200, b"bytes", {"ETag": '"7"'})
NOT_FOUND = Reply(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
BY_A_PROXY = Reply(404, b"404 page not found\n", {"content-type": "text/plain"})


@pytest.fixture
def script() -> Iterator[Script]:
    with ExitStack() as running:

        def make(*replies: Reply) -> tuple[S3Store, ScriptedServer]:
            server = ScriptedServer(*replies)
            url = running.enter_context(server.running())
            options = StoreOptions(endpoint_url=url, max_attempts=1)
            return S3Store("bucket", options=options, runtime=ManualRuntime()), server

        yield make


def calls(store: S3Store) -> tuple[Callable[[], object], ...]:
    return (
        lambda: store.get("k"),
        lambda: store.put("k", b"x"),
        lambda: store.put_if("k", b"x", ABSENT),
        lambda: store.list(""),
    )


@pytest.mark.parametrize("status", [200, 403, 404, 500])
def test_an_answer_that_is_too_long_is_read_no_further(
    script: Script, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    most = "MOST_OF_A_PAGE" if status == 200 else "MOST_OF_AN_ERROR"
    monkeypatch.setattr(f"opendata_buffer.stores.s3_client.{most}", 1_000)
    store, _ = script(Reply(status, b"<Code>" + b"x" * 1_000_000))
    said = "has more than the 1000 bytes that it may have"
    for call in calls(store)[1:] if status == 200 else calls(store):
        try:
            outcome = call()
        except TransientStorageError as error:
            outcome = outcomes.Unknown(str(error))
        assert isinstance(outcome, outcomes.Unknown)
        assert said in outcome.reason
    (failure,) = store.delete_many(["k"])
    assert said in failure.reason


def test_an_object_may_be_longer(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendata_buffer.stores.s3_client.MOST_OF_A_PAGE", 1_000)
    store, _ = script(Reply(200, b"x" * 5_000, {"ETag": '"7"'}))
    for _ in range(2):  # by boto3, and past it
        found = store.get("k")
        assert isinstance(found, Blob)
        assert len(found.data) == 5_000


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_of_a_proxy_is_followed_by_nobody_and_told(script: Script, status: int) -> None:
    store, server = script(Reply(status, b"", {"location": "https://login/?next=secret"}))
    for call in calls(store):
        server.asked.clear()
        with pytest.raises(
            PermanentStorageError,
            match=rf"HTTP {status} to 'https://login/\?\*\*\*'.*set endpoint_url",
        ):
            call()
        assert len(server.asked) == 1


def test_a_404_of_a_proxy_is_no_missing_object(script: Script) -> None:
    store, _ = script(BY_A_PROXY)
    for call in (calls(store)[0], *calls(store)[1::2]):
        with pytest.raises(TransientStorageError, match=r"'404 page not found'.*an ingress"):
            call()
    assert isinstance(store.put_if("k", b"x", IfVersion('"7"')), outcomes.Unknown)
    store, _ = script(FOUND, BY_A_PROXY)
    assert isinstance(store.get("k"), Blob)
    with pytest.raises(TransientStorageError):
        store.get("k")  # past boto3


@pytest.mark.parametrize("answer", [NOT_FOUND, Reply(404)], ids=["with its code", "without a body"])
def test_a_404_of_the_store_is(script: Script, answer: Reply) -> None:
    store, _ = script(FOUND, answer)
    assert isinstance(store.get("k"), Blob)
    for _ in range(2):
        with pytest.raises(ObjectNotFound):
            store.get("k")
    assert store.put_if("k", b"x", IfVersion('"7"')) == outcomes.Vanished()


def test_not_modified_is_no_answer_to_a_plain_read(script: Script) -> None:
    store, _ = script(Reply(304), FOUND, Reply(304))
    for _ in range(2):  # by boto3, and past it
        with pytest.raises(TransientStorageError, match=r"'k' in s3://bucket.*304.*a cache"):
            store.get("k")
        assert isinstance(store.get("k", if_changed='"7"'), Blob | NotModified)


def test_an_error_whose_body_breaks_off_is_transient(script: Script) -> None:
    store, _ = script(Reply(403, b"<Error>", {"content-length": "100", "connection": "close"}))
    with pytest.raises(StorageError):
        store.list("")
