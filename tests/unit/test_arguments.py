"""Every public signature refuses arguments of the wrong type.

The cases come from the signatures: each parameter of each public function is called with values
that its annotation does not accept. A new public function without an example fails here.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import io
import pkgutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace, UnionType
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa
import pytest

import opendata_buffer
from opendata_buffer import errors
from opendata_buffer.arguments import check_fields, checked, take_bytes
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.producer.producer import MISSING
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.producer import ProduceOptions

PUBLIC = {
    "opendata_buffer": [
        name for name in opendata_buffer.__all__ if name not in (*errors.__all__, "Compression")
    ],
    "opendata_buffer.framing": ["Framing", "Splitter", "unpack_fixed"],
    "opendata_buffer.topic.partitioner": ["fnv1a", "modulo", "random", "rendezvous", "split"],
    "opendata_buffer.testing.faults": ["FaultPlan", "FaultyStore"],
    "opendata_buffer.testing.runtime": ["ManualRuntime"],
    "buffer_sink": ["foreach_batch_writer"],
    "pyspark_opendata_buffer": ["DefaultSource", "register"],
}
"""The public names, without errors and :class:`Compression`, which the library makes itself."""

MADE_BY_THE_LIBRARY = {
    "ArrowBatch",
    "BatchDescriptor",
    "ClaimedBatch",
    "ConsumedBatch",
    "DefaultSource",  # by Spark
    "Durable",
    "Lag",
    "TopicLag",
    "GcPlan",
    "GcReport",
    "Metadata",
    "Partition",
    "Record",
    "TopicDescription",
    "TopicHandle",
    "WriteHandle",
}
"""Values that the library returns. Programs read them and do not create them, and a manifest has
a hundred thousand of them, so their constructors check nothing. Their methods do."""

BY_SPARK = {"DefaultSource.simpleStreamReader"}
"""Methods that only the base class of Spark has."""


FROM_PYTHON = ("concurrent.futures._base",)
"""Modules whose classes ours derive from, with methods that are not ours."""


class AnyClass:
    """Stands for a class, and not for an instance."""


WRONG: dict[str, Any] = {
    "None": None,
    "int": 3,
    "bool": True,
    "float": 2.5,
    "str": "till",
    "bytes": b"till",
    "list": [65],
    "dict": {3: 4},
    "object": object(),
    "class": AnyClass,
}


class Signature(NamedTuple):
    """One public function, and the annotations of its parameters."""

    name: str
    hints: dict[str, Any]


@cache
def every_name() -> dict[str, Any]:
    """Return all classes by name, because some annotations name classes imported only for types."""
    found: dict[str, Any] = {"pa": pa, "ProduceOptions": ProduceOptions}
    for package in ("opendata_buffer", "buffer_source", "buffer_sink"):
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                found |= vars(importlib.import_module(module.name))
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    return found | {"SparkSession": SparkSession, "StructType": StructType}


def signature_of(name: str, function: Any) -> Signature | None:
    plain = inspect.unwrap(function)
    scope = every_name() | vars(inspect.getmodule(plain))
    hints: dict[str, Any] = {}
    for parameter in inspect.signature(plain).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        annotation = parameter.annotation
        if isinstance(annotation, str):
            annotation = eval(annotation, scope)
        if parameter.kind is parameter.VAR_KEYWORD:
            if typing.get_origin(annotation) is typing.Unpack:
                (options,) = typing.get_args(annotation)
                hints |= typing.get_type_hints(options, scope)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            hints[parameter.name] = annotation
    return Signature(name, hints) if hints else None


def signatures() -> list[Signature]:
    found: list[Signature | None] = []
    for module, names in PUBLIC.items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if not inspect.isclass(value):
                found.append(signature_of(name, value))
                continue
            if name not in MADE_BY_THE_LIBRARY:
                if typing.NamedTuple in getattr(value, "__orig_bases__", ()):
                    continue
                own = value.__init__
                if own is not object.__init__:
                    found.append(signature_of(name, own))
            for method in dir(value):
                static = inspect.getattr_static(value, method)
                static = getattr(static, "__func__", static)
                called = f"{name}.{method}"
                is_own = getattr(static, "__module__", "") not in FROM_PYTHON
                if not method.startswith("_") and inspect.isfunction(static) and is_own:
                    found.append(None if called in BY_SPARK else signature_of(called, static))
    return [each for each in found if each is not None]


def accepts(hint: Any, value: Any) -> bool:
    """Return whether an annotation accepts a value, including its elements."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(accepts(each, value) for each in arguments)
    if hint in (Any, object, typing.Self) or isinstance(hint, typing.TypeVar):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin is typing.Literal:
        return any(value is each for each in arguments)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    if origin in (Sequence, Iterable, list, tuple):
        if not isinstance(value, list | tuple):
            return False
        return all(accepts(arguments[0], each) for each in value) if arguments else True
    if origin in (Mapping, dict):
        return isinstance(value, dict) and (
            not arguments
            or all(accepts(arguments[0], a) and accepts(arguments[1], b) for a, b in value.items())
        )
    return isinstance(value, origin or hint) if not is_protocol(origin or hint) else False


def is_protocol(hint: Any) -> bool:
    return getattr(hint, "_is_protocol", False) is True


ALSO_ACCEPTED = {
    ("ConsumerConfig.gc", "bool"),  # off, or the default settings
    ("WorkerConfig.gc", "bool"),
    ("ProducerConfig.compression", "str"),  # the name of a compression
    ("random.keys", "list"),  # keys are only counted
    ("split.entries", "list"),  # entries are checked by the producer of each part
}

ALSO_CALLED = {
    "config": ("store",),
    "entries": ("record", "two names of one argument"),
    "given": ("partition", "position"),
}
"""Other words for a parameter in its message."""


@dataclass
class Examples:
    """One example of each public class, created at first use and closed at the end."""

    store: MemoryStore = field(default_factory=MemoryStore)
    topic_store: MemoryStore = field(default_factory=MemoryStore)
    made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    @property
    def producer(self) -> Any:
        from opendata_buffer import Producer

        settings: dict[str, Any] = {"flush_interval_ms": 1, "broker": "off"}
        return self.once("producer", lambda: Producer("memory://q", store=self.store, **settings))

    @property
    def consumer(self) -> Any:
        from opendata_buffer import Consumer

        self.producer.produce([b"one"], b"till").result(30)
        return self.once("consumer", lambda: Consumer("memory://q", store=self.store, gc=False))

    @property
    def batch(self) -> Any:
        return self.once("batch", lambda: self.consumer.next_batch(30))

    @property
    def descriptor(self) -> Any:
        from opendata_buffer import BatchDescriptor

        return BatchDescriptor(0, "ingest/01JD5T4R3KXBMZ7QV9N2WG8Y00.batch", ())

    @property
    def fetch_handle(self) -> Any:
        return self.once("fetch_handle", lambda: self.consumer.fetch_handle())

    @property
    def topic(self) -> Any:
        from opendata_buffer import Topic

        return self.once("topic", lambda: Topic.create("memory://t", 2, store=self.topic_store))

    @property
    def topic_producer(self) -> Any:
        from opendata_buffer import TopicProducer

        return self.once(
            "topic_producer",
            lambda: TopicProducer(
                "memory://t", store=self.topic.store, flush_interval_ms=1, broker="off"
            ),
        )

    @property
    def topic_consumer(self) -> Any:
        from opendata_buffer import TopicConsumer

        self.topic_producer.produce([b"one"], partition=0).result(30)
        return self.once(
            "topic_consumer", lambda: TopicConsumer("memory://t", store=self.topic.store, gc=False)
        )

    @property
    def topic_batch(self) -> Any:
        return self.once("topic_batch", lambda: self.topic_consumer.next_batch(30))

    @property
    def publisher(self) -> Any:
        from opendata_buffer import Publisher

        return self.once(
            "publisher", lambda: Publisher(self.topic, "name", flush_interval_ms=1, broker="off")
        )

    @property
    def worker(self) -> Any:
        from opendata_buffer import Worker

        _ = self.producer
        return self.once("worker", lambda: Worker("memory://q", store=self.store, broker="auto"))

    @property
    def claimed(self) -> Any:
        from opendata_buffer import ClaimedBatch

        return ClaimedBatch(None, self.descriptor, None, 1)  # type: ignore[arg-type]

    @property
    def handle(self) -> Any:
        return self.producer.send(b"one")

    @property
    def collector(self) -> Any:
        from opendata_buffer import ConsumerConfig, GarbageCollector

        return GarbageCollector(self.store, ConsumerConfig(store="memory://q"))

    @property
    def faulty(self) -> Any:
        from opendata_buffer.testing.faults import FaultyStore

        return FaultyStore(MemoryStore(), ManualRuntime())

    @property
    def description(self) -> Any:
        return self.topic.description

    @property
    def config(self) -> Any:
        from opendata_buffer import QueueConfig

        return QueueConfig(store="memory://q")

    @property
    def splitter(self) -> Any:
        from opendata_buffer.framing import FRAMINGS

        return FRAMINGS["lines"].splitter(1000)

    @property
    def source(self) -> Any:
        from pyspark_opendata_buffer import DefaultSource

        return DefaultSource({"path": "/nowhere"})

    @property
    def filter(self) -> Any:
        from opendata_buffer import TransactionFilter

        return TransactionFilter("ingest")

    def close(self) -> None:
        for name in ("publisher", "topic_consumer", "topic_producer", "worker", "consumer"):
            if name in self.made:
                self.made[name].close()
        if "producer" in self.made:
            self.made["producer"].close()


@pytest.fixture(scope="module")
def examples() -> Iterator[Examples]:
    made = Examples()
    yield made
    made.close()


def owner_of(examples: Examples, name: str) -> Any:
    """Return the function itself, bound to an example of its class where it is a method."""
    owner, _, method = name.partition(".")
    instances: dict[str, Callable[[], Any]] = {
        "AckIntents": lambda: None,
        "ArrowBatch": lambda: examples.batch.as_arrow(),
        "ClaimedBatch": lambda: examples.claimed,
        "Consumer": lambda: examples.consumer,
        "ConsumerConfig": lambda: examples.config,
        "ContiguousRun": lambda: opendata_buffer.ContiguousRun([examples.descriptor]),
        "DefaultSource": lambda: examples.source,
        "FaultyStore": lambda: examples.faulty,
        "FetchHandle": lambda: examples.fetch_handle,
        "Framing": lambda: importlib.import_module("opendata_buffer.framing").FRAMINGS["ndjson"],
        "GarbageCollector": lambda: examples.collector,
        "ManualRuntime": ManualRuntime,
        "Producer": lambda: examples.producer,
        "ProducerConfig": lambda: examples.config,
        "Publisher": lambda: examples.publisher,
        "QueueConfig": lambda: examples.config,
        "Splitter": lambda: examples.splitter,
        "StoreOptions": opendata_buffer.StoreOptions,
        "Topic": lambda: examples.topic,
        "TopicConsumer": lambda: examples.topic_consumer,
        "TopicDescription": lambda: examples.description,
        "TopicHandle": lambda: examples.topic_producer.produce([b"one"]),
        "TopicProducer": lambda: examples.topic_producer,
        "TransactionFilter": lambda: examples.filter,
        "Worker": lambda: examples.worker,
        "WorkerConfig": lambda: examples.config,
        "WriteHandle": lambda: examples.handle,
    }
    for module, names in PUBLIC.items():
        if owner in names:
            value = getattr(importlib.import_module(module), owner)
            if not method:
                return value
            static = inspect.getattr_static(value, method)
            if isinstance(static, classmethod | staticmethod):
                return getattr(value, method)
            if owner not in instances:
                pytest.fail(f"{name} is public: add an example of a {owner} to owner_of()")
            return getattr(instances[owner](), method)
    raise AssertionError(name)


def right(examples: Examples, name: str, parameter: str) -> Any:
    """Return an accepted value for a parameter without a default."""
    from opendata_buffer import ConsumerConfig, ProducerConfig, WorkerConfig

    owner = name.partition(".")[0]
    configs: dict[str, Any] = {"Consumer": ConsumerConfig, "TopicConsumer": ConsumerConfig}
    configs |= dict.fromkeys(("Producer", "TopicProducer", "Publisher"), ProducerConfig)
    configs |= {"Worker": WorkerConfig, "FetchHandle": ConsumerConfig}
    configs |= {"GarbageCollector": ConsumerConfig, "ProducerConfig": ProducerConfig}
    values: dict[str, Callable[[], Any]] = {
        "accept": lambda: lambda *_: None,
        "app": lambda: "app",
        "array_bytes": lambda: 1000,
        "most": lambda: 1000,
        "batch": lambda: examples.topic_batch if owner in ("TopicConsumer",) else examples.batch,
        "batches": lambda: [examples.batch],
        "begin": lambda: 0,
        "byte_range": lambda: None,
        "callback": lambda: print,
        "chunk": lambda: b"one\n",
        "config": lambda: configs.get(owner, opendata_buffer.QueueConfig)(store="memory://q"),
        "count": lambda: 0,
        "data": lambda: b"data",
        "data_path_prefix": lambda: "ingest",
        "delay": lambda: 0.0,
        "descriptor": lambda: examples.descriptor,
        "descriptors": lambda: [examples.descriptor],
        "end": lambda: 1,
        "entries": lambda: [b"one"],
        "fetch": lambda: print,
        "given": lambda: "memory://q",
        "inner": MemoryStore,
        "intents": lambda: examples.publisher.build_ack_intents(),
        "join": lambda: print,
        "key": lambda: "key",
        "keys": lambda: [b"one"],
        "location": lambda: examples.descriptor.location,
        "max": lambda: 1,
        "max_bytes": lambda: 1000,
        "name": lambda: "name",
        "names": lambda: ["name"],
        "near": lambda: "near",
        "now_ms": lambda: 0,
        "overwrite": lambda: False,
        "partition": lambda: examples.topic.description.names[0],
        "partitioner": lambda: importlib.import_module("opendata_buffer.topic.partitioner").modulo,
        "partitions": lambda: (
            ["p-00000-04pn"] if name in ("modulo", "random", "rendezvous", "split") else 2
        ),
        "pooled": lambda: examples.fetch_handle._fetch_pooled(
            examples.consumer._entries.queued(0, 1)[0]
        ),
        "prefix": lambda: "ingest/",
        "producer": lambda: b"123456",
        "queue_id": lambda: "id",
        "raw": lambda: b"{}",
        "reason": lambda: "reason",
        "record": lambda: b"one",
        "reader": lambda: "reader",
        "records": lambda: pa.array([b"1"]),
        "request": lambda: examples.producer._prepare([b"one"]),
        "runtime": SystemRuntime,
        "schema": lambda: None,
        "scheme": lambda: "gs",
        "seconds": lambda: 1.0,
        "sequence": lambda: 0,
        "settings": lambda: {} if name.endswith(".of") else examples.config,
        "spark": lambda: SimpleNamespace(dataSource=None),
        "splitter": lambda: print,
        "state": dict,
        "store": lambda: "memory://q" if owner.endswith(("Config", "writer")) else examples.store,
        "stream": lambda: io.BytesIO(),
        "target": lambda: print,
        "text": lambda: "0",
        "through": lambda: 0,
        "timeout_ms": lambda: 1000,
        "timestamp_ms": lambda: 0,
        "topic": lambda: examples.topic,
        "topic_id": lambda: "id",
        "txn_app_id": lambda: "app",
        "unit": lambda: "lines",
        "url": lambda: "memory://q",
        "version": lambda: None,
        "batch_number": lambda: 0,
    }
    if name == "Transaction" and parameter == "batch":
        return 0
    if parameter not in values:
        pytest.fail(f"{name} has a parameter {parameter}: add an example of one to right()")
    return values[parameter]()


SIGNATURES = {each.name: each for each in signatures()}


def call(examples: Examples, name: str, arguments: dict[str, Any]) -> Any:
    """Call a function like a program, and run the coroutine that it may return."""
    function = owner_of(examples, name)
    signed = function.__init__ if inspect.isclass(function) else function
    required = [
        each.name
        for each in inspect.signature(signed).parameters.values()
        if each.default in (each.empty, MISSING)
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and each.name not in ("self", *arguments)
    ]
    if "entries" in arguments and "records" in required:  # two names of one argument
        required.remove("records")
    given = {each: right(examples, name, each) for each in required} | arguments
    if name == "Splitter":
        function = type(examples.splitter)
    result = function(**given)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if name == "DefaultSource.streamReader":
        result.latestOffset()  # Spark hides an error of streamReader() itself
    return result


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_public_function_refuses_arguments_of_the_wrong_type(
    name: str, examples: Examples
) -> None:
    tried = 0
    for parameter, hint in SIGNATURES[name].hints.items():
        for kind, value in WRONG.items():
            if accepts(hint, value) or (f"{name}.{parameter}", kind) in ALSO_ACCEPTED:
                continue
            tried += 1
            where = f"{name}({parameter}={value!r})"
            try:
                result = call(examples, name, {parameter: value})
            except OpenDataBufferError as error:
                text = str(error)
            except Exception as error:
                raise AssertionError(f"{where} raised {error!r}") from error
            else:
                pytest.fail(f"{where} returned {result!r}")
            names = (parameter, parameter.rstrip("s"), *ALSO_CALLED.get(parameter, ()))
            assert any(each in text for each in names), f"{where}: {text}"
            shown = [type(value).__name__]
            if value is None or isinstance(
                value, str
            ):  # a choice between names shows the wrong one
                shown.append(repr(value))
            if isinstance(value, list | dict):
                shown += [type(element).__name__ for element in value]
            assert any(each in text for each in shown), f"{where}: {text}"
    assert tried or all(hint is Any for hint in SIGNATURES[name].hints.values()), name


def test_f48_metadata_that_is_not_bytes_is_refused_and_nothing_is_stored() -> None:
    store = MemoryStore()
    producer = opendata_buffer.Producer("memory://q", store=store, broker="off")
    with producer:
        for metadata in (3, 0, True, False, 2.5, "", "till", None, [], [65, 66], {}, {"a": "b"}):
            with pytest.raises(InvalidInput, match=r"metadata is .*: use bytes"):
                producer.produce([b"x"], metadata=metadata)  # type: ignore[arg-type]
        for right_one in (b"till", bytearray(b"till"), memoryview(b"till")):
            producer.produce([b"y"], right_one)
    with opendata_buffer.Consumer("memory://q", store=store, gc=False) as consumer:
        batch = consumer.next_batch()
    assert batch is not None
    assert {(each.value, each.metadata) for each in batch.records()} == {(b"y", b"till")}


def test_a_bool_enables_or_disables_the_collector() -> None:
    off = opendata_buffer.ConsumerConfig(store="memory://q", gc=False)  # type: ignore[arg-type]
    on = opendata_buffer.ConsumerConfig(store="memory://q", gc=True)  # type: ignore[arg-type]
    assert off.gc == opendata_buffer.GarbageCollectorConfig(enabled=False)
    assert on.gc == opendata_buffer.GarbageCollectorConfig()


def test_a_partition_may_be_named_by_its_number(examples: Examples) -> None:
    names = examples.topic.description.names
    producer = examples.topic_producer
    assert [*producer.produce([b"one"], partition=1).result(30)] == [names[1]]
    assert producer.send(b"two", partition=1).result(30).location.startswith(f"{names[1]}/")
    with opendata_buffer.TopicConsumer(
        "memory://t", store=examples.topic.store, partitions=[1], gc=False
    ) as consumer:
        assert consumer.partitions == [names[1]]
        batch = consumer.next_batch(30)
        assert batch is not None
        assert batch.partition == names[1]
        consumer.skip(1, batch.sequence)
    assert examples.topic.description.drained(0).draining == [names[0]]
    for wrong in (-1, 7, 10**30):
        with pytest.raises(InvalidInput, match="partition is"):
            producer.produce([b"one"], partition=wrong)


def test_a_wrong_number_or_an_unknown_name_of_arguments_is_a_type_error(examples: Examples) -> None:
    with pytest.raises(TypeError, match=r"next_batch\(\) takes from 1 to 2 positional arguments"):
        examples.consumer.next_batch(1, 2)
    with pytest.raises(TypeError, match=r"ack\(\) got an unexpected keyword argument 'sequnce'"):
        examples.consumer.ack(sequnce=3)
    with pytest.raises(TypeError, match=r"next_batch\(\) got .* 'timeout_ms': use timeout$"):
        examples.consumer.next_batch(timeout_ms=3)


@checked
def example(
    many: Iterable[int], pair: tuple[int, str] = (1, ""), later: NotLoaded | None = None
) -> list[int]:
    return list(many)


class NotLoaded:
    """Defined after the function whose annotation names it, as with imports for types only."""


def test_elements_are_checked_but_iterators_are_not_consumed() -> None:
    assert example(iter([1, 2])) == [1, 2]
    assert example((1, 2), (3, "x"), NotLoaded()) == [1, 2]
    for arguments, message in (
        (([1, "2"],), r"many\[1\] is '2' \(str\): use int"),
        (({1: 2},), "many is of type dict: use a list"),
        (([], (1, 2)), r"pair\[1\] is 2 \(int\): use str"),
        (([], (1, ""), object()), "later is of type object: use NotLoaded or None"),
    ):
        with pytest.raises(InvalidInput, match=message):
            example(*arguments)


@checked
def choose(mode: Literal["fast", "safe"], count: int = 0) -> str:
    return mode


def test_a_call_with_the_types_of_an_accepted_call_is_still_checked_where_values_decide() -> None:
    assert choose("fast", 1) == "fast"
    assert example([1], (1, "")) == [1]
    with pytest.raises(InvalidInput, match="mode is 'quick'"):
        choose("quick", 1)
    with pytest.raises(InvalidInput, match="count is True"):
        choose("fast", True)
    with pytest.raises(InvalidInput, match=r"many\[0\] is '1' \(str\)"):
        example(["1"], (1, ""))
    with pytest.raises(InvalidInput, match=r"pair\[0\] is 'a' \(str\)"):
        example([1], ("a", ""))
    with pytest.raises(TypeError, match="unexpected keyword argument 'number'"):
        choose("fast", number=1)


class Readable(Protocol):
    """A protocol that an object may fit by its class, or by an attribute of its own."""

    def fetch(self) -> bytes: ...


@dataclass
class Settings:
    """Settings whose fields are checked by their types, their values, or their elements."""

    count: int
    mode: Literal["fast", "safe"] = "fast"
    names: Sequence[str] = ()
    source: Readable | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class MayFetch:
    """Objects of this class have the method only if they are given it."""


def test_fields_with_the_types_of_accepted_ones_are_still_checked_where_values_decide() -> None:
    able, unable = MayFetch(), MayFetch()
    able.fetch = lambda: b""  # type: ignore[attr-defined]
    for _ in range(2):
        assert Settings(1, "safe", ["a"], able).source is able  # type: ignore[arg-type]
        assert Settings(2, "fast", ["b"]).source is None
        for values, message in (
            ((1, "slow", ["a"], able), "mode is 'slow'"),
            ((1, "safe", [1], able), r"names\[0\] is 1 \(int\): use str"),
            ((1, "safe", ["a"], unable), "source is of type MayFetch"),
            ((True, "safe", ["a"], able), "count is True"),
        ):
            with pytest.raises(InvalidInput, match=message):
                Settings(*values)


def test_messages_contain_no_credential_and_no_record() -> None:
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    for call_with in (
        partial(opendata_buffer.StoreOptions, secret_access_key=b"secret"),
        partial(opendata_buffer.StoreOptions, secret_access_key=12345678),
        partial(opendata_buffer.StoreOptions, max_attempts=secret),
        partial(take_bytes, "metadata", secret),
    ):
        with pytest.raises(InvalidInput) as caught:
            call_with()
        assert not any(each in str(caught.value) for each in (secret, "secret'", "12345678"))


def test_a_huge_number_is_refused_without_printing_it() -> None:
    with pytest.raises(InvalidInput, match="metadata is of type int"):
        take_bytes("metadata", 10**10_000)
