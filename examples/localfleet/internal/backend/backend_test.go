//go:build linux

package backend

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/internal/bootstrap"
	"github.com/swactor/provisioning/examples/localfleet/internal/child"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
	"github.com/swactor/provisioning/examples/localfleet/internal/process"
	"github.com/swactor/provisioning/examples/localfleet/join"
	"github.com/swactor/provisioning/examples/localfleet/leftover"
)

func TestMain(m *testing.M) {
	if status, ok := child.Main(os.Args); ok {
		os.Exit(status)
	}
	if dir := os.Getenv(controllerVariable); dir != "" {
		bootAndWait(dir)
	}
	os.Exit(leftover.Run(m))
}

// runOf returns the run of a test, which is nobody else's: the process table
// is everybody's.
func runOf(t *testing.T) provisioning.RunID {
	return provisioning.RunID(strings.ReplaceAll(t.Name(), "/", "-") + "-" + thisProcess)
}

var thisProcess = rand.Text()

// quick is a configuration for tests. Lifetime ends what a test that was
// killed has left. The silence is one that a busy computer does not reach.
func quick(dir string) Config {
	return Config{
		Dir: dir, Lifetime: 5 * time.Minute, Watch: 10 * time.Millisecond,
		Join: join.Config{Heartbeat: 20 * time.Millisecond, Silence: 10 * time.Second},
	}
}

func open(t *testing.T, config Config) *Backend {
	t.Helper()
	b, err := Open(config)
	require.NoError(t, err)
	t.Cleanup(func() { takeDown(t, b) })
	return b
}

// takeDown destroys every machine, whatever state a test left it in.
func takeDown(t *testing.T, b *Backend) {
	require.NoError(t, b.Close())
	machines, err := b.provider.List()
	require.NoError(t, err)
	for _, m := range machines {
		require.NoError(t, b.provider.Destroy(context.Background(), m.Key))
	}
}

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for something in another process, which nothing announces.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for ctx := soon(t); !holds(); {
		require.NoError(t, ctx.Err(), what)
		time.Sleep(2 * time.Millisecond)
	}
}

func live(key provisioning.ExternalKey) (int, error) {
	pids, err := osproc.Carriers(key.Token())
	if err != nil {
		return 0, err
	}
	machines := 0
	for _, pid := range pids {
		if group, err := syscall.Getpgid(pid); err == nil && group == pid {
			machines++
		}
	}
	if machines == 0 && len(pids) > 0 {
		machines = 1 // headless, and still there
	}
	return machines, nil
}

// attempt plays the driver for one attempt.
type attempt struct {
	t        *testing.T
	b        *Backend
	key      provisioning.ExternalKey
	spec     provisioning.LogicalNodeSpec
	lease    provisioning.ProviderLeaseID
	endpoint provisioning.SSHEndpoint
	session  provisioning.BootstrapSessionID
	seen     *log
}

// log keeps what a sink reports.
type log struct {
	mu      sync.Mutex
	events  []provisioning.Observation
	changed chan struct{} // closed and replaced
}

func (l *log) record(o provisioning.Observation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, o)
	close(l.changed)
	l.changed = make(chan struct{})
}

// await returns the first event of a kind, waiting for it.
func (l *log) await(t *testing.T, what string, matches func(provisioning.Observation) bool) provisioning.Observation {
	t.Helper()
	ctx := soon(t)
	for {
		l.mu.Lock()
		events, changed := slices.Clone(l.events), l.changed
		l.mu.Unlock()
		if i := slices.IndexFunc(events, matches); i >= 0 {
			return events[i]
		}
		select {
		case <-changed:
		case <-ctx.Done():
			require.Fail(t, "never reported: "+what, "%+v", events)
		}
	}
}

func (l *log) all() []provisioning.Observation {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.events)
}

func kind(k provisioning.ObservationKind) func(provisioning.Observation) bool {
	return func(o provisioning.Observation) bool { return o.Kind == k }
}

func newAttempt(t *testing.T, b *Backend, number provisioning.NodeAttemptID, boot provisioning.BootSpec) *attempt {
	t.Helper()
	desired, err := provisioning.Expand(provisioning.ClusterShape{RunID: runOf(t), Generation: 1, Groups: []provisioning.NodeGroupSpec{{
		GroupID: "w", Count: 1, Provider: process.Kind, Shape: provisioning.NodeShape{Image: "swactor:1"}, Boot: boot,
	}}})
	require.NoError(t, err)
	a := &attempt{t: t, b: b, seen: &log{changed: make(chan struct{})}}
	for a.spec = range desired.All() {
	}
	a.key = provisioning.ExternalKey{Run: runOf(t), Node: a.spec.Node, Attempt: number}
	return a
}

func (a *attempt) rent() {
	a.t.Helper()
	res, err := a.b.CreateLease(soon(a.t), provisioning.CreateLeaseRequest{Key: a.key, Spec: a.spec})
	require.NoError(a.t, err)
	a.lease = res.Lease
	eventually(a.t, "an endpoint", func() bool {
		res, err := a.b.LookupEndpoint(soon(a.t), provisioning.LookupEndpointRequest{Key: a.key, Spec: a.spec, Lease: a.lease})
		require.NoError(a.t, err)
		if res.Endpoint != nil {
			a.endpoint = *res.Endpoint
		}
		return res.Endpoint != nil
	})
}

func (a *attempt) start(ctx context.Context) error {
	res, err := a.b.StartBootstrap(ctx, provisioning.StartBootstrapRequest{Key: a.key, Spec: a.spec, Lease: a.lease, Endpoint: a.endpoint,
		Sink: provisioning.NewBootstrapSink(a.key.Node, a.key.Attempt, a.seen.record)})
	if err == nil {
		a.session = res.Session
	}
	return err
}

func (a *attempt) boot() {
	a.t.Helper()
	a.rent()
	require.NoError(a.t, a.start(soon(a.t)))
}

func (a *attempt) join() provisioning.SwactorID {
	a.t.Helper()
	return a.seen.await(a.t, "the join", kind(provisioning.SwactorJoined)).Swactor
}

func (a *attempt) converge() error {
	return a.b.BootstrapConvergenceObserved(soon(a.t), provisioning.BootstrapConvergenceObservedRequest{
		Key: a.key, Spec: a.spec, Lease: a.lease, Endpoint: a.endpoint, Session: a.session})
}

func (a *attempt) cancel() error {
	return a.b.CancelBootstrap(soon(a.t), provisioning.CancelBootstrapRequest{Key: a.key, Spec: a.spec, Lease: a.lease, Session: a.session})
}

func (a *attempt) destroy() error {
	return a.b.DestroyLease(soon(a.t), provisioning.DestroyLeaseRequest{Key: a.key, Spec: a.spec, Lease: a.lease})
}

func (a *attempt) machine() process.Machine {
	a.t.Helper()
	m, err := a.b.provider.Find(a.key)
	require.NoError(a.t, err)
	return m
}

// agent returns the process of the agent on the machine.
func (a *attempt) agent() int {
	a.t.Helper()
	return number(a.t, filepath.Join(a.state(), "pid"))
}

// state is where the machine keeps the session.
func (a *attempt) state() string {
	return filepath.Join(a.machine().Dir.Home(), ".swactor", string(bootstrap.Session(a.key)))
}

func number(t *testing.T, path string) (n int) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	_, err = fmt.Sscan(string(text), &n)
	require.NoError(t, err)
	return n
}

func class(kind provisioning.OperationKind, err error) provisioning.FailureClass {
	return provisioning.Classify(kind, err)
}

func TestBootstrapTellsItsStages(t *testing.T) {
	t.Parallel()
	config := quick(t.TempDir())
	var mu sync.Mutex
	var lines []bootstrap.Line
	config.OnLine = func(l bootstrap.Line) { mu.Lock(); defer mu.Unlock(); lines = append(lines, l) }
	b := open(t, config)
	a := newAttempt(t, b, 1, provisioning.BootSpec{
		VerifyCommands: []string{"test \"$LOCALFLEET_IMAGE\" = swactor:1", "test -x bin/localfleet"},
		Env:            map[string]string{"GREETING": "it's a 'quoted'\nworld"},
		Args:           []string{"--rack", "it's $HOME"},
		StdoutSources:  []string{"extra file"},
		StderrSources:  []string{"warnings"},
	})
	a.boot()
	a.join()
	a.seen.await(t, "two lines", func(o provisioning.Observation) bool { return o.StdoutSequence == 2 })
	require.NoError(t, os.WriteFile(filepath.Join(a.machine().Dir.Home(), "extra file"), []byte("more\n"), 0o600))
	a.seen.await(t, "three lines", func(o provisioning.Observation) bool { return o.StdoutSequence == 3 })
	require.NoError(t, os.WriteFile(filepath.Join(a.machine().Dir.Home(), "warnings"), []byte("hot\n"), 0o600))
	a.seen.await(t, "a line of stderr", func(o provisioning.Observation) bool { return o.StderrSequence == 1 })
	require.NoError(t, a.converge())
	require.NoError(t, a.converge(), "any number of times")

	var stages []provisioning.BootstrapStage
	joinedAt, closedAt := -1, -1
	for i, o := range a.seen.all() {
		require.NotEqual(t, provisioning.BootstrapFailed, o.Kind, o.Reason)
		require.Equal(t, a.session, o.Session)
		switch o.Kind {
		case provisioning.BootstrapProgress:
			if len(stages) == 0 || stages[len(stages)-1] != o.Stage {
				stages = append(stages, o.Stage)
			}
		case provisioning.SwactorJoined:
			joinedAt = i
		case provisioning.BootstrapClosed:
			closedAt = i
		}
	}
	require.Equal(t, []provisioning.BootstrapStage{
		provisioning.BootstrapStageCreated, provisioning.BootstrapStageSSHConnecting, provisioning.BootstrapStageSSHReady,
		provisioning.BootstrapStageBootChecking, provisioning.BootstrapStageSwactorStarting,
		provisioning.BootstrapStageStdoutStreaming, provisioning.BootstrapStageWaitingForSwactorJoin,
	}, stages)
	require.Less(t, joinedAt, closedAt) // B10
	mu.Lock()
	require.Contains(t, lines[0].Text, `arguments ["--rack" "it's $HOME"], joins at `)
	for i, want := range []bootstrap.Line{{Number: 2, Text: "joined"}, {Number: 3, Text: "more"}, {Number: 1, Text: "hot", Stderr: true}} {
		want.Key = a.key
		require.Equal(t, want, lines[i+1])
	}
	mu.Unlock()
	environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", a.agent()))
	require.NoError(t, err)
	require.Contains(t, string(environment), "\x00GREETING=it's a 'quoted'\nworld\x00")
}

// Whoever can read the process table, the records or the console learns no
// secret from them.
func TestJoinTokenStaysSecret(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{Env: map[string]string{"PASSWORD": "sesame-sesame"}})
	a.boot()
	a.join()
	token, err := b.secret("")
	require.NoError(t, err)
	pids, err := osproc.Carriers(a.key.Token())
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(pids), 3, "the machine, the agent and its shell")
	for _, pid := range pids {
		arguments, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		require.NoError(t, err)
		require.NotContains(t, string(arguments), string(token))
		require.NotContains(t, string(arguments), "sesame")
		environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		require.NoError(t, err)
		require.NotContains(t, string(environment), string(token))
	}
	dir := a.machine().Dir
	for _, path := range []string{dir.Order(), dir.Record(), dir.Console(), filepath.Join(a.state(), "stdout"), filepath.Join(a.state(), "stderr")} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NotContains(t, string(text), string(token), path)
	}
	require.NoError(t, filepath.Walk(a.state(), func(path string, info os.FileInfo, err error) error {
		require.NoError(t, err)
		require.Zero(t, info.Mode().Perm()&0o077, path)
		return nil
	}))
	for _, o := range a.seen.all() {
		require.False(t, bytes.Contains(fmt.Append(nil, o), token))
	}
	require.NotContains(t, strings.ToLower(string(a.lease)+string(a.session)), strings.ToLower(string(token)))
}
