package scenario

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/swactor/provisioning"
)

// story plays lines and keeps them: a failure prints the file to save.
type story struct {
	t     *rapid.T
	r     *runner
	lines []string
}

func (s *story) line(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	s.lines = append(s.lines, line)
	if err := s.r.play(strings.Fields(line)); err != nil {
		s.t.Fatalf("%v, in\n%s", err, strings.Join(s.lines, "\n"))
	}
}

var storySlots = []provisioning.LogicalNodeID{"w-0", "w-1", "w-2", "x-0"}

// release ends calls that hang, those that the draw picks.
func (s *story) release(outcome func() string, pick func() bool) {
	for _, slot := range storySlots {
		for _, o := range operations {
			if s.r.fake.Hanging(slot, o.kind) > 0 && pick() {
				s.line("release %s %s %s", slot, o.word, outcome())
			}
		}
	}
}

// quieten lets everything come to its end: what hangs returns, what runs joins,
// and time passes until the script is used up.
func (s *story) quieten(step string) {
	for range 40 {
		s.release(func() string { return "ok" }, func() bool { return true })
		for _, slot := range storySlots {
			if node, ok := s.r.driver.Node(slot); ok && node.Record.Stage == provisioning.StageBootstrapRunning {
				s.line("event %s joined", slot)
			}
		}
		s.line("advance %s", step)
	}
}

// G5, G7: whatever the provider, the stream, the clock and the wish do, once
// the trouble stops the cluster becomes what is wished for and stays it, and a
// wish for nothing leaves nothing. On the way everything holds that the runner
// checks after each line. And the journal of it can be told as a scenario.
func TestProp_TroubleEndsAsWished(t *testing.T) {
	outcomes := map[string][]string{
		"create": {"ok", "definite", "error", "ambiguous", "done-ambiguous", "hang", "done-hang", "slow=40s", "done-slow=40s", "late=45s", "late=3s",
			"panic", "done-panic", "lost", "dead", "retry-after=90s", "refuse", "spot-loss=50s", "ok-no-endpoint"},
		"lookup": {"not-ready", "definite", "ambiguous", "hang", "slow=40s", "panic", "lost", "refuse"},
	}
	others := []string{"ok", "definite", "error", "ambiguous", "done-ambiguous", "hang", "done-hang", "slow=40s", "done-slow=7s", "late=45s",
		"panic", "done-panic", "lost", "retry-after=90s", "refuse"}
	for _, o := range []string{"start", "converge", "cancel", "destroy"} {
		outcomes[o] = others
	}
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string, words ...string) string { return rapid.SampledFrom(words).Draw(t, label) }
		slot := func() provisioning.LogicalNodeID { return rapid.SampledFrom(storySlots).Draw(t, "slot") }
		var journal bytes.Buffer
		s := &story{t: t, r: &runner{config: defaults(), options: Options{NewestFirst: rapid.Bool().Draw(t, "newest first"), Journal: &journal}}}
		defer func() {
			if err := s.r.close(); err != nil {
				t.Fatal(err)
			}
		}()
		generation := 0
		shape := func() {
			generation++
			s.line("shape %d w:%d@%s x:%d@a", generation, rapid.IntRange(0, 3).Draw(t, "w"), draw("image", "a", "b"), rapid.IntRange(0, 1).Draw(t, "x"))
		}
		s.line("config max-in-flight=%d %s %s", rapid.IntRange(0, 2).Draw(t, "max in flight"), draw("bootstrap", "bootstrap=auto", "bootstrap=manual"),
			draw("class", "class=token", "class=name", "class=label lag=5s settle=60s", "class=token settle=20s", "class=name settle=10s"))
		shape()
		for range rapid.IntRange(0, 30).Draw(t, "lines") {
			switch draw("command", "shape", "script", "script", "event", "release", "remove", "advance", "jump") {
			case "shape":
				shape()
			case "script":
				operation := draw("operation", "create", "create", "create", "lookup", "start", "converge", "cancel", "destroy")
				s.line("script %s %s %s", slot(), operation, draw("outcome", outcomes[operation]...))
			case "event":
				if id := slot(); !expectGone(s.r, id) {
					s.line("event %s %s", id, draw("event", "joined", "closed", "failed", "lost", "stage=Converged", "stage=Cancelled", "stage=SSHReady"))
				}
			case "release":
				s.release(func() string {
					return draw("outcome", "ok", "definite", "ambiguous", "lost", "late=5s", "error", "done-panic")
				},
					func() bool { return rapid.Bool().Draw(t, "release") })
			case "remove":
				if id := slot(); s.r.fake.Live(id) > 0 {
					s.line("remove %s", id)
				}
			case "advance":
				s.line("advance %dms", rapid.IntRange(0, 40_000).Draw(t, "ms"))
			case "jump":
				s.line("jump %dms", rapid.IntRange(-30_000, 50_000).Draw(t, "ms"))
			}
		}
		// A machine that was removed without a word is missed by nobody but
		// the bill: only new attempts are counted on in the end.
		generation++
		s.line("shape %d w:3@c", generation)
		s.quieten("10m")
		s.line("expect converged true")
		s.line("expect live 3")
		s.line("advance 30h")
		s.line("expect converged true")
		generation++
		s.line("shape %d", generation)
		s.quieten("10m")
		s.line("expect slots")
		s.line("expect live 0")
		told, err := tellJournal("random trouble", journal.Bytes())
		if err == nil {
			err = runTold(told, Options{NewestFirst: !s.r.options.NewestFirst})
		}
		if unsayable, ok := errors.AsType[*UnsayableError](err); ok && strings.Contains(unsayable.What, "asked for with an answer") {
			err = nil // the one thing drawn here that the language has no word for
		}
		if err != nil {
			t.Fatalf("%v, in\n%s", err, strings.Join(s.lines, "\n"))
		}
	})
}

func expectGone(r *runner, slot provisioning.LogicalNodeID) bool {
	_, there := r.driver.Node(slot)
	return !there
}
