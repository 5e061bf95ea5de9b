package provisioning

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// Explanation says what a slot does now and why, for people and for machines.
// It comes from the decision that the next pass would take, but for what that
// pass would fold first: what was delivered and not yet folded, and deadlines
// that are due, which String says are out of time.
type Explanation struct {
	Node    LogicalNodeID
	Attempt NodeAttemptID // 0: the slot is desired and not yet in the state
	Stage   Stage
	Intent  Intent
	// Decision is what the ladder says now.
	Decision NodeDecision
	// Now is the moment explained and Since when what it is about began, both,
	// like Decision.Until, in the driver's clock: the operation in flight was
	// dispatched, the last try failed (await-backoff), the machine was there and
	// its endpoint was not (await-backoff between looks for it), its endpoint was
	// known (await-bootstrap), the node became ready (steady), the attempt failed
	// that is cleaned up or replaced, or a pass first held it back (Paused). The
	// two that tell of a stage are told by its deadline: a stage without a limit
	// has none, and the time that a pause held the stage back does not count. It
	// is zero where nothing tells.
	Now   time.Time
	Since time.Time
	// EndsAt is when an attempt on its way up is out of time, whatever it waits
	// for; zero where nothing limits it. It too is in the driver's clock. While
	// Paused holds it moves on with Now.
	EndsAt time.Time
	// Pending is the operation in flight.
	Pending   OperationKind
	PendingID OperationID
	// Failures counts what the waiting is for: failures in a row, or of the
	// step of the cleanup while Deleting.
	Failures  uint32
	LastError string
	// FailedReason is why the attempt failed, empty if it has not.
	FailedReason string
	// Unresolved is a create or start of which nobody knows what came.
	Unresolved OperationKind
	// GivenUp is a cancel or start that was given up at CancelLimit.
	GivenUp OperationKind
	// Paused: a pause holds back what the ladder says or, where that is to wait
	// for Decision.Until, what it will say then.
	Paused   bool
	heldBack string // in words
	// LeftOut: it wants to dispatch and MaxInFlight leaves no place.
	LeftOut bool
	// StillRunning is a call of this attempt that has outlived its deadline
	// and has not returned. That is known to the executor of the last pass, so
	// after a Replay it is nil.
	StillRunning *RunningCall
}

// Explain says what the slot does at now, in the time of whoever drives; false
// if the slot is neither desired nor in the state.
func (d *ClusterDriver) Explain(id LogicalNodeID, now time.Time) (Explanation, bool) {
	at := d.tickAt(now)
	d.in.Lock()
	wish, executor, paused := d.accepted, d.executor, d.paused
	d.in.Unlock()

	d.world.Lock()
	e, ok := d.explain(id, wish, paused, at)
	d.world.Unlock()
	if !ok || executor == nil {
		return e, ok
	}
	e.StillRunning = overrunning(executor, e.Attempt) // with no lock held: it may be the user's
	return e, true
}

// overrunning returns the call of an attempt that has outlived its deadline and
// has not returned, or nil.
func overrunning(executor EffectExecutor, attempt NodeAttemptID) *RunningCall {
	if x, ok := executor.(*Executor); ok { // it need not list them all
		return x.overrunning(attempt)
	}
	for _, call := range executor.Running() {
		if call.Expired && call.Operation.Attempt == attempt {
			return &call
		}
	}
	return nil
}

// explain is Explain without the executor. The caller holds world.
func (d *ClusterDriver) explain(id LogicalNodeID, wish *Desired, paused bool, at instant) (Explanation, bool) {
	n := d.state.find(id)
	if n == nil {
		if wish.find(id) == nil {
			return Explanation{}, false
		}
		insert := decision{rule: &ladder[ruleInsert]}
		e := Explanation{Node: id, Now: at.time(), Decision: insert.export(nil)}
		e.Decision.Err = d.noAttempt(id, Insert, wish, at)
		if paused && e.Decision.Err == nil {
			e.Paused, e.heldBack = true, insert.heldBack()
		}
		return e, true
	}
	want := wish.group(n.template.spec.GroupID).wants(int(n.index))
	now := decide(n, want, at)
	e := Explanation{
		Node: id, Attempt: n.attempt, Stage: n.stage, Intent: n.intent, Now: at.time(),
		Decision: now.export(n),
		Pending:  n.pending, Failures: n.failures, LastError: n.lastError, Unresolved: n.ambiguous, GivenUp: n.givenUp,
		LeftOut: n.placeInAge != 0, FailedReason: n.failedReason,
	}
	if e.Decision.Err == nil {
		e.Decision.Err = d.noAttempt(id, now.action, wish, at)
	}
	if n.growing() && !n.ready {
		e.EndsAt = d.endOfStage(n, at).time()
	}
	next := now
	if e.waitsForTime() {
		next = decide(n, want, now.until(n)) // a pause does not end a wait, it follows it
	}
	if paused && e.Decision.Err == nil && next.grows(n, want) && !e.endsFirst() {
		e.Paused, e.heldBack = true, next.heldBack()
	}
	if n.intent == Deleting && n.stage != StageDestroyed {
		e.Failures = n.cleanupFailures
	}
	if n.pending != NoOperation {
		e.PendingID = n.pendingID()
	}
	e.Since = n.since(now.Number)
	if at, held := d.pause.nodes[n]; held && e.Paused {
		e.Since = at.time()
	}
	return e, true
}

// since is when began what the rule is about, zero where the node does not tell.
func (n *node) since(rule int) time.Time {
	policy := n.group.wish.policy
	switch {
	case n.pending != NoOperation:
		return began(n.pendingDeadline, policy.timeout(n.pending))
	case rule == ruleAwaitBootstrap:
		return began(n.stageDeadline, policy.BootstrapTimeout)
	case rule == ruleAwaitBackoff && n.looksForEndpoint():
		return began(n.stageDeadline, policy.EndpointTimeout)
	case rule == ruleAwaitBackoff:
		return n.lastFailureAt.time()
	case rule == ruleSteady:
		return n.readyAt.time()
	}
	return n.failedAt.time()
}

// began is when a time limit began that ends at deadline.
func began(deadline instant, limit time.Duration) time.Time {
	if deadline == 0 || limit < 0 {
		return time.Time{}
	}
	return deadline.time().Add(-limit)
}

// looksForEndpoint: what an attempt in this stage waits for is another look.
func (n *node) looksForEndpoint() bool {
	return n.intent == Active && n.stage == StageLeaseCreated
}

// noAttempt says why an action that begins an attempt cannot be taken. Where
// fewer attempts are left than there may be slots to begin one, it counts.
func (d *ClusterDriver) noAttempt(id LogicalNodeID, action ActionKind, wish *Desired, at instant) error {
	left := math.MaxUint64 - d.state.NextAttemptID
	if action != Insert && action != Restart || left > NodeAttemptID(wish.slots+d.state.Len()) {
		return nil
	}
	for _, fault := range Decide(d.state, wish, at.time()).Faults {
		if fault.Node == id {
			return ErrAttemptsExhausted
		}
	}
	return nil
}

// heldBack says what a pause holds back, of what grows.
func (d decision) heldBack() string {
	switch d.action {
	case Insert:
		return "its first attempt"
	case Restart:
		return "a fresh attempt"
	case BeginDelete:
		return "it is replaced: it is ready and outdated"
	}
	return d.operation.String()
}

// waits: the next pass does nothing about the slot, and it is known since when
// that is so.
func (e *Explanation) waits() bool {
	return !e.Since.IsZero() && (e.Decision.Action == NoAction || e.Paused) && e.Decision.Err == nil &&
		!e.isOutOfTime() && (e.Decision.Until.IsZero() || e.Decision.Until.After(e.Now))
}

// isOutOfTime: the next pass ends the attempt.
func (e *Explanation) isOutOfTime() bool { return !e.EndsAt.IsZero() && !e.EndsAt.After(e.Now) }

// waitsForTime: nothing but Decision.Until keeps the ladder from going on.
func (e *Explanation) waitsForTime() bool {
	return e.Decision.Rule.Number == ruleAwaitRestart || e.Decision.Rule.Number == ruleAwaitBackoff
}

// endsFirst: the attempt is out of time before what it waits for.
func (e *Explanation) endsFirst() bool {
	return !e.EndsAt.IsZero() && !e.Decision.Until.IsZero() && !e.EndsAt.After(e.Decision.Until)
}

// String explains the slot in one sentence.
func (e Explanation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", e.Node, e.sentence())
	if e.Paused && e.waitsForTime() {
		b.WriteString("; then paused before " + e.heldBack)
	}
	if now := e.Now.Sub(e.Since).Truncate(time.Second); now > 0 && e.waits() {
		fmt.Fprintf(&b, "; for %s now", now)
	}
	if left := e.EndsAt.Sub(e.Now); left > 0 && e.Decision.Until.After(e.EndsAt) {
		fmt.Fprintf(&b, "; in %s the attempt is out of time", roughly(left))
	}
	if e.Unresolved != NoOperation && e.Decision.Rule.Number != ruleResolve {
		fmt.Fprintf(&b, "; what came of an earlier %s is not known yet", e.Unresolved)
	}
	if e.GivenUp != NoOperation {
		fmt.Fprintf(&b, "; %s was given up after failing too often", e.GivenUp)
	}
	if call := e.StillRunning; call != nil {
		fmt.Fprintf(&b, "; %s %s outlived its deadline and is still running after %s, since %s", call.Kind, call.Operation,
			roughly(e.Now.Sub(call.Since)), call.Since.UTC().Format(time.RFC3339))
	}
	fmt.Fprintf(&b, " [%s]", e.Decision.Rule)
	return b.String()
}

func (e Explanation) sentence() string {
	d := e.Decision
	wait := fmt.Sprintf("waiting %s more", roughly(d.Until.Sub(e.Now)))
	switch {
	case e.isOutOfTime():
		return "the attempt is out of time: the next pass ends it"
	case d.Err != nil:
		return "cannot go on: " + d.Err.Error()
	case e.Paused && !e.waitsForTime():
		return "paused before " + e.heldBack
	case e.LeftOut && d.Action == Dispatch:
		return fmt.Sprintf("wants to dispatch %s and waits for a place: MaxInFlight is reached", d.Operation)
	}
	switch d.Rule.Name {
	case "insert":
		return "desired and not begun"
	case "reap":
		return "destroyed and unwanted: will be forgotten"
	case "restart":
		return "destroyed: a fresh attempt begins with the next pass"
	case "await-restart":
		return fmt.Sprintf("%s to restart after %s: %s", wait, times(e.Failures), e.FailedReason)
	case "begin-delete":
		if e.Stage == StageFailed {
			return "the attempt failed and will be cleaned up: " + e.FailedReason
		}
		return "unwanted or outdated: will be deleted"
	case "await-operation":
		if !d.Until.After(e.Now) {
			return fmt.Sprintf("%s %s is out of time: the next pass ends it", e.Pending, e.PendingID)
		}
		return fmt.Sprintf("%s at most for %s %s", wait, e.Pending, e.PendingID)
	case "await-backoff":
		if e.Intent == Active && e.Stage == StageLeaseCreated {
			return wait + " to look for the endpoint again" + e.failuresSoFar()
		}
		return fmt.Sprintf("%s after %s in a row, the last: %s", wait, times(e.Failures), e.LastError)
	case "await-bootstrap":
		if d.Until.IsZero() {
			return "waiting without a limit for the bootstrap to report a join"
		}
		return wait + " at most for the bootstrap to report a join"
	case "steady":
		return "ready"
	case "mark-destroyed":
		return "nothing is left to clean up"
	case "resolve-ambiguous":
		return fmt.Sprintf("being deleted: will ask what came of %s", d.Operation)
	}
	return fmt.Sprintf("will dispatch %s", d.Operation)
}

// Unblock says what lets the slot go on, or nothing if it does not wait.
func (e Explanation) Unblock() string {
	d := e.Decision
	switch {
	case e.isOutOfTime():
		return "the next pass"
	case errors.Is(d.Err, ErrAttemptsExhausted):
		return "another driver, whose FirstAttempt leaves room"
	case errors.Is(d.Err, ErrSequenceExhausted):
		return "its deletion: the attempt has had all the operations that it may have"
	case d.Err != nil:
		return "a fix: this is a fault of the library"
	case e.Paused || e.waitsForTime():
		return e.needs()
	case e.LeftOut && d.Action == Dispatch:
		return "the end of another operation, or a larger MaxInFlight"
	case d.Action != NoAction:
		return "the next pass"
	}
	switch d.Rule.Name {
	case "await-operation":
		if call := e.StillRunning; call != nil && call.Operation != e.PendingID {
			return fmt.Sprintf("the return of %s %s, or the deadline", call.Kind, call.Operation)
		}
		return "its result, or the deadline"
	case "await-bootstrap":
		if d.Until.IsZero() {
			return "what the bootstrap reports: a join, its end or a failure"
		}
		return "what the bootstrap reports: a join, its end or a failure; or the deadline"
	}
	return ""
}

// needs lists all that a slot needs which waits for the time or for Resume. A
// call of its own attempt that still runs lets no other one begin.
func (e Explanation) needs() string {
	var needs []string
	if e.waitsForTime() {
		needs = append(needs, "the time")
	}
	if e.Paused {
		needs = append(needs, "Resume")
	}
	if call := e.StillRunning; call != nil && e.Stage != StageDestroyed {
		needs = append(needs, fmt.Sprintf("the return of %s %s", call.Kind, call.Operation))
	}
	return strings.Join(needs, " and ")
}

// MarshalJSON writes the fields by their names, and beside them the sentence
// and what Unblock says. Times are in the driver's clock.
func (e Explanation) MarshalJSON() ([]byte, error) {
	problem := ""
	if e.Decision.Err != nil {
		problem = e.Decision.Err.Error()
	}
	return json.Marshal(struct {
		Node         LogicalNodeID `json:"node"`
		Sentence     string        `json:"sentence"`
		Unblock      string        `json:"unblock,omitempty"`
		Rule         Rule          `json:"rule"`
		Action       ActionKind    `json:"action"`
		Operation    OperationKind `json:"operation"` // of a Dispatch
		Until        time.Time     `json:"until,omitzero"`
		Error        string        `json:"error,omitempty"`
		Attempt      NodeAttemptID `json:"attempt,omitempty"`
		Stage        Stage         `json:"stage"`
		Intent       Intent        `json:"intent"`
		Now          time.Time     `json:"now"`
		Since        time.Time     `json:"since,omitzero"`
		EndsAt       time.Time     `json:"endsAt,omitzero"`
		Pending      OperationKind `json:"pending"`
		PendingID    *OperationID  `json:"pendingId,omitempty"`
		Failures     uint32        `json:"failures"`
		LastError    string        `json:"lastError,omitempty"`
		FailedReason string        `json:"failedReason,omitempty"`
		Unresolved   OperationKind `json:"unresolved"`
		GivenUp      OperationKind `json:"givenUp"`
		Paused       bool          `json:"paused,omitempty"`
		LeftOut      bool          `json:"leftOut,omitempty"`
		StillRunning *RunningCall  `json:"stillRunning,omitempty"`
	}{
		e.Node, e.String(), e.Unblock(), e.Decision.Rule, e.Decision.Action, e.Decision.Operation, e.Decision.Until, problem,
		e.Attempt, e.Stage, e.Intent, e.Now, e.Since, e.EndsAt, e.Pending, e.pendingID(), e.Failures, e.LastError, e.FailedReason,
		e.Unresolved, e.GivenUp, e.Paused, e.LeftOut, e.StillRunning,
	})
}

func (e *Explanation) pendingID() *OperationID {
	if e.Pending == NoOperation {
		return nil
	}
	return &e.PendingID
}

// failuresSoFar tells of failures that may or may not be why a look-up waits: one
// that found nothing yet counts none, and the count goes on from what was before.
func (e Explanation) failuresSoFar() string {
	switch {
	case e.Failures == 0:
		return ""
	case e.LastError == "": // of an earlier attempt
		return fmt.Sprintf("; %s so far", times(e.Failures))
	}
	return fmt.Sprintf("; %s so far, the last: %s", times(e.Failures), e.LastError)
}

func times(n uint32) string {
	if n == 1 {
		return "1 failure"
	}
	return fmt.Sprintf("%d failures", n)
}
