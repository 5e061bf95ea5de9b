// Mutate changes the code in small ways and asks the tests whether they notice.
//
//	mutate -root DIR [-seed N] [-draw N] [-match TEXT] [-known FILE] [-also PACKAGE] [-slow PATTERN] [-args TEXT] file.go...
//
// All mutants of the files, which are of the package in DIR, are compiled into
// one test binary, that an environment variable turns into any one of them; so a
// mutant costs a run of the tests and no build. The tests run in their short
// form, first those beside the file that is changed, with what they draw fixed,
// so that a mutant has the same fate in every run.
//
// A mutant that no test notices is a survivor. The file of the known ones has
// those that make no difference, and why. Any other survivor fails, as does a
// known one that is noticed after all.
package main

import (
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
)

func main() {
	var o options
	flag.StringVar(&o.root, "root", ".", "directory of the package")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the draw")
	flag.IntVar(&o.draw, "draw", 0, "how many mutants to draw; 0: all of them")
	flag.StringVar(&o.match, "match", "", "take only mutants whose name contains this")
	flag.StringVar(&o.known, "known", "", "file of the survivors that make no difference")
	flag.StringVar(&o.also, "also", "", "package, from the root, whose tests are asked last")
	flag.StringVar(&o.slow, "slow", "", "pattern of the tests of the package that are asked last of all")
	flag.StringVar(&o.args, "args", "", "further arguments of the tests, separated by spaces")
	flag.IntVar(&o.floor, "floor", 90, "least efficacy, in percent")
	list := flag.Bool("list", false, "print the mutants and do nothing")
	flag.Parse()
	o.files = flag.Args()
	err := run(os.Stdout, o, *list)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

type options struct {
	root, match, known, also, slow, args string
	seed                                 uint64
	draw, floor                          int
	files                                []string
}

func run(out io.Writer, o options, list bool) error {
	source, err := load(o.root, o.files)
	if err != nil {
		return err
	}
	if list {
		for _, m := range source.mutants {
			fmt.Fprintln(out, m.name)
		}
		return nil
	}
	known, err := readKnown(o.known)
	if err != nil {
		return err
	}
	drawn := drawFrom(source.mutants, o)
	if len(drawn) == 0 {
		return fmt.Errorf("no mutant is named %q", o.match)
	}
	fmt.Fprintf(out, "seed %d: %d of %d mutants of %s\n", o.seed, len(drawn), len(source.mutants), strings.Join(o.files, " "))

	work, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work) // nobody needs it any more
	b, err := build(o, source, work)
	if err != nil {
		return err
	}
	survivors, late := b.tryAll(out, drawn)
	return judge(out, o, source.mutants, drawn, survivors, late, known)
}

func drawFrom(mutants []mutant, o options) []mutant {
	var drawn []mutant
	for _, m := range mutants {
		if strings.Contains(m.name, o.match) {
			drawn = append(drawn, m)
		}
	}
	if o.draw > 0 && o.draw < len(drawn) {
		random := rand.New(rand.NewPCG(o.seed, 0))
		random.Shuffle(len(drawn), func(i, j int) { drawn[i], drawn[j] = drawn[j], drawn[i] })
		drawn = drawn[:o.draw]
		slices.SortFunc(drawn, func(a, b mutant) int { return a.number - b.number })
	}
	return drawn
}

// readKnown reads names, each with the reason in the indented lines below it.
func readKnown(file string) (map[string]string, error) {
	known := make(map[string]string)
	if file == "" {
		return known, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	name := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		switch {
		case line == "" || line[0] == '#':
		case line[0] != '\t':
			if name = line; known[name] != "" {
				return nil, fmt.Errorf("%s: %q is listed twice", file, name)
			}
			known[name] = " "
		default:
			known[name] = strings.TrimSpace(known[name] + " " + strings.TrimSpace(line))
		}
	}
	for name, reason := range known {
		if strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s: %q has no reason", file, name)
		}
	}
	return known, nil
}

// judge prints what came of it as figures, in the form of internal/verify.
func judge(out io.Writer, o options, all, drawn, survivors []mutant, late int, known map[string]string) error {
	var problems []string
	equivalent := 0
	for _, m := range survivors {
		if known[m.name] != "" {
			equivalent++
			continue
		}
		problems = append(problems, "no test notices "+m.name)
	}
	for name := range known {
		if file, _, _ := strings.Cut(name, " "); !slices.Contains(o.files, file) {
			continue
		}
		named := func(m mutant) bool { return m.name == name }
		switch {
		case !slices.ContainsFunc(all, named):
			problems = append(problems, "listed, and not there: "+name)
		case slices.ContainsFunc(drawn, named) && !slices.ContainsFunc(survivors, named):
			problems = append(problems, "listed, and noticed: "+name)
		}
	}
	slices.Sort(problems)
	for _, p := range problems {
		fmt.Fprintln(out, p)
	}
	able := len(drawn) - equivalent
	efficacy := 100.0
	if able > 0 {
		efficacy = float64(100*(len(drawn)-len(survivors))) / float64(able)
	}
	figure := func(what string, got any, target string, ok bool) {
		verdict := "ok"
		if !ok {
			verdict = "MISSED"
		}
		fmt.Fprintf(out, "\nfigure\tmutate\t%s\t%v\t%s\t%s\n", what, got, target, verdict)
	}
	figure("mutants", fmt.Sprintf("%d of %d", len(drawn), len(all)), "", true)
	figure("of which make no difference", equivalent, "", true)
	figure("of which end in a timeout", late, "", true)
	figure("efficacy in percent", fmt.Sprintf("%.1f", efficacy), fmt.Sprintf(">= %d", o.floor), efficacy >= float64(o.floor))
	figure("survivors not listed, or listed and gone", len(problems), "= 0", len(problems) == 0)
	if len(problems) > 0 || efficacy < float64(o.floor) {
		return fmt.Errorf("%d problems, efficacy %.1f %%", len(problems), efficacy)
	}
	return nil
}

// tryAll asks the tests about every mutant, two at a time.
func (b *binaries) tryAll(out io.Writer, drawn []mutant) (survivors []mutant, late int) {
	var mu sync.Mutex
	var wait sync.WaitGroup
	open := make(chan mutant)
	for range 2 {
		wait.Go(func() {
			for m := range open {
				fate := b.try(m)
				mu.Lock()
				switch fate {
				case survived:
					survivors = append(survivors, m)
				case timedOut:
					late++
				}
				fmt.Fprintf(out, "%s\t%s\n", fate, m.name)
				mu.Unlock()
			}
		})
	}
	for _, m := range drawn {
		open <- m
	}
	close(open)
	wait.Wait()
	slices.SortFunc(survivors, func(a, b mutant) int { return a.number - b.number })
	return survivors, late
}
