// Package promadapter shows a cluster to Prometheus: what a
// provisioning.Collector has counted and what Host.Status says, as the metrics
// listed in README.md. Import it or copy this file.
package promadapter

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/swactor/provisioning"
)

// New returns what is to be registered. Statistics is the collector that the
// host tells its events (HostConfig.OnEvent), status is Host.Status. Of several
// hosts in one registry, wrap the registerer with a label that tells them apart.
//
// A scrape takes one snapshot of both, which looks at every slot once.
func New(statistics *provisioning.Collector, status func() provisioning.HostStatus) prometheus.Collector {
	return &adapter{statistics, status}
}

type adapter struct {
	statistics *provisioning.Collector
	status     func() provisioning.HostStatus
}

// metric is one of them. Labels are bounded by what the library has names for;
// a slot, an attempt and an error text never are one.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

var descs []*prometheus.Desc

func define(kind prometheus.ValueType, name, help string, labels ...string) metric {
	desc := prometheus.NewDesc("provisioning_"+name, help, labels, nil)
	descs = append(descs, desc)
	return metric{desc, kind}
}

func gauge(name, help string, labels ...string) metric {
	return define(prometheus.GaugeValue, name, help, labels...)
}

func counter(name, help string, labels ...string) metric {
	return define(prometheus.CounterValue, name, help, labels...)
}

func histogram(name, help string, labels ...string) metric {
	return define(prometheus.UntypedValue, name, help, labels...) // the kind of a histogram is its own
}

var (
	slotsDesired       = gauge("slots_desired", "Slots that the wish has.")
	slotsReady         = gauge("slots_ready", "Desired slots that are ready with the exact spec.")
	slotsHeld          = gauge("slots_held", "Slots that hold a machine, or may: what is billed.")
	converged          = gauge("converged", "1 if the latest wish is fulfilled.")
	generationDesired  = gauge("generation_desired", "Generation of the latest wish.")
	generationObserved = gauge("generation_observed", "Generation that a pass last evaluated.")

	dispatched = counter("operations_dispatched_total", "Operations dispatched.", "operation")
	inFlight   = gauge("operations_in_flight", "Operations dispatched that have not ended.", "operation")
	ended      = counter("operations_ended_total", "Operations ended, by how; class none is success.", "operation", "class")
	expired    = counter("operations_expired_total", "Operations whose deadline came before their result.", "operation")
	givenUp    = counter("operations_given_up_total", "Cleanup steps given up after failing too often.", "operation")
	duration   = histogram("operation_duration_seconds", "Time from dispatch to end of an operation.", "operation", "class")

	attemptsStarted   = counter("attempts_started_total", "Attempts begun.")
	attemptsReady     = counter("attempts_ready_total", "Attempts that became ready.")
	attemptsFailed    = counter("attempts_failed_total", "Attempts that failed, ready ones that were lost included.")
	attemptsDestroyed = counter("attempts_destroyed_total", "Attempts of which nothing is left.")
	timeToReady       = histogram("time_to_ready_seconds", "Time from the beginning of an attempt until it is ready.")

	callsRunning     = gauge("calls_running", "Backend calls that have not returned.")
	callsOverrunning = gauge("calls_overrunning", "Backend calls that have outlived their deadline and have not returned.")
	callsQueued      = gauge("calls_queued", "Operations that wait for an earlier call of their attempt to return.")
	callPanics       = counter("call_panics_total", "Backend calls that ended in a panic.")
	lateResults      = counter("late_results_discarded_total", "Results that came after the deadline and did not count.")

	notApplied = counter("observations_not_applied_total", "Observations that changed nothing, by reason.", "reason")
	updates    = counter("updates_total", "Wishes offered, by result: accepted or refused.", "result")
	faults     = counter("faults_total", "Slots that a pass found unable to go on.")
	passes     = counter("passes_total", "Passes run.")
	hookPanics = counter("hook_panics_total", "Panics of the hook OnEvent.")
)

// Describe implements prometheus.Collector.
func (a *adapter) Describe(to chan<- *prometheus.Desc) {
	for _, desc := range descs {
		to <- desc
	}
}

// Collect implements prometheus.Collector.
func (a *adapter) Collect(to chan<- prometheus.Metric) {
	status := a.status()
	stats := a.statistics.Statistics(status.Executor)
	tell := func(m metric, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
	}

	tell(slotsDesired, float64(status.Desired))
	tell(slotsReady, float64(status.Ready))
	tell(slotsHeld, float64(status.Held))
	tell(converged, map[bool]float64{true: 1}[status.Converged])
	tell(generationDesired, float64(status.Generation))
	tell(generationObserved, float64(status.Observed))

	for _, o := range stats.Operations {
		operation := o.Operation.String()
		tell(dispatched, float64(o.Dispatched), operation)
		tell(inFlight, float64(o.InFlight()), operation)
		tell(expired, float64(o.Expired), operation)
		if o.Operation == provisioning.StartBootstrap || o.Operation == provisioning.CancelBootstrap {
			tell(givenUp, float64(o.GivenUp), operation) // no other ever is
		}
		for _, e := range o.Ended {
			tell(ended, float64(e.Count), operation, e.Class.String())
			if e.Count > 0 { // most pairs never come to be
				to <- constHistogram(duration, e.Durations, operation, e.Class.String())
			}
		}
	}

	tell(attemptsStarted, float64(stats.Attempts.Started))
	tell(attemptsReady, float64(stats.Attempts.Ready.Count))
	tell(attemptsFailed, float64(stats.Attempts.Failed))
	tell(attemptsDestroyed, float64(stats.Attempts.Destroyed))
	to <- constHistogram(timeToReady, stats.Attempts.Ready)

	tell(callsRunning, float64(stats.Executor.Running))
	tell(callsOverrunning, float64(stats.Executor.RunningExpired))
	tell(callsQueued, float64(stats.Executor.Queued))
	tell(callPanics, float64(stats.Executor.Panics))
	tell(lateResults, float64(stats.Executor.LateDiscarded))

	for _, n := range stats.NotApplied {
		tell(notApplied, float64(n.Count), string(n.Reason))
	}
	tell(updates, float64(stats.UpdatesAccepted), "accepted")
	tell(updates, float64(stats.UpdatesRefused), "refused")
	tell(faults, float64(stats.Faults))
	tell(passes, float64(status.Driver.Passes))
	tell(hookPanics, float64(status.Driver.HookPanics))
}

// constHistogram adds the buckets up, as Prometheus wants them.
func constHistogram(m metric, d provisioning.Durations, labels ...string) prometheus.Metric {
	buckets, sum := make(map[float64]uint64), uint64(0)
	for i, bound := range provisioning.DurationBounds() {
		sum += d.Buckets[i]
		buckets[bound.Seconds()] = sum
	}
	return prometheus.MustNewConstHistogram(m.desc, d.Count, d.Sum.Seconds(), buckets, labels...)
}
