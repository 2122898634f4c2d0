"""A message's identity: producer, clock and flags in one v1 UUID (RFC 4122).

::

    time stamp, 60 bits of 100 ns since 1582-10-15       most significant bits of the clock
    clock sequence, first 4 of 14 bits: a counter         least significant bits of the clock
    clock sequence, last 10 bits: flags                   OUTSIDE, CONTINUE or ACK_TXN; FINAL
    node, 48 bits                                         the producer

The clock, time stamp and counter together, is a 64-bit number that rises with each message of a
producer. So a reader recognises a repeated message by its clock alone, and does not have to
remember single messages.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from opendata_buffer.errors import InvalidInput

OUTSIDE_TXN = 0
"""The message is no part of a transaction: it is committed when it is written."""

CONTINUE_TXN = 1
"""The message begins or continues a transaction: it is committed once an ACK_TXN follows."""

ACK_TXN = 2
"""Commits all CONTINUE_TXN messages of the producer up to this clock, and drops later ones."""

FINAL = 4
"""Added to the flags of an acknowledgement: the producer writes nothing after it.

A reader then forgets the producer, so that its state does not grow for ever. Readers remove the
flag before they compare the others.
"""

FLAGS_MASK = 0x3FF
CLOCK_MAX = (1 << 64) - 1
PRODUCER_BYTES = 6

_UNIX_EPOCH_100NS = 122_192_928_000_000_000
"""From 1582-10-15, where v1 time stamps begin, to 1970-01-01."""


@dataclass(frozen=True, slots=True)
class MessageId:
    """What a message's UUID says.

    Attributes:
        producer: 6 bytes, drawn at random once in a producer's life.
        clock: 64 bits: 100 ns since 1582-10-15 in the upper 60, a counter in the lower 4.
        flags: 10 bits.
    """

    producer: bytes
    clock: int
    flags: int


def build_uuid(producer: bytes, clock: int, flags: int) -> uuid.UUID:
    """The v1 UUID of a message.

    Raises:
        InvalidInput: ``producer`` has not 6 bytes, or ``clock`` or ``flags`` are out of range.
    """
    producer = bytes(producer)
    if len(producer) != PRODUCER_BYTES:
        raise InvalidInput(f"producer id {producer.hex()!r} has {len(producer)} bytes: use 6")
    if not 0 <= clock <= CLOCK_MAX:
        raise InvalidInput(f"clock is {clock}: use 0 to {CLOCK_MAX}")
    if not 0 <= flags <= FLAGS_MASK:
        raise InvalidInput(f"flags are {flags}: use 0 to {FLAGS_MASK}, 10 bits")
    stamp, counter = clock >> 4, clock & 0xF
    return uuid.UUID(
        fields=(
            stamp & 0xFFFFFFFF,
            stamp >> 32 & 0xFFFF,
            stamp >> 48 | 0x1000,
            0x80 | counter << 2 | flags >> 8,
            flags & 0xFF,
            int.from_bytes(producer, "big"),
        )
    )


def parse_uuid(value: uuid.UUID) -> MessageId:
    """Producer, clock and flags of a message's UUID.

    Raises:
        InvalidInput: It is no v1 UUID.
    """
    if value.version != 1:
        raise InvalidInput(f"{value} is no version 1 UUID: only those carry producer and clock")
    sequence = value.clock_seq
    return MessageId(
        producer=value.node.to_bytes(PRODUCER_BYTES, "big"),
        clock=value.time << 4 | sequence >> 10 & 0xF,
        flags=sequence & FLAGS_MASK,
    )


def new_producer_id(entropy: Callable[[int], bytes]) -> bytes:
    """A random producer id, with the bit set that no network card's address has.

    Args:
        entropy: Gives that many random bytes; :func:`secrets.token_bytes` in production.
    """
    drawn = entropy(PRODUCER_BYTES)
    return bytes([drawn[0] | 1]) + drawn[1:]


class Clock:
    """A producer's clock: follows the wall clock, never goes back. Not thread-safe.

    Attributes:
        value: The clock of the last message.
    """

    def __init__(self) -> None:
        self.value = 0

    def update(self, now_ms: int) -> None:
        """Advance to the wall clock, milliseconds since the Unix epoch; ignored if earlier."""
        stamp = now_ms * 10_000 + _UNIX_EPOCH_100NS
        self.value = max(self.value, stamp << 4)

    def tick(self) -> int:
        """The clock of the next message: one more than the last."""
        self.value += 1
        return self.value
