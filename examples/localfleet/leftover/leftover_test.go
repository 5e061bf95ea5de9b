//go:build linux

package leftover

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFindsWhatIsLeft(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	left := func() []string {
		found, err := awaitNothing(dir, 0)
		require.NoError(t, err)
		return found
	}
	require.Empty(t, left())
	require.NoError(t, os.Mkdir(filepath.Join(dir, "home"), 0o700))
	require.Equal(t, []string{filepath.Join(dir, "home")}, left())

	sleeper := exec.Command("sleep", "300")
	sleeper.Dir = filepath.Join(dir, "home")
	require.NoError(t, sleeper.Start())
	require.NoError(t, os.RemoveAll(sleeper.Dir))
	found := left()
	require.NoError(t, sleeper.Process.Kill())
	require.Error(t, sleeper.Wait())
	require.Len(t, found, 1)
	require.Contains(t, found[0], "whose cwd is "+sleeper.Dir)
	found, err = awaitNothing(dir, time.Minute)
	require.NoError(t, err)
	require.Empty(t, found)
}
