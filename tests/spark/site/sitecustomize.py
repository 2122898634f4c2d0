"""Python processes that Spark starts load the installed pyspark, which is compiled.

Spark puts its own zip of pyspark before everything else, and that has sources only: each process
would compile them anew, which takes twice the time of all the rest of its start.

And a worker walks after each task through all that it ever imported, to collect garbage. What was
looked at once is not looked at again.
"""

import gc
import sys
from importlib.util import find_spec

# What Spark is distributed with beside pip has no other pyspark than the zip.
_others = [each for each in sys.path if not each.endswith(("/pyspark.zip", "-src.zip"))]
_all, sys.path[:] = sys.path[:], _others
if find_spec("pyspark") is None or find_spec("py4j") is None:
    sys.path[:] = _all


def _freeze(phase: str, collected: dict[str, int]) -> None:
    if phase == "stop" and collected["generation"] == 2:
        gc.freeze()


gc.callbacks.append(_freeze)
