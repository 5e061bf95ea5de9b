//go:build unix && peers

package controller

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/swactor/provisioning/internal/bench/measure"
)

var sizes = []int{1_000, 10_000, 100_000}

const eventsPerNode = 5

type operation uint8

const (
	none operation = iota
	create
	start
	converge
)

// node is what the store keeps of a node, the same facts as all subjects keep.
type node struct {
	id, lease, host, session, agent string
	attempt, sequence               uint64
	pending                         operation
	started, converged, ready       bool
}

type effect struct {
	request  reconcile.Request
	kind     operation
	sequence uint64
}

// cluster is a controller with its objects in memory, and their provider, which
// answers from a goroutine of its own as a watch does.
type cluster struct {
	mu      sync.Mutex
	nodes   map[types.NamespacedName]*node
	effects []effect
	ready   int
	events  int

	// One event at a time: the next comes when this one has been reconciled.
	oneAtATime bool
	awaited    reconcile.Request
	reconciled chan struct{}

	asked  chan struct{} // holds a value while there may be effects
	queue  workqueue.TypedRateLimitingInterface[reconcile.Request]
	finish chan struct{} // closed when all nodes are ready and no event is to come
}

// Reconcile takes the next step of one node.
func (c *cluster) Reconcile(_ context.Context, r reconcile.Request) (reconcile.Result, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodes[r.NamespacedName]
	switch {
	case n.pending != none || n.ready:
	case n.lease == "":
		c.emit(r, n, create)
	case !n.started:
		c.emit(r, n, start)
	case n.agent != "" && !n.converged:
		c.emit(r, n, converge)
	case n.converged:
		n.ready, n.session = true, ""
		c.ready++
		c.mayFinish()
	}
	if c.oneAtATime && r == c.awaited {
		c.awaited = reconcile.Request{}
		c.reconciled <- struct{}{} // has room: nobody else is awaited
	}
	return reconcile.Result{}, nil
}

func (c *cluster) emit(r reconcile.Request, n *node, kind operation) {
	n.sequence++
	n.pending = kind
	c.effects = append(c.effects, effect{r, kind, n.sequence})
	select {
	case c.asked <- struct{}{}:
	default:
	}
}

func (c *cluster) mayFinish() {
	if c.ready == len(c.nodes) && c.events == eventsPerNode*len(c.nodes) {
		close(c.finish)
	}
}

// provide answers effects until the climb is over.
func (c *cluster) provide() {
	for {
		select {
		case <-c.asked:
		case <-c.finish:
			return
		}
		c.mu.Lock()
		batch := c.effects
		c.effects = nil
		c.mu.Unlock()
		for _, e := range batch {
			id := e.request.Name
			switch e.kind {
			case create:
				c.event(e, func(n *node) { n.lease, n.host = "lease-"+id, "host-"+id })
			case start:
				c.event(e, func(n *node) { n.started, n.session = true, "session-"+id })
				session := "session-" + id
				c.event(effect{request: e.request}, func(n *node) {
					if n.session == session {
						n.agent = "agent-" + id
					}
				})
			case converge:
				c.event(e, func(n *node) { n.converged = true })
				c.event(effect{request: e.request}, func(*node) {}) // the close: nothing comes of it
			}
		}
	}
}

// event writes what was seen of a node, and has it reconciled.
func (c *cluster) event(e effect, see func(*node)) {
	c.mu.Lock()
	n := c.nodes[e.request.NamespacedName]
	if e.kind == none || n.pending == e.kind && n.sequence == e.sequence {
		if e.kind != none {
			n.pending = none
		}
		see(n)
	}
	c.events++
	c.mayFinish()
	if c.oneAtATime {
		c.awaited = e.request
	}
	c.mu.Unlock()
	c.queue.Add(e.request)
	if c.oneAtATime {
		<-c.reconciled
	}
}

// queues are the two that controller-runtime has. Without a name they have no
// metrics.
var queues = []struct {
	name string
	make func(string, workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request]
}{
	{"workqueue", func(_ string, limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
		return workqueue.NewTypedRateLimitingQueue(limiter)
	}},
	{"priority", func(_ string, limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
		return priorityqueue.New("", func(o *priorityqueue.Opts[reconcile.Request]) { o.RateLimiter = limiter })
	}},
}

// climb brings n nodes up, through the queue at that place in queues.
func climb(tb testing.TB, n, queue int, oneAtATime bool) *cluster {
	c := &cluster{nodes: make(map[types.NamespacedName]*node), asked: make(chan struct{}, 1), finish: make(chan struct{}),
		oneAtATime: oneAtATime, reconciled: make(chan struct{}, 1)}
	skip := true
	ctl, err := controller.NewTypedUnmanaged("climb", controller.TypedOptions[reconcile.Request]{
		Reconciler: c, NewQueue: queues[queue].make, SkipNameValidation: &skip, Logger: logr.Discard(),
	})
	if err != nil {
		tb.Fatal(err)
	}
	err = ctl.Watch(source.TypedFunc[reconcile.Request](func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.queue = q
		for i := range n {
			name := types.NamespacedName{Name: fmt.Sprintf("w-%d", i)}
			c.nodes[name] = &node{id: name.Name, attempt: uint64(i + 1)}
			q.Add(reconcile.Request{NamespacedName: name})
		}
		go c.provide()
		return nil
	}))
	if err != nil {
		tb.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- ctl.Start(ctx) }()
	select {
	case <-c.finish:
		stop()
		err = <-ended
	case err = <-ended: // it could not start
		stop()
	}
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

func (c *cluster) digest() uint32 {
	digest := measure.NewDigest()
	for i := range len(c.nodes) {
		n := c.nodes[types.NamespacedName{Name: fmt.Sprintf("w-%d", i)}]
		digest.Add(measure.Node{ID: n.id, Lease: n.lease, Host: n.host, Agent: n.agent, Attempt: n.attempt, Operations: n.sequence, Ready: n.ready})
	}
	return digest.Sum()
}

// BenchmarkControllerRuntime climbs with the same events and to the same digest
// as the library's own subjects: one event at a time, as its
// BenchmarkEventOneAtATime does, or as they come, when the queue makes one
// reconcile of the events of a node that have gathered, as its
// BenchmarkConvergeBatched does.
func BenchmarkControllerRuntime(b *testing.B) {
	for queue := range queues {
		for _, oneAtATime := range []bool{true, false} {
			pace := "as-they-come"
			if oneAtATime {
				pace = "one-at-a-time"
			}
			b.Run(queues[queue].name+"-"+pace, func(b *testing.B) {
				for _, n := range sizes {
					b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
						var c *cluster
						runtime.GC()
						b.ResetTimer()
						start := measure.CPUTime()
						for range b.N {
							c = climb(b, n, queue, oneAtATime)
						}
						b.ReportMetric(float64(measure.CPUTime()-start)/float64(b.N*n*eventsPerNode), "cpu-ns/event")
						b.StopTimer()
						b.ReportMetric(float64(c.digest()), "digest")
					})
				}
			})
		}
	}
}

// TestClimb: both queues bring all nodes up, to what a node has come to when it
// has climbed.
func TestClimb(t *testing.T) {
	const n = 50
	want := measure.NewDigest()
	for i := range n {
		id := fmt.Sprintf("w-%d", i)
		want.Add(measure.Node{ID: id, Lease: "lease-" + id, Host: "host-" + id, Agent: "agent-" + id, Attempt: uint64(i + 1), Operations: 3, Ready: true})
	}
	for queue := range queues {
		for _, oneAtATime := range []bool{true, false} {
			if c := climb(t, n, queue, oneAtATime); c.digest() != want.Sum() {
				t.Errorf("%s, one at a time: %v: digest %d, not %d", queues[queue].name, oneAtATime, c.digest(), want.Sum())
			}
		}
	}
}
