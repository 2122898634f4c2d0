"""Hands the queue's batches to workers: the broker as the queue's consumer.

Requests of all workers pile up while one compare-and-swap on the claims is on its way, and the
next one takes them all; each is answered after it has landed. Heartbeats are kept in memory
only. What is finished without a gap is acknowledged behind that, so a foreman that dies in
between only acknowledges later.

Another consumer of the queue, or another foreman, fences this one: it tells its workers so, and
they look for the broker that is announced now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer import metrics
from opendata_buffer.broker.claims import MAX_BYTES, Claims, claims_key, decode, encode
from opendata_buffer.broker.messages import error_body, metadata_body
from opendata_buffer.broker.requests import Answer, ClaimRequest, FinishRequest
from opendata_buffer.broker.shared_queue import SharedQueue
from opendata_buffer.broker.wire import MAX_MESSAGE_BYTES
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.errors import (
    ClaimLost,
    Fenced,
    InvalidInput,
    OpenDataBufferError,
    TransientStorageError,
)
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.cas import Done, Register
from opendata_buffer.runtime import Runtime, Task
from opendata_buffer.stores import Store

__all__ = ["Foreman"]

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Between two looks for batches that somebody else appended, while workers wait."""

LATE_S = 0.5
"""A foreman that looks at a claim so long after its end was suspended, or storage held it up. It
may have missed heartbeats, so it gives the worker the whole time anew, once, as a successor would.
"""

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES // 2
"""About the size of one answer; the batches that do not fit are handed out later."""

ACK_S = 1.0
"""Between two acknowledgements while workers wait: each is a write for which they would wait."""

MAX_ENDED = 10_000
"""Claims of which it is remembered how they ended, for workers that ask again."""

QUARREL_S = 3.0
"""A broker that is announced no more finds that within two seconds, and steps down."""

RETRY_S = 1.0
"""After storage did not answer."""


@dataclass(slots=True)
class _Turn:
    """What one group commit changes, and what is said once it has landed."""

    claims: Claims
    said: list[tuple[Answer, dict[str, Any]]] = field(default_factory=list)
    lapses: dict[int, float | None] = field(default_factory=dict)
    rests: dict[int, float] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    lapsed: int = 0


class Foreman:
    """The claims of one queue's workers.

    Args:
        store: Where the queue lives.
        config: The consumer's settings.
        runtime: Clock and threads.
        queue: What the broker appends to; None for a queue of its own.
        is_announced: Whether clients are sent to this broker and to no other; reads the store.
        is_current: Whether that was so some seconds ago.
        steady_since: Since when this broker has been at work without a long pause, monotonic
            seconds. Heartbeats of a pause may have been missed.
        may_take: Asked before the claims are taken over from another foreman; reads the store.
    """

    def __init__(
        self,
        store: Store,
        config: ConsumerConfig,
        runtime: Runtime,
        queue: SharedQueue | None = None,
        is_announced: Callable[[], bool] = lambda: False,
        is_current: Callable[[], bool] = lambda: True,
        steady_since: Callable[[], float] = lambda: float("-inf"),
        may_take: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._queue = queue
        self._is_announced = is_announced
        self._is_current = is_current
        self._steady_since = steady_since
        self._may_take = may_take
        self._config = config
        self._runtime = runtime
        self._labels = {"queue": metrics.queue_label(store.url, config.manifest_path)}
        self._condition = runtime.condition()
        self._finishing: list[FinishRequest] = []
        self._claiming: list[ClaimRequest] = []
        self._alive: dict[int, float] = {}
        self._leaving = False
        self._fenced: Fenced | None = None
        self._news = False
        self._task: Task | None = None
        self._consumer: Consumer | None = None
        self._register: Register[Claims] | None = None
        self._claims: Claims | None = None
        self._known: dict[int, BatchDescriptor] = {}
        self._end = 0
        self._lapses: dict[int, float] = {}
        self._renewed: dict[int, int] = {}
        self._rests: dict[int, float] = {}
        self._ended: dict[int, str] = {}
        self._stuck: set[int] = set()
        self._polled_at = float("-inf")
        self._acked_at = float("-inf")
        self._epoch = -1

    def submit(self, request: ClaimRequest | FinishRequest) -> None:
        """Take a request; its ``answer`` is called when it is settled."""
        with self._condition:
            if not self._leaving:
                if isinstance(request, ClaimRequest):
                    self._claiming.append(request)
                else:
                    self._finishing.append(request)
                if self._task is None:
                    # Not before a worker asks: taking claims fences any other consumer.
                    metrics.claims_held.watch(self, Foreman.held_now, self._labels)
                    self._task = self._runtime.spawn(self._run, "opendata-buffer-foreman")
                self._condition.notify_all()
                return
        request.answer({"op": "refused", "n": request.number, "why": "moved"})

    def beat(self, tokens: list[int]) -> bool:
        """A worker lives, and works on these; False when another broker is to be told.

        One that does not reach the store may have been replaced. Heartbeats that it answered
        would keep its workers from the next one, which would give their claims away.
        """
        if not self._is_current():
            return False
        now = self._runtime.monotonic()
        with self._condition:
            for token in tokens[:100_000]:
                self._alive[token] = now
            if tokens and not self._leaving and self._task is None:
                # Take the claims over at once: a predecessor that was only suspended would find
                # no heartbeats and give them away.
                self._news = True
                self._task = self._runtime.spawn(self._run, "opendata-buffer-foreman")
        return True

    def held_now(self) -> float | None:
        """Batches that workers hold; None while this broker hands out nothing."""
        claims = self._claims
        return None if claims is None else len(claims.held)

    def appended(self) -> None:
        """There are new batches in the queue."""
        if self._task is not None:
            with self._condition:
                self._news = True
                self._condition.notify_all()

    def stop(self, timeout: float | None = None) -> None:
        """Answer what waits with ``moved``, and leave the queue's consumer to a successor."""
        with self._condition:
            self._leaving = True
            self._condition.notify_all()
        metrics.claims_held.unwatch(self)
        if self._task is not None:
            self._task.join(timeout)

    def _run(self) -> None:
        try:
            while True:
                with self._condition:
                    self._wait()
                    if self._leaving:
                        return
                    finishing, self._finishing = self._finishing, []
                    claiming, self._claiming = self._claiming, []
                    news, self._news = self._news, False
                try:
                    left = self._take_turn(finishing, claiming, news)
                except Exception as error:
                    left = []
                    self._give_up([*finishing, *claiming], error)
                with self._condition:
                    self._claiming = [*left, *self._claiming]
                try:
                    self._acknowledge()
                except Exception as error:
                    # Everybody has been answered: what is done stays done.
                    self._give_up([], error)
        finally:
            with self._condition:
                self._leaving = True
                waiting: list[ClaimRequest | FinishRequest] = [*self._finishing, *self._claiming]
            self._refuse(waiting)
            self._leave()

    def _wait(self) -> None:
        """Until there is something to do; with the lock."""
        while not self._leaving and not self._finishing and not self._news:
            now = self._runtime.monotonic()
            times = [*self._lapses.values(), *self._rests.values()]
            if self._claiming:
                times.append(self._polled_at + POLL_S)
                times += [each.until for each in self._claiming]
            if times and min(times) <= now:
                return
            self._condition.wait(min(times) - now if times else None)

    def _take_turn(
        self, finishing: list[FinishRequest], claiming: list[ClaimRequest], news: bool
    ) -> list[ClaimRequest]:
        claims, consumer = self._owned()
        turn = _Turn(claims)
        now = self._runtime.monotonic()
        self._lapse(turn, now)
        for request in finishing:
            self._finish(turn, request, now)
        left = self._hand_out(turn, claiming, consumer, now, news)
        if turn.claims != claims:
            self._write(claims, turn.claims)
        # Landed: now it may be said, and acted on.
        self._claims = turn.claims
        for sequence, at in turn.lapses.items():
            if at is None:
                self._lapses.pop(sequence, None)
            else:
                self._lapses[sequence] = at
        self._rests.update(turn.rests)
        self._ended.update(turn.ended)
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        metrics.claims_lapsed.add(turn.lapsed)
        self._forget_finished(turn.claims)
        for answer, body in turn.said:
            answer(body)
        return left

    def _owned(self) -> tuple[Claims, Consumer]:
        if self._fenced is not None:
            # Whoever took the queue meant to. Taking it back would begin a quarrel.
            raise self._fenced
        if self._claims is not None and self._consumer is not None:
            return self._claims, self._consumer
        if not self._may_take():
            # Taken all the same, and given up before the claims are written, they would look as
            # if another consumer had the queue: the announced broker would leave it to that one.
            raise TransientStorageError("another broker is announced by now: ask that one")
        consumer = Consumer(
            self._config,
            store=self._store,
            runtime=self._runtime,
            queue=self._queue,
            program="broker for workers",
        )
        register = self._make_register()
        self._epoch = consumer.epoch
        try:
            last = consumer.last_handed_out_sequence
            first = 0 if last is None else last + 1
            self._register = register
            claims = self._adopt(register, consumer, first)
        except BaseException:
            consumer.close()
            raise
        self._known, self._end = {}, first
        now = self._runtime.monotonic()
        # Nobody knows when these gave their last sign of life: each gets the whole time anew.
        self._lapses = {key: now + each.timeout_ms / 1000 for key, each in claims.held.items()}
        self._rests = {}
        self._claims, self._consumer = claims, consumer
        # What is held or done must be known, to be handed out again or acknowledged.
        needed = max([claims.frontier, *(key + 1 for key in claims.held)])
        while self._end < needed and self._look_for(needed - self._end, consumer, now):
            pass
        log.info("handing out batches from %d on, epoch %d", claims.frontier, claims.epoch)
        return claims, consumer

    def _adopt(self, register: Register[Claims], consumer: Consumer, first: int) -> Claims:
        """Take the claims over from a foreman with a lower epoch, whatever it last wrote."""
        queue, epoch = consumer.position_of(first).queue_id, consumer.epoch

        def decide(found: Claims | None) -> Claims:
            if found is None:
                return Claims(epoch, first, queue=queue)
            if found.queue == queue and found.epoch > epoch:
                return found
            return found.adopted(epoch, queue, first)

        outcome = register.update(decide)
        if not isinstance(outcome, Done) or outcome.value is None:
            raise TransientStorageError(
                f"claims {register.key!r} could not be taken over: {outcome}. Try again."
            )
        if outcome.value.epoch != epoch:
            raise Fenced(self._config.manifest_path, epoch, outcome.value.epoch)
        return outcome.value

    def _forget_finished(self, claims: Claims) -> None:
        if len(self._alive) <= 2 * len(claims.held) + 1_000:
            return
        tokens = {each.token for each in claims.held.values()}
        self._renewed = {key: each for key, each in self._renewed.items() if each in tokens}
        with self._condition:
            self._alive = {key: at for key, at in self._alive.items() if key in tokens}

    def _lapse(self, turn: _Turn, now: float) -> None:
        for sequence, at in self._lapses.items():
            holder = turn.claims.held.get(sequence)
            if at > now or holder is None:
                continue
            with self._condition:
                alive = self._alive.get(holder.token, float("-inf"))
            # After a pause of its own the broker is as ignorant as a successor, and does as one.
            until = max(alive, self._steady_since()) + holder.timeout_ms / 1000
            if until > now:
                turn.lapses[sequence] = until
            elif now - at > LATE_S and self._renewed.get(sequence) != holder.token:
                self._renewed[sequence] = holder.token
                turn.lapses[sequence] = now + holder.timeout_ms / 1000
            else:
                log.warning("worker %s of batch %d fell silent", holder.worker, sequence)
                turn.claims = turn.claims.release(sequence)
                turn.lapses[sequence] = None
                turn.lapsed += 1

    def _finish(self, turn: _Turn, request: FinishRequest, now: float) -> None:
        if request.how == (turn.ended.get(request.token) or self._ended.get(request.token)):
            # Asked again, by a worker that heard no answer.
            turn.said.append((request.answer, {"op": "finished", "n": request.number}))
            return
        if not turn.claims.holds(request.sequence, request.token):
            error = ClaimLost(request.sequence)
            body = {"op": "failed", "n": request.number, "error": error_body(error)}
            turn.said.append((request.answer, body))
            return
        if request.how == "release":
            turn.claims = turn.claims.release(request.sequence)
            turn.rests[request.sequence] = now + request.rest_ms / 1000
        else:
            if request.how == "done" or self._quarantine(request.sequence, request.reason):
                turn.claims = turn.claims.finish(request.sequence)
            else:
                turn.claims = turn.claims.release(request.sequence)
        turn.lapses[request.sequence] = None
        turn.ended[request.token] = request.how
        with self._condition:
            self._alive.pop(request.token, None)
        turn.said.append((request.answer, {"op": "finished", "n": request.number}))

    def _hand_out(
        self,
        turn: _Turn,
        claiming: list[ClaimRequest],
        consumer: Consumer,
        now: float,
        news: bool,
    ) -> list[ClaimRequest]:
        """Give what is free to who waits longest; returns who goes on waiting."""
        self._rests = {key: at for key, at in self._rests.items() if at > now}
        resting = {*self._rests, *(key for key, at in turn.rests.items() if at > now), *self._stuck}
        wanted = sum(each.most for each in claiming)
        free = turn.claims.free(self._end, resting) if wanted else []
        if len(free) < wanted and (news or now >= self._polled_at + POLL_S):
            self._look_for(wanted - len(free), consumer, now)
            free = turn.claims.free(self._end, resting)
        left = []
        place = 0
        for request in claiming:
            given: list[int] = []
            size = 0
            while len(given) < request.most and place < len(free):
                sequence = free[place]
                size += self._size_of(sequence)
                if given and size > MAX_ANSWER_BYTES:
                    break
                place += 1
                if self._is_worn_out(turn, sequence, request):
                    continue
                if self._size_of(sequence) > MAX_ANSWER_BYTES:
                    reason = "its metadata is larger than what a broker and a worker exchange"
                    if self._quarantine(sequence, reason):
                        turn.claims = turn.claims.finish(sequence)
                    continue
                given.append(sequence)
            if given:
                self._give(turn, request, given, now)
            elif now >= request.until:
                body = {"op": "claimed", "n": request.number, "batches": []}
                turn.said.append((request.answer, body))
            else:
                left.append(request)
        return left

    def _look_for(self, count: int, consumer: Consumer, now: float) -> bool:
        self._polled_at = now
        found = consumer.next_descriptors(count)
        for each in found:
            self._known[each.sequence] = each
            self._end = each.sequence + 1
        return bool(found)

    def _size_of(self, sequence: int) -> int:
        """About how many bytes a batch takes in an answer."""
        known = self._known[sequence]
        ranges = sum(80 + len(each.payload) * 4 // 3 for each in known.metadata)
        return 200 + len(known.location) + ranges

    def _is_worn_out(self, turn: _Turn, sequence: int, request: ClaimRequest) -> bool:
        count = turn.claims.deliveries.get(sequence, 0)
        if not 0 < request.max_deliveries <= count:
            return False
        if self._quarantine(sequence, f"handed out {count} times and never finished"):
            turn.claims = turn.claims.finish(sequence)
        return True

    def _give(self, turn: _Turn, request: ClaimRequest, given: list[int], now: float) -> None:
        turn.claims = turn.claims.claim(given, request.worker, request.timeout_ms)
        batches = []
        for sequence in given:
            known = self._known[sequence]
            turn.lapses[sequence] = now + request.timeout_ms / 1000
            turn.rests.pop(sequence, None)
            batches.append(
                {
                    "sequence": sequence,
                    "location": known.location,
                    "metadata": metadata_body(known.metadata),
                    "token": turn.claims.held[sequence].token,
                    "deliveries": turn.claims.deliveries[sequence],
                }
            )
        body = {"op": "claimed", "n": request.number, "batches": batches}
        turn.said.append((request.answer, body))

    def _quarantine(self, sequence: int, reason: str) -> bool:
        """Copy a batch to the quarantine; False when it is too large for that.

        It then stays in the queue and is handed to nobody: finished, it would be deleted, and
        an error would be told to everybody who asks for any batch.
        """
        try:
            quarantine(
                self._store,
                self._config.data_path_prefix,
                self._known[sequence],
                reason,
                query="worker",
                runtime=self._runtime,
            )
        except InvalidInput as error:
            self._stuck.add(sequence)
            log.error(
                "batch %d (%s) stays in the queue and is handed to nobody: %s. To pass it by: "
                "'opendata-buffer skip %s %d'",
                sequence,
                reason,
                error,
                self._store.url,
                sequence,
            )
            return False
        log.warning("batch %d goes to the quarantine: %s", sequence, reason)
        return True

    def _write(self, before: Claims | None, after: Claims) -> None:
        assert self._register is not None

        def decide(found: Claims | None) -> Claims | None:
            # Our own write whose answer was lost, or somebody else's: then nothing is written.
            return after if found == before else found

        outcome = self._register.update(decide, from_memory=True)
        if not isinstance(outcome, Done):
            raise TransientStorageError(
                f"claims {self._register.key!r} could not be written: {outcome}. Try again."
            )
        if outcome.value != after:
            found = after.epoch if outcome.value is None else outcome.value.epoch
            raise Fenced(self._config.manifest_path, after.epoch, found)

    def _acknowledge(self) -> None:
        if self._claims is None or self._consumer is None:
            return
        frontier, consumer = self._claims.frontier, self._consumer
        acked = consumer.last_acked_sequence
        if frontier == 0 or (acked is not None and acked >= frontier - 1) or self._end < frontier:
            return
        now = self._runtime.monotonic()
        if (self._finishing or self._news) and now - self._acked_at < ACK_S:
            return  # There is another turn at once.
        self._acked_at = now
        try:
            consumer.ack_through(frontier - 1)
        except TransientStorageError as error:
            log.warning("acknowledging through %d is put off: %s", frontier - 1, error)
            return
        self._known = {key: each for key, each in self._known.items() if key >= frontier}
        self._stuck = {key for key in self._stuck if key >= frontier}

    def _give_up(self, requests: list[ClaimRequest | FinishRequest], error: BaseException) -> None:
        """Nothing of a turn has landed, or nobody knows: begin anew from what storage holds."""
        self._leave()
        if isinstance(error, Fenced):
            if self._fenced is None and self._is_by_a_broker_that_must_go():
                log.warning("a broker that is announced no more took the claims: taking them back")
                self._refuse(requests)
                return
            if self._fenced is None:
                log.warning("hands out no more batches: %s", error)
            self._fenced = error
        elif isinstance(error, OpenDataBufferError):
            log.warning("the foreman begins anew: %s", error)
        else:
            log.error("the foreman begins anew", exc_info=error)
        told = error_body(error)
        for request in requests:
            request.answer({"op": "failed", "n": request.number, "error": told})
        if self._fenced is None:
            self._runtime.sleep(RETRY_S)

    def _is_by_a_broker_that_must_go(self) -> bool:
        """Whether not another consumer fenced this foreman, but that of a broker before it.

        A broker that was suspended and wakes up takes the claims over on a heartbeat, before it
        finds that another one is announced. It steps down then, and nobody would hand out.
        """
        until = self._runtime.monotonic() + QUARREL_S
        with self._condition:
            while not self._leaving and (left := until - self._runtime.monotonic()) > 0:
                self._condition.wait(left)
            if self._leaving:
                return False
        try:
            found = self._make_register().read()
            return (
                isinstance(found, Done)
                and found.value is not None
                and found.value.epoch > self._epoch
                and self._is_announced()
            )
        except OpenDataBufferError as error:
            log.warning("who fenced the foreman is not known: %s", error)
            return False

    def _make_register(self) -> Register[Claims]:
        return Register(
            self._store,
            claims_key(self._config.data_path_prefix),
            decode=decode,
            encode=encode,
            runtime=self._runtime,
            settings=self._config,
            max_bytes=MAX_BYTES,
        )

    def _refuse(self, requests: list[ClaimRequest | FinishRequest]) -> None:
        for request in requests:
            request.answer({"op": "refused", "n": request.number, "why": "moved"})

    def _leave(self) -> None:
        consumer, self._consumer, self._claims = self._consumer, None, None
        self._lapses, self._rests, self._renewed = {}, {}, {}
        if consumer is not None:
            try:
                consumer.close()
            except OpenDataBufferError as error:
                log.warning("the foreman's consumer did not close cleanly: %s", error)
