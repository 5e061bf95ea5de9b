package atomicfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCreateHappensOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	const callers = 8
	var errs [callers]error
	var running sync.WaitGroup
	for i := range callers {
		running.Go(func() { errs[i] = Create(path, []byte{byte('0' + i)}) })
	}
	running.Wait()
	var first int
	winners := 0
	for i, err := range errs {
		if err == nil {
			first, winners = i, winners+1
			continue
		}
		require.ErrorIs(t, err, fs.ErrExist)
	}
	require.Equal(t, 1, winners)
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, []byte{byte('0' + first)}, content)
	onlyIn(t, path)
}

func TestWriteReplaces(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, value := range []string{"a", "b"} {
		require.NoError(t, WriteJSON(path, value))
		var got string
		require.NoError(t, ReadJSON(path, &got))
		require.Equal(t, value, got)
	}
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Zero(t, info.Mode().Perm()&0o077)
	onlyIn(t, path)
	require.Error(t, WriteJSON(path, func() {}))
	require.Error(t, Write(filepath.Join(path, "below"), nil))
	require.ErrorIs(t, ReadJSON(path+"x", new(string)), fs.ErrNotExist)
}

// onlyIn: no draft is left beside the file.
func onlyIn(t *testing.T, path string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 1)
}
