package trace

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
)

// Step plays one step, drives unless the trace is driven by hand, and asks what
// must be true.
func (w *World) Step(s Step) error {
	w.say("## %v", s)
	if err := w.play(s); err != nil {
		return err
	}
	if !w.config.ManualDrive {
		if err := w.Drive(); err != nil {
			return err
		}
	}
	state := w.Driver.Snapshot()
	return errors.Join(w.checkState(state), w.checkExplained(state))
}

func (w *World) play(s Step) error {
	switch s.Kind {
	case Wish:
		return w.Wish(s.Groups)
	case WishDuring:
		w.during = append(w.during, s.Groups)
	case Rewish:
		return w.Driver.UpdateDesired(w.wish.shape)
	case Refused:
		return w.Refuse(s.Refusal, s.Groups)
	case Script:
		w.Fake.Script(s.Slot, s.Operation, fakebackend.Repeat(s.N, s.Outcome)...)
	case Release:
		if w.Fake.Hanging(s.Slot, s.Operation) > 0 {
			return w.Fake.Release(s.Slot, s.Operation, s.Outcome)
		}
	case Remove:
		w.Fake.Remove(w.present(s.Slot, anyNode))
	case Event:
		return w.deliver(w.observation(s))
	case Redeliver:
		past := w.Delivered(w.present(s.Slot, busy))
		return w.deliver(past[max(0, len(past)-s.N):]...)
	case LoseReports:
		w.losing[s.Slot] += s.N
	case Due:
		if due, ok := w.nextDue(); ok {
			w.moveTo(due.Add(s.D))
		}
	case Leap:
		w.moveTo(w.Fake.Now().Add(s.D))
	case Through:
		if w.config.ManualDrive {
			w.moveTo(w.Fake.Now().Add(s.D))
			return nil
		}
		return w.Through(s.D)
	case Back:
		w.setBack += s.D
		// As every host does when it looks whether something is due. What a
		// clock was set back while nobody looked is missing from the waits.
		w.Driver.TriggerIfDue(w.Now())
	case BreakPass:
		w.breaking = s.N
	case Trigger:
		w.Driver.Trigger()
	case Pause:
		w.Driver.Pause()
	case Resume:
		w.Driver.Resume()
	case Replace:
		return w.replace(w.present(s.Slot, anyNode))
	case Work:
		w.runWork(s.N)
	case Pass:
		if _, err := w.answer(); err != nil {
			return err
		}
		w.Driver.TriggerIfDue(w.Now())
		_, err := w.pass()
		return err
	case Drive:
		return w.Drive()
	case Aim:
		return w.aim(s.Cell, s.N == 1)
	case Settle:
		w.Driver.Resume()
		return w.settle(time.Time{})
	}
	return nil
}

// replace asks for another attempt of a slot, which has to be there.
func (w *World) replace(slot provisioning.LogicalNodeID) error {
	node, there := w.Driver.Node(slot)
	attempt, err := w.Driver.Replace(slot, "it is slow")
	if there != (err == nil) || attempt != node.Attempt {
		return invariant.Wrong(fmt.Sprintf("attempt %d of %s to be named", node.Attempt, slot), fmt.Sprint(attempt, err))
	}
	return nil
}

func (w *World) moveTo(t time.Time) {
	w.Fake.AdvanceTo(t)
	w.Driver.TriggerIfDue(w.Now())
}

// present returns the slot, or the next one that is in the state and fits:
// most of what happens should happen to somebody. It is the slot if none does.
func (w *World) present(slot provisioning.LogicalNodeID, fits func(provisioning.ManagedNode) bool) provisioning.LogicalNodeID {
	from := slices.Index(Slots, slot)
	for i := range Slots {
		candidate := Slots[(from+i)%len(Slots)]
		if node, there := w.Driver.Node(candidate); there && fits(node) {
			return candidate
		}
	}
	return slot
}

func anyNode(provisioning.ManagedNode) bool { return true }

// busy: an operation is under way, and its result is not the only one there was.
func busy(n provisioning.ManagedNode) bool { return n.Pending != nil && n.NextSequence > 2 }

// bootstrapping: there is a session, or a start that may have made one.
func bootstrapping(n provisioning.ManagedNode) bool {
	return n.ActiveBootstrap != "" || n.Pending != nil && n.Pending.Kind == provisioning.StartBootstrap ||
		n.Retry.Ambiguous == provisioning.StartBootstrap
}

// observation makes what an Event step delivers.
func (w *World) observation(s Step) provisioning.Observation {
	slot := w.present(s.Slot, anyNode)
	if s.Event.Kind != provisioning.NodeLost {
		slot = w.present(s.Slot, bootstrapping)
	}
	attempt := w.watch.attemptOf(slot, s.Age)
	key := provisioning.ExternalKey{Run: Run, Node: slot, Attempt: attempt}
	o := provisioning.Observation{Kind: s.Event.Kind, Node: slot, Attempt: attempt, Session: w.Fake.SessionID(key), Stage: s.Event.Stage}
	if s.DeadSession {
		o.Session = "session/that/never/was"
	}
	switch o.Kind {
	case provisioning.SwactorJoined:
		o.Swactor = s.Event.Agent
		if o.Swactor == "" {
			o.Swactor = fakebackend.SwactorID(key)
		}
		if w.Fake.SessionLive(key) {
			w.told[joinOf(o)] = true
		}
	case provisioning.NodeLost:
		o.Session = ""
	}
	return o
}

// joinOf names the join of a session.
func joinOf(o provisioning.Observation) string { return "join of " + string(o.Session) }

// refusalErrors are what each refusal has to say.
var refusalErrors = [...]error{provisioning.ErrRunChanged, provisioning.ErrGenerationRegressed, provisioning.ErrInvalidShape, provisioning.ErrGenerationReused}

// Refuse offers an update that must be refused, for the right reason and with
// nothing changed (G9).
func (w *World) Refuse(r Refusal, groups []Group) error {
	shape := Shape(w.wish.shape.Generation+1, groups...)
	switch r {
	case OtherRun:
		shape.RunID = "another"
		for i := range shape.Groups {
			shape.Groups[i].Count = -1 // the run is looked at first
		}
	case LowerGeneration:
		shape.Generation = w.wish.shape.Generation - 1
	case InvalidShape:
		shape.Groups = append(shape.Groups, provisioning.NodeGroupSpec{GroupID: "w", Count: -1})
	case SameGeneration:
		shape.Generation = w.wish.shape.Generation
		shape.Groups = append(shape.Groups, provisioning.NodeGroupSpec{GroupID: "another", Count: 1})
	}
	before := w.known()
	err := w.Driver.UpdateDesired(shape)
	if !errors.Is(err, refusalErrors[r]) {
		return invariant.Wrong(fmt.Sprintf("%q", refusalErrors[r]), fmt.Sprint(err))
	}
	if after := w.known(); after != before {
		return invariant.Wrong("a refused update to change nothing: "+before, after)
	}
	return nil
}

// known is all that a refused update could change.
func (w *World) known() string {
	requeue, stored := w.Driver.RequeueAt()
	ready, wished := w.Driver.Progress()
	return fmt.Sprintf("%s, requeue %v %v, generation %d, observed %d, converged %v, %d of %d ready, %v",
		w.State(), requeue.Sub(w.Now()), stored, w.Driver.Generation(), w.Driver.ObservedGeneration(), w.Driver.Converged(w.wish.shape.Generation),
		ready, wished, w.Driver.Plan(w.Now()).Actions)
}
