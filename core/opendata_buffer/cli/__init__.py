"""The command line: ``opendata-buffer``. What knows of flags, terminals and pipes is here."""

from __future__ import annotations

from opendata_buffer.cli.commands import cli, main

__all__ = ["cli", "main"]
