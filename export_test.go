package provisioning

import (
	"fmt"
	"reflect"
	"slices"
	"time"
)

// For tests outside the package, which can import fakebackend.

// NewDriverFrom is newDriverFrom.
func NewDriverFrom(state *ClusterState, shape ClusterShape, config Config) (*ClusterDriver, error) {
	return newDriverFrom(state, shape, config)
}

// FoldOnly is foldOnly.
func (d *ClusterDriver) FoldOnly(now time.Time) error { return d.foldOnly(now) }

// FoldEach folds what waits in the inbox, but for the last so many, into a copy of
// the state, as the pass that comes next will, and shows the copy after every
// single fold that has changed something.
func (d *ClusterDriver) FoldEach(now time.Time, but int, look func(*ClusterState) error) error {
	waiting := slices.Concat(d.inbox.blocks...)
	waiting = waiting[:max(0, len(waiting)-but)]
	if len(waiting) == 0 {
		return nil
	}
	state, at := d.state.Clone(), d.tickAt(now)
	for _, o := range waiting {
		n := state.find(o.Node)
		if n == nil {
			continue
		}
		was := n.clone()
		n.fold(&o, d.state.find(o.Node).group.wish.policy, at)
		if reflect.DeepEqual(was, n.clone()) {
			continue
		}
		if err := look(state); err != nil {
			return fmt.Errorf("folding %v of %s#%d: %w", o.Kind, o.Node, o.Attempt, err)
		}
	}
	return nil
}

// ExhaustiveScenarios writes the ways to worlds of the exhaustive search as
// scenarios: at least n of them, if there are so many, spread over all with at most so many faults that
// a scenario can show exactly.
func ExhaustiveScenarios(faults uint8, n int) []string {
	s := exNewSearch(exModel{class: exToken, slots: 1, maxFaults: faults, maxHeld: 1, plain: true})
	if v := s.run(); v != nil {
		panic(s.tell(v))
	}
	var exact []string
	for i := range s.codes {
		if s.via[i].kind != exPass {
			continue
		}
		if text, draft := s.scenario(s.path(uint32(i))); draft == "" {
			exact = append(exact, text)
		}
	}
	step := max(1, len(exact)/n)
	var some []string
	for i := 0; i < len(exact); i += step {
		some = append(some, exact[i])
	}
	return some
}

// RaceDetector: the race detector is on, and everything takes ten times as long.
const RaceDetector = exRace

// NaiveDriver is dtNaive, with the methods of a driver that it has not.
type NaiveDriver struct{ *dtNaive }

// NewNaiveDriver is dtNewNaive.
func NewNaiveDriver(shape ClusterShape, config Config) NaiveDriver {
	return NaiveDriver{dtNewNaive(shape, config)}
}

// DriveNext is drive.
func (d NaiveDriver) DriveNext(now time.Time, executor EffectExecutor) (bool, error) {
	return d.drive(now, executor), nil
}

// Snapshot returns the state itself, to be read before the next pass.
func (d NaiveDriver) Snapshot() *ClusterState { return d.state }

// Pause and Resume are setPaused.
func (d NaiveDriver) Pause()  { d.setPaused(true) }
func (d NaiveDriver) Resume() { d.setPaused(false) }
