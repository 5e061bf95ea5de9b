//go:build linux

package backend

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// attempt plays the driver for one attempt.
type attempt struct {
	t     *testing.T
	b     *Backend
	key   provisioning.ExternalKey
	spec  provisioning.LogicalNodeSpec
	lease provisioning.ProviderLeaseID
	sent  uint32
	seen  chan provisioning.Observation
}

func newAttempt(t *testing.T, b *Backend, group provisioning.NodeGroupSpec) *attempt {
	t.Helper()
	group.GroupID, group.Provider = "w", Kind
	desired, err := provisioning.Expand(provisioning.ClusterShape{RunID: runOf(t), Generation: 1, Groups: []provisioning.NodeGroupSpec{group}})
	require.NoError(t, err)
	a := &attempt{t: t, b: b, seen: make(chan provisioning.Observation, 1000)}
	for a.spec = range desired.All() {
	}
	a.key = provisioning.ExternalKey{Run: runOf(t), Node: a.spec.Node, Attempt: 1}
	return a
}

func (a *attempt) create(adoptOnly bool) error {
	res, err := a.b.CreateLease(soon(a.t), provisioning.CreateLeaseRequest{Key: a.key, Spec: a.spec, CreatesSent: a.sent, AdoptOnly: adoptOnly})
	if !adoptOnly {
		a.sent++
	}
	a.lease = res.Lease
	return err
}

func (a *attempt) start() error {
	_, err := a.b.StartBootstrap(soon(a.t), provisioning.StartBootstrapRequest{Key: a.key, Spec: a.spec, Lease: a.lease,
		Sink: provisioning.NewBootstrapSink(a.key.Node, a.key.Attempt, func(o provisioning.Observation) { a.seen <- o })})
	return err
}

// await returns the next observation of a kind.
func (a *attempt) await(kind provisioning.ObservationKind) provisioning.Observation {
	a.t.Helper()
	for ctx := soon(a.t); ; {
		select {
		case o := <-a.seen:
			if o.Kind == kind {
				return o
			}
		case <-ctx.Done():
			require.Fail(a.t, "never reported", "%v", kind)
		}
	}
}

func (a *attempt) destroy() error {
	return a.b.DestroyLease(soon(a.t), provisioning.DestroyLeaseRequest{Key: a.key, Spec: a.spec, Lease: a.lease})
}
