"""The data batch, v1: an optionally compressed block of length-prefixed records and a footer.

::

    block   record 0: [len u32 LE][data], record 1: …   compressed as a whole, or not
    footer  [compression u8][record_count u32 LE][version u16 LE = 1]   7 bytes, never compressed

(OpenData RFC 0001, Data Batch Format.) An empty batch is its footer. Records are Python bytes here;
:mod:`opendata_buffer.formats.arrow` keeps them in Arrow arrays. Long lists go through it here, too:
it is several times faster, and lets other threads run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB, BytesLike, zstd
from opendata_buffer.formats.codec import (
    DEFAULT_MAX_BYTES,
    FOOTER,
    FOOTER_SIZE,
    VERSION,
    BatchFooter,
    Compression,
    check_block,
    join_records,
    parse_footer,
    split_records,
)

if TYPE_CHECKING:
    from opendata_buffer.formats.arrow import ReadBuffer

__all__ = [
    "U32_MAX",
    "decode_batch",
    "encode_batch",
    "encode_block",
    "encode_bytes",
    "open_batch",
    "seal_block",
    "seal_pieces",
]

U32_MAX = 2**32 - 1
"""Most records of a batch, and most bytes of a record."""


_MANY_RECORDS = 1024
"""From here on, splitting and joining in C++ beats a Python loop."""

_FREED_ONCE = 16 * MIB


def encode_block(records: Iterable[BytesLike]) -> bytes:
    """Length-prefix the records, back to back.

    Raises:
        InvalidInput: A record is not bytes-like, is not contiguous, or exceeds 2^32 - 1 bytes;
            the message names its index.
    """
    values: list[Any] = list(records)
    if set(map(type, values)) == {bytes}:
        return bytes(encode_bytes(values))
    return join_records([_flat(index, record) for index, record in enumerate(values)])


def encode_bytes(records: Sequence[bytes]) -> bytes | memoryview:
    """:func:`encode_block` of what is known to be ``bytes``."""
    if len(records) >= _MANY_RECORDS:
        from opendata_buffer.formats import arrow  # late: importing pyarrow takes 0.1 s

        with suppress(InvalidInput):  # more than Arrow joins at once
            return arrow.encode_bytes_list(records)
    return join_records(records)


def _flat(index: int, record: object) -> BytesLike:
    """A view whose ``len`` is its number of bytes."""
    if type(record) is bytes:
        return record
    try:
        view = memoryview(record)  # type: ignore[arg-type]
    except TypeError:
        fix = "encode it, e.g. text.encode()" if isinstance(record, str) else "pass bytes"
        raise InvalidInput(f"record {index} is {type(record).__name__}: {fix}") from None
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    if not view.c_contiguous:
        raise InvalidInput(f"record {index} is a view with gaps: pass bytes(record)")
    return view.cast("B")


def seal_block(
    block: bytes | memoryview | Sequence[bytes | memoryview],
    record_count: int,
    compression: Compression,
    level: int = 1,
) -> bytes:
    """Compress a record block and add the footer: a whole batch object.

    Arguments and errors are those of :func:`seal_pieces`.
    """
    return b"".join(seal_pieces(block, record_count, compression, level))


def seal_pieces(
    block: bytes | memoryview | Sequence[bytes | memoryview],
    record_count: int,
    compression: Compression,
    level: int = 3,
) -> list[bytes | memoryview]:
    """As :func:`seal_block`, in pieces that lie one behind the other in the object.

    Args:
        block: From :func:`encode_block` or ``encode_arrow_block``; or several.
        record_count: Records in it.
        compression: ``NONE`` or ``ZSTD``.
        level: Zstandard level, 1 to 22; readers take any. OpenData RFC 0001 uses 3.

    Raises:
        InvalidInput: The count does not fit a u32 (failure F34) or cannot be the block's.
    """
    if not 0 <= record_count <= U32_MAX:
        raise InvalidInput(f"a batch of {record_count} records: at most {U32_MAX}. Split it")
    pieces = (block,) if isinstance(block, (bytes, memoryview)) else tuple(block)
    size = sum(map(len, pieces))
    if record_count * 4 > size or (record_count == 0 and size):
        raise InvalidInput(f"a block of {size} bytes cannot hold {record_count} records")
    footer = FOOTER.pack(Compression(compression), record_count, VERSION)
    if compression == Compression.ZSTD:
        if not 1 <= level <= 22:
            raise InvalidInput(f"zstd_level is {level!r}: use 1 to 22")
        whole = memoryview(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        return [zstd.compress(whole, level), footer]
    return [*pieces, footer]


def encode_batch(
    records: Iterable[BytesLike], compression: Compression = Compression.NONE, level: int = 1
) -> bytes:
    """A whole batch object from its records, in order.

    Raises:
        InvalidInput: See :func:`encode_block` and :func:`seal_block`.
    """
    values = records if isinstance(records, (list, tuple)) else list(records)
    return seal_block(encode_block(values), len(values), compression, level)


def open_batch(
    data: BytesLike, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[BatchFooter, bytes | memoryview]:
    """Check the footer and return the record block, decompressed.

    Args:
        data: The whole batch object.
        max_bytes: Cap on the decompressed block.

    Returns:
        The footer, and the block: a view of ``data`` when it is not compressed.

    Raises:
        CorruptBatch: The object breaks the format or exceeds the cap.
    """
    footer = parse_footer(data)
    stored = memoryview(data)[: len(data) - FOOTER_SIZE]
    block: bytes | memoryview = stored
    if footer.compression == Compression.ZSTD:
        block = zstd.decompress(stored, max_bytes)
    check_block(len(block), footer, max_bytes)
    return footer, block


def decode_batch(data: BytesLike | ReadBuffer, max_bytes: int = DEFAULT_MAX_BYTES) -> list[bytes]:
    """The records of a batch object, in order.

    Args:
        data: The whole object; one in a ReadBuffer is not copied before its records are made.
        max_bytes: Cap on the decompressed record block.

    Raises:
        CorruptBatch: The object breaks the format or exceeds the cap. Nothing else.
    """
    view = data if isinstance(data, bytes | bytearray | memoryview) else data.data
    count = parse_footer(view).record_count
    if count >= _MANY_RECORDS:
        from opendata_buffer.formats import arrow  # late: importing pyarrow takes 0.1 s

        if max_bytes <= arrow.MAX_BLOCK_BYTES:
            _keep_freed_memory()
            records: list[bytes] = arrow.decode_arrow(data, max_bytes).to_pylist()
            return records
    footer, block = open_batch(view, max_bytes)
    return split_records(block, footer.record_count)


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep what a dropped list of records leaves, for the next list.

    Otherwise glibc gives it back to the kernel at once, and the page faults of the next list take
    half as long as making it: 0.26 µs for each record of 1,000 bytes. Once a large block was
    freed, it keeps up to twice as much. This one is never touched, so it takes no memory itself.
    """
    bytes(_FREED_ONCE)
