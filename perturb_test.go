package provisioning_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/verify"
)

// The perturbations of Sieve (Sun et al., OSDI 2022): a controller is cut off
// in the middle of its work, decides on what is no longer so, or does not see
// what has happened. The world that it arrives at must be the same as without.

// puKind is a perturbation.
type puKind int

const (
	puNone puKind = iota
	// The process ends and another one goes on from the state last kept, with
	// an executor that knows nothing. Calls that run go on and nobody hears
	// of them.
	puEndsAfterDeciding  // nothing of the pass is kept
	puEndsAfterRecording // the operation is kept, and never submitted
	puEndsAfterSubmitting
	puEndsInFold   // some of what was delivered is kept, the rest is lost
	puEndsExpiring // between the executor's word and its fold
	// The pass ends and the process does not: the host fences a panic of its
	// executor and drives on.
	puCutOffRecording
	puCutOffSubmitting
	puCutOffExpiring
	// What is decided is decided on a state that is out of date: all that is
	// delivered, and the next wish, come while the pass submits.
	puStale
	// Everything that was ever delivered is delivered again.
	puReplayed
	// Observations are lost.
	puSkipped

	puKinds
)

var puNames = [...]string{"none", "ends after deciding", "ends after recording", "ends after submitting", "ends in a fold", "ends expiring",
	"cut off after recording", "cut off after submitting", "cut off expiring", "stale", "replayed", "skipped"}

func (k puKind) String() string { return puNames[k] }

// puPerturbation is what is done to a run, at the first chance from a pass on.
type puPerturbation struct {
	kind puKind
	pass int
	some int // of what is delivered: how many are folded; how many are skipped
}

// puPlan is a run: what goes wrong at the provider, and what is wished for when.
type puPlan struct {
	class   fakebackend.Class
	scripts map[provisioning.LogicalNodeID]map[provisioning.OperationKind][]string
	wishes  []puWish // the first is that of the constructor
	limit   int      // MaxInFlight
}

type puWish struct {
	after  time.Duration
	groups []provisioning.NodeGroupSpec
}

var puSlots = []provisioning.LogicalNodeID{"w-0", "w-1", "x-0"}

// puFinal is the world in the end.
type puFinal struct {
	Converged bool
	Slots     map[provisioning.LogicalNodeID]string // image, stage, ready
	Machines  map[provisioning.LogicalNodeID]int
}

// puRun is one run of a plan.
type puRun struct {
	t        require.TestingT
	plan     *puPlan
	cut      puPerturbation
	done     bool // the perturbation has happened
	fake     *fakebackend.Backend
	work     *fakebackend.Work
	inner    *provisioning.Executor
	driver   *provisioning.ClusterDriver
	shape    provisioning.ClusterShape
	inbox    []provisioning.Observation
	history  []provisioning.Observation
	life     int // of the process
	passes   int
	kept     []byte // the state, where the perturbation says
	ends     bool
	mostLive int
	started  time.Time
}

// puCutOff is the panic with which the perturbation ends a pass.
type puCutOff struct{}

func (r *puRun) config() provisioning.Config {
	return provisioning.Config{MaxInFlight: r.plan.limit, Retry: provisioning.RetryPolicy{
		OperationTimeout: 30 * time.Second, EndpointTimeout: 5 * time.Minute, BootstrapTimeout: 5 * time.Minute}}
}

func puPlay(t require.TestingT, plan *puPlan, cut puPerturbation) (puFinal, *puRun) {
	r := &puRun{t: t, plan: plan, cut: cut}
	config := fakebackend.Config{Class: plan.class}
	if plan.class == fakebackend.Label {
		config.Lag, config.Settle = 5*time.Second, 10*time.Second
	}
	r.fake = fakebackend.New(config)
	r.started = r.fake.Now()
	for _, slot := range puSlots {
		for kind := provisioning.CreateLease; kind <= provisioning.DestroyLease; kind++ {
			for _, text := range plan.scripts[slot][kind] {
				outcomes, err := fakebackend.ParseOutcome(text)
				require.NoError(t, err)
				r.fake.Script(slot, kind, outcomes...)
			}
		}
	}
	r.work = r.fake.NewWork()
	r.wish(0)
	driver, err := provisioning.NewClusterDriver(r.shape, r.config())
	require.NoError(t, err)
	r.driver = driver
	r.begin()
	next := 1
	for range 100_000 {
		r.drive()
		at, some := r.driver.RequeueAt()
		if due, ok := r.fake.NextDue(); ok && (!some || due.Before(at)) {
			at, some = due, true
		}
		if next < len(plan.wishes) && (!some || !at.Before(r.started.Add(plan.wishes[next].after))) {
			at, some = r.started.Add(plan.wishes[next].after), true
			r.fake.AdvanceTo(at)
			r.offer(next)
			next++
			continue
		}
		if !some {
			return r.final(), r
		}
		r.fake.AdvanceTo(at)
	}
	require.Fail(t, "it does not come to rest")
	return puFinal{}, r
}

func (r *puRun) wish(i int) {
	r.shape = provisioning.ClusterShape{RunID: "run", Generation: uint64(i + 1), Groups: r.plan.wishes[i].groups}
}

func (r *puRun) offer(i int) {
	r.wish(i)
	require.NoError(r.t, r.driver.UpdateDesired(r.shape))
}

// begin gives the process an executor.
func (r *puRun) begin() {
	r.life++
	life := r.life
	inner, err := provisioning.NewExecutor(r.fake, provisioning.ExecutorConfig{Go: r.work.Go, Deliver: func(o provisioning.Observation) {
		if r.life == life { // else nobody hears of it
			r.inbox = append(r.inbox, o)
		}
	}})
	require.NoError(r.t, err)
	r.inner = inner
}

// restart begins another process, from the state last kept.
func (r *puRun) restart() {
	state := new(provisioning.ClusterState)
	require.NoError(r.t, json.Unmarshal(r.kept, state))
	driver, err := provisioning.NewDriverFrom(state, r.shape, r.config())
	require.NoError(r.t, err)
	r.driver, r.inbox, r.ends = driver, nil, false
	r.begin()
}

func (r *puRun) keep() {
	kept, err := json.Marshal(r.driver.Snapshot())
	require.NoError(r.t, err)
	r.kept = kept
}

// drive goes on until nothing is left to do now.
func (r *puRun) drive() {
	for range 10_000 {
		r.fake.AdvanceTo(r.fake.Now())
		worked := r.work.RunAll()
		for _, slot := range puSlots {
			r.mostLive = max(r.mostLive, r.fake.Live(slot))
		}
		due := r.driver.TriggerIfDue(r.fake.Now())
		if r.turn() || due || worked > 0 {
			continue
		}
		if at, ok := r.fake.NextDue(); !ok || at.After(r.fake.Now()) {
			return
		}
	}
	require.Fail(r.t, "it goes on and on in one instant")
}

func (r *puRun) now() bool { return !r.done && r.passes >= r.cut.pass }

// turn delivers what there is and runs one pass, perturbed if its time has come.
func (r *puRun) turn() bool {
	arrived := r.inbox
	r.inbox = nil
	if r.now() {
		switch r.cut.kind {
		case puSkipped:
			if n := min(r.cut.some, len(arrived)); n > 0 {
				arrived, r.done = arrived[n:], true
			}
		case puReplayed:
			if len(r.history) > 0 {
				arrived, r.done = append(arrived, r.history...), true
			}
		case puEndsInFold:
			if len(arrived) > 0 {
				for _, o := range arrived[:min(r.cut.some, len(arrived))] {
					r.driver.Deliver(o)
				}
				require.NoError(r.t, r.driver.FoldOnly(r.fake.Now()))
				r.keep()
				r.done = true
				r.restart()
				return true
			}
		case puEndsAfterDeciding:
			r.keep()
			r.driver.Plan(r.fake.Now())
			r.done = true
			r.restart()
			return true
		}
	}
	r.history = append(r.history, arrived...)
	if r.now() && r.cut.kind == puStale && len(arrived) > 0 {
		r.driver.Trigger()
		ran := r.pass(&puExecutor{r: r, inbox: arrived})
		return ran
	}
	for _, o := range arrived {
		r.driver.Deliver(o)
	}
	return r.pass(&puExecutor{r: r})
}

// pass runs one pass, and fences the cut.
func (r *puRun) pass(x *puExecutor) (ran bool) {
	defer func() {
		if problem := recover(); problem != nil {
			if _, ok := problem.(puCutOff); !ok {
				panic(problem)
			}
			ran = true
			if r.ends {
				r.restart()
			}
		}
	}()
	ran, err := r.driver.DriveNext(r.fake.Now(), x)
	require.NoError(r.t, err)
	if ran {
		r.passes++
		require.NoError(r.t, r.driver.Snapshot().Check())
	}
	x.arrive() // at the latest
	return ran
}

// puExecutor stands between the driver and the executor.
type puExecutor struct {
	r     *puRun
	inbox []provisioning.Observation // to come in the middle of the pass
}

func (x *puExecutor) arrive() {
	for _, o := range x.inbox {
		x.r.driver.Deliver(o)
		x.r.done = true
	}
	x.inbox = nil
}

// cutOff ends the pass, and perhaps the process.
func (x *puExecutor) cutOff(ends bool) {
	x.r.keep()
	x.r.done, x.r.ends = true, ends
	panic(puCutOff{})
}

func (x *puExecutor) Submit(e provisioning.Effect) (bool, error) {
	r := x.r
	x.arrive()
	if r.now() && (r.cut.kind == puEndsAfterRecording || r.cut.kind == puCutOffRecording) {
		x.cutOff(r.cut.kind == puEndsAfterRecording)
	}
	queued, err := r.inner.Submit(e)
	if r.now() && (r.cut.kind == puEndsAfterSubmitting || r.cut.kind == puCutOffSubmitting) {
		x.cutOff(r.cut.kind == puEndsAfterSubmitting)
	}
	return queued, err
}

func (x *puExecutor) Expire(id provisioning.OperationID) provisioning.Completion {
	c := x.r.inner.Expire(id)
	if k := x.r.cut.kind; x.r.now() && (k == puEndsExpiring || k == puCutOffExpiring) {
		x.cutOff(k == puEndsExpiring)
	}
	return c
}

func (x *puExecutor) Retire(attempt provisioning.NodeAttemptID) { x.r.inner.Retire(attempt) }
func (x *puExecutor) Running() []provisioning.RunningCall       { return x.r.inner.Running() }

// final says what the world is like.
func (r *puRun) final() puFinal {
	f := puFinal{Converged: r.driver.Converged(r.shape.Generation), Slots: map[provisioning.LogicalNodeID]string{},
		Machines: map[provisioning.LogicalNodeID]int{}}
	for n := range r.driver.Snapshot().All() {
		f.Slots[n.Record.Node] = fmt.Sprintf("%s %v %v ready=%v", n.Record.Spec.Shape.Image, n.Intent, n.Record.Stage, n.Record.Ready)
	}
	for _, m := range r.fake.Machines() {
		f.Machines[m.Key.Node]++
	}
	return f
}

// puHolds plays a plan with and without a perturbation and compares the ends.
// It reports whether there was a chance for it.
func puHolds(t require.TestingT, plan *puPlan, cut puPerturbation) bool {
	want, _ := puPlay(t, plan, puPerturbation{})
	return puHoldsTo(t, want, plan, cut)
}

func puHoldsTo(t require.TestingT, want puFinal, plan *puPlan, cut puPerturbation) bool {
	require.True(t, want.Converged)
	got, run := puPlay(t, plan, cut)
	require.Equal(t, want, got, "%v in pass %d", cut.kind, cut.pass)
	require.LessOrEqual(t, run.mostLive, 1, "machines of one slot at a time")
	return run.done
}

func puGroup(id provisioning.NodeGroupID, count int, image string) provisioning.NodeGroupSpec {
	return provisioning.NodeGroupSpec{GroupID: id, Count: count, Shape: provisioning.NodeShape{Image: image}}
}

// puPlans are plans in which everything happens at least once.
func puPlans() []*puPlan {
	type scripts = map[provisioning.LogicalNodeID]map[provisioning.OperationKind][]string
	grow := puWish{0, []provisioning.NodeGroupSpec{puGroup("w", 2, "v1"), puGroup("x", 1, "v1")}}
	replace := puWish{10 * time.Minute, []provisioning.NodeGroupSpec{puGroup("w", 1, "v2"), puGroup("x", 1, "v1")}}
	again := puWish{10*time.Minute + time.Second, []provisioning.NodeGroupSpec{puGroup("w", 2, "v2")}}
	return []*puPlan{
		{class: fakebackend.Token, wishes: []puWish{grow, replace, again}},
		{class: fakebackend.Token, limit: 1, wishes: []puWish{grow, replace}, scripts: scripts{
			"w-0": {provisioning.CreateLease: {"done-ambiguous"}, provisioning.StartBootstrap: {"done-slow=40s"}, provisioning.DestroyLease: {"ambiguous"}},
			"w-1": {provisioning.CreateLease: {"late=70s", "ambiguous"}, provisioning.CancelBootstrap: {"definite"}},
			"x-0": {provisioning.CreateLease: {"ok-no-endpoint"}, provisioning.LookupEndpoint: {"not-ready", "done-slow=50s"}, provisioning.BootstrapConvergenceObserved: {"ambiguous"}},
		}},
		{class: fakebackend.Name, wishes: []puWish{grow, replace, again}, scripts: scripts{
			"w-0": {provisioning.CreateLease: {"done-slow=45s"}, provisioning.StartBootstrap: {"definite"}, provisioning.DestroyLease: {"done-slow=45s", "definite"}},
			"w-1": {provisioning.CreateLease: {"dead", "done-panic"}, provisioning.BootstrapConvergenceObserved: {"definite"}},
		}},
		{class: fakebackend.Label, wishes: []puWish{grow, replace}, scripts: scripts{
			"w-0": {provisioning.CreateLease: {"done-ambiguous", "refuse"}}, "x-0": {provisioning.StartBootstrap: {"done-ambiguous", "ambiguous"}},
		}},
	}
}

// TestPerturbedAtEveryPass cuts every pass of some runs in every way, once a
// run.
func TestPerturbedAtEveryPass(t *testing.T) {
	runs := 0
	happened := map[puKind]int{}
	for i, plan := range puPlans() {
		want, unperturbed := puPlay(t, plan, puPerturbation{})
		for kind := puNone + 1; kind < puKinds; kind++ {
			for pass := range unperturbed.passes {
				cut := puPerturbation{kind: kind, pass: pass, some: 1 + pass%2}
				if puHoldsTo(t, want, plan, cut) {
					happened[kind]++
				}
				runs++
				if t.Failed() {
					t.Fatalf("plan %d: %+v", i, cut)
				}
			}
		}
	}
	for kind := puNone + 1; kind < puKinds; kind++ {
		require.Positive(t, happened[kind], "%v never happened", kind)
	}
	verify.AtLeast(t, "runs perturbed at every pass, all ending in the same world", runs, 1000)
	verify.Exactly(t, "kinds of perturbation that happened", len(happened), int(puKinds)-1)
}

// TestProp_G7PerturbedRunsEndAlike: wherever a run is cut off, and whatever it
// did not see or saw too late, it ends in the world in which it would have
// ended.
func TestProp_G7PerturbedRunsEndAlike(t *testing.T) {
	runs, happened := 0, 0
	outcomes := map[provisioning.OperationKind][]string{
		provisioning.CreateLease: {"ok", "ok-no-endpoint", "definite", "capacity", "retry-after=20s", "error", "ambiguous", "done-ambiguous",
			"done-error", "done-slow=40s", "late=50s", "panic", "done-panic", "dead"},
		provisioning.LookupEndpoint:               {"ok", "not-ready", "definite", "ambiguous", "done-slow=40s", "panic", "lost"},
		provisioning.StartBootstrap:               {"ok", "definite", "ambiguous", "done-ambiguous", "done-slow=40s", "done-error", "panic", "lost"},
		provisioning.BootstrapConvergenceObserved: {"ok", "definite", "ambiguous", "done-ambiguous", "done-slow=40s", "lost"},
		provisioning.CancelBootstrap:              {"ok", "definite", "ambiguous", "done-ambiguous", "done-slow=40s"},
		provisioning.DestroyLease:                 {"ok", "definite", "ambiguous", "done-ambiguous", "done-slow=40s", "done-error"},
	}
	rapid.Check(t, func(t *rapid.T) {
		plan := &puPlan{class: fakebackend.Class(rapid.IntRange(0, 2).Draw(t, "class")), limit: rapid.IntRange(0, 2).Draw(t, "MaxInFlight"),
			scripts: map[provisioning.LogicalNodeID]map[provisioning.OperationKind][]string{}}
		for _, slot := range puSlots {
			plan.scripts[slot] = map[provisioning.OperationKind][]string{}
			for kind := provisioning.CreateLease; kind <= provisioning.DestroyLease; kind++ {
				for _, text := range rapid.SliceOfN(rapid.SampledFrom(outcomes[kind]), 0, 3).Draw(t, fmt.Sprintf("%s %v", slot, kind)) {
					if plan.class != fakebackend.Label || !strings.HasPrefix(text, "late") {
						plan.scripts[slot][kind] = append(plan.scripts[slot][kind], text)
					}
				}
			}
		}
		at := time.Duration(0)
		for range rapid.IntRange(1, 4).Draw(t, "wishes") {
			plan.wishes = append(plan.wishes, puWish{at, []provisioning.NodeGroupSpec{
				puGroup("w", rapid.IntRange(0, 2).Draw(t, "w"), rapid.SampledFrom([]string{"v1", "v2"}).Draw(t, "image")),
				puGroup("x", rapid.IntRange(0, 1).Draw(t, "x"), "v1")}})
			at += time.Duration(rapid.IntRange(1, 400).Draw(t, "seconds")) * time.Second
		}
		cut := puPerturbation{kind: puKind(rapid.IntRange(1, int(puKinds)-1).Draw(t, "kind")), pass: rapid.IntRange(0, 40).Draw(t, "pass"),
			some: rapid.IntRange(1, 3).Draw(t, "some")}
		if puHolds(t, plan, cut) {
			happened++
		}
		runs++
	})
	verify.AtLeast(t, "random runs", runs, verify.Target(20_000, 0))
	verify.AtLeast(t, "random runs perturbed, all ending in the same world", happened, max(verify.Target(10_000, 0), runs/3))
}
