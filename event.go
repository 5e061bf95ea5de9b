package provisioning

import (
	"fmt"
	"sync"
	"time"
)

// EventKind says what an [Event] reports.
type EventKind uint8

// The events.
const (
	_ EventKind = iota
	// EventPass: a pass has ended.
	EventPass
	// EventFold: an observation was applied.
	EventFold
	// EventNotApplied: an observation changed nothing, for Event.Reason.
	EventNotApplied
	// EventDispatch: an operation is on record and will be submitted.
	EventDispatch
	// EventStage: a node went from one stage to another.
	EventStage
	// EventAttemptStarted: a slot was inserted or restarted.
	EventAttemptStarted
	// EventAttemptFailed: an attempt ended in a failure, for Event.Reason.
	EventAttemptFailed
	// EventReady: a node became ready.
	EventReady
	// EventDeleting: an attempt is being given up.
	EventDeleting
	// EventGivenUp: the cancel of a session, or the asking after a start,
	// was given up; Event.Operation names it.
	EventGivenUp
	// EventDestroyed: nothing is left of an attempt.
	EventDestroyed
	// EventReaped: an unwanted slot is gone from the state.
	EventReaped
	// EventUpdateAccepted and EventUpdateRefused: a wish was offered;
	// Event.Err says why it was refused.
	EventUpdateAccepted
	EventUpdateRefused
	// EventFault: a slot cannot go on, for Event.Err.
	EventFault
	// EventPaused and EventResumed: growth is to stop, or to go on.
	EventPaused
	EventResumed
)

var eventNames = [...]string{"none", "Pass", "Fold", "NotApplied", "Dispatch", "Stage", "AttemptStarted", "AttemptFailed",
	"Ready", "Deleting", "GivenUp", "Destroyed", "Reaped", "UpdateAccepted", "UpdateRefused", "Fault",
	"Paused", "Resumed"}

// String returns the name of the event.
func (k EventKind) String() string { return nameOf(eventNames[:], k) }

// MarshalText uses the names of String.
func (k EventKind) MarshalText() ([]byte, error) { return marshalName(eventNames[:], k) }

// UnmarshalText refuses an unknown name.
func (k *EventKind) UnmarshalText(text []byte) error {
	return unmarshalName(eventNames[:], "event", text, k)
}

// Event is something that the driver did or saw. Which fields are set depends
// on Kind.
type Event struct {
	Kind      EventKind
	Operation OperationKind // EventDispatch, EventGivenUp, a completion in EventFold or EventNotApplied
	Class     FailureClass  // of that completion; ClassNone: it succeeded
	// Expired, of EventFold: the deadline of the operation came before its
	// result did.
	Expired bool
	// At is in the driver's clock: of what a pass does that of the pass; of
	// updates and pauses what the clock was fed last, by a pass or by
	// [ClusterDriver.TriggerIfDue]. A [Host] feeds it right before them.
	At time.Time
	// Took is how long it took, in the driver's clock: of a completion in
	// EventFold since its dispatch; of EventReady, EventAttemptFailed and
	// EventDestroyed since the attempt began. Zero also if that is not known.
	Took        time.Duration
	Node        LogicalNodeID
	Attempt     NodeAttemptID
	Rule        Rule // EventDispatch, EventFault
	OperationID OperationID
	Observation *Observation // EventFold, EventNotApplied; read-only, only during the call
	From, To    Stage        // EventStage
	Generation  uint64       // EventPass, EventUpdateAccepted, EventUpdateRefused
	Reason      string
	Err         error
}

// eventOf returns what is to be told of an observation.
func eventOf(kind EventKind, o *Observation, at instant) Event {
	seen := *o
	e := Event{Kind: kind, At: at.time(), Node: o.Node, Attempt: o.Attempt, Observation: &seen}
	if o.Kind == OperationCompleted {
		c := o.Completion.judged()
		e.Operation, e.OperationID, e.Class = c.Kind, c.Operation, c.Class
	}
	return e
}

// String returns the event as one line.
func (e Event) String() string {
	s := e.Kind.String()
	if e.Node != "" {
		s += fmt.Sprintf(" %s#%d", e.Node, e.Attempt)
	}
	switch e.Kind {
	case EventPass, EventUpdateAccepted, EventUpdateRefused:
		s += fmt.Sprintf(" generation %d", e.Generation)
	case EventFold, EventNotApplied:
		s += " " + e.Observation.Kind.String()
		if e.Operation != NoOperation {
			s += fmt.Sprintf(" %s %s", e.Operation, e.OperationID)
			if e.Class != ClassNone {
				s += " " + e.Class.String()
			}
		}
	case EventDispatch:
		s += fmt.Sprintf(" %s %s (%s)", e.Operation, e.OperationID, e.Rule)
	case EventStage:
		s += fmt.Sprintf(" %s -> %s", e.From, e.To)
	case EventGivenUp:
		s += " " + e.Operation.String()
	}
	if e.Reason != "" {
		s += ": " + e.Reason
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// eventTimes knows since when the attempts that live and their operations go
// on, for Event.Took. The state does not keep it, for nothing is decided by it.
type eventTimes map[NodeAttemptID]attemptTimes

type attemptTimes struct{ begun, dispatched instant }

// measure fills in Took.
func (t eventTimes) measure(e *Event) {
	at := nearestInstant(e.At)
	since := func(began instant) {
		if began != 0 {
			e.Took = time.Duration(at - began)
		}
	}
	switch e.Kind {
	case EventAttemptStarted:
		t[e.Attempt] = attemptTimes{begun: at}
	case EventDispatch:
		times := t[e.Attempt]
		times.dispatched = at
		t[e.Attempt] = times
	case EventFold:
		if e.Operation != NoOperation {
			since(t[e.Attempt].dispatched)
		}
	case EventReady, EventAttemptFailed:
		since(t[e.Attempt].begun)
	case EventDestroyed:
		since(t[e.Attempt].begun)
		delete(t, e.Attempt)
	}
}

// eventQueue hands events to the user's hook one at a time, in order, whatever
// goroutine they come from and whatever the hook itself calls: whoever adds an
// event while another goroutine (or the hook) is handing out leaves it to that
// one.
type eventQueue struct {
	hook func(Event)

	mu      sync.Mutex
	waiting []Event
	busy    bool
	panics  uint64
}

// add puts events in line. What happened under a lock is added under it, so that
// it is told in that order; the hook is not called yet.
func (q *eventQueue) add(events ...Event) {
	if q.hook == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, events...)
}

// handOut is called with no lock of the driver held.
func (q *eventQueue) handOut() {
	if q.hook == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.busy {
		return
	}
	q.busy = true
	defer func() { q.busy = false }() // also if the hook ends the goroutine
	for len(q.waiting) > 0 {
		e := q.waiting[0]
		q.waiting = q.waiting[1:]
		q.call(e)
	}
	q.waiting = nil
}

// call hands out one event without the lock and fences the hook: its panic is
// counted and harms nothing.
func (q *eventQueue) call(e Event) {
	q.mu.Unlock()
	returned := false
	defer func() {
		q.mu.Lock()
		if !returned {
			q.panics++
			_ = recover() // nil if the hook ended the goroutine instead
		}
	}()
	q.hook(e)
	returned = true
}

func (q *eventQueue) hookPanics() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.panics
}
