// Package child is what this program is when it is not the controller: it runs
// itself again as a machine, and machines run it as their agent. The tests of
// every package that starts machines do the same with the test program.
package child

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/swactor/provisioning/examples/localfleet/agent"
	"github.com/swactor/provisioning/examples/localfleet/internal/machine"
)

// Main runs the hidden sub-command that args (as in [os.Args]) name and
// returns the exit status. It is false, and does nothing, if they name none.
func Main(args []string) (status int, ok bool) {
	switch {
	case len(args) == 3 && args[1] == machine.Command:
		log.SetFlags(log.LstdFlags | log.Lmicroseconds)
		log.Print(machine.Run(machine.Dir(args[2]))) // a machine ends by being killed
		return 1, true
	case len(args) >= 2 && args[1] == agent.Command:
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		return agent.Main(ctx, args[2:], os.Getenv, os.Stdout, os.Stderr), true
	}
	return 0, false
}
