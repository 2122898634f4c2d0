"""Fixtures that the tests of operators' tools share with those of brokers."""

from __future__ import annotations

from tests.unit.broker.conftest import patient

__all__ = ["patient"]
