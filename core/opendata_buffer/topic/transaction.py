"""The open transaction of a publisher: what was published, and how far that is durable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opendata_buffer.commit.durability import WriteHandle
from opendata_buffer.commit.settlement import ROLL_BACK
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.producer.call import Call
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic.intents import AckIntents

__all__ = ["OpenTransaction"]


class OpenTransaction:
    """A transaction that is being written. Not thread-safe.

    Args:
        producer: Its own id, 6 bytes.
        txn: Name and number, where the publisher has a name.
        runtime: The clock of waiting.

    Attributes:
        producer: As given.
        txn: As given.
        clocks: Of its last batch in each partition.
        since: Of each partition, the sequence of its first batch that is known to be durable.
        intents: Set by :meth:`build`.
        applying: Whether acknowledgements that commit it may be in some partitions.
    """

    def __init__(self, producer: bytes, txn: Transaction | None, runtime: Runtime) -> None:
        self.producer = producer
        self.txn = txn
        self.clocks: dict[str, int] = {}
        self.since: dict[str, int] = {}
        self.intents: AckIntents | None = None
        self.applying = False
        self._runtime = runtime
        self._clock = ROLL_BACK  # below all of its batches
        self._handles: list[tuple[str, WriteHandle]] = []
        self._failure: BaseException | None = None

    def accept(self, name: str, producer: Producer, call: Call) -> WriteHandle:
        """Have one part of a call accepted as the next batch of the transaction."""
        self._clock += 1
        call.message = build_uuid(self.producer, self._clock, CONTINUE_TXN)
        call.transaction = self.txn
        # Before it is accepted: interrupted behind that, it would be in a partition unknown.
        self.clocks[name] = self._clock
        handle = producer.accept(call)
        self._handles.append((name, handle))
        return handle

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """For a call of several parts. Interrupted behind the first one, the transaction failed.

        That part may be in the queue without a handle, so all of it can only be rolled back.
        """
        before = self._clock
        try:
            yield
        except BaseException as error:
            if self._clock != before:
                self._failure = self._failure or error
            raise

    def wait(self, timeout: float | None) -> BaseException | None:
        """Wait until each batch is durable or given up. Returns why it cannot be committed.

        Raises:
            TimeoutError: Some are neither after so many seconds.
        """
        until = None if timeout is None else self._runtime.monotonic() + timeout
        failure = self._failure
        for name, handle in self._handles:
            left = None if until is None else max(0.0, until - self._runtime.monotonic())
            try:
                where = handle.watcher.await_durable(left)
            except TimeoutError:
                raise
            except Exception as error:
                failure = failure or error
            else:
                self.since.setdefault(name, where.sequence)
        return failure

    def build(self, topic_id: str) -> AckIntents:
        """What commits it, now that all of it is durable."""
        clocks = {name: clock + 1 for name, clock in self.clocks.items()}
        self.intents = AckIntents(topic_id, self.producer, clocks, self.txn)
        return self.intents
