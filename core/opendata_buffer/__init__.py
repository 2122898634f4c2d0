"""A queue that lives in object storage.

::

    from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig

    with Producer(ProducerConfig(store="s3://bucket")) as producer:
        producer.produce([b"one", b"two"]).result()

    with Consumer(ConsumerConfig(store="s3://bucket")) as consumer:
        for batch in consumer:
            for record in batch:
                print(record.value, record.metadata)
            batch.ack()

Every public name is here, or in :mod:`opendata_buffer.admin`. Errors are imported at once, other
modules when one of their names is first used: importing Arrow takes 0.2 s, which neither
``--help`` nor Spark's search for data sources should pay.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from opendata_buffer import errors, lazy_names
from opendata_buffer.errors import *  # noqa: F403  (its __all__, here and below)

if TYPE_CHECKING:
    from opendata_buffer import admin as admin
    from opendata_buffer.assembly.consumer import Consumer as Consumer
    from opendata_buffer.assembly.producer import Producer as Producer
    from opendata_buffer.assembly.publisher import Publisher as Publisher
    from opendata_buffer.assembly.topic_consumer import TopicConsumer as TopicConsumer
    from opendata_buffer.assembly.topic_producer import TopicProducer as TopicProducer
    from opendata_buffer.broker.worker import ClaimedBatch as ClaimedBatch
    from opendata_buffer.broker.worker import Worker as Worker
    from opendata_buffer.config import ConsumerConfig as ConsumerConfig
    from opendata_buffer.config import GarbageCollectorConfig as GarbageCollectorConfig
    from opendata_buffer.config import ProducerConfig as ProducerConfig
    from opendata_buffer.config import QueueConfig as QueueConfig
    from opendata_buffer.config import StoreOptions as StoreOptions
    from opendata_buffer.config import WorkerConfig as WorkerConfig
    from opendata_buffer.consumer.batches import ArrowBatch as ArrowBatch
    from opendata_buffer.consumer.batches import ConsumedBatch as ConsumedBatch
    from opendata_buffer.consumer.batches import Record as Record
    from opendata_buffer.consumer.fetch import ContiguousRun as ContiguousRun
    from opendata_buffer.consumer.fetch import FetchHandle as FetchHandle
    from opendata_buffer.consumer.fetch import fetch_many as fetch_many
    from opendata_buffer.consumer.isolation import TransactionFilter as TransactionFilter
    from opendata_buffer.consumer.lag import Lag as Lag
    from opendata_buffer.consumer.lag import TopicLag as TopicLag
    from opendata_buffer.consumer.position import Position as Position
    from opendata_buffer.formats.batch import Compression as Compression
    from opendata_buffer.formats.batch import Transaction as Transaction
    from opendata_buffer.formats.manifest import BatchDescriptor as BatchDescriptor
    from opendata_buffer.formats.manifest import Metadata as Metadata
    from opendata_buffer.gc import GarbageCollector as GarbageCollector
    from opendata_buffer.gc import GcPlan as GcPlan
    from opendata_buffer.gc import GcReport as GcReport
    from opendata_buffer.producer.handles import Durable as Durable
    from opendata_buffer.producer.handles import TopicHandle as TopicHandle
    from opendata_buffer.producer.handles import WriteHandle as WriteHandle
    from opendata_buffer.reading import read as read
    from opendata_buffer.stores.open import open_store as open_store
    from opendata_buffer.topic.description import Partition as Partition
    from opendata_buffer.topic.description import TopicDescription as TopicDescription
    from opendata_buffer.topic.publisher import AckIntents as AckIntents
    from opendata_buffer.topic.topic import Topic as Topic
    from opendata_buffer.values import ValueOptions as ValueOptions

_NAMES = {
    "assembly.consumer": ["Consumer"],
    "assembly.producer": ["Producer"],
    "assembly.publisher": ["Publisher"],
    "assembly.topic_consumer": ["TopicConsumer"],
    "assembly.topic_producer": ["TopicProducer"],
    "broker.worker": ["ClaimedBatch", "Worker"],
    "config": [
        "ConsumerConfig",
        "GarbageCollectorConfig",
        "ProducerConfig",
        "QueueConfig",
        "StoreOptions",
        "WorkerConfig",
    ],
    "consumer.batches": ["ArrowBatch", "ConsumedBatch", "Record"],
    "consumer.fetch": ["ContiguousRun", "FetchHandle", "fetch_many"],
    "consumer.isolation": ["TransactionFilter"],
    "consumer.lag": ["Lag", "TopicLag"],
    "consumer.position": ["Position"],
    "formats.batch": ["Compression", "Transaction"],
    "formats.manifest": ["BatchDescriptor", "Metadata"],
    "gc": ["GarbageCollector", "GcPlan", "GcReport"],
    "producer.handles": ["Durable", "TopicHandle", "WriteHandle"],
    "reading": ["read"],
    "stores.open": ["open_store"],
    "topic.description": ["Partition", "TopicDescription"],
    "topic.publisher": ["AckIntents"],
    "topic.topic": ["Topic"],
    "values": ["ValueOptions"],
}
_MODULES = lazy_names.modules_of(_NAMES)

__all__ = sorted([*errors.__all__, *_MODULES])


def __getattr__(name: str) -> Any:
    if name == "admin":
        return import_module(f"{__name__}.admin")
    return lazy_names.load(globals(), _MODULES, name, "OF_PACKAGE")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "admin"})
