"""The charts: one drawing for the picture and for the page.

A picture has fixed colours; on the page the colours follow the reader's light or dark setting. So
charts are drawn in the colours of :data:`PALETTE`, which are all different. On the page, each
colour becomes the CSS variable of its name.
"""

from __future__ import annotations

import io
import logging
import re
from calendar import month_abbr
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from notebooks.demo.findings import Delay, weeks
from notebooks.demo.progress import Mark, Sample

PALETTE = {
    "ink": "#1c2733",
    "soft": "#52606d",
    "rule": "#dfe5ea",
    "days": "#a8c8e6",
    "weeks": "#0f4c81",
    "backlog": "#d9722e",
    "lag": "#0b7261",
    "away": "#eef1f4",
}
"""Colours on white. Text uses only ``ink``, ``soft``, ``weeks``, ``backlog`` or ``lag``."""

READY = "Spark ready"
STOPPED = "Spark killed"
AGAIN = "started again"
CAUGHT_UP = "caught up"

_STYLE = {
    "axes.edgecolor": PALETTE["soft"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "axes.titlecolor": PALETTE["ink"],
    "axes.labelcolor": PALETTE["soft"],
    "font.size": 10,
    "grid.color": PALETTE["rule"],
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": PALETTE["ink"],
    "xtick.color": PALETTE["soft"],
    "ytick.color": PALETTE["soft"],
    "ytick.left": False,
}


LINES = 5
"""Lines for the names of marks, at the top of a chart."""


@contextmanager
def _figure(size: tuple[float, float], charts: int) -> Iterator[tuple[Any, list[Any]]]:
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # Hides its font cache.
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(charts, 1, figsize=size, layout="constrained", squeeze=False)
        figure.get_layout_engine().set(hspace=0.08)
        yield figure, list(axes[:, 0])
        plt.close(figure)


def save_picture(
    to: Path, days: Sequence[Delay], run: Sequence[Sample], marks: Sequence[Mark]
) -> None:
    """Write all charts as one PNG."""
    with _figure((10, 9), 3) as (figure, (top, middle, bottom)):
        _draw_delays(top, days)
        _draw_run(middle, bottom, run, marks)
        figure.savefig(to, dpi=110)


def delays_svg(days: Sequence[Delay], size: tuple[float, float]) -> str:
    """Return the delay over the year, as an SVG element for the page."""
    with _figure(size, 1) as (figure, (axes,)):
        _draw_delays(axes, days, narrow=size[0] < 6)
        return _svg(figure, f"delays-{size[0]}")


def run_svg(run: Sequence[Sample], marks: Sequence[Mark], size: tuple[float, float]) -> str:
    """Return backlog and lag during a run, as an SVG element for the page."""
    with _figure(size, 2) as (figure, (upper, lower)):
        _draw_run(upper, lower, run, marks, narrow=size[0] < 6)
        return _svg(figure, f"run-{size[0]}")


def _draw_delays(axes: Any, days: Sequence[Delay], narrow: bool = False) -> None:
    first = days[0].begin
    ends = [(each.begin - first).days for each in days]
    axes.bar(
        [end + 0.5 for end in ends],
        [each.minutes for each in days],
        width=1.0,
        color=PALETTE["days"],
        label="a day",
    )
    means = weeks(days)
    axes.plot(
        [min((each.begin - first).days + 3.5, ends[-1] + 0.5) for each in means],
        [each.minutes for each in means],
        color=PALETTE["weeks"],
        linewidth=2.2,
        solid_capstyle="round",
        label="mean of seven days",
    )
    starts = [i for i, each in zip(ends, days, strict=True) if each.begin.day == 1]
    names = [month_abbr[each.begin.month] for each in days if each.begin.day == 1]
    axes.set_xticks(starts, [name[0] if narrow else name for name in names], ha="left")
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(0, ends[-1] + 1)
    axes.set_title("Mean departure delay, 2013")
    axes.set_ylabel("minutes")
    bars, line = axes.get_legend_handles_labels()[0][::-1]
    axes.legend(handles=[bars, line], loc="upper right", ncols=2, borderaxespad=0)


def _draw_run(
    upper: Any, lower: Any, run: Sequence[Sample], marks: Sequence[Mark], narrow: bool = False
) -> None:
    from matplotlib.ticker import StrMethodFormatter

    seconds = [each.seconds for each in run]
    end = max(seconds[-1], 1.0)
    upper.fill_between(
        seconds, [each.backlog for each in run], color=PALETTE["backlog"], linewidth=0
    )
    upper.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    upper.set_title("Backlog" if narrow else "Backlog: rows in the buffer, not in Parquet yet")
    upper.set_ylabel("rows")
    lower.plot(seconds, [each.lag_s for each in run], color=PALETTE["lag"], linewidth=1.8)
    lag = "Lag" if narrow else "Lag: for how long the oldest of them has been in the buffer"
    lower.set_title(lag)
    lower.set_ylabel("seconds")
    lower.set_xlabel("seconds since the start")
    for axes in (upper, lower):
        axes.set_xlim(0, end)
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0) * (1.9 if narrow else 1.45))
        for begin, until in away(marks, end):
            axes.axvspan(begin, until, color=PALETTE["away"], zorder=0, linewidth=0)
        for each in marks:
            axes.axvline(each.seconds, color=PALETTE["soft"], linewidth=1, linestyle=(0, (2, 2)))
    _name(upper, marks, end, narrow=narrow)


def _name(axes: Any, marks: Sequence[Mark], end: float, *, narrow: bool) -> None:
    """Write the names of marks at the top, each on the first line where it hides no other name."""
    lines: list[list[tuple[float, float]]] = [[] for _ in range(LINES)]
    height, width = axes.get_ylim()[1], (0.024 if narrow else 0.0125) * end
    for each in marks:
        length = width * len(each.name)
        fits = each.seconds + length < end
        begin = each.seconds if fits else each.seconds - length
        line = next(
            n
            for n, taken in enumerate(lines)
            if n == LINES - 1 or all(begin >= to or begin + length <= of for of, to in taken)
        )
        lines[line].append((begin, begin + length))
        axes.annotate(
            each.name,
            (each.seconds, height),
            (4 if fits else -4, -3 - 12 * line),
            textcoords="offset points",
            ha="left" if fits else "right",
            va="top",
            fontsize=9,
            color=PALETTE["ink"],
        )


def away(marks: Sequence[Mark], end: float) -> list[tuple[float, float]]:
    """Return the periods without a running query: before it was ready, and while it was stopped."""
    found: list[tuple[float, float]] = []
    since: float | None = 0.0
    for each in marks:
        if each.name == STOPPED:
            since = each.seconds
        elif each.name in (READY, AGAIN) and since is not None:
            found.append((since, each.seconds))
            since = None
    return found if since is None else [*found, (since, end)]


def _svg(figure: Any, salt: str) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    found = text.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    # With two charts on a page, ids that nothing refers to would appear twice.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', found))
    found = re.sub(r' id="([^"]+)"', lambda it: it[0] if it[1] in used else "", found)
    found = re.sub(r"<!--.*?-->", "", found, flags=re.DOTALL)
    found = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", found)
    # The page sets the size and the description.
    found = re.sub(r'^<svg[^>]*?(viewBox="[^"]+")[^>]*>', r'<svg \1 aria-hidden="true">', found)
    for name, colour in PALETTE.items():
        found = found.replace(colour, f"var(--{name})")
    return found
