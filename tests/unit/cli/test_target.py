"""From options to a store, its settings, and its queues."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import pytest

from opendata_buffer.cli import options
from opendata_buffer.cli.options import command
from opendata_buffer.cli.target import one_queue, target_of
from opendata_buffer.config import ConsumerConfig, QueueConfig, StoreOptions
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import commands, misused, run, runner


def config_of(*arguments: str, env: dict[str, str] | None = None) -> QueueConfig:
    made: list[QueueConfig] = []

    @command()
    @options.queue
    def made_by(**queue: Any) -> None:
        made.append(one_queue(SystemRuntime(), queue).config)

    runner().invoke(made_by, arguments, env=env, catch_exceptions=False, standalone_mode=False)
    return made[0]


def test_every_option_has_its_field() -> None:
    assert config_of(
        "s3://bucket", "--data-path-prefix", "a", "--manifest-path", "b", "--endpoint-url",
        "http://host", "--region", "r", "--profile", "p", "--timeout-ms", "3000",
    ) == QueueConfig(
        store="s3://bucket",
        data_path_prefix="a",
        manifest_path="b",
        store_options=StoreOptions(
            endpoint_url="http://host", region="r", profile="p", connect_timeout_ms=1_500,
            read_timeout_ms=1_500, max_attempts=2,
        ),
    )  # fmt: skip


ARN = "arn:aws:iam::123456789012:role/buffer"


def test_a_role_comes_from_options_or_from_the_environment() -> None:
    named = ("--role-arn", ARN, "--external-id", "x", "--session-name", "me")
    given = config_of("s3://bucket", *named).store_options
    assert (given.role_arn, given.external_id, given.session_name) == (ARN, "x", "me")
    environment = {"OPENDATA_BUFFER_ROLE_ARN": ARN, "OPENDATA_BUFFER_EXTERNAL_ID": "x"}
    found = config_of("s3://bucket", "--session-name", "me", env=environment).store_options
    assert found == given


def test_no_option_accepts_a_secret_key() -> None:
    # Every user who can list processes sees command lines.
    parameters = {each.name or "" for _, command in commands() for each in command.params}
    assert "role_arn" in parameters
    secrets = [field.name for field in fields(StoreOptions) if not field.repr]
    assert "secret_access_key" in secrets
    for name in (*secrets, "service_credential"):
        assert not [each for each in parameters if each.endswith(name)]
    assert "AWS_SECRET_ACCESS_KEY" in run("--help").stdout


def test_errors_about_credentials_name_the_options_and_hints_repeat_them() -> None:
    line = misused("status", "s3://bucket", "--external-id", "x")
    assert "--external-id is 'x' and there is no --role-arn" in line
    line = misused("status", "s3://bucket", "--role-arn", ARN, "--anonymous")
    assert f"--role-arn is '{ARN}' and --anonymous is true" in line


# ---- a queue or a topic


OPTIONS: dict[str, Any] = {
    "data_path_prefix": None, "manifest_path": None, "partition": None, "endpoint_url": None,
    "region": None, "profile": None, "timeout_ms": 1000,
}  # fmt: skip


def prefixes(url: str, **named: str) -> list[str]:
    with click.Context(click.Command("test")):
        target = target_of(SystemRuntime(), {**OPTIONS, "store": url, **named}, ConsumerConfig)
        return [each.prefix for each in target.queues()]


def test_a_role_without_access_to_the_topic_description_uses_a_queue(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(key: str, **options: object) -> object:
        raise PermanentStorageError(f"{key!r}: access denied")

    monkeypatch.setattr(store, "get", refused)
    assert prefixes(url) == ["ingest"]
