package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/driving"
	"github.com/swactor/provisioning/examples/localfleet/internal/backend"
	"github.com/swactor/provisioning/examples/localfleet/internal/chaos"
	"github.com/swactor/provisioning/examples/localfleet/runs"
	"github.com/swactor/provisioning/examples/localfleet/shapefile"
	"github.com/swactor/provisioning/examples/localfleet/status"
	"github.com/swactor/provisioning/examples/localfleet/view"
)

// policy is quick: machines here are there in a moment.
var policy = provisioning.RetryPolicy{
	InitialDelay: 500 * time.Millisecond, MaxDelay: 10 * time.Second, Jitter: 0.3,
	OperationTimeout: 30 * time.Second, EndpointProbeInterval: 200 * time.Millisecond,
	EndpointTimeout: time.Minute, BootstrapTimeout: time.Minute, StableAfter: 30 * time.Second,
}

// controller drives one run of machines here.
type controller struct {
	*driving.Controller
	backend *backend.Backend
}

func up(c *command, args []string) (err error) {
	shape := c.flags.String("shape", "fleet.yaml", "the file with the wish, YAML or .json; it is read again when it changes")
	page := c.flags.String("http", "", "serve the status page at `ADDR`, such as :8080; without a host it is one of loopback")
	public := c.flags.Bool("http-public", false, "let -http serve other computers too; whoever reaches the page needs no password")
	lines := c.flags.Bool("plain", false, "print lines also on a terminal")
	inFlight := c.flags.Int("max-in-flight", 16, "calls in flight at once; 0 is no limit")
	bootDelay := c.flags.Duration("boot-delay", 2*time.Second, "how long a machine boots until it answers")
	if _, err := c.parse(args, 0); err != nil {
		return err
	}
	watcher, groups, err := shapefile.Watch(*shape)
	if err != nil {
		return err
	}
	dir := runs.Dir(c.dir)
	lock, err := await(context.Background(), dir, lockTimeout)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	b, err := backend.Open(backend.Config{Dir: c.dir, BootDelay: *bootDelay, Alone: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	left, err := leftBehind(b, dir)
	if err != nil {
		return err
	}

	// On record before the first create: whatever happens from here on, drain
	// finds the machines of this run.
	record, err := dir.Begin()
	if err != nil {
		return err
	}
	ctl := &controller{driving.New("localfleet", *shape, "localfleet drain -dir "+c.dir, record, groups), b}
	policy := policy
	policy.EndpointTimeout += 2 * *bootDelay
	ctl.Host, err = provisioning.NewHost(provisioning.HostConfig{
		Shape: ctl.Wish(), Backend: b, Retry: policy, MaxInFlight: *inFlight, MaxNodes: shapefile.MaxNodes,
		OnEvent: ctl.Journal.OnEvent,
	})
	if err != nil {
		return errors.Join(err, dir.Forget(record.Run))
	}

	intro := fmt.Sprintf("run %s in %s", record.Run, c.dir)
	if *page != "" {
		server, err := status.Serve(*page, *public, ctl.Fleet)
		if err != nil {
			return errors.Join(err, dir.Forget(record.Run))
		}
		defer func() { err = errors.Join(err, driving.Bounded(server.Close)) }()
		intro += ", page at " + server.URL()
	}
	commands, err := control.Serve(c.dir, ctl)
	if err != nil {
		return errors.Join(err, dir.Forget(record.Run))
	}
	defer func() { err = errors.Join(err, driving.Bounded(commands.Close)) }()

	var showed func() // ends the showing
	if !*lines && view.IsTerminal(c.out) {
		showed = view.ShowTable(c.out, ctl.Fleet, intro+"   Ctrl-C stops driving, the machines go on")
	} else {
		fmt.Fprintln(c.out, intro)
		showed = view.ShowLines(c.out, ctl.Journal)
	}
	for _, l := range left {
		ctl.Journal.Note(status.Bad, "%s; localfleet drain gives them back", l)
	}
	driveErr := ctl.Drive(watcher, c.interrupts, c.errs, showed)
	return errors.Join(driveErr, ctl.goodbye(c, dir))
}

// goodbye says what is still held, and takes the run off the record if nothing
// is: by the word of the provider, not only by that of the host.
func (ctl *controller) goodbye(c *command, dir runs.Dir) error {
	held := ctl.Host.Held()
	machines, err := machinesOf(ctl.backend, provisioning.RunToken(ctl.Run))
	if err != nil {
		return err
	}
	if len(held) == 0 && len(machines) == 0 {
		fmt.Fprintf(c.out, "Nothing is held: run %s is over.\n", ctl.Run)
		return dir.Forget(ctl.Run)
	}
	fmt.Fprintf(c.out, "Stopped driving run %s. %d machines go on:\n", ctl.Run, len(machines))
	for _, slot := range held {
		fmt.Fprintf(c.out, "  %s\n", view.Printable(slot.String()))
	}
	fmt.Fprintf(c.out, "Give them back with: %s\n", ctl.GiveBack)
	return nil
}

func (ctl *controller) Break(kind string, pick uint64) (string, error) {
	what, err := chaos.Break(ctl.backend, ctl.Run, chaos.Kind(kind), pick)
	if err == nil {
		ctl.Journal.Note(status.Bad, "chaos %s", what)
	}
	return what, err
}
