"""Environments: when one is made, again or not at all, and with which installer."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools.project import environments
from tools.project.console import Failed
from tools.project.environments import (
    Environment,
    base_python,
    first_of,
    settings_for_uv,
    version_of,
)

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"

FAKE = """\
#!/bin/sh
# A Python without installers: "-m venv" copies this script, and the calls are in a file.
echo "$@" >>'{calls}'
case "$1 $2 $3" in
"-m venv "*)
    [ -e '{home}/no-ensurepip' ] && {{ echo "ensurepip is not available"; exit 1; }}
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pip"
    ;;
"-m pip config") echo "global.index-url='https://index.example/simple'" ;;
"-m pip install")
    case "$*" in
    *" uv") cp "$0" "$(dirname "$0")/uv" ;;
    *) ! [ -e '{home}/no-pip' ] ;;
    esac
    ;;
"pip install "*) ! [ -e '{home}/no-uv' ] || {{ echo "uv found no such version"; exit 1; }} ;;
"-c import sys"*) echo 3.12 ;;
esac
"""


class Checkout:
    """A checkout with a ``pyproject.toml`` and a fake Python."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "checkout"
        self.root.mkdir()
        (self.root / "pyproject.toml").write_text("[project]\n")
        self.python = home / "python"
        self.python.write_text(FAKE.format(calls=home / "calls", home=home))
        self.python.chmod(0o755)

    def environment(
        self, extras: str = "dev", *options: str, root: Path | None = None
    ) -> Environment:
        root = root or self.root
        return Environment(root / ".venv", extras, options, str(self.python), root)

    def calls(self, word: str) -> list[str]:
        """Return the calls with a word since the last call of this method."""
        path = self.home / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if word in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_an_environment_is_made_once(checkout: Checkout) -> None:
    environment = checkout.environment()
    assert not environment.is_complete
    environment.need()
    (install,) = checkout.calls("pip install --cache-dir")
    assert "--compile-bytecode" in install
    assert install.endswith("-e .[dev]")
    assert environment.is_complete
    environment.need()
    assert checkout.calls("install") == []


def test_an_interrupted_installation_is_started_again_from_nothing(checkout: Checkout) -> None:
    environment = checkout.environment()
    environment.need()
    (environment.folder / ".complete").unlink()
    (environment.folder / "half").touch()
    environment.need()
    assert not (environment.folder / "half").exists()
    assert environment.is_complete


def test_a_changed_project_is_installed_into_the_existing_environment(checkout: Checkout) -> None:
    environment = checkout.environment()
    environment.need()
    kept = environment.folder / "kept"
    kept.touch()
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert not environment.is_complete
    checkout.calls("")
    environment.need()
    assert kept.exists()
    assert environment.is_complete
    assert len(checkout.calls("pip install --cache-dir")) == 1


def test_an_environment_with_all_extras_serves_for_some_but_not_the_reverse(
    checkout: Checkout,
) -> None:
    checkout.environment("spark,demo").need()
    assert not checkout.environment("dev").is_complete
    checkout.environment("dev").need()
    assert checkout.environment("spark,demo").is_complete


def test_a_moved_checkout_is_installed_again(checkout: Checkout) -> None:
    """The package is editable, so the environment leads to the old path."""
    checkout.environment().need()
    moved = checkout.home / "moved"
    checkout.root.rename(moved)
    assert not checkout.environment(root=moved).is_complete


def test_an_environment_whose_python_is_gone_is_made_again(checkout: Checkout) -> None:
    environment = checkout.environment()
    environment.need()
    Path(environment.executable).unlink()
    assert not environment.is_complete
    environment.need()
    assert environment.is_complete


def test_pip_installs_if_uv_cannot(checkout: Checkout) -> None:
    (checkout.home / "no-uv").touch()
    checkout.environment().need()
    (install,) = checkout.calls("-m pip install --disable-pip-version-check --no-input -e")
    assert install.endswith("-e .[dev]")


def test_a_failed_installation_shows_the_end_of_its_log_and_leaves_nothing_complete(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout.home / "no-uv").touch()
    environment = checkout.environment("spark,test", "--resolution", "lowest-direct")
    with pytest.raises(Failed, match=r"the whole log is in \.venv/setup\.log"):
        environment.need()
    assert "uv found no such version" in capsys.readouterr().err
    assert not environment.is_complete
    assert checkout.calls("--no-input -e") == [], "pip does not know the options"


def test_a_python_without_ensurepip_says_what_to_install(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def install(package: str, log: object) -> bool:
        asked.append(package)
        return False

    monkeypatch.setattr(environments.debian, "install", install)
    (checkout.home / "no-ensurepip").touch()
    with pytest.raises(Failed, match=r"apt-get install python3\.12-venv"):
        checkout.environment().need()
    assert asked == ["python3.12-venv"]


def test_the_package_with_ensurepip_is_installed_where_that_is_allowed(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = checkout.home / "no-ensurepip"
    missing.touch()

    def install(package: str, log: object) -> bool:
        missing.unlink()
        return True

    monkeypatch.setattr(environments.debian, "install", install)
    checkout.environment().need()
    assert checkout.environment().is_complete


def test_a_command_waits_for_the_installation_of_another_and_does_not_repeat_it(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = checkout.environment()
    with (checkout.root / "pyproject.toml").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=environment.need)
        waiting.start()
        said = ""
        while "waiting for another ./run" not in said:
            said += capsys.readouterr().err
            waiting.join(0.01)
        environment._make()  # as the other command does
    waiting.join()
    assert len(checkout.calls("pip install --cache-dir")) == 1


def test_an_installer_holds_the_lock_after_its_command_was_killed(checkout: Checkout) -> None:
    log = checkout.home / "log"
    code = (
        "import os, sys; from pathlib import Path; from tools.project.console import Log\n"
        "from tools.project.environments import installing\n"
        "with installing(Path(sys.argv[1])):\n"
        "    Log(Path(sys.argv[2])).run(['sh', '-c', 'kill -9 $PPID; echo $$; read wait'])\n"
    )
    # The shell of the log reads from /dev/null, so it would end at once: let it sleep instead.
    code = code.replace("read wait", "exec sleep 600")
    subprocess.run(
        [sys.executable, "-c", code, str(checkout.root), str(log)], cwd=environments.ROOT
    )
    while not (text := log.read_text().strip()):
        pass
    try:
        with (checkout.root / "pyproject.toml").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        subprocess.run(["kill", text], check=True)
    with (checkout.root / "pyproject.toml").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def test_uv_gets_the_index_and_the_certificates_of_pip() -> None:
    listed = "global.cert='/etc/own.pem'\nglobal.index-url='https://a.example/x'\nuser.x='y'\n"
    both = {"UV_DEFAULT_INDEX": "https://a.example/x", "SSL_CERT_FILE": "/etc/own.pem"}
    assert settings_for_uv(listed, {}) == both
    variables = {"PIP_INDEX_URL": "https://b.example", "PIP_CERT": "/c.pem"}
    named = {"UV_DEFAULT_INDEX": "https://b.example", "SSL_CERT_FILE": "/c.pem"}
    assert settings_for_uv(listed, variables) == named
    assert settings_for_uv("", {}) == {}


def test_uv_is_called_with_pip_s_settings(checkout: Checkout) -> None:
    environment = checkout.environment()
    environment.need()
    found = environment.variables_for_uv()
    assert found["UV_DEFAULT_INDEX"] == "https://index.example/simple"


def test_processes_find_the_environment_s_commands_first(checkout: Checkout) -> None:
    environment = checkout.environment()
    variables = environment.variables({"PATH": "/usr/bin", "HOME": "/root"})
    assert variables["PATH"] == f"{environment.folder}/bin:/usr/bin"
    assert variables["PYSPARK_PYTHON"] == environment.executable
    assert variables["HOME"] == "/root"


def test_a_version_of_python_is_found_if_it_is_there() -> None:
    found = first_of(["3.9999", OWN])
    assert found is not None
    assert version_of(found) == OWN
    assert first_of(["3.9999"]) is None
    assert version_of("/nonexistent/python") == ""


def test_the_base_of_this_environment_s_python_starts() -> None:
    assert version_of(base_python()) == OWN
