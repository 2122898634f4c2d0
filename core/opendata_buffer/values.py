"""Read records as rows with columns: JSON objects or lines of CSV, parsed by Arrow's readers.

A record that does not fit the schema is malformed as a whole. Its columns are null, and the column
for corrupt records has its text.

Arrow parses one text and not an array of records, so the records are joined to a text. Then three
things can go wrong: Arrow's readers skip an empty record, make two rows of ``{"a":1}{"b":2}``, and
continue in the next record if an object or a quote was left open. So each reader proves that every
record is exactly one row; see :class:`_JsonReader` and :class:`_CsvReader`. A text without this
proof, or that Arrow rejects, is read again in parts.
"""

from __future__ import annotations

import base64
import csv
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from opendata_buffer.arguments import check_fields
from opendata_buffer.errors import InvalidInput
from opendata_buffer.misfits import explain_csv, explain_json, misfit_of

JSON, CSV = "json", "csv"
PERMISSIVE, DROPMALFORMED, FAILFAST = "PERMISSIVE", "DROPMALFORMED", "FAILFAST"

_TEXT_BYTES = 4 << 20
"""Target size of a text, in bytes of records. A malformed record causes the whole text to be read
again."""

_BLOCK_BYTES = 1 << 20
"""Size of a block, in bytes, if threads parse the blocks of a text."""
_LINE_END = ord("\n")

_INFERRED_AT_ONCE = 256
"""The number of records in a text. If ids are used as field names, Arrow's memory grows with the
square of this."""

_MOST_LEVELS = 50
"""The most levels of nested types. Arrow sends Spark at most 64 levels. It overflows the stack of
the process when it infers the type of a record with a hundred thousand levels."""

_TYPES = {
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.string(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"),
}  # fmt: skip
_NO_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\[\]{}]+', re.DOTALL)
_POSITION_IN_TEXT = re.compile(
    r"(?:^JSON parse error: )|(?:^CSV parse error: )|(?:Row #\d+: )|(?: in row \d+$)"
)
_ROW = re.compile(r"(?:in row |Row #)(\d+)")

_Found = TypeVar("_Found")
_Rows = TypeVar("_Rows", pa.RecordBatch, pa.Table)


@dataclass(frozen=True, kw_only=True)
class ValueOptions:
    """The options for reading records into columns.

    Attributes:
        format: ``json`` or ``csv``.
        mode: How a malformed record is handled: ``PERMISSIVE`` keeps a row of nulls with its text
            in ``corrupt_column``, ``DROPMALFORMED`` leaves it out, ``FAILFAST`` raises.
        corrupt_column: The column for the text of malformed records, if the schema names it.
        sep: CSV: the separator of fields, one ASCII character.
        quote: CSV: the character around a field, one ASCII character. Inside a field it is doubled.
            Empty turns quoting off.
        null_value: CSV: the text of a field that is null, unless it is quoted.
    """

    format: str = JSON
    mode: str = PERMISSIVE
    corrupt_column: str = "_corrupt_record"
    sep: str = ","
    quote: str = '"'
    null_value: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class DecodedColumns:
    """The columns of some records.

    Attributes:
        arrays: One array for each field of the schema, with one value for each record.
        malformed: The reason for each malformed record, by its index. Its values are null.
    """

    arrays: list[pa.Array]
    malformed: dict[int, str]

    def delivered(self, rows: _Rows, mode: str) -> _Rows:
        """Return the rows to deliver. With DROPMALFORMED these are all but the malformed ones."""
        if not self.malformed or mode != DROPMALFORMED:
            return rows
        kept = np.ones(rows.num_rows, np.bool_)
        kept[list(self.malformed)] = False
        return rows.filter(pa.array(kept))


class Decoder:
    """A reader of records into the columns of one schema. Create it once for many arrays.

    The schema may contain the column for corrupt records.

    Args:
        schema: The columns to fill.
        options: How to read the records.

    Raises:
        InvalidInput: A column has an unsupported type, two columns have one name, no column is
            filled from records, or the column for corrupt records is not a string.
    """

    def __init__(self, schema: pa.Schema, options: ValueOptions) -> None:
        self.schema = schema
        self._corrupt = options.corrupt_column
        self._fields = [each for each in schema if each.name != self._corrupt]
        for each in schema:
            if schema.names.count(each.name) > 1:
                raise InvalidInput(f"schema has the column {each.name!r} twice")
            if each.name == self._corrupt and not pa.types.is_string(each.type):
                raise InvalidInput(
                    f"column {each.name!r} is for the text of records and of type {each.type}: "
                    "make it STRING"
                )
            _check_type(each.name, each.type, options.format)
        if not self._fields:
            raise InvalidInput("schema has no column that is filled from records: name some")
        names = [each.name for each in self._fields]
        types = [_read_type(each.type) for each in self._fields]
        self._reader: _CsvReader | _JsonReader = (
            _JsonReader(dict(zip(names, types, strict=True)))
            if options.format == JSON
            else _CsvReader(len(names), types, options)
        )

    def decode(self, values: pa.BinaryArray, *, threads: bool = False) -> DecodedColumns:
        """Read the columns of some records.

        Args:
            values: The records, which may be any bytes: ``pa.binary()`` without nulls.
            threads: Let several threads parse JSON records, if they have more than a few megabytes.
                A program that decodes in several threads or processes already is faster without.

        Returns:
            The columns, and the malformed records with the reason for each.
        """
        texts, malformed = _readable(values, self._reader)
        parts = [[pa.nulls(0, each.type) for each in self._fields]]
        for at, part in self._parts(texts, threads):
            if isinstance(part, str):
                malformed[at] = part
                part = [pa.nulls(1, each.type) for each in self._fields]
            parts.append(part)
        columns = [pa.concat_arrays(column) for column in zip(*parts, strict=True)]
        if self._corrupt in self.schema.names:
            corrupt: list[str | None] = [None] * len(values)
            for row in malformed:
                corrupt[row] = values[row].as_py().decode("utf-8", "replace")
            columns.insert(self.schema.names.index(self._corrupt), pa.array(corrupt, pa.string()))
        return DecodedColumns(columns, malformed)

    def explain(self, record: bytes, reason: str) -> str:
        """Say what is wrong with a malformed record.

        Args:
            record: The record.
            reason: Its reason in :attr:`DecodedColumns.malformed`.

        Returns:
            The field that does not fit, what its column wants, and what the record has; ``reason``
            if the record does not fit for another cause.
        """
        if isinstance(self._reader, _JsonReader):
            return explain_json(record, self._fields, reason, _fits)
        try:
            columns = self._reader.read(pa.array([self._reader.trimmed(record)], pa.binary()))
        except ValueError:
            return explain_csv(self._fields, reason)
        for column, field in zip(columns.columns, self._fields, strict=True):
            try:
                _converted(column.combine_chunks(), field.type)
            except ValueError:
                return misfit_of(field, str(column[0].as_py()))
        return reason

    def _parts(
        self, texts: pa.BinaryArray, threads: bool
    ) -> Iterator[tuple[int, list[pa.Array] | str]]:
        """Read all records, in parts that are in order; see :func:`_halved`."""
        if threads and texts.nbytes > _BLOCK_BYTES:
            with suppress(ValueError):  # A record is malformed. Find it below.
                yield 0, self._read(texts, threads=True)
                return
        if len(texts):
            yield from _halved(texts, self._read, 0, len(texts))

    def _read(self, texts: pa.BinaryArray, *, threads: bool = False) -> list[pa.Array]:
        columns = self._reader.read(texts, threads=threads).columns
        return [
            pa.concat_arrays([_converted(chunk, field.type) for chunk in column.chunks])
            for column, field in zip(columns, self._fields, strict=True)
        ]


class _JsonReader:
    """A reader of JSON objects, which joins records with line ends.

    Every record begins with ``{`` and ends with ``}``, after :meth:`trimmed`. So the text has
    ``}``, a line end, and ``{`` between two records. No JSON value can contain that: a string
    cannot contain a line end, and in an object or an array a comma or a bracket must follow ``}``.
    So Arrow either rejects the text, or begins a new row with each record. Then the text has at
    least as many rows as records, and if it has exactly as many, each record is one row::

        {"a":1}{"a":2}      2 records and 3 rows: one of them is malformed
        {"a":3}

        {"a":{"b":{}        Arrow rejects the "{" of the second record
        {"c":1}}

    The text never begins with ``null``, which crashes Arrow's reader as the first value.

    Args:
        types: The types of the columns by name; None to infer them.
    """

    def __init__(self, types: dict[str, pa.DataType] | None) -> None:
        self.placeholder = b"{}"
        self._options = pa.json.ParseOptions(
            explicit_schema=None if types is None else pa.schema(types),
            unexpected_field_behavior="infer" if types is None else "ignore",
        )

    def unusual(self, values: pa.BinaryArray) -> pa.BooleanArray:
        """Return which records need :meth:`trimmed` before they are read with others."""
        return pc.invert(pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}")))

    def trimmed(self, record: bytes) -> bytes:
        """Return the record in the form in which it is read with others.

        Args:
            record: One JSON value, with or without white space around it.

        Returns:
            The JSON object without white space around it.

        Raises:
            ValueError: The record is malformed.
        """
        text = record.strip(b" \t\r\n")
        if text[:1] != b"{":
            raise ValueError("it is not a JSON object")
        if text[-1:] != b"}":
            raise ValueError("its JSON object does not end, or something follows it")
        return text

    def read(self, texts: pa.BinaryArray, *, threads: bool = False) -> pa.Table:
        """Parse records that are one JSON object each.

        Args:
            texts: The records, as :meth:`trimmed` returns them.
            threads: Cut the text into blocks, which threads of Arrow parse at the same time.

        Returns:
            A table with one row for each record.

        Raises:
            ValueError: A record may not be exactly one row.
        """
        text = pc.binary_join_element_wise(texts, b"", b"\n").buffers()[2]
        # Arrow cuts blocks at line ends. To not cut a record that contains one, use one block then.
        # A record that is longer than a block would be an error.
        size = text.size
        if threads and np.count_nonzero(np.frombuffer(text, np.uint8) == _LINE_END) == len(texts):
            size = min(size, max(_BLOCK_BYTES, 1 + pc.max(pc.binary_length(texts)).as_py()))
        blocks = pa.json.ReadOptions(use_threads=threads, block_size=size)
        table = pa.json.read_json(pa.BufferReader(text), blocks, self._options)
        if table.num_rows != len(texts):
            raise ValueError("it is more than one JSON object")
        return table


class _CsvReader:
    """A reader of CSV lines, with the methods of :class:`_JsonReader`.

    It adds a last line whose fields are all null. Records without line ends make as many rows as
    lines, unless a quote takes a line end into a field. Then there are fewer rows. A record that
    contains a line end is read alone. If its quotes reach the last line, that row has values.

    Args:
        count: The number of columns.
        types: The types of the columns; None to infer them.
        options: How to read the records.
    """

    def __init__(self, count: int, types: list[pa.DataType] | None, options: ValueOptions) -> None:
        null = f"null-{secrets.token_hex(8)}"
        self.placeholder = options.sep.join([null] * count).encode()
        # Name the columns by number, because two columns of a header may have the same name.
        self._names = [str(number) for number in range(count)]
        self._parsing = pa.csv.ParseOptions(
            delimiter=options.sep,
            quote_char=options.quote or False,
            double_quote=bool(options.quote),
            newlines_in_values=True,
            ignore_empty_lines=False,
        )
        self._conversion = pa.csv.ConvertOptions(
            check_utf8=False,
            column_types=dict(zip(self._names, types, strict=True)) if types else None,
            null_values=[options.null_value, null],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )

    def unusual(self, values: pa.BinaryArray) -> pa.BooleanArray:
        return pc.or_(pc.ends_with(values, "\n"), pc.ends_with(values, "\r"))

    def trimmed(self, record: bytes) -> bytes:
        return record.removesuffix(b"\n").removesuffix(b"\r")

    def read(self, texts: pa.BinaryArray, *, threads: bool = False) -> pa.Table:
        lines = pc.binary_join_element_wise(texts, b"", b"\n").buffers()[2].to_pybytes()
        if len(texts) > 1 and (lines.count(b"\n") != len(texts) or b"\r" in lines):
            raise ValueError("a record has a line end")
        # The reader drops one byte order mark at the beginning. This one protects that of a record.
        text = b"\xef\xbb\xbf" + lines + self.placeholder + b"\n"
        block = pa.csv.ReadOptions(
            use_threads=False, block_size=len(text), column_names=self._names
        )
        table = pa.csv.read_csv(pa.BufferReader(text), block, self._parsing, self._conversion)
        last = table.slice(len(texts))
        if len(last) != 1 or any(column.null_count != 1 for column in last.columns):
            raise ValueError("it is not one line, or a quote is not closed")
        return table.slice(0, len(texts))


def _fits(value: Any, dtype: pa.DataType) -> bool:
    """Return whether a value of JSON can be read into a column of the type."""
    reader = _JsonReader({"value": _read_type(dtype)})
    text = json.dumps({"value": value}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        column = reader.read(pa.array([text], pa.binary())).column(0)
        _converted(column.combine_chunks(), dtype)
    except ValueError:
        return False
    return True


def _readable(
    values: pa.BinaryArray, reader: _CsvReader | _JsonReader
) -> tuple[pa.BinaryArray, dict[int, str]]:
    """Return the records as they are joined, and the reasons of malformed ones by index.

    Malformed records are replaced with placeholders.
    """
    unusual = reader.unusual(values)
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        unusual = pa.repeat(True, len(values))
    malformed: dict[int, str] = {}
    texts: list[bytes] = []
    for at in pc.indices_nonzero(unusual).to_pylist():
        record = values[at].as_py()
        try:
            record.decode()
            texts.append(reader.trimmed(record))
        except ValueError as error:
            malformed[at] = "it is not UTF-8" if isinstance(error, UnicodeError) else str(error)
            texts.append(reader.placeholder)
    if texts:
        values = pc.replace_with_mask(values, unusual, pa.array(texts, pa.binary()))
    return values, malformed


def _halved(
    texts: pa.BinaryArray, read: Callable[[pa.BinaryArray], _Found], begin: int, end: int
) -> Iterator[tuple[int, _Found | str]]:
    """Read records [begin, end), all at once or, if that fails, in parts.

    Yields:
        The index of a part's first record, and the result of reading it. For a malformed record it
        is the reason.
    """
    part = texts.slice(begin, end - begin)
    cuts = {(begin + end) // 2}
    if len(part) == 1 or part.nbytes <= _TEXT_BYTES:
        try:
            found = read(part)
        except ValueError as error:
            if len(part) == 1:
                yield begin, _POSITION_IN_TEXT.sub("", str(error).partition("\n")[0])
                return
            if row := _ROW.search(str(error)):  # usually the malformed record
                at = begin + min(int(row[1]), len(part) - 1)
                cuts = {(begin + at) // 2, at, at + 1, (at + 1 + end) // 2}
        else:
            yield begin, found
            return
    for first, behind in pairwise(sorted(cuts | {begin, end})):
        yield from _halved(texts, read, first, behind)


def _check_type(name: str, dtype: pa.DataType, value_format: str, level: int = 1) -> None:
    """Raise ``InvalidInput`` for a type that records cannot be read into."""
    types = pa.types
    if value_format == JSON and level < _MOST_LEVELS:
        if types.is_struct(dtype):
            for each in dtype:
                _check_type(f"{name}.{each.name}", each.type, value_format, level + 1)
            if dtype.num_fields:
                return
        if types.is_list(dtype):
            _check_type(f"{name}[]", dtype.value_type, value_format, level + 1)
            return
    binary = value_format == JSON and types.is_binary(dtype)
    if dtype in _TYPES or types.is_decimal128(dtype) or binary:
        return
    also = ", BINARY, ARRAY, STRUCT" if value_format == JSON else ""
    raise InvalidInput(
        f"column {name!r} is of type {dtype}, which {value_format} records are not read into. "
        "Types: BOOLEAN, BYTE, SHORT, INT, LONG, FLOAT, DOUBLE, DECIMAL, STRING, DATE, TIMESTAMP, "
        f"TIMESTAMP_NTZ{also}. Read the records as BINARY without valueFormat, and use "
        f"from_{value_format} on value"
    )


def _read_type(dtype: pa.DataType) -> pa.DataType:
    """Return the type that Arrow's readers use for a column, before it is converted."""
    types = pa.types
    if types.is_struct(dtype):
        return pa.struct([pa.field(each.name, _read_type(each.type)) for each in dtype])
    if types.is_list(dtype):
        return pa.list_(dtype.value_field.with_type(_read_type(dtype.value_type)))
    # Read these as strings: the readers do not distinguish times with and without a zone, and read
    # dates as numbers.
    if types.is_date(dtype) or types.is_timestamp(dtype) or types.is_binary(dtype):
        return pa.string()
    return dtype


def _converted(found: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Convert a column of :func:`_read_type` to the requested type.

    Raises:
        ValueError: A value does not fit the type.
    """
    types = pa.types
    if types.is_struct(dtype):
        inner = [
            _converted(each, part.type) for each, part in zip(found.flatten(), dtype, strict=True)
        ]
        return pa.StructArray.from_arrays(inner, fields=list(dtype), mask=found.is_null())
    if types.is_list(dtype):
        # Convert all elements, even those of lists that are null, because the offsets count them.
        values = _converted(found.values, dtype.value_type)
        lists = pa.ListArray.from_arrays(found.offsets, values, mask=found.is_null())
        return lists.cast(dtype)
    if types.is_timestamp(dtype):  # with an offset if the type has a zone, otherwise without
        try:
            return found.cast(dtype)
        except pa.ArrowInvalid:
            # RFC 3339 allows any number of digits in a second. Spark's timestamps have six.
            return pc.replace_substring_regex(found, r"(\.\d{6})\d+", r"\1").cast(dtype)
    if types.is_date(dtype):
        return found.cast(dtype)
    if types.is_binary(dtype):
        texts = found.to_pylist()  # null and the empty text stay unchanged
        return pa.array([each and base64.b64decode(each, validate=True) for each in texts], dtype)
    if types.is_decimal(dtype):
        found.validate(full=True)  # the readers check only the scale, not the precision
    if types.is_floating(dtype) and pc.all(pc.is_finite(found)).as_py() is False:
        raise ValueError(f"a number is beyond {dtype}, or none")
    return found


def infer(records: pa.BinaryArray, options: ValueOptions) -> pa.Schema:
    """Infer the columns of some records with Arrow. CSV columns are numbered.

    JSON strings stay strings. A field that is null in all records becomes a string, and a field
    without a name is left out. If a field has two types that cannot be merged, JSON keeps the first
    one, and CSV uses a string. With the mode ``PERMISSIVE``, the column for corrupt records is the
    last one. The schema is empty if no record shows a column.
    """
    reader: _CsvReader | _JsonReader
    names: list[str] | None = None
    if options.format == CSV:
        count = _count_fields(records[0].as_py(), options) if len(records) else 1
        names = [f"_c{number}" for number in range(count)]
        reader = _CsvReader(count, None, options)
    else:
        reader = _JsonReader(None)
        shallow = (each if _levels(each) <= _MOST_LEVELS else b"" for each in records.to_pylist())
        records = pa.array(shallow, pa.binary())
    texts, malformed = _readable(records, reader)
    texts = texts.filter(pa.array([at not in malformed for at in range(len(texts))], pa.bool_()))
    merged: pa.DataType = pa.struct([])
    for begin in range(0, len(texts), _INFERRED_AT_ONCE):
        end = min(begin + _INFERRED_AT_ONCE, len(texts))
        for _, part in _halved(texts, reader.read, begin, end):
            if not isinstance(part, str):
                table = part.rename_columns(names or part.column_names)
                merged = _merged(merged, pa.struct(list(table.schema)), options.format)
    found = _column_type(merged, options.format) or pa.struct([])
    # A record may have a field with this name, but the column is for the text of records.
    fields = [each for each in found if each.name != options.corrupt_column]
    if fields and options.mode == PERMISSIVE:
        fields.append(pa.field(options.corrupt_column, pa.string()))
    return pa.schema(fields)


def _count_fields(record: bytes, options: ValueOptions) -> int:
    parser = csv.reader(
        [record.decode("utf-8", "replace").rstrip("\r\n")],
        delimiter=options.sep,
        quotechar=options.quote or None,
        quoting=csv.QUOTE_MINIMAL if options.quote else csv.QUOTE_NONE,
    )
    try:
        return max(1, len(next(parser, [])))
    except csv.Error:
        return 1


def _levels(record: bytes) -> int:
    """Return how deep objects and arrays are nested in a JSON record; 0 if it cannot be deep."""
    if record.count(b"{") + record.count(b"[") <= _MOST_LEVELS:
        return 0
    brackets = _NO_BRACKETS.sub(b"", record)
    return max(accumulate(1 if each in b"{[" else -1 for each in brackets), default=0)


def _merged(one: pa.DataType, other: pa.DataType, value_format: str) -> pa.DataType:
    """Return the type of a field that was found with both types."""
    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_struct(one) and types.is_struct(other):
        members = {each.name: each.type for each in one}
        for each in other:
            known = members.get(each.name, pa.null())
            members[each.name] = _merged(known, each.type, value_format)
        return pa.struct(list(members.items()))
    if types.is_list(one) and types.is_list(other):
        return pa.list_(_merged(one.value_type, other.value_type, value_format))
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    return one if value_format == JSON else pa.string()


def _column_type(dtype: pa.DataType, value_format: str) -> pa.DataType | None:
    """Return the type of a field as a column has it; None for objects that are always empty."""
    types = pa.types
    if types.is_struct(dtype):
        inner = [(each.name, _column_type(each.type, value_format)) for each in dtype if each.name]
        kept = [pa.field(name, found) for name, found in inner if found is not None]
        return pa.struct(kept) if kept else None
    if types.is_list(dtype):
        element = _column_type(dtype.value_type, value_format)
        return None if element is None else pa.list_(element)
    if types.is_timestamp(dtype) and value_format == CSV:
        return pa.timestamp("us", "UTC" if dtype.tz else None)
    if dtype in (pa.bool_(), pa.int64(), pa.float64(), pa.date32()):
        return dtype
    return pa.string()
