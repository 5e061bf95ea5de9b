package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	sampleModule = "module sample\n\ngo 1.26.0\n"
	sampleCode   = `package sample

type kind uint8

const (
	add kind = iota
	most
	less
)

// Do has something for every kind of mutant.
func Do(k kind, a, b int) (sum int, done bool) {
	switch k {
	case add:
		sum = a + b
		done = true
	case most, less:
		sum = max(a, b)
		if k == less && a > 0 || b < 0 {
			sum = min(a, b) * 2
		}
		done = true
	}
	for i := 0; i < a && i < 10; i++ {
		if i == 3 {
			continue
		}
		sum++
	}
	return sum, done
}
`
	sampleTest = `package sample

import "testing"

func TestDo(t *testing.T) {
	for _, c := range [][4]int{{0, 1, 2, 4}, {0, -1, 2, 1}, {1, 2, 7, 9}, {1, 5, -7, -10}, {2, 2, 7, 6}, {2, 9, 1, 10}, {0, 4, 0, 7}, {1, 3, 0, 6}, {2, 2, 0, 2}, {2, -1, 1, 1}, {1, -3, -4, -8}} {
		sum, done := Do(kind(c[0]), c[1], c[2])
		if sum != c[3] || !done {
			t.Errorf("%v gives %d, %v", c, sum, done)
		}
	}
	if _, done := Do(7, 1, 1); done {
		t.Error("done what nobody knows")
	}
}
`
)

// TestFindsWhatNobodyNotices: the tests of the sample look at everything but a
// boundary, and the last turn of a loop that none of them reaches.
func TestFindsWhatNobodyNotices(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": sampleModule, "sample.go": sampleCode, "sample_test.go": sampleTest} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	err := run(&out, options{root: dir, floor: 90, files: []string{"sample.go"}}, false)
	want := []string{"SURVIVED\tsample.go Do: by one: a > 0", "SURVIVED\tsample.go Do: by one: i < 10", "SURVIVED\tsample.go Do: left out: i < 10"}
	var survived []string
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "SURVIVED") {
			survived = append(survived, strings.TrimSpace(line))
		}
	}
	slices.Sort(survived)
	if err == nil || !slices.Equal(survived, want) {
		t.Errorf("%v, survivors are %q in\n%s", err, survived, &out)
	}
}

// TestJudge: a survivor has to be listed with a reason, and what is listed to
// survive.
func TestJudge(t *testing.T) {
	one, two := mutant{1, "a.go", "a.go F: negated: x"}, mutant{2, "a.go", "a.go F: negated: y"}
	all := []mutant{one, two}
	for _, c := range []struct {
		name      string
		drawn     []mutant
		survivors []mutant
		known     map[string]string
		want      string // empty: it passes
	}{
		{"all are noticed", all, nil, nil, ""},
		{"one is known to make no difference", all, all[:1], map[string]string{one.name: "why"}, ""},
		{"one is not known", all, all[:1], nil, "no test notices " + one.name},
		{"a known one is noticed", all, nil, map[string]string{one.name: "why"}, "listed, and noticed: " + one.name},
		{"a known one is not drawn", all[1:], nil, map[string]string{one.name: "why"}, ""},
		{"a known one is gone", all, nil, map[string]string{"a.go F: negated: z": "why"}, "listed, and not there: a.go F: negated: z"},
		{"a known one is of another file", all, nil, map[string]string{"b.go F: negated: z": "why"}, ""},
	} {
		var out strings.Builder
		err := judge(&out, options{floor: 90, files: []string{"a.go"}}, all, c.drawn, c.survivors, 0, c.known)
		if (err == nil) != (c.want == "") || !strings.Contains(out.String(), c.want) {
			t.Errorf("%s: %v, there is no %q in\n%s", c.name, err, c.want, &out)
		}
	}
}

func TestReadKnown(t *testing.T) {
	file := filepath.Join(t.TempDir(), "known.txt")
	for text, want := range map[string]string{
		"# a comment\n\na.go F: negated: x\n\tit is\n\tso\n": "",
		"a.go F: negated: x\n":                               "has no reason",
		"a.go F\n\tyes\na.go F\n\tyes\n":                     "is listed twice",
	} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		known, err := readKnown(file)
		switch {
		case want == "" && (err != nil || known["a.go F: negated: x"] != "it is so"):
			t.Errorf("%q is read as %q, %v", text, known, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%q: %v, wanted %q", text, err, want)
		}
	}
}

// TestKnownMutantsAreThere: a name that no mutant bears any more would fail only
// the long run.
func TestKnownMutantsAreThere(t *testing.T) {
	known, err := readKnown("known.txt")
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for name := range known {
		if file, _, _ := strings.Cut(name, " "); !slices.Contains(files, file) {
			files = append(files, file)
		}
	}
	source, err := load("../../..", files)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range source.mutants {
		delete(known, m.name)
	}
	for name := range known {
		t.Errorf("there is no %s", name)
	}
}
