"""Which of several processes serves a queue as its broker: who replaces the discovery record of a
dead one first, and renews it. Two brokers at once are safe, and only slow."""

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
"""A broker that is not reached is dead when its record was not renewed for so long. One that other
processes reach goes on renewing it, and is left alone."""

LATE_S = 1.5 * BEAT_S
"""A renewal so long after the last one shows that this broker was suspended, or did not reach the
store: it may have missed heartbeats of workers."""

STAND_BY_S = 1.0
"""Seconds between two reads of the record while another broker serves."""

RECHECK_S = 0.5
"""Seconds, at least, between two reads of the record after lost races."""

REFUSED_S = 0.2
"""Seconds between two connections: refused both times, the process has surely ended."""


class LeaderElection:
    """Runs a broker in this process while no other process does. ``network`` opens its port, and
    the connections that show whether another broker lives."""

    def __init__(
        self, store: Store, config: QueueConfig, runtime: Runtime, network: WebSocketNetwork
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._network = network
        self._lease = Lease(store, config, runtime)
        # The record as last read, and since when it has not changed, by this process's clock.
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
        """Why it last did not serve: an address that cannot be used, a prefix of another queue."""
        self._id = runtime.ulid()
        self._task: Task = runtime.spawn(self._run, "opendata-buffer-broker-host")

    @property
    def serving(self) -> DiscoveryRecord | None:
        """Its own record while it serves, from when its port is open."""
        return self._mine if self._is_open else None

    @property
    def stands_by_for(self) -> DiscoveryRecord | None:
        """The record of the other broker that serves, as last read."""
        seen = self._seen
        return None if self._mine is not None or seen is None or not seen.serves else seen

    def stop(self, timeout: float | None = None) -> None:
        """Step down and take the address out of the record: the next broker need not wait."""
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
                        # Others may reach the store. While this broker answers its clients, they
                        # wait for writes that it cannot make.
                        log.warning("%s does not reach the store: it steps down", self._mine)
                        self._step_down()
                except OpenDataBufferError as error:
                    # A port that is taken, a queue that needs an operator: it may be repaired while
                    # this process lives.
                    log.error("broker of %s does not serve: %s", self._store.url, error)
                    self.failure = error
                    wait = SILENT_S
                except Exception:
                    # No thread left, or a bug. If this thread ended, the process would never serve.
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
        # In this order: the dispatcher may read them between the two lines.
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
            return STAND_BY_S  # A later release may write what this one cannot read.
        if announced is not None and announced.serves:
            is_alive = self._is_alive(announced)
            if is_alive or (is_alive is None and now - self._seen_since < SILENT_S):
                return STAND_BY_S
        return self._take_over(announced)

    def _is_alive(self, announced: DiscoveryRecord) -> bool | None:
        """False when its process has surely ended; None when it is not reached."""
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
            # The port, and its certificate, live as long as this object, as the id does: a record
            # of an earlier attempt to serve may be written late, and names them all.
            self._port = self._network.listen()
        settings = consumer_settings(self._config)
        claim = claim_for_writing(
            self._store, self._config, runtime=self._runtime, grace_ms=settings.gc.grace_period_ms
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
        """Whether this broker serves and its record is the stored one; the dispatcher asks."""
        mine = self._mine
        # A lease of its own: another thread renews the record by this object's.
        announced = Lease(self._store, self._config, self._runtime).read()
        return mine is not None and mine.same_broker(announced)

    def _note_lost_race(self) -> None:
        """Another writer was faster: read at once whether it is another broker."""
        with self._condition:
            self._check_soon = True
            self._condition.notify_all()

    def _step_down(self) -> None:
        broker, self.broker, self._mine, self._is_open = self.broker, None, None, False
        if broker is not None:
            # What waits is refused: its clients know at once that it was not appended.
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
    """Settings of the broker's consumer: the queue's, and defaults for the rest."""
    if isinstance(config, ConsumerConfig):
        return replace(config, reader="")  # each worker names its own
    shared = {each.name: getattr(config, each.name) for each in fields(QueueConfig)}
    return ConsumerConfig(**shared)
