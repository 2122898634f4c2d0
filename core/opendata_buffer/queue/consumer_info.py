"""Host, process and program of a queue's consumer, shown where a consumer is fenced or stuck.

The manifest's epoch decides which consumer owns a queue, and says nothing about it. So a consumer
that claims a queue writes ``<prefix>/_consumer.json``::

    {"version": 1, "epoch": 3, "host": "worker-7", "process": 4711, "program": "Spark",
     "query": "9f0c...", "since_ms": 1767225600000, "ended_epoch": 3}

One that is closed notes that, too, in ``ended_epoch``: an older release, which keeps the field,
claims another epoch. Nothing is decided by the note, and it may be missing, or about a consumer
that was fenced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.queue.cas import CasObject, CasStore, Sidecar
from opendata_buffer.runtime import Runtime, deadline

log = logging.getLogger(__name__)

_NAME = "_consumer.json"
_SIDECAR = Sidecar(
    "the note of the consumer",
    "Nothing depends on it: delete it, and the next consumer writes it anew.",
)
TRIM = "opendata-buffer trim"
"""The program that a trim notes; it has ended when anybody reads that."""
_DEADLINE_MS = 2_000
"""Longest wait for a write; the queue is read without it, too."""


def process_runs(process: int) -> bool:
    """Whether there is a process of this number on this host."""
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

    ``query`` is the id of the streaming query: empty without one, or while it is not known.
    ``since_ms`` is milliseconds since the Unix epoch, by the consumer's clock. ``ended_epoch`` is
    the last one whose consumer was closed without an error. ``others`` are fields of later
    versions, kept when the object is written again.
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
        """The object's bytes."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        del own["others"]
        if self.ended_epoch is None:
            del own["ended_epoch"]
        return _SIDECAR.encode(own, self.others)

    @property
    def has_ended(self) -> bool:
        """Whether the consumer was closed, and not killed."""
        return self.ended_epoch == self.epoch

    def may_run(self) -> bool:
        """Whether the process may still run, and is not this one.

        A note stays when its process ends. On this host the process is looked for; of another host
        nothing is known.
        """
        if self.program == TRIM or self.has_ended:
            return False
        if self.host != os.uname().nodename:
            return True
        return self.process != os.getpid() and process_runs(self.process)

    @classmethod
    def from_json(cls, data: bytes) -> ConsumerInfo:
        """Read the object's bytes; ``CorruptData`` where they are no such object."""
        found = _SIDECAR.decode(data)
        return cls(
            epoch=found.number("epoch"),
            host=found.text("host"),
            process=found.number("process"),
            program=found.text("program"),
            query=found.text("query"),
            since_ms=found.number("since_ms"),
            ended_epoch=found.number("ended_epoch", None),
            others=found.others(),
        )


def write_consumer_info(
    store: CasStore, config: QueueConfig, runtime: Runtime, epoch: int, *, program: str
) -> None:
    """Note that this process claimed an epoch, unless a later one is noted.

    Raises nothing, because nothing depends on the note, and takes two seconds at most.
    """
    own = ConsumerInfo(epoch, os.uname().nodename, os.getpid(), program, "", runtime.now_ms())

    def noted(before: ConsumerInfo | None) -> ConsumerInfo:
        if before is not None and before.epoch > epoch:
            return before
        return replace(own, others={} if before is None else before.others)

    _update(store, config, runtime, noted)


def amend_consumer_info(
    store: CasStore, config: QueueConfig, runtime: Runtime, epoch: int, **changes: Any
) -> None:
    """Change ``query`` or ``ended_epoch`` of the note about an epoch. Raises nothing."""

    def noted(before: ConsumerInfo | None) -> ConsumerInfo | None:
        if before is None or before.epoch != epoch:
            return before
        after = replace(before, **changes)
        return before if after == before else after

    _update(store, config, runtime, noted)


def read_consumer_info(
    store: CasStore, config: QueueConfig, runtime: Runtime
) -> ConsumerInfo | None:
    """The last note; None when there is none."""
    found = _object(store, config, runtime).read()
    return found if isinstance(found, ConsumerInfo) else None


def _update(
    store: CasStore,
    config: QueueConfig,
    runtime: Runtime,
    decide: Callable[[ConsumerInfo | None], ConsumerInfo | None],
) -> None:
    soon = config.with_timeout(min(_DEADLINE_MS, config.timeout_ms))
    note = _object(store, soon, runtime)
    outcome: object
    try:
        with deadline(runtime, _DEADLINE_MS / 1000):
            outcome = note.update(decide)
    except OpenDataBufferError as error:
        outcome = error
    if not isinstance(outcome, outcomes.Applied):
        log.info("the consumer was not noted in %s: %s", note.key, outcome)


def _object(store: CasStore, config: QueueConfig, runtime: Runtime) -> CasObject[ConsumerInfo]:
    return CasObject(
        store,
        f"{config.data_path_prefix}/{_NAME}",
        decode=ConsumerInfo.from_json,
        encode=ConsumerInfo.to_json,
        runtime=runtime,
        settings=config,
        sidecar=_SIDECAR,
    )
