package provisioning

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
	require.LessOrEqual(t, cap(d.spare), maxSpare)
	require.LessOrEqual(t, cap(d.inbox), maxSpare)
	require.LessOrEqual(t, cap(d.steps), maxSpare)
	require.LessOrEqual(t, cap(d.effects), maxSpare)
	require.Empty(t, d.missing)
	for _, e := range d.effects[:cap(d.effects)] {
		require.Nil(t, e.node, "a list that is kept keeps nothing alive")
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
