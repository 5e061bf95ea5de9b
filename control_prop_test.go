package provisioning_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// TestProp_G7ControlledHost: an operator pauses, resumes, replaces, wishes and
// waits, at any time and at a provider in trouble. While it is paused nothing
// grows; what was replaced is gone in the end; who waits is told what is true;
// and once the trouble stops the cluster is what was wished for last, and a drain
// leaves nothing.
func TestProp_G7ControlledHost(t *testing.T) {
	outcomes := map[provisioning.OperationKind][]fakebackend.Outcome{
		provisioning.CreateLease: {fakebackend.OK(), fakebackend.OKNoEndpoint(), fakebackend.Definite(), fakebackend.DoneAmbiguous(), fakebackend.Late(20 * time.Second),
			fakebackend.Slow(40 * time.Second), fakebackend.Slow(5 * time.Minute), fakebackend.Dead(), fakebackend.SpotLoss(2 * time.Minute), fakebackend.DonePanic()},
		provisioning.LookupEndpoint: {fakebackend.NotReady(), fakebackend.Ambiguous(), fakebackend.Lost()},
		provisioning.StartBootstrap: {fakebackend.Definite(), fakebackend.DoneAmbiguous(), fakebackend.Slow(50 * time.Second)},
		provisioning.DestroyLease:   {fakebackend.Ambiguous(), fakebackend.DoneError(), fakebackend.Slow(30 * time.Second)},
	}
	kinds := []provisioning.OperationKind{provisioning.CreateLease, provisioning.LookupEndpoint, provisioning.StartBootstrap, provisioning.DestroyLease}
	rapid.Check(t, func(t *rapid.T) {
		seconds := func(label string, most int) time.Duration {
			return time.Duration(rapid.IntRange(0, most).Draw(t, label)) * time.Second
		}
		fake := fakebackend.New(fakebackend.Config{JoinAfter: seconds("join after", 90)})
		work := fake.NewWork()
		for i := range 4 {
			node := provisioning.NewLogicalNodeID("w", i)
			for _, kind := range kinds {
				fake.Script(node, kind, rapid.SliceOfN(rapid.SampledFrom(outcomes[kind]), 0, 3).Draw(t, fmt.Sprintf("%v of %s", kind, node))...)
			}
		}

		// All of this is of the one goroutine that drives, in hooks of the
		// provider's time and of the driver.
		paused := false
		replaced := make(map[provisioning.NodeAttemptID]bool)
		var grown []string // a panic of the hook would be fenced
		watch := func(e provisioning.Event) {
			climbs := e.Kind == provisioning.EventDispatch && e.Rule.Number >= 12 // create-lease to start-bootstrap
			if paused && (climbs || e.Kind == provisioning.EventAttemptStarted) {
				grown = append(grown, e.String())
			}
		}
		wishOf := func(generation uint64, count int, image string) provisioning.ClusterShape {
			return provisioning.ClusterShape{RunID: "r", Generation: generation, Groups: []provisioning.NodeGroupSpec{
				{GroupID: "w", Count: count, Shape: provisioning.NodeShape{Image: image}}}}
		}
		wish := wishOf(1, rapid.IntRange(0, 4).Draw(t, "count"), "a")
		host, err := provisioning.NewHost(provisioning.HostConfig{Shape: wish, Backend: fake, Clock: work.Clock(nil), Go: work.Go, OnEvent: watch,
			MaxInFlight: rapid.IntRange(0, 2).Draw(t, "max in flight")})
		require.NoError(t, err)

		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		var waits sync.WaitGroup
		defer waits.Wait() // after stop: the last deferred is the first
		defer stop()
		var mu sync.Mutex
		var untrue []string
		wait := func(what string, do func(context.Context) error, lawful ...error) {
			waits.Go(func() {
				err := do(ctx)
				for _, law := range append(lawful, nil, context.Canceled) {
					if errors.Is(err, law) || err == law {
						return
					}
				}
				mu.Lock()
				defer mu.Unlock()
				untrue = append(untrue, fmt.Sprintf("%s: %v", what, err))
			})
		}
		at := fake.Now()
		for range rapid.IntRange(0, 12).Draw(t, "steps") {
			at = at.Add(seconds("pause between", 200))
			step := rapid.SampledFrom([]string{"pause", "resume", "replace", "replace", "update", "wait ready", "wait converged"}).Draw(t, "step")
			slot := provisioning.NewLogicalNodeID("w", rapid.IntRange(0, 3).Draw(t, "slot"))
			count, image := rapid.IntRange(0, 4).Draw(t, "count"), rapid.SampledFrom([]string{"a", "b"}).Draw(t, "image")
			fake.At(at, func() {
				switch step {
				case "pause":
					host.Pause()
					paused = true
				case "resume":
					paused = false
					host.Resume()
				case "replace":
					attempt, err := host.Replace(slot, "by hand")
					if err == nil {
						replaced[attempt] = true
					} else if !errors.Is(err, provisioning.ErrUnknownSlot) {
						t.Fatal(err)
					}
				case "update":
					wish = wishOf(wish.Generation+1, count, image)
					if err := host.UpdateDesired(wish); err != nil {
						t.Fatal(err)
					}
				case "wait ready":
					wait("WaitReady", func(ctx context.Context) error { return host.WaitReady(ctx, slot) }, provisioning.ErrNotDesired)
				case "wait converged":
					generation := wish.Generation
					wait("WaitConverged", func(ctx context.Context) error { return host.WaitConverged(ctx, generation) }, provisioning.ErrSuperseded)
				}
				if host.Status().Paused != paused {
					t.Fatalf("paused: %v", host.Status().Paused)
				}
			})
		}

		// The trouble stops. One hour is far more than what is left needs.
		at = at.Add(time.Minute)
		fake.At(at, func() {
			fake.ClearScripts()
			paused = false
			host.Resume()
			wish = wishOf(wish.Generation+1, 3, "c")
			if err := host.UpdateDesired(wish); err != nil {
				t.Fatal(err)
			}
			for i := range 3 {
				wait("WaitReady in the end", func(ctx context.Context) error { return host.WaitReady(ctx, provisioning.NewLogicalNodeID("w", i)) })
			}
		})
		fake.At(at.Add(time.Hour), func() {
			ready, desired := host.Driver().Progress()
			s := host.Status()
			if ready != 3 || desired != 3 || s.Ready != 3 || s.Desired != 3 || !s.Converged || !host.Driver().Converged(wish.Generation) {
				t.Fatalf("%d of %d ready, %+v", ready, desired, s)
			}
			// With time standing still these end at once, or it is not so.
			if err := host.WaitConverged(context.Background(), wish.Generation); err != nil {
				t.Fatal(err)
			}
			if err := host.WaitReady(context.Background(), "w-2"); err != nil {
				t.Fatal(err)
			}
			for node := range host.Driver().Snapshot().All() {
				if replaced[node.Attempt] {
					t.Fatalf("attempt %d of %s was to be replaced and is there", node.Attempt, node.Record.Node)
				}
			}
			stop()
		})
		var held *provisioning.HeldError
		require.ErrorAs(t, host.Run(ctx), &held)
		require.Len(t, held.Held, 3)
		waits.Wait()
		require.Empty(t, untrue)
		require.Empty(t, grown, "while paused")

		if rapid.Bool().Draw(t, "paused before the drain") {
			host.Pause() // a pause holds nothing back that is to go
			paused = true
		}
		require.NoError(t, host.Drain(context.Background()))
		require.Zero(t, fake.LiveTotal())
		require.Zero(t, host.Status().Desired)
		require.ErrorIs(t, host.UpdateDesired(wishOf(wish.Generation+9, 1, "a")), provisioning.ErrDraining)
		_, err = host.Replace("w-0", "too late")
		require.ErrorIs(t, err, provisioning.ErrUnknownSlot)
		fake.Close()
		work.RunAll()
		left, err := host.Close(context.Background())
		require.NoError(t, err)
		require.Empty(t, left)
	})
}

// Everything that a host offers may be called from any goroutine at any time.
// For the race detector; and when all have gone home the cluster is as wished.
func TestControlFromAnyGoroutine(t *testing.T) {
	fake := fakebackend.New(fakebackend.Config{})
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape:   provisioning.ClusterShape{RunID: "r", Generation: 1, Groups: []provisioning.NodeGroupSpec{{GroupID: "w", Count: 3}}},
		Backend: fake, Retry: provisioning.RetryPolicy{InitialDelay: time.Millisecond, MaxDelay: time.Millisecond},
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ran := make(chan error, 1)
	go func() { ran <- host.Run(ctx) }()

	const callers, rounds = 8, 25
	var generation struct {
		sync.Mutex
		latest uint64
	}
	generation.latest = 1
	shape := func(number uint64, count int) provisioning.ClusterShape {
		return provisioning.ClusterShape{RunID: "r", Generation: number, Groups: []provisioning.NodeGroupSpec{{GroupID: "w", Count: count}}}
	}
	var all sync.WaitGroup
	for caller := range callers {
		all.Go(func() {
			brief, cancel := context.WithCancel(ctx)
			var waits sync.WaitGroup
			for round := range rounds {
				slot := provisioning.NewLogicalNodeID("w", (caller+round)%3)
				waits.Go(func() {
					if err := host.WaitReady(brief, slot); err != nil && !errors.Is(err, provisioning.ErrNotDesired) && !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
				})
				waits.Go(func() {
					if err := host.WaitConverged(brief, uint64(round)); err != nil && !errors.Is(err, provisioning.ErrSuperseded) && !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
				})
				switch (caller + round) % 4 {
				case 0:
					host.Pause()
					host.Resume()
				case 1:
					if _, err := host.Replace(slot, "by hand"); err != nil && !errors.Is(err, provisioning.ErrUnknownSlot) {
						t.Error(err)
					}
				case 2:
					generation.Lock()
					generation.latest++
					err := host.UpdateDesired(shape(generation.latest, 1+round%3))
					generation.Unlock()
					if err != nil {
						t.Error(err)
					}
				case 3:
					if _, err := host.PlanUpdate(shape(1<<40, 2)); err != nil {
						t.Error(err)
					}
				}
				host.Driver().Plan(time.Now())
				host.Driver().Explain(slot, time.Now())
				host.Driver().Progress()
				host.Status()
				host.Held()
			}
			cancel()
			waits.Wait()
		})
	}
	all.Wait()
	host.Resume()
	last := generation.latest + 1
	require.NoError(t, host.UpdateDesired(shape(last, 3)))
	require.NoError(t, host.WaitConverged(ctx, last))
	require.NoError(t, host.WaitReady(ctx, "w-2"))
	require.Equal(t, 3, fake.LiveTotal())

	// A drain beside Run, from several at once.
	for range callers {
		all.Go(func() {
			if err := host.Drain(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.Zero(t, fake.LiveTotal())
	stop()
	require.NoError(t, <-ran)
}
