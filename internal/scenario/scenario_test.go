package scenario

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var directory = flag.String("scenarios", "", "directory of the *.scn files to run instead of testdata/scenarios, "+
	"absolute or relative to the root of the module")

const root = "../.."

func scenarioFiles(t *testing.T) []string {
	t.Helper()
	dir := *directory
	if dir == "" {
		dir = filepath.Join(root, "testdata", "scenarios")
	} else if _, err := os.Stat(dir); err != nil && !filepath.IsAbs(dir) {
		dir = filepath.Join(root, dir) // a test runs in the directory of its package
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.scn"))
	require.NoError(t, err)
	require.NotEmpty(t, files, "no *.scn in %s", dir)
	return files
}

func runAll(t *testing.T, options Options) {
	for _, file := range scenarioFiles(t) {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".scn"), func(t *testing.T) {
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			if err := Run(filepath.Base(file), string(source), options); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestScenario(t *testing.T) { runAll(t, Options{}) }

// G1: whatever is ready at an instant may run in any order.
func TestScenarioNewestFirst(t *testing.T) { runAll(t, Options{NewestFirst: true}) }
