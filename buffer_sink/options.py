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
    grace_period_ms,
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

    Attributes:
        queue: Where the queue lives.
        grace_ms: The grace period of a queue that the sink creates, or that has none on record
            (``gcGracePeriodMs``).
        app: Half of the exactly-once identity (``txnAppId``). Default: a stream's query id; a
            batch write has no identity then.
        version: The other half in a batch write (``txnVersion``); a stream uses its batch id.
        target_batch_bytes: Record block at which a task closes a batch, before compression.
        max_batch_bytes: Largest record block written; readers refuse larger ones.
        gather_bytes: A task with no more than this sends its rows to the driver, which joins them.
        value_format: ``bytes``: column ``value`` is the record; ``json``: all columns are.
        compression: ``Compression.NONE`` or ``Compression.ZSTD``.
        upload_concurrency: Uploads at once of one task.
        max_metadata_ranges: Runs of equal ``metadata`` that one task may write: each costs bytes in
            the manifest, which every append rewrites (failure F35).
        max_write_duration_ms: Longest time of a write, from its plan to its commit; batches are
            named so far ahead of time (decision 0012).
        partitioner: How rows are divided among the partitions of a topic; None for ``random``.
        one_queue: A data prefix is named, so this is a single queue.
    """

    queue: QueueConfig
    grace_ms: int | None = None
    # Not compared: a process keeps one committer, and its manifest, for all writes to a queue.
    app: str | None = field(default=None, compare=False)
    version: int | None = field(default=None, compare=False)
    target_batch_bytes: int = 16 * MIB
    max_batch_bytes: int = 256 * MIB
    gather_bytes: int = 65_536
    value_format: str = "bytes"
    compression: Compression = Compression.NONE
    upload_concurrency: int = 4
    max_metadata_ranges: int = 100_000
    max_write_duration_ms: int = 21_600_000
    partitioner: str | None = None
    one_queue: bool = False

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
    one_queue = reader.text("dataPathPrefix") is not None
    if one_queue and partitioner is not None:
        raise InvalidInput(
            f"option partitioner is {partitioner!r}, but dataPathPrefix names one queue: a "
            "partitioner divides rows among the partitions of a topic. Leave out one of "
            "them."
        )
    open_store(queue.store, queue.store_options)  # a URL that is none fails here, not in a task
    return SinkOptions(
        queue=queue,
        grace_ms=grace_period_ms(reader),
        app=reader.text("txnAppId"),
        version=reader.integer("txnVersion", None),
        value_format=reader.choice("valueFormat", ("bytes", "json"), "bytes"),
        compression=Compression[compression.upper()],
        partitioner=partitioner,
        one_queue=one_queue,
    )
