package provisioning

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// dtCrowd returns a driver with one place, taken by hog-0, and one slot of each
// class that wants it: a-0 a create, b-0 a machine to finish, c-0 a cleanup.
func dtCrowd(t *testing.T, extra ...NodeGroupSpec) (*ClusterDriver, *dtExecutor) {
	first, x := dtDriver(t, Config{}, dtGroup("b", 1, "v1"), dtGroup("c", 1, "v1"), dtGroup("hog", 1, "v1")), &dtExecutor{}
	dtDrive(t, first, dtStart, x)
	for _, e := range x.submitted[:2] { // b-0 and c-0 have machines, hog-0 waits for its own
		first.Deliver(dtCompleted(e, dtSuccess(e)))
	}
	x.submit = func(e Effect) (bool, error) { return false, errors.New("refused") } // and nothing else is pending
	_, err := first.DriveNext(dtStart, x)
	require.NoError(t, err)

	groups := append([]NodeGroupSpec{dtGroup("a", 1, "v1"), dtGroup("b", 1, "v1"), dtGroup("hog", 1, "v1")}, extra...)
	d, err := newDriverFrom(first.Snapshot(), dtShape(2, groups...), Config{MaxInFlight: 1})
	require.NoError(t, err)
	x = &dtExecutor{}
	dtDrive(t, d, dtStart.Add(time.Second), x)
	require.Empty(t, x.submitted, "hog-0 has the place")
	require.Equal(t, 3+dtSlots(extra), d.capacity.byAge.Len())
	dtCheckLaw(t, d)
	return d, x
}

func dtSlots(groups []NodeGroupSpec) (slots int) {
	for _, g := range groups {
		slots += g.Count
	}
	return slots
}

// dtFree ends the one operation in flight, in a way that asks for no other, and
// drives.
func dtFree(t *testing.T, d *ClusterDriver, now time.Time, x *dtExecutor) {
	for m := range d.Snapshot().All() {
		if m.Pending != nil {
			d.Deliver(Observation{Kind: OperationCompleted, Node: m.Record.Node, Attempt: m.Attempt,
				Completion: Completion{Operation: m.Pending.ID, Kind: m.Pending.Kind, Class: ClassNotStarted, Message: "not now"}})
		}
	}
	dtDrive(t, d, now, x)
}

// TestPlacesGoByClass: what costs money and is not wanted, then what is paid
// for, then what is to be bought.
func TestPlacesGoByClass(t *testing.T) {
	d, x := dtCrowd(t)
	now := dtStart.Add(time.Second)
	for range 3 {
		dtFree(t, d, now, x)
	}
	require.Equal(t, []string{"c-0 DestroyLease", "b-0 LookupEndpoint", "a-0 CreateLease"}, dtKinds(x))
}

// TestPlacesInSlotOrder within a class, and what is chosen goes out in slot order.
func TestPlacesInSlotOrder(t *testing.T) {
	d, x := dtCrowd(t, dtGroup("a2", 11, "v1"))
	now := dtStart.Add(time.Second)
	for range 2 {
		dtFree(t, d, now, x)
	}
	dtKinds(x)
	d.capacity.limit = 7 // at once: c-0, the first by class, is the last by slot; b-0 backs off
	dtFree(t, d, now.Add(time.Hour), x)
	require.Equal(t, []string{"a-0 CreateLease", "a2-0 CreateLease", "a2-1 CreateLease", "a2-2 CreateLease", "a2-3 CreateLease",
		"a2-4 CreateLease", "c-0 DestroyLease"}, dtKinds(x))
	dtCheckLaw(t, d)
}

// TestEveryFourthPlace of those given while somebody is left out goes to whoever
// has been left out longest.
func TestEveryFourthPlace(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 1, Retry: RetryPolicy{InitialDelay: 1, MaxDelay: 1}}, dtGroup("w", 6, "v1")), &dtExecutor{}
	now := dtStart
	dtDrive(t, d, now, x)
	var order []string
	for range 16 { // each fails at once and is back in the next pass
		e := dtLast(t, x, CreateLease)
		order = append(order, string(e.Key.Node))
		d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
		_, err := d.DriveNext(now, x) // gives the place on while e backs off
		require.NoError(t, err)
		now = now.Add(1)
		dtDrive(t, d, now, x)
		dtCheckLaw(t, d)
	}
	// w-0 and w-1 would have all of it between them.
	require.Equal(t, []string{"w-0", "w-1", "w-0", "w-2", "w-0", "w-1", "w-0", "w-3", "w-0", "w-1", "w-0", "w-4", "w-0", "w-1", "w-0", "w-5"}, order)
}

// TestPlaceWithoutCrowdIsNotCounted: where all who want a place get one, nobody
// is left out and no turn is used up.
func TestPlaceWithoutCrowdIsNotCounted(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 6}, dtGroup("w", 6, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	require.Len(t, x.submitted, 6)
	require.Zero(t, d.capacity.given)
	require.Zero(t, d.capacity.byAge.Len())
}

// TestRefusedPlaceGoesOn to the next in line within the pass.
func TestRefusedPlaceGoesOn(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 2}, dtGroup("w", 6, "v1")), &dtExecutor{}
	x.submit = func(e Effect) (bool, error) {
		if e.Key.Node != "w-4" {
			return false, errors.New("refused")
		}
		return false, nil
	}
	require.Equal(t, 2, dtDrive(t, d, dtStart, x))
	require.Equal(t, []string{"w-0 CreateLease", "w-1 CreateLease", "w-2 CreateLease", "w-3 CreateLease", "w-4 CreateLease", "w-5 CreateLease"}, dtKinds(x))
	require.Equal(t, 1, d.capacity.taken)
	dtCheckLaw(t, d)
}

// TestPlacesThatGoOnAreTakenInSlotOrder too, whatever the classes are.
func TestPlacesThatGoOnAreTakenInSlotOrder(t *testing.T) {
	first, x := dtDriver(t, Config{}, dtGroup("x", 3, "v1")), &dtExecutor{}
	dtDrive(t, first, dtStart, x)
	for _, e := range x.submitted {
		first.Deliver(dtCompleted(e, dtSuccess(e)))
	}
	require.NoError(t, first.foldOnly(dtStart))
	d, err := newDriverFrom(first.Snapshot(), dtShape(2, dtGroup("a", 1, "v1")), Config{MaxInFlight: 2})
	require.NoError(t, err)
	x = &dtExecutor{}
	x.submit = func(Effect) (bool, error) {
		if len(x.submitted) < 2 {
			return false, errors.New("refused")
		}
		return false, nil
	}
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []string{"x-0 DestroyLease", "x-1 DestroyLease", "a-0 CreateLease", "x-2 DestroyLease"}, dtKinds(x))
}

// TestQueuedTakesNoPlace: what waits behind a call of its own attempt loads
// nobody.
func TestQueuedTakesNoPlace(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 1}, dtGroup("w", 4, "v1")), &dtExecutor{}
	x.submit = func(e Effect) (bool, error) { return e.Key.Node != "w-2", nil }
	require.Equal(t, 2, dtDrive(t, d, dtStart, x))
	require.Equal(t, []string{"w-0 CreateLease", "w-1 CreateLease", "w-2 CreateLease"}, dtKinds(x))
	require.NotNil(t, dtNode(t, d, "w-0").Pending, "it is in flight all the same")
	require.Equal(t, 1, d.capacity.taken)
	e, _ := d.Explain("w-3", dtStart)
	require.True(t, e.LeftOut)
	e, _ = d.Explain("w-0", dtStart)
	require.False(t, e.LeftOut)
	d.Deliver(Observation{Kind: OperationCompleted, Node: "w-0", Attempt: 1,
		Completion: Completion{Operation: OperationID{1, 1}, Kind: CreateLease, Lease: "l-1"}})
	dtDrive(t, d, dtStart, x)
	require.Equal(t, 1, d.capacity.taken, "it gives back no place that it had not")
	dtCheckLaw(t, d)
}

// TestHungCallGivesItsPlaceBack at its deadline, returned or not.
func TestHungCallGivesItsPlaceBack(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 1}, dtGroup("w", 2, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []string{"w-0 CreateLease"}, dtKinds(x))
	dtDrive(t, d, dtStart.Add(DefaultOperationTimeout-1), x)
	require.Empty(t, x.submitted)
	dtDrive(t, d, dtStart.Add(DefaultOperationTimeout), x)
	require.Equal(t, []string{"w-1 CreateLease"}, dtKinds(x))
}

// TestLeftOutChangesItsMind: who waits for a place and is no longer wanted, or
// wants something else, waits no longer, or in another class.
func TestLeftOutChangesItsMind(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 1}, dtGroup("v", 1, "v1"), dtGroup("w", 3, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	require.Equal(t, []string{"v-0 CreateLease"}, dtKinds(x))
	require.Equal(t, 3, d.capacity.byAge.Len())
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("v", 1, "v1"), dtGroup("w", 1, "v1"))))
	dtDrive(t, d, dtStart, x)
	require.Equal(t, 1, d.capacity.byAge.Len(), "w-1 and w-2 never had anything and are gone")
	require.Equal(t, 2, d.Snapshot().Len())
	dtCheckLaw(t, d)
	require.NoError(t, d.UpdateDesired(dtShape(3, dtGroup("v", 1, "v1"))))
	dtDrive(t, d, dtStart, x)
	require.Zero(t, d.capacity.byAge.Len())
	require.Len(t, d.state.groups, 1)
	dtCheckLaw(t, d)
}

// TestLeftOutIsNotDecidedAgain: a pass looks at what changed and at as many of
// the queue as there are places, however long the queue is.
func TestLeftOutIsNotDecidedAgain(t *testing.T) {
	d, x := dtDriver(t, Config{MaxInFlight: 1}, dtGroup("w", 1000, "v1")), &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	for pass := range 10 {
		require.Empty(t, d.hot)
		before := d.capacity.byAge.Len()
		require.Equal(t, 999-pass, before)
		e := dtLast(t, x, CreateLease)
		d.Deliver(dtCompleted(e, dtFailed(e, ClassDefinite)))
		_, err := d.DriveNext(dtStart, x)
		require.NoError(t, err)
		require.Equal(t, before-1, d.capacity.byAge.Len())
	}
}

// TestProp_G10NobodyStarves: whoever goes on wanting a place has one after at
// most four places for each who was there before, whatever the others do.
func TestProp_G10NobodyStarves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 4).Draw(t, "limit")
		c := newCapacity(limit)
		g := &nodeGroup{id: "w"}
		nodes := make([]*node, rapid.IntRange(limit+1, 12).Draw(t, "nodes"))
		waits := make([]int, len(nodes)) // places given since it began to want one
		for i := range nodes {
			nodes[i] = newNode(NewLogicalNodeID("w", i), i, &template{}, NodeAttemptID(i+1))
			nodes[i].group = g
		}
		for pass := range uint64(rapid.IntRange(1, 80).Draw(t, "passes")) {
			for i, n := range nodes {
				if n.holdsPlace && rapid.IntRange(0, 3).Draw(t, "goes on") > 0 {
					c.giveBack(n)
				}
				if n.holdsPlace || c.byAge.Contains(n) && rapid.Bool().Draw(t, "still") {
					continue // not looked at
				}
				n.intent, n.lease = Active, ""
				switch rapid.IntRange(0, 3).Draw(t, "wants") {
				case 0:
					n.lease = "l"
				case 1, 2:
					n.intent = Deleting
				}
				if !c.byAge.Contains(n) {
					waits[i] = 0
				}
				c.want(n, pass)
			}
			free, wanting := limit-c.taken, c.byAge.Len()
			chosen := c.choose()
			require.Len(t, chosen, min(free, wanting))
			for _, n := range chosen {
				require.False(t, c.byAge.Contains(n))
				c.take(n)
			}
			for i, n := range nodes {
				if c.byAge.Contains(n) {
					waits[i] += len(chosen)
					require.LessOrEqual(t, waits[i], everyNthPlace*len(nodes), "%s starves", n.id)
				}
			}
		}
	})
}

// TestCapWithHungCalls is the cap against the executor this package ships: a
// call that never returns holds up its own attempt alone, and the cap counts
// recorded operations.
func TestCapWithHungCalls(t *testing.T) {
	b := &dtBackend{}
	var held []func()
	var d *ClusterDriver
	x, err := NewExecutor(b, ExecutorConfig{Deliver: func(o Observation) { d.Deliver(o) }, Go: func(f func()) { held = append(held, f) }})
	require.NoError(t, err)
	d = dtDriver(t, Config{MaxInFlight: 2}, dtGroup("w", 4, "v1"))
	now := dtStart
	dtDrive(t, d, now, x)
	require.Len(t, held, 2)
	now = now.Add(DefaultOperationTimeout)
	dtDrive(t, d, now, x)
	require.Len(t, held, 4, "the other two have the places now")
	now = now.Add(DefaultInitialDelay)
	dtDrive(t, d, now, x)
	require.Equal(t, 2, x.Stats().RunningExpired)
	require.Len(t, held, 4, "w-0 and w-1 would try again, and wait for a place")
	e, _ := d.Explain("w-0", now)
	require.True(t, e.LeftOut)
	for _, f := range held[2:] {
		f()
	}
	// Of two places one goes to the machine of w-2 and one, a fourth, to w-0,
	// which has waited longest. That one is queued behind its own call that
	// hangs, so its place goes on to the machine of w-3.
	dtDrive(t, d, now, x)
	require.Equal(t, 1, x.Stats().Queued)
	require.Len(t, held, 6)
	require.Equal(t, 2, d.capacity.taken)
	require.Equal(t, []string{"w-2 CreateLease", "w-3 CreateLease"}, b.told())
	dtCheckLaw(t, d)
}
