------------------------------- MODULE V1Reader -------------------------------
(* A log that v1 consumers read as one of its named readers, from a manifest  *)
(* of its own, which feeders fill.                                            *)
(*                                                                            *)
(* The log is abstracted from Log.tla: its entries have the sequences 0 to    *)
(* end - 1, and the sequence stands for the location. Where an entry is, in a *)
(* segment or in the log's manifest, does not matter here. The index's value  *)
(* is [floor, named, changes]. The queue's value is [first, held, epoch],     *)
(* where held has the locations of the entries from `first` on. A sequence of *)
(* the queue is the same sequence in the log, so the queue itself says how    *)
(* far it is fed. The position's value is `at`, a lower bound of the queue's  *)
(* front, which the collector uses.                                           *)
EXTENDS Store

CONSTANTS
    Appends,      \* The number of entries that the log gets.
    Feeders,      \* Processes that feed the queue: producers, collectors, commands.
    Consumers,    \* Processes that consume it. They know v1 only.
    Claims,       \* How often all of them together take the queue over.
    Deletes,      \* How often an operator deletes the reader.
    Foreign       \* The number of entries that another producer appends to the queue.

VARIABLES log, index, queue, position, deleted, feeder, consumer, collector, operator,
          acked, told, counts

vars == <<log, index, queue, position, deleted, feeder, consumer, collector, operator,
          acked, told, counts>>

Sealed == 1000      \* the epoch of a queue that is closed for good
Other == -1         \* the location of an entry of another producer

Next_(q) == q.first + Len(q.held)
IsOpen(q) == q # None /\ (q.epoch < Sealed \/ Faulty("a sealed queue is fed"))

NoFeeder == [known |-> None, end |-> 0, at |-> 0, named |-> FALSE]
NoConsumer == [at |-> "off", epoch |-> 0, next |-> 0, seen |-> None]
NoCollector == [at |-> "off", known |-> None, found |-> -1]
NoOperator == [at |-> "off", begin |-> 0, known |-> None]

Init ==
    /\ log = 0
    /\ index = Object([floor |-> 0, named |-> FALSE, changes |-> 0])
    /\ queue = Object(None)
    /\ position = Object(None)
    /\ deleted = {}
    /\ feeder = [f \in Feeders |-> NoFeeder]
    /\ consumer = [c \in Consumers |-> NoConsumer]
    /\ collector = NoCollector
    /\ operator = NoOperator
    /\ acked = 0                  \* all before were dequeued, with a confirmation
    /\ told = [kind \in {"gone", "again", "late"} |-> {}]
    /\ counts = [claims |-> 0, deletes |-> 0, foreign |-> 0, added |-> FALSE, gone |-> FALSE]

\* Producers append to the log, in any way that Log.tla allows.
\* core/opendata_buffer/queue/queue.py: Queue.append
AppendToLog ==
    /\ log < Appends
    /\ log' = log + 1
    /\ UNCHANGED <<index, queue, position, deleted, feeder, consumer, collector, operator, acked,
                   told, counts>>

(*-------------------------------- an operator -------------------------------*)

V_1 == <<log, deleted, feeder, consumer, collector, acked, told>>

\* The reader begins at a sequence that the log keeps.
\* core/opendata_buffer/queue/v1_admin.py: add_v1_reader
BeginAdd ==
    /\ operator.at = "off" /\ ~index.now.named /\ counts.deletes = 0
    /\ \E begin \in index.now.floor..log :
         operator' = [NoOperator EXCEPT !.at = "queue", !.begin = begin]
    /\ UNCHANGED <<index, queue, position, counts, V_1>>

\* The queue comes first, empty. It may exist from a command that was killed.
\* core/opendata_buffer/queue/v1_admin.py: add_v1_reader
WriteQueue ==
    LET new == IF queue.now = None THEN [first |-> operator.begin, held |-> <<>>, epoch |-> 0]
               ELSE [queue.now EXCEPT !.first = Max(@, operator.begin)] IN
    /\ operator.at = "queue"
    /\ queue.now # None => queue.now.held = <<>> /\ queue.now.epoch < Sealed
    /\ \E answer \in IF new = queue.now THEN {<<"applied", queue>>}
                     ELSE Put(queue, queue.now, new) :
         /\ queue' = answer[2]
         /\ operator' = IF answer[1] = "applied"
                        THEN [operator EXCEPT !.at = "position", !.begin = new.first]
                        ELSE operator
    /\ UNCHANGED <<index, position, counts, V_1>>

\* The position comes before the name, so a collector that finds the name finds the position.
\* core/opendata_buffer/queue/v1_admin.py: add_v1_reader
WritePosition ==
    /\ operator.at = "position"
    /\ \E answer \in IF position.now = operator.begin THEN {<<"applied", position>>}
                     ELSE Put(position, position.now, operator.begin) :
         /\ position' = answer[2]
         /\ operator' = IF answer[1] = "applied" THEN [operator EXCEPT !.at = "look"] ELSE operator
    /\ UNCHANGED <<index, queue, counts, V_1>>

\* If the floor has passed the beginning meanwhile, the reader begins at the floor.
\* core/opendata_buffer/queue/v1_admin.py: add_v1_reader
LookBeforeName ==
    /\ operator.at = "look"
    /\ operator' = IF index.now.floor > operator.begin
                      /\ ~Faulty("the name is written without a look at the floor")
                   THEN [operator EXCEPT !.at = "queue", !.begin = index.now.floor]
                   ELSE [operator EXCEPT !.at = "name", !.known = index.now]
    /\ UNCHANGED <<index, queue, position, counts, V_1>>

\* core/opendata_buffer/queue/log_index.py: LogIndex.with_v1_reader
WriteName ==
    LET new == [operator.known EXCEPT !.named = TRUE, !.changes = @ + 1] IN
    /\ operator.at = "name"
    /\ \E answer \in Put(index, operator.known, new) :
         /\ index' = answer[2]
         /\ operator' = IF answer[1] = "applied" THEN NoOperator
                        ELSE [operator EXCEPT !.at = "look"]
         /\ counts' = IF answer[1] = "applied" THEN [counts EXCEPT !.added = TRUE] ELSE counts
    /\ UNCHANGED <<queue, position, V_1>>

\* One write empties the queue and seals it, so that neither a consumer nor a feeder can use it.
\* core/opendata_buffer/queue/v1_admin.py: close_v1_queue
Seal ==
    LET q == queue.now
        new == [first |-> Next_(q), held |-> <<>>, epoch |-> Sealed] IN
    /\ operator.at \in {"off", "seal"} /\ index.now.named
    /\ operator.at = "off" => counts.deletes < Deletes
    /\ counts' = IF operator.at = "off" THEN [counts EXCEPT !.deletes = @ + 1] ELSE counts
    /\ IF Faulty("the queue of a deleted reader stays")
       THEN operator' = [NoOperator EXCEPT !.at = "drop"] /\ UNCHANGED queue
       ELSE IF q.epoch >= Sealed
       THEN operator' = [NoOperator EXCEPT !.at = "drop"] /\ UNCHANGED queue
       ELSE \E answer \in Put(queue, q, new) :
              /\ queue' = answer[2]
              /\ operator' = [NoOperator EXCEPT !.at = IF answer[1] = "applied" THEN "drop"
                                                       ELSE "seal"]
    /\ UNCHANGED <<index, position, V_1>>

\* core/opendata_buffer/queue/reader_admin.py: unregister
DropPosition ==
    /\ operator.at = "drop"
    /\ position' = Object(None)
    /\ operator' = [operator EXCEPT !.at = "unname", !.known = index.now]
    /\ UNCHANGED <<index, queue, counts, V_1>>

\* core/opendata_buffer/queue/reader_admin.py: unregister
DropName ==
    /\ operator.at = "unname"
    /\ \E answer \in Put(index, operator.known,
                         [operator.known EXCEPT !.named = FALSE, !.changes = @ + 1]) :
         /\ index' = answer[2]
         /\ operator' = IF answer[1] = "applied" THEN NoOperator
                        ELSE [operator EXCEPT !.known = index.now]
         /\ counts' = IF answer[1] = "applied" THEN [counts EXCEPT !.gone = TRUE] ELSE counts
    /\ UNCHANGED <<queue, position, V_1>>

\* The command is killed. It can be repeated.
\* core/opendata_buffer/queue/v1_admin.py: add_v1_reader
EndOperator ==
    /\ operator.at # "off"
    /\ operator' = NoOperator
    /\ UNCHANGED <<index, queue, position, counts, V_1>>

(*--------------------------------- feeders ----------------------------------*)

V_2 == <<log, index, deleted, consumer, collector, operator, acked, told, counts>>

\* A feeder reads the index now and then. It learns of new readers, and may not learn for long that
\* one was deleted.
\* core/opendata_buffer/queue/v1_feed.py: Feeders.find
LookForReaders(f) ==
    /\ ~feeder[f].named /\ index.now.named
    /\ feeder' = [feeder EXCEPT ![f].named = TRUE]
    /\ UNCHANGED <<queue, position, V_2>>

\* What a feeder knows of the log may be old. A feeder next to a producer knows what it has written.
\* core/opendata_buffer/queue/v1_feed.py: Feeder.feed
LookAtLog(f) ==
    /\ feeder[f].named /\ feeder[f].end < log
    /\ feeder' = [feeder EXCEPT ![f].end = log]
    /\ UNCHANGED <<queue, position, V_2>>

\* core/opendata_buffer/queue/v1_feed.py: Feeder.feed
LookAtQueue(f) ==
    /\ feeder[f].named /\ feeder[f].known # queue.now
    /\ feeder' = [feeder EXCEPT ![f].known = queue.now]
    /\ UNCHANGED <<queue, position, V_2>>

\* The last entry must be the log's. If it is not, another producer has written to the queue.
TailIsTheLogs(q) == q.held # <<>> => q.held[Len(q.held)] = Next_(q) - 1

\* The log's entries from the queue's end on, in one compare-and-swap. Without an answer, the queue
\* is read again. A queue that is gone is never created by a feeder.
\* core/opendata_buffer/queue/v1_feed.py: fed
Feed(f) ==
    LET known == feeder[f].known
        from == IF known = None THEN 0
                ELSE IF Faulty("a feeder counts on its own") THEN feeder[f].at
                ELSE Next_(known) IN
    /\ known # None /\ IsOpen(known) /\ from < feeder[f].end
    /\ TailIsTheLogs(known) \/ Faulty("the last entry of the queue is not compared")
    /\ \E to \in (from + 1)..feeder[f].end :
       \E answer \in Put(queue, known,
                         [known EXCEPT !.held = @ \o [i \in 1..(to - from) |-> from + i - 1]]) :
         /\ queue' = answer[2]
         /\ feeder' = IF answer[1] = "applied"
                      THEN [feeder EXCEPT ![f].known = answer[2].now, ![f].at = to]
                      ELSE [feeder EXCEPT ![f].known = None]
    /\ UNCHANGED <<position, V_2>>

\* Any version of the queue that was ever read has a front that is not past the current one.
\* core/opendata_buffer/queue/v1_feed.py: noted
Note(f) ==
    LET known == feeder[f].known
        front == IF known = None THEN 0
                 ELSE IF Faulty("the position is what was fed") THEN Next_(known)
                 ELSE known.first IN
    /\ known # None /\ position.now # None /\ front > position.now
    /\ \E answer \in Put(position, position.now, front) : position' = answer[2]
    /\ UNCHANGED <<queue, feeder, V_2>>

(*------------------------------- v1 consumers -------------------------------*)

V_3 == <<log, index, position, deleted, feeder, collector, operator>>

\* A consumer takes the queue over, and fences the previous one. If there is no queue, it creates
\* one; `readers add` refuses that later. It does not know that an epoch can mean an end.
\* core/opendata_buffer/queue/queue.py: Queue.claim_epoch
Claim(c) ==
    /\ counts.claims < Claims /\ queue.now # None
    /\ counts' = [counts EXCEPT !.claims = @ + 1]
    /\ \E answer \in Put(queue, queue.now, [queue.now EXCEPT !.epoch = @ + 1]) :
         /\ queue' = answer[2]
         /\ consumer' = [consumer EXCEPT ![c] =
              IF answer[1] = "applied"
              THEN [at |-> "on", epoch |-> queue.now.epoch + 1, next |-> queue.now.first,
                    seen |-> None]
              ELSE NoConsumer]
    /\ UNCHANGED <<acked, told, V_3>>

\* It reads the manifest, and then fetches the object of its next entry.
\* core/opendata_buffer/queue/queue.py: Queue.read
Look(c) ==
    /\ consumer[c].at = "on" /\ consumer[c].seen # queue.now
    /\ consumer' = [consumer EXCEPT ![c] =
         IF queue.now = None \/ queue.now.epoch # @.epoch THEN NoConsumer
         ELSE [@ EXCEPT !.seen = queue.now, !.next = Max(@, queue.now.first)]]
    /\ UNCHANGED <<queue, acked, told, counts, V_3>>

\* core/opendata_buffer/consumer/fetch.py: FetchHandle
Fetch(c) ==
    LET me == consumer[c]
        seen == me.seen
        s == me.next
        location == seen.held[s - seen.first + 1]
        mine == queue.now # None /\ queue.now.epoch = me.epoch /\ index.now.named IN
    /\ me.at = "on" /\ seen # None /\ s < Next_(seen)
    /\ consumer' = [consumer EXCEPT ![c].next = s + 1]
    /\ told' = [told EXCEPT
         !["gone"] = IF mine /\ location \in deleted THEN @ \cup {location} ELSE @,
         !["again"] = IF mine /\ s < acked THEN @ \cup {s} ELSE @,
         !["late"] = IF counts.gone /\ queue.now.epoch = me.epoch THEN @ \cup {s} ELSE @]
    /\ UNCHANGED <<queue, acked, counts, V_3>>

\* core/opendata_buffer/queue/queue.py: Queue.dequeue
Dequeue(c) ==
    LET me == consumer[c]
        seen == me.seen IN
    /\ me.at = "on" /\ seen # None /\ seen.first < me.next
    /\ \E through \in (seen.first + 1)..Min(me.next, Next_(seen)) :
         LET new == [seen EXCEPT !.first = through,
                                 !.held = SubSeq(@, through - seen.first + 1, Len(@))] IN
         \E answer \in Put(queue, seen, new) :
           /\ queue' = answer[2]
           /\ acked' = IF answer[1] = "applied" THEN Max(acked, through) ELSE acked
           /\ consumer' = [consumer EXCEPT ![c].seen = IF answer[1] = "applied" THEN new ELSE None]
    /\ UNCHANGED <<told, counts, V_3>>

\* A program that has the wrong manifest appends to the queue.
\* core/opendata_buffer/queue/queue.py: Queue.append
AppendForeign ==
    /\ counts.foreign < Foreign /\ queue.now # None /\ queue.now.epoch < Sealed
    /\ counts' = [counts EXCEPT !.foreign = @ + 1]
    /\ queue' = Object([queue.now EXCEPT !.held = @ \o <<Other>>])
    /\ UNCHANGED <<consumer, acked, told, V_3>>

(*------------------------------- the collector ------------------------------*)

V_4 == <<log, queue, position, feeder, consumer, operator, acked, told, counts>>

\* core/opendata_buffer/gc.py: GarbageCollector
LookBeforeCollection ==
    /\ collector.at = "off"
    /\ collector' = [NoCollector EXCEPT !.at = "reads", !.known = index.now]
    /\ UNCHANGED <<index, deleted, V_4>>

\* A position that is missing counts as being at the floor.
\* core/opendata_buffer/queue/reader_positions.py: read_positions
ReadPosition ==
    /\ collector.at = "reads" /\ collector.found = -1
    /\ collector' = [collector EXCEPT !.found = IF position.now = None THEN collector.known.floor
                                                ELSE position.now]
    /\ UNCHANGED <<index, deleted, V_4>>

\* All other readers have read everything.
\* core/opendata_buffer/queue/log_index.py: LogIndex.with_floor
WriteFloor ==
    LET known == IF Faulty("the position is read before the index") THEN index.now
                 ELSE collector.known
        most == IF collector.known.named THEN collector.found ELSE log IN
    /\ collector.at = "reads" /\ (collector.known.named => collector.found # -1)
    /\ \E floor \in known.floor..Max(known.floor, most) :
         LET new == [known EXCEPT !.floor = floor, !.changes = @ + 1] IN
         \E answer \in IF floor = known.floor THEN {<<"applied", index>>}
                       ELSE Put(index, known, new) :
           /\ index' = answer[2]
           /\ collector' =
                CASE answer[1] = "applied" ->
                       [NoCollector EXCEPT !.at = "deletes",
                          !.known = IF floor = known.floor THEN known ELSE new]
                  \* It reads the index that won, and deletes below its floor.
                  [] answer[1] = "conflict" ->
                       [NoCollector EXCEPT !.at = "deletes", !.known = index.now]
                  \* It tries the same write again.
                  [] OTHER -> collector
    /\ UNCHANGED <<deleted, V_4>>

\* core/opendata_buffer/gc.py: GarbageCollector
Delete ==
    /\ collector.at = "deletes"
    /\ deleted' = deleted \cup 0..(collector.known.floor - 1)
    /\ collector' = NoCollector
    /\ UNCHANGED <<index, V_4>>

\* core/opendata_buffer/testing/faults.py: FaultyStore.put_if
WriteArrives ==
    /\ \/ (\E after \in Arrivals(queue) : queue' = after) /\ UNCHANGED <<index, position>>
       \/ (\E after \in Arrivals(index) : index' = after) /\ UNCHANGED <<queue, position>>
       \/ (\E after \in Arrivals(position) : position' = after) /\ UNCHANGED <<queue, index>>
    /\ UNCHANGED <<log, deleted, feeder, consumer, collector, operator, acked, told, counts>>

Next ==
    \/ AppendToLog \/ AppendForeign
    \/ BeginAdd \/ WriteQueue \/ WritePosition \/ LookBeforeName \/ WriteName
    \/ Seal \/ DropPosition \/ DropName \/ EndOperator
    \/ \E f \in Feeders :
         LookForReaders(f) \/ LookAtLog(f) \/ LookAtQueue(f) \/ Feed(f) \/ Note(f)
    \/ \E c \in Consumers : Claim(c) \/ Look(c) \/ Fetch(c) \/ Dequeue(c)
    \/ LookBeforeCollection \/ ReadPosition \/ WriteFloor \/ Delete \/ WriteArrives

Spec == Init /\ [][Next]_vars

(*------------------------------- invariants --------------------------------*)

\* Each entry of the queue is the log's entry of this sequence, so nothing is skipped or repeated.
\* An entry of another producer is never followed by one of the log.
TheQueueIsTheLog ==
    queue.now # None =>
        /\ \A i \in DOMAIN queue.now.held :
              \/ queue.now.held[i] = queue.now.first + i - 1
              \/ \A j \in i..Len(queue.now.held) : queue.now.held[j] = Other
        /\ Next_(queue.now) <= log + counts.foreign

\* The log keeps everything from the front of the queue on.
TheFloorIsBelowTheFront ==
    index.now.named /\ queue.now # None /\ queue.now.epoch < Sealed
        => index.now.floor <= queue.now.first

\* The position is never past the front.
ThePositionIsBelowTheFront ==
    position.now # None /\ queue.now # None /\ counts.deletes = 0
        => position.now <= queue.now.first

\* No consumer that holds the queue misses an object, or gets an entry that was dequeued.
NothingIsMissed == told["gone"] = {}
NothingIsRedelivered == told["again"] = {}
AcknowledgedStays == queue.now # None => queue.now.first >= acked

\* No consumer gets anything from the queue of a reader that was deleted.
NothingAfterDelete == told["late"] = {}

\* The queue only moves forward.
OnlyForward ==
    [][queue.now # None /\ queue'.now # None
       => /\ queue'.now.first >= queue.now.first /\ Next_(queue'.now) >= Next_(queue.now)
          /\ queue'.now.epoch >= queue.now.epoch]_vars
==============================================================================
