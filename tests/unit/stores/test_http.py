"""The code that the stores of the three clouds share."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.runtime import SystemRuntime, deadline, remaining
from opendata_buffer.stores.base import Blob, DeleteFailure, ObjectInfo
from opendata_buffer.stores.http import (
    Answer,
    CloudStore,
    DeadlinePassed,
    Page,
    Read,
    with_retry_after,
    within_deadline,
)
from opendata_buffer.testing.runtime import ManualRuntime

SYSTEM = SystemRuntime()


def test_a_call_that_never_ends_is_abandoned_at_the_deadline() -> None:
    never = threading.Event()
    seen: list[float | None] = []

    def hang() -> None:
        never.wait(300)
        seen.append(remaining())

    started = time.monotonic()
    with deadline(SYSTEM, 0.2), pytest.raises(DeadlinePassed):
        within_deadline(SYSTEM, hang)
    assert time.monotonic() - started >= 0.2
    assert seen == [], "the call still runs"
    never.set()
    while not seen:
        time.sleep(0.01)
    (left,) = seen
    assert left is not None
    assert left <= 0, "the abandoned call sees that it was abandoned"


def test_a_call_is_not_started_when_no_time_is_left(runtime: ManualRuntime) -> None:
    called: list[int] = []
    with deadline(runtime, 1):
        runtime.advance(1)
        with pytest.raises(DeadlinePassed):
            within_deadline(runtime, lambda: called.append(1))
    assert called == []


class Service(CloudStore):
    """A store whose reads, pages, and deletions are scripted."""

    _SCHEME = "x"
    _KEYS = "scripted keys"
    _BULK = 2

    def __init__(
        self, *pages: Page, root: str = "", read: Callable[[], object] | None = None
    ) -> None:
        self.time = ManualRuntime()
        super().__init__("bucket", root, StoreOptions(max_attempts=4), runtime=self.time)
        self.pages = list(pages)
        self.read = read if read is not None else lambda: None
        self.asked: list[tuple[str, str, str | None, int | None]] = []
        self.deleted: list[list[str]] = []

    def _prepare(self) -> None: ...

    def _get(self, read: Read) -> Blob | None:
        self.read()
        return Blob(b"", read.name, 0)

    def _endpoint(self) -> str:
        return "https://h"

    def _client_errors(self) -> tuple[type[BaseException], ...]:
        return (OSError,)

    def _error(self, error: BaseException, verb: str, name: str) -> StorageError:
        return PermanentStorageError(f"{verb} {name}: {error}")

    def _put(self, name: str, data: bytes) -> str | None:
        raise NotImplementedError

    def _put_if(self, name: str, data: bytes, version: str | None) -> Answer:
        raise NotImplementedError

    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        self.asked.append((prefix, start_after, token, wanted))
        return self.pages.pop(0)

    def _delete(self, keys: list[str]) -> list[DeleteFailure]:
        self.deleted.append(keys)
        if "b" in keys:
            raise PermanentStorageError("no")
        return []


def failing(*errors: Exception) -> tuple[Service, list[Exception]]:
    """Return a store whose reads fail with these errors in order, and the remaining errors."""
    left = list(errors)

    def read() -> None:
        if left:
            raise left.pop(0)

    return Service(read=read), left


def refused(seconds: str) -> TransientStorageError:
    error = with_retry_after(TransientStorageError("503"), {"retry-after": seconds})
    assert isinstance(error, TransientStorageError)
    return error


def test_a_response_may_ask_for_a_pause_in_seconds() -> None:
    assert refused("17").retry_after_s == 17
    for other in ("", "-1", "1e9", "soon", "9" * 5_000, "Thu, 01 Jan 2026 00:00:10 GMT"):
        assert refused(other).retry_after_s is None
    assert not hasattr(
        with_retry_after(PermanentStorageError("403"), {"retry-after": "1"}), "retry_after_s"
    )


@pytest.mark.parametrize(("asked", "waits"), [("7", 7), ("999999999", 30)])
def test_a_requested_pause_is_kept_up_to_the_time_of_an_attempt(asked: str, waits: int) -> None:
    store, _ = failing(*[refused(asked)] * 3)
    store.get("k")
    assert [waits <= each <= waits + 1 for each in store.time.slept] == [True] * 3


def test_no_pause_lasts_past_the_callers_deadline() -> None:
    store, left = failing(*[refused("5")] * 3)
    with deadline(store.time, 3), pytest.raises(TransientStorageError, match="503"):
        store.get("k")
    assert store.time.monotonic() < 3
    assert len(left) == 2


def part_of(
    body: io.BytesIO,
    size: int | None,
    byte_range: tuple[int, int] | None,
    max_bytes: int | None = None,
    whole: bool = False,
) -> bytes:
    return Read("k", "k", None, byte_range, max_bytes).part_of(body.read, size, whole=whole)


def test_a_range_never_has_more_bytes_than_requested() -> None:
    body = io.BytesIO(b"123456")
    with pytest.raises(TransientStorageError, match="5 bytes of 'k': the answer has 6"):
        part_of(body, 6, (10, 15))
    assert part_of(body, 6, (10, 16)) == b"123456"


@pytest.mark.parametrize("has_size", [True, False])
@pytest.mark.parametrize(
    ("whole", "byte_range", "max_bytes", "most"),
    [(True, (1, 3), None, 1_000), (False, (0, 3), None, 4), (False, None, 4, 5)],
)
def test_at_most_one_byte_past_the_limit_is_read(
    has_size: bool,
    whole: bool,
    byte_range: tuple[int, int] | None,
    max_bytes: int | None,
    most: int,
) -> None:
    body = io.BytesIO(b"x" * 1_000)
    try:
        found = part_of(body, 1_000 if has_size else None, byte_range, max_bytes, whole)
        assert found == b"xx", "the size of the whole object"
    except (CorruptData, TransientStorageError):
        assert not whole
    assert body.tell() == (0 if has_size and not whole else most)


def test_the_error_about_a_key_that_is_too_long_with_its_root_names_it() -> None:
    store = Service(root="r" * 24)
    store.get("k" * 999)
    with pytest.raises(InvalidInput, match="has 1025 bytes: scripted keys have at most 1024"):
        store.get("k" * 1_000)


def test_keys_are_deleted_in_groups_and_those_that_failed_are_returned() -> None:
    store = Service()
    failures = store.delete_many(["a", "", "c", "b", "d", "e"])
    assert store.deleted == [["a", "c"], ["b", "d"], ["e"]]
    assert [(each.key, each.reason == "no") for each in failures] == [
        ("", False),
        ("b", True),
        ("d", True),
    ]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidInput("a key"), InvalidInput),
        (OSError("a socket"), PermanentStorageError),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
)
def test_other_errors_are_converted_or_raised_unchanged(
    error: Exception, kind: type[Exception]
) -> None:
    store, _ = failing(error)
    with pytest.raises(kind) as caught:
        store.get("k")
    assert (caught.value is error) is (kind is type(error))


B, A = ObjectInfo("b", 1, 20), ObjectInfo("a", 1, 10)


def test_an_unsorted_listing_is_read_to_its_end() -> None:
    c = ObjectInfo("c", 1, 20)
    whole = Page([A], "t", 30), Page([c], "u", 30), Page([B], None, 30)
    # The second page shows it. From then on each listing reads all pages, regardless of its limit.
    store = Service(Page([c], "t", 30), Page([B], "u", 30), *whole, *whole)
    assert [each.key for each in store.list("", limit=2).objects] == ["a", "b"]
    last = store.list("", start_after="b", limit=2)
    assert ([each.key for each in last.objects], last.truncated) == (["c"], False)
    assert {each[1:] for each in store.asked[2:]} == {("", token, None) for token in (None, *"tu")}


def test_keys_up_to_start_after_are_left_out() -> None:
    assert Service(Page([A, B], None, 0)).list("", start_after="a").objects == (B,)


def test_f6_without_a_clock_of_the_store_its_newest_object_bounds_the_time() -> None:
    assert Service(Page([B, A], None, None)).list("", limit=1).now_ms == 20
    assert Service(Page([], None, None)).list("").now_ms == 0


def test_a_repeated_page_token_ends_the_listing() -> None:
    store = Service(Page([], "here", 0), Page([], "here", 0))
    with pytest.raises(TransientStorageError, match="'p/' in x://bucket: the listing goes on whe"):
        store.list("p/")
