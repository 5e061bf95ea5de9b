package provisioning

import (
	"encoding"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The names are what a plan, a log and a stored state say; they are spelled
// out here once more, so that none changes unnoticed.
func TestNamesOfEnums(t *testing.T) {
	testNames[OperationKind](t, "operation", "none", "CreateLease", "LookupEndpoint", "StartBootstrap",
		"BootstrapConvergenceObserved", "CancelBootstrap", "DestroyLease")
	testNames[FailureClass](t, "failure class", "none", "Definite", "Ambiguous", "NotStarted", "LeaseLost")
	testNames[BootstrapStage](t, "bootstrap stage", "none", "Created", "SSHConnecting", "SSHReady", "StdoutStreaming",
		"BootChecking", "SwactorStarting", "WaitingForSwactorJoin", "Converged", "Closed", "Cancelled",
		"SSHConnectFailed", "BootCheckFailed", "StartFailed", "SwactorJoinFailed", "StreamError")
	testNames[ObservationKind](t, "observation", "none", "OperationCompleted", "BootstrapProgress", "SwactorJoined",
		"BootstrapFailed", "BootstrapClosed", "NodeLost", "ReplaceRequested")

	require.Len(t, operationNames, int(operationKinds))
	require.Len(t, classNames, int(failureClasses))
	require.Len(t, bootstrapStageNames, int(bootstrapStages))
	require.Len(t, observationNames, int(observationKinds))
}

func testNames[T interface {
	~uint8
	fmt.Stringer
	encoding.TextMarshaler
}](t *testing.T, what string, names ...string) {
	t.Helper()
	for i, name := range names {
		value := T(i)
		require.Equal(t, name, value.String())
		text, err := value.MarshalText()
		require.NoError(t, err)
		require.Equal(t, name, string(text))

		back := T(math.MaxUint8)
		require.NoError(t, any(&back).(encoding.TextUnmarshaler).UnmarshalText(text))
		require.Equal(t, value, back)
	}
	for _, unknown := range []T{T(len(names)), math.MaxUint8} {
		require.Equal(t, fmt.Sprintf("unknown(%d)", uint8(unknown)), unknown.String())
		_, err := unknown.MarshalText()
		require.EqualError(t, err, fmt.Sprintf("provisioning: no name for value %d", uint8(unknown)), "a value without a name is not written")
	}
	for _, text := range []string{"", "None", "unknown(200)", " Created", "createlease"} {
		value := T(1)
		err := any(&value).(encoding.TextUnmarshaler).UnmarshalText([]byte(text))
		require.EqualError(t, err, fmt.Sprintf("provisioning: unknown %s %q", what, text))
		require.Equal(t, T(1), value, "a refusal changes nothing")
	}
}

func TestOperationKindValid(t *testing.T) {
	for kind := range OperationKind(math.MaxUint8) {
		require.Equal(t, kind >= CreateLease && kind <= DestroyLease, kind.valid(), kind)
	}
}

func TestBootstrapStageClasses(t *testing.T) {
	for stage := range bootstrapStages {
		var failed bool
		var rank int
		switch stage {
		case BootstrapStageConverged:
			rank = 1
		case BootstrapStageClosed, BootstrapStageCancelled:
			rank = 2
		case BootstrapStageSSHConnectFailed, BootstrapStageBootCheckFailed, BootstrapStageStartFailed,
			BootstrapStageSwactorJoinFailed, BootstrapStageStreamError:
			failed, rank = true, 2
		}
		require.Equal(t, failed, stage.Failed(), stage)
		require.Equal(t, rank, stage.rank(), stage)
	}
	require.False(t, bootstrapStages.Failed(), "what is no stage is no failure")
}

func TestSSHEndpointString(t *testing.T) {
	for want, e := range map[string]SSHEndpoint{
		"10.0.0.1:22": {"10.0.0.1", 22}, "host:65535": {"host", 65535}, ":0": {}, "[2001:db8::1]:22": {"2001:db8::1", 22},
	} {
		require.Equal(t, want, e.String())
	}
}

// A success that names nothing is no success: something was made, and nobody
// could give it back.
func TestCompletionJudged(t *testing.T) {
	id := OperationID{Attempt: 4, Sequence: 2}
	for _, c := range []struct {
		in      Completion
		message string
	}{
		{Completion{Kind: CreateLease}, "the success names no lease"},
		{Completion{Kind: CreateLease, Session: "s"}, "the success names no lease"},
		{Completion{Kind: StartBootstrap}, "the success names no session"},
		{Completion{Kind: StartBootstrap, Lease: "l"}, "the success names no session"},
	} {
		c.in.Operation = id
		got := c.in.judged()
		want := c.in
		want.Class, want.Message = ClassAmbiguous, c.message
		require.Equal(t, want, got)
		require.Equal(t, got, got.judged())
	}
	for _, c := range []Completion{
		{Kind: CreateLease, Lease: "l"},
		{Kind: CreateLease, Lease: "l", Endpoint: &SSHEndpoint{"h", 22}},
		{Kind: StartBootstrap, Session: "s"},
		{Kind: LookupEndpoint}, // not yet
		{Kind: BootstrapConvergenceObserved}, {Kind: CancelBootstrap}, {Kind: DestroyLease},
		{Kind: CreateLease, Class: ClassDefinite, Message: "m"}, // no success to begin with
		{Kind: CreateLease, Class: ClassLeaseLost},
		{Kind: StartBootstrap, Class: ClassNotStarted},
	} {
		require.Equal(t, c, c.judged())
	}
}

func TestObservationJSON(t *testing.T) {
	o := Observation{Kind: OperationCompleted, Node: "w-0", Attempt: 1, Completion: Completion{
		Operation: OperationID{1, 2}, Kind: CreateLease, Class: ClassAmbiguous, Message: "m", RetryAfter: time.Second,
	}}
	require.JSONEq(t, `{"kind":"OperationCompleted","node":"w-0","attempt":1,"completion":{
		"operation":{"attempt":1,"sequence":2},"kind":"CreateLease","class":"Ambiguous","message":"m","retryAfter":1000000000}}`, mustJSON(t, o))
	require.JSONEq(t, `{"kind":"SwactorJoined","node":"w-0","attempt":1,"session":"s","swactor":"a"}`,
		mustJSON(t, Observation{Kind: SwactorJoined, Node: "w-0", Attempt: 1, Session: "s", Swactor: "a"}))

	_, err := json.Marshal(Observation{Kind: observationKinds})
	require.ErrorContains(t, err, "provisioning: no name for value 8")
	require.ErrorContains(t, json.Unmarshal([]byte(`{"kind":"Nonsense"}`), new(Observation)), `provisioning: unknown observation "Nonsense"`)

	// Nothing is lost on the way, whatever is set.
	full := filled[Observation](t)
	walkLeaves(t, reflect.ValueOf(&full).Elem(), "observation", func(path string) {
		var back Observation
		require.NoError(t, json.Unmarshal([]byte(mustJSON(t, full)), &back))
		require.Equal(t, full, back, path)
	})
}

func TestProp_ObservationJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := Observation{
			Kind:    ObservationKind(rapid.Uint8Range(0, uint8(observationKinds)-1).Draw(t, "kind")),
			Node:    LogicalNodeID(rapid.String().Draw(t, "node")),
			Attempt: NodeAttemptID(rapid.Uint64().Draw(t, "attempt")),
			Session: BootstrapSessionID(rapid.String().Draw(t, "session")),
			Stage:   BootstrapStage(rapid.Uint8Range(0, uint8(bootstrapStages)-1).Draw(t, "stage")),
			Completion: Completion{
				Operation:  OperationID{Sequence: rapid.Uint64().Draw(t, "sequence")},
				Kind:       OperationKind(rapid.Uint8Range(0, uint8(operationKinds)-1).Draw(t, "operation")),
				Class:      FailureClass(rapid.Uint8Range(0, uint8(failureClasses)-1).Draw(t, "class")),
				RetryAfter: time.Duration(rapid.Int64().Draw(t, "retry after")),
			},
		}
		if rapid.Bool().Draw(t, "endpoint") {
			o.Completion.Endpoint = &SSHEndpoint{rapid.String().Draw(t, "host"), rapid.Uint16().Draw(t, "port")}
		}
		var back Observation
		require.NoError(t, json.Unmarshal([]byte(mustJSON(t, o)), &back))
		require.Equal(t, o, back)
	})
}
