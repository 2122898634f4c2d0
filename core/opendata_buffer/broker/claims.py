"""The claims of workers: the value of ``<prefix>/_claims.json`` and its rules. Pure.

Batches are handed out oldest first, each to one worker at a time, and again when its worker
releases it or sends no heartbeat. A batch that is done in the middle waits for those before it: the
queue can only be dequeued from its front, so the **frontier** is the first batch that is not done.

::

    waiting ──claim──> claimed ──done──> done ──> below the frontier, dequeued
       ^                  │ release (back-off), lapse (no heartbeat)
       └──────────────────┘ reject, or max_deliveries reached: to the quarantine, then done

The time when a claim lapses is not stored: a successor cannot compare its clock with its
predecessor's, so every worker gets its full timeout again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from opendata_buffer.queue.sidecar import Sidecar, SidecarFields, is_number
from opendata_buffer.runtime import Condition, locked

MAX_OPEN = 50_000
"""Batches beyond the frontier that are claimed, done or were handed out before. While there are as
many, no further batch is handed out: the object must not grow without end."""

MAX_NAME_BYTES = 202
"""Bytes of a worker's name in JSON: ``MAX_OPEN`` claims must not be too large to be read."""

LATE_S = 0.5
"""Seconds. A dispatcher that checks a claim so long after its end was suspended or waited for
storage, and may have missed heartbeats. It then gives the worker the full timeout again, once."""

MOST_TOKENS = 100_000
"""Tokens of one heartbeat."""


def claims_kind(queue: str) -> Sidecar:
    """The kind of the claims of one queue, named as commands take it."""
    return Sidecar(
        "the record of workers' claims",
        f"'opendata-buffer fsck {queue} --repair' saves its bytes beside it and removes it: then "
        "every batch in the queue is handed out again.",
        max_bytes=16 * 1024 * 1024,
    )


CLAIMS = claims_kind("STORE")


def claims_key(data_path_prefix: str, reader: str = "") -> str:
    """The key of the claims of a queue, or of one reader of a log."""
    own = f"_readers/{reader}/claims.json" if reader else "_claims.json"
    return f"{data_path_prefix}/{own}"


@dataclass(frozen=True, slots=True)
class ClaimHolder:
    """The worker that holds a batch: its name, for people; the ``token`` that was drawn for this
    claim alone; and the time without a heartbeat after which another worker gets the batch."""

    worker: str
    token: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of one queue, valid under one ``epoch`` of the manifest.

    ``frontier`` is the first batch that is not done, ``done`` are batches beyond it, ``held`` those
    that are claimed. ``deliveries`` counts how often each unfinished batch was handed out, if ever,
    ``tokens`` those drawn so far. ``queue`` is the id of the queue, empty where it has none.
    """

    epoch: int
    frontier: int
    tokens: int = 0
    held: Mapping[int, ClaimHolder] = field(default_factory=dict)
    done: frozenset[int] = frozenset()
    deliveries: Mapping[int, int] = field(default_factory=dict)
    queue: str = ""

    def adopted(self, epoch: int, queue: str, first_sequence: int) -> Claims:
        """The claims as a new dispatcher takes them over. Those of a deleted queue are dropped."""
        if self.queue and self.queue != queue:
            return Claims(epoch, first_sequence, tokens=self.tokens, queue=queue)
        return replace(self, epoch=epoch, queue=queue).dequeued_to(first_sequence)

    def free(self, end: int, resting: Iterable[int] = ()) -> list[int]:
        """Batches before ``end`` that can be handed out, oldest first; not those in ``resting``."""
        taken = {*self.held, *self.done, *resting}
        # A held batch was handed out: it is among the deliveries.
        room = MAX_OPEN - len(self.deliveries) - len(self.done)
        found: list[int] = []
        for sequence in range(self.frontier, end):
            if sequence in taken:
                continue
            if sequence not in self.deliveries:
                if room <= 0:
                    continue
                room -= 1
            found.append(sequence)
        return found

    def claim(self, sequences: Iterable[int], worker: str, timeout_ms: int) -> Claims:
        """Hand batches to a worker; each gets the next token."""
        held, deliveries, tokens = dict(self.held), dict(self.deliveries), self.tokens
        while len(json.dumps(worker)) > MAX_NAME_BYTES:
            worker = worker[:-1]
        for sequence in sequences:
            tokens += 1
            held[sequence] = ClaimHolder(worker, tokens, timeout_ms)
            deliveries[sequence] = deliveries.get(sequence, 0) + 1
        return replace(self, held=held, deliveries=deliveries, tokens=tokens)

    def holds(self, sequence: int, token: int) -> bool:
        """Whether this claim is still the batch's."""
        holder = self.held.get(sequence)
        return holder is not None and holder.token == token

    def finish(self, sequence: int) -> Claims:
        """End a batch that is done or in the quarantine; the frontier passes all that is done."""
        if sequence < self.frontier:
            return self
        deliveries = dict(self.deliveries)
        deliveries.pop(sequence, None)
        done = self.done | {sequence}
        return replace(self.release(sequence), deliveries=deliveries, done=done)._past_done()

    def release(self, sequence: int) -> Claims:
        """Take the batch from its worker; its number of deliveries stays."""
        held = dict(self.held)
        held.pop(sequence, None)
        return replace(self, held=held)

    def dequeued_to(self, first_sequence: int) -> Claims:
        """Forget what is no longer in the queue."""
        if first_sequence <= self.frontier:
            return self
        return replace(
            self,
            frontier=first_sequence,
            held={k: v for k, v in self.held.items() if k >= first_sequence},
            done=frozenset(each for each in self.done if each >= first_sequence),
            deliveries={k: v for k, v in self.deliveries.items() if k >= first_sequence},
        )._past_done()

    def _past_done(self) -> Claims:
        """With the frontier behind the batches that are done without an open one among them."""
        frontier, done = self.frontier, set(self.done)
        while frontier in done:
            done.remove(frontier)
            frontier += 1
        return replace(self, frontier=frontier, done=frozenset(done))


def encode(claims: Claims) -> bytes:
    """The object's bytes."""
    document = {
        "version": CLAIMS.version,
        "queue": claims.queue,
        "epoch": claims.epoch,
        "frontier": claims.frontier,
        "tokens": claims.tokens,
        "held": [
            [key, each.worker, each.token, each.timeout_ms]
            for key, each in sorted(claims.held.items())
        ],
        "done": _ranges(claims.done),
        "deliveries": sorted(claims.deliveries.items()),
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode(data: bytes, kind: Sidecar = CLAIMS) -> Claims:
    """The claims in an object's bytes. Raises CorruptData for bytes of no or another version."""
    fields = kind.decode(data)
    return Claims(
        epoch=fields.number("epoch"),
        frontier=fields.number("frontier"),
        tokens=fields.number("tokens"),
        held={
            sequence: ClaimHolder(worker, token, timeout_ms)
            for sequence, worker, token, timeout_ms in _rows(
                fields, "held", "[sequence, worker, token, milliseconds]", int, str, int, int
            )
        },
        done=frozenset(_done(fields)),
        deliveries=dict(_rows(fields, "deliveries", "[sequence, count]", int, int)),
        queue=fields.text("queue", ""),
    )


def _rows(fields: SidecarFields, name: str, wanted: str, *kinds: type) -> Iterator[list[Any]]:
    """The rows of a field, each with values of these kinds: numbers or texts."""
    for row in fields.items(name):
        if (
            not isinstance(row, list)
            or list(map(type, row)) != list(kinds)
            or not all(isinstance(each, str) or is_number(each) for each in row)
        ):
            raise fields.wrong(name, f"{wanted} each", row)
        yield row


def _done(fields: SidecarFields) -> Iterator[int]:
    total = 0
    for first, last in _rows(fields, "done", "[first, last]", int, int):
        # Read from storage: a range must not make this loop run without a bound.
        total += last - first + 1
        if first > last or total > MAX_OPEN:
            wanted = f"ranges [first, last] of {MAX_OPEN} batches at most"
            raise fields.wrong("done", wanted, [first, last])
        yield from range(first, last + 1)


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Ranges of consecutive numbers, each as its first and its last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


class Heartbeats:
    """When claims lapse, by the heartbeats of their workers. Times are monotonic seconds.

    Any thread calls :meth:`receive`, the dispatcher's thread all else. ``steady_since`` returns
    since when this broker runs without a long pause: it may have missed earlier heartbeats. The
    workers of the claims that are ``held`` get their full timeout: their last heartbeats are not
    known.
    """

    def __init__(
        self,
        condition: Condition,
        steady_since: Callable[[], float],
        held: Mapping[int, ClaimHolder],
        now: float,
    ) -> None:
        self._condition = condition
        self._steady_since = steady_since
        self._alive: dict[int, float] = {}
        self._renewed: dict[int, int] = {}
        self.lapses = {key: now + each.timeout_ms / 1000 for key, each in held.items()}
        """When the claim of each batch is checked next."""

    @locked
    def receive(self, tokens: Iterable[int], now: float) -> None:
        """Note a heartbeat of the worker with these claims."""
        for token in list(tokens)[:MOST_TOKENS]:
            self._alive.pop(token, None)  # moved to the end: the first tokens are the oldest
            self._alive[token] = now
        # forget() is called only while workers ask for batches.
        excess = max(0, len(self._alive) - 2 * MOST_TOKENS)
        for token in list(islice(self._alive, excess)):
            del self._alive[token]

    def prolong(self, sequence: int, holder: ClaimHolder, now: float) -> bool:
        """Set the new end of a claim that lasts longer than its timeout; False when it lapses."""
        timeout_s = holder.timeout_ms / 1000
        with self._condition:
            alive = self._alive.get(holder.token, float("-inf"))
        # A broker that paused knows as little as a successor, and does the same.
        until = max(alive, self._steady_since()) + timeout_s
        if until <= now:
            was_late = now - self.lapses.pop(sequence) > LATE_S
            if not was_late or self._renewed.get(sequence) == holder.token:
                return False
            self._renewed[sequence] = holder.token
            until = now + timeout_s
        self.lapses[sequence] = until
        return True

    def drop(self, sequence: int, token: int) -> None:
        """Forget a claim that has ended."""
        self.lapses.pop(sequence, None)
        with self._condition:
            self._alive.pop(token, None)

    def forget(self, held: Mapping[int, ClaimHolder]) -> None:
        """Forget the heartbeats of all but the held claims, once they are many."""
        if len(self._alive) <= 2 * len(held) + 1_000:
            return
        tokens = {each.token for each in held.values()}
        self._renewed = {key: each for key, each in self._renewed.items() if each in tokens}
        with self._condition:
            self._alive = {key: at for key, at in self._alive.items() if key in tokens}
