------------------------------ MODULE TraceBroker ------------------------------
(* Does the specification of brokers have a behaviour with the events of a    *)
(* trace? TraceLog.tla explains the method, and trace_broker.py generates     *)
(* TraceData.                                                                 *)
(*                                                                            *)
(* Times are microseconds. The clock is set to the time of each event before  *)
(* the event. A client of the specification is one append. In a trace, a      *)
(* client that will not hear the answer is lost before the broker gives it.   *)
EXTENDS Broker, TraceData, TLC

VARIABLE l

E == Trace[l]
Next_(name) == l <= Len(Trace) /\ E.is = name
Is(name) == Next_(name) /\ l' = l + 1

TraceHeardOf(b) == [clock |-> E.heard, end |-> E.seen]
TraceDoubtOf(c) ==
    IF "since" \in DOMAIN E THEN Max(E.since, client[c].seen) ELSE client[c].seen
TraceSeries(set) == IF Range(E.order) = set THEN E.order ELSE <<>>

ASSUME TLCSet(1, 0)

TraceInit == Init /\ l = 1

Manifest(m) == m.first = E.first /\ End(m) = E.end
SeenManifest == Manifest(manifest.now)
Wrote(known) ==
    CASE E.answer = "applied" -> Manifest(manifest'.now) /\ manifest'.flight = {}
      [] E.answer = "conflict" -> manifest' = manifest /\ known # manifest.now
      [] E.answer = "unknown" ->
           /\ manifest'.now = manifest.now
           /\ \A m \in manifest'.flight \ manifest.flight : Manifest(m)

Clients_ ==
    \/ Is("ask") /\ E.heard <= now /\ E.seen <= End(manifest.now) /\ client[E.by].since = E.since
       /\ Ask(E.by) /\ client'[E.by].broker = E.broker
    \/ Is("renew") /\ E.heard <= now /\ Renew(E.by)
    \* The answer is on its way.
    \/ Is("renew") /\ client[E.by].at = "end" /\ UNCHANGED vars
    \/ Is("lose") /\ Lose(E.by)
    \/ Is("end wait") /\ EndWait(E.by)
    \/ Is("begin alone") /\ BeginAlone(E.by)
    \/ Is("look alone") /\ SeenManifest /\ LookAlone(E.by)
    \/ Is("write alone") /\ WriteAlone(E.by) /\ Wrote(client[E.by].known)
       /\ client'[E.by].at = (IF E.answer = "applied" THEN "end" ELSE "look again")
       /\ (E.answer = "unknown" => client'[E.by].lost)
    \/ Is("durable") /\ told[E.by] = "durable" /\ manifest.now.log[E.sequence + 1] = E.by
       /\ UNCHANGED vars
    \/ Is("failed") /\ GiveUp(E.by) /\ told'[E.by] = "failed"
    \* The code may report "unknown" although it could know.
    \/ Is("unknown") /\ told[E.by] # "failed" /\ UNCHANGED vars

Brokers_ ==
    \/ Is("take over") /\ TakeOver(E.by)
    \/ Is("take group") /\ TakeGroup(E.by)
       /\ {request.client : request \in broker'[E.by].group} = Range(E.order)
       /\ broker'[E.by].at = E.begins
    \/ Is("look of broker") /\ SeenManifest /\ LookOfBroker(E.by)
    \/ Is("begin write") /\ BeginWrite(E.by) /\ broker'[E.by].at = "sends"
    \/ Is("write of broker") /\ WriteOfBroker(E.by) /\ Wrote(broker[E.by].known)
       /\ broker'[E.by].at = (IF E.answer = "applied" THEN "idle" ELSE "look")
       /\ (E.answer = "unknown" => broker'[E.by].lost)
    \/ Is("end of append") /\ broker[E.by].at = "idle" /\ UNCHANGED vars

Others ==
    \/ Is("dequeue") /\ Dequeue /\ Manifest(manifest'.now)
    \/ Is("arrive") /\ WriteArrives /\ Manifest(manifest'.now)

\* Steps without a request: the guard stops an append, or it ends with an error.
Silent ==
    /\ \/ /\ Next_("end of append") /\ manifest' = manifest
          /\ \/ E.result \in {"found", "late", "unknown"} /\ broker[E.by].at = "write"
                /\ BeginWrite(E.by) /\ broker'[E.by].at = "idle"
             \/ E.result = "failed" /\ FailGroup(E.by)
             \/ E.result = "unknown" /\ LoseGroup(E.by)
       \/ (Next_("ask") \/ Next_("begin alone") \/ Next_("failed"))
          /\ client[E.by].at = "asked" /\ \E b \in Brokers : RefuseRequest(b)
          /\ client'[E.by].at = "start"
       \/ Next_("durable") /\ client[E.by].at \in {"look", "look again"} /\ LookAlone(E.by)
    /\ l' = l

Advance ==
    /\ now' = E.us /\ l' = l
    /\ UNCHANGED <<manifest, announced, broker, client, told>>

TraceNext ==
    /\ l <= Len(Trace)
    /\ IF now < E.us THEN Advance ELSE Clients_ \/ Brokers_ \/ Others \/ Silent

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, l>>

Unfinished ==
    /\ l <= TLCGet(1) \/ (TLCSet(1, l) /\ PrintT(<<"reached", l>>))
    /\ l <= Len(Trace)
================================================================================
