"""The subjects of commits make ``git log --oneline`` a changelog."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.commits import main, new_commits, problems

pytestmark = pytest.mark.checkout


def git(root: Path, *arguments: str) -> None:
    author = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path, *message: str) -> None:
    parts = [option for part in message for option in ("-m", part)]
    git(root, "commit", "--allow-empty", "--no-verify", *parts)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository with one published commit, whose subject breaks every rule."""
    git(tmp_path, "init", "--initial-branch=main")
    commit(tmp_path, "was published " + "long ago " * 9 + ".")
    git(tmp_path, "checkout", "-b", "change")
    return tmp_path


@pytest.mark.parametrize(
    "message",
    [
        "Register readers on the topic",
        "Register readers on the topic\n\nA reader that is down misses nothing.",
        "R" * 72,
    ],
)
def test_a_good_subject_has_no_problem(message: str) -> None:
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("", "the message is empty"),
        ("R" * 73, "it has 73 characters, and at most 72 fit"),
        ("register readers", "it does not start with a capital letter"),
        ("fixup! Register readers", "it does not start with a capital letter"),
        ("Register readers.", "it ends with a dot"),
        ("Register readers\non the topic", "the second line of the message is not empty"),
    ],
)
def test_a_bad_subject_is_refused_with_the_rule(message: str, problem: str) -> None:
    assert problems(message) == [problem]


def test_published_commits_are_not_checked_and_new_ones_are(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], checkout) == 0
    commit(checkout, "Register readers on the topic", "a body may start in any way.")
    assert main([], checkout) == 0
    commit(checkout, "registered readers.")
    assert main([], checkout) == 1
    said = capsys.readouterr().err
    assert said.count("'registered readers.'") == 2
    assert "long ago" not in said
    assert main(["HEAD~1..HEAD"], checkout) == 1
    assert main(["main..HEAD~1"], checkout) == 0


def test_a_merge_is_not_checked(checkout: Path) -> None:
    commit(checkout, "Register readers on the topic")
    git(checkout, "checkout", "-b", "other", "main")
    commit(checkout, "Delete readers from the topic")
    git(checkout, "merge", "--no-ff", "-m", "merge branch 'change' into other.", "change")
    assert main([], checkout) == 0
    assert main(["main..HEAD"], checkout) == 0


def test_a_clone_compares_with_the_published_branch_and_not_with_its_own(checkout: Path) -> None:
    git(checkout, "checkout", "main")
    clone = checkout / "clone"
    git(checkout, "clone", "--no-hardlinks", str(checkout), str(clone))
    commit(clone, "register readers")
    assert new_commits(clone) == "origin/main..HEAD"
    assert main([], clone) == 1


def test_without_a_published_branch_it_says_that_it_checks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "init", "--initial-branch=elsewhere")
    assert main([], tmp_path) == 0
    assert "not checked" in capsys.readouterr().out


def test_the_hook_reads_one_message_without_its_comments(tmp_path: Path) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("Register readers\n\n# Please enter the commit message.\n# On branch main\n")
    assert main(["--message", str(message)]) == 0
    message.write_text("# Please enter the commit message.\nregister readers\n")
    assert main(["--message", str(message)]) == 1


def test_wrong_arguments_exit_with_2() -> None:
    assert main(["--all"]) == 2
    assert main(["--message"]) == 2
