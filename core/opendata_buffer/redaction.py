"""Secrets in URLs: refused where a URL comes in, and never shown (failure F37).

A URL ends up in error messages, logs, checkpoints and progress reports. Credentials come from the
cloud's standard chain, and nothing this library asks for goes into a query string.
"""

from __future__ import annotations

import re

from opendata_buffer.errors import InvalidInput

# The second form is a password with slashes, as AWS secret keys have them. It also hides the path
# of a URL with a port and an @ in its path, which is the lesser harm.
# A container before the host of an abfss:// URL is a name and no secret.
_USER = re.compile(
    r"(?<=://)(?!(?<=abfss://)[^/\s:@]+@[^/\s:@'\"]+(?![^/\s'\"]))"
    r"(?:[^/\s:@]+:\S*@|[^/\s]*@)",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"]*")


def redacted(text: str) -> str:
    """The text with ``***`` for user information and query string of every URL in it."""
    return _QUERY.sub(r"\1?***", _USER.sub("***@", text))


def check_no_secrets(name: str, url: str) -> None:
    """Refuse a URL with user information or a query string, without showing them.

    Raises:
        InvalidInput: The URL of the setting ``name`` has some; a path never has.
    """
    if _USER.search(url):
        raise InvalidInput(
            f"{name} {redacted(url)!r} carries credentials: they would end up in logs and "
            "checkpoints. Remove them; credentials come from the cloud's standard chain "
            "(environment, profile, the identity of this machine)."
        )
    if _QUERY.search(url):
        raise InvalidInput(
            f"{name} {redacted(url)!r} has a query string, which could hold a secret and has no "
            "meaning here: remove it. In a file:// URL, write '?' as %3F or use a plain path."
        )
