package provisioning_test

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/verify"
)

// From any wish to any other, after Acto (Gu et al., SOSP 2023): whatever was
// wished for and however far that had come, the cluster ends in exactly what is
// wished for now, stays there, and did nothing to what both wishes agree in.

// rsShape is a wish.
type rsShape struct {
	name   string
	groups []provisioning.NodeGroupSpec
}

// rsGroup is a group of which every field says something.
func rsGroup(id provisioning.NodeGroupID, count int, changes ...func(*provisioning.NodeGroupSpec)) provisioning.NodeGroupSpec {
	number := func(f float64) *float64 { return &f }
	g := provisioning.NodeGroupSpec{GroupID: id, Count: count, Role: "worker", Provider: "fake",
		Shape: provisioning.NodeShape{Image: "v1", DiskGB: 10, GPUName: "small", MinGPURAMMB: number(1000), MinDownMbps: number(100), MinUpMbps: number(10),
			MinReliability: number(0.5), RequireVerified: true, ProviderLabels: map[string]string{"team": "a", "zone": "1"}},
		Boot: provisioning.BootSpec{SSHUser: "root", VerifyCommands: []string{"true", "uptime"}, StartSwactorCommand: "agent",
			StdoutSources: []string{"out"}, StderrSources: []string{"err"}, Env: map[string]string{"LEVEL": "1", "MODE": "x"},
			Args: []string{"-a", "-b"}, Mounts: []provisioning.Mount{{Source: "/data", Target: "/mnt"}}},
		SwarmJoin: provisioning.SwarmJoinTemplate{OrchSwactorAddr: "orch:1", JoinTokenRef: "vault/1"},
	}
	for _, change := range changes {
		change(&g)
	}
	return g
}

// rsShapes are all the wishes. They differ in which groups there are, in how
// many slots these have, or in one field of one group; a few do not differ.
func rsShapes() []rsShape {
	number := func(f float64) *float64 { return &f }
	w, x := rsGroup("w", 2), rsGroup("x", 1)
	shapes := []rsShape{
		{"nothing", nil},
		{"an empty group", []provisioning.NodeGroupSpec{rsGroup("w", 0)}},
		{"one node", []provisioning.NodeGroupSpec{rsGroup("w", 1)}},
		{"two nodes", []provisioning.NodeGroupSpec{w}},
		{"five nodes", []provisioning.NodeGroupSpec{rsGroup("w", 5)}},
		{"two groups", []provisioning.NodeGroupSpec{w, x}},
		{"the same the other way round", []provisioning.NodeGroupSpec{x, w}},
		{"the first one up", []provisioning.NodeGroupSpec{rsGroup("w", 4), x}},
		{"the first one down", []provisioning.NodeGroupSpec{rsGroup("w", 1), x}},
		{"the first one empty", []provisioning.NodeGroupSpec{rsGroup("w", 0), x}},
		{"the first one gone", []provisioning.NodeGroupSpec{x}},
		{"the second one up", []provisioning.NodeGroupSpec{w, rsGroup("x", 3)}},
		{"one up and one down", []provisioning.NodeGroupSpec{rsGroup("w", 1), rsGroup("x", 2)}},
		{"three groups", []provisioning.NodeGroupSpec{w, x, rsGroup("y", 1)}},
		{"six groups", []provisioning.NodeGroupSpec{rsGroup("f", 1), rsGroup("e", 1), w, x, rsGroup("d", 1), rsGroup("y", 1)}},
		{"the first one renamed", []provisioning.NodeGroupSpec{rsGroup("v", 2), x}},
		{"names that begin alike", []provisioning.NodeGroupSpec{rsGroup("w", 2), rsGroup("w-1", 2)}},
		{"counts and a field", []provisioning.NodeGroupSpec{rsGroup("w", 3, func(g *provisioning.NodeGroupSpec) { g.Shape.Image = "v2" }), x}},
		{"both in another image", []provisioning.NodeGroupSpec{
			rsGroup("w", 2, func(g *provisioning.NodeGroupSpec) { g.Shape.Image = "v2" }), rsGroup("x", 1, func(g *provisioning.NodeGroupSpec) { g.Shape.Image = "v2" })}},
	}
	for _, c := range []struct {
		name string
		do   func(*provisioning.NodeGroupSpec)
	}{
		{"role", func(g *provisioning.NodeGroupSpec) { g.Role = "leader" }},
		{"no role", func(g *provisioning.NodeGroupSpec) { g.Role = "" }},
		{"provider", func(g *provisioning.NodeGroupSpec) { g.Provider = "other" }},
		{"image", func(g *provisioning.NodeGroupSpec) { g.Shape.Image = "v2" }},
		{"disk", func(g *provisioning.NodeGroupSpec) { g.Shape.DiskGB = 20 }},
		{"GPU", func(g *provisioning.NodeGroupSpec) { g.Shape.GPUName = "large" }},
		{"GPU memory", func(g *provisioning.NodeGroupSpec) { g.Shape.MinGPURAMMB = number(2000) }},
		{"no GPU memory", func(g *provisioning.NodeGroupSpec) { g.Shape.MinGPURAMMB = nil }},
		{"mbps down", func(g *provisioning.NodeGroupSpec) { g.Shape.MinDownMbps = number(200) }},
		{"mbps up", func(g *provisioning.NodeGroupSpec) { g.Shape.MinUpMbps = number(20) }},
		{"reliability", func(g *provisioning.NodeGroupSpec) { g.Shape.MinReliability = number(0.9) }},
		{"reliability 0", func(g *provisioning.NodeGroupSpec) { g.Shape.MinReliability = number(0) }},
		{"reliability -0", func(g *provisioning.NodeGroupSpec) { g.Shape.MinReliability = number(math.Copysign(0, -1)) }},
		{"no reliability", func(g *provisioning.NodeGroupSpec) { g.Shape.MinReliability = nil }},
		{"unverified", func(g *provisioning.NodeGroupSpec) { g.Shape.RequireVerified = false }},
		{"a label", func(g *provisioning.NodeGroupSpec) { g.Shape.ProviderLabels["zone"] = "2" }},
		{"a label more", func(g *provisioning.NodeGroupSpec) { g.Shape.ProviderLabels["rack"] = "1" }},
		{"no labels", func(g *provisioning.NodeGroupSpec) { g.Shape.ProviderLabels = nil }},
		{"empty labels", func(g *provisioning.NodeGroupSpec) { g.Shape.ProviderLabels = map[string]string{} }},
		{"user", func(g *provisioning.NodeGroupSpec) { g.Boot.SSHUser = "boot" }},
		{"a boot command", func(g *provisioning.NodeGroupSpec) { g.Boot.VerifyCommands[0] = "false" }},
		{"boot commands the other way round", func(g *provisioning.NodeGroupSpec) { slices.Reverse(g.Boot.VerifyCommands) }},
		{"start command", func(g *provisioning.NodeGroupSpec) { g.Boot.StartSwactorCommand = "agent2" }},
		{"stdout", func(g *provisioning.NodeGroupSpec) { g.Boot.StdoutSources = []string{"out", "out2"} }},
		{"stderr", func(g *provisioning.NodeGroupSpec) { g.Boot.StderrSources = nil }},
		{"env", func(g *provisioning.NodeGroupSpec) { g.Boot.Env["LEVEL"] = "2" }},
		{"env under another name", func(g *provisioning.NodeGroupSpec) { g.Boot.Env = map[string]string{"LEVEL": "x", "MODE": "1"} }},
		{"args", func(g *provisioning.NodeGroupSpec) { g.Boot.Args[1] = "-c" }},
		{"args in one", func(g *provisioning.NodeGroupSpec) { g.Boot.Args = []string{"-a-b"} }},
		{"no args", func(g *provisioning.NodeGroupSpec) { g.Boot.Args = nil }},
		{"empty args", func(g *provisioning.NodeGroupSpec) { g.Boot.Args = []string{} }},
		{"a mount", func(g *provisioning.NodeGroupSpec) { g.Boot.Mounts[0].Target = "/mnt2" }},
		{"a mount to read", func(g *provisioning.NodeGroupSpec) { g.Boot.Mounts[0].ReadOnly = true }},
		{"a mount more", func(g *provisioning.NodeGroupSpec) {
			g.Boot.Mounts = append(g.Boot.Mounts, provisioning.Mount{Source: "/a", Target: "/b"})
		}},
		{"whom to join", func(g *provisioning.NodeGroupSpec) { g.SwarmJoin.OrchSwactorAddr = "orch:2" }},
		{"join token", func(g *provisioning.NodeGroupSpec) { g.SwarmJoin.JoinTokenRef = "vault/2" }},
	} {
		shapes = append(shapes, rsShape{c.name, []provisioning.NodeGroupSpec{rsGroup("w", 2, c.do), x}})
	}
	return shapes
}

// rsWant says what each slot of a wish has to be built from, worked out without
// the library's own idea of what is the same.
func rsWant(groups []provisioning.NodeGroupSpec) map[provisioning.LogicalNodeID]provisioning.NodeGroupSpec {
	want := map[provisioning.LogicalNodeID]provisioning.NodeGroupSpec{}
	for _, g := range groups {
		for i := range g.Count {
			want[provisioning.LogicalNodeID(fmt.Sprintf("%s-%d", g.GroupID, i))] = rsPlain(g)
		}
	}
	return want
}

// rsPlain is a template in the one form of all that mean the same.
func rsPlain(g provisioning.NodeGroupSpec) provisioning.NodeGroupSpec {
	g.RunID, g.Count = "", 0
	list := func(s []string) []string { return append([]string{}, s...) }
	texts := func(m map[string]string) map[string]string {
		plain := map[string]string{}
		maps.Copy(plain, m)
		return plain
	}
	for _, f := range []**float64{&g.Shape.MinGPURAMMB, &g.Shape.MinDownMbps, &g.Shape.MinUpMbps, &g.Shape.MinReliability} {
		if *f != nil && **f == 0 {
			*f = new(float64) // 0, not -0
		}
	}
	g.Shape.ProviderLabels, g.Boot.Env = texts(g.Shape.ProviderLabels), texts(g.Boot.Env)
	g.Boot.VerifyCommands, g.Boot.Args = list(g.Boot.VerifyCommands), list(g.Boot.Args)
	g.Boot.StdoutSources, g.Boot.StderrSources = list(g.Boot.StdoutSources), list(g.Boot.StderrSources)
	g.Boot.Mounts = append([]provisioning.Mount{}, g.Boot.Mounts...)
	return g
}

// rsTemplate is what a spec was made from.
func rsTemplate(s provisioning.LogicalNodeSpec) provisioning.NodeGroupSpec {
	return rsPlain(provisioning.NodeGroupSpec{GroupID: s.GroupID, Role: s.Role, Provider: s.Provider, Shape: s.Shape, Boot: s.Boot,
		SwarmJoin: provisioning.SwarmJoinTemplate{OrchSwactorAddr: s.SwarmJoin.OrchSwactorAddr, JoinTokenRef: s.SwarmJoin.JoinTokenRef}})
}

// rsPhase is how far the first wish has come when the second one is made.
type rsPhase struct {
	name   string
	manual bool // bootstraps report only what they are made to
	// come brings the first wish that far, and every node of it is there then.
	come func(w *rsWorld)
	is   func(n provisioning.ManagedNode) bool
	// then, if not nil, is what happens after the second wish was made.
	then func(w *rsWorld)
}

type rsWorld struct {
	*mwWorld
	driver *provisioning.ClusterDriver
	slots  []provisioning.LogicalNodeID // of the first wish
}

// script says what the next calls on every slot of the first wish come to.
func (w *rsWorld) script(kind provisioning.OperationKind, outcomes ...fakebackend.Outcome) {
	for _, slot := range w.slots {
		w.fake.Script(slot, kind, outcomes...)
	}
}

// lose has all machines of the first wish lost.
func (w *rsWorld) lose() {
	for _, slot := range w.slots {
		w.fake.Remove(slot)
	}
	w.report()
}

var rsPhases = []rsPhase{
	{name: "at rest", is: func(n provisioning.ManagedNode) bool { return n.Record.Ready },
		come: func(w *rsWorld) { w.drive() }},
	{name: "before the first pass", come: func(*rsWorld) {}},
	{name: "a create hangs", is: func(n provisioning.ManagedNode) bool { return n.Pending.Kind == provisioning.CreateLease }, come: func(w *rsWorld) {
		w.script(provisioning.CreateLease, fakebackend.Hang())
		w.drive()
	}},
	{name: "a create hangs, and has bought, until it is out of time", is: func(n provisioning.ManagedNode) bool { return n.Pending.Kind == provisioning.CreateLease }, come: func(w *rsWorld) {
		w.script(provisioning.CreateLease, fakebackend.DoneHang())
		w.drive()
	}, then: func(w *rsWorld) { w.through(time.Minute) }},
	{name: "the answer of a create was lost", is: func(n provisioning.ManagedNode) bool { return n.Retry.Ambiguous == provisioning.CreateLease }, come: func(w *rsWorld) {
		w.script(provisioning.CreateLease, fakebackend.DoneAmbiguous())
		w.drive()
	}},
	{name: "creates are refused", is: func(n provisioning.ManagedNode) bool {
		return n.Retry.ConsecutiveFailures == 3 && !n.Retry.NextEffectAt.IsZero()
	}, come: func(w *rsWorld) {
		w.script(provisioning.CreateLease, fakebackend.Repeat(6, fakebackend.Capacity())...)
		w.through(5 * time.Second)
	}, then: func(w *rsWorld) { w.through(10 * time.Second) }},
	{name: "a machine without an address", is: func(n provisioning.ManagedNode) bool {
		return n.Record.Stage == provisioning.StageLeaseCreated && !n.Retry.NextEffectAt.IsZero()
	}, come: func(w *rsWorld) {
		w.script(provisioning.CreateLease, fakebackend.OKNoEndpoint())
		w.script(provisioning.LookupEndpoint, fakebackend.Repeat(9, fakebackend.NotReady())...)
		w.through(3 * time.Second)
	}, then: func(w *rsWorld) { w.through(5 * time.Second) }},
	{name: "a start hangs", manual: true, is: func(n provisioning.ManagedNode) bool { return n.Pending.Kind == provisioning.StartBootstrap }, come: func(w *rsWorld) {
		w.script(provisioning.StartBootstrap, fakebackend.DoneHang())
		w.drive()
	}},
	{name: "bootstraps run", manual: true, is: func(n provisioning.ManagedNode) bool { return n.Record.Stage == provisioning.StageBootstrapRunning },
		come: func(w *rsWorld) { w.drive() }},
	{name: "joined, and not yet handed off", manual: true, is: func(n provisioning.ManagedNode) bool { return n.Record.Stage == provisioning.StageSwactorJoined }, come: func(w *rsWorld) {
		w.script(provisioning.BootstrapConvergenceObserved, fakebackend.Hang())
		w.drive()
		w.report()
		w.drive()
	}},
	{name: "lost, and the destroy hangs", is: func(n provisioning.ManagedNode) bool {
		return n.Intent == provisioning.Deleting && n.Pending.Kind == provisioning.DestroyLease
	}, come: func(w *rsWorld) {
		w.script(provisioning.DestroyLease, fakebackend.Hang())
		w.drive()
		w.lose()
		w.drive()
	}},
	{name: "lost, and waiting to begin anew", is: func(n provisioning.ManagedNode) bool {
		return n.Record.Stage == provisioning.StageDestroyed && !n.Retry.RestartAt.IsZero()
	}, come: func(w *rsWorld) {
		w.drive()
		w.lose()
		w.drive()
	}},
	{name: "going, while sessions are being cancelled", manual: true, is: func(n provisioning.ManagedNode) bool {
		return n.Intent == provisioning.Deleting && n.ActiveBootstrap != "" && !n.Retry.NextEffectAt.IsZero()
	}, come: func(w *rsWorld) {
		w.script(provisioning.CancelBootstrap, fakebackend.Ambiguous(), fakebackend.Hang())
		w.drive()
		w.wish(nil)
		w.drive()
	}, then: func(w *rsWorld) { w.through(2 * time.Second) }},
	{name: "going, while destroys fail", is: func(n provisioning.ManagedNode) bool {
		return n.Intent == provisioning.Deleting && n.Record.Lease != "" && !n.Retry.NextEffectAt.IsZero()
	}, come: func(w *rsWorld) {
		w.script(provisioning.DestroyLease, fakebackend.Definite(), fakebackend.Ambiguous())
		w.drive()
		w.wish(nil)
		w.drive()
	}},
	{name: "paused at rest", is: func(n provisioning.ManagedNode) bool { return n.Record.Ready }, come: func(w *rsWorld) {
		w.drive()
		w.driver.Pause()
		w.drive()
	}, then: rsResume},
	{name: "paused on the way", is: func(n provisioning.ManagedNode) bool {
		return n.Record.Stage == provisioning.StageLeaseCreated && n.Pending == nil
	}, come: func(w *rsWorld) {
		w.script(provisioning.CreateLease, fakebackend.OKNoEndpoint())
		w.script(provisioning.LookupEndpoint, fakebackend.NotReady())
		w.drive()
		w.driver.Pause()
		w.drive()
	}, then: rsResume},
}

func rsResume(w *rsWorld) {
	bought := len(w.built)
	w.through(time.Hour)
	require.Len(w.t, w.built, bought, "nothing begins during a pause")
	w.driver.Resume()
	w.drive()
}

// rsRun wishes for one shape, brings it so far, and wishes for another.
type rsRun struct {
	*rsWorld
	// before is what was there when the second wish was made.
	before map[provisioning.LogicalNodeID]provisioning.ManagedNode
}

func rsPlay(t require.TestingT, first, second rsShape, phase rsPhase) *rsRun {
	config := provisioning.Config{Retry: provisioning.RetryPolicy{OperationTimeout: 30 * time.Second}}
	world := mwNew(t, fakebackend.Config{ManualBootstrap: phase.manual}, config,
		provisioning.ClusterShape{RunID: "run", Generation: 1, Groups: first.groups}, mwHow{})
	w := &rsWorld{mwWorld: world, driver: world.driver.(*provisioning.ClusterDriver), slots: slices.Sorted(maps.Keys(rsWant(first.groups)))}
	phase.come(w)
	run := &rsRun{w, map[provisioning.LogicalNodeID]provisioning.ManagedNode{}}
	for n := range w.driver.Snapshot().All() {
		run.before[n.Record.Node] = n
		require.True(t, phase.is(n), "%s is not as far as %q: %s", n.Record.Node, phase.name, ptJSON(n))
	}
	if phase.is != nil {
		require.Len(t, run.before, len(w.slots))
	}
	w.wish(second.groups)
	w.drive()
	w.rest("the second wish")
	if phase.then != nil {
		phase.then(w)
		w.rest("then")
	}
	w.settle()
	w.rest("in the end")
	return run
}

// rsJudge wants the second shape and nothing else, for good, and of every slot
// in which both shapes agree the story of a run in which nothing was changed.
func rsJudge(t require.TestingT, first, second rsShape, phase rsPhase, control *rsRun) {
	run := rsPlay(t, first, second, phase)
	defer run.close()
	was, want := rsWant(first.groups), rsWant(second.groups)
	for slot := range want {
		if !reflect.DeepEqual(was[slot], want[slot]) {
			continue
		}
		require.Equal(t, control.stories[slot], run.stories[slot], "%s is as it was wished for before", slot)
		if phase.name == "at rest" || phase.name == "paused at rest" {
			n, _ := run.driver.Node(slot)
			require.Equal(t, run.before[slot], n, "%s is not touched", slot)
		}
	}
	run.holds(want)
	run.stays()
	run.wish(nil)
	run.settle()
	require.Zero(t, run.fake.LiveTotal())
	run.holds(nil)
}

// holds wants these slots, ready, each on one machine that was bought for it.
func (r *rsRun) holds(want map[provisioning.LogicalNodeID]provisioning.NodeGroupSpec) {
	t := r.t
	machines := map[provisioning.LogicalNodeID]fakebackend.Machine{}
	for _, m := range r.fake.Machines() {
		require.NotContains(t, machines, m.Key.Node, "a second machine")
		machines[m.Key.Node] = m
	}
	s := r.driver.Snapshot()
	require.Equal(t, len(want), s.Len(), "slots")
	require.Len(t, machines, len(want))
	for n := range s.All() {
		slot := n.Record.Node
		require.Contains(t, want, slot)
		require.Equal(t, want[slot], rsTemplate(n.Record.Spec), "the spec of %s", slot)
		require.True(t, n.Record.Ready && n.Intent == provisioning.Active && n.Pending == nil, "%s is ready", slot)
		require.Equal(t, []any{n.Attempt, n.Record.Lease, false}, []any{machines[slot].Key.Attempt, machines[slot].Lease, machines[slot].Dead}, "the machine of %s", slot)
		require.Equal(t, want[slot], rsTemplate(r.built[n.Attempt]), "what was bought for %s", slot)
	}
	require.True(t, r.driver.Converged(r.shape.Generation))
	stats := r.executor.Stats()
	require.Equal(t, []int{len(want), 0, 0}, []int{stats.Attempts, stats.Running, stats.Queued}, "attempts, running and queued calls of the executor")
}

// stays lets a month pass.
func (r *rsRun) stays() {
	state, effects := r.state(), len(r.effects)
	_, waits := r.driver.RequeueAt()
	require.False(r.t, waits, "nothing to wait for")
	for range 3 {
		r.fake.AdvanceTo(r.fake.Now().Add(10 * 24 * time.Hour))
		r.driver.Trigger()
		r.drive()
	}
	require.Equal(r.t, state, r.state())
	require.Len(r.t, r.effects, effects, "no call more")
}

// TestEveryShapeAfterEveryOther goes from every shape to every other, from
// every phase. The short form has each shape as the first and as the second one
// once in each phase.
func TestEveryShapeAfterEveryOther(t *testing.T) {
	if provisioning.RaceDetector {
		t.Skip("it runs on one goroutine at a time")
	}
	shapes := rsShapes()
	runs := 0
	for p, phase := range rsPhases {
		t.Run(phase.name, func(t *testing.T) {
			way := ""
			defer func() {
				if t.Failed() {
					t.Log("from", way)
				}
			}()
			for i, first := range shapes {
				way = fmt.Sprintf("%q to itself", first.name)
				control := rsPlay(t, first, first, phase)
				control.close()
				for j, second := range shapes {
					if !verify.Full() && j != (i+7*p+1)%len(shapes) {
						continue
					}
					way = fmt.Sprintf("%q to %q", first.name, second.name)
					rsJudge(t, first, second, phase, control)
					runs++
				}
			}
		})
	}
	verify.AtLeast(t, "shapes", len(shapes), 40)
	verify.AtLeast(t, "phases, of which one is at rest", len(rsPhases), 6)
	every := len(rsPhases) * len(shapes)
	if verify.Full() {
		every *= len(shapes)
	}
	verify.Exactly(t, "ways from a shape in a phase to a shape, all ending in it", runs, every)
}
