"""The bytes of one entry; entries within a manifest are in test_manifest.py."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats import BytesLike
from opendata_buffer.formats.entries import (
    Metadata,
    NewEntry,
    QueueEntry,
    decode_entry,
    encode_entry,
    salvage_entries,
)
from opendata_buffer.formats.keys import location_timestamp_ms

ENTRY = (
    b"\x25\x00\x00\x00"  # entry_len 37
    b"\x01\x02\x00\x00\x00\x00\x00\x00"  # sequence 513
    b"\x03\x00p/\x61"
    b"\x01\x00\x00\x00"  # one item
    b"\x0a\x00\x00\x00" + b"\x00\x00\x00\x00\x00\x00\x00\x80" + b"\x04\x00\x00\x00meta"
)
VALUE = QueueEntry(513, "p/a", (Metadata(10, -(2**63), b"meta"),))


def encoded(sequence: int, entry: NewEntry) -> bytes:
    pieces: list[BytesLike] = []
    encode_entry(sequence, entry, pieces)
    return b"".join(pieces)


def test_an_entry_is_read_where_it_starts_and_no_further() -> None:
    assert encoded(513, NewEntry("p/a", VALUE.metadata)) == ENTRY
    raw = b"before" + ENTRY + b"behind"
    assert decode_entry(raw, 6, 513, len(raw)) == (VALUE, 6 + len(ENTRY))
    with pytest.raises(CorruptManifest, match="entry 513 at byte 6 claims 37 bytes of the 36 left"):
        decode_entry(raw, 6, 513, len(raw) - 7)


@pytest.mark.parametrize("payload", [b"meta", bytearray(b"meta"), memoryview(b"meta")])
def test_any_bytes_like_payload(payload: bytes) -> None:
    assert encoded(513, NewEntry("p/a", (Metadata(10, -(2**63), payload),))) == ENTRY


@pytest.mark.parametrize("at", range(len(ENTRY)))
def test_f15_a_changed_byte_changes_the_values_or_is_refused(at: int) -> None:
    for change in (1, 0x80, 0xFF):
        raw = bytearray(ENTRY)
        raw[at] ^= change
        try:
            value, end = decode_entry(bytes(raw), 0, 513, len(raw))
        except CorruptManifest:
            continue
        assert value != VALUE
        assert end == len(ENTRY)


def test_entries_in_front_of_a_damage_are_salvaged() -> None:
    pieces: list[BytesLike] = []
    for sequence in (7, 8, 9):
        encode_entry(sequence, NewEntry(f"p/{sequence}"), pieces)
    raw = b"".join(pieces)
    assert [each.location for each in salvage_entries(raw)] == ["p/7", "p/8", "p/9"]
    assert [each.sequence for each in salvage_entries(raw[:-1])] == [7, 8]
    assert salvage_entries(raw[1:]) == []
    assert salvage_entries(b"") == []


def test_the_time_of_an_entry_is_its_first_records_and_else_its_names() -> None:
    location = "ingest/01JD5T4R3KXBMZ7QV9N2WG8Y00.batch"
    named = location_timestamp_ms(location)
    assert named is not None
    # A sink dates the names of a slow micro-batch ahead.
    assert QueueEntry(0, location, (Metadata(0, 7, b""), Metadata(5, 9, b""))).time_ms == 7
    assert QueueEntry(0, location).time_ms == named
    assert QueueEntry(0, "ingest/by-hand").time_ms is None


def test_bytes_after_the_last_metadata_item_are_refused() -> None:
    longer = b"\x28" + ENTRY[1:] + b"new"
    with pytest.raises(CorruptManifest, match="513 has 3 bytes after its 1 metadata items"):
        decode_entry(longer, 0, 513, len(longer))
