"""``opendata-buffer top``; in a terminal, with Ctrl-C, in tests/process."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from opendata_buffer.cli.commands import cli
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.cli.shell import fails, fill, ok


def test_once_shows_one_frame_with_rates_and_ends(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    said = ok("top", url, "--once", "--interval-ms", "1").stdout
    assert f"{url}  queue\n" in said
    assert "2 batches wait" in said
    assert "in 0.0/s" in said
    assert said.count("batches wait") == 1


def test_a_topic_is_shown_by_partition_and_one_partition_alone(url: str) -> None:
    ok("topic", "create", url, "--partitions", "3")
    (first, second, third) = (
        each["name"]
        for each in json.loads(ok("topic", "describe", url, "--json").stdout)["partitions"]
    )
    fill(url, [b"a"], data_path_prefix=second)
    found = json.loads(ok("top", url, "--once", "--json", "--interval-ms", "1").stdout)
    backlogs = {each["name"]: each["backlog"] for each in found["queues"]}
    assert backlogs == {first: 0, second: 1, third: 0}
    assert found["backlog"] == 1
    assert found["failure"] is None
    assert found["queues"][0]["arriving_per_second"] == 0.0
    alone = json.loads(
        ok("top", url, "--partition", second, "--once", "--json", "--interval-ms", "1").stdout
    )
    assert [each["name"] for each in alone["queues"]] == [second]


def test_a_queue_that_is_not_there_is_an_error_and_not_waited_for(url: str) -> None:
    assert "there is no queue" in fails("top", url)


class Breaking(ManualRuntime):
    """Breaks the queue while it is watched, mends it, and interrupts."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store
        self._manifest = b""
        self._sleeps = 0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if seconds != 7.0:
            return  # a retry
        self._sleeps += 1
        if self._sleeps == 1:
            self._manifest = self._store.get("ingest/manifest").data  # type: ignore[union-attr]
            self._store.put("ingest/manifest", b"broken")
        elif self._sleeps == 3:
            self._store.put("ingest/manifest", self._manifest)
        elif self._sleeps == 4:
            raise KeyboardInterrupt


def watched(url: str, runtime: ManualRuntime, *arguments: str) -> Result:
    return CliRunner().invoke(
        cli, ["top", url, "--interval-ms", "7000", *arguments], obj=runtime, catch_exceptions=False
    )


def test_it_goes_on_while_the_queue_cannot_be_read_and_ends_with_ctrl_c(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"])
    result = watched(url, Breaking(store), "--json")
    assert result.exit_code == 130
    first, second, third = map(json.loads, result.stdout.splitlines())
    assert "manifest" in first["failure"]
    assert first["backlog"] == second["backlog"] == 1, "what was last seen"
    assert third["failure"] is None
    assert result.stderr == ""


def test_frames_follow_each_other_where_there_is_no_terminal(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    result = watched(url, Breaking(store))
    assert result.exit_code == 130
    assert result.stdout.count("1 batch waits") == 3
    assert result.stdout.count("the store fails since") == 2
