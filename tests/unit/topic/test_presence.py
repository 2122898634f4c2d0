"""Whether a store has a topic, without anything else of topics."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendata_buffer.queue.ownership import TOPIC_KEY
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.topic.description import MAX_BYTES, is_topic
from opendata_buffer.topic.topic import Topic


def test_a_store_has_a_topic_once_one_was_made(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert not is_topic(store)
    Topic.create(str(tmp_path), partitions=2)
    assert is_topic(store)


@pytest.mark.parametrize("size", [0, MAX_BYTES + 1])
def test_a_description_that_nobody_can_read_is_a_topic_too(tmp_path: Path, size: int) -> None:
    store = LocalStore(tmp_path)
    store.put(TOPIC_KEY, b"x" * size)
    assert is_topic(store)
