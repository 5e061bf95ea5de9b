package provisioning

import (
	"fmt"
	"strings"
	"time"
)

// OperationKind is one of the six things a backend can be asked to do.
type OperationKind uint8

// The operations, in the order in which a node meets them. NoOperation is the
// zero value: none pending, none remembered.
const (
	NoOperation OperationKind = iota
	CreateLease
	LookupEndpoint
	StartBootstrap
	BootstrapConvergenceObserved
	CancelBootstrap
	DestroyLease

	operationKinds
)

var operationNames = [...]string{"none", "CreateLease", "LookupEndpoint", "StartBootstrap",
	"BootstrapConvergenceObserved", "CancelBootstrap", "DestroyLease"}

func (k OperationKind) valid() bool { return k > NoOperation && k < operationKinds }

// String returns the name of the operation, "none" for NoOperation.
func (k OperationKind) String() string { return nameOf(operationNames[:], k) }

// MarshalText and UnmarshalText use the names of String.
func (k OperationKind) MarshalText() ([]byte, error) { return marshalName(operationNames[:], k) }

// UnmarshalText refuses an unknown name.
func (k *OperationKind) UnmarshalText(text []byte) error {
	return unmarshalName(operationNames[:], "operation", text, k)
}

// FailureClass says what a failure proves about the world. The decider treats
// all failures of a class alike.
type FailureClass uint8

// The classes. ClassNone is the zero value: the operation succeeded.
const (
	ClassNone       FailureClass = iota
	ClassDefinite                // it had no effect
	ClassAmbiguous               // it may or may not have happened
	ClassNotStarted              // it certainly never reached the provider
	ClassLeaseLost               // the resource is dead, gone, or its identity is spent

	failureClasses
)

var classNames = [...]string{"none", "Definite", "Ambiguous", "NotStarted", "LeaseLost"}

// String returns the name of the class, "none" for ClassNone.
func (c FailureClass) String() string { return nameOf(classNames[:], c) }

// MarshalText uses the names of String.
func (c FailureClass) MarshalText() ([]byte, error) { return marshalName(classNames[:], c) }

// UnmarshalText refuses an unknown name.
func (c *FailureClass) UnmarshalText(text []byte) error {
	return unmarshalName(classNames[:], "failure class", text, c)
}

// BootstrapStage is how far a bootstrap says it is. The decider looks only at
// whether it is a failure, converged or over; the rest is for people.
type BootstrapStage uint8

// The bootstrap stages; NoBootstrapStage is the zero value.
const (
	NoBootstrapStage BootstrapStage = iota
	BootstrapStageCreated
	BootstrapStageSSHConnecting
	BootstrapStageSSHReady
	BootstrapStageStdoutStreaming
	BootstrapStageBootChecking
	BootstrapStageSwactorStarting
	BootstrapStageWaitingForSwactorJoin
	BootstrapStageConverged
	BootstrapStageClosed
	BootstrapStageCancelled
	BootstrapStageSSHConnectFailed
	BootstrapStageBootCheckFailed
	BootstrapStageStartFailed
	BootstrapStageSwactorJoinFailed
	BootstrapStageStreamError

	bootstrapStages
)

var bootstrapStageNames = [...]string{"none", "Created", "SSHConnecting", "SSHReady", "StdoutStreaming", "BootChecking",
	"SwactorStarting", "WaitingForSwactorJoin", "Converged", "Closed", "Cancelled",
	"SSHConnectFailed", "BootCheckFailed", "StartFailed", "SwactorJoinFailed", "StreamError"}

// String returns the name of the stage, "none" for NoBootstrapStage.
func (s BootstrapStage) String() string { return nameOf(bootstrapStageNames[:], s) }

// MarshalText uses the names of String.
func (s BootstrapStage) MarshalText() ([]byte, error) { return marshalName(bootstrapStageNames[:], s) }

// UnmarshalText refuses an unknown name.
func (s *BootstrapStage) UnmarshalText(text []byte) error {
	return unmarshalName(bootstrapStageNames[:], "bootstrap stage", text, s)
}

// Failed reports whether the stage is one of the five failures.
func (s BootstrapStage) Failed() bool {
	return s >= BootstrapStageSSHConnectFailed && s <= BootstrapStageStreamError
}

// rank orders stages for "terminal stages never go back": 0 running, 1
// converged, 2 over.
func (s BootstrapStage) rank() int {
	switch {
	case s == BootstrapStageConverged:
		return 1
	case s > BootstrapStageConverged:
		return 2
	}
	return 0
}

// SSHEndpoint is where a machine answers. It is a fact about one attempt and
// never an identity: providers give the address of a dead machine to the next.
type SSHEndpoint struct {
	Host string `json:"host"`
	Port uint16 `json:"port"`
}

// String returns host:port, an IPv6 host in brackets.
func (e SSHEndpoint) String() string {
	if strings.Contains(e.Host, ":") {
		return fmt.Sprintf("[%s]:%d", e.Host, e.Port)
	}
	return fmt.Sprintf("%s:%d", e.Host, e.Port)
}

// Completion is the end of one operation. Class says whether it succeeded;
// a success carries what the operation found: Lease (and Endpoint if known)
// of CreateLease, Endpoint of LookupEndpoint (nil: not yet), Session of
// StartBootstrap. A CreateLease that is LeaseLost may carry the lease of the
// dead machine (B11).
type Completion struct {
	Operation  OperationID        `json:"operation"`
	Kind       OperationKind      `json:"kind"`
	Class      FailureClass       `json:"class,omitempty"`
	Message    string             `json:"message,omitempty"`
	RetryAfter time.Duration      `json:"retryAfter,omitempty"` // the least wait that was asked for
	Lease      ProviderLeaseID    `json:"lease,omitempty"`
	Endpoint   *SSHEndpoint       `json:"endpoint,omitempty"` // read-only once delivered
	Session    BootstrapSessionID `json:"session,omitempty"`
}

// judged returns c with a success that lacks its result, or a class that does
// not exist, turned into an Ambiguous failure: something happened, and nobody
// can say to what.
func (c Completion) judged() Completion {
	if c.Class >= failureClasses {
		c.Class = ClassAmbiguous
	}
	if c.Class != ClassNone {
		return c
	}
	switch {
	case c.Kind == CreateLease && c.Lease == "":
		c.Class, c.Message = ClassAmbiguous, "the success names no lease"
	case c.Kind == StartBootstrap && c.Session == "":
		c.Class, c.Message = ClassAmbiguous, "the success names no session"
	}
	return c
}

// ObservationKind says what an [Observation] reports.
type ObservationKind uint8

// The observations. The zero value is none of them and is refused.
const (
	_ ObservationKind = iota
	// OperationCompleted carries the Completion of a dispatched operation.
	OperationCompleted
	// BootstrapProgress carries Stage and the last line sequence numbers. A
	// failure stage means the same as BootstrapFailed, and the stages
	// Closed and Cancelled mean that the session is over.
	BootstrapProgress
	// SwactorJoined says that the agent Swactor joined the swarm.
	SwactorJoined
	// BootstrapFailed says that the bootstrap broke, and why.
	BootstrapFailed
	// BootstrapClosed says that the session ended in order. A cut connection
	// is a failure, not an end (B10).
	BootstrapClosed
	// NodeLost says that the machine is dead or gone. It needs no session.
	NodeLost
	// ReplaceRequested says that an operator wants another attempt in the
	// place of this one; see [ClusterDriver.Replace]. It needs no session.
	ReplaceRequested

	observationKinds
)

var observationNames = [...]string{"none", "OperationCompleted", "BootstrapProgress", "SwactorJoined", "BootstrapFailed",
	"BootstrapClosed", "NodeLost", "ReplaceRequested"}

// String returns the name of the observation.
func (k ObservationKind) String() string { return nameOf(observationNames[:], k) }

// MarshalText uses the names of String.
func (k ObservationKind) MarshalText() ([]byte, error) { return marshalName(observationNames[:], k) }

// UnmarshalText refuses an unknown name.
func (k *ObservationKind) UnmarshalText(text []byte) error {
	return unmarshalName(observationNames[:], "observation", text, k)
}

// Observation is one thing that was seen of one attempt: the end of an
// operation, something its bootstrap stream said, or what an operator wants. It is a plain value;
// which fields count depends on Kind. An observation decides nothing: it is
// folded into the observed state, and the next pass looks at that.
type Observation struct {
	Kind    ObservationKind    `json:"kind"`
	Node    LogicalNodeID      `json:"node"`
	Attempt NodeAttemptID      `json:"attempt"`
	Session BootstrapSessionID `json:"session,omitempty"` // of what a bootstrap reports, but for NodeLost

	Stage          BootstrapStage `json:"stage,omitempty"`          // BootstrapProgress
	StdoutSequence uint64         `json:"stdoutSequence,omitempty"` // BootstrapProgress
	StderrSequence uint64         `json:"stderrSequence,omitempty"` // BootstrapProgress
	Swactor        SwactorID      `json:"swactor,omitempty"`        // SwactorJoined
	Reason         string         `json:"reason,omitempty"`         // BootstrapFailed, NodeLost, ReplaceRequested

	Completion Completion `json:"completion,omitzero"` // OperationCompleted
}

func nameOf[T ~uint8](names []string, v T) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("unknown(%d)", v)
}

func marshalName[T ~uint8](names []string, v T) ([]byte, error) {
	if int(v) >= len(names) {
		return nil, fmt.Errorf("provisioning: no name for value %d", v)
	}
	return []byte(names[v]), nil
}

func unmarshalName[T ~uint8](names []string, what string, text []byte, v *T) error {
	for i, name := range names {
		if name == string(text) {
			*v = T(i)
			return nil
		}
	}
	return fmt.Errorf("provisioning: unknown %s %q", what, text)
}
