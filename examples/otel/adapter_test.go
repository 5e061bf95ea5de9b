package oteladapter_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/swactor/provisioning"
	oteladapter "github.com/swactor/provisioning/examples/otel"
	"github.com/swactor/provisioning/fakebackend"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func workers(generation uint64, count int) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: "demo", Generation: generation,
		Groups: []provisioning.NodeGroupSpec{{GroupID: "worker", Count: count}}}
}

// cluster is a host in virtual time whose spans and metrics stay in memory.
type cluster struct {
	t       *testing.T
	fake    *fakebackend.Backend
	host    *provisioning.Host
	adapter *oteladapter.Adapter
	spans   *tracetest.InMemoryExporter
	metrics *sdkmetric.ManualReader
}

func newCluster(t *testing.T, count int) *cluster {
	c := &cluster{t: t, spans: tracetest.NewInMemoryExporter(), metrics: sdkmetric.NewManualReader(),
		fake: fakebackend.New(fakebackend.Config{Start: noon, JoinAfter: 90 * time.Second})}
	var err error
	c.adapter, err = oteladapter.New(sdktrace.NewTracerProvider(sdktrace.WithSyncer(c.spans)),
		sdkmetric.NewMeterProvider(sdkmetric.WithReader(c.metrics)))
	require.NoError(t, err)
	work := c.fake.NewWork()
	c.host, err = provisioning.NewHost(provisioning.HostConfig{
		Shape: workers(1, count), Backend: c.fake, Clock: work.Clock(nil), Go: work.Go, OnEvent: c.adapter.OnEvent,
		Retry: provisioning.RetryPolicy{CancelLimit: 1},
	})
	require.NoError(t, err)
	_, err = c.adapter.Observe(c.host.Status)
	require.NoError(t, err)
	return c
}

// until runs the host up to an instant.
func (c *cluster) until(at time.Duration) {
	ctx, stop := context.WithCancel(c.t.Context())
	c.fake.At(noon.Add(at), stop)
	if err := c.host.Run(ctx); err != nil {
		require.ErrorIs(c.t, err, context.Canceled)
	}
	require.True(c.t, c.fake.Now().Equal(noon.Add(at)))
}

// tell returns the spans that have ended, in that order, one line each: name,
// begin and end, under what, linked to what, how it ended and what happened.
func (c *cluster) tell() string {
	names := map[string]string{}
	spans := c.spans.GetSpans()
	for _, s := range spans {
		names[s.SpanContext.SpanID().String()] = name(s)
	}
	var lines []string
	for _, s := range spans {
		line := fmt.Sprintf("%s %v..%v", name(s), s.StartTime.Sub(noon), s.EndTime.Sub(noon))
		if s.Parent.IsValid() {
			require.Equal(c.t, s.Parent.TraceID(), s.SpanContext.TraceID())
			line += " under " + names[s.Parent.SpanID().String()]
		}
		for _, link := range s.Links {
			line += " of " + names[link.SpanContext.SpanID().String()]
		}
		for _, a := range s.Attributes {
			switch a.Key {
			case oteladapter.Class, oteladapter.Expired, oteladapter.Lease, oteladapter.Reason, oteladapter.Unfinished:
				line += fmt.Sprintf(" %s=%s", strings.TrimPrefix(string(a.Key), "provisioning."), a.Value.String())
			}
		}
		if s.Status.Code == codes.Error {
			line += " error: " + s.Status.Description
		}
		for _, e := range s.Events {
			line += fmt.Sprintf(" [%v %s]", e.Time.Sub(noon), e.Name)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// name tells spans apart: "CreateLease 1/2", "attempt 1".
func name(s tracetest.SpanStub) string {
	for _, a := range s.Attributes {
		if a.Key == oteladapter.OperationID {
			return s.Name + " " + a.Value.AsString()
		}
	}
	for _, a := range s.Attributes {
		if a.Key == oteladapter.Attempt {
			return fmt.Sprintf("%s %d", s.Name, a.Value.AsInt64())
		}
	}
	return s.Name
}

func lines(block string) string {
	trimmed := strings.Split(strings.TrimSpace(block), "\n")
	for i := range trimmed {
		trimmed[i] = strings.TrimSpace(trimmed[i])
	}
	return strings.Join(trimmed, "\n")
}

// TestSpans: a life with a refused create, a boot that breaks, a cancel that is
// given up, a machine that is lost, and an end.
func TestSpans(t *testing.T) {
	c := newCluster(t, 1)
	c.fake.Script("worker-0", provisioning.CreateLease, fakebackend.Capacity(), fakebackend.Slow(20*time.Second))
	c.fake.Script("worker-0", provisioning.CancelBootstrap, fakebackend.Definite())
	c.fake.At(noon.Add(time.Minute), func() {
		c.host.Deliver(provisioning.Observation{Kind: provisioning.BootstrapFailed, Node: "worker-0", Attempt: 1, Reason: "disk full",
			Session: c.fake.SessionID(provisioning.ExternalKey{Run: "demo", Node: "worker-0", Attempt: 1})})
	})
	c.fake.At(noon.Add(10*time.Minute), func() {
		c.host.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: "worker-0", Attempt: 2, Reason: "spot"})
	})
	c.until(10*time.Minute + 10*time.Second)
	c.adapter.Close()
	require.Equal(t, lines(`
		CreateLease 1/1 0s..0s under attempt 1 of attempt 1 class=Definite error: fakebackend: no capacity
		CreateLease 1/2 1s..21s under attempt 1 of attempt 1 class=none lease=lease/demo/worker-0/1
		StartBootstrap 1/3 21s..21s under attempt 1 of attempt 1 class=none
		attempt 1 0s..1m0s error: the bootstrap failed: disk full [0s LeaseRequested] [21s EndpointKnown] [21s BootstrapRunning] [1m0s Failed]
		CancelBootstrap 1/4 1m0s..1m0s under cleanup 1 of attempt 1 class=Definite error: fakebackend: scripted definite failure
		DestroyLease 1/5 1m0s..1m0s under cleanup 1 of attempt 1 class=none
		cleanup 1 1m0s..1m0s of attempt 1 reason=the bootstrap failed: disk full [1m0s GivenUp]
		CreateLease 2/1 1m2s..1m2s under attempt 2 of attempt 2 class=none lease=lease/demo/worker-0/2
		StartBootstrap 2/2 1m2s..1m2s under attempt 2 of attempt 2 class=none
		BootstrapConvergenceObserved 2/3 2m32s..2m32s under attempt 2 of attempt 2 class=none
		attempt 2 1m2s..2m32s [1m2s New] [1m2s LeaseRequested] [1m2s EndpointKnown] [1m2s BootstrapRunning] [2m32s SwactorJoined] [2m32s Dormant]
		DestroyLease 2/4 10m0s..10m0s under cleanup 2 of attempt 2 class=none
		cleanup 2 10m0s..10m0s of attempt 2 reason=the node was lost: spot
		CreateLease 3/1 10m4s..10m4s under attempt 3 of attempt 3 class=none lease=lease/demo/worker-0/3
		StartBootstrap 3/2 10m4s..10m4s under attempt 3 of attempt 3 class=none
		attempt 3 10m4s..10m4s unfinished=true [10m4s New] [10m4s LeaseRequested] [10m4s EndpointKnown] [10m4s BootstrapRunning]`), c.tell())
	for _, s := range c.spans.GetSpans() {
		require.Contains(t, s.Attributes, attribute.String("provisioning.node", "worker-0"), s.Name)
	}
}

// TestNothingStaysOpen: of nodes that are ready, and of attempts that are over, no
// span is open.
func TestNothingStaysOpen(t *testing.T) {
	for _, drained := range []bool{false, true} {
		c := newCluster(t, 3)
		c.until(10 * time.Minute)
		if drained {
			require.NoError(t, c.host.Drain(t.Context()))
		}
		ended := len(c.spans.GetSpans())
		require.NotZero(t, ended)
		c.adapter.Close()
		require.Len(t, c.spans.GetSpans(), ended)
	}
}

// TestBegunBefore: an adapter that did not see an attempt begin tells what it can.
func TestBegunBefore(t *testing.T) {
	c := newCluster(t, 0)
	e := provisioning.Event{Kind: provisioning.EventDispatch, At: noon, Node: "w-0", Attempt: 9, Operation: provisioning.DestroyLease,
		OperationID: provisioning.OperationID{Attempt: 9, Sequence: 4}}
	c.adapter.OnEvent(e)
	e.Kind, e.At, e.Observation = provisioning.EventFold, noon.Add(time.Second), new(provisioning.Observation)
	c.adapter.OnEvent(e)
	c.adapter.OnEvent(e) // of what has no span
	c.adapter.OnEvent(provisioning.Event{Kind: provisioning.EventDestroyed, At: noon.Add(time.Second), Node: "w-0", Attempt: 9})
	require.Equal(t, "DestroyLease 9/4 0s..1s class=none", c.tell())
}

// collect returns the metrics by name.
func (c *cluster) collect() map[string]metricdata.Metrics {
	var all metricdata.ResourceMetrics
	require.NoError(c.t, c.metrics.Collect(c.t.Context(), &all))
	require.Len(c.t, all.ScopeMetrics, 1)
	byName := map[string]metricdata.Metrics{}
	for _, m := range all.ScopeMetrics[0].Metrics {
		byName[m.Name] = m
	}
	return byName
}

// points returns the series of a metric as text, with the sum and count of a
// histogram.
func points(t *testing.T, m metricdata.Metrics) (lines []string) {
	add := func(set attribute.Set, value any) {
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s %v", set.Encoded(attribute.DefaultEncoder()), value)))
	}
	switch data := m.Data.(type) {
	case metricdata.Sum[int64]:
		require.True(t, data.IsMonotonic)
		for _, p := range data.DataPoints {
			add(p.Attributes, p.Value)
		}
	case metricdata.Gauge[int64]:
		for _, p := range data.DataPoints {
			add(p.Attributes, p.Value)
		}
	case metricdata.Histogram[float64]:
		for _, p := range data.DataPoints {
			add(p.Attributes, fmt.Sprintf("%v/%d", p.Sum, p.Count))
		}
	default:
		t.Fatalf("%s is %T", m.Name, m.Data)
	}
	slices.Sort(lines)
	return lines
}

// busy lives through all that can be counted.
func busy(t *testing.T, nodes int) *cluster {
	c := newCluster(t, nodes)
	c.fake.Script("worker-0", provisioning.CreateLease, fakebackend.Hang())
	c.fake.Script("worker-1", provisioning.CreateLease, fakebackend.Capacity(), fakebackend.SpotLoss(30*time.Minute))
	c.fake.At(noon.Add(time.Minute), func() {
		c.host.Deliver(provisioning.Observation{Kind: provisioning.NodeLost, Node: "worker-1", Attempt: 77})
	})
	c.until(4 * time.Minute)
	return c
}

// TestMetrics: a hung create, a sold-out provider and a lost machine in numbers.
func TestMetrics(t *testing.T) {
	c := busy(t, 3)
	m := c.collect()
	require.Equal(t, []string{"1"}, points(t, m["provisioning.call.running"]))
	require.Equal(t, []string{"1"}, points(t, m["provisioning.call.overrunning"]))
	require.Equal(t, []string{"3"}, points(t, m["provisioning.slot.desired"]))
	require.Equal(t, []string{"2"}, points(t, m["provisioning.slot.ready"]))
	require.Equal(t, []string{"3"}, points(t, m["provisioning.slot.held"]))
	require.Equal(t, []string{"provisioning.operation=CreateLease 1"}, points(t, m["provisioning.operation.expired"]))
	require.Equal(t, []string{"181/2"}, points(t, m["provisioning.attempt.time_to_ready"]))

	require.NoError(t, c.fake.Release("worker-0", provisioning.CreateLease, fakebackend.OK()))
	require.ErrorIs(t, c.host.UpdateDesired(workers(0, 3)), provisioning.ErrGenerationRegressed)
	require.NoError(t, c.host.UpdateDesired(workers(2, 3)))
	c.until(time.Hour)
	m = c.collect()
	require.Equal(t, []string{"0"}, points(t, m["provisioning.call.running"]))
	require.Equal(t, []string{"3"}, points(t, m["provisioning.slot.ready"]))
	require.Equal(t, []string{"4"}, points(t, m["provisioning.attempt.started"]))
	require.Equal(t, []string{"1"}, points(t, m["provisioning.attempt.failed"]))
	require.Equal(t, []string{"1"}, points(t, m["provisioning.attempt.destroyed"]))
	require.Equal(t, []string{"provisioning.result=accepted 1", "provisioning.result=refused 1"}, points(t, m["provisioning.update.offered"]))
	require.Equal(t, []string{"provisioning.reason=of another attempt 1"}, points(t, m["provisioning.observation.not_applied"]))
	require.Contains(t, points(t, m["provisioning.operation.duration"]), "provisioning.class=Ambiguous,provisioning.operation=CreateLease 120/1")
	require.Contains(t, points(t, m["provisioning.operation.dispatched"]), "provisioning.operation=StartBootstrap 4")
}

// TestCardinality: the number of series does not follow that of the nodes, and
// what names one is no attribute.
func TestCardinality(t *testing.T) {
	series := func(nodes int) (all []string) {
		for name, m := range busy(t, nodes).collect() {
			for _, p := range points(t, m) {
				attributes, _, found := strings.Cut(p, " ")
				if !found {
					attributes = ""
				}
				all = append(all, name+" "+attributes)
			}
		}
		slices.Sort(all)
		return all
	}
	few := series(3)
	require.Equal(t, few, series(150))
	require.NotContains(t, strings.Join(few, "\n"), "worker")
}

// TestREADME: its table has every metric with its kind, unit and attributes, and
// no other.
func TestREADME(t *testing.T) {
	c := busy(t, 3)
	require.Error(t, c.host.UpdateDesired(workers(0, 3)))
	c.adapter.OnEvent(provisioning.Event{Kind: provisioning.EventFault}) // the one thing that did not happen
	require.NoError(t, c.host.UpdateDesired(workers(2, 0)))
	require.NoError(t, c.fake.Release("worker-0", provisioning.CreateLease, fakebackend.OK()))
	c.until(time.Hour)
	c.adapter.OnEvent(provisioning.Event{Kind: provisioning.EventAttemptFailed})
	var is []string
	for name, m := range c.collect() {
		attributes := map[string]bool{}
		kind := "gauge"
		var sets []attribute.Set
		switch data := m.Data.(type) {
		case metricdata.Sum[int64]:
			kind = "counter"
			for _, p := range data.DataPoints {
				sets = append(sets, p.Attributes)
			}
		case metricdata.Histogram[float64]:
			kind = "histogram"
			for _, p := range data.DataPoints {
				sets = append(sets, p.Attributes)
				require.Len(t, p.Bounds, len(provisioning.DurationBounds()))
			}
		}
		for _, set := range sets {
			for _, a := range set.ToSlice() {
				attributes["`"+string(a.Key)+"`"] = true
			}
		}
		var labels []string
		for label := range attributes {
			labels = append(labels, label)
		}
		slices.Sort(labels)
		is = append(is, fmt.Sprintf("%s %s %s %s", name, kind, m.Unit, strings.Join(labels, ", ")))
	}
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	var says []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(provisioning[.\\w]+)` \\| (\\w+) \\| `([^|]+)` \\| ([^|]*?) ?\\| [^|]+ \\|$").FindAllStringSubmatch(string(text), -1) {
		says = append(says, strings.Join(row[1:], " "))
	}
	slices.Sort(is)
	slices.Sort(says)
	require.Equal(t, is, says)
}
