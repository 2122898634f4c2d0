"""How much waits for a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Lag:
    """The batches that a consumer has not acknowledged, at one moment.

    Attributes:
        batches: How many there are.
        seconds: Age of the oldest one, by its producer's clock and ours; 0 without batches. None if
            its age is unknown.
        bytes: The size of all of them; 0 without batches. Otherwise None, because the manifest does
            not have it.
        records: How many records they have; 0 without batches. Otherwise None, because the manifest
            does not have it.
    """

    batches: int
    seconds: float | None
    bytes: int | None = None
    records: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicLag:
    """The batches that a consumer of a topic has not acknowledged, at about one moment.

    Attributes:
        total: The sum of all partitions. Its age is that of the oldest batch.
        partitions: The lag in each partition that the consumer reads, by name.
    """

    total: Lag
    partitions: Mapping[str, Lag]


def lag_of(batches: int, seconds: float | None) -> Lag:
    """Return the lag of some batches, of which the oldest has this age."""
    if not batches:
        return Lag(batches=0, seconds=0.0, bytes=0, records=0)
    return Lag(batches=batches, seconds=seconds)


def topic_lag_of(partitions: Mapping[str, Lag]) -> TopicLag:
    """Return the lags of some partitions, by name, with their sum."""
    waiting = [lag.seconds for lag in partitions.values() if lag.batches]
    known = [seconds for seconds in waiting if seconds is not None]
    batches = sum(lag.batches for lag in partitions.values())
    return TopicLag(total=lag_of(batches, max(known, default=None)), partitions=partitions)
