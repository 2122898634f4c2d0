"""Build and check a release, and publish nothing: ``./run release``.

::

    ./run release                   # everything for the version in pyproject.toml, into dist/
    ./run release --dev 17          # the packages as 0.2.0.dev17, as a test index needs them
    ./run release --out FOLDER      # into another folder

What is built is the commit, not the working tree: a release holds nothing that is not in Git. The
result is in one folder: wheel and source distribution, the software bill of materials (CycloneDX),
the recipe of the conda package, the release notes, the site of the documentation, and the SHA-256
of each file. The packages are built twice and compared byte by byte.

The workflow ``release.yml`` runs the same command on a tag and publishes the packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import sites
from tools.conda import recipe

ROOT = Path(__file__).resolve().parents[1]
SBOM_EXTRAS = "azure,gcs"
"""The extras of the bill of materials. Spark is not one of them: the cluster brings its own."""
RESULT = "SHA256SUMS"
"""The file by which a folder of ours is known."""
_HEADING = re.compile(r"^## (\d\S*)$", re.MULTILINE)


class NotReady(Exception):
    """A release cannot be made; the text says what is wrong."""


def git(root: Path, *arguments: str) -> str:
    """Run Git and return what it prints, without the last line break.

    Raises:
        NotReady: Git failed.
    """
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise NotReady(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def pyproject_of(root: Path) -> dict[str, Any]:
    """Return the content of ``pyproject.toml``."""
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))


def notes_of(changelog: str, version: str) -> str:
    """Return what the changelog says about a version, without its heading.

    Raises:
        NotReady: The newest version in the changelog is another one.
    """
    headings = list(_HEADING.finditer(changelog))
    newest = headings[0][1] if headings else "none"
    if newest != version:
        raise NotReady(
            f"CHANGELOG.md describes {newest} first and pyproject.toml has {version}: "
            f"give the section the heading '## {version}', or change the version"
        )
    end = headings[1].start() if len(headings) > 1 else len(changelog)
    return changelog[headings[0].end() : end].strip() + "\n"


def with_links(notes: str, repository: str, version: str) -> str:
    """Return notes whose links lead to the files of the release, also outside the repository."""
    base = f"{repository}/blob/v{version}/"
    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", rf"]({base}\1)", notes)


def check_commit(root: Path, version: str, *, tag: str | None) -> None:
    """Check that the tree is clean and that its tags agree with the version.

    Args:
        root: The checkout.
        version: The version in ``pyproject.toml``.
        tag: The tag that is being released; None before there is one.

    Raises:
        NotReady: They do not agree.
    """
    if changed := git(root, "status", "--porcelain"):
        raise NotReady(f"the working tree is not clean: commit or remove\n{changed}")
    expected = f"v{version}"
    if tag is not None and tag != expected:
        raise NotReady(f"the tag is {tag} and the version {version}: tag the commit {expected}")
    if not git(root, "tag", "--list", expected):
        if tag is not None:
            raise NotReady(f"there is no tag {tag} in this checkout")
        return
    tagged = git(root, "rev-list", "-n", "1", expected)
    if tagged != git(root, "rev-parse", "HEAD"):
        raise NotReady(
            f"{expected} is the commit {tagged[:8]} and not this one: check out the tag, or raise "
            "the version in pyproject.toml"
        )


def check_repository(pyproject: dict[str, Any], repository: str | None) -> None:
    """Check that the package names the repository that builds it.

    Raises:
        NotReady: It names another one, so its links would lead elsewhere.
    """
    named = pyproject["project"]["urls"]["Repository"]
    if repository is not None and repository.rstrip("/") != named:
        raise NotReady(
            f"project.urls in pyproject.toml names {named}, and this is {repository}: change it"
        )


def export(root: Path, into: Path) -> None:
    """Write the files of the commit into an empty folder."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True)
    into.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(into)], input=archive.stdout, check=True)


def set_version(source: Path, version: str) -> None:
    """Change the version in an exported ``pyproject.toml``."""
    path = source / "pyproject.toml"
    text, count = re.subn(
        r'^version = ".*"$', f'version = "{version}"', path.read_text("utf-8"), flags=re.MULTILINE
    )
    assert count == 1, "pyproject.toml has one line with the version"
    path.write_text(text, "utf-8")


def tool(
    *command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Run a tool of this Python's environment, and show its output only if it fails.

    Args:
        *command: The module of the tool, and its arguments.
        cwd: The folder in which it runs; None for the current one.
        environment: Environment variables to add.

    Raises:
        NotReady: It failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise NotReady(f"{' '.join(command[:2])}:\n{done.stdout.strip()}")


def build(source: Path, out: Path, epoch: int) -> list[Path]:
    """Build the wheel and the source distribution.

    Args:
        source: A folder with the project.
        out: The folder for the packages.
        epoch: The time that all files in the packages get, in seconds since 1970.

    Returns:
        The paths of the wheel and of the source distribution.

    Raises:
        NotReady: The build failed.
    """
    tool(
        *("hatchling", "build", "-d", str(out.resolve())),
        cwd=source,
        environment={"SOURCE_DATE_EPOCH": str(epoch)},
    )
    return [*out.glob("*.whl"), *out.glob("*.tar.gz")]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_twice(source: Path, out: Path, epoch: int) -> list[Path]:
    """Build the packages in two folders, and compare them.

    Returns:
        The packages of the first build, in ``out``.

    Raises:
        NotReady: The two builds differ.
    """
    packages = build(source, out, epoch)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "a copy at another path")
        shutil.copytree(source, copy)
        again = build(copy, Path(scratch, "again"), epoch)
        differ = [
            first.name
            for first, second in zip(packages, again, strict=True)
            if digest(first) != digest(second)
        ]
    if differ:
        raise NotReady(f"two builds of {', '.join(differ)} differ")
    return packages


def check_packages(source: Path, packages: Sequence[Path]) -> None:
    """Check the metadata, and that an index will show the description.

    Raises:
        NotReady: A tool complains.
    """
    tool("validate_pyproject", str(source / "pyproject.toml"))
    tool("twine", "check", "--strict", *map(str, packages))


def write_sbom(source: Path, wheel: Path, out: Path) -> None:
    """Install the wheel into an environment of its own, and list all that is in it.

    Args:
        source: The folder with ``pyproject.toml``.
        wheel: The wheel.
        out: The file to write, CycloneDX as JSON. It has no times and no random numbers.

    Raises:
        NotReady: The installation or the list failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch, "bin", "python")
        tool("venv", "--without-pip", scratch)
        tool(
            *("pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"),
            f"{wheel}[{SBOM_EXTRAS}]",
        )
        tool(
            *("cyclonedx_py", "environment", "--pyproject", str(source / "pyproject.toml")),
            *(
                "--mc-type",
                "library",
                "--output-reproducible",
                "--of",
                "JSON",
                "-o",
                str(out),
                str(python),
            ),
        )


def missing_in_sbom(sbom: Path, pyproject: dict[str, Any]) -> list[str]:
    """Return the dependencies of the project that a bill of materials does not list."""
    components = json.loads(sbom.read_text("utf-8"))["components"]
    listed = {canonicalize_name(component["name"]) for component in components}
    extras = pyproject["project"]["optional-dependencies"]
    wanted = [*pyproject["project"]["dependencies"]]
    for extra in SBOM_EXTRAS.split(","):
        wanted += extras[extra]
    names = [canonicalize_name(Requirement(text).name) for text in wanted]
    return [name for name in names if name not in listed]


def write_sums(out: Path) -> None:
    """Write the SHA-256 of the files of a folder, in the form of ``sha256sum --check``."""
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != RESULT)
    lines = [f"{digest(path)}  {path.name}\n" for path in files]
    (out / RESULT).write_text("".join(lines), "utf-8")


def empty(out: Path) -> None:
    """Make a folder, or delete what an earlier build left in it.

    Raises:
        NotReady: The folder has other files, which are not deleted.
    """
    if out.exists() and any(out.iterdir()):
        if not (out / RESULT).exists():
            raise NotReady(f"{out} has files that no build left there: delete them, or use --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT).touch()  # An interrupted build may be deleted, too.


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def make(
    out: Path,
    *,
    root: Path = ROOT,
    dev: int | None = None,
    tag: str | None = None,
    repository: str | None = None,
) -> str:
    """Build and check everything.

    Args:
        out: The folder for the result; it is emptied first.
        root: The checkout.
        dev: The number of a build for a test index; None for the release itself.
        tag: The tag that is being released; None before there is one.
        repository: The URL of the repository that runs this; None if it runs on a desk.

    Returns:
        The version of the packages.

    Raises:
        NotReady: Something is wrong; the text says what.
    """
    pyproject = pyproject_of(root)
    version: str = pyproject["project"]["version"]
    changelog = (root / "CHANGELOG.md").read_text("utf-8")
    notes = notes_of(changelog, version)
    check_commit(root, version, tag=tag)
    check_repository(pyproject, repository)
    epoch = int(git(root, "log", "-1", "--format=%ct"))
    empty(out)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        export(root, source)
        if dev is not None:
            version = f"{version}.dev{dev}"
            set_version(source, version)
            pyproject = pyproject_of(source)
        say(f"building {version} twice")
        wheel, archive = build_twice(source, out, epoch)
        say("checking the packages")
        check_packages(source, [wheel, archive])
        say("listing what an installation brings")
        sbom = out / f"opendata_buffer-{version}.cdx.json"
        write_sbom(source, wheel, sbom)
    if missing := missing_in_sbom(sbom, pyproject):
        raise NotReady(f"the bill of materials does not list {', '.join(missing)}")
    (out / "recipe.yaml").write_text(recipe(pyproject, digest(archive)), "utf-8")
    url = pyproject["project"]["urls"]["Repository"]
    (out / "RELEASE_NOTES.md").write_text(with_links(notes, url, version), "utf-8")
    write_sums(out)
    say("building the site")
    sites.publish(out / "site")
    return version


def next_steps(version: str, out: Path, *, tagged: bool) -> str:
    """Return what a maintainer does after a build, as text."""
    steps = [
        f"Read {out}/RELEASE_NOTES.md, and look at {out}/site/index.html.",
        f"Try the wheel: pip install {out}/opendata_buffer-{version}-py3-none-any.whl",
    ]
    if not tagged:
        steps.append(f"Tag the commit: git tag --sign v{version} -m 'opendata-buffer {version}'")
    steps += [
        f"Push the tag: git push origin v{version}. The workflow release.yml builds the same "
        "files, attests them, and publishes the packages after a maintainer has approved it.",
        "Publish the draft of the release, the folder of the site, and the conda recipe.",
        "Begin the next version: raise it in pyproject.toml and add its heading to CHANGELOG.md.",
    ]
    lines = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    built = f"opendata-buffer {version} is built and checked, in {out}/. Nothing is published."
    return "\n".join([built, "Next:", *(f"  {line}" for line in lines)])


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="./run release", description="Build and check a release, and publish nothing."
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="default: dist, emptied")
    parser.add_argument("--dev", type=int, metavar="N", help="build the version VERSION.devN")
    parser.add_argument("--tag", help="the tag that is being released, such as v0.2.0")
    parser.add_argument("--repository", metavar="URL", help="the repository that runs this")
    given = parser.parse_args(arguments)
    try:
        version = make(given.out, dev=given.dev, tag=given.tag, repository=given.repository)
        tagged = bool(git(ROOT, "tag", "--points-at", "HEAD", "--list", f"v{version}"))
    except NotReady as error:
        print(f"not ready: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"not ready: {error}", file=sys.stderr)
        return 1
    if given.dev is None:
        print(next_steps(version, given.out, tagged=tagged))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
