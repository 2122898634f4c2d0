"""Check the types of arguments, to refuse a wrong one before anything is read or written.

A value of the wrong type is dangerous in Python, because many values convert to others without an
error: ``bytes(3)`` is three zero bytes, and ``bytes([65, 66])`` is ``b"AB"``. So every public
function and every configuration checks its arguments, and raises one error::

    metadata is 3 (int): use bytes, bytearray or memoryview

The annotations that the type checker reads are the only list of accepted types. Functions have the
decorator :func:`checked`, and dataclasses call :func:`check_fields`. A function that is called for
every record, such as ``Producer.send``, checks by hand and calls :func:`wrong_type`.

The elements of lists, tuples and dicts are checked too. An iterator is not read, because that would
use it up.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, wraps
from numbers import Real
from os import PathLike
from types import UnionType
from typing import Any, BinaryIO, Literal, Self, TypeVar, Union, get_args, get_origin

from opendata_buffer.errors import InvalidInput
from opendata_buffer.hints import Setting

_F = TypeVar("_F", bound=Callable[..., Any])

_MOST_ACCEPTED = 64
"""Number of combinations of types that a function remembers. Callers have a handful."""

_TEXTS = (str, bytes, bytearray, memoryview)
"""Types that are sequences although a caller never means a list of their elements."""

_OWN = ("self", "cls")
_URLS = (("config",), ("topic",), ("url",))
"""Names of the argument that is the URL of a queue or topic."""

_SHORT = 12
"""Length of the longest text that a message shows. The keys of a cloud are longer."""

_NAMES: dict[Any, str] = {
    Callable: "a function",
    Iterable: "a list",
    Sequence: "a list",
    Mapping: "a dict",
    BinaryIO: "a binary file",
    PathLike: "a URL or path such as 's3://bucket/orders'",
    bool: "true or false",
    "Schema": "a pyarrow.Schema, such as pa.schema([('id', pa.int64())])",
    "Store": "an opened Store, such as open_store('s3://bucket/orders')",
    "StoreOptions": "StoreOptions(...)",
}
"""Descriptions of types in messages. A type is named by itself or, if its module may not be loaded,
by its name."""


def wrong_type(
    name: str | Setting, value: object, use: str, *, secret: bool = False
) -> InvalidInput:
    """Make the error for an argument that has the wrong type.

    Args:
        name: The name of the argument or setting.
        value: The value that was given. Numbers and short texts are shown, such as a number in
            quotes. Other values might be credentials or data.
        use: The values that are accepted.
        secret: Never show the value.

    Returns:
        The error, to be raised by the caller.
    """
    return InvalidInput(name, f" is {_shown(value, secret)}: use {use}")


def _shown(value: object, secret: bool) -> str:
    kind = type(value).__name__
    if secret:
        return f"of type {kind}"
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__} (type)"
    is_short = (
        isinstance(value, float)
        or (isinstance(value, int) and value.bit_length() < 200)
        or (isinstance(value, str) and len(value) <= _SHORT)
    )
    return f"{value!r} ({kind})" if is_short else f"of type {kind}"


def take_bytes(name: str, value: object) -> bytes:
    """Return a copy of a bytes-like value.

    Args:
        name: Name of the argument, for the error.
        value: The argument.

    Returns:
        The bytes. A ``bytes`` object is not copied.

    Raises:
        InvalidInput: The value is not ``bytes``, ``bytearray`` or ``memoryview``. Other values may
            have no bytes, or may convert to bytes that the caller did not mean (failure F48).
    """
    if type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise wrong_type(name, value, how_to_get_bytes(value))


def how_to_get_bytes(value: object) -> str:
    """Return advice on what to use in place of a value that is not bytes-like."""
    if isinstance(value, str):
        return "bytes; encode text, e.g. text.encode()"
    return "bytes, bytearray or memoryview"


def checked(function: _F) -> _F:
    """Make a function check its arguments against its annotations.

    Args:
        function: A function, also an asynchronous one.

    Returns:
        A function that checks its arguments and then calls ``function``.

    Raises:
        InvalidInput: By a call of the result, if an argument has another type, or if a function
            with settings is called without the URL that is its first argument.
        TypeError: By a call of the result, for an argument that does not exist. The error lists
            those that do. A wrong number of arguments raises Python's own error.
    """
    code: Any = getattr(function, "__wrapped__", function).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    takes_any_name = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    first = next((position for position, name in enumerate(names) if name not in _OWN), 0)
    needs_url = takes_any_name and names[first : first + 1] in _URLS
    accepted: set[tuple[object, ...]] = set()

    def check(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        # Most calls repeat the types of an earlier one, and comparing types costs a tenth of
        # comparing values with annotations. A batch is fetched and decoded by two checked calls.
        types = (*map(type, args), *kwargs, *map(type, kwargs.values()))
        if types in accepted:
            return
        if needs_url and len(args) <= first and names[first] not in kwargs:
            raise _no_url(function.__qualname__)
        annotations = function.__annotations__
        module = function.__module__
        types_decide = True
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name not in names and not takes_any_name:
                raise _no_argument(function.__qualname__, name, names)
            annotation = annotations.get(name)
            if annotation is None or name not in names:
                continue
            hint = _evaluated(annotation, module)
            _check(name, hint, value)
            types_decide = types_decide and _type_decides(hint, value)
        if types_decide and len(accepted) < _MOST_ACCEPTED:
            accepted.add(types)

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return await function(*args, **kwargs)

        return call_async  # type: ignore[return-value]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _no_url(call: str) -> InvalidInput:
    call = call.removesuffix(".__init__")
    return InvalidInput(
        f"{call}() has no URL. Give it first and without a name: {call}('s3://bucket/orders')"
    )


def _no_argument(call: str, name: str, names: Sequence[str]) -> TypeError:
    known = [name for name in names if name not in _OWN]
    use = f"use {', '.join(known)}" if known else "it takes none"
    return TypeError(f"{call}() got an unexpected keyword argument {name!r}: {use}")


def check_fields(instance: Any, but: Iterable[str] = ()) -> None:
    """Check the fields of a dataclass against their annotations, except those named in ``but``.

    Args:
        instance: The dataclass instance.
        but: Names of fields that have checks of their own.

    Raises:
        InvalidInput: A field has another type.
    """
    kind: Any = type(instance)
    every, fitting = _fields_of(kind, tuple(but))
    types = tuple(type(getattr(instance, each.name)) for each in every)
    # A process makes a changed copy of its settings for each object that it opens, mostly with the
    # types of an earlier copy. Then only the fields are left whose types do not decide.
    left = fitting.get(types, every)
    for each in left:
        _check(each.setting, each.hint, getattr(instance, each.name), secret=each.secret)
    if types not in fitting and len(fitting) < _MOST_ACCEPTED:
        fitting[types] = tuple(
            each for each in every if not _type_decides(each.hint, getattr(instance, each.name))
        )


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a dataclass that :func:`check_fields` checks."""

    name: str
    setting: Setting
    hint: Any
    secret: bool


@cache
def _fields_of(
    kind: type, but: tuple[str, ...]
) -> tuple[tuple[_Field, ...], dict[tuple[type, ...], tuple[_Field, ...]]]:
    """Return the fields of a dataclass, and a memory of the types that fitted.

    The memory has, for each combination of types, the fields whose values must still be checked.
    """
    every = tuple(
        _Field(
            each.name,
            Setting(each.name),
            _evaluated(str(each.type), kind.__module__),
            secret=not each.repr,
        )
        for each in fields(kind)
        if each.name not in but
    )
    return every, {}


class _NotLoaded:
    """A class that an annotation names, and whose module may not be loaded.

    The class is imported for type checkers only. If its module is not loaded, no value can be of
    that class. If it is loaded, the names of the value's own classes show the match.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __or__(self, other: object) -> _Either:
        return _Either(self, other)

    def __ror__(self, other: object) -> _Either:
        return _Either(other, self)

    def __getitem__(self, _: object) -> _NotLoaded:
        return self

    def __getattr__(self, name: str) -> _NotLoaded:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotLoaded(name)


class _Either:
    """A union with a :class:`_NotLoaded` in it."""

    def __init__(self, *choices: object) -> None:
        self.choices = choices

    def __or__(self, other: object) -> _Either:
        return _Either(*self.choices, other)

    def __ror__(self, other: object) -> _Either:
        return _Either(other, *self.choices)


class _Scope(dict[str, Any]):
    """The names that an annotation may use: those of its module."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or _NotLoaded(name)


@cache
def _evaluated(annotation: Any, module: str) -> Any:
    if not isinstance(annotation, str):
        return annotation
    scope = _Scope(vars(sys.modules[module]))
    # The scope has every name. In Python 3.14, Self | str imports a module, by the builtins.
    return eval(annotation, {"__builtins__": builtins}, scope)


def _choices(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, _Either):
        return tuple(choice for each in hint.choices for choice in _choices(each))
    if get_origin(hint) in (Union, UnionType):
        return get_args(hint)
    return (hint,)


def _check(name: str | Setting, hint: Any, value: object, *, secret: bool = False) -> None:
    """Raise ``InvalidInput`` if the value does not fit, or if one of its elements does not."""
    fitting = [choice for choice in _choices(hint) if _fits_one(choice, value)]
    if not fitting:
        raise wrong_type(name, value, _described(hint), secret=secret)
    arguments = get_args(fitting[0])
    if not arguments or get_origin(fitting[0]) is Literal:
        return
    if isinstance(value, dict):
        for key, element in value.items():
            _check(f"a key of {name}", arguments[0], key)
            _check(f"{name}[{key!r:.40}]", arguments[1], element)
    elif isinstance(value, list | tuple) and (len(arguments) == 1 or arguments[1:] == (...,)):
        accepted: set[type] = set()
        for index, element in enumerate(value):
            if type(element) not in accepted:  # A page of keys has a thousand elements.
                _check(f"{name}[{index}]", arguments[0], element)
                if _type_decides(arguments[0], element):
                    accepted.add(type(element))
    elif isinstance(value, tuple) and len(arguments) == len(value):
        for index, element in enumerate(value):
            _check(f"{name}[{index}]", arguments[index], element)


def _type_decides(hint: Any, value: object) -> bool:
    """Return whether each value of the same type would fit as well as this one, which fits."""
    if isinstance(value, dict | list | tuple | type):
        return False  # its elements, or the class that it is, decide
    return any(
        _fits_one(choice, value) and not _value_decides(get_origin(choice) or choice, value)
        for choice in _choices(hint)
    )


def _value_decides(kind: Any, value: object) -> bool:
    if isinstance(kind, type) and getattr(kind, "_is_protocol", False):
        return not all(hasattr(type(value), each) for each in _members(kind))
    return kind is Literal or kind is BinaryIO


def _fits_one(hint: Any, value: object) -> bool:
    kind = get_origin(hint) or hint
    if kind is None or kind is type(None):
        return value is None
    if kind is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if isinstance(kind, _NotLoaded):
        return any(each.__name__ == kind.name for each in type(value).__mro__)
    if kind is BinaryIO:
        return hasattr(value, "read") and not isinstance(value, type)
    if kind in (Any, object, Self) or not isinstance(kind, type):
        return True
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind in (Iterable, Sequence):
        return isinstance(value, kind) and not isinstance(value, (*_TEXTS, Mapping))
    if getattr(kind, "_is_protocol", False):
        # A dict has a method ``get`` like a store, so the names of methods are not enough.
        is_own = type(value).__module__ != "builtins" and not isinstance(value, type)
        return is_own and all(hasattr(value, each) for each in _members(kind))
    return isinstance(value, kind)


@cache
def _members(protocol: type) -> tuple[str, ...]:
    own = (each for each in protocol.__mro__ if getattr(each, "_is_protocol", False))
    names = {name for each in own for name in (*vars(each), *vars(each).get("__annotations__", ()))}
    return tuple(sorted(name for name in names if not name.startswith("_")))


def _described(hint: Any) -> str:
    found: list[str] = []
    for choice in _choices(hint):
        kind = get_origin(choice) or choice
        if kind is None or kind is type(None):
            found.append("None")
        elif kind is Literal:
            found += map(repr, get_args(choice))
        else:
            name = getattr(kind, "__name__", None) or kind.name
            found.append(_NAMES.get(kind) or _NAMES.get(name) or name)
    *others, last = dict.fromkeys(found)
    return f"{', '.join(others)} or {last}" if others else last
