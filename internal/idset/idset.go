// Package idset remembers which of many ascending numbers are over, in memory
// that grows with the numbers still missing and not with those it holds.
package idset

import (
	"slices"
	"sort"
)

const (
	blockBits = 6
	blockSize = 1 << blockBits // as many members as a mask has bits
	complete  = ^uint64(0)
)

// Set is a set of numbers. They are counted in blocks of 64: a complete block
// is part of a span, any other is a mask of its members. Where numbers join
// roughly in ascending order and all join in the end, a Set holds at most one
// mask for each number that is missing so far, one for the newest numbers, and
// one span more than it holds masks.
//
// The zero Set is empty and ready. A Set is not safe for concurrent use.
type Set struct {
	spans []span            // ascending, never touching
	masks map[uint64]uint64 // by block; none is empty or complete
}

// span is the complete blocks from ≤ block < to.
type span struct{ from, to uint64 }

// Add makes id a member.
func (s *Set) Add(id uint64) {
	block := id >> blockBits
	at, in := s.find(block)
	if in {
		return
	}
	mask := s.masks[block] | bit(id)
	if mask != complete {
		if s.masks == nil {
			s.masks = make(map[uint64]uint64)
		}
		s.masks[block] = mask
		return
	}
	delete(s.masks, block)
	s.insert(at, block)
}

// Contains reports whether id is a member.
func (s *Set) Contains(id uint64) bool {
	block := id >> blockBits
	if s.masks[block]&bit(id) != 0 {
		return true
	}
	_, in := s.find(block)
	return in
}

// Size returns how many masks and spans the set is made of: what it costs,
// not how many members it has.
func (s *Set) Size() int { return len(s.spans) + len(s.masks) }

func bit(id uint64) uint64 { return 1 << (id % blockSize) }

// find returns the first span that ends behind block, and whether block is in
// it.
func (s *Set) find(block uint64) (at int, in bool) {
	at = sort.Search(len(s.spans), func(i int) bool { return s.spans[i].to > block })
	return at, at < len(s.spans) && s.spans[at].from <= block
}

// insert puts a block before spans[at], which it may touch, as it may touch
// the span before.
func (s *Set) insert(at int, block uint64) {
	left := at > 0 && s.spans[at-1].to == block
	right := at < len(s.spans) && s.spans[at].from == block+1
	switch {
	case left && right:
		s.spans[at-1].to = s.spans[at].to
		s.spans = slices.Delete(s.spans, at, at+1)
	case left:
		s.spans[at-1].to = block + 1
	case right:
		s.spans[at].from = block
	default:
		s.spans = slices.Insert(s.spans, at, span{from: block, to: block + 1})
	}
}
