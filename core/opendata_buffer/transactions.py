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
"""

from __future__ import annotations

import json
from typing import Any

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import parse_location

__all__ = ["TransactionFilter"]

_VERSION = 1


class TransactionFilter:
    """Remembers per app the last transaction passed, and which entry ended it.

    Not thread-safe. The state grows with the number of apps that ever wrote, and with nothing
    else; a queue without transactions keeps it constant.

    Args:
        data_path_prefix: The queue's data prefix; batches elsewhere have no transaction.
    """

    def __init__(self, data_path_prefix: str) -> None:
        self._prefix = data_path_prefix
        self._high: dict[str, int] = {}
        self._tail: tuple[str, int] | None = None

    def offer(self, sequence: int, location: str) -> bool:
        """Whether to pass the entry (True) or to drop it as a repeat (False).

        Offer every entry in order of sequence, also those that are skipped for other reasons:
        an entry that was never offered tears its transaction apart, and the rest of it would
        be taken for a repeat. Entries without a transaction always pass.
        """
        parsed = parse_location(location, self._prefix)
        txn = None if parsed is None else parsed.txn
        if txn is None:
            # It stands between two entries of a transaction only if two appends wrote them.
            self._tail = None
            return True
        high = self._high.get(txn.app, -1)
        if txn.batch < high or (txn.batch == high and self._tail != (txn.app, sequence - 1)):
            return False
        self._high[txn.app] = txn.batch
        self._tail = (txn.app, sequence)
        return True

    def copy(self) -> TransactionFilter:
        """An independent filter in the same state, to try a plan out."""
        other = TransactionFilter(self._prefix)
        other._high = dict(self._high)
        other._tail = self._tail
        return other

    def to_json(self) -> str:
        """The state as one line of JSON; equal states give equal text."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """The state as a value for JSON, keys in a fixed order.

        ``{"v": 1, "apps": {app: highest batch}, "tail": [app, sequence] or null}``; ``tail`` is
        the last entry passed, if it had a transaction.
        """
        return {
            "v": _VERSION,
            "apps": dict(sorted(self._high.items())),
            "tail": None if self._tail is None else list(self._tail),
        }

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
        match state:
            case {"v": 1, "apps": dict(apps), "tail": None | [str(), int()] as tail} if all(
                isinstance(app, str) and type(batch) is int and batch >= 0
                for app, batch in apps.items()
            ):
                made = cls(data_path_prefix)
                made._high = dict(apps)
                made._tail = None if tail is None else (tail[0], tail[1])
                return made
        raise _unreadable(state)


def _unreadable(state: object) -> InvalidInput:
    return InvalidInput(
        f"transaction state {state!r:.200} is not version {_VERSION} of this library: resume with "
        "the version that wrote it, or start without state and accept repeats"
    )
