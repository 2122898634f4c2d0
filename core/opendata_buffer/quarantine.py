"""Copies of batches that could not be delivered, kept below the queue's data prefix.

A batch that no consumer can read would stop its queue forever. A program that skips it copies it
first::

    <prefix>/_quarantine/<id>.object   the bytes of the batch object, unchanged
    <prefix>/_quarantine/<id>.json     the report: which batch, its fault, when, found by whom

A task that is retried writes the same two objects again. The object is written before its report,
so if the report exists, the copy is complete. This library's collectors never delete either.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from opendata_buffer.errors import CorruptData, InvalidInput, ObjectNotFound
from opendata_buffer.formats.batch import is_confined, parse_location
from opendata_buffer.formats.manifest import BatchDescriptor, Metadata
from opendata_buffer.queue.sidecar import Sidecar, SidecarFields, read_sidecar
from opendata_buffer.runtime import Runtime, SystemRuntime, in_parallel
from opendata_buffer.stores.base import Blob, Get, List, Put, Store, WrongChecksum, read_bytes

FOLDER = "_quarantine"
MAX_OBJECT_BYTES = 1 << 30
"""Largest object that is copied, because the copy goes through this process's memory."""

_REPORT = Sidecar(
    "the report of a batch in quarantine",
    "Move it away; the batch itself is stored next to it, under the same name with '.object'.",
    max_bytes=64 * 1024 * 1024,
)


@dataclass(frozen=True, kw_only=True)
class QuarantineReport:
    """The report of one batch in quarantine."""

    id: str  # <sequence>-<12 hex digits of its location>
    sequence: int
    location: str  # key of the batch object that the queue named
    copied_bytes: int | None  # None when there was no object, or none that may be read
    error: str  # why the batch could not be delivered
    query: str  # what found it, such as a Spark query's id; empty for a command
    time: str  # when it was found, ISO 8601 in UTC, by the clock of the process that found it
    metadata: tuple[Metadata, ...] = ()  # from the queue entry
    restored_location: str | None = None  # the batch object that a restore made of the copy
    restored_after: int | None = None  # the queue's next sequence before that restore
    restored_sequence: int | None = None  # None until the append is confirmed

    def as_json(self) -> dict[str, Any]:
        """Return all fields, with the payloads of metadata in base64."""
        fields: dict[str, Any] = {"version": _REPORT.version, **vars(self)}
        return {**fields, "metadata": metadata_json(self.metadata)}


def metadata_json(metadata: Iterable[Metadata]) -> list[dict[str, Any]]:
    """Return ranges of records as JSON, with payloads in base64."""
    return [
        {
            "start_index": each.start_index,
            "ingestion_time_ms": each.ingestion_time_ms,
            "payload_base64": b64encode(each.payload).decode(),
        }
        for each in metadata
    ]


def quarantine(
    store: Store,
    data_path_prefix: str,
    entry: BatchDescriptor,
    error: object,
    *,
    runtime: Runtime,
    query: str = "",
) -> QuarantineReport:
    """Copy a batch's object and write the report. A batch keeps its first report and copy.

    For an object outside the data prefix, only the report is written. Otherwise a forged manifest
    could have any object of the bucket copied to a place that more people may read (failure F23).

    Args:
        store: The queue's store.
        data_path_prefix: The queue's data prefix.
        entry: The queue entry of the batch.
        error: Why the batch could not be delivered.
        runtime: Its clock is used.
        query: The finder of the batch, such as a Spark query's id; empty for a command.

    Returns:
        The report.

    Raises:
        InvalidInput: The object is larger than 1 GiB. Nothing was written.
    """
    # The name contains the location, because a recreated queue counts from 0 again.
    digest = hashlib.sha256(entry.location.encode(errors="surrogatepass")).hexdigest()
    name = f"{entry.sequence}-{digest[:12]}"
    with suppress(ObjectNotFound):
        return read_report(store, data_path_prefix, name)
    data = _read(store, entry) if is_confined(entry.location, data_path_prefix) else None
    if data is not None:
        store.put(_key(data_path_prefix, name, "object"), data)
    at = datetime.fromtimestamp(runtime.now_ms() / 1000, UTC)
    report = QuarantineReport(
        id=name,
        sequence=entry.sequence,
        location=entry.location,
        copied_bytes=None if data is None else len(data),
        error=str(error),
        query=query,
        time=at.isoformat(timespec="milliseconds"),
        metadata=tuple(entry.metadata),
    )
    write_report(store, data_path_prefix, report)
    return report


def list_quarantine(
    store: Store,
    data_path_prefix: str,
    runtime: Runtime | None = None,
    *,
    names: Sequence[str] | None = None,
    unreadable: Callable[[CorruptData], None] | None = None,
) -> list[QuarantineReport]:
    """Read the reports below a data prefix.

    Args:
        store: The queue's store.
        data_path_prefix: The queue's data prefix.
        runtime: Threads.
        names: Only these ids, if they exist. Default: all.
        unreadable: Called with the error of each report that cannot be read. Default: raise it.

    Returns:
        The reports, by sequence.

    Raises:
        CorruptData: A report cannot be read, and ``unreadable`` was not given.
    """
    if names is None:
        names = quarantined_names(store, data_path_prefix)

    def read(name: str) -> QuarantineReport | CorruptData | None:
        try:
            return read_report(store, data_path_prefix, name)
        except ObjectNotFound:
            return None  # deleted between the listing and now
        except CorruptData as error:
            return error

    found = in_parallel(SystemRuntime() if runtime is None else runtime, read, names)
    for each in found:
        if isinstance(each, CorruptData):
            if unreadable is None:
                raise each
            unreadable(each)
    reports = [each for each in found if isinstance(each, QuarantineReport)]
    return sorted(reports, key=lambda each: (each.sequence, each.id))


def quarantined_names(store: List, data_path_prefix: str, *, limit: int | None = None) -> list[str]:
    """List the batches in quarantine.

    Args:
        store: The queue's store.
        data_path_prefix: The queue's data prefix.
        limit: List at most this many objects; a batch has one or two. None for all.

    Returns:
        Their ids, by sequence.
    """
    keys = [info.key for info in store.list(f"{data_path_prefix}/{FOLDER}/", limit=limit).objects]
    split = [posixpath.splitext(posixpath.basename(each)) for each in keys]
    return sorted((name for name, suffix in split if suffix == ".json"), key=_sequence)


def _sequence(name: str) -> int:
    first = name.partition("-")[0]
    return int(first) if first.isascii() and first.isdigit() and len(first) <= 20 else -1


def read_report(store: Get, data_path_prefix: str, name: str) -> QuarantineReport:
    """Read the report of one id.

    Args:
        store: The queue's store.
        data_path_prefix: The queue's data prefix.
        name: The id.

    Returns:
        The report.

    Raises:
        ObjectNotFound: There is no such report.
        CorruptData: The report cannot be read, or does not belong to a batch of this queue.
    """
    key = _key(data_path_prefix, name, "json")
    found = read_sidecar(store, key, _REPORT, lambda data: _report(_REPORT.decode(data)))
    # A forged name would have its copy read, or the restored batch written, elsewhere.
    to = found.restored_location
    if found.id != name or (to is not None and parse_location(to, data_path_prefix) is None):
        wrong = f"id {found.id!r} and restored_location {to!r}"
        fault = _REPORT.unreadable(f"{wrong} are not those of a batch of this queue")
        raise CorruptData(f"{key!r}: {fault}")
    return found


def write_report(store: Put, data_path_prefix: str, report: QuarantineReport) -> None:
    """Write a report in place of the one with its id."""
    text = json.dumps(report.as_json(), indent=2) + "\n"
    store.put(_key(data_path_prefix, report.id, "json"), text.encode())


def read_copy(store: Get, data_path_prefix: str, report: QuarantineReport) -> bytes:
    """Return the copied object's bytes."""
    return read_bytes(store, _key(data_path_prefix, report.id, "object"), MAX_OBJECT_BYTES)


def _report(fields: SidecarFields) -> QuarantineReport:
    metadata = tuple(map(_metadata, fields.objects("metadata")))
    copied_bytes = fields.number("copied_bytes", None)
    return fields.into(QuarantineReport, metadata=metadata, copied_bytes=copied_bytes)


def _metadata(fields: SidecarFields) -> Metadata:
    try:
        payload = b64decode(fields.text("payload_base64"), validate=True)
    except ValueError:
        raise fields.wrong("payload_base64", "base64") from None
    ingested_ms = fields.number("ingestion_time_ms", least=-(2**63), most=2**63 - 1)
    return Metadata(fields.number("start_index"), ingested_ms, payload)


def _read(store: Get, entry: BatchDescriptor) -> bytes | None:
    """Return the object's bytes; None if there is no such object, or its key is invalid."""
    try:
        return read_bytes(store, entry.location, MAX_OBJECT_BYTES)
    except (ObjectNotFound, InvalidInput):
        return None
    except WrongChecksum:  # Copied as it is (failure F36): a part is not compared.
        part = store.get(entry.location, byte_range=(0, MAX_OBJECT_BYTES))
        return part.data if isinstance(part, Blob) else None
    except CorruptData as error:
        raise InvalidInput(
            f"batch {entry.sequence} at {entry.location!r} is too large to be copied to the "
            f"quarantine: {error}. Copy it yourself, delete it, and try again"
        ) from error


def _key(data_path_prefix: str, name: str, suffix: str) -> str:
    return f"{data_path_prefix}/{FOLDER}/{name}.{suffix}"
