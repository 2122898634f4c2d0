"""Let a package load the modules of its public names when the names are first used.

Importing Arrow takes 0.2 s, which neither ``--help`` nor Spark's search for data sources should
pay. A package lists its names by module, and defines the two functions that Python asks::

    _MODULES = lazy_names.modules_of({"config": ["ProducerConfig", "ConsumerConfig"]})


    def __getattr__(name: str) -> Any:
        return lazy_names.load(globals(), _MODULES, name, "OF_PACKAGE")


    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any


def modules_of(names: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the module of each name, from the names of each module."""
    return {name: module for module, found in names.items() for name in found}


def load(package: dict[str, Any], modules: Mapping[str, str], name: str, instead: str) -> Any:
    """Return a name of a package, and keep it there, so that the next access finds it.

    Args:
        package: The globals of the package.
        modules: The module below the package that has each of its names.
        name: The name that was asked for.
        instead: The table in ``familiar_names`` that says what to use in place of another name.

    Returns:
        The value.

    Raises:
        AttributeError: The package has no such name.
    """
    full_name = package["__name__"]
    if name not in modules:
        text = f"module {full_name!r} has no attribute {name!r}"
        if not name.startswith("_"):
            # Imported only for a wrong name, and by its full name: "from opendata_buffer import"
            # would ask the root package for a name, and so call this function again.
            tables = import_module("opendata_buffer.familiar_names")
            if (advice := getattr(tables, instead).get(name)) is not None:
                text += f": {advice}"
        raise AttributeError(text, name=name)
    package[name] = value = getattr(import_module(f"{full_name}.{modules[name]}"), name)
    return value
