package provisioning

import (
	"slices"
	"sync"
)

// census takes a snapshot of a state while passes go on. It copies the nodes a
// stretch at a time and lets go of the lock in between; a node that is about to
// change before its turn is copied first. So the snapshot shows one moment, that
// of its beginning, and no event waits for longer than a stretch.
//
// All but turn is guarded by the driver's world lock.
type census struct {
	turn   sync.Mutex // one at a time
	number uint32     // of the census; a node that bears it is counted
	taking bool
	saved  []*node // copies of nodes that changed before their turn

	stretch int // how many nodes are copied before the lock is let go
}

const censusStretch = 2048

// keep copies a node that is about to change and has not been counted. The
// caller holds the world lock.
func (c *census) keep(n *node) {
	if c.taking && n.marks.census != c.number {
		n.marks.census = c.number
		c.saved = append(c.saved, c.copy(n))
	}
}

// copy keeps the group, for the taker to find its own one by.
func (c *census) copy(n *node) *node {
	m := n.clone()
	m.group = n.group
	return m
}

// take returns a copy of the driver's state as it is now.
func (c *census) take(d *ClusterDriver) *ClusterState {
	c.turn.Lock()
	defer c.turn.Unlock()
	count := c.begin(d)
	for count.next(d) {
	}
	return c.finish(d, count)
}

// count is how far a census has come.
type count struct {
	state  *ClusterState
	groups []*nodeGroup // of the driver, when the census began
	from   int          // in the first of them
	copies []*node      // of the stretch
}

func (c *census) begin(d *ClusterDriver) *count {
	d.world.Lock()
	c.number++
	c.taking = true
	s := &count{groups: slices.Clone(d.state.groups), copies: make([]*node, 0, min(c.stretch, d.state.Len())), state: &ClusterState{
		ObservedGeneration: d.state.ObservedGeneration, NextAttemptID: d.state.NextAttemptID}}
	d.world.Unlock()
	s.state.addGroups(idsOf(s.groups))
	return s
}

// next copies a stretch and reports whether there was one.
func (s *count) next(d *ClusterDriver) bool {
	if len(s.groups) == 0 {
		return false
	}
	s.copies = s.copies[:0]
	d.world.Lock()
	c, g := &d.census, s.groups[0]
	to := min(s.from+c.stretch, len(g.nodes))
	for index := s.from; index < to; index++ {
		if n := g.nodes[index]; n != nil && n.marks.census != c.number {
			n.marks.census = c.number
			s.copies = append(s.copies, c.copy(n))
		}
	}
	s.from += c.stretch
	if s.from >= len(g.nodes) {
		s.groups, s.from = s.groups[1:], 0
	}
	d.world.Unlock()
	for _, n := range s.copies {
		s.state.add(s.state.byID[g.id], n)
	}
	return true
}

func (c *census) finish(d *ClusterDriver, s *count) *ClusterState {
	d.world.Lock()
	saved := c.saved
	c.taking, c.saved = false, nil
	d.world.Unlock()
	for _, n := range saved {
		s.state.add(s.state.byID[n.group.id], n)
	}
	return s.state
}
