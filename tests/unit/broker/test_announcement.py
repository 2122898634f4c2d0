"""What ``_broker.json`` says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.broker.discovery_record import (
    DiscoveryRecord,
    decode,
    discovery_record_key,
    encode,
)
from opendata_buffer.errors import CorruptData

ONE = DiscoveryRecord(
    3, "01K9", "10.0.0.7:9100", b"s" * 32, certificate="ab" * 32, beat=4, seen_ms=1_700
)


def test_it_lies_beside_the_manifest() -> None:
    assert discovery_record_key("ingest") == "ingest/_broker.json"


def test_what_is_written_is_read() -> None:
    for each in (ONE, replace(ONE, certificate=""), ONE.left(99), ONE.beaten(1_800)):
        assert decode(encode(each)) == each


def test_fields_of_later_versions_are_passed_over() -> None:
    assert decode(encode(ONE).replace(b'"term"', b'"more": [1], "term"')) == ONE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 50_000,
        encode(ONE).replace(b'"version": 1', b'"version": 2'),
        encode(ONE).replace(b'"term": 3', b'"term": -1'),
        encode(replace(ONE, secret=b"short")),
        encode(ONE).replace(ONE.secret.hex().encode(), b"no hex"),
    ],
)
def test_what_is_no_announcement_says_that_it_may_be_deleted(data: bytes) -> None:
    with pytest.raises(CorruptData, match="delete the object"):
        decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_announcement_or_corrupt(data: bytes) -> None:
    try:
        decode(data)
    except CorruptData:
        return


def test_the_secret_is_not_shown() -> None:
    assert ONE.secret.hex() not in repr(ONE)
    assert str(ONE.secret) not in repr(ONE)


def test_a_broker_that_left_serves_no_more_and_keeps_its_term() -> None:
    left = ONE.left(5_000)
    assert ONE.serves
    assert not left.serves
    assert left.same_broker(ONE)
    assert left.secret == b""


def test_another_term_or_another_id_is_another_broker() -> None:
    assert ONE.same_broker(ONE.beaten(2_000))
    assert not ONE.same_broker(replace(ONE, term=4))
    assert not ONE.same_broker(replace(ONE, id="01KA"))
    assert not ONE.same_broker(None)
