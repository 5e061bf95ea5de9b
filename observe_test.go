package provisioning

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// ftPolicy is the default policy, changed by edits: delays of 1, 2, 4, 8 …
// 60 s.
func ftPolicy(edits ...func(*RetryPolicy)) *RetryPolicy {
	var p RetryPolicy
	for _, edit := range edits {
		edit(&p)
	}
	p = p.withDefaults()
	return &p
}

// ftFold is one observation of one node.
type ftFold struct {
	why    string
	from   ManagedNode
	policy *RetryPolicy // nil: ftPolicy
	see    Observation
	reason NotAppliedReason
	// then says in what the node differs afterwards, and nil says in nothing.
	// That a completion that is applied ends the pending operation goes
	// without saying.
	then func(*ManagedNode)
}

func ftFolds(t *testing.T, rows ...ftFold) {
	t.Helper()
	for _, row := range rows {
		t.Run(row.why, func(t *testing.T) {
			if row.policy == nil {
				row.policy = ftPolicy()
			}
			n := ftImport(t, row.from)
			want := n.export()
			reason := n.fold(&row.see, row.policy, nearestInstant(ftNow))
			require.Equal(t, row.reason, reason)
			if row.see.Kind == OperationCompleted && row.reason == "" {
				want.Pending = nil
			}
			if row.then != nil {
				row.then(&want)
			}
			require.Equal(t, want, n.export())

			if row.see.Kind == OperationCompleted {
				reason = n.fold(&row.see, row.policy, nearestInstant(ftAfter(time.Second)))
				require.Equal(t, NotPending, reason, "an operation ends once")
				require.Equal(t, want, n.export())
			}
		})
	}
}

// ftAll joins edits.
func ftAll(edits ...func(*ManagedNode)) func(*ManagedNode) {
	return func(m *ManagedNode) {
		for _, edit := range edits {
			edit(m)
		}
	}
}

// The three lives in which an operation can end. Two failures in a row are on
// record (and the one that ended a failed attempt), and one of the cleanup.

func ftActive(kind OperationKind, edits ...func(*ManagedNode)) ManagedNode {
	return ftNode(append(edits, ftFailures(2, 0), ftPending(kind))...)
}

func ftGivenUpOn(kind OperationKind, edits ...func(*ManagedNode)) ManagedNode {
	return ftNode(append(edits, ftFailures(2, 1), ftDeleting, ftPending(kind))...)
}

func ftAlreadyFailed(kind OperationKind, edits ...func(*ManagedNode)) ManagedNode {
	return ftNode(append(edits, ftFailures(2, 0), ftFailed, ftPending(kind))...)
}

// ftDone is the end of the pending operation of a node made by ftNode.
func ftDone(kind OperationKind, class FailureClass, edits ...func(*Completion)) Observation {
	c := Completion{Operation: OperationID{Attempt: ftAttempt, Sequence: ftNextSequence - 1}, Kind: kind, Class: class}
	if class != ClassNone {
		c.Message = "no luck"
	}
	for _, edit := range edits {
		edit(&c)
	}
	return Observation{Kind: OperationCompleted, Node: "w-0", Attempt: ftAttempt, Completion: c}
}

func ftWithLease(c *Completion)    { c.Lease = "lease-new" }
func ftWithEndpoint(c *Completion) { c.Endpoint = &SSHEndpoint{Host: "192.0.2.9", Port: 2222} }
func ftWithSession(c *Completion)  { c.Session = ftSession }
func ftAsking(d time.Duration) func(*Completion) {
	return func(c *Completion) { c.RetryAfter = d }
}

// What folds do to a node.

func ftLeaseIs(m *ManagedNode)    { m.Record.Lease = "lease-new" }
func ftEndpointIs(m *ManagedNode) { m.Record.Connection = &SSHEndpoint{Host: "192.0.2.9", Port: 2222} }
func ftCreatedNow(m *ManagedNode) { m.Retry.LastCreateAt = ftNow }
func ftForgotten(m *ManagedNode)  { m.Retry.Ambiguous = NoOperation }
func ftNoSession(m *ManagedNode)  { m.ActiveBootstrap = "" }
func ftHeldDropped(m *ManagedNode) {
	m.Held = nil
}

// ftCleanupReset: a step of the cleanup is over.
func ftCleanupReset(m *ManagedNode) {
	m.Retry.CleanupFailures, m.Retry.CancelsFailed, m.Retry.NextEffectAt = 0, 0, time.Time{}
}

func ftDoublings(n uint32) time.Duration {
	return min(time.Second<<(min(n, 10)-1), time.Minute)
}

// ftBacksOff: one more failure, and the delay that goes with it.
func ftBacksOff(text string) func(*ManagedNode) {
	return func(m *ManagedNode) {
		count := &m.Retry.ConsecutiveFailures
		if m.Intent == Deleting {
			count = &m.Retry.CleanupFailures
		}
		*count++
		m.Retry.LastError, m.Retry.LastFailureAt, m.Retry.NextEffectAt = text, ftNow, ftAfter(ftDoublings(*count))
	}
}

// ftFails: the attempt ends.
func ftFails(reason string) func(*ManagedNode) {
	return func(m *ManagedNode) {
		m.Retry.ConsecutiveFailures++
		m.Record.Stage, m.Record.Ready = StageFailed, false
		m.Record.FailedReason, m.Record.FailedAt, m.Retry.LastError = reason, ftNow, reason
		m.Retry.LastFailureAt = ftNow
		m.Retry.RestartAt = ftAfter(ftDoublings(m.Retry.ConsecutiveFailures))
		m.Retry.NextEffectAt, m.Retry.StageDeadline = time.Time{}, time.Time{}
	}
}

func ftHandsOff(m *ManagedNode) {
	m.Record.Stage, m.Record.Ready, m.Record.ReadyAt, m.Record.Swactor.HandedOffAt = StageDormant, true, ftNow, ftNow
	m.ActiveBootstrap = ""
	m.Retry = RetryState{FailuresBeforeReady: m.Retry.ConsecutiveFailures, CreatesSent: m.Retry.CreatesSent, LastCreateAt: m.Retry.LastCreateAt}
}

func TestFold_CreateLease(t *testing.T) {
	const kind, failed = CreateLease, "CreateLease: no luck"
	doubt := ftAmbiguous(kind)
	ftFolds(t,
		ftFold{why: "success, Active: a machine without an endpoint", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassNone, ftWithLease),
			then: ftAll(ftCreatedNow, ftLeaseIs, ftStage(StageLeaseCreated), ftStageDeadlineIn(10*time.Minute))},
		ftFold{why: "success, Active: a machine that answers", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassNone, ftWithLease, ftWithEndpoint),
			then: ftAll(ftCreatedNow, ftLeaseIs, ftEndpointIs, ftStage(StageEndpointKnown), ftStageDeadlineIn(30*time.Minute))},
		ftFold{why: "success, Active: the doubt is over", from: ftActive(kind, ftRequested, doubt, ftBackingOff(time.Hour)), see: ftDone(kind, ClassNone, ftWithLease),
			then: ftAll(ftCreatedNow, ftLeaseIs, ftForgotten, ftBackingOff(0), func(m *ManagedNode) { m.Retry.NextEffectAt = time.Time{} },
				ftStage(StageLeaseCreated), ftStageDeadlineIn(10*time.Minute))},
		ftFold{why: "success, Active: no limit is no deadline", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassNone, ftWithLease),
			policy: ftPolicy(func(p *RetryPolicy) { p.EndpointTimeout = -1 }), then: ftAll(ftCreatedNow, ftLeaseIs, ftStage(StageLeaseCreated))},
		ftFold{why: "success, Active: no limit of the bootstrap either", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassNone, ftWithLease, ftWithEndpoint),
			policy: ftPolicy(func(p *RetryPolicy) { p.BootstrapTimeout = -1 }), then: ftAll(ftCreatedNow, ftLeaseIs, ftEndpointIs, ftStage(StageEndpointKnown))},
		ftFold{why: "success, Deleting: a machine to destroy, in the stage it was", from: ftGivenUpOn(kind, ftRequested), see: ftDone(kind, ClassNone, ftWithLease, ftWithEndpoint),
			then: ftAll(ftCreatedNow, ftLeaseIs, ftEndpointIs, ftCleanupReset)},
		ftFold{why: "success, Deleting: resolved, and no create was sent", from: ftGivenUpOn(kind, ftRequested, func(m *ManagedNode) { m.Retry.CancelsFailed = 2 }), see: ftDone(kind, ClassNone, ftWithLease),
			then: ftAll(ftCreatedNow, ftLeaseIs, ftCleanupReset)},
		ftFold{why: "success, Deleting: an adoption", from: ftNode(ftRequested, ftFailures(2, 1), ftDeleting, ftPending(kind), ftResolving), see: ftDone(kind, ClassNone, ftWithLease),
			then: ftAll(ftLeaseIs, ftForgotten, ftCleanupReset)},
		ftFold{why: "success, Failed: a machine to destroy", from: ftAlreadyFailed(kind, ftRequested, doubt), see: ftDone(kind, ClassNone, ftWithLease),
			then: ftAll(ftCreatedNow, ftLeaseIs, ftForgotten)},

		ftFold{why: "a success without a lease, Active: somebody may have made something", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassNone, ftWithEndpoint),
			then: ftAll(ftCreatedNow, doubt, ftBacksOff("CreateLease: the success names no lease"))},
		ftFold{why: "a success without a lease, Deleting", from: ftGivenUpOn(kind, ftRequested), see: ftDone(kind, ClassNone),
			then: ftAll(ftCreatedNow, doubt, ftBacksOff("CreateLease: the success names no lease"))},
		ftFold{why: "a success without a lease, Failed", from: ftAlreadyFailed(kind, ftRequested), see: ftDone(kind, ClassNone), then: ftAll(ftCreatedNow, doubt)},

		ftFold{why: "Definite, Active", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassDefinite), then: ftAll(ftCreatedNow, ftBacksOff(failed))},
		ftFold{why: "Definite, Active: the doubt is over", from: ftActive(kind, ftRequested, doubt), see: ftDone(kind, ClassDefinite), then: ftAll(ftCreatedNow, ftForgotten, ftBacksOff(failed))},
		ftFold{why: "Definite, Deleting: nothing is there, and nothing to wait for", from: ftGivenUpOn(kind, ftRequested, doubt), see: ftDone(kind, ClassDefinite, ftAsking(time.Hour)),
			then: ftAll(ftCreatedNow, ftForgotten, ftCleanupReset)},
		ftFold{why: "Definite, Failed: the first failure stands", from: ftAlreadyFailed(kind, ftRequested, doubt), see: ftDone(kind, ClassDefinite), then: ftAll(ftCreatedNow, ftForgotten)},

		ftFold{why: "Ambiguous, Active", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassAmbiguous), then: ftAll(ftCreatedNow, doubt, ftBacksOff(failed))},
		ftFold{why: "Ambiguous, Deleting", from: ftGivenUpOn(kind, ftRequested), see: ftDone(kind, ClassAmbiguous), then: ftAll(ftCreatedNow, doubt, ftBacksOff(failed))},
		ftFold{why: "Ambiguous, Deleting: asked, still in doubt, and counted to no limit", from: ftNode(ftRequested, ftFailures(2, 1), ftDeleting, ftPending(kind), ftResolving),
			see: ftDone(kind, ClassAmbiguous), then: ftBacksOff(failed)},
		ftFold{why: "Ambiguous, Failed", from: ftAlreadyFailed(kind, ftRequested), see: ftDone(kind, ClassAmbiguous), then: ftAll(ftCreatedNow, doubt)},
		ftFold{why: "Ambiguous without a word", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassAmbiguous, func(c *Completion) { c.Message = "" }),
			then: ftAll(ftCreatedNow, doubt, ftBacksOff("CreateLease: Ambiguous"))},

		ftFold{why: "NotStarted, Active", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassNotStarted), then: ftAll(ftCreatedNow, ftBacksOff(failed))},
		ftFold{why: "NotStarted, Active: an earlier create is still in doubt", from: ftActive(kind, ftRequested, doubt), see: ftDone(kind, ClassNotStarted), then: ftAll(ftCreatedNow, ftBacksOff(failed))},
		ftFold{why: "NotStarted, Deleting: still in doubt", from: ftNode(ftRequested, ftFailures(2, 1), ftDeleting, ftPending(kind), ftResolving), see: ftDone(kind, ClassNotStarted), then: ftBacksOff(failed)},
		ftFold{why: "NotStarted, Failed", from: ftAlreadyFailed(kind, ftRequested, doubt), see: ftDone(kind, ClassNotStarted), then: ftCreatedNow},

		ftFold{why: "LeaseLost, Active: the identity is spent", from: ftActive(kind, ftRequested, doubt), see: ftDone(kind, ClassLeaseLost), then: ftAll(ftCreatedNow, ftForgotten, ftFails(failed))},
		ftFold{why: "LeaseLost, Active: the dead machine is still billed (B11)", from: ftActive(kind, ftRequested), see: ftDone(kind, ClassLeaseLost, ftWithLease),
			then: ftAll(ftCreatedNow, ftLeaseIs, ftFails(failed))},
		ftFold{why: "LeaseLost, Deleting: no wait", from: ftGivenUpOn(kind, ftRequested, doubt), see: ftDone(kind, ClassLeaseLost), then: ftAll(ftCreatedNow, ftForgotten, ftCleanupReset)},
		ftFold{why: "LeaseLost, Deleting: the dead machine is destroyed (B11)", from: ftNode(ftRequested, ftFailures(2, 1), ftDeleting, ftPending(kind), ftResolving), see: ftDone(kind, ClassLeaseLost, ftWithLease),
			then: ftAll(ftLeaseIs, ftForgotten, ftCleanupReset)},
		ftFold{why: "LeaseLost, Failed", from: ftAlreadyFailed(kind, ftRequested, doubt), see: ftDone(kind, ClassLeaseLost, ftWithLease), then: ftAll(ftCreatedNow, ftLeaseIs, ftForgotten)},
	)
}

func TestFold_LookupEndpoint(t *testing.T) {
	const kind, failed = LookupEndpoint, "LookupEndpoint: no luck"
	ftFolds(t,
		ftFold{why: "success, Active: it answers, and the bootstrap has its time from here", from: ftActive(kind, ftLeased), see: ftDone(kind, ClassNone, ftWithEndpoint),
			then: ftAll(ftEndpointIs, ftStage(StageEndpointKnown), ftStageDeadlineIn(30*time.Minute))},
		ftFold{why: "success, Deleting: a fact", from: ftGivenUpOn(kind, ftLeased), see: ftDone(kind, ClassNone, ftWithEndpoint), then: ftEndpointIs},
		ftFold{why: "success, Failed: a fact", from: ftAlreadyFailed(kind, ftLeased), see: ftDone(kind, ClassNone, ftWithEndpoint), then: ftEndpointIs},
		ftFold{why: "not yet, Active: a probe and no failure; the deadline stays where it is", from: ftActive(kind, ftLeased), see: ftDone(kind, ClassNone), then: ftBackingOff(2 * time.Second)},
		ftFold{why: "not yet, Active: the interval is the policy's", from: ftActive(kind, ftLeased), see: ftDone(kind, ClassNone),
			policy: ftPolicy(func(p *RetryPolicy) { p.EndpointProbeInterval = 7 }), then: ftBackingOff(7)},
		ftFold{why: "not yet, Deleting: no wait", from: ftGivenUpOn(kind, ftLeased), see: ftDone(kind, ClassNone)},
		ftFold{why: "not yet, Failed: no wait", from: ftAlreadyFailed(kind, ftLeased), see: ftDone(kind, ClassNone)},
		ftFold{why: "LeaseLost, Active: the machine is destroyed all the same", from: ftActive(kind, ftLeased), see: ftDone(kind, ClassLeaseLost), then: ftFails(failed)},
		ftFold{why: "LeaseLost, Deleting: no wait, the lease is destroyed", from: ftGivenUpOn(kind, ftLeased), see: ftDone(kind, ClassLeaseLost)},
		ftFold{why: "LeaseLost, Failed", from: ftAlreadyFailed(kind, ftLeased), see: ftDone(kind, ClassLeaseLost)},
	)
	for _, class := range []FailureClass{ClassDefinite, ClassAmbiguous, ClassNotStarted} {
		ftFolds(t,
			ftFold{why: class.String() + ", Active", from: ftActive(kind, ftLeased), see: ftDone(kind, class), then: ftBacksOff(failed)},
			ftFold{why: class.String() + ", Deleting: no wait", from: ftGivenUpOn(kind, ftLeased), see: ftDone(kind, class, ftAsking(time.Hour))},
			ftFold{why: class.String() + ", Failed: the first failure stands", from: ftAlreadyFailed(kind, ftLeased), see: ftDone(kind, class)},
		)
	}
}

// ftSessionBegins: a session is on record, with facts of its own.
func ftSessionBegins(m *ManagedNode) {
	m.ActiveBootstrap = ftSession
	m.Record.Bootstrap = BootstrapFacts{Session: ftSession, LastStage: BootstrapStageCreated, LastObservedAt: ftNow}
}

func TestFold_StartBootstrap(t *testing.T) {
	const kind, failed = StartBootstrap, "StartBootstrap: no luck"
	doubt := ftAmbiguous(kind)
	resolving := func(edits ...func(*ManagedNode)) ManagedNode {
		return ftNode(append([]func(*ManagedNode){ftReachable, ftFailures(2, 1), ftDeleting, ftPending(kind), ftResolving}, edits...)...)
	}
	cancels := func(n uint32) func(*ManagedNode) { return func(m *ManagedNode) { m.Retry.CancelsFailed = n } }
	old := func(m *ManagedNode) {
		m.Record.Bootstrap = BootstrapFacts{Session: "old", LastStage: BootstrapStageStreamError, LastStdoutSequence: 9, LastStderrSequence: 9, LastObservedAt: ftAfter(-time.Hour)}
	}
	ftFolds(t,
		ftFold{why: "success, Active; the stage deadline is kept", from: ftActive(kind, ftReachable), see: ftDone(kind, ClassNone, ftWithSession),
			then: ftAll(ftSessionBegins, ftStage(StageBootstrapRunning))},
		ftFold{why: "success, Active: the doubt is over, and the facts begin anew", from: ftActive(kind, ftReachable, doubt, old), see: ftDone(kind, ClassNone, ftWithSession),
			then: ftAll(ftSessionBegins, ftForgotten, ftStage(StageBootstrapRunning))},
		ftFold{why: "success, Deleting: a session to cancel", from: ftGivenUpOn(kind, ftReachable), see: ftDone(kind, ClassNone, ftWithSession), then: ftAll(ftSessionBegins, ftCleanupReset)},
		ftFold{why: "success, Deleting: the doubt is over", from: resolving(cancels(4)), see: ftDone(kind, ClassNone, ftWithSession), then: ftAll(ftSessionBegins, ftForgotten, ftCleanupReset)},
		ftFold{why: "success, Failed: a session to cancel", from: ftAlreadyFailed(kind, ftReachable, doubt), see: ftDone(kind, ClassNone, ftWithSession), then: ftAll(ftSessionBegins, ftForgotten)},

		ftFold{why: "a success without a session, Active", from: ftActive(kind, ftReachable), see: ftDone(kind, ClassNone),
			then: ftAll(doubt, ftBacksOff("StartBootstrap: the success names no session"))},
		ftFold{why: "a success without a session, Deleting, counts to the limit like any doubt", from: resolving(), see: ftDone(kind, ClassNone),
			then: ftAll(cancels(1), ftBacksOff("StartBootstrap: the success names no session"))},
		ftFold{why: "a success without a session, Failed", from: ftAlreadyFailed(kind, ftReachable), see: ftDone(kind, ClassNone), then: doubt},

		ftFold{why: "Definite, Active: the attempt is over", from: ftActive(kind, ftReachable), see: ftDone(kind, ClassDefinite), then: ftFails(failed)},
		ftFold{why: "Definite, Active: the doubt too", from: ftActive(kind, ftReachable, doubt), see: ftDone(kind, ClassDefinite), then: ftAll(ftForgotten, ftFails(failed))},
		ftFold{why: "Definite, Deleting: no wait", from: resolving(cancels(4)), see: ftDone(kind, ClassDefinite), then: ftAll(ftForgotten, ftCleanupReset)},
		ftFold{why: "Definite, Failed: the first failure stands", from: ftAlreadyFailed(kind, ftReachable, doubt), see: ftDone(kind, ClassDefinite), then: ftForgotten},

		ftFold{why: "Ambiguous, Active", from: ftActive(kind, ftReachable), see: ftDone(kind, ClassAmbiguous), then: ftAll(doubt, ftBacksOff(failed))},
		ftFold{why: "Ambiguous, Deleting: of the start itself, counted to no limit", from: ftGivenUpOn(kind, ftReachable), see: ftDone(kind, ClassAmbiguous), then: ftAll(doubt, ftBacksOff(failed))},
		ftFold{why: "Ambiguous, Deleting: asked, counted to the limit", from: resolving(cancels(3)), see: ftDone(kind, ClassAmbiguous), then: ftAll(cancels(4), ftBacksOff(failed))},
		ftFold{why: "Ambiguous, Deleting: at the limit the start is given up and the lease is next", from: resolving(cancels(4)), see: ftDone(kind, ClassAmbiguous),
			then: ftAll(ftBacksOff(failed), ftForgotten, ftCleanupReset, func(m *ManagedNode) { m.Retry.GivenUp = StartBootstrap })},
		ftFold{why: "Ambiguous, Deleting: a negative limit never gives up", from: resolving(cancels(math.MaxUint32)), see: ftDone(kind, ClassAmbiguous),
			policy: ftPolicy(func(p *RetryPolicy) { p.CancelLimit = -1 }), then: ftBacksOff(failed)},
		ftFold{why: "Ambiguous, Failed", from: ftAlreadyFailed(kind, ftReachable), see: ftDone(kind, ClassAmbiguous), then: doubt},

		ftFold{why: "NotStarted, Active: the doubt stays", from: ftActive(kind, ftReachable, doubt), see: ftDone(kind, ClassNotStarted), then: ftBacksOff(failed)},
		ftFold{why: "NotStarted, Active: no doubt comes of it", from: ftActive(kind, ftReachable), see: ftDone(kind, ClassNotStarted), then: ftBacksOff(failed)},
		ftFold{why: "NotStarted, Deleting: not counted to the limit", from: resolving(cancels(4)), see: ftDone(kind, ClassNotStarted), then: ftBacksOff(failed)},
		ftFold{why: "NotStarted, Failed: the doubt stays", from: ftAlreadyFailed(kind, ftReachable, doubt), see: ftDone(kind, ClassNotStarted)},

		ftFold{why: "LeaseLost, Active", from: ftActive(kind, ftReachable, doubt), see: ftDone(kind, ClassLeaseLost), then: ftAll(ftForgotten, ftFails(failed))},
		ftFold{why: "LeaseLost, Deleting: no wait, the lease is destroyed", from: resolving(cancels(4)), see: ftDone(kind, ClassLeaseLost), then: ftAll(ftForgotten, ftCleanupReset)},
		ftFold{why: "LeaseLost, Failed", from: ftAlreadyFailed(kind, ftReachable, doubt), see: ftDone(kind, ClassLeaseLost), then: ftForgotten},
	)
}

func TestFold_BootstrapConvergenceObserved(t *testing.T) {
	const kind, failed = BootstrapConvergenceObserved, "BootstrapConvergenceObserved: no luck"
	lost := ftFails("the node was lost: no luck")
	ftFolds(t,
		ftFold{why: "success, Active: hand off", from: ftActive(kind, ftJoined, ftBackingOff(time.Hour), func(m *ManagedNode) { m.Retry.LastError = "earlier" }), see: ftDone(kind, ClassNone), then: ftHandsOff},
		ftFold{why: "success, Deleting: nothing more", from: ftGivenUpOn(kind, ftJoined), see: ftDone(kind, ClassNone)},
		ftFold{why: "success, Failed: nothing more", from: ftAlreadyFailed(kind, ftJoined), see: ftDone(kind, ClassNone)},
		ftFold{why: "success, handed off already: nothing more", from: ftNode(ftReady, ftPending(kind)), see: ftDone(kind, ClassNone)},

		ftFold{why: "Definite, Active: the attempt is over", from: ftActive(kind, ftJoined), see: ftDone(kind, ClassDefinite), then: ftFails(failed)},
		ftFold{why: "Ambiguous, Active: repeated after a delay", from: ftActive(kind, ftJoined), see: ftDone(kind, ClassAmbiguous), then: ftBacksOff(failed)},
		ftFold{why: "NotStarted, Active: repeated after a delay", from: ftActive(kind, ftJoined), see: ftDone(kind, ClassNotStarted), then: ftBacksOff(failed)},
		ftFold{why: "LeaseLost, Active: the attempt is over", from: ftActive(kind, ftJoined), see: ftDone(kind, ClassLeaseLost), then: ftFails(failed)},

		ftFold{why: "LeaseLost, handed off already: the node is lost, soon after it became ready", see: ftDone(kind, ClassLeaseLost),
			from: ftNode(ftReady, ftPending(kind), func(m *ManagedNode) { m.Retry.FailuresBeforeReady = 4 }), then: ftAll(ftFailures(4, 0), lost)},
		ftFold{why: "LeaseLost, handed off already, asks for time", see: ftDone(kind, ClassLeaseLost, ftAsking(90*time.Second)),
			from: ftNode(ftReady, ftPending(kind)), then: ftAll(lost, ftRestartIn(90*time.Second))},
		ftFold{why: "LeaseLost, handed off and given up on: nothing more", from: ftGivenUpOn(kind, ftReady), see: ftDone(kind, ClassLeaseLost)},
		ftFold{why: "LeaseLost, handed off and failed: nothing more", from: ftAlreadyFailed(kind, ftReady), see: ftDone(kind, ClassLeaseLost)},
	)
	for _, class := range []FailureClass{ClassDefinite, ClassAmbiguous, ClassNotStarted, ClassLeaseLost} {
		ftFolds(t,
			ftFold{why: class.String() + ", Deleting: no wait", from: ftGivenUpOn(kind, ftJoined), see: ftDone(kind, class, ftAsking(time.Hour))},
			ftFold{why: class.String() + ", Failed: the first failure stands", from: ftAlreadyFailed(kind, ftJoined), see: ftDone(kind, class)},
		)
		if class != ClassLeaseLost {
			ftFolds(t, ftFold{why: class.String() + ", handed off already: harmless", from: ftNode(ftReady, ftPending(kind)), see: ftDone(kind, class, ftAsking(time.Hour))})
		}
	}
}

func TestFold_CancelBootstrap(t *testing.T) {
	const kind, failed = CancelBootstrap, "CancelBootstrap: no luck"
	cancels := func(n uint32) func(*ManagedNode) { return func(m *ManagedNode) { m.Retry.CancelsFailed = n } }
	says := func(stage BootstrapStage) func(*ManagedNode) {
		return func(m *ManagedNode) { m.Record.Bootstrap.LastStage = stage }
	}
	givenUp := func(m *ManagedNode) { m.Retry.GivenUp = CancelBootstrap }
	limit := func(n int) *RetryPolicy { return ftPolicy(func(p *RetryPolicy) { p.CancelLimit = n }) }
	ftFolds(t,
		ftFold{why: "success", from: ftGivenUpOn(kind, ftRunning, cancels(3)), see: ftDone(kind, ClassNone), then: ftAll(ftNoSession, says(BootstrapStageCancelled), ftCleanupReset)},
		ftFold{why: "success after convergence was seen", from: ftGivenUpOn(kind, ftJoined, says(BootstrapStageConverged)), see: ftDone(kind, ClassNone),
			then: ftAll(ftNoSession, says(BootstrapStageCancelled), ftCleanupReset)},
		ftFold{why: "success after the bootstrap broke: the first end stands", from: ftGivenUpOn(kind, ftRunning, says(BootstrapStageStreamError)), see: ftDone(kind, ClassNone),
			then: ftAll(ftNoSession, ftCleanupReset)},
		ftFold{why: "success of a failed attempt", from: ftGivenUpOn(kind, ftRunning, ftFailed), see: ftDone(kind, ClassNone), then: ftAll(ftNoSession, says(BootstrapStageCancelled), ftCleanupReset)},
		ftFold{why: "NotStarted says nothing about the host, and is not counted to the limit", from: ftGivenUpOn(kind, ftRunning, cancels(4)), see: ftDone(kind, ClassNotStarted), then: ftBacksOff(failed)},
		ftFold{why: "LeaseLost: no machine, no session, no wait", from: ftGivenUpOn(kind, ftRunning, cancels(4)), see: ftDone(kind, ClassLeaseLost), then: ftAll(ftNoSession, ftCleanupReset)},
	)
	for _, class := range []FailureClass{ClassDefinite, ClassAmbiguous} {
		ftFolds(t,
			ftFold{why: class.String() + ": the session is kept", from: ftGivenUpOn(kind, ftRunning), see: ftDone(kind, class), then: ftAll(cancels(1), ftBacksOff(failed))},
			ftFold{why: class.String() + ": the fourth in a row", from: ftGivenUpOn(kind, ftRunning, cancels(3)), see: ftDone(kind, class), then: ftAll(cancels(4), ftBacksOff(failed))},
			ftFold{why: class.String() + ": the fifth gives the session up, its facts stay, and the lease is next at once", from: ftGivenUpOn(kind, ftRunning, cancels(4)), see: ftDone(kind, class, ftAsking(time.Hour)),
				then: ftAll(ftBacksOff(failed), ftNoSession, ftCleanupReset, givenUp)},
			ftFold{why: class.String() + ": a limit of one gives up at once", from: ftGivenUpOn(kind, ftRunning), see: ftDone(kind, class), policy: limit(1),
				then: ftAll(ftBacksOff(failed), ftNoSession, ftCleanupReset, givenUp)},
			ftFold{why: class.String() + ": a negative limit never gives up", from: ftGivenUpOn(kind, ftRunning, cancels(math.MaxUint32)), see: ftDone(kind, class), policy: limit(-1), then: ftBacksOff(failed)},
		)
	}
}

func TestFold_DestroyLease(t *testing.T) {
	const kind, failed = DestroyLease, "DestroyLease: no luck"
	gone := ftAll(ftCleanupReset, func(m *ManagedNode) { m.Record.Lease, m.Record.Connection = "", nil })
	ftFolds(t,
		ftFold{why: "success", from: ftGivenUpOn(kind, ftReachable), see: ftDone(kind, ClassNone), then: gone},
		ftFold{why: "LeaseLost: gone as well", from: ftGivenUpOn(kind, ftReachable), see: ftDone(kind, ClassLeaseLost, ftAsking(time.Hour)), then: gone},
		ftFold{why: "success of a failed attempt: the restart time stays", from: ftGivenUpOn(kind, ftReady, ftFailed), see: ftDone(kind, ClassNone), then: gone},
	)
	for _, class := range []FailureClass{ClassDefinite, ClassAmbiguous, ClassNotStarted} {
		ftFolds(t,
			ftFold{why: class.String() + ": the facts are kept", from: ftGivenUpOn(kind, ftReachable), see: ftDone(kind, class), then: ftBacksOff(failed)},
			ftFold{why: class.String() + " asks for time", from: ftGivenUpOn(kind, ftReachable), see: ftDone(kind, class, ftAsking(20*time.Minute)), then: ftAll(ftBacksOff(failed), ftBackingOff(20*time.Minute))},
		)
	}
}

// Of all completions only an answer about that very operation takes away a
// doubt about a create or a start. What else ends the doubt about a start, the
// loss of its machine and the limit of cancels, is shown with those.
func TestFold_AmbiguityIsSticky(t *testing.T) {
	stages := map[OperationKind]func(*ManagedNode){CreateLease: ftRequested, LookupEndpoint: ftLeased, StartBootstrap: ftReachable,
		BootstrapConvergenceObserved: ftJoined, CancelBootstrap: ftRunning, DestroyLease: ftReachable}
	for kind := CreateLease; kind < operationKinds; kind++ {
		for class := ClassNone; class < failureClasses; class++ {
			for _, remembered := range []OperationKind{NoOperation, CreateLease, StartBootstrap} {
				for name, life := range map[string]func(OperationKind, ...func(*ManagedNode)) ManagedNode{"Active": ftActive, "Deleting": ftGivenUpOn, "Failed": ftAlreadyFailed} {
					if kind == BootstrapConvergenceObserved && class == ClassNone && name == "Active" {
						continue // the hand-off leaves nothing remembered
					}
					n := ftImport(t, life(kind, stages[kind], ftAmbiguous(remembered)))
					done := ftDone(kind, class, ftWithLease, ftWithSession)
					require.Empty(t, n.fold(&done, ftPolicy(), nearestInstant(ftNow)))
					want := remembered
					if kind == CreateLease || kind == StartBootstrap {
						switch class {
						case ClassAmbiguous:
							want = kind
						case ClassNone, ClassDefinite, ClassLeaseLost:
							if remembered == kind {
								want = NoOperation
							}
						}
					}
					require.Equal(t, want, n.ambiguous, "%s: %s ends as %s, remembered was %s", name, kind, class, remembered)
				}
			}
		}
	}
}

// The class of a completion comes from whoever runs effects. One that does not
// exist proves nothing, which is what Ambiguous says.
func TestFold_UnknownClass(t *testing.T) {
	ftFolds(t,
		ftFold{why: "create", from: ftActive(CreateLease, ftRequested), see: ftDone(CreateLease, failureClasses), then: ftAll(ftCreatedNow, ftAmbiguous(CreateLease), ftBacksOff("CreateLease: no luck"))},
		ftFold{why: "start", from: ftActive(StartBootstrap, ftReachable), see: ftDone(StartBootstrap, math.MaxUint8), then: ftAll(ftAmbiguous(StartBootstrap), ftBacksOff("StartBootstrap: no luck"))},
		ftFold{why: "destroy", from: ftGivenUpOn(DestroyLease, ftReachable), see: ftDone(DestroyLease, failureClasses), then: ftBacksOff("DestroyLease: no luck")},
	)
}

func TestFold_RetryAfter(t *testing.T) {
	const failed = "CreateLease: no luck"
	policy := func(edit func(*RetryPolicy)) *RetryPolicy { return ftPolicy(edit) }
	for _, row := range []struct {
		why    string
		ask    time.Duration
		policy *RetryPolicy
		wait   time.Duration // after the third failure
	}{
		{"nothing asked: the delay", 0, ftPolicy(), 4 * time.Second},
		{"less than the delay shortens nothing", time.Second, ftPolicy(), 4 * time.Second},
		{"a negative wait shortens nothing", math.MinInt64, ftPolicy(), 4 * time.Second},
		{"more than the delay", 5 * time.Second, ftPolicy(), 5 * time.Second},
		{"more than MaxDelay", 90 * time.Second, ftPolicy(), 90 * time.Second},
		{"up to an hour", time.Hour, ftPolicy(), time.Hour},
		{"not more", time.Hour + 1, ftPolicy(), time.Hour},
		{"nor for ever", math.MaxInt64, ftPolicy(), time.Hour},
		{"the bound is the policy's", time.Hour, policy(func(p *RetryPolicy) { p.MaxRetryAfter = 7 * time.Second }), 7 * time.Second},
		{"the bound does not shorten the delay", time.Hour, policy(func(p *RetryPolicy) { p.MaxRetryAfter = time.Second }), 4 * time.Second},
	} {
		ftFolds(t,
			ftFold{why: row.why, policy: row.policy, from: ftActive(CreateLease, ftRequested), see: ftDone(CreateLease, ClassDefinite, ftAsking(row.ask)),
				then: ftAll(ftCreatedNow, ftBacksOff(failed), ftBackingOff(row.wait))},
			ftFold{why: row.why + ", RestartAt", policy: row.policy, from: ftActive(StartBootstrap, ftReachable), see: ftDone(StartBootstrap, ClassDefinite, ftAsking(row.ask)),
				then: ftAll(ftFails("StartBootstrap: no luck"), ftRestartIn(row.wait))},
		)
	}
	for kind, from := range map[OperationKind]func(*ManagedNode){CreateLease: ftRequested, LookupEndpoint: ftLeased, BootstrapConvergenceObserved: ftJoined} {
		n := ftImport(t, ftActive(kind, from))
		done := ftDone(kind, ClassLeaseLost, ftAsking(10*time.Minute))
		n.fold(&done, ftPolicy(), nearestInstant(ftNow))
		require.Equal(t, ftAfter(10*time.Minute), n.restartAt.time(), kind)
	}
}

func TestFold_CountsStayAtTheLargest(t *testing.T) {
	n := ftImport(t, ftNode(ftRequested, ftFailures(math.MaxUint32, 0), ftPending(CreateLease)))
	done := ftDone(CreateLease, ClassDefinite)
	n.fold(&done, ftPolicy(), nearestInstant(ftNow))
	require.Equal(t, uint32(math.MaxUint32), n.failures)
	require.Equal(t, ftAfter(time.Minute), n.nextEffectAt.time())

	n = ftImport(t, ftNode(ftLeased, ftDeleting, ftFailures(0, math.MaxUint32), ftPending(DestroyLease)))
	done = ftDone(DestroyLease, ClassDefinite)
	n.fold(&done, ftPolicy(), nearestInstant(ftNow))
	require.Equal(t, uint32(math.MaxUint32), n.cleanupFailures)
	require.Zero(t, n.failures)
}

// Each step of a cleanup starts its own count.
func TestFold_CleanupFailuresPerStep(t *testing.T) {
	n := ftImport(t, ftNode(ftReachable, ftDeleting, ftAmbiguous(StartBootstrap)))
	p := ftPolicy()
	for _, step := range []struct {
		rule  string
		class FailureClass
		want  uint32
	}{
		{"resolve-ambiguous", ClassAmbiguous, 1}, {"resolve-ambiguous", ClassNotStarted, 2}, {"resolve-ambiguous", ClassNone, 0},
		{"cancel-bootstrap", ClassDefinite, 1}, {"cancel-bootstrap", ClassAmbiguous, 2}, {"cancel-bootstrap", ClassNotStarted, 3}, {"cancel-bootstrap", ClassNone, 0},
		{"destroy-lease", ClassAmbiguous, 1}, {"destroy-lease", ClassDefinite, 2}, {"destroy-lease", ClassNone, 0},
	} {
		d := decide(n, nil, maxInstant)
		require.Equal(t, step.rule, d.Name)
		e := recorded(n, d.operation, d.Number == ruleResolve, p, nearestInstant(ftNow))
		o := Observation{Kind: OperationCompleted, Attempt: n.attempt, Completion: Completion{Operation: e.Operation, Kind: e.Kind, Class: step.class, Session: ftSession}}
		require.Empty(t, n.fold(&o, p, nearestInstant(ftNow)))
		require.Equal(t, step.want, n.cleanupFailures, step.rule)
		if step.want == 0 {
			require.Zero(t, n.nextEffectAt, "the next step does not wait")
		} else {
			require.Equal(t, ftAfter(ftDoublings(step.want)), n.nextEffectAt.time())
		}
	}
	require.Equal(t, "mark-destroyed", decide(n, nil, 1).Name)
}

// The stream: what the bootstrap of the live session says.

func ftSays(kind ObservationKind, edits ...func(*Observation)) Observation {
	o := Observation{Kind: kind, Node: "w-0", Attempt: ftAttempt, Session: ftSession}
	for _, edit := range edits {
		edit(&o)
	}
	return o
}

func ftProgress(stage BootstrapStage, stdout, stderr uint64) Observation {
	return ftSays(BootstrapProgress, func(o *Observation) { o.Stage, o.StdoutSequence, o.StderrSequence = stage, stdout, stderr })
}

func ftJoins(agent SwactorID) Observation {
	return ftSays(SwactorJoined, func(o *Observation) { o.Swactor = agent })
}

func ftBreaks(reason string) Observation {
	return ftSays(BootstrapFailed, func(o *Observation) { o.Reason = reason })
}

func ftHeard(m *ManagedNode) { m.Record.Bootstrap.LastObservedAt = ftNow }

func ftHeardStage(stage BootstrapStage) func(*ManagedNode) {
	return func(m *ManagedNode) { ftHeard(m); m.Record.Bootstrap.LastStage = stage }
}

func ftHeardLines(stdout, stderr uint64) func(*ManagedNode) {
	return func(m *ManagedNode) {
		m.Record.Bootstrap.LastStdoutSequence, m.Record.Bootstrap.LastStderrSequence = stdout, stderr
	}
}

func ftLastStage(stage BootstrapStage) func(*ManagedNode) {
	return func(m *ManagedNode) { m.Record.Bootstrap.LastStage = stage }
}

func TestFold_BootstrapProgress(t *testing.T) {
	ftFolds(t,
		ftFold{why: "facts only; no deadline moves", from: ftNode(ftRunning, ftFailures(2, 0)), see: ftProgress(BootstrapStageStdoutStreaming, 12, 6),
			then: ftAll(ftHeardStage(BootstrapStageStdoutStreaming), ftHeardLines(12, 6))},
		ftFold{why: "line numbers never go back, a stage that is no end may", from: ftNode(ftRunning), see: ftProgress(BootstrapStageSSHConnecting, 9, 7),
			then: ftAll(ftHeardStage(BootstrapStageSSHConnecting), ftHeardLines(10, 7))},
		ftFold{why: "no stage said", from: ftNode(ftRunning), see: ftProgress(NoBootstrapStage, 12, 1), then: ftAll(ftHeard, ftHeardLines(12, 5))},
		ftFold{why: "convergence does not go back to work", from: ftNode(ftRunning, ftLastStage(BootstrapStageConverged)), see: ftProgress(BootstrapStageBootChecking, 12, 6), then: ftAll(ftHeard, ftHeardLines(12, 6))},
		ftFold{why: "a stored wait is not shortened", from: ftNode(ftJoined, ftFailures(2, 0), ftBackingOff(time.Hour)), see: ftProgress(BootstrapStageWaitingForSwactorJoin, 12, 6),
			then: ftAll(ftHeardStage(BootstrapStageWaitingForSwactorJoin), ftHeardLines(12, 6))},
		ftFold{why: "Deleting: facts", from: ftNode(ftRunning, ftDeleting, ftFailures(2, 1), ftBackingOff(time.Hour)), see: ftProgress(BootstrapStageStdoutStreaming, 12, 6),
			then: ftAll(ftHeardStage(BootstrapStageStdoutStreaming), ftHeardLines(12, 6))},
		ftFold{why: "Failed: not applied", from: ftNode(ftRunning, ftFailed), see: ftProgress(BootstrapStageStdoutStreaming, 12, 6), reason: AlreadyFailed},
		ftFold{why: "Failed and Deleting: not applied", from: ftNode(ftRunning, ftFailed, ftDeleting), see: ftProgress(BootstrapStageStdoutStreaming, 12, 6), reason: AlreadyFailed},
		ftFold{why: "Destroyed: not applied", from: ftNode(ftRunning, ftDestroyed), see: ftProgress(BootstrapStageStdoutStreaming, 12, 6), reason: DeadSession},
		ftFold{why: "handed off: not applied", from: ftNode(ftReady), see: ftProgress(BootstrapStageStdoutStreaming, 12, 6), reason: DeadSession},
		ftFold{why: "another session: not applied", from: ftNode(ftRunning), see: ftSays(BootstrapProgress, func(o *Observation) { o.Session = "another" }), reason: DeadSession},
		ftFold{why: "no session said: not applied", from: ftNode(ftRunning), see: ftSays(BootstrapProgress, func(o *Observation) { o.Session = "" }), reason: DeadSession},
		ftFold{why: "no session begun, none said: not applied", from: ftNode(ftReachable), see: ftSays(BootstrapProgress, func(o *Observation) { o.Session = "" }), reason: DeadSession},
		ftFold{why: "no session begun: not applied", from: ftNode(ftReachable), see: ftProgress(BootstrapStageStdoutStreaming, 12, 6), reason: DeadSession},
	)
}

func TestFold_ConvergedStage(t *testing.T) {
	see := ftProgress(BootstrapStageConverged, 12, 6)
	heard := ftAll(ftHeardStage(BootstrapStageConverged), ftHeardLines(12, 6))
	ftFolds(t,
		ftFold{why: "with a join on record: hand off", from: ftNode(ftJoined, ftFailures(2, 0)), see: see, then: ftAll(heard, ftHandsOff)},
		ftFold{why: "with a join on record while the call about it runs: hand off, the call stays on record", from: ftActive(BootstrapConvergenceObserved, ftJoined), see: see, then: ftAll(heard, ftHandsOff)},
		ftFold{why: "whatever it remembers of its way is over", from: ftNode(ftJoined, ftFailures(2, 3), ftAmbiguous(CreateLease)), see: see, then: ftAll(heard, ftHandsOff)},
		ftFold{why: "with a join on record while backing off: hand off", from: ftNode(ftJoined, ftFailures(2, 0), ftBackingOff(time.Hour)), see: see, then: ftAll(heard, ftHandsOff)},
		ftFold{why: "without: the join is still to come", from: ftNode(ftRunning, ftFailures(2, 0)), see: see, then: heard},
		ftFold{why: "Deleting: a fact", from: ftNode(ftJoined, ftDeleting), see: see, then: heard},
		ftFold{why: "Failed: not applied", from: ftNode(ftJoined, ftFailed), see: see, reason: AlreadyFailed},
	)
}

func TestFold_SwactorJoined(t *testing.T) {
	joined := func(m *ManagedNode) {
		ftHeard(m)
		m.Record.Swactor = SwactorFacts{ID: "agent-7", JoinedAt: ftNow}
	}
	ftFolds(t,
		ftFold{why: "the bootstrap runs: joined", from: ftNode(ftRunning, ftFailures(2, 0)), see: ftJoins("agent-7"), then: ftAll(joined, ftStage(StageSwactorJoined))},
		ftFold{why: "convergence was seen before: hand off at once", from: ftNode(ftRunning, ftFailures(2, 0), ftLastStage(BootstrapStageConverged)), see: ftJoins("agent-7"), then: ftAll(joined, ftHandsOff)},
		ftFold{why: "the same again", from: ftNode(ftJoined), see: ftJoins("agent-7"), reason: AlreadyJoined},
		ftFold{why: "another agent: the first is kept", from: ftNode(ftJoined), see: ftJoins("agent-8"), reason: AnotherJoined},
		ftFold{why: "an agent without a name joins as well", from: ftNode(ftRunning), see: ftJoins(""), then: ftAll(joined, ftStage(StageSwactorJoined), func(m *ManagedNode) { m.Record.Swactor.ID = "" })},
		ftFold{why: "and once only", from: ftNode(ftJoined, func(m *ManagedNode) { m.Record.Swactor.ID = "" }), see: ftJoins(""), reason: AlreadyJoined},
		ftFold{why: "Deleting: a fact, the stage stays", from: ftNode(ftRunning, ftDeleting, ftLastStage(BootstrapStageConverged)), see: ftJoins("agent-7"), then: joined},
		ftFold{why: "Deleting: the same again", from: ftNode(ftJoined, ftDeleting), see: ftJoins("agent-7"), reason: AlreadyJoined},
		ftFold{why: "Failed: it cannot be talked back", from: ftNode(ftRunning, ftFailed), see: ftJoins("agent-7"), reason: AlreadyFailed},
		ftFold{why: "Failed and Deleting", from: ftNode(ftRunning, ftFailed, ftDeleting), see: ftJoins("agent-7"), reason: AlreadyFailed},
		ftFold{why: "handed off", from: ftNode(ftReady), see: ftJoins("agent-7"), reason: DeadSession},
		ftFold{why: "Destroyed", from: ftNode(ftRunning, ftDestroyed), see: ftJoins("agent-7"), reason: DeadSession},
		ftFold{why: "another session", from: ftNode(ftRunning), see: ftSays(SwactorJoined, func(o *Observation) { o.Session, o.Swactor = "another", "agent-7" }), reason: DeadSession},
		ftFold{why: "another attempt", from: ftNode(ftRunning), see: ftSays(SwactorJoined, func(o *Observation) { o.Attempt--; o.Swactor = "agent-7" }), reason: StaleAttempt},
	)
}

func TestFold_BootstrapFailed(t *testing.T) {
	for _, row := range []struct {
		why   string
		see   Observation
		facts func(*ManagedNode)
		text  string
	}{
		{"with a reason", ftBreaks("no disk"), ftHeard, "the bootstrap failed: no disk"},
		{"without a word", ftBreaks(""), ftHeard, "the bootstrap failed"},
		{"with a stage", ftSays(BootstrapFailed, func(o *Observation) { o.Stage = BootstrapStageStartFailed }), ftHeardStage(BootstrapStageStartFailed), "the bootstrap failed: StartFailed"},
		{"SSHConnectFailed", ftProgress(BootstrapStageSSHConnectFailed, 12, 6), ftAll(ftHeardStage(BootstrapStageSSHConnectFailed), ftHeardLines(12, 6)), "the bootstrap failed: SSHConnectFailed"},
		{"BootCheckFailed", ftProgress(BootstrapStageBootCheckFailed, 0, 0), ftHeardStage(BootstrapStageBootCheckFailed), "the bootstrap failed: BootCheckFailed"},
		{"StartFailed", ftProgress(BootstrapStageStartFailed, 0, 0), ftHeardStage(BootstrapStageStartFailed), "the bootstrap failed: StartFailed"},
		{"SwactorJoinFailed", ftProgress(BootstrapStageSwactorJoinFailed, 0, 0), ftHeardStage(BootstrapStageSwactorJoinFailed), "the bootstrap failed: SwactorJoinFailed"},
		{"StreamError", ftProgress(BootstrapStageStreamError, 0, 0), ftHeardStage(BootstrapStageStreamError), "the bootstrap failed: StreamError"},
		{"a failure that names an orderly end is still a failure", ftSays(BootstrapFailed, func(o *Observation) { o.Stage, o.Reason = BootstrapStageClosed, "cut" }), ftHeard, "the bootstrap failed: cut"},
		{"a failure that names convergence is still a failure", ftSays(BootstrapFailed, func(o *Observation) { o.Stage, o.Reason = BootstrapStageConverged, "cut" }), ftHeard, "the bootstrap failed: cut"},
	} {
		ftFolds(t,
			ftFold{why: row.why + ", running: the attempt is over, the session is still to be cancelled", from: ftNode(ftRunning, ftFailures(2, 0)), see: row.see, then: ftAll(row.facts, ftFails(row.text))},
			ftFold{why: row.why + ", joined", from: ftNode(ftJoined, ftFailures(2, 0), ftBackingOff(time.Hour)), see: row.see, then: ftAll(row.facts, ftFails(row.text))},
			ftFold{why: row.why + ", while a call runs: it stays on record", from: ftActive(BootstrapConvergenceObserved, ftJoined), see: row.see, then: ftAll(row.facts, ftFails(row.text))},
			ftFold{why: row.why + ", Deleting: facts, no count, no delay", from: ftNode(ftRunning, ftDeleting, ftFailures(2, 1), ftBackingOff(time.Hour)), see: row.see, then: row.facts},
			ftFold{why: row.why + ", Failed: the first failure stands", from: ftNode(ftRunning, ftFailed), see: row.see, reason: AlreadyFailed},
			ftFold{why: row.why + ", handed off", from: ftNode(ftReady), see: row.see, reason: DeadSession},
		)
	}
	ftFolds(t,
		ftFold{why: "a failure after convergence", from: ftNode(ftRunning, ftLastStage(BootstrapStageConverged)), see: ftProgress(BootstrapStageStreamError, 12, 6),
			then: ftAll(ftHeardStage(BootstrapStageStreamError), ftHeardLines(12, 6), ftFails("the bootstrap failed: StreamError"))},
		ftFold{why: "Deleting: of two ends the first stands", from: ftNode(ftRunning, ftDeleting, ftLastStage(BootstrapStageStartFailed)), see: ftProgress(BootstrapStageStreamError, 0, 0), then: ftHeard},
	)
}

func TestFold_BootstrapClosed(t *testing.T) {
	for name, see := range map[string]Observation{"event": ftSays(BootstrapClosed), "stage": ftProgress(BootstrapStageClosed, 0, 0)} {
		closed := ftHeardStage(BootstrapStageClosed)
		ftFolds(t,
			ftFold{why: name + ", joined: hand off", from: ftNode(ftJoined, ftFailures(2, 0)), see: see, then: ftAll(closed, ftHandsOff)},
			ftFold{why: name + ", joined, while the call about it runs: hand off, the call stays on record", from: ftActive(BootstrapConvergenceObserved, ftJoined), see: see, then: ftAll(closed, ftHandsOff)},
			ftFold{why: name + ", running: the agent never joined", from: ftNode(ftRunning, ftFailures(2, 0)), see: see, then: ftAll(closed, ftNoSession, ftFails("the bootstrap session closed before the agent joined"))},
			ftFold{why: name + ", converged, and no join: the same", from: ftNode(ftRunning, ftFailures(2, 0), ftLastStage(BootstrapStageConverged)), see: see,
				then: ftAll(closed, ftNoSession, ftFails("the bootstrap session closed before the agent joined"))},
			ftFold{why: name + ", Deleting: no session is left to cancel; the delay stays", from: ftNode(ftRunning, ftDeleting, ftFailures(2, 1), ftBackingOff(time.Hour)), see: see, then: ftAll(closed, ftNoSession)},
			ftFold{why: name + ", Deleting with a join on record: folded directly, it is not ready", from: ftNode(ftJoined, ftDeleting), see: see, then: ftAll(closed, ftNoSession)},
			ftFold{why: name + ", Failed: no session is left to cancel", from: ftNode(ftRunning, ftFailed), see: see, then: ftAll(closed, ftNoSession)},
			ftFold{why: name + ", Failed with a join on record: it stays failed", from: ftNode(ftJoined, ftFailed), see: see, then: ftAll(closed, ftNoSession)},
			ftFold{why: name + ", Failed by the stream: that end stands", from: ftNode(ftRunning, ftFailed, ftLastStage(BootstrapStageStreamError)), see: see, then: ftAll(ftHeard, ftNoSession)},
			ftFold{why: name + ", handed off: changes nothing", from: ftNode(ftReady), see: see, reason: DeadSession},
			ftFold{why: name + ", Destroyed", from: ftNode(ftRunning, ftDestroyed), see: see, reason: DeadSession},
		)
		see.Session = "another"
		ftFolds(t, ftFold{why: name + ", of another session", from: ftNode(ftJoined), see: see, reason: DeadSession})
	}
}

func TestFold_CancelledStage(t *testing.T) {
	see := ftProgress(BootstrapStageCancelled, 0, 0)
	cancelled := ftAll(ftHeardStage(BootstrapStageCancelled), ftNoSession)
	ftFolds(t,
		ftFold{why: "running: the attempt is over", from: ftNode(ftRunning, ftFailures(2, 0)), see: see, then: ftAll(cancelled, ftFails("the bootstrap session was cancelled"))},
		ftFold{why: "joined: the attempt is over too", from: ftNode(ftJoined, ftFailures(2, 0)), see: see, then: ftAll(cancelled, ftFails("the bootstrap session was cancelled"))},
		ftFold{why: "Deleting", from: ftNode(ftJoined, ftDeleting, ftFailures(2, 1), ftBackingOff(time.Hour)), see: see, then: cancelled},
		ftFold{why: "Failed", from: ftNode(ftRunning, ftFailed), see: see, then: cancelled},
		ftFold{why: "handed off", from: ftNode(ftReady), see: see, reason: DeadSession},
	)
}

func TestFold_NodeLost(t *testing.T) {
	see := Observation{Kind: NodeLost, Node: "w-0", Attempt: ftAttempt, Reason: "spot"}
	lost := ftFails("the node was lost: spot")
	doubt := ftAmbiguous(StartBootstrap)
	ftFolds(t,
		ftFold{why: "no machine, nothing lost", from: ftNode(ftRequested, ftAmbiguous(CreateLease)), see: see, reason: NoLeaseHeld},
		ftFold{why: "nothing begun", from: ftNode(), see: see, reason: NoLeaseHeld},
		ftFold{why: "Destroyed", from: ftNode(ftReady, ftDestroyed), see: see, reason: NoLeaseHeld},
		ftFold{why: "another attempt's machine", from: ftNode(ftReady), see: Observation{Kind: NodeLost, Node: "w-0", Attempt: ftAttempt + 1}, reason: StaleAttempt},

		ftFold{why: "leased", from: ftNode(ftLeased, ftFailures(2, 0), ftBackingOff(time.Hour)), see: see, then: lost},
		ftFold{why: "leased, while a look-up runs: it stays on record", from: ftActive(LookupEndpoint, ftLeased), see: see, then: lost},
		ftFold{why: "reachable, a start in doubt: a dead machine runs no bootstrap", from: ftNode(ftReachable, ftFailures(2, 0), doubt), see: see, then: ftAll(ftForgotten, lost)},
		ftFold{why: "reachable, while the start runs", from: ftActive(StartBootstrap, ftReachable), see: see, then: lost},
		ftFold{why: "running, whatever session is said", from: ftNode(ftRunning, ftFailures(2, 0)), see: ftSays(NodeLost, func(o *Observation) { o.Session, o.Reason = "another", "spot" }), then: ftAll(ftNoSession, lost)},
		ftFold{why: "joined", from: ftNode(ftJoined, ftFailures(2, 0)), see: see, then: ftAll(ftNoSession, lost)},
		ftFold{why: "without a reason", from: ftNode(ftJoined), see: ftSays(NodeLost), then: ftAll(ftNoSession, ftFails("the node was lost"))},

		ftFold{why: "Deleting: the session is gone with it; no count, and no reason to hurry", from: ftNode(ftRunning, ftDeleting, ftFailures(2, 1), ftBackingOff(time.Hour)), see: see, then: ftNoSession},
		ftFold{why: "Deleting, a start in doubt", from: ftNode(ftReachable, ftDeleting, ftFailures(2, 1), doubt), see: see, then: ftForgotten},
		ftFold{why: "Deleting, a create in doubt beside a lease: the doubt stays", from: ftNode(ftReachable, ftDeleting, ftAmbiguous(CreateLease)), see: see},
		ftFold{why: "Failed: the first failure stands", from: ftNode(ftRunning, ftFailed, doubt), see: see, then: ftAll(ftNoSession, ftForgotten)},
	)

	// Ready for StableAfter proves that the image is well; a moment less does not.
	readySince := func(d time.Duration) func(*ManagedNode) {
		return ftAll(ftReady, func(m *ManagedNode) { m.Record.ReadyAt, m.Retry.FailuresBeforeReady = ftAfter(-d), 4 })
	}
	for _, row := range []struct {
		ready   time.Duration
		carried uint32
	}{{0, 4}, {10*time.Minute - 1, 4}, {10 * time.Minute, 0}, {10*time.Minute + 1, 0}} {
		ftFolds(t, ftFold{why: fmt.Sprintf("ready for %v", row.ready), from: ftNode(readySince(row.ready)), see: see, then: ftAll(ftFailures(row.carried, 0), lost)})
	}
	ftFolds(t,
		ftFold{why: "StableAfter is the policy's", policy: ftPolicy(func(p *RetryPolicy) { p.StableAfter = 5 }), from: ftNode(readySince(5)), see: see, then: ftAll(ftFailures(0, 0), lost)},
		ftFold{why: "never ready, whatever StableAfter is: the count goes on", policy: ftPolicy(func(p *RetryPolicy) { p.StableAfter = math.MaxInt64 }), from: ftNode(ftJoined, ftFailures(2, 0)), see: see, then: ftAll(ftNoSession, lost)},
		ftFold{why: "ready in HandedOff, which is reserved", from: ftNode(readySince(1), ftStage(StageHandedOff)), see: see, then: ftAll(ftFailures(4, 0), lost)},
		ftFold{why: "ready, while the overtaken call runs: it stays on record", from: ftNode(readySince(1), ftPending(BootstrapConvergenceObserved)), see: see, then: ftAll(ftFailures(4, 0), lost)},
		ftFold{why: "ready and then given up on: no failure", from: ftNode(readySince(1), ftDeleting), see: see},
	)
}

func TestFold_StaleOrUnknown(t *testing.T) {
	other := ftDone(CreateLease, ClassNone, ftWithLease)
	from := ftActive(CreateLease, ftRequested)
	edit := func(change func(*Observation)) Observation { o := other; change(&o); return o }
	ftFolds(t,
		ftFold{why: "no observation at all", from: from, see: Observation{Attempt: ftAttempt}, reason: UnknownObservation},
		ftFold{why: "an observation of tomorrow", from: from, see: Observation{Kind: observationKinds, Attempt: ftAttempt}, reason: UnknownObservation},
	)
	for why, row := range map[string]struct {
		see    Observation
		reason NotAppliedReason
	}{
		"an earlier attempt":             {edit(func(o *Observation) { o.Attempt-- }), StaleAttempt},
		"a later attempt":                {edit(func(o *Observation) { o.Attempt++ }), StaleAttempt},
		"an earlier operation":           {edit(func(o *Observation) { o.Completion.Operation.Sequence-- }), NotPending},
		"a later operation":              {edit(func(o *Observation) { o.Completion.Operation.Sequence++ }), NotPending},
		"an operation of another":        {edit(func(o *Observation) { o.Completion.Operation.Attempt-- }), NotPending},
		"the operation as another kind":  {edit(func(o *Observation) { o.Completion.Kind = DestroyLease }), NotPending},
		"the operation as no kind":       {edit(func(o *Observation) { o.Completion.Kind = NoOperation }), NotPending},
		"nothing said of the completion": {edit(func(o *Observation) { o.Completion = Completion{} }), NotPending},
	} {
		n := ftImport(t, from)
		before := n.export()
		require.Equal(t, row.reason, n.fold(&row.see, ftPolicy(), nearestInstant(ftNow)), why)
		require.Equal(t, before, n.export(), why)
	}
	n := ftImport(t, ftNode())
	require.Equal(t, NotPending, n.fold(&Observation{Kind: OperationCompleted, Attempt: ftAttempt}, ftPolicy(), 1), "nothing is pending")
}

// Early observations: the stream may speak before the start has answered.

// ftStarting is a node whose start runs.
func ftStarting(edits ...func(*ManagedNode)) ManagedNode {
	return ftNode(append([]func(*ManagedNode){ftReachable, ftPending(StartBootstrap)}, edits...)...)
}

func TestFold_HeldUntilTheSessionIsOnRecord(t *testing.T) {
	hold := func(os ...Observation) func(*ManagedNode) {
		return func(m *ManagedNode) { m.Held = append(slices.Clone(m.Held), os...) }
	}
	converged, join := ftProgress(BootstrapStageConverged, 3, 4), ftJoins("agent-7")
	started := ftDone(StartBootstrap, ClassNone, ftWithSession)
	joined := func(m *ManagedNode) { m.Record.Swactor = SwactorFacts{ID: "agent-7", JoinedAt: ftNow} }
	ftFolds(t,
		ftFold{why: "the start is pending", from: ftStarting(), see: join, reason: HeldForSession, then: hold(join)},
		ftFold{why: "the start is remembered", from: ftNode(ftReachable, ftAmbiguous(StartBootstrap)), see: join, reason: HeldForSession, then: hold(join)},
		ftFold{why: "the start is pending on a node that is being deleted", from: ftStarting(ftDeleting), see: join, reason: HeldForSession, then: hold(join)},
		ftFold{why: "the start is pending on a failed node", from: ftStarting(ftFailed), see: join, reason: HeldForSession, then: hold(join)},
		ftFold{why: "another operation is pending", from: ftActive(CreateLease, ftRequested), see: join, reason: DeadSession},
		ftFold{why: "the death of the machine is never held", from: ftStarting(hold(join)), see: ftSays(NodeLost), then: ftFails("the node was lost")},
		ftFold{why: "of another attempt", from: ftStarting(), see: ftSays(SwactorJoined, func(o *Observation) { o.Attempt-- }), reason: StaleAttempt},

		ftFold{why: "folded when the session is on record", from: ftStarting(hold(join)), see: started,
			then: ftAll(ftHeldDropped, ftSessionBegins, joined, ftStage(StageSwactorJoined))},
		ftFold{why: "in order: a close after the join hands off", from: ftStarting(hold(join, ftSays(BootstrapClosed))), see: started,
			then: ftAll(ftHeldDropped, ftSessionBegins, joined, ftLastStage(BootstrapStageClosed), ftHandsOff)},
		ftFold{why: "in order: a close before the join is an end", from: ftStarting(hold(ftSays(BootstrapClosed), join)), see: started,
			then: ftAll(ftHeldDropped, ftSessionBegins, ftNoSession, ftLastStage(BootstrapStageClosed), ftFails("the bootstrap session closed before the agent joined"))},
		ftFold{why: "converged, then joined", from: ftStarting(hold(converged, join)), see: started,
			then: ftAll(ftHeldDropped, ftSessionBegins, joined, ftLastStage(BootstrapStageConverged), ftHeardLines(3, 4), ftHandsOff)},
		ftFold{why: "a failure", from: ftStarting(hold(join, ftBreaks("no disk"))), see: started,
			then: ftAll(ftHeldDropped, ftSessionBegins, joined, ftFails("the bootstrap failed: no disk"))},
		ftFold{why: "only what names the session", from: ftStarting(hold(ftSays(SwactorJoined, func(o *Observation) { o.Session = "another" }), ftSays(BootstrapClosed, func(o *Observation) { o.Session = "" }))), see: started,
			then: ftAll(ftHeldDropped, ftSessionBegins, ftStage(StageBootstrapRunning))},
		ftFold{why: "Deleting: facts", from: ftStarting(ftDeleting, hold(join, ftSays(BootstrapClosed))), see: started,
			then: ftAll(ftHeldDropped, ftSessionBegins, joined, ftNoSession, ftLastStage(BootstrapStageClosed))},
		ftFold{why: "Failed: only the end of the session counts", from: ftStarting(ftFailed, hold(join, ftSays(BootstrapClosed))), see: started,
			then: ftAll(ftHeldDropped, ftSessionBegins, ftNoSession, ftLastStage(BootstrapStageClosed))},

		ftFold{why: "kept through a start in doubt", from: ftStarting(hold(join)), see: ftDone(StartBootstrap, ClassAmbiguous), then: ftAll(ftAmbiguous(StartBootstrap), ftBacksOff("StartBootstrap: no luck"))},
		ftFold{why: "kept while an earlier start is in doubt", from: ftStarting(ftAmbiguous(StartBootstrap), hold(join)), see: ftDone(StartBootstrap, ClassNotStarted), then: ftBacksOff("StartBootstrap: no luck")},
		ftFold{why: "dropped when no start is left that it could belong to", from: ftStarting(hold(join)), see: ftDone(StartBootstrap, ClassNotStarted), then: ftAll(ftHeldDropped, ftBacksOff("StartBootstrap: no luck"))},
		ftFold{why: "dropped when the start was refused", from: ftStarting(hold(join)), see: ftDone(StartBootstrap, ClassDefinite), then: ftAll(ftHeldDropped, ftFails("StartBootstrap: no luck"))},
		ftFold{why: "dropped with the machine, when the start is only remembered", from: ftNode(ftReachable, ftAmbiguous(StartBootstrap), hold(join)), see: ftSays(NodeLost),
			then: ftAll(ftHeldDropped, ftForgotten, ftFails("the node was lost"))},
	)

	n := ftImport(t, ftStarting(hold(join)))
	n.beginDelete()
	require.Empty(t, n.held, "giving up drops what is held")
	n = ftImport(t, ftNode(ftDestroyed, hold(join)))
	n.restart(n.template, 8)
	require.Empty(t, n.held, "a fresh attempt has heard nothing")
}

// A flood of early events is bounded: the oldest progress goes first, then the
// oldest of what matters.
func TestFold_HeldIsBounded(t *testing.T) {
	p, now := ftPolicy(), nearestInstant(ftNow)
	see := func(n *node, o Observation) { require.Equal(t, HeldForSession, n.fold(&o, p, now)) }
	lines := func(n *node) (held []string) {
		for _, o := range n.held {
			switch {
			case o.Kind == BootstrapProgress && o.Stage.rank() == 0:
				held = append(held, fmt.Sprintf("line %d", o.StdoutSequence))
			case o.Kind == SwactorJoined:
				held = append(held, "join "+string(o.Swactor))
			default:
				held = append(held, o.Kind.String()+o.Reason)
			}
		}
		return held
	}
	progress := func(line uint64) Observation { return ftProgress(BootstrapStageStdoutStreaming, line, 0) }

	n := ftImport(t, ftStarting())
	see(n, ftJoins("early"))
	for line := range uint64(50_000) {
		see(n, progress(line))
	}
	see(n, ftBreaks("1"))
	for line := range uint64(50_000) {
		see(n, progress(50_000+line))
		require.LessOrEqual(t, len(n.held), maxHeld)
		require.LessOrEqual(t, cap(n.held), 4*maxHeld)
	}
	want := []string{"join early", "BootstrapFailed1"}
	for line := 100_000 - (maxHeld - 2); line < 100_000; line++ {
		want = append(want, fmt.Sprintf("line %d", line))
	}
	require.Equal(t, want, lines(n), "in the order they came")

	for i := range 20 {
		see(n, ftBreaks(fmt.Sprint(i)))
	}
	want = nil
	for i := 4; i < 20; i++ {
		want = append(want, fmt.Sprintf("BootstrapFailed%d", i))
	}
	require.Equal(t, want, lines(n), "the newest that matter")

	for line := range uint64(100) {
		see(n, progress(line))
	}
	require.Equal(t, want, lines(n), "progress never takes the place of what matters")
	see(n, ftProgress(BootstrapStageConverged, 0, 0))
	require.Equal(t, append(want[1:], "BootstrapProgress"), lines(n), "convergence matters")
}

// The deadline of a stage is set once and judged to the nanosecond.
func TestFold_StageDeadline(t *testing.T) {
	now := nearestInstant(ftNow)
	for _, row := range []struct {
		why     string
		node    ManagedNode
		overdue bool
	}{
		{"a nanosecond to go", ftNode(ftLeased, ftStageDeadlineIn(1)), false},
		{"now", ftNode(ftLeased, ftStageDeadlineIn(0)), true},
		{"a nanosecond ago", ftNode(ftLeased, ftStageDeadlineIn(-1)), true},
		{"no limit", ftNode(ftRunning, func(m *ManagedNode) { m.Retry.StageDeadline = time.Time{} }), false},
		{"whatever is pending", ftNode(ftLeased, ftStageDeadlineIn(0), ftPending(LookupEndpoint)), true},
		{"ready", ftNode(ftReady, ftStageDeadlineIn(0)), false},
		{"failed already", ftNode(ftRunning, ftFailed, ftStageDeadlineIn(0)), false},
		{"being deleted", ftNode(ftRunning, ftDeleting, ftStageDeadlineIn(0)), false},
	} {
		require.Equal(t, row.overdue, ftImport(t, row.node).stageOverdue(now), row.why)
	}

	for _, row := range []struct {
		from func(*ManagedNode)
		text string
	}{
		{ftLeased, "the machine had no endpoint in time"},
		{ftReachable, "the bootstrap did not finish in time"},
		{ftRunning, "the bootstrap did not finish in time"},
		{ftJoined, "the bootstrap did not finish in time"},
	} {
		n := ftImport(t, ftNode(row.from, ftFailures(2, 0), ftStageDeadlineIn(0)))
		want := n.export()
		ftFails(row.text)(&want)
		n.foldStageDeadline(ftPolicy(), now)
		require.Equal(t, want, n.export(), "the facts are kept")
		n.foldStageDeadline(ftPolicy(), nearestInstant(ftAfter(time.Second)))
		require.Equal(t, want, n.export(), "an attempt ends once")
	}

	// Set with the lease, replaced with the endpoint, kept until the hand-off.
	n := ftImport(t, ftNode())
	p := ftPolicy()
	at := func(d time.Duration) instant { return nearestInstant(ftAfter(d)) }
	complete := func(d time.Duration, kind OperationKind, class FailureClass, edits ...func(*Completion)) {
		e := recorded(n, kind, false, p, at(d))
		o := ftDone(kind, class, edits...)
		o.Completion.Operation = e.Operation
		require.Empty(t, n.fold(&o, p, at(d)))
	}
	deadline := func() time.Time { return n.stageDeadline.time() }
	complete(0, CreateLease, ClassAmbiguous)
	require.Zero(t, n.stageDeadline, "creates have no limit")
	complete(time.Minute, CreateLease, ClassNone, ftWithLease)
	require.Equal(t, ftAfter(11*time.Minute), deadline())
	complete(2*time.Minute, LookupEndpoint, ClassNone)
	complete(3*time.Minute, LookupEndpoint, ClassDefinite)
	require.Equal(t, ftAfter(11*time.Minute), deadline(), "probes push nothing out")
	complete(4*time.Minute, LookupEndpoint, ClassNone, ftWithEndpoint)
	require.Equal(t, ftAfter(34*time.Minute), deadline())
	complete(5*time.Minute, StartBootstrap, ClassAmbiguous)
	complete(6*time.Minute, StartBootstrap, ClassNone, ftWithSession)
	for _, o := range []Observation{ftProgress(BootstrapStageSwactorStarting, 1, 1), ftJoins("agent-7")} {
		require.Empty(t, n.fold(&o, p, at(7*time.Minute)))
	}
	complete(8*time.Minute, BootstrapConvergenceObserved, ClassAmbiguous)
	require.Equal(t, ftAfter(34*time.Minute), deadline(), "retries and progress push nothing out")
	complete(9*time.Minute, BootstrapConvergenceObserved, ClassNone)
	require.Zero(t, n.stageDeadline)
	require.True(t, n.ready)
}

// An operation that is out of time in the pass that also ends its attempt
// counts twice: two things went wrong.
func TestFold_ExpiryAndStageDeadlineCountBoth(t *testing.T) {
	n := ftImport(t, ftActive(LookupEndpoint, ftLeased, ftStageDeadlineIn(0)))
	done := ftDone(LookupEndpoint, ClassAmbiguous)
	n.fold(&done, ftPolicy(), nearestInstant(ftNow))
	require.True(t, n.stageOverdue(nearestInstant(ftNow)))
	n.foldStageDeadline(ftPolicy(), nearestInstant(ftNow))
	require.EqualValues(t, 4, n.failures)
	require.Equal(t, ftAfter(8*time.Second), n.restartAt.time())
	require.Zero(t, n.nextEffectAt)
}

// A wait that cannot be expressed ends at the last moment there is.
func TestFold_WaitsSaturate(t *testing.T) {
	n := ftImport(t, ftActive(CreateLease, ftRequested))
	done := ftDone(CreateLease, ClassDefinite)
	n.fold(&done, ftPolicy(), maxInstant-1)
	require.Equal(t, maxInstant, n.nextEffectAt)
	require.NoError(t, ftState(t, n.export()).Check())
}

// ftDrawObservation draws something that could be said about n, most of it to
// the point.
func ftDrawObservation(t *rapid.T, n *node) Observation {
	o := Observation{Kind: ObservationKind(rapid.IntRange(0, int(observationKinds)).Draw(t, "kind")), Node: n.id, Attempt: n.attempt}
	if n.pending != NoOperation && rapid.Bool().Draw(t, "it ends") {
		o.Kind = OperationCompleted
	}
	if rapid.IntRange(0, 9).Draw(t, "stale") == 0 {
		o.Attempt++
	}
	o.Session = rapid.SampledFrom([]BootstrapSessionID{"s1", "s1", "s1", "s2", ""}).Draw(t, "session")
	o.Stage = BootstrapStage(rapid.IntRange(0, int(bootstrapStages)-1).Draw(t, "stage"))
	o.StdoutSequence, o.StderrSequence = rapid.Uint64Range(0, 9).Draw(t, "stdout"), rapid.Uint64Range(0, 9).Draw(t, "stderr")
	o.Swactor = rapid.SampledFrom([]SwactorID{"a1", "a2"}).Draw(t, "agent")
	if o.Kind == OperationCompleted {
		o.Completion = Completion{Operation: n.pendingID(), Kind: n.pending, Class: FailureClass(rapid.IntRange(0, int(failureClasses)).Draw(t, "class")),
			RetryAfter: time.Duration(rapid.Int64Range(-1e9, 1e13).Draw(t, "retry after")),
			Lease:      rapid.SampledFrom([]ProviderLeaseID{"l1", "l1", ""}).Draw(t, "lease"),
			Session:    rapid.SampledFrom([]BootstrapSessionID{"s1", "s1", "s2", ""}).Draw(t, "started")}
		if rapid.Bool().Draw(t, "answers") {
			o.Completion.Endpoint = &SSHEndpoint{Host: "h", Port: 22}
		}
	}
	return o
}

// Whatever is seen, in whatever order: a lawful node stays lawful, is never
// unmatched, and what must not go back does not. The driver's own hand is
// played by the steps that the ladder asks for.
func TestProp_FoldsKeepTheInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := ftPolicy(func(p *RetryPolicy) {
			p.CancelLimit = rapid.SampledFrom([]int{1, 2, -1}).Draw(t, "cancel limit")
			p.EndpointTimeout = rapid.SampledFrom([]time.Duration{0, -1}).Draw(t, "endpoint timeout")
			p.BootstrapTimeout = rapid.SampledFrom([]time.Duration{0, -1}).Draw(t, "bootstrap timeout")
		})
		spec := ftWanted.template()
		n := newNode("w-0", 0, spec, 1)
		n.index = 0
		state := &ClusterState{NextAttemptID: 2}
		state.add(state.groupFor("w"), n)
		now := nearestInstant(ftNow)
		wanted := spec
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.plus(time.Duration(rapid.SampledFrom([]int64{0, 1, 1e9, 4e9, 6e10, 6e11, 4e12}).Draw(t, "time passes")))
			before, attempt := n.export(), n.attempt
			switch rapid.IntRange(0, 4).Draw(t, "what happens") {
			case 0, 1:
				o := ftDrawObservation(t, n)
				reason := n.fold(&o, p, now)
				after := n.export()
				if reason != "" {
					if reason == HeldForSession {
						after.Held, before.Held = nil, nil
					}
					require.Equal(t, before, after, "%s: not applied means no change", reason)
				}
				ftNothingGoesBack(t, before, after)
			case 2:
				wanted = rapid.SampledFrom([]*template{spec, spec, spec, nil}).Draw(t, "wanted")
			default:
				if n.pending != NoOperation && n.pendingDeadline.due(now) {
					o := Observation{Kind: OperationCompleted, Attempt: n.attempt, Completion: Completion{Operation: n.pendingID(), Kind: n.pending, Class: ClassAmbiguous}}
					require.Empty(t, n.fold(&o, p, now))
				}
				if n.stageOverdue(now) {
					n.foldStageDeadline(p, now)
				}
				d := decide(n, wanted, now)
				require.NotEqual(t, ruleUnmatched, d.Number, "%+v", before)
				require.NoError(t, d.fault)
				switch d.action {
				case BeginDelete:
					n.beginDelete()
				case MarkDestroyed:
					n.markDestroyed(now)
				case Restart:
					n.restart(spec, state.NextAttemptID)
					state.NextAttemptID++
				case Dispatch:
					if d.operation == DestroyLease {
						require.NotEqual(t, CreateLease, n.ambiguous, "no destroy while a create is remembered (G5)")
					}
					n.record(d.operation, d.Number == ruleResolve, p, now)
				case NoAction:
					if d.until != nil && d.until(n) != 0 {
						require.Greater(t, d.wakeAt(n, now), now, "what waits is woken: %s", d.Rule)
					}
				}
			}
			require.NoError(t, state.Check(), "%+v", n.export())
			if n.attempt == attempt && before.Intent == Deleting {
				require.Equal(t, Deleting, n.intent, "giving up never turns back")
			}
			require.LessOrEqual(t, len(n.held), maxHeld)
		}
	})
}

func ftNothingGoesBack(t require.TestingT, before, after ManagedNode) {
	b, a := before.Record.Bootstrap, after.Record.Bootstrap
	if b.Session == a.Session && before.ActiveBootstrap == a.Session {
		require.GreaterOrEqual(t, a.LastStdoutSequence, b.LastStdoutSequence)
		require.GreaterOrEqual(t, a.LastStderrSequence, b.LastStderrSequence)
		require.GreaterOrEqual(t, a.LastStage.rank(), b.LastStage.rank(), "an end never goes back")
		if b.LastStage.rank() > 1 {
			require.Equal(t, b.LastStage, a.LastStage, "the first end stands")
		}
	}
	if after.Intent == Deleting || before.Record.Stage == StageFailed {
		require.Equal(t, before.Record.Stage, after.Record.Stage, "the stage does not move")
		require.False(t, after.Record.Ready)
		require.Equal(t, before.Retry.ConsecutiveFailures, after.Retry.ConsecutiveFailures)
		require.Equal(t, before.Retry.RestartAt, after.Retry.RestartAt)
		require.Equal(t, before.Record.FailedReason, after.Record.FailedReason, "the first failure stands")
	}
	if before.Record.Stage == after.Record.Stage && !before.Retry.StageDeadline.IsZero() {
		require.Equal(t, before.Retry.StageDeadline, after.Retry.StageDeadline, "never pushed out")
	}
	if before.Pending == nil {
		require.Equal(t, before.Retry.Ambiguous == CreateLease, after.Retry.Ambiguous == CreateLease, "no stream ends the doubt about a create (G5)")
		require.Equal(t, before.Record.Lease, after.Record.Lease, "no stream makes or unmakes a lease (G5)")
	}
}

// A stage that does not exist is not stored: the state could not be written down.
func TestFold_StageThatDoesNotExist(t *testing.T) {
	n := ftState(t, ftNode(ftRunning)).find("w-0")
	o := Observation{Kind: BootstrapProgress, Node: "w-0", Attempt: n.attempt, Session: n.session, Stage: bootstrapStages}
	before := n.export()
	require.Equal(t, UnknownObservation, n.fold(&o, ftPolicy(), nearestInstant(ftNow)))
	require.Equal(t, before, n.export())
}
