"""``fsck``, ``skip``, ``restore``, ``trim``, and ``gc``."""

from __future__ import annotations

import json
import re

import pytest

from opendata_buffer import Consumer
from opendata_buffer.cli.main import cli
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.errors import DataLoss, QueueReset
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.queue.ownership import claim_for_writing, claim_queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import (
    bytes_of,
    fails,
    fill,
    flat,
    json_of,
    manifest_of,
    ok,
    records_of,
    run,
    runner,
    topic_of,
)


def damage(url: str, store: MemoryStore) -> None:
    """Create five batches: sound, missing, garbage, sound, and one that is queued twice."""
    fill(url, [b"a"], [b"b"], [b"c"], [b"d"])
    entries = manifest_of(store).entries()
    store.delete_many([entries[1].location])
    store.put(entries[2].location, b"garbage")
    again = manifest_of(store).append([NewEntry(entries[0].location)])
    store.put("ingest/manifest", again.raw)


def test_repair_skips_batches_that_cannot_be_delivered_and_keeps_copies(
    url: str, store: MemoryStore
) -> None:
    damage(url, store)
    result = ok("fsck", url, "--repair", "--yes", "--json")
    assert "repair: sequence 2" in result.stderr
    found = json.loads(result.stdout)
    assert [(each["sequence"], each["kind"]) for each in found["repaired"]] == [
        (1, "missing"), (2, "unreadable"), (4, "repeated"),
    ]  # fmt: skip
    assert json_of("fsck", url) == {
        "ok": True, "batches": 5, "records": 2, "bytes": 2, "stored_bytes": 45,
        "problems": [], "notes": [], "partition": "ingest",
    }  # fmt: skip
    assert records_of(store) == [b"a", b"d"]
    reports = json_of("status", url)["quarantine"]
    assert [(each["sequence"], each["copied_bytes"]) for each in reports][:2] == [(1, None), (2, 7)]
    assert ok("consume", url, "--ack").stdout == "a\nd\n"


def test_a_batch_is_restored_once_and_the_second_restore_names_the_first(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"])
    name = json_of("skip", url, "0", "--force")["id"]
    assert ok("restore", url, name).stdout == f"restored batch {name} as sequence 1\n"
    again = f"batch {name} was restored already, as sequence 1\n"
    assert ok("restore", url, name).stdout == again
    assert records_of(store) == [b"a"]


def test_the_repair_of_a_manifest_prints_where_sequences_continue(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"])
    store.put("ingest/manifest", b"<html>")
    lines = ok("fsck", url, "--repair", "--yes").stdout.splitlines()
    rebuilt = manifest_of(store)
    first, end = rebuilt.first_sequence, rebuilt.next_sequence
    assert first > 1_000_000
    assert f"sequences continue at {first:,}, and the next batch gets {end:,}" in lines
    consumer = json_of("status", url)["consumer"]
    assert (consumer["program"], consumer["epoch"]) == ("opendata-buffer fsck --repair", 1_000)


def test_repair_changes_nothing_without_a_confirmation(url: str, store: MemoryStore) -> None:
    damage(url, store)
    before = store.list("").objects
    result = run("fsck", url, "--repair", "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "repair: sequence 1" in result.stdout
    result = run("fsck", url, "--repair")
    assert result.exit_code == 1
    assert (
        "3 problems of 'ingest' will be repaired. Standard input is not a terminal, so no one can "
        "answer: give" in (result.stderr)
    )
    assert run("fsck", url, "--yes").exit_code == 2
    assert store.list("").objects == before


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1)])
def test_at_a_terminal_a_repair_is_confirmed(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: int
) -> None:
    fill(url, [b"a"])
    store.delete_many([manifest_of(store).entries()[0].location])
    monkeypatch.setattr("opendata_buffer.cli.text.is_interactive", lambda: True)
    result = runner().invoke(cli, ["fsck", url, "--repair"], input=answer)
    assert result.exit_code == code
    assert "1 problem of 'ingest' will be repaired. Go on?" in result.stderr
    assert run("fsck", url).exit_code == left
    assert store.get(owner_key("ingest"))


# ---- skip and restore


def stuck(url: str, store: MemoryStore) -> str:
    """Create a queue of three batches whose second one is unreadable, and return its location."""
    fill(url, [b"a"], [b"b"], [b"c"])
    location = manifest_of(store).entries()[1].location
    store.put(location, b"garbage")
    return location


def test_skipped_batches_are_listed_and_can_be_restored(url: str, store: MemoryStore) -> None:
    location = stuck(url, store)
    found = json_of("skip", url, "1")
    assert (found["sequence"], found["location"], found["copied_bytes"]) == (1, location, 7)
    assert found["epoch"] == 1
    ok("skip", url, "0", "--force")
    reports = json_of("status", url)["quarantine"]
    assert [report["sequence"] for report in reports] == [0, 1]
    good, bad = (report["id"] for report in reports)
    assert "cannot be read" in fails("restore", url, bad)
    assert "as sequence 3" in ok("restore", url, good).stdout
    shown = flat("status", url)
    assert "quarantine 2 batches skipped or trimmed" in shown
    assert f"{bad} 20" in shown
    assert "restored as 3" in shown
    assert ok("consume", url, "--ack").stdout == "c\na\n"


def test_an_object_that_came_back_after_its_batch_was_skipped_is_restored(
    url: str, store: MemoryStore
) -> None:
    location = stuck(url, store)
    store.delete_many([location])
    found = json_of("skip", url, "1")
    assert f"Bring '{location}' back first" in fails("restore", url, found["id"])
    store.put(location, encode_batch([b"b"]))
    assert "as sequence 3" in ok("restore", url, found["id"]).stdout
    ok("restore", url, found["id"])
    assert ok("consume", url, "--ack").stdout == "a\nc\nb\n"


def test_an_orphan_is_enqueued_once_after_a_confirmation(url: str, store: MemoryStore) -> None:
    old = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
    fill(url, [b"a"])
    store.put(old, encode_batch([b"old"]))
    (line,) = run("restore", url, old).stderr.splitlines()
    assert f"batch '{old}' (records: 1), which no entry names, will be" in line
    assert "come twice" not in line
    ok("consume", url, "--ack")
    assert "Later ones were read: if it was read, too, its records come twice" in fails(
        "restore", url, old
    )
    for _ in range(2):
        ok("restore", url, old, "--yes")
    assert ok("consume", url, "--ack").stdout == "old\n"


def test_only_an_unqueued_batch_can_be_enqueued(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    young = batch_key("ingest", SystemRuntime().ulid())
    garbage = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
    store.put(young, encode_batch([b"b"]))
    store.put(garbage, b"garbage")
    before = store.list("").objects
    for location, says in (
        (manifest_of(store).locations()[0], "is queued as sequence 0"),
        ("other/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", "is not the name of a batch in 'ingest'"),
        ("ingest/01J5T4R3KXBMZ7QV9N2WG8YDHQ.batch", "its object does not exist"),
        (garbage, "cannot be enqueued: "),
        (young, "its producer may still enqueue it"),
    ):
        assert says in fails("restore", url, location, "--yes")
    assert store.list("").objects == before


def test_an_unreadable_report_is_shown_as_a_note(url: str, store: MemoryStore) -> None:
    stuck(url, store)
    ok("skip", url, "1")
    store.put("ingest/_quarantine/x.json", b"foreign")
    found = json_of("status", url)
    assert ([each["sequence"] for each in found["quarantine"]], found["quarantined"]) == ([1], 2)
    assert "'ingest/_quarantine/x.json': the report of a batch" in found["notes"][0]


def test_f4_a_queue_is_recreated_only_with_the_option(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    store.delete_many(["ingest/manifest"])
    (advised,) = re.findall(
        r"'opendata-buffer (produce [^']*)'", fails("produce", url, stdin=b"x\n")
    )
    ok(*advised.split(), stdin=b"x\n")
    assert manifest_of(store).first_sequence == 0


def test_f4_only_partitions_without_their_manifest_are_recreated(
    url: str, store: MemoryStore
) -> None:
    lost, sound, unused = topic_of(url, 3)
    for name in (lost, sound):
        fill(url, [b"a"], data_path_prefix=name)
    before = bytes_of(store, owner_key(sound))
    store.delete_many([f"{lost}/manifest"])
    ok("produce", url, "--recreate", stdin=b"")
    fill(url, [b"b"], data_path_prefix=lost)
    assert records_of(store, f"{lost}/manifest") == [b"b"]
    assert bytes_of(store, owner_key(sound)) == before
    assert not store.list(f"{unused}/").objects


# ---- trim


def test_trim_dequeues_batches_before_a_position_and_quarantines_them(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    out = ok("trim", url, "--to", "2", "--yes").stdout.splitlines()
    assert out[0] == "ingest: deleted 2 batches; the queue begins at sequence 2"
    assert "failOnDataLoss=false" in out[-1]
    assert records_of(store) == [b"c"]
    reports = json_of("status", url)["quarantine"]
    assert [each["sequence"] for each in reports] == [0, 1]
    assert f"restore {url} {reports[0]['id']}'" in out[1]
    ok("restore", url, reports[0]["id"])
    assert ok("consume", url, "--ack").stdout == "c\na\n"


def test_trim_changes_nothing_without_a_confirmation(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    before = store.list("").objects
    out = ok("trim", url, "--to", "latest", "--dry-run").stdout
    assert out.splitlines() == [
        "ingest: 2 batches, sequences 0 to 1",
        "ingest: would delete 2 batches; the queue begins at sequence 2",
    ]
    said = run("trim", url, "--to", "1").stderr
    assert said.startswith("ingest: 1 batch, sequences 0 to 0\nerror: 1 batch of ")
    assert (
        "will be deleted, copied to the quarantine first. Standard input is not a terminal" in said
    )
    said = run("trim", url, "--to", "1", "--no-copy").stderr
    assert "NOT copied: the garbage collector deletes their objects once they are older" in said
    assert store.list("").objects == before


def test_the_message_of_an_interrupted_trim_says_how_to_continue(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    fill(url, [b"a"])
    monkeypatch.setattr("opendata_buffer.admin.trimming.quarantine", interrupted)
    assert run("trim", url, "--to", "latest", "--yes").exit_code == 130
    assert f"'opendata-buffer status {url}' shows what still waits" in capfd.readouterr().err
    assert manifest_of(store).entry_count == 1


def test_a_topic_can_be_trimmed_by_time_or_to_the_latest_batch(
    url: str, store: MemoryStore
) -> None:
    first, _, third = topic_of(url, 3)
    fill(url, [b"a"], data_path_prefix=first)
    fill(url, [b"b"], [b"c"], data_path_prefix=third)
    result = run("trim", url, "--to", "1", "--yes")
    assert result.exit_code == 2
    assert "name one with --partition" in result.stderr
    ok("trim", url, "--to", "1", "--partition", third, "--yes")
    assert records_of(store, f"{third}/manifest") == [b"c"]
    out = ok("trim", url, "--to", "latest", "--yes").stdout
    assert f"{third}: deleted 1 batch; the queue begins at sequence 2" in out
    assert f"restore {url} --partition {third} " in out
    assert records_of(store, f"{first}/manifest") == []


# ---- a wrong data prefix, with data next to the folder of the manifest


DATA, FOLDER = "ingest/otel/logs/data", "ingest/otel/logs"
MANIFEST = ("--manifest-path", f"{FOLDER}/manifest")


def exported(store: MemoryStore, *records: bytes) -> None:
    """Create a queue in the layout of OpenTelemetry's exporter, which writes no marker."""
    entries = []
    for record in records:
        entries.append(NewEntry(batch_key(DATA, SystemRuntime().ulid())))
        store.put(entries[-1].location, encode_batch([record]))
        SystemRuntime().sleep(0.005)
    store.put(MANIFEST[1], Manifest.empty().append(entries).raw)


def hasten(store: MemoryStore, prefix: str = "ingest") -> None:
    """Make the grace period of the queue shorter than any command."""
    marker = json.loads(bytes_of(store, owner_key(prefix)))
    store.put(owner_key(prefix), json.dumps({**marker, "grace_period_ms": 1}).encode())
    SystemRuntime().sleep(0.005)


def claim_wrongly(url: str, prefix: str, manifest_path: str = "") -> None:
    """Claim a prefix like a release that did not check the locations."""
    config = QueueConfig(store=url, data_path_prefix=prefix, manifest_path=manifest_path)
    claim = claim_queue(MemoryStore.named(url.removeprefix("memory://")), config)
    claim.note(Manifest.empty())


def test_the_data_prefix_is_derived_from_the_locations_of_batches(
    url: str, store: MemoryStore
) -> None:
    exported(store, b"a", b"b", b"c")
    line = fails("consume", url, "--ack", *MANIFEST, "--data-path-prefix", FOLDER)
    assert f"Its batches lie in '{DATA}'" in line
    assert f"Its batches lie in '{DATA}'" in fails(
        "produce", url, *MANIFEST, "--data-path-prefix", "ingest"
    )
    assert not [each for each in store.list("").objects if each.key.endswith("_owner.json")]
    assert ok("consume", url, "--ack", *MANIFEST, "--max-batches", "2").stdout == "a\nb\n"
    hasten(store, DATA)
    assert json_of("gc", url, *MANIFEST)["deleted"] == 2
    store.put(MANIFEST[1], b"damaged")
    assert "problem: manifest" in run("fsck", url, *MANIFEST).stdout


def test_f23_locations_outside_the_prefix_are_not_followed(url: str, store: MemoryStore) -> None:
    location = "secret/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
    store.put(location, encode_batch([b"secret"]))
    store.put(MANIFEST[1], Manifest.empty().append([NewEntry(location)]).raw)
    assert "below the data prefix 'ingest'" in fails("consume", url, "--ack", *MANIFEST)


@pytest.mark.parametrize("wrong", [FOLDER, "ingest"])
def test_f7_a_marker_of_a_wrong_prefix_is_moved_and_keeps_the_id(
    url: str, store: MemoryStore, wrong: str
) -> None:
    exported(store, b"a", b"b")
    claim_wrongly(url, wrong, MANIFEST[1])
    before = json.loads(bytes_of(store, owner_key(wrong)))
    misplaced = (*MANIFEST, "--data-path-prefix", wrong)
    assert ok("consume", url, "--ack", *misplaced, "--max-batches", "1").stdout == "a\n"
    hasten(store, wrong)
    held = ok("gc", url, *misplaced).stdout
    assert f"nothing was deleted: no batch of the queue with manifest '{MANIFEST[1]}' lies" in held
    found = run("fsck", url, *misplaced)
    assert found.exit_code == 1
    (command,) = re.findall(r"'opendata-buffer (fsck [^']*--repair)'", found.stdout)
    assert f"'opendata-buffer {command}'" in fails("consume", url, "--ack", *MANIFEST)
    ok(*command.split(), "--yes")
    objects = [each.key for each in store.list("").objects]
    assert owner_key(wrong) not in objects
    assert [key for key in objects if key.startswith(f"{owner_key(wrong)}.wrong-")]
    assert json.loads(bytes_of(store, owner_key(DATA)))["id"] == before["id"]
    assert ok("consume", url, "--ack", *MANIFEST).stdout == "b\n"
    assert ok("gc", url, *MANIFEST)  # unless the collector of the consumer was faster
    assert not [each.key for each in store.list(DATA).objects if each.key.endswith(".batch")]


def test_f7_a_marker_of_a_queue_without_batches_in_its_prefix_is_replaced(
    url: str, store: MemoryStore
) -> None:
    exported(store, b"a")
    store.put("mistyped", Manifest.empty().raw)
    claim_wrongly(url, DATA, "mistyped")
    line = fails("consume", url, "--ack", *MANIFEST)
    (command,) = re.findall(r"'opendata-buffer (fsck [^']*--repair)'", line)
    ok(*command.split(), "--yes")
    assert ok("consume", url, "--ack", *MANIFEST).stdout == "a\n"


@pytest.mark.parametrize("state", ["queued", "lost", "read, noted by an older release"])
def test_f7_a_marker_of_another_active_queue_is_kept(
    url: str, store: MemoryStore, state: str
) -> None:
    theirs = {"data_path_prefix": DATA, "manifest_path": "theirs"}
    fill(url, [b"theirs"], **theirs)
    if state == "lost":
        store.delete_many(["theirs"])
    elif state != "queued":
        assert ok(
            "consume", url, "--ack", "--manifest-path", "theirs", "--data-path-prefix", DATA
        ).stdout
        marker = json.loads(bytes_of(store, owner_key(DATA)))
        del marker["acked_location"]
        store.put(owner_key(DATA), json.dumps(marker).encode())
    before = bytes_of(store, owner_key(DATA))
    exported(store, b"a")
    assert "belongs to the queue with manifest 'theirs'" in fails(
        "fsck", url, *MANIFEST, "--repair"
    )
    assert bytes_of(store, owner_key(DATA)) == before


# ---- gc


def test_gc_deletes_orphans(url: str, store: MemoryStore) -> None:
    # The collector deletes only objects that are older than the next batch and the clock by 1 ms.
    for record in (b"a", b"b"):
        fill(url, [record])
        SystemRuntime().sleep(0.005)
    gone = manifest_of(store).entries()[0].location
    ok("consume", url, "--ack", "--max-batches", "1")
    dry = ["gc", url, "--dry-run"]
    assert json_of(*dry)["waiting"] == 1  # too young
    hasten(store)
    before = store.list("").objects
    assert f"would delete {gone}\n" in ok(*dry).stdout
    found = json_of(*dry)
    assert found["delete"] == [{"key": gone, "size": 12}]
    assert (found["dry_run"], found["deleted"], found["referenced"]) == (True, 0, 1)
    assert store.list("").objects == before
    found = json_of("gc", url)
    assert (found["deleted"], found["failed"], found["dry_run"]) == (1, [], False)
    assert ok("fsck", url).exit_code == 0


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--grace-period-ms", "700000")])
def test_f4_gc_without_a_manifest_deletes_nothing_and_claims_nothing(
    url: str, store: MemoryStore, more: tuple[str, ...]
) -> None:
    location = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
    store.put(location, encode_batch([b"a"]))
    line = fails("gc", url, "--manifest-path", "typo", *more)
    assert "'typo'" in line
    assert [each.key for each in store.list("").objects] == [location]


def grace_of(store: MemoryStore, prefix: str = "ingest") -> int:
    found: int = json.loads(bytes_of(store, owner_key(prefix)))["grace_period_ms"]
    return found


def test_gc_changes_the_grace_period_and_asks_before_shortening_it(
    url: str, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    fill(url, [b"a"])
    assert "0:10:00" in ok("status", url).stdout
    ok("gc", url, "--grace-period-ms", "3600000")
    assert json_of("status", url)["grace_period_ms"] == grace_of(store) == 3_600_000
    line = fails("gc", url, "--grace-period-ms", "60000")
    assert "60,000 ms and not 3,600,000" in line
    assert "--yes" in line
    assert grace_of(store) == 3_600_000
    claim_for_writing(store, QueueConfig(store=url), grace_ms=60_000)
    (said,) = re.findall(r"'opendata-buffer (gc [^']*)'", caplog.text)
    ok(*said.split(), "--yes")
    assert grace_of(store) == 60_000
    result = run("gc", url, "--grace-period-ms", "70000", "--dry-run")
    assert (result.exit_code, grace_of(store)) == (2, 60_000)


# ---- the page "Recover a queue", followed with the commands that it names


def everything_in(store: MemoryStore) -> dict[str, bytes]:
    return {each.key: bytes_of(store, each.key) for each in store.list("").objects}


def restore(store: MemoryStore, objects: dict[str, bytes], *but: str) -> None:
    """Restore objects as bucket versioning does."""
    for key, data in objects.items():
        if key not in but:
            store.put(key, data)


def three_of_which_one_is_read(url: str) -> str:
    """Create a queue in use, and return the saved position of its reader."""
    fill(url, [b"a"], [b"b"], [b"c"])
    with Consumer(ConsumerConfig(store=url)) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        consumer.ack_through(batch.sequence)
        return str(consumer.position)


def test_a_lost_manifest_of_a_partition_is_not_an_empty_partition(
    url: str, store: MemoryStore
) -> None:
    first, second = topic_of(url, 2)
    assert json_of("status", url)["queue_length"] == 0  # never written
    fill(url, [b"a"], data_path_prefix=first)
    fill(url, [b"b"], [b"c"], data_path_prefix=second)
    store.delete_many([f"{second}/manifest"])
    for command in (
        ("status", url), ("status", url, "--max-backlog", "9"),
        ("trim", url, "--to", "latest", "--dry-run"),
        ("consume", url), ("consume", url, "--ack"), ("gc", url),
    ):  # fmt: skip
        result = run(*command)
        assert result.exit_code == 1, command
        line = result.stderr.splitlines()[-1]
        assert f"manifest '{second}/manifest' is gone" in line, command
        assert f"fsck {url} --partition {second} --repair'" in line, command
    assert f"{second}: problem: manifest" in run("fsck", url).stdout
    ok("fsck", url, "--repair", "--yes")
    assert sorted(ok("consume", url, "--ack").stdout.split()) == ["a", "b", "c"]


def test_a_lost_manifest_is_recovered_as_the_page_says(url: str, store: MemoryStore) -> None:
    position = three_of_which_one_is_read(url)
    store.delete_many(["ingest/manifest"])
    for command in (
        ("status", url), ("consume", url), ("consume", url, "--ack"),
        ("produce", url), ("gc", url), ("trim", url, "--to", "latest"),
        ("skip", url, "0"),
    ):  # fmt: skip
        assert f"'opendata-buffer fsck {url} --repair'" in fails(*command), command
    assert len(store.list("ingest/0").objects) == 3
    result = run("fsck", url)
    assert result.exit_code == 1
    assert "problem: manifest 'ingest/manifest'" in result.stdout
    assert "note: 3 batches that no entry names" in result.stdout
    would = ok("fsck", url, "--repair", "--dry-run").stdout
    assert would.count("note: unread batch 'ingest/") == 3
    assert "repair: manifest 'ingest/manifest' is rebuilt from the batches" in would
    assert not store.list("ingest/manifest").objects
    assert "failOnDataLoss=false" in ok("fsck", url, "--repair", "--yes").stdout
    before = store.list("").objects
    ok("fsck", url, "--repair", "--yes")
    assert store.list("").objects == before  # A sound manifest is kept.
    ok("fsck", url)
    assert set(records_of(store)) >= {b"b", b"c"}
    with pytest.raises(DataLoss, match="is needed but manifest"):
        Consumer(ConsumerConfig(store=url), position)
    fill(url, [b"d"])
    out = ok("consume", url, "--ack").stdout.splitlines()
    assert {"b", "c"} <= set(out)
    assert out[-1] == "d"


def test_an_old_manifest_is_recovered_as_the_page_says(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    yesterday = manifest_of(store).raw
    fill(url, [b"b"], [b"c"])
    store.put("ingest/manifest", yesterday)
    assert "went backwards" in fails("consume", url, "--ack")
    for options in ((), ("--max-lag", "600"), ("--json",)):
        error = fails("status", url, *options).removeprefix("error: ")
        assert error.startswith("producers and consumers are refused: manifest 'ingest/manifest'")
        assert f"fsck {url} --repair'" in error
    assert json.loads(run("status", url, "--json").stdout)["notes"] == [error]
    ok("fsck", url, "--repair", "--yes")
    assert json_of("status", url)["notes"] == []
    # Batches are ordered by name, and names of one millisecond have no order.
    assert sorted(records_of(store)) == [b"a", b"b", b"c"]
    assert any(each.key.startswith("ingest/manifest.broken-") for each in store.list("").objects)


def test_a_deleted_prefix_is_recovered_with_and_without_its_manifest(
    url: str, store: MemoryStore
) -> None:
    three_of_which_one_is_read(url)
    versions = everything_in(store)
    store.delete_many(versions)
    assert "there is no queue" in fails("fsck", url)
    assert "there is no queue" in fails("consume", url, "--ack")
    assert store.list("").objects == ()
    restore(store, versions)
    ok("fsck", url)
    assert records_of(store) == [b"b", b"c"]
    store.delete_many(versions)
    restore(store, versions, "ingest/manifest", "ingest/_owner.json")
    ok("fsck", url, "--repair", "--yes")
    # The read position is lost, so batches are repeated rather than lost.
    assert sorted(records_of(store)) == [b"a", b"b", b"c"]
    ok("fsck", url)


def test_a_lost_description_of_a_topic_is_recovered_as_the_page_says(
    url: str, store: MemoryStore
) -> None:
    topic_of(url, 2)
    fill(url, [b"a"], data_path_prefix="p-00000-04pn")
    store.delete_many(["_topic.json"])
    for command in (
        ("status", url), ("consume", url, "--ack"), ("produce", url), ("gc", url),
    ):  # fmt: skip
        assert "description '_topic.json' is gone" in fails(*command), command
    assert not store.list("ingest").objects
    partitions = [{"name": each, "state": "active"} for each in ("p-00000-04pn", "p-00001-05mv")]
    again = {"version": 1, "id": "written again", "next": 100, "partitions": partitions}
    store.put("_topic.json", json.dumps(again).encode())
    fill(url, [b"b"], data_path_prefix="p-00001-05mv")
    assert sorted(ok("consume", url, "--ack").stdout.split()) == ["a", "b"]
    ok("topic", "expand", url, "--partitions", "3")
    assert "p-00100-" in ok("status", url).stdout


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        (b'{"hello": [1]}', "'ingest/_owner.json' in memory://"),
        (b'{"version": 1, "manifest": "other"}', "belongs to the queue with manifest"),
    ],
)
def test_status_shows_a_marker_that_makes_every_process_fail(
    url: str, store: MemoryStore, marker: bytes, says: str
) -> None:
    fill(url, [b"a"])
    store.put("ingest/_owner.json", marker)
    (note,) = json.loads(run("status", url, "--json").stdout)["notes"]
    assert says in note
    assert note.removeprefix("producers and consumers are refused: ")[:30] in fails(
        "consume", url, "--ack"
    )
    assert note in fails("status", url, "--max-backlog", "9")


def test_a_deleted_prefix_without_a_backup_is_recreated_as_the_page_says(
    url: str, store: MemoryStore
) -> None:
    position = three_of_which_one_is_read(url)
    store.delete_many(everything_in(store))
    fill(url, [b"new 0"], [b"new 1"])
    with pytest.raises(QueueReset, match="belongs to queue"):
        Consumer(ConsumerConfig(store=url), position)
    assert ok("consume", url, "--ack").stdout == "new 0\nnew 1\n"


def test_batches_expired_by_a_lifecycle_rule_are_skipped_as_the_page_says(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    versions = everything_in(store)
    expired = [entry.location for entry in manifest_of(store).entries()[:2]]
    store.delete_many(expired)
    result = run("fsck", url)
    assert [f"sequence {n} " in result.stdout for n in range(3)] == [True, True, False]
    assert result.stderr.startswith("error: 2 problems in the queue")
    assert "does not exist" in fails("consume", url, "--ack")
    # With bucket versioning, nothing is lost.
    restore(store, {expired[0]: versions[expired[0]]})
    ok("fsck", url, "--repair", "--yes")
    (report,) = json_of("status", url)["quarantine"]
    assert (report["sequence"], report["copied_bytes"]) == (1, None)
    assert report["metadata"][0]["ingestion_time_ms"] > 0
    assert ok("consume", url, "--ack").stdout == "a\nc\n"


def test_a_lost_marker_is_created_again(url: str, store: MemoryStore) -> None:
    position = three_of_which_one_is_read(url)
    marker = json.loads(everything_in(store)["ingest/_owner.json"])
    store.delete_many(["ingest/_owner.json"])
    fill(url, [b"d"])
    with pytest.raises(QueueReset, match="write the old id back"):
        Consumer(ConsumerConfig(store=url), position)
    assert position.split(":")[0] == marker["id"]
    now = json.loads(everything_in(store)["ingest/_owner.json"])
    store.put("ingest/_owner.json", json.dumps({**now, "id": marker["id"]}).encode())
    with Consumer(ConsumerConfig(store=url), position) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        assert batch.entries == [b"b"]
