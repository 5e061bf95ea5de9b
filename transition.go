package provisioning

// This file is what the driver itself does to a node when it applies an
// action. Each of these completes the step of its slot.

// beginDelete gives the attempt up (R4). The first step of the cleanup never
// waits for a delay of the way up.
func (n *node) beginDelete() {
	n.intent, n.ready = Deleting, false
	n.nextEffectAt, n.stageDeadline = 0, 0
	n.cleanupFailures = 0
	if n.trouble != &noTrouble {
		n.cancelsFailed, n.held = 0, nil
	}
}

// markDestroyed ends the attempt (R9). RestartAt stays.
func (n *node) markDestroyed(now instant) {
	n.stage, n.ofItsOwn().destroyedAt = StageDestroyed, now
	n.nextEffectAt = 0
}

// restart makes a fresh attempt of the slot (R2). Failures in a row go on only
// if the old attempt failed.
func (n *node) restart(t *template, attempt NodeAttemptID) {
	failures := n.failures
	if n.failedAt == 0 {
		failures = 0
	}
	fresh := newNode(n.id, int(n.index), t, attempt)
	fresh.group, fresh.marks, fresh.standing = n.group, n.marks, n.standing
	*n = *fresh
	n.failures = failures
}

// creates is what was known about the creates of an attempt before the present
// one. A request carries that.
type creates struct {
	sent   uint32
	lastAt instant
}

// record puts an operation on record as pending. It is on record before anybody
// can hear of it (G3).
func (n *node) record(kind OperationKind, resolving bool, p *RetryPolicy, now instant) creates {
	before := creates{n.createsSent, n.lastCreateAt}
	n.pending, n.resolving, n.pendingSequence = kind, resolving, n.nextSequence
	n.pendingDeadline = now.plus(p.timeout(kind))
	n.nextSequence++
	n.nextEffectAt = 0
	if kind == CreateLease {
		if !resolving {
			n.createsSent, n.lastCreateAt = countUp(n.createsSent), now
		}
		if n.intent == Active {
			n.stage = StageLeaseRequested
		}
	}
	return before
}

// effect returns the pending operation, recorded at now, as an effect.
func (n *node) effect(before creates, now instant) Effect {
	e := Effect{
		Operation: n.pendingID(), Kind: n.pending,
		Key:          ExternalKey{Run: n.template.run, Node: n.id, Attempt: n.attempt},
		DispatchedAt: now.time(), Deadline: n.pendingDeadline.time(),
		template: n.template, index: int(n.index),
	}
	switch n.pending {
	case CreateLease:
		e.AdoptOnly = n.resolving // B4
		e.CreatesSent, e.LastCreateAt = before.sent, before.lastAt.time()
	case DestroyLease:
		e.Lease = n.lease
		e.CreatesSent, e.LastCreateAt = before.sent, before.lastAt.time()
	default:
		e.Lease, e.Endpoint, e.Session, e.Swactor = n.lease, n.endpoint, n.session, n.swactor
	}
	return e
}
