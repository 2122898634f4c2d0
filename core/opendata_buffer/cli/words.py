"""Numbers with their nouns."""

from __future__ import annotations

__all__ = ["plural", "waiting"]


def plural(count: int, noun: str) -> str:
    """``1 batch``, ``2 batches``, ``1,000 copies``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("ch", "sh", "s", "x")):
        noun += "e"
    elif noun.endswith("y") and noun[-2] not in "aeiou":
        noun = noun[:-1] + "ie"
    return f"{count:,} {noun}s"


def waiting(batches: int) -> str:
    """``1 batch waits``, ``2 batches wait``."""
    return f"{plural(batches, 'batch')} {'waits' if batches == 1 else 'wait'}"
