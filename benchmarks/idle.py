"""What does it cost to start, to wait, and to move a little, and how soon is a record found?

The rows are simulated: the product's own code runs on virtual time, on a bucket that takes 100 ms
for a write or a listing, and 60 ms for a read. So they are the same on every machine, and an hour
takes seconds. The prices are those of :mod:`benchmarks.costs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles

from benchmarks.costs import S3, SECONDS_A_MONTH
from benchmarks.measuring import sized
from benchmarks.tables import Row
from tests.support.bucket import SimulatedBucket, SimulatedQuery, Spent, load

HOUR_S = sized(3600.0, tiny=60.0)
RECORDS = sized(200, tiny=3)
LOAD_S = sized(300.0, tiny=2.0)
PARTITIONS = 16

START_GOALS = {"producer": (8, 0.8), "consumer": (10, 0.8)}
"""Most requests and seconds until the first record."""

IDLE_GOALS = {0: 2_000, PARTITIONS: 4_000}
"""Most requests of an idle hour, by the number of partitions; 0 for a queue."""

FOUND_GOAL_S = 2.0

LOADS = ((1, 1, 100), (1, 1, 1_000), (100, 10, 100), (100, 10, 1_000))
"""MB/s, number of producers, and ``flush_interval_ms``."""

OPERATIONS = {
    "get": "GetObject",
    "put": "PutObject",
    "put_if": "PutObject",
    "list": "ListObjectsV2",
    "delete_many": "DeleteObjects",
}


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    yield from start_rows()
    yield available_now_row()
    for partitions in (0, PARTITIONS):
        yield idle_row(partitions, "query")
        yield idle_row(partitions, "consumer")
        yield found_row(partitions)
    for mb_per_s, producers, flush_interval_ms in LOADS:
        yield load_row(mb_per_s, producers, flush_interval_ms)


def start_rows() -> Iterator[Row]:
    """Start a producer and a consumer of an existing queue."""
    bucket = SimulatedBucket()
    found: dict[str, Spent] = {}

    def main() -> None:
        bucket.produce()
        found["producer"] = bucket.produce()[1]
        found["consumer"] = bucket.consume()[1]

    bucket.run(main)
    for name, spent in found.items():
        requests, seconds = START_GOALS[name]
        yield Row(
            f"a new {name} process on an existing queue, until its first record",
            f"{spent.total} requests, {spent.seconds:.2f} s",
            f"<= {requests}, <= {seconds} s",
            spent.total <= requests and spent.seconds <= seconds,
            _listed(spent),
        )


def available_now_row() -> Row:
    """Run a query with ``availableNow`` over one new batch."""
    bucket = SimulatedBucket()
    found = Spent({})  # type: ignore[arg-type]

    def main() -> None:
        nonlocal found
        query = SimulatedQuery(bucket)
        query.drain()
        query.stream.stop()
        bucket.append("ingest")
        query = SimulatedQuery(bucket, query.offset)
        with bucket.spent(query.store) as found:
            query.stream.prepare_available_now()
            query.drain()
            query.stream.stop()

    bucket.run(main)
    return Row(
        "a run with availableNow over one new batch, driver with its collector",
        f"{found.total} requests",
        detail=f"and 1 read by its task; {_listed(found)}; Spark's own seconds are not simulated",
    )


def idle_row(partitions: int, who: str) -> Row:
    """Wait for an hour."""
    bucket = SimulatedBucket(partitions)
    found = Spent({})  # type: ignore[arg-type]

    def main() -> None:
        nonlocal found
        if who == "consumer":
            found = bucket.wait_in_python(HOUR_S)
            return
        query = SimulatedQuery(bucket)
        query.drain()
        found = query.idle(HOUR_S)
        query.stream.stop()

    bucket.run(main)
    goal = IDLE_GOALS[partitions]
    return Row(
        f"an idle hour of a {who}, {_name(partitions)}",
        f"{found.total:,} requests, ${_a_month(found):.2f} a month",
        f"<= {goal:,}",
        found.total <= goal,
        _listed(found),
    )


def found_row(partitions: int) -> Row:
    """Let records come after an idle hour, and measure until a query has them."""
    bucket = SimulatedBucket(partitions)
    delays: list[float] = []

    def main() -> None:
        query = SimulatedQuery(bucket)
        query.drain()
        query.idle(HOUR_S)
        delays.extend(query.delay(30.0, 40.0) for _ in range(RECORDS))
        query.stream.stop()

    bucket.run(main)
    p99 = quantiles(delays, n=100)[98]
    return Row(
        f"a record after silence, until a query has it, {_name(partitions)}",
        f"p99 {p99:.2f} s",
        f"<= {FOUND_GOAL_S} s",
        p99 <= FOUND_GOAL_S,
        f"p50 {median(delays):.2f} s, most {max(delays):.2f} s, {RECORDS} records after an idle "
        "hour, each after 30 to 40 s",
    )


def load_row(mb_per_s: int, producers: int, flush_interval_ms: int) -> Row:
    """Count the requests of a steady load, whose bytes do not matter, and price them."""
    found, _ = load(producers, flush_interval_ms, LOAD_S)
    return Row(
        f"{mb_per_s} MB/s, {producers} producers, flush_interval_ms {flush_interval_ms}, and a "
        "consumer",
        f"${_a_month(found):,.0f} a month",
        detail=f"{_listed(found)} in {LOAD_S:.0f} s",
    )


def _a_month(spent: Spent) -> float:
    """Return the dollars of a month at this rate."""
    priced: dict[str, float] = {}
    for operation, count in spent.requests.items():
        name = OPERATIONS[operation]
        priced[name] = priced.get(name, 0.0) + count
    return S3.requests(priced) * SECONDS_A_MONTH / spent.seconds


def _listed(spent: Spent) -> str:
    return ", ".join(f"{spent.requests[name]:,} {name}" for name in sorted(spent.requests))


def _name(partitions: int) -> str:
    return f"topic of {partitions} partitions" if partitions else "queue"
