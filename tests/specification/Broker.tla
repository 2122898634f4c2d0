-------------------------------- MODULE Broker --------------------------------
(* Clients append through brokers, or alone. Brokers take over, serve two at  *)
(* once, die, and are suspended; messages and answers are lost.               *)
(*                                                                            *)
(* Each client appends one batch, which its name stands for. The manifest's   *)
(* value is [first, log] as in Queue.tla; a consumer beside takes entries.    *)
(* A request is [client, try, since, heard]: `since` is the sequence at which *)
(* an earlier attempt may have landed, or -1; `heard` the broker's clock.     *)
(* Clocks run equally fast here, and show the same: no two are compared.      *)
EXTENDS Store

CONSTANTS
    Clients,
    Brokers,
    Valid,       \* For how long after `heard` a broker may begin a write.
    Dequeues,    \* How many entries the consumer takes.
    MaxTries,    \* How often a client asks a broker.
    MaxTime

VARIABLES manifest, announced, broker, client, told, now

vars == <<manifest, announced, broker, client, told, now>>

End(m) == Len(m.log)
Queued(m) == {m.log[i] : i \in (m.first + 1)..Len(m.log)}

Fresh == [up |-> FALSE, known |-> None, inbox |-> {}, group |-> {}, at |-> "idle", lost |-> FALSE,
          tried |-> FALSE, end |-> 0]

Init ==
    /\ manifest = Object([first |-> 0, log |-> <<>>])
    /\ announced = None
    /\ broker = [b \in Brokers |-> Fresh]
    /\ client = [c \in Clients |->
         [at |-> "start", try |-> 0, broker |-> None, heard |-> 0, seen |-> 0, since |-> -1,
          known |-> None, lost |-> FALSE]]
    /\ told = [c \in Clients |-> "nothing"]
    /\ now = 0

RECURSIVE Series(_)
Series(set) == IF set = {} THEN <<>>
               ELSE LET one == CHOOSE x \in set : TRUE IN <<one>> \o Series(set \ {one})

IsLate(request) == now - request.heard > Valid /\ ~Faulty("a broker writes late requests")

(* What the guard says of a request in the manifest that is to be replaced.   *)
Search(m, name, since) ==
    IF since = -1 \/ Faulty("no search for an earlier attempt") THEN "write"
    ELSE IF name \in Queued(m) THEN "found"
    ELSE IF m.first > since /\ ~Faulty("what was dequeued is not missed") THEN "unknown"
    ELSE "write"

(* What a client has heard of a broker: its clock, and the end of the queue.  *)
(* Here it has just heard it; a trace (TraceBroker.tla) says when it did.     *)
HeardOf(b) == [clock |-> now, end |-> broker[b].end]

(*--------------------------------- clients ---------------------------------*)

\* core/opendata_buffer/broker/committer.py: BrokeredCommitter.append
\* core/opendata_buffer/broker/client.py: Connection.append
Ask(c) ==
    \E b \in Brokers :
      LET heard == HeardOf(b) IN
      \* It may still be connected to one that another broker has replaced.
      /\ client[c].at = "start" /\ client[c].try < MaxTries
      /\ broker[b].up
      /\ client' = [client EXCEPT ![c].at = "asked", ![c].try = @ + 1, ![c].broker = b,
                                  ![c].heard = heard.clock, ![c].seen = heard.end]
      /\ broker' = [broker EXCEPT ![b].inbox = @ \cup
           {[client |-> c, try |-> client[c].try + 1, since |-> client[c].since,
             heard |-> heard.clock]}]
      /\ UNCHANGED <<manifest, announced, told, now>>

Mine(c, request) == request.client = c /\ request.try = client[c].try
Renewed(c, requests) ==
    {IF Mine(c, request) THEN [request EXCEPT !.heard = HeardOf(client[c].broker).clock]
     ELSE request : request \in requests}

\* core/opendata_buffer/broker/client.py: Connection.append
Renew(c) ==
    LET b == client[c].broker IN
    /\ client[c].at = "asked" /\ client[c].heard < now /\ broker[b].up
    /\ client' = [client EXCEPT ![c].heard = HeardOf(b).clock]
    /\ broker' = [broker EXCEPT ![b].inbox = Renewed(c, @), ![b].group = Renewed(c, @)]
    /\ UNCHANGED <<manifest, announced, told, now>>

(* Where an attempt may have landed: not before what the client had heard. A   *)
(* broker that says that an append is in doubt says it more exactly.           *)
DoubtOf(c) == client[c].seen

InDoubt(c) == [client[c] EXCEPT !.at = "waits",
    !.since = IF @ = -1 \/ Faulty("the last attempt's place is searched alone")
              THEN DoubtOf(c) ELSE @]

\* The connection ends, or nothing is heard. The request may still be written.
\* core/opendata_buffer/broker/client.py: Lost
Lose(c) ==
    /\ client[c].at = "asked"
    /\ client' = [client EXCEPT ![c] = InDoubt(c)]
    /\ UNCHANGED <<manifest, announced, broker, told, now>>

\* core/opendata_buffer/broker/committer.py: BrokeredCommitter.append
EndWait(c) ==
    /\ client[c].at = "waits"
    /\ now - client[c].heard > Valid \/ Faulty("the client does not wait")
    /\ client' = [client EXCEPT ![c].at = "start", ![c].broker = None]
    /\ UNCHANGED <<manifest, announced, broker, told, now>>

\* core/opendata_buffer/broker/committer.py: BrokeredCommitter._append_alone
BeginAlone(c) ==
    /\ client[c].at = "start"
    /\ client' = [client EXCEPT ![c].at = "look", ![c].lost = FALSE, ![c].known = None]
    /\ UNCHANGED <<manifest, announced, broker, told, now>>

Tell(c, outcome) ==
    /\ told' = [told EXCEPT ![c] = outcome]
    /\ client' = [client EXCEPT ![c] = [@ EXCEPT !.at = "end", !.known = None, !.lost = FALSE]]

\* core/opendata_buffer/queue/cas.py: CasObject._attempt
\* core/opendata_buffer/broker/broker.py: find_earlier_attempt
LookAlone(c) ==
    LET m == manifest.now
        known == client[c].known
        found == client[c].at = "look again" /\ c \in Queued(m)
        gone == client[c].lost /\ End(known) < m.first
        search == Search(m, c, client[c].since) IN
    /\ client[c].at \in {"look", "look again"}
    /\ IF found \/ search = "found" THEN Tell(c, "durable")
       ELSE IF gone \/ search = "unknown" THEN Tell(c, "unknown")
       ELSE /\ client' = [client EXCEPT ![c].at = "write", ![c].known = m,
                                        ![c].lost = @ /\ known = m]
            /\ UNCHANGED told
    /\ UNCHANGED <<manifest, announced, broker, now>>

\* core/opendata_buffer/queue/queue.py: Queue.append
WriteAlone(c) ==
    LET known == client[c].known
        new == [known EXCEPT !.log = Append(@, c)] IN
    /\ client[c].at = "write"
    /\ \E answer \in Put(manifest, known, new) :
         /\ manifest' = answer[2]
         /\ IF answer[1] = "applied" THEN Tell(c, "durable")
            ELSE /\ client' = [client EXCEPT ![c].at = "look again",
                                             ![c].lost = @ \/ answer[1] = "unknown"]
                 /\ UNCHANGED told
    /\ UNCHANGED <<announced, broker, now>>

\* An error of a later attempt says nothing of the first.
\* core/opendata_buffer/broker/committer.py: BrokeredCommitter._retry_or_raise
GiveUp(c) ==
    LET doubt == client[c].lost \/ client[c].at = "look again"
                 \/ (client[c].since # -1 /\ ~Faulty("an error of a later attempt is believed"))
    IN
    /\ client[c].at \in {"start", "write", "look again"}
    /\ Tell(c, IF doubt THEN "unknown" ELSE "failed")
    /\ UNCHANGED <<manifest, announced, broker, now>>

(*--------------------------------- brokers ---------------------------------*)

\* It needs the port, the end of the queue and the record; the one before may go on.
\* core/opendata_buffer/broker/election.py: LeaderElection._take_over
\* core/opendata_buffer/broker/client.py: Lease.take
TakeOver(b) ==
    /\ ~broker[b].up
    /\ broker' = [broker EXCEPT ![b] = [Fresh EXCEPT !.up = TRUE, !.known = manifest.now,
                                                     !.end = End(manifest.now)]]
    /\ announced' = b
    /\ UNCHANGED <<manifest, client, told, now>>

(* The clients that wait for an answer to these requests, as `next` has them. *)
Answered(requests, next(_)) ==
    [c \in Clients |->
       IF client[c].at = "asked" /\ \E request \in requests : Mine(c, request)
       THEN next(c) ELSE client[c]]

Retry(c) == [client[c] EXCEPT !.at = "start", !.broker = None]

\* What waits is refused, and surely not appended; a write under way is finished first.
\* core/opendata_buffer/broker/election.py: LeaderElection._step_down
\* core/opendata_buffer/broker/broker.py: Broker.stop
StepDown(b) ==
    /\ broker[b].up /\ announced # b /\ broker[b].at = "idle"
    /\ client' = Answered(broker[b].inbox, Retry)
    /\ broker' = [broker EXCEPT ![b] = Fresh]
    /\ UNCHANGED <<manifest, announced, told, now>>

\* The process ends; its clients hear nothing.
\* core/opendata_buffer/broker/broker.py: Session.close
Die(b) ==
    /\ broker[b].up
    /\ broker' = [broker EXCEPT ![b] = Fresh]
    /\ UNCHANGED <<manifest, announced, client, told, now>>

\* A request with an earlier attempt goes alone, others together. What comes meanwhile waits.
\* core/opendata_buffer/broker/broker.py: Broker._commit
\* core/opendata_buffer/broker/broker.py: Broker._append
TakeGroup(b) ==
    /\ broker[b].up /\ broker[b].at = "idle"
    /\ \E group \in SUBSET {request \in broker[b].inbox : ~IsLate(request)} :
         /\ group # {}
         /\ Cardinality(group) = 1 \/ \A request \in group : request.since = -1
         /\ \A one, other \in group : one # other => one.client # other.client
         /\ \E at \in {"look"} \cup (IF broker[b].known = None THEN {} ELSE {"write"}) :
              broker' = [broker EXCEPT ![b].inbox = @ \ group, ![b].group = group, ![b].at = at,
                                       ![b].lost = FALSE, ![b].tried = FALSE]
    /\ UNCHANGED <<manifest, announced, client, told, now>>

\* Late ones, when there are too many, and when it leaves. They surely are not appended.
\* core/opendata_buffer/broker/broker.py: Broker._without_late
\* core/opendata_buffer/broker/broker.py: Broker.submit
RefuseRequest(b) ==
    /\ \E request \in broker[b].inbox :
         /\ client' = Answered({request}, Retry)
         /\ broker' = [broker EXCEPT ![b].inbox = @ \ {request}]
    /\ UNCHANGED <<manifest, announced, told, now>>

Group(b) == Series({request.client : request \in broker[b].group})
Since(b) == (CHOOSE request \in broker[b].group : TRUE).since
Idle(b, known) == [broker EXCEPT ![b].at = "idle", ![b].group = {}, ![b].known = known,
    ![b].lost = FALSE, ![b].tried = FALSE, ![b].end = IF known = None THEN @ ELSE End(known)]

Durable(b, known) ==
    /\ broker' = Idle(b, known)
    /\ LET heard == {c \in Clients : client[c].at = "asked"
                       /\ \E request \in broker[b].group : Mine(c, request)} IN
       /\ told' = [c \in Clients |-> IF c \in heard THEN "durable" ELSE told[c]]
       /\ client' = [c \in Clients |-> IF c \in heard THEN [client[c] EXCEPT !.at = "end"]
                                       ELSE client[c]]

Unknown(b, known) ==
    /\ broker' = Idle(b, known)
    /\ LET heard == {c \in Clients : client[c].at = "asked"
                       /\ \E request \in broker[b].group : Mine(c, request)} IN
       /\ told' = [c \in Clients |-> IF c \in heard THEN "unknown" ELSE told[c]]
       /\ client' = [c \in Clients |-> IF c \in heard THEN [client[c] EXCEPT !.at = "end"]
                                       ELSE client[c]]

(* Whether a group is in a manifest, "yes", "no" or "unknown". A client that  *)
(* was lost may have appended its own part elsewhere: neither the last entry  *)
(* alone shows that all of them are there, nor what is left of a group whose  *)
(* front was dequeued.                                                        *)
Find(m, group) ==
    LET at == {i \in (m.first + 1)..End(m) : m.log[i] = group[Len(group)]}
        before == (CHOOSE i \in at : TRUE) - Len(group)    \* the place of group[k] is before + k
        left == {k \in DOMAIN group : before + k > m.first} IN
    IF at = {} THEN "no"
    ELSE IF Faulty("the last of a group stands for all") THEN "yes"
    ELSE IF \E k \in left : m.log[before + k] # group[k] THEN "no"
    ELSE IF left = DOMAIN group THEN "yes" ELSE "unknown"

\* core/opendata_buffer/queue/cas.py: CasObject._attempt
\* core/opendata_buffer/queue/queue.py: _Append.find
LookOfBroker(b) ==
    LET m == manifest.now
        known == broker[b].known
        found == IF broker[b].tried THEN Find(m, Group(b)) ELSE "no"
        gone == broker[b].lost /\ End(known) < m.first IN
    /\ broker[b].at = "look"
    /\ IF found = "yes" THEN Durable(b, m)
       ELSE IF found = "unknown" \/ gone THEN Unknown(b, m)
       ELSE /\ broker' = [broker EXCEPT ![b].at = "write", ![b].known = m,
                                        ![b].lost = @ /\ known = m]
            /\ UNCHANGED <<client, told>>
    /\ UNCHANGED <<manifest, announced, now>>

\* The guard is asked at each attempt, about the manifest that the attempt replaces. Of one from
\* memory it is asked again after a read, when it says not to write.
\* core/opendata_buffer/broker/broker.py: Broker._append
\* core/opendata_buffer/broker/broker.py: Broker._guard
BeginWrite(b) ==
    LET known == broker[b].known
        late == \E request \in broker[b].group : IsLate(request)
        search == Search(known, Group(b)[1], Since(b))
        doubt == broker[b].lost /\ ~Faulty("a late request is refused although in doubt") IN
    /\ broker[b].at = "write"
    /\ \/ /\ ~late /\ search # "write" /\ known # manifest.now
          /\ broker' = [broker EXCEPT ![b].at = "look"]
          /\ UNCHANGED <<client, told>>
       \/ /\ late  \* in doubt: "lost", the clients search; else: the late ones are refused
          /\ client' = IF doubt THEN Answered(broker[b].group, InDoubt) ELSE client
          /\ broker' = IF doubt THEN Idle(b, known)
                       ELSE [Idle(b, known) EXCEPT ![b].inbox = @ \cup broker[b].group]
          /\ UNCHANGED told
       \/ ~late /\ search = "found" /\ Durable(b, known)
       \/ ~late /\ search = "unknown" /\ Unknown(b, known)
       \/ /\ ~late /\ search = "write"
          /\ broker' = [broker EXCEPT ![b].at = "sends"]
          /\ UNCHANGED <<client, told>>
    /\ UNCHANGED <<manifest, announced, now>>

\* It may arrive when the requests are late.
\* core/opendata_buffer/queue/cas.py: CasObject._write
WriteOfBroker(b) ==
    LET known == broker[b].known
        new == [known EXCEPT !.log = @ \o Group(b)] IN
    /\ broker[b].at = "sends"
    /\ \E answer \in Put(manifest, known, new) :
         /\ manifest' = answer[2]
         /\ IF answer[1] = "applied" \/ Faulty("the broker answers before the write")
            THEN Durable(b, IF answer[1] = "applied" THEN new ELSE None)
            ELSE /\ broker' = [broker EXCEPT ![b].at = "look", ![b].tried = TRUE,
                                 ![b].lost = @ \/ answer[1] = "unknown"]
                 /\ UNCHANGED <<client, told>>
    /\ UNCHANGED <<announced, now>>

\* An error, and nothing was written: the clients are told, and may ask again.
\* core/opendata_buffer/broker/broker.py: Broker._fail
FailGroup(b) ==
    /\ ~broker[b].lost
    /\ broker[b].at = "write" \/ (broker[b].at = "look" /\ ~broker[b].tried)
    /\ client' = Answered(broker[b].group, Retry)
    /\ broker' = Idle(b, None)
    /\ UNCHANGED <<manifest, announced, told, now>>

\* An error, and it is not known whether it was written. This broker writes it no more.
\* core/opendata_buffer/broker/broker.py: Broker._fail
LoseGroup(b) ==
    /\ broker[b].at = "look" /\ broker[b].tried
    /\ client' = Answered(broker[b].group, InDoubt)
    /\ broker' = Idle(b, None)
    /\ UNCHANGED <<manifest, announced, told, now>>

\* After a write that ended without an answer the manifest is read anew.
\* core/opendata_buffer/queue/queue.py: Queue.read
ReadOfBroker(b) ==
    /\ broker[b].up /\ broker[b].at = "idle" /\ broker[b].known = None
    /\ broker' = [broker EXCEPT ![b].known = manifest.now, ![b].end = Max(@, End(manifest.now))]
    /\ UNCHANGED <<manifest, announced, client, told, now>>

(*------------------- the consumer, the store and the clock -----------------*)

\* core/opendata_buffer/queue/queue.py: Queue.dequeue
Dequeue ==
    /\ manifest.now.first < Min(End(manifest.now), Dequeues)
    /\ manifest' = Object([manifest.now EXCEPT !.first = @ + 1])
    /\ UNCHANGED <<announced, broker, client, told, now>>

\* core/opendata_buffer/testing/faults.py: FaultyStore.put_if
WriteArrives ==
    /\ \E after \in Arrivals(manifest) : manifest' = after
    /\ UNCHANGED <<announced, broker, client, told, now>>

\* core/opendata_buffer/testing/runtime.py: ManualRuntime.advance
Tick ==
    /\ now < MaxTime
    /\ now' = now + 1
    /\ UNCHANGED <<manifest, announced, broker, client, told>>

Next ==
    \/ \E c \in Clients :
         \/ Ask(c) \/ Renew(c) \/ Lose(c) \/ EndWait(c) \/ BeginAlone(c) \/ LookAlone(c)
         \/ WriteAlone(c) \/ GiveUp(c)
    \/ \E b \in Brokers :
         \/ TakeOver(b) \/ StepDown(b) \/ Die(b) \/ TakeGroup(b) \/ RefuseRequest(b)
         \/ LookOfBroker(b) \/ BeginWrite(b) \/ WriteOfBroker(b) \/ FailGroup(b)
         \/ LoseGroup(b) \/ ReadOfBroker(b)
    \/ Dequeue \/ WriteArrives \/ Tick

Spec == Init /\ [][Next]_vars

(*------------------------------- invariants --------------------------------*)

\* A broker, and any number of them, never appends a batch twice.
NothingIsAppendedTwice ==
    \A i, j \in DOMAIN manifest.now.log : i # j => manifest.now.log[i] # manifest.now.log[j]

\* What was said to be durable is in the queue, or was.
DurableIsThere == \A c \in Clients : told[c] = "durable" => c \in Range(manifest.now.log)

\* What was said to have failed is not queued, and never will be.
WhatFailedIsAbsent == \A c \in Clients : told[c] = "failed" => c \notin Range(manifest.now.log)
==============================================================================
