package provisioning

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Clock is where a [Host] reads the time and how it sleeps. The default is the
// machine's monotonic clock; a test or a simulation brings its own.
type Clock interface {
	// Now returns the present instant. Only differences matter.
	Now() time.Time
	// Sleep returns once Now has reached until, wake holds a value, which
	// Sleep takes, or ctx is done.
	Sleep(ctx context.Context, until time.Time, wake <-chan struct{})
}

// DefaultTick is how long a host sleeps at most.
const DefaultTick = 30 * time.Second

// HostConfig configures a [Host]. Shape and Backend are required.
type HostConfig struct {
	Shape   ClusterShape
	Backend EffectBackend
	// As in [Config].
	Retry        RetryPolicy
	GroupRetry   map[NodeGroupID]RetryPolicy
	MaxInFlight  int
	MaxNodes     int
	FirstAttempt NodeAttemptID
	OnEvent      func(Event)
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
	// ErrHostRunning: Run was called while it runs.
	ErrHostRunning = errors.New("provisioning: the host is already running")
	// ErrHostClosed: Close was called.
	ErrHostClosed = errors.New("provisioning: the host is closed")
	// ErrDraining: no wish is accepted after Drain.
	ErrDraining = errors.New("provisioning: the host is draining")
	// ErrSuperseded: a later generation is wished for than the one waited for.
	ErrSuperseded = errors.New("provisioning: a later generation is wished for")
)

// Host is the loop around a driver and an executor: clock, timer, wake-ups,
// shutdown. All methods are safe for concurrent use.
type Host struct {
	driver   *ClusterDriver
	executor *Executor
	clock    Clock
	tick     time.Duration
	wake     chan struct{}

	mu       sync.Mutex
	stop     context.CancelFunc // of the loop that runs
	stopped  chan struct{}      // closed when that loop has ended; nil: none runs
	changed  chan struct{}      // closed and replaced after each round of passes
	draining bool
	closed   bool
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
	driver, err := NewClusterDriver(config.Shape, Config{
		Retry: config.Retry, GroupRetry: config.GroupRetry, MaxInFlight: config.MaxInFlight,
		MaxNodes: config.MaxNodes, FirstAttempt: config.FirstAttempt, OnEvent: config.OnEvent,
	})
	if err != nil {
		return nil, err
	}
	h := &Host{driver: driver, clock: config.Clock, tick: config.Tick,
		wake: make(chan struct{}, 1), changed: make(chan struct{})}
	setDefault(&h.tick, DefaultTick)
	if h.clock == nil {
		h.clock = systemClock{}
	}
	h.executor, err = NewExecutor(config.Backend, ExecutorConfig{Deliver: h.Deliver, Go: config.Go})
	return h, err
}

// Driver returns the driver, for its snapshots, Explain and Plan. The host
// drives it.
func (h *Host) Driver() *ClusterDriver { return h.driver }

// Deliver takes an observation and wakes the loop.
func (h *Host) Deliver(o Observation) {
	h.driver.Deliver(o)
	h.rouse()
}

// UpdateDesired offers a new wish and wakes the loop. Beside the refusals of
// [ClusterDriver.UpdateDesired] there are [ErrDraining] and [ErrHostClosed].
func (h *Host) UpdateDesired(shape ClusterShape) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.closed:
		return ErrHostClosed
	case h.draining:
		return ErrDraining
	}
	if err := h.driver.UpdateDesired(shape); err != nil {
		return err
	}
	h.rouse()
	return nil
}

func (h *Host) rouse() {
	select {
	case h.wake <- struct{}{}:
	default: // it will wake already
	}
}

// Run drives until ctx is done or Close is called. It stops passes, not
// machines and not calls: if slots still hold something it returns a
// [*HeldError] that lists them, else nil. After ctx was done Run may be called
// again; Close ends the calls. Any other error is one of
// [ClusterDriver.DriveUntilBlocked], [ErrHostRunning] or [ErrHostClosed].
func (h *Host) Run(ctx context.Context) error {
	return h.loop(ctx, func() bool { return false })
}

// loop drives until ctx is done, Close is called or done holds.
func (h *Host) loop(ctx context.Context, done func() bool) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	stopped := make(chan struct{})
	h.mu.Lock()
	switch {
	case h.closed:
		h.mu.Unlock()
		return ErrHostClosed
	case h.stopped != nil:
		h.mu.Unlock()
		return ErrHostRunning
	}
	h.stop, h.stopped = stop, stopped
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		h.stop, h.stopped = nil, nil
		h.mu.Unlock()
		close(stopped)
	}()

	for ctx.Err() == nil {
		now := h.clock.Now()
		if _, err := h.driver.DriveUntilBlocked(now, h.executor); err != nil {
			return err
		}
		h.broadcast()
		if done() {
			return nil
		}
		until := now.Add(h.tick)
		if requeue, ok := h.driver.RequeueAt(); ok && requeue.Before(until) {
			until = requeue
		}
		h.clock.Sleep(ctx, until, h.wake)
	}
	return heldError(h.Held(), context.Cause(ctx))
}

func (h *Host) broadcast() {
	h.mu.Lock()
	close(h.changed)
	h.changed = make(chan struct{})
	h.mu.Unlock()
}

// await returns nil once done holds, looking again after each round of passes.
func (h *Host) await(ctx context.Context, done func() (bool, error)) error {
	for {
		h.mu.Lock()
		changed, closed := h.changed, h.closed
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

// WaitConverged waits until the wish of that generation is fulfilled. Once a
// later one is wished for it returns [ErrSuperseded]; after Close it returns
// [ErrHostClosed], and the cause of ctx when that is done.
func (h *Host) WaitConverged(ctx context.Context, generation uint64) error {
	return h.await(ctx, func() (bool, error) {
		if h.driver.Generation() > generation {
			return false, fmt.Errorf("%w: %d, waited for %d", ErrSuperseded, h.driver.Generation(), generation)
		}
		return h.driver.Converged(generation), nil
	})
}

// Drain wishes for nothing under the next generation, refuses later wishes and
// waits until every slot is gone. It drives by itself if Run does not.
func (h *Host) Drain(ctx context.Context) error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return ErrHostClosed
	}
	if !h.draining {
		if err := h.driver.wishForNothing(); err != nil {
			h.mu.Unlock()
			return err
		}
		h.draining = true
	}
	h.mu.Unlock()
	h.rouse()

	gone := func() bool { return h.driver.Converged(h.driver.Generation()) }
	for {
		err := h.loop(ctx, gone)
		if !errors.Is(err, ErrHostRunning) {
			return err
		}
		ended := false
		err = h.await(ctx, func() (bool, error) {
			h.mu.Lock()
			ended = h.stopped == nil
			h.mu.Unlock()
			return ended || gone(), nil
		})
		if err != nil || !ended || gone() {
			return err
		}
	}
}

// Close stops Run, cancels the calls that run and waits for them, takes what
// they still answer on record, and returns what is held. When ctx is done first
// it says so and returns what is held as far as it knows. After Close nothing
// drives any more.
func (h *Host) Close(ctx context.Context) ([]HeldSlot, error) {
	h.mu.Lock()
	h.closed = true
	stop, stopped := h.stop, h.stopped
	h.mu.Unlock()
	if stopped != nil {
		stop()
		select {
		case <-stopped:
		case <-ctx.Done():
			return h.Held(), context.Cause(ctx)
		}
	}
	err := h.executor.Close(ctx)
	err = errors.Join(err, h.driver.foldOnly(h.clock.Now()))
	h.broadcast()
	return h.Held(), err
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
	Driver     DriverStats
	Executor   ExecutorStats
}

// Status returns a summary.
func (h *Host) Status() HostStatus {
	s := HostStatus{Generation: h.driver.Generation(), Observed: h.driver.ObservedGeneration(),
		Held: len(h.Held()), Driver: h.driver.Stats(), Executor: h.executor.Stats()}
	s.Converged = h.driver.Converged(s.Generation)
	s.Ready, s.Desired = h.driver.Progress()
	s.RequeueAt, _ = h.driver.RequeueAt()
	h.mu.Lock()
	s.Draining = h.draining
	h.mu.Unlock()
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
// order.
func (d *ClusterDriver) Held() []HeldSlot {
	d.world.RLock()
	defer d.world.RUnlock()
	var held []HeldSlot
	for n := range d.state.inOrder() {
		unresolved := n.ambiguous == CreateLease || n.pending == CreateLease
		if n.lease != "" || unresolved {
			held = append(held, HeldSlot{Key: ExternalKey{Run: n.template.run, Node: n.id, Attempt: n.attempt},
				Lease: n.lease, Unresolved: unresolved})
		}
	}
	return held
}

// HeldError says what is still held when a host stops.
type HeldError struct {
	Held  []HeldSlot
	Cause error // why the host stopped
}

func heldError(held []HeldSlot, cause error) error {
	if len(held) == 0 {
		return nil
	}
	return &HeldError{Held: held, Cause: cause}
}

// Error lists the slots.
func (e *HeldError) Error() string {
	lines := make([]string, len(e.Held))
	for i, s := range e.Held {
		lines[i] = s.String()
	}
	return fmt.Sprintf("provisioning: stopped (%v) while %d slots are held: %s", e.Cause, len(e.Held), strings.Join(lines, "; "))
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
