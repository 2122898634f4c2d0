"""Names that docstrings refer to exist: a class that is renamed is renamed there, too."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from functools import cache

from tests.unit.test_layers import MODULES, names_in, text_of

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+?)(?:\(\))?`")


@cache
def names_of(module: str) -> frozenset[str]:
    """Functions, classes and whatever is assigned to, in a module and in its classes."""
    found = set(module.split("."))
    for node in ast.walk(ast.parse(text_of(module))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return frozenset(found)


def is_known(target: str, module: str) -> bool:
    """Whether a role in a docstring of this module leads to something."""
    first = target.partition(".")[0]
    if first in sys.stdlib_module_names or hasattr(builtins, first or "?"):
        return True
    imported = {name or imported for imported, name in names_in(text_of(module))}
    # A name without a dot in front is one of the module, or imported there.
    if first and first not in imported | names_of(module) | {"opendata_buffer"}:
        return False
    # A member stands in a module that has the name before it, too.
    parts = set(target.strip(".").split("."))
    return any(parts <= names_of(each) for each in MODULES)


def test_what_docstrings_refer_to_exists() -> None:
    targets = [
        (module, re.sub(r"\s", "", target))
        for module in MODULES
        for target in ROLE.findall(text_of(module))
    ]
    assert len(targets) > 200
    assert [each for each in targets if not is_known(each[1], each[0])] == []
    assert not is_known(".Queue.appended", "opendata_buffer.queue.queue")
    assert not is_known("Producer", "opendata_buffer.queue.queue")
