"""Assign the queue's batches to workers: the broker as the queue's consumer.

Many workers share one queue, and ask the broker for batches. The broker's dispatcher reads the
queue as its consumer, gives each batch to one worker, and takes finished batches out of the queue.
:mod:`opendata_buffer.broker.claims` has the rules; this module stores the claims and talks to the
workers.

**Rounds.** A worker must only get a batch after the claim is stored: otherwise the next dispatcher
would hand the same batch out again. One write for each request would be slow, so requests of all
workers wait while one compare-and-swap on the claims is in flight, and the next
:class:`DispatchRound` handles all of them::

    requests      worker A claims 2, worker B is done with 7
    changes       release lapsed claims; 7 is done; A holds 8 and 9
    storage       one compare-and-swap on _claims.json
    answers       A gets 8 and 9; B's done() returns
    afterwards    acknowledge the batches before the frontier

Finished batches at the front are acknowledged after the claims are stored. A dispatcher that dies
in between loses nothing: its successor finds them in the claims and acknowledges them.

**Things that can go wrong:**

* A round fails, or its outcome is not known. The term ends, the workers of the round get the error,
  and the next round reads everything from storage again.
* A worker dies. Its heartbeats stop, its claim lapses, and another worker gets the batch.
* A worker does not get an answer, and asks again. Ended claims are remembered, so the repeated
  request gets the same answer.
* Another broker takes over, and its dispatcher fences this one. The requests of the round that
  notices it get ``Fenced``. This broker then reads that its record was replaced, steps down, and
  refuses later requests as ``moved``, so that its workers go to the announced broker.
* Another consumer takes the queue. Someone started it on purpose, so this dispatcher does not take
  the queue back: the two would fence each other for ever. It stays fenced, and its workers get
  ``Fenced``, until another broker takes over or this process restarts.
* A broker that was suspended wakes up, takes the claims on a heartbeat, and then steps down. After
  a few seconds the announced broker takes the claims back, because otherwise no broker would hand
  out batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from opendata_buffer import errors, metrics
from opendata_buffer.broker.claims import (
    Claims,
    Heartbeats,
    claims_key,
    claims_kind,
    decode,
    encode,
)
from opendata_buffer.broker.protocol import (
    MAX_MESSAGE_BYTES,
    ClaimRequest,
    FinishRequest,
    Request,
    error_body,
    metadata_body,
)
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.entries import EntryConsumer
from opendata_buffer.consumer.pace import PollPace
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.hints import Action, Hint
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, Task, wait_for
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES // 2
"""About the most bytes of one answer; batches that do not fit are handed out later."""

POLL_S = 0.25
"""Fewest seconds between two reads of the queue while workers wait, for batches of other processes.
The longer nothing comes, the rarer they are."""

ACK_S = 1.0
"""Seconds between two acknowledgements while workers wait, because they would wait for each write.
"""

MAX_ENDED = 10_000
"""Most ended claims whose outcome is remembered, for workers that ask again."""

REPLACED_S = 3.0
"""Seconds. A broker whose record was replaced reads that within two seconds, and steps down."""

RETRY_S = 1.0
"""Seconds of a pause after storage did not answer."""


class DispatchRound:
    """The changes of one group commit.

    Args:
        term: The dispatcher's term.
        ended_before: How claims ended in earlier rounds, by token.
        now: The time at which the round begins, monotonic seconds.

    Attributes:
        claims: The claims as they are to be stored.
        responses: Calls that send the answers; made once the claims are stored.
        ended: How claims ended in this round, by token.
        lapsed: How many claims lapsed.
    """

    def __init__(self, term: DispatcherTerm, ended_before: Mapping[int, str], now: float) -> None:
        self._term = term
        self._ended_before = ended_before
        self._now = now
        self.claims = term.claims
        self.responses: list[Callable[[], None]] = []
        self.ended: dict[int, str] = {}
        self.lapsed = 0

    def lapse(self) -> None:
        """Release the batches of workers whose heartbeats stopped."""
        heartbeats = self._term.heartbeats
        for sequence, at in list(heartbeats.lapses.items()):
            holder = self.claims.held.get(sequence)
            if at > self._now or holder is None:
                continue
            if not heartbeats.prolong(sequence, holder, self._now):
                log.warning("worker %s of batch %d sends no heartbeat", holder.worker, sequence)
                self.claims = self.claims.release(sequence)
                self.lapsed += 1

    def finish(self, request: FinishRequest) -> None:
        """End a claim as its worker asks, if the worker still holds it."""
        sequence, token = request.sequence, request.token
        if request.how == (self.ended.get(token) or self._ended_before.get(token)):
            # The worker did not get the first answer, and asks again.
            self._respond(request, "finished")
            return
        if not self.claims.holds(sequence, token):
            self._respond(request, "failed", error=error_body(errors.ClaimLost(sequence)))
            return
        if request.how == "release":
            self.claims = self.claims.release(sequence)
            self._term.rests[sequence] = self._now + request.rest_ms / 1000
        elif request.how == "done":
            self.claims = self.claims.finish(sequence)
        else:
            self.claims = self.claims.release(sequence)
            self._quarantine(sequence, request.reason)
        self.ended[token] = request.how
        self._term.heartbeats.drop(sequence, token)
        self._respond(request, "finished")

    def hand_out(self, claiming: Sequence[ClaimRequest], may_read: bool) -> list[ClaimRequest]:
        """Assign free batches to the requests, oldest first.

        Args:
            claiming: The requests, in the order of their arrival.
            may_read: Whether more batches may be read from the queue now, if too few are known.

        Returns:
            The requests that go on waiting.
        """
        term = self._term
        # Call this even when no worker waits: it forgets rests that are over.
        resting = term.resting(self._now)
        wanted = sum(each.most for each in claiming)
        free = self.claims.free(term.end, resting) if wanted else []
        if len(free) < wanted and may_read:
            term.read_more(wanted - len(free), self._now)
            free = self.claims.free(term.end, resting)
        left = []
        place = 0
        for request in claiming:
            given: list[int] = []
            size = 0
            while len(given) < request.most and place < len(free):
                sequence = free[place]
                batch = term.known[sequence]
                if batch.repeats is not None:  # The same batch came earlier: skip this entry.
                    self.claims = self.claims.finish(sequence)
                    place += 1
                    continue
                own_size = _size_in_answer(batch)
                size += own_size
                if given and size > MAX_ANSWER_BYTES:
                    break
                place += 1
                count = self.claims.deliveries.get(sequence, 0)
                if 0 < request.max_deliveries <= count:
                    self._quarantine(sequence, f"handed out {count} times and never finished")
                    continue
                if own_size > MAX_ANSWER_BYTES:
                    reason = "its metadata is larger than what a broker and a worker exchange"
                    self._quarantine(sequence, reason)
                    continue
                given.append(sequence)
            if given:
                self._give(request, given)
            elif self._now >= request.until:
                self._respond(request, "claimed", batches=[])
            else:
                left.append(request)
        return left

    def _quarantine(self, sequence: int, reason: str) -> None:
        if self._term.quarantine(sequence, reason):
            self.claims = self.claims.finish(sequence)

    def _give(self, request: ClaimRequest, given: Sequence[int]) -> None:
        self.claims = self.claims.claim(given, request.worker, request.timeout_ms)
        batches = []
        for sequence in given:
            self._term.heartbeats.lapses[sequence] = self._now + request.timeout_ms / 1000
            batch = self._term.known[sequence]
            batches.append(
                {
                    "sequence": sequence,
                    "location": batch.location,
                    "metadata": metadata_body(batch.metadata),
                    "token": self.claims.held[sequence].token,
                    "deliveries": self.claims.deliveries[sequence],
                }
            )
        self._respond(request, "claimed", batches=batches)

    def _respond(self, request: Request, op: str, **body: Any) -> None:
        self.responses.append(partial(request.respond, op, **body))


def _size_in_answer(batch: BatchDescriptor) -> int:
    # An estimate in bytes: base64 makes the payload a third larger.
    ranges = sum(80 + len(each.payload) * 4 // 3 for each in batch.metadata)
    return 200 + len(batch.location) + ranges


class DispatcherTerm:
    """The time for which a dispatcher is the queue's consumer and owns the claims.

    It holds the batches that wait or are being worked on. It begins when this object is made, with
    the claims that its predecessor last wrote. It ends when another consumer or dispatcher takes
    the queue. Not thread-safe.

    Args:
        store: The queue's store.
        config: Settings of the queue's consumer.
        runtime: Clock and threads.
        queue: The broker's queue; None opens a separate one.
        steady_since: See :class:`.Heartbeats`.

    Raises:
        Fenced: Another dispatcher was faster.
        OpenDataBufferError: The queue could not be taken over, as :class:`.Consumer`.
    """

    def __init__(
        self,
        store: Store,
        config: ConsumerConfig,
        runtime: Runtime,
        queue: Queue | None = None,
        steady_since: Callable[[], float] = lambda: float("-inf"),
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self.known: dict[int, BatchDescriptor] = {}
        """The batches that were read and are not acknowledged, by sequence."""
        self.rests: dict[int, float] = {}
        """Until when a released batch rests, monotonic seconds, by sequence."""
        self._stuck: set[int] = set()
        self._read_at = float("-inf")
        self._pace = PollPace(config.idle_poll_ms, first_s=POLL_S)
        self.consumer = EntryConsumer(
            config, store=store, runtime=runtime, queue=queue, program="broker for workers"
        )
        try:
            last = self.consumer.last_handed_out_sequence
            self.end = 0 if last is None else last + 1
            """Batches before this sequence are known, or are no longer queued."""
            self._object = _claims_object(store, config, runtime)
            self.claims = self._adopt()
            now = runtime.monotonic()
            self.heartbeats = Heartbeats(runtime.condition(), steady_since, self.claims.held, now)
        except BaseException:
            self.consumer.close()
            raise

    def read_more(self, count: int, now: float) -> bool:
        """Read the next batches of the queue.

        Args:
            count: Most batches to read.
            now: The current time, monotonic seconds.

        Returns:
            False when the queue has no more.
        """
        self._read_at = now
        found = self.consumer.next_entries(count)
        self._pace.looked(bool(found), now, self._runtime.monotonic())
        for each in found:
            self.known[each.sequence] = each
            self.end = each.sequence + 1
        return bool(found)

    @property
    def read_due_at(self) -> float:
        """When to read the queue again while workers wait, monotonic seconds."""
        return self._read_at + max(POLL_S, self._pace.pause_s)

    def resting(self, now: float) -> set[int]:
        """Return the batches that must not be handed out at this moment."""
        self.rests = {key: at for key, at in self.rests.items() if at > now}
        return {*self.rests, *self._stuck}

    def quarantine(self, sequence: int, reason: str) -> bool:
        """Copy a batch to the quarantine.

        Args:
            sequence: Sequence of the batch.
            reason: Why it goes to the quarantine.

        Returns:
            False if the batch is too large for the quarantine. It then stays in the queue and is
            not handed out: if it were finished, it would be deleted.
        """
        try:
            quarantine(
                self._store,
                self._config.data_path_prefix,
                self.known[sequence],
                reason,
                query="worker",
                runtime=self._runtime,
            )
        except errors.InvalidInput as error:
            self._stuck.add(sequence)
            queue, reader = queue_name(self._store.url, self._config), self._config.reader
            hint = Hint(Action.SKIP_FOR_WORKERS, queue, sequence)
            if reader:
                hint = Hint(Action.RESET_FOR_WORKERS, queue, sequence + 1, readers=(reader,))
            log.error(
                "batch %d (%s) stays in the queue and is not handed out: %s. %s",
                sequence,
                reason,
                error,
                hint,
            )
            return False
        log.warning("batch %d goes to the quarantine: %s", sequence, reason)
        return True

    def acknowledge(self, frontier: int) -> None:
        """Take the batches before the frontier out of the queue."""
        self.consumer.ack_through(frontier - 1)
        self.known = {key: each for key, each in self.known.items() if key >= frontier}
        self._stuck = {key for key in self._stuck if key >= frontier}

    def _adopt(self) -> Claims:
        """Take the claims over from a dispatcher with a lower epoch, whatever it last wrote.

        Raises:
            Fenced: The claims have a higher epoch already.
        """
        first = self.end
        queue, epoch = self.consumer.position_of(first).queue_id, self.consumer.epoch

        def decide(found: Claims | None) -> Claims:
            if found is None:
                return Claims(epoch, first, queue=queue)
            if found.queue == queue and found.epoch > epoch:
                return found
            if self._config.reader and found.epoch + 1 < epoch and first < found.frontier:
                # The reader was reset to an earlier position in the meantime.
                return Claims(epoch, first, tokens=found.tokens, queue=queue)
            return found.adopted(epoch, queue, first)

        found = self._object.change(decide)
        if found.epoch != epoch:
            raise self._fenced(epoch, found.epoch)
        return found

    def write(self, after: Claims) -> None:
        """Store changed claims.

        Args:
            after: The claims to store.

        Raises:
            Fenced: Another dispatcher has the claims. Nothing was written.
            TransientStorageError: It is not known whether they were written.
        """
        before = self.claims

        def decide(found: Claims | None) -> Claims | None:
            # Found other claims: our own write whose answer was lost, or those of another
            # dispatcher. Either way nothing is written.
            return after if found == before else found

        if after != before:
            found = self._object.change(decide, from_memory=True)
            if found != after:
                raise self._fenced(after.epoch, found.epoch)
        self.claims = after

    def _fenced(self, epoch: int, current_epoch: int) -> errors.Fenced:
        error = errors.Fenced(self._config.manifest_path, epoch, current_epoch)
        return error.at(queue_name(self._store.url, self._config))


def _claims_object(store: Store, config: ConsumerConfig, runtime: Runtime) -> CasObject[Claims]:
    kind = claims_kind(queue_name(store.url, config))
    return CasObject(
        store,
        claims_key(config.data_path_prefix, config.reader),
        decode=partial(decode, kind=kind),
        encode=encode,
        runtime=runtime,
        settings=config,
        sidecar=kind,
    )


class Dispatcher:
    """The claims of one queue's workers, across all terms of this process's broker.

    Args:
        store: The queue's store.
        config: Settings of the queue's consumer.
        runtime: Clock and threads.
        queue: The queue that the broker appends to; None to open a separate one.
        is_announced: Returns whether clients are sent to this broker and to no other; reads the
            store. Only then are the claims taken over from another dispatcher.
        is_current: Returns whether that was true some seconds ago; reads nothing.
        steady_since: See :class:`.Heartbeats`.
    """

    def __init__(
        self,
        store: Store,
        config: ConsumerConfig,
        runtime: Runtime,
        queue: Queue | None = None,
        is_announced: Callable[[], bool] = lambda: True,
        is_current: Callable[[], bool] = lambda: True,
        steady_since: Callable[[], float] = lambda: float("-inf"),
    ) -> None:
        self._store = store
        self._queue = queue
        self._is_announced = is_announced
        self._is_current = is_current
        self._config = config
        self._runtime = runtime
        self._condition = runtime.condition()
        self._finishing: list[FinishRequest] = []
        self._claiming: list[ClaimRequest] = []
        self._steady_since = steady_since
        self._term: DispatcherTerm | None = None
        self._last_epoch = -1
        self._leaving = False
        self._fenced: errors.Fenced | None = None
        self._has_new_batches = False
        self._task: Task | None = None
        self._readers: dict[str, Dispatcher] = {}
        self._ended: dict[int, str] = {}
        self._acked_at = float("-inf")

    def of_reader(self, reader: str) -> Dispatcher:
        """Return the dispatcher for one reader's workers; this one if the queue is not a log."""
        with self._condition:
            if reader and reader not in self._readers:
                self._readers[reader] = Dispatcher(
                    self._store,
                    replace(self._config, reader=reader),
                    self._runtime,
                    None,
                    self._is_announced,
                    self._is_current,
                    self._steady_since,
                )
                self._readers[reader]._leaving = self._leaving
            return self._readers[reader] if reader else self

    def submit(self, request: ClaimRequest | FinishRequest) -> None:
        """Take a request; its ``answer`` is called once."""
        with self._condition:
            if not self._leaving:
                if isinstance(request, ClaimRequest):
                    self._claiming.append(request)
                else:
                    self._finishing.append(request)
                # Start only when a worker asks: taking the claims fences any other consumer.
                self._start()
                self._condition.notify_all()
                return
        self._refuse([request])

    def beat(self, tokens: list[int]) -> bool:
        """Note a worker's heartbeat for these claims.

        A broker that does not reach the store may have been replaced. If it went on answering, it
        would keep workers from the next broker, where their claims would lapse.

        Args:
            tokens: The tokens of the claims that the worker holds.

        Returns:
            False if the worker has to go to another broker.
        """
        if not self._is_current():
            return False
        term = self._term
        if term is not None:
            term.heartbeats.receive(tokens, self._runtime.monotonic())
        with self._condition:
            if tokens and not self._leaving and self._task is None:
                # Take the claims over at once. A predecessor that was only suspended would find no
                # heartbeats, and would hand the batches to other workers.
                self._has_new_batches = True
                self._start()
        return True

    def _start(self) -> None:
        if self._task is None:
            labels = {"queue": metrics.queue_label(self._store.url, self._config.manifest_path)}
            if self._config.reader:
                labels["reader"] = self._config.reader
            metrics.claims_held.watch(self, Dispatcher.held_now, labels)
            self._task = self._runtime.spawn(self._run, "opendata-buffer-dispatcher")

    def held_now(self) -> float | None:
        """Return how many batches workers hold; None while this broker hands out no batches."""
        term = self._term
        return None if term is None else len(term.claims.held)

    def appended(self) -> None:
        """Note that there are new batches in the queue."""
        if self._task is not None:
            with self._condition:
                self._has_new_batches = True
                self._condition.notify_all()
        for each in [*self._readers.values()]:
            each.appended()

    def stop(self, timeout: float | None = None) -> None:
        """Refuse waiting requests as ``moved``, and leave the queue to a successor.

        Args:
            timeout: Seconds to wait for the thread; None waits without a limit.
        """
        with self._condition:
            self._leaving = True
            self._condition.notify_all()
        for each in self._readers.values():
            each.stop(timeout)
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
                    # Drop requests of workers that are gone: a batch for one would be held until
                    # its claim lapsed.
                    claiming = [each for each in self._claiming if each.waits()]
                    self._claiming = []
                    has_new_batches, self._has_new_batches = self._has_new_batches, False
                try:
                    left = self._run_round(finishing, claiming, has_new_batches)
                except Exception as error:
                    left = []
                    self._fail([*finishing, *claiming], error)
                with self._condition:
                    self._claiming = [*left, *self._claiming]
                try:
                    self._acknowledge()
                except Exception as error:
                    # All requests have been answered, and finished batches stay finished.
                    self._fail([], error)
        finally:
            with self._condition:
                self._leaving = True
                waiting: list[Request] = [*self._finishing, *self._claiming]
            self._refuse(waiting)
            self._end_term()

    def _wait(self) -> None:
        """Wait until there is something to do. Called with the lock."""
        while not self._leaving and not self._finishing and not self._has_new_batches:
            now, term = self._runtime.monotonic(), self._term
            if term is None:
                times = [now] if self._claiming else []
            else:
                times = [*term.heartbeats.lapses.values(), *term.rests.values()]
                if self._claiming:
                    times.append(term.read_due_at)
                    times += [each.until for each in self._claiming]
            if times and min(times) <= now:
                return
            self._condition.wait(min(times) - now if times else None)

    def _run_round(
        self, finishing: list[FinishRequest], claiming: list[ClaimRequest], has_new_batches: bool
    ) -> list[ClaimRequest]:
        term = self._ensure_term()
        now = self._runtime.monotonic()
        this_round = DispatchRound(term, self._ended, now)
        this_round.lapse()
        for request in finishing:
            this_round.finish(request)
        is_due = has_new_batches or now >= term.read_due_at
        left = this_round.hand_out(claiming, is_due)
        term.write(this_round.claims)
        # The claims are stored: only now may the requests be answered.
        self._ended.update(this_round.ended)
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        metrics.claims_lapsed.add(this_round.lapsed)
        term.heartbeats.forget(this_round.claims.held)
        for respond in this_round.responses:
            respond()
        return left

    def _ensure_term(self) -> DispatcherTerm:
        if self._fenced is not None:
            # Another consumer took the queue on purpose. If this one took it back, the two would
            # fence each other for ever.
            raise self._fenced
        if self._term is not None:
            return self._term
        if not self._is_announced():
            # If a broker claimed the queue and gave up before it wrote the claims, it would look
            # like another consumer, and the announced broker would stop for it.
            raise errors.TransientStorageError("another broker is announced by now: ask it")
        term = DispatcherTerm(
            self._store, self._config, self._runtime, self._queue, self._steady_since
        )
        claims = term.claims
        # If the claims were deleted, tokens are drawn again that named other claims before.
        self._ended = {token: how for token, how in self._ended.items() if token <= claims.tokens}
        self._last_epoch = claims.epoch
        self._term = term
        # Read all held and finished batches: they will be handed out again or acknowledged.
        needed = max([claims.frontier, *(key + 1 for key in claims.held)])
        now = self._runtime.monotonic()
        while term.end < needed and term.read_more(needed - term.end, now):
            pass
        log.info("handing out batches from %d on, epoch %d", claims.frontier, claims.epoch)
        return term

    def _acknowledge(self) -> None:
        term = self._term
        if term is None:
            return
        frontier, acked = term.claims.frontier, term.consumer.last_acked_sequence
        is_acked = acked is not None and acked >= frontier - 1
        if frontier == 0 or is_acked or term.end < frontier:
            return
        now = self._runtime.monotonic()
        if (self._finishing or self._has_new_batches) and now - self._acked_at < ACK_S:
            return  # The next round follows at once.
        self._acked_at = now
        try:
            term.acknowledge(frontier)
        except errors.TransientStorageError as error:
            log.warning("acknowledging through %d is put off: %s", frontier - 1, error)

    def _fail(self, requests: list[Request], error: BaseException) -> None:
        """End the term and report the error of a round that failed or has an unknown outcome.

        The next round begins again from storage.
        """
        self._end_term()
        if isinstance(error, errors.Fenced):
            if self._fenced is None and self._was_fenced_by_a_broker():
                # The workers ask the announced broker. If that is this one, it takes the claims
                # back.
                log.warning("another broker took the claims: workers are sent to the announced one")
                self._refuse(requests)
                return
            if self._fenced is None:
                log.warning("hands out no more batches: %s", error)
            self._fenced = error
        elif isinstance(error, errors.OpenDataBufferError):
            log.warning("the dispatcher starts again: %s", error)
        else:
            log.error("the dispatcher starts again", exc_info=error)
        body = error_body(error)
        for request in requests:
            request.respond("failed", error=body)
        if self._fenced is None:
            self._runtime.sleep(RETRY_S)

    def _was_fenced_by_a_broker(self) -> bool:
        """Return whether another broker fenced this dispatcher, and not a consumer.

        It may be the broker that has replaced this one. Or it is one that was itself replaced: it
        was suspended, takes the claims over on a heartbeat, and then steps down. If this dispatcher
        stopped for it, no broker would hand out batches.
        """
        until = self._runtime.monotonic() + REPLACED_S
        with self._condition:
            if wait_for(self._runtime, self._condition, lambda: self._leaving, until=until):
                return False
        try:
            if not self._is_announced():
                return True
            found = _claims_object(self._store, self._config, self._runtime).read()
            return isinstance(found, Claims) and found.epoch > self._last_epoch
        except errors.OpenDataBufferError as error:
            log.warning("what fenced the dispatcher is not known: %s", error)
            return False

    def _refuse(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.respond("refused", why="moved")

    def _end_term(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            try:
                term.consumer.close()
            except errors.OpenDataBufferError as error:
                log.warning("the dispatcher's consumer did not close cleanly: %s", error)
