"""A release is made of one commit, and only if tag, version, and changelog agree."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools.conda import recipe, requirement
from tools.release import (
    RESULT,
    ROOT,
    NotReady,
    build_twice,
    check_commit,
    check_repository,
    empty,
    export,
    main,
    make,
    missing_in_sbom,
    next_steps,
    notes_of,
    pyproject_of,
    set_version,
    with_links,
    write_sums,
)

pytestmark = pytest.mark.checkout

CHANGELOG = "# Changelog\n\n## Compatibility\n\nPromised.\n\n## 0.2.0\n\nNew.\n\n## 0.1.0\n\nOld.\n"
PROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "sample"
version = "0.2.0"
requires-python = ">=3.11"
"""


def git(root: Path, *arguments: str) -> None:
    author = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository of a project of version 0.2.0, with one commit."""
    root = tmp_path / "checkout"
    (root / "sample").mkdir(parents=True)
    (root / "sample" / "__init__.py").write_text("")
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    git(root, "init", "--initial-branch=main")
    git(root, "add", ".")
    git(root, "commit", "-m", "Add the project")
    return root


# ---- version, tag, and changelog


def test_the_notes_are_what_the_changelog_says_about_the_version() -> None:
    assert notes_of(CHANGELOG, "0.2.0") == "New.\n"


def test_a_changelog_that_describes_another_version_first_is_refused() -> None:
    with pytest.raises(NotReady, match=r"describes 0\.2\.0 first and pyproject\.toml has 0\.3\.0"):
        notes_of(CHANGELOG, "0.3.0")
    with pytest.raises(NotReady, match=r"describes none first"):
        notes_of("# Changelog\n\n## 0.2.0, in work\n", "0.2.0")


def test_links_of_the_notes_lead_to_the_files_of_the_release() -> None:
    notes = "[how](docs/a.md#b) and [SemVer](https://semver.org)\n"
    assert with_links(notes, "https://host/project", "0.2.0") == (
        "[how](https://host/project/blob/v0.2.0/docs/a.md#b) and [SemVer](https://semver.org)\n"
    )


def test_a_commit_without_a_tag_can_be_built_and_not_released(checkout: Path) -> None:
    check_commit(checkout, "0.2.0", tag=None)
    with pytest.raises(NotReady, match=r"there is no tag v0\.2\.0"):
        check_commit(checkout, "0.2.0", tag="v0.2.0")


def test_the_tag_of_the_version_is_on_this_commit(checkout: Path) -> None:
    git(checkout, "tag", "v0.2.0")
    check_commit(checkout, "0.2.0", tag="v0.2.0")
    git(checkout, "commit", "--allow-empty", "-m", "Add more")
    for tag in (None, "v0.2.0"):
        with pytest.raises(NotReady, match=r"v0\.2\.0 is the commit \w{8} and not this one"):
            check_commit(checkout, "0.2.0", tag=tag)


def test_a_tag_of_another_version_is_refused(checkout: Path) -> None:
    git(checkout, "tag", "v0.3.0")
    with pytest.raises(NotReady, match=r"the tag is v0\.3\.0 and the version 0\.2\.0"):
        check_commit(checkout, "0.2.0", tag="v0.3.0")


def test_a_changed_or_new_file_is_refused(checkout: Path) -> None:
    (checkout / "left.txt").write_text("")
    with pytest.raises(NotReady, match=r"not clean.*\n.*left\.txt"):
        check_commit(checkout, "0.2.0", tag=None)


def test_a_package_that_names_another_repository_is_refused() -> None:
    project = pyproject_of(ROOT)
    url = project["project"]["urls"]["Repository"]
    check_repository(project, None)
    check_repository(project, f"{url}/")
    with pytest.raises(NotReady, match=r"names .* and this is https://host/fork"):
        check_repository(project, "https://host/fork")


def test_a_problem_ends_the_command_with_one_line(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--tag", "v9.9.9", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("not ready: ")
    assert not (tmp_path / "out").exists()
    (checkout / "left.txt").write_text("")
    with pytest.raises(NotReady, match="not clean"):
        make(tmp_path / "out", root=checkout)


# ---- packages


def test_two_builds_of_the_exported_commit_are_the_same(checkout: Path, tmp_path: Path) -> None:
    (checkout / "sample" / "not_committed.py").write_text("")
    source = tmp_path / "source"
    export(checkout, source)
    set_version(source, "0.2.0.dev17")
    wheel, archive = build_twice(source, tmp_path / "out", 1_700_000_000)
    assert wheel.name == "sample-0.2.0.dev17-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "sample/__init__.py" in names
    assert "sample/not_committed.py" not in names
    with tarfile.open(archive) as sdist:
        assert {member.mtime for member in sdist.getmembers()} == {1_700_000_000}


def test_builds_that_differ_are_refused(checkout: Path, tmp_path: Path) -> None:
    hook = """
[tool.hatch.build.targets.wheel.hooks.custom]
"""
    (checkout / "pyproject.toml").write_text(PROJECT + hook)
    (checkout / "hatch_build.py").write_text(
        "import os\n"
        "from hatchling.builders.hooks.plugin.interface import BuildHookInterface\n"
        "class Hook(BuildHookInterface):\n"
        "    def initialize(self, version, build_data):\n"
        "        with open(os.path.join(self.root, 'sample', 'where.py'), 'w') as file:\n"
        "            file.write(repr(self.root))\n"
    )
    with pytest.raises(NotReady, match=r"two builds of sample-0\.2\.0-py3-none-any\.whl.* differ"):
        build_twice(checkout, tmp_path / "out", 1_700_000_000)


def test_the_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    empty(tmp_path / "out")
    (tmp_path / "out" / "a.txt").write_text("a")
    write_sums(tmp_path / "out")
    assert (tmp_path / "out" / RESULT).read_text() == (
        "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb  a.txt\n"
    )


def test_an_earlier_build_is_deleted_and_other_files_are_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    empty(out)
    (out / "old.whl").touch()
    empty(out)
    assert not (out / "old.whl").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").touch()
    with pytest.raises(NotReady, match="has files that no build left there"):
        empty(mine)
    assert (mine / "letter.txt").exists()


def test_a_bill_of_materials_without_a_dependency_is_noticed(tmp_path: Path) -> None:
    project: dict[str, Any] = {
        "project": {
            "dependencies": ["boto3>=1.36", "pyasn1-modules", "rich>=13"],
            "optional-dependencies": {"azure": ["azure-identity>=1.19"], "gcs": ["urllib3>=2"]},
        }
    }
    sbom = tmp_path / "sbom.json"
    there = ("boto3", "azure-identity", "urllib3", "idna", "pyasn1_modules")
    components = [{"name": name} for name in there]
    sbom.write_text(json.dumps({"components": components}))
    assert missing_in_sbom(sbom, project) == ["rich"]


def test_the_next_steps_name_the_tag_unless_it_exists(tmp_path: Path) -> None:
    assert "git tag --sign v0.2.0" in next_steps("0.2.0", tmp_path, tagged=False)
    text = next_steps("0.2.0", tmp_path, tagged=True)
    assert "git tag" not in text
    assert "git push origin v0.2.0" in text
    assert "Nothing is published" in text


# ---- conda


def test_the_conda_recipe_has_the_dependencies_and_commands_of_the_package() -> None:
    yaml = pytest.importorskip("yaml")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = pyproject["project"]
    made = yaml.safe_load(recipe(pyproject, "ab" * 32))
    run = made["requirements"]["run"]
    assert run[0] == "python >=${{ python_min }}"
    assert [line.replace(" ", "") for line in run[1:]] == project["dependencies"]
    assert made["context"] == {"version": project["version"], "python_min": "3.11"}
    assert made["build"]["python"]["entry_points"] == ["opendata-buffer = opendata_buffer.cli:main"]
    assert made["source"]["sha256"] == "ab" * 32
    assert made["source"]["url"].endswith("/opendata_buffer-${{ version }}.tar.gz")
    assert made["package"]["name"] == project["name"]


def test_a_dependency_that_a_recipe_would_state_differently_is_refused() -> None:
    assert requirement("pyspark>=4.0,<5") == "pyspark >=4.0,<5"
    assert requirement("numpy") == "numpy"
    for text in ("pyspark[connect]>=4.2", "numpy>=1; python_version < '3.12'"):
        with pytest.raises(ValueError, match="an entry of its own"):
            requirement(text)
