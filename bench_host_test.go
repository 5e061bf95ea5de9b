//go:build unix

package provisioning_test

import (
	"context"
	"flag"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/bench/measure"
)

var wholeSizes = []int{1_000, 10_000, 100_000}

// wholeWay is what came of a climb through host, executor and fake backend, in
// real time and on goroutines.
type wholeWay struct {
	took, used time.Duration // on the wall, of the CPU
	events     uint64
	goroutines int64 // the most that were there during a call
	ready      int
	live       int // machines at the provider
}

func wholeShape(n int) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: "whole", Generation: 1, Groups: []provisioning.NodeGroupSpec{{GroupID: "w", Count: n}}}
}

func climbWholeWay(tb testing.TB, n, maxInFlight int) wholeWay {
	var goroutines atomic.Int64
	fake := fakebackend.New(fakebackend.Config{OnCall: func(fakebackend.Call) {
		now := int64(runtime.NumGoroutine())
		for most := goroutines.Load(); now > most && !goroutines.CompareAndSwap(most, now); most = goroutines.Load() {
		}
	}})
	host, err := provisioning.NewHost(provisioning.HostConfig{Shape: wholeShape(n), Backend: fake, MaxInFlight: maxInFlight})
	require.NoError(tb, err)
	runtime.GC()
	began, start := time.Now(), measure.CPUTime()
	ended := make(chan error, 1)
	go func() { ended <- host.Run(context.Background()) }()
	require.NoError(tb, host.WaitConverged(context.Background(), 1))
	w := wholeWay{took: time.Since(began), used: measure.CPUTime() - start, goroutines: goroutines.Load(), live: fake.LiveTotal()}
	status := host.Status()
	w.ready, w.events = status.Ready, status.Driver.Folded+status.Driver.NotApplied
	_, err = host.Close(context.Background())
	require.NoError(tb, err)
	require.ErrorIs(tb, <-ended, provisioning.ErrHostClosed)
	return w
}

// callFake makes the calls of a climb without the library: what the fake itself
// costs.
func callFake(tb testing.TB, n int) time.Duration {
	fake := fakebackend.New(fakebackend.Config{})
	desired, err := provisioning.Expand(wholeShape(n))
	require.NoError(tb, err)
	ctx, key := context.Background(), provisioning.ExternalKey{Run: "whole"}
	runtime.GC()
	start := measure.CPUTime()
	for spec := range desired.All() {
		key.Node = spec.Node
		key.Attempt++
		op := provisioning.OperationID{Attempt: key.Attempt, Sequence: 1}
		lease, err := fake.CreateLease(ctx, provisioning.CreateLeaseRequest{Key: key, Operation: op, Spec: spec})
		require.NoError(tb, err)
		require.NotNil(tb, lease.Endpoint)
		session, err := fake.StartBootstrap(ctx, provisioning.StartBootstrapRequest{Key: key, Operation: op, Spec: spec,
			Lease: lease.Lease, Endpoint: *lease.Endpoint})
		require.NoError(tb, err)
		require.NoError(tb, fake.BootstrapConvergenceObserved(ctx, provisioning.BootstrapConvergenceObservedRequest{Key: key, Operation: op,
			Spec: spec, Lease: lease.Lease, Endpoint: *lease.Endpoint, Session: session.Session}))
	}
	return measure.CPUTime() - start
}

// BenchmarkWholeWay climbs through host, executor and fake backend: with as many
// calls at once as there are nodes, with a thousand, and, to be subtracted, with
// the calls of the fake alone.
func BenchmarkWholeWay(b *testing.B) {
	for _, subject := range []struct {
		name        string
		maxInFlight int
	}{{"free", 0}, {"places", 1000}} {
		b.Run(subject.name, func(b *testing.B) {
			for _, n := range wholeSizes {
				b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
					var sum wholeWay
					for b.Loop() {
						w := climbWholeWay(b, n, subject.maxInFlight)
						sum.took, sum.used, sum.events = sum.took+w.took, sum.used+w.used, sum.events+w.events
						sum.goroutines = max(sum.goroutines, w.goroutines)
					}
					b.ReportMetric(float64(sum.events)/sum.took.Seconds(), "events/s")
					b.ReportMetric(float64(sum.events)/float64(b.N*n), "events/node")
					b.ReportMetric(float64(sum.used)/float64(b.N*n), "cpu-ns/node")
					b.ReportMetric(float64(sum.goroutines), "goroutines")
				})
			}
		})
	}
	b.Run("fake", func(b *testing.B) {
		for _, n := range wholeSizes {
			b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
				var used time.Duration
				for b.Loop() {
					used += callFake(b, n)
				}
				b.ReportMetric(float64(used)/float64(b.N*n), "cpu-ns/node")
			})
		}
	})
}

// TestWholeWay: all the nodes come up, each with one machine, and no call has
// more than one goroutine. How many of those whose call is over are still on
// their way out is for the scheduler to say, so the cap on calls bounds nothing
// here that a test could rely on.
func TestWholeWay(t *testing.T) {
	const n, callsPerNode, others = 200, 3, 20
	before := runtime.NumGoroutine()
	for _, maxInFlight := range []int{0, 16} {
		w := climbWholeWay(t, n, maxInFlight)
		require.Equal(t, n, w.ready)
		require.Equal(t, n, w.live)
		require.GreaterOrEqual(t, w.events, uint64(4*n))
		require.LessOrEqual(t, w.goroutines, int64(before+callsPerNode*n+others))
		require.Greater(t, w.goroutines, int64(1))
	}
}

// TestWholeWayBenchmark still does what it says, with few nodes.
func TestWholeWayBenchmark(t *testing.T) {
	sizes, benchtime := wholeSizes, flag.Lookup("test.benchtime").Value.String()
	wholeSizes = []int{10}
	require.NoError(t, flag.Set("test.benchtime", "2x"))
	t.Cleanup(func() {
		wholeSizes = sizes
		require.NoError(t, flag.Set("test.benchtime", benchtime))
	})
	require.NotZero(t, testing.Benchmark(BenchmarkWholeWay).N, "the benchmark failed")
}
