"""Answer many conditional reads with one listing.

**The problem.** An idle reader of a topic asks at each look whether each partition has changed.
With 16 partitions and the topic's description, that is 17 requests, all answered "not modified".

**The idea.** A listing shows the version of every object, in one request. If nothing in a
partition's folder has changed since an earlier listing, then an object that was read after that
earlier listing still has the version that was read. So the read need not be sent::

    listing 1        orders/manifest has version A
    read             orders/manifest is unchanged since version 7: sent to the store
    listing 2        orders/manifest has version A, like everything else in orders/
    read             unchanged since version 7?  Yes, without a request

**What can go wrong.**

* *A listing is not taken at one instant.* It may show an old index and a new manifest of a log,
  and readers rely on the order in which they read the two. So the listing answers for a folder only
  if nothing at all has changed there. Otherwise all reads of the folder are sent.
* *Another thread needs a read that is later than something else*, as the garbage collector does
  (failure F5). So a listing only answers within the look that made it, in the threads of that look.
* *A server's listings lag behind.* Every :data:`REREAD_S` seconds all reads are sent.
* *The folder has many objects.* Then the listing does not fit into one page, and nothing is gained.
  It is tried again after :data:`RETRY_S` seconds.

A wrong answer would only delay records: whoever writes states the version that it has read, and the
store compares.

**Costs.** A listing costs as much as 12.5 reads on S3. So it pays from 12 partitions on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from opendata_buffer.errors import StorageError
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import (
    Blob,
    DeleteFailure,
    Listing,
    PutOutcome,
    RateLimited,
    Store,
)
from opendata_buffer.stores.probed import Probed

LEAST_FOLDERS = 12
"""Fewest folders for which a listing costs less than a read of each."""

MOST_LISTED = 1_000
"""Objects of one page of a listing."""

REREAD_S = 300.0
"""Seconds after which everything is read, whatever the listings say."""

RETRY_S = 300.0
"""Seconds after a listing that did not fit into one page."""

LookAt = Callable[..., AbstractContextManager[None]]
"""See :meth:`ListedStore.look`."""

_look: ContextVar[_Look | None] = ContextVar("_look", default=None)


@runtime_checkable
class ListsVersions(Protocol):
    """A store whose listings show the versions of the objects."""

    def list_versions(self, prefix: str, most: int) -> Mapping[str, str] | None:
        """List objects with one request.

        Args:
            prefix: Of the keys.
            most: Most objects; at most 1,000.

        Returns:
            The version of each object, by key. Equal ones of one object mean equal bytes; they may
            differ from those of reads. None if there are more objects, or if there are no versions.

        Raises:
            StorageError: The store did not answer.
        """


class _Look:
    """One look at a store: the folders that have not changed, and whether it still goes on."""

    def __init__(self, store: object, unchanged: frozenset[str]) -> None:
        self.store = store
        self.unchanged = unchanged
        self.goes_on = True


class ListedStore:
    """A store of many folders, whose reads may be answered by a listing.

    It is a :class:`.Store`. Methods other than :meth:`get` only call the inner store. Use
    :func:`with_looks` to make one.

    Args:
        inner: The store.
        runtime: The clock.
    """

    def __init__(self, inner: Store, runtime: Runtime) -> None:
        self._inner = inner
        self._runtime = runtime
        self._seen: dict[str, tuple[tuple[str, str], ...]] = {}
        """What the last listing showed of each folder."""
        self._read: dict[str, dict[str, str]] = {}
        """By folder, the version of each object that was read since the folder last changed."""
        self._reread_at = runtime.monotonic() + REREAD_S
        self._retry_at = 0.0

    def __reduce__(self) -> tuple[Callable[[Store], Store], tuple[Store]]:
        return _itself, (self._inner,)  # Another process has no look.

    @property
    def url(self) -> str:
        """See :attr:`opendata_buffer.stores.base.Store.url`."""
        return self._inner.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.base.Put.put`."""
        self._inner.put(key, data)

    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.put_if`."""
        return self._inner.put_if(key, data, version)

    def check_conditional_writes(
        self, near: str, known: Iterable[Probed] = (), *, trust: bool = True
    ) -> Probed | None:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.check_conditional_writes`."""
        return self._inner.check_conditional_writes(near, known, trust=trust)

    def check_refusal(self, near: str) -> None:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.check_refusal`."""
        self._inner.check_refusal(near)

    def write_due(self, key: str) -> float:
        """See :meth:`opendata_buffer.stores.base.RateLimited.write_due`."""
        return self._inner.write_due(key) if isinstance(self._inner, RateLimited) else 0.0

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.base.List.list`."""
        return self._inner.list(prefix, start_after=start_after, limit=limit)

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.base.Delete.delete_many`."""
        return self._inner.delete_many(keys)

    @contextmanager
    def look(self, folders: int, *, idle: bool) -> Iterator[None]:
        """Answer the conditional reads of this block by one listing, if that is cheaper.

        Args:
            folders: How many folders the block reads.
            idle: Whether nothing was found for some time. A listing of busy folders saves nothing.
        """
        look = _Look(self, self._unchanged()) if idle and folders >= LEAST_FOLDERS else None
        if look is None:
            self._seen = {}
        token = _look.set(look)
        try:
            yield
        finally:
            _look.reset(token)
            if look is not None:
                look.goes_on = False

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | None:
        """See :meth:`opendata_buffer.stores.base.Get.get`."""
        look = _look.get()
        if look is None or look.store is not self or not look.goes_on or byte_range is not None:
            return self._inner.get(
                key, if_changed=if_changed, byte_range=byte_range, max_bytes=max_bytes
            )
        folder = _folder_of(key)
        read = self._read.setdefault(folder, {})
        if if_changed is not None and folder in look.unchanged and read.get(key) == if_changed:
            return None
        read.pop(key, None)
        found = self._inner.get(key, if_changed=if_changed, max_bytes=max_bytes)
        version = if_changed if found is None else found.version
        if version is not None:
            read[key] = version
        return found

    def _unchanged(self) -> frozenset[str]:
        """Return the folders in which nothing has changed since the last listing."""
        before, self._seen = self._seen, {}
        now = self._runtime.monotonic()
        if now < self._retry_at or not isinstance(self._inner, ListsVersions):
            return frozenset()
        try:
            versions = self._inner.list_versions("", MOST_LISTED)
        except StorageError:
            versions = None  # The reads that follow raise errors that matter.
        if versions is None:
            self._retry_at = now + RETRY_S
            return frozenset()
        folders: dict[str, list[tuple[str, str]]] = {}
        for key, version in versions.items():
            folders.setdefault(_folder_of(key), []).append((key, version))
        self._seen = {folder: tuple(objects) for folder, objects in folders.items()}
        if now >= self._reread_at:
            self._reread_at = now + REREAD_S
            self._read = {}
            return frozenset()
        unchanged = {folder for folder in self._seen if self._seen[folder] == before.get(folder)}
        self._read = {folder: read for folder, read in self._read.items() if folder in unchanged}
        return frozenset(unchanged)


def with_looks(store: Store, runtime: Runtime) -> tuple[Store, LookAt]:
    """Return a store for reading many folders, and what begins a look at them.

    Args:
        store: The store.
        runtime: The clock.

    Returns:
        The store, wrapped if its listings can answer reads, and the function
        :meth:`ListedStore.look`.
    """
    if not isinstance(store, ListsVersions):
        return store, _no_look
    listed = ListedStore(store, runtime)
    return listed, listed.look


@contextmanager
def _no_look(folders: int, *, idle: bool) -> Iterator[None]:
    yield


def _itself(store: Store) -> Store:
    return store


def _folder_of(key: str) -> str:
    return key.partition("/")[0]
