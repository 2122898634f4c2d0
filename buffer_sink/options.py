"""The sink's options, parsed once on the driver into one frozen value that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB
from opendata_buffer.formats.batch import Compression, Transaction
from opendata_buffer.option_reader import (
    OptionReader,
    accepted_options,
    names_one_queue,
    one_of,
    option,
    option_values,
    storage_settings,
    text,
    whole_number,
)
from opendata_buffer.stores.open import open_store

# Spark hands a streaming sink the options of the whole query, including Spark's own.
_SPARK_OPTIONS = ("checkpointLocation", "queryName")

PARTITIONERS = ("random", "modulo", "rendezvous")  # The last two use the column `key`.


def _compression(reader: OptionReader, name: str, default: Compression) -> Compression:
    return Compression[reader.choice(name, ("none", "zstd"), default.name.lower()).upper()]


def _partitioner(reader: OptionReader, name: str, default: str | None) -> str | None:
    return reader.choice(name, PARTITIONERS, PARTITIONERS[0]) if reader.given(name) else default


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """How the sink writes; see ``docs/reference/options.md``.

    Sizes, concurrency and the maximum duration of a write have no option; only tests set them.
    """

    queue: QueueConfig
    # For a queue that the sink creates, or that has none.
    grace_ms: int | None = option("gcGracePeriodMs", None, whole_number(least=1))
    # Not compared, so that all writes of a process to a queue share a committer and its manifest.
    app: str | None = option("txnAppId", None, text, compare=False)  # None: a stream's query id
    version: int | None = option(  # None: a stream's batch id
        "txnVersion", None, whole_number(), compare=False
    )
    target_batch_bytes: int = 8 * MIB  # A task closes a batch at this size of its block.
    max_batch_bytes: int = 256 * MIB  # Readers refuse larger record blocks.
    gather_bytes: int = 65_536  # With at most this much, a task sends its rows to the driver.
    value_format: str = option("valueFormat", "bytes", one_of("bytes", "json"))
    compression: Compression = option("compression", Compression.NONE, _compression)
    upload_concurrency: int = 4  # Concurrent uploads of one task.
    # Runs of equal metadata in one task. Each run takes space in the manifest (failure F35).
    max_metadata_ranges: int = 100_000
    # From the plan of a write to its commit. The names of batches are dated this far ahead
    # (decision 0012).
    max_write_duration_ms: int = 21_600_000
    # None if not given, which means ``random``.
    partitioner: str | None = option("partitioner", None, _partitioner)
    one_queue: bool = False  # Whether a data prefix or a manifest is named.

    def __post_init__(self) -> None:
        if self.app is not None:
            Transaction(self.app, self.version or 0)  # Checks the alphabet.

    @property
    def transaction(self) -> Transaction | None:
        """The identity of a batch write; None if it has none."""
        if self.app is None or self.version is None:
            return None
        return Transaction(self.app, self.version)

    @classmethod
    def for_stream(cls, options: Mapping[str, str]) -> SinkOptions:
        """Parse the options of ``writeStream``.

        Args:
            options: The options, as Spark passes them.

        Returns:
            The parsed options.

        Raises:
            InvalidInput: An option is unknown or has an invalid value, or ``txnVersion`` is given.
        """
        parsed = _parse(options, "streaming sink")
        if parsed.version is not None:
            raise InvalidInput(
                f"option txnVersion is {parsed.version}: a stream uses its batch id as version. "
                "Leave txnVersion out; txnAppId alone is allowed."
            )
        return parsed

    @classmethod
    def for_batch(cls, options: Mapping[str, str]) -> SinkOptions:
        """Parse the options of ``df.write``.

        Args:
            options: The options, as Spark passes them.

        Returns:
            The parsed options.

        Raises:
            InvalidInput: An option is unknown or has an invalid value, or only one of ``txnAppId``
                and ``txnVersion`` is given.
        """
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


SINK_OPTIONS = accepted_options(SinkOptions)


def _parse(options: Mapping[str, str], what: str) -> SinkOptions:
    reader = OptionReader(options, (*SINK_OPTIONS, *_SPARK_OPTIONS), what)
    parsed = SinkOptions(
        queue=storage_settings(reader),
        one_queue=names_one_queue(reader),
        **option_values(SinkOptions, reader),
    )
    if parsed.one_queue and parsed.partitioner is not None:
        raise InvalidInput(
            f"option partitioner is {parsed.partitioner!r}, but dataPathPrefix or manifestPath "
            "names one queue: a partitioner divides rows among the partitions of a topic. Leave "
            "out one of them."
        )
    # An invalid URL fails here, not in a task.
    open_store(parsed.queue.store, parsed.queue.store_options)
    return parsed
