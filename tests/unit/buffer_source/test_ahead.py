from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Generator, Iterator

import pytest

from buffer_source.ahead import AHEAD_BYTES, ahead
from opendata_buffer.runtime import SystemRuntime


class Item:
    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size


class Maker:
    """Makes items and says how far it is."""

    def __init__(self, count: int, size: int, fails_at: int | None = None) -> None:
        self.changed = threading.Condition()
        self.begun = 0
        self.alive: weakref.WeakSet[Item] = weakref.WeakSet()
        self.closed = False
        self._count, self._size, self._fails_at = count, size, fails_at

    def items(self) -> Generator[Item, None, None]:
        try:
            for number in range(self._count):
                with self.changed:
                    self.begun += 1
                    self.changed.notify_all()
                if number == self._fails_at:
                    raise ValueError(f"item {number}")
                item = Item(number, self._size)
                self.alive.add(item)
                yield item
                del item
        finally:
            self.closed = True

    def ahead(self) -> Generator[Item, None, None]:
        return ahead(self.items(), lambda item: item.size, SystemRuntime())

    def await_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun >= count, 30)


@pytest.fixture(autouse=True)
def _no_thread_leak() -> Iterator[None]:
    yield
    assert not [each for each in threading.enumerate() if each.name == "opendata-buffer-decode"]


@pytest.mark.parametrize("size", [1, AHEAD_BYTES])
def test_all_items_in_order(size: int) -> None:
    maker = Maker(100, size)
    assert [item.number for item in maker.ahead()] == list(range(100))
    assert maker.closed


def test_the_next_large_item_is_made_while_the_caller_has_one_and_no_third() -> None:
    maker = Maker(5, AHEAD_BYTES)
    results = maker.ahead()
    item = next(results)
    maker.await_begun(2)
    del item
    second = next(results)
    maker.await_begun(3)
    gc.collect()
    assert {each.number for each in maker.alive} <= {1, 2}
    assert second.number == 1
    assert maker.begun == 3
    results.close()


def test_small_items_are_made_ahead_up_to_the_limit() -> None:
    maker = Maker(100, AHEAD_BYTES // 10)
    results = maker.ahead()
    next(results)
    maker.await_begun(12)  # one was taken, eleven reach the limit
    assert maker.begun == 12
    results.close()
    assert maker.closed


def test_an_error_comes_at_its_place() -> None:
    results = Maker(10, 1, fails_at=3).ahead()
    assert [next(results).number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="item 3"):
        next(results)


def test_nothing_is_made_before_the_first_item_is_asked_for() -> None:
    maker = Maker(3, 1)
    maker.ahead().close()
    assert maker.begun == 0
