"""Lost and unusual responses that S3, GCS, and Azure handle alike."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.runtime import SystemRuntime, deadline
from opendata_buffer.stores.base import Blob
from tests.http_scripts import Reply
from tests.unit.stores.cloud_responses import (
    AZURE,
    CLOUDS,
    DATE_MS,
    GCS,
    LOST,
    S3,
    Cloud,
    Script,
    scripted,
)


@pytest.fixture(params=CLOUDS, ids=str)
def cloud(request: pytest.FixtureRequest) -> Cloud:
    found: Cloud = request.param
    return found


@pytest.fixture
def script(cloud: Cloud) -> Iterator[Script]:
    with ExitStack() as running:
        yield scripted(cloud, running)


@pytest.mark.parametrize("creates", [True, False])
def test_f1_a_lost_response_to_a_conditional_write_is_unknown_after_one_request(
    cloud: Cloud, script: Script, creates: bool
) -> None:
    condition = None if creates else cloud.version
    for response in (LOST, cloud.error(500, "InternalError"), cloud.error(503, "ServerBusy")):
        store, server = script(response)
        assert isinstance(store.put_if("m", b"x", condition), outcomes.Unknown)
        assert len(server.asked) == 1


@pytest.mark.parametrize("creates", [True, False])
def test_f1_a_write_that_is_answered_without_its_version_is_read_back(
    cloud: Cloud, script: Script, creates: bool
) -> None:
    condition = None if creates else cloud.version
    store, server = script(cloud.unversioned, cloud.found)
    assert store.put_if("m", b"bytes", condition) == outcomes.Applied(cloud.new_version)
    assert len(server.asked) == 2
    # The write may have landed whatever the read returns, so none of this is an error.
    for found in (cloud.found, cloud.gone, Reply(403), cloud.found_as(None), LOST):
        store, _ = script(cloud.unversioned, found)
        outcome = store.put_if("m", b"other bytes", condition)
        assert isinstance(outcome, outcomes.Unknown)
        assert "without its version" in outcome.reason


def test_an_upload_that_a_proxy_answers_counts_only_if_the_object_exists(
    cloud: Cloud, script: Script
) -> None:
    store, server = script(cloud.unversioned, cloud.found)
    store.put("k", b"bytes")
    assert len(server.asked) == 2
    for found in (cloud.unversioned, cloud.gone):
        store, _ = script(cloud.unversioned, found, max_attempts=1)
        with pytest.raises(TransientStorageError, match=r"cannot write 'root/k'.*without its vers"):
            store.put("k", b"bytes")


@pytest.mark.parametrize(("version", "named"), [(None, "no "), ('W/"7"', 'the weak .*W/"7"')])
def test_f12_a_read_without_a_strong_version_is_refused(
    cloud: Cloud, script: Script, version: str | None, named: str
) -> None:
    message = f"'{cloud}://bucket/root' at http.*a read with {named}"
    store, _ = script(cloud.found_as(version))
    with pytest.raises(UnsafeStore, match=message):
        store.get("k")
    store, _ = script(cloud.unversioned, cloud.found_as(version))
    with pytest.raises(UnsafeStore, match=message):
        store.check_conditional_writes("m")


@pytest.mark.parametrize("cloud", [GCS, AZURE], ids=str, indirect=True)
@pytest.mark.parametrize("is_gone", [True, False])
def test_f4_412_is_followed_by_a_read_that_tells_whether_the_object_is_gone(
    cloud: Cloud, script: Script, is_gone: bool
) -> None:
    there = replace(cloud.found, body=b"b")
    store, server = script(cloud.changed, cloud.gone if is_gone else there)
    outcome = store.put_if("m", b"x", cloud.version)
    assert outcome == (outcomes.Vanished() if is_gone else outcomes.LostRace())
    assert len(server.asked) == 2


def test_reads_and_plain_writes_are_repeated(cloud: Cloud, script: Script) -> None:
    for fault in (LOST, cloud.error(503, "ServerBusy")):
        store, server = script(fault, fault, cloud.found)
        assert store.get("k") == Blob(b"bytes", cloud.new_version, DATE_MS)
        assert len(server.asked) == 3
        store, server = script(fault, fault, cloud.written)
        store.put("k", b"content")
        assert [b"content" in each.body for each in server.asked] == [True] * 3


def test_faults_that_last_longer_than_all_attempts_are_transient(
    cloud: Cloud, script: Script
) -> None:
    for fault, message in (
        (cloud.error(503, "ServerBusy"), "ServerBusy.*try again later"),
        (LOST, "at the endpoint, and the network"),
    ):
        store, server = script(fault)
        with pytest.raises(TransientStorageError, match=message):
            store.get("k")
        assert len(server.asked) >= 3


def test_f36_a_garbled_body_is_read_again(cloud: Cloud, script: Script) -> None:
    store, server = script(cloud.garbled, cloud.found)
    assert store.get("k") == Blob(b"bytes", cloud.new_version, DATE_MS)
    assert len(server.asked) == 2


def test_f36_an_object_that_never_has_its_checksum_is_corrupt(cloud: Cloud, script: Script) -> None:
    store, server = script(*[cloud.garbled] * 9)
    with pytest.raises(CorruptData, match=r"cannot read 'root/k'.*checksum"):
        store.get("k")
    assert len(server.asked) == 3


def test_an_unchanged_object_is_not_downloaded(cloud: Cloud, script: Script) -> None:
    store, server = script(Reply(304))
    assert store.get("k", if_changed=cloud.version) is None
    with pytest.raises(TransientStorageError, match="not modified"):
        store.get("k")
    assert len(server.asked) >= 4, "an unexpected answer is requested again"


def test_a_malformed_date_is_transient(cloud: Cloud, script: Script) -> None:
    headers = {**cloud.found.headers, "last-modified": "soon"}
    store, server = script(replace(cloud.found, headers=headers))
    with pytest.raises(TransientStorageError, match=r"cannot read 'root/k'.*Check what answers"):
        store.get("k")
    assert len(server.asked) >= 3, "the request was repeated"


HTML = {"content-type": "text/html"}
XML = {"content-type": "application/xml"}
S3_OBJECT = (
    "<L><Name>b</Name><Contents><Key>a</Key>{}<LastModified>{}</LastModified></Contents></L>"
)
TODAY = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("cloud", "body", "headers"),
    [
        (S3, "<html><body>Sign in to the guest network</body></html>", {}),
        (S3, "", {}),
        (S3, "<L><Name>bucket</Name><IsTruncated>true</IsTruncated></L>", {}),
        (S3, "<L><Name>bucket</Name><Contents><Size>1</Size></Contents></L>", {}),
        (S3, S3_OBJECT.format("<Size>x</Size>", TODAY), {}),
        (S3, S3_OBJECT.format("<Size>1</Size>", "soon"), {}),
        (S3, "no markup at all", {}),
        (GCS, "<html>Sign in to the guest network", {}),
        (GCS, "", {}),
        (GCS, "[]", {}),
        (GCS, '{"items": 5}', {}),
        (GCS, '{"items": ["a"]}', {}),
        (GCS, '{"items": [{"size": "1"}]}', {}),
        (GCS, '{"items": [{"name": "root/b", "size": "x"}]}', {}),
        (GCS, '{"items": [{"name": "root/b", "size": "1", "timeCreated": "x"}]}', {}),
        (AZURE, "<html>Sign in</html>", HTML),
        (AZURE, "<html></html>", XML),
        (AZURE, "\udcff", XML),
        (AZURE, "", {}),
        (AZURE, "", {"date": "soon"}),
    ],
    indirect=["cloud"],
)
def test_a_malformed_listing_is_transient_and_not_empty(
    cloud: Cloud, script: Script, body: str, headers: dict[str, str]
) -> None:
    store, server = script(Reply(200, body.encode(errors="surrogateescape"), headers))
    with pytest.raises(TransientStorageError, match=f"'root/in/' in {cloud.bucket} 'bucket'"):
        store.list("in/")
    assert len(server.asked) == 3, "the request was repeated"


@pytest.mark.parametrize("cloud", [GCS, AZURE], ids=str, indirect=True)
def test_a_listing_is_read_only_up_to_a_limit(
    cloud: Cloud, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[cloud.store.__module__], "MAX_PAGE_BYTES", 100)
    store, _ = script(Reply(200, b" " * 1_000_000))
    with pytest.raises(TransientStorageError, match="more than 100 bytes"):
        store.list("")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(cloud: Cloud, script: Script, status: int) -> None:
    _, elsewhere = script(cloud.found)
    store, _ = script(Reply(status, b"", {"location": f"{elsewhere.url}/k?next=secret"}))
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b"x"),
        lambda: store.put_if("k", b"x", None),
    ):
        with pytest.raises(PermanentStorageError, match="endpoint") as caught:
            call()
        assert "secret" not in str(caught.value)
    assert elsewhere.asked == []


def test_a_missing_bucket_or_container_is_permanent_for_every_operation(
    cloud: Cloud, script: Script
) -> None:
    store, _ = script(cloud.no_bucket)
    for call in (
        lambda: store.get("k"),
        lambda: store.get("k", byte_range=(0, 1)),
        lambda: store.put("k", b""),
        lambda: store.put_if("k", b"", None),
        lambda: store.put_if("k", b"", cloud.version),
        lambda: store.list(""),
    ):
        with pytest.raises(
            PermanentStorageError, match=f"Create {cloud.bucket} 'bucket' or correct the store URL"
        ):
            call()
    (failure,) = store.delete_many(["k"])
    assert f"Create {cloud.bucket} 'bucket'" in failure.reason
    store, _ = script(cloud.gone)
    with pytest.raises(ObjectNotFound, match=f"'k' does not exist in {cloud}://bucket/root"):
        store.get("k")


@pytest.mark.parametrize(
    ("cloud", "status", "code", "kind", "message"),
    [
        (S3, 503, "SlowDown", TransientStorageError, "overloaded; try again later"),
        (S3, 429, "TooManyRequests", TransientStorageError, "overloaded"),
        (S3, 408, "", TransientStorageError, "overloaded"),
        (S3, 400, "RequestTimeout", TransientStorageError, "overloaded"),
        (S3, 409, "OperationAborted", TransientStorageError, "nothing was changed; try again"),
        (S3, 400, "BadDigest", TransientStorageError, "garbled"),
        (S3, 403, "AccessDenied", PermanentStorageError, "Allow these credentials to write"),
        (S3, 403, "InvalidAccessKeyId", PermanentStorageError, "Renew or correct the AWS cred"),
        (S3, 400, "ExpiredToken", PermanentStorageError, "Renew or correct the AWS credentials"),
        (S3, 403, "RequestTimeTooSkewed", PermanentStorageError, "Set this machine's clock"),
        (S3, 400, "EntityTooLarge", PermanentStorageError, "Check that an S3 store answers"),
        (S3, 501, "NotImplemented", PermanentStorageError, "Check that an S3 store answers"),
        (GCS, 429, "rateLimitExceeded", TransientStorageError, "one write a second"),
        (GCS, 403, "rateLimitExceeded", TransientStorageError, "broker or a topic"),
        (GCS, 503, "backendError", TransientStorageError, "try again later"),
        (GCS, 408, "", TransientStorageError, "try again later"),
        (GCS, 409, "conflict", TransientStorageError, "try again later"),
        (GCS, 401, "authError", PermanentStorageError, "Renew or correct the Google credentials"),
        (GCS, 403, "forbidden", PermanentStorageError, "Allow these credentials to write .*roles/"),
        (GCS, 400, "invalid", PermanentStorageError, "Check that GCS's JSON API answers"),
        (AZURE, 503, "ServerBusy", TransientStorageError, "try again later"),
        (AZURE, 429, "TooMany", TransientStorageError, "overloaded"),
        (AZURE, 409, "ContainerBeingDeleted", TransientStorageError, "try again later"),
        (AZURE, 412, "ConditionNotMet", TransientStorageError, "changed while it was read"),
        (AZURE, 400, "Md5Mismatch", TransientStorageError, "garbled"),
        (AZURE, 403, "AuthenticationFailed", PermanentStorageError, "Renew.*AZURE_STORAGE_KEY"),
        (AZURE, 403, "AuthorizationFailure", PermanentStorageError, "Blob Data Contributor"),
        (AZURE, 412, "LeaseIdMissing", PermanentStorageError, "break the lease"),
        (AZURE, 409, "BlobImmutableDueToPolicy", PermanentStorageError, "immutability"),
    ],
    indirect=["cloud"],
)
def test_a_refusal_is_an_error_with_a_fix(
    cloud: Cloud, script: Script, status: int, code: str, kind: type[StorageError], message: str
) -> None:
    store, server = script(cloud.error(status, code))
    with pytest.raises(
        kind, match=rf"cannot write 'root/k' in {cloud.bucket} 'bucket' at http.*{code}.*{message}"
    ) as caught:
        store.put("k", b"")
    assert type(caught.value) is kind
    assert len(server.asked) == (3 if kind is TransientStorageError else 1)


def test_every_call_on_a_silent_store_ends_at_its_deadline(cloud: Cloud) -> None:
    runtime = SystemRuntime()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        # Without the deadline, a request would end long after the limit below.
        options = StoreOptions(endpoint_url=f"{url}{cloud.path}", read_timeout_ms=600_000)
        store = cloud.store("bucket", options=options)
        for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: store.list("")):
            began = time.monotonic()
            with deadline(runtime, 0.2), pytest.raises(TransientStorageError, match=f"at {url}"):
                call()
            assert time.monotonic() - began < 120
        with deadline(runtime, 0.2):
            assert isinstance(store.put_if("k", b"", None), outcomes.Unknown)
        with deadline(runtime, 0.2):
            assert len(store.delete_many(["a", "b//c"])) == 2


@pytest.mark.parametrize(("cloud", "option"), [(GCS, "region"), (AZURE, "profile")])
def test_an_option_of_s3_is_refused(cloud: Cloud, option: str) -> None:
    with pytest.raises(InvalidInput, match=f"{option} is 'x'.*{cloud}:// has none: remove it"):
        cloud.store("bucket", options=StoreOptions(**{option: "x"}))  # type: ignore[arg-type]


def test_a_pickled_store_has_its_options_and_no_secret(
    cloud: Cloud, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for secret in ("AWS_SECRET_ACCESS_KEY", "GOOGLE_CLIENT_SECRET", "AZURE_STORAGE_SAS_TOKEN"):
        monkeypatch.setenv(secret, "hunter2")
    made, _ = script(cloud.found)
    store = cloud.store("bucket", "root", made._options)  # with a runtime that pickles
    wanted = Blob(b"bytes", cloud.new_version, DATE_MS)
    assert store.get("k") == wanted
    raw = pickle.dumps(store)
    assert b"hunter2" not in raw
    assert pickle.loads(raw).get("k") == wanted


def test_a_forked_child_does_not_use_the_connections_of_its_parent(
    cloud: Cloud, script: Script
) -> None:
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
