package provisioning

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	// DefaultMaxNodes is the largest number of slots of a shape unless
	// [Config.MaxNodes] says otherwise.
	DefaultMaxNodes = 1 << 20
	// MaxIDLength is the largest length of a RunID or NodeGroupID in bytes.
	MaxIDLength = 253
)

// ClusterShape is the wish: what the cluster of one run should look like.
// The caller keeps what it passes in; the library copies what it keeps.
type ClusterShape struct {
	RunID RunID `json:"runId"`
	// Generation must rise whenever the content changes; the first is at
	// least 1, and the largest uint64 is only for a shape without groups, so
	// that whatever is wished for can be given up. The content is the groups by ID with all their fields; the
	// order of the groups is no part of it.
	Generation uint64          `json:"generation"`
	Groups     []NodeGroupSpec `json:"groups"`
}

// NodeGroupSpec wishes for Count equal slots, "{GroupID}-0" and up.
type NodeGroupSpec struct {
	// RunID is the run of the shape; empty takes it from the shape.
	RunID   RunID       `json:"runId,omitempty"`
	GroupID NodeGroupID `json:"groupId"`
	Role    RoleID      `json:"role,omitempty"`
	// Count may be 0: the group is there and empty.
	Count     int               `json:"count"`
	Provider  ProviderKind      `json:"provider,omitempty"`
	Shape     NodeShape         `json:"shape"`
	Boot      BootSpec          `json:"boot"`
	SwarmJoin SwarmJoinTemplate `json:"swarmJoin"`
}

// NodeShape is what machine to rent. Nil pointers and zero values ask for
// nothing in particular. The library carries it to the backend; it looks only
// for values that cannot be meant.
type NodeShape struct {
	Image           string            `json:"image"`
	DiskGB          int64             `json:"diskGB,omitempty"`
	GPUName         string            `json:"gpuName,omitempty"`
	MinGPURAMMB     *float64          `json:"minGPURAMMB,omitempty"`
	MinDownMbps     *float64          `json:"minDownMbps,omitempty"`
	MinUpMbps       *float64          `json:"minUpMbps,omitempty"`
	MinReliability  *float64          `json:"minReliability,omitempty"` // 0 to 1
	RequireVerified bool              `json:"requireVerified,omitempty"`
	ProviderLabels  map[string]string `json:"providerLabels,omitempty"`
}

// BootSpec is how a machine becomes a node.
type BootSpec struct {
	SSHUser             string            `json:"sshUser,omitempty"`
	VerifyCommands      []string          `json:"verifyCommands,omitempty"`
	StartSwactorCommand string            `json:"startSwactorCommand,omitempty"`
	StdoutSources       []string          `json:"stdoutSources,omitempty"`
	StderrSources       []string          `json:"stderrSources,omitempty"`
	Env                 map[string]string `json:"env,omitempty"`
	Args                []string          `json:"args,omitempty"`
	Mounts              []Mount           `json:"mounts,omitempty"`
}

// Mount binds Source on the machine to Target for the agent.
type Mount struct {
	Source   string `json:"source"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

// SwarmJoinTemplate is what every node of a group needs to join the swarm.
// JoinTokenRef names where the token is kept; it is not the token (B9).
type SwarmJoinTemplate struct {
	OrchSwactorAddr string `json:"orchSwactorAddr,omitempty"`
	JoinTokenRef    string `json:"joinTokenRef,omitempty"`
}

// SwarmJoinSpec is SwarmJoinTemplate for one slot: the node that joins must
// call itself ExpectedLogicalNodeID.
type SwarmJoinSpec struct {
	OrchSwactorAddr       string        `json:"orchSwactorAddr,omitempty"`
	JoinTokenRef          string        `json:"joinTokenRef,omitempty"`
	ExpectedLogicalNodeID LogicalNodeID `json:"expectedLogicalNodeId"`
}

// LogicalNodeSpec is what one attempt of one slot is built from. It never
// changes within an attempt: any difference is drift, and drift means replace.
//
// Slices, maps and pointers in it are shared with the library and with other
// slots; who receives a spec reads it and changes nothing.
type LogicalNodeSpec struct {
	RunID     RunID         `json:"runId"`
	GroupID   NodeGroupID   `json:"groupId"`
	Index     int           `json:"index"`
	Node      LogicalNodeID `json:"node"`
	Role      RoleID        `json:"role,omitempty"`
	Provider  ProviderKind  `json:"provider,omitempty"`
	Shape     NodeShape     `json:"shape"`
	Boot      BootSpec      `json:"boot"`
	SwarmJoin SwarmJoinSpec `json:"swarmJoin"`
}

// Equal reports whether two specs are the same template for the same slot.
// The order of maps, nil against empty and -0 against 0 make no difference.
func (s LogicalNodeSpec) Equal(other LogicalNodeSpec) bool {
	return s.RunID == other.RunID && s.GroupID == other.GroupID && s.Index == other.Index && s.Node == other.Node &&
		s.SwarmJoin.ExpectedLogicalNodeID == other.SwarmJoin.ExpectedLogicalNodeID &&
		s.template().digest == other.template().digest
}

// template returns what the spec shares with its group.
func (s LogicalNodeSpec) template() *template {
	return newTemplate(s.RunID, NodeGroupSpec{
		GroupID: s.GroupID, Role: s.Role, Provider: s.Provider, Shape: s.Shape, Boot: s.Boot,
		SwarmJoin: SwarmJoinTemplate{OrchSwactorAddr: s.SwarmJoin.OrchSwactorAddr, JoinTokenRef: s.SwarmJoin.JoinTokenRef},
	})
}

// template is what all slots of a group have in common in one generation. It
// is made once and shared by pointer. Equal templates have equal digests, so
// drift is a comparison of pointers and, where those differ, of 32 bytes.
type template struct {
	digest [sha256.Size]byte
	run    RunID
	spec   NodeGroupSpec // RunID and Count are zero
}

func newTemplate(run RunID, spec NodeGroupSpec) *template {
	spec.RunID, spec.Count = "", 0
	spec.Shape.MinGPURAMMB = cloneFloat(spec.Shape.MinGPURAMMB)
	spec.Shape.MinDownMbps = cloneFloat(spec.Shape.MinDownMbps)
	spec.Shape.MinUpMbps = cloneFloat(spec.Shape.MinUpMbps)
	spec.Shape.MinReliability = cloneFloat(spec.Shape.MinReliability)
	spec.Shape.ProviderLabels = maps.Clone(spec.Shape.ProviderLabels)
	spec.Boot.VerifyCommands = slices.Clone(spec.Boot.VerifyCommands)
	spec.Boot.StdoutSources = slices.Clone(spec.Boot.StdoutSources)
	spec.Boot.StderrSources = slices.Clone(spec.Boot.StderrSources)
	spec.Boot.Env = maps.Clone(spec.Boot.Env)
	spec.Boot.Args = slices.Clone(spec.Boot.Args)
	spec.Boot.Mounts = slices.Clone(spec.Boot.Mounts)
	t := &template{run: run, spec: spec}
	t.digest = t.canonical()
	return t
}

func sameTemplate(a, b *template) bool {
	return a == b || a != nil && b != nil && a.digest == b.digest
}

// slot returns the spec of one slot. Slices and maps are shared.
func (t *template) slot(index int) LogicalNodeSpec {
	return t.named(index, NewLogicalNodeID(t.spec.GroupID, index))
}

func (t *template) named(index int, node LogicalNodeID) LogicalNodeSpec {
	return LogicalNodeSpec{
		RunID: t.run, GroupID: t.spec.GroupID, Index: index, Node: node,
		Role: t.spec.Role, Provider: t.spec.Provider, Shape: t.spec.Shape, Boot: t.spec.Boot,
		SwarmJoin: SwarmJoinSpec{
			OrchSwactorAddr:       t.spec.SwarmJoin.OrchSwactorAddr,
			JoinTokenRef:          t.spec.SwarmJoin.JoinTokenRef,
			ExpectedLogicalNodeID: node,
		},
	}
}

// canonical hashes every field that makes a template, lists with their length
// in front, maps in the order of their keys.
func (t *template) canonical() [sha256.Size]byte {
	h := sha256.New()
	s := &t.spec
	for _, text := range []string{string(t.run), string(s.GroupID), string(s.Role), string(s.Provider), s.Shape.Image, s.Shape.GPUName} {
		writeField(h, text)
	}
	writeNumber(h, uint64(s.Shape.DiskGB))
	for _, f := range s.Shape.floats() {
		writeFloat(h, f.value)
	}
	writeBool(h, s.Shape.RequireVerified)
	writeMap(h, s.Shape.ProviderLabels)
	writeField(h, s.Boot.SSHUser)
	writeList(h, s.Boot.VerifyCommands)
	writeField(h, s.Boot.StartSwactorCommand)
	writeList(h, s.Boot.StdoutSources)
	writeList(h, s.Boot.StderrSources)
	writeMap(h, s.Boot.Env)
	writeList(h, s.Boot.Args)
	writeNumber(h, uint64(len(s.Boot.Mounts)))
	for _, m := range s.Boot.Mounts {
		writeField(h, m.Source)
		writeField(h, m.Target)
		writeBool(h, m.ReadOnly)
	}
	writeField(h, s.SwarmJoin.OrchSwactorAddr)
	writeField(h, s.SwarmJoin.JoinTokenRef)
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	return sum
}

type namedFloat struct {
	field string
	value *float64
}

func (s *NodeShape) floats() [4]namedFloat {
	return [4]namedFloat{
		{"shape.minGPURAMMB", s.MinGPURAMMB},
		{"shape.minDownMbps", s.MinDownMbps},
		{"shape.minUpMbps", s.MinUpMbps},
		{"shape.minReliability", s.MinReliability},
	}
}

func writeBool(h hash.Hash, b bool) {
	if b {
		writeNumber(h, 1)
	} else {
		writeNumber(h, 0)
	}
}

func writeFloat(h hash.Hash, f *float64) {
	writeBool(h, f != nil)
	if f != nil {
		writeNumber(h, math.Float64bits(*f+0)) // -0 + 0 is 0
	}
}

func writeList(h hash.Hash, list []string) {
	writeNumber(h, uint64(len(list)))
	for _, s := range list {
		writeField(h, s)
	}
}

func writeMap(h hash.Hash, m map[string]string) {
	writeNumber(h, uint64(len(m)))
	for _, key := range slices.Sorted(maps.Keys(m)) {
		writeField(h, key)
		writeField(h, m[key])
	}
}

func cloneFloat(f *float64) *float64 {
	if f == nil {
		return nil
	}
	v := *f
	return &v
}

// Desired is a shape that has been judged and expanded once, so that deciding
// cannot fail. It is immutable and safe for concurrent use.
type Desired struct {
	run        RunID
	generation uint64
	groups     []desiredGroup // in the order of their IDs
	slots      int
	content    [sha256.Size]byte // of the groups, whatever their order was
}

type desiredGroup struct {
	id       NodeGroupID
	count    int
	template *template
}

// Expand judges a shape and expands it, with at most [DefaultMaxNodes] slots.
// The error is a [*ShapeError] that lists every fault.
func Expand(shape ClusterShape) (*Desired, error) { return expand(shape, DefaultMaxNodes) }

// Validate returns what [Expand] would refuse, or nil.
func (s ClusterShape) Validate() error { return judgeShape(s, DefaultMaxNodes) }

// expand takes the faults that somebody else has found, and adds its own.
func expand(shape ClusterShape, maxNodes int, found ...ShapeFault) (*Desired, error) {
	if err := judgeShape(shape, maxNodes, found...); err != nil {
		return nil, err
	}
	d := &Desired{run: shape.RunID, generation: shape.Generation, groups: make([]desiredGroup, 0, len(shape.Groups))}
	for _, g := range shape.Groups {
		d.groups = append(d.groups, desiredGroup{id: g.GroupID, count: g.Count, template: newTemplate(shape.RunID, g)})
		d.slots += g.Count
	}
	slices.SortFunc(d.groups, func(a, b desiredGroup) int { return cmp.Compare(a.id, b.id) })
	h := sha256.New()
	for _, g := range d.groups {
		h.Write(g.template.digest[:])
		var count [8]byte
		binary.BigEndian.PutUint64(count[:], uint64(g.count))
		h.Write(count[:])
	}
	h.Sum(d.content[:0])
	return d, nil
}

// RunID returns the run of the shape.
func (d *Desired) RunID() RunID { return d.run }

// Generation returns the generation of the shape.
func (d *Desired) Generation() uint64 { return d.generation }

// Len returns the number of desired slots.
func (d *Desired) Len() int { return d.slots }

// All yields the spec of every desired slot in slot order.
func (d *Desired) All() iter.Seq[LogicalNodeSpec] {
	return func(yield func(LogicalNodeSpec) bool) {
		for i := range d.groups {
			for index := range d.groups[i].count {
				if !yield(d.groups[i].template.slot(index)) {
					return
				}
			}
		}
	}
}

func (d *Desired) groupIDs() iter.Seq[NodeGroupID] {
	return func(yield func(NodeGroupID) bool) {
		for i := range d.groups {
			if !yield(d.groups[i].id) {
				return
			}
		}
	}
}

// group returns the desired group of that name, or nil.
func (d *Desired) group(id NodeGroupID) *desiredGroup {
	i, found := slices.BinarySearchFunc(d.groups, id, func(g desiredGroup, id NodeGroupID) int { return cmp.Compare(g.id, id) })
	if !found {
		return nil
	}
	return &d.groups[i]
}

// find returns the template of the slot of that name, nil when it is not desired.
func (d *Desired) find(id LogicalNodeID) *template {
	group, index, ok := id.split()
	if !ok {
		return nil
	}
	return d.group(group).wants(index)
}

// wants returns the template of a slot, nil when it is not desired.
func (g *desiredGroup) wants(index int) *template {
	if g == nil || index < 0 || index >= g.count {
		return nil
	}
	return g.template
}

// ErrInvalidShape is what errors.Is finds in every [*ShapeError].
var ErrInvalidShape = errors.New("provisioning: invalid shape")

// ShapeError lists every fault of a refused shape.
type ShapeError struct{ Faults []ShapeFault }

// ShapeFault is one thing wrong with a shape. Group is empty for a fault of
// the shape itself; Position is the group's place in Groups, or -1.
type ShapeFault struct {
	Group    NodeGroupID
	Position int
	Field    string
	Problem  string
}

// String returns the fault as one line.
func (f ShapeFault) String() string {
	if f.Position < 0 {
		return f.Field + ": " + f.Problem
	}
	return fmt.Sprintf("group %q (groups[%d]) %s: %s", f.Group, f.Position, f.Field, f.Problem)
}

// Error lists all faults, separated by semicolons.
func (e *ShapeError) Error() string {
	lines := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		lines[i] = f.String()
	}
	return ErrInvalidShape.Error() + ": " + strings.Join(lines, "; ")
}

// Unwrap returns [ErrInvalidShape].
func (e *ShapeError) Unwrap() error { return ErrInvalidShape }

func judgeShape(shape ClusterShape, maxNodes int, found ...ShapeFault) error {
	var faults []ShapeFault
	add := func(position int, group NodeGroupID, field, problem string, args ...any) {
		faults = append(faults, ShapeFault{Group: group, Position: position, Field: field, Problem: fmt.Sprintf(problem, args...)})
	}
	if problem := idProblem(string(shape.RunID)); problem != "" {
		add(-1, "", "runId", "%s", problem)
	}
	switch {
	case shape.Generation == 0:
		add(-1, "", "generation", "must be at least 1")
	case shape.Generation == math.MaxUint64 && len(shape.Groups) > 0:
		// A cluster under it could never be drained.
		add(-1, "", "generation", "is the largest there is, which is kept for wishing for nothing")
	}
	seen := make(map[NodeGroupID]int, len(shape.Groups))
	total, tooMany := 0, false
	for i, g := range shape.Groups {
		if g.RunID != "" && g.RunID != shape.RunID {
			add(i, g.GroupID, "runId", "belongs to run %q, the shape to run %q", g.RunID, shape.RunID)
		}
		if problem := idProblem(string(g.GroupID)); problem != "" {
			add(i, g.GroupID, "groupId", "%s", problem)
		}
		if first, twice := seen[g.GroupID]; twice {
			add(i, g.GroupID, "groupId", "is also the name of groups[%d]", first)
		} else {
			seen[g.GroupID] = i
		}
		switch {
		case g.Count < 0:
			add(i, g.GroupID, "count", "is %d, must not be negative", g.Count)
		case g.Count > maxNodes-total: // no sum that could overflow
			tooMany = true
		default:
			total += g.Count
		}
		if g.Shape.DiskGB < 0 {
			add(i, g.GroupID, "shape.diskGB", "is %d, must not be negative", g.Shape.DiskGB)
		}
		for _, f := range g.Shape.floats() {
			if f.value != nil && (math.IsNaN(*f.value) || math.IsInf(*f.value, 0)) {
				add(i, g.GroupID, f.field, "is %v, must be a finite number", *f.value)
			}
		}
	}
	if tooMany {
		add(-1, "", "groups", "hold more than %d slots in all", maxNodes)
	}
	if faults = append(faults, found...); faults != nil {
		return &ShapeError{Faults: faults}
	}
	return nil
}

func idProblem(id string) string {
	switch {
	case id == "":
		return "must not be empty"
	case len(id) > MaxIDLength:
		return fmt.Sprintf("is %d bytes long, at most %d are allowed", len(id), MaxIDLength)
	case strings.ContainsRune(id, '/'):
		return "must not hold '/'"
	case !utf8.ValidString(id): // would not come back from JSON as it went in
		return "must be UTF-8"
	case strings.ContainsFunc(id, func(r rune) bool { return r < 0x20 || r >= 0x7f && r < 0xa0 }):
		return "must not hold control characters"
	}
	return ""
}

// Errors of a refused update, in the order in which they are looked for.
var (
	// ErrRunChanged: the run of a driver is fixed for its life.
	ErrRunChanged = errors.New("provisioning: the run of a cluster cannot change")
	// ErrGenerationRegressed: the generation is lower than the accepted one.
	ErrGenerationRegressed = errors.New("provisioning: generation is lower than the accepted one")
	// ErrGenerationReused: the content changed and the generation did not rise.
	ErrGenerationReused = errors.New("provisioning: changed content needs a higher generation")
)

// succeed judges shape as the successor of d: run fixed, generation not lower,
// shape valid, changed content under a higher generation, in this order (G9).
// What was found wrong with its groups already makes it invalid.
func (d *Desired) succeed(shape ClusterShape, maxNodes int, found ...ShapeFault) (*Desired, error) {
	if shape.RunID != d.run {
		return nil, fmt.Errorf("%w: it is %q, the update says %q", ErrRunChanged, d.run, shape.RunID)
	}
	if shape.Generation < d.generation {
		return nil, fmt.Errorf("%w: %d after %d", ErrGenerationRegressed, shape.Generation, d.generation)
	}
	next, err := expand(shape, maxNodes, found...)
	if err != nil {
		return nil, err
	}
	if next.generation == d.generation && next.content != d.content {
		return nil, fmt.Errorf("%w: the content differs from the accepted one of generation %d", ErrGenerationReused, d.generation)
	}
	for i := range next.groups { // keep the pointer of an unchanged template
		if old := d.group(next.groups[i].id); old != nil && sameTemplate(old.template, next.groups[i].template) {
			next.groups[i].template = old.template
		}
	}
	return next, nil
}
