package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"github.com/swactor/provisioning"
)

// strictReader reads a JSON value into a Go value and lists everything that is
// wrong on the way, where encoding/json stops at the first unknown field, takes
// a name in any case, and of a field that is there twice the last one. It knows
// the types that a shape is made of: structs with tags, lists, maps by string,
// pointers and scalars.
//
// As for encoding/json, null is the same as nothing at all.
type strictReader struct {
	faults []string
	unread []string // paths of values that could not be read and are zero
}

// read reads text, which must be valid JSON, and goes on after every fault.
func (r *strictReader) read(path string, text json.RawMessage, into reflect.Value) {
	if string(text) == "null" {
		return
	}
	switch into.Kind() {
	case reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		r.read(path, text, into.Elem())
	case reflect.Struct:
		r.readStruct(path, text, into)
	case reflect.Map:
		r.readMap(path, text, into)
	case reflect.Slice:
		r.readList(path, text, into)
	default:
		if json.Unmarshal(text, into.Addr().Interface()) != nil { // it is of another type, or too large
			into.SetZero()
			r.refuse(path, text, into.Type())
		}
	}
}

func (r *strictReader) readStruct(path string, text json.RawMessage, into reflect.Value) {
	seen := make(map[int]bool)
	r.eachMember(path, text, into.Type(), func(path, name string, text json.RawMessage) {
		index, spelling := fieldOf(into.Type(), name)
		if index < 0 {
			r.say(path, "unknown field")
			return
		}
		if name != spelling {
			r.say(path, "must be spelled "+spelling)
		}
		if !seen[index] {
			seen[index] = true
			r.read(path, text, into.Field(index))
			return
		}
		r.say(path, "is there twice")
		// The first one counts. What is wrong within this one is told too.
		unread := r.unread
		r.read(path, text, reflect.New(into.Field(index).Type()).Elem())
		r.unread = unread
	})
}

func (r *strictReader) readMap(path string, text json.RawMessage, into reflect.Value) {
	into.Set(reflect.MakeMap(into.Type()))
	r.eachMember(path, text, into.Type(), func(path, name string, text json.RawMessage) {
		key := reflect.ValueOf(name).Convert(into.Type().Key())
		if into.MapIndex(key).IsValid() {
			r.say(path, "is there twice")
		}
		value := reflect.New(into.Type().Elem()).Elem()
		r.read(path, text, value)
		into.SetMapIndex(key, value)
	})
}

func (r *strictReader) readList(path string, text json.RawMessage, into reflect.Value) {
	decoder, ok := r.enter(path, text, into.Type(), '[')
	if ok {
		into.Set(reflect.MakeSlice(into.Type(), 0, 0))
	}
	for i := 0; ok && decoder.More(); i++ {
		var element json.RawMessage
		if ok = r.sound(path, decoder.Decode(&element)); ok {
			into.Set(reflect.Append(into, reflect.Zero(into.Type().Elem())))
			r.read(fmt.Sprintf("%s[%d]", path, i), element, into.Index(i))
		}
	}
}

// eachMember calls do with the members of an object in the order of the text.
func (r *strictReader) eachMember(path string, text json.RawMessage, of reflect.Type, do func(path, name string, text json.RawMessage)) {
	decoder, ok := r.enter(path, text, of, '{')
	for ok && decoder.More() {
		name, err := decoder.Token()
		var member json.RawMessage
		if ok = r.sound(path, err) && r.sound(path, decoder.Decode(&member)); ok {
			name := name.(string) // as every name of valid JSON
			do(pathOf(path, name), name, member)
		}
	}
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

func pathOf(parent, name string) string {
	switch {
	case !plainName.MatchString(name):
		return parent + "[" + strconv.Quote(name) + "]"
	case parent == "":
		return name
	}
	return parent + "." + name
}

// enter returns a decoder behind the opening bracket of text, which has to be
// this one.
func (r *strictReader) enter(path string, text json.RawMessage, want reflect.Type, bracket json.Delim) (*json.Decoder, bool) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	first, err := decoder.Token()
	if !r.sound(path, err) {
		return nil, false
	}
	if first != bracket {
		r.refuse(path, text, want)
		return nil, false
	}
	return decoder, true
}

func (r *strictReader) say(path, problem string) {
	if path == "" {
		path = "the shape"
	}
	r.faults = append(r.faults, path+": "+problem)
}

// refuse says that a value is not of the type it should be.
func (r *strictReader) refuse(path string, text json.RawMessage, want reflect.Type) {
	r.unread = append(r.unread, path)
	r.say(path, fmt.Sprintf("is %s, must be %s", found(text), wanted(want)))
}

// sound takes the error of a decoder. There is none in valid JSON, but if there
// is, it must not get lost.
func (r *strictReader) sound(path string, err error) bool {
	if err != nil {
		r.unread = append(r.unread, path)
		r.say(path, err.Error())
	}
	return err == nil
}

// hides reports whether a fault of the shape comes from a value that could not
// be read. What is wrong with the zero in its place, nobody has written.
func (r *strictReader) hides(fault provisioning.ShapeFault) bool {
	path := fault.Field
	if fault.Position >= 0 {
		path = fmt.Sprintf("groups[%d].%s", fault.Position, fault.Field)
	}
	for _, hole := range r.unread {
		rest, within := strings.CutPrefix(path, hole)
		if within && (hole == "" || rest == "" || rest[0] == '.' || rest[0] == '[') ||
			hole == "runId" && fault.Field == hole { // the run of a group is compared with it
			return true
		}
	}
	return false
}

// fieldOf returns the field of a struct that is meant by name, and how its name
// is spelled; -1 if there is none.
func fieldOf(t reflect.Type, name string) (index int, spelling string) {
	index = -1
	for i := range t.NumField() {
		tag, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if tag == name {
			return i, tag
		}
		if strings.EqualFold(tag, name) {
			index, spelling = i, tag
		}
	}
	return index, spelling
}

func found(text json.RawMessage) string {
	switch text[0] {
	case '{':
		return "an object"
	case '[':
		return "a list"
	case '"':
		return "a string"
	}
	return cut(string(text), 40)
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return "an object"
	case reflect.Slice:
		return "a list"
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64:
		return fmt.Sprintf("an integer of %d bits, in digits", t.Bits())
	case reflect.Uint64:
		return fmt.Sprintf("an integer of %d bits that is not negative, in digits", t.Bits())
	}
	return fmt.Sprintf("a number of %d bits", t.Bits()) // reflect.Float64 is the last that a shape has
}
