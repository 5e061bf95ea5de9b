package main

import (
	"strconv"
	"strings"
	"time"
)

// step is one run of go test whose tests report figures (internal/verify).
type step struct {
	name    string
	dir     string // of the module, from the root
	pkg     string
	tests   []string      // each of which has to run and to pass
	fuzz    time.Duration // the one test is a fuzz target, and runs for so long
	program []string      // instead of go test: a package to run and what it is told, beside -seed
	race    bool
	checks  int // of each rapid property; 0: none of them draws
	timeout time.Duration
}

// steps is everything that is verified in full. A step fails if one of the tests
// that it names does not run, and if none of them reports a figure.
var steps = []step{
	{name: "exhaustive search, one slot", pkg: ".", tests: names("TestExhaustiveOneSlot TestExhaustiveFormLosesNothing TestExhaustiveCanFail TestExhaustiveWaysAreReal"), timeout: 60 * time.Minute},
	{name: "exhaustive search, two slots", pkg: ".", tests: names("TestExhaustiveTwoSlots"), timeout: 120 * time.Minute},
	{name: "the incremental and the naive driver", pkg: ".", tests: names("TestProp_G1IncrementalDriverAgreesWithNaive"), checks: 25_000, timeout: 60 * time.Minute},
	{name: "independence of slots", pkg: ".", tests: names("TestProp_G10SlotsAreIndependent"), checks: 20_000, timeout: 30 * time.Minute},
	{name: "metamorphic relations", pkg: ".", tests: names("TestProp_MetamorphicRelations"), checks: 1_000, timeout: 60 * time.Minute},
	{name: "shapes after shapes", pkg: ".", tests: names("TestEveryShapeAfterEveryOther TestEveryInvalidShapeIsRefused"), timeout: 60 * time.Minute},
	{name: "soak", pkg: ".", tests: names("TestSoak"), timeout: 10 * time.Minute},
	{name: "perturbations", pkg: ".", tests: names("TestPerturbedAtEveryPass TestProp_G7PerturbedRunsEndAlike"), checks: 20_000, timeout: 60 * time.Minute},
	{name: "random traces", pkg: ".", tests: names("TestProp_RandomTraces"), checks: 20_000, timeout: 180 * time.Minute},
	{name: "planted bugs", pkg: "./internal/planted", tests: names("TestNoBugNothingFound TestPlantedBugsAreFound"), timeout: 120 * time.Minute},
	{name: "histories", dir: "internal/histories", pkg: ".", tests: names("TestExecutorIsARegisterWrittenOnce TestExecutorHistoriesCanFail TestDriverHasOneOrder TestDriverHistoriesCanFail"), race: true, timeout: 20 * time.Minute},
	{name: "mutants of the ladder", pkg: ".", tests: names("TestLadderMutants"), timeout: 10 * time.Minute},
	mutants("observe.go", 0),
	mutants("identity.go", 0),
	mutants("backoff.go", 0),
	mutants("executor.go", 100),
	mutants("driver.go", 200),
	fuzz(".", "FuzzShapeJSON"),
	fuzz(".", "FuzzShapeValidate"),
	fuzz(".", "FuzzStateJSON"),
	fuzz(".", "FuzzKeyInjective"),
	fuzz(".", "FuzzName"),
	fuzz("./internal/scenario", "FuzzScenario"),
	fuzz("./internal/trace", "FuzzTrace"),
}

func names(tests string) []string { return strings.Fields(tests) }

// mutants draws so many mutants of a file of the root package; 0 takes all.
func mutants(file string, draw int) step {
	return step{name: "mutants of " + file, dir: "internal/tools", timeout: 2 * time.Hour, program: []string{"./mutate", "-root", "../..", "-draw", strconv.Itoa(draw),
		"-also", "internal/scenario", "-slow", slowTests, "-args", "-rapid.seed=1 -rapid.shrinktime=1ns -rapid.nofailfile",
		"-known", "mutate/known.txt", file}}
}

// slowTests are asked about a mutant only when no other test has noticed it.
const slowTests = `^(TestExhaustive.*|TestPerturbed.*|TestLadderMutants|TestSoak|TestBenchmarksRun|TestBackendOfTheExample|` +
	`TestWrappersKeepTheContract|Example_conformance|TestProp_G.*|TestProp_Random.*|TestProp_Metamorphic.*|TestEveryShape.*|TestEveryInvalid.*)$`

func fuzz(pkg, target string) step {
	return step{name: "fuzz " + target, pkg: pkg, tests: names(target), fuzz: time.Minute, timeout: 10 * time.Minute}
}
