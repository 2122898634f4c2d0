"""A real browser, where there is one: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WHY_NOT = "no Chromium to look at the page with: apt-get install chromium"

# It speaks to nobody but the page, and leaves nothing behind.
QUIETLY = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def pages(profile: Path) -> Iterator[Any]:
    """A context of a new browser, without a network; ``new_page()`` gives a page.

    Args:
        profile: An empty directory for what it keeps.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=CHROMIUM,
            args=list(QUIETLY),
            headless=True,
            offline=True,
        )
        try:
            yield context
        finally:
            context.close()
