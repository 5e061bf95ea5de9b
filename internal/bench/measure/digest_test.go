package measure

import "testing"

// TestDigestSeesEverything: no field may differ unseen, nor the order.
func TestDigestSeesEverything(t *testing.T) {
	base := Node{ID: "w-0", Lease: "l", Host: "h", Agent: "a", Attempt: 1, Operations: 3, Ready: true}
	lists := [][]Node{{}, {base}, {base, base}}
	for _, change := range []func(*Node){
		func(n *Node) { n.ID = "w-1" },
		func(n *Node) { n.Lease = "m" },
		func(n *Node) { n.Host = "i" },
		func(n *Node) { n.Agent = "b" },
		func(n *Node) { n.Lease, n.Host = "lh", "" },
		func(n *Node) { n.Attempt = 2 },
		func(n *Node) { n.Operations = 4 },
		func(n *Node) { n.Ready = false },
	} {
		other := base
		change(&other)
		lists = append(lists, []Node{other}, []Node{base, other}, []Node{other, base})
	}
	seen := map[uint32][]Node{}
	for _, list := range lists {
		d := NewDigest()
		for _, n := range list {
			d.Add(n)
		}
		if twin, ok := seen[d.Sum()]; ok {
			t.Errorf("%v and %v have one digest", twin, list)
		}
		seen[d.Sum()] = list
	}
}
