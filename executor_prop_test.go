package provisioning

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// callEnd is how a scripted call ends.
type callEnd int

const (
	endsWell callEnd = iota
	endsDefinite
	endsInPanic
	endsInGoexit
	callEnds
)

// finish ends a call of op that way. Its result names op, so that a result
// which ends up under another operation is seen.
func (end callEnd) finish(op OperationID) (scriptedAnswer, error) {
	switch end {
	case endsDefinite:
		return scriptedAnswer{}, Definite(errors.New(op.String()))
	case endsInPanic:
		panic(op.String())
	case endsInGoexit:
		runtime.Goexit()
	}
	return scriptedAnswer{lease: ProviderLeaseID(op.String())}, nil
}

// completion is what the executor has to make of it, for a CreateLease.
func (end callEnd) completion(op OperationID) Completion {
	c := Completion{Operation: op, Kind: CreateLease}
	switch end {
	case endsWell:
		c.Lease = ProviderLeaseID(op.String())
	case endsDefinite:
		c.Class, c.Message = ClassDefinite, op.String()
	case endsInPanic:
		c.Class, c.Message = ClassAmbiguous, "the backend panicked: "+op.String()
	case endsInGoexit:
		c.Class, c.Message = ClassAmbiguous, "the backend called runtime.Goexit"
	}
	return c
}

// The model of an executor: lists, searched from the front, and no locks.
type (
	modelExecutor struct {
		attempts  map[NodeAttemptID]*modelAttempt
		retired   map[NodeAttemptID]bool
		closed    bool
		called    []OperationID
		delivered []Completion
		stats     ExecutorStats
	}
	modelAttempt struct {
		highest uint64
		running *modelOperation
		waiting []*modelOperation
		ended   []*modelOperation // oldest first
	}
	modelOperation struct {
		effect Effect
		answer *Completion
	}
)

func (m *modelExecutor) find(op OperationID) *modelOperation {
	a := m.attempts[op.Attempt]
	if a == nil {
		return nil
	}
	all := slices.Concat(a.waiting, a.ended)
	if a.running != nil {
		all = append(all, a.running)
	}
	for _, o := range all {
		if o.effect.Operation == op {
			return o
		}
	}
	return nil
}

func (a *modelAttempt) end(o *modelOperation, answer Completion) {
	o.answer = &answer
	a.ended = append(a.ended, o)
	a.ended = a.ended[max(0, len(a.ended)-8):]
}

func (a *modelAttempt) start(m *modelExecutor, o *modelOperation) {
	a.running = o
	m.called = append(m.called, o.effect.Operation)
}

func (m *modelExecutor) submit(e Effect) (queued bool, err error) {
	op := e.Operation
	a, known := m.attempts[op.Attempt], m.find(op)
	switch {
	case m.closed:
		return false, ErrExecutorClosed
	case m.retired[op.Attempt]:
		return false, ErrOperationRetired
	case known != nil && !known.effect.Equal(e):
		return false, ErrOperationConflict
	case known != nil && known.answer != nil:
		m.stats.Replayed++
		m.delivered = append(m.delivered, *known.answer)
		return false, nil
	case known != nil:
		return known != a.running, nil
	case a != nil && op.Sequence <= a.highest:
		return false, ErrOperationRetired
	case a == nil:
		a = &modelAttempt{}
		m.attempts[op.Attempt] = a
	}
	m.stats.Submitted++
	a.highest = op.Sequence
	o := &modelOperation{effect: e}
	if a.running != nil {
		a.waiting = append(a.waiting, o)
		return true, nil
	}
	a.start(m, o)
	return false, nil
}

func (m *modelExecutor) expire(op OperationID) (class FailureClass, result Completion) {
	o := m.find(op)
	switch {
	case o == nil:
		return ClassAmbiguous, Completion{Operation: op, Class: ClassAmbiguous, Message: "the executor does not know the operation"}
	case o.answer != nil:
		return o.answer.Class, *o.answer
	}
	m.stats.Expired++
	a := m.attempts[op.Attempt]
	answer := Completion{Operation: op, Kind: CreateLease, Class: ClassAmbiguous, Message: "no answer before the deadline"}
	if o != a.running {
		a.waiting = slices.DeleteFunc(a.waiting, func(w *modelOperation) bool { return w == o })
		answer.Class = ClassNotStarted
		answer.Message = "an earlier call of the attempt did not return before the deadline"
	}
	a.end(o, answer)
	return answer.Class, answer
}

func (m *modelExecutor) callReturns(attempt NodeAttemptID, end callEnd) {
	a := m.attempts[attempt]
	o := a.running
	a.running = nil
	if end == endsInPanic || end == endsInGoexit {
		m.stats.Panics++
	}
	if o.answer != nil {
		m.stats.LateDiscarded++
	} else {
		m.stats.Completed++
		a.end(o, end.completion(o.effect.Operation))
		m.delivered = append(m.delivered, *o.answer)
	}
	if m.retired[attempt] {
		delete(m.attempts, attempt)
	} else if len(a.waiting) > 0 {
		next := a.waiting[0]
		a.waiting = a.waiting[1:]
		a.start(m, next)
	}
}

func (m *modelExecutor) retire(attempt NodeAttemptID) {
	m.retired[attempt] = true
	a := m.attempts[attempt]
	if a == nil {
		return
	}
	m.stats.Dropped += uint64(len(a.waiting))
	a.waiting = nil
	if a.running == nil {
		delete(m.attempts, attempt)
	}
}

func (m *modelExecutor) close() {
	if m.closed {
		return
	}
	m.closed = true
	for attempt := range NodeAttemptID(modelAttempts + 1) {
		a := m.attempts[attempt]
		if a == nil {
			continue
		}
		for _, o := range a.waiting {
			m.stats.Dropped++
			a.end(o, Completion{Operation: o.effect.Operation, Kind: CreateLease, Class: ClassNotStarted, Message: "the executor was closed"})
			m.delivered = append(m.delivered, *o.answer)
		}
		a.waiting = nil
	}
}

// running returns the calls in the order of their operations, and completes
// the gauges of the stats.
func (m *modelExecutor) running() []RunningCall {
	running := []RunningCall{}
	m.stats.Attempts, m.stats.Running, m.stats.RunningExpired, m.stats.Queued = len(m.attempts), 0, 0, 0
	for attempt := range NodeAttemptID(modelAttempts + 1) {
		a := m.attempts[attempt]
		if a == nil {
			continue
		}
		m.stats.Queued += len(a.waiting)
		if a.running == nil {
			continue
		}
		e := a.running.effect
		m.stats.Running++
		if a.running.answer != nil {
			m.stats.RunningExpired++
		}
		running = append(running, RunningCall{Operation: e.Operation, Kind: e.Kind, Node: e.Key.Node,
			Since: e.DispatchedAt, Expired: a.running.answer != nil})
	}
	return running
}

const modelAttempts = 3

// inBubble runs f in a bubble of synctest and lets its panic, by which rapid
// ends a test, out of it.
func inBubble(t *testing.T, f func()) {
	var thrown any
	synctest.Test(t, func(*testing.T) {
		defer func() { thrown = recover() }()
		f()
	})
	if thrown != nil {
		panic(thrown)
	}
}

// Any history of submissions, expiries, returns, retirements and a close, one
// after another: the executor answers, calls, delivers and counts as the model
// says after every step.
func TestProp_ExecutorFollowsItsModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		inBubble(t, func() {
			t := rt
			m := &modelExecutor{attempts: map[NodeAttemptID]*modelAttempt{}, retired: map[NodeAttemptID]bool{}}
			var mu sync.Mutex
			gates, ctxs := map[OperationID]chan callEnd{}, map[OperationID]context.Context{}
			over := make(chan callEnd)
			defer close(over) // also when the property fails: nothing may stay in the bubble
			backend := &scriptedBackend{script: func(ctx context.Context, request any) (scriptedAnswer, error) {
				op := operationOf(request)
				gate := make(chan callEnd)
				mu.Lock()
				gates[op], ctxs[op] = gate, ctx
				mu.Unlock()
				select {
				case end := <-gate:
					return end.finish(op)
				case end := <-over:
					return end.finish(op)
				}
			}}
			x, log := newTestExecutor(t, backend, nil)
			release := func(attempt NodeAttemptID, end callEnd) {
				gates[m.attempts[attempt].running.effect.Operation] <- end
				m.callReturns(attempt, end)
				synctest.Wait()
			}

			attempts := rapid.Uint64Range(1, modelAttempts)
			anAttempt := func(t *rapid.T) NodeAttemptID { return NodeAttemptID(attempts.Draw(t, "attempt")) }
			// anOperation is near the highest sequence of an attempt: the next
			// one, an old one, or one ahead.
			anOperation := func(t *rapid.T) OperationID {
				op := OperationID{Attempt: anAttempt(t), Sequence: 1}
				if a := m.attempts[op.Attempt]; a != nil {
					op.Sequence = uint64(max(1, int(a.highest)+1-rapid.SampledFrom([]int{0, 0, 0, 1, 2, 3, 9, -1}).Draw(t, "back")))
				}
				return op
			}
			submit := func(t *rapid.T, op OperationID, altered bool) {
				e := executorEffect(op.Attempt, op.Sequence, CreateLease)
				e.AdoptOnly = altered
				queued, err := x.Submit(e)
				wantQueued, wantErr := m.submit(e)
				require.Equal(t, wantQueued, queued)
				require.ErrorIs(t, err, wantErr)
				if wantErr == nil {
					require.NoError(t, err)
				}
			}
			t.Repeat(map[string]func(*rapid.T){
				"submit":  func(t *rapid.T) { submit(t, anOperation(t), false) },
				"altered": func(t *rapid.T) { submit(t, anOperation(t), true) },
				"submit many": func(t *rapid.T) {
					attempt := anAttempt(t)
					for range rapid.IntRange(1, 10).Draw(t, "count") {
						op := OperationID{Attempt: attempt, Sequence: 1}
						if a := m.attempts[attempt]; a != nil {
							op.Sequence = a.highest + 1
						}
						submit(t, op, false)
						if rapid.Bool().Draw(t, "expire") {
							_, want := m.expire(op)
							require.Equal(t, want, x.Expire(op))
						}
					}
				},
				"expire": func(t *rapid.T) {
					op := anOperation(t)
					class, want := m.expire(op)
					got := x.Expire(op)
					require.Equal(t, class, got.Class)
					require.Equal(t, want, got)
				},
				"return": func(t *rapid.T) {
					running := m.running()
					if len(running) == 0 {
						t.Skip("no call")
					}
					call := rapid.SampledFrom(running).Draw(t, "call")
					release(call.Operation.Attempt, callEnd(rapid.IntRange(0, int(callEnds)-1).Draw(t, "end")))
				},
				"retire": func(t *rapid.T) {
					if rapid.IntRange(0, 4).Draw(t, "rarely") > 0 {
						t.Skip("not now")
					}
					attempt := anAttempt(t)
					x.Retire(attempt)
					m.retire(attempt)
				},
				"close": func(t *rapid.T) {
					if rapid.IntRange(0, 9).Draw(t, "rarely") > 0 {
						t.Skip("not now")
					}
					ctx, cancel := context.WithCancel(context.Background())
					cancel()
					m.close()
					if n := len(m.running()); n > 0 {
						require.EqualError(t, x.Close(ctx), fmt.Sprintf("provisioning: closed with %d calls still running: context canceled", n))
					} else {
						require.NoError(t, x.Close(ctx))
					}
				},
				"": func(t *rapid.T) {
					synctest.Wait()
					require.Equal(t, m.running(), x.Running())
					require.Equal(t, m.stats, x.Stats())
					called := []OperationID{}
					for _, request := range backend.taken() {
						called = append(called, operationOf(request))
					}
					// Calls that begin in one step begin in any order.
					want := slices.SortedFunc(slices.Values(m.called), compareOperations)
					slices.SortFunc(called, compareOperations)
					require.Equal(t, append([]OperationID{}, want...), called)
					delivered := []Completion{}
					for _, o := range log.all() {
						require.Equal(t, o.Attempt, o.Completion.Operation.Attempt)
						require.Equal(t, LogicalNodeID("w-3"), o.Node)
						delivered = append(delivered, o.Completion)
					}
					require.Equal(t, append([]Completion{}, m.delivered...), delivered)
					for op, ctx := range ctxs {
						o := m.find(op)
						alive := o != nil && o.answer == nil && !m.closed
						require.Equal(t, alive, ctx.Err() == nil, "ctx of %v", op)
					}
				},
			})
			for _, call := range m.running() {
				for a := m.attempts[call.Operation.Attempt]; a != nil && a.running != nil; {
					release(call.Operation.Attempt, endsWell)
				}
			}
			require.NoError(t, x.Close(context.Background()))
		})
	})
}

// racedOperation is what one operation of a concurrent history does.
type racedOperation struct {
	kind     OperationKind
	end      callEnd
	patience int  // how often the call yields before it ends
	obeys    bool // it also waits until its ctx is done
	stubborn bool // it also waits until the end of the history
	expire   bool
	wait     int // how often the driver yields before it expires it or goes on
}

type racedAttempt struct {
	operations []racedOperation
	retire     bool
	meddle     bool // somebody submits everything again and again
}

func drawRacedAttempts(t *rapid.T) []racedAttempt {
	operation := rapid.Custom(func(t *rapid.T) racedOperation {
		o := racedOperation{
			kind:     OperationKind(rapid.IntRange(int(CreateLease), int(DestroyLease)).Draw(t, "kind")),
			end:      callEnd(rapid.IntRange(0, int(callEnds)-1).Draw(t, "end")),
			patience: rapid.IntRange(0, 5).Draw(t, "patience"),
			expire:   rapid.Bool().Draw(t, "expire"),
			wait:     rapid.IntRange(0, 10).Draw(t, "wait"),
		}
		switch rapid.IntRange(0, 3).Draw(t, "manner") {
		case 0:
			o.obeys = true
		case 1:
			o.stubborn = rapid.IntRange(0, 3).Draw(t, "rarely") == 0
		}
		return o
	})
	attempt := rapid.Custom(func(t *rapid.T) racedAttempt {
		return racedAttempt{
			operations: rapid.SliceOfN(operation, 1, 12).Draw(t, "operations"),
			retire:     rapid.Bool().Draw(t, "retire"),
			meddle:     rapid.Bool().Draw(t, "meddle"),
		}
	})
	return rapid.SliceOfN(attempt, 1, 6).Draw(t, "attempts")
}

// raceBackend makes the calls of a concurrent history and notes what must not
// be: a second call of an operation, two calls of an attempt at once.
type raceBackend struct {
	attempts []racedAttempt
	end      chan struct{} // closed when stubborn calls may return

	mu     sync.Mutex
	calls  map[OperationID]int
	active map[NodeAttemptID]int
	wrong  []string
}

func (b *raceBackend) call(ctx context.Context, request any) (scriptedAnswer, error) {
	op := operationOf(request)
	b.mu.Lock()
	b.calls[op]++
	b.active[op.Attempt]++
	if b.calls[op] > 1 || b.active[op.Attempt] > 1 {
		b.wrong = append(b.wrong, fmt.Sprintf("%v: call %d, one of %d at once", op, b.calls[op], b.active[op.Attempt]))
	}
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.active[op.Attempt]--
		b.mu.Unlock()
	}()
	o := b.attempts[op.Attempt-1].operations[op.Sequence-1]
	for range o.patience {
		runtime.Gosched()
	}
	if o.obeys {
		<-ctx.Done()
	}
	if o.stubborn {
		<-b.end
	}
	answer, err := o.end.finish(op)
	answer.session = BootstrapSessionID(op.String())
	return answer, err
}

// The same with everything at once, on real goroutines, for the race detector:
// no operation runs twice, no attempt has two calls at once, and every accepted
// operation is answered with one result, once, unless its attempt was retired
// before its turn.
func TestProp_ExecutorAnswersOnceUnderConcurrency(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		attempts := drawRacedAttempts(t)
		race := &raceBackend{attempts: attempts, end: make(chan struct{}), calls: map[OperationID]int{}, active: map[NodeAttemptID]int{}}
		log := &observationLog{}
		var goroutines, users sync.WaitGroup
		x, err := NewExecutor(&scriptedBackend{script: race.call}, ExecutorConfig{Deliver: log.deliver, Go: func(f func()) { goroutines.Go(f) }})
		require.NoError(t, err)

		effect := func(attempt, sequence int) Effect {
			return executorEffect(NodeAttemptID(attempt+1), uint64(sequence+1), attempts[attempt].operations[sequence].kind)
		}
		expired := make([]map[int]Completion, len(attempts)) // by attempt and operation
		var errs []error
		var errsMu sync.Mutex
		report := func(err error) {
			errsMu.Lock()
			defer errsMu.Unlock()
			errs = append(errs, err)
		}
		for a := range attempts {
			expired[a] = map[int]Completion{}
			var submitted, over atomic.Int64
			users.Go(func() {
				defer over.Store(1)
				for s, o := range attempts[a].operations {
					if _, err := x.Submit(effect(a, s)); err != nil {
						report(err)
					}
					submitted.Add(1)
					for range o.wait {
						runtime.Gosched()
					}
					if o.expire {
						expired[a][s] = x.Expire(effect(a, s).Operation)
					}
				}
				if attempts[a].retire {
					x.Retire(NodeAttemptID(a + 1))
				}
			})
			if !attempts[a].meddle {
				continue
			}
			users.Go(func() {
				for over.Load() == 0 {
					for s := range submitted.Load() {
						// Refused once its result or its attempt is gone.
						if _, err := x.Submit(effect(a, int(s))); err != nil && !errors.Is(err, ErrOperationRetired) {
							report(err)
						}
					}
					running := x.Running()
					for i := 1; i < len(running); i++ { // ascending, so one call of each
						if running[i-1].Operation.Attempt >= running[i].Operation.Attempt {
							report(fmt.Errorf("running: %v", running))
						}
					}
					runtime.Gosched()
				}
			})
		}
		users.Wait()
		close(race.end)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, x.Close(ctx))
		goroutines.Wait() // none outlives Close
		require.Empty(t, errs)
		require.Empty(t, race.wrong)

		delivered := map[OperationID][]Completion{}
		for _, o := range log.all() {
			delivered[o.Completion.Operation] = append(delivered[o.Completion.Operation], o.Completion)
		}
		const unknown = "the executor does not know the operation"
		late := 0
		for a, attempt := range attempts {
			for s := range attempt.operations {
				op := effect(a, s).Operation
				answers := delivered[op]
				endedBefore := false // Expire met a result, or had none to meet
				if answer, ok := expired[a][s]; ok {
					require.NotEqual(t, unknown, answer.Message, "it was the newest of a live attempt")
					answers = append(answers, answer)
					endedBefore = answer.Message == "no answer before the deadline" || answer.Class == ClassNotStarted
				}
				for _, answer := range answers {
					require.Equal(t, answers[0], answer, "one operation, one result")
				}
				switch {
				case len(answers) == 0:
					require.True(t, attempt.retire, "%v was never answered", op)
					require.Zero(t, race.calls[op], "%v ran and was never answered", op)
				case endedBefore && !attempt.meddle:
					require.Empty(t, delivered[op], "%v was answered by Expire", op)
				case !attempt.meddle:
					require.Len(t, delivered[op], 1, "%v", op)
				}
				if len(answers) > 0 && answers[0].Class == ClassNotStarted {
					require.Zero(t, race.calls[op], "%v ran and was said not to have", op)
				}
				if endedBefore && race.calls[op] > 0 {
					late++
				}
			}
		}
		stats := x.Stats()
		require.Equal(t, stats.Submitted, stats.Completed+stats.Expired+stats.Dropped)
		require.EqualValues(t, late, stats.LateDiscarded)
		require.Zero(t, stats.Running+stats.Queued)
	})
}
