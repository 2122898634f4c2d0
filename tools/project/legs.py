"""Which tests ``./run test``, ``./run test --full``, and ``./run test --nightly`` run, and where.

A test has the marker ``full`` or not. ``./run test`` runs those without it, which find most
defects within minutes: in ``.venv``, and in one Spark session. ``./run test --full`` runs the
others. Every test is in exactly one of the legs of ``QUICK`` and ``FULL``, and .ci/run runs both
(tests/unit/project/test_legs.py).

``AGAIN`` runs some of them a second time where other code may be at work: with the lowest
versions of the libraries, and with the wheel in place of the checkout. The run with the wheel also
measures coverage, which more than doubles the time of a test.
"""

from __future__ import annotations

from dataclasses import dataclass

TWO_PROCESSES = ("-n", "2", "--dist", "worksteal")

ELSEWHERE = "not full and not checkout"
"""The tests that another environment runs again: fast, and not about the files of the checkout."""


@dataclass(frozen=True)
class Leg:
    """A call of pytest.

    Attributes:
        name: Its name in the summary.
        paths: Files and folders below ``tests``. Empty for all.
        ignored: Files and folders in them that other legs run.
        full: Whether it runs the tests with the marker ``full``, or those without it.
        options: Further arguments.
        lowest: Whether it runs in the environment with the lowest versions.
    """

    name: str
    full: bool
    paths: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    lowest: bool = False

    def runs(self, path: str, full: bool) -> bool:
        """Return whether it runs a test.

        Args:
            path: The path of its file below ``tests``.
            full: Whether the test has the marker ``full``.
        """
        return (
            full == self.full
            and (not self.paths or _is_in(path, self.paths))
            and not _is_in(path, self.ignored)
        )

    @property
    def arguments(self) -> list[str]:
        """The arguments of pytest."""
        return [
            "-q",
            *("-m", "full" if self.full else "not full"),
            *self.options,
            *(f"tests/{path}" for path in self.paths),
            *(f"--ignore=tests/{path}" for path in self.ignored),
        ]


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


# The first leg of a list begins in the second lane, next to lint and the documentation: see lanes.

QUICK = (
    # One session for all tests of Spark: a second one costs as much as ten tests.
    Leg("spark-tests", False, paths=("spark",)),
    Leg("tests", False, ignored=("spark",), options=TWO_PROCESSES),
)

FULL = (
    Leg("full-spark-tests", True, paths=("spark",), ignored=("spark/chaos", "spark/test_delta.py")),
    Leg("full-tests", True, ignored=("spark",), options=TWO_PROCESSES),
    # Whole files: drivers are killed and suspended, and the JVM of each starts alone.
    Leg(
        "chaos-tests",
        True,
        paths=("spark/chaos",),
        options=("-n", "2", "--dist", "loadfile", "--durations=6"),
    ),
    # No Delta has been published for the newest Spark.
    Leg(
        "delta-tests",
        True,
        paths=("spark/test_delta.py",),
        options=("-p", "no:cacheprovider"),
        lowest=True,
    ),
)

AGAIN = ("-q", "-m", ELSEWHERE, "-p", "no:cacheprovider")

# Each library in the lowest version that pyproject.toml declares: boto3, azure, and google (stores,
# contract), click and rich (cli), numpy, pyarrow, and zstandard (formats, values, golden, source,
# sink, consumer, topic), opentelemetry (metrics), ulid (testing), websockets (broker), and
# hatchling (packaging). The packages gc, producer, and queue call none of them directly.
LOWEST = (
    *(*AGAIN, *TWO_PROCESSES, "-k", "not race_between"),
    *("tests/unit", "tests/golden", "tests/contract/test_object_store.py"),
    *("tests/contract/test_lost_answers.py", "tests/contract/test_queue_on_servers.py"),
    *(f"--ignore=tests/unit/{package}" for package in ("gc", "producer", "queue")),
)

# With the floor of coverage that pyproject.toml states.
WHEEL = (
    *(*AGAIN, *TWO_PROCESSES, "--cov", "--cov-report=", "tests/unit", "tests/golden"),
    "--ignore=tests/unit/test_packaging.py",  # It builds the wheel from the source.
)
WHEEL_SPARK = (*AGAIN, "tests/spark/test_readers.py")

# Spark 4.0 and 4.1 tell a Python source less, as do the long-term runtimes of Databricks.
OLDER_SPARKS = ("4.0", "4.1")
OLDER_SPARK = (
    *("-q", "-p", "no:cacheprovider"),
    *("tests/spark/test_source.py", "tests/spark/test_restart_matrix.py"),
    *("tests/spark/test_sink.py", "tests/spark/chaos/test_driver_kills.py"),
)

NIGHT = {
    "OPENDATA_BUFFER_KILLS": "200",
    "OPENDATA_BUFFER_SEEDS": "2000",
    "HYPOTHESIS_PROFILE": "ci",
    "OPENDATA_BUFFER_RACE_ROUNDS": "200",
    "OPENDATA_BUFFER_CLUSTER": "1",
    "OPENDATA_BUFFER_INTERLEAVINGS": "300",
}
"""What a night has time for. Each variable can also be set by itself."""
