package trace

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/invariant"
)

// check asks what must be true at every moment.
func (w *World) check() error { return w.checkState(w.Driver.Snapshot()) }

func (w *World) checkState(state *provisioning.ClusterState) error {
	if len(w.watch.problems) > 0 {
		return w.watch.problems[0]
	}
	if err := errors.Join(state.Check(), invariant.Machines(w.config.Class, w.Fake.Machines())); err != nil {
		return err
	}
	for _, check := range []func(*provisioning.ClusterState) error{w.checkBounds, w.checkAttempts, w.checkBought, w.checkKept, w.checkHeld} {
		if err := check(state); err != nil {
			return err
		}
	}
	return nil
}

// checkKept compares each attempt with what it was when it was last looked at:
// what is given up or lost never comes back, and a wait that was stored is never
// moved, only ended, and no longer than it may be (G4).
func (w *World) checkKept(state *provisioning.ClusterState) error {
	clock := w.Driver.Clock(w.Now())
	seen := make(map[provisioning.NodeAttemptID]provisioning.ManagedNode, state.Len())
	for now := range state.All() {
		seen[now.Attempt] = now
		was, known := w.seen[now.Attempt]
		if err := w.checkWaits(&was, &now, clock); err != nil {
			return err
		}
		if !known {
			continue
		}
		kept := func(what string, ok bool, before, after any) error {
			if ok {
				return nil
			}
			return invariant.Wrong(fmt.Sprintf("%s of %s#%d to stay %v", what, now.Record.Node, now.Attempt, before), fmt.Sprint(after))
		}
		same := func(a, b time.Time) bool { return a.IsZero() || b.IsZero() || a.Equal(b) }
		idle := was.Pending == nil && was.NextSequence == now.NextSequence // nothing ended between
		err := errors.Join(
			kept("intent", was.Intent <= now.Intent, was.Intent, now.Intent),
			kept("end", was.Record.Stage < provisioning.StageFailed || now.Record.Stage >= was.Record.Stage, was.Record.Stage, now.Record.Stage),
			kept("lease", was.Record.Lease == "" || now.Record.Lease == "" || now.Record.Lease == was.Record.Lease, was.Record.Lease, now.Record.Lease),
			kept("restart", same(was.Retry.RestartAt, now.Retry.RestartAt), was.Retry.RestartAt, now.Retry.RestartAt),
			kept("wait", !idle || same(was.Retry.NextEffectAt, now.Retry.NextEffectAt), was.Retry.NextEffectAt, now.Retry.NextEffectAt),
			kept("stage deadline", !climbs(was) || !climbs(now) || was.Retry.StageDeadline.Equal(now.Retry.StageDeadline) || w.held.maybe(now.Attempt),
				was.Retry.StageDeadline, now.Retry.StageDeadline),
		)
		if err != nil {
			return err
		}
	}
	w.seen = seen
	return nil
}

// checkWaits: a wait that is stored now and was not before is no longer than the
// policy says, or than an answer asked for.
func (w *World) checkWaits(was, now *provisioning.ManagedNode, clock time.Time) error {
	p := w.policyOf(now.Record.Group)
	longest := max(cmp.Or(p.MaxDelay, provisioning.DefaultMaxDelay), cmp.Or(p.EndpointProbeInterval, provisioning.DefaultEndpointProbeInterval),
		min(w.watch.asked[now.Attempt], cmp.Or(p.MaxRetryAfter, provisioning.DefaultMaxRetryAfter)))
	for _, stored := range []struct{ before, at time.Time }{
		{was.Retry.NextEffectAt, now.Retry.NextEffectAt}, {was.Retry.RestartAt, now.Retry.RestartAt},
	} {
		if !stored.at.Equal(stored.before) && stored.at.Sub(clock) > longest {
			return invariant.Wrong(fmt.Sprintf("%s#%d to wait %v at most (G4)", now.Record.Node, now.Attempt, longest), stored.at.Sub(clock).String())
		}
	}
	return nil
}

// climbs: its bootstrap has a deadline, which nothing moves but a pause.
func climbs(n provisioning.ManagedNode) bool {
	return n.Intent == provisioning.Active && n.Record.Stage >= provisioning.StageEndpointKnown && n.Record.Stage <= provisioning.StageSwactorJoined
}

// heldBack is what a pause holds back.
type heldBack struct {
	nodes map[provisioning.NodeAttemptID]held
	// unsure: a pass broke, and what it held back or let go is not known.
	unsure bool
}

// held is since when, in the driver's clock, and the stage deadline then.
type held struct{ since, stageDeadline time.Time }

func (h *heldBack) maybe(attempt provisioning.NodeAttemptID) bool {
	_, is := h.nodes[attempt]
	return is || h.unsure
}

// checkHeldBack: the stage deadline of what a pause holds back stands still, and
// goes on with the time that was left. A whole pass has just ended.
func (w *World) checkHeldBack(state *provisioning.ClusterState) error {
	clock, nodes := w.Driver.Clock(w.Now()), make(map[provisioning.NodeAttemptID]held)
	for node := range state.All() {
		want := w.working.specs[node.Record.Node]
		was, before := w.held.nodes[node.Attempt]
		deadline := was.stageDeadline
		switch {
		case w.halted && invariant.HeldBack(provisioning.DecideNode(&node, want, clock).Action, &node, want != nil):
			if !before {
				was = held{clock, node.Retry.StageDeadline}
			}
			nodes[node.Attempt] = was
		case !deadline.IsZero():
			deadline = deadline.Add(clock.Sub(was.since))
		}
		if before && !w.held.unsure && climbs(node) && !node.Retry.StageDeadline.Equal(deadline) {
			return invariant.Wrong(fmt.Sprintf("stage deadline %v of %s#%d, held back since %v", deadline, node.Record.Node, node.Attempt, was.since),
				node.Retry.StageDeadline.String())
		}
	}
	w.held.nodes, w.held.unsure = nodes, w.held.unsure && w.halted
	return nil
}

// checkExplained: every slot can say what it does (and with them all that is
// wished for and not begun).
func (w *World) checkExplained(state *provisioning.ClusterState) error {
	explain := func(slot provisioning.LogicalNodeID) error {
		e, ok := w.Driver.Explain(slot, w.Now())
		if !ok || e.String() == "" || e.Decision.Err != nil {
			return invariant.Wrong("an explanation of "+string(slot), fmt.Sprintf("%v %q %v", ok, e, e.Decision.Err))
		}
		return nil
	}
	for node := range state.All() {
		if err := explain(node.Record.Node); err != nil {
			return err
		}
	}
	for spec := range w.wish.desired.All() {
		if _, begun := state.Node(spec.Node); !begun {
			if err := explain(spec.Node); err != nil {
				return err
			}
		}
	}
	for _, call := range w.Executor.Running() {
		if e, ok := w.Driver.Explain(call.Node, w.Now()); call.Expired && ok && e.Attempt == call.Operation.Attempt && e.StillRunning == nil {
			return invariant.Wrong(fmt.Sprintf("%v %v to be named as still running", call.Kind, call.Operation), e.String())
		}
	}
	return nil
}

// checkHeld: every machine that is billed is one that the driver says may be: it
// has the lease of that attempt, or a create of it that is not resolved (G5).
func (w *World) checkHeld(*provisioning.ClusterState) error {
	held := make(map[provisioning.ExternalKey]bool)
	for _, slot := range w.Driver.Held() {
		held[slot.Key] = true
	}
	for _, m := range w.Fake.Machines() {
		if !held[m.Key] {
			return invariant.Wrong(fmt.Sprintf("%s among what is held (G5)", m.Lease), fmt.Sprint(w.Driver.Held()))
		}
	}
	return nil
}

// checkBounds: what is remembered follows what lives (G12), and no more is in
// flight than may be (G10).
func (w *World) checkBounds(state *provisioning.ClusterState) error {
	stats := w.Executor.Stats()
	if most := state.Len() + stats.RunningExpired; stats.Attempts > most {
		return invariant.Wrong(fmt.Sprintf("at most %d attempts in the ledger (G12)", most), fmt.Sprint(stats.Attempts))
	}
	if places := w.placesTaken(state); w.config.MaxInFlight > 0 && places > w.config.MaxInFlight {
		return invariant.Wrong(fmt.Sprintf("at most %d operations in flight (G10)", w.config.MaxInFlight), fmt.Sprint(places))
	}
	for node := range state.All() {
		if len(node.Held) > 16 {
			return invariant.Wrong("at most 16 held observations", fmt.Sprint(len(node.Held)))
		}
		limit, failed := w.policyOf(node.Record.Group).CancelLimit, int(node.Retry.CancelsFailed)
		if limit == 0 {
			limit = provisioning.DefaultCancelLimit
		}
		if limit > 0 && failed >= limit || limit < 0 && node.Retry.GivenUp != provisioning.NoOperation {
			return invariant.Wrong(fmt.Sprintf("cancels given up at the limit, %d (G5)", limit), fmt.Sprintf("%d failed, given up: %v", failed, node.Retry.GivenUp))
		}
	}
	return nil
}

// checkAttempts: a slot has a fresh attempt only because of a failure or of a
// wish, and once the trouble has stopped it has few.
func (w *World) checkAttempts(*provisioning.ClusterState) error {
	for _, slot := range Slots {
		began, most := len(w.watch.attempts[slot]), w.watch.failures[slot]+int(w.wish.shape.Generation)
		if began > most {
			return invariant.Wrong(fmt.Sprintf("at most %d attempts of %s", most, slot), fmt.Sprint(began))
		}
		if w.calm != nil && began-w.calm[slot] > triesInCalm {
			return invariant.Wrong(fmt.Sprintf("at most %d further attempts of %s once the trouble has stopped (G7)", triesInCalm, slot), fmt.Sprint(began-w.calm[slot]))
		}
	}
	return nil
}

// checkBought: an attempt buys one machine (B1). It may buy another one only for
// one that went away by itself; and a provider that knows labels alone may let a
// create land late beside it.
func (w *World) checkBought(state *provisioning.ClusterState) error {
	if w.lateByLabel {
		return nil
	}
	for node := range state.All() {
		key := provisioning.ExternalKey{Run: Run, Node: node.Record.Node, Attempt: node.Attempt}
		if bought, owned := w.Fake.CreatedKey(key), w.Fake.DestroyedKey(key)+w.Fake.LiveKey(key); owned > 1 || bought > 1 && owned == bought {
			return invariant.Wrong(fmt.Sprintf("one machine for %s#%d", node.Record.Node, node.Attempt), fmt.Sprintf("%d bought, %d of them live or given back", bought, owned))
		}
	}
	return nil
}

func (w *World) placesTaken(state *provisioning.ClusterState) int {
	taken := 0
	for node := range state.All() {
		if node.Pending != nil && !w.watch.behind[node.Pending.ID] {
			taken++
		}
	}
	return taken
}

// checkAfterPass asks also what must be true at the end of a pass: RequeueAt is
// what Decide says about the state that the pass left, less what a pause holds
// back, and not yet due.
func (w *World) checkAfterPass() error {
	state := w.Driver.Snapshot()
	if err := w.checkState(state); err != nil {
		return err
	}
	if dispatched, submitted := len(w.watch.dispatched), len(w.watch.submitted); dispatched != submitted {
		return invariant.Wrong(fmt.Sprintf("%d operations submitted, as many as were recorded (G3)", dispatched), fmt.Sprint(submitted))
	}
	if err := errors.Join(w.checkConverged(state), w.checkHeldBack(state)); err != nil {
		return err
	}
	now := w.Now()
	clock := w.Driver.Clock(now)
	want := provisioning.Decide(state, w.working.desired, clock).RequeueAt
	if w.halted { // which Decide knows nothing of
		want = time.Time{}
		for node := range state.All() {
			want = invariant.Earliest(want, invariant.WakeOf(&node, w.working.specs[node.Record.Node], true, clock))
		}
	}
	at, stored := w.Driver.RequeueAt()
	if found, expected := moment(at.Sub(now), stored), moment(want.Sub(clock), !want.IsZero()); found != expected {
		return invariant.Wrong("RequeueAt "+expected, found)
	}
	if stored && !at.After(now) {
		return invariant.Wrong("RequeueAt to lie ahead", moment(at.Sub(now), true))
	}
	return nil
}

// checkConverged works out from the state what Converged and Progress have to
// be, and that a pass observed the wish that it began with.
func (w *World) checkConverged(state *provisioning.ClusterState) error {
	wanted, ready, fulfilled := 0, 0, 0
	for spec := range w.working.desired.All() {
		wanted++
		node, there := state.Node(spec.Node)
		if there && node.Record.Ready && reflect.DeepEqual(node.Record.Spec, spec) {
			ready++
			if node.Pending == nil {
				fulfilled++
			}
		}
	}
	generation := w.working.shape.Generation
	if state.ObservedGeneration != generation || w.Driver.ObservedGeneration() != generation {
		return invariant.Wrong(fmt.Sprintf("generation %d to be observed", generation), fmt.Sprint(state.ObservedGeneration, w.Driver.ObservedGeneration()))
	}
	latest := generation == w.wish.shape.Generation
	converged := latest && fulfilled == wanted && state.Len() == wanted
	if got := w.Driver.Converged(generation); got != converged {
		return invariant.Wrong(fmt.Sprintf("converged %v: %d of %d fulfilled, %d nodes", converged, fulfilled, wanted, state.Len()), fmt.Sprint(got))
	}
	if gotReady, gotWanted := w.Driver.Progress(); gotReady != ready || gotWanted != wanted {
		return invariant.Wrong(fmt.Sprintf("%d of %d ready", ready, wanted), fmt.Sprintf("%d of %d", gotReady, gotWanted))
	}
	return nil
}

func moment(left time.Duration, set bool) string {
	if !set {
		return "none"
	}
	return left.String()
}

// checkAtRest asks what must be true when nothing is left to do now: there is
// nothing to do, and a further pass does nothing (G1).
func (w *World) checkAtRest() error {
	if err := w.checkExplained(w.Driver.Snapshot()); err != nil {
		return err
	}
	plan := w.Driver.Plan(w.Now())
	if w.halted {
		plan.Actions = slices.DeleteFunc(plan.Actions, func(a provisioning.Action) bool {
			node, _ := w.Driver.Node(a.Node)
			return invariant.HeldBack(a.Kind, &node, w.wish.specs[a.Node] != nil)
		})
	}
	if err := invariant.NothingLeft(plan, w.config.MaxInFlight); err != nil {
		return err
	}
	if taken := w.placesTaken(w.Driver.Snapshot()); len(plan.Actions) > 0 && taken < w.config.MaxInFlight {
		return invariant.Wrong(fmt.Sprintf("all %d places taken while %v waits (G10)", w.config.MaxInFlight, plan.Actions[0].Node), fmt.Sprint(taken))
	}
	before, calls, events := w.outline(), w.watch.started, len(w.log)
	w.Driver.Trigger()
	if passes, err := w.Driver.DriveUntilBlocked(w.Now(), w.submits); err != nil || passes != 1 {
		return invariant.Wrong("exactly one further pass", fmt.Sprintf("%d, %v", passes, err))
	}
	if after := w.outline(); !reflect.DeepEqual(after, before) {
		return invariant.Wrong("a further pass to change nothing: "+before.String(), after.String())
	}
	if w.work.Len() > 0 || len(w.inbox) > 0 || w.watch.started > calls {
		return invariant.Wrong("a further pass to call nothing", fmt.Sprintf("%d pieces of work", w.work.Len()))
	}
	if more := w.log[events:]; len(more) != 1 {
		return invariant.Wrong("a further pass to tell of nothing but itself", fmt.Sprint(more))
	}
	if w.AfterDrive != nil {
		return w.AfterDrive()
	}
	return nil
}

// outline is all that a pass could change.
type outline struct {
	state      *provisioning.ClusterState
	requeue    string
	dispatched uint64
	attempts   uint64
	converged  bool
}

func (w *World) outline() outline {
	at, stored := w.Driver.RequeueAt()
	stats := w.Driver.Stats()
	return outline{w.Driver.Snapshot(), moment(at.Sub(w.Now()), stored), stats.Dispatched, stats.Attempts, w.Driver.Converged(w.wish.shape.Generation)}
}

func (o outline) String() string {
	return fmt.Sprintf("%s, requeue %s, %d dispatched, %d attempts, converged %v", stateText(o.state), o.requeue, o.dispatched, o.attempts, o.converged)
}
