package workers

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What blocks holds up nothing that was handed over before or after it.
func TestABlockedFunctionHoldsUpNoOther(t *testing.T) {
	const functions = 500
	var p Pool
	var started sync.WaitGroup
	release := make(chan struct{})
	var ended sync.WaitGroup
	for range functions {
		started.Add(1)
		ended.Add(1)
		p.Run(func() {
			defer ended.Done()
			started.Done()
			<-release
		})
	}
	started.Wait() // for ever, if one was held up
	close(release)
	ended.Wait()
	requireIdle(t, &p)
}

// A function that ends its goroutine takes nothing with it.
func TestGoexitLosesNothing(t *testing.T) {
	const functions = 500
	var p Pool
	var ended sync.WaitGroup
	for i := range functions {
		ended.Add(1)
		p.Run(func() {
			defer ended.Done()
			if i%3 == 0 {
				runtime.Goexit()
			}
		})
	}
	ended.Wait()
	requireIdle(t, &p)
}

// Functions start in the order in which they came, here on one goroutine: the
// first hands over the rest, and none of them blocks.
func TestFirstComeFirstServed(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const functions = 5 * keptRoom
	var p Pool
	var mu sync.Mutex
	var got []int
	done := make(chan struct{})
	p.Run(func() {
		for i := range functions {
			p.Run(func() {
				mu.Lock()
				defer mu.Unlock()
				if got = append(got, i); len(got) == functions {
					close(done)
				}
			})
		}
	})
	<-done
	mu.Lock()
	defer mu.Unlock()
	require.IsIncreasing(t, got)
	requireIdle(t, &p)
}

// A queue that is never empty does not grow with what has gone through it.
func TestAQueueThatIsNeverEmptyStaysSmall(t *testing.T) {
	var p Pool
	p.coming = true // nobody takes but this test
	for range 100_000 {
		p.Run(func() {})
		if len(p.waiting)-p.next > 3 {
			p.take()
		}
	}
	require.LessOrEqual(t, cap(p.waiting), 4*keptRoom)
}

func requireIdle(t *testing.T, p *Pool) {
	t.Helper()
	require.Eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.waiting) == 0 && p.next == 0 && !p.coming && cap(p.waiting) <= keptRoom
	}, 10*time.Second, time.Millisecond)
}
