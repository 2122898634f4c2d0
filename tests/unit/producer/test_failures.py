"""What was given up, and what that keeps out."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import FlushFailed, PermanentStorageError
from opendata_buffer.producer.accumulator import Failures
from opendata_buffer.producer.handle import Completion
from opendata_buffer.producer.ordered_uploads import Upload
from opendata_buffer.testing.runtime import ManualRuntime

DENIED, LATER = PermanentStorageError("denied"), PermanentStorageError("later")


def failed(error: BaseException, calls: int, *, ordered: bool = False) -> Upload:
    made = Upload(
        completion=Completion(ManualRuntime()), calls=calls, ordered=ordered, deadline=1.0
    )
    made.outcome = error
    return made


def test_nothing_is_raised_while_nothing_failed() -> None:
    failures = Failures()
    failures.record([])
    failures.check()
    failures.check_transaction()


def test_all_calls_are_counted_and_the_first_error_is_told_for_ever() -> None:
    failures = Failures()
    failures.record([failed(DENIED, 2), failed(LATER, 3)])
    failures.record([failed(LATER, 1)])
    for _ in range(2):
        with pytest.raises(FlushFailed, match="denied") as caught:
            failures.check()
        assert caught.value.__cause__ is DENIED
        assert "6" in str(caught.value)
    failures.check_transaction()


def test_a_failed_transaction_keeps_later_ones_out() -> None:
    failures = Failures()
    failures.record([failed(DENIED, 1, ordered=True)])
    with pytest.raises(FlushFailed, match="an earlier batch failed: denied"):
        failures.check_transaction()
