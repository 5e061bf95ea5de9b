package fakebackend

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/swactor/provisioning"
)

// Work holds calls back until the test runs them, see [Backend.NewWork]. One
// goroutine at a time may run work, release calls and move the time.
type Work struct {
	backend *Backend

	mu    sync.Mutex
	queue []func()
}

// NewWork returns an empty Work. Use its Go as ExecutorConfig.Go.
func (b *Backend) NewWork() *Work { return &Work{backend: b} }

// Go queues a piece of work. It may be called from anywhere, also by a piece
// that runs.
func (w *Work) Go(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, f)
}

// Len returns how many pieces are queued.
func (w *Work) Len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.queue)
}

// RunNext runs the oldest piece; it is false when there is none. Running a
// piece starts it on a goroutine of its own and waits until it has finished or
// blocks, so that no two pieces ever run at the same time.
func (w *Work) RunNext() bool { return w.Run(0) }

// RunLast runs the newest piece.
func (w *Work) RunLast() bool { return w.Run(w.Len() - 1) }

// Run runs the piece at position i of the queue, oldest first. It is false
// when there is none.
func (w *Work) Run(i int) bool {
	w.backend.outsideOfWork("Run")
	w.mu.Lock()
	if i < 0 || i >= len(w.queue) {
		w.mu.Unlock()
		return false
	}
	f := w.queue[i]
	w.queue = slices.Delete(w.queue, i, i+1)
	w.mu.Unlock()
	w.backend.runPiece(f)
	return true
}

// RunAll runs the oldest piece until none is left, those included that are
// queued meanwhile. It returns how many ran.
func (w *Work) RunAll() int {
	n := 0
	for w.RunNext() {
		n++
	}
	return n
}

func (b *Backend) runPiece(f func()) {
	b.mu.Lock()
	b.working = true
	b.mu.Unlock()
	go func() {
		defer func() { // also after Goexit
			b.mu.Lock()
			b.working = false
			b.mu.Unlock()
			b.idle <- struct{}{}
		}()
		f()
	}()
	<-b.idle
}

// outsideOfWork guards what only the goroutine that runs the work may do: from
// within a piece it would wait for itself.
func (b *Backend) outsideOfWork(what string) {
	b.mu.Lock()
	working := b.working
	b.mu.Unlock()
	if working {
		panic("fakebackend: " + what + " was called while a piece of work runs")
	}
}

// Clock returns a clock in the virtual time of the backend. Its Sleep runs the
// work and moves the time: to until, or to whatever happens before. A Host
// with this clock and w.Go is fully deterministic, on one goroutine, as fast
// as the machine can.
//
// pace, if not nil, is called before each step of the time with what it is
// about to be: a demo sleeps there for real. To act at an instant use
// [Backend.At]; the hook may wake the host.
func (w *Work) Clock(pace func(from, to time.Time)) provisioning.Clock {
	return &clock{work: w, pace: pace}
}

type clock struct {
	work *Work
	pace func(from, to time.Time)
}

func (c *clock) Now() time.Time { return c.work.backend.Now() }

func (c *clock) Sleep(ctx context.Context, until time.Time, wake <-chan struct{}) {
	for {
		c.work.RunAll()
		if woken(ctx, wake) {
			return
		}
		from := c.Now()
		if !from.Before(until) {
			return
		}
		to := until
		if due, ok := c.work.backend.NextDue(); ok && due.Before(to) {
			to = due
		}
		if c.pace != nil {
			c.pace(from, to)
			if woken(ctx, wake) {
				return
			}
		}
		c.work.backend.AdvanceTo(to)
	}
}

func woken(ctx context.Context, wake <-chan struct{}) bool {
	select {
	case <-wake:
		return true
	default:
		return ctx.Err() != nil
	}
}
