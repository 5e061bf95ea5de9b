package provisioning

import (
	"encoding/json"
	"math"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The fuzz targets for what comes from outside as bytes. FuzzShapeValidate and
// FuzzName stand beside what they are about. What has once broken one of them is
// kept under testdata/fuzz.

// FuzzShapeJSON: whatever a document says, it is refused by name or it is a
// shape that comes back the same from what it is written as.
func FuzzShapeJSON(f *testing.F) {
	up := 1.5
	whole := shapeOf(3, groupOf("w", 2), NodeGroupSpec{RunID: "r", GroupID: "x", Count: 1, Role: "worker", Provider: "p",
		Shape: NodeShape{Image: "i", DiskGB: 10, GPUName: "g", MinUpMbps: &up, RequireVerified: true, ProviderLabels: map[string]string{"a": "b"}},
		Boot:  BootSpec{SSHUser: "u", VerifyCommands: []string{"true"}, Env: map[string]string{"k": "\xff"}, Args: []string{""}, Mounts: []Mount{{Source: "/a", Target: "/b"}}},
	})
	text, err := json.Marshal(whole)
	require.NoError(f, err)
	f.Add(text)
	f.Add([]byte(`{"runId":"r","generation":18446744073709551615,"groups":[]}`))
	f.Add([]byte(`{"runId":"r","generation":1,"groups":[{"groupId":"w","count":-1},{"groupId":"w","count":9223372036854775807},{"groupId":"a/b","shape":{"diskGB":-5}}]}`))
	f.Add([]byte(`{"runId":"\u0000b64:/w==","generation":1,"groups":[{"groupId":"w","count":1,"shape":{"minUpMbps":-0.0,"image":"\ufffd"}}]}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var shape ClusterShape
		if json.Unmarshal(data, &shape) != nil {
			return
		}
		desired, err := Expand(shape)
		require.Equal(t, err, shape.Validate())
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidShape)
			require.True(t, strings.HasPrefix(err.Error(), "provisioning: "))
			return
		}
		slots := 0
		for _, g := range shape.Groups {
			slots += g.Count
		}
		require.Equal(t, slots, desired.Len())
		again, err := json.Marshal(shape)
		require.NoError(t, err)
		back, err := readShape(again)
		require.NoError(t, err)
		require.Equal(t, shape.Groups == nil, back.Groups == nil)
		_, err = desired.succeed(back, DefaultMaxNodes)
		require.NoError(t, err, "what was written is another content")
		exact, err := readShape(shapeText(shape))
		require.NoError(t, err)
		_, err = desired.succeed(exact, DefaultMaxNodes)
		require.NoError(t, err, "the journal's text is another content")
	})
}

// farIndex finds an index for which a state makes much room, lawfully.
var farIndex = regexp.MustCompile(`(?i)"index"\s*:\s*[0-9]{5}`)

// FuzzStateJSON: whatever a document says, it is refused by name and changes
// nothing, or it is a state that passes Check, comes back the same from what it
// is written as, and that a driver goes on from to states that pass it too.
func FuzzStateJSON(f *testing.F) {
	add := func(nodes ...ManagedNode) {
		state := ftState(f, nodes...)
		require.NoError(f, state.Check())
		f.Add([]byte(ftJSON(f, state)))
	}
	add()
	add(ftNode(ftReady), ftMove(ftNode(ftReady, ftPending(BootstrapConvergenceObserved)), "w", 10, 8), ftMove(ftNode(ftRequested, ftPending(CreateLease)), "w-1", 0, 9))
	add(ftNode(ftLeased, ftBackingOff(time.Second)), ftMove(ftNode(ftReachable, ftPending(StartBootstrap)), "w", 1, 8))
	add(ftNode(ftJoined, ftFailed), ftMove(ftNode(ftRunning, ftDeleting), "w", 1, 8), ftMove(ftNode(ftFailed, ftDestroyed), "w", 2, 9))
	add(ftStarting(func(m *ManagedNode) {
		m.Held = []Observation{ftJoins("agent"), ftProgress(BootstrapStageConverged, 1, 2)}
	}))
	add(ftNode(ftRequested, ftAmbiguous(CreateLease), ftDeleting))
	f.Add([]byte(`{"schema":1,"observedGeneration":18446744073709551615,"nextAttemptId":18446744073709551615,"nodes":null}`))
	f.Add([]byte(`{"schema":2}`))
	wish := shapeOf(math.MaxUint64-1, groupOf("w", 2), groupOf("x", 1))
	f.Fuzz(func(t *testing.T, data []byte) {
		if farIndex.Match(data) {
			return
		}
		state := ftState(t, ftNode(ftReady))
		before := ftJSON(t, state)
		if err := state.UnmarshalJSON(data); err != nil {
			require.ErrorIs(t, err, ErrInvalidState)
			require.Equal(t, before, ftJSON(t, state))
			return
		}
		require.NoError(t, state.Check())
		text := ftJSON(t, state)
		var again ClusterState
		require.NoError(t, again.UnmarshalJSON([]byte(text)))
		require.Equal(t, text, ftJSON(t, &again))

		plan := Decide(state, mustExpand(t, wish), ftNow)
		require.Equal(t, text, ftJSON(t, state), "only read")
		driver, err := newDriverFrom(&again, wish, Config{})
		require.NoError(t, err)
		require.Equal(t, len(plan.Faults), len(driver.Plan(ftNow).Faults))
		for _, now := range []time.Time{ftNow, ftNow, ftAfter(time.Hour), ftAfter(100 * time.Hour)} {
			_, err = driver.DriveNext(now, fuzzExecutor{})
			require.NoError(t, err)
			require.NoError(t, driver.Snapshot().Check(), "after a pass at %v from\n%s", now, text)
			driver.Trigger()
		}
	})
}

// fuzzExecutor accepts what a fuzzed state leads to, and ends nothing well.
type fuzzExecutor struct{}

func (fuzzExecutor) Submit(Effect) (bool, error) { return false, nil }
func (fuzzExecutor) Expire(id OperationID) Completion {
	return Completion{Operation: id, Class: ClassAmbiguous}
}
func (fuzzExecutor) Retire(NodeAttemptID)   {}
func (fuzzExecutor) Running() []RunningCall { return nil }

// FuzzKeyInjective moves the borders between the fields of a key: two keys that
// differ have no text in common, however alike the bytes of their fields are.
func FuzzKeyInjective(f *testing.F) {
	f.Add("run", "w-0", "disk", uint64(1), uint64(1), 1, 1)
	f.Add("", "", "", uint64(0), uint64(0), 0, 0)
	f.Add("a\x00\x00\x00\x00\x00\x00\x00\x01", "b", "key", uint64(1), uint64(1)<<56, 1, 9)
	f.Add("extra", "key", "run", uint64(math.MaxUint64), uint64(0), 5, 3)
	f.Fuzz(func(t *testing.T, run, node, purpose string, attempt, other uint64, first, second int) {
		key := ExternalKey{Run: RunID(run), Node: LogicalNodeID(node), Attempt: NodeAttemptID(attempt)}
		fields := purpose + run + node
		cut := func(n int) int { return int(uint(n) % uint(len(fields)+1)) }
		from, to := min(cut(first), cut(second)), max(cut(first), cut(second))
		moved := ExternalKey{Run: RunID(fields[from:to]), Node: LogicalNodeID(fields[to:]), Attempt: NodeAttemptID(other)}
		movedPurpose := fields[:from]

		same := key == moved
		require.Equal(t, same, key.Token() == moved.Token())
		require.Equal(t, same, key.UUID() == moved.UUID())
		require.Equal(t, same, key.Name(63) == moved.Name(63))
		require.Equal(t, same && purpose == movedPurpose, key.TokenFor(purpose) == moved.TokenFor(movedPurpose))
		require.Equal(t, run == string(moved.Run), RunToken(key.Run) == RunToken(moved.Run))
		kinds := map[string]bool{key.Token(): true, key.TokenFor(purpose): true, key.TokenFor(""): true, RunToken(key.Run): true}
		require.Len(t, kinds, 3+min(len(purpose), 1), "a token of one kind is that of another")
	})
}
