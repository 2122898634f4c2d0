"""Lost and unusual responses of S3 over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import botocore.exceptions as boto
import pytest
import urllib3.exceptions
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from opendata_buffer import Consumer, Producer, outcomes
from opendata_buffer.admin.queue_check import Kind, check_queue, plan_repair, repair
from opendata_buffer.admin.target import Target
from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    QueueConfig,
    StoreOptions,
)
from opendata_buffer.errors import (
    BatchUnreadable,
    InvalidInput,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.quarantine import list_quarantine, read_copy
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores import http
from opendata_buffer.stores.base import Blob, read_bytes
from opendata_buffer.stores.probed import CheckedPlaces
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply
from tests.support.s3_server import Answer, Fault, S3Server
from tests.unit.broker.local import eventually
from tests.unit.stores.cloud_responses import S3, Script, scripted


def connect(server: S3Server, *, read_timeout_ms: int = 30_000) -> S3Store:
    options = StoreOptions(
        endpoint_url=server.endpoint, read_timeout_ms=read_timeout_ms, max_attempts=3
    )
    return S3Store(server.bucket, options=options, runtime=ManualRuntime())


@pytest.fixture
def store(s3_server: S3Server) -> S3Store:
    return connect(s3_server)


def put_new(store: S3Store, key: str, data: bytes) -> str:
    outcome = store.put_if(key, data, None)
    assert isinstance(outcome, outcomes.Applied)
    return outcome.value


LOST = [Fault(status) for status in (500, 502, 503, 504)] + [
    Fault(Answer.CLOSE),
    Fault(Answer.RESET),
    Fault(429, code="SlowDown"),
    Fault(400, code="RequestTimeout"),
]


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "lost on the way"])
@pytest.mark.parametrize("fault", LOST, ids=lambda fault: str(fault.answer))
def test_f1_f2_a_lost_answer_is_unknown_after_exactly_one_request(
    s3_server: S3Server, store: S3Store, fault: Fault, applied: bool
) -> None:
    version = put_new(store, "m", b"1")
    sent = s3_server.count("PUT")
    s3_server.inject(Fault(fault.answer, applied=applied, code=fault.code))
    outcome = store.put_if("m", b"2", version)
    assert isinstance(outcome, outcomes.Unknown)
    assert "'m' in bucket 'bucket'" in outcome.reason
    assert s3_server.count("PUT") == sent + 1
    assert s3_server.objects()["m"] == (b"2" if applied else b"1")


def test_f2_an_answer_that_never_comes_is_unknown_after_the_read_timeout(
    s3_server: S3Server,
) -> None:
    store = connect(s3_server, read_timeout_ms=300)
    s3_server.inject(Fault(Answer.HANG))
    outcome = store.put_if("m", b"1", None)
    assert isinstance(outcome, outcomes.Unknown)
    assert "ReadTimeoutError" in outcome.reason
    # A busy server may apply it only now.
    eventually(lambda: s3_server.objects() == {"m": b"1"})
    assert s3_server.count("PUT") == 1


def test_f3_a_put_is_repeated_after_a_409(s3_server: S3Server, store: S3Store) -> None:
    conflict = Fault(409, applied=False, code="ConditionalRequestConflict")
    s3_server.inject(conflict, times=2)
    version = put_new(store, "m", b"1")
    assert s3_server.count("PUT") == 3
    s3_server.inject(conflict)
    assert isinstance(store.put_if("m", b"2", version), outcomes.Applied)
    assert s3_server.objects() == {"m": b"2"}


def test_f3_a_409_that_stays_is_a_conflict(s3_server: S3Server, store: S3Store) -> None:
    s3_server.inject(Fault(409, applied=False, code="ConditionalRequestConflict"), times=1_000)
    assert store.put_if("m", b"1", None) == outcomes.LostRace()
    assert 5 < s3_server.count("PUT") < 1_000


@pytest.mark.parametrize(
    ("ignored", "step"),
    [("if-match", "If-Match on a missing object"), ("if-none-match", "on an existing object")],
)
def test_f12_a_store_that_ignores_conditions_is_refused(ignored: str, step: str) -> None:
    with S3Server(ignored_conditions=frozenset({ignored})) as server:
        store = connect(server)
        with pytest.raises(UnsafeStore, match=f"'s3://bucket' at http://127.*{step}"):
            store.check_conditional_writes("ingest/manifest")
        assert server.objects() == {}  # the probe was deleted
        with pytest.raises(UnsafeStore):
            store.check_conditional_writes("ingest/manifest")


def test_f12_a_store_that_does_not_support_conditions_is_refused(
    s3_server: S3Server, store: S3Store
) -> None:
    s3_server.inject(Fault(501, applied=False, code="NotImplemented"))
    with pytest.raises(UnsafeStore, match="NotImplemented"):
        store.check_conditional_writes("ingest/manifest")


def test_f12_a_sound_store_is_probed_once_per_process(s3_server: S3Server, store: S3Store) -> None:
    store.check_conditional_writes("ingest/manifest")
    asked = len(s3_server.requests)
    assert {request.key.split(".probe-")[0] for request in s3_server.requests if request.key} == {
        "ingest/manifest"
    }
    connect(s3_server).check_conditional_writes("other/manifest")
    assert len(s3_server.requests) == asked


def test_f12_a_new_process_sends_one_wrong_write_to_the_place_that_the_marker_names(
    s3_server: S3Server, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = QueueConfig(store=store.url)
    claim_for_writing(store, config, runtime=ManualRuntime())
    before = s3_server.objects()
    written = s3_server.count("PUT")

    monkeypatch.setattr(http, "PLACES", CheckedPlaces())  # as in a new process
    claim_for_writing(connect(s3_server), config, runtime=ManualRuntime())
    assert s3_server.count("PUT") == written + 1
    claim_for_writing(connect(s3_server), config, runtime=ManualRuntime())
    assert s3_server.count("PUT") == written + 1, "once per process"
    assert s3_server.objects() == before

    with S3Server(ignored_conditions=frozenset({"if-match"})) as other:
        elsewhere = connect(other)
        for key, data in before.items():
            elsewhere.put(key, data)
        with pytest.raises(UnsafeStore, match="If-Match on a missing object"):
            claim_for_writing(elsewhere, config, runtime=ManualRuntime())
        assert other.objects() == before


def test_f36_a_flipped_bit_in_a_stored_batch_is_found_and_the_batch_is_skipped(
    s3_server: S3Server, store: S3Store
) -> None:
    config = ConsumerConfig(store=store.url, gc=GarbageCollectorConfig(enabled=False))
    with Producer(ProducerConfig(store=store.url), store=store) as producer:
        for record in (b"a", b"b"):
            producer.produce([record])
            producer.flush()
    runtime = SystemRuntime()
    location = store.list("ingest/0").objects[0].key
    s3_server.flip(location, 4)
    flipped = s3_server.objects()[location]
    assert decode_batch(flipped) == [b"`"], "the format alone cannot detect it"
    with Consumer(config, store=store) as consumer, pytest.raises(BatchUnreadable, match="checksu"):
        consumer.next_batch()
    queue = Target(store, config, runtime)
    report = check_queue(queue)
    assert [each.kind for each in report.problems] == [Kind.UNREADABLE]
    repair(queue, plan_repair(report)[0])
    assert check_queue(queue).ok
    (copied,) = list_quarantine(store, "ingest")
    assert read_copy(store, "ingest", copied) == flipped


def test_a_listing_with_a_limit_requests_only_what_it_returns(
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


def test_the_unsorted_listing_of_a_directory_bucket_is_sorted() -> None:
    with S3Server("queue--use1-az4--x-s3", page_size=7) as server:
        store = connect(server)
        store.check_conditional_writes("q/manifest")
        keys = sorted(f"q/{n:03}{'/_owner.json' if n % 9 == 0 else '.batch'}" for n in range(60))
        for key in keys:
            store.put(key, b"1")
        found, after = list[str](), ""
        while True:
            page = store.list("q/", start_after=after, limit=20)
            found += [info.key for info in page.objects]
            after = found[-1]
            if not page.truncated:
                break
        assert found == keys
        assert [info.key for info in store.list("q/01").objects] == keys[10:20]
        assert [read_bytes(store, key) for key in keys[:3]] == [b"1"] * 3


def test_f36_every_upload_has_a_checksum(s3_server: S3Server, store: S3Store) -> None:
    store.put("a", b"123456789")
    put_new(store, "b", b"123456789")
    # CRC32 of "123456789" is the check value 0xCBF43926.
    sent = [request.headers["x-amz-checksum-crc32"] for request in s3_server.requests]
    assert sent == ["y/Q5Jg==", "y/Q5Jg=="]
    assert not any("trailer" in name for each in s3_server.requests for name in each.headers)


def test_f36_over_https_the_checksum_is_a_header_and_the_body_is_unchanged() -> None:
    """By default, boto3 sends the body in chunks with the checksum after it."""
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


def test_objects_are_deleted_one_by_one_without_bulk_deletes(
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


def test_the_endpoint_of_the_environment_is_used(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    S3Store("bucket").put("a", b"1")
    assert s3_server.objects() == {"a": b"1"}


AT = "https://s3.test"


@pytest.mark.parametrize(
    ("error", "kind", "fix"),
    [
        (boto.EndpointConnectionError(endpoint_url=AT), TransientStorageError, "at the endpoint"),
        (boto.ReadTimeoutError(endpoint_url=AT), TransientStorageError, "ReadTimeoutError"),
        (urllib3.exceptions.ProtocolError("broken"), TransientStorageError, "broken"),
        (ConnectionResetError("reset"), TransientStorageError, "reset"),
        (boto.NoCredentialsError(), PermanentStorageError, "Provide AWS credentials"),
        (boto.UnauthorizedSSOTokenError(), PermanentStorageError, "Provide AWS credentials"),
        (boto.ParamValidationError(report="Bad"), PermanentStorageError, "the bucket's name"),
        (
            boto.SSLError(endpoint_url=AT, error="CERTIFICATE_VERIFY_FAILED"),
            PermanentStorageError,
            "Set AWS_CA_BUNDLE",
        ),
    ],
)
def test_an_error_of_boto3_is_raised_with_a_fix(
    error: Exception, kind: type[StorageError], fix: str
) -> None:
    store = S3Store("bkt", options=StoreOptions(endpoint_url=AT))
    mapped = store._error(error, "write", "in/m")
    assert type(mapped) is kind
    assert str(mapped).startswith("cannot write 'in/m' in bucket 'bkt' at https://s3.test: ")
    assert fix in str(mapped)


BY_A_PROXY = Reply(404, b"404 page not found\n", {"content-type": "text/plain"})


@pytest.fixture
def script() -> Iterator[Script]:
    with ExitStack() as running:
        yield scripted(S3, running)


def test_a_404_of_a_proxy_does_not_mean_a_missing_object(script: Script) -> None:
    store, _ = script(BY_A_PROXY)
    for call in (lambda: store.get("k"), lambda: store.put("k", b"x"), lambda: store.list("")):
        with pytest.raises(TransientStorageError, match="not the answer of the store"):
            call()
    assert isinstance(store.put_if("k", b"x", '"7"'), outcomes.Unknown)
    store, _ = script(S3.found, BY_A_PROXY)
    assert isinstance(store.get("k"), Blob)
    with pytest.raises(TransientStorageError):
        store.get("k")  # bypassing boto3


@pytest.mark.parametrize(
    ("bucket", "region", "check"),
    [
        ("orders", "eu-nowhere-9", "Check the region 'eu-nowhere-9', and the network"),
        ("Old_Name", "us-east-1", "the bucket's name 'Old_Name' (S3 accepts lower-case letters"),
    ],
)
def test_the_error_about_an_unreachable_aws_names_the_region_and_an_unusual_bucket(
    bucket: str, region: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    store = S3Store(bucket, options=StoreOptions(region=region, anonymous=True))
    refused = boto.EndpointConnectionError(endpoint_url="https://nowhere")
    assert check in str(store._error(refused, "read", "key"))
    other = StoreOptions(region=region, anonymous=True, endpoint_url="http://minio:9000")
    store = S3Store(bucket, options=other)
    assert "Check what answers at the endpoint" in str(store._error(refused, "read", "key"))


@pytest.mark.parametrize("bucket", ["b,ucket", "b ucket", "bücket"])
def test_a_name_that_no_bucket_has_is_refused_before_any_request(bucket: str) -> None:
    with pytest.raises(InvalidInput, match="only letters, digits, dots, hyphens and underscores"):
        S3Store(bucket)
