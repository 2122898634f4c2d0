from __future__ import annotations

import pytest

from buffer_source.value_options import VALUE_OPTIONS, value_options, with_time_zone
from opendata_buffer.errors import InvalidInput
from opendata_buffer.option_reader import OptionReader
from opendata_buffer.values.options import ValueOptions


def read(**options: str) -> ValueOptions | None:
    return value_options(OptionReader(options, VALUE_OPTIONS, "source"))


def test_without_a_value_format_records_stay_bytes() -> None:
    assert read() is None
    assert read(valueFormat="BYTES") is None


def test_options_have_sparks_names_and_any_case() -> None:
    found = read(
        VALUEFORMAT="csv", mode="failfast", columnNameOfCorruptRecord="bad", dateFormat="dd.MM.yy",
        timeZone="Europe/Berlin", sep="\t", quote="", header="true", nullValue="-",
    )  # fmt: skip
    assert found == ValueOptions(
        format="csv", mode="FAILFAST", corrupt_column="bad", date_format="dd.MM.yy",
        time_zone="Europe/Berlin", sep="\t", quote="", header=True, null_value="-",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "PERMISSIVE"}, "option mode is given and valueFormat is bytes"),
        ({"valueFormat": "json", "sep": ";"}, "option sep is given and valueFormat is json"),
        ({"valueFormat": "xml"}, "option valueFormat is 'xml': use bytes or json or csv"),
        ({"valueFormat": "json", "mode": "STRICT"}, "use PERMISSIVE or DROPMALFORMED or FAILFAST"),
        ({"valueFormat": "csv", "sep": "||"}, "option sep is '||': use one character"),
        ({"valueFormat": "csv", "sep": ""}, "option sep is ''"),
        ({"valueFormat": "json", "timestampFormat": "QQ"}, "option timestampFormat is 'QQ'"),
        ({"valueFormat": "json", "timeZone": "Mars"}, "option timeZone is 'Mars'"),
    ],
)
def test_what_is_not_accepted_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**options)
    assert message in str(caught.value)


def test_a_time_zone_that_is_not_given_is_the_sessions() -> None:
    found = read(valueFormat="json")
    assert found is not None
    assert with_time_zone(found, "+02:00").time_zone == "+02:00"
    assert with_time_zone(found, None).time_zone == "UTC"
    given = read(valueFormat="json", timeZone="Asia/Tokyo")
    assert given is not None
    assert with_time_zone(given, "+02:00").time_zone == "Asia/Tokyo"
