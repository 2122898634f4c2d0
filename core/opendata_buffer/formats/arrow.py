"""The v1 batch to and from Arrow, without a Python object per record.

Encoding joins the lengths, viewed as 4-byte binaries, to the values. Both directions give exactly
the same results and errors as :mod:`opendata_buffer.formats.batch`.

Arrow's Parquet reader splits the block, because a v1 record block is, byte for byte, a Parquet
PLAIN page of BYTE_ARRAY values: length-prefixed bytes, back to back. The reader only needs a page
header before the block and a footer after it, in Thrift's compact protocol. The file has one
required column ``v`` in one row group with one page (parquet.thrift): ``PAR1 | page header | block
| file metadata | u32 size of the metadata | PAR1``. Any part of a block that starts with a record
makes such a file, too.

The functions that need ``pyarrow.compute`` and ``pyarrow.parquet`` import them, because the imports
take 40 ms, and a Spark process that plans a query neither encodes nor decodes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa

from opendata_buffer.arguments import how_to_get_bytes, wrong_type
from opendata_buffer.errors import CorruptBatch, InvalidInput
from opendata_buffer.formats import MIB, BytesLike, keep_freed_memory, zstd
from opendata_buffer.formats.batch import (
    DEFAULT_MAX_BYTES,
    FOOTER_SIZE,
    BatchFooter,
    Compression,
    check_block,
    decode_batch,
    join_records,
    open_batch,
    parse_footer,
    split_records,
)

HEAD_SIZE = 64
"""Bytes that :func:`head` makes; leave this much room before a block."""
_MAGIC = b"PAR1"
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_STOP = b"\0"
_BYTE_ARRAY = 6
_PLAIN, _RLE = 0, 3


def _number(value: int) -> bytes:
    """Return a zigzag varint of 0 to 2**32 in exactly five bytes, so that no other byte moves."""
    zigzag = value << 1
    low = (zigzag >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21))
    return bytes((*low, zigzag >> 28))


def _int(step: int, value: bytes | int, kind: int = _I32) -> bytes:
    """Return an integer field, ``step`` after the previous field; bytes stand for a value."""
    return _field(step, kind, value if isinstance(value, bytes) else _number(value))


def _field(step: int, kind: int, body: bytes) -> bytes:
    return bytes((step << 4 | kind,)) + body


def _text(step: int, value: bytes) -> bytes:
    return _field(step, _BINARY, bytes((len(value),)) + value)


def _list(kind: int, *items: bytes) -> bytes:
    return bytes((len(items) << 4 | kind,)) + b"".join(items)


# Templates, with five bytes in place of each number. Building them for each batch took longer.
_SIZE, _COUNT, _CHUNK = b"<size", b"<many", b"<both"


def _page_header() -> bytes:
    # DataPageHeader: num_values, encoding, definition and repetition level encodings
    page = _int(1, _COUNT) + _int(1, _PLAIN) + _int(1, _RLE) + _int(1, _RLE) + _STOP
    # PageHeader: type DATA_PAGE, uncompressed and compressed size, field 5 is the DataPageHeader
    return _int(1, 0) + _int(1, _SIZE) + _int(1, _SIZE) + _field(2, _STRUCT, page) + _STOP


_PAGE_HEADER = _page_header()


def _file_metadata() -> bytes:
    # SchemaElement: the root with one child, then the column: type, REQUIRED, name
    root = _text(4, b"r") + _int(1, 1) + _STOP
    column = _int(1, _BYTE_ARRAY) + _int(2, 0) + _text(1, b"v") + _STOP
    # ColumnMetaData: type, encodings, path, codec UNCOMPRESSED, values, sizes, page offset
    chunk = (
        _int(1, _BYTE_ARRAY)
        + _field(1, _LIST, _list(_I32, _number(_PLAIN)))
        + _field(1, _LIST, _list(_BINARY, b"\x01v"))
        + _int(1, 0)
        + _int(1, _COUNT, _I64)
        + _int(1, _CHUNK, _I64)
        + _int(1, _CHUNK, _I64)
        + _int(2, HEAD_SIZE - len(_PAGE_HEADER), _I64)
        + _STOP
    )
    # RowGroup: one ColumnChunk (file_offset 0, metadata), total size, rows
    columns = _list(_STRUCT, _int(2, 0, _I64) + _field(1, _STRUCT, chunk) + _STOP)
    group = _field(1, _LIST, columns) + _int(1, _CHUNK, _I64) + _int(1, _COUNT, _I64) + _STOP
    # FileMetaData: version, schema, rows, row groups
    return (
        _int(1, 1)
        + _field(1, _LIST, _list(_STRUCT, root, column))
        + _int(1, _COUNT, _I64)
        + _field(1, _LIST, _list(_STRUCT, group))
        + _STOP
    )


_HEAD = _MAGIC + bytes(HEAD_SIZE - len(_MAGIC) - len(_PAGE_HEADER)) + _PAGE_HEADER
_METADATA = _file_metadata()
_TAIL = _METADATA + len(_METADATA).to_bytes(4, "little") + _MAGIC
TAIL_SIZE = len(_TAIL)
"""Bytes that :func:`tail` makes; leave this much room after a block."""


def head(block_size: int, count: int) -> bytes:
    """Return the bytes before the block: the magic, and the page header right before the block."""
    return _HEAD.replace(_SIZE, _number(block_size)).replace(_COUNT, _number(count))


def tail(block_size: int, count: int) -> bytes:
    """Return the end of the file: the metadata that points at the page header.

    The reader does not read the bytes between the page and the tail.
    """
    chunk_size = _number(len(_PAGE_HEADER) + block_size)
    return _TAIL.replace(_CHUNK, chunk_size).replace(_COUNT, _number(count))


MAX_BLOCK_BYTES = 2**31 - 1024
"""Largest record block: Arrow's binary offsets and Parquet's page sizes are i32."""

_FEW_RECORDS = 256
"""For fewer records than this, a Python loop is faster than opening a Parquet file."""

MANY_RECORDS = 1024
"""From this many records on, Arrow converts from and to Python bytes faster than a Python loop, and
other threads can run meanwhile."""

_TEXT_OR_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary_view,
    pa.types.is_string_view,
)


def listed(records: Any) -> Any:
    """Return the records of a call as a list, a tuple or an Arrow array.

    Args:
        records: The argument of the call. One bytes-like object is one record.

    Returns:
        The argument itself if it is a list, a tuple or an Arrow array; otherwise a new list.

    Raises:
        InvalidInput: ``records`` is not a collection of records.
    """
    if isinstance(records, list | tuple | pa.Array | pa.ChunkedArray):
        return records
    if isinstance(records, bytes | bytearray | memoryview):
        return [records]
    if isinstance(records, str):
        raise wrong_type("records", records, how_to_get_bytes(records))
    if isinstance(records, Mapping):
        use = "a list of bytes; encode a dict, e.g. [json.dumps(value).encode()]"
        raise wrong_type("records", records, use)
    # The elements of a set have no order.
    if isinstance(records, type | Set) or not isinstance(records, Iterable):
        raise wrong_type("records", records, "a list of bytes, or an Arrow array")
    return list(records)


def encode_arrow_block(array: pa.Array | pa.ChunkedArray) -> tuple[bytes | memoryview, int]:
    """Length-prefix the values of an Arrow array and join them.

    Args:
        array: Binary or string of any Arrow layout (plain, large, view, fixed size); slices and
            chunks work too.

    Returns:
        The record block and the number of records.

    Raises:
        InvalidInput: The array has another type, contains a null (the error names its row), or
            makes a block of more than 2 GiB.
    """
    if not isinstance(array, pa.Array | pa.ChunkedArray):
        raise InvalidInput(
            f"records is {type(array).__name__}: pass an Arrow array of binary or string"
        )
    _check_values(array)
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    blocks: list[bytes | memoryview] = []
    total = 0
    for chunk in chunks:
        if not len(chunk):
            continue
        # A slice of an array beyond 2 GiB has offsets beyond 32 bits, so keep them 64 bits wide.
        small = pa.types.is_binary(chunk.type) or pa.types.is_string(chunk.type)
        values = chunk.cast(pa.binary() if small else pa.large_binary())
        total += value_bytes(values) + 4 * len(values)
        if total > MAX_BLOCK_BYTES:
            raise InvalidInput(
                f"the array makes a record block of more than {MAX_BLOCK_BYTES} bytes: pass it "
                "in slices"
            )
        blocks.append(_join_lengths(values))
    return blocks[0] if len(blocks) == 1 else b"".join(blocks), len(array)


def _array_of(records: list[bytes]) -> pa.BinaryArray:
    """Do the same as ``pa.array(records)`` for a few records, without importing pandas.

    That import takes half a second in every new process that reads, and each Spark task may be one.
    """
    ends = array("i", accumulate(map(len, records), initial=0))
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(records))]
    return pa.Array.from_buffers(pa.binary(), len(records), buffers)


def _check_values(array: pa.Array | pa.ChunkedArray) -> None:
    kind = array.type
    if not any(is_kind(kind) for is_kind in _TEXT_OR_BYTES):
        raise InvalidInput(
            f"records is an Arrow array of {kind}: pass binary or string, e.g. "
            "pyarrow.compute.cast(array, 'string') or JSON text"
        )
    if array.null_count:
        import pyarrow.compute as pc  # 40 ms: see the top

        row = pc.index(pc.is_null(array), pa.scalar(True)).as_py()
        raise InvalidInput(
            f"row {row} is null ({array.null_count} of {len(array)} rows are): a record is never "
            "null. Drop these rows or fill them, e.g. with b''"
        )


def value_bytes(values: pa.Array) -> int:
    """Return the bytes of all values together. Reads two offsets, however many values there are.

    Args:
        values: An array of type ``binary`` or ``large_binary`` without nulls.

    Returns:
        The number of bytes, without the lengths.
    """
    offsets = memoryview(values.buffers()[1]).cast(
        "q" if pa.types.is_large_binary(values.type) else "i"
    )
    return int(offsets[values.offset + len(values)] - offsets[values.offset])


def _join_lengths(values: pa.Array) -> bytes | memoryview:
    if sys.byteorder != "little":
        return join_records(values.to_pylist())
    import pyarrow.compute as pc  # 40 ms: see the top

    lengths = pc.binary_length(values).cast(pa.int32())
    prefixes = pa.Array.from_buffers(
        pa.binary(4), len(lengths), [None, lengths.buffers()[1]], offset=lengths.offset
    ).cast(values.type)
    joined = pc.binary_join_element_wise(prefixes, values, pa.scalar(b"", values.type))
    return memoryview(joined.buffers()[2])[: value_bytes(joined)]


WHOLE_BYTES = 16 * MIB
"""The largest file that is read at once before it is decoded. Fresh memory for a file of 128 MiB
takes three times as long as reading and decoding it in parts."""


class ReadBuffer:
    """Memory to read a batch object into, so that decoding it needs no copy.

    Arrow's pool reuses memory, while the page faults of fresh memory would take longer than the
    read. The buffer has room before and after the object for the head and tail that make it a
    Parquet file.

    ``read`` reads an object at once; it is the object's :meth:`.ZeroCopy.get_into`. An object of
    more than ``WHOLE_BYTES`` is read in parts while it is decoded, because memory for all of it
    would be fresh.
    """

    __slots__ = ("_read", "data", "file", "size")

    def __init__(self, read: Callable[..., Any] | None = None) -> None:
        self._read = read
        self.allocate(0)
        if read is not None:
            read(self.allocate)

    def __len__(self) -> int:
        return self.size

    @property
    def in_parts(self) -> bool:
        """Whether :attr:`data` is empty and the object must be read with :meth:`read_part`."""
        return self._read is not None and self.size > WHOLE_BYTES

    def allocate(self, size: int) -> memoryview:
        """Allocate memory for an object of ``size`` bytes; none if it will be read in parts.

        Args:
            size: Bytes of the object.

        Returns:
            The memory, which is :attr:`data` from now on. ``file`` also has the room around it.
        """
        self.size = size
        room = 0 if self.in_parts else size
        self.file = pa.allocate_buffer(HEAD_SIZE + room + TAIL_SIZE)
        self.data = memoryview(self.file).cast("B")[HEAD_SIZE : HEAD_SIZE + room]
        return self.data

    def read_part(self, start: int, memory: memoryview) -> memoryview:
        """Fill ``memory`` with the object's bytes from ``start`` on, and return it.

        Args:
            start: The first byte to read.
            memory: The memory to fill. Its size is the number of bytes to read.

        Returns:
            The memory.

        Raises:
            StorageError: As ``read``.
        """
        assert self._read is not None
        self._read(lambda _: memory, start)
        return memory

    def whole(self) -> ReadBuffer:
        """Read all of the object if it was only opened.

        Returns:
            A buffer that has all of the object; this one if nothing was left to read.

        Raises:
            StorageError: As ``read``.
        """
        if not self.in_parts:
            return self
        buffer = ReadBuffer()
        self.read_part(0, buffer.allocate(self.size))
        return buffer


def decode_arrow(data: BytesLike | ReadBuffer, max_bytes: int = DEFAULT_MAX_BYTES) -> pa.Array:
    """Decode a batch object into one Arrow array.

    Args:
        data: The whole object.
        max_bytes: Largest decompressed record block, in bytes. Default 256 MiB.

    Returns:
        The records, in order: an array of type ``binary`` without nulls.

    Raises:
        CorruptBatch: The object breaks the format, or its decompressed record block exceeds
            ``max_bytes``.
        StorageError: As the ``read`` of a buffer that is read in parts.
    """
    block = open_arrow(data, max_bytes)
    (array,) = block.pieces(block.size)
    return array


def decode_records(data: BytesLike | ReadBuffer, max_bytes: int = DEFAULT_MAX_BYTES) -> list[bytes]:
    """Do the same as :func:`.decode_batch`, several times faster for many records."""
    if isinstance(data, ReadBuffer):
        data = data.whole()
    view = data.data if isinstance(data, ReadBuffer) else data
    if parse_footer(view).record_count < MANY_RECORDS or max_bytes > MAX_BLOCK_BYTES:
        return decode_batch(view, max_bytes)
    keep_freed_memory()
    records: list[bytes] = decode_arrow(data, max_bytes).to_pylist()
    return records


def open_arrow(data: BytesLike | ReadBuffer, max_bytes: int = DEFAULT_MAX_BYTES) -> ArrowBlock:
    """Check a batch object's footer and sizes, and decompress it; its records are split later.

    Args:
        data: The whole object, or an opened file.
        max_bytes: Largest decompressed record block, in bytes. Default 256 MiB.

    Returns:
        The block, which can be split into arrays of any size.

    Raises:
        CorruptBatch: The object breaks the format or is too large.
        StorageError: As the ``read`` of a buffer that is read in parts.
    """
    max_bytes = min(max_bytes, MAX_BLOCK_BYTES)
    if isinstance(data, ReadBuffer) and data.in_parts:
        size = len(data) - FOOTER_SIZE
        with suppress(CorruptBatch):  # reading all of it below raises the full error
            footer = parse_footer(data.read_part(size, memoryview(bytearray(FOOTER_SIZE))))
            check_block(size, footer, max_bytes)
            if footer.compression == Compression.NONE and _is_split_by_arrow(footer):
                return ArrowBlock(footer, size, data)
        data = data.whole()
    whole = data.data if isinstance(data, ReadBuffer) else memoryview(data)
    footer = parse_footer(whole)
    if not _is_split_by_arrow(footer):
        # Do not use Arrow: its pool would keep the memory of a block that is refused.
        block = memoryview(open_batch(whole, max_bytes)[1])
        return ArrowBlock(footer, len(block), block)
    block, file = whole[: len(whole) - FOOTER_SIZE], None
    if footer.compression == Compression.ZSTD:
        # Decompress into the place between head and tail, so that the block is written once.
        frames = zstd.plan_frames(block, max_bytes)
        most = min(sum(frame.most for frame in frames), max_bytes)
        file = pa.allocate_buffer(HEAD_SIZE + most + TAIL_SIZE)
        room = memoryview(file).cast("B")[HEAD_SIZE : HEAD_SIZE + most + 1]
        block = room[: zstd.decompress_into(frames, room, max_bytes)]
    elif isinstance(data, ReadBuffer):
        file = data.file
    check_block(len(block), footer, max_bytes)
    return ArrowBlock(footer, len(block), block, file)


def _is_split_by_arrow(footer: BatchFooter) -> bool:
    return footer.record_count >= _FEW_RECORDS and sys.byteorder == "little"


@dataclass(frozen=True, slots=True)
class ArrowBlock:
    """The record block of an opened batch.

    Attributes:
        footer: The batch's footer.
        size: Bytes of the block.
        block: The block, or the buffer from which it is read in parts.
        file: Memory that has room around the block, as in a :class:`ReadBuffer`; None without room.
    """

    footer: BatchFooter
    size: int
    block: memoryview | ReadBuffer
    file: pa.Buffer | None = None

    def pieces(self, array_bytes: int) -> Iterator[pa.Array]:
        """Decode all records, in order, into arrays of about the same size.

        Each array is made when it is asked for, by one thread at a time.

        Args:
            array_bytes: Size of an array, in bytes.

        Yields:
            The arrays. A single record may be larger than an array should be.

        Raises:
            CorruptBatch: The block does not hold the footer's records. Good arrays may come first.
        """
        count = self.footer.record_count
        if isinstance(self.block, memoryview) and not _is_split_by_arrow(self.footer):
            yield _array_of(split_records(self.block, count))
            return
        rows = end = 0
        try:
            while rows < count:
                arrays = max(1, -(-(self.size - end) // array_bytes))
                wanted = -(-(count - rows) // arrays)
                most = self.size if arrays == 1 else array_bytes * 9 // 8  # records differ
                values = self._split(end, wanted, most)
                rows += len(values)
                end += value_bytes(values) + 4 * len(values)
                yield values
                del values  # free its memory before the next one is made
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise CorruptBatch(
                f"block of {self.size} bytes does not hold {count} length-prefixed records: {error}"
            ) from error
        # failure F20: unless every byte belongs to a record, the footer is wrong.
        if end != self.size:
            raise CorruptBatch(
                f"block of {self.size} bytes is {rows} records with {end - 4 * rows} bytes, the "
                f"footer counts {count}: {self.size - end} bytes belong to no record"
            )

    def _split(self, begin: int, rows: int, most: int) -> pa.Array:
        """Read ``rows`` records from byte ``begin`` on, as a Parquet file of their own.

        Arrow reserves memory for all bytes of a page, although its records may end earlier. The
        page therefore starts with ``most`` bytes and doubles if they are too few. In a file, the
        head overwrites the bytes before the page for a moment; the reader ignores bytes between
        page and tail.
        """
        import pyarrow.parquet as pq  # 40 ms: see the top

        while True:
            size = min(most, self.size - begin)
            file, at = self.file, begin
            if file is None:
                part = ReadBuffer()
                memory = part.allocate(size)
                if isinstance(self.block, ReadBuffer):
                    self.block.read_part(begin, memory)
                else:
                    memory[:] = self.block[begin : begin + size]
                file, at = part.file, 0
            memory = memoryview(file).cast("B")
            before = slice(at, at + HEAD_SIZE)
            kept = bytes(memory[before])
            # Two threads may decode a whole block: both write the same bytes here.
            memory[before], memory[-TAIL_SIZE:] = head(size, rows), tail(size, rows)
            try:
                reader = pq.ParquetFile(pa.BufferReader(file.slice(at)), pre_buffer=False)
                return reader.read(use_threads=False).column(0).chunk(0)
            except (pa.ArrowException, OSError):
                if size == self.size - begin:
                    raise
                most *= 2
            finally:
                if at:
                    memory[before] = kept
