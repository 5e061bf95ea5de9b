// Command bench runs the benchmarks of the library so that they can be judged,
// and compares them with what they must reach. `make bench-scale` and `make
// bench-peers` call it, from the root of the repository.
//
// Subjects run in turn, each as a process of its own on one core, for several
// rounds: floor, naive driver, ours, and again. Machines are shared and wander,
// so absolute times are for the record; what is judged is the median of the
// ratios, and of the exponents, of single rounds. What is measured is CPU time.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

func main() {
	var c config
	flag.IntVar(&c.rounds, "rounds", 5, "how often each subject runs")
	flag.BoolVar(&c.short, "short", false, "few nodes and two rounds: to see that it runs, not to judge")
	flag.BoolVar(&c.peers, "peers", false, "compare with the peers in internal/bench/peers instead")
	flag.BoolVar(&c.write, "write", false, "write the outcome to internal/bench/RESULTS.md")
	flag.Parse()
	if err := run(c); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type config struct {
	rounds              int
	short, peers, write bool
}

const resultsFile = "internal/bench/RESULTS.md"

func run(c config) error {
	if c.rounds < 1 {
		return fmt.Errorf("-rounds is %d, must be positive", c.rounds)
	}
	if c.short && c.write {
		return fmt.Errorf("-short judges nothing, so there is nothing to write")
	}
	sizes, rounds := []int{1_000, 10_000, 100_000, 1_000_000}, c.rounds
	if c.short {
		sizes, rounds = sizes[:2], 2
	}
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	plan, musts := scalePlan(sizes), scaleMusts(sizes)
	title := "bench-scale"
	if c.peers {
		title = "bench-peers"
		plan, musts = peersPlan(sizes), peersMusts(sizes)
	}
	began := time.Now()
	measured, err := measureAll(plan, rounds, &builder{dir: dir})
	if err != nil {
		return err
	}
	report := report{
		title: title, at: began, took: time.Since(began), rounds: rounds, short: c.short, machine: thisMachine(),
		measured: measured, verdicts: judge(musts, measured),
	}
	if c.peers {
		if report.machine.versions, err = peerVersions(); err != nil {
			return err
		}
	}
	text := report.String()
	fmt.Print(text)
	if c.write {
		if err := writeSection(resultsFile, title, text); err != nil {
			return err
		}
	}
	return report.failure()
}

// peerVersions says what the peers are.
func peerVersions() ([]string, error) {
	list := exec.Command("go", "list", "-m", "k8s.io/client-go", "sigs.k8s.io/controller-runtime")
	list.Dir = filepath.FromSlash(peersDir)
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("asking for the versions of the peers: %w", err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n"), nil
}
