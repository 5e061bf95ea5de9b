package provisioning

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestInboxKeepsOrderOverBlocks(t *testing.T) {
	var b inbox
	for round := range 3 {
		for i := range uint64(3*inboxBlock + round) {
			b.put(&Observation{StdoutSequence: i})
		}
		require.Equal(t, 3*inboxBlock+round, b.len())
		next := uint64(0)
		for _, block := range b.blocks {
			require.NotEmpty(t, block)
			for _, o := range block {
				require.Equal(t, next, o.StdoutSequence)
				next++
			}
		}
		b.empty()
		require.Zero(t, b.len())
		require.LessOrEqual(t, len(b.spare), spareBlocks)
	}
	for range (spareBlocks + 5) * inboxBlock {
		b.put(&Observation{Reason: "text"})
	}
	b.empty()
	require.Len(t, b.blocks, 1)
	require.LessOrEqual(t, cap(b.blocks[0]), inboxBlock)
	require.Len(t, b.spare, spareBlocks, "a burst leaves no more than that behind")
	for _, block := range b.spare {
		for _, o := range block[handful:cap(block)] {
			require.Zero(t, o)
		}
	}
}

// Two inboxes that take turns make do with the blocks of one.
func TestInboxesShareTheirBlocks(t *testing.T) {
	in, folding := &inbox{}, &inbox{}
	fill := func() {
		for range 5 * inboxBlock {
			in.put(&Observation{})
		}
	}
	turn := func() {
		in, folding = folding, in
		folding.empty()
		in.borrow(folding)
	}
	for range 3 { // then either has its first block
		fill()
		turn()
	}
	fill()
	all := func() int { return len(in.blocks) + len(in.spare) + len(folding.blocks) + len(folding.spare) }
	blocks := all()
	for range 3 {
		turn()
		require.Len(t, in.spare, blocks-2)
		require.Empty(t, folding.spare)
		fill()
		require.Equal(t, blocks, all(), "none is new")
	}
}
