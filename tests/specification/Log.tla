--------------------------------- MODULE Log ----------------------------------
(* A queue as a log: the v1 manifest is its short end, any                     *)
(* process moves the oldest entries into segments, and named readers have     *)
(* positions of their own. A collector deletes what all of them have read.    *)
(*                                                                            *)
(* The manifest's value is [first, log] as in Queue.tla, with one entry a     *)
(* producer. The index's is [end, floor, segments, readers, lost, resets]:    *)
(* sequences from `floor` to `end` are in the segments, which are             *)
(* [mover, from, to], but for those in `lost`, which a v1 consumer took away. *)
(* Each change of what is kept is one compare-and-swap of the index. A        *)
(* position's value is [at, epoch], and only its reader changes it.           *)
EXTENDS Store

CONSTANTS
    Producers,   \* Each appends one entry.
    Waiting,     \* How many entries wait at the beginning.
    Movers,
    Readers,     \* Names.
    Runs,        \* Processes that read; each may take any name.
    Resets,      \* How often a position is set back.
    Expiries,    \* How many readers may expire.
    Thefts       \* How many entries a v1 consumer takes.

VARIABLES manifest, index, position, objects, deleted, producer, mover, run, collector, resetter,
          acked, unsure, told, counts

vars == <<manifest, index, position, objects, deleted, producer, mover, run, collector, resetter,
          acked, unsure, told, counts>>

End(m) == Len(m.log)
Queued(m) == {m.log[i] : i \in (m.first + 1)..Len(m.log)}

NoRun == [at |-> "off", name |-> None, epoch |-> 0, next |-> 0, seen |-> None, known |-> None]
NoMover == [at |-> "off", known |-> None, segment |-> None, seen |-> None]
NoCollector == [at |-> "off", known |-> None, found |-> [n \in Readers |-> -1], expires |-> {}]
NoReset == [at |-> "off", name |-> None, to |-> 0, known |-> None]

Init ==
    /\ manifest = Object([first |-> 0, log |-> [i \in 1..Waiting |-> i]])
    /\ index = Object([end |-> 0, floor |-> 0, segments |-> {}, readers |-> {}, lost |-> {},
                       resets |-> 0])
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
    /\ counts = [resets |-> 0, expiries |-> 0, thefts |-> 0]

(*------------------------------- producers ---------------------------------*)

Log_1 == <<index, position, objects, deleted, mover, run, collector, resetter, acked, unsure, counts>>

\* As in Queue.tla; but an entry that left the manifest is in the index.
\* core/opendata_buffer/queue/queue.py: _Append.find
LookBeforeAppend(p) ==
    LET m == manifest.now
        moved == {m.log[i] : i \in 1..m.first}    \* what the segments of the index name
        found == p \in Queued(m) \/ (p \in moved
                   /\ ~Faulty("a lost append is looked for in the manifest alone")) IN
    /\ producer[p].at = "start"
    /\ IF found
       THEN /\ producer' = [producer EXCEPT ![p] = [at |-> "end", known |-> None, lost |-> FALSE]]
            /\ told' = [told EXCEPT !["durable"] = @ \cup {p}]
       ELSE /\ producer' = [producer EXCEPT ![p] = [at |-> "write", known |-> m,
                                                   lost |-> @.lost /\ @.known = m]]
            /\ UNCHANGED told
    /\ UNCHANGED <<manifest, Log_1>>

\* core/opendata_buffer/queue/queue.py: Queue.append
WriteAppend(p) ==
    LET new == [producer[p].known EXCEPT !.log = Append(@, p)] IN
    /\ producer[p].at = "write"
    /\ \E answer \in Put(manifest, producer[p].known, new) :
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

\* The index first: what it does not have, the manifest has, or a v1 consumer has taken.
\* core/opendata_buffer/queue/log.py: Log.move
LookBeforeMove(m) ==
    /\ mover[m].at = "off"
    /\ mover' = [mover EXCEPT ![m] = [at |-> "looks", known |-> index.now, segment |-> None,
                                      seen |-> None]]
    /\ UNCHANGED <<manifest, index, objects, Log_2>>

\* A segment begins where the index ends. Its object is stored before the index names it.
\* core/opendata_buffer/queue/log.py: Log.move
StoreSegment(m) ==
    LET seen == manifest.now
        from == IF Faulty("a segment begins where the manifest begins") THEN seen.first
                ELSE Max(mover[m].known.end, seen.first) IN
    /\ mover[m].at = "looks" /\ from < End(seen)
    /\ \E to \in {from + 1, End(seen)} :
         LET segment == [mover |-> m, from |-> from, to |-> to] IN
         /\ mover' = [mover EXCEPT ![m].at = "stored", ![m].segment = segment, ![m].seen = seen]
         /\ objects' = IF Faulty("the index names a segment before it is stored") THEN objects
                       ELSE objects \cup {segment}
         /\ manifest' = IF Faulty("the manifest is trimmed before the index is written")
                        THEN Object([seen EXCEPT !.first = Max(@, to)]) ELSE manifest
    /\ UNCHANGED <<index, Log_2>>

\* The only commit point. What is missing before the segment was taken by somebody else.
\* core/opendata_buffer/queue/log.py: LogIndex.with_segment
WriteIndex(m) ==
    LET known == mover[m].known
        segment == mover[m].segment
        new == [known EXCEPT !.end = segment.to, !.segments = @ \cup {segment},
                             !.lost = @ \cup (known.end..(segment.from - 1))] IN
    /\ mover[m].at = "stored"
    /\ \E answer \in Put(index, known, new) :
         /\ index' = answer[2]
         /\ mover' = [mover EXCEPT ![m] = IF answer[1] = "applied"
              THEN [NoMover EXCEPT !.at = "trims"] ELSE NoMover]
    /\ UNCHANGED <<manifest, objects, Log_2>>

\* Any process, whenever it finds the two to overlap: what the index has leaves the manifest.
\* core/opendata_buffer/queue/queue.py: Queue.shorten
Trim(m) ==
    /\ mover[m].at \in {"off", "trims"} /\ manifest.now.first < index.now.end
    /\ \E answer \in Put(manifest, manifest.now, [manifest.now EXCEPT !.first = index.now.end]) :
         manifest' = answer[2]
    /\ mover' = [mover EXCEPT ![m] = NoMover]
    /\ UNCHANGED <<index, objects, Log_2>>

\* core/opendata_buffer/queue/log.py: Log.move
EndMove(m) ==
    /\ mover[m].at \in {"looks", "trims"}
    /\ mover' = [mover EXCEPT ![m] = NoMover]
    /\ UNCHANGED <<manifest, index, objects, Log_2>>

(*--------------------------------- readers ---------------------------------*)

Log_3 == <<manifest, objects, deleted, producer, mover, collector, resetter, counts>>

\* A run of a reader fences the one before.
\* core/opendata_buffer/queue/readers.py: ReaderQueue.claim_epoch
TakePosition(r) ==
    /\ run[r].at = "off" /\ run[r].name = None
    /\ \E n \in Readers :
         LET now == position[n].now
             new == [at |-> Max(now.at, IF now.epoch = 0 THEN index.now.floor ELSE 0),
                     epoch |-> now.epoch + 1] IN
         \E answer \in Put(position[n], now, new) :
            /\ position' = [position EXCEPT ![n] = answer[2]]
            /\ run' = IF answer[1] # "applied" THEN run
                      ELSE [run EXCEPT ![r] = [NoRun EXCEPT !.at = "took", !.name = n,
                                                 !.epoch = new.epoch, !.next = new.at]]
    /\ UNCHANGED <<index, acked, unsure, told, Log_3>>

\* Behind its position: a collector that saw no such reader loses its race for the index.
\* core/opendata_buffer/queue/readers.py: ReaderQueue.claim_epoch
LookBeforeRegistration(r) ==
    /\ run[r].at = "took"
    /\ run' = [run EXCEPT ![r] =
         IF index.now.floor > run[r].next THEN NoRun      \* DataLoss, with the numbers
         ELSE [@ EXCEPT !.known = index.now,
                        !.at = IF run[r].name \in index.now.readers THEN "reads" ELSE "registers"]]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* core/opendata_buffer/queue/log.py: LogIndex.with_reader
Register(r) ==
    LET new == [run[r].known EXCEPT !.readers = @ \cup {run[r].name}] IN
    /\ run[r].at = "registers"
    /\ \E answer \in Put(index, run[r].known, new) :
         /\ index' = answer[2]
         /\ run' = [run EXCEPT ![r].at = IF answer[1] = "applied" THEN "reads" ELSE "took",
                               ![r].known = None]
    /\ UNCHANGED <<position, acked, unsure, told, Log_3>>

\* The manifest before the index: what left it in between is in the index.
\* core/opendata_buffer/queue/readers.py: ReaderQueue.read
ReadFirst(r) ==
    /\ run[r].at = "reads"
    /\ run' = [run EXCEPT
         ![r] = IF Faulty("the index is read before the manifest")
                THEN [@ EXCEPT !.at = "reads on", !.known = index.now, !.seen = None]
                ELSE [@ EXCEPT !.at = "reads on", !.known = None, !.seen = manifest.now]]
    /\ UNCHANGED <<index, position, acked, unsure, told, Log_3>>

\* core/opendata_buffer/queue/log.py: LogView.entries
HandOut(r) ==
    LET s == run[r].next
        n == run[r].name
        known == IF run[r].known = None THEN index.now ELSE run[r].known
        seen == IF run[r].seen = None THEN manifest.now ELSE run[r].seen
        mine == position[n].now.epoch = run[r].epoch /\ n \in index.now.readers
                /\ n \notin unsure
        segment == {g \in known.segments : g.from <= s /\ s < g.to}
        passed == [run EXCEPT ![r].at = "reads", ![r].next = s + 1, ![r].known = None,
                              ![r].seen = None] IN
    /\ run[r].at = "reads on"
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

\* core/opendata_buffer/queue/readers.py: ReaderQueue.dequeue
Acknowledge(r) ==
    LET n == run[r].name
        now == position[n].now
        new == [now EXCEPT !.at = Max(@, run[r].next)] IN
    /\ run[r].at = "reads" /\ now.at < run[r].next
    /\ IF now.epoch # run[r].epoch /\ ~Faulty("a fenced reader acknowledges")
       THEN run' = [run EXCEPT ![r] = NoRun] /\ UNCHANGED <<position, acked>>
       ELSE \E answer \in Put(position[n], now, new) :
              /\ position' = [position EXCEPT ![n] = answer[2]]
              /\ acked' = IF answer[1] = "applied" THEN [acked EXCEPT ![n] = new.at] ELSE acked
              /\ UNCHANGED run
    /\ UNCHANGED <<index, unsure, told, Log_3>>

(*------------------------- resets and the collector ------------------------*)

Log_4 == <<manifest, objects, deleted, producer, mover, run, collector, told>>

\* The position first; the reader that runs is fenced.
\* core/opendata_buffer/queue/readers.py: reset_reader
SetBack ==
    /\ resetter.at = "off" /\ counts.resets < Resets
    /\ \E n \in Readers : \E to \in 0..(position[n].now.at - 1) :
         LET now == position[n].now IN
         /\ position' = [position EXCEPT ![n] = Object([at |-> to, epoch |-> now.epoch + 1])]
         /\ resetter' = [at |-> "look", name |-> n, to |-> to, known |-> None]
         /\ acked' = [acked EXCEPT ![n] = to]
         /\ unsure' = IF Faulty("a reset is confirmed before the index is written")
                      THEN unsure ELSE unsure \cup {n}
    /\ counts' = [counts EXCEPT !.resets = @ + 1]
    /\ UNCHANGED <<index, Log_4>>

\* core/opendata_buffer/queue/readers.py: ReaderQueue.reset
LookBeforeConfirm ==
    /\ resetter.at = "look"
    /\ resetter' = IF index.now.floor > resetter.to \/ resetter.name \notin index.now.readers
                   THEN NoReset    \* the user is told that it is not retained
                   ELSE [resetter EXCEPT !.at = "write", !.known = index.now]
    /\ UNCHANGED <<index, position, acked, unsure, counts, Log_4>>

\* A collector that has seen the position before loses its race for the index.
\* core/opendata_buffer/queue/log.py: LogIndex.with_reader
ConfirmReset ==
    LET new == [resetter.known EXCEPT !.resets = @ + 1] IN
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
\* core/opendata_buffer/queue/readers.py: read_positions
ReadPosition(n) ==
    /\ collector.at = "reads" /\ collector.found[n] = -1
    /\ collector' = [collector EXCEPT !.found[n] = position[n].now.at]
    /\ UNCHANGED <<index, objects, deleted, counts, Log_5>>

\* The pure function of the floor: what all readers have, in segments or still in the manifest.
\* core/opendata_buffer/queue/log.py: floor_of
Floor(known, readers, found) ==
    LET least == IF Faulty("the floor is that of the fastest reader")
                 THEN CHOOSE x \in {found[n] : n \in readers} : \A n \in readers : found[n] <= x
                 ELSE CHOOSE x \in {found[n] : n \in readers} : \A n \in readers : found[n] >= x IN
    IF readers = {} THEN known.floor ELSE Max(known.floor, least)

\* core/opendata_buffer/queue/log.py: LogIndex.with_floor
WriteFloor ==
    LET known == IF Faulty("the positions are read before the index") THEN index.now
                 ELSE collector.known
        readers == known.readers \ collector.expires
        floor == Floor(known, {n \in readers : collector.found[n] # -1}, collector.found)
        new == [known EXCEPT !.floor = floor, !.readers = readers,
                             !.segments = {g \in @ : g.to > floor}] IN
    /\ collector.at = "reads"
    /\ \A n \in collector.known.readers : collector.found[n] # -1
    /\ \E answer \in IF new = known THEN {<<"applied", index>>} ELSE Put(index, known, new) :
         /\ index' = answer[2]
         /\ collector' = IF answer[1] = "applied"
                         THEN [NoCollector EXCEPT !.at = "deletes", !.known = new]
                         ELSE NoCollector
    /\ UNCHANGED <<objects, deleted, counts, Log_5>>

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
         LookBeforeMove(m) \/ StoreSegment(m) \/ WriteIndex(m) \/ Trim(m) \/ EndMove(m)
    \/ \E r \in Runs :
         \/ TakePosition(r) \/ LookBeforeRegistration(r) \/ Register(r) \/ ReadFirst(r)
         \/ HandOut(r) \/ Acknowledge(r)
    \/ SetBack \/ LookBeforeConfirm \/ ConfirmReset
    \/ LookBeforeCollection \/ \E n \in Readers : ReadPosition(n)
    \/ WriteFloor \/ Delete \/ EndCollection \/ Steal \/ WriteArrives

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
DurableIsThere == told["durable"] \subseteq Range(manifest.now.log)

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
