package provisioning

import (
	"bytes"
	"context"
	"math"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func ctExplain(t *testing.T, d *ClusterDriver, id LogicalNodeID, now time.Time) string {
	t.Helper()
	e, ok := d.Explain(id, now)
	require.True(t, ok)
	return e.String()
}

// A pause of any length ends no attempt: while its next operation is held back
// the deadline of its stage stands still, and nothing wakes the driver.
func TestPauseStopsTheStageDeadline(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(LookupEndpoint)
	s.d.Pause()
	s.d.Pause()
	lookup := dtLast(t, s.x, LookupEndpoint)
	s.drive()
	require.Equal(t, lookup.Operation, dtNode(t, s.d, "w-0").Pending.ID, "what is in flight goes on")
	s.now = s.now.Add(time.Minute)
	s.d.Deliver(dtCompleted(lookup, dtSuccess(lookup)))
	s.drive()
	m := dtNode(t, s.d, "w-0")
	require.Equal(t, StageEndpointKnown, m.Record.Stage, "and is folded")
	require.Nil(t, m.Pending)
	require.Len(t, s.x.submitted, 2)
	_, some := s.d.RequeueAt()
	require.False(t, some)
	require.Equal(t, "w-0: paused before StartBootstrap [R16 start-bootstrap]", ctExplain(t, s.d, "w-0", s.now))

	s.now = s.now.Add(48 * time.Hour)
	require.False(t, s.d.TriggerIfDue(s.now))
	s.d.Trigger()
	require.Equal(t, 1, dtDrive(t, s.d, s.now, s.x), "no spin")
	e, _ := s.d.Explain("w-0", s.now)
	require.True(t, e.Paused)
	require.Equal(t, s.d.Clock(s.now).Add(DefaultBootstrapTimeout), e.EndsAt)
	s.d.Resume()
	require.Equal(t, "w-0: will dispatch StartBootstrap [R16 start-bootstrap]", ctExplain(t, s.d, "w-0", s.now))
	s.drive()
	dtLast(t, s.x, StartBootstrap)
	require.Equal(t, s.d.Clock(s.now).Add(DefaultBootstrapTimeout), dtNode(t, s.d, "w-0").Retry.StageDeadline)
}

// Not even when something is heard of a node that is held back and whose time
// would be up.
func TestPauseStopsTheStageDeadlineOfWhoSpeaks(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(StartBootstrap)
	s.end(StartBootstrap, ClassNone)
	s.d.Pause()
	s.say(Observation{Kind: SwactorJoined, Swactor: "agent"})
	require.Equal(t, "w-0: paused before BootstrapConvergenceObserved [R14 observe-convergence]", ctExplain(t, s.d, "w-0", s.now))
	s.now = s.now.Add(48 * time.Hour)
	s.say(Observation{Kind: BootstrapProgress, Stage: BootstrapStageSSHReady, StdoutSequence: 7})
	m := dtNode(t, s.d, "w-0")
	require.Equal(t, uint64(7), m.Record.Bootstrap.LastStdoutSequence)
	require.Equal(t, StageSwactorJoined, m.Record.Stage)
	s.d.Resume()
	s.drive()
	s.end(BootstrapConvergenceObserved, ClassNone)
	require.True(t, dtNode(t, s.d, "w-0").Record.Ready)
}

// A bootstrap that runs is not held back, so its deadline is not either.
func TestPauseLeavesARunningBootstrapItsDeadline(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(StartBootstrap)
	s.d.Pause()
	s.end(StartBootstrap, ClassNone)
	at, some := s.d.RequeueAt()
	require.True(t, some)
	require.True(t, at.Equal(s.now.Add(DefaultBootstrapTimeout)))
	s.now = at
	s.drive()
	dtLast(t, s.x, CancelBootstrap)
	s.end(CancelBootstrap, ClassNone)
	s.end(DestroyLease, ClassNone) // the cleanup goes on
	at, _ = s.d.RequeueAt()
	s.now = at
	s.drive()
	require.Equal(t, "w-0: paused before a fresh attempt [R2 restart]", ctExplain(t, s.d, "w-0", s.now))
	dtLast(t, s.x, DestroyLease)
	s.d.Resume()
	s.drive()
	dtLast(t, s.x, CreateLease)
}

// What is ready keeps working while its replacement could not come; what is
// unwanted goes, and what is new waits.
func TestPauseDuringAnUpdate(t *testing.T) {
	d := dtDriver(t, Config{MaxInFlight: 2}, dtGroup("w", 3, "v1"))
	x := &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	dtKinds(x)
	d.Pause()
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("a", 1, "v1"), dtGroup("w", 2, "v2"))))
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []string{"w-2 DestroyLease"}, dtKinds(x))
	require.True(t, dtNode(t, d, "w-0").Record.Ready)
	require.False(t, d.Converged(2))
	require.Equal(t, "a-0: paused before its first attempt [R0 insert]", ctExplain(t, d, "a-0", dtStart))
	require.Equal(t, "w-0: paused before it is replaced: it is ready and outdated [R4 begin-delete]", ctExplain(t, d, "w-0", dtStart))

	require.NoError(t, d.UpdateDesired(dtShape(3, dtGroup("w", 2, "v2"))))
	_, err := d.Replace("w-1", "now")
	require.NoError(t, err)
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []string{"w-1 DestroyLease"}, dtKinds(x), "who says so means it")
	d.Resume()
	dtDrive(t, d, dtStart.Add(time.Second), x)
	require.True(t, d.Converged(3))
	require.Equal(t, 2, d.Snapshot().Len(), "nobody wants a-0 any more")
	require.Equal(t, "v2", dtNode(t, d, "w-1").Record.Spec.Shape.Image)
}

// A ready node whose replacement is held back may still have the convergence
// call in flight that its hand-off has overtaken. That ends in time.
func TestPauseEndsAnOvertakenCall(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(BootstrapConvergenceObserved)
	call := dtLast(t, s.x, BootstrapConvergenceObserved)
	s.say(Observation{Kind: BootstrapClosed})
	require.True(t, dtNode(t, s.d, "w-0").Record.Ready)
	s.d.Pause()
	s.update(dtGroup("w", 1, "v2"))
	s.drive() // the replacement is held back
	at, some := s.d.RequeueAt()
	require.True(t, some)
	require.True(t, at.Equal(s.now.Add(DefaultOperationTimeout)))
	s.now = at
	s.drive()
	require.Equal(t, []OperationID{call.Operation}, s.x.expired)
	m := dtNode(t, s.d, "w-0")
	require.Nil(t, m.Pending)
	require.True(t, m.Record.Ready)
	_, some = s.d.RequeueAt()
	require.False(t, some)
}

func TestPauseIsTold(t *testing.T) {
	var told []string
	d := dtDriver(t, Config{OnEvent: func(e Event) { told = append(told, e.String()) }})
	d.Resume()
	d.Pause()
	d.Pause()
	require.True(t, d.Paused())
	d.Resume()
	require.False(t, d.Paused())
	require.Equal(t, []string{"Paused", "Resumed"}, told)
}

func TestHostPause(t *testing.T) {
	htBubble(t, func(t *testing.T, _ time.Time) {
		b := newHtBackend()
		h := htHost(t, b, 1)
		run := htGo(h.Run)
		ctx := context.Background()
		require.NoError(t, h.WaitConverged(ctx, 1))
		h.Pause()
		require.NoError(t, h.UpdateDesired(htShape(2, 2)))
		wait := htGo(func(ctx context.Context) error { return h.WaitReady(ctx, "w-1") })
		require.False(t, wait.ended())
		require.True(t, h.Status().Paused)
		live, _ := b.counts()
		require.Equal(t, 1, live)
		h.Resume()
		synctest.Wait() // the loop was woken, no timer was needed
		require.NoError(t, <-wait.result)
		require.False(t, h.Status().Paused)

		h.Pause()
		require.NoError(t, h.Drain(ctx), "a pause holds nothing back that is to go")
		live, _ = b.counts()
		require.Zero(t, live)
		require.NoError(t, run.stop())
	})
}

// A fault is not growth: an attempt that has run out of operation numbers could
// not go on after the pause either, so it ends and is cleaned up.
func TestPauseHoldsNoFaultBack(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(LookupEndpoint)
	s.d.Pause()
	s.d.state.find("w-0").nextSequence = math.MaxUint64 - cleanupSequences
	s.end(LookupEndpoint, ClassNone)
	dtLast(t, s.x, DestroyLease)
	require.NotEmpty(t, dtNode(t, s.d, "w-0").Record.FailedReason)
}

// A journal keeps when growth was to stop: any life with pauses and replacements
// is repeated to the byte.
func TestProp_AJournalWithPausesIsRepeated(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := dtNewTwins(t)
		w.wander()
		require.NoError(t, w.real.JournalErr())
		report, err := Replay(bytes.NewReader(w.journal.Bytes()))
		require.NoError(t, err)
		require.Nil(t, report.Difference)
		require.Equal(t, dtJSON(t, w.real.Snapshot()), dtJSON(t, report.Driver.Snapshot()))
	})
}

// A pause does not end a wait, it follows it: both are told beforehand, unless
// what follows is no growth or the attempt ends first.
func TestPauseAfterAWait(t *testing.T) {
	for _, c := range []struct {
		why    string
		config Config
		tell   func(*dtStory)
		paused bool
		want   string
	}{
		{"before a fresh attempt", Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassLeaseLost) }, true,
			"w-0: waiting 1s more to restart after 1 failure: CreateLease: boom; then paused before a fresh attempt [R3 await-restart]"},
		{"before the next try", Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassDefinite) }, true,
			"w-0: waiting 1s more after 1 failure in a row, the last: CreateLease: boom; then paused before CreateLease [R10 await-backoff]"},
		{"an attempt that ends before", Config{Retry: RetryPolicy{BootstrapTimeout: time.Second}},
			func(s *dtStory) { s.climb(StartBootstrap); s.end(StartBootstrap, ClassNotStarted) }, false,
			"w-0: waiting 1s more after 1 failure in a row, the last: StartBootstrap: boom [R10 await-backoff]"},
		{"cleaning up", Config{}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			s.end(LookupEndpoint, ClassLeaseLost)
			s.end(DestroyLease, ClassDefinite)
		}, false, "w-0: waiting 1s more after 1 failure in a row, the last: DestroyLease: boom [R10 await-backoff]"},
	} {
		s := dtTell(t, c.config, dtGroup("w", 1, "v1"))
		c.tell(s)
		s.d.Pause()
		s.drive()
		e, ok := s.d.Explain("w-0", s.now)
		require.True(t, ok)
		require.Equal(t, c.want, e.String(), c.why)
		require.Equal(t, c.paused, e.Paused, c.why)

		s.now, _ = s.d.RequeueAt()
		s.x.submitted = nil
		s.drive()
		e, _ = s.d.Explain("w-0", s.now)
		require.Equal(t, c.paused, e.Paused && len(s.x.submitted) == 0 && e.Unblock() == "Resume", "%s: and so it is: %v", c.why, e)
	}
}

// What an update would take down, a pause may keep.
func TestPlanUpdateWhilePaused(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("a", 1, "v1"), dtGroup("w", 2, "v1"))
	x := &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	d.Pause()
	plan := ctPlanUpdate(t, d, dtShape(2, dtGroup("w", 2, "v2")))
	require.True(t, plan.Paused)
	require.Equal(t, "generation 2: 0 to insert, 2 to replace, 1 to delete; takes down 1 that are ready, all at once; "+
		"paused: until Resume no attempt begins, and 2 that are ready and outdated stay; differs: shape.image", plan.String())
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 2, "v2"))))
	dtDrive(t, d, dtStart, x)
	require.Equal(t, "w-0: paused before it is replaced: it is ready and outdated [R4 begin-delete]", ctExplain(t, d, "w-0", dtStart))
	_, there := d.Explain("a-0", dtStart)
	require.False(t, there)

	require.Equal(t, "generation 3: 1 to insert, 0 to replace, 0 to delete; paused: until Resume no attempt begins",
		ctPlanUpdate(t, d, dtShape(3, dtGroup("v", 1, "v1"), dtGroup("w", 2, "v2"))).String())
	require.Equal(t, "generation 3: 0 to insert, 0 to replace, 2 to delete; takes down 2 that are ready, all at once",
		ctPlanUpdate(t, d, dtShape(3)).String(), "a pause keeps nothing that is unwanted")
}

// Where attempts run out, the slots that get none are told so, as the plan does,
// paused or not.
func TestExplainWhereAttemptsRunOut(t *testing.T) {
	for _, paused := range []bool{false, true} {
		d := dtDriver(t, Config{FirstAttempt: math.MaxUint64 - 2}, dtGroup("w", 4, "v1"))
		if paused {
			d.Pause()
			dtDrive(t, d, dtStart, &dtExecutor{})
		}
		var faults []LogicalNodeID
		for _, f := range d.Plan(dtStart).Faults {
			faults = append(faults, f.Node)
		}
		require.Equal(t, []LogicalNodeID{"w-2", "w-3"}, faults)
		for _, id := range []LogicalNodeID{"w-0", "w-1", "w-2", "w-3"} {
			e, ok := d.Explain(id, dtStart)
			require.True(t, ok)
			if slices.Contains(faults, id) {
				require.Equal(t, string(id)+": cannot go on: provisioning: attempt numbers are exhausted [R0 insert]", e.String())
				require.Equal(t, "another driver, whose FirstAttempt leaves room", e.Unblock())
				require.False(t, e.Paused)
			} else {
				require.NoError(t, e.Decision.Err)
				require.Equal(t, paused, e.Paused)
			}
		}
	}
}
