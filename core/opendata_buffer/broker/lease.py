"""Who serves: ``_broker.json``, read and changed by compare-and-swap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from opendata_buffer.broker.announcement import (
    ANNOUNCEMENT,
    Announcement,
    announcement_key,
    decode,
    encode,
)
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.cas import CasStore, Done, Register
from opendata_buffer.runtime import Runtime

__all__ = ["Lease", "Watch"]

_Decide: TypeAlias = Callable[[Announcement | None], Announcement | None]


class Lease:
    """The announcement of a queue's broker. Not thread-safe.

    Args:
        store: Where the queue lives.
        config: The queue.
        runtime: Clock and jitter.
        deadline_ms: How long a read or a change may take, milliseconds.
    """

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, *, deadline_ms: int = 5_000
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._key = announcement_key(config.data_path_prefix)
        self._settings = replace(config, cas_deadline_ms=min(deadline_ms, config.cas_deadline_ms))
        self._register = self._made()

    @property
    def key(self) -> str:
        """The announcement's key."""
        return self._key

    def read(self) -> Announcement | None:
        """What is announced; None where nobody ever served, or somebody deleted it.

        Raises:
            StorageError: The store did not answer.
            CorruptData: The object is no announcement.
        """
        found = self._register.read()
        if isinstance(found, Done):
            return found.value
        # Deleted while it was watched. It is a hint and may be made anew, unlike a manifest.
        self._register = self._made()
        return None

    def take(self, mine: Announcement, over: Announcement | None) -> Announcement | None:
        """Announce oneself in place of ``over``, with the next term.

        Returns:
            The announcement as it was written; None when somebody else was faster.
        """
        wanted = replace(mine, term=1 if over is None else over.term + 1)

        def decide(before: Announcement | None) -> Announcement | None:
            if before is not None and wanted.same_broker(before):
                return before  # A write of ours whose answer was lost.
            same = before is None if over is None else over.same_broker(before)
            return wanted if same else before

        return self._change(decide, wanted)

    def beat(self, mine: Announcement) -> Announcement | None:
        """Give a sign of life; None when another broker was announced, or none is."""
        now_ms = self._runtime.now_ms()

        def decide(before: Announcement | None) -> Announcement | None:
            ours = before is not None and mine.same_broker(before)
            return mine.beaten(now_ms) if ours else before

        return self._change(decide, mine)

    def leave(self, mine: Announcement) -> None:
        """Say that one serves no more, unless somebody else does by now."""
        now_ms = self._runtime.now_ms()

        def decide(before: Announcement | None) -> Announcement | None:
            ours = before is not None and mine.same_broker(before)
            return mine.left(now_ms) if ours else before

        self._register.update(decide)

    def _change(self, decide: _Decide, mine: Announcement) -> Announcement | None:
        outcome = self._register.update(decide)
        if not isinstance(outcome, Done):
            self._register = self._made()
            return None
        value = outcome.value
        return value if value is not None and mine.same_broker(value) and value.serves else None

    def _made(self) -> Register[Announcement]:
        return Register(
            self._store,
            self._key,
            decode=decode,
            encode=encode,
            runtime=self._runtime,
            settings=self._settings,
            max_bytes=ANNOUNCEMENT.max_bytes,
            unreadable=ANNOUNCEMENT.unreadable,
        )


@dataclass(slots=True)
class Watch:
    """How long an announced broker has given no sign of life, by the watcher's own clock. Pure.

    Attributes:
        seen: The announcement as last seen.
        since: When it was first seen so, monotonic seconds.
    """

    seen: Announcement | None = None
    since: float = 0.0

    def look(self, now: Announcement | None, at: float) -> float:
        """Note what is announced; returns for how many seconds that has not changed."""
        if now != self.seen:
            self.seen, self.since = now, at
        return at - self.since
