package bootstrap

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/agent"
	"github.com/swactor/provisioning/examples/localfleet/remote"
)

// DefaultProgress is how often line numbers are reported at most.
const DefaultProgress = 200 * time.Millisecond

// Job is the bootstrap of one attempt.
type Job struct {
	SSH    remote.Config
	Target remote.Target
	Key    provisioning.ExternalKey
	Spec   provisioning.LogicalNodeSpec
	// JoinAddress is where the agent joins, Token what it proves to know.
	JoinAddress string
	Token       []byte
	Sink        provisioning.BootstrapSink
	// Progress is the least time between two reports of line numbers. 0
	// means DefaultProgress.
	Progress time.Duration
	// OnLine takes every line of the agent. It may be nil.
	OnLine func(Line)
}

// Line is one line that an agent printed. They are numbered from 1 in each
// stream; who connects again reads them again from the first.
type Line struct {
	Key    provisioning.ExternalKey
	Stderr bool
	Number uint64
	Text   string
}

func (j *Job) session() provisioning.BootstrapSessionID { return Session(j.Key) }

// Stream follows an agent that was started.
type Stream struct {
	job    Job
	conn   *remote.Conn
	cancel context.CancelFunc
	done   chan struct{}
	lines  [2]atomic.Uint64 // stdout, stderr
}

// Start connects, checks the machine, starts the agent, and returns while it
// goes on to follow it. Where the agent was started before, it is adopted: not
// checked again, not started again (B1).
//
// An error says in its class what it leaves behind: NotStarted before anything
// was run, Definite where the machine is of no use, Ambiguous where the
// connection broke or ctx was done.
func Start(ctx context.Context, job Job) (*Stream, error) {
	stage := func(s provisioning.BootstrapStage) { job.Sink.Progress(job.session(), s, 0, 0) }
	stage(provisioning.BootstrapStageCreated)
	stage(provisioning.BootstrapStageSSHConnecting)
	conn, err := remote.Dial(ctx, job.SSH, job.Target)
	switch {
	case errors.Is(err, remote.ErrHostKey), errors.Is(err, remote.ErrLogin):
		return nil, provisioning.Definite(err)
	case err != nil:
		return nil, provisioning.NotStarted(err)
	}
	stage(provisioning.BootstrapStageSSHReady)
	if err := job.raise(ctx, conn, stage); err != nil {
		conn.Close()
		return nil, err
	}
	following, cancel := context.WithCancel(context.Background())
	s := &Stream{job: job, conn: conn, cancel: cancel, done: make(chan struct{})}
	stage(provisioning.BootstrapStageStdoutStreaming)
	stage(provisioning.BootstrapStageWaitingForSwactorJoin)
	go s.follow(following)
	return s, nil
}

var errCancelled = errors.New("localfleet: the session was cancelled")

// raise has the agent running when it returns nil.
func (j *Job) raise(ctx context.Context, conn *remote.Conn, stage func(provisioning.BootstrapStage)) error {
	state, err := conn.Run(ctx, within(j.session(), lookScript), nil)
	if err != nil {
		return provisioning.NotStarted(fmt.Errorf("localfleet: cannot look at the machine: %w", err))
	}
	switch state {
	case wordCancelled:
		return provisioning.Definite(errCancelled)
	case wordStarted:
	default:
		stage(provisioning.BootstrapStageBootChecking)
		for i, command := range j.Spec.Boot.VerifyCommands {
			if _, err := conn.Run(ctx, command, nil); err != nil {
				return j.classify(fmt.Errorf("localfleet: verify command %d: %w", i+1, err))
			}
		}
	}
	stage(provisioning.BootstrapStageSwactorStarting)
	if _, err := conn.Run(ctx, shell, strings.NewReader(j.start())); err != nil {
		if exit, ok := errors.AsType[*remote.ExitError](err); ok && exit.Status == exitCancelled {
			return provisioning.Definite(errCancelled)
		}
		return j.classify(fmt.Errorf("localfleet: cannot start the agent: %w", err))
	}
	return nil
}

// classify tells a command that failed from one whose end nobody knows.
func (j *Job) classify(err error) error {
	if _, ok := errors.AsType[*remote.ExitError](err); ok {
		return provisioning.Definite(err)
	}
	return provisioning.Ambiguous(err)
}

// Close stops following, reports nothing any more, and waits for all that it
// had running. The agent goes on.
func (s *Stream) Close() {
	s.cancel()
	<-s.done
}

// Ended reports whether there is nothing left to follow.
func (s *Stream) Ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// follow reports line numbers until the agent ends or the connection is cut,
// both of which are failures of the bootstrap (B10), or until Close.
func (s *Stream) follow(ctx context.Context) {
	defer close(s.done)
	defer s.cancel()
	j := &s.job
	changed := make(chan struct{}, 1)
	var running sync.WaitGroup
	defer running.Wait()
	defer s.conn.Close()
	for i, command := range []string{
		j.follow("stdout", j.Spec.Boot.StdoutSources),
		j.follow("stderr", j.Spec.Boot.StderrSources),
	} {
		running.Go(func() {
			// Its end is that of the connection, or a broken tail: then
			// the lines stay away, and nothing else.
			s.conn.Lines(ctx, command, nil, func(text string) {
				n := s.lines[i].Add(1)
				if j.OnLine != nil {
					j.OnLine(Line{Key: j.Key, Stderr: i == 1, Number: n, Text: text})
				}
				select {
				case changed <- struct{}{}:
				default:
				}
			}, nil)
		})
	}
	ended := make(chan string, 1)
	running.Go(func() {
		if said, err := s.conn.Run(ctx, within(j.session(), awaitScript), nil); err == nil {
			ended <- said
		}
	})
	// At most one report in each period, and none when nothing changed.
	ticker := time.NewTicker(cmp.Or(j.Progress, DefaultProgress))
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			select {
			case <-changed:
				s.report(provisioning.BootstrapStageWaitingForSwactorJoin)
			default:
			}
		case said := <-ended:
			s.report(provisioning.BootstrapStageWaitingForSwactorJoin)
			j.Sink.Failed(j.session(), describeEnd(said))
			return
		case <-s.conn.Cut():
			if ctx.Err() == nil {
				j.Sink.Failed(j.session(), provisioning.BootstrapStageStreamError.String()+": the connection was cut")
			}
			return
		case <-ctx.Done():
			return
		}
	}
}

func (s *Stream) report(stage provisioning.BootstrapStage) {
	s.job.Sink.Progress(s.job.session(), stage, s.lines[0].Load(), s.lines[1].Load())
}

// describeEnd puts what the await script said in words.
func describeEnd(said string) string {
	status, last, _ := strings.Cut(said, "\n")
	stage := provisioning.BootstrapStageStartFailed
	if status == fmt.Sprint(agent.ExitRefused) {
		stage = provisioning.BootstrapStageSwactorJoinFailed
	}
	return strings.TrimSuffix(fmt.Sprintf("%v: the agent ended with status %s: %s", stage, status, last), ": ")
}

// Cancel ends the agent of a session on its machine, and sees to it that none
// is started for it later. That there is none is no error (B5).
func Cancel(ctx context.Context, config remote.Config, target remote.Target, session provisioning.BootstrapSessionID) error {
	conn, err := remote.Dial(ctx, config, target)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Run(ctx, shell, strings.NewReader(within(session, cancelScript)))
	return err
}
