package main

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// point is a subject with so many nodes; 0 where the benchmark has no N.
type point struct {
	subject string // as the benchmark is called, without its N
	n       int
}

// metrics are the figures of one line, by their unit.
type metrics map[string]float64

// round holds what one round has measured.
type round map[point]metrics

// parse reads the output of a test binary into a round. Lines that are no
// benchmark are skipped, but for a failure, which is an error.
func (r round) parse(output io.Reader) error {
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		line := lines.Text()
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0:
		case fields[0] == "FAIL", fields[0] == "---" && len(fields) > 1 && fields[1] == "FAIL:", fields[0] == "panic:":
			return fmt.Errorf("a benchmark failed: %s", line)
		case strings.HasPrefix(fields[0], "Benchmark") && len(fields) > 1:
			if err := r.add(fields); err != nil {
				return fmt.Errorf("%w in %q", err, line)
			}
		}
	}
	return lines.Err()
}

// add takes a line: a name, the number of runs, and pairs of value and unit.
func (r round) add(fields []string) error {
	at := point{subject: strings.TrimPrefix(fields[0], "Benchmark")}
	if name, size, ok := strings.Cut(at.subject, "/N="); ok {
		size, _, _ = strings.Cut(size, "-") // the number of CPUs, if it is not 1
		n, err := strconv.Atoi(size)
		if err != nil {
			return err
		}
		at = point{name, n}
	}
	if _, twice := r[at]; twice {
		return fmt.Errorf("%v is measured twice", at)
	}
	if len(fields)%2 != 0 {
		return fmt.Errorf("a value without a unit")
	}
	found := metrics{}
	for i := 2; i < len(fields); i += 2 {
		value, err := strconv.ParseFloat(fields[i], 64)
		if err != nil {
			return err
		}
		found[fields[i+1]] = value
	}
	r[at] = found
	return nil
}
