package provisioning

import (
	"errors"
	"fmt"
)

// This file takes one step of the exhaustive search: it makes the real state of
// a world, lets the shipping driver fold or pass, and holds what comes of it to
// everything that must be true.

// exStep is one event happening in one world.
type exStep struct {
	m        *exModel
	event    exEvent
	before   exWorld
	w        exWorld // becomes what comes of it
	driver   *ClusterDriver
	requests int   // submitted
	refused  []int // the slots whose submission was
	passed   bool
	broken   error
	leak     string // what a hasty provider leaves behind, and how

	may [exMaxSlots]exMay

	// Of TestExhaustiveFormLosesNothing: the nodes with all there is to
	// them, before and after.
	whole []*node
}

func (s *exStep) fail(format string, args ...any) {
	if s.broken == nil {
		s.broken = fmt.Errorf(format, args...)
	}
}

// take lets an event happen in a world.
func (m *exModel) take(w *exWorld, e exEvent) *exStep {
	s := &exStep{m: m, event: e, before: *w, w: *w}
	s.happen()
	return s
}

func (s *exStep) happen() {
	m, e := s.m, s.event
	slot := int(e.slot)
	n, p := &s.w.slots[slot].node, &s.w.slots[slot].prov
	switch e.kind {
	case exPass:
		s.pass()
	case exTime:
		for d := range exDeadlines {
			if e.arg&(1<<d) != 0 {
				n.deadlines[d] = exDue
			}
		}
	case exEffect:
		s.reach(slot, e.arg == 1)
	case exAnswer:
		s.answer(slot, exReply(e.arg))
	case exReturns:
		if e.arg == 0 {
			s.takesEffectLate(slot, p.zombie, p.zombieDone)
		}
		p.zombie, p.zombieDone = NoOperation, false
		if p.call == exQueued {
			p.call = exSent
		}
	case exLands:
		switch e.arg {
		case 0:
			p.lands(m.class)
		case 1:
			s.w.slots[slot].begin()
		}
		if e.arg%2 == 0 {
			p.landing = false
		} else {
			p.starting = false
		}
	case exSays:
		what, of := exSaid(e.arg&15), exAge(e.arg>>4)
		if of == exNewest {
			p.said |= 1 << what
			switch what {
			case exClosed, exCancelled:
				p.live = false
			case exBroken:
				p.silent = true
			}
		}
		s.fold(exObservation(slot, what, of))
	case exFallsSilent:
		p.silent = true
	case exLoses:
		p.end(m.class)
		p.untold = true
	case exTells:
		p.untold = false
		s.may[slot] = exMay{forget: StartBootstrap, unready: true}
		s.fold(Observation{Kind: NodeLost, Node: exNames[slot], Attempt: exAttempt(slot)})
		if is := &s.w.slots[slot].node; is.lease && (is.session != exNoSession || is.ambiguous == StartBootstrap || is.ready) {
			s.fail("a machine is lost, and its session or its readiness is not")
		}
	case exCount:
		s.w.count = e.arg
	case exImages:
		for i := range m.slots {
			n := &s.w.slots[i].node
			n.other = n.there && (e.arg == 0 || !n.other)
		}
	}
	if s.broken == nil {
		s.checkTruth()
	}
	for i := range m.slots {
		s.w.slots[i].forget()
	}
}

// reach lets the call of a slot reach the provider.
func (s *exStep) reach(slot int, knows bool) {
	n, p, class := &s.w.slots[slot].node, &s.w.slots[slot].prov, s.m.class
	p.call = exDone
	if knows && n.pending != CreateLease {
		p.live = p.live && n.session != exNewest
		s.complete(slot, Completion{Class: ClassLeaseLost})
		return
	}
	switch n.pending {
	case CreateLease:
		switch {
		case p.dead:
			s.complete(slot, Completion{Class: ClassLeaseLost, Lease: exLease})
		case p.machines > 0: // B1, and B8
			p.machines = 1
		case p.spent:
			s.complete(slot, Completion{Class: ClassLeaseLost})
		case p.landing && s.m.unsettled(n):
			s.complete(slot, Completion{Class: ClassAmbiguous}) // B3
		case n.resolving && (class != exToken || knows): // B4
			if p.landing {
				p.hasty = exNothingToAdopt
			}
			s.complete(slot, Completion{Class: ClassDefinite})
		default:
			p.buy(class)
		}
	case LookupEndpoint:
		if p.machines == 0 || p.dead {
			s.complete(slot, Completion{Class: ClassLeaseLost})
		}
	case StartBootstrap:
		if p.machines == 0 || p.dead {
			s.complete(slot, Completion{Class: ClassLeaseLost})
			return
		}
		s.w.slots[slot].begin()
	case BootstrapConvergenceObserved:
		switch {
		case p.machines == 0:
			s.complete(slot, Completion{Class: ClassLeaseLost})
		case !p.live || n.session != exNewest:
			s.complete(slot, Completion{Class: ClassDefinite})
		}
	case CancelBootstrap:
		p.live = p.live && n.session != exNewest
	case DestroyLease:
		p.end(class)
		switch {
		case !p.landing:
		case class == exHastyLabel:
			p.hasty = exDestroyed
		case class == exToken:
			s.fail("a machine is destroyed while a create of its token can still take effect")
		default:
			s.complete(slot, Completion{Class: ClassAmbiguous}) // B3
		}
	}
}

// answer lets the call of a slot answer.
func (s *exStep) answer(slot int, r exReply) {
	n, p := &s.w.slots[slot].node, &s.w.slots[slot].prov
	var c Completion
	switch r {
	case exOK, exOKWithout:
		s.complete(slot, s.success(slot, r == exOK))
		return
	case exDefinite:
		c.Class = ClassDefinite
		if n.pending == CreateLease && p.landing {
			p.hasty = exRefused
		}
	case exDefinitely:
		c.Class = ClassDefinite
	case exAmbiguously:
		c.Class = ClassAmbiguous
	case exLate:
		c.Class = ClassAmbiguous
		s.landLater(n, p)
	case exNotStarted:
		c.Class = ClassNotStarted
	case exLost:
		c.Class = ClassLeaseLost
		p.spent = s.m.class == exToken
		if p.landing {
			p.hasty = exSaidLost
		}
	case exDead:
		p.buy(s.m.class)
		p.dead, p.live = true, false
		c.Class, c.Lease = ClassLeaseLost, exLease
	}
	s.complete(slot, c)
}

func (s *exStep) landLater(n *exNode, p *exProvider) {
	if n.pending == CreateLease {
		p.landing = true
	} else {
		p.starting = true
	}
}

// takesEffectLate lets a call take effect whose answer does not count any more.
func (s *exStep) takesEffectLate(slot int, kind OperationKind, done bool) {
	p := &s.w.slots[slot].prov
	switch {
	case done:
	case kind == CreateLease:
		p.lands(s.m.class)
	case kind == StartBootstrap:
		s.w.slots[slot].begin()
	case kind == CancelBootstrap:
		p.live = false
	case kind == DestroyLease:
		p.end(s.m.class)
	}
}

// success is the completion of the call of a slot that went well.
func (s *exStep) success(slot int, full bool) Completion {
	var c Completion
	switch s.w.slots[slot].node.pending {
	case CreateLease:
		c.Lease = exLease
		c.Endpoint = exIf(full, exEndpoint)
	case LookupEndpoint:
		c.Endpoint = exIf(full, exEndpoint)
	case StartBootstrap:
		c.Session = exSessionID(exNewest)
	}
	return c
}

// exPermits says what the end of an operation may do to its slot.
func exPermits(kind OperationKind, class FailureClass) exMay {
	final := class == ClassNone || class == ClassDefinite || class == ClassLeaseLost
	return exMay{
		forget:    exIf(final && (kind == CreateLease || kind == StartBootstrap), kind),
		dropLease: kind == DestroyLease && (class == ClassNone || class == ClassLeaseLost),
		unready:   kind == BootstrapConvergenceObserved && class == ClassLeaseLost,
	}
}

// complete folds the end of the call of a slot.
func (s *exStep) complete(slot int, c Completion) {
	n, p := &s.w.slots[slot].node, &s.w.slots[slot].prov
	p.call = exNoCall
	c.Operation, c.Kind = OperationID{exAttempt(slot), 1}, n.pending
	s.may[slot] = exPermits(c.Kind, c.Class)
	s.fold(Observation{Kind: OperationCompleted, Node: exNames[slot], Attempt: exAttempt(slot), Completion: c})
	if s.broken != nil {
		return
	}
	next := decide(s.w.slots[slot].node.real(slot), s.wish(slot < int(s.w.count)), exAt)
	if next.action == Dispatch && next.operation == c.Kind { // whatever it answered: it has not brought the node on
		s.fail("%v is to be tried again without a wait", c.Kind)
	}
}

// exWishes are the wishes for 0, 1 and 2 slots.
var exWishes = func() (wishes [exMaxSlots + 1]*Desired) {
	for count := range wishes {
		wishes[count] = exMust(Expand(exShape(count)))
	}
	return wishes
}()

// exMay is what may happen to the record of a slot, by what was folded into it.
type exMay struct {
	forget    OperationKind // of unknown outcome
	dropLease bool
	unready   bool
}

var exConfig = exMust(Config{Retry: RetryPolicy{CancelLimit: exCancelLimit}}.judged())

func exMust[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (s *exStep) open() {
	state := s.w.state(s.m.slots)
	for i, n := range s.whole {
		if n != nil {
			*state.find(exNames[i]) = *n.refitted(state.groups[0], &s.w.slots[i].node, i)
		}
	}
	s.driver = newDriverOn(state, exWishes[s.w.count], exConfig)
}

// fold folds one observation and decides nothing.
func (s *exStep) fold(o Observation) {
	s.open()
	s.driver.Deliver(o)
	if err := s.driver.foldOnly(exNow); err != nil {
		s.fail("folding: %w", err)
	}
	s.close()
}

// pass runs one pass. What expires and what is submitted comes back through the
// methods of an EffectExecutor.
func (s *exStep) pass() {
	s.open()
	s.passed = true
	ran, err := s.driver.DriveNext(exNow, s)
	if err != nil || !ran {
		s.fail("a pass that was asked for answers %v, %w", ran, err)
	}
	s.close()
	s.checkPass()
}

// slotOf returns the slot of an attempt that the world knows, -1 for any other.
func (s *exStep) slotOf(attempt NodeAttemptID) int {
	if attempt < 1 || int(attempt) > s.m.slots {
		return -1
	}
	return int(attempt) - 1
}

// Submit implements EffectExecutor.
func (s *exStep) Submit(e Effect) (bool, error) {
	s.requests++
	n := s.driver.state.find(e.Key.Node)
	if n == nil || n.attempt != e.Operation.Attempt || e.Key.Attempt != n.attempt {
		s.fail("%v is submitted for attempt %d, which the slot does not have", e.Kind, e.Operation.Attempt)
		return false, nil
	}
	if n.pending != e.Kind || n.pendingID() != e.Operation { // G3
		s.fail("%v is submitted and not on record", e.Kind)
	}
	slot := int(n.index)
	before, p := &s.before.slots[slot].node, &s.w.slots[slot].prov
	if s.slotOf(n.attempt) != slot {
		s.fail("the pass that begins attempt %d also submits %v", n.attempt, e.Kind)
		return false, nil
	}
	if p.call != exNoCall {
		s.fail("%v is submitted while another operation is in flight", e.Kind) // G3
	}
	if before.deadlines[exNextEffectAt] == exAhead {
		s.fail("%v is submitted before NextEffectAt", e.Kind)
	}
	wanted := slot < int(s.w.count) && sameTemplate(n.template, exTemplates[0])
	switch e.Kind {
	case CreateLease:
		if n.lease != "" {
			s.fail("a create with a lease on record")
		}
		if e.AdoptOnly != (n.intent == Deleting) { // B4
			s.fail("a create that is adopt-only %v of a node that is %v", e.AdoptOnly, n.intent)
		}
	case CancelBootstrap:
		if n.intent != Deleting || e.Session == "" || e.Session != n.session {
			s.fail("a cancel of session %q of a node that is %v with session %q", e.Session, n.intent, n.session)
		}
	case DestroyLease:
		if n.ambiguous != NoOperation { // G5
			s.fail("a destroy while a %v is remembered", n.ambiguous)
		}
		if n.intent != Deleting || e.Lease == "" || e.Lease != n.lease || n.session != "" { // G6
			s.fail("a destroy of lease %q of a node that is %v with lease %q and session %q", e.Lease, n.intent, n.lease, n.session)
		}
	}
	if n.intent == Active && (!wanted || n.stage == StageFailed) {
		s.fail("%v for an attempt that is unwanted or has failed", e.Kind)
	}
	switch exSubmission(s.event.arg >> 4) {
	case exTurnedAway:
		s.refused = append(s.refused, slot)
		return false, errors.New("refused")
	case exCutOff:
		p.call = exGone
		return false, nil
	}
	p.call = exSent
	if p.zombie != NoOperation {
		p.call = exQueued
	}
	return p.call == exQueued, nil
}

// Expire implements EffectExecutor.
func (s *exStep) Expire(id OperationID) Completion {
	slot := s.slotOf(id.Attempt)
	if slot < 0 {
		s.fail("operation %v expires, whose attempt is over", id)
		return Completion{}
	}
	n, p := &s.w.slots[slot].node, &s.w.slots[slot].prov
	if n.deadlines[exPendingDeadline] != exDue {
		s.fail("%v expires before its deadline", n.pending)
	}
	c := Completion{Class: ClassAmbiguous}
	how := exExpiry(s.event.arg & 15)
	switch {
	case p.call == exQueued:
		c.Class = ClassNotStarted
	case how == exArrived && p.call == exDone:
		c = s.success(slot, true)
	case how == exLandsLater && p.call == exSent && s.m.canLandLate(n, p):
		s.landLater(n, p)
	case how == exHangs && (p.call == exSent || p.call == exDone):
		if p.zombie != NoOperation {
			s.fail("two calls of one attempt run at once")
		}
		p.zombie = n.pending
		p.zombieDone = p.call == exDone || n.pending == CreateLease && !s.m.canLandLate(n, p)
	}
	c.Operation, c.Kind = id, n.pending
	p.call = exNoCall
	s.may[slot] = exPermits(c.Kind, c.Class)
	return c
}

// Retire implements EffectExecutor.
func (s *exStep) Retire(attempt NodeAttemptID) {
	slot := s.slotOf(attempt)
	if slot < 0 || s.w.slots[slot].node.intent != Deleting {
		s.fail("attempt %d is retired too early", attempt)
		return
	}
	s.over(slot)
}

// Running implements EffectExecutor.
func (s *exStep) Running() []RunningCall { return nil }

// over: nothing is left of the attempt of a slot, or so it is thought.
func (s *exStep) over(slot int) {
	p := &s.w.slots[slot].prov
	left := p.machines > 0 || p.landing || p.zombie == CreateLease && !p.zombieDone
	switch {
	case !left:
	case s.m.class == exHastyLabel && p.hasty != exNoHaste:
		s.leak = exHasteNames[p.hasty]
	default:
		s.fail("the attempt ends with %d machines, a late create %v, an overdue call of %v", p.machines, p.landing, p.zombie)
	}
	if p.call != exNoCall || p.zombie != NoOperation {
		s.fail("the attempt ends while a call of it runs")
	}
	*p = exProvider{}
}

// close reads back what has come of the real state.
func (s *exStep) close() {
	if s.broken != nil {
		return
	}
	if err := s.driver.state.Check(); err != nil { // S1 to S8
		s.fail("%w", err)
	}
	s.whole = make([]*node, s.m.slots)
	for i := range s.m.slots {
		was, is := &s.before.slots[i].node, &s.w.slots[i].node
		n := s.driver.state.find(exNames[i])
		s.whole[i] = n
		fresh := n != nil && s.slotOf(n.attempt) != i
		switch {
		case n == nil:
			*is = exNode{}
		default:
			*is = exAbstract(n, exAt)
		}
		if fresh && n.attempt < exNextAttempt {
			s.fail("attempt %d is given out twice", n.attempt) // S1
		}
		if fresh || n == nil {
			if was.there && was.stage != StageDestroyed {
				s.fail("the attempt is dropped in stage %v", was.stage) // G6
			}
			if fresh && was.there && was.deadlines[exRestartAt] == exAhead {
				s.fail("a restart before RestartAt")
			}
			continue
		}
		if !was.there {
			continue
		}
		may := s.may[i]
		if n.givenUp == StartBootstrap {
			may.forget = StartBootstrap
		}
		s.checkFacts(was, is, may)
	}
}

// checkFacts compares a node before and after, of one attempt.
func (s *exStep) checkFacts(was, is *exNode, may exMay) {
	if was.ambiguous != NoOperation && is.ambiguous != was.ambiguous && may.forget != was.ambiguous {
		s.fail("a %v of unknown outcome is forgotten", was.ambiguous) // G5
	}
	if was.lease && !is.lease && !may.dropLease {
		s.fail("a lease is forgotten") // G5
	}
	if was.intent == Deleting && is.intent == Active {
		s.fail("Deleting turns back to Active")
	}
	if was.intent == Active && is.intent == Deleting && (is.deadlines[exNextEffectAt] != exUnset || is.deadlines[exStageDeadline] != exUnset || is.heldLen > 0) {
		s.fail("the cleanup begins with a wait of the way up") // R4
	}
	if (was.intent == Deleting || was.stage == StageFailed) && is.stage != was.stage && is.stage != StageDestroyed {
		s.fail("an attempt that is over goes from %v to %v", was.stage, is.stage)
	}
	if was.ready && !is.ready && !may.unready && !(s.passed && is.intent == Deleting) {
		s.fail("a ready node is torn down without a loss")
	}
	if was.pending != NoOperation && is.pending != NoOperation && was.pending != is.pending && !s.passed {
		s.fail("%v takes the place of %v", is.pending, was.pending)
	}
}

// checkPass holds a pass to what the worlds before and after it show.
func (s *exStep) checkPass() {
	if s.broken != nil {
		return
	}
	wakes := false
	for i := range s.m.slots {
		was, is := &s.before.slots[i].node, &s.w.slots[i].node
		wanted := i < int(s.before.count)
		fit := was.there && wanted && !was.other && was.stage != StageFailed
		if was.ready && !is.ready && fit {
			s.fail("a ready node as wished for is torn down")
		}
		if !was.there || was.deadlines[exPendingDeadline] == exDue || was.deadlines[exStageDeadline] == exDue {
			continue
		}
		if rule := decide(was.real(i), s.wish(wanted), exAt); rule.until != nil || rule.Number == ruleSteady {
			if rule.action != NoAction || *was != *is {
				s.fail("%v, a rule that waits, changes the node", rule.Rule)
			}
			wakes = wakes || rule.until != nil && rule.until(was.real(i)) != 0
		}
	}
	for _, slot := range s.refused {
		if s.w.slots[slot].node.pending != NoOperation {
			s.fail("an operation whose submission was refused stays pending")
		}
	}
	if s.requests == 0 && s.before == s.w && wakes && s.driver.requeueAt == 0 {
		s.fail("a deadline is waited for and RequeueAt is unset")
	}
	if s.driver.requeueAt.due(exAt) {
		s.fail("RequeueAt is due when the pass ends")
	}
	settled := s.m.settled(&s.w)
	if s.driver.Converged(exGeneration) != settled {
		s.fail("Converged says %v", !settled)
	}
}

func (s *exStep) wish(wanted bool) *template { return exIf(wanted, exTemplates[0]) }

// checkTruth holds what is on record to what is true.
func (s *exStep) checkTruth() {
	for i := range s.m.slots {
		n, p := &s.w.slots[i].node, &s.w.slots[i].prov
		billed := p.machines > 0 || p.landing || p.zombie == CreateLease && !p.zombieDone
		known := n.there && (n.lease || n.pending == CreateLease || n.ambiguous == CreateLease)
		if billed && !known && p.hasty == exNoHaste {
			s.fail("something that costs money is forgotten: %d machines, a late create %v", p.machines, p.landing) // G5
		}
		if p.machines > 1 && s.m.class < exLabel {
			s.fail("two machines of one attempt")
		}
		if n.ready && p.machines == 0 && !p.untold {
			s.fail("the node is ready and has no machine")
		}
		if n.growing() && n.session == exNewest && p.live && !p.silent && p.hasSaid(exJoin) && !n.joined {
			s.fail("a join that was reported is not on record")
		}
		if n.growing() && n.session == exNewest && p.live && !p.silent && p.hasSaid(exJoin) && p.hasSaid(exConverged) && !n.ready {
			s.fail("joined and Converged, and not handed off")
		}
	}
}

// settled: the slots are as wished, as the driver sees it.
func (m *exModel) settled(w *exWorld) bool {
	for i := range m.slots {
		n := &w.slots[i].node
		if wanted := i < int(w.count); wanted != n.there || wanted && (n.other || !n.ready || n.pending != NoOperation || n.intent != Active) {
			return false
		}
	}
	return true
}

// converged: and so they are in truth. A hasty provider may have made a second
// machine beside that of a node.
func (m *exModel) converged(w *exWorld) bool {
	for i := range m.slots {
		p := &w.slots[i].prov
		machines := p.machines
		if m.class == exHastyLabel {
			machines = min(machines, 1)
		}
		if machines != exIf[uint8](i < int(w.count), 1) || p.dead || p.landing || p.starting || p.untold || p.zombie != NoOperation {
			return false
		}
	}
	return m.settled(w)
}
