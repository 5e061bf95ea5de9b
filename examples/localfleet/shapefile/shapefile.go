// Package shapefile reads the wish of a fleet from a file, strictly: what is
// misspelt, twice there or of the wrong kind is a fault that names its line,
// because a wish that is read in another way than it was meant costs money.
//
// A file is YAML, or JSON if its name ends in .json. It holds the groups of a
// [provisioning.ClusterShape] under their JSON names, and nothing else: whoever
// runs the fleet chooses the run and counts the generations.
package shapefile

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"

	"go.yaml.in/yaml/v3"

	"github.com/swactor/provisioning"
)

// Limits of a file. A fleet of processes shares one computer, and a typing
// error in a count should not take it down.
const (
	MaxSize   = 1 << 20
	MaxNodes  = 256
	maxFaults = 20
)

// ErrInvalid is what errors.Is finds in every [*Error].
var ErrInvalid = errors.New("fleet: invalid shape file")

// Error lists what is wrong with a file.
type Error struct {
	Name   string
	Faults []Fault
}

// Fault is one thing wrong with a file.
type Fault struct {
	Line    int    // 0: of the file as a whole
	Field   string // "groups[0].count"; empty: of the file as a whole
	Problem string
}

// Error has a line "NAME:LINE: FIELD: PROBLEM" for each fault, so that an
// editor finds the place.
func (e *Error) Error() string {
	var lines []string
	for _, f := range e.Faults[:min(len(e.Faults), maxFaults)] {
		line := e.Name
		if f.Line > 0 {
			line += fmt.Sprintf(":%d", f.Line)
		}
		if f.Field != "" {
			line += ": " + f.Field
		}
		lines = append(lines, line+": "+f.Problem)
	}
	if more := len(e.Faults) - maxFaults; more > 0 {
		lines = append(lines, fmt.Sprintf("%s: and %d more", e.Name, more))
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns [ErrInvalid].
func (e *Error) Unwrap() error { return ErrInvalid }

// Read reads a file. The error is an [*Error] or that of reading.
func Read(path string) ([]provisioning.NodeGroupSpec, error) {
	text, err := ReadFile(path)
	if err != nil {
		return nil, err
	}
	return Parse(path, text)
}

// ReadFile reads a regular file of at most [MaxSize] bytes. It waits for nobody: to open a named pipe without O_NONBLOCK would take
// until somebody writes to it, and to read a terminal until somebody types.
func ReadFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &Error{Name: path, Faults: []Fault{{Problem: "is not a regular file"}}}
	}
	text, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err != nil {
		return nil, err
	}
	if len(text) > MaxSize {
		return nil, &Error{Name: path, Faults: []Fault{{Problem: fmt.Sprintf("is larger than %d bytes", MaxSize)}}}
	}
	return text, nil
}

// document is what a file may hold. The names of the fields are those of their
// json tags.
type document struct {
	Groups []provisioning.NodeGroupSpec `json:"groups"`
}

// Parse reads the text of a file. The name says whether it is JSON. The error
// is an [*Error].
func Parse(name string, text []byte) ([]provisioning.NodeGroupSpec, error) {
	var doc document
	d, err := Decode(name, text, &doc)
	if err != nil {
		return nil, err
	}
	d.Require("", "groups", "write [] for none")
	for i := range doc.Groups {
		group := fmt.Sprintf("groups[%d]", i)
		d.Require(group, "groupId", "")
		d.Require(group, "count", "write 0 for an empty group")
		if doc.Groups[i].RunID != "" {
			d.Fault(group+".runId", "the run is chosen by whoever runs the fleet")
		}
	}
	if len(d.faults) == 0 {
		d.judge(doc.Groups)
	}
	if err := d.Err(); err != nil {
		return nil, err
	}
	return doc.Groups, nil
}

// Decode fills in a struct, by the names of its json tags, from the text of a
// file that is read as strictly as a shape file. The error is an [*Error] if the
// text is not YAML or JSON; whatever else is wrong is found in [Document.Err],
// after the caller has added what it finds.
func Decode(name string, text []byte, into any) (*Document, error) {
	root, err := parse(name, text)
	if err != nil {
		fault := Fault{Problem: err.Error()}
		if syntax, ok := errors.AsType[*syntaxError](err); ok {
			fault.Line = syntax.line
		}
		return nil, &Error{Name: name, Faults: []Fault{fault}}
	}
	d := &Document{name: name, lines: make(map[string]int)}
	d.decode(root, reflect.ValueOf(into).Elem(), "")
	return d, nil
}

// parse returns the tree of a file that holds exactly one document.
func parse(name string, text []byte) (*yaml.Node, error) {
	if filepath.Ext(name) == ".json" {
		return parseJSON(text)
	}
	var doc, more yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	switch err := decoder.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, errEmpty
	case err != nil:
		return nil, syntaxOf(err)
	}
	switch err := decoder.Decode(&more); {
	case err == nil:
		return nil, &syntaxError{more.Line, "a second document follows"}
	case !errors.Is(err, io.EOF):
		return nil, syntaxOf(err)
	}
	return doc.Content[0], nil
}

var errEmpty = errors.New("the file is empty; write groups: [] to wish for nothing")

// syntaxError is a text that is not YAML or JSON. Line 0 is not known.
type syntaxError struct {
	line    int
	problem string
}

func (e *syntaxError) Error() string { return e.problem }

// syntaxOf takes the line out of the text of a YAML error, which has no field
// for it.
func syntaxOf(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	var line int
	if n, _ := fmt.Sscanf(text, "line %d:", &line); n == 1 {
		_, text, _ = strings.Cut(text, ": ")
	}
	return &syntaxError{line, text}
}

// judge asks the library what it thinks of the groups, and finds the lines of
// what it says.
func (d *Document) judge(groups []provisioning.NodeGroupSpec) {
	shape := provisioning.ClusterShape{RunID: "any", Generation: 1, Groups: groups}
	_, err := provisioning.NewClusterDriver(shape, provisioning.Config{MaxNodes: MaxNodes})
	if err == nil {
		return
	}
	refused, ok := errors.AsType[*provisioning.ShapeError](err)
	if !ok {
		d.fault(0, "", err.Error())
		return
	}
	for _, f := range refused.Faults {
		field := f.Field
		if f.Position >= 0 {
			field = fmt.Sprintf("groups[%d].%s", f.Position, f.Field)
		}
		d.Fault(field, f.Problem)
	}
}

// Document is a decoded file and what is wrong with it.
type Document struct {
	name   string
	faults []Fault
	lines  map[string]int // of every field that is there
}

// Err returns an [*Error] with all faults in the order of their lines, or nil.
func (d *Document) Err() error {
	if len(d.faults) == 0 {
		return nil
	}
	slices.SortStableFunc(d.faults, func(a, b Fault) int { return cmp.Compare(a.Line, b.Line) })
	return &Error{Name: d.name, Faults: d.faults}
}

// Fault adds what is wrong with a field, such as "groups[0].count". One that is
// not there is wrong where it should be.
func (d *Document) Fault(field, problem string) {
	line, there := d.lines[field]
	if !there {
		line = d.lines[field[:max(strings.LastIndexByte(field, '.'), 0)]]
	}
	d.fault(line, field, problem)
}

func (d *Document) fault(line int, field, problem string) {
	d.faults = append(d.faults, Fault{Line: line, Field: field, Problem: problem})
}

// Has reports whether a field is there.
func (d *Document) Has(field string) bool { _, ok := d.lines[field]; return ok }

// Require adds a fault if a field is not there.
func (d *Document) Require(parent, name, hint string) {
	field := join(parent, name)
	if d.Has(field) {
		return
	}
	problem := "is missing"
	if hint != "" {
		problem += "; " + hint
	}
	d.fault(d.lines[parent], field, problem)
}

func join(parent, name string) string {
	if parent == "" {
		return name
	}
	return parent + "." + name
}

// decode ends with any tree, also one with an alias to itself: it goes as deep
// as the type of the value does.
func (d *Document) decode(n *yaml.Node, into reflect.Value, field string) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	d.lines[field] = n.Line
	mismatch := func(want string) { d.fault(n.Line, field, fmt.Sprintf("is %s, must be %s", describe(n), want)) }
	switch into.Kind() {
	case reflect.Struct:
		if n.Kind != yaml.MappingNode {
			mismatch("a mapping")
			return
		}
		fields := jsonFields(into.Type())
		d.pairs(n, field, func(key, value *yaml.Node) {
			index, known := fields[key.Value]
			if !known {
				d.fault(key.Line, join(field, key.Value), "is not a known field"+suggest(key.Value, fields))
				return
			}
			d.decode(value, into.Field(index), join(field, key.Value))
			d.lines[join(field, key.Value)] = key.Line // a block begins below its key
		})
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			mismatch("a list")
			return
		}
		into.Set(reflect.MakeSlice(into.Type(), len(n.Content), len(n.Content)))
		for i, item := range n.Content {
			d.decode(item, into.Index(i), fmt.Sprintf("%s[%d]", field, i))
		}
	case reflect.Map: // of texts to texts
		if n.Kind != yaml.MappingNode {
			mismatch("a mapping")
			return
		}
		into.Set(reflect.MakeMapWithSize(into.Type(), len(n.Content)/2))
		d.pairs(n, field, func(key, value *yaml.Node) {
			text := reflect.New(into.Type().Elem()).Elem()
			d.decode(value, text, join(field, key.Value))
			into.SetMapIndex(reflect.ValueOf(key.Value), text)
		})
	case reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		d.decode(n, into.Elem(), field)
	case reflect.String:
		// A scalar counts as it is written: an image tag 1.10 is not 1.1.
		if n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Tag == "!!binary" {
			mismatch("a text")
			return
		}
		into.SetString(n.Value)
	case reflect.Bool:
		if n.Tag != "!!bool" || n.Decode(into.Addr().Interface()) != nil {
			mismatch("true or false")
		}
	case reflect.Int, reflect.Int64:
		if n.Tag != "!!int" || n.Decode(into.Addr().Interface()) != nil {
			mismatch("a whole number of at most 64 bits")
		}
	case reflect.Float64:
		if n.Tag != "!!int" && n.Tag != "!!float" || n.Decode(into.Addr().Interface()) != nil || math.IsInf(into.Float(), 0) {
			mismatch("a finite number")
		}
	default:
		panic(fmt.Sprintf("shapefile: %s is a %s", field, into.Type())) // the library has a new kind of field
	}
}

// pairs yields the entries of a mapping whose keys are texts, each once.
func (d *Document) pairs(n *yaml.Node, field string, yield func(key, value *yaml.Node)) {
	seen := make(map[string]int)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		first, twice := seen[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode || key.Tag != "!!str":
			d.fault(key.Line, field, fmt.Sprintf("a key is %s, must be a text", describe(key)))
		case twice:
			d.fault(key.Line, join(field, key.Value), fmt.Sprintf("is there twice, first in line %d", first))
		default:
			seen[key.Value] = key.Line
			yield(key, value)
		}
	}
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	if n.Tag == "!!null" {
		return "null"
	}
	return fmt.Sprintf("%q", n.Value)
}

// jsonFields returns the index of each field of a struct by its JSON name.
func jsonFields(t reflect.Type) map[string]int {
	fields := make(map[string]int, t.NumField())
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		fields[name] = i
	}
	return fields
}

// suggest names a field that differs only in its capital letters.
func suggest(name string, fields map[string]int) string {
	for known := range fields { // at most one can match
		if strings.EqualFold(known, name) {
			return fmt.Sprintf("; %q is", known)
		}
	}
	return ""
}
