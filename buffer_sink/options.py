"""The sink's options: parsed once, on the driver, into one frozen value that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB
from opendata_buffer.formats.batch import Compression, Transaction
from opendata_buffer.option_reader import (
    STORAGE_OPTIONS,
    OptionReader,
    names_one_queue,
    storage_settings,
)
from opendata_buffer.stores.open import open_store

# Spark hands a streaming sink the options of the whole query, its own among them.
_SPARK_OPTIONS = ("checkpointLocation", "queryName")

SINK_OPTIONS = (
    *STORAGE_OPTIONS,
    "txnAppId",
    "txnVersion",
    "valueFormat",
    "compression",
    "partitioner",
)

PARTITIONERS = ("random", "modulo", "rendezvous")  # the last two by column `key`


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """How the sink writes. Sizes, concurrency and the longest write have no option: tests set them.

    The options are described in ``docs/reference/options.md``.
    """

    queue: QueueConfig
    grace_ms: int | None = None  # of a queue that the sink creates, or that has none on record
    # Not compared: a process keeps one committer, and its manifest, for all writes to a queue.
    app: str | None = field(default=None, compare=False)  # None: a stream's query id
    version: int | None = field(default=None, compare=False)  # None: a stream's batch id
    target_batch_bytes: int = 8 * MIB  # of a record block, at which a task closes a batch
    max_batch_bytes: int = 256 * MIB  # of a record block; readers refuse larger ones
    gather_bytes: int = 65_536  # a task with no more sends its rows to the driver
    value_format: str = "bytes"
    compression: Compression = Compression.NONE
    upload_concurrency: int = 4  # uploads at once of one task
    # Runs of equal metadata of one task: each costs bytes in the manifest (failure F35).
    max_metadata_ranges: int = 100_000
    # Of a write, from its plan to its commit; batches are named so far ahead (decision 0012).
    max_write_duration_ms: int = 21_600_000
    partitioner: str | None = None  # None for ``random``
    one_queue: bool = False  # whether a data prefix or a manifest is named

    def __post_init__(self) -> None:
        if self.app is not None:
            Transaction(self.app, self.version or 0)  # checks the alphabet

    @property
    def transaction(self) -> Transaction | None:
        """Identity of a batch write."""
        if self.app is None or self.version is None:
            return None
        return Transaction(self.app, self.version)

    @classmethod
    def for_stream(cls, options: Mapping[str, str]) -> SinkOptions:
        """From the options of ``writeStream``; raises InvalidInput, also for ``txnVersion``."""
        parsed = _parse(options, "streaming sink")
        if parsed.version is not None:
            raise InvalidInput(
                f"option txnVersion is {parsed.version}: a stream uses its batch id as version. "
                "Leave txnVersion out; txnAppId alone is allowed."
            )
        return parsed

    @classmethod
    def for_batch(cls, options: Mapping[str, str]) -> SinkOptions:
        """From the options of ``df.write``; raises InvalidInput, also for half an identity."""
        parsed = _parse(options, "batch sink")
        if (parsed.app is None) != (parsed.version is None):
            given, missing = (
                ("txnAppId", "txnVersion") if parsed.app is not None else ("txnVersion", "txnAppId")
            )
            raise InvalidInput(
                f"option {given} is given without {missing}: a write is recognised by both. "
                "Inside foreachBatch use buffer_sink.foreach_batch_writer, which sets them."
            )
        return parsed


def _parse(options: Mapping[str, str], what: str) -> SinkOptions:
    reader = OptionReader(options, (*SINK_OPTIONS, *_SPARK_OPTIONS), what)
    compression = reader.choice("compression", ("none", "zstd"), "none")
    queue = storage_settings(reader)
    is_given = reader.text("partitioner") is not None
    partitioner = reader.choice("partitioner", PARTITIONERS, "random") if is_given else None
    one_queue = names_one_queue(reader)
    if one_queue and partitioner is not None:
        raise InvalidInput(
            f"option partitioner is {partitioner!r}, but dataPathPrefix or manifestPath names one "
            "queue: a partitioner divides rows among the partitions of a topic. Leave out one of "
            "them."
        )
    open_store(queue.store, queue.store_options)  # a URL that is none fails here, not in a task
    return SinkOptions(
        queue=queue,
        grace_ms=reader.integer("gcGracePeriodMs", None, least=1),
        app=reader.text("txnAppId"),
        version=reader.integer("txnVersion", None),
        value_format=reader.choice("valueFormat", ("bytes", "json"), "bytes"),
        compression=Compression[compression.upper()],
        partitioner=partitioner,
        one_queue=one_queue,
    )
