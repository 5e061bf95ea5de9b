package trace

import (
	"fmt"
	"slices"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
)

// Tail is the fair end of a trace. The trouble stops: scripts are dropped, what
// hangs returns, what is late lands, clocks go forward only, growth goes on. What
// the provider has to report it reports once, and only what it never reported
// before. Then the cluster has to become what is wished for, within Bound and
// without trying one slot again and again, and stay it without a call; and a wish
// for nothing has to leave nothing.
func (w *World) Tail() error { return w.tail() }

// TailAgain is Tail with everything reported again and again. Each of the two
// tails hides what the other one shows: a report that was missed, and one that
// counts twice.
func (w *World) TailAgain() error {
	w.again = true
	return w.tail()
}

func (w *World) tail() error {
	if err := w.Calm(); err != nil {
		return err
	}
	if err := w.Stay(30 * 24 * time.Hour); err != nil {
		return err
	}
	if err := w.CheckMachines(); err != nil {
		return err
	}
	if err := w.Wish(nil); err != nil {
		return err
	}
	if err := w.Settle(); err != nil {
		return err
	}
	if stats := w.Executor.Stats(); w.Driver.Snapshot().Len() > 0 || w.Fake.LiveTotal() > 0 || stats.Attempts > 0 || stats.Running > 0 {
		return invariant.Wrong("nothing left after a wish for nothing",
			fmt.Sprintf("%d slots, machines %v, %d attempts in the ledger, %d calls", w.Driver.Snapshot().Len(), w.Fake.Machines(), stats.Attempts, stats.Running))
	}
	return w.Stay(time.Hour)
}

// Calm ends the trouble and lets the cluster settle.
func (w *World) Calm() error {
	w.say("## the trouble stops")
	w.Fake.ClearScripts()
	clear(w.losing)
	w.during, w.breaking = nil, 0
	w.Driver.Resume()
	w.Driver.Trigger()
	w.countFromHere()
	return w.Settle()
}

// triesInCalm is how many attempts a slot may begin once the trouble has stopped.
// One is usual: the attempt that is under way may be doomed by what has happened
// to it. A report of the trouble that is folded only then may end the next one.
const triesInCalm = 3

// countFromHere begins to count the attempts against triesInCalm.
func (w *World) countFromHere() {
	w.calm = make(map[provisioning.LogicalNodeID]int, len(Slots))
	for _, slot := range Slots {
		w.calm[slot] = len(w.watch.attempts[slot])
	}
}

// repeat delivers again what was heard of late, and what the provider has said
// that is still so.
func (w *World) repeat() {
	const kept = 30
	for _, slot := range Slots {
		heard := w.heard[slot]
		for _, o := range heard[max(0, len(heard)-kept):] {
			w.Driver.Deliver(o)
		}
	}
	for _, r := range w.reports() {
		if w.told[r.name] {
			w.Driver.Deliver(r.Observation)
		}
	}
}

// Bound is how long a cluster of this world may take to converge once the
// trouble has stopped. An attempt that must still fail takes its longest limit,
// what is late a fault's longest time; both may have to happen once after the
// other, in cleanup and in growth, and the wait before a restart comes on top.
func (w *World) Bound() time.Duration {
	longest := maxFault
	policies := []provisioning.RetryPolicy{w.config.Retry}
	for _, p := range w.config.GroupRetry {
		policies = append(policies, p)
	}
	for _, p := range policies {
		longest = max(longest, p.MaxDelay, p.OperationTimeout, p.EndpointTimeout, p.BootstrapTimeout)
	}
	return 4*longest + 4*max(w.config.Settle, w.config.Lag)
}

// Settle drives until the wish is fulfilled and the provider has nothing left
// to do, which has to be within Bound.
func (w *World) Settle() error { return w.settle(w.Fake.Now().Add(w.Bound())) }

// settle drives until the wish is fulfilled and the provider has nothing left to
// do, at the latest at a moment; zero: whenever that is.
func (w *World) settle(until time.Time) error {
	for range maxRounds {
		if err := w.release(); err != nil {
			return err
		}
		if w.again {
			w.repeat()
		}
		if err := w.Drive(); err != nil {
			return err
		}
		if w.report() {
			continue
		}
		_, busy := w.Fake.NextDue()
		if !busy && w.Driver.Converged(w.Generation()) {
			return w.check()
		}
		next, ok := w.nextDue()
		if !ok {
			return invariant.Wrong("convergence", "nothing that is waited for: "+w.unfinished())
		}
		if !until.IsZero() && next.After(until) {
			return invariant.Wrong(fmt.Sprintf("convergence within %v (G7)", w.Bound()), w.unfinished())
		}
		w.Fake.AdvanceTo(next)
	}
	return invariant.Wrong("convergence", fmt.Sprintf("no end after %d rounds: %s", maxRounds, w.unfinished()))
}

func (w *World) unfinished() string {
	text := fmt.Sprintf("provider busy: %v", func() bool { _, busy := w.Fake.NextDue(); return busy }())
	for _, slot := range Slots {
		if e, ok := w.Driver.Explain(slot, w.Now()); ok && e.Decision.Rule.Name != "steady" {
			text += "; " + e.String()
		}
	}
	return text
}

// release lets all hanging calls return.
func (w *World) release() error {
	for _, slot := range Slots {
		for _, kind := range operations {
			for w.Fake.Hanging(slot, kind) > 0 {
				if err := w.Fake.Release(slot, kind, fakebackend.OK()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// report is something that the provider has to say.
type report struct {
	provisioning.Observation
	name  string
	after string // the report that has to come first; empty: none
}

// reports are what the provider has to say now: that a machine on record is
// gone, and in a world of manual bootstraps the join of a session and then its
// close.
func (w *World) reports() []report {
	var all []report
	live := make(map[provisioning.ProviderLeaseID]bool)
	for _, m := range w.Fake.Machines() {
		live[m.Lease] = true
		if !w.config.ManualBootstrap || !w.Fake.SessionLive(m.Key) {
			continue
		}
		o := provisioning.Observation{Kind: provisioning.SwactorJoined, Node: m.Key.Node, Attempt: m.Key.Attempt,
			Session: w.Fake.SessionID(m.Key), Swactor: fakebackend.SwactorID(m.Key)}
		join := report{Observation: o, name: joinOf(o)}
		o.Kind, o.Swactor = provisioning.BootstrapClosed, ""
		all = append(all, join, report{Observation: o, name: "close of " + string(o.Session), after: join.name})
	}
	for node := range w.Driver.Snapshot().All() {
		if lease := node.Record.Lease; lease != "" && !live[lease] {
			o := provisioning.Observation{Kind: provisioning.NodeLost, Node: node.Record.Node, Attempt: node.Attempt}
			all = append(all, report{Observation: o, name: "loss of " + string(lease)})
		}
	}
	return all
}

// report lets the provider say, once each, what nobody has heard yet. It returns
// whether there was anything.
func (w *World) report() bool { return w.tell(func(report) bool { return true }) }

func (w *World) tell(what func(report) bool) bool {
	due := slices.DeleteFunc(w.reports(), func(r report) bool { return !what(r) || w.told[r.name] || r.after != "" && !w.told[r.after] })
	for _, r := range due {
		w.told[r.name] = true
		w.Deliver(r.Observation)
	}
	return len(due) > 0
}

// Stay lets d pass, at the end of which nothing may have been called or
// changed. The cluster has converged, so nothing may be waited for either.
func (w *World) Stay(d time.Duration) error {
	state, calls := w.State(), w.watch.started
	if at, stored := w.Driver.RequeueAt(); stored {
		return invariant.Wrong("nothing to wait for", moment(at.Sub(w.Now()), true))
	}
	const looks = 5
	for range looks {
		w.Fake.AdvanceTo(w.Fake.Now().Add(d / looks))
		w.Driver.Trigger()
		if err := w.Drive(); err != nil {
			return err
		}
	}
	if after := w.State(); after != state || w.watch.started > calls || !w.Driver.Converged(w.Generation()) {
		return invariant.Wrong(fmt.Sprintf("it to stay converged for %v: %s", d, state), fmt.Sprintf("%d calls and %s", w.watch.started-calls, after))
	}
	return nil
}

// CheckMachines wants of a converged cluster exactly the wished machines, each
// under the lease on record, and none dead. Only at a provider that knows labels
// alone an attempt may have a second one: a late create landed, which nothing
// could prevent, and its machine goes with the attempt.
func (w *World) CheckMachines() error {
	state := w.Driver.Snapshot()
	owned := make(map[provisioning.LogicalNodeID]int)
	for _, m := range w.Fake.Machines() {
		node, ok := state.Node(m.Key.Node)
		switch {
		case !ok || node.Attempt != m.Key.Attempt || w.wish.specs[m.Key.Node] == nil:
			return invariant.Wrong("no machine but those of the wished slots' attempts", fmt.Sprintf("%+v", m))
		case node.Record.Lease == m.Lease && !m.Dead:
			owned[m.Key.Node]++
		case w.config.Class != fakebackend.Label || w.Fake.CreatedKey(m.Key) < 2:
			return invariant.Wrong("no machine beside the one on record", fmt.Sprintf("%+v beside %s", m, node.Record.Lease))
		}
	}
	for spec := range w.wish.desired.All() {
		if owned[spec.Node] != 1 {
			return invariant.Wrong("one machine of "+string(spec.Node), fmt.Sprint(owned[spec.Node]))
		}
	}
	return nil
}
