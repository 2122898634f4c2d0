"""Messages outside of transactions: one producer, whose clock rises over all partitions."""

from __future__ import annotations

from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.messages.message_ids import OUTSIDE_TXN, parse_uuid
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.publisher import Outside
from opendata_buffer.topic.topic import Topic
from opendata_buffer.topic.transaction import Endings
from tests.unit.topic.world import WAIT_S, producing

A = b"\1AAAAA"
NAMES = ("p-00000", "p-00001")


def test_messages_have_rising_clocks_and_after_the_goodbye_readers_remember_nobody() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    outside, handles = Outside(A), []
    outside.at(1_767_225_600_000)
    for name in NAMES:
        with Producer(Topic.config_of(name, producing()), store=store) as producer:
            handles += [outside.accept(name, producer, producer.prepare([b"x"])) for _ in range(2)]
    found = []
    for handle in handles:
        location = handle.watcher.await_durable(WAIT_S).location
        parsed = parse_location(location, location.split("/")[0])
        assert parsed is not None
        assert parsed.message is not None
        assert parsed.txn is None
        found.append(parse_uuid(parsed.message))
    assert {(each.producer, each.flags) for each in found} == {(A, OUTSIDE_TXN)}
    clocks = [each.clock for each in found]
    assert clocks == list(range(clocks[0], clocks[0] + 4))

    endings = Endings(store, producing(), runtime)
    outside.say_goodbye(endings)
    for name in NAMES:
        manifest = endings.queue(name).read()
        assert manifest is not None
        rule = ReadCommitted(name)
        delivered = [
            rule.offer(sequence, location, lambda begin, end: [])
            for sequence, location in enumerate(manifest.locations())
        ]
        assert delivered == [[0], [1], []]
        assert "producers" not in rule.to_dict()
