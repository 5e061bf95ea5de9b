//go:build linux

package process

import (
	"bufio"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/atomicfile"
	"github.com/swactor/provisioning/examples/localfleet/internal/child"
	"github.com/swactor/provisioning/examples/localfleet/internal/machine"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
	"github.com/swactor/provisioning/examples/localfleet/leftover"
	"github.com/swactor/provisioning/examples/localfleet/remote"
)

// controllerVariable makes the test program a controller that rents the machine
// of a run in a directory and waits to be killed.
const (
	controllerVariable = "LOCALFLEET_TEST_CONTROLLER"
	runVariable        = "LOCALFLEET_TEST_RUN"
)

func TestMain(m *testing.M) {
	if status, ok := child.Main(os.Args); ok {
		os.Exit(status)
	}
	if dir := os.Getenv(controllerVariable); dir != "" {
		rentAndWait(dir)
	}
	os.Exit(leftover.Run(m))
}

var (
	// The same in every process of the test.
	signer, _ = ssh.NewSignerFromKey(ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize)))
	// The run of nobody else: the process table is everybody's.
	key = provisioning.ExternalKey{Run: provisioning.RunID(cmp.Or(os.Getenv(runVariable), rand.Text())), Node: "w-0", Attempt: 1}
)

// config ends what a test that was killed has left.
func config() Config {
	return Config{AuthorizedKey: signer.PublicKey(), Lifetime: 5 * time.Minute}
}

func open(t *testing.T, dir string, c Config) *Provider {
	t.Helper()
	p, err := Open(dir, c)
	require.NoError(t, err)
	t.Cleanup(func() {
		machines, err := p.List()
		require.NoError(t, err)
		for _, m := range machines {
			require.NoError(t, p.Destroy(context.Background(), m.Key))
		}
	})
	return p
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func create(t *testing.T, p *Provider, key provisioning.ExternalKey) Machine {
	t.Helper()
	m, err := p.Create(within(t), key, "image", "user", false)
	require.NoError(t, err)
	require.Equal(t, Running, m.State)
	return m
}

// eventually waits for something in another process, which nothing announces.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	wait := firstPoll
	for ctx := within(t); !holds(); {
		require.NoError(t, pause(ctx, &wait), what)
	}
}

func carriers(t *testing.T, key provisioning.ExternalKey) []int {
	t.Helper()
	pids, err := osproc.Carriers(key.Token())
	require.NoError(t, err)
	return pids
}

func class(err error) provisioning.FailureClass {
	return provisioning.Classify(provisioning.CreateLease, err)
}

func connect(t *testing.T, p *Provider, key provisioning.ExternalKey) *remote.Conn {
	t.Helper()
	var endpoint *provisioning.SSHEndpoint
	eventually(t, "the machine answers", func() bool {
		var err error
		endpoint, err = p.Probe(within(t), key)
		require.NoError(t, err)
		return endpoint != nil
	})
	m, err := p.Find(key)
	require.NoError(t, err)
	conn, err := remote.Dial(within(t), remote.Config{Key: signer}, remote.Target{Endpoint: *endpoint, User: m.User, HostKeys: []ssh.PublicKey{m.HostKey}})
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

func TestCreateTwiceIsOneMachine(t *testing.T) {
	p := open(t, t.TempDir(), config())
	first := create(t, p, key)
	require.Equal(t, Lease(key), first.Lease)
	require.Equal(t, first.PID, create(t, p, key).PID)
	require.Equal(t, []int{first.PID}, carriers(t, key))

	other := key
	other.Attempt++
	require.NotEqual(t, first.PID, create(t, p, other).PID)
}

// Also when everybody comes at once, through different providers.
func TestCreateAtOnceIsOneMachine(t *testing.T) {
	dir := t.TempDir()
	providers := []*Provider{open(t, dir, config()), open(t, dir, config())}
	const callers = 8
	var pids [callers]int
	var errs [callers]error
	var running sync.WaitGroup
	ctx := within(t)
	for i := range callers {
		running.Go(func() {
			m, err := providers[i%2].Create(ctx, key, "image", "user", false)
			pids[i], errs[i] = m.PID, err
		})
	}
	running.Wait()
	for i := range callers {
		require.NoError(t, errs[i])
		require.Equal(t, pids[0], pids[i])
	}
	require.Equal(t, []int{pids[0]}, carriers(t, key))
	left, err := filepath.Glob(filepath.Join(dir, "machines", fresh+"*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestAdoptAfterRebuild(t *testing.T) {
	dir := t.TempDir()
	first := create(t, open(t, dir, config()), key)
	rebuilt := open(t, dir, config())
	for _, adoptOnly := range []bool{false, true} {
		again, err := rebuilt.Create(within(t), key, "image", "user", adoptOnly)
		require.NoError(t, err)
		require.Equal(t, first.PID, again.PID)
	}
	machines, err := rebuilt.List()
	require.NoError(t, err)
	require.Len(t, machines, 1)
	require.Equal(t, key, machines[0].Key)
}

func rentAndWait(dir string) {
	c := config()
	p, err := Open(dir, c)
	if err == nil {
		var m Machine
		m, err = p.Create(context.Background(), key, "image", "user", false)
		fmt.Println(m.PID)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	select {}
}

// controller starts a controller that rents the machine of key. Its first line
// is the number of the machine.
func controller(t *testing.T, dir string) (kill func(), stdout *bufio.Reader) {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	c := exec.Command(program)
	c.Env = append(os.Environ(), controllerVariable+"="+dir, runVariable+"="+string(key.Run))
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	return func() {
		// Its whole group, as a terminal or a supervisor would.
		require.NoError(t, syscall.Kill(-c.Process.Pid, syscall.SIGKILL))
		require.Error(t, c.Wait())
	}, bufio.NewReader(out)
}

func TestMachineSurvivesItsController(t *testing.T) {
	dir := t.TempDir()
	kill, stdout := controller(t, dir)
	line, err := stdout.ReadString('\n')
	require.NoError(t, err)
	kill()

	p := open(t, dir, config())
	m := create(t, p, key)
	require.Equal(t, strings.TrimSpace(line), fmt.Sprint(m.PID))
	out, err := connect(t, p, key).Run(within(t), "pwd", nil)
	require.NoError(t, err)
	require.Equal(t, m.Dir.Home(), out)
}

// Whenever it is killed: who comes after it gets one machine, or none where
// none is wanted, and nothing comes later.
func TestControllerKilledAtAnyMoment(t *testing.T) {
	for i := range 8 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			dir := t.TempDir()
			kill, _ := controller(t, dir)
			time.Sleep(time.Duration(2*i*i) * time.Millisecond) // any moment will do
			kill()
			p := open(t, dir, config())
			m, err := p.Create(within(t), key, "image", "user", i%2 == 0)
			var want []int
			if errors.Is(err, provisioning.ErrNothingToAdopt) {
				require.Zero(t, i%2)
			} else {
				require.NoError(t, err)
				want = []int{m.PID}
			}
			eventually(t, "one machine or none", func() bool { return slices.Equal(carriers(t, key), want) })
		})
	}
}

// What the machine runs goes with it, and Destroy returns after it.
func TestDestroyWaitsForTheEnd(t *testing.T) {
	p := open(t, t.TempDir(), config())
	m := create(t, p, key)
	conn := connect(t, p, key)
	_, err := conn.Run(within(t), "sleep 300 </dev/null >/dev/null 2>&1 & exec true", nil)
	require.NoError(t, err)
	require.Len(t, carriers(t, key), 2)

	require.NoError(t, p.Destroy(within(t), key))
	require.Empty(t, carriers(t, key))
	require.NoDirExists(t, string(m.Dir))
	found, err := p.Find(key)
	require.NoError(t, err)
	require.Equal(t, Absent, found.State)
	require.NoError(t, p.Destroy(within(t), key), "what is absent is destroyed")
}

func TestDestroyHonoursItsContext(t *testing.T) {
	p := open(t, t.TempDir(), config())
	m := create(t, p, key)
	// Somebody else holds the lock, so it cannot be known that nothing lives.
	require.NoError(t, syscall.Kill(m.PID, syscall.SIGKILL))
	awaitDeath(t, p)
	lock, free, err := takeLock(m.Dir)
	require.NoError(t, err)
	require.True(t, free)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.Destroy(ctx, key), context.Canceled)
	require.DirExists(t, string(m.Dir))
	require.NoError(t, lock.Close())
	require.NoError(t, p.Destroy(within(t), key))
}

// reused kills the machine of key and puts the number of a stranger on record
// in its place.
func reused(t *testing.T, p *Provider, environment []string) (stranger *exec.Cmd, m Machine) {
	t.Helper()
	stranger = exec.Command("sleep", "300")
	stranger.Env = environment
	stranger.SysProcAttr = osproc.Detached()
	require.NoError(t, stranger.Start())
	t.Cleanup(func() {
		stranger.Process.Kill()
		stranger.Wait()
	})
	m = create(t, p, key)
	require.NoError(t, syscall.Kill(m.PID, syscall.SIGKILL))
	awaitDeath(t, p)
	require.NoError(t, atomicfile.WriteJSON(m.Dir.Record(), machine.Record{PID: stranger.Process.Pid}))
	eventually(t, "the stranger has become what it will be", func() bool {
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", stranger.Process.Pid))
		return err == nil && string(name) == "sleep\n"
	})
	return stranger, m
}

func awaitDeath(t *testing.T, p *Provider) {
	t.Helper()
	eventually(t, "the machine is dead", func() bool {
		m, err := p.Find(key)
		require.NoError(t, err)
		return m.State == Dead
	})
}

// The number on record belongs to somebody else by now.
func TestDestroyKillsNoStranger(t *testing.T) {
	p := open(t, t.TempDir(), config())
	other := key
	other.Attempt++
	for name, environment := range map[string][]string{
		"without a token":            {"PATH=/bin"},
		"with that of another":       {osproc.TokenVariable + "=" + other.Token()},
		"with a longer one":          {osproc.TokenVariable + "=" + key.Token() + "x"},
		"with ours in another place": {"OTHER=" + osproc.TokenVariable + "=" + key.Token()},
	} {
		t.Run(name, func(t *testing.T) {
			stranger, m := reused(t, p, environment)
			require.NoError(t, p.Destroy(within(t), key))
			require.NoDirExists(t, string(m.Dir))
			g, err := osproc.Members(stranger.Process.Pid, key.Token())
			require.NoError(t, err)
			require.Equal(t, osproc.Group{Others: 1}, g, "the stranger lives")
		})
	}
}

// Somebody without any environment may be ours or not.
func TestDestroyInDoubt(t *testing.T) {
	p := open(t, t.TempDir(), config())
	stranger, m := reused(t, p, []string{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := p.Destroy(ctx, key)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "1 more in doubt")
	require.DirExists(t, string(m.Dir))
	g, err := osproc.Members(stranger.Process.Pid, key.Token())
	require.NoError(t, err)
	require.Equal(t, osproc.Group{Unknown: 1}, g, "the stranger lives")

	require.NoError(t, stranger.Process.Kill())
	require.Error(t, stranger.Wait())
	require.NoError(t, p.Destroy(within(t), key))
}

// A machine whose first process has died, while another of it goes on, is dead
// and still has to be destroyed.
func TestDeadMachine(t *testing.T) {
	p := open(t, t.TempDir(), config())
	m := create(t, p, key)
	_, err := connect(t, p, key).Run(within(t), "sleep 300 </dev/null >/dev/null 2>&1 & exec true", nil)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(m.PID, syscall.SIGKILL))
	awaitDeath(t, p)
	require.Len(t, carriers(t, key), 1)

	_, err = p.Probe(within(t), key)
	require.ErrorIs(t, err, provisioning.ErrLeaseLost)
	for _, adoptOnly := range []bool{false, true} {
		_, err = p.Create(within(t), key, "image", "user", adoptOnly)
		require.ErrorIs(t, err, provisioning.ErrLeaseLost)
		require.ErrorIs(t, err, ErrDead)
		lost := provisioning.LeaseLostWith(m.Lease, ErrDead)
		require.Equal(t, lost, err, "it names the lease that is to be destroyed")
	}
	require.NoError(t, p.Destroy(within(t), key))
	require.Empty(t, carriers(t, key))
}

func TestAdoptOnlyBuysNothing(t *testing.T) {
	p := open(t, t.TempDir(), config())
	_, err := p.Create(within(t), key, "image", "user", true)
	require.ErrorIs(t, err, provisioning.ErrNothingToAdopt)
	require.Empty(t, carriers(t, key))
	machines, err := p.List()
	require.NoError(t, err)
	require.Empty(t, machines)
}

// claim does what a creator does that is killed before it starts its machine.
func claim(t *testing.T, p *Provider) {
	t.Helper()
	draft, err := os.MkdirTemp(p.machines(), fresh)
	require.NoError(t, err)
	lock, err := p.draw(machine.Dir(draft), key, "image", "user")
	require.NoError(t, err)
	require.NoError(t, os.Rename(draft, string(p.machine(key))))
	m, err := p.Find(key)
	require.NoError(t, err)
	require.Equal(t, Starting, m.State, "its creator is at it")
	require.NoError(t, lock.Close())
}

func TestStillbornMachine(t *testing.T) {
	for name, after := range map[string]func(*testing.T, *Provider){
		"is started by the next create": func(t *testing.T, p *Provider) {
			m := create(t, p, key)
			require.Equal(t, []int{m.PID}, carriers(t, key))
		},
		"is nothing to adopt": func(t *testing.T, p *Provider) {
			_, err := p.Create(within(t), key, "image", "user", true)
			require.ErrorIs(t, err, provisioning.ErrNothingToAdopt)
			require.NoDirExists(t, string(p.machine(key)))
		},
		"is lost": func(t *testing.T, p *Provider) {
			_, err := p.Probe(within(t), key)
			require.ErrorIs(t, err, provisioning.ErrLeaseLost)
		},
		"is destroyed": func(t *testing.T, p *Provider) {
			require.NoError(t, p.Destroy(within(t), key))
			require.NoDirExists(t, string(p.machine(key)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := open(t, t.TempDir(), config())
			claim(t, p)
			m, err := p.Find(key)
			require.NoError(t, err)
			require.Equal(t, Stillborn, m.State)
			after(t, p)
		})
	}
}

// While somebody else starts it, a create waits and says what it knows.
func TestCreateWaitsForAnotherCreator(t *testing.T) {
	p := open(t, t.TempDir(), config())
	claim(t, p)
	lock, free, err := takeLock(p.machine(key))
	require.NoError(t, err)
	require.True(t, free)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = p.Create(ctx, key, "image", "user", false)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, provisioning.ClassNotStarted, class(err))
	launched, err := p.launch(p.machine(key), key, lock)
	require.NoError(t, err)
	require.True(t, launched)
	require.NoError(t, lock.Close())
	require.Equal(t, []int{create(t, p, key).PID}, carriers(t, key))
}

func TestMachineThatCannotLive(t *testing.T) {
	p := open(t, t.TempDir(), config())
	require.NoError(t, os.Remove(p.program()))
	require.NoError(t, os.WriteFile(p.program(), []byte("#!/bin/sh\necho no power\nexit 1\n"), 0o700))
	_, err := p.Create(within(t), key, "image", "user", false)
	require.ErrorContains(t, err, "no power")
	require.Equal(t, provisioning.ClassDefinite, class(err))
	require.NoDirExists(t, string(p.machine(key)))
}

func TestCreateThatIsCut(t *testing.T) {
	p := open(t, t.TempDir(), config())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := p.Create(ctx, key, "image", "user", false)
	require.Equal(t, provisioning.ClassNotStarted, class(err))
	require.ErrorIs(t, err, context.Canceled)
	require.NoDirExists(t, string(p.machine(key)))
}

func TestProbe(t *testing.T) {
	c := config()
	c.BootDelay = time.Hour
	p := open(t, t.TempDir(), c)
	_, err := p.Probe(within(t), key)
	require.ErrorIs(t, err, provisioning.ErrLeaseLost)
	m := create(t, p, key)
	endpoint, err := p.Probe(within(t), key)
	require.NoError(t, err)
	require.Nil(t, endpoint, "it boots")

	// A port that is open is not yet a machine that answers.
	answer := make(chan string)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	go func() {
		for line := range answer {
			conn, err := listener.Accept()
			if err == nil {
				fmt.Fprint(conn, line)
				conn.Close()
			}
		}
	}()
	defer close(answer)
	address := listener.Addr().(*net.TCPAddr)
	require.NoError(t, atomicfile.WriteJSON(m.Dir.Record(), machine.Record{PID: m.PID,
		Endpoint: &provisioning.SSHEndpoint{Host: "127.0.0.1", Port: uint16(address.Port)}}))
	for line, ready := range map[string]bool{
		"":                           false,
		"SSH-2.0-cut":                false,
		"220 mail\r\n":               false,
		"SSH-1.5-old\r\n":            false,
		strings.Repeat("x", 300):     false,
		"SSH-2.0-OpenSSH_9.9 p1\r\n": true,
	} {
		go func() { answer <- line }()
		endpoint, err = p.Probe(within(t), key)
		require.NoError(t, err)
		require.Equal(t, ready, endpoint != nil, "%q", line)
	}
	// One that says nothing at all is waited for no longer than ctx.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = p.Probe(ctx, key)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestLifetime(t *testing.T) {
	c := config()
	c.Lifetime = time.Millisecond
	p := open(t, t.TempDir(), c)
	_, err := p.Create(within(t), key, "image", "user", false)
	if err != nil { // it was over before it was seen
		require.ErrorIs(t, err, ErrDead)
	}
	eventually(t, "the machine ends by itself", func() bool { return len(carriers(t, key)) == 0 })
}

func TestOpenSweepsLeftovers(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir, config())
	m := create(t, p, key)
	require.NoError(t, os.Mkdir(filepath.Join(p.machines(), gone+"x"), 0o700))
	cut, err := os.MkdirTemp(p.machines(), fresh)
	require.NoError(t, err)
	lock, err := p.draw(machine.Dir(cut), key, "image", "user")
	require.NoError(t, err)
	require.NoError(t, lock.Close())
	working, err := os.MkdirTemp(p.machines(), fresh)
	require.NoError(t, err)
	other := key
	other.Attempt++
	lock, err = p.draw(machine.Dir(working), other, "image", "user")
	require.NoError(t, err)
	defer lock.Close()
	begun, err := os.MkdirTemp(p.machines(), fresh)
	require.NoError(t, err)

	open(t, dir, config())
	require.NoDirExists(t, filepath.Join(p.machines(), gone+"x"))
	require.NoDirExists(t, cut)
	require.DirExists(t, working, "somebody is at it")
	require.DirExists(t, begun, "somebody may be about to lock it")
	alone := config()
	alone.Alone = true
	open(t, dir, alone)
	require.NoDirExists(t, begun, "nobody is there who could")
	require.DirExists(t, working, "a lock that is held is held by somebody")
	require.Equal(t, m.PID, create(t, p, key).PID)
	require.NoError(t, os.RemoveAll(working))
}

func TestFindRefusesSomebodyElsesOrder(t *testing.T) {
	p := open(t, t.TempDir(), config())
	claim(t, p)
	other := key
	other.Attempt++
	require.NoError(t, os.Rename(string(p.machine(key)), string(p.machine(other))))
	_, err := p.Find(other)
	require.ErrorContains(t, err, "holds the machine of")
	_, err = p.Create(within(t), other, "image", "user", false)
	require.Equal(t, provisioning.ClassAmbiguous, class(err))
	require.True(t, errors.Is(err, provisioning.ErrAmbiguous))
	require.NoError(t, os.Rename(string(p.machine(other)), string(p.machine(key))))
}
