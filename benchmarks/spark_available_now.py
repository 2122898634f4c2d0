"""How fast is a fresh query that reads everything and ends (``availableNow``)?

Its first micro-batch counts, unlike in :mod:`benchmarks.spark_source`. Two sources that decode
nothing run next to it, in turns: one hands over a prebuilt Arrow batch, the other also reads the
same files and copies their bytes once (:mod:`benchmarks.ceiling`). There are two times for each:
``addBatch``, in which Spark runs the tasks, and the whole run with its start.

:func:`core_rows` asks whether every core is busy. It runs such a query under several masters, each
in a process of its own, over batches of equal and of very unequal sizes. If a master has more
cores than the machine, its tasks wait for each other. Then the figures compare how the work is
divided, and not how fast the cores are.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ceiling import Ceiling
from benchmarks.commands import start_rows as process_start_rows
from benchmarks.measuring import MIB, apart, in_random_turns, sized
from benchmarks.queries import Drained, drained, session, started
from benchmarks.stores import Queued, fill, queue_all, records_of
from benchmarks.tables import Row
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.stores.open import open_store
from pyspark_opendata_buffer import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OBJECT_BYTES = sized(8 * MIB, tiny=MIB // 64)
OBJECTS = sized(40, tiny=2)  # 320 MiB
SIZES = sized((100, 1_000), tiny=(100,))  # bytes of a record
WARM_UP = sized(1, tiny=0)  # rounds that do not count
ROUNDS = sized(11, tiny=2)
SHARE = 0.92
"""Goal: the least share of the yardstick's speed."""

START_S = 0.08
START_ROUNDS = sized(33, tiny=2)
"""More rounds, because the time of one such query differs from the next by 0.2 s."""

MASTERS = sized(("local[2]", "local[3]", "local[4]", "local-cluster[2,2,1024]"), tiny=("local[2]",))
CORES_SIZE = 1_000  # bytes of a record
EQUAL = sized((8,) * 36, tiny=(1,) * 4)
"""MiB of each batch: 288 in total, which two, three and four tasks can share in whole batches."""

UNEQUAL = sized((128, *(1,) * 32, 64, *(1,) * 32, 32), tiny=(2, 1, 1))
"""The same total. One batch is larger than a task, and most are small."""

EVEN = 1.1
"""Goal: the most time with unequal batches, compared with equal ones."""


@dataclass(frozen=True)
class Rounds:
    """The times of one way to read, one per round.

    Attributes:
        add_batch_s: Seconds in which Spark ran the tasks.
        whole_s: Seconds of the whole query.
    """

    add_batch_s: Sequence[float]
    whole_s: Sequence[float]


def once_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Measure queries over 320 MiB of small and of large records."""
    spark.dataSource.register(Ceiling)
    for size in SIZES:
        records = records_of(size, OBJECT_BYTES // (size + 4))
        found = _rounds_beside_yardsticks(spark, home / f"once-{size}", records, OBJECTS, ROUNDS)
        ours, prebuilt, copied = (found[name] for name in ("ours", "prebuilt", "copied"))
        name = f"availableNow over 320 MiB of {size:,}-byte records"
        read, again = (
            "the same files read and copied once",
            "one prebuilt Arrow batch again and again",
        )
        tasks, whole = f"{name}, addBatch /", f"{name}, the whole run /"
        yield share_row(f"{tasks} {read}", ours.add_batch_s, copied.add_batch_s, has_goal=True)
        yield share_row(f"{tasks} {again}", ours.add_batch_s, prebuilt.add_batch_s)
        yield share_row(f"{whole} {read}", ours.whole_s, copied.whole_s)
        yield share_row(f"{whole} {again}", ours.whole_s, prebuilt.whole_s)


def start_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Measure imports, a command, and the start of a query."""
    yield from process_start_rows()
    yield query_start_row(spark, home)


def query_start_row(spark: SparkSession, home: Path) -> Row:
    """Compare a query over one record with one over a Python source that hands over one row.

    The difference is the time that our source adds to the start of any Python source.
    """
    spark.dataSource.register(Ceiling)
    place = home / "once-one"
    found = _rounds_beside_yardsticks(spark, place, [b"x" * 100], 1, START_ROUNDS)
    ours, base = found["ours"].whole_s, found["prebuilt"].whole_s
    differences = [mine - other for mine, other in zip(ours, base, strict=True)]
    low, more, high = statistics.quantiles(differences)
    return Row(
        "start of a query / of one over a Python source with one row",
        f"{more:+.3f} s",
        f"<= +{START_S:g} s",
        more <= START_S,
        f"{statistics.median(ours):.2f} against {statistics.median(base):.2f} s, availableNow; the "
        f"middle half of {START_ROUNDS} rounds {low:+.2f} to {high:+.2f} s",
    )


def share_row(
    name: str,
    ours_s: Sequence[float],
    base_s: Sequence[float],
    *,
    has_goal: bool = False,
    detail: str = "",
) -> Row:
    """Make a row with the share of a yardstick's speed.

    Args:
        name: Name of the row.
        ours_s: Our seconds, one per round.
        base_s: Seconds of the yardstick.
        has_goal: Whether the goal :data:`SHARE` applies.
        detail: More details.

    Returns:
        The row.
    """
    ours, base = statistics.median(ours_s), statistics.median(base_s)
    shares = [other / mine for other, mine in zip(base_s, ours_s, strict=True)]
    low, _, high = statistics.quantiles(shares)
    return Row(
        name,
        f"{base / ours:.0%}",
        f">= {SHARE:.0%}" if has_goal else "",
        base / ours >= SHARE if has_goal else None,
        f"{ours:.2f} against {base:.2f} s, medians of {len(ours_s)}; the middle half of the rounds "
        f"{low:.0%} to {high:.0%}{detail}",
    )


def _rounds_beside_yardsticks(
    spark: SparkSession, home: Path, records: list[bytes], objects: int, rounds: int
) -> dict[str, Rounds]:
    """Measure our source and both yardsticks over the same records."""
    store = str(home / "store")
    queued = fill(open_store(store), records, objects)
    os.sync()  # so that the disk does not write the queue during the measurement
    size, count = len(records[0]), len(records) * objects
    ways: dict[str, Callable[[], DataFrame]] = {
        "ours": partial(_our_stream, spark, queued, store),
        "prebuilt": partial(_ceiling_stream, spark, size, count),
        "copied": partial(_ceiling_stream, spark, size, count, read=f"{store}/{queued.prefix}"),
    }
    found = _rounds_of(ways, home, rounds)
    shutil.rmtree(home)
    return found


def _rounds_of(
    ways: Mapping[str, Callable[[], DataFrame]], home: Path, rounds: int
) -> dict[str, Rounds]:
    def measure(name: str, turn: int) -> Drained:
        def query(attempt: int) -> Drained:
            return drained(ways[name](), home / f"checkpoint-{turn}-{name}-{attempt}")

        return started(query)

    measures = {name: partial(measure, name) for name in ways}
    return {
        name: Rounds(
            [query.add_batch_s for query in queries],
            [query.seconds for query in queries],
        )
        for name, queries in in_random_turns(measures, rounds, WARM_UP).items()
    }


def _our_stream(spark: SparkSession, queued: Queued, store: str) -> DataFrame:
    queued.rewind()
    return spark.readStream.format("opendata-buffer").option("gcEnabled", "false").load(store)


def _ceiling_stream(spark: SparkSession, size: int, count: int, **options: str) -> DataFrame:
    reader = spark.readStream.format("ceiling").option("size", size).options(**options)
    return reader.option("rows", count).option("batches", 1).load()


# ---- cores


def core_rows() -> Iterator[Row]:
    """Give two rows for each master."""
    for master in MASTERS:
        found, cores = apart(measure_master, master)
        equal, unequal, copied = (found[name] for name in ("equal", "unequal", "copied"))
        what = f"availableNow over {sum(EQUAL)} MiB of {CORES_SIZE:,}-byte records, {master}"
        yield share_row(
            f"{what}, equal batches / the same files read and copied once",
            equal,
            copied,
            # Tasks that share a core are slower for a reason that is not ours.
            has_goal=cores <= (os.cpu_count() or 1),
            detail=f", {cores} tasks at once",
        )
        slower = statistics.median(unequal) / statistics.median(equal)
        yield Row(
            f"{what}, batches of 1 to 128 MiB / equal ones",
            f"{slower:.2f} x the time",
            f"<= {EVEN:g} x",
            slower <= EVEN,
            f"{statistics.median(unequal):.2f} against {statistics.median(equal):.2f} s",
        )


def measure_master(master: str, results: Any) -> None:
    """Measure one master, in a process of its own.

    Args:
        master: Spark's master.
        results: Gets the seconds of ``addBatch`` of each round by name, and the number of cores.
    """
    assert sum(EQUAL) == sum(UNEQUAL)
    with tempfile.TemporaryDirectory(prefix="buffer-bench-") as folder:
        home = Path(folder)
        spark = session(home, master)
        spark.dataSource.register(Ceiling)
        register(spark)
        cores = spark.sparkContext.defaultParallelism
        ways: dict[str, Callable[[], DataFrame]] = {}
        for name, sizes in (("equal", EQUAL), ("unequal", UNEQUAL)):
            objects = {size: _batch(size) for size in set(sizes)}
            store = str(home / name)
            queued = queue_all(open_store(store), [objects[size] for size in sizes], 0)
            ways[name] = partial(_our_stream, spark, queued, store)
            if name == "equal":
                count = sum(sizes) * (MIB // (CORES_SIZE + 4))
                options = {"read": f"{store}/{queued.prefix}", "tasks": str(cores)}
                ways["copied"] = partial(_ceiling_stream, spark, CORES_SIZE, count, **options)
        os.sync()  # so that the disk does not write the queues during the measurement
        found = _rounds_of(ways, home, ROUNDS)
        spark.stop()
    results.put(({name: rounds.add_batch_s for name, rounds in found.items()}, cores))


def _batch(mebibytes: int) -> bytes:
    """Return a batch of a little less than this size."""
    records = records_of(CORES_SIZE, MIB // (CORES_SIZE + 4))
    return encode_batch(records * mebibytes)
