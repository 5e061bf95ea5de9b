package provisioning

import (
	"errors"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestEventNames(t *testing.T) {
	require.Equal(t, EventResumed, EventKind(len(eventNames)-1), "the last event has the last name")
	seen := map[string]bool{}
	for kind := EventKind(1); kind < EventKind(len(eventNames)); kind++ {
		text, err := kind.MarshalText()
		require.NoError(t, err)
		require.Equal(t, kind.String(), string(text))
		require.False(t, seen[kind.String()])
		seen[kind.String()] = true
		var back EventKind
		require.NoError(t, back.UnmarshalText(text))
		require.Equal(t, kind, back)
	}
	var k EventKind
	require.Error(t, k.UnmarshalText([]byte("pass")))
	_, err := EventKind(len(eventNames)).MarshalText()
	require.Error(t, err)
	require.Equal(t, "unknown(200)", EventKind(200).String())
}

// dtRecorder keeps the events as lines.
type dtRecorder struct{ lines []string }

func (r *dtRecorder) hook(e Event) { r.lines = append(r.lines, e.String()) }

// take returns the lines so far and forgets them.
func (r *dtRecorder) take() string {
	lines := strings.Join(r.lines, "\n")
	r.lines = nil
	return lines
}

// dtLines makes comparable what is written as an indented block.
func dtLines(block string) string {
	lines := strings.Split(strings.TrimSpace(block), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "\n")
}

// TestEventsTellALife: what happens to a slot from its first pass to its last,
// in the order in which it happens.
func TestEventsTellALife(t *testing.T) {
	r := &dtRecorder{}
	s := dtTell(t, Config{OnEvent: r.hook}, dtGroup("w", 1, "v1"))
	s.drive()
	require.Equal(t, dtLines(`
		AttemptStarted w-0#1
		Pass generation 1
		Dispatch w-0#1 CreateLease 1/1 (R12 create-lease)
		Stage w-0#1 New -> LeaseRequested
		Pass generation 1`), r.take())
	s.end(CreateLease, ClassAmbiguous)
	require.Equal(t, dtLines(`
		Fold w-0#1 OperationCompleted CreateLease 1/1 Ambiguous
		Pass generation 1`), r.take())
	s.now, _ = s.d.RequeueAt()
	s.drive()
	s.end(CreateLease, ClassNone)
	require.Equal(t, dtLines(`
		Dispatch w-0#1 CreateLease 1/2 (R12 create-lease)
		Pass generation 1
		Fold w-0#1 OperationCompleted CreateLease 1/2
		Stage w-0#1 LeaseRequested -> LeaseCreated
		Dispatch w-0#1 LookupEndpoint 1/3 (R13 lookup-endpoint)
		Pass generation 1`), r.take())
	s.end(LookupEndpoint, ClassNone)
	s.say(Observation{Kind: SwactorJoined, Swactor: "agent"})
	s.end(StartBootstrap, ClassNone)
	require.Equal(t, dtLines(`
		Fold w-0#1 OperationCompleted LookupEndpoint 1/3
		Stage w-0#1 LeaseCreated -> EndpointKnown
		Dispatch w-0#1 StartBootstrap 1/4 (R16 start-bootstrap)
		Pass generation 1
		NotApplied w-0#1 SwactorJoined: held until its session is on record
		Pass generation 1
		Fold w-0#1 OperationCompleted StartBootstrap 1/4
		Stage w-0#1 EndpointKnown -> SwactorJoined
		Dispatch w-0#1 BootstrapConvergenceObserved 1/5 (R14 observe-convergence)
		Pass generation 1`), r.take())
	s.end(BootstrapConvergenceObserved, ClassNone)
	require.Equal(t, dtLines(`
		Fold w-0#1 OperationCompleted BootstrapConvergenceObserved 1/5
		Stage w-0#1 SwactorJoined -> Dormant
		Ready w-0#1
		Pass generation 1`), r.take())
	s.say(Observation{Kind: NodeLost, Reason: "spot"})
	require.Equal(t, dtLines(`
		Fold w-0#1 NodeLost
		Stage w-0#1 Dormant -> Failed
		AttemptFailed w-0#1: the node was lost: spot
		Deleting w-0#1: the node was lost: spot
		Pass generation 1
		Dispatch w-0#1 DestroyLease 1/6 (R8 destroy-lease)
		Pass generation 1`), r.take())
	s.now = s.now.Add(DefaultOperationTimeout)
	s.drive()
	require.Equal(t, dtLines(`
		Fold w-0#1 OperationCompleted DestroyLease 1/6 Ambiguous
		Pass generation 1`), r.take(), "an operation that expired is folded as one that ended")
	s.now, _ = s.d.RequeueAt()
	s.drive()
	s.end(DestroyLease, ClassNone)
	require.Equal(t, dtLines(`
		Dispatch w-0#1 DestroyLease 1/7 (R8 destroy-lease)
		Pass generation 1
		Fold w-0#1 OperationCompleted DestroyLease 1/7
		Destroyed w-0#1
		Stage w-0#1 Failed -> Destroyed
		Pass generation 1
		AttemptStarted w-0#2
		Stage w-0#2 Destroyed -> New
		Pass generation 1
		Dispatch w-0#2 CreateLease 2/1 (R12 create-lease)
		Stage w-0#2 New -> LeaseRequested
		Pass generation 1`), r.take())
	s.d.Deliver(dtCompleted(dtLast(t, s.x, CreateLease), dtFailed(dtLast(t, s.x, CreateLease), ClassDefinite)))
	require.ErrorIs(t, s.d.UpdateDesired(dtShape(0)), ErrGenerationRegressed)
	s.update()
	s.drive()
	require.Equal(t, dtLines(`
		UpdateRefused generation 0: provisioning: generation is lower than the accepted one: 0 after 1
		UpdateAccepted generation 2
		Fold w-0#2 OperationCompleted CreateLease 2/1 Definite
		Deleting w-0#2
		Pass generation 2
		Destroyed w-0#2
		Stage w-0#2 LeaseRequested -> Destroyed
		Pass generation 2
		Reaped w-0#2
		Pass generation 2`), r.take())
}

// TestEventFields for machines: those that a line does not show.
func TestEventFields(t *testing.T) {
	var events []Event
	var seen []Observation
	s := dtTell(t, Config{FirstAttempt: math.MaxUint64 - 1, OnEvent: func(e Event) {
		events = append(events, e)
		if e.Observation != nil {
			seen = append(seen, *e.Observation)
		}
	}}, dtGroup("w", 2, "v1"))
	s.drive()
	for _, e := range events {
		require.Equal(t, dtStart, e.At)
	}
	require.Equal(t, Event{Kind: EventDispatch, At: dtStart, Node: "w-0", Attempt: math.MaxUint64 - 1, Rule: Ladder()[12],
		Operation: CreateLease, OperationID: OperationID{math.MaxUint64 - 1, 1}}, events[3])
	fault := events[1]
	require.Equal(t, "Fault w-1#0: provisioning: attempt numbers are exhausted", fault.String())
	require.Equal(t, Ladder()[0], fault.Rule)

	e := dtLast(t, s.x, CreateLease)
	delivered := dtCompleted(e, dtSuccess(e))
	s.d.Deliver(delivered)
	s.d.Deliver(delivered)
	s.drive()
	require.Equal(t, []Observation{delivered, delivered}, seen, "the fold and the one that is not applied")

	// In the driver's clock, whatever the host's says.
	events = nil
	s.now = s.now.Add(-time.Hour)
	s.d.Trigger()
	s.drive()
	require.Equal(t, dtStart, events[0].At)
}

// TestEventsOfRefusal: what was recorded and refused is told as both.
func TestEventsOfRefusal(t *testing.T) {
	r := &dtRecorder{}
	s := dtTell(t, Config{OnEvent: r.hook}, dtGroup("w", 1, "v1"))
	s.x.submit = func(Effect) (bool, error) { return false, errors.New("no") }
	s.pass()
	r.take()
	s.pass()
	require.Equal(t, dtLines(`
		Dispatch w-0#1 CreateLease 1/1 (R12 create-lease)
		Stage w-0#1 New -> LeaseRequested
		Fold w-0#1 OperationCompleted CreateLease 1/1 NotStarted
		Pass generation 1`), r.take())
}

// TestEventBeforeEffect: an operation is told of before it is submitted, so that
// a log is never behind the world.
func TestEventBeforeEffect(t *testing.T) {
	var order []string
	s := dtTell(t, Config{OnEvent: func(e Event) {
		if e.Kind == EventDispatch {
			order = append(order, "told "+e.OperationID.String())
		}
	}}, dtGroup("w", 2, "v1"))
	s.x.submit = func(e Effect) (bool, error) {
		order = append(order, "done "+e.Operation.String())
		return false, nil
	}
	s.drive()
	require.Equal(t, []string{"told 1/1", "told 2/1", "done 1/1", "done 2/1"}, order)
}

// TestHookThatPanics, at every event, harms nothing and is counted.
func TestHookThatPanics(t *testing.T) {
	run := func(hook func(Event)) (*ClusterDriver, *dtExecutor) {
		d, x := dtDriver(t, Config{OnEvent: hook}, dtGroup("w", 3, "v1")), &dtExecutor{}
		dtWorks(d, x)
		dtDrive(t, d, dtStart, x)
		require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v2"))))
		dtDrive(t, d, dtStart, x)
		return d, x
	}
	quiet, x := run(nil)
	events := uint64(0)
	loud, y := run(func(Event) { events++; panic("hook") })
	require.Equal(t, dtJSON(t, quiet.Snapshot()), dtJSON(t, loud.Snapshot()))
	require.Equal(t, len(x.submitted), len(y.submitted))
	require.NotZero(t, events)
	require.Equal(t, events, loud.Stats().HookPanics)
	require.Zero(t, quiet.Stats().HookPanics)
	require.True(t, loud.Converged(2))
}

// TestHookThatEndsItsGoroutine, wherever that is: the driver is free again, and
// the next pass makes up for what the one that was cut short did not do.
func TestHookThatEndsItsGoroutine(t *testing.T) {
	// How many events there are is known after a life without trouble.
	life := func(hook func(Event)) (*ClusterDriver, int) {
		d, x := dtDriver(t, Config{OnEvent: hook}, dtGroup("w", 2, "v1")), &dtExecutor{}
		now, looks := dtStart, 0
		drive := func() {
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, _ = d.DriveUntilBlocked(now, x)
			}()
			<-done
			require.NoError(t, d.Snapshot().Check())
		}
		dtWorks(d, x)
		for !d.Converged(1) {
			looks++
			require.Less(t, looks, 20)
			drive()
			if at, ok := d.RequeueAt(); ok && !d.triggered {
				now = at
			}
		}
		return d, len(x.submitted)
	}
	events := 0
	quiet, calls := life(func(Event) { events++ })
	require.NotZero(t, events)
	for fatal := range events {
		told := 0
		d, again := life(func(Event) {
			if told++; told == fatal+1 {
				runtime.Goexit()
			}
		})
		require.EqualValues(t, 1, d.Stats().HookPanics)
		require.GreaterOrEqual(t, again, calls)
		require.Equal(t, quiet.Snapshot().Len(), d.Snapshot().Len())
		dtCheckLaw(t, d)
	}
}

// TestHookMayCallTheDriver: what it causes comes after what it is told of, one
// event at a time.
func TestHookMayCallTheDriver(t *testing.T) {
	var d *ClusterDriver
	r := &dtRecorder{}
	inside := false
	d = dtDriver(t, Config{OnEvent: func(e Event) {
		require.False(t, inside, "one event at a time")
		inside = true
		defer func() { inside = false }()
		r.hook(e)
		if e.Kind == EventAttemptStarted {
			require.NoError(t, d.UpdateDesired(dtShape(2)))
			d.Trigger()
			d.Stats()
			d.Snapshot()
		}
	}}, dtGroup("w", 1, "v1"))
	_, err := d.DriveNext(dtStart, &dtExecutor{})
	require.NoError(t, err)
	require.Equal(t, dtLines(`
		AttemptStarted w-0#1
		UpdateAccepted generation 2
		Pass generation 1`), r.take())

	// Out of a pass it may even drive; the events of that pass wait for it.
	d = dtDriver(t, Config{OnEvent: func(e Event) {
		r.hook(e)
		if e.Kind == EventUpdateAccepted {
			_, err := d.DriveNext(dtStart, &dtExecutor{})
			require.NoError(t, err)
			r.lines = append(r.lines, "driven")
		}
	}})
	require.NoError(t, d.UpdateDesired(dtShape(2)))
	require.Equal(t, "UpdateAccepted generation 2\ndriven\nPass generation 2", r.take())
}

// TestEventsOfManyGoroutines come one at a time, all of them.
func TestEventsOfManyGoroutines(t *testing.T) {
	var mu sync.Mutex
	told := map[string]int{}
	hook := func(e Event) {
		if !mu.TryLock() {
			t.Error("two events at once")
			return
		}
		defer mu.Unlock()
		told[e.String()]++
	}
	d := dtDriver(t, Config{OnEvent: hook})
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			for range 20 {
				if err := d.UpdateDesired(dtShape(1)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	require.Equal(t, map[string]int{"UpdateAccepted generation 1": 400}, told)
}

// TestUpdatesAreToldInTheirOrder: of two that are accepted, the later is told
// later, whatever goroutines they come from.
func TestUpdatesAreToldInTheirOrder(t *testing.T) {
	var last uint64
	d := dtDriver(t, Config{OnEvent: func(e Event) {
		if e.Kind != EventUpdateAccepted {
			return
		}
		if e.Generation <= last {
			t.Errorf("generation %d is told after %d", e.Generation, last)
		}
		last = e.Generation
	}})
	var next atomic.Uint64
	next.Store(1)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 2000 {
				if err := d.UpdateDesired(dtShape(next.Add(1))); err != nil && !errors.Is(err, ErrGenerationRegressed) {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	require.Equal(t, d.Generation(), last)
}

// TestNoHookNoEvents: without a hook nothing is gathered.
func TestNoHookNoEvents(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 3, "v1")), &dtExecutor{}
	d.Deliver(Observation{Kind: NodeLost, Node: "gone"})
	dtDrive(t, d, dtStart, x)
	require.Nil(t, d.notes)
	require.Nil(t, d.events.waiting)
	d.events.add(Event{Kind: EventPass})
	d.events.handOut()
	require.Nil(t, d.events.waiting)
}
