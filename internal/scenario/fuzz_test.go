package scenario

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
)

// long finds what a scenario may say and a fuzzer should not: many slots or
// repetitions, and times so long or steps so short that there is much to play.
var long = regexp.MustCompile(`[0-9]{3}|[0-9.]+(ns|us|µs|μs|ms|h)|[0-9]\.`)

// FuzzScenario: whatever a file says, it is read to the same end each time: all
// is well, or a Failure names a line that is there.
func FuzzScenario(f *testing.F) {
	files, err := filepath.Glob(filepath.Join(root, "testdata", "scenarios", "*.scn"))
	require.NoError(f, err)
	require.NotEmpty(f, files)
	for _, file := range files {
		source, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(string(source))
	}
	f.Add("config drive=manual max-in-flight=1 class=label lag=1s\nshape 1 w:2@a\nscript w-0 create hang*2 late=9s\npass\npass\nrelease w-0 create dead\nadvance 1m\nevent w-0 stage=Converged attempt=1 id=x\nexpect w-0 gone\n")
	f.Fuzz(func(t *testing.T, source string) {
		for line := range strings.Lines(source) {
			parse(t, strings.Fields(line))
		}
		if len(source) > 1000 || strings.Count(source, "\n") > 20 || long.MatchString(source) {
			return
		}
		first := Run("a file", source, Options{})
		second := Run("a file", source, Options{})
		if first == nil {
			require.NoError(t, second)
			return
		}
		require.EqualError(t, second, first.Error())
		failure, ok := errors.AsType[*Failure](first)
		require.True(t, ok, "%v", first)
		require.LessOrEqual(t, failure.Line, strings.Count(source, "\n")+1)
		require.NotEmpty(t, failure.Found)
	})
}

// parse reads a line that is not played. What is refused is refused with what
// was expected.
func parse(t *testing.T, words []string) {
	refusedWell := func(err error) bool {
		if err == nil {
			return false
		}
		m, ok := errors.AsType[*invariant.Mismatch](err)
		require.True(t, ok, "%v", err)
		require.NotEmpty(t, m.Expected)
		return true
	}
	_, err := parseConfig(words)
	refusedWell(err)
	_, err = parseShape(words)
	refusedWell(err)
	if slot, kind, rest, err := parseCall(words); !refusedWell(err) {
		require.Regexp(t, slotPattern, slot)
		require.True(t, operationWord(kind) == words[1])
		_, err = parseOutcomes(kind, rest)
		refusedWell(err)
	}
	for _, word := range words {
		if left, set, err := parseMoment(word); !refusedWell(err) {
			again, setAgain, err := parseMoment(momentWord(left, set))
			require.NoError(t, err)
			require.Equal(t, []any{left, set}, []any{again, setAgain})
		}
		outcomes, err := fakebackend.ParseOutcome(word)
		if err != nil {
			require.ErrorIs(t, err, fakebackend.ErrOutcome)
			continue
		}
		again, err := fakebackend.ParseOutcome(outcomes[0].String())
		require.NoError(t, err)
		require.Equal(t, outcomes[:1], again)
	}
}
