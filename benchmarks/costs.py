"""What does a gigabyte per second cost a month on S3?

The suite counts the requests of a real run and multiplies them by a price list. Only the bytes are
scaled down, to a hundredth, in records of a hundredth of the size. S3 charges for requests, and
their number depends on time, on how producers batch and on how appends are grouped, but not on the
size of an object. So the producers run with their defaults, writes and reads take as long as on S3
Standard, and each request that leaves the process is counted under botocore's name for it. Bytes
to and from machines in the same region are free.

The prices are list prices of us-east-1 in 2026, in US dollars, without discounts:
https://aws.amazon.com/s3/pricing (S3 Standard), https://aws.amazon.com/ec2/pricing/on-demand
(transfer between zones, per GB and direction), https://aws.amazon.com/ebs/pricing (gp3). The
formula for Kafka is the one that vendors of Kafka and its competitors publish alike (Confluent,
"Kafka cost estimator"; WarpStream, "Kafka is dead"; AutoMQ, "cross-AZ traffic").
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.measuring import paced, sized
from benchmarks.stores import Requests, as_slow_as_s3, bucket
from benchmarks.tables import Row, not_run
from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig, fetch_many
from opendata_buffer.internal_parts import internals
from opendata_buffer.testing.faults import FaultyStore
from tools.servers import VERSITYGW

SECONDS_A_MONTH = 365.25 * 24 * 3600 / 12
WRITES = frozenset({"PutObject", "ListObjectsV2", "CopyObject"})
"""Requests at the higher price."""

DELETES = frozenset({"DeleteObject", "DeleteObjects"})
"""Requests without a charge. Requests in neither set are charged at the lower price."""

SCALE = 100
GB_PER_S = 1.0
SECONDS = sized(12.0, tiny=0.5)
CALLS_PER_S = 20  # of each producer
GOAL = 2_000
KEPT_S = 900.0
"""The longest time that a batch is stored: the grace period of the collector and its interval."""

SETUPS = sized(((10, 100), (50, 500)), tiny=((2, 100),))
"""Number of producers, and ``flush_interval_ms``."""


@dataclass(frozen=True)
class S3Prices:
    """Prices of S3 Standard.

    Attributes:
        write: Dollars for a request at the higher price.
        read: Dollars for a request at the lower price.
        gb_month: Dollars for a GB stored for a month.
    """

    write: float = 5e-6
    read: float = 0.4e-6
    gb_month: float = 0.023

    def requests(self, counted: dict[str, float]) -> float:
        """Return the dollars for requests, counted by S3's names of operations."""
        return sum(number * self._of_one(name) for name, number in counted.items())

    def _of_one(self, name: str) -> float:
        if name in DELETES:
            return 0.0
        return self.write if name in WRITES else self.read


@dataclass(frozen=True)
class KafkaPrices:
    """Prices of a Kafka cluster over three zones with three replicas.

    Attributes:
        zone_gb: Dollars for a GB from one zone to another: 0.01 to leave, 0.01 to enter.
        disk_gb_month: Dollars for a GB of a gp3 volume for a month.
        fill: Largest share of the disks that may be in use.
    """

    zone_gb: float = 0.02
    disk_gb_month: float = 0.08
    fill: float = 0.5

    def network(self, gb_per_s: float, *, near_reads: bool) -> float:
        """Compute the cost of the transfer between zones.

        Two of three producers are in another zone than the leader of the partition, and two copies
        go to the other zones. Without ``near_reads``, two of three consumers also read from another
        zone.

        Args:
            gb_per_s: GB that are produced per second.
            near_reads: Consumers may fetch from the nearest replica.

        Returns:
            Dollars a month.
        """
        times = 2 / 3 + 2 + (0 if near_reads else 2 / 3)
        return gb_per_s * SECONDS_A_MONTH * times * self.zone_gb

    def disks(self, gb_per_s: float, kept_s: float) -> float:
        """Compute the cost of the disks of three replicas.

        Args:
            gb_per_s: GB that are produced per second.
            kept_s: Seconds for which a record is kept.

        Returns:
            Dollars a month.
        """
        return 3 * gb_per_s * kept_s * self.disk_gb_month / self.fill


S3 = S3Prices()
KAFKA = KafkaPrices()


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    if VERSITYGW.is_there:
        for producers, flush_interval_ms in SETUPS:
            yield cost_row(producers, flush_interval_ms)
    else:
        yield not_run("requests to S3", VERSITYGW.why_not)
    yield kafka_row()


def cost_row(producers: int, flush_interval_ms: int) -> Row:
    """Run producers and a consumer, and report the cost of their requests at 1 GB/s."""
    size = int(GB_PER_S * 1e9 / SCALE / producers / CALLS_PER_S)
    with bucket() as inner:
        requests = Requests(inner._client.get())
        store = as_slow_as_s3(inner)
        config = ProducerConfig(
            store="s3://bucket", flush_interval_ms=flush_interval_ms, broker="off"
        )
        makers = [Producer(config, **internals(store=store)) for _ in range(producers)]
        ended = threading.Event()
        records = 0

        def seen(number: int) -> None:
            nonlocal records
            records += number

        reader = threading.Thread(target=_consume, args=(store, ended, seen))
        reader.start()
        threads = [
            threading.Thread(
                target=paced, args=(CALLS_PER_S, SECONDS, partial(maker.send, bytes(size)))
            )
            for maker in makers
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = time.monotonic() - started
        for maker in makers:
            maker.close()
        ended.set()
        reader.join()
    assert records == producers * int(CALLS_PER_S * SECONDS)
    gigabytes = records * size * SCALE / 1e9
    per_gb = {name: number / gigabytes for name, number in requests.sent.items()}
    gb_a_month = GB_PER_S * SECONDS_A_MONTH
    for_requests = S3.requests({name: number * gb_a_month for name, number in per_gb.items()})
    for_storage = GB_PER_S * KEPT_S * S3.gb_month
    dollars = for_requests + for_storage
    listed = ", ".join(f"{per_gb[name]:.0f} {name}" for name in sorted(per_gb))
    return Row(
        f"S3 Standard at {GB_PER_S:g} GB/s, {producers} producers, flush_interval_ms "
        f"{flush_interval_ms}",
        f"${dollars:,.0f} a month",
        f"<= ${GOAL:,}",
        dollars <= GOAL,
        f"requests per GB: {listed}; ${for_requests:,.0f} for them, ${for_storage:,.0f} for bytes "
        f"stored for {KEPT_S:.0f} s; {gigabytes:.1f} GB in {taken:.1f} s, of whose bytes one "
        f"{SCALE}th was sent ({requests.bytes_out / 1e6:.0f} MB)",
    )


def _consume(store: FaultyStore, ended: threading.Event, seen: Callable[[int], None]) -> None:
    """Read batches as they come, with the collector running."""
    config = ConsumerConfig(store="s3://bucket", create_if_missing=True)
    with Consumer(config, **internals(store=store)) as consumer:
        handle = consumer.fetch_handle()
        while True:
            last = ended.is_set()
            descriptors = consumer.next_descriptors(1_000)
            for batch in fetch_many(handle.fetch_arrow, descriptors):
                seen(len(batch.values))
            if descriptors:
                consumer.ack_through(descriptors[-1].sequence)
            elif last:
                return
            else:
                time.sleep(0.1)


def kafka_row() -> Row:
    """Calculate the cost of Kafka by the published formula. Machines count on neither side."""
    near = KAFKA.network(GB_PER_S, near_reads=True)
    far = KAFKA.network(GB_PER_S, near_reads=False)
    disks = KAFKA.disks(GB_PER_S, KEPT_S)
    return Row(
        f"Kafka at {GB_PER_S:g} GB/s, three zones and replicas, by the published formula",
        f"${near + disks:,.0f} a month",
        detail=f"${near:,.0f} between zones (${far:,.0f} if consumers do not read the nearest "
        f"replica), ${disks:,.0f} for disks that keep {KEPT_S:.0f} s; neither this figure nor ours "
        "includes machines",
    )
