----------------------------- MODULE Transactions -----------------------------
(* An app writes batches to all partitions of a topic. Each batch is written  *)
(* completely or not at all, through the app's commit record. Runs of the app *)
(* begin at any time, even next to an earlier run that was only suspended,    *)
(* and end at any step.                                                       *)
(*                                                                            *)
(* An append to a manifest is one step here; Queue.tla shows that this is     *)
(* allowed. It is applied, or its answer is lost and it may arrive as long as *)
(* no other write was applied. A run without an answer reads and repeats, or  *)
(* ends. The record is read and written in two steps.                         *)
(*                                                                            *)
(* A manifest's value is a sequence of [attempt, kind], where `kind` is       *)
(* "pending", "commit" or "rollback". Undecided entries do not leave it. An   *)
(* attempt is [run, batch], like a producer id. The record's value is [run,   *)
(* batch, attempt, decided]. `decided` has all attempts that it ever named;   *)
(* no process reads it.                                                       *)
EXTENDS Store

CONSTANTS
    Partitions,
    Runs,
    Batches      \* The number of batches that the app writes.

VARIABLES record, manifest, run, done

vars == <<record, manifest, run, done>>

Attempt(r) == [run |-> r, batch |-> run[r].batch]
NoAttempt == [run |-> None, batch |-> -1]

Init ==
    /\ record = Object([run |-> None, batch |-> -1, attempt |-> NoAttempt, decided |-> {}])
    /\ manifest = [p \in Partitions |-> Object(<<>>)]
    /\ run = [r \in Runs |->
         [at |-> "off", batch |-> -1, known |-> None, did |-> {}, recovers |-> FALSE,
          noted |-> [p \in Partitions |-> {}], missing |-> {}]]
    /\ done = 0                \* number of batches that the app knows to be written

Is(m, attempt, kind) == [attempt |-> attempt, kind |-> kind] \in Range(m)
Ended(m, attempt) == Is(m, attempt, "commit") \/ Is(m, attempt, "rollback")
Undecided(m) == {a \in {entry.attempt : entry \in Range(m)} : ~Ended(m, a)}

(* One append of `entries` to a partition: applied or unknown, each with the  *)
(* resulting manifests. Without entries nothing is written.                   *)
Appends(p, entries) ==
    LET m == manifest[p] IN
    IF entries = <<>> THEN {<<"applied", manifest>>} ELSE
    {<<"applied", [manifest EXCEPT ![p] = Object(m.now \o entries)]>>,
     <<"unknown", [manifest EXCEPT ![p].flight = @ \cup {m.now \o entries}]>>}

RECURSIVE Series(_)
Series(set) == IF set = {} THEN <<>>
               ELSE LET one == CHOOSE x \in set : TRUE IN <<one>> \o Series(set \ {one})

(* Markers of the given attempts that are undecided in the same manifest.     *)
Markers(p, attempts, kind) ==
    Series({[attempt |-> a, kind |-> kind] :
              a \in {b \in attempts : \/ b \in Undecided(manifest[p].now)
                                      \/ Faulty("a marker without a read")}})

Become(r, at) == run' = [run EXCEPT ![r].at = at, ![r].did = {}, ![r].known = None]

(*--------------------------------- begin -----------------------------------*)

\* A restarted query repeats a batch that its checkpoint lacks, or an operator recovers.
\* core/opendata_buffer/transactions.py: TransactionCoordinator.begin
\* core/opendata_buffer/transactions.py: TransactionCoordinator.recover
LookBeforeClaim(r) ==
    /\ run[r].at = "off"
    /\ \E batch \in ({done, done - 1} \cap 0..(Batches - 1)) \cup {Batches} :
         /\ run[r].batch # -1 => batch = run[r].batch
         /\ run' = [run EXCEPT ![r].at = "claim", ![r].known = record.now, ![r].batch = batch,
                               ![r].recovers = batch = Batches]
    /\ UNCHANGED <<record, manifest, done>>

IsRepeat(r, known) ==
    known.batch >= run[r].batch /\ ~Faulty("a committed batch is written again")

\* core/opendata_buffer/transactions.py: OwnedRecord.claim
WriteClaim(r) ==
    LET known == run[r].known
        new == [known EXCEPT !.run = r] IN
    /\ run[r].at = "claim"
    /\ IF IsRepeat(r, known) \/ known.run = r
       THEN /\ run' = [run EXCEPT ![r].at = "read"]
            /\ UNCHANGED record
       ELSE \E answer \in Put(record, known, new) :
              /\ record' = answer[2]
              /\ run' = [run EXCEPT ![r].at = IF answer[1] = "applied" THEN "read" ELSE "off",
                           ![r].known = IF answer[1] = "applied" THEN new ELSE None]
    /\ UNCHANGED <<manifest, done>>

\* Undecided attempts are noted before the record is read or written again.
\* core/opendata_buffer/transactions.py: OwnedRecord.note_undecided
\* core/opendata_buffer/transactions.py: TransactionCoordinator._claim
ReadManifest(r, p) ==
    LET found == Undecided(manifest[p].now)
        named == run[r].known.attempt
        missing == named \in found /\ ~Faulty("the previous batch is not completed") IN
    /\ run[r].at = "read" /\ p \notin run[r].did
    /\ run' = [run EXCEPT ![r].did = @ \cup {p}, ![r].noted[p] = found \ {named},
                          ![r].missing = IF missing THEN @ \cup {p} ELSE @]
    /\ UNCHANGED <<record, manifest, done>>

\* The missing markers of the batch that the record names.
\* core/opendata_buffer/transactions.py: MarkerWriter.write
CompleteEarlier(r, p) ==
    /\ run[r].at = "read" /\ run[r].did = Partitions /\ p \in run[r].missing
    /\ \E answer \in Appends(p, Markers(p, {run[r].known.attempt}, "commit")) :
         /\ manifest' = answer[2]
         /\ run' = IF answer[1] = "applied" THEN [run EXCEPT ![r].missing = @ \ {p}] ELSE run
    /\ UNCHANGED <<record, done>>

\* core/opendata_buffer/transactions.py: TransactionCoordinator.begin
Begin(r) ==
    /\ run[r].at = "read" /\ run[r].did = Partitions /\ run[r].missing = {}
    /\ IF run[r].recovers
       THEN Become(r, IF Faulty("a roll-back without reading the record")
                      THEN "rolls back" ELSE "asks") /\ UNCHANGED done
       ELSE IF IsRepeat(r, run[r].known)
       THEN Become(r, "ended") /\ done' = Max(done, run[r].batch + 1)
       ELSE /\ run' = [run EXCEPT ![r].at = "append", ![r].did = {}]
            /\ UNCHANGED done
    /\ UNCHANGED <<record, manifest>>

\* All noted attempts belong to earlier runs if the record still names this run.
\* core/opendata_buffer/transactions.py: OwnedRecord.is_owned
AskRecord(r) ==
    /\ run[r].at = "asks"
    /\ Become(r, IF record.now.run = r THEN "rolls back" ELSE "ended")
    /\ UNCHANGED <<record, manifest, done>>

\* core/opendata_buffer/transactions.py: TransactionCoordinator._end
RollBackNoted(r, p) ==
    /\ run[r].at = "rolls back" /\ p \notin run[r].did
    /\ \E answer \in Appends(p, Markers(p, run[r].noted[p], "rollback")) :
         /\ manifest' = answer[2]
         /\ run' = IF answer[1] = "applied" THEN [run EXCEPT ![r].did = @ \cup {p}] ELSE run
    /\ UNCHANGED <<record, done>>

(*------------------------------ one attempt --------------------------------*)

\* buffer_sink/committer.py: TopicCommitter.append
\* core/opendata_buffer/queue/queue.py: Queue.append
AppendPending(r, p) ==
    /\ run[r].at = "append" /\ p \notin run[r].did
    /\ ~Is(manifest[p].now, Attempt(r), "pending")
    /\ \E answer \in Appends(p, <<[attempt |-> Attempt(r), kind |-> "pending"]>>) :
         /\ manifest' = answer[2]
         /\ run' = IF answer[1] = "applied"
              THEN [run EXCEPT ![r].did = @ \cup {p},
                     ![r].noted[p] = @ \cup (Undecided(manifest[p].now) \ {Attempt(r)})]
              ELSE run
    /\ UNCHANGED <<record, done>>

\* An append whose answer was lost has arrived in the meantime.
\* core/opendata_buffer/queue/queue.py: _Append.find
FindPending(r, p) ==
    /\ run[r].at = "append" /\ p \notin run[r].did
    /\ Is(manifest[p].now, Attempt(r), "pending")
    /\ run' = [run EXCEPT ![r].did = @ \cup {p},
                 ![r].noted[p] = @ \cup (Undecided(manifest[p].now) \ {Attempt(r)})]
    /\ UNCHANGED <<record, manifest, done>>

\* core/opendata_buffer/transactions.py: TransactionCoordinator.decide
BeginDecision(r) ==
    /\ run[r].at = "append" /\ run[r].did = Partitions
    /\ run' = [run EXCEPT ![r].at = "decide", ![r].did = {}]
    /\ UNCHANGED <<record, manifest, done>>

\* The record is written from memory. After a lost race or a lost answer it is read.
\* core/opendata_buffer/transactions.py: OwnedRecord.decide
\* core/opendata_buffer/transactions.py: OwnedRecord.verdict
Decide(r) ==
    LET known == run[r].known
        new == [known EXCEPT !.batch = run[r].batch, !.attempt = Attempt(r),
                             !.decided = @ \cup {Attempt(r)}]
        owned == known.run = r \/ Faulty("a decision of any run") IN
    /\ run[r].at = "decide"
    /\ IF known.attempt = Attempt(r)
       THEN run' = [run EXCEPT ![r].at = "complete"] /\ UNCHANGED record
       ELSE IF ~owned \/ IsRepeat(r, known)
       THEN run' = [run EXCEPT ![r].at = "abandon"] /\ UNCHANGED record
       ELSE \E answer \in Put(record, known, new) :
              /\ record' = answer[2]
              /\ run' = [run EXCEPT
                   ![r].at = IF answer[1] = "applied" THEN "complete"
                             ELSE IF answer[1] = "unknown" /\ Faulty("an unknown decision counts as no decision")
                             THEN "abandon" ELSE "look",
                   ![r].known = IF answer[1] = "applied" THEN new ELSE known]
    /\ UNCHANGED <<manifest, done>>

\* core/opendata_buffer/queue/cas.py: CasObject._attempt
LookBeforeDecision(r) ==
    /\ run[r].at = "look"
    /\ run' = [run EXCEPT ![r].at = "decide", ![r].known = record.now]
    /\ UNCHANGED <<record, manifest, done>>

\* core/opendata_buffer/transactions.py: TransactionCoordinator.abandon
Abandon(r, p) ==
    /\ run[r].at = "abandon" /\ p \notin run[r].did
    /\ \E answer \in Appends(p, Markers(p, {Attempt(r)}, "rollback")) :
         /\ manifest' = answer[2]
         /\ run' = IF answer[1] = "applied" THEN [run EXCEPT ![r].did = @ \cup {p}] ELSE run
    /\ UNCHANGED <<record, done>>

\* core/opendata_buffer/transactions.py: TransactionCoordinator.complete
\* core/opendata_buffer/transactions.py: MarkerWriter.write
Complete(r, p) ==
    /\ run[r].at = "complete" /\ p \notin run[r].did
    /\ \E answer \in Appends(p, Markers(p, {Attempt(r)}, "commit")
                                \o Markers(p, run[r].noted[p], "rollback")) :
         /\ manifest' = answer[2]
         /\ run' = IF answer[1] = "applied" THEN [run EXCEPT ![r].did = @ \cup {p}] ELSE run
    /\ UNCHANGED <<record, done>>

\* The same run continues with the next batch, without a claim.
\* core/opendata_buffer/transactions.py: OwnedRecord.continues
EndAttempt(r) ==
    LET completed == run[r].did = Partitions \/ Faulty("a batch before the markers of the previous one")
    IN
    /\ \/ /\ run[r].at \in {"abandon", "rolls back"} /\ run[r].did = Partitions
          /\ Become(r, "ended") /\ UNCHANGED done
       \/ /\ run[r].at = "complete" /\ completed
          /\ done' = Max(done, run[r].batch + 1)
          /\ IF run[r].batch + 1 < Batches
             THEN run' = [run EXCEPT ![r].at = "append", ![r].did = {}, ![r].batch = @ + 1,
                            ![r].noted = [p \in Partitions |-> {}]]
             ELSE Become(r, "ended")
    /\ UNCHANGED <<record, manifest>>

(*-------------------------------- the store --------------------------------*)

\* core/opendata_buffer/testing/faults.py: FaultyStore.put_if
RecordArrives ==
    /\ \E after \in Arrivals(record) : record' = after
    /\ UNCHANGED <<manifest, run, done>>

\* core/opendata_buffer/testing/faults.py: FaultyStore.put_if
ManifestArrives(p) ==
    /\ \E after \in Arrivals(manifest[p]) : manifest' = [manifest EXCEPT ![p] = after]
    /\ UNCHANGED <<record, run, done>>

Next ==
    \/ \E r \in Runs :
         \/ LookBeforeClaim(r) \/ WriteClaim(r) \/ Begin(r) \/ AskRecord(r)
         \/ BeginDecision(r) \/ Decide(r) \/ LookBeforeDecision(r) \/ EndAttempt(r)
         \/ \E p \in Partitions :
              \/ ReadManifest(r, p) \/ CompleteEarlier(r, p) \/ RollBackNoted(r, p)
              \/ AppendPending(r, p) \/ FindPending(r, p) \/ Abandon(r, p) \/ Complete(r, p)
    \/ RecordArrives
    \/ \E p \in Partitions : ManifestArrives(p)

Spec == Init /\ [][Next]_vars

(*------------------------------- invariants --------------------------------*)

Attempts == {entry.attempt : entry \in UNION {Range(manifest[p].now) : p \in Partitions}}
Somewhere(a, kind) == \E p \in Partitions : Is(manifest[p].now, a, kind)

\* No attempt is committed in one partition and rolled back in another.
AllOrNothing ==
    \A a \in Attempts : ~(Somewhere(a, "commit") /\ Somewhere(a, "rollback"))

\* An attempt that the record names is never rolled back, and no other one is committed.
TheRecordDecides ==
    \A a \in Attempts :
        IF a \in record.now.decided THEN ~Somewhere(a, "rollback") ELSE ~Somewhere(a, "commit")

\* A decided attempt is in all partitions.
DecidedIsThere ==
    \A a \in record.now.decided, p \in Partitions : Is(manifest[p].now, a, "pending")

\* No batch is committed by two attempts.
EachBatchOnce == \A a, b \in record.now.decided : a.batch = b.batch => a = b

\* A batch that the app knows to be written is visible in all partitions.
DoneIsVisible ==
    \A batch \in 0..(done - 1) : \E a \in record.now.decided :
        /\ a.batch = batch
        /\ \A p \in Partitions : Is(manifest[p].now, a, "commit")

\* An attempt ends once in a partition, and none of its entries come after that.
EndsOnce ==
    \A p \in Partitions : \A i, j \in DOMAIN manifest[p].now :
        i < j /\ manifest[p].now[i].attempt = manifest[p].now[j].attempt
        => manifest[p].now[i].kind = "pending" /\ manifest[p].now[j].kind # "pending"

\* The record never returns to an earlier value.
OnlyForward == [][record'.now.batch >= record.now.batch
                  /\ record.now.decided \subseteq record'.now.decided]_vars
==============================================================================
