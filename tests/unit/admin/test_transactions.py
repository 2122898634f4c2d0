"""Undecided transactions are listed, and ended in all partitions as their record says."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.target import Target
from opendata_buffer.admin.transactions import OpenTransaction, abort, list_open
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import InvalidInput, Superseded
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic, partition_config
from opendata_buffer.transactions import (
    Attempt,
    MarkerWriter,
    TransactionCoordinator,
    TransactionMarker,
)
from tests.unit.cli.shell import manifest_of

A, B, C = b"\1AAAAA", b"\1BBBBB", b"\1CCCCC"
NAMES = ["p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"]
CONFIG = QueueConfig(store="memory://transactions")
HOUR_MS = 3_600_000


class Deployment:
    """A topic of three partitions with several writers."""

    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.store = MemoryStore(now_ms=self.runtime.now_ms)
        self.topic = Topic.create(CONFIG, 3, store=self.store, runtime=self.runtime)
        self.scope = Target(self.store, CONFIG, self.runtime, self.topic)

    def queue(self, name: str) -> Queue:
        config = partition_config(name, CONFIG)
        claim = claim_for_writing(self.store, config, runtime=self.runtime)
        return Queue(self.store, config, runtime=self.runtime, role="test", claim=claim)

    def coordinator(self) -> TransactionCoordinator:
        return TransactionCoordinator(self.store, CONFIG, self.queue, self.runtime, ahead_ms=0)

    def write(
        self, producer: bytes, txn: Transaction | None, *names: str, age_ms: int = HOUR_MS
    ) -> Attempt:
        """Append two pending batches to each of these partitions."""
        metadata = (Metadata(0, self.runtime.now_ms() - age_ms),)
        for name in names:
            entries = []
            for clock in (2, 3):
                message = build_uuid(producer, clock, CONTINUE_TXN)
                location = batch_key(name, self.runtime.ulid(), txn, message)
                self.store.put(location, encode_batch([producer]))
                entries.append(NewEntry(location, metadata))
            self.queue(name).append(entries)
        return Attempt(txn or Transaction("none", 0), producer, dict.fromkeys(names, 4))

    def delivered(self, name: str) -> list[int]:
        rule, found = ReadCommitted(name), []
        for entry in manifest_of(self.store, f"{name}/manifest").entries():
            found += rule.offer(entry.sequence, entry.location, lambda begin, end: [])
        return found


@pytest.fixture
def deployment() -> Deployment:
    return Deployment()


def test_each_part_of_a_transaction_is_listed_with_the_batches_that_wait_for_it(
    deployment: Deployment,
) -> None:
    deployment.queue("p-00001-05mv").append([NewEntry("p-00001-05mv/x")])
    deployment.write(A, Transaction("orders", 7), "p-00000-04pn", "p-00001-05mv")
    deployment.queue("p-00001-05mv").append([NewEntry("p-00001-05mv/y")])
    deployment.write(B, None, "p-00002-0bvb", age_ms=1_500)
    whole = {
        "producer": A.hex(), "app": "orders", "batch": 7, "batches": 2, "last_clock": 3,
        "age_seconds": 3600.0,
    }  # fmt: skip
    assert list_open(deployment.scope) == [
        OpenTransaction(partition="p-00000-04pn", first_sequence=0, behind=2, **whole),  # type: ignore[arg-type]
        OpenTransaction(partition="p-00001-05mv", first_sequence=1, behind=3, **whole),  # type: ignore[arg-type]
        OpenTransaction(
            partition="p-00002-0bvb", producer=B.hex(), app=None, batch=None, first_sequence=0,
            last_clock=3, batches=2, behind=2, age_seconds=1.5,
        ),
    ]  # fmt: skip


def test_an_undecided_transaction_is_rolled_back_everywhere(deployment: Deployment) -> None:
    deployment.write(A, Transaction("orders", 7), *NAMES)
    listed = list_open(deployment.scope)
    assert abort(deployment.scope, A.hex()) == listed
    assert list_open(deployment.scope) == []
    assert [deployment.delivered(name) for name in NAMES] == [[], [], []]
    with pytest.raises(InvalidInput, match="no transaction of producer"):
        abort(deployment.scope, A.hex())


def test_a_transaction_that_the_record_names_is_completed_and_not_rolled_back(
    deployment: Deployment,
) -> None:
    coordinator, txn = deployment.coordinator(), Transaction("orders", 7)
    assert coordinator.begin(txn, None, NAMES)
    deployment.write(B, Transaction("orders", 6), "p-00002-0bvb")
    # The writer is killed after the decision and before it is applied.
    assert coordinator.decide(deployment.write(A, txn, "p-00000-04pn", "p-00001-05mv", age_ms=0))
    assert [each.committed for each in list_open(deployment.scope)] == [True, True, False]
    done = abort(deployment.scope, A.hex())
    assert [(each.partition, each.committed) for each in done] == [
        ("p-00000-04pn", True), ("p-00001-05mv", True), ("p-00002-0bvb", False),
    ]  # fmt: skip
    assert done[2].producer == B.hex()
    assert [deployment.delivered(name) for name in NAMES] == [[0, 1], [0, 1], []]


def test_a_live_writer_fails_after_its_transaction_was_ended(deployment: Deployment) -> None:
    coordinator, txn = deployment.coordinator(), Transaction("orders", 7)
    coordinator.begin(txn, None, NAMES)
    attempt = deployment.write(A, txn, *NAMES)
    abort(deployment.scope, A.hex())
    with pytest.raises(Superseded):
        coordinator.decide(attempt)
    assert [deployment.delivered(name) for name in NAMES] == [[], [], []]


def test_transactions_of_other_apps_are_not_touched(deployment: Deployment) -> None:
    deployment.write(A, Transaction("orders", 7), "p-00000-04pn")
    deployment.write(B, Transaction("bills", 7), "p-00000-04pn")
    deployment.write(C, None, "p-00000-04pn")
    abort(deployment.scope, A.hex())
    assert [each.producer for each in list_open(deployment.scope)] == [B.hex(), C.hex()]


def test_a_transaction_without_an_app_is_rolled_back_by_its_producer(
    deployment: Deployment,
) -> None:
    deployment.write(A, None, *NAMES)
    deployment.write(B, None, "p-00001-05mv")
    with pytest.raises(InvalidInput, match=r"has no name.*in some partitions and not in others"):
        abort(deployment.scope, A.hex())
    assert len(list_open(deployment.scope)) == 4
    assert len(abort(deployment.scope, A.hex(), force=True)) == 3
    assert [each.producer for each in list_open(deployment.scope)] == [B.hex()]
    assert [deployment.delivered(name) for name in NAMES] == [[], [], []]


def test_a_transaction_without_an_app_is_completed_if_one_partition_has_committed_it(
    deployment: Deployment,
) -> None:
    attempt = deployment.write(A, None, *NAMES)
    # Its publisher is killed after it has acknowledged one of the partitions.
    markers = MarkerWriter(
        deployment.store, CONFIG, deployment.queue, deployment.runtime, ahead_ms=0
    )
    markers.write({NAMES[0]: [TransactionMarker(A, attempt.intents[NAMES[0]])]})
    assert [each.committed for each in list_open(deployment.scope)] == [True, True]
    done = abort(deployment.scope, A.hex())
    assert [(each.partition, each.committed) for each in done] == [
        ("p-00001-05mv", True), ("p-00002-0bvb", True),
    ]  # fmt: skip
    assert [deployment.delivered(name) for name in NAMES] == [[0, 1], [0, 1], [0, 1]]


def test_a_young_transaction_is_not_ended_because_its_writer_may_be_running(
    deployment: Deployment,
) -> None:
    deployment.write(A, Transaction("orders", 7), "p-00000-04pn")
    deployment.write(A, Transaction("orders", 7), "p-00001-05mv", age_ms=10_000)
    with pytest.raises(InvalidInput, match=r"is 10 s old: its writer may be at work.*force=True"):
        abort(deployment.scope, A.hex())
    assert len(list_open(deployment.scope)) == 2
    assert len(abort(deployment.scope, A.hex(), force=True)) == 2


def test_transactions_of_one_partition_are_listed_but_cannot_be_ended_there(
    deployment: Deployment,
) -> None:
    deployment.write(A, Transaction("orders", 7), *NAMES)
    one = Target(deployment.store, partition_config("p-00001-05mv", CONFIG), deployment.runtime)
    assert [each.partition for each in list_open(one)] == ["p-00001-05mv"]
    with pytest.raises(InvalidInput, match="in all of them or in none"):
        abort(one, A.hex())
    assert len(list_open(deployment.scope)) == 3


def test_transactions_of_a_queue_are_listed_and_ended() -> None:
    runtime, store = ManualRuntime(), MemoryStore()
    scope = Target(store, CONFIG, runtime)
    with pytest.raises(InvalidInput, match="there is no queue"):
        list_open(scope)
    queue = Queue(store, CONFIG, runtime=runtime, role="test")
    queue.append([NewEntry(batch_key("ingest", runtime.ulid(), None, build_uuid(A, 2, 1)))])
    assert abort(scope, A.hex(), force=True)[0].partition == "ingest"
    assert list_open(scope) == []
