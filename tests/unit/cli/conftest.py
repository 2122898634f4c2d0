"""Fixtures with a store in memory for each test, as an object and as a URL."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.conftest import patient

__all__ = ["log_handlers", "name", "patient", "store", "url"]

_names = itertools.count()


@pytest.fixture
def name() -> str:
    return f"cli-{next(_names)}"


@pytest.fixture
def url(name: str) -> str:
    return f"memory://{name}"


@pytest.fixture
def store(name: str) -> MemoryStore:
    return MemoryStore.named(name)


@pytest.fixture(autouse=True)
def log_handlers() -> Iterator[None]:
    root, library = logging.getLogger(), logging.getLogger("opendata_buffer")
    handlers, level = list(root.handlers), library.level
    yield
    root.handlers[:] = handlers
    library.setLevel(level)
