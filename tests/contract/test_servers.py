"""The real servers: what is said when they are not there, and that they end."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tools import servers
from tools.servers import SERVERS, VERSITYGW, Server


def test_one_is_got_by_its_own_command_and_one_by_a_shell_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "CACHE", tmp_path)
    shell = ["-c", 'echo got >"$1/server"', "sh"]
    for name, tool, command in (("own", "sh", "sh"), ("called", "true", "sh")):
        server = replace(
            VERSITYGW,
            name=name,
            tool=tool,
            get=lambda folder, command=command: [command, *shell, str(folder)],
        )
        server.install()
        assert server.is_there
        assert (server.folder / "server").read_text() == "got\n", name


@pytest.mark.parametrize("server", SERVERS, ids=lambda each: each.name)
def test_a_missing_server_is_reported_with_the_command(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(servers, "CACHE", tmp_path)
    (server.folder / "half").mkdir(parents=True)
    assert not server.is_there, "an installation that was interrupted"
    servers.tell_missing()
    assert f"not tested on a real {server.speaks} server" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(servers, "PACKAGES", dict.fromkeys(servers.PACKAGES, "./no-such-package"))
    assert server.why_not.startswith(f"{server.name} {server.version} needs ")
    assert server.why_not.endswith("; then ./run servers")
    assert servers.install_all() == 1
    assert f"{server.name} {server.version} needs" in capsys.readouterr().err


@pytest.mark.parametrize("server", SERVERS, ids=lambda each: each.name)
def test_one_that_was_started_listens_here_only_and_ends(server: Server) -> None:
    if not server.is_there:
        pytest.skip(server.why_not)
    with server.start() as url:
        host, port = urlsplit(url).hostname, urlsplit(url).port
        assert host == "127.0.0.1"
        socket.create_connection((host, port or 0), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port or 0), 5)
