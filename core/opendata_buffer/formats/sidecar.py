"""The small JSON objects beside a manifest: how each of them is read and written.

A later release may add fields without another ``version``: readers pass them over, and a writer of
the object keeps them (:meth:`SidecarFields.others`).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

from opendata_buffer.errors import CorruptData

LARGEST = 2**64 - 1
"""Largest number that is read: sequences, epochs and clocks have 64 bits."""

_SHOWN = 100

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _SHOWN

T = TypeVar("T")


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
        """The fields of an object's bytes.

        ``CorruptData`` where they are too many, no JSON object, or of a later version.
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

    def unreadable(self, problem: str) -> CorruptData:
        """The error about an object that cannot be read: what is wrong, and what to do."""
        return CorruptData(f"{self.name} is not readable: {problem}. {self.remedy}")


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

    def mapping(self, name: str, default: dict[str, Any] = _REQUIRED) -> dict[str, Any]:
        """A JSON object whose names are not known beforehand."""
        found: dict[str, Any] = self._get(
            name, default, lambda each: isinstance(each, dict), "a JSON object"
        )
        return found

    def objects(self, name: str) -> list[SidecarFields]:
        """A list of JSON objects, each by its fields."""
        found = []
        for index, value in enumerate(self.items(name)):
            if not isinstance(value, dict):
                raise self.wrong(f"{name}[{index}]", "a JSON object", value)
            found.append(SidecarFields(self._sidecar, value, f"{self._path}{name}[{index}]."))
        return found

    def others(self) -> dict[str, Any]:
        """The fields that were not asked for: those of later releases, once all own ones were."""
        return {name: self._values[name] for name in self._values if name not in self._read}

    def wrong(self, name: str, wanted: str, value: Any = _REQUIRED) -> CorruptData:
        """The error about a field that is not what is ``wanted``, such as ``a text``.

        ``value`` is the wrong value where it is no field of its own.
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
    """Whether a value of JSON is a whole number in a range; true and false are none."""
    return type(value) is int and least <= value <= most
