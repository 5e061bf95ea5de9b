package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// play runs the program and returns its exit status and what it printed.
func play(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(context.Background(), args, &out, &err)
	return code, out.String(), err.String()
}

func TestSeeds(t *testing.T) {
	var all strings.Builder
	for seed := range 50 {
		code, stdout, stderr := play("-seed", fmt.Sprint(seed))
		require.Zero(t, code, "seed %d: %s", seed, stderr)
		require.Empty(t, stderr, "seed %d", seed)
		require.Contains(t, stdout, " lost, 0 left\n", "seed %d", seed)
		require.NotContains(t, stdout, "not played", "seed %d", seed)
		require.True(t, strings.HasSuffix(stdout, "Every chapter ended as it should.\n"), "seed %d", seed)
		all.WriteString(stdout)
	}
	// What the seeds bring is as bad as it is meant to be.
	for _, trouble := range []string{
		"CreateLease failed, Ambiguous: no answer before the deadline",
		"CreateLease failed, Ambiguous: scripted loss of the answer",
		"CreateLease failed, Ambiguous: the backend panicked",
		"CreateLease failed, Definite: no capacity",
		"CreateLease failed, Definite: scripted throttling; not again within 25s",
		"CreateLease failed, LeaseLost: the machine of this key is dead",
		"calls LookupEndpoint",
		"LookupEndpoint failed, LeaseLost",
		"the attempt failed: StartBootstrap: scripted definite failure",
		"StartBootstrap failed, Ambiguous: the backend panicked",
		"BootstrapConvergenceObserved failed, Ambiguous",
		"CancelBootstrap failed, Definite",
		"DestroyLease failed, Definite: scripted throttling; not again within 10s",
		"(R7 cancel-bootstrap)",
	} {
		require.True(t, strings.Contains(all.String(), trouble), trouble)
	}
}

func TestRunIsRepeatable(t *testing.T) {
	_, first, _ := play("-seed", "7")
	for range 3 {
		_, again, _ := play("-seed", "7", "-plain")
		require.Equal(t, first, again)
	}
	_, other, _ := play("-seed", "8")
	require.NotEqual(t, first, other)

	var pictures [2]bytes.Buffer
	for i := range pictures {
		s := newTestStory(t, 7, newQuickTable(&pictures[i]))
		require.Empty(t, s.tell(context.Background()))
	}
	require.Equal(t, pictures[0].String(), pictures[1].String())
}

func TestTroublesAreOutcomes(t *testing.T) {
	for _, trouble := range troubles {
		for _, text := range trouble.outcomes {
			outcomes, err := fakebackend.ParseOutcome(text)
			require.NoError(t, err)
			require.NoError(t, outcomes[0].Fits(trouble.kind))
			require.NotContains(t, text, "hang", "nobody would release it")
		}
	}
}

func write(t *testing.T, text string) string {
	name := filepath.Join(t.TempDir(), "shape.json")
	require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

// Every fault has its line, and nothing is begun.
func TestBadInputIsRefused(t *testing.T) {
	integer := fmt.Sprintf(" must be an integer of %d bits, in digits", strconv.IntSize) // of a count
	for _, test := range []struct {
		why, text string
		want      []string
	}{
		{"not JSON", "{\n\"runId\": \"r\",\n}", []string{"line 3: invalid character '}' looking for beginning of object key string"}},
		{"cut off", `{"runId": "r"`, []string{"unexpected EOF"}},
		{"empty", "", []string{"the file is empty"}},
		{"blank", " \n", []string{"the file is empty"}},
		{"nothing", "null", []string{"runId: must not be empty", "generation: must be at least 1"}},
		{"a list", "[]", []string{"the shape: is a list, must be an object"}},
		{"unknown field", `{"runId": "r", "generation": 1, "group": []}`, []string{"group: unknown field"}},
		{"unknown fields", `{"runId": "r", "foo": {"runId": 1}, "generation": 1, "groups": [{"groupId": "w", "cuont": 3, "boot": {"x": 1}}, {"groupId": "v", "bar": null}]}`, []string{
			"foo: unknown field",
			"groups[0].cuont: unknown field",
			"groups[0].boot.x: unknown field",
			"groups[1].bar: unknown field",
		}},
		{"odd names", `{"runId": "r", "generation": 1, "": 1, "a.b\u202e": 1, "groups": [{"groupId": "w", "boot": {"env": {"A B": 1}}}]}`, []string{
			`[""]: unknown field`,
			`["a.b\u202e"]: unknown field`,
			`groups[0].boot.env["A B"]: is 1, must be a string`,
		}},
		{"twice", `{"runId": "r", "generation": 1, "groups": [{"groupId": "w", "count": 1, "count": 3, "boot": {"env": {"A": "1", "B": "1", "A": "2"}}}], "generation": 1}`, []string{
			"groups[0].count: is there twice",
			"groups[0].boot.env.A: is there twice",
			"generation: is there twice",
		}},
		{"twice, and both are wrong", `{"runId": "r", "generation": 1, "groups": [{"groupId": "w", "count": -1, "count": "3"}], "groups": [{"x": 1}, 5]}`, []string{
			"groups[0].count: is there twice",
			"groups[0].count: is a string," + integer,
			"groups: is there twice",
			"groups[0].x: unknown field",
			"groups[1]: is 5, must be an object",
			`group "w" (groups[0]) count: is -1, must not be negative`,
		}},
		{"wrong case", `{"RUNID": "a/b", "generation": 1, "groups": [{"groupID": "w", "COUNT": -1, "count": 1, "shape": {"MinGPURamMB": "1"}}]}`, []string{
			"RUNID: must be spelled runId",
			"groups[0].groupID: must be spelled groupId",
			"groups[0].COUNT: must be spelled count",
			"groups[0].count: is there twice",
			"groups[0].shape.MinGPURamMB: must be spelled minGPURAMMB",
			"groups[0].shape.MinGPURamMB: is a string, must be a number of 64 bits",
			"runId: must not hold '/'",
			`group "w" (groups[0]) count: is -1, must not be negative`,
		}},
		{"other types", `{"runId": "a/b", "generation": -1, "groups": [
			{"groupId": "w", "count": 1.5, "role": 5, "shape": {"requireVerified": "yes", "minUpMbps": 1e999, "diskGB": -2},
			 "boot": {"args": ["a", 1, true], "mounts": {}, "env": ["A"]}, "swarmJoin": "x"},
			{"groupId": "w", "count": 99999999999999999999}, []]}`, []string{
			"generation: is -1, must be an integer of 64 bits that is not negative, in digits",
			"groups[0].count: is 1.5," + integer,
			"groups[0].role: is 5, must be a string",
			"groups[0].shape.requireVerified: is a string, must be true or false",
			"groups[0].shape.minUpMbps: is 1e999, must be a number of 64 bits",
			"groups[0].boot.args[1]: is 1, must be a string",
			"groups[0].boot.args[2]: is true, must be a string",
			"groups[0].boot.mounts: is an object, must be a list",
			"groups[0].boot.env: is a list, must be an object",
			"groups[0].swarmJoin: is a string, must be an object",
			"groups[1].count: is 99999999999999999999," + integer,
			"groups[2]: is a list, must be an object",
			"runId: must not hold '/'",
			`group "w" (groups[0]) shape.diskGB: is -2, must not be negative`,
			`group "w" (groups[1]) groupId: is also the name of groups[0]`,
		}},
		{"a run that cannot be read is compared with nothing", `{"runId": 7, "generation": 1, "groups": [{"runId": "r", "groupId": "w", "x": 1}]}`, []string{
			"runId: is 7, must be a string",
			"groups[0].x: unknown field",
		}},
		{"a list of groups that is none", `{"generation": 0, "groups": {"groupId": "w"}}`, []string{
			"groups: is an object, must be a list",
			"runId: must not be empty",
			"generation: must be at least 1",
		}},
		{"two shapes", `{"runId": "r", "generation": 1} {}`, []string{"something follows the shape"}},
		{"a bracket too many", `{"runId": "r", "generation": 1}}`, []string{"something follows the shape"}},
		{"too large", `{"runId": "r", "generation": 1, "groups": [{"groupId": "w", "count": 65}]}`, []string{"groups: hold more than 64 slots in all"}},
		{"every fault", `{"runId": "a/b", "groups": [
			{"groupId": "w", "count": -1, "shape": {"image": "i", "diskGB": -2}},
			{"groupId": "w", "runId": "other"}]}`, []string{
			"runId: must not hold '/'",
			"generation: must be at least 1",
			`group "w" (groups[0]) count: is -1, must not be negative`,
			`group "w" (groups[0]) shape.diskGB: is -2, must not be negative`,
			`group "w" (groups[1]) runId: belongs to run "other", the shape to run "a/b"`,
			`group "w" (groups[1]) groupId: is also the name of groups[0]`,
		}},
	} {
		name := write(t, test.text)
		want := ""
		for _, line := range test.want {
			want += name + ": " + line + "\n"
		}
		for _, args := range [][]string{{name}, {"-plan", name}} {
			code, stdout, stderr := play(args...)
			require.Equal(t, 2, code, test.why)
			require.Equal(t, want, stderr, test.why)
			require.Empty(t, stdout, test.why)
		}
	}

	name := filepath.Join(t.TempDir(), "absent.json")
	code, _, stderr := play(name)
	require.Equal(t, 2, code)
	require.True(t, strings.HasPrefix(stderr, name+": ") && strings.Count(stderr, name) == 1, stderr)
}

func TestBadFlagsAreRefused(t *testing.T) {
	for _, args := range [][]string{
		{"-seed", "-1"}, {"-seed", "x"}, {"-nonsense"}, {"a", "b", "c"},
		{"-speed", "-1"}, {"-speed", "NaN"}, {"-speed", "Inf"}, {"-speed", "1e-300"}, {"-speed", "1e300"},
	} {
		code, stdout, stderr := play(args...)
		require.Equal(t, 2, code, args)
		require.Empty(t, stdout, args)
		require.NotEmpty(t, stderr, args)
	}
	code, _, stderr := play("-h")
	require.Zero(t, code)
	require.Contains(t, stderr, "SECOND.json")
}

const (
	small   = `{"runId": "r", "generation": 3, "groups": [{"groupId": "a", "count": 2, "shape": {"image": "a:1"}}, {"groupId": "b", "count": 1, "shape": {"image": "b:1"}}]}`
	changed = `{"runId": "r", "generation": 9, "groups": [{"groupId": "b", "count": 1, "shape": {"image": "b:2"}}, {"groupId": "c", "count": 3, "shape": {"image": "c:1"}}]}`
)

func TestSecondShape(t *testing.T) {
	first, second := write(t, small), write(t, changed)
	code, stdout, stderr := play(first, second)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "== change: the second shape\n")
	require.Regexp(t, `(?m)^change .* 4$`, stdout)
	require.NotContains(t, stdout, "== roll")

	for _, test := range []struct{ why, text, want string }{
		{"another run", `{"runId": "other", "generation": 4}`, `provisioning: the run of a cluster cannot change: it is "r", the update says "other"`},
		{"backwards", `{"runId": "r", "generation": 2}`, `provisioning: generation is lower than the accepted one: 2 after 3`},
		{"silent change", `{"runId": "r", "generation": 3}`, `provisioning: changed content needs a higher generation: the content differs from the accepted one of generation 3`},
		{"invalid", `{"runId": "r", "generation": 4, "groups": [{"groupId": "", "count": -1}]}`, "group \"\" (groups[0]) groupId: must not be empty\nNAME: group \"\" (groups[0]) count: is -1, must not be negative"},
	} {
		second := write(t, test.text)
		code, stdout, stderr := play(first, second)
		require.Equal(t, 2, code, test.why)
		require.Equal(t, strings.ReplaceAll("NAME: "+test.want+"\n", "NAME", second), stderr, test.why)
		require.Empty(t, stdout, test.why)
	}

	// A second shape that was not read as it is written is judged all the
	// same, as far as it could be read.
	typo := write(t, `{"runId": "other", "generation": 4, "gruops": []}`)
	code, _, stderr = play(first, typo)
	require.Equal(t, 2, code)
	require.Equal(t, typo+": gruops: unknown field\n"+typo+`: provisioning: the run of a cluster cannot change: it is "r", the update says "other"`+"\n", stderr)
	unread := write(t, `{"runId": 5, "generation": 4}`)
	code, _, stderr = play(first, unread)
	require.Equal(t, 2, code)
	require.Equal(t, unread+": runId: is 5, must be a string\n", stderr)

	bad := write(t, `{}`)
	code, _, stderr = play(bad, bad)
	require.Equal(t, 2, code)
	require.Equal(t, 4, strings.Count(stderr, bad), "the faults of both:\n%s", stderr)
}

// Small worlds have a story too, if a short one.
func TestFleetsWithoutMachines(t *testing.T) {
	code, stdout, stderr := play(write(t, `{"runId": "r", "generation": 1}`))
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "machines  0 bought, 0 given back, 0 lost, 0 left\n")

	code, stdout, stderr = play(write(t, `{"runId": "r", "generation": 1, "groups": [{"groupId": "w", "count": 0}]}`))
	require.Zero(t, code, stderr)
	require.Regexp(t, `(?m)^scale up .* 2$`, stdout)

	empty := write(t, `{"runId": "r", "generation": 1}`)
	code, stdout, stderr = play(empty, write(t, changed))
	require.Zero(t, code, stderr)
	require.Regexp(t, `(?m)^change .* 4$`, stdout)
	require.NotContains(t, stdout, "lose a node", "there is none")
}

func TestPlan(t *testing.T) {
	code, stdout, stderr := play("-plan", write(t, small))
	require.Zero(t, code, stderr)
	require.Equal(t, `The first pass towards generation 3, 3 steps:
a-0          Insert   R0 insert: a desired slot that is not in the state gets a node and its first attempt
a-1          Insert   R0 insert: a desired slot that is not in the state gets a node and its first attempt
b-0          Insert   R0 insert: a desired slot that is not in the state gets a node and its first attempt
`, stdout)
}

// With an update, -plan says what that would take down, and does not make it.
func TestPlanUpdate(t *testing.T) {
	first := write(t, small)
	code, stdout, stderr := play("-plan", "-image", "v9", first)
	require.Zero(t, code, stderr)
	_, update, found := strings.Cut(stdout, "\n\n")
	require.True(t, found, stdout)
	require.Equal(t, `Once the fleet is up, an update to generation 4: 0 to insert, 3 to replace, 0 to delete; takes down 3 that are ready, all at once; differs: shape.image
a-0          replace  ready shape.image
a-1          replace  ready shape.image
b-0          replace  ready shape.image
`, update)

	second := write(t, strings.NewReplacer(`"generation": 3`, `"generation": 4`, `"count": 2`, `"count": 3`, `"count": 1`, `"count": 0`).Replace(small))
	code, stdout, stderr = play("-plan", first, second)
	require.Zero(t, code, stderr)
	_, update, _ = strings.Cut(stdout, "\n\n")
	require.Equal(t, `Once the fleet is up, an update to generation 4: 1 to insert, 0 to replace, 1 to delete; takes down 1 that are ready, all at once
a-2          insert   not ready
b-0          delete   ready
`, update)

	for _, args := range [][]string{{"-image", "v9", first}, {"-plan", "-image", "v9", first, second}} {
		code, stdout, stderr = play(args...)
		require.Equal(t, 2, code)
		require.Empty(t, stdout)
		require.Equal(t, "quickstart: -image is for -plan with one shape\n", stderr)
	}
	for name, args := range map[string][]string{"image": {"-plan", "-image", "", first}, "journal": {"-journal", "", first}} {
		code, stdout, stderr = play(args...)
		require.Equal(t, 2, code)
		require.Empty(t, stdout)
		require.Equal(t, "quickstart: -"+name+" is empty\n", stderr)
	}
}

func newTestStory(t *testing.T, seed uint64, shown view) *story {
	shapes, faults := readShapes(nil)
	require.Empty(t, faults)
	s, err := newStory(seed, shapes, shown, nil)
	require.NoError(t, err)
	return s
}

// full is a disk without room.
type full struct{ room int }

var errFull = errors.New("no room")

func (f *full) Write(p []byte) (int, error) {
	n := min(len(p), f.room)
	f.room -= n
	if n < len(p) {
		return n, errFull
	}
	return n, nil
}

// Nobody is told that all went well by an exit status alone.
func TestWriteErrors(t *testing.T) {
	for _, args := range [][]string{{}, {"-plan"}} {
		for _, room := range []int{0, 100} {
			var stderr bytes.Buffer
			require.Equal(t, 1, run(context.Background(), args, &full{room: room}, &stderr))
			require.Equal(t, "quickstart: no room\n", stderr.String(), "once")
		}
	}
}

// A name may hold what a terminal would obey: here it turns the line around,
// and a provider's message might clear the screen.
func TestNothingUnprintableIsShown(t *testing.T) {
	const run, group = "r\u202e\u200d", "w\u2067x"
	shape := write(t, fmt.Sprintf(`{"runId": %q, "generation": 1, "groups": [{"groupId": %q, "count": 1}]}`, run, group))
	odd := func(text string) bool {
		return strings.ContainsFunc(text, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) })
	}
	for _, args := range [][]string{{shape}, {"-plan", shape}} {
		code, stdout, stderr := play(args...)
		require.Zero(t, code, stderr)
		require.Contains(t, stdout, `w\u2067x-0`)
		require.False(t, odd(stdout), "%q", stdout)
	}

	bad := write(t, fmt.Sprintf(`{"runId": %q, "generation": 1, "\u202e": 0}`, run))
	for _, args := range [][]string{{bad}, {shape, bad}, {"absent\x1b[2J\u202e.json"}} {
		code, _, stderr := play(args...)
		require.Equal(t, 2, code)
		require.False(t, odd(stderr), "%q", stderr)
	}

	// A story that fails names the slots.
	shapes, faults := readShapes([]string{shape})
	require.Empty(t, faults)
	var out, told bytes.Buffer
	s, err := newStory(1, shapes, &lines{out: &out}, nil)
	require.NoError(t, err)
	s.provider.Script(group+"-0", provisioning.CreateLease, fakebackend.Repeat(1000, fakebackend.Capacity())...)
	require.Equal(t, 1, report(&out, &told, s, s.tell(context.Background())))
	require.Contains(t, told.String(), `w\u2067x-0 should have the machine`)
	require.False(t, odd(told.String()+out.String()), "%q", told.String()+out.String())
}

// Whoever stops the story is told what goes on costing money.
func TestInterrupted(t *testing.T) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var out bytes.Buffer
	shown := &lines{out: &out, pace: pace{speed: 1}}
	slept := 0
	shown.pace.sleep = func(context.Context, time.Duration) {
		if slept++; slept == 10 {
			stop()
		}
	}
	s := newTestStory(t, 1, shown)
	untrue := strings.Join(s.tell(ctx), "\n")
	require.Equal(t, 10, slept)
	require.Contains(t, untrue, "converge: provisioning: stopped (context canceled) with ")
	require.Contains(t, untrue, "the fleet has not converged to generation 1")
	s.printSummary(&out)
	require.Contains(t, out.String(), "scale up         not played\n")

	code := run(ctx, nil, io.Discard, io.Discard)
	require.Equal(t, 1, code)
}

// A provider that never has room keeps the fleet from what is wished, and the
// story from going on for ever.
func TestOverdue(t *testing.T) {
	s := newTestStory(t, 1, &lines{out: io.Discard})
	s.provider.Script("worker-3", provisioning.CreateLease, fakebackend.Repeat(1000, fakebackend.Capacity())...)
	untrue := s.tell(context.Background())
	require.Contains(t, untrue[0], "converge: provisioning: stopped (the fleet was not as wished after 2h0m0s) with 5 held")
	require.Contains(t, untrue, "converge: the fleet has not converged to generation 1")
	require.Contains(t, untrue, "converge: 5 machines are billed for 6 slots")
	require.Equal(t, 5, s.chapters[0].machines)
	require.False(t, s.chapters[1].begun)
}

// What the story claims is looked at, not assumed.
func TestJudge(t *testing.T) {
	settled := func() (*story, []provisioning.ManagedNode) {
		s := newTestStory(t, 1, &lines{out: io.Discard})
		s.play(context.Background(), s.chapters[0])
		var nodes []provisioning.ManagedNode
		for node := range s.host.Driver().Snapshot().All() {
			nodes = append(nodes, node)
		}
		return s, nodes
	}
	buy := func(s *story, key provisioning.ExternalKey) {
		_, err := s.provider.CreateLease(context.Background(), provisioning.CreateLeaseRequest{Key: key})
		require.NoError(t, err)
	}
	for _, test := range []struct {
		why    string
		tamper func(s *story, nodes []provisioning.ManagedNode) (lost provisioning.LogicalNodeID)
		want   []string
	}{
		{"nothing", func(*story, []provisioning.ManagedNode) provisioning.LogicalNodeID { return "" }, nil},
		{"a machine is gone", func(s *story, _ []provisioning.ManagedNode) provisioning.LogicalNodeID {
			s.provider.Remove("worker-0")
			return ""
		}, []string{`worker-0 should have the machine`, "5 machines are billed for 6 slots", "7 machines were bought, 1 given back, 0 lost, and 5 are there"}},
		{"a machine too many", func(s *story, _ []provisioning.ManagedNode) provisioning.LogicalNodeID {
			buy(s, provisioning.ExternalKey{Run: "elsewhere", Node: "worker-9", Attempt: 1})
			return ""
		}, []string{"7 machines are billed for 6 slots"}},
		{"bought twice", func(s *story, nodes []provisioning.ManagedNode) provisioning.LogicalNodeID {
			key := provisioning.ExternalKey{Run: "quickstart-1", Node: "worker-0", Attempt: nodes[2].Attempt}
			s.provider.lost += s.provider.Remove("worker-0")
			buy(s, key)
			return ""
		}, []string{"worker-0 should have the machine", "of worker-0 bought 2 machines"}},
		{"replaced for nothing", func(_ *story, nodes []provisioning.ManagedNode) provisioning.LogicalNodeID {
			nodes[1].Attempt = 99
			return ""
		}, []string{"gpu-1 went from attempt 99 to"}},
		{"not replaced", func(_ *story, nodes []provisioning.ManagedNode) provisioning.LogicalNodeID {
			nodes[3].Record.Spec.Shape.Image = "older"
			return "worker-2"
		}, []string{"worker-1 went from attempt", "worker-2 went from attempt"}},
		{"another wish", func(s *story, _ []provisioning.ManagedNode) provisioning.LogicalNodeID {
			s.wish = *s.chapters[1].wish
			require.NoError(t, s.host.UpdateDesired(s.wish))
			return ""
		}, []string{"the fleet has not converged to generation 2", "worker-4 is not there", "worker-5 is not there", "6 machines are billed for 8 slots"}},
		{"another image", func(s *story, _ []provisioning.ManagedNode) provisioning.LogicalNodeID {
			s.wish.Groups = append([]provisioning.NodeGroupSpec(nil), s.wish.Groups...)
			s.wish.Groups[0].Shape.Image = "other"
			return ""
		}, []string{"gpu-0 is built from another spec", "gpu-1 is built from another spec"}},
	} {
		s, nodes := settled()
		lost := test.tamper(s, nodes)
		untrue := s.judge(s.chapters[0], nodes, lost)
		require.Len(t, untrue, len(test.want), "%s: %q", test.why, untrue)
		for i, want := range test.want {
			require.Contains(t, untrue[i], want, test.why)
		}
	}

	s, nodes := settled()
	untrue := s.judge(&chapter{drain: true}, nodes, "")
	require.Len(t, untrue, 1)
	require.Contains(t, untrue[0], "still held: [gpu-0 attempt")
}

// A run with a journal is the same run, and what is kept repeats it.
func TestJournal(t *testing.T) {
	for seed := range 5 {
		name := filepath.Join(t.TempDir(), "fleet.jsonl")
		_, without, _ := play("-seed", fmt.Sprint(seed))
		code, with, stderr := play("-seed", fmt.Sprint(seed), "-journal", name)
		require.Zero(t, code, stderr)
		require.Equal(t, without, with)
		journal, err := os.Open(name)
		require.NoError(t, err)
		defer journal.Close()
		report, err := provisioning.Replay(journal)
		require.NoError(t, err)
		require.Nil(t, report.Difference, "%v", report.Difference)
		require.Greater(t, report.Passes, 100)
		require.Zero(t, report.Driver.Snapshot().Len(), "it ends drained")
	}
}

func TestJournalThatCannotBeWritten(t *testing.T) {
	code, _, stderr := play("-journal", filepath.Join(t.TempDir(), "nowhere", "fleet.jsonl"))
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "nowhere")

	// One that is there is kept, and where none would be written none is named.
	name := filepath.Join(t.TempDir(), "fleet.jsonl")
	require.NoError(t, os.WriteFile(name, []byte("the bad day\n"), 0o644))
	code, stdout, stderr := play("-journal", name)
	require.Equal(t, 2, code)
	require.Empty(t, stdout)
	require.Contains(t, stderr, "exists")
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	require.Equal(t, "the bad day\n", string(text))
	code, stdout, stderr = play("-plan", "-journal", filepath.Join(t.TempDir(), "fleet.jsonl"))
	require.Equal(t, 2, code)
	require.Empty(t, stdout)
	require.Equal(t, "quickstart: -journal is for a run, and -plan is none\n", stderr)

	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("this system has no device that is always full")
	}
	code, stdout, stderr = play("-journal", "/dev/full")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "not true: the journal is whole: provisioning: writing the journal:")
	require.Contains(t, stdout, ", 0 left\n", "the fleet lives its life all the same")
}
