"""Typed settings from a mapping of strings, for the Spark source and the Spark sink.

Spark's options arrive lower-cased. A value that cannot be used is an
:class:`~opendata_buffer.errors.InvalidInput` that names the option, its value and what is
accepted; the error about an unknown name suggests the nearest known one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig, StoreOptions
from opendata_buffer.errors import InvalidInput

_ALIAS = "databricks.serviceCredential"
"""The name of ``serviceCredential`` in the Kafka connector on Databricks."""

_STORE_TEXTS = {
    "endpointUrl": "endpoint_url",
    "region": "region",
    "profile": "profile",
    "roleArn": "role_arn",
    "externalId": "external_id",
    "sessionName": "session_name",
    # Spark hides values by their options' names: an option with "access key", "secret" or
    # "token" in its name is shown in no plan and no event log (spark.redaction.regex).
    "accessKeyId": "access_key_id",
    "secretAccessKey": "secret_access_key",
    "sessionToken": "session_token",
}
"""Options with the fields of :class:`StoreOptions` that take their text."""

STORAGE_OPTIONS = (
    "path",
    "dataPathPrefix",
    "manifestPath",
    *_STORE_TEXTS,
    "serviceCredential",
    _ALIAS,
    "anonymous",
)
"""Names :func:`storage_settings` reads."""

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


class OptionReader:
    """Reads options of any case out of a mapping of strings.

    Args:
        options: Names and values. Of names that differ in case only, the last one counts.
        accepted: Every name there is, as documented.
        what: What the options belong to, for messages: ``streaming source``.

    Raises:
        InvalidInput: A name that is not accepted.
    """

    def __init__(self, options: Mapping[str, str], accepted: Iterable[str], what: str) -> None:
        names = tuple(accepted)
        known = {name.lower(): name for name in names}
        for name in options:
            if name.lower() not in known:
                import difflib  # only where a name is wrong

                near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
                hint = f" Did you mean {known[near[0]]!r}?" if near else ""
                raise InvalidInput(
                    f"unknown option {name!r} of the {what}.{hint} Options: {', '.join(names)}"
                )
        self._values = {name.lower(): value for name, value in options.items()}

    def text(self, name: str) -> str | None:
        """The value, or None when it is not given; an empty one is refused."""
        value = self._values.get(name.lower())
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise InvalidInput(f"option {name} is {value!r}: give it a value or leave it out")
        return value

    def given(self, name: str) -> bool:
        """Whether there is a value."""
        return name.lower() in self._values

    def raw(self, name: str, default: str) -> str:
        """The value as it is, also an empty one or a space."""
        value = self._values.get(name.lower())
        return default if value is None else value

    def integer(self, name: str, default: int | None, *, least: int = 0) -> Any:
        """A whole number of at least ``least`` within 64 bits; ``default``, an int or None."""
        value = self.text(name)
        if value is None:
            return default
        digits = value.strip()
        # int() also takes "1_000", " 5 " and non-ASCII digits; an option does not.
        if digits.isascii() and digits.isdigit() and len(digits) <= 19:
            number = int(digits)
            if least <= number < 1 << 63:
                return number
        raise InvalidInput(
            f"option {name} is {value!r}: use a whole number of at least {least}, for example "
            f"{max(least, 1000 if default is None else default)}"
        )

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.text(name)
        if value is None:
            return default
        word = value.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise InvalidInput(f"option {name} is {value!r}: use true or false")

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """One of a few words, in any case; returned as spelled in ``choices``."""
        value = self.text(name)
        if value is None:
            return default
        for choice in choices:
            if value.strip().lower() == choice.lower():
                return choice
        raise InvalidInput(f"option {name} is {value!r}: use {' or '.join(choices)}")


def storage_settings(reader: OptionReader) -> QueueConfig:
    """Where the queue lives, from the options in :data:`STORAGE_OPTIONS`.

    A store given as a path is made absolute here, on the caller's machine: a Spark executor
    has another working directory.

    Raises:
        InvalidInput: No store, one that no other process can reach, or a prefix or key that
            cannot be used.
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
    return QueueConfig(
        store=store,
        data_path_prefix=reader.text("dataPathPrefix") or DEFAULT_DATA_PATH_PREFIX,
        manifest_path=reader.text("manifestPath") or "",
        store_options=StoreOptions(
            **{name: reader.text(option) for option, name in _STORE_TEXTS.items()},  # type: ignore[arg-type]
            service_credential=_service_credential(reader),
            anonymous=reader.boolean("anonymous", False),
        ),
    )


def _service_credential(reader: OptionReader) -> str | None:
    name, alias = reader.text("serviceCredential"), reader.text(_ALIAS)
    if name is not None and alias is not None and name != alias:
        raise InvalidInput(
            f"options serviceCredential ({name!r}) and {_ALIAS} ({alias!r}) mean the same: leave "
            "one out"
        )
    return name if name is not None else alias


def queue_fields(config: QueueConfig) -> dict[str, Any]:
    """The settings of a :class:`QueueConfig` by name, to build one of its subclasses with.

    ``ConsumerConfig(**queue_fields(queue), max_batch_bytes=...)``
    """
    return {each.name: getattr(config, each.name) for each in fields(QueueConfig)}
