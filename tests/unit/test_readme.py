"""What the README says is so: its examples run, its options and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_sink.options import SINK_OPTIONS
from buffer_source.options import SOURCE_OPTIONS
from opendata_buffer import errors
from opendata_buffer.cli.commands import cli
from opendata_buffer.option_reader import STORAGE_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.split(r"^#+ ", README.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


def option_table(title: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", section(title), flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_options_of_the_source_are_those_of_the_code() -> None:
    columns = {"value", "metadata", "sequence", "index", "ingestion_time", "location"}
    documented = option_table("Reading a stream") - columns
    # Named in the text: where the store is, and what only a batch read has.
    elsewhere = {"path", "endingOffsets", "includeLocation"}
    assert documented == set(SOURCE_OPTIONS) - elsewhere
    assert "`endingOffsets`" in section("Reading what is queued")


def test_the_options_of_the_sink_are_those_of_the_code() -> None:
    assert option_table("Writing") == set(SINK_OPTIONS) - {"path"}
    assert set(STORAGE_OPTIONS) <= set(SINK_OPTIONS)


def test_the_errors_it_explains_exist() -> None:
    table = section("When something is wrong")
    named = set(re.findall(r"`([A-Z][a-z]+[A-Za-z]+)`", table))
    assert len(named) > 5
    assert named <= set(errors.__all__)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_pages_of_decisions_are_listed_and_their_links_lead_somewhere() -> None:
    pages = ROOT / "core" / "decisions"
    index = (pages / "README.md").read_text(encoding="utf-8")
    for page in pages.glob("0*.md"):
        assert f"]({page.name})" in index
    for page in pages.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (pages / link).exists(), (page, link)


def test_python_compiles() -> None:
    assert len(BLOCKS) > 5
    for block in BLOCKS:
        compile(block.replace("%pip", "# %pip"), "README.md", "exec")


def test_the_library_s_example_runs(tmp_path: Path) -> None:
    produce, consume = (block for block in BLOCKS if "from opendata_buffer import" in block)
    saved: list[Any] = []
    for block in (produce, consume):
        code = block.replace("s3://bucket/orders", str(tmp_path))
        exec(code, {"save": lambda entries, sequence: saved.append((entries, sequence))})
    assert saved == [([b'{"id": 1}', b'{"id": 2}'], 0)]


def shell_lines() -> list[str]:
    block = section("From a shell").split("```sh\n")[1].split("```")[0]
    return [line.split("   #")[0].strip() for line in block.splitlines()]


@pytest.mark.parametrize("line", shell_lines())
def test_commands_have_these_names_and_options(line: str) -> None:
    words = line.split("opendata-buffer", 1)[1].split()
    name = " ".join(words[: 2 if words[0] in ("manifest", "batch") else 1])
    options = [word for word in words if word.startswith("--")]
    command: Any = cli
    for part in name.split():
        command = command.commands[part]
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(options) <= known


def test_the_shell_s_example_runs(tmp_path: Path) -> None:
    def run(line: str, text: str = "") -> str:
        words = line.replace("/tmp/queue", str(tmp_path)).split()[1:]
        done = subprocess.run(
            [sys.executable, "-m", "opendata_buffer", *words],
            input=text, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    numbers = "".join(f"{n}\n" for n in range(1, 1001))
    lines = [line for line in shell_lines() if "/tmp/queue" in line and "batch dump" not in line]
    assert '"records": 1000' in run(lines[0].split("| ")[1], numbers)
    for line in lines[1:]:
        out = run(line)
        if " consume " in line:
            assert out == numbers
