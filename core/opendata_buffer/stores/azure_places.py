"""Where Azure's listings go on: it takes its own tokens for that, and no keys."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Places"]

MOST = 16
"""Listings of which it is remembered where they go on."""


class Places:
    """Tokens of the last listings of this process, by prefix and last key. A copy is empty."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str], str] = OrderedDict()

    def behind(self, prefix: str, key: str) -> str | None:
        """The token of a listing that goes on behind a key; None when none ended there."""
        return self._tokens.get((prefix, key))

    def remember(self, prefix: str, key: str, token: str) -> None:
        """A listing ended behind a key. The oldest are forgotten."""
        self._tokens[prefix, key] = token
        while len(self._tokens) > MOST:
            self._tokens.popitem(last=False)

    def __getstate__(self) -> dict[str, object]:
        return {"_tokens": OrderedDict()}
