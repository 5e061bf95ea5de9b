package provisioning

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/swactor/provisioning/internal/verify"
)

// Slots share nothing but the allocator of attempts, the wish and RequeueAt. So
// what the exhaustive search shows of one slot is true of any number of them.

// exReached are the nodes of all worlds of one slot with at most one fault,
// each once.
var exReached = sync.OnceValue(func() []exNode {
	s := exNewSearch(exModel{class: exToken, slots: 1, maxFaults: 1, maxHeld: 1})
	if v := s.run(); v != nil {
		panic(s.tell(v))
	}
	seen := map[exNode]bool{}
	var nodes []exNode
	for _, code := range s.codes {
		if n := code.decode(1).slots[0].node; !seen[n] {
			seen[n] = true
			nodes = append(nodes, n)
		}
	}
	return nodes
})

// inSlot is one slot of the cluster: where it is, what it is, what is delivered
// to it, and how the executor treats it.
type inSlot struct {
	group   NodeGroupID
	index   int
	attempt NodeAttemptID
	node    exNode
	wanted  bool
	brings  []Observation // of slot 0 of the search
	refused bool
	expired FailureClass
}

func inShape(group NodeGroupID, count int) NodeGroupSpec {
	return NodeGroupSpec{GroupID: group, Count: count, Shape: NodeShape{Image: exImage}}
}

// placed returns the node of a slot under a name.
func (s *inSlot) placed(index int) *node {
	n := s.node.real(0)
	spec := inShape(s.group, 0)
	spec.Shape.Image = string(n.template.spec.Shape.Image)
	n.template = newTemplate("run", spec)
	n.id, n.index, n.attempt = NewLogicalNodeID(s.group, index), int32(index), s.attempt
	for i := range n.held { // the slice is the node's own
		n.held[i] = s.addressed(n.held[i], index)
	}
	return n
}

func (s *inSlot) addressed(o Observation, index int) Observation {
	o.Node, o.Attempt = NewLogicalNodeID(s.group, index), s.attempt
	if o.Kind == OperationCompleted {
		o.Completion.Operation.Attempt = s.attempt
	}
	return o
}

func inDrawSlot(t *rapid.T, group NodeGroupID, index int, attempt NodeAttemptID, wanted bool) inSlot {
	s := inSlot{group: group, index: index, attempt: attempt, wanted: wanted,
		node:    rapid.SampledFrom(exReached()).Draw(t, "node"),
		refused: rapid.IntRange(0, 3).Draw(t, "refused") == 0,
		expired: rapid.SampledFrom([]FailureClass{ClassAmbiguous, ClassNotStarted}).Draw(t, "expired")}
	if !s.node.there {
		return s
	}
	for range rapid.IntRange(0, 2).Draw(t, "observations") {
		var o Observation
		switch kind := rapid.IntRange(0, 3).Draw(t, "observation"); {
		case kind == 0:
			o = Observation{Kind: NodeLost}
		case kind < 3 && s.node.pending != NoOperation:
			o = Observation{Kind: OperationCompleted, Completion: Completion{Operation: OperationID{1, 1}, Kind: s.node.pending,
				Class: FailureClass(rapid.IntRange(0, int(failureClasses)-1).Draw(t, "class"))}}
			if o.Completion.Class == ClassNone {
				o.Completion.Lease, o.Completion.Endpoint, o.Completion.Session = exLease, exEndpoint, exSessionID(exNewest)
			}
		default:
			o = exObservation(0, exSaid(rapid.IntRange(0, int(exSayings)-1).Draw(t, "report")), exNewest)
		}
		s.brings = append(s.brings, o)
	}
	return s
}

// inExecutor accepts or refuses by slot and keeps what it was asked.
type inExecutor struct {
	slots   map[NodeAttemptID]*inSlot
	effects map[NodeAttemptID]Effect
	retired map[NodeAttemptID]bool
}

func inNewExecutor(slots []inSlot) *inExecutor {
	x := &inExecutor{slots: map[NodeAttemptID]*inSlot{}, effects: map[NodeAttemptID]Effect{}, retired: map[NodeAttemptID]bool{}}
	for i := range slots {
		x.slots[slots[i].attempt] = &slots[i]
	}
	return x
}

func (x *inExecutor) Submit(e Effect) (bool, error) {
	x.effects[e.Operation.Attempt] = e
	if x.slots[e.Operation.Attempt].refused {
		return false, errors.New("refused")
	}
	return false, nil
}

func (x *inExecutor) Expire(id OperationID) Completion {
	s := x.slots[id.Attempt]
	return Completion{Operation: id, Kind: s.node.pending, Class: s.expired}
}

func (x *inExecutor) Retire(attempt NodeAttemptID) { x.retired[attempt] = true }
func (x *inExecutor) Running() []RunningCall       { return nil }

// inAnonymous takes the name and the attempt out of a node.
func inAnonymous(m ManagedNode) ManagedNode {
	m.Attempt = 0
	m.Record.Node, m.Record.Index = "", 0
	m.Record.Spec.Node, m.Record.Spec.Index, m.Record.Spec.SwarmJoin.ExpectedLogicalNodeID = "", 0, ""
	if m.Pending != nil {
		m.Pending.ID.Attempt = 0
	}
	for i := range m.Held {
		m.Held[i].Node, m.Held[i].Attempt = "", 0
	}
	return m
}

func inAnonymousEffect(e Effect) Effect {
	e.Operation.Attempt, e.Key.Attempt, e.Key.Node, e.index = 0, 0, "", 0
	return e
}

// TestProp_G10SlotsAreIndependent: what a pass makes of a slot among others is
// what it makes of it alone under another name, whatever all of them go
// through; and the plan of all is the plans of each.
func TestProp_G10SlotsAreIndependent(t *testing.T) {
	compared := 0
	rapid.Check(t, func(t *rapid.T) {
		var slots []inSlot
		shape := ClusterShape{RunID: "run", Generation: exGeneration}
		state := &ClusterState{NextAttemptID: 100}
		for _, group := range []NodeGroupID{"a", "b"} {
			count := rapid.IntRange(0, 4).Draw(t, "count")
			shape.Groups = append(shape.Groups, inShape(group, count))
			for index := range count + rapid.IntRange(0, 2).Draw(t, "unwanted") {
				s := inDrawSlot(t, group, index, NodeAttemptID(len(slots)+1), index < count)
				slots = append(slots, s)
				if s.node.there {
					state.add(state.groupFor(group), s.placed(index))
				}
			}
		}
		desired, err := Expand(shape)
		require.NoError(t, err)

		// The plan of all.
		plan := Decide(state, desired, exNow)
		require.Empty(t, plan.Faults)
		next, actions := NodeAttemptID(100), plan.Actions
		var wake time.Time
		for i := range slots {
			s := &slots[i]
			var alone *ManagedNode
			if s.node.there {
				m, _ := state.Node(NewLogicalNodeID(s.group, s.index))
				alone = &m
			} else if !s.wanted {
				continue
			}
			d := DecideNode(alone, dtWish(desired, NewLogicalNodeID(s.group, s.index)), exNow)
			if alone != nil {
				for _, at := range []time.Time{d.Until, exIf(alone.Intent == Active && !alone.Record.Ready, alone.Retry.StageDeadline)} {
					if at.After(exNow) && (wake.IsZero() || at.Before(wake)) {
						wake = at
					}
				}
			}
			if d.Action == NoAction {
				continue
			}
			require.NotEmpty(t, actions)
			a := actions[0]
			actions = actions[1:]
			require.Equal(t, []any{NewLogicalNodeID(s.group, s.index), d.Rule, d.Action, d.Operation}, []any{a.Node, a.Rule, a.Kind, a.Operation})
			if d.Action == Insert || d.Action == Restart {
				require.Equal(t, next, a.NewAttempt)
				next++
			}
		}
		require.Empty(t, actions)
		require.True(t, wake.Equal(plan.RequeueAt), "RequeueAt is %v, not %v", plan.RequeueAt, wake)

		// A pass over all.
		all := newDriverOn(state, desired, exConfig)
		together := inNewExecutor(slots)
		for turn := range 2 { // the observations of different slots mixed
			for i := range slots {
				if turn < len(slots[i].brings) {
					all.Deliver(slots[i].addressed(slots[i].brings[turn], slots[i].index))
				}
			}
		}
		_, err = all.DriveNext(exNow, together)
		require.NoError(t, err)

		// A pass over each.
		begun := NodeAttemptID(0)
		for i := range slots {
			s := &slots[i]
			lone := &ClusterState{NextAttemptID: 100}
			if s.node.there {
				lone.add(lone.groupFor(s.group), s.placed(0))
			}
			wish, err := Expand(ClusterShape{RunID: "run", Generation: exGeneration, Groups: []NodeGroupSpec{inShape(s.group, exIf(s.wanted, 1))}})
			require.NoError(t, err)
			single := newDriverOn(lone, wish, exConfig)
			for _, o := range s.brings {
				single.Deliver(s.addressed(o, 0))
			}
			apart := inNewExecutor(slots[i : i+1])
			_, err = single.DriveNext(exNow, apart)
			require.NoError(t, err)

			a, there := all.Node(NewLogicalNodeID(s.group, s.index))
			b, lives := single.Node(NewLogicalNodeID(s.group, 0))
			require.Equal(t, lives, there, "slot %d", i)
			if lives {
				require.Equal(t, inAnonymous(b), inAnonymous(a), "slot %d", i)
			}
			if b.Attempt == 100 { // the allocator is shared: in slot order
				require.Equal(t, 100+begun, a.Attempt)
				begun++
			}
			require.Equal(t, apart.retired[s.attempt], together.retired[s.attempt])
			asked, did := apart.effects[s.attempt]
			among, does := together.effects[s.attempt]
			require.Equal(t, did, does, "slot %d", i)
			if did {
				require.True(t, inAnonymousEffect(asked).Equal(inAnonymousEffect(among)), "%v, not %v", among, asked)
			}
			compared++
		}
		require.Equal(t, 100+begun, all.state.NextAttemptID)
		require.NoError(t, all.state.Check())
	})
	verify.AtLeast(t, "passes of a slot among others and alone", compared, verify.Target(50_000, 0))
}
