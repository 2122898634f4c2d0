"""What options call the ways to read records into columns."""

from __future__ import annotations

__all__ = [
    "BYTES",
    "CSV",
    "DROPMALFORMED",
    "FAILFAST",
    "FORMATS",
    "JSON",
    "MODES",
    "PERMISSIVE",
]

BYTES, JSON, CSV = "bytes", "json", "csv"
FORMATS = (BYTES, JSON, CSV)
PERMISSIVE, DROPMALFORMED, FAILFAST = "PERMISSIVE", "DROPMALFORMED", "FAILFAST"
MODES = (PERMISSIVE, DROPMALFORMED, FAILFAST)
