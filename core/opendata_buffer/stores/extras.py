"""Clouds' own libraries, imported when a store of theirs is opened: nobody else pays for them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from opendata_buffer.errors import InvalidInput

__all__ = ["load"]


def load(module: str, *, scheme: str, extra: str) -> Any:
    """A module of an extra.

    Args:
        module: Its dotted name.
        scheme: Of the URLs that need it, for the message.
        extra: Of this package, that brings it.

    Raises:
        InvalidInput: It, or something it needs, is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"stores of {scheme}:// need {error.name or module}, which is not installed here: "
            f"pip install 'opendata-buffer[{extra}]'. On a cluster the executors need it too."
        ) from error
