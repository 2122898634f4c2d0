"""A publisher's open transaction, and the intents that commit it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.messages.message_ids import (
    CLOCK_MAX,
    CONTINUE_TXN,
    PRODUCER_BYTES,
    build_uuid,
)
from opendata_buffer.producer.append_buffer import Call
from opendata_buffer.producer.handle import WriteHandle
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import Runtime
from opendata_buffer.transactions.markers import ROLL_BACK

__all__ = ["AckIntents", "PublisherTransaction"]


@dataclass(frozen=True, slots=True)
class AckIntents:
    """The markers that commit a transaction, one for each partition that it wrote to.

    All of them or none have to be applied: save the intents first, in the transaction of whatever
    the published messages were made from, and apply them again in full after a fault.
    ``AckIntents.from_json(intents.to_json()) == intents``.

    Attributes:
        topic_id: Of the topic.
        producer: 6 bytes: the transaction's own producer id.
        clocks: Of each partition, the clock of the marker. Empty when nothing was published:
            there is nothing to apply then.
        txn: Of a publisher with a name: its app and the number of the transaction.
    """

    topic_id: str
    producer: bytes
    clocks: Mapping[str, int] = field(default_factory=dict)
    txn: Transaction | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        fields: dict[str, Any] = {
            "version": 1,
            "topic": self.topic_id,
            "producer": self.producer.hex(),
            "clocks": dict(sorted(self.clocks.items())),
        }
        if self.txn is not None:
            fields["app"], fields["batch"] = self.txn.app, self.txn.batch
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> AckIntents:
        """What :meth:`to_json` wrote.

        Raises:
            InvalidInput: Another program or a later version wrote it.
        """
        try:
            fields = json.loads(text)
            match fields:
                case {
                    "version": 1,
                    "topic": str(topic_id),
                    "producer": str(producer),
                    "clocks": dict(clocks),
                }:
                    txn = Transaction(fields["app"], fields["batch"]) if "app" in fields else None
                    made = cls(topic_id, bytes.fromhex(producer), clocks, txn)
                    if len(made.producer) == PRODUCER_BYTES and all(
                        type(clock) is int and 0 < clock <= CLOCK_MAX for clock in clocks.values()
                    ):
                        return made
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise InvalidInput(
            f"intents are {text!r:.200}, and not what AckIntents.to_json() of this version wrote: "
            "apply them with the version that saved them"
        )


class PublisherTransaction:
    """A transaction that is being written. Not thread-safe.

    Args:
        producer: Its own id, 6 bytes.
        txn: App and number, where the publisher has a name.
        runtime: The clock of waiting.

    Attributes:
        producer: As given.
        txn: As given.
        clocks: Of its last batch in each partition.
        since: Of each partition, the sequence of its first batch that is known to be durable.
        intents: Set by :meth:`build`.
        applying: Whether markers that commit it may be in some partitions.
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
        """Have a partition's producer accept a call as the next batch of the transaction."""
        self._clock += 1
        call.message = build_uuid(self.producer, self._clock, CONTINUE_TXN)
        call.transaction = self.txn
        # Noted first: after an interruption the batch may be in the partition without a handle.
        self.clocks[name] = self._clock
        handle = producer.accept(call)
        self._handles.append((name, handle))
        return handle

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Let the transaction fail if a call of several parts raises after its first part.

        That part may be in the queue without a handle, so the transaction can only be rolled back.
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
        """The intents, once all of it is durable."""
        clocks = {name: clock + 1 for name, clock in self.clocks.items()}
        self.intents = AckIntents(topic_id, self.producer, clocks, self.txn)
        return self.intents
