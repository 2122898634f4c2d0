"""Metadata for records that are read."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pytest

from opendata_buffer.cli import described
from opendata_buffer.cli.described import Described, FromJson, FromLines, Keyed, Lines, Run, Same
from opendata_buffer.errors import InvalidInput

Plain = tuple[list[bytes], bytes]
"""Records and their metadata."""


def lines_of(data: bytes) -> FromLines:
    return FromLines(Lines(io.BytesIO(data), "file", "metadata"))


def taken(each: Described, *pieces: list[bytes]) -> list[Plain]:
    found = [(run.records, run.metadata) for records in pieces for run in each.runs(records)]
    each.finish()
    return found


def before_the_error(runs: Iterable[Run]) -> tuple[list[Plain], str]:
    found: list[Plain] = []
    try:
        for run in runs:
            found.append((run.records, run.metadata))
    except InvalidInput as error:
        return found, str(error)
    raise AssertionError("nothing was refused")


def test_one_metadata_is_that_of_all() -> None:
    assert taken(Same(b"m"), [b"1", b"2"], [], [b"3"]) == [([b"1", b"2"], b"m"), ([b"3"], b"m")]


def test_line_n_belongs_to_record_n_and_equal_neighbours_share_a_run() -> None:
    lines = lines_of(b"a\na\n\nb")
    found = taken(lines, [b"1", b"2", b"3"], [b"4"])
    assert found == [([b"1", b"2"], b"a"), ([b"3"], b""), ([b"4"], b"b")]


def test_a_record_without_a_line_is_refused_after_those_before_it() -> None:
    lines = lines_of(b"a\na\n")
    found, error = before_the_error(lines.runs([b"1", b"2", b"3"]))
    assert found == [([b"1", b"2"], b"a")]
    assert "'file' ends after 2 lines, and record 3 has no metadata" in error


def test_a_line_without_a_record_is_refused() -> None:
    lines = lines_of(b"a\nb\n")
    with pytest.raises(InvalidInput, match="'file' has more lines of metadata than"):
        taken(lines, [b"1"])


def test_a_line_that_is_too_long_for_the_manifest_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(described, "MAX_METADATA_BYTES", 3)
    found, error = before_the_error(lines_of(b"abc\nabcd\n").runs([b"1", b"2"]))
    assert found == [([b"1"], b"abc")]
    assert "line 2 of 'file' has more than 3 bytes" in error
    found, error = before_the_error(FromJson().runs([b'{"value": "", "metadata": "abcd"}']))
    assert "metadata has more than 3 bytes" in error


def test_json_brings_value_and_metadata_as_text_or_base64() -> None:
    lines = [
        b'{"value": "\xc3\xa4", "metadata": "m", "sequence": 7}',
        b" ",
        b'{"value_base64": "/w==", "metadata_base64": "AP8="}',
        b'{"value": ""}',
    ]
    found = taken(FromJson(), lines)
    assert found == [(["ä".encode()], b"m"), ([b"\xff"], b"\0\xff"), ([b""], b"")]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "no JSON"),
        (b"[1]", "no JSON object"),
        (b'{"key": "a"}', "neither 'value' nor 'value_base64'"),
        (b'{"value": 1}', "'value' is not text"),
        (b'{"value_base64": "a"}', "'value_base64' is not base64"),
        (b'{"value": "a", "value_base64": "YQ=="}', "both"),
        (b'{"value": "a", "metadata": {}}', "'metadata' is not text"),
        (b'{"value": "\\ud800"}', "'value' is not text"),
    ],
)
def test_a_line_that_is_no_record_is_told_by_its_number(line: bytes, why: str) -> None:
    found, error = before_the_error(FromJson().runs([b'{"value": "a"}', line]))
    assert found == [([b"a"], b"")]
    assert error.startswith("line 2 is no record")
    assert why in error


# ---- keys


def test_json_may_bring_keys_and_records_without_one_are_runs_of_their_own() -> None:
    lines = [
        b'{"value": "1", "key": "a"}',
        b'{"value": "2", "key_base64": "/w=="}',
        b'{"value": "3"}',
        b'{"value": "4", "key": "", "metadata": "m"}',
    ]
    assert list(FromJson(keyed=True).runs(lines)) == [
        Run([b"1", b"2"], b"", [b"a", b"\xff"]),
        Run([b"3"], b""),
        Run([b"4"], b"m", [b""]),
    ]
    assert list(FromJson().runs([b'{"value": "1", "key": 7}'])) == [Run([b"1"], b"")]
    found, error = before_the_error(FromJson(keyed=True).runs([b'{"value": "1", "key": 7}']))
    assert found == []
    assert "'key' is not text" in error


def test_a_key_comes_from_the_metadata_or_from_a_line_of_its_own() -> None:
    by_metadata = Keyed(lines_of(b"x\ny\ny"), lambda metadata: metadata)
    assert list(by_metadata.runs([b"1", b"2", b"3"])) == [
        Run([b"1"], b"x", [b"x"]), Run([b"2", b"3"], b"y", [b"y", b"y"]),
    ]  # fmt: skip
    by_metadata.finish()
    keys = Lines(io.BytesIO(b"a\nb\nc\nd\n"), "keys", "key")
    by_line = Keyed(Same(b"m"), lambda metadata: keys.next(), keys.finish)
    assert list(by_line.runs([b"1", b"2"])) == [Run([b"1", b"2"], b"m", [b"a", b"b"])]
    assert list(by_line.runs([b"3"])) == [Run([b"3"], b"m", [b"c"])]
    with pytest.raises(InvalidInput, match="more lines of key than the input has records, 3"):
        by_line.finish()


def test_records_before_one_without_a_key_keep_theirs() -> None:
    keys = Lines(io.BytesIO(b"a\nb\n"), "keys", "key")
    runs = Keyed(Same(b""), lambda metadata: keys.next()).runs([b"1", b"2", b"3"])
    assert next(runs) == Run([b"1", b"2"], b"", [b"a", b"b"])
    with pytest.raises(InvalidInput, match="record 3 has no key"):
        next(runs)
