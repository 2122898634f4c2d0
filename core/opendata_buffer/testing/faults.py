"""A store that fails as real ones do, at random by a seed, and is as slow.

::

    store = FaultyStore(MemoryStore(), runtime, FaultPlan(cas_lost_after=0.1, cas_ms=60), seed=7)

Every promise of the store protocols still holds, and only what may happen on S3 happens: code that
loses data over such a store loses data over S3.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from opendata_buffer import outcomes
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import (
    Absent,
    Blob,
    DeleteFailure,
    IfVersion,
    Listing,
    NotModified,
    PutOutcome,
    Store,
)


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """How often each fault happens, and how long each operation takes. The default is no fault.

    Attributes:
        cas_lost_after: Share of conditional puts that are carried out, whatever that means for
            their condition, and answered with ``Unknown`` (failure F2).
        cas_lost_before: Share that never arrive, answered with ``Unknown``.
        cas_late: Share answered with ``Unknown`` and carried out later: after up to
            ``late_operations`` more operations on this store, or by
            :meth:`FaultyStore.land_late_puts`.
        late_operations: See ``cas_late``. Default 4.
        get_errors: Share of reads that raise ``TransientStorageError``.
        put_errors: Share of unconditional puts that raise it; half of them are carried out.
        list_errors: Share of listings that raise it.
        partial_lists: Share of listings that lack some of the newest objects, as on a store
            whose listings lag.
        delete_errors: Share of keys reported as not deleted; half of them are deleted.
        stalls: Share of operations that take ``stall_ms`` longer, before or after the effect.
        stall_ms: Default 60,000.
        hangs: Share of operations that are never answered. The caller gives up after
            ``hang_ms``, as on a request's timeout: reads, listings, deletes and puts raise
            ``TransientStorageError``, conditional puts are ``Unknown``. Half of the writes and
            deletes are carried out.
        hang_ms: Default 3,600,000: longer than any deadline of the library.
        wrong_dates: Share of listings with a wrong time for the store's.
        date_error_ms: How far that time is ahead of the right one; negative: behind.
        get_ms: What a read takes, milliseconds.
        put_ms: What an unconditional put takes; half of it before the effect, half after.
        cas_ms: What a conditional put takes; half before, half after.
        list_ms: What a listing takes.
        delete_ms: What one ``delete_many`` takes.
        jitter: Largest part by which each of these times is longer or shorter, 0 to 1.
    """

    cas_lost_after: float = 0.0
    cas_lost_before: float = 0.0
    cas_late: float = 0.0
    late_operations: int = 4
    get_errors: float = 0.0
    put_errors: float = 0.0
    list_errors: float = 0.0
    partial_lists: float = 0.0
    delete_errors: float = 0.0
    stalls: float = 0.0
    stall_ms: float = 60_000.0
    hangs: float = 0.0
    hang_ms: float = 3_600_000.0
    wrong_dates: float = 0.0
    date_error_ms: int = 0
    get_ms: float = 0.0
    put_ms: float = 0.0
    cas_ms: float = 0.0
    list_ms: float = 0.0
    delete_ms: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        shares = {f.name for f in fields(self)} - {"late_operations", "date_error_ms"}
        for name in sorted(shares):
            value = getattr(self, name)
            most = float("inf") if name.endswith("_ms") else 1.0
            if not 0 <= value <= most:
                raise InvalidInput(f"{name} is {value!r}: use 0 to {most:g}")
        if self.late_operations < 0:
            raise InvalidInput(f"late_operations is {self.late_operations!r}: use 0 or more")


@dataclass(slots=True, eq=False)
class _LatePut:
    key: str
    data: bytes
    condition: Absent | IfVersion
    operations_left: int


class FaultyStore:
    """Any store, with the faults and the latency of a plan.

    Waits only by ``runtime.sleep``, so it works on real, manual and simulated time. The faults
    are drawn from ``seed`` alone: the same operations in the same order fail the same way.

    Args:
        inner: The store that holds the objects.
        runtime: Whose ``sleep`` takes the time.
        plan: The faults. May be replaced at any time through :attr:`plan`.
        seed: Of the random faults.
    """

    def __init__(
        self, inner: Store, runtime: Runtime, plan: FaultPlan | None = None, *, seed: int = 0
    ) -> None:
        self.inner = inner
        self.plan = plan if plan is not None else FaultPlan()
        self.operations: Counter[str] = Counter()
        """Operations begun, by name: ``get``, ``put``, ``put_if``, ``list``, ``delete_many``."""
        self.faults: Counter[str] = Counter()
        """Faults injected, by the name of their field in the plan."""
        self._runtime = runtime
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._late: list[_LatePut] = []

    @property
    def url(self) -> str:
        """The inner store's."""
        return self.inner.url

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | NotModified:
        """See :meth:`opendata_buffer.stores.Get.get`."""
        self._begin("get", self.plan.get_ms)
        if self._hangs():
            raise TransientStorageError(f"cannot read {key!r}: injected, no answer")
        if self._rolls("get_errors"):
            raise TransientStorageError(f"cannot read {key!r}: injected 503 SlowDown")
        found = self.inner.get(
            key, if_changed=if_changed, byte_range=byte_range, max_bytes=max_bytes
        )
        self._end(self.plan.get_ms)
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.Put.put`."""
        self._begin("put", self.plan.put_ms)
        if self._hangs(lambda: self.inner.put(key, data)):
            raise TransientStorageError(f"cannot write {key!r}: injected, no answer")
        fails = self._rolls("put_errors")
        if not fails or self._coin():
            self.inner.put(key, data)
        self._end(self.plan.put_ms)
        if fails:
            raise TransientStorageError(f"cannot write {key!r}: injected 500 InternalError")

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.ConditionalPut.put_if`."""
        self._begin("put_if", self.plan.cas_ms)
        if self._hangs(lambda: self.inner.put_if(key, data, condition)):
            return outcomes.Unknown("injected: no answer")
        if self._rolls("cas_lost_before"):
            self._end(self.plan.cas_ms)
            return outcomes.Unknown("injected: the request was lost")
        if self._rolls("cas_late"):
            with self._lock:
                left = self._dice.randint(0, self.plan.late_operations)
                self._late.append(_LatePut(key, data, condition, left))
            self._end(self.plan.cas_ms)
            return outcomes.Unknown("injected: the request is still under way")
        lost = self._rolls("cas_lost_after")
        outcome = self.inner.put_if(key, data, condition)
        self._end(self.plan.cas_ms)
        return outcomes.Unknown("injected: the answer was lost") if lost else outcome

    def check_conditional_writes(self, near: str) -> None:
        """The inner store's; without faults."""
        self.inner.check_conditional_writes(near)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.List.list`."""
        self._begin("list", self.plan.list_ms)
        if self._hangs():
            raise TransientStorageError(f"cannot list {prefix!r}: injected, no answer")
        if self._rolls("list_errors"):
            raise TransientStorageError(f"cannot list {prefix!r}: injected 503 SlowDown")
        listing = self.inner.list(prefix, start_after=start_after, limit=limit)
        if listing.objects and self._rolls("partial_lists"):
            by_age = sorted(listing.objects, key=lambda info: (info.last_modified_ms, info.key))
            with self._lock:
                lacking = self._dice.randint(1, max(1, len(by_age) // 4))
            hidden = {info.key for info in by_age[-lacking:]}
            kept = tuple(info for info in listing.objects if info.key not in hidden)
            listing = Listing(kept, listing.now_ms)  # as if it ended there
        if self._rolls("wrong_dates"):
            now_ms = listing.now_ms + self.plan.date_error_ms
            listing = Listing(listing.objects, now_ms, listing.truncated)
        self._end(self.plan.list_ms)
        return listing

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.Delete.delete_many`."""
        self._begin("delete_many", self.plan.delete_ms)
        keys = tuple(keys)
        if self._hangs(lambda: self.inner.delete_many(keys)):
            raise TransientStorageError("cannot delete: injected, no answer")
        failed: list[DeleteFailure] = []
        sent: list[str] = []
        for key in keys:
            if self._rolls("delete_errors"):
                failed.append(DeleteFailure(key, "injected 503 SlowDown"))
                if not self._coin():
                    continue
            sent.append(key)
        already = {failure.key for failure in failed}
        for failure in self.inner.delete_many(sent):
            if failure.key not in already:
                failed.append(failure)
        self._end(self.plan.delete_ms)
        return tuple(failed)

    @property
    def late_puts(self) -> int:
        """Conditional puts still under way."""
        return len(self._late)

    def land_late_puts(self) -> None:
        """Carry out every conditional put that is still under way."""
        self._land(everything=True)

    # ---- random faults and time

    def _begin(self, operation: str, takes_ms: float) -> None:
        with self._lock:
            self.operations[operation] += 1
        self._take(takes_ms / 2)
        # Before the effect: an operation may well find that an earlier put has landed at last.
        self._land()

    def _end(self, takes_ms: float) -> None:
        self._take(takes_ms / 2)

    def _hangs(self, effect: Callable[[], object] = lambda: None) -> bool:
        """Roll for an operation without an answer; its effect comes at once or never."""
        if not self._rolls("hangs"):
            return False
        if self._coin():
            effect()
        self._runtime.sleep(self.plan.hang_ms / 1000)
        return True

    def _take(self, milliseconds: float) -> None:
        # Asked for before and after the effect, so half of the share each time.
        if self.plan.stalls and self._rolls("stalls", self.plan.stalls / 2):
            milliseconds += self.plan.stall_ms
        if self.plan.jitter:
            with self._lock:
                part = self._dice.uniform(-self.plan.jitter, self.plan.jitter)
            milliseconds *= 1 + part
        if milliseconds > 0:
            self._runtime.sleep(milliseconds / 1000)

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

    def _rolls(self, fault: str, share: float | None = None) -> bool:
        share = getattr(self.plan, fault) if share is None else share
        # No draw for what cannot happen: adding a fault to the plan of one operation leaves the
        # history of the others as it was.
        if not share:
            return False
        with self._lock:
            hit = self._dice.random() < share
            if hit:
                self.faults[fault] += 1
        return hit

    def _coin(self) -> bool:
        with self._lock:
            return self._dice.random() < 0.5
