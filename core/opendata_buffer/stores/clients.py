"""The client of a cloud, made when first used in a process and shared by its stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from opendata_buffer.config import StoreOptions

__all__ = [
    "AWS_ENVIRONMENT",
    "AZURE_ENVIRONMENT",
    "GCS_ENVIRONMENT",
    "ProcessClient",
    "environment_of",
]

AWS_ENVIRONMENT = ("AWS_",)
"""How the variables begin that boto3 takes settings and credentials from."""

GCS_ENVIRONMENT = ("GOOGLE_", "CLOUDSDK_", "GCE_", "STORAGE_EMULATOR_HOST")
"""The same of google-auth, and where every client of GCS finds an emulator's address."""

AZURE_ENVIRONMENT = ("AZURE_", "IDENTITY_", "MSI_")
"""The same of azure-identity and of Azure's own command line."""

T = TypeVar("T")

# Each with the environment it was made in. A changed one replaces it: of credentials that rotate
# every hour nothing is left behind, and who still uses the old client keeps it.
_made: dict[Hashable, tuple[Hashable, Any]] = {}
_lock = threading.RLock()  # A client may be made of another one.


def _forget_all() -> None:
    # A forked child must not use its parent's sockets, nor wait for its parent's threads.
    global _lock
    _lock = threading.RLock()
    _made.clear()


os.register_at_fork(after_in_child=_forget_all)


def environment_of(*prefixes: str) -> Hashable:
    """The environment variables whose names begin so: where a cloud's settings come from."""
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith(prefixes)))


class ProcessClient(Generic[T]):
    """One client for all stores of a process with the same options.

    Thread-safe. It pickles as what it is made from, never with a socket or a secret, and a
    forked child makes a client of its own.

    Args:
        make: Makes it; a function of a module, so that it pickles.
        name: What else it is made for, such as an account.
        options: How to reach the store.
        prefixes: Names of environment variables that it depends on begin so.
    """

    def __init__(
        self,
        make: Callable[[str, StoreOptions], T],
        name: str,
        options: StoreOptions,
        prefixes: tuple[str, ...],
    ) -> None:
        self._from = (make, name, options, prefixes)
        self._held: tuple[int, T] | None = None

    def get(self) -> T:
        """The client.

        Raises:
            OpenDataBufferError: It cannot be made.
        """
        held = self._held
        if held is None or held[0] != os.getpid():
            held = self._held = (os.getpid(), self._shared())
        return held[1]

    @property
    def made(self) -> T | None:
        """The client if this process has it already."""
        held = self._held
        return held[1] if held is not None and held[0] == os.getpid() else None

    def __getstate__(self) -> Any:
        return self._from

    def __setstate__(self, state: Any) -> None:
        self._from = state
        self._held = None

    def _shared(self) -> T:
        make, name, options, prefixes = self._from
        environment = environment_of(*prefixes)
        with _lock:
            found = _made.get((make, name, options))
            if found is not None and found[0] == environment:
                kept: T = found[1]
                return kept
            client = make(name, options)
            _made[make, name, options] = (environment, client)
            return client
