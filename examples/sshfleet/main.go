// Command sshfleet turns hosts that one has already into a fleet: it claims
// them, starts agents on them over OpenSSH, and gives them back as they were.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"github.com/swactor/provisioning/examples/localfleet/agent"
	"github.com/swactor/provisioning/examples/localfleet/driving"
	"github.com/swactor/provisioning/examples/localfleet/remote"
	"github.com/swactor/provisioning/examples/localfleet/view"
)

const usage = `usage: sshfleet COMMAND [flags]

  up -hosts FILE -shape FILE   drive a fleet until interrupted
  plan                         print what the next pass would do, and why
  status                       print what every slot does, and why
  explain SLOT                 print all there is to say about one slot
  drain                        give everything back, also what earlier runs have left
  claims                       list the claims on all hosts, and whose they are
  release HOST TOKEN           end a claim that nobody remembers
  agent                        be the agent of a host

All but agent take -dir DIR, what the controller remembers; "sshfleet COMMAND -h"
lists more.

Exit status: 0 if it was done, 1 if not, 2 if it was asked in a wrong way.
`

// Exit statuses.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
	exitAtOnce = driving.ExitAtOnce
)

// Defaults of flags. That of the directory is short, because the path of a Unix
// socket has to be.
const (
	defaultDir   = ".sshfleet"
	defaultHosts = "hosts.yaml"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == agent.Command {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		os.Exit(agent.Main(ctx, os.Args[2:], os.Getenv, os.Stdout, os.Stderr))
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
		"up": up, "plan": plan, "status": showStatus, "explain": explain, "drain": drain, "claims": listClaims, "release": release,
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
	c := &command{flags: flag.NewFlagSet("sshfleet "+name, flag.ContinueOnError), out: out, errs: errs, interrupts: interrupts}
	c.flags.SetOutput(errs)
	c.flags.StringVar(&c.dir, "dir", defaultDir, "what the controller remembers")
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

// inventory adds the flag of the inventory.
func (c *command) inventory() *string {
	return c.flags.String("hosts", defaultHosts, "the `FILE` with the inventory, YAML or .json")
}

// hint returns a command for people to paste: with the flags that are not those
// by default.
func (c *command) hint(name, hostFile string, args ...string) string {
	words := []string{"sshfleet", name}
	if c.dir != defaultDir {
		words = append(words, "-dir", c.dir)
	}
	if hostFile != "" && hostFile != defaultHosts {
		words = append(words, "-hosts", hostFile)
	}
	words = append(words, args...)
	for i, word := range words {
		if !plainWord.MatchString(word) {
			words[i] = remote.Quote(word)
		}
	}
	return strings.Join(words, " ")
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_./:-]+$`)

// context returns a context that the first interrupt ends.
func (c *command) context() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() {
		select {
		case s := <-c.interrupts:
			cancel(fmt.Errorf("sshfleet: %v", s))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}
