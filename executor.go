package provisioning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	"github.com/swactor/provisioning/internal/idmap"
	"github.com/swactor/provisioning/internal/idset"
	"github.com/swactor/provisioning/internal/workers"
)

// keptResults is how many results of a live attempt can be replayed. The
// driver has one operation of an attempt pending at a time, so that even the
// one before the last is asked for only by somebody who is confused.
const keptResults = 8

// Errors of [Executor.Submit] and [NewExecutor].
var (
	// ErrOperationConflict: the OperationID was used before, for an effect
	// that differs in some input.
	ErrOperationConflict = errors.New("provisioning: the operation id stands for another effect")
	// ErrOperationRetired: the attempt is retired, or has moved on so far
	// that the result of this operation is no longer kept.
	ErrOperationRetired = errors.New("provisioning: the operation is over and its result no longer kept")
	// ErrExecutorClosed: [Executor.Close] was called.
	ErrExecutorClosed = errors.New("provisioning: the executor is closed")
	// ErrInvalidEffect: the effect names no operation, or its key is one of
	// another attempt.
	ErrInvalidEffect = errors.New("provisioning: invalid effect")
	// ErrNoBackend and ErrNoDeliver: an executor cannot do without.
	ErrNoBackend = errors.New("provisioning: an executor needs a backend")
	ErrNoDeliver = errors.New("provisioning: an executor needs a Deliver function")
)

// ExecutorConfig is what an [Executor] needs beside its backend.
type ExecutorConfig struct {
	// Deliver takes the result of every call, and whatever a bootstrap
	// reports through its sink. It is called from any goroutine and with no
	// lock held, so it may call back into the executor; only Close would
	// wait for itself there. It should not block, because the next call of
	// the same attempt waits for it. [ClusterDriver.Deliver] fits. Required.
	Deliver func(Observation)
	// Go has to run f in the end: at once, on a goroutine, or when a test
	// says so. A call counts as running from the moment it is handed to Go,
	// so one that Go holds back past its deadline is made with a ctx that is
	// done. Nil makes every call on a goroutine, and one goroutine makes one
	// call after the other while they return at once.
	Go func(f func())
}

// Executor is the [EffectExecutor] of this package. It makes the calls to an
// [EffectBackend] and keeps the ledger of their results:
//
//   - One operation is at most one call. The same effect again is a no-op
//     while it waits or runs; once it has ended its result is delivered again.
//   - At most one call of an attempt runs at a time. An effect submitted
//     while an earlier call of its attempt has not returned, expired or not,
//     waits for it, and calls are made in the order of submission.
//   - It keeps no time: a deadline is the driver's business, which calls
//     Expire. A call that never returns costs a goroutine, holds up its own
//     attempt and nothing else, and is named by Running.
//   - The ctx of a call is cancelled by Expire, by Close, and once the call has
//     returned (B7).
//   - A panic or a runtime.Goexit in the backend is an Ambiguous result.
//   - Memory follows the live attempts: the last 8 results of each, and a few
//     words that tell new attempts from retired ones.
//
// All methods are safe for concurrent use.
type Executor struct {
	backend EffectBackend
	deliver func(Observation)
	spawn   func(func())
	seed    maphash.Seed // of the fingerprints

	// mu is never held while Deliver, Go or the backend is called.
	mu       sync.Mutex
	attempts idmap.Map[*ledger] // by NodeAttemptID
	retired  idset.Set          // attempts that are over; one in neither is new
	calls    []*execution       // which have not returned, in no order
	busy     int                // goroutines that make calls or deliver their results
	closed   bool
	idle     chan struct{} // closed once closed is set and busy is 0
	stats    ExecutorStats
}

// ExecutorStats says what an [Executor] has done and what it holds. Every
// submitted operation is counted once in Completed, Expired, Dropped, Queued
// or, without RunningExpired, in Running.
type ExecutorStats struct {
	Submitted     uint64 // operations accepted, each counted once
	Completed     uint64 // results of calls that counted
	Expired       uint64 // ended by Expire, running or queued
	Dropped       uint64 // queued and never run: the attempt was retired or the executor closed
	Replayed      uint64 // results delivered again
	LateDiscarded uint64 // results that came after their operation had expired
	Panics        uint64 // calls that ended in a panic or runtime.Goexit
	DeliverPanics uint64 // panics of Deliver; such a result is still there for Expire

	Attempts       int // attempts with a ledger
	Running        int // calls that have not returned
	RunningExpired int // those of them that have expired
	Queued         int // effects behind a call of their attempt
}

// ledger is what the executor knows of one attempt.
type ledger struct {
	highest uint64 // sequence of all that were accepted
	running *execution
	waiting []*execution // first come, first served; empty unless running is set
	ended   [keptResults]*result
	next    uint8 // the place in ended to write next
	retired bool  // waits only for its last call to return

	// A create that returns after its deadline may have reached the provider
	// up to the moment it returned, and the driver cannot know when that
	// was: it counts from the deadline. The executor has no clock either,
	// but the first effect submitted after the return says a time that lies
	// after it.
	lateCreate   bool      // returned, and nothing was submitted since
	lateCreateAt time.Time // what that effect said
}

// execution is one accepted effect that waits or runs.
type execution struct {
	effect Effect
	ledger *ledger
	// Set while its call runs.
	ctx          context.Context
	cancel       context.CancelFunc
	place        int       // in Executor.calls
	lastCreateAt time.Time // for the request; see ledger.lateCreate
	over         *result   // it expired: what comes of the call does not count
}

// result is what is kept of an effect that has ended.
type result struct {
	fingerprint uint64 // of the effect
	completion  Completion
}

// NewExecutor returns an executor that makes its calls to backend. It returns
// [ErrNoBackend] or [ErrNoDeliver] if that is missing.
func NewExecutor(backend EffectBackend, config ExecutorConfig) (*Executor, error) {
	if backend == nil {
		return nil, ErrNoBackend
	}
	if config.Deliver == nil {
		return nil, ErrNoDeliver
	}
	spawn := config.Go
	if spawn == nil {
		spawn = new(workers.Pool).Run
	}
	return &Executor{
		backend: backend, deliver: config.Deliver, spawn: spawn, seed: maphash.MakeSeed(), idle: make(chan struct{}),
	}, nil
}

// Submit implements [EffectExecutor]. The effect's slices, maps and pointers
// are shared and must not change any more. The error is one of
// [ErrOperationConflict], [ErrOperationRetired], [ErrExecutorClosed] and
// [ErrInvalidEffect], and the effect then never runs because of this call.
func (x *Executor) Submit(effect Effect) (queued bool, err error) {
	start, replay, queued, err := x.admit(&effect)
	switch {
	case err != nil:
		return false, fmt.Errorf("%w: %v %v of %q", err, effect.Kind, effect.Operation, effect.Key.Node)
	case start != nil:
		x.spawn(func() { x.run(start) })
	case replay != nil:
		x.hand(effect.Key.Node, replay.completion)
	}
	return queued, nil
}

// admit says what has to be done about an effect: start it, deliver a result
// again, or, if both are nil, nothing.
func (x *Executor) admit(effect *Effect) (start *execution, replay *result, queued bool, err error) {
	id := effect.Operation
	if !effect.Kind.valid() || id.Attempt == 0 || id.Sequence == 0 || effect.Key.Attempt != id.Attempt {
		return nil, nil, false, ErrInvalidEffect
	}
	e := &execution{effect: *effect} // before, because everybody waits for the lock
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil, nil, false, ErrExecutorClosed
	}
	l := x.attempts.Get(uint64(id.Attempt))
	if l == nil && x.retired.Contains(uint64(id.Attempt)) || l != nil && l.retired {
		return nil, nil, false, ErrOperationRetired
	}
	if l == nil {
		l = &ledger{}
		x.attempts.Put(uint64(id.Attempt), l)
	}
	if id.Sequence <= l.highest {
		return x.again(l, effect)
	}
	e.ledger = l
	l.highest = id.Sequence
	if l.lateCreate {
		l.lateCreate, l.lateCreateAt = false, effect.DispatchedAt
	}
	x.stats.Submitted++
	if l.running != nil {
		l.waiting = append(l.waiting, e)
		x.stats.Queued++
		return nil, nil, true, nil
	}
	x.begin(e)
	x.busy++
	return e, nil, false, nil
}

// again is admit for an operation that is no new one. The caller holds mu.
func (x *Executor) again(l *ledger, effect *Effect) (start *execution, replay *result, queued bool, err error) {
	sequence := effect.Operation.Sequence
	if r := l.result(sequence); r != nil {
		if r.fingerprint != effect.fingerprint(x.seed) {
			return nil, nil, false, ErrOperationConflict
		}
		x.stats.Replayed++
		return nil, r, false, nil
	}
	e := l.open(sequence)
	if e == nil {
		return nil, nil, false, ErrOperationRetired
	}
	if !e.effect.Equal(*effect) {
		return nil, nil, false, ErrOperationConflict
	}
	return nil, nil, e != l.running, nil
}

// Expire implements [EffectExecutor]. It delivers nothing. Of an operation it
// does not know it cannot say the Kind.
func (x *Executor) Expire(id OperationID) Completion {
	completion, cancel := x.expire(id)
	if cancel != nil {
		cancel()
	}
	return completion
}

func (x *Executor) expire(id OperationID) (Completion, context.CancelFunc) {
	x.mu.Lock()
	defer x.mu.Unlock()
	unknown := Completion{Operation: id, Class: ClassAmbiguous, Message: "the executor does not know the operation"}
	l := x.attempts.Get(uint64(id.Attempt))
	if l == nil {
		return unknown, nil
	}
	if r := l.result(id.Sequence); r != nil {
		return r.completion, nil
	}
	e := l.open(id.Sequence)
	if e == nil {
		return unknown, nil
	}
	x.stats.Expired++
	if e == l.running {
		e.over = e.keep(x.result(e, e.outcome(ClassAmbiguous, "no answer before the deadline")))
		return e.over.completion, e.cancel
	}
	l.waiting = slices.DeleteFunc(l.waiting, func(w *execution) bool { return w == e })
	x.stats.Queued--
	r := e.keep(x.result(e, e.outcome(ClassNotStarted, "an earlier call of the attempt did not return before the deadline")))
	return r.completion, nil
}

// Retire implements [EffectExecutor]. What waits is dropped and never runs,
// and nothing is delivered for it. A call that runs goes on, and its result is
// delivered unless it has expired.
func (x *Executor) Retire(attempt NodeAttemptID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.retired.Add(uint64(attempt))
	l := x.attempts.Get(uint64(attempt))
	if l == nil {
		return
	}
	l.retired = true
	x.drop(l)
	if l.running == nil {
		x.attempts.Delete(uint64(attempt))
	}
}

// Running implements [EffectExecutor].
func (x *Executor) Running() []RunningCall {
	x.mu.Lock()
	defer x.mu.Unlock()
	running := make([]RunningCall, len(x.calls))
	for i, e := range x.calls {
		running[i] = e.running()
	}
	slices.SortFunc(running, func(a, b RunningCall) int { return compareOperations(a.Operation, b.Operation) })
	return running
}

// overrunning returns the call of an attempt that has outlived its deadline and
// has not returned, or nil.
func (x *Executor) overrunning(attempt NodeAttemptID) *RunningCall {
	x.mu.Lock()
	defer x.mu.Unlock()
	l := x.attempts.Get(uint64(attempt))
	if l == nil || l.running == nil || l.running.over == nil {
		return nil
	}
	call := l.running.running()
	return &call
}

func (e *execution) running() RunningCall {
	return RunningCall{
		Operation: e.effect.Operation, Kind: e.effect.Kind, Node: e.effect.Key.Node,
		Since: e.effect.DispatchedAt, Expired: e.over != nil,
	}
}

// Stats returns the counters as they are now.
func (x *Executor) Stats() ExecutorStats {
	x.mu.Lock()
	defer x.mu.Unlock()
	stats := x.stats
	stats.Attempts = x.attempts.Len()
	stats.Running = len(x.calls)
	for _, e := range x.calls {
		if e.over != nil {
			stats.RunningExpired++
		}
	}
	return stats
}

// Close refuses new effects, cancels the calls that run and ends those that
// wait as NotStarted. It returns nil once every call has returned and its
// result has been delivered, or, when ctx is done before that, an error that
// wraps ctx.Err() and says how many calls still run; their results are
// delivered when they come. It may be called again, to wait on, and from
// several goroutines at once, but not from within Deliver or the backend.
func (x *Executor) Close(ctx context.Context) error {
	x.shut()
	select {
	case <-x.idle:
		return nil
	default:
	}
	select {
	case <-x.idle:
		return nil
	case <-ctx.Done():
		x.mu.Lock()
		defer x.mu.Unlock()
		return fmt.Errorf("provisioning: closed with %d calls still running: %w", len(x.calls), ctx.Err())
	}
}

// shut does what only the first Close does.
func (x *Executor) shut() {
	x.mu.Lock()
	if x.closed {
		x.mu.Unlock()
		return
	}
	x.closed = true
	x.busy++ // a second Close waits for what this one delivers
	defer x.leave()
	cancels := make([]context.CancelFunc, len(x.calls))
	var dropped []*execution
	for i, e := range x.calls {
		cancels[i] = e.cancel
		dropped = append(dropped, x.drop(e.ledger)...)
	}
	slices.SortFunc(dropped, func(a, b *execution) int { return compareOperations(a.effect.Operation, b.effect.Operation) })
	ends := make([]*result, len(dropped))
	for i, e := range dropped {
		ends[i] = e.keep(x.result(e, e.outcome(ClassNotStarted, "the executor was closed")))
	}
	x.mu.Unlock()
	for _, cancel := range cancels {
		cancel()
	}
	for i, e := range dropped {
		x.hand(e.effect.Key.Node, ends[i].completion)
	}
}

// run makes the call of e and then those that wait behind it, one by one.
func (x *Executor) run(e *execution) {
	defer func() {
		if e == nil {
			x.leave()
			return
		}
		// The backend, or Deliver, called runtime.Goexit, which cannot be
		// stopped. This goroutine is lost to whatever waits.
		next := e
		x.spawn(func() { x.run(next) })
	}()
	for e != nil {
		x.serve(&e)
	}
}

// serve makes the call of *current, sets *current to what comes after it, and
// delivers the result. All but the call is deferred, because a Goexit runs
// nothing else.
func (x *Executor) serve(current **execution) {
	e := *current
	completion, returned := Completion{}, false
	defer func() {
		if !returned {
			problem := "the backend called runtime.Goexit"
			if cause := recover(); cause != nil {
				problem = fmt.Sprintf("the backend panicked: %v", cause)
			}
			completion = e.outcome(ClassAmbiguous, problem)
		}
		e.cancel()
		var counts bool
		*current, counts = x.settle(e, completion, !returned)
		if counts {
			x.hand(e.effect.Key.Node, completion)
		}
	}()
	completion = x.call(e)
	returned = true
}

// settle takes the outcome of a call that has returned. It returns what is to
// run next on this attempt, if anything waits, and whether the outcome counts.
func (x *Executor) settle(e *execution, completion Completion, panicked bool) (next *execution, counts bool) {
	r := x.result(e, completion) // before, because everybody waits for the lock
	x.mu.Lock()
	defer x.mu.Unlock()
	last := len(x.calls) - 1
	x.calls[last].place = e.place
	x.calls[e.place] = x.calls[last]
	x.calls[last] = nil
	x.calls = x.calls[:last]

	l := e.ledger
	l.running = nil
	if e.effect.Kind == CreateLease && (e.over != nil || len(l.waiting) > 0) {
		l.lateCreate = true
	}
	if panicked {
		x.stats.Panics++
	}
	if counts = e.over == nil; counts {
		x.stats.Completed++
		e.keep(r)
	} else {
		x.stats.LateDiscarded++
	}
	switch {
	case l.retired:
		x.attempts.Delete(uint64(e.effect.Operation.Attempt))
	case len(l.waiting) > 0:
		next = l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
		x.stats.Queued--
		x.begin(next)
	}
	return next, counts
}

// begin makes e the running call of its attempt. The caller holds mu.
func (x *Executor) begin(e *execution) {
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.lastCreateAt = e.ledger.lastCreate(&e.effect)
	e.place = len(x.calls)
	x.calls = append(x.calls, e)
	e.ledger.running = e
}

// drop takes what waits off a ledger. The caller holds mu.
func (x *Executor) drop(l *ledger) []*execution {
	dropped := l.waiting
	l.waiting = nil
	x.stats.Queued -= len(dropped)
	x.stats.Dropped += uint64(len(dropped))
	return dropped
}

// leave is the last thing a goroutine of the executor does.
func (x *Executor) leave() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.busy--
	if x.closed && x.busy == 0 {
		close(x.idle)
	}
}

// hand delivers a completion. A panic of Deliver is counted and goes no
// further: the driver gets the same completion when it asks to expire the
// operation.
func (x *Executor) hand(node LogicalNodeID, completion Completion) {
	defer func() {
		if recover() != nil {
			x.mu.Lock()
			x.stats.DeliverPanics++
			x.mu.Unlock()
		}
	}()
	x.deliver(Observation{
		Kind: OperationCompleted, Node: node, Attempt: completion.Operation.Attempt, Completion: completion,
	})
}

// call makes the request from the effect, calls the backend and reads its
// answer.
func (x *Executor) call(e *execution) Completion {
	effect, answer := &e.effect, e.outcome(ClassNone, "")
	var err error
	switch effect.Kind {
	case CreateLease:
		var result CreateLeaseResult
		result, err = x.backend.CreateLease(e.ctx, CreateLeaseRequest{
			Key: effect.Key, Operation: effect.Operation, Spec: effect.spec(), AdoptOnly: effect.AdoptOnly,
			CreatesSent: effect.CreatesSent, LastCreateAt: e.lastCreateAt, Now: effect.DispatchedAt,
		})
		answer.Lease, answer.Endpoint = result.Lease, cloneEndpoint(result.Endpoint)
	case LookupEndpoint:
		var result LookupEndpointResult
		result, err = x.backend.LookupEndpoint(e.ctx, LookupEndpointRequest{
			Key: effect.Key, Operation: effect.Operation, Spec: effect.spec(), Lease: effect.Lease,
		})
		answer.Endpoint = cloneEndpoint(result.Endpoint)
	case StartBootstrap:
		var result StartBootstrapResult
		result, err = x.backend.StartBootstrap(e.ctx, StartBootstrapRequest{
			Key: effect.Key, Operation: effect.Operation, Spec: effect.spec(), Lease: effect.Lease,
			Endpoint: effect.endpoint(),
			Sink:     NewBootstrapSink(effect.Key.Node, effect.Operation.Attempt, x.deliver),
		})
		answer.Session = result.Session
	case BootstrapConvergenceObserved:
		err = x.backend.BootstrapConvergenceObserved(e.ctx, BootstrapConvergenceObservedRequest{
			Key: effect.Key, Operation: effect.Operation, Spec: effect.spec(), Lease: effect.Lease,
			Endpoint: effect.endpoint(), Session: effect.Session, Swactor: effect.Swactor,
		})
	case CancelBootstrap:
		err = x.backend.CancelBootstrap(e.ctx, CancelBootstrapRequest{
			Key: effect.Key, Operation: effect.Operation, Spec: effect.spec(), Lease: effect.Lease,
			Endpoint: cloneEndpoint(effect.Endpoint), Session: effect.Session,
		})
	case DestroyLease:
		err = x.backend.DestroyLease(e.ctx, DestroyLeaseRequest{
			Key: effect.Key, Operation: effect.Operation, Spec: effect.spec(), Lease: effect.Lease,
			CreatesSent: effect.CreatesSent, LastCreateAt: e.lastCreateAt, Now: effect.DispatchedAt,
		})
	}
	if err != nil {
		return answer.failed(err)
	}
	return answer.judged()
}

// outcome returns a completion of e that carries no result yet.
func (e *execution) outcome(class FailureClass, message string) Completion {
	return Completion{Operation: e.effect.Operation, Kind: e.effect.Kind, Class: class, Message: message}
}

// result returns what is kept of e.
func (x *Executor) result(e *execution, completion Completion) *result {
	return &result{e.effect.fingerprint(x.seed), completion}
}

// keep records what came of e for good, in the place of the oldest result. The
// caller holds mu.
func (e *execution) keep(r *result) *result {
	l := e.ledger
	l.ended[l.next] = r
	l.next = (l.next + 1) % keptResults
	return r
}

// result returns what came of the operation of that sequence, or nil if it has
// not ended or is not kept.
func (l *ledger) result(sequence uint64) *result {
	if e := l.running; e != nil && e.over != nil && e.effect.Operation.Sequence == sequence {
		return e.over
	}
	for _, r := range l.ended {
		if r != nil && r.completion.Operation.Sequence == sequence {
			return r
		}
	}
	return nil
}

// open returns the execution of that sequence, or nil if none waits or runs that
// has not ended.
func (l *ledger) open(sequence uint64) *execution {
	if e := l.running; e != nil && e.over == nil && e.effect.Operation.Sequence == sequence {
		return e
	}
	for _, e := range l.waiting {
		if e.effect.Operation.Sequence == sequence {
			return e
		}
	}
	return nil
}

// lastCreate returns when the last create of the attempt may have reached the
// provider, as far as is known when effect goes out; never after its Now (B3).
func (l *ledger) lastCreate(effect *Effect) time.Time {
	late := l.lateCreateAt
	if l.lateCreate || late.After(effect.DispatchedAt) {
		late = effect.DispatchedAt
	}
	if late.After(effect.LastCreateAt) {
		return late
	}
	return effect.LastCreateAt
}

// endpoint returns where the machine answers, the zero endpoint if that is not
// known.
func (e *Effect) endpoint() SSHEndpoint {
	if e.Endpoint == nil {
		return SSHEndpoint{}
	}
	return *e.Endpoint
}

// cloneEndpoint keeps the two sides of a call from sharing an endpoint.
func cloneEndpoint(endpoint *SSHEndpoint) *SSHEndpoint {
	if endpoint == nil {
		return nil
	}
	clone := *endpoint
	return &clone
}

func compareOperations(a, b OperationID) int {
	return cmp.Or(cmp.Compare(a.Attempt, b.Attempt), cmp.Compare(a.Sequence, b.Sequence))
}
