"""Options of the source, parsed once on the driver into one frozen value.

The value also decides how a query handles data that it cannot deliver (decision 0014).
``failOnDataLoss`` decides about lost entries (``DataLoss``), a different queue (``QueueReset``) and
a batch whose object is missing (``BatchMissing``). ``corruptBatches`` decides about
``BatchUnreadable``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from opendata_buffer import errors
from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    QueueConfig,
    check_reader_name,
)
from opendata_buffer.consumer.isolation import ISOLATION_LEVELS, READ_COMMITTED
from opendata_buffer.hints import Action, Hint
from opendata_buffer.option_reader import (
    STORAGE_OPTIONS,
    OptionReader,
    names_one_queue,
    storage_settings,
)
from opendata_buffer.queue.sidecar import is_number
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import is_abbreviated, number_meant

if TYPE_CHECKING:
    from opendata_buffer.values import ValueOptions

log = logging.getLogger(__name__)

_TOLERATE = {
    errors.BatchMissing: Action.TOLERATE_MISSING,
    errors.BatchUnreadable: Action.TOLERATE_UNREADABLE,
}
"""Hints about the option with which a query continues after a batch that cannot be delivered."""

EARLIEST, LATEST = "earliest", "latest"
FAIL, QUARANTINE = "fail", "quarantine"
_EPOCH = datetime.fromtimestamp(0, UTC)

Offsets = str | int | tuple[tuple[str, int], ...]
"""``earliest``, ``latest``, a sequence, or, for a topic, sequences of some of its partitions."""

T = TypeVar("T")

PROGRAM = "Spark"  # The program in the consumer info of a queue that the source has claimed.

_OF_CSV = ("sep", "quote", "nullValue")

SOURCE_OPTIONS = (
    *STORAGE_OPTIONS,
    "startingOffsets",
    "startingTimestamp",
    "isolationLevel",
    "failOnDataLoss",
    "corruptBatches",
    "minPartitions",
    "valueFormat",
    "mode",
    *_OF_CSV,
    "acknowledge",
    "reader",
    "createIfMissing",
    "maxBatchesPerTrigger",
    "maxBytesPerTrigger",
    "maxOffsetsPerTrigger",
    "gcEnabled",
    "endingOffsets",
    "endingTimestamp",
)


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The options of a stream or a batch read; see ``docs/reference/options.md``.

    Sequences by partition are sorted pairs. Timestamps are in milliseconds since the Unix epoch.
    The limits of a trigger are soft: it reads at least one batch.
    """

    queue: QueueConfig
    one_queue: bool = True  # False if the store may hold a topic instead.
    starting_offsets: Offsets = EARLIEST
    starting_timestamp_ms: int | None = None
    ending_offsets: Offsets | None = None  # The first sequence not read; None is latest.
    ending_timestamp_ms: int | None = None
    isolation: str = READ_COMMITTED
    fail_on_data_loss: bool = True
    corrupt_batches: str = FAIL
    acknowledge: bool = True
    reader: str = ""
    create_if_missing: bool = False
    max_batches: int | None = None
    max_bytes: int | None = None
    max_records: int | None = None
    cores: int | None = None  # Concurrent tasks, as found by pyspark_opendata_buffer.register.
    min_partitions: int | None = None
    values: ValueOptions | None = None  # None to deliver records as ``value``.
    gc: GarbageCollectorConfig = field(default_factory=GarbageCollectorConfig)

    @classmethod
    def from_spark(cls, options: Mapping[str, str], cores: int | None = None) -> SourceOptions:
        """Parse the options of ``readStream`` or ``read``, whose keys Spark lower-cases.

        Args:
            options: The options.
            cores: Tasks that the cluster runs at the same time; None if that is not known.

        Returns:
            The options.

        Raises:
            InvalidInput: A name is unknown, or a value is not accepted.
        """
        read = OptionReader(options, SOURCE_OPTIONS, "opendata-buffer source")
        queue = storage_settings(read)
        open_store(queue.store, queue.store_options)  # An invalid URL fails at load().
        if reader := read.text("reader") or "":
            check_reader_name(reader)
        return cls(
            queue=queue,
            one_queue=names_one_queue(read),
            starting_offsets=_position(read, "startingOffsets", EARLIEST),
            starting_timestamp_ms=_timestamp(read, "startingTimestamp", "startingOffsets"),
            ending_offsets=_position(read, "endingOffsets", None),
            ending_timestamp_ms=_timestamp(read, "endingTimestamp", "endingOffsets"),
            isolation=read.choice("isolationLevel", ISOLATION_LEVELS, READ_COMMITTED),
            fail_on_data_loss=read.boolean("failOnDataLoss", True),
            corrupt_batches=read.choice("corruptBatches", (FAIL, QUARANTINE), FAIL),
            acknowledge=read.boolean("acknowledge", True),
            reader=reader,
            create_if_missing=read.boolean("createIfMissing", False),
            max_batches=read.integer("maxBatchesPerTrigger", None, least=1),
            max_bytes=read.integer("maxBytesPerTrigger", None, least=1),
            max_records=read.integer("maxOffsetsPerTrigger", None, least=1),
            cores=cores,
            min_partitions=read.integer("minPartitions", None, least=1),
            values=_value_options(read),
            gc=GarbageCollectorConfig(
                enabled=read.boolean("gcEnabled", True),
                grace_period_ms=read.integer("gcGracePeriodMs", None, least=1),
            ),
        )

    def check_stream(self) -> None:
        """Refuse options that only a batch read has, and options that contradict each other.

        Raises:
            InvalidInput: A stream cannot use these options.
        """
        if self.create_if_missing and not self.acknowledge:
            raise errors.InvalidInput(
                "option createIfMissing is true and acknowledge is false: a query that "
                "acknowledges nothing makes no queue either. Start it when the queue exists, or "
                "leave one of the two out"
            )
        if self.reader and not self.acknowledge:
            raise errors.InvalidInput(
                f"option reader is {self.reader!r} and acknowledge is false: a reader keeps its "
                "position by acknowledging. Leave one of the two out"
            )
        for name, value in (
            ("endingOffsets", self.ending_offsets),
            ("endingTimestamp", self.ending_timestamp_ms),
        ):
            if value is not None:
                raise errors.InvalidInput(
                    f"option {name} is {value!r}: a stream has no end. Leave it out and use "
                    "trigger(availableNow=True) to stop at what is queued, or spark.read"
                )

    def check_batch(self) -> None:
        """Refuse a range that ends before it starts.

        Raises:
            InvalidInput: The range is empty.
        """
        if self.starting_offsets == LATEST:
            raise errors.InvalidInput(
                "option startingOffsets is 'latest': a batch read would be empty. Use 'earliest' "
                "or a sequence"
            )
        start, end = self.starting_offsets, self.ending_offsets
        if isinstance(start, int) and isinstance(end, int) and start > end:
            raise errors.InvalidInput(
                f"option startingOffsets is {start}, greater than endingOffsets {end}, which is "
                "the first sequence that is not read: make startingOffsets the smaller one"
            )
        since_ms, until_ms = self.starting_timestamp_ms, self.ending_timestamp_ms
        if since_ms is not None and until_ms is not None and since_ms > until_ms:
            raise errors.InvalidInput(
                f"option startingTimestamp is {since_ms} ms, later than endingTimestamp {until_ms} "
                "ms, from which on nothing is read: make startingTimestamp the earlier one"
            )

    def of_partition(self, name: str) -> SourceOptions:
        """Return the same options for one partition of a topic."""
        # The topic exists, so a partition without a manifest is empty, and not a wrong path.
        return replace(
            self,
            queue=replace(self.queue, data_path_prefix=name, manifest_path=""),
            one_queue=True,
            create_if_missing=True,
            starting_offsets=_offset_of(name, self.starting_offsets, EARLIEST),
            ending_offsets=_offset_of(name, self.ending_offsets, LATEST),
        )

    @property
    def starts_at_oldest(self) -> bool:
        """Whether a new query begins with the oldest queued batch."""
        return self.starting_offsets == EARLIEST and self.starting_timestamp_ms is None

    @property
    def consumer(self) -> ConsumerConfig:
        """The same settings as a configuration of the core's consumer."""
        return ConsumerConfig(**vars(self.queue), gc=self.gc, reader=self.reader)

    def report_data_loss(self, loss: errors.DataLoss | errors.QueueReset) -> None:
        """Report lost records. If ``failOnDataLoss`` is false, only log the loss.

        Args:
            loss: The error that describes the loss.

        Raises:
            DataLoss: ``loss``, if it is one and ``failOnDataLoss`` is true.
            QueueReset: ``loss``, if it is one and ``failOnDataLoss`` is true.
        """
        if self.fail_on_data_loss:
            if isinstance(loss, errors.QueueReset):
                loss.add(Hint(Action.ACCEPT_LOSS))
            raise loss
        log.warning("data loss allowed: %s", loss)

    def tolerates(self, error: errors.PoisonBatch) -> bool:
        """Return whether a query may continue after a batch that cannot be delivered.

        If it may not, add a hint about the option to the error.
        """
        if isinstance(error, errors.BatchMissing) and not self.fail_on_data_loss:
            return True
        if isinstance(error, errors.BatchUnreadable) and self.checks_whole_batch:
            return True
        if (action := _TOLERATE.get(type(error))) is not None:
            error.add(Hint(action))
        return False

    @property
    def checks_whole_batch(self) -> bool:
        """Whether a whole batch is checked before its first row is delivered.

        Otherwise a repaired copy of a batch would deliver some rows again.
        """
        return self.corrupt_batches == QUARANTINE


def _value_options(read: OptionReader) -> ValueOptions | None:
    """Return how to read records into columns; None for ``valueFormat=bytes``, without columns."""
    value_format = read.choice("valueFormat", ("bytes", "json", "csv"), "bytes")
    for names, formats in ((("mode",), ("json", "csv")), (_OF_CSV, ("csv",))):
        for name in names:
            if value_format not in formats and read.given(name):
                raise errors.InvalidInput(
                    f"option {name} is given and valueFormat is {value_format}: it sets how "
                    f"{' or '.join(formats)} is read, so set valueFormat, or leave it out"
                )
    if value_format == "bytes":
        return None
    sep, quote = read.raw("sep", ","), read.raw("quote", '"')
    for name, value in (("sep", sep), ("quote", quote)):
        if len(value.encode()) > 1 or (name == "sep" and not value) or value in ("\n", "\r"):
            raise errors.InvalidInput(
                f"option {name} is {value!r}: use one ASCII character"
                + ("" if name == "sep" else ", or nothing for none")
            )
    from opendata_buffer.values import ValueOptions  # Arrow's readers take 60 ms to load.

    return ValueOptions(
        format=value_format,
        mode=read.choice("mode", ("PERMISSIVE", "DROPMALFORMED", "FAILFAST"), "PERMISSIVE"),
        sep=sep,
        quote=quote,
        null_value=read.raw("nullValue", ""),
    )


def _timestamp(read: OptionReader, name: str, offsets: str) -> int | None:
    value = read.text(name)
    if value is None:
        return None
    if read.text(offsets) is not None:
        raise errors.InvalidInput(
            f"options {name} ({value!r}) and {offsets} are both given: leave one out"
        )
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise errors.InvalidInput(
            f"option {name} is {value!r}: use milliseconds since the Unix epoch such as "
            "1767225600000, or a date and time with its zone such as 2026-01-01T00:00:00Z"
        )
    return max(0, (moment - _EPOCH) // timedelta(milliseconds=1))


def _offset_of(partition: str, offsets: T, default: str) -> T | str | int:
    if not isinstance(offsets, tuple):
        return offsets
    found = (at for name, at in offsets if name == partition or is_abbreviated(name, partition))
    return next(found, default)


def _position(read: OptionReader, name: str, default: T) -> Offsets | T:
    value = read.text(name)
    if value is None:
        return default
    word = value.strip().lower()
    allowed = (EARLIEST, LATEST) if name == "startingOffsets" else (LATEST,)
    if word in allowed:
        return word
    if word.isascii() and word.isdigit() and len(word) <= 19 and int(word) < 1 << 63:
        return int(word)
    try:
        offsets = json.loads(value)
    except (ValueError, RecursionError):
        offsets = None
    if (
        isinstance(offsets, dict)
        and offsets
        and all(number_meant(each) is not None for each in offsets)
        and all(map(is_number, offsets.values()))
    ):
        return tuple(sorted(offsets.items()))
    words = ", ".join(repr(each) for each in allowed)
    raise errors.InvalidInput(
        f"option {name} is {value!r}: use {words} or a sequence such as 42; of a topic sequences "
        'by partition such as {"0": 42, "1": 7}'
    )
