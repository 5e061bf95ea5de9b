package view

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/examples/localfleet/status"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func slot(node string, phase status.Phase, done int) status.Slot {
	return status.Slot{Node: node, Attempt: 3, Stage: "BootstrapRunning", Phase: phase, Done: done, Steps: 12, Why: "because"}
}

func fleet(slots ...status.Slot) status.Status {
	return status.Status{Name: "localfleet", Run: "r", BeganAt: now, Now: now.Add(90 * time.Second), Generation: 2, Ready: 1, Desired: 2, Held: 2,
		Progress: 0.5, Slots: slots}
}

func picture(s status.Status, width, height int) []string {
	return (&Table{}).picture(s, width, height)
}

func TestPicture(t *testing.T) {
	rising := slot("w-0", status.Rising, 6)
	rising.Bootstrap, rising.LastError = "BootChecking", "broken before"
	deleting := slot("w-10", status.Deleting, 0)
	s := fleet(rising, deleting, slot("w-11", status.Ready, 12))
	s.Events = []status.Event{{At: now, Node: "w-0", Attempt: 3, Level: status.Bad, Text: "it broke"}, {At: now, Text: "of all"}}
	table := &Table{Note: "page at http://127.0.0.1:1/"}
	require.Equal(t, []string{
		"localfleet  converging  run r  generation 2  up for 1m30s",
		strings.Repeat("█", 25) + strings.Repeat("░", 25) + "  50 %  ready 1 of 2, 2 with a machine",
		"",
		"SLOT  ATTEMPT  STAGE             PROGRESS      WHY",
		"w-0         3  BootstrapRunning  ██████░░░░░░  BootChecking; because; the last failure: broken before",
		"w-10        3  deleting          ░░░░░░░░░░░░  because",
		"w-11        3  BootstrapRunning  ████████████  because",
		"",
		"03:04:05.000  w-0 #3               it broke",
		"03:04:05.000  fleet                of all",
		"",
		"page at http://127.0.0.1:1/",
	}, table.picture(s, 104, 40))
}

func TestPictureSaysWhatStateItIs(t *testing.T) {
	for want, change := range map[string]func(*status.Status){
		"converged": func(s *status.Status) { s.Converged = true },
		"draining":  func(s *status.Status) { s.Converged, s.Draining = true, true },
		"ended":     func(s *status.Status) { s.Converged, s.Ended = true, "interrupt" },
	} {
		s := fleet()
		change(&s)
		require.Contains(t, picture(s, 80, 24)[0], "localfleet  "+want+"  run")
	}
	s := fleet()
	s.FileProblem = "fleet.yaml:1: is wrong\nfleet.yaml:2: too"
	require.Equal(t, "shape file refused, the old wish stays: fleet.yaml:1: is wrong", picture(s, 80, 24)[2])
}

var colours = regexp.MustCompile("\x1b\\[[0-9]*m")

// Whatever the size of the terminal, the picture fits, and slots that are not
// ready are seen before those that are.
func TestPictureFits(t *testing.T) {
	var s status.Status
	for i := range 60 {
		next := slot(strings.Repeat("long-", 10)+string(rune('a'+i%26)), status.Ready, 12)
		next.Why = strings.Repeat("word ", 60)
		if i == 50 {
			next.Phase, next.Why = status.Waiting, "the one in trouble"
		}
		s.Slots = append(s.Slots, next)
	}
	for range 20 {
		s.Events = append(s.Events, status.Event{At: now, Text: strings.Repeat("event ", 60)})
	}
	for _, colour := range []bool{false, true} {
		for width := 1; width < 200; width += 7 {
			for height := 1; height < 60; height += 3 {
				lines := (&Table{colour: colour, Note: strings.Repeat("note ", 60)}).picture(s, width, height)
				require.LessOrEqual(t, len(lines), height)
				if width >= 80 {
					for _, line := range lines {
						require.LessOrEqual(t, utf8.RuneCountInString(colours.ReplaceAllString(line, "")), width, "%q", line)
					}
					if height >= 16 {
						require.Contains(t, strings.Join(lines, "\n"), "the one")
						require.Contains(t, strings.Join(lines, "\n"), "more")
					}
				}
			}
		}
	}
}

// What comes from outside cannot do anything to the terminal.
func TestControlSequencesAreSpeltOut(t *testing.T) {
	const evil = "\x1b[2J\x07\u202etxt\x9b31m\n\xffend"
	const harmless = `\u001b[2J\u0007\u202etxt\x9b31m  \xffend`
	require.Equal(t, harmless, plain(evil))
	require.Equal(t, "für 日本 😀 \uFFFD", plain("für 日本 😀 \uFFFD"))
	s := fleet(slot(evil, status.Rising, 1))
	s.Slots[0].Why, s.Slots[0].LastError, s.Slots[0].Stage = evil, evil+"x", "New"
	s.Slots[0].Lease, s.Slots[0].Image = evil, evil
	s.Run, s.FileProblem = evil, evil
	s.Events = []status.Event{{Node: evil, Text: evil}}
	var list, one bytes.Buffer
	List(&list, s)
	Explain(&one, s.Slots[0], now)
	for _, text := range []string{strings.Join(picture(s, 300, 40), "\n"), Line(s.Events[0]), list.String(), one.String(), Printable(evil)} {
		for _, r := range text {
			require.True(t, r == '\n' || r >= 0x20 && r != 0x7f && r != 0x9b && r != '\u202e', "%q", text)
		}
		require.Contains(t, text, `\u001b[2J`)
	}
}

func TestExplainSaysAll(t *testing.T) {
	s := status.Slot{Node: "w-0", Attempt: 12, Attempts: 11, Failed: 10, Stage: "BootstrapRunning", Bootstrap: "SSHReady", Image: "v1",
		Why: "waiting 5s more", Rule: "R10 await-backoff", Operation: "CreateLease", DueAt: now.Add(5 * time.Second),
		EndsAt: now.Add(time.Minute), Failures: 3, LastError: "no", Lease: "l", Endpoint: "127.0.0.1:1", Swactor: "s"}
	var out bytes.Buffer
	Explain(&out, s, now)
	require.Equal(t, `w-0: waiting 5s more [R10 await-backoff]
  attempt       12, the 11th of this slot, 10 failed
  stage         BootstrapRunning
  bootstrap     SSHReady
  image         v1
  operation     CreateLease
  deadline      in 5s
  out of time   in 1m0s
  failures      3 in a row
  last failure  no
  lease         l
  endpoint      127.0.0.1:1
  agent         s
`, out.String())
	require.Equal(t, "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 111th", strings.Join([]string{ordinal(1), ordinal(2), ordinal(3),
		ordinal(4), ordinal(11), ordinal(12), ordinal(13), ordinal(21), ordinal(22), ordinal(111)}, " "))
}

func TestAFileIsNoTerminal(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/f")
	require.NoError(t, err)
	defer f.Close()
	require.False(t, IsTerminal(f))
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer null.Close()
	require.False(t, IsTerminal(null))
}
