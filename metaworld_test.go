package provisioning_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
	"github.com/swactor/provisioning/internal/trace"
)

// This file is a world for tests that play one story twice and compare: what
// drives can be exchanged, what is delivered can be tampered with, and of each
// slot it keeps a story that says nothing about its name and its numbers.

// mwDriver is what drives: the driver of the library, or the naive one.
type mwDriver interface {
	UpdateDesired(provisioning.ClusterShape) error
	Deliver(provisioning.Observation)
	Trigger()
	Pause()
	Resume()
	TriggerIfDue(time.Time) bool
	DriveNext(time.Time, provisioning.EffectExecutor) (bool, error)
	RequeueAt() (time.Time, bool)
	Snapshot() *provisioning.ClusterState
	Converged(uint64) bool
}

// mwHow is how a world goes about it. The zero value is the plain way: all work
// runs, oldest first, then all that was answered is delivered, then passes run
// until none is left.
type mwHow struct {
	naive bool
	// roundTrip: after each pass another driver goes on from the state as it
	// comes back from JSON.
	roundTrip bool
	// extra: after each pass and each piece of work, and whenever time is
	// about to move, so many passes that nobody needs.
	extra int
	// storm: before time moves, the driver is asked and driven many times, at
	// the same and at slightly later moments.
	storm bool
	// inline: calls run and answer within Submit.
	inline bool
	newest bool // newest work first
	atOnce int  // so many calls, then what they answered is delivered; 0: all
	apart  bool // each observation is delivered alone, and driven
	bare   bool // stories do not tell the last word of a bootstrap
	// deliver, if not nil, tampers with what is delivered together.
	deliver func(w *mwWorld, together []provisioning.Observation) []provisioning.Observation
}

type mwWorld struct {
	t      require.TestingT
	how    mwHow
	class  fakebackend.Class
	manual bool // bootstraps report nothing by themselves
	config provisioning.Config
	shape  provisioning.ClusterShape // the accepted one

	fake     *fakebackend.Backend
	work     *fakebackend.Work
	executor *provisioning.Executor
	submits  provisioning.EffectExecutor
	driver   mwDriver
	start    time.Time

	inbox   []provisioning.Observation // answered, not yet delivered
	losing  map[provisioning.LogicalNodeID]int
	told    map[string]bool
	history map[provisioning.LogicalNodeID][]provisioning.Observation

	attempts map[provisioning.LogicalNodeID][]provisioning.NodeAttemptID
	stories  map[provisioning.LogicalNodeID][]string
	built    map[provisioning.NodeAttemptID]provisioning.LogicalNodeSpec // what was bought for it
	effects  []string                                                    // in their order, with all names and numbers
	states   []string                                                    // at each rest
	driven   bool                                                        // nothing was left to do at this moment
	tampered int                                                         // how often how was of any consequence
}

// mwRounds bounds what may happen in one instant, or until the end.
const mwRounds = 5000

func mwNew(t require.TestingT, fake fakebackend.Config, config provisioning.Config, shape provisioning.ClusterShape, how mwHow) *mwWorld {
	w := &mwWorld{t: t, how: how, class: fake.Class, manual: fake.ManualBootstrap, config: config, shape: shape,
		fake: fakebackend.New(fake), losing: map[provisioning.LogicalNodeID]int{}, told: map[string]bool{},
		history:  map[provisioning.LogicalNodeID][]provisioning.Observation{},
		attempts: map[provisioning.LogicalNodeID][]provisioning.NodeAttemptID{}, stories: map[provisioning.LogicalNodeID][]string{},
		built: map[provisioning.NodeAttemptID]provisioning.LogicalNodeSpec{}}
	w.start, w.work = w.fake.Now(), w.fake.NewWork()
	var err error
	w.executor, err = provisioning.NewExecutor(w.fake, provisioning.ExecutorConfig{Deliver: w.take, Go: w.work.Go})
	require.NoError(t, err)
	w.submits = w.fake.Refusing(w.executor)
	if how.naive {
		w.driver = provisioning.NewNaiveDriver(shape, config)
		return w
	}
	w.driver, err = provisioning.NewClusterDriver(shape, config)
	require.NoError(t, err)
	return w
}

// close lets what hangs end.
func (w *mwWorld) close() {
	for {
		w.fake.Close()
		if w.work.RunAll() == 0 {
			break
		}
	}
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	require.NoError(w.t, w.executor.Close(ctx))
}

// wish offers the groups under the next generation.
func (w *mwWorld) wish(groups []provisioning.NodeGroupSpec) {
	next := provisioning.ClusterShape{RunID: w.shape.RunID, Generation: w.shape.Generation + 1, Groups: groups}
	require.NoError(w.t, w.driver.UpdateDesired(next))
	w.shape = next
}

// take is the executor's Deliver, for results and for what bootstraps report.
func (w *mwWorld) take(o provisioning.Observation) {
	if o.Kind != provisioning.OperationCompleted {
		if o.Kind == provisioning.SwactorJoined {
			w.told[mwJoin(o)] = true
		}
		if w.losing[o.Node] > 0 {
			w.losing[o.Node]--
			return
		}
	}
	if w.how.inline {
		w.deliver(o)
		return
	}
	w.inbox = append(w.inbox, o)
}

func mwJoin(o provisioning.Observation) string { return "join of " + string(o.Session) }

// deliver delivers what comes together.
func (w *mwWorld) deliver(together ...provisioning.Observation) {
	for _, o := range together {
		w.history[o.Node] = append(w.history[o.Node], o)
	}
	if w.how.deliver != nil {
		together = w.how.deliver(w, together)
	}
	for _, o := range together {
		w.driver.Deliver(o)
		if w.how.apart && len(together) > 1 {
			w.tampered++
			w.passes()
		}
	}
}

// drive goes on until nothing is left to do now.
func (w *mwWorld) drive() {
	for range mwRounds {
		w.fake.AdvanceTo(w.fake.Now())
		worked := w.runWork()
		answered := w.inbox
		w.inbox = nil
		if len(answered) > 0 {
			w.deliver(answered...)
		}
		w.driver.TriggerIfDue(w.fake.Now())
		passed := w.passes()
		due, waits := w.fake.NextDue()
		if !worked && len(answered) == 0 && !passed && w.work.Len() == 0 && (!waits || due.After(w.fake.Now())) {
			w.driven = true
			return
		}
	}
	require.Fail(w.t, "it goes on and on in one instant")
}

func (w *mwWorld) runWork() bool {
	ran := 0
	for ; w.work.Len() > 0 && (w.how.atOnce == 0 || ran < w.how.atOnce); ran++ {
		if w.how.newest {
			w.tampered += min(1, w.work.Len()-1)
			w.work.RunLast()
		} else {
			w.work.RunNext()
		}
		w.needless()
	}
	if w.work.Len() > 0 {
		w.tampered++
	}
	return ran > 0
}

// needless runs passes that nobody needs.
func (w *mwWorld) needless() {
	for range w.how.extra {
		w.driver.Trigger()
		require.True(w.t, w.pass())
		w.tampered++
	}
}

// passes runs passes until none is left.
func (w *mwWorld) passes() (any bool) {
	for n := 0; w.pass(); n++ {
		any = true
		require.Less(w.t, n, mwRounds, "the passes do not come to rest")
		w.needless()
	}
	return any
}

// pass runs one pass and reports whether there may be another one to run.
func (w *mwWorld) pass() bool {
	before, submitted := "", len(w.effects)
	if w.how.roundTrip {
		before = w.state()
	}
	ran, err := w.driver.DriveNext(w.fake.Now(), mwExecutor{w.submits, w})
	require.NoError(w.t, err)
	if !ran {
		return false
	}
	state := w.driver.Snapshot()
	for n := range state.All() {
		if of := w.attempts[n.Record.Node]; len(of) == 0 || of[len(of)-1] != n.Attempt {
			w.attempts[n.Record.Node] = append(of, n.Attempt)
		}
	}
	if !w.how.roundTrip {
		return true
	}
	// A driver that has just begun always has a pass to run, so what is asked
	// is whether this one came to anything.
	if w.state() == before && len(w.effects) == submitted {
		return false
	}
	text, err := json.Marshal(state)
	require.NoError(w.t, err)
	back := new(provisioning.ClusterState)
	require.NoError(w.t, json.Unmarshal(text, back))
	w.driver, err = provisioning.NewDriverFrom(back, w.shape, w.config)
	require.NoError(w.t, err)
	w.tampered++
	return true
}

// mwExecutor writes down what is submitted.
type mwExecutor struct {
	provisioning.EffectExecutor
	w *mwWorld
}

func (x mwExecutor) Submit(e provisioning.Effect) (bool, error) {
	w := x.w
	since := func(t time.Time) time.Duration {
		if t.IsZero() {
			return -1
		}
		return t.Sub(w.start)
	}
	line := fmt.Sprintf("/%d %v at %v until %v, adopt only %v, %d sent, the last at %v, image %q", e.Operation.Sequence, e.Kind,
		since(e.DispatchedAt), since(e.Deadline), e.AdoptOnly, e.CreatesSent, since(e.LastCreateAt), e.Spec().Shape.Image)
	w.effects = append(w.effects, fmt.Sprintf("%s#%d%s", e.Key.Node, e.Key.Attempt, line))
	w.tell(e.Key.Node, fmt.Sprintf("#%d%s", w.ordinal(e.Key.Node, e.Key.Attempt), line))
	if e.Kind == provisioning.CreateLease {
		if spec, again := w.built[e.Key.Attempt]; again {
			require.Equal(w.t, spec, e.Spec(), "every create of an attempt asks for the same (B2)")
		}
		w.built[e.Key.Attempt] = e.Spec()
	}
	queued, err := x.EffectExecutor.Submit(e)
	if w.how.inline {
		w.tampered += w.work.RunAll()
	}
	return queued, err
}

func (w *mwWorld) tell(slot provisioning.LogicalNodeID, line string) {
	w.stories[slot] = append(w.stories[slot], line)
}

// ordinal is the number of an attempt among those of its slot, from 1; 0 if it
// has not begun.
func (w *mwWorld) ordinal(slot provisioning.LogicalNodeID, attempt provisioning.NodeAttemptID) int {
	return slices.Index(w.attempts[slot], attempt) + 1
}

// moveTo moves the time.
func (w *mwWorld) moveTo(target time.Time) {
	if !target.After(w.fake.Now()) {
		return
	}
	if w.how.storm && w.driven {
		w.storm(target)
	}
	w.fake.AdvanceTo(target)
	w.driven = false
	w.driver.TriggerIfDue(w.fake.Now())
}

// storm asks and drives, many times at this moment and at moments shortly
// after it, before anything is due.
func (w *mwWorld) storm(target time.Time) {
	if due, waits := w.nextDue(); waits && due.Before(target) {
		target = due
	}
	at := w.fake.Now()
	for i := range 12 {
		if i > 4 {
			if at = at.Add(time.Nanosecond); !at.Before(target) {
				return
			}
		}
		require.False(w.t, w.driver.TriggerIfDue(at), "nothing is due")
		if i%2 == 0 {
			w.driver.Trigger()
		}
		ran, err := w.driver.DriveNext(at, mwExecutor{w.submits, w})
		require.NoError(w.t, err)
		require.Equal(w.t, i%2 == 0, ran)
		w.tampered++
	}
}

// nextDue returns when something is next to happen by itself.
func (w *mwWorld) nextDue() (time.Time, bool) {
	due, waits := w.fake.NextDue()
	if at, stored := w.driver.RequeueAt(); stored && (!waits || at.Before(due)) {
		return at, true
	}
	return due, waits
}

// through lets d pass and drives at each due moment on the way and at the end.
func (w *mwWorld) through(d time.Duration) {
	w.drive()
	target := w.fake.Now().Add(d)
	for range mwRounds {
		next := target
		if due, waits := w.nextDue(); waits && due.Before(next) {
			next = due
		}
		w.moveTo(next)
		w.drive()
		if !next.Before(target) {
			return
		}
	}
	require.Fail(w.t, "too many due moments")
}

// settle stops the trouble and drives until the wish is fulfilled and the
// provider has nothing left to do.
func (w *mwWorld) settle() {
	w.fake.ClearScripts()
	clear(w.losing)
	w.driver.Resume()
	w.driver.Trigger()
	for range mwRounds {
		w.release()
		w.drive()
		if w.report() {
			continue
		}
		if _, busy := w.fake.NextDue(); !busy && w.driver.Converged(w.shape.Generation) {
			require.NoError(w.t, w.driver.Snapshot().Check())
			return
		}
		next, waits := w.nextDue()
		require.True(w.t, waits, "it has not converged and waits for nothing: %s", w.state())
		w.moveTo(next)
	}
	require.Fail(w.t, "it never converges", w.state())
}

// release lets all hanging calls return.
func (w *mwWorld) release() {
	for n := range w.driver.Snapshot().All() {
		for kind := provisioning.CreateLease; kind <= provisioning.DestroyLease; kind++ {
			for w.fake.Hanging(n.Record.Node, kind) > 0 {
				require.NoError(w.t, w.fake.Release(n.Record.Node, kind, fakebackend.OK()))
			}
		}
	}
}

// report lets the provider say, once each, what nobody has heard yet: the join
// of a session and then its close, and that a machine is gone.
func (w *mwWorld) report() bool {
	var news []provisioning.Observation
	once := func(name string, o provisioning.Observation) bool {
		if w.told[name] {
			return false
		}
		w.told[name] = true
		news = append(news, o)
		return true
	}
	live := map[provisioning.ProviderLeaseID]bool{}
	for _, m := range w.fake.Machines() {
		live[m.Lease] = true
		o := provisioning.Observation{Kind: provisioning.SwactorJoined, Node: m.Key.Node, Attempt: m.Key.Attempt,
			Session: w.fake.SessionID(m.Key), Swactor: fakebackend.SwactorID(m.Key)}
		if !w.manual || !w.fake.SessionLive(m.Key) || once(mwJoin(o), o) {
			continue
		}
		o.Kind, o.Swactor = provisioning.BootstrapClosed, ""
		once("close of "+string(o.Session), o)
	}
	for n := range w.driver.Snapshot().All() {
		if lease := n.Record.Lease; lease != "" && !live[lease] {
			once("loss of "+string(lease), provisioning.Observation{Kind: provisioning.NodeLost, Node: n.Record.Node, Attempt: n.Attempt})
		}
	}
	if len(news) > 0 {
		w.deliver(news...)
	}
	return len(news) > 0
}

// state is all there is in the state but for the generation and what is held
// until a session is known, of which a copy makes no difference.
func (w *mwWorld) state() string {
	s := w.driver.Snapshot()
	var nodes []provisioning.ManagedNode
	for n := range s.All() {
		n.Held = nil
		nodes = append(nodes, n)
	}
	return fmt.Sprintf("next attempt %d, %s", s.NextAttemptID, ptJSON(nodes))
}

// rest writes down how all is. It is called when nothing is left to do.
func (w *mwWorld) rest(moment string) {
	require.NoError(w.t, w.driver.Snapshot().Check())
	require.NoError(w.t, invariant.Machines(w.class, w.fake.Machines()))
	w.states = append(w.states, moment+": "+w.state())
	s := w.driver.Snapshot()
	for slot := range w.attempts { // each has its own story: no order shows
		line := moment + ": nothing"
		if n, there := s.Node(slot); there {
			line = moment + ": " + w.anonymous(n)
		}
		var machines []string
		for _, m := range w.fake.Machines() {
			if m.Key.Node == slot {
				machines = append(machines, fmt.Sprintf("#%d at %v, dead %v", w.ordinal(slot, m.Key.Attempt), m.CreatedAt.Sub(w.start), m.Dead))
			}
		}
		w.tell(slot, fmt.Sprintf("%s, machines %v", line, machines))
	}
}

// anonymous is a node without its name, and with the number of its attempt
// among those of its slot.
func (w *mwWorld) anonymous(n provisioning.ManagedNode) string {
	slot, ordinal := n.Record.Node, w.ordinal(n.Record.Node, n.Attempt)
	names := strings.NewReplacer( // in ids, addresses and reasons
		fmt.Sprintf("/%s/%s/%d", w.shape.RunID, slot, n.Attempt), fmt.Sprintf("/slot/%d", ordinal),
		provisioning.ExternalKey{Run: w.shape.RunID, Node: slot, Attempt: n.Attempt}.Token(), "key",
		string(slot), "slot")
	n.Attempt, n.Held = provisioning.NodeAttemptID(ordinal), nil
	n.Record.Node, n.Record.Group, n.Record.Index = "", "", 0
	if w.how.bare {
		n.Record.Bootstrap = provisioning.BootstrapFacts{Session: n.Record.Bootstrap.Session}
	}
	spec := &n.Record.Spec
	spec.Node, spec.GroupID, spec.Index, spec.SwarmJoin.ExpectedLogicalNodeID = "", "", 0, ""
	spec.Shape = rsPlain(provisioning.NodeGroupSpec{Shape: spec.Shape}).Shape // -0 is 0
	if n.Pending != nil {
		pending := *n.Pending
		pending.ID.Attempt = n.Attempt
		n.Pending = &pending
	}
	return names.Replace(ptJSON(n))
}

// mwEnd is the world in the end.
type mwEnd struct {
	Slots    map[provisioning.LogicalNodeID]string // spec, stage, ready
	Machines map[provisioning.LogicalNodeID]int
}

// end wants that every machine is one on record, or of an attempt that is and at
// a provider that makes twins, and says what there is.
func (w *mwWorld) end() mwEnd {
	s := w.driver.Snapshot()
	e := mwEnd{map[provisioning.LogicalNodeID]string{}, map[provisioning.LogicalNodeID]int{}}
	for n := range s.All() {
		e.Slots[n.Record.Node] = fmt.Sprintf("%s %v %v ready=%v", ptJSON(n.Record.Spec), n.Intent, n.Record.Stage, n.Record.Ready)
	}
	for _, m := range w.fake.Machines() {
		n, there := s.Node(m.Key.Node)
		require.True(w.t, there && n.Attempt == m.Key.Attempt, "%s is left behind", m.Lease)
		if n.Record.Lease == m.Lease && !m.Dead {
			e.Machines[m.Key.Node]++
		} else {
			require.Equal(w.t, fakebackend.Label, w.class, "%s beside %s", m.Lease, n.Record.Lease)
		}
	}
	return e
}

// event makes what an Event step of a trace delivers, about exactly that slot.
func (w *mwWorld) event(s trace.Step, slot provisioning.LogicalNodeID) (provisioning.Observation, bool) {
	of := w.attempts[slot]
	var attempt provisioning.NodeAttemptID
	switch {
	case s.Age < 0: // never to be: which slot will have the next number is no part of what is compared
		attempt = w.driver.Snapshot().NextAttemptID + 1<<20
	case s.Age < len(of):
		attempt = of[len(of)-1-s.Age]
	default:
		return provisioning.Observation{}, false
	}
	key := provisioning.ExternalKey{Run: w.shape.RunID, Node: slot, Attempt: attempt}
	o := provisioning.Observation{Kind: s.Event.Kind, Node: slot, Attempt: attempt, Session: w.fake.SessionID(key), Stage: s.Event.Stage}
	if s.DeadSession {
		o.Session = "session/that/never/was"
	}
	switch o.Kind {
	case provisioning.SwactorJoined:
		o.Swactor = cmp.Or(s.Event.Agent, fakebackend.SwactorID(key))
		if w.fake.SessionLive(key) {
			w.told[mwJoin(o)] = true
		}
	case provisioning.NodeLost:
		o.Session = ""
	}
	return o, true
}
