"""Queries, headers and bodies for GCS."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.stores.base import ABSENT, IfVersion
from opendata_buffer.stores.gcs import download, expected_generation, upload


def test_a_read_asks_for_what_is_wanted_and_no_more() -> None:
    assert download(None, None) == ({"alt": "media"}, {})
    assert download("7", None) == ({"alt": "media", "ifGenerationNotMatch": "7"}, {})
    assert download(None, (3, 6)) == ({"alt": "media"}, {"Range": "bytes=3-5"})


def test_what_is_no_generation_is_no_condition_of_a_read() -> None:
    assert download('"etag"', None) == ({"alt": "media"}, {})


@pytest.mark.parametrize(
    ("condition", "expected"),
    # What is no generation must not become "no object", or no condition at all.
    [(ABSENT, "0"), (IfVersion("5"), "5"), (IfVersion("0"), "1"), (IfVersion('"etag"'), "1")],
)
def test_the_condition_is_the_generation_and_0_for_no_object(
    condition: IfVersion, expected: str
) -> None:
    assert expected_generation(condition) == expected


def test_an_upload_carries_its_checksum_and_is_kept_by_no_cache() -> None:
    body, headers = upload("a#1/ü", b"--bytes\r\n")
    mark = headers["Content-Type"].partition("boundary=")[2].encode()
    _, about, content, end = body.split(b"--" + mark)
    assert json.loads(about.partition(b"\r\n\r\n")[2]) == {
        "name": "a#1/ü",
        "md5Hash": "kbOD4tDT/fY7NayaDqnr8g==",
        "cacheControl": "no-store",
    }
    assert content.partition(b"\r\n\r\n")[2] == b"--bytes\r\n\r\n"
    assert end == b"--\r\n"


def test_no_two_uploads_have_the_same_mark() -> None:
    assert upload("m", b"1")[1] != upload("m", b"1")[1]
