"""What commands that run in this process leave behind is tidied up."""

from __future__ import annotations

from tests.unit.cli.conftest import log_handlers

__all__ = ["log_handlers"]
