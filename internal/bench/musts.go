package main

import (
	"fmt"
	"math"
	"slices"
)

// must is what a benchmark has to reach.
type must struct {
	benchmark string
	what      string
	limit     float64
	atLeast   bool // else at most
	measure   func(rounds) float64
}

// verdict is what came of a must. One that was not measured has not passed.
type verdict struct {
	must
	figure float64 // not a number if it was not measured
}

func (v verdict) passed() bool {
	if v.atLeast {
		return v.figure >= v.limit
	}
	return v.figure <= v.limit
}

func judge(musts []must, measured rounds) []verdict {
	verdicts := make([]verdict, len(musts))
	for i, m := range musts {
		verdicts[i] = verdict{m, m.measure(measured)}
	}
	return verdicts
}

const (
	perEvent  = "cpu-ns/event"
	perNode   = "cpu-ns/node"
	perUpdate = "cpu-ns/update"
)

// scaleMusts are those of our own subjects, for the sizes that are measured.
func scaleMusts(sizes []int) []must {
	var all []must
	atMost := func(benchmark, what string, limit float64, measure func(rounds) float64) {
		all = append(all, must{benchmark: benchmark, what: what, limit: limit, measure: measure})
	}
	atLeast := func(benchmark, what string, limit float64, measure func(rounds) float64) {
		all = append(all, must{benchmark: benchmark, what: what, limit: limit, atLeast: true, measure: measure})
	}
	largest := sizes[len(sizes)-1]
	value := func(subject string, n int, unit string) func(rounds) float64 {
		return func(rs rounds) float64 { return rs.value(subject, n, unit) }
	}
	floorRatio := func(benchmark string, n int) func(rounds) float64 {
		return func(rs rounds) float64 { return rs.ratio(benchmark+"/ours", benchmark+"/floor", n, perEvent) }
	}

	for _, benchmark := range []string{"EventOneAtATime", "ConvergeBatched"} {
		for _, n := range sizes {
			atMost(benchmark, fmt.Sprintf("ours / floor at %d", n), 4, floorRatio(benchmark, n))
		}
	}
	atMost("EventOneAtATime", "exponent of ns/event", 0.25, func(rs rounds) float64 {
		return rs.growth("EventOneAtATime/ours", sizes, perEvent)
	})
	atLeast("EventOneAtATime", "naive / ours at 1000", 500, func(rs rounds) float64 {
		return rs.ratio("EventOneAtATime/naive", "EventOneAtATime/ours", 1_000, perEvent)
	})
	for _, n := range naiveSizes(sizes) {
		atLeast("ConvergeBatched", fmt.Sprintf("naive / ours at %d", n), 3, func(rs rounds) float64 {
			return rs.ratio("ConvergeBatched/naive", "ConvergeBatched/ours", n, perEvent)
		})
	}
	for _, benchmark := range []string{"EventOneAtATime", "ConvergeBatched"} {
		for _, n := range sizes {
			atMost(benchmark, fmt.Sprintf("digests that differ from the floor's at %d", n), 0, func(rs rounds) float64 {
				return float64(rs.disagreements(benchmark, n))
			})
		}
	}
	atMost("SettledFullPass", fmt.Sprintf("ns a node at %d", largest), 30, value("SettledFullPass", largest, perNode))
	atMost("SettledFullPass", "allocations at the largest N less those at the smallest", 0, func(rs rounds) float64 {
		return rs.value("SettledFullPass", largest, "allocs/op") - rs.value("SettledFullPass", sizes[0], "allocs/op")
	})
	for _, n := range sizes {
		atMost("SettledDrive", fmt.Sprintf("ns at %d", n), 100, value("SettledDrive", n, "cpu-ns/pass"))
		atMost("SettledDrive", fmt.Sprintf("allocations at %d", n), 0, value("SettledDrive", n, "allocs/op"))
	}
	atMost("WakeOneDue", fmt.Sprintf("ns at %d", largest), 2_000, value("WakeOneDue", largest, "cpu-ns/wake"))
	atMost("WakeOneDue", "exponent", 0.25, func(rs rounds) float64 { return rs.growth("WakeOneDue", sizes, "cpu-ns/wake") })
	atMost("UpdateDesired", fmt.Sprintf("same shape, ns at %d", largest), 20_000, value("UpdateDesired/same", largest, perUpdate))
	atMost("UpdateDesired", fmt.Sprintf("one node more, ns at %d", largest), 20_000, value("UpdateDesired/one-more", largest, perUpdate))
	atMost("UpdateDesired", fmt.Sprintf("to zero, ours / floor at %d", largest), 4, func(rs rounds) float64 {
		return rs.ratio("UpdateDesired/to-zero", "UpdateDesired/to-zero-floor", largest, perEvent)
	})
	for _, n := range sizes {
		atMost("Converged", fmt.Sprintf("ns at %d", n), 50, value("Converged", n, "cpu-ns/call"))
	}
	atMost("Snapshot", fmt.Sprintf("ms that events wait at a time at %d", largest), 50, value("Snapshot", largest, "longest-ms"))
	for _, n := range memorySizes(sizes) {
		atMost("BytesPerNode", fmt.Sprintf("bytes, small specs at %d", n), 500, value("BytesPerNode/small", n, "B/node"))
		atMost("BytesPerNode", fmt.Sprintf("bytes, rich specs at %d", n), 500, value("BytesPerNode/rich", n, "B/node"))
		atMost("BytesPerNode", fmt.Sprintf("rich / small at %d", n), 1.05, func(rs rounds) float64 {
			return rs.ratio("BytesPerNode/rich", "BytesPerNode/small", n, "B/node")
		})
	}
	atMost("BytesPerNode", fmt.Sprintf("peak RSS in GB at %d", largest), 1.5, func(rs rounds) float64 {
		return max(rs.value("BytesPerNode/small", largest, "peak-B"), rs.value("BytesPerNode/rich", largest, "peak-B")) / 1e9
	})
	atMost("ChurnBounded", "bytes a finished operation", 1, value("ChurnBounded", 0, "B/operation"))
	host := hostSize(sizes)
	for _, way := range []string{"inline", "goroutines"} {
		atMost("ExecutorPath", fmt.Sprintf("%s, ns an operation on top at %d", way, host), 500, func(rs rounds) float64 {
			return median(rs.each(func(value func(string, int, string) float64) float64 {
				return onTop(value, way, host)
			}))
		})
	}
	atMost("ExecutorPath", fmt.Sprintf("goroutines a node at %d", host), 1.1, func(rs rounds) float64 {
		return rs.value("ExecutorPath/goroutines", host, "goroutines") / float64(host)
	})
	for _, places := range []string{"free", "places"} {
		atMost("Herd", fmt.Sprintf("%s, a refusal / an event of ConvergeBatched at %d", places, host), 4, func(rs rounds) float64 {
			return median(rs.each(func(value func(string, int, string) float64) float64 {
				return value("Herd/"+places, host, perEvent) / value("ConvergeBatched/ours", host, perEvent)
			}))
		})
	}
	atMost("WholeWay", fmt.Sprintf("with the fake / driver and executor at %d", host), 2, func(rs rounds) float64 {
		return median(rs.each(func(value func(string, int, string) float64) float64 {
			return value("WholeWay/free", host, perNode) / driverAndExecutor(value, host)
		}))
	})
	atMost("WholeWay", fmt.Sprintf("without the fake's own calls / driver and executor at %d", host), 2, func(rs rounds) float64 {
		return median(rs.each(func(value func(string, int, string) float64) float64 {
			return (value("WholeWay/free", host, perNode) - value("WholeWay/fake", host, perNode)) / driverAndExecutor(value, host)
		}))
	})
	return all
}

// A node climbs with five events, of which three are the ends of operations.
const eventsPerNode, operationsPerNode = 5, 3

// onTop is what an operation costs beside the driver.
func onTop(value func(string, int, string) float64, way string, n int) float64 {
	return (value("ExecutorPath/"+way, n, perEvent) - value("ExecutorPath/driver", n, perEvent)) * eventsPerNode / operationsPerNode
}

// driverAndExecutor is what a node costs with the calls on goroutines.
func driverAndExecutor(value func(string, int, string) float64, n int) float64 {
	return value("ExecutorPath/goroutines", n, perEvent) * eventsPerNode
}

// disagreements counts, over all rounds, the subjects of a benchmark whose
// digest is not the floor's. A floor without one is a disagreement too.
func (rs rounds) disagreements(benchmark string, n int) (count int) {
	for _, r := range rs {
		want, known := r[point{benchmark + "/floor", n}]["digest"]
		if !known {
			count++
		}
		for _, subject := range []string{"/ours", "/naive"} {
			if digest, ok := r[point{benchmark + subject, n}]["digest"]; ok && digest != want {
				count++
			}
		}
	}
	return count
}

// peersMusts compare with what others have built. Like goes with like: a queue
// that makes one reconcile of several events belongs beside our batches; that is
// in the figures and not judged.
func peersMusts(sizes []int) []must {
	var all []must
	for _, n := range peerSizes(sizes) {
		for _, queue := range []string{"workqueue", "priority"} {
			peer := "ControllerRuntime/" + queue + "-one-at-a-time"
			all = append(all, must{"EventOneAtATime", fmt.Sprintf("controller-runtime with %s / ours at %d", queue, n), 6, true, func(rs rounds) float64 {
				return rs.ratio(peer, "EventOneAtATime/ours", n, perEvent)
			}})
			all = append(all, must{"EventOneAtATime", fmt.Sprintf("digests of controller-runtime with %s that differ at %d", queue, n), 0, false, func(rs rounds) float64 {
				differ := rs.each(func(value func(string, int, string) float64) float64 {
					want := value("EventOneAtATime/ours", n, "digest")
					batched := value("ControllerRuntime/"+queue+"-as-they-come", n, "digest")
					return math.Abs(value(peer, n, "digest")-want) + math.Abs(batched-want)
				})
				if len(differ) < len(rs) || len(differ) == 0 {
					return math.NaN()
				}
				return slices.Max(differ)
			}})
		}
	}
	for _, n := range sizes {
		all = append(all, must{"ScheduleOverhead", fmt.Sprintf("ours / client-go workqueue at %d", n), 1, false, func(rs rounds) float64 {
			return rs.ratio("ScheduleOverhead", "Workqueue", n, perNode)
		}})
	}
	return all
}
