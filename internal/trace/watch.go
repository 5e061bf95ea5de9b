package trace

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/swactor/provisioning"
)

// watch is what is known from watching submissions, calls and events.
type watch struct {
	problems []error
	attempts map[provisioning.LogicalNodeID][]provisioning.NodeAttemptID // of a slot, oldest first
	newest   provisioning.NodeAttemptID
	failures map[provisioning.LogicalNodeID]int  // of attempts
	over     map[provisioning.NodeAttemptID]bool // destroyed
	running  map[provisioning.NodeAttemptID]int  // calls that have not returned
	calls    map[provisioning.NodeAttemptID][]provisioning.OperationKind
	wasReady map[provisioning.NodeAttemptID]bool
	asked    map[provisioning.NodeAttemptID]time.Duration // the longest wait that an answer asked for
	doomed   map[provisioning.NodeAttemptID]bool          // lost or replaced, as was delivered
	// behind are pending operations that were queued behind a call of their
	// own attempt; they take no place of MaxInFlight.
	behind     map[provisioning.OperationID]bool
	dispatched map[provisioning.OperationID]bool
	submitted  map[provisioning.OperationID]bool
	called     map[provisioning.OperationID]bool
	expired    map[provisioning.OperationID]bool
	started    int // calls in all
	at         map[provisioning.NodeAttemptID]place
	cells      map[Cell]int
}

func newWatch() watch {
	return watch{
		failures: make(map[provisioning.LogicalNodeID]int), cells: make(map[Cell]int), at: make(map[provisioning.NodeAttemptID]place),
		attempts: make(map[provisioning.LogicalNodeID][]provisioning.NodeAttemptID),
		over:     make(map[provisioning.NodeAttemptID]bool), running: make(map[provisioning.NodeAttemptID]int),
		calls:    make(map[provisioning.NodeAttemptID][]provisioning.OperationKind),
		asked:    make(map[provisioning.NodeAttemptID]time.Duration),
		wasReady: make(map[provisioning.NodeAttemptID]bool), doomed: make(map[provisioning.NodeAttemptID]bool),
		behind: make(map[provisioning.OperationID]bool), dispatched: make(map[provisioning.OperationID]bool),
		submitted: make(map[provisioning.OperationID]bool), called: make(map[provisioning.OperationID]bool),
		expired: make(map[provisioning.OperationID]bool),
	}
}

func (w *World) problem(format string, args ...any) {
	w.watch.problems = append(w.watch.problems, fmt.Errorf(format, args...))
	w.say("!! "+format, args...)
}

// attemptOf returns an attempt of a slot by age: 0 the newest.
func (w *watch) attemptOf(slot provisioning.LogicalNodeID, age int) provisioning.NodeAttemptID {
	if age < 0 {
		return w.newest + provisioning.NodeAttemptID(-age)
	}
	if of := w.attempts[slot]; age < len(of) {
		return of[len(of)-1-age]
	}
	return provisioning.NodeAttemptID(age) // one that may never have been
}

// watchedExecutor holds every submission to what is on record.
type watchedExecutor struct {
	provisioning.EffectExecutor
	w *World
}

func (x watchedExecutor) Submit(e provisioning.Effect) (bool, error) {
	w := x.w
	w.maybeBreak()
	node, ok := w.Driver.Node(e.Key.Node)
	what := fmt.Sprintf("%v %v of %s", e.Kind, e.Operation, e.Key.Node)
	w.holdRecorded(what, node, ok, e.Kind, e.Operation, e.Key)
	if !w.watch.dispatched[e.Operation] || w.watch.submitted[e.Operation] {
		w.problem("G3: %s is submitted, dispatched %v, submitted before %v", what, w.watch.dispatched[e.Operation], w.watch.submitted[e.Operation])
	}
	w.watch.submitted[e.Operation] = true
	if ok {
		w.holdEffect(what, node, e)
	}
	if len(w.during) > 0 {
		groups := w.during[0]
		w.during = w.during[1:]
		if err := w.Wish(groups); err != nil {
			w.problem("a wish from within Submit: %v", err)
		}
	}
	queued, err := x.EffectExecutor.Submit(e)
	if queued {
		w.watch.behind[e.Operation] = true
	}
	w.sayOf(e.Key.Node, "   submit %s: queued %v, refused %v", what, queued, err != nil)
	if w.config.Order == AtOnce {
		w.runWork(maxRounds)
	}
	return queued, err
}

func (x watchedExecutor) Expire(id provisioning.OperationID) provisioning.Completion {
	x.w.maybeBreak()
	x.w.watch.expired[id] = true
	c := x.EffectExecutor.Expire(id)
	x.w.watch.asks(id.Attempt, c)
	return c
}

// asks notes how long an answer asks to wait. The event of its fold may come too
// late: a pass that breaks off tells what it has folded in the next one.
func (w *watch) asks(attempt provisioning.NodeAttemptID, c provisioning.Completion) {
	w.asked[attempt] = max(w.asked[attempt], c.RetryAfter)
}

// holdRecorded: what is to be called is on record as the pending operation of
// the current attempt (G2, G3).
func (w *World) holdRecorded(what string, node provisioning.ManagedNode, ok bool, kind provisioning.OperationKind, id provisioning.OperationID, key provisioning.ExternalKey) {
	switch {
	case !ok:
		w.problem("G3: %s is of a slot that is not in the state", what)
	case key.Run != Run || key.Attempt != node.Attempt || id.Attempt != node.Attempt:
		w.problem("G2: %s carries key %v, and the node's attempt is %d", what, key, node.Attempt)
	case node.Pending == nil || node.Pending.ID != id || node.Pending.Kind != kind:
		w.problem("G3: %s is not recorded as pending", what)
	}
}

// holdEffect: the facts that an effect carries are those of the node, and the
// moment is right for it.
func (w *World) holdEffect(what string, node provisioning.ManagedNode, e provisioning.Effect) {
	r := &node.Record
	if was, seen := w.seen[node.Attempt]; seen && was.Pending == nil && was.Intent == node.Intent && was.NextSequence == e.Operation.Sequence &&
		was.Retry.NextEffectAt.After(e.DispatchedAt) {
		w.problem("G4: %s has to wait until %v", what, was.Retry.NextEffectAt)
	}
	if !e.DispatchedAt.Before(e.Deadline) || node.Pending != nil && !node.Pending.Deadline.Equal(e.Deadline) {
		w.problem("%s has deadline %v, dispatched at %v", what, e.Deadline, e.DispatchedAt)
	}
	deleting := node.Intent == provisioning.Deleting
	if w.halted && !deleting {
		w.problem("%s on the way up, during a pause", what)
	}
	switch e.Kind {
	case provisioning.CreateLease:
		if r.Lease != "" {
			w.problem("%s is a create beside lease %q", what, r.Lease)
		}
		if e.AdoptOnly != deleting {
			w.problem("B4: %s has AdoptOnly %v with intent %v", what, e.AdoptOnly, node.Intent)
		}
		if deleting && node.Retry.Ambiguous != provisioning.CreateLease {
			w.problem("R6: %s resolves nothing", what)
		}
		return
	case provisioning.LookupEndpoint, provisioning.BootstrapConvergenceObserved:
		if deleting {
			w.problem("R6 to R9: %s on the way down", what)
		}
	case provisioning.StartBootstrap:
		if deleting && node.Retry.Ambiguous != provisioning.StartBootstrap {
			w.problem("R6: %s resolves nothing", what)
		}
	case provisioning.CancelBootstrap:
		if !deleting || node.Retry.Ambiguous != provisioning.NoOperation || node.ActiveBootstrap == "" || e.Session != node.ActiveBootstrap {
			w.problem("G6: %s of %q with session %q and %v remembered", what, e.Session, node.ActiveBootstrap, node.Retry.Ambiguous)
		}
	case provisioning.DestroyLease:
		if !deleting || node.Retry.Ambiguous != provisioning.NoOperation || node.ActiveBootstrap != "" {
			w.problem("G5, G6: %s with session %q and %v remembered", what, node.ActiveBootstrap, node.Retry.Ambiguous)
		}
	}
	if r.Lease == "" || e.Lease != r.Lease {
		w.problem("G2: %s carries lease %q, the node has %q", what, e.Lease, r.Lease)
	}
}

// watchedBackend looks at the driver from within each call.
type watchedBackend struct{ w *World }

// enter is the start of a call. It returns its end.
func (b watchedBackend) enter(ctx context.Context, kind provisioning.OperationKind, key provisioning.ExternalKey, id provisioning.OperationID) func() {
	w := b.w
	if ctx.Err() != nil {
		return func() {} // over before it began: the fake calls nothing (B7)
	}
	node, ok := w.Driver.Node(key.Node)
	what := fmt.Sprintf("%v %v of %s", kind, id, key.Node)
	w.sayOf(key.Node, "   call %s", what)
	w.holdRecorded("the call "+what, node, ok, kind, id, key)
	for attempt, n := range w.watch.running { // it sums: no order shows
		if n > 0 && slices.Contains(w.watch.attempts[key.Node], attempt) {
			w.problem("G3: %s is called while a call of attempt %d runs", what, attempt)
		}
	}
	if kind == provisioning.DestroyLease && node.Retry.Ambiguous != provisioning.NoOperation {
		w.problem("G5: %s is called while %v is remembered", what, node.Retry.Ambiguous)
	}
	if w.watch.called[id] {
		w.problem("G3: %s is called a second time", what)
	}
	w.watch.called[id] = true
	made := w.watch.calls[key.Attempt]
	if len(made) > 0 && made[len(made)-1] == provisioning.DestroyLease && kind != provisioning.DestroyLease {
		w.problem("G6: %s is called after a destroy", what)
	}
	w.watch.calls[key.Attempt] = append(made, kind)
	w.watch.running[key.Attempt]++
	w.watch.started++
	return func() {
		if w.watch.running[key.Attempt]--; w.watch.running[key.Attempt] == 0 {
			delete(w.watch.running, key.Attempt)
		}
	}
}

func (b watchedBackend) CreateLease(ctx context.Context, r provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	defer b.enter(ctx, provisioning.CreateLease, r.Key, r.Operation)()
	if r.LastCreateAt.After(r.Now) || r.LastCreateAt.IsZero() != (r.CreatesSent == 0) {
		b.w.problem("B3: create %v says %d sent, the last at %v, now %v", r.Operation, r.CreatesSent, r.LastCreateAt, r.Now)
	}
	return b.w.Fake.CreateLease(ctx, r)
}

func (b watchedBackend) LookupEndpoint(ctx context.Context, r provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	defer b.enter(ctx, provisioning.LookupEndpoint, r.Key, r.Operation)()
	return b.w.Fake.LookupEndpoint(ctx, r)
}

func (b watchedBackend) StartBootstrap(ctx context.Context, r provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	defer b.enter(ctx, provisioning.StartBootstrap, r.Key, r.Operation)()
	return b.w.Fake.StartBootstrap(ctx, r)
}

func (b watchedBackend) BootstrapConvergenceObserved(ctx context.Context, r provisioning.BootstrapConvergenceObservedRequest) error {
	defer b.enter(ctx, provisioning.BootstrapConvergenceObserved, r.Key, r.Operation)()
	return b.w.Fake.BootstrapConvergenceObserved(ctx, r)
}

func (b watchedBackend) CancelBootstrap(ctx context.Context, r provisioning.CancelBootstrapRequest) error {
	defer b.enter(ctx, provisioning.CancelBootstrap, r.Key, r.Operation)()
	return b.w.Fake.CancelBootstrap(ctx, r)
}

func (b watchedBackend) DestroyLease(ctx context.Context, r provisioning.DestroyLeaseRequest) error {
	defer b.enter(ctx, provisioning.DestroyLease, r.Key, r.Operation)()
	if r.LastCreateAt.After(r.Now) || r.LastCreateAt.IsZero() || r.CreatesSent == 0 {
		b.w.problem("B3: destroy %v says %d creates sent, the last at %v, now %v", r.Operation, r.CreatesSent, r.LastCreateAt, r.Now)
	}
	return b.w.Fake.DestroyLease(ctx, r)
}

// hook is the driver's.
func (w *World) hook(e provisioning.Event) {
	w.onEvent(e)
	if w.config.PanickingHook {
		panic("trace: the hook is broken")
	}
}

func (w *World) onEvent(e provisioning.Event) {
	if e.Node == "" {
		w.say("   %v", e)
	} else {
		w.sayOf(e.Node, "   %v", e)
	}
	if err := w.watch.locate(e); err != nil {
		w.problem("%v", err)
	}
	switch e.Kind {
	case provisioning.EventAttemptStarted:
		w.attemptStarted(e)
	case provisioning.EventAttemptFailed:
		w.watch.failures[e.Node]++
	case provisioning.EventDispatch:
		w.watch.dispatched[e.OperationID] = true
	case provisioning.EventFold:
		o := e.Observation
		w.watch.asks(e.Attempt, o.Completion)
		if o.Kind == provisioning.NodeLost || o.Kind == provisioning.ReplaceRequested || o.Kind == provisioning.OperationCompleted && o.Completion.Class == provisioning.ClassLeaseLost {
			w.watch.doomed[e.Attempt] = true
		}
	case provisioning.EventReady:
		w.watch.wasReady[e.Attempt] = true
	case provisioning.EventDeleting:
		w.deleting(e)
	case provisioning.EventDestroyed:
		w.watch.over[e.Attempt] = true
		key := provisioning.ExternalKey{Run: Run, Node: e.Node, Attempt: e.Attempt}
		if n := w.Fake.LiveKey(key); n > 0 {
			w.problem("G5: %s#%d is destroyed while %d of its machines live", e.Node, e.Attempt, n)
		}
	case provisioning.EventFault:
		w.problem("a fault: %v", e)
	}
}

// attemptStarted: attempts only go up, and a slot is reused only when nothing
// is left of its last attempt (G2, G6).
func (w *World) attemptStarted(e provisioning.Event) {
	if w.halted {
		w.problem("attempt %d of %s begins during a pause", e.Attempt, e.Node)
	}
	if e.Attempt <= w.watch.newest || e.Attempt < w.config.FirstAttempt {
		w.problem("G2: attempt %d of %s after attempt %d", e.Attempt, e.Node, w.watch.newest)
	}
	w.watch.newest = e.Attempt
	for _, earlier := range w.watch.attempts[e.Node] {
		if !w.watch.over[earlier] {
			w.problem("G6: attempt %d of %s begins before attempt %d is destroyed", e.Attempt, e.Node, earlier)
		}
	}
	w.watch.attempts[e.Node] = append(w.watch.attempts[e.Node], e.Attempt)
}

// deleting: an attempt is given up for one of three reasons, a ready one only
// if it was lost, or an operator wants another (G8).
func (w *World) deleting(e provisioning.Event) {
	node, ok := w.Driver.Node(e.Node)
	if !ok || node.Attempt != e.Attempt {
		w.problem("%s#%d is being deleted and not in the state", e.Node, e.Attempt)
		return
	}
	if r := node.Retry; !r.NextEffectAt.IsZero() || !r.StageDeadline.IsZero() || len(node.Held) > 0 {
		w.problem("the cleanup of %s#%d begins with a wait of the way up: %+v, %d held", e.Node, e.Attempt, r, len(node.Held))
	}
	group := w.working.group(node.Record.Group)
	switch {
	case node.Record.Index >= group.Count: // the highest indices go
	case node.Record.Spec.Shape.Image != group.Image: // drift
		if w.halted && w.watch.wasReady[e.Attempt] && node.Record.FailedReason == "" {
			w.problem("%s#%d is ready and outdated and is torn down during a pause", e.Node, e.Attempt)
		}
	case node.Record.FailedReason == "":
		w.problem("G8: %s#%d is being deleted without a reason", e.Node, e.Attempt)
	case w.watch.wasReady[e.Attempt] && !w.watch.doomed[e.Attempt]:
		w.problem("%s#%d was ready and is torn down without a loss and without being asked for: %s", e.Node, e.Attempt, node.Record.FailedReason)
	}
}
