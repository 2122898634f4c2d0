"""Choose which of several processes serves a queue as its broker.

Every process that may be the broker runs a :class:`LeaderElection`. All of them watch one object,
the discovery record ``<prefix>/_broker.json``, which names the broker that serves. The broker
renews the record every :data:`BEAT_S` seconds. The others stand by. One of them replaces the record
by compare-and-swap once the broker has left, or is dead::

    process 1   takes the record (term 1), serves, is killed
    process 2   stands by ............................... takes the record (term 2), serves
    process 3   stands by ............................... loses that race, stands by

A process that stands by calls a broker dead in two cases. No process listens at its address, twice
in a row: then its process has surely ended. Or the address is not reached, and the record has not
changed for :data:`SILENT_S` by the watcher's own clock. Clocks of two machines are never compared.

**Things that can go wrong:**

* Two brokers serve at the same time, for example because the first one was only suspended. That is
  safe: each append is a compare-and-swap on the manifest. It is slow, because they lose races. A
  broker that loses a race reads the record at once, and steps down if it names another broker.
* A broker cannot reach the store, and others can. While it answers its clients, they wait for
  writes that it cannot make. So it steps down once its last renewal is :data:`SILENT_S` old.
* The process cannot start a thread, or its port is in use. The election tries again, because an
  operator may repair the cause while the process lives.
* The record is not readable, perhaps because a later release wrote it. It is replaced unless its
  broker renews it within :data:`SILENT_S`.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import fields, replace

from opendata_buffer.broker.broker import Broker, SharedQueue
from opendata_buffer.broker.client import (
    SECRET_BYTES,
    ChannelClosed,
    ChannelRefused,
    DiscoveryRecord,
    Lease,
)
from opendata_buffer.broker.dispatcher import Dispatcher
from opendata_buffer.broker.network import WebSocketNetwork, WebSocketPort
from opendata_buffer.broker.protocol import ProtocolError
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.errors import CorruptData, OpenDataBufferError, StorageError
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.runtime import Runtime, Task, wait_for
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

BEAT_S = 2.0
"""Seconds between two renewals of the record."""

SILENT_S = 2.5 * BEAT_S
"""Seconds without a renewal after which a broker that is not reached counts as dead. A broker that
other processes reach goes on renewing its record, and is left alone."""

LATE_S = 1.5 * BEAT_S
"""Seconds. A renewal this long after the last one shows that this broker was suspended or did not
reach the store: it may have missed heartbeats of workers."""

STAND_BY_S = 1.0
"""Seconds between two reads of the record while another broker serves."""

RECHECK_S = 0.5
"""Least seconds between two reads of the record after lost races."""

REFUSED_S = 0.2
"""Seconds between two attempts to connect. If both are refused, the process has surely ended."""


class LeaderElection:
    """A thread that runs a broker in this process while no other process serves.

    Args:
        store: The queue's store.
        config: The queue's settings.
        runtime: Clock and threads.
        network: Opens the broker's port, and the connections that show whether another broker
            lives.
    """

    def __init__(
        self, store: Store, config: QueueConfig, runtime: Runtime, network: WebSocketNetwork
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._network = network
        self._lease = Lease(store, config, runtime)
        # The record as last read, and since when it has been the same, by this process's clock.
        self._seen: DiscoveryRecord | None = None
        self._seen_since = 0.0
        self._condition = runtime.condition()
        self._check_soon = False
        self._stopping = False
        self._port: WebSocketPort | None = None
        self.broker: Broker | None = None
        """The broker, while it serves."""
        self._mine: DiscoveryRecord | None = None
        self._is_open = False
        self._beaten_at = 0.0
        self._steady_at = 0.0
        self.failure: OpenDataBufferError | None = None
        """Why it last did not serve: for example an address in use, or a prefix that has another
        queue."""
        self._id = runtime.ulid()
        self._task: Task = runtime.spawn(self._run, "opendata-buffer-broker-host")

    @property
    def serving(self) -> DiscoveryRecord | None:
        """The record of this process's broker while it serves, from when its port is open."""
        return self._mine if self._is_open else None

    @property
    def stands_by_for(self) -> DiscoveryRecord | None:
        """The record of the other broker that serves, as last read."""
        seen = self._seen
        return None if self._mine is not None or seen is None or not seen.serves else seen

    def stop(self, timeout: float | None = None) -> None:
        """Step down, and remove the address from the record; the next broker need not wait.

        Args:
            timeout: Seconds to wait for the thread; None waits without a limit.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._task.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    wait = self._keep() if self._mine is not None else self._stand_by()
                except (StorageError, CorruptData) as error:
                    log.warning("broker of %s: %s", self._store.url, error)
                    wait = STAND_BY_S
                    if self._mine is not None and self._is_cut_off():
                        # Other processes may reach the store. While this broker answers its
                        # clients, they wait for writes that it cannot make.
                        log.warning("%s does not reach the store: it steps down", self._mine)
                        self._step_down()
                except OpenDataBufferError as error:
                    # For example a port in use, or a queue that needs an operator. Go on: it may
                    # be repaired while this process lives.
                    log.error("broker of %s does not serve: %s", self._store.url, error)
                    self.failure = error
                    wait = SILENT_S
                except Exception:
                    # No thread is left, or there is a bug. If this thread ended, the process would
                    # never serve.
                    log.exception("broker of %s does not serve", self._store.url)
                    wait = SILENT_S
                self._wait(wait)
        finally:
            self._leave()

    def _is_cut_off(self) -> bool:
        return self._runtime.monotonic() - self._beaten_at >= SILENT_S

    def _steady_since(self) -> float:
        now = self._runtime.monotonic()
        return now if now - self._beaten_at >= LATE_S else self._steady_at

    def _wait(self, seconds: float) -> None:
        now, runtime, condition = self._runtime.monotonic(), self._runtime, self._condition
        with condition:
            wait_for(runtime, condition, lambda: self._stopping or self._check_soon, seconds)
            until = now + min(RECHECK_S, seconds)
            wait_for(runtime, condition, lambda: self._stopping, until=until)

    def _keep(self) -> float:
        assert self._mine is not None
        self._check_soon = False
        beaten = self._lease.beat(self._mine)
        if beaten is None:
            log.warning("another broker is announced: %s steps down", self._mine)
            self._step_down()
            return 0.0
        self._mine = beaten
        # Keep this order: the dispatcher may read both between the two lines.
        self._steady_at = self._steady_since()
        self._beaten_at = self._runtime.monotonic()
        return BEAT_S

    def _stand_by(self) -> float:
        announced = self._lease.read()
        now = self._runtime.monotonic()
        if announced != self._seen:
            self._seen, self._seen_since = announced, now
            if announced is not None and announced.fault:
                log.warning("it is replaced unless its broker renews it: %s", announced.fault)
        if announced is not None and announced.fault and now - self._seen_since < SILENT_S:
            return STAND_BY_S  # A later release may write records that this one cannot read.
        if announced is not None and announced.serves:
            is_alive = self._is_alive(announced)
            if is_alive or (is_alive is None and now - self._seen_since < SILENT_S):
                return STAND_BY_S
        return self._take_over(announced)

    def _is_alive(self, announced: DiscoveryRecord) -> bool | None:
        """Return whether the announced broker's process lives.

        Returns:
            False when its process has surely ended; None when it is not reached.
        """
        for pause_s in (REFUSED_S, 0.0):
            try:
                self._network.connect(announced).close()
                return True
            except ChannelRefused:
                self._runtime.sleep(pause_s)
            except (ChannelClosed, ProtocolError):
                return None
        return False

    def _take_over(self, announced: DiscoveryRecord | None) -> float:
        if self._port is None:
            # The port, its certificate and the id live as long as this object. A record of an
            # earlier attempt to serve may be written late, and it names all three.
            self._port = self._network.listen()
        settings = consumer_settings(self._config)
        claim = claim_for_writing(
            self._store,
            self._config,
            runtime=self._runtime,
            grace_ms=settings.collector.grace_period_ms,
        )
        queue = SharedQueue(self._store, self._config, runtime=self._runtime, claim=claim)
        broker = Broker(
            self._store,
            queue,
            self._runtime,
            self._config.data_path_prefix,
            on_conflict=self._note_lost_race,
            dispatcher=Dispatcher(
                self._store,
                settings,
                self._runtime,
                queue,
                self._is_announced,
                lambda: not self._is_cut_off(),
                self._steady_since,
            ),
        )
        wanted = DiscoveryRecord(
            term=0,
            id=self._id,
            address=self._port.address,
            secret=secrets.token_bytes(SECRET_BYTES),
            certificate=self._port.certificate,
            seen_ms=self._runtime.now_ms(),
        )
        try:
            broker.start()
            taken = self._lease.take(wanted, announced)
        except BaseException:
            broker.stop()
            raise
        if taken is None:
            broker.stop()
            return STAND_BY_S
        self.broker, self._mine = broker, taken
        self._beaten_at = self._steady_at = self._runtime.monotonic()
        self._port.open(broker, taken)
        self._is_open = True
        log.info("serving as the broker: %s", taken)
        return BEAT_S

    def _is_announced(self) -> bool:
        """Return whether this broker serves and the stored record is its own."""
        mine = self._mine
        # Use a separate lease: another thread renews the record with this object's lease.
        announced = Lease(self._store, self._config, self._runtime).read()
        return mine is not None and mine.same_broker(announced)

    def _note_lost_race(self) -> None:
        """Note that another writer was faster, so that the record is read at once.

        The other writer may be another broker.
        """
        with self._condition:
            self._check_soon = True
            self._condition.notify_all()

    def _step_down(self) -> None:
        broker, self.broker, self._mine, self._is_open = self.broker, None, None, False
        if broker is not None:
            # Waiting requests are refused, so their clients know at once that nothing was appended.
            broker.stop(timeout=5)
        if self._port is not None:
            self._port.shut()

    def _leave(self) -> None:
        mine = self._mine
        self._step_down()
        if self._port is not None:
            self._port.close()
        if mine is not None:
            try:
                self._lease.leave(mine)
            except (StorageError, CorruptData) as error:
                log.warning("the address of this broker stays announced: %s", error)


def consumer_settings(config: QueueConfig) -> ConsumerConfig:
    """Return the settings of the broker's consumer: the queue's, and defaults for the rest."""
    if isinstance(config, ConsumerConfig):
        return replace(config, reader="")  # each worker names its own reader
    shared = {each.name: getattr(config, each.name) for each in fields(QueueConfig)}
    return ConsumerConfig(**shared)
