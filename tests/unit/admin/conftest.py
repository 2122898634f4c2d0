"""What the tests of operators' tools have in common with those of brokers."""

from __future__ import annotations

from tests.unit.broker.conftest import patient

__all__ = ["patient"]
