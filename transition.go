package provisioning

// This file is what the driver itself does to a node when it applies an
// action. Each of these completes the step of its slot.

// beginDelete gives the attempt up (R4). The first step of the cleanup never
// waits for a delay of the way up.
func (n *node) beginDelete() {
	n.intent, n.ready = Deleting, false
	n.nextEffectAt, n.stageDeadline = 0, 0
	n.cleanupFailures, n.cancelsFailed = 0, 0
	n.held = nil
}

// markDestroyed ends the attempt (R9). RestartAt stays.
func (n *node) markDestroyed(now instant) {
	n.stage, n.destroyedAt = StageDestroyed, now
	n.nextEffectAt = 0
}

// restart makes a fresh attempt of the slot (R2). Failures in a row go on only
// if the old attempt failed.
func (n *node) restart(t *template, attempt NodeAttemptID) {
	failures := n.failures
	if n.failedAt == 0 {
		failures = 0
	}
	group, marks := n.group, n.marks
	*n = *newNode(n.id, int(n.index), t, attempt)
	n.group, n.marks = group, marks
	n.failures = failures
}

// record puts an operation on record as pending and returns it as an effect to
// submit. It is on record before anybody can hear of it (G3).
func (n *node) record(kind OperationKind, resolving bool, p *RetryPolicy, now instant) Effect {
	e := Effect{
		Operation: OperationID{Attempt: n.attempt, Sequence: n.nextSequence}, Kind: kind,
		Key:          ExternalKey{Run: n.template.run, Node: n.id, Attempt: n.attempt},
		DispatchedAt: now.time(), Deadline: now.plus(p.timeout(kind)).time(),
		template: n.template, index: int(n.index),
	}
	switch kind {
	case CreateLease:
		e.AdoptOnly = resolving // B4
		e.CreatesSent, e.LastCreateAt = n.createsSent, n.lastCreateAt.time()
		if !resolving {
			n.createsSent, n.lastCreateAt = countUp(n.createsSent), now
		}
		if n.intent == Active {
			n.stage = StageLeaseRequested
		}
	case DestroyLease:
		e.Lease = n.lease
		e.CreatesSent, e.LastCreateAt = n.createsSent, n.lastCreateAt.time()
	default:
		e.Lease, e.Endpoint, e.Session, e.Swactor = n.lease, n.endpoint, n.session, n.swactor
	}
	n.pending, n.resolving, n.pendingSequence = kind, resolving, n.nextSequence
	n.pendingDeadline = now.plus(p.timeout(kind))
	n.nextSequence++
	n.nextEffectAt = 0
	return e
}
