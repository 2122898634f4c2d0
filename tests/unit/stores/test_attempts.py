"""How often something is tried."""

from __future__ import annotations

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError, TransientStorageError
from opendata_buffer.runtime import deadline
from opendata_buffer.stores.attempts import repeated
from opendata_buffer.testing.runtime import ManualRuntime


def test_what_succeeds_is_done_once(runtime: ManualRuntime) -> None:
    calls: list[int] = []
    assert repeated(runtime, StoreOptions(), lambda: calls.append(1) or 5) == 5
    assert calls == [1]
    assert runtime.monotonic() == 0


def test_the_last_attempts_error_is_raised(runtime: ManualRuntime) -> None:
    errors = [TransientStorageError(str(number)) for number in range(9)]

    def fail() -> None:
        raise errors.pop(0)

    with pytest.raises(TransientStorageError, match=r"^3$"):
        repeated(runtime, StoreOptions(max_attempts=4), fail)
    assert len(errors) == 5
    assert runtime.monotonic() > 0, "it backs off"


def test_what_is_not_transient_is_raised_at_once(runtime: ManualRuntime) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise PermanentStorageError("no")

    with pytest.raises(PermanentStorageError):
        repeated(runtime, StoreOptions(), fail)
    assert calls == [1]


def test_no_attempt_begins_after_the_callers_deadline(runtime: ManualRuntime) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        runtime.advance(1)
        raise TransientStorageError("slow")

    with deadline(runtime, 0.5), pytest.raises(TransientStorageError, match="slow"):
        repeated(runtime, StoreOptions(), fail)
    assert calls == [1]
