"""Names of objects: batch locations, the transactions they carry, ULIDs, and which keys are legal.

Keys are raw text from here to storage: ``%``, ``#``, spaces and accents are stored under the
very name they were given (failure F24). Only names that no store can hold are refused.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from opendata_buffer.errors import InvalidInput

MAX_KEY_BYTES = 1024
"""Longest object key, UTF-8 bytes: the limit of S3."""

BROKER_RECORD_NAME = "_broker.json"
"""Of the one object that not everybody who shares a machine may read."""

MAX_PREFIX_BYTES = 744
"""Longest data prefix: leaves room for ``/app=<200>/batch=<19>/<ULID>.batch`` in a key."""

MAX_LOCATION_BYTES = 65_535
"""Longest location a manifest can hold (``location_len`` is a u16)."""

# Behind the 10 characters of the time, 30 of the 80 random bits.
_TAG_FROM, _TAG_TO = 10, 16

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_DIGITS = {character: value for value, character in enumerate(_ALPHABET)}
# 26 * 5 = 130 bits hold 128: the first character of a ULID is at most 7.
_ULID = re.compile(rf"[0-7][{_ALPHABET}]{{25}}")
_NAME = re.compile(rf"([0-7][{_ALPHABET}]{{25}})\.batch")
# OpenData's Go producer: a ULID for its run, and the number of the batch within the run.
_RUN_NAME = re.compile(rf"({_ULID.pattern})/[0-9a-f]{{16}}")
_APP = re.compile(r"[A-Za-z0-9._-]{1,200}")
# A version 1 UUID of RFC 4122 as its text is printed, so that one message has one name.
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_BATCH_NAME = re.compile(
    rf"(?:app=({_APP.pattern})/batch=(0|[1-9][0-9]{{0,18}})/)?(?:message=({_UUID})/)?{_NAME.pattern}"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MAX_TXN_BATCH = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Transaction:
    """The identity a writer gives to a group of batches, so that a reader can drop repeats.

    Attributes:
        app: The writer's name, e.g. a query id: 1 to 200 of ``A-Z a-z 0-9 . _ -``.
        batch: The writer's own number of the group, 0 to 2^63 - 1.
    """

    app: str
    batch: int

    def __post_init__(self) -> None:
        if not isinstance(self.app, str) or not _APP.fullmatch(self.app):
            raise InvalidInput(
                f"transaction app is {self.app!r}: use 1 to 200 characters of A-Z a-z 0-9 . _ -"
            )
        if (
            not isinstance(self.batch, int)
            or isinstance(self.batch, bool)
            or not 0 <= self.batch <= _MAX_TXN_BATCH
        ):
            raise InvalidInput(f"transaction batch is {self.batch!r}: use 0 to {_MAX_TXN_BATCH}")


@dataclass(frozen=True, slots=True)
class BatchLocation:
    """The parts of a batch object's name.

    ``ulid`` is that of the batch, or of the run of the producer that wrote it. ``timestamp_ms`` is
    its time, milliseconds since the Unix epoch, by the writer's clock; a run's batches may be much
    younger. ``message`` is a version 1 UUID, as :func:`.parse_uuid` reads it. It alone decides when
    the batch counts; ``txn`` beside it only names the writer.
    """

    ulid: str
    timestamp_ms: int
    txn: Transaction | None = None
    message: uuid.UUID | None = None


def key_fault(key: str, max_bytes: int = MAX_LOCATION_BYTES) -> str | None:
    """Why ``key`` cannot name an object, or None."""
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


def check_key(name: str, key: object, max_bytes: int = MAX_KEY_BYTES) -> None:
    """Refuse a key that some store cannot hold under its very name, see :func:`key_fault`.

    ``InvalidInput`` has the ``name`` of the setting; ``max_bytes`` are of UTF-8.
    """
    if not isinstance(key, str):
        raise InvalidInput(f"{name} is {key!r}: use text such as 'ingest/events'")
    if fault := key_fault(key, max_bytes):
        shown = key if len(key) <= 80 else key[:80] + "…"
        raise InvalidInput(
            f"{name} is {shown!r}: {fault}. Use a relative name such as 'ingest/events'"
        )


def is_ulid(text: str) -> bool:
    """Whether ``text`` is a ULID in canonical form (upper case)."""
    return _ULID.fullmatch(text) is not None


def ulid_timestamp_ms(ulid: str) -> int:
    """Milliseconds since the Unix epoch that the ULID was made at, by its maker's clock."""
    if not is_ulid(ulid):
        raise InvalidInput(f"{ulid!r} is not a ULID: 26 characters of {_ALPHABET}")
    timestamp = 0
    for character in ulid[:10]:
        timestamp = timestamp * 32 + _DIGITS[character]
    return timestamp


def later_ulid(ulid: str, milliseconds: int) -> str:
    """The ULID of a later time, with the same random part."""
    timestamp_ms = ulid_timestamp_ms(ulid) + milliseconds
    time = "".join(_ALPHABET[timestamp_ms >> shift & 31] for shift in range(45, -1, -5))
    return time + ulid[10:]


def batch_key(
    prefix: str, ulid: str, txn: Transaction | None = None, message: uuid.UUID | None = None
) -> str:
    """Name of a batch object: ``<prefix>/[app=<app>/batch=<n>/][message=<uuid>/]<ULID>.batch``.

    ``InvalidInput`` for an ``ulid`` that is none, a ``message`` that is no version 1 UUID, or a
    name with both ``txn`` and ``message`` that is longer than a key may be.
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
    """Read a name that a producer gives to a batch; None for every other name.

    Producers make two kinds: what :func:`batch_key` makes, and
    ``<prefix>/<run ULID>/<16 hex digits>``, as OpenData's Go producer does.
    """
    root = f"{prefix}/"
    if not location.startswith(root):
        return None
    rest = location[len(root) :]
    found = _BATCH_NAME.fullmatch(rest)
    if found is None:
        run = _RUN_NAME.fullmatch(rest)
        return None if run is None else BatchLocation(run[1], ulid_timestamp_ms(run[1]))
    app, batch, message, ulid = found.groups()
    if batch is not None and int(batch) > _MAX_TXN_BATCH:
        return None
    txn = None if app is None else Transaction(app, int(batch))
    sent = None if message is None else uuid.UUID(message)
    return BatchLocation(ulid, ulid_timestamp_ms(ulid), txn, sent)


def prefix_of(location: str) -> str | None:
    """The data prefix of a batch, by its name; None for a name that producers do not give."""
    parts = location.split("/")
    prefixes = ("/".join(parts[:length]) for length in range(1, len(parts)))
    return next((each for each in prefixes if parse_location(location, each) is not None), None)


def location_timestamp_ms(location: str) -> int | None:
    """Time of the ULID in a location, whatever the directories above; None without one. As
    :attr:`BatchLocation.timestamp_ms`."""
    ulid = _location_ulid(location)
    return None if ulid is None else ulid_timestamp_ms(ulid)


def name_time_ms(location: str) -> int | None:
    """When a batch was named, by its ULID; None where the name has the time of its producer's run,
    which may be weeks before."""
    return location_timestamp_ms(location) if location.endswith(".batch") else None


def _location_ulid(location: str) -> str | None:
    *_, run, last = f"/{location}".split("/")
    name = _NAME.fullmatch(last) or _RUN_NAME.fullmatch(f"{run}/{last}")
    return None if name is None else name[1]


def tagged_ulid(ulid: str, tag: str) -> str:
    """The ULID with a writer's tag for its first random characters; time and 50 bits stay."""
    tagged = ulid[:_TAG_FROM] + tag + ulid[_TAG_TO:]
    if len(tag) != _TAG_TO - _TAG_FROM or not is_ulid(tagged):
        raise InvalidInput(f"{ulid!r} with the tag {tag!r} is not a ULID")
    return tagged


def ulid_tag(ulid: str) -> str:
    """Where :func:`tagged_ulid` puts a tag: the first six random characters."""
    return ulid[_TAG_FROM:_TAG_TO]


def location_tag(location: str) -> str | None:
    """The tag in a location's ULID, whatever the directories above; None without a ULID. A writer
    that gives no tags has as many as batches, or one for its run."""
    ulid = _location_ulid(location)
    return None if ulid is None else ulid_tag(ulid)


def is_confined(location: str, prefix: str) -> bool:
    """Whether a location names something below the data prefix and nothing else (failure F23); v1
    gives no form for the name below it."""
    return location.startswith(f"{prefix}/") and key_fault(location) is None
