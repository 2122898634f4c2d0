"""Workflows, forms, links, and what newcomers read first agree with the package and its tools."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools.checks import ROOT

pytestmark = pytest.mark.checkout

yaml = pytest.importorskip("yaml")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY: str = PROJECT["urls"]["Repository"]
VERSION: str = PROJECT["version"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
VERIFIED = {
    "actions/checkout": "11bd71901bbe5b1630ceea73d27597364c9af683",
    "actions/setup-python": "a26af69be951a213d495a4c3e4e4022e16d87065",
    "actions/upload-artifact": "ea165f8d65b6e75b540449e92b4886f43607fa02",
    "actions/download-artifact": "d3f86a106a0bac45b974a628896c90dbdf5c8093",
    "actions/attest-build-provenance": "e8998f949152b193b063cb0ec769d69d929409be",
    "pypa/gh-action-pypi-publish": "76f52bc884231f62b9a034ebfe128415bbaabdfc",
}


def name_of(path: Path) -> str:
    return path.name


def workflow(path: Path) -> dict[str, Any]:
    """Return a workflow, whose key ``on`` is the value true in YAML 1.1."""
    loaded: dict[Any, Any] = yaml.safe_load(path.read_text("utf-8"))
    return {"on" if key is True else key: value for key, value in loaded.items()}


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = workflow(path)["jobs"]
    return found


def is_command(name: str) -> bool:
    """Whether the help of ``./run`` lists a command."""
    texts = (path.read_text("utf-8") for path in [ROOT / "run", *(ROOT / "tools").rglob("*.py")])
    return any(re.search(rf"^  {name}\b", text, re.MULTILINE) for text in texts)


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


# ---- workflows


def test_there_are_workflows_for_changes_nights_and_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "nightly", "release"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_actions_are_pinned_by_a_hash_that_was_compared_with_its_tag(path: Path) -> None:
    used = re.findall(r"uses: (\S+?)@(\S+)(.*)", path.read_text("utf-8"))
    assert used
    for action, commit, comment in used:
        assert re.fullmatch("[0-9a-f]{40}", commit), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
        # Dependabot's update is compared by a person, who changes this table, too.
        assert VERIFIED[action] == commit, action


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_has_no_permission_and_each_job_only_what_it_needs(path: Path) -> None:
    assert workflow(path)["permissions"] == {}
    for name, job in jobs(path).items():
        assert isinstance(job["permissions"], dict), name
        granted = {scope for scope, access in job["permissions"].items() if access == "write"}
        expected = {
            "attest": {"id-token", "attestations"},
            "test-index": {"id-token"},
            "index": {"id-token"},
            "draft": {"contents"},
        }
        assert granted == expected.get(name, set()), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_job_ends_and_does_not_run_twice_at_once(path: Path) -> None:
    assert workflow(path)["concurrency"]["group"]
    for name, job in jobs(path).items():
        assert 5 <= job["timeout-minutes"] <= 360, name


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_the_code_of_a_job_cannot_push_to_the_repository(path: Path) -> None:
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_no_script_contains_an_expression_that_others_could_fill(path: Path) -> None:
    for step in steps(path):
        assert "${{" not in step.get("run", ""), step


def test_jobs_that_run_code_of_the_repository_cannot_publish() -> None:
    for path in WORKFLOWS:
        for name, job in jobs(path).items():
            runs_code = any("checkout" in step.get("uses", "") for step in job["steps"])
            if runs_code:
                assert set(job["permissions"].items()) == {("contents", "read")}, name


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_the_scripts_of_a_workflow_exist(path: Path) -> None:
    scripts = "\n".join(step.get("run", "") for step in steps(path))
    for module in re.findall(r"python -m (tools\.\w+)", scripts):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    for command in re.findall(r"\./run (\w+)", scripts):
        assert is_command(command), command
    for argument in re.findall(r"tests/[\w/*.]+", scripts):
        assert list(ROOT.glob(argument)), argument


def test_each_python_that_the_package_names_is_tested() -> None:
    pairs = jobs(ROOT / ".github/workflows/ci.yml")["versions"]["strategy"]["matrix"]["include"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert set(named) <= {pair["python"] for pair in pairs}
    assert pairs[0]["python"] == PROJECT["requires-python"].removeprefix(">=")


# ---- forms


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_a_form_has_a_name_and_questions_with_labels(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    assert form["name"]
    assert form["description"]
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in asked}) == len(asked) >= 3
    assert all(part["attributes"]["label"] for part in asked)
    assert any(part.get("validations", {}).get("required") for part in asked)


def test_a_report_of_a_bug_has_the_state_of_the_queue_and_the_versions() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text("utf-8"))
    asked = {part.get("id"): part for part in form["body"]}
    assert "opendata-buffer status STORE --json" in asked["status"]["attributes"]["label"]
    assert "Databricks" in asked["spark"]["attributes"]["label"]
    for name in ("status", "version"):
        assert asked[name]["validations"]["required"]


# ---- the repository and its links


def test_the_urls_of_the_package_lead_to_files_and_pages_of_the_repository() -> None:
    urls = PROJECT["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(urls)
    for name, url in urls.items():
        if name == "Format specification":
            continue
        assert url.startswith(REPOSITORY), name
        path = url.removeprefix(REPOSITORY)
        if path.startswith("/blob/HEAD/"):
            assert (ROOT / path.removeprefix("/blob/HEAD/")).is_file(), name
        else:
            assert path in ("", "/issues", "/releases"), name


@pytest.mark.parametrize("path", ["README.md", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml"])
def test_other_files_name_the_same_repository(path: str) -> None:
    text = (ROOT / path).read_text("utf-8")
    owner = REPOSITORY.rpartition("/")[0]
    named = re.findall(rf"{re.escape(owner)}/[\w.-]+", text)
    assert named
    assert set(named) == {REPOSITORY}


def test_badges_show_existing_workflows() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    shown = re.findall(r"actions/workflows/(\w+\.yml)", text)
    assert {"ci.yml", "nightly.yml"} == set(shown)
    assert all((ROOT / ".github/workflows" / name).is_file() for name in shown)


def test_the_citation_agrees_with_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert "version" not in citation, "the version is in pyproject.toml only"


def test_every_file_has_an_owner() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text("utf-8").splitlines()
    rules = [line.split() for line in lines if line and not line.startswith("#")]
    assert rules[0][0] == "*"
    for path, *owners in rules:
        assert owners
        assert path == "*" or (ROOT / path.strip("/")).exists(), path


def test_updates_wait_some_days_and_cover_python_and_actions() -> None:
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text("utf-8"))["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"pip", "github-actions"}
    assert all(update["cooldown"]["default-days"] >= 7 for update in updates)


# ---- the version, and what newcomers read first


def test_pages_name_the_wheel_of_this_version() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = {
        version: page
        for page in pages
        for version in re.findall(r"opendata_buffer-(\d[\w.]*?)-py3", page.read_text("utf-8"))
    }
    assert set(named) == {VERSION}, named


def test_the_newest_version_in_the_changelog_is_that_of_the_package() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## (\d.*)$", text, re.MULTILINE)[0] == VERSION


def test_the_page_for_agents_is_short_and_names_existing_commands_and_paths() -> None:
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    assert len(text.split()) <= 700
    commands = re.findall(r"^\./run (\w+)", text, re.MULTILINE)
    assert {"lint", "test", "release"} <= set(commands)
    assert all(is_command(command) for command in commands)
    paths = re.findall(r"`([\w./]+/[\w./]*)`", text)
    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "core/opendata_buffer" / path).exists(), path
