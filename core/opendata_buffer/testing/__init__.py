"""Fakes for tests of this library and of what is built on it.

:class:`~opendata_buffer.testing.runtime.ManualRuntime` is a clock that a test moves,
:class:`~opendata_buffer.testing.faults.FaultyStore` a store that fails and is slow,
:class:`~opendata_buffer.testing.simulation.Simulation` runs many actors on virtual time from
one seed, :class:`~opendata_buffer.testing.model.DeliveryModel` the rules they are held to,
:class:`~opendata_buffer.testing.s3_server.S3Server` speaks enough S3 over HTTP to lose answers on
purpose, and :class:`~opendata_buffer.testing.moto_server.MotoServer` is moto with conditional
writes that hold under a race.
"""

from __future__ import annotations

__all__: list[str] = []
