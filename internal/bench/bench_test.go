package main

import (
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const output = `goos: linux
pkg: github.com/swactor/provisioning
cpu: some
BenchmarkEventOneAtATime/floor/N=1000  	      70	   2240233 ns/op	       126.0 cpu-ns/event	 635317046 digest
BenchmarkEventOneAtATime/ours/N=1000-2   	       6	  12561669 ns/op	       757.9 cpu-ns/event	 635317046 digest
BenchmarkChurnBounded 	       1	4093350101 ns/op	        -0.0000400 B/operation
BenchmarkSettledDrive/N=1000            	 1000000	       198.2 ns/op	        55.93 cpu-ns/pass	       0 B/op	       0 allocs/op
PASS
`

func TestParse(t *testing.T) {
	r := round{}
	require.NoError(t, r.parse(strings.NewReader(output)))
	require.Equal(t, round{
		{"EventOneAtATime/floor", 1000}: {"ns/op": 2240233, "cpu-ns/event": 126, "digest": 635317046},
		{"EventOneAtATime/ours", 1000}:  {"ns/op": 12561669, "cpu-ns/event": 757.9, "digest": 635317046},
		{"ChurnBounded", 0}:             {"ns/op": 4093350101, "B/operation": -0.00004},
		{"SettledDrive", 1000}:          {"ns/op": 198.2, "cpu-ns/pass": 55.93, "B/op": 0, "allocs/op": 0},
	}, r)
	require.ErrorContains(t, r.parse(strings.NewReader("BenchmarkChurnBounded 1 2 ns/op\n")), "measured twice")
}

// TestParseFailures: a child that failed half-way must not pass for one that has
// measured.
func TestParseFailures(t *testing.T) {
	for text, want := range map[string]string{
		"--- FAIL: BenchmarkX/N=10\n":           "a benchmark failed: --- FAIL",
		"panic: not converged\n":                "a benchmark failed: panic",
		"FAIL\n":                                "a benchmark failed: FAIL",
		"BenchmarkX/N=ten 1 2 ns/op\n":          "invalid syntax",
		"BenchmarkX/N=10 1 2\n":                 "a value without a unit",
		"BenchmarkX/N=10 1 two ns/op\n":         "invalid syntax",
		strings.Repeat("x", 1<<20) + "\nPASS\n": "token too long",
	} {
		require.ErrorContains(t, round{}.parse(strings.NewReader(text)), want, "%.40q", text)
	}
}

func TestMedian(t *testing.T) {
	require.True(t, math.IsNaN(median(nil)))
	values := []float64{9, 1, 5}
	require.Equal(t, 5.0, median(values))
	require.Equal(t, []float64{9, 1, 5}, values, "the caller's stay in order")
	require.Equal(t, 3.0, median([]float64{100, 1, 4, 2}))
}

func TestExponent(t *testing.T) {
	sizes := []float64{1e3, 1e4, 1e5, 1e6}
	for _, want := range []float64{-1, 0, 0.25, 1, 2.16} {
		var y []float64
		for _, n := range sizes {
			y = append(y, 42*math.Pow(n, want))
		}
		require.InDelta(t, want, exponent(sizes, y), 1e-9)
	}
	require.InDelta(t, 0.1*math.Log10(2), exponent([]float64{1, 10}, []float64{1, math.Pow(2, 0.1)}), 1e-9)
	require.True(t, math.IsNaN(exponent([]float64{1}, []float64{1})))
}

// TestRounds: what is compared comes from one round, and a round that lacks
// something is left out and not counted as 0.
func TestRounds(t *testing.T) {
	at := func(ours, floor float64) round {
		return round{{"X/ours", 1000}: {perEvent: ours}, {"X/floor", 1000}: {perEvent: floor}}
	}
	// The machine was ten times slower in the second round.
	rs := rounds{at(30, 10), at(320, 100), at(29, 10), {{"X/ours", 1000}: {perEvent: 1}}}
	require.InDelta(t, 3, rs.ratio("X/ours", "X/floor", 1000, perEvent), 1e-9)
	require.InDelta(t, 29.5, rs.value("X/ours", 1000, perEvent), 1e-9)
	require.True(t, math.IsNaN(rs.value("X/ours", 1000, "other")))
	require.True(t, math.IsNaN(rs.ratio("X/ours", "Y", 1000, perEvent)))

	rs = rounds{
		{{"X", 1000}: {perEvent: 1}, {"X", 10_000}: {perEvent: 2}},
		{{"X", 1000}: {perEvent: 50}, {"X", 10_000}: {perEvent: 100}},
		{{"X", 1000}: {perEvent: 7}},
	}
	require.InDelta(t, math.Log10(2), rs.growth("X", []int{1000, 10_000}, perEvent), 1e-9)
	require.True(t, math.IsNaN(rs.growth("X", []int{1000, 10_000, 100_000}, perEvent)))
}

func TestVerdicts(t *testing.T) {
	is := func(v float64) func(rounds) float64 { return func(rounds) float64 { return v } }
	verdicts := judge([]must{
		{"A", "at most, on the limit", 4, false, is(4)},
		{"A", "at most, above", 4, false, is(4.01)},
		{"A", "at least, on the limit", 3, true, is(3)},
		{"A", "at least, below", 3, true, is(2.99)},
		{"A", "at most, unknown", 4, false, is(math.NaN())},
		{"A", "at least, unknown", 3, true, is(math.NaN())},
	}, nil)
	var passed []bool
	for _, v := range verdicts {
		passed = append(passed, v.passed())
	}
	require.Equal(t, []bool{true, false, true, false, false, false}, passed)

	r := report{title: "x", at: time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC), rounds: 5, verdicts: verdicts,
		machine: machine{cpu: "some CPU", cores: 2, system: "linux/amd64", goes: "go1.26", versions: []string{"peer v1"}}}
	text := r.String()
	for _, line := range []string{
		"2026-05-04, some CPU, 2 cores, linux/amd64, go1.26, peer v1; 5 rounds in 0s.",
		"| A | at most, on the limit | ≤ 4 | 4 | pass |", "| A | at most, above | ≤ 4 | 4.01 | **miss** |",
		"| A | at least, below | ≥ 3 | 2.99 | **miss** |", "| A | at least, unknown | ≥ 3 | – | **not measured** |", "2 of 6 reached.",
	} {
		require.Contains(t, text, line)
	}
	require.ErrorContains(t, r.failure(), "2 of 6 musts were not measured")
	r.verdicts = verdicts[:4]
	require.ErrorContains(t, r.failure(), "2 of 4 musts were missed")
	r.short = true
	require.NoError(t, r.failure())
}

// TestDigestsAreCompared: a subject that came to something else has not run the
// same race, and a floor that says nothing is no witness.
func TestDigestsAreCompared(t *testing.T) {
	at := func(floor, ours float64) round {
		return round{{"X/floor", 10}: {"digest": floor}, {"X/ours", 10}: {"digest": ours}, {"X/naive", 10}: {"ns/op": 1}}
	}
	require.Zero(t, rounds{at(1, 1), at(1, 1)}.disagreements("X", 10))
	require.Equal(t, 1, rounds{at(1, 1), at(1, 2)}.disagreements("X", 10))
	require.Equal(t, 2, rounds{{{"X/ours", 10}: {"digest": 1}}}.disagreements("X", 10))
}

// TestMustsOfMadeUpRounds: each must reads what it says from what the children
// of the plan report.
func TestMustsOfMadeUpRounds(t *testing.T) {
	sizes := []int{1_000, 10_000, 100_000, 1_000_000}
	r := round{}
	for _, n := range sizes {
		for _, benchmark := range []string{"EventOneAtATime", "ConvergeBatched"} {
			r[point{benchmark + "/floor", n}] = metrics{perEvent: 100, "digest": 7}
			r[point{benchmark + "/ours", n}] = metrics{perEvent: 300, "digest": 7}
			r[point{benchmark + "/naive", n}] = metrics{perEvent: 600_000, "digest": 7}
		}
		r[point{"SettledFullPass", n}] = metrics{perNode: 20, "allocs/op": 0}
		r[point{"SettledDrive", n}] = metrics{"cpu-ns/pass": 50, "allocs/op": 0}
		r[point{"WakeOneDue", n}] = metrics{"cpu-ns/wake": 900}
		r[point{"UpdateDesired/same", n}] = metrics{perUpdate: 900}
		r[point{"UpdateDesired/one-more", n}] = metrics{perUpdate: 900}
		r[point{"UpdateDesired/to-zero-floor", n}] = metrics{perEvent: 100}
		r[point{"UpdateDesired/to-zero", n}] = metrics{perEvent: 300}
		r[point{"Snapshot", n}] = metrics{perNode: 500, "longest-ms": 4}
		r[point{"Converged", n}] = metrics{"cpu-ns/call": 7}
		r[point{"BytesPerNode/small", n}] = metrics{"B/node": 480, "peak-B": 1e9}
		r[point{"BytesPerNode/rich", n}] = metrics{"B/node": 490, "peak-B": 1.1e9}
		r[point{"ExecutorPath/driver", n}] = metrics{perEvent: 300}
		r[point{"ExecutorPath/inline", n}] = metrics{perEvent: 500}
		r[point{"ExecutorPath/goroutines", n}] = metrics{perEvent: 540, "goroutines": float64(n + 5)}
		r[point{"Herd/free", n}] = metrics{perEvent: 400}
		r[point{"Herd/places", n}] = metrics{perEvent: 500}
		r[point{"WholeWay/free", n}] = metrics{perNode: 5_000}
		r[point{"WholeWay/fake", n}] = metrics{perNode: 1_000}
	}
	r[point{"ChurnBounded", 0}] = metrics{"B/operation": 0.1}
	figures := map[string]float64{}
	for _, v := range judge(scaleMusts(sizes), rounds{r, r}) {
		require.True(t, v.passed(), "%s: %s is %v", v.benchmark, v.what, v.figure)
		figures[v.benchmark+": "+v.what] = v.figure
	}
	for what, want := range map[string]float64{
		"EventOneAtATime: ours / floor at 1000000":                                 3,
		"EventOneAtATime: exponent of ns/event":                                    0,
		"EventOneAtATime: naive / ours at 1000":                                    2000,
		"UpdateDesired: to zero, ours / floor at 1000000":                          3,
		"Snapshot: ms that events wait at a time at 1000000":                       4,
		"BytesPerNode: peak RSS in GB at 1000000":                                  1.1,
		"BytesPerNode: rich / small at 100000":                                     490.0 / 480,
		"ExecutorPath: inline, ns an operation on top at 100000":                   200.0 * 5 / 3,
		"ExecutorPath: goroutines, ns an operation on top at 100000":               400,
		"ExecutorPath: goroutines a node at 100000":                                1.00005,
		"Herd: places, a refusal / an event of ConvergeBatched at 100000":          5.0 / 3,
		"WholeWay: with the fake / driver and executor at 100000":                  5_000.0 / 2_700,
		"WholeWay: without the fake's own calls / driver and executor at 100000":   4_000.0 / 2_700,
		"EventOneAtATime: digests that differ from the floor's at 1000000":         0,
		"SettledFullPass: allocations at the largest N less those at the smallest": 0,
	} {
		got, ok := figures[what]
		require.True(t, ok, "no %q", what)
		require.InDelta(t, want, got, 1e-9, what)
	}

	peers := rounds{{}}
	for _, n := range sizes {
		peers[0][point{"EventOneAtATime/ours", n}] = metrics{perEvent: 1_000, "digest": 7}
		peers[0][point{"ConvergeBatched/ours", n}] = metrics{perEvent: 800, "digest": 7}
		for _, peer := range []string{"workqueue-one-at-a-time", "priority-one-at-a-time", "workqueue-as-they-come", "priority-as-they-come"} {
			peers[0][point{"ControllerRuntime/" + peer, n}] = metrics{perEvent: 8_000, "digest": 7}
		}
		peers[0][point{"ScheduleOverhead", n}] = metrics{perNode: 50}
		peers[0][point{"Workqueue", n}] = metrics{perNode: 200}
	}
	for _, v := range judge(peersMusts(sizes), peers) {
		require.True(t, v.passed(), "%s: %s is %v", v.benchmark, v.what, v.figure)
	}
	peers[0][point{"ControllerRuntime/priority-one-at-a-time", 1000}]["digest"] = 8
	require.True(t, slices.ContainsFunc(judge(peersMusts(sizes), peers), func(v verdict) bool {
		return v.what == "digests of controller-runtime with priority that differ at 1000" && v.figure == 1 && !v.passed()
	}))
}

// TestPlan: every pattern can be read, at each level, and what wanders is run in
// every round.
func TestPlan(t *testing.T) {
	sizes := []int{1_000, 10_000, 100_000, 1_000_000}
	seen := map[string]bool{}
	for _, c := range append(scalePlan(sizes), peersPlan(sizes)...) {
		for level := range strings.SplitSeq(c.pattern, "/") {
			_, err := regexp.Compile(level)
			require.NoError(t, err)
		}
		seen[c.pattern] = c.once
	}
	once, ok := seen["^BenchmarkEventOneAtATime$/^ours$/^N=1000000$"]
	require.True(t, ok)
	require.False(t, once)
	require.NotContains(t, seen, "^BenchmarkEventOneAtATime$/^naive$/^N=10000$")
	require.Contains(t, seen, "^BenchmarkConvergeBatched$/^naive$/^N=100000$")
	require.Contains(t, seen, "^BenchmarkControllerRuntime$/^workqueue-one-at-a-time$/^N=100000$")
	require.True(t, seen["^BenchmarkBytesPerNode$/^rich$/^N=1000000$"])
	require.NotContains(t, seen, "^BenchmarkControllerRuntime$/^workqueue-one-at-a-time$/^N=1000000$")
}

func TestEnvironment(t *testing.T) {
	of := []string{"GOGC=off", "PATH=/bin", "GOMAXPROCS=64", "GOGCX=1", "GOMEMLIMIT=1GiB", "GODEBUG=gctrace=1"}
	require.Equal(t, []string{"PATH=/bin", "GOGCX=1"}, environment(of))
	require.Equal(t, "GOGC=off", of[0], "the caller's stays")
}

// TestWithSection: each run replaces what it wrote before and leaves the rest.
func TestWithSection(t *testing.T) {
	text := withSection("", "a", "## a\n\none\n")
	require.Equal(t, resultsHead+"\n## a\n\none\n", text)
	text = withSection(text, "b", "## b\n\ntwo\n")
	require.Equal(t, resultsHead+"\n## a\n\none\n\n## b\n\ntwo\n", text)
	text = withSection(text, "a", "## a\n\nthree\n")
	require.Equal(t, resultsHead+"\n## a\n\nthree\n\n## b\n\ntwo\n", text)
	text = withSection(text, "b", "## b\n\nfour\n")
	require.Equal(t, resultsHead+"\n## a\n\nthree\n\n## b\n\nfour\n", text)
}

func TestFigure(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 4: "4", 1.05: "1.05", 0.1234: "0.123", 99.96: "100", 635317046: "635317046", 1234.4: "1234", -0.5: "-0.5"} {
		require.Equal(t, want, figure(v))
	}
	require.Equal(t, "–", figure(math.NaN()))
}
