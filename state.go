package provisioning

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"time"
)

// Stage is how far an attempt has come. It is an observation; that a node is
// being given up is its [Intent].
type Stage uint8

// The stages. HandedOff is reserved: nothing sets it, readiness accepts it.
const (
	StageNew              Stage = iota // inserted, nothing dispatched
	StageLeaseRequested                // a create was dispatched
	StageLeaseCreated                  // a machine, no endpoint yet
	StageEndpointKnown                 // a machine that answers
	StageBootstrapRunning              // a bootstrap session
	StageSwactorJoined                 // the agent joined the swarm
	StageHandedOff                     // reserved
	StageDormant                       // handed off: ready, nothing to do
	StageFailed                        // the attempt is over, cleanup follows
	StageDestroyed                     // cleanup is complete

	stages
)

var stageNames = [...]string{"New", "LeaseRequested", "LeaseCreated", "EndpointKnown", "BootstrapRunning",
	"SwactorJoined", "HandedOff", "Dormant", "Failed", "Destroyed"}

// String returns the name of the stage.
func (s Stage) String() string { return nameOf(stageNames[:], s) }

// MarshalText uses the names of String.
func (s Stage) MarshalText() ([]byte, error) { return marshalName(stageNames[:], s) }

// UnmarshalText refuses an unknown name.
func (s *Stage) UnmarshalText(text []byte) error {
	return unmarshalName(stageNames[:], "stage", text, s)
}

// Intent says whether an attempt is being brought up or given up. Deleting
// never turns back.
type Intent uint8

// The intents.
const (
	Active Intent = iota
	Deleting

	intents
)

var intentNames = [...]string{"Active", "Deleting"}

// String returns the name of the intent.
func (i Intent) String() string { return nameOf(intentNames[:], i) }

// MarshalText uses the names of String.
func (i Intent) MarshalText() ([]byte, error) { return marshalName(intentNames[:], i) }

// UnmarshalText refuses an unknown name.
func (i *Intent) UnmarshalText(text []byte) error {
	return unmarshalName(intentNames[:], "intent", text, i)
}

// ManagedNode is what is known about one slot, as a value: a copy, which its
// holder may change. All times are in the driver's clock, in UTC; the zero
// time means unset.
type ManagedNode struct {
	Attempt         NodeAttemptID      `json:"attempt"`
	Intent          Intent             `json:"intent"`
	Record          NodeRecord         `json:"record"`
	ActiveBootstrap BootstrapSessionID `json:"activeBootstrap,omitempty"` // the live session
	Pending         *PendingOperation  `json:"pending,omitempty"`
	NextSequence    uint64             `json:"nextSequence"` // of the next operation
	Retry           RetryState         `json:"retry"`
	// Held are observations that came before the session they belong to was
	// on record, oldest first. At most 16.
	Held []Observation `json:"held,omitempty"`
}

// NodeRecord is what has been observed of an attempt.
type NodeRecord struct {
	Node         LogicalNodeID   `json:"node"`
	Group        NodeGroupID     `json:"group"`
	Index        int             `json:"index"`
	Spec         LogicalNodeSpec `json:"spec"` // of this attempt; maps and slices are shared, read-only
	Stage        Stage           `json:"stage"`
	Ready        bool            `json:"ready"`
	Lease        ProviderLeaseID `json:"lease,omitempty"`
	Connection   *SSHEndpoint    `json:"connection,omitempty"`
	Bootstrap    BootstrapFacts  `json:"bootstrap,omitzero"`
	Swactor      SwactorFacts    `json:"swactor,omitzero"`
	FailedReason string          `json:"failedReason,omitempty"`
	FailedAt     time.Time       `json:"failedAt,omitzero"`
	ReadyAt      time.Time       `json:"readyAt,omitzero"`
	DestroyedAt  time.Time       `json:"destroyedAt,omitzero"`
}

// BootstrapFacts is what the stream said last. It stays when its session ends.
type BootstrapFacts struct {
	Session            BootstrapSessionID `json:"session,omitempty"`
	LastStage          BootstrapStage     `json:"lastStage,omitempty"`
	LastStdoutSequence uint64             `json:"lastStdoutSequence,omitempty"`
	LastStderrSequence uint64             `json:"lastStderrSequence,omitempty"`
	LastObservedAt     time.Time          `json:"lastObservedAt,omitzero"`
}

// SwactorFacts is what is known about the agent.
type SwactorFacts struct {
	ID          SwactorID `json:"id,omitempty"`
	JoinedAt    time.Time `json:"joinedAt,omitzero"`
	HandedOffAt time.Time `json:"handedOffAt,omitzero"`
}

// PendingOperation is the one operation a node may have in flight. It is on
// record before the executor hears of it (G3).
type PendingOperation struct {
	ID   OperationID   `json:"id"`
	Kind OperationKind `json:"kind"`
	// Resolving: it was dispatched by resolve-ambiguous (R6), to learn what
	// came of an earlier one. A create is then AdoptOnly.
	Resolving bool      `json:"resolving,omitempty"`
	Deadline  time.Time `json:"deadline"`
}

// RetryState is what a node remembers about its failures.
type RetryState struct {
	// ConsecutiveFailures counts since the last ready node of this slot or
	// its last attempt that did not fail; CleanupFailures counts within one
	// step of the cleanup. Both stay at the largest value.
	ConsecutiveFailures uint32 `json:"consecutiveFailures,omitempty"`
	CleanupFailures     uint32 `json:"cleanupFailures,omitempty"`
	// NextEffectAt holds back the next operation, RestartAt the next
	// attempt; StageDeadline ends an attempt that makes no progress.
	NextEffectAt  time.Time `json:"nextEffectAt,omitzero"`
	RestartAt     time.Time `json:"restartAt,omitzero"`
	StageDeadline time.Time `json:"stageDeadline,omitzero"`
	// LastError and LastFailureAt are the text and the time of the last
	// failure of this attempt, for people: no decision looks at them.
	LastError     string    `json:"lastError,omitempty"`
	LastFailureAt time.Time `json:"lastFailureAt,omitzero"`
	// Ambiguous is CreateLease or StartBootstrap while nobody knows what
	// came of one. Nothing is destroyed before a create is known about (G5).
	Ambiguous OperationKind `json:"ambiguous,omitempty"`
	// CancelsFailed counts towards CancelLimit. GivenUp says what was given
	// up there, CancelBootstrap or StartBootstrap; it stays with the attempt.
	CancelsFailed uint32        `json:"cancelsFailed,omitempty"`
	GivenUp       OperationKind `json:"givenUp,omitempty"`
	// FailuresBeforeReady is what ConsecutiveFailures goes on from when a
	// node is lost soon after it became ready.
	FailuresBeforeReady uint32 `json:"failuresBeforeReady,omitempty"`
	// CreatesSent and LastCreateAt: see [CreateLeaseRequest].
	CreatesSent  uint32    `json:"createsSent,omitempty"`
	LastCreateAt time.Time `json:"lastCreateAt,omitzero"`
}

// ClusterState is the observed world: what was evaluated last, the allocator
// of attempts, and a node per slot. The driver owns its own and hands out
// copies. A ClusterState is safe for concurrent reading.
type ClusterState struct {
	// ObservedGeneration is the generation that a pass last evaluated.
	ObservedGeneration uint64
	// NextAttemptID is the next attempt to be given out.
	NextAttemptID NodeAttemptID

	groups []*nodeGroup // in the order of their IDs
	byID   map[NodeGroupID]*nodeGroup
	size   int // nodes
}

// nodeGroup keeps the nodes of a group in the order of their indices.
type nodeGroup struct {
	id    NodeGroupID
	rank  int     // the place among the groups: orders slots without comparing names
	nodes []*node // by index; nil where the slot is not in the state

	wish groupWish // the driver's
}

func (g *nodeGroup) at(index int) *node {
	if index < len(g.nodes) {
		return g.nodes[index]
	}
	return nil
}

// node is ManagedNode as the library keeps it: what the ladder reads lies
// together and in front, what it rarely needs apart, and what only a node in
// trouble has apart from that. Nodes are many; their layout is most of what a
// cluster weighs.
type node struct {
	group    *nodeGroup
	template *template
	attempt  NodeAttemptID
	index    int32

	stage     Stage
	intent    Intent
	ready     bool
	pending   OperationKind // NoOperation: none
	resolving bool          // of pending
	ambiguous OperationKind
	standing  // the driver's

	pendingDeadline instant
	nextEffectAt    instant
	restartAt       instant
	stageDeadline   instant
	nextSequence    uint64
	lease           ProviderLeaseID
	session         BootstrapSessionID // live
	endpoint        *SSHEndpoint       // never written through

	*facts
	marks // the driver's
}

// facts is the part of a node that the ladder does not read.
type facts struct {
	id              LogicalNodeID
	pendingSequence uint64

	bootSession    BootstrapSessionID
	bootStage      BootstrapStage
	stdoutSequence uint64
	stderrSequence uint64
	lastObservedAt instant

	swactor     SwactorID
	joinedAt    instant
	handedOffAt instant
	readyAt     instant

	failures            uint32
	cleanupFailures     uint32
	failuresBeforeReady uint32
	createsSent         uint32
	lastCreateAt        instant

	*trouble // noTrouble, or the node's own: see ofItsOwn
}

// trouble is what only a node has that failed, backs off, is being deleted, or
// waits for a session. A node that climbs without any shares noTrouble.
type trouble struct {
	failedReason  string
	lastError     string
	lastFailureAt instant
	failedAt      instant
	destroyedAt   instant
	cancelsFailed uint32
	givenUp       OperationKind
	held          []Observation
}

// noTrouble is never written. Whoever writes to a trouble asks ofItsOwn first.
var noTrouble trouble

// ofItsOwn returns the trouble of the node, to write to.
func (f *facts) ofItsOwn() *trouble {
	if f.trouble == &noTrouble {
		f.trouble = new(trouble)
	}
	return f.trouble
}

func (n *node) pendingID() OperationID {
	return OperationID{Attempt: n.attempt, Sequence: n.pendingSequence}
}

// growing: the attempt is on its way up or ready. Else it has failed or is
// being deleted; it then takes facts, and stage, ready and counts stay.
func (n *node) growing() bool { return n.intent == Active && n.stage != StageFailed }

// maxIndex bounds a slot index, and the slots of a document in all, so that it
// cannot ask for more memory than 128 MiB beside its own.
const (
	maxIndex       = 1 << 24
	maxIndexDigits = len("16777215")
)

// ErrInvalidState is what errors.Is finds in every refusal of a state.
var ErrInvalidState = errors.New("provisioning: invalid cluster state")

// NewClusterState builds a state from nodes in any order, for tests and tools.
// It refuses what a state cannot express (a name that is not group and index,
// a slot given twice, a pending operation of another attempt, a time outside
// 1900 to 2191, more than 2^24 slots, those without a node below the highest
// index of their group included); whether the state makes sense is for [ClusterState.Check].
func NewClusterState(observedGeneration uint64, next NodeAttemptID, nodes ...ManagedNode) (*ClusterState, error) {
	s := &ClusterState{ObservedGeneration: observedGeneration, NextAttemptID: next}
	templates := make(map[[32]byte]*template)
	imported := make([]*node, len(nodes))
	rooms := make(map[NodeGroupID]int) // for how many slots
	for i := range nodes {
		n, err := importNode(&nodes[i], templates)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrInvalidState, nodes[i].Record.Node, err)
		}
		imported[i] = n
		rooms[nodes[i].Record.Group] = max(rooms[nodes[i].Record.Group], int(n.index)+1)
	}
	room := 0
	for _, slots := range rooms {
		room += slots
	}
	if room > maxIndex {
		return nil, fmt.Errorf("%w: the slots of all groups, up to the highest index of each, are %d, more than %d", ErrInvalidState, room, maxIndex)
	}
	s.addGroups(maps.Keys(rooms))
	for i, n := range imported {
		if s.find(n.id) != nil {
			return nil, fmt.Errorf("%w: slot %s is there twice", ErrInvalidState, n.id)
		}
		s.add(s.byID[nodes[i].Record.Group], n)
	}
	return s, nil
}

// Len returns the number of nodes.
func (s *ClusterState) Len() int { return s.size }

// find returns the node of that name, or nil.
func (s *ClusterState) find(id LogicalNodeID) *node {
	group, index, ok := id.split()
	if !ok {
		return nil
	}
	if g := s.byID[group]; g != nil {
		return g.at(index)
	}
	return nil
}

// Node returns the node of that name.
func (s *ClusterState) Node(id LogicalNodeID) (ManagedNode, bool) {
	n := s.find(id)
	if n == nil {
		return ManagedNode{}, false
	}
	return n.export(), true
}

// All yields the nodes in slot order.
func (s *ClusterState) All() iter.Seq[ManagedNode] {
	return func(yield func(ManagedNode) bool) {
		for n := range s.inOrder() {
			if !yield(n.export()) {
				return
			}
		}
	}
}

// Clone returns a copy that shares nothing that is ever written.
func (s *ClusterState) Clone() *ClusterState {
	c := &ClusterState{ObservedGeneration: s.ObservedGeneration, NextAttemptID: s.NextAttemptID}
	c.addGroups(idsOf(s.groups))
	for n := range s.inOrder() {
		c.add(c.byID[n.group.id], n.clone())
	}
	return c
}

// clone returns a copy that belongs to no group and bears no marks.
func (n *node) clone() *node {
	c := *n
	c.group, c.marks, c.standing = nil, marks{}, standing{}
	c.facts = n.facts.clone()
	return &c
}

func (f *facts) clone() *facts {
	c := *f
	if f.trouble != &noTrouble {
		t := *f.trouble
		t.held = slices.Clone(t.held)
		c.trouble = &t
	}
	return &c
}

func (s *ClusterState) inOrder() iter.Seq[*node] {
	return func(yield func(*node) bool) {
		for _, g := range s.groups {
			for _, n := range g.nodes {
				if n != nil && !yield(n) {
					return
				}
			}
		}
	}
}

// addGroups makes those of the groups that are missing.
func (s *ClusterState) addGroups(ids iter.Seq[NodeGroupID]) {
	before := len(s.groups)
	for id := range ids {
		if s.byID[id] != nil {
			continue
		}
		if s.byID == nil {
			s.byID = make(map[NodeGroupID]*nodeGroup)
		}
		g := &nodeGroup{id: id}
		s.byID[id] = g
		s.groups = append(s.groups, g)
	}
	if len(s.groups) > before {
		slices.SortFunc(s.groups, func(a, b *nodeGroup) int { return cmp.Compare(a.id, b.id) })
		s.rankGroups()
	}
}

// dropIdleGroups forgets the groups that nobody wishes for and that hold nothing.
func (s *ClusterState) dropIdleGroups() {
	s.groups = slices.DeleteFunc(s.groups, func(g *nodeGroup) bool {
		if g.idle() {
			delete(s.byID, g.id)
		}
		return g.idle()
	})
	s.rankGroups()
}

func (s *ClusterState) rankGroups() {
	for rank, g := range s.groups {
		g.rank = rank
	}
}

func (g *nodeGroup) idle() bool { return len(g.nodes) == 0 && g.wish.want.template == nil }

func idsOf(groups []*nodeGroup) iter.Seq[NodeGroupID] {
	return func(yield func(NodeGroupID) bool) {
		for _, g := range groups {
			if !yield(g.id) {
				return
			}
		}
	}
}

func (s *ClusterState) add(g *nodeGroup, n *node) {
	n.group = g
	for len(g.nodes) <= int(n.index) {
		g.nodes = append(g.nodes, nil)
	}
	g.nodes[n.index] = n
	s.size++
}

func (s *ClusterState) remove(n *node) {
	g := n.group
	g.nodes[n.index] = nil
	last := len(g.nodes)
	for last > 0 && g.nodes[last-1] == nil {
		last--
	}
	g.nodes = g.nodes[:last]
	s.size--
}

func newNode(id LogicalNodeID, index int, t *template, attempt NodeAttemptID) *node {
	return &node{index: int32(index), template: t, attempt: attempt, nextSequence: 1, facts: &facts{id: id, trouble: &noTrouble}}
}

func compareNodes(a, b *node) int {
	return cmp.Or(cmp.Compare(a.group.rank, b.group.rank), cmp.Compare(a.index, b.index))
}

// export makes the public value of a node.
func (n *node) export() ManagedNode {
	m := ManagedNode{
		Attempt: n.attempt, Intent: n.intent,
		Record: NodeRecord{
			Node: n.id, Group: n.template.spec.GroupID, Index: int(n.index), Spec: n.template.named(int(n.index), n.id),
			Stage: n.stage, Ready: n.ready, Lease: n.lease,
			Bootstrap: BootstrapFacts{Session: n.bootSession, LastStage: n.bootStage, LastStdoutSequence: n.stdoutSequence,
				LastStderrSequence: n.stderrSequence, LastObservedAt: n.lastObservedAt.time()},
			Swactor:      SwactorFacts{ID: n.swactor, JoinedAt: n.joinedAt.time(), HandedOffAt: n.handedOffAt.time()},
			FailedReason: n.failedReason, FailedAt: n.failedAt.time(), ReadyAt: n.readyAt.time(), DestroyedAt: n.destroyedAt.time(),
		},
		ActiveBootstrap: n.session, NextSequence: n.nextSequence,
		Retry: RetryState{
			ConsecutiveFailures: n.failures, CleanupFailures: n.cleanupFailures,
			NextEffectAt: n.nextEffectAt.time(), RestartAt: n.restartAt.time(), StageDeadline: n.stageDeadline.time(),
			LastError: n.lastError, LastFailureAt: n.lastFailureAt.time(), Ambiguous: n.ambiguous, CancelsFailed: n.cancelsFailed, GivenUp: n.givenUp,
			FailuresBeforeReady: n.failuresBeforeReady, CreatesSent: n.createsSent, LastCreateAt: n.lastCreateAt.time(),
		},
		Held: slices.Clone(n.held),
	}
	if n.endpoint != nil {
		endpoint := *n.endpoint
		m.Record.Connection = &endpoint
	}
	if n.pending != NoOperation {
		m.Pending = &PendingOperation{ID: n.pendingID(), Kind: n.pending, Resolving: n.resolving, Deadline: n.pendingDeadline.time()}
	}
	return m
}

// importNode is the inverse of export. Equal templates become one.
func importNode(m *ManagedNode, templates map[[32]byte]*template) (*node, error) {
	r := &m.Record
	t := r.Spec.template()
	if known := templates[t.digest]; known != nil {
		t = known
	} else if templates != nil {
		templates[t.digest] = t
	}
	var problems []error
	bad := func(wrong bool, problem string) {
		if wrong {
			problems = append(problems, errors.New(problem))
		}
	}
	at := func(field string, t time.Time) instant {
		if t.IsZero() {
			return 0
		}
		i, ok := instantOf(t)
		bad(!ok, field+" lies outside the years 1900 to 2191")
		return i
	}
	bad(r.Index < 0 || r.Index >= maxIndex, "index is out of range")
	bad(r.Node != NewLogicalNodeID(r.Group, r.Index), "name is not that of its group and index")
	bad(r.Spec.GroupID != r.Group || r.Spec.Index != r.Index || r.Spec.Node != r.Node || r.Spec.SwarmJoin.ExpectedLogicalNodeID != r.Node,
		"spec is of another slot")
	bad(r.Stage >= stages || m.Intent >= intents, "stage or intent does not exist")
	bad(m.Retry.Ambiguous != NoOperation && m.Retry.Ambiguous != CreateLease && m.Retry.Ambiguous != StartBootstrap,
		"only a create or a start can be remembered as ambiguous")
	bad(len(m.Held) > maxHeld, "more observations are held than a node can hold")
	bad(slices.ContainsFunc(m.Held, func(o Observation) bool {
		return o.Node != r.Node || o.Attempt != m.Attempt || o.Kind <= OperationCompleted || o.Kind >= NodeLost
	}), "what is held is not of the stream of this attempt")
	n := &node{
		template: t, attempt: m.Attempt, index: int32(r.Index), stage: r.Stage, intent: m.Intent, ready: r.Ready,
		ambiguous: m.Retry.Ambiguous, nextEffectAt: at("nextEffectAt", m.Retry.NextEffectAt), restartAt: at("restartAt", m.Retry.RestartAt),
		stageDeadline: at("stageDeadline", m.Retry.StageDeadline), nextSequence: m.NextSequence,
		lease: r.Lease, session: m.ActiveBootstrap,
		facts: &facts{
			id: r.Node, bootSession: r.Bootstrap.Session, bootStage: r.Bootstrap.LastStage,
			stdoutSequence: r.Bootstrap.LastStdoutSequence, stderrSequence: r.Bootstrap.LastStderrSequence,
			lastObservedAt: at("lastObservedAt", r.Bootstrap.LastObservedAt),
			swactor:        r.Swactor.ID, joinedAt: at("joinedAt", r.Swactor.JoinedAt), handedOffAt: at("handedOffAt", r.Swactor.HandedOffAt),
			readyAt:  at("readyAt", r.ReadyAt),
			failures: m.Retry.ConsecutiveFailures, cleanupFailures: m.Retry.CleanupFailures,
			failuresBeforeReady: m.Retry.FailuresBeforeReady, createsSent: m.Retry.CreatesSent,
			lastCreateAt: at("lastCreateAt", m.Retry.LastCreateAt),
			trouble: &trouble{
				failedReason: r.FailedReason, lastError: m.Retry.LastError,
				lastFailureAt: at("lastFailureAt", m.Retry.LastFailureAt), failedAt: at("failedAt", r.FailedAt),
				destroyedAt: at("destroyedAt", r.DestroyedAt), cancelsFailed: m.Retry.CancelsFailed, givenUp: m.Retry.GivenUp,
				held: slices.Clone(m.Held),
			},
		},
	}
	if r.Connection != nil {
		endpoint := *r.Connection
		n.endpoint = &endpoint
	}
	if p := m.Pending; p != nil {
		bad(p.ID.Attempt != m.Attempt, "the pending operation is of another attempt (S2)")
		bad(!p.Kind.valid(), "the pending operation is of no kind")
		bad(p.Deadline.IsZero(), "the pending operation has no deadline")
		n.pending, n.resolving, n.pendingSequence, n.pendingDeadline = p.Kind, p.Resolving, p.ID.Sequence, at("pending deadline", p.Deadline)
	}
	return n, errors.Join(problems...)
}

// stateSchema is the version of the JSON form. A reader refuses any other.
const stateSchema = 1

type stateDocument struct {
	Schema             int           `json:"schema"`
	ObservedGeneration uint64        `json:"observedGeneration"`
	NextAttemptID      NodeAttemptID `json:"nextAttemptId"`
	Nodes              []ManagedNode `json:"nodes"`
}

// MarshalJSON writes the state, nodes in slot order.
func (s *ClusterState) MarshalJSON() ([]byte, error) {
	var text bytes.Buffer
	err := s.WriteJSON(&text)
	return text.Bytes(), err
}

// UnmarshalJSON reads what MarshalJSON wrote. Another schema, an unknown field
// or a state that fails [ClusterState.Check] is an [ErrInvalidState], and s is
// left as it was.
func (s *ClusterState) UnmarshalJSON(data []byte) error {
	var version struct {
		Schema int `json:"schema"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidState, err)
	}
	if version.Schema != stateSchema {
		return fmt.Errorf("%w: schema %d, this version reads %d", ErrInvalidState, version.Schema, stateSchema)
	}
	var doc stateDocument
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&doc); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidState, err)
	}
	read, err := NewClusterState(doc.ObservedGeneration, doc.NextAttemptID, doc.Nodes...)
	if err != nil {
		return err
	}
	if err := read.Check(); err != nil {
		return err
	}
	*s = *read
	return nil
}

// instant is a moment in the driver's clock: nanoseconds since the start of
// 1900 in UTC. Zero means unset, which leaves the Unix epoch an ordinary
// moment; the largest lies in 2192.
type instant int64

const (
	maxInstant       instant = math.MaxInt64
	instantEpochUnix         = -2208988800 // 1900-01-01T00:00:00Z
)

// instantOf converts a time; false if an instant cannot express it.
func instantOf(t time.Time) (instant, bool) {
	seconds := t.Unix() - instantEpochUnix
	if seconds < 0 || seconds > math.MaxInt64/int64(time.Second) {
		return 0, false
	}
	i := instant(seconds)*instant(time.Second) + instant(t.Nanosecond())
	return i, i > 0 // it wraps in the last second
}

// nearestInstant converts a time and takes the nearest instant where there is
// no exact one.
func nearestInstant(t time.Time) instant {
	if i, ok := instantOf(t); ok {
		return i
	}
	if t.Unix() <= instantEpochUnix {
		return 1
	}
	return maxInstant
}

func (i instant) time() time.Time {
	if i == 0 {
		return time.Time{}
	}
	return time.Unix(int64(i)/int64(time.Second)+instantEpochUnix, int64(i)%int64(time.Second)).UTC()
}

// plus adds a duration that is not negative and stays at the largest instant.
func (i instant) plus(d time.Duration) instant {
	if instant(d) > maxInstant-i {
		return maxInstant
	}
	return i + instant(d)
}

// due is the one predicate for "its time has come": a deadline that is set and
// not after now. Waiting and expiring both ask it, so they cannot disagree.
func (i instant) due(now instant) bool { return i != 0 && i <= now }

// ahead: a deadline that is set and still to come.
func (i instant) ahead(now instant) bool { return i > now }
