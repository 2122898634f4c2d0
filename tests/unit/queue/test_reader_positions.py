"""Positions of readers that go missing and come back."""

from __future__ import annotations

from opendata_buffer.admin.readers import readers_of
from opendata_buffer.admin.target import Target
from tests.support.log_fixture import DAY_S, LogFixture, read, small

__all__ = ["small"]


def half_deleted(fixture: LogFixture, name: str) -> None:
    """Start to delete a reader, and die between the two writes."""
    fixture.store.delete_many([f"ingest/_readers/{name}.json"])
    assert name in fixture.index().readers


def test_f44_a_reader_whose_deletion_was_interrupted_expires_like_any_other() -> None:
    fixture = LogFixture()
    fixture.append(40)
    read(fixture.reader("gone"), 10)
    quick = fixture.reader("quick")
    read(quick)
    fixture.collect()
    half_deleted(fixture, "gone")
    for day in range(6):
        fixture.append(1)
        read(quick)
        fixture.collect()
        assert fixture.index().floor == 10, f"its unread batches are kept on day {day}"
        fixture.runtime.advance(DAY_S)
    fixture.runtime.advance(2 * DAY_S)
    read(quick)
    fixture.collect()
    assert (fixture.index().floor, fixture.index().readers) == (46, ("quick",))
    assert not fixture.index().missing
    assert fixture.reader("gone").first_sequence == 46


def test_f44_a_restored_position_of_a_reader_counts_again() -> None:
    fixture = LogFixture()
    fixture.append(40)
    slow, quick = fixture.reader("slow"), fixture.reader("quick")
    read(slow, 10)
    read(quick)
    saved = fixture.store.get("ingest/_readers/slow.json").data
    for _ in range(2):  # the position is lost and restored twice
        half_deleted(fixture, "slow")
        fixture.runtime.advance(DAY_S)
        fixture.collect()
        assert [*fixture.index().missing] == ["slow"]
        fixture.store.put("ingest/_readers/slow.json", saved)
        fixture.runtime.advance(6 * DAY_S)
        read(quick)
        fixture.collect()
        assert not fixture.index().missing
    assert "slow" in fixture.index().readers
    half_deleted(fixture, "slow")
    fixture.collect()
    again = fixture.reader("slow")
    assert again.first_sequence == 10
    assert not fixture.index().missing, "a reader has a position again after its start"


def test_f44_a_missing_position_is_noted_with_one_write() -> None:
    fixture = LogFixture()
    fixture.append(40)
    read(fixture.reader("slow"), 10)
    fixture.collect()
    half_deleted(fixture, "slow")
    fixture.collect()
    before = fixture.index()
    fixture.collect()
    assert fixture.index() == before
    (found,) = readers_of(Target(fixture.store, fixture.config, fixture.runtime), fixture.view())
    assert found.position_missing
    assert 0 < found.expires_seconds < 7 * DAY_S
