// Package backend is an EffectBackend over hosts that one has already: a machine
// is not rented but claimed, and given back as it was.
package backend

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/join"
	"github.com/swactor/provisioning/examples/sshfleet/internal/hosts"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

const (
	// Kind is the provider that shapes name.
	Kind provisioning.ProviderKind = "ssh"
	// CleanupLabel is the one provider label that is not one of hosts: a
	// command that is run when the claim ends.
	CleanupLabel = "sshfleet/cleanup"
	// DefaultTokenRef is the join token of a shape that names none.
	DefaultTokenRef = "join-token"
	// DefaultMaxCalls bounds the calls of a kind that run at once.
	DefaultMaxCalls = 16
	// patience is how long a host that is wanted may keep silent before the
	// next one is asked too.
	patience = 200 * time.Millisecond
	// maxReasons bounds the hosts that a refusal names.
	maxReasons = 8
)

// Config configures a [Backend]. Hosts and Secrets are required.
type Config struct {
	// Hosts is the inventory, as [inventory.Read] returns it.
	Hosts []*inventory.Host
	// Secrets is the directory of the files that shapes refer to as join
	// tokens.
	Secrets string
	// Run is the run whose creates have all been put to this backend. Of any
	// other run it cannot know where one was sent before: then every host
	// that cannot be reached may hold the claim.
	Run provisioning.RunID
	// JoinAddress is where agents join, default a free port of 127.0.0.1.
	// Advertise is the same as hosts see it, by default the same.
	JoinAddress, Advertise string
	// Reach and Join may be zero, as may their fields.
	Reach hosts.Config
	Join  join.Config
	// Progress is the least time between two reports of line numbers. Default
	// 200 ms.
	Progress time.Duration
	// MaxCalls bounds the creates that run at once, and, each by itself, the
	// bootstraps and the ends. Default 16.
	MaxCalls int
	// OnLine takes what agents print, from any goroutine. It may be nil.
	OnLine func(Line)
}

// Line is one line that an agent printed. They are numbered from 1 in each
// stream; who connects again reads them again from the first.
type Line struct {
	Key    provisioning.ExternalKey
	Stderr bool
	Number uint64
	Text   string
}

// Backend is a [provisioning.EffectBackend] and a [provisioning.GroupValidator].
// Its methods are safe for concurrent use.
type Backend struct {
	config Config
	pool   *hosts.Pool
	joins  *join.Server
	// One value for each call that runs.
	creates, starts, ends chan struct{}
	turns                 map[string]chan struct{} // by host: whose turn it is to make a claim there

	ctx     context.Context // until Close
	cancel  context.CancelFunc
	running sync.WaitGroup // calls

	mu     sync.Mutex
	closed bool
	nodes  map[provisioning.ExternalKey]*node
	// By name, the hosts that may hold the claim of a key, and whether that is
	// known of them: then they had a directory of claims.
	doubts map[provisioning.ExternalKey]map[string]bool
}

// node is an attempt whose bootstrap was asked for.
type node struct {
	key    provisioning.ExternalKey
	sink   provisioning.BootstrapSink
	stream *stream // nil when nothing is followed
	lost   bool    // reported
}

// Errors of the backend.
var (
	ErrClosed = errors.New("sshfleet: the backend is closed")
	// ErrNoHost: no host with the labels is free.
	ErrNoHost = errors.New("sshfleet: no host is free")
	// ErrInDoubt: a host that may hold the claim cannot be asked.
	ErrInDoubt = errors.New("sshfleet: a host that may hold the claim cannot be asked")
	// ErrSpent: the claim of this key has been ended.
	ErrSpent = errors.New("sshfleet: the claim of this attempt has been ended")
	// ErrNotListed: the inventory does not have the host of a claim.
	ErrNotListed = errors.New("sshfleet: the host is not in the inventory")
)

// Open returns a backend. Claims that an earlier one has made are found again by
// their keys.
func Open(config Config) (*Backend, error) {
	config.MaxCalls = cmp.Or(config.MaxCalls, DefaultMaxCalls)
	config.JoinAddress = cmp.Or(config.JoinAddress, "127.0.0.1:0")
	if len(config.Hosts) == 0 || config.Secrets == "" || config.MaxCalls < 0 {
		return nil, errors.New("sshfleet: a backend needs Hosts and Secrets, and MaxCalls must not be negative")
	}
	b := &Backend{
		config:  config,
		creates: make(chan struct{}, config.MaxCalls), starts: make(chan struct{}, config.MaxCalls), ends: make(chan struct{}, config.MaxCalls),
		turns:  make(map[string]chan struct{}),
		nodes:  make(map[provisioning.ExternalKey]*node),
		doubts: make(map[provisioning.ExternalKey]map[string]bool),
	}
	for _, h := range config.Hosts {
		b.turns[h.Name] = make(chan struct{}, 1)
	}
	var err error
	if b.joins, err = join.Listen(config.JoinAddress, config.Join); err != nil {
		return nil, err
	}
	b.pool = hosts.NewPool(config.Reach)
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b, nil
}

// JoinAddr returns where agents join.
func (b *Backend) JoinAddr() string { return cmp.Or(b.config.Advertise, b.joins.Addr()) }

// Pool returns the connections, to list claims and to end those of others.
func (b *Backend) Pool() *hosts.Pool { return b.pool }

// Members returns what the join listener knows of the nodes.
func (b *Backend) Members() []join.Member { return b.joins.Members() }

// Close ends the calls that run, all streams, the connections and the join
// listener, and waits for their goroutines. Claims and agents go on.
func (b *Backend) Close() error {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.cancel()
	b.running.Wait() // nobody starts a stream after this
	b.mu.Lock()
	nodes := b.nodes
	b.nodes = nil
	b.mu.Unlock()
	for _, n := range nodes {
		n.stream.close()
	}
	b.pool.Close()
	return b.joins.Close()
}

// enter begins a call. Its ctx is that of the caller (B7), and done at the latest
// when the backend is closed. It waits for a place among those that run at once.
func (b *Backend) enter(ctx context.Context, places chan struct{}) (context.Context, func(), error) {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil, nil, provisioning.NotStarted(ErrClosed)
	}
	b.running.Add(1)
	b.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(b.ctx, cancel)
	leave := func() { stop(); cancel(); b.running.Done() }
	select {
	case places <- struct{}{}:
		return ctx, func() { <-places; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, nil, provisioning.NotStarted(ctx.Err())
	}
}

// CreateLease makes the claim of the key on a host, or adopts it (B1).
//
// Which host that is cannot be known before: a host may be taken. So it is not
// computed again on a retry but found (B2): hosts are asked for the claim before
// another is made, and while one that may hold it cannot be asked, there is no
// answer (B3). There is nothing to settle, see [hosts.Pool.Make].
func (b *Backend) CreateLease(ctx context.Context, req provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	ctx, leave, err := b.enter(ctx, b.creates)
	if err != nil {
		return provisioning.CreateLeaseResult{}, err
	}
	defer leave()
	if req.CreatesSent > 0 && req.Key.Run != b.config.Run {
		b.doubt(req.Key, false, b.config.Hosts...)
	}
	candidates := b.candidates(req.Key, req.Spec)
	// CreatesSent is never too low: without one, there is nothing to find.
	if req.CreatesSent > 0 || req.AdoptOnly {
		h, err := b.find(ctx, req.Key)
		if h != nil || err != nil {
			return leaseOn(h, req.Key), err
		}
	}
	if req.AdoptOnly { // which makes nothing, whatever the spec (B4)
		return provisioning.CreateLeaseResult{}, provisioning.ErrNothingToAdopt
	}
	if err := b.check(req.Spec); err != nil { // and nothing is there: it was looked for
		return provisioning.CreateLeaseResult{}, provisioning.Definite(err)
	}
	h, err := b.take(ctx, req.Key, candidates, req.Spec.Shape.ProviderLabels[CleanupLabel])
	return leaseOn(h, req.Key), err
}

// leaseOn is the answer to a create. A lease is made of the key and of nothing
// secret (B9); where it answers is known at once.
func leaseOn(h *inventory.Host, key provisioning.ExternalKey) provisioning.CreateLeaseResult {
	if h == nil {
		return provisioning.CreateLeaseResult{}
	}
	endpoint := h.Endpoint
	return provisioning.CreateLeaseResult{Lease: leaseID(h, key), Endpoint: &endpoint}
}

func leaseID(h *inventory.Host, key provisioning.ExternalKey) provisioning.ProviderLeaseID {
	return provisioning.ProviderLeaseID(key.Token() + "@" + h.Name)
}

// hostOf returns the host of a lease.
func (b *Backend) hostOf(lease provisioning.ProviderLeaseID) (*inventory.Host, error) {
	_, name, _ := strings.Cut(string(lease), "@")
	for _, h := range b.config.Hosts {
		if h.Name == name {
			return h, nil
		}
	}
	return nil, provisioning.Ambiguous(fmt.Errorf("%w: %q", ErrNotListed, name))
}

// candidates returns the hosts that fit, in an order that is fixed by the key and
// is another one for each, so that attempts do not all try the same host first.
func (b *Backend) candidates(key provisioning.ExternalKey, spec provisioning.LogicalNodeSpec) []*inventory.Host {
	fits := b.matching(spec.Shape.ProviderLabels, spec.Boot.SSHUser)
	rank := func(h *inventory.Host) []byte {
		sum := sha256.Sum256([]byte(key.Token() + " " + h.Name))
		return sum[:]
	}
	slices.SortFunc(fits, func(x, y *inventory.Host) int { return bytes.Compare(rank(x), rank(y)) })
	return fits
}

// matching returns the hosts that have all labels, and the user if one is named.
func (b *Backend) matching(labels map[string]string, user string) []*inventory.Host {
	wanted := make(map[string]string, len(labels))
	for name, value := range labels {
		if name != CleanupLabel {
			wanted[name] = value
		}
	}
	var fits []*inventory.Host
	for _, h := range b.config.Hosts {
		if h.Has(wanted) && (user == "" || user == h.User) {
			fits = append(fits, h)
		}
	}
	return fits
}

// find looks for the claim of a key on all hosts, at the same time. It returns
// nil if there is none and none can come to be. Nobody else's claim is ever
// found: the token is matched as a whole (B8).
func (b *Backend) find(ctx context.Context, key provisioning.ExternalKey) (*inventory.Host, error) {
	states := make([]hosts.State, len(b.config.Hosts))
	errs := make([]error, len(b.config.Hosts))
	var looking sync.WaitGroup
	for i, h := range b.config.Hosts {
		looking.Go(func() { states[i], errs[i] = b.pool.Look(ctx, h, key.Token()) })
	}
	looking.Wait()
	var held []*inventory.Host
	var unsure []error
	var spent, remains *inventory.Host
	for i, h := range b.config.Hosts { // by name
		switch {
		case errs[i] != nil && b.doubted(key, h):
			unsure = append(unsure, errs[i])
		case errs[i] != nil: // no create was sent there
		case states[i] == hosts.Unused && b.certain(key, h):
			unsure = append(unsure, &hosts.NoClaimError{Host: h.Name, Dir: h.Dir, State: hosts.Unused})
		case states[i] == hosts.Held:
			b.doubt(key, true, h)
			held = append(held, h)
		case states[i] == hosts.Ending:
			remains = cmp.Or(remains, h)
		case states[i] == hosts.Spent:
			spent = h
			b.trust(key, h)
		default:
			b.trust(key, h)
		}
	}
	switch {
	case len(held) > 0: // one is kept, whoever made the others (B8)
		for _, h := range held[1:] {
			if err := b.pool.End(ctx, h, key.Token(), true); err != nil {
				return nil, provisioning.Ambiguous(fmt.Errorf("sshfleet: a second claim of one attempt: %w", err))
			}
		}
		return held[0], nil
	case ctx.Err() != nil: // a look that was cut short has found nothing
		return nil, provisioning.Ambiguous(ctx.Err())
	case unsure != nil:
		return nil, provisioning.Ambiguous(fmt.Errorf("%w: %w", ErrInDoubt, errors.Join(unsure...)))
	case remains != nil: // what is left has to be ended (B11)
		return nil, provisioning.LeaseLostWith(leaseID(remains, key), ErrSpent)
	case spent != nil: // a token is never used twice (B11)
		return nil, provisioning.LeaseLost(ErrSpent)
	}
	return nil, nil
}

// take makes the claim on the first host that is free.
func (b *Backend) take(ctx context.Context, key provisioning.ExternalKey, candidates []*inventory.Host, cleanup string) (*inventory.Host, error) {
	reasons := make(map[*inventory.Host]string)
	for h := range b.reach(ctx, candidates) {
		state, err := b.makeClaim(ctx, h, key, cleanup)
		switch {
		case state == hosts.Held:
			return h, nil
		case state == hosts.Ending:
			return nil, provisioning.LeaseLostWith(leaseID(h, key), ErrSpent)
		case state == hosts.Spent:
			return nil, provisioning.LeaseLost(ErrSpent)
		case errors.Is(err, hosts.ErrInDoubt): // no other host before this one has been asked
			return nil, provisioning.Ambiguous(err)
		}
		reasons[h] = strings.TrimPrefix(err.Error(), "sshfleet: ")
	}
	if ctx.Err() != nil { // nothing was made, and it was not tried everywhere
		return nil, provisioning.NotStarted(ctx.Err())
	}
	return nil, provisioning.Definite(fmt.Errorf("%w: %s", ErrNoHost, describe(candidates, reasons)))
}

// describe says why none of the candidates was taken, in their order.
func describe(candidates []*inventory.Host, reasons map[*inventory.Host]string) string {
	if len(candidates) == 0 {
		return "none of the inventory has the labels and the user that are wanted"
	}
	var texts []string
	for _, h := range candidates[:min(len(candidates), maxReasons)] {
		texts = append(texts, reasons[h])
	}
	if more := len(candidates) - maxReasons; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, "; ")
}

// reach yields the candidates, each once there is a connection to it or cannot be
// one: in their order, but one that keeps silent does not keep the next ones.
// Without trouble no connection is made to a host that is not needed.
func (b *Backend) reach(ctx context.Context, candidates []*inventory.Host) iter.Seq[*inventory.Host] {
	return func(yield func(*inventory.Host) bool) {
		ctx, cancel := context.WithCancel(ctx)
		var reaching sync.WaitGroup
		defer reaching.Wait()
		defer cancel()
		reached := make(chan *inventory.Host, len(candidates))
		waiting := 0
		for next := candidates; len(next) > 0 || waiting > 0; {
			var impatient <-chan time.Time
			if len(next) > 0 {
				h := next[0]
				next, waiting = next[1:], waiting+1
				reaching.Go(func() {
					b.pool.Reach(ctx, h) // who makes the claim hears the same again
					reached <- h
				})
			}
			if len(next) > 0 {
				impatient = time.After(patience)
			}
			select {
			case h := <-reached:
				waiting--
				if ctx.Err() != nil || !yield(h) {
					return
				}
			case <-impatient:
			case <-ctx.Done():
				return
			}
		}
	}
}

// makeClaim makes a claim on a host, one at a time: two of us who try at once
// would only send each other away.
func (b *Backend) makeClaim(ctx context.Context, h *inventory.Host, key provisioning.ExternalKey, cleanup string) (hosts.State, error) {
	select {
	case b.turns[h.Name] <- struct{}{}:
		defer func() { <-b.turns[h.Name] }()
	case <-ctx.Done():
		return hosts.Absent, ctx.Err()
	}
	b.doubt(key, false, h) // before anything is sent
	state, err := b.pool.Make(ctx, h, key, cleanup)
	if state == hosts.Held || errors.Is(err, hosts.ErrInDoubt) {
		b.doubt(key, true, h)
	} else {
		b.trust(key, h)
	}
	return state, err
}

// doubt notes that hosts may hold the claim of a key: also one that does, because
// our answer may come too late for the driver, who then asks again. trust notes
// that a host does not.
func (b *Backend) doubt(key provisioning.ExternalKey, certain bool, maybe ...*inventory.Host) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.doubts[key] == nil {
		b.doubts[key] = make(map[string]bool)
	}
	for _, h := range maybe {
		b.doubts[key][h.Name] = b.doubts[key][h.Name] || certain
	}
}

func (b *Backend) trust(key provisioning.ExternalKey, h *inventory.Host) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.doubts[key], h.Name)
	if len(b.doubts[key]) == 0 {
		delete(b.doubts, key)
	}
}

func (b *Backend) doubted(key provisioning.ExternalKey, h *inventory.Host) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, doubted := b.doubts[key][h.Name]
	return doubted
}

func (b *Backend) certain(key provisioning.ExternalKey, h *inventory.Host) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.doubts[key][h.Name]
}

// LookupEndpoint says where the host answers, as long as it has the claim.
// Nobody asks after a create, which has said so.
func (b *Backend) LookupEndpoint(ctx context.Context, req provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	ctx, leave, err := b.enter(ctx, b.starts)
	if err != nil {
		return provisioning.LookupEndpointResult{}, err
	}
	defer leave()
	h, err := b.hostOf(req.Lease)
	if err != nil {
		return provisioning.LookupEndpointResult{}, err
	}
	state, err := b.pool.Look(ctx, h, req.Key.Token())
	switch {
	case err != nil:
		return provisioning.LookupEndpointResult{}, provisioning.Ambiguous(err)
	case state != hosts.Held:
		return provisioning.LookupEndpointResult{}, provisioning.LeaseLost(hosts.ErrLost)
	}
	endpoint := h.Endpoint
	return provisioning.LookupEndpointResult{Endpoint: &endpoint}, nil
}

// StartBootstrap starts the agent under the claim, or adopts the one that runs
// (B1). It returns once the agent runs; the join comes later.
func (b *Backend) StartBootstrap(ctx context.Context, req provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	ctx, leave, err := b.enter(ctx, b.starts)
	if err != nil {
		return provisioning.StartBootstrapResult{}, err
	}
	defer leave()
	h, err := b.hostOf(req.Lease)
	if err != nil {
		return provisioning.StartBootstrapResult{}, err
	}
	token, err := b.secret(req.Spec.SwarmJoin.JoinTokenRef)
	if err != nil {
		return provisioning.StartBootstrapResult{}, provisioning.NotStarted(err)
	}
	session := Session(req.Key) // of this attempt and of no other (B8)
	n, followed := b.node(req.Key, req.Sink)
	// Before the agent can join. If it has joined, that is told again.
	b.joins.Expect(req.Key, join.Expectation{
		Token:  token,
		Joined: func(swactor provisioning.SwactorID) { req.Sink.Joined(session, swactor) },
		Lost:   func(reason string) { b.lose(n, reason) },
	})
	if followed {
		return provisioning.StartBootstrapResult{Session: session}, nil
	}
	j := &job{backend: b, host: h, key: req.Key, agent: b.agent(h, req.Key, req.Spec, token), sink: req.Sink}
	if err := j.start(ctx); err != nil {
		return provisioning.StartBootstrapResult{}, err
	}
	if !b.attach(n, j) { // it was destroyed meanwhile
		return provisioning.StartBootstrapResult{}, provisioning.LeaseLost(hosts.ErrLost)
	}
	return provisioning.StartBootstrapResult{Session: session}, nil
}

// BootstrapConvergenceObserved closes the session: the node has joined.
func (b *Backend) BootstrapConvergenceObserved(ctx context.Context, req provisioning.BootstrapConvergenceObservedRequest) error {
	if n, stream := b.detach(req.Key); stream != nil {
		stream.close()
		n.sink.Closed(req.Session) // after the join, which is why we were called (B10)
	}
	return nil
}

// CancelBootstrap ends the agent of the session. An unknown session has none
// (B5).
func (b *Backend) CancelBootstrap(ctx context.Context, req provisioning.CancelBootstrapRequest) error {
	ctx, leave, err := b.enter(ctx, b.ends)
	if err != nil {
		return err
	}
	defer leave()
	if req.Session != Session(req.Key) {
		return nil
	}
	b.joins.Forget(req.Key)
	_, stream := b.detach(req.Key)
	stream.close()
	h, err := b.hostOf(req.Lease)
	if err != nil {
		return err
	}
	return b.pool.Cancel(ctx, h, req.Key.Token())
}

// DestroyLease ends the claim and returns nil once nothing is left of it (B6),
// also not on a host of which a create has not heard. A host that does not answer
// is not a host without the claim, nor is one where there is no trace of a claim
// that was made.
func (b *Backend) DestroyLease(ctx context.Context, req provisioning.DestroyLeaseRequest) error {
	ctx, leave, err := b.enter(ctx, b.ends)
	if err != nil {
		return err
	}
	defer leave()
	b.joins.Forget(req.Key)
	_, stream := b.detach(req.Key)
	b.mu.Lock()
	delete(b.nodes, req.Key) // its end is no loss
	b.mu.Unlock()
	stream.close()
	h, err := b.hostOf(req.Lease)
	if err != nil {
		return err
	}
	b.doubt(req.Key, false, h)
	for _, maybe := range b.doubtful(req.Key) {
		err := b.pool.End(ctx, maybe, req.Key.Token(), true)
		none, absent := errors.AsType[*hosts.NoClaimError](err)
		if absent && maybe != h && (none.State == hosts.Absent || !b.certain(req.Key, maybe)) {
			err = nil // it was in doubt only
		}
		if err != nil {
			return provisioning.Ambiguous(err)
		}
		b.trust(req.Key, maybe)
	}
	return nil
}

// doubtful returns the hosts that may hold the claim of a key, by name.
func (b *Backend) doubtful(key provisioning.ExternalKey) []*inventory.Host {
	var found []*inventory.Host
	for _, h := range b.config.Hosts {
		if b.doubted(key, h) {
			found = append(found, h)
		}
	}
	return found
}

// secret reads the join token that a shape refers to: the name of a file in
// the directory of secrets. Nothing of it gets into an error.
func (b *Backend) secret(ref string) ([]byte, error) {
	ref = cmp.Or(ref, DefaultTokenRef)
	if ref != filepath.Base(ref) || !filepath.IsLocal(ref) || ref == "." {
		return nil, fmt.Errorf("sshfleet: joinTokenRef %q is not the name of a secret", ref)
	}
	path := filepath.Join(b.config.Secrets, ref)
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("sshfleet: join token: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("sshfleet: join token: %s is no regular file", path)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("sshfleet: join token: %s is open to others than its owner", path)
	}
	token, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("sshfleet: join token: %w", err)
	}
	if token = bytes.TrimSpace(token); len(token) == 0 {
		return nil, fmt.Errorf("sshfleet: join token: %s is empty", path)
	}
	return token, nil
}
