package fakebackend

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

func shapeOf(generation uint64, count int, image string) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: "run", Generation: generation, Groups: []provisioning.NodeGroupSpec{
		{GroupID: "w", Count: count, Shape: provisioning.NodeShape{Image: image}}}}
}

// A whole host in virtual time, on one goroutine: eight hours in which calls
// fail, hang and come late, machines are lost and the wish changes.
func hostLog(t *testing.T) []string {
	b := New(Config{Class: Label, Lag: 3 * time.Second, Settle: 100 * time.Second, JoinAfter: 2 * time.Minute})
	begin := b.Now()
	w := b.NewWork()
	b.Script("w-0", create, Late(90*time.Second), OK(), Dead())
	b.Script("w-1", create, Slow(3*time.Minute), DonePanic())
	b.Script("w-1", start, Definite(), SpotLoss(2*time.Hour))
	b.Script("w-2", create, Hang())
	b.Script("w-3", create, Vanish(time.Hour))
	b.Script("w-3", destroy, DoneAmbiguous())

	var log []string
	say := func(format string, args ...any) {
		log = append(log, fmt.Sprintf("%v ", b.Now().Sub(begin))+fmt.Sprintf(format, args...))
	}
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape: shapeOf(1, 4, "img1"), Backend: b, Clock: w.Clock(nil), Go: w.Go,
		OnEvent: func(e provisioning.Event) { say("%v", e) },
	})
	require.NoError(t, err)
	at := func(d time.Duration, hook func()) { b.At(begin.Add(d), hook) }
	at(10*time.Minute, func() { require.NoError(t, b.Release("w-2", create, OK())) })
	at(3*time.Hour, func() { require.NoError(t, host.UpdateDesired(shapeOf(2, 3, "img2"))) })
	at(4*time.Hour, func() { b.Remove("w-0") })
	at(5*time.Hour, func() { host.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: "w-2", Attempt: 99}) })
	ctx, stop := context.WithCancel(context.Background())
	at(6*time.Hour, stop)

	var held *provisioning.HeldError
	require.ErrorAs(t, host.Run(ctx), &held)
	require.Len(t, held.Held, 3)
	require.True(t, host.Status().Converged)
	say("%v", held)
	require.NoError(t, host.Drain(context.Background()))
	require.Empty(t, b.Machines())
	_, err = host.Close(context.Background())
	require.NoError(t, err)
	for _, node := range []provisioning.LogicalNodeID{"w-0", "w-1", "w-2", "w-3"} {
		say("%s: %d made, %d destroyed", node, b.Created(node), b.Destroyed(node))
	}
	return log
}

func TestHostInVirtualTimeIsDeterministic(t *testing.T) {
	first := hostLog(t)
	require.Greater(t, len(first), 100)
	for range 5 {
		require.Equal(t, first, hostLog(t))
	}
}

// The executor reads what the fake asks for, also where a settle time has
// turned a no into an unclear answer.
func TestRetryAfterIsKept(t *testing.T) {
	b := New(Config{Settle: time.Minute, Inline: true})
	var seen []provisioning.Completion
	executor, err := provisioning.NewExecutor(b, provisioning.ExecutorConfig{
		Deliver: func(o provisioning.Observation) { seen = append(seen, o.Completion) },
		Go:      func(f func()) { f() },
	})
	require.NoError(t, err)
	b.Script("w-0", create, RetryAfter(30*time.Second), Ambiguous(), RetryAfter(30*time.Second))
	for sequence := range uint64(3) {
		op := provisioning.OperationID{Attempt: 1, Sequence: sequence + 1}
		_, err := executor.Submit(provisioning.NewEffect(op, create, key, provisioning.LogicalNodeSpec{Node: "w-0"}))
		require.NoError(t, err)
	}
	require.Equal(t, []provisioning.FailureClass{provisioning.ClassDefinite, provisioning.ClassAmbiguous, provisioning.ClassAmbiguous},
		[]provisioning.FailureClass{seen[0].Class, seen[1].Class, seen[2].Class})
	require.Equal(t, []time.Duration{30 * time.Second, 0, 30 * time.Second},
		[]time.Duration{seen[0].RetryAfter, seen[1].RetryAfter, seen[2].RetryAfter})
	require.NoError(t, executor.Close(context.Background()))
}
