"""Queries over a queue that another client keeps in a layout of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from buffer_source.batch_reader import BufferBatchReader
from buffer_source.options import SourceOptions
from buffer_source.schema import default_schema
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, PrefixConflict
from opendata_buffer.stores.open import open_store
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic
from tests.support.exporter import DATA, MANIFEST, export, there
from tests.unit.buffer_source.source_queue import World
from tests.unit.buffer_source.test_micro_batch_stream import batch

CREATE = {"createIfMissing": "true"}


@pytest.fixture
def world() -> World:
    return World(ManualRuntime())


def keys(world: World) -> list[str]:
    return [found.key for found in world.store.list("").objects]


def options_in(message: str) -> dict[str, str]:
    """The options that an error tells its reader to give."""
    return dict(re.findall(r'\.option\("(\w+)", "([^"]*)"\)', message))


@pytest.mark.parametrize(
    "start", [{"dataPathPrefix": "ingest/otel/logs"}, {"dataPathPrefix": DATA}]
)
@pytest.mark.parametrize("create", [{}, CREATE])
def test_f51_following_the_errors_of_a_stream_leads_to_the_exporter_s_batches(
    world: World, start: dict[str, str], create: dict[str, str]
) -> None:
    batches = export(world.store, b"a", b"b", b"c")
    given = {**start, "manifestPath": MANIFEST} if "data" not in start["dataPathPrefix"] else start
    with pytest.raises(InvalidInput) as caught:
        batch(world.run(**given, **create), None)
    message = str(caught.value)
    assert "createIfMissing" not in message
    assert "manifest_path" not in message
    assert there(world.store) == batches
    assert not [key for key in keys(world) if key.endswith("_owner.json")]
    given = {**given, **options_in(message)}
    _, read = batch(world.run(**given, **create), None)
    assert read == [0, 1, 2]
    assert given == {"dataPathPrefix": DATA, "manifestPath": MANIFEST}
    assert there(world.store)[:3] == batches


def test_f51_a_stream_that_knows_only_the_folder_above_is_told_both_options(world: World) -> None:
    export(world.store, b"a")
    with pytest.raises(InvalidInput) as caught:
        batch(world.run(dataPathPrefix="ingest/otel/logs"), None)
    assert options_in(str(caught.value)) == {"dataPathPrefix": DATA, "manifestPath": MANIFEST}


def test_a_batch_read_needs_both_options_and_says_so(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    export(store, b"a", b"b")
    given = {"path": str(tmp_path), "dataPathPrefix": DATA}

    def read(**more: str) -> int:
        options = SourceOptions.from_spark({**given, **more})
        tasks = BufferBatchReader(options, default_schema()).partitions()
        return sum(len(task.batches) for task in tasks)

    with pytest.raises(PrefixConflict) as caught:
        read()
    assert options_in(str(caught.value)) == {"manifestPath": MANIFEST}
    assert read(manifestPath=MANIFEST) == 2


def test_a_missing_queue_without_batches_is_still_created_on_request(world: World) -> None:
    with pytest.raises(InvalidInput, match="createIfMissing to true"):
        batch(world.run(dataPathPrefix="new", manifestPath="queue/new"), None)
    _, read = batch(world.run(dataPathPrefix="new", manifestPath="queue/new", **CREATE), None)
    assert read == []
    assert "queue/new" in keys(world)


@pytest.mark.parametrize("prefix", [{}, {"dataPathPrefix": "p-00000"}])
def test_a_manifest_is_refused_for_a_topic(world: World, prefix: dict[str, str]) -> None:
    Topic.create(QueueConfig(store="/world"), 1, store=world.store, runtime=world.runtime)
    before = keys(world)
    with pytest.raises(InvalidInput) as caught:
        batch(world.run(manifestPath="ingest/m", **prefix), None)
    assert 'Leave out .option("manifestPath", "ingest/m")' in str(caught.value)
    assert "name it with the option dataPathPrefix" in str(caught.value)
    assert keys(world) == before
