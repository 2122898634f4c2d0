"""How long uploads are safe, as the collector will judge them."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_sink.commit import Expiry, UploadAges
from buffer_sink.messages import Group, UploadedBatch
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.keys import Transaction, batch_key, later_ulid
from opendata_buffer.gc import Queued, plan
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

GRACE_S = 600
HOUR_S = 3_600


class World:
    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.store = MemoryStore(now_ms=self.runtime.now_ms)
        self.planned = Moment.now(self.runtime)
        self.keys: list[str] = []

    def upload(self, ahead_s: int = 0, txn: Transaction | None = None) -> str:
        key = batch_key("p", later_ulid(self.runtime.ulid(), ahead_s * 1000), txn)
        self.store.put(key, b"batch")
        self.keys.append(key)
        return key

    @property
    def lifetimes(self) -> UploadAges:
        return UploadAges(self.store, GRACE_S * 1000, HOUR_S * 1000, self.runtime)

    def expiry(self) -> Expiry:
        uploads = tuple(UploadedBatch(key, 1, 1, ()) for key in self.keys)
        return self.lifetimes.expiry(Group(self.planned, uploads))


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("listed")


def test_a_young_write_asks_the_store_nothing() -> None:
    world = World()
    world.upload()
    world.runtime.advance(GRACE_S / 2)
    world.store.list = refuse  # type: ignore[method-assign]
    assert world.expiry().left_ms == GRACE_S * 1000 / 2


@pytest.mark.parametrize("grace_periods", [1, 3, 6])
def test_a_write_of_several_grace_periods_is_safe_as_long_as_its_names_say(
    grace_periods: int,
) -> None:
    world = World()
    world.upload(ahead_s=HOUR_S)
    world.runtime.advance(grace_periods * GRACE_S)
    assert not world.expiry().is_over(world.runtime)
    # The collector sees it the same way, until the very moment when the expiry is over.
    left_s = world.expiry().left_ms / 1000
    for seconds, collected in ((left_s, 0), (1, 1)):
        world.runtime.advance(seconds)
        page = world.store.list("p/")
        made = plan(
            Queued(),
            page,
            own_ms=page.now_ms,
            data_path_prefix="p",
            grace_ms=GRACE_S * 1000,
        )
        assert len(made.delete) == collected


def test_a_write_longer_than_its_names_say_is_refused() -> None:
    world = World()
    world.upload(ahead_s=HOUR_S)
    world.runtime.advance(HOUR_S + GRACE_S / 2 + 1)
    with pytest.raises(TransientStorageError, match="Nothing was appended"):
        world.expiry()


def test_the_oldest_upload_counts_and_one_that_is_gone_is_told() -> None:
    world = World()
    first, last = world.upload(), None
    world.runtime.advance(100)
    last = world.upload()
    world.runtime.advance(10)
    assert world.lifetimes.oldest_ms([last, first]) == 110_000
    assert world.lifetimes.oldest_ms([last]) == 10_000
    world.store.delete_many([first])
    assert world.lifetimes.oldest_ms([first, last]) is None


def test_uploads_are_found_page_by_page_and_nothing_behind_them_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("buffer_sink.commit._PAGE", 2)
    world = World()
    keys = sorted(world.upload(txn=Transaction("q", 1)) for _ in range(7))
    asked: list[str] = []
    real = world.store.list

    def watched(prefix: str, **options: Any) -> Any:
        asked.append(prefix)
        return real(prefix, **options)

    world.store.list = watched  # type: ignore[method-assign]
    assert world.lifetimes.oldest_ms(keys[1:4]) == 0
    assert asked == ["p/app=q/batch=1/"] * 2
    world.store.delete_many([keys[2]])
    assert world.lifetimes.oldest_ms(keys[1:4]) is None


def test_a_suspended_machine_is_late_although_its_monotonic_clock_stood_still() -> None:
    runtime = ManualRuntime()
    expiry = Expiry(Moment.now(runtime), 1_000)
    assert not expiry.is_over(runtime)
    runtime.set_wall_clock(runtime.now_ms() + 1_001)
    assert expiry.is_over(runtime)
