"""Publishes messages to a topic: single ones, and transactions over several partitions.

Each batch that a publisher writes is a message: producer, clock and flags lie in its name, and
readers by the rule of read-committed (the default) deliver it once, when it counts. A
transaction is a producer of its own, so none waits for another, and nothing that an earlier one
left behind can be taken for a part of it::

    publish_uncommitted()   pending batches, in any partitions
    build_ack_intents()     all of it is durable; what would commit it
    ...                     the intents are saved: by the caller, or in the publisher's record
    apply()                 acknowledgements in all partitions

Before the intents are saved the transaction is not committed, whatever happens; from then on it
is, and has to be applied until that succeeds. A publisher with a name does both by itself.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from opendata_buffer.concurrency import ClosedAtEnd, locked
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Closed, InvalidInput, OpenDataBufferError
from opendata_buffer.messages.message_ids import OUTSIDE_TXN, Clock, build_uuid, new_producer_id
from opendata_buffer.producer.append_buffer import Call
from opendata_buffer.producer.group_commit import OpenCommitter, open_committer
from opendata_buffer.producer.handle import WriteHandle
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores.base import Store
from opendata_buffer.topic.producer import TopicHandle, TopicProducer
from opendata_buffer.topic.topic import Topic
from opendata_buffer.topic.transaction import (
    AckIntents,
    Endings,
    OpenTransaction,
    PublisherName,
    name_of,
)
from opendata_buffer.transactions.coordinator import TransactionCoordinator
from opendata_buffer.transactions.markers import ROLL_BACK

if TYPE_CHECKING:
    from opendata_buffer.topic.partitioner import Entries, Keys, Partitioner

__all__ = ["FairLock", "Outside", "Publisher"]


# ---- Calls that are carried out one after the other, without a lock that is held through them ----


class FairLock:
    """Lets one caller in at a time: ``with turns.taken(): ...``. Thread-safe, not reentrant.

    A lock could not do it: a call that waits for storage holds it for seconds, and a thread that
    is interrupted while it waits must leave it as it was.

    Args:
        runtime: The lock and its waiting room.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._condition = runtime.condition()
        self._holder: object | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the others, and keep them waiting until the end of the block."""
        own = object()
        try:
            self._take(own)
            yield
        finally:
            # Also when an interruption came out of the waiting: then it is another one's turn.
            self._give_back(own)

    @locked
    def _take(self, own: object) -> None:
        while self._holder is not None:
            self._condition.wait()
        self._holder = own

    @locked
    def _give_back(self, own: object) -> None:
        if self._holder is own:
            self._holder = None
            self._condition.notify_all()


# ---- What a publisher writes outside of its transactions ----
#
# Messages that count as they are durable.


class Outside:
    """One producer of messages, in whichever partitions. Not thread-safe.

    Args:
        producer: Its own id, 6 bytes.

    Attributes:
        producer: As given.
    """

    def __init__(self, producer: bytes) -> None:
        self.producer = producer
        self._clock = Clock()
        self._partitions: set[str] = set()

    def at(self, now_ms: int) -> None:
        """Let the next messages be of this time, milliseconds since the Unix epoch."""
        self._clock.update(now_ms)

    def accept(self, name: str, producer: Producer, call: Call) -> WriteHandle:
        """Have one part of a call accepted as the next message."""
        call.message = build_uuid(self.producer, self._clock.tick(), OUTSIDE_TXN)
        self._partitions.add(name)
        return producer.accept(call)

    def say_goodbye(self, endings: Endings) -> None:
        """Let readers forget this producer, which writes nothing more.

        Raises:
            OpenDataBufferError: See :meth:`.Endings.say_goodbye`.
        """
        endings.say_goodbye(self.producer, self._clock.value + 1, self._partitions)


log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long a publisher that closes may take to tell readers that it writes nothing more."""


class Publisher(ClosedAtEnd):
    """Publishes to the partitions of a topic. A context manager, not fork-safe.

    ::

        with Publisher("s3://bucket/orders", "billing") as publisher:
            publisher.publish_uncommitted(invoices, keys=customers)
            publisher.publish_uncommitted(events, keys=customers)
            publisher.commit()

    Calls from several threads are carried out one after the other; a transaction belongs to the
    publisher and not to a thread.

    Args:
        topic: The topic, or its URL.
        name: Keeps the intents of transactions in a record beside the topic, decides them there,
            and finds them again: a new instance of the name completes what the last one had
            committed, rolls back the rest, and fences an instance that still lives. 1 to 190
            characters of ``A-Z a-z 0-9 . _ -``. Without a name the caller saves the intents.
        config: Settings of each partition's producer. Its ``store`` is that of the topic.
        store: Use this store instead of opening the topic's URL.
        runtime: Clock and threads; the system's by default.
        open_committer: See :class:`.Producer`.
        entropy: Gives that many random bytes, for producer ids.

    Raises:
        InvalidInput: There is no topic; or the name is not allowed.
        Superseded: Another instance of the name was opened at the same moment.
        OpenDataBufferError: Storage failed, or an earlier transaction could not be ended; open
            it again.
    """

    def __init__(
        self,
        topic: Topic | str,
        name: str | None = None,
        *,
        config: ProducerConfig | None = None,
        store: Store | None = None,
        runtime: Runtime | None = None,
        open_committer: OpenCommitter = open_committer,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        url = topic if isinstance(topic, str) else topic.url
        if isinstance(topic, Topic) and store is None:
            store = topic.store
        self._config = replace(config or ProducerConfig(store=url), store=url)
        self._runtime = runtime or SystemRuntime()
        self._entropy = entropy
        self._turns = FairLock(self._runtime)
        self._topic = Topic.open(self._config, store=store, runtime=self._runtime)
        self._store = self._topic.store
        self._endings = Endings(self._store, self._config, self._runtime)
        self._outside = Outside(new_producer_id(entropy))
        self._open: OpenTransaction | None = None
        self._broken: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._name: PublisherName | None = None
        if name is not None:
            ledger = TransactionCoordinator(
                self._store,
                self._config,
                self._endings.queue,
                self._runtime,
                ahead_ms=self._config.gc_grace_period_ms,
            )
            self._name = PublisherName(name, ledger)
            with self._deadline():
                self._name.claim(self._topic.description.names)
        self._producer = TopicProducer(
            self._config, store=self._store, runtime=self._runtime, open_committer=open_committer
        )

    def publish_committed(
        self,
        entries: Entries,
        *,
        keys: Keys | None = None,
        partitioner: Partitioner | None = None,
        partition: str | None = None,
        metadata: bytes = b"",
    ) -> TopicHandle:
        """Publish entries that count as soon as they are durable, beside any transaction.

        Args:
            entries, keys, partitioner, partition, metadata: As for
                :meth:`.TopicProducer.produce`. Each part is a batch of its own.

        Returns:
            One handle, durable when all parts are.

        Raises:
            InvalidInput, StorageError: As :meth:`.TopicProducer.produce`; nothing was accepted.
            Closed: The publisher was closed, or failed before.
        """
        with self._turns.taken():
            self._check_usable()
            self._outside.at(self._runtime.now_ms())
            return self._producer.produce_by(
                self._outside.accept,
                entries,
                keys=keys,
                partitioner=partitioner,
                partition=partition,
                metadata=metadata,
            )

    def publish_uncommitted(
        self,
        entries: Entries,
        *,
        keys: Keys | None = None,
        partitioner: Partitioner | None = None,
        partition: str | None = None,
        metadata: bytes = b"",
    ) -> TopicHandle:
        """Publish entries as part of the open transaction; the first ones begin it.

        Args:
            entries, keys, partitioner, partition, metadata: As for
                :meth:`.TopicProducer.produce`. Each part is a batch of its own.

        Returns:
            One handle, durable when all parts are; they are delivered once the transaction is
            committed. :meth:`build_ack_intents` waits for it.

        Raises:
            InvalidInput, StorageError: As :meth:`.TopicProducer.produce`; nothing was accepted.
                Or the last transaction has intents, and they were not applied.
            Closed: The publisher was closed, or failed before.
        """
        with self._turns.taken():
            self._check_usable()
            current = self._open or self._begin()
            if current.intents is not None:
                raise InvalidInput(
                    "the transaction has its intents: apply() them, or roll_back(), before you "
                    "publish the next one"
                )
            with current.one_call():
                return self._producer.produce_by(
                    current.accept,
                    entries,
                    keys=keys,
                    partitioner=partitioner,
                    partition=partition,
                    metadata=metadata,
                )

    def build_ack_intents(self, timeout: float | None = None) -> AckIntents:
        """Wait until the open transaction is durable, and say what commits it.

        Save the intents before you :meth:`apply` them, unless the publisher has a name. Called
        again it gives the same.

        Args:
            timeout: Seconds. Default: until each batch is durable or was given up.

        Returns:
            The intents; without clocks when nothing was published.

        Raises:
            TimeoutError: Not durable yet; the transaction stays open.
            OpenDataBufferError: A part was given up. The transaction is rolled back: publish it
                again.
            Closed: The publisher was closed, or failed before.
        """
        with self._turns.taken():
            self._check_usable()
            return self._intents(timeout)

    def apply(self, intents: AckIntents) -> None:
        """Commit the transaction in all partitions it wrote to. Free to repeat.

        Args:
            intents: Of :meth:`build_ack_intents`; or saved by an instance before this one.

        Raises:
            InvalidInput: They are of another topic, or of a publisher of another name or with
                one; or of a transaction that this publisher, which has a name, has rolled back.
            Superseded: A later instance of the name lives. The transaction is rolled back, and
                so is whatever else this instance would publish.
            TransientStorageError: The message says whether the transaction is committed. With a
                name, open the publisher again; without, apply the intents again.
            OpenDataBufferError: As that.
            Closed: The publisher was closed, or failed before.
        """
        with self._turns.taken():
            self._check_usable()
            self._apply(intents)

    def commit(self, timeout: float | None = None) -> AckIntents:
        """:meth:`build_ack_intents` and :meth:`apply`: all that a publisher with a name needs.

        Raises:
            InvalidInput: The publisher has no name: save the intents in between.
            OpenDataBufferError, TimeoutError: As those two.
        """
        if self._name is None:
            raise InvalidInput(
                "a publisher without a name does not keep its intents: build_ack_intents(), save "
                "them, then apply() them; or give it a name"
            )
        with self._turns.taken():
            self._check_usable()
            intents = self._intents(timeout)
            self._apply(intents)
            return intents

    def roll_back(self) -> None:
        """Give the open transaction up: nothing of it is ever delivered. No transaction: nothing.

        Raises:
            InvalidInput: There is no name, and :meth:`apply` failed: it may be committed in some
                partitions. Apply the intents again.
            OpenDataBufferError: It could not be rolled back in all partitions; it is not
                committed in any. Call it again.
            Closed: The publisher was closed, or failed before.
        """
        with self._turns.taken():
            self._check_usable()
            self._roll_back()

    def close(self, timeout: float | None = None) -> None:
        """Roll an open transaction back, flush, and end the threads. Free to repeat.

        In a forked process it does nothing: the transaction is the parent's.

        A transaction whose intents the caller has, because there is no name, is let be.

        Args:
            timeout: Seconds until what is not durable is given up.

        Raises:
            FlushFailed: Something was given up, now or before. It is closed all the same.
        """
        if self._pid != os.getpid():
            return
        with self._turns.taken():
            if self._closed:
                return
            self._closed = True
            try:
                if self._open is not None and (self._name is not None or not self._open.intents):
                    self._roll_back()
            except OpenDataBufferError as error:
                log.warning("a transaction was not rolled back, and will be: %s", error)
            finally:
                self._producer.close(timeout)
            self._say_goodbye()

    # With the turn.

    def _begin(self) -> OpenTransaction:
        txn = None if self._name is None else self._name.next_transaction()
        self._open = OpenTransaction(new_producer_id(self._entropy), txn, self._runtime)
        return self._open

    def _intents(self, timeout: float | None) -> AckIntents:
        current = self._open
        if current is None:
            return AckIntents(self._topic.description.topic_id, self._outside.producer)
        if current.intents is not None:
            return current.intents
        failure = current.wait(timeout)
        if failure is None:
            return current.build(self._topic.description.topic_id)
        try:
            self._roll_back()
        except OpenDataBufferError as error:
            self._open = None
            log.warning(
                "a transaction that failed was not rolled back in all partitions (%s): see "
                "'opendata-buffer transactions list'",
                error,
            )
        raise failure

    def _apply(self, intents: AckIntents) -> None:
        if not intents.clocks:
            return
        topic_id = self._topic.description.topic_id
        if intents.topic_id != topic_id:
            raise InvalidInput(
                f"the intents are of topic {intents.topic_id}, and this is {topic_id}: apply them "
                "with a publisher of that topic"
            )
        current = self._open
        if current is None or current.intents != intents:
            self._apply_saved(intents)
            return
        if self._name is not None:
            self._decide(self._name, intents, current)
        else:
            current.applying = True
            with self._deadline():
                self._endings.settle(intents.producer, intents.clocks, None, current.since)
        self._open = None

    def _apply_saved(self, intents: AckIntents) -> None:
        if self._name is not None:
            self._name.check_applied(intents)
            return
        if intents.txn is not None:
            # Its record decides. Acknowledged without that in some partitions, and rolled back in
            # the others by the next instance of the name, it would be there by half.
            raise InvalidInput(
                f"the intents are of publisher {name_of(intents.txn.app)!r}: open a publisher of "
                "that name, which applies them if they are committed"
            )
        with self._deadline():
            self._endings.settle(intents.producer, intents.clocks, None, {})

    def _decide(self, name: PublisherName, intents: AckIntents, current: OpenTransaction) -> None:
        try:
            with self._deadline():
                name.commit(intents, current)
        except BaseException as error:
            # Going on could fence a later instance of the name.
            self._broken = error
            self._open = None
            raise

    def _roll_back(self) -> None:
        current = self._open
        if current is None:
            return
        if current.applying:
            # Some partitions may have their acknowledgement: there it is delivered.
            raise InvalidInput(
                "the transaction was applied, and not in all partitions as far as is known, so it "
                "counts where it was: apply the intents again until that succeeds"
            )
        # What is under way may land until its handle says so, and would stay undecided.
        current.wait(None)
        clocks = dict.fromkeys(current.clocks, ROLL_BACK)
        with self._deadline():
            self._endings.settle(current.producer, clocks, current.txn, current.since)
        self._open = None

    def _say_goodbye(self) -> None:
        try:
            with deadline(self._runtime, CLOSE_S):
                self._outside.say_goodbye(self._endings)
        except OpenDataBufferError as error:
            log.info("readers remember this publisher for some weeks: %s", error)

    def _deadline(self) -> AbstractContextManager[None]:
        """For several changes of one call: the record's, and those of the partitions at once."""
        return deadline(self._runtime, 3 * self._config.cas_deadline_ms / 1000)

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise Closed(
                f"this publisher belongs to process {self._pid}, which forked this one: open a "
                "publisher in each process, after the fork"
            )
        if self._closed:
            raise Closed("the publisher is closed: open a new one")
        if self._broken is not None:
            raise Closed(
                f"the publisher cannot go on since: {self._broken} Open a new one."
            ) from self._broken
