"""A record block as a one-column Parquet file, so that Arrow's C++ decodes it.

A v1 record block is byte for byte a Parquet PLAIN page of BYTE_ARRAY values: length-prefixed
bytes, back to back. All that Arrow's reader misses is a page header before the block and a
footer behind it, a hundred bytes of Thrift's compact protocol. So records are split at memory
speed by a decoder everybody installs anyway, with no compiler and no Python object per record.

The file has one required column ``v`` in one row group with one page (parquet.thrift):
``PAR1 | page header | block | file metadata | u32 size of the metadata | PAR1``.
"""

from __future__ import annotations

__all__ = ["HEAD_SIZE", "TAIL_SIZE", "head", "tail"]

HEAD_SIZE = 64
"""Bytes :func:`head` makes; room to leave before a block."""

TAIL_SIZE = 160
"""Most bytes :func:`tail` makes; room to leave behind a block."""

_MAGIC = b"PAR1"
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_STOP = b"\0"
_BYTE_ARRAY = 6
_PLAIN, _RLE = 0, 3


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int(step: int, value: int, kind: int = _I32) -> bytes:
    """An integer field; ``step`` is its number minus the number of the field before it."""
    return bytes((step << 4 | kind,)) + _varint(value << 1)  # zigzag of a value >= 0


def _field(step: int, kind: int, body: bytes) -> bytes:
    return bytes((step << 4 | kind,)) + body


def _text(step: int, value: bytes) -> bytes:
    return _field(step, _BINARY, _varint(len(value)) + value)


def _list(kind: int, *items: bytes) -> bytes:
    return bytes((len(items) << 4 | kind,)) + b"".join(items)


def _page_header(block_size: int, count: int) -> bytes:
    # DataPageHeader: num_values, encoding, definition and repetition level encodings
    page = _int(1, count) + _int(1, _PLAIN) + _int(1, _RLE) + _int(1, _RLE) + _STOP
    # PageHeader: type DATA_PAGE, uncompressed and compressed size, field 5 is the DataPageHeader
    sizes = _int(1, 0) + _int(1, block_size) + _int(1, block_size)
    return sizes + _field(2, _STRUCT, page) + _STOP


def head(block_size: int, count: int) -> bytes:
    """What comes before the block: the magic, and the page header right before the block."""
    header = _page_header(block_size, count)
    return _MAGIC + bytes(HEAD_SIZE - len(_MAGIC) - len(header)) + header


def tail(block_size: int, count: int) -> bytes:
    """The file's end: the metadata that points at the page header.

    What is between the block and this is part of nothing and not looked at.
    """
    header_size = len(_page_header(block_size, count))
    chunk_size = header_size + block_size
    # SchemaElement: the root with one child, then the column: type, REQUIRED, name
    root = _text(4, b"r") + _int(1, 1) + _STOP
    column = _int(1, _BYTE_ARRAY) + _int(2, 0) + _text(1, b"v") + _STOP
    # ColumnMetaData: type, encodings, path, codec UNCOMPRESSED, values, sizes, page offset
    chunk = (
        _int(1, _BYTE_ARRAY)
        + _field(1, _LIST, _list(_I32, _varint(_PLAIN)))
        + _field(1, _LIST, _list(_BINARY, _varint(1) + b"v"))
        + _int(1, 0)
        + _int(1, count, _I64)
        + _int(1, chunk_size, _I64)
        + _int(1, chunk_size, _I64)
        + _int(2, HEAD_SIZE - header_size, _I64)
        + _STOP
    )
    # RowGroup: one ColumnChunk (file_offset 0, metadata), total size, rows
    columns = _list(_STRUCT, _int(2, 0, _I64) + _field(1, _STRUCT, chunk) + _STOP)
    group = _field(1, _LIST, columns) + _int(1, chunk_size, _I64) + _int(1, count, _I64) + _STOP
    # FileMetaData: version, schema, rows, row groups
    metadata = (
        _int(1, 1)
        + _field(1, _LIST, _list(_STRUCT, root, column))
        + _int(1, count, _I64)
        + _field(1, _LIST, _list(_STRUCT, group))
        + _STOP
    )
    return metadata + len(metadata).to_bytes(4, "little") + _MAGIC
