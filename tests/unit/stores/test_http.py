"""What the stores of the three clouds share."""

from __future__ import annotations

import io
import threading
import time
from http.client import BadStatusLine
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    OpenDataBufferError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.runtime import SystemRuntime, deadline, remaining
from opendata_buffer.stores.base import (
    Absent,
    Blob,
    DeleteFailure,
    IfVersion,
    NotModified,
    ObjectInfo,
    PutOutcome,
)
from opendata_buffer.stores.http import (
    CloudStore,
    DeadlinePassed,
    Page,
    as_base64,
    check_md5,
    md5,
    not_modified,
    read_part,
    repeat_transient,
    strong_etag,
    verify_write,
    with_retry_after,
    within_deadline,
)
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

SYSTEM = SystemRuntime()


def test_without_a_deadline_a_call_runs_in_the_callers_thread() -> None:
    assert within_deadline(SYSTEM, threading.get_ident) == threading.get_ident()


def test_what_a_call_returns_or_raises_reaches_its_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    with deadline(SYSTEM, 30):
        assert within_deadline(SYSTEM, lambda: [1, 2]) == [1, 2]
        assert within_deadline(SYSTEM, lambda: None) is None
        with pytest.raises(KeyError):
            within_deadline(SYSTEM, fail)


def test_a_call_that_never_ends_is_left_behind_at_the_deadline() -> None:
    never = threading.Event()
    seen: list[float | None] = []

    def hang() -> None:
        never.wait(300)
        seen.append(remaining())

    started = time.monotonic()
    with deadline(SYSTEM, 0.2), pytest.raises(DeadlinePassed):
        within_deadline(SYSTEM, hang)
    assert time.monotonic() - started >= 0.2
    assert seen == [], "it goes on"
    never.set()
    while not seen:
        time.sleep(0.01)
    (left,) = seen
    assert left is not None
    assert left <= 0, "the call that was left behind sees that it was"


def test_a_call_is_not_begun_when_no_time_is_left(runtime: ManualRuntime) -> None:
    called: list[int] = []
    with deadline(runtime, 1):
        runtime.advance(1)
        with pytest.raises(DeadlinePassed):
            within_deadline(runtime, lambda: called.append(1))
    assert called == []


def test_what_succeeds_is_done_once(runtime: ManualRuntime) -> None:
    calls: list[int] = []
    assert repeat_transient(runtime, StoreOptions(), lambda: calls.append(1) or 5) == 5
    assert calls == [1]
    assert runtime.monotonic() == 0


def test_the_last_attempts_error_is_raised(runtime: ManualRuntime) -> None:
    errors = [TransientStorageError(str(number)) for number in range(9)]

    def fail() -> None:
        raise errors.pop(0)

    with pytest.raises(TransientStorageError, match=r"^3$"):
        repeat_transient(runtime, StoreOptions(max_attempts=4), fail)
    assert len(errors) == 5
    assert runtime.monotonic() > 0, "it backs off"


def test_what_is_not_transient_is_raised_at_once(runtime: ManualRuntime) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise PermanentStorageError("no")

    with pytest.raises(PermanentStorageError):
        repeat_transient(runtime, StoreOptions(), fail)
    assert calls == [1]


def test_no_attempt_begins_after_the_callers_deadline(runtime: ManualRuntime) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        runtime.advance(1)
        raise TransientStorageError("slow")

    with deadline(runtime, 0.5), pytest.raises(TransientStorageError, match="slow"):
        repeat_transient(runtime, StoreOptions(), fail)
    assert calls == [1]


def told(seconds: str) -> TransientStorageError:
    error = with_retry_after(TransientStorageError("503"), {"retry-after": seconds})
    assert isinstance(error, TransientStorageError)
    return error


def test_an_answer_may_ask_for_a_pause_in_seconds() -> None:
    assert told("17").retry_after_s == 17
    for other in ("", "-1", "1e9", "soon", "9" * 5_000, "Thu, 01 Jan 2026 00:00:10 GMT"):
        assert told(other).retry_after_s is None
    assert not hasattr(
        with_retry_after(PermanentStorageError("403"), {"retry-after": "1"}), "retry_after_s"
    )


@pytest.mark.parametrize(("asked", "waits"), [("7", 7), ("999999999", 30)])
def test_it_waits_as_long_as_it_is_asked_to_but_no_longer_than_an_attempt_may_take(
    runtime: ManualRuntime, asked: str, waits: int
) -> None:
    failures = [told(asked)] * 3

    def busy() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert repeat_transient(runtime, StoreOptions(), busy) == "done"
    assert [waits <= each <= waits + 1 for each in runtime.slept] == [True] * 3


def test_no_pause_outlives_the_callers_deadline(runtime: ManualRuntime) -> None:
    def busy() -> None:
        raise told("5")

    with deadline(runtime, 3), pytest.raises(TransientStorageError, match="503"):
        repeat_transient(runtime, StoreOptions(), busy)
    assert runtime.monotonic() < 3


def test_checksums_are_those_that_services_count() -> None:
    assert as_base64(md5(b"--bytes\r\n")) == "kbOD4tDT/fY7NayaDqnr8g=="
    assert md5(memoryview(b"abc")) == md5(b"abc")


def test_bytes_that_are_not_those_that_were_sent_are_read_again() -> None:
    check_md5(b"abc", md5(b"abc"), "'m'")
    check_md5(b"abc", None, "'m'")
    for told in (md5(b"abd"), b""):
        with pytest.raises(TransientStorageError, match=r"cannot read 'm' in bucket 'b': .*Try ag"):
            check_md5(b"abc", told, "'m' in bucket 'b'")


def test_what_holds_the_written_bytes_has_their_version() -> None:
    store = MemoryStore()
    store.put("k", b"bytes")
    found = store.get("k")
    assert isinstance(found, Blob)
    assert verify_write(store, "k", b"bytes") == outcomes.Applied(found.version)


@pytest.mark.parametrize("others", [b"other", b"longer than it", None])
def test_other_bytes_or_none_tell_nothing(others: bytes | None) -> None:
    store = MemoryStore()
    if others is not None:
        store.put("k", others)
    outcome = verify_write(store, "k", b"bytes")
    assert isinstance(outcome, outcomes.Unknown)
    assert "'k'" in outcome.reason
    assert "has changed since" in outcome.reason


@pytest.mark.parametrize("kind", [PermanentStorageError, TransientStorageError, UnsafeStore])
def test_a_look_that_fails_tells_nothing_and_says_why(kind: type[OpenDataBufferError]) -> None:
    class Failing(MemoryStore):
        def get(self, *_: Any, **__: Any) -> Blob:
            raise kind("403 denied")

    outcome = verify_write(Failing(), "k", b"bytes")
    assert isinstance(outcome, outcomes.Unknown)
    assert "403 denied" in outcome.reason


@pytest.mark.parametrize("etag", [None, "", 'W/"abc"'])
def test_a_missing_or_weak_etag_is_none(etag: str | None) -> None:
    assert strong_etag(etag) is None


def test_a_strong_etag_is_kept_with_its_quotes() -> None:
    assert strong_etag('"abc"') == '"abc"'


def test_not_modified_answers_only_a_question_about_a_version() -> None:
    assert not_modified("k", "s3://b", '"7"') == NotModified()
    with pytest.raises(TransientStorageError, match="'k' in s3://b: it was answered as not modif"):
        not_modified("k", "s3://b", None)


def test_a_range_has_no_more_bytes_than_it_has() -> None:
    body = io.BytesIO(b"123456")
    with pytest.raises(TransientStorageError, match="5 bytes of 'k': the answer has 6"):
        read_part("k", body.read, 6, (10, 15), None, whole=False)
    assert read_part("k", body.read, 6, (10, 16), None, whole=False) == b"123456"


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    ("whole", "byte_range", "max_bytes", "most"),
    [(True, (1, 3), None, 1_000), (False, (0, 3), None, 4), (False, None, 4, 5)],
)
def test_no_more_is_read_than_tells_that_it_is_too_much(
    told: bool,
    whole: bool,
    byte_range: tuple[int, int] | None,
    max_bytes: int | None,
    most: int,
) -> None:
    body = io.BytesIO(b"x" * 1_000)
    size = 1_000 if told else None
    try:
        found = read_part("k", body.read, size, byte_range, max_bytes, whole=whole)
        assert found == b"xx", "of the whole object"
    except (CorruptData, TransientStorageError):
        assert not whole
    assert body.tell() == (0 if told and not whole else most)


class Service(CloudStore):
    """A store whose pages and deletions are scripted."""

    _KEYS = "scripted keys"
    _BULK = 2

    def __init__(self, *pages: Page, root: str = "", error: Exception | None = None) -> None:
        super().__init__("bucket", root, StoreOptions(max_attempts=3), ManualRuntime())
        self.pages = list(pages)
        self.asked: list[tuple[str, str, str | None, int | None]] = []
        self.deleted: list[list[str]] = []
        self.error = error

    @property
    def url(self) -> str:
        return "x://bucket"

    def get(self, key: str, **_: object) -> Blob | NotModified:
        def once() -> Blob:
            if self.error is not None:
                raise self.error
            return Blob(b"", self._full(key), 0)

        return self._repeated(once, "read", key)

    def _endpoint(self) -> str:
        return "https://h"

    def _client_errors(self) -> tuple[type[BaseException], ...]:
        return (OSError,)

    def _error(self, error: BaseException, verb: str, key: str) -> StorageError:
        return PermanentStorageError(f"{verb} {key}: {error}")

    def _put_if(
        self, key: str, full: str, data: bytes, condition: Absent | IfVersion
    ) -> PutOutcome:
        raise NotImplementedError

    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        self.asked.append((prefix, start_after, token, wanted))
        return self.pages.pop(0)

    def _delete(self, keys: list[str]) -> list[DeleteFailure]:
        self.deleted.append(keys)
        if "b" in keys:
            raise PermanentStorageError("no")
        return []


def test_the_root_is_before_every_key() -> None:
    found = Service(root="a/b").get("c")
    assert isinstance(found, Blob)
    assert found.version == "a/b/c"
    with pytest.raises(InvalidInput, match="root of the store"):
        Service(root="a\x00b")


def test_a_key_that_is_too_long_with_its_root_is_refused_by_name() -> None:
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


def test_what_does_not_end_in_time_is_an_error_that_says_what_was_asked() -> None:
    store = Service()
    with (
        deadline(store._runtime, 0),
        pytest.raises(TransientStorageError, match=r"cannot read 'k' in bucket 'bucket': no answ"),
    ):
        store.get("k")


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute 'items'"),
        BadStatusLine("garbage"),
        KeyError("Size"),
        TypeError("'int' object is not iterable"),
        ValueError("Invalid timestamp at http://me:hunter2@host"),
    ],
)
def test_a_malformed_response_is_an_error_that_says_what_was_asked(error: Exception) -> None:
    with pytest.raises(TransientStorageError) as caught:
        Service(error=error).get("k")
    text = str(caught.value)
    assert text.startswith("cannot read 'k' in bucket 'bucket': the answer makes no sense")
    assert type(error).__name__ in text
    assert "hunter2" not in text
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidInput("a key"), InvalidInput),
        (OSError("a socket"), PermanentStorageError),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
)
def test_other_errors_are_the_clients_or_passed_on(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        Service(error=error).get("k")
    assert (caught.value is error) is (kind is type(error))


B, A = ObjectInfo("b", 1, 20), ObjectInfo("a", 1, 10)


def test_a_listing_is_in_order_and_cut_at_its_limit() -> None:
    store = Service(Page([B], "t", 30), Page([A], None, 40), Page([B, A], None, 30))
    listing = store.list("in/")
    assert ([each.key for each in listing.objects], listing.now_ms) == (["a", "b"], 30)
    assert not listing.truncated
    assert store.asked == [("in/", "", None, None), ("in/", "", "t", None)]
    cut_short = store.list("", limit=1)
    assert [each.key for each in cut_short.objects] == ["a"]
    assert cut_short.truncated


def test_a_listing_with_a_limit_reads_no_page_that_it_does_not_need() -> None:
    store = Service(Page([A], "t", 30), Page([B], "u", 30))
    listing = store.list("", start_after="_", limit=2)
    assert ([each.key for each in listing.objects], listing.truncated) == (["a", "b"], True)
    assert [each[2:] for each in store.asked] == [(None, 2), ("t", 1)]


def test_what_comes_up_to_start_after_is_left_out() -> None:
    assert Service(Page([A, B], None, 0)).list("", start_after="a").objects == (B,)


def test_f6_without_the_stores_clock_its_newest_object_is_the_bound() -> None:
    assert Service(Page([B, A], None, None)).list("", limit=1).now_ms == 20
    assert Service(Page([], None, None)).list("").now_ms == 0


def test_a_page_that_is_followed_by_itself_ends_the_listing() -> None:
    store = Service(Page([], "here", 0), Page([], "here", 0))
    with pytest.raises(TransientStorageError, match="'p/' in x://bucket: the listing goes on whe"):
        store.list("p/")
