"""Bodies of answers of GCS, whole and in part."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import urllib3.exceptions

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import CorruptData, TransientStorageError
from opendata_buffer.stores.gcs_client import check_whole, connect, read_object
from tests.http_scripts import Reply, ScriptedServer

TEN = b"0123456789"


def read(
    reply: Reply, byte_range: tuple[int, int] | None = None, max_bytes: int | None = None
) -> bytes:
    with ScriptedServer(reply).running() as url:
        client = connect("", StoreOptions(endpoint_url=url))
        for _ in range(2):  # also after one that was read in part
            how = partial(read_object, "k", byte_range, max_bytes)
            found = client.send("GET", "/", {}, read=how).body
    return found


def chunked(body: bytes, **headers: str) -> Reply:
    """What does not tell its length before it ends."""
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return Reply(200, sent, {"content-length": "none", "transfer-encoding": "chunked", **headers})


@pytest.mark.parametrize("reply", [Reply(200, TEN), chunked(TEN)], ids=["length", "chunked"])
def test_a_body_is_read_with_and_without_its_length(reply: Reply) -> None:
    assert read(reply) == TEN
    assert read(reply, max_bytes=10) == TEN
    assert read(reply, (3, 6), 3) == b"345", "a server that knows no ranges"
    assert read(reply, (8, 99)) == b"89"
    with pytest.raises(CorruptData, match="'k' has 10 bytes to read, more than the limit of 9"):
        read(reply, max_bytes=9)


def test_a_range_with_more_bytes_than_it_has_is_refused() -> None:
    assert read(Reply(206, TEN), (0, 10)) == TEN
    for reply in (Reply(206, TEN), replace(chunked(TEN), status=206)):
        with pytest.raises(TransientStorageError, match=r"bytes 0 to 9 of 'k'.*has 10 bytes"):
            read(reply, (0, 9))


@pytest.mark.parametrize("length", [True, False])
def test_what_a_proxy_has_compressed_is_unpacked_and_no_further_than_it_may_be(
    length: bool,
) -> None:
    def packed(body: bytes) -> Reply:
        content, encoding = gzip.compress(body), {"content-encoding": "gzip"}
        return Reply(200, content, encoding) if length else chunked(content, **encoding)

    assert read(packed(TEN), max_bytes=10) == TEN
    with pytest.raises(CorruptData, match="1001 bytes to read"):
        read(packed(b"0" * 50_000_000), max_bytes=1_000)


@pytest.mark.parametrize(
    ("headers", "fits"),
    [
        ({}, True),
        ({"content-length": "10"}, True),
        ({"content-length": "11"}, False),
        ({"content-length": "9"}, False),
        ({"content-length": "9", "content-encoding": "gzip"}, True),
        ({"content-length": "ten"}, True),
    ],
)
def test_a_body_that_broke_off_is_refused(headers: Mapping[str, str], fits: bool) -> None:
    if fits:
        check_whole(headers, TEN)
        return
    with pytest.raises(urllib3.exceptions.ProtocolError, match=r"10 of .* bytes arrived"):
        check_whole(headers, TEN)
