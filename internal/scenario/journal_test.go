package scenario

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// Whatever a scenario plays, its journal tells: told as a scenario it ends in
// the same world, which the lines at its end state and the runner checks.
func TestFromJournal(t *testing.T) {
	for _, file := range scenarioFiles(t) {
		name := strings.TrimSuffix(filepath.Base(file), ".scn")
		t.Run(name, func(t *testing.T) {
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			var journal bytes.Buffer
			require.NoError(t, Run(name, string(source), Options{Journal: &journal}))
			told, err := FromJournal(name, journal.Bytes())
			require.NoError(t, err)

			// It passes, and its own journal tells the very same.
			var again bytes.Buffer
			require.NoError(t, Run(name, told, Options{Journal: &again}))
			twice, err := tellJournal(name, again.Bytes())
			require.NoError(t, err)
			require.Equal(t, withoutComments(told), withoutComments(twice))
		})
	}
}

func withoutComments(scenario string) (lines []string) {
	for line := range strings.Lines(scenario) {
		if command, _, _ := strings.Cut(line, "#"); strings.TrimSpace(command) != "" {
			lines = append(lines, strings.TrimSpace(command))
		}
	}
	return lines
}

// troubled is a story in which much goes wrong, and its journal.
const troubled = `config timeout=40s max-in-flight=3
script w-0 create definite
script w-1 create hang
script w-2 start ambiguous
script w-2 converge error
script x-0 create dead
script x-0 destroy retry-after=9s
shape 1 w:3@a x:1@a
advance 41s
release w-1 create ambiguous
event w-2 lost
advance 10s
reject shape 1 w:1@a
pause
shape 2 w:2@b x:1@a
advance 5s
resume
replace x-0
advance 3s
script y-0 create done-ambiguous
shape 3 w:2@b x:1@a y:1@a
advance 500ms
shape 4 w:2@b x:1@a
advance 3s
`

func journalOf(t *testing.T, source string) []byte {
	t.Helper()
	var journal bytes.Buffer
	require.NoError(t, Run("some.scn", source, Options{Journal: &journal}))
	return journal.Bytes()
}

// The lines at the end can fail: each, when it says something else.
func TestFromJournalStatesWhatHolds(t *testing.T) {
	told, err := FromJournal("trouble", journalOf(t, troubled))
	require.NoError(t, err)
	for _, word := range []string{"\nreject shape 1 w:1@a\n", "\npause\n", "\nresume\n", "\nreplace x-0\n", " dead\n", " hang\n", "retry-after=9s", "done-ambiguous"} {
		require.Contains(t, told, word)
	}
	start := strings.Index(told, "# What has come of it.")
	mutations := 0
	for line := range strings.Lines(told[start:]) {
		for _, change := range []struct{ from, to string }{
			{"attempt=", "attempt=9"}, {"stage=", "stage=New#"}, {"intent=Active", "intent=Deleting"}, {"ready=true", "ready=false"},
			{"pending=none", "pending=create"}, {"failures=0", "failures=7"}, {"next=none", "next=+1s"}, {"lease=true", "lease=none"},
			{"converged false", "converged true"}, {"attempts ", "attempts 9"}, {"observed ", "observed 9"}, {"slots ", "slots y-0 "}, {"requeue +", "requeue +1h"},
		} {
			wrong := strings.Replace(line, change.from, change.to, 1)
			if wrong == line {
				continue
			}
			mutations++
			failed := failureOf(t, strings.Replace(told, line, strings.ReplaceAll(wrong, "#", " #"), 1))
			require.Equal(t, strings.TrimSpace(strings.ReplaceAll(wrong, "#", " #")), failed.Text)
		}
	}
	require.Greater(t, mutations, 20)
}

// stub answers as it is told.
type stub struct {
	submit func(provisioning.Effect) (bool, error)
	expire func(provisioning.OperationID) provisioning.Completion
}

func (s stub) Submit(e provisioning.Effect) (bool, error) {
	if s.submit == nil {
		return false, nil
	}
	return s.submit(e)
}
func (s stub) Expire(id provisioning.OperationID) provisioning.Completion { return s.expire(id) }
func (s stub) Retire(provisioning.NodeAttemptID)                          {}
func (s stub) Running() []provisioning.RunningCall                        { return nil }

// What a scenario cannot say is named with its line, and nothing is written.
func TestFromJournalUnsayable(t *testing.T) {
	start := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	group := provisioning.NodeGroupSpec{GroupID: "w", Count: 1, Shape: provisioning.NodeShape{Image: "a"}}
	completed := func(sequence uint64, kind provisioning.OperationKind, class provisioning.FailureClass, wait time.Duration) provisioning.Observation {
		id := provisioning.OperationID{Attempt: 1, Sequence: sequence}
		return provisioning.Observation{Kind: provisioning.OperationCompleted, Node: "w-0", Attempt: 1,
			Completion: provisioning.Completion{Operation: id, Kind: kind, Class: class, RetryAfter: wait, Message: "no"}}
	}
	tests := map[string]struct {
		config  provisioning.Config
		group   provisioning.NodeGroupSpec
		deliver []provisioning.Observation
		stub    stub
		wait    time.Duration
		what    string
		line    int
	}{
		"a group's policy":    {config: provisioning.Config{GroupRetry: map[provisioning.NodeGroupID]provisioning.RetryPolicy{"w": {}}}, what: "GroupRetry", line: 1},
		"the first attempt":   {config: provisioning.Config{FirstAttempt: 7}, what: "FirstAttempt 7", line: 1},
		"jitter":              {config: provisioning.Config{Retry: provisioning.RetryPolicy{Jitter: 0.5}}, what: "a Jitter of 0.5", line: 1},
		"a longest wait":      {config: provisioning.Config{Retry: provisioning.RetryPolicy{MaxRetryAfter: time.Minute}}, what: "MaxRetryAfter 1m0s", line: 1},
		"a timeout of a kind": {config: provisioning.Config{Retry: provisioning.RetryPolicy{OperationTimeouts: map[provisioning.OperationKind]time.Duration{provisioning.DestroyLease: time.Hour}}}, what: "1h0m0s for DestroyLease", line: 1},
		"a group's name":      {group: provisioning.NodeGroupSpec{GroupID: "my workers", Count: 1}, what: `a group called "my workers"`, line: 1},
		"a wait with a doubt": {deliver: []provisioning.Observation{completed(1, provisioning.CreateLease, provisioning.ClassAmbiguous, time.Hour)},
			what: "a wait of 1h0m0s asked for with an answer that is Ambiguous"},
		"a call too late": {deliver: []provisioning.Observation{completed(1, provisioning.CreateLease, provisioning.ClassNotStarted, 0)}, what: "NotStarted"},
		"an attempt that is none": {deliver: []provisioning.Observation{{Kind: provisioning.NodeLost, Node: "w-0"}},
			what: "a report about attempt 0 of w-0"},
		"a slot that is none":   {deliver: []provisioning.Observation{{Kind: provisioning.NodeLost, Node: "w 0", Attempt: 1}}, what: `a report about "w 0"`},
		"a kind without a name": {deliver: []provisioning.Observation{{Kind: 99, Node: "w-0", Attempt: 1}}, what: "no name"},
		"a stranger's join": {deliver: []provisioning.Observation{{Kind: provisioning.BootstrapClosed, Node: "w-0", Attempt: 1, Session: "a"},
			{Kind: provisioning.SwactorJoined, Node: "w-0", Attempt: 1, Session: "b"}}, what: `a SwactorJoined of w-0 under session "b"`},
		"a refusal with a wait": {stub: stub{submit: func(provisioning.Effect) (bool, error) {
			return false, provisioning.RetryAfter(errors.New("busy"), time.Hour)
		}}, what: "a submission refused with a wait of 1h0m0s"},
		"an executor that panics": {stub: stub{submit: func(provisioning.Effect) (bool, error) { panic("no") }}, what: "an executor that panicked"},
		"a deadline that was no wait": {wait: 3 * time.Minute, stub: stub{expire: func(id provisioning.OperationID) provisioning.Completion {
			return provisioning.Completion{Operation: id, Kind: provisioning.CreateLease, Class: provisioning.ClassNotStarted}
		}}, what: "a call that came too late"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if test.group.GroupID == "" {
				test.group = group
			}
			var journal bytes.Buffer
			test.config.Journal = &journal
			d, err := provisioning.NewClusterDriver(provisioning.ClusterShape{RunID: "r", Generation: 1, Groups: []provisioning.NodeGroupSpec{test.group}}, test.config)
			require.NoError(t, err)
			drive := func(at time.Time) {
				defer func() { _ = recover() }() // of the executor
				d.Trigger()
				_, _ = d.DriveUntilBlocked(at, test.stub)
			}
			drive(start)
			for _, o := range test.deliver {
				d.Deliver(o)
			}
			drive(start.Add(test.wait))
			require.NoError(t, d.JournalErr())

			told, err := FromJournal("x", journal.Bytes())
			require.Empty(t, told)
			require.ErrorIs(t, err, ErrUnsayable)
			unsayable, ok := errors.AsType[*UnsayableError](err)
			require.True(t, ok)
			require.Contains(t, unsayable.What, test.what)
			require.Positive(t, unsayable.Line)
			if test.line != 0 {
				require.Equal(t, test.line, unsayable.Line)
			}
			require.Contains(t, err.Error(), "scenario: the language has no words for it: line ")
		})
	}

	_, err := FromJournal("x", nil)
	require.ErrorIs(t, err, ErrUnsayable, "there is nothing in it")
}

// Of specs that differ in more than their image, each gets a name.
func TestFromJournalNamesSpecs(t *testing.T) {
	var journal bytes.Buffer
	group := provisioning.NodeGroupSpec{GroupID: "w", Count: 1, Shape: provisioning.NodeShape{Image: "a"}}
	shape := provisioning.ClusterShape{RunID: "r", Generation: 1, Groups: []provisioning.NodeGroupSpec{group}}
	d, err := provisioning.NewClusterDriver(shape, provisioning.Config{Journal: &journal})
	require.NoError(t, err)
	start := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	next := func(change func(*provisioning.NodeGroupSpec)) {
		_, err := d.DriveUntilBlocked(start, stub{})
		require.NoError(t, err)
		group := group
		change(&group)
		shape.Groups = []provisioning.NodeGroupSpec{group}
		shape.Generation++
		require.NoError(t, d.UpdateDesired(shape))
	}
	next(func(g *provisioning.NodeGroupSpec) { g.Boot.Args = []string{"-v"} })
	next(func(g *provisioning.NodeGroupSpec) { g.Shape.Image = "not one word" })
	next(func(g *provisioning.NodeGroupSpec) { g.Boot.Env = map[string]string{} }) // as at first
	next(func(g *provisioning.NodeGroupSpec) {})
	told, err := FromJournal("two\nlines", journal.Bytes())
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(told, "# two lines\n"), told)
	for _, line := range []string{"\nshape 1 w:1@a\n", "\nshape 2 w:1@a~2\n", "\nshape 3 w:1@image\n", "\nshape 4 w:1@a\n"} {
		require.Contains(t, told, line)
	}
}
