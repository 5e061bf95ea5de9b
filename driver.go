package provisioning

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/swactor/provisioning/internal/pqueue"
)

// Config configures a [ClusterDriver]. The zero Config is ready for use.
type Config struct {
	// Retry is the policy of every group; GroupRetry replaces it for the
	// groups it names.
	Retry      RetryPolicy
	GroupRetry map[NodeGroupID]RetryPolicy
	// MaxInFlight caps the operations in flight. 0 means no cap. It counts
	// recorded operations: a call that outlives its deadline gives its place
	// back, and one that waits for such a call of its own attempt takes none.
	MaxInFlight int
	// MaxNodes caps the slots of a shape. 0 means [DefaultMaxNodes].
	MaxNodes int
	// FirstAttempt is the first attempt to be given out. 0 means 1. Set it
	// above every attempt of an earlier life to use that life's RunID again.
	FirstAttempt NodeAttemptID
	// ValidateGroup, if not nil, judges every group of a shape that is
	// offered, beside the library: see [GroupValidator], from which a [Host]
	// takes it. No lock is held.
	ValidateGroup func(group NodeGroupSpec) []ShapeFault
	// OnEvent is told what the driver does, in order, one event at a time,
	// from the goroutine that caused it or, if that one finds another event
	// being told, from the goroutine that tells it. It may call the driver;
	// within a pass DriveNext answers [ErrReentrantPass]. A panic in it is
	// fenced and counted. nil costs nothing.
	OnEvent func(Event)
	// Journal, if not nil, is written what [Replay] needs to repeat this
	// driver's life, one write before a pass and one after it, from the
	// goroutine of the pass and with no lock held. It holds whatever shapes,
	// observations and error texts hold, secrets included; join tokens are
	// only references (B9). See [ClusterDriver.JournalErr] for its errors.
	// nil costs nothing.
	Journal io.Writer
}

// Errors of the driver.
var (
	// ErrInvalidConfig: a field of Config or HostConfig is out of range.
	ErrInvalidConfig = errors.New("provisioning: invalid configuration")
	// ErrReentrantPass: a pass runs already, perhaps further up this stack.
	ErrReentrantPass = errors.New("provisioning: a pass is already running")
	// ErrClockExhausted: now, or now plus the longest configured wait, is a
	// moment the driver's clock cannot express (1900 to 2191). Nothing was
	// folded and nothing decided.
	ErrClockExhausted = errors.New("provisioning: the clock is out of range")
	// ErrUnknownSlot: there is no such slot, or it has not begun.
	ErrUnknownSlot = errors.New("provisioning: there is no such slot")
	// ErrNotQuiescent: passes kept making further passes necessary all by
	// themselves. It is a fault of this library.
	ErrNotQuiescent = errors.New("provisioning: passes do not come to rest")
)

// ClusterDriver is the only writer of a cluster's observed state. It folds what
// is delivered, decides, records each operation before it submits it, and knows
// when it wants to be called again.
//
// All methods are safe for concurrent use at any time, also from within an
// executor's Submit and from OnEvent. Passes run one at a time.
type ClusterDriver struct {
	config   Config
	maxNodes int
	longest  time.Duration // no fold or dispatch adds more to now

	// in guards what other goroutines bring and ask for.
	in        sync.Mutex
	clock     driverClock
	inbox     *inbox
	delivered uint64   // observations, ever
	accepted  *Desired // the latest wish
	draining  bool     // and it is the last one
	paused    bool     // growth is to stop
	triggered bool     // a pass is queued, by somebody
	dirty     bool     // a pass is queued, by the last pass itself
	running   bool
	requeueAt instant
	seen      progress
	executor  EffectExecutor // of the last pass, to ask what still runs

	// world guards the state. Only the goroutine of the pass writes, and
	// only with the lock; so it alone may read without.
	world  sync.Mutex
	state  *ClusterState
	census census // of a snapshot that is being taken

	// Of the pass.
	folding   *inbox   // what is being folded
	taken     uint64   // of delivered, up to and with folding
	folded    uint64   // of delivered
	wish      *Desired // accepted when the pass began
	working   *Desired // the wish that the state is compared with
	deadlines *pqueue.Queue[*node]
	hot       []*node // to be decided in the next pass
	missing   []slot  // desired slots that are not in the state
	pause     pause
	capacity  capacity
	pass      uint64
	ownDirt   bool // this pass needs another one
	spareHot  []*node
	steps     []step
	effects   []dispatch
	over      []NodeAttemptID // of which the executor has not heard
	settled   int             // nodes that are as wished, ready, with nothing pending
	ready     int             // of those that the wish has
	held      int             // nodes that hold a machine, or may
	idle      int             // groups that nobody wishes for and that hold nothing
	notes     []Event
	times     eventTimes // nil without a hook
	journal   *journal   // nil: none is kept
	events    eventQueue
	stats     DriverStats
}

// marks and standing are what the driver keeps on a node. They are no part of
// the state. There are two of them because standing fits where node has a gap.
type marks struct {
	wakesAt      instant // in deadlines, if deadlineAt is not 0
	leftOutSince uint64  // the pass in which it was first left out
	deadlineAt   int32
	placeInClass int32
	placeInAge   int32
	census       uint32 // the last census that has counted it
}

type standing struct {
	hot        bool // to be decided in the next pass
	settled    bool // counted in ClusterDriver.settled
	counted    bool // counted in ClusterDriver.ready
	costs      bool // counted in ClusterDriver.held
	holdsPlace bool
	class      placeClass
}

// groupWish is what the working wish and the configuration say about a group.
type groupWish struct {
	want   desiredGroup
	policy *RetryPolicy
}

// slot is a place in a group that may have no node.
type slot struct {
	group *nodeGroup
	index int
}

func (s slot) compare(other slot) int {
	return cmp.Or(cmp.Compare(s.group.rank, other.group.rank), cmp.Compare(s.index, other.index))
}

// progress is what the last pass left, for readers.
type progress struct {
	folded    uint64 // of what was ever delivered
	observed  uint64
	converged bool
	ready     int
	desired   int
}

// DriverStats counts since the driver was made.
type DriverStats struct {
	Passes     uint64
	Folded     uint64 // observations applied
	NotApplied uint64 // observations that changed nothing
	Dispatched uint64 // operations submitted, refused ones included
	Refused    uint64 // submissions that the executor refused
	Expired    uint64 // operations whose deadline came first
	Attempts   uint64 // attempts begun
	HookPanics uint64 // panics of OnEvent
}

// NewClusterDriver returns a driver for shape, which is judged like an update.
// Nothing runs until the first pass. The error is an [ErrInvalidConfig], a
// [*PolicyError] or a [*ShapeError].
func NewClusterDriver(shape ClusterShape, config Config) (*ClusterDriver, error) {
	first := max(config.FirstAttempt, 1)
	state := &ClusterState{NextAttemptID: first}
	d, err := newDriverFrom(state, shape, config)
	if err == nil && config.Journal != nil {
		d.journal = newJournal(&journalWriter{out: config.Journal}, d, shape)
	}
	return d, err
}

// newDriverFrom returns a driver that goes on from a state, which it owns from
// now on.
func newDriverFrom(state *ClusterState, shape ClusterShape, config Config) (*ClusterDriver, error) {
	config, err := config.judged()
	if err != nil {
		return nil, err
	}
	desired, err := expand(shape, config.MaxNodes, config.groupFaults(shape)...)
	if err != nil {
		return nil, err
	}
	return newDriverOn(state, desired, config), nil
}

// newDriverOn is newDriverFrom for what has been judged.
func newDriverOn(state *ClusterState, desired *Desired, config Config) *ClusterDriver {
	d := &ClusterDriver{
		config: config, maxNodes: config.MaxNodes, longest: config.Retry.longestWait(),
		accepted: desired, triggered: true, state: state,
		working:   &Desired{run: desired.run},
		deadlines: pqueue.New(func(a, b *node) bool { return a.wakesAt < b.wakesAt }, func(n *node) *int32 { return &n.deadlineAt }),
		capacity:  newCapacity(config.MaxInFlight),
		census:    census{stretch: censusStretch},
		inbox:     &inbox{},
		folding:   &inbox{},
		events:    eventQueue{hook: config.OnEvent},
	}
	state.NextAttemptID = max(state.NextAttemptID, 1) // 0 is no attempt; a state that holds nothing may say so
	if config.OnEvent != nil {
		d.times = make(eventTimes)
	}
	for _, policy := range config.GroupRetry {
		d.longest = max(d.longest, policy.longestWait())
	}
	for _, g := range state.groups {
		g.wish.policy = d.policyOf(g.id)
	}
	for n := range state.inOrder() {
		d.heat(n)
		if n.pending != NoOperation {
			d.capacity.take(n)
		}
	}
	return d
}

func (c Config) judged() (Config, error) {
	var faults []error
	if c.MaxInFlight < 0 || c.MaxInFlight > math.MaxInt32 {
		faults = append(faults, fmt.Errorf("%w: MaxInFlight is %d", ErrInvalidConfig, c.MaxInFlight))
	}
	if c.MaxNodes < 0 || c.MaxNodes > maxIndex {
		faults = append(faults, fmt.Errorf("%w: MaxNodes is %d, must be 0 to %d", ErrInvalidConfig, c.MaxNodes, maxIndex))
	}
	setDefault(&c.MaxNodes, DefaultMaxNodes)
	faults = append(faults, c.Retry.Validate())
	c.Retry = c.Retry.withDefaults()
	c.GroupRetry = maps.Clone(c.GroupRetry)
	for _, group := range slices.Sorted(maps.Keys(c.GroupRetry)) {
		if err := c.GroupRetry[group].Validate(); err != nil {
			faults = append(faults, fmt.Errorf("group %q: %w", group, err))
		}
		c.GroupRetry[group] = c.GroupRetry[group].withDefaults()
	}
	return c, errors.Join(faults...)
}

// groupFaults returns what ValidateGroup finds wrong with a shape.
func (c *Config) groupFaults(shape ClusterShape) []ShapeFault {
	if c.ValidateGroup == nil {
		return nil
	}
	var faults []ShapeFault
	for i, group := range shape.Groups {
		for _, fault := range c.ValidateGroup(group) {
			fault.Group, fault.Position = group.GroupID, i
			faults = append(faults, fault)
		}
	}
	return faults
}

func (d *ClusterDriver) policyOf(group NodeGroupID) *RetryPolicy {
	if policy, ok := d.config.GroupRetry[group]; ok {
		return &policy
	}
	return &d.config.Retry
}

// UpdateDesired offers a new wish and queues a pass. It is refused, and nothing
// changes, with [ErrRunChanged], [ErrGenerationRegressed], a [*ShapeError] or
// [ErrGenerationReused], looked for in this order, and with [ErrDraining] after
// Drain. The wish that is in force already is welcome again. A pass that
// runs goes on with the wish it began with.
func (d *ClusterDriver) UpdateDesired(shape ClusterShape) error {
	return d.offer(shape, d.config.groupFaults(shape))
}

// offer takes the faults that ValidateGroup has found.
func (d *ClusterDriver) offer(shape ClusterShape, faults []ShapeFault) error {
	var line *journalOffer
	if d.journal != nil {
		line = &journalOffer{Shape: shapeText(shape), Faults: faults}
	}
	d.in.Lock()
	err := ErrDraining
	if !d.draining {
		err = d.accept(shape, faults...)
	}
	d.addOffer(shape, err)
	if d.journal != nil {
		d.journal.offer(line, err)
	}
	d.in.Unlock()
	d.events.handOut()
	return err
}

// Drain accepts an empty wish, under the next generation, as the last one, and
// queues a pass: from now on UpdateDesired answers [ErrDraining]. A second time it
// does nothing. All is gone once Converged says so of [ClusterDriver.Generation].
// An error would be a fault of this library.
func (d *ClusterDriver) Drain() error {
	d.in.Lock()
	if d.draining {
		d.in.Unlock()
		return nil
	}
	nothing := ClusterShape{RunID: d.accepted.run, Generation: d.accepted.generation}
	if nothing.Generation < math.MaxUint64 { // the largest is for nothing already
		nothing.Generation++
	}
	err := d.accept(nothing)
	d.draining = err == nil
	d.addOffer(nothing, err)
	if d.journal != nil {
		d.journal.offer(&journalOffer{Drain: true}, err)
	}
	d.in.Unlock()
	d.events.handOut()
	return err
}

func (d *ClusterDriver) isDraining() bool {
	d.in.Lock()
	defer d.in.Unlock()
	return d.draining
}

// accept makes shape the latest wish, if it may be. The caller holds in.
func (d *ClusterDriver) accept(shape ClusterShape, found ...ShapeFault) error {
	next, err := d.accepted.succeed(shape, d.maxNodes, found...)
	if err != nil {
		return err
	}
	d.accepted, d.triggered = next, true
	return nil
}

// addOffer has it told what came of an offer. The caller holds in.
func (d *ClusterDriver) addOffer(shape ClusterShape, err error) {
	e := Event{Kind: EventUpdateAccepted, At: d.clock.tick.time(), Generation: shape.Generation}
	if err != nil {
		e.Kind, e.Err = EventUpdateRefused, err
	}
	d.events.add(e)
}

// Deliver takes an observation, which the next pass folds, and queues a pass.
func (d *ClusterDriver) Deliver(o Observation) {
	d.in.Lock()
	d.inbox.put(&o)
	d.delivered++
	d.triggered = true
	d.in.Unlock()
}

// deliveries returns how many observations have been delivered so far.
func (d *ClusterDriver) deliveries() uint64 {
	d.in.Lock()
	defer d.in.Unlock()
	return d.delivered
}

// hasFolded reports whether the first so many observations that were delivered
// have been folded, and what follows from them is published.
func (d *ClusterDriver) hasFolded(deliveries uint64) bool {
	d.in.Lock()
	defer d.in.Unlock()
	return d.seen.folded >= deliveries
}

// Replace ends the attempt that a slot has now, on purpose, and queues a pass:
// what it holds is cleaned up and a fresh attempt follows. It counts as a failure
// of the attempt, so the next one waits as it does after any other, and the reason
// is kept as why it failed.
//
// It returns the attempt that it has named. By the time the pass folds it that
// attempt may be over, or be given up already; then it changes nothing. So asking
// twice does no harm, and whoever must not hit a later attempt when asking again
// delivers a [ReplaceRequested] with the attempt they mean. The error is
// [ErrUnknownSlot].
func (d *ClusterDriver) Replace(id LogicalNodeID, reason string) (NodeAttemptID, error) {
	d.world.Lock()
	n := d.state.find(id)
	var attempt NodeAttemptID
	if n != nil {
		attempt = n.attempt
	}
	d.world.Unlock()
	if n == nil {
		return 0, fmt.Errorf("%w: %s", ErrUnknownSlot, id)
	}
	d.Deliver(Observation{Kind: ReplaceRequested, Node: id, Attempt: attempt, Reason: reason})
	return attempt, nil
}

// Trigger queues a pass. Any number of triggers make one.
func (d *ClusterDriver) Trigger() {
	d.in.Lock()
	d.triggered = true
	d.in.Unlock()
}

// TriggerIfDue queues a pass if RequeueAt has come and reports whether it did.
// Like a pass it feeds the driver's clock, by which the events of updates and
// pauses are dated: whoever cares when those were calls it right before them.
func (d *ClusterDriver) TriggerIfDue(now time.Time) bool {
	d.in.Lock()
	defer d.in.Unlock()
	tick, err := d.feed(now)
	if err != nil { // the pass that this queues will say so
		d.triggered = true
		return true
	}
	if d.journal != nil {
		d.journal.due(tick)
	}
	due := d.requeueAt.due(tick)
	d.triggered = d.triggered || due
	return due
}

// feed gives the clock what now is. The caller holds in.
func (d *ClusterDriver) feed(now time.Time) (instant, error) {
	if now == d.clock.last && d.clock.tick != 0 { // a burst of passes at one moment
		return d.clock.tick, nil
	}
	tick, err := d.clock.read(now, d.longest)
	if err == nil {
		d.clock.feed(now, tick)
	}
	return tick, err
}

// RequeueAt returns when the next stored deadline wants a pass, in the time of
// whoever drives; false if there is none. It may be past by now.
func (d *ClusterDriver) RequeueAt() (time.Time, bool) {
	d.in.Lock()
	defer d.in.Unlock()
	if d.requeueAt == 0 {
		return time.Time{}, false
	}
	return d.clock.last.Add(time.Duration(d.requeueAt - d.clock.tick)), true
}

// Clock returns what now is in the driver's own clock, in which all stored
// times are. That clock starts at the first now it is given and then adds up
// the steps forward: setting the host's clock back stops it, and lengthens no
// wait.
func (d *ClusterDriver) Clock(now time.Time) time.Time { return d.tickAt(now).time() }

func (d *ClusterDriver) tickAt(now time.Time) instant {
	d.in.Lock()
	defer d.in.Unlock()
	tick, err := d.clock.read(now, 0)
	if err != nil {
		return max(d.clock.tick, nearestInstant(now))
	}
	return tick
}

// Generation returns the generation of the accepted wish.
func (d *ClusterDriver) Generation() uint64 {
	d.in.Lock()
	defer d.in.Unlock()
	return d.accepted.generation
}

// ObservedGeneration returns the generation that a pass last evaluated. It says
// nothing about readiness; see Converged.
func (d *ClusterDriver) ObservedGeneration() uint64 {
	d.in.Lock()
	defer d.in.Unlock()
	return d.seen.observed
}

// Converged reports whether the last pass found the wish of that generation,
// and no later one, fulfilled: every desired slot holds the exact spec, ready,
// Active, with nothing pending, and there is no other slot.
func (d *ClusterDriver) Converged(generation uint64) bool {
	d.in.Lock()
	defer d.in.Unlock()
	return d.seen.converged && d.seen.observed == generation && d.accepted.generation == generation
}

// Progress returns how many desired slots the last pass found ready with the
// exact spec, and how many are desired.
func (d *ClusterDriver) Progress() (ready, desired int) {
	d.in.Lock()
	defer d.in.Unlock()
	return d.seen.ready, d.seen.desired
}

// Stats returns what has been counted.
func (d *ClusterDriver) Stats() DriverStats {
	d.world.Lock()
	s := d.stats
	d.world.Unlock()
	s.HookPanics = d.events.hookPanics()
	return s
}

// Snapshot returns a copy of the observed state.
func (d *ClusterDriver) Snapshot() *ClusterState { return d.census.take(d) }

// Node returns a copy of one node.
func (d *ClusterDriver) Node(id LogicalNodeID) (ManagedNode, bool) {
	d.world.Lock()
	defer d.world.Unlock()
	return d.state.Node(id)
}

// isReady reports whether a slot is wished for, and whether it is ready with the
// exact spec of the latest wish.
func (d *ClusterDriver) isReady(id LogicalNodeID) (wished, ready bool) {
	d.in.Lock()
	wish := d.accepted
	d.in.Unlock()
	want := wish.find(id)
	if want == nil {
		return false, false
	}
	d.world.Lock()
	defer d.world.Unlock()
	n := d.state.find(id)
	return true, n != nil && n.ready && sameTemplate(n.template, want)
}

// Plan returns what Decide says now about the state as it is and the latest
// wish. It changes nothing. What was delivered and not yet folded does not
// count, nor do deadlines of operations and stages, MaxInFlight, and a pause.
func (d *ClusterDriver) Plan(now time.Time) Plan {
	tick := d.tickAt(now)
	d.in.Lock()
	wish := d.accepted
	d.in.Unlock()
	d.world.Lock()
	defer d.world.Unlock()
	return Decide(d.state, wish, tick.time())
}

// DriveNext runs one pass if one is queued or a deadline is due, and reports
// whether it did. The errors are [ErrReentrantPass] and [ErrClockExhausted];
// after either, nothing has changed.
func (d *ClusterDriver) DriveNext(now time.Time, executor EffectExecutor) (bool, error) {
	outcome, err := d.drive(now, executor)
	return outcome.ran, err
}

// maxOwnPasses bounds the passes in a row that nothing but the driver's own
// transitions asked for. The longest such chain is begin-delete,
// mark-destroyed, restart, create.
const maxOwnPasses = 64

// DriveUntilBlocked runs passes until none is queued and no deadline is due,
// and returns how many it ran. Beside the errors of DriveNext there is
// [ErrNotQuiescent]. While observations never pause it does not end, and all of
// it happens at one now; [Host] calls for one pass at a time.
func (d *ClusterDriver) DriveUntilBlocked(now time.Time, executor EffectExecutor) (int, error) {
	var own ownPasses
	for passes := 0; ; {
		outcome, err := d.drive(now, executor)
		if err != nil || !outcome.ran {
			return passes, err
		}
		passes++
		if err := own.count(outcome.ownDoing); err != nil || !outcome.again {
			return passes, err
		}
	}
}

// passOutcome is what came of asking for a pass.
type passOutcome struct {
	ran      bool
	ownDoing bool // nothing but the driver's own transitions had asked for it
	again    bool // another one is queued
}

// ownPasses counts the passes in a row that nothing but the driver's own
// transitions asked for.
type ownPasses int

func (n *ownPasses) count(ownDoing bool) error {
	if !ownDoing {
		*n = 0
		return nil
	}
	if *n++; *n > maxOwnPasses {
		return ErrNotQuiescent
	}
	return nil
}

// drive runs one pass at now.
func (d *ClusterDriver) drive(now time.Time, executor EffectExecutor) (passOutcome, error) {
	return d.driveAt(&now, executor)
}

// driveAt runs one pass, in seven steps, all at one now; nil is the last now
// that the clock was fed.
func (d *ClusterDriver) driveAt(now *time.Time, executor EffectExecutor) (outcome passOutcome, err error) {
	at, ownDoing, err := d.begin(now, executor)
	if err != nil || at == 0 {
		return passOutcome{}, err
	}
	if d.journal != nil {
		executor = journalledExecutor{executor, d.journal}
	}
	whole := false
	defer func() { outcome = passOutcome{ran: true, ownDoing: ownDoing, again: d.end(whole)} }()
	if d.journal != nil {
		d.journal.begin(d, at, false)
	}

	d.world.Lock()
	d.stats.Passes++
	d.takeWish()
	d.takePause(at)
	d.foldInbox(at) // 1. fold what was delivered, in order
	d.heatDue(at)
	slices.SortFunc(d.hot, compareNodes)
	for _, n := range d.hot { // 2. expire operations that are out of time
		if n.pending != NoOperation && n.pendingDeadline.due(at) {
			d.world.Unlock()
			completion := executor.Expire(n.pendingID())
			d.world.Lock()
			d.foldExpired(n, completion, at)
		}
	}
	for _, n := range d.hot { // 3. end attempts that are out of time
		if n.stageOverdue(at) && !d.isHeld(n) {
			before := d.outline(n)
			n.foldStageDeadline(n.group.wish.policy, at)
			d.noteChanges(n, before, at)
		}
	}
	steps := d.decideHot(at)      // 4.
	effects := d.apply(steps, at) // 5. record, then submit
	d.world.Unlock()
	d.tellSoFar()
	for len(d.over) > 0 { // those of a pass that broke off here first
		attempt := d.over[0]
		if d.over = d.over[1:]; len(d.over) == 0 {
			d.over = nil
		}
		executor.Retire(attempt)
	}
	for len(effects) > 0 {
		effects = d.submit(effects, executor, at)
	}

	if d.state.ObservedGeneration != d.working.generation { // 6. of the wish this pass worked on
		d.world.Lock()
		d.state.ObservedGeneration = d.working.generation
		d.world.Unlock()
	}
	if d.events.hook != nil {
		d.note(Event{Kind: EventPass, At: at.time(), Generation: d.working.generation})
		d.flush()
	}
	whole = true
	return outcome, nil // 7. is in end
}

// tellSoFar publishes what has come of the cluster and hands out the events of
// the pass so far: who hears of a loss must not find the cluster converged.
func (d *ClusterDriver) tellSoFar() {
	if d.events.hook == nil {
		return
	}
	d.in.Lock()
	d.publish()
	d.in.Unlock()
	d.flush()
}

// begin claims the pass and takes what was brought. It returns 0 if there is
// no pass to run.
func (d *ClusterDriver) begin(now *time.Time, executor EffectExecutor) (at instant, ownDoing bool, err error) {
	d.in.Lock()
	defer d.in.Unlock()
	if executor == nil {
		return 0, false, fmt.Errorf("%w: no executor", ErrInvalidConfig)
	}
	if d.running {
		return 0, false, ErrReentrantPass
	}
	if now == nil {
		now = &d.clock.last
	}
	if at, err = d.feed(*now); err != nil {
		return 0, false, err
	}
	asked := d.triggered || d.requeueAt.due(at)
	if !asked && !d.dirty {
		d.journalIdly()
		return 0, false, nil
	}
	d.running, d.triggered, d.dirty = true, false, false
	d.takeInbox()
	d.wish, d.executor, d.pause.asked = d.accepted, executor, d.paused
	return at, !asked, nil
}

// takeInbox takes what was delivered to the pass, behind what an earlier one has
// taken and did not come to fold. The caller holds in.
func (d *ClusterDriver) takeInbox() {
	if d.folding.len() > 0 {
		d.inbox.pourInto(d.folding)
	} else {
		d.inbox, d.folding = d.folding, d.inbox
	}
	d.taken = d.delivered
	if d.journal != nil {
		d.journal.take()
	}
}

// journalIdly writes down what was offered and refused, although there is no
// pass to take it: it would pile up. The caller holds in, which is let go
// meanwhile.
func (d *ClusterDriver) journalIdly() {
	if d.journal == nil || len(d.journal.waiting) == 0 {
		return
	}
	d.running = true
	d.journal.take()
	d.in.Unlock()
	defer func() {
		d.in.Lock()
		d.running = false
	}()
	d.journal.addTaken()
	d.journal.sink.flush()
}

// end lets the next pass begin and recomputes RequeueAt, with the deadlines of
// what was just recorded. It runs also when the executor panicked or ended the
// goroutine: the state is whole at every moment, an operation that was recorded
// and not submitted ends at its deadline, and another pass picks up the rest.
// It reports whether another pass is queued.
func (d *ClusterDriver) end(whole bool) (again bool) {
	empty(&d.spareHot)
	empty(&d.steps)
	empty(&d.effects)
	var requeueAt instant
	if n, ok := d.deadlines.Min(); ok {
		requeueAt = n.wakesAt
	}
	defer func() { again = d.unclaim(whole, requeueAt) }() // also if the journal's writer ends the goroutine
	if d.journal != nil {
		d.journal.end(d, whole, requeueAt)
	}
	return false
}

// unclaim is the part of end that others can see.
func (d *ClusterDriver) unclaim(whole bool, requeueAt instant) (again bool) {
	d.in.Lock()
	defer d.in.Unlock()
	d.running = false
	d.inbox.borrow(d.folding)
	d.triggered = d.triggered || !whole
	d.dirty, d.ownDirt = d.ownDirt, false
	d.requeueAt = requeueAt
	d.publish()
	return d.triggered || d.dirty
}

// publish says what has come of the cluster. The caller holds in.
func (d *ClusterDriver) publish() {
	d.seen = progress{folded: d.folded, observed: d.state.ObservedGeneration, ready: d.ready, desired: d.working.slots,
		converged: d.settled == d.working.slots && d.settled == d.state.Len()}
}

// maxSpare is how many elements of a work list are kept for the next pass.
const maxSpare = 4096

// wipe lets go of what a work list held, but for a handful: clearing those in
// every pass would cost more than they weigh.
func wipe[T any](list []T) {
	if len(list) > handful {
		clear(list[handful:])
	}
}

const handful = 16

// empty makes a work list empty, and keeps little room and little alive.
func empty[T any](list *[]T) {
	if cap(*list) > maxSpare {
		*list = nil
	}
	wipe(*list)
	*list = (*list)[:0] // as this, and not as a result, it writes no pointer
}

// foldOnly folds what was delivered and takes no action, for a host that stops.
func (d *ClusterDriver) foldOnly(now time.Time) error { return d.foldOnlyAt(&now) }

// foldOnlyAt is foldOnly; nil is the last now that the clock was fed.
func (d *ClusterDriver) foldOnlyAt(now *time.Time) error {
	d.in.Lock()
	if d.running {
		d.in.Unlock()
		return ErrReentrantPass
	}
	if now == nil {
		now = &d.clock.last
	}
	at, err := d.feed(*now)
	if err != nil {
		d.in.Unlock()
		return err
	}
	d.running = true
	d.takeInbox()
	d.in.Unlock()
	defer d.end(false)
	if d.journal != nil {
		d.journal.begin(d, at, true)
	}

	d.world.Lock()
	d.foldInbox(at)
	for _, n := range d.hot { // no longer converged or ready, perhaps
		d.settle(n, decide(n, n.group.wish.want.wants(int(n.index)), at), at)
	}
	d.world.Unlock()
	d.flush()
	return nil
}

// takeWish makes the accepted wish the working one. It costs what differs.
func (d *ClusterDriver) takeWish() {
	if d.wish == d.working {
		return
	}
	d.state.addGroups(d.wish.groupIDs())
	d.idle = 0
	for _, g := range d.state.groups {
		if g.wish.policy == nil {
			g.wish.policy = d.policyOf(g.id)
		}
		old, want := g.wish.want, desiredGroup{id: g.id}
		if wished := d.wish.group(g.id); wished != nil {
			want = *wished
		}
		g.wish.want = want
		from, to := min(old.count, want.count), max(old.count, want.count)
		if !sameTemplate(old.template, want.template) {
			from = 0
		}
		for index := from; index < to; index++ {
			if n := g.at(index); n != nil {
				d.heat(n)
			} else if index < want.count {
				d.missing = append(d.missing, slot{g, index})
			} else {
				d.pause.forget(slot{g, index})
			}
		}
		d.countIdle(g)
	}
	d.working = d.wish // the groups that are idle now go when the pass has applied its steps
}

// countIdle counts a group that nobody wishes for any more and that holds nothing.
func (d *ClusterDriver) countIdle(g *nodeGroup) {
	if g.idle() {
		d.idle++
	}
}

// dropIdleGroups forgets idle groups once they are one in sixteen: it looks at
// all of them.
func (d *ClusterDriver) dropIdleGroups() {
	if d.idle > 0 && d.idle >= len(d.state.groups)/16 {
		d.state.dropIdleGroups()
		d.idle = 0
	}
}

// heat puts a node among those that the next deciding looks at. The law: for
// every other node the ladder gives no action.
func (d *ClusterDriver) heat(n *node) {
	if !n.hot {
		n.hot = true
		d.hot = append(d.hot, n)
	}
}

// heatDue heats every node one of whose deadlines has come.
func (d *ClusterDriver) heatDue(at instant) {
	for {
		n, ok := d.deadlines.Min()
		if !ok || !n.wakesAt.due(at) {
			return
		}
		d.deadlines.Remove(n)
		d.heat(n)
	}
}

func (d *ClusterDriver) foldInbox(at instant) {
	for i, block := range d.folding.blocks {
		for j := range block {
			d.foldDelivered(&block[j], at)
		}
		d.folding.release(i) // a million of them weigh as much as a third of the state
	}
	d.folding.empty()
	d.folded = d.taken
}

func (d *ClusterDriver) foldDelivered(o *Observation, at instant) {
	n := d.state.find(o.Node)
	reason := UnknownNode
	if n != nil {
		before := d.outline(n)
		reason = n.fold(o, n.group.wish.policy, at)
		if reason == "" {
			d.applied(n, o, before, false, at)
			return
		}
	}
	d.stats.NotApplied++
	if d.events.hook != nil {
		e := eventOf(EventNotApplied, o, at)
		e.Reason = string(reason)
		d.note(e)
	}
}

// foldExpired folds what the executor says of an operation that is out of time.
func (d *ClusterDriver) foldExpired(n *node, c Completion, at instant) {
	if c.Operation != n.pendingID() {
		c = Completion{Class: ClassAmbiguous, Message: "the executor does not know the operation"}
	}
	c.Operation, c.Kind = n.pendingID(), n.pending
	d.stats.Expired++
	d.foldOwn(n, c, true, at)
}

// foldOwn folds a completion that did not have to be delivered.
func (d *ClusterDriver) foldOwn(n *node, c Completion, expired bool, at instant) {
	o := Observation{Kind: OperationCompleted, Node: n.id, Attempt: n.attempt, Completion: c}
	before := d.outline(n)
	n.fold(&o, n.group.wish.policy, at)
	d.applied(n, &o, before, expired, at)
}

func (d *ClusterDriver) applied(n *node, o *Observation, before outline, expired bool, at instant) {
	d.stats.Folded++
	d.heat(n)
	if n.pending == NoOperation {
		d.capacity.giveBack(n)
	}
	if d.events.hook != nil {
		e := eventOf(EventFold, o, at)
		e.Expired = expired
		d.note(e)
	}
	d.noteChanges(n, before, at)
}

// step is an action on its way from deciding to applying.
type step struct {
	slot
	node    *node // nil for an insert
	attempt NodeAttemptID
	decision
	begins NodeAttemptID // the attempt that an insert or restart begins
}

func compareSteps(a, b step) int { return a.slot.compare(b.slot) }

// decideHot decides the hot slots, and of those waiting for a place as many as
// there are places. What gets hot from here on is for the next pass.
func (d *ClusterDriver) decideHot(at instant) []step {
	hot, missing := d.hot, d.missing
	d.hot, d.missing = d.spareHot[:0], nil
	d.spareHot = hot
	d.pass++
	for _, n := range hot {
		n.hot = false
	}
	if len(missing) > 0 {
		missing = slices.DeleteFunc(missing, func(s slot) bool { // no longer missing, or no longer missed
			return s.group.at(s.index) != nil || s.group.wish.want.wants(s.index) == nil
		})
		slices.SortFunc(missing, slot.compare)
		missing = slices.Compact(missing)
	}

	attempts := allocator{next: d.state.NextAttemptID}
	steps := slices.Grow(d.steps[:0], len(hot)+len(missing))
	for len(hot) > 0 || len(missing) > 0 {
		var s step
		if len(missing) == 0 || len(hot) > 0 && hot[0].slot().compare(missing[0]) < 0 {
			s.node, s.slot, s.attempt, hot = hot[0], hot[0].slot(), hot[0].attempt, hot[1:]
		} else {
			s.slot, missing = missing[0], missing[1:]
		}
		want := s.group.wish.want.wants(s.index)
		s.decision = decide(s.node, want, at)
		if d.pause.halted && s.grows(s.node, want) {
			if s.node == nil {
				d.holdBackSlot(s.slot)
				continue
			}
			d.capacity.forget(s.node)
			d.settle(s.node, s.decision, at)
			continue
		}
		if s.action == Insert || s.action == Restart {
			s.begins, s.fault = attempts.take()
		}
		waitsForPlace := s.action == Dispatch && s.fault == nil && d.capacity.limit > 0
		if s.node != nil {
			if waitsForPlace {
				d.capacity.want(s.node, d.pass)
			} else {
				d.capacity.forget(s.node)
			}
			if s.action == NoAction || s.fault != nil || waitsForPlace { // else when the step is applied
				d.settle(s.node, s.decision, at)
			}
		}
		if s.action != NoAction && !waitsForPlace {
			steps = append(steps, s)
		}
	}
	if d.capacity.limit > 0 {
		steps = d.appendPlaced(steps, at)
		slices.SortFunc(steps, compareSteps)
	}
	d.steps = steps
	return steps
}

// appendPlaced adds the dispatches of the nodes that get a place.
func (d *ClusterDriver) appendPlaced(steps []step, at instant) []step {
	for _, n := range d.capacity.choose() {
		steps = append(steps, step{slot: n.slot(), node: n, attempt: n.attempt,
			decision: decide(n, n.group.wish.want.wants(int(n.index)), at)})
	}
	return steps
}

// dispatch is a recorded operation on its way to the executor.
type dispatch struct {
	node   *node
	before creates
}

// apply takes the steps: driver transitions at once, dispatches are recorded
// and returned to be submitted.
func (d *ClusterDriver) apply(steps []step, at instant) []dispatch {
	effects := slices.Grow(d.effects[:0], len(steps))
	for i := range steps {
		s := &steps[i]
		n := s.node
		if n != nil && n.attempt != s.attempt { // decided for an attempt that is over
			d.ownDirt = true
			d.heat(n)
			continue
		}
		if s.fault != nil {
			d.applyFault(s, at)
			continue
		}
		var before outline
		if n != nil {
			before = d.outline(n)
		}
		switch s.action {
		case Insert:
			n = newNode(NewLogicalNodeID(s.group.id, s.index), s.index, s.group.wish.want.template, s.begins)
			n.marks.census = d.census.number // born too late for the one that is being taken
			if d.journal != nil {
				d.journal.touch(n)
			}
			d.state.add(s.group, n)
			d.begun(n, at)
		case Restart:
			n.restart(s.group.wish.want.template, s.begins)
			d.begun(n, at)
		case BeginDelete:
			n.beginDelete()
			d.note(Event{Kind: EventDeleting, At: at.time(), Node: n.id, Attempt: n.attempt, Reason: n.failedReason})
		case MarkDestroyed:
			n.markDestroyed(at)
			d.over = append(d.over, n.attempt)
			d.note(Event{Kind: EventDestroyed, At: at.time(), Node: n.id, Attempt: n.attempt})
		case Reap:
			d.deadlines.Remove(n) // it counts for nothing any more and is in no other queue
			delete(d.pause.nodes, n)
			d.state.remove(n)
			d.countIdle(n.group)
			d.note(Event{Kind: EventReaped, At: at.time(), Node: n.id, Attempt: n.attempt})
			d.journalStep(n, s)
			continue // there is nothing left to look at again
		case Dispatch:
			effects = append(effects, d.record(n, s.decision, at))
			d.noteChanges(n, before, at)
			d.journalStep(n, s)
			continue
		}
		d.journalStep(n, s)
		d.ownDirt = true
		d.heat(n)
		d.noteChanges(n, before, at)
		d.settle(n, decide(n, s.group.wish.want.wants(s.index), at), at)
	}
	d.dropIdleGroups()
	d.effects = effects
	return effects
}

func (d *ClusterDriver) journalStep(n *node, s *step) {
	if d.journal != nil {
		d.journal.did(n, &s.decision)
	}
}

// applyFault reports a slot that cannot go on and looks at it again in the next
// pass. A growing attempt without operation numbers ends: those that are left
// are for its cleanup.
func (d *ClusterDriver) applyFault(s *step, at instant) {
	f := Fault{Rule: s.Rule, Err: s.fault}
	if n := s.node; n == nil {
		f.Node = NewLogicalNodeID(s.group.id, s.index)
		d.missing = append(d.missing, s.slot)
	} else {
		f.Node, f.Attempt = n.id, n.attempt
		d.heat(n)
		if errors.Is(s.fault, ErrSequenceExhausted) && n.growing() {
			before := d.outline(n)
			n.fail(s.fault.Error(), 0, s.group.wish.policy, at)
			d.ownDirt = true
			d.noteChanges(n, before, at)
			d.settle(n, decide(n, s.group.wish.want.wants(s.index), at), at)
		}
	}
	if d.journal != nil {
		d.journal.add(journalLine{Fault: &journalFault{Node: f.Node, Attempt: f.Attempt, Rule: f.Rule.String(), Error: f.Err.Error()}})
	}
	d.note(Event{Kind: EventFault, At: at.time(), Node: f.Node, Attempt: f.Attempt, Rule: f.Rule, Err: f.Err})
}

// begun counts an attempt that begins.
func (d *ClusterDriver) begun(n *node, at instant) {
	d.state.NextAttemptID = n.attempt + 1
	d.stats.Attempts++
	if d.events.hook != nil {
		d.note(Event{Kind: EventAttemptStarted, At: at.time(), Node: n.id, Attempt: n.attempt})
	}
}

// record puts a dispatch on record.
func (d *ClusterDriver) record(n *node, chosen decision, at instant) dispatch {
	before := n.record(chosen.operation, chosen.Number == ruleResolve, n.group.wish.policy, at)
	d.capacity.take(n)
	d.stats.Dispatched++
	if d.events.hook != nil {
		d.note(Event{Kind: EventDispatch, At: at.time(), Node: n.id, Attempt: n.attempt, Rule: chosen.Rule,
			Operation: n.pending, OperationID: n.pendingID()})
	}
	d.settle(n, decision{rule: &ladder[ruleAwaitOperation]}, at) // what else, right after a dispatch
	return dispatch{n, before}
}

// submit hands over what was recorded, in slot order. The places of refused and
// queued ones go to the next in line, which are recorded and returned.
func (d *ClusterDriver) submit(effects []dispatch, executor EffectExecutor, at instant) []dispatch {
	var refused []dispatch
	var answers []Completion
	var queued []*node
	whole := false
	defer func() {
		if !whole { // the executor broke off; what it has answered counts
			d.world.Lock()
			d.takeAnswers(refused, answers, queued, at)
			d.world.Unlock()
		}
	}()
	for _, e := range effects {
		behind, err := executor.Submit(e.node.effect(e.before, at))
		if err != nil {
			refused, answers = append(refused, e), append(answers, refusal(err))
		} else if behind {
			queued = append(queued, e.node)
		}
	}
	whole = true
	wipe(effects)
	if len(refused) == 0 && (len(queued) == 0 || d.capacity.limit == 0) {
		return nil
	}
	d.world.Lock()
	d.takeAnswers(refused, answers, queued, at)
	placed := d.appendPlaced(nil, at)
	slices.SortFunc(placed, compareSteps)
	next := d.apply(placed, at)
	d.world.Unlock()
	d.flush()
	return next
}

// refusal is what is folded of an effect that the executor has refused. It is made
// with no lock held: the error may be of the user's making.
func refusal(err error) Completion {
	return Completion{Class: ClassNotStarted, Message: "refused by the executor: " + err.Error(), RetryAfter: retryAfterOf(err)}
}

// takeAnswers folds the refusals of the executor and takes back the places of
// what it has queued.
func (d *ClusterDriver) takeAnswers(refused []dispatch, answers []Completion, queued []*node, at instant) {
	for i, e := range refused {
		n := e.node
		d.stats.Refused++
		answers[i].Operation, answers[i].Kind = n.pendingID(), n.pending
		d.foldOwn(n, answers[i], false, at)
		d.settle(n, decide(n, n.group.wish.want.wants(int(n.index)), at), at)
	}
	for _, n := range queued {
		d.capacity.giveBack(n)
	}
}

// settle brings up to date what the driver keeps about a node: whether a pause
// holds it back, when it wakes, and whether it counts as converged, ready and held.
func (d *ClusterDriver) settle(n *node, now decision, at instant) {
	want := n.group.wish.want.wants(int(n.index))
	held := d.pause.halted && now.grows(n, want)
	if held {
		d.holdBack(n, at)
	} else {
		d.letGo(n, at)
	}
	wake := now.wakeAt(n, at)
	if held {
		wake = n.wakeWhileHeld(at)
	}
	if wake == 0 {
		d.deadlines.Remove(n)
	} else if wake != n.wakesAt || n.deadlineAt == 0 {
		n.wakesAt = wake
		d.deadlines.Put(n)
	}
	d.settled += recount(&n.settled, now.Number == ruleSteady)
	d.ready += recount(&n.counted, n.ready && sameTemplate(n.template, want))
	d.held += recount(&n.costs, n.lease != "" || n.unresolved())
}

// recount sets a mark and returns how its count changes.
func recount(mark *bool, is bool) int {
	change := 0
	if is && !*mark {
		change = 1
	} else if !is && *mark {
		change = -1
	}
	*mark = is
	return change
}

func (n *node) slot() slot { return slot{n.group, int(n.index)} }

// outline is what events tell the difference of.
type outline struct {
	stage   Stage
	ready   bool
	givenUp OperationKind
}

// outline is called before anything of a node is changed, and once per change.
func (d *ClusterDriver) outline(n *node) outline {
	d.census.keep(n)
	if d.journal != nil {
		d.journal.touch(n)
	}
	return outline{n.stage, n.ready, n.givenUp}
}

func (d *ClusterDriver) noteChanges(n *node, before outline, at instant) {
	if d.events.hook == nil {
		return
	}
	e := Event{At: at.time(), Node: n.id, Attempt: n.attempt}
	tell := func(kind EventKind, operation OperationKind, reason string) {
		e := e
		e.Kind, e.Operation, e.Reason = kind, operation, reason
		d.note(e)
	}
	if n.stage != before.stage {
		e := e
		e.Kind, e.From, e.To = EventStage, before.stage, n.stage
		d.note(e)
	}
	if n.givenUp != NoOperation && before.givenUp == NoOperation {
		tell(EventGivenUp, n.givenUp, "it failed as often as CancelLimit allows; the machine is destroyed without it")
	}
	if n.stage == StageFailed && before.stage != StageFailed {
		tell(EventAttemptFailed, NoOperation, n.failedReason)
	}
	if n.ready && !before.ready {
		tell(EventReady, NoOperation, "")
	}
}

func (d *ClusterDriver) note(e Event) {
	if d.events.hook != nil {
		d.times.measure(&e)
		d.notes = append(d.notes, e)
	}
}

// flush hands out the events of the pass so far. No lock is held.
func (d *ClusterDriver) flush() {
	if len(d.notes) > 0 {
		notes := d.notes
		d.notes = nil
		d.events.add(notes...)
		d.events.handOut()
	}
}

// driverClock runs forward only. It starts at the first now it is fed and then
// adds up the steps forward, so that a step back lengthens no wait and fires
// nothing early.
type driverClock struct {
	tick instant // 0 before the first
	last time.Time
}

// read returns what now is in this clock, or ErrClockExhausted if now plus room
// is more than it can express.
func (c *driverClock) read(now time.Time, room time.Duration) (instant, error) {
	tick, ok := instantOf(now) // also later: a step back to year 1 and home again is more than a Duration
	if c.tick != 0 {
		tick = c.tick.plus(max(now.Sub(c.last), 0)) // on the monotonic reading, if both have one
	}
	if !ok || instant(room) >= maxInstant-tick {
		return 0, fmt.Errorf("%w: at %v with a longest wait of %v", ErrClockExhausted, now, room)
	}
	return tick, nil
}

func (c *driverClock) feed(now time.Time, tick instant) { c.tick, c.last = tick, now }
