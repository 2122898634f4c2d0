"""The end of the demo: a table, a picture, and the proof that every record arrived once."""

from __future__ import annotations

import logging
from calendar import month_abbr
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset
from pyarrow import compute as pc
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from notebooks.demo.flights import AIRPORTS, Share, airlines
from notebooks.demo.places import Places
from notebooks.demo.progress import Sample


def carriers(places: Places) -> Table:
    """Mean departure delay of each carrier, and its worst hour of the day."""
    files = [str(each) for each in places.delays.glob("batch=*/*.parquet")]
    parts = pa.dataset.dataset(files, format="parquet").to_table()
    sums = [("departed", "sum"), ("minutes", "sum")]
    hours = parts.group_by(["carrier", "hour"]).aggregate(sums).to_pylist()
    table = _table("departure delay, 2013")
    for column in ("carrier", "departed", "mean delay", "worst hour", "mean then"):
        table.add_column(column, justify="left" if column == "carrier" else "right")
    by_carrier: dict[str, list[dict[str, Any]]] = {}
    for each in hours:
        if each["departed_sum"]:  # a flight that was cancelled has no delay
            by_carrier.setdefault(each["carrier"], []).append(each)

    def mean(rows: Sequence[dict[str, Any]]) -> float:
        departed = sum(row["departed_sum"] for row in rows)
        return float(sum(row["minutes_sum"] for row in rows)) / departed

    for carrier, rows in sorted(by_carrier.items(), key=lambda item: -mean(item[1])):
        # An hour with a handful of flights in the year says nothing.
        usual = [row for row in rows if row["departed_sum"] >= 30] or rows
        worst = max(usual, key=lambda row: mean([row]))
        table.add_row(
            airlines().get(carrier, carrier),
            f"{sum(row['departed_sum'] for row in rows):,}",
            f"{mean(rows):.1f} min",
            f"{worst['hour']:02d}:00",
            f"{mean([worst]):.1f} min",
        )
    return table


def plot(places: Places, samples: Sequence[Sample]) -> None:
    """Draw the delay through the year and the backlog through this run."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    flights = places.written(["month", "day", "dep_delay"]).drop_null()
    days = flights.group_by(["month", "day"]).aggregate([("dep_delay", "mean")])
    days = days.sort_by([("month", "ascending"), ("day", "ascending")])
    delays = days["dep_delay_mean"].to_numpy()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 7), layout="constrained")
    top.bar(range(len(delays)), delays, width=1.0, color="#4c78a8")
    starts = [i for i, day in enumerate(days["day"].to_pylist()) if day == 1]
    top.set_xticks(starts, [month_abbr[days["month"][i].as_py()] for i in starts])
    top.set(title="Mean departure delay by day, 2013", ylabel="minutes")
    seconds = [each.seconds for each in samples]
    bottom.fill_between(seconds, [each.backlog for each in samples], color="#f58518", alpha=0.5)
    bottom.set(title="This run", xlabel="seconds", ylabel="backlog, rows")
    bottom.set_ylim(bottom=0)
    lag = bottom.twinx()
    lag.plot(seconds, [each.lag_s for each in samples], color="#54a24b")
    lag.set_ylabel("lag, seconds", color="#54a24b")
    lag.set_ylim(bottom=0)
    figure.savefig(places.plot, dpi=110)


def prove(places: Places, console: Console) -> bool:
    """Compare what is in Parquet with what the package holds: each record once, unchanged."""
    found = places.written(["airport", "row", "crc"])
    table = _table("proof: Parquet against the source")
    for column in ("producer", "rows", "distinct", "first", "last", "sum of rows", "bytes"):
        table.add_column(column, justify="left" if column == "producer" else "right", no_wrap=True)
    shares = [Share.of(airport) for airport in AIRPORTS]
    all_exact = True
    for share in shares:
        rows = found.filter(pc.equal(found["airport"], share.airport))
        got, want = _figures(rows["row"]), _figures(share.table["row"])
        same = pc.sum(rows["crc"]).as_py() == share.checksum()
        all_exact &= got == want and same
        table.add_row(share.airport, *map(_cell, got, want), "same" if same else "[red]differ[/]")
    total = sum(len(share.table) for share in shares)
    got, want = _figures(found["row"]), (total, total, 1, total, total * (total + 1) // 2)
    all_exact &= got == want
    table.add_row("all", *map(_cell, got, want))
    console.print(table)
    if all_exact:
        console.print(f"[bold green]every record once:[/] {len(found):,} of {total:,}")
    else:
        console.print("[bold red]NOT every record once: see the red figures[/]")
    return all_exact


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD)


def _figures(rows: Any) -> tuple[Any, ...]:
    low_high = pc.min_max(rows)
    return (
        len(rows),
        pc.count_distinct(rows).as_py(),
        low_high["min"].as_py(),
        low_high["max"].as_py(),
        pc.sum(rows).as_py(),
    )


def _cell(got: int | None, want: int) -> str:
    return f"{got:,}" if got == want else f"[red]{got} (not {want})[/]"
