"""Describe a log and its readers, and find what an operator must repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from opendata_buffer import errors
from opendata_buffer.admin.notes import Notes
from opendata_buffer.admin.readers import ReaderStatus, readers_of
from opendata_buffer.admin.target import Target
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.hints import Action, Hint, QueueName, Surface
from opendata_buffer.queue.consumer_note import ConsumerInfo
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import skipped_ranges
from opendata_buffer.queue.missing import Missing, find_missing

_MESSAGE = b"/message="

SHOWN_READERS = 20  # in advice about what is gone; more are left out

CHECKED_SEGMENTS = 16
"""Most segments that a status reads: the next ones of the readers that are furthest back."""


@dataclass(frozen=True, kw_only=True)
class LogStatus:
    """The content and the readers of a log. Fields are sequences or counts of batches."""

    floor: int  # the first sequence that is kept
    first: int  # the first one from the floor on whose batch still exists
    end: int  # sequence of the next batch
    kept: int
    in_segments: int  # how many of them are in segments
    missing: int = 0  # batches whose objects are gone, if the status had a reason to look
    first_readable: int | None = None  # the first sequence after them
    retention_ms: int | None
    retention_bytes: int | None
    reader_expiry_ms: int
    readers: tuple[ReaderStatus, ...] = ()


def read_log(
    queue: Target,
    view: LogView,
    missing: Missing | None,
    sizes: Mapping[str, int] | None,
    notes: Notes,
) -> tuple[LogStatus, str]:
    """Read the positions of a log's readers, and the segments that they read next.

    Args:
        queue: The log.
        view: All that it keeps.
        missing: The batches whose objects are gone.
        sizes: Bytes of the batches, by key; None if some are not known.
        notes: Gets the problems that were found.

    Returns:
        The status of the log; and why its readers fail, empty if they do not.
    """
    readers = notes.result_of(lambda: readers_of(queue, view, unreadable=notes.add)) or []
    if sizes is not None:
        readers = [_with_bytes(reader, view, sizes) for reader in readers]
    notes += [*_log_notes(view, readers), *missing_positions(readers, queue.name)]
    gone, stuck = gone_note(view, readers, missing)
    damage = "" if gone else first_damage(view, readers)
    notes += [note for note in (gone, damage) if note]
    return describe_log(view, readers, missing), gone if stuck else damage


def describe_log(
    view: LogView, readers: Sequence[ReaderStatus], missing: Missing | None
) -> LogStatus:
    """Return the status of a log.

    Args:
        view: All that it keeps.
        readers: Its readers.
        missing: The batches whose objects are gone; None if none are known.

    Returns:
        The status.
    """
    index, floor = view.index, view.first_sequence
    return LogStatus(
        floor=floor,
        first=min(view.available_from(floor), view.next_sequence),
        end=view.next_sequence,
        kept=view.entry_count,
        in_segments=view.count(floor, min(index.end, view.manifest.first_sequence)),
        missing=0 if missing is None else missing.count,
        first_readable=None if missing is None else missing.end,
        retention_ms=index.retention_ms,
        retention_bytes=index.retention_bytes,
        reader_expiry_ms=index.reader_expiry_ms,
        readers=tuple(readers),
    )


def missing_of(view: LogView, consumer: ConsumerInfo | None, manifest: Manifest) -> Missing | None:
    """Search a log for batches whose objects are gone.

    The search is only made if a consumer that does not know logs seems to have run, because the
    collector of such a consumer deletes objects.
    """
    known = consumer is not None and consumer.epoch == manifest.epoch
    if (known and not view.lost) or manifest.sealed:
        return None
    try:
        return find_missing(view, view.first_sequence)
    except (errors.CorruptData, errors.StorageError):
        return None  # another note reports parts that cannot be read


def without_missing(view: LogView, missing: Missing | None) -> LogView:
    """Return the view of a log that knows which objects are gone."""
    if missing is None:
        return view
    return replace(view, missing=((missing.first, missing.end),))


def gone_note(
    view: LogView, readers: Sequence[ReaderStatus], missing: Missing | None
) -> tuple[str, bool]:
    """Return advice about batches that are gone, and whether a reader is stuck there."""
    if missing is None:
        return "", False
    stuck = [each for each in readers if each.next_sequence < missing.end]
    go_on: str | Hint = "No reader needs them."
    if stuck:
        readers_stuck = tuple(reader.name for reader in stuck[:SHOWN_READERS])
        queue = queue_name(view.log.store.url, view.log.config)
        go_on = Hint(Action.RESET_READERS_PAST, queue, missing.end, readers=readers_stuck)
    return (
        f"{missing}. The collector of a consumer that knows no log (v1) deletes what segments "
        f"name: stop it first. {go_on}"
    ), bool(stuck)


def _with_bytes(reader: ReaderStatus, view: LogView, sizes: Mapping[str, int]) -> ReaderStatus:
    """Return the status with the bytes that wait, if the manifest names all of their batches."""
    behind = max(reader.next_sequence, view.first_sequence) - view.manifest.first_sequence
    if behind < 0:
        return reader
    waiting = view.manifest.locations()[behind:]
    return replace(reader, lag_bytes=sum(sizes.get(each, 0) for each in waiting))


def first_damage(view: LogView, readers: Sequence[ReaderStatus]) -> str:
    """Return why the readers that are furthest back fail; read the next segment of each."""
    begins = {max(each.next_sequence, view.first_sequence) for each in readers}
    for begin in sorted({view.first_sequence, *begins})[:CHECKED_SEGMENTS]:
        try:
            view.entries(begin, 1)
        except errors.CorruptData as error:
            return f"readers are refused at sequence {begin}: {error.text(Surface.SHELL)}"
    return ""


def _log_notes(view: LogView, readers: Sequence[ReaderStatus]) -> Iterator[str]:
    """Yield the notes about a log (failure F42)."""
    for each in readers:
        if each.stopped:
            yield f"{each.stopped}. To continue, delete it and add it again with another prefix"
        elif each.expires_soon:
            yield (
                f"reader {each.name!r} expires in {each.expires_seconds / 3600:,.1f} h: then what "
                "only it has not read is deleted. Start it, or delete it"
            )
    log = view.log
    skipped = skipped_ranges(log.store, log.config, log.runtime) if view.lost else ()
    for first, end in view.lost:
        begin = next((begin for begin, after in skipped if first <= begin and after == end), None)
        if end > view.first_sequence and begin is not None:
            lost = (
                f"sequences {first} to {begin - 1} are gone from the log" if first < begin else ""
            )
            yield (
                f"the manifest was rebuilt: {lost}{', and ' if lost else ''}sequences {begin} to "
                f"{end - 1} never held batches. The batches of the old manifest were queued again "
                f"from {end} on, unless they had been read or their objects were gone"
            )
        elif end > view.first_sequence:
            yield (
                f"sequences {first} to {end - 1} are gone: a consumer that knows no readers (v1) "
                "took them off the log, or the manifest was rebuilt. Stop such a consumer, or let "
                "it continue as a reader"
            )
    if view.first_sequence < view.manifest.first_sequence and _MESSAGE in view.manifest.raw:
        yield (
            f"open transactions are those that begin in the last {view.manifest.entry_count:,} "
            "batches, which are in the manifest"
        )


def missing_positions(readers: Sequence[ReaderStatus], queue: QueueName) -> Iterator[str]:
    """Find the readers whose positions are gone.

    Args:
        readers: The readers.
        queue: The name of the queue.

    Yields:
        A note for each of them.
    """
    for reader in readers:
        if reader.position_missing:
            hint = Hint(Action.KEEP_OR_DELETE_READER, queue, readers=(reader.name,))
            yield (
                f"the position of reader {reader.name!r} is missing: it was deleted, or 'readers "
                "delete' was interrupted. The reader keeps everything from sequence "
                f"{reader.next_sequence} on, and expires in {reader.expires_seconds / 3600:,.1f} h "
                f"if a collector runs. {hint}"
            )
