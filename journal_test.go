package provisioning_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/trace"
)

// jnRecord plays a trace and returns its journal.
func jnRecord(t *rapid.T, tr trace.Trace) (*trace.World, []byte) {
	var journal bytes.Buffer
	tr.Config.Journal = &journal
	w := ptPlay(t, tr, nil, func(w *trace.World) error { return w.Driver.JournalErr() })
	return w, journal.Bytes()
}

func jnLines(journal []byte) []string {
	lines := strings.SplitAfter(string(journal), "\n")
	return lines[:len(lines)-1]
}

// jnBare returns a line without its checksum.
func jnBare(line string) string { return line[:strings.LastIndex(line, `,"crc":`)] + "}" }

// jnSeal gives lines the checksums that belong to them.
func jnSeal(bare []string) []byte {
	var journal []byte
	sum := uint32(0)
	for _, line := range bare {
		sum = crc32.Update(sum, crc32.MakeTable(crc32.Castagnoli), []byte(line))
		journal = fmt.Appendf(journal, "%s,\"crc\":\"%08x\"}\n", line[:len(line)-1], sum)
	}
	return journal
}

// The journal of any trace, with clocks that are set back, broken passes,
// refused updates and answers that nobody waits for, is repeated to the byte
// and ends in the same state.
func TestProp_AJournalIsRepeated(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w, journal := jnRecord(t, trace.Draw(t, trace.Options{}))
		report, err := provisioning.Replay(bytes.NewReader(journal))
		if err != nil || report.Difference != nil {
			t.Fatalf("%v\n%v", err, report.Difference)
		}
		if lines := bytes.Count(journal, []byte("\n")); report.Lines != lines {
			t.Fatalf("%d of %d lines", report.Lines, lines)
		}
		if a, b := w.State(), ptJSON(report.Driver.Snapshot()); a != b {
			t.Fatalf("recorded %s\nrepeated %s", a, b)
		}
		if a, b := w.Driver.Stats().Passes, uint64(report.Passes); a < b || a > b+1 { // a fold that takes no action is no pass
			t.Fatalf("%d passes were recorded and %d repeated", a, b)
		}
	})
}

// One changed byte is found in the line in which it is, and what comes before
// has been repeated.
func TestProp_AMutatedLineIsFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		_, journal := jnRecord(t, trace.Draw(t, trace.Options{}))
		at := rapid.IntRange(0, len(journal)-1).Draw(t, "byte")
		mutant := bytes.Clone(journal)
		mutant[at] ^= byte(rapid.IntRange(1, 255).Draw(t, "change"))
		line := 1 + bytes.Count(journal[:at], []byte("\n"))

		report, err := provisioning.Replay(bytes.NewReader(mutant))
		var bad *provisioning.JournalError
		if !errors.As(err, &bad) || bad.Line != line || report.Difference != nil || report.Lines >= line {
			t.Fatalf("byte %d in line %d: %v, %d lines, %v", at, line, err, report.Lines, report.Difference)
		}
	})
}

// A journal whose end is missing is good up to there, wherever it ends.
func TestProp_ATruncatedJournalIsGoodUpToItsEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		_, journal := jnRecord(t, trace.Draw(t, trace.Options{Chapters: 1}))
		lines := jnLines(journal)
		cut, outside, passes := rapid.IntRange(0, len(lines)).Draw(t, "lines"), false, 0
		text := strings.Join(lines[:cut], "")
		for _, line := range lines[:cut] {
			outside = strings.HasPrefix(line, `{"end":`) || strings.HasPrefix(line, `{"journal":`) ||
				outside && !strings.HasPrefix(line, `{"deliver":`) && !strings.HasPrefix(line, `{"pass":`)
			if strings.HasPrefix(line, `{"end":`) {
				passes++
			}
		}
		report, err := provisioning.Replay(strings.NewReader(text))
		if report.Difference != nil || report.Passes != passes {
			t.Fatalf("%d of %d lines with %d passes: %d, %v", cut, len(lines), passes, report.Passes, report.Difference)
		}
		var bad *provisioning.JournalError
		if outside {
			if err != nil || report.Lines != cut {
				t.Fatalf("%d of %d lines: %v after %d", cut, len(lines), err, report.Lines)
			}
		} else if !errors.As(err, &bad) || !errors.Is(err, provisioning.ErrJournalTruncated) || bad.Line != cut+1 {
			t.Fatalf("%d of %d lines: %v", cut, len(lines), err)
		}
		if cut < len(lines) { // within the next line
			_, err = provisioning.Replay(strings.NewReader(text + lines[cut][:len(lines[cut])/2]))
			if !errors.As(err, &bad) || !errors.Is(err, provisioning.ErrJournalTruncated) || bad.Line != cut+1 {
				t.Fatalf("in the midst of line %d: %v", cut+1, err)
			}
		}
	})
}

// jnLife returns the journal of a small cluster that converges.
func jnLife(t *testing.T) []byte {
	var journal bytes.Buffer
	w, err := trace.New(trace.Trace{Config: trace.Config{Journal: &journal, JoinAfter: 10 * time.Second}, First: []trace.Group{{ID: "w", Count: 2, Image: "a"}}})
	require.NoError(t, err)
	require.NoError(t, w.Through(time.Minute))
	require.True(t, w.Driver.Converged(1))
	require.NoError(t, w.Close())
	return journal.Bytes()
}

// Another version of the library may decide otherwise: the replay names the
// line and shows both.
func TestReplayShowsTheFirstDifference(t *testing.T) {
	for _, c := range []struct{ kind, old, new string }{
		{`{"do":`, "R0 insert", "R0 add"},
		{`{"submit":`, `"kind":"CreateLease"`, `"kind":"DestroyLease"`},
		{`{"submit":`, `"attempt":1`, `"attempt":9`},
		{`{"end":`, `"state":"`, `"state":"0`},
		{`{"end":`, `"ready":0`, `"ready":1`},
	} {
		var bare []string
		line := 0
		for i, sealed := range jnLines(jnLife(t)) {
			text := jnBare(sealed)
			if line == 0 && strings.HasPrefix(text, c.kind) && strings.Contains(text, c.old) {
				line, text = i+1, strings.Replace(text, c.old, c.new, 1)
			}
			bare = append(bare, text)
		}
		require.NotZero(t, line, "%v", c)
		report, err := provisioning.Replay(bytes.NewReader(jnSeal(bare)))
		require.NoError(t, err)
		require.NotNil(t, report.Difference, "%v", c)
		require.Equal(t, line, report.Difference.Line)
		require.Equal(t, line-1, report.Lines)
		require.Equal(t, bare[line-1], report.Difference.Expected)
		require.NotEqual(t, bare[line-1], report.Difference.Found)
	}
}

// An answer that is another one leads to another state.
func TestReplayFindsAnotherAnswer(t *testing.T) {
	journal := jnLife(t)
	var bare []string
	for _, line := range jnLines(journal) {
		bare = append(bare, jnBare(line))
	}
	i := 0
	for !strings.HasPrefix(bare[i], `{"deliver":`) || !strings.Contains(bare[i], `"lease":"`) {
		i++
	}
	bare[i] = strings.Replace(bare[i], `"lease":"`, `"lease":"other-`, 1)
	report, err := provisioning.Replay(bytes.NewReader(jnSeal(bare)))
	require.NoError(t, err)
	require.Greater(t, report.Difference.Line, i+1, "the answer itself is what it is")
	require.Contains(t, report.Difference.Expected, `"state":`)
}

func TestReplayRefuses(t *testing.T) {
	bare := func(lines ...string) io.Reader { return bytes.NewReader(jnSeal(lines)) }
	head := jnBare(jnLines(jnLife(t))[0])
	for name, c := range map[string]struct {
		journal io.Reader
		err     error
		line    int
	}{
		"nothing":            {bare(), provisioning.ErrJournalTruncated, 1},
		"no journal":         {strings.NewReader("hello\n"), provisioning.ErrJournalCorrupt, 1},
		"no head":            {bare(`{"due":{"at":"2026-01-01T00:00:00Z"}}`), provisioning.ErrJournalCorrupt, 1},
		"another schema":     {bare(strings.Replace(head, `"schema":1`, `"schema":2`, 1)), provisioning.ErrJournalSchema, 1},
		"no lawful shape":    {bare(strings.Replace(head, `"generation":1`, `"generation":0`, 1)), provisioning.ErrJournalCorrupt, 1},
		"no lawful config":   {bare(strings.Replace(head, `"maxInFlight":0`, `"maxInFlight":-1`, 1)), provisioning.ErrJournalCorrupt, 1},
		"an unknown line":    {bare(head, `{"what":1}`), provisioning.ErrJournalCorrupt, 2},
		"an answer to none":  {bare(head, `{"retire":{"attempt":1}}`), provisioning.ErrJournalCorrupt, 2},
		"a shape that isn't": {bare(head, `{"update":{"shape":[]}}`), provisioning.ErrJournalCorrupt, 2},
		"a clock that isn't": {bare(head, `{"pass":{"at":"1800-01-01T00:00:00Z"}}`), provisioning.ErrJournalCorrupt, 2},
		"a reader's error":   {io.MultiReader(bare(head), jnBroken{}), errJnBroken, 2},
	} {
		report, err := provisioning.Replay(c.journal)
		require.ErrorIs(t, err, c.err, name)
		var bad *provisioning.JournalError
		require.ErrorAs(t, err, &bad, name)
		require.Equal(t, c.line, bad.Line, name)
		require.Contains(t, err.Error(), fmt.Sprintf("line %d", c.line), name)
		require.Nil(t, report.Difference, name)
	}
}

var errJnBroken = errors.New("broken")

// jnBroken can neither be read nor written.
type jnBroken struct{}

func (jnBroken) Read([]byte) (int, error)  { return 0, errJnBroken }
func (jnBroken) Write([]byte) (int, error) { return 0, errJnBroken }

// What has no form in JSON comes through nevertheless: bytes that are no text,
// numbers without a name, a number that is none.
func TestJournalKeepsWhatJSONCannot(t *testing.T) {
	var journal bytes.Buffer
	shape := trace.Shape(1, trace.Group{ID: "w", Count: 1, Image: "a\xff"})
	shape.Groups[0].Boot.Env = map[string]string{"\xfe": "\x00b64:", "b": "�"}
	d, err := provisioning.NewClusterDriver(shape, provisioning.Config{Journal: &journal})
	require.NoError(t, err)
	x := &jnExecutor{}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	drive := func() {
		_, err := d.DriveUntilBlocked(now, x)
		require.NoError(t, err)
	}
	drive()
	create := x.effects[0]
	d.Deliver(provisioning.Observation{Kind: 200, Node: "w-0", Attempt: 1, Stage: 77})
	d.Deliver(provisioning.Observation{Kind: provisioning.OperationCompleted, Node: "w-0", Attempt: 1, Completion: provisioning.Completion{
		Operation: create.Operation, Kind: create.Kind, Class: 99, Message: "\xc3\x28 <&>"}})
	nan := math.NaN()
	shape.Generation, shape.Groups[0].Shape.MinUpMbps = 2, &nan
	require.ErrorIs(t, d.UpdateDesired(shape), provisioning.ErrInvalidShape)
	drive()
	x.refuse = provisioning.RetryAfter(errors.New("not \xff now"), 7*time.Second)
	now = now.Add(time.Minute)
	drive()
	x.refuse = nil
	now = now.Add(time.Minute)
	drive()
	d.Deliver(provisioning.Observation{Kind: provisioning.OperationCompleted, Node: "w-0", Attempt: 1, Completion: provisioning.Completion{
		Operation: x.last().Operation, Kind: provisioning.CreateLease, Lease: "i-\xff"}})
	drive()
	now = now.Add(provisioning.DefaultOperationTimeout)
	x.expire = provisioning.Completion{Class: 99, Message: "\xff"}
	drive()

	require.NoError(t, d.JournalErr())
	report, err := provisioning.Replay(&journal)
	require.NoError(t, err)
	require.Nil(t, report.Difference, "%v", report.Difference)
	want, ok := d.Node("w-0")
	require.True(t, ok)
	got, ok := report.Driver.Node("w-0")
	require.True(t, ok)
	require.Equal(t, want, got)
	require.EqualValues(t, "i-\xff", got.Record.Lease)
}

// jnExecutor keeps the effects, and answers as it is told.
type jnExecutor struct {
	effects []provisioning.Effect
	refuse  error
	expire  provisioning.Completion
	during  func()
}

func (x *jnExecutor) last() provisioning.Effect { return x.effects[len(x.effects)-1] }

func (x *jnExecutor) Submit(e provisioning.Effect) (bool, error) {
	if x.during != nil {
		x.during()
	}
	x.effects = append(x.effects, e)
	return false, x.refuse
}

func (x *jnExecutor) Expire(id provisioning.OperationID) provisioning.Completion {
	c := x.expire
	c.Operation = id
	return c
}

func (x *jnExecutor) Retire(provisioning.NodeAttemptID)   {}
func (x *jnExecutor) Running() []provisioning.RunningCall { return nil }

// An executor that ends the pass's goroutine is repeated as well.
func TestJournalOfABrokenPass(t *testing.T) {
	var journal bytes.Buffer
	d, err := provisioning.NewClusterDriver(trace.Shape(1, trace.Group{ID: "w", Count: 3, Image: "a"}), provisioning.Config{Journal: &journal})
	require.NoError(t, err)
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	x := &jnExecutor{}
	_, err = d.DriveNext(now, x)
	require.NoError(t, err)
	x.during = func() {
		if len(x.effects) == 1 {
			runtime.Goexit()
		}
	}
	var ended sync.WaitGroup
	ended.Go(func() { _, _ = d.DriveNext(now, x) }) // it does not return
	ended.Wait()
	x.during = nil
	_, err = d.DriveUntilBlocked(now.Add(time.Hour), x)
	require.NoError(t, err)
	require.Contains(t, journal.String(), `"broke":true`)
	require.Contains(t, journal.String(), `"incomplete":true`)
	report, err := provisioning.Replay(&journal)
	require.NoError(t, err)
	require.Nil(t, report.Difference, "%v", report.Difference)
	require.Equal(t, ptJSON(d.Snapshot()), ptJSON(report.Driver.Snapshot()))
}

// What is refused while no pass has anything to do is written down all the same
// and does not pile up; of questions whether a pass is due the last is enough.
func TestJournalOfAnIdleDriver(t *testing.T) {
	var journal bytes.Buffer
	d, err := provisioning.NewClusterDriver(trace.Shape(2), provisioning.Config{Journal: &journal})
	require.NoError(t, err)
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	_, err = d.DriveUntilBlocked(now, &jnExecutor{})
	require.NoError(t, err)
	before := journal.Len()
	require.ErrorIs(t, d.UpdateDesired(trace.Shape(1)), provisioning.ErrGenerationRegressed)
	require.False(t, d.TriggerIfDue(now.Add(time.Second)))
	require.False(t, d.TriggerIfDue(now.Add(2*time.Second)))
	require.Equal(t, before, journal.Len(), "not under a lock")
	ran, err := d.DriveNext(now.Add(3*time.Second), &jnExecutor{})
	require.NoError(t, err)
	require.False(t, ran)
	added := journal.String()[before:]
	require.Equal(t, 1, strings.Count(added, `{"update":`))
	require.Equal(t, 1, strings.Count(added, `{"due":`))
	require.Contains(t, added, "00:00:02Z")
	report, err := provisioning.Replay(&journal)
	require.NoError(t, err)
	require.Nil(t, report.Difference, "%v", report.Difference)
}

// A replay has no backend that could judge a shape: it takes what was found.
func TestJournalKeepsTheFaultsOfTheValidator(t *testing.T) {
	var journal bytes.Buffer
	d, err := provisioning.NewClusterDriver(trace.Shape(1), provisioning.Config{Journal: &journal,
		ValidateGroup: func(group provisioning.NodeGroupSpec) []provisioning.ShapeFault {
			return []provisioning.ShapeFault{{Field: "provider", Problem: "unknown"}}
		}})
	require.NoError(t, err)
	require.ErrorIs(t, d.UpdateDesired(trace.Shape(2, trace.Group{ID: "w", Count: 1, Image: "a"})), provisioning.ErrInvalidShape)
	_, err = d.DriveUntilBlocked(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), &jnExecutor{})
	require.NoError(t, err)
	require.Contains(t, journal.String(), "unknown")
	report, err := provisioning.Replay(&journal)
	require.NoError(t, err)
	require.Nil(t, report.Difference, "%v", report.Difference)
	require.EqualValues(t, 1, report.Driver.Generation())
}

// jnFull has room for so many writes.
type jnFull struct {
	room   int
	then   func() (int, error)
	writes int
}

func (w *jnFull) Write(p []byte) (int, error) {
	if w.writes++; w.writes <= w.room {
		return len(p), nil
	}
	return w.then()
}

// A journal that cannot be written stops nothing, is written to no more, and
// says so.
func TestJournalErr(t *testing.T) {
	for name, c := range map[string]struct {
		then func() (int, error)
		is   error
		text string
	}{
		"error": {func() (int, error) { return 0, errJnBroken }, errJnBroken, "provisioning: writing the journal: broken"},
		"short": {func() (int, error) { return 1, nil }, io.ErrShortWrite, "provisioning: writing the journal: short write"},
		"panic": {func() (int, error) { panic("no disk") }, nil, "provisioning: the journal's writer panicked: no disk"},
	} {
		for room := range 4 {
			w := &jnFull{room: room, then: c.then}
			d, err := provisioning.NewClusterDriver(trace.Shape(1, trace.Group{ID: "w", Count: 1, Image: "a"}), provisioning.Config{Journal: w})
			require.NoError(t, err, name)
			x := &jnExecutor{}
			_, err = d.DriveUntilBlocked(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), x)
			require.NoError(t, err, name)
			require.Len(t, x.effects, 1, name)
			require.EqualError(t, d.JournalErr(), c.text)
			if c.is != nil {
				require.ErrorIs(t, d.JournalErr(), c.is)
			}
			require.Equal(t, room+1, w.writes, name)
		}
	}
	d, err := provisioning.NewClusterDriver(trace.Shape(1), provisioning.Config{})
	require.NoError(t, err)
	require.NoError(t, d.JournalErr(), "none is kept")
}

// A host that is drained and closed, with wishes, refusals, questions and
// snapshots from other goroutines: the order in the journal is the one in which
// the passes took it all.
func TestJournalOfABusyHost(t *testing.T) {
	var journal bytes.Buffer
	backend := fakebackend.New(fakebackend.Config{})
	work := backend.NewWork()
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape: trace.Shape(1, trace.Group{ID: "w", Count: 3, Image: "a"}), Backend: backend, Journal: &journal,
		Clock: work.Clock(nil), Go: work.Go, MaxInFlight: 2,
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var others, running sync.WaitGroup
	running.Go(func() { _ = host.Run(ctx) }) // what is held at its end is drained below
	for g := range 4 {
		others.Go(func() {
			for i := range 100 {
				switch g {
				case 0:
					count := i % 5
					if err := host.UpdateDesired(trace.Shape(uint64(i+2), trace.Group{ID: "w", Count: count, Image: "a"})); err != nil {
						t.Error(err)
					}
				case 1:
					if err := host.UpdateDesired(trace.Shape(1, trace.Group{ID: "v", Count: i, Image: "b"})); err == nil {
						t.Error("it goes back to the first generation, with other content")
					}
				case 2:
					host.Driver().TriggerIfDue(backend.Now())
					host.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: "w-0", Attempt: provisioning.NodeAttemptID(i), Reason: "test"})
				case 3:
					host.Driver().Snapshot()
					host.Driver().JournalErr()
				}
			}
		})
	}
	others.Wait()
	stop()
	running.Wait()
	require.NoError(t, host.Drain(t.Context()))
	require.ErrorIs(t, host.UpdateDesired(trace.Shape(math.MaxUint64)), provisioning.ErrDraining)
	held, err := host.Close(t.Context())
	require.NoError(t, err)
	require.Empty(t, held)
	require.NoError(t, host.Driver().JournalErr())

	report, err := provisioning.Replay(bytes.NewReader(journal.Bytes()))
	require.NoError(t, err)
	require.Nil(t, report.Difference, "%v", report.Difference)
	require.Equal(t, bytes.Count(journal.Bytes(), []byte("\n")), report.Lines)
	require.Equal(t, ptJSON(host.Driver().Snapshot()), ptJSON(report.Driver.Snapshot()))
	require.Contains(t, journal.String(), `"drain":true`)
}

// A moment of an incident can be looked at and explained.
func TestReplayUntil(t *testing.T) {
	journal := jnLife(t)
	whole, err := provisioning.Replay(bytes.NewReader(journal))
	require.NoError(t, err)
	require.True(t, whole.Driver.Converged(1))

	var last time.Time
	part, err := provisioning.ReplayWith(bytes.NewReader(journal), provisioning.ReplayOptions{
		Until: whole.First, OnEvent: func(e provisioning.Event) { last = e.At },
	})
	require.NoError(t, err)
	require.Nil(t, part.Difference)
	require.Equal(t, whole.First, part.Last)
	require.Equal(t, whole.First, last)
	require.Less(t, part.Passes, whole.Passes)
	e, ok := part.Driver.Explain("w-0", whole.First)
	require.True(t, ok)
	require.Equal(t, "await-bootstrap", e.Decision.Rule.Name)
	e, ok = whole.Driver.Explain("w-0", whole.Last)
	require.True(t, ok)
	require.Equal(t, "steady", e.Decision.Rule.Name)
}

// A moment is told without what was wished for after it, also where no pass lies
// between.
func TestReplayUntilAnUpdate(t *testing.T) {
	var journal bytes.Buffer
	backend := fakebackend.New(fakebackend.Config{JoinAfter: 90 * time.Second})
	work := backend.NewWork()
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape: trace.Shape(1, trace.Group{ID: "w", Count: 3, Image: "a"}), Backend: backend, Journal: &journal,
		Clock: work.Clock(nil), Go: work.Go, Tick: 24 * time.Hour,
	})
	require.NoError(t, err)
	start := backend.Now()
	ctx, stop := context.WithCancel(t.Context())
	live := make(map[time.Duration]string)
	moments := []time.Duration{30 * time.Minute, time.Hour - 1, time.Hour + time.Minute, 90 * time.Minute, 150 * time.Minute}
	for _, after := range moments {
		backend.At(start.Add(after), func() { live[after] = host.Driver().ExplainCluster(backend.Now()).String() })
	}
	backend.At(start.Add(time.Hour), func() {
		require.NoError(t, host.UpdateDesired(trace.Shape(2, trace.Group{ID: "w", Count: 3, Image: "b"})))
	})
	backend.At(start.Add(2*time.Hour), func() {
		host.Pause()
		require.NoError(t, host.UpdateDesired(trace.Shape(3, trace.Group{ID: "w", Count: 4, Image: "b"})))
	})
	backend.At(start.Add(3*time.Hour), stop)
	require.Error(t, host.Run(ctx), "machines are held")
	require.Contains(t, live[30*time.Minute], "generation 1: 3 of 3 ready")
	require.Contains(t, live[150*time.Minute], "generation 3: 3 of 4 ready; growth is paused")

	for _, after := range moments {
		now := start.Add(after)
		report, err := provisioning.ReplayWith(bytes.NewReader(journal.Bytes()), provisioning.ReplayOptions{Until: now})
		require.NoError(t, err)
		require.Equal(t, live[after], report.Driver.ExplainCluster(now).String(), after)
	}
}

// A driver of one's own tells when an update came by asking whether a pass is due
// first; one that does not is repeated all the same, and dated as it was then.
func TestJournalOfUndatedUpdates(t *testing.T) {
	var journal bytes.Buffer
	var live, again []string
	tell := func(to *[]string) func(provisioning.Event) {
		return func(e provisioning.Event) {
			if e.Kind != provisioning.EventPass {
				*to = append(*to, e.At.Format(time.TimeOnly)+" "+e.String())
			}
		}
	}
	d, err := provisioning.NewClusterDriver(trace.Shape(1), provisioning.Config{Journal: &journal, OnEvent: tell(&live)})
	require.NoError(t, err)
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	pass := func() {
		_, err := d.DriveUntilBlocked(now, &jnExecutor{})
		require.NoError(t, err)
	}
	pass()
	now = now.Add(time.Hour)
	require.NoError(t, d.UpdateDesired(trace.Shape(2)))
	pass()
	now = now.Add(time.Hour)
	d.TriggerIfDue(now)
	require.NoError(t, d.UpdateDesired(trace.Shape(3)))
	now = now.Add(time.Hour)
	d.Pause() // not dated
	pass()
	require.Equal(t, []string{"00:00:00 UpdateAccepted generation 2", "02:00:00 UpdateAccepted generation 3", "02:00:00 Paused"}, live)
	now = now.Add(time.Hour)
	d.Resume()
	pass()
	require.Equal(t, "03:00:00 Resumed", live[3])

	report, err := provisioning.ReplayWith(&journal, provisioning.ReplayOptions{OnEvent: tell(&again)})
	require.NoError(t, err)
	require.Nil(t, report.Difference, "%v", report.Difference)
	live[3] = "04:00:00 Resumed" // by the pass that finds it, where nothing else is known
	require.Equal(t, live, again)
}

// A run of many nodes is repeated faster than it can have happened.
func BenchmarkReplay(b *testing.B) {
	var journal bytes.Buffer
	d, err := provisioning.NewClusterDriver(trace.Shape(1, trace.Group{ID: "w", Count: 10_000, Image: "a"}), provisioning.Config{Journal: &journal})
	require.NoError(b, err)
	work := fakebackend.New(fakebackend.Config{}).NewWork()
	x, err := provisioning.NewExecutor(ptSteady{}, provisioning.ExecutorConfig{Deliver: d.Deliver, Go: work.Go})
	require.NoError(b, err)
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for !d.Converged(1) {
		_, err := d.DriveUntilBlocked(now, x)
		require.NoError(b, err)
		work.RunAll()
	}
	inputs := 0
	for b.Loop() {
		report, err := provisioning.Replay(bytes.NewReader(journal.Bytes()))
		if err != nil || report.Difference != nil {
			b.Fatal(err, report.Difference)
		}
		inputs += report.Inputs
	}
	b.ReportMetric(float64(inputs)/b.Elapsed().Seconds(), "inputs/s")
}
