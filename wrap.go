package provisioning

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// This file holds backends made of other backends. They change nothing about a
// request and keep every rule that the backends inside keep.

// Limiter lets calls through at some pace. *rate.Limiter of
// golang.org/x/time/rate is one.
type Limiter interface {
	// Wait returns nil when the call may be made, and an error if that will
	// not be, for example because ctx is done. It is called from many
	// goroutines at once.
	Wait(ctx context.Context) error
}

// RateLimited returns a backend whose calls, of all six methods, wait for the
// limiter first. A call that is given up while it waits, because the limiter
// says so or ctx is done, is NotStarted: the provider has not heard of it.
//
// The waiting is part of the operation's time. One that reaches its deadline in
// the queue of the limiter is ended by the driver like any other and counts as
// Ambiguous, which costs a retry and no money. So have [Config.MaxInFlight]
// operations at most, of which the last in the queue still has its turn within
// [RetryPolicy.OperationTimeout].
//
// A nil limiter limits nothing. The wrapper of a nil backend is nil, for
// [NewHost] and [NewExecutor] to refuse.
func RateLimited(backend EffectBackend, limiter Limiter) EffectBackend {
	if backend == nil || limiter == nil {
		return backend
	}
	return &rateLimited{backend, limiter}
}

type rateLimited struct {
	backend EffectBackend
	limiter Limiter
}

func (r *rateLimited) wait(ctx context.Context) error {
	err := r.ask(ctx)
	if err == nil {
		err = ctx.Err() // let through too late: the call can still be left out
	}
	if err != nil {
		return NotStarted(fmt.Errorf("provisioning: given up in the queue of the rate limiter: %w", err))
	}
	return nil
}

// ask fences the limiter: its panic is no news of the provider, as that of a call
// would be.
func (r *rateLimited) ask(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("it panicked: %v", p)
		}
	}()
	return r.limiter.Wait(ctx)
}

func (r *rateLimited) CreateLease(ctx context.Context, req CreateLeaseRequest) (CreateLeaseResult, error) {
	if err := r.wait(ctx); err != nil {
		return CreateLeaseResult{}, err
	}
	return r.backend.CreateLease(ctx, req)
}

func (r *rateLimited) LookupEndpoint(ctx context.Context, req LookupEndpointRequest) (LookupEndpointResult, error) {
	if err := r.wait(ctx); err != nil {
		return LookupEndpointResult{}, err
	}
	return r.backend.LookupEndpoint(ctx, req)
}

func (r *rateLimited) StartBootstrap(ctx context.Context, req StartBootstrapRequest) (StartBootstrapResult, error) {
	if err := r.wait(ctx); err != nil {
		return StartBootstrapResult{}, err
	}
	return r.backend.StartBootstrap(ctx, req)
}

func (r *rateLimited) BootstrapConvergenceObserved(ctx context.Context, req BootstrapConvergenceObservedRequest) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	return r.backend.BootstrapConvergenceObserved(ctx, req)
}

func (r *rateLimited) CancelBootstrap(ctx context.Context, req CancelBootstrapRequest) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	return r.backend.CancelBootstrap(ctx, req)
}

func (r *rateLimited) DestroyLease(ctx context.Context, req DestroyLeaseRequest) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	return r.backend.DestroyLease(ctx, req)
}

// ValidateGroup implements [GroupValidator] for a backend that does.
func (r *rateLimited) ValidateGroup(group NodeGroupSpec) []ShapeFault {
	return validateGroup(r.backend, group)
}

func validateGroup(backend EffectBackend, group NodeGroupSpec) []ShapeFault {
	if validator, ok := backend.(GroupValidator); ok {
		return validator.ValidateGroup(group)
	}
	return nil
}

// ErrUnknownProvider: a call is for a [ProviderKind] that [ByProvider] lacks.
var ErrUnknownProvider = errors.New("provisioning: no backend for the provider")

// ByProvider is a backend that hands each call to the backend of the provider
// that its attempt was begun with. So a group that changes its provider has its
// machines given back by the old one and rented anew from the new one; leave
// the old one in until they are gone.
//
// As a [GroupValidator] it refuses a group of a provider that is not in the
// map, or is nil there, and asks the backends that are validators themselves.
// "" is the provider of a group that names none. A call that comes for an
// unknown provider all the same is NotStarted and [ErrUnknownProvider]: nothing
// is done and nothing forgotten.
//
// The map must not change once it is in use.
type ByProvider map[ProviderKind]EffectBackend

// ValidateGroup implements [GroupValidator].
func (p ByProvider) ValidateGroup(group NodeGroupSpec) []ShapeFault {
	backend := p[group.Provider]
	if backend == nil {
		return []ShapeFault{{Field: "provider", Problem: fmt.Sprintf("is %q, for which there is no backend; there are %s", group.Provider, p.names())}}
	}
	return validateGroup(backend, group)
}

// names lists the providers for people.
func (p ByProvider) names() string {
	var names []string
	for _, kind := range slices.Sorted(maps.Keys(p)) {
		if p[kind] != nil {
			names = append(names, fmt.Sprintf("%q", kind))
		}
	}
	if names == nil {
		return "none at all"
	}
	return strings.Join(names, ", ")
}

func (p ByProvider) backend(kind ProviderKind) (EffectBackend, error) {
	if backend := p[kind]; backend != nil {
		return backend, nil
	}
	return nil, NotStarted(fmt.Errorf("%w %q", ErrUnknownProvider, kind))
}

// CreateLease implements [EffectBackend].
func (p ByProvider) CreateLease(ctx context.Context, req CreateLeaseRequest) (CreateLeaseResult, error) {
	backend, err := p.backend(req.Spec.Provider)
	if err != nil {
		return CreateLeaseResult{}, err
	}
	return backend.CreateLease(ctx, req)
}

// LookupEndpoint implements [EffectBackend].
func (p ByProvider) LookupEndpoint(ctx context.Context, req LookupEndpointRequest) (LookupEndpointResult, error) {
	backend, err := p.backend(req.Spec.Provider)
	if err != nil {
		return LookupEndpointResult{}, err
	}
	return backend.LookupEndpoint(ctx, req)
}

// StartBootstrap implements [EffectBackend].
func (p ByProvider) StartBootstrap(ctx context.Context, req StartBootstrapRequest) (StartBootstrapResult, error) {
	backend, err := p.backend(req.Spec.Provider)
	if err != nil {
		return StartBootstrapResult{}, err
	}
	return backend.StartBootstrap(ctx, req)
}

// BootstrapConvergenceObserved implements [EffectBackend].
func (p ByProvider) BootstrapConvergenceObserved(ctx context.Context, req BootstrapConvergenceObservedRequest) error {
	backend, err := p.backend(req.Spec.Provider)
	if err != nil {
		return err
	}
	return backend.BootstrapConvergenceObserved(ctx, req)
}

// CancelBootstrap implements [EffectBackend].
func (p ByProvider) CancelBootstrap(ctx context.Context, req CancelBootstrapRequest) error {
	backend, err := p.backend(req.Spec.Provider)
	if err != nil {
		return err
	}
	return backend.CancelBootstrap(ctx, req)
}

// DestroyLease implements [EffectBackend].
func (p ByProvider) DestroyLease(ctx context.Context, req DestroyLeaseRequest) error {
	backend, err := p.backend(req.Spec.Provider)
	if err != nil {
		return err
	}
	return backend.DestroyLease(ctx, req)
}
