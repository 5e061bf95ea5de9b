package provisioning

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var dtStart = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// dtExecutor is an executor by script: it runs nothing, answers as told and
// keeps what it was asked.
type dtExecutor struct {
	submit  func(Effect) (bool, error)   // nil: accept
	expire  func(OperationID) Completion // nil: of unknown outcome
	retire  func(NodeAttemptID)
	running []RunningCall

	submitted []Effect
	refusals  []error // of submitted
	expired   []OperationID
	retired   []NodeAttemptID
}

func (x *dtExecutor) Submit(e Effect) (bool, error) {
	var queued bool
	var err error
	if x.submit != nil {
		queued, err = x.submit(e)
	}
	x.submitted, x.refusals = append(x.submitted, e), append(x.refusals, err)
	return queued, err
}

func (x *dtExecutor) Expire(id OperationID) Completion {
	c := Completion{Operation: id, Class: ClassAmbiguous, Message: "no answer"}
	if x.expire != nil {
		c = x.expire(id)
	}
	x.expired = append(x.expired, id)
	return c
}

func (x *dtExecutor) Retire(attempt NodeAttemptID) {
	x.retired = append(x.retired, attempt)
	if x.retire != nil {
		x.retire(attempt)
	}
}

func (x *dtExecutor) Running() []RunningCall { return x.running }

func dtSession(attempt NodeAttemptID) BootstrapSessionID {
	return BootstrapSessionID(fmt.Sprintf("s-%d", attempt))
}

// dtSuccess is how the operation of e ends well.
func dtSuccess(e Effect) Completion {
	c := Completion{Operation: e.Operation, Kind: e.Kind}
	switch e.Kind {
	case CreateLease:
		c.Lease = ProviderLeaseID(fmt.Sprintf("l-%d", e.Operation.Attempt))
	case LookupEndpoint:
		c.Endpoint = &SSHEndpoint{Host: "10.0.0.1", Port: 22}
	case StartBootstrap:
		c.Session = dtSession(e.Operation.Attempt)
	}
	return c
}

func dtCompleted(e Effect, c Completion) Observation {
	return Observation{Kind: OperationCompleted, Node: e.Key.Node, Attempt: e.Operation.Attempt, Completion: c}
}

func dtGroup(id NodeGroupID, count int, image string) NodeGroupSpec {
	return NodeGroupSpec{GroupID: id, Count: count, Shape: NodeShape{Image: image}}
}

func dtShape(generation uint64, groups ...NodeGroupSpec) ClusterShape {
	return ClusterShape{RunID: "run", Generation: generation, Groups: groups}
}

func dtJSON(t require.TestingT, s *ClusterState) string {
	text, err := json.Marshal(s)
	require.NoError(t, err)
	return string(text)
}

func dtDriver(t require.TestingT, config Config, groups ...NodeGroupSpec) *ClusterDriver {
	d, err := NewClusterDriver(dtShape(1, groups...), config)
	require.NoError(t, err)
	return d
}

func dtDrive(t require.TestingT, d *ClusterDriver, now time.Time, x EffectExecutor) int {
	passes, err := d.DriveUntilBlocked(now, x)
	require.NoError(t, err)
	return passes
}

// TestClockRefusesWhatItCannotExpress: a moment outside the clock's range is an
// error that changes nothing, on the first now and on every later one.
func TestClockRefusesWhatItCannotExpress(t *testing.T) {
	beyond := []time.Time{
		{},
		time.Date(1899, 12, 31, 23, 59, 59, 999999999, time.UTC),
		time.Date(1900, 1, 1, 0, 0, 0, 0, time.UTC),   // would read as unset
		time.Date(2191, 12, 31, 0, 0, 0, 0, time.UTC), // now is fine, the longest wait from it is not
		time.Date(2192, 6, 1, 0, 0, 0, 0, time.UTC),
		time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	config := Config{Retry: RetryPolicy{MaxRetryAfter: 2 * 366 * 24 * time.Hour}}
	for _, now := range beyond {
		for _, running := range []bool{false, true} {
			d, x := dtDriver(t, config, dtGroup("w", 2, "v1")), &dtExecutor{}
			if running {
				dtDrive(t, d, dtStart, x)
				d.Deliver(dtCompleted(x.submitted[0], dtSuccess(x.submitted[0])))
			}
			state, requeue, submitted := dtJSON(t, d.Snapshot()), d.requeueAt, len(x.submitted)
			require.True(t, d.TriggerIfDue(now), "the pass that follows says what is wrong")
			passes, err := d.DriveUntilBlocked(now, x)
			require.ErrorIs(t, err, ErrClockExhausted, "at %v, running: %v", now, running)
			require.Zero(t, passes)
			require.Equal(t, state, dtJSON(t, d.Snapshot()))
			require.Equal(t, requeue, d.requeueAt)
			require.Len(t, x.submitted, submitted)

			// What it was told meanwhile is not lost, nor is the clock spoilt.
			dtDrive(t, d, dtStart.Add(time.Second), x)
			require.Greater(t, len(x.submitted), submitted)
			require.Equal(t, dtStart.Add(time.Second), d.Clock(dtStart.Add(time.Second)))
		}
	}
}

// TestClockLooksAtEveryPolicy: the longest wait may be that of a single group.
func TestClockLooksAtEveryPolicy(t *testing.T) {
	const century = 100 * 365 * 24 * time.Hour
	d := dtDriver(t, Config{GroupRetry: map[NodeGroupID]RetryPolicy{"w": {StableAfter: century}}}, dtGroup("v", 1, "v1"))
	_, err := d.DriveNext(dtStart.Add(century), &dtExecutor{})
	require.ErrorIs(t, err, ErrClockExhausted)
	_, err = d.DriveNext(dtStart, &dtExecutor{})
	require.NoError(t, err)
}

// TestClockRunsOut: leaps forward that are each lawful can use the clock up. It
// then says so and stays where it is.
func TestClockRunsOut(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 1, "v1")), &dtExecutor{}
	const century = 100 * 365 * 24 * time.Hour
	dtDrive(t, d, dtStart, x)
	dtDrive(t, d, dtStart.Add(century), x)
	dtDrive(t, d, dtStart, x) // back
	state := dtJSON(t, d.Snapshot())
	_, err := d.DriveNext(dtStart.Add(century), x)
	require.ErrorIs(t, err, ErrClockExhausted)
	require.Equal(t, state, dtJSON(t, d.Snapshot()))
	dtDrive(t, d, dtStart.Add(time.Hour), x)
	require.Greater(t, len(x.submitted), 1, "a host that is right again goes on")
}

// TestClockNeedsRoomForTheLongestWait: to the nanosecond.
func TestClockNeedsRoomForTheLongestWait(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
	last := maxInstant.time().Add(-d.longest)
	_, err := d.DriveNext(last, &dtExecutor{})
	require.ErrorIs(t, err, ErrClockExhausted)
	_, err = d.DriveNext(last.Add(-1), &dtExecutor{})
	require.NoError(t, err)
}

// TestPassKeepsNoLargeLists: what a large pass needed is not kept for the small
// ones after it.
func TestPassKeepsNoLargeLists(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 3*maxSpare, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	require.Len(t, x.submitted, 3*maxSpare)
	for _, e := range x.submitted {
		d.Deliver(dtCompleted(e, dtSuccess(e)))
	}
	dtDrive(t, d, dtStart, x)
	require.Len(t, x.submitted, 6*maxSpare)
	d.Trigger()
	dtDrive(t, d, dtStart, x)
	require.LessOrEqual(t, cap(d.hot), maxSpare)
	require.LessOrEqual(t, cap(d.spareHot), maxSpare)
	for _, box := range []*inbox{d.inbox, d.folding} {
		require.LessOrEqual(t, len(box.spare), spareBlocks)
		require.LessOrEqual(t, cap(box.blocks), maxSpare)
		require.Zero(t, box.len())
	}
	require.LessOrEqual(t, cap(d.steps), maxSpare)
	require.LessOrEqual(t, cap(d.effects), maxSpare)
	require.Empty(t, d.missing)
	require.Nil(t, d.over)
}

// TestFoldedBlocksAreLetGo: what is folded does not weigh any more, although the
// pass goes on.
func TestFoldedBlocksAreLetGo(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
	for range (spareBlocks + 9) * inboxBlock {
		d.Deliver(Observation{Kind: NodeLost, Node: "w-0", Attempt: 1})
	}
	_, _, err := d.begin(&dtStart, &dtExecutor{})
	require.NoError(t, err)
	blocks := slices.Clip(d.folding.blocks)
	require.Greater(t, len(blocks), spareBlocks+1)
	d.foldInbox(1)
	for i, block := range blocks[1:] {
		require.Nil(t, block, i)
	}
	require.Zero(t, d.folding.len())
}

// TestPassKeepsLittleAlive: the lists that are kept for the next pass are wiped but
// for a handful, also the part that only the first of several rounds of submissions
// used.
func TestPassKeepsLittleAlive(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 20}, dtGroup("w", 30, "v1")), &dtExecutor{}
	x.submit = func(e Effect) (bool, error) {
		d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
		return false, errors.New("refused")
	}
	dtDrive(t, d, dtStart, x)
	require.Len(t, x.submitted, 30)
	spares := slices.Concat(d.inbox.spare, d.folding.spare)
	require.NotEmpty(t, spares)
	for _, block := range spares {
		require.Empty(t, block)
		for _, o := range block[handful:cap(block)] {
			require.Zero(t, o)
		}
	}
	require.NotZero(t, cap(d.spareHot))
	for _, n := range d.spareHot[handful:cap(d.spareHot)] {
		require.Nil(t, n)
	}
	require.NotZero(t, cap(d.steps))
	for _, s := range d.steps[handful:cap(d.steps)] {
		require.Nil(t, s.group)
	}
	require.GreaterOrEqual(t, cap(d.effects), 20)
	for _, e := range d.effects[handful:cap(d.effects)] {
		require.Nil(t, e.node)
	}
}

// TestMissingSlotIsInsertedOnce. A slot inserted twice is a machine that nobody
// remembers. The story:
//
//  1. the executor panics while a pass asks it to expire something, so that the
//     slots which that pass found missing are still looked for in the next;
//  2. that one panics too, after another drift has found them missing again;
//  3. then a group that never had a node leaves the wish.
func TestMissingSlotIsInsertedOnce(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 1, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	due := dtStart.Add(DefaultOperationTimeout)
	x.expire = func(OperationID) Completion { panic("out of order") }
	for generation, image := range []string{2: "v2", 3: "v3"} {
		if image != "" {
			require.NoError(t, d.UpdateDesired(dtShape(uint64(generation), dtGroup("a", 1, image), dtGroup("b", 1, image), dtGroup("w", 1, "v1"))))
			require.Panics(t, func() { _, _ = d.DriveNext(due, x) })
		}
	}
	x.expire = nil
	require.NoError(t, d.UpdateDesired(dtShape(4, dtGroup("b", 1, "v3"), dtGroup("w", 1, "v1"))))
	dtDrive(t, d, due, x)
	dtCheckLaw(t, d)
	require.EqualValues(t, 2, d.Stats().Attempts, "one of w-0 and one of b-0")
	require.Equal(t, NodeAttemptID(3), d.Snapshot().NextAttemptID)
	keys := map[LogicalNodeID]int{}
	for _, e := range x.submitted {
		keys[e.Key.Node]++
	}
	require.Equal(t, map[LogicalNodeID]int{"w-0": 1, "b-0": 1}, keys)
}

// dtWorks makes x run every operation at once and well, agents join included.
func dtWorks(d *ClusterDriver, x *dtExecutor) {
	x.submit = func(e Effect) (bool, error) {
		d.Deliver(dtCompleted(e, dtSuccess(e)))
		if e.Kind == StartBootstrap {
			d.Deliver(dtJoined(e))
		}
		return false, nil
	}
}

func dtJoined(e Effect) Observation {
	return Observation{Kind: SwactorJoined, Node: e.Key.Node, Attempt: e.Operation.Attempt,
		Session: dtSession(e.Operation.Attempt), Swactor: "agent"}
}

func dtFailed(e Effect, class FailureClass) Completion {
	return Completion{Operation: e.Operation, Kind: e.Kind, Class: class, Message: "boom"}
}

func dtNode(t require.TestingT, d *ClusterDriver, id LogicalNodeID) ManagedNode {
	m, ok := d.Node(id)
	require.True(t, ok, id)
	return m
}

// dtLast returns the effect that was submitted last, which must be of kind.
func dtLast(t require.TestingT, x *dtExecutor, kind OperationKind) Effect {
	require.NotEmpty(t, x.submitted)
	e := x.submitted[len(x.submitted)-1]
	require.Equal(t, kind, e.Kind)
	return e
}

// dtKinds tells what was submitted, "w-0 CreateLease", and forgets it.
func dtKinds(x *dtExecutor) []string {
	var kinds []string
	for _, e := range x.submitted {
		kinds = append(kinds, fmt.Sprintf("%s %s", e.Key.Node, e.Kind))
	}
	x.submitted, x.refusals = nil, nil
	return kinds
}

func TestNewDriverRefuses(t *testing.T) {
	shape := dtShape(1, dtGroup("w", 1, "v1"))
	largest := math.MaxInt32 // a variable: where an int has 32 bits, one more is negative
	for _, c := range []struct {
		why    string
		shape  ClusterShape
		config Config
		want   []error
	}{
		{"a negative cap", shape, Config{MaxInFlight: -1}, []error{ErrInvalidConfig}},
		{"a cap that no counter holds", shape, Config{MaxInFlight: largest + 1}, []error{ErrInvalidConfig}},
		{"negative slots", shape, Config{MaxNodes: -1}, []error{ErrInvalidConfig}},
		{"more slots than an index names", shape, Config{MaxNodes: maxIndex + 1}, []error{ErrInvalidConfig}},
		{"a policy", shape, Config{Retry: RetryPolicy{Jitter: 1}}, []error{ErrInvalidPolicy}},
		{"a policy of a group", shape, Config{GroupRetry: map[NodeGroupID]RetryPolicy{"w": {MaxDelay: -1}}}, []error{ErrInvalidPolicy}},
		{"all of it at once", shape, Config{MaxInFlight: -1, Retry: RetryPolicy{Jitter: 1}}, []error{ErrInvalidConfig, ErrInvalidPolicy}},
		{"a shape", dtShape(0, dtGroup("w", 1, "v1")), Config{}, []error{ErrInvalidShape}},
		{"more slots than MaxNodes", dtShape(1, dtGroup("w", 3, "v1")), Config{MaxNodes: 2}, []error{ErrInvalidShape}},
	} {
		d, err := NewClusterDriver(c.shape, c.config)
		require.Nil(t, d, c.why)
		for _, want := range c.want {
			require.ErrorIs(t, err, want, c.why)
		}
		var journal bytes.Buffer
		c.config.Journal = &journal
		d, err = NewClusterDriver(c.shape, c.config)
		require.Nil(t, d, c.why)
		require.Error(t, err, c.why)
		require.Empty(t, journal.String(), "of what does not begin there is no journal")
	}
	dtDriver(t, Config{MaxInFlight: largest, MaxNodes: maxIndex})
	d := dtDriver(t, Config{MaxNodes: 2})
	require.ErrorIs(t, d.UpdateDesired(dtShape(2, dtGroup("w", 3, "v1"))), ErrInvalidShape, "MaxNodes holds for updates too")
	_, err := d.DriveNext(dtStart, nil)
	require.ErrorIs(t, err, ErrInvalidConfig, "no executor")
}

// TestDriverKeepsTheCallersConfig: nobody's maps are changed or looked at later.
func TestDriverKeepsTheCallersConfig(t *testing.T) {
	groups := map[NodeGroupID]RetryPolicy{"w": {InitialDelay: 3 * time.Second}}
	d := dtDriver(t, Config{GroupRetry: groups}, dtGroup("v", 1, "v1"), dtGroup("w", 1, "v1"))
	require.Equal(t, map[NodeGroupID]RetryPolicy{"w": {InitialDelay: 3 * time.Second}}, groups)
	groups["w"] = RetryPolicy{InitialDelay: time.Hour}
	x := &dtExecutor{submit: func(Effect) (bool, error) { return false, errors.New("no") }}
	dtDrive(t, d, dtStart, x)
	require.Equal(t, dtStart.Add(time.Second), dtNode(t, d, "v-0").Retry.NextEffectAt)
	require.Equal(t, dtStart.Add(3*time.Second), dtNode(t, d, "w-0").Retry.NextEffectAt)
}

// TestPassOrder: what was delivered is folded first, then what is out of time
// is expired, and what the executor answers still counts before an attempt is
// ended for being slow.
func TestPassOrder(t *testing.T) {
	const limit = 10 * time.Second
	policy := RetryPolicy{OperationTimeout: limit, EndpointTimeout: limit}
	probing := func(t *testing.T) (*ClusterDriver, *dtExecutor, Effect) {
		d, x := dtDriver(t, Config{Retry: policy}, dtGroup("w", 1, "v1")), &dtExecutor{}
		dtDrive(t, d, dtStart, x)
		d.Deliver(dtCompleted(x.submitted[0], dtSuccess(x.submitted[0])))
		dtDrive(t, d, dtStart, x)
		require.Equal(t, dtStart.Add(limit), dtNode(t, d, "w-0").Retry.StageDeadline)
		e := dtLast(t, x, LookupEndpoint)
		require.Equal(t, dtStart.Add(limit), e.Deadline)
		return d, x, e
	}
	t.Run("a result that arrived wins over the timeout", func(t *testing.T) {
		d, x, e := probing(t)
		d.Deliver(dtCompleted(e, dtSuccess(e)))
		dtDrive(t, d, dtStart.Add(limit), x)
		require.Empty(t, x.expired)
		require.Equal(t, StageEndpointKnown, dtNode(t, d, "w-0").Record.Stage)
		require.Zero(t, d.Stats().Expired)
	})
	t.Run("and so does one that the executor still has", func(t *testing.T) {
		d, x, e := probing(t)
		x.expire = func(OperationID) Completion { return dtSuccess(e) }
		dtDrive(t, d, dtStart.Add(limit), x)
		require.Equal(t, []OperationID{e.Operation}, x.expired)
		require.Equal(t, StageEndpointKnown, dtNode(t, d, "w-0").Record.Stage)
		require.EqualValues(t, 1, d.Stats().Expired)
	})
	t.Run("an operation that expires with its attempt counts twice", func(t *testing.T) {
		d, x, e := probing(t)
		_, err := d.DriveNext(dtStart.Add(limit), x)
		require.NoError(t, err)
		require.Equal(t, []OperationID{e.Operation}, x.expired)
		m := dtNode(t, d, "w-0")
		require.Equal(t, StageFailed, m.Record.Stage)
		require.Nil(t, m.Pending)
		require.EqualValues(t, 2, m.Retry.ConsecutiveFailures)
	})
	t.Run("not a moment too early", func(t *testing.T) {
		d, x, _ := probing(t)
		require.Zero(t, dtDrive(t, d, dtStart.Add(limit-1), x))
		d.Trigger()
		require.Equal(t, 1, dtDrive(t, d, dtStart.Add(limit-1), x))
		require.Empty(t, x.expired)
	})
	t.Run("an answer about another operation is none", func(t *testing.T) {
		d, x, e := probing(t)
		x.expire = func(OperationID) Completion {
			c := dtSuccess(e)
			c.Operation.Sequence++
			return c
		}
		_, err := d.DriveNext(dtStart.Add(limit), x)
		require.NoError(t, err)
		m := dtNode(t, d, "w-0")
		require.Nil(t, m.Pending)
		require.Nil(t, m.Record.Connection, "its result is not believed")
	})
}

// TestTriggersCollapse: any number before a pass make that one, any number
// during it exactly one more.
func TestTriggersCollapse(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
	x := &dtExecutor{}
	require.Equal(t, 2, dtDrive(t, d, dtStart, x), "insert, then create")
	for range 5 {
		d.Trigger()
	}
	require.Equal(t, 1, dtDrive(t, d, dtStart, x))
	require.Zero(t, dtDrive(t, d, dtStart, x))

	x.expire = func(id OperationID) Completion {
		for range 5 {
			d.Trigger()
			require.NoError(t, d.UpdateDesired(dtShape(1, dtGroup("w", 1, "v1"))))
		}
		return Completion{Operation: id, Class: ClassNotStarted}
	}
	require.Equal(t, 2, dtDrive(t, d, dtStart.Add(DefaultOperationTimeout), x))
	require.Zero(t, dtDrive(t, d, dtStart.Add(DefaultOperationTimeout), x))
}

// TestReentrantPass: while a pass runs there is no other, wherever it is asked
// for, and asking spoils nothing.
func TestReentrantPass(t *testing.T) {
	var d *ClusterDriver
	asked := map[string]int{}
	x := &dtExecutor{}
	again := func(where string) {
		ran, err := d.DriveNext(dtStart, x)
		require.ErrorIs(t, err, ErrReentrantPass, where)
		require.False(t, ran)
		_, err = d.DriveUntilBlocked(dtStart, x)
		require.ErrorIs(t, err, ErrReentrantPass, where)
		require.ErrorIs(t, d.foldOnly(dtStart), ErrReentrantPass, where)
		elsewhere := make(chan error)
		go func() {
			_, err := d.DriveNext(dtStart, x)
			elsewhere <- err
		}()
		require.ErrorIs(t, <-elsewhere, ErrReentrantPass, where)
		d.Snapshot() // would wait for ever if a lock were held
		d.Plan(dtStart)
		d.Explain("w-0", dtStart)
		asked[where]++
	}
	x.submit = func(e Effect) (bool, error) { again("Submit"); return false, nil }
	x.expire = func(id OperationID) Completion {
		again("Expire")
		return Completion{Operation: id, Class: ClassDefinite}
	}
	x.retire = func(NodeAttemptID) { again("Retire") }
	d = dtDriver(t, Config{OnEvent: func(Event) { again("OnEvent") }}, dtGroup("w", 1, "v1"))
	dtDrive(t, d, dtStart, x)
	d.config.OnEvent, d.events.hook = nil, nil // an update's event comes outside of a pass
	require.NoError(t, d.UpdateDesired(dtShape(2)))
	dtDrive(t, d, dtStart.Add(DefaultOperationTimeout), x)
	require.Zero(t, d.Snapshot().Len())
	for _, where := range []string{"Submit", "Expire", "Retire", "OnEvent"} {
		require.NotZero(t, asked[where], where)
	}
}

// TestRefusedUpdateChangesNothing, and the reasons are looked for in order.
func TestRefusedUpdateChangesNothing(t *testing.T) {
	var seen []Event
	d := dtDriver(t, Config{OnEvent: func(e Event) { seen = append(seen, e) }}, dtGroup("w", 2, "v1"))
	require.NoError(t, d.UpdateDesired(dtShape(5, dtGroup("w", 2, "v2"))))
	x := &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	state, submitted := dtJSON(t, d.Snapshot()), len(x.submitted)
	requeue, _ := d.RequeueAt()

	invalid := dtGroup("w", -1, "v1")
	for _, c := range []struct {
		why   string
		shape ClusterShape
		want  error
	}{
		{"another run at a higher generation", ClusterShape{RunID: "other", Generation: 9}, ErrRunChanged},
		{"another run at a lower generation", ClusterShape{RunID: "other", Generation: 1}, ErrRunChanged},
		{"another run, invalid", ClusterShape{RunID: "other", Generation: 9, Groups: []NodeGroupSpec{invalid}}, ErrRunChanged},
		{"a lower generation", dtShape(4, dtGroup("w", 2, "v2")), ErrGenerationRegressed},
		{"a lower generation, invalid", dtShape(4, invalid), ErrGenerationRegressed},
		{"generation 0", dtShape(0), ErrGenerationRegressed},
		{"invalid", dtShape(6, invalid), ErrInvalidShape},
		{"invalid under the same generation", dtShape(5, invalid), ErrInvalidShape},
		{"a silent change", dtShape(5, dtGroup("w", 2, "v3")), ErrGenerationReused},
		{"a silent count", dtShape(5, dtGroup("w", 3, "v2")), ErrGenerationReused},
		{"a silent group", dtShape(5, dtGroup("w", 2, "v2"), dtGroup("x", 0, "v2")), ErrGenerationReused},
	} {
		seen = nil
		require.ErrorIs(t, d.UpdateDesired(c.shape), c.want, c.why)
		require.Len(t, seen, 1)
		require.Equal(t, EventUpdateRefused, seen[0].Kind)
		require.Equal(t, c.shape.Generation, seen[0].Generation)
		require.ErrorIs(t, seen[0].Err, c.want)
		require.Equal(t, uint64(5), d.Generation())
		require.Zero(t, dtDrive(t, d, dtStart, x), "no pass is queued after %s", c.why)
		require.Equal(t, state, dtJSON(t, d.Snapshot()))
		require.Len(t, x.submitted, submitted)
		at, ok := d.RequeueAt()
		require.True(t, ok)
		require.Equal(t, requeue, at)
	}

	seen = nil
	require.NoError(t, d.UpdateDesired(dtShape(5, dtGroup("w", 2, "v2"))))
	require.Equal(t, EventUpdateAccepted, seen[0].Kind)
	require.Equal(t, 1, dtDrive(t, d, dtStart, x), "the wish in force is welcome and queues a pass")
	require.Equal(t, state, dtJSON(t, d.Snapshot()))
	require.NoError(t, d.UpdateDesired(dtShape(6, dtGroup("w", 2, "v2"))))
	require.Equal(t, 1, dtDrive(t, d, dtStart, x), "nothing is different under the next generation")
	require.Equal(t, uint64(6), d.ObservedGeneration())
	require.Len(t, x.submitted, submitted)
}

// TestUpdateDuringPass: a pass goes on with the wish it began with, and says so.
func TestUpdateDuringPass(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 2, "v1"))
	x := &dtExecutor{}
	x.submit = func(e Effect) (bool, error) {
		if e.Key.Node == "w-0" && d.Generation() == 1 {
			require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("v", 1, "v2"), dtGroup("w", 1, "v1"))))
		}
		return false, nil
	}
	ran, err := d.DriveNext(dtStart, x) // inserts
	require.NoError(t, err)
	require.True(t, ran)
	_, err = d.DriveNext(dtStart, x) // creates
	require.NoError(t, err)
	require.Equal(t, []string{"w-0 CreateLease", "w-1 CreateLease"}, dtKinds(x), "w-1 is still wanted in this pass")
	require.Equal(t, uint64(1), d.ObservedGeneration())
	require.Equal(t, uint64(1), d.Snapshot().ObservedGeneration)
	require.Equal(t, uint64(2), d.Generation())
	_, err = d.DriveNext(dtStart, x)
	require.NoError(t, err)
	require.Equal(t, uint64(2), d.ObservedGeneration())
	require.Equal(t, Deleting, dtNode(t, d, "w-1").Intent)
	require.Equal(t, Active, dtNode(t, d, "v-0").Intent)
}

// TestTwoUpdatesAtOnce: whichever goroutine is first, the higher generation
// counts, and one pass is enough.
func TestTwoUpdatesAtOnce(t *testing.T) {
	for range 50 {
		d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
		var both sync.WaitGroup
		var second, third error
		both.Go(func() { second = d.UpdateDesired(dtShape(2, dtGroup("w", 2, "v2"))) })
		both.Go(func() { third = d.UpdateDesired(dtShape(3, dtGroup("w", 3, "v3"))) })
		both.Wait()
		require.NoError(t, third)
		require.True(t, second == nil || errors.Is(second, ErrGenerationRegressed), second)
		ran, err := d.DriveNext(dtStart, &dtExecutor{})
		require.NoError(t, err)
		require.True(t, ran)
		require.Equal(t, uint64(3), d.ObservedGeneration())
		state := d.Snapshot()
		require.Equal(t, 3, state.Len())
		for m := range state.All() {
			require.Equal(t, "v3", m.Record.Spec.Shape.Image)
		}
	}
}

// TestConvergedOfWhichGeneration: of the one a pass evaluated, if no later one
// is wished for.
func TestConvergedOfWhichGeneration(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 2, "v1")), &dtExecutor{}
	converged := func() (of []uint64) {
		for generation := range uint64(5) {
			if d.Converged(generation) {
				of = append(of, generation)
			}
		}
		return of
	}
	require.Empty(t, converged(), "nothing is evaluated yet")
	ready, desired := d.Progress()
	require.Equal(t, []int{0, 0}, []int{ready, desired})
	dtDrive(t, d, dtStart, x)
	require.Empty(t, converged())
	ready, desired = d.Progress()
	require.Equal(t, []int{0, 2}, []int{ready, desired})
	for _, e := range x.submitted {
		d.Deliver(dtCompleted(e, dtSuccess(e)))
	}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []uint64{1}, converged())
	ready, desired = d.Progress()
	require.Equal(t, []int{2, 2}, []int{ready, desired})

	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v1"))))
	require.Empty(t, converged(), "1 is no longer wished for, 2 not yet evaluated")
	x.submit = nil
	dtDrive(t, d, dtStart, x)
	require.Empty(t, converged(), "w-1 is still there")
	ready, desired = d.Progress()
	require.Equal(t, []int{1, 1}, []int{ready, desired})
	gone := dtLast(t, x, DestroyLease)
	d.Deliver(dtCompleted(gone, dtSuccess(gone)))
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []uint64{2}, converged())

	require.NoError(t, d.UpdateDesired(dtShape(3, dtGroup("w", 1, "v2"))))
	dtDrive(t, d, dtStart, x)
	ready, _ = d.Progress()
	require.Zero(t, ready, "what is ready is not what is wished for")

	empty := dtDriver(t, Config{})
	require.False(t, empty.Converged(1))
	dtDrive(t, empty, dtStart, x)
	require.True(t, empty.Converged(1))
}

// TestConvergedNeedsNothingPending: the call that the hand-off overtook has to
// come back first.
func TestConvergedNeedsNothingPending(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 1, "v1")), &dtExecutor{}
	dtWorks(d, x)
	works := x.submit
	x.submit = func(e Effect) (bool, error) {
		if e.Kind == BootstrapConvergenceObserved {
			return false, nil
		}
		return works(e)
	}
	dtDrive(t, d, dtStart, x)
	call := dtLast(t, x, BootstrapConvergenceObserved)
	d.Deliver(Observation{Kind: BootstrapClosed, Node: "w-0", Attempt: 1, Session: dtSession(1)})
	dtDrive(t, d, dtStart, x)
	require.True(t, dtNode(t, d, "w-0").Record.Ready)
	require.False(t, d.Converged(1))
	ready, _ := d.Progress()
	require.Equal(t, 1, ready)
	d.Deliver(dtCompleted(call, dtFailed(call, ClassAmbiguous)))
	dtDrive(t, d, dtStart, x)
	require.True(t, d.Converged(1))
}

// TestBackwardClock: a step back lengthens no wait, fires nothing early, and
// RequeueAt is in the time of whoever drives.
func TestBackwardClock(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 1, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	d.Deliver(dtCompleted(x.submitted[0], dtFailed(x.submitted[0], ClassAmbiguous)))
	dtDrive(t, d, dtStart, x)
	at, ok := d.RequeueAt()
	require.True(t, ok)
	require.Equal(t, dtStart.Add(time.Second), at)

	back := dtStart.Add(-time.Hour)
	require.False(t, d.TriggerIfDue(back))
	at, _ = d.RequeueAt()
	require.Equal(t, back.Add(time.Second), at, "one second from now, whatever the clock says")
	require.Equal(t, dtStart, d.Clock(back))
	require.Zero(t, dtDrive(t, d, back.Add(time.Second-1), x))
	require.True(t, d.TriggerIfDue(back.Add(time.Second)))
	dtDrive(t, d, back.Add(time.Second), x)
	require.Len(t, x.submitted, 2)
	require.Equal(t, dtStart.Add(time.Second), x.submitted[1].DispatchedAt, "the driver's clock never went back")

	// The same with nobody asking in between, and by DriveNext alone.
	e := x.submitted[1]
	d.Deliver(dtCompleted(e, dtFailed(e, ClassAmbiguous)))
	dtDrive(t, d, back.Add(time.Second), x)
	further := back.Add(-24 * time.Hour)
	require.Zero(t, dtDrive(t, d, further, x))
	at, _ = d.RequeueAt()
	require.Equal(t, further.Add(2*time.Second), at)
	require.Zero(t, dtDrive(t, d, at.Add(-1), x))
	require.Equal(t, 1, dtDrive(t, d, at, x))
	require.Len(t, x.submitted, 3)
}

// TestLeapingClock: everything that is due is due at once, and once.
func TestLeapingClock(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 3, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	leap := dtStart.Add(50 * 365 * 24 * time.Hour)
	dtDrive(t, d, leap, x)
	require.Len(t, x.expired, 3)
	require.Len(t, x.submitted, 3, "the delays after the timeouts start from here")
	at, ok := d.RequeueAt()
	require.True(t, ok)
	require.Equal(t, leap.Add(time.Second), at)
}

// TestTriggerIfDueQueuesAPass: also while one runs, and also where the clock makes
// no sense. What it has promised then comes, whatever the next now is.
func TestTriggerIfDueQueuesAPass(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 1, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 2, "v1"))))
	due := false
	x.submit = func(Effect) (bool, error) {
		due = d.TriggerIfDue(dtStart.Add(time.Hour))
		return false, nil
	}
	dtDrive(t, d, dtStart.Add(time.Second), x)
	require.True(t, due)
	require.Equal(t, []OperationID{{Attempt: 1, Sequence: 1}, {Attempt: 2, Sequence: 1}}, x.expired)

	d = dtDriver(t, Config{})
	dtDrive(t, d, dtStart, x)
	require.True(t, d.TriggerIfDue(time.Time{}))
	ran, err := d.DriveNext(dtStart, x)
	require.NoError(t, err)
	require.True(t, ran)
}

// TestStageDeadlineIsTold: that an attempt was out of time is told like any other
// failure.
func TestStageDeadlineIsTold(t *testing.T) {
	var failed []Event
	s := dtTell(t, Config{OnEvent: func(e Event) {
		if e.Kind == EventAttemptFailed {
			failed = append(failed, e)
		}
	}}, dtGroup("w", 1, "v1"))
	s.climb(StartBootstrap)
	s.end(StartBootstrap, ClassNone)
	require.Empty(t, failed)
	s.now = s.now.Add(DefaultBootstrapTimeout)
	s.drive()
	require.Len(t, failed, 1)
	require.Equal(t, "the bootstrap did not finish in time", failed[0].Reason)
}

// TestFoldingFeedsTheClock: a host that only folds must not fall back behind what
// it has folded.
func TestFoldingFeedsTheClock(t *testing.T) {
	d := dtDriver(t, Config{})
	dtDrive(t, d, dtStart, &dtExecutor{})
	require.NoError(t, d.foldOnly(dtStart.Add(time.Hour)))
	require.Equal(t, dtStart.Add(time.Hour), d.Clock(dtStart))
}

// TestFoldingIsAPassOfItsOwn: who hears of what is folded without a pass may not
// begin one meanwhile.
func TestFoldingIsAPassOfItsOwn(t *testing.T) {
	var d *ClusterDriver
	var err error
	d = dtDriver(t, Config{OnEvent: func(e Event) {
		if e.Kind == EventNotApplied {
			_, err = d.DriveNext(dtStart, &dtExecutor{})
		}
	}})
	d.Deliver(Observation{Kind: NodeLost, Node: "w-0", Attempt: 1})
	require.NoError(t, d.foldOnly(dtStart))
	require.ErrorIs(t, err, ErrReentrantPass)
}

// TestAttemptsInSlotOrder: of a slot that is new and one that begins anew, the
// first in slot order gets the first attempt, as in a plan.
func TestAttemptsInSlotOrder(t *testing.T) {
	for _, index := range []int{0, 1} {
		d, err := newDriverFrom(ftState(t, ftMove(ftNode(ftDestroyed), "w", index, 7)), shapeOf(4, groupOf("w", 2)), Config{})
		require.NoError(t, err)
		_, err = d.DriveNext(ftNow, &dtExecutor{})
		require.NoError(t, err)
		require.Equal(t, NodeAttemptID(8), dtNode(t, d, "w-0").Attempt)
		require.Equal(t, NodeAttemptID(9), dtNode(t, d, "w-1").Attempt)
	}
}

// TestFaultTakesNoPlace: a node that cannot go on holds up nobody under a cap.
func TestFaultTakesNoPlace(t *testing.T) {
	spent := func(m *ManagedNode) { m.NextSequence = math.MaxUint64 - cleanupSequences }
	state := ftState(t, ftNode(ftLeased, spent), ftMove(ftNode(), "w", 1, 8))
	shape := shapeOf(4, NodeGroupSpec{GroupID: "w", Count: 2, Shape: NodeShape{Image: "v1"}})
	for _, limit := range []int{0, 1} {
		var failed []LogicalNodeID
		d, err := newDriverFrom(state.Clone(), shape, Config{MaxInFlight: limit, OnEvent: func(e Event) {
			if e.Kind == EventAttemptFailed {
				failed = append(failed, e.Node)
			}
		}})
		require.NoError(t, err)
		x := &dtExecutor{}
		_, err = d.DriveNext(ftNow, x)
		require.NoError(t, err)
		require.Equal(t, []string{"w-1 CreateLease"}, dtKinds(x))
		require.Equal(t, []LogicalNodeID{"w-0"}, failed, "and its attempt ends")
	}
}

// TestJournalNamesEveryStep: what was decided and what could not be is written down
// with its rule. A replay does not miss what the recording left out.
func TestJournalNamesEveryStep(t *testing.T) {
	var journal bytes.Buffer
	s := dtTell(t, Config{Journal: &journal, FirstAttempt: math.MaxUint64 - 1}, dtGroup("w", 1, "v1"))
	s.climb(StartBootstrap)
	s.end(StartBootstrap, ClassDefinite)
	s.end(DestroyLease, ClassNone)
	s.now = s.now.Add(time.Hour)
	s.drive() // there is no attempt left for a restart
	s.update()
	s.drive()
	for _, rule := range []string{"R0 insert", "R12 create-lease", "R13 lookup-endpoint", "R16 start-bootstrap", "R4 begin-delete", "R8 destroy-lease", "R9 mark-destroyed",
		`"fault":{"node":"w-0","attempt":18446744073709551614,"rule":"R2 restart"`, "R1 reap"} {
		require.Contains(t, journal.String(), rule)
	}
}

// TestProgressCountsEachOnce: also a node that is looked at again while it is ready,
// and not one that is ready with a spec that nobody wishes for any more.
func TestProgressCountsEachOnce(t *testing.T) {
	told := 0
	s := dtTell(t, Config{OnEvent: func(e Event) {
		if e.Kind == EventReady {
			told++
		}
	}}, dtGroup("w", 1, "v1"))
	progress := func() [2]int {
		ready, desired := s.d.Progress()
		return [2]int{ready, desired}
	}
	s.climb(BootstrapConvergenceObserved)
	require.Equal(t, [2]int{0, 1}, progress())
	s.say(Observation{Kind: BootstrapClosed})
	require.Equal(t, [2]int{1, 1}, progress(), "handed off, and the call about it still runs")
	s.end(BootstrapConvergenceObserved, ClassNone)
	require.Equal(t, [2]int{1, 1}, progress())
	require.True(t, s.d.Converged(1))
	require.Equal(t, 1, told)
	s.d.Pause()
	s.update(dtGroup("w", 1, "v2"))
	s.drive()
	require.True(t, dtNode(t, s.d, "w-0").Record.Ready)
	require.Equal(t, [2]int{0, 1}, progress())
}

// reentrantJournal is a journal whose writer drives.
type reentrantJournal struct {
	d   *ClusterDriver
	err error
}

func (j *reentrantJournal) Write(p []byte) (int, error) {
	if j.d != nil {
		_, j.err = j.d.DriveNext(dtStart, &dtExecutor{})
	}
	return len(p), nil
}

// TestIdleJournalIsWrittenAlone: also while the driver writes down what was
// refused, and has no pass to run, nobody else may drive.
func TestIdleJournalIsWrittenAlone(t *testing.T) {
	journal := &reentrantJournal{}
	d, x := dtDriver(t, Config{Journal: journal}), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	require.ErrorIs(t, d.UpdateDesired(dtShape(0)), ErrGenerationRegressed)
	journal.d = d
	ran, err := d.DriveNext(dtStart, x)
	require.NoError(t, err)
	require.False(t, ran)
	require.ErrorIs(t, journal.err, ErrReentrantPass)
	journal.d = nil
	d.Trigger()
	require.Equal(t, 1, dtDrive(t, d, dtStart, x), "and then somebody may again")
}

// TestDrainTellsAtOnce: that the wish for nothing is accepted is told without a
// pass.
func TestDrainTellsAtOnce(t *testing.T) {
	var told []EventKind
	d := dtDriver(t, Config{OnEvent: func(e Event) { told = append(told, e.Kind) }}, dtGroup("w", 1, "v1"))
	require.NoError(t, d.Drain())
	require.Equal(t, []EventKind{EventUpdateAccepted}, told)
}

// TestReadyIsOfTheLatestWish: a node that is ready with the spec of a wish before
// is not what is waited for, even before a pass has seen the new one.
func TestReadyIsOfTheLatestWish(t *testing.T) {
	d, err := newDriverFrom(ftState(t, ftNode(ftReady)), shapeOf(1, NodeGroupSpec{GroupID: "w", Count: 1, Shape: NodeShape{Image: "v1"}}), Config{})
	require.NoError(t, err)
	wished, ready := d.isReady("w-0")
	require.True(t, wished && ready)
	require.NoError(t, d.UpdateDesired(shapeOf(2, NodeGroupSpec{GroupID: "w", Count: 1, Shape: NodeShape{Image: "v2"}})))
	wished, ready = d.isReady("w-0")
	require.True(t, wished && !ready)
}

// TestTriggerIfDueFeedsTheClock: a host that only asks must get on as well.
func TestTriggerIfDueFeedsTheClock(t *testing.T) {
	d := dtDriver(t, Config{})
	require.False(t, d.TriggerIfDue(dtStart), "there is no deadline")
	require.Equal(t, dtStart, d.Clock(dtStart))
	x := &dtExecutor{}
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v1"))))
	dtDrive(t, d, dtStart, x)
	now := dtStart.Add(-time.Hour) // and from here in small steps
	require.False(t, d.TriggerIfDue(now))
	for range int(DefaultOperationTimeout/time.Second) - 1 {
		now = now.Add(time.Second)
		require.False(t, d.TriggerIfDue(now))
		now = now.Add(-time.Minute)
		require.False(t, d.TriggerIfDue(now))
		now = now.Add(time.Millisecond)
		require.False(t, d.TriggerIfDue(now))
		now = now.Add(-time.Millisecond)
		require.False(t, d.TriggerIfDue(now))
	}
	require.True(t, d.TriggerIfDue(now.Add(time.Second)))
	require.Equal(t, 1, dtDrive(t, d, now, x), "what was due when asked stays due")
	require.Len(t, x.expired, 1)
}

// TestProp_G11WaitsInRunningTime: for any sequence of nows, a wait is as long as
// its delay in the time that ran, summed up from the steps forward: no shorter,
// and no longer than to the first look after it.
func TestProp_G11WaitsInRunningTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d, x := dtDriver(t, Config{Retry: RetryPolicy{InitialDelay: time.Second, MaxDelay: 16 * time.Second}}, dtGroup("w", 1, "v1")), &dtExecutor{}
		ran, now := time.Duration(0), dtStart
		var due time.Duration // of the wait that runs
		fails := 0
		dtDrive(t, d, now, x)
		for range rapid.IntRange(1, 60).Draw(t, "looks") {
			if len(x.submitted) > fails { // it was sent: fail it, which starts a wait
				e := x.submitted[fails]
				fails++
				d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
				dtDrive(t, d, now, x)
				due = ran + min(time.Second<<(fails-1), 16*time.Second)
			}
			step := time.Duration(rapid.IntRange(-20_000, 6_000).Draw(t, "ms")) * time.Millisecond
			if rapid.Bool().Draw(t, "to the edge") {
				step = due - ran + time.Duration(rapid.IntRange(-1, 1).Draw(t, "ns"))
			}
			now, ran = now.Add(step), ran+max(step, 0)
			if rapid.Bool().Draw(t, "only ask") {
				require.Equal(t, ran >= due, d.TriggerIfDue(now))
				if ran >= due {
					now = now.Add(-time.Duration(rapid.IntRange(0, 9).Draw(t, "back before the pass")) * time.Second)
				}
			}
			_, ok := d.RequeueAt()
			require.True(t, ok)
			dtDrive(t, d, now, x)
			require.Equal(t, ran >= due, len(x.submitted) > fails, "%v of %v have run", ran, due)
			if ran < due {
				at, _ := d.RequeueAt()
				require.Equal(t, now.Add(due-ran), at)
			}
		}
	})
}

// TestRefusalWithShortestDelay: an executor that refuses at once does not spin
// the passes, however short the delays are.
func TestRefusalWithShortestDelay(t *testing.T) {
	for _, limit := range []int{0, 1, 7} {
		d := dtDriver(t, Config{Retry: RetryPolicy{InitialDelay: 1, MaxDelay: 1}, MaxInFlight: limit}, dtGroup("w", 20, "v1"))
		x := &dtExecutor{submit: func(Effect) (bool, error) { return false, ErrExecutorClosed }}
		require.Equal(t, 2, dtDrive(t, d, dtStart, x))
		require.Len(t, x.submitted, 20, "each is tried once")
		require.EqualValues(t, 20, d.Stats().Refused)
		at, ok := d.RequeueAt()
		require.True(t, ok)
		require.Equal(t, dtStart.Add(1), at)
		require.Equal(t, 1, dtDrive(t, d, at, x))
		require.Len(t, x.submitted, 40)
		m := dtNode(t, d, "w-7")
		require.Nil(t, m.Pending)
		require.Equal(t, NoOperation, m.Retry.Ambiguous, "a refused create bought nothing")
		require.Equal(t, "CreateLease: refused by the executor: provisioning: the executor is closed", m.Retry.LastError)
		require.EqualValues(t, 2, m.Retry.ConsecutiveFailures)
	}
}

// TestRefusalMayAskForMore: a refusal can say how long to stay away.
func TestRefusalMayAskForMore(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
	x := &dtExecutor{submit: func(Effect) (bool, error) { return false, RetryAfter(errors.New("busy"), time.Minute) }}
	dtDrive(t, d, dtStart, x)
	at, _ := d.RequeueAt()
	require.Equal(t, dtStart.Add(time.Minute), at)
}

// TestPassesComeToRest: the longest row of passes that nobody asked for is far
// below the bound, so ErrNotQuiescent stays a fault of this library.
func TestPassesComeToRest(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 40, "v1")), &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	require.True(t, d.Converged(1))
	x.submit = nil
	own := func() (longest int) {
		row := 0
		for {
			pass, err := d.drive(dtStart, x)
			require.NoError(t, err)
			if !pass.ran {
				return longest
			}
			if row++; !pass.ownDoing {
				row = 0
			}
			longest = max(longest, row)
		}
	}
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("v", 40, "v2"), dtGroup("w", 40, "v2"))))
	require.LessOrEqual(t, own(), 4)
	for _, e := range x.submitted {
		d.Deliver(dtCompleted(e, dtSuccess(e)))
	}
	require.LessOrEqual(t, own(), 4)
}

// TestNotQuiescent: if passes did make each other necessary for ever, the call
// would end.
func TestNotQuiescent(t *testing.T) {
	var d *ClusterDriver
	d = dtDriver(t, Config{OnEvent: func(Event) { d.ownDirt = true }})
	passes, err := d.DriveUntilBlocked(dtStart, &dtExecutor{})
	require.ErrorIs(t, err, ErrNotQuiescent)
	require.Equal(t, 1+maxOwnPasses+1, passes)
}

// TestAskedPassesAreNotCounted: only passes that nobody else asked for are bounded
// in number.
func TestAskedPassesAreNotCounted(t *testing.T) {
	var d *ClusterDriver
	left := 16 * maxOwnPasses // of which every eighth is asked for by nobody
	d = dtDriver(t, Config{OnEvent: func(e Event) {
		if d.ownDirt = true; left%8 != 0 {
			d.Trigger()
		}
		if left--; left <= 0 {
			d.ownDirt = false
		}
	}})
	passes, err := d.DriveUntilBlocked(dtStart, &dtExecutor{})
	require.NoError(t, err)
	require.Equal(t, 16*maxOwnPasses+1, passes, "the last event asks once more")
}

// TestGroupPolicy: a group that has its own is judged by it in everything that
// the driver itself starts to wait for.
func TestGroupPolicy(t *testing.T) {
	own := RetryPolicy{InitialDelay: 7 * time.Second, OperationTimeout: 11 * time.Second, EndpointTimeout: 30 * time.Second}
	d, x := dtDriver(t, Config{GroupRetry: map[NodeGroupID]RetryPolicy{"w": own}}, dtGroup("w", 1, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	e := dtLast(t, x, CreateLease)
	require.Equal(t, dtStart.Add(11*time.Second), e.Deadline)
	d.Deliver(dtCompleted(e, dtSuccess(e)))
	dtDrive(t, d, dtStart, x)
	require.Equal(t, dtStart.Add(30*time.Second), dtNode(t, d, "w-0").Retry.StageDeadline)
	dtDrive(t, d, dtStart.Add(11*time.Second), x)
	require.Equal(t, dtStart.Add(18*time.Second), dtNode(t, d, "w-0").Retry.NextEffectAt, "of an operation that expired")
	dtDrive(t, d, dtStart.Add(18*time.Second), x)
	dtDrive(t, d, dtStart.Add(29*time.Second), x)
	m := dtNode(t, d, "w-0")
	require.Equal(t, dtStart.Add(43*time.Second), m.Retry.NextEffectAt)
	dtDrive(t, d, dtStart.Add(30*time.Second), x)
	require.Equal(t, dtStart.Add(58*time.Second), dtNode(t, d, "w-0").Retry.RestartAt, "of an attempt that was out of time: the third failure")
}

// TestEventsOutOfOrder: of another attempt, too early, twice, of no slot: a
// report says what became of each, and nothing is harmed.
func TestEventsOutOfOrder(t *testing.T) {
	var reasons []string
	d := dtDriver(t, Config{OnEvent: func(e Event) {
		if e.Kind == EventNotApplied {
			reasons = append(reasons, e.Reason)
		}
	}}, dtGroup("w", 1, "v1"))
	x := &dtExecutor{}
	say := func(o Observation) string {
		reasons = nil
		d.Deliver(o)
		dtDrive(t, d, dtStart, x)
		require.LessOrEqual(t, len(reasons), 1)
		if reasons == nil {
			return ""
		}
		return reasons[0]
	}
	dtDrive(t, d, dtStart, x)
	create := dtLast(t, x, CreateLease)
	require.Equal(t, string(UnknownNode), say(Observation{Kind: NodeLost, Node: "w-1", Attempt: 1}))
	require.Equal(t, string(StaleAttempt), say(Observation{Kind: NodeLost, Node: "w-0", Attempt: 2}))
	require.Equal(t, string(UnknownObservation), say(Observation{Node: "w-0", Attempt: 1}))
	require.Equal(t, string(NoLeaseHeld), say(Observation{Kind: NodeLost, Node: "w-0", Attempt: 1}))
	other := dtCompleted(create, dtSuccess(create))
	other.Completion.Operation.Sequence++
	require.Equal(t, string(NotPending), say(other))
	require.Empty(t, say(dtCompleted(create, dtSuccess(create))))
	require.Equal(t, string(NotPending), say(dtCompleted(create, dtFailed(create, ClassDefinite))), "a second answer")
	look := dtLast(t, x, LookupEndpoint)
	require.Empty(t, say(dtCompleted(look, dtSuccess(look))))
	start := dtLast(t, x, StartBootstrap)
	require.Equal(t, string(HeldForSession), say(dtJoined(start)), "a join before the answer of its start")
	require.Empty(t, say(dtCompleted(start, dtSuccess(start))))
	require.Equal(t, StageSwactorJoined, dtNode(t, d, "w-0").Record.Stage, "it was held and counted then")
	require.Equal(t, string(AlreadyJoined), say(dtJoined(start)))
	dead := dtJoined(start)
	dead.Session = "s-none"
	require.Equal(t, string(DeadSession), say(dead))
	require.EqualValues(t, 9, d.Stats().NotApplied)
	require.EqualValues(t, 3, d.Stats().Folded)
	require.NoError(t, d.Snapshot().Check())
}

// TestAnswersBeforeAPanicCount: what the executor answered before it panicked is
// known, so it is not waited for.
//
//  1. w-0 is refused, w-1 is queued behind a call of its own attempt, and at w-2
//     the executor panics.
//  2. w-0 backs off and w-1 takes no place. Of three places w-2 has one.
//  3. w-3 and w-4 have the others, in the same instant.
func TestAnswersBeforeAPanicCount(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 3}, dtGroup("w", 5, "v1")), &dtExecutor{}
	x.submit = func(e Effect) (bool, error) {
		switch e.Key.Node {
		case "w-0":
			return false, errors.New("busy")
		case "w-1":
			return true, nil
		case "w-2":
			panic("out of order")
		}
		return false, nil
	}
	require.PanicsWithValue(t, "out of order", func() { _, _ = d.DriveUntilBlocked(dtStart, x) })
	require.NoError(t, d.Snapshot().Check())
	require.Equal(t, []string{"w-0 CreateLease", "w-1 CreateLease"}, dtKinds(x))
	require.Nil(t, dtNode(t, d, "w-0").Pending)
	require.Equal(t, "CreateLease: refused by the executor: busy", dtNode(t, d, "w-0").Retry.LastError)
	require.EqualValues(t, 1, d.Stats().Refused)
	require.NotNil(t, dtNode(t, d, "w-1").Pending)
	require.NotNil(t, dtNode(t, d, "w-2").Pending, "nobody knows")

	dtDrive(t, d, dtStart, x)
	require.Equal(t, []string{"w-3 CreateLease", "w-4 CreateLease"}, dtKinds(x))
	dtCheckLaw(t, d)
	at, ok := d.RequeueAt()
	require.True(t, ok)
	require.Equal(t, dtStart.Add(DefaultInitialDelay), at, "w-0 backs off")
}

// TestRetiresAfterAPanic: an executor that panics at the end of one attempt still
// hears of the end of the others, or its ledger would keep them for ever (G12).
func TestRetiresAfterAPanic(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 3, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	x.submit = func(e Effect) (bool, error) {
		d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
		return false, nil
	}
	for _, e := range x.submitted {
		d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
	}
	require.NoError(t, d.UpdateDesired(dtShape(2)))
	x.retire = func(attempt NodeAttemptID) {
		if attempt == 2 {
			panic("out of order")
		}
	}
	require.PanicsWithValue(t, "out of order", func() { _, _ = d.DriveUntilBlocked(dtStart, x) })
	require.Equal(t, []NodeAttemptID{1, 2}, x.retired)
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []NodeAttemptID{1, 2, 3}, x.retired, "each once")
	require.True(t, d.Converged(2))
}

// dtApart runs what may end its goroutine.
func dtApart(f func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f()
	}()
	<-ended
}

// dtWriter is a journal that does something in a write.
type dtWriter struct{ during func(text []byte) }

func (w *dtWriter) Write(text []byte) (int, error) {
	if w.during != nil {
		w.during(text)
	}
	return len(text), nil
}

// TestJournalEndsTheGoroutine: passes go on, and what was delivered before the write
// is folded, before what came after it.
func TestJournalEndsTheGoroutine(t *testing.T) {
	for _, line := range []string{`{"pass":`, `{"end":`} {
		t.Run(line, func(t *testing.T) {
			for _, foldOnly := range []bool{false, true} {
				w := &dtWriter{}
				d, x := dtDriver(t, Config{Journal: w}, dtGroup("w", 1, "v1")), &dtExecutor{}
				dtWorks(d, x)
				dtDrive(t, d, dtStart, x)
				require.True(t, d.Converged(1))
				before := d.stats.Folded + d.stats.NotApplied
				for i := range uint64(2 * inboxBlock) {
					d.Deliver(Observation{Kind: BootstrapProgress, Node: "w-0", Attempt: 1, StdoutSequence: i})
				}
				_, err := d.Replace("w-0", "first")
				require.NoError(t, err)
				delivered := d.deliveries()
				w.during = func(text []byte) {
					if bytes.Contains(text, []byte(line)) {
						runtime.Goexit()
					}
				}
				dtApart(func() {
					if foldOnly {
						_ = d.foldOnly(dtStart)
					} else {
						_, _ = d.DriveNext(dtStart, x)
					}
				})
				require.ErrorContains(t, d.JournalErr(), "did not return")
				require.Equal(t, line != `{"pass":`, d.hasFolded(delivered))

				_, err = d.Replace("w-0", "second")
				require.NoError(t, err)
				_, err = d.DriveNext(dtStart, x)
				require.NoError(t, err)
				require.True(t, d.hasFolded(delivered+1))
				require.Equal(t, "replaced by an operator: first", dtNode(t, d, "w-0").Record.FailedReason)
				if line == `{"pass":` {
					require.Equal(t, uint64(2*inboxBlock+2), d.stats.Folded+d.stats.NotApplied-before, "each once")
				}
				dtDrive(t, d, dtStart.Add(time.Hour), x)
				require.True(t, d.Converged(1))
				require.EqualValues(t, 2, dtNode(t, d, "w-0").Attempt)
			}
		})
	}
}

// dtError is an error that looks at the driver when it is asked what it says.
type dtError struct{ ask func() }

func (e *dtError) Error() string { e.ask(); return "full" }

// TestRefusalIsReadWithNoLock: the error of a refusal is the executor's own. It may
// call back into the driver, and fail.
func TestRefusalIsReadWithNoLock(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 2, "v1")), &dtExecutor{}
	asked := 0
	refusal := &dtError{func() { asked += d.Snapshot().Len() }}
	x.submit = func(e Effect) (bool, error) { return false, refusal }
	dtDrive(t, d, dtStart, x)
	require.Equal(t, 2*2, asked)
	require.Equal(t, "CreateLease: refused by the executor: full", dtNode(t, d, "w-0").Retry.LastError)

	d, x = dtDriver(t, Config{}, dtGroup("w", 2, "v1")), &dtExecutor{}
	x.submit = func(e Effect) (bool, error) {
		if e.Key.Node == "w-0" {
			return false, errors.New("full")
		}
		var none *dtError
		return false, none // whoever asks it what it says panics
	}
	require.Panics(t, func() { _, _ = d.DriveUntilBlocked(dtStart, x) })
	require.Nil(t, dtNode(t, d, "w-0").Pending, "it was answered before")
	require.NotNil(t, dtNode(t, d, "w-1").Pending, "until its deadline")
	x.submit = nil
	dtDrive(t, d, dtStart, x)
	dtCheckLaw(t, d)
}

// TestPanickingExecutor: the panic is the caller's, the driver stays whole: what
// was recorded is on record, and time resolves it.
func TestPanickingExecutor(t *testing.T) {
	for _, how := range []string{"panic", "Goexit"} {
		t.Run(how, func(t *testing.T) {
			d, x := dtDriver(t, Config{}, dtGroup("w", 3, "v1")), &dtExecutor{}
			blow := func(now time.Time) {
				done := make(chan any, 1)
				go func() {
					defer func() { done <- recover() }()
					_, _ = d.DriveUntilBlocked(now, x)
				}()
				if cause := <-done; how == "panic" {
					require.Equal(t, "out of order", cause)
				}
				require.NoError(t, d.Snapshot().Check())
			}
			out := func() {
				if how == "panic" {
					panic("out of order")
				}
				runtime.Goexit()
			}

			x.submit = func(e Effect) (bool, error) {
				if e.Key.Node == "w-1" {
					out()
				}
				return false, nil
			}
			blow(dtStart)
			require.Equal(t, []string{"w-0 CreateLease"}, dtKinds(x))
			for m := range d.Snapshot().All() {
				require.NotNil(t, m.Pending, "all three are on record, and none is called twice")
			}
			x.submit = nil
			require.Equal(t, 1, dtDrive(t, d, dtStart, x), "the pass that was cut short is made up for")
			require.Empty(t, x.submitted)
			dtCheckLaw(t, d)
			at, ok := d.RequeueAt()
			require.True(t, ok)
			require.Equal(t, dtStart.Add(DefaultOperationTimeout), at)

			x.expire = func(id OperationID) Completion {
				if id.Attempt == 2 {
					out()
				}
				return Completion{Operation: id, Class: ClassNotStarted}
			}
			blow(at)
			require.Nil(t, dtNode(t, d, "w-0").Pending)
			require.NotNil(t, dtNode(t, d, "w-1").Pending)
			x.expire = nil
			dtDrive(t, d, at, x)
			dtCheckLaw(t, d)
			for m := range d.Snapshot().All() {
				require.Nil(t, m.Pending)
				require.EqualValues(t, 1, m.Retry.ConsecutiveFailures)
			}

			require.NoError(t, d.UpdateDesired(dtShape(2)))
			x.retire = func(NodeAttemptID) { out() }
			x.submit = func(e Effect) (bool, error) {
				d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
				return false, nil
			}
			blow(at)
			x.retire = nil
			dtDrive(t, d, at, x)
			for looks := 0; !d.Converged(2); looks++ {
				require.Less(t, looks, 10)
				at, ok = d.RequeueAt()
				require.True(t, ok, "something is always waited for")
				dtDrive(t, d, at, x)
			}
			require.Zero(t, d.Snapshot().Len())
			dtCheckLaw(t, d)
		})
	}
}

// TestSpentSequence: an attempt without operation numbers ends by those it kept
// for its cleanup, and holds up nobody.
func TestSpentSequence(t *testing.T) {
	var faults []Event
	d, x := dtDriver(t, Config{}, dtGroup("w", 2, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	for _, e := range x.submitted {
		d.Deliver(dtCompleted(e, dtSuccess(e)))
	}
	dtDrive(t, d, dtStart, x)
	state := d.Snapshot()
	spent := state.find("w-0")
	spent.pending, spent.pendingSequence, spent.pendingDeadline = NoOperation, 0, 0
	spent.nextSequence = math.MaxUint64 - cleanupSequences
	healthy := state.find("w-1")
	healthy.pending, healthy.pendingSequence, healthy.pendingDeadline = NoOperation, 0, 0
	require.NoError(t, state.Check())
	d, err := newDriverFrom(state, dtShape(1, dtGroup("w", 2, "v1")), Config{OnEvent: func(e Event) {
		if e.Kind == EventFault {
			faults = append(faults, e)
		}
	}})
	require.NoError(t, err)

	x = &dtExecutor{}
	_, err = d.DriveNext(dtStart, x)
	require.NoError(t, err)
	require.Equal(t, []string{"w-1 LookupEndpoint"}, dtKinds(x))
	require.Len(t, faults, 1)
	require.ErrorIs(t, faults[0].Err, ErrSequenceExhausted)
	require.Equal(t, LogicalNodeID("w-0"), faults[0].Node)
	require.Equal(t, "lookup-endpoint", faults[0].Rule.Name)
	require.Equal(t, StageFailed, dtNode(t, d, "w-0").Record.Stage)
	dtCheckLaw(t, d)
	dtDrive(t, d, dtStart, x)
	destroy := dtLast(t, x, DestroyLease)
	require.Equal(t, OperationID{1, math.MaxUint64 - cleanupSequences}, destroy.Operation)
	d.Deliver(dtCompleted(destroy, dtSuccess(destroy)))
	dtDrive(t, d, dtStart, x)
	at, _ := d.RequeueAt()
	require.Equal(t, dtStart.Add(time.Second), at)
	dtDrive(t, d, at, x)
	require.Equal(t, OperationID{3, 1}, dtLast(t, x, CreateLease).Operation)
	require.Len(t, faults, 1)

	// With not even a number left for the cleanup it stays, is reported in
	// every pass, and makes none by itself.
	state = d.Snapshot()
	state.find("w-1").nextSequence = math.MaxUint64
	state.find("w-1").pending, state.find("w-1").pendingSequence, state.find("w-1").pendingDeadline = NoOperation, 0, 0
	d, err = newDriverFrom(state, dtShape(2, dtGroup("w", 1, "v1")), d.config)
	require.NoError(t, err)
	faults = nil
	dtDrive(t, d, at, x)
	require.Len(t, faults, 1)
	require.Equal(t, "destroy-lease", faults[0].Rule.Name)
	require.Zero(t, dtDrive(t, d, at, x))
	d.Trigger()
	dtDrive(t, d, at, x)
	require.Len(t, faults, 2, "it is still there")
	require.ErrorIs(t, d.Plan(at).Faults[0].Err, ErrSequenceExhausted)
	dtCheckLaw(t, d)
}

// TestSpentAllocator stops new attempts and nothing else.
func TestSpentAllocator(t *testing.T) {
	var faults []Event
	d := dtDriver(t, Config{FirstAttempt: math.MaxUint64 - 2, OnEvent: func(e Event) {
		if e.Kind == EventFault {
			faults = append(faults, e)
		}
	}}, dtGroup("w", 3, "v1"))
	x := &dtExecutor{}
	require.Equal(t, 2, dtDrive(t, d, dtStart, x))
	require.Equal(t, []string{"w-0 CreateLease", "w-1 CreateLease"}, dtKinds(x))
	require.Len(t, faults, 2, "w-2, in each of the two passes")
	require.Equal(t, LogicalNodeID("w-2"), faults[0].Node)
	require.ErrorIs(t, faults[0].Err, ErrAttemptsExhausted)
	require.Equal(t, "insert", faults[0].Rule.Name)
	dtCheckLaw(t, d)

	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v2"))))
	x.submit = func(e Effect) (bool, error) {
		d.Deliver(dtCompleted(e, dtSuccess(e)))
		return false, nil
	}
	faults = nil
	dtDrive(t, d, dtStart.Add(DefaultOperationTimeout), x)
	dtDrive(t, d, dtStart.Add(2*DefaultOperationTimeout), x)
	require.Equal(t, StageDestroyed, dtNode(t, d, "w-0").Record.Stage, "it cannot be replaced")
	require.Equal(t, 1, d.Snapshot().Len(), "w-1 is gone all the same")
	require.NotEmpty(t, faults)
	require.Equal(t, "restart", faults[len(faults)-1].Rule.Name)
	require.Zero(t, dtDrive(t, d, dtStart.Add(2*DefaultOperationTimeout), x))
	require.NoError(t, d.UpdateDesired(dtShape(3)))
	dtDrive(t, d, dtStart.Add(3*DefaultOperationTimeout), x)
	require.True(t, d.Converged(3))
	dtCheckLaw(t, d)
}

// TestRestartCarriesFailures only from an attempt that failed.
func TestRestartCarriesFailures(t *testing.T) {
	for _, failed := range []bool{true, false} {
		d, x := dtDriver(t, Config{}, dtGroup("w", 1, "v1")), &dtExecutor{}
		dtDrive(t, d, dtStart, x)
		now := dtStart
		for range 3 { // three failed tries of one attempt
			e := dtLast(t, x, CreateLease)
			d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
			dtDrive(t, d, now, x)
			now, _ = d.RequeueAt()
			dtDrive(t, d, now, x)
		}
		require.EqualValues(t, 3, dtNode(t, d, "w-0").Retry.ConsecutiveFailures)
		require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v2"))))
		e := dtLast(t, x, CreateLease)
		if failed {
			d.Deliver(dtCompleted(e, dtFailed(e, ClassLeaseLost)))
		} else {
			dtDrive(t, d, now, x)
			require.Equal(t, Deleting, dtNode(t, d, "w-0").Intent)
			d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
		}
		dtDrive(t, d, now, x)
		if failed {
			at, _ := d.RequeueAt()
			require.Equal(t, now.Add(8*time.Second), at, "the fourth failure in a row")
			dtDrive(t, d, at, x)
			require.EqualValues(t, 4, dtNode(t, d, "w-0").Retry.ConsecutiveFailures)
		} else {
			require.Zero(t, dtNode(t, d, "w-0").Retry.ConsecutiveFailures, "it was replaced, and at once")
		}
		require.EqualValues(t, 2, dtNode(t, d, "w-0").Attempt)
		require.Equal(t, "v2", dtLast(t, x, CreateLease).Spec().Shape.Image)
	}
}

// TestIdleGroupsGoTogether: of many groups a few that nobody needs stay, because
// to forget one is to look at all, and one that comes back is there again.
func TestIdleGroupsGoTogether(t *testing.T) {
	groups := make([]NodeGroupSpec, 64)
	for i := range groups {
		groups[i] = dtGroup(NodeGroupID(fmt.Sprintf("g%02d", i)), 1, "v1")
	}
	d, x := dtDriver(t, Config{}, groups...), &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	for i, step := range []struct {
		wish []NodeGroupSpec
		left int
	}{{groups[3:], 64}, {groups[2:], 64}, {groups, 64}, {groups[1:], 64}, {groups[4:], 60}, {groups, 64}, {nil, 0}} {
		generation := uint64(2 + i)
		require.NoError(t, d.UpdateDesired(dtShape(generation, step.wish...)))
		dtDrive(t, d, dtStart, x)
		require.True(t, d.Converged(generation))
		require.Len(t, d.state.groups, step.left)
		require.Equal(t, len(step.wish), d.Snapshot().Len())
		dtCheckLaw(t, d)
	}
}

// TestJournalLetsGoOfALargePass: the passes after it do not pay for it.
func TestJournalLetsGoOfALargePass(t *testing.T) {
	d, x := dtDriver(t, Config{Journal: io.Discard}, dtGroup("w", maxSpare+1, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	require.Len(t, x.submitted, maxSpare+1)
	require.NoError(t, d.JournalErr())
	require.Empty(t, d.journal.touched)
	require.LessOrEqual(t, cap(d.journal.touched), maxSpare)
}

// TestNothingIsLeftBehind: after groups and slots are gone, so is what the
// driver kept about them.
func TestNothingIsLeftBehind(t *testing.T) {
	d := dtDriver(t, Config{MaxInFlight: 100}, dtGroup("keep", 1, "v1"))
	x := &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	for round := range uint64(5) {
		groups := []NodeGroupSpec{dtGroup("keep", 1, "v1"), dtGroup(NodeGroupID(fmt.Sprintf("r%d", round)), 200, "v1"), dtGroup("empty", 0, "v1")}
		require.NoError(t, d.UpdateDesired(dtShape(2+2*round, groups...)))
		dtDrive(t, d, dtStart, x)
		require.True(t, d.Converged(2+2*round))
		require.Len(t, d.state.groups, 3)
		require.NoError(t, d.UpdateDesired(dtShape(3+2*round, dtGroup("keep", 1, "v1"))))
		dtDrive(t, d, dtStart, x)
		require.True(t, d.Converged(3+2*round))
		require.Len(t, d.state.groups, 1)
		require.Equal(t, 1, d.state.Len())
		require.Zero(t, d.deadlines.Len())
		require.Zero(t, d.capacity.byAge.Len())
		require.Zero(t, d.capacity.taken)
		require.Empty(t, d.hot)
		dtCheckLaw(t, d)
	}
	require.Len(t, x.retired, 5*200, "the executor was told of every attempt that is over")
}

// TestGroupComesBackWhileItGoes: a group removed and wished for again before
// its last node is gone is one group.
func TestGroupComesBackWhileItGoes(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("b", 2, "v1")), &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	x.submit = nil
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("a", 1, "v1"))))
	dtDrive(t, d, dtStart, x)
	require.NoError(t, d.UpdateDesired(dtShape(3, dtGroup("a", 1, "v1"), dtGroup("b", 3, "v1"))))
	dtDrive(t, d, dtStart, x)
	dtCheckLaw(t, d)
	require.Equal(t, Deleting, dtNode(t, d, "b-0").Intent, "what is being given up stays given up")
	require.Equal(t, Active, dtNode(t, d, "b-2").Intent)
	for _, e := range x.submitted {
		d.Deliver(dtCompleted(e, dtSuccess(e)))
	}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	require.True(t, d.Converged(3))
	require.Greater(t, dtNode(t, d, "b-0").Attempt, NodeAttemptID(3))
}

// TestScaleDownTakesTheHighest indices, w-9 before w-10 in order.
func TestScaleDownTakesTheHighest(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 12, "v1")), &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	dtKinds(x)
	x.submit = nil
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 9, "v1"))))
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []string{"w-9 DestroyLease", "w-10 DestroyLease", "w-11 DestroyLease"}, dtKinds(x))
	require.NoError(t, d.UpdateDesired(dtShape(3, dtGroup("w", 12, "v1"))))
	dtDrive(t, d, dtStart, x)
	ready, desired := d.Progress()
	require.Equal(t, []int{9, 12}, []int{ready, desired})
}

// TestSettledPassDoesNothing, however it is asked for.
func TestSettledPassDoesNothing(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 5, "v1")), &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	dtKinds(x)
	state := dtJSON(t, d.Snapshot())
	_, ok := d.RequeueAt()
	require.False(t, ok)
	for hour := range 100 {
		d.Trigger()
		require.Equal(t, 1, dtDrive(t, d, dtStart.Add(time.Duration(hour)*time.Hour), x))
	}
	require.Empty(t, x.submitted)
	require.Equal(t, state, dtJSON(t, d.Snapshot()))
	require.Empty(t, d.hot)
}

// TestPlanIsADryRun: it says what comes, changes nothing, and looks at the
// latest wish.
func TestPlanIsADryRun(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 2, "v1")), &dtExecutor{}
	tell := func() (lines []string) {
		state := dtJSON(t, d.Snapshot())
		plan := d.Plan(dtStart)
		require.Equal(t, plan, d.Plan(dtStart))
		require.Equal(t, state, dtJSON(t, d.Snapshot()))
		for _, a := range plan.Actions {
			lines = append(lines, fmt.Sprintf("%s %s %s", a.Node, a.Kind, a.Operation))
		}
		return lines
	}
	require.Equal(t, []string{"w-0 Insert none", "w-1 Insert none"}, tell(), "also before the first pass")
	require.Equal(t, NodeAttemptID(2), d.Plan(dtStart).Actions[1].NewAttempt)
	require.Equal(t, dtStart, d.Clock(dtStart))
	_, err := d.DriveNext(dtStart, x)
	require.NoError(t, err)
	require.Equal(t, []string{"w-0 Dispatch CreateLease", "w-1 Dispatch CreateLease"}, tell())
	dtDrive(t, d, dtStart, x)
	require.Empty(t, tell())
	require.Equal(t, dtStart.Add(DefaultOperationTimeout), d.Plan(dtStart).RequeueAt)
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v1"))))
	require.Equal(t, []string{"w-1 BeginDelete none"}, tell())
	require.Equal(t, uint64(2), d.Plan(dtStart).ObservedGeneration)
	require.Len(t, x.submitted, 2)
}

// TestClockOfReaders: asking for another time feeds no clock.
func TestClockOfReaders(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
	require.Equal(t, dtStart, d.Clock(dtStart), "before the first pass, what it is given")
	require.Equal(t, 1900, d.Clock(time.Time{}).Year())
	require.Equal(t, 2192, d.Clock(time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)).Year())
	dtDrive(t, d, dtStart, &dtExecutor{})
	require.Equal(t, dtStart.Add(time.Hour), d.Clock(dtStart.Add(time.Hour)))
	require.Equal(t, dtStart, d.Clock(dtStart))
	require.Equal(t, dtStart, d.Clock(dtStart.Add(-time.Hour)))
	require.Equal(t, dtStart, d.Clock(time.Time{}), "it does not go back")
	d.Plan(dtStart.Add(time.Hour))
	d.Explain("w-0", dtStart.Add(time.Hour))
	require.Equal(t, dtStart, d.Clock(dtStart))
}

// TestHeld: what costs money or may.
func TestHeld(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 4, "v1")), &dtExecutor{}
	require.Empty(t, d.Held())
	dtDrive(t, d, dtStart, x)
	require.Len(t, d.Held(), 4, "a create in flight may have bought something")
	d.Deliver(dtCompleted(x.submitted[0], dtSuccess(x.submitted[0])))
	d.Deliver(dtCompleted(x.submitted[1], dtFailed(x.submitted[1], ClassAmbiguous)))
	d.Deliver(dtCompleted(x.submitted[2], dtFailed(x.submitted[2], ClassDefinite)))
	d.Deliver(dtCompleted(x.submitted[3], dtFailed(x.submitted[3], ClassNotStarted)))
	dtDrive(t, d, dtStart, x)
	key := func(node LogicalNodeID, attempt NodeAttemptID) ExternalKey {
		return ExternalKey{Run: "run", Node: node, Attempt: attempt}
	}
	require.Equal(t, []HeldSlot{{Key: key("w-0", 1), Lease: "l-1"}, {Key: key("w-1", 2), Unresolved: true}}, d.Held())
}

// TestFoldOnly takes what was delivered on record and does nothing about it.
func TestFoldOnly(t *testing.T) {
	var seen []string
	d := dtDriver(t, Config{OnEvent: func(e Event) { seen = append(seen, e.Kind.String()) }}, dtGroup("w", 1, "v1"))
	x := &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	e := dtLast(t, x, CreateLease)
	d.Deliver(dtCompleted(e, dtSuccess(e)))
	state := dtJSON(t, d.Snapshot())
	require.ErrorIs(t, d.foldOnly(time.Time{}), ErrClockExhausted)
	require.Equal(t, state, dtJSON(t, d.Snapshot()))
	seen = nil
	require.NoError(t, d.foldOnly(dtStart))
	require.Equal(t, []string{"Fold", "Stage"}, seen)
	require.Equal(t, ProviderLeaseID("l-1"), dtNode(t, d, "w-0").Record.Lease)
	require.Len(t, x.submitted, 1)
	require.Equal(t, 1, dtDrive(t, d, dtStart, x), "whoever drives on goes on from there")
	dtLast(t, x, LookupEndpoint)
	dtCheckLaw(t, d)
}

// TestFiftyHostsAtOnce: many goroutines that all believe to be the host do what
// one would have done. For the race detector.
func TestFiftyHostsAtOnce(t *testing.T) {
	var events sync.Map
	d := dtDriver(t, Config{MaxInFlight: 1, OnEvent: func(e Event) { events.Store(e.String(), true) }})
	x := &dtExecutor{}
	start := make(chan struct{})
	var hosts sync.WaitGroup
	for range 50 {
		hosts.Go(func() {
			<-start
			if err := d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v1"))); err != nil {
				t.Error(err)
			}
			d.Trigger()
			d.Deliver(Observation{Kind: NodeLost, Node: "w-0", Attempt: 99})
			if _, err := d.DriveUntilBlocked(dtStart, x); err != nil && !errors.Is(err, ErrReentrantPass) {
				t.Error(err)
			}
			if err := d.Snapshot().Check(); err != nil {
				t.Error(err)
			}
			d.TriggerIfDue(dtStart)
			d.RequeueAt()
			d.Converged(2)
			d.Progress()
			d.Stats()
			d.Held()
			d.Plan(dtStart)
			if e, ok := d.Explain("w-0", dtStart); !ok || e.String() == "" {
				t.Error("a desired slot is explained at any time")
			}
		})
	}
	close(start)
	hosts.Wait()
	dtDrive(t, d, dtStart, x) // for those that came while another drove
	require.Equal(t, []string{"w-0 CreateLease"}, dtKinds(x))
	s := d.Stats()
	require.EqualValues(t, 1, s.Attempts)
	require.EqualValues(t, 1, s.Dispatched)
	require.EqualValues(t, 50, s.NotApplied)
	dtCheckLaw(t, d)
}

// TestSnapshotIsACopy: a holder sees one moment, and what it does to it stays
// with it.
func TestSnapshotIsACopy(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 2, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	before := d.Snapshot()
	text := dtJSON(t, before)
	m := dtNode(t, d, "w-0")
	m.Pending.Deadline = time.Time{}
	m.Record.Lease = "mine"
	for _, e := range x.submitted {
		d.Deliver(dtCompleted(e, dtSuccess(e)))
	}
	dtDrive(t, d, dtStart, x)
	require.Equal(t, text, dtJSON(t, before))
	require.NotEqual(t, text, dtJSON(t, d.Snapshot()))
	require.Equal(t, ProviderLeaseID("l-1"), dtNode(t, d, "w-0").Record.Lease)
	_, ok := d.Node("w-9")
	require.False(t, ok)
}

// TestDriverGoesOnFromAState, with operations in flight and nodes that nobody
// wishes for any more.
func TestDriverGoesOnFromAState(t *testing.T) {
	first, x := dtDriver(t, Config{}, dtGroup("v", 1, "v1"), dtGroup("w", 3, "v1")), &dtExecutor{}
	dtDrive(t, first, dtStart, x)
	dtKinds(x)
	d, err := newDriverFrom(first.Snapshot(), dtShape(7, dtGroup("w", 4, "v1")), Config{MaxInFlight: 2})
	require.NoError(t, err)
	e, ok := d.Explain("v-0", dtStart)
	require.True(t, ok)
	require.Equal(t, "begin-delete", e.Decision.Rule.Name)
	require.Equal(t, dtStart, e.Since)
	_, err = d.DriveNext(dtStart, x)
	require.NoError(t, err)
	require.Equal(t, 4, d.capacity.taken, "they are in flight, whatever the cap says")
	dtDrive(t, d, dtStart, x)
	require.Empty(t, x.submitted)
	dtDrive(t, d, dtStart.Add(DefaultOperationTimeout), x)
	require.Len(t, x.expired, 4)
	require.Equal(t, []string{"w-3 CreateLease"}, dtKinds(x), "the others back off")
	dtDrive(t, d, dtStart.Add(DefaultOperationTimeout+time.Second), x)
	require.Equal(t, []string{"v-0 CreateLease"}, dtKinds(x), "what came of the old one's create is asked first")
	dtCheckLaw(t, d)
}

// A hook that hears of a loss asks whether the cluster is converged. The answer
// of the pass before would send a waiting service on as if nothing had happened.
func TestEventOfALossComesAfterConvergedIsFalse(t *testing.T) {
	var d *ClusterDriver
	var converged []bool
	d, err := NewClusterDriver(shapeOf(1, groupOf("w", 1)), Config{OnEvent: func(e Event) {
		if e.Kind == EventAttemptFailed || e.Kind == EventReady {
			converged = append(converged, d.Converged(1))
		}
	}})
	require.NoError(t, err)
	x, err := NewExecutor(newHtBackend(), ExecutorConfig{Deliver: d.Deliver, Go: func(f func()) { f() }})
	require.NoError(t, err)
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	_, err = d.DriveUntilBlocked(now, x)
	require.NoError(t, err)
	d.Deliver(Observation{Kind: NodeLost, Node: "w-0", Attempt: 1})
	_, err = d.DriveUntilBlocked(now, x)
	require.NoError(t, err)
	require.Equal(t, []bool{true, false}, converged)
}

// dtCall is a call that a dtBackend was asked to make.
type dtCall struct {
	kind         OperationKind
	key          ExternalKey
	operation    OperationID
	spec         LogicalNodeSpec
	lease        ProviderLeaseID
	endpoint     *SSHEndpoint
	session      BootstrapSessionID
	swactor      SwactorID
	adoptOnly    bool
	createsSent  uint32
	lastCreateAt time.Time
	now          time.Time
	sink         BootstrapSink
	ctx          context.Context
}

// dtBackend is a backend that keeps what it was asked and answers as told.
type dtBackend struct {
	answer func(dtCall) error // nil: all goes well

	mu    sync.Mutex
	calls []dtCall
}

func (b *dtBackend) call(c dtCall) error {
	b.mu.Lock()
	b.calls = append(b.calls, c)
	b.mu.Unlock()
	if b.answer == nil {
		return nil
	}
	return b.answer(c)
}

// told lists the calls so far, "w-0 CreateLease".
func (b *dtBackend) told() (lines []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.calls {
		lines = append(lines, fmt.Sprintf("%s %s", c.key.Node, c.kind))
	}
	return lines
}

func (b *dtBackend) CreateLease(ctx context.Context, r CreateLeaseRequest) (CreateLeaseResult, error) {
	err := b.call(dtCall{kind: CreateLease, key: r.Key, operation: r.Operation, spec: r.Spec, adoptOnly: r.AdoptOnly,
		createsSent: r.CreatesSent, lastCreateAt: r.LastCreateAt, now: r.Now, ctx: ctx})
	return CreateLeaseResult{Lease: ProviderLeaseID(fmt.Sprintf("l-%d", r.Key.Attempt))}, err
}

func (b *dtBackend) LookupEndpoint(ctx context.Context, r LookupEndpointRequest) (LookupEndpointResult, error) {
	err := b.call(dtCall{kind: LookupEndpoint, key: r.Key, operation: r.Operation, spec: r.Spec, lease: r.Lease, ctx: ctx})
	return LookupEndpointResult{Endpoint: &SSHEndpoint{Host: "10.0.0.1", Port: 22}}, err
}

func (b *dtBackend) StartBootstrap(ctx context.Context, r StartBootstrapRequest) (StartBootstrapResult, error) {
	err := b.call(dtCall{kind: StartBootstrap, key: r.Key, operation: r.Operation, spec: r.Spec, lease: r.Lease,
		endpoint: &r.Endpoint, sink: r.Sink, ctx: ctx})
	return StartBootstrapResult{Session: dtSession(r.Key.Attempt)}, err
}

func (b *dtBackend) BootstrapConvergenceObserved(ctx context.Context, r BootstrapConvergenceObservedRequest) error {
	return b.call(dtCall{kind: BootstrapConvergenceObserved, key: r.Key, operation: r.Operation, spec: r.Spec, lease: r.Lease,
		endpoint: &r.Endpoint, session: r.Session, swactor: r.Swactor, ctx: ctx})
}

func (b *dtBackend) CancelBootstrap(ctx context.Context, r CancelBootstrapRequest) error {
	return b.call(dtCall{kind: CancelBootstrap, key: r.Key, operation: r.Operation, spec: r.Spec, lease: r.Lease,
		endpoint: r.Endpoint, session: r.Session, ctx: ctx})
}

func (b *dtBackend) DestroyLease(ctx context.Context, r DestroyLeaseRequest) error {
	return b.call(dtCall{kind: DestroyLease, key: r.Key, operation: r.Operation, spec: r.Spec, lease: r.Lease,
		createsSent: r.CreatesSent, lastCreateAt: r.LastCreateAt, now: r.Now, ctx: ctx})
}

// dtInline returns a driver and the executor this package ships over b, whose
// calls are made at once within Submit.
func dtInline(t *testing.T, b *dtBackend, config Config, groups ...NodeGroupSpec) (*ClusterDriver, *Executor) {
	d := dtDriver(t, config, groups...)
	x, err := NewExecutor(b, ExecutorConfig{Deliver: d.Deliver, Go: func(f func()) { f() }})
	require.NoError(t, err)
	return d, x
}

// dtNext drives at the next deadline and returns it.
func dtNext(t *testing.T, d *ClusterDriver, x EffectExecutor) time.Time {
	at, ok := d.RequeueAt()
	require.True(t, ok)
	dtDrive(t, d, at, x)
	return at
}

// TestRetryCarriesTheSameKeyAndSpec: a create that may have bought a machine is
// asked after with what it was made of, whatever is wished for by then.
func TestRetryCarriesTheSameKeyAndSpec(t *testing.T) {
	b := &dtBackend{answer: func(c dtCall) error {
		if c.kind == CreateLease && !c.adoptOnly && c.key.Attempt == 1 {
			return Ambiguous(errors.New("cut"))
		}
		return nil
	}}
	d, x := dtInline(t, b, Config{}, dtGroup("w", 1, "v1"))
	dtDrive(t, d, dtStart, x)
	retried := dtNext(t, d, x)
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v2"))))
	dtDrive(t, d, retried, x)
	require.Equal(t, []string{"w-0 CreateLease", "w-0 CreateLease", "w-0 CreateLease", "w-0 DestroyLease", "w-0 CreateLease", "w-0 LookupEndpoint", "w-0 StartBootstrap"}, b.told(),
		"begin-delete does not wait for the delay of the way up")
	first, second, adopt, destroy, fresh := b.calls[0], b.calls[1], b.calls[2], b.calls[3], b.calls[4]
	for i, c := range b.calls[:4] {
		require.Equal(t, first.key, c.key)
		require.Equal(t, "v1", c.spec.Shape.Image)
		require.Equal(t, OperationID{1, uint64(i + 1)}, c.operation)
	}
	require.Equal(t, []bool{false, false, true}, []bool{first.adoptOnly, second.adoptOnly, adopt.adoptOnly})
	require.Equal(t, []uint32{0, 1, 2, 2}, []uint32{first.createsSent, second.createsSent, adopt.createsSent, destroy.createsSent})
	require.True(t, first.lastCreateAt.IsZero())
	require.Equal(t, dtStart, second.lastCreateAt)
	require.Equal(t, retried, adopt.lastCreateAt)
	require.Equal(t, retried, destroy.lastCreateAt)
	require.Equal(t, []time.Time{dtStart, retried, retried, retried}, []time.Time{first.now, second.now, adopt.now, destroy.now})
	require.Equal(t, ProviderLeaseID("l-1"), destroy.lease)

	require.Equal(t, ExternalKey{Run: "run", Node: "w-0", Attempt: 2}, fresh.key)
	require.NotEqual(t, first.key.Token(), fresh.key.Token())
	require.Equal(t, "v2", fresh.spec.Shape.Image)
	require.False(t, fresh.adoptOnly)
	require.Zero(t, fresh.createsSent)
	require.True(t, fresh.lastCreateAt.IsZero())
}

// TestIdentityInEveryRequest: over eight attempts at one and the same address,
// every request names the key, the machine and the session of its own attempt.
func TestIdentityInEveryRequest(t *testing.T) {
	b := &dtBackend{}
	d, x := dtInline(t, b, Config{}, dtGroup("w", 1, "v1"))
	dtDrive(t, d, dtStart, x)
	now := dtStart
	for attempt := NodeAttemptID(1); attempt <= 8; attempt++ {
		m := dtNode(t, d, "w-0")
		require.Equal(t, attempt, m.Attempt)
		require.Equal(t, StageBootstrapRunning, m.Record.Stage)
		start := b.calls[len(b.calls)-1]
		require.Equal(t, StartBootstrap, start.kind)
		switch attempt % 3 {
		case 0:
			start.sink.Joined(dtSession(attempt), "agent")
			dtDrive(t, d, now, x)
			require.True(t, d.Converged(d.Generation()))
			start.sink.NodeLost("spot")
		case 1:
			start.sink.Failed(dtSession(attempt), "no route")
		case 2:
			image := fmt.Sprintf("v%d", attempt)
			require.NoError(t, d.UpdateDesired(dtShape(d.Generation()+1, dtGroup("w", 1, image))))
		}
		for old := NodeAttemptID(1); old < attempt; old++ { // and the dead ones go on talking
			start.sink.Joined(dtSession(old), "ghost")
			start.sink.Closed(dtSession(old))
		}
		dtDrive(t, d, now, x)
		if _, waits := d.RequeueAt(); waits && dtNode(t, d, "w-0").Attempt == attempt {
			now = dtNext(t, d, x)
		}
	}
	endpoint := &SSHEndpoint{Host: "10.0.0.1", Port: 22}
	seen := map[OperationKind]int{}
	for _, c := range b.calls {
		seen[c.kind]++
		attempt := c.key.Attempt
		require.Equal(t, ExternalKey{Run: "run", Node: "w-0", Attempt: attempt}, c.key)
		require.Equal(t, attempt, c.operation.Attempt)
		require.Equal(t, LogicalNodeID("w-0"), c.spec.Node)
		lease, session := ProviderLeaseID(fmt.Sprintf("l-%d", attempt)), dtSession(attempt)
		switch c.kind {
		case CreateLease:
			continue
		case StartBootstrap, BootstrapConvergenceObserved, CancelBootstrap:
			require.Equal(t, endpoint, c.endpoint)
		}
		require.Equal(t, lease, c.lease)
		switch c.kind {
		case CancelBootstrap, BootstrapConvergenceObserved:
			require.Equal(t, session, c.session)
		}
	}
	require.Equal(t, map[OperationKind]int{CreateLease: 9, LookupEndpoint: 9, StartBootstrap: 9, BootstrapConvergenceObserved: 2,
		CancelBootstrap: 6, DestroyLease: 8}, seen)
}

// TestNoCapacity: a provider with nothing to rent for ten minutes is asked as
// often as the delays say and no more.
func TestNoCapacity(t *testing.T) {
	for _, jitter := range []float64{0, 0.5} {
		d := dtDriver(t, Config{Retry: RetryPolicy{Jitter: jitter}}, dtGroup("w", 300, "v1"))
		x, now := &dtExecutor{}, dtStart
		var calls []time.Time
		x.submit = func(e Effect) (bool, error) {
			calls = append(calls, now)
			d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
			return false, nil
		}
		for now.Before(dtStart.Add(600 * time.Second)) {
			dtDrive(t, d, now, x)
			at, ok := d.RequeueAt()
			require.True(t, ok)
			now = at
		}
		busiest := func(from time.Time) (most int) {
			for first, last := 0, 0; last < len(calls); last++ {
				for calls[last].Sub(calls[first]) >= time.Second {
					first++
				}
				if !calls[first].Before(from) {
					most = max(most, last-first+1)
				}
			}
			return most
		}
		require.EqualValues(t, 300, d.Stats().Attempts, "no attempt ends, so none begins")
		if jitter == 0 {
			require.Len(t, calls, 300*15)
			require.Equal(t, 300, busiest(dtStart))
			continue
		}
		require.Greater(t, len(calls), 300*15, "jitter makes waits shorter, never longer")
		require.Less(t, len(calls), 300*30)
		require.LessOrEqual(t, busiest(dtStart.Add(63*time.Second)), 60, "once all are at the cap they are spread")
	}
}

// TestHerd: a thousand slots that fail together do not come back together, and
// every run spreads them alike.
func TestHerd(t *testing.T) {
	run := func() *ClusterDriver {
		d, x := dtDriver(t, Config{Retry: RetryPolicy{Jitter: 0.5}}, dtGroup("w", 1000, "v1")), &dtExecutor{}
		x.submit = func(e Effect) (bool, error) {
			d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
			return false, nil
		}
		dtDrive(t, d, dtStart, x)
		return d
	}
	d := run()
	var spread [10]int
	for m := range d.Snapshot().All() {
		wait := m.Retry.NextEffectAt.Sub(dtStart)
		require.Greater(t, wait, time.Second/2)
		require.LessOrEqual(t, wait, time.Second)
		spread[(wait-time.Second/2-1)/(time.Second/20)]++
	}
	for part, n := range spread {
		require.Greater(t, n, 50, "part %d of %v", part, spread)
		require.Less(t, n, 150, "part %d of %v", part, spread)
	}
	require.Equal(t, dtJSON(t, d.Snapshot()), dtJSON(t, run().Snapshot()))
}

// TestStats counts what was done.
func TestStats(t *testing.T) {
	var panics uint64
	d, x := dtDriver(t, Config{OnEvent: func(Event) { panics++; panic("hook") }}, dtGroup("w", 2, "v1")), &dtExecutor{}
	require.Zero(t, d.Stats())
	x.submit = func(e Effect) (bool, error) {
		if e.Key.Node == "w-1" {
			return false, errors.New("refused")
		}
		return false, nil
	}
	dtDrive(t, d, dtStart, x)
	dtDrive(t, d, dtStart.Add(DefaultOperationTimeout), x)
	d.Deliver(Observation{Kind: NodeLost, Node: "gone", Attempt: 1})
	dtDrive(t, d, dtStart.Add(DefaultOperationTimeout), x)
	require.Equal(t, DriverStats{Passes: 4, Folded: 3, NotApplied: 1, Dispatched: 3, Refused: 2, Expired: 1, Attempts: 2,
		HookPanics: panics}, d.Stats())
}

// TestDrain is the wish of a host that drains.
func TestDrain(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 2, "v1")), &dtExecutor{}
	_, err := d.DriveNext(dtStart, x)
	require.NoError(t, err)
	require.NoError(t, d.Drain())
	require.Equal(t, uint64(2), d.Generation())
	dtDrive(t, d, dtStart, x)
	require.True(t, d.Converged(2))
	require.Zero(t, d.Snapshot().Len())
}

// TestStaleStepIsDropped: what was decided for an attempt that is over is not
// done to the next, and the slot is looked at again.
func TestStaleStepIsDropped(t *testing.T) {
	d, x := dtDriver(t, Config{}, dtGroup("w", 1, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	state := dtJSON(t, d.Snapshot())
	n := d.state.find("w-0")
	effects := d.apply([]step{{slot: n.slot(), node: n, attempt: 7, decision: decision{rule: &ladder[4]}}}, d.clock.tick)
	require.Empty(t, effects)
	require.Empty(t, d.over)
	require.Equal(t, state, dtJSON(t, d.Snapshot()))
	require.True(t, d.ownDirt)
	require.True(t, n.hot)
}
