package trace

import (
	"errors"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// Some coincidences are too rare to wait for: the answer of a look-up in the
// very pass in which an operator wants another attempt, say. An Aim step goes
// for one: it drives the world until an operation is under way at the right
// place, turns the node aside, and then lets the operation end. It may miss,
// for the world may be in no state for it.

// aimRounds bounds how long is waited for one thing.
const aimRounds = 120

var aimedOutcomes = [...]fakebackend.Outcome{Succeeded: fakebackend.OK(), Definite: fakebackend.Definite(), Ambiguous: fakebackend.Ambiguous(),
	NotStarted: fakebackend.Refuse(), LeaseLost: fakebackend.Lost(), TimedOut: fakebackend.Hang()}

func (w *World) aim(c Cell, lose bool) error {
	if w.config.Order == AtOnce { // whose answers come within Submit
		return nil
	}
	w.Fake.ClearScripts()
	w.Driver.Resume()
	if err := errors.Join(w.release(), w.provoke(c)); err != nil {
		return err
	}
	pending := func(n provisioning.ManagedNode) bool {
		return n.Pending != nil && n.Pending.Kind == c.Operation && (n.Intent == c.Intent || n.Intent == provisioning.Active)
	}
	cleanup := c.Operation == provisioning.CancelBootstrap || c.Operation == provisioning.DestroyLease
	first := pending
	if cleanup {
		first = func(n provisioning.ManagedNode) bool {
			return n.Intent == provisioning.Active && (n.Record.Stage == c.Stage || c.Stage == provisioning.StageFailed && n.Record.Lease != "" &&
				(n.ActiveBootstrap != "" || c.Operation == provisioning.DestroyLease))
		}
	}
	before := w.watch.cells[c]
	slot, ok, err := w.until("", first)
	if err != nil || !ok {
		return err
	}
	if cleanup {
		if err := w.turn(slot, c, lose); err != nil {
			return err
		}
		if _, ok, err = w.until(slot, pending); err != nil || !ok {
			return err
		}
	}
	if c.Result == TimedOutQueued {
		w.Fake.Script(slot, c.Operation, fakebackend.Hang())
		w.runWork(maxRounds)
		if err := w.outlive(slot); err != nil {
			return err
		}
		queued := func(n provisioning.ManagedNode) bool { return pending(n) && w.watch.behind[n.Pending.ID] }
		if _, ok, err := w.until(slot, queued); err != nil || !ok {
			return err
		}
	} else {
		w.Fake.Script(slot, c.Operation, fakebackend.Repeat(aimedTimes(c), aimedOutcomes[c.Result])...)
		w.runWork(maxRounds)
		if c.Result == TimedOut && c.Stage == provisioning.StageFailed && c.Intent == provisioning.Active {
			w.toDeadline(slot) // both happen in one pass
		}
	}
	if !cleanup {
		if err := w.turn(slot, c, lose); err != nil {
			return err
		}
	}
	if c.Result == TimedOut || c.Result == TimedOutQueued {
		return w.outlive(slot)
	}
	if _, err := w.answer(); err != nil {
		return err
	}
	if _, err := w.pass(); err != nil || aimedTimes(c) == 1 {
		return err
	}
	_, _, err = w.until(slot, func(provisioning.ManagedNode) bool { return w.watch.cells[c] > before })
	return err
}

// aimedTimes is how often the outcome is scripted. A provider that has not yet
// settled on what there is says so first (B3), and the driver asks again.
func aimedTimes(c Cell) int {
	if c.Result == LeaseLost && c.Operation == provisioning.DestroyLease {
		return 12
	}
	return 1
}

// provoke sees to it that there is somebody on the way up, with an endpoint
// that is still to be found where that is what is aimed at.
func (w *World) provoke(c Cell) error {
	groups := w.Groups()
	wished := 0
	for _, g := range groups {
		wished += g.Count
	}
	if wished == 0 {
		groups = []Group{{ID: groupNames[0], Count: 1, Image: "a"}}
		if err := w.Wish(groups); err != nil {
			return err
		}
	}
	if c.Operation == provisioning.LookupEndpoint || c.Stage == provisioning.StageLeaseCreated {
		for _, slot := range Slots {
			w.Fake.Script(slot, provisioning.CreateLease, fakebackend.OKNoEndpoint())
		}
	}
	if c.Stage == provisioning.StageDormant && c.Operation == provisioning.DestroyLease {
		return nil
	}
	for node := range w.Driver.Snapshot().All() {
		if node.Record.Ready && w.wish.specs[node.Record.Node] != nil {
			return w.replace(node.Record.Node)
		}
	}
	return nil
}

// until goes on, a pass or an answer at a time, until a slot fits: that one, or
// with none named any.
func (w *World) until(named provisioning.LogicalNodeID, fits func(provisioning.ManagedNode) bool) (provisioning.LogicalNodeID, bool, error) {
	for range aimRounds {
		for node := range w.Driver.Snapshot().All() {
			if (named == "" || named == node.Record.Node) && fits(node) {
				return node.Record.Node, true, nil
			}
		}
		w.Driver.TriggerIfDue(w.Now())
		if ran, err := w.pass(); err != nil {
			return "", false, err
		} else if ran {
			continue
		}
		if answered, err := w.answer(); err != nil {
			return "", false, err
		} else if answered || w.reportJoins() {
			continue
		}
		next, ok := w.nextDue()
		if !ok {
			break
		}
		w.Fake.AdvanceTo(next)
	}
	return "", false, nil
}

// reportJoins lets the provider say the joins that nobody has heard of, and no
// more: a bootstrap that closes would end what is aimed at.
func (w *World) reportJoins() bool {
	return w.tell(func(r report) bool { return r.Kind == provisioning.SwactorJoined })
}

// turn brings a node to the stage and the intent that are aimed at.
func (w *World) turn(slot provisioning.LogicalNodeID, c Cell, lose bool) error {
	node, ok := w.Driver.Node(slot)
	if !ok {
		return nil
	}
	if c.Stage == provisioning.StageDormant && !node.Record.Ready { // the bootstrap ends before it is told to
		w.Deliver(provisioning.Observation{Kind: provisioning.BootstrapClosed, Node: slot, Attempt: node.Attempt, Session: node.ActiveBootstrap})
		if _, err := w.pass(); err != nil {
			return err
		}
	}
	switch {
	case c.Stage == provisioning.StageFailed && lose && node.Record.Lease != "" && c.Operation != provisioning.CancelBootstrap: // a lost machine has no session
		w.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: slot, Attempt: node.Attempt, Reason: "it burnt down"})
	case c.Stage == provisioning.StageFailed:
		if err := w.replace(slot); err != nil {
			return err
		}
	case c.Intent == provisioning.Deleting && node.Intent == provisioning.Active:
		groups := w.Groups()
		for i, g := range groups {
			if g.ID == node.Record.Group && lose {
				groups[i].Count = min(g.Count, node.Record.Index)
			} else if g.ID == node.Record.Group {
				groups[i].Image = otherImage[g.Image]
			}
		}
		if err := w.Wish(groups); err != nil {
			return err
		}
	}
	if c.Intent == provisioning.Active {
		return nil
	}
	_, err := w.pass()
	return err
}

var otherImage = map[string]string{"a": "b", "b": "a"}

// toDeadline moves the time to the deadline of what is pending.
func (w *World) toDeadline(slot provisioning.LogicalNodeID) {
	if node, ok := w.Driver.Node(slot); ok && node.Pending != nil {
		w.Fake.AdvanceTo(w.Fake.Now().Add(max(0, node.Pending.Deadline.Sub(w.Driver.Clock(w.Now())))))
	}
}

// outlive lets what is pending be out of time.
func (w *World) outlive(slot provisioning.LogicalNodeID) error {
	w.toDeadline(slot)
	w.Driver.TriggerIfDue(w.Now())
	_, err := w.pass()
	return err
}
