package provisioning_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/trace"
	"github.com/swactor/provisioning/internal/verify"
)

// rtCells are the cells of trace.Cell that an operation can end in.
func rtCells() (possible []trace.Cell) {
	for _, c := range rtAllCells() {
		if rtWhyNot(c) == "" {
			possible = append(possible, c)
		}
	}
	return possible
}

func rtAllCells() (all []trace.Cell) {
	for operation := provisioning.CreateLease; operation <= provisioning.DestroyLease; operation++ {
		for result := range trace.Results {
			for stage := provisioning.StageNew; stage <= provisioning.StageDestroyed; stage++ {
				for _, intent := range []provisioning.Intent{provisioning.Active, provisioning.Deleting} {
					all = append(all, trace.Cell{Operation: operation, Result: result, Stage: stage, Intent: intent})
				}
			}
		}
	}
	return all
}

// rtImpossible says why an operation cannot end at a place, whatever its result.
// The first row that fits is the reason. An attempt that fails, and one that is
// given up, keeps the operation that is under way, so most rows name where an
// operation can begin and how far the node can come before it ends.
var rtImpossible = []struct {
	operations []provisioning.OperationKind // nil: any
	except     []provisioning.Stage         // possible at these
	intents    []provisioning.Intent        // nil: any
	why        string
}{
	{except: []provisioning.Stage{provisioning.StageLeaseRequested, provisioning.StageLeaseCreated, provisioning.StageEndpointKnown,
		provisioning.StageBootstrapRunning, provisioning.StageSwactorJoined, provisioning.StageDormant, provisioning.StageFailed},
		why: "nothing is dispatched in New, the dispatch of the create leaves it; HandedOff is reserved; nothing is pending in Destroyed (S4)"},
	{operations: []provisioning.OperationKind{provisioning.CancelBootstrap, provisioning.DestroyLease}, intents: []provisioning.Intent{provisioning.Active},
		why: "only what is being given up is cancelled and destroyed (R7, R8)"},
	{operations: []provisioning.OperationKind{provisioning.CreateLease},
		except: []provisioning.Stage{provisioning.StageLeaseRequested, provisioning.StageFailed},
		why:    "a create is dispatched without a lease on record (R6, R12), and the node leaves LeaseRequested with one"},
	{operations: []provisioning.OperationKind{provisioning.LookupEndpoint},
		except: []provisioning.Stage{provisioning.StageLeaseCreated, provisioning.StageFailed},
		why:    "a look-up is dispatched with a lease and without an endpoint (R13): in LeaseCreated, which only its answer ends"},
	{operations: []provisioning.OperationKind{provisioning.StartBootstrap},
		except: []provisioning.Stage{provisioning.StageEndpointKnown, provisioning.StageFailed},
		why:    "a start is dispatched in EndpointKnown (R16) or to learn what came of one (R6), and only its answer ends that stage"},
	{operations: []provisioning.OperationKind{provisioning.BootstrapConvergenceObserved},
		except: []provisioning.Stage{provisioning.StageSwactorJoined, provisioning.StageDormant, provisioning.StageFailed},
		why:    "the bootstrap is told in SwactorJoined (R14); a hand-off may overtake that"},
	{operations: []provisioning.OperationKind{provisioning.CancelBootstrap},
		except: []provisioning.Stage{provisioning.StageEndpointKnown, provisioning.StageBootstrapRunning, provisioning.StageSwactorJoined, provisioning.StageFailed},
		why:    "there is a session from the answer of the start, which a node that is given up takes in EndpointKnown, to the hand-off"},
}

// rtWhyNot says why a cell is impossible; empty if it is not.
func rtWhyNot(c trace.Cell) string {
	for _, row := range rtImpossible {
		if (row.operations == nil || slices.Contains(row.operations, c.Operation)) && !slices.Contains(row.except, c.Stage) &&
			(row.intents == nil || slices.Contains(row.intents, c.Intent)) {
			return row.why
		}
	}
	return ""
}

// TestEveryPossibleCellIsReached: an Aim step hits each cell that is possible, in
// a world that is well, and none that is not.
func TestEveryPossibleCellIsReached(t *testing.T) {
	hits := make(map[trace.Cell]int)
	for _, c := range rtCells() {
		for way := range 2 {
			w, err := trace.Play(trace.Trace{
				Config: trace.Config{Retry: provisioning.RetryPolicy{OperationTimeout: 30 * time.Second, CancelLimit: -1}, ManualBootstrap: true},
				First:  []trace.Group{{ID: "w", Count: 1, Image: "a"}},
				Steps:  []trace.Step{{Kind: trace.Aim, Cell: c, N: way}},
			}, nil)
			require.NoError(t, err)
			require.Positive(t, w.Cells()[c], "%v, in way %d, hit were %v", c, way, w.Cells())
			for hit, n := range w.Cells() {
				hits[hit] += n
			}
			require.NoError(t, w.Close())
		}
	}
	for _, c := range rtAllCells() {
		require.True(t, rtWhyNot(c) == "" || hits[c] == 0, "%v was hit, which is impossible: %s", c, rtWhyNot(c))
	}
}

// TestEveryFoldIsLookedAt: of what one pass folds, each fold by itself is, and
// what is wrong in between is found.
func TestEveryFoldIsLookedAt(t *testing.T) {
	for _, c := range []struct {
		spoilt int // which of the folds shows a state that cannot be; 0: none
		want   int // folds that are looked at
	}{{0, 3}, {1, 1}, {2, 2}, {3, 3}} {
		looked, spoilt := 0, 0
		each := func(d *provisioning.ClusterDriver, now time.Time, but int, look func(*provisioning.ClusterState) error) error {
			return d.FoldEach(now, but, func(state *provisioning.ClusterState) error {
				if looked++; looked == spoilt {
					state = state.Clone()
					state.NextAttemptID = 0
				}
				return look(state)
			})
		}
		w, err := trace.Play(trace.Trace{
			Config: trace.Config{ManualBootstrap: true, ManualDrive: true, FoldEach: each},
			First:  []trace.Group{{ID: "w", Count: 1, Image: "a"}},
			Steps: []trace.Step{{Kind: trace.Trigger}, {Kind: trace.Drive},
				{Kind: trace.Event, Slot: "w-0", Event: trace.EventWord{Kind: provisioning.BootstrapProgress, Stage: provisioning.BootstrapStageSSHReady}},
				{Kind: trace.Event, Slot: "w-0", Event: trace.EventWord{Kind: provisioning.SwactorJoined}},
				{Kind: trace.Event, Slot: "w-0", Event: trace.EventWord{Kind: provisioning.NodeLost}},
				{Kind: trace.Event, Slot: "w-0", Event: trace.EventWord{Kind: provisioning.NodeLost}}, // nothing new
			},
		}, nil)
		require.NoError(t, err)
		before := w.Folds()
		looked, spoilt = 0, c.spoilt
		err = w.Step(trace.Step{Kind: trace.Pass})
		require.Equal(t, c.spoilt > 0, err != nil, "%+v: %v", c, err)
		require.Equal(t, c.want, w.Folds()-before, "%+v", c)
		require.NoError(t, w.Close())
	}
}

// rtCertain are the cells that no thousand traces miss: each has been seen in
// more than one of thirty. The others are what Aim steps go for.
var rtCertain = map[provisioning.OperationKind]map[trace.Result][]string{
	provisioning.CreateLease: {
		trace.Succeeded:      {"LeaseRequested, Active", "LeaseRequested, Deleting"},
		trace.Definite:       {"LeaseRequested, Active", "LeaseRequested, Deleting"},
		trace.Ambiguous:      {"LeaseRequested, Active", "LeaseRequested, Deleting"},
		trace.NotStarted:     {"LeaseRequested, Active"},
		trace.LeaseLost:      {"LeaseRequested, Active"},
		trace.TimedOut:       {"LeaseRequested, Active", "LeaseRequested, Deleting"},
		trace.TimedOutQueued: {"LeaseRequested, Deleting"},
	},
	provisioning.LookupEndpoint: {trace.Succeeded: {"LeaseCreated, Active"}},
	provisioning.StartBootstrap: {
		trace.Succeeded:  {"EndpointKnown, Active", "EndpointKnown, Deleting"},
		trace.Definite:   {"EndpointKnown, Active"},
		trace.Ambiguous:  {"EndpointKnown, Active"},
		trace.NotStarted: {"EndpointKnown, Active"},
		trace.TimedOut:   {"EndpointKnown, Active"},
	},
	provisioning.BootstrapConvergenceObserved: {
		trace.Succeeded: {"SwactorJoined, Active"},
		trace.Definite:  {"SwactorJoined, Active"},
		trace.Ambiguous: {"SwactorJoined, Active"},
	},
	provisioning.CancelBootstrap: {
		trace.Succeeded: {"EndpointKnown, Deleting", "BootstrapRunning, Deleting", "SwactorJoined, Deleting", "Failed, Deleting"},
		trace.Ambiguous: {"BootstrapRunning, Deleting"},
	},
	provisioning.DestroyLease: {
		trace.Succeeded: {"LeaseRequested, Deleting", "LeaseCreated, Deleting", "EndpointKnown, Deleting", "BootstrapRunning, Deleting",
			"SwactorJoined, Deleting", "Dormant, Deleting", "Failed, Deleting"},
		trace.Ambiguous: {"LeaseRequested, Deleting", "EndpointKnown, Deleting", "BootstrapRunning, Deleting", "Dormant, Deleting", "Failed, Deleting"},
		trace.TimedOut:  {"BootstrapRunning, Deleting", "Dormant, Deleting", "Failed, Deleting"},
	},
}

func rtIsCertain(c trace.Cell) bool {
	return slices.Contains(rtCertain[c.Operation][c.Result], fmt.Sprintf("%v, %v", c.Stage, c.Intent))
}

// rtSeen is what the traces of a run went through.
type rtSeen struct {
	traces, steps, longest int
	alone                  int // traces whose observations were folded outside of passes too
	folds                  int // that were looked at, each by itself
	harmless               int // traces compared with themselves without trouble
	kinds                  map[trace.Kind]int
	words                  map[string]int // of events and outcomes
	cells                  map[trace.Cell]int
	bought                 int
}

func rtNewSeen() rtSeen {
	return rtSeen{kinds: make(map[trace.Kind]int), words: make(map[string]int), cells: make(map[trace.Cell]int)}
}

func (s *rtSeen) add(tr trace.Trace, w *trace.World) {
	s.traces++
	s.folds += w.Folds()
	s.steps += len(tr.Steps)
	s.longest = max(s.longest, len(tr.Steps))
	if tr.Config.FoldOnly != nil {
		s.alone++
	}
	for _, step := range tr.Steps {
		s.kinds[step.Kind]++
		switch step.Kind {
		case trace.Script, trace.Release:
			word, _, _ := strings.Cut(step.Outcome.String(), "=")
			s.words[word]++
		case trace.Event:
			s.words["event "+step.Event.String()]++
		}
	}
	for c, n := range w.Cells() {
		s.cells[c] += n
	}
	for _, slot := range trace.Slots {
		for _, e := range w.Effects(slot) {
			s.bought += e.Bought
		}
	}
}

// report holds the run to what it has to have gone through.
func (s *rtSeen) report(t *testing.T) {
	traces, least, wanted := verify.Target(20_000, 1000), verify.Target(100, 1), rtIsCertain
	if verify.Full() {
		wanted = func(trace.Cell) bool { return true }
	} else if s.traces < traces { // as many as there were asked for
		traces, wanted = 0, func(trace.Cell) bool { return false }
	}
	s.reportCells(t, least, wanted)
	if traces == 0 {
		return
	}
	verify.AtLeast(t, "random traces, each to its end in two fair ways", s.traces, traces)
	verify.Note(t, "events in them", s.steps)
	verify.Exactly(t, "events of the longest", s.longest, trace.MaxSteps)
	verify.AtLeast(t, "single folds that were looked at", s.folds, verify.Target(1_000_000, 50_000))
	verify.AtLeast(t, "traces that fold outside of passes too", s.alone, verify.Target(5000, 250))
	verify.AtLeast(t, "traces compared with themselves without trouble", s.harmless, verify.Target(2000, 100))
	verify.Note(t, "machines bought, and given back", s.bought)
	verify.Exactly(t, "kinds of steps", len(s.kinds), trace.Kinds)
	verify.Exactly(t, "kinds of events and outcomes", len(s.words), rtWords)
}

// rtWords are 22 outcomes of the fake, 15 stages that a bootstrap reports, and
// the events joined (two ways), closed, failed and lost.
const rtWords = 22 + 15 + 5

// reportCells wants so many hits of each possible cell that is wanted, and none
// of the others.
func (s *rtSeen) reportCells(t *testing.T, least int, wanted func(trace.Cell) bool) {
	possible, reached, fewest := 0, 0, trace.Cell{}
	for _, c := range rtAllCells() {
		why, hits := rtWhyNot(c), s.cells[c]
		if why != "" {
			if hits > 0 {
				t.Errorf("%v was hit, which is impossible: %s", c, why)
			}
			continue
		}
		t.Logf("%8d  %v", hits, c)
		if !wanted(c) {
			continue
		}
		possible++
		if hits >= least {
			reached++
		} else {
			t.Logf("          is too few")
		}
		if fewest.Operation == provisioning.NoOperation || hits < s.cells[fewest] {
			fewest = c
		}
	}
	if possible == 0 {
		return
	}
	verify.Exactly(t, fmt.Sprintf("possible cells of operation, result, stage and intent with %d hits", least), reached, possible)
	verify.Note(t, "cells that are impossible, none of them hit", len(rtAllCells())-len(rtCells()))
	verify.AtLeast(t, "hits of the rarest, "+fewest.String(), s.cells[fewest], least)
}

// TestProp_RandomTraces: whatever happens, everything that the world knows to
// ask is true after every fold of what was delivered and after every pass; and once the trouble stops
// the cluster becomes what was wished for last and stays it, whether each report
// then comes once or again and again.
//
// Each trace draws first which kinds of trouble it knows at all. One in five
// draws harmless ones only, which hold attempts up and end none: then the
// provider does the same for each attempt of each slot as without any.
//
// The traces are plain data and not the actions of a rapid.T.Repeat, since each
// is played several times: to its two ends and without its trouble. They shrink
// as well, for rapid sees the same slices of steps.
func TestProp_RandomTraces(t *testing.T) {
	checks := 1000
	if provisioning.RaceDetector || strconv.IntSize == 32 {
		checks = 50
	}
	verify.Checks(t, checks)
	seen := rtNewSeen()
	var aims []trace.Cell
	for _, c := range rtCells() {
		if !rtIsCertain(c) {
			aims = append(aims, c)
			if c.Result == trace.LeaseLost { // which some worlds never answer
				aims = append(aims, c)
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		rtPlay(t, trace.Options{Chapters: -1, Aims: aims}, &seen)
	})
	seen.report(t)
}

// TestProp_RandomStories is the same for short traces: a failure of one of them
// shrinks quickly. Planted bugs are hunted with it.
func TestProp_RandomStories(t *testing.T) {
	seen := rtNewSeen()
	rapid.Check(t, func(t *rapid.T) {
		rtPlay(t, trace.Options{}, &seen)
	})
	seen.reportCells(t, 1, func(trace.Cell) bool { return false })
}

// rtPlay draws a trace and plays it to its two ends, and without its trouble if
// that is harmless.
func rtPlay(t *rapid.T, o trace.Options, seen *rtSeen) {
	o.FoldOnly, o.FoldEach = (*provisioning.ClusterDriver).FoldOnly, (*provisioning.ClusterDriver).FoldEach
	o.Harmless = rapid.IntRange(0, 4).Draw(t, "harmless") == 4
	tr := trace.Draw(t, o)
	once := ptPlay(t, tr, nil, (*trace.World).Tail)
	again := ptPlay(t, tr, nil, (*trace.World).TailAgain)
	seen.add(tr, once)
	if !o.Harmless {
		return
	}
	seen.harmless++
	quiet := ptPlay(t, tr.Quiet(), nil, (*trace.World).Tail)
	for _, slot := range trace.Slots {
		for _, w := range []*trace.World{once, again} {
			if want, got := quiet.Effects(slot), w.Effects(slot); !slices.Equal(want, got) {
				t.Fatalf("the provider did %+v for the attempts of %s, and without the trouble %+v\n%s", got, slot, want, w.Story(tr))
			}
		}
	}
}
