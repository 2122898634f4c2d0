"""Checks that a manifest continues what is known of its queue (failure F4). Pure.

A manifest only goes forward. One that is gone or behind was deleted, created again or restored
from an old copy: its sequences stand for other batches by now, and batches that wait to be read
may be named by nothing. So no process goes on with it; each error names the queue as the command
line takes it, in the command that repairs it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig
from opendata_buffer.errors import CorruptManifest, DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.manifest import Manifest, with_queue_in_hint


def queue_hint(url: str, config: QueueConfig) -> str:
    """A queue as the command line takes it: store, and the options that are not at their default.

    Quoted where a shell needs it.
    """
    prefix, manifest = config.data_path_prefix, config.manifest_path
    found = [url]
    if prefix != DEFAULT_DATA_PATH_PREFIX:
        found += ["--data-path-prefix", prefix]
    if manifest != f"{prefix}/manifest":
        found += ["--manifest-path", manifest]
    return shlex.join(found)


def parse_manifest(data: bytes, url: str, config: QueueConfig) -> Manifest:
    """A queue's manifest, which names itself where its entries turn out to be damaged.

    An error from here names the command; the caller, which has read the bytes, adds their key.
    """
    hint = queue_hint(url, config)
    try:
        return Manifest.parse(data).named(f"{config.manifest_path!r} in {url}", hint)
    except CorruptManifest as error:
        raise CorruptManifest(with_queue_in_hint(str(error), hint)) from error


@dataclass(frozen=True, slots=True)
class Watermark:
    """What a manifest has reached; later ones are never below it.

    ``acked`` is the highest sequence that a consumer took out of the manifest, ``acked_location``
    where that batch was; empty when that is not known.
    """

    next_sequence: int
    epoch: int
    acked: int | None = None
    acked_location: str = ""

    @classmethod
    def of(cls, manifest: Manifest, acked_location: str = "") -> Watermark:
        """The watermark of a manifest."""
        acked = manifest.first_sequence - 1 if manifest.first_sequence else None
        return cls(manifest.next_sequence, manifest.epoch, acked, acked_location)

    def allows(self, manifest: Manifest | None) -> bool:
        """Whether this manifest can follow: it is there, and is not behind (failure F4)."""
        return (
            manifest is not None
            and manifest.next_sequence >= self.next_sequence
            and manifest.epoch >= self.epoch
        )

    def covers(self, other: Watermark) -> bool:
        """Whether it is in nothing below the other."""
        return all(mine >= its for mine, its in zip(self._levels, other._levels, strict=True))

    def includes(self, other: Watermark) -> bool:
        """Whether it covers the other, and has the location of the last batch if the other has.

        A collector or a producer only reads the manifest and does not know where the last batch
        was: its note must not keep the consumer from adding that.
        """
        lacks_location = other.acked_location and not self.acked_location
        return self.covers(other) and not (self.acked == other.acked and lacks_location)

    def joined(self, other: Watermark) -> Watermark:
        """The lowest one that includes both."""
        further = max(self, other, key=lambda each: (each._levels[2], each.acked_location))
        return Watermark(
            max(self.next_sequence, other.next_sequence),
            max(self.epoch, other.epoch),
            further.acked,
            further.acked_location,
        )

    @property
    def _levels(self) -> tuple[int, int, int]:
        return self.next_sequence, self.epoch, -1 if self.acked is None else self.acked


def check_follows(known: Manifest, now: Manifest, config: QueueConfig, url: str) -> None:
    """Raise ``QueueReset`` for a manifest behind the one that this process read or wrote before."""
    seen = Watermark.of(known)
    if not seen.allows(now):
        raise QueueReset(f"{_went_backwards(seen, now, config, url)}. {_restore(config, url)}")


def check_reached(seen: Watermark, now: Manifest | None, config: QueueConfig, url: str) -> None:
    """Raise ``QueueReset`` for a manifest that is gone, or behind what the marker remembers."""
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
        f"{queue_hint(url, config)}' enqueues them again. To start over "
        "without them, use --recreate (in Python recreate=True)."
    )


def vanished(config: QueueConfig, url: str) -> QueueReset:
    """The error about a manifest that was deleted while this process used it."""
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
    """Refuse to resume after a batch that this queue does not have, or is far beyond.

    Raises:
        InvalidInput: ``last_acked`` is negative.
        QueueReset: The queue is not there, or ends before the batch (failure F27).
        DataLoss: Later batches were dequeued by another consumer, and that is not allowed.
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
    """The text of an error about a queue that ends before the batch to resume after."""
    return (
        f"cannot resume after sequence {last_acked}: manifest {key!r} in {url} ends at "
        f"{next_sequence - 1}. The queue was recreated or the position belongs to another queue."
    )


def _went_backwards(known: Watermark, now: Manifest, config: QueueConfig, url: str) -> str:
    return (
        f"manifest {config.manifest_path!r} in {url} went backwards: next sequence "
        f"{known.next_sequence} -> {now.next_sequence}, epoch {known.epoch} -> {now.epoch}. "
        "It was deleted and recreated, or restored from an old copy"
    )


def _restore(config: QueueConfig, url: str) -> str:
    return (
        "Stop producers, consumers and collectors. Restore the latest version (bucket "
        "versioning), or let 'opendata-buffer manifest rebuild "
        f"{queue_hint(url, config)}' enqueue the batches again that are still there."
    )
