"""The errors of the library, in one tree that is ordered by the caller's next step.

::

    OpenDataBufferError
    ├── InvalidInput (ValueError)     fix the call, the configuration or the URL
    │   ├── PrefixConflict            two queues claim one data prefix: give each its own
    │   └── UnsafeStore               the store has no compare-and-swap: use another store
    ├── RetryLater                    ``retryable``: try again
    │   ├── TransientStorageError     the store did not answer (also a StorageError)
    │   ├── Conflict                  lost every CAS race until the deadline
    │   └── QueueFull                 the manifest is too large: let the consumer catch up
    ├── OwnershipLost                 another process has taken over: stop this one
    │   ├── Fenced                    another consumer owns the queue
    │   ├── Superseded                another run of the app writes to the topic
    │   └── ClaimLost                 no heartbeat in time: another worker gets the batch
    ├── DataError                     stored data is lost or cannot be read
    │   ├── CorruptData               bytes on storage break the v1 format
    │   │   ├── CorruptManifest       inspect it: ``opendata-buffer dump``
    │   │   └── CorruptBatch          the batch object cannot be decoded
    │   ├── PoisonBatch               one queued batch cannot be delivered: repair or skip it
    │   │   ├── BatchMissing          its object is gone
    │   │   ├── BatchUnreadable       its object does not decode
    │   │   └── ForeignLocation       its location points outside the data prefix
    │   ├── MalformedRecord           a record does not fit the schema, and mode is FAILFAST
    │   ├── QueueReset                the manifest vanished or went backwards: do not resume
    │   └── DataLoss                  a position that must be read is no longer queued
    ├── StorageError                  a request to the store failed
    │   ├── PermanentStorageError     fix credentials, permissions, bucket or disk
    │   └── ObjectNotFound            the key does not exist
    ├── CommitStateUnknown            a write may or may not have landed: see its attributes
    ├── Drained                       the partition has left its topic: use the others
    ├── FlushFailed                   batches could not be made durable: produce them again
    └── Closed                        the producer or consumer was closed before the call

Most programs distinguish the first four. Every error survives pickling. The values that its message
names are also attributes, and what to do about it is data (:mod:`opendata_buffer.hints`).
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any, Self

from opendata_buffer.hints import Action, Hint, QueueName, Surface, render


class OpenDataBufferError(Exception):
    """The base class of all errors of this library.

    Its arguments are the parts of its message: text, names of settings, and hints. ``str(error)``
    is the message in the words of its surface.

    Attributes:
        retryable: Whether the same call may succeed later.
        surface: Where the error is shown. Default: in a Python program.
    """

    retryable = False
    surface = Surface.PYTHON

    def __str__(self) -> str:
        return self.text(self.surface)

    @property
    def problem(self) -> str:
        """The message without its hints."""
        return render(self.args, self.surface, with_hints=False).rstrip()

    @property
    def hints(self) -> tuple[Hint, ...]:
        """The remedies, as data."""
        return tuple(part for part in self.args if isinstance(part, Hint))

    def text(self, surface: Surface) -> str:
        """Return the message in the words of a surface."""
        return render(self.args, surface)

    def add(self, hint: Hint) -> Self:
        """Append a hint, unless the error has one with this action, and return the error."""
        if all(found.action is not hint.action for found in self.hints):
            self.args += (hint,)
        return self

    def at(self, queue: QueueName) -> Self:
        """Name the queue in those hints that do not name one, and return the error."""
        self.args = tuple(part.at(queue) if isinstance(part, Hint) else part for part in self.args)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # The default protocol calls cls(*args), which fails for any __init__ with other
        # parameters; Spark and multiprocessing send errors between processes.
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__.copy())  # type: ignore[attr-defined]


class InvalidInput(OpenDataBufferError, ValueError):
    """An argument, setting, option or URL is wrong. Nothing was read or written."""


class RetryLater(OpenDataBufferError):
    """A failure that may pass. Nothing was written, and nothing is wrong with the data."""

    retryable = True


class OwnershipLost(OpenDataBufferError):
    """Another process has taken over the queue, topic or batch of this one. Stop this process."""


class DataError(OpenDataBufferError):
    """Stored data is lost or cannot be read."""


class PrefixConflict(InvalidInput):
    """A data prefix belongs to the queue of another manifest (failure F7)."""

    def __init__(
        self, data_path_prefix: str, manifest_path: str, owner: str, *more: str | Hint
    ) -> None:
        super().__init__(
            f"data prefix {data_path_prefix!r} belongs to the queue with manifest {owner!r}, "
            f"and this queue has manifest {manifest_path!r}: its garbage collector would delete "
            "the other queue's batches",
            Hint(Action.USE_OTHER_MANIFEST, path=owner),
            *more,
        )
        self.data_path_prefix = data_path_prefix
        self.manifest_path = manifest_path
        self.owner = owner


class UnsafeStore(InvalidInput):
    """The store ignores or refuses conditional writes (failure F12)."""


class StorageError(OpenDataBufferError):
    """A request to the store failed."""


class TransientStorageError(StorageError, RetryLater):
    """A timeout, throttling or server error that outlasted its retries. Try again later.

    Attributes:
        retry_after_s: Seconds to wait, if the store has said so.
    """

    retry_after_s: float | None = None


class PermanentStorageError(StorageError):
    """Wrong credentials or permissions, a missing bucket or a full disk. Retrying does not help."""


class ObjectNotFound(StorageError):
    """The store has no object with this key."""

    def __init__(self, key: str, store: str = "") -> None:
        where = f" in {store}" if store else ""
        super().__init__(f"object {key!r} does not exist{where}")
        self.key = key
        self.store = store


class Conflict(RetryLater):
    """Every CAS attempt lost its race until the deadline. Nothing was written."""

    def __init__(self, key: str, attempts: int, waited_s: float) -> None:
        super().__init__(
            f"manifest {key!r} could not be written: {attempts} attempts in {waited_s:.1f} s all "
            "lost to other writers. Nothing was written",
            Hint(Action.LET_FEWER_WRITE),
        )
        self.key = key
        self.attempts = attempts
        self.waited_s = waited_s


class CommitStateUnknown(OpenDataBufferError):
    """A write may have been applied, and the store no longer shows whether it was.

    Attributes:
        key: The manifest that was written.
        sequence: The first sequence that the write would have taken, if it was applied; None if
            that is not known either.
        locations: The batch locations that the write contained.
        next_sequence: The manifest's next sequence when it was last read, if it could be read.
    """

    def __init__(
        self,
        key: str,
        sequence: int | None,
        locations: tuple[str, ...],
        next_sequence: int | None,
        reason: str,
    ) -> None:
        known = "unknown" if next_sequence is None else str(next_sequence)
        at = "" if sequence is None else f" at sequence {sequence}"
        first = locations[0] if locations else ""
        super().__init__(
            f"append of {len(locations)} batches (first {first!r}) to manifest {key!r}{at} "
            f"may or may not have landed: {reason} (next sequence {known})",
            Hint(Action.KEEP_BATCHES),
        )
        self.key = key
        self.sequence = sequence
        self.locations = locations
        self.next_sequence = next_sequence
        self.reason = reason


class QueueFull(RetryLater):
    """The manifest has outgrown its limit. Producers must wait (failure F35)."""

    def __init__(self, key: str, size: int, limit: int, lag: int, oldest_ms: int | None) -> None:
        age = "" if oldest_ms is None else f", the oldest for {oldest_ms / 1000:.0f} s"
        super().__init__(
            f"manifest {key!r} would have {size} bytes, more than the limit of {limit}: {lag} "
            f"batches wait for the consumer{age}",
            Hint(Action.READ_FASTER),
            "Nothing was appended.",
        )
        self.key = key
        self.size = size
        self.limit = limit
        self.lag = lag
        self.oldest_ms = oldest_ms


class Fenced(OwnershipLost):
    """Another consumer claimed the queue, or the reader of a log, after this one.

    Attributes:
        reader: Name of the reader of a log; None for a queue.
    """

    def __init__(self, key: str, epoch: int, current_epoch: int) -> None:
        reader = None
        if "_readers/" in key and key.endswith(".json"):
            reader = key.rpartition("_readers/")[2].removesuffix(".json")
            text = (
                f"consumer with epoch {epoch} of reader {reader!r} was fenced by epoch "
                f"{current_epoch} of {key!r}: another consumer or query reads by this name, or "
                "a reset with --force moved the reader"
            )
            action = Action.STOP_READER
        else:
            text = (
                f"consumer with epoch {epoch} was fenced by epoch {current_epoch} on manifest "
                f"{key!r}: another consumer or query owns the queue"
            )
            action = Action.STOP_CONSUMER
        super().__init__(text, Hint(action))
        self.reader = reader
        self.key = key
        self.epoch = epoch
        self.current_epoch = current_epoch


class Drained(OpenDataBufferError):
    """The partition was drained and has left its topic. It accepts no more writes."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the queue with manifest {key!r} was a partition of a topic, was drained and is "
            "closed for good. Nothing was written",
            Hint(Action.PRODUCE_TO_OTHERS),
        )
        self.key = key


class Superseded(OwnershipLost):
    """Another run of the same app has started to write. This run wrote nothing of the batch.

    Args:
        app: The app id.
        batch: Number of the batch that this run did not make visible.
    """

    def __init__(self, app: str, batch: int) -> None:
        super().__init__(
            f"another run of app {app!r} has begun to write since this one did: nothing of "
            f"batch {batch} is visible",
            Hint(Action.STOP_OTHER_RUN),
        )
        self.app = app
        self.batch = batch


class CorruptData(DataError):
    """Bytes on storage break the v1 format, or exceed a limit.

    Attributes:
        limit: The limit in bytes, if the data exceeds one. None if the data is damaged.
    """

    limit: int | None = None

    @classmethod
    def too_large(cls, problem: str, limit: int) -> Self:
        """Return the error for data that exceeds a limit.

        Args:
            problem: A text that says which data is too large.
            limit: The limit in bytes.
        """
        error = cls(problem)
        error.limit = limit
        return error


class CorruptManifest(CorruptData):
    """The manifest breaks the v1 format. The library writes nothing to it."""


class CorruptBatch(CorruptData):
    """A batch breaks the v1 format or exceeds a decoding limit."""


class PoisonBatch(DataError):
    """One queued batch cannot be delivered. ``Consumer.skip(sequence)`` skips it.

    For a topic, ``partition`` names the partition: ``TopicConsumer.skip(partition, sequence)``. It
    is empty for a queue.
    """

    def __init__(
        self,
        sequence: int,
        location: str,
        reason: str,
        partition: str = "",
        hint: Hint | None = None,
    ) -> None:
        if hint is None:
            action = Action.SKIP_BATCH_OF_PARTITION if partition else Action.SKIP_BATCH
            hint = Hint(action, sequence=sequence, partition=partition)
        super().__init__(f"batch {sequence} at {location!r} cannot be delivered: {reason}", hint)
        self.sequence = sequence
        self.location = location
        self.reason = reason
        self.partition = partition


class BatchMissing(PoisonBatch):
    """The batch object that a queue entry names does not exist."""


class BatchUnreadable(PoisonBatch):
    """The batch object does not decode as a v1 batch within the limits."""


class ForeignLocation(PoisonBatch):
    """A queue entry names an object outside the data prefix (failure F23)."""


class MalformedRecord(DataError):
    """A record does not fit the schema, and the mode is FAILFAST."""

    def __init__(self, sequence: int, index: int, location: str, reason: str, data: bytes) -> None:
        head = data[:64]
        super().__init__(
            f"record {index} of batch {sequence} at {location!r} is malformed: {reason}. It begins "
            f"with {head!r}",
            Hint(Action.CHOOSE_MODE),
        )
        self.sequence = sequence
        self.index = index
        self.location = location
        self.reason = reason
        self.head = head


class QueueReset(DataError):
    """The manifest vanished or its positions went backwards (failure F4)."""


class DataLoss(DataError):
    """Sequences that must be read are no longer in the manifest.

    Attributes:
        open_from: The first sequence of the transactions that were open at ``needed``, if the
            reader delivers only committed ones. Their batches from there on are given up, too.
        hint: The likely cause and what to do, in the words of Python.
        count: How many batches are lost, at most. Sequences that a repair of the manifest skipped
            never held batches and do not count.
    """

    def __init__(
        self,
        key: str,
        needed: int,
        oldest: int,
        *more: str | Hint,
        open_from: int | None = None,
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        lost = [(max(needed, first), min(oldest, end)) for first, end in skipped]
        lost = [(first, end) for first, end in lost if first < end]
        count = oldest - needed - sum(end - first for first, end in lost)
        if "_readers/" in key and key.endswith(".json"):
            reader = key.rpartition("_readers/")[2].removesuffix(".json")
            text = f"reader {reader!r} needs sequence {needed}, and the log continues at {oldest}"
            why = f"{count} batches are gone."
        else:
            text = f"sequence {needed} is needed but manifest {key!r} starts at {oldest}"
            why = f"{count} batches were dequeued by another consumer."
        if lost:
            first, end = lost[-1]
            why = f"the manifest was rebuilt. Sequences {first} to {end - 1} never held batches."
            if count:
                why += (
                    f" The {count} batches before them were queued again from {end} on, unless "
                    "they had been read or their objects were gone."
                )
        text = f"{text}: {why}"
        if open_from is not None:
            text = (
                f"{text} Transactions from sequence {open_from} on were still open there: what "
                "they wrote before the loss is not delivered, either."
            )
        hint = render(more, Surface.PYTHON)
        super().__init__(f"{text} " if hint else text, *more)
        self.key = key
        self.needed = needed
        self.oldest = oldest
        self.hint = hint
        self.open_from = open_from
        self.count = count


class ClaimLost(OwnershipLost):
    """A worker's claim on a batch lapsed, and the batch went to another worker."""

    def __init__(self, sequence: int) -> None:
        super().__init__(
            f"the claim on batch {sequence} was lost: no heartbeat of its worker arrived within "
            "the claim's timeout, and the batch is handed out again. What was done with it may be "
            "done twice",
            Hint(Action.HOLD_CLAIM_LONGER),
        )
        self.sequence = sequence


class FlushFailed(OpenDataBufferError):
    """Batches were given up at the end of their retry budget. Their handles failed too.

    Attributes:
        failed_calls: The ``produce()`` calls whose handles failed.
        cause: Text of the first error.
        unknown_calls: Those of ``failed_calls`` that may be durable after all. Their handles
            raise :class:`CommitStateUnknown`.
    """

    def __init__(
        self, failed_calls: int, cause: str, unknown_calls: int = 0, hints: tuple[Hint, ...] = ()
    ) -> None:
        again = Hint(Action.PRODUCE_AGAIN)
        if unknown_calls:
            again = Hint(Action.PRODUCE_KNOWN_AGAIN, count=unknown_calls)
        super().__init__(
            f"{failed_calls} produce() calls were not made durable: {cause}", *hints, again
        )
        self.failed_calls = failed_calls
        self.cause = cause
        self.unknown_calls = unknown_calls


class Closed(OpenDataBufferError):
    """The object was closed before the call, or made before this process was forked."""


def copied(error: BaseException) -> BaseException:
    """Return a copy of an error with its traceback and its cause, to raise in its place.

    Each raise adds the frames that it passes to the traceback of an error. If a thousand handles
    raised one error, it would print all of their frames. Threads that raise it at the same time
    would mix their frames.

    Args:
        error: The error. It is never raised itself, so its traceback stays unchanged.

    Returns:
        An error of the same class with the same attributes. If its class cannot be copied,
        ``error`` itself without its traceback.
    """
    import copy  # only after a failure

    try:
        found: BaseException = copy.copy(error)
    except Exception:
        return error.with_traceback(None)
    found.__cause__, found.__context__ = error.__cause__, error.__context__
    found.__suppress_context__ = error.__suppress_context__
    return found.with_traceback(error.__traceback__)


__all__ = [
    name
    for name, each in list(vars().items())
    if isinstance(each, type) and issubclass(each, OpenDataBufferError)
]
