"""Source and sink, called by the Python part of Databricks' runtimes (see ``engine.py``)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.topic.topic import Topic
from tests.databricks import engine as referee
from tests.databricks.engine import Created, Engine, ProgramFailed, StreamRunner, schema
from tests.databricks.runtimes import FOLDER, LONG_TERM, NEWEST, why_not
from tests.spark.queues import numbered, produce, queued

RUNNER = "sql.streaming.python_streaming_source_runner"
QUERY = "1b3dd2f6-7a8d-4a8e-9b6a-1f2f3a4b5c6d"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((LONG_TERM, None), id="17.3"),
        pytest.param((NEWEST, None), id="19.3"),
        pytest.param((NEWEST, NEWEST), id="19.3-renamed"),
        pytest.param((NEWEST, LONG_TERM), id="19.3-renamed-client-17.3"),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return a runtime. The second name is the version of the client, if it differs."""
    version, client = request.param
    for release in (version, client or version):
        if reason := why_not(release):
            pytest.skip(reason)
    source = FOLDER / version
    if client is None:
        return Engine(source, source)
    renamed = referee.rename(source, tmp_path_factory.mktemp("engine"))
    return Engine(FOLDER / client, source, renamed)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def rows(engine: Engine, created: Created) -> list[dict[str, Any]]:
    """Return the rows of a batch read."""
    function, partitions = referee.plan_read(engine, created, streaming=False)
    return referee.read(engine, function, *partitions)


def ends(engine: Engine, runner: StreamRunner) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return ``latestOffset()`` as the runtime calls it: without arguments before 18.1."""
    if not engine.asks_for(RUNNER, "LATEST_OFFSET_ADMISSION_CONTROL_FUNC_ID"):
        return lambda start: runner.latest()
    limit = runner.default_limit()
    return lambda start: runner.latest_limited(start, limit)


def test_a_stream_continues_after_kills_with_each_row_once(engine: Engine, store: str) -> None:
    produce(store, numbered(0, 5))
    created = referee.create(engine, {"path": store, "maxBatchesPerTrigger": "2"})
    with referee.stream(engine, created) as runner:
        latest, start = ends(engine, runner), runner.initial()
        first = latest(start)
        planned = [runner.partitions(start, first)]
        second = latest(first)
        runner.commit(first)
        assert queued(store) == [2, 3, 4]
        planned.append(runner.partitions(first, second))
    # It was killed with an uncommitted micro-batch.
    with referee.stream(engine, created) as runner:
        latest = ends(engine, runner)
        assert runner.partitions(second, second) == []
        assert runner.partitions(first, second) == planned[1]
        third = latest(second)
        runner.commit(second)
        assert queued(store) == [4]
        planned.append(runner.partitions(second, third))
    # It was killed again. Spark has committed this micro-batch, but the source does not know it.
    with referee.stream(engine, created) as runner:
        assert runner.partitions(third, third) == []
        assert ends(engine, runner)(third) == third
        runner.commit(third)
        assert queued(store) == []
    function, _ = referee.plan_read(engine, created, streaming=True)
    read = referee.read(engine, function, *[task for tasks in planned for task in tasks])
    assert sorted(row["value"] for row in read) == [b"0", b"1", b"2", b"3", b"4"]


def test_available_now_reads_the_existing_batches_within_its_limits(
    engine: Engine, store: str
) -> None:
    if not engine.asks_for(RUNNER, "PREPARE_FOR_TRIGGER_AVAILABLE_NOW_FUNC_ID"):
        pytest.skip("this runtime does not tell a Python source its trigger")
    produce(store, numbered(0, 5))
    created = referee.create(engine, {"path": store, "maxBatchesPerTrigger": "2"})
    with referee.stream(engine, created) as runner:
        assert runner.features() == 3
        runner.prepare_for_trigger_available_now()
        produce(store, numbered(5, 6))
        assert runner.default_limit() == {"_type": "ReadMaxFiles", "max_files": 2}
        latest, found = ends(engine, runner), [runner.initial()]
        while (end := latest(found[-1])) != found[-1]:
            assert runner.partitions(found[-1], end)
            runner.commit(end)
            found.append(end)
        report = runner.report()
    assert [end["partitions"]["0"]["next"] for end in found[1:]] == [2, 4, 5]
    assert report["next"] == 6
    assert queued(store) == [5]


def test_a_batch_write_to_a_topic_is_atomic_and_can_be_read_back(
    engine: Engine, store: str
) -> None:
    Topic.create(store, 2)
    columns = schema(key="binary", value="binary")
    options = {"path": store, "partitioner": "modulo"}
    planned = referee.plan_write(engine, options, columns, streaming=False)
    given = [(b"%d" % number, b"row %d" % number) for number in range(20)]
    batch = pa.record_batch(list(zip(*given, strict=True)), names=["key", "value"])
    message = referee.write(engine, planned, [batch])
    created = referee.create(engine, {"path": store})
    # The task of the aborted write failed, so its message is missing.
    referee.commit_batch(engine, planned, [pickle.dumps(None)], abort=True)
    assert rows(engine, created) == []
    referee.commit_batch(engine, planned, [message])
    equal = {"name": "EqualTo", "columnPath": ["partition"], "isNegated": False}
    variant = {"value": "DAE=", "metadata": "AQAA"}  # the number 1
    filters = [{**equal, "value": variant}, {**equal, "name": "IsNotNull"}]
    function, tasks = referee.plan_filtered_read(engine, created, filters)
    read = referee.read(engine, function, *tasks)
    assert sorted(row["value"] for row in read) == sorted(value for _, value in given)
    assert len({row["partition"] for row in read}) == 2


def test_a_micro_batch_of_typed_rows_is_written_once(engine: Engine, store: str) -> None:
    options, columns = {"path": store, "valueFormat": "json"}, schema(id="long", name="string")
    planned = referee.plan_write(engine, options, columns, streaming=True)
    given = [{"id": 1, "name": "a"}, {"id": 2, "name": None}]
    task = {"streaming.sql.batchId": "0", "sql.streaming.queryId": QUERY}
    message = referee.write(engine, planned, [pa.RecordBatch.from_pylist(given)], task)
    created = referee.create(engine, options, columns)
    referee.commit_stream(engine, created, [pickle.dumps(None)], 0, abort=True)
    for _ in range(2):  # a driver that is killed after the commit repeats it
        referee.commit_stream(engine, created, [message], 0)
    assert len(queued(store)) == 1
    assert rows(engine, created) == given


def test_an_error_reaches_spark_as_a_sentence(engine: Engine, store: str) -> None:
    with pytest.raises(ProgramFailed, match="maxBatchesPerTrigger is 'many'"):
        referee.create(engine, {"path": store, "maxBatchesPerTrigger": "many"})


def test_spark_shows_the_error_with_which_a_stream_is_refused(engine: Engine, store: str) -> None:
    produce(store, [[b'{"id": 1}']])
    created = referee.create(engine, {"path": store, "valueFormat": "json"})
    with referee.stream(engine, created) as runner:
        # Runtimes before 18.1 first ask for the initial offset, later ones for the limit.
        limited = engine.asks_for(RUNNER, "GET_DEFAULT_READ_LIMIT_FUNC_ID")
        ask = runner.default_limit if limited else runner.initial
        with pytest.raises(ProgramFailed, match="valueFormat needs a schema") as raised:
            ask()
    assert "UnboundLocalError" not in str(raised.value)
