package provisioning

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// ftRow is one look at one slot.
type ftRow struct {
	why  string
	node *ManagedNode     // nil: the slot is not in the state
	want *LogicalNodeSpec // nil: nobody wants it
	rule string

	operation OperationKind // of a dispatch
	until     time.Time     // of a rule that waits
	fault     error
}

func ftOf(edits ...func(*ManagedNode)) *ManagedNode {
	m := ftNode(edits...)
	return &m
}

// ftActions is what each rule does about its slot, once more.
var ftActions = map[string]ActionKind{
	"insert": Insert, "reap": Reap, "restart": Restart, "begin-delete": BeginDelete, "mark-destroyed": MarkDestroyed,
	"resolve-ambiguous": Dispatch, "cancel-bootstrap": Dispatch, "destroy-lease": Dispatch, "create-lease": Dispatch,
	"lookup-endpoint": Dispatch, "observe-convergence": Dispatch, "start-bootstrap": Dispatch,
	"await-restart": NoAction, "await-operation": NoAction, "await-backoff": NoAction, "await-bootstrap": NoAction, "steady": NoAction,
	"unmatched": Fail,
}

func ftRule(t *testing.T, rows ...ftRow) {
	for _, row := range rows {
		t.Run(row.why, func(t *testing.T) {
			node := row.node
			if node != nil {
				node = new(*node)
			}
			d := DecideNode(node, row.want, ftNow)
			require.Equal(t, row.rule, d.Rule.Name)
			require.Equal(t, ftActions[row.rule], d.Action)
			require.Equal(t, row.operation, d.Operation)
			require.Equal(t, row.until, d.Until)
			require.ErrorIs(t, d.Err, row.fault)
			require.Equal(t, row.node, node, "only read")
		})
	}
}

func TestRule_Insert(t *testing.T) {
	ftRule(t,
		ftRow{why: "desired and not in the state", want: ftWanted, rule: "insert"},
		ftRow{why: "not in the state and not desired: there is no such slot", rule: "unmatched", fault: ErrUnmatched},
		ftRow{why: "already in the state", node: ftOf(), want: ftWanted, rule: "create-lease", operation: CreateLease},
	)
	plan := Decide(ftState(t, ftMove(ftNode(ftReady), "w", 1, 5)), mustExpand(t, shapeOf(4, groupOf("w", 3))), ftNow)
	require.Equal(t, Plan{ObservedGeneration: 4, Actions: []Action{
		{Node: "w-0", Group: "w", Index: 0, Rule: Ladder()[0], Kind: Insert, NewAttempt: 6},
		{Node: "w-2", Group: "w", Index: 2, Rule: Ladder()[0], Kind: Insert, NewAttempt: 7},
	}}, plan)
}

func TestRule_Reap(t *testing.T) {
	ftRule(t,
		ftRow{why: "nothing is left and nobody wants it", node: ftOf(ftDestroyed), rule: "reap"},
		ftRow{why: "a restart time keeps nothing that nobody wants", node: ftOf(ftFailed, ftDestroyed, ftRestartIn(time.Hour)), rule: "reap"},
		ftRow{why: "somebody wants it", node: ftOf(ftDestroyed), want: ftWanted, rule: "restart"},
		ftRow{why: "not destroyed yet", node: ftOf(ftDeleting), rule: "mark-destroyed"},
	)
	plan := Decide(ftState(t, ftNode(ftDestroyed)), mustExpand(t, shapeOf(4)), ftNow)
	require.Equal(t, Plan{ObservedGeneration: 4, Actions: []Action{
		{Node: "w-0", Group: "w", Index: 0, Rule: Ladder()[1], Kind: Reap, Attempt: ftAttempt},
	}}, plan)
}

func TestRule_Restart(t *testing.T) {
	ftRule(t,
		ftRow{why: "wanted again, and no failure to wait for", node: ftOf(ftDestroyed), want: ftWanted, rule: "restart"},
		ftRow{why: "built from the latest spec, so drift is no matter", node: ftOf(ftDestroyed), want: ftDrifted, rule: "restart"},
		ftRow{why: "the restart time came a nanosecond ago", node: ftOf(ftFailed, ftDestroyed, ftRestartIn(-1)), want: ftWanted, rule: "restart"},
		ftRow{why: "the restart time is now", node: ftOf(ftFailed, ftDestroyed, ftRestartIn(0)), want: ftWanted, rule: "restart"},
		ftRow{why: "the restart time comes in a nanosecond", node: ftOf(ftFailed, ftDestroyed, ftRestartIn(1)), want: ftWanted, rule: "await-restart", until: ftAfter(1)},
		ftRow{why: "unwanted", node: ftOf(ftDestroyed), rule: "reap"},
		ftRow{why: "not destroyed yet", node: ftOf(ftDeleting), want: ftWanted, rule: "mark-destroyed"},
	)
	plan := Decide(ftState(t, ftNode(ftDestroyed)), mustExpand(t, shapeOf(4, groupOf("w", 1))), ftNow)
	require.Equal(t, Plan{ObservedGeneration: 4, Actions: []Action{
		{Node: "w-0", Group: "w", Index: 0, Rule: Ladder()[2], Kind: Restart, Attempt: ftAttempt, NewAttempt: ftAttempt + 1},
	}}, plan)
}

func TestRule_AwaitRestart(t *testing.T) {
	ftRule(t,
		ftRow{why: "the next attempt waits out its delay", node: ftOf(ftFailed, ftDestroyed), want: ftWanted, rule: "await-restart", until: ftAfter(3 * time.Second)},
		ftRow{why: "a corrected wish does not jump the queue", node: ftOf(ftFailed, ftDestroyed), want: ftDrifted, rule: "await-restart", until: ftAfter(3 * time.Second)},
		ftRow{why: "unwanted: nothing to wait for", node: ftOf(ftFailed, ftDestroyed), rule: "reap"},
		ftRow{why: "the restart time is now", node: ftOf(ftFailed, ftDestroyed, ftRestartIn(0)), want: ftWanted, rule: "restart"},
		ftRow{why: "not destroyed yet: the cleanup does not wait", node: ftOf(ftFailed, ftDeleting), want: ftWanted, rule: "mark-destroyed"},
	)
}

func TestRule_BeginDelete(t *testing.T) {
	for _, stage := range []struct {
		name string
		edit func(*ManagedNode)
	}{{"new", func(*ManagedNode) {}}, {"requested", ftRequested}, {"leased", ftLeased}, {"reachable", ftReachable},
		{"running", ftRunning}, {"joined", ftJoined}, {"ready", ftReady}} {
		ftRule(t,
			ftRow{why: "unwanted while " + stage.name, node: ftOf(stage.edit), rule: "begin-delete"},
			ftRow{why: "drifted while " + stage.name, node: ftOf(stage.edit), want: ftDrifted, rule: "begin-delete"},
			ftRow{why: "failed while " + stage.name, node: ftOf(stage.edit, ftFailed), want: ftWanted, rule: "begin-delete"},
		)
	}
	ftRule(t,
		ftRow{why: "it waits for no operation", node: ftOf(ftRequested, ftPending(CreateLease)), rule: "begin-delete"},
		ftRow{why: "it waits out no delay", node: ftOf(ftRequested, ftBackingOff(time.Hour)), want: ftDrifted, rule: "begin-delete"},
		ftRow{why: "wanted, exact and well", node: ftOf(ftReady), want: ftWanted, rule: "steady"},
		ftRow{why: "being deleted already", node: ftOf(ftReady, ftDeleting), rule: "destroy-lease", operation: DestroyLease},
		ftRow{why: "failed, and being deleted already", node: ftOf(ftReady, ftFailed, ftDeleting), want: ftWanted, rule: "destroy-lease", operation: DestroyLease},
	)
}

func TestRule_AwaitOperation(t *testing.T) {
	ftRule(t,
		ftRow{why: "the create is in flight", node: ftOf(ftRequested, ftPending(CreateLease)), want: ftWanted, rule: "await-operation", until: ftAfter(time.Minute)},
		ftRow{why: "an operation comes before a backoff", node: ftOf(ftRequested, ftPending(CreateLease), ftBackingOff(time.Second)), want: ftWanted, rule: "await-operation", until: ftAfter(time.Minute)},
		ftRow{why: "the hand-off overtook the convergence call", node: ftOf(ftReady, ftPending(BootstrapConvergenceObserved)), want: ftWanted, rule: "await-operation", until: ftAfter(time.Minute)},
		ftRow{why: "the cleanup waits too", node: ftOf(ftRunning, ftDeleting, ftPending(StartBootstrap)), want: ftWanted, rule: "await-operation", until: ftAfter(time.Minute)},
		ftRow{why: "nothing is asked about a call that is still running", node: ftOf(ftRequested, ftDeleting, ftPending(CreateLease), ftAmbiguous(CreateLease)), rule: "await-operation", until: ftAfter(time.Minute)},
		ftRow{why: "a deadline that has come is the driver's to expire, and no new call is made before", node: ftOf(ftRequested, ftPending(CreateLease), func(m *ManagedNode) { m.Pending.Deadline = ftNow }), want: ftWanted, rule: "await-operation", until: ftNow},
		ftRow{why: "nothing is in flight", node: ftOf(ftRequested), want: ftWanted, rule: "create-lease", operation: CreateLease},
	)
}

// ftGated are rows about a cleanup rule under a backoff: the same node a
// nanosecond before its time, at it and after it.
func ftGated(rule string, operation OperationKind, edits ...func(*ManagedNode)) []ftRow {
	with := func(d time.Duration) *ManagedNode { return ftOf(append(slices.Clone(edits), ftBackingOff(d))...) }
	return []ftRow{
		{why: "the next try is due in a nanosecond", node: with(1), rule: "await-backoff", until: ftAfter(1)},
		{why: "the next try is due now", node: with(0), rule: rule, operation: operation},
		{why: "the next try was due a nanosecond ago", node: with(-1), rule: rule, operation: operation},
	}
}

func TestRule_ResolveAmbiguous(t *testing.T) {
	ftRule(t,
		ftRow{why: "a create may have made a machine", node: ftOf(ftRequested, ftDeleting, ftAmbiguous(CreateLease)), rule: "resolve-ambiguous", operation: CreateLease},
		ftRow{why: "a start may have made a session", node: ftOf(ftReachable, ftDeleting, ftAmbiguous(StartBootstrap)), rule: "resolve-ambiguous", operation: StartBootstrap},
		ftRow{why: "it comes before the lease is destroyed, wanted or not", node: ftOf(ftReachable, ftDeleting, ftAmbiguous(StartBootstrap)), want: ftWanted, rule: "resolve-ambiguous", operation: StartBootstrap},
		ftRow{why: "and before a session is cancelled", node: ftOf(ftRunning, ftDeleting, ftAmbiguous(StartBootstrap)), rule: "resolve-ambiguous", operation: StartBootstrap},
		ftRow{why: "still on the way up: the way up tries again by itself", node: ftOf(ftRequested, ftAmbiguous(CreateLease)), want: ftWanted, rule: "create-lease", operation: CreateLease},
		ftRow{why: "nothing is remembered", node: ftOf(ftReachable, ftDeleting), rule: "destroy-lease", operation: DestroyLease},
	)
	ftRule(t, ftGated("resolve-ambiguous", CreateLease, ftRequested, ftDeleting, ftAmbiguous(CreateLease))...)

	plan := Decide(ftState(t, ftNode(ftRequested, ftDeleting, ftAmbiguous(CreateLease))), mustExpand(t, shapeOf(4)), ftNow)
	require.Equal(t, []Action{{Node: "w-0", Group: "w", Rule: Ladder()[6], Kind: Dispatch, Attempt: ftAttempt, Operation: CreateLease,
		OperationID: OperationID{Attempt: ftAttempt, Sequence: ftNextSequence}, Resolving: true}}, plan.Actions)
}

func TestRule_CancelBootstrap(t *testing.T) {
	ftRule(t,
		ftRow{why: "a session is live", node: ftOf(ftRunning, ftDeleting), rule: "cancel-bootstrap", operation: CancelBootstrap},
		ftRow{why: "also of a failed attempt", node: ftOf(ftRunning, ftFailed, ftDeleting), want: ftWanted, rule: "cancel-bootstrap", operation: CancelBootstrap},
		ftRow{why: "not being deleted", node: ftOf(ftRunning), want: ftWanted, rule: "await-bootstrap", until: ftAfter(20 * time.Minute)},
		ftRow{why: "no session is live", node: ftOf(ftReachable, ftDeleting), rule: "destroy-lease", operation: DestroyLease},
	)
	ftRule(t, ftGated("cancel-bootstrap", CancelBootstrap, ftRunning, ftDeleting)...)
	plan := Decide(ftState(t, ftNode(ftRunning, ftDeleting)), mustExpand(t, shapeOf(4)), ftNow)
	require.False(t, plan.Actions[0].Resolving)
}

func TestRule_DestroyLease(t *testing.T) {
	ftRule(t,
		ftRow{why: "a machine is on record", node: ftOf(ftLeased, ftDeleting), rule: "destroy-lease", operation: DestroyLease},
		ftRow{why: "not being deleted", node: ftOf(ftLeased), want: ftWanted, rule: "lookup-endpoint", operation: LookupEndpoint},
		ftRow{why: "no machine is on record", node: ftOf(ftRequested, ftDeleting), rule: "mark-destroyed"},
	)
	ftRule(t, ftGated("destroy-lease", DestroyLease, ftLeased, ftDeleting)...)
}

func TestRule_MarkDestroyed(t *testing.T) {
	ftRule(t,
		ftRow{why: "there never was anything", node: ftOf(ftDeleting), rule: "mark-destroyed"},
		ftRow{why: "an endpoint costs nothing", node: ftOf(ftReachable, ftDeleting, func(m *ManagedNode) { m.Record.Lease = "" }), rule: "mark-destroyed"},
		ftRow{why: "no call is made, so no delay holds it up", node: ftOf(ftDeleting, ftBackingOff(time.Hour)), want: ftWanted, rule: "mark-destroyed"},
		ftRow{why: "not being deleted", node: ftOf(), want: ftWanted, rule: "create-lease", operation: CreateLease},
		ftRow{why: "destroyed already", node: ftOf(ftDestroyed), rule: "reap"},
	)
}

func TestRule_AwaitBackoff(t *testing.T) {
	for _, step := range []struct {
		edit      func(*ManagedNode)
		rule      string
		operation OperationKind
	}{{ftRequested, "create-lease", CreateLease}, {ftLeased, "lookup-endpoint", LookupEndpoint}, {ftReachable, "start-bootstrap", StartBootstrap},
		{ftJoined, "observe-convergence", BootstrapConvergenceObserved}} {
		ftRule(t,
			ftRow{why: step.rule + " is due in a nanosecond", node: ftOf(step.edit, ftBackingOff(1)), want: ftWanted, rule: "await-backoff", until: ftAfter(1)},
			ftRow{why: step.rule + " is due now", node: ftOf(step.edit, ftBackingOff(0)), want: ftWanted, rule: step.rule, operation: step.operation},
			ftRow{why: step.rule + " was due a nanosecond ago", node: ftOf(step.edit, ftBackingOff(-1)), want: ftWanted, rule: step.rule, operation: step.operation},
			ftRow{why: step.rule + " does not wait", node: ftOf(step.edit), want: ftWanted, rule: step.rule, operation: step.operation},
		)
	}
}

func TestRule_Steady(t *testing.T) {
	ftRule(t,
		ftRow{why: "ready in Dormant", node: ftOf(ftReady), want: ftWanted, rule: "steady"},
		ftRow{why: "ready in HandedOff, which is reserved", node: ftOf(ftReady, ftStage(StageHandedOff)), want: ftWanted, rule: "steady"},
		ftRow{why: "Dormant and not ready does not exist", node: ftOf(ftReady, func(m *ManagedNode) { m.Record.Ready = false }), want: ftWanted, rule: "unmatched", fault: ErrUnmatched},
		ftRow{why: "ready in another stage does not exist", node: ftOf(ftReady, ftStage(StageSwactorJoined)), want: ftWanted, rule: "unmatched", fault: ErrUnmatched},
	)
}

func TestRule_CreateLease(t *testing.T) {
	ftRule(t,
		ftRow{why: "a fresh attempt", node: ftOf(), want: ftWanted, rule: "create-lease", operation: CreateLease},
		ftRow{why: "an attempt whose create failed", node: ftOf(ftRequested), want: ftWanted, rule: "create-lease", operation: CreateLease},
		ftRow{why: "an attempt whose create is unresolved asks again under the same key", node: ftOf(ftRequested, ftAmbiguous(CreateLease)), want: ftWanted, rule: "create-lease", operation: CreateLease},
		ftRow{why: "a machine is on record", node: ftOf(ftLeased), want: ftWanted, rule: "lookup-endpoint", operation: LookupEndpoint},
	)
	plan := Decide(ftState(t, ftNode()), mustExpand(t, shapeOf(4, groupOf("w", 1))), ftNow)
	require.Equal(t, []Action{{Node: "w-0", Group: "w", Rule: Ladder()[12], Kind: Dispatch, Attempt: ftAttempt, Operation: CreateLease,
		OperationID: OperationID{Attempt: ftAttempt, Sequence: ftNextSequence}}}, plan.Actions, "the way up resolves by trying again: not AdoptOnly")
}

func TestRule_LookupEndpoint(t *testing.T) {
	ftRule(t,
		ftRow{why: "a machine, and no endpoint", node: ftOf(ftLeased), want: ftWanted, rule: "lookup-endpoint", operation: LookupEndpoint},
		ftRow{why: "no machine", node: ftOf(ftRequested), want: ftWanted, rule: "create-lease", operation: CreateLease},
		ftRow{why: "the endpoint is known", node: ftOf(ftReachable), want: ftWanted, rule: "start-bootstrap", operation: StartBootstrap},
	)
}

func TestRule_ObserveConvergence(t *testing.T) {
	ftRule(t,
		ftRow{why: "the agent has joined, the session is live", node: ftOf(ftJoined), want: ftWanted, rule: "observe-convergence", operation: BootstrapConvergenceObserved},
		ftRow{why: "not joined yet", node: ftOf(ftRunning), want: ftWanted, rule: "await-bootstrap", until: ftAfter(20 * time.Minute)},
		ftRow{why: "joined without a session does not exist", node: ftOf(ftJoined, func(m *ManagedNode) { m.ActiveBootstrap = "" }), want: ftWanted, rule: "unmatched", fault: ErrUnmatched},
	)
}

func TestRule_AwaitBootstrap(t *testing.T) {
	ftRule(t,
		ftRow{why: "the bootstrap runs", node: ftOf(ftRunning), want: ftWanted, rule: "await-bootstrap", until: ftAfter(20 * time.Minute)},
		ftRow{why: "a policy without a limit waits without a moment", node: ftOf(ftRunning, func(m *ManagedNode) { m.Retry.StageDeadline = time.Time{} }), want: ftWanted, rule: "await-bootstrap"},
		ftRow{why: "running without a session does not exist", node: ftOf(ftRunning, func(m *ManagedNode) { m.ActiveBootstrap = "" }), want: ftWanted, rule: "unmatched", fault: ErrUnmatched},
		ftRow{why: "joined", node: ftOf(ftJoined), want: ftWanted, rule: "observe-convergence", operation: BootstrapConvergenceObserved},
	)
}

func TestRule_StartBootstrap(t *testing.T) {
	ftRule(t,
		ftRow{why: "the machine answers, and no bootstrap runs", node: ftOf(ftReachable), want: ftWanted, rule: "start-bootstrap", operation: StartBootstrap},
		ftRow{why: "what came of the last start is not known: ask again under the same key", node: ftOf(ftReachable, ftAmbiguous(StartBootstrap)), want: ftWanted, rule: "start-bootstrap", operation: StartBootstrap},
		ftRow{why: "no endpoint", node: ftOf(ftReachable, func(m *ManagedNode) { m.Record.Connection = nil }), want: ftWanted, rule: "lookup-endpoint", operation: LookupEndpoint},
		ftRow{why: "no machine", node: ftOf(ftReachable, func(m *ManagedNode) { m.Record.Lease = "" }), want: ftWanted, rule: "create-lease", operation: CreateLease},
		ftRow{why: "another stage with these facts does not exist", node: ftOf(ftReachable, ftStage(StageLeaseCreated)), want: ftWanted, rule: "unmatched", fault: ErrUnmatched},
		ftRow{why: "a live session in this stage does not exist", node: ftOf(ftRunning, ftStage(StageEndpointKnown)), want: ftWanted, rule: "unmatched", fault: ErrUnmatched},
	)
}

func TestRule_Unmatched(t *testing.T) {
	stuck := ftNode(ftRunning, func(m *ManagedNode) { m.ActiveBootstrap = "" })
	ftRule(t,
		ftRow{why: "no rule fits", node: &stuck, want: ftWanted, rule: "unmatched", fault: ErrUnmatched},
		ftRow{why: "the same facts in order", node: ftOf(ftRunning), want: ftWanted, rule: "await-bootstrap", until: ftAfter(20 * time.Minute)},
		ftRow{why: "giving up always fits", node: &stuck, rule: "begin-delete"},
	)
	plan := Decide(ftState(t, stuck, ftMove(ftNode(), "w", 1, 8)), mustExpand(t, shapeOf(4, groupOf("w", 2))), ftNow)
	require.Len(t, plan.Faults, 1)
	require.Equal(t, LogicalNodeID("w-0"), plan.Faults[0].Node)
	require.Equal(t, ftAttempt, plan.Faults[0].Attempt)
	require.Equal(t, "unmatched", plan.Faults[0].Rule.Name)
	require.ErrorIs(t, plan.Faults[0].Err, ErrUnmatched)
	require.EqualError(t, plan.Faults[0].Err, "provisioning: no rule matches: w-0, attempt 7, R17 unmatched")
	require.Len(t, plan.Actions, 1, "the others go on")
	require.Equal(t, LogicalNodeID("w-1"), plan.Actions[0].Node)
	require.Equal(t, ftAfter(20*time.Minute), plan.RequeueAt, "its stage deadline still ends it")
}

// ftOracle is the table of rules once more, in plain code and from the node's
// public value: the number of the rule that decides about a slot.
func ftOracle(m *ManagedNode, want *LogicalNodeSpec, now time.Time) int {
	ahead := func(at time.Time) bool { return !at.IsZero() && at.After(now) }
	if m == nil {
		if want == nil {
			return 17
		}
		return 0
	}
	r := m.Record
	deleting, hasLease, hasSession := m.Intent == Deleting, r.Lease != "", m.ActiveBootstrap != ""
	gated := func(number int) int {
		if ahead(m.Retry.NextEffectAt) {
			return 10
		}
		return number
	}
	switch {
	case r.Stage == StageDestroyed && want == nil:
		return 1
	case r.Stage == StageDestroyed && !ahead(m.Retry.RestartAt):
		return 2
	case r.Stage == StageDestroyed:
		return 3
	case !deleting && (want == nil || r.Stage == StageFailed || !r.Spec.Equal(*want)):
		return 4
	case m.Pending != nil:
		return 5
	case deleting && m.Retry.Ambiguous != NoOperation:
		return gated(6)
	case deleting && hasSession:
		return gated(7)
	case deleting && hasLease:
		return gated(8)
	case deleting:
		return 9
	case ahead(m.Retry.NextEffectAt):
		return 10
	case r.Ready && (r.Stage == StageHandedOff || r.Stage == StageDormant):
		return 11
	case !hasLease:
		return 12
	case r.Connection == nil:
		return 13
	case r.Stage == StageSwactorJoined && hasSession:
		return 14
	case r.Stage == StageBootstrapRunning && hasSession:
		return 15
	case r.Stage == StageEndpointKnown && !hasSession:
		return 16
	}
	return 17
}

// Every combination of what the ladder looks at, lawful or not, is decided by
// exactly the rule that the table names, and every rule is reached.
func TestLadderIsTotal(t *testing.T) {
	reached := make(map[int]int)
	looked := make(map[condition]bool)
	wants := []*LogicalNodeSpec{nil, ftWanted, ftDrifted}
	templates := make([]*template, len(wants))
	for i, want := range wants {
		if want != nil {
			templates[i] = want.template()
		}
	}
	moments := []time.Time{{}, ftAfter(-1), ftNow, ftAfter(1)}
	at := nearestInstant(ftNow)

	check := func(m *ManagedNode, n *node, i int) {
		d := decide(n, templates[i], at)
		number := ftOracle(m, wants[i], ftNow)
		if d.Number != number {
			require.Equal(t, number, d.Number, "%+v wanted %v", m, wants[i])
		}
		reached[number]++
		looked[look(n, templates[i], at)] = true
	}
	for i := range wants {
		check(nil, nil, i)
	}
	bools := []bool{false, true}
	for stage := range stages {
		for intent := range intents {
			for _, ready := range bools {
				for _, busy := range bools {
					for _, ambiguous := range []OperationKind{NoOperation, CreateLease, StartBootstrap} {
						for _, leased := range bools {
							for _, reachable := range bools {
								for _, inSession := range bools {
									m := ftNode(ftStage(stage))
									m.Intent, m.Record.Ready, m.Retry.Ambiguous = intent, ready, ambiguous
									if busy {
										ftPending(LookupEndpoint)(&m)
									}
									if leased {
										m.Record.Lease = ftLease
									}
									if reachable {
										m.Record.Connection = &ftEndpoint
									}
									if inSession {
										m.ActiveBootstrap = ftSession
									}
									n := ftImport(t, m)
									for _, next := range moments {
										for _, restart := range moments {
											m.Retry.NextEffectAt, m.Retry.RestartAt = next, restart
											n.nextEffectAt, n.restartAt = 0, 0
											if !next.IsZero() {
												n.nextEffectAt = nearestInstant(next)
											}
											if !restart.IsZero() {
												n.restartAt = nearestInstant(restart)
											}
											for i := range wants {
												check(&m, n, i)
											}
										}
									}
								}
							}
						}
					}
				}
			}
		}
	}
	for number := range ladder {
		require.Positive(t, reached[number], "R%d is reached", number)
	}
	for bit := condition(1); bit <= steady; bit <<= 1 {
		seen := 0
		for c := range looked {
			if c&bit != 0 {
				seen++
			}
		}
		require.Positive(t, seen, "condition %b is met", bit)
		require.Less(t, seen, len(looked), "condition %b is missed", bit)
	}
}

func TestLadderIsNumbered(t *testing.T) {
	rules := Ladder()
	require.Len(t, rules, len(ftActions))
	names := make(map[string]bool)
	for i, r := range rules {
		require.Equal(t, i, r.Number)
		require.Regexp(t, `^[a-z]+(-[a-z]+)*$`, r.Name)
		require.NotEmpty(t, r.Why)
		require.False(t, names[r.Name], r.Name)
		names[r.Name] = true
		require.Equal(t, ftActions[r.Name], ladder[i].action, r.Name)
		require.Equal(t, fmt.Sprintf("R%d %s", i, r.Name), r.String())
	}
	last := ladder[len(ladder)-1]
	require.Zero(t, last.all|last.none, "the last entry catches everything")
	for number, name := range map[int]string{ruleAwaitBackoff: "await-backoff", ruleUnmatched: "unmatched", ruleResolve: "resolve-ambiguous",
		ruleAwaitBootstrap: "await-bootstrap", ruleSteady: "steady"} {
		require.Equal(t, name, rules[number].Name)
	}
	rules[0].Name = "spoilt"
	require.Equal(t, "insert", Ladder()[0].Name, "the caller's own")
}

func TestPlanNames(t *testing.T) {
	testNames[ActionKind](t, "action", "none", "Insert", "BeginDelete", "MarkDestroyed", "Restart", "Reap", "Dispatch", "Fail")
}

// A node that is lawful is never unmatched, and DecideNode agrees with the table.
func TestProp_DecideNodeFollowsTheTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		groups := ftDrawGroups(t)
		spec := newTemplate("r", groups[0]).slot(0)
		m := ftDrawNode(t, spec, 5)
		want := rapid.SampledFrom([]*LogicalNodeSpec{nil, &spec, ftSpec("v", 0, "another")}).Draw(t, "want")
		now := ftDrawTime(t, "now", false)
		d := DecideNode(&m, want, now)
		require.Equal(t, ftOracle(&m, want, now), d.Rule.Number, "%v", d.Rule)
		require.NotEqual(t, Fail, d.Action)
	})
}

func TestPlanIsInSlotOrder(t *testing.T) {
	state := ftState(t, ftMove(ftNode(), "w-1", 0, 1), ftMove(ftNode(), "w", 10, 2), ftMove(ftNode(), "w", 9, 3), ftMove(ftNode(ftDestroyed), "w", 2, 4),
		ftMove(ftNode(), "x", 1, 5))
	desired := mustExpand(t, shapeOf(4, groupOf("w-1", 1), groupOf("w", 12), groupOf("a", 2)))
	plan := Decide(state, desired, ftNow)
	var lines []string
	for _, a := range plan.Actions {
		lines = append(lines, fmt.Sprintf("%s %s %d->%d", a.Node, a.Kind, a.Attempt, a.NewAttempt))
	}
	require.Equal(t, []string{
		"a-0 Insert 0->6", "a-1 Insert 0->7",
		"w-0 Insert 0->8", "w-1 Insert 0->9", "w-2 Restart 4->10", "w-3 Insert 0->11", "w-4 Insert 0->12", "w-5 Insert 0->13",
		"w-6 Insert 0->14", "w-7 Insert 0->15", "w-8 Insert 0->16", "w-9 Dispatch 3->0", "w-10 Dispatch 2->0", "w-11 Insert 0->17",
		"w-1-0 Dispatch 1->0",
		"x-1 BeginDelete 5->0",
	}, lines, "w-9 before w-10, group w before group w-1, attempts numbered as the slots come")
}

func TestRequeueAt(t *testing.T) {
	pendingUntil := func(d time.Duration) func(*ManagedNode) {
		return func(m *ManagedNode) { ftPending(LookupEndpoint)(m); m.Pending.Deadline = ftAfter(d) }
	}
	desired := mustExpand(t, shapeOf(4, groupOf("w", 3)))
	requeue := func(nodes ...ManagedNode) time.Time {
		for i := range nodes {
			nodes[i] = ftMove(nodes[i], "w", i, NodeAttemptID(i+1))
		}
		return Decide(ftState(t, nodes...), desired, ftNow).RequeueAt
	}
	for _, row := range []struct {
		why  string
		node ManagedNode
		want time.Time
	}{
		{"nothing to wait for", ftNode(), time.Time{}},
		{"an operation", ftNode(ftRequested, pendingUntil(5)), ftAfter(5)},
		{"an operation that is due: whoever slept until it would spin", ftNode(ftRequested, pendingUntil(0)), time.Time{}},
		{"an operation that was due", ftNode(ftRequested, pendingUntil(-1)), time.Time{}},
		{"an operation that is due in a nanosecond", ftNode(ftRequested, pendingUntil(1)), ftAfter(1)},
		{"a backoff", ftNode(ftRequested, ftBackingOff(5)), ftAfter(5)},
		{"a backoff that is due is no wait", ftNode(ftRequested, ftBackingOff(0)), time.Time{}},
		{"a restart", ftNode(ftFailed, ftDestroyed, ftRestartIn(5)), ftAfter(5)},
		{"a restart that is due is no wait", ftNode(ftFailed, ftDestroyed, ftRestartIn(0)), time.Time{}},
		{"a cleanup that backs off", ftNode(ftLeased, ftDeleting, ftBackingOff(5)), ftAfter(5)},
		{"no delay of a cleanup that needs no call", ftNode(ftDeleting, ftBackingOff(5)), time.Time{}},
		{"the bootstrap", ftNode(ftRunning, ftStageDeadlineIn(5)), ftAfter(5)},
		{"a bootstrap that is out of time", ftNode(ftRunning, ftStageDeadlineIn(0)), time.Time{}},
		{"a bootstrap without a limit", ftNode(ftRunning, func(m *ManagedNode) { m.Retry.StageDeadline = time.Time{} }), time.Time{}},

		{"a stage deadline during an operation", ftNode(ftLeased, pendingUntil(9), ftStageDeadlineIn(5)), ftAfter(5)},
		{"an operation before the stage deadline", ftNode(ftLeased, pendingUntil(5), ftStageDeadlineIn(9)), ftAfter(5)},
		{"a stage deadline behind an operation that is due", ftNode(ftLeased, pendingUntil(0), ftStageDeadlineIn(9)), ftAfter(9)},
		{"a stage deadline during a backoff", ftNode(ftLeased, ftBackingOff(9), ftStageDeadlineIn(5)), ftAfter(5)},
		{"a stage deadline beside a dispatch", ftNode(ftLeased, ftStageDeadlineIn(5)), ftAfter(5)},
		{"a stage deadline of one that joined", ftNode(ftJoined, ftStageDeadlineIn(5)), ftAfter(5)},
		{"none of one that is ready", ftNode(ftReady, ftStageDeadlineIn(5)), time.Time{}},
		{"none of one that is being deleted", ftNode(ftLeased, ftDeleting, ftBackingOff(9), ftStageDeadlineIn(5)), ftAfter(9)},
	} {
		require.Equal(t, row.want, requeue(row.node), row.why)
	}
	require.Equal(t, ftAfter(5), requeue(ftNode(ftRequested, ftBackingOff(9)), ftNode(ftRequested, ftBackingOff(5)), ftNode(ftRequested, ftBackingOff(7))),
		"the earliest of all slots")
	require.Equal(t, ftAfter(5), requeue(ftNode(ftRequested, ftBackingOff(-1)), ftNode(ftRequested, pendingUntil(0)), ftNode(ftRequested, ftBackingOff(5))),
		"and those that are due hide none")
	require.Equal(t, instant(3), earliest(0, 3))
	require.Equal(t, instant(3), earliest(3, 0))
	require.Equal(t, instant(2), earliest(3, 2))
	require.Equal(t, instant(2), earliest(2, 3))
	require.Zero(t, earliest(0, 0))
}

func TestAttemptsExhausted(t *testing.T) {
	nodes := []ManagedNode{ftMove(ftNode(ftDestroyed), "w", 1, 3), ftMove(ftNode(ftRunning, ftDeleting), "w", 2, 4), ftMove(ftNode(), "w", 3, 5),
		ftMove(ftNode(), "x", 0, 6)}
	decided := func(next NodeAttemptID) (lines []string) {
		state, err := NewClusterState(1, next, nodes...)
		require.NoError(t, err)
		plan := Decide(state, mustExpand(t, shapeOf(4, groupOf("w", 4))), ftNow)
		for _, a := range plan.Actions {
			lines = append(lines, fmt.Sprintf("%s %s %d", a.Node, a.Rule.Name, a.NewAttempt))
		}
		for _, f := range plan.Faults {
			require.ErrorIs(t, f.Err, ErrAttemptsExhausted)
			lines = append(lines, fmt.Sprintf("%s %s exhausted", f.Node, f.Rule.Name))
		}
		return lines
	}
	require.Equal(t, []string{"w-0 insert 18446744073709551613", "w-1 restart 18446744073709551614", "w-2 cancel-bootstrap 0", "w-3 create-lease 0",
		"x-0 begin-delete 0"}, decided(math.MaxUint64-2))
	require.Equal(t, []string{"w-0 insert 18446744073709551614", "w-2 cancel-bootstrap 0", "w-3 create-lease 0", "x-0 begin-delete 0",
		"w-1 restart exhausted"}, decided(math.MaxUint64-1), "the last number goes to the first slot; deletions and attempts that exist go on")
	require.Equal(t, []string{"w-2 cancel-bootstrap 0", "w-3 create-lease 0", "x-0 begin-delete 0", "w-0 insert exhausted", "w-1 restart exhausted"},
		decided(math.MaxUint64))
}

func TestSequenceExhausted(t *testing.T) {
	at := func(next uint64) func(*ManagedNode) { return func(m *ManagedNode) { m.NextSequence = next } }
	const end = uint64(math.MaxUint64)
	ftRule(t,
		ftRow{why: "growth uses all but those kept for the cleanup", node: ftOf(ftLeased, at(end-1025)), want: ftWanted, rule: "lookup-endpoint", operation: LookupEndpoint},
		ftRow{why: "growth stops 1024 below the end", node: ftOf(ftLeased, at(end-1024)), want: ftWanted, rule: "lookup-endpoint", operation: LookupEndpoint, fault: ErrSequenceExhausted},
		ftRow{why: "and beyond", node: ftOf(ftRequested, at(end)), want: ftWanted, rule: "create-lease", operation: CreateLease, fault: ErrSequenceExhausted},
		ftRow{why: "waiting needs no number", node: ftOf(ftRunning, at(end)), want: ftWanted, rule: "await-bootstrap", until: ftAfter(20 * time.Minute)},
		ftRow{why: "giving up needs no number", node: ftOf(ftRunning, at(end)), rule: "begin-delete"},
		ftRow{why: "the cleanup has the rest", node: ftOf(ftRunning, ftDeleting, at(end-1024)), rule: "cancel-bootstrap", operation: CancelBootstrap},
		ftRow{why: "to the last number", node: ftOf(ftLeased, ftDeleting, at(end-1)), rule: "destroy-lease", operation: DestroyLease},
		ftRow{why: "a number that has no successor is not used", node: ftOf(ftLeased, ftDeleting, at(end)), rule: "destroy-lease", operation: DestroyLease, fault: ErrSequenceExhausted},
		ftRow{why: "and nothing is needed to be done", node: ftOf(ftDeleting, at(end)), rule: "mark-destroyed"},
	)
	plan := Decide(ftState(t, ftNode(ftLeased, at(end-1024)), ftMove(ftNode(ftLeased), "w", 1, 8)), mustExpand(t, shapeOf(4, groupOf("w", 2))), ftNow)
	require.Len(t, plan.Faults, 1)
	require.ErrorIs(t, plan.Faults[0].Err, ErrSequenceExhausted)
	require.Equal(t, "lookup-endpoint", plan.Faults[0].Rule.Name)
	require.Len(t, plan.Actions, 1, "the others go on")
	require.Equal(t, LogicalNodeID("w-1"), plan.Actions[0].Node)
}

// A state that holds nothing yet may be the zero value, and 0 is no attempt.
func TestDecideOnTheZeroState(t *testing.T) {
	plan := Decide(new(ClusterState), mustExpand(t, shapeOf(4, groupOf("w", 2))), ftNow)
	require.Equal(t, NodeAttemptID(1), plan.Actions[0].NewAttempt)
	require.Equal(t, NodeAttemptID(2), plan.Actions[1].NewAttempt)

	driver, err := newDriverFrom(new(ClusterState), shapeOf(4, groupOf("w", 2)), Config{})
	require.NoError(t, err)
	_, err = driver.DriveNext(ftNow, new(dtExecutor))
	require.NoError(t, err)
	require.NoError(t, driver.Snapshot().Check(), "a driver that goes on from it begins where the plan does")
}

// ftDrawWorld draws a state and a wish that have something to do with each
// other.
func ftDrawWorld(t *rapid.T) (*ClusterState, ClusterShape) {
	groups := ftDrawGroups(t)
	state := ftDrawState(t, groups)
	kept := slices.DeleteFunc(slices.Clone(groups), func(NodeGroupSpec) bool { return rapid.IntRange(0, 4).Draw(t, "drop") == 0 })
	return state, ClusterShape{RunID: "r", Generation: rapid.Uint64Range(1, math.MaxUint64-1).Draw(t, "generation"), Groups: kept}
}

// rebuilt returns m in a map of its own, filled in the opposite order of keys.
func ftRebuilt(m map[string]string) map[string]string {
	if m == nil {
		return nil
	}
	out := make(map[string]string)
	for _, key := range slices.Backward(slices.Sorted(maps.Keys(m))) {
		out[key] = m[key]
	}
	return out
}

func TestProp_DecideIsPure(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		state, shape := ftDrawWorld(t)
		now := ftDrawTime(t, "now", false)
		desired := mustExpand(t, shape)

		state2 := new(ClusterState)
		require.NoError(t, json.Unmarshal([]byte(ftJSON(t, state)), state2))
		shape2 := shape
		shape2.Groups = slices.Clone(shape.Groups)
		slices.Reverse(shape2.Groups)
		for i := range shape2.Groups {
			g := &shape2.Groups[i]
			g.Shape.ProviderLabels, g.Boot.Env = ftRebuilt(g.Shape.ProviderLabels), ftRebuilt(g.Boot.Env)
			g.Boot.Args = slices.Clone(g.Boot.Args)
		}
		desired2 := mustExpand(t, shape2)

		plan := Decide(state, desired, now)
		require.True(t, reflect.DeepEqual(state2, state), "the state is only read")
		require.True(t, reflect.DeepEqual(desired2, desired), "the wish is only read")
		require.Equal(t, plan, Decide(state2, desired2, now), "equal inputs, equal plans")
		require.Equal(t, plan, Decide(state, desired, now), "again")

		for m := range state.All() {
			spec := m.Record.Spec
			again, _ := state.Node(m.Record.Node)
			first := DecideNode(&m, &spec, now)
			require.Equal(t, again, m, "the node is only read")
			require.Equal(t, first, DecideNode(&again, &spec, now))
		}
	})
}

// The plan of a cluster is the decisions about its slots one by one, which know
// nothing of each other; only the numbers of attempts run through.
func TestProp_DecideIsTheUnionOfItsSlots(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		state, shape := ftDrawWorld(t)
		now := ftDrawTime(t, "now", false)
		desired := mustExpand(t, shape)
		plan := Decide(state, desired, now)

		type pair struct {
			node *ManagedNode
			want *LogicalNodeSpec
		}
		slots := make(map[LogicalNodeID]pair)
		for m := range state.All() {
			slots[m.Record.Node] = pair{node: &m}
		}
		for spec := range desired.All() {
			p := slots[spec.Node]
			p.want = &spec
			slots[spec.Node] = p
		}
		place := func(p pair) (NodeGroupID, int) {
			if p.node != nil {
				return p.node.Record.Group, p.node.Record.Index
			}
			return p.want.GroupID, p.want.Index
		}
		order := slices.SortedFunc(maps.Keys(slots), func(a, b LogicalNodeID) int {
			groupA, indexA := place(slots[a])
			groupB, indexB := place(slots[b])
			return CompareSlots(groupA, indexA, groupB, indexB)
		})

		want := Plan{ObservedGeneration: shape.Generation}
		next := state.NextAttemptID
		wake := func(at time.Time) {
			if !at.IsZero() && at.After(now) && (want.RequeueAt.IsZero() || at.Before(want.RequeueAt)) {
				want.RequeueAt = at
			}
		}
		for _, id := range order {
			p := slots[id]
			d := DecideNode(p.node, p.want, now)
			group, index := place(p)
			a := Action{Node: id, Group: group, Index: index, Rule: d.Rule, Kind: d.Action, Operation: d.Operation}
			wake(d.Until)
			if m := p.node; m != nil {
				a.Attempt = m.Attempt
				if m.Intent == Active && !m.Record.Ready {
					wake(m.Retry.StageDeadline)
				}
			}
			if d.Err != nil {
				want.Faults = append(want.Faults, Fault{Node: id, Attempt: a.Attempt, Rule: d.Rule, Err: d.Err})
				continue
			}
			switch d.Action {
			case NoAction:
				continue
			case Insert, Restart:
				a.NewAttempt = next
				next++
			case Dispatch:
				a.OperationID = OperationID{Attempt: p.node.Attempt, Sequence: p.node.NextSequence}
				a.Resolving = d.Rule.Name == "resolve-ambiguous"
			}
			want.Actions = append(want.Actions, a)
		}
		for i := range plan.Faults {
			require.ErrorIs(t, plan.Faults[i].Err, ErrSequenceExhausted)
			require.ErrorIs(t, plan.Faults[i].Err, want.Faults[i].Err)
			want.Faults[i].Err = plan.Faults[i].Err // it also says where
		}
		require.Equal(t, want, plan)
	})
}

// Deciding cannot fail, whatever it is given.
func TestDecideWithoutStateOrWish(t *testing.T) {
	plan := Decide(nil, mustExpand(t, shapeOf(1, groupOf("w", 1))), ftNow)
	require.Len(t, plan.Actions, 1)
	require.Equal(t, Insert, plan.Actions[0].Kind)

	plan = Decide(ftState(t, ftNode()), nil, ftNow)
	require.Empty(t, plan.Actions, "no wish is not a wish for nothing")
	require.Len(t, plan.Faults, 1)
	require.ErrorIs(t, plan.Faults[0].Err, ErrUnmatched)
}

// The places that code asks for are those of the rules it means.
func TestRuleNumbersNameTheirRules(t *testing.T) {
	for number, name := range map[int]string{
		ruleInsert: "insert", ruleAwaitOperation: "await-operation", ruleResolve: "resolve-ambiguous", ruleAwaitBackoff: "await-backoff",
		ruleSteady: "steady", ruleAwaitBootstrap: "await-bootstrap", ruleUnmatched: "unmatched",
	} {
		require.Equal(t, name, ladder[number].Name)
	}
}
