package provisioning_test

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/swactor/provisioning"
)

// memory is a whole backend: six methods over a map. Its provider answers at
// once and always, so there is no earlier call to wait for (B3) and no ctx to
// heed (B7).
type memory struct {
	mu       sync.Mutex
	machines map[provisioning.ExternalKey]machine
}

type machine struct {
	lease   provisioning.ProviderLeaseID
	session provisioning.BootstrapSessionID // empty: none
}

func newMemory() *memory {
	return &memory{machines: make(map[provisioning.ExternalKey]machine)}
}

var errNoMachine = errors.New("memory: no such machine")

func (m *memory) CreateLease(_ context.Context, req provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	have, found := m.machines[req.Key] // B1: adopt; B8: exactly this key
	switch {
	case !found && req.AdoptOnly: // B4
		return provisioning.CreateLeaseResult{}, provisioning.ErrNothingToAdopt
	case !found:
		have.lease = provisioning.ProviderLeaseID(req.Key.Token())
		m.machines[req.Key] = have
	}
	return provisioning.CreateLeaseResult{Lease: have.lease}, nil
}

func (m *memory) LookupEndpoint(_ context.Context, req provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.machines[req.Key].lease != req.Lease {
		return provisioning.LookupEndpointResult{}, provisioning.LeaseLost(errNoMachine)
	}
	return provisioning.LookupEndpointResult{Endpoint: &provisioning.SSHEndpoint{Host: "192.0.2.1", Port: 22}}, nil
}

func (m *memory) StartBootstrap(_ context.Context, req provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	have := m.machines[req.Key]
	if have.lease != req.Lease {
		return provisioning.StartBootstrapResult{}, provisioning.LeaseLost(errNoMachine)
	}
	have.session = provisioning.BootstrapSessionID("session of " + req.Lease) // B1: the same again
	m.machines[req.Key] = have
	req.Sink.Joined(have.session, provisioning.SwactorID("agent of "+req.Lease))
	return provisioning.StartBootstrapResult{Session: have.session}, nil
}

func (m *memory) BootstrapConvergenceObserved(_ context.Context, req provisioning.BootstrapConvergenceObservedRequest) error {
	return m.endSession(req.Key, req.Session) // it has done its work
}

func (m *memory) CancelBootstrap(_ context.Context, req provisioning.CancelBootstrapRequest) error {
	return m.endSession(req.Key, req.Session)
}

func (m *memory) endSession(key provisioning.ExternalKey, session provisioning.BootstrapSessionID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if have, found := m.machines[key]; found && have.session == session { // B5: else there is nothing to end
		have.session = ""
		m.machines[key] = have
	}
	return nil
}

func (m *memory) DestroyLease(_ context.Context, req provisioning.DestroyLeaseRequest) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.machines, req.Key) // B5, B6: gone, and its session with it
	return nil
}

// How is a backend written? This one is complete.
func Example_writeABackend() {
	backend := newMemory()
	driver, drive := newCluster(backend, nil)
	drive(noon)
	fmt.Println(driver.Converged(1), len(backend.machines))

	check(driver.UpdateDesired(workers(2, 0, "v1")))
	drive(noon)
	fmt.Println(driver.Converged(2), len(backend.machines))

	// Output:
	// true 1
	// true 0
}
