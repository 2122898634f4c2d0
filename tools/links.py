"""Open every link to another site that a page or a file of metadata has: ``python -m tools.links``.

Links inside the repository are checked without a network, by ``mkdocs build --strict`` and
``tests/unit/test_docs.py``. This needs a network, so only the nightly workflow runs it. A site that
refuses programs (401, 403, 429) or has a fault of its own (5xx) proves nothing: such links are
listed, and only missing pages and hosts fail.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".md", ".toml", ".cff", ".yml", ".yaml")
SECONDS = 20.0
AT_ONCE = 8
ATTEMPTS = 2
UNDECIDED = {401, 403, 405, 408, 429}
"""HTTP statuses by which a site refuses a program; the page may be there."""
_LINK = re.compile(r"https?://[^\s<>\"'`|\\]+")
_EXAMPLE = re.compile(
    # A host without a dot, with a port, or of an example; and a template.
    r"https?://(\[|[\w-]+(/|$)|[^/]*:\d|[^/]*[{$…*]|[^/]*\b(example|internal|local)\b)"
)


@dataclass(frozen=True)
class Found:
    """What a link led to.

    Attributes:
        dead: Whether the page is missing.
        why: The status or the error; empty if the page was opened.
    """

    dead: bool
    why: str


def links_in(text: str) -> list[str]:
    """Return the links of a text to other sites, in order, without those of examples."""
    found = []
    for link in _LINK.findall(text):
        link = link.partition("#")[0].rstrip(".,;:!?*")
        while link.endswith(")") and link.count(")") > link.count("("):
            link = link[:-1].rstrip(".,;:!?*")
        if not _EXAMPLE.match(link):
            found.append(link)
    return list(dict.fromkeys(found))


def links_of(root: Path) -> dict[str, list[str]]:
    """Return the files that each link is in, for all links of the tracked files."""
    out = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True)
    found: dict[str, list[str]] = {}
    for path in out.stdout.decode().split("\0"):
        if path.endswith(SUFFIXES):
            for link in links_in((root / path).read_text("utf-8")):
                found.setdefault(link, []).append(path)
    return found


def open_link(link: str) -> Found:
    """Open a link, and return what it led to."""
    request = Request(link, headers={"User-Agent": "Mozilla/5.0 (link check)", "Accept": "*/*"})
    found = Found(dead=True, why="not tried")
    for _ in range(ATTEMPTS):
        try:
            with urlopen(request, timeout=SECONDS):
                return Found(dead=False, why="")
        except HTTPError as error:
            undecided = error.code in UNDECIDED or error.code >= 500
            found = Found(dead=not undecided, why=f"{error.code} {error.reason}")
        except TimeoutError:
            found = Found(dead=False, why=f"no answer in {SECONDS:.0f} s")
        except (OSError, HTTPException, ValueError) as error:
            found = Found(dead=True, why=str(error))
    return found


def report(links: Mapping[str, Sequence[str]], opened: Callable[[str], Found] = open_link) -> int:
    """Open links, and print those that did not lead to a page.

    Args:
        links: The files that each link is in.
        opened: Opens one link.

    Returns:
        The number of dead links.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = dict(zip(links, pool.map(opened, links), strict=True))
    for link, found in results.items():
        if found.why:
            kind = "dead" if found.dead else "undecided"
            print(f"{kind}: {link} in {', '.join(links[link])}: {found.why}")
    dead = sum(found.dead for found in results.values())
    print(f"{len(results)} links to other sites, {dead} dead")
    return dead


if __name__ == "__main__":
    if len(sys.argv) != 1:
        sys.exit("usage: python -m tools.links")
    sys.exit(1 if report(links_of(ROOT)) else 0)
