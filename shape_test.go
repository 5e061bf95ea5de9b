package provisioning

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// shapeOf is a lawful shape of run "r" with these groups.
func shapeOf(generation uint64, groups ...NodeGroupSpec) ClusterShape {
	return ClusterShape{RunID: "r", Generation: generation, Groups: groups}
}

func groupOf(id NodeGroupID, count int) NodeGroupSpec {
	return NodeGroupSpec{GroupID: id, Count: count, Shape: NodeShape{Image: "v1"}}
}

func mustExpand(t require.TestingT, shape ClusterShape) *Desired {
	d, err := Expand(shape)
	require.NoError(t, err)
	return d
}

func slotNames(d *Desired) []LogicalNodeID {
	var names []LogicalNodeID
	for spec := range d.All() {
		names = append(names, spec.Node)
	}
	return names
}

func TestExpandNothing(t *testing.T) {
	for _, shape := range []ClusterShape{shapeOf(1), shapeOf(1, groupOf("w", 0), groupOf("v", 0))} {
		require.NoError(t, shape.Validate())
		d := mustExpand(t, shape)
		require.Zero(t, d.Len())
		require.Empty(t, slotNames(d))
	}
}

func TestExpandInSlotOrder(t *testing.T) {
	d := mustExpand(t, shapeOf(7, groupOf("w-1", 1), groupOf("w", 11), groupOf("a", 0), groupOf("v", 2)))
	require.Equal(t, RunID("r"), d.RunID())
	require.Equal(t, uint64(7), d.Generation())
	require.Equal(t, 14, d.Len())
	require.Equal(t, []LogicalNodeID{"v-0", "v-1", "w-0", "w-1", "w-2", "w-3", "w-4", "w-5", "w-6", "w-7", "w-8", "w-9", "w-10", "w-1-0"},
		slotNames(d), "groups by name, indices as numbers")

	for spec := range d.All() { // who stops early is heard
		require.Equal(t, LogicalNodeID("v-0"), spec.Node)
		break
	}
}

func TestExpandedSpec(t *testing.T) {
	group := filled[NodeGroupSpec](t)
	group.RunID, group.GroupID, group.Count = "", "w", 2
	specs := slices.Collect(mustExpand(t, shapeOf(1, group)).All())
	require.Equal(t, LogicalNodeSpec{
		RunID: "r", GroupID: "w", Index: 1, Node: "w-1",
		Role: group.Role, Provider: group.Provider, Shape: group.Shape, Boot: group.Boot,
		SwarmJoin: SwarmJoinSpec{OrchSwactorAddr: "text", JoinTokenRef: "text", ExpectedLogicalNodeID: "w-1"},
	}, specs[1])
}

func TestWants(t *testing.T) {
	d := mustExpand(t, shapeOf(1, groupOf("w", 2), groupOf("z", 0)))
	for _, index := range []int{0, 1} {
		require.Same(t, d.groups[0].template, d.group("w").wants(index))
	}
	for _, index := range []int{math.MinInt, -1, 2, math.MaxInt} {
		require.Nil(t, d.group("w").wants(index), "%d", index)
	}
	require.Nil(t, d.group("z").wants(0))
	for _, id := range []NodeGroupID{"", "a", "x", "zz"} {
		require.Nil(t, d.group(id))
		require.Nil(t, d.group(id).wants(0))
	}
}

// The caller may go on using what it passed in.
func TestExpandCopies(t *testing.T) {
	group := filled[NodeGroupSpec](t)
	group.RunID, group.GroupID = "r", "w"
	shape := shapeOf(1, group)
	d := mustExpand(t, shape)
	before := mustJSON(t, slices.Collect(d.All()))

	walkLeaves(t, reflect.ValueOf(&shape.Groups[0]).Elem(), "group", func(path string) {
		require.Equal(t, before, mustJSON(t, slices.Collect(d.All())), "%s is shared with the caller", path)
	})
}

func mustJSON(t require.TestingT, v any) string {
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return string(text)
}

func TestShapeFaults(t *testing.T) {
	long := strings.Repeat("x", MaxIDLength)
	group := func(change func(*NodeGroupSpec)) ClusterShape {
		g := groupOf("w", 1)
		change(&g)
		return shapeOf(1, g)
	}
	for _, c := range []struct {
		shape ClusterShape
		fault ShapeFault
	}{
		{ClusterShape{Generation: 1}, ShapeFault{"", -1, "runId", "must not be empty"}},
		{ClusterShape{Generation: 1, RunID: RunID(long + "x")}, ShapeFault{"", -1, "runId", "is 254 bytes long, at most 253 are allowed"}},
		{ClusterShape{Generation: 1, RunID: "a/b"}, ShapeFault{"", -1, "runId", "must not hold '/'"}},
		{ClusterShape{Generation: 1, RunID: "a\x00"}, ShapeFault{"", -1, "runId", "must not hold control characters"}},
		{ClusterShape{Generation: 1, RunID: "a\xff"}, ShapeFault{"", -1, "runId", "must be UTF-8"}},
		{ClusterShape{RunID: "r"}, ShapeFault{"", -1, "generation", "must be at least 1"}},
		{group(func(g *NodeGroupSpec) { g.RunID = "other" }), ShapeFault{"w", 0, "runId", `belongs to run "other", the shape to run "r"`}},
		{group(func(g *NodeGroupSpec) { g.GroupID = "" }), ShapeFault{"", 0, "groupId", "must not be empty"}},
		{group(func(g *NodeGroupSpec) { g.GroupID = "w/x" }), ShapeFault{"w/x", 0, "groupId", "must not hold '/'"}},
		{group(func(g *NodeGroupSpec) { g.GroupID = "w\n" }), ShapeFault{"w\n", 0, "groupId", "must not hold control characters"}},
		{group(func(g *NodeGroupSpec) { g.GroupID = "w\x7f" }), ShapeFault{"w\x7f", 0, "groupId", "must not hold control characters"}},
		{group(func(g *NodeGroupSpec) { g.GroupID = "w\u0085" }), ShapeFault{"w\u0085", 0, "groupId", "must not hold control characters"}},
		{group(func(g *NodeGroupSpec) { g.Count = -1 }), ShapeFault{"w", 0, "count", "is -1, must not be negative"}},
		{group(func(g *NodeGroupSpec) { g.Count = math.MinInt }), ShapeFault{"w", 0, "count", fmt.Sprintf("is %d, must not be negative", math.MinInt)}},
		{group(func(g *NodeGroupSpec) { g.Shape.DiskGB = -5 }), ShapeFault{"w", 0, "shape.diskGB", "is -5, must not be negative"}},
		{shapeOf(1, groupOf("w", 1), groupOf("v", 1), groupOf("w", 2)), ShapeFault{"w", 2, "groupId", "is also the name of groups[0]"}},
	} {
		err := c.shape.Validate()
		require.ErrorIs(t, err, ErrInvalidShape)
		refusal, ok := errors.AsType[*ShapeError](err)
		require.True(t, ok)
		require.Equal(t, []ShapeFault{c.fault}, refusal.Faults)
		require.True(t, strings.HasPrefix(err.Error(), "provisioning: invalid shape: "), err.Error())
		require.Contains(t, err.Error(), c.fault.Problem)
		require.Contains(t, err.Error(), c.fault.Field)
	}

	for _, id := range []string{"w", long, "a b", "größe", "w-0", "..", "\u00a0"} {
		require.NoError(t, ClusterShape{RunID: RunID(id), Generation: 1, Groups: []NodeGroupSpec{groupOf(NodeGroupID(id), 1)}}.Validate(), "%q", id)
	}
}

func TestEveryFaultIsListed(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(-1)
	_, err := Expand(ClusterShape{RunID: "a/b", Groups: []NodeGroupSpec{
		{RunID: "x", GroupID: "w", Count: -1, Shape: NodeShape{DiskGB: -1, MinGPURAMMB: &nan, MinReliability: &inf}},
		{GroupID: "w", Count: DefaultMaxNodes + 1},
	}})
	require.EqualError(t, err, `provisioning: invalid shape: runId: must not hold '/'; `+
		`generation: must be at least 1; `+
		`group "w" (groups[0]) runId: belongs to run "x", the shape to run "a/b"; `+
		`group "w" (groups[0]) count: is -1, must not be negative; `+
		`group "w" (groups[0]) shape.diskGB: is -1, must not be negative; `+
		`group "w" (groups[0]) shape.minGPURAMMB: is NaN, must be a finite number; `+
		`group "w" (groups[0]) shape.minReliability: is -Inf, must be a finite number; `+
		`group "w" (groups[1]) groupId: is also the name of groups[0]; `+
		`groups: hold more than 1048576 slots in all`)
}

func TestNonFiniteAndHugeShapes(t *testing.T) {
	t.Run("floats", func(t *testing.T) {
		// By reflection, so that an optional float added later is judged too.
		fields := 0
		for field := range reflect.TypeFor[NodeShape]().Fields() {
			if field.Type != reflect.TypeFor[*float64]() {
				continue
			}
			fields++
			for _, value := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
				bad, good := groupOf("bad", 1), groupOf("good", 1)
				reflect.ValueOf(&bad.Shape).Elem().FieldByIndex(field.Index).Set(reflect.ValueOf(&value))
				refusal, ok := errors.AsType[*ShapeError](shapeOf(1, good, bad).Validate())
				require.True(t, ok, "%s = %v passed", field.Name, value)
				require.Equal(t, []ShapeFault{{"bad", 1, "shape." + jsonName(field), fmt.Sprintf("is %v, must be a finite number", value)}}, refusal.Faults)
			}
			for _, value := range []float64{0, math.Copysign(0, -1), -1, math.MaxFloat64, math.SmallestNonzeroFloat64} {
				good := groupOf("good", 1)
				reflect.ValueOf(&good.Shape).Elem().FieldByIndex(field.Index).Set(reflect.ValueOf(&value))
				require.NoError(t, shapeOf(1, good).Validate())
			}
		}
		require.Equal(t, len((&NodeShape{}).floats()), fields)
	})

	tooMany := []ShapeFault{{"", -1, "groups", fmt.Sprintf("hold more than %d slots in all", DefaultMaxNodes)}}
	for _, c := range []struct {
		name   string
		counts []int
		passes bool
	}{
		{"exactly the limit", []int{DefaultMaxNodes}, true},
		{"exactly the limit in two", []int{DefaultMaxNodes - 1, 1}, true},
		{"one more", []int{DefaultMaxNodes + 1}, false},
		{"one more in two", []int{DefaultMaxNodes, 1}, false},
		{"one more, larger last", []int{1, DefaultMaxNodes}, false},
		{"the largest int", []int{math.MaxInt}, false},
		{"a sum that overflows to the smallest int", []int{1, math.MaxInt}, false},
		{"a sum that overflows to -2", []int{math.MaxInt, math.MaxInt}, false},
		{"a sum that overflows to 1", []int{math.MaxInt, math.MaxInt, 3}, false},
		{"a small group after a huge one", []int{math.MaxInt, 0, 5}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var groups []NodeGroupSpec
			for i, count := range c.counts {
				groups = append(groups, groupOf(NodeGroupID(fmt.Sprint("g", i)), count))
			}
			shape := shapeOf(1, groups...)
			var d *Desired
			var err error
			bytes := bytesAllocated(func() { d, err = Expand(shape) })
			// A byte a slot would be more than this. Expanding a handful of
			// groups takes a few kilobytes.
			require.Less(t, bytes, uint64(DefaultMaxNodes/4))
			if c.passes {
				require.NoError(t, err)
				require.Equal(t, DefaultMaxNodes, d.Len())
				return
			}
			refusal, ok := errors.AsType[*ShapeError](err)
			require.True(t, ok)
			require.Equal(t, tooMany, refusal.Faults)
			require.Nil(t, d)
		})
	}

	t.Run("a limit of one's own", func(t *testing.T) {
		_, err := expand(shapeOf(1, groupOf("a", 2), groupOf("b", 1)), 3)
		require.NoError(t, err)
		_, err = expand(shapeOf(1, groupOf("a", 2), groupOf("b", 2)), 3)
		require.ErrorContains(t, err, "hold more than 3 slots in all")
	})
}

func jsonName(field reflect.StructField) string {
	name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
	return name
}

func bytesAllocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// The refusals come in one order, whatever else is wrong (G9).
func TestSucceedOrder(t *testing.T) {
	accepted := mustExpand(t, shapeOf(5, groupOf("w", 1)))
	other := groupOf("w", 2)
	invalid := groupOf("", -1)
	for _, c := range []struct {
		name  string
		shape ClusterShape
		want  error
	}{
		{"the same again", shapeOf(5, groupOf("w", 1)), nil},
		{"the same, higher", shapeOf(6, groupOf("w", 1)), nil},
		{"changed, higher", shapeOf(6, other), nil},
		{"changed, much higher", shapeOf(math.MaxUint64-1, other), nil},
		{"the last, for nothing", shapeOf(math.MaxUint64), nil},
		{"the last, for something", shapeOf(math.MaxUint64, other), ErrInvalidShape},
		{"another run, higher", ClusterShape{RunID: "q", Generation: 6, Groups: []NodeGroupSpec{other}}, ErrRunChanged},
		{"another run, lower, invalid", ClusterShape{RunID: "q", Generation: 4, Groups: []NodeGroupSpec{invalid}}, ErrRunChanged},
		{"no run, generation 0", ClusterShape{}, ErrRunChanged},
		{"lower, same content", shapeOf(4, groupOf("w", 1)), ErrGenerationRegressed},
		{"lower, invalid", shapeOf(4, invalid), ErrGenerationRegressed},
		{"generation 0", shapeOf(0, groupOf("w", 1)), ErrGenerationRegressed},
		{"same generation, invalid", shapeOf(5, invalid), ErrInvalidShape},
		{"higher, invalid", shapeOf(6, invalid), ErrInvalidShape},
		{"same generation, too many", shapeOf(5, groupOf("w", 9)), ErrInvalidShape},
		{"same generation, changed", shapeOf(5, other), ErrGenerationReused},
		{"same generation, nothing left", shapeOf(5), ErrGenerationReused},
	} {
		t.Run(c.name, func(t *testing.T) {
			next, err := accepted.succeed(c.shape, 8)
			for _, class := range []error{ErrRunChanged, ErrGenerationRegressed, ErrInvalidShape, ErrGenerationReused} {
				require.Equal(t, class == c.want, errors.Is(err, class), "%v: %v", class, err)
			}
			if c.want == nil {
				require.NoError(t, err)
				require.Equal(t, c.shape.Generation, next.Generation())
				return
			}
			require.Nil(t, next)
			require.True(t, strings.HasPrefix(err.Error(), "provisioning: "), err.Error())
			require.Equal(t, mustExpand(t, shapeOf(5, groupOf("w", 1))), accepted, "a refusal changes nothing")
		})
	}
}

func TestContentIsGroupsByName(t *testing.T) {
	a, b := groupOf("a", 1), groupOf("b", 2)
	b.Role = "role"
	accepted := mustExpand(t, shapeOf(1, a, b))
	inherited := a
	inherited.RunID = "r"
	for _, same := range []ClusterShape{shapeOf(1, b, a), shapeOf(1, inherited, b)} {
		next, err := accepted.succeed(same, DefaultMaxNodes)
		require.NoError(t, err)
		require.Equal(t, accepted.content, next.content)
	}
	swapped, other := groupOf("a", 2), groupOf("b", 1)
	swapped.Role = "role"
	for _, changed := range []ClusterShape{shapeOf(1, swapped, other), shapeOf(1, a), shapeOf(1, a, b, groupOf("c", 0))} {
		_, err := accepted.succeed(changed, DefaultMaxNodes)
		require.ErrorIs(t, err, ErrGenerationReused)
	}
}

// What did not change keeps its pointer, so that looking for drift costs a
// comparison of pointers.
func TestSucceedKeepsUnchangedTemplates(t *testing.T) {
	first := mustExpand(t, shapeOf(1, groupOf("a", 1), groupOf("b", 1)))
	changed := groupOf("b", 1)
	changed.Shape.Image = "v2"
	second, err := first.succeed(shapeOf(2, groupOf("c", 1), changed, groupOf("a", 5)), DefaultMaxNodes)
	require.NoError(t, err)
	require.Same(t, first.group("a").template, second.group("a").template, "a count is no drift")
	require.NotSame(t, first.group("b").template, second.group("b").template)
	require.False(t, sameTemplate(first.group("b").template, second.group("b").template))
	require.Nil(t, first.group("c"))
	require.Equal(t, 1, first.group("a").count, "the predecessor is immutable")
}

func TestSameTemplate(t *testing.T) {
	a, b, c := newTemplate("r", groupOf("a", 1)), newTemplate("r", groupOf("a", 2)), newTemplate("q", groupOf("a", 1))
	require.True(t, sameTemplate(nil, nil))
	require.True(t, sameTemplate(a, a))
	require.True(t, sameTemplate(a, b))
	require.False(t, sameTemplate(a, c))
	require.False(t, sameTemplate(a, nil))
	require.False(t, sameTemplate(nil, a))
}

func TestCanonicalEquality(t *testing.T) {
	zero, negative := 0.0, math.Copysign(0, -1)
	pairs := []struct {
		why  string
		a, b func(*NodeGroupSpec)
	}{
		{"nil and empty labels", func(g *NodeGroupSpec) {}, func(g *NodeGroupSpec) { g.Shape.ProviderLabels = map[string]string{} }},
		{"nil and empty env", func(g *NodeGroupSpec) {}, func(g *NodeGroupSpec) { g.Boot.Env = map[string]string{} }},
		{"nil and empty lists", func(g *NodeGroupSpec) {}, func(g *NodeGroupSpec) {
			g.Boot.VerifyCommands, g.Boot.StdoutSources, g.Boot.StderrSources, g.Boot.Args = []string{}, []string{}, []string{}, []string{}
		}},
		{"nil and empty mounts", func(g *NodeGroupSpec) {}, func(g *NodeGroupSpec) { g.Boot.Mounts = []Mount{} }},
		{"-0 and 0", func(g *NodeGroupSpec) { g.Shape.MinUpMbps, g.Shape.MinReliability = &zero, &zero },
			func(g *NodeGroupSpec) { g.Shape.MinUpMbps, g.Shape.MinReliability = &negative, &negative }},
		{"spare capacity", func(g *NodeGroupSpec) { g.Boot.Args = []string{"a"} },
			func(g *NodeGroupSpec) { g.Boot.Args = append(make([]string, 0, 9), "a") }},
		{"order of a map", func(g *NodeGroupSpec) { g.Boot.Env = numbered(0, 50, 1) }, func(g *NodeGroupSpec) { g.Boot.Env = numbered(49, -1, -1) }},
	}
	for _, p := range pairs {
		a, b := groupOf("w", 1), groupOf("w", 1)
		p.a(&a)
		p.b(&b)
		expandedA, expandedB := mustExpand(t, shapeOf(1, a)), mustExpand(t, shapeOf(1, b))
		_, err := expandedA.succeed(shapeOf(1, b), DefaultMaxNodes)
		require.NoError(t, err, p.why)
		require.True(t, sameTemplate(expandedA.group("w").template, expandedB.group("w").template), p.why)
		for specA := range expandedA.All() {
			for specB := range expandedB.All() {
				require.True(t, specA.Equal(specB), p.why)
			}
		}
	}
}

func numbered(from, to, step int) map[string]string {
	m := make(map[string]string)
	for i := from; i != to; i += step {
		m[fmt.Sprint("key", i)] = fmt.Sprint(i)
	}
	return m
}

// What stands next to each other must not run together, and an absent number
// is not zero.
func TestNeighboursDoNotRunTogether(t *testing.T) {
	zero, one := 0.0, 1.0
	changes := map[string]func(*NodeGroupSpec){
		"image ab":          func(g *NodeGroupSpec) { g.Shape.Image = "ab" },
		"image a, gpu b":    func(g *NodeGroupSpec) { g.Shape.Image, g.Shape.GPUName = "a", "b" },
		"role ab":           func(g *NodeGroupSpec) { g.Role = "ab" },
		"role a provider b": func(g *NodeGroupSpec) { g.Role, g.Provider = "a", "b" },
		"one argument":      func(g *NodeGroupSpec) { g.Boot.Args = []string{"a b"} },
		"two arguments":     func(g *NodeGroupSpec) { g.Boot.Args = []string{"a", "b"} },
		"swapped":           func(g *NodeGroupSpec) { g.Boot.Args = []string{"b", "a"} },
		"an empty argument": func(g *NodeGroupSpec) { g.Boot.Args = []string{""} },
		"stdout a":          func(g *NodeGroupSpec) { g.Boot.StdoutSources = []string{"a"} },
		"stderr a":          func(g *NodeGroupSpec) { g.Boot.StderrSources = []string{"a"} },
		"verify a":          func(g *NodeGroupSpec) { g.Boot.VerifyCommands = []string{"a"} },
		"env a=b":           func(g *NodeGroupSpec) { g.Boot.Env = map[string]string{"a": "b"} },
		"env b=a":           func(g *NodeGroupSpec) { g.Boot.Env = map[string]string{"b": "a"} },
		"env ab=":           func(g *NodeGroupSpec) { g.Boot.Env = map[string]string{"ab": ""} },
		"labels a=b":        func(g *NodeGroupSpec) { g.Shape.ProviderLabels = map[string]string{"a": "b"} },
		"no number":         func(g *NodeGroupSpec) {},
		"gpu 0":             func(g *NodeGroupSpec) { g.Shape.MinGPURAMMB = &zero },
		"gpu 1":             func(g *NodeGroupSpec) { g.Shape.MinGPURAMMB = &one },
		"down 0":            func(g *NodeGroupSpec) { g.Shape.MinDownMbps = &zero },
		"up 0":              func(g *NodeGroupSpec) { g.Shape.MinUpMbps = &zero },
		"reliability 0":     func(g *NodeGroupSpec) { g.Shape.MinReliability = &zero },
		"mount":             func(g *NodeGroupSpec) { g.Boot.Mounts = []Mount{{Source: "a", Target: "b"}} },
		"mount read-only":   func(g *NodeGroupSpec) { g.Boot.Mounts = []Mount{{Source: "a", Target: "b", ReadOnly: true}} },
	}
	byDigest := make(map[[32]byte]string)
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		g := NodeGroupSpec{GroupID: "w"}
		changes[name](&g)
		digest := newTemplate("r", g).digest
		require.Empty(t, byDigest[digest], "%s is taken for it", name)
		byDigest[digest] = name
	}
}

// Every field counts. The fields are found by reflection: one that is added
// and not hashed fails here.
func TestEveryFieldIsDrift(t *testing.T) {
	t.Run("spec", func(t *testing.T) {
		base, spec := filled[LogicalNodeSpec](t), filled[LogicalNodeSpec](t)
		require.True(t, spec.Equal(base))
		walkLeaves(t, reflect.ValueOf(&spec).Elem(), "spec", func(path string) {
			require.False(t, spec.Equal(base), "a change of %s is no drift", path)
			require.False(t, base.Equal(spec), "a change of %s is no drift", path)
		})
		require.True(t, spec.Equal(base), "the walk puts everything back")
	})

	t.Run("group", func(t *testing.T) {
		group := filled[NodeGroupSpec](t)
		accepted := mustExpand(t, ClusterShape{RunID: group.RunID, Generation: 1, Groups: []NodeGroupSpec{group}})
		visited := 0
		walkLeaves(t, reflect.ValueOf(&group).Elem(), "group", func(path string) {
			visited++
			shape := ClusterShape{RunID: accepted.run, Generation: 1, Groups: []NodeGroupSpec{group}}
			next, err := accepted.succeed(shape, DefaultMaxNodes)
			require.Nil(t, next)
			if path == "group.RunID" {
				require.ErrorIs(t, err, ErrInvalidShape)
				return
			}
			require.ErrorIs(t, err, ErrGenerationReused, "a change of %s is no change of content", path)

			shape.Generation = 2
			next, err = accepted.succeed(shape, DefaultMaxNodes)
			require.NoError(t, err)
			drift := !sameTemplate(accepted.groups[0].template, next.groups[0].template)
			require.Equal(t, path != "group.Count", drift, path)
		})
		require.Greater(t, visited, 40)
	})
}

// filled returns a value with something in every field, nested ones too.
func filled[T any](t *testing.T) T {
	var v T
	fill(t, reflect.ValueOf(&v).Elem())
	return v
}

func fill(t *testing.T, v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("text")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(3)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(3)
	case reflect.Float64:
		v.SetFloat(0.5)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(t, v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, key)
		fill(t, value)
		v.SetMapIndex(key, value)
	case reflect.Struct:
		if at, ok := v.Addr().Interface().(*time.Time); ok {
			*at = time.Unix(3, 3).UTC()
			return
		}
		for field, value := range v.Fields() {
			require.True(t, field.IsExported(), "%v.%s cannot be compared from outside", v.Type(), field.Name)
			fill(t, value)
		}
	default:
		t.Fatalf("a field of kind %v: teach fill and walkLeaves about it", v.Kind())
	}
}

// walkLeaves changes one thing of v at a time, calls visit and changes it back.
// v is filled.
func walkLeaves(t *testing.T, v reflect.Value, path string, visit func(path string)) {
	change := func(to reflect.Value, path string) {
		old := reflect.New(v.Type()).Elem()
		old.Set(v)
		v.Set(to.Convert(v.Type()))
		visit(path)
		v.Set(old)
	}
	switch v.Kind() {
	case reflect.String:
		change(reflect.ValueOf(v.String()+"x"), path)
	case reflect.Bool:
		change(reflect.ValueOf(!v.Bool()), path)
	case reflect.Int, reflect.Int64:
		change(reflect.ValueOf(v.Int()+1), path)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		change(reflect.ValueOf(v.Uint()-1), path)
	case reflect.Float64:
		change(reflect.ValueOf(v.Float()/2), path)
	case reflect.Pointer:
		walkLeaves(t, v.Elem(), path, visit)
		change(reflect.Zero(v.Type()), path+" = nil")
	case reflect.Slice:
		walkLeaves(t, v.Index(0), path+"[0]", visit)
		change(reflect.Zero(v.Type()), path+" = nil")
		change(v.Slice(0, 1), path+" shorter")
		change(reflect.Append(v, v.Index(0)), path+" longer")
		swapped := reflect.MakeSlice(v.Type(), 2, 2)
		swapped.Index(0).Set(v.Index(1))
		swapped.Index(1).Set(v.Index(0))
		change(swapped, path+" swapped")
	case reflect.Map:
		key := v.MapKeys()[0]
		old, other := v.MapIndex(key), reflect.New(v.Type().Elem()).Elem()
		change(reflect.Zero(v.Type()), path+" = nil")
		v.SetMapIndex(key, other)
		visit(path + " other value")
		v.SetMapIndex(key, reflect.Value{})
		v.SetMapIndex(reflect.New(v.Type().Key()).Elem(), old)
		visit(path + " other key")
		v.SetMapIndex(key, old)
		visit(path + " one more")
		v.SetMapIndex(reflect.New(v.Type().Key()).Elem(), reflect.Value{})
	case reflect.Struct:
		for field, value := range v.Fields() {
			walkLeaves(t, value, path+"."+field.Name, visit)
		}
	default:
		t.Fatalf("%s is of kind %v: teach fill and walkLeaves about it", path, v.Kind())
	}
}

// The walk itself: what it visits is every leaf, and it leaves no trace.
func TestWalkLeavesSeesEverything(t *testing.T) {
	type inner struct{ Text string }
	type outer struct {
		Flag  bool
		Inner inner
		List  []inner
		Map   map[string]string
		Ptr   *float64
	}
	v := filled[outer](t)
	var paths []string
	walkLeaves(t, reflect.ValueOf(&v).Elem(), "v", func(path string) {
		require.NotEqual(t, filled[outer](t), v, "%s changed nothing", path)
		paths = append(paths, path)
	})
	require.Equal(t, filled[outer](t), v)
	require.Equal(t, []string{
		"v.Flag", "v.Inner.Text", "v.List[0].Text", "v.List = nil", "v.List shorter", "v.List longer", "v.List swapped",
		"v.Map = nil", "v.Map other value", "v.Map other key", "v.Map one more", "v.Ptr", "v.Ptr = nil",
	}, paths)
}

func TestDesiredIsOneInAnyOrderOfGroups(t *testing.T) {
	groups := []NodeGroupSpec{groupOf("c", 1), groupOf("a", 2), groupOf("b", 0)}
	want := mustExpand(t, shapeOf(1, groups...))
	for _, order := range [][]int{{0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		require.Equal(t, want, mustExpand(t, shapeOf(1, groups[order[0]], groups[order[1]], groups[order[2]])))
	}
}

// drawLooseShape draws shapes of which about half are lawful: each choice has a
// few bad values among many good ones.
func drawLooseShape(t *rapid.T) ClusterShape {
	run := mostly([]string{"r", "w", "ä"}, 30, []string{"", "a/b"})
	group := mostly([]string{"r", "w", "w-1", "w-w", "ä", "a b", "w-10", "1"}, 12, []string{"", "a/b", "\n", "\xff"})
	float := mostly([]*float64{nil, new(0.0), new(math.Copysign(0, -1)), new(1.5)}, 12, []*float64{new(math.Inf(1)), new(math.NaN())})
	count := mostly([]int{0, 1, 2, 11, 3}, 12, []int{-1, DefaultMaxNodes, math.MaxInt, math.MinInt})
	shape := ClusterShape{RunID: RunID(run.Draw(t, "run")), Generation: mostly([]uint64{1, 2, 3, 9}, 10, []uint64{0}).Draw(t, "generation")}
	for range rapid.IntRange(0, 3).Draw(t, "groups") {
		shape.Groups = append(shape.Groups, NodeGroupSpec{
			RunID:   mostly([]RunID{"", shape.RunID}, 12, []RunID{"other"}).Draw(t, "group's run"),
			GroupID: NodeGroupID(group.Draw(t, "group")),
			Count:   count.Draw(t, "count"),
			Shape:   NodeShape{DiskGB: mostly([]int64{0, 7}, 12, []int64{-1}).Draw(t, "disk"), MinUpMbps: float.Draw(t, "float")},
		})
	}
	return shape
}

// mostly draws from good as if it stood there so many times, else from bad.
func mostly[T any](good []T, times int, bad []T) *rapid.Generator[T] {
	return rapid.SampledFrom(append(slices.Repeat(good, times), bad...))
}

// lawful says the rules once more, in another way.
func lawful(shape ClusterShape) bool {
	plain := func(id string) bool {
		return id != "" && len(id) <= 253 && !strings.ContainsAny(id, "/\n\x00\x7f") && strings.ToValidUTF8(id, "") == id
	}
	ok := plain(string(shape.RunID)) && shape.Generation > 0
	names, sum := make(map[NodeGroupID]bool), 0.0
	for _, g := range shape.Groups {
		ok = ok && (g.RunID == "" || g.RunID == shape.RunID) && plain(string(g.GroupID)) && !names[g.GroupID] && g.Count >= 0 && g.Shape.DiskGB >= 0
		names[g.GroupID] = true
		sum += float64(g.Count)
		for _, f := range []*float64{g.Shape.MinGPURAMMB, g.Shape.MinDownMbps, g.Shape.MinUpMbps, g.Shape.MinReliability} {
			ok = ok && (f == nil || math.Abs(*f) <= math.MaxFloat64)
		}
	}
	return ok && sum <= DefaultMaxNodes
}

// checkShape holds Validate and Expand to each other and to lawful.
func checkShape(t require.TestingT, shape ClusterShape) {
	before := fmt.Sprintf("%#v", shape)
	d, err := Expand(shape)
	judgement := shape.Validate()
	require.Equal(t, err, judgement, "Validate says what Expand would")
	require.Equal(t, lawful(shape), err == nil, "%v", err)
	require.Equal(t, before, fmt.Sprintf("%#v", shape), "the shape is the caller's")
	if err != nil {
		require.Nil(t, d)
		require.ErrorIs(t, err, ErrInvalidShape)
		refusal, ok := errors.AsType[*ShapeError](err)
		require.True(t, ok)
		require.NotEmpty(t, refusal.Faults)
		for _, fault := range refusal.Faults {
			require.NotEmpty(t, fault.Field)
			require.NotEmpty(t, fault.Problem)
			if fault.Position >= 0 {
				require.Equal(t, shape.Groups[fault.Position].GroupID, fault.Group)
			}
		}
		return
	}
	want := 0
	for _, g := range shape.Groups {
		want += g.Count
	}
	require.Equal(t, want, d.Len())
	names := make(map[LogicalNodeID]bool)
	var last LogicalNodeSpec
	for spec := range d.All() {
		if len(names) == 1000 { // the rest is more of the same
			return
		}
		require.False(t, names[spec.Node], "%s twice", spec.Node)
		if len(names) > 0 {
			require.Negative(t, CompareSlots(last.GroupID, last.Index, spec.GroupID, spec.Index))
		}
		names[spec.Node], last = true, spec
		require.Equal(t, shape.RunID, spec.RunID)
		require.Equal(t, NewLogicalNodeID(spec.GroupID, spec.Index), spec.Node)
		require.Equal(t, spec.Node, spec.SwarmJoin.ExpectedLogicalNodeID)
	}
	require.Len(t, names, want)
}

func TestProp_ValidateAgreesWithExpand(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { checkShape(t, drawLooseShape(t)) })
}

// For any two shapes: the successor is accepted exactly when the contract says
// so, judged here from the shapes alone.
func TestProp_RevisionContract(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := drawLooseShape(t)
		accepted, err := Expand(first)
		if err != nil {
			return
		}
		second := first
		switch rapid.SampledFrom([]string{"another", "another run", "shuffled", "one more", "same"}).Draw(t, "second") {
		case "another":
			second = drawLooseShape(t)
			second.RunID = first.RunID
		case "another run":
			second.RunID += "x"
		case "shuffled":
			second.Groups = rapid.Permutation(first.Groups).Draw(t, "order")
		case "one more":
			second.Groups = append(slices.Clone(first.Groups), groupOf("new", rapid.IntRange(0, 1).Draw(t, "count")))
		}
		second.Generation = rapid.Uint64Range(0, 9).Draw(t, "next generation")

		var want error
		switch {
		case second.RunID != first.RunID:
			want = ErrRunChanged
		case second.Generation < first.Generation:
			want = ErrGenerationRegressed
		case !lawful(second):
			want = ErrInvalidShape
		case second.Generation == first.Generation && groupsText(first) != groupsText(second):
			want = ErrGenerationReused
		}
		next, err := accepted.succeed(second, DefaultMaxNodes)
		require.ErrorIs(t, err, want)
		require.Equal(t, want == nil, next != nil)
		if next == nil {
			return
		}
		fresh := mustExpand(t, second)
		require.Equal(t, fresh, next, "where it came from leaves no mark")
	})
}

// groupsText is the content of a shape as text: groups by name, floats by value.
func groupsText(shape ClusterShape) string {
	var lines []string
	for _, g := range shape.Groups {
		up := "none"
		if g.Shape.MinUpMbps != nil {
			up = fmt.Sprint(*g.Shape.MinUpMbps + 0)
		}
		lines = append(lines, fmt.Sprintf("%q %q %d %d %s", g.GroupID, g.Shape.Image, g.Count, g.Shape.DiskGB, up))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func FuzzShapeValidate(f *testing.F) {
	f.Add("r", uint64(1), "w", 1, "v", 2, "", int64(0), 0.5)
	f.Add("r", uint64(0), "w", math.MaxInt, "w", math.MaxInt, "q", int64(-1), math.NaN())
	f.Add("\xff/", uint64(math.MaxUint64), "", -1, "\x00", DefaultMaxNodes, "\xff/", int64(1), math.Inf(-1))
	f.Add(strings.Repeat("r", 254), uint64(3), "w", DefaultMaxNodes, "w-1", 0, "", int64(0), math.Copysign(0, -1))
	f.Fuzz(func(t *testing.T, run string, generation uint64, groupA string, countA int, groupB string, countB int, groupRun string, disk int64, float float64) {
		shape := ClusterShape{RunID: RunID(run), Generation: generation, Groups: []NodeGroupSpec{
			{GroupID: NodeGroupID(groupA), Count: countA, Shape: NodeShape{Image: run, DiskGB: disk, MinGPURAMMB: &float}},
			{RunID: RunID(groupRun), GroupID: NodeGroupID(groupB), Count: countB, Shape: NodeShape{MinReliability: &float}},
		}}
		d, err := Expand(shape)
		require.Equal(t, err, shape.Validate())
		require.Equal(t, err == nil, d != nil)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidShape)
			require.True(t, strings.HasPrefix(err.Error(), "provisioning: "))
			return
		}
		require.Equal(t, countA+countB, d.Len())
		_, err = d.succeed(shape, DefaultMaxNodes)
		require.NoError(t, err, "the identical shape is accepted again")
	})
}
