"""What a gigabyte a second costs a month on S3: requests counted in a run, times a price table.

The run is real but for its bytes: a hundredth of them, in records a hundredth as large. What S3
charges for are requests, and how many there are depends on times, on how producers batch and on
how appends are grouped, and not on how large an object is. So producers run with their defaults,
writes and reads take as long as on S3 Standard, and each request that leaves the process is
counted by botocore's name for it. From and to machines of the same region bytes are free.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.prices import KAFKA, S3, SECONDS_A_MONTH
from benchmarks.producers import CAS_MS, GET_MS, PUT_MS, paced
from benchmarks.s3 import bucket
from benchmarks.table import Row
from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig, fetch_many
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from tools.servers import VERSITYGW

SCALE = 100
GB_PER_S = 1.0
SECONDS = 12.0
CALLS_PER_S = 20  # of each producer
GOAL = 2_000
KEPT_S = 900.0
"""How long a batch lies there at most: the collector's grace period and its interval."""

PLAN = FaultPlan(put_ms=PUT_MS, get_ms=GET_MS, cas_ms=CAS_MS)


class Requests:
    """Counts what a client sends, also what does not go through its methods."""

    def __init__(self, client: Any) -> None:
        self.sent: Counter[str] = Counter()
        self.bytes_out = 0
        self._lock = threading.Lock()
        client.meta.events.register("before-send.s3", self._count)

    def _count(self, event_name: str, request: Any, **_: object) -> None:
        with self._lock:
            self.sent[event_name.rsplit(".", 1)[-1]] += 1
            self.bytes_out += int(request.headers.get("Content-Length", 0))


def consume(store: FaultyStore, ended: threading.Event, seen: Callable[[int], None]) -> None:
    """Read everything as it comes, with the collector beside it."""
    with Consumer(ConsumerConfig(store="s3://bucket"), store=store) as consumer:
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


def cost_row(producers: int, flush_interval_ms: int) -> Row:
    """One run, and what it comes to at a gigabyte a second."""
    size = int(GB_PER_S * 1e9 / SCALE / producers / CALLS_PER_S)
    with bucket() as inner:
        counted_requests = Requests(inner._client.get())
        store = FaultyStore(inner, SystemRuntime(), plan=PLAN)
        config = ProducerConfig(
            store="s3://bucket", flush_interval_ms=flush_interval_ms, broker="off"
        )
        makers = [Producer(config, store=store) for _ in range(producers)]
        ended = threading.Event()
        records = 0

        def seen(number: int) -> None:
            nonlocal records
            records += number

        reader = threading.Thread(target=consume, args=(store, ended, seen))
        reader.start()
        threads = [
            threading.Thread(
                target=paced,
                args=(CALLS_PER_S, SECONDS, lambda made=made: made.send(bytes(size))),
            )
            for made in makers
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = time.monotonic() - started
        for made in makers:
            made.close()
        ended.set()
        reader.join()
    assert records == producers * int(CALLS_PER_S * SECONDS)
    counted = counted_requests.sent
    gigabytes = records * size * SCALE / 1e9
    per_gb = {name: number / gigabytes for name, number in counted.items()}
    gb_a_month = GB_PER_S * SECONDS_A_MONTH
    requests = S3.requests({name: number * gb_a_month for name, number in per_gb.items()})
    storage = GB_PER_S * KEPT_S * S3.gb_month
    dollars = requests + storage
    listed = ", ".join(f"{per_gb[name]:.0f} {name}" for name in sorted(per_gb))
    return Row(
        f"S3 Standard at {GB_PER_S:g} GB/s, {producers} producers, flush_interval_ms "
        f"{flush_interval_ms}",
        f"${dollars:,.0f} a month",
        f"<= ${GOAL:,}",
        dollars <= GOAL,
        f"requests per GB: {listed}; ${requests:,.0f} for them, ${storage:,.0f} for bytes that lie "
        f"{KEPT_S:.0f} s; {gigabytes:.1f} GB in {taken:.1f} s, a {SCALE}th of their bytes "
        f"({counted_requests.bytes_out / 1e6:.0f} MB) sent",
    )


def kafka_row() -> Row:
    """By the published formula; no machines on either side."""
    near = KAFKA.network(GB_PER_S, near_reads=True)
    far = KAFKA.network(GB_PER_S, near_reads=False)
    disks = KAFKA.disks(GB_PER_S, KEPT_S)
    return Row(
        f"Kafka at {GB_PER_S:g} GB/s, three zones and replicas, by the published formula",
        f"${near + disks:,.0f} a month",
        detail=f"${near:,.0f} between zones (${far:,.0f} where consumers do not read the nearest "
        f"replica), ${disks:,.0f} for disks that keep {KEPT_S:.0f} s; machines are not in it, nor "
        "in ours",
    )


def run() -> Iterator[Row]:
    """All lines of this suite."""
    if VERSITYGW.is_there:
        yield cost_row(10, 100)
        yield cost_row(50, 500)
    else:
        yield Row("requests to S3", "-", "", None, VERSITYGW.why_not)
    yield kafka_row()
