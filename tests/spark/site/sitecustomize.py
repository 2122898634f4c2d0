"""Let Python processes that Spark starts load the installed pyspark, which is compiled.

Spark puts its own zip of pyspark before everything else. The zip only has sources, which every
process would compile again. That takes twice the time of the rest of its start.

After each task, a worker also collects garbage among all objects that it ever imported. Freezing
these objects after their first collection avoids that.
"""

import gc
import sys
from importlib.util import find_spec

# A Spark that was not installed with pip has no pyspark except the zip.
_others = [folder for folder in sys.path if not folder.endswith(("/pyspark.zip", "-src.zip"))]
_all, sys.path[:] = sys.path[:], _others
if find_spec("pyspark") is None or find_spec("py4j") is None:
    sys.path[:] = _all


def _freeze(phase: str, collected: dict[str, int]) -> None:
    if phase == "stop" and collected["generation"] == 2:
        gc.freeze()


gc.callbacks.append(_freeze)
