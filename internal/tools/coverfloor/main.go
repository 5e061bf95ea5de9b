// Coverfloor holds single files to a floor of statement coverage, so that a
// well covered file does not hide another one.
//
//	coverfloor -floor 95 -profile bin/cover.out decide.go driver.go
//
// A name says the end of a path in the profile. A file that the profile does
// not have, or has without a statement, is below every floor.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

func main() {
	floor := flag.Float64("floor", 95, "least covered statements of each file, in percent")
	profile := flag.String("profile", "", "what go test -coverprofile wrote")
	flag.Parse()
	if err := run(os.Stdout, *profile, *floor, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "coverfloor:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, profile string, floor float64, names []string) error {
	if len(names) == 0 {
		return fmt.Errorf("no files named")
	}
	f, err := os.Open(profile)
	if err != nil {
		return err
	}
	defer f.Close() // read only
	files, err := readProfile(f)
	if err != nil {
		return fmt.Errorf("%s: %w", profile, err)
	}
	var below []string
	for _, name := range names {
		var sum tally
		for path, t := range files {
			if strings.HasSuffix(path, "/"+name) {
				sum.covered += t.covered
				sum.all += t.all
			}
		}
		verdict := "ok"
		if sum.percent() < floor {
			verdict = "BELOW THE FLOOR"
			below = append(below, name)
		}
		fmt.Fprintf(out, "%-20s %5d of %5d statements %6.1f %%  %s\n", name, sum.covered, sum.all, sum.percent(), verdict)
	}
	if below != nil {
		return fmt.Errorf("below %v %%: %s", floor, strings.Join(below, ", "))
	}
	return nil
}

type tally struct{ covered, all int }

func (t tally) percent() float64 {
	if t.all == 0 {
		return 0
	}
	return 100 * float64(t.covered) / float64(t.all)
}

// readProfile counts the statements of each file. A run over several packages
// lists a block once for each of their test binaries: a block is covered if
// any of them ran it.
func readProfile(r io.Reader) (map[string]tally, error) {
	type block struct {
		path       string
		statements int
		ran        bool
	}
	blocks := make(map[string]block)
	lines := bufio.NewScanner(r)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), "mode: ") {
		return nil, fmt.Errorf("no coverage profile")
	}
	for lines.Scan() {
		// path/file.go:line.column,line.column statements count
		fields := strings.Fields(lines.Text())
		if len(fields) != 3 {
			return nil, fmt.Errorf("cannot read %q", lines.Text())
		}
		colon := strings.LastIndexByte(fields[0], ':')
		statements, errS := strconv.Atoi(fields[1])
		count, errC := strconv.ParseUint(fields[2], 10, 64)
		if colon < 0 || errS != nil || errC != nil {
			return nil, fmt.Errorf("cannot read %q", lines.Text())
		}
		blocks[fields[0]] = block{fields[0][:colon], statements, blocks[fields[0]].ran || count > 0}
	}
	files := make(map[string]tally)
	for _, b := range blocks {
		t := files[b.path]
		t.all += b.statements
		if b.ran {
			t.covered += b.statements
		}
		files[b.path] = t
	}
	return files, lines.Err()
}
