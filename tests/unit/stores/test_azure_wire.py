"""Answers of Azure that are longer than they may be."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from urllib3.response import HTTPResponse

from opendata_buffer.stores.azure_client import bounded_answer
from opendata_buffer.stores.http import MOST_OF_A_PAGE, TooLong


def answer(
    size: int, *, status: int = 200, asked: str = "", told: str | None = None, method: str = "GET"
) -> Any:
    headers = {} if told is None else {"content-length": told}
    body = io.BytesIO(b"x" * size)
    raw = HTTPResponse(body, headers=headers, status=status, preload_content=False)
    request = SimpleNamespace(method=method, headers={"x-ms-range": asked} if asked else {})
    return bounded_answer(lambda *_: SimpleNamespace(), request, raw).raw


def read(raw: Any) -> int:
    return sum(map(len, raw.stream(4_096)))


def test_a_range_has_no_more_bytes_than_were_asked_for() -> None:
    asked = "bytes=100000-299999"
    assert read(answer(200_000, asked=asked)) == 200_000
    with pytest.raises(TooLong, match="more than the 200000 bytes"):
        read(answer(200_001, asked=asked))
    with pytest.raises(requests.exceptions.ConnectionError, match="200001 bytes"):
        answer(200_001, asked=asked, told="200001")


def test_an_error_may_be_longer_than_the_range_and_not_as_long_as_a_page() -> None:
    assert read(answer(1_000, status=416, asked="bytes=5-6", told="1000")) == 1_000
    for asked in ("bytes=0-99999999", ""):
        with pytest.raises(TooLong, match="more than the 65536 bytes"):
            read(answer(65_537, status=403, asked=asked))


def test_anything_else_is_no_longer_than_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(requests.exceptions.ConnectionError):
        answer(0, told=str(MOST_OF_A_PAGE + 1))
    answer(0, told="99999999999", method="HEAD")  # the size of the blob, of which nothing comes
    monkeypatch.setattr("opendata_buffer.stores.azure_client.MOST_OF_A_PAGE", 10)
    assert read(answer(10)) == 10
    with pytest.raises(TooLong):
        read(answer(11))


def test_a_body_that_breaks_off_is_seen() -> None:
    assert answer(1).enforce_content_length
