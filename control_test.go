package provisioning

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// ctChanges tells the changes of a plan in short.
func ctChanges(p UpdatePlan) []string {
	var lines []string
	for _, c := range p.Changes {
		line := string(c.Node) + " " + c.Kind.String()
		if c.Differs != nil {
			line += " " + strings.Join(c.Differs, ",")
		}
		if c.Ready {
			line += " ready"
		}
		if c.Next.Action != NoAction {
			line += " then " + c.Next.Action.String()
		}
		lines = append(lines, line)
	}
	return lines
}

func ctPlanUpdate(t *testing.T, d *ClusterDriver, shape ClusterShape) UpdatePlan {
	t.Helper()
	plan, err := d.PlanUpdate(shape, dtStart)
	require.NoError(t, err)
	return plan
}

func TestPlanUpdate(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("a", 1, "v1"), dtGroup("w", 3, "v1"))
	x := &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	require.True(t, d.Converged(1))
	before := dtJSON(t, d.Snapshot())

	plan := ctPlanUpdate(t, d, dtShape(1, dtGroup("a", 1, "v1"), dtGroup("w", 3, "v1")))
	require.Equal(t, UpdatePlan{Generation: 1}, plan, "the same again")
	require.Equal(t, "generation 1: 0 to insert, 0 to replace, 0 to delete", plan.String())

	group := dtGroup("w", 2, "v2")
	group.Role, group.Boot.Env = "driver", map[string]string{"a": "b"}
	plan = ctPlanUpdate(t, d, dtShape(2, dtGroup("b", 1, "v1"), group))
	require.Equal(t, []string{
		"a-0 delete ready then BeginDelete",
		"b-0 insert then Insert",
		"w-0 replace role,shape.image,boot.env ready then BeginDelete",
		"w-1 replace role,shape.image,boot.env ready then BeginDelete",
		"w-2 delete ready then BeginDelete",
	}, ctChanges(plan))
	require.Equal(t, []int{1, 2, 2, 4}, []int{plan.Inserts, plan.Replaces, plan.Deletes, plan.ReadyLost})
	require.Equal(t, "generation 2: 1 to insert, 2 to replace, 2 to delete; takes down 4 that are ready, all at once; "+
		"differs: role, shape.image, boot.env", plan.String())
	require.Equal(t, NodeAttemptID(2), plan.Changes[2].Attempt)
	require.Zero(t, plan.Changes[1].Attempt)

	require.Equal(t, before, dtJSON(t, d.Snapshot()), "nothing changed")
	require.Equal(t, uint64(1), d.Generation())
	require.Zero(t, dtDrive(t, d, dtStart, x), "no pass is queued")

	// It says what then happens.
	d = dtDriver(t, Config{}, dtGroup("a", 1, "v1"), dtGroup("w", 3, "v1"))
	x = &dtExecutor{}
	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("b", 1, "v1"), group)))
	next := d.Plan(dtStart)
	require.Len(t, next.Actions, len(plan.Changes))
	for i, c := range plan.Changes {
		require.Equal(t, next.Actions[i].Node, c.Node)
		require.Equal(t, next.Actions[i].Kind, c.Next.Action)
		require.Equal(t, next.Actions[i].Rule, c.Next.Rule)
	}
}

// What counts is what there is, not only what was wished for last.
func TestPlanUpdateLooksAtTheNodes(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 2, "v1"))
	x := &dtExecutor{}
	require.Empty(t, ctChanges(ctPlanUpdate(t, d, dtShape(2, dtGroup("w", 2, "v1")))))
	require.Equal(t, []string{"w-0 replace shape.image then Insert", "w-1 delete"}, ctChanges(ctPlanUpdate(t, d, dtShape(2, dtGroup("w", 1, "v2")))),
		"nothing has begun yet")

	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	require.NoError(t, d.UpdateDesired(dtShape(2, dtGroup("w", 1, "v2"))))
	require.Empty(t, ctChanges(ctPlanUpdate(t, d, dtShape(3, dtGroup("w", 2, "v1")))), "the wish between never came to anything")

	x.submit = nil
	dtDrive(t, d, dtStart, x) // and now it does
	require.Equal(t, []string{"w-0 replace shape.image", "w-1 insert"}, ctChanges(ctPlanUpdate(t, d, dtShape(3, dtGroup("w", 2, "v1")))),
		"both are being deleted and wait for that")
	require.Equal(t, []string{"w-0 delete"}, ctChanges(ctPlanUpdate(t, d, dtShape(3))), "w-1 goes already")
}

// A plan is refused like the update itself, and in the same words.
func TestPlanUpdateRefuses(t *testing.T) {
	fault := ShapeFault{Field: "role", Problem: "is not liked"}
	d := dtDriver(t, Config{MaxNodes: 5, ValidateGroup: func(g NodeGroupSpec) []ShapeFault {
		if g.Role == "bad" {
			return []ShapeFault{fault}
		}
		return nil
	}}, dtGroup("w", 2, "v1"))
	require.NoError(t, d.UpdateDesired(dtShape(4, dtGroup("w", 2, "v1"))))
	other, bad := dtShape(5), dtGroup("w", 1, "v1")
	other.RunID, bad.Role = "other", "bad"
	for _, c := range []struct {
		shape ClusterShape
		want  error
	}{
		{other, ErrRunChanged},
		{dtShape(3), ErrGenerationRegressed},
		{dtShape(5, dtGroup("w", -1, "v1")), ErrInvalidShape},
		{dtShape(5, dtGroup("w", 6, "v1")), ErrInvalidShape},
		{dtShape(5, bad), ErrInvalidShape},
		{dtShape(4, dtGroup("w", 2, "v2")), ErrGenerationReused},
	} {
		plan, err := d.PlanUpdate(c.shape, dtStart)
		require.ErrorIs(t, err, c.want)
		require.Equal(t, UpdatePlan{}, plan)
		require.Equal(t, d.UpdateDesired(c.shape), err)
	}
	require.Equal(t, uint64(4), d.Generation())
	require.NoError(t, d.Drain())
	_, err := d.PlanUpdate(dtShape(9), dtStart)
	require.Equal(t, ErrDraining, err)
}

// Every field that makes a slot be replaced is named, and nothing else is.
func TestEveryDriftIsNamed(t *testing.T) {
	group := filled[NodeGroupSpec](t)
	group.RunID = "r"
	base := newTemplate("r", group)
	visited := 0
	walkLeaves(t, reflect.ValueOf(&group).Elem(), "group", func(path string) {
		changed := newTemplate("r", group)
		if path == "group.Count" || path == "group.RunID" || path == "group.GroupID" {
			require.Empty(t, base.differs(changed), path)
			return
		}
		visited++
		fields := base.differs(changed)
		require.Len(t, fields, 1, path)
		require.Equal(t, fields, changed.differs(base))
		require.True(t, strings.HasPrefix(strings.ToLower(path), "group."+strings.ToLower(fields[0])), "%s is called %s", path, fields[0])
	})
	require.Greater(t, visited, 20)
	require.Empty(t, base.differs(newTemplate("r", group)), "the walk puts everything back")
}

func TestNamesOfChanges(t *testing.T) {
	testNames[ChangeKind](t, "change", "none", "insert", "replace", "delete")
}

func TestReplace(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 2, "v1"))
	x := &dtExecutor{}
	attempt, err := d.Replace("w-0", "early")
	require.ErrorIs(t, err, ErrUnknownSlot)
	require.EqualError(t, err, "provisioning: there is no such slot: w-0")
	require.Zero(t, attempt)

	dtWorks(d, x)
	dtDrive(t, d, dtStart, x)
	dtKinds(x)
	attempt, err = d.Replace("w-1", "it is slow")
	require.NoError(t, err)
	require.Equal(t, NodeAttemptID(2), attempt)
	again, err := d.Replace("w-1", "twice in one breath")
	require.NoError(t, err)
	require.Equal(t, attempt, again)
	require.True(t, d.Converged(1), "nothing is folded before the next pass")

	dtDrive(t, d, dtStart, x)
	require.Equal(t, []string{"w-1 DestroyLease"}, dtKinds(x), "the cleanup does not wait")
	require.Equal(t, uint64(1), d.Stats().NotApplied, "the second")
	m := dtNode(t, d, "w-1")
	require.Equal(t, StageDestroyed, m.Record.Stage)
	require.Equal(t, "replaced by an operator: it is slow", m.Record.FailedReason)
	require.Equal(t, uint32(1), m.Retry.ConsecutiveFailures)
	require.Equal(t, dtStart.Add(DefaultInitialDelay), m.Retry.RestartAt.In(dtStart.Location()), "the fresh attempt waits like any other")
	_, err = d.Replace("w-1", "once more")
	require.NoError(t, err)
	dtDrive(t, d, dtStart, x)
	require.Equal(t, m, dtNode(t, d, "w-1"), "it is over already")

	dtDrive(t, d, dtStart.Add(DefaultInitialDelay), x)
	require.True(t, d.Converged(1))
	fresh := dtNode(t, d, "w-1")
	require.Equal(t, NodeAttemptID(3), fresh.Attempt)
	d.Deliver(Observation{Kind: ReplaceRequested, Node: "w-1", Attempt: attempt})
	dtDrive(t, d, dtStart.Add(DefaultInitialDelay), x)
	require.Equal(t, fresh, dtNode(t, d, "w-1"), "it names an attempt that is over")
	require.Equal(t, NodeAttemptID(1), dtNode(t, d, "w-0").Attempt)
}

// An attempt that still climbs may be replaced too, whatever is in flight: the
// operation goes on and is resolved before anything is destroyed (G5).
func TestReplaceDuringACreate(t *testing.T) {
	d := dtDriver(t, Config{}, dtGroup("w", 1, "v1"))
	x := &dtExecutor{}
	dtDrive(t, d, dtStart, x)
	create := dtLast(t, x, CreateLease)
	_, err := d.Replace("w-0", "")
	require.NoError(t, err)
	dtDrive(t, d, dtStart, x)
	m := dtNode(t, d, "w-0")
	require.Equal(t, "replaced by an operator", m.Record.FailedReason)
	require.Equal(t, Deleting, m.Intent)
	require.Equal(t, create.Operation, m.Pending.ID)
	d.Deliver(dtCompleted(create, dtSuccess(create)))
	dtDrive(t, d, dtStart, x)
	dtLast(t, x, DestroyLease)
}

func TestFold_ReplaceRequested(t *testing.T) {
	p := RetryPolicy{}.withDefaults()
	at := nearestInstant(dtStart)
	build := func(change func(*node)) *node {
		n := newNode("w-0", 0, newTemplate("r", groupOf("w", 1)), 7)
		n.group = &nodeGroup{id: "w"}
		change(n)
		return n
	}
	say := func(n *node, attempt NodeAttemptID) NotAppliedReason {
		return n.fold(&Observation{Kind: ReplaceRequested, Node: "w-0", Attempt: attempt, Reason: "why"}, &p, at)
	}
	n := build(func(n *node) { // ready after five failures, and just now
		n.lease, n.stage, n.ready, n.readyAt, n.failuresBeforeReady = "l", StageDormant, true, at, 5
	})
	require.Equal(t, StaleAttempt, say(n, 6))
	require.Equal(t, StaleAttempt, say(n, 8))
	require.True(t, n.ready)
	require.Empty(t, say(n, 7))
	require.Equal(t, StageFailed, n.stage)
	require.False(t, n.ready)
	require.Equal(t, uint32(1), n.failures, "it did not die young by itself")
	require.Equal(t, ProviderLeaseID("l"), n.lease, "the machine lives and is to be destroyed")
	require.Equal(t, at.plus(p.InitialDelay), n.restartAt)
	require.Equal(t, AlreadyFailed, say(n, 7))
	n.beginDelete()
	require.Equal(t, AlreadyDeleting, say(n, 7))
	require.Contains(t, notAppliedReasons, AlreadyDeleting, "the statistics count it")

	n = build(func(n *node) { n.failures, n.stage, n.session, n.lease = 3, StageBootstrapRunning, "s", "l" })
	require.Empty(t, say(n, 7))
	require.Equal(t, uint32(4), n.failures)
	require.Equal(t, BootstrapSessionID("s"), n.session, "the session lives and is to be cancelled")
}

func TestHostReplaceAndPlanUpdate(t *testing.T) {
	htBubble(t, func(t *testing.T, _ time.Time) {
		h := htHost(t, newHtBackend(), 2)
		run := htGo(h.Run)
		ctx := context.Background()
		require.NoError(t, h.WaitConverged(ctx, 1))
		_, err := h.Replace("w-7", "")
		require.ErrorIs(t, err, ErrUnknownSlot)
		attempt, err := h.Replace("w-1", "by hand")
		require.NoError(t, err)
		require.Equal(t, NodeAttemptID(2), attempt)
		synctest.Wait() // the loop was woken, no timer was needed
		require.False(t, h.driver.Converged(1))
		require.NoError(t, h.WaitReady(ctx, "w-1"))
		require.Equal(t, NodeAttemptID(3), dtNode(t, h.driver, "w-1").Attempt)

		plan, err := h.PlanUpdate(htShape(2, 1))
		require.NoError(t, err)
		require.Equal(t, []string{"w-1 delete ready then BeginDelete"}, ctChanges(plan))
		require.Error(t, run.stop())
		_, err = h.Close(ctx)
		require.NoError(t, err)
		_, err = h.Replace("w-1", "")
		require.Equal(t, ErrHostClosed, err)
		_, err = h.PlanUpdate(htShape(2, 1))
		require.Equal(t, ErrHostClosed, err)
	})
}

func TestHostWaitReady(t *testing.T) {
	htBubble(t, func(t *testing.T, _ time.Time) {
		b, release := newHtBackend(), make(chan struct{})
		h := htHost(t, b, 2)
		wait := func(id LogicalNodeID) htRun {
			return htGo(func(ctx context.Context) error { return h.WaitReady(ctx, id) })
		}
		one := wait("w-1")
		require.False(t, one.ended(), "nobody drives yet")
		err := h.WaitReady(context.Background(), "w-2")
		require.ErrorIs(t, err, ErrNotDesired)
		require.EqualError(t, err, "provisioning: the slot is not wished for: w-2")
		require.ErrorIs(t, h.WaitReady(context.Background(), "w-01"), ErrNotDesired)
		run := htGo(h.Run)
		require.NoError(t, <-one.result)

		b.on[CreateLease] = htUntil(release)
		shape := htShape(2, 2)
		shape.Groups[0].Shape.Image = "next"
		require.NoError(t, h.UpdateDesired(shape))
		one, zero := wait("w-1"), wait("w-0")
		require.False(t, one.ended(), "ready with an older spec is not ready")
		shape = htShape(3, 1)
		shape.Groups[0].Shape.Image = "next"
		require.NoError(t, h.UpdateDesired(shape))
		require.ErrorIs(t, <-one.result, ErrNotDesired)
		require.False(t, zero.ended())
		close(release)
		require.NoError(t, <-zero.result)

		b.on[CreateLease] = htRefused
		_, err = h.Replace("w-0", "")
		require.NoError(t, err)
		synctest.Wait()
		zero = wait("w-0")
		require.False(t, zero.ended())
		zero.cancel(errHt)
		require.Equal(t, errHt, <-zero.result, "the cause of ctx")
		zero = wait("w-0")
		require.False(t, zero.ended())
		_, err = h.Close(context.Background())
		require.NoError(t, err)
		require.Equal(t, ErrHostClosed, <-zero.result)
		<-run.result
	})
}

// TestHostWaitSeesWhatWasDelivered before the wait began: who replaces a slot and
// waits for it waits for the next attempt, and who reports a loss and waits for
// the wish waits for it to be repaired.
func TestHostWaitSeesWhatWasDelivered(t *testing.T) {
	htBubble(t, func(t *testing.T, _ time.Time) {
		h := htHost(t, newHtBackend(), 2)
		ctx := context.Background()
		run := htGo(h.Run)
		require.NoError(t, h.WaitConverged(ctx, 1))
		lose := func() {
			h.Deliver(Observation{Kind: NodeLost, Node: "w-1", Attempt: dtNode(t, h.driver, "w-1").Attempt})
		}
		for range 100 { // whichever comes first, the pass or the wait
			named, err := h.Replace("w-0", "")
			require.NoError(t, err)
			require.NoError(t, h.WaitReady(ctx, "w-0"))
			require.Greater(t, dtNode(t, h.driver, "w-0").Attempt, named)

			lost := dtNode(t, h.driver, "w-1").Attempt
			lose()
			require.NoError(t, h.WaitConverged(ctx, 1))
			require.Greater(t, dtNode(t, h.driver, "w-1").Attempt, lost)
		}

		// Nobody folds what comes when the loop has ended.
		require.Error(t, run.stop())
		require.NoError(t, h.WaitReady(ctx, "w-1"), "as far as anybody has heard")
		lose()
		wait := htGo(func(ctx context.Context) error { return h.WaitReady(ctx, "w-1") })
		require.False(t, wait.ended())
		run = htGo(h.Run)
		require.NoError(t, <-wait.result)
		require.Error(t, run.stop())
		lose()
		wait = htGo(func(ctx context.Context) error { return h.WaitConverged(ctx, 1) })
		require.False(t, wait.ended())
		_, err := h.Close(ctx)
		require.NoError(t, err)
		require.Equal(t, ErrHostClosed, <-wait.result)
		require.Equal(t, ErrHostClosed, h.WaitConverged(ctx, 1), "the loss was taken on record")
	})
}

// TestHostWaitUnderAStream: a wait asks for what was there when it began, not for
// silence.
func TestHostWaitUnderAStream(t *testing.T) {
	htBubble(t, func(t *testing.T, _ time.Time) {
		b := newHtBackend()
		var h *Host
		h = htHost(t, b, 1, func(c *HostConfig) {
			c.OnEvent = func(e Event) {
				if e.Kind == EventPass { // so no pass ends with nothing delivered
					h.Deliver(Observation{Kind: NodeLost, Node: "w-0"})
				}
			}
		})
		run := htGo(h.Run)
		require.NoError(t, h.WaitConverged(context.Background(), 1))
		require.NoError(t, h.WaitReady(context.Background(), "w-0"))
		require.Error(t, run.stop())
		_, err := h.Close(context.Background())
		require.NoError(t, err)
	})
}
