"""Typed settings from Spark's options, a mapping of strings whose names arrive in lower case.

A dataclass of settings declares each option next to its field: its name, its default, and how its
text is read. The names that are accepted and the values of the fields follow from that::

    @dataclass(frozen=True, kw_only=True)
    class SourceOptions:
        queue: QueueConfig
        fail_on_data_loss: bool = option("failOnDataLoss", True, boolean)

    reader = OptionReader(options, accepted_options(SourceOptions), "streaming source")
    SourceOptions(queue=storage_settings(reader), **option_values(SourceOptions, reader))
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from configparser import ConfigParser
from contextlib import contextmanager
from dataclasses import field, fields
from functools import wraps
from inspect import isgeneratorfunction
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from opendata_buffer.config import (
    DEFAULT_DATA_PATH_PREFIX,
    QueueConfig,
    StoreOptions,
    check_credential,
    flaw_of,
)
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.hints import Surface

log = logging.getLogger(__name__)

_STORE_TEXTS = {
    "endpointUrl": "endpoint_url",
    "region": "region",
    "roleArn": "role_arn",
    "externalId": "external_id",
    # Spark hides values by their options' names: an option with "access key", "secret" or
    # "token" in its name is shown in no plan and no event log (spark.redaction.regex).
    "accessKeyId": "access_key_id",
    "secretAccessKey": "secret_access_key",
    "sessionToken": "session_token",
    "serviceCredential": "service_credential",
}
"""Options and the fields of :class:`StoreOptions` that take their text."""

_SECRETS = ("accessKeyId", "secretAccessKey", "sessionToken")

STORAGE_OPTIONS = ("path", "dataPathPrefix", "manifestPath", "gcGracePeriodMs", *_STORE_TEXTS)
"""Names of the options that the source and the sink share."""

_FIXED = "it has a fixed value: leave it out"
_NAMED = (
    "load(), start() or save() names the queue or topic, for example load('s3://bucket/orders')"
)
_NO_GROUPS = (
    "use reader, the name of a reader of a log; with acknowledge set to false a query reads "
    "without taking anything"
)

INSTEAD = {
    # Kafka's names, where they mean something else here or nothing.
    "subscribe": _NAMED,
    "topic": _NAMED,
    "subscribePattern": f"{_NAMED}; a stream reads one topic",
    "assign": "dataPathPrefix names one partition of a topic, for example p-00003-04vf",
    "groupIdPrefix": _NO_GROUPS,
    "kafka.group.id": _NO_GROUPS,
    "kafka.isolation.level": "use isolationLevel",
    "kafka.compression.type": "use compression",
    "includeHeaders": "the column metadata has what was sent with each record: leave it out",
    "startingOffsetsByTimestamp": "use startingTimestamp, one time for all partitions",
    "endingOffsetsByTimestamp": "use endingTimestamp, one time for all partitions",
    # Names of 0.1 and of other connectors.
    "maxRecordsPerTrigger": "use maxOffsetsPerTrigger",
    "maxFilesPerTrigger": "use maxBatchesPerTrigger",
    "databricks.serviceCredential": "use serviceCredential",
    "parallelism": "use minPartitions, or pyspark_opendata_buffer.register(spark)",
    "profile": "set AWS_PROFILE where driver and executors run",
    "sessionName": "the session of a role is called opendata-buffer",
    "anonymous": "give keys or a role; in Python StoreOptions(anonymous=True) reads a bucket",
    "escape": "a quote within quotes is doubled: leave it out",
    "header": "leave out records with the columns' names with where(...)",
    "includeLocation": "name the column in .schema('value BINARY, location STRING')",
    "columnNameOfCorruptRecord": "name the column _corrupt_record in the schema",
    "allowForeignLocations": "no batch outside of the data prefix is read: leave it out",
    "broker": "the sink uses the one there is; the command broker runs one",
    "maxWriteDurationMs": "it is six hours: write less at once (maxBytesPerTrigger)",
    **dict.fromkeys(
        (
            "pollIntervalMs", "fetchConcurrency", "maxInFlightBytes", "maxBatchBytes",
            "gcIntervalMs", "targetBatchBytes", "gatherBytes", "zstdLevel", "uploadConcurrency",
            "maxMetadataRanges",
        ),
        _FIXED,
    ),
}  # fmt: skip
"""What to use instead of an option of Kafka, or of an earlier release, that does not exist."""


class OptionReader:
    """Reads options of any case from a mapping of strings.

    If names differ only in case, the last one counts.

    Args:
        options: Names and values.
        accepted: All names that exist, as documented.
        what: The owner of the options, for messages, such as ``streaming source``.

    Raises:
        InvalidInput: A name does not exist.
    """

    def __init__(self, options: Mapping[str, str], accepted: Iterable[str], what: str) -> None:
        names = tuple(accepted)
        known = {name.lower(): name for name in names}
        for name in options:
            if (lower := name.lower()) not in known:
                other = _NAMED if lower.startswith("kafka.") else None
                instead = next((INSTEAD[each] for each in INSTEAD if each.lower() == lower), other)
                if instead is not None:
                    raise InvalidInput(f"the {what} has no option {name}: {instead}")
                import difflib  # only where a name is wrong

                near = difflib.get_close_matches(lower, known, n=1, cutoff=0.6)
                hint = f" Did you mean {known[near[0]]!r}?" if near else ""
                raise InvalidInput(
                    f"unknown option {name!r} of the {what}.{hint} Options: {', '.join(names)}"
                )
        self._values = {name.lower(): value for name, value in options.items()}

    def text(self, name: str) -> str | None:
        """Read an option that is a text.

        Args:
            name: The option.

        Returns:
            The value; None if it is not given.

        Raises:
            InvalidInput: The value is empty or not a text.
        """
        value = self._values.get(name.lower())
        if value is None:
            return None
        if not isinstance(value, str) and name in _SECRETS:
            check_credential(f"option {name}", value)  # refused without showing it
        if not isinstance(value, str) or not value.strip():
            raise InvalidInput(f"option {name} is {value!r}: give it a value or leave it out")
        return value

    def given(self, name: str) -> bool:
        """Return whether the option has a value."""
        return name.lower() in self._values

    def raw(self, name: str, default: str) -> str:
        """Return the value unchanged, even an empty one or a space."""
        return self._values.get(name.lower(), default)

    def integer(self, name: str, default: int | None, *, least: int = 0) -> Any:
        """Read an option that is a whole number.

        Args:
            name: The option.
            default: The value if it is not given.
            least: The smallest number. The largest one is 2^63 - 1.

        Returns:
            The number, or the default.

        Raises:
            InvalidInput: The value is not such a number.
        """
        value = self.text(name)
        if value is None:
            return default
        digits = value.strip()
        # int() also accepts "1_000", " 5 " and non-ASCII digits; an option does not.
        if digits.isascii() and digits.isdigit() and len(digits) <= 19:
            number = int(digits)
            if least <= number < 1 << 63:
                return number
        raise InvalidInput(
            f"option {name} is {value!r}: use a whole number of at least {least}, for example "
            f"{max(least, 1000 if default is None else default)}"
        )

    def boolean(self, name: str, default: bool) -> bool:
        """Read an option that is true or false.

        Args:
            name: The option.
            default: The value if it is not given.

        Returns:
            The value.

        Raises:
            InvalidInput: The value is neither.
        """
        value = self.text(name)
        if value is None:
            return default
        found = ConfigParser.BOOLEAN_STATES.get(value.strip().lower())
        if found is None:
            raise InvalidInput(f"option {name} is {value!r}: use true or false")
        return found

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """Read an option that is one of a few words, in any case.

        Args:
            name: The option.
            choices: The words.
            default: The value if it is not given.

        Returns:
            The word as spelled in ``choices``.

        Raises:
            InvalidInput: The value is another word.
        """
        value = self.text(name)
        if value is None:
            return default
        for choice in choices:
            if value.strip().lower() == choice.lower():
                return choice
        raise InvalidInput(f"option {name} is {value!r}: use {' or '.join(choices)}")


T = TypeVar("T")

Read = Callable[[OptionReader, str, T], T]
"""Reads the option of a name, or returns the default."""


class _Option(NamedTuple):
    """How a field is read from options."""

    name: str
    read: Read[Any]
    also: tuple[str, ...]


def option(
    name: str, default: T, read: Read[T], *, also: tuple[str, ...] = (), compare: bool = True
) -> T:
    """Declare a field of a dataclass that an option sets.

    Args:
        name: The option.
        default: The value if it is not given.
        read: Reads the option, such as :func:`boolean`.
        also: Further options that ``read`` uses.
        compare: Whether two values of the dataclass that differ only here are different.

    Returns:
        The field. The type is the value's, as for :func:`dataclasses.field`.
    """
    made: Any = field(
        default=default, compare=compare, metadata={"option": _Option(name, read, also)}
    )
    return made  # type: ignore[no-any-return]


def accepted_options(settings: type) -> tuple[str, ...]:
    """Return the names of the options that a dataclass declares, after :data:`STORAGE_OPTIONS`."""
    declared = (found for _, found in _declared_in(settings))
    names = (name for found in declared for name in (found.name, *found.also))
    return tuple(dict.fromkeys((*STORAGE_OPTIONS, *names)))


def option_values(settings: type, reader: OptionReader) -> dict[str, Any]:
    """Read all options that a dataclass declares.

    Args:
        settings: The dataclass.
        reader: The options.

    Returns:
        The values, by the names of the fields.

    Raises:
        InvalidInput: A value is not accepted.
    """
    return {
        name: found.read(reader, found.name, default)
        for (name, default), found in _declared_in(settings)
    }


def _declared_in(settings: type) -> Iterator[tuple[tuple[str, Any], _Option]]:
    for each in fields(settings):
        if (found := each.metadata.get("option")) is not None:
            yield (each.name, each.default), found


def boolean(reader: OptionReader, name: str, default: bool) -> bool:
    """Read an option that is true or false; see :meth:`OptionReader.boolean`."""
    return reader.boolean(name, default)


def text(reader: OptionReader, name: str, default: str | None) -> str | None:
    """Read an option that is a text; see :meth:`OptionReader.text`."""
    value = reader.text(name)
    return default if value is None else value


def whole_number(least: int = 0) -> Read[int | None]:
    """Return a function that reads a whole number; see :meth:`OptionReader.integer`."""
    return lambda reader, name, default: reader.integer(name, default, least=least)


def one_of(*words: str) -> Read[str]:
    """Return a function that reads one of a few words; see :meth:`OptionReader.choice`."""
    return lambda reader, name, default: reader.choice(name, words, default)


def names_one_queue(reader: OptionReader) -> bool:
    """Return whether an option names a single queue, in a store that may hold a topic."""
    return any(reader.text(name) is not None for name in ("dataPathPrefix", "manifestPath"))


@contextmanager
def in_options() -> Iterator[None]:
    """Have the errors of a block speak of Spark's options."""
    try:
        yield
    except OpenDataBufferError as error:
        error.surface = Surface.SPARK
        raise


P = ParamSpec("P")


def briefly(method: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function that Spark calls, so that an error of the library is short.

    Spark shows the whole traceback of an error before its message. For an error of the library, the
    traceback is of no use to a user, because the message names the cause and the fix. So it goes to
    the debug log, with the errors that led to this one.

    Args:
        method: The function, which may be a generator.

    Returns:
        The function. Its errors of the library have no traceback and no cause.
    """

    def brief(error: OpenDataBufferError) -> OpenDataBufferError:
        log.debug("%s failed", method.__qualname__, exc_info=error)
        return error.with_traceback(None)

    if isgeneratorfunction(method):

        @wraps(method)
        def iterate(*args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
            try:
                yield from method(*args, **kwargs)
            except OpenDataBufferError as error:
                raise brief(error) from None

        return cast(Callable[P, T], iterate)

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except OpenDataBufferError as error:
            raise brief(error) from None

    return call


def storage_settings(reader: OptionReader) -> QueueConfig:
    """Read where the queue is, from the options in :data:`STORAGE_OPTIONS`.

    A path is made absolute here, because a Spark executor has another working directory.

    Args:
        reader: The options of a query.

    Returns:
        The settings of the queue.

    Raises:
        InvalidInput: No store is named, no other process can reach it, or a prefix or key cannot be
            used.
    """
    store = reader.text("path")
    if store is None:
        raise InvalidInput(
            "no store given: name it in load(), start() or save(), for example "
            "load('s3://bucket/root') or load('/data/queue')"
        )
    store = store.strip()
    if store.lower().startswith("memory:"):
        raise InvalidInput(
            f"store {store!r} lives in the memory of one process, and Spark's driver and tasks "
            "are several: use a directory or an s3:// URL"
        )
    if "://" not in store and not store.startswith(
        ("file:", "s3:", "s3a:", "gs:", "az:", "abfss:", "dbfs:")
    ):
        store = os.path.abspath(os.path.expanduser(store))
    for option in _SECRETS:
        # The field refuses these, too, under another name than the option's.
        if (value := reader.text(option)) is not None and flaw_of(value):
            check_credential(f"option {option}", value)
    return QueueConfig(
        store=store,
        data_path_prefix=reader.text("dataPathPrefix") or DEFAULT_DATA_PATH_PREFIX,
        manifest_path=reader.text("manifestPath") or "",
        store_options=StoreOptions(
            **{name: reader.text(option) for option, name in _STORE_TEXTS.items()}  # type: ignore[arg-type]
        ),
    )
