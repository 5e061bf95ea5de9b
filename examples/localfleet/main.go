// Command localfleet provisions real things over the transport that real
// fleets use: its machines are processes of this computer, reached over SSH.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/swactor/provisioning/examples/localfleet/driving"
	"github.com/swactor/provisioning/examples/localfleet/internal/child"
	"github.com/swactor/provisioning/examples/localfleet/view"
)

const usage = `usage: localfleet COMMAND [flags]

  up -shape FILE    drive a fleet until interrupted
  plan              print what the next pass would do, and why
  status            print what every slot does, and why
  explain SLOT      print all there is to say about one slot
  drain             give everything back, also what earlier runs have left
  chaos             kill machines, agents and connections for a while

All take -dir DIR, where the fleet lives; "localfleet COMMAND -h" lists more.

Exit status: 0 if it was done, 1 if not, 2 if it was asked in a wrong way.
`

// Exit statuses.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
	exitAtOnce = driving.ExitAtOnce
)

// defaultDir is short, because the path of a Unix socket has to be.
const defaultDir = ".localfleet"

func main() {
	if status, ok := child.Main(os.Args); ok { // a machine, or an agent
		os.Exit(status)
	}
	interrupts := make(chan os.Signal, 2)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM)
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr, interrupts))
}

// command is one run of this program.
type command struct {
	flags      *flag.FlagSet
	dir        string
	out        *os.File
	errs       io.Writer
	interrupts <-chan os.Signal
}

// errUsage is reported already.
var errUsage = errors.New("wrong usage")

func run(args []string, out *os.File, errs io.Writer, interrupts <-chan os.Signal) int {
	commands := map[string]func(*command, []string) error{
		"up": up, "plan": plan, "status": showStatus, "explain": explain, "drain": drain, "chaos": makeChaos,
	}
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	do := commands[name]
	if do == nil {
		fmt.Fprint(errs, usage)
		if name == "help" || name == "-h" || name == "-help" || name == "--help" {
			return exitOK
		}
		return exitUsage
	}
	c := &command{flags: flag.NewFlagSet("localfleet "+name, flag.ContinueOnError), out: out, errs: errs, interrupts: interrupts}
	c.flags.SetOutput(errs)
	c.flags.StringVar(&c.dir, "dir", defaultDir, "where the fleet lives")
	switch err := do(c, args[1:]); {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return exitOK
	case errors.Is(err, errUsage):
		return exitUsage
	default:
		fmt.Fprintln(errs, view.Printable(err.Error()))
		return exitFailed
	}
}

// parse parses flags and n arguments, which may stand before or after them.
func (c *command) parse(args []string, n int) ([]string, error) {
	var rest []string
	for {
		if err := c.flags.Parse(args); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				return nil, err
			}
			return nil, errUsage
		}
		if args = c.flags.Args(); len(args) == 0 {
			break
		}
		rest, args = append(rest, args[0]), args[1:]
	}
	if len(rest) != n {
		fmt.Fprintf(c.errs, "%s: %d arguments, must be %d\n", c.flags.Name(), len(rest), n)
		c.flags.Usage()
		return nil, errUsage
	}
	return rest, nil
}

// context returns a context that the first interrupt ends.
func (c *command) context() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() {
		select {
		case s := <-c.interrupts:
			cancel(fmt.Errorf("localfleet: %v", s))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}
