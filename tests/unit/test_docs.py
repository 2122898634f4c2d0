"""The README and the documentation are true: examples run, and options and links exist."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import MISSING, fields
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import click
import pyarrow as pa
import pytest

import opendata_buffer
from buffer_sink.options import SINK_OPTIONS, SinkOptions
from buffer_source.options import SOURCE_OPTIONS, SourceOptions
from opendata_buffer import (
    AckIntents,
    Compression,
    Consumer,
    ConsumerConfig,
    Producer,
    ProducerConfig,
    Publisher,
    QueueConfig,
    StoreOptions,
    Topic,
    TopicConsumer,
    TopicProducer,
    WorkerConfig,
    errors,
    fetch_many,
)
from opendata_buffer.cli.main import cli
from opendata_buffer.consumer.loop import BatchLoop
from opendata_buffer.formats import MIB
from opendata_buffer.metrics import EXPORTED, TABLE
from opendata_buffer.option_reader import INSTEAD, STORAGE_OPTIONS, OptionReader
from tests.unit.cli.shell import commands, ok

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "core").rglob("*.md")])


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """Return the text below a heading, up to the next one."""
    return re.split(r"^#+ ", text_of(page).split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


def blocks(page: str | Path, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def first_column(table: str) -> set[str]:
    rows = re.findall(r"^\| (?:<a .*?</a>)?(`.*?) \|", table, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_query_that_is_shown_has_a_name() -> None:
    """Without a name, Spark's UI and a listener cannot tell queries apart."""
    programs = {id_of(page): "\n".join(blocks(page, "python")) for page in PAGES}
    for folder in ("examples", "notebooks"):
        programs |= {id_of(path): path.read_text("utf-8") for path in (ROOT / folder).rglob("*.py")}
    shown = {name: code for name, code in programs.items() if ".writeStream" in code}
    assert len(shown) >= 8
    nameless = {
        name for name, code in shown.items() if code.count(".writeStream") > code.count("queryName")
    }
    assert nameless == set()


# ---- options, errors, metrics


OPTIONS = "docs/reference/options.md"


def test_the_options_of_source_and_sink_are_those_of_the_code() -> None:
    titles = ("Storage", "Streaming source", "Batch source", "Typed rows", "Sink")
    storage, stream, batch, typed, sink = (first_column(section(OPTIONS, each)) for each in titles)
    assert storage == set(STORAGE_OPTIONS)
    assert storage | stream | batch | typed == set(SOURCE_OPTIONS)
    assert storage | sink | {"valueFormat"} == set(SINK_OPTIONS)
    anchors = re.findall(r'^\| <a id="(\w+)"></a>`(\w+)`', text_of(OPTIONS), flags=re.MULTILINE)
    assert {name for name, option in anchors if name == option} == {*SOURCE_OPTIONS, *SINK_OPTIONS}
    assert len(anchors) <= 39, "each option is listed once"
    refused = first_column(section(OPTIONS, "Names that are refused"))
    assert refused - {"kafka.bootstrap.servers", "kafka."} == set(INSTEAD)


def stated_defaults(title: str) -> dict[str, str]:
    """Return the default of each option in a table, without prose."""
    stated = {}
    for name, value in re.findall(r"</a>`(\w+)` \| (.*?) \|", section(OPTIONS, title)):
        if re.fullmatch(r"`\S+`|\d+", value):
            stated[name] = value.strip("`")
    return stated


def test_defaults_are_those_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, str] = {}

    def recorded(kind: str) -> None:
        really = getattr(OptionReader, kind)

        def read(self: OptionReader, name: str, *rest: Any, **least: Any) -> Any:
            found = really(self, name, *rest, **least)
            used[name] = str(found).lower() if isinstance(found, bool) else str(found)
            return found

        monkeypatch.setattr(OptionReader, kind, read)

    for kind in ("integer", "boolean", "choice", "raw"):
        recorded(kind)
    given = {"path": str(tmp_path)}
    for title, parse in (
        ("Streaming source", lambda: SourceOptions.from_spark(given)),
        ("Typed rows", lambda: SourceOptions.from_spark({**given, "valueFormat": "csv"})),
        ("Sink", lambda: SinkOptions.for_stream(given)),
    ):
        used.clear()
        parse()
        stated = {name: each for name, each in stated_defaults(title).items() if name in used}
        stated.pop("valueFormat", None)
        assert len(stated) >= 1
        assert stated == {name: used[name] for name in stated}


def test_the_guide_s_short_tables_of_options_repeat_the_reference() -> None:
    reference = dict(re.findall(r"</a>`(\w+)` \| (.*?) \|", text_of(OPTIONS)))
    for title, known in (("Source options", SOURCE_OPTIONS), ("Sink options", SINK_OPTIONS)):
        table = section("docs/how-to/spark.md", title)
        short = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
        assert len(short) >= 5
        assert short.keys() <= set(known)
        short.pop("minPartitions", None)  # the reference also says what register(spark) changes
        assert short == {name: reference[name] for name in short}


def test_exactly_the_existing_errors_are_explained() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+[A-Za-z]+)`", text_of("docs/reference/errors.md")))
    groups = {"OpenDataBufferError", "StorageError", "CorruptData", "PoisonBatch"}
    assert named & set(errors.__all__) >= set(errors.__all__) - groups
    assert named - set(errors.__all__) <= {"Transaction"}


def messages() -> str:
    """Return all texts in the sources, a line each, with an ellipsis for each value in them."""
    found = []
    for path in (
        p for top in ("core", "buffer_source", "buffer_sink") for p in (ROOT / top).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def test_the_headings_of_troubleshooting_are_messages_of_the_code() -> None:
    page = text_of("docs/reference/errors.md").split("## Messages of Spark")[0]
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert len(headings) > 18
    text = messages()
    for heading in headings:
        parts = [re.escape(part.strip()) for part in heading.split("…")]
        assert re.search(".*".join(parts), text), heading


def test_every_metric_is_explained_with_its_kind_unit_and_attributes() -> None:
    rows = re.findall(
        r"^\| `(buffer\.\w+)` \| (\w+) \| (.*?) \| (.*?) \|",
        text_of("docs/reference/metrics.md").split("## The exporter")[0],
        flags=re.MULTILINE,
    )
    assert rows == [
        (row.name, row.kind, row.unit.strip("{}"), ", ".join(f"`{name}`" for name in row.labels))
        for row in TABLE
    ]


def test_every_gauge_of_the_exporter_is_explained_with_its_unit_and_labels() -> None:
    rows = re.findall(
        r"^\| `(buffer\.\w+)` \| (.*?) \| (.*?) \| (.*?) \|$",
        section("docs/reference/metrics.md", "The exporter"),
        flags=re.MULTILINE,
    )
    assert rows == [
        (row.name, row.unit.strip("{}"), ", ".join(f"`{name}`" for name in row.labels), row.meaning)
        for row in EXPORTED.values()
    ]


def test_the_python_api_shows_every_public_name() -> None:
    pages = "".join(text_of(id_of(page)) for page in PAGES if page.match("reference/api*.md"))
    shown = {name.split(".")[-1] for name in re.findall(r"^::: ([\w.]+)$", pages, re.M)}
    assert "errors" in shown
    assert set(opendata_buffer.__all__) - set(errors.__all__) <= shown


COMMANDS = "docs/how-to/command-line.md"


def test_every_command_is_listed_with_its_arguments_and_options() -> None:
    rows = re.findall(r"^\| `(.*?)` \| .* \| (.*)\|$", section(COMMANDS, "Commands"), re.MULTILINE)
    listed = {words.split(" STORE")[0]: set(re.findall(r"--[\w-]+", text)) for words, text in rows}
    (common,) = re.findall(r"^All but .*?\n\n", text_of(COMMANDS), re.MULTILINE | re.DOTALL)
    shared = set(re.findall(r"--[\w-]+", common))
    found = {
        words: {
            (each.secondary_opts or each.opts)[-1]
            for each in command.params
            if isinstance(each, click.Option)
        }
        for words, command in commands()
        if not isinstance(command, click.Group)
    }
    assert listed.keys() == found.keys()
    for words, options in found.items():
        assert options - shared - {"--verbose"} == listed[words], words
    assert shared == set.union(*found.values()) - {"--verbose"} - set.union(*listed.values())
    for words, _ in rows:
        name, arguments = words.split(" STORE")
        command: Any = cli
        for word in name.split():
            command = command.get_command(click.Context(command), word)
        known = [each for each in command.params if isinstance(each, click.Argument)]
        assert len(arguments.removeprefix("...").split()) == len(known) - 1, words


CONFIGURATION = "docs/reference/api-configuration.md"


@pytest.mark.parametrize(
    ("title", "made", "base"),
    [
        ("Every queue", QueueConfig, None),
        ("`ProducerConfig`", ProducerConfig, QueueConfig),
        ("`ConsumerConfig`", ConsumerConfig, QueueConfig),
        ("`WorkerConfig`", WorkerConfig, ConsumerConfig),
        ("How to reach a store", StoreOptions, None),
    ],
)
def test_every_setting_is_listed_with_its_default(title: str, made: Any, base: Any) -> None:
    text = section(CONFIGURATION, title)
    inherited = {each.name for each in fields(base)} if base else set()
    defaults = {each.name: each.default for each in fields(made) if each.name not in inherited}
    if made is StoreOptions:
        for name in STORAGE_OPTIONS:
            defaults.pop(re.sub("([A-Z])", r"_\1", name).lower(), None)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*?) ?\|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(defaults)
    for name, stated, _ in rows:
        default = defaults[name]
        if isinstance(default, int) and not isinstance(default, bool | Compression):
            number = int(stated.split()[0].replace(",", ""))
            assert number * (MIB if stated.endswith(" MiB") else 1) == default, name
        elif default not in (None, "", MISSING):
            text = default.name.lower() if isinstance(default, Compression) else str(default)
            assert stated == f"`{text}`", name


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/spark.md"])
def test_the_first_example_in_spark_is_followed_by_a_warning_that_reading_removes_records(
    page: str,
) -> None:
    below = text_of(page).split(".load(")[1].split("```")[1].lstrip()
    bold = below.split("**")[1]
    assert bold.startswith("Reading a queue removes its records")
    assert "opendata-buffer readers enable s3://bucket/orders --retention 7d" in bold


def test_the_documentation_is_short() -> None:
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sum(len(page.read_text("utf-8").split()) for page in pages) <= 26_300


def test_the_readme_is_short_and_no_page_installs_from_an_index() -> None:
    assert len(text_of("README.md").split("## Documentation")[0].split()) <= 1_000
    for page in (each for each in PAGES if "decisions" not in each.parts):
        assert not re.search(r"pip install [^\n]*opendata-buffer", page.read_text("utf-8")), page


# ---- pages and links


THREATS = ROOT / "docs" / "explanation" / "threat-model.md"


def slug_of(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site create it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


OTHER_PAGES = [
    page
    for folder in (".github", "benchmarks", "examples", "tests")
    for page in sorted((ROOT / folder).rglob("*.md"))
]
"""Pages that are read where the repository is browsed, and are not on the site."""


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=id_of)
def test_links_have_existing_targets(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            shown = target.read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", shown, re.MULTILINE)
            anchors = {slug_of(heading) for heading in headings}
            assert anchor in anchors | set(re.findall(r'<a id="(\w+)">', shown)), link


DECISIONS = sorted((ROOT / "core" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("page", [*DECISIONS, THREATS], ids=id_of)
def test_decisions_and_threats_name_tests_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tested = text if page == THREATS else text.split("## Tested by")[1]
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tested)
    assert named
    for path, test in named:
        assert f"def {test}(" in text_of(path), f"{path}::{test}"


def test_each_threat_has_a_test() -> None:
    _, table = THREATS.read_text(encoding="utf-8").split("## Who can do what")
    rows = [each for each in table.split("\n## ")[0].splitlines() if each.startswith("| ")][1:]
    assert len(rows) > 8
    for row in rows:
        assert "`tests/" in row or "the store's own permissions" in row, row


# ---- programs in the text


PYTHON = [
    pytest.param(page, block, id=f"{id_of(page)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
]


@pytest.mark.parametrize(("page", "block"), PYTHON)
def test_python_compiles(page: Path, block: str) -> None:
    assert compile(block.replace("%pip", "# %pip"), str(page), "exec").co_code


def run_here(code: str, tmp_path: Path, **names: Any) -> None:
    for store in ("s3://bucket/orders", "/tmp/first-queue", "/tmp/orders"):
        code = code.replace(store, str(tmp_path))
    exec(code, names)


@pytest.fixture(autouse=True)
def loops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the loops of a page that wait for the next batch when the queue is empty."""
    monkeypatch.setattr(BatchLoop, "__iter__", lambda consumer: iter(consumer.next_batch, None))


def steps(page: str) -> Iterator[tuple[str, str]]:
    """Yield the runnable blocks of a page in order, with the output that is shown below each."""
    found = re.findall(r"^```(python|sh|text)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)
    for (language, block), (below, output) in pairwise([*found, ("", "")]):
        if language == "sh" and "/tmp/" in block:
            yield block, output if below == "text" else ""


def as_shown(output: str) -> str:
    """Remove times, sizes, and column widths, which differ from run to run."""
    return re.sub(r"[ \d:]+", " ", re.sub(r" +$", "", output, flags=re.M)).strip()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a path as short as those on the pages, because lines wrap at the terminal's width."""
    with TemporaryDirectory(prefix="q", dir="/tmp") as made:
        yield Path(made) / "q"


@pytest.mark.parametrize(
    "page", ["docs/tutorial/first-queue.md", "docs/how-to/readers-and-retention.md"]
)
def test_commands_print_the_output_on_the_page(page: str, short_path: Path) -> None:
    if "tutorial" in page:
        run_here(blocks(page, "python")[0], short_path)
    shown = 0
    for block, output in steps(page):
        printed = ""
        for line in block.splitlines():
            words = re.sub(r"/tmp/[\w-]+", str(short_path), line.split("| ")[-1]).split()[1:]
            numbers = "".join(f"{n}\n" for n in range(1, 6)) if line.startswith("seq 5") else ""
            done = ok(*words, stdin=numbers.encode())
            printed += done.stdout + done.stderr
        if output:
            shown += 1
            printed = printed.replace(str(short_path), "/tmp/first-queue")
            assert as_shown(printed) == as_shown(output)
    assert shown >= 2


def test_the_readme_s_examples_run_as_printed_and_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``tests/spark/test_examples.py`` runs the one in Spark."""
    produce, in_spark, consume = blocks("README.md", "python")
    assert "pyspark" in in_spark
    run_here(produce, tmp_path)
    assert capsys.readouterr().out.startswith("Durable(sequence=0, location='ingest/")
    run_here(consume, tmp_path)
    assert (
        capsys.readouterr().out
        == """\
b'{"id": 1}' b'till-7'
b'{"id": 2}' b'till-7'
"""
    )


def test_the_example_of_a_service_runs(tmp_path: Path) -> None:
    page = "docs/how-to/python-service.md"
    produce, consume = (b for b in blocks(page, "python") if "from opendata_buffer import" in b)
    saved: list[tuple[Any, ...]] = []

    def save(*fields: Any) -> None:
        saved.append(fields[:2])

    run_here(produce, tmp_path)
    run_here(consume, tmp_path, write=save)
    assert saved == [(b'{"id": 1}', b"till-7"), (b'{"id": 2}', b"till-7")]


def test_the_tutorial_s_first_half_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    produce, consume, _ = blocks("docs/tutorial/first-queue.md", "python")
    run_here(produce, tmp_path)
    assert capsys.readouterr().out.startswith("Durable(sequence=0, location='ingest/")
    run_here(consume, tmp_path)
    run_here(consume, tmp_path)  # the second run delivers nothing
    assert capsys.readouterr().out == """0 [b'{"id": 1}', b'{"id": 2}']\n"""


def test_the_example_of_a_test_runs(tmp_path: Path) -> None:
    (block,) = blocks("docs/how-to/test-your-code.md", "python")
    assert "\nassert " in block or "    assert " in block
    run_here(block, tmp_path)


def test_records_come_one_by_one_and_from_asyncio_as_the_page_about_services_says(
    tmp_path: Path,
) -> None:
    _, send, serve, _, start, seek, once, service, many = blocks(
        "docs/how-to/python-service.md", "python"
    )
    names: dict[str, Any] = {"records": [b"a", b"b"]}
    with Producer(ProducerConfig(store=str(tmp_path))) as names["producer"]:
        exec(send, names)
        assert names["handle"].result().sequence == 0
        exec(serve, names)
        assert asyncio.run(names["answer"](b"c")) == 1
    exec(service, {"Consumer": Consumer})
    with Consumer(str(tmp_path)) as consumer:
        found: list[Any] = []
        exec(many, {"consumer": consumer, "fetch_many": fetch_many, "write": found.append})
        assert [each.to_pylist() for each in found] == [[b"a", b"b"], [b"c"]]
    with Producer(str(tmp_path)) as producer:
        producer.produce([b"d"])
    saved: list[Any] = [None]
    written: list[Any] = []
    tools = {"load": lambda: saved[-1], "save": saved.append, "write": written.extend}
    tools |= {"Consumer": Consumer, "database": SimpleNamespace(transaction=nullcontext)}
    for _ in range(2):
        run_here(once, tmp_path, **tools)
    assert [each.value for each in written] == [b"d"]
    ok("readers", "enable", str(tmp_path), "--retention", "7d", "--yes")
    with Producer(str(tmp_path), broker="off") as producer:
        producer.produce([b"e"])
    names = {"Consumer": Consumer}
    exec(start.replace("s3://bucket/orders", str(tmp_path)), names)
    names |= {"UTC": UTC, "datetime": datetime, "timedelta": timedelta}
    with names["consumer"] as consumer:
        assert consumer.next_batch() is None
        exec(seek, names)
        assert consumer.lag().batches == 1


def test_a_log_is_made_and_replayed_from_python_as_its_page_says(tmp_path: Path) -> None:
    with Producer(str(tmp_path), broker="off") as producer:
        producer.produce([b"a"])
    enable, read, replay = blocks("docs/how-to/readers-and-retention.md", "python")
    run_here(enable, tmp_path)
    saved: list[Any] = []
    run_here(read, tmp_path, save=saved.append)
    assert saved == [b"a"]
    with Consumer(str(tmp_path), reader="audit", start="latest") as consumer:
        run_here(replay, tmp_path, consumer=consumer)
        assert consumer.lag().batches == 1
    run_here(read, tmp_path, save=saved.append)
    assert saved == [b"a", b"a"]


def test_topics_are_written_and_read_as_their_page_says(tmp_path: Path) -> None:
    write, read, choose = blocks("docs/how-to/topics.md", "python")
    Topic.create(str(tmp_path), partitions=4)
    named = {"payloads": pa.array([b"1", b"2"]), "customers": ["x", "y"]}
    run_here(write, tmp_path, **named)
    with TopicProducer(ProducerConfig(store=str(tmp_path))) as producer:
        exec(choose, {**named, "producer": producer})
    saved: dict[str, str] = {}

    class Database:
        transaction = nullcontext

    for written in ([b"1", b"1", b"2", b"2"], []):
        found: list[bytes] = []
        run_here(
            read, tmp_path, load=lambda: saved, database=Database, write=found.extend,
            save=saved.__setitem__,
        )  # fmt: skip
        assert sorted(found) == written


def test_transactions_are_published_as_their_page_says(tmp_path: Path) -> None:
    named, process, unnamed = blocks("docs/how-to/transactions.md", "python")
    Topic.create(str(tmp_path), partitions=2)
    keys = {"customers": ["x"], "accounts": ["y"]}
    run_here(named, tmp_path, invoices=[b"invoice"], bookings=[b"booking"], **keys)
    saved: list[str] = []
    names: dict[str, Any] = {"Publisher": Publisher, "bookings": [b"2"], "save": saved.append}
    exec(unnamed.replace("s3://bucket/orders", str(tmp_path)), names | keys, names)
    names["publisher"].close()
    with TopicConsumer(ConsumerConfig(store=str(tmp_path))) as consumer:
        found = [batch.entries for batch in iter(consumer.next_batch, None)]
        assert sorted(found) == [[b"2"], [b"booking"], [b"invoice"]]
        with Publisher(str(tmp_path)) as again:  # as after a crash
            again.apply(AckIntents.from_json(saved[0]))
        assert consumer.next_batch() is None
    for _ in range(2):
        with Producer(str(tmp_path / "orders")) as producer:
            producer.produce([b"order"])
        Producer(str(tmp_path / "enriched")).close()
        code = process.replace("s3://bucket", str(tmp_path))
        exec(code, {"enrich": bytes.upper})
    with Consumer(str(tmp_path / "enriched"), isolation="read_committed") as consumer:
        assert [each.entries for each in consumer] == [[b"ORDER"], [b"ORDER"]]


def test_records_become_columns_as_the_page_about_typed_rows_says(tmp_path: Path) -> None:
    _, line = blocks("docs/how-to/typed-rows.md", "python")
    config = ConsumerConfig(store=str(tmp_path))
    with Producer(ProducerConfig(store=str(tmp_path))) as producer:
        producer.produce([b'{"id": 1}', b'{"id": 2}'])
    with Consumer(config) as consumer:
        (descriptor,) = consumer.next_descriptors(9)
        names: dict[str, Any] = {"batch": consumer.fetch_handle().fetch_arrow(descriptor)}
    exec(line, names | {"schema": pa.schema([("id", pa.int32())])}, names)
    assert names["table"].to_pydict() == {"id": [1, 2]}


def test_a_queue_is_looked_into_as_its_page_says(tmp_path: Path) -> None:
    with Producer(tmp_path) as producer:
        for number in range(3):
            producer.produce([b'{"id":%d,"amount":0.5}' % number]).result()
    names: dict[str, Any] = {}
    ran = []
    for block in blocks("docs/how-to/analyze.md", "python"):
        block = block.replace("s3://bucket/orders", str(tmp_path)).replace(
            "=40, end=50", "=1, end=3"
        )
        tool = re.match(r"import (duckdb|polars|daft|ray)", block)
        if tool and find_spec(tool[1]) is None:
            continue
        exec(block, names)
        ran.append(names.get("frame"))
    assert names["table"].num_rows == names["whole"].read_all().num_rows == 3
    assert names["last_hour"].read_all()["id"].to_pylist() == [0, 1, 2]
    assert names["some"].read_all()["value"].to_pylist() == [
        b'{"id":1,"amount":0.5}',
        b'{"id":2,"amount":0.5}',
    ]
    assert len(ran) >= 4


def test_a_stream_is_split_as_the_page_about_framings_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("records").write_bytes(b"\x01\0\0\0a\x02\0\0\0bc")
    (block,) = blocks("docs/reference/api-tools.md", "python")
    exec(block, {})
    assert capsys.readouterr().out == "b'a'\nb'bc'\n"


def shell_lines() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.splitlines():
                if "opendata-buffer " in line:
                    yield page, line.split("   #")[0].strip()


@pytest.mark.parametrize(
    ("page", "line"), [pytest.param(page, line, id=line) for page, line in shell_lines()]
)
def test_commands_have_these_names_and_options(page: Path, line: str) -> None:
    # The words after " -- " belong to another command.
    words = line.split("opendata-buffer", 1)[1].split(" -- ")[0].split()
    options = [word for word in words if word.startswith("--")]
    command: Any = cli
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(options) <= known


def test_the_shell_s_example_runs(tmp_path: Path) -> None:
    def run(line: str, text: str = "") -> str:
        words = line.replace("/tmp/queue", str(tmp_path)).split()[1:]
        return ok(*words, stdin=text.encode()).stdout

    numbers = "".join(f"{n}\n" for n in range(1, 1001))
    lines = [
        line
        for path, line in shell_lines()
        if path == ROOT / "docs/how-to/command-line.md" and "/tmp/queue" in line
    ]
    assert '"records": 1000' in run(lines[0].split("| ")[1], numbers)
    consumed = 0
    for line in lines[1:]:
        out = run(line)
        if " consume " in line:
            assert out
            assert numbers.startswith(out)
            consumed += 1
    assert consumed == 2


def test_the_job_for_kubernetes_runs_one_at_a_time_and_asks_for_an_existing_gauge() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "examples" / "kubernetes"
    job = yaml.safe_load((folder / "job-on-backlog.yaml").read_text("utf-8"))["spec"]
    assert job["maxReplicaCount"] == 1
    (container,) = job["jobTargetRef"]["template"]["spec"]["containers"]
    assert container["command"][-1].endswith("load_orders.py")
    program = (ROOT / "examples/databricks/src/load_orders.py").read_text("utf-8")
    for flag in container["args"][::2]:
        assert f'"{flag.removeprefix("--")}"' in program
    (trigger,) = job["triggers"]
    (gauge,) = re.findall(r"\bbuffer_\w+", trigger["metadata"]["query"])
    assert gauge in {row.name.replace(".", "_") for row in EXPORTED.values()}


def test_the_example_for_kubernetes_runs_existing_commands_and_asks_for_existing_gauges() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "examples" / "kubernetes"
    documents = list(yaml.safe_load_all((folder / "scale-from-zero.yaml").read_text("utf-8")))
    deployment, scaled = documents
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    program, name, *words = [*container["command"], *container["args"]]
    assert program == "opendata-buffer"
    command: Any = cli.get_command(click.Context(cli), name)
    given = command.make_context(name, words).params
    port = container["ports"][0]["containerPort"]
    assert given["listen"] == f"0.0.0.0:{port}"
    assert container["readinessProbe"]["httpGet"]["port"] == port
    (trigger,) = scaled["spec"]["triggers"]
    (gauge,) = re.findall(r"\bbuffer_\w+", trigger["metadata"]["query"])
    assert gauge in {row.name.replace(".", "_") for row in EXPORTED.values()}
    assert f'store="{given["stores"][0]}"' in trigger["metadata"]["query"]
