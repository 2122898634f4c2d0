"""Note which consumer has a queue, so that an operator can find it.

A queue has one consumer at a time. A new consumer raises the epoch in the manifest, and that fences
the previous one. The manifest says only *that* a consumer took over. To say *which* one, a consumer
that claims a queue writes its host, process and program to ``<prefix>/_consumer.json``::

    {"version": 1, "epoch": 3, "host": "worker-7", "process": 4711, "program": "Spark",
     "query": "9f0c...", "since_ms": 1767225600000, "ended_epoch": 3}

The errors of a fenced consumer, ``status`` and the runbook show this note. Nothing depends on it:
it may be missing, or late, or about a consumer that was fenced since. Therefore a failed write is
only logged, and a consumer waits at most two seconds for it.

A consumer that is closed without an error writes the epoch into ``ended_epoch``. It writes the
number and not just a flag, because a release that does not know the field keeps it when it claims
the next epoch: the note then shows a consumer that has not ended.

A process that was killed leaves its note unchanged. So a note without ``ended_epoch`` does not
prove that a consumer runs. On the same host :meth:`ConsumerInfo.may_run` looks for the process; for
another host it assumes that the consumer runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opendata_buffer import errors, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.cas import CasObject, CasStore, sidecar_object
from opendata_buffer.queue.sidecar import Sidecar
from opendata_buffer.runtime import Runtime, deadline

log = logging.getLogger(__name__)

_NOTE_NAME = "_consumer.json"

_NOTE = Sidecar(
    "the note of the consumer",
    "Nothing depends on it: delete it, and the next consumer writes it again.",
)

# Commands that raise the epoch, as they name themselves in the note. They are not consumers, and
# have ended by the time someone reads the note.
TRIM = "opendata-buffer trim"
SKIP = "opendata-buffer skip"
REPAIR = "opendata-buffer fsck --repair"
ENABLE = "opendata-buffer readers enable"

_NOTE_DEADLINE_MS = 2_000
"""Longest wait for a write of the note, in milliseconds."""


def process_runs(process: int) -> bool:
    """Return whether this host has a process with this number, also one of another user."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """The consumer that claimed an epoch.

    Attributes:
        epoch: The epoch that it claimed.
        host: Name of the host.
        process: Number of the process.
        program: The program, as operators know it, such as ``Spark``.
        query: Id of the streaming query; empty if it is unknown or does not exist.
        since_ms: When it claimed the epoch, by its own clock, in milliseconds since the Unix epoch.
        ended_epoch: The last epoch whose consumer was closed without an error.
        others: Fields of later releases.
    """

    epoch: int
    host: str
    process: int
    program: str
    query: str
    since_ms: int
    ended_epoch: int | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the bytes of the note."""
        return _NOTE.encode_value(self)

    @property
    def has_ended(self) -> bool:
        """Return whether the consumer was closed without an error."""
        return self.ended_epoch == self.epoch

    def may_run(self) -> bool:
        """Return whether the consumer may still run, in a process other than this one."""
        if self.program == TRIM or self.has_ended:
            return False
        if self.host != os.uname().nodename:
            return True
        return self.process != os.getpid() and process_runs(self.process)

    @classmethod
    def from_json(cls, data: bytes) -> ConsumerInfo:
        """Parse the bytes of a note.

        Args:
            data: The whole object.

        Returns:
            The note. Unknown fields are kept.

        Raises:
            CorruptData: They are not a note, or a later version wrote them.
        """
        return _NOTE.decode(data).into(cls)


def write_consumer_info(
    store: CasStore, config: QueueConfig, runtime: Runtime, epoch: int, *, program: str
) -> None:
    """Note that this process has claimed an epoch, unless a later epoch is noted already.

    A failure is logged and not raised.

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep.
        epoch: The epoch that was claimed.
        program: The program, as operators know it.
    """
    own = ConsumerInfo(
        epoch,
        os.uname().nodename,
        os.getpid(),
        program,
        "",
        runtime.now_ms(),
        epoch if program in (TRIM, SKIP, REPAIR, ENABLE) else None,
    )

    def noted(before: ConsumerInfo | None) -> ConsumerInfo:
        if before is not None and before.epoch > epoch:
            return before
        return replace(own, others={} if before is None else before.others)

    _update_note(store, config, runtime, noted)


def amend_consumer_info(
    store: CasStore, config: QueueConfig, runtime: Runtime, epoch: int, **changes: Any
) -> None:
    """Change fields of the note if it is about this epoch. A failure is logged and not raised.

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep.
        epoch: The epoch of the calling consumer.
        **changes: New values of ``query`` or ``ended_epoch``.
    """

    def noted(before: ConsumerInfo | None) -> ConsumerInfo | None:
        if before is None or before.epoch != epoch:
            return before
        after = replace(before, **changes)
        return before if after == before else after

    _update_note(store, config, runtime, noted)


def read_consumer_info(
    store: CasStore, config: QueueConfig, runtime: Runtime
) -> ConsumerInfo | None:
    """Read the note about the queue's consumer.

    Args:
        store: The opened store of the queue.
        config: The queue.
        runtime: Clock and sleep.

    Returns:
        The note, or None if it does not exist.

    Raises:
        CorruptData: The note cannot be read.
        StorageError: The store did not answer.
    """
    found = _note_object(store, config, runtime).read()
    return found if isinstance(found, ConsumerInfo) else None


def _update_note(
    store: CasStore,
    config: QueueConfig,
    runtime: Runtime,
    decide: Callable[[ConsumerInfo | None], ConsumerInfo | None],
) -> None:
    soon = config.with_timeout(min(_NOTE_DEADLINE_MS, config.timeout_ms))
    note = _note_object(store, soon, runtime)
    outcome: object
    try:
        with deadline(runtime, _NOTE_DEADLINE_MS / 1000):
            outcome = note.update(decide)
    except errors.OpenDataBufferError as error:
        outcome = error
    if not isinstance(outcome, outcomes.Applied):
        log.info("the consumer was not noted in %s: %s", note.key, outcome)


def _note_object(store: CasStore, config: QueueConfig, runtime: Runtime) -> CasObject[ConsumerInfo]:
    key = f"{config.data_path_prefix}/{_NOTE_NAME}"
    return sidecar_object(_NOTE, ConsumerInfo, store, key, runtime, config)
