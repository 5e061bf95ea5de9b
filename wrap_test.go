package provisioning_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// opBackend answers every call and keeps the requests.
type opBackend struct {
	name string
	mu   sync.Mutex
	seen []any
}

func (b *opBackend) saw(req any) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seen = append(b.seen, req)
	return fmt.Errorf("%s has seen it", b.name)
}

func (b *opBackend) CreateLease(_ context.Context, req provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	return provisioning.CreateLeaseResult{Lease: provisioning.ProviderLeaseID(b.name)}, b.saw(req)
}

func (b *opBackend) LookupEndpoint(_ context.Context, req provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	return provisioning.LookupEndpointResult{Endpoint: &provisioning.SSHEndpoint{Host: b.name}}, b.saw(req)
}

func (b *opBackend) StartBootstrap(_ context.Context, req provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	return provisioning.StartBootstrapResult{Session: provisioning.BootstrapSessionID(b.name)}, b.saw(req)
}

func (b *opBackend) BootstrapConvergenceObserved(_ context.Context, req provisioning.BootstrapConvergenceObservedRequest) error {
	return b.saw(req)
}

func (b *opBackend) CancelBootstrap(_ context.Context, req provisioning.CancelBootstrapRequest) error {
	return b.saw(req)
}

func (b *opBackend) DestroyLease(_ context.Context, req provisioning.DestroyLeaseRequest) error {
	return b.saw(req)
}

// opCalls makes each of the six calls with a request of its own. The results
// come back as one value.
var opCalls = []struct {
	kind    provisioning.OperationKind
	request func(spec provisioning.LogicalNodeSpec) any
	call    func(ctx context.Context, b provisioning.EffectBackend, request any) (any, error)
	result  func(name string) any
}{
	{provisioning.CreateLease,
		func(spec provisioning.LogicalNodeSpec) any {
			return provisioning.CreateLeaseRequest{Spec: spec, AdoptOnly: true, CreatesSent: 3, Now: noon}
		},
		func(ctx context.Context, b provisioning.EffectBackend, request any) (any, error) {
			return b.CreateLease(ctx, request.(provisioning.CreateLeaseRequest))
		},
		func(name string) any {
			return provisioning.CreateLeaseResult{Lease: provisioning.ProviderLeaseID(name)}
		}},
	{provisioning.LookupEndpoint,
		func(spec provisioning.LogicalNodeSpec) any {
			return provisioning.LookupEndpointRequest{Spec: spec, Lease: "lease"}
		},
		func(ctx context.Context, b provisioning.EffectBackend, request any) (any, error) {
			result, err := b.LookupEndpoint(ctx, request.(provisioning.LookupEndpointRequest))
			if result.Endpoint == nil {
				return "", err
			}
			return result.Endpoint.Host, err
		},
		func(name string) any { return name }},
	{provisioning.StartBootstrap,
		func(spec provisioning.LogicalNodeSpec) any {
			return provisioning.StartBootstrapRequest{Spec: spec, Lease: "lease"}
		},
		func(ctx context.Context, b provisioning.EffectBackend, request any) (any, error) {
			return b.StartBootstrap(ctx, request.(provisioning.StartBootstrapRequest))
		},
		func(name string) any {
			return provisioning.StartBootstrapResult{Session: provisioning.BootstrapSessionID(name)}
		}},
	{provisioning.BootstrapConvergenceObserved,
		func(spec provisioning.LogicalNodeSpec) any {
			return provisioning.BootstrapConvergenceObservedRequest{Spec: spec, Swactor: "agent"}
		},
		func(ctx context.Context, b provisioning.EffectBackend, request any) (any, error) {
			return nil, b.BootstrapConvergenceObserved(ctx, request.(provisioning.BootstrapConvergenceObservedRequest))
		},
		func(string) any { return nil }},
	{provisioning.CancelBootstrap,
		func(spec provisioning.LogicalNodeSpec) any {
			return provisioning.CancelBootstrapRequest{Spec: spec, Session: "session"}
		},
		func(ctx context.Context, b provisioning.EffectBackend, request any) (any, error) {
			return nil, b.CancelBootstrap(ctx, request.(provisioning.CancelBootstrapRequest))
		},
		func(string) any { return nil }},
	{provisioning.DestroyLease,
		func(spec provisioning.LogicalNodeSpec) any {
			return provisioning.DestroyLeaseRequest{Spec: spec, Lease: "lease", Now: noon}
		},
		func(ctx context.Context, b provisioning.EffectBackend, request any) (any, error) {
			return nil, b.DestroyLease(ctx, request.(provisioning.DestroyLeaseRequest))
		},
		func(string) any { return nil }},
}

func opSpec(kind provisioning.ProviderKind) provisioning.LogicalNodeSpec {
	return provisioning.LogicalNodeSpec{Node: "w-0", Provider: kind}
}

// opLimiter is a Limiter by a function.
type opLimiter func(ctx context.Context) error

func (l opLimiter) Wait(ctx context.Context) error { return l(ctx) }

// TestRateLimited: each of the six calls waits first, and a call that is given
// up meanwhile is NotStarted and never made.
func TestRateLimited(t *testing.T) {
	errBusy := errors.New("busy until noon")
	live := t.Context()
	over, end := context.WithCancel(live)
	end()
	for _, c := range opCalls {
		inner, waits := &opBackend{name: "inner"}, 0
		var answer error
		limited := provisioning.RateLimited(inner, opLimiter(func(context.Context) error {
			require.Len(t, inner.seen, 0, "before the call")
			waits++
			return answer
		}))
		answer = errBusy
		_, err := c.call(live, limited, c.request(opSpec("p")))
		require.ErrorIs(t, err, errBusy)
		require.Equal(t, provisioning.ClassNotStarted, provisioning.Classify(c.kind, err), c.kind)
		require.EqualError(t, err, "provisioning: given up in the queue of the rate limiter: busy until noon")

		answer = context.Canceled // what a limiter says when ctx is done; on its own it would be Ambiguous
		_, err = c.call(over, limited, c.request(opSpec("p")))
		require.Equal(t, provisioning.ClassNotStarted, provisioning.Classify(c.kind, err), c.kind)

		answer = nil // let through, too late
		_, err = c.call(over, limited, c.request(opSpec("p")))
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, provisioning.ClassNotStarted, provisioning.Classify(c.kind, err), c.kind)
		require.Empty(t, inner.seen, "no call was made")

		result, err := c.call(live, limited, c.request(opSpec("p")))
		require.EqualError(t, err, "inner has seen it")
		require.Equal(t, c.result("inner"), result)
		require.Equal(t, []any{c.request(opSpec("p"))}, inner.seen, "as it came")
		require.Equal(t, 4, waits)
	}
}

// TestRateLimitedWithoutOne: what is missing is not papered over.
func TestRateLimitedWithoutOne(t *testing.T) {
	inner := &opBackend{}
	require.Same(t, inner, provisioning.RateLimited(inner, nil))
	none := provisioning.RateLimited(nil, opLimiter(nil))
	_, err := provisioning.NewHost(provisioning.HostConfig{Shape: workers(1, 0, ""), Backend: none})
	require.ErrorIs(t, err, provisioning.ErrInvalidConfig)
	_, err = provisioning.NewExecutor(none, provisioning.ExecutorConfig{Deliver: func(provisioning.Observation) {}})
	require.ErrorIs(t, err, provisioning.ErrNoBackend)
}

// opLimited is a Limiter that is of no use as a nil pointer.
type opLimited struct{ err error }

func (l *opLimited) Wait(context.Context) error { return l.err }

// TestRateLimitedPanics: a limiter that panics lets no call through, so nothing
// can have come of it, unlike of a call that panics.
func TestRateLimitedPanics(t *testing.T) {
	for text, limiter := range map[string]provisioning.Limiter{
		"invalid memory address or nil pointer dereference": (*opLimited)(nil),
		"it panicked: boom": opLimiter(func(context.Context) error { panic("boom") }),
	} {
		for _, c := range opCalls {
			inner := &opBackend{name: "inner"}
			_, err := c.call(t.Context(), provisioning.RateLimited(inner, limiter), c.request(opSpec("p")))
			require.Equal(t, provisioning.ClassNotStarted, provisioning.Classify(c.kind, err), c.kind)
			require.ErrorContains(t, err, "provisioning: given up in the queue of the rate limiter: it panicked: ")
			require.ErrorContains(t, err, text)
			require.Empty(t, inner.seen)
		}
	}
}

// TestRateLimitedUnderAnExecutor: calls in the queue of the limiter are given up
// by Expire and by Close. Nothing reaches the provider, nobody waits for ever.
func TestRateLimitedUnderAnExecutor(t *testing.T) {
	inner := &opBackend{}
	waiting := make(chan struct{})
	limited := provisioning.RateLimited(inner, opLimiter(func(ctx context.Context) error {
		waiting <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}))
	delivered := make(chan provisioning.Observation, 2)
	executor, err := provisioning.NewExecutor(limited, provisioning.ExecutorConfig{Deliver: func(o provisioning.Observation) { delivered <- o }})
	require.NoError(t, err)
	for attempt := range provisioning.NodeAttemptID(2) {
		id := provisioning.OperationID{Attempt: attempt + 1, Sequence: 1}
		_, err = executor.Submit(provisioning.NewEffect(id, provisioning.CreateLease,
			provisioning.ExternalKey{Run: "demo", Node: "w-0", Attempt: attempt + 1}, opSpec("p")))
		require.NoError(t, err)
		<-waiting
	}
	// The driver does not know where the call was when its time was up.
	require.Equal(t, provisioning.ClassAmbiguous, executor.Expire(provisioning.OperationID{Attempt: 1, Sequence: 1}).Class)
	require.NoError(t, executor.Close(t.Context()))
	o := <-delivered
	require.Empty(t, delivered)
	require.Equal(t, provisioning.NodeAttemptID(2), o.Attempt)
	require.Equal(t, provisioning.ClassNotStarted, o.Completion.Class)
	require.Empty(t, inner.seen)
}

// TestRateLimitedCluster: one call a minute, and a cluster that takes nine. Who
// was refused in the queue backs off and comes again; no call is made twice.
func TestRateLimitedCluster(t *testing.T) {
	fake := fakebackend.New(fakebackend.Config{Start: noon})
	refused := 0
	var passed time.Time // a bucket of one, which refuses instead of waiting
	limited := provisioning.RateLimited(fake, opLimiter(func(context.Context) error {
		if now := fake.Now(); passed.IsZero() || now.Sub(passed) >= time.Minute {
			passed = now
			return nil
		}
		refused++
		return errors.New("over the limit")
	}))
	driver, drive := newCluster(limited, nil)
	check(driver.UpdateDesired(workers(2, 3, "v1")))
	now := noon
	for drive(now); !driver.Converged(2); drive(now) {
		now, _ = driver.RequeueAt()
		require.Less(t, now.Sub(noon), time.Hour)
		fake.AdvanceTo(now)
	}
	require.NotZero(t, refused)
	require.Equal(t, 3, fake.LiveTotal())
	for index := range 3 {
		require.Equal(t, 1, fake.Calls(provisioning.NewLogicalNodeID("worker", index), provisioning.CreateLease))
	}
	require.GreaterOrEqual(t, now.Sub(noon), 8*time.Minute)
}

// TestByProvider: each of the six calls goes where the attempt's own spec says,
// as it is.
func TestByProvider(t *testing.T) {
	for _, c := range opCalls {
		a, b := &opBackend{name: "a"}, &opBackend{name: "b"}
		mux := provisioning.ByProvider{"aws": a, "": b, "gone": nil}
		for kind, want := range map[provisioning.ProviderKind]*opBackend{"aws": a, "": b} {
			result, err := c.call(t.Context(), mux, c.request(opSpec(kind)))
			require.EqualError(t, err, want.name+" has seen it")
			require.Equal(t, c.result(want.name), result)
			require.Equal(t, []any{c.request(opSpec(kind))}, want.seen)
		}
		for _, kind := range []provisioning.ProviderKind{"gone", "AWS"} {
			_, err := c.call(t.Context(), mux, c.request(opSpec(kind)))
			require.ErrorIs(t, err, provisioning.ErrUnknownProvider)
			require.Equal(t, provisioning.ClassNotStarted, provisioning.Classify(c.kind, err))
			require.EqualError(t, err, fmt.Sprintf("provisioning: no backend for the provider %q", kind))
		}
		require.Len(t, a.seen, 1)
		require.Len(t, b.seen, 1)
	}
}

func opGroup(id provisioning.NodeGroupID, kind provisioning.ProviderKind, count int) provisioning.NodeGroupSpec {
	return provisioning.NodeGroupSpec{GroupID: id, Provider: kind, Count: count}
}

func opShape(generation uint64, groups ...provisioning.NodeGroupSpec) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: "demo", Generation: generation, Groups: groups}
}

// TestUnknownProviderIsRefused, by the constructor and by an update, with every
// other fault, and at its place in the order of refusals. Nothing changes.
func TestUnknownProviderIsRefused(t *testing.T) {
	fake := fakebackend.New(fakebackend.Config{Inline: true})
	mux := provisioning.ByProvider{"gcp": fake, "aws": fake, "gone": nil}
	_, err := provisioning.NewHost(provisioning.HostConfig{Backend: mux, Shape: opShape(1, opGroup("a", "aws", 1), opGroup("b", "azure", 1), opGroup("c", "gone", -1))})
	var refused *provisioning.ShapeError
	require.ErrorAs(t, err, &refused)
	require.ErrorIs(t, err, provisioning.ErrInvalidShape)
	require.Equal(t, []provisioning.ShapeFault{
		{Group: "c", Position: 2, Field: "count", Problem: "is -1, must not be negative"},
		{Group: "b", Position: 1, Field: "provider", Problem: `is "azure", for which there is no backend; there are "aws", "gcp"`},
		{Group: "c", Position: 2, Field: "provider", Problem: `is "gone", for which there is no backend; there are "aws", "gcp"`},
	}, refused.Faults)
	_, err = provisioning.NewHost(provisioning.HostConfig{Backend: provisioning.ByProvider(nil), Shape: opShape(1, opGroup("a", "aws", 1))})
	require.EqualError(t, err, `provisioning: invalid shape: group "a" (groups[0]) provider: is "aws", for which there is no backend; there are none at all`)

	var events []provisioning.Event
	// Under a rate limiter all the same.
	host, err := provisioning.NewHost(provisioning.HostConfig{Backend: provisioning.RateLimited(mux, opLimiter(func(context.Context) error { return nil })),
		Shape: opShape(2, opGroup("a", "aws", 1)), OnEvent: func(e provisioning.Event) { events = append(events, e) }})
	require.NoError(t, err)
	azure := opGroup("a", "azure", 1)
	elsewhere := opShape(3, azure)
	elsewhere.RunID = "other"
	require.ErrorIs(t, host.UpdateDesired(elsewhere), provisioning.ErrRunChanged)
	require.ErrorIs(t, host.UpdateDesired(opShape(1, azure)), provisioning.ErrGenerationRegressed)
	require.ErrorAs(t, host.UpdateDesired(opShape(2, azure)), &refused, "before it is told that it reuses the generation")
	require.ErrorAs(t, host.UpdateDesired(opShape(3, azure)), &refused)
	require.EqualValues(t, 2, host.Driver().Generation())
	require.Len(t, events, 4)
	require.Equal(t, provisioning.EventUpdateRefused, events[3].Kind)
	require.ErrorIs(t, events[3].Err, provisioning.ErrInvalidShape)
	require.NoError(t, host.UpdateDesired(opShape(2, opGroup("a", "aws", 1))), "the same again is welcome")
	require.NoError(t, host.UpdateDesired(opShape(3, opGroup("a", "gcp", 1))))
}

// opValidator is a backend that judges groups.
type opValidator struct {
	*opBackend
	judge func(provisioning.NodeGroupSpec) []provisioning.ShapeFault
}

func (v opValidator) ValidateGroup(group provisioning.NodeGroupSpec) []provisioning.ShapeFault {
	return v.judge(group)
}

// TestGroupValidator: a backend sees its own groups, over any wrapper, and says
// only what is wrong; whose fault it is the library knows. Drain is not put to
// it, and it may ask the driver.
func TestGroupValidator(t *testing.T) {
	var host *provisioning.Host
	var asked []provisioning.NodeGroupID
	picky := opValidator{&opBackend{}, func(group provisioning.NodeGroupSpec) []provisioning.ShapeFault {
		asked = append(asked, group.GroupID)
		if host != nil {
			host.Driver().Generation() // would block under a lock
		}
		if group.Shape.Image == "v1" {
			return nil
		}
		return []provisioning.ShapeFault{{Group: "nonsense", Position: 77, Field: "shape.image", Problem: "must be v1"}}
	}}
	mux := provisioning.ByProvider{"picky": provisioning.RateLimited(picky, opLimiter(nil)), "easy": &opBackend{}}
	good := opGroup("b", "picky", 1)
	good.Shape.Image = "v1"
	h, err := provisioning.NewHost(provisioning.HostConfig{Backend: mux, Shape: opShape(1, opGroup("a", "easy", 1), good)})
	require.NoError(t, err)
	host = h
	var refused *provisioning.ShapeError
	require.ErrorAs(t, host.UpdateDesired(opShape(2, opGroup("a", "easy", 1), opGroup("b", "picky", 1))), &refused)
	require.Equal(t, []provisioning.ShapeFault{{Group: "b", Position: 1, Field: "shape.image", Problem: "must be v1"}}, refused.Faults)
	require.Equal(t, []provisioning.NodeGroupID{"b", "b"}, asked)

	ctx, stop := context.WithCancel(t.Context())
	stop()
	require.ErrorIs(t, host.Drain(ctx), context.Canceled)
	require.EqualValues(t, 2, host.Driver().Generation(), "the wish for nothing is in force")
	require.Len(t, asked, 2)
}

// TestProviderOfAGroupChanges: the old provider takes its machine back, the new
// one is asked for the next, and neither hears of the other's.
func TestProviderOfAGroupChanges(t *testing.T) {
	old, next := fakebackend.New(fakebackend.Config{Start: noon}), fakebackend.New(fakebackend.Config{Start: noon})
	old.Script("w-0", provisioning.CancelBootstrap, fakebackend.Definite())
	work := old.NewWork()
	var order []string
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Backend: provisioning.ByProvider{"old": old, "new": next},
		Shape:   opShape(1, opGroup("w", "old", 2)), Clock: work.Clock(nil), Go: work.Go,
		OnEvent: func(e provisioning.Event) {
			if e.Kind == provisioning.EventReady || e.Kind == provisioning.EventDestroyed {
				order = append(order, fmt.Sprintf("%s %d/%d", e, old.LiveTotal(), next.LiveTotal()))
			}
		},
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	old.At(noon.Add(time.Minute), func() { check(host.UpdateDesired(opShape(2, opGroup("w", "new", 2)))) })
	old.At(noon.Add(time.Hour), stop)
	require.Error(t, host.Run(ctx))
	require.Equal(t, []string{"Ready w-0#1 2/0", "Ready w-1#2 2/0", "Destroyed w-0#1 0/0", "Destroyed w-1#2 0/0",
		"Ready w-0#3 0/2", "Ready w-1#4 0/2"}, order)
	for _, node := range []provisioning.LogicalNodeID{"w-0", "w-1"} {
		require.Equal(t, 1, old.Created(node))
		require.Equal(t, 1, old.Destroyed(node))
		require.Equal(t, 1, next.Created(node))
		require.Zero(t, next.Calls(node, provisioning.DestroyLease))
	}
}

// TestWrappersKeepTheContract: what is true of a backend is true of it inside a
// wrapper, rule by rule.
func TestWrappersKeepTheContract(t *testing.T) {
	report := fakebackend.CheckReport(func() fakebackend.Subject {
		fake := fakebackend.New(fakebackend.Config{Class: fakebackend.Label, Lag: 10 * time.Second})
		return fakebackend.Subject{
			Backend: provisioning.RateLimited(provisioning.ByProvider{"fake": fake}, opLimiter(func(ctx context.Context) error { return ctx.Err() })),
			Group:   opGroup("", "fake", 0),
			Live:    func(key provisioning.ExternalKey) (int, error) { return fake.LiveKey(key), nil },
			Advance: func(d time.Duration) { fake.AdvanceTo(fake.Now().Add(d)) },
			LoseAnswer: func(key provisioning.ExternalKey, kind provisioning.OperationKind) {
				fake.Script(key.Node, kind, fakebackend.DoneError())
			},
		}
	})
	require.NoError(t, report.Err(), "%v", report)
	for _, result := range report.Cases {
		require.Empty(t, result.NotRun, result.Case)
	}
}
