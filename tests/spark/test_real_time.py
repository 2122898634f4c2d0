"""A query in real-time mode that writes to a queue through ``foreach``, as the example does.

Its source is Spark's own in-memory one for this mode; the other that open-source Spark has is
Kafka.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import DataStreamWriter

from tests.spark.written import queued, records
from tests.unit.broker.local import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_time_orders.py"


@pytest.mark.slow
@pytest.mark.skipif(
    "realTime" not in inspect.signature(DataStreamWriter.trigger).parameters,
    reason="this Spark has no real-time mode",
)
def test_a_query_in_real_time_mode_writes_each_row_at_least_once(
    spark: SparkSession, store: str, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("real_time_orders", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    jvm = spark._jvm
    sources = jvm.org.apache.spark.sql.execution.streaming.sources
    stream = sources.LowLatencyMemoryStream.singlePartition(
        spark._jsparkSession, jvm.org.apache.spark.sql.Encoders.STRING()
    )

    def written() -> set[str]:
        return {each.decode() for each in records(queued(store))}

    for fed in (["a", "b"], ["c"]):  # the second query goes on where the first was stopped
        stream.addData(jvm.PythonUtils.toSeq(fed))
        frame = DataFrame(stream.toDF(), spark)
        query = example.start(frame, store, str(tmp_path / "checkpoint"), batch="5 seconds")
        try:
            eventually(lambda last=fed[-1]: last in written())
            assert query.exception() is None
        finally:
            query.stop()
    assert written() == {"a", "b", "c"}
