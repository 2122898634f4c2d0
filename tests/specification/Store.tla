-------------------------------- MODULE Store --------------------------------
(* An object that only conditional writes change, and the answers of a store  *)
(* to one. All other modules share this one.                                  *)
(*                                                                            *)
(* A value is its own version: manifests, claims and records never return to  *)
(* an earlier value (failure F11), which the modules state as invariants.     *)
(*                                                                            *)
(* A process that dies takes no further step, and neither does one that is    *)
(* suspended or cut off: every prefix of a behaviour is one, so no module     *)
(* needs an action for it. What such a process has sent may still arrive.     *)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Faults,    \* Names of the faults that are seeded; {} for none.
    None       \* A model value: no value was read, or there is no object.

Faulty(name) == name \in Faults

Max(a, b) == IF a > b THEN a ELSE b
Min(a, b) == IF a < b THEN a ELSE b
Range(sequence) == {sequence[i] : i \in DOMAIN sequence}

(* now: the value. flight: the values of conditional writes that may still be *)
(* applied. All are bound to `now`: a write that is bound to an earlier       *)
(* version never applies (failure F2).                                        *)
Object(value) == [now |-> value, flight |-> {}]

(* The answers to one conditional write of `new` by a process that has read   *)
(* `known`, each with the object after it (core/opendata_buffer/outcomes.py): *)
(*                                                                            *)
(*   applied   written                                                        *)
(*   conflict  surely not written by this request. With the fault             *)
(*             "a proxy repeats writes" it was written before (failure F1)    *)
(*   unknown   not written yet; it may be later, or never (failure F2)        *)
Put(object, known, new) ==
    IF object.now # known
    THEN {<<"conflict", object>>, <<"unknown", object>>}
    ELSE {<<"applied", Object(new)>>,
          <<"unknown", [object EXCEPT !.flight = @ \cup {new}]>>}
         \cup (IF Faulty("a proxy repeats writes")
               THEN {<<"conflict", Object(new)>>} ELSE {})

(* What the object is after one of the writes without an answer has arrived.  *)
Arrivals(object) == {Object(new) : new \in object.flight}
==============================================================================
