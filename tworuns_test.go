package provisioning_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// mnRun is one run at a provider that it shares with others: a driver and an
// executor of its own, and the time of the provider.
type mnRun struct {
	*provisioning.ClusterDriver
	fake     *fakebackend.Backend
	executor *provisioning.Executor
}

func mnNewRun(t *testing.T, fake *fakebackend.Backend, shape provisioning.ClusterShape) mnRun {
	driver, err := provisioning.NewClusterDriver(shape, provisioning.Config{})
	require.NoError(t, err)
	executor, err := provisioning.NewExecutor(fake, provisioning.ExecutorConfig{
		Deliver: driver.Deliver,
		Go:      func(f func()) { f() },
	})
	require.NoError(t, err)
	return mnRun{driver, fake, executor}
}

// drive does what is to be done now.
func (r mnRun) drive(t *testing.T) {
	_, err := r.DriveUntilBlocked(r.fake.Now(), r.executor)
	require.NoError(t, err)
}

// settle drives until nothing is waited for any more.
func (r mnRun) settle(t *testing.T) {
	for range 100 {
		r.drive(t)
		next, waits := r.RequeueAt()
		if !waits {
			return
		}
		r.fake.AdvanceTo(next)
	}
	t.Fatal("the run never comes to rest")
}

// json is all that the run remembers.
func (r mnRun) json(t *testing.T) string {
	text, err := r.Snapshot().MarshalJSON()
	require.NoError(t, err)
	return string(text)
}

func mnShape(run provisioning.RunID, generation uint64, group provisioning.NodeGroupID, count int) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: run, Generation: generation, Groups: []provisioning.NodeGroupSpec{
		{GroupID: group, Count: count, Shape: provisioning.NodeShape{Image: "v1"}},
	}}
}

// Two services rent from one account. They agree in the name of the slot and
// in the number of the attempt, and neither ever touches what is the other's.
func TestTwoRunsOneProvider(t *testing.T) {
	for _, class := range []fakebackend.Class{fakebackend.Token, fakebackend.Name, fakebackend.Label} {
		t.Run(class.String(), func(t *testing.T) {
			calls := make(map[provisioning.RunID]int)
			fake := fakebackend.New(fakebackend.Config{Class: class, Inline: true, OnCall: func(c fakebackend.Call) { calls[c.Key.Run]++ }})
			keyA := provisioning.ExternalKey{Run: "A", Node: "w-0", Attempt: 1}
			keyB := provisioning.ExternalKey{Run: "B", Node: "w-0", Attempt: 1}
			a := mnNewRun(t, fake, mnShape("A", 1, "w", 1))
			b := mnNewRun(t, fake, mnShape("B", 1, "w", 1))

			// Both have bought, and neither has heard of it.
			fake.Script("w-0", provisioning.CreateLease, fakebackend.DoneAmbiguous(), fakebackend.DoneAmbiguous())
			a.drive(t)
			b.drive(t)
			require.Empty(t, fake.Scripted("w-0", provisioning.CreateLease), "a lost answer for each")
			require.Equal(t, []provisioning.HeldSlot{{Key: keyA, Unresolved: true}}, a.Held())
			require.Equal(t, []provisioning.HeldSlot{{Key: keyB, Unresolved: true}}, b.Held())

			// B asks first, while A's machine is there to be mistaken for its
			// own. Each adopts the one that it has bought.
			b.settle(t)
			a.settle(t)
			leases := make(map[provisioning.ExternalKey]provisioning.ProviderLeaseID)
			for _, m := range fake.Machines() {
				leases[m.Key] = m.Lease
			}
			require.Len(t, fake.Machines(), 2)
			require.NotEqual(t, leases[keyA], leases[keyB])
			for key, run := range map[provisioning.ExternalKey]mnRun{keyA: a, keyB: b} {
				require.True(t, run.Converged(1), key)
				require.Equal(t, []provisioning.HeldSlot{{Key: key, Lease: leases[key]}}, run.Held())
				require.Equal(t, 1, fake.CreatedKey(key), key)
			}

			// B wishes for nothing. A keeps its machine and its bootstrap, and
			// has nothing to do about it.
			stateOfA, callsOfA := a.json(t), calls["A"]
			require.NoError(t, b.UpdateDesired(mnShape("B", 2, "w", 0)))
			b.settle(t)
			require.True(t, b.Converged(2))
			require.Equal(t, 1, fake.DestroyedKey(keyB))
			a.Trigger()
			a.settle(t)
			require.Equal(t, stateOfA, a.json(t))
			require.Equal(t, callsOfA, calls["A"])
			require.Equal(t, 1, fake.LiveKey(keyA))
			require.Zero(t, fake.DestroyedKey(keyA))
			require.Equal(t, 1, fake.LiveTotal())
		})
	}
}

// Run, group and index put together are the same text for both runs.
func TestTwoRunsWhoseNamesRunTogether(t *testing.T) {
	fake := fakebackend.New(fakebackend.Config{Inline: true})
	first := mnNewRun(t, fake, mnShape("A", 1, "w-w", 1))
	second := mnNewRun(t, fake, mnShape("A-w", 1, "w", 1))
	first.settle(t)
	second.settle(t)
	machines := fake.Machines()
	require.Len(t, machines, 2)
	a, b := machines[0].Key, machines[1].Key
	require.Equal(t, string(a.Run)+"-"+string(a.Node), string(b.Run)+"-"+string(b.Node), "the case is only hard while these agree")
	require.Equal(t, a.Attempt, b.Attempt)
	require.NotEqual(t, a, b)
	require.NotEqual(t, a.Token(), b.Token())
	require.NotEqual(t, a.UUID(), b.UUID())
	require.NotEqual(t, a.Name(63), b.Name(63))
	require.NotEqual(t, a.TokenFor("disk"), b.TokenFor("disk"))
}
