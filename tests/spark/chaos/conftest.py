"""A JVM that starts in half the time: its classes are archived once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.chaos.processes import SMALL_JVM, Driver, Job, Stream
from tests.spark.queues import numbered, produce


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Options of the JVMs that are going to be killed.

    ``CHAOS_CLASSES`` names an archive to use again.
    """
    kept = os.environ.get("CHAOS_CLASSES")
    if kept is not None:
        yield SMALL_JVM + shared(Path(kept))
        return
    home = tmp_path_factory.mktemp("archive")
    archive = home / "classes.jsa"
    kinds = ("parquet", "sqlite", "buffer")
    streams = [Stream.make(home, kind, kind, home / "in" / kind) for kind in kinds]
    for stream in streams:
        produce(stream.store, numbered(0, 2))
    driver = Driver(Job(streams, f"{SMALL_JVM} -XX:ArchiveClassesAtExit={archive}"), home / "log")
    try:
        driver.go("drain")
        driver.finish()
        # A JVM that cannot make one, or cannot use it, is only slower.
        yield SMALL_JVM + (shared(archive) if archive.exists() else "")
    finally:
        driver.kill()
        archive.unlink(missing_ok=True)


def shared(archive: Path) -> str:
    return f" -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the queues, checkpoints, outputs and logs of a test are."""
    return tmp_path
