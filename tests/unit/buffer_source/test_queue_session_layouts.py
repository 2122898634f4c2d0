"""Queries over a queue that another client keeps in its own layout."""

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
from tests.unit.buffer_source.source_queue import SourceQueue
from tests.unit.buffer_source.test_micro_batch_stream import batch

CREATE = {"createIfMissing": "true"}


@pytest.fixture
def source() -> SourceQueue:
    return SourceQueue(ManualRuntime())


def keys(source: SourceQueue) -> list[str]:
    return [found.key for found in source.store.list("").objects]


def options_in(message: str) -> dict[str, str]:
    """Return the options that an error asks for."""
    return dict(re.findall(r'\.option\("(\w+)", "([^"]*)"\)', message))


@pytest.mark.parametrize(
    "start", [{"dataPathPrefix": "ingest/otel/logs"}, {"dataPathPrefix": DATA}]
)
@pytest.mark.parametrize("create", [{}, CREATE])
def test_f51_the_errors_of_a_stream_lead_to_the_batches_of_the_exporter(
    source: SourceQueue, start: dict[str, str], create: dict[str, str]
) -> None:
    batches = export(source.store, b"a", b"b", b"c")
    given = {**start, "manifestPath": MANIFEST} if "data" not in start["dataPathPrefix"] else start
    with pytest.raises(InvalidInput) as caught:
        batch(source.run(**given, **create), None)
    message = str(caught.value)
    assert "createIfMissing" not in message
    assert "manifest_path" not in message
    assert there(source.store) == batches
    assert not [key for key in keys(source) if key.endswith("_owner.json")]
    given = {**given, **options_in(message)}
    _, read = batch(source.run(**given, **create), None)
    assert read == [0, 1, 2]
    assert given == {"dataPathPrefix": DATA, "manifestPath": MANIFEST}
    assert there(source.store)[:3] == batches


def test_f51_the_error_of_a_stream_with_only_the_parent_folder_names_both_options(
    source: SourceQueue,
) -> None:
    export(source.store, b"a")
    with pytest.raises(InvalidInput) as caught:
        batch(source.run(dataPathPrefix="ingest/otel/logs"), None)
    assert options_in(str(caught.value)) == {"dataPathPrefix": DATA, "manifestPath": MANIFEST}


def test_the_error_of_a_batch_read_names_both_options(tmp_path: Path) -> None:
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


def test_a_missing_queue_without_batches_is_still_created_on_request(source: SourceQueue) -> None:
    with pytest.raises(InvalidInput, match="createIfMissing to true"):
        batch(source.run(dataPathPrefix="new", manifestPath="queue/new"), None)
    _, read = batch(source.run(dataPathPrefix="new", manifestPath="queue/new", **CREATE), None)
    assert read == []
    assert "queue/new" in keys(source)


@pytest.mark.parametrize("prefix", [{}, {"dataPathPrefix": "p-00000"}])
def test_a_manifest_is_refused_for_a_topic(source: SourceQueue, prefix: dict[str, str]) -> None:
    Topic.create(QueueConfig(store="/queue"), 1, store=source.store, runtime=source.runtime)
    before = keys(source)
    with pytest.raises(InvalidInput) as caught:
        batch(source.run(manifestPath="ingest/m", **prefix), None)
    assert 'Leave out .option("manifestPath", "ingest/m")' in str(caught.value)
    assert "name it with the option dataPathPrefix" in str(caught.value)
    assert keys(source) == before
