"""Records to columns: in bulk what can be, record by record what must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values.exact_csv import ExactCsv
from opendata_buffer.values.exact_json import ExactJson
from opendata_buffer.values.lines import Lines
from opendata_buffer.values.objects import Objects
from opendata_buffer.values.options import CSV, JSON, ValueOptions, check_type
from opendata_buffer.values.records import Records
from opendata_buffer.values.scalars import java_text
from opendata_buffer.values.shapes import Shape, learn

__all__ = ["Columns", "Decoder"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_LINE_END = re.compile(r"(?:\r?\n|\f)\Z")
_MOST_SHAPES = 8
_MOST_TRIES = 4
"""Records of a piece that may have no shape worth learning, before no more are tried."""

_WORTH_LEARNING = 32
"""Records that a shape must have in a piece to be kept."""


@dataclass(frozen=True)
class Columns:
    """What became of some records, in their order.

    Attributes:
        arrays: A column for each field, one value for each record.
        malformed: By index of a record that is malformed, why.
        headers: Indexes of records that are none: they repeat the names of the columns.
    """

    arrays: list[pa.Array]
    malformed: dict[int, str] = field(default_factory=dict)
    headers: list[int] = field(default_factory=list)


class Decoder:
    """Reads records into the columns of one schema; made once, used for many pieces.

    Args:
        schema: The columns, in their order. The corrupt and the rescued column are filled if the
            schema has them; both are of type string.
        options: How to read.
        library: Which library reads records of any shape, see
            :class:`~opendata_buffer.values.objects.Objects`; for tests.

    Raises:
        InvalidInput: A column of a type that such records are not read into, two of one name, or a
            corrupt or rescued column that is no string.
    """

    def __init__(
        self, schema: pa.Schema, options: ValueOptions, *, library: str | None = None
    ) -> None:
        self.schema = schema
        self._options = options
        special = {options.corrupt_column, options.rescued_column} - {""}
        seen: set[str] = set()
        for each in schema:
            if each.name in seen:
                raise InvalidInput(f"schema has the column {each.name!r} twice")
            seen.add(each.name)
            if each.name in special and not pa.types.is_string(each.type):
                raise InvalidInput(
                    f"column {each.name!r} is for the text of records and of type {each.type}: "
                    "make it STRING"
                )
            check_type(each.name, each.type, options.format)
        if options.rescued_column and options.rescued_column not in seen:
            raise InvalidInput(
                f"option rescuedDataColumn is {options.rescued_column!r}, and the schema has no "
                "such column: add it as STRING"
            )
        self._fields = [each for each in schema if each.name not in special]
        self._filled = list(self._fields)
        if options.rescued_column:
            self._filled.append(pa.field(options.rescued_column, pa.string()))
        csv = options.format == CSV
        if csv and options.rescued_column:
            raise InvalidInput(
                f"option rescuedDataColumn is {options.rescued_column!r} and valueFormat is csv: "
                "fields of a CSV record have no names. Leave it out; the column "
                f"{options.corrupt_column!r} has the text of records with other fields"
            )
        if not self._fields:
            raise InvalidInput("schema has no column that is filled from records: name some")
        self._exact = ExactCsv(self._fields, options) if csv else ExactJson(self._fields, options)
        self._bulk = (
            Lines(self._fields, options) if csv else Objects(self._fields, options, library)
        )
        self._header: bytes | None = None
        if csv and options.header:
            self._header = options.sep.join(each.name for each in self._fields).encode()
        self._shapes: list[Shape] = []
        self._unshaped = 0  # Pieces in a row in which no shape was found.

    @property
    def shapes(self) -> int:
        """How many shapes of records are known."""
        return len(self._shapes)

    def decode(self, values: pa.BinaryArray) -> Columns:
        """The columns of some records.

        Args:
            values: Records, of type ``pa.binary()`` and without nulls.

        Raises:
            Nothing because of what a record is: that is in the answer.
        """
        count = len(values)
        parts: list[tuple[Ints, list[pa.Array]]] = []
        left = np.ones(count, np.bool_)
        exactly = np.zeros(count, np.bool_)
        malformed: dict[int, str] = {}
        if count:
            exactly = ~_utf8(values)
            left &= ~exactly
            if self._options.format == JSON:
                self._by_shape(values, left, parts)
            rows = np.flatnonzero(left)
            if len(rows):
                part = values if len(rows) == count else values.take(pa.array(rows))
                arrays, doubtful = self._bulk.columns(part)
                if self._options.rescued_column:  # With something to rescue it were doubtful.
                    arrays.append(pa.nulls(len(part), pa.string()))
                exactly[rows[doubtful]] = True
                parts.append(_keep(rows, arrays, ~doubtful))
            rows = np.flatnonzero(exactly)
            if len(rows):
                parts.append((rows, self._exactly(values, rows, malformed)))
        columns = _merged(parts, count, self._filled)
        rescued = columns.pop() if self._options.rescued_column else None
        taken = iter(columns)
        arrays = []
        for each in self.schema:
            if each.name == self._options.corrupt_column:
                arrays.append(_texts(values, malformed, self._options.format == CSV))
            elif rescued is not None and each.name == self._options.rescued_column:
                arrays.append(rescued)
            else:
                arrays.append(next(taken))
        return Columns(arrays, malformed, self._headers(values, malformed))

    def _headers(self, values: pa.BinaryArray, malformed: dict[int, str]) -> list[int]:
        if self._header is None:
            return []
        same = pc.equal(values, pa.scalar(self._header, pa.binary()))
        found: list[int] = np.flatnonzero(same.to_numpy(zero_copy_only=False)).tolist()
        for row in found:
            malformed.pop(row, None)
        return found

    def _by_shape(
        self, values: pa.BinaryArray, left: Mask, parts: list[tuple[Ints, list[pa.Array]]]
    ) -> None:
        """Read what has a known shape, or one that can be learnt; take it from what is left."""
        if self._unshaped > 64:
            return
        records = Records(values)
        wanted = left & records.plain
        untried, tries, found = list(self._shapes), _MOST_TRIES, False
        worth = min(_WORTH_LEARNING, len(values))
        while tries and wanted.sum() >= worth:
            known = bool(untried)
            if untried:
                shape = untried.pop(0)
            else:
                if len(self._shapes) >= _MOST_SHAPES:
                    break
                first = int(np.argmax(wanted))
                learnt = learn(values[first].as_py().rstrip(b" "), self._fields, self._options)
                if learnt is None:
                    wanted[first] = False
                    tries -= 1
                    continue
                shape = learnt
            rows, cut = shape.cut(records, wanted)
            if len(rows):
                arrays, doubtful = shape.columns(cut, self._fields, self._options)
                wanted[rows] = False
                left[rows[~doubtful]] = False
                parts.append(_keep(rows, arrays, ~doubtful))
                found = True
            if not known:
                if len(rows) >= worth:
                    self._shapes.append(shape)
                else:  # A rare shape, or one that does not even have the record it came from.
                    wanted[first] = False
                    tries -= 1
        self._unshaped = 0 if found else self._unshaped + 1

    def _exactly(
        self, values: pa.BinaryArray, rows: Ints, malformed: dict[int, str]
    ) -> list[pa.Array]:
        columns: list[list[Any]] = [[] for _ in self._filled]
        for row in rows.tolist():
            read = self._exact.read(values[row].as_py())
            for column, value in zip(columns, [*read.values, read.rescued], strict=False):
                column.append(value)
            if read.problem:
                malformed[row] = read.problem
        return [
            pa.array(column, each.type) for column, each in zip(columns, self._filled, strict=True)
        ]


def _keep(rows: Ints, arrays: Sequence[pa.Array], good: Mask) -> tuple[Ints, list[pa.Array]]:
    if good.all():
        return rows, list(arrays)
    mask = pa.array(good)
    return rows[good], [each.filter(mask) for each in arrays]


def _merged(
    parts: list[tuple[Ints, list[pa.Array]]], count: int, fields: Sequence[pa.Field]
) -> list[pa.Array]:
    """The parts as columns in the order of the records."""
    parts = [each for each in parts if len(each[0])]
    if not parts:
        return [pa.nulls(count, each.type) for each in fields]
    if len(parts) == 1:
        return parts[0][1]
    order = np.concatenate([rows for rows, _ in parts])
    back = np.empty(count, np.int64)
    back[order] = np.arange(count)
    places = pa.array(back)
    return [
        pa.concat_arrays([arrays[number] for _, arrays in parts]).take(places)
        for number in range(len(fields))
    ]


def _utf8(values: pa.BinaryArray) -> Mask:
    """Which records are UTF-8."""
    good = np.ones(len(values), np.bool_)
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset :]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[len(values)]]
    if not len(data) or data.max() < 0x80:
        return good
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        for at, record in enumerate(values.to_pylist()):
            try:
                record.decode()
            except UnicodeDecodeError:
                good[at] = False
    return good


def _texts(values: pa.BinaryArray, malformed: dict[int, str], line: bool) -> pa.StringArray:
    """The text of each malformed record, of CSV without a line end; wrong UTF-8 is replaced."""
    if not malformed:
        return pa.nulls(len(values), pa.string())
    texts: list[str | None] = [None] * len(values)
    for row in malformed:
        text = java_text(values[row].as_py())
        texts[row] = _LINE_END.sub("", text) if line else text
    return pa.array(texts, pa.string())
