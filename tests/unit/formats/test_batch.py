"""The data batch, in plain Python; most damage is refused by both decoders."""

from __future__ import annotations

import struct

import pytest

from opendata_buffer.errors import CorruptBatch, InvalidInput
from opendata_buffer.formats.arrow import decode_arrow, decode_records
from opendata_buffer.formats.batch import (
    BatchFooter,
    Compression,
    decode_batch,
    encode_batch,
    encode_block,
    join_records,
    open_batch,
    seal_block,
)

# Three records "hello", "" and 00 ff: every byte of the format.
BLOCK = b"\x05\x00\x00\x00hello" + b"\x00\x00\x00\x00" + b"\x02\x00\x00\x00\x00\xff"
FOOTER = b"\x00" + b"\x03\x00\x00\x00" + b"\x01\x00"
THREE = BLOCK + FOOTER
RECORDS = [b"hello", b"", b"\x00\xff"]


def refuse(data: bytes, match: str, max_bytes: int = 1 << 20) -> None:
    """Both decoders refuse the same bytes."""
    with pytest.raises(CorruptBatch, match=match):
        decode_batch(data, max_bytes)
    for decode in (decode_arrow, decode_records):
        with pytest.raises(CorruptBatch):
            decode(data, max_bytes)


def test_literal_bytes() -> None:
    assert encode_block(RECORDS) == BLOCK
    assert encode_batch(RECORDS) == THREE
    assert decode_batch(THREE) == RECORDS
    footer, block = open_batch(THREE)
    assert footer == BatchFooter(Compression.NONE, 3)
    assert bytes(block) == BLOCK


def test_an_empty_batch_is_its_footer() -> None:
    assert encode_batch([]) == b"\x00" + b"\x00\x00\x00\x00" + b"\x01\x00"
    assert decode_batch(encode_batch([])) == []
    assert decode_batch(encode_batch([], Compression.ZSTD)) == []


def test_zstd_footer_and_frame() -> None:
    data = encode_batch(RECORDS, Compression.ZSTD)
    assert data[:4] == b"\x28\xb5\x2f\xfd"
    assert data[-7:] == b"\x01" + b"\x03\x00\x00\x00" + b"\x01\x00"
    assert decode_batch(data) == RECORDS
    # failure F36: bit rot in the content is found by the frame's checksum.
    rotten = bytearray(data)
    rotten[data.index(b"hello")] ^= 1
    refuse(bytes(rotten), "damaged")


@pytest.mark.parametrize(
    "record",
    [
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"abcd"),
        memoryview(b"xabcdx")[1:5],
        memoryview(b"abcd").cast("H"),
    ],
)
def test_any_bytes_like_record(record: bytes) -> None:
    assert encode_block([record]) == b"\x04\x00\x00\x00abcd"
    assert encode_block([record] * 2000) == b"\x04\x00\x00\x00abcd" * 2000


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (["text"], r"record 0 is str: encode it"),
        ([b"", None], r"record 1 is NoneType"),
        ([b"", b"", 5], r"record 2 is int"),
        ([memoryview(b"abcd")[::2]], r"record 0 is a view with gaps"),
        ([b"x"] * 3000 + ["text"], r"record 3000 is str"),
    ],
)
def test_values_that_are_no_records_are_refused(records: list[object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        encode_batch(records)  # type: ignore[arg-type]


def test_f34_record_counts_are_checked_before_building() -> None:
    for count in (-1, 2**32):
        with pytest.raises(InvalidInput, match="at most 4294967295"):
            seal_block(b"", count, Compression.NONE)
    with pytest.raises(InvalidInput, match="cannot hold 4 records"):
        seal_block(b"\0" * 15, 4, Compression.NONE)
    with pytest.raises(InvalidInput, match="cannot hold 0 records"):
        seal_block(b"\0" * 4, 0, Compression.NONE)


@pytest.mark.parametrize("level", [0, 23, -1])
def test_levels_outside_1_to_22_are_refused(level: int) -> None:
    with pytest.raises(InvalidInput, match="zstd_level"):
        encode_batch([b"a"], Compression.ZSTD, level)


def test_f20_truncation_at_any_byte_under_a_valid_footer_is_refused() -> None:
    for size in range(len(BLOCK)):
        refuse(BLOCK[:size] + FOOTER, "truncated|cannot|footer counts 3")


def test_other_versions_and_less_than_a_footer_are_refused() -> None:
    for version in (0, 2, 65535):
        refuse(THREE[:-2] + struct.pack("<H", version), f"has version {version}, .* Upgrade here")
    refuse(FOOTER[1:], "6 bytes, less than its 7-byte footer")


@pytest.mark.parametrize("raw", [b"<html>404</html>", b"garbage", b"\xff" * 100])
def test_an_object_that_was_cut_or_overwritten_is_no_other_version(raw: bytes) -> None:
    refuse(raw, f"cut or overwritten: its {len(raw)} bytes begin with")


@pytest.mark.parametrize("kind", [2, 255])
def test_unknown_compression_is_refused(kind: int) -> None:
    refuse(BLOCK + bytes([kind]) + FOOTER[1:], f"compression type {kind}, known are 0")


@pytest.mark.parametrize("count", [4, 5, 1 << 31, 2**32 - 1])
def test_f18_a_huge_record_count_is_refused_before_allocating(count: int) -> None:
    footer = b"\x00" + struct.pack("<I", count) + b"\x01\x00"
    refuse(footer, f"counts {count} records but the block has 0 bytes")
    refuse(BLOCK + footer, f"counts {count}|record 3 of 4 starts at byte 19")
    frame = encode_batch(RECORDS, Compression.ZSTD)
    refuse(frame[:-6] + struct.pack("<IH", count, 1), f"counts {count}|record 3 of 4")


@pytest.mark.parametrize("count", [0, 1, 2])
def test_f20_bytes_behind_the_last_counted_record_are_refused(count: int) -> None:
    refuse(BLOCK + b"\x00" + struct.pack("<IH", count, 1), "no records but|bytes after its")


def test_f21_an_uncompressed_block_beyond_the_cap_is_refused() -> None:
    assert decode_batch(THREE, len(BLOCK)) == RECORDS
    refuse(THREE, "19 bytes, more than max_batch_bytes 18", len(BLOCK) - 1)


@pytest.mark.parametrize("compression", list(Compression))
def test_a_block_in_pieces_is_sealed_as_the_whole(compression: Compression) -> None:
    pieces = [encode_block([b"a", b""]), memoryview(encode_block([b"bc"]))]
    assert decode_batch(seal_block(pieces, 3, compression)) == [b"a", b"", b"bc"]
    assert seal_block((), 0, compression)[-7:] == seal_block(b"", 0, compression)[-7:]
    with pytest.raises(InvalidInput, match="15 bytes cannot hold 4 records"):
        seal_block(pieces, 4, compression)


class Endless(bytes):
    def __len__(self) -> int:
        return 2**32


def test_a_record_beyond_four_gigabytes_is_named() -> None:
    with pytest.raises(InvalidInput, match="record 1 has 4294967296 bytes"):
        join_records([b"a", Endless()])
