"""Lost and unusual responses that only Azure sends. See also test_http_responses.py."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.stores.azure import AzureStore, blob_host, connect
from opendata_buffer.stores.clients import AZURE_ENVIRONMENT, environment_of
from tests.http_scripts import Reply
from tests.unit.stores.cloud_responses import (
    AZURE,
    DATE,
    DATE_MS,
    Script,
    azure_error,
    notebook_credential,
    scripted,
)

WRITTEN, FOUND = AZURE.written, AZURE.found
KEY = base64.b64encode(b"a key").decode()
OTHER = base64.b64encode(b"another").decode()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    with ExitStack() as running:
        yield scripted(AZURE, running)


def test_the_condition_is_a_header_and_the_content_has_its_checksum(script: Script) -> None:
    store, server = script(WRITTEN)
    assert store.put_if("m", b"x", None) == outcomes.Applied('"7"')
    assert store.put_if("m", b"x", '"5"') == outcomes.Applied('"7"')
    store.put("m", b"x")
    asked = [each.headers for each in server.asked]
    assert [each.get("if-none-match") for each in asked] == ["*", None, None]
    assert [each.get("if-match") for each in asked] == [None, '"5"', None]
    assert {each.get("content-md5") for each in asked} == {"ndTkYSaMgDT1yFZOFVxnpg=="}


def test_only_a_409_to_a_creation_is_a_conflict(script: Script) -> None:
    store, server = script(azure_error(409, "BlobAlreadyExists"))
    assert store.put_if("m", b"x", None) == outcomes.LostRace()
    assert len(server.asked) == 1
    store, _ = script(azure_error(409, "BlobImmutableDueToPolicy"))
    with pytest.raises(PermanentStorageError, match="immutability"):
        store.put_if("m", b"x", None)
    store, _ = script(azure_error(409, "ContainerBeingDeleted"))
    assert isinstance(store.put_if("m", b"x", None), outcomes.Unknown)
    store, _ = script(azure_error(412, "LeaseIdMissing"))
    with pytest.raises(PermanentStorageError, match="break the lease"):
        store.put_if("m", b"x", '"5"')


def test_a_conflict_of_a_creation_does_not_mean_that_an_object_vanished(script: Script) -> None:
    store, _ = script(azure_error(404, "ResourceNotFound"))
    with pytest.raises(PermanentStorageError, match="Create container 'bucket' or correct the"):
        store.put_if("m", b"x", None)
    assert store.put_if("m", b"x", '"5"') == outcomes.Vanished()


def page(*names: str, more: str = "", folder: str = "", date: bool = True) -> Reply:
    blobs = "".join(
        f"<Blob><Name>root/{name}</Name><Properties><Last-Modified>{DATE}</Last-Modified>"
        f"<Content-Length>1</Content-Length><BlobType>BlockBlob</BlobType></Properties><Metadata>"
        f"{'<hdi_isfolder>true</hdi_isfolder>' if name == folder else ''}</Metadata></Blob>"
        for name in names
    )
    body = (
        "<?xml version='1.0'?><EnumerationResults ServiceEndpoint='x' ContainerName='box'>"
        f"<Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker></EnumerationResults>"
    )
    headers = {"content-type": "application/xml", **({"date": DATE} if date else {})}
    return Reply(200, body.encode(), headers)


def test_directories_are_not_listed_as_objects(script: Script) -> None:
    store, server = script(page("in", "in/a", folder="in"))
    assert [info.key for info in store.list("").objects] == ["in/a"]
    assert "include=metadata" in server.asked[0].path


def test_a_listing_continues_where_the_previous_one_ended(script: Script) -> None:
    store, server = script(page("a", "b", more="second"), page("c", "d", more="third"), page("e"))
    first = store.list("", limit=2)
    second = store.list("", start_after="b", limit=2)
    third = store.list("", start_after="d", limit=2)
    assert [info.key for info in (*first.objects, *second.objects, *third.objects)] == list("abcde")
    assert [each.truncated for each in (first, second, third)] == [True, True, False]
    markers = [each.path.partition("marker=")[2].partition("&")[0] for each in server.asked]
    assert markers == ["", "second", "third"]


def test_a_listing_that_starts_at_a_key_skips_earlier_objects(script: Script) -> None:
    store, server = script(page("a", "b", more="second"), page("c", "d"))
    listing = store.list("", start_after="b", limit=1)
    assert [info.key for info in listing.objects] == ["c"]
    assert listing.truncated
    assert len(server.asked) == 2


def test_a_response_that_does_not_come_from_azure_is_transient(script: Script) -> None:
    store, _ = script(Reply(200, b"<html>Sign in</html>"))
    with pytest.raises(TransientStorageError, match="not the answer of the store"):
        store.put("k", b"x")
    assert isinstance(store.put_if("m", b"x", None), outcomes.Unknown)
    # A 404 that does not name its error.
    store, _ = script(Reply(404, b"404 page not found", {"content-type": "text/plain"}))
    for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: store.list("")):
        with pytest.raises(TransientStorageError, match="not the answer of the store"):
            call()
    assert isinstance(store.put_if("m", b"x", '"5"'), outcomes.Unknown)


def test_a_read_returns_at_most_the_requested_bytes(script: Script) -> None:
    told = {**FOUND.headers, "content-range": "bytes 0-9/10"}
    store, _ = script(Reply(206, b"x" * 50, told))
    with pytest.raises(TransientStorageError, match="10 bytes of 'k': the answer has 50"):
        store.get("k", byte_range=(0, 10))
    with pytest.raises(CorruptData, match="50 bytes to read"):
        store.get("k", max_bytes=10)


def test_only_the_latest_listings_are_remembered(script: Script) -> None:
    store, _ = script(*[page("a", more="next")] * 17)
    for number in range(17):
        store.list(f"{number}", limit=1)
    assert len(store._continuations) == 16


def test_f6_the_stores_clock_is_the_date_of_the_first_page(script: Script) -> None:
    store, _ = script(page("a"))
    assert store.list("").now_ms == DATE_MS
    store, _ = script(page("a", date=False))
    assert store.list("").now_ms == DATE_MS, "the time of the newest object"


def mapped(error: Exception) -> StorageError:
    options = StoreOptions(endpoint_url="https://host/a", anonymous=True)
    return AzureStore("box", options=options)._error(error, "write", "k")


def test_an_error_without_an_answer_is_retryable_and_shows_no_secret() -> None:
    error = mapped(ServiceRequestError("at https://me:hunter2@proxy"))
    assert isinstance(error, TransientStorageError)
    assert "hunter2" not in str(error)
    assert isinstance(mapped(OSError("reset")), TransientStorageError)


def test_missing_credentials_are_a_permanent_error_that_says_what_to_provide() -> None:
    error = mapped(ClientAuthenticationError("none\nof\nall"))
    with pytest.raises(PermanentStorageError, match=r"none\. Log in .'az login'"):
        raise error


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_KEY")


def account_key_of(client: object) -> tuple[str, str]:
    credential = client.credential  # type: ignore[attr-defined]
    return credential.account_name, credential.account_key


@pytest.mark.parametrize("host", ["", "account", "account.dfs", "a.queue.core.x", "a.dfs.x:80"])
def test_a_host_without_an_account_is_refused(host: str) -> None:
    with pytest.raises(
        InvalidInput, match="is not a host of an Azure storage account: use abfss://"
    ):
        blob_host(host)


def test_f1_no_request_is_sent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    client = connect("a.blob.core.windows.net", StoreOptions(max_connections=7))
    assert client._config.retry_policy.total_retries == 0
    adapter = client._config.transport.session.get_adapter("https://a")
    assert adapter.max_retries.total == 0
    assert adapter._pool_maxsize == 7


def test_a_key_belongs_to_the_account_of_the_url_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "other")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    client = connect("account.blob.core.windows.net", StoreOptions())
    assert account_key_of(client) == ("account", KEY)
    assert client.primary_endpoint == "https://account.blob.core.windows.net/"
    assert connect("", StoreOptions()).primary_endpoint == "https://other.blob.core.windows.net/"
    before = environment_of(*AZURE_ENVIRONMENT)
    monkeypatch.setenv("AZURE_STORAGE_KEY", OTHER)
    assert environment_of(*AZURE_ENVIRONMENT) != before


def test_anonymous_access_ignores_the_key_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    client = connect("account.blob.core.windows.net", StoreOptions(anonymous=True))
    assert client.credential is None


def test_a_service_credential_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    vended = SimpleNamespace(get_token=lambda *_, **__: None)
    asked = notebook_credential(monkeypatch, vended)
    options = StoreOptions(service_credential="team")
    assert connect("account.blob.core.windows.net", options).credential.credentials is vended
    assert asked == ["team"]
    with pytest.raises(PermanentStorageError, match="without https"):
        connect("", StoreOptions(service_credential="team", endpoint_url="http://127.0.0.1:1/a"))


def test_the_account_of_a_connection_string_is_ignored_if_its_key_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=acc;AccountKey={KEY}")
    with pytest.raises(InvalidInput, match="has credentials of its own"):
        connect("", StoreOptions(anonymous=True))


def test_a_connection_string_provides_account_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={KEY}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert account_key_of(connect("", StoreOptions())) == ("acc", KEY)
    assert account_key_of(connect("acc.blob.core.windows.net", StoreOptions())) == ("acc", KEY)
    with pytest.raises(InvalidInput, match="is of account 'acc', and the store of account 'b'"):
        connect("b.blob.core.windows.net", StoreOptions())


def test_an_unreadable_connection_string_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "hunter2")
    with pytest.raises(PermanentStorageError, match="AZURE_STORAGE_CONNECTION_STRING") as caught:
        connect("", StoreOptions())
    assert "hunter2" not in str(caught.value)


def test_a_shared_access_signature_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=hunter2")
    client = connect("a.blob.core.windows.net", StoreOptions())
    assert client.credential.signature == "sig=hunter2"
    assert "hunter2" not in client.primary_endpoint


def test_the_identity_of_this_process_is_used_without_other_credentials() -> None:
    client = connect("a.blob.core.windows.net", StoreOptions())
    assert type(client.credential.credentials).__name__ == "DefaultAzureCredential"


def test_a_token_is_not_sent_without_tls() -> None:
    with pytest.raises(PermanentStorageError, match="without https only a key can be used"):
        connect("", StoreOptions(endpoint_url="http://127.0.0.1:1/account"))


def test_the_error_without_an_account_says_what_to_set() -> None:
    with pytest.raises(InvalidInput, match=r"names no storage account: set AZURE_STORAGE_ACCOUNT"):
        connect("", StoreOptions())
    with pytest.raises(InvalidInput, match="has no scheme that a store understands"):
        connect("", StoreOptions(endpoint_url="ftp://x"))
