"""The data batch, v1, to and from Arrow, with no Python object per record.

Encoding joins the lengths, viewed as 4-byte binaries, to the values. Decoding lets Arrow's
Parquet reader split the block (:mod:`opendata_buffer.formats.parquet_page`). Both give exactly
what :mod:`opendata_buffer.formats.batch` gives, and raise the same errors.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from opendata_buffer.errors import CorruptBatch, InvalidInput
from opendata_buffer.formats import parquet_page, zstd
from opendata_buffer.formats.batch import (
    DEFAULT_MAX_BYTES,
    FOOTER_SIZE,
    BatchFooter,
    BytesLike,
    Compression,
    check_block,
    join_records,
    parse_footer,
    split_records,
)

__all__ = ["MAX_BLOCK_BYTES", "decode_arrow", "encode_arrow_block", "encode_bytes_list"]

MAX_BLOCK_BYTES = 2**31 - 1024
"""Largest record block either way: Arrow's binary offsets and Parquet's page sizes are i32."""

# Below this many records a Python loop is faster than opening a Parquet file.
_FEW_RECORDS = 256

_HEAD, _TAIL = parquet_page.HEAD_SIZE, parquet_page.TAIL_SIZE


def encode_arrow_block(array: pa.Array | pa.ChunkedArray) -> tuple[bytes | memoryview, int]:
    """Length-prefix the values of an Arrow array, back to back.

    Args:
        array: Binary or string of any Arrow layout (plain, large, view, fixed size); slices and
            chunks are fine.

    Returns:
        The record block, and the number of records.

    Raises:
        InvalidInput: Another type, a null (names its row), or a block beyond 2 GiB.
    """
    if not isinstance(array, pa.Array | pa.ChunkedArray):
        raise InvalidInput(
            f"entries is {type(array).__name__}: pass an Arrow array of binary or string"
        )
    _check_values(array)
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    blocks: list[bytes | memoryview] = []
    total = 0
    for chunk in chunks:
        if not len(chunk):
            continue
        # A slice of an array beyond 2 GiB has offsets beyond 32 bits, so they are not narrowed.
        small = pa.types.is_binary(chunk.type) or pa.types.is_string(chunk.type)
        values = chunk.cast(pa.binary() if small else pa.large_binary())
        total += _value_bytes(values) + 4 * len(values)
        if total > MAX_BLOCK_BYTES:
            raise InvalidInput(
                f"the array makes a record block of more than {MAX_BLOCK_BYTES} bytes: pass it "
                "in slices"
            )
        blocks.append(_join_lengths(values))
    return blocks[0] if len(blocks) == 1 else b"".join(blocks), len(array)


def encode_bytes_list(records: list[BytesLike]) -> bytes:
    """The record block of a list of ``bytes`` whose block stays below :data:`MAX_BLOCK_BYTES`."""
    return bytes(encode_arrow_block(pa.array(records, pa.binary()))[0])


def _check_values(array: pa.Array | pa.ChunkedArray) -> None:
    kind = array.type
    if not (_is_text_or_bytes(kind)):
        raise InvalidInput(
            f"entries is an Arrow array of {kind}: pass binary or string, e.g. "
            "pyarrow.compute.cast(array, 'string') or JSON text"
        )
    if array.null_count:
        row = pc.index(pc.is_null(array), pa.scalar(True)).as_py()
        raise InvalidInput(
            f"row {row} is null ({array.null_count} of {len(array)} rows are): a record is never "
            "null. Drop these rows or fill them, e.g. with b''"
        )


def _is_text_or_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary_view(kind)
        or types.is_string_view(kind)
    )


def _value_bytes(values: pa.Array) -> int:
    """Bytes of all values, from the first and last offset."""
    offsets = memoryview(values.buffers()[1]).cast(
        "q" if pa.types.is_large_binary(values.type) else "i"
    )
    return int(offsets[values.offset + len(values)] - offsets[values.offset])


def _join_lengths(values: pa.Array) -> bytes | memoryview:
    if sys.byteorder != "little":
        return join_records(values.to_pylist())
    lengths = pc.binary_length(values).cast(pa.int32())
    prefixes = pa.Array.from_buffers(
        pa.binary(4), len(lengths), [None, lengths.buffers()[1]], offset=lengths.offset
    ).cast(values.type)
    joined = pc.binary_join_element_wise(prefixes, values, pa.scalar(b"", values.type))
    return memoryview(joined.buffers()[2])[: _value_bytes(joined)]


def decode_arrow(data: BytesLike, max_bytes: int = DEFAULT_MAX_BYTES) -> pa.BinaryArray:
    """The records of a batch object as one Arrow array of type ``binary``, without nulls.

    Args:
        data: The whole object.
        max_bytes: Cap on the decompressed record block.

    Raises:
        CorruptBatch: The object breaks the format or exceeds the cap. Nothing else.
    """
    max_bytes = min(max_bytes, MAX_BLOCK_BYTES)
    footer = parse_footer(data)
    stored = memoryview(data)[: len(data) - FOOTER_SIZE]
    few = footer.record_count < _FEW_RECORDS or sys.byteorder != "little"
    if footer.compression == Compression.ZSTD:
        if few:
            return _decode_few(zstd.decompress(stored, max_bytes), footer, max_bytes)
        return _decode_zstd(stored, footer, max_bytes)
    if few:
        return _decode_few(stored, footer, max_bytes)
    size = len(stored)
    check_block(size, footer, max_bytes)
    # From Arrow's pool and not b"".join: fresh memory of this size costs more than the copy.
    file = pa.allocate_buffer(_HEAD + size + _TAIL)
    view = memoryview(file).cast("B")
    view[_HEAD : _HEAD + size] = stored
    return _read_page(_wrap(file, view, size, footer), size, footer)


def _wrap(file: pa.Buffer, view: memoryview, size: int, footer: BatchFooter) -> pa.Buffer:
    """Make a Parquet file of a block that stands behind room for the head."""
    view[:_HEAD] = parquet_page.head(size, footer.record_count)
    tail = parquet_page.tail(size, footer.record_count)
    end = _HEAD + size + len(tail)
    view[_HEAD + size : end] = tail
    return file.slice(0, end)


def _decode_few(block: bytes | memoryview, footer: BatchFooter, max_bytes: int) -> pa.BinaryArray:
    check_block(len(block), footer, max_bytes)
    return pa.array(split_records(block, footer.record_count), pa.binary())


def _decode_zstd(stored: memoryview, footer: BatchFooter, max_bytes: int) -> pa.BinaryArray:
    """Decompress right between head and tail, so the block is written once."""
    frames = zstd.plan_frames(stored, max_bytes)
    most = min(sum(frame.most for frame in frames), max_bytes)
    file = pa.allocate_buffer(_HEAD + most + _TAIL)
    view = memoryview(file).cast("B")
    size = zstd.decompress_into(frames, view[_HEAD : _HEAD + most + 1], max_bytes)
    check_block(size, footer, max_bytes)
    return _read_page(_wrap(file, view, size, footer), size, footer)


def _read_page(file: pa.Buffer, block_size: int, footer: BatchFooter) -> pa.BinaryArray:
    count = footer.record_count
    try:
        reader: Any = pq.ParquetFile(pa.BufferReader(file), pre_buffer=False)
        column = reader.read(use_threads=False).column(0)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise CorruptBatch(
            f"block of {block_size} bytes does not hold {count} length-prefixed records: {error}"
        ) from error
    # F20: every record was read and every byte belongs to one, or the footer is wrong.
    size = sum(_value_bytes(chunk) for chunk in column.chunks)
    if column.num_chunks != 1 or size + 4 * count != block_size:
        raise CorruptBatch(
            f"block of {block_size} bytes is {len(column)} records with {size} bytes, the footer "
            f"counts {count}: {block_size - size - 4 * len(column)} bytes belong to no record"
        )
    return column.chunk(0)
