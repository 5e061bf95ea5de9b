// Package pqueue is an indexed priority queue: the least item comes first, and
// an item that is in the queue can be moved or removed where it stands.
package pqueue

// Queue is a 4-ary heap: flatter than a binary one, and four siblings share a
// cache line. The zero Queue is not ready for use; see New.
type Queue[T any] struct {
	items []T
	less  func(a, b T) bool
	place func(T) *int32
}

// New returns an empty queue ordered by less. place returns where an item keeps
// its place in this queue: 0 while it is not in it. Nobody else writes there.
func New[T any](less func(a, b T) bool, place func(T) *int32) *Queue[T] {
	return &Queue[T]{less: less, place: place}
}

// Len returns the number of items.
func (q *Queue[T]) Len() int { return len(q.items) }

// Contains reports whether the item is in the queue.
func (q *Queue[T]) Contains(item T) bool { return *q.place(item) != 0 }

// Min returns the least item, false if the queue is empty.
func (q *Queue[T]) Min() (T, bool) {
	if len(q.items) == 0 {
		var none T
		return none, false
	}
	return q.items[0], true
}

// Put inserts the item, or restores its place after its order has changed.
func (q *Queue[T]) Put(item T) {
	at := int(*q.place(item)) - 1
	if at < 0 {
		at = len(q.items)
		q.items = append(q.items, item)
		*q.place(item) = int32(at + 1)
	}
	q.down(q.up(at))
}

// Remove takes the item out; it does nothing if the item is not in.
func (q *Queue[T]) Remove(item T) {
	at := int(*q.place(item)) - 1
	if at < 0 {
		return
	}
	*q.place(item) = 0
	last := len(q.items) - 1
	moved := q.items[last]
	var none T
	q.items[last] = none
	q.items = q.items[:last]
	if at < last {
		q.set(at, moved)
		q.down(q.up(at))
	}
}

func (q *Queue[T]) set(at int, item T) {
	q.items[at] = item
	*q.place(item) = int32(at + 1)
}

func (q *Queue[T]) up(at int) int {
	item := q.items[at]
	for at > 0 {
		parent := (at - 1) / 4
		if !q.less(item, q.items[parent]) {
			break
		}
		q.set(at, q.items[parent])
		at = parent
	}
	q.set(at, item)
	return at
}

func (q *Queue[T]) down(at int) {
	item := q.items[at]
	for {
		first := 4*at + 1
		if first >= len(q.items) {
			break
		}
		least := first
		for child := first + 1; child < min(first+4, len(q.items)); child++ {
			if q.less(q.items[child], q.items[least]) {
				least = child
			}
		}
		if !q.less(q.items[least], item) {
			break
		}
		q.set(at, q.items[least])
		at = least
	}
	q.set(at, item)
}
