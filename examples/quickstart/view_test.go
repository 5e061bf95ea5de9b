package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// newQuickTable returns a table that waits for nothing.
func newQuickTable(out io.Writer) *table {
	t := newTable(out, 0)
	t.pace.sleep = func(context.Context, time.Duration) {}
	t.colour = false
	return t
}

func aScene() scene {
	return scene{
		head: "provisioning quickstart   00:01:02", count: "ready 1 of 3",
		slots: []slot{
			{node: "w-0", attempt: 1, stage: "Dormant", colour: green, done: fullBar, why: "ready [R11 steady]", steady: true},
			{node: "w-1", attempt: 12, stage: "BootstrapRunning", colour: cyan, done: 7, why: "BootChecking; waiting"},
			{node: "a-group-with-a-name-that-is-far-too-long-0", attempt: 3, stage: "deleting", colour: red, done: 3, why: "will dispatch DestroyLease [R8 destroy-lease]"},
		},
		chapters: []*chapter{
			{title: "converge", text: "from nothing to the wish", begun: true, ended: true, took: 42 * time.Second},
			{title: "scale up", text: "2 more", begun: true, ended: true, took: time.Second, untrue: []string{"x"}},
			{title: "roll", text: "a new image", begun: true},
			{title: "drain"},
		},
		playing: 3*time.Hour + 4*time.Minute + 5*time.Second,
	}
}

func TestTable(t *testing.T) {
	plain := &table{rows: 10}
	require.Equal(t, `provisioning quickstart   00:01:02
ready 1 of 3

SLOT                      ATTEMPT  STAGE             PROGRESS      WHY
w-0                             1  Dormant           ████████████  ready [R11 steady]
w-1                            12  BootstrapRunning  ███████░░░░░  BootChecking; waiting
a-group-with-a-name-tha…        3  deleting          ███░░░░░░░░░  will dispatch DestroyLease [R8 destroy-lease]

✓ converge    00:00:42  from nothing to the wish
✗ scale up    00:00:01  2 more
▸ roll        03:04:05  a new image
  drain`, strings.Join(plain.render(aScene()), "\n"))

	coloured := &table{rows: 10, colour: true}
	require.Contains(t, strings.Join(coloured.render(aScene()), "\n"),
		"w-1                            12  \x1b[36mBootstrapRunning\x1b[0m  \x1b[36m███████\x1b[0m\x1b[90m░░░░░\x1b[0m  BootChecking; waiting")
}

func TestTableShowsWhatCannotBePrinted(t *testing.T) {
	picture := strings.Join((&table{rows: 10}).render(scene{
		head:     "run r\u202e",
		slots:    []slot{{node: "w\u2067-0", stage: "New", done: 1, why: "failed: \x1b[2J\x07\xff\u009b2J\nx"}, {node: "wide-ü-世-0", stage: "New"}},
		chapters: []*chapter{{title: "a", text: "2 more in w\u2067", begun: true, ended: true}, {title: "b", text: "of w\u2067-0", begun: true}},
	}), "\n")
	require.Equal(t, `run r\u202e


SLOT        ATTEMPT  STAGE             PROGRESS      WHY
w\u2067-0         0  New               █░░░░░░░░░░░  failed: \x1b[2J\a�\u009b2J\nx
wide-ü-世-0        0  New               ░░░░░░░░░░░░  

✓ a           00:00:00  2 more in w\u2067
▸ b           00:00:00  of w\u2067-0`, picture)
}

// With little room those that are ready give way, and the rest keep their order.
func TestTableWithLittleRoom(t *testing.T) {
	picture := (&table{rows: 2}).render(aScene())
	require.Contains(t, picture[4], "w-1 ")
	require.Contains(t, picture[5], "a-group")
	require.Equal(t, "and 1 more", picture[6])
	picture = (&table{rows: 1}).render(aScene())
	require.Contains(t, picture[4], "w-1 ")
	require.Equal(t, "and 2 more", picture[5])

	t.Setenv("LINES", "20")
	require.Equal(t, 6, newTable(io.Discard, 0).rows)
	t.Setenv("LINES", "3")
	require.Equal(t, 1, newTable(io.Discard, 0).rows)
}

func TestTableIsDrawnInPlace(t *testing.T) {
	var out bytes.Buffer
	(&table{out: &out, rows: 10}).draw(scene{head: "one", count: "two"})
	require.Equal(t, "\x1b[1;1Hone\x1b[K\x1b[2;1Htwo\x1b[K\x1b[3;1H\x1b[K\x1b[4;1HSLOT  ATTEMPT  STAGE             PROGRESS      WHY\x1b[K\x1b[5;1H\x1b[K\x1b[J", out.String())
}

func TestNoColour(t *testing.T) {
	t.Setenv("NO_COLOR", "")
	require.True(t, newTable(io.Discard, 0).colour)
	t.Setenv("NO_COLOR", "1")
	require.False(t, newTable(io.Discard, 0).colour)
}

// The table takes the time it should, whatever steps the virtual time makes.
func TestPace(t *testing.T) {
	var out bytes.Buffer
	shown := newTable(&out, 50)
	require.Empty(t, out.String(), "nothing is shown before there is something to tell")
	var slept, longest time.Duration
	shown.pace.sleep = func(_ context.Context, d time.Duration) { slept, longest = slept+d, max(longest, d) }
	s := newTestStory(t, 1, shown)
	require.Empty(t, s.tell(context.Background()))
	require.InDelta(t, s.age()/50+time.Duration(len(s.chapters))*pause, slept, float64(time.Millisecond))
	require.Equal(t, pause, longest)
	require.True(t, strings.HasPrefix(out.String(), enterScreen))
	require.True(t, strings.HasSuffix(out.String(), leaveScreen))

	slept = 0
	told := &lines{out: io.Discard, pace: pace{speed: 10, sleep: shown.pace.sleep}}
	s = newTestStory(t, 1, told)
	require.Empty(t, s.tell(context.Background()))
	require.Equal(t, s.age()/10, slept)

	// Nobody waits for a story that was stopped.
	ctx, stop := context.WithCancel(context.Background())
	stop()
	pace{}.rest(ctx, time.Hour)
	pace{}.wait(context.Background(), time.Hour)
}

func TestIsTerminal(t *testing.T) {
	require.False(t, isTerminal(&bytes.Buffer{}))
	read, write, err := os.Pipe()
	require.NoError(t, err)
	defer read.Close()
	defer write.Close()
	require.False(t, isTerminal(write))
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer null.Close()
	require.False(t, isTerminal(null), "a device at which nobody looks")
}
