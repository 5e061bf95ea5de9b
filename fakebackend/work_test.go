package fakebackend

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// waitBlocked returns once n calls are blocked. It is for calls that a test
// runs on goroutines of its own: nothing tells when they block.
func waitBlocked(b *Backend, n int) {
	for {
		b.mu.Lock()
		blocked := len(b.blocked)
		b.mu.Unlock()
		if blocked == n {
			return
		}
		runtime.Gosched()
	}
}

func TestHangOnGoroutines(t *testing.T) {
	b := New(Config{})
	b.Script("w-0", create, Hang())
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		_, err := b.CreateLease(ctx, provisioning.CreateLeaseRequest{Key: key})
		done <- err
	}()
	waitBlocked(b, 1)
	stop()
	require.Equal(t, 1, b.Hanging("w-0", create), "its context does not move it")
	require.Zero(t, b.Live("w-0"))
	require.ErrorIs(t, b.Release("w-0", destroy, OK()), ErrNotHanging)
	require.ErrorIs(t, b.Release("w-1", create, OK()), ErrNotHanging)
	for _, o := range []Outcome{Hang(), DoneHang(), Slow(1), DoneSlow(1), Refuse(), NotReady()} {
		require.Error(t, b.Release("w-0", create, o), o)
	}
	require.NoError(t, b.Release("w-0", create, OK()))
	require.NoError(t, <-done)
	require.Equal(t, 1, b.Live("w-0"))
	require.ErrorIs(t, b.Release("w-0", create, OK()), ErrNotHanging)
}

// Each class and each way to be released: a hanging create makes its machine
// when it is released, a done-hang one at once.
func TestReleaseOfCreates(t *testing.T) {
	tests := []struct {
		release   Outcome
		class     string
		doneClass string // after done-hang
		makes     bool
	}{
		{OK(), "none", "none", true},
		{OKNoEndpoint(), "none", "none", true},
		{Definite(), "Definite", "none", false}, // it adopts what is there
		{Error(), "Ambiguous", "Ambiguous", false},
		{Ambiguous(), "Ambiguous", "Ambiguous", false},
		{DoneAmbiguous(), "Ambiguous", "Ambiguous", true},
		{Lost(), "LeaseLost", "LeaseLost", false},
		{Dead(), "LeaseLost", "LeaseLost", true},
	}
	for _, provider := range []Class{Token, Name, Label} {
		for _, test := range tests {
			for _, first := range []Outcome{Hang(), DoneHang()} {
				t.Run(fmt.Sprintf("%v/%v/%v", provider, first, test.release), func(t *testing.T) {
					b := New(Config{Class: provider})
					w := b.NewWork()
					c := newCaller(b, key)
					b.Script("w-0", create, first)
					var err error
					w.Go(func() { err = c.call(create) })
					require.True(t, w.RunNext())
					want, live := test.class, 0
					if first == DoneHang() {
						want = test.doneClass
						require.Equal(t, 1, b.Live("w-0"))
						live = 1
					} else {
						require.Zero(t, b.Live("w-0"))
					}
					require.NoError(t, b.Release("w-0", create, test.release))
					require.Equal(t, want, class(create, err), "released and returned, nothing to wait for")
					if test.makes {
						live = 1
					}
					if test.release == Lost() {
						live = 0
					}
					require.Equal(t, live, b.Live("w-0"))
				})
			}
		}
	}
}

func TestReleaseTakesTheOldest(t *testing.T) {
	b := New(Config{})
	w := b.NewWork()
	b.Script("w-0", create, Hang(), Hang())
	var answers []string
	for attempt := range provisioning.NodeAttemptID(2) {
		w.Go(func() {
			answers = append(answers, fmt.Sprintf("%d %s", attempt+1, class(create, newCaller(b, keyOf("w-0", attempt+1)).call(create))))
		})
	}
	w.RunAll()
	require.Equal(t, 2, b.Hanging("w-0", create))
	require.NoError(t, b.Release("w-0", create, Definite()))
	require.NoError(t, b.Release("w-0", create, OK()))
	require.Equal(t, []string{"1 Definite", "2 none"}, answers)
}

func TestReleasedPanic(t *testing.T) {
	b := New(Config{})
	w := b.NewWork()
	b.Script("w-0", create, Hang())
	var recovered any
	w.Go(func() {
		defer func() { recovered = recover() }()
		newCaller(b, key).call(create)
	})
	w.RunAll()
	require.NoError(t, b.Release("w-0", create, DonePanic()))
	require.Equal(t, "fakebackend: scripted panic of CreateLease on w-0", recovered)
	require.Equal(t, 1, b.Live("w-0"))
}

func TestSlow(t *testing.T) {
	for _, test := range []struct {
		first Outcome
		early int
	}{{Slow(40 * time.Second), 0}, {DoneSlow(40 * time.Second), 1}} {
		b := New(Config{})
		w := b.NewWork()
		b.Script("w-0", create, test.first)
		returned := false
		w.Go(func() {
			require.NoError(t, newCaller(b, key).call(create))
			returned = true
		})
		w.RunAll()
		due, ok := b.NextDue()
		require.True(t, ok)
		require.Equal(t, b.Now().Add(40*time.Second), due)
		b.AdvanceTo(due.Add(-1))
		require.False(t, returned)
		require.Equal(t, test.early, b.Live("w-0"))
		b.AdvanceTo(due)
		require.True(t, returned)
		require.Equal(t, 1, b.Live("w-0"))
		_, ok = b.NextDue()
		require.False(t, ok)
	}
}

// A leap over several instants lets each thing happen at its own.
func TestLeap(t *testing.T) {
	b := New(Config{})
	begin := b.Now()
	b.Script("w-0", create, Late(30*time.Second))
	b.Script("w-1", create, Late(20*time.Second))
	require.Error(t, newCaller(b, keyOf("w-0", 1)).call(create))
	require.Error(t, newCaller(b, keyOf("w-1", 2)).call(create))
	var seen []string
	note := func(what string) func() {
		return func() { seen = append(seen, fmt.Sprintf("%s at %v", what, b.Now().Sub(begin))) }
	}
	b.At(begin.Add(25*time.Second), note("hook"))
	b.At(begin.Add(25*time.Second), func() { b.At(begin.Add(10*time.Second), note("hook in the past")) })
	b.AdvanceTo(begin.Add(time.Hour))
	machines := b.Machines()
	require.Equal(t, begin.Add(30*time.Second), machines[0].CreatedAt)
	require.Equal(t, begin.Add(20*time.Second), machines[1].CreatedAt)
	require.True(t, machines[0].Late)
	require.Equal(t, []string{"hook at 25s", "hook in the past at 25s"}, seen)
	b.AdvanceTo(begin)
	require.Equal(t, begin.Add(time.Hour), b.Now(), "never back")
}

func TestWorkRunsInAnyOrderOneAtATime(t *testing.T) {
	b := New(Config{})
	w := b.NewWork()
	var order []int
	for i := range 5 {
		w.Go(func() { order = append(order, i) })
	}
	require.Equal(t, 5, w.Len())
	require.True(t, w.RunLast())
	require.True(t, w.Run(1))
	require.False(t, w.Run(3))
	require.False(t, w.Run(-1))
	w.Go(func() {
		order = append(order, 5)
		w.Go(func() { order = append(order, 6) })
	})
	require.Equal(t, 5, w.RunAll())
	require.Equal(t, []int{4, 1, 0, 2, 3, 5, 6}, order)
	require.False(t, w.RunNext())
	require.False(t, w.RunLast())
}

func TestWorkSurvivesGoexit(t *testing.T) {
	w := New(Config{}).NewWork()
	w.Go(runtime.Goexit)
	require.True(t, w.RunNext())
}

// A released call may go on to the next, which may block again: the releaser
// waits for the whole piece.
func TestReleasedPieceBlocksAgain(t *testing.T) {
	b := New(Config{})
	w := b.NewWork()
	c := newCaller(b, key)
	b.Script("w-0", create, Hang(), Slow(time.Second))
	var trace []string
	w.Go(func() {
		for range 3 {
			trace = append(trace, class(create, c.call(create)))
		}
	})
	w.RunAll()
	require.Empty(t, trace)
	require.NoError(t, b.Release("w-0", create, Ambiguous()))
	require.Equal(t, []string{"Ambiguous"}, trace)
	after(b, time.Second)
	require.Equal(t, []string{"Ambiguous", "none", "none"}, trace)
}

func TestPieceMayNotDriveItself(t *testing.T) {
	b := New(Config{})
	w := b.NewWork()
	b.Script("w-0", create, Hang())
	w.Go(func() { _ = newCaller(b, key).call(create) })
	w.RunAll()
	w.Go(func() {
		require.Panics(t, func() { b.AdvanceTo(b.Now().Add(1)) })
		require.Panics(t, func() { _ = b.Release("w-0", create, OK()) })
		require.Panics(t, func() { w.RunNext() })
		require.Panics(t, func() { b.Close() })
	})
	w.RunAll()
	b.Close()
}

func TestCloseLeavesNothingBlocked(t *testing.T) {
	b := New(Config{})
	b.Script("w-0", create, Hang(), Hang(), DoneSlow(time.Hour), Hang())
	before := runtime.NumGoroutine()
	answers := make(chan string, 3)
	for attempt := range provisioning.NodeAttemptID(3) {
		go func() { answers <- class(create, newCaller(b, keyOf("w-0", attempt+1)).call(create)) }()
	}
	waitBlocked(b, 3)
	b.Close()
	for range 3 {
		require.Equal(t, "Ambiguous", <-answers)
	}
	require.Equal(t, 1, b.Live("w-0"), "what was done is done")
	require.Equal(t, "Ambiguous", class(create, newCaller(b, keyOf("w-0", 4)).call(create)), "nothing blocks any more")
	_, due := b.NextDue()
	require.False(t, due)
	for runtime.NumGoroutine() > before {
		runtime.Gosched()
	}

	w := b.NewWork()
	w.Go(func() {})
	require.Equal(t, 1, w.RunAll())
}

func TestClock(t *testing.T) {
	var steps []string
	b := New(Config{JoinAfter: 7 * time.Minute})
	begin := b.Now()
	w := b.NewWork()
	at := func(d time.Duration) time.Time { return begin.Add(d) }
	clock := w.Clock(func(from, to time.Time) { steps = append(steps, fmt.Sprintf("%v-%v", from.Sub(begin), to.Sub(begin))) })
	wake := make(chan struct{}, 1)
	ctx, stop := context.WithCancel(context.Background())

	ran := false
	w.Go(func() { ran = true })
	clock.Sleep(ctx, at(time.Minute), wake)
	require.True(t, ran)
	require.Equal(t, at(time.Minute), clock.Now())
	clock.Sleep(ctx, at(time.Minute), wake)
	require.Equal(t, []string{"0s-1m0s"}, steps, "an instant that is here needs no step")

	// A wake that is there ends the sleep at once, and is taken.
	steps = nil
	wake <- struct{}{}
	clock.Sleep(ctx, at(time.Hour), wake)
	require.Empty(t, wake)
	require.Equal(t, at(time.Minute), clock.Now())

	// Work wakes its sleeper before the time moves.
	w.Go(func() { wake <- struct{}{} })
	clock.Sleep(ctx, at(time.Hour), wake)
	require.Equal(t, at(time.Minute), clock.Now())

	// What the provider does on the way happens at its instant.
	c := newCaller(b, key)
	b.Script("w-0", create, Slow(time.Minute))
	w.Go(func() {
		require.NoError(t, c.call(create))
		wake <- struct{}{}
	})
	clock.Sleep(ctx, at(time.Hour), wake)
	require.Equal(t, at(2*time.Minute), clock.Now())
	b.At(at(3*time.Minute), func() { wake <- struct{}{} })
	clock.Sleep(ctx, at(time.Hour), wake)
	require.Equal(t, at(3*time.Minute), clock.Now())
	require.Equal(t, []string{"1m0s-2m0s", "2m0s-3m0s"}, steps)

	// A host that is told to stop does not sleep.
	stop()
	clock.Sleep(ctx, at(time.Hour), wake)
	require.Equal(t, at(3*time.Minute), clock.Now())
}

// A pace that wakes the host keeps the time where it is.
func TestClockPaceMayWake(t *testing.T) {
	b := New(Config{})
	wake := make(chan struct{}, 1)
	begin := b.Now()
	clock := b.NewWork().Clock(func(time.Time, time.Time) { wake <- struct{}{} })
	clock.Sleep(context.Background(), begin.Add(time.Hour), wake)
	require.Equal(t, begin, clock.Now())
}
