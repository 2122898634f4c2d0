"""Which columns are fields of the record, and how rows of them are written."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from buffer_sink.fields import Fields
from opendata_buffer.errors import InvalidInput


def schema(**columns: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])  # type: ignore[arg-type]


def test_all_columns_are_fields_but_the_buffers_own() -> None:
    fields, rest = Fields.of(
        schema(id=IntegerType(), _Metadata=StringType(), value=StringType(), _key=BinaryType())
    )
    assert fields.names == ("id", "value")
    assert [(each.name, each.dataType) for each in rest.fields] == [
        ("value", BinaryType()),
        ("metadata", StringType()),
        ("key", BinaryType()),
    ]
    rows = pa.record_batch(
        [pa.array([1, None]), pa.array(["m", "n"]), pa.array(["v", "w"]), pa.array([b"k", b"l"])],
        names=["id", "_Metadata", "value", "_key"],
    )
    found = fields.encode(rows)
    assert found.schema.names == ["value", "metadata", "key"]
    assert found.to_pydict() == {
        "value": [b'{"id":1,"value":"v"}', b'{"value":"w"}'],
        "metadata": ["m", "n"],
        "key": [b"k", b"l"],
    }


def test_no_column_left_two_of_one_name_and_types_without_json_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no column to write"):
        Fields.of(schema(_metadata=StringType()))
    twice = StructType([StructField("a", StringType()), StructField("a", IntegerType())])
    with pytest.raises(InvalidInput, match="column 'a' is there twice"):
        Fields.of(twice)
    for kind in (DayTimeIntervalType(), VariantType(), ArrayType(VariantType())):
        with pytest.raises(InvalidInput, match=r"column 'x' .* as JSON.*[Cc]ast it"):
            Fields.of(schema(id=IntegerType(), x=kind))


def test_every_type_that_has_a_form_in_json_is_taken() -> None:
    kinds = (
        BooleanType(), ByteType(), ShortType(), IntegerType(), LongType(), FloatType(),
        DoubleType(), DecimalType(20, 3), StringType(), BinaryType(), DateType(), TimestampType(),
        TimestampNTZType(), ArrayType(TimestampType()), MapType(StringType(), TimestampType()),
        StructType([StructField("moment", TimestampType())]),
    )  # fmt: skip
    fields, _ = Fields.of(schema(**{f"c{index}": kind for index, kind in enumerate(kinds)}))
    assert len(fields.names) == len(kinds)


def test_an_empty_batch_of_rows_is_one_of_values() -> None:
    fields, _ = Fields.of(schema(id=IntegerType()))
    rows = pa.record_batch([pa.array([], pa.int32())], names=["id"])
    assert fields.encode(rows).num_rows == 0


def test_a_variant_is_refused_wherever_it_is_and_a_field_of_that_name_is_not() -> None:
    named = StructType([StructField("product_variant", StringType())])
    fields, _ = Fields.of(schema(s=named, l=ArrayType(named)))
    rows = pa.record_batch({"s": [{"product_variant": "x"}], "l": [[]]})
    assert fields.encode(rows)["value"].to_pylist() == [b'{"s":{"product_variant":"x"},"l":[]}']
    inner = StructType([StructField("x", VariantType())])
    for kind in (VariantType(), inner, ArrayType(inner), MapType(StringType(), VariantType())):
        with pytest.raises(InvalidInput, match="a Python sink cannot read type"):
            Fields.of(schema(v=kind))
