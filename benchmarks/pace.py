"""How long a record waits where a store takes one write a second to one object, as GCS does."""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.producers import paced
from benchmarks.table import Row
from opendata_buffer import Producer, ProducerConfig
from opendata_buffer.config import StoreOptions
from tests.http_scripts import Asked, FaultProxy, Reply
from tools.servers import FAKE_GCS

EVERY_S = 1.0


class RateProxy(FaultProxy):
    """Lets one write to one object of GCS through in so many seconds, as Google does.

    The others are answered with 429, and are not carried out.
    """

    def __init__(self, target: str, every_s: float) -> None:
        super().__init__(target)
        self._every_s = every_s
        self._lock = threading.Lock()
        self._let_through: dict[str, float] = {}
        self.refused: list[str] = []
        """The names of objects whose writes were refused, in order."""

    def answer(self, asked: Asked) -> Reply:
        written = re.search(rb'"name": ("(?:[^"\\]|\\.)*")', asked.body[:2_000])
        if asked.method != "POST" or written is None:
            return self.passed_on(asked)
        name = json.loads(written[1])
        with self._lock:
            now = time.monotonic()
            if now - self._let_through.get(name, -self._every_s) < self._every_s:
                self.refused.append(name)
                error = {"code": 429, "errors": [{"reason": "rateLimitExceeded"}]}
                return Reply(429, json.dumps({"error": error}).encode())
            self._let_through[name] = now
        return self.passed_on(asked)


def durations(seconds: float, every_s: float, target: str) -> tuple[list[float], int]:
    """Seconds until each of 20 records a second was durable, and how many writes were refused.

    The refusal of one write, which teaches the producer the store's pace, is not among them.
    """
    proxy = RateProxy(target, every_s)
    delays: list[float] = []

    def produce(producer: Producer) -> None:
        called = time.monotonic()
        handle = producer.produce([b"x" * 100])
        handle.add_done_callback(lambda _: delays.append(time.monotonic() - called))

    with proxy.running() as url:
        config = ProducerConfig(
            store=f"gs://bucket/pace-{id(proxy)}",
            store_options=StoreOptions(endpoint_url=url),
            broker="off",
        )
        with Producer(config) as producer:
            while not any(name.endswith("/manifest") for name in proxy.refused):
                producer.produce([b"x"]).result(60)
            learned = len(proxy.refused)
            paced(20, seconds, partial(produce, producer))
            producer.flush()
    return delays, len(proxy.refused) - learned


def run() -> Iterator[Row]:
    name = "one producer, 20 records/s, one write a second to one object"
    if not FAKE_GCS.is_there:
        yield Row(name, "not run", "p99 <= 1300 ms", None, FAKE_GCS.why_not)
        return
    import urllib3

    with FAKE_GCS.start() as target:
        urllib3.request("POST", f"{target}/storage/v1/b?project=p", json={"name": "bucket"})
        delays, refused = durations(60.0, EVERY_S, target)
    p50 = statistics.median(delays) * 1000
    p99 = statistics.quantiles(delays, n=100)[98] * 1000
    yield Row(
        name,
        f"p50 {p50:.0f} ms, p99 {p99:.0f} ms",
        "p99 <= 1300 ms",
        p99 <= 1300,
        f"{len(delays)} records, {refused} writes refused",
    )
