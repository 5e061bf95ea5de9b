package provisioning

import (
	"slices"
	"time"
)

// This file folds what was seen into a node. A fold looks at the node, the
// observation, the policy and now; it never decides what to do next. Deadlines
// are computed here, once, and stored.

// NotAppliedReason says why an observation left the state as it was.
type NotAppliedReason string

// The reasons. The empty reason means that the observation was applied.
const (
	UnknownNode        NotAppliedReason = "no such slot"
	StaleAttempt       NotAppliedReason = "of another attempt"
	DeadSession        NotAppliedReason = "of a session that is not live"
	NotPending         NotAppliedReason = "not the pending operation"
	AlreadyFailed      NotAppliedReason = "the attempt has already failed"
	AlreadyJoined      NotAppliedReason = "this agent has already joined"
	AnotherJoined      NotAppliedReason = "another agent joined first"
	AlreadyDeleting    NotAppliedReason = "the attempt is already being given up"
	NoLeaseHeld        NotAppliedReason = "no lease is held"
	HeldForSession     NotAppliedReason = "held until its session is on record"
	UnknownObservation NotAppliedReason = "no known observation"
)

// maxHeld bounds the observations held for a session that is not yet on record.
const maxHeld = 16

// fold folds one observation that names n. It returns "" if it was applied.
func (n *node) fold(o *Observation, p *RetryPolicy, now instant) NotAppliedReason {
	if o.Attempt != n.attempt { // G2
		return StaleAttempt
	}
	if o.Stage >= bootstrapStages { // it has no name, so the state would have no JSON
		return UnknownObservation
	}
	var reason NotAppliedReason
	switch o.Kind {
	case OperationCompleted:
		reason = n.foldCompletion(&o.Completion, p, now)
	case NodeLost:
		reason = n.foldLost(o, p, now)
	case ReplaceRequested:
		reason = n.foldReplace(o, p, now)
	case BootstrapProgress, SwactorJoined, BootstrapFailed, BootstrapClosed:
		reason = n.foldStream(o, p, now)
	default:
		return UnknownObservation
	}
	if n.held != nil && !n.startOpen() {
		n.held = nil // whatever start they were held for is no longer open
	}
	return reason
}

// foldCompletion folds the end of an operation, once: only the pending one of
// the current attempt counts (G2).
func (n *node) foldCompletion(given *Completion, p *RetryPolicy, now instant) NotAppliedReason {
	if n.pending == NoOperation || given.Operation != n.pendingID() || given.Kind != n.pending {
		return NotPending
	}
	resolving := n.resolving
	n.pending, n.resolving, n.pendingSequence, n.pendingDeadline = NoOperation, false, 0, 0
	c := given.judged()
	if c.Class == ClassNone {
		n.nextEffectAt = 0
	}
	switch c.Kind {
	case CreateLease:
		if !resolving {
			n.lastCreateAt = now
		}
		n.foldCreate(&c, p, now)
	case LookupEndpoint:
		n.foldLookup(&c, p, now)
	case StartBootstrap:
		n.foldStart(&c, resolving, p, now)
	case BootstrapConvergenceObserved:
		n.foldConvergence(&c, p, now)
	case CancelBootstrap:
		n.foldCancel(&c, p, now)
	case DestroyLease:
		n.foldDestroy(&c, p, now)
	}
	return ""
}

func (n *node) foldCreate(c *Completion, p *RetryPolicy, now instant) {
	switch c.Class {
	case ClassNone:
		n.resolved(CreateLease)
		n.lease, n.endpoint = c.Lease, c.Endpoint
		if !n.growing() {
			return
		}
		if n.endpoint != nil {
			n.reachEndpoint(p, now)
			return
		}
		n.stage = StageLeaseCreated
		n.stageDeadline = limit(now, p.EndpointTimeout)
	case ClassDefinite:
		n.resolved(CreateLease)
		if n.intent == Active {
			n.backOff(c, p, now)
		}
	case ClassAmbiguous:
		n.ambiguous = CreateLease
		n.backOff(c, p, now)
	case ClassNotStarted:
		n.backOff(c, p, now)
	case ClassLeaseLost:
		n.resolved(CreateLease)
		if c.Lease != "" { // B11: dead, and still billed
			n.lease = c.Lease
		}
		n.failUnlessDeleting(c, p, now)
	}
}

func (n *node) foldLookup(c *Completion, p *RetryPolicy, now instant) {
	switch c.Class {
	case ClassNone:
		if c.Endpoint == nil {
			if n.growing() { // a probe, not a failure
				n.nextEffectAt = now.plus(p.EndpointProbeInterval)
			}
			return
		}
		n.endpoint = c.Endpoint
		if n.growing() {
			n.reachEndpoint(p, now)
		}
	case ClassLeaseLost:
		n.failUnlessDeleting(c, p, now)
	default:
		if n.intent == Active {
			n.backOff(c, p, now)
		}
	}
}

func (n *node) foldStart(c *Completion, resolving bool, p *RetryPolicy, now instant) {
	switch c.Class {
	case ClassNone:
		n.resolved(StartBootstrap)
		n.session = c.Session
		n.bootSession, n.bootStage, n.stdoutSequence, n.stderrSequence, n.lastObservedAt = c.Session, BootstrapStageCreated, 0, 0, now
		if n.growing() {
			n.stage = StageBootstrapRunning
		}
		held := n.held        // fold drops them: the start is no longer open
		for i := range held { // those of another session are not applied
			n.foldStream(&held[i], p, now)
		}
	case ClassDefinite, ClassLeaseLost:
		n.resolved(StartBootstrap)
		n.failUnlessDeleting(c, p, now)
	case ClassAmbiguous:
		n.ambiguous = StartBootstrap
		n.backOff(c, p, now)
		if resolving {
			n.countCancel(p)
		}
	case ClassNotStarted:
		n.backOff(c, p, now)
	}
}

func (n *node) foldConvergence(c *Completion, p *RetryPolicy, now instant) {
	if n.ready { // the hand-off overtook the call: its answer matters no more
		if c.Class == ClassLeaseLost {
			n.lose(c.Message, c.RetryAfter, p, now)
		}
		return
	}
	if !n.growing() {
		return
	}
	switch c.Class {
	case ClassNone:
		n.handOff(now)
	case ClassDefinite, ClassLeaseLost:
		n.fail(c.describe(), c.RetryAfter, p, now)
	default:
		n.backOff(c, p, now)
	}
}

func (n *node) foldCancel(c *Completion, p *RetryPolicy, now instant) {
	switch c.Class {
	case ClassNone:
		n.cleanedUp()
		n.endSession(BootstrapStageCancelled)
	case ClassLeaseLost: // no machine, no session
		n.cleanedUp()
		n.session = ""
	case ClassNotStarted: // says nothing about the host
		n.backOff(c, p, now)
	default:
		n.backOff(c, p, now)
		n.countCancel(p)
	}
}

func (n *node) foldDestroy(c *Completion, p *RetryPolicy, now instant) {
	switch c.Class {
	case ClassNone, ClassLeaseLost:
		n.cleanedUp()
		n.lease, n.endpoint = "", nil
	default:
		n.backOff(c, p, now)
	}
}

// foldStream folds what the bootstrap of the live session says.
func (n *node) foldStream(o *Observation, p *RetryPolicy, now instant) NotAppliedReason {
	if n.session == "" && n.startOpen() {
		n.hold(*o)
		return HeldForSession
	}
	if n.session == "" || o.Session != n.session {
		return DeadSession
	}
	stage := o.Stage
	if o.Kind == BootstrapFailed && !stage.Failed() {
		stage = NoBootstrapStage // it says failed, so nothing else it says makes it an end in order
	}
	switch {
	case o.Kind == SwactorJoined:
		return n.foldJoin(o, now)
	case o.Kind == BootstrapClosed || stage == BootstrapStageClosed:
		n.lastObservedAt = now
		if n.growing() && n.stage == StageSwactorJoined {
			n.reachBootstrapStage(BootstrapStageClosed)
			n.handOff(now)
			return ""
		}
		n.endSession(BootstrapStageClosed)
		if n.growing() {
			n.fail("the bootstrap session closed before the agent joined", 0, p, now)
		}
		return ""
	case stage == BootstrapStageCancelled:
		n.lastObservedAt = now
		n.endSession(BootstrapStageCancelled)
		if n.growing() {
			n.fail("the bootstrap session was cancelled", 0, p, now)
		}
		return ""
	case n.stage == StageFailed:
		return AlreadyFailed
	}
	n.lastObservedAt = now
	n.stdoutSequence = max(n.stdoutSequence, o.StdoutSequence)
	n.stderrSequence = max(n.stderrSequence, o.StderrSequence)
	n.reachBootstrapStage(stage)
	switch {
	case o.Kind == BootstrapFailed || stage.Failed():
		if n.growing() {
			n.fail(bootstrapFailure(o), 0, p, now)
		}
	case stage == BootstrapStageConverged && n.growing() && n.stage == StageSwactorJoined:
		n.handOff(now)
	}
	return ""
}

// foldJoin records the first agent that joined.
func (n *node) foldJoin(o *Observation, now instant) NotAppliedReason {
	switch {
	case n.stage == StageFailed:
		return AlreadyFailed
	case n.joinedAt != 0 && n.swactor == o.Swactor:
		return AlreadyJoined
	case n.joinedAt != 0:
		return AnotherJoined
	}
	n.lastObservedAt = now
	n.swactor, n.joinedAt = o.Swactor, now
	if n.growing() && n.stage == StageBootstrapRunning {
		n.stage = StageSwactorJoined
		if n.bootStage == BootstrapStageConverged {
			n.handOff(now)
		}
	}
	return ""
}

// foldLost folds the death of the machine. It needs no session and is never
// held: there is a machine or there is none.
func (n *node) foldLost(o *Observation, p *RetryPolicy, now instant) NotAppliedReason {
	if n.lease == "" {
		return NoLeaseHeld
	}
	n.lose(o.Reason, 0, p, now)
	return ""
}

func (n *node) lose(reason string, retryAfter time.Duration, p *RetryPolicy, now instant) {
	n.session = ""
	if n.ambiguous == StartBootstrap { // a dead machine runs no bootstrap (G5)
		n.ambiguous = NoOperation
	}
	if !n.growing() {
		return
	}
	if n.ready && now < n.readyAt.plus(p.StableAfter) {
		// It was not well for long enough to prove anything. Starting the
		// count anew would replace a dying image in a hot loop.
		n.failures = n.failuresBeforeReady
	}
	text := "the node was lost"
	if reason != "" {
		text += ": " + reason
	}
	n.fail(text, retryAfter, p, now)
}

// foldReplace ends an attempt because somebody said so. It is a failure like any
// other: what is left is cleaned up at once, and the next attempt waits the delay
// of one failure more, so that asking again and again buys no machines in a hot
// loop. A failure it counts as, but not as a machine that died young: what was
// before it became ready is over.
func (n *node) foldReplace(o *Observation, p *RetryPolicy, now instant) NotAppliedReason {
	switch {
	case n.intent == Deleting:
		return AlreadyDeleting
	case n.stage == StageFailed:
		return AlreadyFailed
	}
	text := "replaced by an operator"
	if o.Reason != "" {
		text += ": " + o.Reason
	}
	n.fail(text, 0, p, now)
	return ""
}

// foldStageDeadline ends an attempt that is out of time.
func (n *node) foldStageDeadline(p *RetryPolicy, now instant) {
	if n.stage == StageLeaseCreated {
		n.fail("the machine had no endpoint in time", 0, p, now)
	} else {
		n.fail("the bootstrap did not finish in time", 0, p, now)
	}
}

// stageOverdue: the attempt is out of time.
func (n *node) stageOverdue(now instant) bool {
	return n.growing() && !n.ready && n.stageDeadline.due(now)
}

// fail ends the attempt. The first failure wins: a second one changes nothing.
func (n *node) fail(reason string, retryAfter time.Duration, p *RetryPolicy, now instant) {
	if n.stage == StageFailed {
		return
	}
	n.failures = countUp(n.failures)
	n.stage, n.ready = StageFailed, false
	t := n.ofItsOwn()
	t.failedReason, t.failedAt, t.lastError, t.lastFailureAt = reason, now, reason, now
	n.restartAt = now.plus(p.wait(n, n.failures, retryAfter))
	n.nextEffectAt, n.stageDeadline = 0, 0
}

// failUnlessDeleting: a node that is being deleted cannot fail any more, and
// nothing has to wait for it.
func (n *node) failUnlessDeleting(c *Completion, p *RetryPolicy, now instant) {
	if n.intent == Active {
		n.fail(c.describe(), c.RetryAfter, p, now)
	}
}

// backOff counts a failed try and stores when the next one may be made. A
// failed attempt that is not yet being deleted counts nothing more.
func (n *node) backOff(c *Completion, p *RetryPolicy, now instant) {
	count := &n.failures
	if n.intent == Deleting {
		count = &n.cleanupFailures
	} else if n.stage == StageFailed {
		return
	}
	*count = countUp(*count)
	t := n.ofItsOwn()
	t.lastError, t.lastFailureAt = c.describe(), now
	n.nextEffectAt = now.plus(p.wait(n, *count, c.RetryAfter))
}

// wait is the delay after the count-th failure of n, and at least what the
// failure asked for.
func (p *RetryPolicy) wait(n *node, count uint32, retryAfter time.Duration) time.Duration {
	return max(p.delay(n.template.run, n.attempt, count), min(retryAfter, p.MaxRetryAfter))
}

// resolved: what came of an operation of that kind is known now.
func (n *node) resolved(kind OperationKind) {
	if n.ambiguous == kind {
		n.ambiguous = NoOperation
	}
	if n.intent == Deleting {
		n.cleanedUp()
	}
}

// cleanedUp: a step of the cleanup is over, the next one starts its own count.
func (n *node) cleanedUp() {
	n.cleanupFailures, n.nextEffectAt = 0, 0
	if n.cancelsFailed != 0 {
		n.cancelsFailed = 0
	}
}

// countCancel counts a cancel, or the asking after a start, that failed. At
// the limit it is given up: a polite step must not keep a billed machine.
func (n *node) countCancel(p *RetryPolicy) {
	t := n.ofItsOwn()
	t.cancelsFailed = countUp(t.cancelsFailed)
	if p.CancelLimit < 0 || int64(t.cancelsFailed) < int64(p.CancelLimit) {
		return
	}
	t.givenUp = CancelBootstrap
	if n.ambiguous == StartBootstrap {
		t.givenUp, n.ambiguous = StartBootstrap, NoOperation
	}
	n.session = ""
	n.cleanedUp()
}

// reachEndpoint: from here the bootstrap has its time, retries included.
func (n *node) reachEndpoint(p *RetryPolicy, now instant) {
	n.stage = StageEndpointKnown
	n.stageDeadline = limit(now, p.BootstrapTimeout)
}

// handOff makes the node ready. A pending convergence call stays on record.
func (n *node) handOff(now instant) {
	n.handedOffAt, n.readyAt = now, now
	n.session = ""
	n.stage, n.ready = StageDormant, true
	n.failuresBeforeReady, n.failures = n.failures, 0
	n.cleanupFailures, n.ambiguous = 0, NoOperation
	n.nextEffectAt, n.restartAt, n.stageDeadline = 0, 0, 0
	n.trouble = &noTrouble // what it had is over
}

func (n *node) endSession(stage BootstrapStage) {
	n.session = ""
	n.reachBootstrapStage(stage)
}

// reachBootstrapStage records a stage; a terminal one never goes back.
func (n *node) reachBootstrapStage(stage BootstrapStage) {
	if stage == NoBootstrapStage || n.bootStage.rank() > 0 && stage.rank() <= n.bootStage.rank() {
		return
	}
	n.bootStage = stage
}

// startOpen: a session may exist that is not on record.
func (n *node) startOpen() bool {
	return n.pending == StartBootstrap || n.ambiguous == StartBootstrap
}

// hold keeps an early observation. Where there are too many, the oldest that
// is mere progress goes first, which may be this one, then the oldest.
func (n *node) hold(o Observation) {
	t := n.ofItsOwn()
	t.held = append(t.held, o)
	if len(t.held) > maxHeld {
		oldest := max(0, slices.IndexFunc(t.held, func(o Observation) bool {
			return o.Kind == BootstrapProgress && o.Stage.rank() == 0
		}))
		t.held = slices.Delete(t.held, oldest, oldest+1)
	}
}

// limit is the deadline of a stage; a negative timeout means none.
func limit(now instant, timeout time.Duration) instant {
	if timeout < 0 {
		return 0
	}
	return now.plus(timeout)
}

// describe says in words how the operation ended.
func (c *Completion) describe() string {
	if c.Message == "" {
		return c.Kind.String() + ": " + c.Class.String()
	}
	return c.Kind.String() + ": " + c.Message
}

func bootstrapFailure(o *Observation) string {
	switch {
	case o.Reason != "":
		return "the bootstrap failed: " + o.Reason
	case o.Stage.Failed():
		return "the bootstrap failed: " + o.Stage.String()
	}
	return "the bootstrap failed"
}
