package scenario

import (
	"encoding/json"
	"fmt"
	"slices"
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
		want = invariant.Earliest(want, invariant.WakeOf(&node, r.wanted(node.Record.Node), r.driver.Paused(), clock))
	}
	at, ok := r.driver.RequeueAt()
	expected, found := momentWord(want.Sub(clock), !want.IsZero()), momentWord(at.Sub(now), ok)
	if expected != found {
		return wrong("RequeueAt "+expected, found)
	}
	return nil
}

// takeFurtherPass asks for one pass more than is needed. It must do nothing.
func (r *runner) takeFurtherPass() error {
	before, err := r.outline()
	if err != nil {
		return err
	}
	plan := r.driver.Plan(r.now())
	plan.Actions = slices.DeleteFunc(plan.Actions, func(a provisioning.Action) bool {
		node, _ := r.driver.Node(a.Node)
		return r.driver.Paused() && invariant.HeldBack(a.Kind, &node, r.wanted(a.Node) != nil)
	})
	if err := invariant.NothingLeft(plan, r.config.maxInFlight); err != nil {
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
