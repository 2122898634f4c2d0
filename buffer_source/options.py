"""Options of the source, parsed once on the driver into one frozen value.

The value also decides how a query handles data that it cannot deliver (decision 0014).
``failOnDataLoss`` decides about lost entries (``DataLoss``), a different queue (``QueueReset``) and
a batch whose object is missing (``BatchMissing``). ``corruptBatches`` decides about
``BatchUnreadable``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

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
    OptionReader,
    Read,
    accepted_options,
    boolean,
    names_one_queue,
    one_of,
    option,
    option_values,
    storage_settings,
    whole_number,
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

_DURATION = re.compile(r"(\d{1,12}) ?(ms|s|m|min|h|d)?", re.ASCII)
_UNITS_MS = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}

PROGRAM = "Spark"  # The program in the consumer info of a queue that the source has claimed.

_OF_CSV = ("sep", "quote", "nullValue")


def _value_options(
    read: OptionReader, name: str, default: ValueOptions | None
) -> ValueOptions | None:
    """Return how to read records into columns; the default for ``bytes``, without columns."""
    value_format = read.choice(name, ("bytes", "json", "csv"), "bytes")
    for names, formats in ((("mode",), ("json", "csv")), (_OF_CSV, ("csv",))):
        for other in names:
            if value_format not in formats and read.given(other):
                raise errors.InvalidInput(
                    f"option {other} is given and valueFormat is {value_format}: it sets how "
                    f"{' or '.join(formats)} is read, so set valueFormat, or leave it out"
                )
    if value_format == "bytes":
        return default
    sep, quote = read.raw("sep", ","), read.raw("quote", '"')
    for character, value in (("sep", sep), ("quote", quote)):
        if len(value.encode()) > 1 or (character == "sep" and not value) or value in ("\n", "\r"):
            raise errors.InvalidInput(
                f"option {character} is {value!r}: use one ASCII character"
                + ("" if character == "sep" else ", or nothing for none")
            )
    from opendata_buffer.values import ValueOptions  # Arrow's readers take 60 ms to load.

    return ValueOptions(
        format=value_format,
        mode=read.choice("mode", ("PERMISSIVE", "DROPMALFORMED", "FAILFAST"), "PERMISSIVE"),
        sep=sep,
        quote=quote,
        null_value=read.raw("nullValue", ""),
    )


def _time_instead_of(offsets: str) -> Read[int | None]:
    """Return a function that reads a time, which excludes the option of offsets."""

    def read_time(read: OptionReader, name: str, default: int | None) -> int | None:
        value = read.text(name)
        if value is None:
            return default
        if read.text(offsets) is not None:
            raise errors.InvalidInput(
                f"options {name} ({value!r}) and {offsets} are both given: leave one out"
            )
        return _milliseconds(name, value)

    return read_time


def _milliseconds(name: str, value: str) -> int:
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


def _position(read: OptionReader, name: str, default: Offsets | None) -> Any:
    """Return :data:`Offsets`, or the default."""
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


def _at_least_one(read: OptionReader, name: str, default: int) -> int:
    number: int = read.integer(name, default, least=1)
    return number


def _delay(read: OptionReader, name: str, default: int) -> int:
    """Read a duration as Spark writes it: a number with a unit, or milliseconds without one."""
    value = read.text(name)
    if value is None:
        return default
    if read.text("minOffsetsPerTrigger") is None:
        raise errors.InvalidInput(
            f"option {name} is given and minOffsetsPerTrigger is not: it says how long a trigger "
            "waits for that many records. Set minOffsetsPerTrigger, or leave it out"
        )
    found = _DURATION.fullmatch(value.strip().lower())
    if found is None:
        raise errors.InvalidInput(
            f"option {name} is {value!r}: use a number with a unit, such as 90s, 15m or 1h"
        )
    return int(found[1]) * _UNITS_MS[found[2] or "ms"]


def _reader_name(read: OptionReader, name: str, default: str) -> str:
    value = read.text(name) or default
    if value:
        check_reader_name(value)
    return value


def _collector(
    read: OptionReader, name: str, default: GarbageCollectorConfig
) -> GarbageCollectorConfig:
    return replace(
        default,
        enabled=read.boolean(name, default.enabled),
        grace_period_ms=read.integer("gcGracePeriodMs", default.grace_period_ms, least=1),
    )


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The options of a stream or a batch read; see ``docs/reference/options.md``.

    Sequences by partition are sorted pairs. Timestamps are in milliseconds since the Unix epoch.
    The limits of a trigger are soft: it reads at least one batch.
    """

    queue: QueueConfig
    one_queue: bool = True  # False if the store may hold a topic instead.
    is_partition: bool = False  # Whether these are the options of one partition of a topic.
    starting_offsets: Offsets = option("startingOffsets", EARLIEST, _position)
    starting_timestamp_ms: int | None = option(
        "startingTimestamp", None, _time_instead_of("startingOffsets")
    )
    # Whether one of these two options is given. Otherwise a reader continues where it was.
    start_is_given: bool = False
    isolation: str = option("isolationLevel", READ_COMMITTED, one_of(*ISOLATION_LEVELS))
    fail_on_data_loss: bool = option("failOnDataLoss", True, boolean)
    corrupt_batches: str = option("corruptBatches", FAIL, one_of(FAIL, QUARANTINE))
    min_partitions: int | None = option("minPartitions", None, whole_number(least=1))
    values: ValueOptions | None = option(  # None to deliver records as ``value``.
        "valueFormat", None, _value_options, also=("mode", *_OF_CSV)
    )
    acknowledge: bool = option("acknowledge", True, boolean)
    reader: str = option("reader", "", _reader_name)
    create_if_missing: bool = option("createIfMissing", False, boolean)
    max_batches: int | None = option("maxBatchesPerTrigger", None, whole_number(least=1))
    max_bytes: int | None = option("maxBytesPerTrigger", None, whole_number(least=1))
    max_records: int | None = option("maxOffsetsPerTrigger", None, whole_number(least=1))
    min_records: int | None = option("minOffsetsPerTrigger", None, whole_number(least=1))
    max_delay_ms: int = option("maxTriggerDelay", 15 * 60 * 1000, _delay)
    idle_poll_ms: int = option("idlePollMs", 2_000, _at_least_one)
    gc: GarbageCollectorConfig = option("gcEnabled", GarbageCollectorConfig(), _collector)
    # The first sequence not read; None is latest.
    ending_offsets: Offsets | None = option("endingOffsets", None, _position)
    ending_timestamp_ms: int | None = option(
        "endingTimestamp", None, _time_instead_of("endingOffsets")
    )
    cores: int | None = None  # Concurrent tasks, as found by pyspark_opendata_buffer.register.

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
        return cls(
            queue=queue,
            one_queue=names_one_queue(read),
            start_is_given=read.given("startingOffsets") or read.given("startingTimestamp"),
            cores=cores,
            **option_values(cls, read),
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
        if (self.max_records or self.min_records or 0) < (self.min_records or 0):
            raise errors.InvalidInput(
                f"option minOffsetsPerTrigger is {self.min_records}, more than "
                f"maxOffsetsPerTrigger {self.max_records}: make it the smaller one"
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
        """Refuse a range that ends before it starts, or that has two starts.

        Raises:
            InvalidInput: The range is empty, or the reader and another option say where it begins.
        """
        if self.starting_offsets == LATEST:
            raise errors.InvalidInput(
                "option startingOffsets is 'latest': a batch read would be empty. Use 'earliest' "
                "or a sequence"
            )
        if self.reader and self.start_is_given:
            name, value = "startingOffsets", self.starting_offsets
            if self.starting_timestamp_ms is not None:
                name, value = "startingTimestamp", self.starting_timestamp_ms
            raise errors.InvalidInput(
                f"option reader is {self.reader!r} and {name} is {value!r}, and both say where a "
                "batch read begins: leave one out"
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
            is_partition=True,
            create_if_missing=True,
            starting_offsets=_offset_of(name, self.starting_offsets, EARLIEST),
            ending_offsets=_offset_of(name, self.ending_offsets, LATEST),
        )

    @property
    def starts_at_oldest(self) -> bool:
        """Whether a new query begins with the oldest queued batch."""
        return self.starting_offsets == EARLIEST and self.starting_timestamp_ms is None

    @property
    def has_limits(self) -> bool:
        """Whether the options limit how much one trigger reads."""
        return any(
            most is not None for most in (self.max_batches, self.max_bytes, self.max_records)
        )

    @property
    def starts_at_sequence(self) -> bool:
        """Whether the start is a sequence, and neither a word nor a time."""
        return isinstance(self.starting_offsets, int)

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


def _offset_of(partition: str, offsets: T, default: str) -> T | str | int:
    if not isinstance(offsets, tuple):
        return offsets
    found = (at for name, at in offsets if name == partition or is_abbreviated(name, partition))
    return next(found, default)


SOURCE_OPTIONS = accepted_options(SourceOptions)
