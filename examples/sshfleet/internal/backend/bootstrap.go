package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/agent"
	"github.com/swactor/provisioning/examples/localfleet/remote"
	"github.com/swactor/provisioning/examples/sshfleet/internal/hosts"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

// What commands and agents are told beside what every agent is.
const (
	imageVariable = "SSHFLEET_IMAGE"
	hostVariable  = "SSHFLEET_HOST"
)

// DefaultProgress is how often line numbers are reported at most.
const DefaultProgress = 200 * time.Millisecond

// Session returns the name of the bootstrap session of an attempt. There is
// one in an attempt's life, and who asks again gets it again (B1).
func Session(key provisioning.ExternalKey) provisioning.BootstrapSessionID {
	return provisioning.BootstrapSessionID(key.TokenFor("bootstrap"))
}

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// ValidateGroup refuses what no host of the inventory could ever be.
func (b *Backend) ValidateGroup(group provisioning.NodeGroupSpec) []provisioning.ShapeFault {
	var faults []provisioning.ShapeFault
	fault := func(field, format string, args ...any) {
		faults = append(faults, provisioning.ShapeFault{Field: field, Problem: fmt.Sprintf(format, args...)})
	}
	if group.Provider != "" && group.Provider != Kind {
		fault("provider", "%q is not known, only %q", group.Provider, Kind)
	}
	if group.Shape.GPUName != "" {
		fault("shape.gpuName", "an inventory knows labels only: put it in one, and in shape.providerLabels")
	}
	if fits := len(b.matching(group.Shape.ProviderLabels, group.Boot.SSHUser)); fits < group.Count {
		fault("count", "only %d hosts of the inventory have these labels and this user", fits)
	}
	boot := group.Boot
	if boot.StartSwactorCommand == "" {
		fault("boot.startSwactorCommand", "is missing: nothing is installed on these hosts")
	}
	for _, name := range slices.Sorted(maps.Keys(boot.Env)) {
		if !variableName.MatchString(name) {
			fault("boot.env", "%q is no name of a variable", name)
		}
	}
	texts := slices.Concat([]string{boot.StartSwactorCommand, group.Shape.Image, group.Shape.ProviderLabels[CleanupLabel]}, boot.VerifyCommands,
		boot.Args, boot.StdoutSources, boot.StderrSources, slices.Collect(maps.Values(boot.Env)))
	if slices.ContainsFunc(texts, func(s string) bool { return strings.ContainsRune(s, 0) }) {
		fault("boot", "a NUL byte cannot be told to a shell")
	}
	if len(boot.Mounts) > 0 {
		fault("boot.mounts", "these hosts are mounted as they are")
	}
	if len(boot.StdoutSources)+len(boot.StderrSources) > hosts.MaxSources {
		fault("boot.stdoutSources", "at most %d files are followed, with boot.stderrSources", hosts.MaxSources)
	}
	return faults
}

// check returns why a host could not become a node of this spec. A wish that
// came here has been accepted, so it is only what may have changed since.
func (b *Backend) check(spec provisioning.LogicalNodeSpec) error {
	_, err := b.secret(spec.SwarmJoin.JoinTokenRef)
	return err
}

// agent returns what is to run under the claim of a key.
func (b *Backend) agent(h *inventory.Host, key provisioning.ExternalKey, spec provisioning.LogicalNodeSpec, token []byte) hosts.Agent {
	env := maps.Clone(spec.Boot.Env)
	if env == nil {
		env = make(map[string]string)
	}
	maps.Copy(env, map[string]string{ // ours win
		agent.Run: string(key.Run), agent.Node: string(key.Node), agent.Attempt: strconv.FormatUint(uint64(key.Attempt), 10),
		agent.Address: cmp.Or(spec.SwarmJoin.OrchSwactorAddr, b.JoinAddr()),
		imageVariable: spec.Shape.Image, hostVariable: h.Name,
	})
	return hosts.Agent{
		Verify: spec.Boot.VerifyCommands, Command: spec.Boot.StartSwactorCommand, Args: spec.Boot.Args, Env: env,
		Secret: token, SecretFile: agent.TokenFile, Stdout: spec.Boot.StdoutSources, Stderr: spec.Boot.StderrSources,
	}
}

// job is the bootstrap of one attempt.
type job struct {
	backend *Backend
	host    *inventory.Host
	key     provisioning.ExternalKey
	agent   hosts.Agent
	sink    provisioning.BootstrapSink
}

func (j *job) stage(s provisioning.BootstrapStage) { j.sink.Progress(Session(j.key), s, 0, 0) }

// start has the agent running when it returns nil. An error says in its class
// what it leaves behind: NotStarted before anything was run, Definite where the
// host is of no use, Ambiguous where nobody knows.
func (j *job) start(ctx context.Context) error {
	pool := j.backend.pool
	j.stage(provisioning.BootstrapStageCreated)
	j.stage(provisioning.BootstrapStageSSHConnecting)
	err := pool.Reach(ctx, j.host)
	switch {
	case errors.Is(err, remote.ErrHostKey), errors.Is(err, remote.ErrLogin):
		return provisioning.Definite(err)
	case err != nil:
		return provisioning.NotStarted(err)
	}
	j.stage(provisioning.BootstrapStageSSHReady)
	err = pool.Start(ctx, j.host, j.key.Token(), j.agent,
		func() { j.stage(provisioning.BootstrapStageBootChecking) },
		func() { j.stage(provisioning.BootstrapStageSwactorStarting) })
	_, failed := errors.AsType[*remote.ExitError](err)
	switch {
	case errors.Is(err, hosts.ErrLost):
		return provisioning.LeaseLost(err)
	case failed, errors.Is(err, hosts.ErrCancelled):
		return provisioning.Definite(err)
	case err != nil:
		return provisioning.Ambiguous(err)
	}
	j.stage(provisioning.BootstrapStageStdoutStreaming)
	j.stage(provisioning.BootstrapStageWaitingForSwactorJoin)
	return nil
}

// stream follows an agent that was started.
type stream struct {
	job    *job
	cancel context.CancelFunc
	done   chan struct{}
	lines  [2]atomic.Uint64 // stdout, stderr
	last   atomic.Value     // the last line of stderr
}

// follow begins to follow.
func (j *job) follow() *stream {
	ctx, cancel := context.WithCancel(context.Background())
	s := &stream{job: j, cancel: cancel, done: make(chan struct{})}
	go s.run(ctx)
	return s
}

// close stops following, reports nothing any more, and waits for all that it
// had running. The agent goes on. A nil stream is closed.
func (s *stream) close() {
	if s != nil {
		s.cancel()
		<-s.done
	}
}

// over reports whether there is nothing left to follow.
func (s *stream) over() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// run reports line numbers until the agent ends or the connection is cut, both
// of which are failures of the bootstrap (B10), or until close.
func (s *stream) run(ctx context.Context) {
	defer close(s.done)
	defer s.cancel()
	j := s.job
	period := cmp.Or(j.backend.config.Progress, DefaultProgress)
	type end struct {
		status int
		err    error
	}
	ended := make(chan end, 1)
	changed := make(chan struct{}, 1)
	line := func(i int) func(string) {
		return func(text string) {
			if ctx.Err() != nil {
				return
			}
			n := s.lines[i].Add(1)
			if i == 1 {
				s.last.Store(text)
			}
			if j.backend.config.OnLine != nil {
				j.backend.config.OnLine(Line{Key: j.key, Stderr: i == 1, Number: n, Text: text})
			}
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}
	go func() {
		status, err := j.backend.pool.Follow(ctx, j.host, j.key.Token(), j.agent, period, line(0), line(1))
		ended <- end{status, err}
	}()
	// At most one report in each period, and none when nothing changed.
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			select {
			case <-changed:
				s.report()
			default:
			}
		case e := <-ended:
			if ctx.Err() != nil {
				return
			}
			s.report()
			j.sink.Failed(Session(j.key), s.describe(e.status, e.err))
			return
		}
	}
}

func (s *stream) report() {
	s.job.sink.Progress(Session(s.job.key), provisioning.BootstrapStageWaitingForSwactorJoin, s.lines[0].Load(), s.lines[1].Load())
}

// describe says why there is nothing left to follow.
func (s *stream) describe(status int, err error) string {
	stage := provisioning.BootstrapStageStartFailed
	switch {
	case errors.Is(err, hosts.ErrVanished):
		return fmt.Sprintf("%v: %v", stage, err)
	case err != nil:
		return fmt.Sprintf("%v: %v", provisioning.BootstrapStageStreamError, err)
	case status == agent.ExitRefused:
		stage = provisioning.BootstrapStageSwactorJoinFailed
	}
	last, _ := s.last.Load().(string)
	return strings.TrimSuffix(fmt.Sprintf("%v: the agent ended with status %d: %s", stage, status, last), ": ")
}

// node returns the node of a key, which reports through sink from now on, and
// whether its agent is followed.
func (b *Backend) node(key provisioning.ExternalKey, sink provisioning.BootstrapSink) (n *node, followed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n = b.nodes[key]
	if n == nil {
		n = &node{key: key}
		b.nodes[key] = n
	}
	n.sink = sink
	if n.stream != nil && n.stream.over() {
		n.stream = nil
	}
	return n, n.stream != nil
}

// attach follows the agent of a node. It is false if the node was destroyed
// meanwhile.
func (b *Backend) attach(n *node, j *job) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	there := b.nodes[n.key] == n
	if there && n.stream == nil {
		n.stream = j.follow()
	}
	return there
}

// detach takes the stream of a node, if it has one, to be closed by whoever
// took it.
func (b *Backend) detach(key provisioning.ExternalKey) (n *node, s *stream) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n = b.nodes[key]; n != nil {
		s, n.stream = n.stream, nil
	}
	return n, s
}

// lose reports the loss of a node, once, unless it is being destroyed.
func (b *Backend) lose(n *node, reason string) {
	b.mu.Lock()
	news := !b.closed && b.nodes[n.key] == n && !n.lost
	n.lost = true
	sink := n.sink
	b.mu.Unlock()
	if news {
		sink.NodeLost(reason)
	}
}
