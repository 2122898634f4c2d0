"""Check the subjects of new commits, so that ``git log --oneline`` reads like a changelog.

::

    python -m tools.commits                    # the commits that main does not have yet
    python -m tools.commits v0.2.0..HEAD       # these commits
    python -m tools.commits --message FILE     # one message, as Git's hook commit-msg calls it

Commits that are published stay as they are. So only new ones are checked, and merges never.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 72
"""Characters of a subject that ``git log --oneline`` shows in a terminal of 80 columns."""
BASES = ("origin/main", "main")
"""Names of the branch that has the published commits; the first one that exists counts."""


def problems(message: str) -> list[str]:
    """Return what is wrong with a commit message.

    Args:
        message: The whole message, without comments.

    Returns:
        Sentences for the author; empty if the message is good.
    """
    lines = message.strip().splitlines() or [""]
    subject = lines[0]
    found = []
    if not subject:
        return ["the message is empty"]
    if len(subject) > LONGEST:
        found.append(f"it has {len(subject)} characters, and at most {LONGEST} fit")
    if not subject[0].isupper():
        found.append("it does not start with a capital letter")
    if subject.endswith("."):
        found.append("it ends with a dot")
    if lines[1:] and lines[1].strip():
        found.append("the second line of the message is not empty")
    return found


def messages_of(commits: str, root: Path) -> list[tuple[str, str]]:
    """Return hash and message of each commit in a range, the newest first, without merges.

    Args:
        commits: A range, such as ``main..HEAD``.
        root: The checkout.

    Raises:
        CalledProcessError: Git does not know the range.
    """
    log = ["git", "log", "--no-merges", "--format=%h%n%B%x00", commits, "--"]
    out = subprocess.run(log, cwd=root, check=True, capture_output=True, text=True).stdout
    entries = [entry.strip() for entry in out.split("\0")]
    pairs = (entry.partition("\n") for entry in entries if entry)
    return [(commit, message) for commit, _, message in pairs]


def new_commits(root: Path) -> str | None:
    """Return the range of the commits that are not published; None if no branch says which."""
    for base in BASES:
        found = ["git", "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"]
        if subprocess.run(found, cwd=root, capture_output=True).returncode == 0:
            return f"{base}..HEAD"
    return None


def without_comments(text: str) -> str:
    """Return a message as Git stores it: without comments, and without the diff below them."""
    text = text.partition("\n# ------------------------ >8")[0]
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run the command line. Returns the exit code: 1 if a subject breaks a rule."""
    if len(arguments) == 2 and arguments[0] == "--message":
        checked = [("the message", without_comments(Path(arguments[1]).read_text("utf-8")))]
    elif len(arguments) <= 1 and not "".join(arguments).startswith("--"):
        commits = arguments[0] if arguments else new_commits(root)
        if commits is None:
            print(f"subjects of commits not checked: no branch {' or '.join(BASES)}")
            return 0
        checked = messages_of(commits, root)
    else:
        print("usage: python -m tools.commits [RANGE | --message FILE]", file=sys.stderr)
        return 2
    wrong = 0
    for commit, message in checked:
        for problem in problems(message):
            subject = message.strip().partition("\n")[0]
            print(f"{commit} {subject!r}: {problem}", file=sys.stderr)
            wrong += 1
    if wrong:
        print("CONTRIBUTING.md has the rules for commits (git commit --amend)", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
