"""Topics of many partitions and thousands of producers, as events on virtual time.

A producer is a few events for each batch, and no thread. The library's own code decides which
partition a key goes to (:mod:`.partitioner`), and when a writer or a broker may append again
(:class:`.WriteFairness`). A manifest is the number of times that it was replaced.

``python -m tests.simulation.growth`` prints a table.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from opendata_buffer.formats.keys import batch_key, tagged_ulid
from opendata_buffer.producer.group_commit import WriteFairness
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.partitioner import modulo

REQUEST_S = 0.060
"""What a read or a write takes, half of it before the effect."""

JITTER = 0.1
NETWORK_S = 0.001
"""From a producer to a broker."""

FORGET_ABOVE = 4_096
"""Names of a manifest that are kept for those who read late; who reads later sees the rest."""


@dataclass(frozen=True)
class Measured:
    """What one run showed: batches a second, and seconds from produced to durable."""

    partitions: int
    producers: int
    offered: float
    durable: float
    p50: float
    p99: float
    wasted: float
    """Share of the conditional writes that lost their race."""


@dataclass
class Partition:
    """One manifest, and who waits at its broker."""

    name: str
    version: int = 0
    written: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=FORGET_ABOVE))
    waiting: list[float] = field(default_factory=list)
    busy: bool = False
    fairness: WriteFairness = field(default_factory=lambda: WriteFairness(lambda: 0.5))

    def since(self, known: int) -> list[str]:
        """Locations that were appended behind a version."""
        found = []
        for version, location in reversed(self.written):
            if version <= known:
                break
            found.append(location)
        return found[::-1]


class Growth:
    """A topic and its producers, each of which writes a batch of one key every ``every_s`` seconds.

    Each partition has a broker, or producers append for themselves. So many ``foreign`` ones never
    wait for others.
    """

    def __init__(
        self,
        partitions: int,
        producers: int,
        *,
        every_s: float,
        brokers: bool,
        foreign: int = 0,
    ) -> None:
        self.random = random.Random(0)
        self.now = 0.0
        self.producers = producers
        self.every_s = every_s
        self.brokers = brokers
        self.offered = 0
        self.attempts = 0
        self.lost = 0
        self.delays: list[float] = []
        self.durable = [0] * producers
        """Batches of each producer."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.runtime = ManualRuntime()
        names = TopicDescription.new(self.runtime.ulid(), partitions).names
        self.partitions = [Partition(name) for name in names]
        keys = [f"device-{number}" for number in range(producers)]
        for number, place in enumerate(modulo(keys, names)):
            Producer(self, self.partitions[place], number, number < foreign)

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Have something happen so many seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def half(self) -> float:
        """Seconds to the effect of a request, or from it to the answer."""
        return REQUEST_S / 2 * (1 + JITTER * (2 * self.random.random() - 1))

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.now + seconds
        while self._events[0][0] < end:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def measure(self, warm_up_s: float, seconds: float) -> Measured:
        """What happens in so many seconds, after those in which writers get to know each other."""
        self.run(warm_up_s)
        self.delays.clear()
        self.durable = [0] * self.producers
        self.offered = self.attempts = self.lost = 0
        self.run(seconds)
        cuts = statistics.quantiles(self.delays, n=100)
        return Measured(
            len(self.partitions),
            self.producers,
            self.offered / seconds,
            len(self.delays) / seconds,
            cuts[49],
            cuts[98],
            self.lost / self.attempts,
        )


class Producer:
    """A process that writes a batch now and then, all into the partition of its key."""

    def __init__(self, growth: Growth, partition: Partition, number: int, foreign: bool) -> None:
        self._growth = growth
        self._partition = partition
        self._number = number
        self._foreign = foreign
        self._fairness = WriteFairness(growth.random.random, f"{number:06}")
        self._ready: list[float] = []
        self._busy = False
        self._known = -1
        growth.at(growth.random.random() * growth.every_s, self._produce)

    def _produce(self) -> None:
        growth = self._growth
        produced_at = growth.now
        growth.offered += 1
        growth.at(growth.every_s * growth.random.uniform(0.9, 1.1), self._produce)
        upload_s = growth.half() + growth.half()
        if growth.brokers:
            growth.at(upload_s + NETWORK_S, lambda: self._ask(produced_at))
        else:
            growth.at(upload_s, lambda: self._uploaded(produced_at))

    # With a broker: it appends for all that wait, one write after the other.

    def _ask(self, produced_at: float) -> None:
        self._partition.waiting.append(produced_at)
        if not self._partition.busy:
            _broker_writes(self._growth, self._partition)

    # Without: as the library's committer does it.

    def _uploaded(self, produced_at: float) -> None:
        self._ready.append(produced_at)
        if not self._busy:
            self._go_on()

    def _go_on(self) -> None:
        self._busy = bool(self._ready)
        if self._busy:
            pause = 0.0 if self._foreign else max(0.0, self._fairness.pause(self._growth.now))
            self._growth.at(pause, self._begin)

    def _begin(self) -> None:
        reads_first = self._fairness.begins(self._growth.now) and not self._foreign
        if reads_first or self._known < 0:
            self._growth.at(self._growth.half(), self._read)
        else:
            self._send()

    def _read(self) -> None:
        partition = self._partition
        self._fairness.saw(partition.since(self._known), self._growth.now)
        self._known = partition.version
        self._growth.at(self._growth.half(), self._send)

    def _send(self) -> None:
        self._growth.attempts += 1
        group, self._ready = self._ready, []
        self._growth.at(self._growth.half(), lambda: self._arrive(group))

    def _arrive(self, group: list[float]) -> None:
        partition = self._partition
        won = self._known == partition.version
        if won:
            partition.version = self._known = partition.version + 1
            partition.written += [(partition.version, self._location())] * len(group)
        self._growth.at(self._growth.half(), lambda: self._answer(group, won))

    def _location(self) -> str:
        ulid = self._growth.runtime.ulid()
        if not self._foreign:
            ulid = tagged_ulid(ulid, f"{self._number:06}")
        return batch_key(self._partition.name, ulid)

    def _answer(self, group: list[float], won: bool) -> None:
        growth = self._growth
        if won:
            growth.delays += [growth.now - each for each in group]
            growth.durable[self._number] += len(group)
            self._fairness.won(growth.now)
            self._go_on()
            return
        growth.lost += 1
        self._ready = group + self._ready
        growth.at(self._fairness.lost(growth.now) + growth.half(), self._read)


def _broker_writes(growth: Growth, partition: Partition) -> None:
    partition.busy = bool(partition.waiting)
    if not partition.busy:
        return
    growth.attempts += 1
    group, partition.waiting = partition.waiting, []
    began = growth.now

    def answer() -> None:
        growth.delays += [growth.now + NETWORK_S - each for each in group]
        partition.fairness.begins(began)
        partition.fairness.won(growth.now)
        gap = max(0.0, partition.fairness.pause(growth.now))
        growth.at(gap, lambda: _broker_writes(growth, partition))

    growth.at(growth.half() + growth.half(), answer)


def row(kind: str, found: Measured) -> str:
    """As it stands in the documentation."""
    return (
        f"| {kind} | {found.partitions} | {found.producers:,} | {found.offered:,.0f} "
        f"| {found.durable:,.0f} | {found.p50:.2f} s | {found.p99:.2f} s | {found.wasted:.0%} |"
    )


def main() -> None:
    print("| | partitions | producers | batches/s produced | durable | p50 | p99 | writes wasted |")
    print("|---|---|---|---|---|---|---|---|")
    alone = ((1, 100), (10, 1_000), (100, 10_000), (1, 1_000), (16, 1_000), (100, 1_000))
    for kind, sizes in (
        ("alone", alone),
        ("with brokers", ((1, 10_000), (16, 10_000), (100, 10_000))),
    ):
        for partitions, producers in sizes:
            growth = Growth(partitions, producers, every_s=10, brokers=kind != "alone")
            print(row(kind, growth.measure(60, 60)), flush=True)


if __name__ == "__main__":
    main()
