"""A browser to look at pages with: Chromium, which has no network but this machine's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium to look at the page with: apt-get install chromium"
)

# It connects only to the page, and leaves nothing behind.
_QUIETLY = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@contextmanager
def chromium(profile: Path, *, offline: bool) -> Iterator[Any]:
    """Start a browser; ``new_page()`` of the result returns a page.

    Args:
        profile: An empty directory for the browser's files.
        offline: Whether it may only open files, and no server of this machine.

    Yields:
        A browser context of Playwright.
    """
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        closing(
            playwright.chromium.launch_persistent_context(
                str(profile),
                executable_path=CHROMIUM,
                args=_QUIETLY,
                headless=True,
                offline=offline,
            )
        ) as context,
    ):
        yield context
