package runs

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

func TestRunsAreOnRecord(t *testing.T) {
	d := Dir(filepath.Join(t.TempDir(), "d"))
	records, err := d.List()
	require.NoError(t, err)
	require.Empty(t, records)
	lock, err := d.Lock() // makes the directory
	require.NoError(t, err)
	first, err := d.Begin()
	require.NoError(t, err)
	second, err := d.Begin()
	require.NoError(t, err)
	require.NotEqual(t, first.Run, second.Run)
	require.Regexp(t, regexp.MustCompile(`^fleet-[a-z2-7]{10}$`), first.Run)
	require.Equal(t, provisioning.RunToken(first.Run), first.Token)
	require.WithinDuration(t, time.Now(), first.BeganAt, time.Minute)

	second.Inventory, second.Places = "/etc/hosts.yaml", map[string]string{"rack1": "192.0.2.1"}
	require.NoError(t, d.Write(second))

	// A draft of a record that was cut off is none.
	require.NoError(t, os.WriteFile(filepath.Join(d.runs(), ".x.json.123"), nil, 0o600))
	records, err = d.List()
	require.NoError(t, err)
	require.Equal(t, []Record{first, second}, records)
	require.NoError(t, d.Forget(first.Run))
	require.NoError(t, d.Forget(first.Run), "again")
	records, err = d.List()
	require.NoError(t, err)
	require.Equal(t, []Record{second}, records)

	// One that cannot be read is told of: it may have machines.
	require.NoError(t, os.WriteFile(d.record("broken"), []byte("{"), 0o600))
	_, err = d.List()
	require.ErrorContains(t, err, "record of a run: broken.json: ")
	require.NoError(t, lock.Close())
}

func TestLockIsForOne(t *testing.T) {
	d := Dir(t.TempDir())
	lock, err := d.Lock()
	require.NoError(t, err)
	_, err = d.Lock()
	require.ErrorIs(t, err, ErrLocked)
	require.ErrorContains(t, err, string(d))
	require.NoError(t, lock.Close())
	lock, err = d.Lock()
	require.NoError(t, err)
	require.NoError(t, lock.Close())
}
