package fakebackend

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/swactor/provisioning"
)

// Config says what kind of provider to play. The zero value is one that is
// quick and keeps its word.
type Config struct {
	Class Class
	// Lag is how long a provider of class Label does not show a new machine
	// to a look by label.
	Lag time.Duration
	// Settle is how long after a create that can have bought the backend
	// gives no final answer about the key (B3): what would be a final no is
	// Ambiguous, a destroy destroys and is Ambiguous, and a create by label
	// makes nothing. It is at least Lag, and zero means Lag.
	Settle time.Duration
	// ManualBootstrap: no bootstrap reports anything by itself; the test
	// delivers what it wants to be seen.
	ManualBootstrap bool
	// JoinAfter is how long after its start a bootstrap reports the join,
	// with progress on the way. Zero: at once, before StartBootstrap has
	// returned.
	JoinAfter time.Duration
	// Start is the first instant. The zero time means 2000-01-01 UTC.
	Start time.Time
	// Inline says that the executor calls the backend on the goroutine that
	// also holds the clock, so that no outcome may block.
	Inline bool
	// OnCall is called at the start of every call, on its goroutine, before
	// anything is done. It may be nil.
	OnCall func(Call)
}

// Call is one call of the backend, as it starts.
type Call struct {
	Kind      provisioning.OperationKind
	Key       provisioning.ExternalKey
	Operation provisioning.OperationID
	AdoptOnly bool
	Outcome   Outcome
	StartedAt time.Time
	// Others is how many calls of the same key have not returned yet. The
	// executor promises 0.
	Others int
}

// Backend is the fake. It is safe for concurrent use.
type Backend struct {
	config Config

	mu       sync.Mutex
	now      time.Time
	order    uint64 // of events
	timeline timeline
	slots    map[provisioning.LogicalNodeID]*slot
	accounts map[provisioning.ExternalKey]*account
	leases   map[provisioning.ProviderLeaseID]provisioning.ExternalKey    // that ever were
	sessions map[provisioning.BootstrapSessionID]provisioning.ExternalKey // that ever were
	blocked  []*call                                                      // in the order in which they blocked
	outbox   []func()                                                     // reports to make once the lock is free
	closed   bool

	// working: a piece of Work runs; it sends on idle when it has finished
	// or blocks. Of all pieces one at a time works.
	working bool
	idle    chan struct{}
}

var _ provisioning.EffectBackend = (*Backend)(nil)

// slot is what is scripted for and counted of one slot, over all its attempts
// and runs.
type slot struct {
	scripts   map[provisioning.OperationKind][]Outcome
	callTimes map[provisioning.OperationKind][]time.Time
	accounts  []*account
}

// New returns a provider without machines.
func New(config Config) *Backend {
	config.Settle = max(config.Settle, config.Lag)
	if config.Start.IsZero() {
		config.Start = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	return &Backend{
		config:   config,
		now:      config.Start,
		slots:    make(map[provisioning.LogicalNodeID]*slot),
		accounts: make(map[provisioning.ExternalKey]*account),
		leases:   make(map[provisioning.ProviderLeaseID]provisioning.ExternalKey),
		sessions: make(map[provisioning.BootstrapSessionID]provisioning.ExternalKey),
		idle:     make(chan struct{}),
	}
}

func (b *Backend) slot(node provisioning.LogicalNodeID) *slot {
	s := b.slots[node]
	if s == nil {
		s = &slot{callTimes: make(map[provisioning.OperationKind][]time.Time)}
		b.slots[node] = s
	}
	return s
}

// Script queues outcomes for the next calls of an operation on a slot, of any
// attempt. Beyond the script calls are OK. It panics if an outcome does not
// fit the operation, or would block an inline call: a mistake of the test that
// is best seen where it is made.
func (b *Backend) Script(node provisioning.LogicalNodeID, kind provisioning.OperationKind, outcomes ...Outcome) {
	for _, o := range outcomes {
		if err := o.Fits(kind); err != nil {
			panic(err.Error())
		}
		if b.config.Inline && o.blocks() {
			panic(fmt.Sprintf("fakebackend: outcome %v of %v on %s would block an inline call for ever", o, kind, node))
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.slot(node)
	if s.scripts == nil {
		s.scripts = make(map[provisioning.OperationKind][]Outcome)
	}
	s.scripts[kind] = append(s.scripts[kind], outcomes...)
}

// Scripted returns the outcomes that are still queued.
func (b *Backend) Scripted(node provisioning.LogicalNodeID, kind provisioning.OperationKind) []Outcome {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.slots[node]; s != nil {
		return slices.Clone(s.scripts[kind])
	}
	return nil
}

// ClearScripts drops all outcomes that are still queued: from here on calls are
// OK, whatever their slot. Calls that block go on to do so.
func (b *Backend) ClearScripts() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.slots {
		clear(s.scripts)
	}
}

// Remove takes the live machines of a slot away behind everybody's back, with
// their sessions and without a word. It returns how many there were.
func (b *Backend) Remove(node provisioning.LogicalNodeID) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, a := range b.accountsOf(node) {
		n += a.removeAll()
	}
	return n
}

func (b *Backend) accountsOf(node provisioning.LogicalNodeID) []*account {
	if s := b.slots[node]; s != nil {
		return s.accounts
	}
	return nil
}

// Live returns how many machines of a slot exist, dead and invisible ones
// included: what is billed.
func (b *Backend) Live(node provisioning.LogicalNodeID) int {
	return b.sum(node, func(a *account) int { return len(a.machines) })
}

// Created returns how many machines were ever made for a slot.
func (b *Backend) Created(node provisioning.LogicalNodeID) int {
	return b.sum(node, func(a *account) int { return a.created })
}

// Destroyed returns how many machines of a slot a call has destroyed.
func (b *Backend) Destroyed(node provisioning.LogicalNodeID) int {
	return b.sum(node, func(a *account) int { return a.destroyed })
}

func (b *Backend) sum(node provisioning.LogicalNodeID, count func(*account) int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, a := range b.accountsOf(node) {
		n += count(a)
	}
	return n
}

// LiveTotal returns how many machines exist in all.
func (b *Backend) LiveTotal() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, a := range b.accounts {
		n += len(a.machines)
	}
	return n
}

// LiveKey, CreatedKey and DestroyedKey count for one attempt what Live, Created
// and Destroyed count for a slot.
func (b *Backend) LiveKey(key provisioning.ExternalKey) int {
	return b.count(key, func(a *account) int { return len(a.machines) })
}

// CreatedKey: see LiveKey.
func (b *Backend) CreatedKey(key provisioning.ExternalKey) int {
	return b.count(key, func(a *account) int { return a.created })
}

// DestroyedKey: see LiveKey.
func (b *Backend) DestroyedKey(key provisioning.ExternalKey) int {
	return b.count(key, func(a *account) int { return a.destroyed })
}

// StartedKey returns how many bootstraps were ever begun for one attempt.
func (b *Backend) StartedKey(key provisioning.ExternalKey) int {
	return b.count(key, func(a *account) int { return a.sessions })
}

func (b *Backend) count(key provisioning.ExternalKey, count func(*account) int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a := b.accounts[key]; a != nil {
		return count(a)
	}
	return 0
}

// Machines lists what exists, by run, slot name, attempt and age.
func (b *Backend) Machines() []Machine {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []Machine
	for _, a := range b.accounts {
		for _, m := range a.machines {
			all = append(all, m.Machine)
		}
	}
	slices.SortFunc(all, compareMachines)
	return all
}

// Calls returns how many calls of an operation on a slot have started.
func (b *Backend) Calls(node provisioning.LogicalNodeID, kind provisioning.OperationKind) int {
	return len(b.CallTimes(node, kind))
}

// CallTimes returns when they started.
func (b *Backend) CallTimes(node provisioning.LogicalNodeID, kind provisioning.OperationKind) []time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.slots[node]; s != nil {
		return slices.Clone(s.callTimes[kind])
	}
	return nil
}

// SessionID returns the newest session of a key, and before there is one the
// id that the first will have.
func (b *Backend) SessionID(key provisioning.ExternalKey) provisioning.BootstrapSessionID {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a := b.accounts[key]; a != nil && a.session != nil {
		return a.session.id
	}
	return sessionID(key, 1)
}

// SessionLive reports whether the newest session of a key has not ended.
func (b *Backend) SessionLive(key provisioning.ExternalKey) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.accounts[key]
	return a != nil && a.live() != nil
}

// CreateLease implements [provisioning.EffectBackend].
func (b *Backend) CreateLease(ctx context.Context, req provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	a := b.serve(ctx, &call{kind: provisioning.CreateLease, key: req.Key, operation: req.Operation, adoptOnly: req.AdoptOnly})
	if a.err != nil {
		return provisioning.CreateLeaseResult{}, a.err
	}
	return provisioning.CreateLeaseResult{Lease: a.lease, Endpoint: a.endpoint}, nil
}

// LookupEndpoint implements [provisioning.EffectBackend].
func (b *Backend) LookupEndpoint(ctx context.Context, req provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	a := b.serve(ctx, &call{kind: provisioning.LookupEndpoint, key: req.Key, operation: req.Operation, lease: req.Lease})
	if a.err != nil {
		return provisioning.LookupEndpointResult{}, a.err
	}
	return provisioning.LookupEndpointResult{Endpoint: a.endpoint}, nil
}

// StartBootstrap implements [provisioning.EffectBackend].
func (b *Backend) StartBootstrap(ctx context.Context, req provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	a := b.serve(ctx, &call{kind: provisioning.StartBootstrap, key: req.Key, operation: req.Operation, lease: req.Lease,
		endpoint: req.Endpoint, sink: req.Sink})
	if a.err != nil {
		return provisioning.StartBootstrapResult{}, a.err
	}
	return provisioning.StartBootstrapResult{Session: a.session}, nil
}

// BootstrapConvergenceObserved implements [provisioning.EffectBackend].
func (b *Backend) BootstrapConvergenceObserved(ctx context.Context, req provisioning.BootstrapConvergenceObservedRequest) error {
	return b.serve(ctx, &call{kind: provisioning.BootstrapConvergenceObserved, key: req.Key, operation: req.Operation,
		lease: req.Lease, session: req.Session}).err
}

// CancelBootstrap implements [provisioning.EffectBackend].
func (b *Backend) CancelBootstrap(ctx context.Context, req provisioning.CancelBootstrapRequest) error {
	return b.serve(ctx, &call{kind: provisioning.CancelBootstrap, key: req.Key, operation: req.Operation,
		lease: req.Lease, session: req.Session}).err
}

// DestroyLease implements [provisioning.EffectBackend].
func (b *Backend) DestroyLease(ctx context.Context, req provisioning.DestroyLeaseRequest) error {
	return b.serve(ctx, &call{kind: provisioning.DestroyLease, key: req.Key, operation: req.Operation, lease: req.Lease}).err
}
