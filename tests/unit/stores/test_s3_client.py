"""The boto3 client: how it is shared, and with what credentials it signs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

import gc
import pickle
import re
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs

import botocore.session
import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import ObjectNotFound, PermanentStorageError
from opendata_buffer.stores.base import IfVersion
from opendata_buffer.stores.clients import AWS_ENVIRONMENT, ProcessClient
from opendata_buffer.stores.open import open_store
from opendata_buffer.stores.s3 import S3Store, connect
from tests.http_scripts import Reply, ScriptedServer
from tests.unit.stores.cloud_responses import notebook_credential

HERE = StoreOptions(endpoint_url="http://127.0.0.1:9")


def clients_of(options: StoreOptions) -> ProcessClient[S3Client]:
    return ProcessClient(connect, AWS_ENVIRONMENT, options)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", None])
def test_f1_every_request_is_sent_once(endpoint: str | None) -> None:
    # None is Amazon's own, which is made on another path.
    options = StoreOptions(endpoint_url=endpoint, region="eu-west-1", max_attempts=7)
    retries = clients_of(options).get().meta.config.retries
    assert retries == {"mode": "standard", "total_max_attempts": 1}


def test_the_timeouts_are_those_of_the_options() -> None:
    options = StoreOptions(
        endpoint_url="http://127.0.0.1:9",
        connect_timeout_ms=1_234,
        read_timeout_ms=5_678,
        max_connections=9,
    )
    config = clients_of(options).get().meta.config
    assert (config.connect_timeout, config.read_timeout) == (1.234, 5.678)
    assert config.max_pool_connections == 9
    assert config.tcp_keepalive


def test_rotated_credentials_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [each() is None for each in old] == [True] * 6 + [False] * 2, "12.7 MiB each"


def test_buckets_are_in_the_path_except_at_amazon() -> None:
    assert clients_of(HERE).get().meta.config.s3 == {"addressing_style": "path"}
    amazon = clients_of(StoreOptions(region="eu-west-1")).get()
    assert amazon.meta.config.s3 == {"addressing_style": "auto"}
    assert amazon.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (StoreOptions(endpoint_url="junk"), "Invalid endpoint: junk"),
        (StoreOptions(profile="nobody"), r"profile \(nobody\) could not be found"),
    ],
)
def test_options_boto3_refuses_are_permanent_errors(options: StoreOptions, cause: str) -> None:
    with pytest.raises(PermanentStorageError, match=f"cannot make an S3 client: .*{cause}"):
        clients_of(options).get()


def test_profile_and_its_region_come_from_the_shared_files(
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
    """What STS answers when a role is assumed."""
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
    """The access key id of each request, or nothing for those that are not signed."""
    found = []
    for asked in server.asked:
        signed = re.search(r"Credential=([^/]*)/", asked.headers.get("authorization", ""))
        found.append("" if signed is None else signed[1])
    return found


def store_at(server: ScriptedServer, **options: object) -> S3Store:
    return S3Store("bucket", options=StoreOptions(endpoint_url=server.url, **options))  # type: ignore[arg-type]


def test_keys_of_the_options_come_before_those_of_the_environment(
    bucket: ScriptedServer,
) -> None:
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
    store.put_if("key", b"", IfVersion('"1"'))
    assert signers(bucket) == ["first"] * 3
    assert bucket.asked[0].headers["x-amz-security-token"] == "token-first"
    (request,) = sts.asked
    fields = parse_qs(request.body.decode())
    assert fields["Action"] == ["AssumeRole"]
    assert fields["RoleArn"] == [ROLE]
    assert fields["ExternalId"] == ["shop 7"]
    assert fields["RoleSessionName"] == ["orders"]
    assert signers(sts) == ["testing"], "assumed with what the chain has"


def test_a_role_that_is_about_to_end_is_assumed_again(
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


def test_keys_of_the_options_assume_the_role(bucket: ScriptedServer, sts: ScriptedServer) -> None:
    asks(store_at(bucket, role_arn=ROLE, access_key_id="mine", secret_access_key="s"))
    assert (signers(sts), signers(bucket)) == (["mine"], ["first"])


def test_a_role_that_may_not_be_assumed_is_named_with_the_fix(
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


def test_without_any_credentials_no_role_is_assumed(
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
