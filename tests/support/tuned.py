"""Configurations whose constants differ from the usual ones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from opendata_buffer.config import QueueConfig

Config = TypeVar("Config", bound=QueueConfig)


def tuned(kind: type[Config], /, **settings: Any) -> Config:
    """Create a configuration; settings that are constants of its class may have other values.

    ``timeout_ms`` belongs to its ``store_options``.
    """
    timeout_ms = settings.pop("timeout_ms", None)
    names = {field.name for field in fields(kind)}
    constants = {name: settings.pop(name) for name in settings.keys() - names}
    assert all(hasattr(kind, name) for name in constants), constants
    made: Config = type(kind.__name__, (kind,), constants)(**settings)
    return made if timeout_ms is None else made.with_timeout(timeout_ms)
