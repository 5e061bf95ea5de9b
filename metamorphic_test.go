package provisioning_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/trace"
	"github.com/swactor/provisioning/internal/verify"
)

// A metamorphic relation says how the outcome of a run must change when the run
// is changed, mostly: not at all. It needs no oracle that knows the outcome.

// mmLevel is what two runs have in common.
type mmLevel int

const (
	// mmEnd: the world in the end, which is that of the last wish: slots, their
	// specs, readiness, machines. Attempts and calls may differ.
	mmEnd mmLevel = iota
	// mmSlots: of each slot every effect of every attempt with its times, and
	// at each rest the whole node and the machines, but for names and for the
	// numbers that attempts get. And the end.
	mmSlots
	// mmFacts is mmSlots but for what the last word of a bootstrap was, and when.
	mmFacts
	// mmBytes: the bytes of the state at each rest, attempt numbers included,
	// and all effects in their order. And all of the above.
	mmBytes
)

// mmRelation is one relation.
type mmRelation struct {
	name  string
	level mmLevel
	// alone: it holds where slots share nothing but the attempt numbers. A cap
	// of operations in flight ties them together, and jitter is drawn from the
	// attempt number.
	alone bool
	// limited: it holds where no attempt may be silent for ever.
	limited bool
	// unhurried: it holds where no machine goes in the moment of the call that
	// made it or started on it. Which call comes before that and which after
	// it is not the library's to say.
	unhurried bool
	how       mwHow
	// names, if not nil, is what the groups of the other run are called, and
	// how many there are for each.
	names func(provisioning.NodeGroupID) []provisioning.NodeGroupID
	// crowd: both runs have three copies of every slot.
	crowd bool
	// again offers every wish again at each step; split makes of a wish two
	// generations; apart has passes between the two.
	again, split, apart bool
}

var mmRelations = []mmRelation{
	{name: "every observation comes several times", level: mmBytes, how: mwHow{deliver: mmSeveral}},
	// A loss that was reported when there was no lease is of no consequence;
	// said again later it is.
	{name: "all of the past comes again, later", level: mmEnd, how: mwHow{deliver: mmPast}},
	// TestProp_G1OrderOfIndependentWorkDoesNotMatter is about work that ends in
	// another order.
	{name: "what comes together comes in another order of slots", level: mmBytes, how: mwHow{deliver: mmShuffled}},
	// A lost word of progress is made up for by the next one: it is a fact and
	// nothing is decided by it.
	{name: "progress is lost", level: mmFacts, how: mwHow{deliver: mmLose(func(o provisioning.Observation) bool {
		return o.Kind == provisioning.BootstrapProgress && o.Stage < provisioning.BootstrapStageConverged
	})}},
	// A lost result is asked for at the deadline of its operation.
	{name: "results are lost", level: mmEnd, limited: true, how: mwHow{deliver: mmLoseSome(func(o provisioning.Observation) bool {
		return o.Kind == provisioning.OperationCompleted
	})}},
	// A lost word of a bootstrap is made up for by the deadline of the stage, a
	// lost word of a loss by whoever says it again.
	{name: "anything is lost", level: mmEnd, limited: true, how: mwHow{deliver: mmLoseSome(func(o provisioning.Observation) bool {
		return o.Kind != provisioning.NodeLost
	})}},
	{name: "passes that nobody needs", level: mmBytes, how: mwHow{extra: 3}},
	// What two observations of one moment lead to may need a call less.
	{name: "a pass after every observation", level: mmEnd, how: mwHow{apart: true}},
	{name: "a storm of ticks", level: mmBytes, how: mwHow{storm: true}},
	{name: "another driver after every pass, from JSON", level: mmBytes, alone: true, how: mwHow{roundTrip: true}},
	// Whose turn it is under a cap is not in the state.
	{name: "another driver after every pass, from JSON, under a cap", level: mmEnd, how: mwHow{roundTrip: true}},
	{name: "groups are called otherwise and lie in another order", level: mmSlots, alone: true, names: func(g provisioning.NodeGroupID) []provisioning.NodeGroupID {
		return []provisioning.NodeGroupID{map[provisioning.NodeGroupID]provisioning.NodeGroupID{"w": "z-1", "w-1": "z", "x": "a"}[g]}
	}},
	{name: "three copies of every slot", level: mmSlots, alone: true, names: mmThree},
	// Who has answered already goes on while others are still asked: numbers
	// are given in another order.
	{name: "calls run within Submit", level: mmFacts, alone: true, unhurried: true, how: mwHow{inline: true}},
	{name: "calls run within Submit, under a cap", level: mmEnd, how: mwHow{inline: true}},
	{name: "newest calls first", level: mmBytes, how: mwHow{newest: true}},
	{name: "one call at a time, oldest first", level: mmSlots, alone: true, crowd: true, how: mwHow{atOnce: 1}},
	{name: "one call at a time, newest first", level: mmSlots, alone: true, crowd: true, how: mwHow{atOnce: 1, newest: true}},
	{name: "four calls at a time, oldest first", level: mmSlots, alone: true, crowd: true, how: mwHow{atOnce: 4}},
	{name: "four calls at a time, newest first", level: mmSlots, alone: true, crowd: true, how: mwHow{atOnce: 4, newest: true}},
	{name: "sixteen calls at a time, oldest first", level: mmSlots, alone: true, crowd: true, how: mwHow{atOnce: 16}},
	{name: "sixteen calls at a time, newest first", level: mmSlots, alone: true, crowd: true, how: mwHow{atOnce: 16, newest: true}},
	{name: "one call at a time, under a cap", level: mmEnd, how: mwHow{atOnce: 1, newest: true}},
	{name: "the wish is offered again and again", level: mmBytes, again: true},
	{name: "a wish in two generations, the first never seen", level: mmBytes, split: true},
	{name: "a wish in two generations, half and half", level: mmSlots, alone: true, split: true, apart: true},
	{name: "the driver that looks at everything", level: mmBytes, how: mwHow{naive: true}},
}

func mmOne(g provisioning.NodeGroupID) []provisioning.NodeGroupID {
	return []provisioning.NodeGroupID{g}
}

func mmThree(g provisioning.NodeGroupID) []provisioning.NodeGroupID {
	return []provisioning.NodeGroupID{g, "a-" + g, g + "-z"}
}

// mmSeveral delivers each observation two to four times.
func mmSeveral(w *mwWorld, together []provisioning.Observation) []provisioning.Observation {
	var all []provisioning.Observation
	for i, o := range together {
		for range 2 + (len(w.history[o.Node])+i)%3 {
			all = append(all, o)
		}
		w.tampered++
	}
	return all
}

// mmPast delivers what was ever delivered of a slot again, every third time.
func mmPast(w *mwWorld, together []provisioning.Observation) []provisioning.Observation {
	for _, o := range together {
		if past := w.history[o.Node]; len(past)%3 == 0 {
			together = append(together, past...)
			w.tampered++
		}
	}
	return together
}

// mmShuffled keeps the order of what is of one slot.
func mmShuffled(w *mwWorld, together []provisioning.Observation) []provisioning.Observation {
	bySlot := map[provisioning.LogicalNodeID][]provisioning.Observation{}
	order := make([]provisioning.LogicalNodeID, len(together))
	for i, o := range together {
		bySlot[o.Node] = append(bySlot[o.Node], o)
		order[i] = o.Node
	}
	random := rand.New(rand.NewPCG(uint64(len(together)), uint64(w.tampered)))
	random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	shuffled := make([]provisioning.Observation, 0, len(together))
	for _, slot := range order {
		shuffled = append(shuffled, bySlot[slot][0])
		bySlot[slot] = bySlot[slot][1:]
	}
	if !slices.Equal(shuffled, together) {
		w.tampered++
	}
	return shuffled
}

// mmLose loses all that fits.
func mmLose(fits func(provisioning.Observation) bool) func(*mwWorld, []provisioning.Observation) []provisioning.Observation {
	return func(w *mwWorld, together []provisioning.Observation) []provisioning.Observation {
		return slices.DeleteFunc(slices.Clone(together), func(o provisioning.Observation) bool {
			loses := fits(o)
			if loses {
				w.tampered++
			}
			return loses
		})
	}
}

// mmLoseSome loses up to six of what fits, of each slot what comes when its
// history is of even length.
func mmLoseSome(fits func(provisioning.Observation) bool) func(*mwWorld, []provisioning.Observation) []provisioning.Observation {
	return func(w *mwWorld, together []provisioning.Observation) []provisioning.Observation {
		return mmLose(func(o provisioning.Observation) bool {
			return w.tampered < 6 && len(w.history[o.Node])%2 == 0 && fits(o)
		})(w, together)
	}
}

// mmPlay plays a trace to its end, in the way of a relation.
func mmPlay(t require.TestingT, tr trace.Trace, r mmRelation) *mwWorld {
	names := r.names
	if names == nil {
		names = mmOne
	}
	c := tr.Config
	config := provisioning.Config{Retry: c.Retry, MaxInFlight: c.MaxInFlight, FirstAttempt: c.FirstAttempt,
		GroupRetry: map[provisioning.NodeGroupID]provisioning.RetryPolicy{}}
	for group, policy := range c.GroupRetry {
		for _, name := range names(group) {
			config.GroupRetry[name] = policy
		}
	}
	groups := tr.First
	shape := func() []provisioning.NodeGroupSpec { return mmShape(groups, names) }
	w := mwNew(t, fakebackend.Config{Class: c.Class, Lag: c.Lag, Settle: c.Settle, ManualBootstrap: c.ManualBootstrap, JoinAfter: c.JoinAfter},
		config, provisioning.ClusterShape{RunID: trace.Run, Generation: 1, Groups: shape()}, r.how)
	defer w.close()
	each := func(slot provisioning.LogicalNodeID, do func(provisioning.LogicalNodeID)) {
		for _, alias := range mmAliases(slot, names) {
			do(alias)
		}
	}
	for i, s := range tr.Steps {
		switch s.Kind {
		case trace.Wish:
			before := groups
			groups = s.Groups
			if r.split && (w.driven || !r.apart) { // what nobody has seen cannot be left half way
				w.tampered++
				if r.apart {
					w.wish(mmShape(mmHalf(before, groups), names))
					w.drive()
				} else {
					w.wish(nil)
				}
			}
			w.wish(shape())
		case trace.Rewish:
			require.NoError(t, w.driver.UpdateDesired(w.shape))
		case trace.Script:
			each(s.Slot, func(slot provisioning.LogicalNodeID) {
				w.fake.Script(slot, s.Operation, fakebackend.Repeat(s.N, s.Outcome)...)
			})
		case trace.Release:
			each(s.Slot, func(slot provisioning.LogicalNodeID) {
				if w.fake.Hanging(slot, s.Operation) > 0 {
					require.NoError(t, w.fake.Release(slot, s.Operation, s.Outcome))
				}
			})
		case trace.Remove:
			each(s.Slot, func(slot provisioning.LogicalNodeID) { w.fake.Remove(slot) })
		case trace.Event:
			each(s.Slot, func(slot provisioning.LogicalNodeID) {
				if o, is := w.event(s, slot); is {
					w.deliver(o)
				}
			})
		case trace.Redeliver:
			each(s.Slot, func(slot provisioning.LogicalNodeID) {
				past := w.history[slot]
				w.deliver(slices.Clone(past[max(0, len(past)-s.N):])...)
			})
		case trace.LoseReports:
			each(s.Slot, func(slot provisioning.LogicalNodeID) { w.losing[slot] += s.N })
		case trace.Pause:
			w.driver.Pause()
		case trace.Resume:
			w.driver.Resume()
		case trace.Replace:
			each(s.Slot, func(slot provisioning.LogicalNodeID) {
				if n, there := w.driver.Snapshot().Node(slot); there {
					w.deliver(provisioning.Observation{Kind: provisioning.ReplaceRequested, Node: slot, Attempt: n.Attempt, Reason: "it is slow"})
				}
			})
		case trace.Due:
			if due, waits := w.nextDue(); waits {
				w.moveTo(due.Add(s.D))
			}
		case trace.Leap:
			w.moveTo(w.fake.Now().Add(s.D))
		case trace.Through:
			w.through(s.D)
		default:
			// Trouble of the host alone: the other properties are about it.
			continue
		}
		w.drive()
		if r.again {
			require.NoError(t, w.driver.UpdateDesired(w.shape))
			w.drive()
			w.tampered++
		}
		w.rest(fmt.Sprint("after step ", i+1))
	}
	w.settle()
	w.rest("in the end")
	return w
}

// mmShape wishes for the groups under their other names.
func mmShape(groups []trace.Group, names func(provisioning.NodeGroupID) []provisioning.NodeGroupID) []provisioning.NodeGroupSpec {
	var named []trace.Group
	for _, g := range groups {
		for _, name := range names(g.ID) {
			named = append(named, trace.Group{ID: name, Count: g.Count, Image: g.Image})
		}
	}
	return trace.Shape(1, named...).Groups
}

func mmAliases(slot provisioning.LogicalNodeID, names func(provisioning.NodeGroupID) []provisioning.NodeGroupID) []provisioning.LogicalNodeID {
	var aliases []provisioning.LogicalNodeID
	for _, spec := range mmSlotsOfTraces {
		if spec.Node == slot {
			for _, name := range names(spec.GroupID) {
				aliases = append(aliases, provisioning.NewLogicalNodeID(name, spec.Index))
			}
		}
	}
	return aliases
}

// mmSlotsOfTraces says of which groups the slots of traces are.
var mmSlotsOfTraces = func() []provisioning.LogicalNodeSpec {
	desired, err := provisioning.Expand(trace.Shape(1, trace.Group{ID: "w", Count: 10}, trace.Group{ID: "w-1", Count: 10}, trace.Group{ID: "x", Count: 10}))
	if err != nil {
		panic(err)
	}
	return slices.Collect(desired.All())
}()

// mmHalf is half way from one wish to the next: every second group is as it will
// be, the others are as they were.
func mmHalf(before, after []trace.Group) []trace.Group {
	ids := map[provisioning.NodeGroupID]bool{}
	for _, g := range slices.Concat(before, after) {
		ids[g.ID] = true
	}
	var half []trace.Group
	for i, id := range slices.Sorted(maps.Keys(ids)) {
		from := before
		if i%2 == 0 {
			from = after
		}
		for _, g := range from {
			if g.ID == id {
				half = append(half, g)
			}
		}
	}
	return half
}

// mmDraw draws a trace for which the relation is said to hold.
func mmDraw(t *rapid.T, r mmRelation) trace.Trace {
	o := trace.Options{AutoDrive: true, Chapters: 1, Orders: []trace.Order{trace.OldestFirst}}
	if verify.Full() {
		o.Chapters = 3
	}
	if r.alone {
		o.MaxInFlight = -1
	}
	tr := trace.Draw(t, o)
	if r.how.roundTrip { // a pause is no part of the state
		tr.Steps = slices.DeleteFunc(tr.Steps, func(s trace.Step) bool { return s.Kind == trace.Pause })
	}
	if r.unhurried {
		tr.Steps = slices.DeleteFunc(tr.Steps, func(s trace.Step) bool {
			return s.Outcome == fakebackend.Vanish(0) || s.Outcome == fakebackend.SpotLoss(0)
		})
	}
	policy := func(p provisioning.RetryPolicy) provisioning.RetryPolicy {
		if r.alone {
			p.Jitter = 0
		}
		if r.limited {
			p.BootstrapTimeout, p.EndpointTimeout = max(p.BootstrapTimeout, 20*time.Minute), max(p.EndpointTimeout, 10*time.Minute)
		}
		return p
	}
	tr.Config.Retry = policy(tr.Config.Retry)
	for group, p := range tr.Config.GroupRetry {
		tr.Config.GroupRetry[group] = policy(p)
	}
	return tr
}

// mmCompare wants of two runs what the relation says.
func mmCompare(t require.TestingT, r mmRelation, want, got *mwWorld) {
	if r.names == nil || r.crowd {
		require.Equal(t, want.end(), got.end())
	}
	if r.level == mmEnd {
		return
	}
	if r.level == mmBytes {
		require.Equal(t, want.effects, got.effects)
		require.Equal(t, want.states, got.states)
	}
	if r.names == nil || r.crowd {
		require.Equal(t, want.stories, got.stories)
		return
	}
	counterparts := 0
	for _, spec := range mmSlotsOfTraces {
		for _, alias := range mmAliases(spec.Node, r.names) {
			require.Equal(t, want.stories[spec.Node], got.stories[alias], "%s as %s", spec.Node, alias)
			if _, there := got.stories[alias]; there {
				counterparts++
			}
		}
	}
	require.Len(t, got.stories, counterparts)
}

// TestProp_MetamorphicRelations plays random traces plainly and in the way of
// each relation.
func TestProp_MetamorphicRelations(t *testing.T) {
	if provisioning.RaceDetector {
		t.Skip("it runs on one goroutine at a time")
	}
	verify.Checks(t, 25)
	pairs := 0
	for _, r := range mmRelations {
		plain := mmRelation{how: mwHow{bare: r.level == mmFacts}}
		r.how.bare = plain.how.bare
		if r.crowd {
			r.names, plain.names = mmThree, mmThree
		}
		t.Run(r.name, func(t *testing.T) {
			runs, differ := 0, 0
			rapid.Check(t, func(t *rapid.T) {
				tr := mmDraw(t, r)
				want, got := mmPlay(t, tr, plain), mmPlay(t, tr, r)
				mmCompare(t, r, want, got)
				runs++
				if got.tampered > 0 || r.names != nil && !r.crowd || r.how.naive {
					differ++
				}
			})
			pairs += runs
			// Of so few runs as in the short form all may go alike.
			verify.AtLeast(t, r.name+": pairs of runs that agree and went differently", differ, verify.Target(50, 0))
		})
	}
	verify.Exactly(t, "ways that must not matter", len(mmRelations), 27)
	verify.AtLeast(t, "pairs of runs that agree", pairs, verify.Target(27_000, 0))
}
