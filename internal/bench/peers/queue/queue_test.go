//go:build unix

package queue

import (
	"fmt"
	"runtime"
	"testing"

	"k8s.io/client-go/util/workqueue"

	"github.com/swactor/provisioning/internal/bench/measure"
)

var sizes = []int{1_000, 10_000, 100_000, 1_000_000}

func keys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("w-%d", i)
	}
	return keys
}

// pass adds all keys, then gets and finishes each.
func pass(tb testing.TB, q workqueue.TypedInterface[string], keys []string) {
	for _, key := range keys {
		q.Add(key)
	}
	for _, want := range keys {
		key, shutdown := q.Get()
		if key != want || shutdown {
			tb.Fatalf("got %q (%v), want %q", key, shutdown, want)
		}
		q.Done(key)
	}
}

// BenchmarkWorkqueue is add, get and done with all keys in the queue at once. A
// queue without a name has no metrics.
func BenchmarkWorkqueue(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			q, keys := workqueue.NewTyped[string](), keys(n)
			defer q.ShutDown()
			runtime.GC()
			b.ResetTimer()
			start := measure.CPUTime()
			for b.Loop() {
				pass(b, q, keys)
			}
			b.ReportMetric(float64(measure.CPUTime()-start)/float64(b.N*n), "cpu-ns/node")
		})
	}
}

// TestPass: every key comes once, in order, and nothing is left.
func TestPass(t *testing.T) {
	q := workqueue.NewTyped[string]()
	defer q.ShutDown()
	for range 2 {
		pass(t, q, keys(100))
		if q.Len() != 0 {
			t.Fatal(q.Len(), "keys are left")
		}
	}
}
