// Judges a history of a queue: whether one log with one owner at a time could have answered so.
//
//	log queue|reader|work CALLS.jsonl
//
// Porcupine searches the order of the calls; here is only what each may answer. One line of JSON says
// whether there is an order, and if not, which of the calls found no place in the longest one.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

// A call with its answer; judges.py describes the fields.
type call struct {
	ID, Since, Until int64
	F, How           string
	Record, Txn      string
	Sequence         *int
	Repeat           bool
	Epoch, Fenced    int
	Position         *int
	First            int
	Max              int
	Entries          []entry
	Through          int
	Remaining        bool
}

type entry struct {
	Sequence  int
	Record    string
	Delivered bool // by the reader's filter of transactions
}

func (e *entry) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&e.Sequence, &e.Record, &e.Delivered})
}

// The log is a list from its end: branches of the search share what they have in common.
type node struct {
	before      *node
	record, txn string
	repeat      bool // of a transaction that is in the log already
}

type queue struct {
	log    *node
	length int
	hash   uint64 // of the log's records
	epoch  int
	cursor int // of the owner: what it reads next
	low    int // the first entry is here or later,
	high   int // and not later than here: the answer to an acknowledgement may have been lost
	reader bool
}

func (q queue) has(txn string) bool {
	for each := q.log; each != nil; each = each.before {
		if each.txn == txn {
			return true
		}
	}
	return false
}

// Entries from the cursor on, without a gap, to the end of the log or as many as were asked for.
func (q queue) shows(c call) bool {
	end := q.cursor + len(c.Entries)
	if end > q.length || (end < q.length && len(c.Entries) < c.Max) {
		return false
	}
	at := q.log
	for sequence := q.length - 1; sequence >= end; sequence-- {
		at = at.before
	}
	for i := len(c.Entries) - 1; i >= 0; i-- {
		seen := c.Entries[i]
		if seen != (entry{q.cursor + i, at.record, !at.repeat}) {
			return false
		}
		at = at.before
	}
	return true
}

// A named reader that was fenced hears of it when it acknowledges, or within a minute: until then it
// is shown the log, which is the same for everybody.
func (q queue) showsFenced(c call) bool {
	if !q.reader || c.Epoch >= q.epoch || len(c.Entries) == 0 {
		return q.reader && c.Epoch < q.epoch
	}
	q.cursor, c.Max = c.Entries[0].Sequence, len(c.Entries)
	return q.cursor >= 0 && q.shows(c)
}

func queueStep(state, input, _ any) (bool, any) {
	q, c := state.(queue), input.(call)
	owns := q.epoch == c.Epoch
	switch {
	case c.F == "ack" && c.Fenced > 0 && owns: // applied, its answer lost, and then taken over
		q.high = max(q.high, c.Through+1)
		return c.Through < q.cursor, q
	case c.Fenced > 0: // somebody took the queue over, perhaps without an answer
		q.epoch = max(q.epoch, c.Fenced)
		return c.Fenced != c.Epoch, q
	case c.F == "open":
		if c.Position != nil && q.reader { // which goes back, too: what it acknowledged is kept for a while
			q.low, q.high = *c.Position+1, *c.Position+1
		} else if c.Position != nil {
			q.low, q.high = max(q.low, *c.Position+1), max(q.high, *c.Position+1)
		}
		may := c.Epoch > q.epoch && c.First >= q.low && c.First <= q.high
		q.epoch, q.cursor, q.low, q.high = c.Epoch, c.First, c.First, c.First
		return may, q
	case c.F == "read" && !owns:
		return q.showsFenced(c), q
	case c.F == "read":
		may := q.shows(c)
		q.cursor += len(c.Entries)
		return may, q
	case c.F == "ack" && c.How == "ok":
		q.low = max(q.low, c.Through+1)
		q.high = max(q.high, q.low)
		return owns && c.Through < q.cursor, q
	case c.F == "ack":
		if owns {
			q.high = max(q.high, c.Through+1)
		}
		return true, q
	case c.Repeat: // nothing was appended, for an earlier attempt was
		return q.has(c.Txn), q
	}
	if c.Sequence == nil || *c.Sequence != q.length {
		return false, q
	}
	q.log = &node{q.log, c.Record, c.Txn, c.Txn != "" && q.has(c.Txn)}
	q.length++
	for _, each := range []byte(c.Record + "\n") {
		q.hash = (q.hash ^ uint64(each)) * 1099511628211
	}
	return true, q
}

func (q queue) withoutLog() queue {
	q.log = nil // its hash stands for it
	return q
}

// One batch among workers. A question mark says that the last answer about it was lost.
func workStep(state, input, _ any) (bool, any) {
	at, c := state.(string), input.(call)
	switch {
	case c.F == "append" && c.How == "ok":
		return at == "absent", "queued"
	case c.F == "append":
		return at == "absent", "queued?"
	case c.F == "work": // a batch that is done is handed out no more
		return at != "absent" && at != "done", "queued"
	case c.F == "done" && c.How == "ok":
		return at != "absent", "done"
	case c.F == "done" && at == "queued":
		return true, "done?"
	case c.F == "left" && c.Remaining:
		return at != "absent", at
	case c.F == "left": // neither done nor queued: lost
		return at != "queued", at
	}
	return true, at
}

func byRecord(calls []porcupine.Operation) [][]porcupine.Operation {
	found, parts := map[string]int{}, [][]porcupine.Operation{}
	for _, each := range calls {
		record := each.Input.(call).Record
		at, known := found[record]
		if !known {
			at = len(parts)
			found[record] = at
			parts = append(parts, nil)
		}
		parts[at] = append(parts[at], each)
	}
	return parts
}

func model(begin queue) porcupine.Model {
	return porcupine.Model{
		Init:  func() any { return begin },
		Step:  queueStep,
		Equal: func(a, b any) bool { return a.(queue).withoutLog() == b.(queue).withoutLog() },
		Hash:  func(state any) uint64 { return state.(queue).hash },
	}
}

var models = map[string]porcupine.Model{
	"queue":  model(queue{}),
	"reader": model(queue{reader: true}),
	"work":   {Init: func() any { return "absent" }, Step: workStep, Partition: byRecord},
}

func main() {
	file, err := os.Open(os.Args[2])
	if err != nil {
		panic(err)
	}
	calls := []porcupine.Operation{}
	for lines := json.NewDecoder(bufio.NewReader(file)); lines.More(); {
		var each call
		if err := lines.Decode(&each); err != nil {
			panic(err)
		}
		calls = append(calls, porcupine.Operation{Input: each, Call: each.Since, Return: each.Until})
	}
	result, info := porcupine.CheckOperationsVerbose(models[os.Args[1]], calls, 20*time.Second)
	left := map[int64]bool{}
	for _, each := range calls {
		left[each.Input.(call).ID] = true
	}
	for _, orders := range info.PartialLinearizationsOperations() {
		longest := []porcupine.Operation{}
		for _, order := range orders {
			if len(order) > len(longest) {
				longest = order
			}
		}
		for _, each := range longest {
			delete(left, each.Input.(call).ID)
		}
	}
	stuck := []int64{}
	for id := range left {
		stuck = append(stuck, id)
	}
	line, _ := json.Marshal(map[string]any{"result": result, "stuck": stuck})
	fmt.Println(string(line))
}
