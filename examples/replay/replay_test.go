package main

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/scenario"
)

// play runs the program and returns its exit status and what it printed.
func play(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(args, &out, &err)
	return code, out.String(), err.String()
}

// incident writes the journal of a fleet of eleven, of which one is bought at
// the second try, and returns the name of the file.
func incident(t *testing.T) string {
	name := filepath.Join(t.TempDir(), "bad day.jsonl")
	file, err := os.Create(name)
	require.NoError(t, err)
	backend := fakebackend.New(fakebackend.Config{JoinAfter: 10 * time.Second})
	work := backend.NewWork()
	outcome, err := fakebackend.ParseOutcome("definite")
	require.NoError(t, err)
	backend.Script("w-10", provisioning.CreateLease, outcome...)
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape:   provisioning.ClusterShape{RunID: "r", Generation: 1, Groups: []provisioning.NodeGroupSpec{{GroupID: "w", Count: 11}}},
		Backend: backend, Journal: file, Clock: work.Clock(nil), Go: work.Go,
		Retry: provisioning.RetryPolicy{InitialDelay: 40 * time.Second},
	})
	require.NoError(t, err)
	require.ErrorIs(t, host.UpdateDesired(provisioning.ClusterShape{RunID: "r"}), provisioning.ErrGenerationRegressed)
	stopped := make(chan error)
	backend.At(backend.Now().Add(2*time.Minute), func() {
		go func() { _, err := host.Close(t.Context()); stopped <- err }()
	})
	require.Error(t, host.Run(t.Context()), "machines are held")
	require.NoError(t, <-stopped)
	require.NoError(t, host.Driver().JournalErr())
	require.NoError(t, file.Close())
	return name
}

func TestTimeline(t *testing.T) {
	journal := incident(t)
	code, stdout, stderr := play(journal)
	require.Zero(t, code, stderr)
	require.Empty(t, stderr)
	var slots []string
	for line := range strings.Lines(stdout) {
		if slot, is := strings.CutPrefix(line, "== "); is {
			slots = append(slots, strings.TrimSpace(slot))
		}
	}
	require.Equal(t, []string{"the cluster", "w-0", "w-1", "w-2", "w-3", "w-4", "w-5", "w-6", "w-7", "w-8", "w-9", "w-10"}, slots)
	require.Contains(t, stdout, "          0s  UpdateRefused generation 0: provisioning: generation is lower")
	require.Contains(t, stdout, "          0s  Fold w-10#11 OperationCompleted CreateLease 11/1 Definite: fakebackend: scripted definite failure\n")
	require.Contains(t, stdout, "         40s  Dispatch w-10#11 CreateLease 11/2 (R12 create-lease)\n")
	require.Contains(t, stdout, "         50s  Ready w-10#11\n")
	require.True(t, strings.HasSuffix(stdout, ", repeated without a difference.\n"), stdout)

	code, one, _ := play("-slot", "w-10", journal)
	require.Zero(t, code)
	require.Contains(t, one, "== w-10\n")
	require.NotContains(t, one, "w-9")
	code, _, stderr = play("-slot", "x-0", journal)
	require.Equal(t, 2, code)
	require.Equal(t, "replay: nothing is told of a slot x-0\n", stderr)
}

func TestExplainAMoment(t *testing.T) {
	journal := incident(t)
	for at, want := range map[string]string{
		"0s":    "waiting 40s more",
		"39.9s": "waiting 100ms more",
		"40s":   "waiting 30m0s more at most for the bootstrap",
		"2m":    "ready",
	} {
		code, stdout, stderr := play("-at", at, "-slot", "w-10", journal)
		require.Zero(t, code, stderr)
		require.Contains(t, stdout, "w-10: "+want, at)
		require.NotContains(t, stdout, "w-9", at)
		require.NotContains(t, stdout, "ends", at)
	}
	code, stdout, stderr := play("-at", "9999h", "-slot", "w-10", journal)
	require.Zero(t, code, stderr)
	_, ends, _ := strings.Cut(stdout, " passes in ")
	ends, _, _ = strings.Cut(ends, ",") // the host was closed at two minutes or a little later
	require.True(t, strings.HasPrefix(stdout, "the journal ends at "+ends+": this is as of then\n"+ends+"  w-10: ready"), stdout)
	text, err := os.ReadFile(journal)
	require.NoError(t, err)
	cut := filepath.Join(t.TempDir(), "cut.jsonl")
	require.NoError(t, os.WriteFile(cut, text[:len(text)/2], 0o644))
	code, stdout, _ = play("-at", "12m", "-slot", "w-10", cut)
	require.Equal(t, 1, code)
	require.Regexp(t, `^what is good of the journal ends at (\d\S*): this is as of then\n\d\S*  w-10: `, stdout)
	code, stdout, _ = play("-at", "1s", journal)
	require.Zero(t, code)
	require.Equal(t, 13, strings.Count(stdout, "\n"), "the cluster, every slot, and how it ended")
	require.Contains(t, stdout, "1s  generation 1: 0 of 11 ready; w-10: waiting 39s more after 1 failure in a row, the last: CreateLease: fakebackend: scripted definite failure; for 1s now [R10 await-backoff]; "+
		"10 like w-0: waiting 29m59s more at most for the bootstrap to report a join; for 1s now [R15 await-bootstrap]; the next deadline is in 39s\n")
	code, _, stderr = play("-at", "1s", "-slot", "x-0", journal)
	require.Equal(t, 2, code)
	require.Equal(t, "replay: there is no slot x-0 at 1s\n", stderr)
}

// What comes before a bad line is shown, and the line is named.
func TestBadJournals(t *testing.T) {
	journal := incident(t)
	text, err := os.ReadFile(journal)
	require.NoError(t, err)
	write := func(text string) string {
		name := filepath.Join(t.TempDir(), "bad.jsonl")
		require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
		return name
	}
	corrupt := strings.Replace(string(text), `"operation":"StartBootstrap"`, `"operation":"StopBootstrap!"`, 1)
	code, stdout, stderr := play(write(corrupt))
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "Dispatch w-0#1 CreateLease")
	require.NotContains(t, stdout, "Ready w-0")
	require.Regexp(t, `^provisioning: the journal is corrupt: line \d+\n$`, stderr)

	code, stdout, stderr = play(write(string(text[:len(text)-3])))
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "Ready w-10#11")
	require.Regexp(t, `^provisioning: the journal is cut off: line \d+\n$`, stderr)

	for _, args := range [][]string{{}, {"a", "b"}, {"-at", "-1s", journal}, {"-what"}, {"nowhere.jsonl"}, {write("")}, {write("what?\n")}} {
		code, stdout, stderr = play(args...)
		require.Equal(t, 2, code, "%q", args)
		require.Empty(t, stdout, "%q", args)
		require.NotEmpty(t, stderr, "%q", args)
	}
	// Of a driver that was made and no more there is a first line, and no moment.
	head := write(string(text[:bytes.IndexByte(text, '\n')+1]))
	written := filepath.Join(t.TempDir(), "bad.scn")
	for _, args := range [][]string{{"-scenario", written, head}, {"-at", "0s", head}} {
		code, stdout, stderr = play(args...)
		require.Equal(t, 2, code, "%q", args)
		require.Empty(t, stdout, "%q", args)
		require.Equal(t, "replay: the journal holds no whole pass: nothing has happened yet\n", stderr, "%q", args)
	}
	first := bytes.Index(text, []byte(`{"end":`)) // the pass before it is not whole
	code, _, stderr = play("-at", "0s", write(string(text[:first])))
	require.Equal(t, 2, code)
	require.Regexp(t, `^replay: the journal holds no whole pass: provisioning: the journal is cut off: line \d+\n$`, stderr)
	// What would go unheeded is refused.
	for _, args := range [][]string{
		{"-scenario", written, "-at", "0s"}, {"-scenario", written, "-slot", "w-0"}, {"-gotest", "bad_test.go", "-at", "1s"},
		{"-gotest", "bad_test.go", "-slot", "w-0"}, {"-scenario", ""}, {"-gotest", ""}, {"-slot", ""},
	} {
		code, stdout, stderr = play(append(args, journal)...)
		require.Equal(t, 2, code, "%q", args)
		require.Empty(t, stdout, "%q", args)
		require.Regexp(t, "of the whole journal|is empty", stderr, "%q", args)
	}
	require.NoFileExists(t, written)
	code, _, stderr = play("-h")
	require.Zero(t, code)
	require.NotContains(t, stderr, "default")
	require.Contains(t, stderr, "-gotest")
}

// A provider may say anything; a terminal is not to obey it. And another version
// may decide otherwise: both are shown, and the exit status says so.
func TestWhatIsPrinted(t *testing.T) {
	name := filepath.Join(t.TempDir(), "odd.jsonl")
	file, err := os.Create(name)
	require.NoError(t, err)
	driver, err := provisioning.NewClusterDriver(provisioning.ClusterShape{RunID: "r", Generation: 1}, provisioning.Config{Journal: file})
	require.NoError(t, err)
	driver.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: "x\x1b[2J-0", Reason: "\u202e gone\n"})
	executor, err := provisioning.NewExecutor(fakebackend.New(fakebackend.Config{}), provisioning.ExecutorConfig{Deliver: driver.Deliver})
	require.NoError(t, err)
	_, err = driver.DriveNext(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), executor)
	require.NoError(t, err)
	require.NoError(t, file.Close())
	code, stdout, stderr := play(name)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, `== x\x1b[2J-0`)
	require.Contains(t, stdout, `\u202e gone\n`)

	text, err := os.ReadFile(name)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(name, resealed(strings.Replace(string(text), `"nodes":0`, `"nodes":1`, 1)), 0o644))
	code, stdout, stderr = play(name)
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "NotApplied")
	require.NotContains(t, stdout, "without a difference")
	require.Regexp(t, `^line 4 differs\nexpected .*"nodes":1.*\nfound .*"nodes":0.*\n$`, stderr)
}

// resealed gives the lines of a journal the checksums that belong to them.
func resealed(journal string) []byte {
	var sealed []byte
	sum := uint32(0)
	for line := range strings.Lines(journal) {
		bare := line[:strings.LastIndex(line, `,"crc":`)]
		sum = crc32.Update(sum, crc32.MakeTable(crc32.Castagnoli), []byte(bare+"}"))
		sealed = fmt.Appendf(sealed, "%s,\"crc\":\"%08x\"}\n", bare, sum)
	}
	return sealed
}

// The scenario that is written passes, and one that says something else does not.
func TestScenario(t *testing.T) {
	journal, dir := incident(t), t.TempDir()
	written := filepath.Join(dir, "bad-day.scn")
	code, stdout, stderr := play("-scenario", written, journal)
	require.Zero(t, code, stderr)
	require.Regexp(t, `^wrote .*bad-day.scn, \d+ lines from \d+ of the journal's \d+, and it passes\n$`, stdout)
	text, err := os.ReadFile(written)
	require.NoError(t, err)
	require.NoError(t, scenario.Run(written, string(text), scenario.Options{}))
	require.Contains(t, string(text), "\nscript w-10 create definite\n")
	require.Contains(t, string(text), "\nadvance 30s\n")
	require.Contains(t, string(text), "\nexpect w-10 attempt=11 stage=Dormant intent=Active ready=true")
	wrong := strings.Replace(string(text), "w-10 create definite", "w-10 create ok", 1)
	require.Error(t, scenario.Run(written, wrong, scenario.Options{}))

	code, _, stderr = play("-scenario", written, journal)
	require.Equal(t, 2, code, "it is there already")
	require.Contains(t, stderr, "exists")
	code, _, stderr = play("-scenario", filepath.Join(dir, "bad-day.txt"), journal)
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "ends in .scn")
	code, _, stderr = play("-scenario", written, "-gotest", filepath.Join(dir, "a_test.go"), journal)
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "two runs")

	// Of one that was cut off, what is whole.
	lines, err := os.ReadFile(journal)
	require.NoError(t, err)
	cut := filepath.Join(dir, "cut.jsonl")
	require.NoError(t, os.WriteFile(cut, lines[:len(lines)/2], 0o644))
	half := filepath.Join(dir, "half.scn")
	code, stdout, stderr = play("-scenario", half, cut)
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "and it passes")
	require.Contains(t, stderr, "cut off")
}

// What a scenario cannot say is named, and nothing is written.
func TestScenarioUnsayable(t *testing.T) {
	dir := t.TempDir()
	name, written := filepath.Join(dir, "jitter.jsonl"), filepath.Join(dir, "jitter.scn")
	file, err := os.Create(name)
	require.NoError(t, err)
	driver, err := provisioning.NewClusterDriver(provisioning.ClusterShape{RunID: "r", Generation: 1},
		provisioning.Config{Journal: file, Retry: provisioning.RetryPolicy{Jitter: 0.3}})
	require.NoError(t, err)
	executor, err := provisioning.NewExecutor(fakebackend.New(fakebackend.Config{}), provisioning.ExecutorConfig{Deliver: driver.Deliver})
	require.NoError(t, err)
	_, err = driver.DriveUntilBlocked(time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC), executor)
	require.NoError(t, err)
	require.NoError(t, file.Close())
	code, stdout, stderr := play("-scenario", written, name)
	require.Equal(t, 2, code)
	require.Empty(t, stdout)
	require.Equal(t, "replay: scenario: the language has no words for it: line 1: a Jitter of 0.3, which is drawn from the run\n", stderr)
	require.NoFileExists(t, written)
}

// The test that is written passes where the journal does and fails where it does
// not, in the package that is there.
func TestGoTest(t *testing.T) {
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	require.NoError(t, err)
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":   "module example.com/fleet\n\ngo 1.26.0\n\nrequire github.com/swactor/provisioning v0.0.0\n\nreplace github.com/swactor/provisioning => " + root + "\n",
		"go.sum":   string(sums),
		"fleet.go": "package fleet\n",
		// What the go command does not take for the package, first.
		"a_tool.go": "//go:build ignore\n\npackage main\n",
		// The name of the test is taken, if only elsewhere.
		"a_windows_test.go": "package fleet\n\nimport \"testing\"\n\nfunc TestReplayBadDay(*testing.T) {}\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	journal, test := incident(t), filepath.Join(dir, "incident_test.go")
	text, err := os.ReadFile(journal)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(journal, text[:len(text)-3], 0o644)) // its process was killed
	code, stdout, stderr := play("-gotest", test, journal)
	require.Equal(t, 1, code, "it is cut off")
	require.Contains(t, stderr, "cut off")
	require.Contains(t, stdout, "wrote "+test+" with TestReplayBadDay_2 and ")
	another := filepath.Join(dir, "bad_day.jsonl")
	require.NoError(t, os.WriteFile(another, text, 0o644))
	code, stdout, stderr = play("-gotest", filepath.Join(dir, "another_test.go"), another)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, " with TestReplayBadDay_3 and ")

	goTest := func() (string, error) {
		command := exec.Command("go", "test", "-mod=mod", "-v", ".")
		command.Dir = dir
		command.Env = append(os.Environ(), "GOPROXY=off", "GOFLAGS=", "GOWORK=off")
		out, err := command.CombinedOutput()
		return string(out), err
	}
	out, err := goTest()
	require.NoError(t, err, out)
	require.Contains(t, out, "--- PASS: TestReplayBadDay_2")
	require.Contains(t, out, "--- PASS: TestReplayBadDay_3")

	kept := filepath.Join(dir, "testdata", "bad day.jsonl")
	text, err = os.ReadFile(kept)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(kept, bytes.Replace(text, []byte("CreateLease"), []byte("CreateLoose"), 1), 0o644))
	out, err = goTest()
	require.Error(t, err, "the journal is not what it was")
	require.Contains(t, out, "the journal is corrupt")

	code, _, stderr = play("-gotest", test, journal)
	require.Equal(t, 2, code, "it is there already")
	require.Contains(t, stderr, "exists")
	code, _, stderr = play("-gotest", filepath.Join(dir, "incident.go"), journal)
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "ends in _test.go")
	code, _, stderr = play("-gotest", filepath.Join(dir, "_incident_test.go"), journal)
	require.Equal(t, 2, code, "the go command would not see it")
	require.Contains(t, stderr, "begins with neither")
}

// The test belongs to the package that is there, from outside: it can be one that
// this library imports, or the library. Where there is no one package nothing is
// written.
func TestGoTestPackage(t *testing.T) {
	journal := incident(t)
	for _, c := range []struct {
		name  string
		files map[string]string
		pkg   string // "": refused
		why   string
	}{
		{"the library", map[string]string{"driver.go": "package provisioning\n"}, "provisioning_test", ""},
		{"tests of both kinds", map[string]string{"a_test.go": "package fleet_test\n", "b_test.go": "package fleet\n", "c.go": "package fleet\n"}, "fleet_test", ""},
		{"a program", map[string]string{"main.go": "package main\n", "doc.go": "package documentation\n"}, "main_test", ""},
		{"no package", nil, "", "no buildable Go source files"},
		{"none on this system", map[string]string{"a.go": "//go:build ignore\n\npackage main\n"}, "", "no buildable Go source files"},
		{"two packages", map[string]string{"a.go": "package a\n", "b.go": "package b\n"}, "", "found packages a (a.go) and b (b.go)"},
		{"no Go", map[string]string{"a.go": "package a\n", "a_test.go": "package a\n\nfunc {\n"}, "", "a_test.go:3:6"},
	} {
		dir := t.TempDir()
		for name, text := range c.files {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
		}
		test := filepath.Join(dir, "incident_test.go")
		code, _, stderr := play("-gotest", test, journal)
		if c.pkg == "" {
			require.Equal(t, 2, code, c.name)
			require.Contains(t, stderr, c.why, c.name)
			require.NoFileExists(t, test, c.name)
			require.NoDirExists(t, filepath.Join(dir, "testdata"), c.name)
			continue
		}
		require.Zero(t, code, "%s: %s", c.name, stderr)
		text, err := os.ReadFile(test)
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(text), "package "+c.pkg+"\n"), c.name)
	}
	code, _, stderr := play("-gotest", filepath.Join(t.TempDir(), "nowhere", "incident_test.go"), journal)
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "nowhere")
}
