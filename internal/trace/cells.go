package trace

import (
	"fmt"
	"maps"

	"github.com/swactor/provisioning"
)

// Result is how an operation ended, as it was folded.
type Result uint8

// The results. Of an operation that is out of time the executor says whether it
// was running or still queued behind a call of its own attempt.
const (
	Succeeded Result = iota
	Definite
	Ambiguous
	NotStarted
	LeaseLost
	TimedOut
	TimedOutQueued
	Results // how many there are
)

var resultNames = [...]string{"success", "Definite", "Ambiguous", "NotStarted", "LeaseLost", "timed out", "timed out in the queue"}

// String returns the name of the result.
func (r Result) String() string { return resultNames[r] }

// Cell is the end of an operation at a place: the stage and the intent of the
// node before it was folded.
type Cell struct {
	Operation provisioning.OperationKind
	Result    Result
	Stage     provisioning.Stage
	Intent    provisioning.Intent
}

// String returns the cell in words.
func (c Cell) String() string {
	return fmt.Sprintf("%v, %v, at %v, %v", c.Operation, c.Result, c.Stage, c.Intent)
}

// Cells returns how often an operation ended in each cell.
func (w *World) Cells() map[Cell]int { return maps.Clone(w.watch.cells) }

// place is where a node is.
type place struct {
	stage  provisioning.Stage
	intent provisioning.Intent
}

// locate follows a node by what the driver tells, and counts the cells. It is an
// error if two events in a row do not fit.
func (w *watch) locate(e provisioning.Event) error {
	at := w.at[e.Attempt]
	switch e.Kind {
	case provisioning.EventFold:
		if e.Observation.Kind == provisioning.OperationCompleted {
			w.cells[Cell{e.Operation, resultOf(e), at.stage, at.intent}]++
		}
		return nil
	case provisioning.EventAttemptStarted:
		at = place{provisioning.StageNew, provisioning.Active}
	case provisioning.EventDeleting:
		at.intent = provisioning.Deleting
	case provisioning.EventStage:
		if restarts := e.To == provisioning.StageNew; !restarts && e.From != at.stage {
			return fmt.Errorf("%s#%d goes from %v to %v and was at %v", e.Node, e.Attempt, e.From, e.To, at.stage)
		}
		at.stage = e.To
	default:
		return nil
	}
	w.at[e.Attempt] = at
	return nil
}

func resultOf(e provisioning.Event) Result {
	switch {
	case e.Expired && e.Class == provisioning.ClassAmbiguous:
		return TimedOut
	case e.Expired && e.Class == provisioning.ClassNotStarted:
		return TimedOutQueued
	}
	return [...]Result{provisioning.ClassNone: Succeeded, provisioning.ClassDefinite: Definite, provisioning.ClassAmbiguous: Ambiguous,
		provisioning.ClassNotStarted: NotStarted, provisioning.ClassLeaseLost: LeaseLost}[e.Class]
}
