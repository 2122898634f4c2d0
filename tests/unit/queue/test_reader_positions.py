"""Positions of readers that are missing, and come back."""

from __future__ import annotations

from opendata_buffer.admin.readers import readers_of
from opendata_buffer.admin.target import Target
from tests.unit.queue.test_log import DAY_S, House, read, small

__all__ = ["small"]


def half_deleted(house: House, name: str) -> None:
    """Delete a reader, and die between the two writes."""
    house.store.delete_many([f"ingest/_readers/{name}.json"])
    assert name in house.index().readers


def test_f44_a_reader_whose_deletion_was_interrupted_expires_as_any_other() -> None:
    house = House()
    house.append(40)
    read(house.reader("gone"), 10)
    quick = house.reader("quick")
    read(quick)
    house.collect()
    half_deleted(house, "gone")
    for day in range(6):
        house.append(1)
        read(quick)
        house.collect()
        assert house.index().floor == 10, f"what it had not read is kept on day {day}"
        house.runtime.advance(DAY_S)
    house.runtime.advance(2 * DAY_S)
    read(quick)
    house.collect()
    assert (house.index().floor, house.index().readers) == (46, ("quick",))
    assert not house.index().missing
    assert house.reader("gone").first_sequence == 46


def test_f44_a_reader_whose_position_comes_back_is_counted_from_its_position_again() -> None:
    house = House()
    house.append(40)
    slow, quick = house.reader("slow"), house.reader("quick")
    read(slow, 10)
    read(quick)
    saved = house.store.get("ingest/_readers/slow.json").data
    for _ in range(2):  # it is lost, and restored, twice
        half_deleted(house, "slow")
        house.runtime.advance(DAY_S)
        house.collect()
        assert [*house.index().missing] == ["slow"]
        house.store.put("ingest/_readers/slow.json", saved)
        house.runtime.advance(6 * DAY_S)
        read(quick)
        house.collect()
        assert not house.index().missing
    assert "slow" in house.index().readers
    half_deleted(house, "slow")
    house.collect()
    again = house.reader("slow")
    assert again.first_sequence == 10
    assert not house.index().missing, "a reader that starts has a position again"


def test_f44_a_missing_position_is_noted_with_one_write() -> None:
    house = House()
    house.append(40)
    read(house.reader("slow"), 10)
    house.collect()
    half_deleted(house, "slow")
    house.collect()
    before = house.index()
    house.collect()
    assert house.index() == before
    (found,) = readers_of(Target(house.store, house.config, house.runtime), house.view())
    assert found.position_missing
    assert 0 < found.expires_seconds < 7 * DAY_S
