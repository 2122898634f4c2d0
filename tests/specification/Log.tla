--------------------------------- MODULE Log ----------------------------------
(* A queue as a log. The v1 manifest holds only its newest entries. Any       *)
(* process moves the oldest entries of the manifest into segments, and named  *)
(* readers have their own positions. A collector deletes entries that all     *)
(* readers have read.                                                         *)
(*                                                                            *)
(* The manifest's value is [first, log] as in Queue.tla, with one entry for   *)
(* each producer. The index's value is [end, floor, segments, readers, lost,  *)
(* changes]. Segments, which are [mover, from, to], contain the sequences     *)
(* from `floor` to `end`, except those in `lost`, which a v1 consumer         *)
(* removed. Each change of the retained entries is one compare-and-swap of    *)
(* the index, which increments `changes`, so a value is its own version. A    *)
(* position's value is [at, epoch]. Only its reader and resets change it.     *)
(*                                                                            *)
(* Traces of the code are checked against this module (TraceLog.tla).         *)
EXTENDS Store

CONSTANTS
    Producers,   \* Each one appends one entry.
    Waiting,     \* The number of entries at the beginning.
    Movers,
    Readers,     \* Names of readers.
    Runs,        \* Processes that read; each one may use any reader's name.
    Takes,       \* How often all runs together try to take a position.
    Resets,      \* How often an operator resets a position, or a running reader seeks.
    Expiries,    \* The number of readers that may expire.
    V1Removals   \* The number of entries that a v1 consumer removes.

VARIABLES manifest, index, position, objects, deleted, producer, mover, run, collector, resetter,
          acked, unsure, told, counts

vars == <<manifest, index, position, objects, deleted, producer, mover, run, collector, resetter,
          acked, unsure, told, counts>>

End(m) == Len(m.log)
Queued(m) == {m.log[i] : i \in (m.first + 1)..Len(m.log)}

\* The entries that a producer appends in one write; a trace has groups of several.
Entries(p) == <<p>>
LastOf(p) == Entries(p)[Len(Entries(p))]

\* back: while a seek is not confirmed, the position and the next entry before it.
NoRun == [at |-> "off", name |-> None, epoch |-> 0, next |-> 0, seen |-> None, known |-> None,
          back |-> None]
NoMover == [at |-> "off", known |-> None, segment |-> None, seen |-> None]
NoCollector == [at |-> "off", known |-> None, found |-> [n \in Readers |-> -1], expires |-> {}]
NoReset == [at |-> "off", name |-> None, to |-> 0, known |-> None]

Init ==
    /\ manifest = Object([first |-> 0, log |-> [i \in 1..Waiting |-> i]])
    /\ index = Object([end |-> 0, floor |-> 0, segments |-> {}, readers |-> {}, lost |-> {},
                       changes |-> 0])
    /\ position = [n \in Readers |-> Object([at |-> 0, epoch |-> 0])]
    /\ objects = {}                   \* segments that are stored
    /\ deleted = {}                   \* sequences whose batches were deleted
    /\ producer = [p \in Producers |-> [at |-> "start", known |-> None, lost |-> FALSE]]
    /\ mover = [m \in Movers |-> NoMover]
    /\ run = [r \in Runs |-> NoRun]
    /\ collector = NoCollector
    /\ resetter = NoReset
    /\ acked = [n \in Readers |-> 0]  \* confirmed acknowledgements
    /\ unsure = {}                    \* readers whose reset or seek was not confirmed yet
    /\ told = [kind \in {"durable", "gap", "gone", "again"} |-> {}]
    /\ counts = [resets |-> 0, expiries |-> 0, v1Removals |-> 0, takes |-> 0]

(*------------------------------- producers ---------------------------------*)

Log_1 == <<index, position, objects, deleted, mover, run, collector, resetter, acked, unsure, counts>>

\* As in Queue.tla, except that an entry that has left the manifest is in the index.
\* core/opendata_buffer/queue/queue.py: _Append.find
LookBeforeAppend(p) ==
    LET m == manifest.now
        moved == {m.log[i] : i \in 1..m.first}    \* entries in the segments of the index
        found == LastOf(p) \in Queued(m) \/ (LastOf(p) \in moved
                   /\ ~Faulty("a lost append is searched for only in the manifest")) IN
    /\ producer[p].at = "start"
    /\ IF found
       THEN /\ producer' = [producer EXCEPT ![p] = [at |-> "end", known |-> None, lost |-> FALSE]]
            /\ told' = [told EXCEPT !["durable"] = @ \cup {p}]
       ELSE /\ producer' = [producer EXCEPT ![p] = [at |-> "write", known |-> m,
                                                   lost |-> @.lost /\ @.known = m]]
            /\ UNCHANGED told
    /\ UNCHANGED <<manifest, Log_1>>

\* Entries that this process knows to be in the index leave the manifest in the same write.
\* core/opendata_buffer/queue/queue.py: Queue.append
\* core/opendata_buffer/queue/queue.py: left_to_log
WriteAppend(p) ==
    LET known == producer[p].known IN
    /\ producer[p].at = "write"
    /\ \E moved \in known.first..Max(known.first, Min(index.now.end, End(known))) :
       \E answer \in Put(manifest, known, [first |-> moved, log |-> known.log \o Entries(p)]) :
         /\ manifest' = answer[2]
         /\ IF answer[1] = "applied"
            THEN /\ producer' = [producer EXCEPT ![p] = [at |-> "end", known |-> None,
                                                        lost |-> FALSE]]
                 /\ told' = [told EXCEPT !["durable"] = @ \cup {p}]
            ELSE /\ producer' = [producer EXCEPT ![p].at = "start",
                                                 ![p].lost = @ \/ answer[1] = "unknown"]
                 /\ UNCHANGED told
    /\ UNCHANGED Log_1

\* A v1 consumer, which does not know logs, removes the oldest entry from the manifest.
\* core/opendata_buffer/queue/queue.py: Queue.dequeue
RemoveByV1 ==
    /\ counts.v1Removals < V1Removals /\ manifest.now.first < End(manifest.now)
    /\ manifest' = Object([manifest.now EXCEPT !.first = @ + 1])
    /\ counts' = [counts EXCEPT !.v1Removals = @ + 1]
    /\ UNCHANGED <<index, position, objects, deleted, producer, mover, run, collector, resetter,
                   acked, unsure, told>>

(*--------------------------------- movers ----------------------------------*)

Log_2 == <<position, deleted, producer, run, collector, resetter, acked, unsure, told, counts>>

\* The manifest that the process has read, however long ago.
\* core/opendata_buffer/queue/queue.py: Queue.shorten
LookBeforeMove(m) ==
    /\ mover[m].at = "off"
    /\ mover' = [mover EXCEPT ![m] = [NoMover EXCEPT !.at = "sees", !.seen = manifest.now]]
    /\ UNCHANGED <<manifest, index, objects, Log_2>>

\* The index is read after the manifest. Entries that left the manifest before that are in the
\* index, or a v1 consumer removed them.
\* core/opendata_buffer/queue/log_moves.py: move_entries
ReadIndexBeforeMove(m) ==
    /\ mover[m].at \in {"sees", "stored"}
    /\ mover' = [mover EXCEPT ![m].at = "looks", ![m].known = index.now, ![m].segment = None]
    /\ UNCHANGED <<manifest, index, objects, Log_2>>

\* Whether a stored segment has the entries that are missing between the index and the manifest.
\* They are not lost in that case: a mover died before it added the segment to the index, or the
\* index is an old copy.
\* core/opendata_buffer/queue/log.py: Log.check_gap
IsStored(known, seen) ==
    \E g \in objects : g.from < seen.first /\ g.to > known.end /\ known.end < seen.first

\* A segment begins where the index ends. It is stored before the index names it. If the missing
\* entries before it are in a stored segment, a mover stops until a person repairs the index.
\* core/opendata_buffer/queue/log_moves.py: move_entries
StoreSegment(m) ==
    LET seen == mover[m].seen
        from == IF Faulty("a segment begins where the manifest begins") THEN seen.first
                ELSE Max(mover[m].known.end, seen.first) IN
    /\ mover[m].at = "looks" /\ from < End(seen) /\ ~IsStored(mover[m].known, seen)
    /\ \E to \in (from + 1)..End(seen) :
         LET segment == [mover |-> m, from |-> from, to |-> to] IN
         /\ mover' = [mover EXCEPT ![m].at = "stored", ![m].segment = segment]
         /\ objects' = IF Faulty("the index names a segment before it is stored") THEN objects
                       ELSE objects \cup {segment}
         /\ manifest' = IF Faulty("the manifest is trimmed before the index is written")
                        THEN Object([manifest.now EXCEPT !.first = Max(@, to)]) ELSE manifest
    /\ UNCHANGED <<index, Log_2>>

\* The only commit point. Entries that are missing before the segment were removed by another
\* client. A mover without a confirmation tries again or reads the index again, and continues with
\* the manifest that it has read.
\* core/opendata_buffer/queue/log_index.py: LogIndex.with_segment
WriteIndex(m) ==
    LET known == mover[m].known
        segment == mover[m].segment
        new == [known EXCEPT !.end = segment.to, !.segments = @ \cup {segment},
                             !.lost = @ \cup (known.end..(segment.from - 1)),
                             !.changes = @ + 1] IN
    /\ mover[m].at = "stored"
    /\ \E answer \in Put(index, known, new) :
         /\ index' = answer[2]
         /\ mover' = IF answer[1] # "applied" THEN mover
                     ELSE [mover EXCEPT ![m] = [NoMover EXCEPT !.at = "sees",
                                                            !.seen = mover[m].seen]]
    /\ UNCHANGED <<manifest, objects, Log_2>>

\* Any process may remove the entries that any version of the index has from the manifest.
\* core/opendata_buffer/queue/queue.py: Queue.shorten
\* core/opendata_buffer/queue/queue.py: left_to_log
Trim ==
    /\ \E to \in (manifest.now.first + 1)..Min(index.now.end, End(manifest.now)) :
       \E answer \in Put(manifest, manifest.now, [manifest.now EXCEPT !.first = to]) :
         manifest' = answer[2]
    /\ UNCHANGED <<index, objects, mover, Log_2>>

\* core/opendata_buffer/queue/log_moves.py: move_entries
EndMove(m) ==
    /\ mover[m].at # "off"
    /\ mover' = [mover EXCEPT ![m] = NoMover]
    /\ UNCHANGED <<manifest, index, objects, Log_2>>

(*--------------------------------- readers ---------------------------------*)

Log_3 == <<manifest, objects, deleted, producer, mover, collector, resetter, counts>>

\* A run that has begun a seek may begin it again at any time, after an error.
Seeking(r) == run[r].back # None

\* A run reads the manifest and then the index before it takes its position.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.claim_epoch
LookBeforeTake(r) ==
    /\ run[r].at = "off"
    /\ \E n \in Readers :
         run' = [run EXCEPT ![r] = [NoRun EXCEPT !.at = "looks", !.name = n, !.seen = manifest.now]]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.claim_epoch
ReadIndexBeforeTake(r) ==
    /\ run[r].at = "looks"
    /\ run' = [run EXCEPT ![r].at = "takes", ![r].known = index.now]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* A run of a reader fences the previous run. A new reader begins at the floor. A registered
\* reader below the floor was reset, and the reset was refused, because all readers have read the
\* entries before the floor.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue._take
TakePosition(r) ==
    LET n == run[r].name
        known == run[r].known
        now == position[n].now
        begins == now.epoch = 0 \/ run[r].epoch = 1 \/ n \in known.readers
        new == [at |-> IF begins THEN Max(now.at, known.floor) ELSE now.at,
                epoch |-> now.epoch + 1] IN
    /\ run[r].at = "takes" /\ counts.takes < Takes
    /\ counts' = [counts EXCEPT !.takes = @ + 1]
    /\ IF new.at < known.floor
       THEN run' = [run EXCEPT ![r] = NoRun] /\ UNCHANGED position   \* raises DataLoss
       ELSE \E answer \in Put(position[n], now, new) :
              /\ position' = [position EXCEPT ![n] = answer[2]]
              /\ run' = IF answer[1] # "applied" THEN run
                        ELSE [run EXCEPT ![r].at = "took", ![r].epoch = new.epoch,
                                         ![r].next = new.at]
    /\ UNCHANGED <<index, acked, unsure, told, manifest, objects, deleted, producer, mover,
                   collector, resetter>>

\* Registered after its position was written: a collector that did not see this reader loses its
\* race for the index. The code begins with the index that it read before. That is the same: if the
\* write succeeds, the index has not changed since, and if it fails, nothing has happened.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue._register
LookBeforeRegistration(r) ==
    /\ run[r].at = "took"
    /\ run' = [run EXCEPT
         ![r].known = index.now,
         ![r].at = IF index.now.floor <= run[r].next THEN "registers"
                   ELSE IF Seeking(r) THEN "back" ELSE "takes"]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* The index changes even if it has the name, so a collector that saw an earlier position also
\* loses its race. This confirms a seek.
\* core/opendata_buffer/queue/log_index.py: LogIndex.with_reader
Register(r) ==
    LET new == [run[r].known EXCEPT !.readers = @ \cup {run[r].name}, !.changes = @ + 1] IN
    /\ run[r].at = "registers"
    /\ \E answer \in Put(index, run[r].known, new) :
         /\ index' = answer[2]
         /\ IF answer[1] = "applied"
            THEN /\ run' = [run EXCEPT ![r].at = "reads", ![r].known = new, ![r].back = None]
                 /\ unsure' = IF Seeking(r) THEN unsure \ {run[r].name} ELSE unsure
            ELSE /\ run' = [run EXCEPT ![r].at = "took", ![r].known = None]
                 /\ UNCHANGED unsure
    /\ UNCHANGED <<position, acked, told, Log_3>>

\* A running reader moves itself, forwards or backwards. It keeps its epoch. As in a reset, the
\* position is written before the index (LookBeforeRegistration, Register). Without an answer the
\* reader may have moved, so it must not read on: it seeks again.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.seek
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue._moved_to
Seek(r) ==
    LET n == run[r].name
        now == position[n].now
        back == IF Seeking(r) THEN run[r].back ELSE [at |-> now.at, next |-> run[r].next]
        ends == Faulty("a seek does not change the index") IN
    /\ run[r].at = "reads" \/ Seeking(r)
    /\ counts.resets < Resets
    /\ now.epoch = run[r].epoch     \* otherwise it is fenced
    /\ \E to \in 0..End(manifest.now) :
       \E answer \in Put(position[n], now, [now EXCEPT !.at = to]) :
         /\ position' = [position EXCEPT ![n] = answer[2]]
         /\ run' = IF answer[1] = "applied"
                   THEN [run EXCEPT ![r].at = IF ends THEN "reads" ELSE "took", ![r].next = to,
                                    ![r].back = IF ends THEN None ELSE back]
                   ELSE [run EXCEPT ![r].at = "seeks", ![r].back = back]
         /\ acked' = [acked EXCEPT ![n] = Min(@, to)]
         /\ unsure' = IF ends \/ to > now.at THEN unsure ELSE unsure \cup {n}
    /\ counts' = [counts EXCEPT !.resets = @ + 1]
    /\ UNCHANGED <<index, told, manifest, objects, deleted, producer, mover, collector, resetter>>

\* The collector raised the floor past the place, and at most to where the reader was. So the reader
\* moves back there.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.seek
MoveBack(r) ==
    LET n == run[r].name
        now == position[n].now
        back == run[r].back IN
    /\ run[r].at = "back" /\ now.epoch = run[r].epoch
    /\ \E answer \in Put(position[n], now, [now EXCEPT !.at = Max(@, back.at)]) :
         /\ position' = [position EXCEPT ![n] = answer[2]]
         /\ IF answer[1] = "applied"
            THEN /\ run' = [run EXCEPT ![r].at = "reads", ![r].next = back.next, ![r].back = None]
                 /\ unsure' = unsure \ {n}
            ELSE UNCHANGED <<run, unsure>>
    /\ UNCHANGED <<index, acked, told, Log_3>>

\* The manifest is read before the index, so entries that left it in between are in the index. An
\* index that was read earlier is enough if it ends at or after the manifest's first entry.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.read
ReadFirst(r) ==
    LET known == run[r].known
        reaches == Faulty("the index is read before the manifest")
                   \/ (known # None /\ manifest.now.first <= known.end) IN
    /\ run[r].at = "reads" \/ Seeking(r)
    /\ run' = [run EXCEPT ![r].at = IF Seeking(r) THEN "seeks" ELSE @,
                          ![r].seen = manifest.now, ![r].known = IF reaches THEN known ELSE None]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.read
ReadIndex(r) ==
    /\ run[r].at = "reads" \/ Seeking(r)
    /\ run' = [run EXCEPT ![r].at = IF Seeking(r) THEN "seeks" ELSE @, ![r].known = index.now]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* One view serves for several entries.
\* core/opendata_buffer/queue/log_view.py: LogView.entries
HandOut(r) ==
    LET s == run[r].next
        n == run[r].name
        known == run[r].known
        seen == run[r].seen
        mine == position[n].now.epoch = run[r].epoch /\ n \in index.now.readers
                /\ n \notin unsure
        segment == {g \in known.segments : g.from <= s /\ s < g.to}
        passed == [run EXCEPT ![r].next = s + 1] IN
    /\ run[r].at = "reads" /\ known # None
    /\ IF s < known.floor \/ n \notin known.readers   \* it has expired or was reset
       THEN run' = [run EXCEPT ![r] = NoRun] /\ UNCHANGED told
       ELSE IF s < known.end
       THEN /\ run' = passed
            /\ told' = IF s \in known.lost \/ ~mine THEN told
                       ELSE IF s \in deleted \/ ~(segment \subseteq objects) \/ segment = {}
                       THEN [told EXCEPT !["gone"] = @ \cup {s}]
                       ELSE IF s < acked[n] THEN [told EXCEPT !["again"] = @ \cup {s}] ELSE told
       ELSE IF s < seen.first
       THEN /\ run' = passed       \* removed by a v1 consumer before it was moved
            /\ told' = [told EXCEPT !["gap"] = @ \cup {s}]
       ELSE /\ s < End(seen)
            /\ run' = passed
            /\ told' = IF s \in deleted /\ mine THEN [told EXCEPT !["gone"] = @ \cup {s}] ELSE told
    /\ UNCHANGED <<index, position, acked, unsure, Log_3>>

\* A consumer may acknowledge less than it received.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.dequeue
Acknowledge(r) ==
    LET n == run[r].name
        now == position[n].now IN
    /\ run[r].at = "reads" /\ now.at < run[r].next
    /\ IF now.epoch # run[r].epoch /\ ~Faulty("a fenced reader acknowledges")
       THEN run' = [run EXCEPT ![r] = NoRun] /\ UNCHANGED <<position, acked>>
       ELSE \E through \in (now.at + 1)..run[r].next :
            \E answer \in Put(position[n], now, [now EXCEPT !.at = through]) :
              /\ position' = [position EXCEPT ![n] = answer[2]]
              /\ acked' = IF answer[1] = "applied" THEN [acked EXCEPT ![n] = through] ELSE acked
              /\ UNCHANGED run
    /\ UNCHANGED <<index, unsure, told, Log_3>>

(*------------------------- resets and the collector ------------------------*)

Log_4 == <<manifest, objects, deleted, producer, mover, run, collector, told>>

\* The position is written first, which fences a running reader. The reset is confirmed only after
\* the index was written.
\* core/opendata_buffer/queue/reader_admin.py: reset_reader
SetBack ==
    /\ resetter.at = "off" /\ counts.resets < Resets
    /\ \E n \in Readers : \E to \in 0..End(manifest.now) :
         LET now == position[n].now IN
         \E answer \in Put(position[n], now, [at |-> to, epoch |-> now.epoch + 1]) :
           /\ position' = [position EXCEPT ![n] = answer[2]]
           /\ resetter' = IF answer[1] = "applied"
                          THEN [at |-> "look", name |-> n, to |-> to, known |-> None] ELSE resetter
           /\ acked' = [acked EXCEPT ![n] = Min(@, to)]
           /\ unsure' = IF Faulty("a reset is confirmed before the index is written")
                           \/ to > now.at
                        THEN unsure ELSE unsure \cup {n}
    /\ counts' = [counts EXCEPT !.resets = @ + 1]
    /\ UNCHANGED <<index, Log_4>>

\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.reset
LookBeforeConfirm ==
    /\ resetter.at = "look"
    /\ resetter' = IF index.now.floor > resetter.to
                   THEN NoReset    \* the user gets an error: it is not retained
                   ELSE [resetter EXCEPT !.at = "write", !.known = index.now]
    /\ UNCHANGED <<index, position, acked, unsure, counts, Log_4>>

\* The command ends in between, without a confirmation.
\* core/opendata_buffer/queue/reader_admin.py: reset_reader
EndReset ==
    /\ resetter.at # "off"
    /\ resetter' = NoReset
    /\ UNCHANGED <<index, position, acked, unsure, counts, Log_4>>

\* A collector that has read the previous position loses its race for the index.
\* core/opendata_buffer/queue/log_index.py: LogIndex.with_reader
ConfirmReset ==
    LET new == [resetter.known EXCEPT !.readers = @ \cup {resetter.name}, !.changes = @ + 1] IN
    /\ resetter.at = "write"
    /\ \E answer \in Put(index, resetter.known, new) :
         /\ index' = answer[2]
         /\ IF answer[1] = "applied"
            THEN resetter' = NoReset /\ unsure' = unsure \ {resetter.name}
            ELSE resetter' = [resetter EXCEPT !.at = "look"] /\ UNCHANGED unsure
    /\ UNCHANGED <<position, acked, counts, Log_4>>

Log_5 == <<manifest, position, producer, mover, run, resetter, acked, unsure, told>>

\* core/opendata_buffer/gc.py: GarbageCollector
LookBeforeCollection ==
    /\ collector.at = "off"
    /\ \E expires \in {{}} \cup {{n} : n \in index.now.readers} :
         /\ Cardinality(expires) + counts.expiries <= Expiries \/ expires = {}
         /\ collector' = [NoCollector EXCEPT !.at = "reads", !.known = index.now,
                                             !.expires = expires]
         /\ counts' = [counts EXCEPT !.expiries = @ + Cardinality(expires)]
    /\ UNCHANGED <<index, objects, deleted, Log_5>>

\* Positions are read after the index, one by one.
\* core/opendata_buffer/queue/reader_positions.py: read_positions
ReadPosition(n) ==
    /\ collector.at = "reads" /\ collector.found[n] = -1
    /\ collector' = [collector EXCEPT !.found[n] = position[n].now.at]
    /\ UNCHANGED <<index, objects, deleted, counts, Log_5>>

\* The floor: the end of the entries that all readers have read, in segments or in the manifest.
\* core/opendata_buffer/queue/retention.py: floor_of
Floor(known, readers, found) ==
    LET least == IF Faulty("the floor is that of the fastest reader")
                 THEN CHOOSE x \in {found[n] : n \in readers} : \A n \in readers : found[n] <= x
                 ELSE CHOOSE x \in {found[n] : n \in readers} : \A n \in readers : found[n] >= x IN
    IF readers = {} THEN known.floor ELSE Max(known.floor, least)

\* With a retention more entries are kept.
\* core/opendata_buffer/queue/log_index.py: LogIndex.with_floor
WriteFloor ==
    LET known == IF Faulty("the positions are read before the index") THEN index.now
                 ELSE collector.known
        readers == known.readers \ collector.expires
        read == {n \in readers : collector.found[n] # -1} IN
    /\ collector.at = "reads"
    /\ \A n \in collector.known.readers : collector.found[n] # -1
    /\ \E floor \in known.floor..Floor(known, read, collector.found) :
         LET new == IF floor = known.floor /\ readers = known.readers THEN known
                    ELSE [known EXCEPT !.floor = floor, !.readers = readers,
                                       !.segments = {g \in @ : g.to > floor}, !.changes = @ + 1] IN
         \E answer \in IF new = known THEN {<<"applied", index>>} ELSE Put(index, known, new) :
           /\ index' = answer[2]
           /\ collector' = IF answer[1] = "applied"
                           THEN [NoCollector EXCEPT !.at = "deletes", !.known = new]
                           ELSE collector
    /\ UNCHANGED <<objects, deleted, counts, Log_5>>

\* After a lost race, and before each page: it continues with the current index.
\* core/opendata_buffer/gc.py: GarbageCollector
ReadIndexAgain ==
    /\ collector.at \in {"reads", "deletes"}
    /\ collector' = [NoCollector EXCEPT !.at = "deletes", !.known = index.now]
    /\ UNCHANGED <<index, objects, deleted, counts, Log_5>>

\* Batches and segments below the floor, even segments that were never in the index.
\* core/opendata_buffer/gc.py: GarbageCollector
Delete ==
    LET known == collector.known IN
    /\ collector.at = "deletes"
    /\ \/ \E s \in 0..(known.floor - 1) :
            s \notin deleted /\ deleted' = deleted \cup {s} /\ UNCHANGED objects
       \/ \E g \in objects :
            /\ g \notin known.segments
            /\ g.to <= known.floor \/ Faulty("a segment that is not named yet is deleted")
            /\ objects' = objects \ {g} /\ UNCHANGED deleted
    /\ UNCHANGED <<index, collector, counts, Log_5>>

\* core/opendata_buffer/gc.py: GarbageCollector
EndCollection ==
    /\ collector.at # "off"
    /\ collector' = NoCollector
    /\ UNCHANGED <<index, objects, deleted, counts, Log_5>>

\* core/opendata_buffer/testing/faults.py: FaultyStore.put_if
WriteArrives ==
    /\ \/ (\E after \in Arrivals(manifest) : manifest' = after) /\ UNCHANGED <<index, position>>
       \/ (\E after \in Arrivals(index) : index' = after) /\ UNCHANGED <<manifest, position>>
       \/ /\ \E n \in Readers : \E after \in Arrivals(position[n]) :
               position' = [position EXCEPT ![n] = after]
          /\ UNCHANGED <<manifest, index>>
    /\ UNCHANGED <<objects, deleted, producer, mover, run, collector, resetter, acked, unsure, told,
                   counts>>

Next ==
    \/ \E p \in Producers : LookBeforeAppend(p) \/ WriteAppend(p)
    \/ \E m \in Movers :
         \/ LookBeforeMove(m) \/ ReadIndexBeforeMove(m) \/ StoreSegment(m) \/ WriteIndex(m)
         \/ EndMove(m)
    \/ Trim
    \/ \E r \in Runs :
         \/ LookBeforeTake(r) \/ ReadIndexBeforeTake(r) \/ TakePosition(r)
         \/ LookBeforeRegistration(r) \/ Register(r) \/ ReadFirst(r) \/ ReadIndex(r)
         \/ HandOut(r) \/ Acknowledge(r) \/ Seek(r) \/ MoveBack(r)
    \/ SetBack \/ LookBeforeConfirm \/ ConfirmReset \/ EndReset
    \/ LookBeforeCollection \/ \E n \in Readers : ReadPosition(n)
    \/ WriteFloor \/ ReadIndexAgain \/ Delete \/ EndCollection \/ RemoveByV1 \/ WriteArrives

Spec == Init /\ [][Next]_vars

(*------------------------------- invariants --------------------------------*)

\* Every entry is in the manifest, in one segment, below the floor, or recorded as removed.
NothingIsLost ==
    \A s \in 0..(End(manifest.now) - 1) :
        \/ s < index.now.floor \/ s >= manifest.now.first \/ s \in index.now.lost
        \/ \E g \in index.now.segments : g.from <= s /\ s < g.to
        \/ s >= index.now.end /\ counts.v1Removals > 0

\* Segments are contiguous except for removed entries, do not overlap, and are all stored.
SegmentsAreSound ==
    /\ \A g \in index.now.segments : g.to > index.now.floor => g \in objects
    /\ \A g, h \in index.now.segments : g # h => g.to <= h.from \/ h.to <= g.from

\* Only entries that were removed from the manifest are recorded as lost.
LostIsCounted == Cardinality(index.now.lost) <= counts.v1Removals

\* No entry is appended twice, and durable entries exist.
NothingIsAppendedTwice ==
    \A i, j \in DOMAIN manifest.now.log : i # j => manifest.now.log[i] # manifest.now.log[j]
DurableIsThere ==
    \A p \in told["durable"] : Range(Entries(p)) \subseteq Range(manifest.now.log)

\* The floor is not past a registered reader, unless its reset or seek is not confirmed.
TheFloorIsBelowReaders ==
    \A n \in index.now.readers : n \in unsure \/ position[n].now.at >= index.now.floor

\* No registered reader misses an object, skips an existing entry, or reads one again.
NothingIsMissed == told["gone"] = {} /\ (told["gap"] = {} \/ counts.v1Removals > 0)
NothingIsRedelivered == told["again"] = {}

\* Only a reset or a seek sets an acknowledged position back.
AcknowledgedStays == \A n \in Readers : position[n].now.at >= acked[n]

\* The index never returns to an earlier value.
OnlyForward == [][/\ index'.now.end >= index.now.end /\ index'.now.floor >= index.now.floor
                  /\ index.now.lost \subseteq index'.now.lost]_vars
==============================================================================
