//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// TestMain lets the test binary play machines, as the program does.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == machineArgument {
		if err := playMachine(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// census counts processes by asking the system, not the backend.
type census struct {
	*backend
	mu   sync.Mutex
	pids map[provisioning.ExternalKey]map[int]bool
}

func newCensus(t *testing.T) *census {
	b, err := newBackend()
	require.NoError(t, err)
	c := &census{backend: b, pids: make(map[provisioning.ExternalKey]map[int]bool)}
	t.Cleanup(func() {
		require.NoError(t, b.close(context.Background()))
		for key := range c.pids {
			n, err := c.live(key)
			require.NoError(t, err)
			require.Zero(t, n, key)
		}
	})
	return c
}

func (c *census) CreateLease(ctx context.Context, req provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	res, err := c.backend.CreateLease(ctx, req)
	if m := c.find(req.Key); m != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.pids[req.Key] == nil {
			c.pids[req.Key] = make(map[int]bool)
		}
		c.pids[req.Key][m.cmd.Process.Pid] = true
	}
	return res, err
}

func (c *census) live(key provisioning.ExternalKey) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for pid := range c.pids[key] {
		switch err := syscall.Kill(-pid, 0); {
		case err == nil:
			n++
		case !errors.Is(err, syscall.ESRCH):
			return 0, err
		}
	}
	return n, nil
}

func (c *census) subject() fakebackend.Subject {
	return fakebackend.Subject{
		Backend:  c,
		Group:    provisioning.NodeGroupSpec{SwarmJoin: provisioning.SwarmJoinTemplate{OrchSwactorAddr: c.home.Addr().String()}},
		Live:     c.live,
		Patience: 20 * time.Second,
	}
}

func TestBackendKeepsItsContract(t *testing.T) {
	report := fakebackend.CheckReport(func() fakebackend.Subject { return newCensus(t).subject() })
	t.Logf("\n%v", report)
	require.NoError(t, report.Err())
	for _, c := range report.Cases {
		require.Empty(t, c.Left, c.Case)
		if c.NotRun != "" {
			require.Contains(t, []string{"needs Subject.Advance", "needs Subject.LoseAnswer"}, c.NotRun, c.Case)
		}
	}
}

func TestProgramTellsTheTruth(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out), "%s", &out)
	require.Regexp(t, regexp.MustCompile(`(?m) Drained: 4 processes were started, 1 was killed and replaced, none is left\.`), out.String())
}

func TestArguments(t *testing.T) {
	for _, test := range []struct {
		args   []string
		status int
		say    string
	}{
		{[]string{"-h"}, 0, "usage: processes"},
		{[]string{"-help"}, 0, "usage: processes"},
		{[]string{"foo", "bar"}, 2, `processes: takes no arguments, not "foo"`},
		{[]string{""}, 2, `processes: takes no arguments, not ""`},
		{[]string{machineArgument}, 2, "processes: takes no arguments"}, // a machine has a directory too
		{[]string{"-foo"}, 2, "flag provided but not defined: -foo"},
	} {
		var said bytes.Buffer
		status, end := arguments(test.args, &said)
		require.True(t, end, test.args)
		require.Equal(t, test.status, status, test.args)
		require.Contains(t, said.String(), test.say, test.args)
	}
	var said bytes.Buffer
	_, end := arguments(nil, &said)
	require.False(t, end)
	require.Empty(t, said.String())
}

// Who interrupts the program finds no process afterwards.
func TestInterruptedProgramLeavesNothing(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	out := &tripwire{word: []byte("Ready worker-0"), trip: interrupt}
	require.ErrorIs(t, run(ctx, out), context.Canceled)
	require.NotContains(t, out.String(), "Drained")
}

// tripwire calls trip when word is written.
type tripwire struct {
	bytes.Buffer
	word []byte
	trip func()
}

func (w *tripwire) Write(p []byte) (int, error) {
	if bytes.Contains(p, w.word) {
		w.trip()
	}
	return w.Buffer.Write(p)
}

// booted rents a machine and waits for its join.
func booted(t *testing.T, c *census, observed chan provisioning.Observation) (*machine, provisioning.StartBootstrapRequest) {
	key := provisioning.ExternalKey{Run: "run", Node: "w-0", Attempt: 7}
	spec := provisioning.LogicalNodeSpec{Node: key.Node, SwarmJoin: provisioning.SwarmJoinSpec{OrchSwactorAddr: c.home.Addr().String()}}
	created, err := c.CreateLease(t.Context(), provisioning.CreateLeaseRequest{Key: key, Spec: spec})
	require.NoError(t, err)
	var found provisioning.LookupEndpointResult
	require.Eventually(t, func() bool {
		found, err = c.LookupEndpoint(t.Context(), provisioning.LookupEndpointRequest{Key: key, Lease: created.Lease})
		return err != nil || found.Endpoint != nil
	}, 20*time.Second, time.Millisecond)
	require.NoError(t, err)
	req := provisioning.StartBootstrapRequest{Key: key, Spec: spec, Lease: created.Lease, Endpoint: *found.Endpoint,
		Sink: provisioning.NewBootstrapSink(key.Node, key.Attempt, func(o provisioning.Observation) { observed <- o })}
	started, err := c.StartBootstrap(t.Context(), req)
	require.NoError(t, err)
	joined := <-observed
	require.Equal(t, provisioning.SwactorJoined, joined.Kind)
	require.Equal(t, started.Session, joined.Session)
	return c.find(key), req
}

func TestKilledProcessIsLost(t *testing.T) {
	observed := make(chan provisioning.Observation, 16)
	c := newCensus(t)
	m, req := booted(t, c, observed)
	require.NoError(t, syscall.Kill(m.cmd.Process.Pid, syscall.SIGKILL))
	kinds := map[provisioning.ObservationKind]bool{(<-observed).Kind: true, (<-observed).Kind: true}
	require.Equal(t, map[provisioning.ObservationKind]bool{provisioning.BootstrapFailed: true, provisioning.NodeLost: true}, kinds)

	// The dead process is named, so that it can be given back (B11).
	_, err := c.CreateLease(t.Context(), provisioning.CreateLeaseRequest{Key: req.Key})
	require.Equal(t, m.lease, provisioning.FailedCompletion(provisioning.OperationID{}, provisioning.CreateLease, err).Lease)
	for kind, err := range map[provisioning.OperationKind]error{
		provisioning.LookupEndpoint: second(c.LookupEndpoint(t.Context(), provisioning.LookupEndpointRequest{Key: req.Key})),
		provisioning.StartBootstrap: second(c.StartBootstrap(t.Context(), req)),
		provisioning.BootstrapConvergenceObserved: c.BootstrapConvergenceObserved(t.Context(),
			provisioning.BootstrapConvergenceObservedRequest{Key: req.Key}),
	} {
		require.ErrorIs(t, err, provisioning.ErrLeaseLost, kind)
	}
}

func second[T any](_ T, err error) error { return err }

// An end that was asked for is no loss.
func TestDestroyedProcessIsNotLost(t *testing.T) {
	observed := make(chan provisioning.Observation, 16)
	c := newCensus(t)
	m, req := booted(t, c, observed)
	require.NoError(t, c.DestroyLease(t.Context(), provisioning.DestroyLeaseRequest{Key: req.Key, Lease: m.lease}))
	require.Empty(t, observed)
	require.NoDirExists(t, m.dir)
}

// A process does not outlive whoever started it.
func TestProcessEndsWithItsParent(t *testing.T) {
	observed := make(chan provisioning.Observation, 16)
	m, _ := booted(t, newCensus(t), observed)
	require.NoError(t, m.stdin.Close()) // as the system does for a parent that dies
	<-m.dead
}

// The port of a machine is no proof of which machine it is.
func TestOrderForAnotherMachineIsNotTaken(t *testing.T) {
	observed := make(chan provisioning.Observation, 16)
	c := newCensus(t)
	_, req := booted(t, c, observed)
	req.Key.Attempt++
	_, err := c.CreateLease(t.Context(), provisioning.CreateLeaseRequest{Key: req.Key, Spec: req.Spec})
	require.NoError(t, err)
	_, err = c.StartBootstrap(t.Context(), req) // at the endpoint of the attempt before
	require.Equal(t, provisioning.ClassDefinite, provisioning.Classify(provisioning.StartBootstrap, err), "%v", err)
	require.Empty(t, observed)
}

func TestStrangersAreTurnedAway(t *testing.T) {
	observed := make(chan provisioning.Observation, 16)
	c := newCensus(t)
	m, _ := booted(t, c, observed)
	right := hello{Token: m.key.Token(), Node: m.key.Node, Attempt: m.key.Attempt, Secret: m.secret}
	other := m.key
	other.Attempt++
	for name, change := range map[string]func(h *hello){
		"another token":   func(h *hello) { h.Token = other.Token() },
		"another slot":    func(h *hello) { h.Node = "w-1" },
		"another attempt": func(h *hello) { h.Attempt++ },
		"another secret":  func(h *hello) { h.Secret = "" },
	} {
		t.Run(name, func(t *testing.T) {
			h := right
			change(&h)
			require.Equal(t, "go away\n", call(t, c, h))
			require.Empty(t, observed)
		})
	}
	require.Equal(t, welcomeWord+"\n", call(t, c, right))
	require.Equal(t, provisioning.SwactorJoined, (<-observed).Kind)
}

func call(t *testing.T, c *census, h hello) string {
	conn, err := net.Dial("tcp", c.home.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, json.NewEncoder(conn).Encode(h))
	answer, err := bufio.NewReader(conn).ReadString('\n')
	require.NoError(t, err)
	return answer
}
