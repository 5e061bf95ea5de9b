package provisioning_test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/verify"
)

// soakSlots is how many slots the soak wishes for, give or take a few.
const soakSlots = 200

// soakBackend rents machines in memory and forgets those that are gone. Its
// calls take their time. What goes wrong follows from the seed and the call, not
// from the order in which calls are made.
type soakBackend struct {
	seed uint64

	mu      sync.Mutex
	live    map[provisioning.ExternalKey]bool
	created int
	calls   int
	faults  int
}

// chance is a number below 1000 that is that of the call alone.
func (b *soakBackend) chance(key provisioning.ExternalKey, id provisioning.OperationID, what string) int {
	h := fnv.New64a()
	fmt.Fprintln(h, b.seed, key.Node, key.Attempt, id.Sequence, what)
	return int(h.Sum64() % 1000)
}

// call lets a call take its time, and its effect unless it goes wrong before.
func (b *soakBackend) call(ctx context.Context, key provisioning.ExternalKey, id provisioning.OperationID, effect func()) error {
	luck := b.chance(key, id, "fault")
	b.mu.Lock()
	b.calls++
	if luck < 60 {
		b.faults++
	}
	b.mu.Unlock()
	select {
	case <-time.After(time.Duration(1+b.chance(key, id, "latency")) * 10 * time.Millisecond):
	case <-ctx.Done():
		return ctx.Err()
	}
	if luck < 30 {
		return provisioning.Ambiguous(errors.New("the connection broke"))
	}
	b.mu.Lock()
	effect()
	b.mu.Unlock()
	switch {
	case luck < 50:
		return provisioning.Ambiguous(errors.New("the answer was lost"))
	case luck < 60:
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (b *soakBackend) CreateLease(ctx context.Context, r provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	found := true
	err := b.call(ctx, r.Key, r.Operation, func() {
		if found = b.live[r.Key]; !found && !r.AdoptOnly {
			b.live[r.Key], found = true, true
			b.created++
		}
	})
	if err == nil && !found {
		err = provisioning.ErrNothingToAdopt
	}
	return provisioning.CreateLeaseResult{Lease: provisioning.ProviderLeaseID(r.Key.Token())}, err
}

func (b *soakBackend) LookupEndpoint(ctx context.Context, r provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	lives := false
	err := b.call(ctx, r.Key, r.Operation, func() { lives = b.live[r.Key] })
	if err == nil && !lives {
		err = provisioning.LeaseLost(errors.New("there is no such machine"))
	}
	return provisioning.LookupEndpointResult{Endpoint: &provisioning.SSHEndpoint{Host: string(r.Key.Node), Port: 22}}, err
}

func (b *soakBackend) StartBootstrap(ctx context.Context, r provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	lives, session := false, provisioning.BootstrapSessionID(r.Key.TokenFor("session"))
	err := b.call(ctx, r.Key, r.Operation, func() { lives = b.live[r.Key] })
	if err == nil && !lives {
		err = provisioning.LeaseLost(errors.New("there is no such machine"))
	}
	if err == nil && b.chance(r.Key, r.Operation, "silence") >= 10 {
		go func() {
			time.Sleep(20 * time.Second)
			r.Sink.Progress(session, provisioning.BootstrapStageSSHReady, 1, 0)
			time.Sleep(20 * time.Second)
			r.Sink.Joined(session, provisioning.SwactorID(r.Key.Node))
		}()
	}
	return provisioning.StartBootstrapResult{Session: session}, err
}

func (b *soakBackend) BootstrapConvergenceObserved(ctx context.Context, r provisioning.BootstrapConvergenceObservedRequest) error {
	return b.call(ctx, r.Key, r.Operation, func() {})
}

func (b *soakBackend) CancelBootstrap(ctx context.Context, r provisioning.CancelBootstrapRequest) error {
	return b.call(ctx, r.Key, r.Operation, func() {})
}

func (b *soakBackend) DestroyLease(ctx context.Context, r provisioning.DestroyLeaseRequest) error {
	return b.call(ctx, r.Key, r.Operation, func() { delete(b.live, r.Key) })
}

// lose ends the machine of a node, and returns whether there was one.
func (b *soakBackend) lose(key provisioning.ExternalKey) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	lived := b.live[key]
	delete(b.live, key)
	return lived
}

func (b *soakBackend) figures() (live, created, calls, faults int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.live), b.created, b.calls, b.faults
}

// TestSoak runs a host for a year, in a time of its own: 200 slots, a machine
// lost every hour, another wish every day, and six calls in a hundred that go
// wrong. At the end of every day the cluster is as wished for and every machine
// is accounted for, no goroutine is left but that of the host, and since
// the second week the heap has not grown (G7, G12).
func TestSoak(t *testing.T) {
	days, settled := 14, 7 // from settled on nothing may grow
	if verify.Full() {
		days, settled = 365, 14
	}
	seed := verify.Seed()
	began := time.Now()
	synctest.Test(t, func(t *testing.T) { soak(t, seed, days, settled) })
	if verify.Full() {
		verify.AtMost(t, "seconds for a year", time.Since(began).Seconds(), 60)
	}
}

func soak(t *testing.T, seed uint64, days, settled int) {
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	backend := &soakBackend{seed: seed, live: make(map[provisioning.ExternalKey]bool)}
	counts, images, generation := [2]int{soakSlots / 2, soakSlots / 2}, [2]int{}, uint64(1)
	wish := func() provisioning.ClusterShape {
		shape := provisioning.ClusterShape{RunID: "soak", Generation: generation}
		for i, id := range []provisioning.NodeGroupID{"a", "b"} {
			shape.Groups = append(shape.Groups, provisioning.NodeGroupSpec{GroupID: id, Count: counts[i], Shape: provisioning.NodeShape{Image: fmt.Sprint(images[i])}})
		}
		return shape
	}
	host, err := provisioning.NewHost(provisioning.HostConfig{Shape: wish(), Backend: backend, Retry: provisioning.RetryPolicy{BootstrapTimeout: 5 * time.Minute}})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	goroutines := runtime.NumGoroutine() + 1
	go func() { ended <- host.Run(ctx) }()

	soaked, losses := 0, 0
	var heap, most uint64
	for day := range days {
		if day > 0 {
			generation++
			switch which := random.IntN(2); random.IntN(3) {
			case 0:
				images[which]++
			case 1:
				counts[which] = soakSlots/2 - random.IntN(6)
			default:
				images[0]++
				counts[1] = soakSlots/2 - random.IntN(6)
			}
			require.NoError(t, host.UpdateDesired(wish()))
		}
		for range 24 {
			time.Sleep(time.Hour)
			group := random.IntN(2)
			id := provisioning.NewLogicalNodeID([]provisioning.NodeGroupID{"a", "b"}[group], random.IntN(counts[group]))
			node, there := host.Driver().Node(id)
			require.True(t, there)
			if backend.lose(provisioning.ExternalKey{Run: "soak", Node: id, Attempt: node.Attempt}) {
				losses++
			}
			host.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: id, Attempt: node.Attempt})
		}
		time.Sleep(time.Second) // the loss is folded
		require.NoError(t, host.WaitConverged(ctx, generation))
		time.Sleep(time.Minute) // what died has nothing more to say
		synctest.Wait()

		status := host.Status()
		require.True(t, status.Converged, "day %d: %+v", day, status)
		require.NoError(t, host.Driver().Snapshot().Check())
		live, _, _, _ := backend.figures()
		require.Equal(t, counts[0]+counts[1], live, "day %d", day)
		require.Equal(t, live, status.Executor.Attempts, "day %d", day)
		now := soakHeap() // it also stops the world, so that no goroutine is half ended
		// Fewer, if one of an earlier test was still on its way out at the start.
		require.LessOrEqual(t, runtime.NumGoroutine(), goroutines, "day %d", day)
		if day >= settled-1 {
			if day == settled-1 {
				heap = now
			}
			most = max(most, now)
		}
		soaked++
	}
	growth := float64(most-heap) / (1 << 20)
	require.NoError(t, host.Drain(ctx))
	stop()
	require.NoError(t, <-ended)
	held, err := host.Close(t.Context())
	require.NoError(t, err)
	require.Empty(t, held)
	live, created, calls, faults := backend.figures()
	require.Zero(t, live)

	verify.AtLeast(t, "days soaked", soaked, verify.Target(365, 14))
	verify.AtLeast(t, "machines lost", losses, verify.Target(8000, 300))
	verify.AtLeast(t, "machines rented", created, verify.Target(20_000, 350))
	verify.AtLeast(t, "calls that went wrong", faults, verify.Target(8000, 150))
	verify.AtMost(t, "MiB by which the heap grew", growth, 1)
	verify.Note(t, "calls of the backend", calls)
	verify.Note(t, "goroutines that no day had more of", goroutines)
}

func soakHeap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
