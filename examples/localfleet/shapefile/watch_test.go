//go:build linux

package shapefile

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Whatever stands where the file was, a look at it does not wait: it is made
// by the loop that also hears Ctrl-C.
func TestWatchWaitsForNobody(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	write(t, path, counting(1))
	w, _, err := Watch(path)
	require.NoError(t, err)
	for what, put := range map[string]func() error{
		"a directory":          func() error { return os.Mkdir(path, 0o700) },
		"a pipe without a pen": func() error { return unix.Mkfifo(path, 0o600) },
		"a terminal":           func() error { return os.Symlink("/dev/ptmx", path) },
		"a link to itself":     func() error { return os.Symlink(path, path) },
	} {
		require.NoError(t, os.Remove(path))
		require.NoError(t, put())
		looked := make(chan error, 1)
		go func() {
			_, _, err := w.Look()
			looked <- err
		}()
		select {
		case err := <-looked:
			require.Error(t, err, what)
			require.Equal(t, -1, look(t, w), "%s: said once", what)
		case <-time.After(time.Minute):
			require.Fail(t, "it waits for "+what)
		}
		_, err := Read(path)
		require.ErrorContains(t, err, path, what)
		write(t, path+".new", counting(1))
		require.NoError(t, os.RemoveAll(path))
		require.NoError(t, os.Rename(path+".new", path))
		require.Equal(t, -1, look(t, w))
		require.Equal(t, 1, look(t, w), "it is back")
	}
}
