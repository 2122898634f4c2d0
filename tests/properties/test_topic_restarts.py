"""A topic with transactions under Spark's protocol, with crashes between any two of its steps.

The engines are those of ``test_stream_restarts``, but the writers differ. Transactions over several
partitions are open while the query is restarted. They are committed or rolled back one partition
after the other, and send messages twice. Partitions are added and drained.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Transaction
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, FINAL, OUTSIDE_TXN, build_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.topic.topic import DRAIN_S, Topic, partition_config
from tests.properties.test_stream_restarts import CheckpointedQuery, Crash, run_with_a_lagging_log

PARTITIONS = 3


@dataclass
class Open:
    """An open transaction: its values by partition, in order.

    Once it is decided, ``ending`` is the clock of its acknowledgements, and ``left`` are the
    partitions that still lack one.
    """

    producer: bytes
    clock: int = 1
    parts: dict[str, list[bytes]] = field(default_factory=dict)
    ending: int | None = None
    left: list[str] = field(default_factory=list)


class CheckpointedTopicQuery(CheckpointedQuery):
    """The writers of a topic, and the logs and output of a query that reads it."""

    OPTIONS = {}  # noqa: RUF012

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.topic = Topic.create(
            QueueConfig(store="/store"), PARTITIONS, store=self.store, runtime=self.runtime
        )
        self.open: list[Open] = []
        self.ended = Counter[str]()
        self._producers = 0
        self._slow = False  # Whether as much time may pass as a drain takes.
        self._sent: list[tuple[str, bytes, int, int, bytes]] = []

    def produce(self, pauses: Iterable[float] = (0, 1, 90)) -> None:
        moments = tuple(pauses)
        self._slow = max(moments) > DRAIN_S
        for _ in range(self.random.choice((0, 0, 1, 2, 5))):
            kind = self.random.choice(
                ("plain", "alone", "begin", "more", "more", "decide", "decide", "again", "change")
            )
            getattr(self, f"_{kind}")()
        self.runtime.advance(self.random.choice(moments))

    def settle(self) -> None:
        """Decide every transaction in all its partitions."""
        while self.open:
            self._decide()

    def queued(self) -> int:
        manifests = [self._queue_of(name).read() for name in self.topic.read().names]
        return sum(0 if manifest is None else manifest.entry_count for manifest in manifests)

    def _plain(self) -> None:
        values = self._new(self.random.randint(1, 3))
        txn = Transaction("app", len(self.written)) if self.random.random() < 0.5 else None
        self.put(self._any(), values, txn=txn)

    def _alone(self) -> None:
        """Send a message outside of transactions."""
        producer = self._producer()
        self._send(self._any(), producer, 2, OUTSIDE_TXN, self._new(1)[0])

    def _begin(self) -> None:
        self.open.append(Open(self._producer()))
        self._more(self.open[-1])

    def _more(self, transaction: Open | None = None) -> None:
        undecided = [transaction for transaction in self.open if transaction.ending is None]
        if transaction is None and undecided:
            transaction = self.random.choice(undecided)
        if transaction is None:
            return
        for _ in range(self.random.randint(1, 3)):
            name = self._any()
            value = b"%d.%d" % (len(transaction.parts), self.random.getrandbits(60))
            transaction.clock += 1
            transaction.parts.setdefault(name, []).append(value)
            self._send(name, transaction.producer, transaction.clock, CONTINUE_TXN, value)

    def _decide(self) -> None:
        """Decide an open transaction, or acknowledge a decided one in another partition."""
        if not self.open:
            return
        transaction = self.random.choice(self.open)
        if transaction.ending is None:
            committed = self.random.random() < 0.7
            self.ended["committed" if committed else "rolled back"] += 1
            transaction.ending = transaction.clock + 1 if committed else 1
            transaction.left = sorted(transaction.parts)
            if committed:
                self.written += [record for part in transaction.parts.values() for record in part]
        for _ in range(self.random.randint(1, len(transaction.left))):
            name = transaction.left.pop(self.random.randrange(len(transaction.left)))
            message = build_uuid(transaction.producer, transaction.ending, ACK_TXN | FINAL)
            self.put(name, [], message=message)
        if not transaction.left:
            self.open.remove(transaction)

    def _again(self) -> None:
        """Repeat a message of an open transaction, like a writer that got no answer."""
        producers = {
            transaction.producer for transaction in self.open if transaction.ending is None
        }
        sent = [message for message in self._sent if message[1] in producers]
        if sent:
            name, producer, clock, flags, value = self.random.choice(sent)
            self.put(name, [value], message=build_uuid(producer, clock, flags))
            self.ended["sent again"] += 1

    def _change(self) -> None:
        """Expand the topic, or drain a partition."""
        active = self.topic.read().active
        busy = {name for transaction in self.open for name in transaction.parts}
        idle = [name for name in active if name not in busy]
        if self._slow and len(active) > 1 and idle and self.random.random() < 0.6:
            self.topic.drain(self.random.choice(idle))
            self.runtime.advance(DRAIN_S)
            self.ended["drained"] += 1
        elif len(active) < 5:
            self.topic.expand(len(active) + 1)
            self.ended["expanded"] += 1

    def _any(self) -> str:
        return self.random.choice(self.topic.read().active)

    def _producer(self) -> bytes:
        self._producers += 1
        return self._producers.to_bytes(6, "big")

    def _send(self, name: str, producer: bytes, clock: int, flags: int, value: bytes) -> None:
        self._sent.append((name, producer, clock, flags, value))
        self.put(name, [value], message=build_uuid(producer, clock, flags))

    def _queue_of(self, name: str) -> Queue:
        config = partition_config(name, QueueConfig(store="/store"))
        return Queue(self.store, config, runtime=self.runtime, role="producer")


def runs_of(seed: int) -> CheckpointedTopicQuery:
    """Restart a query several times while transactions are open, then read to the end."""
    query = CheckpointedTopicQuery(seed)
    for _ in range(query.random.randint(1, 6)):
        with contextlib.suppress(Crash):
            query.run(query.random.randint(1, 8))
    query.settle()
    query.run(None)
    return query


def test_committed_records_are_in_exactly_one_micro_batch_and_no_others_are() -> None:
    ended, crashes, left = Counter[str](), 0, 0
    for seed in range(60):
        query = runs_of(seed)
        read = [row for rows in query.output.values() for row in rows]
        assert Counter(read) == Counter(query.written), f"seed {seed}"
        assert query.queued() == 0, f"seed {seed}"
        ended += query.ended
        crashes += query.crashes
        left += query.ended["drained"] - len(query.topic.read().draining)
    assert min(ended.values()) > 5  # 15 to 66, by the hash seed of the process
    assert set(ended) == {"committed", "rolled back", "sent again", "drained", "expanded"}
    assert crashes > 50
    assert left > 20


@pytest.mark.parametrize("seed", range(30))
def test_with_a_lagging_log_no_committed_record_is_lost(seed: int) -> None:
    query = CheckpointedTopicQuery(seed)
    assert run_with_a_lagging_log(query) == set(query.written)
    assert query.queued() == 0
