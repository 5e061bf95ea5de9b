// Package status tells people and programs what a fleet does: as a value, as
// JSON, as a page that follows by itself, and as metrics.
package status

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/swactor/provisioning"
)

// Fleet is a host and its journal. The host's OnEvent is the journal's.
type Fleet struct {
	Name    string // of the program that drives it
	Host    *provisioning.Host
	Journal *Journal
	Run     provisioning.RunID
	Began   time.Time
	// Ended says why nothing is driven any more, nil while it is. It may be
	// nil itself: always driven.
	Ended func() error
}

// Status is all that there is to see. Times are those of this computer.
type Status struct {
	Name       string    `json:"name"` // of the program
	Run        string    `json:"run"`
	BeganAt    time.Time `json:"beganAt"`
	Now        time.Time `json:"now"`
	Generation uint64    `json:"generation"` // of the latest wish
	Observed   uint64    `json:"observed"`   // that a pass last compared with
	Converged  bool      `json:"converged"`
	Draining   bool      `json:"draining"`
	Ended      string    `json:"ended,omitempty"` // why nothing is driven any more
	Ready      int       `json:"ready"`
	Desired    int       `json:"desired"`
	Held       int       `json:"held"` // slots that have a machine, or may have
	// Progress is from 0 to 1: how many steps of all slots are done.
	Progress float64 `json:"progress"`
	Attempts uint64  `json:"attempts"`
	Failed   uint64  `json:"failed"` // attempts
	File     string  `json:"file,omitempty"`
	// FileProblem is why the file is refused; the wish is then an older one.
	FileProblem string   `json:"fileProblem,omitempty"`
	Ladder      []string `json:"ladder"`
	Slots       []Slot   `json:"slots"`  // in slot order
	Events      []Event  `json:"events"` // the oldest first
}

// Slot is what there is to see of one slot. It holds nothing of what a shape
// gives to machines (environment, arguments, commands), where secrets are.
type Slot struct {
	Node      string `json:"node"`
	Group     string `json:"group"`
	Index     int    `json:"index"`
	Role      string `json:"role,omitempty"`
	Image     string `json:"image,omitempty"`
	Attempt   uint64 `json:"attempt"`
	Stage     string `json:"stage"`
	Bootstrap string `json:"bootstrap,omitempty"` // how far the bootstrap says it is
	Phase     Phase  `json:"phase"`
	// Rung is the last entry of Status.Ladder that the attempt has reached;
	// what it still holds of it, when it is given up; -1: nothing.
	Rung int `json:"rung"`
	// Done of Steps are done. It counts the stages of the bootstrap too.
	Done  int  `json:"done"`
	Steps int  `json:"steps"`
	Ready bool `json:"ready"`

	Rule      string `json:"rule"` // of the ladder of rules
	Why       string `json:"why"`  // in a sentence
	Operation string `json:"operation,omitempty"`
	// DueAt is the next deadline that it waits for, EndsAt when the attempt is
	// out of time.
	DueAt     time.Time `json:"dueAt,omitzero"`
	EndsAt    time.Time `json:"endsAt,omitzero"`
	StartedAt time.Time `json:"startedAt,omitzero"` // the attempt

	Attempts  uint64 `json:"attempts"`  // of this slot so far
	Failed    uint64 `json:"failed"`    // of those
	Failures  uint32 `json:"failures"`  // in a row
	LastError string `json:"lastError"` // may be of an earlier try

	Lease    string `json:"lease,omitempty"`
	Endpoint string `json:"endpoint,omitempty"`
	Swactor  string `json:"swactor,omitempty"`
}

// Phase is what colour a slot has.
type Phase string

// The phases.
const (
	Rising   Phase = "rising"   // on its way up
	Waiting  Phase = "waiting"  // waits out a failure
	Ready    Phase = "ready"    // nothing to do
	Deleting Phase = "deleting" // failed, outdated or unwanted: being given up
	Gone     Phase = "gone"     // nothing is left of the attempt
)

// ladder is how a node comes up. What it may be beside (Failed, Destroyed, the
// reserved HandedOff) is said by its phase.
var ladder = []provisioning.Stage{
	provisioning.StageNew, provisioning.StageLeaseRequested, provisioning.StageLeaseCreated, provisioning.StageEndpointKnown,
	provisioning.StageBootstrapRunning, provisioning.StageSwactorJoined, provisioning.StageDormant,
}

// steps is how many a ready node has done: one for each stage on the way, and
// for each stage of the bootstrap.
const steps = 12

// Status looks at the fleet.
func (f *Fleet) Status() Status {
	host, driver := f.Host.Status(), f.Host.Driver()
	now := time.Now()
	s := Status{
		Name: f.Name, Run: string(f.Run), BeganAt: f.Began, Now: now,
		Generation: host.Generation, Observed: host.Observed, Converged: host.Converged, Draining: host.Draining,
		Ready: host.Ready, Desired: host.Desired, Held: host.Held, Slots: []Slot{}, Events: []Event{},
	}
	if f.Ended != nil {
		if err := f.Ended(); err != nil {
			s.Ended = err.Error()
		}
	}
	for _, stage := range ladder {
		s.Ladder = append(s.Ladder, stage.String())
	}
	for node := range driver.Snapshot().All() {
		if e, ok := driver.Explain(node.Record.Node, now); ok {
			s.Slots = append(s.Slots, slotOf(node, e, now))
		}
	}
	j := f.Journal
	j.mu.Lock()
	defer j.mu.Unlock()
	s.Attempts, s.Failed = j.counts.attempts, j.counts.failed
	s.File, s.FileProblem = j.wish.path, j.wish.complain
	s.Events = append(s.Events, j.events...)
	done := 0
	for i := range s.Slots {
		slot := &s.Slots[i]
		done += slot.Done
		if h := j.slots[provisioning.LogicalNodeID(slot.Node)]; h != nil {
			slot.Attempts, slot.Failed, slot.StartedAt = h.attempts, h.failed, h.startedAt
		}
	}
	switch all := max(len(s.Slots), s.Desired); {
	case all > 0:
		s.Progress = float64(done) / float64(all*steps)
	case s.Observed > 0: // nothing is wished for and nothing is left
		s.Progress = 1
	}
	return s
}

// Slot looks at one slot; false if there is none of that name.
func (f *Fleet) Slot(node string) (Slot, bool) {
	for _, slot := range f.Status().Slots {
		if slot.Node == node {
			return slot, true
		}
	}
	// Desired and not begun.
	now := time.Now()
	e, ok := f.Host.Driver().Explain(provisioning.LogicalNodeID(node), now)
	return slotOf(provisioning.ManagedNode{Record: provisioning.NodeRecord{Node: e.Node}}, e, now), ok
}

func slotOf(n provisioning.ManagedNode, e provisioning.Explanation, now time.Time) Slot {
	r := &n.Record
	// The driver's times as times of this computer.
	wall := func(t time.Time) time.Time {
		if t.IsZero() {
			return t
		}
		return now.Add(t.Sub(e.Now))
	}
	s := Slot{
		Node: string(r.Node), Group: string(r.Group), Index: r.Index, Role: string(r.Spec.Role), Image: r.Spec.Shape.Image,
		Attempt: uint64(n.Attempt), Stage: r.Stage.String(), Steps: steps, Ready: r.Ready,
		Rule: e.Decision.Rule.String(), DueAt: wall(e.Decision.Until), EndsAt: wall(e.EndsAt),
		Failures: e.Failures, LastError: cmp.Or(e.FailedReason, e.LastError),
		Lease: string(r.Lease), Swactor: string(r.Swactor.ID), Why: why(e),
	}
	if e.Pending != provisioning.NoOperation {
		s.Operation = e.Pending.String()
	}
	if r.Connection != nil {
		s.Endpoint = r.Connection.String()
	}
	s.Phase, s.Rung, s.Done = progress(n, e)
	if r.Stage == provisioning.StageBootstrapRunning && s.Phase != Gone {
		s.Bootstrap = r.Bootstrap.LastStage.String()
	}
	return s
}

// progress says how far an attempt is on its way up, or what it still holds on
// its way down.
func progress(n provisioning.ManagedNode, e provisioning.Explanation) (phase Phase, rung, done int) {
	if n.Record.Stage == provisioning.StageDestroyed {
		return Gone, -1, 0
	}
	if n.Intent == provisioning.Deleting || n.Record.Stage == provisioning.StageFailed {
		rung = -1
		switch {
		case n.ActiveBootstrap != "":
			rung = slices.Index(ladder, provisioning.StageBootstrapRunning)
		case n.Record.Lease != "":
			rung = slices.Index(ladder, provisioning.StageLeaseCreated)
		case n.Pending != nil && n.Pending.Kind == provisioning.CreateLease, n.Retry.Ambiguous == provisioning.CreateLease:
			rung = slices.Index(ladder, provisioning.StageLeaseRequested)
		}
		return Deleting, rung, 0
	}
	switch stage := n.Record.Stage; stage {
	case provisioning.StageHandedOff:
		rung = slices.Index(ladder, provisioning.StageDormant)
	default:
		rung = slices.Index(ladder, stage)
	}
	switch done = rung; {
	case n.Record.Ready:
		return Ready, rung, steps
	case n.Record.Stage == provisioning.StageBootstrapRunning:
		done = 3 + int(min(n.Record.Bootstrap.LastStage, provisioning.BootstrapStageWaitingForSwactorJoin))
	case n.Record.Stage == provisioning.StageSwactorJoined:
		done = steps - 1
	}
	if e.Decision.Rule.Name == "await-backoff" && e.Failures > 0 {
		return Waiting, rung, done
	}
	return Rising, rung, done
}

// why says in a sentence what a slot waits for, with times that a person reads
// at a glance.
func why(e provisioning.Explanation) string {
	round := func(t time.Time) time.Time {
		if t.IsZero() {
			return t
		}
		return e.Now.Add(t.Sub(e.Now).Round(100 * time.Millisecond))
	}
	if e.Decision.Until.After(e.Now) && round(e.Decision.Until).After(e.Now) { // a moment that is due must stay due
		e.Decision.Until = round(e.Decision.Until)
	}
	if e.EndsAt.After(e.Now) && round(e.EndsAt).After(e.Now) {
		e.EndsAt = round(e.EndsAt)
	}
	text := strings.TrimPrefix(e.String(), string(e.Node)+": ")
	return strings.TrimSuffix(text, " ["+e.Decision.Rule.String()+"]")
}
