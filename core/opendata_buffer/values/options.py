"""How records are read as columns, and which columns can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import tzinfo

import pyarrow as pa

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values.modes import (
    BYTES,
    CSV,
    DROPMALFORMED,
    FAILFAST,
    FORMATS,
    JSON,
    MODES,
    PERMISSIVE,
)
from opendata_buffer.values.patterns import Pattern
from opendata_buffer.values.zones import zone_of

__all__ = [
    "BYTES",
    "CSV",
    "DROPMALFORMED",
    "FAILFAST",
    "FORMATS",
    "JSON",
    "MODES",
    "PERMISSIVE",
    "ValueOptions",
    "check_type",
]


@dataclass(frozen=True, kw_only=True)
class ValueOptions:
    """What Spark's ``from_json`` and ``from_csv`` call options, and mean the same.

    Attributes:
        format: ``json`` or ``csv``; ``bytes`` is what is read without all this.
        mode: What becomes of a malformed record: ``PERMISSIVE`` keeps what fits of it and its
            text in ``corrupt_column``, ``DROPMALFORMED`` leaves it out, ``FAILFAST`` raises.
        corrupt_column: The column for the text of malformed records, if the schema names it.
        rescued_column: The column for what the schema has no place for, as a JSON object; such a
            record is not malformed then. Empty: none.
        timestamp_format: Pattern of timestamps; empty: the many spellings of ISO 8601.
        timestamp_ntz_format: Pattern of timestamps without a zone; empty: as above.
        date_format: Pattern of dates; empty: ``yyyy-MM-dd``, of JSON also other spellings.
        time_zone: Of timestamps that name none. Empty: UTC, until somebody knows better.
        sep: Of CSV: what separates fields.
        quote: Of CSV: what encloses a field; empty: nothing does.
        escape: Of CSV: what makes the next quote a part of the field; empty: nothing does.
        null_value: Of CSV: the text of a field that is null.
        header: Of CSV: whether records that repeat the names of the columns are left out.

    Raises:
        InvalidInput: A pattern that is not read, or a time zone that nobody knows.
    """

    format: str = JSON
    mode: str = PERMISSIVE
    corrupt_column: str = "_corrupt_record"
    rescued_column: str = ""
    timestamp_format: str = ""
    timestamp_ntz_format: str = ""
    date_format: str = ""
    time_zone: str = "UTC"
    sep: str = ","
    quote: str = '"'
    escape: str = "\\"
    null_value: str = ""
    header: bool = False
    _patterns: dict[str, Pattern] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        if self.time_zone and zone_of(self.time_zone) is None:
            raise InvalidInput(
                f"option timeZone is {self.time_zone!r}: use a name such as Europe/Berlin or an "
                "offset such as +02:00"
            )
        patterns = {}
        for name, pattern in (
            ("timestampFormat", self.timestamp_format),
            ("timestampNTZFormat", self.timestamp_ntz_format),
            ("dateFormat", self.date_format),
        ):
            if pattern:
                patterns[name] = Pattern(pattern, name)
        object.__setattr__(self, "_patterns", patterns)

    def pattern(self, option: str) -> Pattern | None:
        """The pattern given as this option, ready to read."""
        return self._patterns.get(option)

    @property
    def zone(self) -> tzinfo:
        """The zone of timestamps that name none."""
        zone = zone_of(self.time_zone or "UTC")
        assert zone is not None, "checked at the beginning"
        return zone


def check_type(name: str, dtype: pa.DataType, value_format: str) -> None:
    """Refuse what records cannot be read into.

    Args:
        name: Of the column, for the message.
        dtype: Its type.
        value_format: ``json`` or ``csv``.

    Raises:
        InvalidInput: No reader for that type.
    """
    types = pa.types
    if (
        types.is_boolean(dtype)
        or types.is_signed_integer(dtype)
        or types.is_float32(dtype)
        or types.is_float64(dtype)
        or types.is_decimal128(dtype)
        or types.is_string(dtype)
        or types.is_date32(dtype)
        or (types.is_timestamp(dtype) and dtype.unit == "us" and dtype.tz in (None, "UTC"))
        or (types.is_binary(dtype) and value_format == JSON)
    ):
        return
    if value_format == JSON:
        if types.is_struct(dtype):
            for each in dtype:
                check_type(f"{name}.{each.name}", each.type, value_format)
            return
        if types.is_list(dtype):
            check_type(f"{name}[]", dtype.value_type, value_format)
            return
        if types.is_map(dtype) and types.is_string(dtype.key_type):
            check_type(f"{name}{{}}", dtype.item_type, value_format)
            return
    also = "; arrays, structs and maps with keys of STRING" if value_format == JSON else ""
    raise InvalidInput(
        f"column {name!r} is of type {dtype}, which {value_format} records are not read into. "
        "Types: BOOLEAN, BYTE, SHORT, INT, LONG, FLOAT, DOUBLE, DECIMAL, STRING, DATE, TIMESTAMP, "
        f"TIMESTAMP_NTZ{', BINARY' if value_format == JSON else ''}{also}. Read the column as "
        "STRING and convert it after loading"
    )
