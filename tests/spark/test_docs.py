"""What the documentation shows of Spark, run as it stands there."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opendata_buffer import Producer, ProducerConfig
from tests.spark.queues import produce, queued

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCS = Path(__file__).parents[2] / "docs"


def block(page: str, language: str, number: int = 0) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[number]


def test_sql_reads_what_is_queued_through_a_temporary_view(spark: SparkSession, store: str) -> None:
    produce(store, [[b"a", b"b"], [b"c"]])
    create, select = (
        block("how-to/read-with-spark.md", "sql")
        .replace("s3://bucket/orders", store)
        .split(";")[:2]
    )
    try:
        spark.sql(create)
        assert [tuple(row) for row in spark.sql(select).collect()] == [(0, 2), (1, 1)]
        values = spark.sql("SELECT value FROM waiting WHERE sequence = 1").collect()
        assert [tuple(row) for row in values] == [("c",)]
    finally:
        spark.catalog.dropTempView("waiting")
    assert queued(store) == [0, 1]


def test_opentelemetry_s_records_become_rows(spark: SparkSession, store: str) -> None:
    pytest.importorskip("opentelemetry.proto.metrics.v1.metrics_pb2")
    made = json.loads((DOCS.parent / "tests" / "golden" / "otel.json").read_text())
    with Producer(ProducerConfig(store=store)) as producer:
        for signal, name in enumerate(("metrics", "logs", "traces"), 1):
            producer.produce([bytes.fromhex(made[name])], metadata=bytes([1, signal, 1, 0]))
    code = block("how-to/opentelemetry.md", "python").replace("s3://bucket/otel/metrics", store)
    names: dict[str, Any] = {"spark": spark}
    exec(code.replace("readStream", "read"), names)
    assert names["metrics"].count() == 1
    example = runpy.run_path(str(DOCS.parent / "examples" / "read_opentelemetry.py"))
    queue = spark.read.format("opendata-buffer").schema(example["COLUMNS"]).load(store)
    rows = example["metrics"](queue).select("service", "name", "value").collect()
    assert [tuple(row) for row in rows] == [("shop", "orders", 42.0), ("shop", "temperature", -1.5)]
    assert example["logs"](queue).first()["body"] == "basket is empty, grüße"
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    (resource,) = TracesData.FromString(bytes.fromhex(made["traces"])).resource_spans
    assert [each.name for each in resource.scope_spans[0].spans] == ["checkout"]


def test_the_tutorial_s_second_half_runs(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        name: str(tmp_path / name) for name in ("first-queue", "first-checkpoint", "first-table")
    }
    produce(places["first-queue"], [[b'{"id": 1}'], [b'{"id": 2}']])
    code = block("tutorial/first-queue.md", "python", 2)
    for name, path in places.items():
        code = code.replace(f"/tmp/{name}", path)
    for _ in range(2):  # started again, it goes on where it was
        exec(code, {})
        shown = capsys.readouterr().out
        assert shown.count('{"id": 1}') == shown.count('{"id": 2}') == 1
    assert queued(places["first-queue"]) == []
