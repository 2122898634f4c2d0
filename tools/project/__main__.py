"""``./run`` starts this."""

from __future__ import annotations

import sys

from tools.project.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
