"""What only GCS does when answers are lost or unusual. As others: test_cloud_answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import TransientStorageError, UnsafeStore
from opendata_buffer.stores.base import (
    ABSENT,
    Blob,
    IfVersion,
    NotModified,
)
from opendata_buffer.stores.gcs import GcsStore
from opendata_buffer.stores.gcs_client import PUBLIC, connect
from tests.http_scripts import Reply
from tests.unit.stores.cloud_answers import GCS, Script, scripted

SLOW_DOWN = Reply(429, b'{"error": {"message": "slow down"}}')
WRITTEN, FOUND = GCS.written, GCS.found


@pytest.fixture
def script() -> Iterator[Script]:
    with ExitStack() as running:
        yield scripted(GCS, running)


def test_what_is_refused_for_its_rate_is_repeated_and_told_with_what_helps(script: Script) -> None:
    store, server = script(SLOW_DOWN, SLOW_DOWN, FOUND)
    assert store.get("k") == Blob(b"bytes", "7", 0)
    assert len(server.asked) == 3
    store, server = script(SLOW_DOWN, SLOW_DOWN, WRITTEN)
    store.put("k", b"")
    assert len(server.asked) == 3
    store, server = script(SLOW_DOWN)
    with pytest.raises(
        TransientStorageError, match=r"one write a second to one object.*broker or a topic"
    ):
        store.get("k")
    assert len(server.asked) == 3


def test_the_condition_is_the_generation_and_0_for_no_object(script: Script) -> None:
    store, server = script(WRITTEN)
    assert store.put_if("m", b"x", ABSENT) == outcomes.Applied("7")
    assert store.put_if("m", b"x", IfVersion("5")) == outcomes.Applied("7")
    store.put("m", b"x")
    # What is no generation must not become "no object", or no condition at all.
    store.put_if("m", b"x", IfVersion("0"))
    store.put_if("m", b"x", IfVersion('"etag"'))
    asked = [each.path.partition("ifGenerationMatch=")[2] for each in server.asked]
    assert asked == ["0", "5", "", "1", "1"]


def test_an_upload_carries_its_checksum_and_is_kept_by_no_cache(script: Script) -> None:
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


def test_a_creation_that_meets_an_object_is_a_conflict(script: Script) -> None:
    store, server = script(Reply(412))
    assert store.put_if("m", b"x", ABSENT) == outcomes.Conflict()
    assert len(server.asked) == 1


def test_a_conditional_write_refused_for_its_rate_is_sent_again(script: Script) -> None:
    store, server = script(SLOW_DOWN, SLOW_DOWN, WRITTEN)
    assert store.put_if("m", b"x", IfVersion("5")) == outcomes.Applied("7")
    assert len(server.asked) == 3


def test_one_that_is_refused_for_its_rate_for_long_is_given_up(script: Script) -> None:
    store, server = script(SLOW_DOWN)
    outcome = store.put_if("m", b"x", IfVersion("5"))
    assert isinstance(outcome, outcomes.Unknown)
    assert "refused for their rate" in outcome.reason
    assert len(server.asked) > 3


def test_a_server_that_ignores_conditions_and_ranges_of_reads_is_understood(
    script: Script,
) -> None:
    store, _ = script(FOUND)
    assert store.get("k", if_changed="7") == NotModified()
    assert store.get("k", if_changed="8") == Blob(b"bytes", "7", 0)
    assert store.get("k", byte_range=(1, 3)) == Blob(b"yt", "7", 0)


def test_a_read_without_a_generation_is_refused(script: Script) -> None:
    store, _ = script(Reply(200, b"bytes"))
    with pytest.raises(UnsafeStore, match="answers without a generation"):
        store.get("k")


def test_f6_without_a_date_nothing_looks_older_than_the_newest_object(script: Script) -> None:
    items = [
        {"name": f"root/{name}", "size": "1", "timeCreated": f"2026-01-01T00:00:{name}.9Z"}
        for name in ("10", "20")
    ]
    store, _ = script(Reply(200, json.dumps({"items": items}).encode()))
    listing = store.list("")
    assert [info.key for info in listing.objects] == ["10", "20"]
    assert listing.now_ms == listing.objects[1].last_modified_ms
    assert listing.now_ms % 60_000 == 20_000


def test_a_listing_follows_its_pages_and_asks_for_no_more_than_it_returns(script: Script) -> None:
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


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Sign in to the guest network",
        b"",
        b"[]",
        b'{"items": 5}',
        b'{"items": ["a"]}',
        b'{"items": [{"size": "1"}]}',
        b'{"items": [{"name": "root/b", "size": "x"}]}',
        b'{"items": [{"name": "root/b", "size": "1", "timeCreated": "x"}]}',
    ],
)
def test_a_listing_that_is_none_is_transient_and_not_empty(script: Script, body: bytes) -> None:
    first = {"items": [{"name": "root/a", "size": "1"}], "nextPageToken": "next"}
    store, server = script(Reply(200, json.dumps(first).encode()), Reply(200, body))
    with pytest.raises(TransientStorageError, match="cannot list 'root/' in bucket 'bucket'"):
        store.list("")
    assert len(server.asked) == 1 + 3, "it was asked again"
    store, _ = script(Reply(200, b"{}"))
    assert store.list("").objects == ()


def test_a_listing_that_goes_on_where_it_was_is_transient_and_ends(script: Script) -> None:
    page = Reply(200, b'{"nextPageToken": "here"}')
    store, server = script(*[page] * 5, Reply(400))
    with pytest.raises(TransientStorageError, match="goes on where it was"):
        store.list("")
    assert len(server.asked) == 2


def test_an_upload_that_a_proxy_answers_is_believed_only_if_the_object_is_there(
    script: Script,
) -> None:
    portal = Reply(200, b"<html>Sign in to the guest network")
    store, server = script(portal)
    with pytest.raises(TransientStorageError, match=r"cannot write 'root/k'.*without its version"):
        store.put("k", b"bytes")
    assert len(server.asked) == 3 * 2, "it was tried again"
    store, server = script(portal, FOUND)
    store.put("k", b"bytes")
    assert len(server.asked) == 2


def test_objects_that_cannot_be_deleted_are_returned(script: Script) -> None:
    store, _ = script(Reply(403, b'{"error": {"message": "no"}}'))
    failures = store.delete_many(["a", "b//c"])
    assert [each.key for each in failures] == ["a", "b//c"]
    assert "Allow these credentials to delete objects" in failures[0].reason


@pytest.mark.parametrize(("endpoint", "races"), [(None, 0), ("http://127.0.0.1:9", 3)])
def test_writers_race_anywhere_but_at_google(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, races: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "opendata_buffer.stores.gcs.probe_conditional_writes",
        lambda *_, races, **__: asked.append(races),
    )
    client = connect("", StoreOptions(endpoint_url="http://127.0.0.1:9"))
    client.endpoint = endpoint or PUBLIC
    store = GcsStore(f"bucket-{races}")
    monkeypatch.setattr(store._client, "get", lambda: client)
    store.check_conditional_writes("m")
    store.check_conditional_writes("m")
    assert asked == [races], "once per process"


def test_no_token_is_sent_in_the_clear(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    # Were they looked for, this would fail.
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    store, server = script(FOUND)
    store.get("k")
    assert "authorization" not in server.asked[0].headers
