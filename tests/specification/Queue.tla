-------------------------------- MODULE Queue --------------------------------
(* One queue: producers and sinks, consumers with epochs, a collector, and a  *)
(* store that loses answers.                                                  *)
(*                                                                            *)
(* The manifest's value is [first, epoch, log, fencedAck]. `log` has every    *)
(* entry that was ever appended. Entries before `first` have left the         *)
(* manifest, and no process reads them. Sequences begin at 0, so entry `s` is *)
(* log[s + 1]. An entry is [producer, round, part, named]. The first three    *)
(* fields identify a record, and the time identifies its upload. `fencedAck`  *)
(* records that a fenced consumer acknowledged; no process reads it.          *)
EXTENDS Store

CONSTANTS
    Producers,   \* Processes that append; the next sets are subsets of it.
    Sinks,       \* Follow the rules of the Spark sink: names are ahead of time.
    Slow,        \* The clock that dates their names is behind by 2.
    Pairs,       \* Append two entries at once.
    Twice,       \* Append a second time, from memory.
    Consumers,
    Grace,       \* The collector's grace period, a multiple of 4; 0 means no collector.
    Skew,        \* How far the collector's clock is ahead of the store's.
    MaxTime,     \* Time ends here.
    MaxEpoch

VARIABLES manifest, objects, now, producer, told, consumer, acked, saved, again, collector

vars == <<manifest, objects, now, producer, told, consumer, acked, saved, again, collector>>

Size == [p \in Producers |-> IF p \in Pairs THEN 2 ELSE 1]
Rounds == [p \in Producers |-> IF p \in Twice THEN 2 ELSE 1]
Ahead == [p \in Producers |-> IF p \in Slow THEN -2 ELSE IF p \in Sinks THEN 2 ELSE 0]

Half == Grace \div 2
Window == Grace \div 4

End(m) == Len(m.log)                       \* the sequence of the next entry
Queued(m) == {m.log[i] : i \in (m.first + 1)..Len(m.log)}
Upload(entry) == [producer |-> entry.producer, round |-> entry.round, named |-> entry.named]

Init ==
    /\ manifest = Object([first |-> 0, epoch |-> 0, log |-> <<>>, fencedAck |-> FALSE])
    /\ objects = {}                          \* [name, stored]: the upload, and its time
    /\ now = 0
    /\ producer = [p \in Producers |->
         [at |-> "idle", round |-> 1, named |-> 0, born |-> 0, known |-> None, lost |-> FALSE,
          waits |-> 0]]
    /\ told = [p \in Producers |-> <<>>]     \* the results that callers got, one for each round
    /\ consumer = [c \in Consumers |->
         [at |-> "off", epoch |-> 0, next |-> 0, acked |-> 0, known |-> None]]
    /\ acked = 0                             \* sequences before it were confirmed as acknowledged
    /\ saved = 0                             \* sequences before it were delivered, in order
    /\ again = FALSE                         \* an acknowledged sequence was delivered
    /\ collector = [at |-> "off", page |-> {}, read |-> 0]

(*------------------------------- producers ---------------------------------*)

Name(p) == [producer |-> p, round |-> producer[p].round, named |-> producer[p].named]
Stored(name) == {o \in objects : o.name = name}

(* A producer measures the age of a batch from the moment when it made the    *)
(* name, by the rate of its own clock. The sink measures it as a collector    *)
(* does: from the later of name and upload.                                   *)
Age(p) == now - producer[p].born

Entries(p) == [k \in 1..Size[p] |->
    [producer |-> p, round |-> producer[p].round, part |-> k, named |-> producer[p].named]]

Holds(m, p) == Entries(p)[Size[p]] \in Queued(m)    \* the last entry of the group

(* The time at which the name was made. An upload takes no time here, and its *)
(* real time in a trace (TraceQueue.tla).                                     *)
Made(p) == now
NameAt(p, made) == made + Ahead[p]

Store_(p, at) ==
    LET name == NameAt(p, Made(p))
        born == IF p \in Sinks THEN Max(name, Made(p)) ELSE Made(p) IN
    /\ objects' = objects \cup {[name |-> [producer |-> p, round |-> producer[p].round,
                                           named |-> name], stored |-> now]}
    /\ producer' = [producer EXCEPT ![p].at = at, ![p].named = name, ![p].born = born]

\* core/opendata_buffer/producer/uploader.py: Uploader.upload
UploadBatches(p) ==
    /\ producer[p].at = "idle" /\ producer[p].round <= Rounds[p]
    /\ Store_(p, "ready")
    /\ UNCHANGED <<manifest, now, told, consumer, acked, saved, again, collector>>

\* core/opendata_buffer/producer/ordered_uploads.py: OrderedUploads.take
UploadAgain(p) ==
    /\ producer[p].at = "ready" /\ p \notin Sinks
    /\ Age(p) > Half
    /\ Store_(p, "ready")
    /\ UNCHANGED <<manifest, now, told, consumer, acked, saved, again, collector>>

\* core/opendata_buffer/producer/ordered_uploads.py: OrderedUploads.take
\* buffer_sink/committer.py: UploadAges.oldest
BeginAppend(p) ==
    /\ producer[p].at = "ready"
    /\ Age(p) <= Half \/ Grace = 0
    /\ p \in Sinks => Stored(Name(p)) # {}
    /\ \E at \in {"look"} \cup (IF producer[p].known = None THEN {} ELSE {"write"}) :
         producer' = [producer EXCEPT ![p].at = at, ![p].lost = FALSE]
    /\ UNCHANGED <<manifest, objects, now, told, consumer, acked, saved, again, collector>>

\* Before every attempt except one from memory: is an earlier attempt in the manifest?
\* core/opendata_buffer/queue/cas.py: CasObject._attempt
\* core/opendata_buffer/queue/queue.py: _Append.find
LookBeforeAppend(p) ==
    LET m == manifest.now
        known == producer[p].known
        found == Holds(m, p) /\ ~Faulty("no search for a lost append")
        gone == producer[p].lost /\ End(known) < m.first
                /\ ~Faulty("a dequeued entry counts as never written") IN
    /\ producer[p].at = "look"
    /\ IF found THEN producer' = [producer EXCEPT ![p].at = "landed", ![p].known = m]
       ELSE IF gone THEN producer' = [producer EXCEPT ![p].at = "unknown", ![p].known = m]
       ELSE producer' = [producer EXCEPT ![p].at = "write", ![p].known = m,
              \* A lost attempt at the current version may still be applied.
              ![p].lost = @ /\ known = m /\ ~Faulty("a lost answer is looked up once")]
    /\ UNCHANGED <<manifest, objects, now, told, consumer, acked, saved, again, collector>>

\* core/opendata_buffer/queue/cas.py: CasObject._write
\* buffer_sink/committer.py: UploadCommitter._append_unexpired
WriteAppend(p) ==
    LET known == producer[p].known
        new == [known EXCEPT !.log = @ \o Entries(p)] IN
    /\ producer[p].at = "write"
    /\ p \in Sinks /\ Grace > 0 => Age(p) <= Grace
    /\ \E answer \in Put(manifest, known, new) :
         /\ manifest' = answer[2]
         /\ producer' = [producer EXCEPT
              ![p].at = IF answer[1] = "applied" THEN "landed" ELSE "look",
              ![p].known = IF answer[1] = "applied" THEN new ELSE known,
              ![p].lost = @ \/ answer[1] = "unknown"]
    /\ UNCHANGED <<objects, now, told, consumer, acked, saved, again, collector>>

Tell(p, outcome) ==
    /\ told' = [told EXCEPT ![p] = Append(@, outcome)]
    /\ producer' = [producer EXCEPT ![p] = [@ EXCEPT
         !.at = "idle", !.round = @ + 1, !.named = 0, !.born = 0, !.lost = FALSE, !.waits = 0]]

\* Certainly not written: the batches go back, and may be stored again.
\* core/opendata_buffer/producer/ordered_uploads.py: OrderedUploads.refused
Refuse(p) ==
    /\ producer[p].at = "write" /\ ~producer[p].lost
    /\ producer' = [producer EXCEPT ![p].at = "ready"]
    /\ UNCHANGED <<manifest, objects, now, told, consumer, acked, saved, again, collector>>

\* The callers' deadline: attempts in doubt are unknown, and the rest has failed.
\* core/opendata_buffer/producer/ordered_uploads.py: OrderedUploads.expire
GiveUp(p) ==
    /\ producer[p].at \in {"ready", "look", "write", "unknown"}
    /\ Tell(p, IF producer[p].at \in {"look", "unknown"} \/ producer[p].lost
               THEN "unknown" ELSE "failed")
    /\ UNCHANGED <<manifest, objects, now, consumer, acked, saved, again, collector>>

\* core/opendata_buffer/producer/ordered_uploads.py: OrderedUploads.landed
\* core/opendata_buffer/producer/sender.py: Sender._repair
Land(p) ==
    /\ producer[p].at = "landed"
    /\ IF Grace = 0 \/ Age(p) <= Grace \/ Faulty("a late append is believed")
       THEN Tell(p, "durable") /\ UNCHANGED objects
       ELSE IF p \in Sinks
       THEN /\ producer' = [producer EXCEPT ![p].at = "check", ![p].waits = now]
            /\ UNCHANGED <<told, objects>>
       ELSE /\ Tell(p, "unknown")
            /\ objects' = objects \cup {[name |-> Name(p), stored |-> now]}
    /\ UNCHANGED <<manifest, now, consumer, acked, saved, again, collector>>

\* A collector uses one manifest for deletes for a quarter of the grace period.
\* buffer_sink/committer.py: UploadAges.outlived_collector
CheckLateUploads(p) ==
    /\ producer[p].at = "check"
    /\ now > producer[p].waits + Window \/ Faulty("the append does not wait for the collector")
    /\ Tell(p, IF Stored(Name(p)) # {} THEN "durable" ELSE "unknown")
    /\ UNCHANGED <<manifest, objects, now, consumer, acked, saved, again, collector>>

(*------------------------------- consumers ---------------------------------*)

\* A new consumer, with or without a position that its target has saved.
\* core/opendata_buffer/queue/queue.py: Queue.claim_epoch
\* core/opendata_buffer/queue/stored_manifest.py: check_resume
LookBeforeClaim(c) ==
    /\ consumer[c].at = "off"
    /\ manifest.now.epoch < MaxEpoch
    /\ \E position \in {0} \cup (IF saved >= manifest.now.first THEN {saved} ELSE {}) :
         consumer' = [consumer EXCEPT ![c].at = "claim", ![c].known = manifest.now,
                                      ![c].next = position]
    /\ UNCHANGED <<manifest, objects, now, producer, told, acked, saved, again, collector>>

\* After a lost answer it does not search for its write; it raises the epoch once more.
\* core/opendata_buffer/queue/queue.py: Queue.claim_epoch
WriteClaim(c) ==
    LET known == consumer[c].known
        first == Max(known.first, consumer[c].next)
        new == [known EXCEPT !.epoch = @ + 1, !.first = first] IN
    /\ consumer[c].at = "claim"
    /\ \E answer \in Put(manifest, known, new) :
         /\ manifest' = answer[2]
         /\ consumer' = [consumer EXCEPT ![c] =
              IF answer[1] = "applied"
              THEN [at |-> "own", epoch |-> new.epoch, next |-> first, acked |-> first,
                    known |-> None]
              ELSE [@ EXCEPT !.at = "off", !.known = None, !.next = 0]]
    /\ UNCHANGED <<objects, now, producer, told, acked, saved, again, collector>>

Ended == [at |-> "ended", epoch |-> 0, next |-> 0, acked |-> 0, known |-> None]

\* core/opendata_buffer/consumer/owned_queue.py: OwnedQueue.read
\* core/opendata_buffer/consumer/opening.py: check_data_loss
HandOut(c) ==
    LET m == manifest.now
        s == consumer[c].next IN
    /\ consumer[c].at = "own"
    /\ IF m.epoch # consumer[c].epoch \/ m.first > s
       THEN consumer' = [consumer EXCEPT ![c] = Ended] /\ UNCHANGED <<saved, again>>
       ELSE /\ s < End(m)
            /\ consumer' = [consumer EXCEPT ![c].next = s + 1]
            /\ saved' = Max(saved, s + 1)
            /\ again' = (again \/ s < acked)
    /\ UNCHANGED <<manifest, objects, now, producer, told, acked, collector>>

\* core/opendata_buffer/queue/queue.py: Queue.check_epoch
LookBeforeAcknowledge(c) ==
    LET m == manifest.now IN
    /\ consumer[c].at = "own" /\ consumer[c].acked < consumer[c].next
    /\ consumer' = [consumer EXCEPT ![c] =
         IF m.epoch # consumer[c].epoch /\ ~Faulty("no epoch at acknowledgement")
         THEN Ended ELSE [@ EXCEPT !.at = "ack", !.known = m]]
    /\ UNCHANGED <<manifest, objects, now, producer, told, acked, saved, again, collector>>

\* core/opendata_buffer/queue/queue.py: Queue.dequeue
WriteAcknowledge(c) ==
    LET known == IF Faulty("the epoch is compared before the last read")
                 THEN manifest.now ELSE consumer[c].known
        through == IF Faulty("one entry too many is acknowledged")
                   THEN Min(consumer[c].next + 1, End(known)) ELSE consumer[c].next
        new == [known EXCEPT !.first = through,
                             !.fencedAck = @ \/ known.epoch # consumer[c].epoch] IN
    /\ consumer[c].at = "ack"
    /\ \E answer \in IF known.first >= through THEN {<<"applied", manifest>>}
                     ELSE Put(manifest, known, new) :
         /\ manifest' = answer[2]
         /\ IF answer[1] = "applied" \/ (answer[1] = "unknown"
                                         /\ Faulty("a lost acknowledgement is believed"))
            THEN /\ acked' = Max(acked, consumer[c].next)
                 /\ consumer' = [consumer EXCEPT ![c] =
                      [@ EXCEPT !.at = "own", !.acked = consumer[c].next, !.known = None]]
            ELSE /\ consumer' = [consumer EXCEPT ![c] = [@ EXCEPT !.at = "own", !.known = None]]
                 /\ UNCHANGED acked
    /\ UNCHANGED <<objects, now, producer, told, saved, again, collector>>

(*------------------------------- collector ---------------------------------*)

(* The time at which an object was written, as the collector sees it.         *)
Written(o) ==
    IF Faulty("the age comes from the store's date alone") THEN o.stored
    ELSE IF Faulty("the age comes from the name alone") THEN o.name.named
    ELSE Max(o.stored, o.name.named)

Newest ==
    IF Faulty("the collector's own clock is believed") THEN now + Skew
    ELSE Min(now, now + Skew)

IsOld(o) == Written(o) < Newest - Grace \/ Faulty("no grace period")

Unqueued(page, m) ==
    LET oldest == m.log[m.first + 1].named IN
    {o \in page : /\ \A entry \in Queued(m) : Upload(entry) # o.name
                  /\ End(m) > m.first => o.name.named < oldest}

\* core/opendata_buffer/gc.py: GarbageCollector._pages
\* core/opendata_buffer/gc.py: plan
ListObjects ==
    /\ Grace > 0 /\ collector.at = "off"
    /\ \E o \in objects : IsOld(o)
    /\ collector' = [at |-> "listed", page |-> {o \in objects : IsOld(o)}, read |-> 0]
    /\ UNCHANGED <<manifest, objects, now, producer, told, consumer, acked, saved, again>>

(* A fault swaps the two steps: the listing after the manifest then only has  *)
(* objects that the manifest did not name.                                    *)
ReadBeforeListing ==
    /\ Faulty("the manifest is read before the listing")
    /\ Grace > 0 /\ collector.at = "off" /\ objects # {}
    /\ collector' = [at |-> "turned", page |-> Unqueued(objects, manifest.now), read |-> now]
    /\ UNCHANGED <<manifest, objects, now, producer, told, consumer, acked, saved, again>>

ListAfterReading ==
    /\ collector.at = "turned"
    /\ collector' = [collector EXCEPT !.at = "deletes", !.page = {o \in @ : IsOld(o)}]
    /\ UNCHANGED <<manifest, objects, now, producer, told, consumer, acked, saved, again>>

\* The manifest is read after the listing, so it has entries that were appended in between.
\* core/opendata_buffer/gc.py: GarbageCollector._page
ReadAfterListing ==
    /\ collector.at = "listed"
    /\ collector' = [at |-> "deletes", page |-> Unqueued(collector.page, manifest.now),
                     read |-> now]
    /\ UNCHANGED <<manifest, objects, now, producer, told, consumer, acked, saved, again>>

\* core/opendata_buffer/gc.py: GarbageCollector._delete
DeleteObject ==
    /\ collector.at = "deletes"
    /\ now - collector.read <= Window \/ Faulty("an old manifest is used for deletes")
    /\ \E o \in collector.page :
         /\ objects' = {each \in objects : each.name # o.name}
         /\ collector' = [collector EXCEPT !.page = @ \ {o}]
    /\ UNCHANGED <<manifest, now, producer, told, consumer, acked, saved, again>>

\* core/opendata_buffer/gc.py: GarbageCollector._delete
EndPage ==
    /\ collector.at = "deletes"
    /\ collector' = [at |-> "off", page |-> {}, read |-> 0]
    /\ UNCHANGED <<manifest, objects, now, producer, told, consumer, acked, saved, again>>

(*------------------------- the store and the clock -------------------------*)

\* core/opendata_buffer/testing/faults.py: FaultyStore.put_if
WriteArrives ==
    /\ \E after \in Arrivals(manifest) : manifest' = after
    /\ UNCHANGED <<objects, now, producer, told, consumer, acked, saved, again, collector>>

\* core/opendata_buffer/testing/runtime.py: ManualRuntime.advance
Tick ==
    /\ now < MaxTime
    /\ now' = now + 1
    /\ UNCHANGED <<manifest, objects, producer, told, consumer, acked, saved, again, collector>>

Next ==
    \/ \E p \in Producers :
         \/ UploadBatches(p) \/ UploadAgain(p) \/ BeginAppend(p) \/ LookBeforeAppend(p)
         \/ WriteAppend(p) \/ Refuse(p) \/ GiveUp(p) \/ Land(p) \/ CheckLateUploads(p)
    \/ \E c \in Consumers :
         \/ LookBeforeClaim(c) \/ WriteClaim(c) \/ HandOut(c)
         \/ LookBeforeAcknowledge(c) \/ WriteAcknowledge(c)
    \/ ListObjects \/ ReadBeforeListing \/ ListAfterReading \/ ReadAfterListing \/ DeleteObject \/ EndPage
    \/ WriteArrives \/ Tick

Spec == Init /\ [][Next]_vars

(*------------------------------- invariants --------------------------------*)

Records(m) == [i \in DOMAIN m.log |-> <<m.log[i].producer, m.log[i].round, m.log[i].part>>]
Places(p, r) == {i \in DOMAIN manifest.now.log :
                   manifest.now.log[i].producer = p /\ manifest.now.log[i].round = r}
Said(outcome) == {pr \in Producers \X (1..2) :
                    pr[2] \in DOMAIN told[pr[1]] /\ told[pr[1]][pr[2]] = outcome}

\* No durable record is lost: it is queued and its object exists, or it was delivered.
NothingDurableIsLost ==
    \A pr \in Said("durable") :
        /\ Cardinality(Places(pr[1], pr[2])) = Size[pr[1]]
        /\ \A i \in Places(pr[1], pr[2]) :
             i > manifest.now.first => Stored(Upload(manifest.now.log[i])) # {}

\* No record is queued twice.
NothingIsAppendedTwice ==
    \A i, j \in DOMAIN manifest.now.log :
        i # j => Records(manifest.now)[i] # Records(manifest.now)[j]

\* A record that was reported failed is not queued, and never will be.
FailedIsAbsent ==
    \A pr \in Said("failed") : Places(pr[1], pr[2]) = {}

\* A group is appended in one piece.
GroupsAreWhole ==
    \A i \in DOMAIN manifest.now.log :
        LET e == manifest.now.log[i] IN
        /\ e.part > 1 => i > 1 /\ manifest.now.log[i - 1] = [e EXCEPT !.part = @ - 1]
        /\ e.part < Size[e.producer] => i < Len(manifest.now.log)

\* No entry leaves the queue before it was delivered.
NothingIsSkipped == manifest.now.first <= saved

\* No acknowledged entry is delivered again.
NothingIsRedelivered == ~again

\* A fenced consumer never acknowledges.
NoFencedAcknowledgement == ~manifest.now.fencedAck

\* Sequences, epochs, and `first` only grow, so a manifest never returns to an earlier value.
OnlyForward ==
    [][/\ manifest'.now.first >= manifest.now.first
       /\ manifest'.now.epoch >= manifest.now.epoch
       /\ SubSeq(manifest'.now.log, 1, Len(manifest.now.log)) = manifest.now.log]_vars
==============================================================================
