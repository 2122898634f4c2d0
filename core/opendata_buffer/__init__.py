"""A queue that lives in object storage.

::

    from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig

    with Producer(ProducerConfig(store="s3://bucket")) as producer:
        producer.produce([b"one", b"two"]).watcher.await_durable()

    with Consumer(ConsumerConfig(store="s3://bucket")) as consumer:
        while batch := consumer.next_batch():
            print(batch.entries)
            consumer.ack(batch.sequence)

Everything public is here. Names are loaded when they are first used: Arrow takes 0.2 s.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opendata_buffer.config import (
        ConsumerConfig,
        GarbageCollectorConfig,
        ProducerConfig,
        QueueConfig,
        StoreOptions,
    )
    from opendata_buffer.consumer import Consumer
    from opendata_buffer.descriptors import (
        ArrowBatch,
        BatchDescriptor,
        ConsumedBatch,
        RawBatch,
    )
    from opendata_buffer.durability import DurabilityWatcher, Durable, WriteHandle
    from opendata_buffer.errors import (
        BatchMissing,
        BatchUnreadable,
        Closed,
        CommitStateUnknown,
        Conflict,
        CorruptBatch,
        CorruptData,
        CorruptManifest,
        DataLoss,
        Fenced,
        FlushFailed,
        ForeignLocation,
        InvalidInput,
        ObjectNotFound,
        OpenDataBufferError,
        PermanentStorageError,
        PoisonBatch,
        PrefixConflict,
        QueueFull,
        QueueReset,
        StorageError,
        TransientStorageError,
        UnsafeStore,
    )
    from opendata_buffer.fetch import FetchHandle
    from opendata_buffer.formats.batch import Compression
    from opendata_buffer.formats.keys import Transaction
    from opendata_buffer.formats.manifest import Metadata
    from opendata_buffer.gc import GarbageCollector, GcPlan, GcReport
    from opendata_buffer.producer import Producer
    from opendata_buffer.read_ahead import fetch_many
    from opendata_buffer.stores.factory import open_store
    from opendata_buffer.transactions import TransactionFilter

__all__ = [
    "ArrowBatch",
    "BatchDescriptor",
    "BatchMissing",
    "BatchUnreadable",
    "Closed",
    "CommitStateUnknown",
    "Compression",
    "Conflict",
    "ConsumedBatch",
    "Consumer",
    "ConsumerConfig",
    "CorruptBatch",
    "CorruptData",
    "CorruptManifest",
    "DataLoss",
    "DurabilityWatcher",
    "Durable",
    "Fenced",
    "FetchHandle",
    "FlushFailed",
    "ForeignLocation",
    "GarbageCollector",
    "GarbageCollectorConfig",
    "GcPlan",
    "GcReport",
    "InvalidInput",
    "Metadata",
    "ObjectNotFound",
    "OpenDataBufferError",
    "PermanentStorageError",
    "PoisonBatch",
    "PrefixConflict",
    "Producer",
    "ProducerConfig",
    "QueueConfig",
    "QueueFull",
    "QueueReset",
    "RawBatch",
    "StorageError",
    "StoreOptions",
    "Transaction",
    "TransactionFilter",
    "TransientStorageError",
    "UnsafeStore",
    "WriteHandle",
    "fetch_many",
    "open_store",
]

_HOME = {
    "config": (
        "ConsumerConfig",
        "GarbageCollectorConfig",
        "ProducerConfig",
        "QueueConfig",
        "StoreOptions",
    ),
    "consumer": ("Consumer",),
    "descriptors": (
        "ArrowBatch",
        "BatchDescriptor",
        "ConsumedBatch",
        "RawBatch",
    ),
    "durability": (
        "Durable",
        "DurabilityWatcher",
        "WriteHandle",
    ),
    "errors": (
        "BatchMissing",
        "BatchUnreadable",
        "Closed",
        "CommitStateUnknown",
        "Conflict",
        "CorruptBatch",
        "CorruptData",
        "CorruptManifest",
        "DataLoss",
        "Fenced",
        "FlushFailed",
        "ForeignLocation",
        "InvalidInput",
        "ObjectNotFound",
        "OpenDataBufferError",
        "PermanentStorageError",
        "PoisonBatch",
        "PrefixConflict",
        "QueueFull",
        "QueueReset",
        "StorageError",
        "TransientStorageError",
        "UnsafeStore",
    ),
    "fetch": ("FetchHandle",),
    "formats.batch": ("Compression",),
    "formats.keys": ("Transaction",),
    "formats.manifest": ("Metadata",),
    "gc": (
        "GarbageCollector",
        "GcPlan",
        "GcReport",
    ),
    "producer": ("Producer",),
    "read_ahead": ("fetch_many",),
    "stores.factory": ("open_store",),
    "transactions": ("TransactionFilter",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
