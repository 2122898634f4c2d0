"""Results of the output: delays by day, week and carrier, and a proof that it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset
from pyarrow import compute as pc

from notebooks.demo.flights import AIRPORTS, Share, airlines
from notebooks.demo.places import Places


class Delay(NamedTuple):
    """Mean departure delay of the flights that left on some days.

    Attributes:
        begin: The first day.
        departed: Flights that left.
        minutes: Their mean delay.
    """

    begin: date
    departed: int
    minutes: float


class Carrier(NamedTuple):
    """Departure delay of one airline's flights that left."""

    name: str
    departed: int
    minutes: float
    worst_hour: int
    worst_minutes: float


class Figure(NamedTuple):
    """One figure of the proof.

    Attributes:
        name: The name of the figure.
        got: The value in Parquet; None without records.
        want: The value in the source.
    """

    name: str
    got: int | None
    want: int

    @property
    def is_exact(self) -> bool:
        """Whether both values are equal."""
        return self.got == self.want


@dataclass(frozen=True)
class Proof:
    """The records in Parquet compared with the source, for each producer and for all."""

    rows: dict[str, tuple[Figure, ...]]

    @property
    def is_exact(self) -> bool:
        """Whether every record is there exactly once and unchanged."""
        return all(figure.is_exact for row in self.rows.values() for figure in row)

    @property
    def total(self) -> Figure:
        """The number of records."""
        return self.rows["all"][0]


def days(places: Places) -> list[Delay]:
    """Return the delay of each day, in order."""
    flights = places.written(["year", "month", "day", "dep_delay"]).drop_null()
    found = flights.group_by(["year", "month", "day"]).aggregate(
        [("dep_delay", "count"), ("dep_delay", "mean")]
    )
    delays = [
        Delay(
            date(row["year"], row["month"], row["day"]),
            row["dep_delay_count"],
            row["dep_delay_mean"],
        )
        for row in found.to_pylist()
    ]
    return sorted(delays)


def weeks(of_days: Sequence[Delay]) -> list[Delay]:
    """Return the delay of each period of seven days; every flight has the same weight.

    The days that are left at the end belong to the last period: a year is 52 weeks and a day.
    """
    if not of_days:
        return []
    first = of_days[0].begin
    last = max(0, ((of_days[-1].begin - first).days + 1) // 7 - 1)
    found: dict[int, list[Delay]] = {}
    for each in of_days:
        found.setdefault(min((each.begin - first).days // 7, last), []).append(each)
    return [Delay(first + timedelta(weeks=n), *_mean(each)) for n, each in found.items()]


def _mean(delays: Sequence[Delay]) -> tuple[int, float]:
    departed = sum(each.departed for each in delays)
    return departed, sum(each.departed * each.minutes for each in delays) / departed


def carriers(places: Places) -> list[Carrier]:
    """Return the airlines, most delayed first, from the query's sums per carrier and hour."""
    files = [str(each) for each in places.delays.glob("batch=*/*.parquet")]
    parts = pa.dataset.dataset(files, format="parquet").to_table()
    sums = [("departed", "sum"), ("minutes", "sum")]
    by_carrier: dict[str, list[dict[str, Any]]] = {}
    for each in parts.group_by(["carrier", "hour"]).aggregate(sums).to_pylist():
        if each["departed_sum"]:  # A cancelled flight has no delay.
            by_carrier.setdefault(each["carrier"], []).append(each)

    def mean(rows: Sequence[dict[str, Any]]) -> float:
        departed: int = sum(row["departed_sum"] for row in rows)
        return float(sum(row["minutes_sum"] for row in rows)) / departed

    found = []
    for carrier, rows in by_carrier.items():
        # An hour with only a few flights in the year is not meaningful.
        usual = [row for row in rows if row["departed_sum"] >= 30] or rows
        worst = max(usual, key=lambda row: mean([row]))
        departed = sum(row["departed_sum"] for row in rows)
        name = airlines().get(carrier, carrier)
        found.append(Carrier(name, departed, mean(rows), worst["hour"], mean([worst])))
    return sorted(found, key=lambda each: -each.minutes)


def prove(places: Places) -> Proof:
    """Compare the records in Parquet with the package that contains the data."""
    found = places.written(["airport", "row", "crc"])
    shares = [Share.of(airport) for airport in AIRPORTS]
    rows = {}
    for share in shares:
        got = found.filter(pc.equal(found["airport"], share.airport))
        rows[share.airport] = _compared(got, [*_counts(share.table["row"]), share.checksum()])
    total = sum(len(share.table) for share in shares)
    wanted = [total, total, 1, total, total * (total + 1) // 2]
    rows["all"] = _compared(found, [*wanted, sum(row[-1].want for row in rows.values())])
    return Proof(rows)


NAMES = ("rows", "distinct", "first", "last", "sum of rows", "sum of CRC-32")
"""Figures of the proof."""


def _compared(found: Any, wanted: Sequence[Any]) -> tuple[Figure, ...]:
    got = [*_counts(found["row"]), pc.sum(found["crc"]).as_py()]
    return tuple(map(Figure, NAMES, got, wanted))


def _counts(rows: Any) -> list[Any]:
    low_high = pc.min_max(rows)
    return [
        len(rows),
        pc.count_distinct(rows).as_py(),
        low_high["min"].as_py(),
        low_high["max"].as_py(),
        pc.sum(rows).as_py(),
    ]
