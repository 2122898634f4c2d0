"""What Spark makes of the chosen records: ``python -m tests.values.golden`` asks it and writes it down."""  # noqa: E501

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from opendata_buffer.values.options import ValueOptions
from tests.values import corpus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FORMATS", "Format", "read_golden", "spark_reads"]

HOME = Path(__file__).parents[1] / "golden" / "values"


class Format(NamedTuple):
    """How records of one kind are read, here and there."""

    function: str
    schema: str
    options: ValueOptions
    chosen: list[bytes]


FORMATS = {
    "json": Format("from_json", corpus.SCHEMA, ValueOptions(), corpus.chosen()),
    "csv": Format("from_csv", corpus.CSV_SCHEMA, ValueOptions(format="csv"), corpus.csv_chosen()),
}


def spark_reads(spark: SparkSession, records: list[bytes], name: str) -> pa.Table:
    """The rows that Spark's own function makes of the records."""
    from pyspark.sql import functions as sf

    table = pa.table({"value": pa.array(records, pa.binary())})
    frame = spark.createDataFrame(table).select(sf.col("value").cast("string"))
    read = getattr(sf, FORMATS[name].function)
    return frame.select(read("value", FORMATS[name].schema).alias("row")).select("row.*").toArrow()


def read_golden(name: str) -> pa.Table:
    """What Spark made of the chosen records when it was asked."""
    return pq.read_table(HOME / f"{name}.parquet")


def main() -> None:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    for name, each in FORMATS.items():
        write(name, spark_reads(spark, each.chosen, name))
    spark.stop()


def write(name: str, table: pa.Table) -> None:
    """Write the answers down; Spark's strings may be no UTF-8, and files have only such."""
    texts = [each.name for each in table.schema if pa.types.is_string(each.type)]
    for each in texts:
        at = table.column_names.index(each)
        table = table.set_column(at, each, table[each].cast(pa.binary()))
    HOME.mkdir(exist_ok=True)
    pq.write_table(table, HOME / f"{name}.parquet", compression="zstd")


if __name__ == "__main__":
    main()
