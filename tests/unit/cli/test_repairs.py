"""``skip`` and ``quarantine``."""

from __future__ import annotations

import json

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
