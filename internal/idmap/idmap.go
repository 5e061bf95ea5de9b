// Package idmap is a map from ascending numbers that come and go.
package idmap

const (
	pageBits = 6
	pageSize = 1 << pageBits
)

// Map holds a value for each of a set of numbers. It keeps them in pages of 64
// neighbours, and an empty page goes: where numbers are given out in ascending
// order, most of those that are there have their neighbours there, and a look-up
// is cheaper than in a map of single numbers, by far if the last one was nearby.
//
// The zero Map is empty and ready. A Map is not safe for concurrent use.
type Map[V any] struct {
	pages map[uint64]*page[V]
	last  *page[V] // used last; nil: none
	at    uint64   // and where it is
	size  int
}

type page[V any] struct {
	values [pageSize]V
	taken  uint64 // a bit each
}

// Get returns the value of id, the zero value if there is none.
func (m *Map[V]) Get(id uint64) (value V) {
	if p := m.page(id); p != nil { // a place that is not taken holds the zero value
		value = p.values[id%pageSize]
	}
	return value
}

// Put sets the value of id.
func (m *Map[V]) Put(id uint64, value V) {
	p := m.page(id)
	if p == nil {
		if m.pages == nil {
			m.pages = make(map[uint64]*page[V])
		}
		p = &page[V]{}
		m.pages[id>>pageBits] = p
		m.last, m.at = p, id>>pageBits
	}
	if p.taken&bit(id) == 0 {
		p.taken |= bit(id)
		m.size++
	}
	p.values[id%pageSize] = value
}

// Delete takes id out, if it is there.
func (m *Map[V]) Delete(id uint64) {
	p := m.page(id)
	if p == nil || p.taken&bit(id) == 0 {
		return
	}
	var none V
	p.values[id%pageSize] = none
	p.taken &^= bit(id)
	m.size--
	if p.taken == 0 {
		delete(m.pages, id>>pageBits)
		m.last = nil
	}
}

// Len returns how many numbers have a value.
func (m *Map[V]) Len() int { return m.size }

// Pages returns how many pages there are: what the map costs.
func (m *Map[V]) Pages() int { return len(m.pages) }

func (m *Map[V]) page(id uint64) *page[V] {
	at := id >> pageBits
	if m.last == nil || m.at != at {
		p := m.pages[at]
		if p == nil {
			return nil
		}
		m.last, m.at = p, at
	}
	return m.last
}

func bit(id uint64) uint64 { return 1 << (id % pageSize) }
