package provisioning

import "time"

// For tests outside the package, which can import fakebackend.

// NewDriverFrom is newDriverFrom.
func NewDriverFrom(state *ClusterState, shape ClusterShape, config Config) (*ClusterDriver, error) {
	return newDriverFrom(state, shape, config)
}

// FoldOnly is foldOnly.
func (d *ClusterDriver) FoldOnly(now time.Time) error { return d.foldOnly(now) }

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
