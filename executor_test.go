package provisioning

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// scriptedBackend keeps every request it gets and answers what its script
// says; without a script every call succeeds.
type scriptedBackend struct {
	script func(ctx context.Context, request any) (scriptedAnswer, error)

	mu       sync.Mutex
	requests []any
}

// scriptedAnswer holds what any of the calls can return.
type scriptedAnswer struct {
	lease    ProviderLeaseID
	endpoint *SSHEndpoint
	session  BootstrapSessionID
}

func (b *scriptedBackend) take(ctx context.Context, request any) (scriptedAnswer, error) {
	b.mu.Lock()
	b.requests = append(b.requests, request)
	b.mu.Unlock()
	if b.script == nil {
		return scriptedAnswer{lease: "lease", session: "session"}, nil
	}
	return b.script(ctx, request)
}

// taken returns the requests so far.
func (b *scriptedBackend) taken() []any {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests)
}

func (b *scriptedBackend) CreateLease(ctx context.Context, req CreateLeaseRequest) (CreateLeaseResult, error) {
	answer, err := b.take(ctx, req)
	return CreateLeaseResult{Lease: answer.lease, Endpoint: answer.endpoint}, err
}

func (b *scriptedBackend) LookupEndpoint(ctx context.Context, req LookupEndpointRequest) (LookupEndpointResult, error) {
	answer, err := b.take(ctx, req)
	return LookupEndpointResult{Endpoint: answer.endpoint}, err
}

func (b *scriptedBackend) StartBootstrap(ctx context.Context, req StartBootstrapRequest) (StartBootstrapResult, error) {
	answer, err := b.take(ctx, req)
	return StartBootstrapResult{Session: answer.session}, err
}

func (b *scriptedBackend) BootstrapConvergenceObserved(ctx context.Context, req BootstrapConvergenceObservedRequest) error {
	_, err := b.take(ctx, req)
	return err
}

func (b *scriptedBackend) CancelBootstrap(ctx context.Context, req CancelBootstrapRequest) error {
	_, err := b.take(ctx, req)
	return err
}

func (b *scriptedBackend) DestroyLease(ctx context.Context, req DestroyLeaseRequest) error {
	_, err := b.take(ctx, req)
	return err
}

// operationOf returns the OperationID of any request.
func operationOf(request any) OperationID {
	switch r := request.(type) {
	case CreateLeaseRequest:
		return r.Operation
	case LookupEndpointRequest:
		return r.Operation
	case StartBootstrapRequest:
		return r.Operation
	case BootstrapConvergenceObservedRequest:
		return r.Operation
	case CancelBootstrapRequest:
		return r.Operation
	case DestroyLeaseRequest:
		return r.Operation
	}
	panic(fmt.Sprintf("no request: %T", request))
}

// observationLog is a Deliver that remembers.
type observationLog struct {
	mu   sync.Mutex
	seen []Observation
}

func (l *observationLog) deliver(o Observation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = append(l.seen, o)
}

func (l *observationLog) all() []Observation {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.seen)
}

// completions returns "attempt/sequence class" of every result, in order.
func (l *observationLog) completions() []string {
	texts := []string{}
	for _, o := range l.all() {
		if o.Kind == OperationCompleted {
			texts = append(texts, o.Completion.Operation.String()+" "+o.Completion.Class.String())
		}
	}
	return texts
}

// heldWork is a Go that runs nothing until it is told to.
type heldWork struct{ work []func() }

func (h *heldWork) Go(f func()) { h.work = append(h.work, f) }

// release runs the i-th piece of work that is held.
func (h *heldWork) release(i int) {
	f := h.work[i]
	h.work = slices.Delete(h.work, i, i+1)
	f()
}

func runInline(f func()) { f() }

var executorEpoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// atSecond returns the instant so many seconds into a test.
func atSecond(seconds int) time.Time { return executorEpoch.Add(time.Duration(seconds) * time.Second) }

func executorSpec(image string) LogicalNodeSpec {
	return LogicalNodeSpec{
		RunID: "run", GroupID: "w", Index: 3, Node: "w-3", Role: "worker", Provider: "p",
		Shape:     NodeShape{Image: image, ProviderLabels: map[string]string{"zone": "a"}},
		SwarmJoin: SwarmJoinSpec{OrchSwactorAddr: "orch:1", JoinTokenRef: "ref", ExpectedLogicalNodeID: "w-3"},
	}
}

// executorEffect returns an effect dispatched at atSecond(sequence) with a deadline 120 s
// later.
func executorEffect(attempt NodeAttemptID, sequence uint64, kind OperationKind) Effect {
	spec := executorSpec("image")
	e := NewEffect(OperationID{attempt, sequence}, kind, ExternalKey{Run: spec.RunID, Node: spec.Node, Attempt: attempt}, spec)
	e.DispatchedAt = atSecond(int(sequence))
	e.Deadline = e.DispatchedAt.Add(120 * time.Second)
	return e
}

func newTestExecutor(t rapid.TB, backend EffectBackend, spawn func(func())) (*Executor, *observationLog) {
	log := &observationLog{}
	var x *Executor
	x, err := NewExecutor(backend, ExecutorConfig{Go: spawn, Deliver: func(o Observation) {
		x.Stats() // hangs if a lock is held here
		log.deliver(o)
	}})
	require.NoError(t, err)
	return x, log
}

// submit submits effects that have to be accepted, and run or queued as said.
func submit(t rapid.TB, x *Executor, queued bool, effects ...Effect) {
	t.Helper()
	for _, e := range effects {
		got, err := x.Submit(e)
		require.NoError(t, err)
		require.Equal(t, queued, got, "queued of %v", e.Operation)
	}
}

func operationID(attempt NodeAttemptID, sequence uint64) OperationID {
	return OperationID{attempt, sequence}
}

func TestNewExecutorRefusesMissingParts(t *testing.T) {
	_, err := NewExecutor(nil, ExecutorConfig{Deliver: func(Observation) {}})
	require.ErrorIs(t, err, ErrNoBackend)
	_, err = NewExecutor(&scriptedBackend{}, ExecutorConfig{})
	require.ErrorIs(t, err, ErrNoDeliver)
}

func TestExecutorRefusesInvalidEffects(t *testing.T) {
	backend := &scriptedBackend{}
	x, log := newTestExecutor(t, backend, runInline)
	for name, spoil := range map[string]func(*Effect){
		"no kind":                func(e *Effect) { e.Kind = NoOperation },
		"unknown kind":           func(e *Effect) { e.Kind = operationKinds },
		"no attempt":             func(e *Effect) { e.Operation.Attempt, e.Key.Attempt = 0, 0 },
		"no sequence":            func(e *Effect) { e.Operation.Sequence = 0 },
		"key of another attempt": func(e *Effect) { e.Key.Attempt = 2 },
	} {
		e := executorEffect(1, 1, CreateLease)
		spoil(&e)
		_, err := x.Submit(e)
		require.ErrorIs(t, err, ErrInvalidEffect, name)
		require.ErrorContains(t, err, e.Operation.String(), name)
	}
	require.Empty(t, backend.taken())
	require.Empty(t, log.all())
	require.Equal(t, ExecutorStats{}, x.Stats())
}

func TestExecutorReplaysAndRefuses(t *testing.T) {
	backend := &scriptedBackend{script: func(context.Context, any) (scriptedAnswer, error) {
		return scriptedAnswer{}, errors.New("connection reset")
	}}
	work := &heldWork{}
	x, log := newTestExecutor(t, backend, work.Go)
	first := executorEffect(1, 1, CreateLease)

	submit(t, x, false, first)
	submit(t, x, false, first) // runs already: nothing happens
	require.Len(t, work.work, 1)
	work.release(0)
	require.Len(t, backend.taken(), 1)
	require.Equal(t, []string{"1/1 Ambiguous"}, log.completions())

	again := executorEffect(1, 1, CreateLease) // the same in other memory
	submit(t, x, false, again)
	require.Empty(t, work.work)
	require.Len(t, log.all(), 2)
	require.Equal(t, log.all()[0], log.all()[1])
	require.EqualValues(t, 1, x.Stats().Replayed)

	spoiled := map[string]func(*Effect){
		"spec":         func(e *Effect) { e.template = executorSpec("other image").template() },
		"index":        func(e *Effect) { e.index++ },
		"kind":         func(e *Effect) { e.Kind = DestroyLease },
		"run":          func(e *Effect) { e.Key.Run = "other" },
		"node":         func(e *Effect) { e.Key.Node = "w-4" },
		"lease":        func(e *Effect) { e.Lease = "l" },
		"endpoint":     func(e *Effect) { e.Endpoint = &SSHEndpoint{"h", 22} },
		"session":      func(e *Effect) { e.Session = "s" },
		"swactor":      func(e *Effect) { e.Swactor = "s" },
		"adoptOnly":    func(e *Effect) { e.AdoptOnly = true },
		"createsSent":  func(e *Effect) { e.CreatesSent++ },
		"lastCreateAt": func(e *Effect) { e.LastCreateAt = atSecond(0) },
		"dispatchedAt": func(e *Effect) { e.DispatchedAt = atSecond(9) },
		"deadline":     func(e *Effect) { e.Deadline = atSecond(9) },
	}
	for _, sequence := range []uint64{1, 2, 3} { // ended, running, waiting
		if sequence > 1 {
			submit(t, x, sequence == 3, executorEffect(1, sequence, CreateLease))
		}
		for name, spoil := range spoiled {
			e := executorEffect(1, sequence, CreateLease)
			spoil(&e)
			_, err := x.Submit(e)
			require.ErrorIs(t, err, ErrOperationConflict, name)
			require.ErrorContains(t, err, e.Operation.String(), name)
		}
	}
	submit(t, x, true, executorEffect(1, 3, CreateLease)) // waits already, and the answer says so
	require.Len(t, log.all(), 2)
	require.Len(t, work.work, 1)

	work.release(0) // 1/2 and, behind it, 1/3
	calls := backend.taken()
	require.Len(t, calls, 3)
	for i, call := range calls {
		request := call.(CreateLeaseRequest)
		require.Equal(t, first.Key, request.Key)
		require.Equal(t, operationID(1, uint64(i)+1), request.Operation)
	}
	require.Equal(t, []string{"1/1 Ambiguous", "1/1 Ambiguous", "1/2 Ambiguous", "1/3 Ambiguous"}, log.completions())
	require.Equal(t, ExecutorStats{Submitted: 3, Completed: 3, Replayed: 1, Attempts: 1}, x.Stats())
}

// A sequence that is not recorded is refused if a higher one was accepted, be
// it that its result is gone or that it came out of order.
func TestExecutorRefusesOldSequences(t *testing.T) {
	backend := &scriptedBackend{}
	x, log := newTestExecutor(t, backend, runInline)
	for sequence := uint64(2); sequence <= 10; sequence++ {
		submit(t, x, false, executorEffect(1, sequence, LookupEndpoint))
	}
	require.Len(t, backend.taken(), 9)
	for _, sequence := range []uint64{1, 2} {
		_, err := x.Submit(executorEffect(1, sequence, LookupEndpoint))
		require.ErrorIs(t, err, ErrOperationRetired)
		require.ErrorContains(t, err, operationID(1, sequence).String())
		require.Equal(t, ClassAmbiguous, x.Expire(operationID(1, sequence)).Class)
	}
	require.Len(t, backend.taken(), 9)
	require.Len(t, log.all(), 9)
	submit(t, x, false, executorEffect(1, 3, LookupEndpoint)) // the oldest that is kept
	require.Len(t, backend.taken(), 9)
	require.Len(t, log.all(), 10)

	// The newest operation ends first, and eight older ones push its result
	// out.
	work := &heldWork{}
	x, _ = newTestExecutor(t, backend, work.Go)
	submit(t, x, false, executorEffect(1, 1, LookupEndpoint))
	for sequence := uint64(2); sequence <= 10; sequence++ {
		submit(t, x, true, executorEffect(1, sequence, LookupEndpoint))
	}
	for sequence := uint64(10); sequence >= 2; sequence-- {
		x.Expire(operationID(1, sequence))
	}
	_, err := x.Submit(executorEffect(1, 10, LookupEndpoint))
	require.ErrorIs(t, err, ErrOperationRetired)
}

func TestExecutorRequestsCarryTheEffect(t *testing.T) {
	endpoint := SSHEndpoint{"host", 22}
	full := func(kind OperationKind) Effect {
		e := executorEffect(7, 4, kind)
		e.Lease, e.Endpoint, e.Session, e.Swactor = "l", &SSHEndpoint{"host", 22}, "s", "a"
		e.AdoptOnly, e.CreatesSent, e.LastCreateAt = true, 3, atSecond(2)
		return e
	}
	key, spec, op := ExternalKey{"run", "w-3", 7}, executorSpec("image"), operationID(7, 4)
	for _, want := range []struct {
		kind    OperationKind
		request any
	}{
		{CreateLease, CreateLeaseRequest{Key: key, Operation: op, Spec: spec, AdoptOnly: true, CreatesSent: 3, LastCreateAt: atSecond(2), Now: atSecond(4)}},
		{LookupEndpoint, LookupEndpointRequest{Key: key, Operation: op, Spec: spec, Lease: "l"}},
		{StartBootstrap, StartBootstrapRequest{Key: key, Operation: op, Spec: spec, Lease: "l", Endpoint: endpoint}},
		{BootstrapConvergenceObserved, BootstrapConvergenceObservedRequest{Key: key, Operation: op, Spec: spec, Lease: "l", Endpoint: endpoint, Session: "s", Swactor: "a"}},
		{CancelBootstrap, CancelBootstrapRequest{Key: key, Operation: op, Spec: spec, Lease: "l", Endpoint: &endpoint, Session: "s"}},
		{DestroyLease, DestroyLeaseRequest{Key: key, Operation: op, Spec: spec, Lease: "l", CreatesSent: 3, LastCreateAt: atSecond(2), Now: atSecond(4)}},
	} {
		t.Run(want.kind.String(), func(t *testing.T) {
			backend := &scriptedBackend{}
			x, log := newTestExecutor(t, backend, runInline)
			submit(t, x, false, full(want.kind))
			request := backend.taken()[0]
			if start, ok := request.(StartBootstrapRequest); ok {
				start.Sink.Joined("s", "a")
				require.Equal(t, Observation{Kind: SwactorJoined, Node: "w-3", Attempt: 7, Session: "s", Swactor: "a"}, log.all()[1])
				start.Sink = BootstrapSink{}
				request = start
			}
			require.Equal(t, want.request, request)
			require.Equal(t, OperationCompleted, log.all()[0].Kind)
			require.Equal(t, LogicalNodeID("w-3"), log.all()[0].Node)
			require.Equal(t, NodeAttemptID(7), log.all()[0].Attempt)
			require.Equal(t, op, log.all()[0].Completion.Operation)
			require.Equal(t, want.kind, log.all()[0].Completion.Kind)
			require.Equal(t, ClassNone, log.all()[0].Completion.Class)
		})
	}
}

// An effect without an endpoint is a driver's mistake, but not a crash.
func TestExecutorCallsWithoutEndpoint(t *testing.T) {
	backend := &scriptedBackend{}
	x, _ := newTestExecutor(t, backend, runInline)
	submit(t, x, false, executorEffect(1, 1, StartBootstrap), executorEffect(1, 2, CancelBootstrap))
	require.Zero(t, backend.taken()[0].(StartBootstrapRequest).Endpoint)
	require.Nil(t, backend.taken()[1].(CancelBootstrapRequest).Endpoint)
}

// errorOfItsOwn panics when it is asked what is wrong.
type errorOfItsOwn struct{}

func (errorOfItsOwn) Error() string { panic("no words") }

func TestExecutorReadsAnswers(t *testing.T) {
	cause := errors.New("cause")
	say := func(answer scriptedAnswer, err error) func(context.Context, any) (scriptedAnswer, error) {
		return func(context.Context, any) (scriptedAnswer, error) { return answer, err }
	}
	for _, row := range []struct {
		name   string
		kind   OperationKind
		script func(context.Context, any) (scriptedAnswer, error)
		want   Completion
	}{
		{"lease and endpoint", CreateLease, say(scriptedAnswer{lease: "l", endpoint: &SSHEndpoint{"h", 1}}, nil),
			Completion{Lease: "l", Endpoint: &SSHEndpoint{"h", 1}}},
		{"lease only", CreateLease, say(scriptedAnswer{lease: "l"}, nil), Completion{Lease: "l"}},
		{"no lease", CreateLease, say(scriptedAnswer{}, nil),
			Completion{Class: ClassAmbiguous, Message: "the success names no lease"}},
		{"unclassified create", CreateLease, say(scriptedAnswer{lease: "l"}, cause),
			Completion{Class: ClassAmbiguous, Message: "cause"}},
		{"definite create", CreateLease, say(scriptedAnswer{}, Definite(cause)),
			Completion{Class: ClassDefinite, Message: "cause"}},
		{"nothing to adopt", CreateLease, say(scriptedAnswer{}, ErrNothingToAdopt),
			Completion{Class: ClassDefinite, Message: "provisioning: nothing to adopt"}},
		{"lease lost with a lease", CreateLease, say(scriptedAnswer{}, LeaseLostWith("dead", cause)),
			Completion{Class: ClassLeaseLost, Message: "cause", Lease: "dead"}},
		{"retry after", CreateLease, say(scriptedAnswer{}, RetryAfter(Ambiguous(cause), time.Minute)),
			Completion{Class: ClassAmbiguous, Message: "cause", RetryAfter: time.Minute}},
		{"not started", DestroyLease, say(scriptedAnswer{}, NotStarted(cause)),
			Completion{Class: ClassNotStarted, Message: "cause"}},
		{"endpoint", LookupEndpoint, say(scriptedAnswer{endpoint: &SSHEndpoint{"h", 1}}, nil),
			Completion{Endpoint: &SSHEndpoint{"h", 1}}},
		{"no endpoint yet", LookupEndpoint, say(scriptedAnswer{}, nil), Completion{}},
		{"unclassified look-up", LookupEndpoint, say(scriptedAnswer{}, cause), Completion{Class: ClassDefinite, Message: "cause"}},
		{"context error", LookupEndpoint, say(scriptedAnswer{}, context.Canceled),
			Completion{Class: ClassAmbiguous, Message: "context canceled"}},
		{"session", StartBootstrap, say(scriptedAnswer{session: "s"}, nil), Completion{Session: "s"}},
		{"no session", StartBootstrap, say(scriptedAnswer{}, nil),
			Completion{Class: ClassAmbiguous, Message: "the success names no session"}},
		{"convergence", BootstrapConvergenceObserved, say(scriptedAnswer{}, nil), Completion{}},
		{"cancel", CancelBootstrap, say(scriptedAnswer{}, cause), Completion{Class: ClassDefinite, Message: "cause"}},
		{"panic", DestroyLease, func(context.Context, any) (scriptedAnswer, error) { panic("index out of luck") },
			Completion{Class: ClassAmbiguous, Message: "the backend panicked: index out of luck"}},
		{"panic with an error", LookupEndpoint, func(context.Context, any) (scriptedAnswer, error) { panic(cause) },
			Completion{Class: ClassAmbiguous, Message: "the backend panicked: cause"}},
		{"error that panics", LookupEndpoint, say(scriptedAnswer{}, errorOfItsOwn{}),
			Completion{Class: ClassAmbiguous, Message: "the backend panicked: no words"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			x, log := newTestExecutor(t, &scriptedBackend{script: row.script}, runInline)
			submit(t, x, false, executorEffect(2, 1, row.kind))
			row.want.Operation, row.want.Kind = operationID(2, 1), row.kind
			require.Equal(t, []Observation{{Kind: OperationCompleted, Node: "w-3", Attempt: 2, Completion: row.want}}, log.all())
			require.Equal(t, row.want, x.Expire(operationID(2, 1)), "the record is what was delivered")
			panics := uint64(0)
			if strings.Contains(row.want.Message, "panicked") {
				panics = 1
			}
			require.Equal(t, ExecutorStats{Submitted: 1, Completed: 1, Panics: panics, Attempts: 1}, x.Stats())
		})
	}
}

func TestExecutorSharesNoEndpointWithTheBackend(t *testing.T) {
	theirs := &SSHEndpoint{"h", 22}
	backend := &scriptedBackend{script: func(_ context.Context, request any) (scriptedAnswer, error) {
		if cancel, ok := request.(CancelBootstrapRequest); ok {
			cancel.Endpoint.Host = "changed by the backend"
		}
		return scriptedAnswer{lease: "l", endpoint: theirs}, nil
	}}
	x, log := newTestExecutor(t, backend, runInline)
	submit(t, x, false, executorEffect(1, 1, CreateLease), executorEffect(1, 2, LookupEndpoint))
	theirs.Host = "changed by the backend"
	require.Equal(t, &SSHEndpoint{"h", 22}, log.all()[0].Completion.Endpoint)
	require.Equal(t, &SSHEndpoint{"h", 22}, log.all()[1].Completion.Endpoint)

	ours := executorEffect(1, 3, CancelBootstrap)
	ours.Endpoint = &SSHEndpoint{"h", 22}
	submit(t, x, false, ours)
	require.Equal(t, &SSHEndpoint{"h", 22}, ours.Endpoint)
}

// callGates lets a test hold calls of a backend in the middle, whatever their ctx
// says. Make it inside the synctest bubble.
type callGates struct {
	mu sync.Mutex
	of map[OperationID]chan struct{}
}

func (g *callGates) gate(op OperationID) chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.of == nil {
		g.of = make(map[OperationID]chan struct{})
	}
	if g.of[op] == nil {
		g.of[op] = make(chan struct{})
	}
	return g.of[op]
}

func (g *callGates) open(attempt NodeAttemptID, sequence uint64) {
	close(g.gate(operationID(attempt, sequence)))
	synctest.Wait()
}

func (g *callGates) wait(_ context.Context, request any) (scriptedAnswer, error) {
	<-g.gate(operationOf(request))
	return scriptedAnswer{lease: "lease", session: "session"}, nil
}

func takenOperations(b *scriptedBackend) []string {
	var ops []string
	for _, request := range b.taken() {
		ops = append(ops, operationOf(request).String())
	}
	return ops
}

// An attempt has one call at a time, also after the first has expired, and in
// the order of submission; another attempt does not notice.
func TestExecutorRunsOneCallPerAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &callGates{}
		backend := &scriptedBackend{script: g.wait}
		x, log := newTestExecutor(t, backend, nil)
		submit(t, x, false, executorEffect(1, 1, CreateLease))
		synctest.Wait()
		require.Equal(t, ClassAmbiguous, x.Expire(operationID(1, 1)).Class)
		submit(t, x, true, executorEffect(1, 2, LookupEndpoint), executorEffect(1, 5, StartBootstrap), executorEffect(1, 6, DestroyLease))
		submit(t, x, false, executorEffect(2, 1, CreateLease))
		g.open(2, 1)
		require.Equal(t, []string{"1/1", "2/1"}, takenOperations(backend))
		require.Equal(t, []string{"2/1 none"}, log.completions())
		require.Equal(t, 3, x.Stats().Queued)

		g.open(1, 1)
		require.Equal(t, []string{"1/1", "2/1", "1/2"}, takenOperations(backend))
		require.Equal(t, []string{"2/1 none"}, log.completions(), "the late answer is gone")
		require.EqualValues(t, 1, x.Stats().LateDiscarded)
		submit(t, x, true, executorEffect(1, 7, DestroyLease)) // behind those that wait
		g.open(1, 2)
		g.open(1, 5)
		g.open(1, 6)
		g.open(1, 7)
		require.Equal(t, []string{"1/1", "2/1", "1/2", "1/5", "1/6", "1/7"}, takenOperations(backend))
		require.Equal(t, []string{"2/1 none", "1/2 none", "1/5 none", "1/6 none", "1/7 none"}, log.completions())
		require.Equal(t, ExecutorStats{Submitted: 6, Completed: 5, Expired: 1, LateDiscarded: 1, Attempts: 2}, x.Stats())
		submit(t, x, false, executorEffect(1, 8, LookupEndpoint)) // nothing is in the way any more
		g.open(1, 8)
	})
}

func TestExecutorExpireAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &callGates{}
		backend := &scriptedBackend{script: g.wait}
		x, log := newTestExecutor(t, backend, nil)
		submit(t, x, false, executorEffect(1, 1, CreateLease), executorEffect(2, 1, CreateLease))
		submit(t, x, true, executorEffect(1, 2, DestroyLease), executorEffect(1, 3, DestroyLease))
		g.open(2, 1)

		completed := x.Expire(operationID(2, 1))
		require.Equal(t, log.all()[0].Completion, completed)
		require.Equal(t, Completion{Operation: operationID(2, 1), Kind: CreateLease, Lease: "lease"}, completed)

		unknown := Completion{Operation: operationID(2, 2), Class: ClassAmbiguous, Message: "the executor does not know the operation"}
		require.Equal(t, unknown, x.Expire(operationID(2, 2)), "of an attempt it knows")
		unknown.Operation = operationID(3, 1)
		require.Equal(t, unknown, x.Expire(operationID(3, 1)), "of an attempt it does not know")

		queued := Completion{Operation: operationID(1, 2), Kind: DestroyLease, Class: ClassNotStarted,
			Message: "an earlier call of the attempt did not return before the deadline"}
		require.Equal(t, queued, x.Expire(operationID(1, 2)))
		running := Completion{Operation: operationID(1, 1), Kind: CreateLease, Class: ClassAmbiguous, Message: "no answer before the deadline"}
		require.Equal(t, running, x.Expire(operationID(1, 1)))
		require.Equal(t, ExecutorStats{Submitted: 4, Completed: 1, Expired: 2, Attempts: 2, Running: 1, RunningExpired: 1, Queued: 1}, x.Stats())
		require.Len(t, log.all(), 1, "Expire delivers nothing")

		g.open(1, 1)
		require.Equal(t, running, x.Expire(operationID(1, 1)), "the late answer changes nothing")
		require.Equal(t, queued, x.Expire(operationID(1, 2)))
		require.EqualValues(t, 2, x.Stats().Expired, "each is counted once")
		submit(t, x, false, executorEffect(1, 1, CreateLease), executorEffect(1, 2, DestroyLease))
		require.Equal(t, []string{"2/1 none", "1/1 Ambiguous", "1/2 NotStarted"}, log.completions())
		g.open(1, 3)
		require.Equal(t, []string{"1/1", "1/3", "2/1"}, slices.Sorted(slices.Values(takenOperations(backend))), "1/2 never ran")
	})
}

// An expired call still runs when its result has been pushed out by those of
// the tries queued behind it. It is not forgotten while it runs.
func TestExecutorRemembersAnExpiredCallWhileItRuns(t *testing.T) {
	work := &heldWork{}
	backend := &scriptedBackend{}
	x, log := newTestExecutor(t, backend, work.Go)
	submit(t, x, false, executorEffect(1, 1, CreateLease))
	want := x.Expire(operationID(1, 1))
	for sequence := uint64(2); sequence < 2+2*keptResults; sequence++ {
		submit(t, x, true, executorEffect(1, sequence, CreateLease))
		require.Equal(t, ClassNotStarted, x.Expire(operationID(1, sequence)).Class)
	}
	require.Equal(t, want, x.Expire(operationID(1, 1)))
	submit(t, x, false, executorEffect(1, 1, CreateLease))
	require.Equal(t, want, log.all()[0].Completion)
	work.release(0)
	_, err := x.Submit(executorEffect(1, 1, CreateLease))
	require.ErrorIs(t, err, ErrOperationRetired)
	require.Len(t, backend.taken(), 1)
}

// A create that overran its deadline may have reached the provider until it
// returned. What goes out afterwards must say so, or a backend takes "nothing
// there" for final and a machine is left to run (B3).
func TestExecutorTellsOfCreatesThatOverran(t *testing.T) {
	// withLast returns an effect that the driver dispatched believing that the
	// last create was over at second 120.
	withLast := func(sequence uint64, kind OperationKind, dispatched int) Effect {
		e := executorEffect(1, sequence, kind)
		e.DispatchedAt, e.LastCreateAt, e.CreatesSent = atSecond(dispatched), atSecond(120), 1
		return e
	}
	begin := func(t *testing.T) (*Executor, *scriptedBackend, *heldWork) {
		work, backend := &heldWork{}, &scriptedBackend{}
		x, _ := newTestExecutor(t, backend, work.Go)
		submit(t, x, false, executorEffect(1, 1, CreateLease))
		return x, backend, work
	}
	lastOf := func(t *testing.T, request any) (last, now time.Time) {
		switch r := request.(type) {
		case CreateLeaseRequest:
			return r.LastCreateAt, r.Now
		case DestroyLeaseRequest:
			return r.LastCreateAt, r.Now
		}
		require.Fail(t, "no LastCreateAt", "%T", request)
		return
	}

	for _, kind := range []OperationKind{CreateLease, DestroyLease} {
		t.Run("waited/"+kind.String(), func(t *testing.T) {
			x, backend, work := begin(t)
			x.Expire(operationID(1, 1))
			submit(t, x, true, withLast(2, kind, 130))
			work.release(0)
			last, now := lastOf(t, backend.taken()[1])
			require.Equal(t, atSecond(130), last)
			require.Equal(t, atSecond(130), now)
		})
		// 1. The create overruns. 2. A try behind it expires as well, and the
		// driver backs off. 3. Only now the create returns. 4. The next try
		// waits for nothing, yet the driver still counts from the deadline.
		t.Run("returned between two tries/"+kind.String(), func(t *testing.T) {
			x, backend, work := begin(t)
			x.Expire(operationID(1, 1))
			submit(t, x, true, withLast(2, kind, 130))
			x.Expire(operationID(1, 2))
			work.release(0)
			submit(t, x, false, withLast(3, kind, 300))
			work.release(0)
			last, _ := lastOf(t, backend.taken()[1])
			require.Equal(t, atSecond(300), last)

			submit(t, x, false, withLast(4, kind, 310)) // the next one as well
			work.release(0)
			last, now := lastOf(t, backend.taken()[2])
			require.Equal(t, atSecond(300), last)
			require.Equal(t, atSecond(310), now)
		})
	}
	t.Run("waited behind a create that did not expire", func(t *testing.T) {
		x, backend, work := begin(t)
		submit(t, x, true, withLast(2, DestroyLease, 130))
		work.release(0)
		last, _ := lastOf(t, backend.taken()[1])
		require.Equal(t, atSecond(130), last)
	})
	t.Run("waited behind another wait", func(t *testing.T) {
		x, backend, work := begin(t)
		x.Expire(operationID(1, 1))
		submit(t, x, true, withLast(2, LookupEndpoint, 130), withLast(3, DestroyLease, 140))
		work.release(0)
		last, _ := lastOf(t, backend.taken()[2])
		require.Equal(t, atSecond(140), last)
	})
	t.Run("never after the request's own now", func(t *testing.T) {
		x, _, _ := begin(t)
		l := x.attempts.Get(1)
		l.lateCreateAt = atSecond(500)
		effect := withLast(2, DestroyLease, 400)
		require.Equal(t, atSecond(400), l.lastCreate(&effect))
	})
	t.Run("a later create of the driver's counts", func(t *testing.T) {
		x, backend, work := begin(t)
		x.Expire(operationID(1, 1))
		work.release(0)
		submit(t, x, false, withLast(2, CreateLease, 130))
		work.release(0)
		destroy := withLast(3, DestroyLease, 150)
		destroy.LastCreateAt = atSecond(140)
		submit(t, x, false, destroy)
		work.release(0)
		last, _ := lastOf(t, backend.taken()[2])
		require.Equal(t, atSecond(140), last)
	})
	t.Run("a create in time changes nothing", func(t *testing.T) {
		x, backend, work := begin(t)
		work.release(0)
		submit(t, x, false, withLast(2, DestroyLease, 130))
		work.release(0)
		last, _ := lastOf(t, backend.taken()[1])
		require.Equal(t, atSecond(120), last)
	})
	t.Run("another call that overran changes nothing", func(t *testing.T) {
		x, backend, work := begin(t)
		work.release(0)
		submit(t, x, false, withLast(2, LookupEndpoint, 125))
		x.Expire(operationID(1, 2))
		submit(t, x, true, withLast(3, DestroyLease, 250))
		work.release(0)
		last, _ := lastOf(t, backend.taken()[2])
		require.Equal(t, atSecond(120), last)
	})
}

// Goexit ends the goroutine that was to go on with what waits.
func TestExecutorSurvivesGoexit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := make(chan struct{})
		backend := &scriptedBackend{script: func(_ context.Context, request any) (scriptedAnswer, error) {
			<-begin
			if operationOf(request).Sequence < 3 {
				runtime.Goexit()
			}
			return scriptedAnswer{}, nil
		}}
		started := 0
		x, log := newTestExecutor(t, backend, func(f func()) { started++; go f() })
		submit(t, x, false, executorEffect(1, 1, DestroyLease))
		submit(t, x, true, executorEffect(1, 2, DestroyLease), executorEffect(1, 3, DestroyLease))
		close(begin)
		synctest.Wait()
		require.Equal(t, 3, started, "one to begin with, and one for each that was lost")
		require.Equal(t, []string{"1/1 Ambiguous", "1/2 Ambiguous", "1/3 none"}, log.completions())
		require.Equal(t, "the backend called runtime.Goexit", log.all()[0].Completion.Message)
		require.Equal(t, ExecutorStats{Submitted: 3, Completed: 3, Panics: 2, Attempts: 1}, x.Stats())
		require.NoError(t, x.Close(t.Context()))
	})
}

func TestExecutorSurvivesDeliver(t *testing.T) {
	for name, breakDown := range map[string]func(){
		"panic":  func() { panic("deliver") },
		"Goexit": runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &callGates{}
				backend, log := &scriptedBackend{script: g.wait}, &observationLog{}
				x, err := NewExecutor(backend, ExecutorConfig{Deliver: func(o Observation) {
					log.deliver(o)
					breakDown()
				}})
				require.NoError(t, err)
				submit(t, x, false, executorEffect(1, 1, CreateLease))
				submit(t, x, true, executorEffect(1, 2, LookupEndpoint))
				g.open(1, 1)
				g.open(1, 2)
				require.Equal(t, []string{"1/1 none", "1/2 none"}, log.completions())
				require.Equal(t, ProviderLeaseID("lease"), x.Expire(operationID(1, 1)).Lease, "the driver gets it at the deadline")
				stats := x.Stats()
				require.Zero(t, stats.Running+stats.Queued)
				require.EqualValues(t, 2, stats.Completed)
				if name == "panic" {
					require.EqualValues(t, 2, stats.DeliverPanics)
				}
				require.NoError(t, x.Close(t.Context()))
			})
		})
	}
}

// Deliver, Go and the backend may ask the executor for anything, and Deliver
// may go on submitting.
func TestExecutorMayBeCalledBack(t *testing.T) {
	var x *Executor
	var order []uint64
	backend := &scriptedBackend{script: func(_ context.Context, request any) (scriptedAnswer, error) {
		require.Equal(t, operationOf(request), x.Running()[0].Operation)
		queued, err := x.Submit(executorEffect(1, operationOf(request).Sequence, LookupEndpoint))
		require.NoError(t, err)
		require.False(t, queued)
		return scriptedAnswer{}, nil
	}}
	x, err := NewExecutor(backend, ExecutorConfig{
		Go: func(f func()) {
			require.Equal(t, 1, x.Stats().Running)
			f()
		},
		Deliver: func(o Observation) {
			op := o.Completion.Operation
			order = append(order, op.Sequence)
			require.Empty(t, x.Running())
			require.Equal(t, o.Completion, x.Expire(op))
			require.EqualValues(t, op.Sequence, x.Stats().Completed)
			if op.Sequence == 5 {
				x.Retire(op.Attempt)
				return
			}
			submit(t, x, false, executorEffect(1, op.Sequence+1, LookupEndpoint))
		},
	})
	require.NoError(t, err)
	submit(t, x, false, executorEffect(1, 1, LookupEndpoint))
	require.Equal(t, []uint64{1, 2, 3, 4, 5}, order)
	require.Equal(t, ExecutorStats{Submitted: 5, Completed: 5}, x.Stats()) // no panic was fenced
}

func TestExecutorRetire(t *testing.T) {
	work := &heldWork{}
	backend := &scriptedBackend{}
	x, log := newTestExecutor(t, backend, work.Go)
	refused := func(attempt NodeAttemptID, sequence uint64) {
		t.Helper()
		_, err := x.Submit(executorEffect(attempt, sequence, CreateLease))
		require.ErrorIs(t, err, ErrOperationRetired)
		require.ErrorContains(t, err, operationID(attempt, sequence).String())
	}

	submit(t, x, false, executorEffect(1, 1, CreateLease))
	work.release(0)
	x.Retire(1)
	require.Zero(t, x.attempts.Len(), "nothing runs: dropped at once")
	refused(1, 1)
	refused(1, 2)
	require.Equal(t, ClassAmbiguous, x.Expire(operationID(1, 1)).Class)

	submit(t, x, false, executorEffect(2, 1, CreateLease))
	submit(t, x, true, executorEffect(2, 2, DestroyLease), executorEffect(2, 3, DestroyLease))
	x.Expire(operationID(2, 1))
	x.Retire(2)
	x.Retire(2)
	require.Equal(t, 1, x.attempts.Len(), "kept while its call runs")
	require.Equal(t, ExecutorStats{Submitted: 4, Completed: 1, Expired: 1, Dropped: 2, Attempts: 1, Running: 1, RunningExpired: 1}, x.Stats())
	refused(2, 1)
	refused(2, 2)
	refused(2, 4)
	work.release(0)
	require.Zero(t, x.attempts.Len())
	require.Empty(t, work.work)
	require.Len(t, backend.taken(), 2, "what waited never ran")
	refused(2, 4)

	x.Retire(9) // never seen
	refused(9, 1)

	submit(t, x, false, executorEffect(3, 1, CreateLease)) // retired in the middle of a call that did not expire
	x.Retire(3)
	work.release(0)
	require.Equal(t, []string{"1/1 none", "3/1 none"}, log.completions())
	require.Zero(t, x.attempts.Len())
	submit(t, x, false, executorEffect(4, 1, CreateLease)) // an attempt between retired ones is new
}

func TestExecutorRunningIsInOrder(t *testing.T) {
	work := &heldWork{}
	x, _ := newTestExecutor(t, &scriptedBackend{}, work.Go)
	require.Empty(t, x.Running())
	for _, attempt := range []NodeAttemptID{5, 10, 9, 1, 7} {
		submit(t, x, false, executorEffect(attempt, 2, LookupEndpoint))
		submit(t, x, true, executorEffect(attempt, 3, DestroyLease))
	}
	x.Expire(operationID(9, 2))
	row := func(attempt NodeAttemptID, sequence uint64, kind OperationKind, expired bool) RunningCall {
		return RunningCall{Operation: operationID(attempt, sequence), Kind: kind, Node: "w-3", Since: atSecond(int(sequence)), Expired: expired}
	}
	require.Equal(t, []RunningCall{
		row(1, 2, LookupEndpoint, false), row(5, 2, LookupEndpoint, false), row(7, 2, LookupEndpoint, false),
		row(9, 2, LookupEndpoint, true), row(10, 2, LookupEndpoint, false),
	}, x.Running())
	work.release(3) // attempt 1, both
	work.release(1) // attempt 10, both
	require.Equal(t, []RunningCall{
		row(5, 2, LookupEndpoint, false), row(7, 2, LookupEndpoint, false), row(9, 2, LookupEndpoint, true),
	}, x.Running())
}

// The ctx of a hung call is done at its deadline, and the call has a name
// until it returns.
func TestExecutorNamesHungCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var ctxOfCall context.Context
		x, log := newTestExecutor(t, &scriptedBackend{script: func(ctx context.Context, _ any) (scriptedAnswer, error) {
			ctxOfCall = ctx
			<-ctx.Done()
			<-release
			return scriptedAnswer{lease: "late"}, nil
		}}, nil)
		submit(t, x, false, executorEffect(4, 1, CreateLease))
		synctest.Wait()
		require.NoError(t, ctxOfCall.Err())
		_, has := ctxOfCall.Deadline()
		require.False(t, has, "deadlines are the driver's")
		time.Sleep(1000 * time.Hour) // of the bubble's clock
		require.NoError(t, ctxOfCall.Err(), "the executor has no timer")

		require.Equal(t, ClassAmbiguous, x.Expire(operationID(4, 1)).Class)
		require.ErrorIs(t, ctxOfCall.Err(), context.Canceled)
		require.Equal(t, []RunningCall{{Operation: operationID(4, 1), Kind: CreateLease, Node: "w-3", Since: atSecond(1), Expired: true}}, x.Running())
		require.Equal(t, 1, x.Stats().RunningExpired)
		close(release)
		synctest.Wait()
		require.Empty(t, x.Running())
		require.Zero(t, x.Stats().RunningExpired)
		require.Empty(t, log.all())
	})
}

// The ctx is of the call: it ends with it.
func TestExecutorEndsTheContextOfACall(t *testing.T) {
	var ctxs []context.Context
	x, _ := newTestExecutor(t, &scriptedBackend{script: func(ctx context.Context, _ any) (scriptedAnswer, error) {
		ctxs = append(ctxs, ctx)
		if len(ctxs) == 2 {
			panic("second")
		}
		return scriptedAnswer{}, ctx.Err()
	}}, runInline)
	submit(t, x, false, executorEffect(1, 1, DestroyLease), executorEffect(1, 2, DestroyLease))
	require.Equal(t, ClassNone, x.Expire(operationID(1, 1)).Class)
	for _, ctx := range ctxs {
		require.ErrorIs(t, ctx.Err(), context.Canceled)
	}
}

func TestExecutorClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &callGates{}
		backend := &scriptedBackend{script: func(ctx context.Context, request any) (scriptedAnswer, error) {
			if operationOf(request).Attempt == 2 {
				<-ctx.Done()
				return scriptedAnswer{}, ctx.Err()
			}
			return g.wait(ctx, request)
		}}
		x, log := newTestExecutor(t, backend, nil)
		for _, attempt := range []NodeAttemptID{4, 3, 2} {
			submit(t, x, false, executorEffect(attempt, 1, CreateLease))
			synctest.Wait()
		}
		submit(t, x, true, executorEffect(4, 2, DestroyLease), executorEffect(2, 3, DestroyLease), executorEffect(2, 4, DestroyLease))
		x.Expire(operationID(4, 1))

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		started := time.Now()
		err := x.Close(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.EqualError(t, err, "provisioning: closed with 2 calls still running: context deadline exceeded")
		require.Equal(t, time.Minute, time.Since(started))
		require.ElementsMatch(t, []string{"2/1 Ambiguous", "2/3 NotStarted", "2/4 NotStarted", "4/2 NotStarted"}, log.completions())
		notStarted := slices.DeleteFunc(log.completions(), func(s string) bool { return s == "2/1 Ambiguous" })
		require.Equal(t, []string{"2/3 NotStarted", "2/4 NotStarted", "4/2 NotStarted"}, notStarted, "in order")
		require.Equal(t, Completion{Operation: operationID(4, 2), Kind: DestroyLease, Class: ClassNotStarted, Message: "the executor was closed"},
			x.Expire(operationID(4, 2)))

		for _, e := range []Effect{executorEffect(5, 1, CreateLease), executorEffect(2, 1, CreateLease)} {
			_, err := x.Submit(e)
			require.ErrorIs(t, err, ErrExecutorClosed)
			require.ErrorContains(t, err, e.Operation.String())
		}

		closed := make(chan error, 3)
		for range cap(closed) {
			go func() { closed <- x.Close(context.Background()) }()
		}
		g.open(4, 1)
		require.Empty(t, closed, "one call still runs")
		g.open(3, 1)
		for range cap(closed) {
			require.NoError(t, <-closed)
		}
		require.Equal(t, "3/1 none", log.completions()[4], "the result of a call that ran on counts")
		require.Len(t, log.completions(), 5, "that of an expired one does not")
		require.Equal(t, ExecutorStats{Submitted: 6, Completed: 2, Expired: 1, Dropped: 3, LateDiscarded: 1, Attempts: 3}, x.Stats())

		done, cancelDone := context.WithCancel(t.Context())
		cancelDone()
		require.NoError(t, x.Close(done), "nothing is left to wait for")
	})
}

func TestExecutorCloseWhenIdle(t *testing.T) {
	x, _ := newTestExecutor(t, &scriptedBackend{}, runInline)
	submit(t, x, false, executorEffect(1, 1, CreateLease))
	done, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, x.Close(done))
	require.NoError(t, x.Close(done))
}

// Close returns after the last result has been delivered, not only after the
// last call has returned.
func TestExecutorCloseWaitsForDeliver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		x, err := NewExecutor(&scriptedBackend{}, ExecutorConfig{Deliver: func(Observation) { <-hold }})
		require.NoError(t, err)
		submit(t, x, false, executorEffect(1, 1, CreateLease))
		synctest.Wait()
		require.Empty(t, x.Running())
		closed := make(chan error, 1)
		go func() { closed <- x.Close(context.Background()) }()
		synctest.Wait()
		require.Empty(t, closed)
		close(hold)
		require.NoError(t, <-closed)
	})
}

// Nor does another Close return before the first has delivered what it ends,
// though by then no call runs.
func TestExecutorCloseWaitsForAnotherClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		x, err := NewExecutor(&scriptedBackend{script: func(ctx context.Context, _ any) (scriptedAnswer, error) {
			<-ctx.Done()
			return scriptedAnswer{}, ctx.Err()
		}}, ExecutorConfig{Deliver: func(o Observation) {
			if o.Completion.Class == ClassNotStarted {
				<-hold
			}
		}})
		require.NoError(t, err)
		submit(t, x, false, executorEffect(1, 1, CreateLease))
		synctest.Wait()
		submit(t, x, true, executorEffect(1, 2, DestroyLease))
		closed := make(chan error, 2)
		for range cap(closed) {
			go func() { closed <- x.Close(context.Background()) }()
			synctest.Wait()
			require.Empty(t, x.Running())
			require.Empty(t, closed)
		}
		close(hold)
		for range cap(closed) {
			require.NoError(t, <-closed)
		}
	})
}

// A thousand creates ignore their ctx, expire, and return much later.
func TestLateAnswersLeaveNoGoroutine(t *testing.T) {
	const calls = 1000
	for _, closeFirst := range []bool{false, true} {
		t.Run(fmt.Sprintf("closeFirst=%v", closeFirst), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // fails by itself on a goroutine that stays
				release := make(chan struct{})
				var goroutines, cancelled atomic.Int64
				backend := &scriptedBackend{script: func(ctx context.Context, _ any) (scriptedAnswer, error) {
					<-release
					if ctx.Err() != nil {
						cancelled.Add(1)
					}
					return scriptedAnswer{lease: "late"}, nil
				}}
				x, log := newTestExecutor(t, backend, func(f func()) {
					goroutines.Add(1)
					go func() { defer goroutines.Add(-1); f() }()
				})
				for attempt := range NodeAttemptID(calls) {
					submit(t, x, false, executorEffect(attempt+1, 1, CreateLease))
				}
				for attempt := range NodeAttemptID(calls) {
					require.Equal(t, ClassAmbiguous, x.Expire(operationID(attempt+1, 1)).Class)
				}
				synctest.Wait()
				require.EqualValues(t, calls, goroutines.Load())
				require.Equal(t, calls, x.Stats().RunningExpired)
				if closeFirst {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					require.ErrorContains(t, x.Close(ctx), "1000 calls")
					require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
				}
				close(release)
				synctest.Wait()
				require.Zero(t, goroutines.Load())
				require.EqualValues(t, calls, cancelled.Load())
				require.Empty(t, log.all(), "no late result is delivered")
				require.EqualValues(t, calls, x.Stats().LateDiscarded)
				require.Empty(t, x.Running())
				require.NoError(t, x.Close(t.Context()))
			})
		})
	}
}

// Ten thousand probes of one attempt leave eight results, and after its end
// none.
func TestExecutorKeepsFewResults(t *testing.T) {
	backend := &scriptedBackend{}
	x, log := newTestExecutor(t, backend, runInline)
	for sequence := range uint64(10_000) {
		submit(t, x, false, executorEffect(1, sequence+1, LookupEndpoint))
	}
	require.Len(t, log.all(), 10_000)
	kept := 0
	for sequence := range uint64(10_000) {
		if x.attempts.Get(1).result(sequence+1) != nil {
			kept++
		}
	}
	require.Equal(t, 8, kept)
	require.Empty(t, x.attempts.Get(1).waiting)
	x.Retire(1)
	require.Zero(t, x.attempts.Len())
	_, err := x.Submit(executorEffect(1, 10_000, LookupEndpoint))
	require.ErrorIs(t, err, ErrOperationRetired)
	require.Len(t, backend.taken(), 10_000)
}

// A call that has returned is kept alive by no place that is to be used again.
func TestExecutorLetsGoOfCalls(t *testing.T) {
	held := &heldWork{}
	x, _ := newTestExecutor(t, &scriptedBackend{}, held.Go)
	submit(t, x, false, executorEffect(1, 1, LookupEndpoint), executorEffect(2, 1, LookupEndpoint), executorEffect(3, 1, LookupEndpoint))
	for range 3 {
		held.release(0)
	}
	require.Empty(t, x.calls)
	for _, e := range x.calls[:cap(x.calls)] {
		require.Nil(t, e)
	}
}

// A slot whose machine never comes up goes through attempts without end, next
// to slots that live long. Memory follows those that live.
func TestExecutorForgetsAttempts(t *testing.T) {
	const longLived, churned = 10, 100_000
	backend := &scriptedBackend{}
	x, err := NewExecutor(backend, ExecutorConfig{Go: runInline, Deliver: func(Observation) {}})
	require.NoError(t, err)
	attempt, live := NodeAttemptID(0), []NodeAttemptID{}
	for i := range churned {
		attempt++
		if i%(churned/longLived) == 0 {
			live = append(live, attempt)
			submit(t, x, false, executorEffect(attempt, 1, CreateLease))
			attempt++
		}
		submit(t, x, false, executorEffect(attempt, 1, CreateLease), executorEffect(attempt, 2, DestroyLease))
		x.Retire(attempt)
		backend.requests = backend.requests[:0]
		if x.attempts.Len() > longLived || x.retired.Size() > 2*longLived+3 {
			require.Fail(t, "memory grows", "%d ledgers, retired set of size %d after %d attempts", x.attempts.Len(), x.retired.Size(), i)
		}
	}
	require.Empty(t, x.calls)
	require.Equal(t, longLived, x.Stats().Attempts)
	for _, attempt := range []NodeAttemptID{2, attempt / 2, attempt} {
		_, err := x.Submit(executorEffect(attempt, 3, CreateLease))
		require.ErrorIs(t, err, ErrOperationRetired, "%d", attempt)
	}
	for _, attempt := range append(live, attempt+1) {
		submit(t, x, false, executorEffect(attempt, 2, LookupEndpoint))
	}
}

func BenchmarkExecutor(b *testing.B) {
	for _, spawn := range []func(func()){runInline, nil} {
		b.Run(fmt.Sprintf("inline=%v", spawn != nil), func(b *testing.B) {
			delivered := make(chan struct{}, 1)
			x, err := NewExecutor(answeringBackend{}, ExecutorConfig{Go: spawn, Deliver: func(Observation) { delivered <- struct{}{} }})
			require.NoError(b, err)
			effect := executorEffect(1, 1, LookupEndpoint)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := x.Submit(effect); err != nil {
					b.Fatal(err)
				}
				<-delivered
				effect.Operation.Sequence++
			}
		})
	}
}

// answeringBackend is the cheapest backend there can be.
type answeringBackend struct{ EffectBackend }

func (answeringBackend) LookupEndpoint(context.Context, LookupEndpointRequest) (LookupEndpointResult, error) {
	return LookupEndpointResult{}, nil
}
