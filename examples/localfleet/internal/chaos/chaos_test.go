//go:build linux

package chaos

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/internal/backend"
	"github.com/swactor/provisioning/examples/localfleet/internal/child"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
	"github.com/swactor/provisioning/examples/localfleet/internal/process"
	"github.com/swactor/provisioning/examples/localfleet/leftover"
)

func TestMain(m *testing.M) {
	if status, ok := child.Main(os.Args); ok {
		os.Exit(status)
	}
	os.Exit(leftover.Run(m))
}

const run = "chaos-run"

// fleet is two nodes that have joined, driven until the test ends.
func fleet(t *testing.T) (*backend.Backend, *provisioning.Host) {
	b, err := backend.Open(backend.Config{Dir: t.TempDir()})
	require.NoError(t, err)
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Backend: b,
		Shape:   provisioning.ClusterShape{RunID: run, Generation: 1, Groups: []provisioning.NodeGroupSpec{{GroupID: "w", Count: 2}}},
		Retry:   provisioning.RetryPolicy{InitialDelay: 10 * time.Millisecond, EndpointProbeInterval: 10 * time.Millisecond},
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		host.Run(ctx) // what it holds is given back below
	}()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, host.Drain(ctx))
		stop()
		<-ran
		_, err := host.Close(ctx)
		require.NoError(t, err)
		machines, err := b.Provider().List()
		require.NoError(t, err)
		require.Empty(t, machines)
		require.NoError(t, b.Close())
	})
	converge(t, host)
	return b, host
}

func converge(t *testing.T, host *provisioning.Host) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, host.WaitConverged(ctx, 1))
}

// attempt returns the present attempt of the first slot.
func attempt(host *provisioning.Host) provisioning.NodeAttemptID {
	n, _ := host.Driver().Node("w-0")
	return n.Attempt
}

func eventually(t *testing.T, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, time.Minute, 10*time.Millisecond)
}

func machineOf(t *testing.T, b *backend.Backend, node provisioning.LogicalNodeID) process.Machine {
	t.Helper()
	machines, err := b.Provider().List()
	require.NoError(t, err)
	i := slices.IndexFunc(machines, func(m process.Machine) bool { return m.Key.Node == node })
	require.GreaterOrEqual(t, i, 0)
	return machines[i]
}

// Each kind hits what was picked, and heals.
func TestBreak(t *testing.T) {
	b, host := fleet(t)
	_, err := Break(b, "another-run", Machine, 0)
	require.ErrorIs(t, err, ErrNothing)
	_, err = Break(b, run, "planet", 0)
	require.EqualError(t, err, `localfleet: cannot break a "planet", only [machine agent connection]`)

	for _, kind := range []Kind{Machine, Agent} {
		m, before := machineOf(t, b, "w-0"), attempt(host)
		agent, err := agentOf(m)
		require.NoError(t, err)
		require.NotZero(t, agent)
		what, err := Break(b, run, kind, 2) // of two: the first
		require.NoError(t, err)
		require.Regexp(t, `^killed the `+string(kind)+` of w-0 #\d+, process`, what)
		eventually(t, func() bool {
			left, err := osproc.Carriers(m.Key.Token())
			require.NoError(t, err)
			return !slices.Contains(left, agent)
		})
		eventually(t, func() bool { return attempt(host) != before })
		converge(t, host)
		require.NotEqual(t, m.Key, machineOf(t, b, "w-0").Key)
	}

	// A connection that is cut comes back: the same agent, the same attempt.
	before, key := attempt(host), machineOf(t, b, "w-0").Key
	what, err := Break(b, run, Connection, 0)
	require.NoError(t, err)
	require.Regexp(t, `^cut the connection to w-0 #\d+$`, what)
	eventually(t, func() bool { return b.Cut(key) }) // there is another one
	require.Equal(t, before, attempt(host))
	require.True(t, host.Status().Converged)
}
