package provisioning

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ftTransition applies one hand of the driver and compares the whole node.
func ftTransition(t *testing.T, why string, from ManagedNode, apply func(*node), then func(*ManagedNode)) {
	t.Helper()
	n := ftImport(t, from)
	want := n.export()
	apply(n)
	if then != nil {
		then(&want)
	}
	require.Equal(t, want, n.export(), why)
}

func TestBeginDelete(t *testing.T) {
	begun := func(m *ManagedNode) {
		m.Intent, m.Record.Ready, m.Held = Deleting, false, nil
		m.Retry.NextEffectAt, m.Retry.StageDeadline, m.Retry.CleanupFailures, m.Retry.CancelsFailed = time.Time{}, time.Time{}, 0, 0
	}
	held := func(m *ManagedNode) { m.Held = []Observation{ftJoins("agent-7")} }
	for why, from := range map[string]ManagedNode{
		"nothing begun":                ftNode(),
		"the first step never waits":   ftNode(ftRequested, ftFailures(3, 0), ftBackingOff(time.Hour), ftAmbiguous(CreateLease)),
		"the call that runs stays":     ftActive(StartBootstrap, ftReachable, held),
		"a doubt and its memory stay":  ftNode(ftReachable, ftAmbiguous(StartBootstrap), held),
		"ready":                        ftNode(ftReady),
		"failed: it restarts later":    ftNode(ftRunning, ftFailed),
		"counts of no cleanup are old": ftNode(ftRunning, ftFailures(2, 3), func(m *ManagedNode) { m.Retry.CancelsFailed = 4 }),
	} {
		ftTransition(t, why, from, (*node).beginDelete, begun)
	}
}

func TestMarkDestroyed(t *testing.T) {
	for why, from := range map[string]ManagedNode{
		"nothing was there":        ftNode(ftDeleting),
		"a delay is left over":     ftNode(ftDeleting, ftBackingOff(time.Hour)),
		"the restart time stays":   ftNode(ftFailed, ftDeleting, ftRestartIn(time.Minute)),
		"what was given up stays":  ftNode(ftDeleting, func(m *ManagedNode) { m.Retry.GivenUp = CancelBootstrap }),
		"the facts of a life stay": ftNode(ftReady, ftDeleting, func(m *ManagedNode) { m.Record.Lease, m.Record.Connection = "", nil }),
	} {
		ftTransition(t, why, from, func(n *node) { n.markDestroyed(nearestInstant(ftNow)) }, func(m *ManagedNode) {
			m.Record.Stage, m.Record.DestroyedAt, m.Retry.NextEffectAt = StageDestroyed, ftNow, time.Time{}
		})
	}
}

func TestRestart(t *testing.T) {
	latest := ftDrifted.template()
	for _, row := range []struct {
		why      string
		from     ManagedNode
		failures uint32
	}{
		{"the old attempt failed: its count goes on", ftNode(ftReady, ftFailures(4, 0), ftFailed, ftDestroyed), 5},
		{"it had failures and did not fail: a replacement for drift owes nothing", ftNode(ftRequested, ftFailures(4, 0), ftDestroyed), 0},
		{"it was well", ftNode(ftReady, ftDestroyed), 0},
	} {
		ftTransition(t, row.why, row.from, func(n *node) { n.restart(latest, 9) }, func(m *ManagedNode) {
			*m = ManagedNode{Attempt: 9, NextSequence: 1, Record: NodeRecord{Node: "w-0", Group: "w", Spec: *ftDrifted},
				Retry: RetryState{ConsecutiveFailures: row.failures}}
		})
	}
	n := ftState(t, ftMove(ftNode(ftDestroyed), "w", 3, 7)).find("w-3")
	n.marks, n.standing = marks{wakesAt: 5}, standing{hot: true}
	group := n.group
	n.restart(latest, 9)
	require.Same(t, group, n.group, "the slot stays where it is")
	require.Same(t, n, group.at(3))
	require.Equal(t, marks{wakesAt: 5}, n.marks, "what the driver keeps about the slot stays")
	require.Equal(t, standing{hot: true}, n.standing, "what the driver keeps about the slot stays")
}

func TestRecord(t *testing.T) {
	now := nearestInstant(ftNow)
	pending := func(kind OperationKind, timeout time.Duration) func(*ManagedNode) {
		return func(m *ManagedNode) {
			m.Pending = &PendingOperation{ID: OperationID{Attempt: ftAttempt, Sequence: ftNextSequence}, Kind: kind, Deadline: ftAfter(timeout)}
			m.NextSequence, m.Retry.NextEffectAt = ftNextSequence+1, time.Time{}
		}
	}
	earlier := ftAfter(-20 * time.Second)
	for _, row := range []struct {
		why       string
		from      ManagedNode
		kind      OperationKind
		resolving bool
		effect    Effect // besides what all of them say
		timeout   time.Duration
		then      func(*ManagedNode)
	}{
		{"the first create: nothing was sent before it", ftNode(), CreateLease, false, Effect{}, 2 * time.Minute,
			func(m *ManagedNode) {
				m.Record.Stage, m.Retry.CreatesSent, m.Retry.LastCreateAt = StageLeaseRequested, 1, ftNow
			}},
		{"the next create says when the last one went", ftNode(ftRequested, ftBackingOff(0)), CreateLease, false,
			Effect{CreatesSent: 1, LastCreateAt: earlier}, 2 * time.Minute,
			func(m *ManagedNode) { m.Retry.CreatesSent, m.Retry.LastCreateAt = 2, ftNow }},
		{"the count stays at the largest", ftNode(ftRequested, func(m *ManagedNode) { m.Retry.CreatesSent = math.MaxUint32 }), CreateLease, false,
			Effect{CreatesSent: math.MaxUint32, LastCreateAt: earlier}, 2 * time.Minute,
			func(m *ManagedNode) { m.Retry.LastCreateAt = ftNow }},
		{"asking after a create sends none (B4)", ftNode(ftRequested, ftDeleting, ftAmbiguous(CreateLease)), CreateLease, true,
			Effect{AdoptOnly: true, CreatesSent: 1, LastCreateAt: earlier}, 2 * time.Minute,
			func(m *ManagedNode) { m.Pending.Resolving = true }},
		{"asking after a create leaves the stage", ftNode(ftDeleting, ftAmbiguous(CreateLease)), CreateLease, true,
			Effect{AdoptOnly: true}, 2 * time.Minute,
			func(m *ManagedNode) { m.Pending.Resolving = true }},
		{"a look-up", ftNode(ftLeased), LookupEndpoint, false, Effect{Lease: ftLease}, 2 * time.Minute, nil},
		{"a start", ftNode(ftReachable), StartBootstrap, false, Effect{Lease: ftLease, Endpoint: &ftEndpoint}, 2 * time.Minute, nil},
		{"asking after a start", ftNode(ftReachable, ftDeleting, ftAmbiguous(StartBootstrap)), StartBootstrap, true,
			Effect{Lease: ftLease, Endpoint: &ftEndpoint}, 2 * time.Minute,
			func(m *ManagedNode) { m.Pending.Resolving = true }},
		{"a report of the join", ftNode(ftJoined), BootstrapConvergenceObserved, false,
			Effect{Lease: ftLease, Endpoint: &ftEndpoint, Session: ftSession, Swactor: "agent-7"}, 2 * time.Minute, nil},
		{"a cancel has less time", ftNode(ftRunning, ftDeleting), CancelBootstrap, false,
			Effect{Lease: ftLease, Endpoint: &ftEndpoint, Session: ftSession}, 30 * time.Second, nil},
		{"a destroy says when the last create went (B3)", ftNode(ftRunning, ftDeleting), DestroyLease, false,
			Effect{Lease: ftLease, CreatesSent: 1, LastCreateAt: earlier}, 2 * time.Minute, nil},
	} {
		ftTransition(t, row.why, row.from, func(n *node) {
			want := row.effect
			want.Operation, want.Kind = OperationID{Attempt: ftAttempt, Sequence: ftNextSequence}, row.kind
			want.Key = ExternalKey{Run: "r", Node: "w-0", Attempt: ftAttempt}
			want.DispatchedAt, want.Deadline = ftNow, ftAfter(row.timeout)
			want.template = n.template
			got := recorded(n, row.kind, row.resolving, ftPolicy(), now)
			require.Equal(t, want, got, row.why)
			require.Equal(t, *ftWanted, got.Spec())
		}, func(m *ManagedNode) {
			pending(row.kind, row.timeout)(m)
			if row.then != nil {
				row.then(m)
			}
		})
	}
}

// recorded puts an operation on record and returns it as the effect to submit.
func recorded(n *node, kind OperationKind, resolving bool, p *RetryPolicy, now instant) Effect {
	return n.effect(n.record(kind, resolving, p, now), now)
}
