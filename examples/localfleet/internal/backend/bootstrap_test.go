//go:build linux

package backend

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/atomicfile"
	"github.com/swactor/provisioning/examples/localfleet/internal/bootstrap"
	"github.com/swactor/provisioning/examples/localfleet/internal/machine"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
	"github.com/swactor/provisioning/examples/localfleet/internal/process"
	"github.com/swactor/provisioning/examples/localfleet/join"
	"github.com/swactor/provisioning/examples/localfleet/remote"
)

// onceHung hangs when it is run first and passes when it is run again.
const onceHung = "[ -e hung ] || { echo $$ >hung.new; mv hung.new hung; exec sleep 300; }"

func (a *attempt) awaitFile(name string) {
	a.t.Helper()
	path := filepath.Join(a.machine().Dir.Home(), name)
	eventually(a.t, name, func() bool { _, err := os.Stat(path); return err == nil })
}

func running(pid int) bool {
	state := stateIn(fmt.Sprintf("/proc/%d/stat", pid))
	return state != "" && state != "Z" && state != "X"
}

// stateIn returns the state of a process or thread, "" if it is gone.
func stateIn(stat string) string {
	text, err := os.ReadFile(stat)
	if err != nil {
		return ""
	}
	return strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))[0]
}

// stop stops a process and waits until all of its threads have: only one of them
// gets the signal, and until it has a processor the others go on.
func stop(t *testing.T, pid int) {
	t.Helper()
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	eventually(t, "all threads stop", func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		require.NoError(t, err)
		require.NotEmpty(t, threads)
		return !slices.ContainsFunc(threads, func(stat string) bool { state := stateIn(stat); return state != "" && state != "T" })
	})
}

func TestStartTwiceIsOneAgent(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{VerifyCommands: []string{"echo checked >>checks"}})
	a.boot()
	session, agent := a.session, a.agent()
	swactor := a.join()
	require.NoError(t, a.start(soon(t)))
	require.Equal(t, session, a.session)
	require.Equal(t, agent, a.agent())
	text, err := os.ReadFile(filepath.Join(a.machine().Dir.Home(), "checks"))
	require.NoError(t, err)
	require.Equal(t, "checked\n", string(text))
	for _, o := range a.seen.all() {
		require.True(t, o.Kind != provisioning.SwactorJoined || o.Swactor == swactor)
	}
}

// Also when it is asked for from all sides at once.
func TestStartAtOnceIsOneAgent(t *testing.T) {
	t.Parallel()
	config := quick(t.TempDir())
	backends := []*Backend{open(t, config), open(t, config)}
	a := newAttempt(t, backends[0], 1, provisioning.BootSpec{StartSwactorCommand: "sh -c 'echo $$ >>agents; exec sleep 300'"})
	a.rent()
	const callers = 8
	var sessions [callers]provisioning.BootstrapSessionID
	var errs [callers]error
	var starting sync.WaitGroup
	ctx := soon(t)
	for i := range callers {
		starting.Go(func() {
			caller := *a
			caller.b = backends[i%2]
			errs[i] = caller.start(ctx)
			sessions[i] = caller.session
		})
	}
	starting.Wait()
	for i := range callers {
		require.NoError(t, errs[i])
		require.Equal(t, sessions[0], sessions[i])
	}
	a.awaitFile("agents")
	require.Equal(t, a.agent(), number(t, filepath.Join(a.machine().Dir.Home(), "agents")))
	for _, b := range backends {
		require.NoError(t, b.Close())
	}
	eventually(t, "machine, agent and its shell", func() bool {
		pids, err := osproc.Carriers(a.key.Token())
		require.NoError(t, err)
		return len(pids) == 3
	})
	text, err := os.ReadFile(filepath.Join(a.machine().Dir.Home(), "agents"))
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(text), "\n"))
}

// A start that was cut off on the way is finished by the next, through another
// backend: one agent, checked once, and its lines from the first.
func TestStartAdoptsAfterRebuild(t *testing.T) {
	t.Parallel()
	config := quick(t.TempDir())
	config.JoinAddress = quietAddress
	first := open(t, config)
	a := newAttempt(t, first, 1, provisioning.BootSpec{VerifyCommands: []string{"echo checked >>checks"}})
	a.boot()
	session, agent, swactor := a.session, a.agent(), a.join()
	a.seen.await(t, "two lines", func(o provisioning.Observation) bool { return o.StdoutSequence == 2 })
	config.JoinAddress = first.JoinAddr()
	require.NoError(t, first.Close())

	a.b, a.seen = open(t, config), &log{changed: make(chan struct{})}
	require.NoError(t, a.start(soon(t)))
	require.Equal(t, session, a.session)
	require.Equal(t, agent, a.agent())
	require.Equal(t, swactor, a.join(), "it looks for its controller and finds the new one")
	a.seen.await(t, "its first lines", func(o provisioning.Observation) bool { return o.StdoutSequence >= 2 })
	text, err := os.ReadFile(filepath.Join(a.machine().Dir.Home(), "checks"))
	require.NoError(t, err)
	require.Equal(t, "checked\n", string(text))
}

func TestVerifyCommandFails(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{VerifyCommands: []string{"true", "echo no disk >&2; exit 3", "touch unreached"}})
	a.rent()
	err := a.start(soon(t))
	require.Equal(t, provisioning.ClassDefinite, class(provisioning.StartBootstrap, err))
	require.ErrorContains(t, err, "verify command 2: exit status 3: no disk")
	require.NoDirExists(t, a.state())
	require.NoFileExists(t, filepath.Join(a.machine().Dir.Home(), "unreached"))
}

// The call ends with its ctx, the command with the call, and nothing is known
// of the outcome but that it can be tried again.
func TestHungVerifyCommand(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{VerifyCommands: []string{onceHung}})
	a.rent()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- a.start(ctx) }()
	a.awaitFile("hung")
	pid := number(t, filepath.Join(a.machine().Dir.Home(), "hung"))
	require.True(t, running(pid))
	cancel()
	err := <-ended
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, provisioning.ClassAmbiguous, class(provisioning.StartBootstrap, err))
	eventually(t, "the command is killed", func() bool { return !running(pid) })

	require.NoError(t, a.start(soon(t)))
	a.join()
}

// proxy forwards connections until it is cut.
type proxy struct {
	listener net.Listener
	mu       sync.Mutex
	conns    []net.Conn
	deaf     chan struct{} // when closed, nothing is forwarded any more
}

func newProxy(t *testing.T, to provisioning.SSHEndpoint) *proxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{listener: listener, deaf: make(chan struct{})}
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			conn, err := net.Dial("tcp", to.String())
			if err != nil {
				from.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, from, conn)
			p.mu.Unlock()
			go p.forward(from, conn)
			go p.forward(conn, from)
		}
	}()
	t.Cleanup(func() { listener.Close(); p.cut() })
	return p
}

func (p *proxy) forward(from, to net.Conn) {
	defer to.Close()
	buffer := make([]byte, 4<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		select {
		case <-p.deaf:
		default:
			to.Write(buffer[:n])
		}
	}
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range p.conns {
		conn.Close()
	}
}

func (p *proxy) endpoint() provisioning.SSHEndpoint {
	return provisioning.SSHEndpoint{Host: "127.0.0.1", Port: uint16(p.listener.Addr().(*net.TCPAddr).Port)}
}

func TestConnectionCutDuringStart(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{VerifyCommands: []string{onceHung}})
	a.rent()
	p := newProxy(t, a.endpoint)
	a.endpoint = p.endpoint() // the key counts, not the address
	ended := make(chan error)
	go func() { ended <- a.start(soon(t)) }()
	a.awaitFile("hung")
	p.cut()
	err := <-ended
	require.Equal(t, provisioning.ClassAmbiguous, class(provisioning.StartBootstrap, err), "%v", err)

	require.NoError(t, a.start(soon(t)))
	a.join()
}

// B10: a session that is cut has failed, however well the agent does.
func TestConnectionCutDuringBootstrap(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]func(*proxy, *attempt){
		"by the network":           func(p *proxy, a *attempt) { p.cut() },
		"without anybody's notice": func(p *proxy, a *attempt) { close(p.deaf) },
		"by a machine that hangs":  func(p *proxy, a *attempt) { syscall.Kill(a.machine().PID, syscall.SIGSTOP) },
	} {
		t.Run(name, func(t *testing.T) {
			config := quick(t.TempDir())
			config.SSH.KeepAlive = 200 * time.Millisecond
			b := open(t, config)
			a := newAttempt(t, b, 1, provisioning.BootSpec{})
			a.rent()
			p := newProxy(t, a.endpoint)
			a.endpoint = p.endpoint()
			for err := a.start(soon(t)); err != nil; err = a.start(soon(t)) { // so short a keep-alive may cut a busy machine
				require.NotEqual(t, provisioning.ClassDefinite, class(provisioning.StartBootstrap, err), "%v", err)
			}
			a.join()
			cut(p, a)
			failed := a.seen.await(t, "the cut", kind(provisioning.BootstrapFailed))
			require.Equal(t, "StreamError: the connection was cut", failed.Reason)
			require.Equal(t, a.session, failed.Session)
			require.True(t, running(a.agent()))
			require.NoError(t, a.destroy())
		})
	}
}

// The address of a dead machine belongs to the next one by now. It must be
// told nothing, least of all the join token.
func TestAnotherMachineAtTheAddress(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	first, second := newAttempt(t, b, 1, provisioning.BootSpec{}), newAttempt(t, b, 2, provisioning.BootSpec{})
	first.rent()
	second.boot()
	second.join()

	first.endpoint = second.endpoint
	err := first.start(soon(t))
	require.ErrorIs(t, err, remote.ErrHostKey)
	require.Equal(t, provisioning.ClassDefinite, class(provisioning.StartBootstrap, err))
	record := machine.Record{PID: first.machine().PID, Endpoint: &second.endpoint}
	require.NoError(t, atomicfile.WriteJSON(first.machine().Dir.Record(), record))
	first.session = bootstrap.Session(first.key)
	require.ErrorIs(t, first.cancel(), remote.ErrHostKey)
	entries, err := os.ReadDir(filepath.Join(second.machine().Dir.Home(), ".swactor"))
	require.NoError(t, err)
	require.Len(t, entries, 1, "its own session")
	require.True(t, running(second.agent()))

	// And the one that it was before is dead.
	require.NoError(t, syscall.Kill(-first.machine().PID, syscall.SIGKILL))
	eventually(t, "its death", func() bool { return first.machine().State == process.Dead })
	require.ErrorIs(t, first.start(soon(t)), provisioning.ErrLeaseLost)
}

func TestLoginIsRefused(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{})
	a.rent()
	stranger, err := controllerKey(filepath.Join(t.TempDir(), "key"))
	require.NoError(t, err)
	b.config.SSH.Key = stranger
	err = a.start(soon(t))
	require.ErrorIs(t, err, remote.ErrLogin)
	require.Equal(t, provisioning.ClassDefinite, class(provisioning.StartBootstrap, err))
}

// A machine that does not answer was told nothing, so the attempt can go on.
func TestConnectTimeout(t *testing.T) {
	t.Parallel()
	config := quick(t.TempDir())
	config.SSH.ConnectTimeout = 50 * time.Millisecond
	b := open(t, config)
	a := newAttempt(t, b, 1, provisioning.BootSpec{})
	a.rent()
	stop(t, a.machine().PID)
	err := a.start(soon(t))
	require.Equal(t, provisioning.ClassNotStarted, class(provisioning.StartBootstrap, err))
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestAgentEndsEarly(t *testing.T) {
	t.Parallel()
	for command, reason := range map[string]string{
		"sh -c 'echo oops >&2; exit 4'": "StartFailed: the agent ended with status 4: oops",
		"no-such-program":               "StartFailed: the agent ended with status 127",
		"sh -c 'kill -9 $$'":            "StartFailed: the agent ended with status 137",
		"env SWACTOR_JOIN_TOKEN_FILE=/dev/null localfleet agent": "SwactorJoinFailed: the agent ended with status 3: " + join.ErrRefused.Error(),
		"env SWACTOR_NODE=w-7 localfleet agent":                  "SwactorJoinFailed: the agent ended with status 3: " + join.ErrRefused.Error(),
		"env SWACTOR_ATTEMPT=7 localfleet agent":                 "SwactorJoinFailed: the agent ended with status 3: " + join.ErrRefused.Error(),
		"env SWACTOR_ATTEMPT=x localfleet agent":                 "StartFailed: the agent ended with status 2: fleet: SWACTOR_ATTEMPT",
	} {
		t.Run(command, func(t *testing.T) {
			b := open(t, quick(t.TempDir()))
			a := newAttempt(t, b, 1, provisioning.BootSpec{StartSwactorCommand: command})
			a.boot()
			failed := a.seen.await(t, "the end", kind(provisioning.BootstrapFailed))
			require.Contains(t, failed.Reason, reason)
			require.Equal(t, a.session, failed.Session)
			for _, o := range a.seen.all() {
				require.NotEqual(t, provisioning.SwactorJoined, o.Kind)
			}
		})
	}
}

func TestCancelEndsTheAgent(t *testing.T) {
	t.Parallel()
	for name, command := range map[string]string{
		"at a word": "",
		"by force":  "sh -c 'trap \"\" TERM; while :; do sleep 0.01; done'",
		// Its process is a shell for as long as the words of the command take.
		"on its way up": "$(sleep 300; echo localfleet) agent",
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t, quick(t.TempDir()))
			a := newAttempt(t, b, 1, provisioning.BootSpec{StartSwactorCommand: command})
			a.boot()
			pid := a.agent()
			require.True(t, running(pid))
			require.NoError(t, a.cancel())
			require.False(t, running(pid))
			require.NoError(t, a.cancel(), "of a session that has ended")
			err := a.start(soon(t))
			require.Equal(t, provisioning.ClassDefinite, class(provisioning.StartBootstrap, err))
			require.ErrorContains(t, err, "cancelled")
		})
	}
}

// A cancel that comes before the agent was started forbids it for ever.
func TestCancelBeforeStart(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{})
	a.rent()
	a.session = bootstrap.Session(a.key)
	require.NoError(t, a.cancel())
	require.NoError(t, a.cancel())
	err := a.start(soon(t))
	require.Equal(t, provisioning.ClassDefinite, class(provisioning.StartBootstrap, err))
	require.ErrorContains(t, err, "cancelled")
}

func TestCancelOfWhatIsAbsent(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{})
	a.session = bootstrap.Session(a.key)
	require.NoError(t, a.cancel(), "no machine")
	a.boot()
	session := a.session
	a.session += "x"
	require.NoError(t, a.cancel(), "no such session")
	require.True(t, running(a.agent()))
	require.NoError(t, syscall.Kill(-a.machine().PID, syscall.SIGKILL))
	eventually(t, "its death", func() bool { return a.machine().State == process.Dead })
	a.session = session
	require.NoError(t, a.cancel(), "a dead machine")
}

func TestNodeIsLost(t *testing.T) {
	t.Parallel()
	const short, long = 500 * time.Millisecond, 10 * time.Second
	for name, c := range map[string]struct {
		silence time.Duration
		kill    func(*attempt)
		reason  string
	}{
		"its agent is killed":       {short, func(a *attempt) { syscall.Kill(a.agent(), syscall.SIGKILL) }, "no heartbeat of swactor-"},
		"its agent hangs":           {short, func(a *attempt) { syscall.Kill(a.agent(), syscall.SIGSTOP) }, "no heartbeat of swactor-"},
		"its machine is killed":     {long, func(a *attempt) { syscall.Kill(-a.machine().PID, syscall.SIGKILL) }, "of the machine is gone"},
		"its machine's head is off": {long, func(a *attempt) { syscall.Kill(a.machine().PID, syscall.SIGKILL) }, "of the machine is gone"},
	} {
		t.Run(name, func(t *testing.T) {
			config := quick(t.TempDir())
			config.Join.Silence = c.silence
			b := open(t, config)
			a := newAttempt(t, b, 1, provisioning.BootSpec{})
			a.boot()
			a.join()
			require.NoError(t, a.converge())
			c.kill(a)
			lost := a.seen.await(t, "the loss", kind(provisioning.NodeLost))
			require.Contains(t, lost.Reason, c.reason)
			b.round()
			b.lose(b.nodes[a.key], "seen by somebody else as well")
			require.NoError(t, a.destroy())
			b.round()
			n, err := live(a.key)
			require.NoError(t, err)
			require.Zero(t, n)
			losses := 0
			for _, o := range a.seen.all() {
				if o.Kind == provisioning.NodeLost {
					losses++
				}
			}
			require.Equal(t, 1, losses)
		})
	}
}

// The end that was asked for is no loss, and its agent cannot come back.
func TestDestroyIsNoLoss(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{})
	a.boot()
	a.join()
	require.NoError(t, a.destroy())
	before := len(a.seen.all())
	require.NoError(t, a.destroy())
	b.round()
	require.Empty(t, b.Members())
	require.NoError(t, b.Close())
	for _, o := range a.seen.all() {
		require.NotEqual(t, provisioning.NodeLost, o.Kind)
		require.NotEqual(t, provisioning.BootstrapFailed, o.Kind)
	}
	require.Len(t, a.seen.all(), before)
}

func TestCreateRefusesWhatCannotBecomeANode(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	secrets := filepath.Join(b.config.Dir, "secrets")
	require.NoError(t, os.WriteFile(filepath.Join(secrets, "open"), []byte("x"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(secrets, "empty"), []byte("\n"), 0o600))
	for problem, change := range map[string]func(*provisioning.LogicalNodeSpec){
		"provider": func(s *provisioning.LogicalNodeSpec) { s.Provider = "moon" },
		"GPU":      func(s *provisioning.LogicalNodeSpec) { s.Shape.GPUName = "H100" },
		"mount": func(s *provisioning.LogicalNodeSpec) {
			s.Boot.Mounts = []provisioning.Mount{{Source: "/a", Target: "/b"}}
		},
		"no name of a variable": func(s *provisioning.LogicalNodeSpec) { s.Boot.Env = map[string]string{"A=B; rm": ""} },
		"NUL":                   func(s *provisioning.LogicalNodeSpec) { s.Boot.Args = []string{"a\x00b"} },
		"no such file":          func(s *provisioning.LogicalNodeSpec) { s.SwarmJoin.JoinTokenRef = "missing" },
		"not the name":          func(s *provisioning.LogicalNodeSpec) { s.SwarmJoin.JoinTokenRef = "../controller_key" },
		"is open to others":     func(s *provisioning.LogicalNodeSpec) { s.SwarmJoin.JoinTokenRef = "open" },
		"is empty":              func(s *provisioning.LogicalNodeSpec) { s.SwarmJoin.JoinTokenRef = "empty" },
	} {
		t.Run(problem, func(t *testing.T) {
			a := newAttempt(t, b, 1, provisioning.BootSpec{})
			change(&a.spec)
			_, err := b.CreateLease(soon(t), provisioning.CreateLeaseRequest{Key: a.key, Spec: a.spec})
			require.ErrorContains(t, err, problem)
			require.Equal(t, provisioning.ClassDefinite, class(provisioning.CreateLease, err))
			require.Equal(t, process.Absent, a.machine().State)
		})
	}
	// Definite would be a lie where a machine is there.
	a := newAttempt(t, b, 1, provisioning.BootSpec{})
	a.rent()
	a.spec.SwarmJoin.JoinTokenRef = "missing"
	_, err := b.CreateLease(soon(t), provisioning.CreateLeaseRequest{Key: a.key, Spec: a.spec})
	require.Equal(t, provisioning.ClassAmbiguous, class(provisioning.CreateLease, err))
	_, err = b.CreateLease(soon(t), provisioning.CreateLeaseRequest{Key: a.key, Spec: a.spec, AdoptOnly: true})
	require.NoError(t, err)
}

// No more calls run at once than was said, and who waits goes with its ctx.
func TestCallsAreBounded(t *testing.T) {
	t.Parallel()
	config := quick(t.TempDir())
	config.MaxCalls = 1
	b := open(t, config)
	first, second := newAttempt(t, b, 1, provisioning.BootSpec{VerifyCommands: []string{onceHung}}), newAttempt(t, b, 2, provisioning.BootSpec{})
	first.rent()
	second.rent()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- first.start(ctx) }()
	first.awaitFile("hung")
	waiting, giveUp := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer giveUp()
	require.Equal(t, provisioning.ClassNotStarted, class(provisioning.StartBootstrap, second.start(waiting)))
	require.NoDirExists(t, second.state())
	cancel()
	require.Error(t, <-ended)
	require.NoError(t, second.start(soon(t)))
}

// Close ends what runs, waits for it, and leaves machines and agents alone.
func TestCloseLeavesNoGoroutine(t *testing.T) {
	before := runtime.NumGoroutine()
	config := quick(t.TempDir())
	b, err := Open(config)
	require.NoError(t, err)
	defer takeDown(t, b)
	booted, hung := newAttempt(t, b, 1, provisioning.BootSpec{}), newAttempt(t, b, 2, provisioning.BootSpec{VerifyCommands: []string{onceHung}})
	booted.boot()
	booted.join()
	hung.rent()
	ended := make(chan error)
	go func() { ended <- hung.start(context.Background()) }()
	hung.awaitFile("hung")
	agent := booted.agent()
	closed := make(chan error)
	go func() { closed <- b.Close() }()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.NoError(t, <-closed)
	eventually(t, "the goroutines are gone", func() bool { return runtime.NumGoroutine() <= before })
	require.True(t, running(agent))
	require.Equal(t, process.Running, booted.machine().State)

	for _, err := range []error{booted.start(soon(t)), booted.converge(), booted.cancel(), booted.destroy()} {
		require.ErrorIs(t, err, ErrClosed)
		require.ErrorIs(t, err, provisioning.ErrNotStarted)
	}
	require.NoError(t, b.Close())
}

// After Close nothing is told any more.
func TestCloseIsSilent(t *testing.T) {
	t.Parallel()
	b := open(t, quick(t.TempDir()))
	a := newAttempt(t, b, 1, provisioning.BootSpec{})
	a.boot()
	a.join()
	require.NoError(t, b.Close())
	told := len(a.seen.all())
	require.NoError(t, syscall.Kill(-a.machine().PID, syscall.SIGKILL))
	eventually(t, "its death", func() bool { return a.machine().State == process.Dead })
	require.Len(t, a.seen.all(), told)
}
