package promadapter_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/time/rate"

	"github.com/swactor/provisioning"
	promadapter "github.com/swactor/provisioning/examples/prometheus"
	"github.com/swactor/provisioning/fakebackend"
)

// A service as it is operated: two providers, one of them with a rate limit; a
// log of what matters; the metrics over HTTP.
func Example() {
	onDemand := fakebackend.New(fakebackend.Config{}) // yours, in earnest
	spot := fakebackend.New(fakebackend.Config{})
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelWarn, ReplaceAttr: withoutTime}))
	statistics := new(provisioning.Collector)
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Backend: provisioning.ByProvider{
			"on-demand": provisioning.RateLimited(onDemand, rate.NewLimiter(50, 5)), // calls a second, and at once
			"spot":      spot,
		},
		MaxInFlight: 100,
		OnEvent:     provisioning.JoinEvents(statistics.OnEvent, provisioning.LogEvents(logger)),
		Shape: provisioning.ClusterShape{RunID: "demo", Generation: 1, Groups: []provisioning.NodeGroupSpec{
			{GroupID: "control", Provider: "on-demand", Count: 1},
			{GroupID: "worker", Provider: "spot", Count: 3},
		}},
	})
	check(err)
	registry := prometheus.NewRegistry()
	check(registry.Register(promadapter.New(statistics, host.Status)))
	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer server.Close()

	ctx, stop := context.WithCancel(context.Background())
	stopped := make(chan error)
	go func() { stopped <- host.Run(ctx) }()
	check(host.WaitConverged(ctx, 1))

	response, err := http.Get(server.URL)
	check(err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if line := lines.Text(); strings.HasPrefix(line, "provisioning_slots") || strings.HasPrefix(line, "provisioning_attempts") {
			fmt.Println(line)
		}
	}
	check(lines.Err())

	err = host.UpdateDesired(provisioning.ClusterShape{RunID: "demo", Generation: 2, Groups: []provisioning.NodeGroupSpec{
		{GroupID: "worker", Provider: "sopt", Count: 3},
	}})
	fmt.Println("refused:", errors.Is(err, provisioning.ErrInvalidShape))
	check(host.Drain(context.Background()))
	stop()
	check(<-stopped)

	// Output:
	// provisioning_attempts_destroyed_total 0
	// provisioning_attempts_failed_total 0
	// provisioning_attempts_ready_total 4
	// provisioning_attempts_started_total 4
	// provisioning_slots_desired 4
	// provisioning_slots_held 4
	// provisioning_slots_ready 4
	// level=WARN msg=UpdateRefused generation=2 error="provisioning: invalid shape: group \"worker\" (groups[0]) provider: is \"sopt\", for which there is no backend; there are \"on-demand\", \"spot\""
	// refused: true
}

// withoutTime makes a log the same in every run.
func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey || a.Key == "at" {
		return slog.Attr{}
	}
	return a
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
