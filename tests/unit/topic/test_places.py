"""The places in the partitions of a topic."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from opendata_buffer.consumer.place import Place
from opendata_buffer.errors import InvalidInput
from opendata_buffer.topic.places import TopicPlaces

NAMES = ("p-00000", "p-00001")


@pytest.mark.parametrize("given", ["earliest", "latest", datetime(2026, 1, 31, tzinfo=UTC)])
def test_one_place_applies_to_all_partitions(given: Any) -> None:
    places = TopicPlaces(given, NAMES)
    assert places.at("p-00000") == places.at("p-00001") == Place.of(given)


def test_places_are_given_by_number_or_name_and_other_partitions_get_the_default() -> None:
    places = TopicPlaces({0: 7, "p-00001": "latest"}, NAMES)
    assert places.at("p-00000") == Place.of(7)
    assert places.at("p-00001") == Place.of("latest")
    assert TopicPlaces({1: 7}, NAMES).at("p-00000") is None
    assert TopicPlaces({1: 7}, NAMES, default=Place("latest")).at("p-00000") == Place("latest")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (42, r"start is 42, and each partition counts its own .* such as start=\{0: 42\}"),
        ({7: 42}, "partition is 7"),
        ({0: 1, "p-00000": 2}, "start names partition p-00000 twice"),
        ({0: "soon"}, r"start\[0\] is 'soon': use 'earliest'"),
        ({1.5: 42}, "a key of start is 1.5"),
    ],
)
def test_places_that_mean_nothing_in_a_topic_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TopicPlaces(given, NAMES)
