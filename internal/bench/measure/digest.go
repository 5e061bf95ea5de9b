// Package measure is what the benchmarks of this module and of its peers share:
// the CPU time and memory of the process, and a digest of what a subject has
// come to.
package measure

import (
	"encoding/binary"
	"hash"
	"hash/fnv"
)

// Node is what a subject knows about a node that has climbed.
type Node struct {
	ID, Lease, Host, Agent string
	Attempt                uint64
	Operations             uint64 // dispatched in this attempt
	Ready                  bool
}

// Digest is over the nodes of a subject in the order of their indices. Subjects
// that were given the same events have the same digest, or the fastest would be
// the one that does less.
type Digest struct{ hash hash.Hash32 }

// NewDigest returns the digest of no nodes.
func NewDigest() Digest { return Digest{fnv.New32a()} }

// Add takes the next node. Texts carry their lengths, so that no two lists of
// nodes run together.
func (d Digest) Add(n Node) {
	var b []byte
	for _, text := range []string{n.ID, n.Lease, n.Host, n.Agent} {
		b = binary.AppendUvarint(b, uint64(len(text)))
		b = append(b, text...)
	}
	b = binary.AppendUvarint(b, n.Attempt)
	b = binary.AppendUvarint(b, n.Operations)
	if n.Ready {
		b = append(b, 1)
	}
	d.hash.Write(b) // never fails
}

// Sum returns the digest. It has 32 bits because a benchmark reports floats.
func (d Digest) Sum() uint32 { return d.hash.Sum32() }
