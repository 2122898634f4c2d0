"""Six queries of Nexmark in Spark SQL, over a topic of ours and one of Kafka's.

The events are those of an online auction. The generator's rules, which follow Nexmark's:

* Of 50 events one is a person, three are auctions, and 46 are bids, in this order.
* Event number ``n`` happens at ``n`` times 100 µs: 10,000 events a second.
* Persons and auctions are numbered from 1,000 on. A seller and a bidder are one of the last 1,000
  persons; an auction that is bid on is one of the last 100. Of four sellers three, of two auctions
  one, and of four bidders three are *hot*: the newest whose number is a multiple of 100.
* A category is one of 10 to 14, a state one of six. A price is 100 times 10 to the power of a
  number from 0 to 6, which is drawn evenly.
* Each event is one JSON object with the member of its kind, some 100 to 300 bytes: bids have 30
  bytes of filling, auctions 100, persons 80. Random numbers come from one seed.

The queries, of which 3, 5 and 8 keep state:

==  =============================================================================================
q0  each bid, as it is
q1  each bid, its price in euros: 0.908 of dollars
q2  auction and price of bids on auctions whose number is a multiple of 123
q3  who sells in category 10 and lives in Oregon, Idaho or California: auctions join persons
q5  the auctions with the most bids in 10 s, every 2 s: counts in a sliding window, the most of each
q8  persons who sell within the 10 s in which they registered: two streams joined by window
==  =============================================================================================

A query reads all events in micro-batches of equal size into ``noop``. What counts is the time of
all ``addBatch``, and the rate is events a second. Ours reads JSON into columns by
``valueFormat=json``, Kafka's by ``from_json``; the schema is the same. The queries of each source
take turns, in an order that is rotated.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.kafka import fill
from benchmarks.latency import in_turns
from benchmarks.peers_spark import TUNED_SOURCE
from benchmarks.queries import started
from benchmarks.table import Row
from opendata_buffer import Topic, TopicProducer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS = 500_000
MICRO_BATCHES = 4
PARTITIONS = 4
OF_A_BATCH = 12_500  # events
ROUNDS = 3
SEED = 7
STEP_US = 100
FIRST_ID = 1_000
SCHEMA = (
    "person STRUCT<id: BIGINT, name: STRING, email: STRING, city: STRING, state: STRING, "
    "at: TIMESTAMP, extra: STRING>, "
    "auction STRUCT<id: BIGINT, item: STRING, initial: BIGINT, reserve: BIGINT, at: TIMESTAMP, "
    "expires: TIMESTAMP, seller: BIGINT, category: INT, extra: STRING>, "
    "bid STRUCT<auction: BIGINT, bidder: BIGINT, price: BIGINT, channel: STRING, at: TIMESTAMP, "
    "extra: STRING>"
)
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CHANNELS = ("Apple", "Google", "Facebook", "Baidu")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def time_of(us: int) -> str:
    """A time of the generator, in ISO 8601."""
    second, us = divmod(us, 1_000_000)
    minute, second = divmod(second, 60)
    hour, minute = divmod(minute, 60)
    return f"2026-01-01T{hour:02d}:{minute:02d}:{second:02d}.{us:06d}Z"


def events(count: int = EVENTS, seed: int = SEED) -> Iterator[bytes]:
    """The events, by the rules above."""
    dice = random.Random(seed)

    def one_of_last(newest: int, last: int, hot: float) -> int:
        if dice.random() < hot:
            return max(FIRST_ID, newest - newest % 100)
        return dice.randint(max(FIRST_ID, newest - last + 1), newest)

    def filling(length: int) -> str:
        return "".join(dice.choices(LETTERS, k=length))

    for number in range(count):
        turn, kind = divmod(number, 50)
        at = number * STEP_US
        person, auction = FIRST_ID + turn, FIRST_ID + 3 * turn + min(max(kind - 1, 0), 2)
        if kind == 0:
            name = filling(12)
            event: dict[str, object] = {
                "person": {
                    "id": person,
                    "name": name,
                    "email": f"{name}@example.com",
                    "city": filling(9),
                    "state": dice.choice(STATES),
                    "at": time_of(at),
                    "extra": filling(80),
                }
            }
        elif kind <= 3:
            initial = price_of(dice)
            event = {
                "auction": {
                    "id": auction,
                    "item": filling(15),
                    "initial": initial,
                    "reserve": initial + price_of(dice),
                    "at": time_of(at),
                    "expires": time_of(at + dice.randrange(1, 20_000_000)),
                    "seller": one_of_last(person, 1_000, 3 / 4),
                    "category": dice.randint(10, 14),
                    "extra": filling(100),
                }
            }
        else:
            event = {
                "bid": {
                    "auction": one_of_last(auction, 100, 1 / 2),
                    "bidder": one_of_last(person, 1_000, 3 / 4),
                    "price": price_of(dice),
                    "channel": dice.choice(CHANNELS),
                    "at": time_of(at),
                    "extra": filling(30),
                }
            }
        yield json.dumps(event, separators=(",", ":")).encode()


def price_of(dice: random.Random) -> int:
    """A price in cents."""
    return round(100 * 10 ** (6 * dice.random()))


Query = Callable[["DataFrame"], "DataFrame"]


def q0(events: DataFrame) -> DataFrame:
    return _bids(events).select("auction", "bidder", "price", "at")


def q1(events: DataFrame) -> DataFrame:
    return _bids(events).selectExpr("auction", "bidder", "price * 0.908 AS euros", "at")


def q2(events: DataFrame) -> DataFrame:
    return _bids(events).where("auction % 123 = 0").select("auction", "price")


def q3(events: DataFrame) -> DataFrame:
    sellers = _persons(events).where("state IN ('OR', 'ID', 'CA')")
    auctions = _auctions(events).where("category = 10").selectExpr("id AS auction", "seller")
    joined = auctions.join(sellers, auctions.seller == sellers.id)
    return joined.select("name", "city", "state", "auction")


def q5(events: DataFrame) -> DataFrame:
    from pyspark.sql import functions as sf

    counts = (
        _bids(events)
        .withWatermark("at", "2 seconds")
        .groupBy(sf.window("at", "10 seconds", "2 seconds"), "auction")
        .count()
    )
    most = sf.max(sf.struct("count", "auction")).alias("hottest")
    return counts.groupBy(sf.window(sf.window_time("window"), "2 seconds")).agg(most)


def q8(events: DataFrame) -> DataFrame:
    from pyspark.sql import functions as sf

    window = sf.window("at", "10 seconds").alias("window")
    persons = _persons(events).withWatermark("at", "2 seconds").select("id", "name", window)
    auctions = _auctions(events).withWatermark("at", "2 seconds").select("seller", window)
    same = (persons.id == auctions.seller) & (persons.window == auctions.window)
    return persons.join(auctions, same).select(persons.id, "name", persons.window)


QUERIES: dict[str, Query] = {"q0": q0, "q1": q1, "q2": q2, "q3": q3, "q5": q5, "q8": q8}


def _bids(events: DataFrame) -> DataFrame:
    return events.where("bid IS NOT NULL").select("bid.*")


def _auctions(events: DataFrame) -> DataFrame:
    return events.where("auction IS NOT NULL").select("auction.*")


def _persons(events: DataFrame) -> DataFrame:
    return events.where("person IS NOT NULL").select("person.*")


class Sources:
    """The same events in a topic of ours and in one of Kafka's."""

    def __init__(self, spark: SparkSession, address: str, home: Path, count: int) -> None:
        self._spark, self._address, self._home, self._count = spark, address, home, count
        self._turn = 0
        self._topic = f"nexmark-{home.name}"
        made = [*events(count)]
        Topic.create(str(home / "topic"), PARTITIONS)
        with TopicProducer(str(home / "topic"), broker="off") as producer:
            for number, first in enumerate(range(0, count, OF_A_BATCH)):
                part = made[first : first + OF_A_BATCH]
                producer.produce(part, partition=str(number % PARTITIONS))
                producer.flush()
        fill(address, self._topic, PARTITIONS, made, 1)

    def ours(self) -> DataFrame:
        batches = self._count // OF_A_BATCH // MICRO_BATCHES
        options = {"maxBatchesPerTrigger": batches, "valueFormat": "json", "acknowledge": False}
        reader = self._spark.readStream.format("opendata-buffer").options(**options)
        return reader.schema(SCHEMA).load(str(self._home / "topic"))

    def kafka(self, settings: dict[str, str]) -> DataFrame:
        options = {
            "kafka.bootstrap.servers": self._address,
            "subscribe": self._topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": self._count // MICRO_BATCHES,
        }
        frame = self._spark.readStream.format("kafka").options(**options, **settings).load()
        return frame.selectExpr(f"from_json(CAST(value AS STRING), '{SCHEMA}') AS r").select("r.*")

    def rate(self, source: Callable[[], DataFrame], query: Query) -> float:
        """M events a second; the rows that come are counted, so that a query that reads nothing
        fails."""

        def run(attempt: int) -> float:
            del attempt
            self._turn += 1
            checkpoint = str(self._home / f"checkpoint-{self._turn}")
            writer = query(source()).writeStream.format("noop").trigger(availableNow=True)
            running = writer.option("checkpointLocation", checkpoint).start()
            running.awaitTermination()
            progress = running.recentProgress
            shutil.rmtree(checkpoint, ignore_errors=True)
            read = sum(int(each["numInputRows"]) for each in progress)
            if read < self._count:
                raise RuntimeError(f"{read} of {self._count} events were read")
            return float(sum(each["durationMs"].get("addBatch", 0) for each in progress)) / 1000

        return self._count / started(run) / 1e6


def rows(
    spark: SparkSession, address: str, home: Path, count: int = EVENTS, rounds: int = ROUNDS
) -> Iterator[Row]:
    """Each query over each source, in turns."""
    home.mkdir()
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    sources = Sources(spark, address, home, count)
    reading: dict[str, Callable[[], DataFrame]] = {
        "ours": sources.ours,
        "Kafka": partial(sources.kafka, {}),
        "Kafka, tuned": partial(sources.kafka, TUNED_SOURCE),
    }
    sources.rate(sources.ours, q0)  # starts workers and compiles
    for name, query in QUERIES.items():
        measures = {each: partial(sources.rate, frame, query) for each, frame in reading.items()}
        found = {
            each: statistics.median(rates) for each, rates in in_turns(measures, rounds).items()
        }
        best = max(found["Kafka"], found["Kafka, tuned"])
        yield Row(
            f"Nexmark {name}, {count:,} events: ours / the better of Kafka, default and tuned",
            f"{found['ours'] / best:.2f} x",
            detail=", ".join(f"{each} {rate:.3f} M events/s" for each, rate in found.items()),
        )
    spark.conf.unset("spark.sql.shuffle.partitions")
    shutil.rmtree(home, ignore_errors=True)
