package idset

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestZeroSetIsEmpty(t *testing.T) {
	var s Set
	for _, id := range []uint64{0, 1, 63, 64, math.MaxUint64} {
		require.False(t, s.Contains(id), "%d", id)
	}
	require.Zero(t, s.Size())
}

func TestBlocksJoinIntoSpans(t *testing.T) {
	var s Set
	addBlock := func(block uint64) {
		for id := block * blockSize; id < (block+1)*blockSize; id++ {
			s.Add(id)
			s.Add(id) // twice is once
		}
	}
	addBlock(5)
	require.Equal(t, []span{{5, 6}}, s.spans)
	addBlock(9)
	require.Equal(t, []span{{5, 6}, {9, 10}}, s.spans, "behind the last")
	addBlock(6)
	require.Equal(t, []span{{5, 7}, {9, 10}}, s.spans, "touches the one before")
	addBlock(8)
	require.Equal(t, []span{{5, 7}, {8, 10}}, s.spans, "touches the one behind")
	addBlock(7)
	require.Equal(t, []span{{5, 10}}, s.spans, "closes a gap")
	addBlock(2)
	require.Equal(t, []span{{2, 3}, {5, 10}}, s.spans, "before the first")
	require.Empty(t, s.masks)
}

// The last block ends at the largest number; nothing may wrap to 0 there.
func TestLargestNumbers(t *testing.T) {
	var s Set
	for i := range uint64(blockSize) {
		id := math.MaxUint64 - i
		require.False(t, s.Contains(id))
		s.Add(id)
		require.True(t, s.Contains(id))
	}
	require.Equal(t, 1, s.Size())
	require.False(t, s.Contains(0))
	require.False(t, s.Contains(math.MaxUint64-blockSize))
}

// A million numbers join, never far out of order, while a thousand never do:
// the cost is that of the thousand.
func TestCostFollowsWhatIsMissing(t *testing.T) {
	const ids, window = 1_000_000, 500
	random := rand.New(rand.NewPCG(1, 2))
	missing := make(map[uint64]bool, 1000)
	for len(missing) < 1000 {
		missing[random.Uint64N(ids)] = true
	}
	var s Set
	var live []uint64
	for id := range uint64(ids) {
		if missing[id] {
			continue
		}
		if live = append(live, id); len(live) == window {
			i := random.IntN(window)
			s.Add(live[i])
			live[i] = live[window-1]
			live = live[:window-1]
		}
		if len(s.masks) > len(missing)+window+1 || len(s.spans) > len(s.masks)+1 {
			t.Fatalf("%d masks and %d spans after %d", len(s.masks), len(s.spans), id)
		}
	}
	for _, id := range live {
		s.Add(id)
	}
	for id := range uint64(ids) {
		if s.Contains(id) == missing[id] {
			t.Fatalf("Contains(%d) is %v", id, !missing[id])
		}
	}
	require.LessOrEqual(t, s.Size(), 2*len(missing)+1)
}

func TestProp_SetAgreesWithMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const blocks = 6
		base := rapid.SampledFrom([]uint64{0, 1 << 20, math.MaxUint64 - blocks*blockSize + 1}).Draw(t, "base")
		var s Set
		naive := make(map[uint64]bool)
		for range rapid.IntRange(0, 40).Draw(t, "runs") {
			from := rapid.Uint64Range(0, blocks*blockSize-1).Draw(t, "from")
			length := rapid.Uint64Range(1, 2*blockSize).Draw(t, "length")
			for off := from; off < min(from+length, blocks*blockSize); off++ {
				s.Add(base + off)
				naive[base+off] = true
			}
			for off := range uint64(blocks * blockSize) {
				if id := base + off; s.Contains(id) != naive[id] {
					t.Fatalf("Contains(%d) is %v", id, !naive[id])
				}
			}
			for i, sp := range s.spans {
				if sp.from >= sp.to || i > 0 && s.spans[i-1].to >= sp.from {
					t.Fatalf("spans touch, overlap or are out of order: %v", s.spans)
				}
			}
			for block, mask := range s.masks {
				if _, in := s.find(block); in || mask == 0 || mask == complete {
					t.Fatalf("block %d has mask %#x", block, mask)
				}
			}
		}
	})
}
