"""GCS and Azure alike, when answers are lost or unusual. What differs: test_gcs, test_azure."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    TransientStorageError,
)
from opendata_buffer.runtime import SystemRuntime, deadline
from opendata_buffer.stores.base import ABSENT, Blob, IfVersion
from tests.http_scripts import Reply
from tests.unit.stores.cloud_answers import CLOUDS, LOST, Cloud, Script, scripted


@pytest.fixture(params=CLOUDS, ids=str)
def cloud(request: pytest.FixtureRequest) -> Cloud:
    found: Cloud = request.param
    return found


@pytest.fixture
def script(cloud: Cloud) -> Iterator[Script]:
    with ExitStack() as running:
        yield scripted(cloud, running)


@pytest.mark.parametrize("creates", [True, False])
def test_f1_a_lost_answer_to_a_conditional_write_is_unknown_after_one_request(
    cloud: Cloud, script: Script, creates: bool
) -> None:
    condition = ABSENT if creates else IfVersion(cloud.version)
    for answer in (LOST, *cloud.failed):
        store, server = script(answer)
        assert isinstance(store.put_if("m", b"x", condition), outcomes.Unknown)
        assert len(server.asked) == 1


@pytest.mark.parametrize("creates", [True, False])
def test_f1_a_write_that_is_answered_without_its_version_is_looked_up(
    cloud: Cloud, script: Script, creates: bool
) -> None:
    condition = ABSENT if creates else IfVersion(cloud.version)
    store, server = script(cloud.unversioned, cloud.found)
    assert store.put_if("m", b"bytes", condition) == outcomes.Applied(cloud.new_version)
    assert len(server.asked) == 2
    kept = cloud.found.headers.items() - {("etag", '"7"'), ("x-goog-generation", "7")}
    unversioned = replace(cloud.found, headers=dict(kept))
    # It may have been written whatever the look says, so nothing of this is an error.
    for found in (cloud.found, cloud.gone, Reply(403), unversioned, LOST):
        store, _ = script(cloud.unversioned, found)
        outcome = store.put_if("m", b"other bytes", condition)
        assert isinstance(outcome, outcomes.Unknown)
        assert "without its version" in outcome.reason


@pytest.mark.parametrize("is_gone", [True, False])
def test_f4_412_is_read_to_tell_whether_the_object_is_gone(
    cloud: Cloud, script: Script, is_gone: bool
) -> None:
    store, server = script(cloud.changed, cloud.gone if is_gone else cloud.there)
    outcome = store.put_if("m", b"x", IfVersion(cloud.version))
    assert outcome == (outcomes.Vanished() if is_gone else outcomes.Conflict())
    assert tuple(each.method for each in server.asked) == cloud.look


def test_reads_and_plain_writes_are_repeated(cloud: Cloud, script: Script) -> None:
    for fault in (LOST, cloud.failed[-1]):
        store, server = script(fault, fault, cloud.found)
        assert store.get("k") == Blob(b"bytes", cloud.new_version, cloud.found_ms)
        assert len(server.asked) == 3
        store, server = script(fault, fault, cloud.written)
        store.put("k", b"")
        assert len(server.asked) == 3
        assert len({each.body for each in server.asked}) == 1


def test_faults_that_outlive_all_attempts_are_transient(cloud: Cloud, script: Script) -> None:
    for fault, message in (
        (cloud.failed[-1], cloud.last_failed),
        (LOST, "Check the endpoint and the network"),
    ):
        store, server = script(fault)
        with pytest.raises(TransientStorageError, match=message):
            store.get("k")
        assert len(server.asked) == 3


def test_a_body_that_is_garbled_or_breaks_off_is_read_again(cloud: Cloud, script: Script) -> None:
    store, server = script(cloud.garbled, cloud.found)
    assert store.get("k") == Blob(b"bytes", cloud.new_version, cloud.found_ms)
    assert len(server.asked) == 2


def test_a_pause_that_the_service_asks_for_is_kept(cloud: Cloud, script: Script) -> None:
    for failed in cloud.failed:
        asked = replace(failed, headers={**failed.headers, "retry-after": "20"})
        store, server = script(asked, cloud.found)
        began = store._runtime.monotonic()
        assert isinstance(store.get("k"), Blob)
        assert store._runtime.monotonic() - began >= 20
        assert len(server.asked) == 2


def test_a_date_that_is_none_is_transient(cloud: Cloud, script: Script) -> None:
    headers = {**cloud.found.headers, "last-modified": "soon"}
    store, server = script(replace(cloud.found, headers=headers))
    with pytest.raises(TransientStorageError, match=r"cannot read 'root/k'.*makes no sense"):
        store.get("k")
    assert len(server.asked) == 3, "it was asked again"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(cloud: Cloud, script: Script, status: int) -> None:
    _, elsewhere = script(cloud.found)
    store, server = script(Reply(status, b"", {"location": f"{elsewhere.url}/k"}))
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b"x"),
        lambda: store.put_if("k", b"x", ABSENT),
    ):
        server.asked.clear()
        with pytest.raises(PermanentStorageError, match=f"{status}.*endpoint"):
            call()
        assert len(server.asked) == 1
    assert elsewhere.asked == []


def test_a_missing_bucket_or_container_is_permanent_for_every_operation(
    cloud: Cloud, script: Script
) -> None:
    store, _ = script(cloud.no_bucket)
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b""),
        lambda: store.put_if("k", b"", ABSENT),
        lambda: store.put_if("k", b"", IfVersion(cloud.version)),
        lambda: store.list(""),
    ):
        with pytest.raises(PermanentStorageError, match=f"{cloud.what_to_make} or correct"):
            call()
    (failure,) = store.delete_many(["k"])
    assert cloud.what_to_make in failure.reason
    store, _ = script(cloud.gone)
    with pytest.raises(ObjectNotFound, match=f"'k' does not exist in {cloud}://bucket/root"):
        store.get("k")


def test_every_call_on_a_silent_store_ends_at_its_deadline(cloud: Cloud) -> None:
    runtime = SystemRuntime()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}{cloud.path}"
        # Long after the limit below a request would end by itself.
        options = StoreOptions(endpoint_url=url, read_timeout_ms=600_000)
        store = cloud.store("bucket", options=options)
        for call in (
            lambda: store.get("k"),
            lambda: store.put("k", b""),
            lambda: store.list(""),
        ):
            began = time.monotonic()
            with deadline(runtime, 0.2), pytest.raises(TransientStorageError):
                call()
            assert time.monotonic() - began < 120
        with deadline(runtime, 0.2):
            assert isinstance(store.put_if("k", b"", ABSENT), outcomes.Unknown)
        with deadline(runtime, 0.2):
            assert len(store.delete_many(["a", "b//c"])) == 2


def test_an_option_of_s3_is_refused(cloud: Cloud) -> None:
    name, value = cloud.refused_option
    message = f"{name} is '{value}'.*{cloud}:// has none: remove it"
    with pytest.raises(InvalidInput, match=message):
        cloud.store("bucket", options=StoreOptions(**{name: value}))


def test_pickling_takes_the_options_and_no_secret(
    cloud: Cloud, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_CLIENT_SECRET", "hunter2")
    made, _ = script(cloud.found)
    store = cloud.store("bucket", "root", made._options)  # with a runtime that pickles
    wanted = Blob(b"bytes", cloud.new_version, cloud.found_ms)
    assert store.get("k") == wanted
    raw = pickle.dumps(store)
    for secret in ("GOOGLE_CLIENT_SECRET", "AZURE_STORAGE_KEY"):
        assert os.environ[secret].encode() not in raw
    assert pickle.loads(raw).get("k") == wanted


def test_a_forked_child_uses_no_connection_of_its_parent(cloud: Cloud, script: Script) -> None:
    store, _ = script(cloud.found)
    store.get("k")
    held = store._client
    parents = held.get()
    child = os.fork()
    if child == 0:
        # _exit: the child must not run the rest of the test session.
        try:
            others = held.get() is not parents
            os._exit(0 if others and isinstance(store.get("k"), Blob) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert held.get() is parents
