//go:build linux

package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/leftover"
	"github.com/swactor/provisioning/examples/localfleet/shapefile"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

func TestMain(m *testing.M) { os.Exit(leftover.Run(m)) }

func readme(t *testing.T) string {
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	return string(text)
}

// The reference of the shape file names every field there is.
func TestReadmeNamesEveryField(t *testing.T) {
	text := readme(t)
	var walk func(reflect.Type, string)
	walk = func(typ reflect.Type, prefix string) {
		for i := range typ.NumField() {
			field := typ.Field(i)
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			switch {
			case prefix+name == "runId": // which a file may not name
			case field.Type.Kind() == reflect.Struct:
				walk(field.Type, prefix+name+".")
			default:
				require.Contains(t, text, "`"+prefix+name+"`")
			}
		}
	}
	walk(reflect.TypeFor[provisioning.NodeGroupSpec](), "")
}

// The example files are read without a fault, but for keys that nobody has.
func TestExampleFiles(t *testing.T) {
	_, err := shapefile.Read("fleet.yaml")
	require.NoError(t, err)
	_, err = inventory.Read("hosts.yaml")
	refused, ok := err.(*shapefile.Error)
	require.True(t, ok, "%v", err)
	for _, fault := range refused.Faults {
		require.Contains(t, fault.Problem, "no such file", "%v", fault)
	}
}

// The walk of the README is run as it stands. Only the build has to find its
// source, because it must not leave anything in it.
func TestReadmeWalk(t *testing.T) {
	source, err := os.Getwd()
	require.NoError(t, err)
	walk, rest, found := strings.Cut(readme(t), "\n## In earnest\n")
	require.True(t, found)
	require.NotContains(t, rest, "```sh\n")
	script := "set -eu\n"
	for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(walk, -1) {
		script += block[1]
	}
	build, enter := "go build -o sshfleet .\n", "cd examples/sshfleet\n"
	require.Contains(t, script, enter+build)
	script = strings.Replace(script, build, "go build -C '"+source+"' -o \"$PWD/sshfleet\" .\n", 1)

	dir, err := os.MkdirTemp("", "w") // shorter than t.TempDir: the path of a socket
	require.NoError(t, err)
	here := filepath.Join(dir, "examples", "sshfleet")
	require.NoError(t, os.MkdirAll(here, 0o700))
	for _, name := range []string{"playground.sh", "fleet.yaml"} {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(here, name), text, 0o700))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", script)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "PORT="+freePorts(t), "GOFLAGS=")
	// A group of its own, to be ended as a whole.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	t.Cleanup(func() { // after a failure
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		exec.Command(filepath.Join(here, "playground.sh"), "stop").Run()
		killIn(here)
		os.RemoveAll(dir)
	})
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	require.NoError(t, err)
	for _, line := range []string{
		`(?m)^host4 +none$`,
		`converged, 3 of 3 ready`,
		`(?m)^host[1-3] +held +trainer-0 +1 .* the controller that runs here$`,
		`generation 2: converged, 2 of 2 ready`,
		`(?m)^Nothing of .sshfleet is left on the hosts.$`,
		`(?m)^host[1-4] +held +worker-0 .* a run of here that is over; sshfleet drain -hosts playground/hosts.yaml ends it$`,
		`(?m)^host[1-3] +held +trainer-0 +1 .* nobody here remembers it; sshfleet release -hosts playground/hosts.yaml host[1-3] k[a-z2-7]{26} ends it$`,
		`(?m)^released: host[1-3] has a claim of trainer-0, attempt 1`,
		`(?m)^released: host[1-4] has a claim of worker-0`,
		`(?s)host1 +none\nhost2 +none\nhost3 +none\nhost4 +none\n$`,
	} {
		require.Regexp(t, line, string(out))
	}
	left, err := os.ReadDir(here)
	require.NoError(t, err)
	require.Len(t, left, 2, "what was there before")
}

// killIn kills the processes that work in a directory.
func killIn(dir string) {
	places, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, place := range places {
		if at, err := os.Readlink(place); err == nil && strings.HasPrefix(at, dir) {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(place))); err == nil {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
}

// freePorts returns the first of four ports in a row that are free at this
// moment.
func freePorts(t *testing.T) string {
	for first := 20000; first < 30000; first += 4 {
		free := true
		for i := range 4 {
			l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(first+i)))
			if err != nil {
				free = false
				break
			}
			require.NoError(t, l.Close())
		}
		if free {
			return strconv.Itoa(first)
		}
	}
	require.Fail(t, "no free ports")
	return ""
}
