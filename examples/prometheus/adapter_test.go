package promadapter_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	promadapter "github.com/swactor/provisioning/examples/prometheus"
	"github.com/swactor/provisioning/fakebackend"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func workers(generation uint64, count int) provisioning.ClusterShape {
	return provisioning.ClusterShape{RunID: "demo", Generation: generation,
		Groups: []provisioning.NodeGroupSpec{{GroupID: "worker", Count: count}}}
}

// cluster is a host in virtual time with a registry over a real HTTP server.
type cluster struct {
	t        *testing.T
	fake     *fakebackend.Backend
	host     *provisioning.Host
	registry *prometheus.Registry
	server   *httptest.Server
}

func newCluster(t *testing.T, count int) *cluster {
	fake := fakebackend.New(fakebackend.Config{Start: noon, JoinAfter: 90 * time.Second})
	work, statistics := fake.NewWork(), new(provisioning.Collector)
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape: workers(1, count), Backend: fake, Clock: work.Clock(nil), Go: work.Go, OnEvent: statistics.OnEvent,
	})
	require.NoError(t, err)
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(promadapter.New(statistics, host.Status)))
	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	t.Cleanup(server.Close)
	return &cluster{t, fake, host, registry, server}
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

// scrape returns what the server says, one line a series, without comments.
func (c *cluster) scrape() string {
	response, err := http.Get(c.server.URL)
	require.NoError(c.t, err)
	defer response.Body.Close()
	require.Equal(c.t, http.StatusOK, response.StatusCode)
	body, err := io.ReadAll(response.Body)
	require.NoError(c.t, err)
	return string(body)
}

func (c *cluster) requireLines(lines ...string) {
	c.t.Helper()
	body := c.scrape()
	for _, line := range lines {
		require.Contains(c.t, body, "\n"+line+"\n")
	}
}

// TestScrape: an hour of a cluster with a sold-out provider, a create that hangs
// and a lost machine, as Prometheus sees it.
func TestScrape(t *testing.T) {
	c := newCluster(t, 3)
	c.requireLines("provisioning_slots_desired 0", "provisioning_generation_desired 1", "provisioning_generation_observed 0",
		`provisioning_operations_dispatched_total{operation="CreateLease"} 0`,
		`provisioning_operations_ended_total{class="Ambiguous",operation="DestroyLease"} 0`,
		`provisioning_observations_not_applied_total{reason="of another attempt"} 0`,
		"provisioning_time_to_ready_seconds_count 0")
	c.fake.Script("worker-0", provisioning.CreateLease, fakebackend.Hang())
	c.fake.Script("worker-1", provisioning.CreateLease, fakebackend.Capacity())
	c.fake.Script("worker-2", provisioning.CreateLease, fakebackend.SpotLoss(30*time.Minute))

	// A minute: one create hangs, one was refused and has come again, two
	// bootstraps run.
	c.until(time.Minute)
	c.requireLines("provisioning_slots_desired 3", "provisioning_slots_ready 0", "provisioning_slots_held 3", "provisioning_converged 0",
		"provisioning_generation_observed 1",
		`provisioning_operations_dispatched_total{operation="CreateLease"} 4`,
		`provisioning_operations_in_flight{operation="CreateLease"} 1`,
		`provisioning_operations_ended_total{class="none",operation="CreateLease"} 2`,
		`provisioning_operations_ended_total{class="Definite",operation="CreateLease"} 1`,
		"provisioning_calls_running 1", "provisioning_calls_overrunning 0", "provisioning_calls_queued 0")

	// Three more: the deadline of that create has passed, the call still runs,
	// and the next one waits for it.
	c.until(4 * time.Minute)
	c.requireLines("provisioning_slots_ready 2",
		`provisioning_operations_expired_total{operation="CreateLease"} 1`,
		`provisioning_operations_ended_total{class="Ambiguous",operation="CreateLease"} 1`,
		`provisioning_operations_in_flight{operation="CreateLease"} 1`,
		`provisioning_operation_duration_seconds_bucket{class="Ambiguous",operation="CreateLease",le="60"} 0`,
		`provisioning_operation_duration_seconds_bucket{class="Ambiguous",operation="CreateLease",le="120"} 1`,
		`provisioning_operation_duration_seconds_bucket{class="Ambiguous",operation="CreateLease",le="+Inf"} 1`,
		`provisioning_operation_duration_seconds_sum{class="Ambiguous",operation="CreateLease"} 120`,
		"provisioning_calls_running 1", "provisioning_calls_overrunning 1", "provisioning_calls_queued 1",
		`provisioning_time_to_ready_seconds_bucket{le="60"} 0`,
		`provisioning_time_to_ready_seconds_bucket{le="120"} 2`,
		"provisioning_time_to_ready_seconds_sum 181", "provisioning_time_to_ready_seconds_count 2")

	// It returns at last; a machine is lost and replaced; two wishes are offered.
	require.NoError(t, c.fake.Release("worker-0", provisioning.CreateLease, fakebackend.OK()))
	require.ErrorIs(t, c.host.UpdateDesired(workers(0, 3)), provisioning.ErrGenerationRegressed)
	require.NoError(t, c.host.UpdateDesired(workers(2, 3)))
	c.until(time.Hour)
	c.requireLines("provisioning_slots_ready 3", "provisioning_slots_held 3", "provisioning_converged 1", "provisioning_generation_observed 2",
		`provisioning_operations_in_flight{operation="CreateLease"} 0`,
		"provisioning_calls_running 0", "provisioning_calls_overrunning 0", "provisioning_calls_queued 0",
		"provisioning_late_results_discarded_total 1",
		"provisioning_attempts_started_total 4", "provisioning_attempts_failed_total 1", "provisioning_attempts_destroyed_total 1",
		"provisioning_attempts_ready_total 4", "provisioning_time_to_ready_seconds_count 4",
		`provisioning_updates_total{result="accepted"} 1`, `provisioning_updates_total{result="refused"} 1`,
		"provisioning_faults_total 0", "provisioning_hook_panics_total 0", "provisioning_call_panics_total 0")
}

// TestMetricsAreWellNamed, as far as Prometheus has rules for that.
func TestMetricsAreWellNamed(t *testing.T) {
	c := newCluster(t, 2)
	c.until(time.Hour)
	problems, err := testutil.GatherAndLint(c.registry)
	require.NoError(t, err)
	require.Empty(t, problems)
}

// TestCardinality: the number of series does not follow that of the nodes, and
// what names one is no label.
func TestCardinality(t *testing.T) {
	series := func(nodes int) (names []string) {
		c := newCluster(t, nodes)
		c.fake.Script("worker-0", provisioning.CreateLease, fakebackend.SpotLoss(time.Minute))
		c.until(time.Hour)
		for line := range strings.Lines(c.scrape()) {
			if !strings.HasPrefix(line, "#") {
				names = append(names, line[:strings.LastIndex(line, " ")])
			}
		}
		return names
	}
	few := series(2)
	require.Equal(t, few, series(200))
	require.NotContains(t, strings.Join(few, "\n"), "worker")
}

// TestREADME: its table has every metric with its type and labels, and no other.
func TestREADME(t *testing.T) {
	c := newCluster(t, 2)
	c.until(time.Hour)
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(c.scrape()))
	require.NoError(t, err)
	var is []string
	for name, family := range families {
		var labels []string
		for _, label := range family.Metric[0].Label {
			labels = append(labels, "`"+label.GetName()+"`")
		}
		slices.Sort(labels)
		is = append(is, fmt.Sprintf("%s %s %s", name, strings.ToLower(family.GetType().String()), strings.Join(labels, ", ")))
	}
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	var says []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (\\w+) \\| [^|]+ \\| ([^|]*?) ?\\| [^|]+ \\|$").FindAllStringSubmatch(string(text), -1) {
		says = append(says, fmt.Sprintf("%s %s %s", row[1], row[2], row[3]))
	}
	slices.Sort(is)
	slices.Sort(says)
	require.Equal(t, is, says)

	var bounds []string
	for _, bound := range provisioning.DurationBounds() {
		bounds = append(bounds, fmt.Sprint(bound.Seconds()))
	}
	require.Contains(t, string(text), strings.Join(bounds, ", "))

	// The README of the library reads each of them.
	root, err := os.ReadFile("../../README.md")
	if os.IsNotExist(err) {
		t.Skip("the adapter was copied")
	}
	require.NoError(t, err)
	_, section, _ := strings.Cut(string(root), "\n## Operating it\n")
	for name := range families {
		require.Contains(t, section, "`"+strings.TrimPrefix(name, "provisioning_")+"`")
	}
}
