"""Properties for all values: round trips, two paths that agree, and robust decoders."""

from __future__ import annotations

import struct
from unittest import mock

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from opendata_buffer.errors import CorruptBatch, CorruptManifest, InvalidInput
from opendata_buffer.formats import arrow
from opendata_buffer.formats.arrow import ReadBuffer, decode_arrow, encode_arrow_block, open_arrow
from opendata_buffer.formats.batch import (
    FOOTER_SIZE,
    Compression,
    batch_key,
    decode_batch,
    encode_batch,
    is_confined,
    join_records,
    open_batch,
    parse_location,
    seal_block,
    split_records,
)
from opendata_buffer.formats.manifest import (
    BatchDescriptor,
    Manifest,
    Metadata,
    NewEntry,
    check_transition,
)
from opendata_buffer.stores.base import Allocate

records = st.lists(st.binary(max_size=40) | st.just(b"x" * 5000), max_size=12)

# Long enough for the vectorised path. Repeated, so that drawing stays cheap.
many_records = st.builds(
    lambda some, times: (some * times)[:4000],
    st.lists(st.binary(max_size=40), min_size=1, max_size=12),
    st.integers(20, 400),
)

u32 = st.integers(0, 2**32 - 1) | st.sampled_from([0, 2**32 - 1])
i64 = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), -1, 0, 2**63 - 1])

locations = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30
) | st.sampled_from(["p/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", "x" * 65_535, "é" * 32_767])

new_entries = st.builds(
    NewEntry,
    locations,
    st.lists(st.builds(Metadata, u32, i64, st.binary(max_size=30)), max_size=4).map(tuple),
)

compressions = st.sampled_from(Compression)
CAP = 1 << 20


@given(records | many_records, compressions)
@example([], Compression.ZSTD)
@example([b""] * 3000, Compression.NONE)
def test_list_and_arrow_paths_agree_both_ways(
    values: list[bytes], compression: Compression
) -> None:
    block = join_records(values)
    by_arrow, count = encode_arrow_block(pa.array(values, pa.binary()))
    assert bytes(by_arrow) == block
    assert count == len(values)
    data = encode_batch(values, compression)
    assert open_batch(data)[1] == block
    assert seal_block(by_arrow, count, compression) == data
    assert decode_batch(data) == decode_arrow(data).to_pylist() == values
    assert split_records(block, count) == values


def mutate(raw: bytes, data: st.DataObject) -> bytes:
    """Damage bytes: patch, remove, repeat, or insert some of them."""
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        what = data.draw(st.sampled_from(["patch", "number", "cut", "repeat", "insert"]))
        size = data.draw(st.integers(1, 16))
        if what == "patch":
            damaged[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
        elif what == "number":
            value = data.draw(st.sampled_from([0, 1, 3, 4, 2**31 - 1, 2**31, 2**32 - 1]))
            damaged[at : at + 4] = struct.pack("<I", value)
        elif what == "cut":
            del damaged[at : at + size]
        elif what == "repeat":
            damaged[at:at] = damaged[at : at + size]
        else:
            damaged[at:at] = data.draw(st.binary(min_size=size, max_size=size))
    return bytes(damaged)


def in_pieces(data: bytes, max_bytes: int) -> pa.Array:
    """Decode from memory that holds all bytes, in arrays of some 200 bytes."""
    buffer = ReadBuffer()
    buffer.allocate(len(data))[:] = data
    return pa.concat_arrays(list(open_arrow(buffer, max_bytes).pieces(200)))


def read_in_parts(data: bytes, max_bytes: int) -> pa.Array:
    """Decode in the same way, but read the bytes in parts."""

    def read(allocate: Allocate, start: int = 0) -> None:
        memory = allocate(len(data))
        memory[:] = data[start : start + len(memory)]

    with mock.patch.object(arrow, "WHOLE_BYTES", FOOTER_SIZE):
        return pa.concat_arrays(list(open_arrow(ReadBuffer(read), max_bytes).pieces(200)))


@given(records | many_records, compressions, st.data())
def test_f15_to_f22_damaged_batches_decode_alike_or_are_refused(
    values: list[bytes], compression: Compression, data: st.DataObject
) -> None:
    damaged = mutate(encode_batch(values, compression), data)
    try:
        found: list[bytes] | None = decode_batch(damaged, CAP)
    except CorruptBatch:
        found = None
    for decode in (decode_arrow, in_pieces, read_in_parts):
        try:
            by_arrow: list[bytes] | None = decode(damaged, CAP).to_pylist()
        except CorruptBatch:
            by_arrow = None
        assert by_arrow == found
    if found is not None and open_batch(damaged)[0].compression == Compression.NONE:
        # Decoded bytes are a v1 batch, so encoding it again gives the same bytes.
        assert encode_batch(found) == damaged


@given(st.lists(st.lists(new_entries, max_size=3), max_size=4), st.integers(0, 2**63))
def test_manifests_round_trip_through_groups(groups: list[list[NewEntry]], first: int) -> None:
    manifest = Manifest.parse(struct.pack("<IQQH", 0, first, 0, 1))
    for group in groups:
        after = manifest.append(group)
        check_transition(manifest, after)
        manifest = after
    flat = [entry for group in groups for entry in group]
    wanted = tuple(
        BatchDescriptor(first + index, entry.location, entry.metadata)
        for index, entry in enumerate(flat)
    )
    again = Manifest.parse(manifest.raw)
    again.entries()
    assert again.entries() == manifest.entries() == wanted
    for entry in reversed(wanted):
        oldest = next(other.sequence for other in wanted if other.location == entry.location)
        assert again.find(entry.location) == oldest


@given(st.lists(new_entries, max_size=6), st.data())
def test_dropping_and_reading_entries_equal_slicing(
    entries: list[NewEntry], data: st.DataObject
) -> None:
    manifest = Manifest.empty().append(entries)
    whole = manifest.entries()
    begin, limit = data.draw(st.tuples(*[st.integers(0, len(entries) + 2)] * 2))
    assert Manifest.parse(manifest.raw).entries(begin, limit) == whole[begin : begin + limit]
    start = data.draw(st.integers(0, len(entries)))
    dropped = manifest.drop_through(start - 1)
    check_transition(manifest, dropped)
    assert dropped.entries() == Manifest.parse(dropped.raw).entries() == whole[start:]
    # Appending before or after dropping gives the same result.
    more = [NewEntry("p/more")]
    assert manifest.append(more).drop_through(start - 1) == dropped.append(more)


@given(st.lists(new_entries, max_size=5), st.data())
def test_f15_to_f19_and_f28_damaged_manifests_are_refused_or_whole(
    entries: list[NewEntry], data: st.DataObject
) -> None:
    damaged = mutate(Manifest.empty().append(entries).raw, data)
    try:
        manifest = Manifest.parse(damaged)
    except CorruptManifest:
        return
    # Appending does not read the entries, so it keeps them as they are.
    try:
        assert manifest.append([NewEntry("p")]).raw.startswith(damaged[:-22])
    except InvalidInput:
        assert manifest.next_sequence == 2**64 - 1
    try:
        manifest.entries()
    except CorruptManifest:
        return
    found = manifest.entries()
    assert [entry.sequence for entry in found] == list(
        range(manifest.first_sequence, manifest.next_sequence)
    )
    # Accepted bytes are a v1 manifest, so building it again gives the same bytes.
    if all(entry.location for entry in found):
        empty = Manifest.parse(struct.pack("<IQQH", 0, manifest.first_sequence, manifest.epoch, 1))
        again = empty.append([NewEntry(entry.location, entry.metadata) for entry in found])
        assert again.raw == damaged


@given(locations, st.text(max_size=20))
def test_f23_f24_only_text_below_the_prefix_counts_as_confined(location: str, prefix: str) -> None:
    ulid = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
    if is_confined(location, prefix):
        assert location.startswith(prefix + "/")
        assert not {".", "..", ""} & set(location.split("/"))
    legal = not ({".", "..", ""} & set(prefix.split("/")))
    legal = legal and not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in prefix)
    key = batch_key(prefix, ulid)
    assert is_confined(key, prefix) == legal
    assert parse_location(key, prefix) is not None
