// Verify runs the full forms of the tests that have one, and prints what they
// have covered as a table. It fails if a test fails or a figure misses its
// target.
//
//	verify -root DIR [-seed N] [-only TEXT] [-log FILE]
//
// What the tests draw follows from the seed, which the table names, and so do the
// programs that the histories run; how their goroutines come after one another
// does not, and neither does what the fuzz targets try.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

func main() {
	root := flag.String("root", ".", "root of the repository")
	seed := flag.Uint64("seed", 0, "seed of everything random; 0 takes one from the time")
	only := flag.String("only", "", "run the steps whose name contains this")
	log := flag.String("log", "bin/verify.log", "file, from the root, that takes the output of the tests")
	flag.Parse()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	if err := verify(os.Stdout, *root, *log, *only, *seed, goTest); err != nil {
		fmt.Fprintln(os.Stderr, "verify:", err)
		os.Exit(1)
	}
}

// row is a line of the table.
type row struct {
	step, test, what, got, target, verdict string
}

// runner runs one step and writes its output.
type runner func(out io.Writer, root string, s step, seed uint64) error

func verify(out io.Writer, root, logName, only string, seed uint64, run runner) error {
	logName = filepath.Join(root, filepath.FromSlash(logName))
	if err := os.MkdirAll(filepath.Dir(logName), 0o755); err != nil {
		return err
	}
	log, err := os.Create(logName)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "seed %d, output in %s\n", seed, logName)
	rows, problems := runSteps(out, log, root, only, seed, run)
	printTable(out, rows)
	return errors.Join(append(problems, log.Close())...)
}

func runSteps(out io.Writer, log io.Writer, root, only string, seed uint64, run runner) (rows []row, problems []error) {
	ran := 0
	for _, s := range steps {
		if !strings.Contains(s.name, only) {
			continue
		}
		ran++
		fmt.Fprintf(out, "%s ... ", s.name)
		fmt.Fprintf(log, "=== %s\n", s.name)
		start := time.Now()
		var text strings.Builder
		err := run(io.MultiWriter(log, &text), root, s, seed)
		took := time.Since(start).Round(100 * time.Millisecond)
		output := text.String()
		if s.fuzz > 0 && err == nil {
			output += fuzzFigure(s, output)
		}
		found, missed := figures(s, output)
		absent := notPassed(s, output)
		rows = append(append(rows, found...), row{s.name, "", "time", took.String(), "", ""})
		switch {
		case err != nil:
			problems = append(problems, fmt.Errorf("%s: %w", s.name, err))
		case missed > 0:
			problems = append(problems, fmt.Errorf("%s: %d figures missed", s.name, missed))
		case len(absent) > 0:
			problems = append(problems, fmt.Errorf("%s: did not run or did not pass: %s", s.name, strings.Join(absent, ", ")))
		case len(found) == 0:
			problems = append(problems, fmt.Errorf("%s: no figure was reported", s.name))
		default:
			fmt.Fprintf(out, "ok after %v\n", took)
			continue
		}
		fmt.Fprintf(out, "FAILED after %v\n", took)
	}
	if ran == 0 {
		problems = append(problems, fmt.Errorf("no step is named %q", only))
	}
	return rows, problems
}

// figures finds the lines of internal/verify in the output of go test.
func figures(s step, output string) (rows []row, missed int) {
	lines := bufio.NewScanner(strings.NewReader(output))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		fields := strings.Split(lines.Text(), "\t")
		if len(fields) != 6 || fields[0] != "figure" {
			continue
		}
		rows = append(rows, row{s.name, fields[1], fields[2], fields[3], fields[4], fields[5]})
		if fields[5] != "ok" {
			missed++
		}
	}
	return rows, missed
}

// notPassed returns those of the step's tests of which go test -v does not say
// that they have run and passed.
func notPassed(s step, output string) (absent []string) {
	for _, name := range s.tests {
		if !regexp.MustCompile(`(?m)^--- PASS: ` + name + ` `).MatchString(output) {
			absent = append(absent, name)
		}
	}
	return absent
}

// fuzzed matches what go test says while it fuzzes: how many inputs by then.
var fuzzed = regexp.MustCompile(`(?m)^fuzz: elapsed: .*, execs: ([0-9]+) `)

// fewestInputs is what a fuzzer that works tries in a minute, on any machine.
const fewestInputs = 1000

// fuzzFigure makes a figure of what go test said while it fuzzed. How many inputs
// a minute is good for is up to the machine, and whatever else runs on it.
func fuzzFigure(s step, output string) string {
	inputs := 0
	for _, line := range fuzzed.FindAllStringSubmatch(output, -1) {
		if n, err := strconv.Atoi(line[1]); err == nil {
			inputs = max(inputs, n)
		}
	}
	verdict := "ok"
	if inputs < fewestInputs {
		verdict = "MISSED"
	}
	return fmt.Sprintf("\nfigure\t%s\tinputs in %v\t%d\t>= %d\t%s\n", s.tests[0], s.fuzz, inputs, fewestInputs, verdict)
}

func printTable(out io.Writer, rows []row) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	last := ""
	for _, r := range rows {
		if r.step != last {
			fmt.Fprintf(table, "\n%s\n", r.step)
			last = r.step
		}
		fmt.Fprintf(table, "  %s\t%s\t%s\t%s\n", r.what, r.got, r.target, r.verdict)
	}
	table.Flush()
}

// goTest runs a step with the go command.
func goTest(out io.Writer, root string, s step, seed uint64) error {
	ctx, stop := context.WithTimeout(context.Background(), s.timeout+time.Minute) // go test has the same limit, and says more
	defer stop()
	c := exec.CommandContext(ctx, "go", arguments(s, seed)...)
	c.Dir = filepath.Join(root, filepath.FromSlash(s.dir))
	c.Stdout, c.Stderr = out, out
	return c.Run()
}

func arguments(s step, seed uint64) []string {
	if s.program != nil {
		return append([]string{"run", s.program[0], "-seed", strconv.FormatUint(seed, 10)}, s.program[1:]...)
	}
	if s.fuzz > 0 { // what it finds it writes under testdata/fuzz
		return []string{"test", "-v", "-run", "^$", "-fuzz", "^" + s.tests[0] + "$", "-fuzztime", s.fuzz.String(), "-fuzzminimizetime", "2s",
			"-timeout", s.timeout.String(), s.pkg}
	}
	args := []string{"test", "-v", "-count=1", "-timeout", s.timeout.String(), "-run", "^(" + strings.Join(s.tests, "|") + ")$"}
	if s.race {
		args = append(args, "-race")
	}
	args = append(args, s.pkg, "-args", "-verify", "-verify.seed", strconv.FormatUint(seed, 10))
	if s.checks > 0 {
		args = append(args, "-rapid.checks", strconv.Itoa(s.checks), "-rapid.seed", strconv.FormatUint(seed, 10))
	}
	return args
}
