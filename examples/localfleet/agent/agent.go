// Package agent is the swactor of this fleet: the process that runs on every
// node and joins the swarm. It does nothing else.
package agent

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/join"
)

// Command is the sub-command under which a program is an agent.
const Command = "agent"

// What an agent is told through its environment. The join token is in a file,
// because environments are shown to everybody who asks.
const (
	Run       = "SWACTOR_RUN"
	Node      = "SWACTOR_NODE"
	Attempt   = "SWACTOR_ATTEMPT"
	Address   = "SWACTOR_ORCH_ADDR" // of the controller
	TokenFile = "SWACTOR_JOIN_TOKEN_FILE"
)

// Exit statuses of an agent.
const (
	ExitOK      = 0 // told to stop
	ExitUsage   = 2 // started with a bad environment
	ExitRefused = 3 // turned away before it had ever joined
)

const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = 2 * time.Second
)

// Main joins, sends heartbeats, and joins again whenever the connection is
// cut, until ctx is done. It returns the exit status of the process. What it was
// started with beside its environment it only shows.
func Main(ctx context.Context, arguments []string, getenv func(string) string, stdout, stderr io.Writer) int {
	id, err := identity(getenv)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return ExitUsage
	}
	address := getenv(Address)
	fmt.Fprintf(stdout, "%s of %s, attempt %d, arguments %q, joins at %s\n", id.Swactor, id.Key.Node, id.Key.Attempt, arguments, address)
	ever, wait := false, firstRetry
	for {
		err := join.Keep(ctx, address, id, func() {
			fmt.Fprintln(stdout, "joined")
			ever, wait = true, firstRetry
		})
		if ctx.Err() != nil {
			fmt.Fprintln(stdout, "stopped")
			return ExitOK
		}
		fmt.Fprintln(stderr, err)
		// Once it has joined, a refusal may be that of a controller that
		// has just come back and does not know its nodes yet.
		if errors.Is(err, join.ErrRefused) && !ever {
			return ExitRefused
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		wait = min(2*wait, lastRetry)
	}
}

func identity(getenv func(string) string) (join.Identity, error) {
	attempt, err := strconv.ParseUint(getenv(Attempt), 10, 64)
	if err != nil {
		return join.Identity{}, fmt.Errorf("fleet: %s: %w", Attempt, err)
	}
	token, err := os.ReadFile(getenv(TokenFile))
	if err != nil {
		return join.Identity{}, fmt.Errorf("fleet: %s: %w", TokenFile, err)
	}
	return join.Identity{
		Key: provisioning.ExternalKey{
			Run: provisioning.RunID(getenv(Run)), Node: provisioning.LogicalNodeID(getenv(Node)), Attempt: provisioning.NodeAttemptID(attempt),
		},
		Swactor: provisioning.SwactorID("swactor-" + strings.ToLower(rand.Text()[:12])),
		Token:   bytes.TrimSpace(token),
	}, nil
}
