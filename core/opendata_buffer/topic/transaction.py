"""The open transaction of a publisher: what was published, and how far that is durable."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.concurrency import together
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import (
    InvalidInput,
    OpenDataBufferError,
    Superseded,
    TransientStorageError,
)
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.messages.message_ids import (
    ACK_TXN,
    CLOCK_MAX,
    CONTINUE_TXN,
    FINAL,
    PRODUCER_BYTES,
    build_uuid,
)
from opendata_buffer.producer.append_buffer import Call
from opendata_buffer.producer.handle import WriteHandle
from opendata_buffer.producer.producer import Producer
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.topic.topic import Topic
from opendata_buffer.transactions.commit_record import Verdict
from opendata_buffer.transactions.coordinator import Attempt, TransactionCoordinator
from opendata_buffer.transactions.markers import ROLL_BACK, PatientPut, TransactionMarker, settle

__all__ = ["AckIntents", "Endings", "OpenTransaction", "PublisherName", "app_of", "name_of"]


# ---- How a publisher ends what it wrote: acknowledgements in many partitions at once. ----


class Endings:
    """Writes acknowledgements to the partitions of a topic. Not thread-safe.

    Args:
        store: Of the topic.
        config: Of the publisher.
        runtime: Clock, names and threads.
    """

    def __init__(self, store: Store, config: ProducerConfig, runtime: Runtime) -> None:
        self._store = store
        self._batches = PatientPut(store, config, runtime)
        self._config = config
        self._runtime = runtime
        self._queues: dict[str, Queue] = {}

    def queue(self, name: str) -> Queue:
        """The queue of a partition, claimed when it is first asked for."""
        if name not in self._queues:
            config = Topic.config_of(name, self._config)
            claim = claim_for_writing(self._store, config, runtime=self._runtime)
            self._queues[name] = Queue(
                self._store, config, runtime=self._runtime, role="publisher", claim=claim
            )
        return self._queues[name]

    def settle(
        self,
        producer: bytes,
        clocks: Mapping[str, int],
        txn: Transaction | None,
        since: Mapping[str, int],
    ) -> None:
        """End one transaction, where it is undecided; free to repeat.

        Args:
            producer: Of the transaction.
            clocks: Of the acknowledgement in each partition.
            txn: Whose transaction it is.
            since: Of a partition, a sequence before which it wrote nothing.

        Raises:
            OpenDataBufferError: As :func:`.settle`, of whichever partition.
        """

        def end(name: str) -> int:
            return settle(
                self.queue(name),
                name,
                (TransactionMarker(producer, clocks[name], txn, since.get(name, 0)),),
                store=self._batches,
                runtime=self._runtime,
                ahead_ms=self._config.gc_grace_period_ms,
            )

        together(self._runtime, end, clocks)

    def say_goodbye(self, producer: bytes, clock: int, names: Collection[str]) -> None:
        """Let readers forget a producer that has nothing undecided and writes nothing more.

        Raises:
            OpenDataBufferError: Some remember it for :data:`.HORIZON_DAYS` days.
        """

        def end(name: str) -> None:
            message = build_uuid(producer, clock, ACK_TXN | FINAL)
            location = batch_key(name, self._runtime.ulid(), None, message)
            self._batches.put(location, encode_batch([]))
            self.queue(name).append([NewEntry(location)])

        together(self._runtime, end, names)


# ---- What commits a transaction over several partitions ----
#
# To be saved before it is applied. Pure.


_VERSION = 1


@dataclass(frozen=True, slots=True)
class AckIntents:
    """The acknowledgements of a transaction, one for each partition that it wrote to.

    Applied, they commit the transaction. All of them or none have to be, so save them first, in
    the transaction of whatever the published messages were made from, and apply them again in
    full after a fault. ``AckIntents.from_json(intents.to_json()) == intents``.

    Attributes:
        topic_id: Of the topic.
        producer: 6 bytes: the transaction's own producer id.
        clocks: Of each partition, the clock of the acknowledgement. Empty when nothing was
            published: there is nothing to apply then.
        txn: Of a publisher with a name: the name and the number of the transaction.
    """

    topic_id: str
    producer: bytes
    clocks: Mapping[str, int] = field(default_factory=dict)
    txn: Transaction | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        fields: dict[str, Any] = {
            "version": _VERSION,
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
                    made = cls(topic_id, bytes.fromhex(producer), clocks, _txn(fields))
                    if len(made.producer) == PRODUCER_BYTES and all(
                        map(_is_clock, clocks.values())
                    ):
                        return made
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise InvalidInput(
            f"intents are {text!r:.200}, and not what AckIntents.to_json() of this version wrote: "
            "apply them with the version that saved them"
        )


def _txn(fields: Mapping[str, Any]) -> Transaction | None:
    return Transaction(fields["app"], fields["batch"]) if "app" in fields else None


def _is_clock(value: object) -> bool:
    return type(value) is int and 0 < value <= CLOCK_MAX


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


# ---- A publisher's name: the record beside the topic that decides its transactions. ----


_PREFIX = "publisher."

_QUERY = "publisher"
"""Stands in the commit record where a Spark query has its id, so that neither takes the other's."""


class PublisherName:
    """Decides the transactions of one publisher's name, and fences other instances of it.

    Not thread-safe.

    Args:
        name: 1 to 190 characters of ``A-Z a-z 0-9 . _ -``.
        ledger: Where the record is kept.

    Raises:
        InvalidInput: The name is not allowed.
    """

    def __init__(self, name: str, ledger: TransactionCoordinator) -> None:
        self._app = app_of(name)
        self._ledger = ledger

    def claim(self, partitions: Sequence[str]) -> None:
        """Take the name over: complete what the last instance had committed, roll back the rest.

        Raises:
            Superseded: Another instance was opened at the same moment.
            OpenDataBufferError: Storage failed; claim it again.
        """
        self._ledger.recover(self._app, _QUERY, partitions)

    def next_transaction(self) -> Transaction:
        """The one behind the last that was committed."""
        return Transaction(self._app, self._ledger.committed(self._app) + 1)

    def check_applied(self, intents: AckIntents) -> None:
        """Whether saved intents need nothing more: what the record names was applied by the claim.

        Raises:
            InvalidInput: They are another publisher's, or of a transaction that was rolled back.
        """
        if intents.txn is None or intents.txn.app != self._app:
            raise InvalidInput("the intents are of another publisher: apply them with that one")
        found = self._ledger.told(intents.txn, intents.producer)
        # The record knows the last transaction by its producer, so one that was published
        # instead, under the same number, is told apart from it.
        is_last = intents.txn.batch == self._ledger.committed(self._app)
        if found is Verdict.OPEN or (found is Verdict.REPEATED and is_last):
            raise InvalidInput(
                f"transaction {intents.txn.batch} was rolled back, because it was not committed "
                "before its publisher went on or was opened again: publish it again"
            )

    def commit(self, intents: AckIntents, current: OpenTransaction) -> None:
        """Write the transaction into the record, and then acknowledge it in its partitions.

        Raises:
            Superseded: A later instance of the name lives.
            TransientStorageError: The message says whether the transaction is committed.
            OpenDataBufferError: As that.
        """
        assert current.txn is not None
        attempt = Attempt(current.txn, current.producer, intents.clocks, _QUERY)
        if not self._ledger.decide(attempt):
            # Another instance has committed a transaction of this number.
            raise Superseded(self._app, current.txn.batch)
        try:
            self._ledger.settle(attempt, current.since)
        except OpenDataBufferError as error:
            raise TransientStorageError(
                f"{current.txn} is committed, and not visible in all partitions yet: "
                f"{error} Open the publisher again: it completes that."
            ) from error


def app_of(name: str) -> str:
    """The app that stands in the locations of a publisher's transactions.

    Raises:
        InvalidInput: The name has other characters than an app id, or too many.
    """
    try:
        if name:
            return Transaction(f"{_PREFIX}{name}", 0).app
    except InvalidInput:
        pass
    raise InvalidInput(
        f"publisher name is {name!r:.80}: use 1 to 190 characters of A-Z a-z 0-9 . _ -"
    )


def name_of(app: str) -> str:
    """The publisher's name, from the app that stands in the locations of its transactions."""
    return app.removeprefix(_PREFIX)
