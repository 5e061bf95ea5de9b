package provisioning

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestExplainCluster: one sentence, in which each rule speaks through its first
// slot.
func TestExplainCluster(t *testing.T) {
	d := dtDriver(t, Config{MaxInFlight: 2}, dtGroup("v", 1, "v1"), dtGroup("w", 3, "v1"))
	x := &dtExecutor{}
	say := func(now time.Time) string { return d.ExplainCluster(now).String() }
	require.Equal(t, "generation 1: 0 of 0 ready, and no pass has looked at that generation yet; "+
		"4 like v-0: desired and not begun [R0 insert]", say(dtStart))
	dtDrive(t, d, dtStart, x)
	require.Equal(t, "generation 1: 0 of 4 ready; 2 like v-0: waiting 1m30s more at most for CreateLease 1/1; for 30s now [R5 await-operation]; "+
		"2 like w-1: wants to dispatch CreateLease and waits for a place: MaxInFlight is reached [R12 create-lease]; the next deadline is in 1m30s",
		say(dtStart.Add(30*time.Second)))

	d.Deliver(dtCompleted(x.submitted[0], dtFailed(x.submitted[0], ClassDefinite)))
	dtDrive(t, d, dtStart, x)
	d.Pause()
	dtDrive(t, d, dtStart, x)
	x.running = []RunningCall{{Operation: OperationID{2, 1}, Kind: CreateLease, Node: "w-0", Since: dtStart, Expired: true}, {Node: "w-1"}}
	require.Equal(t, "generation 1: 0 of 4 ready; growth is paused; "+
		"2 like w-0: waiting 2m0s more at most for CreateLease 2/1; CreateLease 2/1 outlived its deadline and is still running after 0s, since 2030-01-02T03:04:05Z [R5 await-operation]; "+
		"v-0: waiting 1s more after 1 failure in a row, the last: CreateLease: boom; then paused before CreateLease [R10 await-backoff]; "+
		"w-2: paused before CreateLease [R12 create-lease]; "+
		"the next deadline is in 1s", say(dtStart))
	d.Resume()

	x.running = nil
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("v", 2, "v1"))))
	dtWorks(d, x)
	for range 5 {
		now, some := d.RequeueAt()
		if !some {
			break
		}
		dtDrive(t, d, now, x)
	}
	require.True(t, d.Converged(2))
	e := d.ExplainCluster(dtStart.Add(time.Hour))
	require.Equal(t, "generation 2: 2 of 2 ready, as wished", e.String())
	require.True(t, e.Converged)
	require.Len(t, e.Rules, 1)
	require.Equal(t, 2, e.Rules[0].Count)
	require.Equal(t, LogicalNodeID("v-0"), e.Rules[0].First.Node)
}

// TestExplanationsAsJSON for machines: stable names, texts for kinds and rules.
func TestExplanationsAsJSON(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(CreateLease)
	s.end(CreateLease, ClassAmbiguous)
	s.x.running = []RunningCall{{Operation: OperationID{1, 1}, Kind: CreateLease, Node: "w-0", Since: s.now, Expired: true}}
	s.now = s.now.Add(time.Second)
	s.drive()
	e, _ := s.d.Explain("w-0", s.now)
	text, err := json.Marshal(e)
	require.NoError(t, err)
	require.JSONEq(t, `{"node":"w-0","attempt":1,"stage":"LeaseRequested","intent":"Active",
		"sentence":"w-0: waiting 2m0s more at most for CreateLease 1/2; what came of an earlier CreateLease is not known yet; CreateLease 1/1 outlived its deadline and is still running after 1s, since 2030-01-02T03:04:05Z [R5 await-operation]",
		"unblock":"the return of CreateLease 1/1, or the deadline",
		"rule":{"number":5,"name":"await-operation","why":"one operation at a time: wait for its result; at its deadline the driver ends it"},
		"action":"none","operation":"none","until":"2030-01-02T03:06:06Z","now":"2030-01-02T03:04:06Z","since":"2030-01-02T03:04:06Z",
		"pending":"CreateLease","pendingId":{"attempt":1,"sequence":2},"failures":1,"lastError":"CreateLease: boom","unresolved":"CreateLease","givenUp":"none",
		"stillRunning":{"operation":{"attempt":1,"sequence":1},"kind":"CreateLease","node":"w-0","since":"2030-01-02T03:04:05Z","expired":true}}`, string(text))

	cluster, err := json.Marshal(s.d.ExplainCluster(s.now))
	require.NoError(t, err)
	require.JSONEq(t, `{"generation":1,"observed":1,"converged":false,"ready":0,"desired":1,
		"rules":[{"rule":{"number":5,"name":"await-operation","why":"one operation at a time: wait for its result; at its deadline the driver ends it"},"count":1,"first":`+string(text)+`}],
		"stillRunning":[{"operation":{"attempt":1,"sequence":1},"kind":"CreateLease","node":"w-0","since":"2030-01-02T03:04:05Z","expired":true}],
		"now":"2030-01-02T03:04:06Z","until":"2030-01-02T03:06:06Z"}`, string(cluster))

	s.d.state.find("w-0").nextSequence = math64
	s.back(CreateLease)
	e, _ = s.d.Explain("w-0", s.now)
	text, err = json.Marshal(e)
	require.NoError(t, err)
	require.Contains(t, string(text), `"error":"provisioning: operation numbers of the attempt are exhausted"`)
}

// askedExecutor does something when it is asked what runs.
type askedExecutor struct {
	*dtExecutor
	during func()
}

func (x *askedExecutor) Running() []RunningCall {
	if x.during != nil {
		x.during()
	}
	return nil
}

// TestExplainClusterIsOfOneMoment: a pass that comes in between changes nothing of
// what is told of the slots.
func TestExplainClusterIsOfOneMoment(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("a", 1, "v1"), dtGroup("b", 1, "v1"))
	x := &askedExecutor{dtExecutor: &dtExecutor{}}
	dtDrive(t, d, dtStart, x)
	d.Deliver(dtCompleted(x.submitted[0], dtFailed(x.submitted[0], ClassDefinite)))
	dtDrive(t, d, dtStart, x)
	moved := 0
	x.during = func() {
		moved++
		d.Deliver(dtCompleted(x.submitted[1], dtSuccess(x.submitted[1])))
		require.NoError(t, d.UpdateDesired(dtShape(1+uint64(moved))))
		dtDrive(t, d, dtStart, x)
	}
	e := d.ExplainCluster(dtStart)
	require.Positive(t, moved)
	require.Len(t, e.Rules, 2)
	for i, node := range []LogicalNodeID{"b-0", "a-0"} {
		require.Equal(t, 1, e.Rules[i].Count)
		require.Equal(t, node, e.Rules[i].First.Node)
		require.Equal(t, e.Rules[i].Rule, e.Rules[i].First.Decision.Rule)
	}
}

// TestExplainClusterNamesACallOnce: by the slot that speaks for its rule, or else
// by itself.
func TestExplainClusterNamesACallOnce(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(CreateLease)
	s.end(CreateLease, ClassAmbiguous)
	overdue := RunningCall{Operation: OperationID{1, 1}, Kind: CreateLease, Node: "w-0", Since: s.now, Expired: true}
	gone := RunningCall{Operation: OperationID{7, 3}, Kind: DestroyLease, Node: "w-5", Since: s.now, Expired: true}
	s.x.running = []RunningCall{overdue, gone}
	s.now = s.now.Add(time.Second)
	s.drive()
	e := s.d.ExplainCluster(s.now)
	require.Equal(t, []RunningCall{overdue, gone}, e.StillRunning)
	require.Equal(t, 1, strings.Count(e.String(), "CreateLease 1/1"), e.String())
	require.Contains(t, e.String(), "; DestroyLease 7/3 of w-5 is running after 1s")
	e.Rules[0].Rule = ladder[ruleSteady].Rule // which says nothing
	require.Equal(t, 1, strings.Count(e.String(), "CreateLease 1/1"), e.String())
}

// TestDurationsForPeople are never more exact than anybody reads, and never
// nothing where something is left.
func TestDurationsForPeople(t *testing.T) {
	for exact, want := range map[time.Duration]string{
		7699999877:                          "7.7s",
		0:                                   "0s",
		1:                                   "1ns",
		1234:                                "1µs",
		999_999_999:                         "1s",
		1_499_999:                           "1ms",
		59*time.Second + 999999999:          "1m0s",
		29*time.Minute + 59*time.Second + 1: "29m59s",
		-1500*time.Millisecond - 1:          "-1.5s",
		90 * time.Minute:                    "1h30m0s",
	} {
		require.Equal(t, want, roughly(exact).String())
	}
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(CreateLease)
	now := s.now.Add(90*time.Second + 123456789)
	e, _ := s.d.Explain("w-0", now)
	require.Contains(t, e.String(), "waiting 29.9s more")
	require.Equal(t, 30*time.Second-123456789, e.Decision.Until.Sub(now), "the fields are exact")
	require.Contains(t, s.d.ExplainCluster(now).String(), "the next deadline is in 29.9s")
}

const math64 = 1<<64 - 1

// TestUnblock of every rule that waits, and of all that only wait for a pass.
func TestUnblock(t *testing.T) {
	w := dtGroup("w", 1, "v1")
	for _, c := range []struct {
		config Config
		tell   func(*dtStory)
		want   string
	}{
		{Config{}, func(s *dtStory) {}, "the next pass"},
		{Config{FirstAttempt: math64}, func(s *dtStory) { s.drive() }, "another driver, whose FirstAttempt leaves room"},
		{Config{}, func(s *dtStory) { s.climb(CreateLease) }, "its result, or the deadline"},
		{Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassDefinite) }, "the time"},
		{Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassLeaseLost) }, "the time"},
		{Config{}, func(s *dtStory) { s.climb(CancelBootstrap) }, "what the bootstrap reports: a join, its end or a failure; or the deadline"},
		{Config{Retry: RetryPolicy{BootstrapTimeout: -1}}, func(s *dtStory) { s.climb(CancelBootstrap) }, "what the bootstrap reports: a join, its end or a failure"},
		{Config{}, func(s *dtStory) { s.climb(CancelBootstrap); s.now = s.now.Add(time.Hour) }, "the next pass"},
		{Config{}, func(s *dtStory) { s.pass(); s.d.Pause() }, "Resume"},
		{Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassDefinite); s.d.Pause() }, "the time and Resume"},
		{Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassLeaseLost); s.d.Pause() }, "the time and Resume"},
		{Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassAmbiguous); s.hang(CreateLease) },
			"the time and the return of CreateLease 1/1"},
		{Config{}, func(s *dtStory) {
			s.climb(CreateLease)
			s.end(CreateLease, ClassAmbiguous)
			s.hang(CreateLease)
			s.d.Pause()
			s.now, _ = s.d.RequeueAt()
			s.drive()
		}, "Resume and the return of CreateLease 1/1"},
		{Config{}, func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassLeaseLost); s.hang(CreateLease) }, "the time"},
		{Config{MaxInFlight: 1}, func(s *dtStory) { s.update(dtGroup("v", 1, "v1"), w); s.drive() }, "the end of another operation, or a larger MaxInFlight"},
		{Config{}, func(s *dtStory) {
			s.climb(BootstrapConvergenceObserved)
			s.end(BootstrapConvergenceObserved, ClassNone)
		}, ""},
		{Config{}, func(s *dtStory) { s.pass(); s.d.state.find("w-0").nextSequence = math64 },
			"its deletion: the attempt has had all the operations that it may have"},
		{Config{}, func(s *dtStory) {
			s.climb(StartBootstrap)
			s.back(StartBootstrap)
			s.d.state.find("w-0").stage = StageLeaseCreated
		}, "a fix: this is a fault of the library"},
	} {
		s := dtTell(t, c.config, w)
		c.tell(s)
		e, ok := s.d.Explain("w-0", s.now)
		require.True(t, ok)
		require.Equal(t, c.want, e.Unblock(), "%v", e)
	}
}

// hang has the executor say that the first operation of the first attempt, which
// is of that kind, has not returned.
func (s *dtStory) hang(kind OperationKind) {
	s.x.running = []RunningCall{{Operation: OperationID{1, 1}, Kind: kind, Node: "w-0", Since: dtStart, Expired: true}}
}

// TestExplainSince of every wait, in the field and, where it has lasted for a
// second, in the sentence.
func TestExplainSince(t *testing.T) {
	nothingYet := func(s *dtStory) {
		e := dtLast(s.t, s.x, LookupEndpoint)
		s.d.Deliver(dtCompleted(e, Completion{Operation: e.Operation, Kind: e.Kind}))
		s.drive()
	}
	for _, c := range []struct {
		why    string
		config Config
		tell   func(*dtStory)
		after  time.Duration // what it is about began so long before the end of the story
		then   time.Duration // which is so long ago
		want   string        // empty: nobody can tell
	}{
		{"dispatched", Config{}, func(s *dtStory) { s.climb(CreateLease) }, 0, time.Minute, "CreateLease 1/1; for 1m0s now"},
		{"backing off", Config{Retry: RetryPolicy{InitialDelay: time.Minute}},
			func(s *dtStory) { s.climb(CreateLease); s.end(CreateLease, ClassDefinite) }, 0, 10 * time.Second, "boom; for 10s now"},
		{"backing off in the cleanup", Config{Retry: RetryPolicy{InitialDelay: time.Minute}}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			s.end(LookupEndpoint, ClassLeaseLost)
			s.now = s.now.Add(time.Hour)
			s.d.Trigger()
			s.end(DestroyLease, ClassDefinite)
		}, 0, 10 * time.Second, "boom; for 10s now"},
		{"to restart, since it failed", Config{Retry: RetryPolicy{InitialDelay: time.Minute}}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			s.end(LookupEndpoint, ClassLeaseLost)
			s.now = s.now.Add(5 * time.Second)
			s.end(DestroyLease, ClassNone)
		}, 5 * time.Second, 10 * time.Second, "boom; for 15s now"},
		{"looking for the endpoint, since there is a machine", Config{}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			s.now = s.now.Add(time.Minute)
			nothingYet(s)
		}, time.Minute, time.Second, "to look for the endpoint again; for 1m1s now"},
		{"the same after a look-up that failed", Config{}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			s.now = s.now.Add(time.Minute)
			s.end(LookupEndpoint, ClassDefinite)
		}, time.Minute, 0, "boom; for 1m0s now"},
		{"the same without a limit", Config{Retry: RetryPolicy{EndpointTimeout: -1}}, func(s *dtStory) {
			s.climb(LookupEndpoint)
			nothingYet(s)
		}, 0, time.Second, ""},
		{"the bootstrap, since there is an endpoint", Config{}, func(s *dtStory) {
			s.climb(StartBootstrap)
			s.now = s.now.Add(time.Minute)
			s.end(StartBootstrap, ClassNone)
		}, time.Minute, time.Hour / 3, "report a join; for 21m0s now"},
		{"the same without a limit", Config{Retry: RetryPolicy{BootstrapTimeout: -1}},
			func(s *dtStory) { s.climb(CancelBootstrap) }, 0, time.Hour, ""},
		{"ready", Config{}, func(s *dtStory) {
			s.climb(BootstrapConvergenceObserved)
			s.end(BootstrapConvergenceObserved, ClassNone)
		}, 0, time.Hour, "ready; for 1h0m0s now"},
		{"held back by a pause", Config{}, func(s *dtStory) {
			s.climb(CreateLease)
			s.d.Pause()
			s.now = s.now.Add(time.Minute)
			s.end(CreateLease, ClassNone)
		}, 0, time.Hour, "paused before LookupEndpoint; for 1h0m0s now"},
	} {
		s := dtTell(t, c.config, dtGroup("w", 1, "v1"))
		c.tell(s)
		began := s.now.Add(-c.after)
		e, ok := s.d.Explain("w-0", s.now.Add(c.then))
		require.True(t, ok)
		if c.want == "" {
			require.Zero(t, e.Since, "%s: %v", c.why, e)
			require.NotContains(t, e.String(), " now")
			continue
		}
		require.Equal(t, began, e.Since, "%s: %v", c.why, e)
		require.Contains(t, e.String(), c.want+" [", c.why)
	}
}

// TestExplainSinceIsNoPromise of what is over or about to happen.
func TestExplainSinceIsNoPromise(t *testing.T) {
	s := dtTell(t, Config{}, dtGroup("w", 1, "v1"))
	s.climb(BootstrapConvergenceObserved)
	s.end(BootstrapConvergenceObserved, ClassNone)
	s.update(dtGroup("w", 1, "v2"))
	s.now = s.now.Add(time.Hour)
	e, _ := s.d.Explain("w-0", s.now)
	require.Equal(t, "w-0: unwanted or outdated: will be deleted [R4 begin-delete]", e.String())
	require.Zero(t, e.Since, "that it was ready is another matter")
	s.drive()
	s.now = s.now.Add(time.Hour)
	e, _ = s.d.Explain("w-0", s.now)
	require.Equal(t, "w-0: DestroyLease 1/5 is out of time: the next pass ends it [R5 await-operation]", e.String())
}

// TestProp_ExplainCluster: in every state that a driver can come to, the counts
// are those of the slots one by one, the first ones are what Explain says, and
// every slot that waits says what for.
func TestProp_ExplainCluster(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := dtNewTwins(t)
		w.wander()
		want := make(map[int]int)
		state := w.real.Snapshot()
		count := func(id LogicalNodeID) {
			e, ok := w.real.Explain(id, w.now)
			require.True(t, ok)
			want[e.Decision.Rule.Number]++
			require.Equal(t, e.Decision.Rule.Number == ruleSteady, e.Unblock() == "", "%v", e)
			require.False(t, e.Since.After(e.Now), "%v", e)
			if e.waitsForTime() && e.Stage != StageLeaseCreated || e.Decision.Rule.Number == ruleAwaitOperation || e.Decision.Rule.Number == ruleSteady {
				require.False(t, e.Since.IsZero(), "%v", e)
			}
			if until := e.Decision.Until; !until.IsZero() && until.After(e.Now) && !errors.Is(e.Decision.Err, ErrUnmatched) {
				require.NotEqual(t, "the next pass", e.Unblock(), "%v", e)
			}
		}
		for m := range state.All() {
			count(m.Record.Node)
		}
		for spec := range w.real.accepted.All() {
			if _, begun := state.Node(spec.Node); !begun {
				count(spec.Node)
			}
		}
		e := w.real.ExplainCluster(w.now)
		got := make(map[int]int)
		last := -1
		for _, c := range e.Rules {
			require.Greater(t, c.Rule.Number, last, "in the order of the ladder")
			last = c.Rule.Number
			got[last] = c.Count
			first, ok := w.real.Explain(c.First.Node, w.now)
			require.True(t, ok)
			require.Equal(t, first, c.First)
			require.Equal(t, c.Rule, first.Decision.Rule)
		}
		require.Equal(t, want, got)
		require.Equal(t, w.real.Converged(w.real.Generation()), e.Converged)
		ready, desired := w.real.Progress()
		require.Equal(t, [2]int{ready, desired}, [2]int{e.Ready, e.Desired})
	})
}
