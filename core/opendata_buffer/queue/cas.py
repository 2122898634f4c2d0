"""Change one object with compare-and-swap, and say exactly what happened to the change.

Object stores have no transactions and no locks. They have one atomic operation for coordination:
replace an object *if it still has the version that I read* (``If-Match`` on S3). Every shared
object of this library, the manifest as well as the sidecars next to it, is changed in a loop around
this operation, and this module is the only one that contains the loop.

**The idea.** A change is a pure function from the value that the object has now to the value that
it should have. :class:`CasObject` reads the object, calls the function, and writes the result under
the condition that the version is unchanged. If another writer was faster, it reads again and calls
the function again::

    counter = CasObject(store, "counter", decode=int, encode=encode_number, ...)
    outcome = counter.update(lambda before: (before or 0) + 1)   # None: no such object yet

The function may be called several times, and each call may see another value, so it must not have
side effects. If it returns the value that it was given, there is nothing to write.

**What can go wrong: a lost answer.** A conditional write times out, and the connection is gone. Was
it applied? Writing again does not help: if the first attempt was applied, the second one increments
the counter twice. A proxy may even repeat the request, so that our own success comes back to us as
a conflict (failure F1). Most clients report an error here and leave the doubt to their users.

Two facts resolve nearly every doubt (failure F2):

* An attempt was bound to one version of the object. Once the object has another version, this
  attempt can never be applied any more. So if the object has moved on, and our change is not in it,
  then it never was and never will be.
* Our change may be recognisable. An append to a manifest names a batch that no other process can
  name. A :class:`Proof` looks for the change in the value that was read after the attempt.

A change that may be applied twice, such as "raise the number to at least 7", needs no proof. It is
simply repeated.

**The outcome** of a change is one of those in :mod:`opendata_buffer.outcomes`:

* ``Applied``: the value holds. Either this call wrote it, or an attempt whose answer was lost did,
  or there was nothing to write.
* ``Conflict``: every attempt lost its race until the deadline, and the object was read after the
  last one. The change was not written and never will be.
* ``Vanished``: the object existed and was deleted. The change was not written, and the object was
  not created again: a queue that lost its manifest must not silently start over.
* ``Unknown``: the doubt remains. An attempt may have been applied, or still may be.

Errors of the function, of the codec and of the store are raised. A change with a proof was then not
written. Earlier attempts of a change without a proof may have been.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from opendata_buffer import errors, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.sidecar import Sidecar
from opendata_buffer.runtime import Runtime, deadline, remaining
from opendata_buffer.stores.base import Blob, ConditionalPut, Get, List, Put

log = logging.getLogger(__name__)

LAST_READ_S = 5.0
"""Seconds past the deadline, for the last attempt and for the read after it."""


T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class CasStore(Get, Put, ConditionalPut, List, Protocol):
    """The store of a :class:`CasObject`. A client of the broker also provides these methods."""

    @property
    def url(self) -> str:
        """Return the URL that names the store."""


class OutcomeUnknown(errors.OpenDataBufferError):
    """An attempt may have been applied, and its traces may have been removed since."""


class Proof(Protocol[T_contra]):
    """A way to find a change that must not be applied twice in a value that was read later.

    A mark is a number that says where in the value an attempt would be found. For an append, it is
    the sequence of the first entry.
    """

    def mark(self) -> int:
        """Return the mark of the attempt that is about to be written."""

    def find(self, now: T_contra, marks: Sequence[int]) -> bool:
        """Look for the attempts in a value that was read later.

        Args:
            now: The value as it was just read.
            marks: The marks of the attempts whose answers were lost.

        Returns:
            Whether one of the attempts is in the value.

        Raises:
            OutcomeUnknown: No attempt is in the value, but one may have been and was removed since.
        """


class _AmbiguousWrites(Generic[T]):
    """The attempts of one change that the store may have applied, or may still apply.

    * An attempt that lost its race is in doubt until the object is read again: a proxy that repeats
      requests turns our own success into a conflict (failure F1).
    * An attempt whose answer was lost is in doubt while the object has the version to which it was
      bound. When the object has another version, the attempt can no longer be applied (failure F2).
    """

    def __init__(self, proof: Proof[T | None] | None) -> None:
        self._proof = proof
        self._tried = False
        self._conflict = False  # whether an attempt lost its race after the last read
        self._mark = 0
        # The mark of each attempt whose answer was lost, and the version to which it was bound.
        self._lost: list[tuple[int, str | None]] = []

    @property
    def in_doubt(self) -> bool:
        return self._conflict or bool(self._lost)

    @property
    def first_mark(self) -> int:
        """Return the mark of the first attempt in doubt."""
        return self._lost[0][0] if self._lost else self._mark

    def begin(self) -> None:
        self._tried = True
        self._mark = self._proof.mark() if self._proof is not None else 0

    def applied(self) -> None:
        # Earlier attempts can no longer be applied: they were bound to the version that this one
        # replaced, or to an older one.
        self._conflict = False
        self._lost.clear()

    def conflicted(self) -> None:
        self._conflict = True

    def lost_answer(self, bound_to: str | None) -> None:
        self._lost.append((self._mark, bound_to))

    def found_in(self, now: T | None, version: str | None) -> bool:
        """Return whether the change is in the value just read, and forget resolved doubts."""
        if not self._tried:
            return False
        found = self._proof is not None and self._proof.find(now, [mark for mark, _ in self._lost])
        self._conflict = False
        self._lost = [] if found else [lost for lost in self._lost if lost[1] == version]
        return found


class _Retry(Exception):
    """The answer to an attempt was lost. Never leaves this module."""


class _LostRace(_Retry):
    """An attempt lost its race."""


class _Missing(errors.OpenDataBufferError):
    """The object vanished. Never leaves this module."""


def _pause_after(conflict: Callable[[], float | None]) -> Callable[[BaseException], float | None]:
    return lambda error: conflict() if isinstance(error, _LostRace) else None


class CasObject(Generic[T]):
    """One object of a store as a typed value.

    Not thread-safe: the owner of this object must make its calls one after another.

    Args:
        store: Where the object is.
        key: The object's key.
        decode: Converts bytes to the value; raises :class:`.CorruptData`.
        encode: Converts the value to bytes.
        runtime: Clock and sleep.
        settings: The deadline of one change, and the backoff between attempts.
        max_bytes: An object of more bytes is refused. The limit of ``sidecar`` replaces it.
        sidecar: The kind of a small JSON object, for the error if it is too large.
        if_unreadable: For an object that is only a hint. Returns the value to use instead of an
            object that cannot be read, given the error and the object's version. The next change
            replaces the object. An object with this option is also created again after it was
            deleted.
        check_read: Raises if the value that was read now (second argument) cannot follow the last
            known one (first argument).
        after_conflict: Returns the seconds to wait after a lost race; None for the usual backoff.
    """

    def __init__(
        self,
        store: CasStore,
        key: str,
        *,
        decode: Callable[[bytes], T],
        encode: Callable[[T], bytes],
        runtime: Runtime,
        settings: QueueConfig,
        max_bytes: int | None = None,
        sidecar: Sidecar | None = None,
        if_unreadable: Callable[[errors.CorruptData, str], T] | None = None,
        check_read: Callable[[T, T], None] | None = None,
        after_conflict: Callable[[], float | None] | None = None,
    ) -> None:
        self.key = key
        self._store = store
        self._decode = decode
        self._encode = encode
        self._runtime = runtime
        self._max_bytes = max_bytes if sidecar is None else sidecar.max_bytes
        self._sidecar = sidecar
        self._if_unreadable = if_unreadable
        self._check_read = check_read
        self._reading = settings.retries(runtime)
        self._deadline_s = settings.timeout_ms / 1000
        # Not a method of this object: the reference cycle would keep a large value in memory
        # until the next run of Python's garbage collector.
        pause = None if after_conflict is None else _pause_after(after_conflict)
        self._changing = settings.retries(
            runtime, retry_on=(_Retry, errors.TransientStorageError), pause=pause
        )
        self.last_seen: T | None = None
        """The value as it was last read or written. None if no object was seen yet."""
        self._version: str | None = None
        self._fresh = False
        self.attempts = 0
        """Number of conditional writes sent so far."""
        self.conflicts = 0
        """Number of conditional writes that lost a race."""

    def adopt(self, other: CasObject[T]) -> None:
        """Know what another one knows about the same object, so that it is not read again.

        A change may then start from memory. If the object has changed since, the change loses its
        race, and reads.

        Args:
            other: It has read or written the object.
        """
        self.last_seen, self._version, self._fresh = other.last_seen, other._version, other._fresh

    def read(self) -> T | outcomes.Vanished | None:
        """Read the object with one conditional GET, which does not transfer an unchanged object.

        Returns:
            The value, None if there has never been an object, or ``Vanished`` if it was deleted.

        Raises:
            CorruptData: The object cannot be decoded, or is too large.
            StorageError: The store did not answer before the deadline.
        """
        try:
            with deadline(self._runtime, self._deadline_s):
                value: T | None = self._reading(self._read_once)
        except _Missing:
            return outcomes.Vanished()
        return value

    def update(
        self,
        decide: Callable[[T | None], T | None],
        *,
        proof: Proof[T | None] | None = None,
        from_memory: bool = False,
    ) -> outcomes.Outcome[T | None]:
        """Change the value. The module describes the outcomes.

        Args:
            decide: Returns the value that the object should have, given the value that it has (None
                if it does not exist). If it returns the same object, nothing is written. It is
                called once for each attempt, so it must be pure.
            proof: Recognises a change that must not be applied twice. None for any other change.
            from_memory: Start with the value that was last seen, and save a read. A refusal, or a
                decision to write nothing, is never based on this value: it is read again first.

        Returns:
            What happened to the change.

        Raises:
            CorruptData: The object cannot be decoded, or is too large.
            StorageError: The store did not answer, or refused the write.
        """
        with deadline(self._runtime, self._deadline_s + LAST_READ_S):
            return self._update(decide, proof, from_memory)

    def change(self, decide: Callable[[T | None], T | None], *, from_memory: bool = False) -> T:
        """Make a change that may be applied twice.

        Args:
            decide: As in :meth:`update`.
            from_memory: As in :meth:`update`.

        Returns:
            The value that holds now.

        Raises:
            TransientStorageError: It is not known whether the change was written; try again.
            CorruptData: The object cannot be decoded, or is too large.
        """
        outcome = self.update(decide, from_memory=from_memory)
        if isinstance(outcome, outcomes.Applied) and outcome.value is not None:
            return outcome.value
        raise errors.TransientStorageError(
            f"{self.key!r} in {self._store.url} was not written within {self._deadline_s:g} s: "
            f"{outcome}. It may have been written; try again."
        )

    def _update(
        self,
        decide: Callable[[T | None], T | None],
        proof: Proof[T | None] | None,
        from_memory: bool,
    ) -> outcomes.Outcome[T | None]:
        self._fresh = self._fresh and from_memory
        writes: _AmbiguousWrites[T] = _AmbiguousWrites(proof)
        started, attempts = self._runtime.monotonic(), self.attempts
        try:
            try:
                value: T | None = self._changing(self._attempt, decide, writes)
                if proof is None or not writes.in_doubt:
                    return outcomes.Applied(value)
                reason = (
                    "nothing more was to be written, but an earlier attempt may still be applied"
                )
            except _LostRace as error:
                # The deadline has passed, but the outcome of the last attempt must be found.
                self._read_once()
                if writes.found_in(self.last_seen, self._version):
                    return outcomes.Applied(self.last_seen)
                reason = str(error)
            except _Retry as error:
                reason = str(error)
        except errors.OpenDataBufferError as error:
            vanished = isinstance(error, _Missing)
            if writes.in_doubt and proof is not None:
                return outcomes.Unknown(str(error), writes.first_mark, None if vanished else error)
            if vanished:
                return outcomes.Vanished()
            raise
        if writes.in_doubt:
            return outcomes.Unknown(reason, writes.first_mark)
        return outcomes.LostRace(self.attempts - attempts, self._runtime.monotonic() - started)

    def _attempt(
        self, decide: Callable[[T | None], T | None], writes: _AmbiguousWrites[T]
    ) -> T | None:
        remembered = self._fresh
        if not remembered:
            self._read_once()
            if writes.found_in(self.last_seen, self._version):
                return self.last_seen
        before = self.last_seen
        try:
            after = decide(before)
        except Exception:
            if not remembered:
                raise
            after = before
        if after is before or after is None:
            if not remembered:
                return before
            self._fresh = False
            return self._attempt(decide, writes)
        return self._write(writes, after)

    def _write(self, writes: _AmbiguousWrites[T], after: T) -> T:
        left_s = remaining()
        if left_s is not None and left_s <= 0:
            # With no time left, a store would answer "unknown" without sending the request.
            raise errors.TransientStorageError(f"no time was left to write {self.key!r}")
        version = self._version
        # The value may be out of date until the outcome is known, also if put_if() raises.
        self._fresh = False
        self.attempts += 1
        writes.begin()
        outcome = self._store.put_if(self.key, self._encode(after), version)
        match outcome:
            case outcomes.Applied(written):
                self.last_seen, self._version, self._fresh = after, written, True
                writes.applied()
                return after
            case outcomes.Vanished() if self._if_unreadable is None:
                raise self._missing()
            case outcomes.LostRace() | outcomes.Vanished():
                self.conflicts += 1
                writes.conflicted()
                raise _LostRace("another writer was faster")
            case _:
                log.warning("answer to a write of %s was lost: %s", self.key, outcome.reason)
                writes.lost_answer(version)
                raise _Retry(f"answers were lost: {outcome}")

    def _read_once(self) -> T | None:
        fault: errors.CorruptData | None = None
        try:
            got = self._get(self._version)
        except errors.ObjectNotFound as error:
            if self._version is not None and self._if_unreadable is None:
                raise self._missing() from error
            self.last_seen = self._version = None
            self._fresh = True
            return None
        except errors.CorruptData as error:
            if self._sidecar is None:
                raise
            fault = self._sidecar.unreadable(error.problem.rstrip("."))
            got = self._store.get(self.key, byte_range=(0, 1))  # for its version
        if isinstance(got, Blob):
            value, version = self._decoded(got) if fault is None else self._without(fault, got)
            if self._check_read is not None and self.last_seen is not None:
                self._check_read(self.last_seen, value)
            self.last_seen, self._version = value, version
        self._fresh = True
        return self.last_seen

    def _get(self, known: str | None = None) -> Blob | None:
        return self._store.get(self.key, if_changed=known, max_bytes=self._max_bytes)

    def _decoded(self, got: Blob, *, first: bool = True) -> tuple[T, str]:
        """Decode an object into its value and version; if it is damaged, read it once more.

        A read can end early without an error, and no checksum shows that. A single short read must
        not stop a queue (failure F15).
        """
        try:
            return self._decode(got.data), got.version
        except errors.CorruptData as error:
            again = self._get() if first else got
            if not isinstance(again, Blob) or again.data == got.data:
                return self._without(error, got)
            log.warning("%s was read again, because %s", self.key, error)
            return self._decoded(again, first=False)

    def _without(self, fault: errors.CorruptData, got: Blob) -> tuple[T, str]:
        """Return the value that replaces an unreadable object, and the object's version.

        Raises:
            CorruptData: Nothing replaces it. The error names the object, which its codec cannot
                know.
        """
        named = type(fault)(f"{self.key!r} in {self._store.url}: {fault}")
        if self._if_unreadable is None:
            raise named from fault
        return self._if_unreadable(named, got.version), got.version

    def _missing(self) -> _Missing:
        return _Missing(f"{self.key!r} in {self._store.url} vanished")


def sidecar_object(
    sidecar: Sidecar,
    kind: type[T],
    store: CasStore,
    key: str,
    runtime: Runtime,
    settings: QueueConfig,
    **options: Any,
) -> CasObject[T]:
    """Open a sidecar of a store as a :class:`CasObject`.

    Args:
        sidecar: The kind of the object.
        kind: The class of its value, which has ``from_json()`` and ``to_json()``.
        store: Where the object is.
        key: The object's key.
        runtime: Clock and sleep.
        settings: The deadline of one change, and the backoff between attempts.
        **options: More arguments of :class:`CasObject`.

    Returns:
        The object. Nothing was read yet.
    """
    codec: Any = kind
    return CasObject(
        store,
        key,
        decode=codec.from_json,
        encode=codec.to_json,
        runtime=runtime,
        settings=settings,
        sidecar=sidecar,
        **options,
    )
