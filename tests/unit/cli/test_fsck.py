"""``fsck`` and what it mends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from opendata_buffer.cli.commands import cli
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.ownership import owner_key
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import fails, fill, manifest_of, ok, records_of, run, topic_of


def test_fsck_of_a_sound_queue(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    assert (
        ok("fsck", url).stdout
        == "2 batches, 2 records checked, 2 B of records in 24 B of objects\n"
    )
    assert json.loads(ok("fsck", url, "--json").stdout) == {
        "ok": True, "batches": 2, "records": 2, "bytes": 2, "stored_bytes": 24,
        "problems": [], "notes": [],
    }  # fmt: skip


def test_fsck_lists_the_problems_and_exits_1(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    first, second, _ = manifest_of(store).entries()
    store.delete_many([first.location])
    store.put(second.location, b"garbage")
    result = run("fsck", url)
    assert result.exit_code == 1
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert [first.location in problems[0], second.location in problems[1]] == [True, True]
    assert result.stderr.startswith("error: 2 problems in the queue")
    result = run("fsck", url, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["ok"], [each["sequence"] for each in found["problems"]]) == (False, [0, 1])


def test_fsck_of_a_manifest_of_garbage(url: str, store: MemoryStore) -> None:
    store.put("ingest/manifest", Manifest.empty().append([NewEntry("x")]).raw[:-1] + b"\x07")
    result = run("fsck", url)
    assert result.exit_code == 1
    assert "problem: manifest 'ingest/manifest'" in result.stdout


def damage(url: str, store: MemoryStore) -> None:
    """Five batches: sound, gone, garbage, sound, and the sound ones' neighbour queued again."""
    fill(url, [b"a"], [b"b"], [b"c"], [b"d"])
    entries = manifest_of(store).entries()
    store.delete_many([entries[1].location])
    store.put(entries[2].location, b"garbage")
    again = manifest_of(store).append([NewEntry(entries[0].location)])
    store.put("ingest/manifest", again.raw)


def test_repair_passes_by_what_cannot_be_delivered_and_keeps_a_copy(
    url: str, store: MemoryStore
) -> None:
    damage(url, store)
    out = ok("fsck", url, "--repair", "--yes").stdout
    assert "problem: sequence 1" in out
    assert "repair: sequence 2" in out
    assert "copied to the quarantine and passed by" in out
    assert out.splitlines()[-1].startswith("5 batches, 2 records checked")
    ok("fsck", url)
    assert records_of(store) == [b"a", b"d"]
    reports = [
        json.loads(line)
        for line in ok("quarantine", "list", url, "--json").stdout.split("\n")
        if line
    ]
    assert [(each["sequence"], each["copied_bytes"]) for each in reports][:2] == [(1, None), (2, 7)]
    assert ok("consume", url).stdout == "a\nd\n"


def test_repair_in_json_is_one_line_for_scripts(url: str, store: MemoryStore) -> None:
    damage(url, store)
    result = ok("fsck", url, "--repair", "--yes", "--json")
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert found["ok"] is True
    assert [(each["sequence"], each["kind"]) for each in found["repaired"]] == [
        (1, "missing"), (2, "unreadable"), (4, "repeated"),
    ]  # fmt: skip
    assert "repair: sequence 1" in result.stderr
    assert "repaired" not in json.loads(ok("fsck", url, "--json").stdout)


def test_repair_changes_nothing_before_it_is_told_to(url: str, store: MemoryStore) -> None:
    damage(url, store)
    before = store.list("").objects
    result = run("fsck", url, "--repair", "--dry-run")
    assert result.exit_code == 1
    assert "repair: sequence 1" in result.stdout
    result = run("fsck", url, "--repair")
    assert result.exit_code == 1
    assert "3 problems of 'ingest' will be mended. Nobody is there to be asked: give --yes" in (
        result.stderr
    )
    assert run("fsck", url, "--yes").exit_code == 2
    assert store.list("").objects == before


def test_repair_rebuilds_a_lost_manifest(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    store.delete_many(["ingest/manifest"])
    out = ok("fsck", url, "--repair", "--yes").stdout
    assert "repair: manifest 'ingest/manifest' is rebuilt from the batches that are there" in out
    assert sorted(records_of(store)) == [b"a", b"b"]
    store.put("ingest/manifest", b"damage")
    out = ok("fsck", url, "--repair", "--yes").stdout
    assert "copied as ingest/manifest.broken-" in out
    assert sorted(records_of(store)) == [b"a", b"b"]


def test_repair_leaves_alone_what_may_be_sound(url: str, store: MemoryStore) -> None:
    fill(url, [b"a" * 1000])
    raw = manifest_of(store).append([NewEntry("elsewhere/x.batch")]).raw
    store.put("ingest/manifest", raw)
    result = run("fsck", url, "--repair", "--yes", "--max-batch-bytes", "100")
    assert result.exit_code == 1
    assert "check again with a larger --max-batch-bytes" in result.stdout
    assert "check again with --allow-foreign-locations" in result.stdout
    assert manifest_of(store).raw == raw


def test_fsck_of_a_topic_checks_all_partitions(url: str, store: MemoryStore) -> None:
    first, _, third = topic_of(url, 3)
    fill(url, [b"a"], data_path_prefix=first)
    fill(url, [b"b"], data_path_prefix=third)
    out = ok("fsck", url).stdout.splitlines()
    assert [line.split(":")[0] for line in out] == [first, third]
    store.delete_many([f"{third}/manifest"])
    result = run("fsck", url)
    assert result.exit_code == 1
    assert f"{third}: problem: manifest '{third}/manifest'" in result.stdout
    assert f"1 problem in the queue with manifest '{third}/manifest'" in result.stderr
    ok("fsck", url, "--repair", "--yes")
    assert records_of(store, f"{third}/manifest") == [b"b"]


def test_fsck_of_no_queue_says_where_it_looked(url: str, tmp_path: Path) -> None:
    assert "'ingest/manifest'" in fails("fsck", url, "--repair", "--yes")
    fails("fsck", str(tmp_path / "typo"), "--repair", "--yes")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1)])
def test_who_sits_at_a_terminal_is_asked(
    url: str,
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    left: int,
) -> None:
    fill(url, [b"a"])
    store.delete_many([manifest_of(store).entries()[0].location])
    monkeypatch.setattr("opendata_buffer.cli.asking.somebody_is_there", lambda: True)
    result = CliRunner().invoke(cli, ["fsck", url, "--repair"], input=answer)
    assert result.exit_code == code
    assert "1 problem of 'ingest' will be mended. Go on?" in result.stderr
    assert run("fsck", url).exit_code == left
    assert store.get(owner_key("ingest"))
