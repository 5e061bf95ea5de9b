package provisioning

// inbox holds what was delivered, in order. It grows by blocks: copying a long
// list to a longer one would be most of what a burst of observations costs.
type inbox struct {
	blocks [][]Observation // all but the last are full
	spare  [][]Observation // empty, to be used again
}

// A block is larger than the one before it, up to the largest.
const (
	firstBlock  = 16
	inboxBlock  = 256
	spareBlocks = 16
)

func (b *inbox) put(o *Observation) {
	last := len(b.blocks) - 1
	if last < 0 || len(b.blocks[last]) == cap(b.blocks[last]) {
		b.blocks = append(b.blocks, b.block())
		last++
	}
	b.blocks[last] = append(b.blocks[last], *o)
}

func (b *inbox) block() (block []Observation) {
	if n := len(b.spare); n > 0 {
		block, b.spare = b.spare[n-1], b.spare[:n-1]
		return block
	}
	size := firstBlock
	if n := len(b.blocks); n > 0 {
		size = min(2*cap(b.blocks[n-1]), inboxBlock)
	}
	return make([]Observation, 0, size)
}

// release lets go of a block, and keeps it if few are kept. The first one stays
// where it is: a pass that folds one observation moves no block.
func (b *inbox) release(i int) {
	block := b.blocks[i]
	if i == 0 {
		wipe(block)
		b.blocks[0] = block[:0]
		return
	}
	b.blocks[i] = nil
	if len(b.spare) < spareBlocks {
		wipe(block)
		b.spare = append(b.spare, block[:0])
	}
}

// pourInto moves what was delivered to the end of another inbox.
func (b *inbox) pourInto(other *inbox) {
	for _, block := range b.blocks {
		for i := range block {
			other.put(&block[i])
		}
	}
	b.empty()
}

// borrow takes over the spare blocks of an inbox that is folded, if they are
// more: without it either of the two would have as many.
func (b *inbox) borrow(folded *inbox) {
	if len(folded.spare) > len(b.spare)+1 {
		b.spare, folded.spare = folded.spare, b.spare
	}
}

// empty lets go of what was delivered.
func (b *inbox) empty() {
	for i, block := range b.blocks {
		if block != nil {
			b.release(i)
		}
	}
	if cap(b.blocks) > maxSpare {
		b.blocks = nil
	}
	b.blocks = b.blocks[:min(len(b.blocks), 1)]
}

func (b *inbox) len() int {
	n := 0
	for _, block := range b.blocks {
		n += len(block)
	}
	return n
}
