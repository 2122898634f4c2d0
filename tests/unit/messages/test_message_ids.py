"""Identities in v1 UUIDs: those of Gazette, there and back."""

from __future__ import annotations

import gzip
import json
import uuid
from pathlib import Path

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.messages.message_ids import (
    Clock,
    MessageId,
    build_uuid,
    new_producer_id,
    parse_uuid,
)

VECTORS = Path(__file__).parents[2] / "golden" / "gazette" / "vectors.json.gz"
UUIDS = json.loads(gzip.decompress(VECTORS.read_bytes()))["uuid"]


def test_every_uuid_of_gazette_is_built_and_parsed() -> None:
    assert len(UUIDS) == 300
    for vector in UUIDS:
        producer, clock = bytes.fromhex(vector["producer_hex"]), int(vector["clock"])
        built = build_uuid(producer, clock, vector["flags"])
        assert built.hex == vector["uuid_hex"]
        assert parse_uuid(built) == MessageId(producer, clock, vector["flags"])


def test_a_built_uuid_is_of_version_1() -> None:
    built = build_uuid(b"\1\2\3\4\5\6", 0, 0)
    assert (built.version, built.variant) == (1, uuid.RFC_4122)


@pytest.mark.parametrize(
    ("producer", "clock", "flags", "says"),
    [
        (b"12345", 0, 0, "has 5 bytes: use 6"),
        (b"123456", -1, 0, "clock is -1"),
        (b"123456", 1 << 64, 0, "clock is 18446744073709551616"),
        (b"123456", 0, 1024, "flags are 1024"),
    ],
)
def test_what_does_not_fit_is_refused(producer: bytes, clock: int, flags: int, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        build_uuid(producer, clock, flags)


def test_a_uuid_of_another_version_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no version 1 UUID"):
        parse_uuid(uuid.UUID("7d444840-9dc0-41d1-b245-5ffdce74fad2"))


def test_a_producer_id_never_looks_like_a_network_card() -> None:
    assert new_producer_id(lambda size: bytes(size)) == b"\1\0\0\0\0\0"


def test_the_clock_follows_the_wall_clock_and_never_goes_back() -> None:
    clock = Clock()
    clock.update(1_000_000)
    first = clock.tick()
    stamped = uuid.UUID(build_uuid(b"123456", first, 0).hex)
    assert (stamped.time - 0x01B21DD213814000) // 10_000 == 1_000_000
    clock.update(999_000)
    assert clock.tick() == first + 1
    clock.update(1_000_001)
    assert clock.tick() > first + 2
