package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/swactor/provisioning"
)

// view shows a story while it happens.
type view interface {
	open()
	begin(s *story, c *chapter)
	event(s *story, e provisioning.Event)
	// pass is called before the time moves.
	pass(ctx context.Context, s *story, from, to time.Time)
	end(ctx context.Context, s *story, c *chapter)
	close()
}

// pace lets virtual time pass in real time, at speed virtual seconds in a
// second. The zero pace waits for nothing.
type pace struct {
	speed float64
	sleep func(ctx context.Context, d time.Duration) // nil: on the machine's clock
}

func (p pace) wait(ctx context.Context, virtual time.Duration) {
	if p.speed > 0 {
		p.rest(ctx, time.Duration(float64(virtual)/p.speed))
	}
}

func (p pace) rest(ctx context.Context, d time.Duration) {
	if p.sleep != nil {
		p.sleep(ctx, d)
		return
	}
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// lines is the view for a pipe: when, which slot, what happened.
type lines struct {
	out  io.Writer
	pace pace
}

func (l *lines) begin(s *story, c *chapter) {
	fmt.Fprintf(l.out, "%s  == %s: %s\n", clock(s.age()), c.title, printable(c.text))
}

func (l *lines) end(_ context.Context, s *story, c *chapter) {
	fmt.Fprintf(l.out, "%s  == %s took %s, %d machines\n", clock(s.age()), c.title, clock(c.took), c.machines)
}

func (l *lines) pass(ctx context.Context, _ *story, from, to time.Time) {
	l.pace.wait(ctx, to.Sub(from))
}

func (l *lines) open()  {}
func (l *lines) close() {}

func (l *lines) event(s *story, e provisioning.Event) {
	if text := describe(e); text != "" {
		fmt.Fprintf(l.out, "%s  %-12s #%-3d %s\n", clock(s.age()), printable(string(e.Node)), e.Attempt, printable(text))
	}
}

// describe says what happened to a slot, "" for what is not worth a line.
func describe(e provisioning.Event) string {
	switch e.Kind {
	case provisioning.EventAttemptStarted:
		return "a new attempt begins"
	case provisioning.EventDispatch:
		return fmt.Sprintf("calls %v (%v)", e.Operation, e.Rule)
	case provisioning.EventFold:
		done := e.Observation.Completion
		if done.Class == provisioning.ClassNone {
			return ""
		}
		text := fmt.Sprintf("%v failed, %v: %s", done.Kind, done.Class, plainly(done.Message))
		if done.RetryAfter > 0 {
			text += fmt.Sprintf("; not again within %v", done.RetryAfter)
		}
		return text
	case provisioning.EventNotApplied:
		return fmt.Sprintf("%v not applied: %s", e.Observation.Kind, e.Reason)
	case provisioning.EventStage:
		return fmt.Sprintf("%v -> %v", e.From, e.To)
	case provisioning.EventAttemptFailed:
		return "the attempt failed: " + plainly(e.Reason)
	case provisioning.EventReady:
		return "ready"
	case provisioning.EventDeleting:
		return "will be deleted"
	case provisioning.EventGivenUp:
		return fmt.Sprintf("%v given up: %s", e.Operation, e.Reason)
	case provisioning.EventReaped:
		return "forgotten"
	case provisioning.EventFault:
		return fmt.Sprintf("cannot go on: %v", e.Err)
	}
	return ""
}

// plainly leaves out who says it.
func plainly(text string) string { return strings.ReplaceAll(text, "fakebackend: ", "") }

func clock(d time.Duration) string {
	return fmt.Sprintf("%02d:%02d:%02d", int(d.Hours()), int(d.Minutes())%60, int(d.Seconds())%60)
}

func (s *story) age() time.Duration { return s.provider.Now().Sub(s.begunAt) }

// table is the view for a terminal: a line for each slot, drawn again in place.
// It does not know how large the terminal is, so it needs to be safe without:
// every line has its place, and what is too wide or too low is not seen.
type table struct {
	out    io.Writer
	pace   pace
	colour bool
	rows   int // at most so many slots are shown
}

// Control sequences that every terminal of today knows.
const (
	enterScreen = "\x1b[?1049h\x1b[?7l\x1b[?25l" // a screen of its own, no wrapping, no cursor
	leaveScreen = "\x1b[?25h\x1b[?7h\x1b[?1049l"
	eraseLine   = "\x1b[K" // from the cursor to the right
	eraseBelow  = "\x1b[J"
)

const (
	tableSpeed = 25                    // virtual seconds in a second
	frame      = 50 * time.Millisecond // between two pictures
	pause      = time.Second           // between two chapters
)

func newTable(out io.Writer, speed float64) *table {
	height, err := strconv.Atoi(os.Getenv("LINES"))
	if err != nil {
		height = 24
	}
	return &table{out: out, pace: pace{speed: cmp.Or(speed, tableSpeed)}, colour: os.Getenv("NO_COLOR") == "", rows: max(height-14, 1)}
}

func (t *table) open()  { fmt.Fprint(t.out, enterScreen) }
func (t *table) close() { fmt.Fprint(t.out, leaveScreen) }

func (t *table) begin(s *story, _ *chapter) { t.draw(look(s, s.provider.Now())) }

func (t *table) event(*story, provisioning.Event) {}

func (t *table) pass(ctx context.Context, s *story, from, to time.Time) {
	step := time.Duration(float64(frame) * t.pace.speed)
	for now := from; now.Before(to) && ctx.Err() == nil; now = now.Add(step) {
		t.draw(look(s, now))
		t.pace.wait(ctx, min(step, to.Sub(now)))
	}
}

func (t *table) end(ctx context.Context, s *story, _ *chapter) {
	t.draw(look(s, s.provider.Now()))
	t.pace.rest(ctx, pause)
}

// scene is what the table shows.
type scene struct {
	head, count string
	slots       []slot
	chapters    []*chapter
	playing     time.Duration // how long the last chapter that has begun takes by now
}

// slot is a line of the table.
type slot struct {
	node    string
	attempt provisioning.NodeAttemptID
	stage   string
	colour  string
	done    int // of fullBar
	why     string
	steady  bool
}

// look gathers what is to be seen at an instant.
func look(s *story, now time.Time) scene {
	now = now.Truncate(time.Second)
	driver, status := s.host.Driver(), s.host.Status()
	bought, _ := s.provider.count()
	calls := 0
	for _, n := range s.provider.calls {
		calls += n
	}
	failures := 0
	for _, n := range s.failures {
		failures += n
	}
	shown := scene{
		head: fmt.Sprintf("provisioning quickstart   %s   run %s   generation %d   seed %d", clock(now.Sub(s.begunAt)), s.wish.RunID, status.Generation, s.seed),
		count: fmt.Sprintf("ready %d of %d   machines %d (%d bought)   attempts %d   calls %d (%d failed)",
			status.Ready, status.Desired, s.provider.LiveTotal(), bought, status.Driver.Attempts, calls, failures),
		chapters: s.chapters,
	}
	for node := range driver.Snapshot().All() {
		explanation, _ := driver.Explain(node.Record.Node, now)
		shown.slots = append(shown.slots, lineOf(node, explanation))
	}
	shown.playing = now.Sub(s.chapterAt)
	return shown
}

// fullBar is the progress of a ready node: a step for each stage on the way,
// and for each stage of the bootstrap.
const fullBar = 12

func lineOf(node provisioning.ManagedNode, e provisioning.Explanation) slot {
	name := string(node.Record.Node)
	line := slot{node: name, attempt: node.Attempt, stage: node.Record.Stage.String(), colour: cyan,
		why: plainly(strings.TrimPrefix(e.String(), name+": "))}
	switch node.Record.Stage {
	case provisioning.StageLeaseRequested:
		line.done = 1
	case provisioning.StageLeaseCreated:
		line.done = 2
	case provisioning.StageEndpointKnown:
		line.done = 3
	case provisioning.StageBootstrapRunning:
		line.done = 3 + int(min(node.Record.Bootstrap.LastStage, provisioning.BootstrapStageWaitingForSwactorJoin))
		line.why = fmt.Sprintf("%v; %s", node.Record.Bootstrap.LastStage, line.why)
	case provisioning.StageSwactorJoined:
		line.done = 11
	case provisioning.StageDormant, provisioning.StageHandedOff:
		line.done = fullBar
	case provisioning.StageFailed:
		line.colour = red
	}
	switch {
	case node.Record.Stage == provisioning.StageDestroyed:
		line.colour = grey
	case node.Intent == provisioning.Deleting: // what is left to clean up
		line.stage, line.colour, line.done = "deleting", red, 0
		if node.Record.Lease != "" {
			line.done = 3
		}
		if node.ActiveBootstrap != "" {
			line.done = 6
		}
	case node.Record.Ready:
		line.colour, line.steady = green, true
	case e.Decision.Rule.Name == "await-backoff" && e.Failures > 0:
		line.colour = yellow
	}
	if rule := e.Decision.Rule.Name; e.Failures > 0 && (rule == "await-backoff" || rule == "await-restart") {
		line.why = fmt.Sprintf("%s; %s", plainly(e.LastError), line.why)
	}
	return line
}

const (
	red, green, yellow = "31", "32", "33"
	cyan, grey, bold   = "36", "90", "1"
)

// draw replaces the last picture.
func (t *table) draw(s scene) {
	var b strings.Builder
	for i, line := range t.render(s) {
		// What does not fit piles up in the last column, which is erased.
		fmt.Fprintf(&b, "\x1b[%d;1H%s%s", i+1, line, eraseLine)
	}
	b.WriteString(eraseBelow)
	fmt.Fprint(t.out, b.String())
}

// render makes the lines of a picture.
func (t *table) render(s scene) []string {
	name := len("SLOT")
	for _, line := range s.slots {
		name = max(name, utf8.RuneCountInString(printable(line.node)))
	}
	name = min(name, 24)
	picture := []string{t.paint(bold, s.head), s.count, "",
		t.paint(grey, fmt.Sprintf("%-*s  ATTEMPT  %-16s  %-*s  WHY", name, "SLOT", "STAGE", fullBar, "PROGRESS"))}
	visible, hidden := choose(s.slots, t.rows)
	for _, line := range visible {
		bar := t.paint(line.colour, strings.Repeat("█", line.done)) + t.paint(grey, strings.Repeat("░", fullBar-line.done))
		picture = append(picture, fmt.Sprintf("%-*s  %7d  %s  %s  %s", name, cut(printable(line.node), name), line.attempt,
			t.paint(line.colour, fmt.Sprintf("%-16s", line.stage)), bar, printable(line.why)))
	}
	if hidden > 0 {
		picture = append(picture, t.paint(grey, fmt.Sprintf("and %d more", hidden)))
	}
	picture = append(picture, "")
	for _, c := range s.chapters {
		switch {
		case len(c.untrue) > 0:
			picture = append(picture, t.paint(red, fmt.Sprintf("✗ %-11s %s  %s", c.title, clock(c.took), c.text)))
		case c.ended:
			picture = append(picture, t.paint(green, fmt.Sprintf("✓ %-11s %s  %s", c.title, clock(c.took), c.text)))
		case c.begun:
			picture = append(picture, t.paint(bold, fmt.Sprintf("▸ %-11s %s  %s", c.title, clock(s.playing), c.text)))
		default:
			picture = append(picture, t.paint(grey, "  "+c.title))
		}
	}
	return picture
}

// choose returns the slots to show, in their order, and how many there are
// besides. Those that are steady have the least to say.
func choose(slots []slot, room int) (visible []slot, hidden int) {
	steadyToDrop := max(0, len(slots)-room)
	for _, line := range slots {
		switch {
		case line.steady && steadyToDrop > 0:
			steadyToDrop--
		case len(visible) < room:
			visible = append(visible, line)
		}
	}
	return visible, len(slots) - len(visible)
}

// paint colours a text that is not coloured yet.
func (t *table) paint(colour, text string) string {
	text = printable(text)
	if !t.colour || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

func cut(text string, width int) string {
	if runes := []rune(text); len(runes) > width {
		return string(runes[:width-1]) + "…"
	}
	return text
}

// isTerminal reports whether somebody looks at out.
func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := file.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return false
	}
	null, err := os.Stat(os.DevNull) // a device, and nobody looks at it
	return err != nil || !os.SameFile(info, null)
}

// printable writes out what a terminal would obey instead of show, or what
// would show text in another order than it has: control, format and bidi
// characters, and every other one that is not printable.
func printable(text string) string {
	var b strings.Builder
	for _, r := range text {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}
