"""``copy``."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from opendata_buffer.cli.commands import cli
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import Ticks, fails, fill, ok, records_of, run, topic_of


@pytest.fixture
def target(name: str) -> str:
    return f"memory://{name}-to"


@pytest.fixture
def there(name: str) -> MemoryStore:
    return MemoryStore.named(f"{name}-to")


def test_copy_says_what_it_copied_and_how_to_let_it_leave(
    url: str, target: str, store: MemoryStore, there: MemoryStore
) -> None:
    fill(url, [b"a", b"b"], [b"c"])
    result = ok("copy", url, target)
    assert json.loads(result.stdout) == {
        "batches": 2, "stored_bytes": 17 + 12, "lost": 0, "next": {"ingest": 2},
    }  # fmt: skip
    assert f"'opendata-buffer seek {url} --to 2' lets it leave the source" in result.stderr
    assert records_of(there) == records_of(store) == [b"a", b"b", b"c"]
    again = ok("copy", url, target)
    assert json.loads(again.stdout)["batches"] == 0
    assert f"'opendata-buffer seek {url} --to 2' lets it leave the source" in again.stderr
    assert ok("consume", target).stdout == "a\nb\nc\n"


def test_copy_to_another_prefix_of_the_same_store(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], data_path_prefix="x")
    ok("copy", url, url, "--data-path-prefix", "x", "--to-data-path-prefix", "y")
    assert records_of(store, "y/manifest") == [b"a"]
    line = fails("copy", url, url, "--data-path-prefix", "x", "--to-data-path-prefix", "x")
    assert "source and target are the same queue" in line


def test_copy_follows_until_interrupted_and_says_what_it_copied(
    url: str, target: str, there: MemoryStore, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(url, [b"a"])
    result = CliRunner().invoke(
        cli, ["copy", url, target, "--follow", "--poll-interval-ms", "250"], obj=Ticks(2)
    )
    assert result.exit_code == 130
    assert json.loads(capfd.readouterr().err)["batches"] == 1
    assert records_of(there) == [b"a"]


def test_copy_of_a_mistyped_source_makes_nothing(url: str, target: str, there: MemoryStore) -> None:
    assert "there is no queue" in fails("copy", url, target)
    assert there.list("").objects == ()


def test_copy_of_what_was_taken_names_the_option(url: str, target: str) -> None:
    fill(url, [b"a"], [b"b"])
    ok("copy", url, target)
    fill(url, [b"c"])
    ok("consume", url)
    assert "--allow-data-loss" in fails("copy", url, target)
    result = ok("copy", url, target, "--allow-data-loss")
    assert json.loads(result.stdout)["lost"] == 1


def test_a_topic_is_copied_to_a_topic_with_as_many_partitions(
    url: str, target: str, there: MemoryStore
) -> None:
    first, _, third = topic_of(url, 3)
    fill(url, [b"a"], data_path_prefix=first)
    fill(url, [b"b"], [b"c"], data_path_prefix=third)
    result = run("copy", url, target)
    assert result.exit_code == 2
    assert f"opendata-buffer topic create {target} --partitions 3'" in result.stderr
    names = topic_of(target, 3)
    found = json.loads(ok("copy", url, target).stdout)
    assert (found["batches"], found["next"]) == (3, {first: 1, third: 2})
    assert records_of(there, f"{names[2]}/manifest") == [b"b", b"c"]
    ok("topic", "expand", target, "--partitions", "4")
    result = run("copy", url, target)
    assert result.exit_code == 2
    assert "has 3 partitions, the one at" in result.stderr
    ok("copy", url, target, "--partition", third, "--to-partition", "3")
    assert run("copy", url, target, "--partition", third).exit_code == 2
