"""The data batch, v1, to and from Arrow, with no Python object per record.

Encoding joins the lengths, viewed as 4-byte binaries, to the values. Both directions give exactly
what :mod:`opendata_buffer.formats.batch` gives, and raise the same errors.

Arrow's Parquet reader splits the block, because a v1 record block is byte for byte a Parquet PLAIN
page of BYTE_ARRAY values: length-prefixed bytes, back to back. The reader only needs a page header
before the block and a footer behind it, in Thrift's compact protocol. The file has one required
column ``v`` in one row group with one page (parquet.thrift):
``PAR1 | page header | block | file metadata | u32 size of the metadata | PAR1``.
Any part of a block that begins with a record makes such a file, too.

``pyarrow.compute`` and ``pyarrow.parquet`` are imported by the functions that need them: they take
40 ms, and a Spark process that plans a query encodes and decodes nothing.
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

from opendata_buffer.arguments import wrong_type
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
"""Bytes :func:`head` makes; room to leave before a block."""
_MAGIC = b"PAR1"
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_STOP = b"\0"
_BYTE_ARRAY = 6
_PLAIN, _RLE = 0, 3


def _number(value: int) -> bytes:
    """A zigzag varint of 0 to 2**32, always in five bytes, so that no other byte moves with it."""
    zigzag = value << 1
    low = (zigzag >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21))
    return bytes((*low, zigzag >> 28))


def _int(step: int, value: bytes | int, kind: int = _I32) -> bytes:
    """An integer field, ``step`` after the number of the field before it; bytes are a place."""
    return _field(step, kind, value if isinstance(value, bytes) else _number(value))


def _field(step: int, kind: int, body: bytes) -> bytes:
    return bytes((step << 4 | kind,)) + body


def _text(step: int, value: bytes) -> bytes:
    return _field(step, _BINARY, bytes((len(value),)) + value)


def _list(kind: int, *items: bytes) -> bytes:
    return bytes((len(items) << 4 | kind,)) + b"".join(items)


# Made once, with a place of five bytes for each figure: they are needed for each batch.
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
"""Bytes :func:`tail` makes; room to leave behind a block."""


def head(block_size: int, count: int) -> bytes:
    """The bytes before the block: the magic, and the page header right before the block."""
    return _HEAD.replace(_SIZE, _number(block_size)).replace(_COUNT, _number(count))


def tail(block_size: int, count: int) -> bytes:
    """The file's end: the metadata that points at the page header. Bytes before it are not read."""
    chunk_size = _number(len(_PAGE_HEADER) + block_size)
    return _TAIL.replace(_CHUNK, chunk_size).replace(_COUNT, _number(count))


MAX_BLOCK_BYTES = 2**31 - 1024
"""Largest record block either way: Arrow's binary offsets and Parquet's page sizes are i32."""

_FEW_RECORDS = 256
"""Below this many records a Python loop is faster than opening a Parquet file."""

MANY_RECORDS = 1024
"""From this many records on, joining Python bytes in Arrow, and making them of its arrays, is
faster than a Python loop, and lets other threads run."""

_TEXT_OR_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary_view,
    pa.types.is_string_view,
)


def listed(entries: Any) -> Any:
    """Return the entries of a call as a list, a tuple or an Arrow array.

    Raises:
        InvalidInput: ``entries`` is not a collection of records.
    """
    if isinstance(entries, list | tuple | pa.Array | pa.ChunkedArray):
        return entries
    if isinstance(entries, bytes | bytearray | memoryview | str):
        raise InvalidInput(
            f"entries is one {type(entries).__name__}: give a list of entries, [entry]"
        )
    # The keys of a mapping would be taken, and the elements of a set have no order.
    if isinstance(entries, type | Mapping | Set) or not isinstance(entries, Iterable):
        raise wrong_type("entries", entries, "a list of bytes, or an Arrow array")
    return list(entries)


def encode_arrow_block(array: pa.Array | pa.ChunkedArray) -> tuple[bytes | memoryview, int]:
    """Length-prefix the values of an Arrow array, back to back: record block, number of records.

    Takes binary and string of any Arrow layout (plain, large, view, fixed size), slices and
    chunks. ``InvalidInput`` for another type, a null (names its row), or a block beyond 2 GiB.
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


def _array_of(records: list[bytes]) -> pa.BinaryArray:
    """``pa.array(records)`` for a few records, without the import of pandas that it makes: half a
    second in every new process that reads, as each task of Spark may be one."""
    ends = array("i", accumulate(map(len, records), initial=0))
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(records))]
    return pa.Array.from_buffers(pa.binary(), len(records), buffers)


def _check_values(array: pa.Array | pa.ChunkedArray) -> None:
    kind = array.type
    if not any(is_kind(kind) for is_kind in _TEXT_OR_BYTES):
        raise InvalidInput(
            f"entries is an Arrow array of {kind}: pass binary or string, e.g. "
            "pyarrow.compute.cast(array, 'string') or JSON text"
        )
    if array.null_count:
        import pyarrow.compute as pc  # 40 ms: see the top

        row = pc.index(pc.is_null(array), pa.scalar(True)).as_py()
        raise InvalidInput(
            f"row {row} is null ({array.null_count} of {len(array)} rows are): a record is never "
            "null. Drop these rows or fill them, e.g. with b''"
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
    import pyarrow.compute as pc  # 40 ms: see the top

    lengths = pc.binary_length(values).cast(pa.int32())
    prefixes = pa.Array.from_buffers(
        pa.binary(4), len(lengths), [None, lengths.buffers()[1]], offset=lengths.offset
    ).cast(values.type)
    joined = pc.binary_join_element_wise(prefixes, values, pa.scalar(b"", values.type))
    return memoryview(joined.buffers()[2])[: _value_bytes(joined)]


WHOLE_BYTES = 16 * MIB
"""The largest file that is read at once, before it is decoded. Fresh memory for one of 128 MiB
takes three times as long as reading and decoding it in parts."""


class ReadBuffer:
    """Memory to read a batch object to, so that decoding it needs no copy of its own.

    Arrow's pool reuses memory: the page faults of fresh memory would take longer than the read.
    Before and behind the object is room for the head and tail that make a Parquet file of it.

    An object is read at once by ``read``, which is :meth:`.Files.get_into` of it. One of more than
    ``WHOLE_BYTES`` is not, but in parts while it is decoded: for all of it memory would be fresh.
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
        """Whether :attr:`data` is empty and :meth:`read_part` to be asked."""
        return self._read is not None and self.size > WHOLE_BYTES

    def allocate(self, size: int) -> memoryview:
        """Memory for an object of so many bytes, or none where it is read in parts: :attr:`data`
        from now on; ``file`` has the room around it, too."""
        self.size = size
        room = 0 if self.in_parts else size
        self.file = pa.allocate_buffer(HEAD_SIZE + room + TAIL_SIZE)
        self.data = memoryview(self.file).cast("B")[HEAD_SIZE : HEAD_SIZE + room]
        return self.data

    def read_part(self, start: int, memory: memoryview) -> memoryview:
        """The memory, filled with the object's bytes from ``start`` on. Raises as ``read``."""
        assert self._read is not None
        self._read(lambda _: memory, start)
        return memory

    def whole(self) -> ReadBuffer:
        """A buffer that has all of the object. Raises as ``read``."""
        if not self.in_parts:
            return self
        buffer = ReadBuffer()
        self.read_part(0, buffer.allocate(self.size))
        return buffer


def decode_arrow(data: BytesLike | ReadBuffer, max_bytes: int = DEFAULT_MAX_BYTES) -> pa.Array:
    """The records of a batch object as one Arrow array of type ``binary``, without nulls.

    Raises ``CorruptBatch``, and nothing else, where the object breaks the format or its
    decompressed record block exceeds ``max_bytes``; as its ``read`` where it is read in parts.
    """
    block = open_arrow(data, max_bytes)
    (array,) = block.pieces(block.size)
    return array


def decode_records(data: BytesLike | ReadBuffer, max_bytes: int = DEFAULT_MAX_BYTES) -> list[bytes]:
    """:func:`.decode_batch`, several times faster for many records."""
    if isinstance(data, ReadBuffer):
        data = data.whole()
    view = data.data if isinstance(data, ReadBuffer) else data
    if parse_footer(view).record_count < MANY_RECORDS or max_bytes > MAX_BLOCK_BYTES:
        return decode_batch(view, max_bytes)
    keep_freed_memory()
    records: list[bytes] = decode_arrow(data, max_bytes).to_pylist()
    return records


def open_arrow(data: BytesLike | ReadBuffer, max_bytes: int = DEFAULT_MAX_BYTES) -> ArrowBlock:
    """Check a batch object's footer and sizes, and decompress it; its records are split later."""
    max_bytes = min(max_bytes, MAX_BLOCK_BYTES)
    if isinstance(data, ReadBuffer) and data.in_parts:
        size = len(data) - FOOTER_SIZE
        with suppress(CorruptBatch):  # what is wrong is said below, of all bytes
            footer = parse_footer(data.read_part(size, memoryview(bytearray(FOOTER_SIZE))))
            check_block(size, footer, max_bytes)
            if footer.compression == Compression.NONE and _is_split_by_arrow(footer):
                return ArrowBlock(footer, size, data)
        data = data.whole()
    whole = data.data if isinstance(data, ReadBuffer) else memoryview(data)
    footer = parse_footer(whole)
    if not _is_split_by_arrow(footer):
        # Without Arrow, whose pool would keep the memory of a block that is refused.
        block = memoryview(open_batch(whole, max_bytes)[1])
        return ArrowBlock(footer, len(block), block)
    block, file = whole[: len(whole) - FOOTER_SIZE], None
    if footer.compression == Compression.ZSTD:
        # Decompressed to its place between head and tail, so that the block is written once.
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
    """The record ``block`` of a batch that was opened, of ``size`` bytes, or what it is read from
    in parts; in a ``file`` there is room around it, as in a :class:`ReadBuffer`."""

    footer: BatchFooter
    size: int
    block: memoryview | ReadBuffer
    file: pa.Buffer | None = None

    def pieces(self, array_bytes: int) -> Iterator[pa.Array]:
        """All records, in order, in arrays of about so many bytes; each is made when it is asked
        for, by one thread at a time. ``CorruptBatch`` may follow after good arrays."""
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
                end += _value_bytes(values) + 4 * len(values)
                yield values
                del values  # its memory is to be free when the next one is made
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise CorruptBatch(
                f"block of {self.size} bytes does not hold {count} length-prefixed records: {error}"
            ) from error
        # failure F20: every byte belongs to a record, or the footer is wrong.
        if end != self.size:
            raise CorruptBatch(
                f"block of {self.size} bytes is {rows} records with {end - 4 * rows} bytes, the "
                f"footer counts {count}: {self.size - end} bytes belong to no record"
            )

    def _split(self, begin: int, rows: int, most: int) -> pa.Array:
        """So many records from byte ``begin`` of the block on, as a Parquet file of their own.

        Arrow reserves memory for all bytes of a page, whose records may end before it does: so it
        begins with ``most`` bytes, and twice as many where they are too few. In a file its head
        takes the place of bytes before it meanwhile; bytes between page and tail are not read.
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
            # Of a whole block the same bytes every time: two threads may decode it.
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
