"""JSON records of any shape, by a library that makes an object of each, to Arrow columns.

The library is msgspec (extra ``json``): it checks the types of the columns while it decodes and is
as strict as Spark's parser. Without it, Python's own decoder does the same in three to five times
the time. Both refuse a record that Spark reads in a way of its own; the exact reader takes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opendata_buffer.values.from_texts import from_texts
from opendata_buffer.values.numbers import floats
from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.scalars import Unfit, decimal_of, java_string

try:
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]

__all__ = ["Objects"]

Mask = npt.NDArray[np.bool_]

_DIGITS = re.compile(rb"[0-9.eE+-]{1000}")
_NAME = re.compile(rb'"[^"]{50000}')
# From one quote to the next: from each backslash on, a long text would be read again and again.
_ESCAPED_NAME = re.compile(rb'"[^"\\]*+\\[^"]*+"\s*:')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MOST_NESTED = 900
_LONG = 1000  # Bytes of a record that may go beyond a limit of Spark's parser.


class Objects:
    """Reads records of any shape.

    Args:
        fields: The columns to fill.
        options: How.
        library: ``msgspec`` or ``json``; None: msgspec where it is installed.
    """

    def __init__(
        self, fields: Sequence[pa.Field], options: ValueOptions, library: str | None = None
    ) -> None:
        self._fields = list(fields)
        self._options = options
        if library is None:
            library = "json" if msgspec is None else "msgspec"
        closed = bool(options.rescued_column)
        row = None
        if library == "msgspec":
            with suppress(ValueError):  # It takes no names with characters that JSON escapes.
                row = _struct("Row", self._fields, closed)
        self.library = library = "json" if row is None else "msgspec"
        self._decode: Callable[[bytes], Any]
        if row is not None:
            self._decode = msgspec.json.Decoder(row).decode
            self._errors: tuple[type[Exception], ...] = (msgspec.MsgspecError,)
        else:
            names = {each.name for each in self._fields} if closed else None
            self._decode = _PlainDecoder(self._fields, names).decode
            self._errors = ()
        self._errors += (ValueError, RecursionError)
        # A name that stands twice: the last value counts, but the first must be of the type, too.
        # Of these types only we know that, and only see the last; json sees by itself.
        later = _read_later(self._fields) if library == "msgspec" else set()
        self._watched = [json.dumps(each, ensure_ascii=False).encode() for each in sorted(later)]

    def columns(self, values: pa.BinaryArray) -> tuple[list[pa.Array], Mask]:
        """The columns of some records, and which of these rows are doubtful: read them exactly."""
        decode, errors, doubtful, rows = self._decode, self._errors, [], []
        nothing, watched = decode(b"{}"), self._watched
        for at, record in enumerate(values.to_pylist()):
            try:
                if len(record) > _LONG and _beyond_limits(record):
                    raise ValueError
                if watched and self._may_repeat(record):
                    raise ValueError
                row = decode(record)
            except errors:
                doubtful.append(at)
                row = nothing
            rows.append(row)
        mask = np.zeros(len(values), np.bool_)
        mask[doubtful] = True
        columns = []
        for number, each in enumerate(self._fields):
            array, wrong = self._column(self._member(rows, number, each.name), each.type)
            columns.append(array)
            if wrong is not None:
                mask |= wrong
        return columns, mask

    def _may_repeat(self, record: bytes) -> bool:
        if any(record.count(each) > 1 for each in self._watched):
            return True
        return b"\\" in record and _ESCAPED_NAME.search(record) is not None

    def _member(self, rows: Sequence[Any], number: int, name: str) -> list[Any]:
        if self.library == "msgspec":
            attribute = f"f{number}"
            return [None if each is None else getattr(each, attribute) for each in rows]
        return [None if each is None else each.get(name) for each in rows]

    def _column(self, values: list[Any], dtype: pa.DataType) -> tuple[pa.Array, Mask | None]:
        """The array, and where it is not to be trusted."""
        types = pa.types
        if types.is_list(dtype):
            return self._lists(values, dtype)
        if types.is_map(dtype):
            return self._maps(values, dtype)
        if types.is_struct(dtype):
            return self._structs(values, dtype)
        wrong = None
        if self.library == "json":
            values, wrong = _of_type(values, dtype)
        array, also = self._scalars(values, dtype)
        return array, _either(wrong, also)

    def _scalars(self, values: list[Any], dtype: pa.DataType) -> tuple[pa.Array, Mask | None]:
        types = pa.types
        if types.is_boolean(dtype) or types.is_signed_integer(dtype):
            return pa.array(values, dtype), None
        if types.is_string(dtype):
            return _texts(values)
        if types.is_floating(dtype):
            found = floats(pa.array(values, pa.float64()), dtype)
            return found.array, found.doubtful
        if types.is_decimal(dtype):
            return _decimals(values, dtype)
        texts, wrong = _texts(values)
        found = from_texts(texts, dtype, self._options)
        return found.array, _either(wrong, found.doubtful)

    def _structs(self, values: list[Any], dtype: pa.StructType) -> tuple[pa.Array, Mask | None]:
        wrong: Mask | None = None
        if self.library == "json":
            values, wrong = _of_type(values, dtype)
        arrays = []
        for number, each in enumerate(dtype):
            array, also = self._column(self._member(values, number, each.name), each.type)
            arrays.append(array)
            wrong = _either(wrong, also)
        null = np.array([each is None for each in values], np.bool_)
        mask = pa.array(null) if null.any() else None
        return pa.StructArray.from_arrays(arrays, fields=list(dtype), mask=mask), wrong

    def _lists(self, values: list[Any], dtype: pa.ListType) -> tuple[pa.Array, Mask | None]:
        wrong: Mask | None = None
        if self.library == "json":
            values, wrong = _of_type(values, dtype)
        flat = [item for each in values if each is not None for item in each]
        items, also = self._column(flat, dtype.value_type)
        offsets = _offsets(values)
        array = pa.ListArray.from_arrays(_arrow_offsets(offsets, values), items, type=dtype)
        return array, _either(wrong, _outer(also, offsets))

    def _maps(self, values: list[Any], dtype: pa.MapType) -> tuple[pa.Array, Mask | None]:
        wrong: Mask | None = None
        if self.library == "json":
            values, wrong = _of_type(values, dtype)
        keys = [key for each in values if each is not None for key in each]
        flat = [item for each in values if each is not None for item in each.values()]
        items, also = self._column(flat, dtype.item_type)
        offsets = _offsets(values)
        names, not_text = _texts(keys)
        if not_text is not None:
            names = names.fill_null("")
        array = pa.MapArray.from_arrays(_arrow_offsets(offsets, values), names, items, type=dtype)
        return array, _either(wrong, _outer(_either(also, not_text), offsets))


def _beyond_limits(record: bytes) -> bool:
    """Whether a number, a name or the nesting may be more than Spark's parser takes."""
    if record.count(b"[") + record.count(b"{") > _MOST_NESTED:
        return True
    if _DIGITS.search(record):
        return True
    return len(record) > 50_000 and _NAME.search(record) is not None


def _read_later(fields: Iterable[pa.Field]) -> set[str]:
    """Names of what is decoded as text first; in lists and maps they may well stand twice."""
    names: set[str] = set()
    for each in fields:
        dtype = each.type
        if pa.types.is_list(dtype) or pa.types.is_map(dtype):
            continue
        if pa.types.is_struct(dtype):
            names |= _read_later(dtype)
        elif not any(
            is_type(dtype)
            for is_type in (
                pa.types.is_string,
                pa.types.is_boolean,
                pa.types.is_integer,
                pa.types.is_float64,
            )
        ):
            names.add(each.name)
    return names


def _offsets(values: list[Any]) -> npt.NDArray[np.int32]:
    sizes = [0 if each is None else len(each) for each in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _arrow_offsets(offsets: npt.NDArray[np.int32], values: list[Any]) -> pa.Array:
    null = np.array([*(each is None for each in values), False], np.bool_)
    return pa.array(offsets, pa.int32(), mask=null if null.any() else None)


def _outer(inner: Mask | None, offsets: npt.NDArray[np.int32]) -> Mask | None:
    """Which lists have a doubtful item."""
    if inner is None:
        return None
    counts = np.concatenate([[0], np.cumsum(inner)])
    return np.diff(counts[offsets]) > 0


def _either(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None:
        return one if other is None else other
    return one | other


def _texts(values: list[Any]) -> tuple[pa.StringArray, Mask | None]:
    """Strings, and which are none that UTF-8 can hold: half a surrogate pair."""
    try:
        return pa.array(values, pa.string()), None
    except UnicodeEncodeError:
        halves = [each is not None and java_string(each) != each for each in values]
        kept = [None if half else each for each, half in zip(values, halves, strict=True)]
        return pa.array(kept, pa.string()), np.array(halves, np.bool_)


def _decimals(values: list[Any], dtype: pa.DataType) -> tuple[pa.Array, Mask | None]:
    """From the texts of numbers; a text in quotes is left to the exact reader."""
    found: list[Any] = []
    wrong = np.zeros(len(values), np.bool_)
    for at, each in enumerate(values):
        value = None
        if each is not None:
            text = each if isinstance(each, str) else bytes(each).decode()
            try:
                if text and text != "null":
                    if _NUMBER.fullmatch(text) is None:
                        raise Unfit
                    value = decimal_of(text, dtype.precision, dtype.scale)
            except Unfit:
                wrong[at] = True
        found.append(value)
    return pa.array(found, dtype), wrong if wrong.any() else None


# ---- msgspec -------------------------------------------------------------------------------------


def _struct(name: str, fields: Sequence[pa.Field], closed: bool = False) -> Any:
    members = [
        (f"f{number}", _type_of(each.type), msgspec.field(name=each.name, default=None))
        for number, each in enumerate(fields)
    ]
    return msgspec.defstruct(name, members, gc=False, forbid_unknown_fields=closed)


def _type_of(dtype: pa.DataType) -> Any:
    types = pa.types
    if types.is_boolean(dtype):
        return bool | None
    if types.is_signed_integer(dtype):
        most = (1 << (dtype.bit_width - 1)) - 1
        return Annotated[int, msgspec.Meta(ge=-most - 1, le=most)] | None
    if types.is_floating(dtype):
        return float | None
    if types.is_decimal(dtype):
        return msgspec.Raw  # It may be null, too, and stands in no union.
    if types.is_list(dtype):
        return list[_type_of(dtype.value_type)] | None  # type: ignore[misc]
    if types.is_map(dtype):
        return dict[str, _type_of(dtype.item_type)] | None  # type: ignore[misc]
    if types.is_struct(dtype):
        return _struct("Inner", list(dtype)) | None
    return str | None


# ---- Python's own --------------------------------------------------------------------------------


class _Number(str):
    """A number with a fraction, as it stands in the text."""

    __slots__ = ()


class _PlainDecoder:
    """Objects become dicts; what Spark reads otherwise is a ``ValueError``."""

    def __init__(self, fields: Sequence[pa.Field], names: set[str] | None) -> None:
        texts = any(_has_decimal(each.type) for each in fields)
        self._decoder = json.JSONDecoder(
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_Number if texts else None,
            parse_int=_Number if texts else None,
        )
        self._names = names

    def decode(self, record: bytes) -> dict[str, Any]:
        found = self._decoder.decode(record.decode())
        if type(found) is not dict or (self._names is not None and not self._names >= set(found)):
            raise ValueError("the exact reader takes it")
        return found


def _has_decimal(dtype: pa.DataType) -> bool:
    if pa.types.is_nested(dtype):
        return any(_has_decimal(dtype.field(at).type) for at in range(dtype.num_fields))
    return bool(pa.types.is_decimal(dtype))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _refuse(word: str) -> None:
    raise ValueError(word)


def _of_type(values: list[Any], dtype: pa.DataType) -> tuple[list[Any], Mask | None]:
    """The values that are of the column's type, and where others were."""
    types = pa.types
    read: Callable[[Any], Any] | None = None
    accepted: tuple[type, ...]
    if types.is_boolean(dtype):
        accepted = (bool,)
    elif types.is_signed_integer(dtype):
        most = (1 << (dtype.bit_width - 1)) - 1
        small = all(
            each is None or (type(each) is int and -most <= each <= most) for each in values
        )
        if small:
            return values, None
        accepted, read = (int, _Number), _whole(most)
    elif types.is_floating(dtype):
        accepted, read = (float, int, _Number), float
    elif types.is_decimal(dtype):
        accepted = (_Number,)
    elif types.is_list(dtype):
        accepted = (list,)
    elif types.is_map(dtype) or types.is_struct(dtype):
        accepted = (dict,)
    else:
        accepted = (str,)
    kinds = set(map(type, values)) - {type(None)}
    if kinds <= set(accepted) and read is None:
        return values, None
    if kinds <= {float, int} and types.is_floating(dtype):
        with suppress(OverflowError):  # An integer may be longer than floats are large.
            return [None if each is None else float(each) for each in values], None
    wrong = np.zeros(len(values), np.bool_)
    kept = list(values)
    for at, each in enumerate(values):
        if each is None:
            continue
        try:
            if type(each) not in accepted:
                raise ValueError
            kept[at] = each if read is None else read(each)
        except (ValueError, OverflowError):
            wrong[at], kept[at] = True, None
    return kept, wrong if wrong.any() else None


def _whole(most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, str) and not value.lstrip("-").isdigit():
            raise ValueError(value)
        number = int(value)
        if not -most - 1 <= number <= most:
            raise ValueError(value)
        return number

    return read
