"""Checksums of objects on their way."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.stores.http import as_base64, check_md5, crc32, md5


def test_checksums_are_those_that_services_count() -> None:
    assert as_base64(md5(b"--bytes\r\n")) == "kbOD4tDT/fY7NayaDqnr8g=="
    assert as_base64(crc32(b"123456789")) == "y/Q5Jg=="
    assert md5(memoryview(b"abc")) == md5(b"abc")


def test_bytes_that_are_not_those_that_were_sent_are_read_again() -> None:
    check_md5(b"abc", md5(b"abc"), "'m'")
    check_md5(b"abc", None, "'m'")
    for told in (md5(b"abd"), b""):
        with pytest.raises(TransientStorageError, match=r"cannot read 'm' in bucket 'b': .*Try ag"):
            check_md5(b"abc", told, "'m' in bucket 'b'")
