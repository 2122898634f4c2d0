from __future__ import annotations

import inspect
import pickle
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from opendata_buffer import Consumer, Producer, Publisher, TopicConsumer, TopicProducer, Worker
from opendata_buffer.config import (
    ConsumerConfig,
    ConsumerSettings,
    GarbageCollectorConfig,
    ProducerConfig,
    ProducerSettings,
    QueueConfig,
    StoreOptions,
    WorkerConfig,
    WorkerSettings,
)
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import Compression
from opendata_buffer.internal_parts import InternalParts
from opendata_buffer.stores.open import open_store


def test_the_manifest_is_below_the_data_prefix_by_default() -> None:
    assert QueueConfig(store="/d", data_path_prefix="a/b").manifest_path == "a/b/manifest"
    config = QueueConfig(store="/d", data_path_prefix="a", manifest_path="queues/a")
    assert config.manifest_path == "queues/a"


@pytest.mark.parametrize(
    ("cls", "settings", "words"),
    [
        (ProducerConfig, {"flush_interval_ms": 0}, ["flush_interval_ms", "0", "at least 1"]),
        (ProducerConfig, {"flush_size_bytes": "64m"}, ["flush_size_bytes", "'64m'"]),
        (ProducerConfig, {"upload_concurrency": 4}, ["upload_concurrency", "it is 8"]),
        (ProducerConfig, {"compresion": "zstd"}, ["unknown setting 'compresion'", "compression"]),
        (ConsumerConfig, {"max_manifest_bytes": 21}, ["setting 'max_manifest_bytes' was removed"]),
        (ProducerConfig, {"max_batch_bytes": 7}, ["setting 'max_batch_bytes' was removed"]),
        (ProducerConfig, {"max_buffered_inputs": 9}, ["use max_buffered_bytes"]),
        (ProducerConfig, {"recreate": True}, ["the command produce with --recreate"]),
        (QueueConfig, {"cas_deadline_ms": 1}, ["store_options=StoreOptions(timeout_ms=...)"]),
        (ConsumerConfig, {"allow_foreign_locations": True}, ["outside of the data prefix"]),
        (ConsumerConfig, {"gc_grace_period_ms": 9}, ["GarbageCollectorConfig(grace_period_ms="]),
        (ProducerConfig, {"broker": "maybe"}, ["broker", "auto, host, off"]),
        (ProducerConfig, {"compression": "gzip"}, ["'gzip'", "'none' or 'zstd'"]),
        (ProducerConfig, {"flush_interval_ms": sys.maxsize}, ["flush_interval_ms", "at most"]),
        (QueueConfig, {"store": Path("/d")}, ["PosixPath", "str(path)"]),
        (ProducerConfig, {"data_path_prefix": "/abs"}, ["data_path_prefix", "'/abs'"]),
        (ProducerConfig, {"data_path_prefix": "a/../b"}, ["data_path_prefix"]),
        (QueueConfig, {"manifest_path": "a//b"}, ["manifest_path", "'a//b'"]),
        (ConsumerConfig, {"ack_interval": -1}, ["ack_interval", "-1"]),
        (GarbageCollectorConfig, {"grace_period_ms": 0}, ["grace_period_ms"]),
        (GarbageCollectorConfig, {"interval_ms": sys.maxsize}, ["interval_ms", "at most"]),
        (StoreOptions, {"max_attempts": 0}, ["max_attempts"]),
        (StoreOptions, {"timeout_ms": 0}, ["timeout_ms"]),
    ],
)
def test_the_error_about_an_invalid_setting_names_it(
    cls: type[Any], settings: dict[str, Any], words: list[str]
) -> None:
    store = {"store": "/d"} if issubclass(cls, QueueConfig) else {}
    with pytest.raises(InvalidInput) as caught:
        cls(**{**store, **settings})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("made", [Producer, Consumer, TopicProducer, TopicConsumer, Worker])
def test_a_value_that_is_neither_a_url_nor_a_configuration_is_refused(made: Any) -> None:
    with pytest.raises(
        InvalidInput, match=r"config is 7 \(int\): use \w+Config, .* a URL or path such as"
    ):
        made(7)
    with pytest.raises(InvalidInput, match="unknown setting 'flush_intervall_ms'"):
        made("memory://x", flush_intervall_ms=3)


def test_settings_are_keyword_arguments_of_producers_and_consumers(tmp_path: Path) -> None:
    with Producer(tmp_path, compression="zstd", flush_interval_ms=1) as producer:
        producer.produce([b"one"]).result(60)
        assert producer._config.compression is Compression.ZSTD
    same = ConsumerConfig(store=str(tmp_path), ack_interval=7)
    with Consumer(same, ack_interval=3) as consumer:
        assert consumer._config == replace(same, ack_interval=3)


def test_a_producer_and_a_consumer_have_few_settings() -> None:
    """They have at most ten and nine settings, including those of ``QueueConfig``."""
    shared = ["store", "data_path_prefix", "manifest_path", "store_options"]
    consumer = [*shared, "gc", "ack_interval", "create_if_missing", "reader", "idle_poll_ms"]
    assert [each.name for each in fields(ProducerConfig)] == [
        *shared, "flush_interval_ms", "flush_size_bytes", "max_buffered_bytes", "compression",
        "delivery_timeout_ms", "broker",
    ]  # fmt: skip
    assert [each.name for each in fields(ConsumerConfig)] == consumer
    assert [each.name for each in fields(WorkerConfig)] == [
        *consumer,
        "broker",
        "claim_timeout_ms",
        "max_deliveries",
        "name",
    ]


def test_a_timeout_does_not_create_another_client() -> None:
    config = ConsumerConfig(store="memory://timeouts", ack_interval=7)
    assert config.timeout_ms == 60_000
    short = config.with_timeout(500)
    assert (short.timeout_ms, short.ack_interval) == (500, 7)
    one, other = (open_store(each.store, each.store_options) for each in (config, short))
    assert one is other


def test_configurations_can_be_pickled() -> None:
    config = ConsumerConfig(store="s3://b", store_options=StoreOptions(region="eu-west-1"))
    assert pickle.loads(pickle.dumps(config)) == config


ROLE = "arn:aws:iam::1:role/r"
KEYS = {"access_key_id": "AKIAIOSFODNN7", "secret_access_key": "wJalrXUtnFEMI"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"access_key_id": "a"}, ["access_key_id without the other keys", "secret_access_key"]),
        ({"secret_access_key": "hidden"}, ["secret_access_key without the other keys"]),
        ({"session_token": "hidden"}, ["session_token without the other keys"]),
        ({"anonymous": True, **KEYS}, ["anonymous and access_key_id", "leave one"]),
        ({"service_credential": "c", "profile": "p"}, ["service_credential and profile"]),
        ({"external_id": "e"}, ["external_id is 'e'", "no role_arn"]),
        ({"session_name": "s"}, ["session_name is 's'"]),
        ({"role_arn": ROLE, "anonymous": True}, ["role_arn", "anonymous"]),
        ({"role_arn": "buffer"}, ["role_arn is 'buffer'", "arn:aws:iam::"]),
        ({"anonymous": "yes"}, ["anonymous is 'yes' (str): use true or false"]),
        (
            {"access_key_id": "a", "secret_access_key": "{{secrets/hidden/key}}"},
            ["secret_access_key is a reference", "dbutils.secrets.get"],
        ),
    ],
)
def test_the_error_about_contradictory_credentials_names_them_without_their_values(
    settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidInput) as caught:
        StoreOptions(**settings)
    for word in words:
        assert word in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert KEYS["secret_access_key"] not in str(caught.value)


def test_a_role_can_be_assumed_with_any_credentials() -> None:
    for source in ({}, KEYS, {"profile": "p"}, {"service_credential": "c"}):
        assert StoreOptions(role_arn=ROLE, external_id="e", session_name="s", **source).role_arn  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [{"region": "r"}, {"profile": "p"}, {"role_arn": ROLE}, KEYS], ids=str
)
def test_options_of_s3_are_refused_for_other_clouds(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"is for s3:// only") as caught:
        StoreOptions(**settings).check_s3_only("gs")
    assert KEYS["access_key_id"] not in str(caught.value)
    StoreOptions(service_credential="c").check_s3_only("gs")
    StoreOptions(anonymous=True).check_s3_only("az")


def test_no_text_of_a_configuration_contains_keys() -> None:
    options = StoreOptions(**KEYS, session_token="FwoGZXIvYXdz", role_arn=ROLE)
    config = ConsumerConfig(store="s3://b", store_options=options)
    for text in (repr(options), str(config), f"{config!r}", f"{ProducerConfig(store='s3://b')}"):
        assert "AKIAIOSFODNN7" not in text
        assert "wJalrXUtnFEMI" not in text
        assert "FwoGZXIvYXdz" not in text
    assert ROLE in repr(options)
    assert options != StoreOptions(role_arn=ROLE), "the key is hidden but kept"


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (ProducerConfig, ProducerSettings),
        (ConsumerConfig, ConsumerSettings),
        (WorkerConfig, WorkerSettings),
    ],
)
def test_the_keywords_that_editors_complete_are_the_fields_of_the_configuration(
    config: type[Any], settings: type[Any]
) -> None:
    hints = get_type_hints(config)
    expected = {each.name: hints[each.name] for each in fields(config) if each.name != "store"}
    found = get_type_hints(settings)
    assert list(found) == list(expected)
    for name, hint in found.items():
        kinds = {type(leaf) if isinstance(leaf, str) else leaf for leaf in leaves(hint)}
        assert expected[name] == hint or expected[name] in kinds, name


def leaves(hint: Any) -> list[Any]:
    """Return the types of a union, and the values of a Literal."""
    found = get_args(hint)
    return [leaf for each in found for leaf in leaves(each)] if found else [hint]


PUBLIC = [Producer, Consumer, TopicProducer, TopicConsumer, Worker, Publisher]


@pytest.mark.parametrize("made", PUBLIC)
def test_no_signature_shows_what_only_tests_pass(made: type[Any]) -> None:
    shown = inspect.signature(made).parameters
    assert not set(shown) & set(InternalParts._fields) - {"topic"}
    assert str(shown["settings"].annotation).startswith("Unpack[")


@pytest.mark.parametrize("made", PUBLIC)
def test_a_url_as_a_store_is_refused(made: Any) -> None:
    with pytest.raises(InvalidInput, match="store is given twice: the first argument is the URL"):
        made("memory://x", store="memory://y")


@pytest.mark.parametrize("made", [each for each in PUBLIC if each is not Publisher])
def test_completion_offers_no_internal_method(made: type[Any]) -> None:
    hidden = {"accept", "accept_async", "prepare", "produce_by", "poll", "queued", "ready"}
    assert not hidden & set(dir(made))
