"""Answers that lack what S3 always sends."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pytest

from opendata_buffer.errors import CorruptData
from opendata_buffer.stores.s3 import modified_ms, read_body


def answer(**fields: Any) -> dict[str, Any]:
    return {"Body": io.BytesIO(b"0123456789"), **fields}


@pytest.mark.parametrize("length", [{"ContentLength": 10}, {}], ids=["length", "chunked"])
def test_a_body_is_read_with_and_without_its_length(length: dict[str, int]) -> None:
    assert read_body("k", answer(**length), None, None) == b"0123456789"
    assert read_body("k", answer(**length), None, 10) == b"0123456789"
    assert read_body("k", answer(**length), (3, 6), 3) == b"345", "a store that knows no ranges"
    assert read_body("k", answer(**length), (8, 99), None) == b"89"
    assert read_body("k", answer(**length), (50, 60), None) == b""
    with pytest.raises(CorruptData, match="more than the limit of 9"):
        read_body("k", answer(**length), None, 9)
    with pytest.raises(CorruptData, match="more than the limit of 2"):
        read_body("k", answer(**length), (3, 6), 2)


def test_no_more_is_read_of_a_chunked_body_than_tells_that_it_is_too_large() -> None:
    found = answer()
    body = found["Body"] = _Counting(b"x" * 100_000)
    with pytest.raises(CorruptData):
        read_body("k", found, None, 1_000)
    assert body.read_bytes == 1_001
    assert body.closed


def test_a_missing_modification_time_is_long_ago() -> None:
    assert modified_ms({}) == 0
    assert modified_ms({"LastModified": datetime(2026, 1, 1, tzinfo=UTC)}) == 1_767_225_600_000


class _Counting(io.BytesIO):
    read_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.read_bytes += len(data)
        return data
