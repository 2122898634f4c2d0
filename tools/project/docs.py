"""Build the site into ``.venv/site``, and fail for a warning: ``python -m tools.project.docs``.

Links that lead nowhere, pages in no menu, and names that do not exist are warnings, and
``--strict`` fails for a warning. With ``--quiet``, mkdocs would not see warnings. So its output is
kept, and shown after a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tools.project import ROOT


def build() -> int:
    """Build the site.

    Returns:
        The exit code of mkdocs.
    """
    made = ROOT / ".venv" / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(made)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        sys.stdout.buffer.write(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(build())
