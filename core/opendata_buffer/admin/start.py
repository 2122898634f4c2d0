"""Where in a queue to begin, in an operator's words. Pure.

``earliest`` is the oldest queued batch and ``latest`` the end; a whole number is a sequence; a
time is the first batch with a record that was taken in then or later, as the Spark source's
``startingTimestamp`` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import location_timestamp_ms
from opendata_buffer.formats.manifest import Manifest, QueueEntry

__all__ = ["EARLIEST", "LATEST", "Start"]

EARLIEST = "earliest"
LATEST = "latest"
_MOST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Start:
    """A place in any queue: a word, a sequence or a time.

    Attributes:
        text: As it was given.
        sequence: The batch to begin with; None for the others.
        since_ms: Milliseconds since the Unix epoch; None for the others.
    """

    text: str
    sequence: int | None = None
    since_ms: int | None = None

    @classmethod
    def parse(cls, text: str) -> Start:
        """Read ``earliest``, ``latest``, a sequence, or a time in ISO 8601, UTC without a zone.

        Raises:
            InvalidInput: It is none of them.
        """
        if text in (EARLIEST, LATEST):
            return cls(text)
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
            return cls(text, sequence=int(text))
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidInput(
                f"{text!r} is no place in a queue: use {EARLIEST}, {LATEST}, a sequence such as "
                "42, or a time such as 2026-01-31T03:00:00Z"
            ) from None
        if at.tzinfo is None:
            at = at.replace(tzinfo=UTC)
        return cls(text, since_ms=round(at.timestamp() * 1000))

    def sequence_in(self, manifest: Manifest, key: str) -> int:
        """The sequence it means in a queue; ``manifest.next_sequence`` is the end.

        Args:
            manifest: The queue's.
            key: The manifest's name, for messages.

        Raises:
            InvalidInput: A sequence that has left the queue, or that it has not reached.
        """
        if self.since_ms is not None:
            return _first_since(manifest, self.since_ms)
        if self.sequence is None:
            return manifest.first_sequence if self.text == EARLIEST else manifest.next_sequence
        if manifest.first_sequence <= self.sequence <= manifest.next_sequence:
            return self.sequence
        first, end = manifest.first_sequence, manifest.next_sequence
        held = f"it holds {first} to {end - 1}" if manifest.entry_count else "it is empty"
        if self.sequence < first:
            raise InvalidInput(
                f"sequence {self.sequence} has left the queue with manifest {key!r}: {held}. "
                f"Begin at {EARLIEST}; what was passed by on purpose is in 'opendata-buffer "
                "quarantine list'"
            )
        raise InvalidInput(
            f"sequence {self.sequence} is beyond the end of the queue with manifest {key!r}: "
            f"{held}, and the next batch gets {end}. Use {LATEST} for the end"
        )


def _first_since(manifest: Manifest, since_ms: int) -> int:
    for entry in manifest.entries():
        taken_in_ms = _newest_ms(entry)
        # One of which nobody knows when it came rather comes too often than never.
        if taken_in_ms is None or taken_in_ms >= since_ms:
            return entry.sequence
    return manifest.next_sequence


def _newest_ms(entry: QueueEntry) -> int | None:
    times = [each.ingestion_time_ms for each in entry.metadata]
    return max(times) if times else location_timestamp_ms(entry.location)
