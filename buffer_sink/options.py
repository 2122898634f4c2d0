"""The sink's options: parsed once, on the driver, into one frozen value that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from opendata_buffer.config import BROKER_CHOICES, QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB
from opendata_buffer.formats.batch import Compression
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.option_reader import STORAGE_OPTIONS, OptionReader, storage_settings
from opendata_buffer.queue.ownership import queue_hint
from opendata_buffer.stores.open import open_store

_LONGEST_MS = 10**12  # 31 years

# Spark hands a streaming sink the options of the whole query, its own among them.
_SPARK_OPTIONS = ("checkpointLocation", "queryName")

SINK_OPTIONS = (
    *STORAGE_OPTIONS,
    "txnAppId",
    "txnVersion",
    "targetBatchBytes",
    "maxBatchBytes",
    "gatherBytes",
    "valueFormat",
    "compression",
    "zstdLevel",
    "uploadConcurrency",
    "maxMetadataRanges",
    "gcGracePeriodMs",
    "maxWriteDurationMs",
    "partitioner",
    "broker",
)

VALUE_FORMATS = ("bytes", "json")

PARTITIONERS = ("random", "modulo", "rendezvous")  # the last two by column `key`


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """How the sink writes.

    Attributes:
        queue: Where the queue lives.
        app: Half of the exactly-once identity (``txnAppId``). Default: a stream's query id; a
            batch write has no identity then.
        version: The other half in a batch write (``txnVersion``); a stream uses its batch id.
        target_batch_bytes: Record block at which a task closes a batch and uploads it, before
            compression. A task holds ``upload_concurrency + 2`` of them at most.
        max_batch_bytes: Largest record block written; readers refuse larger ones. Bounds the
            size of one record.
        gather_bytes: A task with no more than this stores nothing itself: its rows travel to the
            driver, which joins those of all such tasks into batches of ``target_batch_bytes``.
            The driver holds as much for each task. 0: every task stores its own.
        value_format: ``bytes``: column ``value`` is the record; ``json``: a JSON object of all
            columns is.
        compression: ``Compression.NONE`` or ``Compression.ZSTD``.
        zstd_level: 1 compresses JSON as well as 3, in 60 % of the time.
        upload_concurrency: Uploads at once of one task; they run beside encoding.
        max_metadata_ranges: Runs of equal ``metadata`` that one task may write. Each costs
            bytes in the manifest, which every append rewrites (failure F35).
        gc_grace_period_ms: The grace period of the collector that reads this queue (failure
            F5). An append may retry for half of it, and for a minute at most.
        max_write_duration_ms: Longest time of a write, from its plan to its commit; a longer one is
            refused. Batches are named so far ahead of time, and no collector deletes them, used or
            not, before that and its grace period are over.
        partitioner: How rows are divided among the partitions of a topic; None for ``random``.
        broker: ``auto``: an append that loses a race has the announced broker, if there is one,
            wait for it; ``off``: the append retries without that.
        one_queue: A data prefix or a manifest is named, so this is a single queue.
    """

    queue: QueueConfig
    # Not compared: a process keeps one committer, and its manifest, for all writes to a queue.
    app: str | None = field(default=None, compare=False)
    version: int | None = field(default=None, compare=False)
    target_batch_bytes: int = 16 * MIB
    max_batch_bytes: int = 256 * MIB
    gather_bytes: int = 0
    value_format: str = "bytes"
    compression: Compression = Compression.NONE
    zstd_level: int = 1
    upload_concurrency: int = 4
    max_metadata_ranges: int = 100_000
    gc_grace_period_ms: int = 600_000
    max_write_duration_ms: int = 21_600_000
    partitioner: str | None = None
    broker: str = "auto"
    one_queue: bool = False

    def __post_init__(self) -> None:
        if self.app is not None:
            Transaction(self.app, self.version or 0)  # checks the alphabet
        if self.zstd_level > 22:
            raise InvalidInput(f"option zstdLevel is {self.zstd_level}: use 1 to 22")
        if self.target_batch_bytes > self.max_batch_bytes:
            raise InvalidInput(
                f"option targetBatchBytes is {self.target_batch_bytes}, more than maxBatchBytes "
                f"{self.max_batch_bytes}: make it smaller, or raise maxBatchBytes here and where "
                "the queue is read"
            )
        if self.broker == "host":
            raise InvalidInput(
                "option broker is 'host': Spark commits in Python processes of its own, which end "
                "before another writer finds a broker there. Run 'opendata-buffer broker "
                f"{queue_hint(self.queue.store, self.queue)}' somewhere and leave the option at "
                "'auto', or write by foreach_batch_writer(..., broker='host'): the driver's "
                "process is the broker then"
            )
        if self.gather_bytes > self.target_batch_bytes:
            raise InvalidInput(
                f"option gatherBytes is {self.gather_bytes}, more than targetBatchBytes "
                f"{self.target_batch_bytes}: the driver holds so much for each task. 65536 is "
                "plenty for tasks with few rows."
            )
        if self.max_write_duration_ms > _LONGEST_MS:
            # Beyond the 48 bits of a name's time it would be in the past, or be no name of a batch.
            raise InvalidInput(
                f"option maxWriteDurationMs is {self.max_write_duration_ms}: use at most "
                f"{_LONGEST_MS} milliseconds"
            )
        if 2 * self.queue.cas_deadline_ms > self.gc_grace_period_ms:
            # The append checks ages once and may then race for cas_deadline_ms: both together
            # have to stay below the grace period, or the collector wins (failure F5).
            raise InvalidInput(
                f"option gcGracePeriodMs is {self.gc_grace_period_ms}: use at least "
                f"{2 * self.queue.cas_deadline_ms}, and the same where the queue is read"
            )

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
    grace_ms = reader.integer("gcGracePeriodMs", 600_000, least=2)
    # An append that may race for longer than half of the grace period would be refused.
    queue = replace(queue, cas_deadline_ms=min(queue.cas_deadline_ms, grace_ms // 2))
    is_given = reader.text("partitioner") is not None
    partitioner = reader.choice("partitioner", PARTITIONERS, "random") if is_given else None
    one_queue = any(reader.text(name) for name in ("dataPathPrefix", "manifestPath"))
    if one_queue and partitioner is not None:
        raise InvalidInput(
            f"option partitioner is {partitioner!r}, but dataPathPrefix or manifestPath names one "
            "queue: a partitioner divides rows among the partitions of a topic. Leave out one of "
            "them."
        )
    open_store(queue.store, queue.store_options)  # a URL that is none fails here, not in a task
    return SinkOptions(
        queue=queue,
        app=reader.text("txnAppId"),
        version=reader.integer("txnVersion", None),
        target_batch_bytes=reader.integer("targetBatchBytes", 16 * MIB, least=1),
        max_batch_bytes=reader.integer("maxBatchBytes", 256 * MIB, least=5),
        gather_bytes=reader.integer("gatherBytes", 0, least=0),
        value_format=reader.choice("valueFormat", VALUE_FORMATS, "bytes"),
        compression=Compression[compression.upper()],
        zstd_level=reader.integer("zstdLevel", 1, least=1),
        upload_concurrency=reader.integer("uploadConcurrency", 4, least=1),
        max_metadata_ranges=reader.integer("maxMetadataRanges", 100_000, least=1),
        gc_grace_period_ms=grace_ms,
        max_write_duration_ms=reader.integer("maxWriteDurationMs", 21_600_000, least=0),
        partitioner=partitioner,
        broker=reader.choice("broker", BROKER_CHOICES, "auto"),
        one_queue=one_queue,
    )
