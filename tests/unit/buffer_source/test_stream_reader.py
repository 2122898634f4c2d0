"""Spark's calls of the streaming source."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.streaming import datasource
from pyspark.sql.streaming.datasource import ReadAllAvailable, SupportsTriggerAvailableNow

from buffer_source.options import SourceOptions
from buffer_source.partitions import INITIAL
from buffer_source.planner import TaskBatches
from buffer_source.schema import default_schema
from buffer_source.stream_reader import (
    BufferStreamReader,
    know_engine,
)
from opendata_buffer import Producer
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Fenced, InvalidInput
from opendata_buffer.formats import keep_freed_memory
from opendata_buffer.formats.manifest import Manifest, NewEntry
from tests.unit.cli.shell import ok


def reader(store: Path, **options: str) -> BufferStreamReader:
    given = {"path": str(store), "gcEnabled": "false", **options}
    return BufferStreamReader(SourceOptions.from_spark(given), default_schema())


def produce(store: Path, *records: bytes) -> None:
    with Producer(ProducerConfig(store=str(store))) as producer:
        producer.produce(list(records), b"m")


def test_creating_and_pickling_a_reader_sends_no_request(tmp_path: Path) -> None:
    made = reader(tmp_path / "queue")
    assert made.initialOffset() == INITIAL
    made.getDefaultReadLimit()
    pickle.loads(pickle.dumps(made))
    made.stop()
    assert not (tmp_path / "queue").exists()


def test_a_pickled_reader_plans_and_reads_rows(tmp_path: Path) -> None:
    produce(tmp_path, b"a", b"b")
    produce(tmp_path, b"c")
    driver = reader(tmp_path, minPartitions="1")
    end = driver.latestOffset(driver.initialOffset(), ReadAllAvailable())
    assert end["partitions"]["0"]["next"] == 2
    (partition,) = driver.partitions(driver.initialOffset(), end)
    assert isinstance(partition, TaskBatches)
    assert [each.sequence for each in partition.batches] == [0, 1]
    # It is pickled after use, and must not take the driver's consumer along.
    executor = pickle.loads(pickle.dumps(driver))
    rows = pa.Table.from_batches(executor.read(pickle.loads(pickle.dumps(partition)))).to_pylist()
    assert [(row["value"], row["sequence"], row["index"]) for row in rows] == [
        (b"a", 0, 0),
        (b"b", 0, 1),
        (b"c", 1, 0),
    ]
    driver.commit(end)
    assert driver.latestOffset(end, ReadAllAvailable()) is end
    report = driver.reportLatestOffset()
    assert report is not None
    assert (report["next"], report["backlogBatches"]) == (2, 0)
    driver.commit(driver.initialOffset())
    assert driver.partitions(driver.initialOffset(), driver.initialOffset()) == []
    driver.stop()


def test_planning_has_at_most_three_copies_of_a_long_manifest_in_memory(tmp_path: Path) -> None:
    # PYSPARK_PLANNER_MEMORY_MB: with a million batches each copy takes 74 MB of the 512.
    produce(tmp_path, b"a")
    path = tmp_path / "ingest" / "manifest"
    waiting = Manifest.parse(path.read_bytes())
    (entry,) = waiting.entries()
    long = waiting.append([NewEntry(entry.location, entry.metadata)] * 50_000)
    path.write_bytes(long.raw)
    driver = reader(tmp_path, maxBatchesPerTrigger="10")
    keep_freed_memory()  # Reserves 16 MiB once without touching it.
    tracemalloc.start()
    try:
        end = driver.latestOffset(driver.initialOffset(), driver.getDefaultReadLimit())
        driver.commit(end)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert end["partitions"]["0"]["next"] == 10
    assert long.size < peak < 3.4 * long.size


def test_an_idle_query_gets_its_version_1_offset_back_unchanged(tmp_path: Path) -> None:
    # Another text for the same position would make Spark run an empty micro-batch.
    produce(tmp_path, b"a")
    driver = reader(tmp_path)
    end = driver.latestOffset(driver.initialOffset(), ReadAllAvailable())
    old = {"v": 1, **end["partitions"]["0"]}
    assert reader(tmp_path).latestOffset(old, ReadAllAvailable()) is old


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_f25_a_missing_batch_can_be_skipped(tmp_path: Path, missing: int) -> None:
    for record in (b"a", b"b", b"c"):
        produce(tmp_path, record)
    driver = reader(tmp_path, failOnDataLoss="false", minPartitions="1")
    end = driver.latestOffset(driver.initialOffset(), ReadAllAvailable())
    (partition,) = driver.partitions(driver.initialOffset(), end)
    assert isinstance(partition, TaskBatches)
    (tmp_path / partition.batches[missing].location).unlink()
    rows = pa.Table.from_batches(driver.read(partition)).to_pylist()
    assert [row["sequence"] for row in rows] == [each for each in (0, 1, 2) if each != missing]


@pytest.mark.parametrize(
    ("options", "name", "fields"),
    [
        ({}, "ReadAllAvailable", {}),
        ({"maxBatchesPerTrigger": "2"}, "ReadMaxFiles", {"max_files": 2}),
        ({"maxBytesPerTrigger": "2"}, "ReadMaxBytes", {"max_bytes": 2}),
        ({"maxOffsetsPerTrigger": "2"}, "ReadMaxRows", {"max_rows": 2}),
        ({"minOffsetsPerTrigger": "2"}, "ReadMinRows", {"min_rows": 2}),
    ],
)
def test_the_default_limit_comes_from_the_options_in_spark_s_form(
    options: dict[str, str], name: str, fields: dict[str, int]
) -> None:
    limit = reader(Path("/unused"), **options).getDefaultReadLimit()
    assert (type(limit).__name__, dataclasses.asdict(limit)) == (name, fields)
    assert dataclasses.asdict(getattr(datasource, name)(**fields)) == fields


def test_spark_sees_that_available_now_is_supported() -> None:
    know_engine(default_schema())
    assert isinstance(reader(Path("/unused")), SupportsTriggerAvailableNow)


def test_without_a_start_reading_continues_where_the_last_plan_ended(tmp_path: Path) -> None:
    for record in (b"a", b"b", b"c"):
        produce(tmp_path, record)
    driver = reader(tmp_path, maxBatchesPerTrigger="2")
    first = driver.latestOffset()
    assert first["partitions"]["0"]["next"] == 2
    # It is not planned yet, and Spark may have logged the answer.
    assert driver.latestOffset() is first
    assert driver.partitions(driver.initialOffset(), first)
    second = driver.latestOffset()
    assert second["partitions"]["0"]["next"] == 3
    driver.commit(first)
    assert driver.partitions(first, second)
    assert driver.latestOffset() == second
    driver.commit(second)
    driver.stop()


def test_after_a_restart_without_a_start_the_logged_offsets_are_planned_without_loss(
    tmp_path: Path,
) -> None:
    for record in (b"a", b"b", b"c"):
        produce(tmp_path, record)
    killed = reader(tmp_path, maxBatchesPerTrigger="2")
    end = killed.latestOffset()
    batches = killed.partitions(killed.initialOffset(), end)
    driver = reader(tmp_path, maxBatchesPerTrigger="2")
    # Spark 4.0 and 4.1 do so although the end is not in the commit log.
    assert driver.partitions(end, end) == []
    again = driver.partitions(driver.initialOffset(), end)
    assert [each.value for each in again] == [each.value for each in batches]
    following = driver.latestOffset()
    assert following["partitions"]["0"]["next"] == 3
    assert driver.partitions(end, following)
    driver.stop()


@pytest.mark.parametrize("new", [[], [b"c"]])
def test_a_start_equal_to_an_end_that_spark_never_planned_is_refused(
    tmp_path: Path, new: list[bytes]
) -> None:
    for record in (b"a", b"b"):
        produce(tmp_path, record)
    committed = reader(tmp_path).latestOffset()
    for record in new:
        produce(tmp_path, record)
    # This is a restart with triggerAvailableNowWrapper. Spark has not logged the answer yet.
    restarted = reader(tmp_path)
    restarted.latestOffset()
    with pytest.raises(InvalidInput, match="triggerAvailableNowWrapper"):
        restarted.partitions(committed, committed)


def test_limits_log_a_warning_if_spark_does_not_pass_its_trigger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    produce(tmp_path, b"a")
    reader(tmp_path).latestOffset()
    assert caplog.messages == []
    driver = reader(tmp_path, maxBatchesPerTrigger="1")
    driver.latestOffset()
    driver.latestOffset()
    (message,) = caplog.messages
    assert "reads one micro-batch" in message


def test_the_fenced_error_explains_that_two_queries_read_the_queue(tmp_path: Path) -> None:
    produce(tmp_path, b"a")
    first, second = reader(tmp_path), reader(tmp_path)
    end = first.latestOffset(first.initialOffset(), ReadAllAvailable())
    second.latestOffset(second.initialOffset(), ReadAllAvailable())
    with pytest.raises(Fenced, match=r"epoch 1 was fenced by epoch 2 .*queue twice") as caught:
        first.latestOffset(end, ReadAllAvailable())
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)


def test_the_fenced_error_of_a_log_reader_has_no_advice_about_queues(tmp_path: Path) -> None:
    produce(tmp_path, b"a")
    ok("readers", "enable", str(tmp_path), "--yes")
    first, second = (reader(tmp_path, reader="billing") for _ in range(2))
    end = first.latestOffset(first.initialOffset(), ReadAllAvailable())
    second.latestOffset(second.initialOffset(), ReadAllAvailable())
    with pytest.raises(Fenced, match=r"reader 'billing'.*loads the log twice") as caught:
        first.latestOffset(end, ReadAllAvailable())
    text = str(caught.value)
    assert "a reset with --force" in text, "which fences although no other query reads the log"
    assert "acknowledge" not in text
    assert "one query for each queue" not in text


def test_the_error_of_a_planner_without_memory_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("buffer_source.stream_reader.open_store", fail)
    with pytest.raises(MemoryError, match=r"spark\.sql\.planner\.pythonExecution\.memory"):
        reader(tmp_path).latestOffset(INITIAL, ReadAllAvailable())


def test_a_stream_refuses_options_of_batch_reads(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="endingOffsets"):
        reader(tmp_path, endingOffsets="3")


def test_the_process_of_a_query_loads_no_large_module() -> None:
    # Spark starts one process per query, and waits for its first answer.
    code = """
import sys
import pyspark.sql.streaming.python_streaming_source_runner
spark = set(sys.modules)
import buffer_source.stream_reader
print(*set(sys.modules) - spark)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "buffer_source.partition_stream" in loaded
    assert not loaded & {"boto3", "pandas", "pyarrow.parquet", "websockets"}
