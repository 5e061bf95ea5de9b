// Package workers runs functions on goroutines, and on few of them while the
// functions return at once.
package workers

import (
	"runtime"
	"sync"
)

// Pool runs functions. One that blocks holds up no other: whoever takes a
// function while more are waiting sees to it that another goroutine is on its
// way, before it runs what it took. So a thousand functions that all block get a
// thousand goroutines, and a thousand that return at once get a handful. None is
// kept for later.
//
// The zero Pool is ready. A Pool is safe for concurrent use.
type Pool struct {
	mu      sync.Mutex
	waiting []func() // from next on, first come, first served
	next    int
	coming  bool // a goroutine is on its way to take the first
}

// Run sees to it that f runs soon, on another goroutine. f may end its
// goroutine.
func (p *Pool) Run(f func()) {
	p.mu.Lock()
	p.waiting = append(p.waiting, f)
	start := !p.coming
	p.coming = true
	p.mu.Unlock()
	if start {
		go p.work()
	}
}

func (p *Pool) work() {
	runtime.Gosched()
	p.mu.Lock()
	p.coming = false
	for p.next < len(p.waiting) {
		f := p.take()
		start := p.next < len(p.waiting) && !p.coming
		p.coming = p.coming || start
		p.mu.Unlock()
		if start {
			go p.work()
		}
		f()
		p.mu.Lock()
	}
	p.mu.Unlock()
}

// take returns the first that waits. The caller holds mu.
func (p *Pool) take() func() {
	f := p.waiting[p.next]
	p.waiting[p.next] = nil
	p.next++
	switch {
	case p.next == len(p.waiting):
		p.waiting, p.next = room(p.waiting), 0
	case p.next > len(p.waiting)/2 && p.next > keptRoom: // a queue that is never empty must not grow for ever
		rest := copy(p.waiting, p.waiting[p.next:])
		clear(p.waiting[rest:])
		p.waiting, p.next = p.waiting[:rest], 0
	}
	return f
}

// keptRoom is how many places an empty queue keeps.
const keptRoom = 1024

func room(queue []func()) []func() {
	if cap(queue) > keptRoom {
		return nil
	}
	return queue[:0]
}
