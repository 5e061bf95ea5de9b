//go:build unix

// Command processes is a complete backend in small: it rents child processes,
// lets one be killed, sees it replaced, and gives everything back.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/swactor/provisioning"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == machineArgument {
		if err := playMachine(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if status, end := arguments(os.Args[1:], os.Stderr); end {
		os.Exit(status)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	err := run(ctx, os.Stdout)
	cancel()
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

const usage = `usage: processes

Rents three child processes, kills one, sees it replaced, and gives everything
back.

Exit status: 0 if everything it tells was true, 1 if something was not, 2 if it
was called wrongly.
`

// arguments judges the command line. There is nothing to choose, so either the
// story begins or this is the end.
func arguments(args []string, stderr io.Writer) (status int, end bool) {
	flags := flag.NewFlagSet("processes", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() { fmt.Fprint(stderr, usage) }
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0, true
	case err != nil:
		return 2, true
	case flags.NArg() > 0:
		fmt.Fprintf(stderr, "processes: takes no arguments, not %q\n", flags.Arg(0))
		return 2, true
	}
	return 0, false
}

const (
	nodes  = 3
	victim = provisioning.LogicalNodeID("worker-1")
)

// run returns nil only if everything it tells was true.
func run(ctx context.Context, out io.Writer) (err error) {
	b, err := newBackend()
	if err != nil {
		return err
	}
	// Also when the story went wrong no process is left, and not when ctx is
	// what ended it.
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		err = errors.Join(err, b.close(ctx))
	}()

	// 1. The wish, and what happens on the way to it.
	say := log.New(out, "", log.Lmicroseconds).Printf // also from OnEvent, at the same time
	began, ready := time.Now(), make(chan provisioning.NodeAttemptID, 2)
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape: provisioning.ClusterShape{
			RunID:      provisioning.RunID("processes-" + strings.ToLower(rand.Text()[:8])), // never one that was used before
			Generation: 1,
			Groups: []provisioning.NodeGroupSpec{{
				GroupID: "worker", Count: nodes, Provider: "processes",
				SwarmJoin: provisioning.SwarmJoinTemplate{OrchSwactorAddr: b.home.Addr().String()},
			}},
		},
		Backend: b,
		Retry: provisioning.RetryPolicy{
			InitialDelay: 200 * time.Millisecond, MaxDelay: time.Second,
			EndpointProbeInterval: 20 * time.Millisecond, OperationTimeout: 10 * time.Second,
		},
		OnEvent: func(e provisioning.Event) {
			switch e.Kind {
			case provisioning.EventAttemptStarted, provisioning.EventReady, provisioning.EventAttemptFailed,
				provisioning.EventDestroyed, provisioning.EventReaped:
				say("%v", e)
			}
			if e.Kind == provisioning.EventReady && e.Node == victim {
				select {
				case ready <- e.Attempt:
				default: // more often than the story has it, which shows in the end
				}
			}
		},
	})
	if err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		if err := host.Run(ctx); err != nil {
			fail(err) // whoever waits below would wait for nothing
		}
	})
	defer func() {
		// No call of the backend runs any more when it is closed.
		_, closeErr := host.Close(context.WithoutCancel(ctx))
		running.Wait()
		fail(nil)
		err = errors.Join(err, closeErr)
	}()

	if err := host.WaitConverged(ctx, 1); err != nil {
		return fmt.Errorf("processes: never converged: %w", err)
	}
	before := b.pids()
	say("Ready: %d nodes, in the processes %v.", len(before), before)
	if len(before) != nodes {
		return fmt.Errorf("processes: %d processes for %d nodes", len(before), nodes)
	}

	// 2. One dies, and is replaced under another key.
	say("Killing process %d, which is %s.", before[victim], victim)
	if err := syscall.Kill(before[victim], syscall.SIGKILL); err != nil {
		return err
	}
	first := <-ready
	select {
	case second := <-ready:
		say("%s is ready again as attempt %d, which was attempt %d.", victim, second, first)
	case <-ctx.Done():
		return fmt.Errorf("processes: never healed: %w", context.Cause(ctx))
	}
	if err := host.WaitConverged(ctx, 1); err != nil {
		return fmt.Errorf("processes: never healed: %w", err)
	}
	after := b.pids()
	say("Healed: %d nodes, in the processes %v.", len(after), after)
	for node, pid := range before {
		if replaced := after[node] != pid; len(after) != nodes || replaced != (node == victim) {
			return fmt.Errorf("processes: %v became %v", before, after)
		}
	}

	// 3. Nothing is wished for, and nothing is left.
	if err := host.Drain(ctx); err != nil {
		return fmt.Errorf("processes: never drained: %w", err)
	}
	if held, err := host.Close(ctx); err != nil || len(held) > 0 {
		return fmt.Errorf("processes: still held: %v (%w)", held, err)
	}
	for _, pid := range []int{before["worker-0"], before["worker-1"], before["worker-2"], after[victim]} {
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("processes: process %d is still there (%v)", pid, err)
		}
	}
	say("Drained: 4 processes were started, 1 was killed and replaced, none is left. It took %.1f s.", time.Since(began).Seconds())
	return nil
}
