package fakebackend

import (
	"container/heap"
	"time"
)

// event is something that happens at an instant. Events of one instant happen
// in the order in which they were scheduled.
type event struct {
	at    time.Time
	order uint64
	do    func() // with the lock held; nil once void
	wakes *call  // do has put this call's answer in place
	hook  func() // without the lock
}

func (e *event) void() { e.do = nil }

func (e *event) isVoid() bool { return e.do == nil && e.hook == nil }

type timeline []*event

func (t timeline) Len() int { return len(t) }
func (t timeline) Less(i, j int) bool {
	if !t[i].at.Equal(t[j].at) {
		return t[i].at.Before(t[j].at)
	}
	return t[i].order < t[j].order
}
func (t timeline) Swap(i, j int) { t[i], t[j] = t[j], t[i] }
func (t *timeline) Push(e any)   { *t = append(*t, e.(*event)) }
func (t *timeline) Pop() any {
	old := *t
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*t = old[:len(old)-1]
	return e
}

// schedule lets do happen d from now. The caller holds the lock, and so will
// do.
func (b *Backend) schedule(d time.Duration, do func()) *event {
	return b.push(&event{at: b.now.Add(d), do: do})
}

func (b *Backend) push(e *event) *event {
	b.order++
	e.order = b.order
	heap.Push(&b.timeline, e)
	return e
}

// next returns the earliest event, nil if there is none.
func (b *Backend) next() *event {
	for len(b.timeline) > 0 && b.timeline[0].isVoid() {
		heap.Pop(&b.timeline)
	}
	if len(b.timeline) == 0 {
		return nil
	}
	return b.timeline[0]
}

// Now returns the provider's time, which only [Backend.AdvanceTo] moves.
func (b *Backend) Now() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now
}

// NextDue returns when something is next to happen by itself: a slow call
// returns, a late effect lands, a bootstrap reports, a hook of [Backend.At] is
// called. It is false when nothing is waiting for the time.
func (b *Backend) NextDue() (time.Time, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.next(); e != nil {
		return e.at, true
	}
	return time.Time{}, false
}

// AdvanceTo moves the time to t, never back. What is due until then happens on
// the way, each thing at its own instant, also when the step is a leap. Of
// calls run by a [Work], AdvanceTo waits until each that returns has finished
// or blocks again.
func (b *Backend) AdvanceTo(t time.Time) {
	b.outsideOfWork("AdvanceTo")
	for b.step(t) {
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if t.After(b.now) {
		b.now = t
	}
}

// step lets the earliest event until t happen.
func (b *Backend) step(t time.Time) bool {
	b.mu.Lock()
	e := b.next()
	if e == nil || e.at.After(t) {
		b.mu.Unlock()
		return false
	}
	heap.Pop(&b.timeline)
	if e.at.After(b.now) {
		b.now = e.at
	}
	if e.do != nil {
		e.do()
	}
	b.unlockAndReport()
	if e.wakes != nil {
		b.resume(e.wakes)
	}
	if e.hook != nil {
		e.hook()
	}
	return true
}

// At lets hook be called when the time is t, by the goroutine that moves it; at
// once in the next step if t has passed. A hook may do anything but move the
// time.
func (b *Backend) At(t time.Time, hook func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.push(&event{at: t, hook: hook})
}
