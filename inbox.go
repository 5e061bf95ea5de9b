package provisioning

// inbox holds what was delivered, in order. It grows by blocks: copying a long
// list to a longer one would be most of what a burst of observations costs.
type inbox struct {
	blocks [][]Observation // all but the last are full
	spare  [][]Observation // empty, to be used again
}

const (
	inboxBlock  = 256
	spareBlocks = 16
)

func (b *inbox) put(o *Observation) {
	last := len(b.blocks) - 1
	if last < 0 || len(b.blocks[last]) == inboxBlock {
		var block []Observation
		if n := len(b.spare); n > 0 {
			block, b.spare = b.spare[n-1], b.spare[:n-1]
		} else {
			block = make([]Observation, 0, inboxBlock)
		}
		b.blocks = append(b.blocks, block)
		last++
	}
	b.blocks[last] = append(b.blocks[last], *o)
}

// empty lets go of what was delivered and keeps a few blocks.
func (b *inbox) empty() {
	for i, block := range b.blocks {
		if len(b.spare) < spareBlocks {
			wipe(block)
			b.spare = append(b.spare, block[:0])
		}
		b.blocks[i] = nil
	}
	b.blocks = cleared(b.blocks)
}

func (b *inbox) len() int {
	n := 0
	for _, block := range b.blocks {
		n += len(block)
	}
	return n
}
