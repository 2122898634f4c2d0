"""One object that only compare-and-swap changes; the only place of the library that does it.

A change is a pure function from the value as it is (None: no object) to the value as it shall
be; the same value means that nothing is to be written. :class:`CasObject` reads, asks it, writes
on the condition that the object is still what was read, and looks a lost answer up. Manifest,
owner marker and the sink's commit record are registers, each with its own codec and checks.

What a caller learns, and what it may rely on. "Surely not written" also means: cannot land later.

===================  ===========================================================================
:class:`Done`        The value holds: this call wrote it, an attempt of this call whose answer
                     was lost is in it, or there was nothing to write.
:class:`Raced`       Conflict: every attempt lost its race until the deadline, and the object was
                     read after the last one. Surely not written.
:class:`Gone`        Vanished: the object was there and was deleted. Surely not written, and never
                     recreated from here (failure F4).
:class:`Doubtful`    Unknown: an attempt may have been written or may still be (failures F1, F2).
                     Says why nobody can tell. A change that may be applied twice is simply
                     repeated; for any other this is the end of what can be known.
an exception         Of the change, a check, the codec or the store. Of a change with a proof:
                     surely not written, for with an attempt in doubt it would have been
                     ``Doubtful``. A change without one may be applied twice, so its earlier
                     attempts do not matter: they may have been written.
===================  ===========================================================================

How one attempt can end, and what is done about it:

* The store applied it: the version is remembered, the next change needs no read before it.
* It lost its race: the object is read and the change asked again. Until it is read the attempt is
  in doubt (:mod:`.http`); so the last one of all is looked up, too.
* The answer was lost: the object is read, which ends the doubt unless it has not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from opendata_buffer import outcomes
from opendata_buffer.errors import (
    CorruptData,
    ObjectNotFound,
    OpenDataBufferError,
    PermanentStorageError,
    TransientStorageError,
)
from opendata_buffer.retry import BackoffSettings, queue_retry
from opendata_buffer.runtime import Runtime, deadline, remaining
from opendata_buffer.stores.base import ABSENT, ConditionalPut, Get, IfVersion, NotModified

__all__ = [
    "Attempts",
    "CasStore",
    "Done",
    "Doubtful",
    "Gone",
    "LAST_LOOK_S",
    "Outcome",
    "Proof",
    "Raced",
    "CasObject",
    "OutcomeUnknown",
]


# ---- What became of the attempts to write one change, as far as that is known. Pure. ----
#
# An attempt is in doubt while nobody can tell whether it was written or still may be:
#
# * One that lost its race, until the object is read. A proxy that repeats requests turns our own
#   success into a conflict.
# * One whose answer was lost, while the version it was bound to is the current one. Bound to an
#   older one it can never land any more, so if it is not in the object by then it never was.


T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class OutcomeUnknown(OpenDataBufferError):
    """What an attempt wrote may have been in the object and be gone again."""


class Proof(Protocol[T_contra]):
    """How a change that must not be applied twice is recognised in a later value."""

    def mark(self) -> int:
        """Where the attempt that was decided last would be found; kept while it is in doubt."""
        ...

    def find(self, now: T_contra, marks: Sequence[int]) -> bool:
        """Whether one of the attempts of this change is in the value read just now.

        Args:
            now: The value.
            marks: Of the attempts in doubt; others surely failed, or were repeated on the way
                and answered as conflicts.

        Raises:
            Untraceable: It is not, but it may have been.
        """
        ...


class Attempts(Generic[T]):
    """The attempts of one change.

    Args:
        proof: How the change is recognised; None for one that may be applied twice.
    """

    def __init__(self, proof: Proof[T | None] | None) -> None:
        self._proof = proof
        self._tried = False
        self._unseen = False  # whether one lost its race, and the object was not read since
        self._mark = 0
        self._lost: list[tuple[int, str | None]] = []  # mark, and the version it was bound to

    @property
    def in_doubt(self) -> bool:
        """Whether one may have landed, or may still land, without our knowing."""
        return self._unseen or bool(self._lost)

    @property
    def first_mark(self) -> int:
        """:meth:`Proof.mark` of the first one in doubt."""
        return self._lost[0][0] if self._lost else self._mark

    def begin(self) -> None:
        """One more is about to be sent."""
        self._tried = True
        self._mark = self._proof.mark() if self._proof is not None else 0

    def landed(self) -> None:
        """The last one was written, and earlier ones cannot be: they were bound to the version
        it replaced, or to older ones."""
        self._unseen = False
        self._lost.clear()

    def raced(self) -> None:
        """The last one was answered with a conflict."""
        self._unseen = True

    def lost_answer(self, version: str | None) -> None:
        """The last one, which was bound to ``version``, was not answered."""
        self._lost.append((self._mark, version))

    def look(self, now: T | None, version: str | None) -> bool:
        """Whether the change is in what was read just now (failures F1, F2).

        Args:
            now: The value; None when there is no object.
            version: The object's.

        Raises:
            Untraceable: It is not, but it may have been.
        """
        if not self._tried:
            return False
        marks = [mark for mark, _ in self._lost]
        found = self._proof is not None and self._proof.find(now, marks)
        self._unseen = False
        self._lost = [] if found else [lost for lost in self._lost if lost[1] == version]
        return found


log = logging.getLogger(__name__)

LAST_LOOK_S = 5.0
"""Seconds beyond the deadline for an attempt that began at it, and to look up what it did."""


class CasStore(Get, ConditionalPut, Protocol):
    """What a register needs of a store."""

    @property
    def url(self) -> str:
        """The URL that names the store."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The object has this value; None when there is no object and none was to be written."""

    value: T


@dataclass(frozen=True, slots=True)
class Raced:
    """Surely not written: ``attempts`` in ``waited_s`` seconds all lost to other writers."""

    attempts: int
    waited_s: float

    def __str__(self) -> str:
        return f"other writers were faster each of {self.attempts} times in {self.waited_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Gone:
    """Surely not written: the object was deleted while it was in use."""

    def __str__(self) -> str:
        return "it was deleted meanwhile"


@dataclass(frozen=True, slots=True)
class Doubtful:
    """An attempt may have been written or may still be.

    Attributes:
        reason: Why that cannot be told.
        mark: :meth:`Proof.mark` of the first attempt in doubt.
        cause: The error that ended the call, if it was one and not the deadline.
    """

    reason: str
    mark: int
    cause: OpenDataBufferError | None = None

    def __str__(self) -> str:
        return self.reason.rstrip(".")


Outcome = Done[T] | Raced | Gone | Doubtful


class _Again(Exception):
    """The attempt lost its race or its answer: retry. Never leaves this module."""


class _Conflict(_Again):
    """It lost its race."""


class _Missing(OpenDataBufferError):
    """The object vanished. Never leaves this module."""


class CasObject(Generic[T]):
    """One object of a store as a typed value. Not thread-safe: its owner serialises the calls.

    Args:
        store: Where the object lives.
        key: Its key.
        decode: From bytes to the value; raises :class:`CorruptData`.
        encode: From the value to bytes.
        runtime: Clock and jitter.
        settings: Deadline of one change, and its backoff.
        max_bytes: A larger object is not read.
        unreadable: From what is wrong with one that was not read to the error; None to tell only
            that.
        check_read: Called with the value known so far and the one read now, when they differ;
            raises when the second cannot follow the first.
        check_write: Called with the value that is about to be replaced, or None, and its
            successor: the last gate before the store.
        after_conflict: Seconds to wait after a lost race, asked each time; None for the
            backoff of any other retry.
    """

    def __init__(
        self,
        store: CasStore,
        key: str,
        *,
        decode: Callable[[bytes], T],
        encode: Callable[[T], bytes],
        runtime: Runtime,
        settings: BackoffSettings,
        max_bytes: int,
        unreadable: Callable[[str], CorruptData] | None = None,
        check_read: Callable[[T, T], None] | None = None,
        check_write: Callable[[T | None, T], None] | None = None,
        after_conflict: Callable[[], float | None] | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._decode = decode
        self._encode = encode
        self._runtime = runtime
        self._max_bytes = max_bytes
        self._unreadable = unreadable
        self._check_read = check_read
        self._check_write = check_write
        self._reading = queue_retry(runtime, settings)
        self._deadline_s = settings.cas_deadline_ms / 1000
        self._after_conflict = after_conflict
        self._changing = queue_retry(
            runtime, settings, retry_on=(_Again, TransientStorageError), pause=self._pause
        )
        self._value: T | None = None
        self._version: str | None = None
        self._fresh = False
        self.attempts = 0
        """Conditional writes sent so far."""
        self.conflicts = 0
        """Those that lost a race."""

    @property
    def key(self) -> str:
        """The object's key."""
        return self._key

    @property
    def last_seen(self) -> T | None:
        """The value as last read or written; None when no object was seen yet."""
        return self._value

    def read(self) -> Done[T | None] | Gone:
        """The value as it is now. One conditional GET; an unchanged object is not transferred.

        Raises:
            CorruptData: The object does not decode, or is too large.
            TransientStorageError: The store did not answer until the deadline.
            PermanentStorageError: It refused.
        """
        try:
            with deadline(self._runtime, self._deadline_s):
                value: T | None = self._reading(self._read_once)
        except _Missing:
            return Gone()
        return Done(value)

    def update(
        self,
        decide: Callable[[T | None], T | None],
        *,
        proof: Proof[T | None] | None = None,
        from_memory: bool = False,
    ) -> Outcome[T | None]:
        """Change the value. See the module's docstring for the outcomes.

        Args:
            decide: From the value as it is to the value as it shall be; the same object for no
                write. It must be pure: it is asked once per attempt.
            proof: How to recognise a change that must not be applied twice.
            from_memory: Begin with the value as last seen, without reading it. Saves a request
                where nobody else writes and costs a lost race where somebody does. Nothing is
                refused or left unwritten on the ground of a remembered value.
        """
        with deadline(self._runtime, self._deadline_s + LAST_LOOK_S):
            return self._update(decide, proof, from_memory)

    def _update(
        self,
        decide: Callable[[T | None], T | None],
        proof: Proof[T | None] | None,
        from_memory: bool,
    ) -> Outcome[T | None]:
        self._fresh = self._fresh and from_memory
        run: Attempts[T] = Attempts(proof)
        started, attempts = self._runtime.monotonic(), self.attempts
        try:
            try:
                value: T | None = self._changing(self._attempt, decide, run)
                if proof is None or not run.in_doubt:
                    return Done(value)
                reason = "nothing more was to be written, but an earlier attempt may still land"
            except _Conflict as error:
                # The deadline has passed, but what the last attempt did must be known.
                self._read_once()
                if run.look(self._value, self._version):
                    return Done(self._value)
                reason = str(error)
            except _Again as error:
                reason = str(error)
        except OpenDataBufferError as error:
            gone = isinstance(error, _Missing)
            if run.in_doubt and proof is not None:
                return Doubtful(str(error), run.first_mark, None if gone else error)
            if gone:
                return Gone()
            raise
        if run.in_doubt:
            return Doubtful(reason, run.first_mark)
        return Raced(self.attempts - attempts, self._runtime.monotonic() - started)

    def _attempt(self, decide: Callable[[T | None], T | None], run: Attempts[T]) -> T | None:
        remembered = self._fresh
        if not remembered:
            self._read_once()
            if run.look(self._value, self._version):
                return self._value
        before = self._value
        try:
            after = decide(before)
            if after is not before and after is not None and self._check_write is not None:
                self._check_write(before, after)
        except Exception:
            if not remembered:
                raise
            after = before
        if after is before or after is None:
            if not remembered:
                return before
            self._fresh = False
            return self._attempt(decide, run)
        return self._write(run, after)

    def _write(self, run: Attempts[T], after: T) -> T:
        left_s = remaining()
        if left_s is not None and left_s <= 0:
            # A store that is given no time answers "unknown" without having sent anything.
            raise TransientStorageError(f"no time was left to write {self._key!r}")
        version = self._version
        condition = ABSENT if version is None else IfVersion(version)
        # Until the outcome says otherwise, what we know of the object is out of date; this also
        # holds when put_if raises.
        self._fresh = False
        self.attempts += 1
        run.begin()
        outcome = self._store.put_if(self._key, self._encode(after), condition)
        match outcome:
            case outcomes.Applied(written):
                self._value, self._version, self._fresh = after, written, True
                run.landed()
                return after
            case outcomes.Conflict():
                self.conflicts += 1
                run.raced()
                raise _Conflict("another writer was faster")
            case outcomes.Vanished():
                raise _Missing(f"{self._key!r} in {self._store.url} vanished")
            case _:
                log.warning("answer to a write of %s was lost: %s", self._key, outcome.reason)
                run.lost_answer(version)
                raise _Again(f"answers were lost: {outcome.reason.rstrip('.')}")

    def _pause(self, error: BaseException) -> float | None:
        if self._after_conflict is None or not isinstance(error, _Conflict):
            return None
        return self._after_conflict()

    def _read_once(self) -> T | None:
        try:
            got = self._store.get(self._key, if_changed=self._version, max_bytes=self._max_bytes)
        except ObjectNotFound as error:
            if self._version is not None:
                raise _Missing(f"{self._key!r} in {self._store.url} vanished") from error
            self._fresh = True
            return None
        except CorruptData as error:
            if self._unreadable is None:
                raise
            fault = self._unreadable(str(error).rstrip("."))
            raise type(fault)(f"{self._key!r} in {self._store.url}: {fault}") from error
        if isinstance(got, NotModified):
            if self._version is None:
                raise PermanentStorageError(
                    f"store {self._store.url} answered 'not modified' to a plain read of "
                    f"{self._key!r}"
                )
        else:
            value = self._parse(got.data)
            if self._check_read is not None and self._value is not None:
                self._check_read(self._value, value)
            self._value, self._version = value, got.version
        self._fresh = True
        return self._value

    def _parse(self, data: bytes) -> T:
        try:
            return self._decode(data)
        except CorruptData as error:
            # The codec sees bytes and cannot say whose they are.
            raise type(error)(f"{self._key!r} in {self._store.url}: {error}") from error
