// Package view shows a fleet on a terminal: a table that is drawn again in
// place, or plain lines where nobody looks at a screen.
package view

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/swactor/provisioning/examples/localfleet/status"
)

// IsTerminal reports whether somebody looks at out.
func IsTerminal(out *os.File) bool {
	return os.Getenv("TERM") != "dumb" && term.IsTerminal(int(out.Fd()))
}

// Line is one event as a line.
func Line(e status.Event) string {
	who := "fleet"
	if e.Node != "" {
		who = fmt.Sprintf("%s #%d", e.Node, e.Attempt)
	}
	return fmt.Sprintf("%s  %-20s %s", e.At.Format("15:04:05.000"), plain(who), plain(e.Text))
}

// plain makes a text from outside harmless to a terminal: what would move the
// cursor, change colours or turn the reading direction is spelt out.
func plain(text string) string {
	var b strings.Builder
	for i, r := range text {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(text[i:], "\uFFFD"):
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case r == '\n' || r == '\t':
			b.WriteString("  ")
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// Control sequences that every terminal of today knows.
const (
	enterScreen = "\x1b[?1049h\x1b[?7l\x1b[?25l" // a screen of its own, no wrapping, no cursor
	leaveScreen = "\x1b[?25h\x1b[?7h\x1b[?1049l"
	eraseLine   = "\x1b[K" // from the cursor to the right
	eraseBelow  = "\x1b[J"
)

const (
	red, green, yellow = "31", "32", "33"
	cyan, grey, bold   = "36", "90", "1"
)

var phaseColours = map[status.Phase]string{
	status.Rising: cyan, status.Waiting: yellow, status.Ready: green, status.Deleting: red, status.Gone: grey,
}

// Table is the table on a terminal.
type Table struct {
	out    *os.File
	colour bool
	// Note is a line below the table, such as where the page is.
	Note string
}

// NewTable takes the screen, until Close.
func NewTable(out *os.File) *Table {
	fmt.Fprint(out, enterScreen)
	return &Table{out: out, colour: os.Getenv("NO_COLOR") == ""}
}

// Close gives the screen back as it was.
func (t *Table) Close() { fmt.Fprint(t.out, leaveScreen) }

// Draw replaces the last picture.
func (t *Table) Draw(s status.Status) {
	width, height, err := term.GetSize(int(t.out.Fd()))
	if err != nil || width < 1 || height < 1 {
		width, height = 80, 24
	}
	var b strings.Builder
	// Erasing behind the last column would erase what stands in it.
	for i, line := range t.picture(s, width-1, height) {
		fmt.Fprintf(&b, "\x1b[%d;1H%s%s", i+1, line, eraseLine)
	}
	b.WriteString(eraseBelow)
	io.WriteString(t.out, b.String())
}

const (
	slotBar   = 12
	maxName   = 28
	maxEvents = 6
)

// picture makes at most height lines. Nothing in them is wider than the
// terminal, which does not wrap either.
func (t *Table) picture(s status.Status, width, height int) []string {
	name := len("SLOT")
	for _, slot := range s.Slots {
		name = max(name, utf8.RuneCountInString(plain(slot.Node)))
	}
	name = min(name, maxName)

	state, colour := "converging", cyan
	switch {
	case s.Ended != "":
		state, colour = "ended", red
	case s.Draining:
		state, colour = "draining", yellow
	case s.Converged:
		state, colour = "converged", green
	}
	lines := []string{
		t.paint(bold, s.Name) + "  " + t.paint(colour, state) +
			fmt.Sprintf("  run %s  generation %d  up for %s", plain(s.Run), s.Generation, s.Now.Sub(s.BeganAt).Truncate(time.Second)),
		t.bar(s.Progress, min(max(width-54, 10), 60), colour) +
			fmt.Sprintf(" %3d %%  ready %d of %d, %d with a machine", int(s.Progress*100), s.Ready, s.Desired, s.Held),
	}
	if s.FileProblem != "" {
		first, _, _ := strings.Cut(s.FileProblem, "\n")
		lines = append(lines, t.paint(red, cut("shape file refused, the old wish stays: "+plain(first), width)))
	}
	lines = append(lines, "", t.paint(grey, fmt.Sprintf("%-*s  ATTEMPT  %-16s  %-*s  WHY", name, "SLOT", "STAGE", slotBar, "PROGRESS")))

	// The last lines are for what has happened, the note, and what is left out.
	events := s.Events[max(0, len(s.Events)-min(maxEvents, height/4)):]
	room := max(height-len(lines)-len(events)-4, 3)
	visible, hidden := choose(s.Slots, room)
	for _, slot := range visible {
		colour := phaseColours[slot.Phase]
		stage := slot.Stage
		if slot.Phase == status.Deleting {
			stage = "deleting"
		}
		before := fmt.Sprintf("%-*s  %7d  ", name, cut(plain(slot.Node), name), slot.Attempt)
		lines = append(lines, before+t.paint(colour, fmt.Sprintf("%-16s", stage))+"  "+
			t.bar(float64(slot.Done)/float64(slot.Steps), slotBar, colour)+"  "+
			cut(reason(slot), width-utf8.RuneCountInString(before)-16-slotBar-4))
	}
	if hidden > 0 {
		lines = append(lines, t.paint(grey, fmt.Sprintf("and %d more", hidden)))
	}
	lines = append(lines, "")
	for _, e := range events {
		colour := grey
		switch e.Level {
		case status.Bad:
			colour = red
		case status.Good:
			colour = green
		}
		lines = append(lines, t.paint(colour, cut(Line(e), width)))
	}
	if t.Note != "" {
		lines = append(lines, "", t.paint(grey, cut(plain(t.Note), width)))
	}
	return lines[:min(len(lines), height)]
}

// reason says what a slot waits for, the bootstrap's stage in front.
func reason(slot status.Slot) string {
	text := slot.Why
	if slot.Bootstrap != "" && slot.Bootstrap != "none" && slot.Phase == status.Rising {
		text = slot.Bootstrap + "; " + text
	}
	if slot.LastError != "" && slot.Phase != status.Ready && !strings.Contains(text, slot.LastError) {
		text += "; the last failure: " + slot.LastError
	}
	return plain(text)
}

// choose returns the slots to show, in their order, and how many there are
// besides. Those that are ready have the least to say.
func choose(slots []status.Slot, room int) (visible []status.Slot, hidden int) {
	readyToDrop := max(0, len(slots)-room)
	for _, slot := range slots {
		switch {
		case slot.Phase == status.Ready && readyToDrop > 0:
			readyToDrop--
		case len(visible) < room:
			visible = append(visible, slot)
		}
	}
	return visible, len(slots) - len(visible)
}

func (t *Table) bar(share float64, width int, colour string) string {
	full := min(max(int(share*float64(width)+0.5), 0), width)
	return t.paint(colour, strings.Repeat("█", full)) + t.paint(grey, strings.Repeat("░", width-full))
}

func (t *Table) paint(colour, text string) string {
	if !t.colour || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

func cut(text string, width int) string {
	runes := []rune(text)
	switch {
	case width <= 0:
		return ""
	case len(runes) <= width:
		return text
	}
	return string(runes[:width-1]) + "…"
}

// List writes a status as plain text, for a command that prints it once.
func List(out io.Writer, s status.Status) {
	state := "converging"
	switch {
	case s.Draining:
		state = "draining"
	case s.Converged:
		state = "converged"
	}
	fmt.Fprintf(out, "run %s, generation %d: %s, %d of %d ready, %d with a machine, %d %% done\n",
		plain(s.Run), s.Generation, state, s.Ready, s.Desired, s.Held, int(s.Progress*100))
	if s.FileProblem != "" {
		fmt.Fprintf(out, "the shape file is refused, the old wish stays:\n%s\n", plainLines(s.FileProblem))
	}
	for _, slot := range s.Slots {
		fmt.Fprintf(out, "%-16s #%-4d %-16s %s\n", plain(slot.Node), slot.Attempt, slot.Stage, reason(slot))
	}
}

// Explain writes all there is to say about a slot.
func Explain(out io.Writer, s status.Slot, now time.Time) {
	fmt.Fprintf(out, "%s: %s [%s]\n", plain(s.Node), plain(s.Why), s.Rule)
	fact := func(name, value string) {
		if value != "" {
			fmt.Fprintf(out, "  %-13s %s\n", name, plain(value))
		}
	}
	in := func(t time.Time) string {
		if t.IsZero() {
			return ""
		}
		return "in " + t.Sub(now).Round(100*time.Millisecond).String()
	}
	if s.Attempt > 0 {
		fact("attempt", fmt.Sprintf("%d, the %s of this slot, %d failed", s.Attempt, ordinal(s.Attempts), s.Failed))
	}
	fact("stage", s.Stage)
	fact("bootstrap", s.Bootstrap)
	fact("image", s.Image)
	fact("operation", s.Operation)
	fact("deadline", in(s.DueAt))
	fact("out of time", in(s.EndsAt))
	if s.Failures > 0 {
		fact("failures", fmt.Sprintf("%d in a row", s.Failures))
	}
	fact("last failure", s.LastError)
	fact("lease", s.Lease)
	fact("endpoint", s.Endpoint)
	fact("agent", s.Swactor)
}

func ordinal(n uint64) string {
	suffix := "th"
	if n%100 < 11 || n%100 > 13 {
		switch n % 10 {
		case 1:
			suffix = "st"
		case 2:
			suffix = "nd"
		case 3:
			suffix = "rd"
		}
	}
	return fmt.Sprintf("%d%s", n, suffix)
}

// plainLines is plain for a text of several lines.
func plainLines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = plain(lines[i])
	}
	return strings.Join(lines, "\n")
}

// Printable is a text from outside, to be printed.
func Printable(text string) string { return plainLines(text) }
