"""The public names: one list, complete, importable, and light to import."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import opendata_buffer
from opendata_buffer import errors

# What the README documents, by the module each name lives in.
DOCUMENTED: dict[str, list[str]] = {
    "broker.worker": ["ClaimedBatch", "Worker"],
    "config": [
        "ConsumerConfig",
        "GarbageCollectorConfig",
        "ProducerConfig",
        "QueueConfig",
        "StoreOptions",
        "WorkerConfig",
    ],
    "consumer.consumer": ["Consumer"],
    "consumer.cursors": ["BatchDescriptor", "Position"],
    "consumer.fetch": ["ArrowBatch", "ConsumedBatch", "FetchHandle", "RawBatch"],
    "consumer.isolation": ["TransactionFilter"],
    "consumer.read_ahead": ["fetch_many"],
    "errors": errors.__all__,
    "formats.batch": ["Compression"],
    "formats.keys": ["Transaction"],
    "formats.entries": ["Metadata"],
    "gc": ["GarbageCollector", "GcPlan", "GcReport"],
    "producer.batching": ["DurabilityWatcher", "Durable", "WriteHandle"],
    "producer.producer": ["Producer"],
    "stores.open": ["open_store"],
    "topic.consumer": ["TopicArrowBatch", "TopicBatch", "TopicConsumer"],
    "topic.description": ["Partition", "TopicDescription"],
    "topic.partition_consumer": ["PartitionPosition"],
    "topic.producer": ["TopicHandle", "TopicProducer", "TopicWatcher"],
    "topic.publisher": ["AckIntents", "Publisher"],
    "topic.topic": ["Topic"],
    "values": ["ValueOptions"],
}


def documented() -> dict[str, str]:
    found: dict[str, str] = {}
    for module, names in DOCUMENTED.items():
        for name in names:
            assert name not in found, f"{name} lives in {module} and {found[name]}"
            found[name] = module
    return found


def test_all_is_exactly_what_is_documented() -> None:
    assert set(opendata_buffer.__all__) == set(documented())


@pytest.mark.parametrize("name", opendata_buffer.__all__)
def test_a_public_name_is_the_object_of_its_module_and_has_a_docstring(name: str) -> None:
    value = getattr(opendata_buffer, name)
    module = importlib.import_module(f"opendata_buffer.{documented()[name]}")
    assert value is getattr(module, name)
    assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Prodcuer'"):
        opendata_buffer.Prodcuer  # noqa: B018


def test_dir_lists_what_is_not_loaded_yet() -> None:
    assert set(opendata_buffer.__all__) <= set(dir(opendata_buffer))


@pytest.mark.parametrize(
    "statement",
    ["import opendata_buffer", "import opendata_buffer.cli", "from opendata_buffer import Fenced"],
)
def test_importing_is_light(statement: str) -> None:
    heavy = {"pyarrow", "boto3", "numpy", "pandas", "pyspark", "zstandard", "opentelemetry"}
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())
