"""How much waits, from manifests alone: cheap enough to be asked every few seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from opendata_buffer.admin.observe import Observer
from opendata_buffer.concurrency import together
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["Backlog", "read_backlog"]


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in a queue, or in all partitions of a topic.

    Attributes:
        batches: How many, in all.
        lag_seconds: Age of the oldest batch of all, by its producer's clock and ours; 0 when
            nothing waits.
    """

    batches: int
    lag_seconds: float

    def excess(self, max_lag: float | None, max_batches: int | None) -> list[str]:
        """What is too much, in words; empty when nothing is."""
        found = []
        if max_lag is not None and self.lag_seconds > max_lag:
            found.append(f"the oldest waits {self.lag_seconds:.1f} s, more than {max_lag:g}")
        if max_batches is not None and self.batches > max_batches:
            found.append(f"{self.batches:,} wait, more than {max_batches:,}")
        return found


def read_backlog(
    store: Store, configs: Iterable[QueueConfig], runtime: Runtime, *, topic: bool = False
) -> Backlog:
    """Read the manifests, all at once.

    Args:
        store: Where the queues are.
        configs: Of each queue.
        runtime: Clock and threads.
        topic: They are partitions, which need not have been written yet.

    Raises:
        InvalidInput: There is no such queue.
        QueueReset, CorruptManifest, StorageError: A manifest could not be read.
    """

    def read(config: QueueConfig) -> Manifest:
        observer = Observer(store, config, runtime)
        return observer.find() or Manifest.empty() if topic else observer.manifest()

    manifests = together(runtime, read, configs)
    now_ms = runtime.now_ms()
    oldest_s = max((each.age_s(now_ms) or 0.0 for each in manifests), default=0.0)
    return Backlog(sum(each.entry_count for each in manifests), oldest_s)
