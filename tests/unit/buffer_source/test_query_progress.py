"""Values from a query's progress, in the forms in which Spark hands it over."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_source import QueryProgress, progress
from opendata_buffer.errors import InvalidInput
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.source_queue import (
    SourceQueue,
    SourceTopic,
    committed_before,
    report_of,
)


def reported(*reports: Any, as_text: bool = False) -> dict[str, Any]:
    """Return a progress with a source for each report, as Spark's JSON has it."""
    return {
        "id": "0c1d",
        "runId": "9f",
        "name": "orders",
        "timestamp": "2026-01-01T00:00:00.000Z",
        "batchId": 7,
        "sources": [
            {
                "description": "org.apache.spark.sql.execution.datasources.v2.python",
                "latestOffset": json.dumps(report) if as_text else report,
                "numInputRows": 40 + number,
            }
            for number, report in enumerate(reports)
        ],
    }


def values(query: Any) -> QueryProgress:
    found = progress(query)
    assert found is not None
    return found


@pytest.mark.parametrize("as_text", [True, False])
def test_the_values_are_those_that_the_source_reports(as_text: bool) -> None:
    queue = SourceQueue(ManualRuntime())
    queue.produce(5)
    driver = queue.run(maxBatchesPerTrigger="2")
    committed_before(driver, None)
    queue.runtime.advance(3)
    found = values(reported(report_of(driver), as_text=as_text))
    assert (found.name, found.query_id, found.batch_id) == ("orders", "0c1d", 7)
    assert (found.backlog_batches, found.lag_ms, found.records) == (3, 3_000, 40)
    (source,) = found.sources
    assert source.source == f"{queue.store.url}/ingest/manifest"
    assert (source.next, source.batches, source.bytes, source.retries) == (5, 0, 0, 0)


def test_an_idle_query_is_not_behind() -> None:
    queue = SourceQueue(ManualRuntime())
    queue.produce(5)
    driver = queue.run()
    committed_before(driver, None)
    queue.runtime.advance(3_600)
    found = values(reported(report_of(driver)))
    assert (found.backlog_batches, found.lag_ms) == (0, 0)


def test_a_topic_has_the_backlogs_of_its_partitions() -> None:
    topic = SourceTopic(ManualRuntime(), 2)
    first, second = topic.topic.description.names
    topic.append(first, b"a", b"b", b"c")
    topic.append(second, b"d")
    driver = topic.run(maxBatchesPerTrigger="2")
    committed_before(driver, None)
    (source,) = values(reported(report_of(driver))).sources
    assert source.partition_backlogs == {first: 2}
    assert source.next == {first: 3, second: 1}


def test_several_sources_are_added_up_and_other_formats_are_left_out() -> None:
    report = {"v": 1, "source": "s3://b/q/ingest/manifest", "backlogBatches": 2, "lagMs": 10}
    later = report | {"lagMs": 900, "bytes": None}
    kafka = {"orders": {"0": 17}}
    found = values(reported(report, later, kafka, None, "not JSON", as_text=False))
    assert (found.backlog_batches, found.lag_ms, found.records) == (4, 900, 40 + 41)
    assert [source.bytes for source in found.sources] == [None, None]
    assert progress(reported(kafka)) is None
    assert progress(reported()) is None


def test_a_query_a_progress_and_an_event_are_accepted() -> None:
    report = {"v": 1, "source": "s3://b/q/ingest/manifest", "backlogBatches": 2, "lagMs": 10}
    plain = reported(report)
    of_spark = SimpleNamespace(json=json.dumps(plain), sources=[])
    for given in (plain, of_spark, SimpleNamespace(lastProgress=of_spark)):
        assert values(given).backlog_batches == 2
    assert progress(SimpleNamespace(lastProgress=None)) is None


@pytest.mark.parametrize("wrong", [3, "query", {"name": "orders"}, SimpleNamespace()])
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput, match=r"query is .*a StreamingQuery or a StreamingQueryProg"):
        progress(wrong)


def test_spark_does_not_load_the_module_when_it_looks_for_data_sources() -> None:
    program = "import sys, buffer_source; print('buffer_source.query_progress' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
