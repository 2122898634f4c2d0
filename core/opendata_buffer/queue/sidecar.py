"""Encode and decode sidecars: the small versioned JSON objects next to a manifest.

The formats of the manifest and of a batch belong to OpenData Buffer v1 and cannot hold anything
more. Everything else that a queue has to remember, such as its owner, its consumer or its readers,
is in a JSON object of its own. We call such an object a sidecar. This one names the consumer of a
queue::

    {"version": 1, "epoch": 3, "host": "worker-7", "process": 4711, "program": "Spark",
     "query": "9f0c...", "since_ms": 1767225600000, "ended_epoch": 3}

Programs of different releases read and write the same sidecar, so three rules apply to each of
them:

* A release may add a field without raising ``version``. An older release ignores the field when it
  reads, and writes it back unchanged (:meth:`SidecarFields.others`).
* A release raises ``version`` when an older release would misunderstand the object. A program
  refuses every version above the one that it knows.
* A field has one type. If the value has another type, or is out of range, the object is damaged.
  The error names the field and says how to repair the object. We never guess.

A module that owns a sidecar describes it once, and converts between its fields and a dataclass::

    NOTE = Sidecar("the note of the consumer", "Delete it, and the next consumer writes it again.")

    fields = NOTE.decode(data)
    epoch, host = fields.number("epoch"), fields.text("host")
    others = fields.others()                    # fields of later releases
    data = NOTE.encode({"epoch": epoch + 1, "host": host}, others)

Things that can go wrong:

* The object has garbage in it, or is huge. It is limited in size before it is parsed, and an error
  shows only its first bytes.
* The object holds a secret, such as the token of a broker. A ``confidential`` sidecar shows no
  value in an error.
* Two programs change the object at the same time. This module only converts bytes;
  :mod:`opendata_buffer.queue.cas` makes changes safe.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, TypeVar, overload

from opendata_buffer import errors
from opendata_buffer.hints import Hint
from opendata_buffer.stores.base import Get, read_bytes

LARGEST = 2**64 - 1
"""Largest number that is accepted. Sequences, epochs and clocks have 64 bits."""


_SHOWN = 100


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _SHOWN

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One kind of small JSON object.

    Attributes:
        name: The name of the object in errors, such as ``the owner marker``.
        remedy: How to repair an unreadable object: a hint, or whole sentences. Errors end with it.
        version: The version that this release writes. It reads this one and all earlier ones.
        max_bytes: An object of more bytes is refused.
        confidential: Whether errors must not show any byte of the object.
    """

    name: str
    remedy: str | Hint
    version: int = 1
    max_bytes: int = 64 * 1024
    confidential: bool = False

    def decode(self, data: bytes) -> SidecarFields:
        """Parse the bytes of an object.

        Args:
            data: The whole object.

        Returns:
            Its fields.

        Raises:
            CorruptData: The object is too large, is not a JSON object, or has a later version.
        """
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
            raise self.unreadable(f"it is not a JSON object{begins}")
        fields = SidecarFields(self, values)
        version = fields.number("version", least=1)
        if version > self.version:
            raise self.unreadable(
                f"it has version {version}, and this release reads versions up to {self.version}: "
                "a later release of opendata-buffer wrote it. Use that release. Do the following "
                "only if no later release has ever been used here"
            )
        return fields

    def encode(self, own: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> bytes:
        """Write an object as one line of JSON.

        Args:
            own: The fields that this release knows, without the version.
            others: Fields of later releases, which :meth:`SidecarFields.others` returned.

        Returns:
            The bytes of the object.
        """
        fields = {**(others or {}), "version": self.version, **own}
        try:
            return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:
            # A host name or a path of the operating system may hold bytes that are not valid
            # text. ASCII escapes can represent them.
            return json.dumps(fields).encode() + b"\n"

    def encode_value(self, value: Any, **own: Any) -> bytes:
        """Write a dataclass that :meth:`SidecarFields.into` can read.

        Args:
            value: The dataclass. Its field ``others`` holds the fields of later releases. Bytes are
                written as hexadecimal digits, and a field that is None is left out.
            **own: Fields to write instead of those of the dataclass with the same name.

        Returns:
            The bytes of the object.
        """
        found = dict(own)
        for field in fields(value):
            if field.name != "others":
                found.setdefault(field.name, getattr(value, field.name))
        for name, content in found.items():
            if isinstance(content, bytes):
                found[name] = content.hex()
        present = {name: content for name, content in found.items() if content is not None}
        return self.encode(present, value.others)

    def unreadable(self, problem: str) -> errors.CorruptData:
        """Make the error for an object that cannot be read.

        Args:
            problem: The fault of the object, such as ``it has 70000 bytes``.

        Returns:
            The error, to be raised by the caller.
        """
        return errors.CorruptData(f"{self.name} is not readable: {problem}. ", self.remedy)


_REQUIRED: Final[Any] = object()


class SidecarFields:
    """The fields of one object, or of an object nested in it.

    A field that has a default may be missing or null. Every method that reads a field raises
    :class:`.CorruptData` if the field is missing or does not fit.

    Args:
        sidecar: The kind of the object.
        values: The parsed JSON object.
        path: Where a nested object is, such as ``partitions[3].``. It precedes field names in
            errors.
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
        """Return a text."""
        return self._get(name, default, lambda value: isinstance(value, str), "a text")

    @overload
    def number(self, name: str, *, least: int = 0, most: int = LARGEST) -> int: ...
    @overload
    def number(self, name: str, default: T, *, least: int = 0, most: int = LARGEST) -> int | T: ...
    def number(
        self, name: str, default: Any = _REQUIRED, *, least: int = 0, most: int = LARGEST
    ) -> Any:
        """Read a whole number in a range. JSON's true and false are not numbers.

        Args:
            name: The field.
            default: Value of a missing field. Without it, the field is required.
            least: Smallest value.
            most: Largest value.

        Returns:
            The number, or the default.

        Raises:
            CorruptData: The field is missing, or is not a number in the range.
        """
        limit = f"of at least {least}" if most == LARGEST else f"from {least} to {most}"
        return self._get(
            name, default, lambda value: is_number(value, least, most), f"a whole number {limit}"
        )

    def items(self, name: str, default: list[Any] = _REQUIRED) -> list[Any]:
        """Return a list with elements of any type."""
        found: list[Any] = self._get(name, default, lambda value: isinstance(value, list), "a list")
        return found

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        """Read a list of ranges, each of which is a list of two numbers.

        Args:
            name: The name of the field.

        Returns:
            The ranges; empty if the field is missing.

        Raises:
            CorruptData: The field has another form.
        """
        found = self.items(name, [])
        for each in found:
            if not (isinstance(each, list) and len(each) == 2 and all(map(is_number, each))):
                raise self.wrong(name, "a list of ranges")
        return tuple((first, end) for first, end in found)

    @overload
    def mapping(self, name: str) -> dict[str, Any]: ...
    @overload
    def mapping(self, name: str, default: T) -> dict[str, Any] | T: ...
    def mapping(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a JSON object with any field names."""
        return self._get(name, default, lambda value: isinstance(value, dict), "a JSON object")

    def objects(self, name: str) -> list[SidecarFields]:
        """Read a list of JSON objects.

        Args:
            name: The field.

        Returns:
            The fields of each object.

        Raises:
            CorruptData: The field is missing, or is not such a list.
        """
        found = []
        for index, value in enumerate(self.items(name)):
            if not isinstance(value, dict):
                raise self.wrong(f"{name}[{index}]", "a JSON object", value)
            found.append(SidecarFields(self._sidecar, value, f"{self._path}{name}[{index}]."))
        return found

    def into(self, kind: Callable[..., T], **values: Any) -> T:
        """Build a dataclass from the fields that have the names of its own fields.

        A field's type must be ``str``, ``str | None``, ``bytes`` (written as hexadecimal digits) or
        a number. A field named ``others`` gets the fields of later releases.

        Args:
            kind: The dataclass.
            **values: Values of fields that the caller has read itself.

        Returns:
            The dataclass.

        Raises:
            CorruptData: A field is missing or does not fit.
        """
        readers: dict[object, Callable[..., Any]]
        readers = {"str": self.text, "str | None": self.text, "bytes": self._hexadecimal}
        own = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
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
        """Return the fields that were not read yet.

        Call it after every known field was read. The remaining fields were written by a later
        release, and must be written back.
        """
        return {name: self._values[name] for name in self._values if name not in self._read}

    def wrong(self, name: str, wanted: str, value: Any = _REQUIRED) -> errors.CorruptData:
        """Make the error for a field with an unexpected value.

        Args:
            name: The field's name.
            wanted: The expected kind of value, such as ``a text``.
            value: The value, if it is not the field's own but inside it.

        Returns:
            The error, to be raised by the caller.
        """
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
    """Return whether a JSON value is a whole number in this range. A boolean is not a number."""
    return type(value) is int and least <= value <= most


def read_sidecar(store: Get, key: str, kind: Sidecar, decode: Callable[[bytes], T]) -> T:
    """Read one object of a store.

    Args:
        store: Where the object is.
        key: The object's key.
        kind: The kind of the object, which limits its size.
        decode: Converts the bytes to the value.

    Returns:
        The value.

    Raises:
        CorruptData: The object is too large, or ``decode`` refuses it. The error names the key.
        ObjectNotFound: There is no such object.
        StorageError: The store did not answer.
    """
    try:
        data = read_bytes(store, key, kind.max_bytes)
    except errors.CorruptData as error:
        fault = kind.unreadable(error.problem.rstrip("."))
        raise errors.CorruptData(f"{key!r}: ", *fault.args) from error
    try:
        return decode(data)
    except errors.CorruptData as error:
        # The decoder sees only the bytes, and cannot name the object.
        raise errors.CorruptData(f"{key!r}: ", *error.args) from error
