package hosts

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

// The scripts alone, under the shells of this computer.

// here is a host that is this computer, with a home and a shell of its own.
type here struct {
	t           *testing.T
	environment []string
	home        string
	host        *inventory.Host
}

// inEveryShell runs a test with each shell there is as the sh of the host.
func inEveryShell(t *testing.T, test func(*testing.T, *here)) {
	t.Parallel()
	for _, shell := range []string{"sh", "dash", "bash", "busybox", "mksh", "ksh"} {
		path, err := exec.LookPath(shell)
		if err != nil {
			continue // all hosts have sh
		}
		t.Run(shell, func(t *testing.T) {
			bin := t.TempDir()
			require.NoError(t, os.Symlink(path, filepath.Join(bin, "sh")))
			h := &here{t: t, home: t.TempDir(), host: &inventory.Host{Name: "here", Dir: inventory.DefaultDir}}
			h.environment = append(os.Environ(), "HOME="+h.home, "PATH="+bin+":"+os.Getenv("PATH"))
			test(t, h)
		})
	}
}

func (h *here) command() *exec.Cmd {
	cmd := exec.Command("/bin/sh", "-c", shell) // which becomes that of the path
	cmd.Env = h.environment
	return cmd
}

// shell returns a command that runs a script as a host does, with lines after it.
func (h *here) shell(name, token string, set variables, lines string) *exec.Cmd {
	cmd := h.command()
	cmd.Stdin = strings.NewReader(input(script(h.host, token, name, set)) + lines)
	return cmd
}

func (h *here) run(name, token string, set variables, lines string) string {
	h.t.Helper()
	cmd := h.shell(name, token, set, lines)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	require.NoError(h.t, err, errs.String())
	return string(out)
}

func (h *here) claim(token, answer string) string {
	h.t.Helper()
	return h.run("claim", token, variables{"about": "{}", "cleanup": ""}, answer)
}

func (h *here) claims() []string {
	h.t.Helper()
	found, err := filepath.Glob(filepath.Join(h.home, h.host.Dir, "claims", "*"))
	require.NoError(h.t, err)
	return found
}

func TestClaimAsksBack(t *testing.T) {
	inEveryShell(t, func(t *testing.T, h *here) {
		require.Equal(t, "ready\nfenced\n", h.claim("t1", ""))
		require.Equal(t, "ready\nfenced\n", h.claim("t1", "no\n"))
		require.Empty(t, h.claims())
		require.Equal(t, "ready\nheld\n", h.claim("t1", "go\n"))
		require.Equal(t, "held\n", h.claim("t1", "go\n"))
		require.Equal(t, "busy t1\n", h.claim("t2", "go\n"))
		require.Len(t, h.claims(), 1)
	})
}

// Whoever asks back when nobody listens any more leaves nothing.
func TestClaimWithoutAListener(t *testing.T) {
	inEveryShell(t, func(t *testing.T, h *here) {
		cmd := h.shell("claim", "t1", variables{"about": "{}", "cleanup": ""}, "")
		unheard, out, err := os.Pipe()
		require.NoError(t, err)
		require.NoError(t, unheard.Close())
		cmd.Stdout = out
		require.ErrorContains(t, cmd.Run(), "exit status 1", "it ends by itself")
		require.NoError(t, out.Close())
		require.Empty(t, h.claims())
	})
}

// A script that is cut off before its end does nothing.
func TestScriptThatIsCutOff(t *testing.T) {
	inEveryShell(t, func(t *testing.T, h *here) {
		whole := input(script(h.host, "t1", "claim", variables{"about": "{}", "cleanup": ""}))
		for _, length := range []int{len(whole) - 1, len(whole) / 2, len(whole) - 100} {
			cmd := h.command()
			cmd.Stdin = strings.NewReader(whole[:length])
			out, err := cmd.Output()
			require.Error(t, err)
			require.Empty(t, out)
			require.NoDirExists(t, filepath.Join(h.home, h.host.Dir))
		}
	})
}

// A look comes between the question and the answer: the answer is of no use any
// more.
func TestLookFencesATry(t *testing.T) {
	inEveryShell(t, func(t *testing.T, h *here) {
		cmd := h.shell("claim", "t1", variables{"about": "{}", "cleanup": ""}, "")
		text := make([]byte, 100)
		all := cmd.Stdin
		cmd.Stdin = nil
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		_, err = io.Copy(in, all)
		require.NoError(t, err)
		n, err := out.Read(text)
		require.NoError(t, err)
		require.Equal(t, "ready\n", string(text[:n]))

		require.Equal(t, "busy t1\n", h.claim("t2", "go\n"), "who tries is to be reckoned with")
		require.Equal(t, "absent\n", h.run("look", "t1", nil, ""))
		_, err = in.Write([]byte("go\n"))
		require.NoError(t, err)
		n, err = out.Read(text)
		require.NoError(t, err)
		require.Equal(t, "fenced\n", string(text[:n]))
		require.NoError(t, cmd.Wait())
		require.Empty(t, h.claims())
	})
}

// What cannot be read is not nothing: no script goes on there.
func TestUnreadable(t *testing.T) {
	inEveryShell(t, func(t *testing.T, h *here) {
		dir := filepath.Join(h.home, h.host.Dir)
		for _, bad := range []string{dir, filepath.Join(dir, "claims"), filepath.Join(dir, "spent"), filepath.Join(dir, "claims", "t1")} {
			require.NoError(t, os.MkdirAll(filepath.Dir(bad), 0o700))
			require.NoError(t, os.Symlink("nowhere", bad))
			for _, name := range []string{"claim", "look", "end", "list"} {
				if name == "list" && strings.HasSuffix(bad, "t1") {
					continue // it is no directory, so nobody's claim
				}
				cmd := h.shell(name, "t1", variables{"about": "{}", "cleanup": "", "clean": "yes", "bury": "no"}, "go\n")
				out, err := cmd.Output()
				require.Error(t, err, "%s: %s", name, bad)
				require.Empty(t, out)
				exit, ok := err.(*exec.ExitError)
				require.True(t, ok)
				require.Contains(t, string(exit.Stderr), "cannot read "+bad)
			}
			require.NoError(t, os.RemoveAll(dir))
		}
	})
}

// What a shell that was killed has left is in nobody's way.
func TestClaimPassesTheDead(t *testing.T) {
	inEveryShell(t, func(t *testing.T, h *here) {
		dead := exec.Command("true")
		require.NoError(t, dead.Run())
		tries := []string{strconv.Itoa(dead.Process.Pid) + ".1"}
		if _, err := os.Stat("/proc/self/stat"); err == nil { // its number is another one's by now
			tries = append(tries, strconv.Itoa(os.Getpid())+".1")
		}
		for _, try := range tries {
			require.NoError(t, os.MkdirAll(filepath.Join(h.home, h.host.Dir, "claims", "t1", "try."+try), 0o700))
		}
		require.Equal(t, "ready\nheld\n", h.claim("t2", "go\n"))
		require.Equal(t, []string{filepath.Join(h.home, h.host.Dir, "claims", "t2")}, h.claims())
	})
}

// A token has one claim in its life.
func TestClaimIsSpent(t *testing.T) {
	inEveryShell(t, func(t *testing.T, h *here) {
		require.Equal(t, "ready\nheld\n", h.claim("t1", "go\n"))
		h.run("end", "t1", variables{"clean": "yes", "bury": "no"}, strings.Repeat("\n", 10))
		require.Empty(t, h.claims())
		require.Equal(t, "spent\n", h.run("look", "t1", nil, ""))
		require.Equal(t, "spent\n", h.claim("t1", "go\n"))
		require.Empty(t, h.claims())
		require.Equal(t, "ready\nheld\n", h.claim("t2", "go\n"))
		require.Contains(t, h.run("list", "", nil, ""), "t2 held {}\n")
	})
}
