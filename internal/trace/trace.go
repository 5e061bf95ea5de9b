// Package trace makes trouble at random: it draws a world (a provider, a retry
// policy, an order in which work ends) and a list of steps, plays them on a
// real driver, a real executor and the fake provider in virtual time, and after
// every pass asks what must be true. A trace is plain data, so that it can be
// played twice and shrinks well, and it prints in the words of scenario files.
package trace

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// Run is the run of every trace.
const Run provisioning.RunID = "trace"

// Order is the order in which work that is ready at one instant ends.
type Order uint8

// The orders.
const (
	OldestFirst Order = iota
	NewestFirst
	AnyOrder // by Config.Seed
	// AtOnce: within Submit, whose results are thus delivered while the pass
	// runs.
	AtOnce
)

var orderNames = [...]string{"oldest-first", "newest-first", "any-order", "at-once"}

// String returns the name of the order.
func (o Order) String() string { return orderNames[o] }

// Config is the world that a trace is played in.
type Config struct {
	Class           fakebackend.Class
	Lag, Settle     time.Duration
	ManualBootstrap bool          // joins come from steps alone, and in the tail
	JoinAfter       time.Duration // else: how long a bootstrap takes
	Retry           provisioning.RetryPolicy
	GroupRetry      map[provisioning.NodeGroupID]provisioning.RetryPolicy
	MaxInFlight     int
	FirstAttempt    provisioning.NodeAttemptID
	Order           Order
	Seed            uint64
	// PanickingHook: the driver's hook panics after each event.
	PanickingHook bool
	// ManualDrive: only the steps Pass and Drive run passes. Else every step
	// is followed by passes until nothing is left to do.
	ManualDrive bool
	// FoldOnly, if not nil, folds what was delivered and does nothing else. It
	// is called for each observation by itself. Else an observation is folded
	// by the pass that follows it, with all others.
	FoldOnly func(*provisioning.ClusterDriver, time.Time) error
	// FoldEach, if not nil, folds what was delivered, but for the last so many,
	// one by one into a copy of the state, and shows it after each. What must be
	// true is asked there, for nobody sees what a pass, or FoldOnly where more
	// than one waits, folds in between.
	FoldEach func(*provisioning.ClusterDriver, time.Time, int, func(*provisioning.ClusterState) error) error
	// Journal is the driver's; nil: none.
	Journal io.Writer
}

// String returns the config line of a scenario file, with a few words more
// than that language knows.
func (c Config) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "config class=%v lag=%v settle=%v max-in-flight=%d %s", c.Class, c.Lag, c.Settle, c.MaxInFlight, policyWords(c.Retry))
	if c.ManualBootstrap {
		b.WriteString(" bootstrap=manual")
	}
	if c.ManualDrive {
		b.WriteString(" drive=manual")
	}
	if c.FoldOnly != nil {
		b.WriteString(" fold=alone")
	}
	fmt.Fprintf(&b, " # join after %v, %v, seed %d, first attempt %d", c.JoinAfter, c.Order, c.Seed, c.FirstAttempt)
	for _, group := range groupNames {
		if policy, ok := c.GroupRetry[group]; ok {
			fmt.Fprintf(&b, "; group %s: %s", group, policyWords(policy))
		}
	}
	return b.String()
}

func policyWords(p provisioning.RetryPolicy) string {
	return fmt.Sprintf("initial=%v max=%v jitter=%v timeout=%v probe=%v endpoint-timeout=%v bootstrap-timeout=%v stable-after=%v cancel-limit=%d",
		p.InitialDelay, p.MaxDelay, p.Jitter, p.OperationTimeout, p.EndpointProbeInterval, p.EndpointTimeout, p.BootstrapTimeout, p.StableAfter, p.CancelLimit)
}

// Group is a group of a wish: what shapes differ in.
type Group struct {
	ID    provisioning.NodeGroupID
	Count int
	Image string
}

// Shape returns the shape with these groups.
func Shape(generation uint64, groups ...Group) provisioning.ClusterShape {
	shape := provisioning.ClusterShape{RunID: Run, Generation: generation}
	for _, g := range groups {
		shape.Groups = append(shape.Groups, provisioning.NodeGroupSpec{
			GroupID: g.ID, Role: "worker", Provider: "fake", Count: g.Count, Shape: provisioning.NodeShape{Image: g.Image},
		})
	}
	return shape
}

// Kind is what a step does.
type Kind uint8

// The kinds of steps. In brackets the fields of Step that count.
const (
	Wish        Kind = iota // a new wish under the next generation [Groups]
	WishDuring              // a new wish, from within the next Submit [Groups]
	Rewish                  // the accepted wish again
	Refused                 // an update that must be refused [Refusal, Groups]
	Script                  // outcomes of the next calls [Slot, Operation, Outcome, N]
	Release                 // the oldest hanging call returns [Slot, Operation, Outcome]
	Remove                  // a machine goes without a word [Slot, or the next that is there]
	Event                   // an observation of the stream [Slot, or the next that bootstraps; Event, Age, DeadSession]
	Redeliver               // the last N observations of Slot come again [Slot, or the next that is busy; N]
	LoseReports             // the next N stream reports about Slot are lost
	Due                     // time moves to the next due moment, and D beyond [D]
	Leap                    // time leaps by D, nothing is driven on the way
	Through                 // time moves by D and is driven at each due moment
	Back                    // the host's clock is set back by D
	BreakPass               // the Nth call of the executor by a pass from here on panics
	Trigger                 // a pass is asked for without a reason
	Pause                   // growth is to stop
	Resume                  // and to go on
	Replace                 // an operator wants another attempt [Slot, or the next that is there]
	Work                    // N pieces of work run, nothing is delivered
	Pass                    // what was answered is delivered, and one pass runs
	Drive                   // all that is due happens, until nothing is left
	Settle                  // time goes on until the wish is fulfilled; what hangs returns, and growth goes on
	Aim                     // an operation is brought to an end in a rare place [Cell, N]
)

// Kinds is how many kinds of steps a trace can draw.
const Kinds = int(Aim) + 1

// Refusal is why an update has to be refused.
type Refusal uint8

// The refusals.
const (
	OtherRun Refusal = iota
	LowerGeneration
	InvalidShape
	SameGeneration // with other content
	refusals
)

var refusalNames = [...]string{"another run", "a lower generation", "an invalid shape", "the same generation with other content"}

// Step is one step of a trace. Which fields count depends on Kind.
type Step struct {
	Kind      Kind
	Slot      provisioning.LogicalNodeID
	Operation provisioning.OperationKind
	Outcome   fakebackend.Outcome
	N         int
	D         time.Duration
	Groups    []Group
	Refusal   Refusal
	Event     EventWord
	// Age says of which attempt an event is: 0 the current one, 1 the one
	// before it, -1 one that is yet to be.
	Age         int
	DeadSession bool // of a session that never was
	Cell        Cell
}

// EventWord is what an Event step reports.
type EventWord struct {
	Kind  provisioning.ObservationKind
	Stage provisioning.BootstrapStage // of a BootstrapProgress
	Agent provisioning.SwactorID      // of a SwactorJoined; empty: the right one
}

func (e EventWord) String() string {
	switch e.Kind {
	case provisioning.SwactorJoined:
		if e.Agent != "" {
			return "joined id=" + string(e.Agent)
		}
		return "joined"
	case provisioning.BootstrapClosed:
		return "closed"
	case provisioning.BootstrapFailed:
		return "failed"
	case provisioning.NodeLost:
		return "lost"
	}
	return "stage=" + e.Stage.String()
}

var operationWords = [...]string{"none", "create", "lookup", "start", "converge", "cancel", "destroy"}

// String returns the step as a line of a scenario file where that language has
// a word for it.
func (s Step) String() string {
	switch s.Kind {
	case Wish:
		return "shape +1" + groupWords(s.Groups)
	case WishDuring:
		return "shape +1" + groupWords(s.Groups) + " # from within the next Submit"
	case Rewish:
		return "shape +0 # the accepted one again"
	case Refused:
		return "reject shape" + groupWords(s.Groups) + " # " + refusalNames[s.Refusal]
	case Script:
		return fmt.Sprintf("script %s %s %v*%d", s.Slot, operationWords[s.Operation], s.Outcome, s.N)
	case Release:
		return fmt.Sprintf("release %s %s %v", s.Slot, operationWords[s.Operation], s.Outcome)
	case Remove:
		return "remove " + string(s.Slot)
	case Event:
		text := fmt.Sprintf("event %s %v", s.Slot, s.Event)
		if s.Age != 0 {
			text += fmt.Sprintf(" # %d attempts ago", s.Age)
		}
		if s.DeadSession {
			text += " # of a dead session"
		}
		return text
	case Redeliver:
		return fmt.Sprintf("# the last %d observations of %s come again", s.N, s.Slot)
	case LoseReports:
		return fmt.Sprintf("# the next %d reports about %s are lost", s.N, s.Slot)
	case Due:
		return fmt.Sprintf("advance to the next due moment and %v", s.D)
	case Leap:
		return fmt.Sprintf("jump %v", s.D)
	case Through:
		return fmt.Sprintf("advance %v", s.D)
	case Back:
		return fmt.Sprintf("jump -%v", s.D)
	case BreakPass:
		return fmt.Sprintf("# the executor panics at call %d from here on", s.N)
	case Trigger:
		return "trigger"
	case Pause:
		return "pause"
	case Resume:
		return "resume"
	case Replace:
		return "replace " + string(s.Slot)
	case Aim:
		return fmt.Sprintf("# aim at %v, in way %d", s.Cell, s.N)
	case Settle:
		return "# until the wish is fulfilled"
	case Work:
		return fmt.Sprintf("# %d pieces of work run", s.N)
	case Pass:
		return "pass"
	}
	return "drive"
}

func groupWords(groups []Group) string {
	var b strings.Builder
	for _, g := range groups {
		fmt.Fprintf(&b, " %s:%d@%s", g.ID, g.Count, g.Image)
	}
	return b.String()
}

// Trace is a world and what happens in it. The cluster begins with the wish
// for First.
type Trace struct {
	Config Config
	First  []Group
	Steps  []Step
}

// String returns the trace line by line.
func (t Trace) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v\nshape 1%s\n", t.Config, groupWords(t.First))
	for _, s := range t.Steps {
		fmt.Fprintln(&b, s)
	}
	return b.String()
}

// Events is how much happens in a trace. An Aim counts four: it waits for an
// operation, says how that ends, turns the node aside, and has it end.
func (t Trace) Events() int {
	n := len(t.Steps)
	for _, s := range t.Steps {
		if s.Kind == Aim {
			n += 3
		}
	}
	return n
}

// Quiet returns the trace without its trouble: what is wished for, and when.
func (t Trace) Quiet() Trace {
	quiet := Trace{Config: t.Config, First: t.First}
	for _, s := range t.Steps {
		if s.Kind == Wish || s.Kind == Settle {
			quiet.Steps = append(quiet.Steps, s)
		}
	}
	return quiet
}

// GoString is String, for whoever prints drawn values.
func (t Trace) GoString() string { return "\n" + t.String() }
