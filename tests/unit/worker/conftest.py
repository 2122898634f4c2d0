"""What the tests of workers have in common with those of brokers."""

from __future__ import annotations

from tests.unit.broker.conftest import patient

__all__ = ["patient"]
