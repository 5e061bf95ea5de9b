package provisioning

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// This file is the whole of deciding: what is looked at, the ladder of rules,
// and the walk over all slots. Nothing here reads a clock, and nothing writes
// to what it is given. The words for results are in plan.go.

// condition is a set of things that are true of one slot at one moment. The
// ladder looks at nothing else.
type condition uint32

const (
	absent        condition = 1 << iota // desired, and not in the state
	undesired                           // the wish has no such slot
	unfit                               // undesired, built from another spec, or failed
	active                              // wanted as an attempt
	deleting                            // being given up, for good
	destroyed                           // nothing is left of the attempt
	restartDue                          // RestartAt is unset or due
	backingOff                          // NextEffectAt is set and not due
	pending                             // an operation is in flight
	unresolved                          // nobody knows what came of a create or a start
	leased                              // a machine is on record
	reachable                           // its endpoint is on record
	inSession                           // a bootstrap session is live
	endpointKnown                       // stage EndpointKnown
	bootstrapping                       // stage BootstrapRunning
	joined                              // stage SwactorJoined
	steady                              // ready, in Dormant or HandedOff
)

// look gathers the conditions of a slot. n is nil for a slot that is not in
// the state, want for one that the wish does not have.
func look(n *node, want *template, now instant) condition {
	var c condition
	set := func(is bool, bit condition) {
		if is {
			c |= bit
		}
	}
	set(want == nil, undesired)
	if n == nil {
		set(want != nil, absent)
		return c
	}
	set(!sameTemplate(n.template, want) || n.stage == StageFailed, unfit)
	set(n.intent == Active, active)
	set(n.intent == Deleting, deleting)
	set(n.stage == StageDestroyed, destroyed)
	set(n.restartAt == 0 || n.restartAt.due(now), restartDue)
	set(n.nextEffectAt.ahead(now), backingOff)
	set(n.pending != NoOperation, pending)
	set(n.ambiguous != NoOperation, unresolved)
	set(n.lease != "", leased)
	set(n.endpoint != nil, reachable)
	set(n.session != "", inSession)
	set(n.stage == StageEndpointKnown, endpointKnown)
	set(n.stage == StageBootstrapRunning, bootstrapping)
	set(n.stage == StageSwactorJoined, joined)
	set(n.ready && (n.stage == StageDormant || n.stage == StageHandedOff), steady)
	return c
}

// rule is one entry of the ladder. It matches where all of when hold and none
// of unless does.
type rule struct {
	Rule
	when, unless condition
	action       ActionKind
	operation    OperationKind         // of a Dispatch; NoOperation: the one that is remembered
	yields       bool                  // a Dispatch that waits under await-backoff while backingOff
	until        func(n *node) instant // of a rule that waits: the stored deadline it waits for
}

// ladder holds the rules in the order in which they are tried. The first that
// matches decides, so a rule may lean on every earlier one not having matched.
var ladder = [...]rule{
	{Rule: Rule{0, "insert", "a desired slot that is not in the state gets a node and its first attempt"},
		when: absent, action: Insert},
	{Rule: Rule{1, "reap", "nothing is left and nobody wants the slot"},
		when: destroyed | undesired, action: Reap},
	{Rule: Rule{2, "restart", "nothing is left and the slot is wanted: a fresh attempt from the latest spec"},
		when: destroyed | restartDue, action: Restart},
	{Rule: Rule{3, "await-restart", "the attempt failed, the next one waits out its delay"},
		when: destroyed, until: func(n *node) instant { return n.restartAt }},
	{Rule: Rule{4, "begin-delete", "an attempt that is unwanted, outdated or failed is given up for good"},
		when: active | unfit, action: BeginDelete},
	{Rule: Rule{5, "await-operation", "one operation at a time: its result or its deadline comes first"},
		when: pending, until: func(n *node) instant { return n.pendingDeadline }},
	{Rule: Rule{6, "resolve-ambiguous", "before anything is destroyed, find out what a create or start left behind"},
		when: deleting | unresolved, action: Dispatch, yields: true},
	{Rule: Rule{7, "cancel-bootstrap", "end the session before its machine goes away under it"},
		when: deleting | inSession, action: Dispatch, operation: CancelBootstrap, yields: true},
	{Rule: Rule{8, "destroy-lease", "give the machine back: it is billed until it is gone"},
		when: deleting | leased, action: Dispatch, operation: DestroyLease, yields: true},
	{Rule: Rule{9, "mark-destroyed", "nothing is left to clean up"},
		when: deleting, action: MarkDestroyed},
	{Rule: Rule{10, "await-backoff", "the last try failed or found nothing yet, the next one waits"},
		when: backingOff, until: func(n *node) instant { return n.nextEffectAt }},
	{Rule: Rule{11, "steady", "the node is ready: nothing to do"},
		when: steady},
	{Rule: Rule{12, "create-lease", "there is no machine yet"},
		unless: leased, action: Dispatch, operation: CreateLease},
	{Rule: Rule{13, "lookup-endpoint", "there is a machine, and nobody knows where it answers"},
		when: leased, unless: reachable, action: Dispatch, operation: LookupEndpoint},
	{Rule: Rule{14, "observe-convergence", "the agent has joined: tell the bootstrap, then hand off"},
		when: joined | inSession, action: Dispatch, operation: BootstrapConvergenceObserved},
	{Rule: Rule{15, "await-bootstrap", "the bootstrap runs: its stream or the stage deadline comes next"},
		when: bootstrapping | inSession, until: func(n *node) instant { return n.stageDeadline }},
	{Rule: Rule{16, "start-bootstrap", "the machine answers and no bootstrap runs"},
		when: endpointKnown | leased | reachable, unless: inSession, action: Dispatch, operation: StartBootstrap},
	{Rule: Rule{17, "unmatched", "no rule fits: a fault, reported and never guessed at"},
		action: Fail},
}

const ruleAwaitBackoff, ruleUnmatched = 10, 17

// ErrUnmatched is the fault of a slot that no rule fits.
// ErrAttemptsExhausted: every attempt number has been given out.
// ErrSequenceExhausted: every operation number of the attempt has been given
// out, or, while it is growing, all but those kept for its cleanup.
var (
	ErrUnmatched         = errors.New("provisioning: no rule matches")
	ErrAttemptsExhausted = errors.New("provisioning: attempt numbers are exhausted")
	ErrSequenceExhausted = errors.New("provisioning: operation numbers of the attempt are exhausted")
)

// cleanupSequences is how many operation numbers an attempt keeps for its own
// cleanup: growth stops so many below the end.
const cleanupSequences = 1024

// decision is what the ladder says about one slot.
type decision struct {
	*rule
	operation OperationKind // of a Dispatch
	fault     error         // why the action cannot be taken
}

// decide climbs the ladder for one slot.
func decide(n *node, want *template, now instant) decision {
	conditions := look(n, want, now)
	matched := &ladder[ruleUnmatched]
	for i := range ladder {
		if r := &ladder[i]; conditions&r.when == r.when && conditions&r.unless == 0 {
			matched = r
			break
		}
	}
	if matched.yields && conditions&backingOff != 0 { // cleanup retries back off too
		matched = &ladder[ruleAwaitBackoff]
	}
	d := decision{rule: matched, operation: matched.operation}
	switch {
	case n == nil && conditions&absent == 0, matched.action == Fail:
		d = decision{rule: &ladder[ruleUnmatched], fault: ErrUnmatched}
	case matched.action == Dispatch:
		if d.operation == NoOperation {
			d.operation = n.ambiguous
		}
		last := uint64(math.MaxUint64)
		if conditions&active != 0 {
			last -= cleanupSequences
		}
		if n.nextSequence >= last {
			d.fault = ErrSequenceExhausted
		}
	}
	return d
}

// wakeAt is the next stored moment, after now, that can change the decision by
// itself: the one its rule waits for, and the stage deadline of an attempt that
// is not ready, whatever its rule. A moment that is already due is left out, or
// whoever sleeps until it would spin.
func (d decision) wakeAt(n *node, now instant) instant {
	var wake instant
	if d.until != nil && d.until(n).ahead(now) {
		wake = d.until(n)
	}
	if n.intent == Active && !n.ready && n.stageDeadline.ahead(now) {
		wake = earliest(wake, n.stageDeadline)
	}
	return wake
}

func earliest(a, b instant) instant {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// DecideNode says what one slot needs next. A nil node is a slot that is not in
// the state (R0), a nil spec one that is not desired. now is in the clock of
// the node's times; see [ClusterDriver.Clock]. Both arguments are only read.
func DecideNode(observed *ManagedNode, desired *LogicalNodeSpec, now time.Time) NodeDecision {
	var want *template
	if desired != nil {
		want = desired.template()
	}
	var n *node
	if observed != nil {
		var err error
		if n, err = importNode(observed, nil); err != nil {
			unmatched := &ladder[ruleUnmatched]
			return NodeDecision{Rule: unmatched.Rule, Action: Fail, Err: fmt.Errorf("%w: %w", ErrInvalidState, err)}
		}
	}
	return decide(n, want, nearestInstant(now)).export(n)
}

// Decide compares a whole cluster with a wish and returns the next step of
// every slot that needs one, in slot order. It is a function of its arguments,
// only reads them, and cannot fail: a slot that cannot be decided is listed in
// Faults and holds up no other. The union of the plans of single slots is the
// plan of all; only the allocator of attempts is shared. A nil state is an empty
// one. A nil wish is a fault: it must not be taken for a wish for nothing.
func Decide(observed *ClusterState, desired *Desired, now time.Time) Plan {
	if desired == nil {
		return Plan{Faults: []Fault{{Rule: ladder[ruleUnmatched].Rule, Err: fmt.Errorf("%w: there is no wish to compare with", ErrUnmatched)}}}
	}
	if observed == nil {
		observed = &ClusterState{}
	}
	at := nearestInstant(now)
	plan := Plan{ObservedGeneration: desired.generation}
	attempts := allocator{next: max(observed.NextAttemptID, 1)} // the zero state has given out none, and 0 is none
	var wake instant
	for g, want := range matchGroups(observed, desired) {
		for index := range max(len(g.nodes), want.count) {
			n := g.at(index)
			template := want.wants(index)
			if n == nil && template == nil {
				continue
			}
			d := decide(n, template, at)
			if n != nil {
				wake = earliest(wake, d.wakeAt(n, at))
			}
			plan.add(d, g.id, index, n, &attempts)
		}
	}
	plan.RequeueAt = wake.time()
	return plan
}
