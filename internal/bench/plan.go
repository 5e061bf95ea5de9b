package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// child is a run of a test binary.
type child struct {
	binary  binary
	pattern string // of -test.bench
	once    bool   // in the first round only: what does not wander
}

// binary is a package whose tests are built once.
type binary struct {
	dir, pkg string
	tags     string
}

const peersDir = "internal/bench/peers"

var (
	ours       = binary{".", ".", ""}
	queues     = binary{peersDir, "./queue", ""}
	controller = binary{peersDir, "./controller", "peers"}
)

// scalePlan lists the children of a round, subject after subject at one size, so
// that those which are compared run close together.
func scalePlan(sizes []int) (plan []child) {
	for _, n := range sizes {
		for _, benchmark := range []string{"EventOneAtATime", "ConvergeBatched"} {
			for _, subject := range []string{"floor", "naive", "ours"} {
				measured := sizes
				if subject == "naive" {
					// The first events of many nodes say little more, and
					// are slow.
					measured = naiveSizes(sizes)
					if benchmark == "EventOneAtATime" {
						measured = sizes[:1]
					}
				}
				if slices.Contains(measured, n) {
					plan = append(plan, child{binary: ours, pattern: fmt.Sprintf("^Benchmark%s$/^%s$/^N=%d$", benchmark, subject, n)})
				}
			}
		}
		plan = append(plan,
			// A settled cluster for each of these two, and all that is asked of it.
			child{binary: ours, pattern: fmt.Sprintf("^Benchmark(SettledFullPass|SettledDrive|Snapshot|ScheduleOverhead|Converged)$/^N=%d$", n)},
			child{binary: ours, pattern: fmt.Sprintf("^BenchmarkUpdateDesired$/^(same|one-more|groups|to-zero)$/^N=%d$", n)},
			child{binary: ours, pattern: fmt.Sprintf("^BenchmarkUpdateDesired$/^to-zero-floor$/^N=%d$", n)},
			child{binary: ours, pattern: fmt.Sprintf("^BenchmarkWakeOneDue$/^N=%d$", n)},
		)
		if slices.Contains(memorySizes(sizes), n) {
			plan = append(plan,
				child{ours, fmt.Sprintf("^BenchmarkBytesPerNode$/^small$/^N=%d$", n), true},
				child{ours, fmt.Sprintf("^BenchmarkBytesPerNode$/^rich$/^N=%d$", n), true},
			)
		}
	}
	host := hostSize(sizes)
	for _, subject := range []string{"driver", "inline", "goroutines", "host"} {
		plan = append(plan, child{binary: ours, pattern: fmt.Sprintf("^BenchmarkExecutorPath$/^%s$/^N=%d$", subject, host)})
	}
	for _, subject := range []string{"free", "places", "fake"} {
		plan = append(plan, child{binary: ours, pattern: fmt.Sprintf("^BenchmarkWholeWay$/^%s$/^N=%d$", subject, host)})
	}
	return append(plan,
		child{binary: ours, pattern: fmt.Sprintf("^BenchmarkHerd$/^free$/^N=%d$", host)},
		child{binary: ours, pattern: fmt.Sprintf("^BenchmarkHerd$/^places$/^N=%d$", host)},
		child{ours, "^BenchmarkChurnBounded$", true},
	)
}

// peersPlan lists what is compared with peers, and those.
func peersPlan(sizes []int) (plan []child) {
	for _, n := range sizes {
		if slices.Contains(peerSizes(sizes), n) {
			plan = append(plan,
				child{binary: ours, pattern: fmt.Sprintf("^BenchmarkEventOneAtATime$/^ours$/^N=%d$", n)},
				child{binary: ours, pattern: fmt.Sprintf("^BenchmarkConvergeBatched$/^ours$/^N=%d$", n)},
			)
			for _, subject := range []string{"workqueue-one-at-a-time", "priority-one-at-a-time", "workqueue-as-they-come", "priority-as-they-come"} {
				plan = append(plan, child{binary: controller, pattern: fmt.Sprintf("^BenchmarkControllerRuntime$/^%s$/^N=%d$", subject, n)})
			}
		}
		plan = append(plan,
			child{binary: ours, pattern: fmt.Sprintf("^BenchmarkScheduleOverhead$/^N=%d$", n)},
			child{binary: queues, pattern: fmt.Sprintf("^BenchmarkWorkqueue$/^N=%d$", n)},
		)
	}
	return plan
}

// naiveSizes are those at which the naive driver climbs in less than a minute,
// peerSizes those at which the peers do.
func naiveSizes(sizes []int) []int { return upTo(sizes, 100_000) }
func peerSizes(sizes []int) []int  { return upTo(sizes, 100_000) }

// memorySizes are the two largest, hostSize that of what runs in real time.
func memorySizes(sizes []int) []int { return sizes[len(sizes)-2:] }
func hostSize(sizes []int) int      { return slices.Max(upTo(sizes, 100_000)) }

func upTo(sizes []int, limit int) []int {
	return slices.DeleteFunc(slices.Clone(sizes), func(n int) bool { return n > limit })
}

// builder builds each test binary once.
type builder struct {
	dir   string
	built map[binary]string
}

func (b *builder) path(of binary) (string, error) {
	if path, ok := b.built[of]; ok {
		return path, nil
	}
	path := filepath.Join(b.dir, fmt.Sprintf("bench%d.test", len(b.built)))
	build := exec.Command("go", "test", "-c", "-tags", of.tags, "-o", path, of.pkg)
	build.Dir, build.Stdout, build.Stderr = filepath.FromSlash(of.dir), os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		return "", fmt.Errorf("building the tests of %s in %s: %w", of.pkg, of.dir, err)
	}
	if b.built == nil {
		b.built = make(map[binary]string)
	}
	b.built[of] = path
	return path, nil
}

// measureAll runs the plan, round after round.
func measureAll(plan []child, count int, b *builder) (rounds, error) {
	var all rounds
	for i := range count {
		r, began := round{}, time.Now()
		for _, c := range plan {
			if c.once && i > 0 {
				continue
			}
			path, err := b.path(c.binary)
			if err != nil {
				return nil, err
			}
			if err := r.run(path, c); err != nil {
				return nil, err
			}
		}
		all = append(all, r)
		fmt.Fprintf(os.Stderr, "round %d of %d took %v\n", i+1, count, time.Since(began).Round(time.Second))
	}
	return all, nil
}

// run runs a child, which has to measure something.
func (r round) run(path string, c child) error {
	before := len(r)
	child := exec.Command(path, "-test.run", "^$", "-test.bench", c.pattern, "-test.benchtime", "100ms")
	child.Dir = filepath.FromSlash(c.binary.dir)
	child.Env = append(environment(os.Environ()), "GOMAXPROCS=1")
	child.Stderr = os.Stderr
	out, err := child.Output()
	if err == nil {
		err = r.parse(bytes.NewReader(out))
	}
	if err == nil && len(r) == before {
		err = fmt.Errorf("nothing was measured")
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", c.pattern, err, out)
	}
	return nil
}

// environment leaves out what would change how the runtime behaves.
func environment(of []string) []string {
	return slices.DeleteFunc(slices.Clone(of), func(entry string) bool {
		for _, name := range []string{"GOGC=", "GOMEMLIMIT=", "GOMAXPROCS=", "GODEBUG="} {
			if len(entry) >= len(name) && entry[:len(name)] == name {
				return true
			}
		}
		return false
	})
}
