"""What is read off an answer of GCS."""

from __future__ import annotations

from opendata_buffer.stores.gcs import created_ms, date_ms, told_md5
from opendata_buffer.stores.http import md5


def test_times_of_descriptions_and_headers_are_the_same_whole_seconds() -> None:
    assert created_ms({"timeCreated": "2026-01-01T00:00:00.999Z"}) == 1_767_225_600_000
    assert date_ms("Thu, 01 Jan 2026 00:00:00 GMT") == 1_767_225_600_000


def test_a_missing_time_is_long_ago_and_a_missing_date_is_none() -> None:
    assert (created_ms({}), date_ms(None), date_ms("")) == (0, None, None)


def test_the_checksum_is_found_among_others() -> None:
    headers = {"x-goog-hash": "crc32c=n03x6A==, md5=kbOD4tDT/fY7NayaDqnr8g=="}
    assert told_md5(headers) == md5(b"--bytes\r\n")
    assert told_md5({"x-goog-hash": "crc32c=n03x6A=="}) is None, "a composed object has no MD5"
    assert told_md5({}) is None


def test_what_is_no_checksum_is_that_of_no_bytes() -> None:
    assert told_md5({"x-goog-hash": "md5=no base64!"}) == b""
