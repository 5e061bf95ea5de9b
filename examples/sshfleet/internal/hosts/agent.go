package hosts

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/swactor/provisioning/examples/localfleet/remote"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

// Errors of agents.
var (
	// ErrLost: the claim is not there any more.
	ErrLost = errors.New("sshfleet: the claim is gone")
	// ErrCancelled: the agent of this claim was cancelled, and none is
	// started for it again.
	ErrCancelled = errors.New("sshfleet: the agent was cancelled")
	// ErrVanished: the agent is gone without an exit status.
	ErrVanished = errors.New("sshfleet: the agent has vanished")
)

// MaxSources is how many files may be followed beside the output of the agent:
// the shell has that many descriptors left.
const MaxSources = 5

const firstDescriptor = 5 // of those that are followed

// Agent is what runs under a claim.
type Agent struct {
	Verify  []string // commands that say whether the host is fit
	Command string   // one simple command, in the words of a shell
	Args    []string
	Env     map[string]string
	// Secret gets into a file whose path is in the variable SecretFile.
	Secret     []byte
	SecretFile string
	// Stdout and Stderr are files that are followed beside what the agent
	// prints.
	Stdout, Stderr []string
}

// Start checks the host and starts the agent under a claim, or finds it started:
// then it is neither checked nor started again (B1). It tells each stage before
// it begins. An error is a [*remote.ExitError] if a command failed, [ErrLost] or
// [ErrCancelled]; of any other nobody knows what it leaves behind.
func (p *Pool) Start(ctx context.Context, h *inventory.Host, token string, a Agent, checking, starting func()) error {
	state, err := p.talk(ctx, h, script(h, token, "state", nil), nil)
	if err == nil {
		err = refusal(state, "started", "new")
	}
	if err != nil {
		return err
	}
	if state == "new" {
		checking()
		for i, command := range a.Verify {
			set := variables{"command": command, "environment": exports(a.Env)}
			if _, err := p.talk(ctx, h, script(h, token, "verify", set), nil); err != nil {
				return fmt.Errorf("sshfleet: verify command %d: %w", i+1, err)
			}
		}
	}
	starting()
	state, err = p.talk(ctx, h, script(h, token, "start", variables{"token": string(a.Secret), "run": a.run(h, token)}), nil)
	if err != nil {
		return fmt.Errorf("sshfleet: cannot start the agent: %w", err)
	}
	return refusal(state, "started")
}

// refusal returns nil if a script said one of the words that were hoped for.
func refusal(said string, hopes ...string) error {
	switch {
	case slices.Contains(hopes, said):
		return nil
	case said == "lost":
		return ErrLost
	case said == "cancelled":
		return ErrCancelled
	}
	return unfinished(said, nil)
}

func exports(env map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(env)) {
		fmt.Fprintf(&b, "export %s=%s\n", name, remote.Quote(env[name]))
	}
	return b.String()
}

// run returns the script that becomes the parent of the agent.
func (a *Agent) run(h *inventory.Host, token string) string {
	command := a.Command
	for _, argument := range a.Args {
		command += " " + remote.Quote(argument)
	}
	return beginning(h, token, nil) + exports(a.Env) +
		fmt.Sprintf("export %s=\"$h/token\"\nswactor() { set +u; exec %s; }\n", a.SecretFile, command) + file("run")
}

// Follow hands over what the agent prints, line by line from the first, and
// looks for more at every period. It returns when the agent has ended, with its
// exit status, or the error: [ErrVanished], that of a connection that was cut,
// or that of ctx.
func (p *Pool) Follow(ctx context.Context, h *inventory.Host, token string, a Agent, period time.Duration, stdout, stderr func(string)) (status int, err error) {
	l, err := p.link(ctx, h)
	if err != nil {
		return 0, err
	}
	f := newFrame()
	stdin, end := paced(f.script(script(h, token, "follow", variables{"sources": a.sources()})), period)
	defer end()
	err = l.conn.Lines(ctx, shell, stdin, f.within(stdout), f.within(stderr))
	exit, ended := errors.AsType[*remote.ExitError](err)
	switch {
	case ended && exit.Status == 3:
	case ended:
		return 0, ErrVanished
	default:
		return 0, unfinished("", err)
	}
	said, err := p.talk(ctx, h, script(h, token, "status", nil), nil)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(said)
}

// sources returns the commands that print what is new of the other files.
func (a *Agent) sources() string {
	var b strings.Builder
	n := firstDescriptor
	for i, files := range [][]string{a.Stdout, a.Stderr} {
		to := ""
		if i == 1 {
			to = " >&2"
		}
		for _, name := range files {
			fmt.Fprintf(&b, "if [ -z \"${opened%[1]d:-}\" ] && [ -r %[2]s ]; then exec %[1]d<%[2]s; opened%[1]d=1; fi\n"+
				"[ -z \"${opened%[1]d:-}\" ] || cat <&%[1]d%[3]s\n", n, remote.Quote(name), to)
			n++
		}
	}
	return b.String()
}

// Cancel ends the agent of a claim and sees to it that none is started for it
// again. That there is none, or no claim, is no error (B5).
func (p *Pool) Cancel(ctx context.Context, h *inventory.Host, token string) error {
	said, err := p.talk(ctx, h, script(h, token, "cancel", nil), nil)
	if err != nil || said != "cancelled" {
		return fmt.Errorf("sshfleet: host %s: cannot cancel the agent: %w", h.Name, unfinished(said, err))
	}
	return nil
}
