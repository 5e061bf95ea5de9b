//go:build linux

package backend

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/atomicfile"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
	"github.com/swactor/provisioning/examples/localfleet/internal/process"
)

// history keeps what a driver did, in order, and lets a test act in the middle
// of it: the driver waits meanwhile.
type history struct {
	mu      sync.Mutex
	events  []provisioning.Event
	changed chan struct{}            // closed and replaced
	act     func(provisioning.Event) // with mu held, and not on the test's goroutine
}

func newHistory(act func(provisioning.Event)) *history {
	return &history{changed: make(chan struct{}), act: act}
}

func (h *history) record(e provisioning.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.act != nil {
		h.act(e)
	}
	h.events = append(h.events, e)
	close(h.changed)
	h.changed = make(chan struct{})
}

// all returns the events of an attempt, by its number; 0 means of any.
func (h *history) all(attempt provisioning.NodeAttemptID, matches func(provisioning.Event) bool) (found []provisioning.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range h.events {
		if (attempt == 0 || e.Attempt == attempt) && matches(e) {
			found = append(found, e)
		}
	}
	return found
}

func (h *history) text() string {
	lines := []string{""}
	for _, e := range h.all(0, func(e provisioning.Event) bool { return e.Node != "" }) {
		lines = append(lines, e.At.Format("05.000 ")+e.String())
	}
	return strings.Join(lines, "\n")
}

// await waits until the driver has done so many of something.
func (h *history) await(t *testing.T, what string, count int, attempt provisioning.NodeAttemptID, matches func(provisioning.Event) bool) []provisioning.Event {
	t.Helper()
	ctx := soon(t)
	for {
		h.mu.Lock()
		changed := h.changed
		h.mu.Unlock()
		if found := h.all(attempt, matches); len(found) >= count {
			return found
		}
		select {
		case <-changed:
		case <-ctx.Done():
			require.Fail(t, "never: "+what, h.text())
		}
	}
}

func happened(kind provisioning.EventKind) func(provisioning.Event) bool {
	return func(e provisioning.Event) bool { return e.Kind == kind }
}

func dispatched(operation provisioning.OperationKind) func(provisioning.Event) bool {
	return func(e provisioning.Event) bool {
		return e.Kind == provisioning.EventDispatch && e.Operation == operation
	}
}

// ended matches the end of an operation in a class.
func ended(operation provisioning.OperationKind, class provisioning.FailureClass) func(provisioning.Event) bool {
	return func(e provisioning.Event) bool {
		return e.Kind == provisioning.EventFold && e.Operation == operation && e.Class == class
	}
}

// drive drives a backend until the test ends, and then sees to it that nothing
// of the run is left: no machine, no process of one, no directory.
func drive(t *testing.T, b *Backend, config provisioning.HostConfig) *provisioning.Host {
	t.Helper()
	host, err := provisioning.NewHost(config)
	require.NoError(t, err)
	ran := make(chan error, 1)
	go func() { ran <- host.Run(context.Background()) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, host.Drain(ctx))
		held, err := host.Close(ctx)
		require.NoError(t, err)
		require.Empty(t, held)
		<-ran
		nothingLeft(t, b)
	})
	return host
}

func nothingLeft(t *testing.T, b *Backend) {
	t.Helper()
	require.Empty(t, b.Members())
	entries, err := os.ReadDir(filepath.Join(b.config.Dir, "machines"))
	require.NoError(t, err)
	require.Empty(t, entries)
	processes, err := os.ReadDir("/proc")
	require.NoError(t, err)
	for _, entry := range processes { // what a machine runs is at home in its directory, or was
		home, err := os.Readlink(filepath.Join("/proc", entry.Name(), "cwd"))
		require.False(t, err == nil && strings.HasPrefix(home, b.config.Dir+"/"), "process %s is left in %s", entry.Name(), home)
	}
}

// detour has the machines of first attempts answer at another endpoint.
type detour struct {
	*Backend
	to func(provisioning.SSHEndpoint) provisioning.SSHEndpoint
}

func (d detour) LookupEndpoint(ctx context.Context, req provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	res, err := d.Backend.LookupEndpoint(ctx, req)
	if res.Endpoint != nil && req.Key.Attempt == 1 {
		endpoint := d.to(*res.Endpoint)
		res.Endpoint = &endpoint
	}
	return res, err
}

// deadEnd returns an endpoint that is nobody else's as long as the test runs:
// one that refuses, or one whose connections are accepted by the system and
// never answered.
func deadEnd(t *testing.T, listens bool) provisioning.SSHEndpoint {
	t.Helper()
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Close(socket)) })
	require.NoError(t, syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	if listens {
		require.NoError(t, syscall.Listen(socket, 64))
	}
	name, err := syscall.Getsockname(socket)
	require.NoError(t, err)
	return provisioning.SSHEndpoint{Host: "127.0.0.1", Port: uint16(name.(*syscall.SockaddrInet4).Port)}
}

// A machine that cannot be reached, or is cut off, costs its attempt: it is
// given back before the next one begins, and every wait is that of the policy.
func TestSSHInTrouble(t *testing.T) {
	t.Parallel()
	policy := impatient
	policy.InitialDelay, policy.BootstrapTimeout = 100*time.Millisecond, 5*time.Second
	const outOfTime = "the bootstrap did not finish in time"
	for name, c := range map[string]struct {
		to      func(*testing.T, provisioning.SSHEndpoint) provisioning.SSHEndpoint
		class   provisioning.FailureClass // of its starts; none: it was started
		retried bool                      // in the same attempt
		reason  string
	}{
		"refuses": {
			to:    func(t *testing.T, _ provisioning.SSHEndpoint) provisioning.SSHEndpoint { return deadEnd(t, false) },
			class: provisioning.ClassNotStarted, retried: true, reason: outOfTime,
		},
		"hangs after the accept": {
			to:    func(t *testing.T, _ provisioning.SSHEndpoint) provisioning.SSHEndpoint { return deadEnd(t, true) },
			class: provisioning.ClassNotStarted, retried: true, reason: outOfTime,
		},
		"has another host key": {
			to: func(t *testing.T, _ provisioning.SSHEndpoint) provisioning.SSHEndpoint {
				stranger := newAttempt(t, open(t, quick(t.TempDir())), 7, provisioning.BootSpec{})
				stranger.rent()
				return stranger.endpoint
			},
			class: provisioning.ClassDefinite, reason: "another machine answers at this address",
		},
		"is cut off while it boots": {reason: "the connection was cut"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := quick(t.TempDir())
			config.SSH.ConnectTimeout = 250 * time.Millisecond
			b := open(t, config)
			shape := fleet(runOf(t), 1, 1)
			// The agent of the first attempt takes its time, so that the
			// bootstrap lasts until it is cut.
			shape.Groups[0].Boot.StartSwactorCommand = "sh -c 'if [ $SWACTOR_ATTEMPT = 1 ]; then exec sleep 300; fi; exec localfleet agent'"
			first := provisioning.ExternalKey{Run: shape.RunID, Node: "w-0", Attempt: 1}
			var line *proxy
			h := newHistory(func(e provisioning.Event) {
				switch {
				case e.Attempt == 1 && e.Kind == provisioning.EventStage && e.To == provisioning.StageBootstrapRunning:
					line.cut()
				case e.Attempt == 2 && e.Kind == provisioning.EventAttemptStarted:
					n, err := live(first)
					m, findErr := b.provider.Find(first)
					if err != nil || findErr != nil || n != 0 || m.State != process.Absent {
						t.Errorf("the machine before is still there: %d, %v, %v, %v", n, m.State, err, findErr)
					}
				}
			})
			host := drive(t, b, provisioning.HostConfig{
				Shape: shape, Retry: policy, OnEvent: h.record,
				Backend: detour{b, func(real provisioning.SSHEndpoint) provisioning.SSHEndpoint {
					if c.to == nil {
						line = newProxy(t, real)
						return line.endpoint()
					}
					return c.to(t, real)
				}},
			})
			failed := h.await(t, "the failure", 1, 1, happened(provisioning.EventAttemptFailed))
			again := h.await(t, "another attempt", 1, 2, happened(provisioning.EventAttemptStarted))
			require.NoError(t, host.WaitConverged(soon(t), 1))

			require.Contains(t, failed[0].Reason, c.reason, h.text())
			require.Empty(t, h.all(1, happened(provisioning.EventReady)), h.text())
			require.Len(t, h.all(1, happened(provisioning.EventDestroyed)), 1)
			require.Len(t, h.all(1, dispatched(provisioning.DestroyLease)), 1)
			delay := func(failures int) time.Duration { return min(policy.InitialDelay<<(failures-1), policy.MaxDelay) }
			starts := h.all(1, dispatched(provisioning.StartBootstrap))
			failures := h.all(1, ended(provisioning.StartBootstrap, c.class))
			if c.retried {
				require.Greater(t, len(starts), 3, h.text())
				for i, start := range starts[1:] {
					require.GreaterOrEqual(t, start.At.Sub(failures[i].At), delay(i+1), h.text())
				}
			} else {
				require.Len(t, starts, 1, h.text())
				require.Len(t, failures, 1, h.text())
				failures = nil // counted as that of the attempt
			}
			require.GreaterOrEqual(t, again[0].At.Sub(failed[0].At), delay(len(failures)+1), h.text())
		})
	}
}

// Machines are killed wherever they are in their life, with all that they run or
// without it, or hang, and agents after they have joined.
func TestKilledAtAnyStage(t *testing.T) {
	t.Parallel()
	config := quick(t.TempDir())
	config.Join.Silence = 2 * time.Second // also how long it takes to miss an agent
	b := open(t, config)
	all := func(m process.Machine) int { return -m.PID }
	head := func(m process.Machine) int { return m.PID }
	agent := func(m process.Machine) int { return (&attempt{t: t, b: b, key: m.Key}).agent() }
	blows := map[provisioning.LogicalNodeID]struct {
		at     provisioning.Stage // or later: a join may come before the answer to the start
		whom   func(process.Machine) int
		signal syscall.Signal
	}{
		"w-0": {provisioning.StageLeaseCreated, all, syscall.SIGKILL},
		"w-1": {provisioning.StageEndpointKnown, all, syscall.SIGKILL},
		"w-2": {provisioning.StageBootstrapRunning, all, syscall.SIGKILL},
		"w-3": {provisioning.StageBootstrapRunning, head, syscall.SIGKILL},
		"w-4": {provisioning.StageDormant, all, syscall.SIGKILL},
		"w-5": {provisioning.StageDormant, head, syscall.SIGKILL},
		"w-6": {provisioning.StageDormant, all, syscall.SIGSTOP},
		"w-7": {provisioning.StageSwactorJoined, agent, syscall.SIGKILL},
		"w-8": {provisioning.StageDormant, agent, syscall.SIGKILL},
	}
	shape := fleet(runOf(t), 1, 10) // the last one is left alone
	hit := make(map[provisioning.LogicalNodeID]provisioning.NodeAttemptID)
	h := newHistory(func(e provisioning.Event) {
		blow, aimed := blows[e.Node]
		if _, done := hit[e.Node]; !aimed || done || e.Kind != provisioning.EventStage || e.To < blow.at || e.To > provisioning.StageDormant {
			return
		}
		hit[e.Node] = e.Attempt
		m, err := b.provider.Find(provisioning.ExternalKey{Run: shape.RunID, Node: e.Node, Attempt: e.Attempt})
		if err == nil {
			err = syscall.Kill(blow.whom(m), blow.signal)
		}
		if err != nil {
			t.Errorf("%v: %v", e, err)
		}
	})
	host := drive(t, b, provisioning.HostConfig{Shape: shape, Backend: b, Retry: impatient, OnEvent: h.record})
	h.await(t, "all the failures", len(blows), 0, func(e provisioning.Event) bool {
		return e.Kind == provisioning.EventAttemptFailed && e.Attempt == hit[e.Node]
	})
	require.NoError(t, host.WaitConverged(soon(t), 1))
	for node, attempt := range hit {
		now, ok := host.Driver().Node(node)
		require.True(t, ok)
		require.Greater(t, now.Attempt, attempt, "%v: %s", node, h.text())
		pids, err := osproc.Carriers(provisioning.ExternalKey{Run: shape.RunID, Node: node, Attempt: attempt}.Token())
		require.NoError(t, err)
		require.Empty(t, pids, node)
	}
	require.Len(t, hit, len(blows))
	require.Len(t, pids(t, b), 10)
	entries, err := os.ReadDir(filepath.Join(config.Dir, "machines"))
	require.NoError(t, err)
	require.Len(t, entries, 10)
}

// A machine that takes longer to come to life, and to boot, than a call may
// take: the create is cut off, asked for again, and finds the one machine.
func TestBootBeyondTheTimeout(t *testing.T) {
	t.Parallel()
	const timeout = 200 * time.Millisecond
	config := quick(t.TempDir())
	config.BootDelay = 3 * timeout
	b := open(t, config)
	// The program of machines notes that it was started, and waits.
	program := filepath.Join(config.Dir, "bin", "localfleet")
	require.NoError(t, os.Rename(program, program+".real"))
	require.NoError(t, atomicfile.Create(program, fmt.Appendf(nil, `#!/bin/sh
if [ "$1" = machine ]; then
	echo started >>'%[1]s/started'
	while [ ! -e '%[1]s/go' ]; do sleep 0.02; done
fi
exec '%[2]s' "$@"
`, config.Dir, program+".real")))
	require.NoError(t, os.Chmod(program, 0o700))
	policy := impatient
	policy.OperationTimeouts = map[provisioning.OperationKind]time.Duration{
		provisioning.CreateLease: timeout, provisioning.LookupEndpoint: timeout,
	}
	shape := fleet(runOf(t), 1, 1)
	h := newHistory(nil)
	host := drive(t, b, provisioning.HostConfig{Shape: shape, Backend: b, Retry: policy, OnEvent: h.record})
	cut := h.await(t, "creates that are cut off", 2, 1, ended(provisioning.CreateLease, provisioning.ClassAmbiguous))
	require.True(t, cut[0].Expired, h.text())
	require.Empty(t, h.all(0, ended(provisioning.CreateLease, provisioning.ClassNone)))
	require.NoError(t, os.WriteFile(filepath.Join(config.Dir, "go"), nil, 0o600))
	require.NoError(t, host.WaitConverged(soon(t), 1))

	started, err := os.ReadFile(filepath.Join(config.Dir, "started"))
	require.NoError(t, err)
	require.Equal(t, "started\n", string(started))
	node, ok := host.Driver().Node("w-0")
	require.True(t, ok)
	require.EqualValues(t, 1, node.Attempt, h.text())
	creates := h.all(1, dispatched(provisioning.CreateLease))
	require.GreaterOrEqual(t, len(creates), 3)
	require.Len(t, h.all(1, ended(provisioning.CreateLease, provisioning.ClassNone)), 1)
	looks := h.all(1, dispatched(provisioning.LookupEndpoint))
	require.Greater(t, looks[len(looks)-1].At.Sub(looks[0].At), timeout, "it booted longer than a call may take")
	n, err := live(provisioning.ExternalKey{Run: shape.RunID, Node: "w-0", Attempt: 1})
	require.NoError(t, err)
	require.Equal(t, 1, n)
}
