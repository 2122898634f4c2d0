"""How many batches of a copy go into one append. Pure."""

from __future__ import annotations

__all__ = ["MOST_AT_ONCE", "CopyPace"]

MOST_AT_ONCE = 100
"""Batches of one append, unless a transaction has more: it is not torn apart."""

SLOW_MS, QUICK_MS = 30_000.0, 5_000.0


class CopyPace:
    """Halves the batches of the next append when uploads are slow, and doubles them when quick.

    Uploads that wait long for the others of their append would be taken for garbage by the
    target's collector (failure F5).

    Attributes:
        most: Batches of the next append.
    """

    def __init__(self) -> None:
        self.most = MOST_AT_ONCE

    def took(self, milliseconds: float) -> None:
        """So long the uploads of one append took."""
        if milliseconds > SLOW_MS:
            self.most = max(1, self.most // 2)
        elif milliseconds < QUICK_MS:
            self.most = min(MOST_AT_ONCE, self.most * 2)
