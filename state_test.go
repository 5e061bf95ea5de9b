package provisioning

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// ftNow is the moment at which the tests of deciding and folding look.
var ftNow = time.Date(2031, 5, 6, 7, 8, 9, 10, time.UTC)

func ftAfter(d time.Duration) time.Time { return ftNow.Add(d) }

const (
	ftAttempt      NodeAttemptID      = 7
	ftSession      BootstrapSessionID = "session-7"
	ftLease        ProviderLeaseID    = "lease-7"
	ftNextSequence                    = 4 // the next sequence of a node made by ftNode
)

var ftEndpoint = SSHEndpoint{Host: "192.0.2.7", Port: 22}

func ftSpec(group NodeGroupID, index int, image string) *LogicalNodeSpec {
	spec := newTemplate("r", NodeGroupSpec{GroupID: group, Shape: NodeShape{Image: image}}).slot(index)
	return &spec
}

// ftWanted is the spec that nodes made by ftNode are built from, ftDrifted is
// what somebody wishes instead.
var ftWanted, ftDrifted = ftSpec("w", 0, "v1"), ftSpec("w", 0, "v2")

// ftNode is a fresh attempt of slot w-0, changed by edits.
func ftNode(edits ...func(*ManagedNode)) ManagedNode {
	m := ManagedNode{
		Attempt: ftAttempt, NextSequence: ftNextSequence,
		Record: NodeRecord{Node: "w-0", Group: "w", Index: 0, Spec: *ftWanted},
	}
	for _, edit := range edits {
		edit(&m)
	}
	return m
}

// The edits of ftNode. Those named after a stage bring everything that a node
// of that stage has.

func ftRequested(m *ManagedNode) {
	m.Record.Stage = StageLeaseRequested
	m.Retry.CreatesSent, m.Retry.LastCreateAt = 1, ftAfter(-20*time.Second)
}

func ftLeased(m *ManagedNode) {
	ftRequested(m)
	m.Record.Stage, m.Record.Lease = StageLeaseCreated, ftLease
	m.Retry.StageDeadline = ftAfter(5 * time.Minute)
}

func ftReachable(m *ManagedNode) {
	ftLeased(m)
	m.Record.Stage, m.Record.Connection = StageEndpointKnown, new(ftEndpoint)
	m.Retry.StageDeadline = ftAfter(20 * time.Minute)
}

func ftRunning(m *ManagedNode) {
	ftReachable(m)
	m.Record.Stage, m.ActiveBootstrap = StageBootstrapRunning, ftSession
	m.Record.Bootstrap = BootstrapFacts{Session: ftSession, LastStage: BootstrapStageSSHReady, LastStdoutSequence: 10,
		LastStderrSequence: 5, LastObservedAt: ftAfter(-10 * time.Second)}
}

func ftJoined(m *ManagedNode) {
	ftRunning(m)
	m.Record.Stage = StageSwactorJoined
	m.Record.Swactor = SwactorFacts{ID: "agent-7", JoinedAt: ftAfter(-5 * time.Second)}
}

func ftReady(m *ManagedNode) {
	ftJoined(m)
	m.Record.Stage, m.Record.Ready, m.ActiveBootstrap = StageDormant, true, ""
	m.Record.ReadyAt, m.Record.Swactor.HandedOffAt = ftAfter(-time.Second), ftAfter(-time.Second)
	m.Retry.StageDeadline = time.Time{}
}

// ftFailed: the attempt has failed and is not yet being deleted.
func ftFailed(m *ManagedNode) {
	m.Record.Stage, m.Record.Ready = StageFailed, false
	m.Record.FailedReason, m.Record.FailedAt, m.Retry.LastError = "the first failure", ftAfter(-time.Second), "the first failure"
	m.Retry.LastFailureAt = ftAfter(-time.Second)
	m.Retry.RestartAt = ftAfter(3 * time.Second)
	m.Retry.NextEffectAt, m.Retry.StageDeadline = time.Time{}, time.Time{}
	m.Retry.ConsecutiveFailures++
}

func ftDeleting(m *ManagedNode) {
	m.Intent, m.Record.Ready = Deleting, false
	m.Retry.NextEffectAt, m.Retry.StageDeadline, m.Held = time.Time{}, time.Time{}, nil
}

func ftDestroyed(m *ManagedNode) {
	ftDeleting(m)
	m.Record.Stage, m.Record.DestroyedAt = StageDestroyed, ftAfter(-time.Second)
	m.Record.Lease, m.Record.Connection, m.ActiveBootstrap, m.Pending = "", nil, "", nil
	m.Retry.Ambiguous = NoOperation
}

func ftPending(kind OperationKind) func(*ManagedNode) {
	return func(m *ManagedNode) {
		m.Pending = &PendingOperation{ID: OperationID{Attempt: m.Attempt, Sequence: m.NextSequence - 1}, Kind: kind, Deadline: ftAfter(time.Minute)}
	}
}

// ftResolving: the pending operation was dispatched by resolve-ambiguous.
func ftResolving(m *ManagedNode) {
	m.Pending.Resolving = true
	m.Retry.Ambiguous = m.Pending.Kind
}

func ftAmbiguous(kind OperationKind) func(*ManagedNode) {
	return func(m *ManagedNode) { m.Retry.Ambiguous = kind }
}

func ftStage(stage Stage) func(*ManagedNode) { return func(m *ManagedNode) { m.Record.Stage = stage } }

func ftBackingOff(d time.Duration) func(*ManagedNode) {
	return func(m *ManagedNode) { m.Retry.NextEffectAt = ftAfter(d) }
}

func ftRestartIn(d time.Duration) func(*ManagedNode) {
	return func(m *ManagedNode) { m.Retry.RestartAt = ftAfter(d) }
}

func ftStageDeadlineIn(d time.Duration) func(*ManagedNode) {
	return func(m *ManagedNode) { m.Retry.StageDeadline = ftAfter(d) }
}

func ftFailures(failures, cleanup uint32) func(*ManagedNode) {
	return func(m *ManagedNode) { m.Retry.ConsecutiveFailures, m.Retry.CleanupFailures = failures, cleanup }
}

// ftMove puts a node into another slot and attempt.
func ftMove(m ManagedNode, group NodeGroupID, index int, attempt NodeAttemptID) ManagedNode {
	m.Attempt = attempt
	m.Record.Group, m.Record.Index, m.Record.Node = group, index, NewLogicalNodeID(group, index)
	m.Record.Spec = *ftSpec(group, index, m.Record.Spec.Shape.Image)
	if m.Pending != nil {
		pending := *m.Pending
		pending.ID.Attempt = attempt
		m.Pending = &pending
	}
	return m
}

func ftImport(t require.TestingT, m ManagedNode) *node {
	n, err := importNode(&m, nil)
	require.NoError(t, err)
	return n
}

func ftState(t require.TestingT, nodes ...ManagedNode) *ClusterState {
	next := NodeAttemptID(1)
	for i := range nodes {
		next = max(next, nodes[i].Attempt+1)
	}
	s, err := NewClusterState(3, next, nodes...)
	require.NoError(t, err)
	return s
}

func ftJSON(t require.TestingT, s *ClusterState) string {
	data, err := json.Marshal(s)
	require.NoError(t, err)
	return string(data)
}

// ftDrawTime draws a moment an instant can express, in any zone; one in four is
// unset where that is allowed.
func ftDrawTime(t *rapid.T, label string, mayBeUnset bool) time.Time {
	first, last := instant(1).time(), maxInstant.time()
	at := rapid.OneOf(
		rapid.SampledFrom([]time.Time{first, last, time.Unix(0, 0), time.Unix(0, -1), ftNow}),
		rapid.Custom(func(t *rapid.T) time.Time { return ftAfter(time.Duration(rapid.Int64Range(-1e12, 1e12).Draw(t, "ns"))) }),
		rapid.Custom(func(t *rapid.T) time.Time {
			return instant(rapid.Int64Range(1, math.MaxInt64).Draw(t, "instant")).time()
		}),
	).Draw(t, label)
	if mayBeUnset && rapid.IntRange(0, 3).Draw(t, "set") == 0 {
		return time.Time{}
	}
	if rapid.Bool().Draw(t, "elsewhere") {
		return at.In(time.FixedZone("elsewhere", 5*3600+1800))
	}
	return at.UTC()
}

// ftDrawNode draws a node of a lawful state: it satisfies S2 to S8, and S1 if
// attempts differ.
func ftDrawNode(t *rapid.T, spec LogicalNodeSpec, attempt NodeAttemptID) ManagedNode {
	text := rapid.OneOf(rapid.Just("plain"), rapid.String())
	count := rapid.OneOf(rapid.Uint32Range(0, 6), rapid.Just[uint32](math.MaxUint32))
	chance := func(label string) bool { return rapid.Bool().Draw(t, label) }

	m := ManagedNode{Attempt: attempt, NextSequence: rapid.OneOf(rapid.Uint64Range(2, 20), rapid.Uint64Min(math.MaxUint64-1030)).Draw(t, "next sequence")}
	m.Record = NodeRecord{Node: spec.Node, Group: spec.GroupID, Index: spec.Index, Spec: spec}
	r, retry := &m.Record, &m.Retry
	retry.ConsecutiveFailures = count.Draw(t, "failures")
	retry.FailuresBeforeReady = count.Draw(t, "failures before ready")
	retry.LastError, retry.LastFailureAt = text.Draw(t, "last error"), ftDrawTime(t, "last failure", true)
	retry.CreatesSent, retry.LastCreateAt = count.Draw(t, "creates"), ftDrawTime(t, "last create", true)
	retry.NextEffectAt = ftDrawTime(t, "next effect", true)
	session := BootstrapSessionID("s" + text.Draw(t, "session"))

	r.Stage = rapid.SampledFrom([]Stage{StageNew, StageLeaseRequested, StageLeaseCreated, StageEndpointKnown,
		StageBootstrapRunning, StageSwactorJoined, StageDormant, StageHandedOff}).Draw(t, "stage")
	var growth OperationKind
	switch r.Stage {
	case StageNew, StageLeaseRequested:
		growth = CreateLease
	case StageLeaseCreated:
		growth = LookupEndpoint
	case StageEndpointKnown:
		growth = StartBootstrap
	default:
		growth = BootstrapConvergenceObserved
	}
	if r.Stage >= StageLeaseCreated {
		r.Lease = ProviderLeaseID("l" + text.Draw(t, "lease"))
		retry.StageDeadline = ftDrawTime(t, "stage deadline", true)
	}
	if r.Stage >= StageEndpointKnown {
		r.Connection = &SSHEndpoint{Host: text.Draw(t, "host"), Port: rapid.Uint16().Draw(t, "port")}
	}
	if r.Stage >= StageBootstrapRunning {
		m.ActiveBootstrap = session
		r.Bootstrap = BootstrapFacts{Session: session, LastStage: rapid.SampledFrom([]BootstrapStage{BootstrapStageCreated,
			BootstrapStageConverged, BootstrapStageStreamError}).Draw(t, "bootstrap stage"),
			LastStdoutSequence: rapid.Uint64().Draw(t, "stdout"), LastStderrSequence: rapid.Uint64().Draw(t, "stderr"),
			LastObservedAt: ftDrawTime(t, "observed", false)}
	}
	if r.Stage >= StageSwactorJoined {
		r.Swactor = SwactorFacts{ID: SwactorID(text.Draw(t, "agent")), JoinedAt: ftDrawTime(t, "joined", false)}
	}
	if r.Stage == StageDormant || r.Stage == StageHandedOff {
		m.ActiveBootstrap = ""
		r.Ready, r.ReadyAt, r.Swactor.HandedOffAt = true, ftDrawTime(t, "ready", false), ftDrawTime(t, "handed off", false)
		retry.ConsecutiveFailures, retry.StageDeadline = 0, time.Time{}
	}
	if !r.Ready && (growth == CreateLease || growth == StartBootstrap) && chance("ambiguous") {
		retry.Ambiguous = growth
	}
	pend := func(kind OperationKind, resolving bool) {
		m.Pending = &PendingOperation{ID: OperationID{Attempt: attempt, Sequence: rapid.Uint64Range(1, m.NextSequence-1).Draw(t, "sequence")},
			Kind: kind, Resolving: resolving, Deadline: ftDrawTime(t, "operation deadline", false)}
	}
	if growth != BootstrapConvergenceObserved || r.Stage != StageBootstrapRunning {
		if chance("pending") {
			pend(growth, false)
		}
	}
	if (m.Pending != nil && growth == StartBootstrap || retry.Ambiguous == StartBootstrap) && chance("held") {
		for range rapid.IntRange(1, maxHeld).Draw(t, "how many held") {
			m.Held = append(m.Held, Observation{Kind: rapid.SampledFrom([]ObservationKind{BootstrapProgress, SwactorJoined, BootstrapFailed,
				BootstrapClosed}).Draw(t, "held"), Node: r.Node, Attempt: attempt, Session: session, Swactor: "agent",
				Reason: text.Draw(t, "reason"), StdoutSequence: rapid.Uint64().Draw(t, "line")})
		}
	}
	if chance("failed") {
		r.Stage, r.Ready, r.FailedReason, r.FailedAt = StageFailed, false, "because "+text.Draw(t, "reason"), ftDrawTime(t, "failed", false)
		retry.RestartAt = ftDrawTime(t, "restart", false)
		retry.NextEffectAt, retry.StageDeadline = time.Time{}, time.Time{}
	}
	if chance("deleting") {
		m.Intent, r.Ready, retry.StageDeadline, m.Held = Deleting, false, time.Time{}, nil
		retry.CleanupFailures, retry.CancelsFailed = count.Draw(t, "cleanup failures"), count.Draw(t, "cancels failed")
		if m.Pending == nil {
			cleanup := decide(ftImport(t, m), nil, maxInstant)
			if cleanup.action == Dispatch && chance("cleaning up") {
				pend(cleanup.operation, cleanup.Number == ruleResolve)
			}
		}
		if chance("given up") {
			retry.GivenUp = rapid.SampledFrom([]OperationKind{CancelBootstrap, StartBootstrap}).Draw(t, "what")
		}
		if chance("destroyed") {
			r.Stage, r.DestroyedAt = StageDestroyed, ftDrawTime(t, "destroyed at", false)
			r.Lease, r.Connection, m.ActiveBootstrap, m.Pending, retry.Ambiguous = "", nil, "", nil, NoOperation
		}
	}
	return m
}

// ftDrawGroups draws group specs that share little.
func ftDrawGroups(t *rapid.T) []NodeGroupSpec {
	text := rapid.OneOf(rapid.SampledFrom([]string{"", "a", "b"}), rapid.String())
	// JSON does not tell an empty map from none, and a spec need not (Equal).
	texts := rapid.OneOf(rapid.Just[map[string]string](nil), rapid.MapOfN(text, text, 1, 3))
	list := rapid.OneOf(rapid.Just[[]string](nil), rapid.SliceOfN(text, 1, 2))
	mounts := rapid.SampledFrom([][]Mount{nil, {{Source: "/a", Target: "/b"}, {Source: "/c", Target: "/d", ReadOnly: true}}})
	float := rapid.SampledFrom([]*float64{nil, new(0.0), new(math.Copysign(0, -1)), new(1.5), new(math.MaxFloat64)})
	var groups []NodeGroupSpec
	for _, id := range []NodeGroupID{"v", "w", "w-1"} {
		groups = append(groups, NodeGroupSpec{
			GroupID: id, Count: rapid.IntRange(0, 12).Draw(t, "count"), Role: RoleID(text.Draw(t, "role")), Provider: ProviderKind(text.Draw(t, "provider")),
			Shape:     NodeShape{Image: text.Draw(t, "image"), MinGPURAMMB: float.Draw(t, "float"), ProviderLabels: texts.Draw(t, "labels")},
			Boot:      BootSpec{Env: texts.Draw(t, "env"), Args: list.Draw(t, "args"), Mounts: mounts.Draw(t, "mounts")},
			SwarmJoin: SwarmJoinTemplate{OrchSwactorAddr: text.Draw(t, "address"), JoinTokenRef: text.Draw(t, "token")},
		})
	}
	return groups
}

// ftDrawNodes draws the nodes of a lawful state, in any order. Some groups are built from another spec than groups says.
func ftDrawNodes(t *rapid.T, groups []NodeGroupSpec) []ManagedNode {
	var nodes []ManagedNode
	attempt := NodeAttemptID(0)
	for _, g := range groups {
		if rapid.IntRange(0, 3).Draw(t, "drifted") == 0 {
			g.Shape.Image += "'"
		}
		built := newTemplate("r", g)
		for _, index := range rapid.SliceOfNDistinct(rapid.IntRange(0, 12), 0, 4, rapid.ID[int]).Draw(t, "indices") {
			attempt += NodeAttemptID(rapid.IntRange(1, 3).Draw(t, "attempt"))
			nodes = append(nodes, ftDrawNode(t, built.slot(index), attempt))
		}
	}
	return rapid.Permutation(nodes).Draw(t, "order")
}

func ftDrawState(t *rapid.T, groups []NodeGroupSpec) *ClusterState {
	s := ftState(t, ftDrawNodes(t, groups)...)
	require.NoError(t, s.Check(), "the generator draws lawful states")
	return s
}

func TestProp_StateJSONRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := ftDrawState(t, ftDrawGroups(t))
		text := ftJSON(t, s)
		var back ClusterState
		require.NoError(t, json.Unmarshal([]byte(text), &back))
		require.Equal(t, text, ftJSON(t, &back), "byte for byte")
		require.Equal(t, slices.Collect(s.All()), slices.Collect(back.All()))
		require.Equal(t, s.ObservedGeneration, back.ObservedGeneration)
		require.Equal(t, s.NextAttemptID, back.NextAttemptID)
		require.NoError(t, back.Check())
	})
}

// What a node is exported as builds the same node again, whatever the zone its
// times came in, and in whatever order nodes are given.
func TestProp_ExportAndImportAreInverse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := ftDrawNodes(t, ftDrawGroups(t))
		s := ftState(t, nodes...)
		require.Equal(t, len(nodes), s.Len())
		for _, m := range nodes {
			exported, ok := s.Node(m.Record.Node)
			require.True(t, ok)
			require.Equal(t, ftUTC(m), exported)
			again := ftImport(t, exported)
			require.Equal(t, exported, again.export())
		}
		slices.SortFunc(nodes, func(a, b ManagedNode) int {
			return CompareSlots(a.Record.Group, a.Record.Index, b.Record.Group, b.Record.Index)
		})
		require.Equal(t, ftJSON(t, ftState(t, nodes...)), ftJSON(t, s), "the order of the arguments is no part of a state")
	})
}

// ftUTC is m with every time in UTC.
func ftUTC(m ManagedNode) ManagedNode {
	for _, at := range []*time.Time{&m.Record.Bootstrap.LastObservedAt, &m.Record.Swactor.JoinedAt, &m.Record.Swactor.HandedOffAt,
		&m.Record.FailedAt, &m.Record.ReadyAt, &m.Record.DestroyedAt, &m.Retry.NextEffectAt, &m.Retry.RestartAt,
		&m.Retry.StageDeadline, &m.Retry.LastCreateAt, &m.Retry.LastFailureAt} {
		*at = at.UTC()
	}
	if m.Pending != nil {
		pending := *m.Pending
		pending.Deadline = pending.Deadline.UTC()
		m.Pending = &pending
	}
	return m
}

// Every field survives, also one that is added tomorrow.
func TestStateJSONKeepsEveryField(t *testing.T) {
	node := filled[ManagedNode](t)
	node.Record.Node, node.Record.Group, node.Record.Index = "w-3", "w", 3
	node.Record.Spec.GroupID, node.Record.Spec.Node, node.Record.Spec.Index = "w", "w-3", 3
	node.Record.Spec.SwarmJoin.ExpectedLogicalNodeID = "w-3"
	node.Attempt, node.Pending.ID = 3, OperationID{Attempt: 3, Sequence: 3}
	node.Intent, node.Retry.Ambiguous = Deleting, StartBootstrap
	for i := range node.Held {
		node.Held[i].Kind, node.Held[i].Node, node.Held[i].Attempt = BootstrapFailed, "w-3", 3
	}
	s, err := NewClusterState(3, 4, node)
	require.NoError(t, err)
	exported, _ := s.Node("w-3")
	require.Equal(t, node, exported)

	data, err := json.Marshal(exported)
	require.NoError(t, err)
	var back ManagedNode
	require.NoError(t, json.Unmarshal(data, &back))
	require.Equal(t, node, back)
}

func TestStateOrder(t *testing.T) {
	var nodes []ManagedNode
	for i, slot := range []slotName{{"w-1", 0}, {"w", 10}, {"v", 2}, {"w", 9}, {"w", 0}} {
		nodes = append(nodes, ftMove(ftNode(), slot.group, slot.index, NodeAttemptID(i+1)))
	}
	s := ftState(t, nodes...)
	var names []LogicalNodeID
	for m := range s.All() {
		names = append(names, m.Record.Node)
	}
	require.Equal(t, []LogicalNodeID{"v-2", "w-0", "w-9", "w-10", "w-1-0"}, names, "by group, then by index as a number")
	for m := range s.All() { // who stops early is heard
		require.Equal(t, LogicalNodeID("v-2"), m.Record.Node)
		break
	}
	_, found := s.Node("w-1")
	require.False(t, found)
	require.Nil(t, s.group("nobody"))
	require.Equal(t, 5, s.Len())

	places := 0
	for i, g := range s.groups {
		require.Equal(t, i, g.rank)
		for index, n := range g.nodes {
			if n != nil {
				require.Equal(t, index, int(n.index))
				require.Same(t, g, n.group)
				require.Same(t, n, s.find(n.id))
				places++
			}
		}
	}
	require.Equal(t, s.Len(), places)
}

type slotName struct {
	group NodeGroupID
	index int
}

// TestStateOfManyGroups: a state makes its groups in order, whatever the order of
// the nodes, and has room for so many slots in all.
func TestStateOfManyGroups(t *testing.T) {
	s := ftState(t, ftMove(ftNode(), "c", 0, 1), ftMove(ftNode(), "a", 1, 2), ftMove(ftNode(), "b", 0, 3), ftMove(ftNode(), "a", 0, 4))
	require.Equal(t, []NodeGroupID{"a", "b", "c"}, slices.Collect(idsOf(s.groups)))
	for rank, g := range s.groups {
		require.Equal(t, rank, g.rank)
		require.Same(t, g, s.group(g.id))
	}

	_, err := NewClusterState(1, 9, ftMove(ftNode(), "a", maxIndex-2, 1), ftMove(ftNode(), "b", 0, 2))
	require.NoError(t, err)
	_, err = NewClusterState(1, 9, ftMove(ftNode(), "a", maxIndex-2, 1), ftMove(ftNode(), "b", 1, 2))
	require.ErrorIs(t, err, ErrInvalidState)
	require.ErrorContains(t, err, "are 16777217, more than 16777216")
}

func TestStateRemoveLetsGoOfTheRoom(t *testing.T) {
	s := ftState(t, ftMove(ftNode(), "w", 0, 1), ftMove(ftNode(), "w", 1, 2), ftMove(ftNode(), "w", 7, 3))
	g := s.group("w")
	require.Len(t, g.nodes, 8)
	s.remove(s.find("w-1"))
	require.Len(t, g.nodes, 8, "w-7 is still there")
	s.remove(s.find("w-7"))
	require.Len(t, g.nodes, 1)
	require.Nil(t, g.at(7))
	s.remove(s.find("w-0"))
	require.Empty(t, g.nodes)
	require.Zero(t, s.Len())
}

// The state cannot be reached through what it was made from, through what it
// hands out, or through its clone.
func TestStateSharesNothingMutable(t *testing.T) {
	given := ftNode(ftReachable, ftPending(StartBootstrap))
	given.Held = []Observation{{Kind: SwactorJoined, Node: given.Record.Node, Attempt: given.Attempt, Session: ftSession, Swactor: "first"}}
	given.Record.Spec.Boot.Env = map[string]string{"A": "1"}
	given.Record.Spec.Boot.Args = []string{"a"}
	s := ftState(t, given)
	before := ftJSON(t, s)

	spoil := func(m *ManagedNode) {
		m.Held[0].Swactor = "spoilt"
		m.Record.Connection.Host = "spoilt"
		m.Pending.Deadline = time.Time{}
	}
	spoil(&given)
	given.Record.Spec.Boot.Env["A"], given.Record.Spec.Boot.Args[0] = "spoilt", "spoilt"
	require.Equal(t, before, ftJSON(t, s), "what it was made from")

	exported, _ := s.Node("w-0")
	spoil(&exported)
	require.Equal(t, before, ftJSON(t, s), "what it hands out")

	clone := s.Clone()
	require.True(t, reflect.DeepEqual(s, clone))
	for _, pair := range []struct {
		spoilt      string
		spoil, keep *ClusterState
	}{{"the clone", s.Clone(), s}, {"the original", s, clone}} {
		a, b, direction := pair.spoil, pair.keep, pair.spoilt+" is spoilt"
		n := a.find("w-0")
		n.held[0].Swactor = "spoilt" // in place, as a full list is written when its oldest gives way
		n.hold(Observation{Kind: BootstrapFailed, Session: ftSession})
		n.beginDelete()
		n.record(CancelBootstrap, false, ftPolicy(), 1)
		n.markDestroyed(9)
		n.givenUp, n.group.rank = CancelBootstrap, 9
		a.NextAttemptID, a.ObservedGeneration = 99, 99
		a.add(a.groupFor("a"), newNode("a-0", 0, n.template, 98))
		a.remove(n)
		require.Equal(t, before, ftJSON(t, b), direction)
		require.Equal(t, 0, b.groups[0].rank, direction)
		require.NoError(t, b.Check())
	}
}

func TestCloneLeavesTheDriversMarksBehind(t *testing.T) {
	s := ftState(t, ftNode())
	s.find("w-0").marks = marks{wakesAt: 5, deadlineAt: 1}
	s.find("w-0").standing = standing{hot: true, holdsPlace: true}
	c := s.Clone()
	require.Zero(t, c.find("w-0").marks)
	require.Zero(t, c.find("w-0").standing)
	require.NotZero(t, s.find("w-0").marks)
	require.Same(t, c.groups[0], c.find("w-0").group)
}

// What a state cannot express is refused with the reason, and one reason does
// not hide another.
func TestNewClusterStateRefuses(t *testing.T) {
	for _, row := range []struct {
		why  string
		edit func(*ManagedNode)
		text string
	}{
		{"a name is never taken apart, so it has to be right", func(m *ManagedNode) { m.Record.Node = "w-00" }, "name is not that of its group and index"},
		{"the spec of another slot would be built", func(m *ManagedNode) { m.Record.Spec.Index = 1 }, "spec is of another slot"},
		{"the spec of another group", func(m *ManagedNode) { m.Record.Spec.GroupID = "v" }, "spec is of another slot"},
		{"the spec bears another name", func(m *ManagedNode) { m.Record.Spec.Node = "w-1" }, "spec is of another slot"},
		{"the agent would join as another node", func(m *ManagedNode) { m.Record.Spec.SwarmJoin.ExpectedLogicalNodeID = "w-1" }, "spec is of another slot"},
		{"no slot has a negative index", func(m *ManagedNode) { m.Record.Index = -1 }, "index is out of range"},
		{"an index asks for memory", func(m *ManagedNode) { m.Record.Index = maxIndex }, "index is out of range"},
		{"no such stage", ftStage(stages), "stage or intent does not exist"},
		{"no such intent", func(m *ManagedNode) { m.Intent = intents }, "stage or intent does not exist"},
		{"nothing else is ever remembered", ftAmbiguous(DestroyLease), "only a create or a start can be remembered as ambiguous"},
		{"the room for held observations is bounded", func(m *ManagedNode) { m.Held = make([]Observation, maxHeld+1) }, "more observations are held"},
		{"another attempt's join would be folded", func(m *ManagedNode) {
			m.Held = []Observation{{Kind: SwactorJoined, Node: m.Record.Node, Attempt: m.Attempt + 1}}
		}, "not of the stream of this attempt"},
		{"another slot's join would be folded", func(m *ManagedNode) {
			m.Held = []Observation{{Kind: SwactorJoined, Node: "w-7", Attempt: m.Attempt}}
		}, "not of the stream of this attempt"},
		{"a completion is never held", func(m *ManagedNode) {
			m.Held = []Observation{{Kind: OperationCompleted, Node: m.Record.Node, Attempt: m.Attempt}}
		}, "not of the stream of this attempt"},
		{"a loss is never held", func(m *ManagedNode) {
			m.Held = []Observation{{Kind: NodeLost, Node: m.Record.Node, Attempt: m.Attempt}}
		}, "not of the stream of this attempt"},
		{"an operation belongs to its attempt", func(m *ManagedNode) { ftPending(CreateLease)(m); m.Pending.ID.Attempt++ }, "of another attempt (S2)"},
		{"an operation is of some kind", ftPending(NoOperation), "the pending operation is of no kind"},
		{"an operation is of a known kind", ftPending(operationKinds), "the pending operation is of no kind"},
		{"an operation ends at its deadline at the latest", func(m *ManagedNode) { ftPending(CreateLease)(m); m.Pending.Deadline = time.Time{} }, "the pending operation has no deadline"},
		{"too early for the clock", func(m *ManagedNode) { m.Retry.NextEffectAt = time.Date(1899, 12, 31, 23, 59, 59, 0, time.UTC) }, "nextEffectAt lies outside the years 1900 to 2191"},
		{"too late for the clock", func(m *ManagedNode) { m.Record.ReadyAt = time.Date(2193, 1, 1, 0, 0, 0, 0, time.UTC) }, "readyAt lies outside"},
		{"the one moment that means unset", func(m *ManagedNode) { m.Record.FailedAt = time.Unix(instantEpochUnix, 0) }, "failedAt lies outside"},
	} {
		m := ftNode()
		row.edit(&m)
		s, err := NewClusterState(1, 9, m)
		require.ErrorIs(t, err, ErrInvalidState, row.why)
		require.ErrorContains(t, err, row.text, row.why)
		require.ErrorContains(t, err, string(m.Record.Node), row.why)
		require.Nil(t, s)

		d := DecideNode(&m, ftWanted, ftNow)
		require.Equal(t, "unmatched", d.Rule.Name, "nothing is decided about what cannot be understood: %s", row.why)
		require.Equal(t, Fail, d.Action)
		require.ErrorIs(t, d.Err, ErrInvalidState)
		require.ErrorContains(t, d.Err, row.text)
	}

	_, err := NewClusterState(1, 9, ftNode(), ftNode())
	require.ErrorIs(t, err, ErrInvalidState)
	require.ErrorContains(t, err, "slot w-0 is there twice")

	_, err = NewClusterState(1, 9, ftNode(ftStage(stages), ftAmbiguous(DestroyLease)))
	require.ErrorContains(t, err, "stage or intent does not exist")
	require.ErrorContains(t, err, "only a create or a start")

	for name, field := range map[string]func(*ManagedNode) *time.Time{
		"nextEffectAt": func(m *ManagedNode) *time.Time { return &m.Retry.NextEffectAt }, "restartAt": func(m *ManagedNode) *time.Time { return &m.Retry.RestartAt },
		"stageDeadline": func(m *ManagedNode) *time.Time { return &m.Retry.StageDeadline }, "lastCreateAt": func(m *ManagedNode) *time.Time { return &m.Retry.LastCreateAt },
		"lastFailureAt":  func(m *ManagedNode) *time.Time { return &m.Retry.LastFailureAt },
		"lastObservedAt": func(m *ManagedNode) *time.Time { return &m.Record.Bootstrap.LastObservedAt },
		"joinedAt":       func(m *ManagedNode) *time.Time { return &m.Record.Swactor.JoinedAt }, "handedOffAt": func(m *ManagedNode) *time.Time { return &m.Record.Swactor.HandedOffAt },
		"failedAt": func(m *ManagedNode) *time.Time { return &m.Record.FailedAt }, "readyAt": func(m *ManagedNode) *time.Time { return &m.Record.ReadyAt },
		"destroyedAt":      func(m *ManagedNode) *time.Time { return &m.Record.DestroyedAt },
		"pending deadline": func(m *ManagedNode) *time.Time { ftPending(CreateLease)(m); return &m.Pending.Deadline },
	} {
		m := ftNode()
		*field(&m) = time.Unix(math.MaxInt64, 0)
		_, err := NewClusterState(1, 9, m)
		require.ErrorContains(t, err, name+" lies outside")
	}
}

// A document that is not exactly what was written is refused whole.
func TestStateJSONRefuses(t *testing.T) {
	good := ftJSON(t, ftState(t, ftNode(ftRunning), ftMove(ftNode(), "w", 1, 8)))
	replace := func(old, new string) string {
		require.Contains(t, good, old)
		return strings.Replace(good, old, new, 1)
	}
	for _, row := range []struct{ why, text, problem string }{
		{"a later version", replace(`"schema":1`, `"schema":2`), "schema 2, this version reads 1"},
		{"no version", replace(`"schema":1,`, ``), "schema 0"},
		{"a version that is no number", replace(`"schema":1`, `"schema":"1"`), "cannot unmarshal"},
		{"nothing", ``, "unexpected end"},
		{"null", `null`, "schema 0"},
		{"a list", `[]`, "cannot unmarshal"},
		{"more than one document", good + good, "invalid character"},
		{"an unknown field of the document", replace(`"schema":1`, `"schema":1,"colour":"red"`), `unknown field "colour"`},
		{"an unknown field of a node", replace(`"attempt":7`, `"attempt":7,"colour":"red"`), `unknown field "colour"`},
		{"an unknown field of a record", replace(`"stage":`, `"colour":"red","stage":`), `unknown field "colour"`},
		{"an unknown stage", replace(`"stage":"BootstrapRunning"`, `"stage":"Bootstrapped"`), `unknown stage "Bootstrapped"`},
		{"an unknown intent", replace(`"intent":"Active"`, `"intent":"Passive"`), `unknown intent "Passive"`},
		{"a wrong name", replace(`"node":"w-1"`, `"node":"w-01"`), "name is not that of its group and index"},
		{"a slot given twice", strings.ReplaceAll(good, `w-1"`, `w-0"`), "name is not that"},
		{"an index that asks for memory", replace(`"index":1`, `"index":99999999`), "index is out of range"},
		{"a time out of range", replace(`"stageDeadline":"2031`, `"stageDeadline":"9031`), "stageDeadline lies outside"},
		{"a time that is none", replace(`"stageDeadline":"2031`, `"stageDeadline":"x031`), "parsing time"},
		{"a broken invariant: an attempt not given out yet", replace(`"nextAttemptId":9`, `"nextAttemptId":8`), "S1 broken at w-1"},
		{"a broken invariant: a session without its facts", replace(`"activeBootstrap":"session-7"`, `"activeBootstrap":"session-8"`), "S5 broken at w-0"},
	} {
		t.Run(row.why, func(t *testing.T) {
			receiver := ftState(t, ftMove(ftNode(ftReady), "v", 3, 2))
			before := receiver.Clone()
			err := receiver.UnmarshalJSON([]byte(row.text))
			require.ErrorIs(t, err, ErrInvalidState)
			require.ErrorContains(t, err, row.problem)
			require.True(t, strings.HasPrefix(err.Error(), "provisioning: "), err)
			require.True(t, reflect.DeepEqual(before, receiver), "nothing is half loaded")
		})
	}
	for cut := range len(good) {
		receiver := ftState(t, ftMove(ftNode(ftReady), "v", 3, 2))
		before := receiver.Clone()
		require.ErrorIs(t, receiver.UnmarshalJSON([]byte(good[:cut])), ErrInvalidState, "cut after %d bytes", cut)
		require.True(t, reflect.DeepEqual(before, receiver))
	}

	twice := strings.Replace(good, `"nodes":[`, `"nodes":[`+ftNodeJSON(t, ftMove(ftNode(), "w", 1, 6))+`,`, 1)
	var s ClusterState
	err := s.UnmarshalJSON([]byte(twice))
	require.ErrorIs(t, err, ErrInvalidState)
	require.ErrorContains(t, err, "slot w-1 is there twice")

	var broken *InvariantError
	require.ErrorAs(t, s.UnmarshalJSON([]byte(replace(`"nextAttemptId":9`, `"nextAttemptId":8`))), &broken)
	require.Equal(t, InvariantError{Invariant: "S1", Node: "w-1", Problem: "attempt 8 is not below the allocator 8"}, *broken)

	require.NoError(t, s.UnmarshalJSON([]byte(good)))
	require.Equal(t, good, ftJSON(t, &s))
}

func ftNodeJSON(t *testing.T, m ManagedNode) string {
	data, err := json.Marshal(m)
	require.NoError(t, err)
	return string(data)
}

// Equal specs are kept once, however many nodes are built from them.
func TestImportKeepsOneTemplate(t *testing.T) {
	s := ftState(t, ftMove(ftNode(), "w", 0, 1), ftMove(ftNode(), "w", 1, 2), ftMove(ftNode(), "v", 0, 3))
	require.Same(t, s.find("w-0").template, s.find("w-1").template)
	require.NotSame(t, s.find("w-0").template, s.find("v-0").template)
}

func TestInstant(t *testing.T) {
	require.True(t, instant(0).time().IsZero(), "zero is unset")
	for _, row := range []struct {
		why  string
		at   time.Time
		want instant
	}{
		{"the first moment", time.Unix(instantEpochUnix, 1), 1},
		{"the Unix epoch is an ordinary moment", time.Unix(0, 0), 2208988800e9},
		{"the Go zero time is not", time.Unix(0, 1), 2208988800e9 + 1},
		{"before the Unix epoch", time.Unix(-1, 999_999_999), 2208988800e9 - 1},
	} {
		got, ok := instantOf(row.at)
		require.True(t, ok, row.why)
		require.Equal(t, row.want, got, row.why)
		require.True(t, got.time().Equal(row.at), row.why)
		require.Equal(t, time.UTC, got.time().Location())
		require.Equal(t, row.want, nearestInstant(row.at), row.why)
	}

	last := maxInstant.time()
	require.Equal(t, "2192-04-10T23:47:16.854775807Z", last.Format(time.RFC3339Nano))
	got, ok := instantOf(last)
	require.True(t, ok, "whatever a state stores can be read back, also where a sum was cut off")
	require.Equal(t, maxInstant, got)

	for _, row := range []struct {
		at   time.Time
		want instant
	}{
		{last.Add(1), maxInstant}, {time.Unix(math.MaxInt64, 0), maxInstant}, {time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC), maxInstant},
		{time.Unix(instantEpochUnix, 0), 1}, {time.Unix(instantEpochUnix-1, 999_999_999), 1}, {time.Time{}, 1},
		{time.Unix(math.MinInt64, 0), 1}, {time.Date(-9999, 1, 1, 0, 0, 0, 0, time.UTC), 1},
	} {
		_, ok := instantOf(row.at)
		require.False(t, ok, "%v", row.at)
		require.Equal(t, row.want, nearestInstant(row.at), "%v", row.at)
	}

	require.Equal(t, instant(8), instant(5).plus(3))
	require.Equal(t, maxInstant, (maxInstant - 3).plus(3))
	require.Equal(t, maxInstant, (maxInstant - 3).plus(4), "a sum stays at the largest")
	require.Equal(t, maxInstant, instant(1).plus(math.MaxInt64))

	require.True(t, instant(5).due(5), "due means not after now")
	require.True(t, instant(5).due(6))
	require.False(t, instant(5).due(4))
	require.False(t, instant(0).due(5), "what is unset never comes")
	require.True(t, instant(5).ahead(4))
	require.False(t, instant(5).ahead(5))
	require.False(t, instant(0).ahead(0))
}

// A deadline is either due or ahead, never both and never neither.
func TestProp_DueOrAhead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		near := rapid.Int64Range(1, 5)
		deadline, now := instant(near.Draw(t, "deadline")), instant(near.Draw(t, "now"))
		require.NotEqual(t, deadline.due(now), deadline.ahead(now))
		at := instant(rapid.Int64Range(1, math.MaxInt64).Draw(t, "instant"))
		back, ok := instantOf(at.time())
		require.True(t, ok)
		require.Equal(t, at, back)
		d := time.Duration(rapid.Int64Min(0).Draw(t, "duration"))
		require.GreaterOrEqual(t, at.plus(d), at)
	})
}

func TestStateNames(t *testing.T) {
	testNames[Stage](t, "stage", "New", "LeaseRequested", "LeaseCreated", "EndpointKnown", "BootstrapRunning", "SwactorJoined",
		"HandedOff", "Dormant", "Failed", "Destroyed")
	testNames[Intent](t, "intent", "Active", "Deleting")
	require.Len(t, stageNames, int(stages))
	require.Len(t, intentNames, int(intents))
	_, err := json.Marshal(stages)
	require.Error(t, err)
	require.Equal(t, "unknown(10)", fmt.Sprint(stages))
}

// group returns the group of that name, or nil.
func (s *ClusterState) group(id NodeGroupID) *nodeGroup { return s.byID[id] }

// groupFor returns the group of that name and makes it where it is missing.
func (s *ClusterState) groupFor(id NodeGroupID) *nodeGroup {
	s.addGroups(slices.Values([]NodeGroupID{id}))
	return s.byID[id]
}

// Whoever writes to the shared trouble writes to every node that has none.
func TestNobodyWritesToNoTrouble(t *testing.T) {
	t.Cleanup(func() { require.Zero(t, noTrouble) })
}

// A writer that fails half-way is heard, and what is written is what is read.
func TestStateWriteJSON(t *testing.T) {
	s := ftState(t, ftNode(), ftMove(ftNode(ftDestroyed), "w", 3, 8))
	var text bytes.Buffer
	require.NoError(t, s.WriteJSON(&text))
	require.Equal(t, ftJSON(t, s), text.String())
	var read ClusterState
	require.NoError(t, json.Unmarshal(text.Bytes(), &read))
	require.Equal(t, text.String(), ftJSON(t, &read))

	full := errors.New("disk full")
	require.ErrorIs(t, s.WriteJSON(writerFunc(func([]byte) (int, error) { return 0, full })), full)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
