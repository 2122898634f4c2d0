"""Name a place in a queue, and find its sequence.

A command, a consumer, and an operator's function all take a place to begin or to end at. They mean
the same by it::

    earliest                      the oldest batch that is queued, or that the log keeps
    latest                        the end: only batches that are appended later come after it
    42                            before the batch with this sequence
    2026-01-31T03:00:00Z          before the first batch with a record of this time or later
    a Position                    after everything that was processed at this position

A place is the gap before a batch. So it serves as a start, and also as an end: reading from 40 to
42 gives 40 and 41. :meth:`Place.parse` reads the text of a command, :meth:`Place.of` takes a value
of Python, and :meth:`Place.sequence_in` finds the sequence in a queue as it is now.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from opendata_buffer.arguments import wrong_type
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.position import Position
from opendata_buffer.errors import InvalidInput, QueueReset
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log_view import LogView

EARLIEST = "earliest"
LATEST = "latest"
_MOST_DIGITS = 20

PlaceLike = str | int | datetime | Position
"""The values that name a place: ``earliest``, ``latest``, a sequence, a time, or a position."""

_FORMS = (
    "'earliest', 'latest', a sequence such as 42, or a time such as "
    "datetime(2026, 1, 31, 3, tzinfo=UTC)"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a queue: a word, a sequence, a time, or a saved position.

    Attributes:
        text: The place as the caller gave it.
        sequence: The sequence of the first batch after the place.
        since_ms: A time, in milliseconds since the Unix epoch. The place is before the first batch
            with a record of this time or later, as in Spark's ``startingTimestamp``.
        position: A position. The place is after everything that was processed there.
    """

    text: str
    sequence: int | None = None
    since_ms: int | None = None
    position: Position | None = None

    @property
    def is_earliest(self) -> bool:
        """Whether this is the oldest batch."""
        return self.text == EARLIEST

    @property
    def is_latest(self) -> bool:
        """Whether this is the end."""
        return self.text == LATEST

    @property
    def named_sequence(self) -> int | None:
        """The sequence of the first batch after the place, if the place itself says so."""
        return self.sequence if self.position is None else self.position.sequence + 1

    @property
    def is_of_one_queue(self) -> bool:
        """Whether this place has a meaning in one queue only, as a sequence does."""
        return self.named_sequence is not None

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse ``earliest``, ``latest``, a sequence, or an ISO 8601 time (UTC without a zone).

        Args:
            text: The argument of a command.

        Returns:
            The place.

        Raises:
            InvalidInput: The text has none of these forms.
        """
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
            return cls(text, sequence=int(text))
        found = _word_or_time(text)
        if found is None:
            raise InvalidInput(
                f"invalid position {text!r}: use {EARLIEST}, {LATEST}, a sequence such as "
                "42, or a time such as 2026-01-31T03:00:00Z"
            )
        return found

    @classmethod
    def of(cls, given: PlaceLike | Place, name: str = "start") -> Place:
        """Return the place that a value of Python names.

        Args:
            given: ``"earliest"``, ``"latest"``, a sequence, a time, or a position. A time is a
                ``datetime`` with a time zone, or its ISO 8601 text, which is UTC without a zone.
            name: The name of the argument, for the error.

        Returns:
            The place.

        Raises:
            InvalidInput: The value names no place, or could name two: a ``datetime`` without a time
                zone, or a number as text.
        """
        if isinstance(given, Place):
            return given
        if isinstance(given, Position):
            return cls(str(given), position=given)
        if isinstance(given, datetime):
            if given.tzinfo is None:
                raise InvalidInput(
                    f"{name} is {given.isoformat()}, which has no time zone. Add one, such as "
                    f"{name}=datetime(..., tzinfo=UTC), or use datetime.now(UTC)"
                )
            return cls(given.isoformat(), since_ms=_in_ms(given))
        if type(given) is int and given >= 0:
            return cls(str(given), sequence=given)
        if isinstance(given, str):
            return _of_text(given, name)
        if type(given) is int:
            raise InvalidInput(f"{name} is {given}: use {_FORMS}")
        raise wrong_type(name, given, _FORMS)

    def sequence_in(
        self, view: Manifest | LogView, config: QueueConfig, url: str, queue_id: str = ""
    ) -> int:
        """Find the sequence of this place in a queue.

        Makes no request for a manifest. A time in a log costs up to one read of a segment for each
        level of the index.

        Args:
            view: The manifest, or the view of the log.
            config: The queue.
            url: The URL of its store.
            queue_id: The id of the queue, to compare a position with. Empty to compare nothing. The
                view of a log knows its own.

        Returns:
            The sequence of the first batch after the place. For the end of the queue it is the
            sequence that the next batch will get.

        Raises:
            InvalidInput: The sequence has left the queue, or is past its end.
            QueueReset: The position belongs to another queue.
        """
        if self.since_ms is not None:
            return view.since(self.since_ms)
        first, end = view.first_sequence, view.next_sequence
        wanted = self.named_sequence
        if self.position is not None:
            own = view.index.queue_id if isinstance(view, LogView) else queue_id
            if own and self.position.queue_id not in ("", own):
                raise QueueReset(
                    f"position {self.position} is not in the queue with manifest "
                    f"{config.manifest_path!r} in {url}, which is {own}: the queue was deleted and "
                    "created again, or the store or the prefix was changed."
                )
        if wanted is None:
            return first if self.is_earliest else end
        if first <= wanted <= end:
            return wanted
        where = f"the queue with manifest {config.manifest_path!r}: {range_of(view)}"
        if wanted < first:
            raise InvalidInput(
                f"sequence {wanted} has left {where}. Begin at {EARLIEST}",
                Hint(Action.LIST_SKIPPED, queue_name(url, config)),
            )
        raise InvalidInput(
            f"sequence {wanted} is beyond the end of {where}, and the next batch gets {end}. Use "
            f"{LATEST} for the end"
        )


def range_of(view: Manifest | LogView) -> str:
    """Return the sequences that a queue has, in words."""
    if not view.entry_count:
        return "it is empty"
    return f"it holds {view.first_sequence} to {view.next_sequence - 1}"


def _word_or_time(text: str) -> Place | None:
    if text in (EARLIEST, LATEST):
        return Place(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return Place(text, since_ms=_in_ms(at if at.tzinfo is not None else at.replace(tzinfo=UTC)))


def _of_text(text: str, name: str) -> Place:
    if text.isascii() and text.isdigit():
        # The text of a position without a queue's id is a number, too, and means the batch after.
        raise InvalidInput(
            f"{name} is {text!r:.40}, a text. Give the number {text:.20} for the place before that "
            "batch, or a Position for the place after it"
        )
    if (found := _word_or_time(text)) is not None:
        return found
    try:
        return Place(text, position=Position.parse(text))
    except InvalidInput:
        raise InvalidInput(f"{name} is {text!r:.80}: use {_FORMS}") from None


def _in_ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)
