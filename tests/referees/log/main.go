// Judges histories of queues: whether each is what one log with one owner could have done.
//
//	log HISTORY.jsonl ...   prints one line of JSON for each queue of each history
//
// Porcupine searches the order of the calls; here is only the queue as it should be. Calls without
// an answer, and appends whose answer tells no sequence, get what a reader saw of them.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

type event struct {
	T         int64   `json:"t,omitempty"`    // nanoseconds of the machine's monotonic clock
	P         string  `json:"p,omitempty"`    // process
	I         int     `json:"i,omitempty"`    // the call's number in its process
	Type      string  `json:"type,omitempty"` // invoke, ok, fail, unknown
	F         string  `json:"f,omitempty"`
	Queue     string  `json:"queue,omitempty"`
	Record    string  `json:"record,omitempty"`   // append, work, done
	Txn       string  `json:"txn,omitempty"`      // append: app and batch, of which the first one counts
	Sequence  *int    `json:"sequence,omitempty"` // append
	Repeat    bool    `json:"repeat,omitempty"`   // append: nothing was appended, the transaction is there
	Epoch     int     `json:"epoch,omitempty"`    // open, read, ack
	Position  *int    `json:"position,omitempty"` // open: last sequence that is surely processed
	First     int     `json:"first,omitempty"`    // open: where reading begins
	Max       int     `json:"max,omitempty"`      // read
	Entries   []entry `json:"entries,omitempty"`  // read
	Through   int     `json:"through,omitempty"`  // ack
	Fenced    int     `json:"fenced,omitempty"`   // the epoch that was found instead
	Remaining bool    `json:"-"`                  // left: still queued
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
	repeat      bool
}

type queue struct {
	log    *node
	length int
	hash   uint64 // of the log's records
	epoch  int
	cursor int // of the owner: what it reads next
	low    int // the first entry is here or later,
	high   int // and not later than here: the answer to an acknowledgement may have been lost
}

func (q queue) has(txn string) bool {
	for each := q.log; each != nil; each = each.before {
		if each.txn == txn {
			return true
		}
	}
	return false
}

func step(state, input, output any) (bool, any) {
	q, call := state.(queue), input.(event)
	if out := output.(event); out.Fenced > 0 {
		// Somebody took the queue over, perhaps without an answer. From now on it is theirs.
		q.epoch = max(q.epoch, out.Fenced)
		return out.Fenced != call.Epoch, q
	} else if call.F != "append" && out.Type == "unknown" && call.F != "ack" {
		return true, q
	} else if call.F == "open" {
		q.low, q.high = max(q.low, q.cut(call)), max(q.high, q.cut(call))
		if out.Epoch <= q.epoch || out.First < q.low || out.First > q.high {
			return false, q
		}
		q.epoch, q.cursor, q.low, q.high = out.Epoch, out.First, out.First, out.First
		return true, q
	} else if call.F == "read" {
		return q.epoch == call.Epoch && q.shows(call, out.Entries), q.past(out.Entries)
	} else if call.F == "ack" && out.Type == "unknown" {
		if q.epoch == call.Epoch {
			q.high = max(q.high, call.Through+1)
		}
		return true, q
	} else if call.F == "ack" {
		q.low = max(q.low, call.Through+1)
		q.high = max(q.high, q.low)
		return q.epoch == call.Epoch && call.Through < q.cursor, q
	} else if out.Repeat {
		return q.has(call.Txn), q
	} else if out.Sequence == nil || *out.Sequence != q.length {
		return false, q
	}
	repeat := call.Txn != "" && q.has(call.Txn)
	q.log = &node{q.log, call.Record, call.Txn, repeat}
	q.length++
	for _, each := range []byte(call.Record + "\n") {
		q.hash = (q.hash ^ uint64(each)) * 1099511628211
	}
	return true, q
}

func (q queue) cut(open event) int {
	if open.Position == nil {
		return 0
	}
	return *open.Position + 1
}

func (q queue) past(entries []entry) queue {
	q.cursor += len(entries)
	return q
}

// Entries from the cursor on, without a gap, to the end of the log or as many as were asked for.
func (q queue) shows(call event, entries []entry) bool {
	end := q.cursor + len(entries)
	if end > q.length || (end < q.length && len(entries) < call.Max) {
		return false
	}
	at := q.log
	for sequence := q.length - 1; sequence >= end; sequence-- {
		at = at.before
	}
	for i := len(entries) - 1; i >= 0; i-- {
		seen := entries[i]
		if seen.Sequence != q.cursor+i || seen.Record != at.record || seen.Delivered == at.repeat {
			return false
		}
		at = at.before
	}
	return true
}

var queueModel = porcupine.Model{
	Init:  func() any { return queue{} },
	Step:  step,
	Equal: func(a, b any) bool { return a.(queue).key() == b.(queue).key() },
	Hash:  func(state any) uint64 { return state.(queue).hash ^ uint64(state.(queue).cursor) },
}

func (q queue) key() queue {
	q.log = nil
	return q
}

// One batch among workers. A question mark says that the last answer about it was lost.
func workStep(state, input, output any) (bool, any) {
	at, call, out := state.(string), input.(event), output.(event)
	switch {
	case call.Record == "": // writers of transactions separate others by empty batches
		return true, at
	case call.F == "append" && out.Type == "ok":
		return at == "absent", "queued"
	case call.F == "append":
		return at == "absent", "queued?"
	case call.F == "work": // a batch that is done is handed out no more
		return at != "absent" && at != "done", "queued"
	case call.F == "done" && out.Type == "ok":
		return at != "absent", "done"
	case call.F == "done" && at == "queued":
		return true, "done?"
	case call.F == "left" && call.Remaining:
		return at != "absent", at
	case call.F == "left": // neither done nor queued: lost
		return at != "queued", at
	}
	return true, at
}

var workModel = porcupine.Model{
	Init: func() any { return "absent" }, Step: workStep, Partition: byRecord,
}

func main() {
	for _, path := range os.Args[1:] {
		queues := read(path)
		names := []string{}
		for name := range queues {
			names = append(names, name)
		}
		sort.Strings(names)
		for _, name := range names {
			judge(path, name, queues[name])
		}
	}
}

func read(path string) map[string][]porcupine.Operation {
	file, err := os.Open(path)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	queues, open := map[string][]porcupine.Operation{}, map[string]event{}
	clients := map[string]int{}
	end := func(call, out event) {
		client, known := clients[call.P]
		if !known {
			client = len(clients)
			clients[call.P] = client
		}
		returned := out.T
		if out.Type == "unknown" {
			returned = math.MaxInt64
		}
		queues[call.Queue] = append(queues[call.Queue],
			porcupine.Operation{ClientId: client, Input: call, Call: call.T, Output: out, Return: returned})
	}
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<28)
	for lines.Scan() {
		var each event
		if err := json.Unmarshal(lines.Bytes(), &each); err != nil {
			panic(fmt.Sprintf("%s: %s: %v", path, lines.Text(), err))
		}
		key := fmt.Sprint(each.P, " ", each.I)
		if each.Type == "invoke" {
			open[key] = each
		} else if call, found := open[key]; found {
			delete(open, key)
			if each.Type != "fail" || each.Fenced > 0 {
				end(call, each)
			}
		}
	}
	for _, call := range open { // its process was killed
		end(call, event{Type: "unknown"})
	}
	return queues
}

// Appends get the sequence where a reader saw them. One without an answer that no reader saw may
// have done nothing: whatever it left behind would be a gap that no other append explains. Writers
// of transactions append empty batches by themselves, to separate others.
func resolved(calls []porcupine.Operation) []porcupine.Operation {
	seen, empty := map[string]int{}, map[int]bool{}
	kept := []porcupine.Operation{}
	for _, call := range calls {
		for _, each := range call.Output.(event).Entries {
			seen[each.Record] = each.Sequence
			if each.Record == "" && !empty[each.Sequence] {
				empty[each.Sequence] = true
				kept = append(kept, porcupine.Operation{Input: event{F: "append"},
					Output: event{Type: "ok", Sequence: &each.Sequence}, Return: math.MaxInt64})
			}
		}
	}
	for _, call := range calls {
		in, out := call.Input.(event), call.Output.(event)
		if in.F == "append" && out.Sequence == nil && !out.Repeat {
			if sequence, found := seen[in.Record]; found {
				out.Sequence = &sequence
			} else if out.Type == "unknown" {
				continue
			}
			call.Output = out
		}
		kept = append(kept, call)
	}
	return kept
}

func judge(path, name string, calls []porcupine.Operation) {
	model := queueModel
	for _, call := range calls {
		if left := call.Output.(event); call.Input.(event).F == "left" {
			model, calls = workModel, atEnd(calls, left)
			break
		}
	}
	if model.Partition == nil {
		calls = resolved(calls)
	}
	result, info := porcupine.CheckOperationsVerbose(model, calls, 20*time.Second)
	verdict := map[string]any{"history": path, "queue": name, "calls": len(calls), "result": result}
	if result != porcupine.Ok {
		verdict["stuck"] = stuck(calls, info)
	}
	line, _ := json.Marshal(verdict)
	fmt.Println(string(line))
}

// One call for each batch, after all others, that tells whether it is still queued.
func atEnd(calls []porcupine.Operation, left event) []porcupine.Operation {
	remaining := map[string]bool{}
	for _, each := range left.Entries {
		remaining[each.Record] = true
	}
	kept := []porcupine.Operation{}
	for _, call := range calls {
		in := call.Input.(event)
		if in.F == "left" {
			continue
		}
		kept = append(kept, call)
		if in.F == "append" {
			end := event{F: "left", Record: in.Record, Remaining: remaining[in.Record]}
			kept = append(kept, porcupine.Operation{Input: end, Call: left.T, Output: end, Return: left.T})
		}
	}
	return kept
}

func byRecord(calls []porcupine.Operation) [][]porcupine.Operation {
	found, parts := map[string]int{}, [][]porcupine.Operation{}
	for _, call := range calls {
		record := call.Input.(event).Record
		at, known := found[record]
		if !known {
			at = len(parts)
			found[record] = at
			parts = append(parts, nil)
		}
		parts[at] = append(parts[at], call)
	}
	return parts
}

// The earliest calls that have no place in the longest orders that were found.
func stuck(calls []porcupine.Operation, info porcupine.LinearizationInfo) []string {
	placed, said := map[string]bool{}, []string{}
	for _, orders := range info.PartialLinearizationsOperations() {
		longest := []porcupine.Operation{}
		for _, order := range orders {
			if len(order) > len(longest) {
				longest = order
			}
		}
		for _, call := range longest {
			placed[show(call)] = true
		}
	}
	sort.Slice(calls, func(a, b int) bool { return calls[a].Return < calls[b].Return })
	for _, call := range calls {
		if len(said) < 4 && !placed[show(call)] {
			said = append(said, show(call))
		}
	}
	return said
}

func show(call porcupine.Operation) string {
	in, _ := json.Marshal(call.Input)
	out, _ := json.Marshal(call.Output)
	return string(in) + " -> " + string(out)
}
