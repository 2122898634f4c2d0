"""The content of a built package: license, types, and a description without dead links."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
assert _spec is not None
assert _spec.loader is not None
hatch_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hatch_build)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel and a source distribution as for a release, and return their folder."""
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return target


def test_the_wheel_has_license_types_and_all_packages(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for package in ("opendata_buffer", "buffer_source", "buffer_sink"):
        assert f"{package}/py.typed" in names
    assert "pyspark_opendata_buffer.py" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]


def test_the_source_distribution_has_the_license_and_the_build_hook(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "hatch_build.py", "pyproject.toml"} <= names


def test_a_package_index_shows_the_readme_without_dead_links(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
    metadata = HeaderParser().parsestr(archive.read(name).decode())
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# opendata-buffer for Spark")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier", [])


LIBRARIES_OF_RUNTIMES = {
    "Databricks 17.3 LTS": {
        "boto3": "1.36.2",
        "click": "8.1.7",
        "opentelemetry-api": "1.32.0",
        "pyarrow": "19.0.1",
        "rich": "13.9.4",
    },
    "Databricks 18.x": {
        "boto3": "1.40.0",
        "click": "8.1.8",
        "pyarrow": "21.0.0",
        "zstandard": "0.23.0",
    },
}


@pytest.mark.parametrize("runtime", LIBRARIES_OF_RUNTIMES)
def test_an_install_does_not_replace_a_library_of_a_runtime(runtime: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    for name, version in LIBRARIES_OF_RUNTIMES[runtime].items():
        assert version in wanted[name], f"{name} {version}"
