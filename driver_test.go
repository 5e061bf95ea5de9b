package provisioning

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/stretchr/testify/require"
)

var dtStart = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// dtExecutor is an executor by script: it runs nothing, answers as told and
// keeps what it was asked.
type dtExecutor struct {
	submit  func(Effect) (bool, error)   // nil: accept
	expire  func(OperationID) Completion // nil: of unknown outcome
	retire  func(NodeAttemptID)
	running []RunningCall

	submitted []Effect
	refusals  []error // of submitted
	expired   []OperationID
	retired   []NodeAttemptID
}

func (x *dtExecutor) Submit(e Effect) (bool, error) {
	var queued bool
	var err error
	if x.submit != nil {
		queued, err = x.submit(e)
	}
	x.submitted, x.refusals = append(x.submitted, e), append(x.refusals, err)
	return queued, err
}

func (x *dtExecutor) Expire(id OperationID) Completion {
	c := Completion{Operation: id, Class: ClassAmbiguous, Message: "no answer"}
	if x.expire != nil {
		c = x.expire(id)
	}
	x.expired = append(x.expired, id)
	return c
}

func (x *dtExecutor) Retire(attempt NodeAttemptID) {
	x.retired = append(x.retired, attempt)
	if x.retire != nil {
		x.retire(attempt)
	}
}

func (x *dtExecutor) Running() []RunningCall { return x.running }

func dtSession(attempt NodeAttemptID) BootstrapSessionID {
	return BootstrapSessionID(fmt.Sprintf("s-%d", attempt))
}

// dtSuccess is how the operation of e ends well.
func dtSuccess(e Effect) Completion {
	c := Completion{Operation: e.Operation, Kind: e.Kind}
	switch e.Kind {
	case CreateLease:
		c.Lease = ProviderLeaseID(fmt.Sprintf("l-%d", e.Operation.Attempt))
	case LookupEndpoint:
		c.Endpoint = &SSHEndpoint{Host: "10.0.0.1", Port: 22}
	case StartBootstrap:
		c.Session = dtSession(e.Operation.Attempt)
	}
	return c
}

func dtCompleted(e Effect, c Completion) Observation {
	return Observation{Kind: OperationCompleted, Node: e.Key.Node, Attempt: e.Operation.Attempt, Completion: c}
}

func dtGroup(id NodeGroupID, count int, image string) NodeGroupSpec {
	return NodeGroupSpec{GroupID: id, Count: count, Shape: NodeShape{Image: image}}
}

func dtShape(generation uint64, groups ...NodeGroupSpec) ClusterShape {
	return ClusterShape{RunID: "run", Generation: generation, Groups: groups}
}

func dtJSON(t require.TestingT, s *ClusterState) string {
	text, err := json.Marshal(s)
	require.NoError(t, err)
	return string(text)
}
