"""Build the site of this release next to those of earlier releases.

::

    python -m tools.sites public    # public/VERSION/, public/versions.json, public/index.html

Publish the folder as it is; it needs no service. Run the command in a checkout of each release,
with the folder that has the earlier ones: they stay as they are. Each page has a menu of all
versions, which Material reads from ``versions.json`` (the format of mike), and the root leads to
the newest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_ROOT_PAGE = """\
<!doctype html>
<meta charset="utf-8">
<title>opendata-buffer for Spark</title>
<meta http-equiv="refresh" content="0; url={version}/">
<a href="{version}/">opendata-buffer {version}</a>
"""


def number_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, by which releases are ordered.

    Args:
        version: Such as ``0.10.1``.

    Returns:
        Such as ``(0, 10, 1)``.
    """
    return tuple(int(number) for number in re.findall(r"\d+", version))


def listed(folders: list[str]) -> list[dict[str, Any]]:
    """Return the content of ``versions.json``, the newest version first.

    Args:
        folders: Names of folders, of which those of releases count.

    Returns:
        A version, its title and its aliases, for each release.
    """
    releases = [name for name in folders if re.fullmatch(r"\d+(\.\d+)+", name)]
    releases.sort(key=number_of, reverse=True)
    return [
        {"version": name, "title": name, "aliases": ["latest"] if name == releases[0] else []}
        for name in releases
    ]


def publish(out: Path) -> str:
    """Build the site of this release below a folder, and list all versions there.

    Args:
        out: The folder, with the sites of earlier releases or without any.

    Returns:
        The version of this release.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    version: str = project["version"]
    subprocess.run(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"),
            *("--site-dir", str((out / version).resolve())),
        ],
        cwd=ROOT,
        env={**os.environ, "DOCS_VERSIONS": "mike", "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    found = listed([path.name for path in out.iterdir() if path.is_dir()])
    (out / "versions.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    (out / "index.html").write_text(_ROOT_PAGE.format(version=found[0]["version"]), "utf-8")
    return version


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.sites FOLDER")
    print(publish(Path(sys.argv[1])))
