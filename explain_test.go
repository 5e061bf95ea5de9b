package provisioning

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// dtStory is a driver, its executor, and a way to tell them apart from the next.
type dtStory struct {
	t   *testing.T
	d   *ClusterDriver
	x   *dtExecutor
	now time.Time
}

func dtTell(t *testing.T, config Config, groups ...NodeGroupSpec) *dtStory {
	return &dtStory{t: t, d: dtDriver(t, config, groups...), x: &dtExecutor{}, now: dtStart}
}

// pass runs one pass.
func (s *dtStory) pass() {
	ran, err := s.d.DriveNext(s.now, s.x)
	require.NoError(s.t, err)
	require.True(s.t, ran)
}

func (s *dtStory) drive() { dtDrive(s.t, s.d, s.now, s.x) }

// end ends the operation that was submitted last, which is of that kind, and
// drives.
func (s *dtStory) end(kind OperationKind, class FailureClass) {
	e := dtLast(s.t, s.x, kind)
	c := dtSuccess(e)
	if class != ClassNone {
		c = dtFailed(e, class)
	}
	s.d.Deliver(dtCompleted(e, c))
	s.drive()
}

// climb brings the one node up to where kind is in flight.
func (s *dtStory) climb(kind OperationKind) {
	s.drive()
	for _, step := range []OperationKind{CreateLease, LookupEndpoint, StartBootstrap} {
		if step == kind {
			return
		}
		s.end(step, ClassNone)
	}
	if kind == BootstrapConvergenceObserved {
		s.say(Observation{Kind: SwactorJoined, Swactor: "agent"})
	}
}

// say delivers what the bootstrap of the live attempt says, and drives.
func (s *dtStory) say(o Observation) {
	m := dtNode(s.t, s.d, "w-0")
	o.Node, o.Attempt, o.Session = "w-0", m.Attempt, dtSession(m.Attempt)
	s.d.Deliver(o)
	s.drive()
}

func (s *dtStory) update(groups ...NodeGroupSpec) {
	require.NoError(s.t, s.d.UpdateDesired(dtShape(s.d.Generation()+1, groups...)))
}

// TestExplainSaysTheTruth of every rule of the ladder.
func TestExplainSaysTheTruth(t *testing.T) {
	w := dtGroup("w", 1, "v1")
	wish := func(s *dtStory) { s.update() }
	told := map[int]bool{}
	for _, c := range []struct {
		why    string
		config Config
		tell   func(*dtStory)
		want   string
	}{
		{"a slot before its first pass", Config{}, func(s *dtStory) {},
			"w-0: desired and not begun [R0 insert]"},
		{"and where there is no attempt left", Config{FirstAttempt: math.MaxUint64}, func(s *dtStory) { s.drive() },
			"w-0: cannot go on: provisioning: attempt numbers are exhausted [R0 insert]"},
		{"unwanted and gone", Config{}, func(s *dtStory) { s.pass(); s.update(); s.pass(); s.pass() },
			"w-0: destroyed and unwanted: will be forgotten [R1 reap]"},
		{"replaced for drift", Config{}, func(s *dtStory) { s.pass(); s.update(dtGroup("w", 1, "v2")); s.pass(); s.pass() },
			"w-0: destroyed: a fresh attempt begins with the next pass [R2 restart]"},
		{"replaced, with no attempt left", Config{FirstAttempt: math.MaxUint64 - 1},
			func(s *dtStory) { s.pass(); s.update(dtGroup("w", 1, "v2")); s.drive() },
			"w-0: cannot go on: provisioning: attempt numbers are exhausted [R2 restart]"},
		{"failed and cleaned up", Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassLeaseLost) },
			"w-0: waiting 1s more to restart after 1 failure: CreateLease: boom [R3 await-restart]"},
		{"failed, and the cleanup had trouble of its own", Config{Retry: RetryPolicy{InitialDelay: 10 * time.Second}}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			s.end(LookupEndpoint, ClassLeaseLost)
			e := dtLast(s.t, s.x, DestroyLease)
			s.d.Deliver(dtCompleted(e, Completion{Operation: e.Operation, Kind: e.Kind, Class: ClassDefinite, Message: "locked"}))
			s.drive()
			s.now = s.now.Add(5 * time.Second)
			require.NoError(s.t, s.d.UpdateDesired(dtShape(1, w)))
			s.d.state.find("w-0").nextEffectAt = 0 // rather than to fold a second story
			s.d.heat(s.d.state.find("w-0"))
			s.drive()
			s.end(DestroyLease, ClassNone)
		}, "w-0: waiting 5s more to restart after 1 failure: LookupEndpoint: boom; for 5s now [R3 await-restart]"},
		{"unwanted", Config{}, func(s *dtStory) { s.climb(CreateLease); s.update() },
			"w-0: unwanted or outdated: will be deleted [R4 begin-delete]"},
		{"failed", Config{}, func(s *dtStory) {
			s.climb(CreateLease)
			s.d.Deliver(dtCompleted(s.x.submitted[0], dtFailed(s.x.submitted[0], ClassLeaseLost)))
			require.NoError(s.t, s.d.foldOnly(s.now))
		}, "w-0: the attempt failed and will be cleaned up: CreateLease: boom [R4 begin-delete]"},
		{"an operation in flight", Config{}, func(s *dtStory) { s.climb(CreateLease); s.now = s.now.Add(time.Minute) },
			"w-0: waiting 1m0s more at most for CreateLease 1/1; for 1m0s now [R5 await-operation]"},
		{"an operation that is out of time", Config{}, func(s *dtStory) { s.climb(CreateLease); s.now = s.now.Add(time.Hour) },
			"w-0: CreateLease 1/1 is out of time: the next pass ends it [R5 await-operation]"},
		{"an operation that would outlive its attempt", Config{Retry: RetryPolicy{EndpointTimeout: time.Minute}},
			func(s *dtStory) { s.climb(LookupEndpoint) },
			"w-0: waiting 2m0s more at most for LookupEndpoint 1/2; in 1m0s the attempt is out of time [R5 await-operation]"},
		{"an attempt that is out of time", Config{Retry: RetryPolicy{EndpointTimeout: time.Minute}},
			func(s *dtStory) { s.climb(LookupEndpoint); s.now = s.now.Add(time.Minute) },
			"w-0: the attempt is out of time: the next pass ends it [R5 await-operation]"},
		{"deleting, with a create that nobody knows about", Config{}, func(s *dtStory) {
			s.climb(CreateLease)
			s.end(CreateLease, ClassAmbiguous)
			s.update()
			s.pass()
		}, "w-0: being deleted: will ask what came of CreateLease [R6 resolve-ambiguous]"},
		{"the same, asked", Config{}, func(s *dtStory) {
			s.climb(CreateLease)
			s.end(CreateLease, ClassAmbiguous)
			wish(s)
			s.drive()
		}, "w-0: waiting 2m0s more at most for CreateLease 1/2; what came of an earlier CreateLease is not known yet [R5 await-operation]"},
		{"deleting, in a session", Config{}, func(s *dtStory) { s.climb(CancelBootstrap); s.update(); s.pass() },
			"w-0: will dispatch CancelBootstrap [R7 cancel-bootstrap]"},
		{"deleting, with a machine", Config{}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			s.end(LookupEndpoint, ClassNotStarted)
			s.update()
			s.pass()
		}, "w-0: will dispatch DestroyLease [R8 destroy-lease]"},
		{"deleting, with nothing left", Config{}, func(s *dtStory) { s.pass(); s.update(); s.pass() },
			"w-0: nothing is left to clean up [R9 mark-destroyed]"},
		{"backing off", Config{}, func(s *dtStory) {
			s.climb(CreateLease)
			s.end(CreateLease, ClassDefinite)
			s.now, _ = s.d.RequeueAt()
			s.drive()
			s.end(CreateLease, ClassDefinite)
		}, "w-0: waiting 2s more after 2 failures in a row, the last: CreateLease: boom [R10 await-backoff]"},
		{"backing off in the cleanup", Config{}, func(s *dtStory) {
			s.climb(CancelBootstrap)
			s.update()
			s.drive()
			s.end(CancelBootstrap, ClassDefinite)
		}, "w-0: waiting 1s more after 1 failure in a row, the last: CancelBootstrap: boom [R10 await-backoff]"},
		{"backing off for longer than the attempt has", Config{Retry: RetryPolicy{BootstrapTimeout: time.Second / 2}},
			func(s *dtStory) { s.climb(StartBootstrap); s.end(StartBootstrap, ClassAmbiguous) },
			"w-0: waiting 1s more after 1 failure in a row, the last: StartBootstrap: boom; in 500ms the attempt is out of time; what came of an earlier StartBootstrap is not known yet [R10 await-backoff]"},
		{"no endpoint yet", Config{}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			e := dtLast(s.t, s.x, LookupEndpoint)
			s.d.Deliver(dtCompleted(e, Completion{Operation: e.Operation, Kind: e.Kind}))
			s.drive()
		}, "w-0: waiting 2s more to look for the endpoint again [R10 await-backoff]"},
		{"no endpoint yet, after failures that have nothing to do with it", Config{}, func(s *dtStory) {
			s.climb(CreateLease)
			s.end(CreateLease, ClassDefinite)
			s.now, _ = s.d.RequeueAt()
			s.drive()
			s.end(CreateLease, ClassNone)
			e := dtLast(s.t, s.x, LookupEndpoint)
			s.d.Deliver(dtCompleted(e, Completion{Operation: e.Operation, Kind: e.Kind}))
			s.drive()
		}, "w-0: waiting 2s more to look for the endpoint again; 1 failure so far, the last: CreateLease: boom [R10 await-backoff]"},
		{"no endpoint yet, after an attempt that failed", Config{}, func(s *dtStory) {
			s.climb(CreateLease)
			s.end(CreateLease, ClassLeaseLost)
			s.now, _ = s.d.RequeueAt()
			s.drive()
			s.end(CreateLease, ClassNone)
			e := dtLast(s.t, s.x, LookupEndpoint)
			s.d.Deliver(dtCompleted(e, Completion{Operation: e.Operation, Kind: e.Kind}))
			s.drive()
		}, "w-0: waiting 2s more to look for the endpoint again; 1 failure so far [R10 await-backoff]"},
		{"ready", Config{}, func(s *dtStory) {
			s.climb(BootstrapConvergenceObserved)
			s.end(BootstrapConvergenceObserved, ClassNone)
		},
			"w-0: ready [R11 steady]"},
		{"no machine", Config{}, func(s *dtStory) { s.pass() },
			"w-0: will dispatch CreateLease [R12 create-lease]"},
		{"no machine and no place", Config{MaxInFlight: 1}, func(s *dtStory) {
			s.update(dtGroup("v", 1, "v1"), w)
			s.drive()
		}, "w-0: wants to dispatch CreateLease and waits for a place: MaxInFlight is reached [R12 create-lease]"},
		{"no operation number", Config{}, func(s *dtStory) {
			s.pass()
			s.d.state.find("w-0").nextSequence = math.MaxUint64
		}, "w-0: cannot go on: provisioning: operation numbers of the attempt are exhausted [R12 create-lease]"},
		{"a machine, no endpoint", Config{}, func(s *dtStory) { s.climb(LookupEndpoint); s.back(LookupEndpoint) },
			"w-0: will dispatch LookupEndpoint [R13 lookup-endpoint]"},
		{"joined", Config{}, func(s *dtStory) { s.climb(BootstrapConvergenceObserved); s.back(BootstrapConvergenceObserved) },
			"w-0: will dispatch BootstrapConvergenceObserved [R14 observe-convergence]"},
		{"a bootstrap that runs", Config{}, func(s *dtStory) { s.climb(CancelBootstrap); s.now = s.now.Add(29 * time.Minute) },
			"w-0: waiting 1m0s more at most for the bootstrap to report a join; for 29m0s now [R15 await-bootstrap]"},
		{"a bootstrap that runs for ever", Config{Retry: RetryPolicy{BootstrapTimeout: -1}}, func(s *dtStory) { s.climb(CancelBootstrap) },
			"w-0: waiting without a limit for the bootstrap to report a join [R15 await-bootstrap]"},
		{"a bootstrap that is out of time", Config{}, func(s *dtStory) { s.climb(CancelBootstrap); s.now = s.now.Add(time.Hour) },
			"w-0: the attempt is out of time: the next pass ends it [R15 await-bootstrap]"},
		{"a machine that answers", Config{}, func(s *dtStory) { s.climb(StartBootstrap); s.back(StartBootstrap) },
			"w-0: will dispatch StartBootstrap [R16 start-bootstrap]"},
		{"what should not be", Config{}, func(s *dtStory) {
			s.climb(StartBootstrap)
			s.back(StartBootstrap)
			s.d.state.find("w-0").stage = StageLeaseCreated
		}, "w-0: cannot go on: provisioning: no rule matches [R17 unmatched]"},
	} {
		s := dtTell(t, c.config, w)
		c.tell(s)
		state := dtJSON(t, s.d.Snapshot())
		e, ok := s.d.Explain("w-0", s.now)
		require.True(t, ok, c.why)
		require.Equal(t, c.want, e.String(), c.why)
		require.Equal(t, state, dtJSON(t, s.d.Snapshot()), "explaining changes nothing")
		told[e.Decision.Rule.Number] = true
	}
	for _, r := range Ladder() {
		require.True(t, told[r.Number], "%s is not explained", r)
	}
}

// back takes the operation in flight, which is of that kind, off the record.
func (s *dtStory) back(kind OperationKind) {
	n := s.d.state.find("w-0")
	require.Equal(s.t, kind, n.pending)
	n.pending, n.pendingSequence, n.pendingDeadline = NoOperation, 0, 0
}

// TestExplainFields for machines.
func TestExplainFields(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	_, ok := s.d.Explain("w-1", s.now)
	require.False(t, ok)
	e, ok := s.d.Explain("w-0", s.now)
	require.True(t, ok)
	require.Equal(t, Explanation{Node: "w-0", Now: s.now, Decision: NodeDecision{Rule: Ladder()[0], Action: Insert}}, e)

	s.climb(LookupEndpoint)
	since := s.now
	s.now = s.now.Add(time.Second)
	e, _ = s.d.Explain("w-0", s.now)
	require.Equal(t, Explanation{Node: "w-0", Attempt: 1, Stage: StageLeaseCreated, Now: s.now, Since: since,
		Decision: NodeDecision{Rule: Ladder()[5], Until: since.Add(DefaultOperationTimeout)}, EndsAt: since.Add(DefaultEndpointTimeout),
		Pending: LookupEndpoint, PendingID: OperationID{1, 2}}, e)

	s.end(LookupEndpoint, ClassNone)
	s.end(StartBootstrap, ClassAmbiguous)
	e, _ = s.d.Explain("w-0", s.now)
	require.Equal(t, StartBootstrap, e.Unresolved)
	require.EqualValues(t, 1, e.Failures)
	require.Equal(t, s.now.Add(time.Second), e.Decision.Until)
	require.Equal(t, "StartBootstrap: boom", e.LastError)
	require.Equal(t, s.now, e.Since)

	// In the driver's clock, whatever the host's says.
	e, _ = s.d.Explain("w-0", s.now.Add(-time.Hour))
	require.Equal(t, s.now, e.Now)
	require.Equal(t, s.now.Add(time.Second), e.Decision.Until)
}

// TestExplainTakesNoNameApart: a slot is found by what its group would call it.
func TestExplainTakesNoNameApart(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 2, "v1"), dtGroup("w-1", 2, "v1"), dtGroup("w-", 1, "v1"))
	for id, want := range map[LogicalNodeID]bool{
		"w-0": true, "w-1": true, "w-1-0": true, "w-1-1": true, "w--0": true,
		"w-2": false, "w-01": false, "w-+1": false, "w--1": false, "w- 1": false, "w-1-2": false, "w-1-": false, "w": false, "": false,
		"x-0": false, "w-99999999999999999999": false,
	} {
		_, ok := d.Explain(id, dtStart)
		require.Equal(t, want, ok, "%q", id)
	}
}

// TestHungCallIsNamed: a call that outlives its deadline is told its time is up,
// named by Explain and counted until it returns.
func TestHungCallIsNamed(t *testing.T) {
	entered, release, returned := make(chan dtCall, 1), make(chan struct{}), make(chan struct{}, 2)
	b := &dtBackend{answer: func(c dtCall) error {
		if c.operation.Sequence == 1 {
			entered <- c
			<-release
		}
		return nil
	}}
	d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
	x, err := NewExecutor(b, ExecutorConfig{Deliver: d.Deliver, Go: func(f func()) {
		go func() {
			f()
			returned <- struct{}{}
		}()
	}})
	require.NoError(t, err)
	dtDrive(t, d, dtStart, x)
	call := <-entered
	require.NoError(t, call.ctx.Err())
	e, _ := d.Explain("w-0", dtStart)
	require.Nil(t, e.StillRunning, "it is in time")

	now := dtStart.Add(DefaultOperationTimeout)
	dtDrive(t, d, now, x)
	<-call.ctx.Done()
	dtDrive(t, d, now.Add(time.Second), x) // tries again, behind it
	e, _ = d.Explain("w-0", now.Add(time.Second))
	require.Equal(t, &RunningCall{Operation: OperationID{1, 1}, Kind: CreateLease, Node: "w-0", Since: dtStart, Expired: true}, e.StillRunning)
	require.Equal(t, "w-0: waiting 2m0s more at most for CreateLease 1/2; what came of an earlier CreateLease is not known yet; "+
		"CreateLease 1/1 outlived its deadline and is still running after 2m1s, since 2030-01-02T03:04:05Z [R5 await-operation]", e.String())
	require.Equal(t, 1, x.Stats().RunningExpired)

	close(release)
	<-returned // with it the one that was queued
	dtDrive(t, d, now.Add(time.Second), x)
	e, _ = d.Explain("w-0", now.Add(time.Second))
	require.Nil(t, e.StillRunning)
	require.Zero(t, x.Stats().RunningExpired)
	require.Equal(t, ProviderLeaseID("l-1"), dtNode(t, d, "w-0").Record.Lease)
	require.NoError(t, x.Close(t.Context()))
}

// TestHungCallOfAnother slot, or one that is in time, is nothing to a slot.
func TestHungCallOfAnother(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 3, "v1"))
	s.drive()
	hung := RunningCall{Operation: OperationID{2, 1}, Kind: CreateLease, Node: "w-1", Since: dtStart, Expired: true}
	s.x.running = []RunningCall{hung, {Operation: OperationID{3, 1}, Kind: CreateLease, Node: "w-2", Since: dtStart}}
	for id, want := range map[LogicalNodeID]*RunningCall{"w-0": nil, "w-1": &hung, "w-2": nil} {
		e, ok := s.d.Explain(id, s.now)
		require.True(t, ok)
		require.Equal(t, want, e.StillRunning, id)
	}
}

// TestGivenUpCancelIsVisible from when it is given up until the slot is gone.
func TestGivenUpCancelIsVisible(t *testing.T) {
	for _, kind := range []OperationKind{CancelBootstrap, StartBootstrap} {
		var events []string
		s := dtTell(t, Config{Retry: RetryPolicy{CancelLimit: 2}, OnEvent: func(e Event) {
			if e.Kind == EventGivenUp {
				events = append(events, e.String())
			}
		}}, dtGroup("w", 1, "v1"))
		s.climb(StartBootstrap)
		if kind == CancelBootstrap {
			s.end(StartBootstrap, ClassNone)
		} else {
			s.end(StartBootstrap, ClassAmbiguous)
		}
		s.update()
		s.drive()
		s.end(kind, ClassAmbiguous)
		e, _ := s.d.Explain("w-0", s.now)
		require.Equal(t, NoOperation, e.GivenUp)
		s.now, _ = s.d.RequeueAt()
		s.drive()
		require.Empty(t, events)
		s.end(kind, ClassAmbiguous)

		destroy := dtLast(t, s.x, DestroyLease)
		require.Equal(t, []string{fmt.Sprintf("GivenUp w-0#1 %s: it failed as often as CancelLimit allows; the machine is destroyed without it", kind)}, events)
		visible := func() {
			e, ok := s.d.Explain("w-0", s.now)
			require.True(t, ok)
			require.Equal(t, kind, e.GivenUp)
			require.Contains(t, e.String(), fmt.Sprintf("; %s was given up after failing too often", kind))
		}
		visible()
		s.d.Deliver(dtCompleted(destroy, dtSuccess(destroy)))
		s.pass()
		visible()
		s.drive()
		_, ok := s.d.Explain("w-0", s.now)
		require.False(t, ok)
		require.Len(t, events, 1)
	}
}

// TestExplainDuringAPass is safe, and asks the executor with no lock held.
func TestExplainDuringAPass(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
	x := &dtExecutor{}
	asked := 0
	x.submit = func(Effect) (bool, error) {
		e, ok := d.Explain("w-0", dtStart)
		require.True(t, ok)
		require.Equal(t, CreateLease, e.Pending, "on record before anybody hears of it")
		asked++
		return false, errors.New("refused")
	}
	dtDrive(t, d, dtStart, x)
	require.Equal(t, 1, asked)
}

// TestProp_ExplainUntil: up to a nanosecond before the moment that Explain gives
// nothing happens by itself, and at that moment something does.
func TestProp_ExplainUntil(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := dtNewTwins(t)
		w.wander()
		tick := w.real.Clock(w.now)
		for m := range w.real.Snapshot().All() {
			id := m.Record.Node
			e, ok := w.real.Explain(id, w.now)
			require.True(t, ok)
			if e.Decision.Action != NoAction || e.Decision.Rule.Number == ruleSteady {
				continue
			}
			moment := e.Decision.Until
			if moment.IsZero() || !e.EndsAt.IsZero() && e.EndsAt.Before(moment) {
				moment = e.EndsAt
			}
			if moment.IsZero() {
				require.Equal(t, ruleAwaitBootstrap, e.Decision.Rule.Number, "%v waits for nothing", e)
				continue
			}
			require.True(t, moment.After(tick), "%v", e)
			require.NotContains(t, e.String(), "out of time:")
			fork, err := newDriverFrom(w.real.Snapshot(), w.shape, Config{Retry: w.config.Retry, GroupRetry: w.config.GroupRetry})
			require.NoError(t, err)
			x := &dtExecutor{}
			dtDrive(t, fork, moment.Add(-1), x)
			require.Equal(t, m, dtNode(t, fork, id), "%v", e)
			later, _ := fork.Explain(id, moment)
			if !e.EndsAt.IsZero() && !e.EndsAt.After(moment) || e.Pending != NoOperation {
				require.Contains(t, later.String(), "is out of time: the next pass ends it")
			}
			dtDrive(t, fork, moment, x)
			if later, _ = fork.Explain(id, moment); !errors.Is(later.Decision.Err, ErrAttemptsExhausted) {
				require.NotEqual(t, m, dtNode(t, fork, id), "%v", e)
			}
		}
	})
}
