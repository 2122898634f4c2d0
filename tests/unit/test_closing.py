"""The end of a ``with`` block."""

from __future__ import annotations

import pytest

from opendata_buffer.concurrency import ClosedAtEnd
from opendata_buffer.errors import FlushFailed


class Failing(ClosedAtEnd):
    closed = 0

    def close(self, timeout: float | None = None) -> None:
        self.closed += 1
        raise FlushFailed(1, "the store is gone")


def test_a_close_that_fails_is_told() -> None:
    with pytest.raises(FlushFailed), Failing() as thing:
        assert thing.closed == 0
    assert thing.closed == 1


def test_a_close_that_fails_does_not_hide_the_error_that_ended_the_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thing = Failing()
    with pytest.raises(ZeroDivisionError), thing:
        raise ZeroDivisionError
    assert thing.closed == 1
    assert "closing the Failing failed" in caplog.text
    assert "the store is gone" in caplog.text


def test_errors_of_others_come_out() -> None:
    class Broken(ClosedAtEnd):
        def close(self, timeout: float | None = None) -> None:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"), Broken():
        pass
