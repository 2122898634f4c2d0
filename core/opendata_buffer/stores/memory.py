"""Objects in this process's memory: the reference behavior of a store, for tests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping

from opendata_buffer import outcomes
from opendata_buffer.errors import InvalidInput, ObjectNotFound
from opendata_buffer.formats.batch import check_key
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import (
    Blob,
    DeleteFailure,
    Listing,
    ObjectInfo,
    PutOutcome,
    check_limit,
    check_range,
    check_size,
    cut,
)
from opendata_buffer.stores.probed import Probed

# Never repeats in this process, even across stores, because equal versions mean equal bytes.
_versions = itertools.count(1)
_registry: dict[str, MemoryStore] = {}


class MemoryStore:
    """A dictionary with a lock.

    ``MemoryStore.named(name)`` is the store that ``memory://name`` opens: one store for the whole
    process. Only such a store can be pickled, by its name, within the process.

    Args:
        name: In the store's URL.
        now_ms: Its clock, milliseconds since the Unix epoch.
    """

    def __init__(self, name: str = "", *, now_ms: Callable[[], int] | None = None) -> None:
        self._name = name
        self._now_ms = now_ms if now_ms is not None else SystemRuntime().now_ms
        self._objects: dict[str, Blob] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """Return the process's store of this name, which is created at its first use."""
        return _registry.setdefault(name, cls(name))

    @property
    def url(self) -> str:
        """``memory://name``."""
        return f"memory://{self._name}"

    def __reduce__(self) -> tuple[Callable[[str], MemoryStore], tuple[str]]:
        if _registry.get(self._name) is not self:
            raise InvalidInput(
                f"store {self.url!r} lives in the memory of one process and cannot be pickled: "
                "use a directory or an s3:// URL to share a queue between processes."
            )
        return (_unpickle, (self._name,))

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | None:
        """See :meth:`opendata_buffer.stores.base.Get.get`."""
        check_key("key", key)
        check_range(byte_range)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectNotFound(key, self.url)
        if found.version == if_changed:
            return None
        start, end = cut(byte_range, len(found.data))
        check_size(key, end - start, max_bytes)
        return Blob(found.data[start:end], found.version, found.last_modified_ms)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.base.Put.put`."""
        check_key("key", key)
        with self._lock:
            self._write(key, data)

    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.put_if`."""
        check_key("key", key)
        with self._lock:
            found = self._objects.get(key)
            if found is None and version is not None:
                return outcomes.Vanished()
            if found is not None and found.version != version:
                return outcomes.LostRace()
            return outcomes.Applied(self._write(key, data))

    def check_conditional_writes(
        self, near: str, known: Iterable[Probed] = (), *, trust: bool = True
    ) -> Probed | None:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.check_conditional_writes`."""
        check_key("near", near)
        return None

    def check_refusal(self, near: str) -> None:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.check_refusal`."""
        check_key("near", near)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.base.List.list`."""
        check_limit(limit)
        with self._lock:
            now_ms = self._now_ms()
            found = sorted(
                (key, each)
                for key, each in self._objects.items()
                if key.startswith(prefix) and key > start_after
            )
        objects = tuple(
            ObjectInfo(key, len(each.data), each.last_modified_ms) for key, each in found[:limit]
        )
        return Listing(objects, now_ms, truncated=len(objects) < len(found))

    def list_versions(self, prefix: str, most: int) -> Mapping[str, str] | None:
        """See :meth:`opendata_buffer.stores.listed.ListsVersions.list_versions`."""
        with self._lock:
            found = {
                key: blob.version for key, blob in self._objects.items() if key.startswith(prefix)
            }
        return found if len(found) <= most else None

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.base.Delete.delete_many`."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)
        return ()

    def _write(self, key: str, data: bytes | memoryview) -> str:
        version = str(next(_versions))
        self._objects[key] = Blob(bytes(data), version, self._now_ms())
        return version


def _unpickle(name: str) -> MemoryStore:
    if name not in _registry:
        raise InvalidInput(
            f"store 'memory://{name}' was made in another process and its objects are not here: "
            "use a directory or an s3:// URL to share a queue between processes."
        )
    return _registry[name]
