//go:build linux

// Package sshd runs OpenSSH's own server for tests: ordinary processes on ports
// of the loopback, each with its own configuration, keys and directories.
package sshd

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

// Program is OpenSSH's server. It insists on being called by its whole path.
const Program = "/usr/sbin/sshd"

// patience is much longer than anything takes, on a slow computer too.
const patience = 30 * time.Second

// Server is one server, which plays a host. It is gone when its test ends.
type Server struct {
	t    testing.TB
	dir  string
	name string
	port int
	user string
	cmd  *exec.Cmd // nil while it is stopped
	done chan error
}

// Start starts a server under a name.
func Start(t testing.TB, name string) *Server {
	t.Helper()
	_, err := os.Stat(Program)
	require.NoError(t, err, "the tests need OpenSSH's server: install Debian's package openssh-server")
	if os.Geteuid() == 0 { // where it puts the processes that it does not trust
		require.NoError(t, os.MkdirAll("/run/sshd", 0o755))
	}
	me, err := user.Current()
	require.NoError(t, err)
	s := &Server{t: t, dir: t.TempDir(), name: name, user: me.Username}
	require.NoError(t, os.Mkdir(s.Home(), 0o700))
	require.NoError(t, os.Mkdir(s.path("bin"), 0o700))
	s.NewHostKey()
	s.keyFile("user_key")
	public, err := os.ReadFile(s.path("user_key.pub"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(s.path("authorized_keys"), public, 0o600))
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(s.path("log"))
			t.Logf("sshd %s:\n%s", s.name, log)
		}
		s.Stop()
		s.clear()
	})
	s.Start()
	return s
}

// clear sees to it that nothing goes on that was started on the host. After a test
// that has not failed there is nothing, or only what is just about to end.
func (s *Server) clear() {
	end := time.Now().Add(patience)
	for {
		left := s.Processes()
		switch {
		case len(left) == 0:
			return
		case s.t.Failed():
			for _, pid := range left {
				syscall.Kill(pid, syscall.SIGKILL) // it may have ended
			}
		case time.Now().After(end):
			s.t.Errorf("host %s still runs processes %v", s.name, left)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Processes returns whatever was started on the host and goes on: it has the home
// directory of the host.
func (s *Server) Processes() []int {
	var found []int
	names, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(s.t, err)
	for _, name := range names {
		environ, err := os.ReadFile(name)
		if err == nil && strings.Contains("\x00"+string(environ), "\x00HOME="+s.Home()+"\x00") {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			require.NoError(s.t, err)
			found = append(found, pid)
		}
	}
	return found
}

func (s *Server) path(name string) string { return filepath.Join(s.dir, name) }

// keyFile makes a pair of keys.
func (s *Server) keyFile(name string) {
	s.t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(s.t, err)
	block, err := ssh.MarshalPrivateKey(private, "")
	require.NoError(s.t, err)
	shown, err := ssh.NewPublicKey(public)
	require.NoError(s.t, err)
	require.NoError(s.t, os.WriteFile(s.path(name), pem.EncodeToMemory(block), 0o600))
	require.NoError(s.t, os.WriteFile(s.path(name+".pub"), ssh.MarshalAuthorizedKey(shown), 0o600))
}

// NewHostKey gives the server another key to show, from its next start on.
func (s *Server) NewHostKey() { s.keyFile("host_key") }

// Refuse has the server let nobody in any more.
func (s *Server) Refuse() {
	s.t.Helper()
	require.NoError(s.t, os.WriteFile(s.path("authorized_keys"), nil, 0o600))
}

// Start starts the server at the port that it had before, if it had one.
func (s *Server) Start() {
	s.t.Helper()
	port := s.port
	for end := time.Now().Add(patience); ; {
		if s.port = port; port == 0 { // free at this moment, which may pass
			s.port = freePort(s.t)
		}
		if s.try() {
			return
		}
		require.True(s.t, time.Now().Before(end), "sshd does not start")
	}
}

func freePort(t testing.TB) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// try is false if the server ended instead of answering.
func (s *Server) try() bool {
	s.t.Helper()
	require.NoError(s.t, os.WriteFile(s.path("config"), []byte(fmt.Sprintf(`ListenAddress 127.0.0.1:%d
HostKey %s
AuthorizedKeysFile %s
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
LogLevel VERBOSE
SetEnv HOME=%s PATH=%s:/usr/local/bin:/usr/bin:/bin
`, s.port, s.path("host_key"), s.path("authorized_keys"), s.Home(), s.path("bin"))), 0o600))
	log, err := os.OpenFile(s.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(s.t, err)
	defer log.Close()
	cmd := exec.Command(Program, "-D", "-e", "-f", s.path("config"))
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // of a test that was killed
	require.NoError(s.t, cmd.Start())
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	s.cmd, s.done = cmd, done
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		conn, err := net.Dial("tcp", s.address())
		if err == nil {
			conn.Close()
			return true
		}
		select {
		case <-done:
			s.cmd = nil
			return false
		default:
		}
		require.True(s.t, time.Now().Before(end), "sshd does not listen: %v", err)
	}
}

func (s *Server) address() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// Stop kills the server and all of its connections. What they have started in
// the background goes on.
func (s *Server) Stop() {
	s.t.Helper()
	if s.cmd == nil {
		return
	}
	s.signal(syscall.SIGSTOP) // so that it makes no more children
	s.signalConnections(syscall.SIGKILL)
	s.signal(syscall.SIGKILL)
	<-s.done
	s.cmd = nil
}

// Cut kills the connections and leaves the server.
func (s *Server) Cut() { s.signalConnections(syscall.SIGKILL) }

// Hang has the connections stop in the middle of whatever they do: they stay, and
// nobody answers.
func (s *Server) Hang() { s.signalConnections(syscall.SIGSTOP) }

func (s *Server) signalConnections(sig syscall.Signal) {
	for _, pid := range s.connections() {
		syscall.Kill(pid, sig) // it may have ended
	}
}

func (s *Server) signal(sig syscall.Signal) { require.NoError(s.t, s.cmd.Process.Signal(sig)) }

// connections returns the processes of the server's connections.
func (s *Server) connections() []int {
	entries, err := os.ReadDir("/proc")
	require.NoError(s.t, err)
	children := make(map[int][]int)
	servers := make(map[int]bool)
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "stat"))
		if err != nil {
			continue // it has ended
		}
		name, rest, _ := strings.Cut(string(stat), ") ")
		fields := strings.Fields(rest)
		parent, err := strconv.Atoi(fields[1])
		require.NoError(s.t, err)
		children[parent] = append(children[parent], pid)
		servers[pid] = strings.HasSuffix(name, "(sshd") || strings.Contains(name, "(sshd-")
	}
	var found []int
	for next := []int{s.cmd.Process.Pid}; len(next) > 0; next = next[1:] {
		for _, child := range children[next[0]] {
			if servers[child] { // what a session runs is its own business
				found, next = append(found, child), append(next, child)
			}
		}
	}
	return found
}

// Home is the home directory of the host, empty at first. Without one of its own
// what a person has in his would be run by the shell at each login.
func (s *Server) Home() string { return s.path("home") }

// Name is what the host is called.
func (s *Server) Name() string { return s.name }

// Dir is where claims are kept on the host.
func (s *Server) Dir() string { return filepath.Join(s.Home(), inventory.DefaultDir) }

// Host is the entry of the server in an inventory, as it is now.
func (s *Server) Host() *inventory.Host {
	s.t.Helper()
	text, err := os.ReadFile(s.path("user_key"))
	require.NoError(s.t, err)
	key, err := ssh.ParsePrivateKey(text)
	require.NoError(s.t, err)
	return &inventory.Host{
		Name: s.name, Endpoint: provisioning.SSHEndpoint{Host: "127.0.0.1", Port: uint16(s.port)}, User: s.user,
		Key: key, HostKeys: []ssh.PublicKey{s.hostKey()}, Dir: inventory.DefaultDir, Labels: map[string]string{"disk": "fast"},
	}
}

func (s *Server) hostKey() ssh.PublicKey {
	s.t.Helper()
	text, err := os.ReadFile(s.path("host_key.pub"))
	require.NoError(s.t, err)
	key, _, _, _, err := ssh.ParseAuthorizedKey(text)
	require.NoError(s.t, err)
	return key
}

// Entry is the same as text of an inventory.
func (s *Server) Entry() string {
	return fmt.Sprintf("- {name: %s, host: 127.0.0.1, port: %d, user: %s, key: %s, labels: {disk: fast},\n   hostKey: %q}\n",
		s.name, s.port, s.user, s.path("user_key"), strings.TrimSpace(string(ssh.MarshalAuthorizedKey(s.hostKey()))))
}

// CutAfter has the connection cut as soon as a command, such as mv, has done what
// it does, if its last argument is this one: once.
func (s *Server) CutAfter(command, last string) {
	s.t.Helper()
	program, err := exec.LookPath(command)
	require.NoError(s.t, err)
	once := s.path("cut-after-" + command)
	require.NoError(s.t, os.WriteFile(once, []byte(last), 0o600))
	// Its parent is the shell of the session, and whose child that is, the
	// connection.
	script := fmt.Sprintf(`#!/bin/sh
%[1]s "$@"
status=$?
for last in "$@"; do :; done
if [ -e %[2]s ] && [ "$last" = "$(cat %[2]s)" ]; then
	/bin/rm %[2]s
	read -r pid name state parent rest </proc/$PPID/stat
	kill -s KILL "$parent" "$PPID"
fi
exit "$status"
`, program, once)
	draft := s.path("bin/." + command)
	require.NoError(s.t, os.WriteFile(draft, []byte(script), 0o700))
	require.NoError(s.t, os.Rename(draft, s.path("bin/"+command)))
}

// Greet has the host print a text at each login, to both outputs, as the startup
// file of a shell may.
func (s *Server) Greet(text string) {
	s.t.Helper()
	greeting := s.path("greeting")
	require.NoError(s.t, os.WriteFile(greeting, []byte(text), 0o600))
	shell := s.path("bin/greeting-shell")
	require.NoError(s.t, os.WriteFile(shell, []byte(fmt.Sprintf("#!/bin/sh\ncat %[1]s\ncat %[1]s >&2\neval \"$SSH_ORIGINAL_COMMAND\"\n", greeting)), 0o700))
	keys, err := os.ReadFile(s.path("user_key.pub"))
	require.NoError(s.t, err)
	require.NoError(s.t, os.WriteFile(s.path("authorized_keys"), append([]byte(fmt.Sprintf("command=%q ", shell)), keys...), 0o600))
}

// AuthorizedKeys is the file of those that may log in.
func (s *Server) AuthorizedKeys() string { return s.path("authorized_keys") }

// KeepHostKey returns a function that gives the server the key back that it has
// now.
func (s *Server) KeepHostKey() (restore func()) {
	s.t.Helper()
	kept := make(map[string][]byte)
	for _, name := range []string{"host_key", "host_key.pub"} {
		text, err := os.ReadFile(s.path(name))
		require.NoError(s.t, err)
		kept[name] = text
	}
	return func() {
		for name, text := range kept {
			require.NoError(s.t, os.WriteFile(s.path(name), text, 0o600))
		}
	}
}
