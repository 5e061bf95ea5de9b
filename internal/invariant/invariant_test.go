package invariant_test

import (
	"errors"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
	"github.com/swactor/provisioning/internal/invariant"
)

// Only what a provider by label made late by itself may be a second machine.
func TestTwoMachines(t *testing.T) {
	machine := func(attempt provisioning.NodeAttemptID, late bool) fakebackend.Machine {
		return fakebackend.Machine{Key: provisioning.ExternalKey{Run: "run", Node: "w-0", Attempt: attempt}, Late: late}
	}
	for _, class := range []fakebackend.Class{fakebackend.Token, fakebackend.Name, fakebackend.Label} {
		require.NoError(t, invariant.Machines(class, []fakebackend.Machine{machine(1, true)}))
		require.Error(t, invariant.Machines(class, []fakebackend.Machine{machine(1, false), machine(2, false)}))
		err := invariant.Machines(class, []fakebackend.Machine{machine(1, true), machine(1, false)})
		if class == fakebackend.Label {
			require.NoError(t, err)
		} else {
			require.Error(t, err)
		}
	}
}

// A plan may leave dispatches over where there is a limit, and nothing else.
func TestPlanUnderALimit(t *testing.T) {
	plan := provisioning.Plan{Actions: []provisioning.Action{{Node: "w-0", Kind: provisioning.Dispatch}}}
	require.NoError(t, invariant.NothingLeft(plan, 1))
	require.Error(t, invariant.NothingLeft(plan, 0))
	plan.Actions[0].Kind = provisioning.Reap
	require.Error(t, invariant.NothingLeft(plan, 1))
}

// A fault is something left to do, whatever the limit.
func TestFaultsAreLeft(t *testing.T) {
	err := invariant.NothingLeft(provisioning.Plan{Faults: []provisioning.Fault{{Node: "w-0", Err: errors.New("broken")}}}, 1)
	require.ErrorContains(t, err, "a fault of w-0: broken")
}

func TestGoroutinesThatEndAreAwaited(t *testing.T) {
	before := runtime.NumGoroutine()
	end := make(chan struct{})
	go func() { <-end }()
	close(end)
	require.NoError(t, invariant.AwaitGoroutines(before))
}
