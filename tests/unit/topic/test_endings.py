"""Acknowledgements in many partitions, each written where it is wanted and nowhere else."""

from __future__ import annotations

from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages.message_ids import (
    ACK_TXN,
    CONTINUE_TXN,
    FINAL,
    OUTSIDE_TXN,
    build_uuid,
)
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.transaction import Endings
from tests.unit.topic.world import producing

A = b"\1AAAAA"
RUNTIME = SystemRuntime()
NAMES = ["p-00000", "p-00001"]


def wrote(endings: Endings, name: str, clock: int, flags: int) -> None:
    message = build_uuid(A, clock, flags)
    endings.queue(name).append([NewEntry(batch_key(name, RUNTIME.ulid(), None, message))])


def flags_in(endings: Endings, name: str) -> list[str]:
    manifest = endings.queue(name).read()
    assert isinstance(manifest, Manifest)
    return [each.split("=")[1].split("/")[0] for each in manifest.locations()]


def test_a_transaction_is_ended_once_and_only_where_it_is_undecided() -> None:
    endings = Endings(MemoryStore(), producing(), RUNTIME)
    wrote(endings, "p-00000", 2, CONTINUE_TXN)
    wrote(endings, "p-00001", 2, OUTSIDE_TXN)
    for _ in range(2):
        endings.settle(A, {"p-00000": 3, "p-00001": 3}, None, {"p-00000": 0})
    assert flags_in(endings, "p-00000")[1:] == [str(build_uuid(A, 3, ACK_TXN | FINAL))]
    assert len(flags_in(endings, "p-00001")) == 1


def test_after_a_goodbye_readers_remember_nobody() -> None:
    endings = Endings(MemoryStore(), producing(), RUNTIME)
    for name in NAMES:
        wrote(endings, name, 2, OUTSIDE_TXN)
    endings.say_goodbye(A, 3, NAMES)
    for name in NAMES:
        manifest = endings.queue(name).read()
        assert manifest is not None
        rule = ReadCommitted(name)
        for sequence, location in enumerate(manifest.locations()):
            rule.offer(sequence, location, lambda begin, end: [])
        assert manifest.entry_count == 2
        assert "producers" not in rule.to_dict()
