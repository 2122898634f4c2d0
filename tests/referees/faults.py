"""Check the referees with faults that are seeded into a copy of the code, one by one.

``./run referees --faults [NAME ...]`` prints the referee that caught each fault, as rows of the
table in ``README.md``, and exits with 1 if no one caught it. A fault replaces a text that must
occur exactly once, so a change of that code must also change the fault.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
HISTORIES, CALLS = 24, 1_500

CORE = "core/opendata_buffer/"
FAULTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    # Name: kind of history, file, substitutions.
    "the epoch is not checked": (
        "queue", CORE + "queue/queue.py", [("if manifest.epoch != epoch:", "if False:")],
    ),
    "a fenced consumer acknowledges": (
        "queue", CORE + "queue/queue.py",
        [("            self.check_epoch(before, epoch)\n            if through_sequence >=",
          "            if through_sequence >=")],
    ),
    "a consumer that starts does not raise the epoch": (
        "queue", CORE + "queue/queue.py",
        [("after = before.with_epoch(before.epoch + 1)\n            return after if last",
          "after = before\n            return after if last")],
    ),
    "one too many is acknowledged": (
        "queue", CORE + "queue/queue.py",
        [("return before.drop_through(through_sequence)",
          "return before.drop_through(min(through_sequence + 1, before.next_sequence - 1))")],
    ),
    "a consumer hands out one too few": (
        "queue", CORE + "consumer/owned_queue.py",
        [("self.cursors.hand_out(entries[-1].sequence, repeats)",
          "self.cursors.hand_out(entries[-1].sequence + (len(entries) > 4), repeats)")],
    ),
    "a fenced reader of a log acknowledges": (
        "log", CORE + "queue/reader_queue.py",
        [("            self.check_epoch(found, epoch)\n            moved", "            moved")],
    ),
    "the floor of a log is that of its fastest reader": (
        "log", CORE + "queue/retention.py", [("min([*bounds, next_sequence])", "max(bounds)")],
    ),
    "the collector writes an index of a log that has changed": (
        "log", CORE + "gc.py",
        [("lambda before: new if before == index else before", "lambda before: new")],
    ),
    "a reader of a log does not raise its epoch": (
        "log", CORE + "queue/reader_queue.py",
        [("1 if before is None else before.epoch + 1", "1 if before is None else before.epoch")],
    ),
    "an append is not searched for before it is repeated": (
        "queue", CORE + "queue/cas.py",
        [("found = self._proof is not None and", "found = False and self._proof is not None and")],
    ),
    "a lost answer is taken for a failure": (
        "queue", CORE + "queue/cas.py", [("                writes.lost_answer(version)\n", "")],
    ),
    "an append that was dequeued is repeated": (
        "queue", CORE + "queue/queue.py",
        [("if any(mark < now.first_sequence for mark in marks):", "if False:")],
    ),
    "a lost answer is looked up once, and too early": (
        "queue", CORE + "queue/cas.py",
        [("writes.lost_answer(version)\n                raise _Retry(",
          "if writes.found_in(self._read_once(), self._version):\n                    "
          "return after\n                raise PermanentStorageError(")],
    ),
    "the store ignores If-Match": (
        "queue", CORE + "stores/memory.py",
        [("found is not None and found.version != version:",
          "found is not None and version is None:")],
    ),
    "objects are collected by the store's Date alone": (
        "queue", CORE + "gc.py",
        [("min(page.now_ms, own_ms) - grace_ms", "page.now_ms - grace_ms"),
         ("    if apart_ms <= max(grace_ms / 4, _LEAST_TOLERANCE_MS):", "    if apart_ms >= 0:")],
    ),
    "the grace period is forgotten": (
        "queue", CORE + "gc.py",
        [("min(page.now_ms, own_ms) - grace_ms", "min(page.now_ms, own_ms)")],
    ),
    "the sink takes the next batch for a repeat": (
        "sink", "buffer_sink/committer.py",
        [("if record is not None and record.batch >= transaction.batch:",
          "if record is not None and record.batch + 1 >= transaction.batch > 5:")],
    ),
    "the sink appends a repeat, and the filter delivers it": (
        "sink", CORE + "consumer/isolation.py",
        [("elif txn.batch <= high and not self._continues(txn, sequence):", "elif False:")],
    ),
    "a broker's successor does not search for an append": (
        "broker", CORE + "broker/broker.py",
        [("search = None if since is None else", "search = None if True else")],
    ),
    "claims are not stored before they are answered": (
        "work", CORE + "broker/dispatcher.py",
        [("term.write(this_round.claims)", "term.claims = this_round.claims")],
    ),
    "the frontier passes a batch in work": (
        "work", CORE + "broker/claims.py",
        [("while frontier in done:\n            done.remove(frontier)",
          "while frontier in done or frontier + 1 in done:\n            done.discard(frontier)")],
    ),
    "a released batch counts as done": (
        "work", CORE + "broker/dispatcher.py",
        [('if request.how == "release":\n            self.claims = self.claims.release(sequence)',
          'if request.how == "release":\n            self.claims = self.claims.finish(sequence)')],
    ),
    "undecided batches are delivered": (
        "topic", CORE + "messages.py",
        [("if message.flags == CONTINUE_TXN:\n            if", "if False:\n            if")],
    ),
    "FINAL is not masked": (
        "topic", CORE + "messages.py",
        [("    flags = read.flags & ~FINAL\n    is_", "    flags = read.flags\n    is_")],
    ),
    "a transaction that is rolled back is committed": (
        "topic", CORE + "topic/publisher.py",
        [("dict.fromkeys(current.clocks, ROLL_BACK), current)",
          "{name: clock + 1 for name, clock in current.clocks.items()}, current)")],
    ),
    "a fenced publisher commits": (
        "serial", CORE + "transactions.py",
        [("record is None or record.run != self._run or", "record is None or")],
    ),
    "a committed transaction is not completed": (
        "serial", CORE + "transactions.py",
        [("if undecided_markers(manifest, name, [marker]):", "if False:")],
    ),
    "markers go to the first partition only": (
        "topic", CORE + "transactions.py",
        [("clock in attempt.intents.items()", "clock in [*attempt.intents.items()][:1]")],
    ),
    "a transaction is committed before it is durable": (
        "topic", CORE + "topic/publisher.py",
        [("        failure = self._failure\n        for name, handle in self._handles:",
          "        failure = self._failure\n        for name, handle in self._handles[:1]:")],
    ),
    "open transactions are acknowledged": (
        "topic", CORE + "consumer/position.py",
        [("return self._behind.stable_end(self._next_processed)", "return self._next_processed")],
    ),
    "a position forgets open transactions": (
        "topic", CORE + "consumer/position.py",
        [("Position(queue_id, sequence, processed, {} if plain else state)",
          "Position(queue_id, sequence, processed, {})")],
    ),
}  # fmt: skip


def faulty(name: str) -> str:
    """Return the text of a file with its fault."""
    _, file, substitutions = FAULTS[name]
    text = (ROOT / file).read_text()
    for old, new in substitutions:
        if text.count(old) != 1:
            raise ValueError(f"fault {name!r}: {old!r} occurs {text.count(old)} times in {file}")
        text = text.replace(old, new)
    return text


def seeded(root: Path, name: str) -> None:
    """Copy the code with one fault."""
    for folder in ("core", "buffer_sink", "tools", "tests/support", "tests/referees"):
        ignored = shutil.ignore_patterns("__pycache__", "build")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    (root / "tests/referees/build").symlink_to(Path(__file__).parent / "build")
    (root / FAULTS[name][1]).write_text(faulty(name))


def caught(name: str, jobs: int) -> tuple[str, int]:
    """Return the first verdict against a history ("" if there was none), and its number."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        seeded(root, name)
        command = [sys.executable, "-m", "tests.referees", "--stop", "--where", "threads",
                   "--kind", FAULTS[name][0], "--histories", str(HISTORIES), "--calls", str(CALLS),
                   "--jobs", str(jobs), "--seed", "1"]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": f"{root / 'core'}:{root}"}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    # The code notices some faults itself, and the history cannot be completed.
    by = (
        r"^  (Porcupine(?=: Illegal)|Porcupine: Unknown|adya: .*?(?= in )|it could not.*"
        r"|the history could not be completed: \w+)"
    )
    said = re.search(by, done.stdout, re.M)
    played = len(re.findall(r"^--kind", done.stdout, re.M))
    if not played:
        raise RuntimeError(done.stdout + done.stderr)
    return said[1][:110] if said else "", played


def run(names: Iterable[str], jobs: int) -> int:
    missed = 0
    for name in names or FAULTS:
        by, played = caught(name, jobs)
        missed += not by
        print(f"| {name} | {FAULTS[name][0]} | {by or '**no one**'} | {played} |", flush=True)
    return 1 if missed else 0
