"""Whether every queued batch is there and readable. Reads only, and goes on after a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, CorruptManifest, ObjectNotFound
from opendata_buffer.formats.arrow import decode_arrow
from opendata_buffer.formats.keys import is_confined
from opendata_buffer.formats.manifest import QueueEntry
from opendata_buffer.runtime import Runtime
from opendata_buffer.status import open_queue, read_manifest
from opendata_buffer.stores import Get, NotModified, Store

__all__ = ["Finding", "Report", "check_batch", "check_queue"]


@dataclass(frozen=True)
class Finding:
    """Something worth telling about one entry, or about the manifest itself.

    Attributes:
        sequence: The entry; None for the manifest.
        location: Its object; the manifest's key for the manifest.
        problem: What is wrong.
    """

    sequence: int | None
    location: str
    problem: str

    def __str__(self) -> str:
        where = "manifest" if self.sequence is None else f"sequence {self.sequence}"
        return f"{where} {self.location!r}: {self.problem}"


@dataclass
class Report:
    """The outcome of a check.

    Attributes:
        batches: Entries checked.
        records: Records in the readable ones.
        bytes: Bytes of their objects.
        problems: What a consumer will stumble over.
        notes: What is legal but odd.
    """

    batches: int = 0
    records: int = 0
    bytes: int = 0
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether a consumer can read the queue to its end."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """All fields and ``ok``."""
        return {"ok": self.ok, **asdict(self)}


def check_queue(
    store: Store,
    config: QueueConfig,
    runtime: Runtime,
    *,
    max_batch_bytes: int,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Check the manifest's structure, then fetch and decode every batch it names.

    One batch at a time is in memory.

    Args:
        store: Where the queue lives.
        config: Its manifest and prefix.
        runtime: For retries.
        max_batch_bytes: Largest record block decoded.
        advance: Told the entries done and their number, before each.

    Raises:
        InvalidInput: There is no manifest.
        TransientStorageError, PermanentStorageError: The store does not answer; nothing is
            said about the queue then.
    """
    report = Report()
    queue = open_queue(store, config, runtime)
    try:
        manifest = read_manifest(queue, store, config)
        manifest.check()
    except CorruptManifest as error:
        report.problems.append(Finding(None, config.manifest_path, str(error)))
        return report
    entries = manifest.entries()
    seen = Counter(entry.location for entry in entries)
    for done, entry in enumerate(entries):
        advance(done, len(entries))
        _check_entry(store, config, entry, seen[entry.location], max_batch_bytes, report)
    advance(len(entries), len(entries))
    if report.problems:
        # A consumer may have taken entries, and its collector their objects, while we looked.
        first = read_manifest(queue, store, config).first_sequence
        report.problems = [
            each for each in report.problems if each.sequence is None or each.sequence >= first
        ]
    return report


def check_batch(store: Get, location: str, max_batch_bytes: int) -> tuple[int, int]:
    """Fetch and decode one batch; its records and bytes.

    Raises:
        ObjectNotFound: It is not there.
        CorruptBatch: It does not decode.
    """
    # Compression may expand incompressible data a little; the decoder enforces the real cap.
    got = store.get(location, max_bytes=max_batch_bytes + max_batch_bytes // 128 + 1024)
    assert not isinstance(got, NotModified)  # only an answer to if_changed
    return len(decode_arrow(got.data, max_batch_bytes)), len(got.data)


def _check_entry(
    store: Get,
    config: QueueConfig,
    entry: QueueEntry,
    times_queued: int,
    max_batch_bytes: int,
    report: Report,
) -> None:
    def problem(text: str) -> None:
        report.problems.append(Finding(entry.sequence, entry.location, text))

    report.batches += 1
    if times_queued > 1:
        problem(f"queued {times_queued} times: its records are delivered as often")
    if not is_confined(entry.location, config.data_path_prefix):
        # Never fetched: it may name any object of the bucket (failure F23).
        problem(f"not a batch below the data prefix {config.data_path_prefix!r}")
        return
    try:
        records, size = check_batch(store, entry.location, max_batch_bytes)
    except ObjectNotFound:
        problem("the object does not exist")
        return
    except CorruptData as error:
        problem(str(error))
        return
    report.records += records
    report.bytes += size
    beyond = [each.start_index for each in entry.metadata if each.start_index > records]
    if beyond:
        report.notes.append(
            Finding(
                entry.sequence,
                entry.location,
                f"metadata starts at record {beyond[0]} of {records}: legal, describes no record",
            )
        )
