// Package chaos breaks what a fleet is made of, for real and one thing at a
// time, to see it heal.
package chaos

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/internal/backend"
	"github.com/swactor/provisioning/examples/localfleet/internal/bootstrap"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
	"github.com/swactor/provisioning/examples/localfleet/internal/process"
)

// Kind is what is broken.
type Kind string

// The kinds.
const (
	Machine    Kind = "machine"    // SIGKILL to all processes of one
	Agent      Kind = "agent"      // SIGKILL to the agent alone
	Connection Kind = "connection" // cut: the agent's to the controller, and the controller's over SSH
)

// Kinds returns all kinds.
func Kinds() []Kind { return []Kind{Machine, Agent, Connection} }

// ErrNothing: there is nothing of that kind to break at the moment.
var ErrNothing = errors.New("localfleet: there is nothing of that kind to break")

// Break breaks one thing of a run, chosen by pick among those there are, and
// says what it was.
func Break(b *backend.Backend, run provisioning.RunID, kind Kind, pick uint64) (string, error) {
	if !slices.Contains(Kinds(), kind) {
		return "", fmt.Errorf("localfleet: cannot break a %q, only %v", kind, Kinds())
	}
	machines, err := b.Provider().List()
	if err != nil {
		return "", err
	}
	machines = slices.DeleteFunc(machines, func(m process.Machine) bool {
		return m.Key.Run != run || m.State != process.Running
	})
	// From the picked one on, until one has what is to be broken.
	for i := range machines {
		m := machines[(pick%uint64(len(machines))+uint64(i))%uint64(len(machines))]
		what, err := breakOne(b, m, kind)
		if what != "" || err != nil {
			return what, err
		}
	}
	return "", ErrNothing
}

// breakOne says what it broke, "" if there was nothing.
func breakOne(b *backend.Backend, m process.Machine, kind Kind) (string, error) {
	name := fmt.Sprintf("%s #%d", m.Key.Node, m.Key.Attempt)
	switch kind {
	case Machine:
		group, err := osproc.Members(m.PID, m.Key.Token())
		if err != nil || len(group.Ours) == 0 { // a number that came round is a stranger's
			return "", err
		}
		return fmt.Sprintf("killed the machine of %s, process group %d", name, m.PID), osproc.KillGroup(m.PID)
	case Agent:
		pid, err := agentOf(m)
		if err != nil || pid == 0 {
			return "", err
		}
		return fmt.Sprintf("killed the agent of %s, process %d", name, pid), osproc.Kill(pid)
	}
	if b.Cut(m.Key) {
		return "cut the connection to " + name, nil
	}
	return "", nil
}

// agentOf returns the process of the agent of a machine, 0 if none runs.
func agentOf(m process.Machine) (int, error) {
	text, err := os.ReadFile(filepath.Join(m.Dir.Home(), ".swactor", string(bootstrap.Session(m.Key)), "pid"))
	if err != nil {
		return 0, nil // not started yet, or gone meanwhile
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("localfleet: pid of the agent of %s: %w", m.Lease, err)
	}
	group, err := osproc.Members(m.PID, m.Key.Token())
	if err != nil || !slices.Contains(group.Ours, pid) {
		return 0, err
	}
	return pid, nil
}
