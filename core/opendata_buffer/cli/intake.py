"""From a byte stream into a queue or a topic: what ``produce`` does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from opendata_buffer.cli.described import Described, Run, Same
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.formats import MIB
from opendata_buffer.framing import FRAMINGS, Framing
from opendata_buffer.producer.producer import Producer
from opendata_buffer.topic.partitioner import Partitioner
from opendata_buffer.topic.producer import TopicProducer

__all__ = ["Intake", "Produced", "Put", "into_queue", "into_topic"]

READ_BYTES = MIB

Watch = Callable[[], Mapping[str, int] | None]
"""Where records are by now: partitions and sequences, or None while they are not durable. Raises
OpenDataBufferError when they were given up."""

Put = Callable[[Run], Watch]
"""Accepts a run of records that fits into one batch."""


def into_queue(producer: Producer) -> Put:
    """Puts runs into a queue; keys mean nothing there."""

    def put(run: Run) -> Watch:
        watcher = producer.produce(run.records, run.metadata).watcher

        def watch() -> Mapping[str, int] | None:
            done = watcher.result()
            return None if done is None else {"": done.sequence}

        return watch

    return put


def into_topic(producer: TopicProducer, partitioner: Partitioner) -> Put:
    """Puts runs into the partitions of a topic: by their keys, without keys in turn."""

    def put(run: Run) -> Watch:
        watcher = producer.produce(
            run.records,
            keys=run.keys,
            partitioner=None if run.keys is None else partitioner,
            metadata=run.metadata,
        ).watcher

        def watch() -> Mapping[str, int] | None:
            done = watcher.result()
            return None if done is None else {name: each.sequence for name, each in done.items()}

        return watch

    return put


@dataclass
class Produced:
    """What is durable so far, always a prefix of the input; ``bytes`` are those of the records."""

    records: int = 0
    batches: int = 0
    bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class Intake:
    """Produces the records of a stream.

    Memory is bounded by the producer's buffers: a ``produce()`` call per piece that was read,
    so that slow input is flushed by age and fast input by size.

    Args:
        put: Where records go.
        config: Settings of its producer.
        metadata: Payload of every call, or what knows that of each record.
        advance: Told the bytes and records read.
        framing: How records are told apart.
        longest: Bytes that a record may have in the stream, where it is written in another way
            there; by default what fits into a batch.
        scattered: Records go to several queues: of those behind one that was given up some may be
            durable.
    """

    def __init__(
        self,
        put: Put,
        config: ProducerConfig,
        metadata: bytes | Described,
        advance: Callable[[int, int], None] = lambda size, records: None,
        framing: Framing = FRAMINGS["lines"],
        longest: int | None = None,
        scattered: bool = False,
    ) -> None:
        self._put = put
        self._scattered = scattered
        self._framing = framing
        self._flush_size = config.flush_size_bytes
        self._max_call = config.max_batch_bytes
        self._longest = config.max_batch_bytes - 4 if longest is None else longest
        self._described: Described = Same(metadata) if isinstance(metadata, bytes) else metadata
        self._advance = advance
        self._pending: deque[tuple[Watch, int, int]] = deque()
        self._last: dict[str, int] = {}
        self._settling = threading.Lock()
        self.durable = Produced()

    def run(self, read: Callable[[int], bytes]) -> None:
        """Produce until the stream ends. Not all is durable then: close the producer, then settle.

        Args:
            read: Returns what is there, up to a number of bytes; blocks for the first.

        Raises:
            InvalidInput: A record that fits into no batch, or is none in this framing. Those
                before it are produced.
            OpenDataBufferError: A batch was given up; the rest of the input was not read.
        """
        splitter = self._framing.splitter(self._longest)
        while chunk := read(READ_BYTES):
            self._produce(splitter.feed(chunk))
            self.settle()
        self._produce(splitter.finish())
        self._described.finish()

    def take(self, records: Iterable[bytes]) -> None:
        """Produce records that are whole already; as :meth:`run` for what comes of them.

        Raises:
            InvalidInput: One of them fits into no batch. Those before it are produced.
            OpenDataBufferError: A batch was given up.
        """
        for record in records:
            self._produce([record])
            self.settle()
        self._described.finish()

    def settle(self) -> None:
        """Count what has become durable; from any thread.

        Raises:
            OpenDataBufferError: A batch was given up.
        """
        with self._settling:
            self._settle()

    def last_words(self) -> str:
        """What became of the input when a signal ends the command."""
        # With a timeout: the thread that was interrupted may hold the lock for ever.
        if self._settling.acquire(timeout=0.5):
            with suppress(OpenDataBufferError):
                self._settle()
            self._settling.release()
        return f"ended by a signal: of the input, {self.durable_part()}"

    def _settle(self) -> None:
        while self._pending:
            watch, records, size = self._pending[0]
            done = watch()
            if done is None:
                return
            self._pending.popleft()
            self.durable.records += records
            self.durable.bytes += size
            for name, sequence in done.items():
                # Calls that share a batch are neighbours, because batches keep produce order.
                self.durable.batches += sequence != self._last.get(name)
                self._last[name] = sequence

    def durable_part(self) -> str:
        """Which records of the input are durable, in words."""
        done, unit = self.durable.records, self._framing.unit
        if done:
            others = "; of those behind some may be" if self._scattered else ""
            return f"{unit} 1 to {done} are durable{others}"
        return f"not one {unit.removesuffix('s')} is known to be durable"

    def _produce(self, records: Sequence[bytes]) -> None:
        for run in self._described.runs(records):
            at = 0
            for group in _groups(run.records, self._flush_size, self._max_call):
                keys = None if run.keys is None else run.keys[at : at + len(group)]
                at += len(group)
                watch = self._put(Run(group, run.metadata, keys))
                size = sum(map(len, group))
                self._pending.append((watch, len(group), size))
                self._advance(size, len(group))


def _groups(lines: Sequence[bytes], full: int, limit: int) -> Iterator[list[bytes]]:
    """Cut into calls: one that exceeds ``full`` bytes is complete, none exceeds ``limit``."""
    group: list[bytes] = []
    size = 0
    for line in lines:
        # Each record takes four more bytes in a batch, its length.
        if group and (size > full or size + len(line) + 4 > limit):
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line) + 4
    if group:
        yield group
