"""Draws ``data-flow.svg``: who writes and reads which object of a queue.

    python docs/figures/data_flow.py

writes the file beside itself. A test compares the two, so change this text and not the picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

__all__ = ["drawing"]

WIDTH, HEIGHT = 920, 420
STORE = "#eef4fb"
INK = "#1f2933"
DATA = "#2f6f4f"
CONTROL = "#9a4a1c"

# place and size, title, lines below it
BOXES = (
    ((20, 85, 220, 130), "Writers, any number", ("Python", "command line", "Spark sink")),
    ((365, 62, 190, 76), "manifest", ("locations in order, epoch", "changed by CAS only")),
    ((365, 170, 190, 76), "batches", ("ingest/<ULID>.batch", "immutable, any number")),
    ((680, 85, 220, 130), "One reader at a time", ("Python", "command line", "Spark source")),
    ((365, 318, 190, 76), "Collector", ("deletes what no entry", "names, after a while")),
)  # fmt: skip

# colour, label, label's place, first and last point
ARROWS = (
    (DATA, "1 upload", (290, 182), (240, 190), (365, 208)),
    (CONTROL, "2 append", (290, 92), (240, 108), (365, 92)),
    (CONTROL, "3 read", (628, 78), (555, 84), (680, 96)),
    (DATA, "4 fetch", (628, 190), (555, 208), (680, 190)),
    (CONTROL, "5 ack", (626, 144), (680, 124), (555, 112)),
    (DATA, "6 delete", (492, 304), (460, 318), (460, 246)),
)


def drawing() -> str:
    """The figure as SVG."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{INK}" role="img">'
    )
    yield (
        "<title>Writers upload batches and append their locations to the manifest; a consumer "
        "reads the manifest, fetches batches and acknowledges them; the collector deletes.</title>"
    )
    yield "<defs>"
    for name, colour in (("data", DATA), ("control", CONTROL)):
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        )
    yield "</defs>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield (
        f'<rect x="340" y="30" width="240" height="236" rx="10" fill="{STORE}" stroke="#7b9cc4"/>'
    )
    yield _text(460, 54, "one bucket or directory", weight="bold", anchor="middle")
    for colour, label, (x, y), begin, end in ARROWS:
        marker = "data" if colour == DATA else "control"
        yield (
            f'<path d="M{begin[0]} {begin[1]} L{end[0]} {end[1]}" stroke="{colour}" '
            f'stroke-width="1.6" marker-end="url(#{marker})"/>'
        )
        yield _text(x, y, label, colour=colour, anchor="middle")
    for (x, y, width, height), title, below in BOXES:
        yield (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="#ffffff" '
            f'stroke="{INK}"/>'
        )
        middle = x + width // 2
        top = y + height // 2 - 8 * len(below) + 2
        yield _text(middle, top, title, weight="bold", anchor="middle")
        for row, line in enumerate(below):
            yield _text(middle, top + 20 + 17 * row, line, anchor="middle", size=12)
    yield _text(20, 370, "green: records", colour=DATA)
    yield _text(20, 390, "brown: the manifest, some bytes a batch", colour=CONTROL)
    yield "</svg>"


def _text(
    x: int,
    y: int,
    text: str,
    *,
    colour: str = INK,
    weight: str = "normal",
    anchor: str = "start",
    size: int = 13,
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-weight="{weight}" font-size="{size}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    Path(__file__).with_name("data-flow.svg").write_text(drawing(), encoding="utf-8")
