"""Which account, and what credentials."""

from __future__ import annotations

import base64
import sys
from types import SimpleNamespace

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.stores.azure_client import blob_host, connect
from opendata_buffer.stores.clients import AZURE_ENVIRONMENT, environment_of

KEY = base64.b64encode(b"a key").decode()
OTHER = base64.b64encode(b"another").decode()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_KEY")


def account_key_of(client: object) -> tuple[str, str]:
    credential = client.credential  # type: ignore[attr-defined]
    return credential.account_name, credential.account_key


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("account.dfs.core.windows.net", "account.blob.core.windows.net"),
        ("account.blob.core.usgovcloudapi.net", "account.blob.core.usgovcloudapi.net"),
    ],
)
def test_the_blobs_of_an_account(host: str, expected: str) -> None:
    assert blob_host(host) == expected


@pytest.mark.parametrize("host", ["", "account", "account.dfs", "a.queue.core.x", "a.dfs.x:80"])
def test_what_is_no_account_is_refused(host: str) -> None:
    with pytest.raises(InvalidInput, match="is no host of an Azure storage account: use abfss://"):
        blob_host(host)


def test_f1_no_request_is_sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    client = connect("a.blob.core.windows.net", StoreOptions(max_connections=7))
    assert client._config.retry_policy.total_retries == 0
    adapter = client._config.transport.session.get_adapter("https://a")
    assert adapter.max_retries.total == 0
    assert adapter._pool_maxsize == 7


def test_a_key_is_of_the_urls_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "other")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    client = connect("account.blob.core.windows.net", StoreOptions())
    assert account_key_of(client) == ("account", KEY)
    assert client.primary_endpoint == "https://account.blob.core.windows.net/"


def test_without_an_account_in_the_url_the_environments_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "other")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    assert connect("", StoreOptions()).primary_endpoint == "https://other.blob.core.windows.net/"
    before = environment_of(*AZURE_ENVIRONMENT)
    monkeypatch.setenv("AZURE_STORAGE_KEY", OTHER)
    assert environment_of(*AZURE_ENVIRONMENT) != before


def test_anonymous_takes_no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    client = connect("account.blob.core.windows.net", StoreOptions(anonymous=True))
    assert client.credential is None


def test_a_service_credential_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    vended = SimpleNamespace(get_token=lambda *_, **__: None)
    asked = []

    def provider(name: str) -> object:
        asked.append(name)
        return vended

    dbutils = SimpleNamespace(credentials=SimpleNamespace(getServiceCredentialsProvider=provider))
    monkeypatch.setattr(sys.modules["__main__"], "dbutils", dbutils, raising=False)
    options = StoreOptions(service_credential="team")
    assert connect("account.blob.core.windows.net", options).credential is vended
    assert asked == ["team"]
    with pytest.raises(PermanentStorageError, match="without https"):
        connect("", StoreOptions(service_credential="team", endpoint_url="http://127.0.0.1:1/a"))


def test_an_account_is_not_taken_from_a_string_whose_key_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=acc;AccountKey={KEY}")
    with pytest.raises(InvalidInput, match="has credentials of its own"):
        connect("", StoreOptions(anonymous=True))


def test_a_connection_string_names_account_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={KEY}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert account_key_of(connect("", StoreOptions())) == ("acc", KEY)
    assert account_key_of(connect("acc.blob.core.windows.net", StoreOptions())) == ("acc", KEY)
    with pytest.raises(InvalidInput, match="is of account 'acc', and the store of account 'b'"):
        connect("b.blob.core.windows.net", StoreOptions())


def test_what_cannot_be_read_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "hunter2")
    with pytest.raises(PermanentStorageError, match="AZURE_STORAGE_CONNECTION_STRING") as caught:
        connect("", StoreOptions())
    assert "hunter2" not in str(caught.value)


def test_a_shared_access_signature_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=hunter2")
    client = connect("a.blob.core.windows.net", StoreOptions())
    assert client.credential.signature == "sig=hunter2"
    assert "hunter2" not in client.primary_endpoint


def test_else_it_is_the_identity_of_whoever_runs_this() -> None:
    client = connect("a.blob.core.windows.net", StoreOptions())
    assert type(client.credential).__name__ == "DefaultAzureCredential"


def test_a_token_is_not_sent_in_the_clear() -> None:
    with pytest.raises(PermanentStorageError, match="without https only a key can be used"):
        connect("", StoreOptions(endpoint_url="http://127.0.0.1:1/account"))


def test_no_account_at_all_says_what_to_set() -> None:
    with pytest.raises(InvalidInput, match=r"names no storage account: set AZURE_STORAGE_ACCOUNT"):
        connect("", StoreOptions())
    with pytest.raises(InvalidInput, match="is no URL of a server"):
        connect("", StoreOptions(endpoint_url="ftp://x"))
