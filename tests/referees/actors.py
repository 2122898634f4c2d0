"""The programs of a history, which call the library as users do until the history is over.

``python -m tests.referees.actors '{"role": ..., ...}'`` runs one as a process until its input ends.
The fields are those of :class:`Scene`. ``play.py`` also runs them as threads.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import opendata_buffer as odb
from buffer_sink.committer import Group, QueueCommitter, UploadedBatch
from buffer_sink.options import SinkOptions
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork
from opendata_buffer.errors import (
    ClaimLost,
    DataLoss,
    OpenDataBufferError,
    PoisonBatch,
    Superseded,
    TransientStorageError,
)
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import QueueClaim, claim_for_writing
from opendata_buffer.queue.reader_admin import enable_readers, reset_reader
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.publisher import AckIntents
from opendata_buffer.topic.topic import partition_config
from tests.referees.history import Recorder, Saved
from tests.support.faults import HarshPlan, HarshStore
from tests.support.tuned import tuned

GC_MS = 300
CLAIM_MS = 1_500
PARTITIONS = ("0", "1", "2")


class SkewedRuntime(SystemRuntime):
    """A runtime with real time and a wrong wall clock."""

    def __init__(self, skew_ms: int) -> None:
        self._skew_ms = skew_ms

    def now_ms(self) -> int:
        return super().now_ms() + self._skew_ms


@dataclass
class Scene:
    """One process of a history.

    Attributes:
        role: A key of :data:`ROLES`.
        name: Unique name among all processes of the history.
        url, endpoint: URL of the store, and the endpoint of S3.
        folder: Folder for histories and for the data that programs save.
        skew_ms: How far its wall clock is ahead.
        plan, seed: Faults of the store, and the seed of its choices.
        saves: Whether consumers save positions in their own database.
        person: Identity that it shares with its earlier instances. For a consumer, the reader name.
        log: Whether the queue is a log with small segments.
    """

    role: str
    name: str
    url: str
    folder: str
    endpoint: str | None = None
    skew_ms: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    saves: bool = True
    person: str = ""
    broker: str = "off"
    log: bool = False

    def begin(self, store: Store | None = None) -> None:
        self.runtime = SkewedRuntime(self.skew_ms)
        self.rng = random.Random(f"{self.seed} {self.name}")
        self.recorder = Recorder(Path(self.folder), self.name)
        # Opening an S3 client takes seconds on a busy machine.
        self.grace_ms = 10_000 if store is not None else 40_000
        self.over = threading.Event()
        if self.log:
            Log.most_entries, Log.left_entries = 6, 2
        self.values = (f"{self.name.rpartition('-')[2]}:{number}" for number in itertools.count())
        self.options = odb.StoreOptions()
        if self.endpoint is not None:
            keys = dict.fromkeys(("access_key_id", "secret_access_key"), "testing")
            self.options = odb.StoreOptions(endpoint_url=self.endpoint, region="us-east-1", **keys)
        if store is None:
            opened = open_store(self.url, self.options)
            store = HarshStore(opened, SystemRuntime(), HarshPlan(**self.plan), seed=self.seed)
        self.store = store

    def saved(self, name: str) -> Saved:
        return Saved(Path(self.folder) / f"{name}.json")

    def config(self, made: type, **fields: Any) -> Any:
        fields |= {"timeout_ms": self.grace_ms // 2, "backoff_base_ms": 2}
        fields |= {"store": self.url, "store_options": self.options, "backoff_max_ms": 50}
        return tuned(made, **fields)

    def producing(self) -> odb.ProducerConfig:
        return self.config(
            odb.ProducerConfig, flush_interval_ms=2, delivery_timeout_ms=8_000,
            broker=self.broker,
        )  # fmt: skip

    def collecting(self) -> odb.GarbageCollectorConfig:
        return odb.GarbageCollectorConfig(interval_ms=GC_MS, grace_period_ms=self.grace_ms)

    def consuming(self) -> odb.ConsumerConfig:
        gc = self.collecting()
        reader = self.person if self.log else ""
        return self.config(odb.ConsumerConfig, gc=gc, create_if_missing=True, reader=reader)

    def rest(self, most_s: float) -> None:
        self.over.wait(self.rng.uniform(0, most_s))

    def play(self) -> None:
        """Play the role, and restart it after each error, like a supervisor."""
        while not self.over.is_set():
            with suppress(OpenDataBufferError):
                ROLES[self.role](self)
            self.rest(0.3)


def claim(scene: Scene, config: odb.QueueConfig) -> QueueClaim:
    """Claim the queue with a grace period, which a producer does not set on a queue it creates."""
    return claim_for_writing(scene.store, config, runtime=scene.runtime, grace_ms=scene.grace_ms)


def make_log(scene: Scene, readers: list[str]) -> None:
    """Create a log whose readers begin with its first entry."""
    config = scene.config(odb.QueueConfig)
    queue = claim(scene, config)
    times = {"retention_ms": None, "reader_expiry_ms": 10**9}
    enable_readers(scene.store, config, queue, scene.runtime, **times)
    log = Log(scene.store, config, scene.runtime)
    view = LogView.of(log, log.need(), Manifest.empty())
    for name in readers:
        reset_reader(view, name, 0)


def produce(scene: Scene) -> None:
    room = threading.Semaphore(8)
    # Each record gets its own batch, by its transaction or by a flush.
    flushes, app, number = scene.rng.random() < 0.3, f"{scene.name}.{scene.rng.random()}", 0
    claim(scene, scene.producing())
    with odb.Producer(scene.producing(), store=scene.store, runtime=scene.runtime) as opened:
        while not scene.over.is_set():
            room.acquire(timeout=1)
            txn = None if flushes else Transaction(app, number)
            record = f"{app}:{number}"
            call = scene.recorder.invoke("append", "ingest", record=record)
            try:
                watcher = opened.produce([record.encode()], transaction=txn)
            except OpenDataBufferError as error:
                scene.recorder.end_by(call, error, sure=True)
                raise
            if flushes:
                with suppress(OpenDataBufferError):
                    opened.flush()

            def report(call: int = call, watcher: Any = watcher) -> None:
                try:
                    scene.recorder.end(call, "ok", sequence=watcher.result().sequence)
                except OpenDataBufferError as error:
                    scene.recorder.end_by(call, error, sure=True)
                room.release()

            watcher.add_done_callback(report)
            number += 1
            scene.rest(0.01)


def commit_batches(scene: Scene) -> None:
    """Repeat each batch until it is committed, like Spark's sink for a query."""
    queue = scene.config(odb.QueueConfig)
    options = SinkOptions(queue=queue, grace_ms=scene.grace_ms)
    claim(scene, queue)
    committer = QueueCommitter(scene.store, options, scene.runtime)
    saved = scene.saved("sink")
    generation, batch = saved.begin(0)
    while not scene.over.is_set():
        txn, planned = Transaction("job", batch), Moment.now(scene.runtime)
        record = f"job:{batch}#{scene.name}.{scene.runtime.ulid()}"
        data, key = encode_batch([record.encode()]), batch_key("ingest", scene.runtime.ulid(), txn)
        scene.store.put(key, data)
        uploads = (UploadedBatch(key, 1, (Metadata(0, 7, b""),)),)
        with scene.recorder.call("append", "ingest", record=record, txn=f"job:{batch}") as answer:
            answer["repeat"] = not committer.append(Group(planned, uploads, txn, "query"))
        batch += 1
        saved.put(generation, batch)  # a replaced driver continues until it is stopped
        scene.rest(0.02)


def consume(scene: Scene, *, to_the_end: bool = False) -> None:
    saved, name = scene.saved(f"position{scene.person}"), scene.person
    value: Any = (None, odb.TransactionFilter("ingest").to_dict())
    generation, value = saved.begin(value) if scene.saves else (0, value)
    position, seen = value[0], odb.TransactionFilter.from_dict(value[1], "ingest")
    config, since = scene.consuming(), time.monotonic_ns()
    try:
        with scene.recorder.call("open", "ingest", position=position, reader=name) as answer:
            opened = odb.Consumer(config, position, store=scene.store, runtime=scene.runtime)
            answer.update(epoch=opened.epoch, first=opened.first_sequence)
    except DataLoss:
        # This is correct if a later instance has begun and acknowledged more. Otherwise it becomes
        # an open without an epoch, which no order of calls allows.
        if not scene.saves or saved.put(generation, value):
            scene.recorder.past(since, "open", "ingest", position=position, reader=name)
        raise
    with opened:
        epoch, handle = opened.epoch, opened.fetch_handle()
        while to_the_end or not scene.over.is_set():
            most = scene.rng.randint(1, 9)
            call = scene.recorder.call("read", "ingest", epoch=epoch, max=most, reader=name)
            with call as answer:
                found = opened.next_descriptors(most)
                answer["entries"] = entries = []
                for batch in found:
                    counts = seen.offer(batch.sequence, batch.location)
                    try:
                        record = b" ".join(handle.fetch(batch).entries).decode()
                    except PoisonBatch as error:
                        record = f"lost: {error}"
                    entries.append((batch.sequence, record, counts))
            if not found:
                if to_the_end:
                    return
                scene.rest(0.1 if scene.log else 0.01)
                continue
            last = found[-1].sequence
            if scene.saves and not saved.put(generation, (last, seen.to_dict())):
                return
            if to_the_end or scene.rng.random() < 0.6:
                with scene.recorder.call("ack", "ingest", epoch=epoch, through=last, reader=name):
                    opened.ack_through(last)


def host(scene: Scene) -> None:
    claim(scene, scene.producing())
    network = WebSocketNetwork(scene.runtime)
    election = LeaderElection(scene.store, scene.producing(), scene.runtime, network)
    scene.over.wait()
    election.stop(2)


def work(scene: Scene, *, to_the_end: bool = False) -> None:
    config = scene.config(
        odb.WorkerConfig, broker="host", claim_timeout_ms=CLAIM_MS, max_deliveries=0,
        create_if_missing=True,
        gc=scene.collecting(),
    )  # fmt: skip
    network = WebSocketNetwork(scene.runtime)
    idle_since = time.monotonic()
    with odb.Worker(config, store=scene.store, runtime=scene.runtime, network=network) as opened:
        while to_the_end or not scene.over.is_set():
            since = time.monotonic_ns()
            batches = opened.claim(3, timeout=0.2)
            records = [b" ".join(batch.entries).decode() for batch in batches]
            for record in records:
                scene.recorder.past(since, "work", "ingest", record=record)
            for record, batch in zip(records, batches, strict=True):
                scene.rest(0.01)
                done = scene.recorder.call("done", "ingest", record=record)
                with suppress(TransientStorageError, ClaimLost), done:
                    batch.done()
                idle_since = time.monotonic()
            if to_the_end and time.monotonic() - idle_since > 3 * CLAIM_MS / 1000:
                return


def publish(scene: Scene, *, to_the_end: bool = False) -> None:
    """Publish transactions and single messages, with a person's name or with saved intents."""
    name = scene.person if scene.person.startswith("named") else None
    saved = scene.saved(scene.person)
    generation, intents = saved.begin(None)
    config = scene.producing()
    topic = odb.Topic.open(config, store=scene.store, runtime=scene.runtime)
    for partition in topic.description.names:
        claim(scene, partition_config(partition, config))
    with odb.Publisher(
        scene.url, name, config=config, store=scene.store, runtime=scene.runtime
    ) as opened:
        if intents is not None and name is None:
            opened.apply(AckIntents.from_json(intents))
        while not to_the_end and not scene.over.is_set():
            if scene.rng.random() < 0.2:
                publish_one(scene, opened)
            else:
                publish_several(scene, opened, saved, generation)
            scene.rest(0.02)


def publish_one(scene: Scene, opened: odb.Publisher) -> None:
    partition, value = scene.rng.choice(PARTITIONS), next(scene.values)
    call = scene.recorder.invoke("txn", "topic", value=[["append", partition, value]])
    try:
        handle = opened.publish_committed([value.encode()], partition=partition)
        handle.result()
    except OpenDataBufferError as error:
        scene.recorder.end_by(call, error, sure=True)
        raise
    scene.recorder.end(call, "ok")


def publish_several(scene: Scene, opened: odb.Publisher, saved: Saved, generation: int) -> None:
    names = scene.rng.choices(PARTITIONS, k=scene.rng.randint(1, 4))
    values = [(name, next(scene.values)) for name in names]
    call = scene.recorder.invoke("txn", "topic", value=[["append", *value] for value in values])
    try:
        for name, value in values:
            opened.publish_uncommitted([value.encode()], partition=name)
        if scene.rng.random() < 0.2:
            opened.build_ack_intents()
            opened.abort()
            scene.recorder.end(call, "fail")
            return
        intents = opened.build_ack_intents()
    except OpenDataBufferError as error:  # without intents it can never be visible
        scene.recorder.end_by(call, error, sure=True)
        raise
    if not scene.person.startswith("named") and not saved.put(generation, intents.to_json()):
        scene.recorder.end(call, "fail")
        opened.abort()
        return
    try:
        opened.apply(intents)
    except OpenDataBufferError as error:
        scene.recorder.end_by(call, error, sure=isinstance(error, Superseded))
        raise
    scene.recorder.end(call, "ok")


def read_topic(scene: Scene, *, to_the_end: bool = False) -> None:
    saved = scene.saved("reader")
    generation, (positions, lists) = saved.begin(({}, {name: [] for name in PARTITIONS}))
    with odb.TopicConsumer(
        scene.consuming(), positions, store=scene.store, runtime=scene.runtime
    ) as opened:
        while to_the_end or not scene.over.is_set():
            call = scene.recorder.invoke("txn", "topic", value=[["r", p, None] for p in PARTITIONS])
            batches = []
            while (batch := next_batch(opened)) is not None:
                number = str(int(batch.partition.split("-")[1]))
                lists[number] += [record.decode() for record in batch.entries]
                batches.append(batch)
            for batch in {batch.partition: batch for batch in batches}.values():
                positions[batch.partition] = str(opened.position_of(batch))
            if not saved.put(generation, (positions, lists)):
                return
            for batch in batches:
                opened.ack(batch)
            if batches or to_the_end:
                value = [["r", name, lists[name]] for name in PARTITIONS]
                scene.recorder.end(call, "ok", value=value, final=to_the_end)
            opened.flush()
            if to_the_end:
                return
            scene.rest(0.1)


def next_batch(opened: odb.TopicConsumer) -> Any:
    while True:
        try:
            return opened.next_batch()
        except PoisonBatch as error:
            opened.skip(error.partition or "", error.sequence)


ROLES = {
    "producer": produce, "sink": commit_batches, "consumer": consume, "host": host, "worker": work,
    "publisher": publish, "reader": read_topic,
}  # fmt: skip


def finish(scene: Scene, kind: str, people: list[str]) -> None:
    """Read the rest, after all other programs have ended and all faults have healed."""
    for person in people:
        scene.person = person
        (consume if kind == "log" else publish)(scene, to_the_end=True)
    if kind in ("topic", "serial"):
        read_topic(scene, to_the_end=True)
    elif kind == "work":
        work(scene, to_the_end=True)
        with (
            scene.recorder.call("left", "ingest") as answer,
            odb.Consumer(scene.consuming(), store=scene.store, runtime=scene.runtime) as opened,
        ):
            answer["entries"] = [
                (batch.sequence, b" ".join(batch.entries).decode(), True)
                for batch in iter(opened.next_batch, None)
            ]
    elif kind != "log":
        consume(scene, to_the_end=True)


def main() -> None:
    scene = Scene(**json.loads(sys.argv[1]))
    logging.disable()
    scene.begin()
    threading.Thread(target=lambda: (sys.stdin.read(), scene.over.set()), daemon=True).start()
    scene.play()


if __name__ == "__main__":
    main()
