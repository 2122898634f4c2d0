"""One process's way to a simulation's store, with scheduling points, watched by the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opendata_buffer.stores import (
    Absent,
    Applied,
    Blob,
    DeleteFailure,
    IfVersion,
    Listing,
    NotModified,
    PutOutcome,
    Store,
)
from opendata_buffer.testing.model import DeliveryModel
from opendata_buffer.testing.simulation import Simulation

__all__ = ["WatchedStore"]


class WatchedStore:
    """One process's way to the shared store: a scheduling point before and after each access,
    and every change told to the model.

    Between the two points an access is atomic, as on an object store. A process killed before
    the first one has written nothing; killed at the second one it has, and never learns it.

    Args:
        inner: The shared store.
        simulation: Where the scheduling points are.
        model: What is told.
        process: Who is at the store.
        on_access: Called with operation and key when an access is about to take effect: the
            place for a pause or a kill that random times would hardly ever hit.
    """

    def __init__(
        self,
        inner: Store,
        simulation: Simulation,
        model: DeliveryModel,
        process: str,
        *,
        on_access: Callable[[str, str], object] = lambda operation, key: None,
    ) -> None:
        self._inner = inner
        self._simulation = simulation
        self._model = model
        self._process = process
        self._on_access = on_access

    @property
    def url(self) -> str:
        """See :class:`opendata_buffer.stores.Store`."""
        return self._inner.url

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | NotModified:
        """See :class:`opendata_buffer.stores.Get`."""
        self._begin("get", key)
        found = self._inner.get(
            key, if_changed=if_changed, byte_range=byte_range, max_bytes=max_bytes
        )
        self._simulation.checkpoint()
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :class:`opendata_buffer.stores.Put`."""
        self._begin("put", key)
        self._inner.put(key, data)
        self._model.object_written(key, bytes(data))
        self._simulation.checkpoint()

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        """See :class:`opendata_buffer.stores.ConditionalPut`."""
        self._begin("put_if", key)
        outcome = self._inner.put_if(key, data, condition)
        self._simulation.log(f"  {type(outcome).__name__}")
        if isinstance(outcome, Applied) and key == self._model.manifest_path:
            self._model.manifest_written(self._process, data)
            self._simulation.log(f"  {self._model.manifest}")
        self._simulation.checkpoint()
        return outcome

    def check_conditional_writes(self, near: str) -> None:
        """See :class:`opendata_buffer.stores.ConditionalPut`."""
        self._inner.check_conditional_writes(near)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :class:`opendata_buffer.stores.List`."""
        self._begin("list", prefix)
        listing = self._inner.list(prefix, start_after=start_after, limit=limit)
        self._simulation.checkpoint()
        return listing

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :class:`opendata_buffer.stores.Delete`; one object at a time, as S3 may."""
        failed: list[DeleteFailure] = []
        for key in keys:
            self._begin("delete", key)
            failed += self._inner.delete_many([key])
            self._model.object_deleted(self._process, key)
        self._simulation.checkpoint()
        return tuple(failed)

    def _begin(self, operation: str, key: str) -> None:
        self._on_access(operation, key)
        self._simulation.checkpoint()
        self._simulation.log(f"{self._process} {operation} {key}")
