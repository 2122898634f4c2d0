"""Publish messages to a topic: single ones, and transactions over several partitions.

A topic's partitions are separate queues, and each has its own manifest. A program that writes to
several of them may be killed in between. Readers must still get all of its batches or none of them,
and each batch once.

**The idea.** Each batch of a publisher is a *message*: its name contains a producer id, a clock and
flags. Readers with read-committed isolation (the default) hold the batches of a transaction back
until they see its *marker*, an empty batch with the same producer id that says that the transaction
is committed or rolled back. Each transaction has a separate producer id, so a batch of an earlier
transaction can never become part of it::

    publish_uncommitted()   append pending batches to any partitions
    build_ack_intents()     wait until they are durable; return the intents, which commit them
    ...                     save the intents: the caller does, or the publisher in its record
    apply()                 write the markers to all partitions

The transaction is committed at the moment when the intents are saved. From then on, they must be
applied until that succeeds. A publisher with a name saves and applies them itself.

**Things that can go wrong:**

* The program dies before the intents are saved. The transaction is not committed, so its batches
  are not delivered. The next publisher of the name rolls it back.
* It dies after the intents are saved, with markers in some partitions. The next publisher of the
  name, or the caller, applies the intents again. To apply them twice has no further effect.
* Two instances of a name run. The later one fences the earlier one, whose transaction is rolled
  back, and which raises ``Superseded``.
* A batch of a transaction is given up, or a call is interrupted after its first part. The
  transaction can only be rolled back.
* A pending batch arrives after the marker. It would stay undecided, so the publisher waits for
  every pending batch before it rolls back.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from os import PathLike, fspath
from typing import Any, Unpack

from opendata_buffer import errors
from opendata_buffer.arguments import check_fields, checked
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS, ProducerConfig, ProducerSettings
from opendata_buffer.consumer.batches import DeliveredBatch
from opendata_buffer.familiar_names import OF_PUBLISHERS, FamiliarNames
from opendata_buffer.formats.batch import Transaction
from opendata_buffer.hints import Action, Hint
from opendata_buffer.internal_parts import internals, take_parts
from opendata_buffer.messages import (
    CLOCK_MAX,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    PRODUCER_BYTES,
    Clock,
    build_uuid,
    new_producer_id,
)
from opendata_buffer.producer.batching import ProduceRequest
from opendata_buffer.producer.committer import OpenCommitter
from opendata_buffer.producer.handles import TopicHandle, WriteHandle
from opendata_buffer.producer.producer import MISSING, Producer, check_interpreter
from opendata_buffer.producer.sharing import shared_committer
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Closeable, Runtime, SystemRuntime, deadline, locked
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.partitioner import Records
from opendata_buffer.topic.producer import ProduceOptions, TopicProducer
from opendata_buffer.topic.topic import Topic, partition_config
from opendata_buffer.transactions import (
    ROLL_BACK,
    Attempt,
    TransactionCoordinator,
    TransactionMarker,
    Verdict,
)

log = logging.getLogger(__name__)

_EXPIRE_S = 5.0
"""Seconds that :meth:`Publisher.close` may take to let readers forget the publisher."""

_APP_PREFIX = "publisher."

_QUERY = "publisher"
"""The query id in its commit record. Because of it, a Spark query cannot take over a publisher's
name, and a publisher cannot take over a query's."""


@dataclass(frozen=True, slots=True)
class AckIntents:
    """The markers that commit a transaction, one for each partition that it wrote to.

    Either all of them are applied or none. Save the intents first, in the transaction of the
    program's own input, and apply them again in full after a fault.

    Attributes:
        topic_id: Id of the topic.
        producer: The transaction's own producer id, 6 bytes.
        clocks: The clock of the marker, by partition. Empty when nothing was published.
        txn: For a publisher with a name: its app and the number of the transaction.
    """

    topic_id: str
    producer: bytes
    clocks: Mapping[str, int] = field(default_factory=dict)
    txn: Transaction | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def to_json(self) -> str:
        """Return the intents as one line of JSON."""
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
    @checked
    def from_json(cls, text: str | bytes) -> AckIntents:
        """Parse the intents that :meth:`to_json` wrote.

        Args:
            text: The result of :meth:`to_json`.

        Returns:
            The intents, to pass to :meth:`.Publisher.apply`.

        Raises:
            InvalidInput: Another program or version wrote the text.
        """
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            fields = json.loads(text)
            producer, clocks = bytes.fromhex(fields["producer"]), fields["clocks"]
            txn = Transaction(fields["app"], fields["batch"]) if "app" in fields else None
            if (
                fields["version"] == 1
                and isinstance(fields["topic"], str)
                and len(producer) == PRODUCER_BYTES
                and all(type(each) is int and 0 < each <= CLOCK_MAX for each in clocks.values())
            ):
                return cls(fields["topic"], producer, clocks, txn)
        raise errors.InvalidInput(
            f"intents are {text!r:.200}, and not what AckIntents.to_json() of this version wrote: "
            "apply them with the version that saved them"
        )


class PublisherTransaction:
    """A transaction that is being written, with its own producer id. Not thread-safe.

    Args:
        producer: The producer id.
        txn: The app and number, for a publisher with a name.
        runtime: The clock.
    """

    def __init__(self, producer: bytes, txn: Transaction | None, runtime: Runtime) -> None:
        self.producer = producer
        self.txn = txn
        self.clocks: dict[str, int] = {}  # clock of the last batch, by partition
        self.since: dict[str, int] = {}  # sequence of the first durable batch, by partition
        self.intents: AckIntents | None = None
        self.applying = False  # whether some partitions may already have a commit marker
        # The batches that are acknowledged with the transaction, by the place of their queue.
        self.processed: dict[str, list[DeliveredBatch]] = {}
        self.positions: dict[str, str] = {}
        self._runtime = runtime
        self._clock = ROLL_BACK  # lower than the clocks of all batches
        self._handles: list[tuple[str, WriteHandle]] = []
        self._failure: BaseException | None = None

    def accept(self, name: str, producer: Producer, call: ProduceRequest) -> WriteHandle:
        """Have a partition's producer accept a call as the next batch of the transaction."""
        self._clock += 1
        call.message = build_uuid(self.producer, self._clock, CONTINUE_TXN)
        call.transaction = self.txn
        # Note the clock first: after an interruption the batch may be in the partition, and its
        # handle is lost.
        self.clocks[name] = self._clock
        handle = producer._accept(call)
        self._handles.append((name, handle))
        return handle

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Fail the transaction if a call raises after its first part was accepted.

        That part may be in the queue without a handle, so the transaction can only be rolled back.
        """
        before = self._clock
        try:
            yield
        except BaseException as error:
            if self._clock != before:
                self._failure = self._failure or error
            raise

    def process(self, batch: DeliveredBatch) -> None:
        """Acknowledge a consumer's batch with the transaction.

        Args:
            batch: The next batch of its consumer that is not acknowledged.

        Raises:
            InvalidInput: Another batch of the consumer is next.
        """
        owner = batch._consumer()
        source = owner._source_of(batch)
        before = self.processed.get(source, [])
        # The position is after all earlier batches, so a batch that was left out would be lost.
        owner._check_next([*before, batch])
        self.positions[source] = str(owner.position_of(batch))
        self.processed[source] = [*before, batch]

    def wait(self, timeout: float | None) -> BaseException | None:
        """Wait until each batch is durable or given up.

        Args:
            timeout: Seconds for all of them; None waits without a limit.

        Returns:
            Why the transaction cannot be committed; None if it can.

        Raises:
            TimeoutError: A batch is still pending.
        """
        until = None if timeout is None else self._runtime.monotonic() + timeout
        failure = self._failure
        for name, handle in self._handles:
            left = None if until is None else max(0.0, until - self._runtime.monotonic())
            try:
                where = handle.result(left)
            except TimeoutError:
                raise
            except Exception as error:
                failure = failure or error
            else:
                self.since.setdefault(name, where.sequence)
        return failure


class TransactionBlock:
    """The object that a block of :meth:`Publisher.transaction` works with."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def produce(self, records: Records = MISSING, **options: Unpack[ProduceOptions]) -> TopicHandle:
        """Publish records in the transaction, as :meth:`Publisher.publish_uncommitted` does."""
        return self._publisher.publish_uncommitted(records, **options)

    @checked
    def ack(self, batch: DeliveredBatch) -> None:
        """Acknowledge a consumer's batch when, and only if, the transaction is committed.

        The commit record keeps the batch's position, so start the consumer with
        :attr:`Publisher.positions`, after the publisher. Acknowledge the batches of a queue in the
        order of their delivery. After an error, use the same batches again.

        Args:
            batch: The batch.

        Raises:
            InvalidInput: Another batch is next; or the publisher has no name.
            Closed: The publisher was closed, or failed before.
        """
        self._publisher._process(batch)


class Publisher(FamiliarNames, Closeable):
    """A publisher of messages to the partitions of a topic. A context manager, not fork-safe.

    ::

        with Publisher("s3://bucket/orders", "billing") as publisher:
            with publisher.transaction() as txn:
                txn.produce(invoices, keys=customers)
                txn.produce(events, keys=customers)

    Calls of several threads run one after the other. A transaction belongs to the publisher, not to
    a thread.

    Args:
        topic: The topic, or its URL; or the URL of a queue.
        name: 1 to 190 characters of ``A-Z a-z 0-9 . _ -``. With a name, the publisher keeps the
            intents in a record next to the topic. A new instance of the name completes the
            transaction that the last one committed, rolls back others, and fences an instance that
            still runs. Without a name (default), the caller saves the intents.
        config: Settings of each partition's producer. The ``store`` of the topic replaces its own.
        **settings: Fields of the configuration, by name.

    Raises:
        InvalidInput: There is neither a topic nor a queue; or the name is not allowed.
        Superseded: Another instance of the name was opened at the same moment.
        OpenDataBufferError: Storage failed, or an earlier transaction could not be ended; open the
            publisher again.
    """

    _instead = OF_PUBLISHERS

    @checked
    def __init__(
        self,
        topic: Topic | str | PathLike[str],
        name: str | None = None,
        *,
        config: ProducerConfig | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        check_interpreter()
        given, parts = take_parts(settings, "store", "runtime", "open_committer", "entropy")
        entropy: Callable[[int], bytes] = parts.entropy or secrets.token_bytes
        store: Store | None = parts.store
        url = topic.url if isinstance(topic, Topic) else fspath(topic)
        if isinstance(topic, Topic) and store is None:
            store = topic.store
        self._config = ProducerConfig.of(config or url, {**given, "store": url})
        self._runtime: Runtime = parts.runtime or SystemRuntime()
        self._entropy = entropy
        self._condition = self._runtime.condition()
        store = store or open_store(url, self._config.store_options)
        opened = Topic.of(self._config, store=store, runtime=self._runtime)
        self._topic_id = opened.description.topic_id
        self._store = opened.store
        self._queues: dict[str, Queue] = {}
        self._coordinator = TransactionCoordinator(
            self._store,
            self._config,
            self._queue_of,
            self._runtime,
            ahead_ms=DEFAULT_GRACE_PERIOD_MS,
            folder=opened.records,
        )
        self._markers = self._coordinator.markers
        # The producer id of messages outside of transactions.
        self._producer_id = new_producer_id(entropy)
        self._clock = Clock()
        self._written: set[str] = set()
        self._open: PublisherTransaction | None = None
        self._unaborted: PublisherTransaction | None = None
        """The transaction of a block that failed; the next block aborts it first."""
        self._broken: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._app = None if name is None else _app_of(name)
        if self._app is not None:
            with self._deadline():
                self._coordinator.recover(self._app, _QUERY, opened.description.names)
        self._producer = TopicProducer(
            self._config,
            **internals(
                store=self._store,
                runtime=self._runtime,
                open_committer=parts.open_committer or self._default_committer(),
                topic=opened,
            ),
        )

    def _default_committer(self) -> OpenCommitter:
        """Return the function that opens the committer if the caller names none.

        Here it is the committer of this process, without a broker. The public class overrides it;
        see :mod:`opendata_buffer.assembly`.
        """
        return shared_committer

    @property
    def positions(self) -> Mapping[str, str]:
        """The positions up to which the name's committed transactions have acknowledged batches.

        Start a :class:`.Consumer` or :class:`.TopicConsumer` with them.
        """
        return {} if self._app is None else self._coordinator.positions(self._app)

    @checked
    @contextmanager
    def transaction(self, timeout: float | None = None) -> Iterator[TransactionBlock]:
        """Begin a transaction. Commit it at the end of the block; abort it after an exception.

        ::

            for batch in consumer:
                with publisher.transaction() as txn:
                    txn.produce([transform(record.value) for record in batch.records()])
                    txn.ack(batch)

        Args:
            timeout: Seconds that its batches may take to become durable. None (default) waits for
                as long as the producers try.

        Yields:
            The transaction. Its methods produce to it and acknowledge batches with it.

        Raises:
            InvalidInput: The publisher has no name, or a transaction is open.
            OpenDataBufferError, TimeoutError: As :meth:`commit`. After ``Fenced`` the transaction
                is committed: the consumer of an acknowledged batch has been replaced. If it is
                raised before the block runs, the transaction of an earlier block could not be
                aborted, neither then nor now.
        """
        self._check_named()
        if self._open is not None and self._open is self._unaborted:
            self.abort()
        if self._open is not None:
            raise errors.InvalidInput(
                "a transaction is open: commit() or abort() it before the next one"
            )
        try:
            yield TransactionBlock(self)
        except BaseException:
            try:
                self.abort()
            except errors.OpenDataBufferError as error:
                log.warning("a transaction was not aborted, and will be: %s", error)
                self._unaborted = self._open
            raise
        try:
            self.commit(timeout)
        except TimeoutError:
            self.abort()
            raise

    @locked
    def publish_committed(
        self, records: Records = MISSING, **options: Unpack[ProduceOptions]
    ) -> TopicHandle:
        """Publish records outside of any transaction; they are committed once they are durable.

        Args:
            records: As for :meth:`.TopicProducer.produce`; each part is a batch of its own.
            **options: As for :meth:`.TopicProducer.produce`.

        Returns:
            One handle, durable when all parts are.

        Raises:
            InvalidInput, StorageError: As :meth:`.TopicProducer.produce`; nothing was accepted.
            Closed: The publisher was closed, or failed before.
        """
        self._check_usable()
        self._clock.update(self._runtime.now_ms())
        return self._producer._produce_by(self._accept_committed, records, **options)

    @locked
    def publish_uncommitted(
        self, records: Records = MISSING, **options: Unpack[ProduceOptions]
    ) -> TopicHandle:
        """Publish records in the open transaction; the first ones begin it.

        Args:
            records: As for :meth:`.TopicProducer.produce`. Each part is a batch of its own, which
                is delivered once the transaction is committed.
            **options: As for :meth:`.TopicProducer.produce`.

        Returns:
            One handle, durable when all parts are.

        Raises:
            InvalidInput, StorageError: As :meth:`.TopicProducer.produce`; nothing was accepted. Or
                the last transaction has intents that were not applied.
            Closed: The publisher was closed, or failed before.
        """
        self._check_usable()
        current = self._open or self._begin()
        if current.intents is not None:
            raise errors.InvalidInput(
                "the transaction has its intents: apply() them, or abort(), before you publish "
                "the next one"
            )
        with current.one_call():
            return self._producer._produce_by(current.accept, records, **options)

    @checked
    @locked
    def build_ack_intents(self, timeout: float | None = None) -> AckIntents:
        """Wait until the open transaction is durable, and return the intents that commit it.

        Save the intents before you :meth:`apply` them, unless the publisher has a name. A second
        call returns the same intents.

        ::

            publisher.publish_uncommitted(invoices)
            intents = publisher.build_ack_intents(timeout=30)
            database.save(intents.to_json(), input_offset)  # in one transaction of the database
            publisher.apply(intents)

        Args:
            timeout: Seconds to wait. None (default) waits for as long as the producers try.

        Returns:
            The intents. Without an open transaction they have no clocks.

        Raises:
            TimeoutError: The transaction is not durable in time, and stays open.
            OpenDataBufferError: A part was given up. The transaction is rolled back: publish it
                again.
            Closed: The publisher was closed, or failed before.
        """
        self._check_usable()
        return self._intents(timeout)

    @checked
    @locked
    def apply(self, intents: AckIntents) -> None:
        """Commit the transaction in all partitions it wrote to. May be repeated.

        Args:
            intents: The intents that :meth:`build_ack_intents` returned, to this or an earlier
                instance.

        Raises:
            InvalidInput: They belong to another topic or publisher, or were rolled back.
            Superseded: A later instance of the name runs; the transaction is rolled back.
            OpenDataBufferError: The message says whether the transaction is committed. With a name,
                open the publisher again; without one, apply the intents again.
            Closed: The publisher was closed, or failed before.
        """
        self._check_usable()
        self._apply(intents)

    @checked
    @locked
    def commit(self, timeout: float | None = None) -> AckIntents:
        """Build the intents and apply them, for a publisher with a name.

        Args:
            timeout: Seconds that the batches may take to become durable. None (default) waits for
                as long as the producers try.

        Returns:
            The intents that were applied.

        Raises:
            InvalidInput: The publisher has no name: save the intents in between.
            OpenDataBufferError, TimeoutError: As :meth:`build_ack_intents` and :meth:`apply`.
        """
        self._check_named()
        self._check_usable()
        intents = self._intents(timeout)
        self._apply(intents)
        return intents

    @locked
    def abort(self) -> None:
        """Abort the open transaction, so that none of it is ever delivered. Do nothing without one.

        Raises:
            InvalidInput: The publisher has no name, and :meth:`apply` failed: apply the intents
                again.
            OpenDataBufferError: It could not be rolled back in all partitions: call it again.
            Closed: The publisher was closed, or failed before.
        """
        self._check_usable()
        self._roll_back()

    @checked
    def close(self, timeout: float | None = None) -> None:
        """Roll an open transaction back, flush, and end the threads. May be repeated.

        In a forked process this does nothing, because the transaction belongs to the parent. A
        publisher without a name does not roll back a transaction that has intents.

        Args:
            timeout: Seconds after which batches that are not durable are given up. None (default)
                waits for as long as the producers try.

        Raises:
            FlushFailed: Batches were given up, now or before. The publisher is closed anyway.
        """
        if self._pid == os.getpid():
            self._close(timeout)

    @locked
    def _close(self, timeout: float | None) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._open is not None and (self._app or not self._open.intents):
                self._roll_back()
        except errors.OpenDataBufferError as error:
            log.warning("a transaction was not rolled back, and will be: %s", error)
        finally:
            self._producer.close(timeout)
        try:
            with deadline(self._runtime, _EXPIRE_S):
                clock = self._clock.value + 1
                self._markers.expire_producer(self._producer_id, clock, sorted(self._written))
        except errors.OpenDataBufferError as error:
            log.info("readers remember this publisher for some weeks: %s", error)

    def _check_named(self) -> None:
        if self._app is None:
            raise errors.InvalidInput(
                "a publisher without a name does not keep its intents: build_ack_intents(), save "
                "them, then apply() them; or give it a name"
            )

    @locked
    def _process(self, batch: DeliveredBatch) -> None:
        self._check_named()
        self._check_usable()
        (self._open or self._begin()).process(batch)

    # Callers of the methods below hold the lock.

    def _begin(self) -> PublisherTransaction:
        app = self._app
        txn = None if app is None else Transaction(app, self._coordinator.committed(app) + 1)
        self._open = PublisherTransaction(new_producer_id(self._entropy), txn, self._runtime)
        return self._open

    def _accept_committed(self, name: str, producer: Producer, call: ProduceRequest) -> WriteHandle:
        call.message = build_uuid(self._producer_id, self._clock.tick(), OUTSIDE_TXN)
        self._written.add(name)
        return producer._accept(call)

    def _intents(self, timeout: float | None) -> AckIntents:
        current = self._open
        if current is None:
            return AckIntents(self._topic_id, self._producer_id)
        if current.intents is not None:
            return current.intents
        failure = current.wait(timeout)
        if failure is None:
            clocks = {name: clock + 1 for name, clock in current.clocks.items()}
            current.intents = AckIntents(self._topic_id, current.producer, clocks, current.txn)
            return current.intents
        try:
            self._roll_back()
        except errors.OpenDataBufferError as error:
            self._open = None
            log.warning(
                "a transaction that failed was not rolled back in all partitions (%s). %s",
                error,
                Hint(Action.LIST_TRANSACTIONS, queue_name(self._store.url, self._config)),
            )
        raise failure

    def _apply(self, intents: AckIntents) -> None:
        current = self._open if self._open and self._open.intents == intents else None
        if not intents.clocks and not (current and current.positions):
            return
        if intents.topic_id != self._topic_id:
            raise errors.InvalidInput(
                f"the intents are of topic {intents.topic_id}, and this is {self._topic_id}: "
                "apply them with a publisher of that topic"
            )
        if current is not None and current.txn is not None:
            self._commit(current.txn, current, intents)
        elif self._app is not None:
            self._check_applied(intents)
        elif intents.txn is not None:
            # The commit record of that name decides. If this publisher wrote markers to some
            # partitions and the name's next instance rolled back, readers would get a part of the
            # transaction.
            raise errors.InvalidInput(
                f"the intents are of publisher {intents.txn.app.removeprefix(_APP_PREFIX)!r}: open "
                "a publisher of that name, which applies them if they are committed"
            )
        else:
            if current is not None:
                current.applying = True
            self._end(intents.producer, intents.clocks, current)
        if current is not None:
            self._open = None
            for batch in chain(*current.processed.values()):
                batch.ack()

    def _check_applied(self, intents: AckIntents) -> None:
        """Refuse saved intents of a transaction that is not committed.

        For a committed transaction there is nothing to do: the markers were written when this
        publisher was opened.

        Raises:
            InvalidInput: The transaction was rolled back, or the intents belong to another
                publisher.
        """
        if intents.txn is None or intents.txn.app != self._app:
            raise errors.InvalidInput("the intents are of another publisher: apply them there")
        found = self._coordinator.verdict_on(intents.txn, intents.producer)
        # After a rollback, another transaction may have been published under the same number. The
        # record distinguishes them by the producer id only for the last number.
        is_last = intents.txn.batch == self._coordinator.committed(intents.txn.app)
        if found is Verdict.OPEN or (found is Verdict.REPEATED and is_last):
            raise errors.InvalidInput(
                f"transaction {intents.txn.batch} was rolled back, because it was not committed "
                "before its publisher went on or was opened again: publish it again"
            )

    def _commit(self, txn: Transaction, current: PublisherTransaction, intents: AckIntents) -> None:
        attempt = Attempt(txn, current.producer, intents.clocks, current.positions)
        try:
            with self._deadline():
                if not self._coordinator.decide(attempt):
                    # Another instance has committed a transaction of this number.
                    raise errors.Superseded(txn.app, txn.batch)
                try:
                    self._coordinator.complete(attempt, current.since)
                except errors.OpenDataBufferError as error:
                    raise errors.TransientStorageError(
                        f"{txn} is committed, and not visible in all partitions yet: "
                        f"{error} Open the publisher again: it completes that."
                    ) from error
        except BaseException as error:
            # Stop using this instance: its next claim could fence a later instance of the name.
            self._broken = error
            self._open = None
            raise

    def _roll_back(self) -> None:
        current = self._open
        if current is None:
            return
        if current.applying:
            # Partitions that have their marker already deliver the transaction.
            raise errors.InvalidInput(
                "the transaction was applied, and not in all partitions as far as is known, so it "
                "counts where it was: apply the intents again until that succeeds"
            )
        # Wait for pending batches: one that is appended after the marker would stay undecided.
        current.wait(None)
        self._end(current.producer, dict.fromkeys(current.clocks, ROLL_BACK), current)
        self._open = None

    def _end(
        self, producer: bytes, clocks: Mapping[str, int], current: PublisherTransaction | None
    ) -> None:
        txn, since = (None, {}) if current is None else (current.txn, current.since)
        markers = {
            name: [TransactionMarker(producer, clock, txn, since.get(name, 0))]
            for name, clock in clocks.items()
        }
        with self._deadline():
            self._markers.write(markers)

    def _queue_of(self, name: str) -> Queue:
        if name not in self._queues:
            config = partition_config(name, self._config)
            claim = claim_for_writing(self._store, config, runtime=self._runtime)
            self._queues[name] = Queue(
                self._store, config, runtime=self._runtime, role="publisher", claim=claim
            )
        return self._queues[name]

    def _deadline(self) -> AbstractContextManager[None]:
        """Return one deadline for all changes of a call, in the record and all partitions."""
        return deadline(self._runtime, 3 * self._config.timeout_ms / 1000)

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise errors.Closed(
                f"this publisher belongs to process {self._pid}, which forked this one: open a "
                "publisher in each process, after the fork"
            )
        if self._closed:
            raise errors.Closed("the publisher is closed: open a new one")
        if self._broken is not None:
            raise errors.Closed(
                f"the publisher cannot go on since: {self._broken} Open a new one."
            ) from self._broken


def _app_of(name: str) -> str:
    with suppress(errors.InvalidInput):
        if name:
            return Transaction(f"{_APP_PREFIX}{name}", 0).app
    raise errors.InvalidInput(
        f"publisher name is {name!r:.80}: use 1 to 190 characters of A-Z a-z 0-9 . _ -"
    )
