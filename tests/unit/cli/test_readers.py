"""Where ``consume`` takes batches from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.start import Start
from opendata_buffer.cli.readers import ObservedPartition, ObservingReader, ObservingTopic
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.errors import DataLoss, QueueReset
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.consumer import TopicArrowBatch
from opendata_buffer.topic.topic import Topic
from tests.unit.cli.shell import fill, ok, topic_of


def manifest(first: int, last: int) -> Manifest:
    made = Manifest.empty().append([NewEntry(f"ingest/{n}.batch") for n in range(last + 1)])
    return made.drop_through(first - 1) if first else made


def observing(read: Callable[[], Manifest], after: int | None = None) -> ObservingReader:
    store = MemoryStore()
    for n in range(6):
        store.put(f"ingest/{n}.batch", encode_batch([]))
    handle = FetchHandle(store, data_path_prefix="ingest")
    return ObservingReader(read, "m", handle, SystemRuntime(), after)


def sequences(peek: ObservingReader, limit: int = 100) -> list[int]:
    return [each.sequence for each in peek.read(limit)]


def test_peek_walks_the_queue_once() -> None:
    peek = observing(lambda: manifest(2, 5))
    assert sequences(peek, 3) == [2, 3, 4]
    assert sequences(peek, 3) == [5]
    assert sequences(peek, 3) == []


def test_peek_starts_after_a_sequence() -> None:
    assert sequences(observing(lambda: manifest(2, 5), 3)) == [4, 5]
    assert sequences(observing(lambda: manifest(2, 5), 1)) == [2, 3, 4, 5]
    assert sequences(observing(lambda: manifest(2, 5), 5)) == []


def test_peek_sees_what_is_appended_later() -> None:
    now = manifest(0, 1)
    peek = observing(lambda: now)
    assert sequences(peek) == [0, 1]
    now = manifest(0, 3)
    assert sequences(peek) == [2, 3]


def test_peek_at_an_empty_queue_that_had_entries() -> None:
    now = manifest(3, 2)
    peek = observing(lambda: now)
    assert sequences(peek) == []
    now = manifest(3, 4)
    assert sequences(peek) == [3, 4]


def test_f28_entries_that_were_dequeued_under_a_peek_are_not_skipped_silently() -> None:
    now = manifest(0, 5)
    peek = observing(lambda: now)
    assert sequences(peek, 2) == [0, 1]
    now = manifest(4, 5)
    with pytest.raises(DataLoss, match="sequence 2 is needed but manifest 'm' starts at 4"):
        peek.read(1)


def test_f27_peek_after_a_sequence_the_queue_never_had() -> None:
    with pytest.raises(QueueReset, match="ends at 5"):
        observing(lambda: manifest(2, 5), 6).read(1)


# ---- a topic


def looking_at(url: str, start: str = "earliest") -> ObservingTopic:
    store, runtime = MemoryStore.named(url.removeprefix("memory://")), SystemRuntime()
    topic = Topic.open(url)

    def opened(name: str, added: bool) -> ObservedPartition:
        config = Topic.config_of(name, ConsumerConfig(store=url))
        observer = Observer(store, config, runtime)
        return ObservedPartition(
            observer, FetchHandle.of(config), Start.parse("earliest" if added else start)
        )

    return ObservingTopic(lambda: topic.read().names, opened, runtime)


def seen(reader: ObservingTopic, limit: int = 100) -> list[tuple[str, int]]:
    found = []
    for batch in reader.read(limit):
        assert isinstance(batch, TopicArrowBatch)
        found.append((batch.partition, batch.sequence))
    return found


def test_partitions_are_looked_at_in_turn_each_in_its_order(url: str) -> None:
    first, second = topic_of(url, 2)
    fill(url, [b"a"], [b"b"], [b"c"], data_path_prefix=first)
    fill(url, [b"d"], data_path_prefix=second)
    reader = looking_at(url)
    assert seen(reader, 1) == [(first, 0)]
    assert seen(reader, 1) == [(second, 0)]
    assert seen(reader) == [(first, 1), (first, 2)]
    assert seen(reader) == []


def test_a_partition_that_is_added_or_first_written_is_looked_at(url: str) -> None:
    first, second = topic_of(url, 2)
    reader = looking_at(url, "latest")
    assert seen(reader) == []
    # It was empty when somebody looked, so all that it gets came later.
    fill(url, [b"a"], data_path_prefix=first)
    third = Topic.open(url).expand(3).names[2]
    fill(url, [b"b"], data_path_prefix=third)
    assert seen(reader) == [(first, 0), (third, 0)]
    fill(url, [b"c"], data_path_prefix=second)
    assert seen(reader) == [(second, 0)]


def test_f28_batches_of_a_topic_that_were_taken_meanwhile_are_not_passed_by_in_silence(
    url: str,
) -> None:
    first, _ = topic_of(url, 2)
    fill(url, [b"a"], data_path_prefix=first)
    reader = looking_at(url)
    assert seen(reader) == [(first, 0)]
    fill(url, [b"b"], [b"c"], data_path_prefix=first)
    ok("consume", url, "--no-gc")
    with pytest.raises(DataLoss, match="Start with --from earliest"):
        seen(reader)
