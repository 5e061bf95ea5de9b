//go:build unix

package provisioning

import (
	"testing"

	"github.com/swactor/provisioning/internal/bench/measure"
)

// floorDriver is the floor: what an incremental loop over text ids must cost
// that keeps the same facts and does nothing else. It folds an event at once,
// so that it has no batches either: nothing is cheaper.
type floorDriver struct {
	nodes   map[string]*floorNode
	effects benchQueue[floorEffect]
	ready   int
}

type floorNode struct {
	id, lease, host, session, agent string
	stage                           floorStage
	attempt, sequence               uint64
	deadline                        int64
	ready                           bool
}

type floorStage uint8

const (
	floorRequested floorStage = iota
	floorLeased
	floorBootstrapping
	floorJoined
	floorReady
	floorDeleting
)

type floorKind uint8

const (
	floorCreate floorKind = iota
	floorStart
	floorConverge
	floorDestroy
	floorJoin
	floorClose
)

type floorEvent struct {
	node                        string
	attempt, sequence           uint64
	lease, host, session, agent string
	kind                        floorKind
}

type floorEffect struct {
	node              string
	attempt, sequence uint64
	kind              floorKind
}

func (d *floorDriver) emit(f *floorNode, kind floorKind) {
	f.sequence++
	f.deadline = 120
	d.effects.put(floorEffect{f.id, f.attempt, f.sequence, kind})
}

func (d *floorDriver) fold(e *floorEvent) {
	f := d.nodes[e.node]
	if f == nil || f.attempt != e.attempt {
		return
	}
	answers := e.sequence == f.sequence
	switch {
	case e.kind == floorCreate && f.stage == floorRequested && answers:
		f.stage, f.lease, f.host = floorLeased, e.lease, e.host
		d.emit(f, floorStart)
	case e.kind == floorStart && f.stage == floorLeased && answers:
		f.stage, f.session = floorBootstrapping, e.session
	case e.kind == floorJoin && f.stage == floorBootstrapping && e.session == f.session:
		f.stage, f.agent = floorJoined, e.agent
		d.emit(f, floorConverge)
	case e.kind == floorConverge && f.stage == floorJoined && answers:
		f.stage, f.session, f.ready = floorReady, "", true
		d.ready++
	case e.kind == floorDestroy && f.stage == floorDeleting && answers:
		delete(d.nodes, e.node)
	}
}

// answer takes the next effect to the provider and folds what it says.
func (d *floorDriver) answer(e *floorEffect) {
	done := floorEvent{node: e.node, attempt: e.attempt, sequence: e.sequence, kind: e.kind}
	switch e.kind {
	case floorCreate:
		done.lease, done.host = "lease-"+e.node, "host-"+e.node
	case floorStart:
		done.session = "session-" + e.node
	}
	stream := floorEvent{node: e.node, attempt: e.attempt}
	switch e.kind {
	case floorStart:
		stream.session, stream.agent, stream.kind = "session-"+e.node, "agent-"+e.node, floorJoin
	case floorConverge:
		stream.session, stream.kind = "session-"+e.node, floorClose
	}
	d.fold(&done)
	if stream.session != "" {
		d.fold(&stream)
	}
}

func (d *floorDriver) run() {
	for e := d.effects.take(); e != nil; e = d.effects.take() {
		d.answer(e)
	}
}

func floorClimb(tb testing.TB, n int) *floorDriver {
	d := &floorDriver{nodes: make(map[string]*floorNode)}
	for i := range n {
		f := &floorNode{id: string(NewLogicalNodeID("w", i)), attempt: uint64(i + 1)}
		d.nodes[f.id] = f
		d.emit(f, floorCreate)
	}
	d.run()
	if d.ready != n {
		tb.Fatal("not converged")
	}
	return d
}

// toZero ends all n nodes.
func (d *floorDriver) toZero(tb testing.TB, n int) {
	for i := range n {
		f := d.nodes[string(NewLogicalNodeID("w", i))]
		f.stage, f.ready = floorDeleting, false
		d.ready--
		d.emit(f, floorDestroy)
	}
	d.run()
	if len(d.nodes) > 0 || d.ready != 0 {
		tb.Fatal("not gone")
	}
}

func (d *floorDriver) digest() uint32 {
	digest := measure.NewDigest()
	for i := range len(d.nodes) {
		f := d.nodes[string(NewLogicalNodeID("w", i))]
		digest.Add(measure.Node{ID: f.id, Lease: f.lease, Host: f.host, Agent: f.agent, Attempt: f.attempt, Operations: f.sequence, Ready: f.ready})
	}
	return digest.Sum()
}
