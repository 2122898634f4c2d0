"""Many processes on one queue, each by itself and through a broker, on a store as slow as S3.

All processes share the machine's cores: on a busy machine the longest delays say more about it
than about the broker.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks.broker_roles import (
    Appended,
    Load,
    Produced,
    Worked,
    append,
    join,
    produce,
    serve,
    work,
)
from benchmarks.table import Row
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX
from opendata_buffer.formats.batch import Compression, batch_key, encode_batch
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import LocalStore

RATE = 10.0
BROKERED_S, ALONE_S = 8.0, 14.0
WARM_S, KNOWN_S = 1.0, 6.0
"""What does not count: connections are made; without a broker processes learn of each other."""
SETTLED_S = 2.0
"""Fifty workers import, connect and work off what has piled up meanwhile: 1.6 s on two cores."""

CLIENTS, CLIENT_RATE, CLIENTS_S = 1_000, 4.0, 10.0
WORKERS, WORK_S, BATCHES_PER_S = 50, 10.0, 560.0

Job = tuple[Callable[[Load], Any], Load]


def run() -> Iterator[Row]:
    """All lines of this suite, in the order of the report."""
    for count, least, p99_ms in ((1, 9.5, 350), (16, 155.0, 350), (64, 600.0, 450)):
        yield producers_alone(count)
        yield producers_brokered(count, least, p99_ms)
    yield many_clients()
    yield claims()


def producers_alone(count: int) -> Row:
    with _queue() as root:
        load = Load(root, ALONE_S, broker="off", rate=RATE)
        produced: list[Produced] = _together([(produce, load)] * count)
    rate, p99, share = _figures(produced, KNOWN_S, ALONE_S)
    wasted = sum(each.conflicts for each in produced) / sum(each.attempts for each in produced)
    return Row(
        f"{_processes(count)} x 10 batches/s, without a broker",
        f"{rate:.1f} batches/s, p99 {p99 * 1000:.0f} ms",
        detail=f"{wasted:.0%} wasted CAS, smallest share {share:.0%}",
    )


def producers_brokered(count: int, least: float, p99_ms: float) -> Row:
    with _queue() as root, _broker(root) as observe:
        before = observe()
        load = Load(root, BROKERED_S, rate=RATE)
        produced: list[Produced] = _together([(produce, load)] * count)
        after = observe()
    rate, p99, share = _figures(produced, WARM_S, BROKERED_S)
    wasted = after["conflicts"] + sum(each.conflicts for each in produced)
    return Row(
        f"{_processes(count)} x 10 batches/s, with one",
        f"{rate:.1f} batches/s, p99 {p99 * 1000:.0f} ms",
        f">= {least:g} batches/s, p99 <= {p99_ms:g} ms",
        rate >= least and p99 * 1000 <= p99_ms and share >= 0.9 and wasted == 0,
        f"{wasted} wasted CAS, smallest share {share:.0%}, {_used(before, after)}",
    )


def many_clients() -> Row:
    with _queue() as root, _broker(root) as observe:
        before = observe()
        load = Load(root, CLIENTS_S, rate=CLIENT_RATE, clients=CLIENTS)
        appended: list[Appended] = _together([(append, load)])
        after = observe()
    rate, p99, _ = _figures(appended, WARM_S, CLIENTS_S)
    cpu = _cpu(before, after)
    return Row(
        f"{CLIENTS:,} clients of one process, a descriptor every 250 ms each",
        f"{rate:,.0f} descriptors/s, p99 {p99 * 1000:.0f} ms",
        ">= 3,800/s, p99 <= 600 ms, <= 1 core, <= 300 MB",
        rate >= 3_800 and p99 <= 0.6 and cpu <= 1 and after["rss_mb"] <= 300,
        f"{appended[0].refused} asked again, {_used(before, after)}",
    )


def claims() -> Row:
    with _queue() as root, _broker(root) as observe:
        locations = _uploaded(root, int(BATCHES_PER_S * WORK_S))
        before = observe()
        clients = 20
        producing = Load(
            root, WORK_S, rate=BATCHES_PER_S / clients, clients=clients, locations=locations
        )
        working = Load(root, WORK_S + 2)
        results: list[Any] = _together([(append, producing)] + [(work, working)] * WORKERS)
        after = observe()
    appended: Appended = results[0]
    workers: list[Worked] = results[1:]
    free = appended.free
    counted = [
        at - free[sequence]
        for each in workers
        for sequence, at in each.claimed.items()
        if free.get(sequence, 0) >= appended.began + SETTLED_S
    ]
    p99 = statistics.quantiles(counted, n=100)[98]
    first, last = appended.began + SETTLED_S, appended.began + WORK_S
    rate = sum(first <= at < last for each in workers for at in each.done) / (last - first)
    return Row(
        f"claims: {WORKERS} worker processes, work that takes no time",
        f"{rate:.0f} batches/s, p99 {p99 * 1000:.0f} ms from free to claimed",
        ">= 500 batches/s, p99 <= 400 ms",
        rate >= 500 and p99 <= 0.4,
        f"p50 {statistics.median(counted) * 1000:.0f} ms, {_used(before, after)}",
    )


def _processes(count: int) -> str:
    return "1 producer process" if count == 1 else f"{count} producer processes"


def _figures(
    results: Sequence[Produced | Appended], warm_s: float, seconds: float
) -> tuple[float, float, float]:
    """Batches per second, p99 in seconds and the smallest share, once all is under way."""
    first = max(each.began for each in results) + warm_s
    last = min(each.began for each in results) + seconds
    done = [sum(first <= at < last for _, at in each.times) for each in results]
    delays = [at - called for each in results for called, at in each.times if called >= first]
    rate = sum(done) / (last - first)
    return rate, statistics.quantiles(delays, n=100)[98], min(done) / (RATE * (last - first))


def _used(before: dict[str, Any], after: dict[str, Any]) -> str:
    commits = after["commits"] - before["commits"]
    each = (after["appended"] - before["appended"]) / max(1, commits)
    return (
        f"{each:.0f} batches each CAS, broker {_cpu(before, after):.0%} of a core, "
        f"{after['rss_mb']:.0f} MB"
    )


def _cpu(before: dict[str, Any], after: dict[str, Any]) -> float:
    used: float = after["cpu_s"] - before["cpu_s"]
    return used / (after["at"] - before["at"])


def _uploaded(root: Path, count: int) -> tuple[str, ...]:
    """Batches that are there and in no queue yet: uploading them is not what is measured."""
    store, runtime = LocalStore(root), SystemRuntime()
    data = encode_batch([b"x" * 100], Compression.NONE)
    locations = tuple(batch_key(DEFAULT_DATA_PATH_PREFIX, runtime.ulid()) for _ in range(count))
    for location in locations:
        store.put(location, data)
    return locations


# ---- processes


def _context() -> ForkServerContext:
    # Sixty-four processes that each import everything would be busy with that for a minute.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.broker_roles", "click"])
    return context


def _together(jobs: Sequence[Job]) -> list[Any]:
    """Each job in a process of its own; they begin at the same moment."""
    context = _context()
    barrier = context.Barrier(len(jobs))
    with ProcessPoolExecutor(len(jobs), context, join, (barrier,)) as pool:
        return [each.result() for each in [pool.submit(do, load) for do, load in jobs]]


@contextmanager
def _queue() -> Iterator[Path]:
    """A directory, in memory where there is such a one: the disk is not what is measured."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="buffer-bench-", dir=where) as root:
        yield Path(root) / "queue"


@contextmanager
def _broker(root: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """A broker in a process of its own; gives a function that asks what it did so far."""
    ours, theirs = multiprocessing.Pipe()
    process = _context().Process(target=serve, args=(root, theirs))
    process.start()
    assert ours.poll(30)
    ours.recv()

    def observe() -> dict[str, Any]:
        ours.send("observe")
        found: dict[str, Any] = ours.recv()
        return found

    try:
        yield observe
    finally:
        ours.send("end")
        process.join(30)
