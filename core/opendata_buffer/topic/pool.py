"""One producer for each partition that is written: opened when needed, closed when it drains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opendata_buffer.errors import Closed, FlushFailed, OpenDataBufferError
from opendata_buffer.locks import locked
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import Runtime
from opendata_buffer.together import together

__all__ = ["ProducerPool"]

log = logging.getLogger(__name__)


class ProducerPool:
    """The open producers of a topic, by partition. Thread-safe.

    A producer is not closed while somebody uses it: a partition that drains gets what was under
    way, and nothing after that. Nor is another one opened before it is closed, for a caller who
    knows an older list of partitions: it could be faster, and its records come first.

    Args:
        open_producer: Opens the producer of one partition.
        runtime: Threads and lock.
    """

    def __init__(self, open_producer: Callable[[str], Producer], runtime: Runtime) -> None:
        self._open_producer = open_producer
        self._runtime = runtime
        self._condition = runtime.condition()
        self._open: dict[str, Producer] = {}
        self._opening: set[str] = set()
        self._used: dict[str, int] = {}
        self._leaving: set[str] = set()
        """Those of the open ones that are to be closed once nobody uses them."""
        self._closing: dict[str, Producer] = {}
        self._lost_calls = 0
        self._lost = ""
        self._closed = False

    @contextmanager
    def using(self, names: Sequence[str]) -> Iterator[dict[str, Producer]]:
        """The producers of some partitions, which stay open inside the block.

        Raises:
            Closed: The pool was closed.
            OpenDataBufferError: One could not be opened.
        """
        self._hold(names)
        try:
            opened = self._find(names)
            missing = [name for name in names if name not in opened]
            opened |= zip(missing, together(self._runtime, self._open_one, missing), strict=True)
            yield opened
        finally:
            self._give_back(names)

    def has(self, names: Sequence[str]) -> bool:
        """Whether all of these are open: :meth:`using` them waits for nothing."""
        return len(self._find(names)) == len(set(names))

    def open_all(self, names: Sequence[str]) -> None:
        """Open those that are not.

        Raises:
            Closed, OpenDataBufferError: As :meth:`using`.
        """
        with self.using(names):
            pass

    def keep(self, active: Sequence[str]) -> None:
        """Close, in the background, the producers of partitions that are written no more."""
        for name in self._begin_leaving(active):
            self._runtime.spawn(
                lambda name=name: self._leave(name),  # type: ignore[misc]
                "opendata-buffer-drain",
            )

    def flush(self, timeout: float | None) -> None:
        """See :meth:`.Producer.flush`, of all at once.

        Raises:
            FlushFailed: Something was lost, now or before, also in a partition that has left.
            TimeoutError: Not all is durable after ``timeout`` seconds.
        """
        self._all(lambda producer: producer.flush(timeout))

    def close(self, timeout: float | None) -> None:
        """Close all at once; a second call does nothing more.

        Raises:
            FlushFailed: As :meth:`flush`.
        """
        self._begin_closing()
        self._all(lambda producer: producer.close(timeout))

    @property
    def buffered_bytes(self) -> int:
        """What is not yet settled, of all."""
        return sum(producer.buffered_bytes for producer in self._everyone())

    def _all(self, call: Callable[[Producer], None]) -> None:
        def outcome(producer: Producer) -> OpenDataBufferError | TimeoutError | None:
            try:
                call(producer)
            except (OpenDataBufferError, TimeoutError) as error:
                return error
            return None

        everyone = self._everyone()
        # All at once, however many: the timeout is for all of them together.
        found = together(self._runtime, outcome, everyone, most=max(1, len(everyone)))
        failed = [error for error in found if isinstance(error, FlushFailed)]
        others = [e for e in found if e is not None and not isinstance(e, FlushFailed)]
        calls, cause = self._lost_so_far()
        if failed or calls:
            total = calls + sum(error.failed_calls for error in failed)
            raise FlushFailed(total, cause or failed[0].cause)
        if others:
            raise others[0]

    def _open_one(self, name: str) -> Producer:
        found = self._begin_opening(name)
        if found is not None:
            return found
        producer = None
        try:
            producer = self._open_producer(name)
        finally:
            self._opened(name, producer)
        return producer

    def _leave(self, name: str) -> None:
        producer = self._await_unused(name)
        if producer is None:
            return
        try:
            producer.close()
        except FlushFailed as error:
            self._note_loss(error)
        finally:
            self._left(name)
        log.info("partition %s drains: its producer has ended", name)

    @locked
    def _hold(self, names: Sequence[str]) -> None:
        self._check_open()
        for name in names:
            self._used[name] = self._used.get(name, 0) + 1

    @locked
    def _give_back(self, names: Sequence[str]) -> None:
        for name in names:
            self._used[name] -= 1
        self._condition.notify_all()

    @locked
    def _find(self, names: Sequence[str]) -> dict[str, Producer]:
        return {name: self._open[name] for name in names if name in self._open}

    @locked
    def _begin_opening(self, name: str) -> Producer | None:
        """The producer that another caller has opened meanwhile; None: this one opens it."""
        while name in self._opening or name in self._closing:
            self._condition.wait()
        self._check_open()  # or it would be opened behind close(), and nobody would close it
        if name not in self._open:
            self._opening.add(name)
        return self._open.get(name)

    @locked
    def _opened(self, name: str, producer: Producer | None) -> None:
        self._opening.discard(name)
        if producer is not None:
            self._open[name] = producer
        self._condition.notify_all()

    @locked
    def _begin_leaving(self, active: Sequence[str]) -> list[str]:
        kept = set(active)
        if not self._leaving.isdisjoint(kept):
            # Somebody who knows an older list has sent a new partition away.
            self._leaving -= kept
            self._condition.notify_all()
        gone = [name for name in self._open if name not in kept and name not in self._leaving]
        self._leaving.update(gone)
        return gone

    @locked
    def _await_unused(self, name: str) -> Producer | None:
        """The producer, which nobody gets any more; None: it shall stay after all."""
        while name in self._leaving and self._used.get(name, 0):
            self._condition.wait()
        if name not in self._leaving:
            return None
        self._leaving.discard(name)
        producer = self._closing[name] = self._open.pop(name)
        return producer

    @locked
    def _left(self, name: str) -> None:
        del self._closing[name]
        self._condition.notify_all()

    @locked
    def _begin_closing(self) -> None:
        self._closed = True
        while self._opening:
            self._condition.wait()

    @locked
    def _everyone(self) -> list[Producer]:
        return [*self._open.values(), *self._closing.values()]

    @locked
    def _note_loss(self, error: FlushFailed) -> None:
        self._lost_calls += error.failed_calls
        self._lost = self._lost or error.cause

    @locked
    def _lost_so_far(self) -> tuple[int, str]:
        return self._lost_calls, self._lost

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the producer of the topic is closed: make a new one")
