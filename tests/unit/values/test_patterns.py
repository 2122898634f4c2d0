from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values.patterns import Pattern


def read(pattern: str, text: str) -> str | None:
    found = Pattern(pattern, "timestampFormat").micros(text, UTC)
    if found is None:
        return None
    return datetime.fromtimestamp(found / 1e6, UTC).replace(tzinfo=None).isoformat(" ")


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("yyyy-MM-dd", "2020-03-04", "2020-03-04 00:00:00"),
        ("d.M.yy H:m:s", "4.3.20 5:6:7", "2020-03-04 05:06:07"),
        ("dd/MMM/yyyy:HH:mm:ss Z", "04/Mar/2020:05:06:07 +0100", "2020-03-04 04:06:07"),
        ("yyyy-MM-dd'T'HH:mm:ss[.SSS][XXX]", "2020-03-04T05:06:07", "2020-03-04 05:06:07"),
        (
            "yyyy-MM-dd'T'HH:mm:ss[.SSS][XXX]",
            "2020-03-04T05:06:07.5Z",
            "2020-03-04 05:06:07.500000",
        ),
        ("MMMM d, yyyy h:mm a", "March 4, 2020 12:30 am", "2020-03-04 00:30:00"),
        ("yyyy-DDD", "2020-366", "2020-12-31 00:00:00"),
        ("EEE, d MMM yyyy", "Wed, 4 Mar 2020", "2020-03-04 00:00:00"),
        ("HH:mm VV yyyy", "10:00 Europe/Berlin 2020", "2020-01-01 09:00:00"),
        ("yyyy''MM", "2020'03", "2020-03-01 00:00:00"),
    ],
)
def test_a_pattern_reads_what_fits_it(pattern: str, text: str, expected: str) -> None:
    assert read(pattern, text) == expected


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("yyyy-MM-dd", "2020-3-4"),
        ("yyyy-MM-dd", "2020-02-30"),
        ("yyyy-MM-dd", "2020-03-04 "),
        ("EEE yyyy-MM-dd", "Mon 2020-03-04"),
        ("HH:mm", "24:00"),
        ("hh:mm a", "13:00 AM"),
        ("yyyy-DDD", "2019-366"),
        ("yyyy VV", "2020 Nowhere"),
        ("yyyy-MM-dd", "+294248-01-01"),
        ("yyyy-MM-dd", "-290309-01-01"),
    ],
)
def test_what_does_not_fit_is_none(pattern: str, text: str) -> None:
    assert read(pattern, text) is None


@pytest.mark.parametrize("pattern", ["yyyy-MM-dd Q", "yyyy-'T", "[yyyy", "yyyy]", "zzz", "YYYY"])
def test_a_pattern_that_is_not_read_is_refused_with_the_letters_that_are(pattern: str) -> None:
    with pytest.raises(InvalidInput, match=r"option dateFormat .* Letters: y M"):
        Pattern(pattern, "dateFormat")


def test_a_pattern_goes_into_tasks() -> None:
    pattern = pickle.loads(pickle.dumps(Pattern("yyyy", "dateFormat")))
    assert pattern.days("1971") == 365
