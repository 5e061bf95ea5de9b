package provisioning

import (
	"hash/maphash"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// filledEffect returns an effect with something in every field.
func filledEffect(t *testing.T) Effect {
	spec := filled[LogicalNodeSpec](t)
	spec.Node, spec.SwarmJoin.ExpectedLogicalNodeID = "text-3", "text-3"
	e := NewEffect(OperationID{1, 2}, CancelBootstrap, ExternalKey{Run: "text", Node: "text-3", Attempt: 1}, spec)
	e.Lease, e.Endpoint, e.Session, e.Swactor = "lease", &SSHEndpoint{"host", 22}, "session", "swactor"
	e.AdoptOnly, e.CreatesSent = true, 3
	e.LastCreateAt, e.DispatchedAt, e.Deadline = time.Unix(1, 0), time.Unix(2, 0), time.Unix(3, 0)
	return e
}

// Two effects are one only if every input agrees: the fields are found by
// reflection, so that one which is added and not compared fails here.
func TestEffectEqualComparesEveryInput(t *testing.T) {
	base, e := filledEffect(t), filledEffect(t)
	seed := maphash.MakeSeed()
	require.True(t, e.Equal(base), "made twice, sharing nothing")
	require.Equal(t, base.fingerprint(seed), e.fingerprint(seed))
	differs := func(what string) {
		require.False(t, e.Equal(base), what)
		require.False(t, base.Equal(e), what)
		require.NotEqual(t, base.fingerprint(seed), e.fingerprint(seed), what)
	}
	var hidden []string
	for field, value := range reflect.ValueOf(&e).Elem().Fields() {
		require.False(t, value.IsZero(), "%s is empty: filledEffect does not know it", field.Name)
		switch {
		case !field.IsExported():
			hidden = append(hidden, field.Name)
		case field.Type == reflect.TypeFor[time.Time]():
			old := value.Interface().(time.Time)
			value.Set(reflect.ValueOf(old.Add(1)))
			differs(field.Name)
			value.Set(reflect.ValueOf(old))
		default:
			walkLeaves(t, value, field.Name, differs)
		}
	}
	require.Equal(t, []string{"template", "index"}, hidden, "compare what is new below")
	e.index++
	differs("index")
	e.index--
	spec := e.Spec()
	spec.Shape.Image = "other"
	e.template = spec.template()
	differs("template")
	e.template = nil
	differs("no template")
	require.True(t, Effect{}.Equal(Effect{}))
}

// Instants are compared as instants, endpoints by what they say.
func TestEffectEqualIgnoresForm(t *testing.T) {
	a, b := filledEffect(t), filledEffect(t)
	b.DispatchedAt, b.Deadline, b.LastCreateAt = b.DispatchedAt.UTC(), b.Deadline.In(time.FixedZone("east", 3600)), b.LastCreateAt.UTC()
	require.NotSame(t, a.Endpoint, b.Endpoint)
	require.NotSame(t, a.template, b.template)
	require.True(t, a.Equal(b))
	seed := maphash.MakeSeed()
	require.Equal(t, a.fingerprint(seed), b.fingerprint(seed))
}

// What leaves one field and enters the next is another effect, and so is an
// endpoint that says nothing.
func TestEffectFingerprintKeepsFieldsApart(t *testing.T) {
	seed := maphash.MakeSeed()
	fingerprint := func(change func(e *Effect)) uint64 {
		e := filledEffect(t)
		change(&e)
		return e.fingerprint(seed)
	}
	all := map[uint64]string{}
	for what, change := range map[string]func(e *Effect){
		"none":               func(e *Effect) {},
		"to the session":     func(e *Effect) { e.Lease, e.Session = "leas", "esession" },
		"to the host":        func(e *Effect) { e.Lease, e.Endpoint.Host = "leas", "ehost" },
		"to the swactor":     func(e *Effect) { e.Session, e.Swactor = "", "sessionswactor" },
		"an empty endpoint":  func(e *Effect) { e.Endpoint = &SSHEndpoint{} },
		"no endpoint":        func(e *Effect) { e.Endpoint = nil },
		"a template of text": func(e *Effect) { e.template, e.Swactor = nil, e.Swactor+SwactorID(e.template.digest[:]) },
		"more than the room": func(e *Effect) { e.Swactor = SwactorID(strings.Repeat("x", 1000)) },
		"and one more":       func(e *Effect) { e.Swactor = SwactorID(strings.Repeat("x", 1001)) },
	} {
		f := fingerprint(change)
		require.Empty(t, all[f], what)
		all[f] = what
	}
}

func TestEffectSpec(t *testing.T) {
	spec := filled[LogicalNodeSpec](t)
	spec.Node, spec.SwarmJoin.ExpectedLogicalNodeID = "text-3", "text-3"
	e := NewEffect(OperationID{1, 1}, CreateLease, ExternalKey{Run: "text", Node: "text-3", Attempt: 1}, spec)
	require.Equal(t, spec, e.Spec())
	require.True(t, spec.Equal(e.Spec()))

	spec.Boot.Args[0], spec.Boot.Env["text"], *spec.Shape.MinUpMbps = "changed", "changed", 9
	require.False(t, spec.Equal(e.Spec()), "the effect has its own copy")

	require.Equal(t, LogicalNodeSpec{Node: "w-0"}, Effect{Key: ExternalKey{Node: "w-0"}}.Spec(), "no template, no spec")
}
