"""``work``: one command per batch, and the meaning of its exit code."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from opendata_buffer.cli.broker import CommandPool
from opendata_buffer.cli.errors import Failure
from opendata_buffer.errors import ClaimLost, Fenced
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import eventually
from tests.unit.cli.shell import Until, fails, fill, run

RUNTIME = SystemRuntime()


class Given:
    """A claimed batch that records how it was finished."""

    def __init__(self, sequence: int, delivery_count: int = 1, *, lost: bool = False) -> None:
        self.sequence = sequence
        self.location = f"ingest/{sequence}.batch"
        self.delivery_count = delivery_count
        self.values: Sequence[bytes] = [b"a", b"b\r"]
        self.ended: list[object] = []
        self._lost = lost

    def done(self) -> None:
        if self._lost:
            raise ClaimLost(self.sequence)
        self.ended.append("done")

    def release(self, *, delay: float = 0.0) -> None:
        self.ended.append(delay)

    def reject(self, reason: str) -> None:
        self.ended.append(reason)


class PoolRun:
    """A pool of commands for some batches that stops once all of them are finished."""

    def __init__(self, shell: str, *batches: Given, max_deliveries: int = 0) -> None:
        self.left = list(batches)
        self.printed: list[str] = []
        self.pool = CommandPool(
            self.claim, ["sh", "-c", shell], 1, RUNTIME, self.printed.append, max_deliveries
        )

    def claim(self, most: int, timeout: float) -> list[Given]:
        if self.left:
            return [self.left.pop(0)]
        time.sleep(0.01)
        return []


def run_until(ran: PoolRun, when: Callable[[], object]) -> None:
    ran.pool.runtime = Until(when)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        ran.pool.run()


def test_exit_code_0_finishes_the_batch_and_the_command_gets_lines_and_environment(
    tmp_path: Path,
) -> None:
    batch = Given(7, delivery_count=3)
    names = " ".join(f"$OPENDATA_BUFFER_{each}" for each in ("SEQUENCE", "LOCATION"))
    ran = PoolRun(
        f"(echo {names} $OPENDATA_BUFFER_DELIVERY_COUNT; cat) > {tmp_path / 'out'}", batch
    )
    run_until(ran, lambda: batch.ended)
    assert batch.ended == ["done"]
    assert (tmp_path / "out").read_bytes() == b"7 ingest/7.batch 3\na\nb\r\n"
    assert ran.printed == []
    eventually(lambda: "1 batch done, 0 released" in ran.pool.summary())


def test_a_batch_goes_to_the_quarantine_after_its_last_failed_delivery() -> None:
    batches = [Given(1, delivery_count=4), Given(2, delivery_count=5)]
    ran = PoolRun("exit 1", *batches, max_deliveries=5)
    run_until(ran, lambda: batches[1].ended)
    assert batches[0].ended == [8]
    assert batches[1].ended == ["sh ended with exit code 1 in delivery 5"]
    assert ran.printed[1].endswith("it goes to the quarantine")


def test_the_exit_code_counts_even_if_a_command_does_not_read_its_input() -> None:
    batch = Given(0)
    batch.values = [b"x" * 1_000_000]
    run_until(PoolRun("exit 0", batch), lambda: batch.ended)
    assert batch.ended == ["done"]


def test_a_lost_claim_is_reported_and_work_continues() -> None:
    lost, batch = Given(0, lost=True), Given(1)
    ran = PoolRun("exit 0", lost, batch)
    run_until(ran, lambda: batch.ended)
    assert (lost.ended, batch.ended) == ([], ["done"])
    assert ran.printed[0].startswith("batch 0 was processed, and comes again")


@pytest.mark.parametrize(
    "shell", ["sleep 300", "trap '' TERM; echo; while true; do sleep 300; done"]
)
def test_an_interrupt_ends_the_command_with_its_children_and_releases_the_batch(
    shell: str, tmp_path: Path
) -> None:
    batch = Given(7)
    ran = PoolRun(f"echo $$ > {tmp_path / 'pid'}; {shell}", batch)
    pid = tmp_path / "pid"
    run_until(ran, lambda: pid.exists() and pid.read_text())
    eventually(lambda: batch.ended)
    assert batch.ended == [0]
    assert ran.printed == []
    eventually(lambda: not alive_in_group(int(pid.read_text())))


def test_a_command_that_starts_during_an_interrupt_is_ended_too() -> None:
    ran = PoolRun("trap '' TERM; sleep 60")
    ran.pool._stopping = True
    assert ran.pool._run(Given(7), b"") == -signal.SIGKILL


def alive_in_group(group: int) -> bool:
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listed.splitlines()]
    return any(int(pgid) == group and not state.startswith("Z") for pgid, state in rows)


def test_a_command_that_cannot_be_started_ends_the_work_without_a_failed_delivery() -> None:
    batch = Given(7)
    ran = PoolRun("", batch)
    ran.pool.command = ["/nowhere/command"]
    with pytest.raises(Failure, match="cannot run '/nowhere/command'"):
        ran.pool.run()
    assert batch.ended == [0]


def test_an_error_of_the_queue_ends_the_work() -> None:
    ran = PoolRun("exit 0")

    def claim(most: int, timeout: float) -> list[Given]:
        raise Fenced("ingest/manifest", 1, 2)

    ran.pool.claim = claim
    with pytest.raises(Fenced):
        ran.pool.run()


def test_a_mistyped_path_or_command_is_reported_before_anything_is_claimed(
    url: str, store: MemoryStore
) -> None:
    assert "or create it with --create-if-missing" in fails("work", url, "--", "cat")
    assert store.list("").objects == ()
    fill(url, [b"a"])
    before = store.list("").objects
    assert "there is no command 'cta'" in fails("work", url, "--", "cta")
    assert store.list("").objects == before


def test_a_command_is_required_and_a_mistyped_option_is_not_part_of_it(url: str) -> None:
    assert run("work", url).exit_code == 2
    assert run("work", url, "--paralel", "2", "--", "cat").exit_code == 2
