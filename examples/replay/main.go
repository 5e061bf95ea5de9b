// Command replay shows what a journal holds: it repeats it through the real
// driver, prints what happened to each slot and when, explains a moment, and
// makes a test of it.
package main

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/swactor/provisioning"
)

const usage = `usage: replay [flags] JOURNAL

JOURNAL is what a driver has written to its Config.Journal. Without flags the
timeline of every slot is printed. Times count from the first pass.
-scenario writes nothing if the journal holds what a scenario cannot say, and
names the line.

Exit status: 0 if the journal was repeated without a difference, 1 if it was
not or is no good from some line on (what comes before is shown), 2 if nothing
could be done.

`

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("replay", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, usage)
		flags.PrintDefaults()
	}
	at := flags.Duration("at", 0, "explain this moment instead, for example 12m30s")
	slot := flags.String("slot", "", "only this slot, for example w-3")
	scenario := flags.String("scenario", "", "write a scenario to this `file` that repeats the journal against the fake provider, for go test ./internal/scenario")
	test := flags.String("gotest", "", "write a Go test to this `file` that repeats the journal, a copy of which goes to testdata beside it")
	refuse := func(problem any) int {
		fmt.Fprintln(stderr, "replay:", printable(fmt.Sprint(problem)))
		return 2
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case flags.NArg() != 1:
		return refuse("name one journal")
	}
	given := make(map[string]bool)
	empty := ""
	flags.Visit(func(f *flag.Flag) {
		given[f.Name] = true
		if f.Value.String() == "" {
			empty = f.Name
		}
	})
	switch {
	case empty != "":
		return refuse("-" + empty + " is empty")
	case *at < 0:
		return refuse("-at must not be negative")
	case given["scenario"] && given["gotest"]:
		return refuse("-scenario and -gotest are for two runs")
	case (given["scenario"] || given["gotest"]) && (given["at"] || given["slot"]):
		return refuse("-scenario and -gotest are of the whole journal: there is no -at or -slot with them")
	}
	journal, err := os.ReadFile(flags.Arg(0))
	if err != nil {
		return refuse(err)
	}

	line := newTimeline()
	report, err := provisioning.ReplayWith(bytes.NewReader(journal), provisioning.ReplayOptions{OnEvent: line.add})
	if report.Driver == nil {
		return refuse(err)
	}
	node := provisioning.LogicalNodeID(*slot)
	switch {
	case report.Passes == 0 && (given["scenario"] || given["at"]):
		why := "nothing has happened yet"
		if err != nil {
			why = err.Error()
		} else if report.Difference != nil {
			why = report.Difference.String()
		}
		return refuse("the journal holds no whole pass: " + why)
	case *scenario != "":
		if problem := writeScenario(*scenario, flags.Arg(0), journal, report, stdout); problem != nil {
			return refuse(problem)
		}
	case *test != "":
		if problem := writeTest(*test, flags.Arg(0), journal, report, stdout); problem != nil {
			return refuse(problem)
		}
	case given["at"]:
		// A reading that is no step forward leaves the clock where the journal
		// has left it, which may be after the last pass.
		ends := report.Driver.Clock(report.First).Sub(report.First)
		if *at > ends {
			what := "the journal"
			if err != nil || report.Difference != nil {
				what = "what is good of the journal"
			}
			fmt.Fprintf(stdout, "%s ends at %v: this is as of then\n", what, ends)
			*at = ends
		}
		if !explainMoment(stdout, journal, report.First, *at, node) {
			return refuse(fmt.Sprintf("there is no slot %s at %v", node, *at))
		}
	default:
		if !line.print(stdout, report.First, node) {
			return refuse(fmt.Sprintf("nothing is told of a slot %s", node))
		}
	}
	if report.Difference != nil {
		for line := range strings.SplitSeq(report.Difference.String(), "\n") {
			fmt.Fprintln(stderr, printable(line))
		}
		return 1
	}
	if err != nil {
		fmt.Fprintln(stderr, printable(err.Error()))
		return 1
	}
	if *test == "" && *scenario == "" {
		fmt.Fprintf(stdout, "%d lines, %d passes in %v, repeated without a difference.\n",
			report.Lines, report.Passes, report.Last.Sub(report.First))
	}
	return 0
}

// explainMoment prints what a slot, or the cluster and every slot, does at a
// moment. It reports whether there is such a slot.
func explainMoment(out io.Writer, journal []byte, first time.Time, at time.Duration, slot provisioning.LogicalNodeID) bool {
	now := first.Add(at)
	// What is no good in the journal has been found already.
	report, _ := provisioning.ReplayWith(bytes.NewReader(journal), provisioning.ReplayOptions{Until: now})
	var slots []provisioning.LogicalNodeID
	for node := range report.Driver.Snapshot().All() {
		slots = append(slots, node.Record.Node)
	}
	if slot != "" {
		slots = []provisioning.LogicalNodeID{slot}
	} else {
		fmt.Fprintf(out, "%v  %s\n", at, printable(report.Driver.ExplainCluster(now).String()))
	}
	for _, slot := range slots {
		e, ok := report.Driver.Explain(slot, now)
		if !ok {
			return false
		}
		fmt.Fprintf(out, "%v  %s\n", at, printable(e.String()))
	}
	return true
}

// timeline keeps the events of each slot; those of the cluster are under "".
type timeline struct {
	events map[provisioning.LogicalNodeID][]moment
}

type moment struct {
	at   time.Time
	text string
}

func newTimeline() *timeline {
	return &timeline{events: make(map[provisioning.LogicalNodeID][]moment)}
}

// add is the driver's hook. It makes text of an event at once, whose
// observation is only there during the call.
func (l *timeline) add(e provisioning.Event) {
	if e.Kind == provisioning.EventPass {
		return
	}
	text := e.String()
	if o := e.Observation; o != nil {
		if why := cmp.Or(o.Reason, o.Completion.Message); why != "" {
			text += ": " + why
		}
	}
	l.events[e.Node] = append(l.events[e.Node], moment{e.At, text})
}

// print reports whether there was something to print.
func (l *timeline) print(out io.Writer, first time.Time, slot provisioning.LogicalNodeID) bool {
	slots := slices.SortedFunc(maps.Keys(l.events), compareSlots)
	if slot != "" {
		slots = []provisioning.LogicalNodeID{slot}
		if l.events[slot] == nil {
			return false
		}
	}
	for _, slot := range slots {
		fmt.Fprintln(out, "==", cmp.Or(printable(string(slot)), "the cluster"))
		for _, m := range l.events[slot] {
			after := max(m.at.Sub(first), 0) // an update may come before the first pass
			fmt.Fprintf(out, "%12v  %s\n", after, printable(m.text))
		}
	}
	return true
}

// compareSlots has w-9 before w-10 and what is no slot first.
func compareSlots(a, b provisioning.LogicalNodeID) int {
	groupA, indexA := parts(a)
	groupB, indexB := parts(b)
	return provisioning.CompareSlots(groupA, indexA, groupB, indexB)
}

func parts(slot provisioning.LogicalNodeID) (provisioning.NodeGroupID, int) {
	cut := strings.LastIndexByte(string(slot), '-')
	if cut < 0 {
		return provisioning.NodeGroupID(slot), -1
	}
	index, err := strconv.Atoi(string(slot[cut+1:]))
	if err != nil {
		return provisioning.NodeGroupID(slot), -1
	}
	return provisioning.NodeGroupID(slot[:cut]), index
}

// printable writes out what a terminal would obey instead of show: a journal
// holds what providers have said.
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
