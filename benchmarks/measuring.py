"""Ways to measure: clocks, turns, percentiles, paces and processes.

Two cores of a shared machine are noisy, so a suite never trusts one absolute figure. It measures
itself and a yardstick in turns, in the same run, and reports the ratio of the medians. Work that
does not wait is measured in CPU time, which other processes on the machine do not change much.

``./run bench --tiny`` shrinks every suite to a second or so. Its figures mean nothing. It exists
so that a test can run all the code of the benchmarks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

MIB = 1024 * 1024
TINY = "OPENDATA_BUFFER_BENCH_TINY"
"""Environment variable that shrinks all suites. Child processes inherit it."""

MEMORY = Path("/dev/shm")

T = TypeVar("T")


def is_tiny() -> bool:
    """Return whether this is a run with ``--tiny``."""
    return bool(os.environ.get(TINY))


def sized(full: T, *, tiny: T) -> T:
    """Return the size of a measurement: ``full``, or ``tiny`` in a run with ``--tiny``.

    Modules call this for their constants, so a constant states both of its values in one place.

    Args:
        full: The value for a real measurement.
        tiny: The smallest value with which the code still runs.

    Returns:
        The value for this run.
    """
    return tiny if is_tiny() else full


def memory_folder() -> str | None:
    """Return a parent for temporary directories that is in memory, for work that excludes the disk.

    Returns:
        A path, or ``None`` on a machine that has no such file system. ``tempfile`` then uses its
        default.
    """
    return str(MEMORY) if MEMORY.is_dir() else None


# ---- clocks


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds that one call takes, over all threads of this process.

    The result of the call is freed after the clock stops.
    """
    started = time.process_time()
    result = call()
    taken = time.process_time() - started
    del result
    return taken


def clock_seconds(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes by the clock on the wall."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def median_cpu_seconds(call: Callable[[], object], runs: int = 5) -> float:
    """Return the median CPU seconds of some calls, after one call that does not count."""
    call()
    return statistics.median(cpu_seconds(call) for _ in range(runs))


def median_clock_seconds(call: Callable[[], object], runs: int = 5) -> float:
    """Return the median seconds of some calls by the clock on the wall."""
    return statistics.median(clock_seconds(call) for _ in range(runs))


@dataclass(frozen=True)
class Pair:
    """Two calls that were measured in turns.

    Attributes:
        ours: Median CPU seconds of the measured call.
        base: Median CPU seconds of the yardstick.
        ratio: Median of the ratios of the single runs. A short disturbance changes the ratio of
            one run only.
    """

    ours: float
    base: float
    ratio: float


def interleave(ours: Callable[[], object], base: Callable[[], object], runs: int) -> Pair:
    """Measure two calls in turns, after one call of each that does not count.

    Args:
        ours: The measured call.
        base: The yardstick.
        runs: Number of turns.

    Returns:
        The medians of both calls, and of their ratio.
    """
    gc.collect()
    cpu_seconds(ours)
    cpu_seconds(base)
    pairs = [(cpu_seconds(ours), cpu_seconds(base)) for _ in range(runs)]
    return Pair(
        statistics.median(ours_s for ours_s, _ in pairs),
        statistics.median(base_s for _, base_s in pairs),
        statistics.median(ours_s / base_s for ours_s, base_s in pairs),
    )


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile of at least two values."""
    return statistics.quantiles(values, n=100)[98]


# ---- turns


def in_turns(
    measures: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0
) -> dict[str, list[T]]:
    """Take several measures in turns. Each round begins with the next measure.

    Args:
        measures: A call for each name.
        rounds: Number of rounds that count.
        warm_up: Number of rounds before them, whose results are dropped.

    Returns:
        The results of each measure, one per round.
    """
    found: dict[str, list[T]] = {name: [] for name in measures}
    names = list(measures)
    for turn in range(warm_up + rounds):
        begin = turn % len(names)
        for name in names[begin:] + names[:begin]:
            result = measures[name]()
            if turn >= warm_up:
                found[name].append(result)
    return found


def in_random_turns(
    measures: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int = 0
) -> dict[str, list[T]]:
    """Take several measures in turns, in an order that is drawn for each round from a fixed seed.

    Args:
        measures: A call for each name. It gets the number of the round.
        rounds: Number of rounds that count.
        warm_up: Number of rounds before them, whose results are dropped.

    Returns:
        The results of each measure, one per round.
    """
    found: dict[str, list[T]] = {name: [] for name in measures}
    order = random.Random(7)
    for turn in range(warm_up + rounds):
        for name in order.sample(list(measures), len(measures)):
            result = measures[name](turn)
            if turn >= warm_up:
                found[name].append(result)
    return found


# ---- paces


def paced(calls_per_s: float, seconds: float, call: Callable[[], object]) -> None:
    """Call at fixed times, however long earlier calls took (an open loop).

    Args:
        calls_per_s: Calls per second.
        seconds: Duration.
        call: The call.
    """
    started = time.monotonic()
    for number in range(int(calls_per_s * seconds)):
        wait = started + number / calls_per_s - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        call()


def stamped(size: int) -> bytes:
    """Return a record of ``size`` bytes that begins with the time of this call.

    All processes of a machine share the monotonic clock, so another one can tell its age.
    """
    stamp = b"%020d" % time.monotonic_ns()
    return stamp.ljust(size, b"x")


def age_ms(record: bytes) -> float:
    """Return the milliseconds since :func:`stamped` made a record."""
    return (time.monotonic_ns() - int(record[:20])) / 1e6


# ---- processes


def peak_mib() -> float:
    """Return the most memory that this process has used so far, in MiB.

    ``ru_maxrss`` of a child process starts at the peak of its parent, so Linux's own figure of
    this program is used if there is one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (peak,) = [text for text in status.read_text().splitlines() if text.startswith("VmHWM")]
        return int(peak.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def start_process(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a function in a new process."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


def apart(target: Callable[..., None], *arguments: Any) -> Any:
    """Run a function alone in a new process, so that its memory is its own.

    Args:
        target: The function. Its last parameter is a queue, into which it puts its result.
        *arguments: Its other arguments.

    Returns:
        The object that the function put into the queue.

    Raises:
        RuntimeError: The process failed.
    """
    results = multiprocessing.get_context("spawn").SimpleQueue()
    process = start_process(target, *arguments, results)
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process of {target.__name__} ended with {process.exitcode}")
    return results.get()
