package provisioning

import (
	"fmt"
	"strings"
)

// This file lists what can happen next in a world of the exhaustive search, and
// plays the provider.

// exClass is how a provider knows a repeated create.
type exClass uint8

const (
	exToken exClass = iota // the same token gives the same machine
	exName                 // a name exists once
	exLabel                // nothing but labels tells machines apart
	// exHastyLabel is exLabel with creates that land later than the settle
	// time that its backend waits out (B3): it gives final answers too early.
	exHastyLabel

	exClasses
)

var exClassNames = [...]string{"token", "name", "label", "hasty label"}

func (c exClass) String() string { return exClassNames[c] }

// exModel says what is searched.
type exModel struct {
	class     exClass
	slots     int
	maxFaults uint8
	maxHeld   uint8 // early reports
	// plain leaves out what one slot shows as well as two: reports that come
	// late or twice, and deadlines that come due together.
	plain bool
}

// exEvent is one thing that can happen.
type exEvent struct {
	kind exKind
	slot uint8
	arg  uint8
}

type exKind uint8

const (
	exPass        exKind = iota // arg: an exExpiry and, from bit 4, an exSubmission
	exTime                      // arg: the set of deadlines that come due
	exEffect                    // the call reaches the provider. arg: 1 where a token provider finds out without asking again
	exAnswer                    // the call answers. arg: an exReply
	exReturns                   // a call that outlived its deadline returns. arg: 1 without effect
	exLands                     // what was answered before takes effect. arg: 0 a create, 1 a start; 2, 3 it never will
	exSays                      // the bootstrap reports. arg: an exSaid, from bit 4 an exAge
	exFallsSilent               // the bootstrap reports nothing more, or its reports are lost
	exLoses                     // the machine is gone
	exTells                     // and this is reported
	exCount                     // the wish. arg: how many slots
	exImages                    // arg: 0 another image, 1 the image that another node has
)

// exExpiry is what becomes of an operation that is out of time.
type exExpiry uint8

const (
	exAborted    exExpiry = iota // it takes no more effect than it has
	exArrived                    // its result was there already
	exLandsLater                 // it takes effect, some time
	exHangs                      // it does not even return

	exExpiries
)

// exSubmission is what becomes of operations that are submitted.
type exSubmission uint8

const (
	exAccepted exSubmission = iota
	exTurnedAway
	exCutOff // the pass ends between recording and submitting

	exSubmissions
)

// exReply is how a call answers.
type exReply uint8

const (
	exOK          exReply = iota
	exOKWithout           // a create without an endpoint, a look-up that finds none yet
	exDefinite            // nothing was done
	exDefinitely          // the same answer, by an error of no class, after it was done
	exAmbiguously         // whether it was done or not
	exLate                // the same answer, and it is done some time
	exNotStarted          //
	exLost                // LeaseLost without a lease
	exDead                // LeaseLost with the lease of a machine that is billed on
	exReplies
)

// exMove is an event that is possible in a world.
type exMove struct {
	exEvent
	cost uint8 // faults
	// calm: it also happens when no more faults do. What has gone wrong
	// before goes on; nobody is asked again what cannot be known before
	// something that must happen has happened.
	calm bool
}

// moves lists what can happen, passes first.
func (m *exModel) moves(w *exWorld, out []exMove) []exMove {
	out = m.passes(w, out)
	for i := range m.slots {
		s := uint8(i)
		add := func(kind exKind, arg uint8, cost uint8, calm bool) {
			out = append(out, exMove{exEvent{kind, s, arg}, cost, calm && cost == 0})
		}
		m.times(w, i, add)
		n, p := &w.slots[i].node, &w.slots[i].prov
		switch p.call {
		case exSent:
			m.replies(n, p, add)
		case exDone:
			add(exAnswer, uint8(exOK), 0, true)
			if n.pending == CreateLease {
				add(exAnswer, uint8(exOKWithout), 0, true)
			} else {
				add(exAnswer, uint8(exDefinitely), 1, false)
			}
			add(exAnswer, uint8(exAmbiguously), 1, false)
		}
		if p.zombie != NoOperation {
			add(exReturns, 0, 0, true)
			if !p.zombieDone {
				add(exReturns, 1, 0, true)
			}
		}
		if p.landing {
			add(exLands, 0, 0, true)
			add(exLands, 2, 0, true)
		}
		if p.starting && !(n.pending == StartBootstrap && p.call == exDone) {
			add(exLands, 1, 0, true)
			add(exLands, 3, 0, true)
		}
		m.sayings(n, p, add)
		if p.machines > 0 && !p.dead {
			add(exLoses, 0, 1, false)
		}
		if p.untold {
			add(exTells, 0, 0, true)
		}
	}
	for count := range m.slots + 1 {
		if uint8(count) != w.count {
			out = append(out, exMove{exEvent{exCount, 0, uint8(count)}, 0, false})
		}
	}
	present, other := false, false
	for i := range m.slots {
		if n := &w.slots[i].node; n.there {
			present, other = present || !n.other, other || n.other
		}
	}
	if present {
		out = append(out, exMove{exEvent{exImages, 0, 0}, 0, false})
	}
	if other {
		out = append(out, exMove{exEvent{exImages, 0, 1}, 0, false})
	}
	return out
}

// passes lists the ways in which a pass can go but for its submissions, which
// turn up only in the pass.
func (m *exModel) passes(w *exWorld, out []exMove) []exMove {
	for v := range exExpiries {
		possible := v == exAborted
		for i := range m.slots {
			n, p := &w.slots[i].node, &w.slots[i].prov
			if n.pending == NoOperation || n.deadlines[exPendingDeadline] != exDue {
				continue
			}
			switch v {
			case exArrived:
				possible = possible || p.call == exDone
			case exLandsLater:
				possible = possible || p.call == exSent && m.canLandLate(n, p)
			case exHangs:
				possible = possible || p.call == exSent || p.call == exDone
			}
		}
		if possible {
			out = append(out, exMove{exEvent{exPass, 0, uint8(v)}, 0, true})
		}
	}
	return out
}

// canLandLate: the pending call may have its effect after its answer.
func (m *exModel) canLandLate(n *exNode, p *exProvider) bool {
	switch n.pending {
	case CreateLease:
		asks := n.resolving && m.class != exToken || p.landing && m.class == exLabel // and buys nothing (B3, B4)
		return p.machines == 0 && !p.spent && !asks
	case StartBootstrap:
		return true
	}
	return false
}

// times lists the sets of deadlines that may come due together.
func (m *exModel) times(w *exWorld, slot int, add func(exKind, uint8, uint8, bool)) {
	n, p := &w.slots[slot].node, &w.slots[slot].prov
	for set := uint8(1); set < 1<<exDeadlines; set++ {
		cost, calm, ahead := uint8(0), true, true
		for d := range exDeadlines {
			if set&(1<<d) == 0 {
				continue
			}
			ahead = ahead && n.deadlines[d] == exAhead
			switch {
			case d == exRestartAt && n.stage != StageDestroyed: // nobody looks at it before
				ahead = false
			case d == exPendingDeadline && (p.call == exSent || p.call == exDone): // it takes too long
				cost++
			case d == exPendingDeadline && p.call == exQueued: // calm waits until the call before it has returned
				calm = false
			case d == exStageDeadline && !p.stuck(n):
				cost++
			}
		}
		if ahead && !(m.plain && set&(set-1) != 0) {
			add(exTime, set, cost, calm)
		}
	}
}

// stuck: the node waits for its bootstrap, which will say nothing any more.
func (p *exProvider) stuck(n *exNode) bool {
	return n.stage == StageBootstrapRunning && n.session != exNoSession && n.pending == NoOperation && !p.untold &&
		(n.session != exNewest || !p.live || p.silent || p.hasSaid(exJoin))
}

// replies lists what can come of a call that the provider has not heard of yet.
func (m *exModel) replies(n *exNode, p *exProvider, add func(exKind, uint8, uint8, bool)) {
	// Where only waiting helps (B3), calm waits.
	unsettled := p.landing && (n.pending == CreateLease && p.machines == 0 && m.unsettled(n) || n.pending == DestroyLease && m.class != exHastyLabel)
	add(exEffect, 0, 0, !unsettled)
	if m.class == exToken && n.pending == CreateLease && n.resolving && p.machines == 0 && !p.landing && !p.spent {
		add(exEffect, 1, 0, true)
	}
	if (n.pending == CancelBootstrap || n.pending == DestroyLease) && p.machines == 0 && (!p.landing || n.pending == CancelBootstrap) {
		add(exEffect, 1, 0, true)
	}
	reply := func(r exReply) { add(exAnswer, uint8(r), 1, false) }
	reply(exAmbiguously)
	reply(exNotStarted)
	if m.canLandLate(n, p) {
		reply(exLate)
	}
	switch {
	case n.pending != CreateLease:
		reply(exDefinite)
	case p.machines == 0 && (!p.landing || m.class == exHastyLabel): // B1, B3
		if !n.resolving {
			reply(exDefinite)
		}
		reply(exLost)
	}
	switch n.pending {
	case CreateLease:
		if !p.landing && !p.spent && (p.machines > 0 || !n.resolving) {
			reply(exDead)
		}
	case LookupEndpoint:
		reply(exOKWithout)
	}
}

// unsettled: the provider does not answer this create before the late one has
// landed.
func (m *exModel) unsettled(n *exNode) bool {
	return m.class == exLabel || m.class == exName && n.resolving
}

// sayings lists what a bootstrap may report.
func (m *exModel) sayings(n *exNode, p *exProvider, add func(exKind, uint8, uint8, bool)) {
	if p.session == 0 || !n.there {
		return
	}
	held := func(what exSaid, of exAge) bool { // no room, or said before in the same way
		if n.session != exNoSession || n.pending != StartBootstrap && n.ambiguous != StartBootstrap {
			return false
		}
		for _, h := range n.held[:n.heldLen] {
			if h == (exHeld{what, of}) {
				return true
			}
		}
		return n.heldLen == m.maxHeld
	}
	say := func(what exSaid, cost uint8, calm bool) {
		if !held(what, exNewest) {
			add(exSays, uint8(what)|uint8(exNewest)<<4, cost, calm)
		}
	}
	for what := range exSayings {
		switch {
		case !p.live || p.hasSaid(what): // late, or once more
			if !m.plain {
				say(what, 0, false)
			}
		case what == exClosed && p.hasSaid(exJoin): // B10
			say(what, 0, true)
		case what >= exClosed:
			say(what, 1, false)
		case !p.silent:
			say(what, 0, true)
		}
		if p.session > 1 && n.heldLen > 0 && !held(what, exOlder) { // among those of the newest
			add(exSays, uint8(what)|uint8(exOlder)<<4, 0, false)
		}
	}
	if p.live && !p.silent && !p.hasSaid(exJoin) {
		add(exFallsSilent, 0, 1, false)
	}
}

// buy makes a machine. A create of its token that is still to take effect comes
// to nothing: it would be the same machine.
func (p *exProvider) buy(class exClass) {
	p.machines, p.dead = 1, false
	p.landing = p.landing && class != exToken
}

// lands lets a create take effect that has been answered long ago.
func (p *exProvider) lands(class exClass) {
	switch {
	case class == exToken && p.spent:
	case p.machines == 0:
		p.buy(class)
	case class == exLabel || class == exHastyLabel:
		p.machines = 2
	}
}

// begin starts a bootstrap or adopts the one that runs.
func (s *exSlot) begin() {
	if s.prov.live || s.prov.machines == 0 || s.prov.dead {
		return
	}
	s.prov.session = min(s.prov.session+1, 2)
	s.prov.live, s.prov.silent, s.prov.said = true, false, 0
	age := func(a *exAge) {
		if *a == exNewest {
			*a = exOlder
		}
	}
	age(&s.node.session)
	for i := range s.node.heldLen {
		age(&s.node.held[i].of)
	}
}

// end ends the machines of the slot, and what runs on them.
func (p *exProvider) end(class exClass) {
	p.spent = p.spent || class == exToken && p.machines > 0
	p.machines, p.dead, p.live = 0, false, false
}

// words tells an event.
func (m *exModel) words(w *exWorld, e exEvent) string {
	n, p := &w.slots[e.slot].node, &w.slots[e.slot].prov
	text := func() string {
		switch e.kind {
		case exPass:
			return "a pass" + [...]string{"", ", the result having arrived in time", ", what expires taking effect later", ", what expires not returning"}[e.arg&15] +
				[...]string{"", "; the executor refuses what is submitted", "; it is cut off between recording and submitting"}[e.arg>>4]
		case exTime:
			var due []string
			for d := range exDeadlines {
				if e.arg&(1<<d) != 0 {
					due = append(due, [...]string{"the deadline of " + n.pending.String(), "NextEffectAt", "RestartAt", "the stage deadline"}[d])
				}
			}
			return "time passes: " + strings.Join(due, " and ") + " comes due"
		case exEffect:
			switch {
			case e.arg == 1 && n.pending == CreateLease:
				return "CreateLease finds out that there is nothing to adopt"
			case e.arg == 1:
				return n.pending.String() + " finds the machine gone and answers LeaseLost"
			}
			return n.pending.String() + exIf(n.resolving && n.pending == CreateLease, " (adopt only)") + " reaches the provider"
		case exAnswer:
			return n.pending.String() + " answers " + [...]string{"with success", "with success, naming no endpoint", "Definite, nothing done", "Definite, though it was done",
				"Ambiguous" + [...]string{exSent: ", nothing done", exDone: ", though it was done"}[min(p.call, exDone)],
				"Ambiguous, and will be done later", "NotStarted", "LeaseLost", "LeaseLost with the lease of a dead machine"}[e.arg]
		case exReturns:
			return "the overdue " + p.zombie.String() + " returns, " + [...]string{"done", "with nothing done"}[e.arg]
		case exLands:
			return [...]string{"the late create takes effect", "the late start takes effect", "the late create turns out to have failed", "the late start turns out to have failed"}[e.arg]
		case exSays:
			return "the " + [...]string{"", "", "previous "}[e.arg>>4] + "bootstrap reports " + exSaidNames[e.arg&15]
		case exFallsSilent:
			return "the bootstrap falls silent"
		case exLoses:
			return "the machine is lost"
		case exTells:
			return "NodeLost is delivered"
		case exCount:
			return fmt.Sprintf("%d slots are wished for", e.arg)
		}
		return [...]string{"another image is wished for", "the image of the other nodes is wished for again"}[e.arg]
	}()
	if m.slots > 1 && e.kind != exPass && e.kind < exCount {
		text = string(exNames[e.slot]) + ": " + text
	}
	return text
}
