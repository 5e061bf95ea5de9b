package provisioning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Clock is where a [Host] reads the time and how it sleeps. The default is the
// machine's monotonic clock; a test or a simulation brings its own.
type Clock interface {
	// Now returns the present instant. Only differences matter. It must not
	// call the host.
	Now() time.Time
	// Sleep returns once Now has reached until, wake holds a value, which
	// Sleep takes, or ctx is done.
	Sleep(ctx context.Context, until time.Time, wake <-chan struct{})
}

// DefaultTick is how long a host sleeps at most.
const DefaultTick = 30 * time.Second

// HostConfig configures a [Host]. Shape and Backend are required.
type HostConfig struct {
	Shape ClusterShape
	// Backend may be a [GroupValidator] too; the groups of every shape are
	// then shown to it.
	Backend EffectBackend
	// As in [Config].
	Retry        RetryPolicy
	GroupRetry   map[NodeGroupID]RetryPolicy
	MaxInFlight  int
	MaxNodes     int
	FirstAttempt NodeAttemptID
	OnEvent      func(Event)
	Journal      io.Writer
	// Tick bounds how long the host sleeps. It is a safety net: every wake-up
	// that matters comes from a delivery or a stored deadline. 0 means
	// [DefaultTick].
	Tick time.Duration
	// Clock replaces the machine's clock, Go the starting of goroutines for
	// backend calls; nil means the ordinary ones.
	Clock Clock
	Go    func(func())
}

// Errors of the host.
var (
	// ErrHostRunning: Run was called while it, or a Drain, drives.
	ErrHostRunning = errors.New("provisioning: the host is already running")
	// ErrHostClosed: Close was called.
	ErrHostClosed = errors.New("provisioning: the host is closed")
	// ErrDraining: no wish is accepted after Drain.
	ErrDraining = errors.New("provisioning: the cluster is draining")
	// ErrSuperseded: a later generation is wished for than the one waited for.
	ErrSuperseded = errors.New("provisioning: a later generation is wished for")
	// ErrNotDesired: the latest wish has no such slot.
	ErrNotDesired = errors.New("provisioning: the slot is not wished for")
)

// Host is the loop around a driver and an executor: clock, timer, wake-ups,
// shutdown. All methods are safe for concurrent use, and but for Run, Drain,
// Close, WaitConverged and WaitReady, which wait for passes and calls, also from
// OnEvent and from the backend.
type Host struct {
	driver   *ClusterDriver
	executor *Executor
	clock    Clock
	tick     time.Duration
	wake     chan struct{}
	folding  chan struct{} // holds a value unless a Close folds

	// reading is held while the time is read and fed to the driver. One that is
	// read early and fed late would look like a clock that was set back, and the
	// way forward again would count twice.
	reading sync.Mutex

	// mu is never held while the driver, the executor or the user is called.
	mu      sync.Mutex
	stop    context.CancelCauseFunc // of the loop that runs
	stopped chan struct{}           // closed when that loop has ended; nil: none runs
	changed chan struct{}           // closed when waiters should look again; nil: none waits
	closed  atomic.Bool             // written under mu
	driving atomic.Bool             // a loop runs
}

// NewHost returns a host that does nothing until Run. Errors are those of
// [NewClusterDriver] and [ErrInvalidConfig].
func NewHost(config HostConfig) (*Host, error) {
	if config.Backend == nil {
		return nil, fmt.Errorf("%w: HostConfig.Backend is nil", ErrInvalidConfig)
	}
	if config.Tick < 0 {
		return nil, fmt.Errorf("%w: HostConfig.Tick is %v, must not be negative", ErrInvalidConfig, config.Tick)
	}
	driving := Config{
		Retry: config.Retry, GroupRetry: config.GroupRetry, MaxInFlight: config.MaxInFlight,
		MaxNodes: config.MaxNodes, FirstAttempt: config.FirstAttempt, OnEvent: config.OnEvent,
		Journal: config.Journal,
	}
	if backend, ok := config.Backend.(GroupValidator); ok {
		driving.ValidateGroup = backend.ValidateGroup
	}
	driver, err := NewClusterDriver(config.Shape, driving)
	if err != nil {
		return nil, err
	}
	h := &Host{driver: driver, clock: config.Clock, tick: config.Tick,
		wake: make(chan struct{}, 1), folding: make(chan struct{}, 1)}
	h.folding <- struct{}{}
	setDefault(&h.tick, DefaultTick)
	if h.clock == nil {
		h.clock = systemClock{}
	}
	h.executor, err = NewExecutor(config.Backend, ExecutorConfig{Deliver: h.Deliver, Go: config.Go})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Driver returns the driver, for its snapshots, Explain and Plan. The host
// drives it, and nobody else may. What is delivered or wished for past the
// host is noticed at the next tick.
func (h *Host) Driver() *ClusterDriver { return h.driver }

// Deliver takes an observation and wakes the loop. A closed host takes only the
// ends of operations, and one that does not drive drops mere progress: streams
// may go on for long, and what nobody folds would pile up.
func (h *Host) Deliver(o Observation) {
	progress := o.Kind == BootstrapProgress && o.Stage.rank() == 0
	if h.closed.Load() && o.Kind != OperationCompleted || progress && !h.driving.Load() {
		return
	}
	h.driver.Deliver(o)
	h.rouse()
}

// UpdateDesired offers a new wish and wakes the loop. Beside the refusals of
// [ClusterDriver.UpdateDesired], of which [ErrDraining] is one, there is
// [ErrHostClosed].
func (h *Host) UpdateDesired(shape ClusterShape) error {
	if h.closed.Load() {
		return ErrHostClosed
	}
	h.tellTime()
	if err := h.driver.UpdateDesired(shape); err != nil {
		return err
	}
	h.rouse()
	h.tell() // who waits for an earlier generation waits in vain
	return nil
}

// PlanUpdate returns what UpdateDesired would change if it were offered shape
// now; see [ClusterDriver.PlanUpdate]. The refusals are those of UpdateDesired.
func (h *Host) PlanUpdate(shape ClusterShape) (UpdatePlan, error) {
	if h.closed.Load() {
		return UpdatePlan{}, ErrHostClosed
	}
	return h.driver.PlanUpdate(shape, h.clock.Now())
}

// Replace ends the attempt that a slot has now, on purpose, and wakes the loop;
// see [ClusterDriver.Replace]. The errors are [ErrUnknownSlot] and
// [ErrHostClosed].
func (h *Host) Replace(id LogicalNodeID, reason string) (NodeAttemptID, error) {
	if h.closed.Load() {
		return 0, ErrHostClosed
	}
	attempt, err := h.driver.Replace(id, reason)
	if err == nil {
		h.rouse()
	}
	return attempt, err
}

// Pause stops growth, see [ClusterDriver.Pause], and wakes the loop.
func (h *Host) Pause() {
	h.tellTime()
	h.driver.Pause()
	h.rouse()
}

// Resume ends a pause and wakes the loop.
func (h *Host) Resume() {
	h.tellTime()
	h.driver.Resume()
	h.rouse()
}

// tellTime has what follows dated by the present time, in events and in the
// journal.
func (h *Host) tellTime() {
	h.reading.Lock()
	defer h.reading.Unlock()
	h.driver.TriggerIfDue(h.clock.Now())
}

// readClock feeds the driver's clock for a pass.
func (h *Host) readClock() (now time.Time, err error) {
	h.reading.Lock()
	defer h.reading.Unlock()
	now = h.clock.Now()
	h.driver.in.Lock()
	defer h.driver.in.Unlock()
	_, err = h.driver.feed(now)
	return now, err
}

func (h *Host) rouse() {
	select {
	case h.wake <- struct{}{}:
	default: // it will wake already
	}
}

// Run drives until ctx is done or Close is called. It stops passes, not
// machines and not calls: if slots still hold something it returns a
// [*HeldError] that lists them and wraps why Run ended, the cause of ctx or
// [ErrHostClosed]; else it returns nil. After ctx was done Run may be called
// again; Close ends the calls.
//
// [ErrHostRunning] and [ErrHostClosed] say that it did not begin. An error of
// [ClusterDriver.DriveUntilBlocked] ends it; a [*HeldError] wraps that too if
// something is held.
func (h *Host) Run(ctx context.Context) error {
	ctx, end, err := h.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	err = h.drive(ctx, func() bool { return false })
	if err == nil && len(h.Held()) == 0 {
		return nil
	}
	return h.withHeld(cmp.Or(err, context.Cause(ctx)))
}

// begin claims the loop. Whoever gets it calls end when done. The context ends
// with Close.
func (h *Host) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.closed.Load():
		return nil, nil, ErrHostClosed
	case h.stopped != nil:
		return nil, nil, ErrHostRunning
	}
	ctx, stop := context.WithCancelCause(ctx)
	stopped := make(chan struct{})
	h.stop, h.stopped = stop, stopped
	h.driving.Store(true)
	return ctx, func() {
		stop(nil)
		h.driving.Store(false)
		h.mu.Lock()
		h.stop, h.stopped = nil, nil
		h.mu.Unlock()
		close(stopped)
		h.tell()
	}, nil
}

// drive runs passes and sleeps between them until ctx is done or done holds. An
// error is the driver's.
func (h *Host) drive(ctx context.Context, done func() bool) error {
	var own ownPasses
	for ctx.Err() == nil {
		// One pass at a time, each at a now of its own. Under a stream of
		// observations that never pauses there is always another pass to
		// run; time must go on meanwhile, and ctx be heeded.
		now, err := h.readClock()
		if err != nil {
			return err
		}
		pass, err := h.driver.driveAt(nil, h.executor)
		if err != nil {
			return err
		}
		if err := own.count(pass.ownDoing); err != nil {
			return err
		}
		h.tell()
		if done() {
			return nil
		}
		if !pass.again {
			until := now.Add(h.tick)
			if requeue, ok := h.driver.RequeueAt(); ok && requeue.Before(until) {
				until = requeue
			}
			h.clock.Sleep(ctx, until, h.wake)
		}
	}
	return nil
}

// tell lets those who wait look again.
func (h *Host) tell() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.changed != nil {
		close(h.changed)
		h.changed = nil
	}
}

// await returns nil once done holds, looking again after each pass, after an
// update and when a loop ends.
func (h *Host) await(ctx context.Context, done func() (bool, error)) error {
	for {
		h.mu.Lock()
		if h.changed == nil {
			h.changed = make(chan struct{})
		}
		changed, closed := h.changed, h.closed.Load()
		h.mu.Unlock()
		if ok, err := done(); ok || err != nil {
			return err
		}
		if closed {
			return ErrHostClosed
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// runs reports whether a loop runs.
func (h *Host) runs() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stopped != nil
}

// WaitConverged waits until the wish of that generation is fulfilled. It
// returns [ErrSuperseded] once a later one is wished for, [ErrHostClosed] if
// the host is closed before the wish is fulfilled, and the cause of ctx when
// that is done. What was delivered before the call counts, whether or not a pass
// has folded it yet; so does a Replace.
func (h *Host) WaitConverged(ctx context.Context, generation uint64) error {
	delivered := h.driver.deliveries()
	return h.await(ctx, func() (bool, error) {
		folded := h.driver.hasFolded(delivered) // asked first: what is seen then is no older
		if latest := h.driver.Generation(); latest > generation {
			return false, fmt.Errorf("%w: %d, waited for %d", ErrSuperseded, latest, generation)
		}
		return folded && h.driver.Converged(generation), nil
	})
}

// WaitReady waits until a slot is ready with the exact spec of the latest wish,
// also of one that is accepted while it waits. It returns [ErrNotDesired] once
// the latest wish has no such slot, [ErrHostClosed] if the host is closed before
// the slot is ready, and the cause of ctx when that is done. What was delivered
// before the call counts, as it does for WaitConverged: after a Replace it waits
// for the attempt that follows. So while nobody drives neither says that all is
// well, unless everything has been folded.
func (h *Host) WaitReady(ctx context.Context, id LogicalNodeID) error {
	delivered := h.driver.deliveries()
	return h.await(ctx, func() (bool, error) {
		folded := h.driver.hasFolded(delivered) // asked first: what is seen then is no older
		wished, ready := h.driver.isReady(id)
		if !wished {
			return false, fmt.Errorf("%w: %s", ErrNotDesired, id)
		}
		return folded && ready, nil
	})
}

// Drain wishes for nothing under the next generation, refuses later wishes and
// returns nil once every slot is gone. It drives by itself while Run does not,
// also if Run ends meanwhile. It may be called again, to wait on.
//
// If it ends before all is gone, for the cause of ctx, for [ErrHostClosed] or
// for an error that would end Run, it returns that, in a [*HeldError] if
// something is held.
func (h *Host) Drain(ctx context.Context) error {
	if h.closed.Load() {
		return h.withHeld(ErrHostClosed)
	}
	h.tellTime()
	if err := h.driver.Drain(); err != nil {
		return err
	}
	h.rouse()
	h.tell()

	gone := func() bool { return h.driver.Converged(h.driver.Generation()) }
	for {
		driving, end, err := h.begin(ctx)
		switch {
		case err == nil:
			err = h.driveOut(driving, end, gone)
		case errors.Is(err, ErrHostRunning):
			err = h.await(ctx, func() (bool, error) { return gone() || !h.runs(), nil })
			if err == nil && !gone() {
				continue // whoever drove has stopped
			}
		}
		if err != nil {
			return h.withHeld(err)
		}
		return nil
	}
}

// driveOut drives until all is gone, and gives the loop back also if a hook ends
// the goroutine.
func (h *Host) driveOut(ctx context.Context, end func(), gone func() bool) error {
	defer end()
	if err := h.drive(ctx, gone); err != nil || gone() {
		return err
	}
	return context.Cause(ctx)
}

// Close stops Run and Drain, cancels the calls that run and waits for them,
// takes what they still answer on record, and returns what is held. If ctx is
// done first the error wraps ctx.Err(), and the list is as good as what is
// known by then; Close may be called again, to wait on. After the first call
// nothing drives any more.
func (h *Host) Close(ctx context.Context) ([]HeldSlot, error) {
	h.mu.Lock()
	h.closed.Store(true)
	stop, stopped := h.stop, h.stopped
	h.mu.Unlock()
	if stop != nil {
		stop(ErrHostClosed)
	}
	h.tell()
	// The calls come first: a pass that makes them inline ends only with them.
	err := h.executor.Close(ctx)
	if stopped != nil && !came(ctx, stopped) || !came(ctx, h.folding) {
		return h.Held(), cmp.Or(err, fmt.Errorf("provisioning: closed while a pass still runs: %w", ctx.Err()))
	}
	defer func() { h.folding <- struct{}{} }()
	if _, outOfRange := h.readClock(); outOfRange != nil {
		return h.Held(), errors.Join(err, outOfRange)
	}
	err = errors.Join(err, h.driver.foldOnlyAt(nil))
	return h.Held(), err
}

// came waits for a value, and reports whether it came before the end of ctx.
func came(ctx context.Context, value <-chan struct{}) bool {
	select {
	case <-value:
		return true
	default:
	}
	select {
	case <-value:
		return true
	case <-ctx.Done():
		return false
	}
}

// HostStatus is a summary of the cluster.
type HostStatus struct {
	Generation uint64 // of the latest wish
	Observed   uint64 // that a pass last evaluated
	Converged  bool
	Ready      int // desired slots that are ready with the exact spec
	Desired    int
	Held       int       // slots that cost or may cost money
	RequeueAt  time.Time // zero if no deadline is stored
	Draining   bool
	Paused     bool
	Driver     DriverStats
	Executor   ExecutorStats
}

// Status returns a summary.
func (h *Host) Status() HostStatus {
	s := HostStatus{Generation: h.driver.Generation(), Observed: h.driver.ObservedGeneration(),
		Held: h.driver.heldCount(), Driver: h.driver.Stats(), Executor: h.executor.Stats()}
	s.Converged = h.driver.Converged(s.Generation)
	s.Ready, s.Desired = h.driver.Progress()
	s.RequeueAt, _ = h.driver.RequeueAt()
	s.Draining, s.Paused = h.driver.isDraining(), h.driver.Paused()
	return s
}

// Held returns the slots that hold a lease or an unresolved create, in slot
// order: what goes on costing money when nobody drives.
func (h *Host) Held() []HeldSlot { return h.driver.Held() }

// HeldSlot is a slot that holds a machine, or may.
type HeldSlot struct {
	Key   ExternalKey
	Lease ProviderLeaseID // empty while it is not known
	// Unresolved: a create is in flight, or nobody knows what came of one.
	Unresolved bool
}

// String returns the slot in one line.
func (s HeldSlot) String() string {
	text := fmt.Sprintf("%s attempt %d", s.Key.Node, s.Key.Attempt)
	if s.Lease != "" {
		text += " holds lease " + string(s.Lease)
	}
	if s.Unresolved {
		text += " may hold a machine: its create is unresolved"
	}
	return text
}

// Held returns the slots that hold a lease or an unresolved create, in slot
// order. It looks at every slot; how many they are, [Host.Status] knows.
func (d *ClusterDriver) Held() []HeldSlot {
	d.world.Lock()
	defer d.world.Unlock()
	held := slices.Grow([]HeldSlot(nil), d.held)
	for n := range d.state.inOrder() {
		if n.lease != "" || n.unresolved() {
			held = append(held, HeldSlot{Key: ExternalKey{Run: n.template.run, Node: n.id, Attempt: n.attempt},
				Lease: n.lease, Unresolved: n.unresolved()})
		}
	}
	return held
}

func (d *ClusterDriver) heldCount() int {
	d.world.Lock()
	defer d.world.Unlock()
	return d.held
}

// unresolved: a create is in flight, or nobody knows what came of one.
func (n *node) unresolved() bool { return n.ambiguous == CreateLease || n.pending == CreateLease }

// HeldError says what is still held when a host stops.
type HeldError struct {
	Held  []HeldSlot
	Cause error // why the host stopped
}

// withHeld returns cause, in a [*HeldError] if anything is held.
func (h *Host) withHeld(cause error) error {
	if held := h.Held(); len(held) > 0 {
		return &HeldError{Held: held, Cause: cause}
	}
	return cause
}

// maxListed bounds the text of a HeldError, which may hold a million slots.
const maxListed = 16

// Error lists the first slots.
func (e *HeldError) Error() string {
	var lines []string
	for _, s := range e.Held[:min(len(e.Held), maxListed)] {
		lines = append(lines, s.String())
	}
	if more := len(e.Held) - maxListed; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return fmt.Sprintf("provisioning: stopped (%v) with %d held: %s", e.Cause, len(e.Held), strings.Join(lines, "; "))
}

// Unwrap returns why the host stopped.
func (e *HeldError) Unwrap() error { return e.Cause }

// systemClock is the machine's clock. Its times carry a monotonic reading, so
// setting the wall clock moves nothing.
type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) Sleep(ctx context.Context, until time.Time, wake <-chan struct{}) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-wake:
	case <-ctx.Done():
	}
}
