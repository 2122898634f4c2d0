"""A store with more faults than the library's own fake, for simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.stores.base import DeleteFailure, Listing, PutOutcome
from opendata_buffer.stores.listed import ListsVersions
from opendata_buffer.testing.faults import FaultPlan, FaultyStore


@dataclass(frozen=True, kw_only=True)
class HarshPlan(FaultPlan):
    """More faults. By default none of them happens.

    Attributes:
        cas_late: Share of conditional puts answered with ``Unknown`` and carried out later: after
            up to ``late_operations`` more operations on this store, or by
            :meth:`HarshStore.land_late_puts`.
        partial_lists: Share of listings that lack some of the newest objects, as on a store
            whose listings lag.
        stalls: Share of operations that take ``stall_ms`` longer, before or after the effect.
        hangs: Share of operations that are never answered. The caller gives up after ``hang_ms``,
            as after a request's timeout: reads, listings, deletes, and puts raise
            ``TransientStorageError``, and conditional puts are ``Unknown``. Half of the writes and
            deletes are carried out.
        wrong_dates: Share of listings with a wrong date of the store.
        date_error_ms: How far that date is ahead of the right one. Negative if it is behind.
    """

    cas_late: float = 0.0
    late_operations: int = 4
    partial_lists: float = 0.0
    stalls: float = 0.0
    stall_ms: float = 60_000.0
    hangs: float = 0.0
    hang_ms: float = 3_600_000.0  # longer than any deadline of the library
    wrong_dates: float = 0.0
    date_error_ms: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cas_late", "partial_lists", "stalls", "hangs", "wrong_dates"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}: use 0 to 1")


@dataclass(slots=True, eq=False)
class _LatePut:
    key: str
    data: bytes
    condition: str | None
    operations_left: int


class HarshStore(FaultyStore):
    plan: HarshPlan

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if type(self.plan) is FaultPlan:
            self.plan = HarshPlan(**vars(self.plan))
        self._late: list[_LatePut] = []

    def get(self, key: str, **options: Any) -> Any:
        if self._hangs():
            raise TransientStorageError(f"cannot read {key!r}: injected, no answer")
        return super().get(key, **options)

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self._hangs(lambda: self.inner.put(key, data)):
            raise TransientStorageError(f"cannot write {key!r}: injected, no answer")
        super().put(key, data)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if self._hangs(lambda: self.inner.put_if(key, data, condition)):
            return outcomes.Unknown("injected: no answer")
        if self._rolls("cas_late"):
            self._begin("put_if", self.plan.cas_ms)
            with self._lock:
                left = self._dice.randint(0, self.plan.late_operations)
                self._late.append(_LatePut(key, data, condition, left))
            self._end(self.plan.cas_ms)
            return outcomes.Unknown("injected: the request is still under way")
        return super().put_if(key, data, condition)

    def list_versions(self, prefix: str, most: int) -> Mapping[str, str] | None:
        """List each object before or after the time that the request takes, as a service may."""
        before = super().list_versions(prefix, most)
        if before is None or not isinstance(self.inner, ListsVersions):
            return None
        after = self.inner.list_versions(prefix, most) or {}
        with self._lock:
            return {
                key: self._dice.choice((before.get(key, version), version))
                for key, version in after.items()
            }

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        if self._hangs():
            raise TransientStorageError(f"cannot list {prefix!r}: injected, no answer")
        listing = super().list(prefix, start_after=start_after, limit=limit)
        if listing.objects and self._rolls("partial_lists"):
            by_age = sorted(listing.objects, key=lambda info: (info.last_modified_ms, info.key))
            with self._lock:
                lacking = self._dice.randint(1, max(1, len(by_age) // 4))
            hidden = {info.key for info in by_age[-lacking:]}
            kept = tuple(info for info in listing.objects if info.key not in hidden)
            listing = Listing(kept, listing.now_ms)  # as if the listing ended there
        if self._rolls("wrong_dates"):
            now_ms = listing.now_ms + self.plan.date_error_ms
            listing = Listing(listing.objects, now_ms, listing.truncated)
        return listing

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        keys = tuple(keys)
        if self._hangs(lambda: self.inner.delete_many(keys)):
            raise TransientStorageError("cannot delete: injected, no answer")
        return super().delete_many(keys)

    @property
    def late_puts(self) -> int:
        """The number of conditional puts that have not landed yet."""
        return len(self._late)

    def land_late_puts(self) -> None:
        """Carry out every conditional put that has not landed yet."""
        self._land(everything=True)

    def _begin(self, operation: str, takes_ms: float) -> None:
        super()._begin(operation, takes_ms)
        # Before the effect, so that an operation can see an earlier put that has just landed.
        self._land()

    def _hangs(self, effect: Callable[[], object] = lambda: None) -> bool:
        """Decide whether an operation gets no answer. Its effect happens at once or never."""
        if not self._rolls("hangs"):
            return False
        if self._coin():
            effect()
        self._runtime.sleep(self.plan.hang_ms / 1000)
        return True

    def _take(self, milliseconds: float) -> None:
        # Called before and after the effect, so each call takes half of the share.
        if self.plan.stalls and self._rolls("stalls", self.plan.stalls / 2):
            self._runtime.sleep(self.plan.stall_ms / 1000)
        super()._take(milliseconds)

    def _land(self, *, everything: bool = False) -> None:
        if not self._late:
            return
        with self._lock:
            due = [put for put in self._late if everything or put.operations_left <= 0]
            self._late = [put for put in self._late if put not in due]
            for put in self._late:
                put.operations_left -= 1
        for put in due:
            self.inner.put_if(put.key, put.data, put.condition)
