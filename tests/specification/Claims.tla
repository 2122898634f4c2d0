-------------------------------- MODULE Claims --------------------------------
(* Workers claim batches from dispatchers. The announced dispatcher is the    *)
(* queue's consumer. Dispatchers take over, die, and are suspended.           *)
(*                                                                            *)
(* All batches are queued at the beginning, and sequences begin at 0. The     *)
(* manifest's value is [first, epoch, fencedAck]. The value of the claims is  *)
(* [epoch, frontier, tokens, held, done], where `held` has the token of each  *)
(* batch, or 0. Here a dispatcher changes one claim in a round; the code      *)
(* makes several such changes in one write. All clocks run at the same rate.  *)
EXTENDS Store

CONSTANTS
    Workers,
    Dispatchers,
    Batches,     \* The number of batches.
    Timeout,     \* How long a claim lasts without a heartbeat.
    Silent,      \* How long no other broker takes over after a record was renewed.
    MaxTokens,
    MaxEpoch,
    MaxTime

VARIABLES manifest, claims, announced, dispatcher, worker, told, now

vars == <<manifest, claims, announced, dispatcher, worker, told, now>>

Sequences_ == 0..(Batches - 1)
Off == [at |-> "off", epoch |-> 0, known |-> None, after |-> None, reply |-> None,
        lapses |-> [s \in Sequences_ |-> 0], ended |-> {}]
NoClaim == [at |-> "free", broker |-> None, since |-> 0, sequence |-> 0, token |-> 0,
            asked |-> FALSE]

Init ==
    /\ manifest = Object([first |-> 0, epoch |-> 0, fencedAck |-> FALSE])
    /\ claims = Object([epoch |-> 0, frontier |-> 0, tokens |-> 0,
                        held |-> [s \in Sequences_ |-> 0], done |-> {}])
    /\ announced = [broker |-> None, renewed |-> 0]
    /\ dispatcher = [d \in Dispatchers |-> Off]
    /\ worker = [w \in Workers |-> NoClaim]
    /\ told = {}               \* batches that were reported done to a worker
    /\ now = 0

RECURSIVE Passed(_, _)
Passed(frontier, done) == IF frontier \in done THEN Passed(frontier + 1, done) ELSE frontier

Finish(c, s) ==
    LET done == c.done \cup {s} IN
    [c EXCEPT !.held[s] = 0, !.done = done, !.frontier = Passed(@, done)]
Release(c, s) == [c EXCEPT !.held[s] = 0]
Claim(c, s) == [c EXCEPT !.held[s] = c.tokens + 1, !.tokens = @ + 1]

(*------------------------------- election ----------------------------------*)

\* A standby waits until the record was not renewed for this long. A broker that was replaced has
\* stepped down before it is announced again, and its dispatcher has ended.
\* core/opendata_buffer/broker/election.py: LeaderElection._stand_by
\* core/opendata_buffer/broker/election.py: LeaderElection._take_over
Announce(d) ==
    /\ announced.broker # d
    /\ announced.broker = None \/ now - announced.renewed >= Silent
    /\ announced' = [broker |-> d, renewed |-> now]
    /\ dispatcher' = [dispatcher EXCEPT ![d] = Off]
    /\ UNCHANGED <<manifest, claims, worker, told, now>>

\* core/opendata_buffer/broker/election.py: LeaderElection._keep
RenewRecord(d) ==
    /\ announced.broker = d /\ announced.renewed < now
    /\ announced' = [announced EXCEPT !.renewed = now]
    /\ UNCHANGED <<manifest, claims, dispatcher, worker, told, now>>

(*------------------------------ dispatchers --------------------------------*)

\* core/opendata_buffer/broker/dispatcher.py: Dispatcher._ensure_term
\* core/opendata_buffer/queue/queue.py: Queue.claim_epoch
TakeQueue(d) ==
    LET new == [manifest.now EXCEPT !.epoch = @ + 1] IN
    /\ dispatcher[d].at = "off" /\ announced.broker = d /\ manifest.now.epoch < MaxEpoch
    /\ \E answer \in Put(manifest, manifest.now, new) :
         /\ manifest' = answer[2]
         /\ dispatcher' = IF answer[1] = "applied"
              THEN [dispatcher EXCEPT ![d] = [Off EXCEPT !.at = "look", !.epoch = new.epoch]]
              ELSE dispatcher
    /\ UNCHANGED <<claims, announced, worker, told, now>>

\* core/opendata_buffer/broker/dispatcher.py: DispatcherTerm._adopt
LookBeforeAdoption(d) ==
    /\ dispatcher[d].at = "look"
    /\ dispatcher' = [dispatcher EXCEPT ![d] =
         IF claims.now.epoch > @.epoch /\ ~Faulty("the epoch of claims is not compared")
         THEN Off ELSE [@ EXCEPT !.at = "adopt", !.known = claims.now]]
    /\ UNCHANGED <<manifest, claims, announced, worker, told, now>>

\* A successor lets every claim last for the whole time again.
\* core/opendata_buffer/broker/dispatcher.py: DispatcherTerm._adopt
\* core/opendata_buffer/broker/claims.py: Heartbeats
Adopt(d) ==
    LET new == [dispatcher[d].known EXCEPT !.epoch = dispatcher[d].epoch]
        lapse == IF Faulty("a successor does not extend claims") THEN now ELSE now + Timeout IN
    /\ dispatcher[d].at = "adopt"
    /\ \E answer \in IF new = dispatcher[d].known /\ claims.now = new
                     THEN {<<"applied", claims>>}
                     ELSE Put(claims, dispatcher[d].known, new) :
         /\ claims' = answer[2]
         /\ dispatcher' = [dispatcher EXCEPT ![d] =
              IF answer[1] = "applied"
              THEN [@ EXCEPT !.at = "serves", !.known = new,
                             !.lapses = [s \in Sequences_ |-> lapse]]
              ELSE [@ EXCEPT !.at = "look", !.known = None]]
    /\ UNCHANGED <<manifest, announced, worker, told, now>>

(* Begin to write claims. The reply is sent after the write.                  *)
Begin(d, after, reply) ==
    dispatcher' = [dispatcher EXCEPT ![d].at = "writes", ![d].after = after, ![d].reply = reply]

\* core/opendata_buffer/broker/dispatcher.py: DispatchRound.hand_out
HandOut(d, w) ==
    LET c == dispatcher[d].known IN
    /\ dispatcher[d].at = "serves" /\ worker[w].at = "asks" /\ worker[w].broker = d
    /\ c.tokens < MaxTokens
    /\ \E s \in Sequences_ :
         /\ s >= c.frontier /\ s \notin c.done /\ c.held[s] = 0
         /\ \A other \in Sequences_ : other < s =>
              other < c.frontier \/ other \in c.done \/ c.held[other] # 0
         /\ Begin(d, Claim(c, s), [to |-> w, kind |-> "claimed", sequence |-> s,
                                   token |-> c.tokens + 1])
    /\ UNCHANGED <<manifest, claims, announced, worker, told, now>>

Reply(w, kind) == [to |-> w, kind |-> kind, sequence |-> worker[w].sequence,
                   token |-> worker[w].token]

(* The answer to a worker about the end of its claim.                         *)
Told(w, kind) ==
    LET sure == now - worker[w].since < Timeout
        believes == kind = "finished"
                    \/ (worker[w].asked
                        /\ (sure \/ Faulty("a lapsed claim is believed to be done")))
    IN
    /\ told' = IF believes THEN told \cup {worker[w].sequence} ELSE told
    /\ worker' = [worker EXCEPT ![w] = NoClaim]

\* core/opendata_buffer/broker/dispatcher.py: DispatchRound.finish
EndClaim(d, w) ==
    LET c == dispatcher[d].known
        s == worker[w].sequence
        t == worker[w].token IN
    /\ dispatcher[d].at = "serves" /\ worker[w].at = "finishes" /\ worker[w].broker = d
    /\ IF t \in dispatcher[d].ended
       THEN Told(w, "finished") /\ UNCHANGED dispatcher
       ELSE IF c.held[s] # t /\ ~(Faulty("the token is not compared") /\ c.held[s] # 0)
       THEN Told(w, "lost") /\ UNCHANGED dispatcher
       ELSE Begin(d, Finish(c, s), Reply(w, "finished")) /\ UNCHANGED <<worker, told>>
    /\ UNCHANGED <<manifest, claims, announced, now>>

(* By its own clock, no other broker can have replaced this one yet.          *)
IsFresh(d) == announced.broker = d /\ now - announced.renewed < Silent

\* A broker that was late to renew its record may have missed heartbeats.
\* core/opendata_buffer/broker/dispatcher.py: DispatchRound.lapse
\* core/opendata_buffer/broker/claims.py: Heartbeats.prolong
\* core/opendata_buffer/broker/election.py: LeaderElection._steady_since
Lapse(d) ==
    /\ dispatcher[d].at = "serves"
    /\ IsFresh(d) \/ Faulty("a broker that was suspended lets claims lapse")
    /\ \E s \in Sequences_ :
         /\ dispatcher[d].known.held[s] # 0 /\ now >= dispatcher[d].lapses[s]
         /\ Begin(d, Release(dispatcher[d].known, s), None)
    /\ UNCHANGED <<manifest, claims, announced, worker, told, now>>

(* Send the reply after the round was stored. No one gets it if the worker    *)
(* has no claim or has asked another broker in the meantime.                  *)
Sent(d, reply) ==
    IF reply = None THEN UNCHANGED <<worker, told>>
    ELSE LET w == reply.to IN
    IF reply.kind = "claimed"
    THEN /\ worker' = IF worker[w].at = "asks" /\ worker[w].broker = d
              THEN [worker EXCEPT ![w].at = "gets", ![w].sequence = reply.sequence,
                                  ![w].token = reply.token]
              ELSE worker
         /\ UNCHANGED told
    ELSE IF worker[w].at = "finishes" /\ worker[w].broker = d /\ worker[w].token = reply.token
    THEN Told(w, "finished")
    ELSE UNCHANGED <<worker, told>>

Stored(d, after) ==
    [dispatcher EXCEPT ![d].at = "serves", ![d].known = after, ![d].after = None, ![d].reply = None,
        ![d].ended = IF dispatcher[d].reply # None /\ dispatcher[d].reply.kind = "finished"
                     THEN @ \cup {dispatcher[d].reply.token} ELSE @,
        ![d].lapses = IF dispatcher[d].reply # None /\ dispatcher[d].reply.kind = "claimed"
                      THEN [@ EXCEPT ![dispatcher[d].reply.sequence] = now + Timeout] ELSE @]

\* Answers are sent only after the claims were stored.
\* core/opendata_buffer/broker/dispatcher.py: DispatcherTerm.write
\* core/opendata_buffer/broker/dispatcher.py: Dispatcher._run_round
WriteClaims(d) ==
    LET after == dispatcher[d].after IN
    /\ dispatcher[d].at = "writes"
    /\ \E answer \in Put(claims, dispatcher[d].known, after) :
         /\ claims' = answer[2]
         /\ IF answer[1] = "applied" \/ Faulty("an answer before the claims are stored")
            THEN dispatcher' = Stored(d, after) /\ Sent(d, dispatcher[d].reply)
            ELSE /\ dispatcher' = [dispatcher EXCEPT ![d].at = "look again"]
                 /\ UNCHANGED <<worker, told>>
    /\ UNCHANGED <<manifest, announced, now>>

\* The claims are its own write whose answer was lost, the old ones, or another dispatcher's.
\* core/opendata_buffer/broker/dispatcher.py: DispatcherTerm.write
\* core/opendata_buffer/broker/dispatcher.py: Dispatcher._fail
LookAgain(d) ==
    LET after == dispatcher[d].after IN
    /\ dispatcher[d].at = "look again"
    /\ IF claims.now = after
       THEN dispatcher' = Stored(d, after) /\ Sent(d, dispatcher[d].reply)
       ELSE /\ dispatcher' = [dispatcher EXCEPT ![d] =
                 IF claims.now = @.known THEN [@ EXCEPT !.at = "writes"]
                 ELSE IF Faulty("claims of others are overwritten")
                 THEN [@ EXCEPT !.at = "writes", !.known = claims.now]
                 ELSE Off]
            /\ UNCHANGED <<worker, told>>
    /\ UNCHANGED <<manifest, claims, announced, now>>

\* core/opendata_buffer/broker/dispatcher.py: Dispatcher._acknowledge
\* core/opendata_buffer/queue/queue.py: Queue.dequeue
Acknowledge(d) ==
    LET frontier == IF Faulty("a batch done after an open one is acknowledged")
                    THEN Max(dispatcher[d].known.frontier,
                             Cardinality(dispatcher[d].known.done))
                    ELSE dispatcher[d].known.frontier
        new == [manifest.now EXCEPT !.first = frontier,
                  !.fencedAck = @ \/ manifest.now.epoch # dispatcher[d].epoch] IN
    /\ dispatcher[d].at = "serves" /\ frontier > manifest.now.first
    /\ IF manifest.now.epoch # dispatcher[d].epoch /\ ~Faulty("no epoch at acknowledgement")
       THEN dispatcher' = [dispatcher EXCEPT ![d] = Off] /\ UNCHANGED manifest
       ELSE \E answer \in Put(manifest, manifest.now, new) :
              manifest' = answer[2] /\ UNCHANGED dispatcher
    /\ UNCHANGED <<claims, announced, worker, told, now>>

\* The process ends and another one begins without its memory.
\* core/opendata_buffer/broker/dispatcher.py: Dispatcher._end_term
Die(d) ==
    /\ dispatcher[d].at # "off"
    /\ dispatcher' = [dispatcher EXCEPT ![d] = Off]
    /\ UNCHANGED <<manifest, claims, announced, worker, told, now>>

(*-------------------------------- workers ----------------------------------*)

\* A claim counts from the time of the request.
\* core/opendata_buffer/broker/worker.py: Worker.claim
Ask(w) ==
    /\ worker[w].at = "free" /\ announced.broker # None
    /\ worker' = [worker EXCEPT ![w].at = "asks", ![w].broker = announced.broker, ![w].since = now]
    /\ UNCHANGED <<manifest, claims, announced, dispatcher, told, now>>

\* If it gets no answer, it asks the broker that is announced now.
\* core/opendata_buffer/broker/worker.py: DispatcherClient.ask
AskAnother(w) ==
    /\ worker[w].at \in {"asks", "finishes"} /\ worker[w].broker # announced.broker
    /\ worker' = [worker EXCEPT ![w].broker = announced.broker,
                                ![w].asked = worker[w].at = "finishes"]
    /\ UNCHANGED <<manifest, claims, announced, dispatcher, told, now>>

\* Send the same request again after a lost answer.
\* core/opendata_buffer/broker/worker.py: DispatcherClient.ask
NoteLostAnswer(w) ==
    /\ worker[w].at = "finishes" /\ ~worker[w].asked
    /\ worker' = [worker EXCEPT ![w].asked = TRUE]
    /\ UNCHANGED <<manifest, claims, announced, dispatcher, told, now>>

IsSure(w) == now - worker[w].since < Timeout

\* A batch whose claim it can no longer rely on does not reach the user.
\* core/opendata_buffer/broker/worker.py: Worker._claimed
Receive(w) ==
    /\ worker[w].at = "gets"
    /\ worker' = [worker EXCEPT ![w] =
         IF Faulty("a worker counts from the answer") THEN [@ EXCEPT !.at = "holds", !.since = now]
         ELSE IF IsSure(w) THEN [@ EXCEPT !.at = "holds"] ELSE NoClaim]
    /\ UNCHANGED <<manifest, claims, announced, dispatcher, told, now>>

\* A broker that has not renewed its record in time does not answer: it may have been replaced.
\* core/opendata_buffer/broker/dispatcher.py: Dispatcher.beat
\* core/opendata_buffer/broker/worker.py: Worker._beat
Beat(w, d) ==
    LET s == worker[w].sequence IN
    /\ worker[w].at = "holds" /\ IsSure(w) /\ worker[w].since < now
    /\ dispatcher[d].at # "off"
    /\ IsFresh(d) \/ Faulty("a replaced broker answers heartbeats")
    /\ worker' = [worker EXCEPT ![w].since = now]
    /\ dispatcher' = IF dispatcher[d].at \in {"serves", "writes", "look again"}
                     THEN [dispatcher EXCEPT ![d].lapses[s] = Max(@, now + Timeout)]
                     ELSE dispatcher
    /\ UNCHANGED <<manifest, claims, announced, told, now>>

\* core/opendata_buffer/broker/worker.py: ClaimedBatch.done
AskToFinish(w) ==
    /\ worker[w].at = "holds"
    /\ worker' = [worker EXCEPT ![w].at = "finishes", ![w].broker = announced.broker]
    /\ UNCHANGED <<manifest, claims, announced, dispatcher, told, now>>

(*------------------------- the store and the clock -------------------------*)

\* core/opendata_buffer/testing/faults.py: FaultyStore.put_if
WriteArrives ==
    /\ \/ \E after \in Arrivals(manifest) : manifest' = after /\ UNCHANGED claims
       \/ \E after \in Arrivals(claims) : claims' = after /\ UNCHANGED manifest
    /\ UNCHANGED <<announced, dispatcher, worker, told, now>>

\* core/opendata_buffer/testing/runtime.py: ManualRuntime.advance
Tick ==
    /\ now < MaxTime
    /\ now' = now + 1
    /\ UNCHANGED <<manifest, claims, announced, dispatcher, worker, told>>

Next ==
    \/ \E d \in Dispatchers :
         \/ Announce(d) \/ RenewRecord(d) \/ TakeQueue(d) \/ LookBeforeAdoption(d) \/ Adopt(d)
         \/ Lapse(d) \/ WriteClaims(d) \/ LookAgain(d) \/ Acknowledge(d) \/ Die(d)
         \/ \E w \in Workers : HandOut(d, w) \/ EndClaim(d, w) \/ Beat(w, d)
    \/ \E w \in Workers :
         \/ Ask(w) \/ AskAnother(w) \/ NoteLostAnswer(w) \/ Receive(w) \/ AskToFinish(w)
    \/ WriteArrives \/ Tick

Spec == Init /\ [][Next]_vars

(*------------------------------- invariants --------------------------------*)

\* While a worker relies on a claim, its claim is stored and no other worker has one for the
\* batch. Silent must not be larger than Timeout.
SureWorkerHoldsTheBatch ==
    \A w \in Workers :
        worker[w].at = "holds" /\ IsSure(w) => claims.now.held[worker[w].sequence] = worker[w].token

\* A batch that was reported done stays done, and no worker gets it again.
ReportedDoneIsDone == \A s \in told : s \in claims.now.done

\* No batch leaves the queue before it is done.
OnlyDoneLeaves == \A s \in Sequences_ : s < manifest.now.first => s \in claims.now.done

\* A fenced dispatcher never acknowledges.
NoFencedAcknowledgement == ~manifest.now.fencedAck

\* Tokens and epochs only grow, so claims never return to an earlier value.
OnlyForward ==
    [][/\ claims'.now.epoch >= claims.now.epoch /\ claims'.now.tokens >= claims.now.tokens
       /\ claims.now.done \subseteq claims'.now.done
       /\ manifest'.now.first >= manifest.now.first]_vars
==============================================================================
