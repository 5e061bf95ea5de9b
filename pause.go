package provisioning

import "time"

// This file is what a pause does. Deciding knows nothing of it: like the cap of
// operations in flight it is a filter behind the ladder, which holds back what
// would make the cluster grow.

// pause is what the driver keeps of a pause.
type pause struct {
	asked  bool // for the pass that runs
	halted bool // what the pass goes by: growth is held back

	// What is held back, for the end of the pause. Of a node since when.
	nodes map[*node]instant
	slots map[slot]struct{} // that are to be inserted
}

// Pause stops growth from the next pass on, which it queues: no attempt begins,
// no operation of a node on its way up is dispatched, and no node that is ready
// is taken down because its spec is outdated, since none could follow it.
// Everything else goes on. Operations in flight are not touched; results, reports
// and deadlines are folded; what has failed, was replaced by [ClusterDriver.Replace]
// or is not wished for is cleaned up. A wish that is accepted meanwhile is kept
// for [ClusterDriver.Resume]; what it has no use for goes at once.
//
// A pause ends no attempt: while its next operation is held back, the deadline of
// its stage stands still. A bootstrap that runs is not held back, and neither is
// its deadline. A pass that runs already goes on as it began. Pausing twice is
// pausing once. A pause is no part of the state.
func (d *ClusterDriver) Pause() { d.setPaused(true) }

// Resume ends a pause and queues a pass. Without one it does nothing.
func (d *ClusterDriver) Resume() { d.setPaused(false) }

// Paused reports whether Pause was called, and Resume not since.
func (d *ClusterDriver) Paused() bool {
	d.in.Lock()
	defer d.in.Unlock()
	return d.paused
}

func (d *ClusterDriver) setPaused(paused bool) {
	d.in.Lock()
	if d.paused != paused {
		d.paused, d.triggered = paused, true
		e := Event{Kind: EventResumed, At: d.clock.tick.time()}
		if paused {
			e.Kind = EventPaused
		}
		d.events.add(e)
	}
	d.in.Unlock()
	d.events.handOut()
}

// grows reports whether a pause holds the action back.
func (d decision) grows(n *node, want *template) bool {
	if d.fault != nil {
		return false
	}
	switch d.action {
	case Insert, Restart:
		return true
	case Dispatch:
		return n.intent == Active
	case BeginDelete: // ready, so it has not failed; wanted, so it is outdated
		return n.ready && want != nil
	}
	return false
}

// takePause begins or ends a pause with the pass. It costs what is held back.
func (d *ClusterDriver) takePause(at instant) {
	if d.pause.halted == d.pause.asked {
		return
	}
	d.pause.halted = d.pause.asked
	if d.pause.halted {
		for _, n := range d.capacity.leaveGrowing() {
			d.heat(n)
		}
		return
	}
	for n := range d.pause.nodes { // in any order: what is hot is sorted
		d.letGo(n, at)
		d.heat(n)
	}
	for s := range d.pause.slots {
		d.missing = append(d.missing, s)
	}
	d.pause.nodes, d.pause.slots = nil, nil
}

// holdBack keeps a node for the end of the pause.
func (d *ClusterDriver) holdBack(n *node, at instant) {
	if _, held := d.pause.nodes[n]; held {
		return
	}
	if d.pause.nodes == nil {
		d.pause.nodes = make(map[*node]instant)
	}
	d.pause.nodes[n] = at
}

// holdBackSlot keeps a slot that has no node yet.
func (d *ClusterDriver) holdBackSlot(s slot) {
	if d.pause.slots == nil {
		d.pause.slots = make(map[slot]struct{})
	}
	d.pause.slots[s] = struct{}{}
}

// forget lets go of a slot that was to be inserted and is not wished for any
// more.
func (p *pause) forget(s slot) { delete(p.slots, s) }

// letGo ends the wait of a node that was held back. Its stage has the time that
// it had left: what is in flight sets no deadline while a node is held back, for
// then nothing is.
func (d *ClusterDriver) letGo(n *node, at instant) {
	if _, held := d.pause.nodes[n]; !held {
		return
	}
	if ends := d.endOfStage(n, at); ends != n.stageDeadline {
		d.outline(n)
		n.stageDeadline = ends
	}
	delete(d.pause.nodes, n)
}

// isHeld reports whether the last pass has held the node back.
func (d *ClusterDriver) isHeld(n *node) bool {
	_, held := d.pause.nodes[n]
	return held
}

// endOfStage is the stage deadline of a node; of one that is held back it is
// where that would be if it were let go now.
func (d *ClusterDriver) endOfStage(n *node, at instant) instant {
	since, held := d.pause.nodes[n]
	if !held || n.stageDeadline == 0 {
		return n.stageDeadline
	}
	return n.stageDeadline.plus(time.Duration(at - since))
}

// wakeWhileHeld is the only moment that matters to a node that is held back: the
// deadline of a convergence call that the hand-off has overtaken.
func (n *node) wakeWhileHeld(at instant) instant {
	if n.pendingDeadline.ahead(at) {
		return n.pendingDeadline
	}
	return 0
}
