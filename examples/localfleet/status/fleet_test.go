package status

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// testFleet is a running host over a fake provider whose bootstraps report what
// the test delivers, and nothing else.
type testFleet struct {
	*Fleet
	t    *testing.T
	fake *fakebackend.Backend
	wish provisioning.ClusterShape
}

func newTestFleet(t *testing.T, config provisioning.HostConfig, groups ...provisioning.NodeGroupSpec) *testFleet {
	f := &testFleet{t: t, fake: fakebackend.New(fakebackend.Config{ManualBootstrap: true}),
		wish: provisioning.ClusterShape{RunID: "test-run", Generation: 1, Groups: groups}}
	f.Fleet = &Fleet{Name: "localfleet", Journal: new(Journal), Run: "test-run", Began: time.Now()}
	config.Shape, config.Backend, config.OnEvent = f.wish, f.fake, f.Journal.OnEvent
	host, err := provisioning.NewHost(config)
	require.NoError(t, err)
	f.Host = host
	return f
}

// run drives the host until the test ends.
func (f *testFleet) run() {
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f.Host.Run(ctx) }()
	f.t.Cleanup(func() {
		stop()
		<-ended // a HeldError: the machines are left to the fake
		f.fake.Close()
		_, err := f.Host.Close(context.Background())
		require.NoError(f.t, err)
	})
}

// await waits until the status is as wanted and returns it.
func (f *testFleet) await(what string, wanted func(Status) bool) Status {
	f.t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		changed := f.Journal.Changed()
		if s := f.Status(); wanted(s) {
			return s
		}
		select {
		case <-changed:
		case <-deadline:
			require.Fail(f.t, "never "+what, "%+v", f.Status())
		}
	}
}

func (f *testFleet) awaitStage(node string, stage provisioning.Stage) Slot {
	f.t.Helper()
	var found Slot
	f.await(node+" in "+stage.String(), func(s Status) bool {
		for _, slot := range s.Slots {
			if slot.Node == node && slot.Stage == stage.String() {
				found = slot
				return true
			}
		}
		return false
	})
	return found
}

// report delivers an observation of the present session of a slot.
func (f *testFleet) report(node provisioning.LogicalNodeID, o provisioning.Observation) {
	f.t.Helper()
	n, ok := f.Host.Driver().Node(node)
	require.True(f.t, ok)
	o.Node, o.Attempt, o.Session = node, n.Attempt, n.ActiveBootstrap
	f.Host.Deliver(o)
}

func (f *testFleet) join(node provisioning.LogicalNodeID) {
	f.t.Helper()
	f.awaitStage(string(node), provisioning.StageBootstrapRunning)
	f.report(node, provisioning.Observation{Kind: provisioning.SwactorJoined, Swactor: "swactor-" + provisioning.SwactorID(node)})
	f.awaitStage(string(node), provisioning.StageDormant)
}

// release lets a call end that hangs, once it does.
func (f *testFleet) release(node provisioning.LogicalNodeID, kind provisioning.OperationKind) {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return f.fake.Hanging(node, kind) == 1 }, 20*time.Second, time.Millisecond)
	require.NoError(f.t, f.fake.Release(node, kind, mustOutcome(f.t, "ok")))
}

func group(id provisioning.NodeGroupID, count int) provisioning.NodeGroupSpec {
	return provisioning.NodeGroupSpec{GroupID: id, Count: count, Role: "worker", Shape: provisioning.NodeShape{Image: "worker:v1"},
		Boot: provisioning.BootSpec{Env: map[string]string{"PASSWORD": secret}, Args: []string{secret}, StartSwactorCommand: secret,
			VerifyCommands: []string{secret}}}
}

// secret is in every place of a shape where people put secrets.
const secret = "hunter2-do-not-tell"

func mustOutcome(t *testing.T, text string) fakebackend.Outcome {
	t.Helper()
	outcomes, err := fakebackend.ParseOutcome(text)
	require.NoError(t, err)
	require.Len(t, outcomes, 1)
	return outcomes[0]
}
