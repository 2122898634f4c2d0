------------------------------- MODULE TraceLog -------------------------------
(* Does the specification of the log have a behaviour with the events of a    *)
(* trace?                                                                     *)
(*                                                                            *)
(* trace_log.py generates TraceData, where Trace is the sequence of events.   *)
(* `l` is the number of the next event. Each event is one action of Log.tla   *)
(* with the values that were seen. Steps without an event at the store        *)
(* (Silent) may come before it. The trace is accepted if TLC reports that     *)
(* Unfinished is violated, because then a behaviour has all events.           *)
EXTENDS Log, TraceData, TLC

VARIABLE l

E == Trace[l]
Is(name) == l <= Len(Trace) /\ E.is = name /\ l' = l + 1

TraceEntries(p) == TraceGroups[p]

ASSUME TLCSet(1, 0)

TraceInit == Init /\ l = 1

(*------------------------- the values of an event --------------------------*)

SeenManifest == manifest.now.first = E.first /\ End(manifest.now) = E.end
SeenIndex == index.now.changes = E.changes

\* The manifest after the conditional write of an event.
Manifest(m) == m.first = E.first /\ End(m) = E.end
Wrote(known) ==
    CASE E.answer = "applied" -> Manifest(manifest'.now) /\ manifest'.flight = {}
      [] E.answer = "conflict" -> manifest' = manifest /\ known # manifest.now
      [] E.answer = "unknown" ->
           /\ manifest'.now = manifest.now
           /\ \A m \in manifest'.flight \ manifest.flight : Manifest(m)

\* Segments below the floor are kept for a while without any meaning.
Index(i) ==
    /\ i.changes = E.changes /\ i.end = E.end /\ i.floor = E.floor /\ i.readers = E.readers
    /\ {g \in i.segments : g.to > i.floor} = E.segments
WroteIndex(known) ==
    CASE E.answer = "applied" -> Index(index'.now) /\ index'.flight = {}
      [] E.answer = "conflict" -> index' = index /\ known # index.now
      [] E.answer = "unknown" -> index'.now = index.now

Position(p) == p.at = E.at /\ p.epoch = E.epoch
WrotePosition(n) ==
    CASE E.answer = "applied" -> Position(position'[n].now) /\ position'[n].flight = {}
      [] E.answer = "unknown" ->
           /\ position'[n].now = position[n].now
           /\ \E p \in position'[n].flight : Position(p)
      [] OTHER -> FALSE

(*---------------------------------- events ----------------------------------*)

Appends ==
    \/ Is("look before append") /\ SeenManifest
       /\ LookBeforeAppend(E.by) /\ producer'[E.by].at = "write"
    \/ Is("append") /\ WriteAppend(E.by) /\ Wrote(producer[E.by].known)
       /\ producer'[E.by].at = (IF E.answer = "applied" THEN "end" ELSE "start")
       /\ (E.answer = "unknown" => producer'[E.by].lost)
    \/ /\ Is("told") /\ producer[E.by].at = "end" /\ E.by \in told["durable"]
       /\ SubSeq(manifest.now.log, E.first + 1, E.first + Len(Entries(E.by))) = Entries(E.by)
       /\ UNCHANGED vars

Moves ==
    \/ Is("look before move") /\ SeenManifest /\ LookBeforeMove(E.by)
    \/ Is("read index before move") /\ SeenIndex /\ ReadIndexBeforeMove(E.by)
    \/ Is("store segment") /\ StoreSegment(E.by)
       /\ mover'[E.by].segment = [mover |-> E.by, from |-> E.from, to |-> E.to]
    \/ Is("write index") /\ E.by \in Movers /\ WriteIndex(E.by) /\ WroteIndex(mover[E.by].known)
    \/ Is("trim") /\ Trim /\ Wrote(None)

Reads ==
    \/ Is("look before take") /\ SeenManifest /\ LookBeforeTake(E.by) /\ run'[E.by].name = E.name
    \/ Is("read index before take") /\ SeenIndex /\ ReadIndexBeforeTake(E.by)
    \/ Is("take position") /\ TakePosition(E.by) /\ WrotePosition(run[E.by].name)
       /\ (E.answer = "applied" => run'[E.by].at = "took")
    \/ Is("look before registration") /\ SeenIndex /\ LookBeforeRegistration(E.by)
    \/ Is("register") /\ Register(E.by) /\ WroteIndex(run[E.by].known)
    \/ Is("read manifest") /\ SeenManifest /\ ReadFirst(E.by)
    \/ Is("read index") /\ SeenIndex /\ ReadIndex(E.by)
    \/ Is("hand out") /\ HandOut(E.by) /\ run[E.by].next = E.sequence
       /\ run'[E.by].next = E.sequence + 1
    \/ Is("acknowledge") /\ (Acknowledge(E.by) \/ MoveBack(E.by)) /\ WrotePosition(run[E.by].name)
    \/ Is("seek") /\ Seek(E.by) /\ WrotePosition(run[E.by].name)

Resetting ==
    \/ Is("set back") /\ SetBack /\ WrotePosition(E.name)
    \/ Is("look before confirmation") /\ SeenIndex /\ LookBeforeConfirm /\ resetter'.at = "write"
    \/ Is("confirm reset") /\ ConfirmReset /\ WroteIndex(resetter.known)

Collects ==
    \/ Is("look before collection") /\ SeenIndex /\ LookBeforeCollection /\ collector'.expires = {}
    \/ Is("read position") /\ position[E.name].now.at = E.at /\ ReadPosition(E.name)
    \/ Is("write floor") /\ WriteFloor /\ WroteIndex(collector.known)
    \/ Is("delete") /\ Delete /\ deleted' = deleted \cup {E.sequence}
    \/ Is("delete segment") /\ Delete
       /\ objects' = objects \ {[mover |-> E.by, from |-> E.from, to |-> E.to]}
       /\ objects' # objects

Arrivals_ ==
    /\ Is("arrive") /\ WriteArrives
    /\ CASE E.at = "manifest" -> Manifest(manifest'.now) /\ manifest' # manifest
         [] E.at = "index" -> Index(index'.now) /\ index' # index
         [] OTHER -> E.at \in Readers /\ position' # position
                     /\ position'[E.at].now = [at |-> E.next, epoch |-> E.epoch]

\* The specification lacks pages and settings: only the version of the index changes.
ChangesAlone ==
    /\ Is("change index")
    /\ index' = Object([index.now EXCEPT !.changes = E.changes])
    /\ Index(index'.now)
    /\ UNCHANGED <<manifest, position, objects, deleted, producer, mover, run, collector, resetter,
                   acked, unsure, told, counts>>

(*------------------- steps that leave nothing at the store ------------------*)

Next_(name) == l <= Len(Trace) /\ E.is = name

\* A seek got no answer, and the next attempt was refused because its place is below the floor. The
\* reader continues where it was, and its position may be before that.
StayAfterSeek(r) ==
    LET p == position[run[r].name] IN
    /\ Seeking(r)
    /\ \A found \in {p.now} \cup p.flight : found.at <= run[r].next
    /\ run' = [run EXCEPT ![r].at = "reads", ![r].back = None]
    /\ UNCHANGED <<manifest, index, position, objects, deleted, producer, mover, collector, resetter,
                   acked, unsure, told, counts>>

Silent ==
    /\ \/ Next_("told") /\ LookBeforeAppend(E.by) /\ producer'[E.by].at = "end"
       \/ Next_("look before collection") /\ EndCollection
       \/ (Next_("delete") \/ Next_("delete segment")) /\ ReadIndexAgain
       \/ Next_("set back") /\ EndReset
       \/ Next_("acknowledge") /\ LookBeforeRegistration(E.by) /\ run'[E.by].at = "back"
       \/ Next_("hand out") /\ StayAfterSeek(E.by)
    /\ l' = l

TraceNext ==
    Appends \/ Moves \/ Reads \/ Resetting \/ Collects \/ Arrivals_ \/ ChangesAlone \/ Silent

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, l>>

\* Violated by the state after the last event. TLC prints how far it got.
Unfinished ==
    /\ l <= TLCGet(1) \/ (TLCSet(1, l) /\ PrintT(<<"reached", l>>))
    /\ l <= Len(Trace)
===============================================================================
