"""Whether every core is busy: a fresh query by several masters, over equal and unequal batches.

Each master runs in a process of its own. What Spark calls ``addBatch`` counts, as in
:mod:`benchmarks.spark_once`: with equal batches beside a source that reads the same files, copies
them once and has a task for each core; with very unequal ones, of as many bytes, beside equal ones.

A master with more cores than the machine has tasks wait for each other: then only the division of
the work is compared, and not the speed of the cores.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ceiling import Ceiling
from benchmarks.queues import queue_all, records_of
from benchmarks.reading import apart
from benchmarks.spark import session
from benchmarks.spark_once import MIB, ceiling_query, our_query, rounds_of, share_row
from benchmarks.table import Row
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.stores.open import open_store
from pyspark_opendata_buffer import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MASTERS = ("local[2]", "local[3]", "local[4]", "local-cluster[2,2,1024]")
SIZE = 1_000  # bytes of a record
EQUAL = (8,) * 36
"""MiB of each batch: 288, which two, three and four tasks can divide into whole batches."""
UNEQUAL = (128, *(1,) * 32, 64, *(1,) * 32, 32)
"""The same bytes: one batch is larger than a task, and most are small."""
EVEN = 1.1


def batch(mebibytes: int) -> bytes:
    """A batch of a little less than so many MiB."""
    records = records_of(SIZE, MIB // (SIZE + 4))
    return encode_batch(records * mebibytes)


def measure(master: str, results: Any) -> None:
    """One process: seconds of each round, and the cores that were seen."""
    assert sum(EQUAL) == sum(UNEQUAL)
    with tempfile.TemporaryDirectory(prefix="buffer-bench-") as folder:
        home = Path(folder)
        spark = session(home, master)
        spark.dataSource.register(Ceiling)
        register(spark)
        cores = spark.sparkContext.defaultParallelism
        ways: dict[str, Callable[[], DataFrame]] = {}
        for name, sizes in (("equal", EQUAL), ("unequal", UNEQUAL)):
            made = {each: batch(each) for each in set(sizes)}
            store = str(home / name)
            queued = queue_all(open_store(store), [made[each] for each in sizes], 0)
            ways[name] = partial(our_query, spark, queued, store)
            if name == "equal":
                rows = sum(sizes) * (MIB // (SIZE + 4))
                options = {"read": f"{store}/{queued.prefix}", "tasks": str(cores)}
                ways["copied"] = partial(ceiling_query, spark, SIZE, rows, **options)
        os.sync()  # or the disk writes what was queued while we measure
        found = rounds_of(ways, home)
        spark.stop()
    results.put(({name: tasks for name, (tasks, _) in found.items()}, cores))


def run() -> Iterator[Row]:
    """Two lines for each master."""
    for master in MASTERS:
        found, cores = apart(measure, master)
        equal, unequal, copied = (found[name] for name in ("equal", "unequal", "copied"))
        what = f"availableNow over {sum(EQUAL)} MiB of {SIZE:,}-byte records, {master}"
        # More tasks than the machine has cores are not slower by our division.
        counts = cores <= (os.cpu_count() or 1)
        name = f"{what}, equal batches / the same files read and copied once"
        yield share_row(name, equal, copied, counts, f", {cores} tasks at once")
        slower = statistics.median(unequal) / statistics.median(equal)
        yield Row(
            f"{what}, batches of 1 to 128 MiB / equal ones",
            f"{slower:.2f} x the time",
            f"<= {EVEN:g} x",
            slower <= EVEN,
            f"{statistics.median(unequal):.2f} against {statistics.median(equal):.2f} s",
        )
