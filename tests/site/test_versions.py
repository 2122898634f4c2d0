"""The sites of several releases, next to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.site.conftest import served
from tests.support.browser import needs_chromium
from tools.sites import listed, publish


def test_versions_are_ordered_by_their_numbers_and_the_newest_is_the_latest() -> None:
    found = listed(["0.9.0", "0.10.0", "assets", "0.2"])
    assert [each["version"] for each in found] == ["0.10.0", "0.9.0", "0.2"]
    assert [each["aliases"] for each in found] == [["latest"], [], []]


@needs_chromium
def test_a_release_is_added_and_every_page_has_a_menu_of_versions(
    browser: Any, tmp_path: Path
) -> None:
    earlier = tmp_path / "0.0.1" / "index.html"
    earlier.parent.mkdir()
    earlier.write_text("an earlier release")
    version = publish(tmp_path)
    assert earlier.read_text() == "an earlier release"
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert [each["version"] for each in versions] == [version, "0.0.1"]
    with served(tmp_path) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_url(f"{url}{version}/")
        menu = page.locator(".md-version__list .md-version__link")
        menu.first.wait_for(state="attached")
        assert [link.inner_text() or link.text_content() for link in menu.all()] == [
            version,
            "0.0.1",
        ]
        page.close()
