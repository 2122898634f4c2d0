"""A forked child gives up the sockets of the process that forked it.

The kernel closes a connection, or a port, when its last holder does. A child that kept its
parent's would make a parent that was killed look alive: its clients would wait for a word of it
instead of seeing the connection end, and its port would take connections that nobody serves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet

__all__ = ["SocketOwner", "give_up_in_children"]


class SocketOwner(Protocol):
    """An object that has sockets."""

    def descriptors(self) -> Iterable[int]:
        """The file descriptors of its sockets now; a negative one is closed. Takes no lock."""
        ...


_owners: WeakSet[SocketOwner] = WeakSet()


def give_up_in_children(owner: SocketOwner) -> None:
    """A child that is forked from now on does not keep the sockets of ``owner``."""
    _owners.add(owner)


def _give_up() -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for owner in list(_owners):
            for descriptor in owner.descriptors():
                if descriptor >= 0:
                    # Replaced and not closed: the socket's object in the child, which knows of
                    # nothing, would later close a number that means something else by then.
                    os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)
    _owners.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_give_up)
