"""Whether a manifest continues what is known of its queue (failure F4). Pure.

A manifest only goes forward. One that is gone or behind was deleted, made again or restored from
an old copy: its sequences stand for other batches by now, and batches that wait to be read may be
named by nothing. So nobody goes on with it; each error says what is to be done.
"""

from __future__ import annotations

from typing import Protocol

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.watermark import Watermark
from opendata_buffer.queue.words import shell_words

__all__ = ["check_follows", "check_reached", "check_resume", "ends_before", "vanished"]


class Reached(Protocol):
    """A manifest, or what is remembered of one."""

    @property
    def next_sequence(self) -> int: ...
    @property
    def epoch(self) -> int: ...


def check_follows(known: Manifest, now: Manifest, config: QueueConfig, url: str) -> None:
    """Refuse a manifest that is behind the one that this process read before.

    Args:
        known: As it was read or written before.
        now: As it was read just now.
        config: The queue.
        url: Of the store.

    Raises:
        QueueReset: It went backwards.
    """
    if not Watermark.of(known).allows(now):
        raise QueueReset(f"{_went_backwards(known, now, config, url)}. {_restore(config, url)}")


def check_reached(seen: Watermark, now: Manifest | None, config: QueueConfig, url: str) -> None:
    """Refuse a manifest that is gone, or behind what the queue's marker remembers.

    Args:
        seen: What the marker remembers.
        now: As it was read just now; None when there is none.
        config: The queue.
        url: Of the store.

    Raises:
        QueueReset: It is gone or went backwards.
    """
    if seen.allows(now):
        return
    what = (
        f"manifest {config.manifest_path!r} is gone from {url}: it had reached next sequence "
        f"{seen.next_sequence} and epoch {seen.epoch}"
        if now is None
        else _went_backwards(seen, now, config, url)
    )
    raise QueueReset(
        f"{what}. Batches that wait to be read may be named by nothing now. Stop producers, "
        "consumers and collectors. Then 'opendata-buffer manifest rebuild "
        f"{shell_words(url, config)}' enqueues them again. To start over "
        "without them, use --recreate (in Python recreate=True)."
    )


def vanished(config: QueueConfig, url: str) -> QueueReset:
    """What to raise when the manifest was deleted while this process used it."""
    return QueueReset(
        f"manifest {config.manifest_path!r} in {url} vanished while in use. It is not "
        "recreated: sequences would start again at 0 and acknowledged positions would hide "
        f"new batches. {_restore(config, url)} Check lifecycle rules on the bucket."
    )


def check_resume(
    now: Manifest | None,
    last_acked: int,
    config: QueueConfig,
    url: str,
    *,
    allow_data_loss: bool,
) -> None:
    """Refuse to read on behind a batch that this queue does not have, or is far beyond.

    Args:
        now: The manifest; None when there is none.
        last_acked: The sequence to go on behind.
        config: The queue.
        url: Of the store.
        allow_data_loss: Go on although batches behind it were dequeued.

    Raises:
        InvalidInput: ``last_acked`` is negative.
        QueueReset: The queue is not there, or ends before it (failure F27).
        DataLoss: Batches behind it were dequeued by somebody else, and that is not allowed.
    """
    if last_acked < 0:
        raise InvalidInput(
            f"last_acked_sequence is {last_acked}: use None to start at the oldest entry"
        )
    if now is None:
        raise QueueReset(
            f"cannot resume after sequence {last_acked}: manifest {config.manifest_path!r} does "
            f"not exist in {url}. The queue was deleted or the URL, data_path_prefix "
            "or manifest_path is another queue's. Start without a position to create it."
        )
    if last_acked >= now.next_sequence:
        why = ends_before(last_acked, now.next_sequence, config.manifest_path, url)
        raise QueueReset(f"{why} Start without a position to read what is queued now.")
    if last_acked + 1 < now.first_sequence and not allow_data_loss:
        raise DataLoss(
            config.manifest_path,
            last_acked + 1,
            now.first_sequence,
            "Another consumer read this queue. Resume from its position, or accept the loss "
            "explicitly.",
        )


def ends_before(last_acked: int, next_sequence: int, key: str, url: str) -> str:
    """What to say of a queue that ends before the batch that somebody goes on behind."""
    return (
        f"cannot resume after sequence {last_acked}: manifest {key!r} in {url} ends at "
        f"{next_sequence - 1}. The queue was recreated or the position belongs to another queue."
    )


def _went_backwards(known: Reached, now: Manifest, config: QueueConfig, url: str) -> str:
    return (
        f"manifest {config.manifest_path!r} in {url} went backwards: next sequence "
        f"{known.next_sequence} -> {now.next_sequence}, epoch {known.epoch} -> {now.epoch}. "
        "It was deleted and recreated, or restored from an old copy"
    )


def _restore(config: QueueConfig, url: str) -> str:
    return (
        "Stop producers, consumers and collectors. Restore the latest version (bucket "
        "versioning), or let 'opendata-buffer manifest rebuild "
        f"{shell_words(url, config)}' enqueue the batches again that are still there."
    )
