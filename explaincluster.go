package provisioning

import (
	"fmt"
	"strings"
	"time"
)

// ClusterExplanation says what keeps a cluster from being what is wished for.
// All slots are of one moment; what it says besides is of the end of the last
// pass, and so a little older while one runs, and of the calls a little later.
//
// A cluster waits for as many things as there are Rules, so since when, after
// which error and what would let it go on is told by the First of each; nothing
// on record says since when the cluster is not as wished.
type ClusterExplanation struct {
	Generation uint64 `json:"generation"` // of the accepted wish
	Observed   uint64 `json:"observed"`   // that a pass last evaluated
	Converged  bool   `json:"converged"`
	Ready      int    `json:"ready"`
	Desired    int    `json:"desired"`
	Paused     bool   `json:"paused,omitempty"`
	// Rules says how many slots each rule decides about, of those that decide
	// about any, in the order of the ladder.
	Rules []RuleCount `json:"rules"`
	// StillRunning are the calls that have outlived their deadlines and have
	// not returned, also of attempts that are gone; none after a Replay.
	StillRunning []RunningCall `json:"stillRunning,omitempty"`
	// Now is the moment explained and Until when something happens by itself
	// next, both in the driver's clock; Until is zero if nothing does.
	Now   time.Time `json:"now"`
	Until time.Time `json:"until,omitzero"`
}

// RuleCount is how many slots a rule decides about, and what the first of them
// has to say.
type RuleCount struct {
	Rule  Rule        `json:"rule"`
	Count int         `json:"count"`
	First Explanation `json:"first"`
}

// ExplainCluster says what the cluster does at now, in the time of whoever
// drives. It looks at every slot once, and no pass runs meanwhile: for some 20 ms
// where there are a million nodes.
func (d *ClusterDriver) ExplainCluster(now time.Time) ClusterExplanation {
	at := d.tickAt(now)
	d.in.Lock()
	wish, executor, paused := d.accepted, d.executor, d.paused
	e := ClusterExplanation{Generation: wish.generation, Observed: d.seen.observed, Ready: d.seen.ready, Desired: d.seen.desired,
		Converged: d.seen.converged && d.seen.observed == wish.generation, Paused: d.paused, Now: at.time(), Until: d.requeueAt.time()}
	d.in.Unlock()

	e.Rules = d.countRules(wish, paused, at)
	if executor == nil {
		return e
	}
	for i := range e.Rules { // with no lock held: it may be the user's
		first := &e.Rules[i].First
		first.StillRunning = overrunning(executor, first.Attempt)
	}
	for _, call := range executor.Running() {
		if call.Expired {
			e.StillRunning = append(e.StillRunning, call)
		}
	}
	return e
}

// countRules asks the ladder about every slot, all at one moment.
func (d *ClusterDriver) countRules(wish *Desired, paused bool, at instant) []RuleCount {
	d.world.Lock()
	defer d.world.Unlock()
	var counts [len(ladder)]int
	var first [len(ladder)]LogicalNodeID
	for nodes, want := range matchGroups(d.state, wish) {
		for index := range max(len(nodes.nodes), want.count) {
			n, spec := nodes.at(index), want.wants(index)
			if n == nil && spec == nil {
				continue
			}
			rule := decide(n, spec, at).Number
			if counts[rule]++; counts[rule] > 1 {
				continue
			}
			first[rule] = NewLogicalNodeID(nodes.id, index)
		}
	}
	var rules []RuleCount
	for rule, count := range counts {
		if count > 0 {
			c := RuleCount{Rule: ladder[rule].Rule, Count: count}
			c.First, _ = d.explain(first[rule], wish, paused, at)
			rules = append(rules, c)
		}
	}
	return rules
}

// String explains the cluster in one sentence, in which each rule that keeps
// slots from being ready speaks through the first of them.
func (e ClusterExplanation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "generation %d: %d of %d ready", e.Generation, e.Ready, e.Desired)
	switch {
	case e.Converged:
		b.WriteString(", as wished")
	case e.Observed != e.Generation:
		b.WriteString(", and no pass has looked at that generation yet")
	}
	if e.Paused {
		b.WriteString("; growth is paused")
	}
	named := make(map[OperationID]bool)
	for _, c := range e.Rules {
		if call := c.First.StillRunning; call != nil && c.Rule.Number != ruleSteady {
			named[call.Operation] = true
		}
		switch {
		case c.Rule.Number == ruleSteady:
		case c.Count == 1:
			fmt.Fprintf(&b, "; %s", c.First)
		default:
			fmt.Fprintf(&b, "; %d like %s", c.Count, c.First)
		}
	}
	for _, call := range e.StillRunning {
		if !named[call.Operation] {
			fmt.Fprintf(&b, "; %s %s of %s is running after %s", call.Kind, call.Operation, call.Node, roughly(e.Now.Sub(call.Since)))
		}
	}
	if left := e.Until.Sub(e.Now); left > 0 {
		fmt.Fprintf(&b, "; the next deadline is in %s", roughly(left))
	}
	return b.String()
}

// roughly is a duration for people, as exact as they need it; it is 0 only if
// the duration is.
func roughly(d time.Duration) time.Duration {
	for _, unit := range [...]struct{ from, step time.Duration }{
		{time.Minute, time.Second}, {time.Second, 100 * time.Millisecond}, {time.Millisecond, time.Millisecond}, {time.Microsecond, time.Microsecond},
	} {
		if d.Abs() >= unit.from {
			return d.Round(unit.step)
		}
	}
	return d
}
