package view

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/status"
)

// drawEvery is how often the table is drawn at most.
const drawEvery = 100 * time.Millisecond

// ShowTable draws the table until the function it returns is called.
func ShowTable(out *os.File, fleet *status.Fleet, note string) (end func()) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	table := NewTable(out)
	table.Note = note
	go func() {
		defer close(stopped)
		defer table.Close()
		ticker := time.NewTicker(drawEvery) // there are countdowns in the picture
		defer ticker.Stop()
		for {
			table.Draw(fleet.Status())
			select {
			case <-ticker.C:
			case <-stop:
				return
			}
		}
	}()
	return func() { close(stop); <-stopped }
}

// ShowLines prints events until the function it returns is called. It never
// holds up the driver, whose events they are: what a slow reader does not take
// is left out, and counted.
func ShowLines(out io.Writer, journal *status.Journal) (end func()) {
	lines, printed := make(chan string, 1024), make(chan struct{})
	go func() {
		defer close(printed)
		for line := range lines {
			fmt.Fprintln(out, line)
		}
	}()
	leftOut := 0
	journal.Follow(func(e status.Event) {
		if leftOut > 0 && len(lines) < cap(lines)-1 {
			lines <- fmt.Sprintf("%d lines were left out: nobody read them", leftOut)
			leftOut = 0
		}
		select {
		case lines <- Line(e):
		default:
			leftOut++
		}
	})
	return func() {
		journal.Follow(nil)
		close(lines)
		<-printed
	}
}

// Plan prints a plan.
func Plan(out io.Writer, p control.Plan) {
	fmt.Fprintf(out, "The next pass towards generation %d: %d steps, %d slots wait or are as wished.\n", p.Generation, len(p.Steps), p.Waiting)
	for _, step := range p.Steps {
		text := fmt.Sprintf("%s (%s: %s)", step.What, step.Rule, step.Why)
		if step.Fault != "" {
			text = "cannot go on: " + step.Fault
		}
		fmt.Fprintln(out, Printable(fmt.Sprintf("%-16s %s", step.Node, text)))
	}
}
