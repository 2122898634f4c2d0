"""Positions in partitions, as text and back."""

from __future__ import annotations

import pickle

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.topic.partition_consumer import PartitionPosition

EXAMPLES = [
    PartitionPosition("01J5T4R3KXBMZ7QV9N2WG8Y000", 41),
    PartitionPosition("", 0),
    PartitionPosition("01J5", 2**63, 3, {"version": 1, "producers": {"0102": [1, 2, 3]}}),
]


@pytest.mark.parametrize("position", EXAMPLES, ids=str)
def test_a_position_is_read_from_its_text(position: PartitionPosition) -> None:
    assert PartitionPosition.parse(str(position)) == position
    assert PartitionPosition.of(str(position)) == position
    assert PartitionPosition.of(position) is position
    assert pickle.loads(pickle.dumps(position)) == position


def test_a_plain_one_is_short() -> None:
    assert str(EXAMPLES[0]) == '{"queue":"01J5T4R3KXBMZ7QV9N2WG8Y000","sequence":41}'


@pytest.mark.parametrize(
    "text",
    [
        "", "41", "01J5:41", "{}", "[1]", '{"queue":"a"}', '{"queue":"a","sequence":-1}',
        '{"queue":"a","sequence":"1"}', '{"queue":"a","sequence":1,"delivered":-1}',
        '{"queue":"a","sequence":1,"transactions":[]}', "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"TopicConsumer\.positions"):
        PartitionPosition.parse(text)
