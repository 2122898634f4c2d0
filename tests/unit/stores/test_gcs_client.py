"""Where the requests go, and with what."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import google.auth.credentials
import pytest
import urllib3

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.runtime import deadline
from opendata_buffer.stores.gcs_client import connect
from opendata_buffer.stores.http import DeadlinePassed
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        ("http://127.0.0.1:1/", "127.0.0.1:2", "http://127.0.0.1:1"),
        (None, "127.0.0.1:2", "http://127.0.0.1:2"),
        (None, "http://127.0.0.1:2/", "http://127.0.0.1:2"),
    ],
)
def test_the_option_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, option: str | None, variable: str, expected: str
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", variable)
    assert connect("", StoreOptions(endpoint_url=option)).endpoint == expected


@pytest.mark.parametrize("endpoint", ["ftp://host", "https://"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidInput, match="is no URL of a server"):
        connect("", StoreOptions(endpoint_url=endpoint))


def test_a_secret_in_the_environments_endpoint_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://me:hunter2@host")
    with pytest.raises(InvalidInput, match="STORAGE_EMULATOR_HOST") as caught:
        connect("", StoreOptions())
    assert "hunter2" not in str(caught.value)


def test_missing_credentials_say_what_to_provide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    with pytest.raises(
        PermanentStorageError,
        match=r"(?s)no credentials for https://storage\.g.*/no/such/file.*gcloud auth",
    ):
        connect("", StoreOptions())


def test_a_key_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key.json"
    account = {"client_id": "id", "client_secret": "s", "refresh_token": "t"}
    key.write_text(json.dumps({"type": "authorized_user", **account}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    client = connect("", StoreOptions())
    assert client.endpoint == "https://storage.googleapis.com"
    assert client._http.credentials.refresh_token == "t"


def test_anonymous_needs_no_credentials() -> None:
    client = connect("", StoreOptions(anonymous=True))
    assert client.endpoint == "https://storage.googleapis.com"
    assert isinstance(client._http, urllib3.PoolManager)


def test_a_service_credential_is_used_with_the_scope_of_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Credentials(scopes=None)
    asked = []

    def provider(name: str) -> Credentials:
        asked.append(name)
        return found

    dbutils = SimpleNamespace(credentials=SimpleNamespace(getServiceCredentialsProvider=provider))
    monkeypatch.setattr(sys.modules["__main__"], "dbutils", dbutils, raising=False)
    client = connect("", StoreOptions(service_credential="team"))
    assert asked == ["team"]
    assert client._http.credentials.scopes == [
        "https://www.googleapis.com/auth/devstorage.read_write"
    ]


def test_a_service_credential_is_not_sent_in_the_clear() -> None:
    with pytest.raises(InvalidInput, match=r"'team' and http://127\.0\.0\.1:1 is not https"):
        connect("", StoreOptions(service_credential="team", endpoint_url="http://127.0.0.1:1"))


class Credentials(google.auth.credentials.Scoped, google.auth.credentials.Credentials):
    def __init__(self, scopes: object) -> None:
        super().__init__()
        self._scopes = scopes

    @property
    def requires_scopes(self) -> bool:
        return self._scopes is None

    def with_scopes(self, scopes: object, default_scopes: object = None) -> Credentials:
        return Credentials(scopes)

    def refresh(self, request: object) -> None: ...


def test_a_name_is_one_raw_segment_of_the_path() -> None:
    client = connect("", StoreOptions(endpoint_url="http://127.0.0.1:1"))
    path = client.object_url("bucket", "a/b#1%23?c d")
    assert path == "/storage/v1/b/bucket/o/a%2Fb%231%2523%3Fc%20d"


def test_after_the_deadline_nothing_is_sent() -> None:
    server = ScriptedServer(Reply(200))
    runtime = ManualRuntime()
    with server.running() as url, deadline(runtime, 1):
        client = connect("", StoreOptions(endpoint_url=url))
        runtime.advance(1)
        with pytest.raises(DeadlinePassed):
            client.send("GET", "/", {})
    assert server.asked == []


def test_an_answer_that_is_no_json_object_has_no_fields() -> None:
    server = ScriptedServer(Reply(200, b"<html>"), Reply(200, b"[1]"), Reply(200, b'{"a": 1}'))
    with server.running() as url:
        client = connect("", StoreOptions(endpoint_url=url))
        found = [client.send("GET", "/", {}).fields() for _ in range(3)]
    assert found == [{}, {}, {"a": 1}]
