"""Fixtures for the tests that kill drivers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.spark.classes import make
from tests.spark.jvm import CLASSES, SMALL_JVM, java_options, sharing


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the options of the JVMs to kill, which start faster with archived classes."""
    if CLASSES in os.environ:
        yield java_options()
        return
    home = tmp_path_factory.mktemp("archive")
    archive = home / "classes.jsa"
    make(archive, home)
    yield SMALL_JVM + (sharing(archive) if archive.exists() else "")
    archive.unlink(missing_ok=True)
