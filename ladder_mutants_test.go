package provisioning

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/bits"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/internal/verify"
)

// The ladder is a table, and a table is easily changed by a slip: a rule lost,
// two of them in the wrong order, a condition turned round, an action of the
// neighbour. The tests of the rules have to notice each such slip. Whichever
// they do not notice must make no difference, and that is shown rather than
// believed: it decides alike in every world that the exhaustive search reaches.

var ladderMutant = flag.String("ladder-mutant", "", "run the tests with this mutant of the ladder, see ladder_mutants_test.go")

// lmNoticing are the tests that have to notice: those of what is decided, and
// not those of how the rules are numbered.
const lmNoticing = `^(TestRule_.*|TestLadderIsTotal)$`

func TestMain(m *testing.M) {
	flag.Parse()
	if *ladderMutant != "" {
		change, known := lmMutants()[*ladderMutant]
		if !known {
			fmt.Fprintf(os.Stderr, "there is no mutant %q\n", *ladderMutant)
			os.Exit(2)
		}
		exRelay(change)
	}
	os.Exit(m.Run())
}

// lmNever is a set of conditions that no slot has.
const lmNever = absent | deleting

// lmMutants returns every mutant by its name, as what changes the ladder into it.
func lmMutants() map[string]func() {
	mutants := make(map[string]func())
	for i := range ladder {
		r := &ladder[i]
		mutants[fmt.Sprintf("%v is dropped", r.Rule)] = func() { r.all = lmNever }
		mutants[fmt.Sprintf("%v backs off or not, the other way round", r.Rule)] = func() { r.backsOff = !r.backsOff }
		for c := r.all | r.none; c != 0; c &= c - 1 {
			bit := c & -c
			mutants[fmt.Sprintf("%v looks for the opposite of condition %d", r.Rule, bits.TrailingZeros32(uint32(bit)))] = func() {
				r.all, r.none = r.all^bit, r.none^bit
			}
			mutants[fmt.Sprintf("%v does not look for condition %d", r.Rule, bits.TrailingZeros32(uint32(bit)))] = func() {
				r.all, r.none = r.all&^bit, r.none&^bit
			}
		}
		for j := range i {
			other := &ladder[j]
			if j == i-1 {
				mutants[fmt.Sprintf("%v comes before %v", r.Rule, other.Rule)] = func() { *r, *other = *other, *r }
			}
			if r.action == other.action && r.operation == other.operation && (r.until == nil) == (other.until == nil) {
				continue // the same, or a wait for another deadline, see below
			}
			mutants[fmt.Sprintf("%v and %v do what the other does", r.Rule, other.Rule)] = func() {
				r.action, other.action = other.action, r.action
				r.operation, other.operation = other.operation, r.operation
				r.until, other.until = other.until, r.until
			}
		}
		for j := range ladder {
			if until := ladder[j].until; i != j && r.until != nil && until != nil {
				mutants[fmt.Sprintf("%v waits for the deadline of %v", r.Rule, ladder[j].Rule)] = func() { r.until = until }
			}
		}
	}
	return mutants
}

// lmEquivalent are the mutants that nobody can notice, and why.
var lmEquivalent = func() map[string]string {
	same := map[string]string{
		"R0 insert backs off or not, the other way round":          "a slot that is not in the state has no delay",
		"R13 lookup-endpoint does not look for condition 10":       "R12 has caught every slot without a lease",
		"R16 start-bootstrap does not look for condition 10":       "R12 has caught every slot without a lease",
		"R16 start-bootstrap does not look for condition 11":       "R13 has caught every leased slot without an endpoint",
		"R15 await-bootstrap comes before R14 observe-convergence": "they want different stages",
		"R16 start-bootstrap comes before R15 await-bootstrap":     "they want different stages",
	}
	for _, r := range ladder[ruleAwaitBackoff:] {
		same[fmt.Sprintf("%v backs off or not, the other way round", r.Rule)] = "R10 has caught every slot that backs off, or is what it gives way to"
	}
	return same
}()

// TestLadderMutants: every mutant of the ladder is noticed, or is known to make
// no difference.
func TestLadderMutants(t *testing.T) {
	if *ladderMutant != "" {
		t.Skip("this is one")
	}
	if exRace {
		t.Skip("one goroutine has no races")
	}
	require.NoError(t, lmTry(""), "the ladder itself")
	mutants := lmMutants()
	names := slices.Sorted(maps.Keys(mutants))
	var mu sync.Mutex
	var survivors []string
	var wait sync.WaitGroup
	open := make(chan string)
	for range 2 {
		wait.Go(func() {
			for name := range open {
				err := lmTry(name)
				var ended *exec.ExitError
				switch {
				case err == nil:
					mu.Lock()
					survivors = append(survivors, name)
					mu.Unlock()
				case !errors.As(err, &ended):
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
	for _, name := range names {
		open <- name
	}
	close(open)
	wait.Wait()
	slices.Sort(survivors)
	for _, name := range survivors {
		if lmEquivalent[name] == "" {
			t.Errorf("nobody notices that %s", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(lmEquivalent)) {
		require.Contains(t, survivors, name, "it is listed as equivalent, and is noticed or not there")
	}
	worlds := lmWorlds(t)
	for _, name := range survivors {
		if difference := worlds.difference(mutants[name]); difference != "" {
			t.Errorf("%s: it makes a difference: %s", name, difference)
		}
	}
	for i := 1; i < ruleUnmatched; i++ { // or the comparison finds none; without R0 deciding panics
		name := fmt.Sprintf("%v is dropped", ladder[i].Rule)
		require.NotEmpty(t, worlds.difference(mutants[name]), name)
	}
	verify.AtLeast(t, "mutants of the ladder", len(mutants), 200)
	verify.Exactly(t, "of which noticed", len(mutants)-len(survivors), len(mutants)-len(lmEquivalent))
	verify.Exactly(t, "of which equivalent in every world", len(survivors), len(lmEquivalent))
	verify.AtLeast(t, "worlds", len(worlds.codes), verify.Target(400_000, 20_000))
}

// lmTry runs the tests that have to notice with a mutant.
func lmTry(name string) error {
	return exec.Command(os.Args[0], "-test.run="+lmNoticing, "-test.failfast", "-ladder-mutant="+name).Run()
}

// lmSearch is a search to compare ladders in.
type lmSearch struct{ *exSearch }

func lmWorlds(t *testing.T) lmSearch {
	faults := uint8(1)
	if verify.Full() {
		faults = exShortFaults
	}
	s := exNewSearch(exModel{class: exToken, slots: 1, maxFaults: faults, maxHeld: exRoom})
	if v := s.run(); v != nil {
		t.Fatal(s.tell(v))
	}
	return lmSearch{s}
}

// lmVerdict is all that a decision says.
type lmVerdict struct {
	rule      int
	action    ActionKind
	operation OperationKind
	until     instant
	fault     error
}

// verdict decides with the ladder as it is.
func (s *lmSearch) verdict(w *exWorld) lmVerdict {
	n := w.slots[0].node
	if !n.there && w.count == 0 {
		return lmVerdict{} // no slot
	}
	var real *node
	if n.there {
		real = n.real(0)
	}
	d := decide(real, exIf(w.count > 0, exTemplates[0]), exAt)
	v := lmVerdict{rule: d.Number, action: d.action, operation: d.operation, fault: d.fault}
	if d.until != nil && real != nil {
		v.until = d.until(real)
	}
	return v
}

// difference tells a world in which the ladder decides otherwise once it is
// changed.
func (s *lmSearch) difference(change func()) string {
	whole := ladder
	back := func() { exRelay(func() { ladder = whole }) }
	defer back()
	verdicts := make([]lmVerdict, len(s.codes))
	for i, code := range s.codes {
		w := code.decode(s.slots)
		verdicts[i] = s.verdict(&w)
	}
	exRelay(change)
	for i, code := range s.codes {
		w := code.decode(s.slots)
		if would := s.verdict(&w); would != verdicts[i] {
			back()
			return fmt.Sprintf("%+v and not %+v in %s, after %d events", would, verdicts[i], s.outline(&w), len(s.path(uint32(i))))
		}
	}
	return ""
}
