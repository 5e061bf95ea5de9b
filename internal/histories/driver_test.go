package histories

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/verify"
)

// The model of a driver: a wish, an inbox, a state and what was last said about
// the state. A pass takes the wish and the inbox at one moment, changes the state
// at a second, says which wish the state is of at a third, and tells at a fourth.
// Everybody else reads or writes one of the four at one moment. So the accepted
// generation only rises, and no snapshot shows less than one before it.

const (
	drSlots   = 4
	drPerTime = 6 // requests of a client
)

// drBase is when the slots have begun to bootstrap, the first a minute after it,
// and each of the others a minute after the one before.
var drBase = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

type drKind int

const (
	drUpdate    drKind = iota // UpdateDesired
	drJoin                    // Deliver of the join of a slot
	drWish                    // Generation
	drObserved                // ObservedGeneration
	drConverged               // Converged
	drProgress                // Progress
	drRequeue                 // RequeueAt
	drSnapshot                // Snapshot
	drPass                    // DriveNext that ran no pass
	drStep                    // a step of a pass that ran
)

type drInput struct {
	kind       drKind
	generation uint64
	content    int
	slot       int
	step       drPhase
}

type drOutput struct {
	refusal    error // of UpdateDesired and DriveNext
	generation uint64
	is         bool
	ready      int
	joined     [drSlots]bool
	due        int // which slot's deadline comes next; drSlots: none
}

// drPhase is how far a pass has come.
type drPhase int

const (
	drIdle drPhase = iota
	drTook
	drFolded
	drSaid
)

type drState struct {
	generation uint64 // accepted
	content    int
	queued     bool
	phase      drPhase

	inbox, taken, joined [drSlots]bool
	working, observed    uint64 // of the pass, of the state

	// What was told.
	toldObserved uint64
	toldReady    int
	toldDue      int
}

func drReady(joined [drSlots]bool) (ready, due int) {
	due = drSlots
	for i, is := range joined {
		if is {
			ready++
		} else {
			due = min(due, i)
		}
	}
	return ready, due
}

var drModel = porcupine.Model{
	Init: func() any {
		return drState{generation: drSlots, working: drSlots, observed: drSlots, toldObserved: drSlots}
	},
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(drState), input.(drInput), output.(drOutput)
		switch in.kind {
		case drUpdate:
			switch {
			case in.generation < s.generation:
				return errors.Is(out.refusal, provisioning.ErrGenerationRegressed), s
			case in.generation == s.generation && in.content != s.content:
				return errors.Is(out.refusal, provisioning.ErrGenerationReused), s
			}
			s.generation, s.content, s.queued = in.generation, in.content, true
			return out.refusal == nil, s
		case drJoin:
			s.inbox[in.slot], s.queued = true, true
			return true, s
		case drWish:
			return out.generation == s.generation, s
		case drObserved:
			return out.generation == s.toldObserved, s
		case drConverged:
			return out.is == (s.toldReady == drSlots && s.toldObserved == in.generation && s.generation == in.generation), s
		case drProgress:
			return out.ready == s.toldReady, s
		case drRequeue:
			return out.due == s.toldDue, s
		case drSnapshot:
			return out.generation == s.observed && out.joined == s.joined, s
		case drPass:
			if out.refusal != nil {
				return s.phase != drIdle && errors.Is(out.refusal, provisioning.ErrReentrantPass), s
			}
			return s.phase == drIdle && !s.queued, s
		}
		if in.step != s.phase {
			return false, s
		}
		switch s.phase = (s.phase + 1) % (drSaid + 1); in.step {
		case drIdle:
			may := s.queued
			s.queued, s.working, s.taken, s.inbox = false, s.generation, s.inbox, [drSlots]bool{}
			return may, s
		case drTook:
			for i, is := range s.taken {
				s.joined[i] = s.joined[i] || is
			}
		case drFolded:
			s.observed = s.working
		case drSaid:
			s.toldObserved = s.observed
			s.toldReady, s.toldDue = drReady(s.joined)
		}
		return true, s
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// drShape wishes for the slots of w, and for something else of no slot at all.
func drShape(generation uint64, slots, content int) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: "r", Generation: generation, Groups: []provisioning.NodeGroupSpec{
		{GroupID: "w", Count: slots},
		{GroupID: "x", Shape: provisioning.NodeShape{Image: fmt.Sprint(content)}},
	}}
}

// drCluster is what a history is made of.
type drCluster interface {
	UpdateDesired(provisioning.ClusterShape) error
	Deliver(provisioning.Observation)
	Generation() uint64
	ObservedGeneration() uint64
	Converged(generation uint64) bool
	Progress() (ready, desired int)
	RequeueAt() (time.Time, bool)
	Snapshot() *provisioning.ClusterState
	DriveNext(now time.Time, executor provisioning.EffectExecutor) (bool, error)
}

// drExecutor answers everything at once and well.
type drExecutor struct{ driver *provisioning.ClusterDriver }

func (x drExecutor) Submit(e provisioning.Effect) (bool, error) {
	x.driver.Deliver(provisioning.Observation{Kind: provisioning.OperationCompleted, Node: e.Key.Node, Attempt: e.Key.Attempt,
		Completion: provisioning.Completion{Operation: e.Operation, Kind: e.Kind, Lease: "lease", Endpoint: &provisioning.SSHEndpoint{}, Session: "session"}})
	return false, nil
}
func (x drExecutor) Expire(id provisioning.OperationID) provisioning.Completion {
	panic(fmt.Sprintf("%v expires, and nothing takes time", id))
}
func (x drExecutor) Retire(provisioning.NodeAttemptID)   {}
func (x drExecutor) Running() []provisioning.RunningCall { return nil }

// drNew makes a driver whose slots all bootstrap, each with a deadline of its
// own, and want nothing but the join.
func drNew(t *testing.T) *provisioning.ClusterDriver {
	driver, err := provisioning.NewClusterDriver(drShape(1, 1, 0), provisioning.Config{})
	require.NoError(t, err)
	for i := range drSlots {
		require.NoError(t, driver.UpdateDesired(drShape(uint64(i+1), i+1, 0)))
		_, err = driver.DriveUntilBlocked(drBase.Add(time.Duration(i)*time.Minute), drExecutor{driver})
		require.NoError(t, err)
		id := provisioning.NewLogicalNodeID("w", i)
		driver.Deliver(provisioning.Observation{Kind: provisioning.BootstrapProgress, Node: id, Attempt: provisioning.NodeAttemptID(i + 1),
			Session: "session", Stage: provisioning.BootstrapStageConverged})
	}
	_, err = driver.DriveUntilBlocked(drNow, drExecutor{driver})
	require.NoError(t, err)
	return driver
}

// drNow is the time of all that is concurrent: before any deadline.
var drNow = drBase.Add(drSlots * time.Minute)

// drClient does what its random numbers say and writes it down.
func drClient(id int, start time.Time, d drCluster, x provisioning.EffectExecutor, random *rand.Rand) (seen []porcupine.Operation) {
	now := func() int64 { return time.Since(start).Nanoseconds() }
	for range drPerTime {
		in := drInput{kind: drKind(random.IntN(int(drPass))), generation: drSlots + uint64(random.IntN(4)), content: random.IntN(2), slot: random.IntN(drSlots)}
		switch random.IntN(4) { // more of what changes something
		case 0:
			in.kind = drPass
		case 1:
			in.kind = drJoin
		}
		for range random.IntN(4) {
			runtime.Gosched()
		}
		var out drOutput
		ran := false
		call := now()
		switch in.kind {
		case drUpdate:
			out.refusal = d.UpdateDesired(drShape(in.generation, drSlots, in.content))
		case drJoin:
			d.Deliver(provisioning.Observation{Kind: provisioning.SwactorJoined, Node: provisioning.NewLogicalNodeID("w", in.slot),
				Attempt: provisioning.NodeAttemptID(in.slot + 1), Session: "session", Swactor: "agent"})
		case drWish:
			out.generation = d.Generation()
		case drObserved:
			out.generation = d.ObservedGeneration()
		case drConverged:
			out.is = d.Converged(in.generation)
		case drProgress:
			out.ready, _ = d.Progress()
		case drRequeue:
			out.due = drSlots
			if at, some := d.RequeueAt(); some {
				out.due = int(at.Sub(drBase)/time.Minute) % 30 // a bootstrap has 30 minutes
			}
		case drSnapshot:
			out = drRead(d.Snapshot())
		case drPass:
			ran, out.refusal = d.DriveNext(drNow, x)
		}
		end := now()
		if !ran {
			seen = append(seen, porcupine.Operation{ClientId: id, Input: in, Call: call, Output: out, Return: end})
			continue
		}
		for step := drIdle; step <= drSaid; step++ {
			seen = append(seen, porcupine.Operation{ClientId: id, Input: drInput{kind: drStep, step: step}, Call: call, Output: drOutput{}, Return: end})
		}
	}
	return seen
}

func drRead(state *provisioning.ClusterState) drOutput {
	out := drOutput{generation: state.ObservedGeneration}
	for node := range state.All() {
		out.joined[node.Record.Index] = node.Record.Ready
	}
	return out
}

func drPlay(t *testing.T, seed uint64, wrap func(drCluster) drCluster) (history []porcupine.Operation) {
	driver := drNew(t)
	cluster, executor, start := wrap(driver), drExecutor{driver}, time.Now()
	var wait sync.WaitGroup
	var seen [4][]porcupine.Operation
	for i := range seen {
		wait.Go(func() { seen[i] = drClient(i, start, cluster, executor, rand.New(rand.NewPCG(seed, uint64(i)))) })
	}
	wait.Wait()
	for _, of := range seen {
		history = append(history, of...)
	}
	return history
}

// TestDriverHasOneOrder: for every history of a driver there is an order in which
// it all happened one after the other.
func TestDriverHasOneOrder(t *testing.T) {
	var played, beside, passes, reentrant, refused, accepted, converged, halfway int
	for i := range histories() {
		seed := verify.Seed() + uint64(i)
		history := drPlay(t, seed, func(d drCluster) drCluster { return d })
		if !porcupine.CheckOperations(drModel, history) {
			t.Fatalf("seed %d: there is no order for\n%s", seed, tell(drModel, history))
		}
		played++
		if concurrent(history) {
			beside++
		}
		for _, o := range history {
			in, out := o.Input.(drInput), o.Output.(drOutput)
			switch {
			case in.kind == drStep && in.step == drIdle:
				passes++
			case in.kind == drPass && out.refusal != nil:
				reentrant++
			case in.kind == drUpdate && out.refusal != nil:
				refused++
			case in.kind == drUpdate:
				accepted++
			case in.kind == drConverged && out.is:
				converged++
			case in.kind == drSnapshot && out.joined != [drSlots]bool{}:
				halfway++
			}
		}
	}
	verify.AtLeast(t, "histories of drivers", played, verify.Target(10_000, 300))
	verify.AtLeast(t, "of which clients act at the same time", beside, verify.Target(1000, 30))
	verify.AtLeast(t, "passes in them", passes, verify.Target(10_000, 300))
	verify.AtLeast(t, "updates accepted", accepted, verify.Target(5000, 150))
	verify.AtLeast(t, "updates refused", refused, verify.Target(1000, 30))
	verify.AtLeast(t, "snapshots with joins", halfway, verify.Target(1000, 30))
	verify.Note(t, "passes refused beside another", reentrant)
	verify.Note(t, "found converged", converged)
}

// drStale is a driver whose snapshots are kept and shown again.
type drStale struct {
	drCluster
	mu    sync.Mutex
	kept  *provisioning.ClusterState
	shown int
}

func (d *drStale) Snapshot() *provisioning.ClusterState {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.shown++; d.shown%2 == 1 {
		d.kept = d.drCluster.Snapshot()
	}
	return d.kept
}

// drTimid is a driver that lets a wish go back.
type drTimid struct{ drCluster }

func (d drTimid) UpdateDesired(shape provisioning.ClusterShape) error {
	err := d.drCluster.UpdateDesired(shape)
	if errors.Is(err, provisioning.ErrGenerationRegressed) {
		return nil
	}
	return err
}

// TestDriverHistoriesCanFail: what goes back is found.
func TestDriverHistoriesCanFail(t *testing.T) {
	for name, wrap := range map[string]func(drCluster) drCluster{
		"a snapshot goes back":     func(d drCluster) drCluster { return &drStale{drCluster: d} },
		"a lower wish is accepted": func(d drCluster) drCluster { return drTimid{d} },
	} {
		t.Run(name, func(t *testing.T) {
			for i := range 10_000 {
				if !porcupine.CheckOperations(drModel, drPlay(t, verify.Seed()+uint64(i), wrap)) {
					return
				}
			}
			t.Error("nobody notices")
		})
	}
}
