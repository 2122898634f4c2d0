"""Spark schemas made without a session, because ``StructType.fromDDL`` needs one."""

from __future__ import annotations

from pyspark.sql.types import DayTimeIntervalType, StructType


def struct(*columns: str) -> StructType:
    """Return a schema of columns such as ``id bigint``."""
    made = StructType()
    for column in columns:
        name, kind = column.split(" ", 1)
        kind = {"int": "integer", "bigint": "long"}.get(kind, kind)
        made = made.add(name, DayTimeIntervalType() if kind.startswith("interval") else kind)
    return made
