"""A store whose conditional puts follow a script with one step per put."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.runtime import remaining
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

Step = Callable[["ScriptedStore", str, bytes, str | None], PutOutcome]


class ScriptedStore(MemoryStore):
    """Takes one step of the script per ``put_if``, and works normally after the script."""

    def __init__(self, *script: Step) -> None:
        super().__init__("scripted")
        self.script = list(script)
        self.puts = 0
        self.gets = 0

    def get(self, key: str, **options: Any) -> Any:
        self.gets += 1
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        self.puts += 1
        if self.script:
            return self.script.pop(0)(self, key, data, condition)
        return super().put_if(key, data, condition)

    def really_put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        return super().put_if(key, data, condition)


class DeafStore(MemoryStore):
    """Never answers a request. Each call lasts until the caller's deadline, or an hour."""

    def __init__(self, runtime: ManualRuntime) -> None:
        super().__init__("deaf")
        self._runtime = runtime
        self.deaf = True

    def _wait(self) -> bool:
        if self.deaf:
            left = remaining()
            self._runtime.advance(3_600.0 if left is None else max(0.0, left))
        return self.deaf

    def get(self, key: str, **options: Any) -> Any:
        if self._wait():
            raise TransientStorageError("no answer in time")
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if self._wait():
            return outcomes.Unknown("no answer in time")
        return super().put_if(key, data, condition)


def _step(outcome: PutOutcome | None, *, is_applied: bool) -> Step:
    def step(store: ScriptedStore, key: str, data: bytes, when: str | None) -> PutOutcome:
        found = store.really_put_if(key, data, when) if is_applied else None
        answer = outcome or found
        assert answer is not None
        return answer

    return step


applied = _step(None, is_applied=True)
applied_answer_lost = _step(outcomes.Unknown("read timed out"), is_applied=True)
not_applied_answer_lost = _step(outcomes.Unknown("connection reset"), is_applied=False)
applied_then_412 = _step(outcomes.LostRace(), is_applied=True)
"""Apply the write and answer 412, like a client or proxy that repeats its own request."""


def then(step: Step, meanwhile: Callable[[ScriptedStore], None]) -> Step:
    """Return a step that calls ``meanwhile`` after ``step``, before the caller can read again."""

    def both(store: ScriptedStore, key: str, data: bytes, when: str | None) -> PutOutcome:
        outcome = step(store, key, data, when)
        meanwhile(store)
        return outcome

    return both


def before(step: Step, meanwhile: Callable[[ScriptedStore], None]) -> Step:
    """Return a step that calls ``meanwhile`` just before ``step``, like another writer."""

    def both(store: ScriptedStore, key: str, data: bytes, when: str | None) -> PutOutcome:
        meanwhile(store)
        return step(store, key, data, when)

    return both
