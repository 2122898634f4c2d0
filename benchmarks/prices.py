"""What a cloud charges: US dollars, list prices of us-east-1 in 2026, without discounts.

AWS: https://aws.amazon.com/s3/pricing (S3 Standard), https://aws.amazon.com/ec2/pricing/on-demand
(data transfer between zones, per GB and direction), https://aws.amazon.com/ebs/pricing (gp3).
The formula for Kafka is the one that vendors of Kafka and its competitors publish alike (Confluent,
"Kafka cost estimator"; WarpStream, "Kafka is dead"; AutoMQ, "cross-AZ traffic").
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_A_MONTH = 365.25 * 24 * 3600 / 12

WRITES = frozenset({"PutObject", "ListObjectsV2", "CopyObject"})
"""Requests of the dear kind."""

DELETES = frozenset({"DeleteObject", "DeleteObjects"})
"""Free ones. All others are of the cheap kind."""


@dataclass(frozen=True)
class S3Prices:
    """Attributes: dollars for a request of each kind, and for a GB that lies there for a month."""

    write: float = 5e-6
    read: float = 0.4e-6
    gb_month: float = 0.023

    def requests(self, counted: dict[str, float]) -> float:
        """Dollars of so many requests, by S3's names of operations."""
        return sum(
            0.0 if name in DELETES else number * (self.write if name in WRITES else self.read)
            for name, number in counted.items()
        )


@dataclass(frozen=True)
class Kafka:
    """A cluster over three zones with three replicas.

    Attributes:
        zone_gb: Dollars for a GB from one zone to another: 0.01 leaving, 0.01 entering.
        disk_gb_month: Of gp3 volumes.
        fill: Share of the disks that may be full.
    """

    zone_gb: float = 0.02
    disk_gb_month: float = 0.08
    fill: float = 0.5

    def network(self, gb_per_s: float, *, near_reads: bool) -> float:
        """Dollars a month between zones.

        Two of three producers are in another zone than the partition's leader, two copies go
        to the other zones, and two of three consumers read from another zone, unless they may
        fetch from the nearest replica.
        """
        times = 2 / 3 + 2 + (0 if near_reads else 2 / 3)
        return gb_per_s * SECONDS_A_MONTH * times * self.zone_gb

    def disks(self, gb_per_s: float, kept_s: float) -> float:
        """Dollars a month for three replicas of what is kept so long."""
        return 3 * gb_per_s * kept_s * self.disk_gb_month / self.fill


S3 = S3Prices()
KAFKA = Kafka()
