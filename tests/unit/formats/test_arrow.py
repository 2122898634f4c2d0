"""Encoding data batches from Arrow, and decoding them to Arrow."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from mmap import mmap
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opendata_buffer.errors import CorruptBatch, InvalidInput, TransientStorageError
from opendata_buffer.formats import arrow
from opendata_buffer.formats.arrow import (
    HEAD_SIZE,
    TAIL_SIZE,
    ReadBuffer,
    decode_arrow,
    decode_records,
    encode_arrow_block,
    head,
    listed,
    open_arrow,
    tail,
)
from opendata_buffer.formats.batch import Compression, encode_batch, join_records, seal_block

RECORDS = [b"hello", b"", b"w\xc3\xb6rld", b"x" * 300]
TYPES = [
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.string(),
    pa.large_string(),
    pa.string_view(),
]


def block_of(array: Any) -> bytes:
    block, count = encode_arrow_block(array)
    assert count == len(array)
    return bytes(block)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_arrow_layout_of_text_and_bytes_is_encoded(kind: pa.DataType) -> None:
    assert block_of(pa.array(RECORDS, pa.binary()).cast(kind)) == join_records(RECORDS)
    assert block_of(pa.array([b"ab", b"cd"], pa.binary(2))) == join_records([b"ab", b"cd"])


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_chunked_and_empty_arrays_are_encoded(kind: pa.DataType) -> None:
    pieces = [RECORDS[:1], [], RECORDS[1:3], RECORDS[3:]]
    chunks = [pa.array(piece, pa.binary()).cast(kind) for piece in pieces]
    whole = pa.chunked_array(chunks, kind)
    assert block_of(whole) == join_records(RECORDS)
    assert block_of(whole.slice(1, 2)) == join_records(RECORDS[1:3])
    assert block_of(pa.chunked_array([], kind)) == b""
    assert block_of(pa.array([], kind)) == b""
    assert seal_block(encode_arrow_block(pa.array([], kind))[0], 0, Compression.NONE) == (
        encode_batch([])
    )


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("row", [0, 2, 4])
def test_the_error_about_a_null_has_its_row(kind: pa.DataType, row: int) -> None:
    values: list[bytes | None] = [b"a", b"b", b"c", b"d", b"e"]
    values[row] = None
    array = pa.array(values, pa.binary()).cast(kind)
    with pytest.raises(InvalidInput, match=f"row {row} is null \\(1 of 5 rows"):
        encode_arrow_block(array)
    with pytest.raises(InvalidInput, match=f"row {row} is null"):
        encode_arrow_block(pa.chunked_array([array.slice(0, 2), array.slice(2)]))
    # A null outside the slice is ignored.
    assert len(block_of(array.slice(row + 1))) == 5 * (4 - row)


@pytest.mark.parametrize(
    "wrong",
    [
        pa.array([1, 2]),
        pa.array([["a"]]),
        pa.array([None, None]),
        pa.array(["a"]).dictionary_encode(),
        pa.chunked_array([[1.5]]),
    ],
    ids=lambda array: str(array.type),
)
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"Arrow array of .*: pass binary or string"):
        encode_arrow_block(wrong)
    with pytest.raises(InvalidInput, match="records is list"):
        encode_arrow_block([b"a"])


def test_any_ordered_collection_of_records_is_accepted() -> None:
    array = pa.array(RECORDS)
    for kept in (RECORDS, tuple(RECORDS), array, pa.chunked_array([array])):
        assert listed(kept) is kept
    for taken in (iter(RECORDS), deque(RECORDS)):
        assert listed(taken) == RECORDS


@pytest.mark.parametrize("one", [b"record", bytearray(b"record"), memoryview(b"record")])
def test_a_single_record_is_accepted_as_a_list_of_one(one: object) -> None:
    assert listed(one) == [one]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({b"a": 1}, r"of type dict: use a list of bytes; encode a dict"),
        ({b"a"}, "of type set: use a list of bytes, or an Arrow array"),
        (list, "the class list"),
        (7, "7 "),
        ("text", r"'text' \(str\): use bytes; encode text"),
    ],
)
def test_unordered_collections_and_other_types_are_refused(wrong: object, what: str) -> None:
    with pytest.raises(InvalidInput, match=f"records is {what}"):
        listed(wrong)


def test_f34_a_block_above_32_bit_offsets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "MAX_BLOCK_BYTES", 100)
    ten = pa.array([b"123456"] * 10)
    assert len(block_of(ten)) == 100
    for array in (pa.array([b"123456"] * 11), pa.chunked_array([ten, pa.array([b""])])):
        with pytest.raises(InvalidInput, match="more than 100 bytes: pass it in slices"):
            encode_arrow_block(array)


def test_slices_of_an_array_above_32_bits_are_encoded_but_not_the_whole_array() -> None:
    size = 3 << 30  # of address space, of which only the last page is touched
    data = mmap(-1, size)
    data[-3:] = b"end"
    offsets = pa.py_buffer(struct.pack("<4q", 0, size - 3, size - 1, size))
    array = pa.Array.from_buffers(pa.large_binary(), 3, [None, offsets, pa.py_buffer(data)])
    assert block_of(array.slice(1)) == join_records([b"en", b"d"])
    with pytest.raises(InvalidInput, match="pass it in slices"):  # before the array is joined
        encode_arrow_block(array)


def test_a_new_process_that_reads_a_few_records_does_not_load_pandas() -> None:
    script = """
import sys
from opendata_buffer.formats.arrow import decode_arrow
assert decode_arrow(bytes.fromhex(sys.argv[1])).to_pylist() == [b"a", b"", b"bc"]
print("pandas" in sys.modules)
"""
    batch = encode_batch([b"a", b"", b"bc"]).hex()
    done = subprocess.run([sys.executable, "-c", script, batch], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("repeat", [0, 1, 63, 64, 65, 3000])
def test_decoding_returns_binary_arrays_without_nulls(
    repeat: int, compression: Compression
) -> None:
    data = encode_batch(RECORDS * repeat, compression)
    array = decode_arrow(data, 1 << 40)
    assert array == decode_arrow(memoryview(data)) == decode_arrow(bytearray(data))
    assert array.type == pa.binary()
    assert array.null_count == 0
    assert array.to_pylist() == RECORDS * repeat
    array.validate(full=True)


def test_the_array_outlives_the_batch() -> None:
    data = bytearray(encode_batch(RECORDS * 500))
    array = decode_arrow(data)
    data[:] = bytes(len(data))
    assert array.to_pylist() == RECORDS * 500


def test_the_path_for_big_endian_machines_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    many = RECORDS * 500
    assert block_of(pa.array(many, pa.binary())) == join_records(many)
    assert block_of(pa.array(["a"] * 2000)) == join_records([b"a"] * 2000)
    for compression in Compression:
        assert decode_arrow(encode_batch(many, compression)).to_pylist() == many


@pytest.mark.parametrize("many", [300, 70_000])
def test_f20_the_lengths_must_add_up_to_the_block(many: int) -> None:
    block = join_records([b"abc"] * many)
    good = block + b"\x00" + struct.pack("<IH", many, 1)
    assert len(decode_arrow(good)) == many
    for damaged, count in (
        (block, many - 1),
        (block + b"\0", many),
        (block + b"\0\0\0\0", many),
        (block[:-1], many),
        (block[:-7], many),
        (block[:-7] + b"\xff\xff\xff\x7f123", many),
        (block[:-7] + b"\xff\xff\xff\xff123", many),
        (block[:-7] + b"\x00\x00\x00\x80123", many),
        (b"\xfc\xff\xff\xff" + block[4:], many),
    ):
        with pytest.raises(CorruptBatch, match=r"does not hold|belong to no record"):
            decode_arrow(damaged + b"\x00" + struct.pack("<IH", count, 1))


@pytest.fixture
def loaded() -> ModuleType:
    """Load the module as a new process does, which builds head and tail."""
    spec = importlib.util.spec_from_file_location(arrow.__name__, arrow.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("records", [[b""], [b"one", b"", b"three"], [b"x" * 1000] * 70_000])
def test_a_block_between_head_and_tail_is_a_parquet_file(
    records: list[bytes], loaded: ModuleType
) -> None:
    block = b"".join(struct.pack("<I", len(record)) + record for record in records)
    size, count = len(block), len(records)
    file = loaded.head(size, count) + block + loaded.tail(size, count)
    assert file == head(size, count) + block + tail(size, count)
    assert (loaded.HEAD_SIZE, loaded.TAIL_SIZE) == (HEAD_SIZE, TAIL_SIZE)
    reader = pq.ParquetFile(pa.BufferReader(file))
    column = reader.metadata.row_group(0).column(0)
    assert reader.schema_arrow == pa.schema([pa.field("v", pa.binary(), nullable=False)])
    assert (column.physical_type, column.compression) == ("BYTE_ARRAY", "UNCOMPRESSED")
    assert column.encodings == ("PLAIN",)
    assert reader.metadata.num_rows == reader.metadata.row_group(0).num_rows == len(records)
    assert reader.read().column(0).to_pylist() == records


@pytest.mark.parametrize(("size", "count"), [(2**27, 2**26), (2**31 - 1024, 2**29 - 256)])
def test_the_sizes_of_the_largest_blocks_are_encoded_correctly(
    size: int, count: int, loaded: ModuleType
) -> None:
    file = loaded.head(size, count) + loaded.tail(size, count)
    metadata = pq.read_metadata(pa.BufferReader(file))
    column = metadata.row_group(0).column(0)
    assert (metadata.num_rows, column.num_values) == (count, count)
    header_bytes = HEAD_SIZE - column.data_page_offset
    assert column.total_compressed_size == column.total_uncompressed_size == size + header_bytes


@pytest.mark.parametrize("count", [0, 1, 127, 128, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("size", [0, 63, 64, 2**31 - 1])
def test_head_and_tail_fit_into_their_reserved_space(size: int, count: int) -> None:
    assert len(head(size, count)) == HEAD_SIZE
    assert len(tail(size, count)) == TAIL_SIZE


# Buffers for reading a batch, and batches that are read in parts during decoding.


class Stored:
    """An object in a store that records which parts of it were read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []

    def read(self, allocate: Callable[[int], memoryview], start: int = 0) -> None:
        memory = allocate(len(self.data))
        memory[:] = self.data[start : start + len(memory)]
        self.reads.append((start, len(memory)))


VARIED = [b"%04d" % number * (number % 7) for number in range(3_000)]


def assert_about(arrays: list[pa.Array], wanted_bytes: int) -> None:
    sizes = [sum(map(len, array.to_pylist())) + 4 * len(array) for array in arrays]
    assert len(sizes) > 2
    assert max(sizes) <= 1.25 * wanted_bytes
    assert min(sizes[:-1]) >= 0.75 * wanted_bytes


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("array_bytes", [1_000, 7_000, 10_000, 1 << 30])
def test_a_batch_in_arrow_memory_is_decoded_in_arrays_of_the_requested_size(
    array_bytes: int, compression: Compression
) -> None:
    data = encode_batch(VARIED, compression)
    stored = Stored(data)
    buffer = ReadBuffer(stored.read)
    assert (buffer.in_parts, len(buffer), bytes(buffer.data)) == (False, len(data), data)
    assert buffer.whole() is buffer
    assert stored.reads == [(0, len(data))]
    arrays = list(open_arrow(buffer).pieces(array_bytes))
    assert pa.concat_arrays(arrays).to_pylist() == VARIED
    if array_bytes < 1 << 30:
        assert_about(arrays, array_bytes)
    else:
        assert len(arrays) == 1
    assert bytes(buffer.data) == data, "the bytes that were read are unchanged"
    assert decode_arrow(buffer).to_pylist() == decode_records(buffer) == VARIED


def test_a_large_batch_is_read_during_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_batch(VARIED)
    monkeypatch.setattr(arrow, "WHOLE_BYTES", len(data) - 1)
    stored = Stored(data)
    buffer = ReadBuffer(stored.read)
    assert (buffer.in_parts, len(buffer), len(buffer.data)) == (True, len(data), 0)
    block = open_arrow(buffer)
    assert stored.reads[1:] == [(len(data) - 7, 7)], "only the footer"
    arrays = list(block.pieces(5_000))
    assert pa.concat_arrays(arrays).to_pylist() == VARIED
    assert_about(arrays, 5_000)
    assert all(size <= 5_000 * 9 // 8 for _, size in stored.reads[1:])
    assert bytes(buffer.whole().data) == data
    assert decode_records(buffer) == VARIED
    # A batch of exactly this size is still read at once.
    monkeypatch.setattr(arrow, "WHOLE_BYTES", len(data))
    assert not ReadBuffer(stored.read).in_parts


@pytest.mark.parametrize(
    ("records", "compression"),
    [(VARIED, Compression.ZSTD), (VARIED[:5], Compression.NONE)],
    ids=["compressed", "few records"],
)
def test_a_large_batch_that_cannot_be_decoded_in_parts_is_read_at_once(
    records: list[bytes], compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "WHOLE_BYTES", 7)
    stored = Stored(encode_batch(records, compression))
    assert decode_arrow(ReadBuffer(stored.read)).to_pylist() == records
    assert open_arrow(stored.data).size == len(join_records(records))
    assert stored.reads[-1] == (0, len(stored.data))


def test_records_of_very_different_sizes_are_decoded_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = [b"a"] * 500 + [b"x" * 9_000, b"", b"y" * 20_000] + [b"b"] * 500
    data = encode_batch(records)
    assert pa.concat_arrays(list(open_arrow(data).pieces(500))).to_pylist() == records
    monkeypatch.setattr(arrow, "WHOLE_BYTES", 100)
    buffer = ReadBuffer(Stored(data).read)
    assert pa.concat_arrays(list(open_arrow(buffer).pieces(500))).to_pylist() == records


@pytest.mark.parametrize("at", [0, 2_000])
def test_damage_in_a_part_is_found(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block = bytearray(join_records([b"abc"] * 1_000))
    block[7 * (at // 7) : 7 * (at // 7) + 4] = b"\xff\xff\xff\x7f"
    data = bytes(block) + b"\x00" + struct.pack("<IH", 1_000, 1)
    monkeypatch.setattr(arrow, "WHOLE_BYTES", 100)
    for source in (data, ReadBuffer(Stored(data).read)):
        with pytest.raises(CorruptBatch, match="block of 7000 bytes does not hold 1000 length-pre"):
            list(open_arrow(source).pieces(700))


def test_an_error_of_the_store_is_not_reported_as_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(encode_batch(VARIED))
    monkeypatch.setattr(arrow, "WHOLE_BYTES", 100)
    buffer = ReadBuffer(stored.read)
    arrays = open_arrow(buffer).pieces(5_000)
    next(arrays)

    def fail(allocate: Callable[[int], memoryview], start: int = 0) -> None:
        raise TransientStorageError("503")

    buffer._read = fail
    with pytest.raises(TransientStorageError, match="503"):
        list(arrays)


def test_records_of_a_block_above_the_limit_of_arrow_are_decoded_without_arrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encode_batch(VARIED)
    monkeypatch.setattr(arrow, "MAX_BLOCK_BYTES", 1_000)
    assert decode_records(data) == VARIED
    with pytest.raises(CorruptBatch, match="more than the limit of 1000"):
        decode_arrow(data)


def test_a_new_buffer_is_empty() -> None:
    assert (len(ReadBuffer()), len(ReadBuffer().data)) == (0, 0)


@pytest.mark.parametrize("many", [5, 300, 1_500])
def test_f21_a_block_above_the_limit_is_refused_by_every_way_to_read(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "WHOLE_BYTES", 20)
    for compression in Compression:
        data = encode_batch([b"abc"] * many, compression)
        for source in (data, ReadBuffer(Stored(data).read)):
            assert len(decode_arrow(source, 7 * many)) == many
            with pytest.raises(CorruptBatch, match=f"more than the limit of {7 * many - 1}"):
                decode_arrow(source, 7 * many - 1)
            with pytest.raises(CorruptBatch, match=f"more than the limit of {7 * many - 1}"):
                decode_records(source, 7 * many - 1)
