//go:build linux

package backend

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/remote"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

var impatient = provisioning.RetryPolicy{
	InitialDelay: 20 * time.Millisecond, MaxDelay: 500 * time.Millisecond, Jitter: 0.5,
	EndpointProbeInterval: 10 * time.Millisecond, OperationTimeout: 20 * time.Second,
}

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for something in another process, which nothing announces.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for ctx := soon(t); !holds(); {
		require.NoError(t, ctx.Err(), what)
		time.Sleep(5 * time.Millisecond)
	}
}

// fleet is a host that drives a backend. When the test ends it is drained, and it
// is seen to that nothing is left.
type fleet struct {
	t     *testing.T
	place *place
	*provisioning.Host
	backend *Backend
	wish    provisioning.ClusterShape
	events  chan provisioning.Event // failed attempts
}

func (p *place) fleet(config Config, run provisioning.RunID, group provisioning.NodeGroupSpec) *fleet {
	t := p.t
	t.Helper()
	f := &fleet{t: t, place: p, events: make(chan provisioning.Event, 1000)}
	config.Run = run
	f.backend = open(t, config)
	group.GroupID, group.Provider = "w", Kind
	f.wish = provisioning.ClusterShape{RunID: run, Generation: 1, Groups: []provisioning.NodeGroupSpec{group}}
	var err error
	f.Host, err = provisioning.NewHost(provisioning.HostConfig{
		Shape: f.wish, Backend: f.backend, Retry: impatient,
		OnEvent: func(e provisioning.Event) {
			if e.Kind == provisioning.EventAttemptFailed {
				f.events <- e
			}
		},
	})
	require.NoError(t, err)
	var running sync.WaitGroup
	running.Go(func() { f.Run(context.Background()) })
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, f.Drain(ctx))
		held, err := f.Close(ctx)
		require.NoError(t, err)
		require.Empty(t, held)
		running.Wait()
		f.settled()
	})
	return f
}

// change wishes for another group and waits until it is there.
func (f *fleet) change(how func(*provisioning.NodeGroupSpec)) {
	f.t.Helper()
	group := f.wish.Groups[0]
	how(&group)
	f.wish.Groups, f.wish.Generation = []provisioning.NodeGroupSpec{group}, f.wish.Generation+1
	require.NoError(f.t, f.UpdateDesired(f.wish))
	f.converged()
}

// converged waits for the wish and sees to it that there is what was wished for,
// and nothing else. It returns the tokens.
func (f *fleet) converged() []string {
	f.t.Helper()
	require.NoError(f.t, f.WaitConverged(soon(f.t), f.wish.Generation))
	return f.settled()
}

// settled compares the claims and the agents on all hosts with what the library
// holds for this run.
func (f *fleet) settled() []string {
	f.t.Helper()
	var tokens []string
	wanted := make(map[string]bool)
	for node := range f.Driver().Snapshot().All() {
		if node.Record.Lease != "" {
			token := provisioning.ExternalKey{Run: f.wish.RunID, Node: node.Record.Node, Attempt: node.Attempt}.Token()
			wanted[token] = true
			tokens = append(tokens, token)
		}
	}
	claims := f.place.claims()
	for attempt := range provisioning.NodeAttemptID(50) {
		for slot := range 6 {
			token := provisioning.ExternalKey{Run: f.wish.RunID, Node: provisioning.NewLogicalNodeID("w", slot), Attempt: attempt}.Token()
			agents, all, err := marked(token)
			require.NoError(f.t, err)
			if wanted[token] {
				require.Len(f.t, claims[token], 1)
				require.Equal(f.t, 1, agents)
			} else {
				require.Empty(f.t, claims[token])
				require.Zero(f.t, all)
			}
		}
	}
	return tokens
}

// failed waits for an attempt that fails with a reason.
func (f *fleet) failed(reason string) provisioning.Event {
	f.t.Helper()
	for ctx := soon(f.t); ; {
		select {
		case e := <-f.events:
			if strings.Contains(e.Reason, reason) {
				return e
			}
		case <-ctx.Done():
			require.Fail(f.t, "no attempt has failed", reason)
		}
	}
}

func (p *place) group(count int) provisioning.NodeGroupSpec {
	return provisioning.NodeGroupSpec{Count: count, Shape: provisioning.NodeShape{Image: "v1", ProviderLabels: map[string]string{"disk": "fast"}},
		Boot: provisioning.BootSpec{StartSwactorCommand: agentCommand(p.t)}}
}

// Three of four hosts come up, are replaced when the image drifts, grow to four
// and shrink to one.
func TestFleetLives(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 4)
	group := p.group(3)
	group.Shape.ProviderLabels[CleanupLabel] = `echo "$PWD" >>~/cleaned`
	f := p.fleet(p.config(), runOf(t), group)
	first := f.converged()
	require.Len(t, first, 3)
	f.change(func(g *provisioning.NodeGroupSpec) { g.Shape.Image = "v2" })
	second := f.settled()
	require.Len(t, second, 3)
	for _, token := range first {
		require.NotContains(t, second, token)
	}
	f.change(func(g *provisioning.NodeGroupSpec) { g.Count = 4 })
	require.Len(t, f.settled(), 4)
	f.change(func(g *provisioning.NodeGroupSpec) { g.Count = 1 })
	require.Equal(t, second[:1], f.settled(), "the lowest stays")
	require.Empty(t, f.events, "nothing has failed")
	cleaned := 0
	for _, s := range p.servers {
		text, err := os.ReadFile(filepath.Join(s.Home(), "cleaned"))
		if !errors.Is(err, os.ErrNotExist) {
			require.NoError(t, err)
		}
		cleaned += strings.Count(string(text), "\n")
	}
	require.Equal(t, 6, cleaned, "each claim that has ended was cleaned up after, once")
}

// A host that refuses the key, one that shows another key than the one that is
// known, one that accepts and says nothing, and one where nobody listens: none of
// them is used, and none is in the way.
func TestFleetPassesBadHosts(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 4)
	config := p.config()
	config.Reach.SSH.ConnectTimeout = 2 * time.Second
	p.servers[0].Refuse()
	p.servers[1].Stop()
	p.servers[1].NewHostKey()
	p.servers[1].Start()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the system accepts for it
	require.NoError(t, err)
	defer silent.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	for name, at := range map[string]net.Listener{"silent": silent, "closed": closed} {
		h := p.servers[0].Host()
		h.Name, h.Endpoint.Port = name, uint16(at.Addr().(*net.TCPAddr).Port)
		config.Hosts = append(config.Hosts, h)
	}
	f := p.fleet(config, runOf(t), p.group(2))
	require.Len(t, f.converged(), 2)
	require.NoDirExists(t, p.servers[0].Dir())
	require.NoDirExists(t, p.servers[1].Dir())
	require.Empty(t, f.events)

	for i, want := range map[int]error{0: remote.ErrLogin, 1: remote.ErrHostKey} {
		require.ErrorIs(t, f.backend.Pool().Reach(soon(t), config.Hosts[i]), want)
	}
}

// More hosts keep silent than may be connected to at once: the one that is free is
// found in one call, long before they are given up.
func TestManySilentHosts(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	config := p.config()
	config.Reach.MaxDials = 2
	config.Reach.SSH.ConnectTimeout = time.Hour
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the system accepts for it
	require.NoError(t, err)
	defer silent.Close()
	for i := range 7 {
		h := p.servers[0].Host()
		h.Name, h.Endpoint.Port = fmt.Sprintf("silent%d", i), uint16(silent.Addr().(*net.TCPAddr).Port)
		config.Hosts = append(config.Hosts, h)
	}
	a := newAttempt(t, open(t, config), p.group(1))
	for a.b.candidates(a.key, a.spec)[7] != config.Hosts[0] { // the free one is asked last
		a.key.Attempt++
	}
	require.NoError(t, a.create(false))
	require.Equal(t, map[string][]string{a.key.Token(): {"a"}}, p.claims())
	require.NoError(t, a.destroy())
}

// Of several hosts that are free the first is taken, and no other is connected to.
func TestFirstFreeHostIsTaken(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 3)
	a := newAttempt(t, open(t, p.config()), p.group(1))
	require.NoError(t, a.create(false))
	require.Equal(t, leaseID(a.b.candidates(a.key, a.spec)[0], a.key), a.lease)
	require.NoError(t, a.destroy())
}

// What was claimed cannot be given back while the host lets nobody in, or shows
// another key: it may be another host. It is given back when it is itself again.
func TestDestroyOfAHostThatIsNotItself(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	a := newAttempt(t, open(t, p.config()), p.group(1))
	require.NoError(t, a.create(false))
	server := p.servers[0]
	for _, trouble := range []struct {
		what   string
		change func() (undo func())
	}{
		{"refuses the login", func() func() {
			keys, err := os.ReadFile(server.AuthorizedKeys())
			require.NoError(t, err)
			server.Refuse()
			server.Start()
			return func() { require.NoError(t, os.WriteFile(server.AuthorizedKeys(), keys, 0o600)) }
		}},
		{"another machine answers", func() func() {
			restore := server.KeepHostKey()
			server.NewHostKey()
			server.Start()
			return restore
		}},
		{"connection refused", func() func() { return func() {} }},
	} {
		server.Stop()
		undo := trouble.change()
		var err error
		eventually(t, trouble.what, func() bool { // a connection that was cut is noticed first
			err = a.destroy()
			require.Error(t, err)
			return strings.Contains(err.Error(), trouble.what)
		})
		require.Equal(t, provisioning.ClassAmbiguous, provisioning.Classify(provisioning.DestroyLease, err), trouble.what)
		require.Len(t, p.claims(), 1)
		server.Stop()
		undo()
		server.Start()
	}
	eventually(t, "the end", func() bool { return a.destroy() == nil })
	require.Empty(t, p.claims())
}

// The server is stopped while a host is being checked, and started again.
func TestServerStopsInMidBootstrap(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	group := p.group(1)
	group.Boot.VerifyCommands = []string{"[ -e ~/second ] || { touch ~/first; while [ ! -e ~/second ]; do sleep 0.05; done; }"}
	f := p.fleet(p.config(), runOf(t), group)
	home := p.servers[0].Home()
	eventually(t, "the check", func() bool { _, err := os.Stat(filepath.Join(home, "first")); return err == nil })
	p.servers[0].Stop()
	require.NoError(t, os.WriteFile(filepath.Join(home, "second"), nil, 0o600))
	p.servers[0].Start()
	require.Len(t, f.converged(), 1)
}

// A connection that is cut while the agent's output is followed is a failure of
// that attempt (B10). The next one gets the host once nothing is left of it.
func TestConnectionCutDuringTheStream(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	group := p.group(1)
	group.Boot.StartSwactorCommand = fmt.Sprintf("sh -c 'if mkdir ~/once; then echo one; echo two; echo three >&2; exec sleep 300; fi; exec %s'", agentCommand(t))
	config := p.config()
	lines := make(chan Line, 100)
	config.OnLine = func(l Line) { lines <- l }
	f := p.fleet(config, runOf(t), group)
	texts := make(map[string]uint64)
	for range 3 {
		select {
		case l := <-lines:
			texts[l.Text] = l.Number
		case <-soon(t).Done():
			require.Fail(t, "no line")
		}
	}
	require.Equal(t, map[string]uint64{"one": 1, "two": 2, "three": 1}, texts)
	eventually(t, "the numbers", func() bool {
		node, ok := f.Driver().Snapshot().Node("w-0")
		return ok && node.Record.Bootstrap.LastStdoutSequence == 2 && node.Record.Bootstrap.LastStderrSequence == 1
	})
	p.servers[0].Cut()
	f.failed("StreamError")
	require.Len(t, f.converged(), 1)
}

// A host that hangs with its connections open is found out by the keep-alive, and
// keeps nobody. When it is back its claim can be given back.
func TestHostHangs(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	config := p.config()
	config.Reach.SSH.KeepAlive = 500 * time.Millisecond
	a := newAttempt(t, open(t, config), p.group(1))
	require.NoError(t, a.create(false))
	p.servers[0].Hang()
	err := a.destroy()
	require.Equal(t, provisioning.ClassAmbiguous, provisioning.Classify(provisioning.DestroyLease, err), "%v", err)
	require.Len(t, p.claims(), 1)
	p.servers[0].Stop()
	p.servers[0].Start()
	eventually(t, "the end", func() bool { return a.destroy() == nil })
	require.Empty(t, p.claims())
}

// An agent that dies is missed, and its host is given back and taken again.
func TestAgentDies(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	config := p.config()
	config.Join.Silence = 3 * time.Second
	f := p.fleet(config, runOf(t), p.group(1))
	first := f.converged()
	for _, pid := range p.servers[0].Processes() {
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	f.failed("no heartbeat")
	require.NotEqual(t, first, f.converged())
}

// What an agent that ends says is the reason why its attempt fails.
func TestAgentEndsEarly(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	b := open(t, p.config())
	for i, c := range []struct{ command, reason string }{
		{"sh -c 'echo oops >&2; exit 4'", "StartFailed: the agent ended with status 4: oops"},
		{"no-such-program", "StartFailed: the agent ended with status 127: "},
		{"sh -c 'kill -9 $$'", "StartFailed: the agent ended with status 137"},
		{"sh -c 'kill -9 $PPID; exit 1'", "StartFailed: sshfleet: the agent has vanished"},
		{"env SWACTOR_JOIN_TOKEN_FILE=/dev/null " + agentCommand(t), "SwactorJoinFailed: the agent ended with status 3: "},
	} {
		group := p.group(1)
		group.Boot.StartSwactorCommand = c.command
		a := newAttempt(t, b, group)
		a.key.Attempt = provisioning.NodeAttemptID(i + 1)
		require.NoError(t, a.create(false))
		require.NoError(t, a.start(), c.command)
		require.Contains(t, a.await(provisioning.BootstrapFailed).Reason, c.reason, c.command)
		require.NoError(t, a.destroy())
	}
}

// A command that says that the host is not fit is the end of the attempt, and no
// agent was started.
func TestVerifyFails(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	group := p.group(1)
	group.Boot.VerifyCommands = []string{"true", "echo no disk >&2; exit 5"}
	a := newAttempt(t, open(t, p.config()), group)
	require.NoError(t, a.create(false))
	err := a.start()
	require.ErrorContains(t, err, "verify command 2: exit status 5: no disk")
	require.Equal(t, provisioning.ClassDefinite, provisioning.Classify(provisioning.StartBootstrap, err))
	require.Empty(t, p.servers[0].Processes())
	require.NoError(t, a.destroy())
}

// Another controller adopts the agent that runs: it checks and starts nothing, and
// reads all lines from the first, also those of files beside the output.
func TestStartAdoptsAfterRebuild(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	group := p.group(1)
	group.Boot.VerifyCommands = []string{"echo checked >>~/checks"}
	group.Boot.StartSwactorCommand = `sh -c 'echo started >>~/starts; echo one >log; echo out; echo err >&2; echo two >>log; exec sleep 300'`
	group.Boot.StdoutSources = []string{"log"}
	group.Boot.StderrSources = []string{"never"}
	a := newAttempt(t, open(t, p.config()), group)
	require.NoError(t, a.create(false))
	for range 2 {
		config := p.config()
		lines := make(chan Line, 100)
		config.OnLine = func(l Line) { lines <- l }
		a.b = open(t, config)
		require.NoError(t, a.start())
		got := make(map[string]bool)
		for range 4 {
			select {
			case l := <-lines:
				got[fmt.Sprint(l.Text, l.Stderr)] = true
			case <-soon(t).Done():
				require.Fail(t, "no line", "%v", got)
			}
		}
		require.Equal(t, map[string]bool{"outfalse": true, "errtrue": true, "onefalse": true, "twofalse": true}, got)
		require.NoError(t, a.b.Close())
	}
	for _, name := range []string{"checks", "starts"} {
		text, err := os.ReadFile(filepath.Join(p.servers[0].Home(), name))
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(string(text), "\n"), name)
	}
	a.b = open(t, p.config())
	require.NoError(t, a.destroy())
}

// An agent that is started from all sides at once is one agent.
func TestStartAtOnceIsOneAgent(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	group := p.group(1)
	group.Boot.StartSwactorCommand = "sh -c 'echo started >>~/starts; exec sleep 300'"
	a := newAttempt(t, open(t, p.config()), group)
	require.NoError(t, a.create(false))
	var starting sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		other := *a
		other.b = open(t, p.config())
		starting.Go(func() { errs[i] = other.start() })
	}
	starting.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	starts := filepath.Join(p.servers[0].Home(), "starts")
	eventually(t, "the agent", func() bool { _, err := os.Stat(starts); return err == nil })
	// Those that came too late are gone: agent and parent, once.
	eventually(t, "the end of the others", func() bool {
		_, all, err := marked(a.key.Token())
		require.NoError(t, err)
		return all == 2
	})
	text, err := os.ReadFile(starts)
	require.NoError(t, err)
	require.Equal(t, "started\n", string(text))
	require.NoError(t, a.destroy())
}

// Two controllers want the last host. One gets it, the other one waits until it is
// given back.
func TestTwoControllersAndOneHost(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	var fleets []*fleet
	for i := range 2 {
		fleets = append(fleets, p.fleet(p.config(), provisioning.RunID(fmt.Sprintf("%s-%d", runOf(t), i)), p.group(1)))
	}
	var winner, loser *fleet
	eventually(t, "a winner", func() bool {
		for i, f := range fleets {
			if f.Status().Converged {
				winner, loser = f, fleets[1-i]
			}
		}
		return winner != nil
	})
	eventually(t, "the refusal", func() bool {
		node, ok := loser.Driver().Snapshot().Node("w-0")
		return ok && strings.Contains(node.Retry.LastError, ErrNoHost.Error())
	})
	require.False(t, loser.Status().Converged)
	require.Len(t, winner.settled(), 1)
	require.Empty(t, loser.settled())
	require.NoError(t, winner.Drain(soon(t)))
	require.Len(t, loser.converged(), 1)
	require.Empty(t, winner.settled())
	require.Len(t, p.claims(), 1)
}

// Many controllers, fewer hosts, all at once: no host has two claims, and all
// hosts have one.
func TestControllersRace(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 2)
	ctx := soon(t)
	var racing sync.WaitGroup
	var mu sync.Mutex
	var winners []*attempt
	for i := range 6 {
		a := newAttempt(t, open(t, p.config()), p.group(1))
		a.key.Run = provisioning.RunID(fmt.Sprintf("%s-%d", runOf(t), i))
		racing.Go(func() {
			for ctx.Err() == nil {
				err := a.create(false)
				mu.Lock()
				if err == nil {
					winners = append(winners, a)
				}
				full := len(winners) == len(p.servers)
				mu.Unlock()
				if full || err == nil {
					return
				}
				if provisioning.Classify(provisioning.CreateLease, err) != provisioning.ClassDefinite {
					mu.Lock()
					t.Errorf("a create without trouble: %v", err)
					mu.Unlock()
					return
				}
			}
		})
	}
	racing.Wait()
	require.Len(t, winners, 2)
	claims := p.claims()
	require.Len(t, claims, 2)
	require.NotEqual(t, claims[winners[0].key.Token()], claims[winners[1].key.Token()])
	for _, a := range winners {
		require.NoError(t, a.destroy())
	}
	require.Empty(t, p.claims())
}

// The answer to a create is lost, and the host is away when it is repeated: the
// other host, which is free, is not taken. When it is back the claim is found.
func TestLostAnswerIsAdopted(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 2)
	config := p.config()
	config.Run = runOf(t)
	b := open(t, config)
	for _, restarted := range []bool{false, true} {
		a := newAttempt(t, b, p.group(1))
		a.key.Node = provisioning.NewLogicalNodeID("w", map[bool]int{true: 1}[restarted])
		require.NoError(t, a.create(false))
		lease := a.lease
		h, err := b.hostOf(lease)
		require.NoError(t, err)
		server := p.servers[h.Name[0]-'a']
		server.Stop()
		if restarted { // by a controller that knows nothing of it
			a.b = open(t, p.config())
		}
		for _, adoptOnly := range []bool{false, true} {
			a.lease = ""
			err := a.create(adoptOnly)
			require.ErrorIs(t, err, ErrInDoubt)
			require.Equal(t, provisioning.ClassAmbiguous, provisioning.Classify(provisioning.CreateLease, err))
		}
		require.Len(t, p.claims(), 1)
		server.Start()
		eventually(t, "the claim", func() bool { return a.create(false) == nil })
		require.Equal(t, lease, a.lease)
		require.Len(t, p.claims(), 1)
		require.NoError(t, a.destroy())
		require.Empty(t, p.claims())
	}
}

// Two claims of one key, however that came about: the first by name is kept.
func TestSecondClaimIsReleased(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 3)
	b := open(t, p.config())
	a := newAttempt(t, b, p.group(1))
	for _, h := range b.config.Hosts[1:] {
		_, err := b.Pool().Make(soon(t), h, a.key, "")
		require.NoError(t, err)
	}
	a.sent = 1
	require.NoError(t, a.create(false))
	require.Equal(t, map[string][]string{a.key.Token(): {"b"}}, p.claims())
	require.Equal(t, leaseID(b.config.Hosts[1], a.key), a.lease)
	require.NoError(t, a.destroy())
	require.Empty(t, p.claims())
}

// A claim is not made again under a token that had one (B11), also by a controller
// that knows nothing of it.
func TestSpentTokenStaysSpent(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 2)
	a := newAttempt(t, open(t, p.config()), p.group(1))
	require.NoError(t, a.create(false))
	require.NoError(t, a.destroy())
	for _, a.b = range []*Backend{a.b, open(t, p.config())} {
		err := a.create(false)
		require.ErrorIs(t, err, ErrSpent)
		require.Equal(t, provisioning.ClassLeaseLost, provisioning.Classify(provisioning.CreateLease, err))
	}
	require.Empty(t, p.claims())
}

// A clean-up command that fails keeps the claim: the host is not as it was. It is
// run again until it does not.
func TestCleanUpFails(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	group := p.group(1)
	group.Shape.ProviderLabels[CleanupLabel] = "[ -e ~/mended ] || { echo it is stuck; exit 7; }"
	a := newAttempt(t, open(t, p.config()), group)
	require.NoError(t, a.create(false))
	require.NoError(t, a.start())
	err := a.destroy()
	require.ErrorContains(t, err, "the clean-up command failed with status 7: it is stuck")
	require.Equal(t, provisioning.ClassAmbiguous, provisioning.Classify(provisioning.DestroyLease, err))
	require.Len(t, p.claims(), 1)
	_, all, err := marked(a.key.Token())
	require.NoError(t, err)
	require.Zero(t, all, "the agent was stopped first")
	require.NoError(t, os.WriteFile(filepath.Join(p.servers[0].Home(), "mended"), nil, 0o600))
	require.NoError(t, a.destroy())
	require.Empty(t, p.claims())
}

// An agent that does not listen to SIGTERM is killed, and so are its children,
// also those that have left its group.
func TestStubbornAgentEnds(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	group := p.group(1)
	group.Boot.StartSwactorCommand = `sh -c 'trap "" TERM; setsid sleep 300 & touch ~/up; while :; do sleep 300; done'`
	a := newAttempt(t, open(t, p.config()), group)
	require.NoError(t, a.create(false))
	require.NoError(t, a.start())
	eventually(t, "the agent", func() bool { _, err := os.Stat(filepath.Join(p.servers[0].Home(), "up")); return err == nil })
	require.NoError(t, a.destroy())
	_, all, err := marked(a.key.Token())
	require.NoError(t, err)
	require.Zero(t, all)
}

// Whoever has overwritten his environment is found by his group, also as an
// orphan and of a verify or clean-up command, and whoever has left that too by his parent: also if he does not listen
// to SIGTERM and his parent does.
func TestUnmarkedProcessesEnd(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	group := p.group(1)
	group.Boot.StartSwactorCommand = `sh -c '
		(env -i sleep 300 & echo $! >~/orphan.pid)
		env -i setsid sleep 300 & echo $! >~/left.pid
		env -i setsid sh -c "trap : TERM; while :; do sleep 0.1; done" & echo $! >~/stubborn.pid
		echo $$ >~/agent.pid
		exec env -i sleep 300'`
	const leave = "env -i sleep 300 >/dev/null 2>&1 & echo $! >~/%s.pid"
	group.Boot.VerifyCommands = []string{fmt.Sprintf(leave, "verify")}
	group.Shape.ProviderLabels[CleanupLabel] = fmt.Sprintf(leave, "cleanup")
	a := newAttempt(t, open(t, p.config()), group)
	require.NoError(t, a.create(false))
	require.NoError(t, a.start())
	home := p.servers[0].Home()
	eventually(t, "the agent", func() bool {
		_, all, err := marked(a.key.Token())
		require.NoError(t, err)
		_, err = os.Stat(filepath.Join(home, "agent.pid"))
		return err == nil && all <= 1 // only who waits for it
	})
	processes := make(map[string]int)
	read := func(name string) {
		text, err := os.ReadFile(filepath.Join(home, name+".pid"))
		require.NoError(t, err)
		processes[name], err = strconv.Atoi(strings.TrimSpace(string(text)))
		require.NoError(t, err)
	}
	for _, name := range []string{"verify", "agent", "orphan", "left", "stubborn"} {
		read(name)
		require.True(t, runs(processes[name]), name)
	}
	t.Cleanup(func() {
		for _, pid := range processes {
			if t.Failed() && runs(pid) {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	require.NoError(t, a.destroy())
	read("cleanup")
	for name, pid := range processes {
		require.False(t, runs(pid), name)
	}
}

// runs reports whether a process is there and has not ended.
func runs(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	return err == nil && !strings.HasPrefix(rest, "Z")
}

// A claim that is not where it was made is not gone, whatever else there is: it
// was moved, is not mounted, or cannot be read.
func TestClaimThatIsHidden(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 2)
	config := p.config()
	config.Run = runOf(t)
	b := open(t, config)
	a := newAttempt(t, b, p.group(1))
	require.NoError(t, a.create(false))
	require.NoError(t, a.start())
	h, err := b.hostOf(a.lease)
	require.NoError(t, err)
	dir := p.servers[h.Name[0]-'a'].Dir()
	away := dir + ".away"
	claims := filepath.Join(dir, "claims")
	for _, hide := range []struct {
		what       string
		hide, show func() error
		complaint  string
	}{
		{"the directory", func() error { return os.Rename(dir, away) }, func() error { return os.Rename(away, dir) },
			"there are no claims in .swactor, and none ever were"},
		{"the claims", func() error { return os.Rename(claims, away) }, func() error { return os.Rename(away, claims) },
			"neither the claim nor the mark that it was ended is in .swactor"},
		{"a file in its place", func() error { return errors.Join(os.Rename(claims, away), os.WriteFile(claims, nil, 0o600)) },
			func() error { return errors.Join(os.Remove(claims), os.Rename(away, claims)) }, "cannot read " + claims},
		{"a link to nowhere", func() error { return errors.Join(os.Rename(dir, away), os.Symlink("nowhere", dir)) },
			func() error { return errors.Join(os.Remove(dir), os.Rename(away, dir)) }, "cannot read " + dir},
	} {
		require.NoError(t, hide.hide(), hide.what)
		err := a.destroy()
		require.ErrorContains(t, err, hide.complaint, hide.what)
		require.Equal(t, provisioning.ClassAmbiguous, provisioning.Classify(provisioning.DestroyLease, err), hide.what)
		if hide.what != "the claims" { // the host is known to be used: a claim that is not there was never made
			_, err = b.find(soon(t), a.key)
			require.ErrorIs(t, err, ErrInDoubt, hide.what)
		}
		require.NoError(t, hide.show(), hide.what)
	}
	require.NoError(t, a.destroy())
	require.Empty(t, p.claims())
}

// Who knows that a claim is lost can say so. What bears its mark is stopped.
func TestLostClaimIsBuried(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	a := newAttempt(t, open(t, p.config()), p.group(1))
	require.NoError(t, a.create(false))
	require.NoError(t, a.start())
	require.NoError(t, os.RemoveAll(p.servers[0].Dir()))
	require.ErrorContains(t, a.destroy(), "none ever were")
	require.NoError(t, a.b.Pool().Bury(soon(t), p.servers[0].Host(), a.key.Token()))
	_, all, err := marked(a.key.Token())
	require.NoError(t, err)
	require.Zero(t, all)
	require.NoError(t, a.destroy())
}

// A host whose shell prints something at each login is a host like any other: what
// it prints is no answer, and no line of an agent.
func TestHostThatGreets(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	p.servers[0].Greet("Welcome!\nheld\ngone\nready\nno end of line")
	config := p.config()
	lines := make(chan Line, 100)
	config.OnLine = func(l Line) { lines <- l }
	group := p.group(1)
	group.Boot.VerifyCommands = []string{"[ -e ~/fit ] || { echo not fit >&2; exit 5; }"}
	group.Boot.StartSwactorCommand = "sh -c 'echo out; echo err >&2; exec sleep 300'"
	a := newAttempt(t, open(t, config), group)
	require.NoError(t, a.create(false))
	require.Len(t, p.claims(), 1)
	err := a.start()
	require.ErrorContains(t, err, "exit status 5: not fit")
	require.NoError(t, os.WriteFile(filepath.Join(p.servers[0].Home(), "fit"), nil, 0o600))
	require.NoError(t, a.start())
	for range 2 {
		select {
		case l := <-lines:
			require.Equal(t, map[bool]string{false: "out", true: "err"}[l.Stderr], l.Text)
			require.EqualValues(t, 1, l.Number)
		case <-soon(t).Done():
			require.Fail(t, "no line")
		}
	}
	found, used, err := a.b.Pool().List(soon(t), p.servers[0].Host())
	require.NoError(t, err)
	require.True(t, used)
	require.Len(t, found, 1)
	require.NoError(t, a.destroy())
	require.Empty(t, p.claims())
}

// The agent is stopped also where nothing can be written: then the claim stays.
func TestAgentStopsThoughNothingCanBeWritten(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	a := newAttempt(t, open(t, p.config()), p.group(1))
	require.NoError(t, a.create(false))
	require.NoError(t, a.start())
	a.await(provisioning.SwactorJoined)
	spent := filepath.Join(p.servers[0].Dir(), "spent")
	require.NoError(t, os.WriteFile(filepath.Join(spent, a.key.Token()), nil, 0o600)) // in the way of the directory
	err := a.destroy()
	require.Equal(t, provisioning.ClassAmbiguous, provisioning.Classify(provisioning.DestroyLease, err), "%v", err)
	require.Empty(t, p.servers[0].Processes())
	require.Len(t, p.claims(), 1)
	require.NoError(t, os.Remove(filepath.Join(spent, a.key.Token())))
	require.NoError(t, a.destroy())
	require.Empty(t, p.claims())
}

// What is secret is on no command line and in no file that others can read.
func TestSecretsStaySecret(t *testing.T) {
	t.Parallel()
	p := newPlace(t, 1)
	const secret = "hunter2-of-the-environment"
	group := p.group(1)
	group.Boot.Env = map[string]string{"PASSWORD": secret}
	group.Boot.VerifyCommands = []string{`test "$PASSWORD" = ` + secret[:7] + `"-of-the-environment"`}
	a := newAttempt(t, open(t, p.config()), group)
	require.NoError(t, a.create(false))
	require.NoError(t, a.start())
	token, err := os.ReadFile(filepath.Join(p.secrets, DefaultTokenRef))
	require.NoError(t, err)
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, name := range lines {
		text, err := os.ReadFile(name)
		if err == nil { // it has not ended meanwhile
			require.NotContains(t, string(text), secret)
			require.NotContains(t, string(text), string(token))
		}
	}
	info, err := os.Stat(filepath.Join(p.servers[0].Dir(), "claims"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	log, err := os.ReadFile(filepath.Join(p.servers[0].Home(), "..", "log"))
	require.NoError(t, err)
	require.NotContains(t, string(log), secret)
	require.NoError(t, a.destroy())
}

// A wish that no inventory could fulfil is refused with what is wrong.
func TestValidateGroup(t *testing.T) {
	t.Parallel()
	b := &Backend{config: Config{Hosts: []*inventory.Host{{Name: "a", User: "u", Labels: map[string]string{"zone": "x"}}, {Name: "b", User: "v"}}}}
	good := provisioning.NodeGroupSpec{Count: 2, Boot: provisioning.BootSpec{StartSwactorCommand: "agent"}}
	require.Empty(t, b.ValidateGroup(good))
	for field, spoil := range map[string]func(*provisioning.NodeGroupSpec){
		"provider":                 func(g *provisioning.NodeGroupSpec) { g.Provider = "process" },
		"shape.gpuName":            func(g *provisioning.NodeGroupSpec) { g.Shape.GPUName = "h100" },
		"boot.startSwactorCommand": func(g *provisioning.NodeGroupSpec) { g.Boot.StartSwactorCommand = "" },
		"boot.env":                 func(g *provisioning.NodeGroupSpec) { g.Boot.Env = map[string]string{"a b": ""} },
		"boot":                     func(g *provisioning.NodeGroupSpec) { g.Boot.Args = []string{"\x00"} },
		"boot.mounts":              func(g *provisioning.NodeGroupSpec) { g.Boot.Mounts = []provisioning.Mount{{}} },
		"boot.stdoutSources":       func(g *provisioning.NodeGroupSpec) { g.Boot.StdoutSources = make([]string, 6) },
		"count":                    func(g *provisioning.NodeGroupSpec) { g.Count = 3 },
	} {
		group := good
		spoil(&group)
		faults := b.ValidateGroup(group)
		require.Len(t, faults, 1, field)
		require.Equal(t, field, faults[0].Field)
	}
	for _, few := range []func(*provisioning.NodeGroupSpec){
		func(g *provisioning.NodeGroupSpec) { g.Shape.ProviderLabels = map[string]string{"zone": "x"} },
		func(g *provisioning.NodeGroupSpec) { g.Boot.SSHUser = "v" },
	} {
		group := good
		few(&group)
		require.Len(t, b.ValidateGroup(group), 1)
		group.Count = 1
		require.Empty(t, b.ValidateGroup(group))
	}
}
