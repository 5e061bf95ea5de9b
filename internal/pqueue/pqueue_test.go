package pqueue

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type item struct {
	key, id int
	place   int32
}

func newQueue() *Queue[*item] {
	return New(func(a, b *item) bool { return a.key < b.key || a.key == b.key && a.id < b.id },
		func(i *item) *int32 { return &i.place })
}

// The queue against a sorted slice, under every operation in any order.
func TestProp_QueueAgreesWithASortedSlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := newQueue()
		items := make([]*item, rapid.IntRange(1, 30).Draw(t, "items"))
		for i := range items {
			items[i] = &item{id: i}
		}
		in := map[int]bool{}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			it := items[rapid.IntRange(0, len(items)-1).Draw(t, "item")]
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0:
				it.key = rapid.IntRange(0, 9).Draw(t, "key")
				q.Put(it)
				in[it.id] = true
			case 1:
				q.Remove(it)
				delete(in, it.id)
			case 2:
				least, ok := q.Min()
				require.Equal(t, len(in) > 0, ok)
				if ok {
					q.Remove(least)
					delete(in, least.id)
				}
			}
			var want []*item
			for _, it := range items {
				require.Equal(t, in[it.id], q.Contains(it))
				if in[it.id] {
					want = append(want, it)
				}
			}
			require.Equal(t, len(want), q.Len())
			slices.SortFunc(want, func(a, b *item) int {
				if a.key != b.key {
					return a.key - b.key
				}
				return a.id - b.id
			})
			if least, ok := q.Min(); ok {
				require.Same(t, want[0], least)
			}
		}
		var drained []int
		for least, ok := q.Min(); ok; least, ok = q.Min() {
			drained = append(drained, least.key)
			q.Remove(least)
		}
		require.True(t, slices.IsSorted(drained))
	})
}

// In a deep queue, too, a removed item leaves its place to one that may belong
// further up or further down.
func TestProp_DeepQueueKeepsTheOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := newQueue()
		items := make([]*item, 1000)
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		for i := range items {
			items[i] = &item{id: i, key: random.IntN(len(items))}
			q.Put(items[i])
		}
		for _, i := range random.Perm(len(items))[:len(items)/2] {
			q.Remove(items[i])
		}
		last, left := 0, 0
		for least, ok := q.Min(); ok; least, ok = q.Min() {
			require.LessOrEqual(t, last, least.key)
			last = least.key
			left++
			q.Remove(least)
		}
		require.Equal(t, len(items)/2, left)
	})
}

func BenchmarkPutAndRemove(b *testing.B) {
	const n = 1 << 16
	q := newQueue()
	items := make([]*item, n)
	for i := range items {
		items[i] = &item{id: i, key: i * 7919 % n}
		q.Put(items[i])
	}
	for i := 0; b.Loop(); i++ {
		it := items[i%n]
		q.Remove(it)
		it.key = (it.key * 31) % n
		q.Put(it)
	}
}
