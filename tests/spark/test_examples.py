"""The programs in ``examples/`` that need Spark, run in the session of the tests."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming import DataStreamWriter

from opendata_buffer import admin
from opendata_buffer.stores.open import open_store
from tests.spark.queues import drain, orders, produce, program, queued, records, written
from tests.support.exporter import DATA, MANIFEST, export, there
from tests.unit.broker.local import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_bundles_job_loads_each_order_once_and_keeps_other_records(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = program(EXAMPLES / "databricks" / "src" / "load_orders.py")
    queue, checkpoint = str(tmp_path / "queue"), str(tmp_path / "checkpoint")

    def load() -> None:
        job.load(spark, queue, "loaded_orders", checkpoint)

    load()  # before the first producer
    for first in (0, 10):
        produce(queue, [orders(range(first, first + 10))])
        load()
    produce(queue, [[b"no order"]])
    load()
    rows = spark.table("loaded_orders").collect()
    loaded = sorted((row.id, row.amount) for row in rows if row._corrupt_record is None)
    assert loaded == [(n, n * 10.0) for n in range(20)]
    (other,) = (row for row in rows if row._corrupt_record is not None)
    assert (other._corrupt_record, other.id) == ("no order", None)
    assert [reader.name for reader in admin.list_readers(queue)] == ["load-orders"]
    spark.sql("DROP TABLE loaded_orders")


def test_the_readmes_program_in_spark_runs_as_printed_until_it_is_stopped(
    spark: SparkSession, tmp_path: Path
) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text("utf-8")
    produces, reads, _ = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    exec(produces.replace("/tmp", str(tmp_path)), {})
    ran = threading.Thread(target=exec, args=(reads.replace("/tmp", str(tmp_path)), {}))
    ran.start()
    try:
        eventually(lambda: (tmp_path / "orders-table" / "_spark_metadata" / "0").exists())
        (query,) = spark.streams.active
        assert query.name == "orders"
        assert ran.is_alive(), "it waits for more"
    finally:
        for query in spark.streams.active:
            query.stop()
        ran.join(60)
    rows = spark.read.parquet(str(tmp_path / "orders-table")).collect()
    assert sorted(row.value for row in rows) == ['{"id": 1}', '{"id": 2}']


@pytest.mark.skipif(pyspark.__version__ < "4.2", reason="this Spark profiles no sources")
def test_a_query_is_profiled_as_its_page_says_after_the_source_is_registered(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (EXAMPLES.parent / "docs/how-to/debug-a-query.md").read_text("utf-8")
    (code,) = (
        code.replace("s3://bucket/orders", str(tmp_path))
        for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        if "profiler" in code
    )
    produce(str(tmp_path), [orders(range(5))])
    session = spark.newSession()  # the others keep the source that Spark finds by itself
    exec(re.sub("^register.*$", "", code, flags=re.MULTILINE), {"spark": session})
    assert "Profile of" not in capsys.readouterr().out
    try:
        exec(code, {"spark": session})
    finally:
        session.profile.clear()
    printed = capsys.readouterr().out
    for name in ("create_data_source", "plan_data_source_read", "UDF<id="):
        assert f"Profile of {name}" in printed


def test_the_listener_exports_the_lag_of_a_query_and_alerts_when_it_fails(
    spark: SparkSession, tmp_path: Path
) -> None:
    clients = pytest.importorskip("prometheus_client")
    example = program(EXAMPLES / "query_listener.py")
    registry, alerts = clients.CollectorRegistry(), list[str]()
    listener = example.QueueListener(alerts.append, 0.0, registry)

    def value(name: str) -> float | None:
        found: float | None = registry.get_sample_value(f"buffer_query_{name}", {"query": "lags"})
        return found

    queue = tmp_path / "queue"
    produce(str(queue), [orders(range(first, first + 5)) for first in (0, 5, 10)])
    spark.streams.addListener(listener)
    try:
        stream = spark.readStream.format("opendata-buffer").option("maxBatchesPerTrigger", 1)
        writer = stream.load(str(queue)).writeStream.format("noop").queryName("lags")
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        eventually(lambda: value("records_total") == 15)
        eventually(lambda: alerts[-1:] == ["query lags has caught up"])
        assert (value("lag_seconds"), value("backlog_batches"), value("running")) == (0, 0, 1)
        assert re.fullmatch(r"query lags is \d+ s behind: [12] batches wait", alerts[0])
        (queue / "ingest" / "manifest").unlink()
        with pytest.raises(StreamingQueryException):
            query.awaitTermination(60)
        eventually(lambda: value("running") == 0)
    finally:
        spark.streams.removeListener(listener)
    assert "query lags has failed: opendata_buffer.errors.QueueReset: " in alerts[-1]


@pytest.mark.skipif(
    pyspark.__version__ < "4.1", reason="this Spark has no table of the workers' logs"
)
def test_a_query_is_debugged_as_its_page_says(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (EXAMPLES.parent / "docs/how-to/debug-a-query.md").read_text("utf-8")
    progress, logs, _ = (
        code.replace("s3://bucket/orders", str(tmp_path))
        for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    )
    produce(str(tmp_path), [orders(range(5))])
    try:
        exec(logs, {"spark": spark})
    finally:
        spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
    printed = capsys.readouterr().out
    assert re.search(r"ts *\|level *\|logger *\|msg", printed)
    source = spark.readStream.format("opendata-buffer").load(str(tmp_path))
    query = source.writeStream.format("noop").start()
    try:
        query.processAllAvailable()
        eventually(lambda: query.lastProgress)
        exec(progress, {"query": query})
        assert capsys.readouterr().out == "0 0 5\n"
        (tmp_path / "ingest" / "manifest").unlink()
        with pytest.raises(StreamingQueryException) as failed:
            query.awaitTermination(60)
    finally:
        query.stop()
    reason = program(EXAMPLES / "query_listener.py").reason(str(failed.value))
    assert reason.startswith("opendata_buffer.errors.QueueReset: ")


def test_foreach_batch_writes_each_order_once_to_table_and_queue(
    spark: SparkSession, tmp_path: Path
) -> None:
    example = program(EXAMPLES / "foreach_batch_delta.py")
    source, target, table, checkpoint = (
        str(tmp_path / name) for name in ("in", "out", "table", "checkpoint")
    )
    for batches in ([orders(range(7)), orders(range(7, 12))], [orders(range(12, 20))]):
        produce(source, batches)
        example.main(spark, source, target, table, checkpoint)
    rows = spark.read.parquet(table).select("id", "amount").collect()
    assert sorted((row.id, row.amount) for row in rows) == [(n, n * 10.0) for n in range(20)]
    assert queued(source) == []
    large = [json.loads(record)["id"] for record in records(drain(target))]
    assert sorted(large) == list(range(10, 20))


@pytest.mark.skipif(
    "realTime" not in inspect.signature(DataStreamWriter.trigger).parameters,
    reason="this Spark has no real-time mode",
)
def test_a_query_in_real_time_mode_writes_each_row_at_least_once(
    spark: SparkSession, store: str, tmp_path: Path
) -> None:
    """The source is Spark's own memory source; the only other one for this mode is Kafka."""
    example = program(EXAMPLES / "real_time_orders.py")
    jvm = spark._jvm
    sources = jvm.org.apache.spark.sql.execution.streaming.sources
    stream = sources.LowLatencyMemoryStream.singlePartition(
        spark._jsparkSession, jvm.org.apache.spark.sql.Encoders.STRING()
    )

    def found() -> set[bytes]:
        return set(records(written(store)))

    for fed in (["a", "b"], ["c"]):  # the second query continues where the first one stopped
        stream.addData(jvm.PythonUtils.toSeq(fed))
        frame = DataFrame(stream.toDF(), spark)
        query = example.start(frame, store, str(tmp_path / "checkpoint"), batch="5 seconds")
        try:
            eventually(lambda last=fed[-1]: last.encode() in found())
            assert query.exception() is None
        finally:
            query.stop()
    assert found() == {b"a", b"b", b"c"}


# ---- code for Spark in the documentation, run unchanged


DOCS = Path(__file__).parents[2] / "docs"


def block(page: str, language: str, number: int = 0) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[number]


def test_sql_reads_what_is_queued_through_a_temporary_view(spark: SparkSession, store: str) -> None:
    produce(store, [[b"a", b"b"], [b"c"]])
    create, select = (
        block("how-to/spark.md", "sql").replace("s3://bucket/orders", store).split(";")[:2]
    )
    try:
        spark.sql(create)
        assert [tuple(row) for row in spark.sql(select).collect()] == [(0, 2), (1, 1)]
        values = spark.sql("SELECT value FROM waiting WHERE sequence = 1").collect()
        assert [tuple(row) for row in values] == [("c",)]
    finally:
        spark.catalog.dropTempView("waiting")
    assert queued(store) == [0, 1]


def exporters_of(page: str) -> dict[str, dict[str, str]]:
    """Return the settings of the exporters in a page's YAML, by the exporter's name."""
    settings: dict[str, dict[str, str]] = {}
    for line in block(page, "yaml").splitlines():
        name, _, value = line.strip().partition(":")
        if name.startswith("opendata/"):
            settings[name] = {}
        elif settings:
            settings[[*settings][-1]][name] = value.strip()
    return settings


def test_opentelemetry_s_records_become_rows(
    spark: SparkSession, store: str, tmp_path: Path
) -> None:
    pytest.importorskip("opentelemetry.proto.metrics.v1.metrics_pb2")
    made = json.loads((DOCS.parent / "tests" / "golden" / "otel.json").read_text())
    exporter = exporters_of("how-to/opentelemetry.md")["opendata/metrics"]
    data, manifest = exporter["data_path_prefix"], exporter["manifest_path"]
    signals = ("metrics", "logs", "traces")
    batches = export(
        open_store(store),
        *(bytes.fromhex(made[name]) for name in signals),
        data=data,
        manifest=manifest,
        metadata=[bytes([1, signal, 1, 0]) for signal in (1, 2, 3)],
    )
    code = block("how-to/opentelemetry.md", "python").replace("s3://my-otel-bucket", store)
    names: dict[str, Any] = {"spark": spark}
    exec(code.replace("readStream", "read"), names)
    assert names["metrics"].count() == 1
    example = runpy.run_path(str(DOCS.parent / "examples" / "read_opentelemetry.py"))
    queue = (
        spark.read.format("opendata-buffer")
        .options(dataPathPrefix=data, manifestPath=manifest)
        .schema(example["COLUMNS"])
        .load(store)
    )
    rows = example["metrics"](queue).select("service", "name", "value").collect()
    assert [tuple(row) for row in rows] == [("shop", "orders", 42.0), ("shop", "temperature", -1.5)]
    assert example["logs"](queue).first()["body"] == "basket is empty, grüße"
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    (resource,) = TracesData.FromString(bytes.fromhex(made["traces"])).resource_spans
    assert [span.name for span in resource.scope_spans[0].spans] == ["checkout"]

    # The stream of the page, which reads the exporter's batches from its own queue.
    exec(code, names)
    query = (
        names["metrics"]
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "metrics"))
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    read = spark.read.parquet(str(tmp_path / "metrics")).collect()
    assert [bytes(row.value).hex() for row in read] == [made["metrics"]]
    assert there(open_store(store), data)[:3] == batches
    assert Path(store, data, "_owner.json").exists()
    assert not Path(store, data, "manifest").exists()


def test_f51_a_stream_that_knows_only_the_exporter_s_prefix_gets_an_error_with_the_manifest(
    spark: SparkSession, store: str, tmp_path: Path
) -> None:
    batches = export(open_store(store), b"a", b"b", b"c")
    query = (
        spark.readStream.format("opendata-buffer")
        .options(dataPathPrefix=DATA, createIfMissing="true")
        .load(store)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(120)
    assert f'.option("manifestPath", "{MANIFEST}")' in str(caught.value)
    assert "createIfMissing" not in str(caught.value)
    assert there(open_store(store)) == batches


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
    for _ in range(2):  # after the restart it continues
        exec(code, {})
        shown = capsys.readouterr().out
        assert shown.count('{"id": 1}') == shown.count('{"id": 2}') == 1
    assert queued(places["first-queue"]) == []
