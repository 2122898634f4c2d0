"""Read the output of OpenData's exporter for the OpenTelemetry Collector: metrics and logs.

    pip install opentelemetry-proto
    python examples/read_opentelemetry.py s3://my-otel-bucket ingest/otel/metrics

The folder is the one that contains the exporter's ``data_path_prefix`` and ``manifest_path``.

Each record is one export, as OTLP in Protocol Buffers. Executors also need ``opentelemetry-proto``.
Spans are read in the same way: ``trace_pb2.TracesData`` with its ``resource_spans``,
``scope_spans`` and ``spans``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.functions import col, explode, udf

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = "value BINARY, otel_signal STRING, otel_encoding STRING, sequence BIGINT, index INT"


def points(record: bytes) -> Iterator[tuple[Any, ...]]:
    """Yield service, name, unit, time (ns) and value of each point of a gauge or a sum.

    Histograms are left out: they have buckets and no value.
    """
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

    for resource in MetricsData.FromString(record).resource_metrics:
        names = {each.key: each.value.string_value for each in resource.resource.attributes}
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            kind = metric.WhichOneof("data")
            if kind in ("gauge", "sum"):
                for point in getattr(metric, kind).data_points:
                    value = float(getattr(point, point.WhichOneof("value")))
                    row = (names.get("service.name"), metric.name, metric.unit)
                    yield (*row, point.time_unix_nano, value)


def log_records(record: bytes) -> Iterator[tuple[Any, ...]]:
    """Yield service, severity, time (ns) and text of each log record."""
    from opentelemetry.proto.logs.v1.logs_pb2 import LogsData

    for resource in LogsData.FromString(record).resource_logs:
        names = {each.key: each.value.string_value for each in resource.resource.attributes}
        for log in (log for scope in resource.scope_logs for log in scope.log_records):
            row = (names.get("service.name"), log.severity_text)
            yield (*row, log.time_unix_nano, log.body.string_value)


@udf(returnType="array<struct<service string, name string, unit string, ns bigint, value double>>")
def points_of(record):
    """Return the points of a record."""
    return list(points(record))


@udf(returnType="array<struct<service string, severity string, ns bigint, body string>>")
def log_records_of(record):
    """Return the log records of a record."""
    return list(log_records(record))


def metrics(queue: DataFrame) -> DataFrame:
    """Return a row for each point."""
    exports = queue.where("otel_signal = 'metrics' AND otel_encoding = 'otlp_protobuf'")
    return exports.select("sequence", "index", explode(points_of("value")).alias("point")).select(
        "sequence", "index", "point.*", (col("point.ns") / 1e9).cast("timestamp").alias("time")
    )


def logs(queue: DataFrame) -> DataFrame:
    """Return a row for each log record."""
    exports = queue.where("otel_signal = 'logs' AND otel_encoding = 'otlp_protobuf'")
    return exports.select(explode(log_records_of("value")).alias("log")).select("log.*")


def main(spark: SparkSession, store: str, folder: str) -> None:
    """Print the queued metrics of the exporter's folder."""
    queue = (
        spark.read.format("opendata-buffer")
        .option("dataPathPrefix", f"{folder}/data")
        .option("manifestPath", f"{folder}/manifest")
        .schema(COLUMNS)
        .load(store)
    )
    metrics(queue).show(truncate=False)


if __name__ == "__main__":
    from pyspark.sql import SparkSession

    main(SparkSession.builder.getOrCreate(), *sys.argv[1:])
