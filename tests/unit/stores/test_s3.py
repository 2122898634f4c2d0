"""S3 over HTTP when responses are lost or unusual; the rest is in the contract suite."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count, repeat
from types import SimpleNamespace
from typing import Any, TypeVar

import botocore.exceptions as boto
import pytest
import urllib3.exceptions
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.runtime import SystemRuntime, deadline
from opendata_buffer.stores.base import ABSENT, Blob, IfVersion, NotModified
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer
from tests.support.s3_server import Answer, Fault, Request, S3Server
from tests.unit.broker.local import eventually

T = TypeVar("T")


def connect(
    server: S3Server, root: str = "", *, read_timeout_ms: int = 30_000, max_attempts: int = 3
) -> S3Store:
    options = StoreOptions(
        endpoint_url=server.endpoint, read_timeout_ms=read_timeout_ms, max_attempts=max_attempts
    )
    return S3Store(server.bucket, root, options, runtime=ManualRuntime())


@pytest.fixture
def store(s3_server: S3Server) -> S3Store:
    return connect(s3_server)


def put_new(store: S3Store, key: str, data: bytes) -> str:
    outcome = store.put_if(key, data, ABSENT)
    assert isinstance(outcome, outcomes.Applied)
    return outcome.value


LOST = [Fault(status) for status in (500, 502, 503, 504)] + [
    Fault(Answer.CLOSE),
    Fault(Answer.RESET),
    Fault(429, code="SlowDown"),
    Fault(400, code="RequestTimeout"),
]


# ---- conditional writes


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "lost on the way"])
@pytest.mark.parametrize("fault", LOST, ids=lambda fault: str(fault.answer))
def test_f1_f2_a_lost_answer_is_unknown_after_exactly_one_request(
    s3_server: S3Server, store: S3Store, fault: Fault, applied: bool
) -> None:
    version = put_new(store, "m", b"1")
    sent = s3_server.count("PUT")
    s3_server.inject(Fault(fault.answer, applied=applied, code=fault.code))
    outcome = store.put_if("m", b"2", IfVersion(version))
    assert isinstance(outcome, outcomes.Unknown)
    assert "'m' in bucket 'bucket'" in outcome.reason
    assert s3_server.count("PUT") == sent + 1
    assert s3_server.objects()["m"] == (b"2" if applied else b"1")


@pytest.mark.parametrize("fault", LOST, ids=lambda fault: str(fault.answer))
def test_f1_a_lost_answer_to_a_creation_is_unknown_after_exactly_one_request(
    s3_server: S3Server, store: S3Store, fault: Fault
) -> None:
    s3_server.inject(fault)
    assert isinstance(store.put_if("m", b"1", ABSENT), outcomes.Unknown)
    assert s3_server.count("PUT") == 1
    assert s3_server.objects() == {"m": b"1"}


def test_f2_an_answer_that_never_comes_is_unknown_after_the_read_timeout(
    s3_server: S3Server,
) -> None:
    store = connect(s3_server, read_timeout_ms=300)
    s3_server.inject(Fault(Answer.HANG))
    outcome = store.put_if("m", b"1", ABSENT)
    assert isinstance(outcome, outcomes.Unknown)
    assert "ReadTimeoutError" in outcome.reason
    # A busy server may come to it only now.
    eventually(lambda: s3_server.objects() == {"m": b"1"})
    assert s3_server.count("PUT") == 1


def test_f3_409_means_the_same_put_again(s3_server: S3Server, store: S3Store) -> None:
    conflict = Fault(409, applied=False, code="ConditionalRequestConflict")
    s3_server.inject(conflict, times=2)
    version = put_new(store, "m", b"1")
    assert s3_server.count("PUT") == 3
    s3_server.inject(conflict)
    assert isinstance(store.put_if("m", b"2", IfVersion(version)), outcomes.Applied)
    assert s3_server.objects() == {"m": b"2"}


def test_f3_a_409_that_stays_is_a_conflict(s3_server: S3Server, store: S3Store) -> None:
    s3_server.inject(Fault(409, applied=False, code="ConditionalRequestConflict"), times=1_000)
    assert store.put_if("m", b"1", ABSENT) == outcomes.Conflict()
    assert 5 < s3_server.count("PUT") < 1_000


def test_nothing_listening_is_unknown_and_names_the_endpoint() -> None:
    options = StoreOptions(endpoint_url="http://127.0.0.1:9", max_attempts=1)
    store = S3Store("bucket", options=options, runtime=ManualRuntime())
    outcome = store.put_if("m", b"1", ABSENT)
    assert isinstance(outcome, outcomes.Unknown)
    assert "http://127.0.0.1:9" in outcome.reason
    with pytest.raises(TransientStorageError, match=r"http://127.0.0.1:9.*Check the endpoint"):
        store.get("m")


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_refused_credentials_are_permanent_and_name_the_bucket(
    s3_server: S3Server, store: S3Store, code: str
) -> None:
    denied = Fault(403, applied=False, code=code)
    for method in ("PUT", "PUT", "GET", "GET"):
        s3_server.inject(denied, method=method)
    with pytest.raises(PermanentStorageError, match=f"'bucket' at http.*{code}"):
        store.put_if("m", b"1", ABSENT)
    with pytest.raises(PermanentStorageError, match=code):
        store.put("m", b"1")
    with pytest.raises(PermanentStorageError, match=code):
        store.get("m")
    with pytest.raises(PermanentStorageError, match=code):
        store.list("")


def test_a_missing_bucket_is_permanent_for_every_operation(s3_server: S3Server) -> None:
    options = StoreOptions(endpoint_url=s3_server.endpoint, max_attempts=1)
    store = S3Store("nobucket", options=options)
    for call in (
        lambda: store.get("m"),
        lambda: store.get("m", byte_range=(0, 1)),
        lambda: store.put("m", b""),
        lambda: store.put_if("m", b"", ABSENT),
        lambda: store.put_if("m", b"", IfVersion('"x"')),
        lambda: store.list(""),
    ):
        with pytest.raises(PermanentStorageError, match="Create bucket 'nobucket' or correct"):
            call()
    (failure,) = store.delete_many(["m"])
    assert "NoSuchBucket" in failure.reason


# ---- a store that accepts and never answers


@pytest.fixture
def silent() -> Iterator[str]:
    """An endpoint that accepts connections and says nothing, also not when they are closed."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_every_call_on_a_silent_store_ends_at_its_deadline(silent: str) -> None:
    # Long after the limit below a request would end by itself.
    options = StoreOptions(endpoint_url=silent, read_timeout_ms=600_000)
    store = S3Store("bucket", options=options)
    runtime = SystemRuntime()

    def timed(call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            with deadline(runtime, 0.3):
                return call()
        finally:
            assert time.monotonic() - began < 120

    for read in (
        lambda: store.get("m"),
        lambda: store.put("m", b"1"),
        lambda: store.list(""),
    ):
        with pytest.raises(TransientStorageError, match=f"at {silent}: no answer in time"):
            timed(read)
    outcome = timed(lambda: store.put_if("m", b"1", ABSENT))
    assert isinstance(outcome, outcomes.Unknown)
    assert "no answer in time" in outcome.reason
    failures = timed(lambda: store.delete_many(f"{number}" for number in range(1_001)))
    assert len(failures) == 1_001


def test_a_call_that_was_left_behind_sends_nothing_more(s3_server: S3Server) -> None:
    options = StoreOptions(endpoint_url=s3_server.endpoint, read_timeout_ms=3_000)
    runtime = ManualRuntime()
    store = S3Store(s3_server.bucket, options=options, runtime=runtime)
    store.put("m", b"1")
    s3_server.inject(Fault(Answer.HANG), method="GET", times=100)

    def pass_the_deadline() -> None:
        eventually(lambda: s3_server.count("GET"))
        runtime.advance(1.0)

    clock = threading.Thread(target=pass_the_deadline)
    clock.start()
    with deadline(runtime, 0.7), pytest.raises(TransientStorageError):
        store.get("m")
    clock.join()
    # The first attempt ends by its timeout, and boto3 would begin the next.
    while any(each.name == "opendata-buffer-store" for each in threading.enumerate()):
        time.sleep(0.01)
    assert s3_server.count("GET") == 1


# ---- does the store honour conditions?


def without(server: S3Server, *headers: str, method: str) -> None:
    """Let the server leave headers out of its answers, or weaken its ETags."""
    serve = server._serve

    def altered(request: Request, bucket: str, body: bytes) -> Any:
        reply = serve(request, bucket, body)
        if request.method == method:
            for header in headers:
                if header != "weak":
                    reply.headers.pop(header, None)
                elif "ETag" in reply.headers:
                    reply.headers["ETag"] = f"W/{reply.headers['ETag']}"
        return reply

    server._serve = altered  # type: ignore[method-assign]


def test_a_store_that_answers_writes_without_an_etag_works(
    s3_server: S3Server, store: S3Store
) -> None:
    without(s3_server, "ETag", method="PUT")
    store.check_conditional_writes("ingest/manifest")
    version = put_new(store, "m", b"1")
    replaced = store.put_if("m", b"2", IfVersion(version))
    assert isinstance(replaced, outcomes.Applied)
    assert store.get("m", if_changed=replaced.value) == NotModified()


@pytest.mark.parametrize(
    ("header", "found"), [("ETag", "no ETag"), ("weak", r'the weak ETag W/"[0-9a-f]+"')]
)
def test_f12_a_store_whose_reads_have_no_strong_etag_is_refused(
    s3_server: S3Server, store: S3Store, header: str, found: str
) -> None:
    for method in ("PUT", "GET"):
        without(s3_server, header, method=method)
    with pytest.raises(UnsafeStore, match=f"'s3://bucket' at http://127.*a read with {found}"):
        store.check_conditional_writes("ingest/manifest")
    assert s3_server.objects() == {}


@pytest.mark.parametrize(
    ("ignored", "step"),
    [("if-match", "If-Match on a missing object"), ("if-none-match", "on an existing object")],
)
def test_f12_a_store_that_ignores_conditions_is_refused(ignored: str, step: str) -> None:
    with S3Server(ignored_conditions=frozenset({ignored})) as server:
        store = connect(server)
        with pytest.raises(UnsafeStore, match=f"'s3://bucket' at http://127.*{step}"):
            store.check_conditional_writes("ingest/manifest")
        assert server.objects() == {}  # the probe is gone
        with pytest.raises(UnsafeStore):
            store.check_conditional_writes("ingest/manifest")


def test_f12_a_store_that_knows_no_conditions_is_refused(
    s3_server: S3Server, store: S3Store
) -> None:
    s3_server.inject(Fault(501, applied=False, code="NotImplemented"))
    with pytest.raises(UnsafeStore, match="NotImplemented"):
        store.check_conditional_writes("ingest/manifest")


def test_f12_a_good_store_is_asked_once_per_process(s3_server: S3Server, store: S3Store) -> None:
    store.check_conditional_writes("ingest/manifest")
    asked = len(s3_server.requests)
    assert {request.key.split(".probe-")[0] for request in s3_server.requests if request.key} == {
        "ingest/manifest"
    }
    connect(s3_server).check_conditional_writes("other/manifest")
    assert len(s3_server.requests) == asked


def test_f12_lost_answers_during_the_check_are_tried_again(
    s3_server: S3Server, store: S3Store
) -> None:
    s3_server.inject(Fault(503), times=3)
    store.check_conditional_writes("ingest/manifest")
    assert s3_server.objects() == {}


# ---- reads, listings and unconditional writes are repeated


@pytest.mark.parametrize("fault", LOST[:6], ids=lambda fault: str(fault.answer))
def test_an_unconditional_put_is_repeated(
    s3_server: S3Server, store: S3Store, fault: Fault
) -> None:
    s3_server.inject(fault, times=2)
    store.put("a", b"1")
    assert s3_server.count("PUT") == 3
    assert s3_server.objects() == {"a": b"1"}


@pytest.mark.parametrize("code", ["OperationAborted", "ConditionalRequestConflict"])
def test_an_unconditional_put_is_repeated_after_a_409(
    s3_server: S3Server, store: S3Store, code: str
) -> None:
    s3_server.inject(Fault(409, applied=False, code=code), times=2)
    store.put("a", b"1")
    assert s3_server.count("PUT") == 3
    s3_server.inject(Fault(409, applied=False, code=code), times=1_000)
    with pytest.raises(TransientStorageError, match=f"{code}.*nothing was changed; try again"):
        store.put("a", b"2")
    assert s3_server.objects() == {"a": b"1"}


SPOILT = [Fault(500), Fault(Answer.CLOSE), Fault(Answer.TRUNCATE), Fault(Answer.CORRUPT)]


@pytest.mark.parametrize("fault", SPOILT, ids=lambda fault: str(fault.answer))
def test_f36_a_read_that_breaks_off_or_is_garbled_is_repeated(
    s3_server: S3Server, store: S3Store, fault: Fault
) -> None:
    store.put("a", b"0123456789" * 1_000)
    s3_server.inject(fault, method="GET", times=2)
    blob = store.get("a")
    assert isinstance(blob, Blob)
    assert blob.data == b"0123456789" * 1_000
    assert s3_server.count("GET") == 3


@pytest.mark.parametrize(
    "fault", [Fault(500), Fault(Answer.RESET), Fault(Answer.TRUNCATE)], ids=lambda f: str(f.answer)
)
def test_a_listing_that_breaks_off_is_repeated_whole(
    s3_server: S3Server, store: S3Store, fault: Fault
) -> None:
    s3_server.page_size = 2
    for name in "abcde":
        store.put(name, b"")
    s3_server.inject(fault, method="GET")
    assert [info.key for info in store.list("").objects] == list("abcde")


LISTED = "<Contents><Key>a</Key><Size>{}</Size><LastModified>{}</LastModified></Contents>"


@pytest.mark.parametrize(
    "body",
    [
        "<html><body>Sign in to the guest network</body></html>",
        "",
        "<L><Name>bucket</Name><IsTruncated>true</IsTruncated></L>",
        "<L><Name>bucket</Name><Contents><Size>1</Size></Contents></L>",
        f"<L><Name>bucket</Name>{LISTED.format('x', '2026-01-01T00:00:00Z')}</L>",
        f"<L><Name>bucket</Name>{LISTED.format('1', 'soon')}</L>",
        "no markup at all",
    ],
)
def test_a_listing_that_is_none_is_transient_and_not_empty(body: str) -> None:
    with ScriptedServer(Reply(200, body.encode())).running() as url:
        store = S3Store("bucket", options=StoreOptions(endpoint_url=url, max_attempts=1))
        with pytest.raises(TransientStorageError, match="cannot list 'in/' in bucket 'bucket'"):
            store.list("in/")


@pytest.mark.parametrize("status", [200, 202])
def test_what_makes_no_sense_as_an_answer_to_a_conditional_write_is_unknown(status: int) -> None:
    with ScriptedServer(Reply(status, b"<html><br>")).running() as url:
        store = S3Store("bucket", options=StoreOptions(endpoint_url=url, max_attempts=1))
        assert isinstance(store.put_if("m", b"1", ABSENT), outcomes.Unknown)


def test_an_upload_answered_without_an_etag_is_believed_only_if_the_object_is_there(
    s3_server: S3Server, store: S3Store
) -> None:
    without(s3_server, "ETag", method="PUT")
    store.put("k", b"bytes")
    assert s3_server.objects() == {"k": b"bytes"}
    with ScriptedServer(Reply(200, b"<html>Sign in</html>")).running() as url:
        portal = S3Store("bucket", options=StoreOptions(endpoint_url=url, max_attempts=1))
        with pytest.raises(TransientStorageError, match="without its version"):
            portal.put("k", b"bytes")
    nowhere = ScriptedServer(Reply(200), Reply(404))
    with nowhere.running() as url:
        store = S3Store("bucket", options=StoreOptions(endpoint_url=url, max_attempts=1))
        with pytest.raises(TransientStorageError, match="without its version"):
            store.put("k", b"bytes")


def test_a_listing_with_a_limit_asks_for_no_more_than_it_returns(
    s3_server: S3Server, store: S3Store
) -> None:
    for name in "abcdefgh":
        store.put(name, b"")
    before = s3_server.count("GET")
    listing = store.list("", start_after="b", limit=3)
    assert [info.key for info in listing.objects] == list("cde")
    assert listing.truncated
    (request,) = [each for each in s3_server.requests if each.method == "GET"][before:]
    assert request.query["start-after"] == ["b"]
    assert request.query["max-keys"] == ["3"]


def test_f6_the_stores_clock_is_the_date_of_the_first_page() -> None:
    stored_ms, listed_ms, step_ms = 1_767_225_600_000, 1_767_226_500_000, 60_000
    times: Iterator[int] = repeat(stored_ms)
    with S3Server(now_ms=lambda: next(times), page_size=1) as server:
        store = connect(server)
        store.put("a", b"")
        store.put("b", b"")
        # Each answer from now on takes a minute. What came after the first page was asked for
        # may be younger than its listing says.
        times = count(listed_ms, step_ms)
        listing = store.list("")
        assert listing.now_ms == listed_ms
        assert next(times) > listed_ms + step_ms, "there was more than one page"
        assert [info.last_modified_ms for info in listing.objects] == [stored_ms] * 2


def test_f36_every_upload_carries_a_checksum(s3_server: S3Server, store: S3Store) -> None:
    store.put("a", b"123456789")
    put_new(store, "b", b"123456789")
    # CRC32 of "123456789" is the check value 0xCBF43926.
    sent = [request.headers["x-amz-checksum-crc32"] for request in s3_server.requests]
    assert sent == ["y/Q5Jg==", "y/Q5Jg=="]
    assert not any("trailer" in name for each in s3_server.requests for name in each.headers)


def test_f36_over_https_the_checksum_is_a_header_and_the_body_is_as_it_is() -> None:
    """Left to itself boto3 sends the body in chunks and the checksum behind it."""
    options = StoreOptions(endpoint_url="https://localhost:9")
    store = S3Store("bucket", "", options, runtime=ManualRuntime())
    sent: list[AWSPreparedRequest] = []

    def answer(request: AWSPreparedRequest, **_: object) -> AWSResponse:
        sent.append(request)
        body = SimpleNamespace(stream=lambda: iter(()))
        return AWSResponse(request.url, 200, {"ETag": '"1"'}, body)

    store._client.get().meta.events.register("before-send.s3.PutObject", answer)
    store.put("a", b"123456789")
    put_new(store, "b", b"123456789")
    for request in sent:
        assert request.headers["x-amz-checksum-crc32"] in ("y/Q5Jg==", b"y/Q5Jg==")
        assert "x-amz-trailer" not in request.headers
        assert request.headers.get("Content-Encoding") is None
    assert len(sent) == 2


# ---- names, deletion, pickling


def test_deletes_go_out_by_the_thousand(s3_server: S3Server, store: S3Store) -> None:
    keys = [f"in/{number}" for number in range(2_001)]
    store.put(keys[-1], b"")
    assert store.delete_many(keys) == ()
    assert s3_server.count("POST") == 3
    assert s3_server.objects() == {}


def test_without_bulk_deletes_objects_are_deleted_one_by_one(
    s3_server: S3Server, store: S3Store
) -> None:
    for name in "abc":
        store.put(name, b"")
    s3_server.inject(Fault(501, applied=False, code="NotImplemented"), method="POST")
    s3_server.inject(Fault(403, applied=False, code="AccessDenied"), method="DELETE", key="b")
    (failure,) = store.delete_many(list("abcd"))
    assert failure.key == "b"
    assert "AccessDenied" in failure.reason
    assert s3_server.objects() == {"b": b""}


def test_a_bulk_delete_that_fails_returns_its_keys(s3_server: S3Server, store: S3Store) -> None:
    store.put("a", b"")
    s3_server.inject(Fault(503, applied=False), method="POST", times=3)
    failures = store.delete_many(["a", "b", "bad//key"])
    assert sorted(failure.key for failure in failures) == ["a", "b", "bad//key"]
    assert s3_server.objects() == {"a": b""}
    assert store.delete_many(["a", "b"]) == ()


def test_a_forked_child_uses_no_connection_of_its_parent(
    s3_server: S3Server, store: S3Store
) -> None:
    store.put("a", b"1")
    child = os.fork()
    if child == 0:
        try:
            store.put("b", b"2")
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert isinstance(store.get("a"), Blob)
    assert s3_server.objects() == {"a": b"1", "b": b"2"}


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")


def test_the_endpoint_of_the_environment_is_honoured(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    S3Store("bucket").put("a", b"1")
    assert s3_server.objects() == {"a": b"1"}


def answer(status: int, code: str, message: str = "") -> boto.ClientError:
    return boto.ClientError(
        {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},  # type: ignore[typeddict-item]
        },
        "PutObject",
    )


def said(error: Exception, verb: str = "write") -> Exception:
    store = S3Store("bkt", options=StoreOptions(endpoint_url="https://s3.test"))
    return store._error(error, verb, "in/m")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (answer(500, "InternalError"), "try again later"),
        (answer(503, "SlowDown"), "try again later"),
        (answer(502, "502"), "try again later"),
        (answer(429, "TooManyRequests"), "overloaded"),
        (answer(408, "RequestTimeout"), "overloaded"),
        (answer(400, "RequestTimeout"), "overloaded"),
        (answer(400, "BadDigest"), "garbled"),
        (answer(400, "XAmzContentChecksumMismatch"), "garbled"),
        (boto.EndpointConnectionError(endpoint_url="https://s3.test"), "Check the endpoint"),
        (boto.ConnectTimeoutError(endpoint_url="https://s3.test"), "Check the endpoint"),
        (boto.ReadTimeoutError(endpoint_url="https://s3.test"), "ReadTimeoutError"),
        (boto.ConnectionClosedError(endpoint_url="https://s3.test"), "ConnectionClosedError"),
        (boto.CredentialRetrievalError(provider="iam", error_msg="slow"), "slow"),
        (urllib3.exceptions.ProtocolError("broken"), "broken"),
        (ConnectionResetError("reset"), "reset"),
    ],
)
def test_what_may_pass_is_transient(error: Exception, fix: str) -> None:
    mapped = said(error)
    assert type(mapped) is TransientStorageError
    assert str(mapped).startswith("cannot write 'in/m' in bucket 'bkt' at https://s3.test: ")
    assert fix in str(mapped)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (answer(404, "NoSuchBucket"), "Create bucket 'bkt' or correct the store URL."),
        (answer(403, "AccessDenied"), "Allow these credentials to write objects"),
        (answer(403, "InvalidAccessKeyId"), "Renew or correct the AWS credentials."),
        (answer(400, "ExpiredToken"), "Renew or correct the AWS credentials."),
        (answer(403, "RequestTimeTooSkewed"), "Set this machine's clock."),
        (answer(301, "PermanentRedirect"), "Set the bucket's own region"),
        (
            answer(400, "AuthorizationHeaderMalformed", "the Region 'a' is wrong; expecting 'b'"),
            "Set the bucket's own region",
        ),
        (answer(400, "EntityTooLarge"), "EntityTooLarge (HTTP 400)."),
        (answer(501, "NotImplemented"), "NotImplemented (HTTP 501)."),
        (boto.NoCredentialsError(), "Provide AWS credentials"),
        (boto.UnauthorizedSSOTokenError(), "Provide AWS credentials"),
        (boto.ParamValidationError(report="Invalid bucket name"), "Correct the bucket's name."),
        (
            boto.SSLError(endpoint_url="https://s3.test", error="CERTIFICATE_VERIFY_FAILED"),
            "Set AWS_CA_BUNDLE",
        ),
    ],
)
def test_what_stays_is_permanent_and_names_the_fix(error: Exception, fix: str) -> None:
    mapped = said(error)
    assert type(mapped) is PermanentStorageError
    assert str(mapped).startswith("cannot write 'in/m' in bucket 'bkt' at https://s3.test: ")
    assert fix in str(mapped)


def test_a_denied_read_may_be_a_missing_object() -> None:
    denied = answer(403, "AccessDenied")
    assert "s3:ListBucket" in str(said(denied, "read"))
    assert "s3:ListBucket" not in str(said(denied))


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


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_of_a_proxy_is_permanent_and_not_followed(script: Script, status: int) -> None:
    store, server = script(Reply(status, b"", {"location": "https://login/?next=secret"}))
    for call in calls(store):
        with pytest.raises(PermanentStorageError, match="endpoint_url to the store itself") as told:
            call()
        assert "secret" not in str(told.value)
    assert {each.headers["host"] for each in server.asked} == {server.url.removeprefix("http://")}


def test_a_404_of_a_proxy_is_no_missing_object(script: Script) -> None:
    store, _ = script(BY_A_PROXY)
    for call in (calls(store)[0], *calls(store)[1::2]):
        with pytest.raises(TransientStorageError, match=r"not S3's answer \(a proxy, an ingress"):
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


def test_an_error_whose_body_breaks_off_is_transient(script: Script) -> None:
    store, _ = script(Reply(403, b"<Error>", {"content-length": "100", "connection": "close"}))
    with pytest.raises(StorageError):
        store.list("")
