-------------------------------- MODULE Broker --------------------------------
(* Clients append through brokers, or alone. Brokers take over, two of them   *)
(* may serve at the same time, and they die and are suspended. Messages and   *)
(* answers are lost.                                                          *)
(*                                                                            *)
(* Each client appends one batch, which has the client's name. The manifest's *)
(* value is [first, log] as in Queue.tla, and a consumer removes entries. A   *)
(* request is [client, try, since, heard]. `since` is the sequence at which   *)
(* an earlier attempt may have landed, or -1; `heard` is the broker's clock.  *)
(* All clocks show the same time here, because the code never compares two of *)
(* them.                                                                      *)
EXTENDS Store

CONSTANTS
    Clients,
    Brokers,
    Valid,       \* How long after `heard` a broker may begin a write.
    Dequeues,    \* The number of entries that the consumer removes.
    MaxTries,    \* How often a client may ask a broker.
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

(* The guard's decision about a request, given the manifest to replace.       *)
Search(m, name, since) ==
    IF since = -1 \/ Faulty("no search for an earlier attempt") THEN "write"
    ELSE IF name \in Queued(m) THEN "found"
    ELSE IF m.first > since /\ ~Faulty("a dequeued attempt counts as never written") THEN "unknown"
    ELSE "write"

(* What a client has last heard from a broker: its clock, and the end of the  *)
(* queue. Here it has just heard it; a trace (TraceBroker.tla) has the real   *)
(* time.                                                                      *)
HeardOf(b) == [clock |-> now, end |-> broker[b].end]

(*--------------------------------- clients ---------------------------------*)

\* core/opendata_buffer/broker/committer.py: BrokeredCommitter.append
\* core/opendata_buffer/broker/client.py: Connection.append
Ask(c) ==
    \E b \in Brokers :
      LET heard == HeardOf(b) IN
      \* It may still be connected to a broker that was replaced.
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

(* The sequence from which on an attempt may have landed: the end that the    *)
(* client had heard. A broker that reports an append in doubt knows it more   *)
(* exactly.                                                                   *)
DoubtOf(c) == client[c].seen

InDoubt(c) == [client[c] EXCEPT !.at = "waits",
    !.since = IF @ = -1 \/ Faulty("only the place of the last attempt is searched")
              THEN DoubtOf(c) ELSE @]

\* The connection ends, or the client hears nothing. The request may still be written.
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

\* An error of a later attempt says nothing about the first one.
\* core/opendata_buffer/broker/committer.py: BrokeredCommitter._retry_or_raise
GiveUp(c) ==
    LET doubt == client[c].lost \/ client[c].at = "look again"
                 \/ (client[c].since # -1 /\ ~Faulty("an error of a later attempt is believed"))
    IN
    /\ client[c].at \in {"start", "write", "look again"}
    /\ Tell(c, IF doubt THEN "unknown" ELSE "failed")
    /\ UNCHANGED <<manifest, announced, broker, now>>

(*--------------------------------- brokers ---------------------------------*)

\* It needs the port, the queue's end, and the record. The previous broker may still run.
\* core/opendata_buffer/broker/election.py: LeaderElection._take_over
\* core/opendata_buffer/broker/client.py: Lease.take
TakeOver(b) ==
    /\ ~broker[b].up
    /\ broker' = [broker EXCEPT ![b] = [Fresh EXCEPT !.up = TRUE, !.known = manifest.now,
                                                     !.end = End(manifest.now)]]
    /\ announced' = b
    /\ UNCHANGED <<manifest, client, told, now>>

(* The clients in state `next` that wait for an answer to these requests.     *)
Answered(requests, next(_)) ==
    [c \in Clients |->
       IF client[c].at = "asked" /\ \E request \in requests : Mine(c, request)
       THEN next(c) ELSE client[c]]

Retry(c) == [client[c] EXCEPT !.at = "start", !.broker = None]

\* Waiting requests are refused and certainly not appended. A write under way ends first.
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

\* A request with an earlier attempt is written alone, others together. New requests wait.
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

\* Late requests, too many requests, and all of them when it stops: certainly not appended.
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

(* Whether a group is in a manifest: "yes", "no" or "unknown". A client that  *)
(* lost its connection may have appended its own batch elsewhere. The last    *)
(* entry alone therefore does not prove that all of them are there, and       *)
(* neither does the rest of a group whose first entries were dequeued.        *)
Find(m, group) ==
    LET at == {i \in (m.first + 1)..End(m) : m.log[i] = group[Len(group)]}
        before == (CHOOSE i \in at : TRUE) - Len(group)    \* the place of group[k] is before + k
        left == {k \in DOMAIN group : before + k > m.first} IN
    IF at = {} THEN "no"
    ELSE IF Faulty("the last entry of a group stands for all") THEN "yes"
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

\* The guard decides at each attempt, given the manifest that the attempt replaces. If it refuses
\* a manifest from memory, it decides again after a read.
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
       \/ /\ late  \* in doubt: "lost", the clients search. Otherwise the late ones are refused
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

\* The write may arrive after the requests became late.
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

\* An error, and nothing was written: the clients learn this, and may ask again.
\* core/opendata_buffer/broker/broker.py: Broker._fail
FailGroup(b) ==
    /\ ~broker[b].lost
    /\ broker[b].at = "write" \/ (broker[b].at = "look" /\ ~broker[b].tried)
    /\ client' = Answered(broker[b].group, Retry)
    /\ broker' = Idle(b, None)
    /\ UNCHANGED <<manifest, announced, told, now>>

\* An error that leaves open whether it was written. This broker does not write it again.
\* core/opendata_buffer/broker/broker.py: Broker._fail
LoseGroup(b) ==
    /\ broker[b].at = "look" /\ broker[b].tried
    /\ client' = Answered(broker[b].group, InDoubt)
    /\ broker' = Idle(b, None)
    /\ UNCHANGED <<manifest, announced, told, now>>

\* After a write without an answer the manifest is read again.
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

\* No number of brokers ever appends a batch twice.
NothingIsAppendedTwice ==
    \A i, j \in DOMAIN manifest.now.log : i # j => manifest.now.log[i] # manifest.now.log[j]

\* A batch that was reported durable is or was in the queue.
DurableIsThere == \A c \in Clients : told[c] = "durable" => c \in Range(manifest.now.log)

\* A batch that was reported failed is not queued, and never will be.
FailedIsAbsent == \A c \in Clients : told[c] = "failed" => c \notin Range(manifest.now.log)
==============================================================================
