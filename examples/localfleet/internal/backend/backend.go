// Package backend is an EffectBackend made of real things: processes for
// machines, SSH for the bootstrap, a TCP listener for the joins.
package backend

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/atomicfile"
	"github.com/swactor/provisioning/examples/localfleet/internal/bootstrap"
	"github.com/swactor/provisioning/examples/localfleet/internal/process"
	"github.com/swactor/provisioning/examples/localfleet/join"
	"github.com/swactor/provisioning/examples/localfleet/remote"
)

const (
	// DefaultTokenRef is the join token that is made where there is none.
	DefaultTokenRef = "join-token"
	// DefaultUser logs in where a shape names no SSHUser.
	DefaultUser = "swactor"
	// DefaultWatch is how often the processes of machines are looked at.
	DefaultWatch = 500 * time.Millisecond
	// DefaultMaxCalls bounds how many machines are started, and how many
	// bootstrapped, at once.
	DefaultMaxCalls = 16
)

// Config configures a [Backend]. Only Dir is required.
type Config struct {
	// Dir holds all that outlives the controller: its key, its secrets and
	// the machines.
	Dir string
	// JoinAddress is where agents join, default a free port of 127.0.0.1.
	// Agents find a controller that was started anew only at the old address.
	JoinAddress string
	// BootDelay, Lifetime and Alone are those of [process.Config].
	BootDelay, Lifetime time.Duration
	Alone               bool
	// SSH without its Key, which is kept in Dir. Its zero fields mean their
	// defaults, as do those of Join.
	SSH  remote.Config
	Join join.Config
	// Watch is how often it is looked whether a machine's process lives.
	// Default 500 ms.
	Watch time.Duration
	// MaxCalls bounds the creates that run at once, and, each by itself, the
	// bootstraps and the cancels. Default 16.
	MaxCalls int
	// OnLine takes what agents print, from any goroutine. It may be nil.
	OnLine func(bootstrap.Line)
}

// Backend is a [provisioning.EffectBackend]. Its methods are safe for
// concurrent use.
type Backend struct {
	config   Config
	provider *process.Provider
	joins    *join.Server

	creates, starts, cancels chan struct{} // one value for each that runs

	ctx     context.Context // until Close
	cancel  context.CancelFunc
	running sync.WaitGroup // calls and the watch

	mu     sync.Mutex
	closed bool
	nodes  map[provisioning.ExternalKey]*node
}

// node is an attempt whose bootstrap was asked for.
type node struct {
	key    provisioning.ExternalKey
	sink   provisioning.BootstrapSink
	stream *bootstrap.Stream // nil when nothing is followed
	lost   bool              // reported
}

// ErrClosed: [Backend.Close] was called.
var ErrClosed = errors.New("localfleet: the backend is closed")

// Open returns a backend over a directory. What an earlier one left there is
// found again by its keys.
func Open(config Config) (*Backend, error) {
	config.Watch = cmp.Or(config.Watch, DefaultWatch)
	config.MaxCalls = cmp.Or(config.MaxCalls, DefaultMaxCalls)
	config.JoinAddress = cmp.Or(config.JoinAddress, "127.0.0.1:0")
	if config.Dir == "" || config.Watch < 0 || config.MaxCalls < 0 {
		return nil, errors.New("localfleet: a backend needs a Dir, and Watch and MaxCalls must not be negative")
	}
	if err := os.MkdirAll(filepath.Join(config.Dir, "secrets"), 0o700); err != nil {
		return nil, err
	}
	key, err := controllerKey(filepath.Join(config.Dir, "controller_key"))
	if err != nil {
		return nil, fmt.Errorf("localfleet: controller key: %w", err)
	}
	config.SSH.Key = key
	err = atomicfile.Create(filepath.Join(config.Dir, "secrets", DefaultTokenRef), []byte(rand.Text()+rand.Text()+"\n"))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	b := &Backend{
		config:  config,
		creates: make(chan struct{}, config.MaxCalls), starts: make(chan struct{}, config.MaxCalls), cancels: make(chan struct{}, config.MaxCalls),
		nodes: make(map[provisioning.ExternalKey]*node),
	}
	b.provider, err = process.Open(config.Dir, process.Config{
		BootDelay: config.BootDelay, Lifetime: config.Lifetime, AuthorizedKey: key.PublicKey(), Alone: config.Alone,
	})
	if err != nil {
		return nil, err
	}
	if b.joins, err = join.Listen(config.JoinAddress, config.Join); err != nil {
		return nil, err
	}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.running.Go(b.watch)
	return b, nil
}

// controllerKey returns the key to log in to machines with, made once.
func controllerKey(path string) (ssh.Signer, error) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		return nil, err
	}
	if err := atomicfile.Create(path, pem.EncodeToMemory(block)); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return ssh.ParsePrivateKey(text)
}

// JoinAddr returns where agents join.
func (b *Backend) JoinAddr() string { return b.joins.Addr() }

// Provider returns the provider, to list what there is.
func (b *Backend) Provider() *process.Provider { return b.provider }

// Members returns what the join listener knows of the nodes.
func (b *Backend) Members() []join.Member { return b.joins.Members() }

// Close ends the calls that run, all streams, the watch and the join listener,
// and waits for their goroutines. Machines and agents go on.
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
		if n.stream != nil {
			n.stream.Close()
		}
	}
	return b.joins.Close()
}

// enter begins a call. Its ctx is that of the caller (B7), and done at the latest
// when the backend is closed.
func (b *Backend) enter(ctx context.Context) (context.Context, func(), error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, nil, provisioning.NotStarted(ErrClosed)
	}
	b.running.Add(1)
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(b.ctx, cancel)
	return ctx, func() { stop(); cancel(); b.running.Done() }, nil
}

// take takes a place in places. The error is NotStarted.
func take(ctx context.Context, places chan struct{}) (giveBack func(), err error) {
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	case <-ctx.Done():
		return nil, provisioning.NotStarted(ctx.Err())
	}
}

// CreateLease starts the machine of the key or adopts it (B1), as the first
// create has ordered it (B2). There is nothing to settle (B3), see package
// process.
func (b *Backend) CreateLease(ctx context.Context, req provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return provisioning.CreateLeaseResult{}, err
	}
	defer leave()
	if !req.AdoptOnly { // which buys nothing, whatever the spec (B4)
		if err := b.check(req.Spec); err != nil {
			return provisioning.CreateLeaseResult{}, b.refuse(req.Key, err)
		}
	}
	giveBack, err := take(ctx, b.creates)
	if err != nil {
		return provisioning.CreateLeaseResult{}, err
	}
	defer giveBack()
	m, err := b.provider.Create(ctx, req.Key, req.Spec.Shape.Image, cmp.Or(req.Spec.Boot.SSHUser, DefaultUser), req.AdoptOnly)
	if err != nil {
		return provisioning.CreateLeaseResult{}, err // with the lease of a machine that has died (B11)
	}
	return provisioning.CreateLeaseResult{Lease: m.Lease}, nil // made of the key and of nothing secret (B9)
}

// check returns why a machine of this spec could not become a node.
func (b *Backend) check(spec provisioning.LogicalNodeSpec) error {
	if spec.Provider != "" && spec.Provider != process.Kind {
		return fmt.Errorf("localfleet: provider %q is not known, only %q", spec.Provider, process.Kind)
	}
	if spec.Shape.GPUName != "" {
		return fmt.Errorf("localfleet: no offer with GPU %q", spec.Shape.GPUName)
	}
	if _, err := b.secret(spec.SwarmJoin.JoinTokenRef); err != nil {
		return err
	}
	return bootstrap.Check(spec)
}

// refuse answers a create that cannot be. Definite promises that nothing exists
// for the key, which has to be looked up: a secret may have gone since.
func (b *Backend) refuse(key provisioning.ExternalKey, err error) error {
	if m, findErr := b.provider.Find(key); findErr != nil || m.State != process.Absent {
		return provisioning.Ambiguous(errors.Join(err, findErr))
	}
	return provisioning.Definite(err)
}

// secret reads the join token that a shape refers to: the name of a file in
// the directory of secrets. Nothing of it gets into an error.
func (b *Backend) secret(ref string) ([]byte, error) {
	ref = cmp.Or(ref, DefaultTokenRef)
	if ref != filepath.Base(ref) || !filepath.IsLocal(ref) || ref == "." {
		return nil, fmt.Errorf("localfleet: joinTokenRef %q is not the name of a secret", ref)
	}
	path := filepath.Join(b.config.Dir, "secrets", ref)
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("localfleet: join token: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("localfleet: join token: %s is open to others than its owner", path)
	}
	token, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("localfleet: join token: %w", err)
	}
	if token = bytes.TrimSpace(token); len(token) == 0 {
		return nil, fmt.Errorf("localfleet: join token: %s is empty", path)
	}
	return token, nil
}

// LookupEndpoint says where the machine answers, once it does.
func (b *Backend) LookupEndpoint(ctx context.Context, req provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return provisioning.LookupEndpointResult{}, err
	}
	defer leave()
	endpoint, err := b.provider.Probe(ctx, req.Key)
	return provisioning.LookupEndpointResult{Endpoint: endpoint}, err
}

// alive returns the machine of a key. The error is LeaseLost if it does not
// live.
func (b *Backend) alive(key provisioning.ExternalKey) (process.Machine, error) {
	m, err := b.provider.Find(key)
	switch {
	case err != nil:
		return m, provisioning.Ambiguous(err)
	case m.State == process.Absent:
		return m, provisioning.LeaseLost(process.ErrAbsent)
	case m.State != process.Running:
		return m, provisioning.LeaseLost(process.ErrDead)
	}
	return m, nil
}

// StartBootstrap starts the agent on the machine, or adopts the one that runs (B1).
// It returns once the agent runs; the join comes later.
func (b *Backend) StartBootstrap(ctx context.Context, req provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return provisioning.StartBootstrapResult{}, err
	}
	defer leave()
	m, err := b.alive(req.Key)
	if err != nil {
		return provisioning.StartBootstrapResult{}, err
	}
	token, err := b.secret(req.Spec.SwarmJoin.JoinTokenRef)
	if err != nil {
		return provisioning.StartBootstrapResult{}, provisioning.NotStarted(err)
	}
	giveBack, err := take(ctx, b.starts)
	if err != nil {
		return provisioning.StartBootstrapResult{}, err
	}
	defer giveBack()

	session := bootstrap.Session(req.Key) // of this attempt and of no other (B8)
	b.mu.Lock()
	n := b.nodes[req.Key]
	if n == nil {
		n = &node{key: req.Key}
		b.nodes[req.Key] = n
	}
	n.sink = req.Sink
	if n.stream != nil && n.stream.Ended() {
		n.stream = nil
	}
	followed := n.stream != nil
	b.mu.Unlock()
	// Before the agent can join. If it has joined, that is told again.
	b.joins.Expect(req.Key, join.Expectation{
		Token:  token,
		Joined: func(swactor provisioning.SwactorID) { req.Sink.Joined(session, swactor) },
		Lost:   func(reason string) { b.lose(n, reason) },
	})
	if followed {
		return provisioning.StartBootstrapResult{Session: session}, nil
	}
	stream, err := bootstrap.Start(ctx, bootstrap.Job{
		SSH:    b.config.SSH,
		Target: remote.Target{Endpoint: req.Endpoint, User: m.User, HostKeys: []ssh.PublicKey{m.HostKey}},
		Key:    req.Key, Spec: req.Spec, Token: token, Sink: req.Sink, OnLine: b.config.OnLine,
		JoinAddress: cmp.Or(req.Spec.SwarmJoin.OrchSwactorAddr, b.JoinAddr()),
	})
	if err != nil {
		return provisioning.StartBootstrapResult{}, err
	}
	if err := b.attach(n, stream); err != nil {
		return provisioning.StartBootstrapResult{}, err
	}
	return provisioning.StartBootstrapResult{Session: session}, nil
}

// attach has a node follow a stream, unless it follows one already. The error is
// LeaseLost if it was destroyed meanwhile.
func (b *Backend) attach(n *node, stream *bootstrap.Stream) error {
	b.mu.Lock()
	there := b.nodes[n.key] == n
	if there && n.stream == nil {
		n.stream, stream = stream, nil
	}
	b.mu.Unlock()
	if stream != nil {
		stream.Close()
	}
	if !there {
		return provisioning.LeaseLost(process.ErrAbsent)
	}
	return nil
}

// detach takes the stream of a node, if it has one, to be closed by whoever
// took it.
func (b *Backend) detach(key provisioning.ExternalKey) (n *node, stream *bootstrap.Stream) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n = b.nodes[key]; n != nil {
		stream, n.stream = n.stream, nil
	}
	return n, stream
}

// BootstrapConvergenceObserved closes the session: the node has joined.
func (b *Backend) BootstrapConvergenceObserved(ctx context.Context, req provisioning.BootstrapConvergenceObservedRequest) error {
	_, leave, err := b.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if _, err := b.alive(req.Key); err != nil {
		return err
	}
	if n, stream := b.detach(req.Key); stream != nil {
		stream.Close()
		n.sink.Closed(req.Session) // after the join, which is why we were called (B10)
	}
	return nil
}

// CancelBootstrap ends the agent of the session. An unknown session has none
// (B5).
func (b *Backend) CancelBootstrap(ctx context.Context, req provisioning.CancelBootstrapRequest) error {
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if req.Session != bootstrap.Session(req.Key) {
		return nil
	}
	b.joins.Forget(req.Key)
	if _, stream := b.detach(req.Key); stream != nil {
		stream.Close()
	}
	m, err := b.provider.Find(req.Key)
	if err != nil {
		return err
	}
	if m.State != process.Running || m.Endpoint == nil { // nobody can have started anything there
		return nil
	}
	giveBack, err := take(ctx, b.cancels)
	if err != nil {
		return err
	}
	defer giveBack()
	return bootstrap.Cancel(ctx, b.config.SSH, remote.Target{Endpoint: *m.Endpoint, User: m.User, HostKeys: []ssh.PublicKey{m.HostKey}}, req.Session)
}

// DestroyLease kills the machine and returns once nothing is left of it (B6).
func (b *Backend) DestroyLease(ctx context.Context, req provisioning.DestroyLeaseRequest) error {
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	b.joins.Forget(req.Key)
	_, stream := b.detach(req.Key)
	b.mu.Lock()
	delete(b.nodes, req.Key) // its end is no loss
	b.mu.Unlock()
	if stream != nil {
		stream.Close()
	}
	return b.provider.Destroy(ctx, req.Key)
}

// watch makes its rounds until Close.
func (b *Backend) watch() {
	ticker := time.NewTicker(b.config.Watch)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			b.round()
		case <-b.ctx.Done():
			return
		}
	}
}

// round looks whether the machines live whose bootstrap was asked for. The
// death of any other is seen by LookupEndpoint and StartBootstrap.
func (b *Backend) round() {
	b.mu.Lock()
	nodes := make([]*node, 0, len(b.nodes))
	for _, n := range b.nodes {
		if !n.lost {
			nodes = append(nodes, n)
		}
	}
	b.mu.Unlock()
	for _, n := range nodes {
		// A look that fails says nothing about the machine.
		if m, err := b.provider.Find(n.key); err == nil && m.State != process.Running {
			b.lose(n, fmt.Sprintf("process %d of the machine is gone", m.PID))
		}
	}
}

// lose reports the loss of a node, once, unless it is being destroyed.
func (b *Backend) lose(n *node, reason string) {
	b.mu.Lock()
	news := !b.closed && b.nodes[n.key] == n && !n.lost
	n.lost = true
	sink := n.sink
	b.mu.Unlock()
	if news {
		sink.NodeLost(reason)
	}
}
