"""The part of a bucket that a store is: the keys below a prefix."""

from __future__ import annotations

from collections.abc import Iterable

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import MAX_KEY_BYTES, check_key
from opendata_buffer.stores import DeleteFailure

__all__ = ["Root"]


class Root:
    """Puts the root of a store before its keys.

    Args:
        root: Prefix of every key, without slashes around it; may be empty.
        names: What the service calls its keys, for messages: ``S3 keys``.

    Raises:
        InvalidInput: A root that no key can begin with.
    """

    def __init__(self, root: str, names: str) -> None:
        if root:
            check_key("root of the store", root)
        self._names = names
        self.prefix = f"{root}/" if root else ""

    def full(self, key: str) -> str:
        """The object's name in the bucket.

        Raises:
            InvalidInput: A key that no object can have, or one that is too long with the root.
        """
        check_key("key", key)
        full = self.prefix + key
        if len(full.encode()) > MAX_KEY_BYTES:
            raise InvalidInput(
                f"key {key!r} below root {self.prefix!r} has {len(full.encode())} bytes: "
                f"{self._names} have at most {MAX_KEY_BYTES}, use a shorter one"
            )
        return full

    def legal(self, keys: Iterable[str]) -> tuple[list[str], list[DeleteFailure]]:
        """Those that an object can have, and why the others are not deleted."""
        found: list[str] = []
        failures: list[DeleteFailure] = []
        for key in keys:
            try:
                self.full(key)
            except InvalidInput as error:
                failures.append(DeleteFailure(key, str(error)))
            else:
                found.append(key)
        return found, failures
