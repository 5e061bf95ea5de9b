package provisioning

import (
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestEventTook: how long a thing took is told when it ends.
func TestEventTook(t *testing.T) {
	type ending struct {
		kind      EventKind
		operation OperationKind
		took      time.Duration
	}
	var ended []ending
	keep := func(e Event) {
		if e.Took != 0 || e.Kind == EventFold && e.Operation != NoOperation {
			ended = append(ended, ending{e.Kind, e.Operation, e.Took})
		}
	}
	s := dtTell(t, Config{OnEvent: keep}, dtGroup("w", 1, "v1"))
	s.drive()
	s.now = s.now.Add(3 * time.Second)
	s.end(CreateLease, ClassDefinite)
	s.now = s.now.Add(10 * time.Second)
	s.drive()
	s.now = s.now.Add(-time.Hour) // the driver's clock stands still
	s.end(CreateLease, ClassNone)
	s.now = s.now.Add(4 * time.Second)
	s.end(LookupEndpoint, ClassNone)
	s.now = s.now.Add(5 * time.Second)
	s.end(StartBootstrap, ClassNone)
	s.now = s.now.Add(time.Minute)
	s.say(Observation{Kind: SwactorJoined, Swactor: "agent"})
	s.now = s.now.Add(time.Second)
	s.end(BootstrapConvergenceObserved, ClassNone)
	s.now = s.now.Add(time.Hour)
	s.say(Observation{Kind: NodeLost})
	s.now = s.now.Add(2 * time.Second)
	s.end(DestroyLease, ClassNone)
	s.now = s.now.Add(7 * time.Second)
	s.end(CreateLease, ClassNone)
	toReady := (3 + 10 + 4 + 5 + 60 + 1) * time.Second
	require.Equal(t, []ending{
		{EventFold, CreateLease, 3 * time.Second},
		{EventFold, CreateLease, 0},
		{EventFold, LookupEndpoint, 4 * time.Second},
		{EventFold, StartBootstrap, 5 * time.Second},
		{EventFold, BootstrapConvergenceObserved, time.Second},
		{EventReady, NoOperation, toReady},
		{EventAttemptFailed, NoOperation, toReady + time.Hour},
		{EventFold, DestroyLease, 2 * time.Second},
		{EventDestroyed, NoOperation, toReady + time.Hour + 2*time.Second},
		{EventFold, CreateLease, 7 * time.Second},
	}, ended)

	// Of what began in an earlier life nothing is told.
	ended = nil
	state := s.d.Snapshot()
	d, err := newDriverFrom(state, dtShape(1, dtGroup("w", 1, "v1")), Config{OnEvent: keep})
	require.NoError(t, err)
	s = &dtStory{t: t, d: d, x: &dtExecutor{submitted: s.x.submitted}, now: s.now.Add(time.Second)}
	s.end(LookupEndpoint, ClassNone)
	s.now = s.now.Add(time.Second)
	s.end(StartBootstrap, ClassNone)
	s.say(Observation{Kind: BootstrapClosed})
	require.Equal(t, []ending{{EventFold, LookupEndpoint, 0}, {EventFold, StartBootstrap, time.Second}}, ended)
}

// TestEventClass: what the driver made of an answer, not what it was told; and of
// an observation that ends no operation, none.
func TestEventClass(t *testing.T) {
	var seen []Event
	s := dtTell(t, Config{OnEvent: func(e Event) {
		if e.Observation != nil {
			seen = append(seen, e)
		}
	}}, dtGroup("w", 1, "v1"))
	s.drive()
	e := dtLast(t, s.x, CreateLease)
	s.d.Deliver(dtCompleted(e, Completion{Operation: e.Operation, Kind: CreateLease}))
	s.d.Deliver(dtCompleted(e, dtFailed(e, ClassLeaseLost)))
	s.d.Deliver(Observation{Kind: NodeLost, Node: "w-0", Attempt: 1, Completion: dtFailed(e, ClassDefinite)})
	s.drive()
	require.Len(t, seen, 3)
	require.Equal(t, "Fold w-0#1 OperationCompleted CreateLease 1/1 Ambiguous", seen[0].String())
	require.Equal(t, ClassAmbiguous, seen[0].Class, "a success without a lease")
	require.Equal(t, ClassLeaseLost, seen[1].Class)
	require.Equal(t, "NotApplied w-0#1 OperationCompleted CreateLease 1/1 LeaseLost: not the pending operation", seen[1].String())
	require.Equal(t, "NotApplied w-0#1 NodeLost: no lease is held", seen[2].String())
}

// TestCollector counts what TestLogEventsTellsALife tells.
func TestCollector(t *testing.T) {
	var c Collector
	opStory(t, c.OnEvent)
	s := c.Statistics(ExecutorStats{Running: 2, RunningExpired: 1})
	require.Equal(t, AttemptStatistics{Started: 1, Failed: 1, Destroyed: 1}, s.Attempts)
	require.Equal(t, []uint64{1, 1, 1}, []uint64{s.UpdatesAccepted, s.UpdatesRefused, s.Faults})
	require.Equal(t, ExecutorStats{Running: 2, RunningExpired: 1}, s.Executor)
	for i, want := range []struct {
		dispatched, expired, givenUp uint64
		ended                        [failureClasses]uint64
	}{
		{2, 1, 0, [failureClasses]uint64{ClassNone: 1, ClassAmbiguous: 1}}, // CreateLease
		{2, 0, 0, [failureClasses]uint64{ClassNone: 1, ClassDefinite: 1}},  // LookupEndpoint
		{1, 0, 0, [failureClasses]uint64{ClassNone: 1}},                    // StartBootstrap
		{1, 0, 0, [failureClasses]uint64{ClassAmbiguous: 1}},               // BootstrapConvergenceObserved
		{1, 0, 1, [failureClasses]uint64{ClassDefinite: 1}},                // CancelBootstrap
		{1, 0, 0, [failureClasses]uint64{ClassNone: 1}},                    // DestroyLease
	} {
		o := s.Operations[i]
		require.Equal(t, OperationKind(i+1), o.Operation)
		require.Equal(t, want.dispatched, o.Dispatched, o.Operation)
		require.Equal(t, want.expired, o.Expired, o.Operation)
		require.Equal(t, want.givenUp, o.GivenUp, o.Operation)
		require.Zero(t, o.InFlight(), o.Operation)
		for class, count := range want.ended {
			require.Equal(t, FailureClass(class), o.Ended[class].Class)
			require.Equal(t, count, o.Ended[class].Count, "%v %v", o.Operation, FailureClass(class))
		}
	}
	create := s.Operations[CreateLease-1]
	require.Equal(t, 3*time.Second, create.Ended[ClassNone].Sum)
	require.Equal(t, 2*time.Minute, create.Ended[ClassAmbiguous].Max)
	for _, n := range s.NotApplied {
		want := uint64(0)
		if n.Reason == AnotherJoined {
			want = 1
		}
		require.Equal(t, want, n.Count, n.Reason)
	}
}

// TestCollectorUnused: what there is to count is listed before it is counted.
func TestCollectorUnused(t *testing.T) {
	var c Collector
	s := c.Statistics(ExecutorStats{})
	require.Len(t, s.Operations, 6)
	for _, o := range s.Operations {
		require.Len(t, o.Ended, 5)
		require.Zero(t, o.InFlight())
	}
	require.Len(t, s.NotApplied, len(notAppliedReasons))

	// The copy is the holder's own.
	s.Operations[0].Ended[0].Count, s.Operations[1].Dispatched, s.NotApplied[0].Count = 7, 7, 7
	again := c.Statistics(ExecutorStats{})
	require.Zero(t, again.Operations[0].Ended[0].Count)
	require.Zero(t, again.Operations[1].Dispatched)
	require.Zero(t, again.NotApplied[0].Count)

	// Late to the party: the end of what it has not seen begin.
	c.OnEvent(Event{Kind: EventFold, Operation: CreateLease})
	s = c.Statistics(ExecutorStats{})
	require.Zero(t, s.Operations[0].InFlight())
	// Kinds from nowhere are no index.
	c.OnEvent(Event{Kind: EventFold, Operation: operationKinds})
	c.OnEvent(Event{Kind: EventFold, Operation: CreateLease, Class: failureClasses})
	c.OnEvent(Event{Kind: EventDispatch})
	c.OnEvent(Event{Kind: EventGivenUp})
	require.Equal(t, s, c.Statistics(ExecutorStats{}))
}

// TestNotAppliedReasonsAreAllCounted: the list has every reason declared, in that
// order.
func TestNotAppliedReasonsAreAllCounted(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "observe.go", nil, 0)
	require.NoError(t, err)
	var declared []string
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok {
			if of, ok := spec.Type.(*ast.Ident); ok && of.Name == "NotAppliedReason" && spec.Values != nil {
				declared = append(declared, spec.Values[0].(*ast.BasicLit).Value)
			}
		}
		return true
	})
	var listed []string
	for _, reason := range notAppliedReasons {
		listed = append(listed, `"`+string(reason)+`"`)
	}
	require.NotEmpty(t, declared)
	require.Equal(t, declared, listed)
}

func TestDurations(t *testing.T) {
	bounds := DurationBounds()
	require.True(t, slices.IsSorted(bounds))
	var d Durations
	require.Zero(t, d.Mean())
	d.add(0)
	d.add(bounds[0])
	d.add(bounds[0] + 1)
	d.add(bounds[len(bounds)-1])
	d.add(bounds[len(bounds)-1] + 1)
	want := Durations{Count: 5, Sum: 2*bounds[0] + 1 + 2*bounds[len(bounds)-1] + 1, Max: bounds[len(bounds)-1] + 1}
	want.Buckets[0], want.Buckets[1], want.Buckets[len(bounds)-1], want.Buckets[len(bounds)] = 2, 1, 1, 1
	require.Equal(t, want, d)
	require.Equal(t, want.Sum/5, d.Mean())
	d.add(math.MaxInt64)
	require.Equal(t, time.Duration(math.MaxInt64), d.Sum, "it does not wrap")
	bounds[0] = 0
	require.NotZero(t, DurationBounds()[0])

	d = Durations{}
	d.add(5)
	d.add(3)
	d.add(4)
	require.Equal(t, []time.Duration{3, 5}, []time.Duration{d.Min, d.Max})
}

// TestCollectorWhileItCounts may be read.
func TestCollectorWhileItCounts(t *testing.T) {
	var c Collector
	d, x := dtDriver(t, Config{OnEvent: c.OnEvent}, dtGroup("w", 200, "v1")), &dtExecutor{}
	dtWorks(d, x)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			last := uint64(0)
			for {
				s := c.Statistics(ExecutorStats{})
				if s.Operations[0].Dispatched < last {
					t.Error("a count goes back")
				}
				last = s.Operations[0].Dispatched
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	dtDrive(t, d, dtStart, x)
	close(stop)
	readers.Wait()
	s := c.Statistics(ExecutorStats{})
	require.EqualValues(t, 200, s.Attempts.Ready.Count)
	require.EqualValues(t, 200, s.Operations[0].Ended[ClassNone].Count)
}

// TestProp_CollectorAgreesWithTheDriver: whatever happens, what is counted from
// events is what the driver counts itself and what its state says.
func TestProp_CollectorAgreesWithTheDriver(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := dtNewTwins(t)
		var c Collector
		w.real.events.hook, w.real.times = c.OnEvent, make(eventTimes)
		w.wander()

		stats, s := w.real.Stats(), c.Statistics(ExecutorStats{})
		var dispatched, expired, notApplied, inFlight, pending, alive uint64
		for _, o := range s.Operations {
			dispatched += o.Dispatched
			expired += o.Expired
			inFlight += o.InFlight()
			for _, e := range o.Ended {
				opCheckDurations(t, e.Durations)
			}
		}
		for _, n := range s.NotApplied {
			notApplied += n.Count
		}
		for n := range w.real.Snapshot().All() {
			if n.Pending != nil {
				pending++
			}
			if n.Record.Stage != StageDestroyed {
				alive++
			}
		}
		require.Equal(t, stats.Dispatched, dispatched)
		require.Equal(t, stats.Expired, expired)
		require.Equal(t, stats.NotApplied, notApplied)
		require.Equal(t, stats.Attempts, s.Attempts.Started)
		require.Equal(t, pending, inFlight)
		require.Equal(t, alive, s.Attempts.Started-s.Attempts.Destroyed)
		require.Len(t, w.real.times, int(alive), "nothing is kept of an attempt that is over (G12)")
		opCheckDurations(t, s.Attempts.Ready)
	})
}

func opCheckDurations(t require.TestingT, d Durations) {
	count := uint64(0)
	for _, n := range d.Buckets {
		count += n
	}
	require.Equal(t, d.Count, count)
	require.True(t, 0 <= d.Min && d.Min <= d.Mean() && d.Mean() <= d.Max && d.Max <= d.Sum, "%+v", d)
}
