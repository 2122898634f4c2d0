"""The queue manifest: its footer, entries, and changes."""

from __future__ import annotations

import copy
import pickle
import struct

import pytest

from opendata_buffer.errors import CorruptManifest, InvalidInput
from opendata_buffer.formats import BytesLike
from opendata_buffer.formats import manifest as module
from opendata_buffer.formats.batch import location_timestamp_ms
from opendata_buffer.formats.manifest import (
    BatchDescriptor,
    Manifest,
    Metadata,
    NewEntry,
    check_transition,
    decode_entry,
    encode_entry,
    entry_bytes,
    salvage_entries,
)
from opendata_buffer.hints import Action, QueueName

# Entry 7 "p/a" without metadata, entry 8 "é" with two items: every byte of the format.
ENTRY_7 = (
    b"\x11\x00\x00\x00"  # entry_len 17
    b"\x07\x00\x00\x00\x00\x00\x00\x00"  # sequence
    b"\x03\x00p/a"
    b"\x00\x00\x00\x00"  # no metadata
)
ENTRY_8 = (
    b"\x32\x00\x00\x00"  # entry_len 50
    b"\x08\x00\x00\x00\x00\x00\x00\x00"
    b"\x02\x00\xc3\xa9"
    b"\x02\x00\x00\x00"  # two items
    b"\x00\x00\x00\x00" + b"\xff\xff\xff\xff\xff\xff\xff\xff" + b"\x02\x00\x00\x00hi"
    b"\x05\x00\x00\x00" + b"\x02\x00\x00\x00\x00\x00\x00\x00" + b"\x00\x00\x00\x00"
)
FOOTER = (
    b"\x02\x00\x00\x00"  # entry_count
    b"\x09\x00\x00\x00\x00\x00\x00\x00"  # next_sequence
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # epoch
    b"\x01\x00"  # version
)
RAW = ENTRY_7 + ENTRY_8 + FOOTER
ENTRIES = (
    BatchDescriptor(7, "p/a", ()),
    BatchDescriptor(8, "é", (Metadata(0, -1, b"hi"), Metadata(5, 2, b""))),
)


def footer(count: int, next_sequence: int, epoch: int = 0, version: int = 1) -> bytes:
    return struct.pack("<IQQH", count, next_sequence, epoch, version)


def entry(
    sequence: int,
    location: bytes = b"p/x",
    items: tuple[tuple[int, int, bytes], ...] = (),
    **forged: int,
) -> bytes:
    """Return the bytes of an entry. ``forged`` replaces the length and count fields."""
    body = b"".join(
        struct.pack("<IqI", start, time, forged.get("payload_len", len(payload))) + payload
        for start, time, payload in items
    )
    body = (
        struct.pack("<QH", sequence, forged.get("location_len", len(location)))
        + location
        + struct.pack("<I", forged.get("count", len(items)))
        + body
    )
    return struct.pack("<I", forged.get("entry_len", len(body))) + body


def queue(count: int, first: int = 0) -> Manifest:
    raw = b"".join(entry(first + n, b"p/%d" % n) for n in range(count))
    return Manifest.parse(raw + footer(count, first + count))


def check(raw: bytes) -> None:
    Manifest.parse(raw).entries()


# Reading


def test_literal_bytes() -> None:
    manifest = Manifest.parse(RAW)
    assert manifest.raw == RAW
    assert (manifest.entry_count, manifest.next_sequence, manifest.epoch) == (2, 9, 3)
    assert (manifest.first_sequence, manifest.size) == (7, len(RAW))
    assert manifest.entries() == ENTRIES


def test_the_empty_manifest_is_its_footer() -> None:
    empty = Manifest.empty()
    assert empty.raw == bytes(20) + b"\x01\x00"
    assert (empty.entry_count, empty.next_sequence, empty.epoch, empty.first_sequence) == (0,) * 4
    assert empty.entries() == ()
    assert empty.find("p/a") is None
    assert empty.append([]) is empty
    late = Manifest.parse(footer(0, 41, 2))
    assert late.first_sequence == late.next_sequence == 41


def test_find_returns_the_sequence_of_a_location() -> None:
    manifest = Manifest.parse(RAW)
    assert manifest.find("p/a") == 7
    assert manifest.find("é") == 8
    for missing in ("p/", "/a", "p", "p/b", "hi", "", "x" * 70_000):
        assert manifest.find(missing) is None
    # A search without a match decodes no entry.
    damaged = Manifest.parse(entry(0) + entry(9) + footer(2, 2))
    assert damaged.find("q/none") is None
    with pytest.raises(CorruptManifest):
        damaged.find("p/x")


def test_the_oldest_of_several_entries_is_found_after_any_number_of_decoys() -> None:
    decoys = (b"\x06\x00p/real" * 40, b"\x06\x00p/real", b"")
    items = tuple((0, 0, decoy) for decoy in decoys)
    raw = entry(0, b"p/x", items) + entry(1, b"p/y", items)
    raw += b"".join(entry(sequence, b"p/real", items) for sequence in (2, 3))
    assert Manifest.parse(raw + footer(4, 4)).find("p/real") == 2


def test_find_is_not_fooled_by_payloads() -> None:
    decoy = entry(0, b"p/real", ((0, 0, entry(1, b"p/decoy") + b"\x06\x00p/real"),))
    manifest = Manifest.parse(decoy + entry(1, b"p/real") + footer(2, 2))
    assert manifest.find("p/decoy") is None
    assert manifest.find("p/real") == 0
    assert manifest.drop_through(0).find("p/real") == 1


def test_locations_are_the_locations_of_the_entries() -> None:
    names = ["a", "é" * 60, "p/" + "x" * 253, "y" * 256, "z" * 300, "é" * 500, "l" * 65_535]
    items = (Metadata(0, 5, b"payload"), Metadata(3, 6))
    manifest = Manifest.starting_at(40, 0).append([NewEntry(name, items) for name in names])
    assert manifest.locations() == names
    assert [manifest.find(name) for name in names] == [*range(40, 47)]
    manifest = manifest.append([NewEntry(name) for name in names])
    assert manifest.locations() == names * 2
    assert [each.location for each in manifest.entries()] == names * 2
    payload = (Metadata(0, 5, bytes(70_000)),)
    for name in names:
        assert Manifest.empty().append([NewEntry(name, payload)]).locations() == [name]


def test_a_manifest_keeps_its_own_copy_of_the_bytes() -> None:
    for raw in (bytearray(RAW), memoryview(RAW)):
        parsed = Manifest.parse(raw)
        assert type(parsed.raw) is bytes
        assert parsed == Manifest.parse(RAW)


def test_only_the_requested_entries_are_read() -> None:
    damaged = Manifest.parse(entry(0) + entry(9) + footer(2, 2))
    assert [each.sequence for each in damaged.entries(limit=1)] == [0]
    for nothing in (damaged.entries(limit=0), damaged.entries(limit=-1), damaged.entries(2)):
        assert nothing == ()


@pytest.mark.parametrize("length", [0, 13, 18, 200])
def test_f15_the_error_about_a_header_with_a_wrong_length_names_the_entry(length: int) -> None:
    manifest = Manifest.parse(entry(0) + entry(1, entry_len=length) + footer(2, 2))
    for read in (manifest.check, lambda: manifest.drop_through(0)):
        with pytest.raises(CorruptManifest, match=f"entry 1 at byte 21 claims {length} bytes of "):
            read()


def test_an_entry_with_an_empty_location_is_read_and_never_written() -> None:
    raw = entry(7, b"")
    assert Manifest.parse(raw + footer(1, 8)).entries() == (BatchDescriptor(7, ""),)
    assert salvage_entries(raw) == [BatchDescriptor(7, "")]
    with pytest.raises(CorruptManifest, match="has sequence 7, expected 6"):
        Manifest.parse(raw + footer(1, 7))
    with pytest.raises(CorruptManifest, match="claims 13 bytes of the 14 left"):
        Manifest.parse(b"\x0d" + raw[1:] + footer(1, 8))


# Changing


def test_f15_append_does_not_decode_existing_entries() -> None:
    # The second entry is garbage, which only a read must detect.
    manifest = Manifest.parse(entry(0) + b"\xff" * 40 + footer(2, 2))
    after = manifest.append([NewEntry("p/new")])
    assert after.raw == manifest.raw[:-22] + entry(2, b"p/new") + footer(3, 3)
    with pytest.raises(CorruptManifest):
        after.entries()


def test_the_largest_sequence_round_trips() -> None:
    top = 2**64 - 1
    manifest = Manifest.parse(footer(0, top - 1, top)).append([NewEntry("p/x")])
    assert manifest.next_sequence == top
    assert Manifest.parse(manifest.raw).entries()[0].sequence == top - 1
    assert manifest.drop_through(top - 1).raw == footer(0, top, top)


def test_the_largest_values_that_fit_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    last = Manifest.starting_at(2**64 - 1, 2**63 - 1)
    assert Manifest.parse(last.raw) == last
    assert last.sealed
    monkeypatch.setattr(module, "_U32_MAX", 20)
    assert queue(19).append([NewEntry("x")]).entry_count == 20


def test_dropping_no_entry_changes_nothing() -> None:
    manifest = Manifest.parse(RAW)
    assert manifest.drop_through(6) is manifest
    assert manifest.drop_through(0) is manifest


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (NewEntry(""), "0 bytes"),
        (NewEntry("x" * 65_536), "65536 bytes of UTF-8: use 1 to 65535"),
        (NewEntry("é" * 32_768), "65536 bytes"),
        (NewEntry("a\ud800"), "not valid Unicode"),
        (NewEntry("p/x", (Metadata(-1, 0),)), "item 0: start_index -1"),
        (NewEntry("p/x", (Metadata(0, 0), Metadata(2**32, 0))), "item 1: start_index 4294967296"),
        (NewEntry("p/x", (Metadata(0, 2**63),)), "ingestion_time_ms 9223372036854775808"),
        (NewEntry("p/x", (Metadata(0, -(2**63) - 1),)), "ingestion_time_ms -9223372036854775809"),
    ],
)
def test_f34_values_that_do_not_fit_are_refused(new: NewEntry, message: str) -> None:
    manifest = Manifest.parse(RAW)
    with pytest.raises(InvalidInput, match=message):
        manifest.append([NewEntry("p/fine"), new])
    assert manifest.raw == RAW


def test_f34_entry_and_payload_lengths_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_U32_MAX", 100)
    fits = NewEntry("p/x", (Metadata(0, 0, b"x" * (100 - 14 - 3 - 16)),))
    assert Manifest.empty().append([fits]).size == 4 + 100 + 22
    too_large = NewEntry("p/x", (Metadata(0, 0, b"x" * (101 - 14 - 3 - 16)),))
    with pytest.raises(InvalidInput, match="101 bytes with its metadata: at most 100"):
        Manifest.empty().append([too_large])


def test_f34_counts_are_checked_before_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    last = Manifest.parse(footer(0, 2**64 - 1))
    with pytest.raises(InvalidInput, match="next sequence 18446744073709551616"):
        last.append([NewEntry("p/x")])
    monkeypatch.setattr(module, "_U32_MAX", 3)
    with pytest.raises(InvalidInput, match="makes 4 entries"):
        queue(3).append([NewEntry("p/x")])


def test_f27_dropping_past_the_newest_entry_is_refused() -> None:
    for sequence in (9, 10, 2**64 - 1):
        with pytest.raises(InvalidInput, match=f"{sequence}: the newest entry queued is 8"):
            Manifest.parse(RAW).drop_through(sequence)


def test_with_epoch_changes_only_the_epoch() -> None:
    manifest = Manifest.parse(RAW)
    after = manifest.with_epoch(4)
    assert after.raw == ENTRY_7 + ENTRY_8 + footer(2, 9, 4)
    assert after.epoch == 4
    assert manifest.with_epoch(3) == manifest
    with pytest.raises(InvalidInput, match=r"epoch is 2: use 3 \(the present one\)"):
        manifest.with_epoch(2)
    with pytest.raises(InvalidInput, match="epoch is 9223372036854775808"):
        manifest.with_epoch(2**63)


def test_f10_an_epoch_of_2_to_63_is_an_error_and_does_not_overflow() -> None:
    assert Manifest.empty().with_epoch(2**63 - 1).epoch == 2**63 - 1
    for epoch in (2**63 - 1, 2**63, 2**64 - 1):
        forged = Manifest.parse(footer(0, 0, epoch))
        with pytest.raises(CorruptManifest, match=f"manifest has epoch {epoch}: no consumer"):
            forged.with_epoch(epoch + 1)
        with pytest.raises(CorruptManifest, match="was forged") as raised:
            forged.with_epoch(0)
        assert [hint.action for hint in raised.value.hints] == [Action.INSPECT]


# Refusing


@pytest.mark.parametrize("size", range(len(RAW)))
def test_f15_every_truncation_is_refused(size: int) -> None:
    with pytest.raises(CorruptManifest):
        check(RAW[:size])


@pytest.mark.parametrize("size", range(len(RAW) - 22))
def test_f15_every_truncation_under_a_valid_footer_is_refused(size: int) -> None:
    with pytest.raises(CorruptManifest):
        check(RAW[:size] + FOOTER)


@pytest.mark.parametrize(
    ("body", "count", "next_sequence", "says"),
    [
        (b"", 1, 1, "counts 1 entries but they have 0 bytes"),
        (b"", 2**32 - 1, 2**64 - 1, "counts 4294967295 entries but they have 0 bytes"),
        (ENTRY_7, 0, 8, "counts 0 entries but they have 21 bytes"),
        (ENTRY_7, 2, 9, "counts 2 entries but they have 21 bytes"),
        (ENTRY_7, 1, 9, "has sequence 7, expected 8"),
        (ENTRY_7 + ENTRY_8, 1, 8, "54 bytes after its 1 entries"),
        (ENTRY_7 + ENTRY_8, 2, 8, "has sequence 7, expected 6"),
        (ENTRY_7 + ENTRY_8, 2, 1, "counts 2 entries but its next sequence is 1"),
    ],
)
def test_f16_a_count_that_contradicts_body_or_sequences_is_refused(
    body: bytes, count: int, next_sequence: int, says: str
) -> None:
    with pytest.raises(CorruptManifest, match=says):
        Manifest.parse(body + footer(count, next_sequence))


@pytest.mark.parametrize("through", [0, 1, 2, 3])
def test_f16_a_count_too_small_is_never_written_back(through: int) -> None:
    # The manifest has five entries and a consistent footer that counts four.
    manifest = Manifest.parse(b"".join(map(entry, range(5))) + footer(4, 4))
    says = f"manifest has {len(entry(4))} bytes after its 4 entries"
    with pytest.raises(CorruptManifest, match=says):
        manifest.drop_through(through)
    with pytest.raises(CorruptManifest, match=says):
        manifest.entries()


@pytest.mark.parametrize("count", [1, 2, 2**31, 2**32 - 2])
def test_f17_huge_metadata_count_is_refused_before_allocating(count: int) -> None:
    with pytest.raises(CorruptManifest, match=f"counts {count} metadata items but has 0 bytes"):
        Manifest.parse(entry(0, count=count) + footer(1, 1))
    one_item = ((0, 0, b""),)
    with pytest.raises(CorruptManifest, match=f"counts {count + 1} metadata .* but has 16 bytes"):
        Manifest.parse(entry(0, items=one_item, count=count + 1) + footer(1, 1))


def test_f19_metadata_must_not_run_into_the_next_entry() -> None:
    payload_over = entry(0, items=((0, 0, b"xy"),), payload_len=20)
    with pytest.raises(CorruptManifest, match=r"item 0 of 1: its payload of 20 bytes .* the 2 "):
        check(payload_over + entry(1) + footer(2, 2))
    second_over = entry(0, items=((0, 0, b"x" * 16),), count=2)
    with pytest.raises(CorruptManifest, match=r"item 1 of 2: its header .* the 0 bytes"):
        check(second_over + entry(1) + footer(2, 2))
    location_over = entry(0, b"p/x", location_len=8)
    with pytest.raises(CorruptManifest, match="location of 8 bytes but 3 are left"):
        check(location_over + entry(1) + footer(2, 2))
    # The same damage in a later entry.
    with pytest.raises(CorruptManifest, match="entry 1, metadata item 0 of 1"):
        check(entry(0) + entry(1, items=((0, 0, b"xy"),), payload_len=40) + entry(2) + footer(3, 3))


@pytest.mark.parametrize("second", [0, 2, 5, 2**64 - 1])
def test_f28_a_gap_or_repeat_in_the_sequences_is_refused(second: int) -> None:
    manifest = Manifest.parse(entry(0) + entry(second) + entry(2) + footer(3, 3))
    for read in (manifest.entries, lambda: manifest.entries(2), lambda: manifest.drop_through(0)):
        with pytest.raises(CorruptManifest, match=f"has sequence {second}, expected 1"):
            read()
    assert [entry.sequence for entry in manifest.entries(limit=1)] == [0]


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (entry(1, b"\xff"), "entry 1 has a location that is not UTF-8"),
        (entry(1, b"\xed\xa0\x80"), "entry 1 has a location that is not UTF-8"),
        (entry(1, location_len=200), "entry 1 has a location of 200 bytes"),
        (entry(1, location_len=4), "entry 1 has a location of 4 bytes but 3 are left"),
    ],
)
def test_an_invalid_location_is_refused(damaged: bytes, says: str) -> None:
    manifest = Manifest.parse(entry(0) + damaged + footer(2, 2))
    for read in (manifest.entries, manifest.locations):
        with pytest.raises(CorruptManifest, match=says):
            read()


# Value semantics


def test_a_manifest_is_an_immutable_value() -> None:
    manifest = Manifest.parse(RAW)
    with pytest.raises(AttributeError, match="cannot assign"):
        manifest.epoch = 9
    manifest.entries()
    assert manifest == Manifest.parse(RAW)
    assert manifest != manifest.with_epoch(4)
    assert manifest != RAW
    assert len({manifest, Manifest.parse(RAW)}) == 1
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert copy.deepcopy(manifest).entries() == ENTRIES
    assert repr(manifest) == (
        "Manifest(entries=2, first_sequence=7, next_sequence=9, epoch=3, size=97)"
    )


# ---- replacing entries, and starting after an older queue


@pytest.mark.parametrize("sequence", [7, 8])
def test_one_entry_is_replaced_and_every_other_byte_kept(sequence: int) -> None:
    new = NewEntry("q/other", (Metadata(1, 2, b"x"),))
    manifest = Manifest.parse(RAW).replace(sequence, new)
    expected = list(ENTRIES)
    expected[sequence - 7] = BatchDescriptor(sequence, new.location, new.metadata)
    assert Manifest.parse(manifest.raw).entries() == tuple(expected)
    assert (manifest.next_sequence, manifest.epoch) == (9, 3)


def test_only_queued_sequences_are_replaced_and_no_queue_starts_below_zero() -> None:
    for sequence in (6, 9):
        with pytest.raises(InvalidInput, match="holds 7 to 8"):
            Manifest.parse(RAW).replace(sequence, NewEntry("x"))
    with pytest.raises(InvalidInput, match="must not be negative"):
        Manifest.starting_at(-1, 0)


def test_the_age_of_an_entry_comes_from_its_time_and_is_never_negative() -> None:
    timed = (NewEntry("p/a", (Metadata(0, 5_000),)), NewEntry("p/b", (Metadata(0, 9_000),)))
    manifest = Manifest.empty().append(timed)
    assert manifest.age_s(10_500) == 5.5
    assert manifest.age_s(10_500, 1) == 1.5
    assert manifest.age_s(8_000, 1) == 0.0
    assert manifest.age_s(8_000, 2) is None
    assert Manifest.empty().append([NewEntry("p/no time")]).age_s(8_000) is None
    assert Manifest.empty().age_s(8_000) is None


QUEUED = Manifest.empty().append([NewEntry(f"ingest/{n:026d}.batch") for n in range(3)]).raw


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "manifest is empty: 0 bytes"),
        (QUEUED[:-1], f"manifest is truncated: its {len(QUEUED) - 1} bytes begin with an entry"),
        (QUEUED[:20], "manifest is truncated: its 20 bytes"),
        (b"<html><body>404</body></html>", "manifest was overwritten: its 29 bytes begin"),
        (b"PAR1" * 100, "manifest was overwritten: its 400 bytes begin with b'PAR1"),
        (b"\n", r"overwritten: its 1 bytes begin with b'\\n' and are not a manifest. Restore"),
        (entry(0, b"a b") + b"cut", "manifest is truncated"),
        (entry(0, b"a\x7f") + b"cut", "manifest was overwritten"),
        (entry(2**48 - 1) + b"cut", "manifest is truncated"),
        (entry(2**48) + b"cut", "manifest was overwritten"),
        (entry(0, entry_len=2**30) + b"cut", "manifest is truncated"),
        (entry(0, entry_len=2**30 + 1) + b"cut", "manifest was overwritten"),
        (entry(0, entry_len=16) + b"cut", "manifest was overwritten"),
        (QUEUED[:-2] + b"\x02\x00", "manifest has version 2, .* a later release wrote it"),
        (footer(0, 0, 0, 65535), "manifest has version 65535"),
    ],
)
def test_the_error_distinguishes_empty_truncated_overwritten_and_newer_manifests(
    raw: bytes, says: str
) -> None:
    with pytest.raises(CorruptManifest, match=says):
        Manifest.parse(raw)


def manifest_at(first: int, count: int, epoch: int = 0) -> Manifest:
    manifest = Manifest.empty().append([NewEntry(f"p/{n}") for n in range(first + count)])
    return manifest.drop_through(first - 1).with_epoch(epoch)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (manifest_at(2, 3, 0), "epoch falls from 1 to 0"),
        (manifest_at(2, 2, 1), "next_sequence falls from 5 to 4"),
        (manifest_at(1, 4, 1), "first_sequence falls from 2 to 1"),
        (Manifest.empty(), "epoch falls from 1 to 0"),
    ],
)
def test_f4_f10_f15_a_manifest_that_goes_backwards_is_refused(
    after: Manifest, message: str
) -> None:
    with pytest.raises(CorruptManifest, match=message) as raised:
        check_transition(manifest_at(2, 3, 1), after)
    assert [hint.action for hint in raised.value.hints] == [Action.INSPECT]


# One entry


def test_one_entry_is_read_without_the_following_ones() -> None:
    pieces: list[BytesLike] = []
    encode_entry(8, NewEntry("é", ENTRIES[1].metadata), pieces)
    assert b"".join(pieces) == ENTRY_8
    raw = b"before" + ENTRY_8 + b"behind"
    assert decode_entry(raw, 6, 8, len(raw)) == (ENTRIES[1], 6 + len(ENTRY_8))
    with pytest.raises(CorruptManifest, match="entry 8 at byte 6 claims 50 bytes of the 49 left"):
        decode_entry(raw, 6, 8, len(raw) - 7)


@pytest.mark.parametrize("at", range(len(ENTRY_8)))
def test_f15_a_changed_byte_is_refused_or_changes_a_value(at: int) -> None:
    for change in (1, 0x80, 0xFF):
        raw = bytearray(ENTRY_8)
        raw[at] ^= change
        try:
            value, end = decode_entry(bytes(raw), 0, 8, len(raw))
        except CorruptManifest:
            continue
        assert value != ENTRIES[1]
        assert end == len(ENTRY_8)


def test_entries_before_damage_are_salvaged() -> None:
    raw = b"".join(entry(sequence, b"p/%d" % sequence) for sequence in (7, 8, 9))
    assert [each.location for each in salvage_entries(raw)] == ["p/7", "p/8", "p/9"]
    assert [each.sequence for each in salvage_entries(raw[:-1])] == [7, 8]
    assert salvage_entries(raw[1:]) == []
    assert salvage_entries(b"") == []
    assert [each.sequence for each in salvage_entries(entry(2**48 - 1))] == [2**48 - 1]
    assert salvage_entries(entry(2**48)) == []


def test_the_time_of_an_entry_is_that_of_its_first_record_or_else_of_its_name() -> None:
    location = "ingest/01JD5T4R3KXBMZ7QV9N2WG8Y00.batch"
    named = location_timestamp_ms(location)
    assert named is not None
    # A sink names the batches of a slow micro-batch ahead of time.
    assert BatchDescriptor(0, location, (Metadata(0, 7, b""), Metadata(5, 9, b""))).time_ms == 7
    assert BatchDescriptor(0, location).time_ms == named
    assert BatchDescriptor(0, "ingest/by-hand").time_ms is None


def test_bytes_after_the_last_metadata_item_are_refused() -> None:
    longer = b"\x35" + ENTRY_8[1:] + b"new"
    with pytest.raises(CorruptManifest, match="8 has 3 bytes after its 2 metadata items"):
        decode_entry(longer, 0, 8, len(longer))


# Queries of a queue


def test_a_part_is_a_separate_manifest_with_the_same_entries() -> None:
    whole = Manifest.parse(RAW)
    assert whole.part(7, 9).entries() == ENTRIES
    for sequence in (7, 8):
        part = whole.part(sequence, sequence + 1)
        assert Manifest.parse(part.raw) == part
        assert part.entries() == ENTRIES[sequence - 7 : sequence - 6]
        assert (part.first_sequence, part.next_sequence, part.epoch) == (sequence, sequence + 1, 0)


def test_the_first_entry_since_a_time_is_found_by_the_latest_record_time() -> None:
    entries = [
        NewEntry("p/a", (Metadata(0, 1_000), Metadata(1, 5_000))),
        NewEntry("p/b", (Metadata(0, 2_000),)),
        NewEntry("p/c", (Metadata(0, 9_000),)),
    ]
    manifest = Manifest.starting_at(40, 0).append(entries)
    found = [manifest.since(time_ms) for time_ms in (0, 5_000, 5_001, 9_000, 9_001)]
    assert found == [40, 40, 42, 42, 43]


def test_an_entry_without_a_time_is_as_late_as_the_next_entry_that_has_one() -> None:
    undated = NewEntry("p/no time")
    dated = [NewEntry("p/a", (Metadata(0, time_ms),)) for time_ms in (1_000, 5_000)]
    entries = [undated, dated[0], undated, undated, dated[1], undated]
    manifest = Manifest.starting_at(40, 0).append(entries)
    found = [manifest.since(time_ms) for time_ms in (0, 1_000, 1_001, 5_000, 5_001, 99_000)]
    assert found == [40, 40, 42, 42, 45, 45]
    assert Manifest.starting_at(7, 0).append([undated] * 2_500).since(99_000) == 7


def test_the_latest_record_of_an_entry_is_not_always_its_last() -> None:
    timed = BatchDescriptor(0, "p/a", (Metadata(0, 3), Metadata(1, 9), Metadata(2, 5)))
    assert timed.latest_ms == 9
    location = "p/01JD5T4R3KXBMZ7QV9N2WG8Y00.batch"
    assert BatchDescriptor(0, location).latest_ms == location_timestamp_ms(location)
    assert BatchDescriptor(0, "p/no time").latest_ms == 0


def test_the_first_sequence_that_a_reader_may_still_need() -> None:
    manifest = Manifest.parse(RAW)
    assert [manifest.available_from(needed) for needed in (0, 6, 7, 8, 99)] == [7, 7, 7, 8, 99]


def test_f16_a_check_reads_every_header_and_accepts_a_sound_manifest() -> None:
    Manifest.parse(RAW).check()
    for damaged in (entry(0) + entry(5) + entry(2), entry(0) + entry(1) + entry(2) + entry(3)):
        with pytest.raises(CorruptManifest):
            Manifest.parse(damaged + footer(3, 3)).check()


@pytest.mark.parametrize(
    "new",
    [
        NewEntry("p/a"),
        NewEntry("é"),
        NewEntry("p/a", (Metadata(0, 1, b"payload"), Metadata(1, 2))),
        NewEntry("p/a", (Metadata(0, 1, memoryview(b"payload!").cast("I")),)),  # type: ignore[arg-type]
    ],
)
def test_the_size_of_an_entry_is_known_before_it_is_appended(new: NewEntry) -> None:
    manifest = Manifest.parse(RAW)
    assert manifest.append([new]).size == manifest.size + entry_bytes(new)


def test_the_error_about_a_named_manifest_has_its_location_and_its_queue_in_the_commands() -> None:
    damaged = Manifest.parse(entry(0) + entry(5) + footer(2, 2))
    name = QueueName("s3://bucket", "ingest/manifest", (("manifest_path", "m"),))
    named = damaged.of(name)
    for read in (named.entries, named.append([NewEntry("p/x")]).check, named.locations):
        with pytest.raises(CorruptManifest) as caught:
            read()
        text = str(caught.value)
        assert text.startswith("'ingest/manifest' in s3://bucket: manifest entry at byte ")
        assert "'opendata-buffer fsck s3://bucket --manifest-path m'" in text
        assert "'opendata-buffer fsck s3://bucket --manifest-path m --repair'" in text
    with pytest.raises(CorruptManifest, match=r"^manifest entry at byte .* fsck STORE'"):
        damaged.entries()
