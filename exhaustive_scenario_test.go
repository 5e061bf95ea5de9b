package provisioning

import (
	"fmt"
	"strings"
)

// This file writes a way through the exhaustive search as a scenario (see
// testdata/scenarios), in which the shipping executor and the fake provider do
// what the search has only modelled.

// exStory writes a scenario.
type exStory struct {
	m     *exModel
	lines []string
	// draft is why the scenario does not do exactly the same, empty if it
	// does: the language cannot say everything, and in a scenario deadlines
	// have an order.
	draft      string
	generation int
	images     int
	image      string // wished for
	built      string // of the node, if it is another
	unfolded   bool   // something is delivered that no pass has folded
	answered   bool   // and an answer is among it
	atOnce     bool   // the call in flight took effect when it began
}

var exWords = [...]string{"", "create", "lookup", "start", "converge", "cancel", "destroy"}

func (y *exStory) line(format string, args ...any) {
	y.lines = append(y.lines, fmt.Sprintf(format, args...))
}

func (y *exStory) cannot(what string) {
	if y.draft == "" {
		y.draft = what
	}
}

func (y *exStory) shape(count uint8) {
	y.generation++
	y.line("shape %d w:%d@%s", y.generation, count, y.image)
}

// scenario writes the events, and what the node is like in the end.
func (m *exModel) scenario(events []exEvent) (text, draft string) {
	y := &exStory{m: m, images: 1, image: "img1"}
	class := m.class
	if class == exHastyLabel {
		class = exLabel
		y.cannot("the fake waits until late creates have landed")
	}
	if m.slots > 1 {
		y.cannot("it shows one slot")
	}
	y.line("config class=%s bootstrap=manual drive=manual timeout=30s initial=1m max=1m probe=1m endpoint-timeout=100h bootstrap-timeout=100h cancel-limit=%d",
		class, exCancelLimit)
	w := exWorld{count: uint8(m.slots)}
	y.shape(1)
	for k, e := range events {
		step := m.take(&w, e)
		y.tell(&w, step, events[k+1:])
		if step.broken != nil {
			y.line("# %v", step.broken)
			break
		}
		w = step.w
	}
	if y.unfolded {
		y.cannot("what was delivered last is folded by the next pass only")
	}
	n := &w.slots[0].node
	if !n.there {
		y.line("expect w-0 gone")
	} else {
		y.line("expect w-0 stage=%v intent=%v ready=%v lease=%v session=%v pending=%s ambiguous=%s rule=%s", n.stage, n.intent, n.ready, n.lease,
			n.session != exNoSession, exWord(n.pending), exWord(n.ambiguous), decide(n.real(0), exIf(w.count > 0, exTemplates[0]), exAt).Name)
	}
	return strings.Join(y.lines, "\n") + "\n", y.draft
}

func exWord(kind OperationKind) string {
	if kind == NoOperation {
		return "none"
	}
	return exWords[kind]
}

// tell writes one event. What is still to come decides how the provider has to
// be told beforehand.
func (y *exStory) tell(w *exWorld, step *exStep, rest []exEvent) {
	e := step.event
	n, p := &w.slots[0].node, &w.slots[0].prov
	is := &step.w.slots[0]
	release := func(kind OperationKind, outcome string) {
		y.line("release w-0 %s %s", exWords[kind], outcome)
		y.unfolded, y.answered = true, true
	}
	report := func(what string) {
		if y.answered { // which is delivered by a pass, and a report at once
			y.catchUp(w, "a report overtakes an answer")
		}
		y.line("event w-0 %s", what)
		y.unfolded = true
	}
	switch e.kind {
	case exPass:
		y.pass(n, p, step, rest)
	case exTime:
		y.time(w, e.arg)
	case exEffect:
		switch {
		case is.prov.call == exDone: // it was scripted to happen at once
			if n.pending == CreateLease && n.resolving && p.machines == 0 {
				y.cannot("the fake asks whether there is something to adopt, and buys nothing")
			}
		case n.pending != CreateLease && e.arg == 1, n.pending != CreateLease && (p.machines == 0 || p.dead) && n.pending != DestroyLease || p.spent && p.machines == 0 && n.pending == CreateLease:
			release(n.pending, "lost")
		default:
			release(n.pending, "ok")
		}
	case exAnswer:
		switch exReply(e.arg) {
		case exNotStarted:
			y.cannot("a call that was made cannot answer NotStarted")
		case exOKWithout:
			release(n.pending, [...]string{CreateLease: "ok-no-endpoint", LookupEndpoint: "not-ready"}[n.pending])
		default:
			release(n.pending, [...]string{exOK: "ok", exDefinite: "definite", exDefinitely: "definite", exAmbiguously: "ambiguous",
				exLate: "late=1000h", exLost: "lost", exDead: "dead"}[exReply(e.arg)])
		}
	case exReturns:
		if e.arg == 0 && !p.zombieDone && p.zombie != StartBootstrap {
			y.cannot("what an overdue call does when it returns")
		}
		y.line("release w-0 %s %s", exWords[p.zombie], [...]string{"ok", "ambiguous"}[e.arg])
	case exLands:
		if e.arg < 2 {
			y.cannot("nothing lands late in time")
		}
	case exSays:
		if p.session > 1 || n.session == exOlder || exAge(e.arg>>4) == exOlder {
			y.cannot("an attempt has one session")
		}
		report([...]string{exJoin: "joined", exConverged: "stage=Converged", exClosed: "closed", exBroken: "failed", exCancelled: "stage=Cancelled"}[e.arg&15])
	case exFallsSilent:
	case exLoses:
		if p.call == exSent && y.atOnce {
			y.cannot("the machine is lost before the call takes effect")
		}
		y.line("remove w-0")
	case exTells:
		report("lost")
	case exCount:
		y.shape(e.arg)
	case exImages:
		if e.arg == 1 {
			y.image, y.built = y.built, y.image
			if n.other != is.node.other && y.image == "" {
				y.cannot("the image of the node is not known")
			}
		} else {
			if !n.other {
				y.built = y.image
			}
			y.images++
			y.image = fmt.Sprintf("img%d", y.images)
		}
		y.shape(w.count)
	}
}

// pass writes a pass, with what the call that it makes will do.
func (y *exStory) pass(n *exNode, p *exProvider, step *exStep, rest []exEvent) {
	is := &step.w.slots[0]
	overdue := n.pending != NoOperation && n.deadlines[exPendingDeadline] == exDue
	if overdue && exExpiry(step.event.arg&15) == exArrived {
		y.line("release w-0 %s ok", exWords[n.pending])
	}
	if step.requests > 0 {
		outcome := "hang"
		for _, e := range rest { // whether it takes effect before anything else is submitted
			if e.kind == exPass && e.arg>>4 == 0 && is.node.deadlines[exPendingDeadline] != exDue {
				continue
			}
			if e.kind == exEffect {
				outcome = "done-hang"
			}
			if e.kind == exEffect || e.kind == exAnswer {
				break
			}
		}
		kind := is.node.pending
		switch exSubmission(step.event.arg >> 4) {
		case exTurnedAway:
			outcome = "refuse"
			kind = y.m.asked(step)
		case exCutOff:
			y.cannot("a pass is not cut off")
		default:
			if outcome == "done-hang" && (is.prov.machines == 0 || is.prov.dead || is.prov.spent) && (kind != CreateLease || is.node.resolving || is.prov.spent) {
				outcome = "hang" // it will find nothing
			}
			if is.prov.call == exQueued {
				y.cannot("a call that waits behind another")
			}
		}
		y.line("script w-0 %s %s", exWords[kind], outcome)
		y.atOnce = outcome == "done-hang"
	}
	y.line("trigger")
	y.line("pass")
	y.unfolded, y.answered = false, false
	if step.requests > 0 && is.prov.call == exSent {
		y.line("pass # lets the call begin")
	}
	if overdue && p.call != exQueued {
		switch exExpiry(step.event.arg & 15) {
		case exAborted:
			y.line("release w-0 %s ambiguous", exWords[n.pending])
		case exLandsLater:
			y.line("release w-0 %s late=1000h", exWords[n.pending])
		}
	}
}

// catchUp writes a pass that folds what was delivered, if it does nothing else.
func (y *exStory) catchUp(w *exWorld, or string) {
	if again := y.m.take(w, exEvent{kind: exPass}); again.w != *w || again.requests > 0 {
		y.cannot(or)
	}
	y.line("trigger")
	y.line("pass")
	y.unfolded, y.answered = false, false
}

// asked is the operation that a pass submitted and the executor refused.
func (m *exModel) asked(step *exStep) OperationKind {
	accepted := step.event
	accepted.arg &= 15
	return m.take(&step.before, accepted).w.slots[0].node.pending
}

// time writes that deadlines come due. In a scenario they have an order: that
// of an operation, those of the delays, that of the stage.
func (y *exStory) time(w *exWorld, set uint8) {
	n := &w.slots[0].node
	if y.unfolded { // or the wait would begin too late
		y.catchUp(w, "what was delivered is folded after the time has passed")
	}
	due := func(d int) bool { return set&(1<<d) != 0 }
	if due(exStageDeadline) && (n.deadlines[exPendingDeadline] == exAhead && !due(exPendingDeadline) || n.deadlines[exNextEffectAt] == exAhead && !due(exNextEffectAt)) {
		y.cannot("the stage deadline comes first")
	}
	if n.deadlines[exRestartAt] == exAhead && !due(exRestartAt) {
		y.cannot("RestartAt stays ahead while time passes")
	}
	switch {
	case due(exStageDeadline):
		y.line("advance 100h")
	case due(exNextEffectAt), due(exRestartAt):
		y.line("advance 1m")
	default:
		y.line("advance 30s")
	}
}
