package provisioning

import (
	"fmt"
	"strings"
)

// exSearch is a breadth-first search through everything that can happen.
type exSearch struct {
	*exModel
	index       map[exCode]uint32
	codes       []exCode
	parents     []uint32
	via         []exEvent // from the parent
	faults      []uint8   // the fewest on a way to it
	transitions int
	// The moves that happen also when no more faults do: those of state i are
	// calm[calmFrom[i]:calmFrom[i+1]], loops left out.
	calm     []exCalm
	calmFrom []uint32
	leaks    map[string]exLeak
	beside   int // worlds with a ready node and a second machine
	moving   []exMove
}

type exCalm struct {
	to   uint32
	pass bool
}

// exLeak is a way in which a hasty provider keeps a machine.
type exLeak struct {
	states int
	first  uint32
	event  exEvent
}

// exViolation is something that must not be, and the shortest way to it.
type exViolation struct {
	what  string
	state uint32
	event *exEvent // at the end of the way
}

func exNewSearch(m exModel) *exSearch {
	return &exSearch{exModel: &m, index: map[exCode]uint32{}, leaks: map[string]exLeak{}}
}

// exOpen is a world on its way into the search.
type exOpen struct {
	code   exCode
	parent uint32
	via    exEvent
}

// run searches from nothing, with every slot wished for. It goes through the
// worlds by the fewest faults on a way to them, so that a world need not say how
// many faults it took: what can happen after more of them is less.
func (s *exSearch) run() *exViolation {
	first := exWorld{count: uint8(s.slots)}
	open := make([][]exOpen, s.maxFaults+1)
	s.index[first.encode(s.slots)] = 0
	s.codes, s.parents, s.via, s.faults = []exCode{first.encode(s.slots)}, []uint32{0}, []exEvent{{}}, []uint8{0}
	i := uint32(0)
	for faults := range open {
		for _, o := range open[faults] {
			s.visit(o, uint8(faults))
		}
		open[faults] = nil
		for ; int(i) < len(s.codes); i++ {
			if v := s.expand(i, open); v != nil {
				return v
			}
		}
	}
	s.calmFrom = append(s.calmFrom, uint32(len(s.calm)))
	return nil
}

// visit returns the number of a world and gives it one if it is new.
func (s *exSearch) visit(o exOpen, faults uint8) uint32 {
	i, known := s.index[o.code]
	if !known {
		i = uint32(len(s.codes))
		s.index[o.code] = i
		s.codes, s.parents, s.via, s.faults = append(s.codes, o.code), append(s.parents, o.parent), append(s.via, o.via), append(s.faults, faults)
	}
	return i
}

// expand lets everything happen that can happen in a world.
func (s *exSearch) expand(i uint32, open [][]exOpen) *exViolation {
	s.calmFrom = append(s.calmFrom, uint32(len(s.calm)))
	w := s.codes[i].decode(s.slots)
	if problem := s.probe(&w); problem != "" {
		return &exViolation{what: problem, state: i}
	}
	for n := range s.slots {
		if w.slots[n].node.ready && w.slots[n].prov.machines > 1 {
			s.beside++
		}
	}
	s.moving = s.moves(&w, s.moving[:0])
	for k := 0; k < len(s.moving); k++ {
		move := s.moving[k]
		faults := s.faults[i] + move.cost
		if faults > s.maxFaults {
			continue
		}
		step := s.take(&w, move.exEvent)
		s.transitions++
		if step.broken != nil {
			return &exViolation{what: step.broken.Error(), state: i, event: &move.exEvent}
		}
		if step.requests > 0 && move.arg>>4 == 0 { // it can also go otherwise
			for v := exTurnedAway; v < exSubmissions; v++ {
				other := move
				other.arg |= uint8(v) << 4
				other.cost, other.calm = 1, false
				s.moving = append(s.moving, other)
			}
		}
		if step.leak != "" {
			leak := s.leaks[step.leak]
			if leak.states == 0 {
				leak.first, leak.event = i, move.exEvent
			}
			leak.states++
			s.leaks[step.leak] = leak
		}
		o := exOpen{step.w.encode(s.slots), i, move.exEvent}
		if move.cost > 0 {
			if _, known := s.index[o.code]; !known {
				open[faults] = append(open[faults], o)
			}
			continue
		}
		to := s.visit(o, faults)
		if move.calm && to != i {
			s.calm = append(s.calm, exCalm{to, move.kind == exPass})
		}
	}
	return nil
}

// probe tells every slot what must not touch it.
func (s *exSearch) probe(w *exWorld) string {
	for i := range s.slots {
		was := &w.slots[i].node
		if !was.there {
			continue
		}
		attempt := exAttempt(i)
		probes := [...]Observation{
			{Kind: NodeLost, Attempt: exNextAttempt}, // of another attempt
			{Kind: SwactorJoined, Attempt: exNextAttempt, Session: exSessionID(was.session), Swactor: "another"},
			{Kind: BootstrapFailed, Attempt: attempt, Session: "never was"},
			{Kind: OperationCompleted, Attempt: attempt, Completion: Completion{Operation: OperationID{attempt, 0}, Kind: was.pending}}, // of long ago
			{Kind: OperationCompleted, Attempt: attempt, Completion: Completion{Operation: OperationID{attempt, 1}, Kind: was.pending%DestroyLease + 1, Class: ClassDefinite}},
			{Attempt: attempt},
		}
		for _, o := range probes {
			if o.Session == "never was" && was.session == exNoSession && (was.pending == StartBootstrap || was.ambiguous == StartBootstrap) {
				continue // it is held, until the start has named its session
			}
			o.Node = exNames[i]
			n := was.real(i)
			if reason := n.fold(&o, &exConfig.Retry, exAt); reason == "" || exAbstract(n, exAt) != *was {
				return fmt.Sprintf("%s takes %v of attempt %d, which is not for it", exNames[i], o.Kind, o.Attempt)
			}
		}
	}
	return ""
}

// exBound is how far any state is from convergence once no more faults happen.
type exBound struct{ events, passes uint16 }

// settle walks the calm moves. If there is no way round in a circle, and
// wherever nothing more happens all is converged, then every schedule, in
// whatever order it lets things happen, converges; the longest way is the
// bound.
func (s *exSearch) settle() (exBound, *exViolation) {
	const unseen, open, done = 0, 1, 2
	mark := make([]uint8, len(s.codes))
	bounds := make([]exBound, len(s.codes))
	next := make([]uint32, len(s.codes))
	var longest exBound
	var stack []uint32
	for root := range s.codes {
		if mark[root] != unseen {
			continue
		}
		stack = append(stack[:0], uint32(root))
		mark[root] = open
		for len(stack) > 0 {
			i := stack[len(stack)-1]
			moves := s.calm[s.calmFrom[i]:s.calmFrom[i+1]]
			if int(next[i]) < len(moves) {
				to := moves[next[i]].to
				next[i]++
				switch mark[to] {
				case unseen:
					mark[to] = open
					stack = append(stack, to)
				case open:
					at := len(stack) - 1
					for stack[at] != to {
						at--
					}
					return longest, &exViolation{what: "without further faults it goes round in a circle:\n" + s.circle(stack[at:]), state: to}
				}
				continue
			}
			stack = stack[:len(stack)-1]
			mark[i] = done
			w := s.codes[i].decode(s.slots)
			if len(moves) == 0 && !s.converged(&w) {
				return longest, &exViolation{what: "nothing more happens, and it is not converged", state: i}
			}
			for _, move := range moves {
				b := bounds[move.to]
				bounds[i].events = max(bounds[i].events, b.events+1)
				bounds[i].passes = max(bounds[i].passes, b.passes+exIf[uint16](move.pass, 1))
			}
			longest.events = max(longest.events, bounds[i].events)
			longest.passes = max(longest.passes, bounds[i].passes)
		}
	}
	return longest, nil
}

// still asks every converged state for passes more than are needed. They must
// change nothing and call nobody.
func (s *exSearch) still() *exViolation {
	for i, code := range s.codes {
		if s.calmFrom[i] != s.calmFrom[i+1] {
			continue
		}
		w := code.decode(s.slots)
		for range 3 {
			step := s.take(&w, exEvent{kind: exPass})
			if step.broken != nil || step.requests > 0 || step.w != w || step.driver.requeueAt != 0 {
				return &exViolation{what: fmt.Sprintf("it is converged and does not stay so: %d operations, %v", step.requests, step.broken), state: uint32(i)}
			}
			w = step.w
		}
	}
	return nil
}

// path lists the events from the beginning to a state.
func (s *exSearch) path(state uint32) []exEvent {
	if state == 0 {
		return nil
	}
	return append(s.path(s.parents[state]), s.via[state])
}

// tell tells a violation: the shortest way to it, in words.
func (s *exSearch) tell(v *exViolation) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s provider, %d slots: %s\nIt comes about like this:\n", s.class, s.slots, v.what)
	events := s.path(v.state)
	if v.event != nil {
		events = append(events, *v.event)
	}
	w := s.codes[0].decode(s.slots)
	for k, e := range events {
		fmt.Fprintf(&b, "%3d. %s\n", k+1, s.words(&w, e))
		step := s.take(&w, e)
		w = step.w
		if step.broken == nil {
			fmt.Fprintf(&b, "       %s\n", s.outline(&w))
		}
	}
	text, draft := s.scenario(events)
	if draft != "" {
		draft = " (a draft: " + draft + ")"
	}
	fmt.Fprintf(&b, "As a scenario%s:\n%s", draft, text)
	return b.String()
}

// circle tells a way round.
func (s *exSearch) circle(states []uint32) string {
	var b strings.Builder
	for _, i := range states {
		w := s.codes[i].decode(s.slots)
		fmt.Fprintf(&b, "       %s\n", s.outline(&w))
	}
	return b.String()
}

// outline shows a world in a line.
func (m *exModel) outline(w *exWorld) string {
	var parts []string
	for i := range m.slots {
		n, p := &w.slots[i].node, &w.slots[i].prov
		text := "nothing"
		if n.there {
			want := exIf(i < int(w.count), exTemplates[0])
			text = fmt.Sprintf("%v %v, %v", n.intent, n.stage, decide(n.real(i), want, exAt).Rule)
			if n.pending != NoOperation {
				text += ", pending " + n.pending.String()
			}
			if n.ambiguous != NoOperation {
				text += ", remembers " + n.ambiguous.String()
			}
			text += exIf(n.lease, ", lease") + exIf(n.session != exNoSession, ", session")
		}
		text += fmt.Sprintf(" | %d machines", p.machines) + exIf(p.dead, " (dead)") + exIf(p.landing, ", one to come") + exIf(p.live, ", a session") +
			exIf(p.zombie != NoOperation, ", overdue "+p.zombie.String())
		if m.slots > 1 {
			text = string(exNames[i]) + ": " + text
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, "; ")
}
