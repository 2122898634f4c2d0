"""Exactly-once across writers that retry: pass each transaction once.

A transactional writer (the Spark sink) names its batches
``<prefix>/app=<id>/batch=<n>/<ULID>.batch`` and appends all batches of a transaction in one
compare-and-swap, with batch numbers that only grow. When it cannot tell whether that landed,
it appends them again. The reader sees both and keeps the first.

One compare-and-swap means that a transaction is *contiguous* in sequence. So an entry repeats
what was passed before when its batch number is

* lower than the highest one passed of its app, or
* equal to it, and the entry is not adjacent to the last entry passed of that transaction.

The rule cannot tell a repeat that is adjacent to the original: two appends of one transaction
with nothing between them look like one larger transaction. A writer that may be repeating
itself must therefore not append directly behind itself; an empty batch without a transaction
in front of the repeated group is enough. It can happen only where the writer does not see the
original, that is when it finds the queue empty.

A transaction that could not be delivered is the exception: when its batch is skipped
(:meth:`TransactionFilter.skip`) it was not passed, whatever later ones were, and its repeat is.

What is remembered of an app is forgotten when the app has written nothing for
:data:`HORIZON_DAYS` days (:meth:`TransactionFilter.prune`), or the state would grow with every
app that ever wrote. A writer may therefore be stopped between an append and its repeat for that
long; a repeat that comes later is read as new.
"""

from __future__ import annotations

import json
from typing import Any

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import BatchLocation, Transaction, parse_location

__all__ = ["TransactionFilter"]

HORIZON_DAYS = 30
"""Days without a batch after which an app is forgotten."""

_VERSION = 1
_DAY_MS = 24 * 60 * 60 * 1000


class TransactionFilter:
    """Remembers per app the last transaction passed, and which entry ended it.

    Not thread-safe. The state grows with the number of apps that write, and with nothing else;
    a queue without transactions keeps it constant, and :meth:`prune` forgets old apps.

    Args:
        data_path_prefix: The queue's data prefix; batches elsewhere have no transaction.
    """

    def __init__(self, data_path_prefix: str) -> None:
        self._prefix = data_path_prefix
        self._high: dict[str, int] = {}
        self._tail: tuple[str, int, int] | None = None  # app, batch, sequence
        self._missing: dict[str, set[int]] = {}
        self._seen: dict[str, int] = {}  # app: day since the Unix epoch of its newest batch

    def offer(self, sequence: int, location: str) -> bool:
        """Whether to pass the entry (True) or to drop it as a repeat (False).

        Offer every entry in order of sequence: one that was neither offered, skipped nor told
        to be :meth:`lost` tears its transaction apart, and the rest of it would be taken for a
        repeat. Entries without a transaction always pass.
        """
        named = parse_location(location, self._prefix)
        if named is None or named.txn is None or named.message is not None:
            # One append writes a transaction without a gap. So an entry without a transaction
            # ends it: what follows of the same transaction is a second append. Whether a message
            # counts, ReadCommitted decides.
            self._tail = None
            return True
        txn = named.txn
        self._saw(named, txn)
        high = self._high.get(txn.app, -1)
        if txn.batch <= high and not self._continues(txn, sequence) and not self._misses(txn):
            return False
        self._found(txn)
        self._high[txn.app] = max(high, txn.batch)
        self._tail = (txn.app, txn.batch, sequence)
        return True

    def skip(self, sequence: int, location: str) -> None:
        """Instead of :meth:`offer`, for an entry that could not be delivered and was passed by.

        An append that landed later than the collector's grace period allows may name an object
        that is gone (failure F5). Its writer knows and appends the transaction again. Had the
        filter counted the first one, or the next one behind it, that repeat would be dropped.

        Of a transaction in several batches the rest is still passed; then its repeat is not,
        because part of it would come twice, and what was skipped is lost.
        """
        named = parse_location(location, self._prefix)
        if named is None or named.txn is None or named.message is not None:
            return
        txn = named.txn
        if self._continues(txn, sequence):
            self._tail = (txn.app, txn.batch, sequence)
        elif txn.batch > self._high.get(txn.app, -1):
            self._missing.setdefault(txn.app, set()).add(txn.batch)
            self._saw(named, txn)

    def lost(self, through: int) -> None:
        """Sequences up to and including ``through`` are gone, and nobody knows what they were.

        What follows is passed even when it belongs to the transaction before the gap: it is
        more likely the rest of that transaction than a repeat whose separator is gone.
        """
        if self._tail is not None and self._tail[2] < through:
            self._tail = (*self._tail[:2], through)

    def prune(self, now_ms: int, horizon_days: int = HORIZON_DAYS) -> None:
        """Forget apps whose newest batch is older than the horizon.

        The age is measured to the newest batch of any app or to ``now_ms``, whichever is
        earlier: neither one name nor one clock that is far ahead makes all apps old. Apps of a
        state that was written before ages were kept are as old as this call.

        Args:
            now_ms: Milliseconds since the Unix epoch, by the caller's clock.
            horizon_days: Age in days.
        """
        if not self._seen:
            return
        today = min(now_ms // _DAY_MS, max(self._seen.values()))
        current = None if self._tail is None else self._tail[0]
        for app in {*self._high, *self._missing}:
            if today - self._seen.setdefault(app, today) > horizon_days and app != current:
                self._high.pop(app, None)
                self._missing.pop(app, None)
                del self._seen[app]

    def _saw(self, named: BatchLocation, txn: Transaction) -> None:
        self._seen[txn.app] = max(self._seen.get(txn.app, 0), named.timestamp_ms // _DAY_MS)

    def _continues(self, txn: Transaction, sequence: int) -> bool:
        return self._tail == (txn.app, txn.batch, sequence - 1)

    def _misses(self, txn: Transaction) -> bool:
        return txn.batch in self._missing.get(txn.app, ())

    def _found(self, txn: Transaction) -> None:
        if self._misses(txn):
            self._missing[txn.app].discard(txn.batch)
            if not self._missing[txn.app]:
                del self._missing[txn.app]

    def copy(self) -> TransactionFilter:
        """An independent filter in the same state, to try a plan out."""
        other = TransactionFilter(self._prefix)
        other._high = dict(self._high)
        other._tail = self._tail
        other._missing = {app: set(batches) for app, batches in self._missing.items()}
        other._seen = dict(self._seen)
        return other

    def to_json(self) -> str:
        """The state as one line of JSON; equal states give equal text."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """The state as a value for JSON, keys in a fixed order.

        ``{"v": 1, "apps": {app: highest batch}, "tail": [app, sequence] or null}``; ``tail`` is
        the last entry passed, if it had a transaction, with its batch if that is not the app's
        highest. After skips there is also ``"missing": {app: [batch, ...]}``; and, once an app
        was seen, ``"seen": {app: day of its newest batch, since the Unix epoch}``.
        """
        state: dict[str, Any] = {"v": _VERSION, "apps": dict(sorted(self._high.items()))}
        state["tail"] = None
        if self._tail is not None:
            app, batch, sequence = self._tail
            state["tail"] = [app, sequence, batch][: 2 if batch == self._high[app] else 3]
        if self._missing:
            state["missing"] = {app: sorted(self._missing[app]) for app in sorted(self._missing)}
        if self._seen:
            state["seen"] = dict(sorted(self._seen.items()))
        return state

    @classmethod
    def from_json(cls, text: str, data_path_prefix: str) -> TransactionFilter:
        """The filter that :meth:`to_json` wrote.

        Raises:
            InvalidInput: Another program or a later version wrote it.
        """
        try:
            state = json.loads(text)
        except (TypeError, ValueError):
            raise _unreadable(text) from None
        return cls.from_dict(state, data_path_prefix)

    @classmethod
    def from_dict(cls, state: Any, data_path_prefix: str) -> TransactionFilter:
        """The filter that :meth:`to_dict` described.

        Raises:
            InvalidInput: Another program or a later version wrote it.
        """
        made = cls(data_path_prefix)
        match state:
            case {"v": 1, "apps": dict(apps), "tail": tail} if all(map(_is_batch, apps.values())):
                made._high = dict(apps)
            case _:
                raise _unreadable(state)
        match tail:
            case None:
                pass
            case [str() as app, int() as sequence] if app in apps:
                made._tail = (app, apps[app], sequence)
            case [str() as app, int() as sequence, int() as batch] if app in apps:
                made._tail = (app, batch, sequence)
            case _:
                raise _unreadable(state)
        match state.get("missing", {}):
            case dict(missing) if all(
                isinstance(batches, list) and all(map(_is_batch, batches))
                for batches in missing.values()
            ):
                made._missing = {app: set(batches) for app, batches in missing.items()}
            case _:
                raise _unreadable(state)
        match state.get("seen", {}):
            case dict(seen) if all(map(_is_batch, seen.values())):
                made._seen = dict(seen)
            case _:
                raise _unreadable(state)
        return made


def _is_batch(value: object) -> bool:
    return type(value) is int and value >= 0


def _unreadable(state: object) -> InvalidInput:
    return InvalidInput(
        f"transaction state {state!r:.200} is not version {_VERSION} of this library: resume with "
        "the version that wrote it, or start without state and accept repeats"
    )
