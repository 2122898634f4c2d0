"""Play one history: a deployment with faults, and a last reader after all faults have healed.

A seed chooses the roles, the faults, the clocks, and the processes that are killed or suspended.
The scheduling of threads and processes is random, so the same seed gives different histories.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opendata_buffer import QueueConfig, Topic, outcomes
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import PutOutcome, Store
from opendata_buffer.stores.memory import MemoryStore
from tests.referees import actors
from tests.referees.actors import PARTITIONS, Scene
from tests.support.faults import HarshPlan, HarshStore
from tests.support.s3_server import Answer, Fault, S3Server

HOUR_MS = 3_600_000
KINDS: dict[str, list[tuple[str, str]]] = {
    # Roles of the processes, and their persons. Two instances with one person compete.
    "queue": [("producer", "")] * 3 + [("consumer", "")] * 2,
    "log": [("producer", "")] * 3 + [("consumer", "a")] * 2 + [("consumer", "b")] * 2,
    "sink": [("producer", ""), ("sink", ""), ("sink", ""), ("consumer", ""), ("consumer", "")],
    "broker": [("host", ""), ("host", ""), *[("producer", "")] * 3, *[("consumer", "")] * 2],
    "work": [("producer", "")] * 2 + [("worker", "")] * 3,
    "topic": [("publisher", name) for name in ("named-a", "named-b", "intents-a", "intents-b")]
    + [("reader", "")] * 2,
    "serial": [("publisher", "named-a")] * 2 + [("reader", "")] * 2,
}
TOPICS = ("topic", "serial")
ALONE = ("intents",)
"""Publishers that save their intents themselves, so only one instance may run."""
FAULTS = {
    "cas_lost_after": 0.06, "cas_lost_before": 0.03, "cas_late": 0.03, "get_errors": 0.02,
    "put_errors": 0.03, "list_errors": 0.05, "delete_errors": 0.1, "stalls": 0.005,
    "stall_ms": 200.0, "wrong_dates": 0.3, "cas_ms": 2.0, "get_ms": 1.0, "jitter": 1.0,
}  # fmt: skip


class Gate:
    """A store for a thread that imitates a process, which may be suspended or killed."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.runs = threading.Event()
        self.runs.set()
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._guarded(found) if callable(found) else found

    def put_if(self, key: str, data: bytes, condition: Any) -> PutOutcome:
        try:
            return self._guarded(self._inner.put_if)(key, data, condition)
        except PermanentStorageError as error:
            return outcomes.Unknown(str(error))

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **options: Any) -> Any:
            self._pass()
            answer = call(*args, **options)
            self._pass()
            return answer

        return guarded

    def _pass(self) -> None:
        self.runs.wait()
        if self.dead:
            raise PermanentStorageError("this process was killed")


class Thread:
    """An actor as a thread of this process."""

    def __init__(self, scene: Scene, store: Store) -> None:
        self.scene = scene
        self._gate = Gate(store)
        self._failure: Exception | None = None
        scene.begin(self._gate)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.scene.play()
        except SystemExit:
            pass  # it was killed
        except Exception as error:
            self._failure = error

    def suspend(self) -> None:
        self._gate.runs.clear()

    def resume(self) -> None:
        self._gate.runs.set()

    def kill(self) -> None:
        self.scene.recorder.mute()
        self._gate.dead = True
        self._gate.runs.set()
        self.scene.over.set()

    def stop(self) -> None:
        self.scene.over.set()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), f"{self.scene.name} does not end"
        # A role that fails would leave a history without its calls.
        assert self._failure is None, f"{self.scene.name} ended: {self._failure!r}"


class Process:
    """An actor as a process."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.referees.actors", json.dumps(asdict(scene))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if "REFEREES_DEBUG" not in os.environ else None,
        )

    def suspend(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self.join()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def join(self) -> None:
        code = self._process.wait(90)
        assert code in (0, -signal.SIGKILL), f"{self.scene.name} ended with {code}"


def play(
    kind: str, seed: int, folder: Path, *, calls: int, processes: bool, s3: bool = False,
    most_s: float = 120.0,
) -> None:  # fmt: skip
    """Play a history of about ``calls`` calls, and leave its files in the folder."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    plan = {
        name: value if name.endswith("_ms") or name == "jitter" else value * rng.choice([0, 1, 2])
        for name, value in FAULTS.items()
    }
    # Less than the error of a process's clock, because two clocks that agree are trusted.
    plan["date_error_ms"] = rng.choice([-2 * HOUR_MS, 2 * HOUR_MS])
    saves = kind == "sink" or rng.random() < 0.5
    with ExitStack() as stack:
        server = stack.enter_context(S3Server()) if s3 else None
        faulty = HarshStore(MemoryStore(), SystemRuntime(), HarshPlan(**plan), seed=seed)
        store: Store | None = None if processes else faulty
        url = "memory://referees" if not processes else str(folder / "store")
        url = server.url if server is not None else url

        def scene(role: str, person: str, instance: int) -> Scene:
            skew_ms = rng.choice([0, 0, 2_000, -2_000, HOUR_MS, -HOUR_MS])
            return Scene(
                role, f"{role}-{person}-{instance}", url, str(folder), skew_ms=skew_ms,
                endpoint=None if server is None else server.endpoint,
                plan=plan if server is None else {}, seed=rng.randrange(2**31), saves=saves,
                person=person, log=kind == "log",
                broker="auto" if kind in ("broker", "work") else "off",
            )  # fmt: skip

        def started(role: str, person: str, instance: int) -> Thread | Process:
            made = scene(role, person, instance)
            return Process(made) if store is None else Thread(made, store)

        quiet = scene("finish", "", 0)
        quiet.skew_ms, quiet.plan = 0, {}
        quiet.begin(faulty.inner if store is not None else None)
        people = sorted({person for _, person in KINDS[kind] if person})
        if kind == "log":
            actors.make_log(quiet, people)
        if kind in TOPICS:
            Topic.create(quiet.config(QueueConfig), len(PARTITIONS), store=quiet.store)
        members = [started(*role, number) for number, role in enumerate(KINDS[kind])]
        ended: list[Thread | Process] = []
        born, until = len(members), time.monotonic() + most_s
        while written(folder) < calls and time.monotonic() < until:
            time.sleep(rng.uniform(0.05, 0.5))
            if server is not None:
                disturb(server, rng)
            at = rng.randrange(len(members))
            if rng.random() < 0.5:
                members[at].suspend()
                time.sleep(rng.uniform(0, 0.4))
                members[at].resume()
                continue
            old = members[at].scene
            if not at_work(old):
                continue  # on a busy machine it starts late
            members[at].kill()
            ended.append(members[at])
            if old.person.startswith(ALONE):
                members[at].join()
            members[at] = started(old.role, old.person, born)
            born += 1
        faulty.plan = HarshPlan()
        for member in members:
            member.stop()
        for member in [*members, *ended]:
            member.join()
        faulty.land_late_puts()
        if server is not None:
            server._faults.clear()
        actors.finish(quiet, kind, people)


def disturb(server: S3Server, rng: random.Random) -> None:
    """Let some requests get a 503 without effect, or no answer after their effect."""
    if not server._faults:  # each fault is used once
        for method in ("GET", "PUT", "PUT"):
            lost = Fault(Answer.CLOSE) if rng.random() < 0.5 else Fault(503, False, "SlowDown")
            server.inject(lost, method=method, times=rng.randint(1, 3))


def written(folder: Path, process: str = "*") -> int:
    """Return the number of recorded calls."""
    return sum(file.read_bytes().count(b'"invoke"') for file in folder.glob(f"{process}.jsonl"))


def at_work(scene: Scene) -> bool:
    """Return whether it has made some calls. A broker does not make any."""
    return scene.role == "host" or written(Path(scene.folder), scene.name) >= 20
