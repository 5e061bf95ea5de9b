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
