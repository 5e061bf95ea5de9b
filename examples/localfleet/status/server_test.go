package status

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// get asks a handler as a browser on this computer would.
func get(t *testing.T, h http.Handler, path string) (*http.Response, string) {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.Host = "127.0.0.1:8080"
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result(), w.Body.String()
}

func TestStatusTellsHowFarASlotIs(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 2))
	f.fake.Script("w-0", provisioning.CreateLease, mustOutcome(t, "hang"))
	f.fake.Script("w-1", provisioning.StartBootstrap, mustOutcome(t, "retry-after=1h"))
	f.Journal.Loaded("fleet.yaml")
	f.run()
	slot := f.awaitStage("w-0", provisioning.StageLeaseRequested)
	require.Equal(t, "w", slot.Group)
	require.Equal(t, Rising, slot.Phase)
	require.Equal(t, 1, slot.Rung)
	require.Equal(t, 1, slot.Done)
	require.Equal(t, "CreateLease", slot.Operation)
	require.Equal(t, "R5 await-operation", slot.Rule)
	require.Regexp(t, `^waiting \d+m?[\d.]*s more at most for CreateLease 1/1$`, slot.Why)
	require.WithinDuration(t, time.Now().Add(provisioning.DefaultOperationTimeout), slot.DueAt, 30*time.Second)
	require.WithinDuration(t, time.Now(), slot.StartedAt, 30*time.Second)

	// A bootstrap that cannot start fails the attempt; the next one waits.
	failed := f.await("w-1 failed", func(s Status) bool { return s.Failed == 1 && s.Slots[1].Stage == "Destroyed" })
	require.Equal(t, Gone, failed.Slots[1].Phase)
	require.Equal(t, -1, failed.Slots[1].Rung)
	require.Equal(t, uint64(1), failed.Slots[1].Failed)
	require.Contains(t, failed.Slots[1].Why, "to restart after 1 failure")
	require.WithinDuration(t, time.Now().Add(time.Hour), failed.Slots[1].DueAt, time.Minute)

	f.release("w-0", provisioning.CreateLease)
	slot = f.awaitStage("w-0", provisioning.StageBootstrapRunning)
	require.Equal(t, "Created", slot.Bootstrap)
	before := slot.Done
	f.report("w-0", provisioning.Observation{Kind: provisioning.BootstrapProgress, Stage: provisioning.BootstrapStageSwactorStarting})
	s := f.await("further", func(s Status) bool { return s.Slots[0].Bootstrap == "SwactorStarting" })
	require.Greater(t, s.Slots[0].Done, before)
	require.Less(t, s.Slots[0].Done, s.Slots[0].Steps)
	f.join("w-0")
	s = f.Status()
	require.Equal(t, Ready, s.Slots[0].Phase)
	require.Equal(t, s.Slots[0].Steps, s.Slots[0].Done)
	require.Equal(t, 0.5, s.Progress)
	require.Equal(t, 1, s.Ready)
	require.Equal(t, 2, s.Desired)
	require.Equal(t, 1, s.Held)
	require.Equal(t, "fleet.yaml", s.File)
	require.Equal(t, []string{"New", "LeaseRequested", "LeaseCreated", "EndpointKnown", "BootstrapRunning", "SwactorJoined", "Dormant"}, s.Ladder)

	_, ok := f.Slot("w-7")
	require.False(t, ok)
	one, ok := f.Slot("w-0")
	require.True(t, ok)
	require.Equal(t, "Dormant", one.Stage)
}

// Before the first pass a desired slot is not in the state, and still explained.
func TestSlotThatIsNotBegun(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	slot, ok := f.Slot("w-0")
	require.True(t, ok)
	require.Equal(t, "desired and not begun", slot.Why)
	require.Zero(t, slot.Attempt)
	require.Empty(t, f.Status().Slots)
	require.Zero(t, f.Status().Progress)
	f.fake.Close()
}

// Nothing that a shape gives to machines is told, in any form.
func TestNoSecretIsTold(t *testing.T) {
	g := group("w", 2)
	g.SwarmJoin.JoinTokenRef = "where-" + secret
	f := newTestFleet(t, provisioning.HostConfig{}, g)
	f.run()
	f.join("w-0")
	f.awaitStage("w-1", provisioning.StageBootstrapRunning)
	h := Handler(f.Fleet, false)
	for _, path := range []string{"/", "/status", "/metrics", "/healthz"} {
		response, body := get(t, h, path)
		require.Equal(t, http.StatusOK, response.StatusCode, path)
		require.NotContains(t, body, secret, path)
	}
	require.NotContains(t, firstEvent(t, f), secret)
}

// firstEvent returns the data of the first event of the stream.
func firstEvent(t *testing.T, f *testFleet) string {
	t.Helper()
	server := httptest.NewServer(Handler(f.Fleet, false))
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/events", nil)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, "text/event-stream", response.Header.Get("Content-Type"))
	line, err := bufio.NewReader(response.Body).ReadString('\n')
	require.NoError(t, err)
	data, ok := strings.CutPrefix(line, "data: ")
	require.True(t, ok, line)
	return data
}

func TestEventsAreStatuses(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	f.run()
	f.join("w-0")
	var s Status
	require.NoError(t, json.Unmarshal([]byte(firstEvent(t, f)), &s))
	require.True(t, s.Converged)
	require.Equal(t, "Dormant", s.Slots[0].Stage)
	last := s.Events[len(s.Events)-1]
	require.Equal(t, "ready", last.Text)
	require.Equal(t, Good, last.Level)
}

// A change is sent without waiting for the next full second.
func TestEventsFollowAChange(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	server := httptest.NewServer(Handler(f.Fleet, false))
	defer server.Close()
	response, err := http.Get(server.URL + "/events")
	require.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewReader(response.Body)
	var notes []string
	for range 3 {
		f.Journal.Note(Info, "note %d", len(notes))
		for want := f.Journal.number; ; {
			line, err := lines.ReadString('\n')
			require.NoError(t, err)
			if data, ok := strings.CutPrefix(line, "data: "); ok {
				var s Status
				require.NoError(t, json.Unmarshal([]byte(data), &s))
				if n := len(s.Events); n > 0 && s.Events[n-1].Number == want {
					notes = append(notes, s.Events[n-1].Text)
					break
				}
			}
		}
	}
	require.Equal(t, []string{"note 0", "note 1", "note 2"}, notes)
	f.fake.Close()
}

func TestFollowersAreBounded(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	defer f.fake.Close()
	server := httptest.NewServer(Handler(f.Fleet, false))
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	open := func() int {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/events", nil)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request) // returns with the headers, the first event sends them
		require.NoError(t, err)
		return response.StatusCode
	}
	for range maxFollowers {
		require.Equal(t, http.StatusOK, open())
	}
	require.Equal(t, http.StatusServiceUnavailable, open())
}

func TestOnlyThisComputerIsAnswered(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	defer f.fake.Close()
	for host, code := range map[string]int{
		"127.0.0.1:80": http.StatusOK, "localhost": http.StatusOK, "localhost:8080": http.StatusOK, "[::1]:80": http.StatusOK,
		"evil.example": http.StatusForbidden, "evil.example:80": http.StatusForbidden, "10.0.0.1": http.StatusForbidden,
		"localhost.evil.example": http.StatusForbidden, "": http.StatusForbidden,
	} {
		for _, path := range []string{"/", "/status", "/events", "/metrics", "/healthz"} {
			if code == http.StatusOK && path == "/events" {
				continue // it would not end
			}
			r := httptest.NewRequest(http.MethodGet, path, nil)
			r.Host = host
			w := httptest.NewRecorder()
			Handler(f.Fleet, false).ServeHTTP(w, r)
			require.Equal(t, code, w.Code, "%s %s", host, path)
			if path != "/events" {
				w = httptest.NewRecorder()
				Handler(f.Fleet, true).ServeHTTP(w, r)
				require.Equal(t, http.StatusOK, w.Code, "%s %s", host, path)
			}
		}
	}
}

func TestNothingCanBeChanged(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	defer f.fake.Close()
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
		for _, path := range []string{"/", "/status", "/events", "/drain", "/break"} {
			r := httptest.NewRequest(method, path, nil)
			r.Host = "localhost"
			w := httptest.NewRecorder()
			Handler(f.Fleet, false).ServeHTTP(w, r)
			require.Contains(t, []int{http.StatusMethodNotAllowed, http.StatusNotFound}, w.Code, "%s %s", method, path)
		}
	}
}

func TestServesLoopbackUnlessToldOtherwise(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	defer f.fake.Close()
	for _, address := range []string{"0.0.0.0:0", "[::]:0", "10.1.2.3:0", "example.com:80"} {
		_, err := Serve(address, false, f.Fleet)
		require.ErrorIs(t, err, ErrNotLoopback, address)
	}
	_, err := Serve("8080", false, f.Fleet)
	require.ErrorContains(t, err, `"8080" is not HOST:PORT`)
	for _, address := range []string{":0", "127.0.0.1:0", "localhost:0"} {
		s, err := Serve(address, false, f.Fleet)
		require.NoError(t, err, address)
		require.True(t, s.listener.Addr().(*net.TCPAddr).IP.IsLoopback(), address)
		response, err := http.Get(s.URL() + "healthz")
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, response.StatusCode)
		require.NoError(t, response.Body.Close())
		require.NoError(t, s.Close(t.Context()))
	}
	s, err := Serve(":0", true, f.Fleet)
	require.NoError(t, err)
	require.True(t, s.listener.Addr().(*net.TCPAddr).IP.IsUnspecified())
	require.NoError(t, s.Close(t.Context()))
}

// A page that follows does not hold up the end.
func TestCloseEndsFollowers(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	defer f.fake.Close()
	s, err := Serve(":0", false, f.Fleet)
	require.NoError(t, err)
	response, err := http.Get(s.URL() + "events")
	require.NoError(t, err)
	defer response.Body.Close()
	require.NoError(t, s.Close(t.Context()))
	_, err = io.ReadAll(response.Body)
	require.NoError(t, err, "an orderly end")
}

func TestHealth(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	defer f.fake.Close()
	h := Handler(f.Fleet, false)
	response, body := get(t, h, "/healthz")
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.Equal(t, "ok\n", body)
	f.Ended = func() error { return errors.New("interrupt") }
	response, body = get(t, h, "/healthz")
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	require.Equal(t, "not driving: interrupt\n", body)
	require.Equal(t, "interrupt", f.Status().Ended)
	_, body = get(t, h, "/metrics")
	require.Contains(t, body, "\nlocalfleet_driving 0\n")
}

// The page is one file that asks nobody but its own server, and has no way to
// make markup of a text.
func TestPageIsOneFile(t *testing.T) {
	f := newTestFleet(t, provisioning.HostConfig{}, group("w", 1))
	defer f.fake.Close()
	response, body := get(t, Handler(f.Fleet, false), "/")
	require.Equal(t, "text/html; charset=utf-8", response.Header.Get("Content-Type"))
	require.Regexp(t, `^default-src 'none'; connect-src 'self'; .*script-src 'sha256-[^ ]{44}'; style-src 'sha256-[^ ]{44}'$`,
		response.Header.Get("Content-Security-Policy"))
	for _, way := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "https://", "src=", "@import", "style="} {
		require.NotContains(t, body, way)
	}
	require.Equal(t, 1, strings.Count(body, "<script>"))
	require.Equal(t, 1, strings.Count(body, "<style>"))
}

var (
	sampleLine = regexp.MustCompile(`^([a-z_]+)(\{([a-z_]+="(?:[^"\\]|\\.)*",?)+\})? (-?[0-9.e+-]+)$`)
	typeLine   = regexp.MustCompile(`^# TYPE ([a-z_]+) (gauge|counter|summary)$`)
)

// Every line is of the text format, every family has its type once and before
// its samples, counters end in _total, and a label is escaped.
func TestMetricsAreOfTheTextFormat(t *testing.T) {
	const name = `a"b\c`
	f := newTestFleet(t, provisioning.HostConfig{}, group(name, 1), group("w", 2))
	f.fake.Script("w-0", provisioning.CreateLease, mustOutcome(t, "ambiguous"))
	f.run()
	f.join(provisioning.NewLogicalNodeID(name, 0))
	f.join("w-0")
	f.join("w-1")
	f.await("converged", func(s Status) bool { return s.Converged })
	f.report("w-1", provisioning.Observation{Kind: provisioning.NodeLost, Reason: "test"})
	f.await("lost", func(s Status) bool { return s.Failed == 1 })
	f.join("w-1")
	f.await("converged", func(s Status) bool { return s.Converged })
	f.Journal.Loaded("f")
	f.Journal.Refused("f", errors.New("x"))
	response, body := get(t, Handler(f.Fleet, false), "/metrics")
	require.Equal(t, "text/plain; version=0.0.4; charset=utf-8", response.Header.Get("Content-Type"))
	kinds, seen := make(map[string]string), make(map[string]bool)
	for line := range strings.Lines(body) {
		line = strings.TrimSuffix(line, "\n")
		if found := typeLine.FindStringSubmatch(line); found != nil {
			require.NotContains(t, kinds, found[1])
			kinds[found[1]] = found[2]
			require.Equal(t, found[2] == "counter", strings.HasSuffix(found[1], "_total"), line)
			continue
		}
		if strings.HasPrefix(line, "# HELP ") {
			continue
		}
		found := sampleLine.FindStringSubmatch(line)
		require.NotNil(t, found, line)
		family := found[1]
		if base, _, ok := strings.Cut(family, "_seconds_"); ok {
			family = base + "_seconds"
		}
		require.Contains(t, kinds, family, line)
		series, _, _ := strings.Cut(line, "} ")
		require.False(t, seen[series], line)
		seen[series] = true
	}
	for _, line := range []string{
		`localfleet_info{run="test-run"} 1`,
		`localfleet_converged 1`, `localfleet_desired_nodes 3`, `localfleet_ready_nodes 3`, `localfleet_held_slots 3`,
		`localfleet_progress_ratio 1`, `localfleet_generation 1`, `localfleet_driving 1`, `localfleet_draining 0`,
		`localfleet_slots{group="a\"b\\c",stage="Dormant",phase="ready"} 1`,
		`localfleet_slots{group="w",stage="Dormant",phase="ready"} 2`,
		`localfleet_operations_total{operation="CreateLease"} 5`,
		`localfleet_operation_failures_total{operation="CreateLease",class="Ambiguous"} 1`,
		`localfleet_attempts_total 4`, `localfleet_attempt_failures_total 1`, `localfleet_nodes_lost_total 1`,
		`localfleet_time_to_ready_seconds_count 4`,
		`localfleet_reloads_total{result="accepted"} 1`, `localfleet_reloads_total{result="refused"} 1`,
	} {
		require.Contains(t, body, "\n"+line+"\n")
	}
}

// The journal keeps the latest events and forgets what a slot has been through
// with the slot.
func TestJournalIsBounded(t *testing.T) {
	var j Journal
	for i := range 3 * timeline {
		j.Note(Info, "%d", i)
	}
	require.Len(t, j.events, timeline)
	require.Equal(t, "299", j.events[timeline-1].Text)
	require.Equal(t, uint64(201), j.events[0].Number)
	j.OnEvent(provisioning.Event{Kind: provisioning.EventAttemptStarted, Node: "w-0", Attempt: 1})
	require.Len(t, j.slots, 1)
	j.OnEvent(provisioning.Event{Kind: provisioning.EventReaped, Node: "w-0", Attempt: 1})
	require.Empty(t, j.slots)
}

func TestJournalIsFollowed(t *testing.T) {
	var j Journal
	var told []string
	j.Follow(func(e Event) { told = append(told, e.Text) })
	changed := j.Changed()
	j.Note(Info, "one")
	<-changed
	j.Follow(nil)
	j.Note(Info, "two")
	require.Equal(t, []string{"one"}, told)

	var running sync.WaitGroup // nothing is lost or told twice, whoever writes
	count := 0
	j.Follow(func(Event) { count++ })
	for range 8 {
		running.Go(func() {
			for range 100 {
				j.Note(Info, "x")
			}
		})
	}
	running.Wait()
	j.Follow(nil)
	require.Equal(t, 800, count)
	require.Equal(t, uint64(802), j.number)
}
