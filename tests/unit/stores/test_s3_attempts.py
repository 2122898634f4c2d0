"""Sending again what boto3 does not."""

from __future__ import annotations

from collections.abc import Callable

import botocore.exceptions as boto
import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.stores.s3 import BodyLost, Busy, until_whole, while_busy
from opendata_buffer.testing.runtime import ManualRuntime

CONFLICT = boto.ClientError({"Error": {"Code": "OperationAborted"}}, "PutObject")
OPTIONS = StoreOptions(read_timeout_ms=1_000, max_attempts=3)


def fails(times: int, error: Exception) -> Callable[[], str]:
    left = [error] * times

    def once() -> str:
        if left:
            raise left.pop()
        return "done"

    return once


def test_f3_a_write_that_met_another_one_is_sent_again(runtime: ManualRuntime) -> None:
    assert while_busy(runtime, fails(3, Busy(CONFLICT))) == "done"


def test_f3_after_two_seconds_it_is_given_up(runtime: ManualRuntime) -> None:
    began = runtime.monotonic()
    with pytest.raises(Busy) as caught:
        while_busy(runtime, fails(10_000, Busy(CONFLICT)))
    assert caught.value.error is CONFLICT
    assert runtime.monotonic() - began == pytest.approx(2, abs=0.5)


def test_a_read_whose_body_broke_off_is_repeated(runtime: ManualRuntime) -> None:
    assert until_whole(runtime, OPTIONS, fails(3, BodyLost(OSError("cut")))) == "done"


def test_it_is_repeated_for_as_long_as_all_attempts_may_take(runtime: ManualRuntime) -> None:
    began = runtime.monotonic()
    with pytest.raises(BodyLost) as caught:
        until_whole(runtime, OPTIONS, fails(10_000, BodyLost(OSError("cut"))))
    assert str(caught.value.error) == "cut"
    assert runtime.monotonic() - began == pytest.approx(3, abs=1.5)


@pytest.mark.parametrize("error", [CONFLICT, OSError("no route"), ValueError()])
def test_other_errors_are_raised_at_once(runtime: ManualRuntime, error: Exception) -> None:
    for call in (
        lambda: while_busy(runtime, fails(1, error)),
        lambda: until_whole(runtime, OPTIONS, fails(1, error)),
    ):
        with pytest.raises(type(error)):
            call()
    assert runtime.monotonic() == 0
