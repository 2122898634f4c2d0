"""A queue as OpenTelemetry's exporter lays it out, written without this library's queue."""

from __future__ import annotations

from collections.abc import Sequence

from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.stores.base import Store
from opendata_buffer.testing.runtime import ManualRuntime

DATA, MANIFEST = "ingest/otel/logs/data", "ingest/otel/logs/manifest"
"""The exporter's ``data_path_prefix`` and ``manifest_path``, as its documentation sets them."""

LOGS = bytes([1, 2, 1, 0])
"""The metadata of a record with logs."""

RUN_MS = 1_767_225_600_000  # start of the exporter, long before any grace period


def export(
    store: Store,
    *records: bytes,
    data: str = DATA,
    manifest: str = MANIFEST,
    metadata: Sequence[bytes] = (),
    queued: bool = True,
) -> list[str]:
    """Write a batch for each record and, if ``queued``, the manifest; returns the locations.

    There is no owner marker, and batches have the names of OpenData's Go producer.
    """
    run = ManualRuntime(RUN_MS).ulid_at(RUN_MS)
    keys = [f"{data}/{run}/{number:016x}" for number in range(len(records))]
    payloads = metadata or [LOGS] * len(records)
    entries = [
        NewEntry(key, (Metadata(0, RUN_MS, payload),))
        for key, payload in zip(keys, payloads, strict=True)
    ]
    for key, record in zip(keys, records, strict=True):
        store.put(key, encode_batch([record]))
    if queued:
        store.put(manifest, Manifest.empty().append(entries).raw)
    return keys


def there(store: Store, data: str = DATA) -> list[str]:
    """Return the locations of the batches that are still stored."""
    return [found.key for found in store.list(f"{data}/").objects if found.key.count("_") == 0]
