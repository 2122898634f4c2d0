"""Six queries of Nexmark in Spark SQL, over a topic of ours and one of Kafka's.

The events are those of an online auction. The generator follows Nexmark's rules:

* Of 50 events one is a person, three are auctions, and 46 are bids, in this order.
* Event number ``n`` happens at ``n`` times 100 µs: 10,000 events per second.
* Persons and auctions are numbered from 1,000 on. A seller and a bidder are one of the last 1,000
  persons, and a bid is on one of the last 100 auctions. Of four sellers three, of two auctions one,
  and of four bidders three are *hot*: the newest one whose number is a multiple of 100.
* A category is one of 10 to 14, a state one of six. A price is 100 times 10 to the power of a
  number from 0 to 6, which is drawn evenly.
* Each event is one JSON object with the member of its kind, of about 100 to 300 bytes: bids have 30
  bytes of filling, auctions 100, persons 80. Random numbers come from one seed.

The queries, of which 3, 5 and 8 keep state:

==  =============================================================================================
q0  each bid, unchanged
q1  each bid, with its price in euros: 0.908 of dollars
q2  auction and price of bids on auctions whose number is a multiple of 123
q3  people who sell in category 10 and live in Oregon, Idaho or California: auctions join persons
q5  the auctions with the most bids in 10 s, every 2 s: counts in a sliding window, the most of each
q8  people who sell within the 10 s in which they registered: two streams joined by window
==  =============================================================================================

A query reads all events in micro-batches of equal size into ``noop``. The time of all ``addBatch``
counts, and the rate is events per second. Our source reads JSON into columns by
``valueFormat=json``, Kafka's by ``from_json``, with the same schema. The queries of the sources
take turns, and each round begins with the next source.
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

from benchmarks import kafka
from benchmarks.kafka import TUNED_SOURCE
from benchmarks.measuring import in_turns, sized
from benchmarks.queries import drained, started
from benchmarks.tables import Row
from opendata_buffer import Topic, TopicProducer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS = sized(500_000, tiny=400)
MICRO_BATCHES = sized(4, tiny=2)
PARTITIONS = sized(4, tiny=2)
EVENTS_OF_A_BATCH = sized(12_500, tiny=100)
ROUNDS = sized(3, tiny=1)
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
    """Write a time of the generator in ISO 8601.

    Args:
        us: Microseconds since the first event.

    Returns:
        The text.
    """
    second, us = divmod(us, 1_000_000)
    minute, second = divmod(second, 60)
    hour, minute = divmod(minute, 60)
    return f"2026-01-01T{hour:02d}:{minute:02d}:{second:02d}.{us:06d}Z"


def events(count: int = EVENTS, seed: int = SEED) -> Iterator[bytes]:
    """Generate events by the rules above.

    Args:
        count: Number of events.
        seed: Seed of the random numbers.

    Yields:
        The events, as JSON.
    """
    rng = random.Random(seed)

    def one_of_last(newest: int, last: int, hot: float) -> int:
        if rng.random() < hot:
            return max(FIRST_ID, newest - newest % 100)
        return rng.randint(max(FIRST_ID, newest - last + 1), newest)

    def filling(length: int) -> str:
        return "".join(rng.choices(LETTERS, k=length))

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
                    "state": rng.choice(STATES),
                    "at": time_of(at),
                    "extra": filling(80),
                }
            }
        elif kind <= 3:
            initial = price_of(rng)
            event = {
                "auction": {
                    "id": auction,
                    "item": filling(15),
                    "initial": initial,
                    "reserve": initial + price_of(rng),
                    "at": time_of(at),
                    "expires": time_of(at + rng.randrange(1, 20_000_000)),
                    "seller": one_of_last(person, 1_000, 3 / 4),
                    "category": rng.randint(10, 14),
                    "extra": filling(100),
                }
            }
        else:
            event = {
                "bid": {
                    "auction": one_of_last(auction, 100, 1 / 2),
                    "bidder": one_of_last(person, 1_000, 3 / 4),
                    "price": price_of(rng),
                    "channel": rng.choice(CHANNELS),
                    "at": time_of(at),
                    "extra": filling(30),
                }
            }
        yield json.dumps(event, separators=(",", ":")).encode()


def price_of(rng: random.Random) -> int:
    """Draw a price in cents."""
    return round(100 * 10 ** (6 * rng.random()))


Query = Callable[["DataFrame"], "DataFrame"]


def q0(events: DataFrame) -> DataFrame:
    """Return each bid."""
    return _bids(events).select("auction", "bidder", "price", "at")


def q1(events: DataFrame) -> DataFrame:
    """Return each bid with its price in euros."""
    return _bids(events).selectExpr("auction", "bidder", "price * 0.908 AS euros", "at")


def q2(events: DataFrame) -> DataFrame:
    """Return the bids on some auctions."""
    return _bids(events).where("auction % 123 = 0").select("auction", "price")


def q3(events: DataFrame) -> DataFrame:
    """Join auctions with the people of three states who sell."""
    sellers = _persons(events).where("state IN ('OR', 'ID', 'CA')")
    auctions = _auctions(events).where("category = 10").selectExpr("id AS auction", "seller")
    joined = auctions.join(sellers, auctions.seller == sellers.id)
    return joined.select("name", "city", "state", "auction")


def q5(events: DataFrame) -> DataFrame:
    """Return the auctions with the most bids in each window."""
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
    """Join new people with their auctions by window."""
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
    """The same events in a topic of ours and in one of Kafka's.

    Args:
        spark: A session, with Kafka's connector if there is an address.
        address: Address of Kafka, or ``None``.
        home: An empty directory.
    """

    def __init__(self, spark: SparkSession, address: str | None, home: Path) -> None:
        self._spark, self._address, self._home = spark, address, home
        self._turn = 0
        self._topic = f"nexmark-{home.name}"
        generated = [*events()]
        Topic.create(str(home / "topic"), PARTITIONS)
        with TopicProducer(str(home / "topic"), broker="off") as producer:
            for number, first in enumerate(range(0, EVENTS, EVENTS_OF_A_BATCH)):
                part = generated[first : first + EVENTS_OF_A_BATCH]
                producer.produce(part, partition=str(number % PARTITIONS))
                producer.flush()
        if address is not None:
            kafka.fill(address, self._topic, PARTITIONS, generated, 1)

    def ours(self) -> DataFrame:
        """Return a stream from our topic."""
        reader = self._spark.readStream.format("opendata-buffer").options(
            maxBatchesPerTrigger=EVENTS // EVENTS_OF_A_BATCH // MICRO_BATCHES,
            valueFormat="json",
            acknowledge=False,
        )
        return reader.schema(SCHEMA).load(str(self._home / "topic"))

    def kafka(self, settings: dict[str, str]) -> DataFrame:
        """Open a stream from Kafka's topic.

        Args:
            settings: More options of the connector.

        Returns:
            The stream.
        """
        reader = (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self._address)
            .option("subscribe", self._topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", EVENTS // MICRO_BATCHES)
            .options(**settings)
        )
        frame = reader.load()
        return frame.selectExpr(f"from_json(CAST(value AS STRING), '{SCHEMA}') AS r").select("r.*")

    def rate(self, source: Callable[[], DataFrame], query: Query) -> float:
        """Run a query.

        Args:
            source: Returns the stream.
            query: The query.

        Returns:
            Million events per second.

        Raises:
            RuntimeError: The query read fewer rows than there are events.
        """

        def run(attempt: int) -> float:
            del attempt
            self._turn += 1
            checkpoint = self._home / f"checkpoint-{self._turn}"
            found = drained(query(source()), checkpoint)
            shutil.rmtree(checkpoint, ignore_errors=True)
            if found.rows < EVENTS:
                raise RuntimeError(f"{found.rows} of {EVENTS} events were read")
            return found.add_batch_s

        return EVENTS / started(run) / 1e6


def rows(spark: SparkSession, home: Path, address: str | None) -> Iterator[Row]:
    """Measure each query over each source, in turns.

    Args:
        spark: A session, with Kafka's connector if there is an address.
        home: A directory.
        address: Address of Kafka, or ``None`` to measure our side alone.

    Yields:
        The rows of the suite.
    """
    place = home / "nexmark"
    place.mkdir()
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    sources = Sources(spark, address, place)
    streams: dict[str, Callable[[], DataFrame]] = {"ours": sources.ours}
    if address is not None:
        streams["Kafka"] = partial(sources.kafka, {})
        streams["Kafka, tuned"] = partial(sources.kafka, TUNED_SOURCE)
    sources.rate(sources.ours, q0)  # starts workers and compiles
    for name, query in QUERIES.items():
        measures = {
            label: partial(sources.rate, stream, query) for label, stream in streams.items()
        }
        rates = in_turns(measures, ROUNDS)
        found = {label: statistics.median(rounds) for label, rounds in rates.items()}
        detail = ", ".join(f"{label} {rate:.3f} M events/s" for label, rate in found.items())
        ours = found.pop("ours")
        what = f"Nexmark {name}, {EVENTS:,} events"
        if found:
            ratio = f"{ours / max(found.values()):.2f} x"
            what = f"{what}: ours / the better of Kafka, default and tuned"
            yield Row(what, ratio, detail=detail)
        else:
            yield Row(what, f"{ours:.3f} M events/s")
    spark.conf.set("spark.sql.shuffle.partitions", str(before))
    shutil.rmtree(place, ignore_errors=True)
