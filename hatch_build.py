"""The README as a package index shows it: relative links lead nowhere there.

They become absolute when ``[project.urls]`` of ``pyproject.toml`` names a ``Repository``. Until it
does they become plain text: a package should not print links that nobody can follow.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["ReadmeHook", "for_index"]

_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n*")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)")


def for_index(readme: str, repository: str | None) -> str:
    """The README with no relative link and no relative image."""
    if repository is None:
        return _LINK.sub(r"\1", _IMAGE.sub("", readme))
    base = repository.rstrip("/")
    readme = _IMAGE.sub(
        lambda image: re.sub(r"\]\(", f"]({base}/raw/HEAD/", image[0], count=1), readme
    )
    return _LINK.sub(lambda link: f"[{link[1]}]({_absolute(base, link[2])})", readme)


def _absolute(base: str, target: str) -> str:
    return f"{base}{target}" if target.startswith("#") else f"{base}/blob/HEAD/{target}"


class ReadmeHook(MetadataHookInterface):
    """Sets the package's description from ``README.md``."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling while it collects the metadata."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": for_index(readme, repository),
        }
