"""Fixtures that the contract of committers shares with the tests of brokers."""

from __future__ import annotations

from tests.unit.broker.conftest import patient

__all__ = ["patient"]
