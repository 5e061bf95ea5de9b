package provisioning_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// workers wishes for a group of equal nodes.
func workers(generation uint64, count int, image string) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: "demo", Generation: generation, Groups: []provisioning.NodeGroupSpec{
		{GroupID: "worker", Count: count, Shape: provisioning.NodeShape{Image: image}},
	}}
}

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// newCluster returns a driver of one worker and a function that drives it. The
// backend's calls are made within that: one thread, and no clock but now.
func newCluster(backend provisioning.EffectBackend, onEvent func(provisioning.Event)) (*provisioning.ClusterDriver, func(now time.Time)) {
	driver, err := provisioning.NewClusterDriver(workers(1, 1, "v1"), provisioning.Config{OnEvent: onEvent})
	check(err)
	executor, err := provisioning.NewExecutor(backend, provisioning.ExecutorConfig{
		Deliver: driver.Deliver,
		Go:      func(f func()) { f() },
	})
	check(err)
	return driver, func(now time.Time) {
		_, err := driver.DriveUntilBlocked(now, executor)
		check(err)
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// A host drives a cluster in the background of a service.
func ExampleHost() {
	backend := fakebackend.New(fakebackend.Config{}) // yours, in earnest
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Backend: backend,
		Shape: provisioning.ClusterShape{RunID: "demo", Generation: 1, Groups: []provisioning.NodeGroupSpec{
			{GroupID: "worker", Count: 3, Shape: provisioning.NodeShape{Image: "v1"}},
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	stopped := make(chan error)
	go func() { stopped <- host.Run(ctx) }()

	if err := host.WaitConverged(ctx, 1); err != nil {
		log.Fatal(err)
	}
	fmt.Println(host.Status().Ready, "of", host.Status().Desired, "ready")
	stop() // passes, not machines
	fmt.Println(<-stopped)

	if err := host.Drain(context.Background()); err != nil { // the machines
		log.Fatal(err)
	}
	fmt.Println(backend.LiveTotal(), "machines left")

	// Output:
	// 3 of 3 ready
	// provisioning: stopped (context canceled) with 3 held: worker-0 attempt 1 holds lease lease/demo/worker-0/1; worker-1 attempt 2 holds lease lease/demo/worker-1/2; worker-2 attempt 3 holds lease lease/demo/worker-2/3
	// 0 machines left
}

// The loop of a service that has one already, without a Host.
func Example_hostLoop() {
	driver, err := provisioning.NewClusterDriver(workers(1, 3, "v1"), provisioning.Config{})
	check(err)
	wake := make(chan struct{}, 1)
	executor, err := provisioning.NewExecutor(fakebackend.New(fakebackend.Config{}), provisioning.ExecutorConfig{
		Deliver: func(o provisioning.Observation) {
			driver.Deliver(o)
			select {
			case wake <- struct{}{}:
			default: // it will wake already
			}
		},
	})
	check(err)
	for {
		_, err := driver.DriveUntilBlocked(time.Now(), executor)
		check(err)
		if driver.Converged(1) {
			break // or go on for ever
		}
		sleep := 30 * time.Second
		if at, ok := driver.RequeueAt(); ok {
			sleep = min(sleep, time.Until(at))
		}
		select {
		case <-wake:
		case <-time.After(sleep):
		}
	}
	check(executor.Close(context.Background()))
	fmt.Println(len(driver.Held()), "machines go on costing money")

	// Output:
	// 3 machines go on costing money
}

// What does a node go through until it is ready?
func Example_converge() {
	driver, drive := newCluster(fakebackend.New(fakebackend.Config{Inline: true}), func(e provisioning.Event) {
		if e.Kind == provisioning.EventDispatch || e.Kind == provisioning.EventStage {
			fmt.Println(e)
		}
	})
	drive(noon)
	fmt.Println("converged:", driver.Converged(1))

	// Output:
	// Dispatch worker-0#1 CreateLease 1/1 (R12 create-lease)
	// Stage worker-0#1 New -> LeaseRequested
	// Stage worker-0#1 LeaseRequested -> EndpointKnown
	// Dispatch worker-0#1 StartBootstrap 1/2 (R16 start-bootstrap)
	// Stage worker-0#1 EndpointKnown -> SwactorJoined
	// Dispatch worker-0#1 BootstrapConvergenceObserved 1/3 (R14 observe-convergence)
	// Stage worker-0#1 SwactorJoined -> Dormant
	// converged: true
}

// Which nodes go when a group gets smaller? Those with the highest indices.
func ExampleClusterDriver_UpdateDesired_scaleDown() {
	fake := fakebackend.New(fakebackend.Config{Inline: true})
	driver, drive := newCluster(fake, nil)
	check(driver.UpdateDesired(workers(2, 4, "v1")))
	drive(noon)
	fmt.Println(fake.LiveTotal(), "machines")

	check(driver.UpdateDesired(workers(3, 2, "v1")))
	drive(noon)
	for _, machine := range fake.Machines() {
		fmt.Println(machine.Lease)
	}

	// Output:
	// 4 machines
	// lease/demo/worker-0/1
	// lease/demo/worker-1/2
}

// What happens when the image changes? The machine is given back before a fresh
// attempt begins. An update without a higher generation is refused.
func ExampleClusterDriver_UpdateDesired_replaceOnDrift() {
	fake := fakebackend.New(fakebackend.Config{Inline: true})
	driver, drive := newCluster(fake, func(e provisioning.Event) {
		switch e.Kind {
		case provisioning.EventReady, provisioning.EventDeleting, provisioning.EventDestroyed:
			fmt.Println(e)
		}
	})
	drive(noon)
	err := driver.UpdateDesired(workers(1, 1, "v2"))
	fmt.Println("refused:", errors.Is(err, provisioning.ErrGenerationReused))

	check(driver.UpdateDesired(workers(2, 1, "v2")))
	drive(noon)
	node, _ := driver.Node("worker-0")
	fmt.Println(node.Record.Lease, "runs", node.Record.Spec.Shape.Image)

	// Output:
	// Ready worker-0#1
	// refused: true
	// Deleting worker-0#1
	// Destroyed worker-0#1
	// Ready worker-0#2
	// lease/demo/worker-0/2 runs v2
}

// How long are the waits between tries, and what is a node waiting for?
func ExampleClusterDriver_Explain_backoff() {
	fake := fakebackend.New(fakebackend.Config{Inline: true})
	fake.Script("worker-0", provisioning.CreateLease,
		fakebackend.Capacity(), fakebackend.Capacity(), fakebackend.RetryAfter(30*time.Second))
	driver, drive := newCluster(fake, nil)
	now := noon
	for drive(now); !driver.Converged(1); drive(now) {
		explanation, _ := driver.Explain("worker-0", now)
		fmt.Println(explanation)
		now, _ = driver.RequeueAt() // a host sleeps until then
	}
	fmt.Println("ready after", now.Sub(noon))

	// Output:
	// worker-0: waiting 1s more after 1 failure in a row, the last: CreateLease: fakebackend: no capacity [R10 await-backoff]
	// worker-0: waiting 2s more after 2 failures in a row, the last: CreateLease: fakebackend: no capacity [R10 await-backoff]
	// worker-0: waiting 30s more after 3 failures in a row, the last: CreateLease: fakebackend: scripted throttling [R10 await-backoff]
	// ready after 33s
}

// A create has made a machine and its answer is lost. Is there a second one?
func Example_ambiguousCreate() {
	fake := fakebackend.New(fakebackend.Config{Inline: true})
	fake.Script("worker-0", provisioning.CreateLease, fakebackend.DoneAmbiguous())
	driver, drive := newCluster(fake, nil)
	drive(noon)
	fmt.Println(driver.Held())

	now, _ := driver.RequeueAt()
	drive(now)
	fmt.Println(driver.Held())
	fmt.Println(fake.Calls("worker-0", provisioning.CreateLease), "calls,", fake.Created("worker-0"), "machine")

	// Output:
	// [worker-0 attempt 1 may hold a machine: its create is unresolved]
	// [worker-0 attempt 1 holds lease lease/demo/worker-0/1]
	// 2 calls, 1 machine
}

// What would be done next? A plan changes nothing.
func ExampleClusterDriver_Plan() {
	driver, drive := newCluster(fakebackend.New(fakebackend.Config{Inline: true}), nil)
	drive(noon)
	check(driver.UpdateDesired(workers(2, 2, "v2")))
	for _, action := range driver.Plan(noon).Actions {
		fmt.Println(action.Node, action.Kind, "because", action.Rule.Why)
	}

	// Output:
	// worker-0 BeginDelete because an attempt that is unwanted, outdated or failed is given up, even in the middle of an operation
	// worker-1 Insert because a desired slot that is not in the state gets a node and its first attempt
}

// A service under test: it rents a worker for every ten jobs.
type service struct {
	host       *provisioning.Host
	generation uint64
}

func (s *service) jobs(n int) {
	s.generation++
	check(s.host.UpdateDesired(workers(s.generation, (n+9)/10, "v1")))
}

// Three hours of a service's life, with a sold-out provider and a lost machine,
// in virtual time: the same to the nanosecond in every run.
func Example_deterministicTest() {
	fake := fakebackend.New(fakebackend.Config{Start: noon, JoinAfter: 90 * time.Second})
	fake.Script("worker-1", provisioning.CreateLease, fakebackend.Capacity(), fakebackend.SpotLoss(time.Hour))
	work := fake.NewWork()
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape: workers(1, 0, "v1"), Backend: fake, Clock: work.Clock(nil), Go: work.Go,
		OnEvent: func(e provisioning.Event) {
			if e.Kind == provisioning.EventReady || e.Kind == provisioning.EventAttemptFailed || e.Kind == provisioning.EventReaped {
				fmt.Println(e.At.Format(time.TimeOnly), e)
			}
		},
	})
	check(err)
	subject := &service{host: host, generation: 1}
	ctx, stop := context.WithCancel(context.Background())
	fake.At(noon.Add(time.Minute), func() { subject.jobs(15) })
	fake.At(noon.Add(2*time.Hour), func() { subject.jobs(5) })
	fake.At(noon.Add(3*time.Hour), stop)

	fmt.Println(host.Run(ctx))
	fmt.Println(fake.Now().Sub(noon), "later,", fake.LiveTotal(), "machine")

	// Output:
	// 12:02:30 Ready worker-0#1
	// 12:02:31 Ready worker-1#2
	// 13:01:01 AttemptFailed worker-1#2: the node was lost: fakebackend: the spot machine was taken back
	// 13:02:32 Ready worker-1#3
	// 14:00:00 Reaped worker-1#3
	// provisioning: stopped (context canceled) with 1 held: worker-0 attempt 1 holds lease lease/demo/worker-0/1
	// 3h0m0s later, 1 machine
}

// The backend of Example_writeABackend keeps the contract, every rule of it.
func TestBackendOfTheExample(t *testing.T) {
	report := fakebackend.CheckReport(func() fakebackend.Subject {
		backend := newMemory()
		return fakebackend.Subject{
			Backend: backend,
			Live: func(key provisioning.ExternalKey) (int, error) {
				backend.mu.Lock()
				defer backend.mu.Unlock()
				if _, found := backend.machines[key]; found {
					return 1, nil
				}
				return 0, nil
			},
			Advance: func(time.Duration) {}, // it has no time
		}
	})
	require.NoError(t, report.Err())
	for _, result := range report.Cases {
		if result.NotRun != "" { // a map loses no answer
			require.Equal(t, "needs Subject.LoseAnswer", result.NotRun, result.Case)
		}
	}
}
