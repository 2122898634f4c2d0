from __future__ import annotations

import json
from typing import Any

import pytest

from buffer_source.offsets import INITIAL, SourceOffset
from opendata_buffer.errors import InvalidInput

TRANSACTIONS = {"v": 1, "apps": {"a": 3}, "tail": None}


def test_the_json_is_golden_because_checkpoints_hold_it() -> None:
    offset = SourceOffset(7, 2, TRANSACTIONS, "01J")
    text = json.dumps(offset.to_json())
    assert text == (
        '{"v": 1, "queue": "01J", "next": 7, "base": 2, '
        '"txn": {"v": 1, "apps": {"a": 3}, "tail": null}}'
    )
    assert SourceOffset.from_json(json.loads(text)) == offset
    assert json.dumps(INITIAL) == '{"v": 1, "at": "start"}'
    assert SourceOffset.from_json(dict(INITIAL)) is None


def test_read_and_written_again_the_text_is_the_same() -> None:
    # Spark compares offsets as text; another order of keys would run empty batches for ever.
    text = json.dumps(SourceOffset(1 << 40, 0, TRANSACTIONS).to_json())
    again = SourceOffset.from_json(json.loads(text))
    assert again is not None
    assert json.dumps(again.to_json()) == text


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (None, "checkpointLocation of its own"),
        ({"n": 3}, "checkpointLocation of its own"),
        ({"v": 2, "next": 1}, "newer release"),
        ({"v": 1, "next": -1, "base": 0, "txn": {}}, "damaged"),
        ({"v": 1, "next": True, "base": 0, "txn": {}}, "damaged"),
        ({"v": 1, "next": 1, "base": "0", "txn": {}}, "damaged"),
        ({"v": 1, "next": 1, "base": 0}, "damaged"),
        ({"v": 1, "queue": 5, "next": 1, "base": 0, "txn": {}}, "damaged"),
        ({"v": 1, "at": "elsewhere"}, "damaged"),
    ],
)
def test_a_foreign_offset_is_refused(offset: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SourceOffset.from_json(offset)


def test_a_batch_begins_at_the_base_of_its_end_when_the_start_is_the_sentinel() -> None:
    assert SourceOffset(9, 4).begin_of(None) == 4


def test_a_batch_begins_where_the_one_before_ended() -> None:
    assert SourceOffset(9, 4).begin_of(SourceOffset(7, 4)) == 7


def test_a_new_base_is_where_reading_continued_after_a_loss() -> None:
    assert SourceOffset(20, 15).begin_of(SourceOffset(7, 4)) == 15
    assert SourceOffset(3, 0).begin_of(SourceOffset(7, 0)) == 0
