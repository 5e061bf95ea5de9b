//go:build linux

package backend

import (
	"context"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/internal/process"
	"github.com/swactor/provisioning/fakebackend"
)

var impatient = provisioning.RetryPolicy{
	InitialDelay: 20 * time.Millisecond, MaxDelay: 500 * time.Millisecond,
	EndpointProbeInterval: 10 * time.Millisecond, OperationTimeout: 20 * time.Second,
}

func fleet(run provisioning.RunID, generation uint64, count int) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: run, Generation: generation, Groups: []provisioning.NodeGroupSpec{{
		GroupID: "w", Count: count, Provider: process.Kind, Shape: provisioning.NodeShape{Image: "swactor:1"},
		Boot: provisioning.BootSpec{VerifyCommands: []string{"test -x bin/localfleet"}},
	}}}
}

// TestBackend holds the backend to every rule of the contract.
func TestBackend(t *testing.T) {
	t.Parallel()
	var backends []*Backend
	report := fakebackend.CheckReport(func() fakebackend.Subject {
		config := quick(t.TempDir())
		config.BootDelay = 20 * time.Millisecond
		b, err := Open(config)
		require.NoError(t, err)
		backends = append(backends, b)
		return fakebackend.Subject{Backend: b, Live: live, Patience: time.Minute, Group: provisioning.NodeGroupSpec{
			Provider:  process.Kind,
			Boot:      provisioning.BootSpec{VerifyCommands: []string{"true"}},
			SwarmJoin: provisioning.SwarmJoinTemplate{JoinTokenRef: DefaultTokenRef},
		}}
	})
	t.Logf("\n%v", report)
	for _, b := range backends {
		takeDown(t, b)
	}
	require.NoError(t, report.Err())
	for _, c := range report.Cases {
		require.Empty(t, c.Left, c.Case)
		if c.NotRun != "" {
			require.Contains(t, []string{"needs Subject.Advance", "needs Subject.LoseAnswer"}, c.NotRun,
				"this backend lives in real time, on a provider that cannot fail after the fact")
		}
	}
}

// A cluster comes up, loses a machine, heals, and goes.
func TestFleetLives(t *testing.T) {
	t.Parallel()
	config := quick(t.TempDir())
	config.BootDelay = 20 * time.Millisecond
	config.Join.Silence = time.Minute // a machine's death must be seen by other means
	b := open(t, config)
	lost := make(chan provisioning.Event, 16)
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape: fleet(runOf(t), 1, 3), Backend: b, Retry: impatient,
		OnEvent: func(e provisioning.Event) {
			if e.Kind == provisioning.EventAttemptFailed {
				lost <- e
			}
		},
	})
	require.NoError(t, err)
	var running sync.WaitGroup
	running.Go(func() { host.Run(context.Background()) })
	ctx := soon(t)
	require.NoError(t, host.WaitConverged(ctx, 1))
	before := pids(t, b)
	require.Len(t, before, 3)
	require.Len(t, b.Members(), 3)

	require.NoError(t, syscall.Kill(-before["w-1"], syscall.SIGKILL))
	select {
	case e := <-lost:
		require.EqualValues(t, "w-1", e.Node)
		require.Contains(t, e.Reason, "is gone")
	case <-ctx.Done():
		require.Fail(t, "the loss was never noticed")
	}
	require.NoError(t, host.WaitConverged(ctx, 1))
	after := pids(t, b)
	require.Len(t, after, 3)
	for node, pid := range before {
		require.Equal(t, node == "w-1", after[node] != pid, node)
	}

	require.NoError(t, host.Drain(ctx))
	require.Empty(t, host.Held())
	held, err := host.Close(ctx)
	require.NoError(t, err)
	require.Empty(t, held)
	running.Wait()
	require.Empty(t, pids(t, b))
	for node := range before {
		for attempt := range provisioning.NodeAttemptID(10) {
			n, err := live(provisioning.ExternalKey{Run: runOf(t), Node: node, Attempt: attempt})
			require.NoError(t, err)
			require.Zero(t, n)
		}
	}
	require.Empty(t, b.Members())
	require.Empty(t, lost, "nothing else has failed")
}

func pids(t *testing.T, b *Backend) map[provisioning.LogicalNodeID]int {
	t.Helper()
	machines, err := b.provider.List()
	require.NoError(t, err)
	pids := make(map[provisioning.LogicalNodeID]int)
	for _, m := range machines {
		pids[m.Key.Node] = m.PID
	}
	return pids
}
