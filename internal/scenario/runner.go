package scenario

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
)

// Options change how a scenario is run, never what must hold.
type Options struct {
	// NewestFirst runs what is ready to run at an instant in the opposite
	// order: independent work may end in any (G1).
	NewestFirst bool
	// Journal is the Config.Journal of the driver.
	Journal io.Writer
}

// driver is what the runner needs of a provisioning.ClusterDriver.
type driver interface {
	UpdateDesired(provisioning.ClusterShape) error
	Drain() error
	Generation() uint64
	Deliver(provisioning.Observation)
	Trigger()
	Pause()
	Resume()
	Paused() bool
	Replace(id provisioning.LogicalNodeID, reason string) (provisioning.NodeAttemptID, error)
	TriggerIfDue(now time.Time) bool
	DriveNext(now time.Time, executor provisioning.EffectExecutor) (bool, error)
	DriveUntilBlocked(now time.Time, executor provisioning.EffectExecutor) (int, error)
	RequeueAt() (time.Time, bool)
	Converged(generation uint64) bool
	Progress() (ready, desired int)
	ObservedGeneration() uint64
	Plan(now time.Time) provisioning.Plan
	Snapshot() *provisioning.ClusterState
	Node(provisioning.LogicalNodeID) (provisioning.ManagedNode, bool)
	Clock(now time.Time) time.Time
	Stats() provisioning.DriverStats
}

// runner is one run of one scenario. Everything happens on one goroutine at a
// time: that of Run, or the piece of work that Run waits for.
type runner struct {
	options Options
	config  config
	begun   bool // the configuration is settled

	fake     *fakebackend.Backend
	work     *fakebackend.Work
	inner    *provisioning.Executor
	executor provisioning.EffectExecutor // inner, with the refusals of the script
	driver   driver                      // nil before the first shape
	inbox    []provisioning.Observation  // of the executor, not yet delivered
	shape    provisioning.ClusterShape   // the accepted wish
	desired  *provisioning.Desired
	start    time.Time     // provider time at the beginning
	setBack  time.Duration // how far the host's clock is behind the provider's
	problems []error       // of calls, to be reported by the next check
	trace    trace
}

// Run plays the scenario source, which came from file. The error is a
// [*Failure].
func Run(file, source string, options Options) error {
	goroutines := runtime.NumGoroutine()
	r := &runner{options: options, config: defaults()}
	last, text := 0, ""
	fail := func(err error) error {
		if err == nil {
			return nil
		}
		f := &Failure{File: file, Line: last, Text: text, Expected: "no error", Found: err.Error(), Trace: r.trace.entries, LeftOut: r.trace.leftOut}
		if m, ok := errors.AsType[*invariant.Mismatch](err); ok {
			f.Expected, f.Found = m.Expected, m.Found
		}
		return f
	}
	for line := range strings.Lines(source) {
		last++
		text = strings.TrimSpace(line)
		command, _, _ := strings.Cut(line, "#")
		words := strings.Fields(command)
		if len(words) == 0 {
			continue
		}
		r.trace.add("%d: %s", last, strings.Join(words, " "))
		if err := r.play(words); err != nil {
			return errors.Join(fail(err), r.close())
		}
	}
	if !r.begun {
		return fail(wrong("at least one command", "none"))
	}
	if err := r.close(); err != nil {
		return fail(err)
	}
	return fail(invariant.AwaitGoroutines(goroutines))
}

// play runs one line and checks what must hold after it.
func (r *runner) play(words []string) error {
	name, arguments := words[0], words[1:]
	if name == "config" {
		if r.begun {
			return wrong("config in the first line only", "it after other commands")
		}
		var err error
		r.config, err = parseConfig(arguments)
		r.begin()
		return err
	}
	r.begin()
	c, known := commands[name]
	if !known {
		return wrong("a command", quoted(name))
	}
	if c.needsDriver && r.driver == nil {
		return wrong("a shape before "+name, "none")
	}
	if err := c.run(r, arguments); err != nil {
		return err
	}
	if c.quiet || r.driver == nil {
		return nil
	}
	if !r.config.manualDrive {
		if err := r.drive(); err != nil {
			return err
		}
	}
	if err := r.check(); err != nil {
		return err
	}
	driven := !r.config.manualDrive || name == "drive"
	if driven || name == "pass" {
		if err := r.checkRequeue(); err != nil {
			return err
		}
	}
	if driven {
		return r.takeFurtherPass()
	}
	return nil
}

// begin sets the world up, before the first command.
func (r *runner) begin() {
	if r.begun {
		return
	}
	r.begun = true
	r.fake = fakebackend.New(fakebackend.Config{
		Class: r.config.class, Lag: r.config.lag, Settle: r.config.settle, ManualBootstrap: r.config.manualBoot, OnCall: r.watchCall,
	})
	r.start = r.fake.Now()
	r.work = r.fake.NewWork()
	var err error
	r.inner, err = provisioning.NewExecutor(r.fake, provisioning.ExecutorConfig{
		Deliver: func(o provisioning.Observation) { r.inbox = append(r.inbox, o) }, Go: r.work.Go,
	})
	if err != nil {
		panic(err) // it has all it needs
	}
	r.executor = r.fake.Refusing(r.inner)
}

// now is the host's time: the provider's, less what the host's clock was set
// back.
func (r *runner) now() time.Time { return r.fake.Now().Add(-r.setBack) }

// moment writes a provider time for the trace.
func (r *runner) moment() string { return momentWord(r.fake.Now().Sub(r.start), true) }

// wish offers a shape, to the constructor if it is the first.
func (r *runner) wish(shape provisioning.ClusterShape) error {
	if r.driver != nil {
		if err := r.driver.UpdateDesired(shape); err != nil {
			return err
		}
	} else {
		d, err := provisioning.NewClusterDriver(shape, provisioning.Config{
			Retry: r.config.retry, MaxInFlight: r.config.maxInFlight, OnEvent: r.watchEvent, Journal: r.options.Journal,
		})
		if err != nil {
			return err
		}
		r.driver = d
	}
	return r.wished(shape)
}

// wished notes the wish that was accepted.
func (r *runner) wished(shape provisioning.ClusterShape) error {
	desired, err := provisioning.Expand(shape)
	if err != nil {
		return fmt.Errorf("the driver accepted what Expand refuses: %w", err)
	}
	r.shape, r.desired = shape, desired
	return nil
}

// wanted returns the spec that the accepted wish has for a slot, nil for none.
func (r *runner) wanted(id provisioning.LogicalNodeID) *provisioning.LogicalNodeSpec {
	for spec := range r.desired.All() {
		if spec.Node == id {
			return &spec
		}
	}
	return nil
}

// answer lets the provider do and say what is due now, and delivers it. It
// reports whether there was anything.
func (r *runner) answer() bool {
	r.fake.AdvanceTo(r.fake.Now())
	any := false
	for r.work.Len() > 0 {
		any = true
		if r.options.NewestFirst {
			r.work.RunLast()
		} else {
			r.work.RunNext()
		}
	}
	any = any || len(r.inbox) > 0
	for _, o := range r.inbox {
		r.driver.Deliver(o)
	}
	r.inbox = r.inbox[:0]
	return any
}

// maxRounds bounds what may happen in one instant. It is far above what any
// cluster of a scenario needs.
const maxRounds = 10_000

// drive goes on until nothing is left to do now.
func (r *runner) drive() error {
	for range maxRounds {
		answered := r.answer()
		now := r.now()
		r.driver.TriggerIfDue(now)
		passes, err := r.driver.DriveUntilBlocked(now, r.executor)
		if err != nil {
			return err
		}
		if due, ok := r.fake.NextDue(); !answered && passes == 0 && r.work.Len() == 0 && (!ok || due.After(r.fake.Now())) {
			return nil
		}
	}
	return wrong("the cluster to come to rest", fmt.Sprintf("it going on after %d rounds in one instant", maxRounds))
}

// pass lets what is due answer and runs one pass if one is queued.
func (r *runner) pass() error {
	r.answer()
	r.driver.TriggerIfDue(r.now())
	_, err := r.driver.DriveNext(r.now(), r.executor)
	return err
}

// advance moves the time by way of every moment at which something is due.
func (r *runner) advance(d time.Duration) error {
	drives := r.driver != nil && !r.config.manualDrive
	target := r.fake.Now().Add(d)
	for {
		next := target
		if due, ok := r.fake.NextDue(); ok && due.Before(next) {
			next = due
		}
		if drives {
			if requeue, ok := r.driver.RequeueAt(); ok && requeue.Add(r.setBack).Before(next) {
				next = requeue.Add(r.setBack)
			}
		}
		r.fake.AdvanceTo(next)
		if drives {
			if err := r.drive(); err != nil {
				return err
			}
			if err := errors.Join(r.check(), r.checkRequeue()); err != nil {
				return err
			}
		}
		if !next.Before(target) {
			return nil
		}
	}
}

// jump leaps in one step. A leap back moves the host's clock alone.
func (r *runner) jump(d time.Duration) {
	if d < 0 {
		r.setBack -= d
	} else {
		r.fake.AdvanceTo(r.fake.Now().Add(d))
	}
}

// close releases what hangs and ends the executor.
func (r *runner) close() error {
	if !r.begun {
		return nil
	}
	for {
		r.fake.Close()
		if r.work.RunAll() == 0 {
			break
		}
	}
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	return r.inner.Close(ctx)
}

func (r *runner) watchEvent(e provisioning.Event) {
	if e.Kind != provisioning.EventPass {
		r.trace.add("    %s %v", r.moment(), e)
	}
}

// watchCall notes a call at its start and holds it to G3: on record, and alone.
func (r *runner) watchCall(c fakebackend.Call) {
	adopting := ""
	if c.AdoptOnly {
		adopting = ", adopt only"
	}
	r.trace.add("    %s call %s %s#%d %v: %v%s", r.moment(), operationWord(c.Kind), c.Key.Node, c.Key.Attempt, c.Operation, c.Outcome, adopting)
	problem := func(format string, args ...any) { r.problems = append(r.problems, fmt.Errorf(format, args...)) }
	node, ok := r.driver.Node(c.Key.Node)
	if !ok || node.Pending == nil || node.Pending.ID != c.Operation || node.Pending.Kind != c.Kind {
		problem("%s %v of %s started without being recorded as pending", operationWord(c.Kind), c.Operation, c.Key.Node)
	}
	if c.Others > 0 {
		problem("%s %v of %s started beside another call of attempt %d", operationWord(c.Kind), c.Operation, c.Key.Node, c.Key.Attempt)
	}
}
