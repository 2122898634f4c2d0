"""Whose a queue is: its epoch, and who said to have claimed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opendata_buffer.admin.observe import Observer
from opendata_buffer.queue.consumer_info import ConsumerInfo, read_consumer_info

__all__ = ["Ownership", "read_ownership"]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Who reads a queue.

    Attributes:
        partition: The queue's data prefix.
        epoch: Of the last consumer; 0 before the first.
        holder: Who claimed that epoch, or an earlier one; None when nobody said so.
        since_seconds: How long ago the holder claimed it, by its clock and ours.
    """

    partition: str
    epoch: int
    holder: ConsumerInfo | None
    since_seconds: float | None

    @property
    def known(self) -> bool:
        """Whether the holder is the one of this epoch."""
        return self.holder is not None and self.holder.epoch == self.epoch

    def as_json(self) -> dict[str, Any]:
        """All fields by name, those of the holder beside them; ``known`` tells whose they are."""
        holder = self.holder
        return {
            "partition": self.partition,
            "epoch": self.epoch,
            "known": self.known,
            "holder_epoch": None if holder is None else holder.epoch,
            "host": None if holder is None else holder.host,
            "process": None if holder is None else holder.process,
            "program": None if holder is None else holder.program,
            "query": None if holder is None else holder.query or None,
            "since_ms": None if holder is None else holder.since_ms,
            "since_seconds": self.since_seconds,
        }


def read_ownership(observer: Observer) -> Ownership:
    """Read the note, then the manifest: a note is never newer than what it is compared with.

    Raises:
        InvalidInput: There is no queue.
        CorruptData: The note or the manifest cannot be read.
        StorageError: The store did not answer.
    """
    holder = read_consumer_info(observer.store, observer.config, observer.runtime)
    manifest = observer.manifest()
    since = None if holder is None else (observer.runtime.now_ms() - holder.since_ms) / 1000
    return Ownership(
        partition=observer.config.data_path_prefix,
        epoch=0 if manifest.sealed else manifest.epoch,
        holder=holder,
        since_seconds=since,
    )
