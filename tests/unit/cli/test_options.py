"""Options to configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from opendata_buffer.cli.options import queue_fields_of, queue_options, version_option
from opendata_buffer.config import QueueConfig, StoreOptions
from opendata_buffer.errors import InvalidInput


def config_of(*arguments: str) -> QueueConfig:
    made: list[QueueConfig] = []

    @click.command()
    @queue_options
    def command(**queue: Any) -> None:
        made.append(QueueConfig(**queue_fields_of(queue)))

    CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    return made[0]


def test_only_the_store_is_needed_and_the_rest_is_the_default() -> None:
    found = config_of("memory://x")
    assert (found.store, found.cas_deadline_ms) == ("memory://x", 5_000)
    neither = {"cas_deadline_ms": 1, "store_options": StoreOptions()}
    assert replace(found, **neither) == replace(QueueConfig(store="memory://x"), **neither)


@pytest.mark.parametrize("timeout_ms", [1, 5_000, 30_000, 120_000, 600_000])
def test_the_attempts_of_a_request_share_the_timeout(timeout_ms: int) -> None:
    config = config_of("memory://x", "--timeout-ms", str(timeout_ms))
    assert config.cas_deadline_ms == timeout_ms
    options = config.store_options
    assert options.max_attempts >= 2
    for each in (options.connect_timeout_ms, options.read_timeout_ms):
        assert 1 <= each * options.max_attempts <= max(timeout_ms, options.max_attempts)


def test_the_manifest_follows_the_prefix() -> None:
    assert config_of("x", "--data-path-prefix", "a/b").manifest_path == "a/b/manifest"


def test_every_option_has_its_field() -> None:
    assert config_of(
        "s3://bucket", "--data-path-prefix", "a", "--manifest-path", "b", "--endpoint-url",
        "http://host", "--region", "r", "--profile", "p", "--timeout-ms", "3000",
    ) == QueueConfig(
        store="s3://bucket",
        data_path_prefix="a",
        manifest_path="b",
        cas_deadline_ms=3_000,
        store_options=StoreOptions(
            endpoint_url="http://host", region="r", profile="p", connect_timeout_ms=1_500,
            read_timeout_ms=1_500, max_attempts=2,
        ),
    )  # fmt: skip


def test_an_empty_prefix_is_refused_and_not_taken_for_the_default() -> None:
    with pytest.raises(InvalidInput, match="data_path_prefix"):
        config_of("x", "--data-path-prefix", "")


def test_version_of_a_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    @click.command()
    @version_option
    def command() -> None:
        raise AssertionError("the version is printed instead")

    monkeypatch.setattr(metadata, "version", missing)
    result = CliRunner().invoke(command, ["--version"])
    assert (result.exit_code, result.stdout[:16]) == (0, "opendata-buffer,")
    monkeypatch.setattr(metadata, "version", lambda name: "9.8.7")
    assert CliRunner().invoke(command, ["--version"]).stdout == "opendata-buffer 9.8.7\n"
