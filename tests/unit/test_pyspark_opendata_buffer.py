"""The class that Spark finds, as Spark makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from opendata_buffer.errors import InvalidInput
from pyspark_opendata_buffer import DefaultSource


def test_the_properties_that_spark_adds_for_a_table_are_no_options(tmp_path: Path) -> None:
    # As CREATE TABLE ... USING `opendata-buffer` OPTIONS (path ...) passes them.
    source = DefaultSource(
        {
            "owner": "root",
            "path": str(tmp_path),
            "location": f"file:{tmp_path}",
            "provider": "opendata-buffer",
        }
    )
    assert source.schema().fieldNames()[0] == "value"
    with pytest.raises(InvalidInput, match="unknown option 'owners'"):
        DefaultSource({"path": str(tmp_path), "owners": "root"}).schema()


def test_a_table_that_is_read_without_options_names_what_works() -> None:
    with pytest.raises(InvalidInput, match="Use CREATE TEMPORARY VIEW"):
        DefaultSource({}).reader(StructType())
