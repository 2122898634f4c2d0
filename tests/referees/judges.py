"""The referees: Porcupine for queues, adya for transactions; built once, with Go and Cargo."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.referees.history import merged
from tests.referees.play import PARTITIONS, play
from tools.servers import find

HERE = Path(__file__).parent
REFUSED = HERE / "build/refused"
LOG, TRANSACTIONS = HERE / "build/log", HERE / "build/cargo/release/transactions"


def missing() -> str | None:
    """Why histories cannot be judged here, or None. Builds the referees."""
    for tool in ("go", "cargo"):
        if find(tool) is None:
            return f"the referees are not built: {tool} is missing"
    for folder, command in (
        ("log", [find("go"), "build", "-o", LOG, "."]),
        ("transactions", [find("cargo"), "build", "--locked", "--release", "-q",
                          "--target-dir", HERE / "build/cargo"]),
    ):  # fmt: skip
        done = subprocess.run(command, cwd=HERE / folder, capture_output=True, text=True)
        if done.returncode:
            return f"the referees are not built: {done.stderr[-500:]}"
    return None


def judged(kind: str, seed: int, where: str, calls: int) -> tuple[str, str, int, list[str]]:
    """Play a history and have it judged. What was played, its calls, and what is wrong with it."""
    logging.disable()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "history"
        try:
            play(kind, seed, folder, calls=calls, processes=where != "threads", s3=where == "s3")
            count, wrong = judge(folder, kind)
        except Exception as error:  # of the last reader, or a process that does not end
            count, wrong = 0, [f"it could not be played to its end: {error!r}"]
        if wrong:
            shutil.copytree(folder, REFUSED / f"{kind}-{seed}", dirs_exist_ok=True)
    name = f"--kind {kind} --where {where} --seed {seed} --calls {calls}"
    return f"{name}: {count} calls, {time.monotonic() - began:.1f} s", where, count, wrong


def judge(folder: Path, kind: str) -> tuple[int, list[str]]:
    """How many calls a history has, and what the referees found wrong with it."""
    events = merged(folder)
    calls = sum(event["type"] == "invoke" for event in events)
    if kind not in ("topic", "serial"):
        return calls, by_porcupine(folder, events)
    return calls, by_adya(folder, events, serial=kind == "serial")


def by_porcupine(folder: Path, events: list[dict[str, Any]]) -> list[str]:
    return [
        f"Porcupine: {verdict['result']}, no order has: {'; '.join(verdict['stuck'])}"
        for verdict in asked([LOG], folder / "history", events)
        if verdict["result"] != "Ok"
    ]


def by_adya(folder: Path, events: list[dict[str, Any]], *, serial: bool) -> list[str]:
    """Each partition alone is strictly serializable, with all reads.

    All together are serializable where transactions come one after the other; a consumer reads one
    partition after the other. With several publishers the order of two transactions may differ
    between partitions, but none counts in part: the last read, which is of all, shows it.
    """
    txns = transactions(events)
    found: list[str] = []
    for name in PARTITIONS:
        own = [replace(each, mops=[mop for mop in each.mops if mop[1] == name]) for each in txns]
        history = as_history([each for each in own if each.mops])
        found += by_models("strict-serializable", "", folder / f"partition-{name}", history)
    reads = [each for each in txns if each.mops[0][0] == "r" and not each.final]
    others = [each for each in txns if each not in reads]
    if serial:
        split = [replace(each, mops=[mop]) for each in reads for mop in each.mops]
        history = as_history([*others, *split])
        return found + by_models("serializable", "", folder / "all", history)
    history = as_history(others)
    return found + by_models("", PARTIAL, folder / "all", history)


PARTIAL = "G1a,G1b,G-single,duplicate-elements,incompatible-order,internal,dirty-update"


def by_models(models: str, anomalies: str, path: Path, history: list[dict[str, Any]]) -> list[str]:
    (verdict,) = asked([TRANSACTIONS, models, anomalies], path, history)
    if verdict["valid"] is True or not history:
        return []
    return [f"adya: {path.name}: {', '.join(verdict['anomalies'])}: {'; '.join(verdict['why'])}"]


def asked(command: list[Any], path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run([*command, path], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@dataclass
class Txn:
    since: int
    end: int
    how: str
    mops: list[Any]
    final: bool = False


HOW = {"ok": "ok", "fail": "fail", "unknown": "info"}


def transactions(events: list[dict[str, Any]]) -> list[Txn]:
    open_: dict[Any, Txn] = {}
    after = events[-1]["t"] + 1
    for event in events:
        call = event["p"], event["i"]
        if event["type"] == "invoke":
            open_[call] = Txn(event["t"], after, "info", event["value"])
        elif (txn := open_.get(call)) is not None:
            txn.end, txn.how = event["t"], HOW[event["type"]]
            txn.mops, txn.final = event.get("value", txn.mops), event.get("final", False)
    reads_nothing = [k for k, each in open_.items() if each.mops[0][0] == "r" and each.how != "ok"]
    return [each for call, each in open_.items() if call not in reads_nothing]


def as_history(txns: list[Txn]) -> list[dict[str, Any]]:
    """Elle's form, each transaction as a process of its own."""
    lines = []
    for process, each in enumerate(txns):
        asked = [[mop[0], mop[1], None if mop[0] == "r" else mop[2]] for mop in each.mops]
        for t, how, value in ((each.since, "invoke", asked), (each.end, each.how, each.mops)):
            lines.append({"time": t, "process": process, "type": how, "value": value})
    return sorted(lines, key=lambda line: (line["time"], line["type"] != "invoke"))
