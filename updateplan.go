package provisioning

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// ChangeKind is what an update would do with a slot.
type ChangeKind uint8

// The changes. The zero value is none of them.
const (
	_ ChangeKind = iota
	// InsertSlot: the slot is not wished for yet. If there is a node all the
	// same, it is being deleted, and the new attempt follows it.
	InsertSlot
	// ReplaceSlot: what the slot holds, or is about to be given, is outdated.
	ReplaceSlot
	// DeleteSlot: the slot is wished for no longer.
	DeleteSlot
)

var changeNames = [...]string{"none", "insert", "replace", "delete"}

// String returns the name of the change.
func (k ChangeKind) String() string { return nameOf(changeNames[:], k) }

// MarshalText uses the names of String.
func (k ChangeKind) MarshalText() ([]byte, error) { return marshalName(changeNames[:], k) }

// UnmarshalText refuses an unknown name.
func (k *ChangeKind) UnmarshalText(text []byte) error {
	return unmarshalName(changeNames[:], "change", text, k)
}

// SlotChange is what an update would do with one slot.
type SlotChange struct {
	Node  LogicalNodeID `json:"node"`
	Group NodeGroupID   `json:"group"`
	Index int           `json:"index"`
	Kind  ChangeKind    `json:"kind"`
	// Differs names the fields for which a slot is replaced, as ShapeFault
	// does: "role", "shape.image", "boot.env", "swarmJoin.joinTokenRef". The
	// slice is shared between slots and only to be read.
	Differs []string `json:"differs,omitempty"`
	// Attempt is the attempt that the slot has now, 0 if it has none yet, and
	// Ready whether that is ready: whether the update ends something that
	// works.
	Attempt NodeAttemptID `json:"attempt,omitempty"`
	Ready   bool          `json:"ready,omitempty"`
	// Next is what the ladder would say of the slot under the offered wish,
	// the first step of the change. It is zero for a slot that was never begun
	// and is wished for no longer.
	Next NodeDecision `json:"-"`
}

// UpdatePlan is what an update would change, in slot order. A slot that is not
// listed is left alone.
type UpdatePlan struct {
	Generation uint64       `json:"generation"` // of the offered wish
	Changes    []SlotChange `json:"changes"`
	// How many of Changes are of each kind, and how many of them end a node
	// that is ready now. Nothing makes these wait for each other.
	Inserts   int `json:"inserts"`
	Replaces  int `json:"replaces"`
	Deletes   int `json:"deletes"`
	ReadyLost int `json:"readyLost"`
	// Paused: growth is paused. Until it is resumed nothing is inserted, and of
	// what is replaced what is ready stays; all the rest goes at once.
	Paused bool `json:"paused,omitempty"`
}

// String sums the plan up in one line.
func (p UpdatePlan) String() string {
	text := fmt.Sprintf("generation %d: %d to insert, %d to replace, %d to delete", p.Generation, p.Inserts, p.Replaces, p.Deletes)
	stay := 0 // of those that are ready
	for _, c := range p.Changes {
		if p.Paused && c.Kind == ReplaceSlot && c.Ready {
			stay++
		}
	}
	if lost := p.ReadyLost - stay; lost > 0 {
		text += fmt.Sprintf("; takes down %d that are ready, all at once", lost)
	}
	if p.Paused && p.Inserts+p.Replaces > 0 {
		text += "; paused: until Resume no attempt begins"
		if stay > 0 {
			text += fmt.Sprintf(", and %d that are ready and outdated stay", stay)
		}
	}
	var fields []string
	for _, c := range p.Changes {
		for _, field := range c.Differs {
			if !slices.Contains(fields, field) {
				fields = append(fields, field)
			}
		}
	}
	if len(fields) > 0 {
		text += "; differs: " + strings.Join(fields, ", ")
	}
	return text
}

// PlanUpdate returns what UpdateDesired would change if it were offered shape
// at now, in the time of whoever drives: how each slot differs from the latest
// wish and, where an attempt is under way, from what that was built from. It
// judges the shape as UpdateDesired does, with the same errors, and changes
// nothing. It costs what differs.
func (d *ClusterDriver) PlanUpdate(shape ClusterShape, now time.Time) (UpdatePlan, error) {
	faults := d.config.groupFaults(shape)
	at := d.tickAt(now)
	d.in.Lock()
	accepted, draining, paused := d.accepted, d.draining, d.paused
	d.in.Unlock()
	if draining {
		return UpdatePlan{}, ErrDraining
	}
	next, err := accepted.succeed(shape, d.maxNodes, faults...)
	if err != nil {
		return UpdatePlan{}, err
	}
	plan := UpdatePlan{Generation: next.generation, Paused: paused}
	d.world.Lock()
	defer d.world.Unlock()
	for old, want := range matchWishes(accepted, next) {
		from, to := min(old.count, want.count), max(old.count, want.count)
		if !sameTemplate(old.template, want.template) {
			from = 0
		}
		id := cmp.Or(want.id, old.id)
		nodes := &nodeGroup{id: id}
		if g := d.state.byID[id]; g != nil {
			nodes = g
		}
		var differs difference
		for index := from; index < to; index++ {
			plan.add(nodes, index, old.wants(index), want.wants(index), &differs, at)
		}
	}
	return plan, nil
}

// matchWishes yields the groups of two wishes in the order of their IDs. A
// missing side is an empty group.
func matchWishes(old, next *Desired) func(yield func(old, next *desiredGroup) bool) {
	return func(yield func(old, next *desiredGroup) bool) {
		a, b := old.groups, next.groups
		for len(a) > 0 || len(b) > 0 {
			was, want := &desiredGroup{}, &desiredGroup{}
			takeOld := len(b) == 0 || len(a) > 0 && a[0].id <= b[0].id
			takeNext := len(a) == 0 || len(b) > 0 && b[0].id <= a[0].id
			if takeOld {
				was, a = &a[0], a[1:]
			}
			if takeNext {
				want, b = &b[0], b[1:]
			}
			if !yield(was, want) {
				return
			}
		}
	}
}

// add puts down what becomes of one slot on which two wishes differ.
func (p *UpdatePlan) add(g *nodeGroup, index int, old, want *template, differs *difference, at instant) {
	n := g.at(index)
	c := SlotChange{Group: g.id, Index: index}
	if n != nil {
		c.Node, c.Attempt, c.Ready = n.id, n.attempt, n.ready
	} else {
		c.Node = NewLogicalNodeID(g.id, index)
	}
	built := old // of what is there, or would be next
	if n != nil && n.intent == Active {
		built = n.template
	}
	switch {
	case want == nil && built == nil, sameTemplate(built, want):
		return // an earlier wish had wanted the same, and nothing has come of the one between
	case want == nil:
		c.Kind = DeleteSlot
		p.Deletes++
	case built == nil:
		c.Kind = InsertSlot
		p.Inserts++
	default:
		c.Kind, c.Differs = ReplaceSlot, differs.between(built, want)
		p.Replaces++
	}
	if n != nil || want != nil {
		c.Next = decide(n, want, at).export(n)
	}
	if c.Ready {
		p.ReadyLost++
	}
	p.Changes = append(p.Changes, c)
}

// difference remembers the last answer: the slots of a group ask the same.
type difference struct {
	from, to *template
	fields   []string
}

func (d *difference) between(from, to *template) []string {
	if d.from != from || d.to != to {
		*d = difference{from, to, from.differs(to)}
	}
	return d.fields
}

// differs names the fields in which two templates of a group differ. Two that
// canonical tells apart differ in at least one.
func (t *template) differs(other *template) []string {
	a, b := &t.spec, &other.spec
	var fields []string
	check := func(same bool, field string) {
		if !same {
			fields = append(fields, field)
		}
	}
	check(a.Role == b.Role, "role")
	check(a.Provider == b.Provider, "provider")
	check(a.Shape.Image == b.Shape.Image, "shape.image")
	check(a.Shape.DiskGB == b.Shape.DiskGB, "shape.diskGB")
	check(a.Shape.GPUName == b.Shape.GPUName, "shape.gpuName")
	others := b.Shape.floats()
	for i, f := range a.Shape.floats() {
		x, y := f.value, others[i].value
		check(x == y || x != nil && y != nil && *x == *y, f.field)
	}
	check(a.Shape.RequireVerified == b.Shape.RequireVerified, "shape.requireVerified")
	check(maps.Equal(a.Shape.ProviderLabels, b.Shape.ProviderLabels), "shape.providerLabels")
	check(a.Boot.SSHUser == b.Boot.SSHUser, "boot.sshUser")
	check(slices.Equal(a.Boot.VerifyCommands, b.Boot.VerifyCommands), "boot.verifyCommands")
	check(a.Boot.StartSwactorCommand == b.Boot.StartSwactorCommand, "boot.startSwactorCommand")
	check(slices.Equal(a.Boot.StdoutSources, b.Boot.StdoutSources), "boot.stdoutSources")
	check(slices.Equal(a.Boot.StderrSources, b.Boot.StderrSources), "boot.stderrSources")
	check(maps.Equal(a.Boot.Env, b.Boot.Env), "boot.env")
	check(slices.Equal(a.Boot.Args, b.Boot.Args), "boot.args")
	check(slices.Equal(a.Boot.Mounts, b.Boot.Mounts), "boot.mounts")
	check(a.SwarmJoin.OrchSwactorAddr == b.SwarmJoin.OrchSwactorAddr, "swarmJoin.orchSwactorAddr")
	check(a.SwarmJoin.JoinTokenRef == b.SwarmJoin.JoinTokenRef, "swarmJoin.joinTokenRef")
	return fields
}
