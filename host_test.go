package provisioning

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// htBackend rents machines in memory, one for each key, and a bootstrap joins
// at once.
type htBackend struct {
	mu      sync.Mutex
	on      map[OperationKind]htCall
	live    map[ExternalKey]bool
	sinks   map[LogicalNodeID]BootstrapSink
	calls   []string
	created int
}

// htCall takes the place of a call. do has the effect of the call.
type htCall func(ctx context.Context, do func()) error

func newHtBackend() *htBackend {
	return &htBackend{on: map[OperationKind]htCall{}, live: map[ExternalKey]bool{}, sinks: map[LogicalNodeID]BootstrapSink{}}
}

// first lets the first calls of a kind go as given, the later ones well.
func (b *htBackend) first(kind OperationKind, calls ...htCall) {
	b.on[kind] = func(ctx context.Context, do func()) error {
		b.mu.Lock()
		var call htCall
		if len(calls) > 0 {
			call, calls = calls[0], calls[1:]
		}
		b.mu.Unlock()
		if call != nil {
			return call(ctx, do)
		}
		do()
		return nil
	}
}

func (b *htBackend) call(ctx context.Context, kind OperationKind, key ExternalKey, effect func()) error {
	do := func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		effect()
	}
	b.mu.Lock()
	b.calls = append(b.calls, fmt.Sprintf("%v %s#%d", kind, key.Node, key.Attempt))
	on := b.on[kind]
	b.mu.Unlock()
	if on != nil {
		return on(ctx, do)
	}
	do()
	return nil
}

// counts returns how many machines there are and how many there ever were.
func (b *htBackend) counts() (live, created int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.live), b.created
}

func (b *htBackend) called(call string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, c := range b.calls {
		if c == call {
			n++
		}
	}
	return n
}

func (b *htBackend) sink(node LogicalNodeID) BootstrapSink {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sinks[node]
}

func htLease(key ExternalKey) ProviderLeaseID { return ProviderLeaseID("lease of " + key.Node) }

func (b *htBackend) CreateLease(ctx context.Context, req CreateLeaseRequest) (CreateLeaseResult, error) {
	err := b.call(ctx, CreateLease, req.Key, func() {
		if !b.live[req.Key] {
			b.live[req.Key] = true
			b.created++
		}
	})
	return CreateLeaseResult{Lease: htLease(req.Key), Endpoint: &SSHEndpoint{Host: "h", Port: 22}}, err
}

func (b *htBackend) LookupEndpoint(context.Context, LookupEndpointRequest) (LookupEndpointResult, error) {
	return LookupEndpointResult{}, Definite(errors.New("every create says the endpoint"))
}

func (b *htBackend) StartBootstrap(ctx context.Context, req StartBootstrapRequest) (StartBootstrapResult, error) {
	session := BootstrapSessionID("session of " + req.Key.Node)
	err := b.call(ctx, StartBootstrap, req.Key, func() { b.sinks[req.Key.Node] = req.Sink })
	if err == nil {
		req.Sink.Joined(session, "agent")
	}
	return StartBootstrapResult{Session: session}, err
}

func (b *htBackend) BootstrapConvergenceObserved(ctx context.Context, req BootstrapConvergenceObservedRequest) error {
	return b.call(ctx, BootstrapConvergenceObserved, req.Key, func() {})
}

func (b *htBackend) CancelBootstrap(ctx context.Context, req CancelBootstrapRequest) error {
	return b.call(ctx, CancelBootstrap, req.Key, func() {})
}

func (b *htBackend) DestroyLease(ctx context.Context, req DestroyLeaseRequest) error {
	return b.call(ctx, DestroyLease, req.Key, func() { delete(b.live, req.Key) })
}

// Calls that go wrong.

var errHt = errors.New("test: it broke")

func htRefused(context.Context, func()) error { return Definite(errHt) }

// htUntilCancelled has its effect and then blocks on ctx, as a call does whose
// answer is lost.
func htUntilCancelled(ctx context.Context, do func()) error {
	do()
	<-ctx.Done()
	return fmt.Errorf("test: %w", ctx.Err())
}

// htUntil has its effect and answers well once release is closed, whatever ctx
// says.
func htUntil(release <-chan struct{}) htCall {
	return func(_ context.Context, do func()) error {
		do()
		<-release
		return nil
	}
}

// htClock is the machine's clock and remembers until when it was last asked to
// sleep, and how often.
type htClock struct {
	systemClock
	mu     sync.Mutex
	until  time.Time
	sleeps int
}

func (c *htClock) Sleep(ctx context.Context, until time.Time, wake <-chan struct{}) {
	c.mu.Lock()
	c.until = until
	c.sleeps++
	c.mu.Unlock()
	c.systemClock.Sleep(ctx, until, wake)
}

func (c *htClock) armed() (until time.Time, sleeps int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.until, c.sleeps
}

// htEvents remembers events.
type htEvents struct {
	mu   sync.Mutex
	seen []Event
}

func (e *htEvents) add(event Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen = append(e.seen, event)
}

// of returns when events of a kind came, since start.
func (e *htEvents) of(kind EventKind, start time.Time) (at []time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, event := range e.seen {
		if event.Kind == kind {
			at = append(at, event.At.Sub(start.UTC().Round(0)))
		}
	}
	return at
}

func htShape(generation uint64, count int) ClusterShape {
	return shapeOf(generation, groupOf("w", count))
}

func htKey(index int, attempt NodeAttemptID) ExternalKey {
	return ExternalKey{Run: htShape(1, 0).RunID, Node: NewLogicalNodeID("w", index), Attempt: attempt}
}

func htHeld(key ExternalKey) HeldSlot { return HeldSlot{Key: key, Lease: htLease(key)} }

func htHost(t *testing.T, backend EffectBackend, count int, change ...func(*HostConfig)) *Host {
	t.Helper()
	config := HostConfig{Shape: htShape(1, count), Backend: backend}
	for _, c := range change {
		c(&config)
	}
	h, err := NewHost(config)
	require.NoError(t, err)
	return h
}

// htRun is a call that runs on a goroutine of its own.
type htRun struct {
	cancel context.CancelCauseFunc
	result chan error
}

func htGo(call func(ctx context.Context) error) htRun {
	ctx, cancel := context.WithCancelCause(context.Background())
	r := htRun{cancel, make(chan error, 1)}
	go func() { r.result <- call(ctx) }()
	return r
}

func (r htRun) stop() error {
	r.cancel(nil)
	return <-r.result
}

// ended reports whether the call has returned; the test is in a bubble.
func (r htRun) ended() bool {
	synctest.Wait()
	return len(r.result) > 0
}

// htBubble runs a test in virtual time, which passes only while everything
// waits, and sees to it that no goroutine is left. One that is blocked for good
// makes the bubble panic.
func htBubble(t *testing.T, test func(t *testing.T, start time.Time)) {
	t.Helper()
	before := runtime.NumGoroutine()
	synctest.Test(t, func(t *testing.T) { test(t, time.Now()) })
	htNoGoroutineLeft(t, before)
}

// htNoGoroutineLeft waits until as many goroutines as before are there: one
// counts until the runtime has quite done with it.
func htNoGoroutineLeft(t *testing.T, before int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; runtime.Gosched() {
		require.True(t, time.Now().Before(deadline), "goroutines are left")
	}
}

func htRequireHeld(t *testing.T, err error, want ...HeldSlot) *HeldError {
	t.Helper()
	held, ok := errors.AsType[*HeldError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, want, held.Held)
	return held
}

func TestHostConverges(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		h := htHost(t, b, 3)
		require.Empty(t, b.calls, "nothing runs before Run")
		run := htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		require.Zero(t, time.Since(start), "nothing had to be waited for")
		live, created := b.counts()
		require.Equal(t, [2]int{3, 3}, [2]int{live, created})

		err := run.stop()
		require.ErrorIs(t, err, context.Canceled)
		htRequireHeld(t, err, htHeld(htKey(0, 1)), htHeld(htKey(1, 2)), htHeld(htKey(2, 3)))
		held, err := h.Close(context.Background())
		require.NoError(t, err)
		require.Equal(t, h.Held(), held)
		require.Len(t, held, 3)
	})
}

// The whole of it on the machine's clock and with real timers, which the lost
// answers arm.
func TestHostInRealTime(t *testing.T) {
	before := runtime.NumGoroutine()
	b := newHtBackend()
	lost := func(_ context.Context, do func()) error {
		do()
		return Ambiguous(errHt)
	}
	b.first(CreateLease, lost, lost, lost)
	b.first(DestroyLease, htRefused)
	h := htHost(t, b, 2, func(c *HostConfig) { c.Retry = RetryPolicy{InitialDelay: time.Millisecond, MaxDelay: time.Millisecond} })
	run := htGo(h.Run)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, h.WaitConverged(ctx, 1))
	require.NoError(t, h.Drain(ctx))
	live, created := b.counts()
	require.Equal(t, [2]int{0, 2}, [2]int{live, created})
	require.NoError(t, run.stop(), "nothing is held")
	held, err := h.Close(ctx)
	require.NoError(t, err)
	require.Empty(t, held)
	htNoGoroutineLeft(t, before)
}

func TestHostUpdateWakesAtOnce(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		h := htHost(t, b, 3)
		run := htGo(h.Run)
		time.Sleep(7 * time.Second)
		require.NoError(t, h.UpdateDesired(htShape(2, 1)))
		require.NoError(t, h.WaitConverged(context.Background(), 2))
		require.Equal(t, 7*time.Second, time.Since(start))
		live, _ := b.counts()
		require.Equal(t, 1, live)

		require.ErrorIs(t, h.UpdateDesired(htShape(1, 3)), ErrGenerationRegressed)
		require.ErrorIs(t, h.UpdateDesired(htShape(2, 3)), ErrGenerationReused)
		require.NoError(t, h.UpdateDesired(htShape(2, 1)), "the wish in force is welcome again")
		htRequireHeld(t, run.stop(), htHeld(htKey(0, 1)))
	})
}

func TestHostTimerIsArmedAtRequeueAt(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b, clock, events := newHtBackend(), &htClock{}, &htEvents{}
		b.first(CreateLease, htRefused, htRefused, htRefused, htRefused, htRefused, htRefused)
		h := htHost(t, b, 1, func(c *HostConfig) { c.Clock, c.OnEvent = clock, events.add })
		run := htGo(h.Run)
		tries := []time.Duration{0}
		for n := range 6 {
			synctest.Wait()
			until, _ := clock.armed()
			wait := time.Duration(1<<n) * time.Second
			requeue := h.Status().RequeueAt
			if wait > DefaultTick { // the last wait is longer than a tick
				require.Equal(t, start.Add(tries[n]+DefaultTick), until)
				require.Equal(t, start.Add(tries[n]+wait), requeue)
			} else {
				require.Equal(t, start.Add(tries[n]+wait), until)
				require.Equal(t, requeue, until)
			}
			tries = append(tries, tries[n]+wait)
			time.Sleep(time.Until(start.Add(tries[n+1])))
		}
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		require.Equal(t, tries[6], time.Since(start))
		require.Equal(t, append(tries, tries[6], tries[6]), events.of(EventDispatch, start), "to the nanosecond, the last with what follows")
		require.Error(t, run.stop())
	})
}

func TestHostTickIsOnlyASafetyNet(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b, clock := newHtBackend(), &htClock{}
		h := htHost(t, b, 1, func(c *HostConfig) { c.Clock, c.Tick = clock, time.Minute })
		run := htGo(h.Run)
		synctest.Wait()
		require.True(t, h.Status().Converged)
		until, sleeps := clock.armed()
		require.Equal(t, start.Add(time.Minute), until, "with nothing to wait for the tick is all there is")

		passes := h.Status().Driver.Passes
		time.Sleep(10*time.Minute + time.Second)
		synctest.Wait()
		_, later := clock.armed()
		require.Equal(t, sleeps+10, later)
		require.Equal(t, passes, h.Status().Driver.Passes, "a tick finds nothing to do (G1)")

		h.Driver().Trigger() // behind the host's back, so that nothing wakes it
		time.Sleep(58 * time.Second)
		synctest.Wait()
		require.Equal(t, passes, h.Status().Driver.Passes)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, passes+1, h.Status().Driver.Passes, "what woke nobody is seen at the next tick")
		require.Error(t, run.stop())
	})
}

// Updates and pauses are dated by the moment at which they came, not by the pass
// before, which may be long ago, and no otherwise when the journal is repeated.
func TestHostDatesWhatItIsAsked(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		var journal bytes.Buffer
		events := &htEvents{}
		h := htHost(t, newHtBackend(), 2, func(c *HostConfig) { c.OnEvent, c.Tick, c.Journal = events.add, time.Hour, &journal })
		run := htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		at := func(after time.Duration) { time.Sleep(time.Until(start.Add(after))); synctest.Wait() }
		at(5 * time.Minute)
		require.ErrorIs(t, h.UpdateDesired(htShape(0, 1)), ErrGenerationRegressed)
		at(7 * time.Minute)
		h.Pause()
		at(11 * time.Minute)
		require.NoError(t, h.UpdateDesired(htShape(2, 3)))
		at(13 * time.Minute)
		h.Resume()
		at(17 * time.Minute)
		require.NoError(t, h.Drain(context.Background()))
		require.NoError(t, run.stop())

		var again htEvents
		report, err := ReplayWith(&journal, ReplayOptions{OnEvent: again.add})
		require.NoError(t, err)
		require.Nil(t, report.Difference, "%v", report.Difference)
		for name, e := range map[string]*htEvents{"live": events, "repeated": &again} {
			require.Equal(t, []time.Duration{5 * time.Minute}, e.of(EventUpdateRefused, start), name)
			require.Equal(t, []time.Duration{7 * time.Minute}, e.of(EventPaused, start), name)
			require.Equal(t, []time.Duration{11 * time.Minute, 17 * time.Minute}, e.of(EventUpdateAccepted, start), name)
			require.Equal(t, []time.Duration{13 * time.Minute}, e.of(EventResumed, start), name)
		}
	})
}

// htSlowlyReadClock goes on with every reading, and lets others go first before
// it says what it has read.
type htSlowlyReadClock struct {
	systemClock
	read atomic.Int64
}

func (c *htSlowlyReadClock) Now() time.Time {
	now := time.Unix(c.read.Add(1), 0)
	for range 3 {
		runtime.Gosched()
	}
	return now
}

// The driver's clock keeps the time of the host's, however many goroutines have
// it read: a reading that overtakes another one would count the way between
// them twice, and whatever waits would come too early.
func TestHostReadsItsClockInOrder(t *testing.T) {
	clock := &htSlowlyReadClock{}
	h := htHost(t, newHtBackend(), 1, func(c *HostConfig) { c.Clock, c.Tick = clock, time.Nanosecond })
	run := htGo(h.Run)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 2000 {
				h.Pause()
				h.Resume()
			}
		})
	}
	all.Wait()
	_ = run.stop() // a machine is held, or was not bought yet
	now := clock.Now()
	require.Equal(t, now.UTC(), h.Driver().Clock(now))
}

func TestHostEventsWake(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b, events := newHtBackend(), &htEvents{}
		h := htHost(t, b, 1, func(c *HostConfig) { c.OnEvent = events.add })
		run := htGo(h.Run)
		time.Sleep(10 * time.Second)
		b.sink("w-0").NodeLost("taken back") // from the stream
		time.Sleep(10 * time.Second)
		h.Deliver(Observation{Kind: NodeLost, Node: "w-0", Attempt: 2}) // from the user
		time.Sleep(10 * time.Second)
		require.Equal(t, []time.Duration{10 * time.Second, 20 * time.Second}, events.of(EventAttemptFailed, start))
		require.Equal(t, []time.Duration{0, 11 * time.Second, 22 * time.Second}, events.of(EventReady, start), "each after its restart delay")
		htRequireHeld(t, run.stop(), htHeld(htKey(0, 3)))
	})
}

func TestHostStopsPassesNotMachines(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b, release := newHtBackend(), make(chan struct{})
		h := htHost(t, b, 1)
		run := htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		callErr := make(chan error, 1)
		b.first(CreateLease, func(ctx context.Context, do func()) error {
			do()
			<-release
			callErr <- ctx.Err()
			return nil
		})
		require.NoError(t, h.UpdateDesired(htShape(2, 2)))
		synctest.Wait()

		want := []HeldSlot{htHeld(htKey(0, 1)), {Key: htKey(1, 2), Unresolved: true}}
		require.Equal(t, want, h.Held())
		run.cancel(errHt)
		err := <-run.result
		require.Equal(t, errHt, htRequireHeld(t, err, want...).Cause)
		require.ErrorIs(t, err, errHt, "the cause of ctx")
		require.EqualError(t, err, "provisioning: stopped (test: it broke) with 2 held: "+
			"w-0 attempt 1 holds lease lease of w-0; w-1 attempt 2 may hold a machine: its create is unresolved")

		close(release)
		require.NoError(t, <-callErr, "the call was not cancelled")
		b.sink("w-0").NodeLost("while nobody drives")
		time.Sleep(time.Hour)
		require.Equal(t, want, h.Held(), "nobody drives")
		require.Zero(t, b.called("DestroyLease w-0#1"))

		run = htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 2))
		require.Equal(t, time.Hour+time.Second, time.Since(start), "the loss counts from when it was folded")
		htRequireHeld(t, run.stop(), htHeld(htKey(0, 3)), htHeld(htKey(1, 2)))
		require.Equal(t, 1, b.called("CreateLease w-1#2"))
	})
}

// The create's answer is lost while nobody drives. The next Run asks again
// under the same key.
func TestHostRunAgainAdopts(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		b.first(CreateLease, htUntilCancelled)
		h := htHost(t, b, 1)
		run := htGo(h.Run)
		time.Sleep(time.Second)
		htRequireHeld(t, run.stop(), HeldSlot{Key: htKey(0, 1), Unresolved: true})
		time.Sleep(time.Hour) // far beyond the deadline

		run = htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		require.Equal(t, time.Hour+2*time.Second, time.Since(start), "expired at once, tried again after a delay")
		require.Equal(t, 2, b.called("CreateLease w-0#1"))
		live, created := b.counts()
		require.Equal(t, [2]int{1, 1}, [2]int{live, created})
		htRequireHeld(t, run.stop(), htHeld(htKey(0, 1)))
	})
}

func TestHostRunTwiceAtOnce(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		h := htHost(t, newHtBackend(), 1)
		run := htGo(h.Run)
		synctest.Wait()
		require.Equal(t, ErrHostRunning, h.Run(context.Background()))
		require.False(t, run.ended(), "the first goes on")
		require.Error(t, run.stop())
		run = htGo(h.Run)
		require.False(t, run.ended(), "after its end Run may be called again")
		require.Error(t, run.stop())
	})
}

func TestHostRunWithoutTime(t *testing.T) {
	b := newHtBackend()
	h := htHost(t, b, 1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.NoError(t, h.Run(ctx), "nothing was begun, nothing is held")
	require.Empty(t, b.calls)
}

func TestCloseDuringCreate(t *testing.T) {
	unresolved := []HeldSlot{{Key: htKey(0, 1), Unresolved: true}}

	t.Run("close", func(t *testing.T) {
		htBubble(t, func(t *testing.T, start time.Time) {
			b := newHtBackend()
			returned := false
			b.first(CreateLease, func(ctx context.Context, do func()) error {
				err := htUntilCancelled(ctx, do)
				time.Sleep(10 * time.Second) // it takes its time
				returned = true
				return err
			})
			h := htHost(t, b, 1)
			run := htGo(h.Run)
			time.Sleep(time.Second)
			held, err := h.Close(context.Background())
			require.NoError(t, err)
			require.True(t, returned, "Close waits for the call")
			require.Equal(t, 11*time.Second, time.Since(start))
			require.Equal(t, unresolved, held)
			err = <-run.result
			htRequireHeld(t, err, unresolved...)
			require.ErrorIs(t, err, ErrHostClosed)
			n, _ := h.Driver().Node("w-0")
			require.Equal(t, CreateLease, n.Retry.Ambiguous, "what the call answered is on record")
			require.Nil(t, n.Pending)
			live, created := b.counts()
			require.Equal(t, [2]int{1, 1}, [2]int{live, created})
		})
	})

	t.Run("bounded by its own ctx", func(t *testing.T) {
		htBubble(t, func(t *testing.T, start time.Time) {
			b, release := newHtBackend(), make(chan struct{})
			b.first(CreateLease, htUntil(release))
			h := htHost(t, b, 1)
			run := htGo(h.Run)
			time.Sleep(time.Second)
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			held, err := h.Close(ctx)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, 4*time.Second, time.Since(start))
			require.Equal(t, unresolved, held)
			htRequireHeld(t, <-run.result, unresolved...)

			close(release)
			held, err = h.Close(context.Background())
			require.NoError(t, err)
			require.Equal(t, []HeldSlot{htHeld(htKey(0, 1))}, held, "the second Close knows the answer")
		})
	})

	t.Run("go on instead", func(t *testing.T) {
		htBubble(t, func(t *testing.T, start time.Time) {
			b := newHtBackend()
			b.first(CreateLease, htUntilCancelled)
			h := htHost(t, b, 1)
			run := htGo(h.Run)
			time.Sleep(time.Second)
			require.Equal(t, unresolved, h.Held())
			require.NoError(t, h.WaitConverged(context.Background(), 1))
			require.Equal(t, DefaultOperationTimeout+DefaultInitialDelay, time.Since(start))
			require.Equal(t, []HeldSlot{htHeld(htKey(0, 1))}, h.Held())
			live, created := b.counts()
			require.Equal(t, [2]int{1, 1}, [2]int{live, created}, "adopted")

			require.NoError(t, h.Drain(context.Background()))
			live, created = b.counts()
			require.Equal(t, [2]int{0, 1}, [2]int{live, created})
			require.Empty(t, h.Held())
			require.NoError(t, run.stop())
		})
	})
}

// TestHostClosedTakesEndsOnly: what a bootstrap still says when nothing drives any
// more would pile up; how a call has ended says what is held.
func TestHostClosedTakesEndsOnly(t *testing.T) {
	h := htHost(t, newHtBackend(), 1)
	_, err := h.Close(context.Background())
	require.NoError(t, err)
	for _, kind := range []ObservationKind{BootstrapProgress, SwactorJoined, BootstrapFailed, BootstrapClosed, NodeLost, ReplaceRequested} {
		h.Deliver(Observation{Kind: kind, Node: "w-0", Attempt: 1})
		require.Zero(t, h.driver.deliveries(), kind)
	}
	h.Deliver(Observation{Kind: OperationCompleted, Node: "w-0", Attempt: 1})
	require.EqualValues(t, 1, h.driver.deliveries())
}

// TestHostIsGivenBack: a hook that ends the goroutine of Run or Drain leaves a host
// that somebody else can drive.
func TestHostIsGivenBack(t *testing.T) {
	for _, name := range []string{"Run", "Drain"} {
		t.Run(name, func(t *testing.T) {
			armed := true
			h := htHost(t, newHtBackend(), 1, func(c *HostConfig) {
				c.OnEvent = func(e Event) {
					if armed && e.Kind == EventPass {
						armed = false
						runtime.Goexit()
					}
				}
			})
			calls := map[string]func(context.Context) error{"Run": h.Run, "Drain": h.Drain}
			dtApart(func() { _ = calls[name](context.Background()) })
			require.False(t, armed)
			require.NoError(t, h.Drain(context.Background()))
			held, err := h.Close(context.Background())
			require.NoError(t, err)
			require.Empty(t, held)
		})
	}
}

func TestHostCloseBeforeRun(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		h := htHost(t, b, 1)
		for range 2 {
			held, err := h.Close(context.Background())
			require.NoError(t, err)
			require.Empty(t, held)
		}
		require.Equal(t, ErrHostClosed, h.Run(context.Background()))
		require.Equal(t, ErrHostClosed, h.UpdateDesired(htShape(2, 1)))
		require.Equal(t, ErrHostClosed, h.WaitConverged(context.Background(), 1))
		require.Equal(t, ErrHostClosed, h.Drain(context.Background()))
		require.False(t, h.Status().Draining)
		require.Empty(t, b.calls)
	})
}

func TestHostCloseTwice(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b, release := newHtBackend(), make(chan struct{})
		b.first(CreateLease, htUntil(release))
		// The first Close that folds what the call answered is held up.
		folding := make(chan struct{})
		h := htHost(t, b, 1, func(c *HostConfig) {
			c.OnEvent = func(e Event) {
				if e.Kind == EventFold {
					<-folding
				}
			}
		})
		run := htGo(h.Run)
		synctest.Wait()

		want := []HeldSlot{htHeld(htKey(0, 1))}
		close1 := func(ctx context.Context) error {
			held, err := h.Close(ctx)
			if err == nil && !slices.Equal(held, want) {
				err = fmt.Errorf("held: %v", held)
			}
			return err
		}
		first, second := htGo(close1), htGo(close1)
		synctest.Wait()
		require.Error(t, <-run.result)
		close(release)
		require.False(t, first.ended())
		require.False(t, second.ended(), "each waits until the answer is on record")

		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := h.Close(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		close(folding)
		require.NoError(t, <-first.result)
		require.NoError(t, <-second.result)
		require.NoError(t, close1(ctx), "there is nothing left to wait for")
	})
}

// A pass does not come to an end because the user's hook blocks. Close says so
// in time, and cancels the calls all the same.
func TestHostCloseDuringAStuckPass(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b, stuck := newHtBackend(), make(chan struct{})
		b.first(CreateLease, htUntilCancelled)
		h := htHost(t, b, 1, func(c *HostConfig) {
			c.OnEvent = func(e Event) {
				if e.Kind == EventPass && e.Generation == 2 {
					<-stuck
				}
			}
		})
		run := htGo(h.Run)
		wait := htGo(func(ctx context.Context) error { return h.WaitConverged(ctx, 2) })
		synctest.Wait()
		require.NoError(t, h.UpdateDesired(htShape(2, 1)))
		synctest.Wait()

		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		held, err := h.Close(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 3*time.Second, time.Since(start))
		require.Len(t, held, 1)
		require.Equal(t, 0, h.Status().Executor.Running, "the call was cancelled")
		require.Equal(t, ErrHostClosed, <-wait.result)
		close(stuck)
		htRequireHeld(t, <-run.result, HeldSlot{Key: htKey(0, 1), Unresolved: true})
	})
}

// Calls are made inside the pass, so the pass ends only with the call.
func TestHostCloseEndsAnInlineCall(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		b.first(CreateLease, htUntilCancelled)
		h := htHost(t, b, 1, func(c *HostConfig) { c.Go = func(f func()) { f() } })
		run := htGo(h.Run)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		held, err := h.Close(ctx)
		require.NoError(t, err)
		require.Zero(t, time.Since(start))
		require.Equal(t, []HeldSlot{{Key: htKey(0, 1), Unresolved: true}}, held)
		require.ErrorIs(t, <-run.result, ErrHostClosed)
	})
}

// A node is lost in the last moment: the loss is on record when Close returns,
// and so the cluster is not as it should be.
func TestHostCloseFoldsWhatWasDelivered(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		h := htHost(t, b, 2)
		run := htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		require.Error(t, run.stop())
		b.sink("w-1").NodeLost("gone")
		held, err := h.Close(context.Background())
		require.NoError(t, err)
		require.Len(t, held, 2, "a lost machine may still be billed")
		n, _ := h.Driver().Node("w-1")
		require.Equal(t, StageFailed, n.Record.Stage)
		s := h.Status()
		require.False(t, s.Converged)
		require.Equal(t, 1, s.Ready)
		require.Equal(t, ErrHostClosed, h.WaitConverged(context.Background(), 1))

		// The stream of w-0 goes on, and nobody folds it any more (G12).
		b.sink("w-0").Progress("session of w-0", BootstrapStageStdoutStreaming, 1, 1)
		require.Zero(t, h.Driver().inbox.len())
	})
}

func TestHostWaitConverged(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b, release := newHtBackend(), make(chan struct{})
		h := htHost(t, b, 1)
		wait := func(generation uint64) htRun {
			return htGo(func(ctx context.Context) error { return h.WaitConverged(ctx, generation) })
		}
		one, three := wait(1), wait(3)
		require.False(t, one.ended(), "nobody drives yet")
		run := htGo(h.Run)
		require.NoError(t, <-one.result)
		require.False(t, three.ended(), "not wished for yet")

		b.on[CreateLease] = htUntil(release)
		require.NoError(t, h.UpdateDesired(htShape(2, 2)))
		one, two := wait(1), wait(2)
		require.ErrorIs(t, <-one.result, ErrSuperseded)
		require.False(t, two.ended())
		require.NoError(t, h.UpdateDesired(htShape(3, 2)))
		err := <-two.result
		require.ErrorIs(t, err, ErrSuperseded)
		require.EqualError(t, err, "provisioning: a later generation is wished for: 3, waited for 2")
		close(release)
		require.NoError(t, <-three.result)
		require.NoError(t, h.WaitConverged(context.Background(), 3))
		require.ErrorIs(t, h.WaitConverged(context.Background(), 1), ErrSuperseded, "never nil on the state of another generation")

		four := wait(4)
		four.cancel(errHt)
		require.Equal(t, errHt, <-four.result, "the cause of ctx")
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		require.Equal(t, context.DeadlineExceeded, h.WaitConverged(ctx, 4))
		require.NoError(t, h.WaitConverged(ctx, 3), "what is so needs no waiting")

		require.Error(t, run.stop())
		four = wait(4)
		require.False(t, four.ended())
		require.NoError(t, h.UpdateDesired(htShape(5, 1)))
		require.ErrorIs(t, <-four.result, ErrSuperseded, "also while nobody drives")
		five := wait(5)
		require.False(t, five.ended())
		_, err = h.Close(context.Background())
		require.NoError(t, err)
		require.Equal(t, ErrHostClosed, <-five.result)
	})
}

func TestHostDrainBesideRun(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		b.first(DestroyLease, htRefused)
		h := htHost(t, b, 2)
		run := htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		one := htGo(func(ctx context.Context) error { return h.WaitConverged(ctx, 1) })
		require.NoError(t, <-one.result)
		waiting := htGo(func(ctx context.Context) error { return h.WaitConverged(ctx, 2) })
		drain := htGo(h.Drain)
		require.False(t, drain.ended())
		require.True(t, h.Status().Draining)
		for _, update := range []ClusterShape{htShape(3, 2), htShape(1, 1)} {
			require.ErrorIs(t, h.UpdateDesired(update), ErrDraining)
			require.ErrorIs(t, h.Driver().UpdateDesired(update), ErrDraining, "there is no way around it")
		}
		require.NoError(t, <-drain.result)
		require.NoError(t, <-waiting.result, "the next generation is the empty one")
		require.Equal(t, time.Second, time.Since(start), "the refused destroy was tried again")
		live, _ := b.counts()
		require.Zero(t, live)
		require.Zero(t, h.Driver().Snapshot().Len())
		require.False(t, run.ended(), "Run goes on")

		require.NoError(t, h.Drain(context.Background()), "gone is gone")
		require.Equal(t, uint64(2), h.Status().Generation)
		require.NoError(t, run.stop())
		require.NoError(t, h.Drain(context.Background()))
		require.ErrorIs(t, h.UpdateDesired(htShape(3, 2)), ErrDraining)
	})
}

func TestHostDrainDrivesByItself(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		h := htHost(t, b, 2)
		run := htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		require.Error(t, run.stop())

		b.first(DestroyLease, htRefused)
		drains := []htRun{htGo(h.Drain), htGo(h.Drain), htGo(h.Drain)}
		for _, drain := range drains {
			require.False(t, drain.ended())
		}
		require.Equal(t, ErrHostRunning, h.Run(context.Background()), "one of them drives")
		for _, drain := range drains {
			require.NoError(t, <-drain.result)
		}
		require.Equal(t, time.Second, time.Since(start))
		require.Equal(t, uint64(2), h.Status().Generation, "however many drain")
		require.Empty(t, h.Held())
	})
}

// Whoever drives may stop in the middle of a drain; another goes on with it.
func TestHostDrainOutlivesWhoDrives(t *testing.T) {
	for name, driver := range map[string]func(*Host) func(context.Context) error{
		"a run":         func(h *Host) func(context.Context) error { return h.Run },
		"another drain": func(h *Host) func(context.Context) error { return h.Drain },
	} {
		t.Run(name, func(t *testing.T) {
			htBubble(t, func(t *testing.T, start time.Time) {
				b := newHtBackend()
				h := htHost(t, b, 1)
				run := htGo(h.Run)
				require.NoError(t, h.WaitConverged(context.Background(), 1))
				require.Error(t, run.stop())
				b.first(DestroyLease, htRefused)
				first := htGo(driver(h))
				synctest.Wait()
				drain := htGo(h.Drain)
				require.False(t, drain.ended())
				require.Error(t, first.stop(), "a machine is held")
				require.NoError(t, <-drain.result)
				require.Equal(t, time.Second, time.Since(start))
				require.Empty(t, h.Held())
			})
		})
	}
}

func TestHostDrainWhoseCtxEndsFirst(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running=%v", running), func(t *testing.T) {
			htBubble(t, func(t *testing.T, start time.Time) {
				b, release := newHtBackend(), make(chan struct{})
				h := htHost(t, b, 1)
				run := htGo(h.Run)
				require.NoError(t, h.WaitConverged(context.Background(), 1))
				if !running {
					require.Error(t, run.stop())
				}
				b.first(DestroyLease, htUntil(release))
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				defer cancel()
				err := h.Drain(ctx)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				htRequireHeld(t, err, htHeld(htKey(0, 1)))
				require.Equal(t, 5*time.Second, time.Since(start))
				require.ErrorIs(t, h.UpdateDesired(htShape(3, 1)), ErrDraining, "there is no way back")

				close(release)
				require.NoError(t, h.Drain(context.Background()))
				require.Equal(t, 1, b.called("DestroyLease w-0#1"))
				if running {
					require.NoError(t, run.stop())
				}
			})
		})
	}
}

// Nothing is held, and yet a drain that had no time is not one that is done.
func TestHostDrainWithoutTime(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running=%v", running), func(t *testing.T) {
			htBubble(t, func(t *testing.T, start time.Time) {
				b := newHtBackend()
				b.on[CreateLease] = htRefused
				h := htHost(t, b, 1)
				run := htGo(h.Run)
				synctest.Wait()
				if !running {
					require.NoError(t, run.stop())
				}
				ctx, cancel := context.WithCancelCause(context.Background())
				cancel(errHt)
				err := h.Drain(ctx)
				require.Equal(t, errHt, err)
				require.NoError(t, h.Drain(context.Background()))
				require.Zero(t, h.Driver().Snapshot().Len())
				if running {
					require.NoError(t, run.stop())
				}
			})
		})
	}
}

func TestHostCloseDuringDrain(t *testing.T) {
	for _, running := range []bool{true, false} {
		for _, holds := range []bool{true, false} {
			t.Run(fmt.Sprintf("running=%v/holds=%v", running, holds), func(t *testing.T) {
				htBubble(t, func(t *testing.T, start time.Time) {
					b := newHtBackend()
					h := htHost(t, b, 1)
					run := htGo(h.Run)
					require.NoError(t, h.WaitConverged(context.Background(), 1))
					if !running {
						require.Error(t, run.stop())
					}
					// After a destroy whose answer is lost the machine may be
					// there or not; one that succeeds leaves a destroyed slot
					// behind, whose end nobody sees.
					b.on[DestroyLease] = htUntilCancelled
					if !holds {
						b.on[DestroyLease] = func(ctx context.Context, do func()) error {
							_ = htUntilCancelled(ctx, do)
							return nil
						}
					}
					drain := htGo(h.Drain)
					synctest.Wait()
					held, err := h.Close(context.Background())
					require.NoError(t, err)
					require.Equal(t, holds, len(held) == 1)
					require.ErrorIs(t, <-drain.result, ErrHostClosed)
					if running {
						require.ErrorIs(t, <-run.result, ErrHostClosed, "it held the lease when it stopped")
					}
					require.ErrorIs(t, h.Drain(context.Background()), ErrHostClosed)
				})
			})
		}
	}
}

// Whatever generation was wished for, there is one left to give it up under.
func TestHostDrainAtTheEndOfTheGenerations(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		h := htHost(t, newHtBackend(), 1, func(c *HostConfig) { c.Shape = htShape(math.MaxUint64-1, 1) })
		var refused *ShapeError
		require.ErrorAs(t, h.UpdateDesired(htShape(math.MaxUint64, 1)), &refused)
		require.Equal(t, "generation", refused.Faults[0].Field)
		require.NoError(t, h.Drain(context.Background()))
		require.Equal(t, uint64(math.MaxUint64), h.Status().Observed)
	})
	htBubble(t, func(t *testing.T, start time.Time) {
		h := htHost(t, newHtBackend(), 1, func(c *HostConfig) {
			c.Shape = htShape(math.MaxUint64, 0)
			c.Shape.Groups = nil
		})
		require.NoError(t, h.Drain(context.Background()))
		require.True(t, h.Status().Draining)
	})
}

// The hook may call the host, also from within an update of the host.
func TestHostHookMayCallTheHost(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		var h *Host
		var statuses []uint64
		var again, refused error
		h = htHost(t, newHtBackend(), 1, func(c *HostConfig) {
			c.OnEvent = func(e Event) {
				switch e.Kind {
				case EventUpdateAccepted:
					statuses = append(statuses, h.Status().Generation)
					if e.Generation == 2 {
						again = h.UpdateDesired(htShape(3, 1))
					}
				case EventUpdateRefused:
					refused = e.Err
				case EventReady:
					h.Held()
					h.Deliver(Observation{Kind: NodeLost, Node: "nobody"})
				}
			}
		})
		require.NoError(t, h.UpdateDesired(htShape(2, 1)))
		require.NoError(t, again)
		require.Equal(t, []uint64{2, 3}, statuses)
		require.NoError(t, h.Drain(context.Background()))
		require.Equal(t, []uint64{2, 3, 4}, statuses)
		require.ErrorIs(t, h.UpdateDesired(htShape(9, 1)), ErrDraining)
		require.ErrorIs(t, refused, ErrDraining)
	})
}

// htLeapingClock leaps a second ahead whenever it is read.
type htLeapingClock struct {
	now time.Time
}

func (c *htLeapingClock) Now() time.Time {
	c.now = c.now.Add(time.Second)
	return c.now
}

func (c *htLeapingClock) Sleep(context.Context, time.Time, <-chan struct{}) {}

// A stream that never pauses makes a further pass necessary during every pass.
// Time goes on for it all the same: what is due is done, whoever waits is told,
// and Run ends when it is asked to.
func TestHostUnderAnEndlessStream(t *testing.T) {
	b := newHtBackend()
	b.first(CreateLease, htRefused)
	var h *Host
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	passes, converged := 0, make(chan error, 1)
	h = htHost(t, b, 1, func(c *HostConfig) {
		c.Clock = &htLeapingClock{time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)}
		c.Go = func(f func()) { f() }
		c.OnEvent = func(e Event) {
			if e.Kind == EventPass {
				if passes++; passes == 100 {
					cancel()
				}
				if passes < 10_000 { // so that a Run that does not end ends
					h.Deliver(Observation{Kind: BootstrapProgress, Node: "w-0", Attempt: 1})
				}
			}
		}
	})
	go func() { converged <- h.WaitConverged(context.Background(), 1) }()
	for waits := false; !waits; runtime.Gosched() { // or it might begin when nobody folds any more
		h.mu.Lock()
		waits = h.changed != nil
		h.mu.Unlock()
	}
	htRequireHeld(t, h.Run(ctx), htHeld(htKey(0, 1)))
	require.Equal(t, 100, passes)
	require.Equal(t, 2, b.called("CreateLease w-0#1"), "the delay had passed")
	require.NoError(t, <-converged)
}

// A driver whose passes keep asking for another one is broken, and the host
// says so instead of spinning.
func TestHostNotQuiescent(t *testing.T) {
	var h *Host
	h = htHost(t, newHtBackend(), 0, func(c *HostConfig) {
		c.OnEvent = func(Event) { h.driver.ownDirt = true } // in the goroutine of the pass
	})
	require.Equal(t, ErrNotQuiescent, h.Run(context.Background()))
	require.Equal(t, uint64(1+maxOwnPasses+1), h.Status().Driver.Passes, "the first was asked for")
}

func TestHeldErrorIsNotEndless(t *testing.T) {
	held := make([]HeldSlot, maxListed+2)
	for i := range held {
		held[i] = htHeld(htKey(i, 1))
	}
	text := (&HeldError{Held: held, Cause: errHt}).Error()
	require.Contains(t, text, "with 18 held: w-0 attempt 1 holds lease lease of w-0; ")
	require.Regexp(t, "w-15 attempt 1 holds lease lease of w-15; and 2 more$", text)
	text = (&HeldError{Held: held[:maxListed], Cause: errHt}).Error()
	require.Regexp(t, "lease of w-15$", text)
}

func TestHostStatus(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b := newHtBackend()
		h := htHost(t, b, 3)
		require.Equal(t, HostStatus{Generation: 1}, h.Status())
		b.first(CreateLease, htRefused, htUntilCancelled, nil)
		run := htGo(h.Run)
		synctest.Wait()
		s := h.Status()
		require.Equal(t, start.Add(time.Second), s.RequeueAt)
		require.NotZero(t, s.Driver.Passes)
		require.Equal(t, DriverStats{Passes: s.Driver.Passes, Folded: 4, NotApplied: 1, Dispatched: 5, Attempts: 3}, s.Driver,
			"the join came before its session was on record")
		require.Equal(t, ExecutorStats{Submitted: 5, Completed: 4, Attempts: 3, Running: 1}, s.Executor)
		s.RequeueAt, s.Driver, s.Executor = time.Time{}, DriverStats{}, ExecutorStats{}
		require.Equal(t, HostStatus{Generation: 1, Observed: 1, Ready: 1, Desired: 3, Held: 2}, s)

		require.NoError(t, h.WaitConverged(context.Background(), 1))
		s = h.Status()
		require.Equal(t, [4]int{3, 3, 3, 0}, [4]int{s.Ready, s.Desired, s.Held, s.Executor.Running})
		require.True(t, s.Converged)
		require.Zero(t, s.RequeueAt)
		require.NoError(t, h.Drain(context.Background()))
		s = h.Status()
		s.Driver, s.Executor = DriverStats{}, ExecutorStats{}
		require.Equal(t, HostStatus{Generation: 2, Observed: 2, Converged: true, Draining: true}, s)
		require.NoError(t, run.stop())
	})
}

func TestHostConfigFaults(t *testing.T) {
	good := HostConfig{Shape: htShape(1, 1), Backend: newHtBackend()}
	tests := []struct {
		name   string
		change func(*HostConfig)
		want   error
	}{
		{"no backend", func(c *HostConfig) { c.Backend = nil }, ErrInvalidConfig},
		{"negative tick", func(c *HostConfig) { c.Tick = -1 }, ErrInvalidConfig},
		{"negative cap", func(c *HostConfig) { c.MaxInFlight = -1 }, ErrInvalidConfig},
		{"negative slots", func(c *HostConfig) { c.MaxNodes = -1 }, ErrInvalidConfig},
		{"no shape", func(c *HostConfig) { c.Shape = ClusterShape{} }, ErrInvalidShape},
		{"too many slots", func(c *HostConfig) { c.Shape, c.MaxNodes = htShape(1, 3), 2 }, ErrInvalidShape},
		{"policy", func(c *HostConfig) { c.Retry.InitialDelay = -1 }, ErrInvalidPolicy},
		{"policy of a group", func(c *HostConfig) { c.GroupRetry = map[NodeGroupID]RetryPolicy{"w": {Jitter: 2}} }, ErrInvalidPolicy},
	}
	for _, test := range tests {
		config := good
		test.change(&config)
		h, err := NewHost(config)
		require.ErrorIs(t, err, test.want, test.name)
		require.Nil(t, h, test.name)
	}
	h, err := NewHost(good)
	require.NoError(t, err)
	require.Equal(t, DefaultTick, h.tick)
}

// Every field of the configuration reaches whoever it is for.
func TestHostConfigReachesTheDriver(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		b, release := newHtBackend(), make(chan struct{})
		b.first(CreateLease, htUntil(release))
		b.first(StartBootstrap, func(context.Context, func()) error { return Ambiguous(errHt) })
		spawned := 0
		h := htHost(t, b, 2, func(c *HostConfig) {
			c.FirstAttempt, c.MaxInFlight = 7, 1
			c.Retry.OperationTimeout = time.Minute
			c.GroupRetry = map[NodeGroupID]RetryPolicy{"w": {InitialDelay: 5 * time.Second}}
			c.Go = func(f func()) {
				spawned++
				go f()
			}
		})
		run := htGo(h.Run)
		synctest.Wait()
		n, _ := h.Driver().Node("w-0")
		require.Equal(t, NodeAttemptID(7), n.Attempt)
		require.Equal(t, start.Add(DefaultOperationTimeout), h.Status().RequeueAt, "the policy of the group replaces the other one")
		require.Equal(t, 1, h.Status().Executor.Running)
		close(release)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		require.Equal(t, 5*time.Second, time.Since(start))
		require.Equal(t, len(b.calls), spawned)
		require.Error(t, run.stop())
	})
}

func TestHostClockExhausted(t *testing.T) {
	b, clock := newHtBackend(), &htWallClock{wall: time.Date(2190, 1, 1, 0, 0, 0, 0, time.UTC)}
	h := htHost(t, b, 1, func(c *HostConfig) { c.Clock, c.Go = clock, func(f func()) { f() } })
	clock.sleep = func(time.Time) { // once the node is ready the clock leaps
		require.True(t, h.Status().Converged)
		clock.wall = clock.wall.AddDate(5, 0, 0)
	}
	err := h.Run(context.Background())
	require.ErrorIs(t, err, ErrClockExhausted)
	htRequireHeld(t, err, htHeld(htKey(0, 1)))
	require.ErrorIs(t, h.Run(context.Background()), ErrClockExhausted)
	require.ErrorIs(t, h.Drain(context.Background()), ErrClockExhausted)
	held, err := h.Close(context.Background())
	require.ErrorIs(t, err, ErrClockExhausted)
	require.Equal(t, []HeldSlot{htHeld(htKey(0, 1))}, held)

	h = htHost(t, b, 1, func(c *HostConfig) { c.Clock = &htWallClock{wall: time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)} })
	require.ErrorIs(t, h.Run(context.Background()), ErrClockExhausted)
	require.Zero(t, h.Driver().Snapshot().Len())
}

// htWallClock reads a wall clock and a running time that know nothing of each
// other. sleep is called instead of sleeping.
type htWallClock struct {
	wall    time.Time
	running time.Duration // 0: readings are of the wall only
	sleep   func(until time.Time)
}

func (c *htWallClock) Now() time.Time {
	if c.running == 0 {
		return c.wall
	}
	return htTime(c.wall, c.running)
}

func (c *htWallClock) Sleep(_ context.Context, until time.Time, _ <-chan struct{}) { c.sleep(until) }

// htTime makes a time whose wall reading and monotonic reading are chosen at
// will. Package time makes none, because its two clocks go together; a machine
// whose wall clock is set while it runs does. The layout is that of time.Time:
// wall holds a flag, the seconds since 1885 in 33 bits and the nanoseconds in
// 30, ext the monotonic reading. TestHtTime holds it to that.
func htTime(wall time.Time, running time.Duration) time.Time {
	const hasMonotonic = 1 << 63
	since1885 := wall.Unix() - time.Date(1885, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
	t := struct {
		wall uint64
		ext  int64
		loc  *time.Location
	}{hasMonotonic | uint64(since1885)<<30 | uint64(wall.Nanosecond()), int64(running), time.UTC}
	return *(*time.Time)(unsafe.Pointer(&t))
}

func TestHtTime(t *testing.T) {
	require.Equal(t, unsafe.Sizeof(time.Time{}), unsafe.Sizeof(struct {
		uint64
		int64
		*int
	}{}))
	wall := time.Date(2026, 5, 6, 7, 8, 9, 10, time.UTC)
	a := htTime(wall, time.Hour)
	b := htTime(wall.AddDate(2, 0, 0), time.Hour+time.Second)
	require.True(t, a.Round(0).Equal(wall), "the wall reading")
	require.Equal(t, time.Second, b.Sub(a), "differences are of the monotonic reading")
	require.Equal(t, 2, b.Round(0).Year()-a.Round(0).Year())
	require.Equal(t, 2*time.Second, a.Add(2*time.Second).Sub(a))
}

// A node waits 60 seconds for its next try. Meanwhile the wall clock is set
// back by an hour and ahead by two years, and the timer keeps the running time
// that is left.
func TestHostUsesMonotonicTime(t *testing.T) {
	b := newHtBackend()
	b.first(CreateLease, htRefused)
	ctx, cancel := context.WithCancel(context.Background())
	clock := &htWallClock{wall: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), running: time.Hour}
	h := htHost(t, b, 1, func(c *HostConfig) {
		c.Clock, c.Tick, c.Go = clock, 24*time.Hour, func(f func()) { f() }
		c.Retry = RetryPolicy{InitialDelay: time.Minute, MaxDelay: time.Minute}
	})
	steps := []struct {
		left    time.Duration // that the timer is armed for
		creates int
		run     time.Duration // how far the running time then goes
		wall    func(time.Time) time.Time
	}{
		{60 * time.Second, 1, 20 * time.Second, func(w time.Time) time.Time { return w.Add(-time.Hour) }},
		{40 * time.Second, 1, 10 * time.Second, func(w time.Time) time.Time { return w.AddDate(2, 0, 0) }},
		{30 * time.Second, 1, 0, func(w time.Time) time.Time { return w.AddDate(-3, 0, 0) }},
		{30 * time.Second, 1, 30*time.Second - 1, func(w time.Time) time.Time { return w }},
		{1, 1, 1, func(w time.Time) time.Time { return w.Add(-time.Hour) }},
		{24 * time.Hour, 2, 0, func(w time.Time) time.Time { cancel(); return w }}, // ready: the tick
	}
	slept := 0
	clock.sleep = func(until time.Time) {
		s := steps[slept]
		slept++
		require.Equal(t, s.left, until.Sub(clock.Now()), "sleep %d", slept)
		require.Equal(t, s.creates, b.called("CreateLease w-0#1"), "sleep %d", slept)
		clock.running += s.run
		clock.wall = s.wall(clock.wall)
	}
	htRequireHeld(t, h.Run(ctx), htHeld(htKey(0, 1)))
	require.Equal(t, len(steps), slept)
}

// The machine's clock sleeps for the running time, whatever the wall reads.
// Virtual time has no monotonic reading, so this takes 10 ms of the real one.
func TestSystemClockSleepsMonotonic(t *testing.T) {
	for _, wall := range []time.Time{time.Now().Add(-time.Hour), time.Now().AddDate(2, 0, 0)} {
		begun := time.Now()
		reading := begun.Sub(htTime(begun, 0))
		systemClock{}.Sleep(context.Background(), htTime(wall, reading+5*time.Millisecond), nil)
		require.GreaterOrEqual(t, time.Since(begun), 5*time.Millisecond)
	}
}

func TestSystemClockWakes(t *testing.T) {
	htBubble(t, func(t *testing.T, start time.Time) {
		wake := make(chan struct{}, 1)
		wake <- struct{}{}
		systemClock{}.Sleep(context.Background(), start.Add(time.Hour), wake)
		require.Empty(t, wake, "it takes what woke it")
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		systemClock{}.Sleep(ctx, start.Add(time.Hour), wake)
		systemClock{}.Sleep(context.Background(), start.Add(-time.Hour), wake)
		require.Zero(t, time.Since(start))
		systemClock{}.Sleep(context.Background(), start.Add(time.Hour), wake)
		require.Equal(t, time.Hour, time.Since(start))
	})
}

// A stream goes on while nobody drives. What it says about progress is not kept
// for a Run that may never come; what matters is.
func TestHostThatDoesNotDriveKeepsNoProgress(t *testing.T) {
	h := htHost(t, newHtBackend(), 1)
	for sequence := range uint64(100_000) {
		h.Deliver(Observation{Kind: BootstrapProgress, Node: "w-0", Attempt: 1, Session: "s", Stage: BootstrapStageSSHReady, StdoutSequence: sequence})
	}
	h.Deliver(Observation{Kind: SwactorJoined, Node: "w-0", Attempt: 1, Session: "s"})
	h.Deliver(Observation{Kind: BootstrapProgress, Node: "w-0", Attempt: 1, Session: "s", Stage: BootstrapStageClosed})
	require.Equal(t, 2, h.driver.inbox.len())
}
