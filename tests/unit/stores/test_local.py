"""The store of files in a directory, apart from the contract of all stores."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.runtime import SystemRuntime, deadline
from opendata_buffer.stores import local
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.local import RESERVED, FileLock, LocalStore, LockTimeout
from opendata_buffer.testing.runtime import ManualRuntime


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path, runtime: ManualRuntime) -> LocalStore:
    return LocalStore(root, runtime=runtime)


def fail_with(code: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def create(store: LocalStore, key: str, data: bytes) -> str:
    outcome = store.put_if(key, data, None)
    assert isinstance(outcome, outcomes.Applied)
    return outcome.value


def read(store: LocalStore, key: str) -> Blob:
    found = store.get(key)
    assert isinstance(found, Blob)
    return found


def leftovers(root: Path) -> list[str]:
    return os.listdir(root / RESERVED / "tmp")


@pytest.mark.parametrize(("of_root", "of_record"), [(0o755, 0o600), (0o777, 0o660)])
def test_the_discovery_record_is_readable_only_with_write_access_to_the_directory(
    store: LocalStore, root: Path, of_root: int, of_record: int
) -> None:
    root.mkdir(exist_ok=True)
    root.chmod(of_root)
    before = os.umask(0)
    try:
        create(store, "ingest/_broker.json", b"{}")
        create(store, "ingest/_owner.json", b"{}")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((root / "ingest" / f"_{each}.json").stat().st_mode) for each in NAMES]
    assert modes == [of_record, 0o666]


NAMES = ("broker", "owner")


def test_reading_creates_no_directory(store: LocalStore, root: Path) -> None:
    with pytest.raises(ObjectNotFound):
        store.get("a")
    assert store.list("").objects == ()
    assert store.delete_many(["a"]) == ()
    assert store.put_if("a", b"", "1-2-3") == outcomes.Vanished()
    assert not root.exists()


@pytest.mark.parametrize("key", [RESERVED, f"{RESERVED}/tmp/x", f"in/{RESERVED}/check"])
def test_internal_files_of_the_store_are_not_objects(
    store: LocalStore, root: Path, key: str
) -> None:
    store.put_if("m", b"1", None)
    store.put_if("in/m", b"1", None)
    (root / RESERVED / "tmp" / "x").write_bytes(b"")
    with pytest.raises(InvalidInput, match="the store keeps its own files"):
        store.get(key)
    with pytest.raises(InvalidInput):
        store.put(key, b"")
    (failure,) = store.delete_many([key])
    assert failure.key == key
    assert [info.key for info in store.list("").objects] == ["in/m", "m"]
    assert store.list(f"{RESERVED}/").objects == ()
    assert store.list(f"in/{RESERVED}/").objects == ()


def test_one_name_cannot_be_an_object_and_a_directory(store: LocalStore, root: Path) -> None:
    store.put("a", b"1")
    with pytest.raises(PermanentStorageError, match="directory of another"):
        store.put("a/b", b"2")
    with pytest.raises(PermanentStorageError, match="directory of another"):
        store.put_if("a/b", b"2", None)
    store.put("c/d", b"3")
    with pytest.raises(PermanentStorageError, match="directory of another"):
        store.put("c", b"4")
    assert [info.key for info in store.list("").objects] == ["a", "c/d"]
    assert leftovers(root) == []


@pytest.mark.parametrize("way", ["put", "put_if"])
def test_bytes_are_synced_before_the_rename_and_the_lock_is_held_only_for_the_rename(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A process that is suspended with the lock stops all others. No disk may delay it."""
    first = create(store, "in/m", b"1")
    steps: list[str] = []

    def step(name: str, act: Any) -> Any:
        def run(*args: Any) -> Any:
            is_directory = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            steps.append("fsync directory" if is_directory else name)
            return act(*args)

        return run

    monkeypatch.setattr(os, "writev", step("write", os.writev))
    monkeypatch.setattr(os, "fsync", step("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", step("rename", os.replace))
    monkeypatch.setattr(FileLock, "__enter__", step("lock", FileLock.__enter__))
    monkeypatch.setattr(FileLock, "__exit__", step("unlock", FileLock.__exit__))
    if way == "put":
        store.put("in/m", b"2")
    else:
        assert isinstance(store.put_if("in/m", b"2", first), outcomes.Applied)
    assert steps == ["write", "fsync", "lock", "rename", "unlock", "fsync directory"]
    # A writer that has already lost its race uses neither the lock nor the disk.
    assert isinstance(store.put_if("in/m", b"3", first), outcomes.LostRace)
    assert len(steps) == 6


def test_a_writer_that_loses_its_race_during_the_write_leaves_no_file(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = create(store, "m", b"1")
    faster = LocalStore(root)
    fsync = os.fsync

    def synced(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        assert isinstance(faster.put_if("m", b"2", first), outcomes.Applied)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    assert isinstance(store.put_if("m", b"3", first), outcomes.LostRace)
    assert read(store, "m").data == b"2"
    assert leftovers(root) == []


def test_f13_conditional_puts_work_more_than_once(store: LocalStore) -> None:
    outcome = store.put_if("m", b"0", None)
    for number in range(1, 50):
        assert isinstance(outcome, outcomes.Applied)
        outcome = store.put_if("m", str(number).encode(), outcome.value)
    assert isinstance(outcome, outcomes.Applied)


def test_a_recreated_object_has_a_new_version_even_if_the_clock_went_back(
    store: LocalStore, root: Path
) -> None:
    future_ns = 4_102_444_800_000_000_000  # 2100-01-01, so that the clock is behind from now on
    (root / "in").mkdir(parents=True)
    (root / "in" / "m").write_bytes(b"A")
    os.utime(root / "in" / "m", ns=(future_ns, future_ns))
    first = read(store, "in/m")
    seen = [first.version]
    for _ in range(5):
        outcome = store.put_if("in/m", b"B", seen[-1])
        assert isinstance(outcome, outcomes.Applied)
        store.delete_many(["in/m"])
        seen += [outcome.value, create(store, "in/m", b"A")]
    assert len(set(seen)) == len(seen)
    stamps = [int(version.split("-")[0], 16) for version in seen]
    assert stamps == sorted(stamps)


def test_a_writer_that_never_got_the_lock_wrote_nothing(
    store: LocalStore, root: Path, runtime: ManualRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = create(store, "m", b"1")

    def time_out(*_: object) -> None:
        raise LockTimeout("lock")

    monkeypatch.setattr(FileLock, "_lock_file", time_out)
    with pytest.raises(TransientStorageError, match="another process holds the lock"):
        store.put_if("m", b"2", first)
    with pytest.raises(TransientStorageError, match="another process holds the lock"):
        store.put("m", b"2")
    (failure,) = store.delete_many(["m"])
    assert "another process holds the lock" in failure.reason


def test_the_error_about_a_full_disk_has_path_and_fix_and_the_old_bytes_stay(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = create(store, "m", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fail_with(errno.ENOSPC))
        with pytest.raises(PermanentStorageError, match=r"cannot write '.*/m': .*Free some space"):
            store.put_if("m", b"new", outcome)
        with pytest.raises(PermanentStorageError, match="Free some space"):
            store.put("in/new", b"new")
    assert leftovers(root) == []
    blob = read(store, "m")
    assert (blob.data, blob.version) == (b"old", outcome)


def test_nothing_is_written_with_too_many_open_files(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = create(store, "m", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail_with(errno.EMFILE))
        with pytest.raises(TransientStorageError, match="Too many open files"):
            store.put_if("m", b"new", first)
        with pytest.raises(TransientStorageError):
            store.get("m")


def test_f2_a_failure_after_the_rename_is_an_unknown_outcome(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = create(store, "m", b"old")
    real = os.fsync

    def fails_on_directories(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_on_directories)
        assert isinstance(store.put_if("m", b"new", outcome), outcomes.Unknown)
    assert read(store, "m").data == b"new"


@pytest.mark.parametrize("name", ["flock", "close"])
def test_f2_a_lock_that_cannot_be_released_after_the_rename_is_an_unknown_outcome(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = create(store, "m", b"old")
    lock_inode = os.stat(LocalStore(root).lock_of("m")).st_ino
    module: Any = fcntl if name == "flock" else os
    real = getattr(module, name)

    def fails_on_the_lock(fd: int, *how: int) -> None:
        its_own = os.fstat(fd).st_ino == lock_inode
        real(fd, *how)
        if its_own and how in ((), (fcntl.LOCK_UN,)):
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails_on_the_lock)
        outcome = store.put_if("m", b"new", first)
    assert isinstance(outcome, outcomes.Unknown)
    assert "was replaced" in outcome.reason
    blob = read(store, "m")
    assert blob.data == b"new"
    again = store.put_if("m", b"newer", blob.version)
    assert isinstance(again, outcomes.Applied), "the lock is free for the next one"


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EIO])
def test_f2_a_rename_whose_answer_was_lost_is_an_unknown_outcome(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.replace

    def lost(source: str, target: str) -> None:
        real(source, target)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lost)
        assert isinstance(store.put_if("m", b"new", None), outcomes.Unknown)
    assert read(store, "m").data == b"new"


def test_writers_survive_the_removal_of_their_empty_directory(root: Path) -> None:
    store = LocalStore(root)
    errors: list[BaseException] = []

    def churn(name: str) -> None:
        try:
            for _ in range(100):
                store.put(f"in/dir/{name}", b"")
                assert store.delete_many([f"in/dir/{name}"]) == ()
            store.put(f"in/dir/{name}", b"last")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [info.key for info in store.list("").objects] == ["in/dir/a", "in/dir/b", "in/dir/c"]


def test_the_check_of_a_file_system_runs_once_and_leaves_no_files(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.check_conditional_writes("in/manifest")
    assert leftovers(root) == []
    monkeypatch.setattr(os, "open", fail_with(errno.EMFILE))
    store.check_conditional_writes("in/manifest")


def test_f12_a_file_system_without_locks_is_refused(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", fail_with(errno.EIO))
    with pytest.raises(PermanentStorageError, match="cannot write"):
        store.check_conditional_writes("in/manifest")
    monkeypatch.setattr(fcntl, "flock", fail_with(errno.ENOLCK))
    with pytest.raises(UnsafeStore, match=r"has no file locks.*s3:// URL"):
        store.check_conditional_writes("in/manifest")


def test_f12_a_file_system_with_coarse_times_is_refused(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "utime", lambda *_, **__: None)
    with pytest.raises(PermanentStorageError, match="only coarsely"):
        store.check_conditional_writes("in/manifest")


# put_pieces and get_into, which only a store of files has.


def test_an_object_is_read_into_memory_of_the_caller(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    made: list[bytearray] = []

    def allocate(size: int) -> memoryview:
        made.append(bytearray(size - min(size, start)))
        return memoryview(made[-1])

    for data, start in ((b"", 0), (b"abc", 0), (b"abc", 2), (bytes(range(256)) * 5000, 0)):
        store.put("a/b", data)
        store.get_into("a/b", allocate, start, max_bytes=len(data))
        assert made.pop() == data[start:]


def test_no_memory_is_allocated_for_a_missing_or_too_large_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1234")

    def allocate(size: int) -> memoryview:
        raise AssertionError("memory was asked for")

    with pytest.raises(ObjectNotFound):
        store.get_into("a/c", allocate)
    with pytest.raises(ObjectNotFound):
        store.get_into("a", allocate)
    with pytest.raises(CorruptData, match="4 bytes"):
        store.get_into("a/b", allocate, max_bytes=3)


def test_a_file_that_is_truncated_during_a_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"1234")

    def allocate(size: int) -> memoryview:
        (tmp_path / "a/b").write_bytes(b"12")
        return memoryview(bytearray(size))

    with pytest.raises(TransientStorageError, match="was cut to fewer bytes"):
        store.get_into("a/b", allocate)
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(TransientStorageError, match="was cut to fewer bytes"):
        store.get("a/b")


def test_a_part_longer_than_a_file_name_is_refused() -> None:
    store = LocalStore("/data")
    assert store.file_of("é" * 127) == "/data/" + "é" * 127
    with pytest.raises(InvalidInput, match="part of 256 bytes between slashes"):
        store.file_of("in/" + "é" * 128)


def test_nested_roots_use_the_same_lock_for_the_same_file() -> None:
    # A producer uses /data with the prefix q/in, and a consumer uses /data/q with the prefix in.
    # With one lock per root, both could replace one version, and an append would be lost.
    outer, inner = LocalStore("/data"), LocalStore("/data/q")
    assert outer.lock_of("q/in/m") == inner.lock_of("in/m")
    assert outer.lock_of("q/in/m") != outer.lock_of("q/in/n")
    assert outer.lock_of("q/in/m").startswith(f"/data/q/in/{RESERVED}/")


def test_the_lock_of_the_longest_name_has_a_valid_file_name() -> None:
    assert len(os.path.basename(LocalStore("/data").lock_of("é" * 127))) <= 255


@pytest.mark.parametrize("root", ["/", "//", "/dbfs/mnt/queue", "/Volumes/main/queue", "/link"])
def test_a_root_without_locks_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os.path, "realpath", lambda path: path.replace("/link", "/dbfs/mnt/queue"))
    with pytest.raises(InvalidInput, match=r"root of the file system|Databricks mount"):
        LocalStore(root)
    monkeypatch.setattr("sys.platform", "darwin")
    assert LocalStore("/Volumes/disk").root == "/Volumes/disk", "on macOS, volumes are disks"


def keys_below(root: Path, prefix: str, start_after: str = "") -> list[str]:
    listing = LocalStore(root).list(prefix, start_after=start_after)
    return [info.key for info in listing.objects]


def fill(root: Path, *keys: str) -> list[str]:
    for key in keys:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(key.encode())
    return sorted(keys)


def test_names_that_are_not_utf8_and_things_that_are_not_files_are_not_listed(
    tmp_path: Path,
) -> None:
    fill(tmp_path, "in/a")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "in" / "fifo")
    os.close(os.open(os.fsencode(tmp_path) + b"/in/\xff", os.O_CREAT))
    assert keys_below(tmp_path, "in/") == ["in/a"]


def test_listing_one_key_of_a_directory_does_not_look_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "in/a", "in/b/c", "in/bc", "in/d")
    looked_at: list[str] = []

    def is_text(name: str) -> bool:
        looked_at.append(name)
        return True

    monkeypatch.setattr(local, "_is_text", is_text)
    assert keys_below(tmp_path, "in/b") == ["in/b/c", "in/bc"]
    assert sorted(looked_at) == ["b", "bc", "c", "in/b"], "the prefix, and the names that fit"


def test_asking_for_one_object_by_its_key_does_not_read_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "in/a", "in/a2", "in/b/c", "top")
    store = LocalStore(tmp_path)

    def first(prefix: str, start_after: str = "") -> list[tuple[str, int]]:
        listing = store.list(prefix, start_after=start_after, limit=1)
        return [(each.key, each.size) for each in listing.objects]

    too_long = "in/" + "x" * 300
    assert [first("in/b"), first("in/"), first("in/c"), first(too_long)] == [
        [("in/b/c", 6)],
        [("in/a", 4)],
        [],
        [],
    ]
    assert first("in/a", start_after="in/a") == [("in/a2", 5)]
    assert (first("top"), first("/top"), first("in/a/")) == ([("top", 3)], [], [])
    monkeypatch.setattr(os, "scandir", fail_with(errno.EIO))
    assert first("in/a") == [("in/a", 4)]
    with pytest.raises(PermanentStorageError):
        first("in/b")


def test_a_directory_that_cannot_be_read_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "scandir", fail_with(errno.EACCES))
    with pytest.raises(PermanentStorageError, match=r"cannot list '.*/root/in': Permission"):
        store.list("in/")
    monkeypatch.setattr(FileLock, "__enter__", fail_with(errno.EACCES))
    (failure,) = store.delete_many(["a"])
    assert "cannot delete 'a': Permission denied" in failure.reason


FAULTS = [
    (errno.ESTALE, TransientStorageError),
    (errno.ETIMEDOUT, TransientStorageError),
    (errno.EIO, PermanentStorageError),
    (errno.EACCES, PermanentStorageError),
]


def fail_stat_of(patch: pytest.MonkeyPatch, path: str, code: int) -> list[str]:
    """Make ``os.stat`` fail for one path, and return the list of failed calls."""
    real, failed = os.stat, []

    def fail(name: Any, **how: Any) -> os.stat_result:
        if name == path:
            failed.append(path)
            raise OSError(code, os.strerror(code))
        return real(name, **how)

    patch.setattr(os, "stat", fail)
    return failed


@pytest.mark.parametrize(("code", "kind"), FAULTS)
@pytest.mark.parametrize(
    "path", ["ingest", f"ingest/{RESERVED}", f"{RESERVED}/tmp", "ingest/manifest"]
)
def test_f4_a_stat_that_fails_does_not_mean_that_the_object_vanished(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch, path: str, code: int, kind: type
) -> None:
    first = create(store, "ingest/manifest", b"old")
    with monkeypatch.context() as patch:
        failed = fail_stat_of(patch, f"{root}/{path}", code)
        with pytest.raises(kind, match=os.strerror(code)):
            store.put_if("ingest/manifest", b"new", first)
    assert failed, "the fault was injected"
    assert read(store, "ingest/manifest").data == b"old"
    assert isinstance(store.put_if("ingest/manifest", b"new", first), outcomes.Applied)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR])
def test_f4_a_directory_that_is_gone_means_that_the_object_vanished(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    first = create(store, "ingest/manifest", b"old")
    with monkeypatch.context() as patch:
        failed = fail_stat_of(patch, f"{root}/ingest", code)
        assert store.put_if("ingest/manifest", b"new", first) == outcomes.Vanished()
    assert failed, "the fault was injected"


class Entry:
    """An entry of ``os.scandir`` whose ``stat`` fails."""

    def __init__(self, name: str, code: int) -> None:
        self.name = name
        self._code = code

    def is_dir(self, **_: Any) -> bool:
        return False

    def stat(self, **_: Any) -> os.stat_result:
        raise OSError(self._code, os.strerror(self._code))


def list_with_a_fault(root: Path, patch: pytest.MonkeyPatch, code: int) -> list[str]:
    """Return the keys of a listing while the ``stat`` of one of its two files fails."""
    fill(root, "in/a", "in/b")
    real = os.scandir

    @contextlib.contextmanager
    def scandir(path: str) -> Iterator[list[Any]]:
        with real(path) as entries:
            yield [Entry(e.name, code) if e.name == "b" else e for e in entries]

    patch.setattr(os, "scandir", scandir)
    return keys_below(root, "in/")


@pytest.mark.parametrize(("code", "kind"), FAULTS)
def test_a_listing_that_cannot_stat_a_file_fails_instead_of_leaving_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type
) -> None:
    with pytest.raises(kind, match=os.strerror(code)):
        list_with_a_fault(tmp_path, monkeypatch, code)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ELOOP])
def test_a_listing_leaves_out_a_file_that_was_deleted_meanwhile_and_a_link_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert list_with_a_fault(tmp_path, monkeypatch, code) == ["in/a"]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EMFILE, errno.EIO])
def test_f6_a_transient_fault_does_not_make_a_listing_use_another_clock(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store.put("in/a", b"")
    real = os.open

    def fail(path: str, flags: int, *how: Any) -> int:
        if path.startswith(f"{root}/{RESERVED}/tmp/"):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *how)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises((TransientStorageError, PermanentStorageError), match=os.strerror(code)):
        store.list("in/")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_listing_of_a_read_only_directory_uses_the_clock_of_this_machine(
    store: LocalStore,
    root: Path,
    runtime: ManualRuntime,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    store.put("in/a", b"")
    monkeypatch.setattr(os, "open", fail_with(code))
    assert store.list("in/").now_ms == runtime.now_ms()


@pytest.mark.parametrize(
    "prefix",
    ["/", "/in/", "a//b", "../a", "a/../b", "./a", f"in/{RESERVED}/x", "in/a\0", "in/\udcff"],
)
def test_no_key_leads_outside_the_store(tmp_path: Path, prefix: str) -> None:
    fill(tmp_path, "in/a", "a/b")
    assert keys_below(tmp_path, prefix) == []


def test_files_of_killed_writers_are_removed_once_after_a_day(
    store: LocalStore, root: Path
) -> None:
    store.put("a", b"")
    temporary = root / RESERVED / "tmp"
    old, new = temporary / "old", temporary / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    two_days_ago = os.stat(new).st_mtime - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    store.put("a", b"")
    assert sorted(leftovers(root)) == ["new", "old"]
    LocalStore(root).put("a", b"")
    assert leftovers(root) == ["new"]


def test_a_removed_directory_is_created_again(store: LocalStore, root: Path) -> None:
    store.put("a", b"1")
    os.rmdir(root / RESERVED / "tmp")
    store.put("a", b"2")
    assert (root / "a").read_bytes() == b"2"
    (root / "link").symlink_to("nowhere")
    with pytest.raises(PermanentStorageError, match="cannot write"):
        store.put("link/a", b"")


def test_a_directory_is_synced_unless_it_is_gone_or_its_file_system_cannot(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"1")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    local.sync_directory(str(root / "pruned"))
    assert synced == []
    local.sync_directory(str(root))
    assert synced == [root.stat().st_ino]
    monkeypatch.setattr(os, "fsync", fail_with(errno.EINVAL))
    local.sync_directory(str(root))
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        local.sync_directory(str(root))


def test_f6_the_time_comes_from_the_file_system(
    store: LocalStore, root: Path, runtime: ManualRuntime
) -> None:
    assert store.list("").now_ms == runtime.now_ms(), "the directory does not exist"
    runtime.set_wall_clock(0)  # the clock of this process is in 1970
    store.put("a", b"")
    listing = store.list("")
    assert abs(listing.now_ms - listing.objects[0].last_modified_ms) < 60_000
    assert leftovers(root) == []


def opened(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR)


def test_timestamps_of_one_process_never_repeat(tmp_path: Path) -> None:
    fd = opened(tmp_path / "a")
    stamps = [local.stamp_later(fd, "a", 0) for _ in range(1_000)]
    os.close(fd)
    assert sorted(set(stamps)) == stamps


@pytest.mark.parametrize("most", [None, 4])
def test_pieces_are_written_in_order_even_after_a_short_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    monkeypatch.setattr(local, "_PIECES", 3)
    monkeypatch.setattr(local, "_CHUNK", 5)
    calls = []
    writev = os.writev

    def cut(fd: int, group: Sequence[bytes | memoryview]) -> int:
        calls.append(len(group))
        return writev(fd, group) if most is None else os.write(fd, b"".join(group)[:most])

    monkeypatch.setattr(os, "writev", cut)
    fd = opened(tmp_path / "a")
    pieces = [b"01", memoryview(b"234"), b"", b"5", b"678", b"9ab", b"c"]
    local.write_pieces(fd, pieces)
    assert local.read_range(fd, 0, 99) == b"0123456789abc"
    assert local.read_range(fd, 2, 9) == b"2345678"
    assert local.read_range(fd, 4, 4) == b""
    assert calls == [3, 3, 1]
    os.close(fd)


@pytest.mark.parametrize(
    ("code", "kind", "fix"),
    [
        (errno.ENOSPC, PermanentStorageError, "Free some space"),
        (errno.EXDEV, PermanentStorageError, "mount the store's whole directory"),
        (errno.EDQUOT, PermanentStorageError, "Free some space"),
        (errno.EACCES, PermanentStorageError, "right to write"),
        (errno.EROFS, PermanentStorageError, "right to write"),
        (errno.EISDIR, PermanentStorageError, "directory of another"),
        (errno.EIO, PermanentStorageError, "Input/output error"),
        (errno.EMFILE, TransientStorageError, "Try again"),
        (errno.ESTALE, TransientStorageError, "Try again"),
        (errno.ENAMETOOLONG, InvalidInput, "shorter"),
    ],
)
def test_errors_have_path_cause_and_fix(code: int, kind: type, fix: str) -> None:
    error = local.storage_error("write", "/data/x", OSError(code, os.strerror(code)))
    assert type(error) is kind
    assert str(error).startswith(f"cannot write '/data/x': {os.strerror(code)}")
    assert fix in str(error)


HOLD = """
import sys
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import FileLock
with FileLock(sys.argv[1], SystemRuntime()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lock")


def holder(path: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_error_about_a_lock_is_raised_before_the_deadline(
    path: str, runtime: ManualRuntime
) -> None:
    process = holder(path)
    with deadline(runtime, 8.0), pytest.raises(LockTimeout), FileLock(path, runtime):
        pass
    assert 4.0 <= runtime.monotonic() < 5.0
    process.communicate("")


def test_kill_9_of_its_holder_releases_a_lock(path: str, runtime: ManualRuntime) -> None:
    process = holder(path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with FileLock(path, runtime):
        pass
    assert runtime.slept == []


def test_a_lock_excludes_other_threads(path: str) -> None:
    inside = 0
    most = 0
    runtime = SystemRuntime()

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with FileLock(path, runtime):
                inside += 1
                most = max(most, inside)
                runtime.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_waiting_for_a_lock_that_another_thread_holds_times_out(
    path: str, runtime: ManualRuntime
) -> None:
    with (
        FileLock(path, runtime),
        deadline(runtime, 0.02),
        pytest.raises(LockTimeout),
        FileLock(path, runtime),
    ):
        pass


def test_a_missing_file_is_not_locked_without_create(path: str, runtime: ManualRuntime) -> None:
    with FileLock(path, runtime, create=False) as lock:
        assert lock.load() == 0
        lock.store(7)
    assert not os.path.exists(path)
    with pytest.raises(FileNotFoundError), FileLock(f"{path}/lock", runtime):
        pass


def test_a_forked_child_does_not_keep_a_lock(path: str, runtime: ManualRuntime) -> None:
    read_end, write_end = os.pipe()
    with FileLock(path, runtime):
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)  # the child lives until then, with a copy of the open lock file
            os._exit(0)
    with FileLock(path, runtime):
        pass
    assert runtime.slept == []
    os.close(write_end)
    os.close(read_end)
    os.waitpid(child, 0)
