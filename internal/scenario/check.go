package scenario

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/invariant"
)

// check holds the world to what must be true after every line and at every
// moment on the way.
func (r *runner) check() error {
	if len(r.problems) > 0 {
		return wrong("every call recorded before it starts, and alone in its attempt (G3)", r.problems[0].Error())
	}
	state := r.driver.Snapshot()
	if err := state.Check(); err != nil {
		return wrong("a state that keeps S1 to S8", err.Error())
	}
	return invariant.Machines(r.config.class, r.fake.Machines())
}

// checkRequeue works out from the state what RequeueAt has to be, at the moment
// at which a pass would have ended.
func (r *runner) checkRequeue() error {
	now := r.now()
	clock := r.driver.Clock(now)
	var want time.Time
	for node := range r.driver.Snapshot().All() {
		want = earliest(want, wakeOf(&node, r.wanted(node.Record.Node), clock))
	}
	at, ok := r.driver.RequeueAt()
	expected, found := momentWord(want.Sub(clock), !want.IsZero()), momentWord(at.Sub(now), ok)
	if expected != found {
		return wrong("RequeueAt "+expected, found)
	}
	return nil
}

// wakeOf is the next stored moment after now that a slot waits for: what its
// rule waits for, and the stage deadline of an Active node that is not ready.
func wakeOf(node *provisioning.ManagedNode, wanted *provisioning.LogicalNodeSpec, now time.Time) time.Time {
	var wake time.Time
	for _, at := range []time.Time{
		provisioning.DecideNode(node, wanted, now).Until,
		stageDeadline(node),
	} {
		if at.After(now) {
			wake = earliest(wake, at)
		}
	}
	return wake
}

func stageDeadline(node *provisioning.ManagedNode) time.Time {
	if node.Intent == provisioning.Active && !node.Record.Ready {
		return node.Retry.StageDeadline
	}
	return time.Time{}
}

func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// takeFurtherPass asks for one pass more than is needed. It must do nothing.
func (r *runner) takeFurtherPass() error {
	before, err := r.outline()
	if err != nil {
		return err
	}
	if err := invariant.NothingLeft(r.driver.Plan(r.now()), r.config.maxInFlight); err != nil {
		return err
	}
	r.driver.Trigger()
	for _, want := range []bool{true, false} {
		ran, err := r.driver.DriveNext(r.now(), r.executor)
		if err != nil {
			return err
		}
		if ran != want {
			return wrong("exactly one further pass", fmt.Sprintf("DriveNext answering %v", ran))
		}
	}
	after, err := r.outline()
	if err != nil {
		return err
	}
	if before != after {
		return wrong("a further pass to change nothing: "+before, after)
	}
	if n := r.work.Len(); n > 0 {
		return wrong("a further pass to call nothing", fmt.Sprintf("%d calls", n))
	}
	return nil
}

// outline is all that a pass could change.
func (r *runner) outline() (string, error) {
	state, err := json.Marshal(r.driver.Snapshot())
	if err != nil {
		return "", err
	}
	at, ok := r.driver.RequeueAt()
	stats := r.driver.Stats()
	return fmt.Sprintf("%s, requeue %s, %d dispatched, %d attempts, converged %v", state, momentWord(at.Sub(r.now()), ok),
		stats.Dispatched, stats.Attempts, r.driver.Converged(r.shape.Generation)), nil
}
