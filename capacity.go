package provisioning

import (
	"cmp"

	"github.com/swactor/provisioning/internal/pqueue"
)

// This file gives out the places of Config.MaxInFlight.

// placeClass is who comes first when places are short: what costs money and is
// not wanted, then what is paid for and not finished, then what is to be bought.
type placeClass uint8

const (
	cleanupPlace placeClass = iota
	leasedPlace
	createPlace

	placeClasses
)

func (n *node) placeClass() placeClass {
	switch {
	case n.intent == Deleting:
		return cleanupPlace
	case n.lease != "":
		return leasedPlace
	}
	return createPlace
}

// everyNthPlace of those given while somebody is left out goes to whoever has
// been left out longest, so that nobody starves (G10).
const everyNthPlace = 4

// capacity holds the nodes that want to dispatch and have no place. They stay
// in its queues from pass to pass, so that a pass looks at what changed and at
// as many waiting nodes as there are places, never at all of them.
type capacity struct {
	limit int // 0: no cap
	taken int // recorded pending operations that hold a place
	given int // places given while somebody was left out

	byClass [placeClasses]*pqueue.Queue[*node]
	byAge   *pqueue.Queue[*node]
}

func newCapacity(limit int) capacity {
	c := capacity{limit: limit}
	if limit == 0 {
		return c
	}
	bySlot := func(a, b *node) bool { return compareNodes(a, b) < 0 }
	for class := range c.byClass {
		c.byClass[class] = pqueue.New(bySlot, func(n *node) *int32 { return &n.placeInClass })
	}
	c.byAge = pqueue.New(func(a, b *node) bool {
		return cmp.Or(cmp.Compare(a.leftOutSince, b.leftOutSince), cmp.Compare(a.class, b.class), compareNodes(a, b)) < 0
	}, func(n *node) *int32 { return &n.placeInAge })
	return c
}

// want queues a node that wants to dispatch in this pass.
func (c *capacity) want(n *node, pass uint64) {
	since := pass
	if c.byAge.Contains(n) { // left out before, without a break
		since = n.leftOutSince
		c.forget(n)
	}
	n.class, n.leftOutSince = n.placeClass(), since
	c.byClass[n.class].Put(n)
	c.byAge.Put(n)
}

// forget takes a node out that wants nothing any more.
func (c *capacity) forget(n *node) {
	if c.limit == 0 || !c.byAge.Contains(n) {
		return
	}
	c.byClass[n.class].Remove(n)
	c.byAge.Remove(n)
}

// leaveGrowing takes those out that are not being cleaned up, and returns them.
func (c *capacity) leaveGrowing() []*node {
	var left []*node
	for class := leasedPlace; class < placeClasses && c.limit > 0; class++ {
		for c.byClass[class].Len() > 0 {
			n, _ := c.byClass[class].Min()
			c.forget(n)
			left = append(left, n)
		}
	}
	return left
}

// choose gives out the free places.
func (c *capacity) choose() []*node {
	var chosen []*node
	for free := c.limit - c.taken; free > 0 && c.byAge.Len() > 0; free-- {
		var n *node
		if c.byAge.Len() > free {
			c.given++
			if c.given%everyNthPlace == 0 {
				n, _ = c.byAge.Min()
			}
		}
		for class := placeClass(0); n == nil; class++ {
			n, _ = c.byClass[class].Min()
		}
		c.forget(n)
		chosen = append(chosen, n)
	}
	return chosen
}

func (c *capacity) take(n *node) {
	n.holdsPlace = true
	c.taken++
}

func (c *capacity) giveBack(n *node) {
	if n.holdsPlace {
		n.holdsPlace = false
		c.taken--
	}
}
