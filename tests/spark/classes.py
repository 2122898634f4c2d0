"""Archive the classes that Spark loads. A JVM that maps the archive starts in half the time.

``python -m tests.spark.classes FILE`` is needed once for each Java and Spark. ``./run test`` runs
it during its setup.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path

from tests.spark.chaos.processes import Drivers, Job, Stream
from tests.spark.jvm import SMALL_JVM, prepare
from tests.spark.queues import numbered, produce

KINDS = ("parquet", "sqlite", "buffer")


def make(archive: Path, home: Path) -> None:
    """Run queries of each kind in a JVM that archives its loaded classes when it ends.

    A JVM without this feature makes no archive.
    """
    streams = [Stream.make(home, kind, kind, home / "in" / kind) for kind in KINDS]
    for stream in streams:
        produce(stream.store, numbered(0, 2))
    unfinished = archive.with_suffix(".new")
    job = Job(streams, f"{SMALL_JVM} -XX:ArchiveClassesAtExit={unfinished}")
    with closing(Drivers(job, home, ahead=False)) as drivers:
        drivers.go("drain").finish()
    if unfinished.exists():
        unfinished.replace(archive)


if __name__ == "__main__":
    prepare()
    with tempfile.TemporaryDirectory() as directory:
        make(Path(sys.argv[1]), Path(directory))
