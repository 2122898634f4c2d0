"""Settings: frozen values, checked when they are made, under the names of OpenData's RFCs.

Units are in the names: ``_ms`` milliseconds, ``_bytes`` bytes. Every config pickles and prints.

A URL ends up in error messages, logs, checkpoints and progress reports. So secrets in one are
refused where it comes in, and never shown (failure F37).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from typing import Any, ClassVar, Self
from urllib.parse import quote

from opendata_buffer.arguments import check_fields, checked, wrong_type
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.formats import MIB
from opendata_buffer.formats.batch import MAX_PREFIX_BYTES, Compression, check_key
from opendata_buffer.runtime import Retries, Runtime

DEFAULT_DATA_PATH_PREFIX = "ingest"
DEFAULT_MANIFEST_PATH = "ingest/manifest"
"""Where clients of OpenData RFC 0001 keep the manifest, whatever their data prefix is. Here it is
``<data_path_prefix>/manifest``."""

PARTITION_NAME = re.compile(r"p-(?P<number>[0-9]{5})(?:-(?P<letters>[0-9a-z]{4}))?")
"""Names of partitions, which are their data prefixes below the topic's root. Topics that were
created before names had letters after the number go on without them."""

DEFAULT_GRACE_PERIOD_MS = 600_000
_MOST_MS = 10**12  # thirty years. A wait of some three hundred years overflows in ``threading``

_SECRETS = ("access_key_id", "secret_access_key", "session_token")
_NOT_IN_COMMANDS = ("service_credential", "_ms", "attempts", "connections")
_READER = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_REFERENCE = re.compile(r"\{\{\s*secrets/")


# The second form is a password with slashes, as AWS secret keys have them. It also hides the path
# of a URL with a port and an @ in its path, which is the lesser harm.
# A container before the host of an abfss:// URL is a name and no secret.
_USER = re.compile(
    r"(?<=://)(?!(?<=abfss://)[^/\s:@]+@[^/\s:@'\"]+(?![^/\s'\"]))"
    r"(?:[^/\s:@]+:\S*@|[^/\s]*@)",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"]*")


# Credentials that this process has met, to be hidden in texts of others. Only the newest are kept.
_met: dict[str, None] = {}
_MOST_MET = 500
_SHORTEST_MET = 8
"""Characters of the shortest value that is hidden: a shorter one may be part of a common word."""

_NOT_SENDABLE = re.compile(r"[^\x21-\x7e]+")


def remember_secret(value: str) -> None:
    """Hide a credential in all texts that :func:`redacted` returns from now on.

    Each part between characters that are not visible ASCII is hidden, because a message may have
    the value without its newline, or with an escape for it.
    """
    parts = [value, *_NOT_SENDABLE.split(value), *(quote(value, safe=safe) for safe in ("", "/"))]
    for part in parts:
        if len(part) >= _SHORTEST_MET and part not in _met:
            while len(_met) >= _MOST_MET:
                _met.pop(next(iter(_met)), None)
            _met[part] = None


def redacted(text: str) -> str:
    """The text with ``***`` for user information and query string of every URL in it, and for every
    credential that this process has met."""
    return hide_secrets(_QUERY.sub(r"\1?***", _USER.sub("***@", text)))


def hide_secrets(text: str) -> str:
    """The text with ``***`` for every credential that this process has met."""
    for secret in sorted((*_met,), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def flaw_of(secret: str) -> str:
    """What a credential has that no header of HTTP carries, and the fix; empty if it has nothing
    of the kind. The value is not shown.

    Keys and tokens of every cloud are visible ASCII. Most often a value was read from a file, with
    the newline at its end.
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


def check_credential(name: str, value: object) -> None:
    """Refuse a credential that no request can carry (failure F49), without showing it; and hide it
    from now on.

    Raises:
        InvalidInput: The value of the setting ``name`` is not a string, or has a character other
            than visible ASCII.
    """
    if not isinstance(value, str):
        raise InvalidInput(f"{name} is of type {type(value).__name__}: use a string")
    remember_secret(value)
    if flaw := flaw_of(value):
        raise InvalidInput(f"{name} {flaw}")


def check_no_secrets(name: str, url: str) -> None:
    """Refuse a URL with user information or a query string, without showing them.

    Raises:
        InvalidInput: The URL of the setting ``name`` has some; a path never has.
    """
    if _USER.search(url):
        raise InvalidInput(
            f"{name} {redacted(url)!r} carries credentials: they would end up in logs and "
            "checkpoints. Remove them; credentials come from the cloud's standard chain "
            "(environment, profile, the identity of this machine)."
        )
    if _QUERY.search(url):
        raise InvalidInput(
            f"{name} {redacted(url)!r} has a query string, which could hold a secret and has no "
            "meaning here: remove it. In a file:// URL, write '?' as %3F or use a plain path."
        )


def _check_numbers(config: Any) -> None:
    """All numbers are counts, sizes and times: at least 1, or what the field's metadata says."""
    for each in fields(config):
        name, value, least = each.name, getattr(config, each.name), each.metadata.get("least", 1)
        if each.type != "int" and (each.type != "int | None" or value is None):
            continue
        use = f"a whole number of at least {least}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(name, value, use)
        if value < least:
            raise InvalidInput(f"{name} is {value!r}: use {use}")
        if name.endswith("_ms") and value > _MOST_MS:
            raise InvalidInput(f"{name} is {value!r}: use at most {_MOST_MS} milliseconds")


def check_reader_name(name: str) -> None:
    """Refuse a name that cannot be part of a key."""
    if not isinstance(name, str):
        raise wrong_type("reader", name, "text, the name of a reader")
    if _READER.fullmatch(name) is None:
        raise InvalidInput(
            f"reader is {name!r}: use 1 to 100 letters, digits, '.', '_' and '-', beginning with a "
            "letter or a digit"
        )


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How to reach a cloud. Credentials come from its standard chain unless some are named here.

    Keys that are given here go with the options into every process that opens the store, also by
    pickling; they are not printed. Of a name (``service_credential``, ``role_arn``, ``profile``)
    only the name goes there, and each process renews the credentials of it in time.

    Attributes:
        endpoint_url: Another endpoint than the cloud's own. Default: ``AWS_ENDPOINT_URL``,
            ``STORAGE_EMULATOR_HOST``, or what ``AZURE_STORAGE_CONNECTION_STRING`` names.
        region: S3 only. Default: the chain's.
        profile: S3 only: a profile of the shared configuration files. Default: the chain's.
        role_arn: S3 only: a role that the credentials assume; its credentials are renewed before
            they end. The endpoint is that of AWS STS, or ``AWS_ENDPOINT_URL_STS``.
        external_id: The role's external id, if its owner requires one.
        session_name: The session of the role in AWS's logs. Default ``opendata-buffer``.
        service_credential: The name of a Databricks service credential, for any cloud.
        access_key_id: S3 only, with ``secret_access_key``.
        secret_access_key: S3 only.
        session_token: S3 only: the token of temporary keys.
        anonymous: Send no credentials: a public bucket can be read so. Default false.
        connect_timeout_ms: Default 5,000.
        read_timeout_ms: How long one answer may take. Default 30,000.
        max_attempts: Attempts of reads and unconditional writes. Default 5. Conditional
            writes always make one: a repeated one would lose against itself (failure F1).
        max_connections: Connections a client keeps. Default 128.
        timeout_ms: How long one operation of a queue may take, with connects and retries: a change
            or a read of the manifest, and opening a queue for use. A change may take 5 s more, to
            find out what its last attempt did. Default 60,000.

    Raises:
        InvalidInput: A value that cannot be used, or credentials of two kinds.
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
    # Not compared: it is no property of a client, and those of equal options are shared.
    timeout_ms: int = field(default=60_000, compare=False)

    def __post_init__(self) -> None:
        _check_numbers(self)
        check_fields(self)
        if self.endpoint_url is not None:
            check_no_secrets("endpoint_url", self.endpoint_url)
        self._check_credentials()

    def _check_credentials(self) -> None:
        for name in _SECRETS:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, str) and _REFERENCE.search(value):
                raise InvalidInput(
                    f"{name} is a reference such as {{{{secrets/scope/key}}}}, which Databricks "
                    "replaces in the settings of a cluster only: use dbutils.secrets.get(scope, "
                    "key), or name a service_credential"
                )
            check_credential(name, value)
        given = [name for name in _SECRETS if getattr(self, name) is not None]
        if given and not set(_SECRETS[:2]) <= set(given):
            raise InvalidInput(
                f"{' and '.join(given)} without the other keys: give access_key_id and "
                "secret_access_key, for temporary keys with their session_token, or none of them"
            )
        sources = ("anonymous", "service_credential", "access_key_id", "profile")
        kinds = [name for name in sources if getattr(self, name) not in (None, False)]
        if len(kinds) > 1:
            raise InvalidInput(
                f"{' and '.join(kinds)} are given, and each is a source of credentials: leave one"
            )
        if self.role_arn is None:
            for name in ("external_id", "session_name"):
                if (value := getattr(self, name)) is not None:
                    raise InvalidInput(
                        f"{name} is {value!r} and there is no role_arn: name the role that it is "
                        f"for, or leave {name} out"
                    )
        elif self.anonymous:
            raise InvalidInput(
                f"role_arn is {self.role_arn!r} and anonymous is true: a role is assumed with "
                "credentials. Leave one out"
            )
        elif not self.role_arn.startswith("arn:"):
            raise InvalidInput(
                f"role_arn is {self.role_arn!r}: use a role's full name such as "
                "arn:aws:iam::123456789012:role/buffer"
            )

    def command_words(self) -> list[str]:
        """The options that a command needs to reach the same store. No command takes a secret."""
        words: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.repr and value != each.default and not each.name.endswith(_NOT_IN_COMMANDS):
                words += ["--" + each.name.replace("_", "-"), *([] if value is True else [value])]
        return words

    @checked
    def check_s3_only(self, scheme: str) -> None:
        """Refuse what only S3 has, for a store of another cloud.

        Raises:
            InvalidInput: Some of it is set.
        """
        for name in ("region", "profile", "role_arn", *_SECRETS):
            value = getattr(self, name)
            if value is not None:
                shown = "given" if name in _SECRETS else repr(value)
                raise InvalidInput(
                    f"{name} is {shown}, and a store of {scheme}:// has none: "
                    "remove it; it is for s3:// only"
                )


_INSTEAD = {
    "cas_deadline_ms": "use store_options=StoreOptions(timeout_ms=...)",
    "gc_grace_period_ms": "use gc=GarbageCollectorConfig(grace_period_ms=...) of a consumer that "
    "creates the queue; for a queue that is there, use the command gc with --grace-period-ms",
    "recreate": "to start a queue over, use the command produce with --recreate",
    "max_buffered_inputs": "use max_buffered_bytes",
    "allow_foreign_locations": "no batch outside of the data prefix is read, leave it out",
}
"""Former settings, and what takes their place."""


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """Where a queue lives and how its manifest is written.

    Attributes:
        store: A URL: a path or ``file:///dir``, ``s3://bucket[/root]``,
            ``gs://bucket[/root]``, ``abfss://container@account.dfs.core.windows.net[/root]``,
            ``az://container[/root]``, ``memory://name``.
        data_path_prefix: Prefix of batch objects. Default ``ingest`` (OpenData RFC 0001, Producer).
        manifest_path: Key of the manifest. Default ``<data_path_prefix>/manifest``.
        store_options: How to reach a cloud, and how long one operation may take.
    """

    backoff_base_ms: ClassVar[int] = 10
    """First step of the full-jitter backoff between attempts."""
    backoff_max_ms: ClassVar[int] = 2_000
    """Largest step."""
    max_manifest_bytes: ClassVar[int] = 64 * MIB
    """Appends that would grow the manifest past this raise ``QueueFull``. Every append rewrites the
    manifest, so its size is the cost of an append."""
    max_batch_bytes: ClassVar[int] = 256 * MIB
    """Largest record block: one ``produce()`` call must fit, and a larger one is refused before it
    is expanded (failure F21)."""
    _other_checks: ClassVar[tuple[str, ...]] = ("store", "data_path_prefix", "compression")
    """Fields whose own checks say more."""

    store: str
    data_path_prefix: str = DEFAULT_DATA_PATH_PREFIX
    manifest_path: str = ""
    store_options: StoreOptions = field(default_factory=StoreOptions)

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse a name that is no setting, before ``__init__`` does without saying what to use."""
        names = [each.name for each in fields(cls)]
        for name in settings:
            if name in names:
                continue
            if name in _INSTEAD:
                raise InvalidInput(f"{name} is no setting any more: {_INSTEAD[name]}")
            if isinstance(fixed := getattr(cls, name, None), int):
                raise InvalidInput(f"{name} is no setting any more, it is {fixed}: leave it out")
            raise InvalidInput(f"{name} is no setting: use {', '.join(names)}")
        return object.__new__(cls)

    @classmethod
    @checked
    def of(cls, given: Self | str | PathLike[str], settings: dict[str, Any]) -> Self:
        """The configuration that a constructor was given: one, or a URL; and single settings.

        Raises:
            InvalidInput: It is neither, or a setting cannot be used.
        """
        if isinstance(given, cls):
            return replace(given, **settings) if settings else given
        if isinstance(given, str | PathLike):
            return cls(**{"store": fspath(given), **settings})
        use = f"a URL such as 's3://bucket/orders', or a {cls.__name__}"
        raise wrong_type("config", given, use)

    def __post_init__(self) -> None:
        if not isinstance(self.store, str):
            raise wrong_type("store", self.store, "text, for example str(path)")
        _check_numbers(self)
        check_fields(self, but=self._other_checks)
        check_no_secrets("store", self.store)
        check_key("data_path_prefix", self.data_path_prefix, MAX_PREFIX_BYTES)
        if not self.manifest_path:
            object.__setattr__(self, "manifest_path", f"{self.data_path_prefix}/manifest")
        check_key("manifest_path", self.manifest_path)

    @property
    def timeout_ms(self) -> int:
        """How long one operation may take, retries included (:class:`StoreOptions`)."""
        return self.store_options.timeout_ms

    @checked
    def retries(self, runtime: Runtime, **changes: Any) -> Retries:
        """The policy of the queue's calls: transient errors are repeated until the timeout.
        ``changes`` are other fields of it."""
        fields: dict[str, Any] = {
            "base_ms": self.backoff_base_ms,
            "max_ms": self.backoff_max_ms,
            "deadline_ms": self.timeout_ms,
            "retry_on": (TransientStorageError,),
        }
        return Retries(runtime, **fields | changes)

    def with_timeout(self, timeout_ms: int) -> Self:
        """The same settings, but so long for one operation."""
        return replace(self, store_options=replace(self.store_options, timeout_ms=timeout_ms))


BROKER_CHOICES = ("auto", "host", "off")


def _check_broker(value: str) -> None:
    if not isinstance(value, str):
        raise wrong_type("broker", value, f"one of {', '.join(BROKER_CHOICES)}")
    if value not in BROKER_CHOICES:
        raise InvalidInput(f"broker is {value!r}: use one of {', '.join(BROKER_CHOICES)}")


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(QueueConfig):
    """Settings of a producer (OpenData RFC 0001, Producer).

    Attributes:
        flush_interval_ms: Age at which a batch is flushed at the latest. Default 100.
        flush_size_bytes: Size beyond which a batch is flushed; a loose limit. Default 64 MiB.
        max_buffered_bytes: Bytes that may wait for durability before ``produce()`` blocks,
            metadata and uploads in flight included, 256 bytes for each call with metadata or an
            Arrow array, and 64 for each record of the others. Default 256 MiB.
        compression: ``Compression.NONE`` (default) or ``Compression.ZSTD``, or their names.
        delivery_timeout_ms: How long a batch is retried before its handles fail, as Kafka's
            ``delivery.timeout.ms``, at a full manifest with ``QueueFull``; an append too, if
            ``store_options.timeout_ms`` is shorter. Default 120,000.
        broker: Many processes that append to one manifest lose races to each other; a broker
            appends for all. ``auto`` (default): use the one that is announced, append alone
            where there is none; ``host``: this process serves as the broker while there is no
            other; ``off``: append alone.
    """

    zstd_level: ClassVar[int] = 1
    """It compresses JSON as well as level 3, in 60 % of the time."""
    upload_concurrency: ClassVar[int] = 8
    """Uploads at once."""

    flush_interval_ms: int = 100
    flush_size_bytes: int = 64 * MIB
    max_buffered_bytes: int = 256 * MIB
    compression: Compression = Compression.NONE
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


@dataclass(frozen=True, kw_only=True)
class GarbageCollectorConfig:
    """Settings of the collector (OpenData RFC 0001, Garbage Collection).

    Attributes:
        enabled: Whether a consumer runs the collector. Default true.
        interval_ms: Time between cycles. Default: half of the queue's grace period.
        grace_period_ms: The grace period of a queue that this consumer creates, or that has none
            on record. All programs use the one on record, in the queue's owner marker;
            ``opendata-buffer gc --grace-period-ms`` changes it. Default: 600,000 for a new queue.
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

    Attributes:
        gc: The garbage collector that runs next to the consumer. False turns it off, and true
            means the default settings.
        ack_interval: Serial acks per manifest write. Default 100.
        create_if_missing: Create the queue where there is none, for a consumer that starts before
            the first producer. Default false: a mistyped path is an error.
        reader: The name to read by, of a log (``opendata-buffer readers enable``): each name has
            a position of its own and reads everything. Default none: the one consumer of a queue.
    """

    gc: GarbageCollectorConfig = field(default_factory=GarbageCollectorConfig)
    ack_interval: int = 100
    create_if_missing: bool = False
    reader: str = ""

    def __post_init__(self) -> None:
        gc: object = self.gc
        if isinstance(gc, bool):
            object.__setattr__(self, "gc", GarbageCollectorConfig(enabled=gc))
        super().__post_init__()
        if self.reader:
            check_reader_name(self.reader)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ConsumerConfig):
    """Settings of a worker, one of several that share a queue.

    Attributes:
        broker: ``host`` (default): this process serves as the broker while no other one does;
            ``auto``: it does not, and waits for one.
        claim_timeout_ms: A batch whose worker sends no heartbeat for this time is handed to another
            worker. A worker sends four heartbeats in this time by itself. Default 60,000.
        max_deliveries: A batch that was handed out this often and is not finished goes to the
            quarantine. 0 means without limit. Default 5.
        name: Shown by ``status``, and logged. Default host, process and some random characters.
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
