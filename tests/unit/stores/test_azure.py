"""What only Azure does when answers are lost or unusual. As others: test_cloud_answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from opendata_buffer import outcomes
from opendata_buffer.errors import (
    CorruptData,
    PermanentStorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.stores.base import (
    ABSENT,
    IfVersion,
    NotModified,
)
from tests.http_scripts import Reply
from tests.unit.stores.cloud_answers import AZURE, AZURE_DATE, Script, azure_error, scripted

WRITTEN, FOUND = AZURE.written, AZURE.found


@pytest.fixture
def script() -> Iterator[Script]:
    with ExitStack() as running:
        yield scripted(AZURE, running)


def test_the_condition_is_a_header_and_the_content_has_its_checksum(script: Script) -> None:
    store, server = script(WRITTEN)
    assert store.put_if("m", b"x", ABSENT) == outcomes.Applied('"7"')
    assert store.put_if("m", b"x", IfVersion('"5"')) == outcomes.Applied('"7"')
    store.put("m", b"x")
    asked = [each.headers for each in server.asked]
    assert [each.get("if-none-match") for each in asked] == ["*", None, None]
    assert [each.get("if-match") for each in asked] == [None, '"5"', None]
    assert {each.get("content-md5") for each in asked} == {"ndTkYSaMgDT1yFZOFVxnpg=="}


def test_409_to_a_creation_is_a_conflict_and_no_other_409_is(script: Script) -> None:
    store, server = script(azure_error(409, "BlobAlreadyExists"))
    assert store.put_if("m", b"x", ABSENT) == outcomes.Conflict()
    assert len(server.asked) == 1
    store, _ = script(azure_error(409, "BlobImmutableDueToPolicy"))
    with pytest.raises(PermanentStorageError, match="immutability"):
        store.put_if("m", b"x", ABSENT)
    store, _ = script(azure_error(409, "ContainerBeingDeleted"))
    assert isinstance(store.put_if("m", b"x", ABSENT), outcomes.Unknown)


def test_nothing_vanishes_that_was_to_be_created(script: Script) -> None:
    store, _ = script(azure_error(404, "ResourceNotFound"))
    with pytest.raises(PermanentStorageError, match="Create container 'bucket' or correct the"):
        store.put_if("m", b"x", ABSENT)
    assert store.put_if("m", b"x", IfVersion('"5"')) == outcomes.Vanished()


def test_a_lease_is_no_conflict(script: Script) -> None:
    store, _ = script(azure_error(412, "LeaseIdMissing"))
    with pytest.raises(PermanentStorageError, match="break the lease"):
        store.put_if("m", b"x", IfVersion('"5"'))


@pytest.mark.parametrize("etag", [{}, {"etag": 'W/"7"'}])
def test_a_read_without_a_strong_etag_is_refused(script: Script, etag: dict[str, str]) -> None:
    headers = {name: value for name, value in FOUND.headers.items() if name != "etag"}
    store, _ = script(Reply(206, b"bytes", {**headers, **etag}))
    with pytest.raises(UnsafeStore, match="ETag"):
        store.get("k")


def test_an_unchanged_object_is_not_read(script: Script) -> None:
    store, server = script(Reply(304))
    assert store.get("k", if_changed='"7"') == NotModified()
    assert server.asked[0].headers["if-none-match"] == '"7"'


def page(*names: str, more: str = "", folder: str = "", date: bool = True) -> Reply:
    blobs = "".join(
        f"<Blob><Name>root/{name}</Name><Properties><Last-Modified>{AZURE_DATE}</Last-Modified>"
        f"<Content-Length>1</Content-Length><BlobType>BlockBlob</BlobType></Properties><Metadata>"
        f"{'<hdi_isfolder>true</hdi_isfolder>' if name == folder else ''}</Metadata></Blob>"
        for name in names
    )
    body = (
        "<?xml version='1.0'?><EnumerationResults ServiceEndpoint='x' ContainerName='box'>"
        f"<Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker></EnumerationResults>"
    )
    headers = {"content-type": "application/xml", **({"date": AZURE_DATE} if date else {})}
    return Reply(200, body.encode(), headers)


def test_directories_are_no_objects(script: Script) -> None:
    store, server = script(page("in", "in/a", folder="in"))
    assert [info.key for info in store.list("").objects] == ["in/a"]
    assert "include=metadata" in server.asked[0].path


def test_a_listing_goes_on_where_the_one_before_ended(script: Script) -> None:
    store, server = script(page("a", "b", more="second"), page("c", "d", more="third"), page("e"))
    first = store.list("", limit=2)
    second = store.list("", start_after="b", limit=2)
    third = store.list("", start_after="d", limit=2)
    assert [info.key for info in (*first.objects, *second.objects, *third.objects)] == list("abcde")
    assert [each.truncated for each in (first, second, third)] == [True, True, False]
    markers = [each.path.partition("marker=")[2].partition("&")[0] for each in server.asked]
    assert markers == ["", "second", "third"]


def test_a_listing_that_begins_anywhere_passes_by_what_is_before(script: Script) -> None:
    store, server = script(page("a", "b", more="second"), page("c", "d"))
    listing = store.list("", start_after="b", limit=1)
    assert [info.key for info in listing.objects] == ["c"]
    assert listing.truncated
    assert len(server.asked) == 2


def test_a_listing_that_goes_on_where_it_was_is_transient_and_ends(script: Script) -> None:
    store, server = script(*[page(more="here")] * 5, azure_error(400, "InvalidInput"))
    with pytest.raises(TransientStorageError, match="goes on where it was"):
        store.list("")
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        Reply(200, b"<html>Sign in</html>", {"content-type": "text/html"}),
        Reply(200, b"<html></html>", {"content-type": "application/xml"}),
        Reply(200, b"\xff", {"content-type": "application/xml"}),
        Reply(200),
        Reply(200, b"", {"date": "soon"}),
    ],
)
def test_a_listing_that_is_none_is_transient_and_not_empty(script: Script, answer: Reply) -> None:
    store, server = script(answer)
    with pytest.raises(TransientStorageError, match="cannot list 'root/in/' in container 'bucket'"):
        store.list("in/")
    assert len(server.asked) == 3, "it was asked again"


def test_200_to_a_write_is_none_of_azure(script: Script) -> None:
    store, _ = script(Reply(200, b"<html>Sign in</html>"))
    with pytest.raises(TransientStorageError, match="no answer of Azure's"):
        store.put("k", b"x")
    assert isinstance(store.put_if("m", b"x", ABSENT), outcomes.Unknown)


def test_a_404_that_does_not_name_its_error_is_none_of_azure(script: Script) -> None:
    store, _ = script(Reply(404, b"404 page not found", {"content-type": "text/plain"}))
    for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: store.list("")):
        with pytest.raises(TransientStorageError, match="no answer of Azure's"):
            call()
    assert isinstance(store.put_if("m", b"x", IfVersion('"5"')), outcomes.Unknown)


def test_a_read_gives_no_more_than_was_asked_for(script: Script) -> None:
    told = {**FOUND.headers, "content-range": "bytes 0-9/10"}
    store, _ = script(Reply(206, b"x" * 50, told))
    with pytest.raises(TransientStorageError, match="50 bytes, more than the 10 it may"):
        store.get("k", byte_range=(0, 10))
    with pytest.raises(CorruptData, match="50 bytes to read"):
        store.get("k", max_bytes=10)


def test_what_claims_to_be_huge_takes_no_memory(script: Script) -> None:
    store, _ = script(Reply(206, b"", {**FOUND.headers, "content-length": "99999999999"}))
    with pytest.raises(TransientStorageError, match="99999999999 bytes, more than the 33554432"):
        store.get("k")


def test_f6_the_stores_clock_is_the_date_of_the_first_page(script: Script) -> None:
    store, _ = script(page("a"))
    assert store.list("").now_ms == AZURE.found_ms
    store, _ = script(page("a", date=False))
    assert store.list("").now_ms == AZURE.found_ms, "the newest object"
