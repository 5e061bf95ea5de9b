package provisioning_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/verify"
)

// ivFault is something that can be wrong with a shape, made so at a place.
type ivFault struct {
	name  string
	field string
	// do makes it wrong and says where it is to be found: the group and its
	// place, "" and -1 for the shape itself.
	do func(s *provisioning.ClusterShape, i int) (provisioning.NodeGroupID, int)
	// whole: it is wrong once in a shape, wherever.
	whole bool
	// hosts: only who configures it finds it wrong.
	hosts bool
}

// ivMaxNodes is the cap of the drivers that are offered these shapes.
const ivMaxNodes = 40

func ivFaults() []ivFault {
	var faults []ivFault
	inGroup := func(name, field string, do func(g *provisioning.NodeGroupSpec)) {
		faults = append(faults, ivFault{name: name, field: field, do: func(s *provisioning.ClusterShape, i int) (provisioning.NodeGroupID, int) {
			do(&s.Groups[i])
			return s.Groups[i].GroupID, i
		}})
	}
	inGroup("of another run", "runId", func(g *provisioning.NodeGroupSpec) { g.RunID = "another" })
	inGroup("of a run with a prefix", "runId", func(g *provisioning.NodeGroupSpec) { g.RunID = "run-1" })
	for name, id := range map[string]string{"empty": "", "too long": strings.Repeat("g", provisioning.MaxIDLength+1), "with a slash": "a/b",
		"with a line break": "a\nb", "with a null": "a\x00", "with a delete": "a\x7f", "with a C1 control": "a\u0085b", "not UTF-8": "a\xff"} {
		inGroup("name "+name, "groupId", func(g *provisioning.NodeGroupSpec) { g.GroupID = provisioning.NodeGroupID(id) })
	}
	inGroup("count -1", "count", func(g *provisioning.NodeGroupSpec) { g.Count = -1 })
	inGroup("smallest count", "count", func(g *provisioning.NodeGroupSpec) { g.Count = math.MinInt })
	inGroup("disk -1", "shape.diskGB", func(g *provisioning.NodeGroupSpec) { g.Shape.DiskGB = -1 })
	inGroup("smallest disk", "shape.diskGB", func(g *provisioning.NodeGroupSpec) { g.Shape.DiskGB = math.MinInt64 })
	for name, value := range map[string]float64{"NaN": math.NaN(), "infinite": math.Inf(1), "minus infinite": math.Inf(-1)} {
		inGroup("GPU memory "+name, "shape.minGPURAMMB", func(g *provisioning.NodeGroupSpec) { g.Shape.MinGPURAMMB = &value })
		inGroup("mbps down "+name, "shape.minDownMbps", func(g *provisioning.NodeGroupSpec) { g.Shape.MinDownMbps = &value })
		inGroup("mbps up "+name, "shape.minUpMbps", func(g *provisioning.NodeGroupSpec) { g.Shape.MinUpMbps = &value })
		inGroup("reliability "+name, "shape.minReliability", func(g *provisioning.NodeGroupSpec) { g.Shape.MinReliability = &value })
	}
	inGroup("what the host does not know", "provider", func(g *provisioning.NodeGroupSpec) { g.Provider = "unknown" })
	faults[len(faults)-1].hosts = true
	faults = append(faults, ivFault{name: "twice", field: "groupId", do: func(s *provisioning.ClusterShape, i int) (provisioning.NodeGroupID, int) {
		again := s.Groups[i]
		again.Count = 0
		s.Groups = append(s.Groups, again)
		return again.GroupID, len(s.Groups) - 1
	}})
	for _, c := range []struct {
		name string
		more func(total int) int
	}{
		{"one slot too many", func(total int) int { return ivMaxNodes + 1 - total }},
		{"the largest count", func(int) int { return math.MaxInt }},
	} {
		faults = append(faults, ivFault{name: c.name, field: "groups", whole: true, do: func(s *provisioning.ClusterShape, i int) (provisioning.NodeGroupID, int) {
			total := 0
			for j, g := range s.Groups {
				if j != i {
					total += g.Count
				}
			}
			s.Groups[i].Count = c.more(total)
			return "", -1
		}})
	}
	faults = append(faults, ivFault{name: "the last generation", field: "generation", whole: true, do: func(s *provisioning.ClusterShape, _ int) (provisioning.NodeGroupID, int) {
		s.Generation = math.MaxUint64
		return "", -1
	}})
	slices.SortFunc(faults, func(a, b ivFault) int { return strings.Compare(a.name, b.name) })
	return faults
}

// ivBases are the shapes that are made wrong.
func ivBases() []rsShape {
	return []rsShape{
		{"one group", []provisioning.NodeGroupSpec{rsGroup("w", 1)}},
		{"three groups", []provisioning.NodeGroupSpec{rsGroup("w", 2), rsGroup("x", 1), rsGroup("a", 1)}},
		{"many slots, an empty group", []provisioning.NodeGroupSpec{rsGroup("x", 0), rsGroup("w", 4), rsGroup("w-1", 2)}},
	}
}

// ivShape is a shape with what has to be said about it.
type ivShape struct {
	name   string
	shape  provisioning.ClusterShape
	faults []provisioning.ShapeFault // without what the problem is
	hosts  bool
}

// ivGeneration is the generation of the invalid shapes, but for those that are
// wrong in it.
const ivGeneration = 2

// ivCorpus is every fault at every place of every base, and every two faults
// that are neighbours in the table at two places.
func ivCorpus() []ivShape {
	var corpus []ivShape
	for _, base := range ivBases() {
		add := func(name string, places []int, faults ...ivFault) {
			s := ivShape{name: base.name + ", " + name, shape: provisioning.ClusterShape{RunID: "run", Generation: ivGeneration, Groups: slices.Clone(base.groups)}}
			for k, f := range faults {
				group, place := f.do(&s.shape, places[k])
				s.faults = append(s.faults, provisioning.ShapeFault{Group: group, Position: place, Field: f.field})
				s.hosts = s.hosts || f.hosts
			}
			corpus = append(corpus, s)
		}
		faults := ivFaults()
		for k, f := range faults {
			for i := range base.groups {
				add(fmt.Sprintf("%s at %d", f.name, i), []int{i}, f)
				if f.whole && f.field == "generation" {
					break
				}
			}
			if next := faults[(k+1)%len(faults)]; len(base.groups) > 1 && !f.whole && !next.whole {
				add(f.name+" and "+next.name, []int{0, len(base.groups) - 1}, f, next)
			}
		}
	}
	return corpus
}

func ivConfig() provisioning.Config {
	return provisioning.Config{MaxNodes: ivMaxNodes, ValidateGroup: func(g provisioning.NodeGroupSpec) []provisioning.ShapeFault {
		if g.Provider == "unknown" {
			return []provisioning.ShapeFault{{Field: "provider", Problem: "is not known"}}
		}
		return nil
	}}
}

// found wants exactly those faults, in any order, each with its problem, and
// that the text names them.
func (s *ivShape) found(t *testing.T, err error) {
	var refusal *provisioning.ShapeError
	require.ErrorAs(t, err, &refusal)
	require.ErrorIs(t, err, provisioning.ErrInvalidShape)
	var faults []provisioning.ShapeFault
	for _, f := range refusal.Faults {
		require.NotEmpty(t, f.Problem)
		require.Contains(t, err.Error(), f.String())
		if f.Position >= 0 {
			require.Contains(t, f.String(), fmt.Sprintf("group %q (groups[%d]) %s", f.Group, f.Position, f.Field))
		}
		f.Problem = ""
		faults = append(faults, f)
	}
	require.ElementsMatch(t, s.faults, faults)
}

// TestEveryInvalidShapeIsRefused offers every shape of the corpus to a driver in
// the middle of its work. Nothing changes, and the driver goes on: to the wish
// it has, and to a valid one under the generation that was refused.
func TestEveryInvalidShapeIsRefused(t *testing.T) {
	if provisioning.RaceDetector {
		t.Skip("it runs on one goroutine at a time")
	}
	corpus := ivCorpus()
	first := rsShape{"", []provisioning.NodeGroupSpec{rsGroup("w", 3), rsGroup("x", 2)}}
	next := ivBases()[1]
	for _, s := range corpus {
		t.Run(s.name, func(t *testing.T) {
			_, err := provisioning.NewClusterDriver(s.shape, ivConfig())
			s.found(t, err)
			if !s.hosts && s.shape.Generation == ivGeneration && !strings.Contains(s.name, "one slot too many") {
				s.found(t, s.shape.Validate())
				_, err := provisioning.Expand(s.shape)
				s.found(t, err)
			}

			world := mwNew(t, fakebackend.Config{}, ivConfig(), provisioning.ClusterShape{RunID: "run", Generation: 1, Groups: first.groups}, mwHow{})
			defer world.close()
			driver := world.driver.(*provisioning.ClusterDriver)
			world.fake.Script("w-0", provisioning.CreateLease, fakebackend.Hang())
			world.fake.Script("w-1", provisioning.CreateLease, fakebackend.Definite())
			world.fake.Script("x-0", provisioning.CreateLease, fakebackend.DoneAmbiguous())
			world.drive()
			known := func() []any {
				at, stored := driver.RequeueAt()
				ready, wished := driver.Progress()
				return []any{ptJSON(driver.Snapshot()), at, stored, ready, wished, driver.Generation(), driver.ObservedGeneration(), driver.Converged(1), driver.Plan(world.fake.Now())}
			}
			before, effects := known(), len(world.effects)
			s.found(t, driver.UpdateDesired(s.shape))
			require.Equal(t, before, known())
			ran, err := driver.DriveNext(world.fake.Now(), world.submits)
			require.NoError(t, err)
			require.False(t, ran, "a refused wish asks for no pass")
			driver.Trigger()
			world.drive()
			require.Equal(t, before, known(), "a pass later")
			require.Len(t, world.effects, effects)

			run := &rsRun{rsWorld: &rsWorld{mwWorld: world, driver: driver}}
			world.settle()
			run.holds(rsWant(first.groups))
			world.wish(next.groups)
			world.settle()
			run.holds(rsWant(next.groups))
		})
	}
	verify.AtLeast(t, "invalid shapes refused, with nothing changed", len(corpus), 200)
}

// TestRefusedBeforeTheShapeIsLookedAt: of a shape of another run, or under a
// generation that has passed, nothing else is said, however invalid it is.
func TestRefusedBeforeTheShapeIsLookedAt(t *testing.T) {
	for _, s := range ivCorpus() {
		for _, c := range []struct {
			want   error
			change func(*provisioning.ClusterShape)
		}{
			{provisioning.ErrRunChanged, func(s *provisioning.ClusterShape) { s.RunID = "another" }},
			{provisioning.ErrRunChanged, func(s *provisioning.ClusterShape) { s.RunID = "" }},
			{provisioning.ErrGenerationRegressed, func(s *provisioning.ClusterShape) { s.Generation = 4 }},
			{provisioning.ErrGenerationRegressed, func(s *provisioning.ClusterShape) { s.Generation = 0 }},
		} {
			driver, err := provisioning.NewClusterDriver(provisioning.ClusterShape{RunID: "run", Generation: 5}, ivConfig())
			require.NoError(t, err)
			before := ptJSON(driver.Snapshot())
			shape := s.shape
			c.change(&shape)
			err = driver.UpdateDesired(shape)
			require.ErrorIs(t, err, c.want, s.name)
			require.False(t, errors.Is(err, provisioning.ErrInvalidShape), s.name)
			require.Equal(t, before, ptJSON(driver.Snapshot()))
			require.Equal(t, uint64(5), driver.Generation())
		}
	}
}
