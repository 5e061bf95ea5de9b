package provisioning

import (
	"errors"
	"fmt"
)

// InvariantError says which invariant a state breaks, and where.
type InvariantError struct {
	Invariant string // "S1" to "S8"
	Node      LogicalNodeID
	Problem   string
}

// Error returns the broken invariant in one line.
func (e *InvariantError) Error() string {
	return fmt.Sprintf("provisioning: %s broken at %s: %s", e.Invariant, e.Node, e.Problem)
}

// Unwrap returns [ErrInvalidState].
func (e *InvariantError) Unwrap() error { return ErrInvalidState }

// Check looks for what must never be true of a state and returns nil or every
// [*InvariantError], joined, in slot order:
//
//   - S1. An attempt is unique and below the allocator.
//   - S2. A pending operation is of the node's attempt, its sequence below the
//     next one.
//   - S3. A node that is being deleted is not ready.
//   - S4. A destroyed node has no lease, session, pending operation or
//     remembered ambiguity.
//   - S5. A live session has the bootstrap facts of that session.
//   - S6. A ready node is Active, in Dormant or HandedOff, with lease,
//     endpoint, a join and a hand-off time, no failure counted, and nothing
//     pending but a convergence call that the hand-off overtook.
//   - S7. A failed node has a reason, a time and a restart time.
//   - S8. A node is ready, or an operation is pending, or there is something to
//     do, or the deadline that its rule waits for is stored. The one exception
//     is a bootstrap whose policy sets no limit.
func (s *ClusterState) Check() error {
	var broken []error
	owners := make(map[NodeAttemptID]LogicalNodeID, s.Len())
	for n := range s.inOrder() {
		holds := func(invariant string, ok bool, problem string, args ...any) {
			if !ok {
				broken = append(broken, &InvariantError{Invariant: invariant, Node: n.id, Problem: fmt.Sprintf(problem, args...)})
			}
		}
		owner, taken := owners[n.attempt]
		owners[n.attempt] = n.id
		holds("S1", !taken, "attempt %d is also that of %s", n.attempt, owner)
		holds("S1", n.attempt != 0 && n.attempt < s.NextAttemptID, "attempt %d is not below the allocator %d", n.attempt, s.NextAttemptID)
		holds("S2", n.nextSequence >= 1, "the next operation is 0")
		if n.pending != NoOperation {
			holds("S2", n.pendingSequence >= 1 && n.pendingSequence < n.nextSequence,
				"pending operation %d is not below the next one, %d", n.pendingSequence, n.nextSequence)
		}
		if n.intent == Deleting {
			holds("S3", !n.ready, "deleting and ready")
		}
		if n.stage == StageDestroyed {
			holds("S4", n.lease == "", "destroyed and holds lease %q", n.lease)
			holds("S4", n.session == "", "destroyed and holds session %q", n.session)
			holds("S4", n.pending == NoOperation, "destroyed with %s pending", n.pending)
			holds("S4", n.ambiguous == NoOperation, "destroyed and remembers %s", n.ambiguous)
		}
		if n.session != "" {
			holds("S5", n.bootSession == n.session, "session %q is live, the facts are of %q", n.session, n.bootSession)
		}
		if n.ready {
			holds("S6", n.intent == Active, "ready and %s", n.intent)
			holds("S6", n.stage == StageDormant || n.stage == StageHandedOff, "ready in stage %s", n.stage)
			holds("S6", n.lease != "", "ready without a lease")
			holds("S6", n.endpoint != nil, "ready without an endpoint")
			holds("S6", n.joinedAt != 0 && n.handedOffAt != 0, "ready without a join that was handed off")
			holds("S6", n.failures == 0, "ready with %d failures", n.failures)
			holds("S6", n.pending == NoOperation || n.pending == BootstrapConvergenceObserved, "ready with %s pending", n.pending)
		}
		if n.stage == StageFailed {
			holds("S7", n.failedReason != "" && n.failedAt != 0 && n.restartAt != 0, "failed without a reason, a time or a restart time")
		}
		holds("S8", n.canGoOn(), "nothing is pending, to do or waited for")
	}
	return errors.Join(broken...)
}

// canGoOn: something will happen to the node, or it is where it should be.
func (n *node) canGoOn() bool {
	if n.ready || n.pending != NoOperation {
		return true
	}
	d := decide(n, n.template, 0) // at 0 every stored deadline is still ahead
	return d.action != NoAction && d.action != Fail || d.until != nil && (d.until(n) != 0 || d.Number == ruleAwaitBootstrap)
}
