package trace_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/trace"
)

// These tests make sure that the machine notices. What it has to notice in the
// library is what the properties are about; here the world is made wrong.

func world(t *testing.T, c trace.Config, groups ...trace.Group) *trace.World {
	t.Helper()
	w, err := trace.New(trace.Trace{Config: c, First: groups})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.Close()) })
	return w
}

func play(t *testing.T, w *trace.World, steps ...trace.Step) {
	t.Helper()
	for _, s := range steps {
		require.NoError(t, w.Step(s), "%v\n%s", s, strings.Join(w.Log(), "\n"))
	}
}

var (
	oneNode  = trace.Group{ID: "w", Count: 1, Image: "a"}
	aTrigger = trace.Step{Kind: trace.Trigger}
)

func key(attempt provisioning.NodeAttemptID) provisioning.ExternalKey {
	return provisioning.ExternalKey{Run: trace.Run, Node: "w-0", Attempt: attempt}
}

func TestAWellWorldHasAFairTail(t *testing.T) {
	for _, c := range []trace.Config{{}, {ManualBootstrap: true}, {JoinAfter: 7 * time.Second, MaxInFlight: 1}, {Class: fakebackend.Label, Lag: time.Second}} {
		for _, tail := range []func(*trace.World) error{(*trace.World).Tail, (*trace.World).TailAgain} {
			w := world(t, c, oneNode, trace.Group{ID: "x", Count: 2, Image: "b"})
			play(t, w, aTrigger)
			require.NoError(t, tail(w))
		}
	}
}

// A machine that nobody knows of is found, whatever attempt it is of.
func TestTailFindsAMachineTooMany(t *testing.T) {
	for _, attempt := range []provisioning.NodeAttemptID{1, 77} {
		w := world(t, trace.Config{}, trace.Group{ID: "x", Count: 1, Image: "a"})
		play(t, w, aTrigger)
		_, err := w.Fake.CreateLease(context.Background(), provisioning.CreateLeaseRequest{Key: key(attempt)})
		require.NoError(t, err)
		require.ErrorContains(t, w.CheckMachines(), "no machine but those of the wished slots")
		require.ErrorContains(t, w.Tail(), "among what is held (G5)")
	}
}

// A call past the executor is not on record.
func TestACallThatIsNotOnRecordIsFound(t *testing.T) {
	w := world(t, trace.Config{}, oneNode)
	play(t, w, aTrigger)
	node, _ := w.Driver.Node("w-0")
	_, err := w.Executor.Submit(provisioning.NewEffect(provisioning.OperationID{Attempt: 1, Sequence: 99}, provisioning.LookupEndpoint, key(1), node.Record.Spec))
	require.NoError(t, err)
	require.ErrorContains(t, w.Step(aTrigger), "G3: the call LookupEndpoint 1/99 of w-0 is not recorded as pending")
}

// A machine that goes without a word is reported in the tail, once, and is
// replaced; a join that a manual bootstrap owes is reported once.
func TestTailReportsWhatWasNotReported(t *testing.T) {
	w := world(t, trace.Config{}, oneNode)
	play(t, w, aTrigger, trace.Step{Kind: trace.Remove, Slot: "w-0"})
	require.NoError(t, w.Tail())
	require.Len(t, w.Attempts("w-0"), 2)

	w = world(t, trace.Config{ManualBootstrap: true}, oneNode)
	play(t, w, aTrigger)
	require.NoError(t, w.Tail())
	require.Len(t, w.Attempts("w-0"), 1)
}

// A report that was lost on the way is not reported again: the attempt ends at
// its limit, and without a limit the tail says who is stuck.
func TestLostReports(t *testing.T) {
	lose := trace.Step{Kind: trace.LoseReports, Slot: "w-0", N: 1}
	w := world(t, trace.Config{}, oneNode)
	play(t, w, lose)
	require.NoError(t, w.Tail())
	require.Len(t, w.Attempts("w-0"), 2)

	w = world(t, trace.Config{Retry: provisioning.RetryPolicy{BootstrapTimeout: -1}}, oneNode)
	play(t, w, lose)
	require.ErrorContains(t, w.Tail(), "waiting without a limit for the bootstrap to report a join")
}

func TestStayFindsACall(t *testing.T) {
	w := world(t, trace.Config{}, oneNode)
	play(t, w, aTrigger)
	w.Fake.At(w.Fake.Now().Add(time.Minute), func() {
		w.Driver.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: "w-0", Attempt: 1})
	})
	require.ErrorContains(t, w.Stay(time.Hour), "it to stay converged")
}

// The steps do what they say: what a trace prints is what happened.
func TestSteps(t *testing.T) {
	w := world(t, trace.Config{ManualDrive: true}, oneNode)
	script := trace.Step{Kind: trace.Script, Slot: "w-0", Operation: provisioning.CreateLease, Outcome: fakebackend.Hang(), N: 1}
	pass := trace.Step{Kind: trace.Pass}
	play(t, w, script, pass, pass, trace.Step{Kind: trace.Work, N: 1})
	require.Equal(t, 1, w.Fake.Hanging("w-0", provisioning.CreateLease))
	play(t, w, trace.Step{Kind: trace.Release, Slot: "w-0", Operation: provisioning.CreateLease, Outcome: fakebackend.OKNoEndpoint()}, pass)
	node, ok := w.Driver.Node("w-0")
	require.True(t, ok)
	require.Equal(t, provisioning.StageLeaseCreated, node.Record.Stage)
	play(t, w, trace.Step{Kind: trace.Back, D: time.Hour}, trace.Step{Kind: trace.Drive})
	require.Equal(t, time.Hour, w.Fake.Now().Sub(w.Now()))
	require.True(t, w.Driver.Converged(1))
	play(t, w, trace.Step{Kind: trace.Event, Slot: "w-0", Event: trace.EventWord{Kind: provisioning.NodeLost}}, trace.Step{Kind: trace.Drive})
	play(t, w, trace.Step{Kind: trace.Due}, trace.Step{Kind: trace.Drive})
	require.Equal(t, []provisioning.NodeAttemptID{1, 2}, w.Attempts("w-0"))
	past := len(w.Delivered("w-0"))
	play(t, w, trace.Step{Kind: trace.Redeliver, Slot: "w-0", N: 3})
	require.Len(t, w.Delivered("w-0"), past+3)
	play(t, w, trace.Step{Kind: trace.Wish}, trace.Step{Kind: trace.Drive}, trace.Step{Kind: trace.Rewish})
	for r := trace.OtherRun; r <= trace.SameGeneration; r++ {
		play(t, w, trace.Step{Kind: trace.Refused, Refusal: r})
	}
	require.Equal(t, uint64(2), w.Generation())
	require.Equal(t, 0, w.Driver.Snapshot().Len())
}

// A pause lets nothing begin and nothing climb; the tail ends it.
func TestAPauseHoldsBack(t *testing.T) {
	for _, fold := range []bool{false, true} {
		c := trace.Config{JoinAfter: 20 * time.Second, Retry: provisioning.RetryPolicy{BootstrapTimeout: time.Minute}}
		if fold {
			c.FoldOnly = nothingToFold
		}
		w := world(t, c, oneNode)
		slow := trace.Step{Kind: trace.Script, Slot: "w-0", Operation: provisioning.CreateLease, Outcome: fakebackend.Slow(5 * time.Second), N: 1}
		play(t, w, slow, trace.Step{Kind: trace.Pause}, trace.Step{Kind: trace.Through, D: time.Hour})
		node, _ := w.Driver.Node("w-0")
		require.Equal(t, provisioning.StageEndpointKnown, node.Record.Stage, "a result is taken, and no more is done")
		play(t, w, trace.Step{Kind: trace.Wish, Groups: []trace.Group{{ID: "w", Count: 3, Image: "a"}}})
		require.Equal(t, 1, w.Driver.Snapshot().Len())
		play(t, w, trace.Step{Kind: trace.Resume}, trace.Step{Kind: trace.Through, D: 20 * time.Second})
		require.True(t, w.Driver.Converged(2), "its time stood still")
		require.Len(t, w.Attempts("w-0"), 1)
		play(t, w, trace.Step{Kind: trace.Pause}, trace.Step{Kind: trace.Wish, Groups: []trace.Group{{ID: "w", Count: 1, Image: "b"}}})
		require.True(t, node.Attempt == w.Attempts("w-0")[0] && w.Driver.Snapshot().Len() == 1, "what is outdated stays, what is not wanted goes")
		require.NoError(t, w.Tail())
		require.Len(t, w.Attempts("w-0"), 2)
	}
}

func nothingToFold(*provisioning.ClusterDriver, time.Time) error { return nil }

// What an operator replaces has a fresh attempt; what is not there has none.
func TestAReplacementIsMade(t *testing.T) {
	w := world(t, trace.Config{}, oneNode)
	replace := trace.Step{Kind: trace.Replace, Slot: "w-0"}
	play(t, w, aTrigger, replace, trace.Step{Kind: trace.Settle})
	require.Equal(t, []provisioning.NodeAttemptID{1, 2}, w.Attempts("w-0"))
	require.Equal(t, []trace.Effects{{Bought: 1, GivenBack: 1, Bootstraps: 1}, {Bought: 1, Bootstraps: 1}}, w.Effects("w-0"))
	play(t, w, trace.Step{Kind: trace.Wish}, replace)
	require.NoError(t, w.Tail())
}

// Settle lets what hangs return, and does not wait for the trouble to stop.
func TestSettleGoesOnInTrouble(t *testing.T) {
	w := world(t, trace.Config{ManualBootstrap: true}, oneNode)
	script := func(kind provisioning.OperationKind, o fakebackend.Outcome) trace.Step {
		return trace.Step{Kind: trace.Script, Slot: "w-0", Operation: kind, Outcome: o, N: 2}
	}
	play(t, w, script(provisioning.CreateLease, fakebackend.Hang()), script(provisioning.StartBootstrap, fakebackend.Ambiguous()),
		trace.Step{Kind: trace.Pause}, trace.Step{Kind: trace.Settle})
	require.True(t, w.Driver.Converged(1))
	require.Equal(t, 3, w.Fake.Calls("w-0", provisioning.StartBootstrap))
}

// An attempt that gave its machine back and has another one has bought two.
func TestASecondPurchaseIsFound(t *testing.T) {
	w := world(t, trace.Config{}, oneNode)
	play(t, w, aTrigger)
	node, _ := w.Driver.Node("w-0")
	require.NoError(t, w.Fake.DestroyLease(context.Background(), provisioning.DestroyLeaseRequest{Key: key(1), Lease: node.Record.Lease}))
	_, err := w.Fake.CreateLease(context.Background(), provisioning.CreateLeaseRequest{Key: key(1)})
	require.NoError(t, err)
	require.ErrorContains(t, w.Step(aTrigger), "expected one machine for w-0#1, found 2 bought, 2 of them live or given back")
}

// Once the trouble has stopped a slot does not begin anew again and again.
func TestTailCountsAttempts(t *testing.T) {
	w := world(t, trace.Config{}, oneNode)
	play(t, w, aTrigger)
	require.NoError(t, w.Calm())
	lose := func() error {
		attempts := w.Attempts("w-0")
		w.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: "w-0", Attempt: attempts[len(attempts)-1]})
		return w.Settle()
	}
	for range 3 {
		require.NoError(t, lose())
	}
	require.ErrorContains(t, lose(), "at most 3 further attempts of w-0 once the trouble has stopped (G7), found 4")
}

// What is reported again and again is heard again and again.
func TestTailAgainRepeats(t *testing.T) {
	w := world(t, trace.Config{ManualBootstrap: true}, oneNode)
	play(t, w, aTrigger)
	require.NoError(t, w.Tail())
	once := w.Driver.Stats().NotApplied
	w = world(t, trace.Config{ManualBootstrap: true}, oneNode)
	play(t, w, aTrigger)
	require.NoError(t, w.TailAgain())
	require.Greater(t, w.Driver.Stats().NotApplied, once)
	require.Len(t, w.Attempts("w-0"), 1)
}

// A trace without its trouble has the same wishes at the same places.
func TestQuiet(t *testing.T) {
	settle, wish := trace.Step{Kind: trace.Settle}, trace.Step{Kind: trace.Wish, Groups: []trace.Group{oneNode}}
	tr := trace.Trace{First: []trace.Group{oneNode}, Steps: []trace.Step{aTrigger, settle, wish, {Kind: trace.Aim}, {Kind: trace.Back}}}
	require.Equal(t, trace.Trace{First: tr.First, Steps: []trace.Step{settle, wish}}, tr.Quiet())
	require.Equal(t, 8, tr.Events())
}

func TestATraceReadsLikeAScenario(t *testing.T) {
	tr := trace.Trace{First: []trace.Group{oneNode}, Steps: []trace.Step{
		{Kind: trace.Script, Slot: "w-0", Operation: provisioning.CreateLease, Outcome: fakebackend.Late(time.Minute), N: 2},
		{Kind: trace.Event, Slot: "w-0", Event: trace.EventWord{Kind: provisioning.BootstrapProgress, Stage: provisioning.BootstrapStageSSHReady}},
		{Kind: trace.Through, D: time.Second}, {Kind: trace.Wish},
	}}
	_, rest, _ := strings.Cut(tr.String(), "\n")
	require.Equal(t, "shape 1 w:1@a\nscript w-0 create late=1m0s*2\nevent w-0 stage=SSHReady\nadvance 1s\nshape +1\n", rest)
}

// A pass that breaks off leaves what it recorded: it is pending, was never
// called, and ends at its deadline. The next pass goes on.
func TestABrokenPassIsPickedUp(t *testing.T) {
	w := world(t, trace.Config{}, trace.Group{ID: "w", Count: 2, Image: "a"})
	play(t, w, trace.Step{Kind: trace.BreakPass, N: 1})
	require.Equal(t, 0, w.CallCount())
	for _, slot := range trace.Slots[:2] {
		node, _ := w.Driver.Node(slot)
		require.Equal(t, provisioning.CreateLease, node.Pending.Kind)
	}
	play(t, w, trace.Step{Kind: trace.Due})
	for _, slot := range trace.Slots[:2] {
		node, _ := w.Driver.Node(slot)
		require.Equal(t, provisioning.CreateLease, node.Retry.Ambiguous)
	}
	require.NoError(t, w.Tail())
	require.Equal(t, 1, w.Fake.Created("w-0"))
}

// A hook that panics is counted, and that is all.
func TestAPanickingHookChangesNothing(t *testing.T) {
	calm, broken := world(t, trace.Config{}, oneNode), world(t, trace.Config{PanickingHook: true}, oneNode)
	play(t, calm, aTrigger)
	play(t, broken, aTrigger)
	require.Equal(t, calm.Log(), broken.Log())
	require.NotZero(t, broken.Driver.Stats().HookPanics)
}
