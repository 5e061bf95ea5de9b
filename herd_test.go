package provisioning

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// bnHerd is a cluster whose provider refuses everything until healsAt. Its time
// is virtual: it goes on to whatever comes next, the end of a call or RequeueAt.
type bnHerd struct {
	tb      testing.TB
	driver  *ClusterDriver
	policy  RetryPolicy
	limit   int
	takes   time.Duration // how long a call takes
	start   time.Time
	now     time.Time
	healsAt time.Time

	calls   bnCalls
	nodes   map[NodeGroupID][]bnHerdNode
	order   []OperationKind // of all calls, while it is not nil
	longest time.Duration   // that a node has waited for a place
}

// bnHerdNode is what the provider expects of a node.
type bnHerdNode struct {
	calls   int
	wantsAt time.Time // since when it may call; while it does, when the call is out of time
	calling bool
	done    bool // it will ask for nothing any more
}

type bnCall struct {
	effect Effect
	endsAt time.Time
}

// bnCalls are in the order in which they end, for all take equally long.
type bnCalls struct {
	calls []bnCall
	first int
}

func (c *bnCalls) len() int { return len(c.calls) - c.first }

func (c *bnCalls) put(call bnCall) {
	if c.first == len(c.calls) {
		c.calls, c.first = c.calls[:0], 0
	}
	c.calls = append(c.calls, call)
}

func newBnHerd(tb testing.TB, limit int, takes time.Duration, shape ClusterShape) *bnHerd {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	h := &bnHerd{tb: tb, limit: limit, takes: takes, start: start, now: start, healsAt: start, nodes: map[NodeGroupID][]bnHerdNode{}}
	h.policy = RetryPolicy{}.withDefaults()
	h.wish(shape)
	var err error
	h.driver, err = NewClusterDriver(shape, Config{MaxInFlight: limit})
	require.NoError(tb, err)
	h.drive()
	return h
}

// wish tells the provider of new nodes, and that those of a group that is not
// wished for are to go.
func (h *bnHerd) wish(shape ClusterShape) {
	for _, g := range shape.Groups {
		for i := len(h.nodes[g.GroupID]); i < g.Count; i++ {
			h.nodes[g.GroupID] = append(h.nodes[g.GroupID], bnHerdNode{wantsAt: h.now})
		}
	}
	if h.driver != nil {
		require.NoError(h.tb, h.driver.UpdateDesired(shape))
	}
}

func (h *bnHerd) node(e *Effect) *bnHerdNode { return &h.nodes[e.template.spec.GroupID][e.index] }

// Submit is where a node is served.
func (h *bnHerd) Submit(e Effect) (bool, error) {
	n := h.node(&e)
	if n.calling || n.wantsAt.After(h.now) {
		return false, fmt.Errorf("%s calls before its time", e.Key.Node)
	}
	h.longest = max(h.longest, h.now.Sub(n.wantsAt))
	n.calling, n.wantsAt = true, e.Deadline
	n.calls++
	if h.order != nil {
		h.order = append(h.order, e.Kind)
	}
	h.calls.put(bnCall{e, h.now.Add(h.takes)})
	return false, nil
}

func (h *bnHerd) Expire(id OperationID) Completion { panic("nothing is late") }
func (h *bnHerd) Retire(NodeAttemptID)             {}
func (h *bnHerd) Running() []RunningCall           { return nil }

// answer ends a call.
func (h *bnHerd) answer(e *Effect) {
	n := h.node(e)
	n.calling, n.wantsAt = false, h.now
	if !h.now.Before(h.healsAt) {
		n.done = e.Kind == DestroyLease || e.Kind == BootstrapConvergenceObserved
		h.driver.Deliver(dtCompleted(*e, dtSuccess(*e)))
		if e.Kind == StartBootstrap {
			h.driver.Deliver(Observation{Kind: SwactorJoined, Node: e.Key.Node, Attempt: e.Operation.Attempt,
				Session: dtSession(e.Operation.Attempt), Swactor: "agent"})
		}
		return
	}
	n.wantsAt = h.now.Add(h.policy.delay("", 0, uint32(n.calls)))
	h.driver.Deliver(Observation{Kind: OperationCompleted, Node: e.Key.Node, Attempt: e.Operation.Attempt,
		Completion: Completion{Operation: e.Operation, Kind: e.Kind, Class: ClassDefinite, Message: "no capacity"}})
}

func (h *bnHerd) drive() {
	_, err := h.driver.DriveUntilBlocked(h.now, h)
	require.NoError(h.tb, err)
	require.Zero(h.tb, h.driver.Stats().Refused)
}

// run lets time go on until there is nothing more to come, or to a moment. It
// calls check, which may be nil, whenever the cluster has come to rest.
func (h *bnHerd) run(until time.Time, check func()) {
	for {
		next, some := h.driver.RequeueAt()
		if h.calls.len() > 0 {
			if endsAt := h.calls.calls[h.calls.first].endsAt; !some || endsAt.Before(next) {
				next, some = endsAt, true
			}
		}
		if !some || next.After(until) {
			return
		}
		h.now = next
		for h.calls.len() > 0 && !h.calls.calls[h.calls.first].endsAt.After(h.now) {
			call := &h.calls.calls[h.calls.first]
			h.calls.first++
			h.answer(&call.effect)
		}
		h.driver.TriggerIfDue(h.now)
		h.drive()
		if check != nil {
			check()
		}
	}
}

// check works out anew what the driver has worked out step by step: when it
// wants to be called again, and that no place is free while somebody waits.
func (h *bnHerd) check() {
	var wake time.Time
	waiting := 0
	for _, nodes := range h.nodes {
		for i := range nodes {
			switch n := &nodes[i]; {
			case n.done:
			case n.calling || n.wantsAt.After(h.now):
				if wake.IsZero() || n.wantsAt.Before(wake) {
					wake = n.wantsAt
				}
			default:
				waiting++
			}
		}
	}
	at, some := h.driver.RequeueAt()
	require.Equal(h.tb, !wake.IsZero(), some)
	require.True(h.tb, at.Equal(wake), "RequeueAt is %v, the first deadline %v", at, wake)
	if h.limit == 0 {
		require.Zero(h.tb, waiting)
		return
	}
	require.LessOrEqual(h.tb, h.calls.len(), h.limit)
	require.True(h.tb, waiting == 0 || h.calls.len() == h.limit, "%d wait and %d of %d places are taken", waiting, h.calls.len(), h.limit)
}

const bnRefusing = 10 * time.Minute

// callsWithin is how often a node is called in so long a time if every call fails at
// once: at 0, 1, 3, 7, 15, 31, 63 s and then every minute.
func (h *bnHerd) callsWithin(d time.Duration) (calls int) {
	for at := time.Duration(0); at <= d; at += h.policy.delay("", 0, uint32(calls)) {
		calls++
	}
	return calls
}

// longestWait is how long a slot may wait for a place while everybody wants one:
// every fourth place goes to whoever has waited longest, and so many can have
// waited longer.
func (h *bnHerd) longestWait(slots int) time.Duration {
	return h.takes * time.Duration(everyNthPlace*slots/h.limit+1)
}

func bnShape(generation uint64, groups ...NodeGroupSpec) ClusterShape {
	return ClusterShape{RunID: "herd", Generation: generation, Groups: groups}
}

func bnGroup(id NodeGroupID, count int) NodeGroupSpec {
	return NodeGroupSpec{GroupID: id, Count: count}
}

// TestHerdIsAskedAsTheBackoffSays: a provider that refuses everything is asked as often as the backoff
// says and no more, no attempt ends for it, and all is well once it recovers.
func TestHerdIsAskedAsTheBackoffSays(t *testing.T) {
	const n = 300
	h := newBnHerd(t, 0, 0, bnShape(1, bnGroup("w", n)))
	h.healsAt = h.start.Add(bnRefusing)
	h.run(h.healsAt.Add(-1), h.check)
	want := h.callsWithin(bnRefusing)
	require.Equal(t, 15, want)
	for i, node := range h.nodes["w"] {
		require.Equal(t, want, node.calls, "w-%d", i)
	}
	require.Zero(t, h.longest)
	require.EqualValues(t, n*want, h.driver.Stats().Folded)
	require.EqualValues(t, n, h.driver.Stats().Attempts)

	h.run(h.healsAt.Add(h.policy.MaxDelay), nil)
	require.True(t, h.driver.Converged(1))
	require.EqualValues(t, n, h.driver.Stats().Attempts)
}

// TestHerdWithFewPlaces: calls take a second, and there are places for fewer of
// them than the backoff lets through. Nobody starves, no place is idle, and what
// is to go comes first.
func TestHerdWithFewPlaces(t *testing.T) {
	const n, old, limit = 1000, 100, 10
	h := newBnHerd(t, limit, time.Second, bnShape(1, bnGroup("old", old)))
	h.run(h.start.Add(time.Hour), nil)
	require.True(t, h.driver.Converged(1))
	h.longest = 0

	began := h.now
	h.healsAt = began.Add(bnRefusing)
	h.wish(bnShape(2, bnGroup("old", old), bnGroup("w", n)))
	h.drive()
	h.run(began.Add(bnRefusing/2), h.check)
	require.Greater(t, h.longest, 10*time.Second, "there was no crowd")

	// The old nodes are to go: of the places given until each of them has had
	// one, they get all but every fourth.
	for i := range h.nodes["old"] {
		h.nodes["old"][i] = bnHerdNode{wantsAt: h.now}
	}
	h.wish(bnShape(3, bnGroup("w", n)))
	h.order = []OperationKind{}
	h.drive()
	first, destroys, creates := 0, 0, 0
	h.run(h.healsAt.Add(-1), func() {
		h.check()
		if first == 0 {
			for _, node := range h.nodes["old"] {
				if node.calls == 0 {
					return
				}
			}
			first = len(h.order)
		}
	})
	require.NotZero(t, first, "some old node was never served")
	for _, kind := range h.order[:first] {
		if kind == DestroyLease {
			destroys++
		} else {
			creates++
		}
	}
	require.GreaterOrEqual(t, destroys, old)
	// In the last wave there may be more places than old nodes that want one.
	require.LessOrEqual(t, creates, len(h.order[:first])/everyNthPlace+limit, "%d destroys", destroys)

	for i, node := range h.nodes["w"] {
		require.NotZero(t, node.calls, "w-%d", i)
	}
	require.LessOrEqual(t, h.longest, h.longestWait(n+old))
	require.EqualValues(t, n+old, h.driver.Stats().Attempts)

	h.run(h.healsAt.Add(time.Hour), nil)
	require.True(t, h.driver.Converged(3))
	require.EqualValues(t, n+old, h.driver.Stats().Attempts)
}
