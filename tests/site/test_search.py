"""The site's search, in a browser: the words of a user find the page that answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import needs_chromium

LOGS = "how-to/readers-and-retention/"
GUARANTEES = "explanation/guarantees/"
FAQ = "explanation/faq/"
RUNBOOK = "operations/runbook/"
TUTORIAL = "tutorial/first-queue/"
KAFKA = "how-to/coming-from-kafka/"

WANTED = {
    "replay": LOGS,
    "replay last 3 hours": LOGS,
    "ordering": GUARANTEES,
    "throughput": "explanation/throughput/",
    "exactly once": GUARANTEES,
    "data loss": GUARANTEES,
    "dead letter": RUNBOOK,
    "DLQ": RUNBOOK,
    "install": TUTORIAL,
    "pip install": TUTORIAL,
    "max record size": "operations/production/",
    "offset": "reference/options/",
    "KMS": "operations/permissions/",
    "FAQ": FAQ,
    "troubleshoot": "reference/errors/",
    "was fenced by epoch": "reference/errors/",
    "debug": "how-to/debug-a-query/",
    "quickstart": TUTORIAL,
    "Kinesis": FAQ,
    "Auto Loader": FAQ,
    "retention": LOGS,
    "consumer group": KAFKA,
    "purge": RUNBOOK,
    "peek": FAQ,
    "lag": "operations/watch/",
    "alert on lag": "operations/watch/",
    "cost": "explanation/costs/",
    "kafka": KAFKA,
    "permissions": "operations/permissions/",
}


OTHERS = {"offset": KAFKA, "install": "", "pip install": ""}
"""Pages that answer as well. The home page has the empty path."""


@pytest.fixture(scope="module")
def page(browser: Any, site: str) -> Iterator[Any]:
    page = browser.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.set_default_timeout(20_000)
    yield page
    page.close()


def hits(page: Any, site: str, query: str) -> list[str]:
    """Return the paths of the first three pages that the search box lists for a query."""
    page.goto(f"{site}?q={query}")
    page.locator(".md-search-result__meta", has_text="matching document").wait_for()
    items = page.locator(".md-search-result__item")
    links = [items.nth(n).locator("a").first for n in range(min(items.count(), 3))]
    found = [link.get_attribute("href") for link in links]
    return [href.removeprefix(site).split("?")[0].split("#")[0] for href in found]


@needs_chromium
@pytest.mark.parametrize("query", WANTED)
def test_the_words_of_a_user_find_the_page_among_the_first_three(
    page: Any, site: str, query: str
) -> None:
    assert {WANTED[query], OTHERS.get(query, WANTED[query])} & set(hits(page, site, query))


@needs_chromium
def test_decisions_failures_and_the_proposals_come_last(page: Any, site: str) -> None:
    for query in ("retention", "transaction", "manifest", "exactly once", "data loss"):
        for path in hits(page, site, query):
            assert "decisions" not in path, query
            assert "failures" not in path, query
            assert "arrow-size-check" not in path, query
            assert "pyspark-zip" not in path, query
