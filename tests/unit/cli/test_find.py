"""``list``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tests.unit.cli.shell import fill, ok, topic_of


def test_list_prints_what_other_commands_take(tmp_path: Path) -> None:
    fill(f"{tmp_path}/orders", [b"a"], [b"b"])
    fill(f"{tmp_path}/with space", [b"c"], data_path_prefix="p")
    topic_of(f"{tmp_path}/t", 2)
    lines = ok("list", str(tmp_path)).stdout.splitlines()
    assert lines[0] == f"topic  file://{tmp_path}/t  2 partitions, 0 batches"
    assert lines[1].startswith(f"queue  file://{tmp_path}/orders  2 batches, the oldest ")
    for line in lines[1:]:
        words = shlex.split(line.split("  ")[1])
        assert json.loads(ok("status", *words, "--json").stdout)["queue_length"]
    found = [json.loads(line) for line in ok("list", str(tmp_path), "--json").stdout.splitlines()]
    assert [each["kind"] for each in found] == ["topic", "queue", "queue"]
    assert found[2]["words"] == [f"file://{tmp_path}/with space", "--data-path-prefix", "p"]


def test_nothing_is_told_as_nothing(tmp_path: Path) -> None:
    result = ok("list", str(tmp_path / "typo"))
    assert (result.stdout, "no queue and no topic below" in result.stderr) == ("", True)
    assert list(tmp_path.iterdir()) == []
