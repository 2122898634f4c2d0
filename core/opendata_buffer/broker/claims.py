"""Keep track of which worker holds which batch: ``<prefix>/_claims.json`` and its rules.

Several workers share a queue. Each batch has to go to one worker at a time, and to another worker
if the first one dies. A queue, however, can only be dequeued from its front, while workers finish
their batches in any order. So the broker writes down which batches are claimed and which are done.
This module has no storage and no threads: every change returns a new value.

A batch is handed out oldest first. It is handed out again when its worker releases it or stops
sending heartbeats. A batch that is done waits for all batches before it. The **frontier** is the
first batch that is not done; everything before it can be dequeued::

    waiting ──claim──> claimed ──done──> done ──> before the frontier, dequeued
       ^                  │ release (back-off), lapse (no heartbeat)
       └──────────────────┘ reject, or max_deliveries reached: to the quarantine, then done

For example, workers hold batches 5, 6 and 7. After 6 is done, the frontier is still 5 and ``done``
is {6}. Once 5 is done, the frontier moves to 7, and 5 and 6 are dequeued.

**Things that can go wrong:**

* A worker is slow instead of dead, and finishes after its claim has lapsed. Each claim has a token
  of its own, so the late request does not match the new claim and is refused.
* The broker dies. Its successor reads this object and goes on. The time at which a claim lapses is
  not stored, because a successor cannot compare its clock with its predecessor's: every worker gets
  its full timeout again.
* Two dispatchers write. The object names the epoch of the manifest under which it is valid, so the
  older one notices that it was replaced.
* One batch is never finished while thousands after it are. The object is bounded by
  :data:`MAX_OPEN`; at that number, no further batch is handed out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from opendata_buffer.hints import Action, Hint, QueueName
from opendata_buffer.queue.sidecar import Sidecar, SidecarFields, is_number
from opendata_buffer.runtime import Condition, locked

MAX_OPEN = 50_000
"""Most batches from the frontier on that are claimed, done or were handed out before. At this
number no further batch is handed out, because the object must not grow without limit."""

MAX_NAME_BYTES = 202
"""Most bytes of a worker's name in JSON, so that ``MAX_OPEN`` claims can still be read."""

LATE_S = 0.5
"""Seconds. If a dispatcher checks a claim this long after its end, the dispatcher was suspended or
waited for storage, and may have missed heartbeats. It then gives the worker the full timeout again,
once."""

MOST_TOKENS = 100_000
"""Most tokens of one heartbeat that are noted."""


def claims_kind(queue: QueueName | None = None) -> Sidecar:
    """Describe the claims object, with hints that name the queue.

    Args:
        queue: The name of the queue.

    Returns:
        The kind of the object, to read it with.
    """
    return Sidecar(
        "the record of workers' claims",
        Hint(Action.REPLACE_CLAIMS, queue),
        max_bytes=16 * 1024 * 1024,
    )


CLAIMS = claims_kind()


def claims_key(data_path_prefix: str, reader: str = "") -> str:
    """Return the key of the claims of a queue, or of one reader of a log."""
    own = f"_readers/{reader}/claims.json" if reader else "_claims.json"
    return f"{data_path_prefix}/{own}"


@dataclass(frozen=True, slots=True)
class ClaimHolder:
    """The worker that holds a batch.

    Attributes:
        worker: Its name, for people.
        token: The number that was drawn for this claim alone.
        timeout_ms: Milliseconds without a heartbeat after which another worker gets the batch.
    """

    worker: str
    token: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of one queue. A value: changes return a new one.

    Attributes:
        epoch: Epoch of the manifest under which the claims are valid.
        frontier: The first batch that is not done.
        tokens: How many tokens have been drawn so far.
        held: The claimed batches, by sequence.
        done: The batches after the frontier that are done.
        deliveries: How often each unfinished batch was handed out, if it ever was.
        queue: Id of the queue; empty if it has none.
    """

    epoch: int
    frontier: int
    tokens: int = 0
    held: Mapping[int, ClaimHolder] = field(default_factory=dict)
    done: frozenset[int] = frozenset()
    deliveries: Mapping[int, int] = field(default_factory=dict)
    queue: str = ""

    def adopted(self, epoch: int, queue: str, first_sequence: int) -> Claims:
        """Take the claims over for a new dispatcher.

        The claims of a queue that was deleted in the meantime are dropped.

        Args:
            epoch: The new dispatcher's epoch.
            queue: Id of the queue.
            first_sequence: First batch that is still in the queue.

        Returns:
            The claims under the new epoch.
        """
        if self.queue and self.queue != queue:
            return Claims(epoch, first_sequence, tokens=self.tokens, queue=queue)
        return replace(self, epoch=epoch, queue=queue).dequeued_to(first_sequence)

    def free(self, end: int, resting: Iterable[int] = ()) -> list[int]:
        """Find the batches that can be handed out.

        Args:
            end: Only batches before this sequence.
            resting: Batches that must not be handed out now.

        Returns:
            Their sequences, oldest first.
        """
        taken = {*self.held, *self.done, *resting}
        # Held batches are not counted separately: they were handed out, so `deliveries` has them.
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
        """Return the claims with batches assigned to a worker; each claim gets the next token."""
        held, deliveries, tokens = dict(self.held), dict(self.deliveries), self.tokens
        while len(json.dumps(worker)) > MAX_NAME_BYTES:
            worker = worker[:-1]
        for sequence in sequences:
            tokens += 1
            held[sequence] = ClaimHolder(worker, tokens, timeout_ms)
            deliveries[sequence] = deliveries.get(sequence, 0) + 1
        return replace(self, held=held, deliveries=deliveries, tokens=tokens)

    def holds(self, sequence: int, token: int) -> bool:
        """Return whether the batch is still held under this token."""
        holder = self.held.get(sequence)
        return holder is not None and holder.token == token

    def finish(self, sequence: int) -> Claims:
        """Return the claims after a batch was done or quarantined, with an advanced frontier.

        The frontier moves only if no unfinished batch comes before it.
        """
        if sequence < self.frontier:
            return self
        deliveries = dict(self.deliveries)
        deliveries.pop(sequence, None)
        done = self.done | {sequence}
        return replace(self.release(sequence), deliveries=deliveries, done=done)._past_done()

    def release(self, sequence: int) -> Claims:
        """Return the claims without this batch's holder; its number of deliveries stays."""
        held = dict(self.held)
        held.pop(sequence, None)
        return replace(self, held=held)

    def dequeued_to(self, first_sequence: int) -> Claims:
        """Return the claims without batches that are no longer in the queue."""
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
        """Advance the frontier past the leading run of finished batches."""
        frontier, done = self.frontier, set(self.done)
        while frontier in done:
            done.remove(frontier)
            frontier += 1
        return replace(self, frontier=frontier, done=frozenset(done))


def encode(claims: Claims) -> bytes:
    """Return the object's bytes."""
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
    """Parse the bytes of the claims object.

    Args:
        data: The bytes.
        kind: The kind of the object, whose hints end an error.

    Returns:
        The claims.

    Raises:
        CorruptData: The bytes are not claims, or are of another version.
    """
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
    """Yield the rows of a field, each a list of numbers or texts of the given types.

    Raises:
        CorruptData: A row has other values.
    """
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
        # The numbers come from storage: a huge range must not make this loop run without a limit.
        total += last - first + 1
        if first > last or total > MAX_OPEN:
            wanted = f"ranges [first, last] of {MAX_OPEN} batches at most"
            raise fields.wrong("done", wanted, [first, last])
        yield from range(first, last + 1)


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return the runs of consecutive numbers as pairs of first and last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


class Heartbeats:
    """The heartbeats of workers, which decide when claims lapse. Times are monotonic seconds.

    The workers of the claims in ``held`` get their full timeout, because their last heartbeats are
    not known. Any thread may call :meth:`receive`; only the dispatcher's thread calls the other
    methods.

    Args:
        condition: The lock.
        steady_since: Returns since when this broker has run without a long pause. It may have
            missed heartbeats before that.
        held: The claims that a predecessor left.
        now: The current time.
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
        """By batch, when its claim is checked next."""

    @locked
    def receive(self, tokens: Iterable[int], now: float) -> None:
        """Note a heartbeat of the worker that holds these claims.

        Args:
            tokens: Its claims; those after the first :data:`MOST_TOKENS` are ignored.
            now: The current time, monotonic seconds.
        """
        for token in list(tokens)[:MOST_TOKENS]:
            self._alive.pop(token, None)  # moves it to the end, so that the oldest come first
            self._alive[token] = now
        # Bound the table here, too: forget() is called only while workers ask for batches.
        excess = max(0, len(self._alive) - 2 * MOST_TOKENS)
        for token in list(islice(self._alive, excess)):
            del self._alive[token]

    def prolong(self, sequence: int, holder: ClaimHolder, now: float) -> bool:
        """Set the next check of a claim whose time is over, if its worker is alive.

        Args:
            sequence: Sequence of the batch.
            holder: The worker that has the claim.
            now: The current time, monotonic seconds.

        Returns:
            False if the claim lapses.
        """
        timeout_s = holder.timeout_ms / 1000
        with self._condition:
            alive = self._alive.get(holder.token, float("-inf"))
        # A broker that paused knows as little about its workers as a successor, and does the same.
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
        """Forget the heartbeats of claims that are not held, once there are many."""
        if len(self._alive) <= 2 * len(held) + 1_000:
            return
        tokens = {each.token for each in held.values()}
        self._renewed = {key: each for key, each in self._renewed.items() if each in tokens}
        with self._condition:
            self._alive = {key: at for key, at in self._alive.items() if key in tokens}
