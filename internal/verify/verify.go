// Package verify lets a test have a full form that takes minutes, and collects
// the figures by which it says what it has covered.
//
// A test that uses it has a short form that every run of the tests goes through.
// `make verify` runs the full forms, prints the figures of all of them as a
// table, and fails if one of them misses its target.
package verify

import (
	"flag"
	"fmt"
	"strconv"
	"strings"
	"testing"
)

var full = flag.Bool("verify", false, "run the full forms of the tests, which take minutes, and print their figures")

var seed = flag.Uint64("verify.seed", 1, "what a test that uses internal/verify draws from")

// Full reports whether full forms are asked for.
func Full() bool { return *full }

// Seed returns what a test that draws without rapid draws from. It is the same
// in every run but those of `make verify`.
func Seed() uint64 { return *seed }

// Target is what a figure must reach: one number in the full form of a test,
// another in its short form.
func Target[N int | uint64 | float64](full, short N) N {
	if Full() {
		return full
	}
	return short
}

// Checks makes rapid check a property n times in its short form, unless the
// command line says how often. A full form is told by its step of make verify.
func Checks(t testing.TB, n int) {
	t.Helper()
	checks, given := flag.Lookup("rapid.checks"), Full()
	flag.Visit(func(f *flag.Flag) { given = given || f == checks })
	if given {
		return
	}
	before := checks.Value.String()
	set := func(value string) {
		if err := checks.Value.Set(value); err != nil {
			t.Fatal(err)
		}
	}
	set(strconv.Itoa(n))
	t.Cleanup(func() { set(before) })
}

// Mark begins a line that holds a figure. The fields behind it are separated by
// tabs: the name of the test, what was counted, how many, the target, and "ok"
// or "MISSED".
const Mark = "figure\t"

// AtLeast reports a figure that must not be below its target.
func AtLeast[N int | uint64 | float64](t testing.TB, what string, got, target N) {
	t.Helper()
	report(t, what, got, fmt.Sprintf(">= %v", target), got >= target)
}

// AtMost reports a figure that must not be above its target.
func AtMost[N int | uint64 | float64](t testing.TB, what string, got, target N) {
	t.Helper()
	report(t, what, got, fmt.Sprintf("<= %v", target), got <= target)
}

// Exactly reports a figure that must be its target.
func Exactly[N int | uint64 | float64](t testing.TB, what string, got, target N) {
	t.Helper()
	report(t, what, got, fmt.Sprintf("= %v", target), got == target)
}

// Note reports a figure that has no target.
func Note(t testing.TB, what string, got any) {
	t.Helper()
	report(t, what, got, "", true)
}

func report(t testing.TB, what string, got any, target string, ok bool) {
	t.Helper()
	verdict := "ok"
	if !ok {
		verdict = "MISSED"
		t.Errorf("%s is %v, wanted %s", what, got, target)
	}
	if Full() { // a line break first: other output may have left a line open
		fmt.Println("\n" + Mark + strings.Join([]string{t.Name(), what, fmt.Sprint(got), target, verdict}, "\t"))
	}
}
