"""Who reads a queue: its one consumer, or the named readers of a log.

A consumer that claims a queue writes ``<prefix>/_consumer.json``, which is shown where a consumer
is fenced or stuck. It decides nothing, and may be missing, or about a consumer that was fenced. One
that is closed notes that in ``ended_epoch``: an older release keeps it, and claims another epoch::

    {"version": 1, "epoch": 3, "host": "worker-7", "process": 4711, "program": "Spark",
     "query": "9f0c...", "since_ms": 1767225600000, "ended_epoch": 3}

Each reader of a log has a position and an epoch of its own. The position is
``<prefix>/_readers/<name>.json``, and only its owner writes it::

    {"version": 1, "queue": "01J5...", "next": 4711, "epoch": 3, "host": "worker-7",
     "process": 4711, "program": "Spark", "since_ms": 1767225600000, "moved_ms": 1767225700000}

Everything before ``next`` is acknowledged. A consumer that starts raises ``epoch``, and so fences
the one before it with the same name; readers of other names never notice.

A reader writes its position and then the index; the collector reads the index, then the positions,
and then writes the index, if nobody else did meanwhile (decision 0038).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from opendata_buffer import errors, metrics, outcomes
from opendata_buffer.config import QueueConfig, check_reader_name
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.queue import ownership
from opendata_buffer.queue.cas import CasObject, CasStore, sidecar_object
from opendata_buffer.queue.log import MOST_READERS, REMEMBERED, Log, LogIndex, LogView
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.sidecar import Sidecar
from opendata_buffer.runtime import Interval, Runtime, deadline
from opendata_buffer.stores.base import Delete

log = logging.getLogger(__name__)

_NOTE_NAME = "_consumer.json"
_NOTE = Sidecar(
    "the note of the consumer",
    "Nothing depends on it: delete it, and the next consumer writes it anew.",
)
TRIM = "opendata-buffer trim"
SKIP = "opendata-buffer skip"
REPAIR = "opendata-buffer fsck --repair"
ENABLE = "opendata-buffer readers enable"
"""The programs that commands note which raise the epoch. They read nothing, and have ended when
anyone sees that."""
_NOTE_DEADLINE_MS = 2_000
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

    ``query`` is the id of the streaming query, empty while it is not known; ``since_ms`` is
    milliseconds since the Unix epoch, by the consumer's clock; ``ended_epoch`` is the last one
    whose consumer was closed without an error. ``others`` are fields of later versions.
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
        return _NOTE.encode_value(self)

    @property
    def has_ended(self) -> bool:
        """Whether the consumer was closed, and not killed."""
        return self.ended_epoch == self.epoch

    def may_run(self) -> bool:
        """Whether the process may still run, and is not this one. A note stays when its process
        ends; on this host it is looked for."""
        if self.program == TRIM or self.has_ended:
            return False
        if self.host != os.uname().nodename:
            return True
        return self.process != os.getpid() and process_runs(self.process)

    @classmethod
    def from_json(cls, data: bytes) -> ConsumerInfo:
        """Read the object's bytes; ``CorruptData`` where they are no such object."""
        return _NOTE.decode(data).into(cls)


def write_consumer_info(
    store: CasStore, config: QueueConfig, runtime: Runtime, epoch: int, *, program: str
) -> None:
    """Note that this process claimed an epoch, unless a later one is noted. Raises nothing."""
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
    """Change ``query`` or ``ended_epoch`` of the note about an epoch. Raises nothing."""

    def noted(before: ConsumerInfo | None) -> ConsumerInfo | None:
        if before is None or before.epoch != epoch:
            return before
        after = replace(before, **changes)
        return before if after == before else after

    _update_note(store, config, runtime, noted)


def read_consumer_info(
    store: CasStore, config: QueueConfig, runtime: Runtime
) -> ConsumerInfo | None:
    """The last note; None when there is none."""
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


_POSITION = Sidecar(
    "the position of a reader",
    "Restore its latest version (bucket versioning), or delete it and run 'opendata-buffer readers "
    "reset STORE NAME --to-earliest', which reads again what is kept.",
)

CHECK_S = 60.0
"""Seconds after which a reader that finds nothing new reads position and index all the same."""

_LIVE_MS = 5 * 60 * 1000
"""A reader of another host is taken to run for so long after its position was written."""

MOST_SILENT_MS = 60 * 60 * 1000
"""A reader that has nothing to acknowledge writes its position this often, so as not to expire."""


@dataclass(frozen=True, slots=True)
class ReaderPosition:
    """Where a reader is, and whose it is. Times in milliseconds since the Unix epoch.

    ``next`` is the first sequence that is not acknowledged, ``since_ms`` when the consumer started,
    ``moved_ms`` when this was written last. ``process`` is 0 once the consumer has ended.
    """

    queue_id: str
    next: int
    epoch: int
    host: str = ""
    process: int = 0
    program: str = ""
    since_ms: int = 0
    moved_ms: int = 0
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The object's bytes."""
        return _POSITION.encode_value(self, queue=self.queue_id, queue_id=None)

    @classmethod
    def from_json(cls, data: bytes, kind: Sidecar = _POSITION) -> ReaderPosition:
        """Read the object's bytes; ``CorruptData``, with the advice of ``kind``, where they are not
        a position."""
        found = kind.decode(data)
        return found.into(cls, queue_id=found.text("queue"))

    @property
    def is_missing(self) -> bool:
        """Whether it stands for a position that is not stored: see :func:`read_positions`."""
        return self.since_ms == 0

    def may_run(self, now_ms: int) -> bool:
        """Whether a consumer may have this position: on this host by its process, else by time."""
        if not self.process:
            return False
        if self.host != os.uname().nodename:
            return now_ms - self.moved_ms < _LIVE_MS
        return process_runs(self.process)


def readers_folder(config: QueueConfig) -> str:
    """Where the positions of readers are."""
    return f"{config.data_path_prefix}/_readers/"


def position_object(log_: Log, name: str) -> CasObject[ReaderPosition]:
    """The position of one reader."""
    key = f"{readers_folder(log_.config)}{name}.json"
    words = f"{ownership.queue_hint(log_.store.url, log_.config)} {name}"
    kind = replace(_POSITION, remedy=_POSITION.remedy.replace("STORE NAME", words))
    return CasObject(
        log_.store,
        key,
        decode=partial(ReaderPosition.from_json, kind=kind),
        encode=ReaderPosition.to_json,
        runtime=log_.runtime,
        settings=log_.config,
        sidecar=kind,
    )


def read_positions(
    log_: Log, index: LogIndex, unreadable: Callable[[errors.CorruptData], None] | None = None
) -> dict[str, ReaderPosition]:
    """Return the positions of all readers in the index, by name; one read for each.

    A reader whose position is gone may not have read anything that is kept, so it counts as being
    at the floor. It counts as having moved when the collector first missed its position, which the
    index says, or else now. So it holds what it needs, and expires as any other (failure F44).

    Args:
        log_: The log.
        index: The index as it was read before.
        unreadable: Gets the error of each position that cannot be read, which is then left out.

    Raises:
        CorruptData: A position cannot be read, and ``unreadable`` is not given.
    """
    found = {}
    for name in index.readers:
        try:
            position = position_object(log_, name).read()
        except errors.CorruptData as error:
            if unreadable is None:
                raise
            unreadable(error)
            continue
        if not isinstance(position, ReaderPosition) or position.queue_id != index.queue_id:
            moved_ms = index.missing.get(name, log_.runtime.now_ms())
            position = ReaderPosition(index.queue_id, index.floor, 0, moved_ms=moved_ms)
        found[name] = position
    return found


def enable_readers(
    store: CasStore,
    config: QueueConfig,
    claim: ownership.QueueClaim,
    runtime: Runtime,
    **settings: int | None,
) -> LogIndex:
    """Make a log of a queue, from its oldest entry on; or change what a log keeps. Repeatable.

    ``settings`` are fields of the index by name; what is not given stays, or is the default. In
    this order: the marker, so that no consumer without a name starts any more; the epoch, which
    fences the one that runs; the index.
    """

    def marked(before: ownership.PrefixOwner | None) -> ownership.PrefixOwner | None:
        return before and replace(before, others={**before.others, ownership.IS_LOG: True})

    log_ = Log(store, config, runtime, claim.queue_id)
    first = log_.read()
    if first is None:
        ownership.owner_object(store, config, runtime).change(marked)
        queue = Queue(store, config, runtime=runtime, role="operator", claim=claim)
        claimed = queue.claim_epoch(None)
        write_consumer_info(store, config, runtime, claimed.epoch, program=ENABLE)
        begin = claimed.first_sequence
        first = LogIndex(claim.queue_id, begin, begin)
    return log_.change(lambda before: (before or first).changed(**settings))


def reset_reader(view: LogView, name: str, sequence: int) -> ReaderPosition:
    """Set a reader, which may be new, to a sequence; a consumer that runs is fenced.
    ``InvalidInput`` for a sequence that is not kept."""
    if not view.first_sequence <= sequence <= view.next_sequence:
        raise errors.InvalidInput(
            f"sequence {sequence} is not kept: the log has {view.first_sequence} to "
            f"{view.next_sequence - 1}, and ends at {view.next_sequence}"
        )
    log_, program = view.log, "opendata-buffer readers reset"
    reader = ReaderQueue(
        log_.store, log_.config, name, runtime=log_.runtime, claim=None, program=program
    )
    return reader.reset(sequence)


def register_readers(log_: Log, names: Collection[str], program: str) -> dict[str, int]:
    """Register readers that a log does not know, without starting a consumer of them.

    A reader that has a position in this log keeps it. Any other one begins at the oldest batch that
    the log keeps, and its position has epoch 0 until a consumer claims it. A reader that has
    expired here, and whose next batch was collected since, is left out: it has lost batches, and
    must learn that when it starts.

    Args:
        log_: The log; it must exist.
        names: Readers that the log should have.
        program: The program that registers them, as an operator sees it.

    Returns:
        By the name of each reader that was registered now, the sequence at which it begins.

    Raises:
        InvalidInput: The log would have more than 1,000 readers.
    """
    made = set[str]()
    while True:
        index = log_.need()
        new = sorted({*names} - {*index.readers})
        if len(index.readers) + len(new) > MOST_READERS:
            raise _too_many(log_)
        begins = {name: _prepare_position(log_, index, name, made, program) for name in new}
        begins = {name: begin for name, begin in begins.items() if begin >= index.floor}
        if not begins:
            return {}
        # The positions first: a collector that sees a name must find its position (decision 0038).
        now = log_.change(partial(_with_readers, begins))
        if now.floor <= min(begins.values()):
            return begins
        # The collector raised the floor, because it did not know these readers yet.


def _with_readers(begins: Mapping[str, int], before: LogIndex | None) -> LogIndex | None:
    if before is None or before.floor > min(begins.values()):
        return before
    for name in begins:
        before = before.with_reader(name)
    return before


def _prepare_position(log_: Log, index: LogIndex, name: str, made: set[str], program: str) -> int:
    """Have a position for a reader that the index does not name, and return its next sequence.
    ``made`` are the readers whose positions this caller has made, and may move."""
    now_ms = log_.runtime.now_ms()
    fresh = ReaderPosition(
        index.queue_id, index.floor, 0, program=program, since_ms=now_ms, moved_ms=now_ms
    )

    def decide(before: ReaderPosition | None) -> ReaderPosition:
        if before is None or before.queue_id != index.queue_id:
            made.add(name)
            return fresh
        if before.epoch == 0 and name in made:
            return fresh
        # It counts from now on. With its old time it would expire at once.
        return replace(before, moved_ms=now_ms)

    return position_object(log_, name).change(decide).next


def _too_many(log_: Log) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"the log has {MOST_READERS} readers: delete some with readers delete. 'opendata-buffer "
        f"readers list {ownership.queue_hint(log_.store.url, log_.config)}' shows them"
    )


def unregister(store: Delete, log_: Log, name: str) -> LogIndex:
    """Delete a reader: its position first, so that its consumer does not register it again."""
    index = log_.need()
    if name not in index.readers:
        raise unknown_reader(name, index)
    store.delete_many([position_object(log_, name).key])
    return log_.change(lambda before: before and before.without_readers([name]))


def unknown_reader(name: str, index: LogIndex) -> errors.InvalidInput:
    """The error about a name that the index does not have, with those that it has."""
    known = ", ".join(index.readers) or "none yet"
    return errors.InvalidInput(f"there is no reader {name!r}; readers of this log: {known}")


class ReaderQueue:
    """A log as one named reader has it: what :class:`.Queue` is for a queue's one consumer. Not
    thread-safe: its owner serialises the calls. ``resettable`` as for :func:`.open_queue`."""

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        name: str,
        *,
        runtime: Runtime,
        claim: ownership.QueueClaim | None,
        program: str,
        resettable: bool = True,
    ) -> None:
        check_reader_name(name)
        self.name = name
        self._store = store
        self._config = config
        self._runtime = runtime
        self._program = program
        self._queue = Queue(store, config, runtime=runtime, role="reader", claim=claim)
        self.queue_id = self._queue.queue_id
        """The queue's id."""
        self.labels = {**self._queue.labels, "reader": name}
        """Attributes of gauges about this reader."""
        advised = name if resettable else ""
        self._log = Log(store, config, runtime, self.queue_id, advised)
        self._position = position_object(self._log, name)
        self.key = self._position.key
        """The key of the position."""
        self._manifest: Manifest | None = None
        self.last_seen: LogView | None = None
        """The view as last read; None when none was."""
        self._checked_at = runtime.monotonic()
        self._moves = Interval(runtime, CHECK_S)
        self._claimed: ReaderPosition | None = None
        self.newly_registered = False
        """Whether this object added the reader to the index, which did not have it."""

    @property
    def begins_after(self) -> int:
        """Where a reader began that this log did not have, neither its name nor a position: what
        lies before is not kept. 0 for any other one."""
        is_first = self.newly_registered and self._claimed is not None and self._claimed.epoch == 1
        return self._claimed.next if is_first and self._claimed is not None else 0

    def read(self, *, check: bool = False) -> LogView:
        """The log from the reader's position on, with the epoch of the position.

        One conditional GET where nothing is new, and once a minute three; ``check`` reads position
        and index in any case. ``QueueReset`` where manifest or position are gone or went backwards,
        ``DataLoss`` where what an expired reader needs is not kept.
        """
        manifest = self._queue.read() or Manifest.empty()
        now = self._runtime.monotonic()
        due = check or now - self._checked_at >= CHECK_S
        if self.last_seen is not None and manifest is self._manifest and not due:
            return self.last_seen
        index = self._log.last_seen
        if due or index is None or manifest.first_sequence > index.end:
            # Behind the manifest: what left it in between is in the index.
            index = self._log.need()
            self._checked_at = now
        unmoved = manifest.next_sequence - max(manifest.first_sequence, index.end)
        if unmoved > 2 * Log.most_entries and self._moves.is_due():
            # Seldom: where writers win each race, it takes as long as a change may.
            index = self._queue.shorten(lambda: self._log, manifest) or index
        # Behind the index: of a reader that was deleted the position went first, and an index that
        # is newer than the position may begin where another process of this name has read to.
        position = self._read_position()
        if self.name not in index.readers:
            index = self._register(position.next, again=True)
            # Another process of this name may have registered it, and have read to there.
            position = self._read_position()
            if index.floor > position.next:
                raise self._lost(position.next, index, self._expired(index))
        return self._seen(manifest, index, position)

    def claim_epoch(
        self, last_acked_sequence: int | None, *, allow_data_loss: bool = False
    ) -> LogView:
        """Become the reader of this name, behind a sequence or where the one before it was; a new
        one begins at the oldest batch. Raises as :func:`.check_resume`."""
        manifest = self._queue.read() or Manifest.empty()
        index = self._log.need(marked=self._queue.is_log)
        if self.name not in index.readers and len(index.readers) >= MOST_READERS:
            raise _too_many(self._log)
        if last_acked_sequence is not None and last_acked_sequence >= manifest.next_sequence:
            raise errors.QueueReset(
                ownership.ends_before(
                    last_acked_sequence,
                    manifest.next_sequence,
                    self._config.manifest_path,
                    self._store.url,
                )
            )
        given = None if last_acked_sequence is None else last_acked_sequence + 1
        self._claimed = position = self._take(index, given, allow_data_loss)
        is_new = position.epoch == 1 and given is None
        while (index := self._register(position.next)).floor > position.next:
            # The collector was faster than a reader that it did not know yet.
            position = self._take(index, given, allow_data_loss or is_new, overtaken=True)
            self._claimed = position
        self._checked_at = self._runtime.monotonic()
        # Not read again: a manifest that is younger than the index may lack what was moved since.
        return self._seen(manifest, index, position)

    def reset(self, sequence: int) -> ReaderPosition:
        """Set the position, of no consumer; the position first, then the index."""
        index = self._log.need()
        self.queue_id = index.queue_id
        position = self._take(index, sequence, allow_data_loss=False, process=0, overtaken=True)
        if (index := self._register(sequence)).floor > sequence:
            raise self._lost(sequence, index, self._overtaken(index))
        return position

    def _take(
        self,
        index: LogIndex,
        given: int | None,
        allow_data_loss: bool,
        process: int | None = None,
        *,
        overtaken: bool = False,
    ) -> ReaderPosition:
        """Write the position with the next epoch, of this process or of none (0). ``overtaken``: if
        the floor is above ``given``, it has risen since the caller looked."""

        def decide(before: ReaderPosition | None) -> ReaderPosition:
            if before is not None and before.queue_id != index.queue_id:
                before = None  # of a queue that was started over
            start = given
            if start is None and before is not None:
                start = before.next
                if self.name in index.readers:
                    # Somebody has set it back, and was refused: all before the floor was read.
                    start = max(start, index.floor)
            if start is not None and start < index.floor and not allow_data_loss:
                why = self._overtaken(index) if overtaken else self._passed(index, before, given)
                raise self._lost(start, index, why)
            now_ms = self._runtime.now_ms()
            return ReaderPosition(
                index.queue_id,
                max(index.floor, start or 0),
                1 if before is None else before.epoch + 1,
                os.uname().nodename,
                os.getpid() if process is None else process,
                self._program,
                now_ms,
                now_ms,
                {} if before is None else before.others,
            )

        return self._write(decide)

    def _register(self, position: int, *, again: bool = False) -> LogIndex:
        """Have the index name this reader, after its position was written. It changes also where it
        has the name already, but with ``again``: a collector that has read an earlier position of
        this reader then loses its race."""

        def decide(before: LogIndex | None) -> LogIndex | None:
            if before is None or before.floor > position or (again and self.name in before.readers):
                return before
            self.newly_registered = self.newly_registered or self.name not in before.readers
            return before.with_reader(self.name)

        return self._log.change(decide)

    def dequeue(self, through_sequence: int, epoch: int) -> LogView:
        """Acknowledge everything up to and including a sequence; repeatable, one small write."""
        view = self.last_seen
        assert view is not None, "claimed first"
        if through_sequence >= view.next_sequence:
            raise errors.InvalidInput(
                f"cannot acknowledge {through_sequence}: the log ends at {view.next_sequence - 1}. "
                "Acknowledge only sequences that were handed out."
            )
        position = self._acknowledged(through_sequence + 1, epoch)
        return self._seen(view.manifest, view.index, position)

    def _acknowledged(
        self, next_sequence: int, epoch: int, *, ends: bool = False
    ) -> ReaderPosition:
        def decide(before: ReaderPosition | None) -> ReaderPosition:
            found = self._own(before)
            self.check_epoch(found, epoch)
            moved = replace(
                found, next=max(found.next, next_sequence), moved_ms=self._runtime.now_ms()
            )
            return replace(moved, process=0) if ends else moved

        return self._write(decide)

    def check_epoch(self, now: LogView | Manifest | ReaderPosition, epoch: int) -> None:
        """Raise ``Fenced`` unless ``epoch`` is that of the position."""
        if now.epoch != epoch:
            raise errors.Fenced(self.key, epoch, now.epoch)

    def recent(self) -> list[BatchDescriptor]:
        """The last entries before the position that are kept, to compare later ones with."""
        view = self.last_seen
        assert view is not None, "claimed first"
        before = view.first_sequence
        start = max(0, before - REMEMBERED)
        parts = view.index.parts()
        if view.manifest.first_sequence > start:
            oldest = parts[0].first if parts else view.manifest.first_sequence
            start = max(start, oldest)
        known = replace(view, first_sequence=start)
        try:
            return [*known.entries(start, max(before - start, 0))]
        except errors.CorruptData as error:
            known.check_current()
            log.warning("what was queued twice is not recognised: %s", error)
            return []

    def close(self) -> None:
        """Note that the consumer has ended, and let the queue go. Raises nothing."""
        try:
            if self._claimed is not None:
                self._acknowledged(0, self._claimed.epoch, ends=True)
        except errors.OpenDataBufferError as error:
            log.info("the end of reader %r was not noted: %s", self.name, error)
        self._queue.close()

    def _read_position(self) -> ReaderPosition:
        found = self._position.read()
        position = self._own(found if isinstance(found, ReaderPosition) else None)
        own = position.host == os.uname().nodename and position.process == os.getpid()
        silent_ms = self._runtime.now_ms() - position.moved_ms
        index = self._log.last_seen
        expiry_ms = MOST_SILENT_MS if index is None else index.reader_expiry_ms // 8
        if own and silent_ms >= min(MOST_SILENT_MS, expiry_ms):
            return self._acknowledged(0, position.epoch)
        return position

    def _own(self, found: ReaderPosition | None) -> ReaderPosition:
        own = self._claimed
        if (
            found is None
            or found.queue_id != self.queue_id
            # Epochs of a reader that was deleted begin at 1 again.
            or (own and found.epoch == own.epoch and found.since_ms != own.since_ms)
        ):
            raise errors.QueueReset(
                f"the position {self.key!r} of reader {self.name!r} in {self._store.url} is gone "
                "or is another's: the reader was deleted, or the queue was started over. "
                "Start the reader anew."
            )
        return found

    def _write(self, decide: Callable[[ReaderPosition | None], ReaderPosition]) -> ReaderPosition:
        outcome = self._position.update(decide, from_memory=True)
        if isinstance(outcome, outcomes.Applied) and outcome.value is not None:
            return outcome.value
        if isinstance(outcome, outcomes.Vanished):
            self._own(None)
        raise errors.TransientStorageError(
            f"the position {self.key!r} in {self._store.url} could not be written: {outcome}. It "
            "may have been written; try again."
        )

    def _seen(self, manifest: Manifest, index: LogIndex, position: ReaderPosition) -> LogView:
        self._log.check_gap(index, manifest)  # failure F46
        self._manifest = manifest
        first = max(position.next, index.floor)
        self.last_seen = LogView(
            self._log, index, manifest, first, position.epoch, self.key, self._check_current
        )
        metrics.queue_length.set(self.last_seen.entry_count, self.labels)
        return self.last_seen

    def _check_current(self) -> None:
        """Raise where this reader was fenced, or does not count any more."""
        view = self.read(check=True)
        if self._claimed is not None:
            self.check_epoch(view, self._claimed.epoch)

    def _lost(self, needed: int, index: LogIndex, why: str) -> errors.DataLoss:
        words = f"{ownership.queue_hint(self._store.url, self._config)} {self.name}"
        return errors.DataLoss(
            self.key,
            needed,
            index.floor,
            f"{why} Accept the loss explicitly, or run 'opendata-buffer readers reset {words} "
            "--to-earliest'.",
        )

    def _passed(self, index: LogIndex, before: ReaderPosition | None, given: int | None) -> str:
        """Say why the floor is above where a reader wants to begin, by its position before."""
        if before is None:
            return (
                f"The log has no reader {self.name!r}, so they were not kept for it: it was never "
                "started here, or it was deleted."
            )
        if self.name not in index.readers:
            if self._runtime.now_ms() - before.moved_ms < index.reader_expiry_ms:
                return (
                    f"A start of reader {self.name!r} was interrupted before the log knew the "
                    "reader, so they were not kept for it."
                )
            return self._expired(index)
        if given is None or before.next < index.floor:
            return self._overtaken(index)
        process = f", process {before.process}" if before.process else ""
        return (
            f"Another instance of reader {self.name!r} has acknowledged them: {before.program} on "
            f"{before.host}{process} is up to sequence {before.next - 1}. The position that was "
            "given was saved before that. To continue, load the position again that the other "
            "instance saved with its results, or start without a position if it has none."
        )

    def _expired(self, index: LogIndex) -> str:
        return (
            f"Reader {self.name!r} did not move for longer than "
            f"{index.reader_expiry_ms / 1000:.0f} s, so it has expired, and what lies before was "
            "collected."
        )

    def _overtaken(self, index: LogIndex) -> str:
        return (
            f"The floor of the log rose to {index.floor} after the position was chosen: every "
            "reader that the log had then was past it. Try again."
        )
