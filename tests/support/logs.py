"""A log to test with, and everything that it retains."""

from __future__ import annotations

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.reader_admin import enable_readers
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

DAY_MS = 86_400_000


def become_log(
    store: Store,
    config: QueueConfig,
    runtime: Runtime,
    *,
    retention_ms: int | None = None,
    grace_ms: int | None = None,
) -> None:
    """Turn a queue, which need not exist, into a log whose readers expire after a day."""
    claim = claim_for_writing(store, config, runtime=runtime, grace_ms=grace_ms)
    times = {"retention_ms": retention_ms, "reader_expiry_ms": DAY_MS}
    enable_readers(store, config, claim, runtime, **times)


def make_log(config: QueueConfig, grace_ms: int | None = None) -> Store:
    """Open the store of a queue, and turn the queue into a log."""
    store = open_store(config.store, config.store_options)
    become_log(store, config, SystemRuntime(), grace_ms=grace_ms)
    return store


def open_view(
    store: CasStore, config: QueueConfig, runtime: Runtime, manifest: Manifest
) -> LogView:
    """Return the view of everything that a log retains, given a manifest that was just read."""
    log = Log(store, config, runtime)
    return LogView.of(log, log.need(), manifest)
