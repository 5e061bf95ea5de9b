package scenario

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
)

func text(lines ...string) string { return strings.Join(lines, "\n") + "\n" }

func failureOf(t *testing.T, source string) *Failure {
	t.Helper()
	err := Run("some.scn", source, Options{})
	failure, ok := errors.AsType[*Failure](err)
	require.True(t, ok, "got %v", err)
	return failure
}

// Each kind of wrong expectation, and what a person is told about it.
func TestWrongExpectations(t *testing.T) {
	// A slot in its backoff, one that is ready, one whose create hangs, one
	// whose start is in doubt and one whose cleanup has failed.
	const story = `# a story
config jitter=0
script w-0 create definite*3
script w-2 create hang
script w-3 start ambiguous
script w-4 destroy definite*9
shape 1 w:5@img1
shape 2 w:4@img1
advance 500ms
`
	tests := []struct{ line, expected, found string }{
		{"expect w-1 stage=New", "w-1 stage=New", "Dormant"},
		{"expect w-4 intent=Active", "w-4 intent=Active", "Deleting"},
		{"expect w-1 ready=false", "w-1 ready=false", "true"},
		{"expect w-0 attempt=2", "w-0 attempt=2", "1"},
		{"expect w-0 lease=true", "w-0 lease=true", "none"},
		{"expect w-1 lease=none", "w-1 lease=none", "lease/scenario/w-1/2"},
		{"expect w-1 lease=false", "w-1 lease=false", "lease/scenario/w-1/2"},
		{"expect w-1 lease=other", "w-1 lease=other", "lease/scenario/w-1/2"},
		{"expect w-1 session=true", "w-1 session=true", "none"},
		{"expect w-2 pending=none", "w-2 pending=none", "create"},
		{"expect w-2 pending=lookup", "w-2 pending=lookup", "create"},
		{"expect w-0 pending=create", "w-0 pending=create", "none"},
		{"expect w-3 ambiguous=create", "w-3 ambiguous=create", "start"},
		{"expect w-0 failures=2", "w-0 failures=2", "1"},
		{"expect w-4 cleanup-failures=2", "w-4 cleanup-failures=2", "1"},
		{"expect w-0 next=none", "w-0 next=none", "+500ms"},
		{"expect w-0 next=+1s", "w-0 next=+1s", "+500ms"},
		{"expect w-1 next=+1s", "w-1 next=+1s", "none"},
		{"expect w-0 restart=+1s", "w-0 restart=+1s", "none"},
		{"expect w-3 deadline=+20m", "w-3 deadline=+20m0s", "+19m59.5s"},
		{"expect w-0 rule=create-lease", "w-0 rule=create-lease", "await-backoff"},
		{"expect w-0 failures=1 stage=Dormant", "w-0 stage=Dormant", "LeaseRequested"},
		{"expect w-1 gone", "w-1 gone", "it in stage Dormant, attempt 2"},
		{"expect w-9 stage=New", "w-9 with stage=New", "no such slot in the state"},
		{"expect w-9 rule=insert", "w-9 with rule=insert", "no such slot in the state"},
		{"expect slots w-0 w-1", "w-0 w-1", "w-0 w-1 w-2 w-3 w-4"},
		{"expect slots", "no slots", "w-0 w-1 w-2 w-3 w-4"},
		{"expect calls w-0 create=1 destroy=1", "w-0 calls destroy=1", "destroy=0"},
		{"expect gaps w-0 create 1s", "gaps [1s]", "gaps [] between 1 calls"},
		{"expect live w-1 0", "0 live machines of w-1", "1"},
		{"expect live 1", "1 live machines", "3"},
		{"expect created w-0 1", "1 machines ever made of w-0", "0"},
		{"expect requeue none", "requeue=none", "+500ms"},
		{"expect requeue +1s", "requeue=+1s", "+500ms"},
		{"expect converged true", "converged=true", "false"},
		{"expect observed 1", "observed=1", "2"},
		{"expect attempts 4", "attempts=4", "5"},
		{"expect progress 2/4", "progress=2/4", "1/4"},
		{"expect progress 1/5", "progress=1/5", "1/4"},
		{"reject shape 3 w:1@img1", "the shape to be refused", "it accepted"},
		{"shape 1", "the shape to be accepted", "provisioning: generation is lower than the accepted one: 1 after 2"},
	}
	for _, test := range tests {
		t.Run(test.line, func(t *testing.T) {
			f := failureOf(t, story+test.line+" # so it says\nadvance 1s\n")
			require.Equal(t, "some.scn", f.File)
			require.Equal(t, 10, f.Line)
			require.Equal(t, test.line+" # so it says", f.Text)
			require.Equal(t, test.expected, f.Expected)
			require.Equal(t, test.found, f.Found)
			require.Equal(t, "2: config jitter=0", f.Trace[0])
			require.Contains(t, strings.Join(f.Trace, "\n"), "    +0s call create w-0#1 1/1: definite")
			require.Contains(t, f.Error(), "some.scn:10: "+test.line)
		})
	}
	require.NoError(t, Run("some.scn", story, Options{}), "the story itself holds")
}

// What cannot be read is an error, never a line that says nothing.
func TestUnreadableLines(t *testing.T) {
	tests := []struct{ line, found string }{
		{"expct w-0 stage=New", `"expct"`},
		{"config max=1m", "it after other commands"},
		{"shape", "nothing"},
		{"shape one", `"one"`},
		{"shape -1", `"-1"`},
		{"shape 2 w", `"w"`},
		{"shape 2 w:1", `"w:1"`},
		{"shape 2 w:1@", `"w:1@"`},
		{"shape 2 w:x@img1", `"x"`},
		{"reject", "reject "},
		{"reject update 2", "reject update 2"},
		{"reject shape x", `"x"`},
		{"trigger twice", `"twice"`},
		{"pass 2", `"2"`},
		{"drive w-0", `"w-0"`},
		{"answer w-0", `"w-0"`},
		{"script w-0", `"w-0"`},
		{"script w0 create ok", `"w0"`},
		{"script w-01 create ok", `"w-01"`},
		{"script w-0 make ok", `"make"`},
		{"script w-0 create", "nothing"},
		{"script w-0 create okay", `fakebackend: not an outcome: "okay"`},
		{"script w-0 create slow=40", `fakebackend: not an outcome: "slow=40": the duration must look like 30s`},
		{"script w-0 create hang*0", `fakebackend: not an outcome: "hang*0": the count must be 1 to 1000000`},
		{"script w-0 destroy dead", "fakebackend: outcome dead is for CreateLease only, not for DestroyLease"},
		{"release w-0 create ok", "fakebackend: no such call hangs: CreateLease on w-0"},
		{"release w-2 create hang", "fakebackend: outcome hang does not end a call"},
		{"release w-2 create ok*2", "ok*2"},
		{"release w-2 create", "nothing"},
		{"release w-2", `"w-2"`},
		{"remove", `""`},
		{"remove w", `"w"`},
		{"remove w-2", "none"},
		{"event w-0", `"w-0"`},
		{"event w joined", `"w"`},
		{"event w-0 born", `"born"`},
		{"event w-0 joined=1", `"joined=1"`},
		{"event w-0 stage", `"stage"`},
		{"event w-0 stage=Happy", `"Happy"`},
		{"event w-0 stage=none", `"none"`},
		{"event w-0 joined attempt", `"attempt"`},
		{"event w-0 joined attempt=x", `"x"`},
		{"event w-0 joined session=s", `"session=s"`},
		{"event w-9 joined", "w-9, which is not"},
		{"drain w-0", `"w-0"`},
		{"pause w-0", `"w-0"`},
		{"resume now", `"now"`},
		{"replace", `""`},
		{"replace w", `"w"`},
		{"replace w-9", "provisioning: there is no such slot: w-9"},
		{"advance", `""`},
		{"advance 5", `"5"`},
		{"advance 0", `"0"`},
		{"advance 1s 2s", `"1s 2s"`},
		{"advance -1s", `"-1s"`},
		{"jump", `""`},
		{"jump 5", `"5"`},
		{"expect", "nothing"},
		{"expect cake", `"cake"`},
		{"expect w-0", "nothing"},
		{"expect w-0 gone now", `"now"`},
		{"expect w-0 stage", `"stage"`},
		{"expect w-0 stage=", `"stage="`},
		{"expect w-0 stage=Happy", `"Happy"`},
		{"expect w-0 intent=Unclear", `"Unclear"`},
		{"expect w-0 ready=yes", `"yes"`},
		{"expect w-0 attempt=none", `"none"`},
		{"expect w-0 pending=CreateLease", `"CreateLease"`},
		{"expect w-0 ambiguous=true", `"true"`},
		{"expect w-0 failures=x", `"x"`},
		{"expect w-0 next=1s", `"1s"`},
		{"expect w-0 next=+1", `"+1"`},
		{"expect w-0 next=+0", `"+0"`},
		{"expect w-0 rule=R10", `"R10"`},
		{"expect w-0 colour=red", `"colour"`},
		{"expect slots w", `"w"`},
		{"expect calls w-0", `"w-0"`},
		{"expect calls w create=1", `"w"`},
		{"expect calls w-0 create", `"create"`},
		{"expect calls w-0 make=1", `"make"`},
		{"expect calls w-0 create=x", `"x"`},
		{"expect gaps w-0", `"w-0"`},
		{"expect gaps w-0 create 1", `"1"`},
		{"expect live", `""`},
		{"expect live w 1", `"w"`},
		{"expect live x", `"x"`},
		{"expect live w-0 x", `"x"`},
		{"expect created 1", `"1"`},
		{"expect requeue 5s", `"5s"`},
		{"expect requeue", `""`},
		{"expect converged yes", `"yes"`},
		{"expect converged", `""`},
		{"expect observed -1", `"-1"`},
		{"expect observed", `""`},
		{"expect attempts x", `"x"`},
		{"expect attempts", `""`},
		{"expect progress 3", `"3"`},
		{"expect progress x/3", `"x/3"`},
		{"expect progress 2/", `"2/"`},
		{"expect progress", `""`},
	}
	for _, test := range tests {
		t.Run(test.line, func(t *testing.T) {
			f := failureOf(t, text("script w-2 create hang", "shape 1 w:3@img1", test.line, "advance 1s"))
			require.Equal(t, 3, f.Line)
			require.Equal(t, test.line, f.Text)
			require.NotEmpty(t, f.Expected)
			require.Equal(t, test.found, f.Found)
		})
	}
}

func TestUnreadableConfig(t *testing.T) {
	tests := []struct{ words, found string }{
		{"colour=red", `"colour"`},
		{"initial", `"initial"`},
		{"initial=1", `"1"`},
		{"initial=0s", `"0s"`},
		{"initial=2m", "provisioning: invalid retry policy: MaxDelay is 1m0s, must not be below InitialDelay 2m0s"},
		{"max=x", `"x"`},
		{"jitter=half", `"half"`},
		{"jitter=1", "provisioning: invalid retry policy: Jitter is 1, must be at least 0 and below 1"},
		{"timeout=30", `"30"`},
		{"probe=5", `"5"`},
		{"endpoint-timeout=10", `"10"`},
		{"bootstrap-timeout=20", `"20"`},
		{"stable-after=10", `"10"`},
		{"cancel-limit=many", `"many"`},
		{"cancel-limit=0", `"0"`},
		{"max-in-flight=few", `"few"`},
		{"class=tag", `"tag"`},
		{"lag=5", `"5"`},
		{"lag=-5s", `"-5s"`},
		{"settle=5", `"5"`},
		{"bootstrap=yes", `"yes"`},
		{"drive=never", `"never"`},
	}
	for _, test := range tests {
		f := failureOf(t, text("config "+test.words, "shape 1"))
		require.Equal(t, 1, f.Line, test.words)
		require.Equal(t, test.found, f.Found, test.words)
	}
	require.Equal(t, "provisioning: invalid configuration: MaxInFlight is -1", failureOf(t, text("config max-in-flight=-1", "shape 1")).Found)
	require.NoError(t, Run("", text("# a story first", "", "config endpoint-timeout=-1s bootstrap-timeout=-1s cancel-limit=-1 max-in-flight=2 "+
		"class=name lag=0s settle=1s bootstrap=auto drive=auto max=2m jitter=0.5 stable-after=1m probe=1s timeout=1m initial=1ms", "shape 1 w:1@img1"), Options{}))
}

func TestConfigReachesPolicyAndProvider(t *testing.T) {
	c, err := parseConfig(strings.Fields("initial=2s max=3s jitter=0.5 timeout=4s probe=5s endpoint-timeout=6s bootstrap-timeout=7s stable-after=8s " +
		"cancel-limit=9 max-in-flight=10 class=label lag=11s settle=12s bootstrap=manual drive=manual"))
	require.NoError(t, err)
	require.Equal(t, config{retry: provisioning.RetryPolicy{InitialDelay: 2 * time.Second, MaxDelay: 3 * time.Second, Jitter: 0.5,
		OperationTimeout: 4 * time.Second, EndpointProbeInterval: 5 * time.Second, EndpointTimeout: 6 * time.Second,
		BootstrapTimeout: 7 * time.Second, StableAfter: 8 * time.Second, CancelLimit: 9},
		maxInFlight: 10, class: fakebackend.Label, lag: 11 * time.Second, settle: 12 * time.Second, manualBoot: true, manualDrive: true}, c)
}

func TestCommandsThatNeedAShape(t *testing.T) {
	for _, line := range []string{"trigger", "pass", "drive", "drain", "pause", "resume", "replace w-0", "event w-0 joined", "expect w-0 gone", "expect slots", "expect requeue none",
		"expect converged true", "expect observed 0", "expect attempts 0"} {
		f := failureOf(t, text(line))
		require.Equal(t, "none", f.Found, line)
	}
	require.NoError(t, Run("", text("reject shape 0", "reject shape 1 w:-1@img1", "advance 1s", "expect live 0", "expect created w-0 0",
		"expect calls w-0 create=0", "shape 1 w:1@img1", "expect live 1"), Options{}))
}

func TestEmptyScenario(t *testing.T) {
	require.Equal(t, "none", failureOf(t, "# only a story\n\n").Found)
}

func TestCountsSaturate(t *testing.T) {
	for _, count := range []string{"9223372036854775807", "99999999999999999999", "-9223372036854775808", "-99999999999999999999", "4294967296", "4294967297"} {
		require.NoError(t, Run("", text("shape 1 w:1@img1", "reject shape 2 w:"+count+"@img1", "expect live 1"), Options{}), count)
	}
}

func TestTraceIsBounded(t *testing.T) {
	f := failureOf(t, text("script w-0 create definite*2000", "shape 1 w:1@img1", "advance 20h", "expect w-0 stage=Dormant"))
	require.LessOrEqual(t, len(f.Trace), 2*keptTrace)
	require.Positive(t, f.LeftOut)
	require.Contains(t, f.Error(), "earlier entries are left out")
	require.Equal(t, "4: expect w-0 stage=Dormant", f.Trace[len(f.Trace)-1])
}

// The events that a file can deliver, and what they default to.
func TestEvents(t *testing.T) {
	require.NoError(t, Run("", text(
		"config bootstrap=manual",
		"shape 1 w:1@img1",
		"event w-0 closed id=another-session", // of no session of ours
		"event w-0 stage=SSHReady id=another-session",
		"expect w-0 stage=BootstrapRunning",
		"event w-0 joined attempt=7",
		"event w-9 joined attempt=7",
		"expect w-0 stage=BootstrapRunning",
		"event w-0 joined id=somebody",
		"expect w-0 stage=Dormant",
	), Options{}))
}

// begun returns a runner after some lines.
func begun(t *testing.T, lines ...string) *runner {
	t.Helper()
	r := &runner{config: defaults()}
	for _, line := range lines {
		require.NoError(t, r.play(strings.Fields(line)))
	}
	t.Cleanup(func() { require.NoError(t, r.close()) })
	return r
}

// lying is a driver with a fault.
type lying struct {
	driver
	requeue   func(time.Time, bool) (time.Time, bool)
	snapshot  func(*provisioning.ClusterState) *provisioning.ClusterState
	driveNext func(bool) bool
	passes    int
	plan      *provisioning.Plan
	dispatch  uint64 // what Stats grows by with each further pass
	update    func()
}

func (l *lying) RequeueAt() (time.Time, bool) {
	at, ok := l.driver.RequeueAt()
	if l.requeue != nil {
		return l.requeue(at, ok)
	}
	return at, ok
}

func (l *lying) Snapshot() *provisioning.ClusterState {
	if l.snapshot != nil {
		return l.snapshot(l.driver.Snapshot())
	}
	return l.driver.Snapshot()
}

func (l *lying) DriveNext(now time.Time, executor provisioning.EffectExecutor) (bool, error) {
	l.passes++
	ran, err := l.driver.DriveNext(now, executor)
	if l.driveNext != nil {
		ran = l.driveNext(ran)
	}
	return ran, err
}

func (l *lying) DriveUntilBlocked(now time.Time, executor provisioning.EffectExecutor) (int, error) {
	n, err := l.driver.DriveUntilBlocked(now, executor)
	if l.update != nil {
		n++
	}
	return n, err
}

func (l *lying) Plan(now time.Time) provisioning.Plan {
	if l.plan != nil {
		return *l.plan
	}
	return l.driver.Plan(now)
}

func (l *lying) Stats() provisioning.DriverStats {
	stats := l.driver.Stats()
	stats.Dispatched += l.dispatch * uint64(l.passes)
	return stats
}

func (l *lying) UpdateDesired(shape provisioning.ClusterShape) error {
	err := l.driver.UpdateDesired(shape)
	if l.update != nil {
		l.update()
	}
	return err
}

// What the runner checks after every line, held against faulty drivers.
func TestChecksAfterEveryLine(t *testing.T) {
	later := func(at time.Time, ok bool) (time.Time, bool) { return at.Add(1), ok }
	tests := []struct {
		name     string
		fault    func(r *runner, l *lying)
		expected string
	}{
		{"requeue too late", func(_ *runner, l *lying) { l.requeue = later }, "RequeueAt +1s"},
		{"no requeue", func(_ *runner, l *lying) {
			l.requeue = func(at time.Time, _ bool) (time.Time, bool) { return at, false }
		}, "RequeueAt +1s"},
		{"a broken invariant", func(_ *runner, l *lying) {
			l.snapshot = func(s *provisioning.ClusterState) *provisioning.ClusterState {
				s.NextAttemptID = 1
				return s
			}
		}, "a state that keeps S1 to S8"},
		{"a pass that is not to be had", func(_ *runner, l *lying) { l.driveNext = func(bool) bool { return false } }, "exactly one further pass"},
		{"passes without end", func(_ *runner, l *lying) { l.driveNext = func(bool) bool { return true } }, "exactly one further pass"},
		{"a plan that is not carried out", func(_ *runner, l *lying) {
			l.plan = &provisioning.Plan{Actions: []provisioning.Action{{Node: "w-0", Kind: provisioning.Restart}}}
		}, "nothing left to do"},
		{"a fault", func(_ *runner, l *lying) {
			l.plan = &provisioning.Plan{Faults: []provisioning.Fault{{Node: "w-0", Err: provisioning.ErrUnmatched}}}
		}, "nothing left to do"},
		{"a further pass that dispatches", func(_ *runner, l *lying) { l.dispatch = 1 }, "a further pass to change nothing"},
		{"never at rest", func(_ *runner, l *lying) { l.update = func() {} }, "the cluster to come to rest"},
		{"a call that is not on record", func(r *runner, _ *lying) {
			_, _ = r.fake.CreateLease(context.Background(), provisioning.CreateLeaseRequest{
				Key: provisioning.ExternalKey{Run: run, Node: "w-0", Attempt: 1}, Operation: provisioning.OperationID{Attempt: 1, Sequence: 9}})
		}, "every call recorded before it starts"},
		{"two machines for a slot", func(r *runner, _ *lying) {
			_, _ = r.fake.CreateLease(context.Background(), provisioning.CreateLeaseRequest{Key: provisioning.ExternalKey{Run: run, Node: "w-1", Attempt: 9}})
			r.problems = nil // of the call itself
		}, "one machine for w-1"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := begun(t, "script w-0 create definite", "shape 1 w:2@img1")
			l := &lying{driver: r.driver}
			r.driver = l
			require.NoError(t, r.play([]string{"trigger"}))
			l.passes = 0
			test.fault(r, l)
			err := r.play([]string{"trigger"})
			m, ok := errors.AsType[*invariant.Mismatch](err)
			require.True(t, ok, "got %v", err)
			require.True(t, strings.HasPrefix(m.Expected, test.expected), m.Expected)
		})
	}
	t.Run("a further call", func(t *testing.T) {
		r := begun(t, "shape 1 w:1@img1")
		l := &lying{driver: r.driver}
		l.driveNext = func(ran bool) bool {
			if ran {
				r.work.Go(func() {})
			}
			return ran
		}
		r.driver = l
		require.ErrorContains(t, r.play([]string{"trigger"}), "a further pass to call nothing")
	})
	t.Run("a refusal that changes something", func(t *testing.T) {
		r := begun(t, "config drive=manual", "shape 1 w:1@img1")
		l := &lying{driver: r.driver}
		l.update = func() { _, _ = l.driver.DriveNext(r.now(), r.executor) }
		r.driver = l
		require.ErrorContains(t, r.play([]string{"reject", "shape", "0"}), "the refusal to change nothing")
	})
	t.Run("calls side by side", func(t *testing.T) {
		r := begun(t, "script w-0 create hang", "shape 1 w:1@img1")
		_, _ = r.fake.CreateLease(context.Background(), provisioning.CreateLeaseRequest{
			Key: provisioning.ExternalKey{Run: run, Node: "w-0", Attempt: 1}, Operation: provisioning.OperationID{Attempt: 1, Sequence: 1}})
		require.ErrorContains(t, r.play([]string{"trigger"}), "create 1/1 of w-0 started beside another call of attempt 1")
	})
}

// Setting the clock back stops the host's time and not the provider's, also
// where the file drives by hand.
func TestClockSetBack(t *testing.T) {
	require.NoError(t, Run("", text(
		"config drive=manual",
		"script w-0 create definite slow=10s",
		"shape 1 w:1@img1",
		"drive",
		"expect w-0 next=+1s",
		"jump -1h",
		"expect w-0 next=+1s",
		"advance 400ms",
		"expect w-0 next=+600ms",
		"advance 600ms",
		"expect w-0 next=+0s",
		"advance 500ms",
		"expect w-0 next=-500ms",
		"drive",
		"expect w-0 pending=create",
		"jump -1h",
		"advance 10s",
		"drive",
		"expect w-0 stage=Dormant",
		"expect gaps w-0 create 1500ms",
	), Options{}))
}

// By hand nothing runs but what pass and drive run; an event is there at once.
func TestManualDrive(t *testing.T) {
	require.NoError(t, Run("", text(
		"config drive=manual bootstrap=manual",
		"script w-0 start slow=5s",
		"shape 1 w:1@img1",
		"advance 1m",
		"expect attempts 0",
		"expect w-0 rule=insert",
		"pass",
		"pass",
		"expect w-0 pending=create",
		"expect calls w-0 create=0",
		"pass", // the call is made and answered, and the next step decided
		"expect calls w-0 create=1 start=0",
		"expect w-0 pending=start",
		"pass", // the start begins; there is nothing to decide
		"expect calls w-0 start=1",
		"advance 5s",
		"expect w-0 pending=start session=none", // answered, not delivered
		"event w-0 lost",
		"pass",
		"expect w-0 stage=Failed session=true pending=none", // the loss came first
		"drive",
		"expect w-0 stage=Destroyed",
	), Options{}))
}

// answer delivers what the provider has to say and decides nothing: what is
// reported after it finds the answer folded first.
func TestAnswerRunsNoPass(t *testing.T) {
	story := func(lines ...string) string {
		return text(append([]string{"config drive=manual bootstrap=manual", "script w-0 create hang", "shape 1 w:1@a", "pass", "trigger", "pass",
			"trigger", "pass", "release w-0 create ok"}, lines...)...)
	}
	require.NoError(t, Run("some.scn", story("answer", "expect w-0 pending=create", "event w-0 lost", "pass", "expect w-0 stage=Failed"), Options{}))
	require.NoError(t, Run("some.scn", story("event w-0 lost", "pass", "expect w-0 stage=EndpointKnown"), Options{}),
		"without it the loss comes before the machine and counts for nothing")
}
