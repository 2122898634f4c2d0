"""Define the features of the product, and combine them in one deployment.

Each feature is one :class:`Feature` in :data:`FEATURES`. It declares the features it needs (an
expansion needs a topic), how it prepares the store, which programs it adds, and which step an
operator or the environment takes.

:func:`build` combines features: it applies all their entries to the same deployment, and adds a
default writer, and a default reader if no feature brings one. For example, "workers" with "expand"
creates a topic, starts workers on its partitions, and lets the operator expand the topic while they
run. To cover a new feature in every pair, add one entry.

The code refuses some pairs. An operator cannot trim a log, for example. :data:`REFUSALS` lists
these pairs with a call that tries them and the error that it must raise. A larger combination is
refused if any two of its features, or of the features they need, are.

A combination proves nothing about a feature that never acted. Each feature therefore counts its
actions in ``deployment.happened``, and the history fails if one of them did not happen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from opendata_buffer import Consumer
from opendata_buffer.admin.queue_check import Kind, check_queue, plan_repair, repair
from opendata_buffer.admin.readers import add_v1, enable_log, view_of
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.trimming import plan_trim, skip_batch, trim_queue
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer.place import Place
from opendata_buffer.errors import DataLoss, InvalidInput, OpenDataBufferError, StorageError
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.log import Log, OldIndex
from opendata_buffer.queue.log_index import LogIndex, index_key
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.queue.ownership import check_owner, claim_for_writing
from opendata_buffer.queue.reader_admin import enable_readers, reset_reader
from opendata_buffer.queue.reader_positions import readers_folder
from opendata_buffer.stores.base import Blob
from opendata_buffer.topic.topic import Topic
from tests.simulation.deployment import GRACE_S, ONE, TROUBLE, URL, Deployment, Node
from tests.simulation.oracle import record_of
from tests.simulation.programs import (
    PlainWriter,
    PythonReader,
    Reader,
    SparkReader,
    SparkSinkWriter,
    TransactionWriter,
    V1Client,
    V1LogReader,
    V1Reader,
    V1Writer,
    WorkerReader,
    host_brokers,
    run_collector,
    run_of,
)


@dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        prepare: Changes the deployment before it creates anything.
        begin: Runs after the store is ready, and before any program starts.
        writer: Creates a writer with this number.
        reader: Creates a reader with this number.
        step: One action of an operator or the environment. Returns False while it cannot act yet.
            The code that acts counts it in ``deployment.happened``.
    """

    name: str
    needs: tuple[str, ...] = ()
    prepare: Callable[[Deployment], None] = lambda deployment: None
    begin: Callable[[Deployment], None] = lambda deployment: None
    writer: Callable[[Deployment, int], Any] | None = None
    reader: Callable[[Deployment, int], Reader] | None = None
    step: Callable[[Deployment], bool] | None = None
    twice: bool = True
    """Whether two instances of the feature differ from one."""


# ---- shapes


def _topic(deployment: Deployment) -> None:
    deployment.is_topic = True


def _log(deployment: Deployment) -> None:
    deployment.is_log = True


def _foreign_layout(deployment: Deployment) -> None:
    """Store data and manifest in sibling folders, as OpenTelemetry's exporter documents."""
    deployment.prefix = "ingest/otel/logs/data"
    deployment.manifest_path = "ingest/otel/logs/manifest"


def _retention(deployment: Deployment) -> None:
    deployment.retention_ms = 40_000
    deployment.oracle.keep_s = 40.0
    deployment.quiet_s = max(deployment.quiet_s, 120.0)


def _expiry(deployment: Deployment) -> None:
    deployment.expiry_ms = 200 * 1000


def _broker(deployment: Deployment) -> None:
    deployment.broker = "auto"


def _wrong_clocks(deployment: Deployment) -> None:
    deployment.wrong_clocks = True


# ---- actions of an operator


def _expand(deployment: Deployment) -> bool:
    def run(node: Node) -> None:
        topic = Topic.open(URL, store=node.store, runtime=node.runtime)
        topic.expand(wanted)

    topic = Topic.open(URL, store=deployment.memory, runtime=deployment.director)
    wanted = len(topic.description.active) + 1
    if not deployment.is_log or len(deployment.programs) < 2:
        deployment.operate(run)
        return True
    # A stopped reader of a log must still get the records of the new partition,
    # also when all others have read it and the grace period is over.
    with deployment.without(deployment.programs[-1].program):
        deployment.operate(run)
        deployment.director.sleep(2 * GRACE_S)
    return True


def _drain(deployment: Deployment) -> bool:
    topic = Topic.open(URL, store=deployment.memory, runtime=deployment.director)
    active = topic.description.active
    if len(active) < 2:
        return False
    name = active[deployment.draw(len(active))]

    def run(node: Node) -> None:
        Topic.open(URL, store=node.store, runtime=node.runtime).drain(name)

    deployment.operate(run)
    return True


def _change_retention(deployment: Deployment) -> bool:
    deployment.retention_ms = 20_000 + deployment.draw(60_000)
    deployment.oracle.keep_s = min(deployment.oracle.keep_s, deployment.retention_ms / 1000)

    def run(node: Node) -> None:
        for name in deployment.names():
            enable_log(deployment.target(node).queue(name), retention_ms=deployment.retention_ms)

    deployment.operate(run)
    return True


def _named_readers(deployment: Deployment) -> list[Reader]:
    found: list[Reader] = deployment.programs
    return [reader for reader in found if isinstance(reader, PythonReader)]


def _reset(deployment: Deployment) -> bool:
    """Move a reader back or forward in one partition."""
    readers = _named_readers(deployment)
    reader = readers[deployment.draw(len(readers))]
    names = deployment.names()
    partition = names[deployment.draw(len(names))]
    share = deployment.uniform(0, 1)

    def run(node: Node) -> tuple[int, int] | None:
        queue = deployment.target(node).queue(partition)
        view = view_of(queue)
        at = view.first_sequence + int(share * (view.next_sequence - view.first_sequence + 1))
        try:
            position = reset_reader(view, reader.reader, at)
        except (InvalidInput, DataLoss) as error:
            deployment.log(f"not reset: {error}")
            return None
        return position.next, position.epoch

    found = deployment.operate(run)
    if found is None:
        return False
    sequence, epoch = found
    deployment.oracle.moved(reader.view, partition, sequence, run_of(epoch))
    return True


def _seek(deployment: Deployment) -> bool:
    """Let a running reader move itself back or forward in one partition."""
    readers = _named_readers(deployment)
    reader = readers[deployment.draw(len(readers))]
    assert isinstance(reader, PythonReader)
    names = deployment.names()
    before = reader.seeks
    reader.wanted = (names[deployment.draw(len(names))], deployment.uniform(0, 1))
    for _ in range(20):
        deployment.director.sleep(1)
        if reader.seeks > before:
            return True
    reader.wanted = None
    return False


def _note_expired(deployment: Deployment) -> None:
    """Note the named readers that some log no longer has. An error must name what they lose."""
    for name in deployment.names():
        config = deployment.config(QueueConfig, name)
        index = Log(deployment.memory, config, deployment.director).read()
        for reader in _named_readers(deployment):
            if index is not None and reader.reader not in index.readers:
                deployment.oracle.readers[reader.view].expired = True


def _expire(deployment: Deployment) -> bool:
    """Stop one reader for longer than the expiry of readers."""
    views = deployment.oracle.readers
    readers = [reader for reader in _named_readers(deployment) if not views[reader.view].expired]
    if not readers or not views[readers[-1].view].got:
        return False
    reader = readers[-1]
    views[reader.view].expired = True
    with deployment.without(reader.program):
        for _ in range(20):  # no collector works while its clock is wrong
            deployment.director.sleep(deployment.expiry_ms / 2000)
            for name in deployment.names():
                config = deployment.config(QueueConfig, name)
                index = Log(deployment.memory, config, deployment.director).read()
                if index is not None and reader.reader not in index.readers:
                    return True
    return False


def _trim(deployment: Deployment) -> bool:
    """Drop the queued batches of one partition. Their copies stay in the quarantine."""
    with deployment.readers_held():
        names = deployment.names()
        partition = names[deployment.draw(len(names))]
        latest = deployment.chance(0.5)

        def run(node: Node) -> bool:
            queue = deployment.target(node).queue(partition)
            try:
                manifest = queue.reader().manifest()
                middle = (manifest.first_sequence + manifest.next_sequence + 1) // 2
                plan = plan_trim(queue, Place("latest") if latest else Place("n", middle))
            except InvalidInput as error:
                deployment.log(f"not trimmed: {error}")
                return False
            if not plan.dropped:
                return False
            for entry in plan.dropped:
                records = deployment.oracle.batches.get(entry.location, [])
                deployment.oracle.give_up(records)
            trim_queue(queue, plan)
            return True

        return deployment.operate(run, crashes=False)


def _waiting(deployment: Deployment) -> tuple[str, int, str] | None:
    """Return partition, sequence, and location of the newest queued batch with records."""
    for name in deployment.names():
        config = deployment.config(QueueConfig, name)
        try:
            manifest = read_manifest(deployment, config)
        except StorageError:
            continue
        for entry in reversed(manifest.entries()):
            if deployment.oracle.batches.get(entry.location):
                return name, entry.sequence, entry.location
    return None


def read_manifest(deployment: Deployment, config: QueueConfig) -> Manifest:
    """Return the manifest that the store holds now."""
    blob = deployment.memory.get(config.manifest_path)
    assert isinstance(blob, Blob)
    return Manifest.parse(blob.data)


def _destroy(deployment: Deployment, location: str, *, cut: bool) -> None:
    """Delete an object, or damage its bytes."""
    records = deployment.oracle.batches[location]
    deployment.oracle.may_lose(records)
    if cut:
        deployment.memory.put(location, b"damaged")
    else:
        deployment.memory.delete_many([location])
    deployment.oracle.damaged.add(location)


def _quarantine(deployment: Deployment) -> bool:
    """Damage a queued batch. An operator skips it, or the readers of a log quarantine it."""
    with deployment.readers_held():
        found = _waiting(deployment)
        if found is None:
            return False
        partition, sequence, location = found
        _destroy(deployment, location, cut=True)
        if deployment.is_log:
            return True

        def run(node: Node) -> bool:
            try:
                skip_batch(deployment.target(node).queue(partition), sequence)
            except InvalidInput as error:
                deployment.log(f"not skipped: {error}")
                return False
            return True

        deployment.operate(run)
        # The command and its report name it.
        deployment.oracle.give_up(deployment.oracle.batches[location])
        return True


# ---- disasters


def _fsck_repair(deployment: Deployment, partition: str, *, expects: bool) -> None:
    """Run ``fsck --repair`` until there is nothing left to repair."""

    def check(node: Node) -> list[str]:
        return [
            str(problem)
            for problem in check_queue(deployment.target(node).queue(partition)).problems
        ]

    problems = deployment.operate(check, crashes=False)
    if expects and not problems:
        deployment.fail("fsck says that all is well, although an old object was put back")

    def run(node: Node) -> None:
        queue = deployment.target(node).queue(partition)
        for _ in range(4):
            plan, _ = plan_repair(check_queue(queue), queue.name)
            if not plan:
                return
            repair(queue, plan)

    deployment.operate(run)
    deployment.log(f"repaired {problems}")


def _refuses(deployment: Deployment, partition: str) -> None:
    """Check that a consumer raises an error before the repair."""

    def read(node: Node) -> str:
        config = deployment.consumer_config(
            partition, reader="probe" if deployment.is_log else "", create_if_missing=False
        )
        try:
            consumer = Consumer(config, store=node.store, runtime=node.runtime)
        except TROUBLE:
            raise
        except OpenDataBufferError as error:
            return str(error)
        consumer.close()
        return ""

    if not deployment.operate(read, crashes=False):
        deployment.fail(f"a consumer of {partition!r} starts although its queue was damaged")


def _accept_loss(deployment: Deployment) -> None:
    """Let consumers start without a position, as the docs demand after a repair."""
    deployment.oracle.repeats_allowed = True
    for reader in deployment.programs:
        reader.accepts_loss = True


def _rebuild(deployment: Deployment) -> bool:
    """Delete the manifest, and let ``fsck --repair`` rebuild it from the batches."""
    found = _waiting(deployment)
    partition = found[0] if found else deployment.names()[0]
    config = deployment.config(QueueConfig, partition)
    with deployment.maintenance():
        raw = deployment.memory.get(config.manifest_path)
        assert isinstance(raw, Blob)
        if _seen(deployment, config) is None or Manifest.parse(raw.data).sealed:
            return False
        deployment.memory.delete_many([config.manifest_path])
        _refuses(deployment, partition)
        _accept_loss(deployment)
        _fsck_repair(deployment, partition, expects=True)
        _keep_retention(deployment)
    return True


def _seen(deployment: Deployment, config: QueueConfig) -> Any:
    claim = check_owner(deployment.memory, config, runtime=deployment.director)
    return None if claim is None else claim.watermark


def _keep_retention(deployment: Deployment) -> None:
    """Set the retention again, because a rebuilt index keeps everything."""
    if not deployment.is_log:
        return

    def run(node: Node) -> None:
        for name in deployment.names():
            queue = deployment.target(node).queue(name)
            if Log(node.store, queue.config, node.runtime).read() is not None:
                _enable(deployment, node, queue)

    deployment.operate(run)


def _enable(deployment: Deployment, node: Node, queue: Target) -> None:
    """Set the retention of a log, and an expiry that is shorter than operators may choose."""
    enable_readers(
        node.store,
        queue.config,
        claim_for_writing(node.store, queue.config, runtime=node.runtime),
        node.runtime,
        retention_ms=deployment.retention_ms,
        reader_expiry_ms=deployment.expiry_ms,
    )


def _repair(deployment: Deployment) -> bool:
    """Lose a batch of a queue, or the index of a log, and let ``fsck --repair`` repair it."""
    with deployment.readers_held():
        found = _waiting(deployment)
        if found is None:
            return False
        partition, _, location = found
        config = deployment.config(QueueConfig, partition)
        with deployment.maintenance():
            if deployment.is_log:
                deployment.memory.delete_many([index_key(config)])
                _refuses(deployment, partition)
                _accept_loss(deployment)
            else:
                _destroy(deployment, location, cut=False)
            _fsck_repair(deployment, partition, expects=True)
            _keep_retention(deployment)
            if deployment.is_log:
                _note_expired(deployment)
            if not deployment.is_log:
                deployment.oracle.give_up(deployment.oracle.batches[location])
    return True


class Backup:
    """An operator's copies of some objects, which are restored later."""

    def __init__(self) -> None:
        self.copies: dict[str, bytes] = {}

    def save(self, deployment: Deployment, keys: Iterable[str]) -> None:
        """Copy these objects in their current state."""
        for key in keys:
            with suppress(StorageError):
                blob = deployment.memory.get(key)
                assert isinstance(blob, Blob)
                self.copies[key] = blob.data

    def restore(self, deployment: Deployment, key: str) -> None:
        """Write one copy back without any check."""
        deployment.memory.put(key, self.copies[key])
        deployment.log(f"an old {key} is put back")


def _backup(deployment: Deployment, what: str) -> Backup:
    backups: dict[str, Backup] = deployment.backups
    return backups.setdefault(what, Backup())


def _restore_manifest(deployment: Deployment) -> bool:
    backup = _backup(deployment, "manifest")
    configs = {name: deployment.config(QueueConfig, name) for name in deployment.names()}
    if not backup.copies:
        backup.save(deployment, (config.manifest_path for config in configs.values()))
        return False
    for name, config in configs.items():
        old = backup.copies.get(config.manifest_path)
        if old is None or read_manifest(deployment, config).sealed:
            continue
        with deployment.maintenance():
            seen = _seen(deployment, config)
            if seen is None or seen.allows(Manifest.parse(old)):
                continue  # The marker lags: this copy is not known to be old.
            backup.restore(deployment, config.manifest_path)
            _refuses(deployment, name)
            _accept_loss(deployment)
            _fsck_repair(deployment, name, expects=True)
        backup.copies.clear()
        return True
    return False


def _restore_index(deployment: Deployment) -> bool:
    backup = _backup(deployment, "index")
    configs = {name: deployment.config(QueueConfig, name) for name in deployment.names()}
    if not backup.copies:
        backup.save(deployment, (index_key(config) for config in configs.values()))
        return False
    for name, config in configs.items():
        old = backup.copies.get(index_key(config))
        index = Log(deployment.memory, config, deployment.director).read()
        if old is None or index is None:
            continue
        if LogIndex.from_json(old).end >= index.end:
            continue
        with deployment.maintenance():
            backup.restore(deployment, index_key(config))
            _refuses(deployment, name)
            _accept_loss(deployment)
            _fsck_repair(deployment, name, expects=True)
            _keep_retention(deployment)
        backup.copies.clear()
        return True
    return False


def _restore_sidecars(deployment: Deployment) -> bool:
    """Restore old owner markers, positions, claims, cursors, and commit records."""
    backup = _backup(deployment, "sidecars")
    configs = [deployment.config(QueueConfig, name) for name in deployment.names()]
    if not backup.copies:
        keys = []
        for config in configs:
            prefix = config.data_path_prefix
            keys += [f"{prefix}/_claims.json", f"{prefix}/_gc.json", owner_key(prefix)]
            keys += [f"{prefix}/_consumer.json", f"{prefix}/_acknowledged.json"]
            keys += [info.key for info in deployment.memory.list(readers_folder(config)).objects]
        keys += [
            info.key
            for info in deployment.memory.list("").objects
            if info.key.endswith("/_commit.json")
        ]
        backup.save(deployment, keys)
        return False
    with deployment.maintenance():
        for key in backup.copies:
            backup.restore(deployment, key)
        _accept_loss(deployment)
    backup.copies.clear()
    return True


# ---- other clients


def _v1_consumer(deployment: Deployment) -> bool:
    """Let a v1 consumer remove entries of a log, and its collector delete objects.

    One reader is down for longer than the grace period, so it still needs the deleted objects.
    """
    names = deployment.names()
    partition = names[deployment.draw(len(names))]
    node = deployment.node("v1-rogue")
    done = {"taken": 0, "deleted": 0}

    def take() -> None:
        client = V1Client(deployment, node, partition)
        with suppress(*TROUBLE):
            client.claim()
            manifest, _ = client.read()
            if manifest.entry_count and deployment.chance(0.5):
                most = min(manifest.entry_count, 1 + deployment.draw(3))
                taken = client.take(manifest.first_sequence + most - 1)
                for _, location in taken:
                    deployment.oracle.may_lose(deployment.oracle.batches.get(location, []))
                done["taken"] += len(taken)
            done["deleted"] += client.collect()

    with deployment.without(deployment.programs[-1].program):
        deployment.director.sleep(1.5 * GRACE_S)
        node.runtime.spawn(take, "main").join()
        _note_expired(deployment)
        if done["deleted"]:
            _notices(deployment, partition)
    deployment.happened["deleted by a v1 collector"] += done["deleted"]
    return sum(done.values()) > 0


def _notices(deployment: Deployment, partition: str) -> None:
    """Check that ``fsck`` reports each batch of a log whose object was deleted."""
    config = deployment.config(QueueConfig, partition)
    log = Log(deployment.memory, config, deployment.director)
    try:
        index = log.need()
        view = LogView.of(log, index, read_manifest(deployment, config))
    except OldIndex:
        # The entries that the v1 consumer removed are in a segment of a mover that lost its race.
        # All programs stop until the repair has found them there.
        with deployment.maintenance():
            _accept_loss(deployment)
            _fsck_repair(deployment, partition, expects=True)
            _keep_retention(deployment)
            # The rebuilt index leaves out a reader whose next batches are gone (failure F44).
            _note_expired(deployment)
        index = log.need()
        view = LogView.of(log, index, read_manifest(deployment, config))
    entries = view.entries(view.first_sequence, view.next_sequence - view.first_sequence)
    gone = sum(entry.location in deployment.oracle.deleted for entry in entries)

    def check(node: Node) -> int:
        problems = check_queue(deployment.target(node).queue(partition)).problems
        return sum(problem.count for problem in problems if problem.kind is Kind.MISSING)

    found = deployment.operate(check, crashes=False)
    if found < gone:
        deployment.fail(f"fsck finds {found} batches that are gone, and {gone} are")


def _misconfigured(deployment: Deployment) -> None:
    """Start a program of ours that has only the data prefix of another client's layout.

    It must not delete the other client's batches as garbage.
    """
    writer = V1Writer(deployment, 0)
    node = deployment.node("exporter")

    def export() -> None:
        run = node.runtime.ulid()
        for number in range(1, 4):
            record = record_of(node.name, number)
            with suppress(*TROUBLE):
                writer.append(node, ONE, run, number, record)

    node.runtime.spawn(export, "main").join()
    program = deployment.node("misconfigured")

    def live() -> None:
        config = ConsumerConfig(
            store=URL,
            data_path_prefix=deployment.prefix,
            create_if_missing=True,
            gc=deployment.gc(),
        )
        try:
            consumer = deployment.patiently(
                program, lambda: Consumer(config, store=program.store, runtime=program.runtime)
            )
        except InvalidInput as error:
            deployment.log(f"{program.name}: {error}")
            deployment.happened["foreign layouts refused"] += 1
            return
        program.runtime.sleep(3 * GRACE_S)
        with suppress(OpenDataBufferError):
            consumer.close()

    program.runtime.spawn(live, "main").join()
    deployment.happened["foreign layouts"] += 1


def _v1_reader(deployment: Deployment, number: int) -> Reader:
    return V1Reader(deployment, number)


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("single queue", twice=False),
        Feature("topic", prepare=_topic, twice=False),
        Feature("expand", needs=("topic",), step=_expand),
        Feature("drain", needs=("topic",), step=_drain),
        Feature("log", prepare=_log, twice=False),
        Feature("named readers", needs=("log",), reader=PythonReader),
        Feature("reset", needs=("named readers",), step=_reset),
        Feature("seek", needs=("named readers",), step=_seek),
        Feature("retention", needs=("log",), prepare=_retention, step=_change_retention),
        Feature("expiry", needs=("named readers",), prepare=_expiry, step=_expire),
        Feature("transactions", writer=TransactionWriter),
        Feature(
            "read-committed",
            needs=("transactions",),
            reader=partial(PythonReader, isolation="read_committed"),
        ),
        Feature("workers", reader=WorkerReader, prepare=_broker),
        Feature("broker", prepare=_broker),
        Feature("Spark source", reader=SparkReader),
        Feature("Spark sink", writer=SparkSinkWriter),
        Feature("quarantine", step=_quarantine),
        Feature("trim", step=_trim),
        Feature("repair", step=_repair),
        Feature("rebuild", step=_rebuild),
        Feature("v1 producers", writer=V1Writer),
        Feature("v1 consumers"),
        Feature("v1 readers", needs=("log",), reader=V1LogReader),
        Feature("foreign layouts", prepare=_foreign_layout, begin=_misconfigured, twice=False),
        Feature("restored manifest", step=_restore_manifest),
        Feature("restored index", needs=("log",), step=_restore_index),
        Feature("restored sidecars", step=_restore_sidecars),
        Feature("clock faults", prepare=_wrong_clocks),
    )
}


def with_needs(names: Iterable[str]) -> list[str]:
    """Return the features and all the features they need, in the order of the table."""
    found = set(names)
    while needed := {n for name in found for n in FEATURES[name].needs} - found:
        found |= needed
    return [name for name in FEATURES if name in found]


# ---- combinations that the code refuses


def _create_topic_here(deployment: Deployment, node: Node) -> None:
    Topic.create(URL, 2, store=node.store, runtime=node.runtime)


def _open_topic_here(deployment: Deployment, node: Node) -> None:
    Topic.open(URL, store=node.store, runtime=node.runtime)


def _trim_log(deployment: Deployment, node: Node) -> None:
    enable_log(deployment.target(node).queue(deployment.names()[0]))
    plan_trim(deployment.target(node).queue(deployment.names()[0]), Place("latest"))


def _open_topic_elsewhere(deployment: Deployment, node: Node) -> None:
    config = ConsumerConfig(
        store=URL, data_path_prefix="ingest/otel/logs/data", manifest_path="ingest/otel/manifest"
    )
    Topic.open(config, store=node.store, runtime=node.runtime)


def _add_v1_reader(deployment: Deployment, node: Node) -> None:
    add_v1(deployment.target(node), "other", "other", Place("earliest"))


@dataclass(frozen=True)
class Refusal:
    """Two features that exclude each other: ``tried`` raises InvalidInput where ``present`` is."""

    present: str
    tried: str
    attempt: Callable[[Deployment, Node], None]
    says: str
    because: str


REFUSALS = (
    Refusal(
        "single queue", "topic", _create_topic_here, "queue",
        "a store holds a queue or a topic: readers of the topic would not see the queue",
    ),
    Refusal("single queue", "expand", _open_topic_here, "there is no topic", "only a topic grows"),
    Refusal(
        "single queue", "drain", _open_topic_here, "there is no topic",
        "only a topic has partitions that can leave",
    ),
    Refusal(
        "log", "trim", _trim_log, "is a log",
        "a log deletes what its readers have acknowledged; `readers reset` moves a reader on",
    ),
    Refusal(
        "topic", "v1 readers", _add_v1_reader, "is a topic",
        "a v1 consumer reads one manifest, and cannot follow partitions that come and leave",
    ),
    Refusal(
        "topic", "foreign layouts", _open_topic_elsewhere, "data_path_prefix",
        "a partition's name is its data prefix, and its manifest lies in it",
    ),
)  # fmt: skip


def refusal_of(names: Iterable[str]) -> Refusal | None:
    """Return why the code refuses a combination, or None if it is simulated."""
    whole = set(with_needs(names))
    for refusal in REFUSALS:
        if {refusal.present, refusal.tried} <= whole:
            return refusal
    return None


def pairs() -> list[tuple[str, str]]:
    """Return all pairs, including each feature with itself."""
    return [*itertools.combinations_with_replacement(FEATURES, 2)]


def triples() -> list[tuple[str, ...]]:
    """Return all combinations of three features."""
    return [*itertools.combinations(FEATURES, 3)]


# ---- a history of a combination


def prepare(deployment: Deployment, whole: Sequence[str]) -> None:
    """Choose the shape of the deployment."""
    if not {"topic", "single queue", "foreign layouts", "v1 readers"} & {*whole}:
        deployment.is_topic = deployment.seed % 2 == 1
    if "drain" in whole:
        deployment.partitions = 3
    for name in whole:
        FEATURES[name].prepare(deployment)


def build(deployment: Deployment, names: Sequence[str]) -> None:
    """Create the deployment that the features need. Call it inside the simulation."""
    whole = with_needs(names)
    counts: Mapping[str, int] = {name: max(1, [*names].count(name)) for name in whole}
    prepare(deployment, whole)
    if "foreign layouts" not in whole:
        deployment.create()
    readers = _make_readers(deployment, whole, counts)
    deployment.programs = readers
    for name in whole:
        FEATURES[name].begin(deployment)
    if "foreign layouts" in whole:
        deployment.create()
    if deployment.is_log:
        _make_logs(deployment, readers)
    writers: list[Any] = [PlainWriter(deployment, 0)]
    for name in whole:
        make = FEATURES[name].writer
        if make is not None:
            writers += [make(deployment, number) for number in range(counts[name])]
    if "v1 consumers" in whole and deployment.is_log:
        deployment.script += [("v1 consumers", partial(_v1_consumer, deployment))] * counts[
            "v1 consumers"
        ]
    for name in whole:
        step = FEATURES[name].step
        if step is not None:
            deployment.script += [(name, partial(step, deployment))] * counts[name]
    for writer in writers:
        writer.start()
    for reader in readers:
        reader.start()
    deployment.keep_alive("collector", partial(run_collector, deployment))
    if "broker" in whole:
        for number in range(counts["broker"]):
            deployment.keep_alive(f"host{number}", partial(host_brokers, deployment))
    for name in whole:
        if name in ("single queue", "topic", "log", "broker", "clock faults"):
            deployment.happened[name] += counts[name]


def _make_readers(
    deployment: Deployment, whole: Sequence[str], counts: Mapping[str, int]
) -> list[Reader]:
    made: list[Reader] = []
    for name in whole:
        make = FEATURES[name].reader
        if name == "v1 consumers" and not deployment.is_log:
            make = _v1_reader
        if make is None:
            continue
        count = counts[name]
        if name in ("named readers", "read-committed") and {"reset", "seek"} & {*whole}:
            make = partial(make, keeps_position=False)
        if name == "named readers":
            count += 1  # one must still receive the batches that the other has acknowledged
        made += [make(deployment, len(made) + number) for number in range(count)]
    if made:
        return made
    return [PythonReader(deployment, number) for number in range(1 + deployment.is_log)]


def _make_logs(deployment: Deployment, readers: Sequence[Reader]) -> None:
    """Turn all partitions into logs, and register the readers before anything is collected."""

    def run(node: Node) -> None:
        for name in deployment.names():
            queue: Target = deployment.target(node).queue(name)
            _enable(deployment, node, queue)
            for reader in readers:
                reader.register(queue)

    deployment.operate(run, crashes=False)
