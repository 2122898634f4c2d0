"""Read the manifest of a queue, and refuse one that went back.

:mod:`opendata_buffer.formats.manifest` knows the bytes of a manifest. This module knows the object
in the store: how to open it for compare-and-swap, and which states of it must not be trusted.

A manifest only moves forward: its next sequence and its epoch never fall. If they do, or if the
object is gone, then an operator, a lifecycle rule or a restored backup has changed it. Continuing
would reuse sequences that consumers have already acknowledged (failure F4). So there is one rule
for every process::

    seen before        now                 result
    ends at 42         ends at 50          continue
    ends at 42         ends at 30          QueueReset: it was restored from an old copy
    ends at 42         gone                QueueReset: it was deleted, and is not created again
    nothing            gone                this is a new queue

"Seen before" is a :class:`.Watermark`: from the owner marker, from the last read of this process,
or from the position that a consumer has saved (:func:`check_resume`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opendata_buffer import errors
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest
from opendata_buffer.hints import Action, Hint, QueueName, Setting
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.marker import Watermark, is_rebuilt_at
from opendata_buffer.runtime import Runtime


def manifest_object(
    store: CasStore,
    config: QueueConfig,
    runtime: Runtime,
    *,
    if_unreadable: Callable[[errors.CorruptData, str], Manifest] | None = None,
    check_read: Callable[[Manifest, Manifest], None] | None = None,
    after_conflict: Callable[[], float | None] | None = None,
) -> CasObject[Manifest]:
    """Open the manifest of a queue, to read and change it.

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep.
        if_unreadable: See :class:`.CasObject`.
        check_read: See :class:`.CasObject`.
        after_conflict: See :class:`.CasObject`.

    Returns:
        The object. Nothing was read yet.
    """
    queue = queue_name(store.url, config)
    return CasObject(
        store,
        config.manifest_path,
        decode=lambda data: parse_manifest(data, queue),
        encode=lambda manifest: manifest.raw,
        runtime=runtime,
        settings=config,
        max_bytes=MAX_MANIFEST_BYTES,
        if_unreadable=if_unreadable,
        check_read=check_read,
        after_conflict=after_conflict,
    )


def read_manifest(store: CasStore, config: QueueConfig, runtime: Runtime) -> Manifest | None:
    """Read the manifest of a queue once.

    Args:
        store: The opened store of the queue.
        config: The queue.
        runtime: Clock and sleep.

    Returns:
        The manifest, or None if it does not exist.

    Raises:
        CorruptManifest: It is damaged.
        StorageError: The store did not answer.
    """
    found = manifest_object(store, config, runtime).read()
    return found if isinstance(found, Manifest) else None


def parse_manifest(data: bytes, queue: QueueName) -> Manifest:
    """Parse the manifest of a queue, which its errors name.

    Args:
        data: The whole object.
        queue: The queue.

    Returns:
        The manifest.

    Raises:
        CorruptManifest: The manifest is damaged.
    """
    try:
        return Manifest.parse(data).of(queue)
    except errors.CorruptManifest as error:
        error.at(queue)
        raise


def check_reached(seen: Watermark, now: Manifest | None, config: QueueConfig, url: str) -> None:
    """Refuse a manifest that is gone or below its known state.

    Args:
        seen: The state that it had reached.
        now: The manifest as it was just read; None if it does not exist.
        config: The queue.
        url: The URL of the store.

    Raises:
        QueueReset: The manifest is gone or went back (failure F4).
    """
    if seen.allows(now):
        return
    if now is None:
        what = (
            f"is gone from {url}: it had reached next sequence {seen.next_sequence} and epoch "
            f"{seen.epoch}"
        )
    else:
        what = (
            f"in {url} went backwards: next sequence {seen.next_sequence} -> {now.next_sequence}, "
            f"epoch {seen.epoch} -> {now.epoch}. It was deleted and recreated, or restored from an "
            "old copy"
        )
    queue = queue_name(url, config)
    raise errors.QueueReset(
        f"manifest {config.manifest_path!r} {what}",
        Hint(Action.RESTORE_OR_REBUILD_MANIFEST, queue),
        Hint(Action.START_OVER, queue),
    )


def vanished(config: QueueConfig, url: str) -> errors.QueueReset:
    """Return the error for a manifest that was deleted while this process used it."""
    return errors.QueueReset(
        f"manifest {config.manifest_path!r} in {url} vanished while in use. It is not "
        "recreated: sequences would start again at 0 and acknowledged positions would hide "
        "new batches.",
        Hint(Action.RESTORE_OR_REBUILD_MANIFEST, queue_name(url, config)),
        "Check lifecycle rules on the bucket.",
    )


def check_resume(
    now: Manifest | None,
    last_acked: int,
    config: QueueConfig,
    url: str,
    *,
    allow_data_loss: bool,
    skipped: Sequence[tuple[int, int]] = (),
) -> None:
    """Check that a consumer can continue after the last batch that it acknowledged.

    Args:
        now: The manifest as it was just read; None if it does not exist.
        last_acked: The sequence of that batch.
        config: The queue.
        url: The URL of the store.
        allow_data_loss: Accept that later batches were removed by another consumer.
        skipped: Ranges of sequences that never held batches, for the error.

    Raises:
        InvalidInput: The sequence is negative.
        QueueReset: The queue does not exist, or ends before this batch (failure F27).
        DataLoss: Later batches were removed, and ``allow_data_loss`` is false.
    """
    if last_acked < 0:
        raise errors.InvalidInput(
            f"last_acked_sequence is {last_acked}: use None to start at the oldest entry"
        )
    if now is None:
        raise errors.QueueReset(
            f"cannot resume after sequence {last_acked}: manifest {config.manifest_path!r} does "
            f"not exist in {url}. The queue was deleted, or the URL, ",
            Setting("data_path_prefix"),
            " or ",
            Setting("manifest_path"),
            " is another queue's. Start without a position to create it.",
        )
    if last_acked >= now.next_sequence:
        why = ends_before(last_acked, now.next_sequence, config.manifest_path, url)
        raise errors.QueueReset(f"{why} Start without a position to read what is queued now.")
    if last_acked + 1 < now.first_sequence and not allow_data_loss:
        was_rebuilt = is_rebuilt_at(now.first_sequence, skipped)
        cause = "Another consumer read this queue. Resume from its position."
        raise errors.DataLoss(
            config.manifest_path,
            last_acked + 1,
            now.first_sequence,
            *(() if was_rebuilt else (cause,)),
            Hint(Action.ACCEPT_LOSS),
            skipped=skipped,
        )


def ends_before(last_acked: int, next_sequence: int, key: str, url: str) -> str:
    """Return an error text for a queue that ends before the batch after which to continue."""
    return (
        f"cannot resume after sequence {last_acked}: manifest {key!r} in {url} ends at "
        f"{next_sequence - 1}. The queue was recreated or the position belongs to another queue."
    )
