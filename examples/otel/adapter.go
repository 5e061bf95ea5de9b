// Package oteladapter shows a cluster to OpenTelemetry: a span for the way up of
// each attempt, one for its cleanup and one for each operation, and the metrics
// listed in README.md. Import it or copy this file.
package oteladapter

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/swactor/provisioning"
)

const scope = "github.com/swactor/provisioning/examples/otel"

// The attributes. Node, attempt, operation id, rule, lease and reason texts are
// of spans only: as attributes of a metric they would make a series each.
const (
	Node        = attribute.Key("provisioning.node")
	Attempt     = attribute.Key("provisioning.attempt")
	Operation   = attribute.Key("provisioning.operation")
	OperationID = attribute.Key("provisioning.operation_id")
	RuleName    = attribute.Key("provisioning.rule")
	Class       = attribute.Key("provisioning.class")
	Expired     = attribute.Key("provisioning.expired")
	Lease       = attribute.Key("provisioning.lease")
	Reason      = attribute.Key("provisioning.reason")
	Result      = attribute.Key("provisioning.result")
	Unfinished  = attribute.Key("provisioning.unfinished")
)

// Adapter turns events into spans and metrics. It belongs to one host, and what
// it remembers is bounded by the attempts that live.
type Adapter struct {
	tracer trace.Tracer
	meter  metric.Meter

	dispatched, expired, started, failed, destroyed, notApplied, updates, faults metric.Int64Counter
	duration, timeToReady                                                        metric.Float64Histogram

	mu       sync.Mutex
	last     time.Time // of an event
	attempts map[provisioning.NodeAttemptID]*attempt
}

// attempt holds the open spans of an attempt that is not destroyed.
type attempt struct {
	up        trace.Span // until it is ready or given up
	cleanup   trace.Span // from then on
	operation trace.Span
	link      trace.SpanContext // of up, also after its end
}

// none is a span that records nothing.
var none = trace.SpanFromContext(context.Background())

// New returns an adapter; its OnEvent is for HostConfig.OnEvent.
func New(traces trace.TracerProvider, meters metric.MeterProvider) (*Adapter, error) {
	a := &Adapter{tracer: traces.Tracer(scope), meter: meters.Meter(scope), attempts: make(map[provisioning.NodeAttemptID]*attempt)}
	var errs []error
	counter := func(name, unit, says string) metric.Int64Counter {
		c, err := a.meter.Int64Counter("provisioning."+name, metric.WithUnit(unit), metric.WithDescription(says))
		errs = append(errs, err)
		return c
	}
	var bounds []float64
	for _, bound := range provisioning.DurationBounds() {
		bounds = append(bounds, bound.Seconds())
	}
	histogram := func(name, says string) metric.Float64Histogram {
		h, err := a.meter.Float64Histogram("provisioning."+name, metric.WithUnit("s"), metric.WithDescription(says),
			metric.WithExplicitBucketBoundaries(bounds...))
		errs = append(errs, err)
		return h
	}
	a.dispatched = counter("operation.dispatched", "{operation}", "Operations dispatched.")
	a.expired = counter("operation.expired", "{operation}", "Operations whose deadline came before their result.")
	a.started = counter("attempt.started", "{attempt}", "Attempts begun.")
	a.failed = counter("attempt.failed", "{attempt}", "Attempts that failed, ready ones that were lost included.")
	a.destroyed = counter("attempt.destroyed", "{attempt}", "Attempts of which nothing is left.")
	a.notApplied = counter("observation.not_applied", "{observation}", "Observations that changed nothing.")
	a.updates = counter("update.offered", "{update}", "Wishes offered.")
	a.faults = counter("slot.faults", "{slot}", "Slots that a pass found unable to go on.")
	a.duration = histogram("operation.duration", "Time from dispatch to end of an operation.")
	a.timeToReady = histogram("attempt.time_to_ready", "Time from the beginning of an attempt until it is ready.")
	return a, errors.Join(errs...)
}

// Observe adds what only the host knows, read at each collection. Status is
// Host.Status.
func (a *Adapter) Observe(status func() provisioning.HostStatus) (metric.Registration, error) {
	type gauge struct {
		instrument metric.Int64ObservableGauge
		value      func(*provisioning.HostStatus) int
	}
	var gauges []gauge
	var observed []metric.Observable
	for _, g := range []struct {
		name, unit, says string
		value            func(*provisioning.HostStatus) int
	}{
		{"slot.desired", "{slot}", "Slots that the wish has.", func(s *provisioning.HostStatus) int { return s.Desired }},
		{"slot.ready", "{slot}", "Desired slots that are ready with the exact spec.", func(s *provisioning.HostStatus) int { return s.Ready }},
		{"slot.held", "{slot}", "Slots that hold a machine, or may: what is billed.", func(s *provisioning.HostStatus) int { return s.Held }},
		{"call.running", "{call}", "Backend calls that have not returned.", func(s *provisioning.HostStatus) int { return s.Executor.Running }},
		{"call.overrunning", "{call}", "Backend calls that have outlived their deadline and have not returned.",
			func(s *provisioning.HostStatus) int { return s.Executor.RunningExpired }},
	} {
		made, err := a.meter.Int64ObservableGauge("provisioning."+g.name, metric.WithUnit(g.unit), metric.WithDescription(g.says))
		if err != nil {
			return nil, err
		}
		gauges = append(gauges, gauge{made, g.value})
		observed = append(observed, made)
	}
	return a.meter.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		s := status()
		for _, g := range gauges {
			to.ObserveInt64(g.instrument, int64(g.value(&s)))
		}
		return nil
	}, observed...)
}

// OnEvent takes an event.
func (a *Adapter) OnEvent(e provisioning.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = e.At
	a.trace(&e)
	a.count(&e)
}

// Close ends the spans that are open, with the last event, and marks them as
// unfinished: of nodes on their way when the host stopped. Call it before the
// exporter is shut down.
func (a *Adapter) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(a.attempts)) {
		t := a.attempts[id]
		for _, span := range []trace.Span{t.operation, t.up, t.cleanup} {
			span.SetAttributes(Unfinished.Bool(true))
			span.End(trace.WithTimestamp(a.last))
		}
	}
	clear(a.attempts)
}

// of returns the attempt of an event, one without spans if its beginning was not
// seen.
func (a *Adapter) of(e *provisioning.Event) *attempt {
	t := a.attempts[e.Attempt]
	if t == nil {
		t = &attempt{up: none, cleanup: none, operation: none}
		a.attempts[e.Attempt] = t
	}
	return t
}

// start begins a span at the time of an event, under parent, which may be none.
// It is linked to its attempt.
func (a *Adapter) start(name string, e *provisioning.Event, parent trace.Span, link trace.SpanContext, more ...attribute.KeyValue) trace.Span {
	options := []trace.SpanStartOption{trace.WithTimestamp(e.At),
		trace.WithAttributes(Node.String(string(e.Node)), Attempt.Int64(int64(e.Attempt))), trace.WithAttributes(more...)}
	if link.IsValid() {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: link}))
	}
	_, span := a.tracer.Start(trace.ContextWithSpan(context.Background(), parent), name, options...)
	return span
}

// endUp ends the way up. What is kept of it is little: a node may be ready for
// months.
func (t *attempt) endUp(e *provisioning.Event) {
	t.up.End(trace.WithTimestamp(e.At))
	t.up = none
}

func (a *Adapter) trace(e *provisioning.Event) {
	switch e.Kind {
	case provisioning.EventAttemptStarted:
		t := a.of(e)
		t.up = a.start("attempt", e, none, trace.SpanContext{})
		t.link = t.up.SpanContext()
	case provisioning.EventDispatch:
		t := a.of(e)
		parent := t.up
		if t.cleanup != none {
			parent = t.cleanup
		}
		t.operation = a.start(e.Operation.String(), e, parent, t.link,
			Operation.String(e.Operation.String()), OperationID.String(e.OperationID.String()), RuleName.String(e.Rule.Name))
	case provisioning.EventFold:
		if e.Operation == provisioning.NoOperation {
			return
		}
		t, answer := a.of(e), e.Observation.Completion
		t.operation.SetAttributes(Class.String(e.Class.String()))
		if e.Expired {
			t.operation.SetAttributes(Expired.Bool(true))
		}
		if answer.Lease != "" {
			t.operation.SetAttributes(Lease.String(string(answer.Lease)))
		}
		if e.Class != provisioning.ClassNone {
			t.operation.SetStatus(codes.Error, answer.Message)
		}
		t.operation.End(trace.WithTimestamp(e.At))
		t.operation = none
	case provisioning.EventStage:
		if t := a.attempts[e.Attempt]; t != nil {
			t.up.AddEvent(e.To.String(), trace.WithTimestamp(e.At))
		}
	case provisioning.EventReady:
		a.of(e).endUp(e)
	case provisioning.EventAttemptFailed:
		a.of(e).up.SetStatus(codes.Error, e.Reason)
	case provisioning.EventDeleting:
		t := a.of(e)
		t.endUp(e)
		t.cleanup = a.start("cleanup", e, none, t.link)
		if e.Reason != "" {
			t.cleanup.SetAttributes(Reason.String(e.Reason))
		}
	case provisioning.EventGivenUp:
		a.of(e).cleanup.AddEvent("GivenUp", trace.WithTimestamp(e.At), trace.WithAttributes(Operation.String(e.Operation.String())))
	case provisioning.EventDestroyed:
		a.of(e).cleanup.End(trace.WithTimestamp(e.At))
		delete(a.attempts, e.Attempt)
	}
}

func (a *Adapter) count(e *provisioning.Event) {
	ctx := context.Background()
	operation := Operation.String(e.Operation.String())
	switch e.Kind {
	case provisioning.EventDispatch:
		a.dispatched.Add(ctx, 1, metric.WithAttributes(operation))
	case provisioning.EventFold:
		if e.Operation == provisioning.NoOperation {
			return
		}
		a.duration.Record(ctx, e.Took.Seconds(), metric.WithAttributes(operation, Class.String(e.Class.String())))
		if e.Expired {
			a.expired.Add(ctx, 1, metric.WithAttributes(operation))
		}
	case provisioning.EventAttemptStarted:
		a.started.Add(ctx, 1)
	case provisioning.EventReady:
		a.timeToReady.Record(ctx, e.Took.Seconds())
	case provisioning.EventAttemptFailed:
		a.failed.Add(ctx, 1)
	case provisioning.EventDestroyed:
		a.destroyed.Add(ctx, 1)
	case provisioning.EventNotApplied:
		a.notApplied.Add(ctx, 1, metric.WithAttributes(Reason.String(e.Reason)))
	case provisioning.EventUpdateAccepted:
		a.updates.Add(ctx, 1, metric.WithAttributes(Result.String("accepted")))
	case provisioning.EventUpdateRefused:
		a.updates.Add(ctx, 1, metric.WithAttributes(Result.String("refused")))
	case provisioning.EventFault:
		a.faults.Add(ctx, 1)
	}
}
