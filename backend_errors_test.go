package provisioning

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var everyOperation = []OperationKind{CreateLease, LookupEndpoint, StartBootstrap, BootstrapConvergenceObserved, CancelBootstrap, DestroyLease}

// The classes with their sentinel and how each is built.
var errorClasses = []struct {
	class    FailureClass
	sentinel error
	build    func(error) error
}{
	{ClassDefinite, ErrDefinite, Definite},
	{ClassAmbiguous, ErrAmbiguous, Ambiguous},
	{ClassNotStarted, ErrNotStarted, NotStarted},
	{ClassLeaseLost, ErrLeaseLost, LeaseLost},
	{ClassLeaseLost, ErrLeaseLost, func(err error) error { return LeaseLostWith("lease", err) }},
}

func TestErrorClassesAreFoundByIsAndAs(t *testing.T) {
	cause := &fs.PathError{Op: "open", Path: "/key", Err: fs.ErrPermission}
	for _, c := range errorClasses {
		built := c.build(cause)
		for name, err := range map[string]error{
			"built":               built,
			"wrapped":             fmt.Errorf("rent: %w", built),
			"with a wait":         RetryAfter(built, time.Second),
			"wrapped with a wait": fmt.Errorf("rent: %w", RetryAfter(fmt.Errorf("again: %w", built), time.Second)),
			"joined":              errors.Join(errors.New("other"), built),
		} {
			for _, kind := range everyOperation {
				require.Equal(t, c.class, Classify(kind, err), "%v %s", kind, name)
			}
			for _, other := range errorClasses {
				require.Equal(t, other.class == c.class, errors.Is(err, other.sentinel), "%s: %v", name, other.class)
			}
			require.ErrorIs(t, err, fs.ErrPermission, "the cause stays reachable")
			var found *fs.PathError
			require.ErrorAs(t, err, &found)
			require.Same(t, cause, found)
			require.Contains(t, err.Error(), cause.Error())
		}
		require.Equal(t, cause.Error(), built.Error(), "a class adds no words of its own")
	}
}

func TestSentinelsNameTheirClass(t *testing.T) {
	for _, c := range errorClasses {
		for _, kind := range everyOperation {
			require.Equal(t, c.class, Classify(kind, c.sentinel))
			require.Equal(t, c.class, Classify(kind, fmt.Errorf("because: %w", c.sentinel)))
			require.Equal(t, c.class, Classify(kind, c.build(nil)), "a class without a cause is still a failure")
		}
		require.Equal(t, c.sentinel.Error(), c.build(nil).Error())
		require.Regexp(t, "^provisioning: ", c.sentinel.Error())
	}
	require.ErrorIs(t, ErrNothingToAdopt, ErrDefinite)
	require.NotErrorIs(t, Definite(errors.New("other")), ErrNothingToAdopt)
	require.ErrorIs(t, fmt.Errorf("adopt: %w", ErrNothingToAdopt), ErrNothingToAdopt)
	require.Equal(t, ClassDefinite, Classify(CreateLease, ErrNothingToAdopt))
	require.EqualError(t, ErrNothingToAdopt, "provisioning: nothing to adopt")
}

// Without a class: a create may have bought something; whatever else happened
// dies with the lease; a call that was cut off may have done anything.
func TestUnclassifiedErrors(t *testing.T) {
	for _, kind := range everyOperation {
		require.Equal(t, ClassNone, Classify(kind, nil))

		plain := ClassDefinite
		if kind == CreateLease {
			plain = ClassAmbiguous
		}
		require.Equal(t, plain, Classify(kind, errors.New("500")), kind)
		require.Equal(t, plain, Classify(kind, RetryAfter(errors.New("429"), time.Second)), "a wait is no class: %v", kind)

		for _, cut := range []error{context.Canceled, context.DeadlineExceeded} {
			require.Equal(t, ClassAmbiguous, Classify(kind, cut), kind)
			require.Equal(t, ClassAmbiguous, Classify(kind, fmt.Errorf("post: %w", cut)), kind)
			require.Equal(t, ClassAmbiguous, Classify(kind, RetryAfter(cut, time.Second)), kind)
		}
	}
}

func TestOutermostClassWins(t *testing.T) {
	for _, outer := range errorClasses {
		for _, inner := range errorClasses {
			err := outer.build(fmt.Errorf("inner: %w", inner.build(errors.New("cause"))))
			for _, kind := range everyOperation {
				require.Equal(t, outer.class, Classify(kind, err))
				require.Equal(t, outer.class, Classify(kind, RetryAfter(err, time.Second)))
				require.Equal(t, outer.class, Classify(kind, outer.build(context.DeadlineExceeded)), "also over a context error")
			}
			require.ErrorIs(t, err, inner.sentinel, "what was said inside can still be found")
		}
	}
}

func TestRetryAfterOfNothing(t *testing.T) {
	require.NoError(t, RetryAfter(nil, time.Hour))
}

func TestCompletionFailed(t *testing.T) {
	base := Completion{Operation: OperationID{3, 4}, Lease: "stale", Endpoint: &SSHEndpoint{"h", 22}, Session: "stale"}
	cause := errors.New("cause")
	for _, c := range []struct {
		name string
		kind OperationKind
		err  error
		want Completion
	}{
		{"a plain error", LookupEndpoint, cause, Completion{Class: ClassDefinite, Message: "cause"}},
		{"a plain error of a create", CreateLease, cause, Completion{Class: ClassAmbiguous, Message: "cause"}},
		{"a wait", DestroyLease, RetryAfter(Ambiguous(cause), time.Minute), Completion{Class: ClassAmbiguous, Message: "cause", RetryAfter: time.Minute}},
		{"a wait inside", CreateLease, Definite(fmt.Errorf("x: %w", RetryAfter(cause, time.Minute))),
			Completion{Class: ClassDefinite, Message: "x: cause", RetryAfter: time.Minute}},
		{"two waits", CreateLease, RetryAfter(RetryAfter(NotStarted(cause), time.Hour), time.Second),
			Completion{Class: ClassNotStarted, Message: "cause", RetryAfter: time.Second}},
		{"a dead machine", CreateLease, LeaseLostWith("l-1", cause), Completion{Class: ClassLeaseLost, Message: "cause", Lease: "l-1"}},
		{"a dead machine with a wait", CreateLease, RetryAfter(LeaseLostWith("l-1", cause), time.Second),
			Completion{Class: ClassLeaseLost, Message: "cause", Lease: "l-1", RetryAfter: time.Second}},
		{"a dead machine that is gone", CreateLease, LeaseLost(cause), Completion{Class: ClassLeaseLost, Message: "cause"}},
		{"a lease is news of a create only", StartBootstrap, LeaseLostWith("l-1", cause), Completion{Class: ClassLeaseLost, Message: "cause"}},
		{"what an outer class covers", CreateLease, Ambiguous(LeaseLostWith("l-1", cause)), Completion{Class: ClassAmbiguous, Message: "cause"}},
		{"no words", CancelBootstrap, Definite(nil), Completion{Class: ClassDefinite, Message: "provisioning: definite failure"}},
	} {
		c.want.Operation, c.want.Kind = base.Operation, c.kind
		in := base
		in.Kind = c.kind
		require.Equal(t, c.want, in.failed(c.err), c.name)
		require.Equal(t, "stale", string(in.Lease), "the receiver is a value")
	}
}

// Any chain of wrappers: the first class from outside decides, the first wait
// from outside is the wait, and no cause is lost.
func TestProp_Classify(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		kind := rapid.SampledFrom(everyOperation).Draw(t, "kind")
		root := rapid.SampledFrom([]error{errors.New("plain"), context.Canceled, context.DeadlineExceeded}).Draw(t, "root")
		class := ClassDefinite
		if kind == CreateLease || root == context.Canceled || root == context.DeadlineExceeded {
			class = ClassAmbiguous
		}
		err, wait := root, time.Duration(0)
		for _, layer := range rapid.SliceOfN(rapid.IntRange(0, len(errorClasses)+1), 0, 6).Draw(t, "layers") {
			switch layer {
			case len(errorClasses):
				err = fmt.Errorf("wrapped: %w", err)
			case len(errorClasses) + 1:
				wait = time.Duration(rapid.Int64().Draw(t, "wait"))
				err = RetryAfter(err, wait)
			default:
				class = errorClasses[layer].class
				err = errorClasses[layer].build(err)
			}
		}
		require.Equal(t, class, Classify(kind, err))
		require.ErrorIs(t, err, root)
		completion := Completion{Kind: kind}.failed(err)
		require.Equal(t, class, completion.Class)
		require.Equal(t, wait, completion.RetryAfter)
		require.Equal(t, err.Error(), completion.Message)
	})
}

// What an executor of one's own has to know of an error.
func TestFailedCompletion(t *testing.T) {
	err := RetryAfter(LeaseLostWith("m-1", errors.New("found dead")), time.Minute)
	id := OperationID{Attempt: 3, Sequence: 7}
	require.Equal(t, Completion{Operation: id, Kind: CreateLease, Class: ClassLeaseLost, Message: "found dead",
		RetryAfter: time.Minute, Lease: "m-1"}, FailedCompletion(id, CreateLease, err))
	require.Equal(t, Completion{Operation: id, Kind: DestroyLease, Class: ClassLeaseLost, Message: "found dead",
		RetryAfter: time.Minute}, FailedCompletion(id, DestroyLease, err), "only a create tells of a lease")
}

func TestBootstrapSink(t *testing.T) {
	var got []Observation
	sink := NewBootstrapSink("w-3", 9, func(o Observation) { got = append(got, o) })
	report := func(s BootstrapSink) {
		s.Progress("s", BootstrapStageSSHReady, 7, 8)
		s.Joined("s", "agent")
		s.Failed("s", "why")
		s.Closed("s")
		s.NodeLost("gone")
	}
	report(sink)
	require.Equal(t, []Observation{
		{Kind: BootstrapProgress, Node: "w-3", Attempt: 9, Session: "s", Stage: BootstrapStageSSHReady, StdoutSequence: 7, StderrSequence: 8},
		{Kind: SwactorJoined, Node: "w-3", Attempt: 9, Session: "s", Swactor: "agent"},
		{Kind: BootstrapFailed, Node: "w-3", Attempt: 9, Session: "s", Reason: "why"},
		{Kind: BootstrapClosed, Node: "w-3", Attempt: 9, Session: "s"},
		{Kind: NodeLost, Node: "w-3", Attempt: 9, Reason: "gone"},
	}, got)

	report(BootstrapSink{})
	report(NewBootstrapSink("w-3", 9, nil))
	require.Len(t, got, 5, "the zero sink drops everything")
}

// Two zones were asked for one machine: one said no, the other gave no answer.
// Reading only the "no" would forget a machine that may have been bought.
func TestClassifyJoinedErrorsTakesTheMostDoubtful(t *testing.T) {
	no, unclear, never, lost := Definite(errors.New("no")), Ambiguous(errors.New("unclear")),
		NotStarted(errors.New("never")), LeaseLostWith("m-1", errors.New("lost"))
	for _, row := range []struct {
		err  error
		want FailureClass
	}{
		{errors.Join(no, unclear), ClassAmbiguous},
		{errors.Join(unclear, no), ClassAmbiguous},
		{errors.Join(lost, unclear), ClassAmbiguous},
		{errors.Join(no, lost), ClassLeaseLost},
		{errors.Join(never, no), ClassDefinite},
		{errors.Join(never, errors.New("plain")), ClassNotStarted},
		{fmt.Errorf("both: %w and %w", no, unclear), ClassAmbiguous},
		{Definite(errors.Join(unclear, lost)), ClassDefinite}, // the outermost still wins
	} {
		for kind := CreateLease; kind < operationKinds; kind++ {
			require.Equal(t, row.want, Classify(kind, row.err), "%v of %v", row.err, kind)
		}
	}
	c := Completion{Kind: CreateLease}.failed(errors.Join(no, lost))
	require.Equal(t, ProviderLeaseID("m-1"), c.Lease, "the dead machine is still billed (B11)")
}
