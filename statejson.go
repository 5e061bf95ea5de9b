package provisioning

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
)

// WriteJSON writes what MarshalJSON returns, node by node, so that a large state
// is never in memory as text. The error is the writer's.
func (s *ClusterState) WriteJSON(w io.Writer) error {
	out := bufio.NewWriter(w)
	fmt.Fprintf(out, `{"schema":%d,"observedGeneration":%d,"nextAttemptId":%d,"nodes":[`,
		stateSchema, s.ObservedGeneration, s.NextAttemptID) // a bufio.Writer keeps its first error for Flush
	separator := ""
	for n := range s.All() {
		text, err := json.Marshal(n)
		if err != nil {
			return fmt.Errorf("provisioning: %s: %w", n.Record.Node, err)
		}
		out.WriteString(separator)
		out.Write(text)
		separator = ","
	}
	out.WriteString("]}")
	return out.Flush()
}
