"""What the built site consists of, next to its search."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer import ConsumerConfig, ProducerConfig, WorkerConfig
from tests.support.browser import needs_chromium


def test_llms_txt_lists_every_page_of_the_navigation_once(built: Path) -> None:
    text = (built / "llms.txt").read_text("utf-8")
    assert text.startswith("# opendata-buffer for Spark\n\n> ")
    urls = re.findall(r"^- \[.+\]\((.*)\)$", text, re.MULTILINE)
    assert len(urls) == len(set(urls)) > 40
    for url in urls:
        assert (built / url / "index.html").exists(), url


def test_the_api_pages_show_typed_signatures_and_every_setting(built: Path) -> None:
    page = (built / "reference" / "api-producing" / "index.html").read_text("utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert re.search(r"produce\(\s+(records|entries): ", text)


@pytest.mark.parametrize(
    ("page", "config"),
    [("producing", ProducerConfig), ("consuming", ConsumerConfig), ("workers", WorkerConfig)],
)
def test_the_page_of_a_class_names_every_setting(built: Path, page: str, config: Any) -> None:
    text = (built / "reference" / f"api-{page}" / "index.html").read_text("utf-8")
    for setting in fields(config):
        if setting.name != "store":
            assert f">{setting.name}<" in text, setting.name


@needs_chromium
def test_the_picture_keeps_its_white_ground_in_dark_mode(browser: Any, site: str) -> None:
    page = browser.new_page()
    page.goto(site)
    page.evaluate("document.body.setAttribute('data-md-color-scheme', 'slate')")
    picture = page.locator(".md-typeset img[src$='data-flow.svg']")
    picture.wait_for()
    assert picture.evaluate("image => getComputedStyle(image).filter") == "none"
    assert picture.evaluate("image => image.naturalWidth") > 0
    page.close()
