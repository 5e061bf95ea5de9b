package provisioning_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
	"github.com/swactor/provisioning/internal/trace"
)

// The properties below share one machine, internal/trace: it draws a trace of
// trouble, plays it, and asks after every pass what must be true at any moment.
// Each property adds what it alone is about.

// ptPlay plays a trace. Whatever is wrong fails the test, and so does what is
// left behind when all is over.
func ptPlay(t *rapid.T, tr trace.Trace, afterDrive func(*trace.World) error, then func(*trace.World) error) *trace.World {
	w, err := trace.Play(tr, afterDrive)
	if err == nil && then != nil {
		if err = then(w); err != nil {
			err = fmt.Errorf("after the last step: %w\n%s", err, w.Story(tr))
		}
	}
	if err != nil {
		_ = w.Close() // the first thing that was wrong is what counts
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatalf("closing: %v\n%s", err, tr)
	}
	return w
}

// G1: the state, the effects and the order of all of it depend on the trace
// alone: played twice, everything that is seen (events with their times,
// submissions, calls) is the same to the byte, and so is the state at the end. A
// hook that panics at every event, as the second time, makes no difference.
func TestProp_G1SameTraceTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{})
		first := ptPlay(t, tr, nil, nil)
		tr.Config.PanickingHook = true
		second := ptPlay(t, tr, nil, nil)
		a, b := first.Log(), second.Log()
		for i := range min(len(a), len(b)) {
			if a[i] != b[i] {
				t.Fatalf("line %d: first %q, then %q\n%s", i, a[i], b[i], first.Story(tr))
			}
		}
		if len(a) != len(b) || first.State() != second.State() {
			t.Fatalf("%d lines and %s, then %d and %s", len(a), first.State(), len(b), second.State())
		}
	})
}

// G1: the order in which independent work ends does not matter, if what ends
// together is folded together. Compared are the whole state, attempt numbers and
// times included, the machines, and of each slot all events, submissions and
// calls with their times. Only how the lines of different slots lie between each
// other may differ.
func TestProp_G1OrderOfIndependentWorkDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{AutoDrive: true, Chapters: 2, Orders: []trace.Order{trace.OldestFirst}})
		want := ptPlay(t, tr, nil, nil)
		for _, order := range []trace.Order{trace.NewestFirst, trace.AnyOrder} {
			tr.Config.Order = order
			got := ptPlay(t, tr, nil, nil)
			for _, slot := range trace.Slots {
				if a, b := want.LogOf(slot), got.LogOf(slot); !slices.Equal(a, b) {
					t.Fatalf("%s, oldest first:\n%s\n%v:\n%s\n%s", slot, strings.Join(a, "\n"), order, strings.Join(b, "\n"), tr)
				}
			}
			if want.State() != got.State() {
				t.Fatalf("oldest first %s\n%v %s\n%s", want.State(), order, got.State(), tr)
			}
			if a, b := fmt.Sprint(want.Fake.Machines()), fmt.Sprint(got.Fake.Machines()); a != b {
				t.Fatalf("oldest first %s\n%v %s\n%s", a, order, b, tr)
			}
		}
	})
}

// G2: what belongs to another attempt changes nothing: all that was ever seen
// of an attempt that is over, every kind of news that could be made up about it
// or about one that is yet to be, results of operations that have ended, and
// reports of sessions that never were, delivered all over again whenever the
// cluster is at rest, leave the state as it is to the byte and cause no call.
func TestProp_G2OldNewsChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{AutoDrive: true, Chapters: 1})
		ptPlay(t, tr, func(w *trace.World) error {
			before, calls, attempts := w.State(), w.CallCount(), w.Driver.Stats().Attempts
			news := ptOldNews(w)
			for _, o := range news {
				w.Driver.Deliver(o)
			}
			folded := w.Driver.Stats().Folded
			if _, err := w.Driver.DriveUntilBlocked(w.Now(), ptNoExecutor{w.Executor}); err != nil {
				return err
			}
			if after := w.State(); after != before || w.CallCount() != calls || w.Driver.Stats().Attempts != attempts || w.Driver.Stats().Folded != folded {
				return fmt.Errorf("%d pieces of old news changed\n%s\nto\n%s", len(news), before, after)
			}
			return nil
		}, nil)
	})
}

// ptNoExecutor is for passes that may not want anything.
type ptNoExecutor struct{ provisioning.EffectExecutor }

func (ptNoExecutor) Submit(e provisioning.Effect) (bool, error) {
	panic(fmt.Sprintf("%v %v was submitted", e.Kind, e.Operation))
}
func (ptNoExecutor) Expire(id provisioning.OperationID) provisioning.Completion {
	panic(fmt.Sprintf("%v was to be expired", id))
}
func (ptNoExecutor) Retire(attempt provisioning.NodeAttemptID) {
	panic(fmt.Sprintf("attempt %d was retired", attempt))
}

func ptOldNews(w *trace.World) []provisioning.Observation {
	var news []provisioning.Observation
	state := w.Driver.Snapshot()
	for _, slot := range trace.Slots {
		node, there := state.Node(slot)
		for _, o := range w.Delivered(slot) {
			ended := o.Kind == provisioning.OperationCompleted && (node.Pending == nil || node.Pending.ID != o.Completion.Operation)
			if !there || o.Attempt != node.Attempt || ended {
				news = append(news, o)
			}
		}
		past := w.Attempts(slot)
		others := append(past[max(0, len(past)-3):], state.NextAttemptID)
		for _, attempt := range others {
			if there && attempt == node.Attempt {
				continue
			}
			key := provisioning.ExternalKey{Run: trace.Run, Node: slot, Attempt: attempt}
			news = append(news, ptNews(slot, attempt, w.Fake.SessionID(key))...)
			if there { // of the live session, and of the pending operation's number
				news = append(news, ptNews(slot, attempt, node.ActiveBootstrap)...)
				o := provisioning.Observation{Kind: provisioning.OperationCompleted, Node: slot, Attempt: attempt}
				if node.Pending != nil {
					o.Completion = provisioning.Completion{Operation: node.Pending.ID, Kind: node.Pending.Kind, Lease: "a", Session: "b"}
				}
				news = append(news, o)
			}
		}
		mayBegin := node.Pending != nil && node.Pending.Kind == provisioning.StartBootstrap || node.Retry.Ambiguous == provisioning.StartBootstrap
		if there && !mayBegin { // while a start is open anything is held for it
			for _, o := range ptNews(slot, node.Attempt, "a/session/that/never/was") {
				if o.Kind != provisioning.NodeLost {
					news = append(news, o)
				}
			}
		}
	}
	return news
}

// ptNews is every kind of news about one attempt.
func ptNews(slot provisioning.LogicalNodeID, attempt provisioning.NodeAttemptID, session provisioning.BootstrapSessionID) []provisioning.Observation {
	news := []provisioning.Observation{
		{Kind: provisioning.SwactorJoined, Swactor: "agent"}, {Kind: provisioning.BootstrapFailed, Reason: "broken"},
		{Kind: provisioning.BootstrapClosed}, {Kind: provisioning.NodeLost, Reason: "gone"},
	}
	for _, stage := range []provisioning.BootstrapStage{provisioning.BootstrapStageSSHReady, provisioning.BootstrapStageConverged,
		provisioning.BootstrapStageClosed, provisioning.BootstrapStageCancelled, provisioning.BootstrapStageStreamError} {
		news = append(news, provisioning.Observation{Kind: provisioning.BootstrapProgress, Stage: stage, StdoutSequence: 1 << 40})
	}
	for i := range news {
		news[i].Node, news[i].Attempt, news[i].Session = slot, attempt, session
	}
	return news
}

// G3: nothing is called that is not on record, and nothing twice. The world
// looks at the driver from within every submission and every call: it is the
// pending operation of the current attempt, its number was dispatched once and
// submitted once, and no other call of that slot runs. It is the order of work
// that could break this, so the answers come at once, within Submit, or when a
// trace that is driven by hand lets them.
func TestProp_G3NothingUnrecorded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{
			Orders: []trace.Order{trace.AtOnce, trace.AnyOrder}, Chapters: 6,
			Faults: []string{"hangs", "slowness", "lost answers", "refused submissions", "panics"},
		})
		ptPlay(t, tr, nil, nil)
	})
}

// G4: between two tries lies exactly what the table says. Creates fail one way
// after another, then look-ups, and once the slot is not wanted any more its
// destroys. The gaps follow the table worked out here by other means: 2^(n-1)
// times InitialDelay, never above MaxDelay, at least the wait that was asked for
// up to MaxRetryAfter, by less than Jitter's part shorter; n goes on from the
// creates to the look-ups, as both are on the way up, and starts anew with the
// destroys. A look-up that finds nothing yet is no failure: the next one comes
// after EndpointProbeInterval, and n stays. A slot that is well beside it is
// ready in the first instant.
func TestProp_G4GapsFollowTheDelayTable(t *testing.T) {
	type try struct {
		outcome fakebackend.Outcome
		asked   time.Duration
	}
	const probe = 3 * time.Second
	tries := func(more ...try) *rapid.Generator[[]try] {
		return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) try {
			asked := time.Duration(rapid.IntRange(0, 200).Draw(t, "asked")) * time.Second
			return rapid.SampledFrom(append(more, []try{{fakebackend.Definite(), 0}, {fakebackend.Capacity(), 0}, {fakebackend.Ambiguous(), 0},
				{fakebackend.Error(), 0}, {fakebackend.Panic(), 0}, {fakebackend.Refuse(), 0}, {fakebackend.RetryAfter(asked), asked}}...)).Draw(t, "try")
		}), 0, 12)
	}
	rapid.Check(t, func(t *rapid.T) {
		policy := provisioning.RetryPolicy{
			InitialDelay:  rapid.SampledFrom([]time.Duration{time.Nanosecond, time.Second, 7 * time.Second}).Draw(t, "initial"),
			MaxDelay:      rapid.SampledFrom([]time.Duration{7 * time.Second, time.Minute}).Draw(t, "max"),
			Jitter:        rapid.SampledFrom([]float64{0, 0, 0.25, 0.9}).Draw(t, "jitter"),
			MaxRetryAfter: 100 * time.Second, EndpointProbeInterval: probe, EndpointTimeout: -1,
		}
		creates, destroys := tries().Draw(t, "creates"), tries().Draw(t, "destroys")
		lookups := tries(try{fakebackend.NotReady(), 0}, try{fakebackend.NotReady(), 0}).Draw(t, "look-ups")
		w, err := trace.New(trace.Trace{
			Config: trace.Config{Retry: policy, Order: trace.AnyOrder, Seed: 1}, First: []trace.Group{{ID: "w", Count: 2, Image: "a"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		script := func(kind provisioning.OperationKind, tries []try) {
			for _, m := range tries {
				w.Fake.Script("w-0", kind, m.outcome)
			}
		}
		check := func(kind provisioning.OperationKind, made []try, failures int) int {
			dispatched := ptDispatches(w, "w-0", kind)
			if len(dispatched) != len(made)+1 {
				t.Fatalf("%v: %d tries, of which %d had to fail", kind, len(dispatched), len(made))
			}
			for i, m := range made {
				least, most := probe, probe
				if m.outcome != fakebackend.NotReady() {
					most = policy.MaxDelay
					if exact := float64(policy.InitialDelay) * math.Pow(2, float64(failures)); exact < float64(most) {
						most = time.Duration(exact)
					}
					least = max(time.Duration(float64(most)*(1-policy.Jitter)), 1)
					failures++
				}
				asked := min(m.asked, policy.MaxRetryAfter)
				if gap := dispatched[i+1] - dispatched[i]; gap < max(least, asked) || gap > max(most, asked) {
					t.Fatalf("%v: gap %d after %v is %v, not %v to %v and at least %v", kind, i+1, m.outcome, gap, least, most, asked)
				}
			}
			return failures
		}
		run := func(d time.Duration) {
			if err := w.Through(d); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Log(), "\n"))
			}
		}
		script(provisioning.CreateLease, append(slices.Clone(creates), try{outcome: fakebackend.OKNoEndpoint()}))
		script(provisioning.LookupEndpoint, lookups)
		run(0)
		if node, _ := w.Driver.Node("w-1"); !node.Record.Ready {
			t.Fatal("w-1 waits for w-0")
		}
		run(time.Hour)
		check(provisioning.LookupEndpoint, lookups, check(provisioning.CreateLease, creates, 0))
		script(provisioning.DestroyLease, destroys)
		if err := w.Wish(nil); err != nil {
			t.Fatal(err)
		}
		run(time.Hour)
		check(provisioning.DestroyLease, destroys, 0)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// ptDispatches are the times, from the start, at which a slot dispatched an
// operation.
func ptDispatches(w *trace.World, slot provisioning.LogicalNodeID, kind provisioning.OperationKind) []time.Duration {
	var at []time.Duration
	for _, line := range w.LogOf(slot) {
		if words := strings.Fields(line); words[1] == "Dispatch" && words[3] == kind.String() {
			d, err := time.ParseDuration(words[0])
			if err != nil {
				panic(err)
			}
			at = append(at, d)
		}
	}
	return at
}

// G5: nothing that costs money is forgotten. Creates hang, come late, lose
// their answers and panic while wishes come and go, at every class of provider.
// From within each destroy the world sees that no create is remembered, at each
// end of an attempt that none of its machines lives, and once the trouble has
// stopped and nothing is wished for there is none at all.
func TestProp_G5NothingThatCostsMoneyIsForgotten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{Chapters: 3, Faults: []string{"hangs", "slowness", "late effects", "lost answers", "panics", "losses"}})
		ptPlay(t, tr, nil, (*trace.World).Tail)
	})
}

// ptLifeOfAnAttempt is the order of an attempt's calls: the way up, what a
// create or start left behind, the cancel, the destroy. No step comes again
// after a later one.
var ptLifeOfAnAttempt = regexp.MustCompile(`^(Create )*(Lookup )*(Start )*(Observe )*(Create |Start )?(Create )*(Start )*(Cancel )*(Destroy )*$`)

// G6: cleanup goes in order, and before reuse. Of every attempt the calls are
// those of the way up, then cancels, then destroys; and the world sees that no
// attempt of a slot begins before the one before it is destroyed, and no call
// starts while an older one of the slot runs.
func TestProp_G6CleanupInOrderAndBeforeReuse(t *testing.T) {
	words := map[provisioning.OperationKind]string{
		provisioning.CreateLease: "Create ", provisioning.LookupEndpoint: "Lookup ", provisioning.StartBootstrap: "Start ",
		provisioning.BootstrapConvergenceObserved: "Observe ", provisioning.CancelBootstrap: "Cancel ", provisioning.DestroyLease: "Destroy ",
	}
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{Chapters: 2})
		w := ptPlay(t, tr, nil, (*trace.World).Tail)
		for _, slot := range trace.Slots {
			for _, attempt := range w.Attempts(slot) {
				var life strings.Builder
				for _, kind := range w.Calls(attempt) {
					life.WriteString(words[kind])
				}
				if !ptLifeOfAnAttempt.MatchString(life.String()) {
					t.Fatalf("attempt %d of %s: %s\n%s", attempt, slot, life.String(), w.Story(tr))
				}
			}
		}
	})
}

// G7: whatever happens first, once the trouble stops the cluster becomes what
// was wished for last, in bounded virtual time, and stays it without a call; a
// wish for nothing then leaves nothing. All that the world asks after every
// pass and step holds on the way: S1 to S8, and of G1 to G12 what can be seen at
// one moment.
func TestProp_G7ConvergesOnceTroubleStops(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ptPlay(t, trace.Draw(t, trace.Options{}), nil, (*trace.World).Tail)
	})
}

// G7: the same about the stream: joins, closes, failures, losses and stages come
// early, late, twice, in any order and while the calls about the bootstrap hang,
// fail or are still to be answered.
func TestProp_G7ConvergesAfterStreamTrouble(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ptPlay(t, trace.Draw(t, trace.Options{Stream: true}), nil, (*trace.World).Tail)
	})
}

// G8: scaling down removes the highest indices and nothing else: what stays is
// not touched, to the byte. It is so from any state that trouble led to, once
// that has settled, and also for a group that grows meanwhile.
func TestProp_G8ScaleDownRemovesTheHighestIndices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{Chapters: 1})
		counts := rapid.SliceOfN(rapid.IntRange(0, 4), 3, 3).Draw(t, "counts")
		ptPlay(t, tr, nil, func(w *trace.World) error {
			if err := w.Calm(); err != nil {
				return err
			}
			before := w.Driver.Snapshot()
			groups := w.Groups()
			for i := range groups {
				groups[i].Count = counts[i]
			}
			if err := errors.Join(w.Wish(groups), w.Settle()); err != nil {
				return err
			}
			after := w.Driver.Snapshot()
			for node := range before.All() {
				i := slices.IndexFunc(groups, func(g trace.Group) bool { return g.ID == node.Record.Group })
				now, there := after.Node(node.Record.Node)
				switch stays := node.Record.Index < groups[i].Count; {
				case there != stays:
					return fmt.Errorf("%s is there: %v, wished for: %v", node.Record.Node, there, stays)
				case stays && ptJSON(node) != ptJSON(now):
					return fmt.Errorf("%s was\n%s\nand is\n%s", node.Record.Node, ptJSON(node), ptJSON(now))
				}
			}
			return w.CheckMachines()
		})
	})
}

func ptJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// G9: whatever is under way, an update under another run, under a lower
// generation, with an invalid shape, or with other content under the same
// generation is refused with its own error and leaves everything as it was to
// the byte: state, RequeueAt, generations, progress and plan.
func TestProp_G9RefusedUpdatesChangeNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{Chapters: 1})
		refuseAll := func(w *trace.World) error {
			for r := trace.OtherRun; r <= trace.SameGeneration; r++ {
				if err := w.Refuse(r, w.Groups()); err != nil {
					return err
				}
			}
			return nil
		}
		var steps []trace.Step // between any two, also where nothing has been driven yet
		for _, s := range tr.Steps {
			for r := trace.OtherRun; r <= trace.SameGeneration; r++ {
				steps = append(steps, trace.Step{Kind: trace.Refused, Refusal: r, Groups: tr.First})
			}
			steps = append(steps, s)
		}
		tr.Steps = steps
		ptPlay(t, tr, refuseAll, nil)
	})
}

// G10: one slot never holds up another. Some slots are as sick as can be and
// stay it: their calls never return, are refused, or never answer clearly. Every
// other slot is ready at the very instant it would be without them, when no
// place is short; and in bounded virtual time when places are, however few: a
// hung call gives its place back at its deadline, and nobody is left out for
// ever.
func TestProp_G10TheSickHoldUpNobody(t *testing.T) {
	const timeout = 30 * time.Second
	type script map[provisioning.OperationKind]fakebackend.Outcome
	sicknesses := []func(*rapid.T) script{
		func(t *rapid.T) script { // one call that never goes well
			outcome := rapid.SampledFrom([]fakebackend.Outcome{fakebackend.Hang(), fakebackend.DoneHang(), fakebackend.Refuse(), fakebackend.Definite(),
				fakebackend.Ambiguous(), fakebackend.Slow(40 * time.Second), fakebackend.Panic(), fakebackend.Lost()}).Draw(t, "outcome")
			kind := rapid.SampledFrom([]provisioning.OperationKind{provisioning.CreateLease, provisioning.StartBootstrap,
				provisioning.BootstrapConvergenceObserved}).Draw(t, "operation")
			return script{kind: outcome}
		},
		func(*rapid.T) script { // all of them slow, and in the end for nothing: it never stops asking for places
			slow := fakebackend.Slow(timeout - time.Second)
			return script{provisioning.CreateLease: slow, provisioning.StartBootstrap: slow,
				provisioning.BootstrapConvergenceObserved: fakebackend.Lost(), provisioning.DestroyLease: slow}
		},
	}
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(2, 4).Draw(t, "count")
		config := trace.Config{
			Retry:       provisioning.RetryPolicy{OperationTimeout: timeout, MaxDelay: 8 * time.Second},
			MaxInFlight: rapid.IntRange(0, 3).Draw(t, "max in flight"), JoinAfter: rapid.SampledFrom([]time.Duration{0, 7 * time.Second}).Draw(t, "join after"),
			Order: rapid.SampledFrom([]trace.Order{trace.OldestFirst, trace.NewestFirst, trace.AnyOrder, trace.AtOnce}).Draw(t, "order"),
		}
		begin := func() *trace.World {
			w, err := trace.New(trace.Trace{Config: config, First: []trace.Group{{ID: "w", Count: count, Image: "a"}, {ID: "x", Count: count, Image: "a"}}})
			if err != nil {
				t.Fatal(err)
			}
			return w
		}
		var slots []provisioning.LogicalNodeID
		for index := range count {
			slots = append(slots, provisioning.NewLogicalNodeID("w", index), provisioning.NewLogicalNodeID("x", index))
		}
		sick := make(map[provisioning.LogicalNodeID]bool)
		w := begin()
		for range rapid.IntRange(1, len(slots)-1).Draw(t, "sick") {
			slot := rapid.SampledFrom(slots).Draw(t, "slot")
			sick[slot] = true
			for kind, outcome := range rapid.SampledFrom(sicknesses).Draw(t, "sickness")(t) {
				w.Fake.Script(slot, kind, fakebackend.Repeat(2000, outcome)...)
			}
		}
		// A well slot needs 3 places. While places are short every fourth goes
		// to whoever has waited longest, of at most all slots, and a place that
		// a sick slot has is free after timeout.
		bound := config.JoinAfter
		if config.MaxInFlight > 0 {
			bound += time.Duration(3*4*len(slots)) * timeout
		}
		ready := func(slot provisioning.LogicalNodeID) bool {
			node, there := w.Driver.Node(slot)
			return there && node.Record.Ready
		}
		waiting := func() bool {
			return slices.ContainsFunc(slots, func(slot provisioning.LogicalNodeID) bool { return !sick[slot] && !ready(slot) })
		}
		if err := w.Through(config.JoinAfter); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Log(), "\n"))
		}
		for w.Elapsed() < bound && waiting() {
			if err := w.Through(timeout); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Log(), "\n"))
			}
		}
		well := begin()
		if err := well.Through(w.Elapsed()); err != nil {
			t.Fatal(err)
		}
		for _, slot := range slots {
			if sick[slot] {
				continue
			}
			if !ready(slot) {
				e, _ := w.Driver.Explain(slot, w.Now())
				t.Fatalf("not ready after %v: %v\n%s", bound, e, strings.Join(w.LogOf(slot), "\n"))
			}
			if config.MaxInFlight == 0 && !slices.Equal(w.LogOf(slot), well.LogOf(slot)) {
				t.Fatalf("%s among the well:\n%s\namong the sick:\n%s", slot, strings.Join(well.LogOf(slot), "\n"), strings.Join(w.LogOf(slot), "\n"))
			}
		}
		if err := errors.Join(w.Close(), well.Close()); err != nil {
			t.Fatal(err)
		}
	})
}

// G11: whatever the clock does, no wait is longer than its delay and none ends
// early, measured in the time that really ran; and a moment that the driver's
// clock cannot express is ErrClockExhausted with nothing changed.
func TestProp_G11ClockTrouble(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		policy := provisioning.RetryPolicy{InitialDelay: time.Second, MaxDelay: 8 * time.Second}
		due := func(call int, at time.Duration) time.Duration {
			return at + min(policy.InitialDelay<<call, policy.MaxDelay)
		}
		fake := fakebackend.New(fakebackend.Config{Inline: true})
		fake.Script("w-0", provisioning.CreateLease, fakebackend.Repeat(1000, fakebackend.Definite())...)
		driver, err := provisioning.NewClusterDriver(trace.Shape(1, trace.Group{ID: "w", Count: 1, Image: "a"}), provisioning.Config{Retry: policy})
		if err != nil {
			t.Fatal(err)
		}
		executor, err := provisioning.NewExecutor(fake, provisioning.ExecutorConfig{Deliver: driver.Deliver, Go: func(f func()) { f() }})
		if err != nil {
			t.Fatal(err)
		}
		// The host's clock, and beside it the time that runs.
		now, ran := fake.Now(), time.Duration(0)
		var dispatched, looks []time.Duration
		drive := func() {
			calls := fake.Calls("w-0", provisioning.CreateLease)
			if _, err := driver.DriveUntilBlocked(now, executor); err != nil {
				t.Fatal(err)
			}
			if fake.Calls("w-0", provisioning.CreateLease) > calls {
				dispatched = append(dispatched, ran)
			}
			if at, stored := driver.RequeueAt(); stored && !at.After(now) {
				t.Fatalf("RequeueAt is due after the drive")
			}
		}
		drive()
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"on", "on", "requeue", "back", "out of range"}).Draw(t, "step") {
			case "on":
				d := time.Duration(rapid.IntRange(0, 1500).Draw(t, "ms")) * time.Millisecond
				now, ran = now.Add(d), ran+d
			case "requeue":
				at, stored := driver.RequeueAt()
				if !stored {
					t.Fatal("nothing is waited for")
				}
				now, ran = at, ran+at.Sub(now)
			case "back":
				now = now.Add(-time.Duration(rapid.Int64Range(0, 1<<40).Draw(t, "ns")))
			case "out of range":
				// Refused, and as if nobody had asked.
				before := ptJSON(driver.Snapshot())
				out := rapid.SampledFrom([]time.Time{{}, time.Date(1899, 12, 31, 0, 0, 0, 0, time.UTC), time.Date(2193, 1, 1, 0, 0, 0, 0, time.UTC),
					time.Unix(1<<62, 0), time.Unix(-1<<62, 0)}).Draw(t, "out of range")
				if _, err := driver.DriveUntilBlocked(out, executor); !errors.Is(err, provisioning.ErrClockExhausted) {
					t.Fatalf("%v: %v", out, err)
				}
				if after := ptJSON(driver.Snapshot()); after != before {
					t.Fatalf("%v changed %s to %s", out, before, after)
				}
			}
			// Whoever drives may only look whether something is due.
			looks = append(looks, ran)
			if triggered := driver.TriggerIfDue(now); triggered || rapid.Bool().Draw(t, "drive") {
				drive()
			}
			last := len(dispatched) - 1
			if at, _ := driver.RequeueAt(); ran+at.Sub(now) != due(last, dispatched[last]) {
				t.Fatalf("RequeueAt is %v ahead after %v, call %d is due after %v", at.Sub(now), ran, last+2, due(last, dispatched[last]))
			}
		}
		// The next call is made when somebody first looks after the delay.
		for i, at := range dispatched {
			due := due(i, at)
			next := slices.IndexFunc(looks, func(look time.Duration) bool { return look >= due })
			switch made := i+1 < len(dispatched); {
			case made != (next >= 0):
				t.Fatalf("call %d made: %v; it was due at %v, looks at %v", i+2, made, due, looks)
			case made && dispatched[i+1] != looks[next]:
				t.Fatalf("call %d was made at %v, due at %v, looks at %v", i+2, dispatched[i+1], due, looks)
			}
		}
		if n := fake.Calls("w-0", provisioning.CreateLease); n != len(dispatched) {
			t.Fatalf("%d calls in %d drives", n, len(dispatched))
		}
	})
}

// G11: when the attempt numbers are spent, no number comes twice, what is there
// goes on and goes away when it is not wanted any more, and what cannot begin is
// a fault with its reason, never a spin.
func TestProp_G11AttemptsExhausted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		left := rapid.Uint64Range(0, 8).Draw(t, "left")
		fake := fakebackend.New(fakebackend.Config{Inline: true})
		var faults, began int
		driver, err := provisioning.NewClusterDriver(trace.Shape(1), provisioning.Config{
			FirstAttempt: provisioning.NodeAttemptID(math.MaxUint64 - left),
			OnEvent: func(e provisioning.Event) {
				switch e.Kind {
				case provisioning.EventFault:
					faults++
					if !errors.Is(e.Err, provisioning.ErrAttemptsExhausted) {
						panic(e.String())
					}
				case provisioning.EventAttemptStarted:
					began++
				}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		executor, err := provisioning.NewExecutor(fake, provisioning.ExecutorConfig{Deliver: driver.Deliver, Go: func(f func()) { f() }})
		if err != nil {
			t.Fatal(err)
		}
		wishes := rapid.SliceOfN(rapid.IntRange(0, 4), 1, 8).Draw(t, "counts")
		now, generation, needed := fake.Now(), uint64(1), 0
		for i, count := range append(wishes, 0) {
			generation++
			if err := driver.UpdateDesired(trace.Shape(generation, trace.Group{ID: "w", Count: count, Image: fmt.Sprint(i)})); err != nil {
				t.Fatal(err)
			}
			needed += count // every wish has another image
			faults = 0
			if passes, err := driver.DriveUntilBlocked(now, executor); err != nil || passes > 40 {
				t.Fatalf("%d passes, %v", passes, err)
			}
			if want := min(needed, int(left)); began != want || driver.Stats().Attempts != uint64(want) {
				t.Fatalf("%d attempts began, %d were left and %d needed", began, left, needed)
			}
			if short := needed > int(left) && count > 0; (faults > 0) != short || driver.Converged(generation) == short {
				t.Fatalf("short of attempts: %v, %d faults, converged %v", short, faults, driver.Converged(generation))
			}
			if _, stored := driver.RequeueAt(); stored {
				t.Fatal("a spent allocator is waited for")
			}
			now = now.Add(time.Minute)
		}
		if driver.Snapshot().Len() > 0 || fake.LiveTotal() > 0 || driver.Stats().HookPanics > 0 {
			t.Fatalf("left: %s, %v", ptJSON(driver.Snapshot()), fake.Machines())
		}
	})
}

// G12: what is remembered follows what lives. However often a cluster goes up
// and down, in trouble or in peace, when nothing is wished for the state is as
// small as it was before the first wish, the ledger of the executor empty and no
// goroutine left.
func TestProp_G12BoundedByWhatLives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trace.Draw(t, trace.Options{Chapters: 1})
		cycles := rapid.SliceOfN(rapid.IntRange(0, 4), 1, 8).Draw(t, "cycles")
		goroutines := runtime.NumGoroutine()
		ptPlay(t, tr, nil, func(w *trace.World) error {
			if err := w.Tail(); err != nil {
				return err
			}
			for i, count := range cycles {
				for _, groups := range [][]trace.Group{{{ID: "w", Count: count, Image: fmt.Sprint(i)}, {ID: "y", Count: 1, Image: "a"}}, nil} {
					if err := errors.Join(w.Wish(groups), w.Settle()); err != nil {
						return err
					}
				}
				state, stats := w.Driver.Snapshot(), w.Executor.Stats()
				if state.Len() > 0 || stats.Attempts > 0 || stats.Running > 0 || stats.Queued > 0 {
					return fmt.Errorf("after cycle %d: %s, %+v", i, ptJSON(state), stats)
				}
				if err := invariant.AwaitGoroutines(goroutines); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// ptSteady is a backend for which everything goes well and which remembers
// nothing.
type ptSteady struct{}

func (ptSteady) CreateLease(_ context.Context, r provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	return provisioning.CreateLeaseResult{Lease: provisioning.ProviderLeaseID(r.Key.Node), Endpoint: &provisioning.SSHEndpoint{Host: "h", Port: 22}}, nil
}
func (ptSteady) LookupEndpoint(context.Context, provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	return provisioning.LookupEndpointResult{}, errors.New("not needed")
}
func (ptSteady) StartBootstrap(_ context.Context, r provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	r.Sink.Joined("session", "agent")
	return provisioning.StartBootstrapResult{Session: "session"}, nil
}
func (ptSteady) BootstrapConvergenceObserved(context.Context, provisioning.BootstrapConvergenceObservedRequest) error {
	return nil
}
func (ptSteady) CancelBootstrap(context.Context, provisioning.CancelBootstrapRequest) error {
	return nil
}
func (ptSteady) DestroyLease(context.Context, provisioning.DestroyLeaseRequest) error { return nil }

// G12: a thousand nodes that come and go leave nothing on the heap.
func TestChurnLeavesNothingOnTheHeap(t *testing.T) {
	var driver *provisioning.ClusterDriver
	executor, err := provisioning.NewExecutor(ptSteady{}, provisioning.ExecutorConfig{
		Deliver: func(o provisioning.Observation) { driver.Deliver(o) }, Go: func(f func()) { f() },
	})
	require.NoError(t, err)
	driver, err = provisioning.NewClusterDriver(trace.Shape(1), provisioning.Config{})
	require.NoError(t, err)
	generation, now := uint64(1), time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	cycles := func(n int) {
		for range n {
			for _, count := range []int{20, 0} {
				generation++
				require.NoError(t, driver.UpdateDesired(trace.Shape(generation, trace.Group{ID: "w", Count: count, Image: fmt.Sprint(generation)})))
				_, err := driver.DriveUntilBlocked(now, executor)
				require.NoError(t, err)
				require.True(t, driver.Converged(generation))
				now = now.Add(time.Second)
			}
		}
	}
	live := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	cycles(50) // work lists find their size
	before := live()
	cycles(500) // 10,000 attempts, 50,000 operations
	// One word a finished operation would be 400 kB.
	require.Less(t, live()-before, int64(100_000))
	require.Equal(t, 0, executor.Stats().Attempts)
}
