"""The parts of a data batch, v1, that both its decoders share: footer, limits, plain records.

:mod:`opendata_buffer.formats.arrow` and :mod:`opendata_buffer.formats.batch` build on it; outside
of this package, import from those; who only plans what is read, and waits for each module that is
loaded, may import from here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from opendata_buffer.errors import CorruptBatch, InvalidInput
from opendata_buffer.formats import BytesLike

__all__ = [
    "DEFAULT_MAX_BYTES",
    "FOOTER",
    "FOOTER_SIZE",
    "U32_MAX",
    "VERSION",
    "BatchFooter",
    "Compression",
    "check_block",
    "join_records",
    "largest_object",
    "parse_footer",
    "split_records",
]

VERSION = 1
FOOTER = struct.Struct("<BIH")
"""Compression, record count, version."""

FOOTER_SIZE = FOOTER.size
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
    """:func:`.encode_block` in plain Python, of values whose ``len`` is their size in bytes.

    Raises:
        InvalidInput: A record exceeds 2^32 - 1 bytes.
    """
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


def parse_footer(data: BytesLike) -> BatchFooter:
    """Read and check the last 7 bytes.

    Raises:
        CorruptBatch: Too short, another version, or an unknown compression.
    """
    if len(data) < FOOTER_SIZE:
        raise CorruptBatch(
            f"batch has {len(data)} bytes, less than its {FOOTER_SIZE}-byte footer: it is "
            "truncated or not a batch"
        )
    kind, record_count, version = FOOTER.unpack_from(data, len(data) - FOOTER_SIZE)
    if version != VERSION:
        block = len(data) - FOOTER_SIZE
        # What was cut or overwritten ends with any two bytes. Only a footer that is right in all
        # else can be believed.
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
    """Whether a block of this size can hold the footer's records, before any allocation.

    Raises:
        CorruptBatch: The block exceeds the cap or cannot hold the counted records.
    """
    if size > max_bytes:
        raise CorruptBatch(
            f"record block has {size} bytes, more than max_batch_bytes {max_bytes}. Raise "
            "max_batch_bytes if the batch is trusted"
        )
    # failure F18: a 7-byte object may claim 4 billion records. Each one needs its length prefix.
    if footer.record_count * 4 > size:
        raise CorruptBatch(
            f"footer counts {footer.record_count} records but the block has {size} bytes"
        )
    if footer.record_count == 0 and size:  # failure F20
        raise CorruptBatch(f"footer counts no records but the block has {size} bytes")


def largest_object(max_bytes: int) -> int:
    """Bytes of the largest object whose record block has at most ``max_bytes``.

    Records that do not compress grow under zstd, by less than this (``ZSTD_compressBound``).
    """
    return max_bytes + (max_bytes >> 7) + 1024 + FOOTER_SIZE


def split_records(block: bytes | memoryview, record_count: int) -> list[bytes]:
    """Cut a record block into its records.

    Raises:
        CorruptBatch: A record runs past the end, or bytes are left over.
    """
    records: list[bytes] = []
    data = block if type(block) is bytes else bytes(block)
    append, unpack = records.append, _LENGTH.unpack_from
    position, end = 0, len(data)
    for index in range(record_count):
        start = position + 4
        if start > end:
            raise CorruptBatch(
                f"record {index} of {record_count} starts at byte {position} of {end}: the block "
                "is truncated"
            )
        position = start + unpack(data, position)[0]
        if position > end:
            raise CorruptBatch(
                f"record {index} of {record_count} ends at byte {position} of {end}: the block "
                "is truncated"
            )
        append(data[start:position])
    if position != end:
        # failure F20: a patched count would hide records; the reference decoder ignores the rest.
        raise CorruptBatch(
            f"block has {end - position} bytes after its {record_count} records: the footer's "
            "count is too small"
        )
    return records
