-------------------------------- MODULE Store --------------------------------
(* An object that only conditional writes change, and the store's answers to  *)
(* such a write. All other modules share this one.                            *)
(*                                                                            *)
(* A value is its own version: manifests, claims and records never return to  *)
(* an earlier value (failure F11), which the modules state as invariants.     *)
(*                                                                            *)
(* A process that dies takes no further step. The same holds for one that is  *)
(* suspended or cut off. Every prefix of a behaviour is a behaviour, so no    *)
(* module needs an action for this. Requests that such a process has sent may *)
(* still arrive.                                                              *)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Faults,    \* Names of the seeded faults; {} if there are none.
    None       \* A model value: no value was read, or the object does not exist.

Faulty(name) == name \in Faults

Max(a, b) == IF a > b THEN a ELSE b
Min(a, b) == IF a < b THEN a ELSE b
Range(sequence) == {sequence[i] : i \in DOMAIN sequence}

(* now: the value. flight: the values of conditional writes that may still be *)
(* applied. All are bound to `now`: a write that is bound to an earlier       *)
(* version never applies (failure F2).                                        *)
Object(value) == [now |-> value, flight |-> {}]

(* The possible answers to a conditional write of `new` by a process that has *)
(* read `known`, each with the resulting object                               *)
(* (core/opendata_buffer/outcomes.py):                                        *)
(*                                                                            *)
(*   applied   written                                                        *)
(*   conflict  certainly not written by this request. With the fault          *)
(*             "a proxy repeats writes" it was written before (failure F1)    *)
(*   unknown   not written yet; it may be later, or never (failure F2)        *)
Put(object, known, new) ==
    IF object.now # known
    THEN {<<"conflict", object>>, <<"unknown", object>>}
    ELSE {<<"applied", Object(new)>>,
          <<"unknown", [object EXCEPT !.flight = @ \cup {new}]>>}
         \cup (IF Faulty("a proxy repeats writes")
               THEN {<<"conflict", Object(new)>>} ELSE {})

(* The object after one of the writes without an answer has arrived.          *)
Arrivals(object) == {Object(new) : new \in object.flight}
==============================================================================
