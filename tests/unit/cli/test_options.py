"""Options to configurations."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from opendata_buffer.cli.commands import cli
from opendata_buffer.cli.options import (
    queue_fields_of,
    queue_options,
    queue_words,
    version_option,
)
from opendata_buffer.config import QueueConfig, StoreOptions
from opendata_buffer.errors import InvalidInput
from tests.unit.cli.shell import fails, run


def config_of(*arguments: str, env: dict[str, str] | None = None) -> QueueConfig:
    made: list[QueueConfig] = []

    @click.command()
    @queue_options
    def command(**queue: Any) -> None:
        made.append(QueueConfig(**queue_fields_of(queue)))

    CliRunner().invoke(command, arguments, env=env, catch_exceptions=False, standalone_mode=False)
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


ARN = "arn:aws:iam::123456789012:role/buffer"


def test_a_role_comes_from_options_or_from_the_environment() -> None:
    named = ("--role-arn", ARN, "--external-id", "x", "--session-name", "me")
    options = config_of("s3://bucket", *named).store_options
    assert (options.role_arn, options.external_id, options.session_name) == (ARN, "x", "me")
    environment = {"OPENDATA_BUFFER_ROLE_ARN": ARN, "OPENDATA_BUFFER_EXTERNAL_ID": "x"}
    found = config_of("s3://bucket", "--session-name", "me", env=environment).store_options
    assert found == options


def test_requests_are_sent_without_credentials_by_an_option_or_the_environment() -> None:
    assert config_of("s3://bucket", "--anonymous").store_options.anonymous
    assert config_of("s3://bucket", env={"OPENDATA_BUFFER_ANONYMOUS": "1"}).store_options.anonymous
    assert not config_of("s3://bucket").store_options.anonymous


def test_no_option_takes_a_key() -> None:
    # Whoever may list processes sees command lines.
    parameters = {name for each in cli.commands.values() for name in every_option(each)}
    assert "role_arn" in parameters
    secrets = [field.name for field in fields(StoreOptions) if not field.repr]
    assert "secret_access_key" in secrets
    for name in (*secrets, "service_credential"):
        assert not [each for each in parameters if each.endswith(name)]
    assert "AWS_SECRET_ACCESS_KEY" in run("--help").stdout


def every_option(command: click.Command) -> set[str]:
    names = {each.name for each in command.params if each.name}
    children = command.commands.values() if isinstance(command, click.Group) else ()
    return names.union(*map(every_option, children))


def test_errors_about_credentials_name_the_options_and_hints_repeat_them() -> None:
    line = fails("list", "s3://bucket", "--external-id", "x")
    assert "--external-id is 'x' and there is no --role-arn" in line
    line = fails("status", "s3://bucket", "--role-arn", ARN, "--anonymous")
    assert f"--role-arn is '{ARN}' and anonymous is true" in line
    line = fails("copy", "memory://a", "s3://b", "--to-session-name", "x")
    assert "--to-session-name is 'x' and there is no --to-role-arn" in line


def test_a_hint_reaches_the_same_queue() -> None:
    words: list[str] = []

    @click.command()
    @queue_options
    def command(**queue: Any) -> None:
        queue_fields_of(queue)
        words.append(queue_words())

    arguments = ["s3://b", "--anonymous", "--region", "r", "--data-path-prefix", "a b"]
    CliRunner().invoke(command, arguments, catch_exceptions=False)
    environment = {"OPENDATA_BUFFER_ROLE_ARN": ARN}
    CliRunner().invoke(command, ["s3://b"], env=environment, catch_exceptions=False)
    assert words == ["s3://b --data-path-prefix 'a b' --region r --anonymous", "s3://b"]


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
