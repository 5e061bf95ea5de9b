//go:build linux

package backend

import (
	"context"
	"crypto/rand"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/agent"
	"github.com/swactor/provisioning/examples/localfleet/join"
	"github.com/swactor/provisioning/examples/localfleet/leftover"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
	"github.com/swactor/provisioning/examples/sshfleet/internal/sshd"
	"github.com/swactor/provisioning/fakebackend"
)

// lifetime ends the agents of a test that was killed.
const lifetime = 5 * time.Minute

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == agent.Command { // on a host
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		ctx, cancel := context.WithTimeout(ctx, lifetime)
		status := agent.Main(ctx, os.Args[2:], os.Getenv, os.Stdout, os.Stderr)
		cancel()
		stop()
		os.Exit(status)
	}
	os.Exit(leftover.Run(m))
}

// agentCommand is the agent of tests: this program.
func agentCommand(t testing.TB) string {
	program, err := os.Executable()
	require.NoError(t, err)
	return program + " " + agent.Command
}

// runOf returns the run of a test, which is nobody else's: the process table
// is everybody's.
func runOf(t testing.TB) provisioning.RunID {
	return provisioning.RunID(strings.ReplaceAll(t.Name(), "/", "-") + "-" + thisProcess)
}

var thisProcess = rand.Text()

// place is a number of hosts and a directory of secrets.
type place struct {
	t       *testing.T
	servers []*sshd.Server
	secrets string
}

func newPlace(t *testing.T, count int) *place {
	p := &place{t: t, secrets: t.TempDir()}
	t.Cleanup(func() { // after the servers have ended
		for end := time.Now().Add(time.Minute); !t.Failed() && len(p.find("*")) > 0; time.Sleep(5 * time.Millisecond) {
			require.True(t, time.Now().Before(end), "whoever tried to make a claim is gone, and his try is not")
		}
	})
	for i := range count {
		p.servers = append(p.servers, sshd.Start(t, string(rune('a'+i))))
	}
	require.NoError(t, os.WriteFile(filepath.Join(p.secrets, DefaultTokenRef), []byte(rand.Text()), 0o600))
	return p
}

func (p *place) hosts() []*inventory.Host {
	var hosts []*inventory.Host
	for _, s := range p.servers {
		hosts = append(hosts, s.Host())
	}
	return hosts
}

// config is one for tests. The silence is one that a busy computer does not
// reach.
func (p *place) config() Config {
	return Config{Hosts: p.hosts(), Secrets: p.secrets, Progress: 10 * time.Millisecond,
		Join: join.Config{Heartbeat: 50 * time.Millisecond, Silence: 20 * time.Second}}
}

func open(t *testing.T, config Config) *Backend {
	t.Helper()
	b, err := Open(config)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

// find returns the hosts that have something by a name in the directory of
// claims, by token.
func (p *place) find(name string) map[string][]string {
	p.t.Helper()
	found := make(map[string][]string)
	for _, s := range p.servers {
		paths, err := filepath.Glob(filepath.Join(s.Dir(), "claims", name))
		require.NoError(p.t, err)
		for _, path := range paths {
			below, err := filepath.Rel(filepath.Join(s.Dir(), "claims"), path)
			require.NoError(p.t, err)
			token, _, _ := strings.Cut(below, "/")
			found[token] = append(found[token], s.Name())
		}
	}
	return found
}

// claims returns the hosts that have a claim, by its token. Who only tries to
// make one has none: a script that comes late, or too late, tries for a moment.
func (p *place) claims() map[string][]string { return p.find("*/held") }

// marked counts the processes that were started under the claim of a token,
// those of their parents that only wait for them left out.
func marked(token string) (agents, all int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, 0, err
	}
	for _, entry := range entries {
		if _, err := strconv.Atoi(entry.Name()); err != nil {
			continue
		}
		environ, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "environ"))
		if err != nil || !strings.Contains(string(environ), "SWACTOR_CLAIM="+token) {
			continue
		}
		all++
		command, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "cmdline"))
		if err == nil && strings.Contains(string(command), "\x00"+agent.Command+"\x00") {
			agents++
		}
	}
	return agents, all, nil
}

// live counts what exists for a key: its claims, or what was started under one
// that is gone.
func (p *place) live(key provisioning.ExternalKey) (int, error) {
	n := len(p.claims()[key.Token()])
	_, all, err := marked(key.Token())
	if n == 0 && all > 0 {
		n = 1
	}
	return n, err
}

// loseAnswer has the connection cut between what a host does for a create or a
// destroy and its answer.
func (p *place) loseAnswer(key provisioning.ExternalKey, kind provisioning.OperationKind) {
	for _, s := range p.servers {
		claim := filepath.Join(s.Dir(), "claims", key.Token())
		if kind == provisioning.CreateLease {
			s.CutAfter("mv", filepath.Join(claim, "held"))
		} else {
			s.CutAfter("rm", claim)
		}
	}
}

// busy counts the calls of a backend that run.
type busy struct {
	*Backend
	calls *atomic.Int64
}

// advance lets time go by. These hosts live in real time and have no other: a
// call gets as much of it as it needs, within reason, and what may be under way
// without one gets a moment.
func (b busy) advance(d time.Duration) {
	end := time.Now().Add(min(d, 50*time.Millisecond))
	for {
		time.Sleep(2 * time.Millisecond)
		if b.calls.Load() == 0 || !time.Now().Before(end) {
			return
		}
	}
}

func (b busy) during() func() { b.calls.Add(1); return func() { b.calls.Add(-1) } }

func (b busy) CreateLease(ctx context.Context, r provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	defer b.during()()
	return b.Backend.CreateLease(ctx, r)
}
func (b busy) StartBootstrap(ctx context.Context, r provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	defer b.during()()
	return b.Backend.StartBootstrap(ctx, r)
}
func (b busy) CancelBootstrap(ctx context.Context, r provisioning.CancelBootstrapRequest) error {
	defer b.during()()
	return b.Backend.CancelBootstrap(ctx, r)
}
func (b busy) DestroyLease(ctx context.Context, r provisioning.DestroyLeaseRequest) error {
	defer b.during()()
	return b.Backend.DestroyLease(ctx, r)
}

// TestBackend holds the backend to every rule of the contract, with all cases.
func TestBackend(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 11) // as many as a case has at the same time
	report := fakebackend.CheckReport(func() fakebackend.Subject {
		b, err := Open(p.config())
		require.NoError(t, err)
		counted := busy{b, new(atomic.Int64)}
		return fakebackend.Subject{
			Backend: counted, Live: p.live,
			Advance: counted.advance, LoseAnswer: p.loseAnswer,
			Close: func() { require.NoError(t, b.Close()) },
			Group: provisioning.NodeGroupSpec{
				Provider: Kind,
				Shape:    provisioning.NodeShape{ProviderLabels: map[string]string{"disk": "fast", CleanupLabel: "true"}},
				Boot: provisioning.BootSpec{
					VerifyCommands: []string{`test -n "$PROVISIONING_CHECK_SECRET"`}, StartSwactorCommand: agentCommand(t),
				},
				SwarmJoin: provisioning.SwarmJoinTemplate{JoinTokenRef: DefaultTokenRef},
			},
		}
	})
	t.Logf("\n%v", report)
	require.NoError(t, report.Err())
	for _, c := range report.Cases {
		require.Empty(t, c.Left, c.Case)
		require.Empty(t, c.NotRun, c.Case)
	}
	require.Empty(t, p.claims())
}
