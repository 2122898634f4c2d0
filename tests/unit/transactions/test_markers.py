from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import PermanentStorageError, QueueFull, TransientStorageError
from opendata_buffer.formats.batch import Transaction, batch_key, decode_batch, parse_location
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, FINAL, build_uuid, parse_uuid, undecided
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.transactions import (
    ROLL_BACK,
    MarkerWriter,
    TransactionMarker,
    undecided_markers,
)
from tests.support.tuned import tuned
from tests.unit.producer.in_memory import Scripted
from tests.unit.scripted import ScriptedStore, applied_answer_lost, before

PREFIX = "p-00000"
CONFIG = QueueConfig(store="memory://x", data_path_prefix=PREFIX)
ME, OTHER = b"\x01" * 6, b"\x03" * 6


class PartitionFixture:
    def __init__(self, store: MemoryStore | None = None) -> None:
        self.runtime = ManualRuntime()
        self.store = store or MemoryStore(now_ms=self.runtime.now_ms)

    @property
    def queue(self) -> Queue:
        return Queue(self.store, CONFIG, runtime=self.runtime, role="test")

    @property
    def manifest(self) -> Manifest:
        return self.queue.read() or Manifest.empty()

    def write(self, producer: bytes, *clocks: int, app: str = "q") -> int:
        messages = [build_uuid(producer, clock, CONTINUE_TXN) for clock in clocks]
        txn, ulid = Transaction(app, 7), self.runtime.ulid
        entries = [NewEntry(batch_key(PREFIX, ulid(), txn, each)) for each in messages]
        return self.queue.append(entries, read_first=True)

    def end(self, *markers: TransactionMarker, queue: Queue | None = None) -> int:
        own = queue or self.queue
        writer = MarkerWriter(self.store, CONFIG, lambda name: own, self.runtime, ahead_ms=600_000)
        return writer.write({PREFIX: markers})

    def undecided(self) -> set[bytes]:
        return set(undecided(enumerate(self.manifest.locations()), PREFIX))


@pytest.mark.parametrize("clock", [4, ROLL_BACK])
def test_an_undecided_transaction_is_ended_once(clock: int) -> None:
    fixture = PartitionFixture()
    fixture.write(ME, 2, 3)
    assert fixture.end(TransactionMarker(ME, clock, Transaction("q", 7))) == 1
    assert fixture.end(TransactionMarker(ME, clock, Transaction("q", 7))) == 0
    last = fixture.manifest.entries()[-1]
    assert fixture.manifest.next_sequence == 3
    named: Any = parse_location(last.location, PREFIX)
    assert named.txn == Transaction("q", 7)
    message = parse_uuid(named.message)
    assert (message.producer, message.clock, message.flags) == (ME, clock, ACK_TXN | FINAL)
    assert decode_batch(fixture.store.get(last.location).data) == []
    assert named.timestamp_ms == fixture.runtime.now_ms() + 600_000, "no collector deletes it"


def test_only_undecided_transactions_are_ended_and_in_one_write() -> None:
    store = ScriptedStore()
    fixture = PartitionFixture(store)
    third, never = b"\x05" * 6, b"\x07" * 6
    for producer in (ME, OTHER, third):
        fixture.write(producer, 2)
    fixture.end(TransactionMarker(OTHER, ROLL_BACK))
    puts = store.puts
    roll_backs = [TransactionMarker(each, ROLL_BACK) for each in (OTHER, third, never)]
    assert fixture.end(TransactionMarker(ME, 3), *roll_backs) == 2
    assert store.puts == puts + 1
    assert fixture.undecided() == set()


def test_a_lost_answer_does_not_end_a_transaction_twice() -> None:
    store = ScriptedStore()
    fixture = PartitionFixture(store)
    fixture.write(ME, 2)
    store.script = [applied_answer_lost]
    assert fixture.end(TransactionMarker(ME, 3)) == 1
    assert fixture.manifest.next_sequence == 2


def test_another_process_may_end_the_transaction_between_the_read_and_the_write() -> None:
    store = ScriptedStore()
    fixture = PartitionFixture(store)
    fixture.write(ME, 2)
    queue = fixture.queue
    queue.read()
    ended: list[int] = []
    store.script = [
        before(
            ScriptedStore.really_put_if,
            lambda _: ended.append(fixture.end(TransactionMarker(ME, 3))),
        )
    ]
    assert fixture.end(TransactionMarker(ME, 3), queue=queue) == 0
    assert ended == [1]
    assert fixture.manifest.next_sequence == 2


def test_a_producer_that_only_a_payload_names_is_ignored() -> None:
    fixture = PartitionFixture()
    payload = f"x-{ME.hex()}/y".encode()
    fixture.queue.append([NewEntry(f"{PREFIX}/a", (Metadata(0, 5, payload),))])
    assert undecided_markers(fixture.manifest, PREFIX, [TransactionMarker(ME, 4)]) == ()


def test_a_put_is_retried_only_while_errors_are_transient_and_time_is_left() -> None:
    store = Scripted(*[TransientStorageError("503")] * 3)
    markers = MarkerWriter(store, CONFIG, lambda name: None, ManualRuntime(), ahead_ms=0)
    markers.prepare(PREFIX, TransactionMarker(ME, 4))
    assert len(store.list("").objects) == 1
    store.errors = [PermanentStorageError("access denied"), TransientStorageError("503")]
    with pytest.raises(PermanentStorageError):
        markers.prepare(PREFIX, TransactionMarker(OTHER, 4))
    assert len(store.errors) == 1


def test_f35_a_full_manifest_takes_the_acknowledgement_that_lets_it_be_emptied() -> None:
    fixture = PartitionFixture()
    fixture.write(ME, 2)
    full = tuned(type(CONFIG), **vars(CONFIG), max_manifest_bytes=fixture.manifest.size)
    queue = Queue(fixture.store, full, runtime=fixture.runtime, role="test")
    with pytest.raises(QueueFull):
        queue.append([NewEntry(f"{PREFIX}/{fixture.runtime.ulid()}.batch")])
    assert fixture.end(TransactionMarker(ME, 3), queue=queue) == 1
    assert fixture.undecided() == set()
