"""Small versioned JSON objects, and the one compare-and-swap that changes an object.

A :class:`Sidecar` is a kind of JSON object beside a manifest. A later release may add fields
without another ``version``: readers pass them over, and a writer of the object keeps them
(:meth:`SidecarFields.others`).

A :class:`CasObject` is one object, a sidecar or a manifest, that only compare-and-swap changes; the
only place of the library that does it. A change is a pure function from the value as it is (None:
no object) to the value as it shall be; the same value means that nothing is to be written. It ends
with one of the four outcomes of :mod:`opendata_buffer.outcomes`:

* ``Applied``: the value holds. This call wrote it, or an attempt of this call whose answer was
  lost is in it, or there was nothing to write.
* ``Conflict``: every attempt lost its race until the deadline, and the object was read after the
  last one. Not written, and never will be.
* ``Vanished``: the object was there and was deleted. Not written, and not created again.
* ``Unknown``: an attempt may have been written or may still be. A change that may be applied
  twice is simply repeated.

Or it raises an error of the change, a check, the codec or the store. A change with a proof was
then not written. Earlier attempts of a change without a proof may have been.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, Generic, Protocol, TypeVar, overload

from opendata_buffer import errors, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.runtime import Runtime, deadline, remaining
from opendata_buffer.stores.base import Blob, ConditionalPut, Get, List, Put, read_bytes

log = logging.getLogger(__name__)

LAST_READ_S = 5.0
"""Seconds beyond the deadline for an attempt that began at it, and for reading what it did."""

LARGEST = 2**64 - 1
"""Largest number that is read: sequences, epochs and clocks have 64 bits."""

_SHOWN = 100

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _SHOWN

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One kind of small object.

    Errors have its ``name``, such as ``the owner marker``, and the ``remedy``, in whole sentences;
    of a ``confidential`` one they show no bytes. ``version`` is written; it and all before it are
    read.
    """

    name: str
    remedy: str
    version: int = 1
    max_bytes: int = 64 * 1024
    confidential: bool = False

    def decode(self, data: bytes) -> SidecarFields:
        """The fields of an object's bytes; ``CorruptData`` where they are too many, no JSON object,
        or of a later version."""
        if len(data) > self.max_bytes:
            raise self.unreadable(
                f"it has {len(data)} bytes, more than the limit of {self.max_bytes}"
            )
        try:
            values = json.loads(data.decode())
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            begins = "" if self.confidential else f" and begins with {data[:_SHOWN]!r}"
            raise self.unreadable(f"it is no JSON object{begins}")
        fields = SidecarFields(self, values)
        version = fields.number("version", least=1)
        if version > self.version:
            raise self.unreadable(
                f"it has version {version}, and this release reads versions up to {self.version}: "
                "a later release of opendata-buffer wrote it. Use that one, and do what follows "
                "only where none was ever used"
            )
        return fields

    def encode(self, own: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> bytes:
        """The bytes of an object, one line of JSON: fields of later releases, version, own."""
        fields = {**(others or {}), "version": self.version, **own}
        try:
            return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:
            # Names that an operating system gives need not be text: those go in escapes.
            return json.dumps(fields).encode() + b"\n"

    def encode_value(self, value: Any, **own: Any) -> bytes:
        """As :meth:`encode`, of a dataclass, which :meth:`SidecarFields.into` reads: its fields, or
        what is in their place in ``own``. What is None is left out."""
        found = {each.name: getattr(value, each.name) for each in fields(value)}
        others = found.pop("others")
        found = {**own, **{name: found[name] for name in found if name not in own}}
        texts = {k: v.hex() if isinstance(v, bytes) else v for k, v in found.items()}
        return self.encode({name: texts[name] for name in texts if texts[name] is not None}, others)

    def cas_object(
        self,
        kind: type[T],
        store: CasStore,
        key: str,
        runtime: Runtime,
        settings: QueueConfig,
        **options: Any,
    ) -> CasObject[T]:
        """The object at a key, whose value has ``to_json()`` and is made by ``from_json()``."""
        codec: Any = kind
        read, write = codec.from_json, codec.to_json
        options |= {"decode": read, "encode": write, "runtime": runtime, "settings": settings}
        return CasObject(store, key, sidecar=self, **options)

    def unreadable(self, problem: str) -> errors.CorruptData:
        """The error about an object that cannot be read: what is wrong, and what to do."""
        return errors.CorruptData(f"{self.name} is not readable: {problem}. {self.remedy}")


_REQUIRED: Final[Any] = object()


class SidecarFields:
    """The fields of one object, or of an object inside it at a path such as ``partitions[3].``.

    A field with a default may be missing or null. All methods raise ``CorruptData``.
    """

    __slots__ = ("_path", "_read", "_sidecar", "_values")

    def __init__(self, sidecar: Sidecar, values: Mapping[str, Any], path: str = "") -> None:
        self._sidecar = sidecar
        self._values = values
        self._path = path
        self._read = set[str]()

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, default: T) -> str | T: ...
    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A text."""
        return self._get(name, default, lambda value: isinstance(value, str), "a text")

    @overload
    def number(self, name: str, *, least: int = 0, most: int = LARGEST) -> int: ...
    @overload
    def number(self, name: str, default: T, *, least: int = 0, most: int = LARGEST) -> int | T: ...
    def number(
        self, name: str, default: Any = _REQUIRED, *, least: int = 0, most: int = LARGEST
    ) -> Any:
        """A whole number in a range; true and false are none."""
        limit = f"of at least {least}" if most == LARGEST else f"from {least} to {most}"
        return self._get(
            name, default, lambda value: is_number(value, least, most), f"a whole number {limit}"
        )

    def items(self, name: str, default: list[Any] = _REQUIRED) -> list[Any]:
        """A list of anything."""
        found: list[Any] = self._get(name, default, lambda each: isinstance(each, list), "a list")
        return found

    @overload
    def mapping(self, name: str) -> dict[str, Any]: ...
    @overload
    def mapping(self, name: str, default: T) -> dict[str, Any] | T: ...
    def mapping(self, name: str, default: Any = _REQUIRED) -> Any:
        """A JSON object whose names are not known beforehand."""
        return self._get(name, default, lambda value: isinstance(value, dict), "a JSON object")

    def objects(self, name: str) -> list[SidecarFields]:
        """A list of JSON objects, each by its fields."""
        found = []
        for index, value in enumerate(self.items(name)):
            if not isinstance(value, dict):
                raise self.wrong(f"{name}[{index}]", "a JSON object", value)
            found.append(SidecarFields(self._sidecar, value, f"{self._path}{name}[{index}]."))
        return found

    def into(self, kind: Callable[..., T], **values: Any) -> T:
        """A dataclass whose fields are texts, numbers, bytes in hexadecimal digits, these values,
        and :meth:`others`."""
        readers: dict[object, Callable[..., Any]]
        readers = {"str": self.text, "str | None": self.text, "bytes": self._hexadecimal}
        own = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
        others = own.pop("others", None)
        for name in own.keys() - values.keys():
            default = _REQUIRED if own[name].default is MISSING else own[name].default
            values[name] = readers.get(own[name].type, self.number)(name, default)
        return kind(**values, **({} if others is None else {"others": self.others()}))

    def _hexadecimal(self, name: str, default: Any) -> Any:
        try:
            return bytes.fromhex(self.text(name, default if default is _REQUIRED else ""))
        except ValueError:
            raise self.wrong(name, "bytes in hexadecimal digits") from None

    def others(self) -> dict[str, Any]:
        """The fields that were not asked for: those of later releases, once all own ones were."""
        return {name: self._values[name] for name in self._values if name not in self._read}

    def wrong(self, name: str, wanted: str, value: Any = _REQUIRED) -> errors.CorruptData:
        """The error about a field that is not what is ``wanted``, such as ``a text``; ``value`` is
        the wrong one where it is no field of its own."""
        where = f"field {self._path + name!r}"
        if value is _REQUIRED:
            if name not in self._values:
                return self._sidecar.unreadable(f"{where} is missing, {wanted}")
            value = self._values[name]
        shown = "" if self._sidecar.confidential else f"{_short.repr(value)}, and "
        return self._sidecar.unreadable(f"{where} is {shown}not {wanted}")

    def _get(self, name: str, default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if not fits(value):
            raise self.wrong(name, wanted)
        return value


def is_number(value: object, least: int = 0, most: int = LARGEST) -> bool:
    """Whether a value of JSON is a whole number in a range; true and false are none."""
    return type(value) is int and least <= value <= most


def read_sidecar(store: Get, key: str, kind: Sidecar, decode: Callable[[bytes], T]) -> T:
    """The object at a key, as a value. ``CorruptData``, with the key, where it is too large or
    ``decode`` refuses it; otherwise raises as :meth:`Get.get`."""
    try:
        data = read_bytes(store, key, kind.max_bytes)
    except errors.CorruptData as error:
        raise errors.CorruptData(f"{key!r}: {kind.unreadable(str(error).rstrip('.'))}") from error
    try:
        return decode(data)
    except errors.CorruptData as error:
        # The decoder sees only the bytes, and cannot name the object.
        raise errors.CorruptData(f"{key!r}: {error}") from error


class CasStore(Get, Put, ConditionalPut, List, Protocol):
    """What a :class:`CasObject` needs of a store, and a client of the broker beside it."""

    @property
    def url(self) -> str:
        """The URL that names the store."""


class OutcomeUnknown(errors.OpenDataBufferError):
    """An attempt may have been written into the object and taken out of it since."""


class Proof(Protocol[T_contra]):
    """How a change that must not be applied twice is recognised in a later value."""

    def mark(self) -> int:
        """Where the attempt that was decided last would be found; kept while it is in doubt."""

    def find(self, now: T_contra, marks: Sequence[int]) -> bool:
        """Whether an attempt, of those in doubt at ``marks``, is in the value read just now;
        ``OutcomeUnknown`` where none is, but one may have been."""


class _AmbiguousWrites(Generic[T]):
    """The attempts of one change that are in doubt: the store may have applied them, or still may.

    * An attempt that lost its race is in doubt until the object is read: a proxy that repeats
      requests turns our own success into a conflict (failure F1).
    * An attempt whose answer was lost is in doubt while the version it was bound to is the
      current one. Bound to an older version it can never be applied any more, so if it is not in
      the object by then it never was (failure F2).
    """

    def __init__(self, proof: Proof[T | None] | None) -> None:
        self._proof = proof
        self._tried = False
        self._conflict = False  # whether one lost its race, and the object was not read since
        self._mark = 0
        self._lost: list[tuple[int, str | None]] = []  # mark, and the version it was bound to

    @property
    def in_doubt(self) -> bool:
        return self._conflict or bool(self._lost)

    @property
    def first_mark(self) -> int:
        """:meth:`Proof.mark` of the first attempt in doubt."""
        return self._lost[0][0] if self._lost else self._mark

    def begin(self) -> None:
        self._tried = True
        self._mark = self._proof.mark() if self._proof is not None else 0

    def applied(self) -> None:
        # Earlier attempts cannot be written any more: they were bound to the version that this
        # one replaced, or to older ones.
        self._conflict = False
        self._lost.clear()

    def conflicted(self) -> None:
        self._conflict = True

    def lost_answer(self, bound_to: str | None) -> None:
        self._lost.append((self._mark, bound_to))

    def found_in(self, now: T | None, version: str | None) -> bool:
        """Whether the change is in the value and version that were read just now."""
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
    """One object of a store as a typed value. Not thread-safe: its owner serialises the calls.

    Args:
        decode: From bytes to the value; raises :class:`.CorruptData`.
        encode: From the value to bytes.
        settings: Deadline of one change, and its backoff.
        max_bytes: A larger object is not read; a sidecar has a limit of its own.
        sidecar: The kind of a small object: it makes the error about one that is too large.
        if_unreadable: Of a hint, the value, by the error and the version, that stands for an object
            which cannot be read. The next change replaces it, and makes a deleted one again.
        check_read: Raises when the value read now cannot follow the one known so far.
        after_conflict: Seconds to wait after a lost race, asked each time; None for the backoff.
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
        # Not a method of this object: in a cycle with it a large value would outlive its use.
        pause = None if after_conflict is None else _pause_after(after_conflict)
        self._changing = settings.retries(
            runtime, retry_on=(_Retry, errors.TransientStorageError), pause=pause
        )
        self.last_seen: T | None = None
        """The value as last read or written; None when no object was seen yet."""
        self._version: str | None = None
        self._fresh = False
        self.attempts = 0
        """Conditional writes sent so far."""
        self.conflicts = 0
        """Those that lost a race."""

    def read(self) -> T | outcomes.Vanished | None:
        """The value as it is now; None when there is no object, ``Vanished`` when there was one.
        One conditional GET: an unchanged object is not transferred."""
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
        """Change the value. See the module's docstring for the outcomes.

        Args:
            decide: From the value as it is to the value as it shall be; the same object for no
                write. It must be pure: it is called once per attempt.
            proof: Recognises a change that must not be applied twice; None if it may be.
            from_memory: Begin with the value as last seen, without reading it. That never is the
                reason to refuse a change, or not to write.
        """
        with deadline(self._runtime, self._deadline_s + LAST_READ_S):
            return self._update(decide, proof, from_memory)

    def change(self, decide: Callable[[T | None], T | None], *, from_memory: bool = False) -> T:
        """Make a change that may be applied twice, and return the value that holds now;
        ``TransientStorageError`` where that is not known."""
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
                # The deadline has passed, but what the last attempt did must be known.
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
        return outcomes.Conflict(self.attempts - attempts, self._runtime.monotonic() - started)

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
            # A store that is given no time answers "unknown" without having sent anything.
            raise errors.TransientStorageError(f"no time was left to write {self.key!r}")
        version = self._version
        # Until the outcome is known, also when put_if raises, the value may be out of date.
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
            case outcomes.Conflict() | outcomes.Vanished():
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
            fault = self._sidecar.unreadable(str(error).rstrip("."))
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
        """The value and its version, read once more where the first bytes break the format.

        A read may end early, and no checksum shows it: that must not stop a queue (failure F15).
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
        """What stands for an object that cannot be read, and its version; raises the error with the
        object's name, which codecs do not know, where nothing does."""
        named = type(fault)(f"{self.key!r} in {self._store.url}: {fault}")
        if self._if_unreadable is None:
            raise named from fault
        return self._if_unreadable(named, got.version), got.version

    def _missing(self) -> _Missing:
        return _Missing(f"{self.key!r} in {self._store.url} vanished")
