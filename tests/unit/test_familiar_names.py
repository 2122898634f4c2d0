"""Names of other libraries, in errors that say what to use here."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

import opendata_buffer
from opendata_buffer import (
    Consumer,
    ConsumerConfig,
    Producer,
    ProducerConfig,
    Publisher,
    Record,
    Topic,
    TopicConsumer,
    TopicProducer,
    Worker,
    WorkerConfig,
    familiar_names,
)
from opendata_buffer.broker.worker import ClaimedBatch
from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch
from opendata_buffer.errors import InvalidInput
from opendata_buffer.familiar_names import SETTINGS
from opendata_buffer.producer.handles import TopicHandle, WriteHandle

TABLES = [
    (familiar_names.OF_CONSUMERS, (Consumer, TopicConsumer)),
    (familiar_names.OF_PRODUCERS, (Producer, TopicProducer)),
    (familiar_names.OF_PUBLISHERS, (Publisher,)),
    (familiar_names.OF_WORKERS, (Worker,)),
    (familiar_names.OF_BATCHES, (ConsumedBatch, ArrowBatch)),
    (familiar_names.OF_CLAIMED_BATCHES, (ClaimedBatch,)),
    (familiar_names.OF_RECORDS, (Record,)),
    (familiar_names.OF_HANDLES, (WriteHandle, TopicHandle)),
    (familiar_names.OF_TOPICS, (Topic,)),
]


@pytest.mark.parametrize(("table", "classes"), TABLES, ids=lambda part: str(part)[:20])
def test_every_advice_names_an_attribute_that_exists(
    table: dict[str, str], classes: tuple[type, ...]
) -> None:
    """A table with a wrong name would send its reader on to the next error."""
    known = {name for each, _ in TABLES for name in each}
    owners: tuple[Any, ...] = (
        *classes,
        ConsumedBatch,
        ArrowBatch,
        ClaimedBatch,
        Record,
        Consumer,
        Worker,
        Producer,
    )
    owners = (
        *owners,
        Publisher,
        Topic,
        WriteHandle,
        opendata_buffer.Durable,
        opendata_buffer.admin,
    )
    for name, advice in table.items():
        for method in re.findall(r"(?<![\w.])(?:\w+\.)*(\w+)\(", advice):
            is_class = hasattr(opendata_buffer, method) or hasattr(__builtins__, method)
            is_python = method in ("len", "loads", "datetime", "decode", "Consumer", "to_pandas")
            is_here = any(hasattr(owner, method) for owner in owners)
            assert is_class or is_python or is_here, (name, advice, method)
    assert known


@pytest.mark.parametrize(
    ("config", "setting", "words"),
    [
        (ConsumerConfig, "group_id", "'group_id': use reader$"),
        (ProducerConfig, "group_id", "use reader of a consumer"),
        (ProducerConfig, "linger_ms", "'linger_ms': use flush_interval_ms$"),
        (ConsumerConfig, "linger_ms", "use flush_interval_ms of a producer"),
        (ProducerConfig, "bootstrap_servers", "the first argument names the queue"),
        (ProducerConfig, "endpoint_url", r"use store_options=StoreOptions\(endpoint_url=...\)"),
        (WorkerConfig, "session_timeout_ms", "use claim_timeout_ms$"),
        (ConsumerConfig, "position", "or after=position$"),
        (ConsumerConfig, "auto_offset_reset", "use start='earliest', 'latest', "),
        (ProducerConfig, "compresion", "did you mean 'compression'"),
        (ProducerConfig, "xyzzy", "'xyzzy': use store, "),
    ],
)
def test_an_unknown_setting_names_the_right_one(config: Any, setting: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        config(store="memory://x", **{setting: 1})


@pytest.mark.parametrize("config", [ProducerConfig, ConsumerConfig, WorkerConfig])
def test_no_setting_that_exists_is_in_the_table(config: Any) -> None:
    assert not {*config.__dataclass_fields__} & {*SETTINGS} - {"key"}


def test_an_attribute_of_another_library_is_an_attribute_error_that_names_ours() -> None:
    with Producer("memory://familiar") as producer:
        producer.produce(b"one").result(30)
        with pytest.raises(AttributeError, match=r"'Producer' object has no .*use produce\(\[rec"):
            producer.put  # noqa: B018
        assert not hasattr(producer, "put")
        assert getattr(producer, "nothing_like_it", 7) == 7
        with pytest.raises(AttributeError, match=r"no attribute 'nothing_like_it'$"):
            producer.nothing_like_it  # noqa: B018
    with Consumer("memory://familiar") as consumer:
        with pytest.raises(AttributeError, match=r"use next_batch\(timeout=1.0\)"):
            consumer.poll(1.0)
        with pytest.raises(AttributeError, match=r"use await asyncio.to_thread\(flush\)"):
            consumer.flush_async  # noqa: B018
        batch = next(consumer)
        with pytest.raises(AttributeError, match=r"use ack\(\)"):
            batch.commit()
        with pytest.raises(AttributeError, match="put it into the value or into metadata"):
            next(iter(batch)).key  # noqa: B018
    assert copy.copy(batch) == batch
    assert copy.deepcopy(next(iter(batch))) == next(iter(batch))


@pytest.mark.parametrize("name", sorted(familiar_names.OF_ADMIN))
def test_a_function_of_another_admin_api_names_ours(name: str) -> None:
    advice = familiar_names.OF_ADMIN[name]
    with pytest.raises(AttributeError, match=re.escape(advice)):
        getattr(opendata_buffer.admin, name)
    for function in re.findall(r"(\w+)\(", advice):
        assert function in opendata_buffer.admin.__all__


def test_a_class_of_another_library_names_ours() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KafkaProducer': use Producer"):
        opendata_buffer.KafkaProducer  # noqa: B018
