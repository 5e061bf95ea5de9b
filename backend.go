package provisioning

import (
	"context"
	"errors"
	"time"
)

// EffectBackend is what a user implements: six calls to a provider and to the
// bootstrap of its machines. The [Executor] calls it from its own goroutines,
// for different attempts at the same time and never twice at the same time
// for one attempt.
//
// The rules, to which fakebackend.Check holds a backend:
//
//   - B1. Key everything on the request's [ExternalKey]. CreateLease and
//     StartBootstrap adopt what already exists for that key before they make
//     anything.
//   - B2. Every input of a create is fixed by the attempt: a retry may not
//     choose another zone or offer.
//   - B3. Give no final answer (nothing there, Definite, LeaseLost; for
//     DestroyLease: nil) while an earlier create of this key can still take
//     effect or is not yet visible. That lasts for the settle time (longest
//     landing time plus list lag) from LastCreateAt; until then answer
//     RetryAfter(Ambiguous(err), settle). For AdoptOnly and DestroyLease the
//     rest of it is enough. DestroyLease destroys what is there all the same.
//   - B4. AdoptOnly is set on a CreateLease whose node is being deleted: adopt
//     what is found, and answer [ErrNothingToAdopt] only when no earlier
//     create of this key can still take effect. Where that is uncertain, a
//     provider with request tokens is sent the create again under the same
//     token (it gives the same machine); any other answers Ambiguous.
//   - B5. CancelBootstrap and DestroyLease of something absent succeed. An
//     unknown session is absent.
//   - B6. DestroyLease returns nil only once the machine and its side
//     resources are gone or irrevocably going, and it ends any session of the
//     attempt. "Accepted" is not gone.
//   - B7. Honour ctx: it is cancelled at the operation's deadline and on
//     shutdown.
//   - B8. Match exactly: one attempt never adopts what belongs to another. Of
//     several matches keep the lowest id and destroy the rest.
//   - B9. No secrets in tokens, names or labels.
//   - B10. Report a join before the close of its session. "Closed" means an
//     orderly end; a cut connection is a failure.
//   - B11. A LeaseLost of CreateLease may carry the lease of the dead machine
//     ([LeaseLostWith]), which is then recorded and destroyed. Without one it
//     promises that nothing billable is left.
//
// What a backend hashes or sends under a token leaves out AdoptOnly, the
// OperationID and all times: a provider refuses a token that comes back with
// other parameters.
//
// How an error is read: see [Classify].
type EffectBackend interface {
	// CreateLease rents the machine of this key, or adopts it.
	CreateLease(ctx context.Context, req CreateLeaseRequest) (CreateLeaseResult, error)
	// LookupEndpoint says where the machine answers; nil means not yet.
	LookupEndpoint(ctx context.Context, req LookupEndpointRequest) (LookupEndpointResult, error)
	// StartBootstrap begins to turn the machine into a node, or adopts a
	// bootstrap that runs, and returns without waiting for the join. What
	// happens then is reported through the request's Sink.
	StartBootstrap(ctx context.Context, req StartBootstrapRequest) (StartBootstrapResult, error)
	// BootstrapConvergenceObserved tells the bootstrap that its node has
	// joined, so that it may close the session. It may come more than once.
	BootstrapConvergenceObserved(ctx context.Context, req BootstrapConvergenceObservedRequest) error
	// CancelBootstrap ends a session.
	CancelBootstrap(ctx context.Context, req CancelBootstrapRequest) error
	// DestroyLease gives the machine back.
	DestroyLease(ctx context.Context, req DestroyLeaseRequest) error
}

// GroupValidator is what an [EffectBackend] may implement beside its six
// methods, to have a wish refused that it could never fulfil: a provider it
// does not know, an image of a form it cannot take.
type GroupValidator interface {
	// ValidateGroup returns what is wrong with a group, or nothing. Of a
	// fault only Field and Problem count, the caller knows the rest. The
	// faults join those that the library finds, in one [*ShapeError], and
	// nothing changes: neither is the wish accepted nor is a host made.
	//
	// It is called on the goroutine that offers the shape, which need not be
	// valid otherwise, and must not take long: no call to the provider. The
	// same group gets the same answer. Drain is never put to it.
	ValidateGroup(group NodeGroupSpec) []ShapeFault
}

// CreateLeaseRequest asks for the machine of one attempt.
type CreateLeaseRequest struct {
	Key       ExternalKey
	Operation OperationID
	Spec      LogicalNodeSpec
	// AdoptOnly: buy nothing, only find what an earlier call made (B4).
	AdoptOnly bool
	// CreatesSent counts the creates of this attempt dispatched before this
	// one, AdoptOnly ones not counted. A dispatch that was then refused
	// counts too, so it may be too high and is never too low.
	CreatesSent uint32
	// LastCreateAt is when the last of those may have reached the provider,
	// zero when there was none. It is in the clock of Now.
	LastCreateAt time.Time
	// Now is the instant of the dispatch in the driver's clock, which never
	// goes back. Compare it with LastCreateAt, not with time.Now.
	Now time.Time
}

// CreateLeaseResult names the machine. Endpoint may be nil.
type CreateLeaseResult struct {
	Lease    ProviderLeaseID
	Endpoint *SSHEndpoint
}

// LookupEndpointRequest asks where a machine answers.
type LookupEndpointRequest struct {
	Key       ExternalKey
	Operation OperationID
	Spec      LogicalNodeSpec
	Lease     ProviderLeaseID
}

// LookupEndpointResult is nil while there is no endpoint yet; that is no error.
type LookupEndpointResult struct{ Endpoint *SSHEndpoint }

// StartBootstrapRequest asks for the bootstrap of a machine.
type StartBootstrapRequest struct {
	Key       ExternalKey
	Operation OperationID
	Spec      LogicalNodeSpec
	Lease     ProviderLeaseID
	Endpoint  SSHEndpoint
	// Sink takes what the bootstrap reports, from any goroutine, at any
	// time, also before StartBootstrap has returned.
	Sink BootstrapSink
}

// StartBootstrapResult names the session.
type StartBootstrapResult struct{ Session BootstrapSessionID }

// BootstrapConvergenceObservedRequest says that the node has joined.
type BootstrapConvergenceObservedRequest struct {
	Key       ExternalKey
	Operation OperationID
	Spec      LogicalNodeSpec
	Lease     ProviderLeaseID
	Endpoint  SSHEndpoint
	Session   BootstrapSessionID
	Swactor   SwactorID
}

// CancelBootstrapRequest asks for the end of a session.
type CancelBootstrapRequest struct {
	Key       ExternalKey
	Operation OperationID
	Spec      LogicalNodeSpec
	Lease     ProviderLeaseID
	Endpoint  *SSHEndpoint
	Session   BootstrapSessionID
}

// DestroyLeaseRequest gives a machine back. CreatesSent, LastCreateAt and Now
// are those of [CreateLeaseRequest].
type DestroyLeaseRequest struct {
	Key          ExternalKey
	Operation    OperationID
	Spec         LogicalNodeSpec
	Lease        ProviderLeaseID
	CreatesSent  uint32
	LastCreateAt time.Time
	Now          time.Time
}

// BootstrapSink reports what the bootstrap of one attempt says. It is a small
// value, safe for concurrent use and never blocks; a copy may be kept for as
// long as the bootstrap lives. What comes late, twice or from an attempt that
// is over is sorted out by the driver. The zero sink drops everything.
type BootstrapSink struct {
	node    LogicalNodeID
	attempt NodeAttemptID
	deliver func(Observation)
}

// NewBootstrapSink returns a sink that hands observations of one attempt to
// deliver. The executor makes one for every StartBootstrap; tests of a backend
// make their own.
func NewBootstrapSink(node LogicalNodeID, attempt NodeAttemptID, deliver func(Observation)) BootstrapSink {
	return BootstrapSink{node: node, attempt: attempt, deliver: deliver}
}

// Progress reports a stage and the numbers of the last lines read from stdout
// and stderr.
func (s BootstrapSink) Progress(session BootstrapSessionID, stage BootstrapStage, stdout, stderr uint64) {
	s.report(Observation{Kind: BootstrapProgress, Session: session, Stage: stage, StdoutSequence: stdout, StderrSequence: stderr})
}

// Joined reports that the agent joined the swarm.
func (s BootstrapSink) Joined(session BootstrapSessionID, swactor SwactorID) {
	s.report(Observation{Kind: SwactorJoined, Session: session, Swactor: swactor})
}

// Failed reports that the bootstrap broke.
func (s BootstrapSink) Failed(session BootstrapSessionID, reason string) {
	s.report(Observation{Kind: BootstrapFailed, Session: session, Reason: reason})
}

// Closed reports the orderly end of the session (B10).
func (s BootstrapSink) Closed(session BootstrapSessionID) {
	s.report(Observation{Kind: BootstrapClosed, Session: session})
}

// NodeLost reports that the machine is dead or gone.
func (s BootstrapSink) NodeLost(reason string) {
	s.report(Observation{Kind: NodeLost, Reason: reason})
}

func (s BootstrapSink) report(o Observation) {
	if s.deliver == nil {
		return
	}
	o.Node, o.Attempt = s.node, s.attempt
	s.deliver(o)
}

// Sentinels of the failure classes, for errors.Is. Returning one, bare or
// wrapped, names its class as well as the constructor does.
var (
	ErrDefinite   error = &classError{class: ClassDefinite, err: errors.New("provisioning: definite failure")}
	ErrAmbiguous  error = &classError{class: ClassAmbiguous, err: errors.New("provisioning: outcome unknown")}
	ErrNotStarted error = &classError{class: ClassNotStarted, err: errors.New("provisioning: not started")}
	ErrLeaseLost  error = &classError{class: ClassLeaseLost, err: errors.New("provisioning: lease lost")}

	// ErrNothingToAdopt is the Definite answer to an AdoptOnly create for
	// whose key nothing exists and nothing can come to exist (B4).
	ErrNothingToAdopt = Definite(errors.New("provisioning: nothing to adopt"))
)

// Definite says that the call had no effect; from CreateLease also that
// nothing exists for its key.
func Definite(err error) error { return &classError{class: ClassDefinite, err: err} }

// Ambiguous says that the call may or may not have had its effect.
func Ambiguous(err error) error { return &classError{class: ClassAmbiguous, err: err} }

// NotStarted says that the call certainly never reached the provider, for
// example because a rate limiter gave up before it. A create that is answered so
// is forgotten, and so is a machine that it has bought all the same.
func NotStarted(err error) error { return &classError{class: ClassNotStarted, err: err} }

// LeaseLost says that the resource of this key is dead, gone, or its identity
// spent, and that nothing billable is left of it (B11).
func LeaseLost(err error) error { return &classError{class: ClassLeaseLost, err: err} }

// LeaseLostWith says that the machine of this key is dead but is still there
// under lease and has to be destroyed (B11).
func LeaseLostWith(lease ProviderLeaseID, err error) error {
	return &classError{class: ClassLeaseLost, lease: lease, err: err}
}

// RetryAfter asks for a wait of at least d before the next try. It keeps the
// class of err. [RetryPolicy.MaxRetryAfter] bounds d. The RetryAfter of nil is
// nil.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{err: err, after: d}
}

type classError struct {
	class FailureClass
	lease ProviderLeaseID
	err   error
}

func (e *classError) Error() string {
	if e.err == nil {
		return e.class.sentinel().Error()
	}
	return e.err.Error()
}

func (e *classError) Unwrap() error        { return e.err }
func (e *classError) Is(target error) bool { return target == e.class.sentinel() }

func (c FailureClass) sentinel() error {
	switch c {
	case ClassDefinite:
		return ErrDefinite
	case ClassNotStarted:
		return ErrNotStarted
	case ClassLeaseLost:
		return ErrLeaseLost
	}
	return ErrAmbiguous
}

type retryAfterError struct {
	err   error
	after time.Duration
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// Classify returns the class of the error that a backend returned from kind.
// The outermost class named explicitly wins, also over a context error; of
// several errors joined at one place, the one that leaves most open. Of the
// rest, a context error is Ambiguous, and so is any error of CreateLease; every
// other method's is Definite, because whatever it left behind dies with the
// lease. The class of nil is ClassNone.
func Classify(kind OperationKind, err error) FailureClass {
	if err == nil {
		return ClassNone
	}
	if named := outermostClass(err); named != nil {
		return named.class
	}
	if kind == CreateLease || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return ClassAmbiguous
	}
	return ClassDefinite
}

// outermostClass returns the explicit class nearest to the surface, or nil.
func outermostClass(err error) *classError {
	switch e := err.(type) {
	case *classError:
		return e
	case interface{ Unwrap() error }:
		return outermostClass(e.Unwrap())
	case interface{ Unwrap() []error }:
		// Two things went wrong and both may be true: a create that was
		// refused in one zone and timed out in another may have bought.
		var found *classError
		for _, inner := range e.Unwrap() {
			if c := outermostClass(inner); c != nil && (found == nil || c.class.doubt() > found.class.doubt()) {
				found = c
			}
		}
		return found
	}
	return nil
}

// doubt orders the classes by how much they leave open.
func (c FailureClass) doubt() int {
	return [failureClasses]int{ClassNotStarted: 1, ClassDefinite: 2, ClassLeaseLost: 3, ClassAmbiguous: 4}[c]
}

// FailedCompletion returns the completion of an operation whose backend call
// returned err, which must not be nil: its class, text and wait, and the lease
// of a [LeaseLostWith]. It is for executors other than [Executor], and for
// whatever stands between an executor and a backend.
func FailedCompletion(id OperationID, kind OperationKind, err error) Completion {
	return Completion{Operation: id, Kind: kind}.failed(err)
}

// failed fills in a completion from the error that a backend returned.
func (c Completion) failed(err error) Completion {
	c.Class = Classify(c.Kind, err)
	c.Message = err.Error()
	c.Lease, c.Endpoint, c.Session = "", nil, ""
	if named := outermostClass(err); named != nil && c.Kind == CreateLease {
		c.Lease = named.lease
	}
	c.RetryAfter = retryAfterOf(err)
	return c
}

// retryAfterOf returns the wait that err asks for, 0 if it asks for none.
func retryAfterOf(err error) time.Duration {
	if asked, ok := errors.AsType[*retryAfterError](err); ok {
		return asked.after
	}
	return 0
}
