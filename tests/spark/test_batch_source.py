"""``spark.read``: a snapshot that fences no consumer and acknowledges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.spark.queues import FORMAT, manifest, numbered, produce

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(spark: SparkSession, store: str) -> DataFrame:
    return spark.read.format(FORMAT).load(store)


def values(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row["value"])) for row in frame.collect())


@pytest.fixture(autouse=True)
def pushdown(spark: SparkSession) -> Iterator[None]:
    """Let Spark push filters to Python sources, which is not its default."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_one_dataframe_filtered_in_several_ways_loses_no_row(
    spark: SparkSession, store: str
) -> None:
    """Spark plans a DataFrame once, with the filters of its first scan."""
    produce(store, [[b"r"] * 10 for _ in range(20)])
    one = read(spark, store)
    assert one.filter("sequence < 2").count() == 20
    assert one.count() == 200
    one = read(spark, store)
    assert one.filter("sequence < 2").union(one.filter("sequence >= 5")).count() == 170
    one = read(spark, store)
    seen = one.filter("sequence < 2").select("sequence").distinct()
    assert one.join(seen, "sequence", "left_anti").count() == 180


def test_a_dataframe_is_a_snapshot_of_its_first_action_and_changes_nothing(
    spark: SparkSession, store: str
) -> None:
    produce(store, numbered(0, 2))
    frame = read(spark, store)
    assert values(frame) == [0, 1]
    produce(store, numbered(2, 3))
    before = manifest(store)
    assert values(frame) == [0, 1]
    assert values(read(spark, store)) == [0, 1, 2]
    assert manifest(store) == before
    assert before.epoch == 0, "no consumer was fenced"
    row = frame.first()
    assert row is not None
    assert row["index"] == 0
    assert callable(row.index), "the documentation recommends brackets"
