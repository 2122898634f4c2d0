"""What waiting costs, and how soon a record is found after it. The clock is simulated.

``./run bench idle`` measures a whole hour.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import quantiles

import pytest

from opendata_buffer.consumer.pace import FIRST_PAUSE_S
from tests.support.bucket import SimulatedBucket, SimulatedQuery

PART = 2
"""The tests wait for this part of an hour."""

HOUR_S = 3600.0


def requests_of_a_query(bucket: SimulatedBucket) -> int:
    """Return the requests of a query in a part of an idle hour."""
    requests = 0

    def main() -> None:
        nonlocal requests
        query = SimulatedQuery(bucket)
        query.drain()
        query.idle(60)
        requests = query.idle(HOUR_S / PART).total
        query.stream.stop()

    bucket.run(main)
    return requests


def requests_of_a_consumer(bucket: SimulatedBucket) -> int:
    """Return the requests of a consumer in a part of an idle hour."""
    requests = 0

    def main() -> None:
        nonlocal requests
        requests = bucket.wait_in_python(HOUR_S / PART).total

    bucket.run(main)
    return requests


READERS = [requests_of_a_query, requests_of_a_consumer]


@pytest.mark.parametrize("requests_of", READERS)
def test_an_idle_hour_of_a_queue_takes_few_requests(
    requests_of: Callable[[SimulatedBucket], int],
) -> None:
    assert 1_800 < PART * requests_of(SimulatedBucket()) <= 2_100


@pytest.mark.parametrize("requests_of", READERS)
@pytest.mark.parametrize(("is_log", "most"), [(False, 4_000), (True, 5_000)])
def test_one_request_looks_at_all_partitions_of_an_idle_topic(
    requests_of: Callable[[SimulatedBucket], int], is_log: bool, most: int
) -> None:
    assert 1_800 < PART * requests_of(SimulatedBucket(16, is_log=is_log)) <= most


@pytest.mark.parametrize("partitions", [0, 16])
def test_a_record_after_a_long_silence_is_in_a_micro_batch_within_two_seconds(
    partitions: int,
) -> None:
    bucket = SimulatedBucket(partitions)

    def main() -> None:
        query = SimulatedQuery(bucket)
        query.drain()
        query.idle(60)
        delays = [query.delay(15.0, 17.0) for _ in range(50)]
        assert quantiles(delays, n=100)[98] <= 2.0
        assert max(delays) > 1.0, "some records wait"
        query.stream.stop()

    bucket.run(main)


def test_records_that_come_all_the_time_wait_as_long_as_before() -> None:
    """Before, the pause was always a tenth of a second."""
    bucket = SimulatedBucket()

    def main() -> None:
        query = SimulatedQuery(bucket)
        query.drain()
        delays = [query.delay(0.05, 0.5) for _ in range(50)]
        assert max(delays) <= FIRST_PAUSE_S + 0.3
        query.stream.stop()

    bucket.run(main)
