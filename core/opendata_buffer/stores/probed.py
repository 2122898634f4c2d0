"""Remember which places have passed the probe of conditional writes (decision 0048).

The probe (:mod:`opendata_buffer.stores.probe`) takes about forty requests, and its result belongs
to a place: an endpoint and a bucket. So the queue's owner marker keeps it for later processes::

    "probed": [{"place": "https://s3.eu-central-1.amazonaws.com/bucket", "at_ms": 1767225600000,
                "probe": 1}]

A process that reaches the store at another endpoint finds no entry for it and makes the probe
itself. The same is true if the bucket was copied to another store together with the marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

PROBE = 1
"""Version of the probe. Raise it when the probe learns to find another fault."""

TRUSTED_MS = 30 * 24 * 60 * 60 * 1000
"""How long a probe counts, in milliseconds. A server may be replaced by one with a fault."""


@dataclass(frozen=True, slots=True)
class Probed:
    """A place that has passed the probe.

    Attributes:
        place: The endpoint and the bucket, as the store names them.
        at_ms: When, by the clock of the process that made the probe, in milliseconds since the Unix
            epoch.
        probe: Version of the probe.
    """

    place: str
    at_ms: int
    probe: int = PROBE

    def counts(self, now_ms: int) -> bool:
        """Return whether the probe need not be made again yet.

        A time that lies more than the period ahead does not count: a clock was wrong.
        """
        return self.probe >= PROBE and abs(now_ms - self.at_ms) < TRUSTED_MS


class CheckedPlaces:
    """The places that one process has checked. Each check is made once for each place.

    Two threads may check a place at the same time, which costs requests and nothing else.
    """

    def __init__(self) -> None:
        self._counting: dict[str, Probed] = {}  # Some probes were made by other processes.
        self._probed: set[str] = set()  # Places that this process has probed itself.
        self._refusing: set[str] = set()  # Places that have refused a wrong write of this process.

    def check_refusal(self, place: str, check: Callable[[], None]) -> None:
        """Check that a place refuses a wrong write.

        Args:
            place: The place.
            check: Sends the write. Raises ``UnsafeStore`` if the place accepts it.
        """
        if place not in self._refusing and place not in self._probed:
            check()
            self._refusing.add(place)

    def check(
        self,
        place: str,
        known: Iterable[Probed],
        now_ms: int,
        *,
        trust: bool,
        refusal: Callable[[], None],
        probe: Callable[[], None],
    ) -> Probed:
        """Check that a place honors conditional writes.

        Args:
            place: The place.
            known: Probes that count.
            now_ms: The time, in milliseconds since the Unix epoch.
            trust: Whether a probe of another process counts.
            refusal: Sends a wrong write.
            probe: Makes the probe.

        Returns:
            The probe that counts.
        """
        if place not in self._probed:
            found = next((each for each in known if each.place == place), None)
            found = found or self._counting.get(place)
            if found is not None and trust:
                self.check_refusal(place, refusal)
                return self._counting.setdefault(place, found)
            probe()
            self._counting[place] = Probed(place, now_ms)
            self._probed.add(place)
        return self._counting[place]


PLACES = CheckedPlaces()
"""The places that this process has checked."""
