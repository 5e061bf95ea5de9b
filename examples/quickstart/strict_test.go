package main

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// fill gives every field of a value something else than zero.
func fill(t *testing.T, v reflect.Value, counter *int) {
	*counter++
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i), counter)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), counter)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(t, v.Index(0), counter)
		fill(t, v.Index(1), counter)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		value := reflect.New(v.Type().Elem()).Elem()
		fill(t, value, counter)
		v.SetMapIndex(reflect.ValueOf(fmt.Sprintf("key %d", *counter)).Convert(v.Type().Key()), value)
	case reflect.String:
		v.SetString(fmt.Sprintf("text %d", *counter))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(-*counter))
	case reflect.Uint64:
		v.SetUint(uint64(*counter))
	case reflect.Float64:
		v.SetFloat(float64(*counter) + 0.5)
	default:
		t.Fatalf("a shape now has a %v; the reader has to know it", v.Type())
	}
}

// What the library writes is read back, every field of it.
func TestStrictReaderReadsEveryField(t *testing.T) {
	var shape, read provisioning.ClusterShape
	counter := 0
	fill(t, reflect.ValueOf(&shape).Elem(), &counter)
	text, err := json.Marshal(shape)
	require.NoError(t, err)
	var reader strictReader
	reader.read("", text, reflect.ValueOf(&read).Elem())
	require.Empty(t, reader.faults)
	require.Equal(t, shape, read)
}

// It finds no fault where encoding/json finds none and every name is known and
// there once, and reads the same; it finds one wherever encoding/json does.
func FuzzStrictReader(f *testing.F) {
	for _, text := range []string{
		string(fleet), small, changed, "null", "[]", `{"groups": null}`, `{"groups": []}`, `{"groups": [null, {"shape": {"minUpMbps": null}}]}`,
		`{"generation": -0, "groups": [{"count": -0}, {"count": 1e3}]}`, `{"RUNID": "r"}`, `{"runId": "\ud800"}`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var value json.RawMessage
		if json.Unmarshal([]byte(text), &value) != nil {
			return // neither reader is given what is no JSON
		}
		var want, got provisioning.ClusterShape
		err := json.Unmarshal(value, &want)
		var reader strictReader
		reader.read("", value, reflect.ValueOf(&got).Elem())
		if err != nil {
			require.NotEmpty(t, reader.faults, "%v", err)
		}
		if reader.faults == nil {
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
	})
}
