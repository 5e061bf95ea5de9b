//go:build unix

package provisioning

import (
	"context"
	"flag"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/internal/bench/measure"
)

// benchBackend answers as benchAnswer does, and costs next to nothing.
type benchBackend struct{ goroutines atomic.Int64 } // the most that were there during a call

func (b *benchBackend) look() {
	now := int64(runtime.NumGoroutine())
	for most := b.goroutines.Load(); now > most && !b.goroutines.CompareAndSwap(most, now); most = b.goroutines.Load() {
	}
}

func (b *benchBackend) CreateLease(_ context.Context, r CreateLeaseRequest) (CreateLeaseResult, error) {
	b.look()
	return CreateLeaseResult{Lease: ProviderLeaseID("lease-" + string(r.Key.Node)), Endpoint: &SSHEndpoint{Host: "host-" + string(r.Key.Node), Port: 22}}, nil
}

func (b *benchBackend) LookupEndpoint(context.Context, LookupEndpointRequest) (LookupEndpointResult, error) {
	panic("every lease comes with its endpoint")
}

func (b *benchBackend) StartBootstrap(_ context.Context, r StartBootstrapRequest) (StartBootstrapResult, error) {
	b.look()
	return StartBootstrapResult{Session: BootstrapSessionID("session-" + string(r.Key.Node))}, nil
}

func (b *benchBackend) BootstrapConvergenceObserved(context.Context, BootstrapConvergenceObservedRequest) error {
	b.look()
	return nil
}

func (b *benchBackend) CancelBootstrap(context.Context, CancelBootstrapRequest) error {
	panic("every session closes by itself")
}

func (b *benchBackend) DestroyLease(context.Context, DestroyLeaseRequest) error {
	b.look()
	return nil
}

// stream delivers the end of an operation and then what the bootstrap says after
// it, which is when it costs least: what comes before the end of a start is held.
func (b *benchBackend) stream(deliver func(Observation)) func(Observation) {
	return func(o Observation) {
		deliver(o)
		if o.Kind != OperationCompleted {
			return
		}
		sink := NewBootstrapSink(o.Node, o.Attempt, deliver)
		session := BootstrapSessionID("session-" + string(o.Node))
		switch o.Completion.Kind {
		case StartBootstrap:
			sink.Joined(session, SwactorID("agent-"+string(o.Node)))
		case BootstrapConvergenceObserved:
			sink.Closed(session)
		}
	}
}

// benchWired is a driver with a real executor.
type benchWired struct {
	*ClusterDriver
	executor *Executor
	backend  benchBackend
	wake     chan struct{}
}

func newBenchWired(tb testing.TB, n int, spawn func(func())) *benchWired {
	driver, err := NewClusterDriver(benchShape(1, n), Config{})
	require.NoError(tb, err)
	w := &benchWired{ClusterDriver: driver, wake: make(chan struct{}, 1)}
	deliver := w.backend.stream(driver.Deliver)
	w.executor, err = NewExecutor(&w.backend, ExecutorConfig{Go: spawn, Deliver: func(o Observation) {
		deliver(o)
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}})
	require.NoError(tb, err)
	return w
}

// run drives until the wish of that generation is fulfilled.
func (w *benchWired) run(tb testing.TB, generation uint64) {
	for {
		if _, err := w.DriveUntilBlocked(benchNow, w.executor); err != nil {
			tb.Fatal(err)
		}
		if w.Converged(generation) {
			return
		}
		<-w.wake
	}
}

// close ends what is left: a session whose end was told after all was ready.
func (w *benchWired) close(tb testing.TB) {
	require.NoError(tb, w.executor.Close(context.Background()))
	require.NoError(tb, w.foldOnly(benchNow))
	require.Zero(tb, w.executor.Stats().Panics+w.executor.Stats().DeliverPanics)
}

func inline(f func()) { f() }

func executorClimb(tb testing.TB, n int, spawn func(func())) *benchWired {
	w := newBenchWired(tb, n, spawn)
	w.run(tb, 1)
	w.close(tb)
	return w
}

// BenchmarkExecutorPath climbs with the driver alone, with its real executor,
// which makes the calls inline or on goroutines, and with all that under a host.
// What the others cost more than the first is the way from submit to deliver; an
// operation is three fifths of the events.
func BenchmarkExecutorPath(b *testing.B) {
	var most float64 // goroutines, of the last climb
	for _, subject := range []struct {
		name string
		run  func(tb testing.TB, n int) func() uint32
	}{
		{"driver", func(tb testing.TB, n int) func() uint32 { return climb(tb, benchShape(1, n), false).digest }},
		{"inline", func(tb testing.TB, n int) func() uint32 {
			w := executorClimb(tb, n, inline)
			return func() uint32 { return benchDigest(w.state) }
		}},
		{"goroutines", func(tb testing.TB, n int) func() uint32 {
			w := executorClimb(tb, n, nil)
			most = float64(w.backend.goroutines.Load())
			return func() uint32 { return benchDigest(w.state) }
		}},
		{"host", func(tb testing.TB, n int) func() uint32 {
			h, backend := hostClimb(tb, n)
			most = float64(backend.goroutines.Load())
			return func() uint32 { return benchDigest(h.driver.state) }
		}},
	} {
		b.Run(subject.name, func(b *testing.B) {
			for _, n := range benchSizes[:len(benchSizes)-1] {
				most = 0
				benchClimb(b, []int{n}, func(tb testing.TB, n int) func() uint32 {
					digest := subject.run(tb, n)
					if most > 0 {
						b := tb.(*testing.B)
						b.ReportMetric(most, "goroutines")
					}
					return digest
				})
			}
		})
	}
}

// hostClimb climbs in real time, on goroutines.
func hostClimb(tb testing.TB, n int) (*Host, *benchBackend) {
	backend := &benchBackend{}
	h, err := NewHost(HostConfig{Shape: benchShape(1, n), Backend: backend})
	require.NoError(tb, err)
	h.executor.deliver = backend.stream(h.Deliver) // nothing runs yet
	ended := make(chan error, 1)
	go func() { ended <- h.Run(context.Background()) }()
	require.NoError(tb, h.WaitConverged(context.Background(), 1))
	held, err := h.Close(context.Background())
	require.NoError(tb, err)
	require.Len(tb, held, n)
	require.ErrorIs(tb, <-ended, ErrHostClosed)
	return h, backend
}

// benchChurn brings n nodes up and takes them down again, for ever under new
// attempts.
type benchChurn struct {
	*benchWired
	count      int
	generation uint64
}

func newBenchChurn(tb testing.TB, n int) *benchChurn {
	return &benchChurn{benchWired: newBenchWired(tb, n, inline), count: n, generation: 1}
}

func (c *benchChurn) cycle(tb testing.TB) {
	for _, count := range []int{c.count, 0} {
		c.generation++
		if err := c.UpdateDesired(benchShape(c.generation, count)); err != nil {
			tb.Fatal(err)
		}
		c.run(tb, c.generation)
	}
}

// BenchmarkChurnBounded: what has come and gone leaves nothing behind.
func BenchmarkChurnBounded(b *testing.B) {
	const cycles = 100
	n := benchSizes[0]
	for b.Loop() {
		c := newBenchChurn(b, n)
		c.cycle(b) // from here on work lists and maps have their size
		before, done := measure.Heap(), c.executor.Stats().Completed
		for range cycles {
			c.cycle(b)
		}
		done = c.executor.Stats().Completed - done
		if done != uint64(cycles*n*4) { // create, start, convergence, destroy
			b.Fatal(fmt.Sprint(done, " operations"))
		}
		b.ReportMetric(float64(measure.Heap()-before)/float64(done), "B/operation")
		runtime.KeepAlive(c)
	}
}

// TestBenchExecutorsAgree: the subjects with a real executor come to the same,
// whoever runs the calls, and a churn leaves neither slots nor ledgers.
func TestBenchExecutorsAgree(t *testing.T) {
	const n = 40
	want := floorClimb(t, n).digest()
	require.Equal(t, want, benchDigest(executorClimb(t, n, inline).state))
	require.Equal(t, want, benchDigest(executorClimb(t, n, nil).state))
	h, _ := hostClimb(t, n)
	require.Equal(t, want, benchDigest(h.driver.state))

	c := newBenchChurn(t, n)
	for range 3 {
		c.cycle(t)
		require.Zero(t, c.state.Len())
		require.Zero(t, c.executor.Stats().Attempts)
	}
	require.EqualValues(t, 3*n*4, c.executor.Stats().Completed)
	require.EqualValues(t, 3*n, c.Stats().Attempts)
}

// TestBenchmarksRun: every benchmark still does what it says, with few nodes.
func TestBenchmarksRun(t *testing.T) {
	benchRunSmall(t)
	for name, benchmark := range map[string]func(*testing.B){
		"EventOneAtATime": BenchmarkEventOneAtATime, "ConvergeBatched": BenchmarkConvergeBatched,
		"SettledFullPass": BenchmarkSettledFullPass, "SettledDrive": BenchmarkSettledDrive,
		"WakeOneDue": BenchmarkWakeOneDue, "ScheduleOverhead": BenchmarkScheduleOverhead,
		"UpdateDesired": BenchmarkUpdateDesired, "Converged": BenchmarkConverged, "Snapshot": BenchmarkSnapshot,
		"BytesPerNode": BenchmarkBytesPerNode, "ChurnBounded": BenchmarkChurnBounded,
		"ExecutorPath": BenchmarkExecutorPath, "Herd": BenchmarkHerd,
	} {
		t.Run(name, func(t *testing.T) {
			require.NotZero(t, testing.Benchmark(benchmark).N, "the benchmark failed")
			benchSettled = nil
		})
	}
}

// benchRunSmall makes the sizes of this test small and its benchmarks short.
func benchRunSmall(t *testing.T) {
	sizes := benchSizes
	benchSizes = []int{10, 20}
	benchtime := flag.Lookup("test.benchtime").Value.String()
	require.NoError(t, flag.Set("test.benchtime", "2x"))
	t.Cleanup(func() {
		benchSizes = sizes
		require.NoError(t, flag.Set("test.benchtime", benchtime))
	})
}
