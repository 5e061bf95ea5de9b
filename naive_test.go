package provisioning

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/swactor/provisioning/internal/verify"
)

// dtNaive drives a cluster the long way: every pass folds, looks at every node
// and asks Decide about the whole state. It keeps no set of hot nodes, no heap
// of deadlines and no queue, and is the oracle for the driver that has them.
type dtNaive struct {
	policy    func(NodeGroupID) *RetryPolicy
	limit     int
	tick      time.Time // the driver's clock
	last      time.Time // the now it was last given
	inbox     []Observation
	accepted  *Desired
	triggered bool
	dirty     bool
	state     *ClusterState
	requeue   time.Time // in the driver's clock, as is tick
	roughly   bool      // requeue does not count what the pass itself recorded; for benchmarks
	passes    int
	given     int                   // places given while somebody was left out
	leftOut   map[LogicalNodeID]int // the pass since which it is left out
	placeless map[OperationID]bool  // submitted and queued behind a call
	paused    bool
	halted    bool                        // the last pass went by a pause
	held      map[LogicalNodeID]time.Time // held back by it, since
}

func dtNewNaive(shape ClusterShape, config Config) *dtNaive {
	accepted, err := Expand(shape)
	if err != nil {
		panic(err)
	}
	return &dtNaive{
		policy: func(group NodeGroupID) *RetryPolicy {
			policy, ok := config.GroupRetry[group]
			if !ok {
				policy = config.Retry
			}
			policy = policy.withDefaults()
			return &policy
		},
		limit: config.MaxInFlight, accepted: accepted, triggered: true,
		state:   &ClusterState{NextAttemptID: max(config.FirstAttempt, 1)},
		leftOut: map[LogicalNodeID]int{}, placeless: map[OperationID]bool{},
		held: map[LogicalNodeID]time.Time{},
	}
}

func (d *dtNaive) UpdateDesired(shape ClusterShape) error {
	next, err := d.accepted.succeed(shape, DefaultMaxNodes)
	if err == nil {
		d.accepted, d.triggered = next, true
	}
	return err
}

func (d *dtNaive) Deliver(o Observation) { d.inbox, d.triggered = append(d.inbox, o), true }

func (d *dtNaive) Trigger() { d.triggered = true }

func (d *dtNaive) setPaused(paused bool) {
	d.triggered = d.triggered || d.paused != paused
	d.paused = paused
}

func (d *dtNaive) Replace(id LogicalNodeID, reason string) (NodeAttemptID, error) {
	n := d.state.find(id)
	if n == nil {
		return 0, fmt.Errorf("%w: %s", ErrUnknownSlot, id)
	}
	d.Deliver(Observation{Kind: ReplaceRequested, Node: id, Attempt: n.attempt, Reason: reason})
	return n.attempt, nil
}

// holdsBack says what a pause is: nothing begins, nothing climbs, and nothing
// that is ready goes down for a new spec.
func (d *dtNaive) holdsBack(kind ActionKind, m ManagedNode) bool {
	switch kind {
	case Insert, Restart:
		return d.halted
	case Dispatch:
		return d.halted && m.Intent == Active
	case BeginDelete:
		return d.halted && m.Record.Ready && dtWish(d.accepted, m.Record.Node) != nil
	}
	return false
}

// letGo gives the stage of a node the time back for which it was held.
func (d *dtNaive) letGo(id LogicalNodeID) {
	if n := d.state.find(id); n != nil && n.stageDeadline != 0 {
		n.stageDeadline = nearestInstant(n.stageDeadline.time().Add(d.tick.Sub(d.held[id])))
	}
	delete(d.held, id)
}

func (d *dtNaive) feed(now time.Time) {
	switch {
	case d.tick.IsZero():
		d.tick = now
	case now.After(d.last):
		d.tick = d.tick.Add(now.Sub(d.last))
	}
	d.last = now
}

func (d *dtNaive) TriggerIfDue(now time.Time) bool {
	d.feed(now)
	due := d.due(d.requeue)
	d.triggered = d.triggered || due
	return due
}

func (d *dtNaive) due(deadline time.Time) bool { return !deadline.IsZero() && !deadline.After(d.tick) }

// drive runs one pass if one is asked for.
func (d *dtNaive) drive(now time.Time, executor EffectExecutor) bool {
	d.feed(now)
	if !d.triggered && !d.dirty && !d.due(d.requeue) {
		return false
	}
	d.triggered, d.dirty = false, false
	d.passes++
	desired, at := d.accepted, nearestInstant(d.tick)
	d.halted = d.paused
	for id := range d.held {
		if !d.halted {
			d.letGo(id)
		}
	}

	for _, o := range d.inbox {
		if n := d.state.find(o.Node); n != nil {
			n.fold(&o, d.policy(n.group.id), at)
		}
	}
	d.inbox = nil
	for n := range d.state.inOrder() {
		if n.pending != NoOperation && d.due(n.pendingDeadline.time()) {
			c := executor.Expire(n.pendingID())
			d.complete(n, c, at)
		}
	}
	for n := range d.state.inOrder() {
		if n.intent == Active && n.stage != StageFailed && !n.ready && d.due(n.stageDeadline.time()) && d.held[n.id].IsZero() {
			n.foldStageDeadline(d.policy(n.group.id), at)
		}
	}

	plan := Decide(d.state, desired, d.tick)
	for _, f := range plan.Faults {
		n := d.state.find(f.Node)
		if n != nil && errors.Is(f.Err, ErrSequenceExhausted) && n.intent == Active && n.stage != StageFailed {
			n.fail(ErrSequenceExhausted.Error(), 0, d.policy(n.group.id), at)
			d.dirty = true
		}
	}
	var candidates []Action
	held := map[LogicalNodeID]bool{}
	plan.Actions = slices.DeleteFunc(plan.Actions, func(a Action) bool {
		m, _ := d.state.Node(a.Node)
		held[a.Node] = d.holdsBack(a.Kind, m)
		if held[a.Node] && d.held[a.Node].IsZero() {
			d.held[a.Node] = d.tick
		}
		return held[a.Node]
	})
	for id := range d.held {
		if !held[id] {
			d.letGo(id)
		}
	}
	for _, a := range plan.Actions {
		n := d.state.find(a.Node)
		switch a.Kind {
		case Insert:
			d.state.add(d.state.groupFor(a.Group), newNode(a.Node, a.Index, desired.group(a.Group).template, a.NewAttempt))
			d.state.NextAttemptID = a.NewAttempt + 1
		case Restart:
			n.restart(desired.group(a.Group).template, a.NewAttempt)
			d.state.NextAttemptID = a.NewAttempt + 1
		case BeginDelete:
			n.beginDelete()
		case MarkDestroyed:
			n.markDestroyed(at)
			executor.Retire(a.Attempt)
		case Reap:
			d.state.remove(n)
			continue
		case Dispatch:
			candidates = append(candidates, a)
			continue
		}
		d.dirty = true
	}
	d.dispatch(candidates, executor, at)

	d.state.ObservedGeneration = desired.generation
	if d.requeue = plan.RequeueAt; !d.roughly {
		d.requeue = d.earliestWake()
	}
	return true
}

func (d *dtNaive) complete(n *node, c Completion, at instant) {
	n.fold(&Observation{Kind: OperationCompleted, Node: n.id, Attempt: n.attempt, Completion: c}, d.policy(n.group.id), at)
}

// dispatch gives places to the candidates, which are in slot order, until there
// are no more places or no more candidates.
func (d *dtNaive) dispatch(candidates []Action, executor EffectExecutor, at instant) {
	since := map[LogicalNodeID]int{} // whoever is no candidate now starts anew
	for _, a := range candidates {
		if d.limit == 0 {
			break // nobody is ever left out
		}
		since[a.Node] = d.passes
		if before, ok := d.leftOut[a.Node]; ok {
			since[a.Node] = before
		}
	}
	class := func(a Action) int {
		switch n := d.state.find(a.Node); {
		case n.intent == Deleting:
			return 0
		case n.lease != "":
			return 1
		}
		return 2
	}
	for {
		free := len(candidates)
		if d.limit > 0 {
			free = d.limit
			for n := range d.state.inOrder() {
				if n.pending != NoOperation && !d.placeless[n.pendingID()] {
					free--
				}
			}
		}
		var chosen []Action
		if d.limit == 0 {
			chosen, candidates = candidates, nil // in slot order already
		}
		for ; free > 0 && len(candidates) > 0; free-- {
			best := func(a, b Action) int { return class(a) - class(b) }
			if len(candidates) > free {
				if d.given++; d.given%4 == 0 {
					best = func(a, b Action) int { return cmp.Or(since[a.Node]-since[b.Node], class(a)-class(b)) }
				}
			}
			next := slices.MinFunc(candidates, best) // the first of equals, so slot order breaks ties
			chosen = append(chosen, next)
			candidates = slices.DeleteFunc(candidates, func(a Action) bool { return a.Node == next.Node })
			delete(since, next.Node)
		}
		if len(chosen) == 0 {
			d.leftOut = since
			return
		}
		slices.SortFunc(chosen, func(a, b Action) int { return CompareSlots(a.Group, a.Index, b.Group, b.Index) })
		var effects []Effect
		for _, a := range chosen {
			n := d.state.find(a.Node)
			effects = append(effects, recorded(n, a.Operation, a.Resolving, d.policy(a.Group), at))
		}
		refusals := make([]error, len(effects))
		for i, e := range effects {
			queued, err := executor.Submit(e)
			refusals[i] = err
			if queued && err == nil {
				d.placeless[e.Operation] = true
			}
		}
		for i, e := range effects {
			if err := refusals[i]; err != nil {
				d.complete(d.state.find(e.Key.Node), Completion{Operation: e.Operation, Kind: e.Kind, Class: ClassNotStarted,
					Message: "refused by the executor: " + err.Error(), RetryAfter: retryAfterOf(err)}, at)
			}
		}
	}
}

// earliestWake is the earliest deadline after now that a decision waits for, or
// that ends an attempt on its way up. For what a pause holds back no stage ends,
// but a call that goes on may.
func (d *dtNaive) earliestWake() time.Time {
	var earliest time.Time
	consider := func(t time.Time) {
		if t.After(d.tick) && (earliest.IsZero() || t.Before(earliest)) {
			earliest = t
		}
	}
	for m := range d.state.All() {
		decision := DecideNode(&m, dtWish(d.accepted, m.Record.Node), d.tick)
		if decision.Err == nil && d.holdsBack(decision.Action, m) {
			if m.Pending != nil {
				consider(m.Pending.Deadline)
			}
			continue
		}
		consider(decision.Until)
		if m.Intent == Active && !m.Record.Ready {
			consider(m.Retry.StageDeadline)
		}
	}
	return earliest
}

func (d *dtNaive) RequeueAt() (time.Time, bool) {
	if d.requeue.IsZero() {
		return time.Time{}, false
	}
	return d.last.Add(d.requeue.Sub(d.tick)), true
}

// Converged looks at everything. As of the last pass, so only right after it.
func (d *dtNaive) Converged(generation uint64) bool {
	if d.state.ObservedGeneration != generation || d.accepted.generation != generation {
		return false
	}
	for spec := range d.accepted.All() {
		m, ok := d.state.Node(spec.Node)
		if !ok || !m.Record.Ready || m.Intent != Active || m.Pending != nil || !m.Record.Spec.Equal(spec) {
			return false
		}
	}
	return d.state.Len() == d.accepted.Len()
}

// dtWish returns what is wished for a slot, nil if nothing is.
func dtWish(desired *Desired, node LogicalNodeID) *LogicalNodeSpec {
	for spec := range desired.All() {
		if spec.Node == node {
			return &spec
		}
	}
	return nil
}

// dtCheckLaw looks into a driver between two passes: what is not hot has
// nothing to do, and everything that is kept beside the state agrees with it.
func dtCheckLaw(t require.TestingT, d *ClusterDriver) {
	at := d.clock.tick
	if d.journal != nil {
		digest := uint64(0)
		for n := range d.state.inOrder() {
			sum, _ := n.sum(nil)
			digest += sum
		}
		require.Equal(t, digest, d.journal.sum, "the digest of the journal is that of all nodes")
	}
	hot := map[*node]int{}
	for _, n := range d.hot {
		hot[n]++
	}
	missing := map[slot]bool{}
	for _, s := range d.missing {
		missing[s] = true
	}
	taken, settled, ready, waiting, wakes, pending, inPause := 0, 0, 0, 0, 0, 0, 0
	var wake instant
	for n := range d.state.inOrder() {
		require.LessOrEqual(t, hot[n], 1, "%s is hot twice", n.id)
		require.Equal(t, hot[n] == 1, n.hot, "%s is marked and listed as hot", n.id)
		delete(hot, n)
		want := d.working.group(n.group.id).wants(int(n.index))
		decision := decide(n, want, at)
		left := d.capacity.limit > 0 && d.capacity.byAge.Contains(n)
		_, held := d.pause.nodes[n]
		if holds := d.pause.halted && decision.grows(n, want); !n.hot {
			require.Equal(t, holds, held, "%s is held back", n.id)
		}
		if held {
			inPause++
		}
		if !n.hot && !left && !held {
			require.Equal(t, NoAction, decision.action, "%s is not hot and wants %v", n.id, decision.Rule)
		}
		if left {
			waiting++
			require.Equal(t, Dispatch, decision.action, "%s waits for a place and wants %v", n.id, decision.Rule)
			require.Equal(t, n.placeClass(), n.class)
			require.True(t, d.capacity.byClass[n.class].Contains(n))
			require.Less(t, n.leftOutSince, d.pass+1)
		}
		require.Same(t, n, d.state.find(n.id))
		require.Same(t, n, n.group.at(int(n.index)))
		require.Same(t, n.group, d.state.group(n.group.id))
		require.NotNil(t, n.group.wish.policy)
		require.True(t, sameTemplate(want, n.group.wish.want.wants(int(n.index))), "the wish of %s", n.id)
		w := decision.wakeAt(n, at)
		if held {
			w = n.wakeWhileHeld(at)
		}
		if w != 0 {
			wake = earliest(wake, w)
			wakes++
			require.NotZero(t, n.deadlineAt, n.id)
			require.Equal(t, w, n.wakesAt, n.id)
		} else {
			require.Zero(t, n.deadlineAt, n.id)
		}
		if n.holdsPlace {
			taken++
			require.NotEqual(t, NoOperation, n.pending, "%s holds a place for nothing", n.id)
		}
		if n.pending != NoOperation {
			pending++
		}
		if n.ready && n.pending == NoOperation && n.intent == Active && sameTemplate(n.template, want) {
			settled++
		}
		if n.ready && sameTemplate(n.template, want) {
			ready++
		}
	}
	require.Empty(t, hot, "hot nodes that are not in the state")
	require.Len(t, d.pause.nodes, inPause, "held nodes that are not in the state")
	require.True(t, d.pause.halted || inPause == 0, "nothing is held back without a pause")
	for s := range d.pause.slots {
		require.True(t, d.pause.halted)
		require.NotNil(t, s.group.wish.want.wants(s.index), "a slot that nobody wants is held back")
		missing[s] = true
	}
	require.Equal(t, wakes, d.deadlines.Len())
	require.Equal(t, taken, d.capacity.taken)
	require.LessOrEqual(t, taken, pending)
	require.Equal(t, settled, d.settled)
	require.Equal(t, ready, d.ready)
	require.Len(t, d.Held(), d.heldCount())
	require.Equal(t, wake, d.requeueAt)
	if d.capacity.limit > 0 {
		require.LessOrEqual(t, taken, d.capacity.limit)
		require.Equal(t, waiting, d.capacity.byAge.Len())
		inClass := 0
		for _, q := range d.capacity.byClass {
			inClass += q.Len()
		}
		require.Equal(t, waiting, inClass)
	}
	for _, want := range d.working.groups {
		g := d.state.group(want.id)
		require.NotNil(t, g)
		for index := range want.count {
			require.True(t, g.at(index) != nil || missing[slot{g, index}], "%s-%d is missing and not looked for", g.id, index)
		}
	}
	idle := 0
	for rank, g := range d.state.groups {
		require.Equal(t, rank, g.rank)
		require.Same(t, g, d.state.byID[g.id])
		if len(g.nodes) == 0 && g.wish.want.template == nil {
			idle++
		}
		require.True(t, len(g.nodes) == 0 || g.nodes[len(g.nodes)-1] != nil, "group %s is longer than its nodes", g.id)
	}
	require.Len(t, d.state.byID, len(d.state.groups))
	require.Equal(t, idle, d.idle)
	require.True(t, idle == 0 || idle < len(d.state.groups)/16, "%d of %d groups are empty and unwanted", idle, len(d.state.groups))
	for _, list := range [][]*node{d.spareHot} {
		require.Empty(t, list)
	}
	require.Zero(t, d.folding.len())
	require.Empty(t, d.steps)
	require.Empty(t, d.notes)
}

// dtTwins runs one trace through both drivers.
type dtTwins struct {
	journal *bytes.Buffer // of the real one
	t       *rapid.T
	config  Config
	real    *ClusterDriver
	naive   *dtNaive
	a, b    *dtExecutor // of real, of naive
	shape   ClusterShape
	now     time.Time
	started []Effect // submitted and not refused
	luck    int      // of 100 outcomes, so many are good
	passes  int      // of the real one
}

var dtGroups = []NodeGroupID{"a", "b", "b-1"}

// dtDrawGroups draws what the wish may hold: groups there or not, any order.
func dtDrawGroups(t *rapid.T) []NodeGroupSpec {
	var groups []NodeGroupSpec
	for _, id := range dtGroups {
		if rapid.IntRange(0, 3).Draw(t, "group there") > 0 {
			groups = append(groups, dtGroup(id, rapid.IntRange(0, 3).Draw(t, "count"), rapid.SampledFrom([]string{"v1", "v2"}).Draw(t, "image")))
		}
	}
	if rapid.Bool().Draw(t, "turned round") {
		slices.Reverse(groups)
	}
	return groups
}

// dtDrawPolicy has delays so short that a trace meets all of them.
func dtDrawPolicy(t *rapid.T) RetryPolicy {
	return RetryPolicy{
		InitialDelay: time.Second, MaxDelay: 8 * time.Second, Jitter: rapid.SampledFrom([]float64{0, 0.5}).Draw(t, "jitter"),
		OperationTimeout: 20 * time.Second, EndpointProbeInterval: 2 * time.Second,
		EndpointTimeout:  rapid.SampledFrom([]time.Duration{20 * time.Second, time.Minute, -1}).Draw(t, "endpoint timeout"),
		BootstrapTimeout: rapid.SampledFrom([]time.Duration{30 * time.Second, 5 * time.Minute, -1}).Draw(t, "bootstrap timeout"),
		StableAfter:      time.Minute, CancelLimit: rapid.SampledFrom([]int{1, 2, -1}).Draw(t, "cancel limit"), MaxRetryAfter: 30 * time.Second,
	}
}

func (w *dtTwins) update() {
	next := w.shape
	next.Generation += uint64(rapid.IntRange(0, 2).Draw(w.t, "generation step"))
	switch rapid.IntRange(0, 3).Draw(w.t, "update") {
	case 0: // as it is
	case 1:
		next.Groups = dtDrawGroups(w.t)
	default: // one group
		next.Groups = slices.Clone(next.Groups)
		if len(next.Groups) > 0 {
			g := &next.Groups[rapid.IntRange(0, len(next.Groups)-1).Draw(w.t, "which group")]
			g.Count = rapid.IntRange(0, 4).Draw(w.t, "count")
			g.Shape.Image = rapid.SampledFrom([]string{"v1", "v2"}).Draw(w.t, "image")
		}
	}
	err := w.real.UpdateDesired(next)
	require.Equal(w.t, w.naive.UpdateDesired(next), err)
	if err == nil {
		w.shape = next
	}
}

func (w *dtTwins) deliver(o Observation) {
	w.real.Deliver(o)
	w.naive.Deliver(o)
}

// complete ends an operation, mostly one in flight, and sometimes twice or of
// long ago.
func (w *dtTwins) complete() {
	open := slices.DeleteFunc(slices.Clone(w.started), func(e Effect) bool {
		n := w.naive.state.find(e.Key.Node)
		return n == nil || n.pending == NoOperation || n.pendingID() != e.Operation
	})
	if len(open) == 0 || rapid.IntRange(0, 15).Draw(w.t, "of long ago") == 0 {
		open = w.started
	}
	if len(open) == 0 {
		return
	}
	e := rapid.SampledFrom(open).Draw(w.t, "operation")
	for range max(1, rapid.IntRange(-14, 2).Draw(w.t, "times")) {
		w.deliver(dtCompleted(e, w.outcome(e)))
	}
}

// outcome draws how an operation ended.
func (w *dtTwins) outcome(e Effect) Completion {
	c := dtSuccess(e)
	if rapid.IntRange(0, 99).Draw(w.t, "outcome") < w.luck {
		return c
	}
	class := FailureClass(rapid.IntRange(0, int(failureClasses)-1).Draw(w.t, "class"))
	failed := Completion{Operation: e.Operation, Kind: e.Kind, Class: class, Message: "boom"}
	if class == ClassNone { // without what it should have found: not yet, or judged Ambiguous
		failed.Message = ""
	} else if rapid.Bool().Draw(w.t, "retry after") {
		failed.RetryAfter = 10 * time.Second
	}
	if class == ClassLeaseLost && e.Kind == CreateLease && rapid.Bool().Draw(w.t, "dead machine") {
		failed.Lease = c.Lease
	}
	return failed
}

// stream says something of a bootstrap, mostly of one that runs or starts.
func (w *dtTwins) stream() {
	bootstraps := slices.DeleteFunc(slices.Clone(w.started), func(e Effect) bool {
		n := w.naive.state.find(e.Key.Node)
		return n == nil || n.attempt != e.Operation.Attempt || e.Kind != StartBootstrap
	})
	if len(bootstraps) == 0 || rapid.IntRange(0, 15).Draw(w.t, "of long ago") == 0 {
		bootstraps = w.started
	}
	if len(bootstraps) == 0 {
		return
	}
	e := rapid.SampledFrom(bootstraps).Draw(w.t, "attempt")
	o := Observation{Kind: SwactorJoined, Node: e.Key.Node, Attempt: e.Operation.Attempt,
		Session: dtSession(e.Operation.Attempt), Swactor: "agent"}
	if rapid.IntRange(0, 99).Draw(w.t, "what") >= w.luck {
		switch rapid.IntRange(0, 7).Draw(w.t, "trouble") {
		case 0:
			o.Kind, o.Reason = NodeLost, "spot"
		case 1:
			o.Kind = BootstrapFailed
		case 2, 3:
			o.Kind = BootstrapClosed
		case 4:
			o.Session = "s-other"
		case 5:
			o.Swactor = "another"
		default:
			o.Kind = BootstrapProgress
			o.Stage = BootstrapStage(rapid.IntRange(0, int(bootstrapStages)-1).Draw(w.t, "stage"))
		}
	}
	w.deliver(o)
}

// step moves the time, often to the very edge of a deadline.
func (w *dtTwins) step() {
	switch rapid.IntRange(0, 6).Draw(w.t, "time") {
	case 0:
		w.now = w.now.Add(-time.Duration(rapid.IntRange(0, 90).Draw(w.t, "back")) * time.Second)
	case 1, 2:
		w.now = w.now.Add(time.Duration(rapid.IntRange(0, 90).Draw(w.t, "on")) * time.Second)
	default:
		if at, ok := w.real.RequeueAt(); ok {
			if at = at.Add(time.Duration(rapid.IntRange(-1, 1).Draw(w.t, "edge"))); at.After(w.now) {
				w.now = at
			}
		}
	}
	if rapid.Bool().Draw(w.t, "ask") {
		require.Equal(w.t, w.naive.TriggerIfDue(w.now), w.real.TriggerIfDue(w.now))
	}
}

// pass runs one pass of both and compares all there is.
func (w *dtTwins) pass() bool {
	t, before := w.t, len(w.a.submitted)
	ran, err := w.real.DriveNext(w.now, w.a)
	require.NoError(t, err)
	require.Equal(t, w.naive.drive(w.now, w.b), ran)
	w.passes++

	require.Equal(t, dtJSON(t, w.naive.state), dtJSON(t, w.real.Snapshot()))
	require.Len(t, w.a.submitted, len(w.b.submitted))
	for i, e := range w.a.submitted[before:] {
		require.True(t, e.Equal(w.b.submitted[before+i]), "%v, not %v", w.b.submitted[before+i], e)
		if w.a.refusals[before+i] == nil {
			w.started = append(w.started, e)
		}
	}
	require.Equal(t, w.b.expired, w.a.expired)
	require.Equal(t, w.b.retired, w.a.retired)
	want, wantAny := w.naive.RequeueAt()
	at, some := w.real.RequeueAt()
	require.Equal(t, wantAny, some)
	require.True(t, want.Equal(at), "RequeueAt is %v, not %v", at, want)
	if !ran {
		return false
	}
	require.NoError(t, w.real.Snapshot().Check())
	for generation := range w.shape.Generation + 2 {
		require.Equal(t, w.naive.Converged(generation), w.real.Converged(generation), "converged of generation %d", generation)
	}
	require.Equal(t, w.shape.Generation, w.real.ObservedGeneration())
	_, slots := w.real.Progress()
	require.Equal(t, w.naive.accepted.Len(), slots)
	plan := Decide(w.real.Snapshot(), w.naive.accepted, w.real.Clock(w.now))
	require.True(t, w.naive.halted || plan.RequeueAt.IsZero() != some)
	if some {
		require.True(t, at.After(w.now), "a deadline that is due already makes the host spin")
	}
	if some && !w.naive.halted {
		require.True(t, at.Equal(w.now.Add(plan.RequeueAt.Sub(w.real.Clock(w.now)))))
	}
	dtCheckLaw(t, w.real)
	return true
}

// until runs passes until both are blocked.
func (w *dtTwins) until() {
	for passes := 0; w.pass(); passes++ {
		require.Less(w.t, passes, 32, "the passes do not come to rest")
	}
}

// dtNewTwins draws a wish, a configuration and the moods of the executors.
func dtNewTwins(t *rapid.T) *dtTwins {
	config := Config{Retry: dtDrawPolicy(t), MaxInFlight: rapid.SampledFrom([]int{0, 0, 0, 1, 2, 3, 5}).Draw(t, "MaxInFlight")}
	if rapid.Bool().Draw(t, "policy of its own") {
		config.GroupRetry = map[NodeGroupID]RetryPolicy{"b": {InitialDelay: 3 * time.Second, OperationTimeout: 7 * time.Second}}
	}
	if rapid.IntRange(0, 9).Draw(t, "few attempts") == 0 {
		config.FirstAttempt = ^NodeAttemptID(0) - NodeAttemptID(rapid.IntRange(0, 6).Draw(t, "attempts left"))
	}
	shape := ClusterShape{RunID: "run", Generation: 1, Groups: dtDrawGroups(t)}
	journal := new(bytes.Buffer)
	config.Journal = journal
	driver, err := NewClusterDriver(shape, config)
	require.NoError(t, err)
	w := &dtTwins{t: t, config: config, journal: journal, real: driver, naive: dtNewNaive(shape, config), shape: shape, now: dtStart,
		luck: rapid.SampledFrom([]int{30, 70, 95}).Draw(t, "luck")}
	// What the executor does depends only on what was asked before, so that
	// both get the same answers for as long as they ask the same.
	moods := rapid.SliceOfN(rapid.IntRange(0, 11), 1, 24).Draw(t, "moods")
	executor := func() *dtExecutor {
		x := &dtExecutor{}
		x.submit = func(Effect) (bool, error) {
			switch moods[len(x.submitted)%len(moods)] {
			case 0:
				return false, errors.New("refused")
			case 1:
				return false, RetryAfter(errors.New("busy"), 5*time.Second)
			case 2:
				return true, nil
			}
			return false, nil
		}
		x.expire = func(id OperationID) Completion {
			i := slices.IndexFunc(x.submitted, func(e Effect) bool { return e.Operation == id })
			c := Completion{Operation: id, Kind: x.submitted[i].Kind, Class: ClassAmbiguous, Message: "late"}
			switch moods[len(x.expired)%len(moods)] {
			case 0:
				c.Class = ClassNotStarted
			case 1, 2, 3:
				return dtSuccess(x.submitted[i])
			}
			return c
		}
		return x
	}
	w.a, w.b = executor(), executor()
	return w
}

// wander goes on for a random while, and then until nothing is left to do.
func (w *dtTwins) wander() {
	for range rapid.IntRange(1, 60).Draw(w.t, "steps") {
		switch rapid.IntRange(0, 18).Draw(w.t, "step") {
		case 0:
			w.update()
		case 1, 2, 3, 4, 5:
			w.complete()
			w.until()
		case 6, 7:
			w.complete()
		case 8, 9, 10:
			w.stream()
		case 11:
			w.step()
		case 12, 13:
			w.step()
			w.until()
		case 14:
			w.real.Trigger()
			w.naive.Trigger()
			w.pass()
		case 16, 17:
			w.pause()
		case 18:
			w.replace()
		default:
			w.until()
		}
	}
	w.until()
}

// pause begins or ends a pause, mostly; sometimes it says what is so already.
func (w *dtTwins) pause() {
	paused := rapid.IntRange(0, 7).Draw(w.t, "as it is") == 0 == w.naive.paused
	if paused {
		w.real.Pause()
	} else {
		w.real.Resume()
	}
	w.naive.setPaused(paused)
	require.Equal(w.t, paused, w.real.Paused())
}

// replace ends an attempt by hand, and sometimes asks for a slot that is not there.
func (w *dtTwins) replace() {
	group := rapid.SampledFrom(dtGroups).Draw(w.t, "group to replace in")
	id := NewLogicalNodeID(group, rapid.IntRange(0, 3).Draw(w.t, "index to replace"))
	want, refusal := w.naive.Replace(id, "by hand")
	got, err := w.real.Replace(id, "by hand")
	require.Equal(w.t, refusal, err)
	require.Equal(w.t, want, got)
}

// TestProp_G1IncrementalDriverAgreesWithNaive: deciding only what is hot gives
// what deciding everything gives, in every pass of every trace.
func TestProp_G1IncrementalDriverAgreesWithNaive(t *testing.T) {
	var free, capped, passes int
	rapid.Check(t, func(t *rapid.T) {
		w := dtNewTwins(t)
		w.wander()
		passes += w.passes
		if w.config.MaxInFlight == 0 {
			free++
		} else {
			capped++
		}
	})
	verify.AtLeast(t, "traces, the same as the naive driver", free+capped, verify.Target(25_000, 0))
	verify.AtLeast(t, "of which without MaxInFlight", free, verify.Target(10_000, 0))
	verify.AtLeast(t, "of which with MaxInFlight", capped, verify.Target(10_000, 0))
	verify.AtLeast(t, "passes that were compared", passes, verify.Target(100_000, 0))
}
