package provisioning

import (
	"fmt"
	"slices"
	"time"
)

// This file holds the worlds of the exhaustive search (exhaustive_test.go): one
// or two slots, the wish, the truth at the provider, and how many faults have
// happened. A world holds nothing whose value cannot matter: attempts and
// operations are ranks, a deadline is unset, due or ahead, counts stop where
// nothing tells a larger one apart, texts and the times of past things are
// gone. A world and a real ClusterState are made of each other.

const exMaxSlots = 2

// exWorld is one state of the search. It is comparable.
type exWorld struct {
	count uint8 // slots wished for, all of the present image
	slots [exMaxSlots]exSlot
}

type exSlot struct {
	node exNode
	prov exProvider
}

// exNode is a node without what cannot matter.
type exNode struct {
	there     bool
	other     bool // built from another image than the one wished for
	stage     Stage
	intent    Intent
	ready     bool
	pending   OperationKind
	resolving bool
	ambiguous OperationKind
	deadlines [exDeadlines]exDeadline

	lease, endpoint bool
	session         exAge
	converged       bool // as the bootstrap said, before the join
	joined          bool
	failed          bool // there is a reason and a time

	failures, cancelsFailed uint8 // up to 1 and to the limit

	heldLen uint8
	held    [exMaxHeld]exHeld
}

// exHeld is an observation that is held until its session is on record.
type exHeld struct {
	what exSaid
	of   exAge
}

// exMaxHeld bounds what is reported early; a search takes less. The true bound
// is 16.
const exMaxHeld = 4

// exDeadline is all that a decision can see of a stored deadline. Their order
// is left out on purpose: whichever comes first in reality does so because of
// how long the configured durations are, and they may be anything. So the
// search lets any set of them come due next.
type exDeadline uint8

const (
	exUnset exDeadline = iota
	exDue
	exAhead
)

const (
	exPendingDeadline = iota
	exNextEffectAt
	exRestartAt
	exStageDeadline

	exDeadlines
)

// exAge tells the sessions of an attempt apart: none, the newest that the
// bootstrap knows, or one before that.
type exAge uint8

const (
	exNoSession exAge = iota
	exNewest
	exOlder
)

// exCall is how far the call of the pending operation has come.
type exCall uint8

const (
	exNoCall exCall = iota
	exSent          // nothing has happened yet
	exDone          // it has taken effect and has not answered
	exQueued        // behind a call of its own attempt that has not returned
	exGone          // cut off between recording and calling: nobody will answer
)

// exProvider is the truth about the present attempt of a slot: what there is,
// what is still to happen, and what has been said.
type exProvider struct {
	call       exCall
	zombie     OperationKind // a call that has outlived its deadline and has not returned
	zombieDone bool          // it has taken effect

	machines uint8 // that exist and are billed
	dead     bool  // of no use, and billed all the same (B11)
	spent    bool  // the token has been used up by a machine that is gone
	landing  bool  // a create that was answered and has not taken effect yet
	starting bool  // the same of a start
	hasty    exHaste

	session uint8 // how many there have been, up to 2
	live    bool  // the newest
	silent  bool  // it will say nothing more by itself, or what it said was lost
	said    uint8 // a set of exSaid, by the newest session
	untold  bool  // a machine was lost, and the NodeLost is on its way
}

// exHaste is the final answer that a provider gave while a create of the key
// could still take effect, against B3.
type exHaste uint8

const (
	exNoHaste exHaste = iota
	exDestroyed
	exNothingToAdopt
	exRefused
	exSaidLost
)

var exHasteNames = [...]string{"", "DestroyLease answered nil", "an adopt-only CreateLease answered ErrNothingToAdopt",
	"CreateLease answered Definite", "CreateLease answered LeaseLost"}

// exSaid is what a bootstrap says.
type exSaid uint8

const (
	exJoin exSaid = iota
	exConverged
	exClosed
	exBroken    // BootstrapFailed
	exCancelled // by somebody else

	exSayings
)

var exSaidNames = [...]string{"the join", "Converged", "the close of the session", "a failure", "a cancel from outside"}

func (s *exProvider) hasSaid(what exSaid) bool { return s.said&(1<<what) != 0 }

// exCode is a world as bits: the key under which the search knows it.
type exCode [3]uint64

// exCodec writes a world into a code or reads it from one, both in the order of
// one walk, so that they cannot disagree.
type exCodec struct {
	code    exCode
	at      uint
	reading bool
}

func exBits[T ~uint8](c *exCodec, v *T, n uint) {
	word, shift := c.at/64, c.at%64
	c.at += n
	if c.reading {
		x := c.code[word] >> shift
		if shift+n > 64 {
			x |= c.code[word+1] << (64 - shift)
		}
		*v = T(x & (1<<n - 1))
		return
	}
	x := uint64(*v)
	if x >= 1<<n {
		panic(fmt.Sprintf("the value %d of a %T does not fit %d bits", x, *v, n))
	}
	c.code[word] |= x << shift
	if shift+n > 64 {
		c.code[word+1] |= x >> (64 - shift)
	}
}

func (c *exCodec) flags(flags ...*bool) {
	for _, f := range flags {
		var v uint8
		if *f {
			v = 1
		}
		exBits(c, &v, 1)
		*f = v == 1
	}
}

func (w *exWorld) walk(c *exCodec, slots int) {
	exBits(c, &w.count, 2)
	for i := range slots {
		w.slots[i].node.walk(c)
		w.slots[i].prov.walk(c)
	}
}

func (n *exNode) walk(c *exCodec) {
	c.flags(&n.there)
	if !n.there {
		return
	}
	c.flags(&n.other, &n.ready, &n.resolving, &n.lease, &n.endpoint, &n.converged, &n.joined, &n.failed)
	exBits(c, &n.stage, 4)
	exBits(c, &n.intent, 1)
	exBits(c, &n.pending, 3)
	exBits(c, &n.ambiguous, 2)
	for i := range n.deadlines {
		exBits(c, &n.deadlines[i], 2)
	}
	exBits(c, &n.session, 2)
	exBits(c, &n.failures, 1)
	exBits(c, &n.cancelsFailed, 2)
	exBits(c, &n.heldLen, 3)
	for i := range n.heldLen {
		n.held[i].of -= exNewest // there is a session, or nothing was said
		exBits(c, &n.held[i].what, 3)
		exBits(c, &n.held[i].of, 1)
		n.held[i].of += exNewest
	}
}

func (p *exProvider) walk(c *exCodec) {
	c.flags(&p.zombieDone, &p.dead, &p.spent, &p.landing, &p.starting, &p.live, &p.silent, &p.untold)
	exBits(c, &p.call, 3)
	exBits(c, &p.zombie, 3)
	exBits(c, &p.machines, 2)
	exBits(c, &p.hasty, 3)
	exBits(c, &p.session, 2)
	exBits(c, &p.said, uint(exSayings))
}

func (w *exWorld) encode(slots int) exCode {
	c := exCodec{}
	w.walk(&c, slots)
	return c.code
}

func (code exCode) decode(slots int) exWorld {
	var w exWorld
	w.walk(&exCodec{code: code, reading: true}, slots)
	return w
}

// The real state that a world stands for.

var (
	exNow  = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	exAt   = nearestInstant(exNow)
	exPast = exAt - instant(time.Hour)
)

const (
	exGroup      = NodeGroupID("w")
	exGeneration = 5
	exImage      = "present"
	exOtherImage = "other"
	exLease      = ProviderLeaseID("lease")
	exSwactor    = SwactorID("agent")
)

var exEndpoint = &SSHEndpoint{Host: "host", Port: 22}

// exCancelLimit is the CancelLimit of the searches.
const exCancelLimit = 2

func exShape(count int) ClusterShape {
	return ClusterShape{RunID: "run", Generation: exGeneration, Groups: []NodeGroupSpec{
		{GroupID: exGroup, Count: count, Shape: NodeShape{Image: exImage}},
	}}
}

var exTemplates = [2]*template{
	newTemplate("run", NodeGroupSpec{GroupID: exGroup, Shape: NodeShape{Image: exImage}}),
	newTemplate("run", NodeGroupSpec{GroupID: exGroup, Shape: NodeShape{Image: exOtherImage}}),
}

var exNames = [exMaxSlots]LogicalNodeID{NewLogicalNodeID(exGroup, 0), NewLogicalNodeID(exGroup, 1)}

func exAttempt(slot int) NodeAttemptID { return NodeAttemptID(slot + 1) }

const exNextAttempt = exMaxSlots + 1

func exSessionID(age exAge) BootstrapSessionID {
	return [...]BootstrapSessionID{exNoSession: "", exNewest: "newest", exOlder: "older"}[age]
}

func exAgeOf(id BootstrapSessionID) exAge {
	return exAge(slices.Index([]BootstrapSessionID{"", "newest", "older"}, id))
}

func exIf[T any](is bool, v T) T {
	var zero T
	if is {
		return v
	}
	return zero
}

// exInstant spells a deadline out. No two are alike.
func exInstant(d exDeadline, kind int) instant {
	switch d {
	case exDue:
		return exAt - instant(kind)
	case exAhead:
		return exAt + instant(kind+1)*instant(time.Hour)
	}
	return 0
}

func exDeadlineOf(i, now instant) exDeadline {
	switch {
	case i == 0:
		return exUnset
	case i.due(now):
		return exDue
	}
	return exAhead
}

// state makes the real state of a world.
func (w *exWorld) state(slots int) *ClusterState {
	s := &ClusterState{ObservedGeneration: exGeneration, NextAttemptID: exNextAttempt}
	for i := range slots {
		if n := w.slots[i].node; n.there {
			s.add(s.groupFor(exGroup), n.real(i))
		}
	}
	return s
}

func (x *exNode) real(slot int) *node {
	n := newNode(exNames[slot], slot, exTemplates[0], exAttempt(slot))
	if x.other {
		n.template = exTemplates[1]
	}
	n.stage, n.intent, n.ready = x.stage, x.intent, x.ready
	n.nextSequence = 2
	n.pending, n.resolving, n.pendingSequence = x.pending, x.resolving, exIf[uint64](x.pending != NoOperation, 1)
	n.ambiguous = x.ambiguous
	n.pendingDeadline = exInstant(x.deadlines[exPendingDeadline], exPendingDeadline)
	n.nextEffectAt = exInstant(x.deadlines[exNextEffectAt], exNextEffectAt)
	n.restartAt = exInstant(x.deadlines[exRestartAt], exRestartAt)
	n.stageDeadline = exInstant(x.deadlines[exStageDeadline], exStageDeadline)
	n.lease = exIf(x.lease, exLease)
	n.endpoint = exIf(x.endpoint, exEndpoint)
	n.session, n.bootSession = exSessionID(x.session), exSessionID(x.session)
	if x.session != exNoSession {
		n.bootStage, n.lastObservedAt = BootstrapStageCreated, exPast
	}
	if x.converged {
		n.bootStage = BootstrapStageConverged
	}
	n.swactor, n.joinedAt = exIf(x.joined, exSwactor), exIf(x.joined, exPast)
	n.handedOffAt, n.readyAt = exIf(x.ready, exPast), exIf(x.ready, exPast)
	n.failures = uint32(x.failures)
	own := trouble{failedReason: exIf(x.failed, "it failed"), failedAt: exIf(x.failed, exPast),
		destroyedAt: exIf(x.stage == StageDestroyed, exPast), cancelsFailed: uint32(x.cancelsFailed)}
	for _, h := range x.held[:x.heldLen] {
		own.held = append(own.held, exObservation(slot, h.what, h.of))
	}
	if x.failed || own.destroyedAt != 0 || own.cancelsFailed != 0 || own.held != nil {
		n.trouble = &own
	}
	return n
}

// exAbstract is the inverse of real, for any node. What a node that does not
// grow any more was told on the way up is gone.
func exAbstract(n *node, now instant) exNode {
	x := exNode{
		there: true, other: !sameTemplate(n.template, exTemplates[0]), stage: n.stage, intent: n.intent, ready: n.ready,
		pending: n.pending, resolving: n.resolving, ambiguous: n.ambiguous,
		deadlines: [exDeadlines]exDeadline{
			exPendingDeadline: exDeadlineOf(n.pendingDeadline, now), exNextEffectAt: exDeadlineOf(n.nextEffectAt, now),
			exRestartAt: exDeadlineOf(n.restartAt, now), exStageDeadline: exDeadlineOf(n.stageDeadline, now),
		},
		lease: n.lease != "", endpoint: n.endpoint != nil, session: exAgeOf(n.session), failed: n.failedAt != 0,
		failures: uint8(min(n.failures, 1)), cancelsFailed: uint8(min(n.cancelsFailed, exCancelLimit)), heldLen: uint8(len(n.held)),
	}
	if n.growing() {
		x.joined = n.joinedAt != 0
		x.converged = n.session != "" && n.bootStage == BootstrapStageConverged
	}
	for i, o := range n.held {
		x.held[i] = exHeld{exSaidOf(o), exAgeOf(o.Session)}
	}
	return x
}

// refitted returns a copy of a node with all there is to it, made to fit what
// its world has become: attempts, operations and sessions go by rank, deadlines
// have come due, the wish is for another image.
func (n *node) refitted(group *nodeGroup, x *exNode, slot int) *node {
	m := n.clone()
	m.group = group
	m.template = exTemplates[exIf(x.other, 1)]
	m.attempt, m.nextSequence = exAttempt(slot), 2
	m.pendingSequence = exIf[uint64](m.pending != NoOperation, 1)
	for d, deadline := range []*instant{&m.pendingDeadline, &m.nextEffectAt, &m.restartAt, &m.stageDeadline} {
		if x.deadlines[d] == exDue {
			*deadline = min(*deadline, exAt)
		}
	}
	if m.session != "" {
		m.session = exSessionID(x.session)
		m.bootSession = m.session
	}
	for i := range m.held {
		m.held[i].Attempt, m.held[i].Session = exAttempt(slot), exSessionID(x.held[i].of)
	}
	return m
}

func (x *exNode) growing() bool { return x.there && x.intent == Active && x.stage != StageFailed }

// forget takes away from a slot what cannot matter any more.
func (s *exSlot) forget() {
	if !s.prov.live || !s.node.growing() || s.node.ready {
		s.prov.said, s.prov.silent = 0, false
	}
}

// exObservation makes what a bootstrap says.
func exObservation(slot int, what exSaid, of exAge) Observation {
	o := Observation{Node: exNames[slot], Attempt: exAttempt(slot), Session: exSessionID(of)}
	switch what {
	case exJoin:
		o.Kind, o.Swactor = SwactorJoined, exSwactor
	case exConverged:
		o.Kind, o.Stage = BootstrapProgress, BootstrapStageConverged
	case exClosed:
		o.Kind = BootstrapClosed
	case exBroken:
		o.Kind, o.Reason = BootstrapFailed, "it broke"
	case exCancelled:
		o.Kind, o.Stage = BootstrapProgress, BootstrapStageCancelled
	}
	return o
}

func exSaidOf(o Observation) exSaid {
	switch o.Kind {
	case SwactorJoined:
		return exJoin
	case BootstrapClosed:
		return exClosed
	case BootstrapFailed:
		return exBroken
	}
	if o.Stage == BootstrapStageConverged {
		return exConverged
	}
	return exCancelled
}
