"""The referees: Porcupine for queues and adya for transactions, built with Go and Cargo."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.referees.history import merged
from tests.referees.play import PARTITIONS, TOPICS, play
from tools.servers import find

HERE = Path(__file__).parent
LOG, TRANSACTIONS = HERE / "build/log", HERE / "build/cargo/release/transactions"
REFUSED = HERE / "build/refused"
PARTIAL = "G1a,G1b,G-single,duplicate-elements,incompatible-order,internal,dirty-update"
Call = dict[str, Any]


def missing() -> str | None:
    """Build the referees. Return the reason why that is impossible, or None."""
    go = ["go", "build", "-o", str(LOG), "."]
    cargo = ["cargo", "build", "--locked", "--release", "-q", "--target-dir"]
    for folder, command in (("log", go), ("transactions", [*cargo, str(HERE / "build/cargo")])):
        if (tool := find(command[0])) is None:
            return f"the referees are not built: {command[0]} is missing"
        done = subprocess.run(
            [tool, *command[1:]], cwd=HERE / folder, capture_output=True, text=True
        )
        if done.returncode:
            return f"the referees are not built: {done.stderr[-500:]}"
    return None


def judged(kind: str, seed: int, where: str, calls: int) -> tuple[str, str, int, list[str]]:
    """Play a history and judge it. Return its name, place, number of calls, and violations."""
    logging.disable()
    began, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "history"
        try:
            play(kind, seed, folder, calls=calls, processes=where != "threads", s3=where == "s3")
        except Exception as error:  # from the last reader, or from a process that does not end
            failed.append(f"the history could not be completed: {error!r}")
        history = paired(merged(folder))
        judge = by_adya if kind in TOPICS else by_reader if kind == "log" else by_porcupine
        wrong = judge(history, folder, kind) + failed
        if wrong:
            shutil.copytree(folder, REFUSED / f"{kind}-{seed}", dirs_exist_ok=True)
    name = f"--kind {kind} --where {where} --seed {seed} --calls {calls}"
    took = time.monotonic() - began
    return f"{name}: {len(history)} calls, {took:.1f} s", where, len(history), wrong


def paired(events: list[dict[str, Any]]) -> list[Call]:
    """Return calls with their answers, in the order of their beginnings.

    ``since`` and ``until`` are nanoseconds, and ``how`` is ok, unknown, or fail. A call without an
    answer may take effect later, so its ``until`` is after all others.
    """
    after = max((event["t"] for event in events), default=0) + 1
    calls: dict[tuple[str, int], Call] = {}
    for event in events:
        key = event.pop("p"), event.pop("i")
        t, how = event.pop("t"), event.pop("type")
        if how == "invoke":
            calls[key] = {"since": t, "until": after, "how": "unknown", "p": key[0], **event}
        elif key in calls:
            calls[key] |= {"until": after if how == "unknown" else t, "how": how, **event}
    return list(calls.values())


def by_reader(history: list[Call], folder: Path, kind: str) -> list[str]:
    """Judge each reader of a log as if it had its own queue with the same appends."""
    wrong = []
    for name in sorted({call["reader"] for call in history if "reader" in call}):
        own = [dict(call) for call in history if call.get("reader", name) == name]
        wrong += [f"{verdict}, of reader {name}" for verdict in by_porcupine(own, folder, kind)]
    return wrong


def by_porcupine(history: list[Call], folder: Path, kind: str) -> list[str]:
    calls = [call for call in history if call["how"] != "fail" or call.get("fenced")]
    calls = at_end(calls) if kind == "work" else resolved(calls)
    for number, call in enumerate(calls):
        call["id"] = number
    model = {"work": "work", "log": "reader"}.get(kind, "queue")
    (verdict,) = asked([LOG, model], folder / "calls", calls)
    if verdict["result"] == "Ok":
        return []
    stuck = sorted((calls[number] for number in verdict["stuck"]), key=lambda each: each["until"])
    return [f"Porcupine: {verdict['result']}: no place for {json.dumps(stuck[:3])}"]


def resolved(calls: list[Call]) -> list[Call]:
    """Set the sequence of each append to the one at which a reader saw it.

    An append without an answer that no reader saw may have done nothing; otherwise it would leave a
    gap that no other append explains. Opens and reads without an answer changed nothing relevant.
    Writers of transactions also append empty batches on their own, as separators.
    """
    seen = {entry[1]: entry[0] for call in calls for entry in call.get("entries", ())}
    empty = {entry[0] for call in calls for entry in call.get("entries", ()) if not entry[1]}
    kept = [
        {"f": "append", "how": "ok", "since": 0, "until": calls[-1]["until"], "sequence": name}
        for name in sorted(empty)
    ]
    for call in calls:
        if call["f"] == "append" and "sequence" not in call and not call.get("repeat"):
            call["sequence"] = seen.get(call["record"])
        unknown = call["how"] == "unknown" and call["f"] != "ack"
        if not unknown or call.get("sequence") is not None:
            kept.append(call)
    return kept


def at_end(calls: list[Call]) -> list[Call]:
    """Add a call for each batch, after all others, that records whether it is still queued."""
    (left,) = [call for call in calls if call["f"] == "left"]
    remaining = {entry[1] for entry in left["entries"]}
    records = [call["record"] for call in calls if call["f"] == "append"]
    end = [{**left, "record": record, "remaining": record in remaining} for record in records]
    return [call for call in calls if call is not left and call["record"]] + end


def by_adya(history: list[Call], folder: Path, kind: str) -> list[str]:
    """Check that each partition alone is strictly serializable, with all reads.

    All partitions together are serializable if transactions come one after the other; a consumer
    reads one partition after the other. With several publishers the order of two transactions may
    differ between partitions, but no transaction is visible in part. The last read, which reads all
    partitions, shows this.
    """
    reads = [call for call in history if call["value"][0][0] == "r" and call["how"] == "ok"]
    writes = [call for call in history if call["value"][0][0] != "r"]
    last = [call for call in reads if call["final"]]
    tasks = [("strict-serializable", "", f"partition {name}", [
        {**operation, "value": own}
        for operation in [*writes, *reads]
        if (own := [mop for mop in operation["value"] if mop[1] == name])
    ]) for name in PARTITIONS]  # fmt: skip
    if kind == "serial":
        split = [{**call, "value": [mop]} for call in reads for mop in call["value"]]
        tasks.append(("serializable", "", "all partitions", [*writes, *split, *last]))
    else:
        tasks.append(("", PARTIAL, "all partitions", [*writes, *last]))
    wrong = []
    for models, anomalies, name, txns in tasks:
        (verdict,) = asked([TRANSACTIONS, models, anomalies], folder / name, elle(txns))
        if verdict["valid"] is not True:
            what = ", ".join(verdict["anomalies"])
            wrong.append(f"adya: {what} in {name}: {'; '.join(verdict['why'])}")
    return wrong


def elle(txns: list[Call]) -> list[dict[str, Any]]:
    """Convert transactions to Elle's format, each one as a separate process."""
    lines = []
    for process, txn in enumerate(txns):
        done = {"ok": "ok", "fail": "fail", "unknown": "info"}[txn["how"]]
        asked = [[mop[0], mop[1], None if mop[0] == "r" else mop[2]] for mop in txn["value"]]
        begin, end = (txn["since"], "invoke", asked), (txn["until"], done, txn["value"])
        for time_, how, value in (begin, end):
            lines.append({"time": time_, "process": process, "type": how, "value": value})
    return sorted(lines, key=lambda line: (line["time"], line["type"] != "invoke"))


def asked(command: list[Any], path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run([*command, path], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
