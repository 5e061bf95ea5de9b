package provisioning

import (
	"math"
	"slices"
	"sync"
	"time"
)

// Collector counts events. Its OnEvent is a hook for [Config.OnEvent]; the zero
// Collector is ready for use and belongs to one driver. It is safe for
// concurrent use, and its size does not depend on that of the cluster.
type Collector struct {
	mu    sync.Mutex
	stats Statistics
}

// Statistics is what a [Collector] has counted since it was made. It is a copy
// that its holder may change. Whatever it lists is always there in full, in the
// same order, zeros included.
type Statistics struct {
	// Operations are the six kinds in their order.
	Operations []OperationStatistics
	Attempts   AttemptStatistics
	// NotApplied counts the observations that changed nothing, by reason.
	NotApplied      []NotAppliedCount
	UpdatesAccepted uint64
	UpdatesRefused  uint64
	// Faults counts, pass by pass, the slots that could not go on.
	Faults uint64
	// Executor is what [Collector.Statistics] was given: in Running the calls
	// that run now, in RunningExpired those of them that have outlived their
	// deadline.
	Executor ExecutorStats
}

// OperationStatistics counts the operations of one kind. Of those Dispatched,
// all that are in none of Ended are in flight.
type OperationStatistics struct {
	Operation  OperationKind
	Dispatched uint64
	// Ended says for each class, in their order, how many operations ended
	// like that, and how long after their dispatch: Ended[ClassNone] are the
	// successes. A submission that the executor refused is NotStarted.
	Ended []EndedStatistics
	// Expired counts those whose deadline came before their result. They are
	// in Ended too, most as Ambiguous.
	Expired uint64
	// GivenUp counts how often CancelLimit made the driver go on without.
	GivenUp uint64
}

// InFlight returns how many have been dispatched and have not ended.
func (s *OperationStatistics) InFlight() uint64 {
	ended := uint64(0)
	for _, e := range s.Ended {
		ended += e.Count
	}
	if ended > s.Dispatched { // the collector came later than the driver
		return 0
	}
	return s.Dispatched - ended
}

// EndedStatistics counts the operations of one kind that ended in one class.
type EndedStatistics struct {
	Class FailureClass
	Durations
}

// AttemptStatistics counts attempts. Those begun and not destroyed are alive.
type AttemptStatistics struct {
	Started   uint64
	Failed    uint64
	Destroyed uint64
	// Ready counts the attempts that became ready, and how long that took
	// from the beginning of each.
	Ready Durations
}

// NotAppliedCount says how many observations were not applied for a reason.
type NotAppliedCount struct {
	Reason NotAppliedReason
	Count  uint64
}

// durationBounds are the upper bounds of Durations.Buckets. They span from a
// quick call to the default OperationTimeout (2 min) and on to the longest boot
// that the default BootstrapTimeout (30 min) lets live.
var durationBounds = [...]time.Duration{
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second,
	time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 30 * time.Minute, time.Hour,
}

// DurationBounds returns the upper bounds of the buckets of [Durations], each
// included in its bucket.
func DurationBounds() []time.Duration { return slices.Clone(durationBounds[:]) }

// Durations sums up how long things took, in the driver's clock.
type Durations struct {
	Count uint64
	Sum   time.Duration // stays at the largest
	Min   time.Duration // 0 while Count is
	Max   time.Duration
	// Buckets counts those longer than one of [DurationBounds] and at most
	// the next; the last bucket has no bound. The counts are not cumulative.
	Buckets [len(durationBounds) + 1]uint64
}

// Mean returns the mean, 0 of nothing.
func (d *Durations) Mean() time.Duration {
	if d.Count == 0 {
		return 0
	}
	return d.Sum / time.Duration(d.Count)
}

func (d *Durations) add(took time.Duration) {
	if d.Count == 0 || took < d.Min {
		d.Min = took
	}
	d.Max = max(d.Max, took)
	d.Count++
	d.Sum += min(took, math.MaxInt64-d.Sum)
	bucket, _ := slices.BinarySearch(durationBounds[:], took)
	d.Buckets[bucket]++
}

// notAppliedReasons are all there are, in the order of their declaration.
var notAppliedReasons = []NotAppliedReason{UnknownNode, StaleAttempt, DeadSession, NotPending, AlreadyFailed, AlreadyJoined,
	AnotherJoined, AlreadyDeleting, NoLeaseHeld, HeldForSession, UnknownObservation}

// OnEvent counts an event.
func (c *Collector) OnEvent(e Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.prepare()
	s := &c.stats
	switch e.Kind {
	case EventDispatch:
		if o := s.of(e.Operation); o != nil {
			o.Dispatched++
		}
	case EventFold:
		if o := s.of(e.Operation); o != nil && e.Class < failureClasses {
			o.Ended[e.Class].add(e.Took)
			if e.Expired {
				o.Expired++
			}
		}
	case EventGivenUp:
		if o := s.of(e.Operation); o != nil {
			o.GivenUp++
		}
	case EventNotApplied:
		for i := range s.NotApplied {
			if string(s.NotApplied[i].Reason) == e.Reason {
				s.NotApplied[i].Count++
			}
		}
	case EventAttemptStarted:
		s.Attempts.Started++
	case EventReady:
		s.Attempts.Ready.add(e.Took)
	case EventAttemptFailed:
		s.Attempts.Failed++
	case EventDestroyed:
		s.Attempts.Destroyed++
	case EventUpdateAccepted:
		s.UpdatesAccepted++
	case EventUpdateRefused:
		s.UpdatesRefused++
	case EventFault:
		s.Faults++
	}
}

// Statistics returns what was counted so far, joined with what the executor
// says now: [HostStatus.Executor], or [Executor.Stats] where there is no host.
func (c *Collector) Statistics(executor ExecutorStats) Statistics {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.prepare()
	s := c.stats
	s.Operations = slices.Clone(s.Operations)
	for i := range s.Operations {
		s.Operations[i].Ended = slices.Clone(s.Operations[i].Ended)
	}
	s.NotApplied = slices.Clone(s.NotApplied)
	s.Executor = executor
	return s
}

// prepare makes the lists. The caller holds mu.
func (c *Collector) prepare() {
	s := &c.stats
	if s.Operations != nil {
		return
	}
	for kind := NoOperation + 1; kind < operationKinds; kind++ {
		o := OperationStatistics{Operation: kind, Ended: make([]EndedStatistics, failureClasses)}
		for class := range o.Ended {
			o.Ended[class].Class = FailureClass(class)
		}
		s.Operations = append(s.Operations, o)
	}
	for _, reason := range notAppliedReasons {
		s.NotApplied = append(s.NotApplied, NotAppliedCount{Reason: reason})
	}
}

// of returns the statistics of a kind, nil if there is no such kind.
func (s *Statistics) of(kind OperationKind) *OperationStatistics {
	if !kind.valid() {
		return nil
	}
	return &s.Operations[kind-1]
}
