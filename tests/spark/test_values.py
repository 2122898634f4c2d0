"""Records read into columns here and by Spark's own functions: the same, record by record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from buffer_source.rows import arrow_schema
from opendata_buffer.values.decoder import Decoder
from tests.values import corpus
from tests.values.compare import differences
from tests.values.golden import FORMATS, spark_reads
from tests.values.schemas import SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIECE = 4096


@pytest.mark.parametrize("name", FORMATS)
def test_every_record_of_the_corpus_becomes_the_row_that_spark_makes_of_it(
    spark: SparkSession, name: str
) -> None:
    form, schema = FORMATS[name], SCHEMAS[name]
    generated = corpus.generated(100_000) if name == "json" else corpus.csv_generated(20_000)
    records = [*form.chosen, *generated]
    theirs = spark_reads(spark, records, name)
    decoder, values = Decoder(schema, form.options), pa.array(records, pa.binary())
    ours = pa.concat_tables(
        pa.table(decoder.decode(values.slice(at, PIECE)).arrays, schema=schema)
        for at in range(0, len(values), PIECE)
    )
    found = differences(records, theirs, ours)
    assert not found, "\n".join([f"{len(found)} differ", *found[:40]])


@pytest.mark.parametrize("name", FORMATS)
def test_the_schema_of_the_corpus_is_the_same_to_spark(spark: SparkSession, name: str) -> None:
    ours, theirs = SCHEMAS[name], arrow_schema(StructType.fromDDL(FORMATS[name].schema))
    assert [(each.name, str(each.type)) for each in ours] == [
        (each.name, str(each.type)) for each in theirs
    ]
