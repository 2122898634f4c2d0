------------------------------ MODULE TraceQueue ------------------------------
(* Does the specification of a queue with a collector have a behaviour with   *)
(* the events of a trace? TraceLog.tla explains the method, and               *)
(* trace_collector.py generates TraceData.                                    *)
(*                                                                            *)
(* Times are milliseconds. The clock is set to the time of each event before  *)
(* the event, and all guards about ages and windows use it. Each batch is a   *)
(* producer of the specification, which appends once.                         *)
EXTENDS Queue, TraceData, TLC

VARIABLE l

E == Trace[l]
Next_(name) == l <= Len(Trace) /\ E.is = name
Is(name) == Next_(name) /\ l' = l + 1

TraceMade(p) == E.made
TraceNameAt(p, made) == E.named

ASSUME TLCSet(1, 0)

TraceInit == Init /\ l = 1

SeenManifest ==
    /\ manifest.now.first = E.first /\ manifest.now.epoch = E.epoch /\ End(manifest.now) = E.end

Manifest(m) == m.first = E.first /\ m.epoch = E.epoch /\ End(m) = E.end
Wrote(known) ==
    CASE E.answer = "applied" -> Manifest(manifest'.now) /\ manifest'.flight = {}
      [] E.answer = "conflict" -> manifest' = manifest /\ known # manifest.now
      [] E.answer = "unknown" ->
           /\ manifest'.now = manifest.now
           /\ \A m \in manifest'.flight \ manifest.flight : Manifest(m)

\* The batches of one process share what it remembers of the manifest.
Remember(p) ==
    /\ producer[p].at \in {"idle", "ready"}
    /\ producer' = [producer EXCEPT ![p].known = manifest.now]
    /\ UNCHANGED <<manifest, objects, now, told, consumer, acked, saved, again, collector>>

\* The upload of a batch that was given up in the meantime.
StoreOrphan ==
    /\ producer[E.by].round > Rounds[E.by]
    /\ objects' = objects \cup {[name |-> [producer |-> E.by, round |-> 1, named |-> E.named],
                                stored |-> now]}
    /\ UNCHANGED <<manifest, now, producer, told, consumer, acked, saved, again, collector>>

\* A request that was stored but answered with an error is sent again.
StoreAgain ==
    LET name == [producer |-> E.by, round |-> 1, named |-> E.named] IN
    /\ \E o \in objects : o.name = name
    /\ objects' = {o \in objects : o.name # name} \cup {[name |-> name, stored |-> now]}
    /\ UNCHANGED <<manifest, now, producer, told, consumer, acked, saved, again, collector>>

LastTold(p) == told'[p][Len(told'[p])]

Produces ==
    \/ Is("store") /\ E.made <= now /\ (UploadBatches(E.by) \/ UploadAgain(E.by) \/ StoreOrphan)
    \/ Is("store again") /\ StoreAgain
    \/ Is("remember") /\ SeenManifest /\ Remember(E.by)
    \/ Is("begin append") /\ BeginAppend(E.by)
    \/ Is("look before append") /\ SeenManifest /\ LookBeforeAppend(E.by)
    \/ Is("append") /\ WriteAppend(E.by) /\ Wrote(producer[E.by].known)
       /\ producer'[E.by].at = (IF E.answer = "applied" THEN "landed" ELSE "look")
       /\ (E.answer = "unknown" => producer'[E.by].lost)
    \/ Is("durable") /\ Land(E.by) /\ LastTold(E.by) = "durable"
    \/ Is("repair") /\ Land(E.by) /\ LastTold(E.by) = "unknown"
    \/ Is("refuse") /\ Refuse(E.by)
    \/ Is("failed") /\ GiveUp(E.by) /\ LastTold(E.by) = "failed"
    \* The code may report "unknown" although it could know.
    \/ Is("unknown") /\ GiveUp(E.by)
    \/ Is("unknown") /\ producer[E.by].round > Rounds[E.by] /\ UNCHANGED vars
    \/ Is("unknown") /\ producer[E.by].at = "landed" /\ Tell(E.by, "unknown")
       /\ UNCHANGED <<manifest, objects, now, consumer, acked, saved, again, collector>>

Consumes ==
    \/ Is("look before claim") /\ SeenManifest /\ LookBeforeClaim(E.by) /\ consumer'[E.by].next = 0
    \/ Is("claim") /\ WriteClaim(E.by) /\ Wrote(consumer[E.by].known)
       /\ consumer'[E.by].at = (IF E.answer = "applied" THEN "own" ELSE "off")
    \/ Is("hand out") /\ HandOut(E.by) /\ consumer'[E.by].next = E.sequence + 1
    \/ Is("look before acknowledge") /\ SeenManifest /\ LookBeforeAcknowledge(E.by)
       /\ consumer'[E.by].at = "ack"
    \/ Is("acknowledge") /\ WriteAcknowledge(E.by) /\ Wrote(consumer[E.by].known)
       /\ (E.answer = "applied" => consumer'[E.by].acked = E.first)

Collects ==
    \/ Is("list") /\ ListObjects
    \/ Is("read after listing") /\ SeenManifest /\ ReadAfterListing
    \/ Is("delete") /\ DeleteObject
       /\ objects' = {o \in objects : o.name # [producer |-> E.by, round |-> 1, named |-> E.named]}
       /\ objects' # objects

Arrives == Is("arrive") /\ WriteArrives /\ Manifest(manifest'.now)

\* A refused append was searched for, maybe without a request to the store.
Silent ==
    /\ \/ (Next_("refuse") \/ Next_("failed")) /\ producer[E.by].at = "look"
          /\ LookBeforeAppend(E.by)
       \/ Next_("list") /\ EndPage
       \* A consumer that starts again in the same process.
       \/ Next_("look before claim") /\ consumer[E.by].at # "off"
          /\ consumer' = [consumer EXCEPT ![E.by] = [@ EXCEPT !.at = "off", !.known = None]]
          /\ UNCHANGED <<manifest, objects, now, producer, told, acked, saved, again, collector>>
    /\ l' = l

Advance ==
    /\ now' = E.ms /\ l' = l
    /\ UNCHANGED <<manifest, objects, producer, told, consumer, acked, saved, again, collector>>

TraceNext ==
    /\ l <= Len(Trace)
    /\ IF now < E.ms THEN Advance ELSE Produces \/ Consumes \/ Collects \/ Arrives \/ Silent

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, l>>

Unfinished ==
    /\ l <= TLCGet(1) \/ (TLCSet(1, l) /\ PrintT(<<"reached", l>>))
    /\ l <= Len(Trace)
===============================================================================
