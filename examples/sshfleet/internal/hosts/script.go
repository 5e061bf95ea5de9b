package hosts

import (
	"context"
	"crypto/rand"
	"embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/swactor/provisioning/examples/localfleet/remote"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

//go:embed scripts
var scriptFiles embed.FS

// shell runs the script that comes in, with its length before it, and leaves
// what follows to the script. So nothing of it stands on a command line, which
// everybody on the host can read, and the shell that the user logs in with need
// not be one for scripts.
const shell = `exec sh -c 'read -r n; s=$(dd bs=1 count="$n" 2>/dev/null); eval "$s"'`

const (
	// pace is how often a script that waits for something looks again. It is
	// told when: a script that nobody waits for any more ends.
	pace = 20 * time.Millisecond
	// maxSaid bounds the lines that are kept of a script.
	maxSaid = 1000
)

// variables are set before a script begins.
type variables map[string]string

// script returns a script of this package after its common beginning.
func script(h *inventory.Host, token, name string, set variables) string {
	return beginning(h, token, set) + file(name)
}

func beginning(h *inventory.Host, token string, set variables) string {
	var b strings.Builder
	fmt.Fprintf(&b, "dir=%s\nt=%s\n", remote.Quote(h.Dir), remote.Quote(token))
	for _, name := range slices.Sorted(maps.Keys(set)) {
		fmt.Fprintf(&b, "%s=%s\n", name, remote.Quote(set[name]))
	}
	return b.String() + file("common")
}

func file(name string) string {
	text, err := scriptFiles.ReadFile("scripts/" + name + ".sh")
	if err != nil {
		panic(err) // it is part of the program
	}
	return string(text)
}

// input is what goes to the shell of a host: a script, then lines. What is cut
// off in the script is not run: braces make it one command.
func input(script string) string {
	script = "{\n" + script + "}"
	return fmt.Sprintf("%d\n%s", len(script), script)
}

// frame is a line that a script prints to both of its outputs before anything else,
// and nobody else does. What comes before it is what the shell of the user prints
// at each login.
type frame string

func newFrame() frame { return frame("swactor-" + rand.Text()) }

func (f frame) script(text string) string {
	return fmt.Sprintf("printf '\\n%%s\\n' %[1]s; printf '\\n%%s\\n' %[1]s >&2\n%[2]s", f, text)
}

// within hands over the lines after the mark.
func (f frame) within(line func(string)) func(string) {
	begun := false
	return func(text string) {
		if begun {
			line(text)
		}
		begun = begun || text == string(f)
	}
}

// failure leaves of what a script that failed has said what comes after the mark.
func (f frame) failure(err error) error {
	if exit, ok := errors.AsType[*remote.ExitError](err); ok {
		if _, said, framed := strings.Cut(exit.Stderr, string(f)); framed {
			exit.Stderr = strings.TrimSpace(said)
		}
	}
	return err
}

// talk runs a script to its end and returns what it said. Lines that are
// questions are handed to ask, which says whether they are and what to answer;
// what is said there is left out. A nil ask answers nothing but ticks.
//
// Errors are those of [remote.Conn.Run], and those of connecting.
func (p *Pool) talk(ctx context.Context, h *inventory.Host, script string, ask func(line string) (answer string, asked bool)) (said string, err error) {
	l, err := p.link(ctx, h)
	if err != nil {
		return "", err
	}
	select {
	case l.scripts <- struct{}{}:
		defer func() { <-l.scripts }()
	case <-ctx.Done():
		return "", ctx.Err()
	}
	out, in := io.Pipe()
	defer out.Close()
	f := newFrame()
	go io.WriteString(in, input(f.script(script))) // ends at the latest with the pipe, as the answers do
	var mu sync.Mutex
	var lines []string
	err = l.conn.Lines(ctx, shell, out, f.within(func(line string) {
		if ask != nil {
			if answer, asked := ask(line); asked {
				io.WriteString(in, answer)
				return
			}
		}
		if line == "tick" {
			select {
			case <-time.After(pace):
				io.WriteString(in, "\n")
			case <-ctx.Done():
			}
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if len(lines) < maxSaid {
			lines = append(lines, line)
		}
	}), nil)
	mu.Lock()
	defer mu.Unlock()
	return strings.Join(lines, "\n"), f.failure(err)
}

// unfinished returns why a script did not come to its end. It is never nil.
func unfinished(said string, err error) error {
	if err == nil {
		err = fmt.Errorf("the script said %q", said)
	}
	return err
}

// paced returns an input of a script and then a line at every pace, until it is
// ended.
func paced(script string, pace time.Duration) (stdin io.Reader, end func()) {
	out, in := io.Pipe()
	go func() {
		ticker := time.NewTicker(pace)
		defer ticker.Stop()
		for text := input(script); ; text = "\n" {
			if _, err := io.WriteString(in, text); err != nil {
				return // ended
			}
			<-ticker.C
		}
	}()
	return out, func() { out.Close() }
}
