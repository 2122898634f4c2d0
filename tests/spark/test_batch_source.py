"""``spark.read``: a snapshot that fences no consumer and acknowledges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.spark.queues import manifest, numbered, produce

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(spark: SparkSession, store: str, **options: str) -> DataFrame:
    return spark.read.format("opendata-buffer").options(**options).load(store)


def values(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row["value"])) for row in frame.collect())


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[None]:
    """Spark hands filters to Python sources, which is not its default."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_read_neither_fences_nor_acknowledges(spark: SparkSession, store: str) -> None:
    produce(store, numbered(0, 4))
    before = manifest(store)
    assert values(read(spark, store)) == [0, 1, 2, 3]
    assert values(read(spark, store)) == [0, 1, 2, 3]
    assert manifest(store) == before
    assert before.epoch == 0


def test_positions(spark: SparkSession, store: str) -> None:
    produce(store, numbered(0, 5))
    assert values(read(spark, store, startingOffsets="1", endingOffsets="4")) == [1, 2, 3]
    with pytest.raises(Exception, match="ends at 4"):
        read(spark, store, endingOffsets="9").collect()
    with pytest.raises(Exception, match="would be empty"):
        read(spark, store, startingOffsets="latest").collect()


@pytest.mark.usefixtures("pushdown")
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


@pytest.mark.usefixtures("pushdown")
def test_a_dataframe_is_a_snapshot_of_its_first_action(spark: SparkSession, store: str) -> None:
    produce(store, numbered(0, 2))
    frame = read(spark, store)
    assert values(frame) == [0, 1]
    produce(store, numbered(2, 3))
    assert values(frame) == [0, 1]
    assert values(read(spark, store)) == [0, 1, 2]
