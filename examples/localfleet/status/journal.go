package status

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/swactor/provisioning"
)

// timeline is how many events are remembered.
const timeline = 100

// Event is one thing that happened, in words.
type Event struct {
	Number  uint64    `json:"number"` // counts from 1
	At      time.Time `json:"at"`
	Node    string    `json:"node,omitempty"` // empty: of the fleet as a whole
	Attempt uint64    `json:"attempt,omitempty"`
	Kind    string    `json:"kind"`
	Level   Level     `json:"level"`
	Text    string    `json:"text"`
}

// Level is how an event is to be read.
type Level string

// The levels.
const (
	Info Level = "info"
	Good Level = "good"
	Bad  Level = "bad"
)

// Journal remembers what the driver tells and what is not in its state: the
// latest events, what each slot has been through, and counts. The zero Journal
// is ready. All methods are safe for concurrent use.
type Journal struct {
	mu      sync.Mutex
	tell    func(Event)
	number  uint64
	events  []Event // the oldest first
	slots   map[provisioning.LogicalNodeID]*history
	counts  counts
	wish    wishFile
	changed chan struct{} // closed when something has changed; nil: nobody waits
}

// history is what a slot has been through.
type history struct {
	attempts, failed uint64
	startedAt        time.Time // of the present attempt
}

// counts never go down.
type counts struct {
	applied, notApplied uint64
	operations          [provisioning.DestroyLease + 1]uint64
	failures            [provisioning.DestroyLease + 1][provisioning.ClassLeaseLost + 1]uint64
	attempts, failed    uint64
	ready, lost, faults uint64
	passes              uint64
	readySeconds        float64 // from the start of an attempt until it was ready
	reloads, refused    uint64
}

// wishFile is what is known of the file that the wish comes from.
type wishFile struct {
	path     string
	complain string
}

// Follow lets tell take every event that is worth a line from now on, in order;
// nil takes none. It is called one event at a time, must not call the journal,
// and is not called any more once another Follow has returned.
func (j *Journal) Follow(tell func(Event)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.tell = tell
}

// OnEvent is for [provisioning.HostConfig].
func (j *Journal) OnEvent(e provisioning.Event) {
	now := time.Now()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.count(e, now)
	if level, text := describe(e); text != "" {
		j.add(Event{At: now, Node: string(e.Node), Attempt: uint64(e.Attempt), Kind: e.Kind.String(), Level: level, Text: text})
	}
	j.wake()
}

// Note adds an event of the program itself.
func (j *Journal) Note(level Level, format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.add(Event{At: time.Now(), Kind: "Note", Level: level, Text: fmt.Sprintf(format, args...)})
	j.wake()
}

// Loaded says that a wish was read from a file, and Refused that the file is no
// good and the old wish stays.
func (j *Journal) Loaded(path string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.wish = wishFile{path: path}
	j.counts.reloads++
	j.wake()
}

// Refused: see Loaded.
func (j *Journal) Refused(path string, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.wish = wishFile{path: path, complain: err.Error()}
	j.counts.refused++
	j.add(Event{At: time.Now(), Kind: "Refused", Level: Bad, Text: "the shape file is refused, the old wish stays: " + err.Error()})
	j.wake()
}

// Changed returns a channel that is closed at the next change.
func (j *Journal) Changed() <-chan struct{} {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.changed == nil {
		j.changed = make(chan struct{})
	}
	return j.changed
}

func (j *Journal) wake() {
	if j.changed != nil {
		close(j.changed)
		j.changed = nil
	}
}

func (j *Journal) add(e Event) {
	j.number++
	e.Number = j.number
	if len(j.events) == timeline {
		j.events = slices.Delete(j.events, 0, 1)
	}
	j.events = append(j.events, e)
	if j.tell != nil {
		j.tell(e)
	}
}

func (j *Journal) count(e provisioning.Event, now time.Time) {
	c := &j.counts
	switch e.Kind {
	case provisioning.EventPass:
		c.passes++
	case provisioning.EventFold, provisioning.EventNotApplied:
		if e.Kind == provisioning.EventNotApplied {
			c.notApplied++
		} else {
			c.applied++
		}
		if done := e.Observation.Completion; e.Kind == provisioning.EventFold && e.Operation != provisioning.NoOperation && done.Class != provisioning.ClassNone {
			c.failures[e.Operation][done.Class]++
		}
		if e.Kind == provisioning.EventFold && e.Observation.Kind == provisioning.NodeLost {
			c.lost++
		}
	case provisioning.EventDispatch:
		c.operations[e.Operation]++
	case provisioning.EventAttemptStarted:
		c.attempts++
		h := j.slot(e.Node)
		h.attempts++
		h.startedAt = now
	case provisioning.EventAttemptFailed:
		c.failed++
		j.slot(e.Node).failed++
	case provisioning.EventReady:
		c.ready++
		c.readySeconds += now.Sub(j.slot(e.Node).startedAt).Seconds()
	case provisioning.EventFault:
		c.faults++
	case provisioning.EventReaped:
		delete(j.slots, e.Node)
	}
}

func (j *Journal) slot(id provisioning.LogicalNodeID) *history {
	h := j.slots[id]
	if h == nil {
		h = new(history)
		if j.slots == nil {
			j.slots = make(map[provisioning.LogicalNodeID]*history)
		}
		j.slots[id] = h
	}
	return h
}

// describe says what happened, "" for what is not worth a line.
func describe(e provisioning.Event) (Level, string) {
	switch e.Kind {
	case provisioning.EventAttemptStarted:
		return Info, "a new attempt begins"
	case provisioning.EventDispatch:
		if e.Operation == provisioning.LookupEndpoint {
			return "", "" // again and again, until there is one
		}
		return Info, fmt.Sprintf("calls %v (%v)", e.Operation, e.Rule)
	case provisioning.EventFold:
		if e.Observation.Kind == provisioning.NodeLost {
			return Bad, "the node is lost: " + e.Observation.Reason
		}
		done := e.Observation.Completion
		if done.Class == provisioning.ClassNone {
			return "", ""
		}
		text := fmt.Sprintf("%v failed, %v: %s", done.Kind, done.Class, done.Message)
		if done.RetryAfter > 0 {
			text += fmt.Sprintf("; not again within %v", done.RetryAfter)
		}
		return Bad, text
	case provisioning.EventNotApplied:
		if e.Observation.Kind == provisioning.BootstrapProgress {
			return "", "" // it comes with every line of output
		}
		return Info, fmt.Sprintf("%v not applied: %s", e.Observation.Kind, e.Reason)
	case provisioning.EventStage:
		return Info, fmt.Sprintf("%v -> %v", e.From, e.To)
	case provisioning.EventAttemptFailed:
		return Bad, "the attempt failed: " + e.Reason
	case provisioning.EventReady:
		return Good, "ready"
	case provisioning.EventDeleting:
		return Info, "will be deleted"
	case provisioning.EventGivenUp:
		return Bad, fmt.Sprintf("%v given up: %s", e.Operation, e.Reason)
	case provisioning.EventReaped:
		return Info, "forgotten"
	case provisioning.EventUpdateAccepted:
		return Info, fmt.Sprintf("the wish of generation %d is accepted", e.Generation)
	case provisioning.EventUpdateRefused:
		return Bad, fmt.Sprintf("the wish of generation %d is refused: %v", e.Generation, e.Err)
	case provisioning.EventFault:
		return Bad, fmt.Sprintf("cannot go on: %v", e.Err)
	}
	return "", ""
}
