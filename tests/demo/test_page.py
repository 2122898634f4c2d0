"""The demo's report: its text, and how a real browser shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import pytest

from notebooks.demo import plot
from notebooks.demo.findings import NAMES, Carrier, Delay, Figure, Proof
from notebooks.demo.page import Run, interruption, render, tiles
from notebooks.demo.progress import Mark, MicroBatch, Sample
from tests.support.browser import chromium, needs_chromium

DAYS = [Delay(date(2013, 1, 1) + timedelta(i), 100, 10.0 + i % 7) for i in range(365)]
CARRIERS = [Carrier("Frontier & <Sons>", 682, 20.2, 17, 29.4), Carrier("Envoy Air", 9, 1.5, 5, 3)]
MARKS = [
    Mark(10.0, plot.READY, "the first 1,500 rows are in Parquet"),
    Mark(30.0, plot.STOPPED, "in the middle of a batch"),
    Mark(36.0, plot.AGAIN, "while 55,000 rows wait"),
    Mark(55.0, plot.CAUGHT_UP, "every row that waited then is in Parquet"),
    Mark(56.0, "all durable", "every flight is in the buffer"),
    Mark(60.0, "all in Parquet", "50 s of replay"),
]


def samples() -> list[Sample]:
    found = []
    for i in range(301):
        seconds = i / 5
        durable = 1_500 if seconds < 10 else min(336_776, int(1_500 + (seconds - 10) * 7_500))
        behind = 9_000 if seconds < 30 else max(9_000, int(60_000 - (seconds - 36) * 3_000))
        written = 0 if seconds < 10 else max(1_500, durable - behind)
        found.append(Sample(seconds, durable, written if i < 300 else durable, behind / 7_500))
    return found


# The second start of the query first repeats the micro-batch that it was stopped in.
MICRO_BATCHES = [
    MicroBatch(1, 7, 12, 900),
    MicroBatch(1, 8, 14, 1_000),
    MicroBatch(2, 9, None, 2_000),
    MicroBatch(2, 10, 40, 2_000),
    MicroBatch(2, 11, 16, 9_000),
]
ROWS = dict.fromkeys(range(9), 100) | {9: 20_000, 10: 60_000, 11: 500}
RUN = Run("a queue", "./run demo", samples(), MARKS, ROWS, [130, 90, 110], MICRO_BATCHES)


def proof(missing: int = 0) -> Proof:
    """Return an exact proof, or one with ``missing`` rows."""
    wanted = (336_776, 336_776, 1, 336_776, 56_709_205_476, 723_623_913_586_397)
    figures = tuple(map(Figure, NAMES, (336_776 - missing, *wanted[1:]), wanted))
    return Proof({"EWR": figures, "all": figures})


def page_of(missing: int = 0) -> str:
    return render(RUN, DAYS, CARRIERS, proof(missing), "1.2.3")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page_of(), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile"), offline=True) as context:
        yield context


def test_the_tiles_measure_the_buffer_and_not_the_pace_of_the_replay() -> None:
    shown = {tile.name: tile.value for tile in tiles(RUN)}
    assert shown == {
        "durable after": "110 ms",
        "planning": "15 ms",
        "catching up": "20,000 rows/s",  # 80,000 rows in 4 s
        "outage": "6 s",
        "micro-batches": "12",
        "time": "60 s",
    }


def test_the_report_of_an_uninterrupted_run_mentions_no_interruption() -> None:
    unbroken = replace(RUN, marks=[MARKS[0], MARKS[-1]], durable_ms=[], micro_batches=[])
    assert [tile.name for tile in tiles(unbroken)] == ["micro-batches", "time"]
    assert "killed" not in render(unbroken, DAYS, CARRIERS, proof(), "1").split("<main>")[0]


def test_the_report_describes_the_interruption_and_the_resumption() -> None:
    told = interruption(RUN)
    assert told is not None
    assert (told.stopped, told.again, told.caught_up) == (30.0, 36.0, 55.0)
    assert told.produced == 45_000, "6 s at 7,500 rows/s"
    assert told.waiting == 60_000
    text = " ".join(page_of().split())
    assert "60,000 rows waited in the buffer" in text
    assert "killed" in text
    assert "SIGKILL" in text
    assert text.index(">The proof<") < text.index(">This run in figures<")
    assert "opendata-buffer produce s3://YOUR-BUCKET/try" in text


def test_the_page_needs_no_other_file_and_escapes_text() -> None:
    text = page_of()
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "<script" not in text
    assert "Frontier &amp; &lt;Sons&gt;" in text


def test_the_report_of_a_run_that_lost_a_record_says_so_and_shows_both_figures() -> None:
    text = page_of(missing=1)
    assert "Not every record arrived once" in text
    assert "Every record arrived once, unchanged" not in text
    assert '<td class="bad" data-name="rows">336775 (not 336,776)</td>' in text


@needs_chromium
def test_a_browser_shows_the_verdict_the_charts_and_the_proof(browser: Any, report: str) -> None:
    page = browser.new_page()
    complaints: list[str] = []
    asked_for: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked_for.append(request.url))
    page.goto(report)
    assert page.get_by_text("Every record arrived once, unchanged").is_visible()
    assert page.get_by_role("heading", level=1).count() == 1
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="all"))
    assert row.get_by_role("cell").first.inner_text() == "336,776"
    charts = page.locator("figure svg:visible")
    assert charts.count() == 2
    for index in range(2):
        box = charts.nth(index).bounding_box()
        assert box["width"] > 600
        assert box["height"] > 200
    for name in ("Spark ready", "Spark killed", "started again", "mean of seven days", "100,000"):
        assert page.locator("figure svg:visible text", has_text=name).first.is_visible()
    page.get_by_text("The means of seven days as a table").click()
    assert page.get_by_role("rowheader", name="2013-12-24").is_visible()
    assert complaints == []
    assert asked_for == [report], "it loads nothing else"
    page.close()


@needs_chromium
@pytest.mark.parametrize(("scheme", "width"), [("dark", 360), ("light", 1100)])
def test_the_page_is_accessible_on_phone_and_desktop_in_light_and_dark_mode(
    browser: Any, report: str, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page()
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto(report)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert len(found.response["passes"]) > 15, "it looked"
    page.close()
