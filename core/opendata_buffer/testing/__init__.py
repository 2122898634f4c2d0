"""Fakes for tests of programs that use this library.

:class:`~opendata_buffer.testing.runtime.ManualRuntime` is a clock that a test moves.
:class:`~opendata_buffer.testing.faults.FaultyStore` is a store that fails and is slow.
"""
