package provisioning

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/internal/verify"
)

// The exhaustive search goes through every world that one slot can get into
// (two slots, in its full form), with the shipping folds, ladder and driver, by
// every interleaving of what can happen: calls reach the provider and answer,
// well or badly, in time or late or not at all; what was answered badly takes
// effect, or does so later, or never; the bootstrap reports early, late, twice,
// out of order or nothing; the machine is lost; deadlines come due in any
// order; the wish changes its count and its image at any moment; a submission
// is refused, a pass is cut off. See exhaustive_world_test.go for what a world
// is, exhaustive_events_test.go for what happens in it, and
// exhaustive_step_test.go for what must be true after every step.
//
// What it does not show: more faults than the bound in one life of a slot (a
// converged slot begins a new life only when it is replaced), what happens
// beyond two reports that are held, and whatever the model of the provider
// leaves out. Counts that only make a delay longer, texts and the times of past
// things are no part of a world; TestExhaustiveFormLosesNothing holds that
// they do not matter. Slots do not touch one another, see
// TestProp_G10SlotsAreIndependent, so what holds for one holds for many.

// The forms. The wish for a slot changes as often as it likes in all of them.
const (
	exShortFaults, exFullFaults = 3, 6 // of a token provider; of the others one less in the short form
	exRoom                      = 2    // for reports that are held
)

// TestExhaustiveOneSlot: in every world of one slot everything is true that
// must be, and from every one of them every schedule converges once no more
// faults happen, in as many events as the golden file says, and stays so.
func TestExhaustiveOneSlot(t *testing.T) {
	faults := uint8(exShortFaults)
	switch {
	case exRace:
		t.Skip(exRaceSkip)
	case verify.Full():
		faults = exFullFaults
	case testing.Short():
		faults = 1
	}
	var mu sync.Mutex
	golden := map[string]string{}
	states, transitions := 0, 0
	t.Run("class", func(t *testing.T) {
		for class := range exClasses {
			t.Run(class.String(), func(t *testing.T) {
				t.Parallel()
				m := exModel{class: class, slots: 1, maxFaults: faults, maxHeld: exRoom}
				if class != exToken && m.maxFaults == exShortFaults {
					m.maxFaults--
				}
				s := exNewSearch(m)
				line := exSearchAll(t, s)
				mu.Lock()
				defer mu.Unlock()
				golden[s.title()] = line
				states, transitions = states+len(s.codes), transitions+s.transitions
			})
		}
	})
	exGolden(t, golden)
	if !testing.Short() {
		verify.AtLeast(t, "worlds of one slot", states, 100_000)
		verify.AtLeast(t, "transitions of one slot", transitions, 600_000)
	}
}

const exRaceSkip = "one goroutine has no races, and the detector takes minutes; make test runs it"

// TestExhaustiveTwoSlots is the same for two slots that share a wish and an
// allocator. It takes minutes.
func TestExhaustiveTwoSlots(t *testing.T) {
	if !verify.Full() {
		t.Skip("only in the full form, see make verify")
	}
	s := exNewSearch(exModel{class: exToken, slots: 2, maxFaults: 1, maxHeld: 1, plain: true})
	exGolden(t, map[string]string{s.title(): exSearchAll(t, s)})
	verify.Note(t, "worlds of two slots", len(s.codes))
	verify.Note(t, "transitions of two slots", s.transitions)
}

func (s *exSearch) title() string {
	return fmt.Sprintf("%d slots, %s provider, at most %d faults, %d held", s.slots, s.class, s.maxFaults, s.maxHeld)
}

// exSearchAll runs a search to its end and returns its figures.
func exSearchAll(t *testing.T, s *exSearch) string {
	t.Helper()
	if v := s.run(); v != nil {
		t.Fatal(s.tell(v))
	}
	bound, v := s.settle()
	if v != nil {
		t.Fatal(s.tell(v))
	}
	if v := s.still(); v != nil {
		t.Fatal(s.tell(v))
	}
	require.Zero(t, noTrouble, "what all nodes share was written to")
	if s.class != exHastyLabel {
		require.Empty(t, s.leaks)
	}
	line := fmt.Sprintf("%d worlds, %d transitions, converged within %d events of which %d passes", len(s.codes), s.transitions, bound.events, bound.passes)
	for _, how := range slices.Sorted(maps.Keys(s.leaks)) {
		leak := s.leaks[how]
		line += fmt.Sprintf("\n    leaves a machine behind: %s (from %d worlds)", how, leak.states)
		t.Logf("The shortest way in which a %s provider leaves a machine behind because %s:\n%s", s.class, how,
			s.tell(&exViolation{what: how, state: leak.first, event: &leak.event}))
	}
	if s.beside > 0 {
		line += fmt.Sprintf("\n    makes a second machine beside that of a ready node, which lives until the node is given up (%d worlds)", s.beside)
	}
	return line
}

const exGoldenFile = "testdata/exhaustive.golden"

// exGolden holds figures to the golden file, which has those of all forms.
// -update writes the ones that have been searched.
func exGolden(t *testing.T, found map[string]string) {
	t.Helper()
	if t.Failed() {
		return
	}
	pinned := map[string]string{}
	text, err := os.ReadFile(filepath.FromSlash(exGoldenFile))
	if err != nil && !*updateGolden {
		require.NoError(t, err)
	}
	for entry := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n\n") {
		title, figures, _ := strings.Cut(entry, ":\n    ")
		pinned[title] = figures
	}
	if *updateGolden {
		maps.Copy(pinned, found)
		var entries []string
		for _, title := range slices.Sorted(maps.Keys(pinned)) {
			if title != "" {
				entries = append(entries, title+":\n    "+pinned[title]+"\n")
			}
		}
		require.NoError(t, os.WriteFile(filepath.FromSlash(exGoldenFile), []byte(strings.Join(entries, "\n")), 0o644))
	}
	for _, title := range slices.Sorted(maps.Keys(found)) {
		require.Equal(t, pinned[title], found[title], "%s: the search has found other worlds than before; if that is meant, run it with -update", title)
	}
}

// TestExhaustiveFormLosesNothing walks at random through real states that are
// never cut down to what can matter, beside the worlds that are. Both come to
// the same at every step: what is left out does not matter.
func TestExhaustiveFormLosesNothing(t *testing.T) {
	walks := 300
	switch {
	case exRace:
		walks = 30
	case verify.Full():
		walks = 20_000
	}
	steps := 0
	for seed := range walks {
		random := rand.New(rand.NewPCG(verify.Seed()+uint64(seed), 1))
		m := exModel{class: exClass(seed) % exClasses, slots: 1 + seed%exMaxSlots, maxHeld: exMaxHeld}
		w := exWorld{count: uint8(m.slots)}
		var whole []*node // the real states, with all there is to them
		var told []string
		for range 150 {
			moves := m.moves(&w, nil)
			move := moves[random.IntN(len(moves))]
			if random.IntN(3) > 0 { // mostly let it go well, so that it gets far
				calm := slices.DeleteFunc(slices.Clone(moves), func(m exMove) bool { return !m.calm })
				if len(calm) > 0 {
					move = calm[random.IntN(len(calm))]
				}
			}
			told = append(told, m.words(&w, move.exEvent))
			cut := m.take(&w, move.exEvent)
			require.NoError(t, cut.broken, "seed %d: %v", seed, told)
			kept := &exStep{m: &m, event: move.exEvent, before: w, w: w, whole: whole}
			kept.happen()
			require.NoError(t, kept.broken, "seed %d: %v", seed, told)
			require.Equal(t, cut.w, kept.w, "seed %d: %v", seed, told)
			require.Equal(t, cut.requests, kept.requests, "seed %d: %v", seed, told)
			w, whole = cut.w, kept.whole
			steps++
		}
	}
	verify.AtLeast(t, "steps of whole states beside worlds", steps, verify.Target(3_000_000, 4500))
}

// exRelay changes the ladder, and what the climb looks at of it.
func exRelay(change func()) {
	change()
	rungs = rungsOf(ladder[:])
}

// TestExhaustiveCanFail breaks rules of the ladder and wants the search to find
// out, and to tell the shortest way to the harm.
func TestExhaustiveCanFail(t *testing.T) {
	if exRace {
		t.Skip(exRaceSkip)
	}
	const never = absent | deleting // no slot is both
	for _, broken := range []struct {
		name string
		rule int
		edit func(r *rule)
		want string // how the harm is told
		last string // and the event that does it
	}{
		{"nothing is resolved", 6, func(r *rule) { r.all = never }, "S4 broken", "a pass"},
		{"a start is resolved after the destroy", 6, func(r *rule) { r.none = leased }, "a destroy while a StartBootstrap is remembered", "a pass"},
		{"a restart does not wait", 2, func(r *rule) { r.all = destroyed }, "a restart before RestartAt", "a pass"},
		{"operations overlap", 5, func(r *rule) { r.all = never }, "is submitted while another operation is in flight", "a pass"},
		{"a destroy does not back off", 8, func(r *rule) { r.backsOff = false }, "is to be tried again without a wait", "DestroyLease answers"},
		{"nothing is destroyed", 8, func(r *rule) { r.all = never }, "the attempt ends with 1 machines", "a pass"},
		{"sessions are not cancelled", 7, func(r *rule) { r.all = never }, "a destroy of lease", "a pass"},
		{"a joined node is not handed off", 14, func(r *rule) { r.all = never }, "S8 broken", "the bootstrap reports the join"},
		{"failed attempts are not given up", 4, func(r *rule) { r.all |= undesired }, "is to be tried again without a wait", "CreateLease answers LeaseLost"},
	} {
		t.Run(broken.name, func(t *testing.T) {
			r := &ladder[broken.rule]
			whole := *r
			defer exRelay(func() { *r = whole })
			exRelay(func() { broken.edit(r) })
			s := exNewSearch(exModel{class: exToken, slots: 1, maxFaults: 2, maxHeld: 1, plain: true})
			v := s.run()
			if v == nil {
				_, v = s.settle()
			}
			require.NotNil(t, v)
			told := s.tell(v)
			require.Contains(t, told, broken.want)
			way, _, _ := strings.Cut(told, "As a scenario")
			events := strings.Split(strings.TrimSpace(way), "\n")
			require.Contains(t, events[len(events)-1], broken.last)
			require.LessOrEqual(t, len(s.path(v.state)), 40, told)
		})
	}
}
