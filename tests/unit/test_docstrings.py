"""The section ``Raises`` of a docstring names the errors that its function raises itself.

pydoclint checks arguments and results. It cannot check errors: many are made by a function that
returns the error, and most sections also name errors that a called function raises. It passes a
docstring without any section, which is not enough for a function that the site documents.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from inspect import isfunction
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from buffer_sink import foreach_batch_writer
from tests.unit.test_layers import MODULES, ROOT
from tests.unit.test_references import ends_of_paths, follow, imported, tree_of

pytestmark = pytest.mark.checkout

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMMAND = re.compile(r"\b(command|group)\(")
INHERITED = re.compile(r"See (:meth:)?``?[\w.]+``?\.")


class Raiser(NamedTuple):
    """A function, and the docstring that has to name its errors."""

    module: str
    owner: str  # the class around it, such as "Outer.Inner", or ""
    node: Function
    docstring: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.owner}.{self.node.name}".replace("..", ".")


def raisers_in(module: str, node: ast.AST | None = None, owner: str = "") -> Iterator[Raiser]:
    """Yield the public functions and methods, and the constructors of public classes."""
    node = tree_of(module) if node is None else node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from raisers_in(module, child, f"{owner}.{child.name}".strip("."))
        elif isinstance(child, Function):
            described = node if child.name in ("__init__", "__post_init__") else child
            is_private = any(part.startswith("_") for part in owner.split("."))
            if is_private or (described is child and child.name.startswith("_")):
                continue
            docstring = ast.get_docstring(described) or ""  # type: ignore[arg-type]
            # The docstring of a command is its help text; an override has that of its interface.
            decorators = " ".join(map(ast.unparse, child.decorator_list))
            if not COMMAND.search(decorators) and not INHERITED.search(docstring):
                yield Raiser(module, owner, child, docstring)


def raised_by(node: ast.AST, caught: frozenset[str] = frozenset()) -> Iterator[ast.expr]:
    """Yield the expressions that a function raises, except those of functions inside it.

    An error that the function itself catches, by its name, is not one of them.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised = made_by(child.exc)
            if ast.unparse(raised) not in caught:
                yield raised
        elif isinstance(child, ast.Try):
            handled = {ast.unparse(by.type) for by in child.handlers if by.type is not None}
            yield from raised_by(ast.Module(child.body, []), caught | handled)
            for part in (*child.handlers, ast.Module([*child.orelse, *child.finalbody], [])):
                yield from raised_by(part, caught)
        elif not isinstance(child, Function | ast.Lambda):
            yield from raised_by(child, caught)


def made_by(raised: ast.expr) -> ast.expr:
    """Return ``Fenced`` for ``Fenced(...)``, and for ``Fenced(...).at(queue)``."""
    while isinstance(raised, ast.Call):
        raised = raised.func
        if isinstance(raised, ast.Attribute) and isinstance(raised.value, ast.Call):
            raised = raised.value
    return raised


def error_of(raiser: Raiser, raised: ast.expr) -> type[Exception] | None:
    """Return the kind of error that is raised, also if a function makes it.

    An assertion does not count, and neither does a variable, which shows no kind.
    """
    first, _, rest = ast.unparse(raised).partition(".")
    scope: Any = import_module(raiser.module)
    value: Any = getattr(builtins, first, None)
    with suppress(AttributeError):
        if first in ("self", "cls"):
            value = follow(follow(scope, raiser.owner), rest)
        else:
            value = follow(scope, ast.unparse(raised))
    if callable(value) and not isinstance(value, type):
        with suppress(NameError):
            value = typing.get_type_hints(value).get("return")
    is_error = isinstance(value, type) and issubclass(value, Exception)
    return value if is_error and value not in (AssertionError, Exception) else None


def named_in(docstring: str) -> set[str]:
    """Return the names in the section of errors. One entry may name several."""
    section = re.search(r"^Raises:\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    entries = re.findall(r"^    (\w[\w., ]*):", section[1], re.MULTILINE) if section else []
    return {name.strip() for entry in entries for name in entry.split(",")}


def describes(name: str, error: type[Exception]) -> bool:
    """Whether a name in a section is that of an error, of a base of it, or of a part of it.

    A function that makes one of several errors says that it makes their base.
    """
    kinds = kinds_of(name)
    return any(issubclass(error, kind) or issubclass(kind, error) for kind in kinds)


@cache
def kinds_of(name: str) -> list[type[BaseException]]:
    """Return the errors of Python or of this library with a name, or the one with a full path."""
    found = [getattr(builtins, name, None), *ends_of_paths(name)]
    if "." in name:
        found.append(imported(name))
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseException)]


@pytest.mark.parametrize("module", MODULES)
def test_a_docstring_names_the_errors_that_its_function_raises(module: str) -> None:
    unnamed = [
        (raiser.path, error.__name__)
        for raiser in raisers_in(module)
        for raised in raised_by(raiser.node)
        if (error := error_of(raiser, raised)) is not None
        if not any(describes(name, error) for name in named_in(raiser.docstring))
    ]
    assert unnamed == []


@pytest.mark.parametrize("module", MODULES)
def test_the_errors_that_a_docstring_names_exist(module: str) -> None:
    named = {name for raiser in raisers_in(module) for name in named_in(raiser.docstring)}
    assert {name for name in named if not kinds_of(name)} == set()


def test_errors_of_all_kinds_are_found() -> None:
    """An error can be named in the statement, or be made by a function or a method."""
    modules = ("opendata_buffer.queue.queue", "opendata_buffer.queue.not_found")
    found = {
        (raiser.path.removeprefix("opendata_buffer."), error.__name__)
        for module in (*modules, "opendata_buffer.queue.reader_queue", "buffer_sink.committer")
        for raiser in raisers_in(module)
        for raised in raised_by(raiser.node)
        if (error := error_of(raiser, raised)) is not None
    }
    assert ("queue.queue.Queue.check_epoch", "Fenced") in found
    assert ("queue.not_found.require_queue", "InvalidInput") in found
    assert ("queue.reader_queue.ReaderQueue.seek", "DataLoss") in found
    assert ("buffer_sink.committer.UploadAges.oldest", "TransientStorageError") in found


def test_a_section_names_several_errors_in_one_entry() -> None:
    section = "Read it.\n\nRaises:\n    DataLoss, QueueReset: It is gone.\n        As: said.\n"
    assert named_in(section) == {"DataLoss", "QueueReset"}
    assert named_in("Read it: DataLoss.") == set()


def documented_on_the_site() -> Iterator[tuple[str, Any]]:
    """Yield the classes and functions that the reference documents, and what a class has."""
    hidden = re.compile("|".join(re.findall(r'"!(\^.*?)"', (ROOT / "mkdocs.yml").read_text())))
    for page in sorted((ROOT / "docs" / "reference").glob("api-*.md")):
        for path in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE):
            value = imported(path)
            yield path, value
            for name in dir(value) if isinstance(value, type) else ():
                if not hidden.search(name):
                    found = inspect.getattr_static(value, name)
                    yield f"{path}.{name}", getattr(found, "__func__", found)


def lacks_a_section(function: Any) -> bool:
    docstring = inspect.getdoc(function) or ""
    if INHERITED.search(docstring):
        return False
    signature = inspect.signature(inspect.unwrap(function))
    returns = signature.return_annotation not in ("None", None, inspect.Signature.empty)
    says_result = re.search(r"^(Returns|Yields):", docstring, re.MULTILINE)
    has_result = says_result or docstring.startswith(("Return", "Yield"))
    has_arguments = bool(signature.parameters.keys() - {"self", "cls"})
    return (has_arguments and "Args:" not in docstring) or (returns and not has_result)


def test_the_site_describes_the_arguments_and_the_result_of_every_function() -> None:
    functions = {path: value for path, value in documented_on_the_site() if isfunction(value)}
    assert len(functions) > 100
    assert [path for path, function in functions.items() if lacks_a_section(function)] == []


def examples_in(value: Any) -> Iterator[str]:
    """Yield the blocks after a double colon that call something."""
    docstring = "" if isinstance(value, ModuleType) else inspect.getdoc(value) or ""
    for block in re.findall(r"::\n\n((?: {4}.*\n|\n)+)", f"{docstring}\n"):
        if "(" in block:
            yield textwrap.dedent(block)


def test_the_examples_in_docstrings_are_python() -> None:
    things = [*documented_on_the_site(), ("foreach_batch_writer", foreach_batch_writer)]
    examples = [(path, example) for path, value in things for example in examples_in(value)]
    assert len(examples) > 20
    for path, example in examples:
        compile(example, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


MEASURES = re.compile(r"^ {4}(timeout|\w+_(?:s|ms|bytes)): (.*(?:\n {8}.*)*)", re.MULTILINE)
UNIT = re.compile(r"seconds?|bytes?|milliseconds?|MiB|epoch|^As for|^Returns", re.IGNORECASE)


@pytest.mark.parametrize("module", MODULES)
def test_times_and_sizes_have_a_unit(module: str) -> None:
    described = (ast.ClassDef, *typing.get_args(Function))
    docstrings = [
        ast.get_docstring(node) or ""
        for node in ast.walk(tree_of(module))
        if isinstance(node, described)
    ]
    measures = [found for docstring in docstrings for found in MEASURES.findall(docstring)]
    assert [(name, text) for name, text in measures if not UNIT.search(text)] == []
