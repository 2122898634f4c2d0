----------------------------- MODULE TraceV1Reader -----------------------------
(* Does the specification of a log with a v1 consumer have a behaviour with   *)
(* the events of a trace?                                                     *)
(*                                                                            *)
(* trace_v1_reader.py generates TraceData, where Trace is the sequence of     *)
(* events. `l` is the number of the next event. Each event is one action of   *)
(* V1Reader.tla with the values that were seen. Steps without an event at the *)
(* store (Silent) may come before it. The trace is accepted if TLC reports    *)
(* that Unfinished is violated, because then a behaviour has all events.      *)
(*                                                                            *)
(* A process may feed many times from different memories of the queue, so     *)
(* each write of a feeder has a feeder of its own.                            *)
EXTENDS V1Reader, TraceData, TLC

VARIABLE l

E == Trace[l]
Is(name) == l <= Len(Trace) /\ E.is = name /\ l' = l + 1
Next__(name) == l <= Len(Trace) /\ E.is = name

ASSUME TLCSet(1, 0)

TraceInit == Init /\ l = 1

(*------------------------- the values of an event --------------------------*)

Queue(q) == q # None /\ q.first = E.first /\ Next_(q) = E.end /\ q.epoch = E.epoch
WroteQueue ==
    CASE E.answer = "applied" -> Queue(queue'.now) /\ queue'.flight = {}
      [] E.answer = "unknown" ->
           /\ queue'.now = queue.now
           /\ \A q \in queue'.flight \ queue.flight : Queue(q)
      [] OTHER -> FALSE

Index(i) == i.changes = E.changes /\ i.floor = E.floor /\ i.named = E.named
WroteIndex ==
    CASE E.answer = "applied" -> Index(index'.now) /\ index'.flight = {}
      [] E.answer = "unknown" ->
           /\ index'.now = index.now
           /\ \A i \in index'.flight \ index.flight : Index(i)
      [] OTHER -> FALSE

WrotePosition ==
    CASE E.answer = "applied" -> position'.now = E.at /\ position'.flight = {}
      [] E.answer = "unknown" ->
           /\ position'.now = position.now
           /\ \A p \in position'.flight \ position.flight : p = E.at
      [] OTHER -> FALSE

(*---------------------------------- events ----------------------------------*)

\* AppendToLog, once for each entry of a group.
AppendGroup ==
    /\ Is("append") /\ E.to > log /\ log' = E.to
    /\ UNCHANGED <<index, queue, position, deleted, feeder, consumer, collector, operator, acked,
                   told, counts>>

Adds ==
    \/ Is("begin add") /\ BeginAdd /\ operator'.begin = E.begin
    \/ Is("write queue") /\ WriteQueue /\ WroteQueue
    \/ Is("write position") /\ WritePosition /\ WrotePosition
    \/ Is("look before name") /\ index.now.changes = E.changes /\ LookBeforeName
       /\ operator'.at = "name"
    \/ Is("write name") /\ WriteName /\ WroteIndex

Feeds ==
    \/ Is("look at queue") /\ Queue(queue.now) /\ LookAtQueue(E.by)
    \/ Is("feed") /\ Feed(E.by) /\ WroteQueue
    \/ Is("note") /\ Note(E.by) /\ WrotePosition

Consumes ==
    \/ Is("claim") /\ Claim(E.by) /\ WroteQueue
    \/ Is("look") /\ Queue(queue.now) /\ Look(E.by)
    \/ Is("fetch") /\ Fetch(E.by) /\ consumer[E.by].next = E.sequence
    \/ Is("dequeue") /\ Dequeue(E.by) /\ WroteQueue

Collects ==
    \/ Is("look before collection") /\ index.now.changes = E.changes /\ LookBeforeCollection
    \/ Is("read position") /\ ReadPosition /\ collector'.found = E.at
    \/ Is("write floor") /\ WriteFloor /\ WroteIndex
    \/ Is("delete") /\ Delete /\ E.sequence \in deleted'
    \* The specification deletes everything below the floor in one step.
    \/ Is("delete") /\ E.sequence \in deleted /\ UNCHANGED vars

Arrivals_ ==
    /\ Is("arrive") /\ WriteArrives
    /\ CASE E.at = "queue" -> Queue(queue'.now) /\ queue' # queue
         [] E.at = "index" -> Index(index'.now) /\ index' # index
         [] OTHER -> position'.now = E.next /\ position' # position

\* The specification lacks segments, other readers, and settings: only the version of the index
\* changes.
ChangesAlone ==
    /\ Is("change index")
    /\ index' = Object([index.now EXCEPT !.changes = E.changes])
    /\ Index(index'.now)
    /\ UNCHANGED <<log, queue, position, deleted, feeder, consumer, collector, operator, acked,
                   told, counts>>

(*------------------- steps that leave nothing at the store ------------------*)

\* The process of a collector died, or its write was refused.
NewCollector ==
    /\ collector.at # "off" /\ collector' = NoCollector
    /\ UNCHANGED <<log, index, queue, position, deleted, feeder, consumer, operator, acked, told,
                   counts>>

Silent ==
    /\ \/ Next__("begin add") /\ EndOperator
       \/ (Next__("write position") \/ Next__("look before name")) /\ WriteQueue /\ queue' = queue
          /\ operator'.at = "position"
       \/ Next__("look before name") /\ WritePosition /\ position' = position
          /\ operator'.at = "look"
       \/ Next__("look at queue") /\ LookForReaders(E.by)
       \/ Next__("feed") /\ LookAtLog(E.by)
       \/ Next__("look before collection") /\ NewCollector
       \/ Next__("delete") /\ E.sequence \notin deleted /\ WriteFloor /\ index' = index
          /\ collector'.at = "deletes"
    /\ l' = l

TraceNext ==
    AppendGroup \/ Adds \/ Feeds \/ Consumes \/ Collects \/ Arrivals_ \/ ChangesAlone \/ Silent

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, l>>

\* Violated by the state after the last event. TLC prints how far it got.
Unfinished ==
    /\ l <= TLCGet(1) \/ (TLCSet(1, l) /\ PrintT(<<"reached", l>>))
    /\ l <= Len(Trace)
================================================================================
