"""The check of a queue that changes while it is checked."""

from __future__ import annotations

from typing import Any

from opendata_buffer.admin.queue_check import check_queue
from opendata_buffer.admin.target import Target
from opendata_buffer.config import ConsumerConfig
from tests.support.log_fixture import URL, LogFixture, read, small

__all__ = ["small"]


def test_entries_that_move_into_segments_during_a_check_are_not_a_fault() -> None:
    fixture = LogFixture()
    fixture.append(60)
    get, ends = fixture.store.get, set[int]()

    def get_and_move(key: str, **options: Any) -> Any:
        found = get(key, **options)
        if key == "ingest/_log.json":
            fixture.store.get = get  # type: ignore[method-assign]
            fixture.append(30)
            ends.add(fixture.index().end)
            fixture.store.get = get_and_move  # type: ignore[method-assign]
        return found

    fixture.store.get = get_and_move  # type: ignore[method-assign]
    config = ConsumerConfig(store=URL)
    report = check_queue(Target(fixture.store, config, fixture.runtime))
    assert len(ends) > 2, "nothing moved during the check"
    assert report.ok
    assert report.batches >= 60


def test_batches_that_are_read_and_collected_during_a_check_are_not_missing() -> None:
    fixture = LogFixture()
    fixture.append(60)
    reader = fixture.reader("reader")
    fetched, get = set[str](), fixture.store.get

    def get_after_collection(key: str, **options: Any) -> Any:
        if key.endswith(".batch") and not fetched:
            fetched.add(key)
            assert len(read(reader)) == 60
            assert fixture.collect() > 0
        return get(key, **options)

    fixture.store.get = get_after_collection  # type: ignore[method-assign]
    report = check_queue(Target(fixture.store, ConsumerConfig(store=URL), fixture.runtime))
    assert fetched
    assert report.ok
