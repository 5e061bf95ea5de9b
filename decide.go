package provisioning

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// This file is the whole of deciding: what is looked at, the ladder of rules,
// and the walk over all slots. A slot is a place in the cluster; what the state
// keeps about it is its node; a node lives through one attempt after another.
// Nothing here reads a clock or writes to what it is given. A moment is due at
// or before now, and ahead after it. The result types are in plan.go.

// condition is a set of things that are true of one slot at one moment. The
// ladder looks at nothing else.
type condition uint32

const (
	absent             condition = 1 << iota // desired, and not in the state
	undesired                                // the wish has no such slot
	unfit                                    // undesired, built from another spec, or failed
	active                                   // intent Active: the attempt is being built or kept
	deleting                                 // intent Deleting: the attempt is being given up
	destroyed                                // nothing is left of the attempt
	restartDue                               // RestartAt is unset or due
	backingOff                               // NextEffectAt is ahead
	pending                                  // an operation is in flight
	unresolved                               // nobody knows what came of a create or a start
	leased                                   // a machine is on record
	hasEndpoint                              // and where it answers
	inSession                                // a bootstrap session is live
	inEndpointKnown                          // stage EndpointKnown
	inBootstrapRunning                       // stage BootstrapRunning
	inSwactorJoined                          // stage SwactorJoined
	steady                                   // ready, in stage Dormant or HandedOff
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
	set(want == nil || !sameTemplate(n.template, want) || n.stage == StageFailed, unfit)
	set(n.intent == Active, active)
	set(n.intent == Deleting, deleting)
	set(n.stage == StageDestroyed, destroyed)
	set(n.restartAt == 0 || n.restartAt.due(now), restartDue)
	set(n.nextEffectAt.ahead(now), backingOff)
	set(n.pending != NoOperation, pending)
	set(n.ambiguous != NoOperation, unresolved)
	set(n.lease != "", leased)
	set(n.endpoint != nil, hasEndpoint)
	set(n.session != "", inSession)
	set(n.stage == StageEndpointKnown, inEndpointKnown)
	set(n.stage == StageBootstrapRunning, inBootstrapRunning)
	set(n.stage == StageSwactorJoined, inSwactorJoined)
	set(n.ready && (n.stage == StageDormant || n.stage == StageHandedOff), steady)
	return c
}

// rule is one entry of the ladder. It matches where every condition in all holds
// and none of those in none. A rule without an action waits.
type rule struct {
	Rule
	all, none condition
	action    ActionKind
	operation OperationKind         // of a Dispatch
	backsOff  bool                  // a Dispatch that is await-backoff while backingOff
	until     func(n *node) instant // of a rule that waits: the stored deadline it waits for
}

// remembered stands for the operation of which nobody knows what came.
const remembered = NoOperation

// ladder holds the rules in the order in which they are tried. The first that
// matches decides, so a rule may lean on every earlier one not having matched.
// The cleanup backs off too: R6 to R8 give way to R10 meanwhile. R10 stands below
// them because R9 must not wait.
var ladder = [...]rule{
	{Rule: Rule{0, "insert", "a desired slot that is not in the state gets a node and its first attempt"},
		all: absent, action: Insert},
	{Rule: Rule{1, "reap", "nothing is left and nobody wants the slot"},
		all: destroyed | undesired, action: Reap},
	{Rule: Rule{2, "restart", "nothing is left and the slot is wanted: a fresh attempt from the latest spec"},
		all: destroyed | restartDue, action: Restart},
	{Rule: Rule{3, "await-restart", "the attempt failed, the next one waits out its delay"},
		all: destroyed, until: func(n *node) instant { return n.restartAt }},
	{Rule: Rule{4, "begin-delete", "an attempt that is unwanted, outdated or failed is given up, even in the middle of an operation"},
		all: active | unfit, action: BeginDelete},
	{Rule: Rule{5, "await-operation", "one operation at a time: wait for its result; at its deadline the driver ends it"},
		all: pending, until: func(n *node) instant { return n.pendingDeadline }},
	{Rule: Rule{6, "resolve-ambiguous", "before anything is destroyed, repeat the create or start in doubt, to learn what it left"},
		all: deleting | unresolved, action: Dispatch, operation: remembered, backsOff: true},
	{Rule: Rule{7, "cancel-bootstrap", "end the session before its machine goes away under it"},
		all: deleting | inSession, action: Dispatch, operation: CancelBootstrap, backsOff: true},
	{Rule: Rule{8, "destroy-lease", "give the machine back: it is billed until it is gone"},
		all: deleting | leased, action: Dispatch, operation: DestroyLease, backsOff: true},
	{Rule: Rule{9, "mark-destroyed", "nothing is left to clean up"},
		all: deleting, action: MarkDestroyed},
	{Rule: Rule{10, "await-backoff", "the last try failed or found nothing yet, the next one waits"},
		all: backingOff, until: func(n *node) instant { return n.nextEffectAt }},
	{Rule: Rule{11, "steady", "the node is ready: nothing to do"},
		all: steady},
	{Rule: Rule{12, "create-lease", "there is no machine on record; the key makes a repeated create safe"},
		none: leased, action: Dispatch, operation: CreateLease},
	{Rule: Rule{13, "lookup-endpoint", "there is a machine, and nobody knows where it answers"},
		all: leased, none: hasEndpoint, action: Dispatch, operation: LookupEndpoint},
	{Rule: Rule{14, "observe-convergence", "the agent has joined: tell the bootstrap"},
		all: inSwactorJoined | inSession, action: Dispatch, operation: BootstrapConvergenceObserved},
	{Rule: Rule{15, "await-bootstrap", "the bootstrap runs: wait for its stream; at the stage deadline the driver ends the attempt"},
		all: inBootstrapRunning | inSession, until: func(n *node) instant { return n.stageDeadline }},
	{Rule: Rule{16, "start-bootstrap", "the endpoint is known and there is no session yet"},
		all: inEndpointKnown | leased | hasEndpoint, none: inSession, action: Dispatch, operation: StartBootstrap},
	{Rule: Rule{17, "unmatched", "no rule fits: a fault, reported and never guessed at"},
		action: Fail},
}

// rungs is what the climb looks at of the ladder, in two cache lines: a cluster
// that is settled is a climb for every slot.
var rungs = rungsOf(ladder[:])

func rungsOf(ladder []rule) (rungs [len(ladder)]struct{ looksAt, all condition }) {
	for i, r := range ladder {
		rungs[i].looksAt, rungs[i].all = r.all|r.none, r.all
	}
	return rungs
}

// The rules that code asks for, by their place in the ladder.
const (
	ruleInsert         = 0
	ruleAwaitRestart   = 3
	ruleAwaitOperation = 5
	ruleResolve        = 6
	ruleAwaitBackoff   = 10
	ruleSteady         = 11
	ruleAwaitBootstrap = 15
	ruleUnmatched      = 17
)

// ErrUnmatched is the fault of a slot that no rule fits.
// ErrAttemptsExhausted: every attempt number has been given out.
// ErrSequenceExhausted: every operation number of the attempt has been given
// out, or, while it is Active, all but those kept for its cleanup.
var (
	ErrUnmatched         = errors.New("provisioning: no rule matches")
	ErrAttemptsExhausted = errors.New("provisioning: attempt numbers are exhausted")
	ErrSequenceExhausted = errors.New("provisioning: operation numbers of the attempt are exhausted")
)

// cleanupSequences is how many operation numbers an attempt keeps for its own
// cleanup: while it is Active it stops so many below the end.
const cleanupSequences = 1024

// decision is what the ladder says about one slot.
type decision struct {
	*rule
	operation OperationKind // of a Dispatch
	fault     error         // why the action cannot be taken
}

// decide climbs the ladder for one slot.
func decide(n *node, want *template, now instant) decision {
	if n == nil && want == nil { // not a slot at all
		return decision{rule: &ladder[ruleUnmatched], fault: ErrUnmatched}
	}
	conditions := look(n, want, now)
	rung := 0
	for conditions&rungs[rung].looksAt != rungs[rung].all {
		rung++ // the last one matches everything
	}
	matched := &ladder[rung]
	if matched.backsOff && conditions&backingOff != 0 {
		matched = &ladder[ruleAwaitBackoff]
	}
	d := decision{rule: matched, operation: matched.operation}
	switch matched.action {
	case Fail:
		d.fault = ErrUnmatched
	case Dispatch:
		if d.operation == remembered {
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

// wakeAt is the next stored moment ahead at which there is something to do for a
// slot: the one its rule waits for, or the stage deadline of an attempt that is
// not ready, whatever its rule. (Of those, the driver folds a deadline that has
// passed; the ladder then sees what came of that.) A moment that is already due
// is left out, or whoever sleeps until it would spin.
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
// the state (R0), a nil spec one that is not desired. now is on the same clock as
// the node's times; see [ClusterDriver.Clock]. Neither node nor spec is written.
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
	attempts := allocator{next: max(observed.NextAttemptID, 1)} // attempts start at 1
	var wake instant
	for g, want := range matchGroups(observed, desired) {
		for index := range max(len(g.nodes), want.count) {
			n := g.at(index)
			spec := want.wants(index) // nil: undesired
			if n == nil && spec == nil {
				continue
			}
			d := decide(n, spec, at)
			if n != nil {
				wake = earliest(wake, d.wakeAt(n, at))
			}
			plan.add(d, g.id, index, n, &attempts)
		}
	}
	plan.RequeueAt = wake.time()
	return plan
}
