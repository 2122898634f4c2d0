"""Converting strings to settings: the error about an invalid value names its option."""

from __future__ import annotations

import logging
import pickle
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from buffer_sink.options import SINK_OPTIONS
from buffer_source.options import SOURCE_OPTIONS
from opendata_buffer.config import QueueConfig, StoreOptions
from opendata_buffer.errors import Conflict, InvalidInput, PrefixConflict
from opendata_buffer.hints import Action, Hint, Setting
from opendata_buffer.option_reader import (
    INSTEAD,
    STORAGE_OPTIONS,
    OptionReader,
    accepted_options,
    boolean,
    briefly,
    in_options,
    one_of,
    option,
    option_values,
    storage_settings,
    whole_number,
)

NAMES = ("maxBatches", "flag", "mode", *STORAGE_OPTIONS)


def reader(**options: str) -> OptionReader:
    return OptionReader(options, NAMES, "streaming source")


@pytest.mark.parametrize("name", ["maxBatches", "maxbatches", "MAXBATCHES"])
def test_names_are_read_in_any_case(name: str) -> None:
    assert OptionReader({name: "3"}, NAMES, "sink").integer("maxBatches", None) == 3


def test_an_unknown_name_is_refused_with_the_nearest_one_and_all() -> None:
    says = r"unknown option 'maxbatch' of the streaming source. Did you mean 'maxBatches'\?"
    with pytest.raises(InvalidInput, match=says):
        reader(maxbatch="3")
    with pytest.raises(InvalidInput) as raised:
        reader(qqqqqqqq="3")
    assert "Did you mean" not in str(raised.value)
    assert all(name in str(raised.value) for name in NAMES)


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_value_is_refused(value: str) -> None:
    for read in (
        lambda: reader(mode=value).text("mode"),
        lambda: reader(mode=value).choice("mode", ("a",), "a"),
        lambda: reader(flag=value).boolean("flag", True),
        lambda: reader(maxBatches=value).integer("maxBatches", 1),
    ):
        with pytest.raises(InvalidInput, match="give it a value or leave it out"):
            read()


def test_a_missing_option_has_its_default() -> None:
    assert reader().text("mode") is None
    assert reader().integer("maxBatches", None) is None
    assert reader().integer("maxBatches", 7) == 7
    assert reader().boolean("flag", True) is True
    assert reader().choice("mode", ("a", "b"), "b") == "b"


@pytest.mark.parametrize(
    ("value", "number"), [("0", 0), (" 12 ", 12), ("007", 7), ("9223372036854775807", 2**63 - 1)]
)
def test_integers_are_read(value: str, number: int) -> None:
    assert reader(maxBatches=value).integer("maxBatches", None) == number


@pytest.mark.parametrize(
    "value", ["-1", "+1", "1.0", "1e3", "1_000", "٣", "x", "9223372036854775808", "1" * 5000]
)
def test_text_that_is_not_an_integer_is_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match=r"option maxBatches is .*: use a whole number"):
        reader(maxBatches=value).integer("maxBatches", None)


def test_the_minimum_is_accepted_and_one_less_is_not() -> None:
    assert reader(maxBatches="5").integer("maxBatches", None, least=5) == 5
    with pytest.raises(InvalidInput, match="of at least 5"):
        reader(maxBatches="4").integer("maxBatches", None, least=5)


def test_words_are_read_in_any_case() -> None:
    for word in ("true", "TRUE", "1", "yes", "on", " true "):
        assert reader(flag=word).boolean("flag", False) is True
    for word in ("false", "0", "No", "off"):
        assert reader(flag=word).boolean("flag", True) is False
    with pytest.raises(InvalidInput, match="option flag is 'maybe': use true or false"):
        reader(flag="maybe").boolean("flag", True)
    modes = ("earliest", "latest")
    assert reader(mode=" EARLIEST ").choice("mode", modes, "latest") == "earliest"
    with pytest.raises(InvalidInput, match="option mode is 'first': use earliest or latest"):
        reader(mode="first").choice("mode", modes, "latest")


def test_every_storage_option_has_its_setting() -> None:
    assert storage_settings(reader(path="s3://bucket")) == QueueConfig(store="s3://bucket")
    role = "arn:aws:iam::1:role/r"
    options = reader(
        path="s3://bucket/root", dataPathPrefix="a", manifestPath="m", endpointUrl="http://host",
        region="r", roleArn=role, externalId="e", accessKeyId="k",
        secretAccessKey="secret", sessionToken="c",
    )  # fmt: skip
    queue = storage_settings(options)
    assert queue == QueueConfig(
        store="s3://bucket/root",
        data_path_prefix="a",
        manifest_path="m",
        store_options=StoreOptions(
            endpoint_url="http://host", region="r", role_arn=role, external_id="e",
            access_key_id="k", secret_access_key="secret", session_token="c",
        ),
    )  # fmt: skip


def test_a_path_is_made_absolute_when_the_option_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert storage_settings(reader(path="dir/queue")).store == str(tmp_path / "dir" / "queue")
    assert storage_settings(reader(path="~/queue")).store == "/home/someone/queue"
    for url in ("file:///dir", "s3a://bucket"):
        assert storage_settings(reader(path=url)).store == url


def test_a_service_credential_may_be_named_for_any_store() -> None:
    given = reader(path="s3://b", serviceCredential="team")
    assert storage_settings(given).store_options.service_credential == "team"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("subscribe", "load(), start() or save() names the queue or topic"),
        ("KAFKA.bootstrap.servers", "names the queue or topic"),
        ("kafka.group.id", "acknowledge set to false"),
        ("includeheaders", "the column metadata"),
        ("groupIdPrefix", "acknowledge set to false"),
        ("maxRecordsPerTrigger", "use maxOffsetsPerTrigger"),
        ("databricks.servicecredential", "use serviceCredential"),
        ("fetchConcurrency", "fixed value: leave it out"),
    ],
)
def test_the_error_about_a_name_from_kafka_or_an_earlier_release_names_its_replacement(
    name: str, says: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        reader(**{name: "1"})
    assert f"the streaming source has no option {name}: " in str(raised.value)
    assert says in str(raised.value)


def test_no_name_is_both_an_option_and_a_former_option() -> None:
    options = {*SOURCE_OPTIONS, *SINK_OPTIONS}
    assert len(options) <= 39
    assert not options & {*INSTEAD}
    assert {
        use for text in INSTEAD.values() for use in re.findall(r"^use (\w+)(?=$|,)", text)
    } <= options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "memory://x"}, "'memory://x' lives in the memory of one process"),
        ({}, "no store given"),
    ],
)
def test_a_store_that_spark_cannot_use_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        storage_settings(reader(**options))


def test_errors_of_the_library_speak_of_options_in_a_query() -> None:
    for error in (
        PrefixConflict("ingest", "b/m", "a/m", Hint(Action.USE_PREFIX, prefix="a/b")),
        InvalidInput(Setting("role_arn"), " is 'x'"),
    ):
        text = str(error)
        with pytest.raises(type(error)) as raised, in_options():
            raise error
        assert "manifest_path" in text or "role_arn" in text
        assert "_" not in str(raised.value)
    assert str(error) == "roleArn is 'x'"


@pytest.mark.parametrize("kind", ["function", "generator"])
def test_an_error_of_the_library_reaches_spark_without_its_traceback(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        try:
            _ = 1 // 0
        except ZeroDivisionError as error:
            raise InvalidInput("it cannot be divided") from error

    @briefly
    def function() -> None:
        deep(20)

    @briefly
    def generator() -> Iterator[int]:
        yield 1
        deep(20)

    called = {"function": function, "generator": lambda: list(generator())}[kind]
    # The logger itself: the command line's option -v sets the level of the library's logger.
    logger = "opendata_buffer.option_reader"
    with pytest.raises(InvalidInput) as raised, caplog.at_level(logging.DEBUG, logger=logger):
        called()
    shown = "".join(traceback.format_exception(raised.value)).splitlines()
    assert len(shown) <= 10, "the calls that led to the error are not shown"
    assert shown[-1] == "opendata_buffer.errors.InvalidInput: it cannot be divided"
    assert "ZeroDivisionError" in caplog.text, "the debug log has everything"


def test_an_error_of_another_library_keeps_its_traceback() -> None:
    @briefly
    def function() -> None:
        _ = 1 // 0

    with pytest.raises(ZeroDivisionError) as raised:
        function()
    assert "1 // 0" in "".join(traceback.format_exception(raised.value))


def test_an_error_keeps_its_surface_on_the_way_from_a_task_to_the_driver() -> None:
    error = Conflict("ingest/manifest", 12, 60.0)
    with pytest.raises(Conflict), in_options():
        raise error
    assert "timeout" not in str(pickle.loads(pickle.dumps(error)))


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Settings with one option of each kind, and a field that no option sets."""

    store: str
    pages: int | None = option("maxPages", None, whole_number(least=1))
    quick: bool = option("quick", False, boolean)
    order: str = option("order", "first", one_of("first", "last"))
    rows: str = option(
        "rows", "none", lambda read, name, default: read.raw(name, default), also=("x",)
    )


def test_an_option_is_declared_once_and_then_accepted_and_read() -> None:
    accepted = accepted_options(Declared)
    assert accepted == (*STORAGE_OPTIONS, "maxPages", "quick", "order", "rows", "x")
    for given, values in (
        ({}, {"pages": None, "quick": False, "order": "first", "rows": "none"}),
        (
            {"maxpages": "3", "quick": "true", "ORDER": "Last", "x": "1"},
            {"pages": 3, "quick": True, "order": "last", "rows": "none"},
        ),
    ):
        assert option_values(Declared, OptionReader(given, accepted, "source")) == values
    assert Declared(store="s") == Declared(store="s", pages=None, quick=False)
    with pytest.raises(InvalidInput, match="maxPages is '0': use a whole number of at least 1"):
        option_values(Declared, OptionReader({"maxPages": "0"}, accepted, "source"))
