"""A query that Spark itself failed to start is started again, or the lines before it are lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

TRIES = 3
FAILED = ("Python worker failed to connect back", "PYTHON_WORKER_FAILED_TO_CONNECT_BACK")

T = TypeVar("T")


def started(run: Callable[[int], T]) -> T:
    """What ``run`` returns, called with the number of the try: 0, 1, 2.

    It is tried again when Spark could not start a Python worker, which happens on a busy machine
    and says nothing about what is measured. Each try needs a checkpoint of its own.

    Raises:
        Exception: What the last try raised, and any other failure at once.
    """
    for number in range(TRIES):
        try:
            return run(number)
        except Exception as error:
            if number == TRIES - 1 or not any(said in str(error) for said in FAILED):
                raise
            print("Spark could not start a Python worker: trying again", file=sys.stderr)
    raise AssertionError("not reached")
