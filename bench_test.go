//go:build unix

package provisioning

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/internal/bench/measure"
)

// The benchmarks measure CPU time (user and system) of this process and report
// it per event, because the machines they run on are shared. An event is one
// delivered result or observation. A node climbs with five: its lease with the
// endpoint, the start of its bootstrap, the join, the accepted convergence, and
// the close of the session, which comes too late to matter.
//
// Every subject gets the same events with the same facts, and its strings are
// built inside the measured region. At the end every node must be ready, and the
// digest of what is known about them the same for all subjects.
//
// internal/bench runs the subjects in turn and compares them.

const benchEvents = 5

// benchSizes are the numbers of nodes.
var benchSizes = []int{1_000, 10_000, 100_000, 1_000_000}

var benchNow = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func benchShape(generation uint64, count int) ClusterShape {
	return ClusterShape{RunID: "bench", Generation: generation,
		Groups: []NodeGroupSpec{{GroupID: "w", Count: count, Shape: NodeShape{Image: "image"}}}}
}

// benchQueue is first in, first out, in blocks that are used again, so that no
// subject is charged for the growing of a slice.
type benchQueue[T any] struct {
	blocks, spare [][]T
	at            int // in the first block
}

func (q *benchQueue[T]) put(item T) {
	if last := len(q.blocks) - 1; last < 0 || len(q.blocks[last]) == cap(q.blocks[last]) {
		var block []T
		if n := len(q.spare); n > 0 {
			block, q.spare = q.spare[n-1], q.spare[:n-1]
		} else {
			block = make([]T, 0, 256)
		}
		q.blocks = append(q.blocks, block)
	}
	last := len(q.blocks) - 1
	q.blocks[last] = append(q.blocks[last], item)
}

// take returns the oldest item, which stays valid until the next call; nil if
// there is none.
func (q *benchQueue[T]) take() *T {
	if len(q.blocks) > 0 && q.at == cap(q.blocks[0]) {
		q.spare = append(q.spare, q.blocks[0][:0])
		q.blocks, q.at = q.blocks[1:], 0
	}
	if len(q.blocks) == 0 || q.at == len(q.blocks[0]) {
		return nil
	}
	q.at++
	return &q.blocks[0][q.at-1]
}

func (q *benchQueue[T]) len() int {
	n := -q.at
	for _, block := range q.blocks {
		n += len(block)
	}
	return n
}

// benchExecutor keeps of every effect what its answer takes, as the floor does;
// the benchmark answers.
type benchExecutor struct{ calls benchQueue[benchCall] }

type benchCall struct {
	node      LogicalNodeID
	operation OperationID
	kind      OperationKind
}

func (x *benchExecutor) Submit(e Effect) (bool, error) {
	x.calls.put(benchCall{e.Key.Node, e.Operation, e.Kind})
	return false, nil
}
func (x *benchExecutor) Expire(OperationID) Completion { panic("nothing expires") }
func (x *benchExecutor) Retire(NodeAttemptID)          {}
func (x *benchExecutor) Running() []RunningCall        { return nil }

// benchAnswer is what the provider says to a call: one observation or, for a
// start and a convergence, two. It makes the texts that the floor's makes.
func benchAnswer(call *benchCall, deliver func(Observation)) {
	node, attempt := call.node, call.operation.Attempt
	done := Completion{Operation: call.operation, Kind: call.kind}
	switch call.kind {
	case CreateLease:
		done.Lease = ProviderLeaseID("lease-" + string(node))
		done.Endpoint = &SSHEndpoint{Host: "host-" + string(node), Port: 22}
	case StartBootstrap:
		done.Session = BootstrapSessionID("session-" + string(node))
	}
	deliver(Observation{Kind: OperationCompleted, Node: node, Attempt: attempt, Completion: done})
	stream := Observation{Node: node, Attempt: attempt}
	switch call.kind {
	case StartBootstrap:
		stream.Kind, stream.Session, stream.Swactor = SwactorJoined, BootstrapSessionID("session-"+string(node)), SwactorID("agent-"+string(node))
	case BootstrapConvergenceObserved:
		stream.Kind, stream.Session = BootstrapClosed, BootstrapSessionID("session-"+string(node))
	default:
		return
	}
	deliver(stream)
}

// benchDriver is a driver and its provider, which answers when it is asked to.
type benchDriver struct {
	*ClusterDriver
	provider   benchExecutor
	generation uint64
	count      int
}

func newBenchDriver(tb testing.TB, shape ClusterShape) *benchDriver {
	// Room for the benchmark that adds nodes to a million.
	d, err := NewClusterDriver(shape, Config{MaxNodes: maxIndex})
	require.NoError(tb, err)
	return &benchDriver{ClusterDriver: d, generation: shape.Generation, count: shape.Groups[0].Count}
}

func (d *benchDriver) drive(tb testing.TB) {
	if _, err := d.DriveUntilBlocked(benchNow, &d.provider); err != nil {
		tb.Fatal(err)
	}
}

// run answers calls until none is left, in batches or one observation at a
// time, and the cluster has converged.
func (d *benchDriver) run(tb testing.TB, oneAtATime bool) {
	d.drive(tb)
	benchRun(&d.provider.calls, d.Deliver, func() { d.drive(tb) }, oneAtATime)
	if !d.Converged(d.generation) {
		tb.Fatal("not converged")
	}
}

func benchRun(calls *benchQueue[benchCall], deliver func(Observation), drive func(), oneAtATime bool) {
	for batch := calls.len(); batch > 0; batch = calls.len() {
		for range batch {
			benchAnswer(calls.take(), func(o Observation) {
				deliver(o)
				if oneAtATime {
					drive()
				}
			})
		}
		drive()
	}
}

// wish asks for so many nodes under the next generation.
func (d *benchDriver) wish(tb testing.TB, count int) {
	d.generation++
	d.count = count
	if err := d.UpdateDesired(benchShape(d.generation, count)); err != nil {
		tb.Fatal(err)
	}
}

func (d *benchDriver) digest() uint32 { return benchDigest(d.state) }

func benchDigest(state *ClusterState) uint32 {
	digest := measure.NewDigest()
	for n := range state.All() {
		host := ""
		if n.Record.Connection != nil {
			host = n.Record.Connection.Host
		}
		digest.Add(measure.Node{ID: string(n.Record.Node), Lease: string(n.Record.Lease), Host: host, Agent: string(n.Record.Swactor.ID),
			Attempt: uint64(n.Attempt), Operations: n.NextSequence - 1, Ready: n.Record.Ready})
	}
	return digest.Sum()
}

func climb(tb testing.TB, shape ClusterShape, oneAtATime bool) *benchDriver {
	d := newBenchDriver(tb, shape)
	d.run(tb, oneAtATime)
	return d
}

// naiveStart returns the naive driver with all its creates in flight.
func naiveStart(n int) (*dtNaive, *benchExecutor, func()) {
	d, x := dtNewNaive(benchShape(1, n), Config{}), &benchExecutor{}
	d.roughly = true
	drive := func() {
		for d.drive(benchNow, x) {
		}
	}
	drive()
	return d, x, drive
}

func naiveClimb(tb testing.TB, n int, oneAtATime bool) *dtNaive {
	d, x, drive := naiveStart(n)
	benchRun(&x.calls, d.Deliver, drive, oneAtATime)
	if !d.benchConverged() {
		tb.Fatal("not converged")
	}
	return d
}

// benchConverged is Converged without the comparing of specs one by one.
func (d *dtNaive) benchConverged() bool {
	for n := range d.state.All() {
		if !n.Record.Ready || n.Pending != nil {
			return false
		}
	}
	return d.state.Len() == d.accepted.Len()
}

// benchClimb measures climbs. run returns the digest of what it came to.
func benchClimb(b *testing.B, sizes []int, run func(tb testing.TB, n int) (digest func() uint32)) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			benchSettled = nil
			var digest func() uint32
			runtime.GC()
			b.ResetTimer()
			start := measure.CPUTime()
			for range b.N {
				digest = run(b, n)
			}
			b.ReportMetric(float64(measure.CPUTime()-start)/float64(b.N*n*benchEvents), "cpu-ns/event")
			b.StopTimer()
			b.ReportMetric(float64(digest()), "digest")
		})
	}
}

func BenchmarkEventOneAtATime(b *testing.B) {
	b.Run("floor", func(b *testing.B) { benchClimb(b, benchSizes, benchFloor) })
	b.Run("ours", func(b *testing.B) {
		benchClimb(b, benchSizes, func(tb testing.TB, n int) func() uint32 { return climb(tb, benchShape(1, n), true).digest })
	})
	b.Run("naive", func(b *testing.B) {
		few, many := benchSplit(benchSizes, 3_000)
		benchClimb(b, few, func(tb testing.TB, n int) func() uint32 {
			d := naiveClimb(tb, n, true)
			return func() uint32 { return benchDigest(d.state) }
		})
		// The whole climb grows with the square of N. Of more nodes only the
		// first events are timed, each the end of a create.
		for _, n := range many {
			b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
				const events = 200
				var used time.Duration
				for b.Loop() {
					b.StopTimer()
					d, x, drive := naiveStart(n)
					b.StartTimer()
					start := measure.CPUTime()
					for range events {
						benchAnswer(x.calls.take(), d.Deliver)
						drive()
					}
					used += measure.CPUTime() - start
				}
				b.ReportMetric(float64(used)/float64(b.N*events), "cpu-ns/event")
			})
		}
	})
}

func BenchmarkConvergeBatched(b *testing.B) {
	b.Run("floor", func(b *testing.B) { benchClimb(b, benchSizes, benchFloor) })
	b.Run("ours", func(b *testing.B) {
		benchClimb(b, benchSizes, func(tb testing.TB, n int) func() uint32 { return climb(tb, benchShape(1, n), false).digest })
	})
	b.Run("naive", func(b *testing.B) {
		benchClimb(b, benchSizes, func(tb testing.TB, n int) func() uint32 {
			d := naiveClimb(tb, n, false)
			return func() uint32 { return benchDigest(d.state) }
		})
	})
}

func benchFloor(tb testing.TB, n int) func() uint32 { return floorClimb(tb, n).digest }

// benchSplit returns the sizes up to a limit and those above.
func benchSplit(sizes []int, limit int) (few, many []int) {
	for _, n := range sizes {
		if n <= limit {
			few = append(few, n)
		} else {
			many = append(many, n)
		}
	}
	return few, many
}

// benchSettled is a driver with nothing left to do. The benchmarks that need
// one use it one after the other, and leave it so.
var benchSettled *benchDriver

func settledDriver(tb testing.TB, n int) *benchDriver {
	if benchSettled == nil || benchSettled.count != n {
		benchSettled = nil // before the next one is made
		benchSettled = climb(tb, benchShape(1, n), false)
	}
	runtime.GC()
	return benchSettled
}

// benchEach measures something small about a settled cluster of every size. do
// returns how many times it was done.
func benchEach(b *testing.B, per string, do func(b *testing.B, d *benchDriver) (times int)) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			d, times := settledDriver(b, n), 0
			b.ReportAllocs()
			b.ResetTimer()
			start := measure.CPUTime()
			for b.Loop() {
				times += do(b, d)
			}
			b.ReportMetric(float64(measure.CPUTime()-start)/float64(times), "cpu-ns/"+per)
		})
	}
}

func BenchmarkSettledFullPass(b *testing.B) {
	benchEach(b, "node", func(b *testing.B, d *benchDriver) int {
		if plan := Decide(d.state, d.accepted, benchNow); len(plan.Actions) != 0 {
			b.Fatal(plan)
		}
		return d.count
	})
}

func BenchmarkSettledDrive(b *testing.B) {
	benchEach(b, "pass", func(b *testing.B, d *benchDriver) int {
		d.Trigger()
		if ran, err := d.DriveNext(benchNow, &d.provider); err != nil || !ran {
			b.Fatal(ran, err)
		}
		return 1
	})
}

// BenchmarkSnapshot copies a settled cluster and says how long it kept the state
// locked at a time, at most, with what it did right after the lock.
func BenchmarkSnapshot(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			d := settledDriver(b, n)
			var used, longest time.Duration
			timed := func(f func()) {
				start := measure.CPUTime()
				f()
				took := measure.CPUTime() - start
				used, longest = used+took, max(longest, took)
			}
			for b.Loop() {
				var count *count
				timed(func() { count = d.census.begin(d.ClusterDriver) })
				for more := true; more; {
					timed(func() { more = count.next(d.ClusterDriver) })
				}
				timed(func() {
					if d.census.finish(d.ClusterDriver, count).Len() != n {
						b.Fatal("not all")
					}
				})
			}
			b.ReportMetric(float64(used)/float64(b.N*n), "cpu-ns/node")
			b.ReportMetric(float64(longest)/float64(time.Millisecond), "longest-ms")
		})
	}
}

func BenchmarkConverged(b *testing.B) {
	benchEach(b, "call", func(b *testing.B, d *benchDriver) int {
		if !d.Converged(d.generation) {
			b.Fatal("not converged")
		}
		return 1
	})
}

// BenchmarkScheduleOverhead is what the driver pays to remember a node and to
// come back to it: mark it hot, set a deadline, then, in the order of slots, take
// it out and clear the deadline. All nodes of the cluster are in at once.
func BenchmarkScheduleOverhead(b *testing.B) {
	var nodes []*node
	benchEach(b, "node", func(b *testing.B, d *benchDriver) int {
		if len(nodes) != d.count {
			nodes = slices.Collect(d.state.inOrder())
		}
		for i, n := range nodes {
			d.heat(n)
			n.wakesAt = instant(1 + i*7919%len(nodes))
			d.deadlines.Put(n)
		}
		slices.SortFunc(d.hot, compareNodes)
		for _, n := range d.hot {
			n.hot = false
			d.deadlines.Remove(n)
		}
		d.hot = d.hot[:0]
		return len(nodes)
	})
}

func BenchmarkUpdateDesired(b *testing.B) {
	b.Run("same", func(b *testing.B) {
		benchEach(b, "update", func(b *testing.B, d *benchDriver) int {
			if err := d.UpdateDesired(benchShape(d.generation, d.count)); err != nil {
				b.Fatal(err)
			}
			d.drive(b)
			return 1
		})
	})
	b.Run("one-more", func(b *testing.B) {
		for _, n := range benchSizes {
			b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
				d := settledDriver(b, n)
				b.ResetTimer()
				start := measure.CPUTime()
				for b.Loop() {
					d.wish(b, d.count+1)
					d.drive(b) // its create is out
				}
				b.ReportMetric(float64(measure.CPUTime()-start)/float64(b.N), "cpu-ns/update")
				if d.provider.calls.len() != b.N {
					b.Fatal("no create for each")
				}
				d.wish(b, n)
				d.run(b, false)
			})
		}
	})
	// As many groups of one node come in front of the one that is there, and go.
	b.Run("groups", func(b *testing.B) {
		for _, n := range benchSizes {
			if n > 100_000 {
				continue
			}
			b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
				var used time.Duration
				for b.Loop() {
					b.StopTimer()
					d := climb(b, benchShape(1, 1), false)
					one, many := benchShape(2, 1), benchShape(2, 1)
					for i := range n {
						many.Groups = append(many.Groups, NodeGroupSpec{GroupID: NodeGroupID(fmt.Sprintf("g%06d", i)), Count: 1})
					}
					runtime.GC()
					b.StartTimer()
					start := measure.CPUTime()
					for _, shape := range []ClusterShape{many, one} {
						d.generation++
						shape.Generation = d.generation
						if err := d.UpdateDesired(shape); err != nil {
							b.Fatal(err)
						}
						d.run(b, false)
					}
					used += measure.CPUTime() - start
				}
				b.ReportMetric(float64(used)/float64(b.N*n), "cpu-ns/group")
			})
		}
	})
	// An event is here the end of a destroy, the only one that each node has.
	b.Run("to-zero-floor", func(b *testing.B) {
		benchToZero(b, func(b *testing.B, n int) func() {
			d := floorClimb(b, n)
			return func() { d.toZero(b, n) }
		})
	})
	b.Run("to-zero", func(b *testing.B) {
		benchToZero(b, func(b *testing.B, n int) func() {
			d := settledDriver(b, n)
			benchSettled = nil
			return func() {
				d.wish(b, 0)
				d.run(b, false)
			}
		})
	})
}

func benchToZero(b *testing.B, climbed func(b *testing.B, n int) (toZero func())) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			var used time.Duration
			for b.Loop() {
				b.StopTimer()
				toZero := climbed(b, n)
				b.StartTimer()
				start := measure.CPUTime()
				toZero()
				used += measure.CPUTime() - start
			}
			b.ReportMetric(float64(used)/float64(b.N*n), "cpu-ns/event")
		})
	}
}

// BenchmarkWakeOneDue: each of N nodes backs off to a moment of its own. One of
// them comes, and the node gets its next operation.
func BenchmarkWakeOneDue(b *testing.B) {
	benchSettled = nil
	for _, n := range benchSizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			const day = 24 * time.Hour // no operation runs out of time meanwhile
			d, err := NewClusterDriver(benchShape(1, n), Config{Retry: RetryPolicy{InitialDelay: 1, MaxDelay: 1, OperationTimeout: day, MaxRetryAfter: day}})
			require.NoError(b, err)
			x, now := &benchExecutor{}, benchNow
			drive := func() {
				if _, err := d.DriveUntilBlocked(now, x); err != nil {
					b.Fatal(err)
				}
			}
			var used time.Duration
			left := 0
			drive()
			for b.Loop() {
				if left == 0 {
					b.StopTimer()
					for i := range n { // the waits are in no order of the slots
						call := x.calls.take()
						d.Deliver(Observation{Kind: OperationCompleted, Node: call.node, Attempt: call.operation.Attempt,
							Completion: Completion{Operation: call.operation, Kind: call.kind, Class: ClassDefinite, Message: "no capacity",
								RetryAfter: time.Duration(1+i*7919%n) * time.Millisecond}})
					}
					drive()
					left = n
					runtime.GC()
					used -= measure.CPUTime() // until this round of wakes is over
					b.StartTimer()
				}
				now, _ = d.RequeueAt()
				if !d.TriggerIfDue(now) {
					b.Fatal("not due")
				}
				drive()
				if left--; left == 0 {
					used += measure.CPUTime()
				}
			}
			if left > 0 {
				used += measure.CPUTime()
			}
			if x.calls.len() != n-left {
				b.Fatal("not one operation for each wake")
			}
			b.ReportMetric(float64(used)/float64(b.N), "cpu-ns/wake")
		})
	}
}

// richShape is a shape whose template weighs a few kilobytes.
func richShape(generation uint64, count int) ClusterShape {
	shape := benchShape(generation, count)
	g := &shape.Groups[0]
	g.Boot.Env, g.Shape.ProviderLabels = make(map[string]string), make(map[string]string)
	for i := range 32 {
		g.Boot.Env[fmt.Sprintf("VARIABLE_%d", i)] = fmt.Sprintf("value of variable %d", i)
		g.Shape.ProviderLabels[fmt.Sprintf("label-%d", i)] = fmt.Sprintf("value-%d", i)
		g.Boot.Args = append(g.Boot.Args, fmt.Sprintf("--flag-%d=value", i))
		g.Boot.VerifyCommands = append(g.Boot.VerifyCommands, fmt.Sprintf("test -x /usr/bin/tool-%d", i))
	}
	return shape
}

// BenchmarkBytesPerNode says nothing about the peak unless it runs in a process
// of its own, with one size.
func BenchmarkBytesPerNode(b *testing.B) {
	benchSettled = nil
	for _, weight := range []struct {
		name  string
		shape func(uint64, int) ClusterShape
	}{{"small", benchShape}, {"rich", richShape}} {
		b.Run(weight.name, func(b *testing.B) {
			for _, n := range benchSizes {
				b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
					for b.Loop() {
						before := measure.Heap()
						d := climb(b, weight.shape(1, n), true) // as under a host, which drives as soon as it can
						d.provider = benchExecutor{}            // the driver knows its executor
						b.ReportMetric(float64(measure.Heap()-before)/float64(n), "B/node")
						runtime.KeepAlive(d)
					}
					b.ReportMetric(float64(measure.PeakRSS()), "peak-B")
				})
			}
		})
	}
}

// TestBenchSubjectsAgree: every subject comes to the same, and the full ladder
// finds nothing that our driver has missed.
func TestBenchSubjectsAgree(t *testing.T) {
	const n = 40
	want := floorClimb(t, n).digest()
	for _, oneAtATime := range []bool{false, true} {
		d := climb(t, benchShape(1, n), oneAtATime)
		require.Equal(t, want, d.digest(), "ours, one at a time: %v", oneAtATime)
		require.Empty(t, Decide(d.state, d.accepted, benchNow).Actions)
		dtCheckLaw(t, d.ClusterDriver)
		require.Equal(t, want, benchDigest(naiveClimb(t, n, oneAtATime).state), "naive, one at a time: %v", oneAtATime)
	}
	require.NotEqual(t, want, floorClimb(t, n+1).digest())
}

// BenchmarkHerd: everybody is refused for ten virtual minutes. An event is a
// refusal. With 1,000 places a call takes a second of virtual time, so that there
// are places for a part of the crowd only.
func BenchmarkHerd(b *testing.B) {
	for _, n := range benchSizes[:len(benchSizes)-1] {
		for _, places := range []int{0, n / 100} {
			name := "free"
			takes := time.Duration(0)
			if places > 0 {
				name, takes = "places", time.Second
			}
			b.Run(fmt.Sprintf("%s/N=%d", name, n), func(b *testing.B) {
				benchSettled = nil
				var used time.Duration
				var refusals uint64
				for b.Loop() {
					h := newBnHerd(b, places, takes, bnShape(1, bnGroup("w", n)))
					h.healsAt = h.start.Add(bnRefusing)
					runtime.GC()
					start := measure.CPUTime()
					h.run(h.healsAt.Add(-1), nil)
					used += measure.CPUTime() - start
					refusals += h.driver.Stats().Folded
					for i, node := range h.nodes["w"] {
						if node.calls == 0 || places == 0 && node.calls != h.callsWithin(bnRefusing) {
							b.Fatalf("w-%d was called %d times", i, node.calls)
						}
					}
					if attempts := h.driver.Stats().Attempts; attempts != uint64(n) {
						b.Fatal(attempts, " attempts")
					}
					if places > 0 && h.longest > h.longestWait(n) {
						b.Fatalf("a slot waited %v", h.longest)
					}
					b.ReportMetric(h.longest.Seconds(), "longest-wait-s")
				}
				b.ReportMetric(float64(used)/float64(refusals), "cpu-ns/event")
				b.ReportMetric(float64(refusals)/float64(b.N*n), "calls/node")
				b.ReportMetric(used.Seconds()*1e3/float64(b.N)/bnRefusing.Seconds(), "cpu-ms/virtual-s")
			})
		}
	}
}
