package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// report is what is printed and written: the machine, the verdicts, the figures.
type report struct {
	title    string
	at       time.Time
	took     time.Duration
	rounds   int
	short    bool
	machine  machine
	measured rounds
	verdicts []verdict
}

type machine struct {
	cpu      string
	cores    int
	system   string
	goes     string   // the version of Go
	versions []string // of what was compared with
}

func thisMachine() machine {
	return machine{cpu: cpuModel(), cores: runtime.NumCPU(), system: runtime.GOOS + "/" + runtime.GOARCH, goes: runtime.Version()}
}

// cpuModel is what the system calls its processor; where it cannot be asked this
// way, "unknown CPU".
func cpuModel() string {
	file, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown CPU"
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown CPU"
}

// String is Markdown.
func (r report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "## %s\n\n%s, %s, %d cores, %s, %s", r.title, r.at.UTC().Format("2006-01-02"), r.machine.cpu, r.machine.cores, r.machine.system, r.machine.goes)
	for _, version := range r.machine.versions {
		fmt.Fprintf(&b, ", %s", version)
	}
	fmt.Fprintf(&b, "; %d rounds in %v.\n", r.rounds, r.took.Round(time.Second))
	if r.short {
		b.WriteString("A short run: it shows that everything runs and judges nothing.\n")
	}
	b.WriteString("\n| benchmark | must | limit | measured | |\n|---|---|---|---|---|\n")
	for _, v := range r.verdicts {
		sign, said := "≤", "pass"
		if v.atLeast {
			sign = "≥"
		}
		if math.IsNaN(v.figure) {
			said = "**not measured**"
		} else if !v.passed() {
			said = "**miss**"
		}
		fmt.Fprintf(&b, "| %s | %s | %s %s | %s | %s |\n", v.benchmark, v.what, sign, figure(v.limit), figure(v.figure), said)
	}
	missed, unmeasured := r.counts()
	fmt.Fprintf(&b, "\n%d of %d reached.\n", len(r.verdicts)-missed-unmeasured, len(r.verdicts))

	b.WriteString("\n| median of | N | |\n|---|---|---|\n")
	for _, p := range r.points() {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", p.subject, sizeText(p.n), r.figures(p))
	}
	if exponents := r.exponents(); exponents != "" {
		fmt.Fprintf(&b, "\n| grows with N to the power of | |\n|---|---|\n%s", exponents)
	}
	return b.String()
}

// counts returns how many musts were missed and how many were not measured.
func (r report) counts() (missed, unmeasured int) {
	for _, v := range r.verdicts {
		if math.IsNaN(v.figure) {
			unmeasured++
		} else if !v.passed() {
			missed++
		}
	}
	return missed, unmeasured
}

// failure is what the whole run comes to. A short one misses nothing, but what
// it does not measure the long one would not either.
func (r report) failure() error {
	missed, unmeasured := r.counts()
	switch {
	case unmeasured > 0:
		return fmt.Errorf("%d of %d musts were not measured", unmeasured, len(r.verdicts))
	case missed > 0 && !r.short:
		return fmt.Errorf("%d of %d musts were missed", missed, len(r.verdicts))
	}
	return nil
}

func sizeText(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

// points are all that were measured, by name and size.
func (r report) points() []point {
	all := map[point]bool{}
	for _, round := range r.measured {
		for p := range round {
			all[p] = true
		}
	}
	return slices.SortedFunc(maps.Keys(all), func(a, b point) int {
		return cmp.Or(cmp.Compare(a.subject, b.subject), cmp.Compare(a.n, b.n))
	})
}

// unlisted units say nothing about a subject by themselves.
var unlisted = []string{"ns/op", "B/op", "digest"}

// figures lists the medians of a point.
func (r report) figures(p point) string {
	units := map[string]bool{}
	for _, round := range r.measured {
		for unit := range round[p] {
			units[unit] = !slices.Contains(unlisted, unit)
		}
	}
	var texts []string
	for _, unit := range slices.Sorted(maps.Keys(units)) {
		if units[unit] {
			texts = append(texts, figure(r.measured.value(p.subject, p.n, unit))+" "+unit)
		}
	}
	return strings.Join(texts, ", ")
}

// exponents lists how the cost of each subject grows that was measured at more
// than one size.
func (r report) exponents() string {
	var b strings.Builder
	bySubject := map[string][]int{}
	for _, p := range r.points() {
		bySubject[p.subject] = append(bySubject[p.subject], p.n)
	}
	for _, subject := range slices.Sorted(maps.Keys(bySubject)) {
		sizes := bySubject[subject]
		if len(sizes) < 2 {
			continue
		}
		for _, unit := range []string{perEvent, perNode, perUpdate, "cpu-ns/pass", "cpu-ns/call", "cpu-ns/wake"} {
			if grows := r.measured.growth(subject, sizes, unit); !math.IsNaN(grows) {
				fmt.Fprintf(&b, "| %s, %s | %.2f |\n", subject, unit, grows)
			}
		}
	}
	return b.String()
}

// figure keeps three digits.
func figure(v float64) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case v == math.Trunc(v) || math.Abs(v) >= 100:
		return strconv.FormatFloat(math.Round(v), 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// writeSection puts a section in the place of the one with the same title, or at
// the end of the file.
func writeSection(path, title, text string) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(path, []byte(withSection(string(old), title, text)), 0o666)
}

const resultsHead = `# Results

Written by ` + "`make bench-scale BENCHFLAGS=-write`" + ` and ` + "`make bench-peers BENCHFLAGS=-write`" + `. CPU time, one core; ratios
and exponents are medians of those of single rounds.
`

func withSection(old, title, text string) string {
	if old == "" {
		old = resultsHead
	}
	text = strings.TrimSpace(text) + "\n"
	before, rest, found := strings.Cut(old, "## "+title+"\n")
	if !found {
		return strings.TrimRight(old, "\n") + "\n\n" + text
	}
	if _, after, more := strings.Cut(rest, "\n## "); more {
		return before + text + "\n## " + after
	}
	return before + text
}
