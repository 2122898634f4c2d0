"""A store that is as slow as real ones and fails as they do, at random from a seed.

::

    store = FaultyStore(MemoryStore(), runtime, FaultPlan(cas_lost_after=0.1, cas_ms=60), seed=7)

It only injects faults that can happen on S3. So code that loses data over this store also loses
data over S3.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from opendata_buffer import outcomes
from opendata_buffer.arguments import check_fields, checked
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Blob, DeleteFailure, Listing, PutOutcome, Store
from opendata_buffer.stores.listed import ListsVersions
from opendata_buffer.stores.probed import Probed


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """How often each fault happens, and how long each operation takes. By default nothing fails.

    Shares are probabilities from 0 to 1.

    Attributes:
        cas_lost_after: Share of conditional puts that reach the store, which applies or refuses
            them, and that are answered with ``Unknown`` (failure F2).
        cas_lost_before: Share of conditional puts that never arrive, answered with ``Unknown``.
        get_errors: Share of reads that raise ``TransientStorageError``.
        put_errors: Share of unconditional puts that raise it. Half of them are carried out.
        list_errors: Share of listings that raise it.
        delete_errors: Share of keys that are reported as not deleted. Half of them are deleted.
        get_ms: Duration of a read, in milliseconds.
        put_ms: Duration of an unconditional put, in milliseconds. Half of it passes before the
            effect, half after.
        cas_ms: Duration of a conditional put, in milliseconds. Half of it passes before the effect,
            half after.
        list_ms: Duration of a listing, in milliseconds.
        delete_ms: Duration of one ``delete_many``, in milliseconds.
        jitter: Largest part by which each duration is longer or shorter, 0 to 1.

    Raises:
        InvalidInput: A share or the jitter is not between 0 and 1, or a duration is negative.
    """

    cas_lost_after: float = 0.0
    cas_lost_before: float = 0.0
    get_errors: float = 0.0
    put_errors: float = 0.0
    list_errors: float = 0.0
    delete_errors: float = 0.0
    get_ms: float = 0.0
    put_ms: float = 0.0
    cas_ms: float = 0.0
    list_ms: float = 0.0
    delete_ms: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        for each in fields(FaultPlan):
            value = getattr(self, each.name)
            most = float("inf") if each.name.endswith("_ms") else 1.0
            if not 0 <= value <= most:
                raise InvalidInput(f"{each.name} is {value!r}: use 0 to {most:g}")


class FaultyStore:
    """A store around any other store, with the faults and the latency of a plan.

    It waits only with ``runtime.sleep``, so it works on real, manual and simulated time. The faults
    are drawn from ``seed`` alone: the same operations in the same order fail the same way.

    Args:
        inner: The store that holds the objects.
        runtime: The runtime whose ``sleep`` takes the time.
        plan: The faults. They may be replaced at any time through :attr:`plan`.
        seed: Seed of the random faults.
    """

    @checked
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

    @property
    def url(self) -> str:
        """The URL of the inner store."""
        return self.inner.url

    @checked
    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | None:
        """See :meth:`opendata_buffer.stores.base.Get.get`."""
        self._begin("get", self.plan.get_ms)
        if self._rolls("get_errors"):
            raise TransientStorageError(f"cannot read {key!r}: injected 503 SlowDown")
        found = self.inner.get(
            key, if_changed=if_changed, byte_range=byte_range, max_bytes=max_bytes
        )
        self._end(self.plan.get_ms)
        return found

    @checked
    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.base.Put.put`."""
        self._begin("put", self.plan.put_ms)
        fails = self._rolls("put_errors")
        if not fails or self._coin():
            self.inner.put(key, data)
        self._end(self.plan.put_ms)
        if fails:
            raise TransientStorageError(f"cannot write {key!r}: injected 500 InternalError")

    @checked
    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.put_if`."""
        self._begin("put_if", self.plan.cas_ms)
        if self._rolls("cas_lost_before"):
            self._end(self.plan.cas_ms)
            return outcomes.Unknown("injected: the request was lost")
        lost = self._rolls("cas_lost_after")
        outcome = self.inner.put_if(key, data, version)
        self._end(self.plan.cas_ms)
        return outcomes.Unknown("injected: the answer was lost") if lost else outcome

    @checked
    def check_conditional_writes(
        self, near: str, known: Iterable[Probed] = (), *, trust: bool = True
    ) -> Probed | None:
        """Check the inner store, without faults.

        Args:
            near: As for
                :meth:`opendata_buffer.stores.base.ConditionalPut.check_conditional_writes`.
            known: As there.
            trust: As there.

        Returns:
            The inner store's answer.
        """
        return self.inner.check_conditional_writes(near, known, trust=trust)

    @checked
    def check_refusal(self, near: str) -> None:
        """Check the inner store, without faults.

        Args:
            near: As for :meth:`opendata_buffer.stores.base.ConditionalPut.check_refusal`.
        """
        self.inner.check_refusal(near)

    @checked
    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.base.List.list`."""
        self._begin("list", self.plan.list_ms)
        if self._rolls("list_errors"):
            raise TransientStorageError(f"cannot list {prefix!r}: injected 503 SlowDown")
        listing = self.inner.list(prefix, start_after=start_after, limit=limit)
        self._end(self.plan.list_ms)
        return listing

    @checked
    def list_versions(self, prefix: str, most: int) -> Mapping[str, str] | None:
        """See :meth:`opendata_buffer.stores.listed.ListsVersions.list_versions`.

        It takes as long as a listing, and fails as often.
        """
        if not isinstance(self.inner, ListsVersions):
            return None
        self._begin("list", self.plan.list_ms)
        if self._rolls("list_errors"):
            raise TransientStorageError(f"cannot list {prefix!r}: injected 503 SlowDown")
        found = self.inner.list_versions(prefix, most)
        self._end(self.plan.list_ms)
        return found

    @checked
    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.base.Delete.delete_many`."""
        self._begin("delete_many", self.plan.delete_ms)
        failed: dict[str, DeleteFailure] = {}
        sent: list[str] = []
        for key in keys:
            if self._rolls("delete_errors"):
                failed[key] = DeleteFailure(key, "injected 503 SlowDown")
                if not self._coin():
                    continue
            sent.append(key)
        failed = {each.key: each for each in self.inner.delete_many(sent)} | failed
        self._end(self.plan.delete_ms)
        return tuple(failed.values())

    # ---- random faults and time

    def _begin(self, operation: str, takes_ms: float) -> None:
        with self._lock:
            self.operations[operation] += 1
        self._take(takes_ms / 2)

    def _end(self, takes_ms: float) -> None:
        self._take(takes_ms / 2)

    def _take(self, milliseconds: float) -> None:
        if self.plan.jitter:
            with self._lock:
                part = self._dice.uniform(-self.plan.jitter, self.plan.jitter)
            milliseconds *= 1 + part
        if milliseconds > 0:
            self._runtime.sleep(milliseconds / 1000)

    def _rolls(self, fault: str, share: float | None = None) -> bool:
        share = getattr(self.plan, fault) if share is None else share
        # Draw no number for an impossible fault. Then adding a fault for one operation does not
        # change the history of the others.
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
