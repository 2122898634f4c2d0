"""The commands of ``./run``, with the standard library alone: nothing is installed yet.

* ``commands`` reads the command line.
* ``environments`` makes virtual environments, ``java`` finds Java, ``debian`` installs packages.
* ``legs`` says which tests run where. ``lanes`` runs them.
* ``docs`` and ``wheel`` run in ``.venv``: they build the site, and the package that they then test.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout. Every command runs in this directory."""

PACKAGES = ("core/opendata_buffer", "buffer_source", "buffer_sink", "pyspark_opendata_buffer.py")
"""What the wheel contains."""
