"""The boto3 client: how it is shared, and the credentials that it signs with."""

from __future__ import annotations

import gc
import pickle
import re
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock
from urllib.parse import parse_qs

import botocore.session
import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import CorruptData, ObjectNotFound, PermanentStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.clients import AWS_ENVIRONMENT, ProcessClient
from opendata_buffer.stores.open import open_store
from opendata_buffer.stores.s3 import S3Store, connect
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer
from tests.support.s3_server import Answer, Fault, S3Server
from tests.unit.stores.cloud_responses import notebook_credential

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

HERE = StoreOptions(endpoint_url="http://127.0.0.1:9")


def clients_of(options: StoreOptions) -> ProcessClient[S3Client]:
    return ProcessClient(connect, AWS_ENVIRONMENT, options)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", None])
def test_f1_every_request_is_sent_once(endpoint: str | None) -> None:
    # None is Amazon's own endpoint, whose client is created in another way.
    options = StoreOptions(endpoint_url=endpoint, region="eu-west-1", max_attempts=7)
    retries = clients_of(options).get().meta.config.retries
    assert retries == {"mode": "standard", "total_max_attempts": 1}


def test_rotated_credentials_do_not_accumulate_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    options = StoreOptions(endpoint_url="http://127.0.0.1:9", max_connections=3)
    old: list[weakref.ref[object]] = []
    for number in range(4):
        monkeypatch.setenv("AWS_SESSION_TOKEN", f"token {number}")
        store = open_store("s3://rotated", options)
        assert isinstance(store, S3Store)
        old += [weakref.ref(store), weakref.ref(store._client.get())]
        assert store is open_store("s3://rotated", options)
        del store
    gc.collect()
    assert [each() is None for each in old] == [True] * 6 + [False] * 2, "a client takes 12.7 MiB"


def test_the_bucket_is_in_the_path_except_at_amazon() -> None:
    assert clients_of(HERE).get().meta.config.s3 == {"addressing_style": "path"}
    amazon = clients_of(StoreOptions(region="eu-west-1")).get()
    assert amazon.meta.config.s3 == {"addressing_style": "auto"}
    assert amazon.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (StoreOptions(endpoint_url="http://a b"), "Invalid endpoint: http://a b"),
        (StoreOptions(profile="nobody"), r"profile \(nobody\) could not be found"),
    ],
)
def test_options_that_boto3_refuses_are_permanent_errors(options: StoreOptions, cause: str) -> None:
    with pytest.raises(PermanentStorageError, match=f"cannot make an S3 client: .*{cause}"):
        clients_of(options).get()


def test_a_profile_and_its_region_come_from_the_shared_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[profile team]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert clients_of(StoreOptions(profile="team")).get().meta.region_name == "eu-north-1"


ROLE = "arn:aws:iam::123456789012:role/buffer"
MISSING = Reply(404, b"<Error><Code>NoSuchKey</Code></Error>")


@pytest.fixture
def bucket() -> Iterator[ScriptedServer]:
    server = ScriptedServer(MISSING)
    with server.running():
        yield server


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    server = ScriptedServer(granted("first", hours=1))
    with server.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        yield server


def granted(key: str, *, hours: float) -> Reply:
    """Return the answer of STS when a role is assumed."""
    ends = (datetime.now(UTC) + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Reply(
        200,
        f"""<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
        <AssumeRoleResult><Credentials><AccessKeyId>{key}</AccessKeyId>
        <SecretAccessKey>s</SecretAccessKey><SessionToken>token-{key}</SessionToken>
        <Expiration>{ends}</Expiration></Credentials><AssumedRoleUser><Arn>a</Arn>
        <AssumedRoleId>i</AssumedRoleId></AssumedRoleUser></AssumeRoleResult>
        </AssumeRoleResponse>""".encode(),
    )


def asks(store: S3Store) -> None:
    with pytest.raises(ObjectNotFound):
        store.get("key")


def signers(server: ScriptedServer) -> list[str]:
    """Return the access key ID of each request, or an empty text if it is not signed."""
    found = []
    for asked in server.asked:
        signed = re.search(r"Credential=([^/]*)/", asked.headers.get("authorization", ""))
        found.append("" if signed is None else signed[1])
    return found


def store_at(server: ScriptedServer, **options: object) -> S3Store:
    return S3Store("bucket", options=StoreOptions(endpoint_url=server.url, **options))  # type: ignore[arg-type]


def test_keys_of_the_options_win_over_those_of_the_environment(bucket: ScriptedServer) -> None:
    asks(store_at(bucket, access_key_id="mine", secret_access_key="s", session_token="t"))
    assert signers(bucket) == ["mine"]
    assert bucket.asked[0].headers["x-amz-security-token"] == "t"
    asks(store_at(bucket))
    assert signers(bucket) == ["mine", "testing"]


def test_anonymous_requests_are_not_signed(bucket: ScriptedServer) -> None:
    asks(store_at(bucket, anonymous=True))
    assert signers(bucket) == [""]


def test_a_role_is_assumed_once_and_used_by_all_requests(
    bucket: ScriptedServer, sts: ScriptedServer
) -> None:
    store = store_at(bucket, role_arn=ROLE, external_id="shop 7", session_name="orders")
    asks(store)
    asks(store)
    store.put_if("key", b"", '"1"')
    assert signers(bucket) == ["first"] * 3
    assert bucket.asked[0].headers["x-amz-security-token"] == "token-first"
    (request,) = sts.asked
    fields = parse_qs(request.body.decode())
    assert fields["Action"] == ["AssumeRole"]
    assert fields["RoleArn"] == [ROLE]
    assert fields["ExternalId"] == ["shop 7"]
    assert fields["RoleSessionName"] == ["orders"]
    assert signers(sts) == ["testing"], "the role is assumed with the credentials of the chain"


def test_a_role_that_is_about_to_expire_is_assumed_again(
    bucket: ScriptedServer, sts: ScriptedServer
) -> None:
    sts.replies = [granted("ending", hours=0.1), granted("next", hours=1)]
    store = store_at(bucket, role_arn=ROLE)
    asks(store)
    asks(store)
    asks(store)
    assert signers(bucket)[1:] == ["next", "next"]
    assert len(sts.asked) == 2
    assert b"RoleSessionName=opendata-buffer" in sts.asked[0].body


def test_a_role_is_assumed_with_the_keys_of_the_options(
    bucket: ScriptedServer, sts: ScriptedServer
) -> None:
    asks(store_at(bucket, role_arn=ROLE, access_key_id="mine", secret_access_key="s"))
    assert (signers(sts), signers(bucket)) == (["mine"], ["first"])


def test_the_error_about_a_role_that_may_not_be_assumed_has_a_fix(
    bucket: ScriptedServer, sts: ScriptedServer
) -> None:
    sts.replies = [
        Reply(
            403,
            b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>not authorized to perform: "
            b"sts:AssumeRole</Message></Error></ErrorResponse>",
        )
    ]
    with pytest.raises(PermanentStorageError, match=r"sts:AssumeRole, and its trust policy"):
        store_at(bucket, role_arn=ROLE).get("key")
    assert bucket.asked == []


def test_no_role_is_assumed_without_credentials(
    bucket: ScriptedServer, sts: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PermanentStorageError, match=f"no AWS credentials to assume role '{ROLE}'"):
        store_at(bucket, role_arn=ROLE).get("key")
    assert sts.asked == []


def test_a_service_credential_signs_and_only_its_name_is_pickled(
    bucket: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = botocore.session.Session()
    session.set_credentials("vended", "secret-of-vended", "token")
    asked = notebook_credential(monkeypatch, session)
    store = store_at(bucket, service_credential="team", region="eu-west-1")
    asks(store)
    raw = pickle.dumps(store)
    assert b"team" in raw
    assert b"vended" not in raw
    asks(pickle.loads(raw))
    assert signers(bucket) == ["vended"] * 2
    assert "/eu-west-1/s3/" in bucket.asked[0].headers["authorization"]
    assert asked == ["team"]


# ---- reads that bypass boto3, and otherwise behave the same


DATA = b"0123456789" * 1_000


@pytest.fixture
def store(s3_server: S3Server) -> S3Store:
    """A store that has read once, so that it need not call boto3 again."""
    options = StoreOptions(endpoint_url=s3_server.endpoint, max_attempts=2)
    made = S3Store(s3_server.bucket, "root", options, runtime=ManualRuntime())
    made.put("warm", b"")
    made.get("warm")
    return made


@pytest.fixture
def boto(monkeypatch: pytest.MonkeyPatch, store: S3Store) -> Mock:
    """Count the calls of boto3's ``get_object``."""
    client = store._client.get()
    counted = Mock(wraps=client.get_object)
    monkeypatch.setattr(client, "get_object", counted)
    return counted


def data_of(blob: Blob | None) -> bytes:
    assert isinstance(blob, Blob)
    return blob.data


def test_only_the_first_read_goes_through_boto3(store: S3Store, boto: Mock) -> None:
    store.put("a", DATA)
    blob = store.get("a")
    assert isinstance(blob, Blob)
    assert blob.data == DATA
    assert abs(blob.last_modified_ms - SystemRuntime().now_ms()) < 60_000
    assert store.get("a", if_changed=blob.version) is None
    assert data_of(store.get("a", byte_range=(3, 7))) == b"3456"
    with pytest.raises(ObjectNotFound):
        store.get("missing")
    with pytest.raises(CorruptData, match="10000 bytes to read, more than the limit of 99"):
        store.get("a", max_bytes=99)
    assert boto.call_count == 0


@pytest.mark.parametrize("key", ["a b", "ü/%41", "a+b&c=d?e#f", "~x/-._!*'()", "雪 /;:@$,"])
def test_f24_keys_are_encoded_in_urls_like_in_boto3(store: S3Store, boto: Mock, key: str) -> None:
    store.put(key, key.encode())
    assert data_of(store.get(key)) == key.encode()
    assert boto.call_count == 0


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
def test_a_failed_read_is_repeated_with_boto3(
    s3_server: S3Server, store: S3Store, boto: Mock, fault: Fault
) -> None:
    store.put("a", DATA)
    s3_server.inject(fault, method="GET")
    assert data_of(store.get("a")) == DATA
    assert boto.call_count == 1
    assert data_of(store.get("a")) == DATA
    assert boto.call_count == 1


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunks"])
@pytest.mark.parametrize("kind", ["crc32", "sha1", "sha256"])
def test_f36_every_checksum_that_botocore_supports_is_compared(kind: str, length: bool) -> None:
    """Other clients choose other algorithms, and AWS returns the one that an object has."""
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
def test_f36_a_truncated_or_garbled_body_is_read_again(
    s3_server: S3Server, store: S3Store, boto: Mock, answer: Answer
) -> None:
    store.put("a", DATA)
    s3_server.inject(Fault(answer), method="GET")
    before = s3_server.count("GET")
    assert data_of(store.get("a")) == DATA
    assert s3_server.count("GET") == before + 2
    assert boto.call_count == 0


def test_connections_are_reused(s3_server: S3Server, store: S3Store) -> None:
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


def test_an_answer_without_a_checksum_or_a_length_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ScriptedServer(Reply(200, b"body", {"ETag": '"1"', "x-amz-checksum-crc32": "AAAA-2"}))
    with server.running() as url:
        store = S3Store("bucket", options=StoreOptions(endpoint_url=url))
        for _ in range(2):
            assert data_of(store.get("a")) == b"body"
    assert server.asked[1].headers["x-amz-checksum-mode"] == "ENABLED"
