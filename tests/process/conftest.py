"""Tidy up after commands that run in this process."""

from __future__ import annotations

from tests.unit.cli.conftest import log_handlers

__all__ = ["log_handlers"]
