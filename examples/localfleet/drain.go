package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/internal/backend"
	"github.com/swactor/provisioning/examples/localfleet/internal/process"
	"github.com/swactor/provisioning/examples/localfleet/runs"
)

const (
	askEvery = 100 * time.Millisecond
	// goodbyeTimeout is how long a controller that has said goodbye may take
	// to end, lockTimeout how long one that was killed may seem to live.
	goodbyeTimeout = 10 * time.Second
	lockTimeout    = time.Second
	// destroyTimeout bounds the end of one machine.
	destroyTimeout = 30 * time.Second
)

// drain lets a running controller give everything back and end. Then, alone in
// the directory, it sweeps what any run on record has left: also that of a
// controller that was killed, before or meanwhile.
func drain(c *command, args []string) error {
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
	return errors.Join(sweep(ctx, c, dir), lock.Close())
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
		if line := fmt.Sprintf("draining run %s: %d slots are left, %d of them with a machine", s.Run, len(s.Slots), s.Held); line != told {
			fmt.Fprintln(c.out, line)
			told = line
		}
		if !pause(ctx, askEvery) {
			return fmt.Errorf("%w; the controller goes on draining", context.Cause(ctx))
		}
	}
}

// await takes the lock of the directory. A controller that is ending may hold it
// for a moment more, and one that was killed leaves it to a child that was just
// about to become something else.
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

// sweep destroys the machines of all runs on record and takes those runs off
// it of which nothing is left.
func sweep(ctx context.Context, c *command, dir runs.Dir) (err error) {
	b, err := backend.Open(backend.Config{Dir: string(dir), Alone: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	records, err := dir.List()
	if err != nil {
		return err
	}
	for _, record := range records {
		machines, err := machinesOf(b, record.Token)
		if err != nil {
			return err
		}
		for _, m := range machines {
			if err := destroy(ctx, b, m); err != nil {
				return err
			}
			fmt.Fprintf(c.out, "destroyed %s, which was %s\n", m.Lease, m.State)
		}
		if err := dir.Forget(record.Run); err != nil {
			return err
		}
	}
	machines, err := b.Provider().List()
	if err != nil {
		return err
	}
	if len(machines) > 0 {
		for _, m := range machines {
			fmt.Fprintf(c.out, "%s is of a run that is not on record\n", m.Lease)
		}
		return fmt.Errorf("localfleet: %d machines are of no run on record and were left alone", len(machines))
	}
	fmt.Fprintf(c.out, "Nothing is left in %s.\n", dir)
	return nil
}

func destroy(ctx context.Context, b *backend.Backend, m process.Machine) error {
	ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
	defer cancel()
	return b.Provider().Destroy(ctx, m.Key)
}

// machinesOf finds the machines of a run by its token, as one has to with a
// provider that keeps labels.
func machinesOf(b *backend.Backend, token string) ([]process.Machine, error) {
	machines, err := b.Provider().List()
	return slices.DeleteFunc(machines, func(m process.Machine) bool { return provisioning.RunToken(m.Key.Run) != token }), err
}

// leftBehind says what earlier runs have left, a line for each.
func leftBehind(b *backend.Backend, dir runs.Dir) ([]string, error) {
	records, err := dir.List()
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, record := range records {
		machines, err := machinesOf(b, record.Token)
		if err != nil {
			return nil, err
		}
		if len(machines) == 0 { // it died before its first create, or was drained and died
			if err := dir.Forget(record.Run); err != nil {
				return nil, err
			}
			continue
		}
		lines = append(lines, fmt.Sprintf("run %s, which began %s and is over, has left %d machines",
			record.Run, record.BeganAt.Local().Format(time.DateTime), len(machines)))
	}
	return lines, nil
}
