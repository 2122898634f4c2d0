"""Lost and unusual responses that only GCS sends. See also test_http_responses.py."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import google.auth.credentials
import pytest
import urllib3
import urllib3.exceptions

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    PermanentStorageError,
    TransientStorageError,
)
from opendata_buffer.runtime import deadline
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.gcs import PUBLIC, GcsStore, WriteRate, connect
from opendata_buffer.stores.http import DeadlinePassed
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer
from tests.unit.stores.cloud_responses import DATE_MS, GCS, Script, notebook_credential, scripted

SLOW_DOWN = Reply(429, b'{"error": {"message": "slow down"}}')
WRITTEN, FOUND = GCS.written, GCS.found


@pytest.fixture
def script() -> Iterator[Script]:
    with ExitStack() as running:
        yield scripted(GCS, running)


def test_the_condition_is_the_generation_and_0_for_no_object(script: Script) -> None:
    store, server = script(WRITTEN)
    assert store.put_if("m", b"x", None) == outcomes.Applied("7")
    assert store.put_if("m", b"x", "5") == outcomes.Applied("7")
    store.put("m", b"x")
    # An invalid generation must not mean "no object", or remove the condition.
    store.put_if("m", b"x", "0")
    store.put_if("m", b"x", '"etag"')
    asked = [each.path.partition("ifGenerationMatch=")[2] for each in server.asked]
    assert asked == ["0", "5", "", "1", "1"]


def test_an_upload_has_its_checksum_and_forbids_caching(script: Script) -> None:
    store, server = script(WRITTEN)
    store.put("a#1/ü", b"--bytes\r\n")
    (asked,) = server.asked
    _, about, content, _ = asked.body.split(
        b"--" + asked.headers["content-type"].partition("boundary=")[2].encode()
    )
    assert json.loads(about.partition(b"\r\n\r\n")[2]) == {
        "name": "root/a#1/ü",
        "md5Hash": "kbOD4tDT/fY7NayaDqnr8g==",
        "cacheControl": "no-store",
    }
    assert content.partition(b"\r\n\r\n")[2] == b"--bytes\r\n\r\n"


def test_a_conditional_write_that_is_rate_limited_is_sent_again(script: Script) -> None:
    store, server = script(SLOW_DOWN, SLOW_DOWN, WRITTEN)
    assert store.put_if("m", b"x", "5") == outcomes.Applied("7")
    assert len(server.asked) == 3


def test_a_conditional_write_that_is_rate_limited_for_long_fails(script: Script) -> None:
    store, server = script(SLOW_DOWN)
    outcome = store.put_if("m", b"x", "5")
    assert isinstance(outcome, outcomes.Unknown)
    assert "refused for their rate" in outcome.reason
    assert len(server.asked) > 3
    pauses = store._runtime.slept
    assert all(0.1 <= pause <= 0.4 + 1e-9 for pause in pauses[:-1]), "the pauses have equal lengths"
    assert 4.5 <= sum(pauses) <= 5.5


def test_a_server_that_ignores_conditions_and_ranges_of_reads_is_supported(script: Script) -> None:
    store, _ = script(FOUND)
    assert store.get("k", if_changed="7") is None
    assert store.get("k", if_changed="8") == Blob(b"bytes", "7", DATE_MS)
    assert store.get("k", byte_range=(1, 3)) == Blob(b"yt", "7", DATE_MS)


def test_a_listing_follows_its_pages_and_requests_only_what_it_returns(script: Script) -> None:
    def page(*names: str, more: str = "") -> Reply:
        items = [
            {"name": f"root/{name}", "size": "1", "timeCreated": "2026-01-01T00:00:00Z"}
            for name in names
        ]
        return Reply(200, json.dumps({"items": items, "nextPageToken": more}).encode())

    store, server = script(page("a", "b", more="next"), page(more="last"), page("c", "d"))
    listing = store.list("", start_after="a", limit=2)
    assert [info.key for info in listing.objects] == ["b", "c"]
    assert listing.truncated
    assert ["maxResults=3" in each.path for each in server.asked] == [True, False, False]
    assert ["pageToken=" in each.path for each in server.asked] == [False, True, True]


@pytest.mark.parametrize(("endpoint", "races"), [(None, 0), ("http://127.0.0.1:9", 3)])
def test_the_probe_runs_its_race_everywhere_except_at_google(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, races: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "opendata_buffer.stores.http.probe_conditional_writes",
        lambda *_, races, **__: asked.append(races),
    )
    client = connect(StoreOptions(endpoint_url="http://127.0.0.1:9"))
    client.endpoint = endpoint or PUBLIC
    store = GcsStore(f"bucket-{races}")
    monkeypatch.setattr(store._client, "get", lambda: client)
    store.check_conditional_writes("m")
    store.check_conditional_writes("m")
    assert asked == [races], "once per process"


def test_no_token_is_sent_without_tls(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    # A search for credentials would fail here.
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    store, server = script(FOUND)
    store.get("k")
    assert "authorization" not in server.asked[0].headers


TEN = b"0123456789"


def chunked(body: bytes, **headers: str) -> Reply:
    """Return a response without a content length."""
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return Reply(200, sent, {"content-length": "none", "transfer-encoding": "chunked", **headers})


def versioned(reply: Reply) -> Reply:
    return replace(reply, headers={**reply.headers, **GCS.found.headers})


@pytest.mark.parametrize("reply", [Reply(200, TEN), chunked(TEN)], ids=["length", "chunked"])
def test_a_body_is_read_with_and_without_its_length(script: Script, reply: Reply) -> None:
    store, _ = script(versioned(reply))
    for _ in range(2):  # also after a response that was read in part
        for byte_range, max_bytes, expected in (
            (None, None, TEN),
            (None, 10, TEN),
            ((3, 6), 3, b"345"),  # a server that knows no ranges
            ((8, 99), None, b"89"),
        ):
            found = store.get("k", byte_range=byte_range, max_bytes=max_bytes)
            assert found.data == expected
        with pytest.raises(CorruptData, match="'k' has 10 bytes to read, more than the limit of 9"):
            store.get("k", max_bytes=9)


@pytest.mark.parametrize("length", [True, False])
def test_a_compressed_response_is_decompressed_only_up_to_its_limit(
    script: Script, length: bool
) -> None:
    def packed(body: bytes) -> Reply:
        content, encoding = gzip.compress(body), {"content-encoding": "gzip"}
        return versioned(Reply(200, content, encoding) if length else chunked(content, **encoding))

    store, _ = script(packed(TEN))
    assert store.get("k", max_bytes=10).data == TEN
    store, _ = script(packed(b"0" * 50_000_000))
    with pytest.raises(CorruptData, match="1001 bytes to read"):
        store.get("k", max_bytes=1_000)


def test_a_truncated_body_is_transient(script: Script) -> None:
    store, _ = script(versioned(Reply(200, TEN, {"content-length": "11", "connection": "close"})))
    with pytest.raises(TransientStorageError):
        store.get("k")


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        ("http://127.0.0.1:1/", "127.0.0.1:2", "http://127.0.0.1:1"),
        (None, "127.0.0.1:2", "http://127.0.0.1:2"),
        (None, "http://127.0.0.1:2/", "http://127.0.0.1:2"),
    ],
)
def test_the_option_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, option: str | None, variable: str, expected: str
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", variable)
    assert connect(StoreOptions(endpoint_url=option)).endpoint == expected


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("ftp://host", "'host' has no scheme that a store understands: use http://host or https:"),
        ("https://", "has no host: use https://host"),
    ],
)
def test_an_endpoint_that_is_not_a_url_is_refused_with_the_same_text_wherever_it_is_set(
    endpoint: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=f"^endpoint_url {says}"):
        StoreOptions(endpoint_url=endpoint)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    with pytest.raises(InvalidInput, match=f"^STORAGE_EMULATOR_HOST {says}"):
        connect(StoreOptions())


def test_a_secret_in_the_environments_endpoint_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://me:hunter2@host")
    with pytest.raises(InvalidInput, match="STORAGE_EMULATOR_HOST") as caught:
        connect(StoreOptions())
    assert "hunter2" not in str(caught.value)


def test_the_error_about_missing_credentials_says_what_to_provide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    with pytest.raises(
        PermanentStorageError,
        match=r"(?s)no credentials for https://storage\.g.*/no/such/file.*gcloud auth",
    ):
        connect(StoreOptions())


def test_a_key_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key.json"
    account = {"client_id": "id", "client_secret": "s", "refresh_token": "t"}
    key.write_text(json.dumps({"type": "authorized_user", **account}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    client = connect(StoreOptions())
    assert client.endpoint == "https://storage.googleapis.com"
    assert client._http.credentials.refresh_token == "t"


def test_anonymous_needs_no_credentials() -> None:
    client = connect(StoreOptions(anonymous=True))
    assert client.endpoint == "https://storage.googleapis.com"
    assert isinstance(client._http, urllib3.PoolManager)


def test_a_service_credential_is_used_with_the_scope_of_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = notebook_credential(monkeypatch, Credentials(scopes=None))
    client = connect(StoreOptions(service_credential="team"))
    assert asked == ["team"]
    assert client._http.credentials.scopes == [
        "https://www.googleapis.com/auth/devstorage.read_write"
    ]


def test_a_service_credential_is_not_sent_without_tls() -> None:
    with pytest.raises(InvalidInput, match=r"'team' and http://127\.0\.0\.1:1 is not https"):
        connect(StoreOptions(service_credential="team", endpoint_url="http://127.0.0.1:1"))


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


def test_nothing_is_sent_after_the_deadline() -> None:
    server = ScriptedServer(Reply(200))
    runtime = ManualRuntime()
    with server.running() as url, deadline(runtime, 1):
        client = connect(StoreOptions(endpoint_url=url))
        runtime.advance(1)
        with pytest.raises(DeadlinePassed):
            client.send("GET", "/", {})
    assert server.asked == []


def test_after_a_refusal_the_next_write_waits_for_its_time() -> None:
    rate = WriteRate()
    rate.accepted("m", 5.0)
    assert rate.due("m", 5.0) == 0, "no write was refused"
    rate.refused("m", 5.25)
    assert rate.due("m", 5.25) == 0.75
    assert rate.due("m", 6.5) == 0, "the next write is due already"
    rate.accepted("m", 6.5)
    assert rate.due("m", 6.75) == 0.75
    assert rate.due("other", 6.75) == 0, "the limit applies per object"
    assert pickle.loads(pickle.dumps(rate)).due("m", 6.75) == 0, "another process has another clock"
    later = 5.25 + WriteRate.REMEMBERED_S
    rate.accepted("m", later)
    assert rate.due("m", later) == 1.0
    assert rate.due("m", later + 0.5) == 0, "the refusal is forgotten"


def test_the_number_of_remembered_objects_is_bounded() -> None:
    rate = WriteRate()
    for number in range(3 * WriteRate.MAX_KEYS):
        rate.accepted(f"{number}", 0.0)
        rate.refused(f"{number}", 0.0)
    assert len(rate._accepted) <= WriteRate.MAX_KEYS
    assert len(rate._refused) <= WriteRate.MAX_KEYS
    assert rate.due(f"{3 * WriteRate.MAX_KEYS - 1}", 0.0) == 1.0


def test_f24_a_name_is_one_raw_segment_of_the_path(script: Script) -> None:
    store, server = script(FOUND)
    store.get("a/b#1%23?c d")
    path, _, _ = server.asked[0].path.partition("?")
    assert path == "/storage/v1/b/bucket/o/root%2Fa%2Fb%231%2523%3Fc%20d"


def test_an_invalid_generation_is_not_sent_as_a_condition_of_a_read(script: Script) -> None:
    store, server = script(FOUND)
    store.get("k", if_changed='"etag"')
    store.get("k", if_changed="5")
    assert ["ifGenerationNotMatch=5" in each.path for each in server.asked] == [False, True]
