"""Public names of a package, listed once: in the ``__init__.pyi`` beside its ``__init__.py``.

Type checkers read that file anyway. Reading it at run time, too, saves a second list that could
differ from it, and lets a name's module load when the name is first used: importing Arrow takes
0.2 s, which neither ``--help`` nor Spark's search for data sources should pay.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import get_data
from typing import Any

__all__ = ["attach"]


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, by its ``__init__.pyi``.

    Every ``from module import name as name`` of that file makes ``name`` a public name.
    """
    # Through the importer and not the file system: the package may lie in a zip archive.
    stub = get_data(package, "__init__.pyi")
    assert stub is not None, f"{package} has no __init__.pyi"
    home = {
        alias.name: node.module
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }

    def getter(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)  # the next access does not come here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return getter, names, sorted(home)
