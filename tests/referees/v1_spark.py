"""A query of Spark that reads a log as a named reader, and is killed.

``python -m tests.referees.v1_spark URL CHECKPOINT`` prints the batches of each micro-batch, in the
form of ``tests.referees.v1_worker read``. After a kill, it prints the last micro-batch again.
"""

from __future__ import annotations

import sys
from itertools import groupby

from pyspark.sql import DataFrame, SparkSession

from pyspark_opendata_buffer import register
from tests.referees.v1_worker import MANIFEST, PREFIX, say

READER = "spark"


def show(batch: DataFrame, number: int) -> None:
    del number
    rows = batch.orderBy("sequence", "index").collect()
    for (sequence, location), records in groupby(rows, lambda row: (row.sequence, row.location)):
        say(sequence, location, ",".join(row.value for row in records))


def main(url: str, checkpoint: str) -> None:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    frame = (
        spark.readStream.format("opendata-buffer")
        .schema("sequence LONG, index INT, location STRING, value STRING")
        .options(reader=READER, dataPathPrefix=PREFIX, manifestPath=MANIFEST)
        .load(url)
    )
    query = frame.writeStream.foreachBatch(show).option("checkpointLocation", checkpoint).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
