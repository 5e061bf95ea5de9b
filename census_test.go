package provisioning

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Whatever happens between the stretches of a census, it shows the moment of its
// beginning: nodes that change, that are reaped, restarted or born, and groups
// that come and go.
func TestProp_G1SnapshotShowsOneMoment(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		generation := uint64(1)
		shape := func() ClusterShape {
			s := ClusterShape{RunID: "r", Generation: generation}
			for _, id := range []NodeGroupID{"v", "w", "x"} {
				if n := rapid.SampledFrom([]int{-1, 0, 1, 3, 8}).Draw(t, "count"); n >= 0 {
					s.Groups = append(s.Groups, NodeGroupSpec{GroupID: id, Count: n,
						Shape: NodeShape{Image: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "image")}})
				}
			}
			return s
		}
		d, err := NewClusterDriver(shape(), Config{})
		require.NoError(t, err)
		d.census.stretch = 2
		x, err := NewExecutor(newHtBackend(), ExecutorConfig{Deliver: d.Deliver, Go: func(f func()) { f() }})
		require.NoError(t, err)
		live := func() {
			for range rapid.IntRange(0, 3).Draw(t, "passes") {
				_, err := d.DriveNext(now, x)
				require.NoError(t, err)
			}
			if rapid.Bool().Draw(t, "another wish") {
				generation++
				require.NoError(t, d.UpdateDesired(shape()))
			}
			if id := NewLogicalNodeID("w", rapid.IntRange(0, 3).Draw(t, "lost")); d.state.find(id) != nil {
				d.Deliver(Observation{Kind: NodeLost, Node: id, Attempt: d.state.find(id).attempt})
			}
			now = now.Add(time.Duration(rapid.IntRange(0, 2).Draw(t, "seconds")) * time.Second)
		}
		for range rapid.IntRange(1, 3).Draw(t, "censuses") {
			live()
			was := ftJSON(t, d.state.Clone())
			count := d.census.begin(d)
			for count.next(d) {
				live()
			}
			live()
			require.True(t, bytes.Equal([]byte(was), []byte(ftJSON(t, d.census.finish(d, count)))), "the snapshot is of another moment")
			require.Empty(t, d.census.saved)
		}
	})
}

// Snapshots from everywhere while passes run.
func TestSnapshotsWhilePassesRun(t *testing.T) {
	d, err := NewClusterDriver(shapeOf(1, groupOf("w", 3*censusStretch)), Config{})
	require.NoError(t, err)
	x, err := NewExecutor(newHtBackend(), ExecutorConfig{Deliver: d.Deliver, Go: func(f func()) { f() }})
	require.NoError(t, err)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					if err := d.Snapshot().Check(); err != nil {
						panic(fmt.Sprint(err))
					}
				}
			}
		})
	}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for generation, count := range []int{3 * censusStretch, 5, censusStretch + 1, 0} {
		require.NoError(t, d.UpdateDesired(shapeOf(uint64(generation+1), groupOf("w", count))))
		_, err := d.DriveUntilBlocked(now, x)
		require.NoError(t, err)
		require.Equal(t, count, d.Snapshot().Len())
	}
	close(stop)
	wg.Wait()
}
