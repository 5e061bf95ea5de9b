package provisioning_test

import (
	"fmt"
	"testing"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/scenario"
	"github.com/swactor/provisioning/internal/verify"
)

// TestExhaustiveWaysAreReal plays ways that the exhaustive search has found with
// the shipping executor over the fake provider. They lead to the same nodes: the
// provider and the executor that the search has modelled are those that there
// are.
func TestExhaustiveWaysAreReal(t *testing.T) {
	faults, n := uint8(1), 100
	if verify.Full() {
		faults, n = 2, 900
	}
	played := 0
	for i, text := range provisioning.ExhaustiveScenarios(faults, n) {
		if err := scenario.Run(fmt.Sprintf("way %d", i), text, scenario.Options{}); err != nil {
			t.Fatalf("%v\nin\n%s", err, text)
		}
		played++
	}
	verify.AtLeast(t, "ways played with the executor and the fake", played, verify.Target(900, 100))
}
