package backend

import "github.com/swactor/provisioning"

// Cut cuts what connects the controller with an attempt: its agent, and its
// bootstrap if one is followed. It is false if nothing does.
func (b *Backend) Cut(key provisioning.ExternalKey) bool {
	joined := b.joins.Cut(key)
	b.mu.Lock()
	var followed bool
	n := b.nodes[key]
	if n != nil && n.stream != nil {
		followed = true
		defer n.stream.Cut() // with no lock held: it waits
	}
	b.mu.Unlock()
	return joined || followed
}
