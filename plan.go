package provisioning

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"time"
)

// Rule names an entry of the ladder.
type Rule struct {
	Number int    `json:"number"`
	Name   string `json:"name"`
	Why    string `json:"why"`
}

// String returns "R8 destroy-lease".
func (r Rule) String() string { return fmt.Sprintf("R%d %s", r.Number, r.Name) }

// Ladder returns the rules in the order in which they are tried.
func Ladder() []Rule {
	rules := make([]Rule, len(ladder))
	for i := range ladder {
		rules[i] = ladder[i].Rule
	}
	return rules
}

// ActionKind is what is to be done about a slot.
type ActionKind uint8

// The actions. NoAction is the zero value: wait, or nothing to do. Fail is the
// action of a fault. All but Dispatch are bookkeeping of the driver and
// complete the step of their slot.
const (
	NoAction ActionKind = iota
	Insert
	BeginDelete
	MarkDestroyed
	Restart
	Reap
	Dispatch
	Fail
)

var actionNames = [...]string{"none", "Insert", "BeginDelete", "MarkDestroyed", "Restart", "Reap", "Dispatch", "Fail"}

// String returns the name of the action.
func (a ActionKind) String() string { return nameOf(actionNames[:], a) }

// MarshalText uses the names of String.
func (a ActionKind) MarshalText() ([]byte, error) { return marshalName(actionNames[:], a) }

// UnmarshalText refuses an unknown name.
func (a *ActionKind) UnmarshalText(text []byte) error {
	return unmarshalName(actionNames[:], "action", text, a)
}

// NodeDecision is what the ladder says about one slot.
type NodeDecision struct {
	Rule      Rule
	Action    ActionKind
	Operation OperationKind // of a Dispatch
	// Until is the deadline that a waiting rule waits for; zero if it waits
	// for none. It may be due already.
	Until time.Time
	// Err says why the action cannot be taken, or that no rule fits.
	Err error
}

func (d decision) export(n *node) NodeDecision {
	out := NodeDecision{Rule: d.Rule, Action: d.action, Operation: d.operation, Err: d.fault}
	if d.until != nil {
		out.Until = d.until(n).time()
	}
	return out
}

// Action is one step of a plan.
type Action struct {
	Node  LogicalNodeID `json:"node"`
	Group NodeGroupID   `json:"group"`
	Index int           `json:"index"`
	Rule  Rule          `json:"rule"`
	Kind  ActionKind    `json:"kind"`
	// Attempt is the attempt that the step was decided for, 0 for an Insert.
	// It is dropped if the slot has another attempt by then.
	Attempt NodeAttemptID `json:"attempt"`
	// NewAttempt is the attempt that an Insert or Restart begins.
	NewAttempt NodeAttemptID `json:"newAttempt,omitempty"`
	// Operation and OperationID are those of a Dispatch; Resolving says that
	// it asks what came of an earlier one (R6).
	Operation   OperationKind `json:"operation,omitempty"`
	OperationID OperationID   `json:"operationId,omitzero"`
	Resolving   bool          `json:"resolving,omitempty"`
}

// Fault is a slot that cannot go on. The others do.
type Fault struct {
	Node    LogicalNodeID
	Attempt NodeAttemptID
	Rule    Rule
	Err     error // ErrUnmatched, ErrAttemptsExhausted or ErrSequenceExhausted
}

// Plan is what a pass would do, in slot order.
type Plan struct {
	Actions []Action
	// ObservedGeneration is the generation of the wish that was compared.
	ObservedGeneration uint64
	// RequeueAt is the earliest stored deadline after now that a decision
	// still waits for; zero if there is none.
	RequeueAt time.Time
	Faults    []Fault
}

// allocator gives out attempts. Planning uses a copy; only the driver's counts.
type allocator struct{ next NodeAttemptID }

func (a *allocator) take() (NodeAttemptID, error) {
	if a.next == math.MaxUint64 { // the next one must stay expressible
		return 0, ErrAttemptsExhausted
	}
	a.next++
	return a.next - 1, nil
}

// add turns the decision about a slot into an action or a fault.
func (p *Plan) add(d decision, group NodeGroupID, index int, n *node, attempts *allocator) {
	if d.action == NoAction {
		return
	}
	a := Action{Group: group, Index: index, Rule: d.Rule, Kind: d.action}
	if n != nil {
		a.Node, a.Attempt = n.id, n.attempt
	} else {
		a.Node = NewLogicalNodeID(group, index)
	}
	fault := d.fault
	switch d.action {
	case Insert, Restart:
		a.NewAttempt, fault = attempts.take()
	case Dispatch:
		a.Operation, a.Resolving = d.operation, d.Number == ruleResolve
		a.OperationID = OperationID{Attempt: n.attempt, Sequence: n.nextSequence}
	}
	if fault != nil {
		p.Faults = append(p.Faults, Fault{Node: a.Node, Attempt: a.Attempt, Rule: d.Rule,
			Err: fmt.Errorf("%w: %s, attempt %d, %s", fault, a.Node, a.Attempt, d.Rule)})
		return
	}
	p.Actions = append(p.Actions, a)
}

// matchGroups yields, in the order of their IDs, the groups that are in the
// state, in the wish or in both. A missing side is an empty group.
func matchGroups(observed *ClusterState, desired *Desired) iter.Seq2[*nodeGroup, *desiredGroup] {
	return func(yield func(*nodeGroup, *desiredGroup) bool) {
		i, j := 0, 0
		for i < len(observed.groups) || j < len(desired.groups) {
			order := 0
			switch {
			case i == len(observed.groups):
				order = 1
			case j == len(desired.groups):
				order = -1
			default:
				order = cmp.Compare(observed.groups[i].id, desired.groups[j].id)
			}
			var g *nodeGroup
			want := &desiredGroup{}
			if order >= 0 {
				want = &desired.groups[j]
				j++
			}
			if order <= 0 {
				g = observed.groups[i]
				i++
			} else {
				g = &nodeGroup{id: want.id}
			}
			if !yield(g, want) {
				return
			}
		}
	}
}
