"""Python processes that Spark starts load the installed pyspark, which is compiled.

Spark puts its own zip of pyspark before everything else, and that has sources only: each process
would compile them anew, which takes twice the time of all the rest of its start.
"""

import sys
from importlib.util import find_spec

# What Spark is distributed with beside pip has no other pyspark than the zip.
_others = [each for each in sys.path if not each.endswith(("/pyspark.zip", "-src.zip"))]
_all, sys.path[:] = sys.path[:], _others
if find_spec("pyspark") is None or find_spec("py4j") is None:
    sys.path[:] = _all
