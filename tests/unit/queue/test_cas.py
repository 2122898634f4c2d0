"""The compare-and-swap register: every outcome of a change is true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    PermanentStorageError,
    TransientStorageError,
)
from opendata_buffer.queue.cas import CasObject, OutcomeUnknown
from opendata_buffer.stores.base import Blob, PutOutcome
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.scripted import (
    ScriptedStore,
    applied,
    applied_then_412,
    before,
    not_applied_answer_lost,
)

KEY = "numbers"
Numbers = tuple[int, ...]


def decode(data: bytes) -> Numbers:
    try:
        return tuple(int(each) for each in data.split())
    except ValueError as error:
        raise CorruptData(f"not numbers: {error}") from error


def encode(numbers: Numbers) -> bytes:
    return b" ".join(b"%d" % each for each in numbers)


def register(
    store: ScriptedStore, *, check_read: Callable[[Numbers, Numbers], None] | None = None
) -> CasObject[Numbers]:
    return CasObject(
        store,
        KEY,
        decode=decode,
        encode=encode,
        runtime=ManualRuntime(),
        settings=QueueConfig(store="memory://x").with_timeout(1_000),
        max_bytes=100,
        check_read=check_read,
    )


class ShortRead(ScriptedStore):
    """Damages one read without an error; later reads are complete."""

    cut = 0

    def get(self, key: str, **options: Any) -> Any:
        got = super().get(key, **options)
        if not self.cut or not isinstance(got, Blob):
            return got
        self.cut -= 1
        return replace(got, data=got.data[:-1] + b"x")


@pytest.mark.parametrize("cut", [1, 2])
def test_bytes_that_do_not_decode_are_read_again_before_an_error_is_raised(cut: int) -> None:
    store = ShortRead()
    writer, reader = register(store), register(store)
    writer.update(lambda _: (1, 23))
    reader.read()
    writer.update(lambda _: (4, 56))
    store.cut = cut
    if cut == 1:
        assert reader.read() == (4, 56)
        assert reader.update(lambda _: (7,), from_memory=True) == outcomes.Applied((7,))
    else:
        with pytest.raises(CorruptData, match="'numbers' in memory://scripted: not numbers"):
            reader.read()


class Add:
    """Appends a number, and recognizes it in a later value."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._place = -1
        self.asked: list[list[int]] = []

    def decide(self, now: Numbers | None) -> Numbers:
        self._place = len(now or ())
        return (*(now or ()), self.number)

    def mark(self) -> int:
        return self._place

    def find(self, now: Numbers | None, marks: Sequence[int]) -> bool:
        self.asked.append(list(marks))
        if now is not None and 0 in now and any(marks):
            raise OutcomeUnknown("another process wiped it")
        return now is not None and self.number in now


def by_another(*numbers: int) -> Callable[[ScriptedStore], None]:
    def write(store: ScriptedStore) -> None:
        blob = store.get(KEY)
        assert isinstance(blob, Blob)
        outcome = store.really_put_if(KEY, encode(numbers), blob.version)
        assert isinstance(outcome, outcomes.Applied)

    return write


def conflict(*_: object) -> PutOutcome:
    return outcomes.LostRace()


def test_a_remembered_value_saves_a_read_and_is_never_a_reason_to_refuse() -> None:
    store = ScriptedStore()
    numbers = register(store)
    numbers.update(lambda now: (1,))
    gets = store.gets
    numbers.update(lambda now: (*(now or ()), 2), from_memory=True)
    assert store.gets == gets
    by_another(7)(store)

    def refuse_two(now: Numbers | None) -> Numbers:
        if now == (1, 2):
            raise InvalidInput("two")
        return (*(now or ()), 8)

    assert numbers.update(refuse_two, from_memory=True) == outcomes.Applied((7, 8))
    by_another(9)(store)
    assert numbers.update(lambda now: now, from_memory=True) == outcomes.Applied((9,))
    store.delete_many([KEY])
    assert numbers.read() == outcomes.Vanished()
    assert str(numbers.read()) == "it was deleted meanwhile"


def test_the_caller_sets_the_pause_after_a_conflict_but_not_after_a_lost_answer() -> None:
    runtime = ManualRuntime()
    store = ScriptedStore(
        applied, before(applied, by_another(5)), not_applied_answer_lost, applied_then_412
    )
    pauses = iter([0.7, 0.4])
    numbers = CasObject(
        store,
        KEY,
        decode=decode,
        encode=encode,
        runtime=runtime,
        settings=QueueConfig(store="memory://x").with_timeout(5_000),
        max_bytes=100,
        after_conflict=lambda: next(pauses),
    )
    numbers.update(lambda now: (1,))
    add = Add(2)
    # A lost race, a lost answer, and a write that a proxy repeats.
    assert numbers.update(add.decide, proof=add) == outcomes.Applied((5, 2))
    assert numbers.conflicts == 2
    assert [slept for slept in runtime.slept if slept > 0.1] == [0.7, 0.4]
    assert str(outcomes.LostRace(3, 1.1)) == "other writers were faster 3 times in 1 s"
    assert len(runtime.slept) == 3


def test_f1_a_conflict_at_the_deadline_is_followed_by_a_read_that_looks_for_the_own_write() -> None:
    class Slow(ScriptedStore):
        """Each conditional write takes as long as the whole deadline."""

        def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            runtime.advance(2)
            return super().put_if(key, data, condition)

    store = Slow(applied_then_412)
    numbers = register(store)
    runtime = numbers._runtime
    assert isinstance(runtime, ManualRuntime)
    add = Add(1)
    assert numbers.update(add.decide, proof=add) == outcomes.Applied((1,))
    assert store.puts == 1


def test_f2_a_lost_answer_is_in_doubt_while_its_version_is_the_current_one() -> None:
    store = ScriptedStore(
        applied,
        not_applied_answer_lost,
        before(applied, by_another(5, 6)),  # the first attempt can no longer be applied
        not_applied_answer_lost,
        not_applied_answer_lost,
    )
    numbers = register(store)
    numbers.update(lambda now: (1,))
    add = Add(2)
    assert numbers.update(add.decide, proof=add) == outcomes.Applied((5, 6, 2))
    assert add.asked == [[1], [1], [2], [2, 2]]


def test_a_change_without_time_left_is_not_sent_and_reported_as_not_written() -> None:
    class Slow(ScriptedStore):
        def get(self, key: str, **options: object) -> Blob:
            runtime.advance(60)
            blob = super().get(key, **options)
            assert isinstance(blob, Blob)
            return blob

    store = Slow()
    store.put(KEY, b"1")
    numbers = register(store)
    runtime = numbers._runtime
    assert isinstance(runtime, ManualRuntime)
    add = Add(2)
    # A store that is given no time could only answer "unknown".
    with pytest.raises(TransientStorageError, match="no time was left to write 'numbers'"):
        numbers.update(add.decide, proof=add)
    assert store.puts == 0


def test_an_error_while_an_attempt_is_in_doubt_leaves_the_outcome_unknown() -> None:
    store = ScriptedStore(not_applied_answer_lost)
    add = Add(1)

    def once(now: Numbers | None) -> Numbers:
        if store.puts:
            raise PermanentStorageError("access denied")
        return add.decide(now)

    outcome = register(store).update(once, proof=add)
    assert isinstance(outcome, outcomes.Unknown)
    assert isinstance(outcome.cause, PermanentStorageError)


def test_f2_a_change_that_is_withdrawn_while_an_attempt_may_still_land_is_in_doubt() -> None:
    store = ScriptedStore(not_applied_answer_lost)
    add = Add(1)

    def once(now: Numbers | None) -> Numbers | None:
        return now if store.puts else add.decide(now)

    assert isinstance(register(store).update(once, proof=add), outcomes.Unknown)
    # Another write at the same version proves that the attempt was not applied.
    store = ScriptedStore(not_applied_answer_lost)
    add = Add(1)
    assert register(store).update(add.decide, proof=add) == outcomes.Applied((1,))
