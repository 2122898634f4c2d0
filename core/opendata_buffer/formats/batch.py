"""The data batch, v1: an optionally compressed block of length-prefixed records and a footer.

::

    block   record 0: [len u32 LE][data], record 1: …   compressed as a whole, or not
    footer  [compression u8][record_count u32 LE][version u16 LE = 1]   7 bytes, never compressed

(OpenData RFC 0001, Data Batch Format.) An empty batch is its footer. Records are Python bytes here;
:mod:`opendata_buffer.formats.arrow` joins and splits them in C++, several times faster.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from opendata_buffer.errors import CorruptBatch, InvalidInput
from opendata_buffer.formats import BytesLike, zstd

VERSION = 1
_FOOTER = struct.Struct("<BIH")  # compression, record count, version
FOOTER_SIZE = _FOOTER.size
DEFAULT_MAX_BYTES = 256 * 1024 * 1024
"""Default cap on a decoded record block, bytes."""

U32_MAX = 2**32 - 1
"""Most records of a batch, and most bytes of a record."""

_LENGTH = struct.Struct("<I")

_SHORT = tuple(map(_LENGTH.pack, range(1024)))
"""The prefixes of short records: looking one up takes half as long as making it."""


class Compression(IntEnum):
    """How the record block is stored; the values are the footer's."""

    NONE = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True)
class BatchFooter:
    """The last 7 bytes of a batch."""

    compression: Compression
    record_count: int


def join_records(values: Sequence[BytesLike]) -> bytes:
    """:func:`encode_block` of values whose ``len`` is their size in bytes."""
    pieces: list[BytesLike] = [b""] * (2 * len(values))
    try:
        try:
            pieces[0::2] = map(_SHORT.__getitem__, map(len, values))
        except IndexError:
            pieces[0::2] = map(_LENGTH.pack, map(len, values))
    except struct.error:
        index, size = next((i, len(v)) for i, v in enumerate(values) if len(v) > U32_MAX)
        raise InvalidInput(
            f"record {index} has {size} bytes: a record has at most {U32_MAX}. Split it"
        ) from None
    pieces[1::2] = values
    return b"".join(pieces)


def encode_block(records: Iterable[BytesLike]) -> bytes:
    """Length-prefix the records, back to back.

    ``InvalidInput``, with the index, for a record that is not bytes-like, is not contiguous, or
    exceeds 2^32 - 1 bytes.
    """
    return join_records([_flat(index, record) for index, record in enumerate(records)])


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


def parse_footer(data: BytesLike) -> BatchFooter:
    """Read and check the last 7 bytes."""
    if len(data) < FOOTER_SIZE:
        raise CorruptBatch(
            f"batch has {len(data)} bytes, less than its {FOOTER_SIZE}-byte footer: it is "
            "truncated or not a batch"
        )
    kind, record_count, version = _FOOTER.unpack_from(data, len(data) - FOOTER_SIZE)
    if version != VERSION:
        block = len(data) - FOOTER_SIZE
        # A damaged object may end with any two bytes: the version counts if the rest is right.
        if kind > max(Compression) or (kind == Compression.NONE and record_count * 4 > block):
            raise CorruptBatch(
                f"it was cut or overwritten: its {len(data)} bytes begin with "
                f"{bytes(data[:16])!r} and do not end as a batch does"
            )
        raise CorruptBatch(
            f"batch has version {version}, this library reads version {VERSION}: a later release "
            "wrote it. Upgrade here before you go on"
        )
    try:
        compression = Compression(kind)
    except ValueError:
        known = ", ".join(f"{c.value} ({c.name.lower()})" for c in Compression)
        raise CorruptBatch(f"batch has compression type {kind}, known are {known}") from None
    return BatchFooter(compression, record_count)


def check_block(size: int, footer: BatchFooter, max_bytes: int) -> None:
    """Refuse a block that exceeds the cap or cannot hold the footer's records."""
    if size > max_bytes:
        raise CorruptBatch(f"record block has {size} bytes, more than max_batch_bytes {max_bytes}")
    # failure F18: a 7-byte object may claim 4 billion records. Each one needs its length prefix.
    if footer.record_count * 4 > size:
        raise CorruptBatch(
            f"footer counts {footer.record_count} records but the block has {size} bytes"
        )
    if footer.record_count == 0 and size:  # failure F20
        raise CorruptBatch(f"footer counts no records but the block has {size} bytes")


def largest_object(max_bytes: int) -> int:
    """Bytes of the largest object whose record block has at most ``max_bytes``. What does not
    compress grows under zstd, by less than this (``ZSTD_compressBound``)."""
    return max_bytes + (max_bytes >> 7) + 1024 + FOOTER_SIZE


def split_records(block: bytes | memoryview, record_count: int) -> list[bytes]:
    """Cut a record block into its records."""
    records: list[bytes] = []
    append, unpack = records.append, _LENGTH.unpack_from
    position, end = 0, len(block)
    for index in range(record_count):
        start = position + 4
        if start > end:
            raise _truncated(index, record_count, f"starts at byte {position} of {end}")
        position = start + unpack(block, position)[0]
        if position > end:
            raise _truncated(index, record_count, f"ends at byte {position} of {end}")
        append(bytes(block[start:position]))  # no copy of a whole view: it may be large
    if position != end:
        # failure F20: a patched count would hide records; the reference decoder ignores the rest.
        raise CorruptBatch(
            f"block has {end - position} bytes after its {record_count} records: the footer's "
            "count is too small"
        )
    return records


def _truncated(index: int, record_count: int, where: str) -> CorruptBatch:
    return CorruptBatch(f"record {index} of {record_count} {where}: the block is truncated")


def seal_block(
    block: bytes | memoryview | Sequence[bytes | memoryview],
    record_count: int,
    compression: Compression,
    level: int = 1,
) -> bytes:
    """As :func:`seal_pieces`, as one whole batch object."""
    return b"".join(seal_pieces(block, record_count, compression, level))


def seal_pieces(
    block: bytes | memoryview | Sequence[bytes | memoryview],
    record_count: int,
    compression: Compression,
    level: int = 1,
) -> list[bytes | memoryview]:
    """Compress one or several record blocks and add the footer: the batch object, in pieces.

    ``level`` is Zstandard's, 1 to 22; readers take any, and OpenData RFC 0001 uses 3.
    ``InvalidInput`` for a count that does not fit a u32 (failure F34) or cannot be the block's.
    """
    if not 0 <= record_count <= U32_MAX:
        raise InvalidInput(f"a batch of {record_count} records: at most {U32_MAX}. Split it")
    pieces = (block,) if isinstance(block, (bytes, memoryview)) else tuple(block)
    size = sum(map(len, pieces))
    if record_count * 4 > size or (record_count == 0 and size):
        raise InvalidInput(f"a block of {size} bytes cannot hold {record_count} records")
    footer = _FOOTER.pack(Compression(compression), record_count, VERSION)
    if compression == Compression.ZSTD:
        if not 1 <= level <= 22:
            raise InvalidInput(f"zstd_level is {level!r}: use 1 to 22")
        whole = memoryview(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        return [zstd.compress(whole, level), footer]
    return [*pieces, footer]


def encode_batch(
    records: Iterable[BytesLike], compression: Compression = Compression.NONE, level: int = 1
) -> bytes:
    """A whole batch object from its records, in order."""
    values = list(records)
    return seal_block(encode_block(values), len(values), compression, level)


def open_batch(
    data: BytesLike, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[BatchFooter, bytes | memoryview]:
    """Check a batch object's footer, and decompress its block to at most ``max_bytes``.

    The block is a view of ``data`` when it is not compressed.
    """
    footer = parse_footer(data)
    stored = memoryview(data)[: len(data) - FOOTER_SIZE]
    block: bytes | memoryview = stored
    if footer.compression == Compression.ZSTD:
        block = zstd.decompress(stored, max_bytes)
    check_block(len(block), footer, max_bytes)
    return footer, block


def decode_batch(data: BytesLike, max_bytes: int = DEFAULT_MAX_BYTES) -> list[bytes]:
    """The records of a batch object, in order.

    Raises ``CorruptBatch``, and nothing else, where the object breaks the format or its
    decompressed record block exceeds ``max_bytes``.
    """
    footer, block = open_batch(data, max_bytes)
    return split_records(block, footer.record_count)
