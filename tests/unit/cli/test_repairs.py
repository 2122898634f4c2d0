"""``skip`` and ``quarantine``."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import fails, fill, manifest_of, ok, run


def stuck(url: str, store: MemoryStore) -> str:
    """A queue of three batches of which the second cannot be read; returns its location."""
    fill(url, [b"a"], [b"b"], [b"c"])
    location = manifest_of(store).entries()[1].location
    store.put(location, b"garbage")
    return location


def test_a_queue_that_is_stuck_is_freed_as_its_error_says(url: str, store: MemoryStore) -> None:
    stuck(url, store)
    result = run("consume", url)
    assert (result.exit_code, result.stdout) == (1, "a\n")
    assert f"opendata-buffer skip {url} 1" in result.stderr
    assert "skipped batch 1" in ok("skip", url, "1").stdout
    assert ok("consume", url).stdout == "c\n"
    assert ok("fsck", url).exit_code == 0


def test_skip_tells_what_it_did_as_json(url: str, store: MemoryStore) -> None:
    location = stuck(url, store)
    found = json.loads(ok("skip", url, "1", "--json").stdout)
    assert (found["sequence"], found["location"], found["copied_bytes"]) == (1, location, 7)
    assert found["epoch"] == 1


def test_skip_names_its_own_flag(url: str, store: MemoryStore) -> None:
    stuck(url, store)
    assert "--force" in fails("skip", url, "0")
    assert ok("skip", url, "0", "--force").exit_code == 0


def test_skip_in_a_queue_that_is_not_there_makes_none(url: str, store: MemoryStore) -> None:
    assert "there is no queue" in fails("skip", url, "0")
    assert "there is no queue" in fails("quarantine", "list", url)
    assert "there is no queue" in fails("quarantine", "restore", url, "x")
    assert store.list("").objects == ()


def test_what_was_skipped_is_listed_and_restored(url: str, store: MemoryStore) -> None:
    stuck(url, store)
    assert ok("quarantine", "list", url).stdout == ""
    ok("skip", url, "1")
    ok("skip", url, "0", "--force")
    lines = ok("quarantine", "list", url).stdout.splitlines()
    assert [line.split("-")[0] for line in lines] == ["0", "1"]
    lines = ok("quarantine", "list", url, "--json").stdout.splitlines()
    reports = [json.loads(line) for line in lines]
    assert [report["sequence"] for report in reports] == [0, 1]
    good, bad = (report["id"] for report in reports)
    assert "cannot be read" in fails("quarantine", "restore", url, bad)
    assert "as sequence 3" in ok("quarantine", "restore", url, good).stdout
    assert "restored as 3" in ok("quarantine", "list", url).stdout
    assert ok("consume", url).stdout == "c\na\n"


def test_a_report_that_cannot_be_read_is_told_behind_the_others(
    url: str, store: MemoryStore
) -> None:
    stuck(url, store)
    ok("skip", url, "1")
    store.put("ingest/_quarantine/x.json", b"foreign")
    result = run("quarantine", "list", url)
    assert result.exit_code == 1
    assert result.stdout.startswith("1-")
    assert "error: 'ingest/_quarantine/x.json': the report of a batch" in result.stderr


def lost(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    ok("consume", url, "--max-batches", "1")
    store.delete_many(["ingest/manifest"])


def test_f4_a_lost_manifest_is_told_by_every_command_and_rebuilt(
    url: str, store: MemoryStore
) -> None:
    lost(url, store)
    for command in ("produce", "consume"):
        assert run(command, url, stdin=b"x\n").exit_code == 1
    assert "manifest rebuild" in run("fsck", url).stdout
    assert run("fsck", url).stdout.count("note: unread batch 'ingest/") == 3
    dry = ok("manifest", "rebuild", url, "--dry-run").stdout
    assert dry.count("would enqueue ingest/") == 3
    assert run("fsck", url).exit_code == 1
    assert ok("manifest", "rebuild", url).stdout.count("enqueued ingest/") == 3
    # All were written within a millisecond or so: names do not tell their order.
    assert sorted(ok("consume", url).stdout.split()) == ["a", "b", "c"]
    assert ok("manifest", "rebuild", url).stdout.startswith("nothing to do")


def test_rebuild_tells_what_it_did_as_json(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    store.put("ingest/manifest", b"garbage")
    found = json.loads(ok("manifest", "rebuild", url, "--json").stdout)
    assert (len(found["found"]), found["kept"], found["missing"]) == (2, 0, [])
    got = store.get(found["saved"])
    assert isinstance(got, Blob)
    assert got.data == b"garbage"
    assert manifest_of(store).first_sequence == found["first_sequence"]


@pytest.mark.parametrize("command", ["produce", "consume"])
def test_f4_a_queue_starts_over_only_when_it_is_told_to(
    url: str, store: MemoryStore, command: str
) -> None:
    lost(url, store)
    assert run(command, url, stdin=b"x\n").exit_code == 1
    ok(command, url, "--recreate", stdin=b"x\n")
    assert manifest_of(store).first_sequence == 0


def test_rebuild_of_a_mistyped_path_makes_nothing(url: str, store: MemoryStore) -> None:
    assert "there is no queue" in fails("manifest", "rebuild", url)
    assert store.list("").objects == ()
