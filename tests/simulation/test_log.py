"""A log with named readers: crashes, lost answers, resets, expiry, and v1 producers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

import opendata_buffer.gc
from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset
from opendata_buffer import Consumer
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer.isolation import READ_UNCOMMITTED, TransactionFilter
from opendata_buffer.errors import DataLoss, Fenced, InvalidInput, PoisonBatch, QueueReset
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue import log_index, reader_queue
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import Part, page_from_json
from opendata_buffer.queue.log_segments import Segments
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers, reset_reader
from opendata_buffer.queue.reader_positions import ReaderPosition
from tests.simulation.actors import (
    GoProducer,
    PlainProducer,
    Reader,
    SinkDriver,
    TransactionalProducer,
    collect_garbage,
    run_services,
)
from tests.simulation.cluster import DRAIN_S, MAX_SKEW_MS, PASSING, PREFIX, Cluster, Node
from tests.simulation.scenario import run
from tests.support.logs import open_view
from tests.support.model import DeliveryModel, Sink

SHARE = 0.5
INDEX = f"{PREFIX}/_log.json"
READERS = f"{PREFIX}/_readers/"
EXPIRY_MS = 7 * 24 * 60 * 60 * 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small segments and index pages, and remember few batches to recognize repeats."""
    monkeypatch.setattr(Log, "most_entries", 8)
    monkeypatch.setattr(Log, "left_entries", 3)
    monkeypatch.setattr(Segments, "most_entries", 20)
    monkeypatch.setattr(log_index, "FAN", 3)
    monkeypatch.setattr(opendata_buffer.gc, "_PAGE", 5)
    for module in (log_index, reader_queue, opendata_buffer.gc):
        monkeypatch.setattr(module, "REMEMBERED", 30)


class LogModel(DeliveryModel):
    """The promises of a log.

    Entries leave the manifest only after the index has them. Objects are deleted only after all
    readers have acknowledged them.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.index: LogIndex | None = None
        self.objects: dict[str, bytes] = {}
        self.positions: dict[str, int] = {}
        self.unsure: dict[str, str] = {}
        """Readers that are being set back, and the process that does it, until the index agrees."""
        self.expired: set[str] = set()

        self.segments = 0
        self.pages = 0

    def is_forgotten(self, first: int | None, sequence: int) -> bool:
        """Readers compare a location with the last ones before it only (decision 0034)."""
        return first is not None and sequence - first > reader_queue.REMEMBERED

    def object_written(self, key: str, data: bytes) -> None:
        if key.startswith(f"{PREFIX}/_log/"):
            self.objects[key] = data
        else:
            super().object_written(key, data)

    def _check_dequeued(self, process: str, after: Manifest) -> None:
        end = 0 if self.index is None else self.index.end
        if after.first_sequence > end:
            self._fail(f"{process} removed {after.first_sequence - 1}; the index ends at {end}")

    def sidecar_written(self, process: str, key: str, data: bytes) -> None:
        if key == INDEX:
            self._index_written(process, LogIndex.from_json(data))
        elif key.startswith(READERS):
            name, now = key.removeprefix(READERS)[:-5], ReaderPosition.from_json(data).next
            if now < self.positions.get(name, 0):
                self.unsure[name] = process
            self.positions[name] = now

    def _index_written(self, process: str, after: LogIndex) -> None:
        before, self.index = self.index, after
        if before is None:
            return
        if after.end < before.end or after.floor < before.floor or after.changes <= before.changes:
            self._fail(f"{process} set the index back: {before} -> {after}")
        if after.lost:
            self._fail(f"{process} lost {after.lost}, but no other client took anything")
        self.expired |= {*before.readers} - {*after.readers}
        self.expired -= {*after.readers}
        for name in after.readers:
            if self.unsure.get(name) == process and after.floor <= self.positions[name]:
                del self.unsure[name]
            if self.positions[name] < after.floor and name not in self.unsure:
                self._fail(
                    f"{process} raised the floor to {after.floor}: {name} is at "
                    f"{self.positions[name]}"
                )
        at = None
        for level, parts in reversed([*enumerate(after.levels)]):
            for part in parts:
                if at is not None and part.first != at and not after.lost:
                    self._fail(f"{process} left a gap before {part}")
                at = part.end
                if part.end > after.floor:
                    self._check_part(part, level)
        self.segments += after.end > before.end
        self.pages += len(after.levels) > 1 and after.levels[1:] != before.levels[1:]

    def _check_part(self, part: Part, level: int) -> None:
        data = self.objects.get(f"{PREFIX}/_log/{part.name}")
        if data is None:
            self._fail(f"the index names {part}, but it is not stored")
        elif level:
            for child in page_from_json(data):
                self._check_part(child, level - 1)
        else:
            entries = Manifest.parse(data).entries()
            found = {entry.sequence: entry.location for entry in entries}
            want = {n: self._locations[n] for n in range(part.first, part.end)}
            if found != want:
                self._fail(f"{part} holds {found}")

    def object_deleted(self, process: str, key: str) -> None:
        if key.startswith(f"{PREFIX}/_log/"):
            self.objects.pop(key, None)
            return
        if parse_location(key, PREFIX) is None:
            self._fail(f"{process} deleted {key}, which is not a batch")
        self.counts["collected"] += 1
        sequence = self.sequences.get(key)
        assert self.index is not None
        if sequence is None:
            self.lost.add(key)
            return
        if sequence < self.index.floor:
            return
        if key in self._durable_locations:
            self._fail(f"{process} deleted {key} ({sequence}): {self.index}, {self.positions}")
        self.lost.add(key)

    def of_reader(self) -> LogModel:
        """Return the same log as one reader's sink sees it."""
        own = copy.copy(self)
        own.sink, own._last, own._seen, own._passed, own._skipped = Sink(), {}, set(), set(), {}
        return own

    def is_drained_by(self, own: LogModel) -> bool:
        """Return whether a reader's sink holds everything except repeats at the end."""
        last = self.manifest.next_sequence - 1
        while last in self.repeats:
            last -= 1
        return last < 0 or own.sink.holds(last)


class LogReader(Reader):
    """One process of a named reader with its own sink."""

    def __init__(self, cluster: LogCluster, node: Node, name: str) -> None:
        super().__init__(cluster, node)
        self._model = cluster.sinks[name]
        self._position = self._model.sink.position
        self._filter = TransactionFilter(PREFIX)
        if self._model.sink.state is not None:
            self._filter = TransactionFilter.from_dict(self._model.sink.state, PREFIX)

    def live(self, config: ConsumerConfig, *, hangs: bool = False) -> None:
        try:
            super().live(config, hangs=hangs)
        except Fenced as error:  # while it started
            self._cluster.log(f"{self._node.name}: {error}")


class LogCluster(Cluster):
    """A cluster whose queue is a log."""

    model: LogModel

    def __init__(self, seed: int) -> None:
        super().__init__(seed, LogModel)
        self.names = [f"reader{n}" for n in range(1 + self.draw(3))]
        self.sinks: dict[str, LogModel] = {}
        self.seek_share = 0.03
        """Share of the reads before which a running reader moves itself."""
        self.seeks = 0
        """How often a running reader moved itself."""
        self.replays = 0
        """How often a query read batches again after its checkpoint was deleted."""
        self.continued = 0
        """How often a query went on where its reader was after its checkpoint was deleted."""

    def config_of(self, name: str) -> ConsumerConfig:
        return replace(self.consumer_config(), reader=name)

    def enable(self) -> None:
        """Turn the queue, which may already have entries, into a log."""
        self.sinks = {name: self.model.of_reader() for name in self.names}
        node = self.node("operator")
        config = self.consumer_config()
        claim = self.patiently(
            node, lambda: claim_for_writing(node.store, config, runtime=node.runtime)
        )

        def enable() -> None:
            enable_readers(node.store, config, claim, node.runtime, reader_expiry_ms=EXPIRY_MS)

        self.patiently(node, enable)
        for name in self.names:  # before anything is collected
            self.patiently(node, lambda name=name: self.set_reader(node, name, 0))

    def set_reader(self, node: Node, name: str, sequence: int) -> ReaderPosition:
        """Reset a reader as ``opendata-buffer readers reset --to-sequence`` does."""
        config = self.config_of(name)
        queue = Queue(node.store, config, runtime=node.runtime, role="test")
        view = open_view(node.store, config, node.runtime, queue.read() or Manifest.empty())
        return reset_reader(view, name, sequence)

    def run_readers(self) -> None:
        for name in self.names:
            self.supervise(
                name,
                lambda node, name=name: LogReader(self, node, name).live(self.config_of(name)),
                lambda: False,
                zombies=True,
            )
        if self.chance(0.5):
            self.supervise("cron", lambda node: collect_garbage(self, node), lambda: False)

    def finish(self) -> None:
        self.heal()
        until = self.simulation.now + DRAIN_S
        while not all(self.model.is_drained_by(own) for own in self.sinks.values()):
            if self.simulation.now > until:
                ends = {name: own.sink.position for name, own in self.sinks.items()}
                self.fail(f"not drained after {DRAIN_S} s: {self.model.manifest}, {ends}")
            self.director.sleep(10)
        for name, own in self.sinks.items():
            missing = [record for record in self.model.durable if record not in own._seen]
            missing = [record for record in missing if not own._is_torn(record)]
            if missing:
                self.fail(f"{name} never got {missing}")


def simulate(seed: int, scenario: Any) -> LogCluster:
    cluster = LogCluster(seed)
    run(cluster.simulation, lambda: scenario(cluster))
    return cluster


def follow(cluster: LogCluster) -> None:
    cluster.enable()
    plain = [PlainProducer(cluster, f"plain{n}", 50) for n in range(cluster.draw(3))]
    apps = [TransactionalProducer(cluster, f"app{n}", 25) for n in range(1 + cluster.draw(2))]
    sinks = [SinkDriver(cluster, f"query{n}", 10) for n in range(cluster.draw(2))]
    others = [GoProducer(cluster, f"go{n}", 20) for n in range(cluster.draw(2))]
    cluster.run_readers()
    run_services(cluster, [*plain, *apps, *sinks, *others])
    cluster.finish()
    for actor in (*apps, *sinks):
        for own in cluster.sinks.values():
            own.check_complete(actor.name, actor.records)
    assert cluster.model.segments, "the log got no segment: the scenario tests nothing"
    cluster.director.sleep(4 * cluster.grace_s + 2 * MAX_SKEW_MS / 1000 + 600)
    collected = cluster.model.counts["collected"]
    assert others or collected, "nothing was collected: the scenario tests nothing"


class Follower:
    """A reader without a sink: it reads at least once, from its stored position."""

    def __init__(self, cluster: LogCluster, name: str) -> None:
        self._cluster = cluster
        self.name = name
        self.read: list[tuple[tuple[int, int], int]] = []
        """For each batch that it received: epoch, number of the consumer's seeks, and sequence."""
        self.start = ((0, 0), 0)
        """Epoch, number of seeks, and sequence of the last reset or seek."""
        self.resets = 0
        self.seeks = 0
        self.unsure: set[int] = set()
        """Epochs of consumers that died in a seek, which may have moved the reader."""

    @property
    def end(self) -> int:
        """The sequence up to which it received everything since the last reset or seek."""
        epoch, end = self.start
        for found, sequence in self.read:
            if found <= epoch:
                continue
            while end in self._cluster.model.repeats:
                end += 1
            if sequence > end:
                self._cluster.fail(f"{self.name} received {sequence} but never {end}")
            end = max(end, sequence + 1)
        while end in self._cluster.model.repeats:
            end += 1
        return end

    def live(self, node: Node) -> None:
        config = self._cluster.config_of(self.name)
        try:
            consumer = self._cluster.patiently(
                node, lambda: Consumer(config, store=node.store, runtime=node.runtime)
            )
            if self.unsure:
                self.unsure.clear()
                self.start = max(self.start, ((consumer.epoch, -1), consumer.first_sequence))
            seeks = 0
            while True:
                try:
                    if self._cluster.seek_share and self._cluster.chance(self._cluster.seek_share):
                        seeks += self._seek(node, consumer, seeks)
                    batch = consumer.next_batch()
                    if batch is None:
                        consumer.flush()
                        node.runtime.sleep(self._cluster.uniform(0.1, 5))
                        continue
                    node.runtime.sleep(self._cluster.uniform(0, 0.05))
                    self.read.append(((consumer.epoch, seeks), batch.sequence))
                    self._cluster.patiently(node, lambda batch=batch: consumer.ack(batch.sequence))
                except PASSING:
                    node.runtime.sleep(0.5)
                except PoisonBatch as error:
                    # The collector may delete what a consumer reads that was fenced long ago.
                    self._cluster.patiently(node, consumer.check_fence)
                    self._cluster.model.poison(error.sequence, error.location)
                    sequence = error.sequence
                    self._cluster.patiently(node, lambda sequence=sequence: consumer.skip(sequence))
                    self.read.append(((consumer.epoch, seeks), sequence))
                    self._cluster.patiently(node, lambda sequence=sequence: consumer.ack(sequence))
        except (Fenced, QueueReset) as error:
            self._cluster.log(f"{node.name}: {error}")
        except DataLoss as error:
            self._cluster.log(f"{node.name}: {error}")
            if self.name not in self._cluster.model.expired:
                self._cluster.fail(f"{self.name} did not expire: {error}")
            self._continue_at(error.oldest)

    def _seek(self, node: Node, consumer: Consumer, seeks: int) -> bool:
        """Let the running consumer move itself to another place; return whether it moved."""
        floor = 0 if self._cluster.model.index is None else self._cluster.model.index.floor
        end = self._cluster.model.manifest.next_sequence
        to = floor + self._cluster.draw(max(1, end - floor + 1))
        self.unsure.add(consumer.epoch)
        try:
            self._cluster.patiently(node, lambda: consumer.seek(to))
        except (InvalidInput, DataLoss) as error:
            # An earlier attempt whose answer was lost may have moved the stored position.
            self._cluster.log(f"{self.name} did not move to {to}: {error}")
            return False
        self.unsure.discard(consumer.epoch)
        if self._cluster.model.unsure.get(self.name) == node.name:
            # It is confirmed: no collector may raise the floor past the new place any more.
            del self._cluster.model.unsure[self.name]
        self.seeks += 1
        self.start = max(self.start, ((consumer.epoch, seeks), to))
        return True

    def _continue_at(self, oldest: int) -> None:
        node = self._cluster.node("operator")
        self.set_to(node, oldest)

    def set_to(self, node: Node, sequence: int) -> None:
        """Reset the reader. Batches that it received before no longer count."""
        while True:
            try:
                position = self._cluster.patiently(
                    node, lambda to=sequence: self._cluster.set_reader(node, self.name, to)
                )
                break
            except (InvalidInput, DataLoss) as error:
                # An earlier attempt whose answer was lost may have set the position.
                self._cluster.log(f"not set to {sequence}: {error}")
                assert self._cluster.model.index is not None
                sequence = self._cluster.model.index.floor
        self.resets += 1
        self.start = max(self.start, ((position.epoch, 0), sequence))


def replay(cluster: LogCluster) -> None:
    """Reset readers back and forward while they read and others expire."""
    cluster.enable()
    followers = [Follower(cluster, name) for name in cluster.names]
    for follower in followers:
        cluster.supervise(follower.name, follower.live, lambda: False, zombies=True)
    cluster.supervise("cron", lambda node: collect_garbage(cluster, node), lambda: False)

    def operate() -> None:
        while not cluster.calm:
            cluster.director.sleep(cluster.uniform(0.5, 10))
            view = cluster.model.manifest
            floor = 0 if cluster.model.index is None else cluster.model.index.floor
            follower = followers[cluster.draw(len(followers))]
            node = cluster.node("operator")
            follower.set_to(node, floor + cluster.draw(max(1, view.next_sequence - floor + 1)))

    operator = cluster.director.spawn(operate, "operator")
    actors = [PlainProducer(cluster, "plain", 60), TransactionalProducer(cluster, "app", 30)]
    run_services(cluster, list(actors))
    cluster.heal()
    operator.join()
    until = cluster.simulation.now + DRAIN_S
    while any(follower.end < cluster.model.manifest.next_sequence for follower in followers):
        if cluster.simulation.now > until:
            cluster.fail(f"not read: {[(follower.name, follower.end) for follower in followers]}")
        cluster.director.sleep(10)
    assert cluster.model.segments, "the log got no segment: the scenario tests nothing"
    resets = sum(follower.resets for follower in followers)
    assert resets, "no reader was reset: the scenario tests nothing"
    cluster.seeks = sum(follower.seeks for follower in followers)


class SparkFollower:
    """A Spark query of a named reader whose checkpoint is deleted now and then."""

    def __init__(self, cluster: LogCluster, name: str) -> None:
        self._cluster = cluster
        self.name = name
        self._is_replay = False
        """Whether the query of this checkpoint has the option ``startingOffsets=earliest``."""
        self._offsets: dict[int, SourceOffset] = {}
        self._commits: set[int] = set()
        self._end = 0
        self.replays = 0
        """How many new checkpoints read batches again."""
        self.continued = 0
        """How many new checkpoints went on where the reader was."""

    @property
    def end(self) -> int:
        """The sequence up to which it received everything since its last replay."""
        return self._after_repeats(self._end)

    def live(self, node: Node) -> None:
        cluster = self._cluster
        if self._offsets and not cluster.calm and cluster.chance(0.5):
            self._delete_checkpoint(is_replay=cluster.chance(0.5))
        config = cluster.consumer_config()
        options = SourceOptions(
            queue=QueueConfig(store=config.store, store_options=config.store_options),
            reader=self.name,
            start_is_given=self._is_replay,
            isolation=READ_UNCOMMITTED,
            gc=config.gc,
            max_batches=1 + cluster.draw(6),
        )
        stream = MicroBatchStream(options, node.store, node.runtime)
        try:
            self._run(node, stream)
        except (Fenced, QueueReset, *PASSING) as error:
            cluster.log(f"{node.name}: {error}")
        except DataLoss as error:
            cluster.log(f"{node.name}: {error}")
            if self.name not in cluster.model.expired:
                cluster.fail(f"{self.name} did not expire: {error}")
            self._delete_checkpoint(is_replay=True)
        stream.stop()

    def _delete_checkpoint(self, *, is_replay: bool) -> None:
        self._offsets.clear()
        self._commits.clear()
        self._is_replay = is_replay

    def _run(self, node: Node, stream: MicroBatchStream) -> None:
        batch = max(self._offsets, default=-1)
        if batch >= 0 and batch not in self._commits:
            self._finish(stream, batch)
        while True:
            start, floor = self._offsets.get(batch), self._floor
            end = stream.latest_offset(start)
            if end == start:
                if not self._cluster.calm and self._cluster.chance(0.1):
                    return  # Someone stops the query.
                node.runtime.sleep(self._cluster.uniform(0.1, 5))
                continue
            if start is None:
                self._begin(end.only.base, floor)
            batch += 1
            self._offsets[batch] = end
            if start is not None:
                stream.commit(start)
            self._finish(stream, batch)

    @property
    def _floor(self) -> int:
        return 0 if self._cluster.model.index is None else self._cluster.model.index.floor

    def _begin(self, begin: int, floor: int) -> None:
        """Check where a new checkpoint begins; ``floor`` is what the log kept before that."""
        if self._is_replay:
            self.replays += begin < self._end
            if not floor <= begin <= self._floor:
                self._cluster.fail(f"{self.name} began at {begin}, kept were {floor} and later")
        else:
            self.continued += self._end > 0
            if begin > self.end:
                self._cluster.fail(f"{self.name} went on at {begin} and never received {self.end}")
        self._end = begin

    def _finish(self, stream: MicroBatchStream, batch: int) -> None:
        tasks = stream.plan_input_partitions(self._offsets.get(batch - 1), self._offsets[batch])
        if batch in self._commits:
            return
        self._commits.add(batch)
        for found in (entry for task in tasks for entry in task.batches if entry.part == 0):
            if found.sequence != self.end:
                self._cluster.fail(f"{self.name} received {found.sequence} instead of {self.end}")
            self._end = found.sequence + 1

    def _after_repeats(self, sequence: int) -> int:
        while sequence in self._cluster.model.repeats:
            sequence += 1
        return sequence


def replay_with_spark(cluster: LogCluster) -> None:
    """Delete the checkpoints of queries that read again what the log keeps, or go on."""
    cluster.enable()
    followers = [SparkFollower(cluster, name) for name in cluster.names]
    for follower in followers:
        cluster.supervise(follower.name, follower.live, lambda: False)
    cluster.supervise("cron", lambda node: collect_garbage(cluster, node), lambda: False)
    actors = [PlainProducer(cluster, "plain", 60), TransactionalProducer(cluster, "app", 30)]
    run_services(cluster, list(actors))
    cluster.heal()
    until = cluster.simulation.now + DRAIN_S
    while any(follower.end < cluster.model.manifest.next_sequence for follower in followers):
        if cluster.simulation.now > until:
            cluster.fail(f"not read: {[(follower.name, follower.end) for follower in followers]}")
        cluster.director.sleep(10)
    cluster.replays = sum(follower.replays for follower in followers)
    cluster.continued = sum(follower.continued for follower in followers)


def test_a_query_without_its_checkpoint_reads_again_or_goes_on_without_a_gap(seed: int) -> None:
    assert simulate(seed, replay_with_spark).model.durable


def test_the_seeds_delete_checkpoints() -> None:
    clusters = [simulate(seed, replay_with_spark) for seed in (4, 5, 6)]
    assert sum(cluster.replays for cluster in clusters)
    assert sum(cluster.continued for cluster in clusters)


def test_a_reader_that_is_reset_misses_nothing_from_its_new_position_on(seed: int) -> None:
    assert simulate(seed, replay).model.durable


def test_each_reader_gets_everything_durable_once_and_in_order(seed: int) -> None:
    assert simulate(seed, follow).model.durable


def test_the_seeds_write_index_pages_and_collect_garbage() -> None:
    clusters = [simulate(seed, follow) for seed in (1, 2, 3)]
    assert any(cluster.model.pages for cluster in clusters)
    assert any(cluster.model.counts["collected"] for cluster in clusters)


def test_the_seeds_move_running_readers() -> None:
    assert any(simulate(seed, replay).seeks for seed in (1, 2, 3))
