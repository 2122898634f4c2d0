"""The demo's report: what it says, and how a real browser shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from notebooks.demo.page import render, tiles
from tests.demo.browser import CHROMIUM, WHY_NOT, pages
from tests.demo.runs import CARRIERS, DAYS, RUN, proof

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)


def page_of(missing: int = 0) -> str:
    return render(RUN, DAYS, CARRIERS, proof(missing), "1.2.3")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page_of(), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pages(tmp_path_factory.mktemp("profile")) as context:
        yield context


def test_the_tiles_measure_from_when_spark_was_ready() -> None:
    shown = {tile.name: tile.value for tile in tiles(RUN)}
    assert shown["time"] == "60 s"
    assert shown["throughput"] == "6,706 rows/s", "335,276 rows in 50 s"
    assert shown["largest backlog"] == "78,000 rows"
    assert shown["largest lag"] == "10.4 s"
    assert shown["micro-batches"] == "19"


def test_the_page_needs_no_other_file_and_takes_no_text_for_markup() -> None:
    text = page_of()
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    assert "<script" not in text
    assert "Frontier &amp; &lt;Sons&gt;" in text


def test_a_run_that_lost_a_record_says_so_and_shows_both_figures() -> None:
    text = page_of(missing=1)
    assert "Not every record arrived once" in text
    assert "Every record arrived once, unchanged" not in text
    assert '<td class="bad">336775 (not 336,776)</td>' in text


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
    for name in ("Spark ready", "Spark stopped", "started again", "mean of seven days", "100,000"):
        assert page.locator("figure svg:visible text", has_text=name).first.is_visible()
    page.get_by_text("The means of seven days as a table").click()
    assert page.get_by_role("rowheader", name="2013-12-24").is_visible()
    assert complaints == []
    assert asked_for == [report], "and nothing else"
    page.close()


@needs_chromium
@pytest.mark.parametrize(("scheme", "width"), [("dark", 360), ("light", 1100)])
def test_it_is_accessible_and_fits_a_phone_and_a_desk_by_day_and_night(
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
    # Axe does not look at the text of charts.
    for text in page.locator("figure svg:visible text").all()[:40]:
        assert contrast(text) >= 4.5, text.inner_text()
    page.close()


def contrast(text: Any) -> float:
    """Of a text in a chart against the card that it lies on, as WCAG has it."""
    return float(
        text.evaluate(
            """text => {
              const light = css => {
                const [r, g, b] = css.match(/[0-9.]+/g).slice(0, 3).map(Number).map(c => c / 255)
                  .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const card = getComputedStyle(text.closest('section')).backgroundColor;
              const [low, high] = [light(getComputedStyle(text).fill), light(card)].sort(
                (a, b) => a - b);
              return (high + 0.05) / (low + 0.05);
            }"""
        )
    )
