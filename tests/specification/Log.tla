--------------------------------- MODULE Log ----------------------------------
(* A queue as a log: the v1 manifest is its short end, any                     *)
(* process moves the oldest entries into segments, and named readers have     *)
(* positions of their own. A collector deletes what all of them have read.    *)
(*                                                                            *)
(* The manifest's value is [first, log] as in Queue.tla, with one entry a     *)
(* producer. The index's is [end, floor, segments, readers, lost, changes]:    *)
(* sequences from `floor` to `end` are in the segments, which are             *)
(* [mover, from, to], but for those in `lost`, which a v1 consumer took away. *)
(* Each change of what is kept is one compare-and-swap of the index. A        *)
(* position's value is [at, epoch], and only its reader changes it. Each write  *)
(* of the index counts in `changes`, so a value is its own version.            *)
(*                                                                            *)
(* Traces of the code are checked against this module (TraceLog.tla).          *)
EXTENDS Store

CONSTANTS
    Producers,   \* Each appends one entry.
    Waiting,     \* How many entries wait at the beginning.
    Movers,
    Readers,     \* Names.
    Runs,        \* Processes that read; each may take any name.
    Takes,       \* How often all of them together try to take a position.
    Resets,      \* How often a position is set back.
    Expiries,    \* How many readers may expire.
    Thefts       \* How many entries a v1 consumer takes.

VARIABLES manifest, index, position, objects, deleted, producer, mover, run, collector, resetter,
          acked, unsure, told, counts

vars == <<manifest, index, position, objects, deleted, producer, mover, run, collector, resetter,
          acked, unsure, told, counts>>

End(m) == Len(m.log)
Queued(m) == {m.log[i] : i \in (m.first + 1)..Len(m.log)}

\* What a producer appends in one write; a trace has groups of several entries.
Entries(p) == <<p>>
LastOf(p) == Entries(p)[Len(Entries(p))]

NoRun == [at |-> "off", name |-> None, epoch |-> 0, next |-> 0, seen |-> None, known |-> None]
NoMover == [at |-> "off", known |-> None, segment |-> None, seen |-> None]
NoCollector == [at |-> "off", known |-> None, found |-> [n \in Readers |-> -1], expires |-> {}]
NoReset == [at |-> "off", name |-> None, to |-> 0, known |-> None]

Init ==
    /\ manifest = Object([first |-> 0, log |-> [i \in 1..Waiting |-> i]])
    /\ index = Object([end |-> 0, floor |-> 0, segments |-> {}, readers |-> {}, lost |-> {},
                       changes |-> 0])
    /\ position = [n \in Readers |-> Object([at |-> 0, epoch |-> 0])]
    /\ objects = {}                   \* segments that are stored
    /\ deleted = {}                   \* sequences whose batch was deleted
    /\ producer = [p \in Producers |-> [at |-> "start", known |-> None, lost |-> FALSE]]
    /\ mover = [m \in Movers |-> NoMover]
    /\ run = [r \in Runs |-> NoRun]
    /\ collector = NoCollector
    /\ resetter = NoReset
    /\ acked = [n \in Readers |-> 0]  \* what was acknowledged, and it was said
    /\ unsure = {}                    \* readers that were set back, and it was not confirmed
    /\ told = [kind \in {"durable", "gap", "gone", "again"} |-> {}]
    /\ counts = [resets |-> 0, expiries |-> 0, thefts |-> 0, takes |-> 0]

(*------------------------------- producers ---------------------------------*)

Log_1 == <<index, position, objects, deleted, mover, run, collector, resetter, acked, unsure, counts>>

\* As in Queue.tla; but an entry that left the manifest is in the index.
\* core/opendata_buffer/queue/queue.py: _Append.find
LookBeforeAppend(p) ==
    LET m == manifest.now
        moved == {m.log[i] : i \in 1..m.first}    \* what the segments of the index name
        found == LastOf(p) \in Queued(m) \/ (LastOf(p) \in moved
                   /\ ~Faulty("a lost append is looked for in the manifest alone")) IN
    /\ producer[p].at = "start"
    /\ IF found
       THEN /\ producer' = [producer EXCEPT ![p] = [at |-> "end", known |-> None, lost |-> FALSE]]
            /\ told' = [told EXCEPT !["durable"] = @ \cup {p}]
       ELSE /\ producer' = [producer EXCEPT ![p] = [at |-> "write", known |-> m,
                                                   lost |-> @.lost /\ @.known = m]]
            /\ UNCHANGED told
    /\ UNCHANGED <<manifest, Log_1>>

\* What this process knows to be in the index leaves the manifest in the same write.
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

\* A v1 consumer that knows nothing of the log takes the oldest entry off the manifest.
\* core/opendata_buffer/queue/queue.py: Queue.dequeue
Steal ==
    /\ counts.thefts < Thefts /\ manifest.now.first < End(manifest.now)
    /\ manifest' = Object([manifest.now EXCEPT !.first = @ + 1])
    /\ counts' = [counts EXCEPT !.thefts = @ + 1]
    /\ UNCHANGED <<index, position, objects, deleted, producer, mover, run, collector, resetter,
                   acked, unsure, told>>

(*--------------------------------- movers ----------------------------------*)

Log_2 == <<position, deleted, producer, run, collector, resetter, acked, unsure, told, counts>>

\* The manifest that the process has seen, however long ago.
\* core/opendata_buffer/queue/queue.py: Queue.shorten
LookBeforeMove(m) ==
    /\ mover[m].at = "off"
    /\ mover' = [mover EXCEPT ![m] = [NoMover EXCEPT !.at = "sees", !.seen = manifest.now]]
    /\ UNCHANGED <<manifest, index, objects, Log_2>>

\* The index after it: what left the manifest before it was seen is in the index, or was taken
\* by a v1 consumer.
\* core/opendata_buffer/queue/log_moves.py: move_entries
ReadIndexBeforeMove(m) ==
    /\ mover[m].at \in {"sees", "stored"}
    /\ mover' = [mover EXCEPT ![m].at = "looks", ![m].known = index.now, ![m].segment = None]
    /\ UNCHANGED <<manifest, index, objects, Log_2>>

\* Whether a stored segment has entries that are missing between the index and the manifest. They
\* are not lost then: a mover died before it named the segment, or the index is an old copy.
\* core/opendata_buffer/queue/log.py: Log.check_gap
IsStored(known, seen) ==
    \E g \in objects : g.from < seen.first /\ g.to > known.end /\ known.end < seen.first

\* A segment begins where the index ends. Its object is stored before the index names it. A mover
\* stops where what is missing before it is stored, until a person repairs the index.
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

\* The only commit point. What is missing before the segment was taken by somebody else. A mover
\* that was not told that it is written tries again, or reads the index again. It goes on with the
\* manifest that it has seen.
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

\* Any process, by any version of the index: what that has leaves the manifest.
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

\* A run sees the manifest and then the index before it takes its position.
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

\* A run of a reader fences the one before. A new one begins at the floor. A registered one that is
\* below it was set back, and that was refused: all readers have read what lies before the floor.
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
       THEN run' = [run EXCEPT ![r] = NoRun] /\ UNCHANGED position   \* DataLoss, with the numbers
       ELSE \E answer \in Put(position[n], now, new) :
              /\ position' = [position EXCEPT ![n] = answer[2]]
              /\ run' = IF answer[1] # "applied" THEN run
                        ELSE [run EXCEPT ![r].at = "took", ![r].epoch = new.epoch,
                                         ![r].next = new.at]
    /\ UNCHANGED <<index, acked, unsure, told, manifest, objects, deleted, producer, mover,
                   collector, resetter>>

\* Behind its position: a collector that saw no such reader loses its race for the index.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue._register
LookBeforeRegistration(r) ==
    /\ run[r].at = "took"
    /\ run' = [run EXCEPT
         ![r].known = index.now,
         ![r].at = IF index.now.floor > run[r].next THEN "takes" ELSE "registers"]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* The index changes also where it has the name: a collector that saw an earlier position loses
\* its race, too.
\* core/opendata_buffer/queue/log_index.py: LogIndex.with_reader
Register(r) ==
    LET new == [run[r].known EXCEPT !.readers = @ \cup {run[r].name}, !.changes = @ + 1] IN
    /\ run[r].at = "registers"
    /\ \E answer \in Put(index, run[r].known, new) :
         /\ index' = answer[2]
         /\ run' = IF answer[1] = "applied"
                   THEN [run EXCEPT ![r].at = "reads", ![r].known = new]
                   ELSE [run EXCEPT ![r].at = "took", ![r].known = None]
    /\ UNCHANGED <<position, acked, unsure, told, Log_3>>

\* The manifest before the index: what left it in between is in the index. One that is known
\* already is good enough if it reaches to where the manifest begins.
\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.read
ReadFirst(r) ==
    LET known == run[r].known
        reaches == Faulty("the index is read before the manifest")
                   \/ (known # None /\ manifest.now.first <= known.end) IN
    /\ run[r].at = "reads"
    /\ run' = [run EXCEPT ![r].seen = manifest.now, ![r].known = IF reaches THEN known ELSE None]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* core/opendata_buffer/queue/reader_queue.py: ReaderQueue.read
ReadIndex(r) ==
    /\ run[r].at = "reads"
    /\ run' = [run EXCEPT ![r].known = index.now]
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
    /\ IF s < known.floor \/ n \notin known.readers   \* it has expired, or was set back
       THEN run' = [run EXCEPT ![r] = NoRun] /\ UNCHANGED told
       ELSE IF s < known.end
       THEN /\ run' = passed
            /\ told' = IF s \in known.lost \/ ~mine THEN told
                       ELSE IF s \in deleted \/ ~(segment \subseteq objects) \/ segment = {}
                       THEN [told EXCEPT !["gone"] = @ \cup {s}]
                       ELSE IF s < acked[n] THEN [told EXCEPT !["again"] = @ \cup {s}] ELSE told
       ELSE IF s < seen.first
       THEN /\ run' = passed       \* taken by a v1 consumer before it was moved
            /\ told' = [told EXCEPT !["gap"] = @ \cup {s}]
       ELSE /\ s < End(seen)
            /\ run' = passed
            /\ told' = IF s \in deleted /\ mine THEN [told EXCEPT !["gone"] = @ \cup {s}] ELSE told
    /\ UNCHANGED <<index, position, acked, unsure, Log_3>>

\* A consumer may acknowledge less than it was handed out.
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

\* The position first; the reader that runs is fenced. Until the index is written nobody is told
\* where the reader is.
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
                   THEN NoReset    \* the user is told that it is not retained
                   ELSE [resetter EXCEPT !.at = "write", !.known = index.now]
    /\ UNCHANGED <<index, position, acked, unsure, counts, Log_4>>

\* The command ends in between, and nobody was told.
\* core/opendata_buffer/queue/reader_admin.py: reset_reader
EndReset ==
    /\ resetter.at # "off"
    /\ resetter' = NoReset
    /\ UNCHANGED <<index, position, acked, unsure, counts, Log_4>>

\* A collector that has seen the position before loses its race for the index.
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

\* After the index, one by one.
\* core/opendata_buffer/queue/reader_positions.py: read_positions
ReadPosition(n) ==
    /\ collector.at = "reads" /\ collector.found[n] = -1
    /\ collector' = [collector EXCEPT !.found[n] = position[n].now.at]
    /\ UNCHANGED <<index, objects, deleted, counts, Log_5>>

\* The pure function of the floor: what all readers have, in segments or still in the manifest.
\* core/opendata_buffer/queue/retention.py: floor_of
Floor(known, readers, found) ==
    LET least == IF Faulty("the floor is that of the fastest reader")
                 THEN CHOOSE x \in {found[n] : n \in readers} : \A n \in readers : found[n] <= x
                 ELSE CHOOSE x \in {found[n] : n \in readers} : \A n \in readers : found[n] >= x IN
    IF readers = {} THEN known.floor ELSE Max(known.floor, least)

\* A retention keeps more.
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

\* After a lost race, and before each page: it goes on by the index that holds then.
\* core/opendata_buffer/gc.py: GarbageCollector
ReadIndexAgain ==
    /\ collector.at \in {"reads", "deletes"}
    /\ collector' = [NoCollector EXCEPT !.at = "deletes", !.known = index.now]
    /\ UNCHANGED <<index, objects, deleted, counts, Log_5>>

\* Below the floor: batches, and segments, whether they were ever named or not.
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
         \/ HandOut(r) \/ Acknowledge(r)
    \/ SetBack \/ LookBeforeConfirm \/ ConfirmReset \/ EndReset
    \/ LookBeforeCollection \/ \E n \in Readers : ReadPosition(n)
    \/ WriteFloor \/ ReadIndexAgain \/ Delete \/ EndCollection \/ Steal \/ WriteArrives

Spec == Init /\ [][Next]_vars

(*------------------------------- invariants --------------------------------*)

\* Every entry is in the manifest, in one segment, below the floor, or was taken and is said to be.
NothingIsLost ==
    \A s \in 0..(End(manifest.now) - 1) :
        \/ s < index.now.floor \/ s >= manifest.now.first \/ s \in index.now.lost
        \/ \E g \in index.now.segments : g.from <= s /\ s < g.to
        \/ s >= index.now.end /\ counts.thefts > 0

\* Segments are contiguous but for what was taken, none overlaps another, and each is stored.
SegmentsAreSound ==
    /\ \A g \in index.now.segments : g.to > index.now.floor => g \in objects
    /\ \A g, h \in index.now.segments : g # h => g.to <= h.from \/ h.to <= g.from

\* Only what was taken from the manifest is said to be lost.
LostIsCounted == Cardinality(index.now.lost) <= counts.thefts

\* No entry is appended twice, and what is durable is there.
NothingIsAppendedTwice ==
    \A i, j \in DOMAIN manifest.now.log : i # j => manifest.now.log[i] # manifest.now.log[j]
DurableIsThere ==
    \A p \in told["durable"] : Range(Entries(p)) \subseteq Range(manifest.now.log)

\* The floor is not beyond a registered reader, unless it was set back and that is not confirmed.
TheFloorIsBelowReaders ==
    \A n \in index.now.readers : n \in unsure \/ position[n].now.at >= index.now.floor

\* No registered reader misses an object, passes an entry that is there, or reads one again.
NothingIsMissed == told["gone"] = {} /\ (told["gap"] = {} \/ counts.thefts > 0)
NothingIsRedelivered == told["again"] = {}

\* Acknowledged positions are not taken back but by a reset.
AcknowledgedStays == \A n \in Readers : position[n].now.at >= acked[n]

\* The index never returns to an earlier value.
OnlyForward == [][/\ index'.now.end >= index.now.end /\ index'.now.floor >= index.now.floor
                  /\ index.now.lost \subseteq index'.now.lost]_vars
==============================================================================
