package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// fate is what becomes of a mutant.
type fate string

const (
	noticed  fate = "noticed"
	timedOut fate = "timed out" // which is noticed, too
	survived fate = "SURVIVED"
)

// binaries are the tests with all mutants in them.
type binaries struct {
	runs map[string][]testRun // by the file that is changed, in order
	args []string
}

// testRun is one run of tests, and how long it may take.
type testRun struct {
	binary, dir string
	args        []string
	limit       time.Duration
}

// build compiles the tests and sees them pass while there is no mutant.
func build(o options, s *source, work string) (*binaries, error) {
	root, err := filepath.Abs(o.root)
	if err != nil {
		return nil, err
	}
	overlay := struct{ Replace map[string]string }{make(map[string]string)}
	put := func(name string, text []byte) error {
		file := filepath.Join(work, name)
		overlay.Replace[filepath.Join(root, name)] = file
		return os.WriteFile(file, text, 0o644)
	}
	for name, text := range s.changed {
		if err := put(name, text); err != nil {
			return nil, err
		}
	}
	if err := put("mutant__.go", []byte("package "+s.name+switchboard)); err != nil {
		return nil, err
	}
	text, err := json.Marshal(overlay)
	if err != nil {
		return nil, err
	}
	overlayFile := filepath.Join(work, "overlay.json")
	if err := os.WriteFile(overlayFile, text, 0o644); err != nil {
		return nil, err
	}
	b := &binaries{runs: make(map[string][]testRun), args: strings.Fields(o.args)}
	var last []testRun
	for i, pkg := range []string{".", o.also} {
		if pkg == "" {
			continue
		}
		binary := filepath.Join(work, fmt.Sprintf("tests%d", i))
		c := exec.Command("go", "test", "-c", "-overlay", overlayFile, "-o", binary, "./"+pkg)
		c.Dir, c.Stderr = root, os.Stderr
		if err := c.Run(); err != nil {
			return nil, fmt.Errorf("compiling the mutants: %w", err)
		}
		last = append(last, testRun{binary: binary, dir: filepath.Join(root, pkg)})
	}
	if o.slow != "" {
		slow := last[0]
		last[0].args, slow.args = []string{"-test.skip", o.slow}, []string{"-test.run", o.slow}
		last = append(last, slow)
	}
	for name := range s.changed {
		beside, err := testsOf(filepath.Join(root, strings.TrimSuffix(name, ".go")+"_test.go"))
		if err != nil {
			return nil, err
		}
		if beside != "" {
			b.runs[name] = append(b.runs[name], testRun{binary: last[0].binary, dir: root, args: []string{"-test.run", beside}})
		}
		b.runs[name] = append(b.runs[name], last...)
	}
	known := make(map[string]time.Duration)
	for name := range s.changed {
		for i := range b.runs[name] {
			r := &b.runs[name][i]
			what := fmt.Sprint(*r)
			if known[what] == 0 {
				r.limit = 10 * time.Minute
				start := time.Now()
				if f, out := b.run(*r, 0); f != survived {
					return nil, fmt.Errorf("the tests fail without a mutant:\n%s", out)
				}
				known[what] = 10*time.Second + 5*time.Since(start)
			}
			r.limit = known[what]
		}
	}
	return b, nil
}

// testsOf returns a pattern of the tests in a file, empty if there are none.
func testsOf(file string) (string, error) {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var names []string
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Test") {
			names = append(names, fn.Name.Name)
		}
	}
	if names == nil {
		return "", nil
	}
	return "^(" + strings.Join(names, "|") + ")$", nil
}

// try asks the tests about a mutant until some notice.
func (b *binaries) try(m mutant) fate {
	for _, r := range b.runs[m.file] {
		if f, _ := b.run(r, m.number); f != survived {
			return f
		}
	}
	return survived
}

// mostMemory is what a run may take, in KiB: a mutant may ask for all there is.
const mostMemory = 6 << 20

// run runs tests with a mutant; 0 is none.
func (b *binaries) run(r testRun, number int) (fate, string) {
	ctx, stop := context.WithTimeout(context.Background(), r.limit)
	defer stop()
	c := exec.CommandContext(ctx, "sh", slices.Concat([]string{"-c", fmt.Sprintf(`ulimit -v %d; exec "$0" "$@"`, mostMemory), r.binary,
		"-test.short", "-test.failfast"}, b.args, r.args)...)
	c.Dir = r.dir
	c.Env = append(os.Environ(), "MUTANT="+strconv.Itoa(number))
	c.WaitDelay = time.Second
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	var failed *exec.ExitError
	switch {
	case err == nil:
		return survived, out.String()
	case ctx.Err() != nil:
		return timedOut, out.String()
	case !errors.As(err, &failed) && !errors.Is(err, exec.ErrWaitDelay):
		panic(fmt.Sprintf("mutate: the tests were not run: %v", err)) // so nobody has noticed anything
	}
	return noticed, out.String()
}
