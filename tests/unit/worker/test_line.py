"""A worker's line to the brokers of its queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer.broker.client import Lost, Refused
from opendata_buffer.broker.worker import Claim, DispatcherClient
from opendata_buffer.errors import Closed, Fenced, TransientStorageError
from opendata_buffer.runtime import Moment
from opendata_buffer.testing.runtime import ManualRuntime

ANSWER = {"op": "claimed", "batches": []}
LOST = Lost(since=0, safe_at=0.0)


class Said:
    """A connection whose broker says what a test wants, one thing after the other."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []

    def ask(self, body: dict[str, Any]) -> Any:
        self.asked.append(body)
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply


class Book:
    """Finds the connections of a test in turn; after the last one none."""

    reason = "none is announced"

    def __init__(self, *connections: Said) -> None:
        self.left = list(connections)
        self.forgotten: list[Said] = []
        self.looked = 0
        self.on_look: Callable[[], object] = lambda: None

    @property
    def connection(self) -> Said | None:
        return self.left[0] if self.left else None

    def find(self) -> Said | None:
        self.looked += 1
        self.on_look()
        return self.connection

    def forget(self, connection: Said) -> None:
        self.forgotten.append(connection)
        self.left.pop(0)

    def close(self) -> Said | None:
        return self.connection


def line(*connections: Said) -> tuple[DispatcherClient, Book, ManualRuntime]:
    book, runtime = Book(*connections), ManualRuntime()
    made = DispatcherClient(book, runtime, 10.0, "memory://q")  # type: ignore[arg-type]
    return made, book, runtime


def claim() -> Claim:
    return Claim(7, 3, Moment(0, 0))


def test_the_broker_that_is_there_is_asked() -> None:
    said = Said(ANSWER)
    asking, book, runtime = line(said)
    assert asking.ask({"op": "claim"}) == ANSWER
    assert said.asked == [{"op": "claim"}]
    assert (book.forgotten, runtime.monotonic()) == ([], 0)


def test_when_an_answer_is_lost_the_next_broker_is_asked_the_same() -> None:
    first, second = Said(LOST), Said(ANSWER)
    asking, book, _ = line(first, second)
    mine = claim()
    assert asking.ask({"op": "finish"}, mine) == ANSWER
    assert second.asked == first.asked
    assert book.forgotten == [first]
    assert mine.asked


@pytest.mark.parametrize(
    ("why", "forgets", "waits", "asked"),
    [("unsent", True, False, False), ("moved", True, True, True), ("busy", False, True, True)],
)
def test_a_refusal_says_whether_another_broker_is_meant_and_whether_it_was_heard(
    why: str, forgets: bool, waits: bool, asked: bool
) -> None:
    first = Said(Refused(why), ANSWER)
    asking, book, runtime = line(first, Said(ANSWER))
    mine = claim()
    assert asking.ask({"op": "finish"}, mine) == ANSWER
    assert bool(book.forgotten) is forgets
    assert (runtime.monotonic() > 0) is waits
    assert mine.asked is asked


@pytest.mark.parametrize("error", [TransientStorageError("503"), Fenced("m", 1, 2)])
def test_an_error_of_the_broker_is_the_callers_and_the_end_may_be_stored(
    error: Exception,
) -> None:
    asking, _, _ = line(Said(error))
    mine = claim()
    with pytest.raises(type(error)):
        asking.ask({"op": "finish"}, mine)
    assert mine.asked


def test_without_any_broker_it_gives_up_after_its_patience_and_says_why() -> None:
    asking, _, runtime = line()
    with pytest.raises(TransientStorageError, match=r"memory://q hands out .*: none is announced"):
        asking.ask({"op": "claim", "wait_ms": 20_000})
    assert 10 <= runtime.monotonic() < 11


def test_with_a_broker_it_waits_for_what_the_request_waits_besides() -> None:
    asking, _, runtime = line(Said(*[Refused("busy")] * 1_000))
    with pytest.raises(TransientStorageError, match="no broker of memory://q answered within 30 s"):
        asking.ask({"op": "claim", "wait_ms": 20_000})
    assert 30 <= runtime.monotonic() < 31


def test_once_closed_it_asks_nobody_also_not_who_is_found_just_then() -> None:
    said = Said(ANSWER)
    asking, book, _ = line(said)
    book.on_look = asking.close
    with pytest.raises(Closed):
        asking.ask({"op": "claim"})
    assert said.asked == []


def test_it_is_looked_once_also_when_there_is_no_time() -> None:
    asking, book, _ = line()
    with pytest.raises(TransientStorageError):
        asking.find(0.0)
    assert book.looked == 1
