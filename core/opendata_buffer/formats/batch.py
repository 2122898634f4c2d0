"""The v1 batch: its name and its bytes.

::

    name    <prefix>/[app=<app>/batch=<n>/][message=<uuid>/]<ULID>.batch
    block   record 0: [len u32 LE][data], record 1: …   compressed as a whole, or not
    footer  [compression u8][record_count u32 LE][version u16 LE = 1]   7 bytes, never compressed

(OpenData RFC 0001, Data Batch Format.) Keys are raw text all the way to the store: ``%``, ``#``,
spaces, and accents are stored as given (failure F24). Only keys that no store can hold are refused.
An empty batch is just a footer. Records are Python bytes here; :mod:`opendata_buffer.formats.arrow`
joins and splits them in C++, several times faster.
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from opendata_buffer.arguments import check_fields, how_to_get_bytes, wrong_type
from opendata_buffer.errors import CorruptBatch, InvalidInput
from opendata_buffer.formats import BytesLike, zstd
from opendata_buffer.hints import Setting

MAX_KEY_BYTES = 1024
"""Longest object key in UTF-8 bytes: the limit of S3."""

BROKER_RECORD_NAME = "_broker.json"
"""Name of the one object that other users of a machine must not read."""

MAX_PREFIX_BYTES = 744
"""Longest data prefix, which leaves room for ``/app=<200>/batch=<19>/<ULID>.batch`` in a key."""

MAX_LOCATION_BYTES = 65_535
"""Longest location that a manifest can hold (``location_len`` is a u16)."""

# After the 10 characters of the time: 30 of the 80 random bits.
_TAG_FROM, _TAG_TO = 10, 16

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
# 26 * 5 = 130 bits hold 128: the first character of a ULID is at most 7.
_ULID = re.compile(rf"[0-7][{_ALPHABET}]{{25}}")
_NAME = re.compile(rf"([0-7][{_ALPHABET}]{{25}})\.batch")
# OpenData's Go producer uses a ULID for its run and the number of the batch in the run.
_RUN_NAME = re.compile(rf"({_ULID.pattern})/[0-9a-f]{{16}}")
_APP = re.compile(r"[A-Za-z0-9._-]{1,200}")
# A version 1 UUID of RFC 4122 in its canonical text, so that one message has one name.
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_BATCH_NAME = re.compile(
    rf"(?:app=({_APP.pattern})/batch=(0|[1-9][0-9]{{0,18}})/)?(?:message=({_UUID})/)?{_NAME.pattern}"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MAX_TXN_BATCH = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Transaction:
    """The identity that a writer gives to a group of batches, so that a reader can drop repeats.

    Attributes:
        app: The writer's name, such as a query id: 1 to 200 of ``A-Z a-z 0-9 . _ -``.
        batch: The writer's own number of the group, 0 to 2^63 - 1.

    Raises:
        InvalidInput: ``app`` or ``batch`` is out of range.
    """

    app: str
    batch: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not _APP.fullmatch(self.app):
            raise InvalidInput(
                f"transaction app is {self.app!r}: use 1 to 200 characters of A-Z a-z 0-9 . _ -"
            )
        if not 0 <= self.batch <= _MAX_TXN_BATCH:
            raise InvalidInput(f"transaction batch is {self.batch!r}: use 0 to {_MAX_TXN_BATCH}")


@dataclass(frozen=True, slots=True)
class BatchLocation:
    """The parts of a batch object's name.

    Attributes:
        ulid: The ULID of the batch, or of its producer's run.
        timestamp_ms: The ULID's time in milliseconds since the Unix epoch. A run's batches may be
            much younger.
        txn: The writer's transaction. With a ``message``, it only names the writer.
        message: The identity that decides whether the batch counts; :func:`.parse_uuid` reads it.
    """

    ulid: str
    timestamp_ms: int
    txn: Transaction | None = None
    message: uuid.UUID | None = None


def key_fault(key: str, max_bytes: int = MAX_LOCATION_BYTES) -> str | None:
    """Return why ``key`` cannot name an object; None if it can."""
    if not key:
        return "it is empty"
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode (a lone surrogate)"
    if size > max_bytes:
        return f"it has {size} bytes, at most {max_bytes} are allowed"
    if control := _CONTROL.search(key):
        return f"it holds the control character {control.group()!r}"
    for segment in key.split("/"):
        if not segment:
            return "it starts or ends with '/' or holds '//'"
        if segment in (".", ".."):
            return f"it holds the segment {segment!r}"
    return None


def check_key(name: str | Setting, key: object, max_bytes: int = MAX_KEY_BYTES) -> None:
    """Refuse a key that some store cannot hold under exactly this name; see :func:`key_fault`.

    Args:
        name: The setting, for the error.
        key: The key.
        max_bytes: Longest key in UTF-8 bytes.

    Raises:
        InvalidInput: The key cannot be used.
    """
    if not isinstance(key, str):
        raise wrong_type(name, key, "text such as 'ingest/events'")
    if fault := key_fault(key, max_bytes):
        shown = key if len(key) <= 80 else key[:80] + "…"
        raise InvalidInput(
            name, f" is {shown!r}: {fault}. Use a relative name such as 'ingest/events'"
        )


def is_ulid(text: str) -> bool:
    """Return whether ``text`` is a ULID in canonical form.

    python-ulid also reads lower case. Names are compared as text, so that two spellings of one ULID
    would be two batches: the form is checked here.
    """
    return _ULID.fullmatch(text) is not None


def ulid_timestamp_ms(ulid: str) -> int:
    """Return the time that a ULID was made at, by its maker's clock.

    Args:
        ulid: A ULID of 26 characters.

    Returns:
        Milliseconds since the Unix epoch.

    Raises:
        InvalidInput: ``ulid`` is not a ULID in canonical form.
    """
    if not is_ulid(ulid):
        raise InvalidInput(f"{ulid!r} is not a ULID: 26 characters of {_ALPHABET}")
    return _time_of(ulid)


def _time_of(ulid: str) -> int:
    # Imported with the first batch that is named or read, as in :func:`.ulid_of`. A manifest has
    # tens of thousands of names: decoding only the time takes a quarter as long as `ULID.from_str`.
    from ulid import base32

    return int.from_bytes(base32.decode_timestamp(ulid[:_TAG_FROM]), "big")


def later_ulid(ulid: str, milliseconds: int) -> str:
    """Move the time of a ULID, and keep its random part.

    Args:
        ulid: A ULID of 26 characters.
        milliseconds: How far to move the time.

    Returns:
        The other ULID.

    Raises:
        InvalidInput: ``ulid`` is not a ULID, or the later time does not fit in 48 bits.
    """
    from ulid import base32  # as in _time_of

    timestamp_ms = ulid_timestamp_ms(ulid) + milliseconds
    if not 0 <= timestamp_ms < 1 << 48:
        raise InvalidInput(
            f"the ULID {ulid!r} cannot be moved by {milliseconds} ms: its time has 48 bits"
        )
    return base32.encode_timestamp(timestamp_ms.to_bytes(6, "big")) + ulid[_TAG_FROM:]


def batch_key(
    prefix: str, ulid: str, txn: Transaction | None = None, message: uuid.UUID | None = None
) -> str:
    """Build a batch's name: ``<prefix>/[app=<app>/batch=<n>/][message=<uuid>/]<ULID>.batch``.

    Args:
        prefix: The queue's data prefix.
        ulid: The ULID of the batch.
        txn: The writer's transaction. Default: none.
        message: The identity of a message, a version 1 UUID. Default: none.

    Returns:
        The key of the batch's object.

    Raises:
        InvalidInput: ``ulid`` is not a ULID, ``message`` is not a version 1 UUID, or the name of a
            message is longer than a key may be.
    """
    if not is_ulid(ulid):
        raise InvalidInput(f"{ulid!r} is not a ULID: 26 characters of {_ALPHABET}")
    folder = prefix if txn is None else f"{prefix}/app={txn.app}/batch={txn.batch}"
    if message is None:
        return f"{folder}/{ulid}.batch"
    if not re.fullmatch(_UUID, str(message)):
        raise InvalidInput(f"message is {message}: use a version 1 UUID, as build_uuid() makes it")
    key = f"{folder}/message={message}/{ulid}.batch"
    if (size := len(key.encode())) > MAX_KEY_BYTES:
        raise InvalidInput(
            f"the name of a message's batch has {size} bytes, at most {MAX_KEY_BYTES} are allowed: "
            f"shorten the data prefix {prefix!r:.80} by {size - MAX_KEY_BYTES} bytes"
            + ("" if txn is None else f", or the app id {txn.app!r:.80}")
        )
    return key


def parse_location(location: str, prefix: str) -> BatchLocation | None:
    """Read a name that a producer gives to a batch; return None for any other name.

    The name is one that :func:`batch_key` makes, or one of OpenData's Go producer: ``<prefix>/<run
    ULID>/<16 hex digits>``.
    """
    root = f"{prefix}/"
    if not location.startswith(root):
        return None
    rest = location[len(root) :]
    found = _BATCH_NAME.fullmatch(rest)
    if found is None:
        run = _RUN_NAME.fullmatch(rest)
        return None if run is None else BatchLocation(run[1], _time_of(run[1]))
    app, batch, message, ulid = found.groups()
    if batch is not None and int(batch) > _MAX_TXN_BATCH:
        return None
    txn = None if app is None else Transaction(app, int(batch))
    sent = None if message is None else uuid.UUID(message)
    return BatchLocation(ulid, _time_of(ulid), txn, sent)


def prefix_of(location: str) -> str | None:
    """Return the data prefix in the name of a batch; None for a name that producers do not give."""
    parts = location.split("/")
    prefixes = ("/".join(parts[:length]) for length in range(1, len(parts)))
    for prefix in prefixes:
        if parse_location(location, prefix) is not None:
            return prefix
    return None


def location_timestamp_ms(location: str) -> int | None:
    """Return the time of the ULID in a location, in any directory; None without a ULID.

    It is the same time as :attr:`BatchLocation.timestamp_ms`.
    """
    ulid = _location_ulid(location)
    return None if ulid is None else _time_of(ulid)


def name_time_ms(location: str) -> int | None:
    """Find out when a batch was named, by its ULID.

    Args:
        location: The batch's location.

    Returns:
        Milliseconds since the Unix epoch. None if the name contains only the start of its
        producer's run, which may be weeks earlier.
    """
    return location_timestamp_ms(location) if location.endswith(".batch") else None


def _location_ulid(location: str) -> str | None:
    *_, run, last = f"/{location}".split("/")
    name = _NAME.fullmatch(last) or _RUN_NAME.fullmatch(f"{run}/{last}")
    return None if name is None else name[1]


def tagged_ulid(ulid: str, tag: str) -> str:
    """Write a writer's tag into a ULID, in place of its first random characters.

    Args:
        ulid: A ULID of 26 characters.
        tag: Six characters of a ULID.

    Returns:
        The other ULID. The time and 50 random bits are the same.

    Raises:
        InvalidInput: The tag does not have six characters, or the result is not a ULID.
    """
    tagged = ulid[:_TAG_FROM] + tag + ulid[_TAG_TO:]
    if len(tag) != _TAG_TO - _TAG_FROM or not is_ulid(tagged):
        raise InvalidInput(f"{ulid!r} with the tag {tag!r} is not a ULID")
    return tagged


def ulid_tag(ulid: str) -> str:
    """Return the first six random characters of a ULID, where :func:`tagged_ulid` puts a tag."""
    return ulid[_TAG_FROM:_TAG_TO]


def location_tag(location: str) -> str | None:
    """Return the tag in a location's ULID, in any directory; None without a ULID.

    A writer that does not use tags has a different one for each batch, or one for its run.
    """
    ulid = _location_ulid(location)
    return None if ulid is None else ulid_tag(ulid)


def is_confined(location: str, prefix: str) -> bool:
    """Return whether a location names an object below the data prefix (failure F23).

    v1 does not prescribe the rest of the name.
    """
    return location.startswith(f"{prefix}/") and key_fault(location) is None


VERSION = 1
_FOOTER = struct.Struct("<BIH")  # compression, record count, version
FOOTER_SIZE = _FOOTER.size
DEFAULT_MAX_BYTES = 256 * 1024 * 1024
"""Default limit on a decoded record block, in bytes."""

U32_MAX = 2**32 - 1
"""Largest number of records in a batch, and of bytes in a record."""

_LENGTH = struct.Struct("<I")

_SHORT = tuple(map(_LENGTH.pack, range(1024)))
"""The length prefixes of short records: looking one up takes half as long as packing it."""


class Compression(IntEnum):
    """How the record block is stored; the values are those in the footer."""

    NONE = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True)
class BatchFooter:
    """The last 7 bytes of a batch."""

    compression: Compression
    record_count: int


def join_records(values: Sequence[BytesLike]) -> bytes:
    """Do the same as :func:`encode_block` for values whose ``len`` is their size in bytes.

    Args:
        values: The records.

    Returns:
        The record block.

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


def encode_block(records: Iterable[BytesLike]) -> bytes:
    """Length-prefix the records and join them.

    Args:
        records: The records. Each has at most 2^32 - 1 bytes.

    Returns:
        The record block.

    Raises:
        InvalidInput: A record is not bytes-like, is not contiguous, or exceeds 2^32 - 1 bytes. The
            error names its index.
    """
    return join_records([_flat(index, record) for index, record in enumerate(records)])


def _flat(index: int, record: object) -> BytesLike:
    """Return a view whose ``len`` is its number of bytes."""
    if type(record) is bytes:
        return record
    # Callers who pass another object with a buffer, such as an array of integers, rarely mean its
    # bytes.
    if not isinstance(record, bytes | bytearray | memoryview):
        raise wrong_type(f"record {index}", record, how_to_get_bytes(record), secret=True)
    view = memoryview(record)
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    if not view.c_contiguous:
        raise InvalidInput(f"record {index} is a view with gaps: pass bytes(record)")
    return view.cast("B")


def parse_footer(data: BytesLike) -> BatchFooter:
    """Read and check the last 7 bytes of a batch.

    Args:
        data: The whole object, or its end.

    Returns:
        The footer.

    Raises:
        CorruptBatch: They are not a footer of version 1.
    """
    if len(data) < FOOTER_SIZE:
        raise CorruptBatch(
            f"batch has {len(data)} bytes, less than its {FOOTER_SIZE}-byte footer: it is "
            "truncated or not a batch"
        )
    kind, record_count, version = _FOOTER.unpack_from(data, len(data) - FOOTER_SIZE)
    if version != VERSION:
        block = len(data) - FOOTER_SIZE
        # A damaged object may end with any two bytes, so trust the version only if the rest of
        # the footer is plausible.
        if kind > max(Compression) or (kind == Compression.NONE and record_count * 4 > block):
            raise CorruptBatch(
                f"it was truncated or overwritten: its {len(data)} bytes begin with "
                f"{bytes(data[:16])!r} and do not end with a batch's footer"
            )
        raise CorruptBatch(
            f"batch has version {version}, but this library reads version {VERSION}: a later "
            "release wrote it. Upgrade this program first"
        )
    try:
        compression = Compression(kind)
    except ValueError:
        known = ", ".join(f"{c.value} ({c.name.lower()})" for c in Compression)
        raise CorruptBatch(f"unsupported compression type {kind} (supported: {known})") from None
    return BatchFooter(compression, record_count)


def check_block(size: int, footer: BatchFooter, max_bytes: int) -> None:
    """Refuse a block that exceeds the limit or cannot hold the footer's records.

    Args:
        size: Bytes of the decompressed block.
        footer: The footer of the batch.
        max_bytes: Largest decompressed block, in bytes.

    Raises:
        CorruptBatch: The block's size is wrong.
    """
    if size > max_bytes:
        raise CorruptBatch.too_large(
            f"record block has {size} bytes, more than the limit of {max_bytes}", max_bytes
        )
    # failure F18: a 7-byte object may claim 4 billion records, but each needs a length prefix.
    if footer.record_count * 4 > size:
        raise CorruptBatch(
            f"footer counts {footer.record_count} records but the block has {size} bytes"
        )
    if footer.record_count == 0 and size:  # failure F20
        raise CorruptBatch(f"footer counts no records but the block has {size} bytes")


def largest_object(max_bytes: int) -> int:
    """Return the size of the largest object whose record block has at most ``max_bytes``.

    Incompressible data grows under zstd by less than this allowance (``ZSTD_compressBound``).
    """
    return max_bytes + (max_bytes >> 7) + 1024 + FOOTER_SIZE


def split_records(block: bytes | memoryview, record_count: int) -> list[bytes]:
    """Split a record block into its records.

    Args:
        block: The decompressed record block.
        record_count: The number of records in it, by the footer.

    Returns:
        The records, in order.

    Raises:
        CorruptBatch: The block does not hold exactly ``record_count`` records.
    """
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
        append(bytes(block[start:position]))  # one record at a time: the whole view may be large
    if position != end:
        # failure F20: the reference decoder ignores the rest, so a patched count hides records.
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
    """Do the same as :func:`seal_pieces`, and return the batch object as one piece."""
    return b"".join(seal_pieces(block, record_count, compression, level))


def seal_pieces(
    block: bytes | memoryview | Sequence[bytes | memoryview],
    record_count: int,
    compression: Compression,
    level: int = 1,
) -> list[bytes | memoryview]:
    """Compress one or several record blocks and add the footer.

    Args:
        block: One block, or several that follow one another.
        record_count: Records in all blocks.
        compression: The compression of the block.
        level: Zstandard's level, 1 to 22. Readers accept any; OpenData RFC 0001 uses 3.

    Returns:
        The pieces of the batch object.

    Raises:
        InvalidInput: The count does not fit a u32 (failure F34) or cannot be the block's.
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
    """Return a whole batch object that holds these records, in order."""
    values = list(records)
    return seal_block(encode_block(values), len(values), compression, level)


def open_batch(
    data: BytesLike, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[BatchFooter, bytes | memoryview]:
    """Check a batch object's footer, and decompress its block to at most ``max_bytes``.

    Args:
        data: The whole object.
        max_bytes: Largest decompressed record block, in bytes. Default 256 MiB.

    Returns:
        The footer and the block. A block that is not compressed is a view of ``data``.

    Raises:
        CorruptBatch: The object breaks the format or is too large.
    """
    footer = parse_footer(data)
    stored = memoryview(data)[: len(data) - FOOTER_SIZE]
    block: bytes | memoryview = stored
    if footer.compression == Compression.ZSTD:
        block = zstd.decompress(stored, max_bytes)
    check_block(len(block), footer, max_bytes)
    return footer, block


def decode_batch(data: BytesLike, max_bytes: int = DEFAULT_MAX_BYTES) -> list[bytes]:
    """Decode a batch object.

    Args:
        data: The whole object.
        max_bytes: Largest decompressed record block, in bytes. Default 256 MiB.

    Returns:
        The records, in order.

    Raises:
        CorruptBatch: The object breaks the format, or its decompressed record block exceeds
            ``max_bytes``. No other error is raised.
    """
    footer, block = open_batch(data, max_bytes)
    return split_records(block, footer.record_count)
