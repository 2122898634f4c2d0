"""Records as rows with columns: JSON objects and lines of CSV, read by Arrow's own readers.

A record that does not fit the schema is malformed as a whole: its columns are null, and the column
for corrupt records has its text.

Arrow reads a text and not an array, so records are joined. Its readers skip an empty record, make
two rows of ``{"a":1}{"b":2}``, and go on in the next record where an object or a quote was left
open. So each text has marks that prove that every record is exactly one row, see
:class:`_JsonReader` and :class:`_CsvReader`; a text without them, or that Arrow refuses, is read
again in parts.
"""

from __future__ import annotations

import base64
import csv
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from opendata_buffer.arguments import check_fields
from opendata_buffer.errors import InvalidInput

JSON, CSV = "json", "csv"
PERMISSIVE, DROPMALFORMED, FAILFAST = "PERMISSIVE", "DROPMALFORMED", "FAILFAST"

_TEXT_BYTES = 4 << 20
"""Bytes of records in a text, unless one has more: a malformed one makes all be read again."""

_INFERRED_AT_ONCE = 256
"""Records in a text. Where ids are names of fields, Arrow takes memory by the square of this."""

_MOST_LEVELS = 50
"""Levels of nested types. Arrow sends Spark no more than 64, and overflows the process's stack
where it infers the type of a record with a hundred thousand."""

_TYPES = {
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.string(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"),
}  # fmt: skip
_NO_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\[\]{}]+', re.DOTALL)
_EMPTY_OBJECT = re.compile(rb"\{[ \t\r\n]*\}")
_POSITION_IN_TEXT = re.compile(
    r"(?:^JSON parse error: )|(?:^CSV parse error: )|(?:Row #\d+: )|(?: in row \d+$)"
)
_ROW = re.compile(r"(?:in row |Row #)(\d+)")

_Found = TypeVar("_Found")
_Rows = TypeVar("_Rows", pa.RecordBatch, pa.Table)


@dataclass(frozen=True, kw_only=True)
class ValueOptions:
    """How records are read into columns.

    Attributes:
        format: ``json`` or ``csv``.
        mode: What becomes of a malformed record: ``PERMISSIVE`` keeps a row of nulls with its text
            in ``corrupt_column``, ``DROPMALFORMED`` leaves it out, ``FAILFAST`` raises.
        corrupt_column: The column for the text of malformed records, if the schema names it.
        sep: CSV: the separator of fields; one ASCII character, as ``quote``.
        quote: CSV: the character around a field, doubled inside of it; empty: none.
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
    """The columns of some records: ``arrays`` has one for each field of the schema, with a value
    for each record. ``malformed`` are the records that have none, by their index, and why."""

    arrays: list[pa.Array]
    malformed: dict[int, str]

    def delivered(self, rows: _Rows, mode: str) -> _Rows:
        """Those of the records' rows that are delivered: by ``mode`` without malformed ones."""
        if not self.malformed or mode != DROPMALFORMED:
            return rows
        kept = np.ones(rows.num_rows, np.bool_)
        kept[list(self.malformed)] = False
        return rows.filter(pa.array(kept))


class Decoder:
    """Reads records into the columns of one schema; made once, used for many arrays of records.

    The column for corrupt records may be among those of the schema. InvalidInput for a column of an
    unsupported type, two columns of one name, no column to fill, or a column for corrupt records
    that is no string.
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

    def decode(self, values: pa.BinaryArray) -> DecodedColumns:
        """The columns of records, which are any bytes: ``pa.binary()`` without nulls."""
        texts, malformed = _readable(values, self._reader)
        parts = [[pa.nulls(0, each.type) for each in self._fields]]
        for at, part in _halved(texts, self._read, 0, len(texts)) if len(texts) else ():
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

    def _read(self, texts: pa.BinaryArray) -> list[pa.Array]:
        columns = self._reader.read(texts).columns
        return [
            _converted(column.chunk(0), field.type)
            for column, field in zip(columns, self._fields, strict=True)
        ]


class _JsonReader:
    """Objects whose opening brace is replaced by ``{"<mark>":true,`` with a random name.

    A row has the mark if its object begins where a record begins: a record that swallows the next
    one takes its mark away, and a second object in one record has none. So a text with as many rows
    as records, all with the mark, has one row of each. It never begins with ``null``, which as the
    first value crashes Arrow's reader. Without types, those of the columns are inferred.
    """

    def __init__(self, types: dict[str, pa.DataType] | None) -> None:
        self._mark = f"mark-{secrets.token_hex(8)}"
        self._opening = f'{{"{self._mark}":true,'.encode()
        self.placeholder = b'{"":null}'
        self._options = pa.json.ParseOptions(
            explicit_schema=pa.schema([*(types or {}).items(), (self._mark, pa.bool_())]),
            unexpected_field_behavior="infer" if types is None else "ignore",
        )

    def unusual(self, values: pa.BinaryArray) -> pa.BooleanArray:
        """Which records need :meth:`trimmed` before they are read with others."""
        # Before the comma behind the mark's value there is a name, unless the object is empty.
        return pc.invert(pc.starts_with(values, '{"'))

    def trimmed(self, record: bytes) -> bytes:
        """The record as it is read with others; raises ValueError if it is malformed."""
        text = record.strip(b" \t\r\n")
        if text[:1] != b"{":
            raise ValueError("it is no JSON object")
        return self.placeholder if _EMPTY_OBJECT.fullmatch(text) else text

    def read(self, texts: pa.BinaryArray) -> pa.Table:
        """One row for each record; raises ValueError if a record is not surely one row."""
        marked = pc.binary_replace_slice(texts, 0, 1, self._opening)
        # Within strings JSON has no line ends, so no string goes on in the next record.
        text = pc.binary_join_element_wise(marked, b"", b"\n").buffers()[2]
        # One block, or the reader would cut the text at a line end, which objects may have.
        block = pa.json.ReadOptions(use_threads=False, block_size=text.size)
        table = pa.json.read_json(pa.BufferReader(text), block, self._options)
        if table.num_rows != len(texts) or table.column(self._mark).null_count:
            raise ValueError("it is more than one JSON object")
        return table.drop_columns([self._mark])


class _CsvReader:
    """Lines, and a last one whose fields are all null; methods as of :class:`_JsonReader`.

    Records without line ends are as many rows as lines, unless a quote takes a line end into a
    field: then there are fewer rows. A record that has a line end is read alone; then
    the last row has values if the record's quotes reached it. Without types, those of the
    ``count`` columns are inferred.
    """

    def __init__(self, count: int, types: list[pa.DataType] | None, options: ValueOptions) -> None:
        null = f"null-{secrets.token_hex(8)}"
        self.placeholder = options.sep.join([null] * count).encode()
        # Columns by number: two of a header may have one name.
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

    def read(self, texts: pa.BinaryArray) -> pa.Table:
        lines = pc.binary_join_element_wise(texts, b"", b"\n").buffers()[2].to_pybytes()
        if len(texts) > 1 and (lines.count(b"\n") != len(texts) or b"\r" in lines):
            raise ValueError("a record has a line end")
        # The reader drops one byte order mark at the beginning: this one, and none of a record.
        text = b"\xef\xbb\xbf" + lines + self.placeholder + b"\n"
        block = pa.csv.ReadOptions(
            use_threads=False, block_size=len(text), column_names=self._names
        )
        table = pa.csv.read_csv(pa.BufferReader(text), block, self._parsing, self._conversion)
        last = table.slice(len(texts))
        if len(last) != 1 or any(column.null_count != 1 for column in last.columns):
            raise ValueError("it is not one line, or a quote is not closed")
        return table.slice(0, len(texts))


def _readable(
    values: pa.BinaryArray, reader: _CsvReader | _JsonReader
) -> tuple[pa.BinaryArray, dict[int, str]]:
    """The records as they are joined, malformed ones as placeholders; their reasons."""
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
    """Read records [begin, end): all at once or, where that fails, in parts. Yields the index of a
    part's first record, and what was read; of a malformed record the reason."""
    part = texts.slice(begin, end - begin)
    cuts = {(begin + end) // 2}
    if len(part) == 1 or part.nbytes <= _TEXT_BYTES:
        try:
            found = read(part)
        except ValueError as error:
            if len(part) == 1:
                yield begin, _POSITION_IN_TEXT.sub("", str(error).partition("\n")[0])
                return
            if row := _ROW.search(str(error)):  # Most often the malformed record.
                at = begin + min(int(row[1]), len(part) - 1)
                cuts = {(begin + at) // 2, at, at + 1, (at + 1 + end) // 2}
        else:
            yield begin, found
            return
    for first, behind in pairwise(sorted(cuts | {begin, end})):
        yield from _halved(texts, read, first, behind)


def _check_type(name: str, dtype: pa.DataType, value_format: str, level: int = 1) -> None:
    """Refuse, by InvalidInput, a type that records are not read into."""
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
    """What Arrow's readers read a column as, before it is converted."""
    types = pa.types
    if types.is_struct(dtype):
        return pa.struct([pa.field(each.name, _read_type(each.type)) for each in dtype])
    if types.is_list(dtype):
        return pa.list_(dtype.value_field.with_type(_read_type(dtype.value_type)))
    # The readers do not distinguish times with and without a zone, and read dates as numbers.
    if types.is_date(dtype) or types.is_timestamp(dtype) or types.is_binary(dtype):
        return pa.string()
    return dtype


def _converted(found: pa.Array, dtype: pa.DataType) -> pa.Array:
    """A column of :func:`_read_type` as the type asked for; raises ValueError for others."""
    types = pa.types
    if types.is_struct(dtype):
        inner = [
            _converted(each, part.type) for each, part in zip(found.flatten(), dtype, strict=True)
        ]
        return pa.StructArray.from_arrays(inner, fields=list(dtype), mask=found.is_null())
    if types.is_list(dtype):
        # All elements, also of lists behind others that are null: the offsets count those.
        values = _converted(found.values, dtype.value_type)
        lists = pa.ListArray.from_arrays(found.offsets, values, mask=found.is_null())
        return lists.cast(dtype)
    if types.is_timestamp(dtype):  # With an offset if the type has a zone, else without.
        try:
            return found.cast(dtype)
        except pa.ArrowInvalid:
            # RFC 3339 has any number of digits of a second, Spark's timestamps have six.
            return pc.replace_substring_regex(found, r"(\.\d{6})\d+", r"\1").cast(dtype)
    if types.is_date(dtype):
        return found.cast(dtype)
    if types.is_binary(dtype):
        texts = found.to_pylist()  # Null and the empty text stay what they are.
        return pa.array([each and base64.b64decode(each, validate=True) for each in texts], dtype)
    if types.is_decimal(dtype):
        found.validate(full=True)  # The readers check the scale, and not the precision.
    if types.is_floating(dtype) and pc.all(pc.is_finite(found)).as_py() is False:
        raise ValueError(f"a number is beyond {dtype}, or none")
    return found


def infer(records: pa.BinaryArray, options: ValueOptions) -> pa.Schema:
    """The columns that these records have, by Arrow's inference. Those of CSV are numbered.

    Texts of JSON stay texts. A field that is null in all records is a text, and a field without a
    name is left out. Of two types that do not go together JSON has the first one, and CSV a text.
    If the mode is ``PERMISSIVE``, the column for corrupt records is the last one. The schema is
    empty if no record shows a column.
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
    # A record may have a field of that name; the column is for the text of records.
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
    """How deep objects and arrays are nested in a record, if it is JSON."""
    if record.count(b"{") + record.count(b"[") <= _MOST_LEVELS:
        return 0
    brackets = _NO_BRACKETS.sub(b"", record)
    return max(accumulate(1 if each in b"{[" else -1 for each in brackets), default=0)


def _merged(one: pa.DataType, other: pa.DataType, value_format: str) -> pa.DataType:
    """The type of a field that was found as both."""
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
    """The type as a column has it; None for objects that are always empty."""
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
