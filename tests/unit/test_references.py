"""Names that docstrings refer to exist: nobody looks in vain for a class that was renamed."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from functools import cache

from tests.unit.test_layers import LIBRARY, MODULES, names_in, text_of

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+?)(?:\(\))?`")


def names_given(*nodes: ast.AST) -> set[str]:
    """Names of functions and classes, and whatever is assigned to, below these statements."""
    found = set()
    for top in nodes:
        for node in ast.walk(top):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
    return found


@cache
def top_names(module: str) -> frozenset[str]:
    body = ast.parse(text_of(module)).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    others = [node for node in body if not isinstance(node, ast.ClassDef)]
    return frozenset(names_given(*others).union(node.name for node in classes))


@cache
def members() -> dict[str, set[str]]:
    """What each class of the library has, and what it has from classes of the library."""
    own: defaultdict[str, set[str]] = defaultdict(set)
    bases: defaultdict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for node in ast.parse(text_of(module)).body:
            if isinstance(node, ast.ClassDef):
                own[node.name] |= names_given(*node.body)
                names = (each for base in node.bases for each in ast.walk(base))
                bases[node.name] |= {each.id for each in names if isinstance(each, ast.Name)}
    found: dict[str, set[str]] = {}

    def all_of(name: str) -> set[str]:
        if name not in found:
            found[name] = own[name].union(*(all_of(each) for each in bases[name] if each in own))
        return found[name]

    return {name: all_of(name) for name in list(own)}


def is_somewhere(dotted: str) -> bool:
    """Whether it ends the full name of something in the library, as a dot in front means."""
    place, _, name = dotted.rpartition(".")
    return (
        any(f".{each}".endswith(f".{dotted}") for each in MODULES)
        or any(
            f".{each}".endswith(f".{place}" if place else "") and name in top_names(each)
            for each in MODULES
        )
        or name in members().get(place.rpartition(".")[2], ())
    )


def is_known(target: str, module: str) -> bool:
    """Whether a role in a docstring of this module leads to something."""
    if target.startswith("."):
        return is_somewhere(target.lstrip("."))
    first, _, rest = target.partition(".")
    if first in (LIBRARY, "buffer_source", "buffer_sink"):
        return is_somewhere(target)
    imported = {name or module for module, name in names_in(text_of(module))}
    if first in imported | top_names(module):
        return not rest or rest in members().get(first, {rest})
    own = set().union(*(members()[each] for each in top_names(module) if each in members()))
    return target in own or hasattr(builtins, first) or first in sys.stdlib_module_names


def test_what_docstrings_refer_to_exists() -> None:
    targets = [
        (module, re.sub(r"\s", "", target))
        for module in MODULES
        for target in ROLE.findall(text_of(module))
    ]
    assert len(targets) > 400
    assert [each for each in targets if not is_known(each[1], each[0])] == []
