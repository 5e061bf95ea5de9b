// Package planted plants bugs, one at a time, and wants the random traces to
// find each of them and to tell it in a short story. A test that has never found
// anything proves nothing.
package planted

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/internal/verify"
)

const (
	root = "../.."
	// mostTraces is how many traces a bug may hide from, mostEvents how many
	// events the shrunk one may have.
	mostTraces, mostEvents = 20_000, 12
)

// bug is a slip of the pen: in a file, from and to.
type bug struct {
	name, file, from, to string
}

var bugs = []bug{
	{"each report of the bootstrap puts its deadline off", "observe.go",
		"\tn.lastObservedAt = now\n\tn.stdoutSequence =",
		"\tn.lastObservedAt = now\n\tif n.stageDeadline != 0 {\n\t\tn.stageDeadline = limit(now, p.BootstrapTimeout)\n\t}\n\tn.stdoutSequence ="},
	{"the answer NotStarted clears what is remembered of a create", "observe.go",
		"case ClassNotStarted:\n\t\tn.backOff(c, p, now)\n\tcase ClassLeaseLost:\n\t\tn.resolved(CreateLease)",
		"case ClassNotStarted:\n\t\tn.resolved(CreateLease)\n\t\tn.backOff(c, p, now)\n\tcase ClassLeaseLost:\n\t\tn.resolved(CreateLease)"},
	{"a destroy does not wait out its backoff", "decide.go",
		"action: Dispatch, operation: DestroyLease, backsOff: true}",
		"action: Dispatch, operation: DestroyLease}"},
	{"an event of an old attempt counts", "observe.go",
		"if o.Attempt != n.attempt { // G2",
		"if o.Attempt > n.attempt { // G2"},
	{"an operation number is used again after a refusal", "observe.go",
		"\tcase ClassNotStarted:\n\t\tn.backOff(c, p, now)\n\t}\n}\n\nfunc (n *node) foldConvergence",
		"\tcase ClassNotStarted:\n\t\tn.nextSequence--\n\t\tn.backOff(c, p, now)\n\t}\n}\n\nfunc (n *node) foldConvergence"},
	{"a slot is reaped with its machine", "decide.go",
		"all: destroyed | undesired, action: Reap}",
		"all: deleting | undesired, none: pending | unresolved | inSession, action: Reap}"},
	{"the jitter makes waits longer", "backoff.go",
		"return max(d-cut, 1)",
		"return d + cut"},
	{"a slot whose wait is over is not looked at", "driver.go",
		"\t\td.deadlines.Remove(n)\n\t\td.heat(n)",
		"\t\td.deadlines.Remove(n)\n\t\tif n.pending != NoOperation {\n\t\t\td.heat(n)\n\t\t}"},
	{"an operation that is out of time keeps its place", "driver.go",
		"if n.pending == NoOperation {\n\t\td.capacity.giveBack(n)",
		"if n.pending == NoOperation && !expired {\n\t\td.capacity.giveBack(n)"},
	{"a join is forgotten while nobody knows whether the start took place", "observe.go",
		"if n.session == \"\" && n.startOpen() {\n\t\tn.hold(*o)",
		"if n.session == \"\" && n.pending == StartBootstrap {\n\t\tn.hold(*o)"},
	{"the machine is given back before its bootstrap is cancelled", "decide.go",
		"all: deleting | inSession, action: Dispatch",
		"all: deleting | inSession, none: leased, action: Dispatch"},
	{"a pause does not stop the deadline of what it holds back", "pause.go",
		"n.stageDeadline = ends",
		"n.stageDeadline = min(n.stageDeadline, ends)"},
	{"an unknown outcome of a create ends the attempt", "observe.go",
		"n.ambiguous = CreateLease\n\t\tn.backOff(c, p, now)",
		"n.ambiguous = CreateLease\n\t\tn.backOff(c, p, now)\n\t\tn.failUnlessDeleting(c, p, now)"},
	{"what is asked about on the way down is bought", "transition.go",
		"e.AdoptOnly = n.resolving // B4",
		"e.AdoptOnly = false"},
	{"a call that is out of time counts as never made", "executor.go",
		"e.outcome(ClassAmbiguous, \"no answer before the deadline\")",
		"e.outcome(ClassNotStarted, \"no answer before the deadline\")"},
}

// overlay writes the bug beside the shipping code, for the go command to take
// instead of it.
func (b bug) overlay(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join(root, b.file))
	require.NoError(t, err)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(text), b.from), "%s: %s does not say exactly once: %s", b.name, b.file, b.from)
	broken := filepath.Join(t.TempDir(), b.file)
	require.NoError(t, os.WriteFile(broken, []byte(strings.Replace(string(text), b.from, b.to, 1)), 0o600))
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: broken}})
	require.NoError(t, err)
	name := filepath.Join(t.TempDir(), "overlay.json")
	require.NoError(t, os.WriteFile(name, overlay, 0o600))
	return name
}

var (
	failedAfter = regexp.MustCompile(`\[rapid\] failed after (\d+) tests: (.*)`)
	aTraceOf    = regexp.MustCompile(`a trace of (\d+) events:`)
)

// build builds the random stories, with the bug of an overlay if one is named.
func build(t *testing.T, overlay string) (tests string) {
	t.Helper()
	tests = filepath.Join(t.TempDir(), "tests")
	build := exec.Command("go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", tests, ".")
	build.Dir = root
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return tests
}

// tell has the stories told.
func tell(t *testing.T, tests string, traces int, shrinkTime string) (out []byte, err error) {
	run := exec.Command(tests, "-test.run", "^TestProp_RandomStories$", "-test.v", "-rapid.checks", strconv.Itoa(traces),
		"-rapid.seed", strconv.FormatUint(verify.Seed(), 10), "-rapid.nofailfile", "-rapid.shrinktime", shrinkTime)
	run.Dir = t.TempDir()
	return run.CombinedOutput()
}

// hunt builds the random stories with the bug in, and returns in which of them it
// is found and how many events the shrunk one has.
func (b bug) hunt(t *testing.T) (number, events int) {
	t.Helper()
	tests := build(t, b.overlay(t))
	// Shrinking goes on for as long as it may, and on a busy machine it takes
	// longer to come as far.
	for _, shrinkTime := range []string{"10s", "1m", "5m"} {
		out, err := tell(t, tests, mostTraces, shrinkTime)
		var failed *exec.ExitError
		require.ErrorAs(t, err, &failed, "%s is not found", b.name)
		found, told := failedAfter.FindSubmatch(out), aTraceOf.FindAllSubmatch(out, -1)
		require.NotNil(t, found, "%s", out)
		require.NotNil(t, told, "%s", out)
		before, err1 := strconv.Atoi(string(found[1]))
		n, err2 := strconv.Atoi(string(told[len(told)-1][1]))
		require.NoError(t, errors.Join(err1, err2))
		if number, events = before+1, n; events <= mostEvents {
			t.Logf("trace %d, in %d events: %s\n%s", number, events, found[2], out)
			break
		}
	}
	return number, events
}

// TestNoBugNothingFound: as many stories find nothing where nothing is planted. Else
// what is found with a bug could be something else.
func TestNoBugNothingFound(t *testing.T) {
	traces := verify.Target(mostTraces, 500)
	out, err := tell(t, build(t, ""), traces, "1ns")
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), fmt.Sprintf("OK, passed %d tests", traces))
	verify.Note(t, "stories without a bug that find nothing", traces)
}

// TestPlantedBugsAreFound hunts all bugs in its full form and one in the short
// one, which also sees to it that all of them can still be planted.
func TestPlantedBugsAreFound(t *testing.T) {
	found, longest := 0, 0
	for i, b := range bugs {
		t.Run(strings.ReplaceAll(b.name, " ", "-"), func(t *testing.T) {
			if i > 0 && !verify.Full() {
				b.overlay(t)
				return
			}
			number, events := b.hunt(t)
			verify.AtMost(t, "events to tell what trace "+strconv.Itoa(number)+" finds", events, mostEvents)
			found++
			longest = max(longest, events)
		})
	}
	hunted := 1
	if verify.Full() {
		hunted = len(bugs)
	}
	verify.AtLeast(t, "bugs planted", hunted, verify.Target(8, 1))
	verify.Exactly(t, "planted bugs that random traces find", found, hunted)
	verify.AtMost(t, "events of the longest story", longest, mostEvents)
}
