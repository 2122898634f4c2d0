"""How fast does ``read()`` give a queue's records to other tools?

500,000 JSON records of 165 bytes lie in a directory, once in batches of 5,000 records and once in
batches of 100. Every way reads the queue again and takes all rows, in turns with the others. The
yardstick is DuckDB, which parses the JSON of the raw column itself. Tools that are not installed
are left out.
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from benchmarks.measuring import (
    cpu_seconds,
    in_turns,
    memory_folder,
    sized,
)
from benchmarks.stores import queue_all
from benchmarks.tables import Row
from opendata_buffer import read
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.stores.local import LocalStore

RECORDS = sized(500_000, tiny=200)
BATCH_RECORDS = sized((5_000, 100), tiny=(50,))
ROUNDS = sized(7, tiny=1)

SCHEMA = pa.schema([("id", pa.int64()), ("user", pa.string()), ("amount", pa.float64())])
FIELDS = '{"id": "BIGINT", "user": "VARCHAR", "amount": "DOUBLE"}'
TYPED, YARDSTICK = "DuckDB over typed columns", "DuckDB, parsing the raw column"
SUM = 'SELECT count(*), sum(id), max("user"), sum(amount) FROM '


def json_records() -> list[bytes]:
    """Return orders of about 165 bytes."""
    rng = random.Random(7)
    return [
        json.dumps(
            {
                "id": number,
                "user": f"user-{rng.randrange(10**6)}",
                "amount": round(rng.random() * 100, 6),
                "at": f"2026-01-02T03:04:05.{rng.randrange(10**6):06d}Z",
                "note": "x" * 72,
            },
            separators=(",", ":"),
        ).encode()
        for number in range(RECORDS)
    ]


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    records = json_records()
    for size in BATCH_RECORDS:
        with tempfile.TemporaryDirectory(dir=memory_folder()) as home:
            parts = (records[begin : begin + size] for begin in range(0, RECORDS, size))
            queue_all(LocalStore(home), (encode_batch(part) for part in parts), size)
            yield from _rows_of(home, size)


def _rows_of(home: str, size: int) -> Iterator[Row]:
    ways = dict(_ways(home))
    found = in_turns({name: partial(_seconds, way) for name, way in ways.items()}, ROUNDS, 1)
    clock = {name: statistics.median(wall for wall, _ in runs) for name, runs in found.items()}
    work = {name: statistics.median(cpu for _, cpu in runs) for name, runs in found.items()}
    where = f"batches of {size:,} records"
    for name in ways:
        rate = f"{RECORDS / work[name] / 1e6:.2f} M records/s of CPU time"
        detail = f"{RECORDS / clock[name] / 1e6:.2f} M records/s by the clock"
        yield Row(f"{name}, {where}", rate, detail=detail)
    if YARDSTICK not in work:
        return
    name = f"{TYPED} / {YARDSTICK}, {where}"
    ratio = work[YARDSTICK] / work[TYPED]
    detail = f"{clock[YARDSTICK] / clock[TYPED]:.2f} x by the clock"
    yield Row(name, f"{ratio:.2f} x", ">= 1 x", ratio >= 1, detail)


def _seconds(way: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of one call by the clock, and those of CPU time in all threads."""
    began = time.perf_counter()
    cpu = cpu_seconds(way)
    return time.perf_counter() - began, cpu


def _ways(home: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the installed ways of reading the queue, each of which must find all records."""

    def taken(schema: pa.Schema | None) -> None:
        assert sum(batch.num_rows for batch in read(home, schema)) == RECORDS

    def duckdb_of(duckdb: Any, query: str, schema: pa.Schema | None) -> None:
        connection = duckdb.connect()
        connection.register("queue", read(home, schema))
        assert connection.execute(query).fetchall()[0][0] == RECORDS
        connection.close()

    def polars_of(polars: Any) -> None:
        frame = polars.DataFrame(read(home, SCHEMA))
        assert frame.height == RECORDS
        frame.select(polars.sum("id"), polars.max("user"), polars.sum("amount"))

    def pandas_of() -> None:
        frame = read(home, SCHEMA).read_pandas()
        assert len(frame) == RECORDS
        frame["amount"].sum()

    def daft_of(daft: Any) -> None:
        frame = daft.from_arrow(read(home, SCHEMA))
        assert frame.sum("amount").to_pydict()
        assert frame.count_rows() == RECORDS

    yield "raw columns", partial(taken, None)
    yield "typed columns", partial(taken, SCHEMA)
    duckdb, polars, daft = map(_installed, ("duckdb", "polars", "daft"))
    if duckdb is not None:
        yield TYPED, partial(duckdb_of, duckdb, f"{SUM} queue", SCHEMA)
        parsed = f"(SELECT unnest(from_json(decode(value)::JSON, '{FIELDS}')) FROM queue)"
        yield YARDSTICK, partial(duckdb_of, duckdb, SUM + parsed, None)
    if polars is not None:
        yield "Polars over typed columns", partial(polars_of, polars)
    if _installed("pandas") is not None:
        yield "pandas over typed columns", pandas_of
    if daft is not None:
        yield "Daft over typed columns", partial(daft_of, daft)


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
