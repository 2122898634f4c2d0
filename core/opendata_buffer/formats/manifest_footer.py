"""The last bytes of a manifest, which say what stands before them. Pure.

::

    [entry_count u32][next_sequence u64][epoch u64][version u16 = 1]   22 bytes, little-endian
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats.entries import FIXED_SIZE, LEAST_SIZE, LOOK

__all__ = ["FOOTER_SIZE", "MAX_MANIFEST_BYTES", "VERSION", "Footer"]

VERSION = 1
FOOTER_SIZE = 22
MAX_MANIFEST_BYTES = 1 << 30
"""What is larger is not read, and not written: every append would rewrite it."""

_FOOTER = struct.Struct("<IQQH")
_HEAD = struct.Struct("<IQH")  # of the first entry: its length, sequence, length of its location


class Footer(NamedTuple):
    """What the footer says.

    Attributes:
        entry_count: Batches queued.
        next_sequence: What the next appended entry gets.
        epoch: Of the consumer that owns the queue; 0 before the first one.
    """

    entry_count: int
    next_sequence: int
    epoch: int

    def pack(self) -> bytes:
        """Its bytes."""
        return _FOOTER.pack(self.entry_count, self.next_sequence, self.epoch, VERSION)

    @classmethod
    def parse(cls, data: bytes) -> Footer:
        """Read the footer of a whole manifest, and check it against the size of what it counts.

        Raises:
            CorruptManifest: The bytes are no v1 manifest.
        """
        body = len(data) - FOOTER_SIZE
        if body < 0:
            raise _no_footer(data)
        count, next_sequence, epoch, version = _FOOTER.unpack_from(data, body)
        if version != VERSION:
            # The version lies behind the entries, so of a damaged manifest it is any two bytes.
            # Only a footer that is right in all else can be believed.
            if count * LEAST_SIZE > body or count > next_sequence or (count == 0) != (body == 0):
                raise _no_footer(data)
            raise CorruptManifest(
                f"manifest has version {version}, this library reads version {VERSION}: a later "
                "release wrote it. Upgrade here before you go on."
            )
        # failure F16: bytes without a count would be dropped unread; a count without bytes is
        # damage.
        if count * LEAST_SIZE > body or (count == 0 and body):
            raise CorruptManifest(
                f"manifest counts {count} entries but they have {body} bytes. {LOOK}"
            )
        if count > next_sequence:
            raise CorruptManifest(
                f"manifest counts {count} entries but its next sequence is {next_sequence}. {LOOK}"
            )
        return cls(count, next_sequence, epoch)


def _no_footer(data: bytes) -> CorruptManifest:
    """What happened to bytes that do not end as a manifest."""
    size = len(data)
    mend = (
        "Restore the object's latest version (bucket versioning), or stop producers, consumers "
        "and collectors and run 'opendata-buffer manifest rebuild'."
    )
    if not size:
        return CorruptManifest(f"manifest is empty: 0 bytes were written over it. {mend}")
    if _begins_with_entry(data):
        return CorruptManifest(
            f"manifest is truncated: its {size} bytes begin with an entry and do not end with the "
            f"{FOOTER_SIZE}-byte footer. {mend}"
        )
    return CorruptManifest(
        f"manifest was overwritten: its {size} bytes begin with {data[:16]!r} and are no manifest. "
        f"{mend}"
    )


def _begins_with_entry(data: bytes) -> bool:
    """Whether the first bytes are an entry's header and location, as far as they are there."""
    if len(data) < _HEAD.size:
        return False
    length, sequence, location_size = _HEAD.unpack_from(data, 0)
    location = data[_HEAD.size : _HEAD.size + location_size]
    return (
        FIXED_SIZE + location_size <= length <= MAX_MANIFEST_BYTES
        and sequence < 2**48  # text would make it larger
        and bool(location)
        and location.isascii()
        and all(32 <= byte < 127 for byte in location)
    )
