package provisioning

import (
	"encoding/binary"
	"hash/maphash"
	"time"
)

// Effect is one operation to run: what the driver recorded as pending, with
// everything a backend needs for it. It is a plain value and says all its
// inputs, so that the same OperationID can be told from one used twice.
type Effect struct {
	Operation OperationID
	Kind      OperationKind
	Key       ExternalKey
	// The facts of the attempt at dispatch; which are set depends on Kind.
	Lease    ProviderLeaseID
	Endpoint *SSHEndpoint
	Session  BootstrapSessionID
	Swactor  SwactorID
	// Of creates and destroys, see [CreateLeaseRequest].
	AdoptOnly    bool
	CreatesSent  uint32
	LastCreateAt time.Time
	// DispatchedAt and Deadline are in the driver's clock. At Deadline the
	// driver asks for the effect to be expired; the executor has no timer.
	DispatchedAt time.Time
	Deadline     time.Time

	template *template
	index    int
}

// NewEffect returns an effect on the slot of spec, for tests of executors.
// The driver makes its own.
func NewEffect(op OperationID, kind OperationKind, key ExternalKey, spec LogicalNodeSpec) Effect {
	return Effect{Operation: op, Kind: kind, Key: key, template: spec.template(), index: spec.Index}
}

// Spec returns the template of the attempt. Slices and maps are shared.
func (e Effect) Spec() LogicalNodeSpec { return e.spec() }

func (e *Effect) spec() LogicalNodeSpec {
	if e.template == nil {
		return LogicalNodeSpec{Node: e.Key.Node}
	}
	return e.template.named(e.index, e.Key.Node)
}

// Equal reports whether two effects ask for the same in every input.
func (e Effect) Equal(other Effect) bool {
	endpoints := e.Endpoint == other.Endpoint ||
		e.Endpoint != nil && other.Endpoint != nil && *e.Endpoint == *other.Endpoint
	return endpoints && sameTemplate(e.template, other.template) && e.index == other.index &&
		e.Operation == other.Operation && e.Kind == other.Kind && e.Key == other.Key &&
		e.Lease == other.Lease && e.Session == other.Session && e.Swactor == other.Swactor &&
		e.AdoptOnly == other.AdoptOnly && e.CreatesSent == other.CreatesSent &&
		e.LastCreateAt.Equal(other.LastCreateAt) && e.DispatchedAt.Equal(other.DispatchedAt) && e.Deadline.Equal(other.Deadline)
}

// fingerprint is a hash of every input that Equal compares.
func (e *Effect) fingerprint(seed maphash.Seed) uint64 {
	room := [320]byte{}
	b := room[:0]
	number := func(n uint64) { b = binary.LittleEndian.AppendUint64(b, n) }
	text := func(s string) {
		number(uint64(len(s)))
		b = append(b, s...)
	}
	moment := func(t time.Time) {
		number(uint64(t.Unix()))
		number(uint64(t.Nanosecond()))
	}
	number(uint64(e.Operation.Attempt))
	number(e.Operation.Sequence)
	number(uint64(e.Kind))
	text(string(e.Key.Run))
	text(string(e.Key.Node))
	number(uint64(e.Key.Attempt))
	text(string(e.Lease))
	if e.Endpoint != nil {
		text(e.Endpoint.Host)
		number(uint64(e.Endpoint.Port))
	}
	text(string(e.Session))
	text(string(e.Swactor))
	number(uint64(e.CreatesSent))
	moment(e.LastCreateAt)
	moment(e.DispatchedAt)
	moment(e.Deadline)
	number(uint64(e.index))
	if e.template != nil {
		b = append(b, e.template.digest[:]...)
	}
	// These say what is in front of them, which therefore is nothing else too.
	b = append(b, bitOf(e.AdoptOnly), bitOf(e.Endpoint != nil), bitOf(e.template != nil))
	return maphash.Bytes(seed, b)
}

func bitOf(is bool) byte {
	if is {
		return 1
	}
	return 0
}

// EffectExecutor runs effects. [Executor] is the one this package ships; a
// test may bring its own. The driver calls it from the goroutine of the pass
// only and holds no lock meanwhile.
type EffectExecutor interface {
	// Submit starts an effect, or queues it behind a call of its own attempt
	// that has not returned (queued). It does not wait for the outcome,
	// which is delivered as an OperationCompleted observation, at the
	// earliest from within Submit. After an error the effect never runs.
	Submit(effect Effect) (queued bool, err error)
	// Expire ends an operation whose deadline is due and says how it ended:
	// its result if it had completed; Ambiguous if it was running or is
	// unknown; NotStarted if it was still queued. A result that comes later
	// is discarded.
	Expire(id OperationID) Completion
	// Retire says that an attempt is over. What it still asks for is refused
	// from now on.
	Retire(attempt NodeAttemptID)
	// Running lists the calls that have not returned, in the order of their
	// operations.
	Running() []RunningCall
}

// RunningCall is a backend call that has not returned.
type RunningCall struct {
	Operation OperationID   `json:"operation"`
	Kind      OperationKind `json:"kind"`
	Node      LogicalNodeID `json:"node"`
	// Since is when the effect was dispatched, in the driver's clock.
	Since time.Time `json:"since"`
	// Expired: the call has outlived its deadline; its answer will not count.
	Expired bool `json:"expired"`
}
