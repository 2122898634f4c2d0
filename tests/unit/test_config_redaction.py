"""Secrets in URLs and credentials are never shown, wherever they come from."""

from __future__ import annotations

import json
import logging
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import google.auth.credentials
import pytest
import requests
import urllib3.connection

from buffer_sink.options import SinkOptions
from buffer_source.options import SourceOptions
from opendata_buffer import config, option_reader
from opendata_buffer.config import QueueConfig, StoreOptions, check_no_secrets, redacted
from opendata_buffer.errors import (
    InvalidInput,
    OpenDataBufferError,
    PermanentStorageError,
    StorageError,
)
from opendata_buffer.stores import azure, clients, gcs, s3
from opendata_buffer.stores.azure import AzureStore
from opendata_buffer.stores.gcs import GcsStore
from opendata_buffer.stores.open import open_store
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer
from tests.unit.cli.shell import run
from tests.unit.stores.cloud_responses import notebook_credential


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://me:hunter2@host/x failed", "at https://***@host/x failed"),
        ("s3://AKIA:wJalr/XUtn/hunter2@bucket/root", "s3://***@bucket/root"),
        ("https://me:p@ss@host", "https://***@host"),
        ("https://token@host:9000/a", "https://***@host:9000/a"),
        ("https://host/a?sig=hunter2&x=1 and on", "https://host/a?*** and on"),
        ("'https://me:hunter2@host/a?b' 'c?d'", "'https://***@host/a?***' 'c?d'"),
        ("abfss://key:hunter2@acc.dfs.core.windows.net", "abfss://***@acc.dfs.core.windows.net"),
        ("abfss://hunter2@c@acc.dfs.core.windows.net", "abfss://***@acc.dfs.core.windows.net"),
        ("https://a:hunter2@b https://c:hunter2@d", "https://***@b https://***@d"),
    ],
)
def test_user_information_and_queries_are_hidden(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "abfss://container@account.dfs.core.windows.net/root",
        "at 'ABFSS://container@account.dfs.core.windows.net' and on",
        "s3://bucket/a@b",
        "/data/a@b?c",
        "http://127.0.0.1:9000",
        "key 'a?b' in x",
        "",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redacted(text) == text
    check_no_secrets("store", text)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@host",
        "https://hunter2@host",
        "https://host/?sig=hunter2",
        "s3://AKIA:a/hunter2@bucket/r",
        "s3://bucket/r?token=hunter2",
    ],
)
def test_a_url_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    for way in (
        lambda: StoreOptions(endpoint_url=url),
        lambda: QueueConfig(store=url),
        lambda: open_store(url),
    ):
        with pytest.raises(InvalidInput, match=r"'.*://.*\*\*\*") as caught:
            way()
        assert "hunter2" not in str(caught.value)


# ---- credentials, of every store and at every level of every logger

PART = "Zq7w9XvB3nKp"
SECRET = f"{PART}/Lm5+tR8yU2eH6jD4"
TOKEN = "Fw0GZ9pXb3JpZ2luX2VjEJr7Yk1sQ2vN"
KEY_ID = "AKIAQ7W9XVB3NKPLM5TR"
AZURE_KEY = b64encode(SECRET.encode()).decode()
BAD = {
    "a newline at the end": (lambda secret: f"{secret}\n", "ends with a newline: strip it"),
    "CR and LF at the end": (lambda secret: f"{secret}\r\n", "ends with a newline: strip it"),
    "a space at the front": (lambda secret: f" {secret}", "begins with a space: strip it"),
    "a NUL inside": (lambda secret: f"{secret[:9]}\0{secret[9:]}", "not visible ASCII"),
    "a newline inside": (lambda secret: f"{secret[:9]}\n{secret[9:]}", "contains a newline"),
    "a euro sign": (lambda secret: f"{secret[:9]}€{secret[9:]}", "not visible ASCII"),
}
IN_ENVIRONMENT = {name: flaw for name, flaw in BAD.items() if name != "a NUL inside"}
"""Return the credentials that an environment variable can contain."""
SECRETS = (SECRET, TOKEN, KEY_ID, AZURE_KEY)

flaws = pytest.mark.parametrize(("spoil", "fix"), BAD.values(), ids=BAD)


def check_hidden(text: str, *secrets: str) -> None:
    """Assert that a text has no eight consecutive characters of a credential, in any encoding."""
    for secret in secrets or SECRETS:
        for spelled in (secret, quote(secret, safe=""), repr(secret)[1:-1]):
            for start in range(len(spelled) - 7):
                assert spelled[start : start + 8] not in text


def shown_by(error: BaseException) -> str:
    """Return everything that an error may show: text, attributes, chain, and traceback."""
    found = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None:
            found += [str(link), repr(link), repr(link.args), repr(vars(link))]
            found += traceback.format_exception(link)
            waiting += [link.__cause__, link.__context__]
    return "\n".join(found)


@pytest.fixture
def logs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Record everything that any logger writes at the level DEBUG."""
    monkeypatch.setattr(config, "_met", {})
    monkeypatch.setattr(clients, "_made", {})
    monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
    caplog.set_level(logging.DEBUG)
    for name in ("botocore", "urllib3", "azure", "google", "msal", "requests", "opendata_buffer"):
        caplog.set_level(logging.DEBUG, name)
    return caplog


def calls(store: Any) -> Iterator[Callable[[], Any]]:
    """Return every kind of request of a store."""
    yield lambda: store.get("key")
    yield lambda: store.put("key", b"x")
    yield lambda: store.put_if("key", b"x", None)
    yield lambda: store.list("")


def check_refused(store: Any, logs: pytest.LogCaptureFixture, words: str) -> None:
    """Assert that each request fails permanently, is not repeated, and shows no secret."""
    for call in calls(store):
        with pytest.raises((PermanentStorageError, InvalidInput)) as caught:
            call()
        assert not caught.value.retryable
        assert words in str(caught.value)
        check_hidden(shown_by(caught.value))
    (failure,) = failures_of(store)
    assert words in failure
    check_hidden(failure)
    check_hidden(logs.text)


def failures_of(store: Any) -> list[str]:
    try:
        return [each.reason for each in store.delete_many(["key"])]
    except InvalidInput as error:
        return [str(error)]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Run an endpoint that must not get any request."""
    scripted = ScriptedServer(Reply(500))
    with scripted.running():
        yield scripted


def s3_at(server: ScriptedServer, **given: Any) -> S3Store:
    return S3Store(
        "bucket", "", StoreOptions(endpoint_url=server.url, **given), runtime=ManualRuntime()
    )


@flaws
@pytest.mark.parametrize("name", ["access_key_id", "secret_access_key", "session_token"])
def test_f49_options_refuse_a_credential_that_no_header_carries(
    name: str, spoil: Callable[[str], str], fix: str
) -> None:
    given = {"access_key_id": KEY_ID, "secret_access_key": SECRET, "session_token": TOKEN}
    given[name] = spoil(given[name])
    with pytest.raises(InvalidInput, match=f"^{name} .*{fix}") as caught:
        StoreOptions(**given)  # type: ignore[arg-type]
    check_hidden(shown_by(caught.value))
    option = {v: k for k, v in option_reader._STORE_TEXTS.items()}[name]
    options = {option_reader_name(each): value for each, value in given.items()}
    for parse in (SourceOptions.from_spark, SinkOptions.for_stream, SinkOptions.for_batch):
        with pytest.raises(InvalidInput, match=f"^option {option} .*{fix}") as caught:
            parse({"path": "s3://bucket", **options})
        check_hidden(shown_by(caught.value))


def option_reader_name(field: str) -> str:
    return {v: k for k, v in option_reader._STORE_TEXTS.items()}[field]


@pytest.mark.parametrize("value", [SECRET.encode(), [SECRET], 5])
def test_a_credential_of_another_type_is_refused_without_showing_it(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"secret_access_key is of type \w+: use") as caught:
        StoreOptions(access_key_id=KEY_ID, secret_access_key=value)
    check_hidden(shown_by(caught.value))
    given: Any = {"path": "s3://bucket", "accessKeyId": KEY_ID, "secretAccessKey": value}
    with pytest.raises(InvalidInput, match="option secretAccessKey is of type") as caught:
        SourceOptions.from_spark(given)
    check_hidden(shown_by(caught.value))


def in_environment(monkeypatch: pytest.MonkeyPatch, keys: Mapping[str, str]) -> str:
    for name, value in keys.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return "environment"


def without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)


def as_json(keys: Mapping[str, str], **more: Any) -> str:
    return json.dumps(
        {
            "Version": 1,
            "AccessKeyId": keys["ACCESS_KEY_ID"],
            "SecretAccessKey": keys["SECRET_ACCESS_KEY"],
            "SessionToken": keys["SESSION_TOKEN"],
            "Token": keys["SESSION_TOKEN"],
            **more,
        }
    )


def by_a_process(monkeypatch: pytest.MonkeyPatch, keys: Mapping[str, str], folder: Path) -> str:
    without_environment(monkeypatch)
    (folder / "keys.json").write_text(as_json(keys))
    (folder / "config").write_text(
        f"[default]\nregion = eu-west-1\ncredential_process = cat {folder}/keys.json\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    return "custom-process"


KEYS = {"ACCESS_KEY_ID": KEY_ID, "SECRET_ACCESS_KEY": SECRET, "SESSION_TOKEN": TOKEN}


@pytest.mark.parametrize(
    ("origin", "name", "flaw"),
    [
        *product(["environment"], ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY"], ["a newline at the end"]),
        *product(["process"], KEYS, ["a newline at the end"]),
        *product(["environment"], ["SESSION_TOKEN"], IN_ENVIRONMENT),
        ("process", "SESSION_TOKEN", "a NUL inside"),
        ("environment", "SECRET_ACCESS_KEY", "a euro sign"),
    ],
)
def test_f49_s3_sends_nothing_with_keys_that_no_header_carries(
    origin: str,
    name: str,
    flaw: str,
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    spoil, fix = BAD[flaw]
    keys = {**KEYS, name: spoil(KEYS[name])}
    if origin == "process":
        origin = by_a_process(monkeypatch, keys, tmp_path)
    else:
        origin = in_environment(monkeypatch, keys)
    store = s3_at(server)
    check_refused(store, logs, fix.partition(":")[0])
    with pytest.raises(PermanentStorageError, match=origin):
        store.get("key")
    assert server.asked == []


def test_s3_sends_nothing_with_keys_of_a_profile_that_no_header_carries(
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    lines = [f"aws_{name.lower()} = {value}€" for name, value in KEYS.items()]
    (tmp_path / "credentials").write_text("[team]\n" + "\n".join(lines), encoding="utf-8")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    check_refused(s3_at(server, profile="team", region="eu-west-1"), logs, "not visible ASCII")
    assert server.asked == []


def test_s3_shows_nothing_of_a_file_of_credentials_that_it_cannot_read(
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "credentials").write_text(f"[default]\n{KEY_ID}\n{SECRET}\n  {TOKEN}\n")
    without_environment(monkeypatch)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    check_refused(s3_at(server), logs, "Unable to parse config file")


def test_f49_s3_refuses_renewed_keys_that_no_header_carries(
    server: ScriptedServer, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_environment(monkeypatch)
    soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    late = (datetime.now(UTC) + timedelta(hours=5)).isoformat()
    spoiled = {**KEYS, "SESSION_TOKEN": f"{TOKEN}\n"}
    vendor = ScriptedServer(
        Reply(200, as_json(KEYS, Expiration=soon).encode()),
        Reply(200, as_json(spoiled, Expiration=late).encode()),
    )
    with vendor.running() as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
        server.replies = [Reply(200, b"x", {"etag": '"1"'})]
        store = s3_at(server)
        for call in [*calls(store)] * 2:
            with suppress(StorageError):
                call()
            if len(vendor.asked) > 1:
                break
        assert len(vendor.asked) > 1, "the keys were renewed"
        before = len(server.asked)
        check_refused(store, logs, "ends with a newline")
    assert len(server.asked) == before


def keys_of_a_role(session_token: str) -> Reply:
    """Return the answer of STS to AssumeRole."""
    granted = (
        "<AssumeRoleResponse><AssumeRoleResult><Credentials>"
        f"<AccessKeyId>{KEY_ID}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>"
        f"<SessionToken>{session_token}</SessionToken>"
        "<Expiration>2999-01-01T00:00:00Z</Expiration>"
        "</Credentials></AssumeRoleResult></AssumeRoleResponse>"
    )
    return Reply(200, granted.encode())


def test_s3_refuses_the_keys_of_a_role_that_no_header_carries(
    server: ScriptedServer, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sts = ScriptedServer(keys_of_a_role(f"{TOKEN}&#10;"))
    with sts.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        check_refused(
            s3_at(server, role_arn="arn:aws:iam::1:role/x"), logs, "session token of the AWS"
        )
    assert len(sts.asked) > 0
    assert server.asked == []


AZURE_ENV = {
    "AZURE_STORAGE_KEY": AZURE_KEY,
    "AZURE_STORAGE_SAS_TOKEN": f"sv=2024-01-01&sp=rw&sig={quote(SECRET, safe='')}",
    "AZURE_STORAGE_CONNECTION_STRING": (
        f"DefaultEndpointsProtocol=https;AccountName=testing;AccountKey={AZURE_KEY}"
    ),
    "AZURE_CLIENT_SECRET": SECRET,
    "IDENTITY_HEADER": SECRET,
}


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        *product(AZURE_ENV, ["a newline at the end", "a euro sign"]),
        *product(["AZURE_STORAGE_KEY"], ["a space at the front", "a newline inside"]),
    ],
)
def test_f49_azure_sends_nothing_with_credentials_that_no_header_carries(
    name: str, flaw: str, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, fix = BAD[flaw]
    value = spoil(AZURE_ENV[name])
    monkeypatch.setenv(name, value)
    host = "" if "STRING" in name else "testing.blob.core.windows.net"
    store = AzureStore("container", host=host, runtime=ManualRuntime())
    check_refused(store, logs, fix.partition(":")[0])


class AzureTokens:
    def __init__(self, *tokens: str) -> None:
        self.tokens = list(tokens)

    def get_token(self, *_: str, **__: Any) -> Any:
        return SimpleNamespace(token=self.tokens.pop(0) + "\n", expires_on=0)


def test_azure_refuses_a_token_that_no_header_carries(
    logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook_credential(monkeypatch, AzureTokens(*[TOKEN] * 20))
    options = StoreOptions(service_credential="team")
    store = AzureStore(
        "c", options=options, host="a.blob.core.windows.net", runtime=ManualRuntime()
    )
    check_refused(store, logs, "access token of the Azure credentials ends with a newline")


class GoogleTokens(google.auth.credentials.Credentials):
    """Credentials whose first or renewed token has a newline."""

    def refresh(self, request: Any) -> None:
        self.token = f"{TOKEN}\n"


def test_f49_gcs_refuses_a_token_that_no_header_carries(
    logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook_credential(monkeypatch, GoogleTokens())
    store = GcsStore("b", options=StoreOptions(service_credential="t"), runtime=ManualRuntime())
    check_refused(store, logs, "access token of the Google credentials ends with a newline")


@pytest.mark.parametrize("field", ["refresh_token", "client_secret", "client_id"])
def test_gcs_refuses_a_file_with_credentials_that_no_header_carries(
    field: str, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fields = {"refresh_token": TOKEN, "client_secret": SECRET, "client_id": KEY_ID}
    fields[field] += "\n"
    path = tmp_path / "key.json"
    path.write_text(json.dumps({"type": "authorized_user", **fields}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    check_refused(GcsStore("b", runtime=ManualRuntime()), logs, f"{field} of the Google credential")


@pytest.mark.parametrize(
    "content",
    [
        f"{SECRET}\n",
        json.dumps({"type": "service_account", "private_key": SECRET, "private_key_id": KEY_ID}),
        json.dumps(
            {
                "type": "service_account",
                "client_email": "a@b",
                "token_uri": "https://t",
                "private_key": f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
            }
        ),
        json.dumps({"type": "x", "client_secret": SECRET}),
    ],
    ids=["no JSON", "a field is missing", "no key", "no type"],
)
def test_gcs_shows_nothing_of_a_file_that_it_cannot_read(
    content: str, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    check_refused(GcsStore("b", runtime=ManualRuntime()), logs, "no credentials for")


# ---- the second line of defense: errors of client libraries about a header


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks, as if they did not know a source of credentials."""
    for module in (s3, gcs, azure):
        monkeypatch.setattr(module, "check_resolved", lambda *_: None)
    monkeypatch.setattr(clients, "_remember_secrets", lambda *_: None)


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f"{TOKEN[:9]}\n{TOKEN[9:]}"])
def test_f49_no_header_that_could_not_be_sent_is_shown_by_s3(
    token: str,
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unchecked(monkeypatch)
    in_environment(monkeypatch, {**KEYS, "SESSION_TOKEN": token})
    store = s3_at(server)
    for call in calls(store):
        with pytest.raises(PermanentStorageError, match="AWS credentials has a newline") as caught:
            call()
        check_hidden(shown_by(caught.value))
        assert caught.value.__cause__ is caught.value.__context__ is None
    (failure,) = store.delete_many(["key"])
    check_hidden(failure.reason)
    check_hidden("\n".join(each.getMessage() for each in logs.records if each.name != "botocore"))
    assert server.asked == []


def test_f49_no_header_that_could_not_be_sent_is_shown_by_google_or_azure(
    logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    options = StoreOptions(service_credential="t")
    notebook_credential(monkeypatch, GoogleTokens())
    unsent: Any = urllib3.connection.HTTPSConnection
    monkeypatch.setattr(unsent, "connect", lambda self: setattr(self, "sock", Mock()))
    gs = GcsStore("b", options=options, runtime=ManualRuntime())
    for call in calls(gs):
        with pytest.raises(PermanentStorageError, match="Google credentials has") as caught:
            call()
        check_hidden(shown_by(caught.value))
    notebook_credential(monkeypatch, AzureTokens(*[TOKEN] * 20))
    az = AzureStore("c", options=options, host="a.blob.core.windows.net", runtime=ManualRuntime())
    for call in calls(az):
        with pytest.raises(PermanentStorageError, match="Azure credentials has") as caught:
            call()
        check_hidden(shown_by(caught.value))
    check_hidden(logs.text)


@pytest.mark.parametrize("status", [400, 503])
def test_an_error_of_the_service_about_a_header_is_not_reported_as_a_bad_credential(
    status: int, server: ScriptedServer
) -> None:
    body = "<Error><Code>Bad</Code><Message>Invalid header value of Range</Message></Error>"
    server.replies = [Reply(status, body.encode())]
    with pytest.raises(StorageError, match="Invalid header value of Range") as caught:
        s3_at(server).get("key")
    assert caught.value.retryable is (status == 503)
    assert "newline" not in str(caught.value)


# ---- valid credentials, at every level


WORKS = Reply(200, b"x", {"etag": '"1"'})


@pytest.mark.parametrize(
    ("origin", "reply"),
    [
        ("options", WORKS),
        ("environment", WORKS),
        ("process", WORKS),
        ("options", Reply(403, b"<Error><Code>InvalidAccessKeyId</Code></Error>")),
        ("environment", Reply(500, f"<html>{TOKEN} {SECRET} {KEY_ID}</html>".encode())),
        (
            "options",
            Reply(403, f"<Error><Code>No</Code><Message>{TOKEN}</Message></Error>".encode()),
        ),
        ("process", Reply(0)),
    ],
)
def test_no_log_line_or_error_of_s3_shows_a_sound_credential(
    origin: str,
    reply: Reply,
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    given = {}
    if origin == "options":
        given = {"access_key_id": KEY_ID, "secret_access_key": SECRET, "session_token": TOKEN}
    elif origin == "environment":
        in_environment(monkeypatch, KEYS)
    else:
        by_a_process(monkeypatch, KEYS, tmp_path)
    server.replies = [reply]
    check_quiet(s3_at(server, **given), logs)
    assert len(server.asked) > 4
    assert {each.headers["x-amz-security-token"] for each in server.asked} == {TOKEN}


def check_quiet(store: Any, logs: pytest.LogCaptureFixture) -> None:
    """Assert that a store that signs its requests shows no credential."""
    for call in calls(store):
        try:
            check_hidden(repr(call()))
        except OpenDataBufferError as error:
            check_hidden(shown_by(error))
    check_hidden(repr(store.delete_many(["key"])))
    check_hidden(repr(store.url) + repr(store) + repr(store._options))
    assert any(each.levelno == logging.DEBUG for each in logs.records)
    check_hidden(logs.text)


def test_no_log_line_shows_the_keys_of_a_role(
    server: ScriptedServer, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sts = ScriptedServer(keys_of_a_role(TOKEN))
    server.replies = [Reply(200, b"x", {"etag": '"1"'})]
    with sts.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        check_quiet(s3_at(server, role_arn="arn:aws:iam::1:role/x"), logs)
    assert {each.headers["x-amz-security-token"] for each in server.asked} == {TOKEN}


@pytest.mark.parametrize("end", ["", "&#10;"])
def test_web_identity_shows_no_token_and_refuses_keys_that_no_header_carries(
    end: str,
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    without_environment(monkeypatch)
    identity = "eyJhbGciOiJSUzI1NiIsImtpZCI6Ij.R7yUk1sQ2vNZq"
    (tmp_path / "token").write_text(identity)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
    granted = (
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
        f"<AccessKeyId>{KEY_ID}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>"
        f"<SessionToken>{TOKEN}{end}</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration>"
        "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )
    sts = ScriptedServer(Reply(200, granted.encode()))
    server.replies = [Reply(200, b"x", {"etag": '"1"'})]
    with sts.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        if end:
            check_refused(s3_at(server), logs, "session token of the AWS credentials (found by ass")
            assert server.asked == []
        else:
            check_quiet(s3_at(server), logs)
            assert server.asked[0].headers["x-amz-security-token"] == TOKEN
    assert identity.encode() in sts.asked[0].body
    check_hidden(logs.text, identity)


def test_no_log_line_shows_the_keys_of_an_instance(
    server: ScriptedServer, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_environment(monkeypatch)
    server.replies = [Reply(200, b"x", {"etag": '"1"'})]
    vendor = ScriptedServer(Reply(200, as_json(KEYS, Expiration="2999-01-01T00:00:00Z").encode()))
    with vendor.running() as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
        check_quiet(s3_at(server), logs)
    assert {each.headers["x-amz-security-token"] for each in server.asked} == {TOKEN}


@pytest.mark.parametrize("name", ["AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "STRING"])
@pytest.mark.parametrize("status", [200, 403, 500, 0])
def test_no_log_line_or_error_of_azure_shows_a_sound_credential(
    name: str,
    status: int,
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.replies = [Reply(status, f"<html>{SECRET} {AZURE_KEY}</html>".encode())]
    options = StoreOptions(endpoint_url=f"{server.url}/testing")
    if name == "STRING":
        name, options = "AZURE_STORAGE_CONNECTION_STRING", StoreOptions()
        text = f"AccountName=testing;AccountKey={AZURE_KEY};BlobEndpoint={server.url}/testing"
        monkeypatch.setenv(name, text)
    else:
        monkeypatch.setenv(name, AZURE_ENV[name])
    check_quiet(AzureStore("container", "", options, runtime=ManualRuntime()), logs)
    assert len(server.asked) > 4


TOKEN_REPLIES = pytest.mark.parametrize(
    "reply", [Reply(200, b"{}"), Reply(403, f"<html>{TOKEN}</html>".encode()), Reply(0)]
)


@TOKEN_REPLIES
def test_no_log_line_or_error_of_gcs_shows_a_sound_token(
    reply: Reply,
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = urllib3.PoolManager.urlopen

    def without_tls(self: Any, method: str, url: str, **how: Any) -> Any:
        return send(self, method, url.replace("https:", "http:"), **how)

    monkeypatch.setattr(urllib3.PoolManager, "urlopen", without_tls)
    monkeypatch.setattr(GoogleTokens, "refresh", lambda self, _: setattr(self, "token", TOKEN))
    notebook_credential(monkeypatch, GoogleTokens())
    server.replies = [reply]
    https = server.url.replace("http:", "https:")
    options = StoreOptions(service_credential="t", endpoint_url=https)
    check_quiet(GcsStore("b", options=options, runtime=ManualRuntime()), logs)
    assert {each.headers["authorization"] for each in server.asked} == {f"Bearer {TOKEN}"}


@TOKEN_REPLIES
def test_no_log_line_or_error_of_azure_shows_a_sound_token(
    reply: Reply,
    server: ScriptedServer,
    logs: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = requests.adapters.HTTPAdapter.send

    def without_tls(self: Any, request: Any, **how: Any) -> Any:
        request.url = request.url.replace("https:", "http:")
        return send(self, request, **how)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", without_tls)
    found = SimpleNamespace(token=TOKEN, expires_on=1 << 40)
    notebook_credential(monkeypatch, SimpleNamespace(get_token=lambda *_, **__: found))
    server.replies = [reply]
    https = server.url.replace("http:", "https:")
    options = StoreOptions(service_credential="t", endpoint_url=f"{https}/testing")
    check_quiet(AzureStore("container", options=options, runtime=ManualRuntime()), logs)
    assert {each.headers["authorization"] for each in server.asked} == {f"Bearer {TOKEN}"}


def test_the_command_line_shows_no_credential_at_any_level(
    server: ScriptedServer, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_environment(monkeypatch, {**KEYS, "SESSION_TOKEN": f"{TOKEN}\n"})
    for command in (("status",), ("consume",)):
        for more in ((), ("-vv",)):
            words = (*command, "s3://bucket/q", "--endpoint-url", server.url, *more)
            result = run(*words)
            assert result.exit_code == 1
            assert "AWS_SESSION_TOKEN of the environment ends with a newline" in result.stderr
            check_hidden(result.output + result.stderr)
    assert server.asked == []
    check_hidden(logs.text)
