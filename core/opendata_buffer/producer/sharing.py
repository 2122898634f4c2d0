"""The committers of a process: producers of one queue share one.

A committer that serves several producers puts everything they have into one write. So there is one
for each key (:func:`committer_key`), which counts its callers and is forgotten with the last one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

from opendata_buffer.config import QueueConfig
from opendata_buffer.producer.committer import Committer
from opendata_buffer.producer.group_commit import GroupCommitter
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Store

Shared = TypeVar("Shared", bound=Committer)

_committers: dict[Hashable, GroupCommitter] = {}


def shared_committer(
    store: Store, config: QueueConfig, runtime: Runtime, claim: QueueClaim | None = None
) -> GroupCommitter:
    """Return the process's group committer for a manifest, with one more caller.

    Its claim, its deadlines and its limits are those of the first caller. Each caller closes it.
    """
    key = committer_key(store, config, runtime, claim)
    return share(_committers, key, partial(GroupCommitter, store, config, runtime, claim))


def committer_key(
    store: Store, config: QueueConfig, runtime: Runtime, claim: QueueClaim | None
) -> Hashable:
    """Return the key of a committer: producers with equal keys share one."""
    # A forked child needs its own, and so does a simulated process, which has its own runtime.
    process = os.getpid() if isinstance(runtime, SystemRuntime) else id(runtime)
    # The queue's id, because a queue may be deleted and made again while producers are open.
    return process, id(store), config.manifest_path, "" if claim is None else claim.queue_id


def share(
    shared: dict[Hashable, Shared], key: Hashable, make: Callable[[Callable[[], object]], Shared]
) -> Shared:
    """Return the committer of a key, with one more caller.

    Args:
        shared: The committers by key; a new one is added.
        key: See :func:`committer_key`.
        make: Makes a committer. Its argument is a function that the committer calls when it ends.

    Returns:
        The committer of the key, with one more caller.

    Raises:
        OpenDataBufferError: A new committer could not begin.
    """
    while True:
        found = shared.get(key) or shared.setdefault(key, make(lambda: shared.pop(key, None)))
        # It may have ended since; then it is no longer in `shared`.
        if found.join():
            return found
