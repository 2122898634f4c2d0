"""Values that records have as strings."""

from __future__ import annotations

import pyarrow as pa
import pytest

from opendata_buffer.values.from_texts import from_texts
from opendata_buffer.values.options import ValueOptions


@pytest.mark.parametrize("zone", ["UTC", "+02:00"])
def test_times_in_bulk_are_what_they_are_one_by_one(zone: str) -> None:
    texts = [
        "2020-01-01T00:00:00Z", "2020-01-01 00:00:00.123456Z", "2020-01-01T10:00:00+05:30",
        "2020-01-01 10:00:00", "2020-1-1", "2020-01-01T10Z", "2020-01-01T10:00:00+23:00",
        "2020-02-30T10:00:00Z", "", "x", "2020-01-01T10:00:00.1234567Z", "0001-01-01T00:00:00Z",
    ]  # fmt: skip
    options = ValueOptions(time_zone=zone)
    dtype = pa.timestamp("us", "UTC")

    def answers(*some: str) -> list[int | str | None]:
        found = from_texts(pa.array(some), dtype, options)
        doubtful = [False] * len(some) if found.doubtful is None else found.doubtful.tolist()
        values = found.array.cast(pa.int64()).to_pylist()
        return ["doubtful" if bad else value for value, bad in zip(values, doubtful, strict=True)]

    alone = [answers(each)[0] for each in texts]
    assert answers(*texts) == alone
    assert alone.count("doubtful") == 5
    assert answers(*texts[:2]) == alone[:2]


def test_bytes_are_base64_and_what_is_none_is_doubtful() -> None:
    found = from_texts(pa.array(["YWI=", None, "?"]), pa.binary(), ValueOptions())
    assert found.array.to_pylist() == [b"ab", None, None]
    assert found.doubtful is not None
    assert found.doubtful.tolist() == [False, False, True]
