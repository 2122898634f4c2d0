"""``seek``."""

from __future__ import annotations

import json

import pytest

from opendata_buffer import Consumer, ConsumerConfig, Fenced
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import fails, fill, manifest_of, ok, records_of, run, topic_of


def test_what_lies_before_the_place_leaves_the_queue_and_is_in_the_quarantine(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    out = ok("seek", url, "--to", "2", "--yes").stdout.splitlines()
    assert out[0] == "ingest: dropped 2 batches; the queue begins at sequence 2"
    assert "failOnDataLoss=false" in out[-1]
    assert records_of(store) == [b"c"]
    lines = ok("quarantine", "list", url, "--json").stdout.splitlines()
    reports = [json.loads(line) for line in lines]
    assert [each["sequence"] for each in reports] == [0, 1]
    assert f"quarantine restore {url} {reports[0]['id']}'" in out[1]
    ok("quarantine", "restore", url, reports[0]["id"])
    assert ok("consume", url).stdout == "c\na\n"


def test_all_that_was_dropped_is_restored_by_one_command(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    found = json.loads(ok("seek", url, "--to", "latest", "--yes", "--json").stdout)
    out = ok("quarantine", "restore", url, *found["copies"]).stdout.splitlines()
    assert out[-1] == f"restored batch {found['copies'][-1]} as sequence 5"
    assert records_of(store) == [b"a", b"b", b"c"]


def test_seek_to_the_latest_or_to_a_time(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    ok("seek", url, "--to", "2001-01-01", "--yes")
    assert records_of(store) == [b"a", b"b"]
    assert manifest_of(store).epoch == 0
    ok("seek", url, "--to", "latest", "--yes")
    assert (manifest_of(store).first_sequence, manifest_of(store).epoch) == (2, 1)
    assert "opendata-buffer seek" in ok("owner", url).stdout
    fill(url, [b"c"])
    assert ok("consume", url).stdout == "c\n"


def test_seek_changes_nothing_before_it_is_told_to(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    before = store.list("").objects
    out = ok("seek", url, "--to", "latest", "--dry-run").stdout
    assert out == "ingest: would drop 2 batches; the queue begins at sequence 2\n"
    line = fails("seek", url, "--to", "1")
    assert "1 batch of " in line
    assert "will be dropped, copied to the quarantine first. Nobody is there to be asked" in line
    assert "NOT copied" in fails("seek", url, "--to", "1", "--no-copy")
    assert store.list("").objects == before


def test_seek_without_a_copy_leaves_none(url: str) -> None:
    fill(url, [b"a"])
    ok("seek", url, "--to", "1", "--no-copy", "--yes")
    assert ok("quarantine", "list", url).stdout == ""


def test_a_seek_that_is_interrupted_says_how_to_go_on(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    fill(url, [b"a"])
    monkeypatch.setattr("opendata_buffer.admin.seek.quarantine", interrupted)
    assert run("seek", url, "--to", "latest", "--yes").exit_code == 130
    assert f"'opendata-buffer status {url}' shows what still waits" in capfd.readouterr().err
    assert manifest_of(store).entry_count == 1


def test_seek_fences_the_consumer(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    with Consumer(ConsumerConfig(store=url)) as consumer:
        assert consumer.next_batch() is not None
        found = json.loads(ok("seek", url, "--to", "1", "--yes", "--json").stdout)
        assert (found["dropped"], found["first_sequence"], found["epoch"]) == (1, 1, 2)
        assert len(found["copies"]) == 1
        with pytest.raises(Fenced):
            consumer.ack_through(0)


def test_seek_nowhere_says_what_there_is(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    ok("seek", url, "--to", "1", "--yes")
    assert "sequence 0 has left the queue" in fails("seek", url, "--to", "0", "--yes")
    assert "beyond the end" in fails("seek", url, "--to", "9", "--yes")
    assert "there is no queue" in fails("seek", url, "--to", "1", "--data-path-prefix", "x")


def test_seek_into_a_transaction_says_that_its_rest_is_delivered(
    url: str, store: MemoryStore
) -> None:
    names = [batch_key("ingest", SystemRuntime().ulid(), Transaction("app", 1)) for _ in "ab"]
    store.put("ingest/manifest", Manifest.empty().append([NewEntry(each) for each in names]).raw)
    said = ok("seek", url, "--to", "1", "--dry-run").stderr
    assert "note: ingest: 1 transaction on both sides of sequence 1: what lies behind it" in said
    assert ok("seek", url, "--to", "latest", "--dry-run").stderr == ""


def test_a_topic_is_moved_by_time_or_to_the_latest(url: str, store: MemoryStore) -> None:
    first, _, third = topic_of(url, 3)
    fill(url, [b"a"], data_path_prefix=first)
    fill(url, [b"b"], [b"c"], data_path_prefix=third)
    result = run("seek", url, "--to", "1", "--yes")
    assert result.exit_code == 2
    assert "name one with --partition" in result.stderr
    ok("seek", url, "--to", "1", "--partition", third, "--yes")
    assert records_of(store, f"{third}/manifest") == [b"c"]
    out = ok("seek", url, "--to", "latest", "--yes").stdout
    assert f"{third}: dropped 1 batch; the queue begins at sequence 2" in out
    assert f"quarantine restore {url} --partition {third} " in out
    assert records_of(store, f"{first}/manifest") == []
