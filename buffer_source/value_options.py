"""The source's options about reading records into columns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from opendata_buffer.errors import InvalidInput
from opendata_buffer.option_reader import OptionReader
from opendata_buffer.values.modes import BYTES, CSV, FORMATS, JSON, MODES, PERMISSIVE

if TYPE_CHECKING:
    from opendata_buffer.values.options import ValueOptions

__all__ = ["VALUE_OPTIONS", "value_options", "with_time_zone"]

_OF_BOTH = (
    "mode",
    "columnNameOfCorruptRecord",
    "rescuedDataColumn",
    "timestampFormat",
    "timestampNTZFormat",
    "dateFormat",
    "timeZone",
)
_OF_CSV = ("sep", "quote", "escape", "nullValue", "header")
VALUE_OPTIONS = ("valueFormat", *_OF_BOTH, *_OF_CSV)

SESSION = ""
"""In place of a time zone: the session's, which only a task knows."""


def value_options(read: OptionReader) -> ValueOptions | None:
    """How records are read into columns; None for ``valueFormat=bytes``, which reads no columns.

    Raises:
        InvalidInput: An option that the format does not have, or a value that is not accepted.
    """
    value_format = read.choice("valueFormat", FORMATS, BYTES)
    for names, formats in ((_OF_BOTH, (JSON, CSV)), (_OF_CSV, (CSV,))):
        for name in names:
            if value_format not in formats and read.given(name):
                raise InvalidInput(
                    f"option {name} is given and valueFormat is {value_format}: it says how "
                    f"{' or '.join(formats)} is read, so set valueFormat, or leave it out"
                )
    if value_format == BYTES:
        return None
    sep = read.raw("sep", ",")
    for name, value in (
        ("sep", sep),
        ("quote", read.raw("quote", '"')),
        ("escape", read.raw("escape", "\\")),
    ):
        if len(value) > 1 or (name == "sep" and not value) or value in ("\n", "\r"):
            raise InvalidInput(
                f"option {name} is {value!r}: use one character"
                + ("" if name == "sep" else ", or nothing for none")
            )
    # Who reads bytes need not wait for it.
    from opendata_buffer.values.options import ValueOptions

    return ValueOptions(
        format=value_format,
        mode=read.choice("mode", MODES, PERMISSIVE),
        corrupt_column=read.text("columnNameOfCorruptRecord") or "_corrupt_record",
        rescued_column=read.text("rescuedDataColumn") or "",
        timestamp_format=read.text("timestampFormat") or "",
        timestamp_ntz_format=read.text("timestampNTZFormat") or "",
        date_format=read.text("dateFormat") or "",
        time_zone=read.text("timeZone") or SESSION,
        sep=sep,
        quote=read.raw("quote", '"'),
        escape=read.raw("escape", "\\"),
        null_value=read.raw("nullValue", ""),
        header=read.boolean("header", False),
    )


def with_time_zone(options: ValueOptions, session: str | None) -> ValueOptions:
    """The same with the session's time zone where none is given; UTC where it has none, either."""
    if options.time_zone != SESSION:
        return options
    return replace(options, time_zone=session or "UTC")
