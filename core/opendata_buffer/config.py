"""Settings as frozen values, checked on creation, with the names of OpenData's RFCs.

Units are in the names: ``_ms`` is milliseconds, ``_bytes`` is bytes. Every configuration can be
pickled and printed.

A URL ends up in error messages, logs, checkpoints and progress reports. So a URL with secrets is
refused on input, and the secrets are never shown (failure F37).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from os import PathLike, fspath
from typing import Any, ClassVar, Literal, Self, TypedDict
from urllib.parse import quote

from opendata_buffer.arguments import check_fields, checked, wrong_type
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.familiar_names import unknown_setting
from opendata_buffer.formats import MIB
from opendata_buffer.formats.batch import MAX_PREFIX_BYTES, Compression, check_key
from opendata_buffer.hints import Setting
from opendata_buffer.runtime import Retries, Runtime

DEFAULT_DATA_PATH_PREFIX = "ingest"
DEFAULT_MANIFEST_PATH = "ingest/manifest"
"""The place where clients of OpenData RFC 0001 keep the manifest, whatever their data prefix is.
This library keeps it at ``<data_path_prefix>/manifest``."""

PARTITION_NAME = re.compile(r"p-(?P<number>[0-9]{5})(?:-(?P<letters>[0-9a-z]{4}))?")
"""The form of partition names, which are data prefixes below the topic's root. Topics from before
names had letters after the number keep names without letters."""

DEFAULT_GRACE_PERIOD_MS = 600_000
_MOST_MS = 10**12  # about thirty years; a wait of about three hundred overflows in ``threading``

_SECRETS = ("access_key_id", "secret_access_key", "session_token")
_NOT_IN_COMMANDS = ("service_credential", "_ms", "attempts", "connections")
_READER = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_REFERENCE = re.compile(r"\{\{\s*secrets/")


# The second form is a password with slashes, which AWS secret keys may have. It also hides the path
# of a URL with a port and an @ in its path, which does less harm than a leaked password. The
# container before the host of an abfss:// URL is a name and not a secret.
_USER = re.compile(
    r"(?<=://)(?!(?<=abfss://)[^/\s:@]+@[^/\s:@'\"]+(?![^/\s'\"]))"
    r"(?:[^/\s:@]+:\S*@|[^/\s]*@)",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"]*")


# Credentials that this process has seen, to hide them in texts of other programs. Only the newest
# are kept.
_met: dict[str, None] = {}
_MOST_MET = 500
_SHORTEST_MET = 8
"""Length of the shortest value that is hidden. A shorter one may be part of a common word."""

_NOT_SENDABLE = re.compile(r"[^\x21-\x7e]+")


def remember_secret(value: str) -> None:
    """Hide a credential in all texts that :func:`redacted` returns from now on.

    The value is split at characters other than visible ASCII, and each part is hidden too. A
    message may show the value without its newline, or with an escape for it.
    """
    parts = [value, *_NOT_SENDABLE.split(value), *(quote(value, safe=safe) for safe in ("", "/"))]
    for part in parts:
        if len(part) >= _SHORTEST_MET and part not in _met:
            while len(_met) >= _MOST_MET:
                _met.pop(next(iter(_met)), None)
            _met[part] = None


def redacted(text: str) -> str:
    """Return the text with ``***`` in place of secrets.

    These are the user information and the query string of every URL in the text, and every
    credential that this process has seen.
    """
    return hide_secrets(_QUERY.sub(r"\1?***", _USER.sub("***@", text)))


def hide_secrets(text: str) -> str:
    """Return the text with ``***`` for every credential that this process has seen."""
    for secret in sorted((*_met,), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def flaw_of(secret: str) -> str:
    """Return why no HTTP header can carry a credential, and the fix; empty if one can.

    The text does not show the value. Keys and tokens of every cloud are visible ASCII. The most
    common cause is a value that was read from a file together with the newline at its end.
    """
    names = {"\n": "a newline", "\r": "a carriage return", " ": "a space", "\t": "a tab"}
    if not secret or _NOT_SENDABLE.search(secret) is None:
        return ""
    first, last = secret[0], secret[-1]
    if _NOT_SENDABLE.match(last):
        what = f"ends with {names.get(last, 'a character that is not visible ASCII')}"
    elif _NOT_SENDABLE.match(first):
        what = f"begins with {names.get(first, 'a character that is not visible ASCII')}"
    else:
        found = _NOT_SENDABLE.findall(secret)[0][0]
        return (
            f"contains {names.get(found, 'a character that is not visible ASCII')}, which no "
            "credential has: copy it again"
        )
    return f"{what}: strip it"


def check_credential(name: str | Setting, value: object) -> None:
    """Refuse a credential that no request can carry (failure F49), and hide it from now on.

    The error does not show the value.

    Args:
        name: The name of the setting.
        value: The credential.

    Raises:
        InvalidInput: The value is not a string, or has a character other than visible ASCII.
    """
    if not isinstance(value, str):
        raise InvalidInput(name, f" is of type {type(value).__name__}: use a string")
    remember_secret(value)
    if flaw := flaw_of(value):
        raise InvalidInput(name, f" {flaw}")


def check_no_secrets(name: str | Setting, url: str) -> None:
    """Refuse a URL with user information or a query string, without showing them.

    Args:
        name: The name of the setting.
        url: The URL. A path never has either.

    Raises:
        InvalidInput: The URL has user information or a query string.
    """
    if _USER.search(url):
        raise InvalidInput(
            name,
            f" {redacted(url)!r} carries credentials: they would end up in logs and "
            "checkpoints. Remove them; credentials come from the cloud's standard chain "
            "(environment, profile, the identity of this machine).",
        )
    if _QUERY.search(url):
        raise InvalidInput(
            name,
            f" {redacted(url)!r} has a query string, which could hold a secret and has no "
            "meaning here: remove it. In a file:// URL, write '?' as %3F or use a plain path.",
        )


_HTTP = re.compile(r"https?://[^/]", re.IGNORECASE)


def check_endpoint(name: str | Setting, url: str) -> None:
    """Refuse a text that is not the URL of a server, or that has secrets.

    Args:
        name: The setting or the environment variable that has the URL.
        url: The URL.

    Raises:
        InvalidInput: The URL has another scheme than http or https, or no host, or a secret.
    """
    check_no_secrets(name, url)
    if _HTTP.match(url):
        return
    # Secrets are recognised after a scheme only.
    host = redacted(f"http://{url.rpartition('://')[2]}").removeprefix("http://").strip("/")
    if not host:
        raise InvalidInput(name, " has no host: use https://host[:port]")
    raise InvalidInput(
        name,
        f" {host!r} has no scheme that a store understands: use http://{host} or https://{host}",
    )


def _and(names: Iterable[str]) -> list[Setting | str]:
    """Return the parts of a message that name several settings: ``a and b``."""
    parts: list[Setting | str] = []
    for name in names:
        if parts:
            parts.append(" and ")
        parts.append(Setting(name))
    return parts


def _check_numbers(config: Any) -> None:
    """Check all numbers. They are counts, sizes and times.

    The minimum is 1 unless the field's metadata has another one (``least``).
    """
    kind: Any = type(config)
    for name, least, is_optional in _numbers_of(kind):
        value = getattr(config, name)
        if value is None and is_optional:
            continue
        use = f"a whole number of at least {least}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(Setting(name), value, use)
        if value < least:
            raise InvalidInput(Setting(name), f" is {value!r}: use {use}")
        if name.endswith("_ms") and value > _MOST_MS:
            at_most = f"at most {_MOST_MS} milliseconds"
            raise InvalidInput(Setting(name), f" is {value!r}: use {at_most}")


@cache
def _numbers_of(kind: type) -> tuple[tuple[str, int, bool], ...]:
    """Return the name, the minimum, and whether None is allowed, of each number in a dataclass."""
    return tuple(
        (each.name, each.metadata.get("least", 1), each.type == "int | None")
        for each in fields(kind)
        if each.type in ("int", "int | None")
    )


def check_reader_name(name: str) -> None:
    """Refuse a reader name that cannot be part of a key.

    Args:
        name: The name of a reader.

    Raises:
        InvalidInput: The name does not consist of 1 to 100 letters, digits, dots, underscores and
            hyphens, or does not begin with a letter or a digit.
    """
    if not isinstance(name, str):
        raise wrong_type(Setting("reader"), name, "text, the name of a reader")
    if _READER.fullmatch(name) is None:
        raise InvalidInput(
            Setting("reader"),
            f" is {name!r}: use 1 to 100 letters, digits, '.', '_' and '-', beginning with a "
            "letter or a digit",
        )


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How to reach a cloud. Credentials come from its standard chain unless some are given here.

    Keys that are given here are part of the options. They are sent to every process that opens the
    store, also by pickling, but they are not printed. If a name is given instead
    (``service_credential``, ``role_arn``, ``profile``), only the name is sent, and each process
    renews the credentials of that name in time.

    All numbers are at least 1, and times are at most 10^12 milliseconds.

    Attributes:
        endpoint_url: An endpoint other than the cloud's own. Default: ``AWS_ENDPOINT_URL``,
            ``STORAGE_EMULATOR_HOST``, or the endpoint in ``AZURE_STORAGE_CONNECTION_STRING``.
        region: S3 only. Default: the region of the standard chain.
        profile: S3 only: a profile of the shared configuration files. Default: the chain's.
        role_arn: S3 only: a role to assume with the credentials. Its own credentials are renewed
            before they expire. The endpoint is that of AWS STS, or ``AWS_ENDPOINT_URL_STS``.
        external_id: The role's external id, if its owner requires one.
        session_name: The session of the role in AWS's logs. Default ``opendata-buffer``.
        service_credential: The name of a Databricks service credential, for any cloud.
        access_key_id: S3 only, with ``secret_access_key``.
        secret_access_key: S3 only.
        session_token: S3 only: the token of temporary keys.
        anonymous: Send no credentials, to read a public bucket. Default false.
        connect_timeout_ms: Maximum time to connect, in milliseconds. Default 5,000.
        read_timeout_ms: Maximum time for one answer, in milliseconds. Default 30,000.
        max_attempts: Attempts of reads and unconditional writes. Default 5. Conditional writes are
            attempted once: a repeated one would lose against itself (failure F1).
        max_connections: Maximum number of connections that a client keeps. Default 128.
        timeout_ms: Maximum time in milliseconds for one operation of a queue, with connects and
            retries: a change or a read of the manifest, or opening a queue for use. A change may
            take 5 s more, to find out the outcome of its last attempt. Default 60,000.

    Raises:
        InvalidInput: A value cannot be used, or two kinds of credentials are given.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    role_arn: str | None = None
    external_id: str | None = None
    session_name: str | None = None
    service_credential: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    connect_timeout_ms: int = 5_000
    read_timeout_ms: int = 30_000
    max_attempts: int = 5
    max_connections: int = 128
    # Not compared, because it does not belong to a client, and equal options share one client.
    timeout_ms: int = field(default=60_000, compare=False)

    def __post_init__(self) -> None:
        _check_numbers(self)
        check_fields(self)
        if self.endpoint_url is not None:
            check_endpoint(Setting("endpoint_url"), self.endpoint_url)
        self._check_credentials()

    def _check_credentials(self) -> None:
        for name in _SECRETS:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, str) and _REFERENCE.search(value):
                raise InvalidInput(
                    Setting(name),
                    " is a reference such as {{secrets/scope/key}}, which Databricks "
                    "replaces in the settings of a cluster only: use dbutils.secrets.get(scope, "
                    "key), or name a ",
                    Setting("service_credential"),
                )
            check_credential(Setting(name), value)
        given = [name for name in _SECRETS if getattr(self, name) is not None]
        if given and not set(_SECRETS[:2]) <= set(given):
            raise InvalidInput(
                *_and(given),
                " without the other keys: give ",
                Setting("access_key_id"),
                " and ",
                Setting("secret_access_key"),
                ", for temporary keys with their ",
                Setting("session_token"),
                ", or none of them",
            )
        sources = ("anonymous", "service_credential", "access_key_id", "profile")
        kinds = [name for name in sources if getattr(self, name) not in (None, False)]
        if len(kinds) > 1:
            raise InvalidInput(
                *_and(kinds), " are given, and each is a source of credentials: leave one"
            )
        if self.role_arn is None:
            for name in ("external_id", "session_name"):
                if (value := getattr(self, name)) is not None:
                    raise InvalidInput(
                        Setting(name),
                        f" is {value!r} and there is no ",
                        Setting("role_arn"),
                        ": name the role that it is for, or leave ",
                        Setting(name),
                        " out",
                    )
        elif self.anonymous:
            raise InvalidInput(
                Setting("role_arn"),
                f" is {self.role_arn!r} and ",
                Setting("anonymous"),
                " is true: a role is assumed with credentials. Leave one out",
            )
        elif not self.role_arn.startswith("arn:"):
            raise InvalidInput(
                Setting("role_arn"),
                f" is {self.role_arn!r}: use a role's full name such as "
                "arn:aws:iam::123456789012:role/buffer",
            )

    def for_commands(self) -> list[tuple[str, str | bool]]:
        """Return the settings that a command needs to reach the same store, without secrets."""
        found: list[tuple[str, str | bool]] = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            is_shown = setting.repr and not setting.name.endswith(_NOT_IN_COMMANDS)
            if is_shown and value != setting.default:
                found.append((setting.name, value))
        return found

    @checked
    def check_s3_only(self, scheme: str) -> None:
        """Refuse options that only S3 supports, for a store of another cloud.

        Args:
            scheme: The scheme of the store's URL.

        Raises:
            InvalidInput: Such an option is set.
        """
        for name in ("region", "profile", "role_arn", *_SECRETS):
            value = getattr(self, name)
            if value is not None:
                shown = "given" if name in _SECRETS else repr(value)
                raise InvalidInput(
                    Setting(name),
                    f" is {shown}, and a store of {scheme}:// has none: "
                    "remove it; it is for s3:// only",
                )


_INSTEAD = {
    "cas_deadline_ms": "use store_options=StoreOptions(timeout_ms=...)",
    "gc_grace_period_ms": "use gc=GarbageCollectorConfig(grace_period_ms=...) of a consumer that "
    "creates the queue; for a queue that is there, use the command gc with --grace-period-ms",
    "recreate": "to start a queue over, use the command produce with --recreate",
    "max_buffered_inputs": "use max_buffered_bytes",
    "allow_foreign_locations": "no batch outside of the data prefix is read, leave it out",
}
"""Former settings, and their replacements."""


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """The place of a queue, and how its manifest is written.

    The numbers of all settings are at least 1, unless their description names another bound. Times
    are at most 10^12 milliseconds.

    Attributes:
        store: A URL: a path or ``file:///dir``, ``s3://bucket[/root]``, ``gs://bucket[/root]``,
            ``abfss://container@account.dfs.core.windows.net[/root]``, ``az://container[/root]``,
            ``memory://name``.
        data_path_prefix: Prefix of batch objects. Default ``ingest`` (OpenData RFC 0001, Producer).
        manifest_path: Key of the manifest. Default ``<data_path_prefix>/manifest``.
        store_options: How to reach a cloud, and how long one operation may take.

    Raises:
        InvalidInput: A setting does not exist or has another type, a number is out of bounds, a URL
            has credentials, or a prefix or key cannot be used.
    """

    backoff_base_ms: ClassVar[int] = 10
    """First step of the full-jitter backoff between attempts, in milliseconds."""
    backoff_max_ms: ClassVar[int] = 2_000
    """Largest step of the backoff, in milliseconds."""
    max_manifest_bytes: ClassVar[int] = 64 * MIB
    """An append that would grow the manifest past this size raises ``QueueFull``. Every append
    rewrites the manifest, so its size is the cost of an append."""
    max_batch_bytes: ClassVar[int] = 256 * MIB
    """Size of the largest record block. One ``produce()`` call must fit into it. A larger block is
    refused before it is decompressed (failure F21)."""
    _other_checks: ClassVar[tuple[str, ...]] = ("store", "data_path_prefix", "compression")
    """Fields that have their own, more exact checks."""

    store: str
    data_path_prefix: str = DEFAULT_DATA_PATH_PREFIX
    manifest_path: str = ""
    store_options: StoreOptions = field(default_factory=StoreOptions)

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse an unknown setting, because the error of ``__init__`` would not suggest a fix."""
        names = [each.name for each in fields(cls)]
        for name in settings:
            if name in names:
                continue
            if name in _INSTEAD:
                raise InvalidInput(f"setting {name!r} was removed: {_INSTEAD[name]}")
            if isinstance(fixed := getattr(cls, name, None), int):
                raise InvalidInput(f"setting {name!r} was removed, it is {fixed}: leave it out")
            raise unknown_setting(name, names, [each.name for each in fields(StoreOptions)])
        return object.__new__(cls)

    @classmethod
    @checked
    def of(cls, given: Self | str | PathLike[str], settings: dict[str, Any]) -> Self:
        """Make the configuration from the arguments of a constructor.

        Args:
            given: A configuration, a URL or a path.
            settings: Fields of the configuration, by name.

        Returns:
            The configuration.

        Raises:
            InvalidInput: ``given`` has another type, or a setting cannot be used.
        """
        if isinstance(given, cls):
            return replace(given, **settings) if settings else given
        if isinstance(given, str | PathLike):
            return cls(**{"store": fspath(given), **settings})
        use = f"a URL such as 's3://bucket/orders', or a {cls.__name__}"
        raise wrong_type("config", given, use)

    def __post_init__(self) -> None:
        if not isinstance(self.store, str):
            raise wrong_type(Setting("store"), self.store, "text, for example str(path)")
        _check_numbers(self)
        check_fields(self, but=self._other_checks)
        check_no_secrets(Setting("store"), self.store)
        check_key(Setting("data_path_prefix"), self.data_path_prefix, MAX_PREFIX_BYTES)
        if not self.manifest_path:
            object.__setattr__(self, "manifest_path", f"{self.data_path_prefix}/manifest")
        check_key(Setting("manifest_path"), self.manifest_path)

    @property
    def timeout_ms(self) -> int:
        """Milliseconds that one operation may take, with retries (:class:`StoreOptions`)."""
        return self.store_options.timeout_ms

    @checked
    def retries(self, runtime: Runtime, **changes: Any) -> Retries:
        """Make the policy of the queue's calls: repeat transient errors until the timeout.

        Args:
            runtime: Clock and sleep.
            **changes: Other fields of the policy.

        Returns:
            The policy, to be called with a function.
        """
        fields: dict[str, Any] = {
            "base_ms": self.backoff_base_ms,
            "max_ms": self.backoff_max_ms,
            "deadline_ms": self.timeout_ms,
            "retry_on": (TransientStorageError,),
        }
        return Retries(runtime, **fields | changes)

    def with_timeout(self, timeout_ms: int) -> Self:
        """Return the same settings with another maximum time for one operation.

        Args:
            timeout_ms: Milliseconds, at least 1.

        Returns:
            The changed settings.

        Raises:
            InvalidInput: The time is out of bounds.
        """
        return replace(self, store_options=replace(self.store_options, timeout_ms=timeout_ms))


class QueueSettings(TypedDict, total=False):
    """The fields of :class:`QueueConfig` that a constructor takes as keywords, for editors.

    The URL is the first argument of a constructor. A test compares these classes with the
    configurations.
    """

    data_path_prefix: str
    manifest_path: str
    store_options: StoreOptions


class ProducerSettings(QueueSettings, total=False):
    """The fields of :class:`ProducerConfig`, as keywords."""

    flush_interval_ms: int
    flush_size_bytes: int
    max_buffered_bytes: int
    compression: Compression | Literal["none", "zstd"]
    delivery_timeout_ms: int
    broker: Literal["auto", "host", "off"]


class ConsumerSettings(QueueSettings, total=False):
    """The fields of :class:`ConsumerConfig`, as keywords."""

    gc: GarbageCollectorConfig | bool
    ack_interval: int
    create_if_missing: bool
    reader: str
    idle_poll_ms: int


class WorkerSettings(ConsumerSettings, total=False):
    """The fields of :class:`WorkerConfig`, as keywords."""

    broker: Literal["auto", "host"]
    claim_timeout_ms: int
    max_deliveries: int
    name: str


BROKER_CHOICES = ("auto", "host", "off")


def _check_broker(value: str) -> None:
    if not isinstance(value, str):
        raise wrong_type("broker", value, f"one of {', '.join(BROKER_CHOICES)}")
    if value not in BROKER_CHOICES:
        raise InvalidInput(f"broker is {value!r}: use one of {', '.join(BROKER_CHOICES)}")


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(QueueConfig):
    """Settings of a producer (OpenData RFC 0001, Producer).

    All numbers are at least 1::

        config = ProducerConfig(
            store="s3://bucket/orders",
            flush_interval_ms=50,
            compression="zstd",
            store_options=StoreOptions(timeout_ms=30_000),
        )

    Attributes:
        flush_interval_ms: Maximum age of a batch before it is flushed, in milliseconds. Default
            100.
        flush_size_bytes: A batch that is larger than this is flushed; a loose limit. Default 64
            MiB.
        max_buffered_bytes: Bytes that may wait for durability before ``produce()`` blocks. Metadata
            and uploads in flight count, plus 256 bytes for each call with metadata or an Arrow
            array, and 64 bytes for each record of other calls. Default 256 MiB.
        compression: ``Compression.NONE`` (default) or ``Compression.ZSTD``, or their names. It is
            stored as a ``Compression``.
        delivery_timeout_ms: Maximum time for which a batch is retried before its handles fail, in
            milliseconds, like Kafka's ``delivery.timeout.ms``. If the manifest is full, they fail
            with ``QueueFull``. An append is retried for this time even if
            ``store_options.timeout_ms`` is shorter, but for at most half of the grace period.
            Default 120,000.
        broker: Many processes that append to one manifest lose races to each other; a broker
            appends for all of them. ``auto`` (default): use the announced broker, or append alone
            without one; ``host``: this process serves as the broker unless another one does;
            ``off``: append alone.

    Raises:
        InvalidInput: A setting cannot be used, as for :class:`QueueConfig`; or the compression or
            the choice of a broker does not exist.
    """

    zstd_level: ClassVar[int] = 1
    """The compression level. It compresses JSON as well as level 3, in 60 % of the time."""
    upload_concurrency: ClassVar[int] = 8
    """Uploads at once."""

    flush_interval_ms: int = 100
    flush_size_bytes: int = 64 * MIB
    max_buffered_bytes: int = 256 * MIB
    compression: Compression | Literal["none", "zstd"] = Compression.NONE
    delivery_timeout_ms: int = 120_000
    broker: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_broker(self.broker)
        named = {each.name.lower(): each for each in Compression}
        compression: object = self.compression
        if isinstance(compression, str):
            compression = named.get(compression.lower(), compression)
        if isinstance(compression, str):
            raise InvalidInput(f"compression is {compression!r}: use 'none' or 'zstd'")
        if not isinstance(compression, Compression):
            raise wrong_type("compression", compression, "'none' or 'zstd'")
        object.__setattr__(self, "compression", compression)

    @property
    def codec(self) -> Compression:
        """The compression, also if it was given by its name."""
        assert isinstance(self.compression, Compression)  # __post_init__ replaces a name
        return self.compression


@dataclass(frozen=True, kw_only=True)
class GarbageCollectorConfig:
    """Settings of the collector (OpenData RFC 0001, Garbage Collection).

    Attributes:
        enabled: Whether a consumer runs the collector. Default true.
        interval_ms: Time between cycles, in milliseconds, at least 1. Default: half of the queue's
            grace period.
        grace_period_ms: The grace period in milliseconds, at least 1, of a queue that this consumer
            creates, or that has none on record. All programs use the one on record, in the queue's
            owner marker; ``opendata-buffer gc --grace-period-ms`` changes it. Default: 600,000 for
            a new queue.

    Raises:
        InvalidInput: A number is less than 1, or a setting has another type.
    """

    enabled: bool = True
    interval_ms: int | None = None
    grace_period_ms: int | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(QueueConfig):
    """Settings of a consumer (OpenData RFC 0001, Consumer).

    ::

        config = ConsumerConfig(store="s3://bucket/orders", reader="billing", ack_interval=1)

    Attributes:
        gc: The garbage collector that runs next to the consumer. False turns it off, and true means
            the default settings; :attr:`collector` has the settings that apply.
        ack_interval: Number of serial acknowledgements per manifest write, at least 1. Default 100.
        create_if_missing: Create the queue if it does not exist, for a consumer that starts before
            the first producer. Default false: a mistyped path is an error.
        reader: The name to read a log by (``opendata-buffer readers enable``). Each name has a
            position of its own and reads everything. 1 to 100 letters, digits, ``.``, ``_`` and
            ``-``. Default: no name, for the only consumer of a queue.
        idle_poll_ms: How long a record may wait in a queue that has been empty for some time, until
            a consumer looks again, in milliseconds, at least 1. The pause between two looks grows
            from 0.1 s on, and is at most a fifth of the time for which the queue has been empty.
            Default 2,000.

    Raises:
        InvalidInput: A setting cannot be used, as for :class:`QueueConfig`; or the reader's name is
            not allowed.
    """

    gc: GarbageCollectorConfig | bool = field(default_factory=GarbageCollectorConfig)
    ack_interval: int = 100
    create_if_missing: bool = False
    reader: str = ""
    idle_poll_ms: int = 2_000

    def __post_init__(self) -> None:
        gc: object = self.gc
        if isinstance(gc, bool):
            object.__setattr__(self, "gc", GarbageCollectorConfig(enabled=gc))
        super().__post_init__()
        if self.reader:
            check_reader_name(self.reader)

    @property
    def collector(self) -> GarbageCollectorConfig:
        """The settings of the garbage collector, also if ``gc`` was given as true or false."""
        assert isinstance(self.gc, GarbageCollectorConfig)  # __post_init__ replaces a bool
        return self.gc


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ConsumerConfig):
    """Settings of a worker, one of several that share a queue.

    Attributes:
        broker: ``host`` (default): this process serves as the broker unless another one does;
            ``auto``: it never does, and waits for a broker.
        claim_timeout_ms: If a worker sends no heartbeat for this time, in milliseconds and at least
            1, its batch is handed to another worker. A worker sends four heartbeats in this time on
            its own. Default 60,000.
        max_deliveries: A batch that was handed out this often and is not finished goes to the
            quarantine. 0 means without limit. Default 5.
        name: The worker's name in ``status`` and in logs, at most 256 characters. Default: host,
            process and some random characters.

    Raises:
        InvalidInput: A setting cannot be used, as for :class:`ConsumerConfig`; or the broker is
            ``off``, or the name has more than 256 characters.
    """

    broker: str = "host"
    claim_timeout_ms: int = 60_000
    max_deliveries: int = field(default=5, metadata={"least": 0})
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_broker(self.broker)
        if self.broker == "off":
            raise InvalidInput("broker is 'off': workers need one, use 'host' or 'auto'")
        if len(self.name) > 256:
            raise InvalidInput(f"name has {len(self.name)} characters: use at most 256")
