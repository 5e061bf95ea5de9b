package main

import "time"

// step is one run of go test whose tests report figures (internal/verify).
type step struct {
	name    string
	dir     string // of the module, from the root
	pkg     string
	run     string // which tests, as go test -run takes it
	race    bool
	checks  int // of each rapid property; 0: none of them draws
	timeout time.Duration
}

// steps is everything that is verified in full. Whoever adds one names tests
// that report at least one figure; a step without figures fails.
var steps = []step{
	{name: "exhaustive search, one slot", pkg: ".", run: "^TestExhaustive(OneSlot|FormLosesNothing|CanFail|WaysAreReal)$", timeout: 60 * time.Minute},
	{name: "exhaustive search, two slots", pkg: ".", run: "^TestExhaustiveTwoSlots$", timeout: 120 * time.Minute},
	{name: "the incremental and the naive driver", pkg: ".", run: "^TestProp_G1IncrementalDriverAgreesWithNaive$", checks: 25_000, timeout: 60 * time.Minute},
	{name: "independence of slots", pkg: ".", run: "^TestProp_G10SlotsAreIndependent$", checks: 20_000, timeout: 30 * time.Minute},
	{name: "perturbations", pkg: ".", run: "^(TestPerturbedAtEveryPass|TestProp_G7PerturbedRunsEndAlike)$", checks: 20_000, timeout: 60 * time.Minute},
}
