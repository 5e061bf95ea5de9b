package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/control"
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
			err = fmt.Errorf("%w; %d runs on record may have left claims, %s gives them back", err, len(records),
				c.hint("drain", records[len(records)-1].Inventory))
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
	shape := c.flags.String("shape", "", "plan for this `FILE` instead of the present wish; needs no controller")
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
