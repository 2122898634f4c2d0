"""How long fetches wait for their store: whether threads have anything to hide, and how many."""

from __future__ import annotations

from math import ceil

from opendata_buffer.stores import Near

__all__ = ["LEAST_THREADS", "MOST_THREADS", "Pace"]

LEAST_THREADS, MOST_THREADS = 16, 128
"""At once, where the caller does not say how many; the latter is what a store keeps connections
for."""

NEAR_S, NEAR_BYTES_PER_S = 0.001, 1e9
"""A fetch that waited no longer than this came from a page cache, and not over a network."""

FORGETTING = 1.01

FAR, STRIKES = 4, 2
"""Hysteresis: only so many times that wait, so often in a row, is not just a busy machine."""


class Pace:
    """Whether fetches hardly wait for their store; may be kept from one read to the next.

    A store that says itself that it is near stays so. Of the others it is measured, and there
    nothing tells a slow answer from a machine with too much to do but how long it takes: a busy
    one passes for a store that is far, and is then read ahead of for nothing.

    Args:
        declared: The store says that it is near.

    Attributes:
        near: They do not wait; None while nothing is known.
        largest: Bytes of the largest result so far; None while nothing is known.
    """

    def __init__(self, *, declared: bool = False) -> None:
        self.near: bool | None = True if declared else None
        self.largest: int | None = None
        self._declared = declared
        self._strikes = 0
        self._shortest: float | None = None
        self._worked = 0.0
        self._decoded = 0.0

    @classmethod
    def of(cls, store: object) -> Pace:
        """That of a store: what it says of itself, if it says anything."""
        return cls(declared=isinstance(store, Near) and store.is_near)

    @property
    def threads(self) -> int:
        """How many fetches at once keep one processor busy, as far as known; 16 to 128.

        While one waits, the others work: that takes as many as its wait is longer than its work.
        The shortest wait counts. Longer ones are also waits for a processor, or for the store's
        bandwidth, and grow with the number of threads.
        """
        if self._shortest is None:
            return LEAST_THREADS
        worked = self._worked + self._decoded
        if self._shortest >= worked * MOST_THREADS:
            return MOST_THREADS
        return max(LEAST_THREADS, 1 + ceil(self._shortest / worked))

    def saw(self, size: int, waited: float, worked: float = 0.0) -> None:
        """A fetch of so many bytes waited and used the processor for so many seconds.

        A busy machine lets a fetch wait about as long as it works, however near its store is.
        """
        self.largest = max(self.largest or 0, size)
        if self._declared:
            return
        # It grows a little with each fetch, so that a store that gets slower is noticed.
        shortest = waited if self._shortest is None else self._shortest * FORGETTING
        self._shortest = min(waited, shortest)
        self._worked = _average(self._worked, worked)
        limit = max(NEAR_S + size / NEAR_BYTES_PER_S, worked)
        if waited > FAR * limit:
            self._strikes += 1
            if self._strikes >= STRIKES:
                self.near = False
            return
        self._strikes = 0
        if waited <= limit:
            self.near = True

    def saw_decoding(self, worked: float) -> None:
        """What was fetched took so many seconds of the processor more until it was handed out."""
        self._decoded = _average(self._decoded, worked)


def _average(so_far: float, value: float) -> float:
    """Of about the last ten."""
    return so_far + (value - so_far) / (10 if so_far else 1)
