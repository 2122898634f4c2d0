"""What the sessions of the tests have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_processes_that_spark_starts_load_the_compiled_pyspark(spark: SparkSession) -> None:
    def loaded(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    assert spark.sparkContext.parallelize([0], 1).map(loaded).collect() == [pyspark.__file__]
