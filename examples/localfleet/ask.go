package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/internal/chaos"
	"github.com/swactor/provisioning/examples/localfleet/runs"
	"github.com/swactor/provisioning/examples/localfleet/shapefile"
	"github.com/swactor/provisioning/examples/localfleet/view"
)

// showStatus is the command status.
func showStatus(c *command, args []string) error {
	if _, err := c.parse(args, 0); err != nil {
		return err
	}
	ctx, cancel := c.context()
	defer cancel()
	s, err := control.NewClient(c.dir).Status(ctx)
	if errors.Is(err, control.ErrNoController) {
		records, listErr := runs.Dir(c.dir).List()
		if len(records) > 0 {
			err = fmt.Errorf("%w; %d runs on record may have left machines, localfleet drain -dir %s gives them back", err, len(records), c.dir)
		}
		return errors.Join(err, listErr)
	}
	if err != nil {
		return err
	}
	view.List(c.out, s)
	return nil
}

func explain(c *command, args []string) error {
	rest, err := c.parse(args, 1)
	if err != nil {
		return err
	}
	ctx, cancel := c.context()
	defer cancel()
	slot, err := control.NewClient(c.dir).Slot(ctx, rest[0])
	if err != nil {
		return err
	}
	view.Explain(c.out, slot, time.Now())
	return nil
}

// plan asks a running controller; without one it plans from nothing.
func plan(c *command, args []string) error {
	shape := c.flags.String("shape", "", "plan for this file instead of the present wish; needs no controller")
	if _, err := c.parse(args, 0); err != nil {
		return err
	}
	var groups []provisioning.NodeGroupSpec
	if *shape != "" {
		var err error
		if groups, err = shapefile.Read(*shape); err != nil {
			return err
		}
	}
	ctx, cancel := c.context()
	defer cancel()
	p, err := control.NewClient(c.dir).Plan(ctx, groups)
	if errors.Is(err, control.ErrNoController) && *shape != "" {
		driver, err := provisioning.NewClusterDriver(provisioning.ClusterShape{RunID: "plan", Generation: 1, Groups: groups},
			provisioning.Config{MaxNodes: shapefile.MaxNodes})
		if err != nil {
			return err
		}
		fmt.Fprintln(c.out, "No controller is running: this is what a first pass would do.")
		p = control.PlanOf(driver.Plan(time.Now()), driver.Snapshot())
	} else if err != nil {
		return err
	}
	view.Plan(c.out, p)
	return nil
}

// makeChaos is the command chaos.
func makeChaos(c *command, args []string) error {
	lasting := c.flags.Duration("for", time.Minute, "how long")
	every := c.flags.Duration("every", time.Second, "the time between two breaks, on the average")
	seed := c.flags.Uint64("seed", uint64(time.Now().UnixNano()), "what is chosen when; the fleet itself is not the same twice")
	if _, err := c.parse(args, 0); err != nil {
		return err
	}
	if *every <= 0 {
		fmt.Fprintln(c.errs, "localfleet chaos: -every must be positive")
		return errUsage
	}
	ctx, cancel := c.context()
	defer cancel()
	client := control.NewClient(c.dir)
	random := rand.New(rand.NewPCG(*seed, 0))
	kinds := chaos.Kinds()
	broken := 0
	end := time.Now().Add(*lasting)
	for time.Now().Before(end) {
		kind := kinds[random.IntN(len(kinds))]
		what, err := client.Break(ctx, string(kind), random.Uint64())
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, control.ErrNoController):
			return err
		case err != nil: // nothing of that kind at the moment, or it went by itself meanwhile
			fmt.Fprintln(c.out, view.Printable(fmt.Sprintf("%s: %v", kind, err)))
		default:
			broken++
			fmt.Fprintln(c.out, view.Printable(what))
		}
		// From none to twice the time, so that breaks also fall together.
		if !pause(ctx, min(time.Duration(random.Int64N(2*int64(*every))), time.Until(end))) {
			break
		}
	}
	fmt.Fprintf(c.out, "Broke %d things. localfleet status -dir %s tells how the fleet gets on.\n", broken, c.dir)
	return nil
}
