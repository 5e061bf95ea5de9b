package provisioning

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"maps"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// opLog returns a logger that writes lines of text, without the wall time and
// with what the driver's clock says since its start.
func opLog(level slog.Level) (*slog.Logger, *bytes.Buffer) {
	var out bytes.Buffer
	return slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		switch a.Key {
		case slog.TimeKey:
			return slog.Attr{}
		case "at":
			return slog.Duration("at", a.Value.Time().Sub(dtStart))
		}
		return a
	}})), &out
}

// opSecret stands in every field of a group that may hold one.
const opSecret = "hunter2"

// opStory drives one slot through everything that can be told of: a create that
// expires, a probe, a bootstrap with a second agent, a loss, a cancel that is
// given up, refusals, and a slot that cannot begin.
func opStory(t *testing.T, hook func(Event)) *dtStory {
	w := dtGroup("w", 1, "v1")
	w.Boot = BootSpec{Env: map[string]string{"TOKEN": opSecret}, Args: []string{opSecret}, StartSwactorCommand: "run " + opSecret, VerifyCommands: []string{opSecret}}
	w.SwarmJoin.JoinTokenRef = opSecret
	w.Shape.ProviderLabels = map[string]string{"x": opSecret}
	s := dtTell(t, Config{OnEvent: hook, Retry: RetryPolicy{CancelLimit: 1}, FirstAttempt: ^NodeAttemptID(0) - 1}, w)
	s.drive()
	s.now = s.now.Add(DefaultOperationTimeout)
	s.drive() // the create expires
	s.now, _ = s.d.RequeueAt()
	s.drive()
	s.now = s.now.Add(3 * time.Second)
	s.end(CreateLease, ClassNone)
	e := dtLast(t, s.x, LookupEndpoint)
	s.d.Deliver(dtCompleted(e, FailedCompletion(e.Operation, e.Kind, RetryAfter(errors.New("slow down"), 20*time.Second))))
	s.drive()
	s.now, _ = s.d.RequeueAt()
	s.drive()
	s.end(LookupEndpoint, ClassNone)
	s.end(StartBootstrap, ClassNone)
	s.say(Observation{Kind: BootstrapProgress, Stage: BootstrapStageSSHReady})
	s.say(Observation{Kind: SwactorJoined, Swactor: "agent"})
	s.say(Observation{Kind: SwactorJoined, Swactor: "intruder"})
	s.end(BootstrapConvergenceObserved, ClassAmbiguous)
	s.say(Observation{Kind: BootstrapFailed, Reason: "cut off"})
	s.end(CancelBootstrap, ClassDefinite)
	s.now = s.now.Add(time.Minute)
	s.end(DestroyLease, ClassNone) // and there is no number for another attempt
	require.ErrorIs(t, s.d.UpdateDesired(dtShape(0)), ErrGenerationRegressed)
	s.update()
	s.drive()
	return s
}

// TestLogEventsTellsALife: what a log at each level says.
func TestLogEventsTellsALife(t *testing.T) {
	logger, out := opLog(slog.LevelInfo)
	opStory(t, LogEvents(logger))
	max := "18446744073709551614"
	require.Equal(t, dtLines(strings.ReplaceAll(`
		level=INFO msg=AttemptStarted node=w-0 attempt=MAX at=0s
		level=INFO msg=Fold node=w-0 attempt=MAX operation=CreateLease operation_id=MAX/1 observation=OperationCompleted class=Ambiguous expired=true error="no answer" took=2m0s at=2m0s
		level=INFO msg=Fold node=w-0 attempt=MAX operation=LookupEndpoint operation_id=MAX/3 observation=OperationCompleted class=Definite retry_after=20s error="slow down" at=2m4s
		level=INFO msg=Fold node=w-0 attempt=MAX operation=BootstrapConvergenceObserved operation_id=MAX/6 observation=OperationCompleted class=Ambiguous error=boom at=2m24s
		level=WARN msg=AttemptFailed node=w-0 attempt=MAX took=2m24s reason="the bootstrap failed: cut off" at=2m24s
		level=INFO msg=Deleting node=w-0 attempt=MAX reason="the bootstrap failed: cut off" at=2m24s
		level=INFO msg=Fold node=w-0 attempt=MAX operation=CancelBootstrap operation_id=MAX/7 observation=OperationCompleted class=Definite error=boom at=2m24s
		level=WARN msg=GivenUp node=w-0 attempt=MAX operation=CancelBootstrap reason="it failed as often as CancelLimit allows; the machine is destroyed without it" at=2m24s
		level=INFO msg=Destroyed node=w-0 attempt=MAX took=3m24s at=3m24s
		level=ERROR msg=Fault node=w-0 attempt=MAX rule="R2 restart" error="provisioning: attempt numbers are exhausted" at=3m24s
		level=WARN msg=UpdateRefused error="provisioning: generation is lower than the accepted one: 0 after 1" at=3m24s
		level=INFO msg=UpdateAccepted generation=2 at=3m24s
		level=INFO msg=Reaped node=w-0 attempt=MAX at=3m24s`, "MAX", max)), strings.TrimSpace(out.String()))

	logger, out = opLog(slog.LevelDebug)
	opStory(t, LogEvents(logger))
	for _, line := range []string{
		`level=DEBUG msg=Dispatch node=w-0 attempt=MAX operation=CreateLease operation_id=MAX/2 rule="R12 create-lease" at=2m1s`,
		`level=DEBUG msg=Fold node=w-0 attempt=MAX operation=CreateLease operation_id=MAX/2 observation=OperationCompleted lease=l-MAX took=3s at=2m4s`,
		`level=DEBUG msg=Fold node=w-0 attempt=MAX operation=LookupEndpoint operation_id=MAX/4 observation=OperationCompleted endpoint=10.0.0.1:22 at=2m24s`,
		`level=DEBUG msg=Fold node=w-0 attempt=MAX operation=StartBootstrap operation_id=MAX/5 observation=OperationCompleted session=s-MAX at=2m24s`,
		`level=DEBUG msg=Fold node=w-0 attempt=MAX observation=BootstrapProgress session=s-MAX bootstrap=SSHReady at=2m24s`,
		`level=DEBUG msg=NotApplied node=w-0 attempt=MAX observation=SwactorJoined session=s-MAX swactor=intruder reason="another agent joined first" at=2m24s`,
		`level=DEBUG msg=Stage node=w-0 attempt=MAX from=SwactorJoined to=Failed at=2m24s`,
		`level=DEBUG msg=Pass generation=2 at=3m24s`,
	} {
		require.Contains(t, out.String(), strings.ReplaceAll(line, "MAX", max)+"\n")
	}
}

// TestLogEventsLevels of every kind. A new kind has to be thought about.
func TestLogEventsLevels(t *testing.T) {
	want := map[EventKind]slog.Level{
		EventPass: slog.LevelDebug, EventFold: slog.LevelDebug, EventNotApplied: slog.LevelDebug, EventDispatch: slog.LevelDebug,
		EventStage: slog.LevelDebug, EventAttemptStarted: slog.LevelInfo, EventAttemptFailed: slog.LevelWarn, EventReady: slog.LevelInfo,
		EventDeleting: slog.LevelInfo, EventGivenUp: slog.LevelWarn, EventDestroyed: slog.LevelInfo, EventReaped: slog.LevelInfo,
		EventUpdateAccepted: slog.LevelInfo, EventUpdateRefused: slog.LevelWarn, EventFault: slog.LevelError,
		EventPaused: slog.LevelInfo, EventResumed: slog.LevelInfo,
	}
	for kind := EventKind(1); kind < EventKind(len(eventNames)); kind++ {
		level, known := want[kind]
		require.True(t, known, kind)
		require.Equal(t, level, (&Event{Kind: kind}).level(), kind)
	}
	require.Equal(t, slog.LevelInfo, (&Event{Kind: EventFold, Class: ClassDefinite}).level())
	require.Equal(t, slog.LevelDebug, (&Event{Kind: EventNotApplied, Class: ClassDefinite}).level())
}

// TestLogEventsKeys: the table in the comment lists the keys that are logged, and
// no others.
func TestLogEventsKeys(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "eventlog.go", nil, parser.ParseComments)
	require.NoError(t, err)
	documented := map[string]bool{}
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Name.Name == "LogEvents" {
			for _, row := range regexp.MustCompile(`(?m)^\t([a-z_]+) +\S`).FindAllStringSubmatch(f.Doc.Text(), -1) {
				documented[row[1]] = true
			}
		}
	}

	var out bytes.Buffer
	logger := slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	opStory(t, LogEvents(logger))
	logged := map[string]bool{}
	for line := range strings.Lines(out.String()) {
		var record map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &record))
		for key := range record {
			logged[key] = true
		}
	}
	for _, builtin := range []string{slog.TimeKey, slog.LevelKey, slog.MessageKey} {
		delete(logged, builtin)
	}
	require.Equal(t, slices.Sorted(maps.Keys(documented)), slices.Sorted(maps.Keys(logged)))
}

// TestLogEventsKeepsSecrets: nothing of a spec is logged.
func TestLogEventsKeepsSecrets(t *testing.T) {
	var out bytes.Buffer
	opStory(t, LogEvents(slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug, AddSource: true}))))
	require.NotEmpty(t, out.String())
	require.NotContains(t, out.String(), opSecret)
}

// TestLogEventsBelowTheLevel costs nothing.
func TestLogEventsBelowTheLevel(t *testing.T) {
	logger, out := opLog(slog.LevelError + 1)
	hook := LogEvents(logger)
	var events []Event
	opStory(t, func(e Event) { events = append(events, e) })
	require.NotEmpty(t, events)
	require.Zero(t, testing.AllocsPerRun(10, func() {
		for _, e := range events {
			hook(e)
		}
	}))
	require.Empty(t, out.String())
}

// TestLogEventsDefault: without a logger it is the one of slog.
func TestLogEventsDefault(t *testing.T) {
	logger, out := opLog(slog.LevelInfo)
	was := slog.Default()
	defer slog.SetDefault(was)
	slog.SetDefault(logger)
	LogEvents(nil)(Event{Kind: EventReady, Node: "w-0"})
	require.Equal(t, "level=INFO msg=Ready node=w-0\n", out.String())
}

func TestJoinEvents(t *testing.T) {
	require.Nil(t, JoinEvents())
	require.Nil(t, JoinEvents(nil, nil))
	var told []string
	hook := func(name string) func(Event) {
		return func(e Event) { told = append(told, name+" "+e.Kind.String()) }
	}
	JoinEvents(nil, hook("a"), nil)(Event{Kind: EventPass})
	require.Equal(t, []string{"a Pass"}, told)

	told = nil
	JoinEvents(hook("a"), nil, hook("b"), hook("c"))(Event{Kind: EventReady})
	require.Equal(t, []string{"a Ready", "b Ready", "c Ready"}, told)

	// One that fails keeps nothing from the others, and is no secret.
	told = nil
	require.PanicsWithValue(t, "mine", func() {
		JoinEvents(hook("a"), func(Event) { panic("mine") }, hook("c"))(Event{Kind: EventReady})
	})
	require.Equal(t, []string{"a Ready", "c Ready"}, told)
	told = nil
	done := make(chan struct{})
	go func() {
		defer close(done)
		JoinEvents(func(Event) { runtime.Goexit() }, hook("b"))(Event{Kind: EventReady})
	}()
	<-done
	require.Equal(t, []string{"b Ready"}, told)

	joined := JoinEvents(func(Event) {}, func(Event) {}, func(Event) {})
	require.Zero(t, testing.AllocsPerRun(100, func() { joined(Event{Kind: EventPass}) }))
}

// opProber is one slot whose endpoint is asked for again and again: a dispatch
// and a fold in each round.
func opProber(t require.TestingT, hook func(Event)) (round func()) {
	d, err := NewClusterDriver(dtShape(1, dtGroup("w", 1, "v1")), Config{OnEvent: hook, Retry: RetryPolicy{EndpointTimeout: -1}})
	require.NoError(t, err)
	x := &opExecutor{}
	now := dtStart
	drive := func() {
		if _, err := d.DriveUntilBlocked(now, x); err != nil {
			panic(err)
		}
	}
	answer := func(c Completion) {
		c.Operation, c.Kind = x.last.Operation, x.last.Kind
		d.Deliver(Observation{Kind: OperationCompleted, Node: "w-0", Attempt: 1, Completion: c})
		drive()
	}
	drive()
	answer(Completion{Lease: "lease"})
	require.Equal(t, LookupEndpoint, x.last.Kind)
	return func() {
		before := x.last.Operation
		answer(Completion{}) // not yet
		now = now.Add(DefaultEndpointProbeInterval)
		drive()
		if x.last.Operation == before {
			panic("nothing was dispatched")
		}
	}
}

// opExecutor keeps the last effect and nothing else.
type opExecutor struct{ last Effect }

func (x *opExecutor) Submit(e Effect) (bool, error) { x.last = e; return false, nil }
func (x *opExecutor) Expire(id OperationID) Completion {
	panic(fmt.Sprintf("%v expires", id))
}
func (x *opExecutor) Retire(NodeAttemptID)   {}
func (x *opExecutor) Running() []RunningCall { return nil }

// TestNoHookNoCost: a driver that nobody listens to allocates nothing to fold, to
// decide and to dispatch, or to find nothing to do.
func TestNoHookNoCost(t *testing.T) {
	round := opProber(t, nil)
	require.Zero(t, testing.AllocsPerRun(200, round))
	require.NotZero(t, testing.AllocsPerRun(200, opProber(t, func(Event) {})), "the test sees what events cost")
}

// BenchmarkHook: a dispatch, a fold and three passes, without a hook and with
// each of those in this package.
func BenchmarkHook(b *testing.B) {
	quiet := slog.New(slog.NewTextHandler(new(bytes.Buffer), &slog.HandlerOptions{Level: slog.LevelWarn}))
	for _, c := range []struct {
		name string
		hook func(Event)
	}{
		{"none", nil},
		{"empty", func(Event) {}},
		{"collector", new(Collector).OnEvent},
		{"log=disabled", LogEvents(quiet)},
		{"log=discarded", LogEvents(slog.New(opDiscard{}))},
		{"joined", JoinEvents(new(Collector).OnEvent, LogEvents(quiet))},
	} {
		b.Run(c.name, func(b *testing.B) {
			round := opProber(b, c.hook)
			b.ReportAllocs()
			for b.Loop() {
				round()
			}
		})
	}
}

// opDiscard is a handler that takes everything and keeps nothing.
type opDiscard struct{}

func (opDiscard) Enabled(context.Context, slog.Level) bool  { return true }
func (opDiscard) Handle(context.Context, slog.Record) error { return nil }
func (d opDiscard) WithAttrs([]slog.Attr) slog.Handler      { return d }
func (d opDiscard) WithGroup(string) slog.Handler           { return d }
