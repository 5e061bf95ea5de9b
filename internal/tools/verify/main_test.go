package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestFailsOnAnyMiss: the table shows every figure, and what fails, misses its
// target, reports nothing or does not run fails the whole.
func TestFailsOnAnyMiss(t *testing.T) {
	passed := ""
	for _, name := range steps[0].tests {
		passed += "--- PASS: " + name + " (0.00s)\n"
	}
	last := steps[0].tests[len(steps[0].tests)-1]
	const figure = "=== RUN   TestX\n\nfigure\tTestX\tworlds\t12\t>= 10\tok\n"
	const bad = "\nfigure\tTestX\tworlds\t9\t>= 10\tMISSED\n"
	good := figure + passed
	for _, c := range []struct {
		name, output string
		err          error
		want         string // in the error; empty: none
	}{
		{"all is well", good, nil, ""},
		{"a figure misses its target", good + bad, nil, "1 figures missed"},
		{"a test fails", good, errors.New("exit status 1"), "exit status 1"},
		{"nothing is reported", passed, nil, "no figure was reported"},
		{"no test runs", figure, nil, "did not pass: " + strings.Join(steps[0].tests, ", ")},
		{"one of the tests has another name", strings.Replace(good, last, last+"s", 1), nil, "did not pass: " + last},
		{"one of the tests is skipped", strings.Replace(good, "PASS: "+last, "SKIP: "+last, 1), nil, "did not pass: " + last},
		{"one is a part of another", strings.Replace(good, "--- PASS: "+last, "    --- PASS: TestX/"+last, 1), nil, "did not pass: " + last},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			err := verify(&out, t.TempDir(), "bin/log", steps[0].name, 7, func(w io.Writer, _ string, _ step, seed uint64) error {
				if seed != 7 {
					t.Errorf("the seed is %d", seed)
				}
				fmt.Fprint(w, c.output)
				return c.err
			})
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, wanted %q", err, c.want)
			}
			if strings.Contains(c.output, "12") && !strings.Contains(out.String(), "worlds  12  >= 10  ok") {
				t.Errorf("the figure is not in the table:\n%s", &out)
			}
			if !strings.Contains(out.String(), "seed 7") {
				t.Errorf("the table does not name the seed:\n%s", &out)
			}
		})
	}
}

func TestUnknownStepFails(t *testing.T) {
	err := verify(io.Discard, t.TempDir(), "log", "no such step", 1, nil)
	if err == nil {
		t.Error("a name that no step has is accepted")
	}
}

// TestFuzzStepCountsInputs: of a fuzz step the figure is what go test says last.
func TestFuzzStepCountsInputs(t *testing.T) {
	for output, want := range map[string]string{
		"fuzz: elapsed: 3s, execs: 900 (300/sec), new interesting: 1 (total: 9)\nfuzz: elapsed: 6s, execs: 4000 (500/sec), new interesting: 1 (total: 9)\n": "4000",
		"fuzz: elapsed: 6s, execs: 0 (0/sec), new interesting: 1 (total: 9)\n":                                                                              "1 figures missed",
		"PASS\n": "1 figures missed",
	} {
		var out strings.Builder
		err := verify(&out, t.TempDir(), "log", "FuzzTrace", 7, func(w io.Writer, _ string, _ step, _ uint64) error {
			_, err := io.WriteString(w, output)
			return err
		})
		if got := fmt.Sprint(out.String(), err); !strings.Contains(got, want) {
			t.Errorf("after %q there is no %q in\n%s", output, want, got)
		}
	}
}

// TestStepsNameTests: every test that a step names is there.
func TestStepsNameTests(t *testing.T) {
	const root = "../../.."
	for _, s := range steps {
		if len(s.tests) == 0 && s.program == nil {
			t.Errorf("%s: no test is named", s.name)
		}
		files, err := filepath.Glob(filepath.Join(root, s.dir, s.pkg, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		var source strings.Builder
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			source.Write(text)
		}
		for _, name := range s.tests {
			if !strings.Contains(source.String(), "\nfunc "+name+"(") {
				t.Errorf("%s: there is no %s", s.name, name)
			}
		}
	}
}
