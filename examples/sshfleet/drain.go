package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/runs"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

const (
	askEvery = 100 * time.Millisecond
	// goodbyeTimeout is how long a controller that has said goodbye may take
	// to end, lockTimeout how long one that was killed may seem to live.
	goodbyeTimeout = 10 * time.Second
	lockTimeout    = time.Second
)

// drain lets a running controller give everything back and end. Then, alone in
// the directory, it ends the claims that any run on record has left: also those
// of a controller that was killed, before or meanwhile.
func drain(c *command, args []string) error {
	hostFile := c.inventory()
	var gone []string
	c.flags.Func("gone", "leave out a `HOST` that is gone for good, and look after what it may hold; may be repeated", func(name string) error {
		gone = append(gone, name)
		return nil
	})
	if _, err := c.parse(args, 0); err != nil {
		return err
	}
	dir := runs.Dir(c.dir)
	if exists, err := dir.Exists(); err != nil {
		return err
	} else if !exists { // also somebody's directory, to be left as it is
		fmt.Fprintf(c.out, "There is no fleet in %s.\n", c.dir)
		return nil
	}
	all, err := inventory.Read(*hostFile)
	if err != nil {
		return err
	}
	ctx, cancel := c.context()
	defer cancel()
	client := control.NewClient(c.dir)
	switch err := client.Drain(ctx); {
	case err == nil:
		if err := follow(ctx, c, client); err != nil {
			return err
		}
	case !errors.Is(err, control.ErrNoController):
		return err
	}
	lock, err := await(ctx, dir, goodbyeTimeout)
	if err != nil {
		return err
	}
	return errors.Join(sweep(ctx, c, dir, all, gone), lock.Close())
}

// follow tells how a controller gets on until it has ended, in whatever way.
func follow(ctx context.Context, c *command, client *control.Client) error {
	told := ""
	for {
		s, err := client.Status(ctx)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("%w; the controller goes on draining", context.Cause(ctx))
		case err != nil: // it hangs up when it has ended
			return nil
		}
		if line := fmt.Sprintf("draining run %s: %d slots are left, %d of them with a host", s.Run, len(s.Slots), s.Held); line != told {
			fmt.Fprintln(c.out, line)
			told = line
		}
		if !pause(ctx, askEvery) {
			return fmt.Errorf("%w; the controller goes on draining", context.Cause(ctx))
		}
	}
}

// await takes the lock of the directory. A controller that is ending may hold it
// for a moment more.
func await(ctx context.Context, dir runs.Dir, timeout time.Duration) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		lock, err := dir.Lock()
		if !errors.Is(err, runs.ErrLocked) || !pause(ctx, askEvery) {
			return lock, err
		}
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
