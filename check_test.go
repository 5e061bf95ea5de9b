package provisioning

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ftBroken lists what Check finds.
func ftBroken(t *testing.T, s *ClusterState) (found []InvariantError) {
	err := s.Check()
	if err == nil {
		return nil
	}
	require.ErrorIs(t, err, ErrInvalidState)
	joined, ok := err.(interface{ Unwrap() []error })
	require.True(t, ok)
	for _, one := range joined.Unwrap() {
		var broken *InvariantError
		require.ErrorAs(t, one, &broken)
		require.Equal(t, "provisioning: "+broken.Invariant+" broken at "+string(broken.Node)+": "+broken.Problem, one.Error())
		found = append(found, *broken)
	}
	return found
}

// Each invariant broken on its own is named, at its slot, and no other is.
func TestCheckNamesWhatIsBroken(t *testing.T) {
	noSession := func(m *ManagedNode) { m.ActiveBootstrap = "" }
	for _, row := range []struct {
		invariant string
		why       string
		node      ManagedNode
	}{
		{"S1", "no attempt", ftMove(ftNode(), "w", 0, 0)},
		{"S1", "an attempt not given out yet", ftMove(ftNode(), "w", 0, 50)},
		{"S1", "an attempt far ahead", ftMove(ftNode(), "w", 0, 500)},
		{"S2", "no next operation", ftNode(func(m *ManagedNode) { m.NextSequence = 0 })},
		{"S2", "an operation not numbered yet", ftNode(ftRequested, ftPending(CreateLease), func(m *ManagedNode) { m.Pending.ID.Sequence = m.NextSequence })},
		{"S2", "operation 0", ftNode(ftRequested, ftPending(CreateLease), func(m *ManagedNode) { m.Pending.ID.Sequence = 0 })},
		{"S4", "destroyed with a lease", ftNode(ftDestroyed, func(m *ManagedNode) { m.Record.Lease = ftLease })},
		{"S4", "destroyed with a session", ftNode(ftRunning, ftDestroyed, func(m *ManagedNode) { m.ActiveBootstrap = ftSession })},
		{"S4", "destroyed with an operation", ftNode(ftDestroyed, ftPending(DestroyLease))},
		{"S4", "destroyed with a doubt", ftNode(ftDestroyed, ftAmbiguous(CreateLease))},
		{"S5", "the facts of another session", ftNode(ftRunning, func(m *ManagedNode) { m.Record.Bootstrap.Session = "another" })},
		{"S5", "no facts", ftNode(ftRunning, ftDeleting, func(m *ManagedNode) { m.Record.Bootstrap = BootstrapFacts{} })},
		{"S6", "ready in another stage", ftNode(ftReady, ftStage(StageSwactorJoined))},
		{"S6", "ready without a lease", ftNode(ftReady, func(m *ManagedNode) { m.Record.Lease = "" })},
		{"S6", "ready without an endpoint", ftNode(ftReady, func(m *ManagedNode) { m.Record.Connection = nil })},
		{"S6", "ready without a join", ftNode(ftReady, func(m *ManagedNode) { m.Record.Swactor.JoinedAt = time.Time{} })},
		{"S6", "ready without a hand-off", ftNode(ftReady, func(m *ManagedNode) { m.Record.Swactor.HandedOffAt = time.Time{} })},
		{"S6", "ready with a failure counted", ftNode(ftReady, ftFailures(1, 0))},
		{"S6", "ready with an operation that is no overtaken convergence call", ftNode(ftReady, ftPending(DestroyLease))},
		{"S7", "failed without a reason", ftNode(ftFailed, func(m *ManagedNode) { m.Record.FailedReason = "" })},
		{"S7", "failed without a time", ftNode(ftFailed, func(m *ManagedNode) { m.Record.FailedAt = time.Time{} })},
		{"S7", "failed without a restart time", ftNode(ftFailed, ftDeleting, func(m *ManagedNode) { m.Retry.RestartAt = time.Time{} })},
		{"S8", "running without a session or a deadline", ftNode(ftRunning, noSession, func(m *ManagedNode) { m.Retry.StageDeadline = time.Time{} })},
		{"S8", "joined without a session or a deadline", ftNode(ftJoined, noSession, func(m *ManagedNode) { m.Retry.StageDeadline = time.Time{} })},
		{"S8", "dormant and not ready", ftNode(ftReady, func(m *ManagedNode) { m.Record.Ready = false })},
	} {
		well, err := NewClusterState(1, 50, ftMove(ftNode(ftReady), "v", 0, 1), ftMove(ftNode(ftReady), "x", 0, 2))
		require.NoError(t, err)
		require.NoError(t, well.Check())
		s, err := NewClusterState(1, 50, append(slices.Collect(well.All()), row.node)...)
		require.NoError(t, err, row.why)
		found := ftBroken(t, s)
		require.Len(t, found, 1, "%s: %v", row.why, found)
		require.Equal(t, row.invariant, found[0].Invariant, row.why)
		require.Equal(t, LogicalNodeID("w-0"), found[0].Node, row.why)
		require.NotEmpty(t, found[0].Problem)
	}
}

// A node that is deleting and ready breaks S3, and S6 with it, which asks that
// what is ready is Active: neither can be broken this way alone.
func TestCheckDeletingAndReady(t *testing.T) {
	found := ftBroken(t, ftState(t, ftNode(ftReady, ftDeleting, func(m *ManagedNode) { m.Record.Ready = true })))
	require.Equal(t, []InvariantError{
		{Invariant: "S3", Node: "w-0", Problem: "deleting and ready"},
		{Invariant: "S6", Node: "w-0", Problem: "ready and Deleting"},
	}, found)
}

func TestCheckAttemptOfTwoSlots(t *testing.T) {
	found := ftBroken(t, ftState(t, ftMove(ftNode(), "w", 1, 4), ftMove(ftNode(), "w", 0, 4), ftMove(ftNode(), "w", 2, 5)))
	require.Equal(t, []InvariantError{{Invariant: "S1", Node: "w-1", Problem: "attempt 4 is also that of w-0"}}, found)
}

// Everything that is broken is told, in slot order.
func TestCheckTellsAll(t *testing.T) {
	s := ftState(t, ftMove(ftNode(ftReady, ftFailures(1, 0)), "w", 10, 1), ftMove(ftNode(ftReady, ftFailures(1, 0)), "w", 9, 2),
		ftMove(ftNode(ftDestroyed, func(m *ManagedNode) { m.Record.Lease, m.NextSequence = ftLease, 0 }), "v", 0, 3))
	var lines []string
	for _, one := range ftBroken(t, s) {
		lines = append(lines, one.Invariant+" "+string(one.Node))
	}
	require.Equal(t, []string{"S2 v-0", "S4 v-0", "S6 w-9", "S6 w-10"}, lines)

	var first *InvariantError
	require.True(t, errors.As(s.Check(), &first))
	require.Equal(t, LogicalNodeID("v-0"), first.Node)
}

// Everything that may be there is let be.
func TestCheckLetsLawfulNodesBe(t *testing.T) {
	unlimited := func(m *ManagedNode) { m.Retry.StageDeadline = time.Time{} }
	for why, node := range map[string]ManagedNode{
		"new":                           ftNode(),
		"requested":                     ftNode(ftRequested),
		"backing off":                   ftNode(ftRequested, ftBackingOff(time.Hour)),
		"a backoff that is over":        ftNode(ftRequested, ftBackingOff(-time.Hour)),
		"leased":                        ftNode(ftLeased),
		"reachable":                     ftNode(ftReachable),
		"running":                       ftNode(ftRunning),
		"running without a limit":       ftNode(ftRunning, unlimited),
		"joined":                        ftNode(ftJoined, unlimited),
		"ready":                         ftNode(ftReady),
		"ready in HandedOff":            ftNode(ftReady, ftStage(StageHandedOff)),
		"overtaken":                     ftNode(ftReady, ftPending(BootstrapConvergenceObserved)),
		"failed":                        ftNode(ftRunning, ftFailed),
		"deleting":                      ftNode(ftRunning, ftDeleting),
		"deleting, backing off":         ftNode(ftRunning, ftDeleting, ftBackingOff(time.Hour)),
		"destroyed":                     ftNode(ftReady, ftDestroyed),
		"destroyed, to be restarted":    ftNode(ftReady, ftFailed, ftDestroyed),
		"whatever runs, something does": ftNode(ftRunning, func(m *ManagedNode) { m.ActiveBootstrap = "" }, ftPending(StartBootstrap)),
		"out of numbers: a fault, and still something to do": ftNode(ftLeased, func(m *ManagedNode) { m.NextSequence = 1<<64 - 1 }),
	} {
		require.NoError(t, ftState(t, node).Check(), why)
	}
	require.NoError(t, new(ClusterState).Check())
}
