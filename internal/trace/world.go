package trace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
)

// World is a cluster and its provider in virtual time. Everything in it happens
// on one goroutine at a time.
type World struct {
	Driver   *provisioning.ClusterDriver
	Executor *provisioning.Executor
	Fake     *fakebackend.Backend
	// AfterDrive, if not nil, is called when nothing is left to do.
	AfterDrive func() error

	config      Config
	lateByLabel bool                        // a create may land late at a provider that knows labels alone
	submits     provisioning.EffectExecutor // what the driver submits to
	work        *fakebackend.Work
	random      *rand.Rand
	goroutines  int           // when the world began
	start       time.Time     // provider time
	setBack     time.Duration // how far the host's clock is behind the provider's

	wish     wish // the accepted one
	working  wish // that the last pass began with
	halted   bool // the pass goes by a pause, or the last one did
	inPass   bool
	folds    int       // looked at
	breaking int       // the executor panics when it is called so many times more; 0: it does not
	during   [][]Group // to be wished for from within submissions

	inbox     []provisioning.Observation // answered, not yet delivered
	delivered map[provisioning.LogicalNodeID][]provisioning.Observation
	heard     map[provisioning.LogicalNodeID][]provisioning.Observation // of these what could have been so: no news of attempts to come
	losing    map[provisioning.LogicalNodeID]int                        // so many stream reports of the provider are lost
	told      map[string]bool                                           // what the tail has reported, or the trace before it
	again     bool                                                      // everything is reported again and again
	calm      map[provisioning.LogicalNodeID]int                        // the attempts when the trouble stopped; nil: it has not

	watch watch
	held  heldBack
	seen  map[provisioning.NodeAttemptID]provisioning.ManagedNode // by the last check
	log   []string
	logOf map[provisioning.LogicalNodeID][]string
}

// wish is a wish that the driver has accepted.
type wish struct {
	shape   provisioning.ClusterShape
	groups  []Group
	desired *provisioning.Desired
	specs   map[provisioning.LogicalNodeID]*provisioning.LogicalNodeSpec
}

// New sets up the world of a trace. Close ends it.
func New(tr Trace) (*World, error) {
	c := tr.Config
	w := &World{config: c, goroutines: runtime.NumGoroutine(), random: rand.New(rand.NewPCG(c.Seed, 1)), watch: newWatch(),
		told: make(map[string]bool), losing: make(map[provisioning.LogicalNodeID]int),
		heard:     make(map[provisioning.LogicalNodeID][]provisioning.Observation),
		delivered: make(map[provisioning.LogicalNodeID][]provisioning.Observation), logOf: make(map[provisioning.LogicalNodeID][]string)}
	for _, s := range tr.Steps {
		w.lateByLabel = w.lateByLabel || c.Class == fakebackend.Label && strings.HasPrefix(s.Outcome.String(), "late")
	}
	w.Fake = fakebackend.New(fakebackend.Config{
		Class: c.Class, Lag: c.Lag, Settle: c.Settle, ManualBootstrap: c.ManualBootstrap, JoinAfter: c.JoinAfter,
	})
	w.start = w.Fake.Now()
	w.work = w.Fake.NewWork()
	var err error
	w.Executor, err = provisioning.NewExecutor(watchedBackend{w}, provisioning.ExecutorConfig{Deliver: w.take, Go: w.work.Go})
	if err != nil {
		return nil, err
	}
	w.submits = watchedExecutor{w.Fake.Refusing(w.Executor), w}
	shape := Shape(1, tr.First...)
	w.Driver, err = provisioning.NewClusterDriver(shape, provisioning.Config{
		Retry: c.Retry, GroupRetry: c.GroupRetry, MaxInFlight: c.MaxInFlight, FirstAttempt: c.FirstAttempt, OnEvent: w.hook,
		Journal: c.Journal,
	})
	if err != nil {
		return nil, err
	}
	return w, w.accepted(shape, tr.First)
}

// Play plays a trace from its beginning and returns the world as it is after
// the last step, for the tail or for questions, and the first thing that was
// wrong. The world is there in both cases unless the trace has no lawful
// beginning.
func Play(tr Trace, afterDrive func(w *World) error) (*World, error) {
	w, err := New(tr)
	if err != nil {
		return w, err
	}
	if afterDrive != nil {
		w.AfterDrive = func() error { return afterDrive(w) }
	}
	for i, s := range tr.Steps {
		if err := w.Step(s); err != nil {
			return w, fmt.Errorf("after step %d, %v: %w\n%s", i+1, s, err, w.Story(tr))
		}
	}
	return w, nil
}

// Story returns the trace and the end of what happened in it.
func (w *World) Story(tr Trace) string {
	const kept = 120
	return fmt.Sprintf("a trace of %d events:\n%v\n%s", tr.Events(), tr, strings.Join(w.log[max(0, len(w.log)-kept):], "\n"))
}

// Log returns all that happened, line by line: events and calls, with times
// from the start.
func (w *World) Log() []string { return slices.Clone(w.log) }

// Generation returns the accepted generation.
func (w *World) Generation() uint64 { return w.wish.shape.Generation }

// Groups returns the accepted groups.
func (w *World) Groups() []Group { return slices.Clone(w.wish.groups) }

// LogOf is the part of the log that is about one slot.
func (w *World) LogOf(slot provisioning.LogicalNodeID) []string { return slices.Clone(w.logOf[slot]) }

// Delivered returns what was delivered of a slot, oldest first.
func (w *World) Delivered(slot provisioning.LogicalNodeID) []provisioning.Observation {
	return slices.Clone(w.delivered[slot])
}

// Attempts returns the attempts of a slot so far, oldest first.
func (w *World) Attempts(slot provisioning.LogicalNodeID) []provisioning.NodeAttemptID {
	return slices.Clone(w.watch.attempts[slot])
}

// Calls returns the calls of an attempt so far, in their order.
func (w *World) Calls(attempt provisioning.NodeAttemptID) []provisioning.OperationKind {
	return slices.Clone(w.watch.calls[attempt])
}

// Effects are what the provider did for an attempt.
type Effects struct{ Bought, GivenBack, Bootstraps int }

// Effects returns them for each attempt of a slot so far, oldest first.
func (w *World) Effects(slot provisioning.LogicalNodeID) []Effects {
	var all []Effects
	for _, attempt := range w.watch.attempts[slot] {
		key := provisioning.ExternalKey{Run: Run, Node: slot, Attempt: attempt}
		all = append(all, Effects{w.Fake.CreatedKey(key), w.Fake.DestroyedKey(key), w.Fake.StartedKey(key)})
	}
	return all
}

// Folds is how many single folds were looked at.
func (w *World) Folds() int { return w.folds }

// CallCount is how many calls have started.
func (w *World) CallCount() int { return w.watch.started }

// State returns the observed state as JSON.
func (w *World) State() string { return stateText(w.Driver.Snapshot()) }

func stateText(state *provisioning.ClusterState) string {
	text, err := json.Marshal(state)
	if err != nil {
		panic(err) // it has no part that cannot be written
	}
	return string(text)
}

// Now is the host's time: the provider's, less what the host's clock was set
// back.
func (w *World) Now() time.Time { return w.Fake.Now().Add(-w.setBack) }

// Elapsed is the virtual time since the start.
func (w *World) Elapsed() time.Duration { return w.Fake.Now().Sub(w.start) }

func (w *World) say(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf("%v ", w.Elapsed())+fmt.Sprintf(format, args...))
}

func (w *World) sayOf(slot provisioning.LogicalNodeID, format string, args ...any) {
	w.say(format, args...)
	w.logOf[slot] = append(w.logOf[slot], w.log[len(w.log)-1])
}

// accepted notes a wish that the driver has accepted.
func (w *World) accepted(shape provisioning.ClusterShape, groups []Group) error {
	desired, err := provisioning.Expand(shape)
	if err != nil {
		return fmt.Errorf("the driver accepted what Expand refuses: %w", err)
	}
	w.wish = wish{shape, groups, desired, make(map[provisioning.LogicalNodeID]*provisioning.LogicalNodeSpec)}
	for spec := range desired.All() {
		w.wish.specs[spec.Node] = &spec
	}
	return nil
}

// Wish offers a wish under the next generation, which has to be accepted.
func (w *World) Wish(groups []Group) error {
	shape := Shape(w.wish.shape.Generation+1, groups...)
	if err := w.Driver.UpdateDesired(shape); err != nil {
		return err
	}
	if w.calm != nil {
		w.countFromHere()
	}
	return w.accepted(shape, groups)
}

// group returns what is wished for of a group; nothing if it is not.
func (w *wish) group(id provisioning.NodeGroupID) Group {
	for _, g := range w.groups {
		if g.ID == id {
			return g
		}
	}
	return Group{ID: id}
}

func (w *World) policyOf(group provisioning.NodeGroupID) provisioning.RetryPolicy {
	if policy, ok := w.config.GroupRetry[group]; ok {
		return policy
	}
	return w.config.Retry
}

// take is the executor's Deliver, for results and for what bootstraps report.
func (w *World) take(o provisioning.Observation) {
	if id := o.Completion.Operation; w.watch.expired[id] {
		w.problem("%v of %s is answered after it expired", id, o.Node)
	}
	if o.Kind != provisioning.OperationCompleted {
		if o.Kind == provisioning.SwactorJoined {
			w.told[joinOf(o)] = true
		}
		if w.losing[o.Node] > 0 {
			w.losing[o.Node]--
			w.sayOf(o.Node, "   lost on the way: %v of %s#%d", o.Kind, o.Node, o.Attempt)
			return
		}
	}
	if w.config.Order == AtOnce {
		w.Deliver(o)
		return
	}
	w.inbox = append(w.inbox, o)
}

// deliver delivers what a step brings. Driven by hand it is folded by the next
// pass, whenever that comes.
func (w *World) deliver(observations ...provisioning.Observation) error {
	for _, o := range observations {
		w.Deliver(o)
		if w.config.ManualDrive {
			continue
		}
		if err := w.foldAlone(o); err != nil {
			return err
		}
	}
	return nil
}

// foldAlone folds an observation that was delivered, if that is to be done
// outside of passes, and asks what must be true. A pass follows in the same
// instant.
func (w *World) foldAlone(o provisioning.Observation) error {
	if w.config.FoldOnly == nil || w.inPass {
		return nil
	}
	if err := w.checkFolds(1); err != nil {
		return err
	}
	w.folds++
	if err := errors.Join(w.config.FoldOnly(w.Driver, w.Now()), w.check()); err != nil {
		return fmt.Errorf("folding %v of %s#%d: %w", o.Kind, o.Node, o.Attempt, err)
	}
	return nil
}

// checkFolds asks what must be true after each fold of what was delivered, but for
// the last so many. They are folded next and all at once.
func (w *World) checkFolds(but int) error {
	if w.config.FoldEach == nil {
		return nil
	}
	return w.config.FoldEach(w.Driver, w.Now(), but, func(state *provisioning.ClusterState) error {
		w.folds++
		return w.checkState(state)
	})
}

// Deliver delivers an observation, past the inbox.
func (w *World) Deliver(o provisioning.Observation) {
	w.Driver.Deliver(o)
	w.watch.asks(o.Attempt, o.Completion)
	w.delivered[o.Node] = append(w.delivered[o.Node], o)
	if o.Attempt <= w.watch.newest {
		w.heard[o.Node] = append(w.heard[o.Node], o)
	}
}

// deliverAll delivers what was answered: of one slot in the order in which it
// was, of different slots in the order of the world.
func (w *World) deliverAll() (bool, error) {
	answered := w.inbox
	w.inbox = nil
	switch w.config.Order {
	case NewestFirst:
		var slots []provisioning.LogicalNodeID
		for _, o := range answered {
			if !slices.Contains(slots, o.Node) {
				slots = append(slots, o.Node)
			}
		}
		slices.SortStableFunc(answered, func(a, b provisioning.Observation) int {
			return slices.Index(slots, b.Node) - slices.Index(slots, a.Node)
		})
	case AnyOrder:
		rank := make(map[provisioning.LogicalNodeID]uint64)
		for _, o := range answered {
			if _, ok := rank[o.Node]; !ok {
				rank[o.Node] = w.random.Uint64()
			}
		}
		slices.SortStableFunc(answered, func(a, b provisioning.Observation) int {
			if rank[a.Node] < rank[b.Node] {
				return -1
			} else if rank[a.Node] > rank[b.Node] {
				return 1
			}
			return 0
		})
	}
	for _, o := range answered {
		w.Deliver(o)
		if err := w.foldAlone(o); err != nil {
			return true, err
		}
	}
	return len(answered) > 0, nil
}

// runWork runs up to n pieces of work, in the order of the world.
func (w *World) runWork(n int) bool {
	ran := 0
	for ; ran < n && w.work.Len() > 0; ran++ {
		i := 0
		switch w.config.Order {
		case NewestFirst:
			i = w.work.Len() - 1
		case AnyOrder:
			i = w.random.IntN(w.work.Len())
		}
		w.work.Run(i)
	}
	return ran > 0
}

// maxRounds bounds what may happen in one instant. It is far above what any
// cluster of a trace needs.
const maxRounds = 5000

// answer lets the provider do and say what is due now, and delivers it.
func (w *World) answer() (bool, error) {
	w.Fake.AdvanceTo(w.Fake.Now())
	worked := w.runWork(maxRounds)
	delivered, err := w.deliverAll()
	return delivered || worked, err
}

// pass runs one pass if one is queued, and asks what must be true after it.
func (w *World) pass() (bool, error) {
	if err := w.checkFolds(0); err != nil {
		return false, err
	}
	w.working = w.wish
	before := w.halted
	w.halted = w.Driver.Paused()
	ran, broken, err := w.driveNext()
	switch {
	case err != nil || !ran:
		w.halted = before
		return ran, err
	case broken: // whole at every moment, if not done
		w.held.unsure = true
		return true, w.check()
	}
	return true, w.checkAfterPass()
}

// errBroken is what the executor panics with.
var errBroken = errors.New("trace: the executor is broken")

// driveNext is DriveNext, fenced against the panic of a BreakPass.
func (w *World) driveNext() (ran, broken bool, err error) {
	w.inPass = true
	defer func() {
		w.inPass = false
		if cause := recover(); cause == any(errBroken) {
			ran, broken = true, true
			w.say("   the pass broke")
			// What was recorded and not submitted ends at its deadline.
			maps.Copy(w.watch.submitted, w.watch.dispatched)
		} else if cause != nil {
			panic(cause)
		}
	}()
	ran, err = w.Driver.DriveNext(w.Now(), w.submits)
	return ran, false, err
}

// maybeBreak is called at the start of each call of the executor by a pass.
func (w *World) maybeBreak() {
	if w.breaking > 0 {
		if w.breaking--; w.breaking == 0 {
			panic(errBroken)
		}
	}
}

// Drive goes on until nothing is left to do now.
func (w *World) Drive() error {
	for range maxRounds {
		answered, err := w.answer()
		if err != nil {
			return err
		}
		w.Driver.TriggerIfDue(w.Now())
		passes := 0
		for ; passes < maxRounds; passes++ {
			ran, err := w.pass()
			if err != nil {
				return err
			}
			if !ran {
				break
			}
			if w.config.Order == AtOnce {
				answered = true // within Submit
			}
		}
		if due, ok := w.Fake.NextDue(); passes == 0 && !answered && w.work.Len() == 0 && (!ok || due.After(w.Fake.Now())) {
			return w.checkAtRest()
		}
	}
	return invariant.Wrong("the cluster to come to rest", fmt.Sprintf("it going on after %d rounds in one instant", maxRounds))
}

// nextDue returns when something is next to happen by itself, in provider time.
func (w *World) nextDue() (time.Time, bool) {
	due, ok := w.Fake.NextDue()
	if requeue, stored := w.Driver.RequeueAt(); stored {
		if at := requeue.Add(w.setBack); !ok || at.Before(due) {
			due, ok = at, true
		}
	}
	return due, ok
}

// Through moves the time by d and drives now, at each due moment on the way and
// at the end.
func (w *World) Through(d time.Duration) error {
	if err := w.Drive(); err != nil {
		return err
	}
	target := w.Fake.Now().Add(d)
	for range maxRounds {
		next := target
		if due, ok := w.nextDue(); ok && due.Before(next) {
			next = due
		}
		w.Fake.AdvanceTo(next)
		if err := w.Drive(); err != nil {
			return err
		}
		if !next.Before(target) {
			return nil
		}
	}
	return invariant.Wrong(fmt.Sprintf("%v to pass", d), fmt.Sprintf("%d due moments in them and no end", maxRounds))
}

// Close lets what hangs end and ends the executor. No goroutine is left.
func (w *World) Close() error {
	for {
		w.Fake.Close()
		if !w.runWork(maxRounds) {
			break
		}
	}
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	return errors.Join(w.Executor.Close(ctx), invariant.AwaitGoroutines(w.goroutines))
}
