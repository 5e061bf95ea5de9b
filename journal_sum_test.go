package provisioning

import (
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The digest in a journal is of everything that a ManagedNode shows: a field
// that is added and left out of it fails here.
func TestJournalDigestCoversTheNode(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	full := func() ManagedNode {
		m := newNode("w-0", 0, newTemplate("r", NodeGroupSpec{GroupID: "w"}), 3).export()
		m.Record.Connection = &SSHEndpoint{Host: "h", Port: 1}
		m.Pending = &PendingOperation{ID: OperationID{Attempt: 3, Sequence: 1}, Kind: CreateLease, Deadline: at}
		m.Held = []Observation{{Kind: BootstrapProgress, Node: "w-0", Attempt: 3, Session: "s"}}
		m.Retry.Ambiguous = CreateLease
		return m
	}
	sum := func(m ManagedNode) (uint64, error) {
		n, err := importNode(&m, nil)
		if err != nil {
			return 0, err
		}
		sum, _ := n.sum(nil)
		return sum, nil
	}
	same, err := sum(full())
	require.NoError(t, err)
	again, err := sum(full())
	require.NoError(t, err)
	require.Equal(t, same, again)

	seen := map[uint64]string{same: "nothing"}
	var refused []string
	changed := 0
	check := func(m ManagedNode, path string) {
		got, err := sum(m)
		if err != nil {
			refused = append(refused, path) // a state cannot express it
			return
		}
		require.Empty(t, seen[got], "%s changes nothing in the digest, or the same as something else", path)
		seen[got] = path
		changed++
	}
	// walk finds the leaves of a type; get leads to one in a node.
	var walk func(of reflect.Type, path string, get func(reflect.Value) reflect.Value)
	walk = func(of reflect.Type, path string, get func(reflect.Value) reflect.Value) {
		m := full()
		field := get(reflect.ValueOf(&m).Elem())
		switch {
		case of == reflect.TypeFor[LogicalNodeSpec](): // its template has a digest of its own
			m.Record.Spec.Boot.Args = []string{"other"}
		case of == reflect.TypeFor[time.Time]():
			later := field.Interface().(time.Time).Add(time.Second)
			if later.Before(at) { // it was not set
				later = at
			}
			field.Set(reflect.ValueOf(later))
		case of == reflect.TypeFor[Completion](): // of no held observation
			return
		case of.Kind() == reflect.Struct:
			for i := range of.NumField() {
				walk(of.Field(i).Type, path+"."+of.Field(i).Name, func(v reflect.Value) reflect.Value { return get(v).Field(i) })
			}
			return
		case of.Kind() == reflect.Pointer:
			walk(of.Elem(), path, func(v reflect.Value) reflect.Value { return get(v).Elem() })
			field.SetZero()
			path = "no " + path
		case of.Kind() == reflect.Slice:
			walk(of.Elem(), path, func(v reflect.Value) reflect.Value { return get(v).Index(0) })
			field.SetZero()
			path = "no " + path
		case of.Kind() == reflect.String:
			field.SetString(field.String() + "x")
		case of.Kind() == reflect.Bool:
			field.SetBool(!field.Bool())
		case field.CanUint():
			by := uint64(1)
			if path == ".Retry.Ambiguous" {
				by = uint64(StartBootstrap - CreateLease)
			}
			field.SetUint(field.Uint() + by)
		case field.CanInt():
			field.SetInt(field.Int() + 1)
		default:
			t.Fatalf("%s is a %v, which this test cannot change", path, of)
		}
		check(m, path)
	}
	walk(reflect.TypeFor[ManagedNode](), "", func(v reflect.Value) reflect.Value { return v })
	require.ElementsMatch(t, []string{".Attempt", ".Record.Node", ".Record.Group", ".Record.Index",
		".Pending.ID.Attempt", ".Held.Node", ".Held.Attempt"}, refused, "names of the slot and the attempt, which have to agree")
	require.Greater(t, changed, 40)
}
