"""Docstrings are written in reStructuredText's inline markup; the site is Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?(?:[\w.]*\.)?(\w+)`")


class Markdown(griffe.Extension):
    """Roles become code, and the double colon before a block of code a single one or none."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that is read."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = re.sub(r"^::$\n?", "", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
