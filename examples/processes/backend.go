//go:build unix

package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/swactor/provisioning"
)

// backend rents child processes. A lease is a process in a group of its own,
// its endpoint a port on loopback, its bootstrap a connection to that port.
//
// It keeps B3 without doing anything for it: starting a process has had its
// effect or has failed when the call returns, so nothing can land later. A
// backend whose provider works over a network has to count the settle time.
type backend struct {
	dir  string       // one directory for each machine
	home net.Listener // where agents call to join

	mu sync.Mutex
	// machines is the provider's book, by ExternalKey.Token (B1). Processes
	// are known to their parent only and die with it, so memory will do;
	// with a provider of your own, this is a look-up by label or token.
	machines map[string]*machine
}

// machine is a process that was started and not yet destroyed.
type machine struct {
	key   provisioning.ExternalKey
	lease provisioning.ProviderLeaseID
	dir   string
	cmd   *exec.Cmd
	stdin io.Closer // open as long as we live; its end is the child's end
	// dead is closed when the process has ended. It stays a zombie until
	// DestroyLease, so that its number cannot become that of another.
	dead   chan struct{}
	waited bool // by DestroyLease only

	// The bootstrap, under backend.mu.
	sink      provisioning.BootstrapSink
	starts    int
	session   provisioning.BootstrapSessionID // empty when none is live
	secret    string                          // what the agent of session has to know
	stream    net.Conn
	destroyed bool // asked for: its end is no loss
}

func newBackend() (*backend, error) {
	dir, err := os.MkdirTemp("", "processes-")
	if err != nil {
		return nil, err
	}
	home, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(err, os.Remove(dir))
	}
	b := &backend{dir: dir, home: home, machines: make(map[string]*machine)}
	go b.answerCalls()
	return b, nil
}

// close takes down what is left, for exits that were not planned.
func (b *backend) close(ctx context.Context) error {
	err := b.home.Close()
	b.mu.Lock()
	left := slices.Collect(maps.Values(b.machines))
	b.mu.Unlock()
	for _, m := range left {
		err = errors.Join(err, b.DestroyLease(ctx, provisioning.DestroyLeaseRequest{Key: m.key}))
	}
	return errors.Join(err, os.Remove(b.dir))
}

// pids returns the process of every slot that has one.
func (b *backend) pids() map[provisioning.LogicalNodeID]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	pids := make(map[provisioning.LogicalNodeID]int)
	for _, m := range b.machines {
		pids[m.key.Node] = m.cmd.Process.Pid
	}
	return pids
}

func (b *backend) find(key provisioning.ExternalKey) *machine {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.machines[key.Token()] // B8: the whole token and nothing else
}

func (m *machine) ended() bool {
	select {
	case <-m.dead:
		return true
	default:
		return false
	}
}

var errEnded = errors.New("processes: the process has ended")

// CreateLease starts the process of the key.
func (b *backend) CreateLease(ctx context.Context, req provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m := b.machines[req.Key.Token()]; m != nil { // B1: adopt first, whatever the last answer was
		if m.ended() {
			return provisioning.CreateLeaseResult{}, provisioning.LeaseLostWith(m.lease, errEnded) // B11
		}
		return provisioning.CreateLeaseResult{Lease: m.lease}, nil
	}
	if req.AdoptOnly {
		return provisioning.CreateLeaseResult{}, provisioning.ErrNothingToAdopt // B4
	}
	if err := ctx.Err(); err != nil { // B7
		return provisioning.CreateLeaseResult{}, provisioning.NotStarted(err)
	}
	m, err := b.start(req.Key)
	if err != nil {
		return provisioning.CreateLeaseResult{}, provisioning.Definite(err) // nothing was started
	}
	b.machines[req.Key.Token()] = m
	return provisioning.CreateLeaseResult{Lease: m.lease}, nil
}

// start leaves nothing behind when it fails.
func (b *backend) start(key provisioning.ExternalKey) (*machine, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	m := &machine{key: key, lease: provisioning.ProviderLeaseID(key.Name(63)), dead: make(chan struct{})} // B9: of the key alone
	m.dir = filepath.Join(b.dir, key.Token())
	// Mkdir is atomic and fails if the directory is there: what this process
	// does not know of is somebody else's and is not touched (B8).
	if err := os.Mkdir(m.dir, 0o700); err != nil {
		return nil, err
	}
	m.cmd = exec.Command(exe, machineArgument, m.dir)
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, inErr := m.cmd.StdinPipe()
	stdout, outErr := m.cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return nil, errors.Join(err, os.Remove(m.dir))
	}
	if err := m.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.Remove(m.dir))
	}
	m.stdin = stdin
	go func() {
		io.Copy(io.Discard, stdout) // ends when the process does, however that came about
		close(m.dead)
		b.mu.Lock()
		sink, expected := m.sink, m.destroyed
		b.mu.Unlock()
		if !expected {
			sink.NodeLost(fmt.Sprintf("process %d has ended", m.cmd.Process.Pid))
		}
	}()
	return m, nil
}

// LookupEndpoint says where the process listens, once it answers there.
func (b *backend) LookupEndpoint(ctx context.Context, req provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	m := b.find(req.Key)
	if m == nil || m.ended() {
		return provisioning.LookupEndpointResult{}, provisioning.LeaseLost(errEnded)
	}
	text, err := os.ReadFile(filepath.Join(m.dir, portFile))
	if errors.Is(err, fs.ErrNotExist) {
		return provisioning.LookupEndpointResult{}, nil // not yet, which is no error
	}
	if err != nil {
		return provisioning.LookupEndpointResult{}, err
	}
	endpoint := provisioning.SSHEndpoint{Host: "127.0.0.1"}
	if _, err := fmt.Sscan(string(text), &endpoint.Port); err != nil {
		return provisioning.LookupEndpointResult{}, fmt.Errorf("processes: port file of %s: %w", m.lease, err)
	}
	probe, err := new(net.Dialer).DialContext(ctx, "tcp", endpoint.String())
	if err != nil {
		return provisioning.LookupEndpointResult{}, ctx.Err() // nobody answers yet, unless ctx cut the probe short (B7)
	}
	probe.Close()
	return provisioning.LookupEndpointResult{Endpoint: &endpoint}, nil
}

// StartBootstrap tells the process to start its agent, and returns as soon as
// it says that it does. The agent then calls home, see welcome.
func (b *backend) StartBootstrap(ctx context.Context, req provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	m := b.find(req.Key)
	if m == nil || m.ended() {
		return provisioning.StartBootstrapResult{}, provisioning.LeaseLost(errEnded)
	}
	b.mu.Lock()
	session := m.session
	b.mu.Unlock()
	if session != "" {
		return provisioning.StartBootstrapResult{Session: session}, nil // B1
	}
	stream, err := new(net.Dialer).DialContext(ctx, "tcp", req.Endpoint.String())
	if err != nil {
		return provisioning.StartBootstrapResult{}, err
	}

	// The session is on the books before its agent can call home.
	b.mu.Lock()
	m.starts++
	session = provisioning.BootstrapSessionID(fmt.Sprintf("%s-%d", req.Key.Token(), m.starts))
	m.session, m.secret, m.stream, m.sink = session, rand.Text(), stream, req.Sink
	o := order{Home: req.Spec.SwarmJoin.OrchSwactorAddr,
		Hello: hello{Token: req.Key.Token(), Node: req.Key.Node, Attempt: req.Key.Attempt, Secret: m.secret}}
	b.mu.Unlock()

	release := context.AfterFunc(ctx, func() { stream.Close() }) // B7
	err = json.NewEncoder(stream).Encode(o)
	if err == nil {
		_, err = bufio.NewReader(stream).ReadString('\n')
	}
	if !release() || err != nil {
		b.endSession(m, session)
		return provisioning.StartBootstrapResult{}, errors.Join(ctx.Err(), err) // a context error is Ambiguous, any other Definite
	}
	go func() {
		io.Copy(io.Discard, stream)
		// Unless we have ended it, it was cut, and that is a failure (B10).
		b.endSession(m, session).Failed(session, "the connection of the bootstrap was cut")
	}()
	return provisioning.StartBootstrapResult{Session: session}, nil
}

// endSession ends a session and returns the sink that hears of it: the zero
// sink, which drops everything, if it was not live any more.
func (b *backend) endSession(m *machine, session provisioning.BootstrapSessionID) provisioning.BootstrapSink {
	b.mu.Lock()
	defer b.mu.Unlock()
	if m.session == "" || m.session != session {
		return provisioning.BootstrapSink{}
	}
	m.stream.Close()
	m.session, m.secret, m.stream = "", "", nil
	return m.sink
}

// BootstrapConvergenceObserved closes the session: the node has joined.
func (b *backend) BootstrapConvergenceObserved(ctx context.Context, req provisioning.BootstrapConvergenceObservedRequest) error {
	m := b.find(req.Key)
	if m == nil || m.ended() {
		return provisioning.LeaseLost(errEnded)
	}
	b.endSession(m, req.Session).Closed(req.Session) // after the join, which is why we were called (B10)
	return nil
}

// CancelBootstrap ends the session. One that is unknown has ended (B5).
func (b *backend) CancelBootstrap(ctx context.Context, req provisioning.CancelBootstrapRequest) error {
	if m := b.find(req.Key); m != nil {
		b.endSession(m, req.Session)
	}
	return nil
}

// DestroyLease kills the group and returns once nothing is left of it (B6).
func (b *backend) DestroyLease(ctx context.Context, req provisioning.DestroyLeaseRequest) error {
	m := b.find(req.Key)
	if m == nil {
		return nil // B5
	}
	b.mu.Lock()
	m.destroyed = true
	session := m.session
	b.mu.Unlock()
	b.endSession(m, session)

	group := -m.cmd.Process.Pid
	if !m.waited {
		if err := syscall.Kill(group, syscall.SIGKILL); err != nil && !m.ended() {
			return err
		}
		select {
		case <-m.dead:
		case <-ctx.Done():
			return ctx.Err() // B7: not gone yet, and the driver asks again
		}
		m.stdin.Close()
		m.cmd.Wait() // its error is only how the process ended
		m.waited = true
	}
	for syscall.Kill(group, 0) == nil { // somebody of the group is still going
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := os.RemoveAll(m.dir); err != nil { // a side resource
		return err
	}
	b.mu.Lock()
	delete(b.machines, req.Key.Token())
	b.mu.Unlock()
	return nil
}

// answerCalls takes the calls of agents until the listener is closed.
func (b *backend) answerCalls() {
	for {
		conn, err := b.home.Accept()
		if err != nil {
			return
		}
		go b.welcome(conn)
	}
}

// welcome reports the join of an agent that proves to be the one that a live
// session has started, and turns everybody else away (B8).
func (b *backend) welcome(conn net.Conn) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	var h hello
	if err := json.NewDecoder(conn).Decode(&h); err != nil {
		return
	}
	b.mu.Lock()
	m := b.machines[h.Token]
	known := m != nil && m.session != "" && h.Secret == m.secret && h.Node == m.key.Node && h.Attempt == m.key.Attempt
	var session provisioning.BootstrapSessionID
	var sink provisioning.BootstrapSink
	if known {
		session, sink = m.session, m.sink
	}
	b.mu.Unlock()
	if !known {
		fmt.Fprintln(conn, "go away")
		return
	}
	fmt.Fprintln(conn, welcomeWord)
	sink.Joined(session, provisioning.SwactorID("agent-"+h.Token))
}
