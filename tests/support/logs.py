"""A log to test with, and all that it keeps."""

from __future__ import annotations

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.log import Log, LogView
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.readers import enable_readers
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

DAY_MS = 86_400_000


def make_log(config: QueueConfig, grace_ms: int | None = None) -> Store:
    """Make a log of a queue, which need not be there, whose readers expire after a day."""
    store, runtime = open_store(config.store, config.store_options), SystemRuntime()
    claim = claim_for_writing(store, config, runtime=runtime, grace_ms=grace_ms)
    enable_readers(store, config, claim, runtime, retention_ms=None, reader_expiry_ms=DAY_MS)
    return store


def open_view(
    store: CasStore, config: QueueConfig, runtime: Runtime, manifest: Manifest
) -> LogView:
    """All that a log keeps, behind a manifest that was just read."""
    log = Log(store, config, runtime)
    return log.view(log.need(), manifest)
