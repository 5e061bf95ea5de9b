//go:build unix

package provisioning

import (
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The benchmarks measure CPU time (user and system) of this process and report
// it per event, because the machines they run on are shared. An event is one
// delivered result or observation. A node climbs with five: its lease with the
// endpoint, the start of its bootstrap, the join, the accepted convergence, and
// the close of the session, which comes too late to matter.
//
// Every subject gets the same events with the same facts, and its strings are
// built inside the measured region. At the end every node must be ready.

const benchEvents = 5

var benchNow = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

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
		block := make([]T, 0, 256)
		if n := len(q.spare); n > 0 {
			block, q.spare = q.spare[n-1], q.spare[:n-1]
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

// benchExecutor collects effects; the benchmark answers them.
type benchExecutor struct{ effects benchQueue[Effect] }

func (x *benchExecutor) Submit(e Effect) (bool, error) {
	x.effects.put(e)
	return false, nil
}
func (x *benchExecutor) Expire(OperationID) Completion { panic("nothing expires") }
func (x *benchExecutor) Retire(NodeAttemptID)          {}
func (x *benchExecutor) Running() []RunningCall        { return nil }

// benchAnswer is what the provider says to an effect: one observation or, for a
// start and a convergence, two.
func benchAnswer(e *Effect, deliver func(Observation)) {
	node, attempt := e.Key.Node, e.Operation.Attempt
	done := Completion{Operation: e.Operation, Kind: e.Kind}
	switch e.Kind {
	case CreateLease:
		done.Lease = ProviderLeaseID("lease-" + string(node))
		done.Endpoint = &SSHEndpoint{Host: "host-" + string(node), Port: 22}
	case StartBootstrap:
		done.Session = BootstrapSessionID("session-" + string(node))
	}
	deliver(Observation{Kind: OperationCompleted, Node: node, Attempt: attempt, Completion: done})
	session := BootstrapSessionID("session-" + string(node))
	switch e.Kind {
	case StartBootstrap:
		deliver(Observation{Kind: SwactorJoined, Node: node, Attempt: attempt, Session: session, Swactor: SwactorID("agent-" + string(node))})
	case BootstrapConvergenceObserved:
		deliver(Observation{Kind: BootstrapClosed, Node: node, Attempt: attempt, Session: session})
	}
}

func climb(b *testing.B, n int, oneAtATime bool) *ClusterDriver {
	return climbTo(b, benchShape(1, n), oneAtATime)
}

func climbTo(b *testing.B, shape ClusterShape, oneAtATime bool) *ClusterDriver {
	d, err := NewClusterDriver(shape, Config{})
	require.NoError(b, err)
	x := &benchExecutor{}
	drive := func() {
		if _, err := d.DriveUntilBlocked(benchNow, x); err != nil {
			b.Fatal(err)
		}
	}
	drive()
	for batch := x.effects.len(); batch > 0; batch = x.effects.len() {
		for range batch {
			benchAnswer(x.effects.take(), func(o Observation) {
				d.Deliver(o)
				if oneAtATime {
					drive()
				}
			})
		}
		drive()
	}
	if !d.Converged(1) {
		b.Fatal("not converged")
	}
	x.effects = benchQueue[Effect]{} // the driver knows its executor
	return d
}

var benchSizes = []int{1_000, 10_000, 100_000, 1_000_000}

func benchClimb(b *testing.B, run func(b *testing.B, n int)) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			runtime.GC()
			b.ResetTimer()
			start := cpuTime()
			for range b.N {
				run(b, n)
			}
			b.ReportMetric(float64(cpuTime()-start)/float64(b.N*n*benchEvents), "cpu-ns/event")
		})
	}
}

func BenchmarkEventOneAtATime(b *testing.B) {
	b.Run("floor", func(b *testing.B) { benchClimb(b, floorClimb) })
	b.Run("ours", func(b *testing.B) {
		benchClimb(b, func(b *testing.B, n int) { climb(b, n, true) })
	})
}

func BenchmarkConvergeBatched(b *testing.B) {
	b.Run("ours", func(b *testing.B) {
		benchClimb(b, func(b *testing.B, n int) { climb(b, n, false) })
	})
}

func BenchmarkSettledFullPass(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			d := climb(b, n, false)
			state, desired := d.state, d.accepted
			b.ReportAllocs()
			start := cpuTime()
			for b.Loop() {
				if plan := Decide(state, desired, benchNow); len(plan.Actions) != 0 {
					b.Fatal(plan)
				}
			}
			b.ReportMetric(float64(cpuTime()-start)/float64(b.N*n), "cpu-ns/node")
		})
	}
}

func BenchmarkSettledDrive(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			d, x := climb(b, n, false), &benchExecutor{}
			b.ReportAllocs()
			for b.Loop() {
				d.Trigger()
				if _, err := d.DriveNext(benchNow, x); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// The floor: what an incremental loop over text ids must cost that keeps the
// same facts and does nothing else.
type floorNode struct {
	id, lease, host, session, agent string
	stage                           uint8
	attempt, sequence               uint64
	deadline                        int64
	ready                           bool
}

type floorEvent struct {
	node                    string
	attempt, sequence       uint64
	lease, host, session, a string
	kind                    uint8
}

type floorEffect struct {
	node              string
	attempt, sequence uint64
	kind              uint8
}

func floorClimb(b *testing.B, n int) {
	nodes := make(map[string]*floorNode)
	var effects benchQueue[floorEffect]
	ready := 0
	emit := func(f *floorNode, kind uint8) {
		f.sequence++
		f.deadline = 120
		effects.put(floorEffect{f.id, f.attempt, f.sequence, kind})
	}
	fold := func(e *floorEvent) {
		f := nodes[e.node]
		if f == nil || f.attempt != e.attempt {
			return
		}
		switch {
		case e.kind == 0 && f.stage == 0 && e.sequence == f.sequence:
			f.stage, f.lease, f.host = 1, e.lease, e.host
			emit(f, 1)
		case e.kind == 1 && f.stage == 1 && e.sequence == f.sequence:
			f.stage, f.session = 2, e.session
		case e.kind == 2 && f.stage == 2 && e.session == f.session:
			f.stage, f.agent = 3, e.a
			emit(f, 2)
		case e.kind == 3 && f.stage == 3 && e.sequence == f.sequence:
			f.stage, f.session, f.ready = 4, "", true
			ready++
		}
	}
	for i := range n {
		f := &floorNode{id: string(NewLogicalNodeID("w", i)), attempt: uint64(i + 1)}
		nodes[f.id] = f
		emit(f, 0)
	}
	for batch := effects.len(); batch > 0; batch = effects.len() {
		for range batch {
			e := effects.take()
			event := floorEvent{node: e.node, attempt: e.attempt, sequence: e.sequence, session: "session-" + e.node}
			switch e.kind {
			case 0:
				event.lease, event.host = "lease-"+e.node, "host-"+e.node
				fold(&event)
			case 1:
				event.kind = 1
				fold(&event)
				joined := floorEvent{node: e.node, attempt: e.attempt, session: "session-" + e.node, a: "agent-" + e.node, kind: 2}
				fold(&joined)
			case 2:
				event.kind = 3
				fold(&event)
				closed := floorEvent{node: e.node, attempt: e.attempt, session: "session-" + e.node, kind: 4}
				fold(&closed)
			}
		}
	}
	if ready != n {
		b.Fatal("not converged")
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

func BenchmarkBytesPerNode(b *testing.B) {
	for name, shape := range map[string]func(uint64, int) ClusterShape{"small": benchShape, "rich": richShape} {
		for _, n := range benchSizes[2:] {
			b.Run(fmt.Sprintf("%s/N=%d", name, n), func(b *testing.B) {
				for b.Loop() {
					before := liveHeap()
					d := climbTo(b, shape(1, n), false)
					b.ReportMetric(float64(liveHeap()-before)/float64(n), "B/node")
					runtime.KeepAlive(d)
				}
			})
		}
	}
}

func liveHeap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
