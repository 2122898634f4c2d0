"""Numbers with their nouns."""

from __future__ import annotations

__all__ = ["plural"]


def plural(count: int, noun: str) -> str:
    """``1 batch``, ``2 batches``, ``1,000 copies``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("ch", "sh", "s", "x")):
        noun += "e"
    elif noun.endswith("y") and noun[-2] not in "aeiou":
        noun = noun[:-1] + "ie"
    return f"{count:,} {noun}s"
