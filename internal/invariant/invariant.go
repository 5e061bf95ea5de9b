// Package invariant holds what must be true of any cluster at any moment,
// whoever drives it: scenario files and random traces ask the same questions.
package invariant

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// Mismatch says what was to be there and what was.
type Mismatch struct{ Expected, Found string }

// Error tells both.
func (m *Mismatch) Error() string { return "expected " + m.Expected + ", found " + m.Found }

// Wrong returns a [*Mismatch].
func Wrong(expected, found string) error { return &Mismatch{expected, found} }

// Machines wants one machine a slot. Only a create that landed late at a
// provider that knows labels alone may make a second: the provider did it.
func Machines(class fakebackend.Class, machines []fakebackend.Machine) error {
	first := make(map[provisioning.LogicalNodeID]fakebackend.Machine)
	for _, m := range machines {
		if class == fakebackend.Label && m.Late {
			continue
		}
		if other, twice := first[m.Key.Node]; twice {
			return Wrong("one machine for "+string(m.Key.Node), fmt.Sprintf("%s and %s", other.Lease, m.Lease))
		}
		first[m.Key.Node] = m
	}
	return nil
}

// NothingLeft wants a plan without actions and faults. Under a limit there may
// be dispatches that have no place.
func NothingLeft(plan provisioning.Plan, maxInFlight int) error {
	var left []string
	for _, a := range plan.Actions {
		if maxInFlight == 0 || a.Kind != provisioning.Dispatch {
			left = append(left, fmt.Sprintf("%v of %s (%v)", a.Kind, a.Node, a.Rule))
		}
	}
	for _, f := range plan.Faults {
		left = append(left, fmt.Sprintf("a fault of %s: %v", f.Node, f.Err))
	}
	if slices.Sort(left); left != nil {
		return Wrong("nothing left to do", strings.Join(left, ", "))
	}
	return nil
}

// HeldBack reports whether a pause keeps an action from being taken. node is nil
// for a slot that is to be inserted; wanted says whether the wish has the slot.
func HeldBack(action provisioning.ActionKind, node *provisioning.ManagedNode, wanted bool) bool {
	switch action {
	case provisioning.Insert, provisioning.Restart:
		return true
	case provisioning.Dispatch:
		return node.Intent == provisioning.Active
	case provisioning.BeginDelete:
		return node.Record.Ready && wanted
	}
	return false
}

// WakeOf returns the next stored moment after now that a node waits for: what its
// rule waits for, and the stage deadline of one that is Active and not ready. What
// a pause holds back waits for neither, but a call of it may still end. It is zero
// if there is none.
func WakeOf(node *provisioning.ManagedNode, want *provisioning.LogicalNodeSpec, paused bool, now time.Time) time.Time {
	d := provisioning.DecideNode(node, want, now)
	var moments []time.Time
	switch {
	case !paused || !HeldBack(d.Action, node, want != nil):
		moments = append(moments, d.Until)
		if node.Intent == provisioning.Active && !node.Record.Ready {
			moments = append(moments, node.Retry.StageDeadline)
		}
	case node.Pending != nil:
		moments = append(moments, node.Pending.Deadline)
	}
	var wake time.Time
	for _, at := range moments {
		if at.After(now) {
			wake = Earliest(wake, at)
		}
	}
	return wake
}

// Earliest returns the earlier of two moments; a zero one is none.
func Earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// AwaitGoroutines returns once no more goroutines live than before. Those that
// are over may take a moment to be gone, but no more.
func AwaitGoroutines(before int) error {
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			return Wrong(fmt.Sprintf("%d goroutines, as before", before), fmt.Sprint(runtime.NumGoroutine()))
		}
		runtime.Gosched()
	}
	return nil
}
