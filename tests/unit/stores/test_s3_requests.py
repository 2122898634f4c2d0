"""Arguments of boto3's calls."""

from __future__ import annotations

from opendata_buffer.stores.base import ABSENT, IfVersion
from opendata_buffer.stores.s3 import conditional_upload, download, upload


def test_a_read_asks_for_what_is_wanted_and_no_more() -> None:
    whole = {"Bucket": "b", "Key": "in/a"}
    assert download("b", "in/a", None, None) == whole
    assert download("b", "in/a", '"e"', None) == {**whole, "IfNoneMatch": '"e"'}
    assert download("b", "in/a", None, (3, 6)) == {**whole, "Range": "bytes=3-5"}


def test_f36_an_upload_has_its_checksum_as_a_header() -> None:
    assert upload("b", "in/a", b"123456789") == {
        "Bucket": "b",
        "Key": "in/a",
        "Body": b"123456789",
        "ChecksumCRC32": "y/Q5Jg==",
    }


def test_a_conditional_upload_is_one_with_its_condition() -> None:
    plain = upload("b", "m", b"1")
    assert conditional_upload("b", "m", b"1", ABSENT) == {**plain, "IfNoneMatch": "*"}
    assert conditional_upload("b", "m", b"1", IfVersion('"e"')) == {**plain, "IfMatch": '"e"'}
