"""Names in docstrings exist, so that renaming a class includes its docstrings.

A role such as ``:meth:`Queue.append``` is resolved by Sphinx's rules. A name without a dot in
front is a member of the class around the docstring, or a name of its module, or a full path that
can be imported. A name with a dot in front is the end of the full path of something that one of our
modules defines. Each reference is resolved by importing the module and reading the attributes.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.unit.test_layers import MODULES, text_of

pytestmark = pytest.mark.checkout

ROLE = re.compile(r":(class|func|meth|mod|attr|data|exc):`~?([^`]+?)(?:\(\))?`")


class Reference(NamedTuple):
    """A role in a docstring or comment."""

    module: str
    line: int
    owner: str  # the class around it, such as "Outer.Inner", or ""
    role: str
    target: str


class Attribute(NamedTuple):
    """An attribute that only the instances of a class have."""

    owner: type
    name: str


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(text_of(module))


def classes_in(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class with its qualified name, and an outer class before its inner ones."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, child
            yield from classes_in(child, f"{prefix}{child.name}.")


def references_in(module: str) -> Iterator[Reference]:
    text = text_of(module)
    classes = list(classes_in(tree_of(module)))
    for found in ROLE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        around = [name for name, node in classes if node.lineno <= line <= (node.end_lineno or 0)]
        target = re.sub(r"\s", "", found[2])
        yield Reference(module, line, around[-1] if around else "", found[1], target)


@cache
def fields_of(owner: type) -> frozenset[str]:
    """Return the names that the class annotates, or that its methods assign to ``self``."""
    names = set(inspect.get_annotations(owner))
    if owner.__module__ in MODULES:
        node = dict(classes_in(tree_of(owner.__module__)))[owner.__qualname__]
        for part in ast.walk(node):
            match part:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return frozenset(names)


@cache
def imports_of(module: str) -> dict[str, tuple[str, str]]:
    """Return the module and name of each import, also of those that only a type checker makes."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }


def member(value: Any, name: str) -> Any:
    """Return an attribute of a module or a class, or raise ``AttributeError``."""
    if hasattr(value, name):
        return getattr(value, name)
    if isinstance(value, type) and any(name in fields_of(base) for base in value.__mro__):
        return Attribute(value, name)
    if isinstance(value, ModuleType):
        path = f"{value.__name__}.{name}"
        if path in MODULES:
            return import_module(path)
        if value.__name__ in MODULES and name in imports_of(value.__name__):
            module, original = imports_of(value.__name__)[name]
            return member(import_module(module), original)
    raise AttributeError(f"{value!r} has no {name}")


def follow(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = member(value, name)
    return value


def assigned_by(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.Assign(targets=targets):
            return targets
        case ast.AnnAssign(target=target):
            return [target]
    return []


def defined_in(module: str, name: str) -> bool:
    """Whether a module itself defines the name, and does not only import it."""
    return any(
        getattr(node, "name", None) == name or (isinstance(node, ast.Name) and node.id == name)
        for statement in tree_of(module).body
        for node in (statement, *assigned_by(statement))
    )


def ends_of_paths(target: str) -> Iterator[Any]:
    """Yield all things of our modules whose full path ends with the target."""
    parts = target.split(".")
    for module in MODULES:
        for count in range(len(parts) + 1):
            if not f".{module}".endswith("".join(f".{part}" for part in parts[:count])):
                continue
            rest = parts[count:]
            if not rest:
                yield import_module(module)
            elif defined_in(module, rest[0]):
                with suppress(AttributeError):
                    yield follow(import_module(module), ".".join(rest))


def imported(path: str) -> Any:
    """Import the longest part of the path that is a module, and follow the rest."""
    names = path.split(".")
    for count in range(len(names), 0, -1):
        try:
            value = import_module(".".join(names[:count]))
        except ImportError:
            continue
        return follow(value, ".".join(names[count:])) if names[count:] else value
    raise AttributeError(f"no module {path}")


def resolve(reference: Reference) -> Any:
    """Return the target of the reference; None if there is none, or more than one."""
    target, module = reference.target, import_module(reference.module)
    if target.startswith("."):
        found = list(ends_of_paths(target[1:]))
        # A public class has the name of the class that it derives from.
        bases = [one for one in found if all(is_same_or_derived(other, one) for other in found)]
        return bases[0] if bases else None
    scopes: list[Any] = [module, builtins]
    if reference.owner:
        scopes.insert(0, follow(module, reference.owner))
    for scope in scopes:
        with suppress(AttributeError):
            return follow(scope, target)
    with suppress(AttributeError):
        return imported(target)
    return None


def is_same_or_derived(one: Any, base: Any) -> bool:
    return one is base or (
        isinstance(one, type) and isinstance(base, type) and issubclass(one, base)
    )


def fits(role: str, value: Any) -> bool:
    """Whether the role is the one for this kind of thing."""
    match role:
        case "mod":
            return isinstance(value, ModuleType)
        case "class":
            return isinstance(value, type)
        case "exc":
            return isinstance(value, type) and issubclass(value, BaseException)
        case "func" | "meth":
            is_member = "." in getattr(value, "__qualname__", "")
            return inspect.isroutine(value) and is_member == (role == "meth")
    return not isinstance(value, ModuleType | type)


def leads_somewhere(reference: Reference) -> bool:
    value = resolve(reference)
    return value is not None and fits(reference.role, value)


def in_queue(role: str, target: str, owner: str = "") -> Reference:
    return Reference("opendata_buffer.queue.queue", 1, owner, role, target)


@pytest.mark.parametrize(
    "reference",
    [
        in_queue("meth", "append", "Queue"),
        in_queue("attr", "labels", "Queue"),  # only in __init__
        Reference("opendata_buffer.assembly", 1, "", "class", "Store"),  # imported for types only
        in_queue("meth", ".Get.get"),
        in_queue("meth", ".base.Get.get"),
        in_queue("meth", "opendata_buffer.stores.base.Get.get"),
        in_queue("class", ".Consumer"),  # the public class derives from the other one
        in_queue("exc", "concurrent.futures.CancelledError"),
    ],
)
def test_a_reference_to_an_existing_name_is_accepted(reference: Reference) -> None:
    assert leads_somewhere(reference)


@pytest.mark.parametrize(
    "reference",
    [
        in_queue("meth", "opendata_buffer.stores.Get.get"),  # it is in stores.base
        in_queue("meth", ".stores.Get.get"),
        in_queue("meth", ".Queue.appended"),
        in_queue("meth", "append"),  # without its class
        in_queue("class", "Producer"),  # not imported there
        in_queue("func", ".page_of"),  # two modules have one
        in_queue("func", ".Queue.append"),  # it is a method
    ],
)
def test_a_reference_to_a_missing_name_is_rejected(reference: Reference) -> None:
    assert not leads_somewhere(reference)


@pytest.mark.parametrize("module", MODULES)
def test_references_in_docstrings_exist(module: str) -> None:
    wrong = [reference for reference in references_in(module) if not leads_somewhere(reference)]
    assert wrong == []


def test_docstrings_refer_to_many_names() -> None:
    assert sum(1 for module in MODULES for _ in references_in(module)) > 400
